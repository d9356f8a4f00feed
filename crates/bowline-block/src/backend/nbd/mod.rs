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
//! those that come later at once, until the server is back. What the server had been sent is sent
//! again: a server that answers nothing for [`SILENCE`] is disconnected, and what it had fails with
//! `ETIMEDOUT` instead, since it might still execute it after a later request. A server with a
//! cache that is started again may have lost what no flush has made durable: the next flush, or
//! those that wait, fail with `EIO`, once.

pub(crate) mod handshake;
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
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use bowline_rnbd::{Discard, Errno, IoOp, Limits};
use bowline_verbs::Mem;

use super::{Backend, BackendDone, BackendIo, BackendResult, check_block, deliver};
use crate::front::nbd::wire;
use handshake::Export;
use replies::{Asked, Replies, Requests};
use stream::Stream;
use table::{Finished, Piece, Table, Whole};
pub use uri::NbdUri;

/// How long connecting and the handshake may take.
const CONNECT: Duration = Duration::from_secs(10);
/// How long requests wait while there is no connection.
const PATIENCE: Duration = Duration::from_secs(30);
/// How long a server that has requests may send nothing.
const SILENCE: Duration = Duration::from_secs(60);
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
}

/// The store.
pub(super) struct Nbd {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
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
    is_over: bool,
}

impl Nbd {
    /// Connects to a server.
    pub(super) fn new(uri: NbdUri, read_only: bool, block: u32) -> io::Result<Self> {
        let times = Times { connect: CONNECT, patience: PATIENCE, silence: SILENCE };
        Self::with(uri, read_only, block, times)
    }

