//! The incoming data path.
//!
//! Each socket is read in one of two ways. Where packets are short, or come from many peers, one
//! call fills as many buffers as there are. Where long messages arrive, buffers are received one by
//! one, and a buffer that probably continues the message before it is received at its destination,
//! which saves a copy.

use core::sync::atomic::Ordering;
use std::net::{IpAddr, SocketAddr};
use std::sync::{PoisonError, TryLockError};
use std::time::Duration;

use bowline_base::clock;
use bowline_roce::{GroBuffer, IdentHint, Instant, OpenMessage, PlacementOutcome};
use rustix::io::Errno;

use crate::capture::{Capture, Datagram, Direction};
use crate::impair::Way;
use crate::line::{Line, Passage};
use crate::share::{BurstBuffer, burst_buffer};
use crate::shared::{Shared, State};
use crate::sys::{Arrival, Inbox};
use crate::udp::{Endpoint, ROCE_PORT};

/// A buffer of up to this many bytes is a short run of packets.
const SHORT_RUN_BYTES: usize = 16 << 10;

/// Most buffers received by one call when they hold long runs of packets: with more, the peer would
/// run out of window before it gets an acknowledgement.
const LONG_RUNS: usize = 8;

/// After a buffer of at least this many bytes, more are likely to be waiting: they are received
/// with one call.
const STREAM_BYTES: usize = 8 << 10;

/// After packets received in place, this many buffers are received one by one: each may begin
/// another message.
const IN_PLACE_BUFFERS: usize = 16;

/// Packets of up to this many bytes are handled faster than their region entries come from memory,
/// so the entries are prefetched.
const PREFETCH_PACKET_MAX: usize = 512;

/// Shortest payload, in bytes, that is received in place. Copies of shorter ones cost less than the
/// many iovec elements.
const IN_PLACE_PAYLOAD_MIN: usize = 2048;

/// After this many empty receives, the continuation of a message is no longer expected.
const EMPTY_RECEIVES_MAX: usize = 64;

/// A program that polls has traffic by rings if one of this many looks has found some.
const RING_LOOKS: u32 = 4096;
/// Its looks for each one at its sockets.
const LOOKS_PER_SOCKET: u32 = 16;
/// Bytes by rings after which it looks at its sockets in any case.
const RING_BYTES_PER_SOCKET: usize = 1 << 20;

/// After a look that found nothing, a program that polls looks at the same socket again after this
/// time: each look is a system call, and most polls of a fast program would be one in vain.
const REST: Duration = Duration::from_nanos(400);
/// The same for one of several sockets to which nothing has come lately, unless it has had the last
/// packets.
const REST_OF_OTHERS: Duration = Duration::from_micros(20);
/// How long a socket that received something is looked at often.
const LATELY: Duration = Duration::from_millis(1);

/// The ECN bits of a type of service: none where marks are not taken, both with a mark.
const ECN: u8 = 0b11;

/// After a long buffer that did not continue the message, this many buffers are received in
/// batches: several peers may be sending in turn.
const BATCHED_AFTER_MISS: usize = 8;

/// Buffers and state for reading the network.
#[derive(Debug)]
pub(crate) struct Rx {
    inbox: Inbox,
    sockets: Vec<SocketState>,
    /// Index of the socket to begin with; may be past the last one.
    next: usize,
    /// Index of the socket that received something last.
    last: Option<usize>,
    /// A burst that has come by a ring.
    pub(crate) burst: BurstBuffer,
    /// Looks since the last one that found something in a ring.
    ring_looks: u32,
    /// Looks at all.
    turns: u32,
    /// Bytes that have come by rings since the last look at the sockets.
    ring_bytes: usize,
}

impl Rx {
    pub(crate) fn new(sockets: usize) -> Self {
        Self {
            inbox: Inbox::new(),
            sockets: vec![SocketState::default(); sockets],
            next: 0,
            last: None,
            burst: burst_buffer(),
            ring_looks: u32::MAX,
            turns: 0,
            ring_bytes: 0,
        }
    }
}

/// How a socket is read next.
#[derive(Clone, Copy, Debug, Default)]
struct SocketState {
    /// Most buffers to receive with one call; 0 if the last read found nothing.
    most: usize,
    /// When it received something last.
    received_at: Instant,
    /// When a program that polls looks at it again.
    rests_until: Instant,
    /// The long message in the middle of which the last buffer ended.
    open_message: Option<OpenMessage>,
    /// Receives since then that found nothing.
    empty_receives: usize,
    /// Number of buffers still to be received one by one.
    single_left: usize,
    /// Number of buffers still to be received in batches after a miss.
    batched_left: usize,
    checksum_first: ChecksumFirst,
    /// How many datagrams the socket has said it lost.
    overflows: u32,
}

