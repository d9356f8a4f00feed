//! The connection of one NBD client.

use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Weak};
use std::time::Duration;

use bowline_ctl::{ClientConnection, ClientHandler};
use bowline_rnbd::{Errno, IoOp, Limits};
use bowline_verbs::Mem;
use rustix::net::RecvFlags;

use super::handshake::{self, Outcome};
use super::output::{Output, Reply};
use super::requests::{Place, Request, Requests};
use super::{NbdOptions, wire};
use crate::device::{BlockDevice, DiskDone, DiskIo};
use crate::front::sys;
use crate::front::turns::Turns;

/// Timeout of each message of the handshake.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// Size in bytes of the input buffer. Data of larger writes is received straight into its memory.
const READ_AHEAD: usize = 64 << 10;
/// After a write of at least this many bytes only the next request is received, so that its data
/// need not be copied out of the buffer.
const LARGE: u32 = 16 << 10;

/// A connection, shared by its two threads and the requests in flight.
pub(super) struct Connection {
    weak_self: Weak<Self>,
    client: ClientConnection,
    disk: Arc<dyn BlockDevice>,
    options: NbdOptions,
    requests: Requests,
    output: Output,
    /// The client has hung up, so data read for it is unwanted. Relaxed, as `aborted`: neither
    /// guards other memory.
    hung_up: AtomicBool,
    /// All requests of the connection are unwanted.
    aborted: AtomicBool,
}

/// Why a client sends no more requests.
enum Ended {
    /// It has sent NBD_CMD_DISC: requests in flight are answered first.
    Disconnect,
    /// It is gone, or has sent an invalid request.
    Broken,
}

impl From<io::Error> for Ended {
    fn from(_: io::Error) -> Self {
        Self::Broken
    }
}

/// Returns the limits of a disk as its clients see them.
fn limits(disk: &dyn BlockDevice, options: &NbdOptions) -> Limits {
    let limits = disk.limits();
    Limits { read_only: limits.read_only || options.read_only, ..limits }
}

/// Executes the handshake with a client.
fn negotiate(
    socket: &UnixStream,
    disk: &dyn BlockDevice,
    options: &NbdOptions,
) -> io::Result<Outcome> {
    socket.set_read_timeout(Some(HANDSHAKE_TIMEOUT))?;
    socket.set_write_timeout(Some(HANDSHAKE_TIMEOUT))?;
    let outcome =
        handshake::run(&mut UnbufferedSocket(socket), disk.name(), || limits(disk, options))?;
    socket.set_read_timeout(None)?;
    // Several large replies fit, so that a completing thread need not leave them to the writing
    // thread. The system gives less where its limit is lower.
    let _ = rustix::net::sockopt::set_socket_send_buffer_size(socket, 4 << 20);
    Ok(outcome)
}

impl Connection {
    /// Serves a client until one side ends it.
    pub(super) fn serve(
        client: ClientConnection,
        disk: Arc<dyn BlockDevice>,
        options: NbdOptions,
    ) -> io::Result<()> {
        if negotiate(client.socket(), &*disk, &options)? == Outcome::Abort {
            return Ok(());
        }
        let memory =
            disk.memory(options.memory).map_err(|errno| io::Error::from_raw_os_error(errno.0))?;
        let connection = Arc::new_cyclic(|me| Self {
            weak_self: me.clone(),
            client,
            disk,
            options,
            requests: Requests::new(memory),
            output: Output::default(),
            hung_up: AtomicBool::new(false),
            aborted: AtomicBool::new(false),
        });
        let handler: Weak<dyn ClientHandler> = connection.weak_self.clone();
        connection.client.set_handler(handler);
        connection.run();
        Ok(())
    }

