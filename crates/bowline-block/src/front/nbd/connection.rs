//! One client.

use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Weak};
use std::time::Duration;

use bowline_ctl::{Guest, Visit};
use bowline_rnbd::{Errno, IoOp, Limits};
use bowline_verbs::Mem;

use super::handshake::{self, Outcome};
use super::output::{Output, Reply};
use super::requests::{Place, Request, Requests};
use super::{NbdOptions, wire};
use crate::device::{BlockDevice, DiskDone, DiskIo};
use crate::front::sys;

/// What a client may take for the handshake's next message.
const PATIENCE: Duration = Duration::from_secs(10);
/// Bytes read from the socket at once. Data of larger writes goes straight to its place.
const READ_AHEAD: usize = 64 << 10;

/// A connection, shared by its two threads and the requests under way.
pub(super) struct Connection {
    me: Weak<Self>,
    visit: Visit,
    disk: Arc<dyn BlockDevice>,
    options: NbdOptions,
    requests: Requests,
    output: Output,
    /// Nobody takes what is read any more. Relaxed, as the next: neither guards other memory.
    hung_up: AtomicBool,
    /// Nothing is wanted of the disk any more.
    over: AtomicBool,
}

/// Why a client's requests end.
enum End {
    /// It said so: what is under way is answered first.
    Disconnect,
    /// It is gone, or what it says makes no sense.
    Broken,
}

impl From<io::Error> for End {
    fn from(_: io::Error) -> Self {
        Self::Broken
    }
}

/// What clients may do with a disk.
fn limits(disk: &dyn BlockDevice, options: &NbdOptions) -> Limits {
    let limits = disk.limits();
    Limits { read_only: limits.read_only || options.read_only, ..limits }
}

/// Agrees with a client on what it is served.
fn agree(socket: &UnixStream, disk: &dyn BlockDevice, options: &NbdOptions) -> io::Result<Outcome> {
    socket.set_read_timeout(Some(PATIENCE))?;
    socket.set_write_timeout(Some(PATIENCE))?;
    let outcome = handshake::run(&mut Unbuffered(socket), disk.name(), || limits(disk, options))?;
    socket.set_read_timeout(None)?;
    // Several large replies fit, so that whoever completes them need not leave them behind. The
    // system gives less where its limit is lower.
    let _ = rustix::net::sockopt::set_socket_send_buffer_size(socket, 4 << 20);
    Ok(outcome)
}

impl Connection {
    /// Serves a client until one side ends it.
    pub(super) fn serve(
        visit: Visit,
        disk: Arc<dyn BlockDevice>,
        options: NbdOptions,
    ) -> io::Result<()> {
        if agree(visit.socket(), &*disk, &options)? == Outcome::Abort {
            return Ok(());
        }
        let memory =
            disk.memory(options.memory).map_err(|errno| io::Error::from_raw_os_error(errno.0))?;
        let connection = Arc::new_cyclic(|me| Self {
            me: me.clone(),
            visit,
            disk,
            options,
            requests: Requests::new(memory),
            output: Output::default(),
            hung_up: AtomicBool::new(false),
            over: AtomicBool::new(false),
        });
        let guest: Weak<dyn Guest> = connection.me.clone();
        connection.visit.served(guest);
        connection.run();
        Ok(())
    }

    fn run(&self) {
        std::thread::scope(|threads| {
            let writer = std::thread::Builder::new()
                .name("bowline-nbd-out".into())
                .spawn_scoped(threads, || self.output.write(self.socket(), &self.requests));
            if writer.is_ok()
                && let Err(End::Disconnect) = self.read()
            {
                self.requests.wait_all();
            }
            self.cut();
            self.visit.end();
            self.output.close(&self.requests);
        });
    }

    fn socket(&self) -> &UnixStream {
        self.visit.socket()
    }

    /// Reads requests; never returns `Ok`.
    fn read(&self) -> Result<(), End> {
        let mut input = Input::new(self.socket());
        let mut batch = Vec::new();
        loop {
            if input.here().len() < wire::REQUEST_LEN {
                self.disk.submit(&mut batch);
                input.fill(wire::REQUEST_LEN)?;
            }
            let request = input.here().get(..wire::REQUEST_LEN).and_then(wire::Request::parse);
            let request = request.ok_or(End::Broken)?;
            input.skip_here(wire::REQUEST_LEN);
            let taken = self.take(&request, &mut input, &mut batch);
            if let Err(End::Disconnect) = taken {
                self.disk.submit(&mut batch);
            }
            taken?;
        }
    }

