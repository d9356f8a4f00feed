//! The data path in: taking in what has arrived.
//!
//! Each socket is looked at in one of two ways. Where packets are short, or come from many, as many
//! buffers are filled as there are, with one call. Where long messages come, buffers are taken one
//! by one, and each that is likely to go on with the message before it is received where that
//! belongs, which saves copying it.

use core::sync::atomic::Ordering;
use std::sync::{PoisonError, TryLockError};

use bowline_base::clock;
use bowline_roce::{GroBuffer, IdentHint, OpenMessage, PlacementOutcome};
use rustix::io::Errno;

use crate::capture::{Capture, Datagram, Way};
use crate::loss::Loss;
use crate::shared::Shared;
use crate::sys::{Arrival, Inbox};
use crate::udp::Endpoint;

/// A buffer of so many bytes is a short run of packets.
const SHORT_RUN_BYTES: usize = 16 << 10;

/// Buffers taken at once when they hold long runs of packets: more of them would be so much that
/// the peer runs out of window before it gets an acknowledgement.
const LONG_RUNS: usize = 8;

/// After a buffer of so many bytes, more are likely to be there: they are taken with one call.
const STREAM_BYTES: usize = 8 << 10;

/// After packets of a long message that have landed, so many buffers are taken one by one: any may
/// begin another.
const IN_PLACE_BUFFERS: usize = 16;

/// Packets of so many bytes are handled sooner than what they are about comes from memory.
const PREFETCH_PACKET_MAX: usize = 512;

/// Of shorter packets copies cost less than the many pieces that the system has to fill.
const IN_PLACE_PAYLOAD_MIN: usize = 2048;

/// When the next of a message was looked for in vain so often, it is waited for as for any.
const EMPTY_RECEIVES_MAX: usize = 64;

/// After a long buffer that was not what was expected, so many are taken as ever: several peers may
/// be at it in turn.
const BATCHED_AFTER_MISS: usize = 8;

/// What a look at the network uses.
#[derive(Debug)]
pub(crate) struct Rx {
    inbox: Inbox,
    sockets: Vec<SocketState>,
    /// The socket to begin with; there may be none of this number.
    next: usize,
}

impl Rx {
    pub(crate) fn new(sockets: usize) -> Self {
        Self { inbox: Inbox::new(), sockets: vec![SocketState::default(); sockets], next: 0 }
    }
}

/// How a socket is looked at next.
#[derive(Clone, Copy, Debug, Default)]
struct SocketState {
    /// Buffers that are filled with one call, since the last look found something there; 0: it did
    /// not.
    most: usize,
    /// The long message that the last buffer ended amid.
    open_message: Option<OpenMessage>,
    /// Buffers of it that were looked for in vain since.
    empty_receives: usize,
    /// So many buffers are taken one by one, since long messages land.
    single_left: usize,
    /// In so many none does.
    batched_left: usize,
    checksum_first: ChecksumFirst,
}

/// Whether the system verifies checksums before it copies anything [RX-13].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum ChecksumFirst {
    /// It was not told to, since no long message has come.
    #[default]
    No,
    /// It does with what comes now; of what had come before so many bytes may be waiting still.
    Soon(usize),
    Always,
    /// It cannot.
    Never,
}

impl SocketState {
    /// A buffer was taken in, after which a message is under way or none. Of peers whose packets
    /// are not merged nothing lands, since it costs more to take them one by one; but a single
    /// packet ends nothing.
    fn note_received(&mut self, open_message: Option<OpenMessage>, merged: bool) {
        let open_message =
            open_message.filter(|open_message| open_message.payload >= IN_PLACE_PAYLOAD_MIN);
        (self.open_message, self.empty_receives) =
            (open_message.filter(|_| merged || self.open_message == open_message), 0);
    }

    /// A long message is under way: the next buffers are taken one by one, as soon as they may.
    fn start_single(&mut self, endpoint: &Endpoint) {
        match self.checksum_first {
            ChecksumFirst::No if endpoint.verify_first() => {
                self.checksum_first = ChecksumFirst::Soon(endpoint.receive_buffer());
            }
            ChecksumFirst::No => self.checksum_first = ChecksumFirst::Never,
            ChecksumFirst::Always => self.single_left = IN_PLACE_BUFFERS,
            ChecksumFirst::Soon(_) | ChecksumFirst::Never => {}
        }
    }

    /// So many bytes were received.
    const fn note_bytes(&mut self, bytes: usize) {
        if let ChecksumFirst::Soon(left) = self.checksum_first {
            let left = left.saturating_sub(bytes);
            self.checksum_first =
                if left > 0 { ChecksumFirst::Soon(left) } else { ChecksumFirst::Always };
        }
    }