    fn run(&self) {
        std::thread::scope(|threads| {
            let writer = std::thread::Builder::new()
                .name("bowline-nbd-out".into())
                .spawn_scoped(threads, || self.output.write(self.socket(), &self.requests));
            let ended = if writer.is_ok() { self.read() } else { Err(Ended::Broken) };
            self.disk.leave();
            if matches!(ended, Err(Ended::Disconnect)) || self.client.is_finishing() {
                self.requests.wait_all();
            }
            self.abort();
            self.client.shut_down();
            self.output.close(&self.requests);
        });
    }

    fn socket(&self) -> &UnixStream {
        self.client.socket()
    }

    /// Reads requests; never returns `Ok`.
    fn read(&self) -> Result<(), Ended> {
        let mut input = Input::new(self.socket(), &*self.disk);
        let mut batch = Vec::new();
        loop {
            if input.buffered().len() < wire::REQUEST_LEN {
                self.disk.submit(&mut batch);
                self.await_request(&mut input)?;
            }
            let request = input.buffered().get(..wire::REQUEST_LEN).and_then(wire::Request::parse);
            let request = request.ok_or(Ended::Broken)?;
            input.consume(wire::REQUEST_LEN);
            input.limit = match request.command {
                wire::CMD_WRITE if request.len >= LARGE => wire::REQUEST_LEN,
                _ => READ_AHEAD,
            };
            let handled = self.handle_request(&request, &mut input, &mut batch);
            if let Err(Ended::Disconnect) = handled {
                self.disk.submit(&mut batch);
            }
            handled?;
        }
    }

    /// Receives until a request is buffered. While requests are in flight, this thread answers them
    /// too, if no other thread of the disk does: one that the client waits for is then answered
    /// without a hand-over.
    fn await_request(&self, input: &mut Input<'_>) -> Result<(), Ended> {
        let are_pending = || self.requests.are_pending();
        while input.buffered().len() < wire::REQUEST_LEN {
            let socket = self.socket().as_fd();
            // Something has ended, a request has come, or it is time to look for one.
            let has_turn =
                are_pending() && input.turns.take(&*self.disk, socket, &are_pending).is_some();
            input.fill_some(!has_turn)?;
        }
        Ok(())
    }

    /// Handles one request and its data: adds it to the batch, or answers it with an error.
    fn handle_request(
        &self,
        request: &wire::Request,
        input: &mut Input<'_>,
        batch: &mut Vec<DiskIo>,
    ) -> Result<(), Ended> {
        let limits = limits(&*self.disk, &self.options);
        let op = match request.command {
            wire::CMD_DISC => return Err(Ended::Disconnect),
            wire::CMD_READ => Ok(IoOp::Read),
            wire::CMD_WRITE => Ok(IoOp::Write),
            wire::CMD_FLUSH => Ok(IoOp::Flush),
            wire::CMD_TRIM => Ok(IoOp::Discard),
            wire::CMD_WRITE_ZEROES => Ok(IoOp::WriteZeroes),
            _ => Err(Errno::EINVAL),
        };
        let op = op.and_then(|op| check(&limits, request, op).map(|()| op));
        let is_write = request.command == wire::CMD_WRITE;
        if is_write && request.len > wire::MAX_PAYLOAD {
            // Too much data even to skip.
            return Err(Ended::Broken);
        }
        if op == Ok(IoOp::Read) && self.hung_up.load(Relaxed) {
            return Ok(());
        }
        let data = match op {
            Ok(IoOp::Read | IoOp::Write) => request.len,
            _ => 0,
        };
        if self.requests.is_separate(data) {
            input.turns.leave(&*self.disk);
        }
        let place = self.requests.allocate(&*self.disk, data, || {
            self.disk.submit(batch);
            input.turns.leave(&*self.disk);
        });
        let (op, place) = match (op, place.ok_or(Ended::Broken)?) {
            (Ok(op), Ok(place)) => (op, place),
            (op, place) => {
                let errno = op.err().or(place.as_ref().err().copied()).unwrap_or(Errno::EIO);
                if is_write {
                    self.disk.submit(batch);
                    input.skip(request.len as usize)?;
                }
                // Many of them may follow.
                input.turns.leave(&*self.disk);
                self.refuse(request.cookie, errno);
                return Ok(());
            }
        };
        let mem = self.requests.memory(&place, data);
        if let (IoOp::Write, Some((mem, _))) = (op, &mem) {
            if input.buffered().len() < mem.len {
                self.disk.submit(batch);
            }
            if let Err(error) = input.read_into(mem) {
                self.requests.release(&place, data);
                return Err(error.into());
            }
        }
        let fua = request.flags & wire::CMD_FLAG_FUA != 0;
        // RNBD supports FUA for writes only. [NB-24]
        let native_fua = op == IoOp::Write && limits.fua;
        let tag = self.requests.add(Request {
            cookie: request.cookie,
            place,
            len: data,
            is_read: op == IoOp::Read,
            flush_after: fua && op.changes() && !native_fua && limits.write_cache,
        });
        batch.push(DiskIo {
            op,
            offset: if op == IoOp::Flush { 0 } else { request.offset },
            len: if op == IoOp::Flush { 0 } else { request.len },
            fua: fua && native_fua,
            nounmap: request.flags & wire::CMD_FLAG_NO_HOLE != 0,
            mem: mem.map(|(_, name)| name),
            tag,
            done: self.done().ok_or(Ended::Broken)?,
        });
        Ok(())
    }