/// Whether the system verifies checksums before it copies [RX-13].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum ChecksumFirst {
    /// Not requested yet, since no long message has arrived.
    #[default]
    No,
    /// Requested. Up to this many bytes that arrived before the request may still be waiting.
    Soon(usize),
    Always,
    /// Not supported.
    Never,
}

impl SocketState {
    /// Notes the message under way after a buffer. Packets that are not merged are never received
    /// in place, since receiving them one by one costs more; but a single such packet does not end
    /// a message.
    fn note_received(&mut self, open_message: Option<OpenMessage>, merged: bool) {
        let open_message =
            open_message.filter(|open_message| open_message.payload >= IN_PLACE_PAYLOAD_MIN);
        (self.open_message, self.empty_receives) =
            (open_message.filter(|_| merged || self.open_message == open_message), 0);
    }

    /// Switches to receiving one by one, for a long message, as soon as checksums are verified
    /// first.
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

    /// Notes that this many bytes were received.
    const fn note_bytes(&mut self, bytes: usize) {
        if let ChecksumFirst::Soon(left) = self.checksum_first {
            let left = left.saturating_sub(bytes);
            self.checksum_first =
                if left > 0 { ChecksumFirst::Soon(left) } else { ChecksumFirst::Always };
        }
    }

    /// Notes how many datagrams the socket has lost before one that it received, because its buffer
    /// was full; returns how many are new, and the type of service of the one received. A buffer
    /// that overflows is a queue like a switch's that marks: the next datagram counts as marked if
    /// its sender takes marks [CC-9].
    fn note_overflows(&mut self, arrival: &Arrival) -> (u32, u8) {
        let new = arrival.overflows.wrapping_sub(self.overflows);
        self.overflows = arrival.overflows;
        let takes_marks = arrival.tos & ECN != 0;
        (new, if new > 0 && takes_marks { arrival.tos | ECN } else { arrival.tos })
    }

    /// Notes that the socket is empty.
    const fn note_drained(&mut self) {
        self.note_bytes(usize::MAX);
    }
}

/// Most batches of a [`catch_up`](Shared::catch_up): a socket's buffer holds fewer, unless more
/// keep coming.
const CATCH_UP_MAX: usize = 64;

/// Result of reading the network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PumpResult {
    Nothing,
    /// It is too early to look again.
    Rested,
    /// Another thread is reading the network and handles the packets.
    Busy,
    Received,
}

/// Splits a buffer into datagrams with their likely identifications.
pub(crate) fn split<'a>(
    arrival: &Arrival,
    bytes: &'a [u8],
) -> impl Iterator<Item = (IdentHint, &'a [u8])> {
    let (alone, segments) = match arrival.segment {
        None => (Some((IdentHint::Unknown, bytes)), bytes.chunks(1).take(0)),
        Some(segment) => (None, bytes.chunks(segment).take(usize::MAX)),
    };
    // A bowline peer numbers the segments of a burst from 0 [ICRC-34].
    let ident = |k| IdentHint::Exact(u16::try_from(k).unwrap_or(u16::MAX));
    alone.into_iter().chain(segments.enumerate().map(move |(k, datagram)| (ident(k), datagram)))
}

impl Shared {
    /// Receives and handles at most one batch from each socket. The responses are to be sent by
    /// [`flush`](Self::flush): one acknowledgement for the whole batch [PERF-6].
    pub(crate) fn pump(&self) -> PumpResult {
        self.pump_sockets(false)
    }

    /// Like `pump`, for a program that polls repeatedly. If a socket has packets at every poll,
    /// only that socket is read in one call, so that the program's answers go to one peer and fill
    /// bursts. A socket that had nothing is left alone for a moment.
    pub(crate) fn pump_one_socket(&self) -> PumpResult {
        self.pump_sockets(true)
    }

    /// Handles what has arrived so far, together with a thread that is doing so, and answers it.
    pub(crate) fn catch_up(&self) {
        for _ in 0..CATCH_UP_MAX {
            match self.pump() {
                PumpResult::Nothing | PumpResult::Rested => break,
                // Its batch is handled when it gives the lock back.
                PumpResult::Busy => drop(self.rx.lock()),
                PumpResult::Received => {}
            }
        }
        self.flush_unsent();
        // Another thread may be sending the answers.
        drop(self.tx.lock());
        self.flush_unsent();
    }

