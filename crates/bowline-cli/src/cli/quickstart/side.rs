//! One side of the quickstart: sixteen sockets that send to, and receive from, sixteen others.
//!
//! A flow goes from one socket to one other; RDS promises order and "exactly once" per flow, so
//! the receiver of a flow expects every sequence number exactly once and in turn.

use std::{
    io::IoSlice,
    net::{IpAddr, SocketAddr},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use bowline::rds::{Message, Node, Socket};
use bowline_node::{Failure, Outcome};
use serde::{Deserialize, Serialize};

use super::message::{HEADER_LEN, Header, MESSAGE_LEN_MAX, Pool, Random, clock_ns};
use crate::cli::common::histogram::Histogram;

/// Sockets per side.
pub(crate) const SOCKETS: u8 = 16;
/// Port of socket 0; the others follow.
const FIRST_PORT: u16 = 4001;
/// Port of the socket that answers while the round trip is measured.
pub(crate) const ECHO_PORT: u16 = 4000;
/// Large enough for several of the longest messages.
const BUFFER_BYTES: usize = 4 * MESSAGE_LEN_MAX;
const BATCH: usize = 64;
const SLICE: Duration = Duration::from_millis(100);
/// Longest time that a send may wait for room before the run counts as stuck.
const PATIENCE: Duration = Duration::from_secs(15);

/// The results of one side, which are compared with those of the other.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub(crate) struct Report {
    /// Messages sent and received, by flow: `from * SOCKETS + to`.
    pub(crate) sent: Vec<u64>,
    pub(crate) received: Vec<u64>,
    pub(crate) sent_bytes: u64,
    pub(crate) received_bytes: u64,
    /// Numbers of messages that were repeated, that were missing before a later one, and that were
    /// damaged.
    pub(crate) repeated: u64,
    pub(crate) missing: u64,
    pub(crate) damaged: u64,
    /// Time from send to receipt, microseconds.
    pub(crate) delivery: Histogram,
    /// Counters of the node.
    pub(crate) conn_reset: u64,
    pub(crate) retransmits: u64,
    pub(crate) duplicates_dropped: u64,
    /// Errors other than those of messages.
    pub(crate) errors: Vec<String>,
}

/// When one side cuts all its connections: at fixed amounts of received bytes, so that the number
/// of cuts does not depend on the speed of the machine. Node A makes the first, third and so on.
#[derive(Clone, Debug, Default)]
pub(crate) struct Cuts {
    /// Cuts of both sides.
    pub(crate) all: u32,
    /// Received bytes at which this side cuts.
    due: Vec<u64>,
}

impl Cuts {
    /// Returns the part of node A in `all` cuts while it receives `bytes`.
    pub(crate) fn of_a(all: u32, bytes: u64) -> Self {
        Self::every_other(all, bytes, 1)
    }

    /// Returns the part of node B.
    pub(crate) fn of_b(all: u32, bytes: u64) -> Self {
        Self::every_other(all, bytes, 2)
    }

    fn every_other(all: u32, bytes: u64, first: u64) -> Self {
        let parts = u128::from(all) + 1;
        let due = (first..=u64::from(all))
            .step_by(2)
            // A fraction of a 64-bit number: the result fits 64 bits again.
            .map(|number| (u128::from(bytes) * u128::from(number) / parts) as u64)
            .collect();
        Self { all, due }
    }
}

/// A cut that was made.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cut {
    /// Progress of the side that made it, in percent.
    pub(crate) percent: u64,
    pub(crate) connections: usize,
}

/// The task of a side.
#[derive(Clone, Debug)]
pub(crate) struct Work {
    pub(crate) remote: IpAddr,
    /// Bytes to send; the other side sends as much.
    pub(crate) bytes: u64,
    pub(crate) seed: u64,
    pub(crate) cuts: Cuts,
}

/// Progress of a side, for those who watch it.
#[derive(Debug, Default)]
pub(crate) struct Progress {
    /// Bytes received so far.
    pub(crate) received: AtomicU64,
    /// Set to end the run before its time.
    pub(crate) abort: AtomicBool,
}

/// A side while it runs.
#[derive(Debug)]
pub(crate) struct Side {
    node: Node,
    progress: Arc<Progress>,
    report: Arc<Mutex<Report>>,
    sockets: Vec<Arc<Socket>>,
    threads: Vec<JoinHandle<()>>,
}

struct Shared {
    node: Node,
    work: Work,
    /// Cuts made so far.
    cuts: AtomicUsize,
    on_cut: Box<dyn Fn(Cut) + Send + Sync>,
    bytes_per_socket: u64,
    pool: Pool,
    progress: Arc<Progress>,
    report: Arc<Mutex<Report>>,
}

