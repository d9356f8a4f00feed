//! Congestion control: how much may be in flight to a destination, and how fast it is sent
//! [CC-1] to [CC-8].
//!
//! ```text
//!   queue pairs to one destination
//!     |  sent, acknowledged, lost, marked
//!   path ---- round trip: smoothed, least
//!     |------ controller: bytes in flight, from the delay of queues, losses and marks
//!     '------ pacer: when the next burst may leave
//! ```
//! Within a host a path has no limit, and each queue pair a fixed window of packets: a
//! [controller](controller::Controller) as well.
//!
//! All queue pairs to a destination share one path: a session with a connection per processor is
//! one flow on the network and not many. A queue pair that must wait for the path's window joins a
//! line, and those in line are let through one by one.

mod controller;
mod cubic;
mod delay;
mod fixed;
#[cfg(test)]
mod mock;
mod pacer;
mod path;
mod round_trip;
mod swift;
mod unlimited;
mod usage;

use std::collections::BTreeMap;
use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

use bowline_base::Instant;
use bowline_verbs::{PathStats, Qpn};

pub(crate) use self::controller::{
    Acknowledged, Cause, Control, Controller, Extent, Lost, Room, Route, TimedOut,
};
use self::cubic::Cubic;
use self::delay::DelayController;
use self::fixed::FixedWindow;
#[cfg(test)]
pub(crate) use self::mock::{Call, Mock};
pub(crate) use self::path::Path;
pub(crate) use self::round_trip::{DeviationWeight, RoundTrip};
use self::swift::Swift;
pub(crate) use self::unlimited::Unlimited;

/// How the window of packets in flight is determined.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Congestion {
    /// `Delay` between hosts, and `Fixed(240)` within one.
    #[default]
    Auto,
    /// By the delay of queues, losses and congestion marks, for all queue pairs to a destination
    /// together.
    Delay,
    /// A number of packets of each queue pair, 16 to 4096, that only losses reduce.
    Fixed(u32),
    /// As TCP does it (RFC 9438), for all queue pairs to a destination together. For comparison:
    /// queues are filled until packets are lost.
    Cubic,
    /// As Swift does it (SIGCOMM 2020), for all queue pairs to a destination together. For
    /// comparison: a target of 25 us, that of fast networks.
    Swift,
}

impl fmt::Display for Congestion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Delay => f.write_str("delay"),
            Self::Fixed(packets) => write!(f, "fixed:{packets}"),
            Self::Cubic => f.write_str("cubic"),
            Self::Swift => f.write_str("swift"),
        }
    }
}

impl FromStr for Congestion {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let fixed = text.strip_prefix("fixed:").map(str::parse);
        match (text, fixed) {
            ("auto", _) => Ok(Self::Auto),
            ("delay", _) => Ok(Self::Delay),
            ("cubic", _) => Ok(Self::Cubic),
            ("swift", _) => Ok(Self::Swift),
            (_, Some(Ok(packets @ 16..=4096))) => Ok(Self::Fixed(packets)),
            _ => Err("must be auto, delay, cubic, swift, or fixed:PACKETS with 16 to 4096 packets"),
        }
    }
}

/// Packets of the window within a host.
const LOCAL_PACKETS: u32 = 240;

impl Congestion {
    /// How the window of a connection between two addresses is determined. Within a host there is
    /// no port that queues: what delays packets there is the processor, and a window that follows
    /// that delay would only make threads sleep.
    pub(crate) fn between(self, local: IpAddr, remote: IpAddr) -> Self {
        match self {
            Self::Auto if remote == local || remote.is_loopback() => Self::Fixed(LOCAL_PACKETS),
            Self::Auto => Self::Delay,
            chosen => chosen,
        }
    }

    /// Makes the controller of a path, in bytes.
    fn of_path(self, now: Instant) -> Control {
        match self {
            Self::Delay => Control::Delay(Box::new(DelayController::new(now))),
            Self::Cubic => Control::Cubic(Box::new(Cubic::new(now))),
            Self::Swift => Control::Swift(Box::new(Swift::new(now))),
            Self::Auto | Self::Fixed(_) => Control::Unlimited(Unlimited),
        }
    }

    /// Makes the controller of a queue pair, in packets.
    pub(crate) fn of_queue_pair(self) -> Control {
        match self {
            Self::Fixed(packets) => Control::Fixed(FixedWindow::new(packets)),
            Self::Auto | Self::Delay | Self::Cubic | Self::Swift => Control::Unlimited(Unlimited),
        }
    }
}

impl Control {
    /// A controller that lets nothing leave: the queue pair has not started.
    pub(crate) const fn closed() -> Self {
        Self::Fixed(FixedWindow::closed())
    }
}

