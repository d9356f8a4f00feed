//! One task of a stress run: a socket that exchanges messages with every task of the peer.

use std::{
    net::{Ipv4Addr, SocketAddr, SocketAddrV4},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use bowline::rds::{Control, Interest, Message, Node, Socket};
use bowline_base::Errno;

use super::{
    block::Block,
    message::{HEADER_LEN, Header, Kind, Mismatch, template},
};
use crate::cli::common::histogram::Histogram;

/// Largest number of messages received before the next sends.
const BATCH: usize = 128;
/// Longest sleep: bounds how late a task sees that the run is over.
const SLICE: Duration = Duration::from_millis(100);

/// Pause before a congested peer is tried again, when congestion is not watched.
const CONGESTION_PAUSE: Duration = Duration::from_millis(2);

/// What a task has done so far; read by the reporter once a second.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    pub(crate) req_tx: AtomicU64,
    pub(crate) req_rx: AtomicU64,
    pub(crate) ack_tx: AtomicU64,
    pub(crate) ack_rx: AtomicU64,
    /// Time inside send calls, nanoseconds, and the number of calls.
    pub(crate) send_ns: AtomicU64,
    pub(crate) sends: AtomicU64,
    /// Sum of round trips, nanoseconds; there are `ack_rx` of them.
    pub(crate) rtt_ns: AtomicU64,
    /// Round trips in microseconds.
    pub(crate) rtt: Mutex<Histogram>,
}

fn add(counter: &AtomicU64, value: u64) {
    // Relaxed: a statistic that publishes nothing else.
    counter.fetch_add(value, Ordering::Relaxed);
}

/// What the tasks of one side have in common.
#[derive(Clone, Debug)]
pub(crate) struct Setup {
    pub(crate) block: Block,
    pub(crate) local: Ipv4Addr,
    pub(crate) remote: Ipv4Addr,
    /// Whether this side sends requests.
    pub(crate) requests: bool,
    /// Messages that came from others than the tasks of the peer; shared by all tasks.
    pub(crate) foreign: Arc<AtomicU64>,
    /// Round trips longer than this are printed, microseconds.
    pub(crate) outlier_us: u64,
}

/// A task of the peer, as seen from here.
#[derive(Debug)]
struct Peer {
    address: SocketAddrV4,
    next_tx: u32,
    next_rx: u32,
    /// Slot of the next request to send, to receive, and of the next acknowledgement to receive.
    send_index: u32,
    recv_index: u32,
    ack_index: u32,
    outstanding: u32,
    /// Slots whose acknowledgement is owed.
    owed: std::collections::VecDeque<u16>,
    sent_at: Vec<Instant>,
    congested: bool,
}

/// A task; it runs in a thread of its own.
#[derive(Debug)]
pub(crate) struct Task {
    setup: Setup,
    socket: Socket,
    address: SocketAddrV4,
    peers: Vec<Peer>,
    message: Vec<u8>,
    payload: Vec<u8>,
    tally: Arc<Tally>,
}

/// What keeps a task from sending, besides missing answers.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Obstacle {
    None,
    /// No room in the send queue.
    Full,
    /// Congestion without a notification of its end.
    Congestion,
}

enum Sent {
    Yes,
    Congested,
    Full,
}

impl Task {
    /// Makes task `index` and binds its socket.
    ///
    /// # Errors
    ///
    /// A line that says which step failed.
    pub(crate) fn new(node: &Node, setup: Setup, index: u16) -> Result<Self, String> {
        let block = &setup.block;
        let port = |index: u16| block.port.wrapping_add(1).wrapping_add(index);
        let address = SocketAddrV4::new(setup.local, port(index));
        let socket = node
            .bind(SocketAddr::V4(address))
            .map_err(|error| format!("bind {address}: {error}"))?;
        let bytes = block.req_bytes as usize + block.ack_bytes as usize;
        let buffer = bytes * block.depth as usize * usize::from(block.tasks) * 2;
        socket.set_nonblocking(true);
        let prepared = socket
            .set_send_buffer(buffer)
            .and_then(|()| socket.set_recv_buffer(buffer))
            .and_then(|()| socket.set_cong_monitor(block.cong_monitor));
        prepared.map_err(|error| format!("socket {address}: {error}"))?;
        let peers = (0..block.tasks)
            .map(|peer| Peer {
                address: SocketAddrV4::new(setup.remote, port(peer)),
                next_tx: 0,
                next_rx: 0,
                send_index: 0,
                recv_index: 0,
                ack_index: 0,
                outstanding: 0,
                owed: std::collections::VecDeque::new(),
                sent_at: vec![Instant::now(); block.depth as usize],
                congested: false,
            })
            .collect();
        let payload = template(block.req_bytes.max(block.ack_bytes) as usize);
        let tally = Arc::default();
        Ok(Self { socket, address, peers, message: payload.clone(), payload, tally, setup })
    }

