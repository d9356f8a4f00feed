//! The data path in: taking in what has arrived.
//!
//! Each socket is looked at in one of two ways. Where packets are short, or come from many, as many
//! buffers are filled as there are, with one call. Where long messages come, buffers are taken one
//! by one, and each that is likely to go on with the message before it is received where that
//! belongs, which saves copying it.

use core::sync::atomic::Ordering;
use std::sync::{PoisonError, TryLockError};

use bowline_base::clock;
use bowline_roce::{Amid, IdentHint, Landed, Run};
use rustix::io::Errno;

use crate::capture::{Capture, Datagram, Way};
use crate::loss::Loss;
use crate::shared::Shared;
use crate::sys::{Arrival, Inbox};
use crate::udp::Endpoint;

/// A buffer of so many bytes is a short run of packets.
const LITTLE: usize = 16 << 10;

/// Buffers taken at once when they hold long runs of packets: more of them would be so much that
/// the peer runs out of window before it gets an acknowledgement.
const LONG_RUNS: usize = 8;

/// After a buffer of so many bytes, more are likely to be there: they are taken with one call.
const STREAM: usize = 8 << 10;

/// After packets of a long message that have landed, so many buffers are taken one by one: any may
/// begin another.
const LANDS_AGAIN: usize = 16;

/// Packets of so many bytes are handled sooner than what they are about comes from memory.
const SHORT: usize = 512;

/// Of shorter packets copies cost less than the many pieces that the system has to fill.
const LANDS_FROM: usize = 2048;

/// When the next of a message was looked for in vain so often, it is waited for as for any.
const PATIENCE: usize = 64;

/// After a long buffer that was not what was expected, so many are taken as ever: several peers may
/// be at it in turn.
const MISSED: usize = 8;

/// What a look at the network uses.
#[derive(Debug)]
pub(crate) struct Rx {
    inbox: Inbox,
    turns: Vec<Turn>,
    /// The socket to begin with; there may be none of this number.
    next: usize,
}

impl Rx {
    pub(crate) fn new(sockets: usize) -> Self {
        Self { inbox: Inbox::new(), turns: vec![Turn::default(); sockets], next: 0 }
    }
}

/// How a socket is looked at next.
#[derive(Clone, Copy, Debug, Default)]
struct Turn {
    /// Buffers that are filled with one call, since the last look found something there; 0: it did
    /// not.
    most: usize,
    /// The long message that the last buffer ended amid.
    amid: Option<Amid>,
    /// Buffers of it that were looked for in vain since.
    vain: usize,
    /// So many buffers are taken one by one, since long messages land.
    single: usize,
    /// In so many none does.
    missed: usize,
    verifies: Verifies,
}

/// Whether the system verifies checksums before it copies anything [RX-13].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Verifies {
    /// It was not told to, since no long message has come.
    #[default]
    No,
    /// It does with what comes now; of what had come before so many bytes may be waiting still.
    Soon(usize),
    Always,
    /// It cannot.
    Never,
}

impl Turn {
    /// A buffer was taken in, after which a message is under way or none. Of peers whose packets
    /// are not merged nothing lands, since it costs more to take them one by one; but a single
    /// packet ends nothing.
    fn goes_on(&mut self, amid: Option<Amid>, merged: bool) {
        let amid = amid.filter(|amid| amid.payload >= LANDS_FROM);
        (self.amid, self.vain) = (amid.filter(|_| merged || self.amid == amid), 0);
    }

    /// A long message is under way: the next buffers are taken one by one, as soon as they may.
    fn begin(&mut self, endpoint: &Endpoint) {
        match self.verifies {
            Verifies::No if endpoint.verify_first() => {
                self.verifies = Verifies::Soon(endpoint.receive_buffer());
            }
            Verifies::No => self.verifies = Verifies::Never,
            Verifies::Always => self.single = LANDS_AGAIN,
            Verifies::Soon(_) | Verifies::Never => {}
        }
    }

    /// So many bytes were received.
    const fn took(&mut self, bytes: usize) {
        if let Verifies::Soon(left) = self.verifies {
            let left = left.saturating_sub(bytes);
            self.verifies = if left > 0 { Verifies::Soon(left) } else { Verifies::Always };
        }
    }

