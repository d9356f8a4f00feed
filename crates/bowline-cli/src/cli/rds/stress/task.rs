//! One task of a stress run: a socket that exchanges messages with every task of the peer.

use std::{
    collections::VecDeque,
    io::IoSlice,
    net::{Ipv4Addr, SocketAddr, SocketAddrV4},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use bowline::rds::{Control, Error, Interest, Message, RdmaStatus, SendControl, Socket, Transfer};
use bowline_base::Errno;

use super::{
    block::Block,
    message::{Access, HEADER_LEN, Header, Kind, Mismatch, Rdma, template},
    rdma::{Fault, Transfers},
    shared::Buffers,
};
use crate::cli::{common::histogram::Histogram, rds::using::Used};

/// Largest number of messages received before the next sends.
const BATCH: usize = 128;
/// Longest sleep: bounds how late a task sees that the run is over.
const SLICE: Duration = Duration::from_millis(100);

/// Time in which the control connection shows whether an operation failed because the peer has
/// ended the run, which is looked for once a second.
const END_TIME: Duration = Duration::from_secs(3);

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
    /// Bytes that RDMA has brought to this side's memory, and taken from it.
    pub(crate) rdma_in: AtomicU64,
    pub(crate) rdma_out: AtomicU64,
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
    /// This side sends messages without copying them.
    pub(crate) zerocopy: bool,
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
    owed: VecDeque<Owed>,
    sent_at: Vec<Instant>,
    congested: bool,
}

/// An acknowledgement that is owed.
#[derive(Clone, Copy, Debug)]
struct Owed {
    slot: u16,
    /// The operation that goes with it.
    rdma: Option<Rdma>,
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
    /// With `-D` only.
    transfers: Option<Transfers>,
    /// With `--zerocopy` only.
    buffers: Option<Buffers>,
    /// The first operation that failed, and when.
    failed: Option<(Instant, String)>,
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
    /// In a call that began then.
    Yes(Instant),
    Congested,
    Full,
}

