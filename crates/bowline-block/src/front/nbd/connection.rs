//! The connection of one NBD client.

use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use bowline_ctl::{ClientConnection, ClientHandler};
use bowline_rnbd::{Errno, IoOp, Limits};
use bowline_verbs::Mem;
use rustix::net::RecvFlags;

use super::check::{Action, check};
use super::hand_over::{self, Gate, HandedClient};
use super::handshake::{self, Outcome};
use super::output::{Output, Reply};
use super::reply::{self, Failure, Head, Origin};
use super::requests::{NoPlace, Place, Request, Requests};
use super::status::{self, Extents};
use super::wire::Session;
use super::work::{Work, WorkQueue};
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
const LARGE: u64 = 16 << 10;

/// A connection, shared by its two threads and the requests in flight.
pub(super) struct Connection {
    weak_self: Weak<Self>,
    client: ClientConnection,
    disk: Arc<dyn BlockDevice>,
    options: NbdOptions,
    session: Session,
    requests: Requests,
    work: WorkQueue,
    output: Output,
    gate: Arc<Gate>,
    /// The client has hung up, so data read for it is unwanted. Relaxed, as `aborted`: neither
    /// guards other memory.
    hung_up: AtomicBool,
    /// All requests of the connection are unwanted.
    aborted: AtomicBool,
}

/// Where a connection begins: behind the handshake, or where an earlier process has left it.
#[derive(Default)]
pub(super) struct Begin {
    pub(super) session: Session,
    /// Bytes of the client that were read already.
    pub(super) unread: Vec<u8>,
    /// Bytes that are to be sent before all others.
    pub(super) unsent: Vec<u8>,
}

/// Why a client sends no more requests.
enum Ended {
    /// It has sent NBD_CMD_DISC: requests in flight are answered first.
    Disconnect,
    /// It is gone, or its connection is closed.
    Gone,
    /// It has broken the protocol.
    Broken(&'static str),
    /// The server pauses: the rest of its requests is not taken, or not yet.
    Paused,
    /// There is no thread that sends replies; nothing of the client was touched.
    NoThread(io::Error),
}

impl From<io::Error> for Ended {
    fn from(_: io::Error) -> Self {
        Self::Gone
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
    Ok(outcome)
}

/// Prepares the socket of a client that sends requests.
fn prepare(socket: &UnixStream) -> io::Result<()> {
    socket.set_read_timeout(Some(hand_over::AWAKE))?;
    // Several large replies fit, so that a completing thread need not leave them to the writing
    // thread. The system gives less where its limit is lower.
    let _ = rustix::net::sockopt::set_socket_send_buffer_size(socket, 4 << 20);
    Ok(())
}

impl Connection {
    /// Serves a client until one side ends it.
    pub(super) fn serve(
        client: ClientConnection,
        disk: Arc<dyn BlockDevice>,
        options: NbdOptions,
        gate: Arc<Gate>,
    ) -> io::Result<()> {
        let Outcome::Begin(session) = negotiate(client.socket(), &*disk, &options)? else {
            return Ok(());
        };
        Self::resume(client, disk, options, gate, Begin { session, ..Begin::default() })
    }

    /// Serves a client that has chosen an export.
    pub(super) fn resume(
        client: ClientConnection,
        disk: Arc<dyn BlockDevice>,
        options: NbdOptions,
        gate: Arc<Gate>,
        begin: Begin,
    ) -> io::Result<()> {
        let Begin { session, unread, unsent } = begin;
        prepare(client.socket())?;
        let memory =
            disk.memory(options.memory).map_err(|errno| io::Error::from_raw_os_error(errno.0))?;
        let connection = Arc::new_cyclic(|me| Self {
            weak_self: me.clone(),
            client,
            disk,
            options,
            session,
            requests: Requests::new(memory, !unsent.is_empty()),
            work: WorkQueue::default(),
            output: Output::beginning(unsent),
            gate,
            hung_up: AtomicBool::new(false),
            aborted: AtomicBool::new(false),
        });
        let handler: Weak<dyn ClientHandler> = connection.weak_self.clone();
        connection.client.set_handler(handler);
        connection.gate.enter(connection.weak_self.clone());
        match connection.run(unread) {
            Err(Ended::Broken(why)) => Err(handshake::broken(why)),
            Err(Ended::NoThread(error)) => Err(error),
            Ok(()) | Err(Ended::Disconnect | Ended::Gone | Ended::Paused) => Ok(()),
        }
    }