    /// Nothing waits.
    const fn is_drained(&mut self) {
        self.took(usize::MAX);
    }
}

/// What a look at the network brought.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Came {
    Nothing,
    /// Another thread is looking, and takes what there is.
    ToAnother,
    Something,
}

/// The datagrams of a buffer, and what is known of their identifications.
fn split<'a>(arrival: &Arrival, bytes: &'a [u8]) -> impl Iterator<Item = (IdentHint, &'a [u8])> {
    let (alone, segments) = match arrival.segment {
        None => (Some((IdentHint::Unknown, bytes)), bytes.chunks(1).take(0)),
        Some(segment) => (None, bytes.chunks(segment).take(usize::MAX)),
    };
    // A peer like this one has numbered the segments of a burst from 0 [ICRC-34].
    let ident = |k| IdentHint::Exact(u16::try_from(k).unwrap_or(u16::MAX));
    alone.into_iter().chain(segments.enumerate().map(move |(k, datagram)| (ident(k), datagram)))
}

impl Shared {
    /// Takes in what has arrived, at most one batch of each socket. What that calls for is to be
    /// sent by [`flush`](Self::flush): acknowledgements once for the whole batch [PERF-6].
    pub(crate) fn pump(&self) -> Came {
        self.take_turns(false)
    }

    /// The same for a program that looks again and again: where something comes at every look, it
    /// is given one socket's at a time, so that what it answers is of one peer and fills bursts.
    pub(crate) fn pump_in_turn(&self) -> Came {
        self.take_turns(true)
    }

    fn take_turns(&self, one: bool) -> Came {
        let mut rx = match self.rx.try_lock() {
            Ok(rx) => rx,
            Err(TryLockError::Poisoned(rx)) => rx.into_inner(),
            Err(TryLockError::WouldBlock) => return Came::ToAnother,
        };
        let Rx { inbox, turns, next } = &mut *rx;
        let mut came = Came::Nothing;
        // What is captured, or lost on purpose, is looked at first.
        let lands = self.capture.is_none() && self.loss.is_none() && !self.cuts.any();
        let first = *next;
        for at in (first..self.endpoints.len()).chain(0..first) {
            let (endpoint, turn) = (&self.endpoints[at], &mut turns[at]);
            let in_a_row = turn.most > 0;
            turn.most = if turn.single > 0 && lands {
                self.look_one_by_one(endpoint, inbox, turn)
            } else {
                self.look_for_many(endpoint, inbox, turn)
            };
            if turn.most > 0 {
                came = Came::Something;
                if one && in_a_row {
                    *next = at + 1;
                    break;
                }
            }
        }
        if came == Came::Something {
            self.mark_unsent();
        }
        came
    }

    /// Takes in what has come at a socket; returns how many buffers to fill with one call next, 0
    /// if nothing has.
    fn look_for_many(&self, endpoint: &Endpoint, inbox: &mut Inbox, turn: &mut Turn) -> usize {
        let received = match turn.most {
            0 => self.receive_first(endpoint, inbox),
            most => endpoint.receive_many(inbox, most),
        };
        // Errors of a UDP socket tell of packets sent earlier, which resends take care of.
        if let Err(errno) = received {
            self.stats.empty_looks.inc();
            if errno == Errno::AGAIN {
                turn.is_drained();
            }
            return 0;
        }
        self.stats.receives.inc();
        self.take_in(endpoint, inbox, turn);
        if turn.amid.is_some() && turn.missed == 0 {
            turn.begin(endpoint);
        }
        // Whoever finds something whenever it looks is behind: taking what has come meanwhile with
        // one call, and answering all of it together, lets it catch up.
        let mut all = inbox.arrivals().flatten();
        if all.any(|(buffer, _)| buffer.len > LITTLE) { LONG_RUNS } else { usize::MAX }
    }