    /// Takes one request and its data; puts it into the batch, or answers it with an error.
    fn take(
        &self,
        request: &wire::Request,
        input: &mut Input<'_>,
        batch: &mut Vec<DiskIo>,
    ) -> Result<(), End> {
        let limits = limits(&*self.disk, &self.options);
        let op = match request.command {
            wire::CMD_DISC => return Err(End::Disconnect),
            wire::CMD_READ => Ok(IoOp::Read),
            wire::CMD_WRITE => Ok(IoOp::Write),
            wire::CMD_FLUSH => Ok(IoOp::Flush),
            wire::CMD_TRIM => Ok(IoOp::Discard),
            wire::CMD_WRITE_ZEROES => Ok(IoOp::WriteZeroes),
            _ => Err(Errno::EINVAL),
        };
        let op = op.and_then(|op| judge(&limits, request, op).map(|()| op));
        let is_write = request.command == wire::CMD_WRITE;
        if is_write && request.len > wire::MAX_PAYLOAD {
            // So much data is not even thrown away.
            return Err(End::Broken);
        }
        if op == Ok(IoOp::Read) && self.hung_up.load(Relaxed) {
            return Ok(());
        }
        let data = match op {
            Ok(IoOp::Read | IoOp::Write) => request.len,
            _ => 0,
        };
        let place = self.requests.place(&*self.disk, data, || self.disk.submit(batch));
        let (op, place) = match (op, place.ok_or(End::Broken)?) {
            (Ok(op), Ok(place)) => (op, place),
            (op, place) => {
                let errno = op.err().or(place.as_ref().err().copied()).unwrap_or(Errno::EIO);
                if is_write {
                    self.disk.submit(batch);
                    input.skip(request.len as usize)?;
                }
                self.refuse(request.cookie, errno);
                return Ok(());
            }
        };
        let mem = self.requests.memory(&place, data);
        if let (IoOp::Write, Some((mem, _))) = (op, &mem) {
            if input.here().len() < mem.len {
                self.disk.submit(batch);
            }
            if let Err(error) = input.read_into(mem) {
                self.requests.give_back(&place, data);
                return Err(error.into());
            }
        }
        let fua = request.flags & wire::CMD_FLAG_FUA != 0;
        // RNBD has forced access for writes only. [NB-24]
        let by_itself = op == IoOp::Write && limits.fua;
        let tag = self.requests.add(Request {
            cookie: request.cookie,
            place,
            len: data,
            is_read: op == IoOp::Read,
            then_flush: fua && op.changes() && !by_itself && limits.write_cache,
        });
        batch.push(DiskIo {
            op,
            offset: if op == IoOp::Flush { 0 } else { request.offset },
            len: if op == IoOp::Flush { 0 } else { request.len },
            fua: fua && by_itself,
            nounmap: request.flags & wire::CMD_FLAG_NO_HOLE != 0,
            mem: mem.map(|(_, name)| name),
            tag,
            done: self.done().ok_or(End::Broken)?,
        });
        Ok(())
    }

    fn done(&self) -> Option<Arc<dyn DiskDone>> {
        Some(self.me.upgrade()?)
    }

    fn refuse(&self, cookie: u64, errno: Errno) {
        let header = wire::reply(wire::error_of(errno.neg()), cookie);
        let reply = Reply { header, place: Place::Nowhere, len: 0, has_data: false };
        self.output.send(self.socket(), &self.requests, std::iter::once(reply));
    }
}

impl Guest for Connection {
    /// What it has sent before is still taken, but for reads.
    fn hung_up(&self) {
        self.hung_up.store(true, Relaxed);
        self.requests.hung_up();
        self.disk.forget();
    }

    fn cut(&self) {
        self.over.store(true, Relaxed);
        self.requests.close();
        self.disk.forget();
    }
}

impl DiskDone for Connection {
    fn is_wanted(&self, op: IoOp) -> bool {
        !self.over.load(Relaxed) && (op != IoOp::Read || !self.hung_up.load(Relaxed))
    }

    fn done(&self, results: &[(u64, i32)]) {
        let mut flushes = Vec::new();
        let replies = results.iter().filter_map(|&(tag, errno)| {
            let Ok(request) = self.requests.answered(tag, errno)? else {
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

/// Refuses what NBD refuses, before the disk is asked.
fn judge(limits: &Limits, request: &wire::Request, op: IoOp) -> Result<(), Errno> {
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
        // As NBD wants it: no space for writes, senseless for the others.
        let writes = matches!(op, IoOp::Write | IoOp::WriteZeroes);
        return Err(if writes { Errno::ENOSPC } else { Errno::EINVAL });
    }
    Ok(())
}

/// The handshake reads exactly what it needs, so that nothing of the first request is lost.
struct Unbuffered<'a>(&'a UnixStream);

impl Read for Unbuffered<'_> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        self.0.read(out)
    }
}

impl Write for Unbuffered<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.write(bytes)
    }
    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

/// Bytes off the socket.
struct Input<'a> {
    socket: &'a UnixStream,
    bytes: Box<[u8]>,
    start: usize,
    end: usize,
}

impl<'a> Input<'a> {
    fn new(socket: &'a UnixStream) -> Self {
        Self { socket, bytes: vec![0; READ_AHEAD].into(), start: 0, end: 0 }
    }

    /// Bytes that are here already.
    fn here(&self) -> &[u8] {
        &self.bytes[self.start..self.end]
    }

    fn skip_here(&mut self, n: usize) {
        self.start += n;
        assert!(self.start <= self.end, "skipped what was not read");
    }

    /// Waits until at least `n` bytes are here; at most what is read at once.
    fn fill(&mut self, n: usize) -> io::Result<()> {
        self.bytes.copy_within(self.start..self.end, 0);
        (self.start, self.end) = (0, self.end - self.start);
        while self.end < n {
            match self.socket.read(&mut self.bytes[self.end..]) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(n) => self.end += n,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Fills memory with what comes next: the rest of a large piece goes straight there.
    fn read_into(&mut self, mem: &Mem) -> io::Result<()> {
        let first = self.here().len().min(mem.len);
        mem.buffer.write(mem.offset, &self.here()[..first]);
        self.skip_here(first);
        let mut rest = Mem { offset: mem.offset + first, len: mem.len - first, ..mem.clone() };
        while rest.len > 0 {
            match sys::receive(self.socket.as_fd(), &rest) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(n) => (rest.offset, rest.len) = (rest.offset + n, rest.len - n),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Throws away what comes next.
    fn skip(&mut self, mut n: usize) -> io::Result<()> {
        loop {
            let here = self.here().len().min(n);
            self.skip_here(here);
            n -= here;
            if n == 0 {
                return Ok(());
            }
            self.fill(1)?;
        }
    }
}