impl Shared {
    fn fail(&self, text: String) {
        lock(&self.report).errors.push(text);
        self.progress.abort.store(true, Ordering::Relaxed);
    }

    /// Counts received bytes and cuts the connections when due. The thread that takes the number of
    /// a cut makes it.
    fn received(&self, bytes: u64) {
        let before = self.progress.received.fetch_add(bytes, Ordering::Relaxed);
        loop {
            let number = self.cuts.load(Ordering::Relaxed);
            let due = self.work.cuts.due.get(number);
            if due.is_none_or(|due| before + bytes < *due) {
                return;
            }
            let take =
                |ordering| self.cuts.compare_exchange(number, number + 1, ordering, ordering);
            if take(Ordering::Relaxed).is_ok() {
                let connections = self.cut();
                let percent = 100 * (before + bytes) / self.work.bytes.max(1);
                (self.on_cut)(Cut { percent: percent.min(100), connections });
            }
        }
    }

    /// Cuts the connections and returns how many they were. Where the last cut is not mended yet,
    /// it waits for a connection that it can cut: a cut of none would test nothing.
    fn cut(&self) -> usize {
        loop {
            let connections = self.node.drop_connections(None);
            if connections > 0 || self.aborted() {
                return connections;
            }
            thread::sleep(Duration::from_millis(1));
        }
    }

