//! An export of an NBD server as a store: any format and plug-in that NBD servers have.
//!
//! ```text
//!   submit --> Table: waiting --bowline-nbd-to--> the server
//!                     sent    <-bowline-nbd-from- replies, checked --> BackendDone::done
//!                                   |
//!                     connects again when the connection is lost, and sends again
//! ```
//!
//! # When the connection is lost
//!
//! [NB-77] Requests wait while it is made again, for [`PATIENCE`]; then they fail with `ENOLINK`,
//! those that come later at once, until the server is back.
//!
//! A server with a cache that is started again may have lost what no flush has made durable. So the
//! flushes that wait, or else the next one, fail with `EIO`, and so does the next one of each
//! further user that had such changes: see [`losses`].
//!
//! # What is sent again
//!
//! A change that is executed once more after a later one to the same place undoes the later one.
//! The later one may come as soon as the first one has been answered. So a change is sent again
//! only if nobody can execute the first copy after the answer to the second one:
//!
//! - Reads and flushes change nothing: they are always sent again.
//! - What the server refuses with `ESHUTDOWN` was not executed: it is sent again. Nothing more is
//!   sent on that connection, whose other requests the server may still answer.
//! - When the server has ended the connection, it takes nothing more from it: the end of the stream
//!   and a reset come from a process that has ended, or from a server that closes a connection
//!   when it has done with what it took. Changes are sent again.
//! - In all other cases it may still execute what it has: when the network is cut, when it breaks
//!   the protocol, and when it does not answer. Changes fail, with `EIO`, or with `ETIMEDOUT` as
//!   all requests of a server that does not answer. They are in doubt then, as with any disk that
//!   fails: who asked for them does not take them for done.
//!
//! Changes to the same place that are in flight at the same time have no order, so one that is sent
//! again may be executed once more after another one that was in flight with it [NB-48].
//!
//! # What is not waited for
//!
//! A server that has requests and sends nothing for [`SILENCE`], or has not answered one of them
//! after [`ANSWER`], is disconnected. When the store is closed, what is not answered within
//! [`CLOSE`] fails; before it takes leave of the server it flushes changes that are not durable,
//! since the flushes of another connection need not cover them.

pub(crate) mod handshake;
mod losses;
mod notices;
pub(crate) mod replies;
#[cfg(test)]
mod reply_checks;
mod stream;
mod table;
#[cfg(test)]
mod tests;
mod uri;

use std::io::{self, BufReader, ErrorKind, Read, Write};
use std::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use bowline_rnbd::{Discard, Errno, IoOp, Limits};
use bowline_verbs::Mem;

use super::{Backend, BackendDone, BackendIo, BackendResult, check_block, deliver};
#[cfg(test)]
use crate::front::nbd::script;
use crate::front::nbd::wire;
use handshake::Export;
use notices::Notices;
use replies::{Asked, Replies, Requests};
use stream::{Stream, TICK};
use table::{Cut, Finished, Piece, Table, Whole};
pub use uri::NbdUri;

/// How long connecting and the handshake may take.
const CONNECT: Duration = Duration::from_secs(10);
/// How long requests wait while there is no connection.
const PATIENCE: Duration = Duration::from_secs(30);
/// How long a server that has requests may send nothing.
const SILENCE: Duration = Duration::from_secs(60);
/// How long a server may take to answer one request, whatever else it sends.
const ANSWER: Duration = Duration::from_secs(180);
/// How long the end of the store waits for answers, and for the last flush.
const CLOSE: Duration = Duration::from_secs(8);
/// Time between attempts to connect: doubled from the first up to the last.
const PAUSES: [Duration; 2] = [Duration::from_millis(100), Duration::from_secs(2)];
/// Most requests that are taken at once to be sent.
const BATCH: usize = 32;
/// Bytes that are sent with one call.
const SEND: usize = 256 << 10;
/// Largest discard in bytes: servers count in 31 bits.
const DISCARD_MAX: u64 = 1 << 30;
/// Block that servers work in, if they do not say more.
const PHYSICAL: u32 = 4096;