    fn done(&self) -> Option<Arc<dyn DiskDone>> {
        Some(self.weak_self.upgrade()?)
    }

    fn refuse(&self, cookie: u64, errno: Errno) {
        let header = wire::reply(wire::error_of(errno.neg()), cookie);
        let reply = Reply { header, place: Place::None, len: 0, has_data: false };
        self.output.send(self.socket(), &self.requests, std::iter::once(reply));
    }
}

impl ClientHandler for Connection {
    /// Requests sent before are still executed, except reads.
    fn hung_up(&self) {
        self.hung_up.store(true, Relaxed);
        self.requests.stop_waiting();
        self.disk.cancel_unwanted();
    }

    fn abort(&self) {
        self.aborted.store(true, Relaxed);
        self.requests.close();
        self.disk.cancel_unwanted();
    }
}

impl DiskDone for Connection {
    fn is_wanted(&self, op: IoOp) -> bool {
        !self.aborted.load(Relaxed) && (op != IoOp::Read || !self.hung_up.load(Relaxed))
    }

    fn done(&self, results: &[(u64, i32)]) {
        let mut flushes = Vec::new();
        let replies = results.iter().filter_map(|&(tag, errno)| {
            let Ok(request) = self.requests.complete(tag, errno)? else {
                flushes.push(tag);
                return None;
            };
            Some(Reply {
                header: wire::reply(wire::error_of(errno), request.cookie),
                place: request.place,
                len: request.len,
                has_data: request.is_read && errno == 0,
            })
        });
        self.output.send(self.socket(), &self.requests, replies);
        if let (false, Some(done)) = (flushes.is_empty(), self.done()) {
            let flush = |tag| DiskIo {
                op: IoOp::Flush,
                offset: 0,
                len: 0,
                fua: false,
                nounmap: false,
                mem: None,
                tag,
                done: done.clone(),
            };
            self.disk.submit(&mut flushes.into_iter().map(flush).collect());
        }
    }
}