    /// The same one by one, so that each buffer that goes on with a long message is received where
    /// that belongs.
    fn look_one_by_one(&self, endpoint: &Endpoint, inbox: &mut Inbox, turn: &mut Turn) -> usize {
        let mut most = 0;
        for _ in 0..LONG_RUNS {
            let amid = turn.amid.filter(|_| turn.missed == 0);
            let landed = amid.and_then(|amid| self.land(endpoint, inbox, turn, amid));
            let received = landed.unwrap_or_else(|| {
                turn.single = turn.single.saturating_sub(1);
                let received = endpoint.receive_one(inbox).is_ok();
                if received {
                    self.take_in(endpoint, inbox, turn);
                }
                received
            });
            if !received {
                self.stats.empty_looks.inc();
                break;
            }
            self.stats.receives.inc();
            most = LONG_RUNS;
        }
        most
    }

    /// Receives a buffer where what goes on with a message belongs, and takes it in, whatever it
    /// is; false when there was none. `None`: nothing was tried.
    fn land(
        &self,
        endpoint: &Endpoint,
        inbox: &mut Inbox,
        turn: &mut Turn,
        amid: Amid,
    ) -> Option<bool> {
        let now = clock::now();
        let mut st = self.lock();
        if st.stop {
            // The memory of a closed device is its program's again.
            return None;
        }
        let (mut packets, mut bytes, mut merged) = (0, 0, false);
        let landed = st.core.land(now, amid, |landing| {
            let (len, arrival) = endpoint.receive_landing(inbox, landing).ok()?;
            let segment = arrival.and_then(|arrival| arrival.segment);
            if arrival.is_none() {
                self.stats.unusable.inc();
            }
            packets = len.div_ceil(segment.unwrap_or(len).max(1)) as u64;
            (bytes, merged) = (len, segment.is_some());
            let from = arrival.map(|arrival| arrival.from);
            Some(Run { from, to: endpoint.at().ip(), segment, len, aside: inbox.aside() })
        });
        let landed = match landed {
            Landed::NoPlace => {
                turn.amid = None;
                return None;
            }
            Landed::Nothing => {
                turn.vain += 1;
                turn.amid = turn.amid.filter(|_| turn.vain < PATIENCE);
                return Some(false);
            }
            Landed::Packets(landed) => landed as u64,
        };
        turn.goes_on(st.core.amid(), merged);
        self.settle(&mut st);
        drop(st);
        self.unanswered.fetch_add(packets, Ordering::Relaxed);
        self.stats.packets_received.add(packets);
        self.stats.bytes_received.add(bytes as u64);
        self.stats.packets_landed.add(landed);
        if merged {
            self.stats.gro_buffers.inc();
        }
        if landed > 0 {
            turn.single = LANDS_AGAIN;
        } else {
            self.stats.landings_missed.inc();
            if bytes > LITTLE {
                (turn.single, turn.missed) = (0, MISSED);
            }
        }
        Some(true)
    }

    /// Receives one buffer, and more if it is long.
    fn receive_first(&self, endpoint: &Endpoint, inbox: &mut Inbox) -> Result<(), Errno> {
        let bytes = endpoint.receive_one(inbox)?;
        if bytes >= STREAM {
            match endpoint.receive_more(inbox, LONG_RUNS) {
                Ok(()) => self.stats.receives.inc(),
                Err(_) => self.stats.empty_looks.inc(),
            }
        }
        Ok(())
    }

    /// Gives the core all datagrams of a batch.
    fn take_in(&self, endpoint: &Endpoint, inbox: &Inbox, turn: &mut Turn) {
        let to = endpoint.at().ip();
        if let Some(capture) = &self.capture {
            let mut capture = capture.lock().unwrap_or_else(PoisonError::into_inner);
            self.record_arrivals(&mut capture, endpoint, inbox);
        }
        let (mut packets, mut total, mut merged) = (0, 0, false);
        let now = clock::now();
        let mut st = self.lock();
        if st.stop {
            // The memory of a closed device is its program's again.
            return;
        }
        for arrival in inbox.arrivals() {
            let Some((arrival, bytes)) = arrival else {
                self.stats.unusable.inc();
                continue;
            };
            turn.missed = turn.missed.saturating_sub(1);
            merged = arrival.segment.is_some();
            if merged {
                self.stats.gro_buffers.inc();
            }
            if let Some(segment) = arrival.segment.filter(|segment| *segment <= SHORT) {
                st.core.expect(bytes.chunks(segment));
            }
            total += bytes.len() as u64;
            let cut = self.cuts.between(to, arrival.from.ip());
            let datagrams = split(&arrival, bytes).inspect(|_| packets += 1).filter(|_| {
                let dropped = cut || self.loss.as_ref().is_some_and(Loss::strikes);
                if dropped {
                    self.stats.packets_dropped.inc();
                }
                !dropped
            });
            st.core.handle_datagrams(now, arrival.from, to, datagrams);
        }
        turn.goes_on(st.core.amid(), merged);
        turn.took(usize::try_from(total).unwrap_or(usize::MAX));
        self.settle(&mut st);
        drop(st);
        self.unanswered.fetch_add(packets, Ordering::Relaxed);
        self.stats.packets_received.add(packets);
        self.stats.bytes_received.add(total);
    }