/// Name of the thread that takes replies, and makes connections.
const FROM: &str = "bowline-nbd-from";

/// How long what may take.
#[derive(Clone, Copy, Debug)]
struct Times {
    connect: Duration,
    patience: Duration,
    silence: Duration,
    answer: Duration,
    close: Duration,
}

/// The store.
pub(super) struct Nbd {
    shared: Arc<Shared>,
    /// Until the store is closed.
    threads: Mutex<Vec<JoinHandle<()>>>,
}

struct Shared {
    uri: NbdUri,
    times: Times,
    limits: Limits,
    /// The server has flushes.
    flushes: bool,
    /// Its present size, in place of `limits.bytes`, and what the server said last.
    bytes: AtomicU64,
    offered: AtomicU64,
    link: Mutex<Link>,
    /// Something is to be sent, a connection was made or lost, or the end.
    changed: Condvar,
}

struct Link {
    table: Table,
    /// The connection, while there is one.
    stream: Option<Arc<Stream>>,
    /// It was lost so long ago that nothing waits for it.
    is_given_up: bool,
    /// An attempt to connect is in progress, which takes a while to fail.
    is_connecting: bool,
    /// Requests are copied to be sent on a connection.
    is_sending: bool,
    /// Sending on the present connection has failed with this error.
    send_failed: Option<io::Error>,
    /// The store is being closed: from then on nothing waits for the server.
    closes: Option<Instant>,
    is_over: bool,
    notices: Notices,
}

impl Link {
    fn new(stream: Option<Arc<Stream>>) -> Self {
        Self {
            table: Table::default(),
            stream,
            is_given_up: false,
            is_connecting: false,
            is_sending: false,
            send_failed: None,
            closes: None,
            is_over: false,
            notices: Notices::default(),
        }
    }

    /// Returns how long something may take that takes at most this long.
    fn left(&self, most: Duration) -> Duration {
        let closes = self.closes.map(|at| at.saturating_duration_since(Instant::now()));
        closes.map_or(most, |left| left.min(most))
    }

    /// Tells whether nothing waits for the server any more.
    fn is_late(&self) -> bool {
        self.left(Duration::MAX).is_zero()
    }
}

impl Nbd {
    /// Connects to a server.
    pub(super) fn new(uri: NbdUri, read_only: bool, block: u32) -> io::Result<Self> {
        let (connect, patience, silence) = (CONNECT, PATIENCE, SILENCE);
        let times = Times { connect, patience, silence, answer: ANSWER, close: CLOSE };
        Self::with(uri, read_only, block, times)
    }

    fn with(uri: NbdUri, read_only: bool, block: u32, times: Times) -> io::Result<Self> {
        let (stream, export) = Stream::open(&uri, times.connect)?;
        let limits = limits(&export, read_only, block)?;
        let stream = Arc::new(stream);
        let link = Link::new(Some(Arc::clone(&stream)));
        let shared = Arc::new(Shared {
            uri,
            times,
            limits,
            flushes: export.has(wire::SEND_FLUSH),
            bytes: AtomicU64::new(limits.bytes),
            offered: AtomicU64::new(limits.bytes),
            link: Mutex::new(link),
            changed: Condvar::new(),
        });
        let mut nbd = Self { shared: Arc::clone(&shared), threads: Mutex::default() };
        let threads = nbd.threads.get_mut().unwrap_or_else(PoisonError::into_inner);
        let named = |name: &str| thread::Builder::new().name(name.to_owned());
        let from = Arc::clone(&shared);
        let receive = move || from.receive(stream, export.is_structured);
        threads.push(named(FROM).spawn(receive)?);
        threads.push(named("bowline-nbd-to").spawn(move || shared.send())?);
        Ok(nbd)
    }
}