    /// Nothing waits.
    const fn note_drained(&mut self) {
        self.note_bytes(usize::MAX);
    }
}

/// What a look at the network brought.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PumpResult {
    Nothing,
    /// Another thread is looking, and takes what there is.
    Busy,
    Received,
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
    pub(crate) fn pump(&self) -> PumpResult {
        self.pump_sockets(false)
    }

    /// The same for a program that looks again and again: where something comes at every look, it
    /// is given one socket's at a time, so that what it answers is of one peer and fills bursts.
    pub(crate) fn pump_one_socket(&self) -> PumpResult {
        self.pump_sockets(true)
    }

    fn pump_sockets(&self, one: bool) -> PumpResult {
        let mut rx = match self.rx.try_lock() {
            Ok(rx) => rx,
            Err(TryLockError::Poisoned(rx)) => rx.into_inner(),
            Err(TryLockError::WouldBlock) => return PumpResult::Busy,
        };
        let Rx { inbox, sockets, next } = &mut *rx;
        let mut result = PumpResult::Nothing;
        // What is captured, or lost on purpose, is looked at first.
        let in_place_allowed = self.capture.is_none() && self.loss.is_none() && !self.cuts.any();
        let first = *next;
        for at in (first..self.endpoints.len()).chain(0..first) {
            let (endpoint, socket) = (&self.endpoints[at], &mut sockets[at]);
            let in_a_row = socket.most > 0;
            socket.most = if socket.single_left > 0 && in_place_allowed {
                self.receive_one_by_one(endpoint, inbox, socket)
            } else {
                self.receive_batch(endpoint, inbox, socket)
            };
            if socket.most > 0 {
                result = PumpResult::Received;
                if one && in_a_row {
                    *next = at + 1;
                    break;
                }
            }
        }
        if result == PumpResult::Received {
            self.mark_unsent();
        }
        result
    }

    /// Takes in what has come at a socket; returns how many buffers to fill with one call next, 0
    /// if nothing has.
    fn receive_batch(
        &self,
        endpoint: &Endpoint,
        inbox: &mut Inbox,
        socket: &mut SocketState,
    ) -> usize {
        let received = match socket.most {
            0 => self.receive_first(endpoint, inbox),
            most => endpoint.receive_many(inbox, most),
        };
        // Errors of a UDP socket tell of packets sent earlier, which resends take care of.
        if let Err(errno) = received {
            self.stats.empty_looks.inc();
            if errno == Errno::AGAIN {
                socket.note_drained();
            }
            return 0;
        }
        self.stats.receives.inc();
        self.take_in(endpoint, inbox, socket);
        if socket.open_message.is_some() && socket.batched_left == 0 {
            socket.start_single(endpoint);
        }
        // Whoever finds something whenever it looks is behind: taking what has come meanwhile with
        // one call, and answering all of it together, lets it catch up.
        let mut all = inbox.arrivals().flatten();
        if all.any(|(buffer, _)| buffer.len > SHORT_RUN_BYTES) { LONG_RUNS } else { usize::MAX }
    }

    /// The same one by one, so that each buffer that goes on with a long message is received where
    /// that belongs.
    fn receive_one_by_one(
        &self,
        endpoint: &Endpoint,
        inbox: &mut Inbox,
        socket: &mut SocketState,
    ) -> usize {
        let mut most = 0;
        for _ in 0..LONG_RUNS {
            let open_message = socket.open_message.filter(|_| socket.batched_left == 0);
            let landed = open_message.and_then(|open_message| {
                self.receive_in_place(endpoint, inbox, socket, open_message)
            });
            let received = landed.unwrap_or_else(|| {
                socket.single_left = socket.single_left.saturating_sub(1);
                let received = endpoint.receive_one(inbox).is_ok();
                if received {
                    self.take_in(endpoint, inbox, socket);
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
    fn receive_in_place(
        &self,
        endpoint: &Endpoint,
        inbox: &mut Inbox,
        socket: &mut SocketState,
        open_message: OpenMessage,
    ) -> Option<bool> {
        let now = clock::now();
        let mut st = self.lock();
        if st.stop {
            // The memory of a closed device is its program's again.
            return None;
        }
        let (mut packets, mut bytes, mut merged) = (0, 0, false);
        let landed = st.core.receive_in_place(now, open_message, |placement| {
            let (len, arrival) = endpoint.receive_in_place(inbox, placement).ok()?;
            let segment = arrival.and_then(|arrival| arrival.segment);
            if arrival.is_none() {
                self.stats.unusable.inc();
            }
            packets = len.div_ceil(segment.unwrap_or(len).max(1)) as u64;
            (bytes, merged) = (len, segment.is_some());
            let from = arrival.map(|arrival| arrival.from);
            Some(GroBuffer { from, to: endpoint.at().ip(), segment, len, framing: inbox.framing() })
        });
        let landed = match landed {
            PlacementOutcome::NoTarget => {
                socket.open_message = None;
                return None;
            }
            PlacementOutcome::Nothing => {
                socket.empty_receives += 1;
                socket.open_message =
                    socket.open_message.filter(|_| socket.empty_receives < EMPTY_RECEIVES_MAX);
                return Some(false);
            }
            PlacementOutcome::Packets(landed) => landed as u64,
        };
        socket.note_received(st.core.open_message(), merged);
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
            socket.single_left = IN_PLACE_BUFFERS;
        } else {
            self.stats.landings_missed.inc();
            if bytes > SHORT_RUN_BYTES {
                (socket.single_left, socket.batched_left) = (0, BATCHED_AFTER_MISS);
            }
        }
        Some(true)
    }

    /// Receives one buffer, and more if it is long.
    fn receive_first(&self, endpoint: &Endpoint, inbox: &mut Inbox) -> Result<(), Errno> {
        let bytes = endpoint.receive_one(inbox)?;
        if bytes >= STREAM_BYTES {
            match endpoint.receive_more(inbox, LONG_RUNS) {
                Ok(()) => self.stats.receives.inc(),
                Err(_) => self.stats.empty_looks.inc(),
            }
        }
        Ok(())
    }

    /// Gives the core all datagrams of a batch.
    fn take_in(&self, endpoint: &Endpoint, inbox: &Inbox, socket: &mut SocketState) {
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
            socket.batched_left = socket.batched_left.saturating_sub(1);
            merged = arrival.segment.is_some();
            if merged {
                self.stats.gro_buffers.inc();
            }
            if let Some(segment) = arrival.segment.filter(|segment| *segment <= PREFETCH_PACKET_MAX)
            {
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
        socket.note_received(st.core.open_message(), merged);
        socket.note_bytes(usize::try_from(total).unwrap_or(usize::MAX));
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
            let mut socket = SocketState::default();
            socket.note_bytes(waits);
            socket.start_single(&end);
            assert_eq!(
                (socket.checksum_first, socket.single_left),
                (ChecksumFirst::Soon(waits), 0)
            );
            socket
        };
        let mut socket = begun();
        socket.note_bytes(waits - 1);
        socket.start_single(&end);
        assert_eq!((socket.checksum_first, socket.single_left), (ChecksumFirst::Soon(1), 0));
        socket.note_bytes(1);
        socket.start_single(&end);
        assert_eq!(
            (socket.checksum_first, socket.single_left),
            (ChecksumFirst::Always, IN_PLACE_BUFFERS)
        );
        let mut socket = begun();
        socket.note_drained();
        socket.start_single(&end);
        assert_eq!(
            (socket.checksum_first, socket.single_left),
            (ChecksumFirst::Always, IN_PLACE_BUFFERS)
        );
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
        let look = |how: fn(&Shared) -> PumpResult| {
            let before = shared.stats.snapshot().packets_received;
            let result = how(&shared);
            let taken = shared.stats.snapshot().packets_received - before;
            assert_eq!(result == PumpResult::Received, taken > 0);
            taken
        };
        assert_eq!(look(Shared::pump_one_socket), 0);
        // The first time something comes, both are looked at.
        packets(0, 1);
        packets(1, 1);
        assert_eq!(look(Shared::pump_one_socket), 2);
        packets(0, 1);
        packets(1, 4);
        assert_eq!(look(Shared::pump_one_socket), 1);
        packets(0, 1);
        assert_eq!(look(Shared::pump_one_socket), 4);
        packets(1, 2);
        assert_eq!(look(Shared::pump_one_socket), 1);
        // Who does not come back is given all.
        packets(0, 1);
        packets(1, 2);
        assert_eq!(look(Shared::pump), 5);
        // Where nothing has come the next is looked at.
        packets(1, 1);
        assert_eq!(look(Shared::pump_one_socket), 1);
        packets(0, 1);
        assert_eq!(look(Shared::pump_one_socket), 1);
        assert_eq!(look(Shared::pump_one_socket), 0);
    }
}