    fn record_arrivals(&self, capture: &mut Capture, endpoint: &Endpoint, inbox: &Inbox) {
        let to = endpoint.at();
        for (arrival, bytes) in inbox.arrivals().flatten() {
            for (hint, payload) in split(&arrival, bytes) {
                let likely = match hint {
                    IdentHint::Exact(ident) => ident,
                    IdentHint::Unknown => 0,
                };
                let (from, to) = (arrival.from, to);
                let ident = capture.solve(from, to.ip(), likely, payload);
                self.record(capture, Way::In, &Datagram { from, to, tos: 0, ident, payload });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::{IpAddr, UdpSocket};

    use bowline_wire::roce::UDP_PORT;

    use super::*;

    /// [RX-13]: not before all is taken that was there when the system was told to verify first.
    #[test]
    fn nothing_lands_before_what_waits_is_taken() {
        let end = Endpoint::open("127.77.1.5".parse().unwrap(), None, 1 << 20).unwrap();
        let waits = end.receive_buffer();
        assert!(waits >= 1 << 20);
        let begun = || {
            let mut turn = Turn::default();
            turn.took(waits);
            turn.begin(&end);
            assert_eq!((turn.verifies, turn.single), (Verifies::Soon(waits), 0));
            turn
        };
        let mut turn = begun();
        turn.took(waits - 1);
        turn.begin(&end);
        assert_eq!((turn.verifies, turn.single), (Verifies::Soon(1), 0));
        turn.took(1);
        turn.begin(&end);
        assert_eq!((turn.verifies, turn.single), (Verifies::Always, LANDS_AGAIN));
        let mut turn = begun();
        turn.is_drained();
        turn.begin(&end);
        assert_eq!((turn.verifies, turn.single), (Verifies::Always, LANDS_AGAIN));
    }

    #[test]
    fn sockets_take_turns_where_something_comes_at_every_look() {
        let ips = [[127, 77, 1, 1], [127, 77, 1, 2]].map(IpAddr::from);
        let shared = Shared::unshared(&ips);
        let peer = UdpSocket::bind("127.77.1.3:0").unwrap();
        let packets = |to: usize, count: usize| {
            for _ in 0..count {
                peer.send_to(b"no packet of RoCE", (ips[to], UDP_PORT)).unwrap();
            }
        };
        let look = |how: fn(&Shared) -> Came| {
            let before = shared.stats.snapshot().packets_received;
            let came = how(&shared);
            let taken = shared.stats.snapshot().packets_received - before;
            assert_eq!(came == Came::Something, taken > 0);
            taken
        };
        assert_eq!(look(Shared::pump_in_turn), 0);
        // The first time something comes, both are looked at.
        packets(0, 1);
        packets(1, 1);
        assert_eq!(look(Shared::pump_in_turn), 2);
        packets(0, 1);
        packets(1, 4);
        assert_eq!(look(Shared::pump_in_turn), 1);
        packets(0, 1);
        assert_eq!(look(Shared::pump_in_turn), 4);
        packets(1, 2);
        assert_eq!(look(Shared::pump_in_turn), 1);
        // Who does not come back is given all.
        packets(0, 1);
        packets(1, 2);
        assert_eq!(look(Shared::pump), 5);
        // Where nothing has come the next is looked at.
        packets(1, 1);
        assert_eq!(look(Shared::pump_in_turn), 1);
        packets(0, 1);
        assert_eq!(look(Shared::pump_in_turn), 1);
        assert_eq!(look(Shared::pump_in_turn), 0);
    }
}