/// Returns the limits of a store with this export behind it.
fn limits(export: &Export, read_only: bool, block: u32) -> io::Result<Limits> {
    let logical = block.max(export.min_block);
    check_block(logical)?;
    let read_only = read_only || export.has(wire::READ_ONLY);
    let whole = |bytes: u32| bytes - bytes % logical;
    let max_io = whole(export.max_payload);
    let granularity = export.preferred_block.clamp(logical, PHYSICAL.max(logical));
    let discard = Discard { max_bytes: DISCARD_MAX, granularity, alignment: 0 };
    let bytes = export.bytes - export.bytes % u64::from(logical);
    if bytes == 0 {
        return Err(io::Error::new(ErrorKind::InvalidData, "the export is smaller than a block"));
    }
    Ok(Limits {
        logical,
        physical: PHYSICAL.max(logical),
        max_io,
        discard: export.has(wire::SEND_TRIM).then_some(discard),
        // Servers that write zeroes as data take no more of them than of data.
        max_write_zeroes: if export.has(wire::SEND_WRITE_ZEROES) { max_io } else { 0 },
        write_cache: export.has(wire::SEND_FLUSH),
        fua: export.has(wire::SEND_FUA),
        read_only,
        ..Limits::plain(bytes)
    })
}

/// Tells whether a server that was connected again still has what the store has promised [NB-77].
fn keeps_promises(export: &Export, promised: &Limits) -> bool {
    limits(export, promised.read_only, promised.logical).is_ok_and(|now| {
        now.logical == promised.logical
            && now.max_io >= promised.max_io
            && (promised.read_only || !now.read_only)
            && (promised.discard.is_none() || now.discard.is_some())
            && now.max_write_zeroes >= promised.max_write_zeroes
            // Clients that were promised that nothing waits for a flush send none.
            && now.write_cache == promised.write_cache
            && (!promised.fua || now.fua)
            && now.bytes >= promised.bytes
    })
}

impl Backend for Nbd {
    fn limits(&self) -> Limits {
        self.shared.limits()
    }

    fn submit(&self, io: &mut Vec<BackendIo>, done: &Arc<dyn BackendDone>) {
        let shared = &*self.shared;
        let limits = shared.limits();
        let mut answered = Vec::new();
        let mut link = shared.lock();
        for io in io.drain(..) {
            let result = io.check(&limits).and_then(|()| {
                let is_flush = io.op == IoOp::Flush;
                if is_flush && !shared.flushes || !is_flush && io.len == 0 {
                    Ok(true)
                } else if link.is_given_up || link.is_over || link.is_late() {
                    Err(Errno::ENOLINK)
                } else if is_flush && link.table.losses.report(io.user) {
                    Err(Errno::EIO)
                } else {
                    Ok(false)
                }
            });
            match result {
                Ok(false) => pieces(io, limits.max_io, done, |piece| link.table.add(piece)),
                Ok(true) => answered.push(BackendResult::new(io.token, Ok(()))),
                Err(errno) => answered.push(BackendResult::new(io.token, Err(errno))),
            }
        }
        drop(link);
        shared.changed.notify_all();
        if !answered.is_empty() {
            done.done(&answered);
        }
    }

    fn begin_close(&self) {
        self.shared.begin_close();
    }

    fn close(&self) -> io::Result<()> {
        let threads = std::mem::take(&mut *lock(&self.threads));
        if threads.is_empty() {
            return Ok(());
        }
        self.shared.begin_close();
        if threads.iter().any(|thread| thread.thread().id() == thread::current().id()) {
            // Closed by who is being answered: what is waited for here would wait for this thread.
            self.shared.end();
            return Ok(());
        }
        let flushed = self.shared.flush();
        let connects = self.shared.end();
        for thread in threads {
            // One that connects ends by itself, with its attempt.
            if !(connects && thread.thread().name() == Some(FROM)) {
                // A panic of the thread was printed when it happened.
                let _ = thread.join();
            }
        }
        flushed
    }

    fn take_notices(&self) -> Vec<String> {
        std::mem::take(&mut self.shared.lock().notices.texts)
    }

    /// The size is that of the last handshake: NBD has no message for it.
    fn resize(&self) -> io::Result<u64> {
        // Relaxed, all: the numbers publish nothing but themselves.
        let bytes = self.shared.offered.load(Ordering::Relaxed);
        self.shared.bytes.store(bytes, Ordering::Relaxed);
        Ok(bytes)
    }
}