    fn pump_sockets(&self, one: bool) -> PumpResult {
        let mut rx = match self.rx.try_lock() {
            Ok(rx) => rx,
            Err(TryLockError::Poisoned(rx)) => rx.into_inner(),
            Err(TryLockError::WouldBlock) => return PumpResult::Busy,
        };
        let mut result = PumpResult::Nothing;
        if let Some(rings) = self.among.rings.as_deref().filter(|rings| rings.are_any()) {
            if rings.sockets_first() {
                for _ in 0..CATCH_UP_MAX {
                    if self.read_sockets(&mut rx, false) == PumpResult::Nothing {
                        break;
                    }
                }
            }
            let bytes = self.read_rings(rings, &mut rx);
            let is_some = bytes > 0;
            rx.ring_bytes += bytes;
            // A program that polls, and to which others of its host send, looks at its sockets now
            // and then only: each look is a call.
            let looks = if is_some { 0 } else { rx.ring_looks.saturating_add(1) };
            rx.ring_looks = looks;
            rx.turns = rx.turns.wrapping_add(1);
            let rests = one
                && looks < RING_LOOKS
                && rx.ring_bytes < RING_BYTES_PER_SOCKET
                && !rx.turns.is_multiple_of(LOOKS_PER_SOCKET);
            if is_some {
                self.mark_unsent();
                result = PumpResult::Received;
            }
            if rests {
                return result;
            }
        }
        rx.ring_bytes = 0;
        match self.read_sockets(&mut rx, one) {
            PumpResult::Received => PumpResult::Received,
            _ if result == PumpResult::Received => result,
            came => came,
        }
    }