    fn with(uri: NbdUri, read_only: bool, block: u32, times: Times) -> io::Result<Self> {
        let (stream, export) = Stream::open(&uri, times.connect)?;
        let limits = limits(&export, read_only, block)?;
        let stream = Arc::new(stream);
        let link = Link {
            table: Table::default(),
            stream: Some(Arc::clone(&stream)),
            is_given_up: false,
            is_connecting: false,
            is_over: false,
        };
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
        let mut nbd = Self { shared: Arc::clone(&shared), threads: Vec::new() };
        let named = |name: &str| thread::Builder::new().name(name.to_owned());
        let from = Arc::clone(&shared);
        let receive = move || from.receive(stream, export.is_structured);
        nbd.threads.push(named(FROM).spawn(receive)?);
        nbd.threads.push(named("bowline-nbd-to").spawn(move || shared.send())?);
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
                } else if link.is_given_up || link.is_over {
                    Err(Errno::ENOLINK)
                } else if is_flush && link.table.take_lost() {
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
    let BackendIo { token, op, offset, len, fua, nounmap, mem, .. } = io;
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
        add(Piece { op, offset: offset + u64::from(at), len, fua, nounmap, mem, whole });
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Link> {
        // Nothing in a critical section panics.
        self.link.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn limits(&self) -> Limits {
        Limits { bytes: self.bytes.load(Ordering::Relaxed), ..self.limits }
    }

    /// Sends what waits, until the end.
    fn send(&self) {
        let mut batch = Vec::with_capacity(BATCH);
        let mut out = Vec::new();
        loop {
            let mut link = self.lock();
            let stream = loop {
                if link.is_over {
                    let stream = link.stream.take().filter(|_| !link.table.has_sent());
                    drop(link);
                    return goodbye(stream);
                }
                match &link.stream {
                    Some(stream) if link.table.waits() => break Arc::clone(stream),
                    _ => {
                        link = self.changed.wait(link).unwrap_or_else(PoisonError::into_inner);
                    }
                }
            };
            let now = Instant::now();
            batch.extend(std::iter::from_fn(|| link.table.next(now)).take(BATCH));
            drop(link);
            if send_all(&stream, &mut out, &mut batch).is_err() {
                // The other thread sees the end, and makes a new connection.
                stream.close();
                let mut link = self.lock();
                link.stream.take_if(|present| Arc::ptr_eq(present, &stream));
            }
        }
    }

    /// Takes replies, and connects again, until the end.
    fn receive(&self, mut stream: Arc<Stream>, mut is_structured: bool) {
        loop {
            let error = self.serve(&stream, is_structured);
            stream.close();
            let mut finished = Finished::new();
            let mut link = self.lock();
            link.stream = None;
            let silent = (error.kind() == ErrorKind::TimedOut).then_some(Errno::ETIMEDOUT);
            link.table.lost(silent, &mut finished);
            drop(link);
            deliver(&mut finished, &mut Vec::new());
            let Some((next, structured)) = self.connect_again() else { break };
            (stream, is_structured) = (next, structured);
        }
        let mut finished = Finished::new();
        self.lock().table.fail_all(Errno::EIO, &mut finished);
        deliver(&mut finished, &mut Vec::new());
    }

    /// Takes replies until the connection is lost; returns why.
    fn serve(&self, stream: &Stream, is_structured: bool) -> io::Error {
        let patient = Patient { shared: self, stream, last: Instant::now() };
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
            if in_flight.is_leaving {
                return ErrorKind::ConnectionReset.into();
            }
        }
    }

    /// Connects until that succeeds, or to the end. What waits for too long fails.
    fn connect_again(&self) -> Option<(Arc<Stream>, bool)> {
        let began = Instant::now();
        let [mut pause, longest] = PAUSES;
        loop {
            let mut link = self.lock();
            if link.is_over {
                return None;
            }
            link.is_connecting = true;
            drop(link);
            let opened = Stream::open(&self.uri, self.times.connect);
            let kept = opened.ok().filter(|(_, export)| keeps_promises(export, &self.limits));
            let mut link = self.lock();
            link.is_connecting = false;
            if let Some((stream, export)) = kept {
                let bytes = export.bytes - export.bytes % u64::from(self.limits.logical);
                self.offered.store(bytes, Ordering::Relaxed);
                let stream = Arc::new(stream);
                link.stream = Some(Arc::clone(&stream));
                link.is_given_up = false;
                drop(link);
                self.changed.notify_all();
                return Some((stream, export.is_structured));
            }
            if began.elapsed() >= self.times.patience {
                link.is_given_up = true;
                let mut finished = Finished::new();
                link.table.fail_all(Errno::ENOLINK, &mut finished);
                drop(link);
                deliver(&mut finished, &mut Vec::new());
                link = self.lock();
            }
            let is_over = |link: &mut Link| !link.is_over;
            let waited = self.changed.wait_timeout_while(link, pause, is_over);
            drop(waited.unwrap_or_else(PoisonError::into_inner));
            pause = (pause * 2).min(longest);
        }
    }
}

/// Takes leave of the server, if it has nothing more to answer.
fn goodbye(stream: Option<Arc<Stream>>) {
    if let Some(stream) = stream {
        // An error means that it is gone already.
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

/// Sends requests with their data, and leaves `batch` empty. `out` is scratch memory.
fn send_all(
    mut stream: &Stream,
    out: &mut Vec<u8>,
    batch: &mut Vec<(u64, Piece)>,
) -> io::Result<()> {
    out.clear();
    let mut result = Ok(());
    for (cookie, piece) in batch.drain(..) {
        if result.is_err() {
            continue;
        }
        out.extend_from_slice(&request(cookie, &piece));
        let mem = piece.mem.as_ref().filter(|_| piece.op == IoOp::Write);
        let mut at = 0;
        while let Some(mem) = mem.filter(|mem| at < mem.len) {
            let len = (mem.len - at).min(SEND);
            // A copy, since clients that break the rules may change it at any time.
            mem.buffer.append_to(mem.offset + at, len, out);
            at += len;
            if out.len() >= SEND && result.is_ok() {
                result = stream.write_all(out);
                out.clear();
            }
        }
    }
    result.and_then(|()| stream.write_all(out))
}

impl Drop for Nbd {
    fn drop(&mut self) {
        let mut link = self.shared.lock();
        link.is_over = true;
        let stream = link.stream.clone().filter(|_| link.table.has_sent());
        drop(link);
        // The thread that sends may wait for a server that does not read.
        stream.iter().for_each(|stream| stream.close());
        self.shared.changed.notify_all();
        let connects = self.shared.lock().is_connecting;
        for thread in self.threads.drain(..) {
            // One that connects ends by itself, with its attempt.
            let ends_late = connects && thread.thread().name() == Some(FROM);
            if !ends_late && thread.thread().id() != thread::current().id() {
                // A panic of the thread was printed when it happened.
                let _ = thread.join();
            }
        }
    }
}

/// What the server sends, for which as long is waited as it has requests, within limits.
struct Patient<'a> {
    shared: &'a Shared,
    stream: &'a Stream,
    /// When something came, or it had nothing to answer.
    last: Instant,
}

impl Read for Patient<'_> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let mut stream = self.stream;
        loop {
            match stream.read(out) {
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock) => {
                    let link = self.shared.lock();
                    if link.is_over {
                        return Err(ErrorKind::ConnectionAborted.into());
                    }
                    if !link.table.has_sent() {
                        self.last = Instant::now();
                    } else if self.last.elapsed() >= self.shared.times.silence {
                        return Err(ErrorKind::TimedOut.into());
                    }
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                // Of the system: the machine is gone, and with it whatever it was asked.
                Err(error) if error.kind() == ErrorKind::TimedOut => {
                    return Err(ErrorKind::ConnectionReset.into());
                }
                read => {
                    self.last = Instant::now();
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
        self.is_leaving |= error == wire::ESHUTDOWN;
        if error == wire::ESHUTDOWN {
            return;
        }
        self.shared.lock().table.answered(cookie, errno(error), &mut self.finished);
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