/// Splits a request as the server accepts it.
fn pieces(io: BackendIo, max_io: u32, done: &Arc<dyn BackendDone>, mut add: impl FnMut(Piece)) {
    let BackendIo { token, op, offset, len, fua, nounmap, mem, user, .. } = io;
    let most = if op.has_data() { max_io } else { len.max(1) };
    let count = len.div_ceil(most).max(1);
    let (left, errno) = (AtomicU32::new(count), AtomicI32::new(0));
    let whole = Arc::new(Whole { token, done: Arc::clone(done), left, errno });
    for number in 0..count {
        let at = number * most;
        let len = most.min(len - at);
        let mem = mem.as_ref().map(|mem| Mem {
            buffer: Arc::clone(&mem.buffer),
            offset: mem.offset + at as usize,
            len: len as usize,
        });
        let whole = Arc::clone(&whole);
        add(Piece { op, offset: offset + u64::from(at), len, fua, nounmap, mem, user, whole });
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Link> {
        lock(&self.link)
    }

    fn limits(&self) -> Limits {
        Limits { bytes: self.bytes.load(Ordering::Relaxed), ..self.limits }
    }

    /// Waits for a change, at most until nothing waits any more.
    fn wait<'a>(&self, link: MutexGuard<'a, Link>) -> MutexGuard<'a, Link> {
        if link.closes.is_none() || link.is_late() {
            return self.changed.wait(link).unwrap_or_else(PoisonError::into_inner);
        }
        let left = link.left(Duration::MAX);
        self.changed.wait_timeout(link, left).unwrap_or_else(PoisonError::into_inner).0
    }

    /// Sends what waits, until the end.
    fn send(&self) {
        let mut batch = Vec::with_capacity(BATCH);
        let mut out = Vec::new();
        loop {
            let mut link = self.lock();
            link.is_sending = false;
            if link.stream.is_none() {
                // The other thread may wait for this.
                self.changed.notify_all();
            }
            let stream = loop {
                if link.is_over {
                    let stream = link.stream.take().filter(|_| !link.table.has_sent());
                    drop(link);
                    return goodbye(stream);
                }
                match &link.stream {
                    Some(stream) if link.table.waits() => break Arc::clone(stream),
                    None if link.table.waits() && link.is_late() => {
                        drop(link);
                        self.fail_all(Errno::EIO);
                        link = self.lock();
                    }
                    _ => link = self.wait(link),
                }
            };
            let now = Instant::now();
            batch.extend(std::iter::from_fn(|| link.table.next(now)).take(BATCH));
            link.is_sending = true;
            drop(link);
            let sent = send_all(&stream, &mut out, &mut batch, |cookie| self.copied(cookie));
            if let Err(error) = sent {
                let mut link = self.lock();
                if link.stream.take_if(|present| Arc::ptr_eq(present, &stream)).is_some() {
                    link.send_failed = Some(error);
                }
                drop(link);
                // The other thread sees the end, and makes a new connection.
                stream.close();
            }
        }
    }

    /// The data of a write has been copied.
    fn copied(&self, cookie: u64) {
        let mut finished = Finished::new();
        self.lock().table.copied(cookie, &mut finished);
        deliver(&mut finished, &mut Vec::new());
    }

    fn fail_all(&self, errno: Errno) {
        let mut finished = Finished::new();
        self.lock().table.fail_all(errno, &mut finished);
        deliver(&mut finished, &mut Vec::new());
    }

    /// Takes replies, and connects again, until the end.
    fn receive(&self, mut stream: Arc<Stream>, mut is_structured: bool) {
        loop {
            let began = Instant::now();
            let error = self.serve(&stream, is_structured);
            let mut link = self.lock();
            // This thread's own end of the stream comes of it.
            let error = link.send_failed.take().unwrap_or(error);
            link.stream = None;
            stream.close();
            // The memory of a request that ends must not be read any more.
            let is_sending = |link: &mut Link| link.is_sending;
            let waited = self.changed.wait_while(link, is_sending);
            link = waited.unwrap_or_else(PoisonError::into_inner);
            let cut = cut(&error);
            if !link.is_over {
                link.notices.lost(&error, cut);
            }
            let mut finished = Finished::new();
            link.table.lost(cut, &mut finished);
            drop(link);
            deliver(&mut finished, &mut Vec::new());
            // A server that closes each connection at once is not asked without end.
            let pause = if began.elapsed() < PAUSES[1] { PAUSES[0] } else { Duration::ZERO };
            let Some((next, structured)) = self.connect_again(pause) else { break };
            (stream, is_structured) = (next, structured);
        }
        self.lock().is_given_up = true;
        self.fail_all(Errno::EIO);
    }

    /// Takes replies until the connection is lost; returns why.
    fn serve(&self, stream: &Stream, is_structured: bool) -> io::Error {
        let now = Instant::now();
        let patient = Patient { shared: self, stream, last: now, checked: now };
        let mut input = BufReader::with_capacity(64 << 10, patient);
        let mut replies = Replies::new(is_structured);
        let mut in_flight =
            InFlight { shared: self, finished: Finished::new(), mem: None, is_leaving: false };
        let mut results = Vec::new();
        loop {
            if let Err(error) = replies.next(&mut input, &mut in_flight) {
                return error;
            }
            deliver(&mut in_flight.finished, &mut results);
            if in_flight.is_leaving && !self.lock().table.has_sent() {
                return ErrorKind::ConnectionReset.into();
            }
        }
    }

    /// Connects, after a pause, until that succeeds, or to the end. What waits for too long fails.
    fn connect_again(&self, mut pause: Duration) -> Option<(Arc<Stream>, bool)> {
        let began = Instant::now();
        let [first, longest] = PAUSES;
        loop {
            let link = self.lock();
            let (is_over, left) = (|link: &mut Link| !link.is_over, link.left(pause));
            let waited = self.changed.wait_timeout_while(link, left, is_over);
            let mut link = waited.unwrap_or_else(PoisonError::into_inner).0;
            if link.is_over || link.is_late() {
                return None;
            }
            link.is_connecting = true;
            let limit = link.left(self.times.connect);
            drop(link);
            let opened = Stream::open(&self.uri, limit);
            let mut link = self.lock();
            link.is_connecting = false;
            match opened {
                Ok((stream, export)) if keeps_promises(&export, &self.limits) => {
                    let bytes = export.bytes - export.bytes % u64::from(self.limits.logical);
                    self.offered.store(bytes, Ordering::Relaxed);
                    let stream = Arc::new(stream);
                    link.stream = Some(Arc::clone(&stream));
                    link.is_given_up = false;
                    link.notices.is_back();
                    drop(link);
                    self.changed.notify_all();
                    return Some((stream, export.is_structured));
                }
                Ok(_) => link.notices.is_refused("it has less now than it had before"),
                Err(error) => link.notices.is_refused(&error.to_string()),
            }
            if began.elapsed() >= self.times.patience && !link.is_given_up {
                link.is_given_up = true;
                drop(link);
                self.fail_all(Errno::ENOLINK);
            }
            pause = (pause * 2).clamp(first, longest);
        }
    }

    /// From now on requests and the end wait for a limited time.
    fn begin_close(&self) {
        let mut link = self.lock();
        link.closes.get_or_insert_with(|| Instant::now() + self.times.close);
        drop(link);
        self.changed.notify_all();
    }

    /// Makes durable what is not, while the store is being closed.
    fn flush(&self) -> io::Result<()> {
        let (sender, results) = mpsc::channel();
        let mut link = self.lock();
        if !self.flushes || !link.table.losses.is_unflushed() {
            return Ok(());
        }
        let done: Arc<dyn BackendDone> = Arc::new(LastFlush(sender));
        pieces(BackendIo::new(0, IoOp::Flush, 0, 0), 1, &done, |piece| link.table.add(piece));
        let left = link.left(Duration::MAX);
        drop((link, done));
        self.changed.notify_all();
        match results.recv_timeout(left) {
            Ok(0) => Ok(()),
            Ok(errno) => Err(io::Error::from_raw_os_error(-errno)),
            Err(_) => Err(ErrorKind::TimedOut.into()),
        }
    }

    /// Has the threads end; returns whether one connects.
    fn end(&self) -> bool {
        let mut link = self.lock();
        link.is_over = true;
        let stream = link.stream.clone().filter(|_| link.table.has_sent());
        let connects = link.is_connecting;
        drop(link);
        // The thread that sends may wait for a server that does not read.
        stream.iter().for_each(|stream| stream.close());
        self.changed.notify_all();
        connects
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing in a critical section panics.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns how a connection has ended that ends with this error.
fn cut(error: &io::Error) -> Cut {
    match error.kind() {
        ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset | ErrorKind::BrokenPipe => {
            Cut::ByServer
        }
        // Of the system: nothing that was sent is acknowledged, but it may have arrived.
        ErrorKind::TimedOut if error.raw_os_error().is_none() => Cut::Silent,
        _ => Cut::Unknown,
    }
}

/// Who waits for the last flush.
struct LastFlush(mpsc::Sender<i32>);

impl BackendDone for LastFlush {
    fn done(&self, results: &[BackendResult]) {
        // An error means that the store does not wait any longer.
        results.iter().for_each(|result| _ = self.0.send(result.errno));
    }
}

/// Takes leave of the server, if it has nothing more to answer.
fn goodbye(stream: Option<Arc<Stream>>) {
    if let Some(stream) = stream {
        // An error means that it is gone already, or reads nothing.
        let _ = stream.set_patience(TICK, Some(TICK));
        let _ = (&*stream).write_all(&header(0, wire::CMD_DISC, 0, 0, 0));
        stream.close();
    }
}

fn header(flags: u16, command: u16, cookie: u64, offset: u64, len: u32) -> [u8; 28] {
    let mut out = [0; 28];
    out[..4].copy_from_slice(&wire::REQUEST_MAGIC.to_be_bytes());
    out[4..6].copy_from_slice(&flags.to_be_bytes());
    out[6..8].copy_from_slice(&command.to_be_bytes());
    out[8..16].copy_from_slice(&cookie.to_be_bytes());
    out[16..24].copy_from_slice(&offset.to_be_bytes());
    out[24..].copy_from_slice(&len.to_be_bytes());
    out
}

/// Returns the header of a request.
fn request(cookie: u64, piece: &Piece) -> [u8; 28] {
    let mut flags = if piece.fua { wire::CMD_FLAG_FUA } else { 0 };
    let command = match piece.op {
        IoOp::Read => wire::CMD_READ,
        IoOp::Write => wire::CMD_WRITE,
        IoOp::Flush => return header(0, wire::CMD_FLUSH, cookie, 0, 0),
        IoOp::WriteZeroes => {
            flags |= if piece.nounmap { wire::CMD_FLAG_NO_HOLE } else { 0 };
            wire::CMD_WRITE_ZEROES
        }
        // The limits have no secure erase.
        IoOp::Discard | IoOp::SecureErase => wire::CMD_TRIM,
    };
    header(flags, command, cookie, piece.offset, piece.len)
}

/// Sends requests with their data, and leaves `batch` empty. `out` is scratch memory. `copied` is
/// called for each write of which the memory is not needed any more, by its cookie.
fn send_all(
    mut stream: &Stream,
    out: &mut Vec<u8>,
    batch: &mut Vec<(u64, Piece)>,
    mut copied: impl FnMut(u64),
) -> io::Result<()> {
    out.clear();
    let mut result = Ok(());
    for (cookie, piece) in batch.drain(..) {
        let mem = piece.mem.as_ref().filter(|_| piece.op == IoOp::Write);
        if result.is_ok() {
            out.extend_from_slice(&request(cookie, &piece));
        }
        let mut at = 0;
        while let Some(mem) = mem.filter(|mem| at < mem.len && result.is_ok()) {
            let len = (mem.len - at).min(SEND);
            // A copy, since clients that break the rules may change it at any time.
            mem.buffer.append_to(mem.offset + at, len, out);
            at += len;
            if out.len() >= SEND {
                result = stream.write_all(out);
                out.clear();
            }
        }
        // A write of which the data was not sent has not succeeded, whatever the server says.
        if mem.is_some() && result.is_ok() {
            copied(cookie);
        }
    }
    result.and_then(|()| stream.write_all(out))
}

impl Drop for Nbd {
    fn drop(&mut self) {
        // Who wants to know the result closes the store before.
        let _ = self.close();
    }
}

/// What the server sends, for which as long is waited as it has requests, within limits.
struct Patient<'a> {
    shared: &'a Shared,
    stream: &'a Stream,
    /// When something came, or it had nothing to answer.
    last: Instant,
    /// When it was checked how old its requests are.
    checked: Instant,
}