    fn aborted(&self) -> bool {
        self.progress.abort.load(Ordering::Relaxed)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    // A panic is reported when the thread is joined.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Side {
    /// Binds the sockets of this side.
    pub(crate) fn bind(node: &Node, local: IpAddr) -> Outcome<Vec<Arc<Socket>>> {
        (0..SOCKETS)
            .map(|index| {
                let place = SocketAddr::new(local, FIRST_PORT + u16::from(index));
                let socket = node.bind(place)?;
                socket.set_send_buffer(BUFFER_BYTES)?;
                socket.set_recv_buffer(BUFFER_BYTES)?;
                socket.set_recv_timeout(Some(SLICE));
                socket.set_send_timeout(Some(SLICE));
                Ok(Arc::new(socket))
            })
            .collect()
    }

    /// Starts to send, and to receive what the other side sends; `on_cut` is called for every cut.
    pub(crate) fn start(
        node: &Node,
        sockets: Vec<Arc<Socket>>,
        work: Work,
        on_cut: impl Fn(Cut) + Send + Sync + 'static,
    ) -> Outcome<Self> {
        let seed = work.seed;
        let progress: Arc<Progress> = Arc::default();
        let flows = usize::from(SOCKETS) * usize::from(SOCKETS);
        let report = Report { sent: vec![0; flows], received: vec![0; flows], ..Report::default() };
        let report = Arc::new(Mutex::new(report));
        let shared = Arc::new(Shared {
            node: node.clone(),
            bytes_per_socket: work.bytes.div_ceil(u64::from(SOCKETS)),
            work,
            cuts: AtomicUsize::new(0),
            on_cut: Box::new(on_cut),
            pool: Pool::new(seed),
            progress: Arc::clone(&progress),
            report: Arc::clone(&report),
        });
        let mut threads = Vec::new();
        for (index, socket) in (0u8..).zip(&sockets) {
            let (mine, theirs) = (Arc::clone(&shared), Arc::clone(&shared));
            let (socket, receiving) = (Arc::clone(socket), Arc::clone(socket));
            let seed = seed.wrapping_add(1 + u64::from(index));
            threads.push(spawn(move || receive(&receiving, index, &theirs))?);
            threads.push(spawn(move || send(&socket, index, seed, &mine))?);
        }
        Ok(Self { node: node.clone(), progress, report, sockets, threads })
    }

    /// Returns the progress of this side.
    pub(crate) fn progress(&self) -> Arc<Progress> {
        Arc::clone(&self.progress)
    }

    /// Returns whether all threads have ended.
    pub(crate) fn is_finished(&self) -> bool {
        self.threads.iter().all(JoinHandle::is_finished)
    }

    /// Waits for the threads and returns the results. Messages still in a socket came after the
    /// last message of their flow, so they count as repeated.
    pub(crate) fn finish(self) -> Report {
        let mut panics = 0;
        for thread in self.threads {
            panics += usize::from(thread.join().is_err());
        }
        let mut report = lock(&self.report).clone();
        if panics > 0 {
            report.errors.push(format!("{panics} threads panicked"));
        }
        let end = Instant::now() + PATIENCE;
        for socket in self.sockets {
            if self.progress.abort.load(Ordering::Relaxed) {
                // The peer may be gone and acknowledge nothing.
                break;
            }
            let left = end.saturating_duration_since(Instant::now());
            if let Err(error) = socket.flush(Some(left)) {
                report.errors.push(format!("not everything was acknowledged: {error}"));
            }
            socket.set_nonblocking(true);
            let mut rest = Vec::new();
            while socket.recv_batch(&mut rest, BATCH).is_ok() {}
            report.repeated += rest.len() as u64;
        }
        for (name, value) in self.node.counters() {
            match name {
                "conn_reset" => report.conn_reset = value,
                "bl_retransmits" => report.retransmits = value,
                "recv_drop_old_seq" => report.duplicates_dropped = value,
                _ => {}
            }
        }
        report
    }
}

fn spawn(body: impl FnOnce() + Send + 'static) -> Outcome<JoinHandle<()>> {
    thread::Builder::new()
        .spawn(body)
        .map_err(|error| Failure::failed(format!("cannot start a thread: {error}")))
}

/// Sends messages to all sockets of the other side in turn until the share of bytes is used up,
/// then a last one to each.
fn send(socket: &Socket, from: u8, seed: u64, shared: &Shared) {
    let mut random = Random::new(seed);
    let mut next = [0u64; SOCKETS as usize];
    let mut bytes = 0;
    let mut to = from;
    let mut lasts = 0;
    while lasts < SOCKETS && !shared.aborted() {
        let last = bytes >= shared.bytes_per_socket;
        let payload = shared.pool.payload(random.message_len() - HEADER_LEN, random.next());
        let sequence = next[usize::from(to)];
        let header = Header { sequence, sent_ns: clock_ns(), from, to, last }.encode(payload);
        let place = SocketAddr::new(shared.work.remote, FIRST_PORT + u16::from(to));
        let pieces = [IoSlice::new(&header), IoSlice::new(payload)];
        let start = Instant::now();
        while let Err(error) = socket.send_vectored_to(&pieces, place) {
            if !error.is_timed_out() || start.elapsed() > PATIENCE {
                shared.fail(format!("socket {from} cannot send to {place}: {error}"));
            }
            if shared.aborted() {
                return;
            }
        }
        next[usize::from(to)] += 1;
        bytes += (HEADER_LEN + payload.len()) as u64;
        lasts += u8::from(last);
        to = (to + 1) % SOCKETS;
    }
    let mut report = lock(&shared.report);
    report.sent_bytes += bytes;
    for (to, count) in next.iter().enumerate() {
        report.sent[usize::from(from) * usize::from(SOCKETS) + to] = *count;
    }
}

/// The results of a receiving socket.
#[derive(Debug, Default)]
struct Ledger {
    expected: [u64; SOCKETS as usize],
    finished: [bool; SOCKETS as usize],
    bytes: u64,
    repeated: u64,
    missing: u64,
    damaged: u64,
    delivery: Histogram,
}

impl Ledger {
    fn enter(&mut self, message: &Message, to: u8) {
        let now = clock_ns();
        let mut head = [0; HEADER_LEN];
        message.copy_to(&mut head);
        self.bytes += message.len() as u64;
        let Ok(header) = Header::check(message.len(), &head, message.slices()) else {
            self.damaged += 1;
            return;
        };
        let port = FIRST_PORT + u16::from(header.from);
        if header.to != to || header.from >= SOCKETS || message.source().port() != port {
            self.damaged += 1;
            return;
        }
        let expected = &mut self.expected[usize::from(header.from)];
        if header.sequence < *expected {
            self.repeated += 1;
            return;
        }
        self.missing += header.sequence - *expected;
        *expected = header.sequence + 1;
        self.finished[usize::from(header.from)] |= header.last;
        self.delivery.record(now.saturating_sub(header.sent_ns) / 1000);
    }
}

/// Receives until the last message of every flow has arrived.
fn receive(socket: &Socket, to: u8, shared: &Shared) {
    let mut ledger = Ledger::default();
    let mut inbox = Vec::with_capacity(BATCH);
    while !ledger.finished.iter().all(|finished| *finished) && !shared.aborted() {
        inbox.clear();
        match socket.recv_batch(&mut inbox, BATCH) {
            Ok(_) => {}
            Err(error) if error.is_timed_out() => continue,
            Err(error) => {
                shared.fail(format!("socket {to} cannot receive: {error}"));
                return;
            }
        }
        let before = ledger.bytes;
        for message in &inbox {
            ledger.enter(message, to);
        }
        shared.received(ledger.bytes - before);
    }
    let mut report = lock(&shared.report);
    for (from, count) in ledger.expected.iter().enumerate() {
        report.received[from * usize::from(SOCKETS) + usize::from(to)] = *count;
    }
    report.received_bytes += ledger.bytes;
    report.repeated += ledger.repeated;
    report.missing += ledger.missing;
    report.damaged += ledger.damaged;
    report.delivery.merge(&ledger.delivery);
}