    /// Returns the counters of this task.
    pub(crate) fn tally(&self) -> Arc<Tally> {
        Arc::clone(&self.tally)
    }

    /// Exchanges messages until `stop` is set.
    ///
    /// # Errors
    ///
    /// A text that says which message was wrong or which call failed.
    pub(crate) fn run(mut self, stop: &AtomicBool) -> Result<(), String> {
        let mut inbox = Vec::with_capacity(BATCH);
        while !stop.load(Ordering::Relaxed) {
            let received = self.receive(&mut inbox)?;
            let (sent, obstacle) = self.send()?;
            if received + sent > 0 {
                continue;
            }
            let (interest, time) = match obstacle {
                Obstacle::None => (Interest::READ, SLICE),
                Obstacle::Full => (Interest::READ | Interest::WRITE, SLICE),
                Obstacle::Congestion => (Interest::READ, CONGESTION_PAUSE),
            };
            match self.socket.wait(interest, Some(time)) {
                Err(error) if !error.is_timed_out() => {
                    return Err(format!("{}: wait: {error}", self.address));
                }
                _ => {}
            }
            if obstacle == Obstacle::Congestion {
                self.peers.iter_mut().for_each(|peer| peer.congested = false);
            }
        }
        Ok(())
    }

    fn receive(&mut self, inbox: &mut Vec<Message>) -> Result<usize, String> {
        inbox.clear();
        match self.socket.recv_batch(inbox, BATCH) {
            Ok(_) => {}
            Err(error) if error.is_would_block() => return Ok(0),
            Err(error) => return Err(format!("{}: receive: {error}", self.address)),
        }
        let count = inbox.len();
        for message in inbox.drain(..) {
            for control in message.control() {
                self.update_congestion(control);
            }
            if !message.is_notification() {
                self.take(&message)?;
            }
        }
        Ok(count)
    }

    fn update_congestion(&mut self, control: &Control) {
        let Control::CongestionUpdate(mask) = control else { return };
        for peer in &mut self.peers {
            if mask & (1 << (peer.address.port() % 64)) != 0 {
                peer.congested = false;
            }
        }
    }

    fn take(&mut self, message: &Message) -> Result<(), String> {
        let block = &self.setup.block;
        let source = message.source();
        let first = block.port.wrapping_add(1);
        let index = usize::from(source.port().wrapping_sub(first));
        let Some(peer) = self.peers.get_mut(index).filter(|p| SocketAddr::V4(p.address) == source)
        else {
            // Any program can send to this port; only messages of the peer count.
            if self.setup.foreign.fetch_add(1, Ordering::Relaxed) == 0 {
                note!(
                    "bowline stress: a message from {source}, which is no task of the peer, is \
                     ignored, as all others of this kind"
                );
            }
            return Ok(());
        };
        let mut head = [0; HEADER_LEN];
        if message.copy_to(&mut head) < HEADER_LEN {
            return Err(format!("{source} sent {} bytes, less than a header", message.len()));
        }
        let got = Header::decode(&head)
            .map_err(|op| format!("{source} sent the unknown operation {op}"))?;
        let slot = match got.kind {
            Kind::Request => peer.recv_index,
            Kind::Ack => peer.ack_index,
        };
        let expected = Header {
            sequence: peer.next_rx,
            from: peer.address,
            to: self.address,
            index: slot as u16,
            kind: got.kind,
        };
        if got != expected {
            return Err(Mismatch { expected, got }.to_string());
        }
        let size = match got.kind {
            Kind::Request => block.req_bytes,
            Kind::Ack => block.ack_bytes,
        };
        if message.len() != size as usize {
            return Err(format!("{source} sent {} bytes instead of {size}", message.len()));
        }
        if block.verify
            && let Some(at) = differs(message, &self.payload)
        {
            return Err(format!("{source}: byte {at} of message {} is wrong", got.sequence));
        }
        if block.trace {
            note!("{} <- {source} {:?} {} of {size} bytes", self.address, got.kind, got.sequence);
        }
        peer.next_rx = peer.next_rx.wrapping_add(1);
        if got.kind == Kind::Request {
            if peer.owed.len() >= block.depth as usize {
                return Err(format!("{source} sent more requests than the depth allows"));
            }
            peer.recv_index = (slot + 1) % block.depth;
            peer.owed.push_back(got.index);
            add(&self.tally.req_rx, 1);
            return Ok(());
        }
        if peer.outstanding == 0 {
            return Err(format!("{source} acknowledged what was not asked"));
        }
        peer.ack_index = (slot + 1) % block.depth;
        peer.outstanding -= 1;
        let time = peer.sent_at[slot as usize].elapsed();
        add(&self.tally.ack_rx, 1);
        add(&self.tally.rtt_ns, time.as_nanos() as u64);
        let usec = time.as_micros() as u64;
        self.tally.rtt.lock().unwrap_or_else(PoisonError::into_inner).record(usec);
        if usec > self.setup.outlier_us {
            say!("outlier: {} -> {source} message {} took {usec} usec", self.address, got.sequence);
        }
        Ok(())
    }