impl Task {
    /// Makes task `index` and binds its socket.
    ///
    /// # Errors
    ///
    /// A line that says which step failed.
    pub(crate) fn new(used: &Used, setup: Setup, index: u16) -> Result<Self, String> {
        let block = &setup.block;
        let port = |index: u16| block.port.wrapping_add(1).wrapping_add(index);
        let address = SocketAddrV4::new(setup.local, port(index));
        let socket = used
            .bind(SocketAddr::V4(address))
            .map_err(|error| format!("bind {address}: {error}"))?;
        let bytes = block.req_bytes as usize + block.ack_bytes as usize;
        let buffer = bytes * block.depth as usize * usize::from(block.tasks) * 2;
        socket.set_nonblocking(true);
        let prepared = socket
            .set_send_buffer(buffer)
            .and_then(|()| socket.set_recv_buffer(buffer))
            .and_then(|()| socket.set_cong_monitor(block.cong_monitor))
            .and_then(|()| socket.set_zerocopy(setup.zerocopy));
        prepared.map_err(|error| format!("socket {address}: {error}"))?;
        // The host's node may give less.
        let longest = block.req_bytes.max(block.ack_bytes) as usize;
        let has = socket.send_buffer().map_err(|error| format!("socket {address}: {error}"))?;
        if has < longest {
            return Err(format!(
                "messages of {longest} bytes are too long for {}, which gives its programs send \
                 buffers of {has} bytes: start it with --send-buffer {longest}",
                used.name()
            ));
        }
        let peers = (0..block.tasks)
            .map(|peer| Peer {
                address: SocketAddrV4::new(setup.remote, port(peer)),
                next_tx: 0,
                next_rx: 0,
                send_index: 0,
                recv_index: 0,
                ack_index: 0,
                outstanding: 0,
                owed: VecDeque::new(),
                sent_at: vec![Instant::now(); block.depth as usize],
                congested: false,
            })
            .collect();
        let payload = template(block.req_bytes.max(block.ack_bytes) as usize);
        let transfers = (block.rdma_bytes > 0)
            .then(|| Transfers::new(&socket, block))
            .transpose()
            .map_err(|error| format!("socket {address}: {error}"))?;
        let tally = Arc::default();
        let message = payload.clone();
        Ok(Self {
            buffers: setup.zerocopy.then(Buffers::default),
            setup,
            socket,
            address,
            peers,
            message,
            payload,
            transfers,
            failed: None,
            tally,
        })
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
            if received + sent > 0 && self.failed.is_none() {
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
            if let Some((at, why)) = &self.failed
                && at.elapsed() > END_TIME
            {
                return Err(why.clone());
            }
            if obstacle == Obstacle::Congestion {
                self.peers.iter_mut().for_each(|peer| peer.congested = false);
            }
        }
        if let Some(keys) = self.transfers.as_ref().and_then(Transfers::keys) {
            note!("bowline stress: {}: {keys}", self.address);
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
                match control {
                    Control::CongestionUpdate(mask) => self.update_congestion(*mask),
                    Control::RdmaStatus { token, status } => self.told(*token, *status)?,
                    Control::ZcopyCompletion(cookies) => self.completed(cookies)?,
                    _ => {}
                }
            }
            if !message.is_notification() {
                self.take(&message)?;
            }
        }
        Ok(count)
    }

    fn update_congestion(&mut self, mask: u64) {
        for peer in &mut self.peers {
            if mask & (1 << (peer.address.port() % 64)) != 0 {
                peer.congested = false;
            }
        }
    }

    /// Takes back the buffers of messages that have been released.
    fn completed(&mut self, cookies: &[u32]) -> Result<(), String> {
        let Some(buffers) = &mut self.buffers else { return Ok(()) };
        let mut all = cookies.iter();
        all.try_for_each(|cookie| buffers.completed(*cookie))
            .map_err(|error| format!("{}: {error}", self.address))
    }

    /// Notes the end of an operation of this side.
    fn told(&mut self, token: u64, status: RdmaStatus) -> Result<(), String> {
        // Of a socket that has no memory no operation is under way.
        let Some(transfers) = &mut self.transfers else { return Ok(()) };
        let access = match transfers.told(token, status) {
            Ok(access) => access,
            Err(Fault::Data(text)) => return Err(format!("{}: {text}", self.address)),
            Err(Fault::Failed(text)) => {
                let text = format!("{}: {text}", self.address);
                self.failed.get_or_insert((Instant::now(), text));
                return Ok(());
            }
        };
        let bytes = transfers.len() as u64;
        match access {
            Access::Read => add(&self.tally.rdma_in, bytes),
            Access::Write => add(&self.tally.rdma_out, bytes),
        }
        Ok(())
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
            let rdma = wanted(message, &head, self.transfers.as_ref())
                .map_err(|error| format!("{source}: {error}"))?;
            peer.recv_index = (slot + 1) % block.depth;
            peer.owed.push_back(Owed { slot: got.index, rdma });
            add(&self.tally.req_rx, 1);
            return Ok(());
        }
        if peer.outstanding == 0 {
            return Err(format!("{source} acknowledged what was not asked"));
        }
        peer.ack_index = (slot + 1) % block.depth;
        peer.outstanding -= 1;
        let time = peer.sent_at[slot as usize].elapsed();
        if let Some(transfers) = &mut self.transfers {
            let bytes = transfers.len() as u64;
            let done = transfers
                .acknowledged(&self.socket, index, got.index)
                .map_err(|error| format!("{source}: message {}: {error}", got.sequence))?;
            match done {
                Some(Access::Read) => add(&self.tally.rdma_out, bytes),
                Some(Access::Write) => add(&self.tally.rdma_in, bytes),
                None => {}
            }
        }
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
                let sent = match peer.owed.front().filter(|owed| !self.is_busy(index, owed)) {
                    _ if peer.congested => break,
                    Some(owed) => self.acknowledge(index, *owed)?,
                    None if self.setup.requests && peer.outstanding < depth => {
                        self.request(index)?
                    }
                    None => break,
                };
                match sent {
                    Sent::Yes(_) => count += 1,
                    Sent::Congested => self.peers[index].congested = true,
                    Sent::Full => return Ok((count, Obstacle::Full)),
                }
            }
        }
        let unwatched = !self.setup.block.cong_monitor;
        let congested = unwatched && self.peers.iter().any(|peer| peer.congested);
        Ok((count, if congested { Obstacle::Congestion } else { Obstacle::None }))
    }

    /// Tells whether the memory of an acknowledgement is still in use.
    fn is_busy(&self, peer: usize, owed: &Owed) -> bool {
        owed.rdma.is_some() && self.transfers.as_ref().is_some_and(|t| t.is_busy(peer, owed.slot))
    }

    fn request(&mut self, index: usize) -> Result<Sent, String> {
        let peer = &self.peers[index];
        let (slot, sequence) = (peer.send_index as u16, peer.next_tx);
        let offer = match &mut self.transfers {
            Some(transfers) => transfers
                .offer(&self.socket, (index, (*peer.address.ip()).into()), slot, sequence)
                .map_err(|error| format!("{}: {error}", self.address))?,
            None => None,
        };
        let sent = self.send_one(index, Kind::Request, slot, offer, &[])?;
        if let Sent::Yes(start) = sent {
            let peer = &mut self.peers[index];
            peer.sent_at[usize::from(slot)] = start;
            peer.send_index = (peer.send_index + 1) % self.setup.block.depth;
            peer.outstanding += 1;
            add(&self.tally.req_tx, 1);
        }
        Ok(sent)
    }

    fn acknowledge(&mut self, index: usize, owed: Owed) -> Result<Sent, String> {
        let Owed { slot, rdma } = owed;
        let transfer = match (&mut self.transfers, &rdma) {
            (Some(transfers), Some(rdma)) => Some(
                transfers
                    .answer(index, slot, rdma)
                    .map_err(|error| format!("{}: {error}", self.address))?,
            ),
            _ => None,
        };
        let sent = self.send_one(index, Kind::Ack, slot, rdma, transfer.as_slice())?;
        if let Sent::Yes(_) = sent {
            if let (Some(transfers), Some(rdma)) = (&mut self.transfers, &rdma) {
                transfers.answered(index, slot, rdma);
            }
            self.peers[index].owed.pop_front();
            add(&self.tally.ack_tx, 1);
        }
        Ok(sent)
    }

    /// Sends a message: a request with the key of memory, if it offers some, or an acknowledgement
    /// with an operation, if there is one.
    fn send_one(
        &mut self,
        index: usize,
        kind: Kind,
        slot: u16,
        rdma: Option<Rdma>,
        transfers: &[Transfer],
    ) -> Result<Sent, String> {
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
        if let Some(rdma) = &rdma {
            rdma.encode(message);
        }
        let to = SocketAddr::V4(peer.address);
        let start = Instant::now();
        let result = match rdma {
            None => match &mut self.buffers {
                Some(buffers) => send_shared(&self.socket, buffers, message, to, kind),
                None => self.socket.send_to(message, to),
            },
            Some(rdma) if kind == Kind::Request => {
                let announce = [SendControl::RdmaDest(rdma.key)];
                self.socket.send_message(Some(to), &[IoSlice::new(message)], &announce)
            }
            Some(_) => self.socket.send_rdma(Some(to), message, transfers),
        };
        match result {
            Ok(_) => {}
            Err(error) if error.errno() == Errno::ENOBUFS => return Ok(Sent::Congested),
            Err(error) if error.is_would_block() => return Ok(Sent::Full),
            Err(error) => {
                return Err(format!("{} -> {}: send: {error}", self.address, peer.address));
            }
        }
        if self.setup.block.trace {
            let what = rdma.map_or("", |rdma| rdma.access.name());
            let Header { to, sequence, .. } = header;
            note!("{} -> {to} {kind:?} {sequence} of {size} bytes {what}", self.address);
        }
        add(&self.tally.send_ns, start.elapsed().as_nanos() as u64);
        add(&self.tally.sends, 1);
        peer.next_tx = peer.next_tx.wrapping_add(1);
        Ok(Sent::Yes(start))
    }
}