    fn run(self: &Arc<Self>, unread: Vec<u8>) -> Result<(), Ended> {
        std::thread::scope(|threads| {
            let writer = std::thread::Builder::new()
                .name("bowline-nbd-out".into())
                .spawn_scoped(threads, || self.output.write(self.socket(), &self.requests));
            writer.map_err(Ended::NoThread)?;
            let mut input = Input::new(self.socket(), &*self.disk, &self.gate, unread);
            // A server that has not begun is paused.
            let mut ended = Err(Ended::Paused);
            loop {
                ended = match ended {
                    Err(Ended::Paused) => {
                        if !self.gate.park(self) {
                            self.give(&input);
                            return Ok(());
                        }
                        self.output.send(self.socket(), &self.requests, std::iter::empty());
                        let ended = self.read(&mut input);
                        self.disk.leave();
                        ended
                    }
                    // The next process, or the same one later, answers the rest.
                    Err(Ended::Disconnect) if !self.requests.wait_all() => {
                        Err(input.take_back(&[]))
                    }
                    _ => break,
                };
            }
            if self.client.is_finishing() {
                self.requests.wait_all();
            }
            self.abort();
            self.client.shut_down();
            self.output.close(&self.requests);
            ended
        })
    }

    fn socket(&self) -> &UnixStream {
        self.client.socket()
    }

    /// Makes the reading thread take no requests, or take them again.
    pub(super) fn pause(&self, paused: bool) {
        self.requests.pause(paused);
    }

    /// Tells whether nothing of this connection is with the disk, or on its way from there.
    pub(super) fn is_quiet(&self) -> bool {
        self.output.has_all(&self.requests)
    }

    /// Leaves the client to another process.
    fn give(&self, input: &Input<'_>) {
        // Nobody shuts it down from now on.
        let socket = self.client.forget();
        let unsent = self.output.take(&self.requests);
        let unread = input.buffered().to_vec();
        self.gate.give(HandedClient { socket, session: self.session, unread, unsent });
    }