    /// Reads sockets, each once.
    fn read_sockets(&self, rx: &mut Rx, one: bool) -> PumpResult {
        let Rx { inbox, sockets, next, last, .. } = rx;
        let mut result = if one { PumpResult::Rested } else { PumpResult::Nothing };
        let now = clock::now();
        // Packets to be captured or dropped must be examined first.
        let in_place_allowed = self.capture.is_none() && self.line.is_none() && !self.cuts.any();
        let first = *next;
        for at in (first..self.endpoints.len()).chain(0..first) {
            let (endpoint, socket) = (&self.endpoints[at], &mut sockets[at]);
            let in_a_row = socket.most > 0;
            if one && now < socket.rests_until {
                continue;
            }
            socket.most = if socket.single_left > 0 && in_place_allowed {
                self.receive_one_by_one(endpoint, inbox, socket)
            } else {
                self.receive_batch(endpoint, inbox, socket)
            };
            if socket.most == 0 {
                let is_other = self.endpoints.len() > 1
                    && *last != Some(at)
                    && now.saturating_since(socket.received_at) > LATELY;
                let rest = if is_other { REST_OF_OTHERS } else { REST };
                if one {
                    socket.rests_until = clock::now() + rest;
                }
                if result == PumpResult::Rested {
                    result = PumpResult::Nothing;
                }
            } else {
                result = PumpResult::Received;
                socket.received_at = now;
                *last = Some(at);
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

    /// Receives and handles a batch from a socket; returns how many buffers to receive next, 0 if
    /// there was nothing.
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
        // Errors of a UDP socket concern packets sent earlier, which retransmission takes care of.
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
        // A thread that finds packets at every poll is falling behind. Receiving all of them with
        // one call, and answering them together, lets it catch up.
        let mut all = inbox.arrivals().flatten();
        if all.any(|(buffer, _)| buffer.len > SHORT_RUN_BYTES) { LONG_RUNS } else { usize::MAX }
    }

    /// Like `receive_batch`, but one by one, so that a buffer that continues a long message is
    /// received at its destination.
    fn receive_one_by_one(
        &self,
        endpoint: &Endpoint,
        inbox: &mut Inbox,
        socket: &mut SocketState,
    ) -> usize {
        let mut most = 0;
        for _ in 0..LONG_RUNS {
            let open_message = socket.open_message.filter(|_| socket.batched_left == 0);
            let placed = open_message.and_then(|open_message| {
                self.receive_in_place(endpoint, inbox, socket, open_message)
            });
            let received = placed.unwrap_or_else(|| {
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

    /// Receives a buffer at the destination of a message's next packets, and handles it whatever it
    /// is. Returns `Some(false)` if there was none, and `None` if nothing was tried.
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
        let (mut packets, mut bytes, mut merged, mut overflows) = (0, 0, false, 0);
        let placed = st.core.receive_in_place(now, open_message, |placement| {
            let (len, arrival) = endpoint.receive_in_place(inbox, placement).ok()?;
            let segment = arrival.and_then(|arrival| arrival.segment);
            if arrival.is_none() {
                self.stats.unusable.inc();
            }
            packets = len.div_ceil(segment.unwrap_or(len).max(1)) as u64;
            (bytes, merged) = (len, segment.is_some());
            let from = arrival.map(|arrival| arrival.from);
            let (lost, tos) = arrival.map_or((0, 0), |arrival| socket.note_overflows(&arrival));
            overflows = lost;
            let to = endpoint.at().ip();
            Some(GroBuffer { from, to, segment, tos, len, framing: inbox.framing() })
        });
        let placed = match placed {
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
            PlacementOutcome::Packets(placed) => placed as u64,
        };
        socket.note_received(st.core.open_message(), merged);
        self.settle(&mut st);
        drop(st);
        self.unanswered.fetch_add(packets, Ordering::Relaxed);
        self.stats.packets_received.add(packets);
        self.stats.bytes_received.add(bytes as u64);
        self.stats.packets_landed.add(placed);
        self.stats.receive_overflows.add(overflows.into());
        if merged {
            self.stats.gro_buffers.inc();
        }
        if placed > 0 {
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

    /// Passes all datagrams of a batch to the core.
    fn take_in(&self, endpoint: &Endpoint, inbox: &Inbox, socket: &mut SocketState) {
        let to = endpoint.at().ip();
        if let Some(capture) = &self.capture {
            let mut capture = capture.lock().unwrap_or_else(PoisonError::into_inner);
            self.record_arrivals(&mut capture, endpoint, inbox);
        }
        let (mut packets, mut total, mut merged, mut overflows) = (0, 0, false, 0);
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
            total += bytes.len() as u64;
            let (lost, tos) = socket.note_overflows(&arrival);
            overflows += lost;
            packets += self.take_in_run(&mut st, now, to, &arrival, tos, bytes);
        }
        socket.note_received(st.core.open_message(), merged);
        socket.note_bytes(usize::try_from(total).unwrap_or(usize::MAX));
        self.settle(&mut st);
        drop(st);
        self.unanswered.fetch_add(packets, Ordering::Relaxed);
        self.stats.packets_received.add(packets);
        self.stats.bytes_received.add(total);
        self.stats.receive_overflows.add(overflows.into());
    }

    /// Passes the datagrams of a buffer to the core; returns how many there were.
    pub(crate) fn take_in_run(
        &self,
        st: &mut State,
        now: Instant,
        to: IpAddr,
        arrival: &Arrival,
        tos: u8,
        bytes: &[u8],
    ) -> u64 {
        let mut packets = 0;
        let from = arrival.from;
        if let Some(segment) = arrival.segment.filter(|segment| *segment <= PREFETCH_PACKET_MAX) {
            st.core.expect(bytes.chunks(segment));
        }
        let cut = self.cuts.between(to, from.ip());
        let datagrams = split(arrival, bytes).inspect(|_| packets += 1).filter(|_| {
            if cut {
                self.stats.packets_dropped.inc();
            }
            !cut
        });
        let datagrams = datagrams.filter(|(_, payload)| {
            let strays = self.among.strays.as_ref();
            !strays.is_some_and(|strays| strays.take(from, to, payload))
        });
        if let Some(line) = &self.line {
            for (ident, payload) in datagrams {
                if self.passes(line, from, to, tos, payload) {
                    st.core.note_tos(now, from, to, tos, payload);
                    st.core.handle_datagram(now, from, to, ident, payload);
                }
            }
        } else {
            let first = bytes.get(..arrival.segment.unwrap_or(bytes.len())).unwrap_or(bytes);
            st.core.note_tos(now, from, to, tos, first);
            st.core.handle_datagrams(now, from, to, datagrams);
        }
        packets
    }

    /// Tells whether a received datagram passes as it is.
    pub(crate) fn passes(
        &self,
        line: &Line,
        from: SocketAddr,
        to: IpAddr,
        tos: u8,
        payload: &[u8],
    ) -> bool {
        let mut lost = 0;
        let passage = line.pass(Way::In, to, from, tos, payload, &mut lost);
        self.stats.packets_dropped.add(lost);
        passage == Passage::Whole
    }

    /// Takes in a datagram that did not come by the socket of its address.
    pub(crate) fn take_in_one(&self, from: SocketAddr, to: IpAddr, payload: &[u8]) {
        if let Some(capture) = &self.capture {
            let mut capture = capture.lock().unwrap_or_else(PoisonError::into_inner);
            let to = SocketAddr::new(to, ROCE_PORT);
            self.record_arrival(&mut capture, from, to, IdentHint::Unknown, payload);
        }
        if self.line.as_ref().is_none_or(|line| self.passes(line, from, to, 0, payload)) {
            self.take_in_alone(from, to, 0, payload);
        }
    }

    /// Passes a datagram to the core that comes by itself, and sends what follows from it.
    pub(crate) fn take_in_alone(&self, from: SocketAddr, to: IpAddr, tos: u8, payload: &[u8]) {
        let now = clock::now();
        let mut st = self.lock();
        if st.stop {
            return;
        }
        st.core.note_tos(now, from, to, tos, payload);
        st.core.handle_datagram(now, from, to, IdentHint::Unknown, payload);
        self.settle(&mut st);
        drop(st);
        self.flush(now);
    }

    /// Writes a received datagram to the capture file.
    pub(crate) fn record_arrival(
        &self,
        capture: &mut Capture,
        from: SocketAddr,
        to: SocketAddr,
        hint: IdentHint,
        payload: &[u8],
    ) {
        let likely = match hint {
            IdentHint::Exact(ident) => ident,
            IdentHint::Unknown => 0,
        };
        let ident = capture.solve(from, to.ip(), likely, payload);
        self.record(capture, Direction::In, &Datagram { from, to, tos: 0, ident, payload });
    }

    fn record_arrivals(&self, capture: &mut Capture, endpoint: &Endpoint, inbox: &Inbox) {
        let to = endpoint.at();
        for (arrival, bytes) in inbox.arrivals().flatten() {
            for (hint, payload) in split(&arrival, bytes) {
                self.record_arrival(capture, arrival.from, to, hint, payload);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;

    use bowline_wire::roce::UDP_PORT;

    use super::*;

    /// [RX-13]: in-place receiving starts only after all bytes have been read that were waiting
    /// when checksum verification was requested.
    #[test]
    fn nothing_is_received_in_place_before_the_backlog_is_read() {
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
        let look_again = || {
            std::thread::sleep(REST_OF_OTHERS);
            look(Shared::pump_one_socket)
        };
        // The first time packets arrive, both sockets are read.
        packets(0, 1);
        packets(1, 1);
        assert_eq!(look_again(), 2);
        packets(0, 1);
        packets(1, 4);
        assert_eq!(look(Shared::pump_one_socket), 1);
        packets(0, 1);
        assert_eq!(look(Shared::pump_one_socket), 4);
        packets(1, 2);
        assert_eq!(look(Shared::pump_one_socket), 1);
        // A caller of `pump` gets everything.
        packets(0, 1);
        packets(1, 2);
        assert_eq!(look(Shared::pump), 5);
        // If a socket is empty, the next one is read.
        packets(1, 1);
        assert_eq!(look_again(), 1);
        packets(0, 1);
        assert_eq!(look_again(), 1);
        assert_eq!(look(Shared::pump_one_socket), 0);
    }

    /// Most polls of a fast program are no system call, and none is far from the next look.
    #[test]
    fn a_socket_that_had_nothing_rests_for_a_moment() {
        let shared = Shared::unshared(&[[127, 77, 1, 7], [127, 77, 1, 8]].map(IpAddr::from));
        assert_eq!(shared.pump_one_socket(), PumpResult::Nothing);
        let looks = |shared: &Shared| shared.stats.snapshot().empty_looks;
        assert_eq!(looks(&shared), 2, "one for each socket");
        let rests = |shared: &Shared| shared.rx.lock().unwrap().sockets.clone();
        let now = clock::now();
        assert!(rests(&shared).iter().all(|socket| socket.rests_until <= now + REST_OF_OTHERS));
        for socket in &mut shared.rx.lock().unwrap().sockets {
            socket.rests_until = now + Duration::from_secs(60);
        }
        assert_eq!(shared.pump_one_socket(), PumpResult::Rested);
        assert_eq!(looks(&shared), 2);
        assert_eq!(shared.pump(), PumpResult::Nothing, "others look at once");
        assert_eq!(looks(&shared), 4);
        // Where one socket receives, the others rest longer, but not long.
        let mut rx = shared.rx.lock().unwrap();
        rx.last = Some(0);
        for socket in &mut rx.sockets {
            (socket.rests_until, socket.received_at) = (now, Instant::default());
        }
        drop(rx);
        assert_eq!(shared.pump_one_socket(), PumpResult::Nothing);
        let [first, second] = rests(&shared).try_into().unwrap();
        assert!(second.rests_until > first.rests_until + REST);
        assert!(second.rests_until <= clock::now() + REST_OF_OTHERS);
    }
}