/// Paths without a queue pair that are kept: what they have learned holds for the next one.
const UNUSED_MAX: usize = 256;

/// Index of a path.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct PathId(usize);

/// All paths of a device.
#[derive(Debug)]
pub(crate) struct Paths {
    congestion: Congestion,
    /// The first one is that of queue pairs without a peer, and limits nothing.
    paths: Vec<Path>,
    by_addr: BTreeMap<IpAddr, PathId>,
    /// Number of paths with an address that no queue pair uses.
    unused: usize,
}

impl Paths {
    pub(crate) fn new(congestion: Congestion) -> Self {
        let nowhere = IpAddr::from([0, 0, 0, 0]);
        let none = Path::new(nowhere, Congestion::Fixed(0), Instant::from_nanos(0));
        Self { congestion, paths: vec![none], by_addr: BTreeMap::new(), unused: 0 }
    }

    /// Returns the path to an address, for one more queue pair of the address `local`.
    pub(crate) fn join(&mut self, now: Instant, local: IpAddr, addr: IpAddr) -> PathId {
        if let Some(&id) = self.by_addr.get(&addr) {
            if self.get_mut(id).join(now) {
                self.unused -= 1;
            }
            return id;
        }
        let mut path = Path::new(addr, self.congestion.between(local, addr), now);
        path.join(now);
        let id = if self.unused < UNUSED_MAX { None } else { self.forget_one() };
        let id = match id {
            Some(id) => {
                *self.get_mut(id) = path;
                id
            }
            None => {
                self.paths.push(path);
                PathId(self.paths.len() - 1)
            }
        };
        self.by_addr.insert(addr, id);
        id
    }

    /// Forgets the unused path that was used least recently.
    fn forget_one(&mut self) -> Option<PathId> {
        let unused = self.paths.iter().enumerate().skip(1).filter(|(_, path)| path.is_unused());
        let (at, path) = unused.min_by_key(|(_, path)| path.used_at())?;
        self.by_addr.remove(&path.addr());
        self.unused -= 1;
        Some(PathId(at))
    }

    /// Notes that a queue pair does not use the path any more: of its packets, and of what it has
    /// asked for, so many bytes will not be acknowledged or come.
    pub(crate) fn leave(&mut self, now: Instant, id: PathId, qpn: Qpn, bytes: (u64, u64)) {
        let path = self.get_mut(id);
        path.gone(bytes.0);
        path.answered(now, bytes.1, None);
        path.waiting.retain(|waiting| *waiting != qpn.0);
        if id != PathId::default() && path.leave() {
            self.unused += 1;
        }
    }

    #[inline]
    pub(crate) fn get(&self, id: PathId) -> &Path {
        &self.paths[id.0]
    }

    #[inline]
    pub(crate) fn get_mut(&mut self, id: PathId) -> &mut Path {
        &mut self.paths[id.0]
    }

    /// Statistics of all paths in use, in the order of their addresses.
    pub(crate) fn stats(&self) -> impl Iterator<Item = PathStats> {
        self.by_addr
            .values()
            .map(|id| self.get(*id))
            .filter(|path| !path.is_unused())
            .map(Path::stats)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read_again_and_nothing_else() {
        let all = [Congestion::Auto, Congestion::Delay, Congestion::Cubic, Congestion::Swift];
        for how in all.into_iter().chain([16, 240, 4096].map(Congestion::Fixed)) {
            assert_eq!(how.to_string().parse(), Ok(how));
        }
        for text in ["", "fixed", "fixed:", "fixed:15", "fixed:4097", "fixed:-1", "Delay", "reno"] {
            assert!(text.parse::<Congestion>().is_err(), "{text}");
        }
    }

    // tests [CC-5]
    #[test]
    fn who_was_chosen_controls_the_path_or_its_queue_pairs() {
        let now = Instant::from_nanos(1);
        for how in [Congestion::Delay, Congestion::Cubic, Congestion::Swift] {
            assert!(how.of_path(now).window().is_some(), "{how}");
            assert_eq!(how.of_queue_pair().window(), None, "{how}");
        }
        // Who does not heed marks sends no ECT.
        let marks =
            [(Congestion::Delay, true), (Congestion::Cubic, true), (Congestion::Swift, false)];
        for (how, heeds) in marks.into_iter().chain([(Congestion::Fixed(64), false)]) {
            assert_eq!(how.of_path(now).heeds_marks(), heeds, "{how}");
        }
        assert_eq!(Congestion::Fixed(64).of_path(now).window(), None);
        assert_eq!(Congestion::Fixed(64).of_queue_pair().window(), Some(64));
    }
}