/// Refuses requests that are invalid in NBD, before they reach the disk.
fn check(limits: &Limits, request: &wire::Request, op: IoOp) -> Result<(), Errno> {
    let known = wire::CMD_FLAG_FUA | wire::CMD_FLAG_NO_HOLE;
    if request.flags & !known != 0 {
        return Err(Errno::EINVAL);
    }
    if op == IoOp::Flush {
        return Ok(());
    }
    if limits.read_only && op.changes() {
        return Err(Errno::EPERM);
    }
    let (offset, len, block) = (request.offset, u64::from(request.len), u64::from(limits.logical));
    if !offset.is_multiple_of(block) || !len.is_multiple_of(block) {
        return Err(Errno::EINVAL);
    }
    if op == IoOp::Read && request.len > wire::MAX_PAYLOAD {
        return Err(Errno::EINVAL);
    }
    if !limits.holds(offset, len) {
        // As NBD demands: ENOSPC for writes, EINVAL for others.
        let writes = matches!(op, IoOp::Write | IoOp::WriteZeroes);
        return Err(if writes { Errno::ENOSPC } else { Errno::EINVAL });
    }
    Ok(())
}

/// Socket of the handshake, which reads exactly what it needs: no byte of the first request is lost
/// in a buffer.
struct UnbufferedSocket<'a>(&'a UnixStream);

impl Read for UnbufferedSocket<'_> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        self.0.read(out)
    }
}

impl Write for UnbufferedSocket<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.write(bytes)
    }
    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

/// Buffered input of the socket.
struct Input<'a> {
    socket: &'a UnixStream,
    bytes: Box<[u8]>,
    start: usize,
    end: usize,
    /// Most bytes to buffer.
    limit: usize,
    disk: &'a dyn BlockDevice,
    turns: Turns,
}

impl<'a> Input<'a> {
    fn new(socket: &'a UnixStream, disk: &'a dyn BlockDevice) -> Self {
        let (bytes, turns) = (vec![0; READ_AHEAD].into(), Turns::default());
        Self { socket, bytes, start: 0, end: 0, limit: READ_AHEAD, disk, turns }
    }

    /// Returns the bytes that are buffered.
    fn buffered(&self) -> &[u8] {
        &self.bytes[self.start..self.end]
    }

    fn consume(&mut self, n: usize) {
        self.start += n;
        assert!(self.start <= self.end, "skipped what was not read");
    }

    /// Buffers more bytes, if there are any or once there are some.
    fn fill_some(&mut self, waits: bool) -> io::Result<()> {
        self.bytes.copy_within(self.start..self.end, 0);
        (self.start, self.end) = (0, self.end - self.start);
        // What is buffered already is less than a request, or skipped.
        let limit = self.limit.max(self.end + 1).min(self.bytes.len());
        if waits {
            self.turns.leave(self.disk);
        }
        let flags = if waits { RecvFlags::empty() } else { RecvFlags::DONTWAIT };
        match rustix::net::recv(self.socket, &mut self.bytes[self.end..limit], flags) {
            Ok((_, 0)) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok((_, n)) => self.end += n,
            Err(rustix::io::Errno::INTR | rustix::io::Errno::AGAIN) => {}
            Err(error) => return Err(error.into()),
        }
        Ok(())
    }

    /// Fills memory with the next bytes: those that are not buffered are received straight into it.
    fn read_into(&mut self, mem: &Mem) -> io::Result<()> {
        let first = self.buffered().len().min(mem.len);
        mem.buffer.write(mem.offset, &self.buffered()[..first]);
        self.consume(first);
        let mut rest = Mem { offset: mem.offset + first, len: mem.len - first, ..mem.clone() };
        while rest.len > 0 {
            let received = match sys::receive(self.socket.as_fd(), &rest, false) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.turns.leave(self.disk);
                    sys::receive(self.socket.as_fd(), &rest, true)
                }
                received => received,
            };
            match received {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(n) => (rest.offset, rest.len) = (rest.offset + n, rest.len - n),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Skips the next `n` bytes.
    fn skip(&mut self, mut n: usize) -> io::Result<()> {
        self.limit = READ_AHEAD;
        loop {
            let count = self.buffered().len().min(n);
            self.consume(count);
            n -= count;
            if n == 0 {
                return Ok(());
            }
            self.fill_some(true)?;
        }
    }
}