    /// Sends acknowledgements first, then requests up to the depth. Returns the number of messages
    /// sent, and what kept the others back.
    fn send(&mut self) -> Result<(usize, Obstacle), String> {
        let mut count = 0;
        for index in 0..self.peers.len() {
            loop {
                let (depth, peer) = (self.setup.block.depth, &self.peers[index]);
                let (kind, slot) = match peer.owed.front() {
                    _ if peer.congested => break,
                    Some(slot) => (Kind::Ack, *slot),
                    None if self.setup.requests && peer.outstanding < depth => {
                        (Kind::Request, peer.send_index as u16)
                    }
                    None => break,
                };
                match self.send_one(index, kind, slot)? {
                    Sent::Yes => count += 1,
                    Sent::Congested => self.peers[index].congested = true,
                    Sent::Full => return Ok((count, Obstacle::Full)),
                }
            }
        }
        let unwatched = !self.setup.block.cong_monitor;
        let congested = unwatched && self.peers.iter().any(|peer| peer.congested);
        Ok((count, if congested { Obstacle::Congestion } else { Obstacle::None }))
    }

    fn send_one(&mut self, index: usize, kind: Kind, slot: u16) -> Result<Sent, String> {
        let peer = &mut self.peers[index];
        let header = Header {
            sequence: peer.next_tx,
            from: self.address,
            to: peer.address,
            index: slot,
            kind,
        };
        let size = match kind {
            Kind::Request => self.setup.block.req_bytes,
            Kind::Ack => self.setup.block.ack_bytes,
        };
        let message = &mut self.message[..size as usize];
        header.encode(message);
        let start = Instant::now();
        let result = self.socket.send_to(message, SocketAddr::V4(peer.address));
        match result {
            Ok(_) => {}
            Err(error) if error.errno() == Errno::ENOBUFS => return Ok(Sent::Congested),
            Err(error) if error.is_would_block() => return Ok(Sent::Full),
            Err(error) => {
                return Err(format!("{} -> {}: send: {error}", self.address, peer.address));
            }
        }
        if self.setup.block.trace {
            let Header { to, sequence, .. } = header;
            note!("{} -> {to} {kind:?} {sequence} of {size} bytes", self.address);
        }
        add(&self.tally.send_ns, start.elapsed().as_nanos() as u64);
        add(&self.tally.sends, 1);
        peer.next_tx = peer.next_tx.wrapping_add(1);
        match kind {
            Kind::Ack => {
                peer.owed.pop_front();
                add(&self.tally.ack_tx, 1);
            }
            Kind::Request => {
                peer.sent_at[usize::from(slot)] = start;
                peer.send_index = (peer.send_index + 1) % self.setup.block.depth;
                peer.outstanding += 1;
                add(&self.tally.req_tx, 1);
            }
        }
        Ok(Sent::Yes)
    }
}

/// Returns the place of the first payload byte that is not the expected one.
fn differs(message: &Message, expected: &[u8]) -> Option<usize> {
    let mut at = 0;
    for slice in message.slices() {
        let skip = HEADER_LEN.saturating_sub(at).min(slice.len());
        let (from, to) = (at + skip, at + slice.len());
        if slice[skip..] != expected[from..to] {
            let wrong = slice[skip..].iter().zip(&expected[from..to]).position(|(a, b)| a != b);
            return Some(from + wrong.unwrap_or(0) - HEADER_LEN);
        }
        at = to;
    }
    None
}