impl Patient<'_> {
    /// Checks, now and then, whether to wait any longer.
    fn check(&mut self, now: Instant) -> io::Result<()> {
        if now.duration_since(self.checked) < TICK {
            return Ok(());
        }
        self.checked = now;
        let link = self.shared.lock();
        if link.is_over {
            return Err(ErrorKind::ConnectionAborted.into());
        }
        let times = &self.shared.times;
        let Some(oldest) = link.table.oldest() else {
            self.last = now;
            return Ok(());
        };
        let is_silent = now.saturating_duration_since(self.last) >= times.silence;
        let is_slow = now.saturating_duration_since(oldest) >= times.answer;
        if is_silent || is_slow || link.is_late() {
            return Err(ErrorKind::TimedOut.into());
        }
        Ok(())
    }
}

impl Read for Patient<'_> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let mut stream = self.stream;
        loop {
            let read = stream.read(out);
            let now = Instant::now();
            match read {
                // The system has waited for a tick.
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    self.checked = now.checked_sub(TICK).unwrap_or(self.checked);
                    self.check(now)?;
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                read => {
                    self.last = now;
                    self.check(now)?;
                    return read;
                }
            }
        }
    }
}

/// The requests that the server has, for the reader of its replies.
struct InFlight<'a> {
    shared: &'a Shared,
    finished: Finished,
    /// Memory of the request that was found last.
    mem: Option<Mem>,
    /// The server ends, and executes nothing more: another one may.
    is_leaving: bool,
}