    /// Reads requests; never returns `Ok`.
    fn read(&self, input: &mut Input<'_>) -> Result<(), Ended> {
        let mut batch = Vec::new();
        let format = self.session.format;
        let request_len = format.request_len();
        loop {
            if self.gate.is_closed() {
                self.disk.submit(&mut batch);
                return Err(Ended::Paused);
            }
            if input.buffered().len() < request_len {
                self.disk.submit(&mut batch);
                self.await_request(input)?;
            }
            let request = wire::Request::parse(format, input.buffered());
            let request = request.ok_or(Ended::Broken("no request where one should begin"))?;
            input.begin_request(request_len);
            let is_large = request.payload(format) >= LARGE;
            input.limit = if is_large { request_len } else { READ_AHEAD };
            let handled = self.handle_request(&request, input, &mut batch);
            if handled.is_err() {
                // These came whole: they are executed, however the connection ends.
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
        while input.buffered().len() < self.session.format.request_len() {
            if self.gate.is_closed() {
                return Err(Ended::Paused);
            }
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
        if request.command == wire::CMD_DISC {
            return Err(Ended::Disconnect);
        }
        let action = check(&limits, self.session, request);
        let payload = request.payload(self.session.format);
        let origin = Origin {
            cookie: request.cookie,
            is_read: request.command == wire::CMD_READ,
            offset: request.offset,
        };
        if payload > wire::MAX_PAYLOAD.into() {
            return Err(Ended::Broken("a request with more than 32 MiB of data"));
        }
        if matches!(action, Ok(Action::Io(IoOp::Read))) && self.hung_up.load(Relaxed) {
            return Ok(());
        }
        let data = match action {
            // At most MAX_PAYLOAD.
            Ok(Action::Io(IoOp::Read | IoOp::Write)) => request.len as u32,
            _ => 0,
        };
        if self.requests.is_separate(data) {
            input.turns.leave(&*self.disk);
        }
        let place = self.requests.allocate(&*self.disk, data, || {
            self.disk.submit(batch);
            input.turns.leave(&*self.disk);
        });
        // The pause may be over by now: the request is handled again then.
        let place = place.map_err(|why| match why {
            NoPlace::Paused => input.take_back(&[]),
            NoPlace::Gone => Ended::Gone,
        })?;
        let (op, place) = match (action, place) {
            (Ok(Action::Io(op)), Ok(place)) => (op, place),
            (action, _) => {
                if payload > 0 || matches!(action, Ok(Action::Status)) {
                    self.disk.submit(batch);
                }
                if let Err(ended) = input.skip(payload as usize) {
                    self.requests.release(&Place::None, 0);
                    return Err(ended);
                }
                // The disk may take its time, and many refused requests may follow.
                input.turns.leave(&*self.disk);
                self.answer_at_once(&limits, request, origin, action);
                return Ok(());
            }
        };
        let mem = self.requests.memory(&place, data);
        if let (IoOp::Write, Some((mem, _))) = (op, &mem) {
            if input.buffered().len() < mem.len {
                self.disk.submit(batch);
            }
            if let Err(ended) = input.read_into(mem) {
                self.requests.release(&place, data);
                return Err(ended);
            }
        }
        let fua = request.flags & wire::CMD_FLAG_FUA != 0;
        // RNBD supports FUA for writes only. [NB-24]
        let native_fua = op == IoOp::Write && limits.fua;
        let (offset, len) = if op == IoOp::Flush { (0, 0) } else { (request.offset, request.len) };
        let nounmap = request.flags & wire::CMD_FLAG_NO_HOLE != 0;
        let mut rest = Work { op, offset, len, nounmap };
        let first = rest.take_piece();
        let tag = self.requests.add(Request {
            origin,
            place,
            len: data,
            rest,
            flush_after: fua && op.changes() && !native_fua && limits.write_cache,
        });
        let io = disk_io(first, tag, self.done().ok_or(Ended::Gone)?);
        batch.push(DiskIo { fua: fua && native_fua, mem: mem.map(|(_, name)| name), ..io });
        Ok(())
    }

    fn done(&self) -> Option<Arc<dyn DiskDone>> {
        Some(self.weak_self.upgrade()?)
    }

    /// Answers a request that needs no operation of the disk, or cannot have one.
    fn answer_at_once(
        &self,
        limits: &Limits,
        request: &wire::Request,
        origin: Origin,
        action: Result<Action, Failure<'_>>,
    ) {
        let (head, tail) = match action {
            Ok(Action::Status) => {
                let one = request.flags & wire::CMD_FLAG_REQ_ONE != 0;
                let extents = if one { Extents::One } else { Extents::Several };
                let (offset, len) = (request.offset, request.len);
                let found = status::descriptors(&*self.disk, limits, offset, len, extents);
                reply::status(self.session.format, origin, &found, limits.logical)
            }
            Ok(Action::Cache) => (reply::success(self.session.format, origin, 0), Box::default()),
            Ok(Action::Io(_)) => {
                let text = "no memory for the data of a large request";
                let failure = Failure { error: wire::ENOMEM, text, at: None };
                reply::failure(self.session.format, origin, &failure)
            }
            Err(failure) => reply::failure(self.session.format, origin, &failure),
        };
        let reply = Reply { head, tail, place: Place::None, len: 0, has_data: false };
        self.output.send(self.socket(), &self.requests, std::iter::once(reply));
    }

    /// Builds the reply to a request from the result of the disk: 0, or a negative errno.
    fn reply(&self, request: Request, errno: i32) -> Reply {
        let Request { origin, place, len, .. } = request;
        let (head, tail) = if errno == 0 {
            (reply::success(self.session.format, origin, len), Box::default())
        } else {
            self.disk_error(origin, errno)
        };
        Reply { head, tail, place, len, has_data: origin.is_read && errno == 0 }
    }

    #[cold]
    fn disk_error(&self, origin: Origin, errno: i32) -> (Head, Box<[u8]>) {
        // NBD has few error numbers; the text has the disk's own.
        let text = io::Error::from_raw_os_error(errno.wrapping_neg()).to_string();
        let failure = Failure { error: wire::error_number(errno), text: &text, at: None };
        reply::failure(self.session.format, origin, &failure)
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
        let mut pieces = Vec::new();
        // Nobody waits for the rest of a request when all are unwanted.
        let aborted = if self.aborted.load(Relaxed) { Errno::ECONNABORTED.neg() } else { 0 };
        let replies = results.iter().filter_map(|&(tag, errno)| {
            let errno = if errno == 0 { aborted } else { errno };
            match self.requests.complete(tag, errno)? {
                Ok(request) => Some(self.reply(request, errno)),
                Err(piece) => {
                    pieces.push((piece, tag));
                    None
                }
            }
        });
        self.output.send(self.socket(), &self.requests, replies);
        if let (false, Some(done)) = (pieces.is_empty(), self.done()) {
            self.work.add(pieces, |pieces| {
                let io = |(piece, tag)| disk_io(piece, tag, done.clone());
                self.disk.submit(&mut pieces.into_iter().map(io).collect());
            });
        }
    }
}

/// Makes a request to the disk of a piece of work.
fn disk_io(piece: Work, tag: u64, done: Arc<dyn DiskDone>) -> DiskIo {
    // A piece fits 32 bits.
    let io = DiskIo::new(piece.op, piece.offset, piece.len as u32, done).tag(tag);
    DiskIo { nounmap: piece.nounmap, ..io }
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
    /// The header of the request that is handled, should it be taken back.
    header: ([u8; wire::REQUEST_MAX], usize),
    disk: &'a dyn BlockDevice,
    gate: &'a Gate,
    turns: Turns,
}

impl<'a> Input<'a> {
    fn new(
        socket: &'a UnixStream,
        disk: &'a dyn BlockDevice,
        gate: &'a Gate,
        unread: Vec<u8>,
    ) -> Self {
        let (end, turns) = (unread.len(), Turns::default());
        let mut bytes = unread;
        bytes.resize(end.max(READ_AHEAD), 0);
        let (bytes, header) = (bytes.into(), ([0; wire::REQUEST_MAX], 0));
        Self { socket, bytes, start: 0, end, limit: READ_AHEAD, header, disk, gate, turns }
    }

    /// Consumes the header of a request, of `len` bytes.
    fn begin_request(&mut self, len: usize) {
        let (start, end) = (self.start, self.start + len);
        self.header.0[..len].copy_from_slice(&self.bytes[start..end]);
        self.header.1 = len;
        self.consume(len);
    }

    /// Takes back the request that was begun last, of which this data was received.
    fn take_back(&mut self, data: &[u8]) -> Ended {
        let (header, len) = &self.header;
        let unread = [&header[..*len], data, self.buffered()].concat();
        *self = Self::new(self.socket, self.disk, self.gate, unread);
        Ended::Paused
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
            // The client is not busy.
            Err(rustix::io::Errno::AGAIN) if waits => {
                self.gate.wait(self.socket.as_fd(), None)?;
            }
            Err(rustix::io::Errno::INTR | rustix::io::Errno::AGAIN) => {}
            Err(error) => return Err(error.into()),
        }
        Ok(())
    }

    /// Fills memory with the next bytes: those that are not buffered are received straight into it.
    /// A pause that begins then takes the request back.
    fn read_into(&mut self, mem: &Mem) -> Result<(), Ended> {
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
                Ok(0) => return Err(Ended::Gone),
                Ok(n) => (rest.offset, rest.len) = (rest.offset + n, rest.len - n),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.gate.wait(self.socket.as_fd(), None)?;
                }
                Err(error) => return Err(error.into()),
            }
            // Whether the client sends nothing, or a little all the time.
            if rest.len > 0 && self.gate.is_closed() {
                let mut data = Vec::new();
                mem.buffer.append_to(mem.offset, mem.len - rest.len, &mut data);
                return Err(self.take_back(&data));
            }
        }
        Ok(())
    }

    /// Skips the next `n` bytes. A pause waits for them, though not for long.
    fn skip(&mut self, mut n: usize) -> Result<(), Ended> {
        self.limit = READ_AHEAD;
        let mut end = None;
        loop {
            let count = self.buffered().len().min(n);
            self.consume(count);
            n -= count;
            if n == 0 {
                return Ok(());
            }
            if self.gate.is_closed() {
                // What was skipped cannot be taken back.
                self.turns.leave(self.disk);
                let end = *end.get_or_insert_with(|| Instant::now() + hand_over::REST);
                let left = end.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    return Err(Ended::Broken(
                        "the rest of a refused request had not come half a second after its server \
                         was to be replaced",
                    ));
                }
                self.gate.wait(self.socket.as_fd(), Some(left))?;
            } else {
                end = None;
            }
            self.fill_some(true)?;
        }
    }
}
