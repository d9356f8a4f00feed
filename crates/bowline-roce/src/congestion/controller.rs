//! The seam of congestion control: what decides how much may be in flight, apart from those who
//! send and find losses.
//!
//! ```text
//!   path, queue pair --sent, acknowledged, lost, timed out, spurious, marked--> Controller
//!                    <------------------ window, pacing -----------------------'
//! ```
//! A [path](super::Path) has a controller for what it sends, and one for what READs have asked for,
//! both in bytes on the network. A queue pair has one in packets. Where one of the two limits, the
//! other is [`Unlimited`]. None of them knows which controller it has: a new one is a variant of
//! [`Control`] and a choice in [`Congestion`](super::Congestion).

use std::fmt::Debug;
use std::time::Duration;

use bowline_base::Instant;

use super::cubic::Cubic;
use super::delay::DelayController;
use super::fixed::FixedWindow;
#[cfg(test)]
use super::mock::Mock;
use super::round_trip::RoundTrip;
use super::swift::Swift;
use super::unlimited::Unlimited;

/// Whether the window limits the sender.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Room {
    /// More may leave: the sender has no more, or something else limits it.
    Left,
    /// The window is full.
    Full,
}

impl Room {
    /// Room in a window that is full or not.
    #[inline]
    pub(crate) const fn full_if(full: bool) -> Self {
        if full { Self::Full } else { Self::Left }
    }
}

/// What was acknowledged.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Acknowledged<'a> {
    pub(crate) now: Instant,
    /// In the owner's unit, bytes or packets.
    pub(crate) amount: u64,
    /// How long the newest part of it took, and when that part was sent, if it was sent once.
    pub(crate) sample: Option<(Duration, Instant)>,
    /// The owner's estimate, with the sample.
    pub(crate) round_trip: &'a RoundTrip,
}

/// How much a loss concerns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Extent {
    /// A single packet, which is sent again alone.
    Packet,
    /// Everything in flight is sent again: the peer keeps nothing behind the lost packet.
    Window,
}

/// What was lost: the peer has later packets.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Lost<'a> {
    pub(crate) now: Instant,
    /// When the lost packet was sent.
    pub(crate) sent_at: Instant,
    pub(crate) extent: Extent,
    /// What is in flight, in the owner's unit.
    pub(crate) in_flight: u64,
    /// The owner's estimate.
    pub(crate) round_trip: &'a RoundTrip,
}

/// Silence: nothing of what is in flight was acknowledged for a long time.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TimedOut<'a> {
    pub(crate) now: Instant,
    /// Time-outs in a row, with this one; not 0.
    pub(crate) consecutive: u32,
    /// The owner's estimate.
    pub(crate) round_trip: &'a RoundTrip,
}

/// What a controller takes a loss for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub(crate) enum Cause {
    /// A bad line, or anything else that a smaller window would not mend.
    Chance,
    /// A port that was full.
    Congestion,
}

/// What an acknowledgement has shown about the route.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub(crate) enum Route {
    /// Nothing new.
    Same,
    /// This is the least round trip now.
    Least(Duration),
}

/// Decides how much may be in flight, and how fast it is sent.
pub(crate) trait Controller: Debug {
    /// What may be in flight, in the owner's unit; `None`: not limited.
    fn window(&self) -> Option<u64>;

    /// What may be sent in a smoothed round trip; `None`: the sender is not paced.
    fn pacing(&self) -> Option<f64> {
        None
    }

    /// Takes the size of a full packet, in the owner's unit.
    fn set_packet(&mut self, _packet: u64) {}

    /// So much was sent, in the owner's unit; so the window is full now, or is not.
    fn sent(&mut self, _amount: u64, _room: Room) {}

    /// Something was acknowledged, or a part of what READs have asked for has come.
    fn acknowledged(&mut self, _acknowledged: &Acknowledged<'_>) -> Route {
        Route::Same
    }

    /// A packet was lost.
    fn lost(&mut self, _lost: &Lost<'_>) -> Cause {
        Cause::Chance
    }

    /// The peer was silent for so long that what is in flight is sent again.
    fn timed_out(&mut self, _timed_out: &TimedOut<'_>) {}

    /// The time-out before was spurious: nothing had been lost.
    fn spurious(&mut self) {}

    /// The peer has notified this sender of congestion [CC-7].
    fn marked(&mut self, _now: Instant) {}

    /// Whether a notification makes the window smaller: who does not heed marks must not ask ports
    /// to mark instead of dropping [CC-5].
    fn heeds_marks(&self) -> bool {
        true
    }
}

/// Any controller, without a call by address on the way of each packet.
#[derive(Debug)]
pub(crate) enum Control {
    Unlimited(Unlimited),
    Fixed(FixedWindow),
    Delay(Box<DelayController>),
    Cubic(Box<Cubic>),
    Swift(Box<Swift>),
    #[cfg(test)]
    Mock(Box<Mock>),
}

/// Calls the controller, whichever it is.
macro_rules! each {
    ($control:expr, $inner:ident => $call:expr) => {
        match $control {
            Control::Unlimited($inner) => $call,
            Control::Fixed($inner) => $call,
            Control::Delay($inner) => $call,
            Control::Cubic($inner) => $call,
            Control::Swift($inner) => $call,
            #[cfg(test)]
            Control::Mock($inner) => $call,
        }
    };
}

impl Controller for Control {
    #[inline]
    fn window(&self) -> Option<u64> {
        each!(self, inner => inner.window())
    }

    #[inline]
    fn pacing(&self) -> Option<f64> {
        each!(self, inner => inner.pacing())
    }

    fn set_packet(&mut self, packet: u64) {
        each!(self, inner => inner.set_packet(packet));
    }

    #[inline]
    fn sent(&mut self, amount: u64, room: Room) {
        each!(self, inner => inner.sent(amount, room));
    }

    #[inline]
    fn acknowledged(&mut self, acknowledged: &Acknowledged<'_>) -> Route {
        each!(self, inner => inner.acknowledged(acknowledged))
    }

    fn lost(&mut self, lost: &Lost<'_>) -> Cause {
        each!(self, inner => inner.lost(lost))
    }

    fn timed_out(&mut self, timed_out: &TimedOut<'_>) {
        each!(self, inner => inner.timed_out(timed_out));
    }

    fn spurious(&mut self) {
        each!(self, inner => inner.spurious());
    }

    fn marked(&mut self, now: Instant) {
        each!(self, inner => inner.marked(now));
    }

    #[inline]
    fn heeds_marks(&self) -> bool {
        each!(self, inner => inner.heeds_marks())
    }
}