impl Requests for InFlight<'_> {
    fn find(&mut self, cookie: u64) -> Option<Asked> {
        let (asked, mem) = self.shared.lock().table.asked(cookie)?;
        self.mem = mem;
        Some(asked)
    }

    fn data(&mut self, _: u64, at: u32, bytes: &[u8]) {
        if let Some(mem) = &self.mem {
            mem.buffer.write(mem.offset + at as usize, bytes);
        }
    }

    fn ended(&mut self, cookie: u64, error: u32) {
        self.mem = None;
        let mut link = self.shared.lock();
        if error == wire::ESHUTDOWN {
            self.is_leaving = true;
            // It is sent nothing more.
            link.stream = None;
            link.table.refused(cookie, &mut self.finished);
        } else {
            link.table.answered(cookie, errno(error), &mut self.finished);
        }
    }
}

/// Converts an error number of NBD, which are Linux's, to a negative errno of a disk.
fn errno(error: u32) -> i32 {
    match error {
        0 => 0,
        wire::EPERM => Errno::EPERM.neg(),
        wire::ENOMEM => Errno::ENOMEM.neg(),
        wire::EINVAL => Errno::EINVAL.neg(),
        wire::ENOSPC => Errno::ENOSPC.neg(),
        wire::ENOTSUP => Errno::EOPNOTSUPP.neg(),
        _ => Errno::EIO.neg(),
    }
}

/// Opens the store of an NBD server.
pub(super) fn open(uri: NbdUri, read_only: bool, block: u32) -> io::Result<Arc<dyn Backend>> {
    check_block(block)?;
    Ok(Arc::new(Nbd::new(uri, read_only, block)?))
}