/// Sends a message in a buffer of its own, which is not copied.
fn send_shared(
    socket: &Socket,
    buffers: &mut Buffers,
    message: &[u8],
    to: SocketAddr,
    kind: Kind,
) -> Result<usize, Error> {
    let (mut buffer, cookie) = buffers.take(kind, message);
    if let Some(bytes) = Arc::get_mut(&mut buffer) {
        // The payload is that of all messages of the kind.
        bytes[..HEADER_LEN].copy_from_slice(&message[..HEADER_LEN]);
    }
    let result = socket.send_shared(&buffer, Some(to), Some(cookie));
    buffers.sent(kind, buffer, result.is_ok());
    result
}

/// Returns the operation that a request asks for, with the key of the memory.
fn wanted(
    message: &Message,
    head: &[u8; HEADER_LEN],
    transfers: Option<&Transfers>,
) -> Result<Option<Rdma>, String> {
    let unknown = |op| format!("a request for the unknown RDMA operation {op}");
    let Some(mut rdma) = Rdma::decode(head).map_err(unknown)? else { return Ok(None) };
    transfers.ok_or("a request for RDMA, which was not agreed")?.check(&rdma)?;
    let key = message.control().iter().find_map(|control| match control {
        Control::RdmaDest(key) => Some(*key),
        _ => None,
    });
    rdma.key = key.ok_or("a request for RDMA without the key of memory")?;
    Ok(Some(rdma))
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
