//! The thread that carries out what programs ask for.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::io::Write;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bowline_attach::{FILL, Frame, Head, NAME_PREFIX, Op, RING_MESSAGE_MAX, VERSION};
use bowline_base::{Errno, Instant, clock};
use bowline_rds::{Interest, RecvOpts, Rope, SendMsg, SocketId};
use bowline_rds_driver::{Blocking, Driver};
use rustix::event::{EventfdFlags, Timespec, epoll};
use rustix::net::sockopt::socket_peercred;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use crate::accounts::{Accounts, Charge};
use crate::caller::Caller;
use crate::channel::{Channel, Waiting};
use crate::control::{self, COMPLETION_ROOM, Room};
use crate::hand_over::Successor;
use crate::names;
use crate::options::Value;
use crate::ready::{Ready, SocketWaker};
use crate::rings::Rings;
use crate::socket::HostSocket;

/// What an epoll event is about: the kind in the upper 8 bits, a number below.
const BELL: u64 = 0;
const LISTENER: u64 = 1 << 56;
const CHANNEL: u64 = 2 << 56;
const SOCKET: u64 = 3 << 56;
const KIND: u64 = 0xff << 56;

const SOCK_SEQPACKET: i32 = 5;

const MSG_OOB: i32 = 1;
const MSG_PEEK: i32 = 2;
const MSG_TRUNC: i32 = 0x20;
const MSG_DONTWAIT: i32 = 0x40;
const MSG_ERRQUEUE: i32 = 0x2000;
const MSG_ZEROCOPY: i32 = 0x400_0000;

/// Room for a control message of one number.
const SMALL_CONTROL: usize = 24;
/// Most channels, of all processes together.
const CHANNELS_MAX: usize = 32_768;
const EMFILE: i32 = 24;
/// Bytes of a channel that are read at once; a message of a ring has room there as well.
const READ: usize = 64 << 10;
const _: () = assert!(READ >= RING_MESSAGE_MAX);
/// Requests of one channel that are carried out before others get their turn.
const REQUESTS: usize = 64;
/// Events that are taken at once.
const EVENTS: usize = 256;
/// Longest sleep, so that an end of the host is noticed.
const LOOK: Duration = Duration::from_millis(200);

/// What becomes of a request.
enum Outcome {
    Answer(Answer),
    Wait(Waiting),
    /// It has no answer.
    Nothing,
}

/// The answer to a request.
#[derive(Debug, Default)]
struct Answer {
    value: i64,
    a: i32,
    b: i32,
    name: Vec<u8>,
    control: Vec<u8>,
    bytes: Vec<u8>,
    /// So much of a message.
    message: Option<(Rope, usize)>,
    descriptors: Vec<OwnedFd>,
}

impl Answer {
    fn of(value: i64) -> Self {
        Self { value, ..Self::default() }
    }

    fn error(errno: Errno) -> Self {
        Self::of(-i64::from(errno.0))
    }
}

pub(crate) fn errno(error: &bowline_rds_driver::Error) -> Errno {
    error.errno()
}

pub(crate) struct Service {
    pub(crate) driver: Driver,
    pub(crate) accounts: Accounts,
    stop: Arc<AtomicBool>,
    epoll: OwnedFd,
    pub(crate) ready: Arc<Ready>,
    pub(crate) listeners: Vec<UnixListener>,
    /// Number of this node, by which programs know it again.
    pub(crate) number: u64,
    pub(crate) channels: HashMap<u64, Channel>,
    /// Which sockets a channel may name.
    pub(crate) known: HashMap<u64, HashSet<u64>>,
    pub(crate) sockets: HashMap<u64, (HostSocket, Waker)>,
    /// Sockets that get a turn in each round.
    pub(crate) active: Vec<u64>,
    /// When the sockets were last looked at from whose rings programs may have taken messages.
    looked: Instant,
    /// Handles by device and inode of the programs' ends.
    by_inode: HashMap<(u64, u64), u64>,
    deadlines: BTreeSet<(Instant, u64)>,
    /// Channels that have more requests than they may have in one round.
    again: BTreeSet<u64>,
    pub(crate) next: u64,
    /// Who is to go on in this node's place.
    pub(crate) successor: Arc<Successor>,
    /// A descriptor that is given up to refuse a connection when there is no other.
    spare: Option<OwnedFd>,
    /// Where requests are read to, and messages are copied to.
    pub(crate) scratch: Box<[u8]>,
}

impl Service {
    /// Watches the listeners.
    pub(crate) fn new(
        driver: Driver,
        accounts: Accounts,
        listeners: [UnixListener; 2],
        number: u64,
        stop: Arc<AtomicBool>,
        successor: Arc<Successor>,
    ) -> std::io::Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let ready = Arc::new(Ready::new()?);
        let service = Self {
            driver,
            accounts,
            stop,
            epoll,
            ready,
            listeners: listeners.into(),
            number,
            channels: HashMap::new(),
            known: HashMap::new(),
            sockets: HashMap::new(),
            active: Vec::new(),
            looked: clock::now(),
            by_inode: HashMap::new(),
            deadlines: BTreeSet::new(),
            again: BTreeSet::new(),
            next: 1,
            successor,
            spare: Some(rustix::event::eventfd(0, EventfdFlags::CLOEXEC)?),
            scratch: vec![0; READ].into_boxed_slice(),
        };
        service.watch(service.ready.bell().as_fd(), BELL, epoll::EventFlags::IN)?;
        for (n, listener) in service.listeners.iter().enumerate() {
            listener.set_nonblocking(true)?;
            service.watch(listener.as_fd(), LISTENER | n as u64, epoll::EventFlags::IN)?;
        }
        Ok(service)
    }

    fn watch(
        &self,
        fd: BorrowedFd<'_>,
        token: u64,
        flags: epoll::EventFlags,
    ) -> Result<(), rustix::io::Errno> {
        epoll::add(&self.epoll, fd, epoll::EventData::new_u64(token), flags)
    }

    /// Serves until the host ends or hands over.
    pub(crate) fn run(mut self) -> Self {
        let mut events = Vec::with_capacity(EVENTS);
        while !self.stop.load(Ordering::Relaxed) {
            let is_busy = self.serve_again() | self.round();
            let may_sleep = !is_busy && self.fall_asleep();
            let sleep = if may_sleep { self.time_to_sleep() } else { Duration::ZERO };
            let sleep = Timespec { tv_sec: 0, tv_nsec: sleep.subsec_nanos().into() };
            let space = rustix::buffer::spare_capacity(&mut events);
            let waited = epoll::wait(&self.epoll, space, Some(&sleep));
            if !is_busy {
                self.wake_up();
            }
            if waited.is_err() {
                continue; // a signal
            }
            for event in events.drain(..) {
                let token = event.data.u64();
                match token & KIND {
                    BELL => {} // it has woken this thread
                    LISTENER => self.accept((token & !KIND) as usize),
                    CHANNEL => self.channel_event(token & !KIND, event.flags),
                    _ => self.socket_event(token & !KIND, event.flags),
                }
            }
            self.end_waits();
            self.count_refusals();
            let now = clock::now();
            if now.saturating_since(self.looked) >= LOOK {
                self.looked = now;
                self.look_at_quiet();
            }
        }
        self
    }

    fn time_to_sleep(&self) -> Duration {
        let until = self.deadlines.first().map(|(at, _)| at.saturating_since(clock::now()));
        until.unwrap_or(LOOK).min(LOOK)
    }

    fn accept(&mut self, listener: usize) {
        let Some(listener) = self.listeners.get(listener) else { return };
        let stream = match listener.accept() {
            Ok((stream, _)) => stream,
            Err(error) if error.raw_os_error() == Some(EMFILE) => {
                // The one who waits hears at once that there is no room.
                self.spare = None;
                drop(listener.accept());
                self.spare = rustix::event::eventfd(0, EventfdFlags::CLOEXEC).ok();
                return;
            }
            _ => return,
        };
        let Ok(caller) = Caller::of(&stream) else { return };
        let user = caller.user;
        let full = self.channels.len() >= CHANNELS_MAX;
        let admitted = if full { Err(Errno::ENFILE) } else { self.accounts.open_channel(&caller) };
        if let Err(errno) = admitted {
            turn_away(stream, errno);
        } else if self.add_channel(stream, caller).is_err() {
            self.accounts.close_channel(user, 0);
        }
    }

    fn add_channel(&mut self, stream: UnixStream, caller: Caller) -> std::io::Result<()> {
        let channel = Channel::new(stream, caller)?;
        let number = self.next;
        self.next += 1;
        self.watch_channel(number, channel)?;
        self.known.insert(number, HashSet::new());
        Ok(())
    }

    /// Takes a channel in.
    pub(crate) fn watch_channel(&mut self, number: u64, channel: Channel) -> std::io::Result<()> {
        let flags = epoll::EventFlags::IN | epoll::EventFlags::OUT | epoll::EventFlags::ET;
        self.watch(channel.fd(), CHANNEL | number, flags)?;
        self.channels.insert(number, channel);
        Ok(())
    }

    /// Requests of a channel may be there already.
    pub(crate) fn go_on_with(&mut self, number: u64) {
        self.again.insert(number);
    }

    /// A request waits that began to wait in another process.
    pub(crate) fn resume_wait(&mut self, number: u64, waiting: Waiting) {
        if let Some(at) = waiting.deadline {
            self.deadlines.insert((at, number));
        }
    }

    /// Takes a socket in.
    pub(crate) fn add_socket(
        &mut self,
        handle: u64,
        socket: HostSocket,
    ) -> Result<(), (rustix::io::Errno, Charge)> {
        let flags = epoll::EventFlags::IN | epoll::EventFlags::RDHUP | epoll::EventFlags::ET;
        if let Err(errno) = self.watch(socket.end(), SOCKET | handle, flags) {
            return Err((errno, socket.charge));
        }
        let waker = SocketWaker { handle, ready: Arc::clone(&self.ready) };
        self.by_inode.insert(socket.inode, handle);
        self.sockets.insert(handle, (socket, Waker::from(Arc::new(waker))));
        Ok(())
    }

    /// Reads a channel, and carries out what it asks for.
    fn channel_event(&mut self, number: u64, flags: epoll::EventFlags) {
        let Some(channel) = self.channels.get_mut(&number) else { return };
        let open = channel.flush().and_then(|()| channel.fill(&mut self.scratch));
        let goes_on = matches!(open, Ok(true)) && self.count_held(number) && self.serve(number);
        // A process that asks and ends at once is told of once: reading the request shows no end.
        let has_ended = flags.contains(epoll::EventFlags::HUP);
        if !goes_on || has_ended || !self.count_held(number) {
            self.end_channel(number);
        }
    }

    /// Carries out the requests of a channel, up to one that waits. Returns `false` when the
    /// channel is of no use any more.
    fn serve(&mut self, number: u64) -> bool {
        for _ in 0..REQUESTS {
            let Some(channel) = self.channels.get_mut(&number) else { return true };
            if channel.is_answering() {
                return true;
            }
            if channel.waiting.is_some() {
                match channel.is_interrupted() {
                    Err(_) => return false,
                    Ok(false) => return true,
                    Ok(true) => {
                        if !self.end_wait(number, Errno::EINTR) {
                            return false;
                        }
                        continue;
                    }
                }
            }
            match self.step(number) {
                None => return false,
                Some(true) => {}
                // What ends its wait may have come already.
                Some(false) if self.is_waiting(number) => {}
                Some(false) => return true,
            }
        }
        // Others have their turn first.
        self.again.insert(number);
        true
    }

    /// Goes on with channels that had more requests than they may have in one round. Returns
    /// whether there were any.
    fn serve_again(&mut self) -> bool {
        let again = std::mem::take(&mut self.again);
        for number in &again {
            if !self.serve(*number) {
                self.end_channel(*number);
            }
        }
        !again.is_empty()
    }

    fn is_waiting(&self, number: u64) -> bool {
        self.channels.get(&number).is_some_and(|channel| channel.waiting.is_some())
    }

    /// Carries out the first request of a channel. Returns whether it is done; `None`: the channel
    /// is of no use any more.
    fn step(&mut self, number: u64) -> Option<bool> {
        let channel = self.channels.get_mut(&number)?;
        let (input, start) = channel.take_input();
        let greeted = channel.greeted;
        let parsed = Frame::parse(&input[start..]).ok()?;
        let Some((frame, len)) = parsed else {
            let channel = self.channels.get_mut(&number)?;
            channel.put_input(input, 0);
            return Some(false);
        };
        let op = frame.head.op;
        if op == Op::Interrupt {
            // What it was to end has been answered meanwhile.
            self.channels.get_mut(&number)?.put_input(input, len);
            return Some(true);
        }
        let is_first = matches!(op, Op::Hello | Op::HandOver);
        if greeted == is_first {
            return None;
        }
        // What was read along with it may have come before the request that brings a descriptor.
        let descriptor = match op {
            Op::Attach => self.channels.get_mut(&number)?.take_descriptor(),
            _ => None,
        };
        let outcome = self.carry_out(number, frame, descriptor);
        let channel = self.channels.get_mut(&number)?;
        match outcome {
            Outcome::Wait(waiting) => {
                channel.put_input(input, 0);
                channel.waiting = Some(waiting);
                if let Some(at) = waiting.deadline {
                    self.deadlines.insert((at, number));
                }
                Some(false)
            }
            Outcome::Nothing => {
                channel.put_input(input, len);
                Some(true)
            }
            Outcome::Answer(answer) => {
                channel.put_input(input, len);
                channel.greeted |= op == Op::Hello && answer.value >= 0;
                self.answer(number, op, answer).then_some(true)
            }
        }
    }

    fn answer(&mut self, number: u64, op: Op, answer: Answer) -> bool {
        let Some(channel) = self.channels.get_mut(&number) else { return false };
        let Answer { value, a, b, name, control, bytes, message, descriptors } = answer;
        let mut pieces: Vec<&[u8]> = vec![&bytes];
        if let Some((rope, mut left)) = message.as_ref().map(|(rope, len)| (rope, *len)) {
            for slice in rope.slices() {
                let piece = &slice[..slice.len().min(left)];
                left -= piece.len();
                pieces.push(piece);
            }
        }
        let head = Head { op, value, a, b };
        let descriptors: Vec<_> = descriptors.iter().map(AsFd::as_fd).collect();
        channel.answer(head, &name, &control, &pieces, &descriptors).is_ok()
    }

    fn carry_out(&mut self, number: u64, frame: Frame<'_>, descriptor: Option<OwnedFd>) -> Outcome {
        let Head { op, value, a, b } = frame.head;
        let result = match op {
            Op::Hello if a == VERSION => {
                let a = owner(number).cast_signed();
                Ok(Answer { a, ..Answer::of(self.number.cast_signed()) })
            }
            Op::Hello => Err(Errno::EPROTONOSUPPORT),
            Op::HandOver => match self.name_successor(number, a, b) {
                Ok(()) => {
                    self.end_channel(number);
                    return Outcome::Nothing;
                }
                Err(errno) => Err(errno),
            },
            Op::Open => self.open(number, a, b),
            Op::Attach => self.attach(number, descriptor),
            Op::Look => {
                self.activate(value.cast_unsigned());
                return Outcome::Nothing;
            }
            _ => {
                let handle = value.cast_unsigned();
                if !self.known.get(&number).is_some_and(|known| known.contains(&handle)) {
                    return Outcome::Answer(Answer::error(Errno::EBADF));
                }
                match op {
                    Op::Send => return self.send(number, handle, frame),
                    Op::Flush => return self.flush(number, handle, frame),
                    Op::Receive => self.receive(handle, frame),
                    _ => self.short(number, handle, frame),
                }
            }
        };
        Outcome::Answer(result.unwrap_or_else(Answer::error))
    }

    /// A new socket; the program gets the other end.
    fn open(&mut self, number: u64, kind: i32, protocol: i32) -> Result<Answer, Errno> {
        if kind != SOCK_SEQPACKET || protocol != 0 {
            return Err(Errno::ESOCKTNOSUPPORT);
        }
        let system = |error: rustix::io::Errno| Errno(error.raw_os_error());
        let (end, theirs) = rustix::net::socketpair(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        )
        .map_err(system)?;
        // As little room as can be: a few tokens fill it.
        rustix::net::sockopt::set_socket_send_buffer_size(&theirs, 1).map_err(system)?;
        rustix::net::sockopt::set_socket_send_buffer_size(&end, 1).map_err(system)?;
        let handle = self.next;
        self.next += 1;
        let name = [NAME_PREFIX, format!("{:016x}{handle:016x}", self.number).as_bytes()].concat();
        let name = SocketAddrUnix::new_abstract_name(&name[1..]).map_err(system)?;
        rustix::net::bind(&end, &name).map_err(system)?;
        let made = rustix::fs::fstat(&theirs).map_err(system)?;
        let inode = (made.st_dev, made.st_ino);
        let rings = Rings::new().map_err(system)?;
        let memory = rings.descriptor().try_clone_to_owned().map_err(|_| Errno::ENFILE)?;
        let (id, charge) = self.socket_for(number)?;
        let peer = self.channels.get(&number).map(|channel| socket_peercred(channel.fd()));
        if let Some(Ok(peer)) = peer {
            let pid = peer.pid.as_raw_nonzero().get().cast_unsigned();
            self.driver.with_core(|core, _| core.set_owner(id, pid));
        }
        let socket = HostSocket::new(id, end, inode, rings, charge);
        if let Err((errno, charge)) = self.add_socket(handle, socket) {
            self.driver.close(id);
            self.accounts.close_socket(&charge);
            return Err(system(errno));
        }
        self.known.entry(number).or_default().insert(handle);
        self.refresh(handle);
        let value = handle.cast_signed();
        Ok(Answer { value, descriptors: vec![theirs, memory], ..Answer::default() })
    }

    /// A program shows a descriptor of a socket that another process may have opened.
    fn attach(&mut self, number: u64, descriptor: Option<OwnedFd>) -> Result<Answer, Errno> {
        let descriptor = descriptor.ok_or(Errno::EBADF)?;
        let found = rustix::fs::fstat(&descriptor).map_err(|_| Errno::EBADF)?;
        let inode = (found.st_dev, found.st_ino);
        let handle = *self.by_inode.get(&inode).ok_or(Errno::ENOTSOCK)?;
        let (socket, _) = self.sockets.get(&handle).ok_or(Errno::ENOTSOCK)?;
        let memory = socket.rings.descriptor().try_clone_to_owned().map_err(|_| Errno::ENFILE)?;
        self.known.entry(number).or_default().insert(handle);
        Ok(Answer { descriptors: vec![memory], ..Answer::of(handle.cast_signed()) })
    }

    /// Requests that never wait.
    fn short(&mut self, number: u64, handle: u64, frame: Frame<'_>) -> Result<Answer, Errno> {
        // What was sent before comes first.
        self.drain(handle);
        let (socket, _) = self.sockets.get_mut(&handle).ok_or(Errno::EBADF)?;
        let id = socket.id;
        let Head { op, a, b, .. } = frame.head;
        let rds = |error: bowline_rds::Error| error.errno();
        match op {
            Op::Bind => {
                let name = names::to_bind_or_send(frame.name)?;
                self.bind(number, id, name)?;
            }
            Op::Connect => {
                let name = names::to_connect(frame.name)?;
                socket.rings.allow_nothing();
                self.driver.with_core(|core, _| core.connect(id, name)).map_err(rds)?;
            }
            Op::LocalName => {
                let name = self.driver.with_core(|core, _| core.local_addr(id)).map_err(rds)?;
                let name = name.map_or_else(names::unnamed, names::bytes);
                return Ok(Answer { name, ..Answer::default() });
            }
            Op::PeerName => {
                let name = self.driver.with_core(|core, _| core.peer_addr(id)).map_err(rds)?;
                return Ok(Answer { name: names::bytes(name), ..Answer::default() });
            }
            Op::SetOption => {
                let options = &mut socket.options;
                let most = self.accounts.most(&socket.charge);
                let value = (frame.payload, most);
                self.driver.with_core(|core, now| options.set(core, now, id, (a, b), value))?;
                self.count_buffers(handle);
                self.refresh(handle);
            }
            Op::GetOption => {
                let room = room_of(frame)?;
                let value = match self.table(number, (a, b)) {
                    Some(table) => Value::table(table?, room),
                    None => {
                        let (socket, _) = self.sockets.get(&handle).ok_or(Errno::EBADF)?;
                        let options = &socket.options;
                        self.driver.with_core(|core, _| options.get(core, id, (a, b), room))?
                    }
                };
                let told = value.told.unwrap_or(value.bytes.len());
                return Ok(Answer {
                    value: value.returned,
                    a: i32::try_from(told).unwrap_or(i32::MAX),
                    bytes: value.bytes,
                    ..Answer::default()
                });
            }
            Op::CancelAll => {
                self.driver.with_core(|core, now| core.cancel_all(now, id)).map_err(rds)?;
            }
            Op::Ioctl => {
                let has_sent = socket.has_sent;
                return self.ioctl(id, has_sent, a);
            }
            _ => return Err(Errno::EINVAL),
        }
        Ok(Answer::of(0))
    }

    /// The type of service, which TCP does not have: everything is 0.
    fn ioctl(&self, id: SocketId, has_sent: bool, request: i32) -> Result<Answer, Errno> {
        const SET_TOS: i32 = 0x89e0;
        const GET_TOS: i32 = 0x89e1;
        let transport = self.driver.with_core(|core, _| core.transport(id));
        let over_tcp = transport.map_err(|e| e.errno())? == Some(bowline_rds::Transport::Tcp);
        match request {
            SET_TOS if over_tcp && has_sent => Err(Errno::EINVAL),
            SET_TOS if over_tcp => Ok(Answer::of(0)),
            GET_TOS => Ok(Answer { bytes: vec![0], ..Answer::default() }),
            _ => Err(Errno::ENOTTY),
        }
    }

    fn send(&mut self, number: u64, handle: u64, frame: Frame<'_>) -> Outcome {
        let flags = frame.head.a;
        let may_wait = flags & MSG_DONTWAIT == 0;
        let known = MSG_DONTWAIT | MSG_ZEROCOPY;
        let prepared = || {
            if flags & !known != 0 {
                return Err(Errno::EOPNOTSUPP);
            }
            let given = !frame.name.is_empty();
            let name = given.then(|| names::to_bind_or_send(frame.name)).transpose()?;
            Ok((name, control::parse(frame.control)?))
        };
        let (name, control) = match prepared() {
            Ok(prepared) => prepared,
            Err(errno) => return Outcome::Answer(Answer::error(errno)),
        };
        // What was sent before comes first.
        self.drain(handle);
        let Some((socket, waker)) = self.sockets.get_mut(&handle) else {
            return Outcome::Answer(Answer::error(Errno::EBADF));
        };
        let payload = [std::io::IoSlice::new(frame.payload)];
        let message = SendMsg {
            name,
            payload: &payload,
            control: &control,
            zerocopy: flags & MSG_ZEROCOPY != 0,
            blocking: may_wait,
            ..SendMsg::default()
        };
        let cx = Context::from_waker(waker);
        let sent = if !socket.rings.has_no_sends() {
            // They wait for room, as this one has to; the next round looks whether there is some.
            socket.retry = true;
            if may_wait {
                Poll::Pending
            } else {
                Poll::Ready(Err(bowline_rds::Error::QueueFull.into()))
            }
        } else if may_wait {
            self.driver.poll_send(socket.id, &message, &cx)
        } else {
            Poll::Ready(self.driver.send(socket.id, &message, Blocking::Never))
        };
        // The first message to a destination comes here, and not by the ring.
        socket.has_sent |= !matches!(sent, Poll::Ready(Err(_)));
        let mut answer = match sent {
            Poll::Ready(Ok(len)) => Answer::of(i64::try_from(len).unwrap_or(i64::MAX)),
            Poll::Ready(Err(error)) => Answer::error(errno(&error)),
            Poll::Pending => {
                let deadline = socket.options.send_timeout.map(|limit| clock::now() + limit);
                return self.wait_as_sender(number, handle, deadline);
            }
        };
        let ready = self.driver.poll_ready(socket.id, Interest::WRITE, &cx);
        if ready.is_pending() {
            answer.b = FILL;
            socket.rings.renew_promise(&self.driver, socket.id);
        } else if answer.value >= 0 && control.is_empty() && flags & MSG_ZEROCOPY == 0 {
            socket.rings.allow(&self.driver, socket.id, frame.name, name);
        }
        self.activate(handle);
        Outcome::Answer(answer)
    }

    /// The request waits until messages of the socket are acknowledged. One that waits already
    /// keeps its deadline.
    fn wait_as_sender(&mut self, number: u64, handle: u64, deadline: Option<Instant>) -> Outcome {
        if let Some((socket, _)) = self.sockets.get_mut(&handle)
            && !socket.senders.contains(&number)
        {
            socket.senders.push_back(number);
        }
        let before = self.channels.get(&number).and_then(|channel| channel.waiting);
        Outcome::Wait(before.unwrap_or(Waiting { handle, deadline }))
    }

    /// Waits until everything is acknowledged.
    fn flush(&mut self, number: u64, handle: u64, frame: Frame<'_>) -> Outcome {
        let Some(limit) = frame.payload.first_chunk() else {
            return Outcome::Answer(Answer::error(Errno::EINVAL));
        };
        // What was sent before comes first.
        self.drain(handle);
        let Some((socket, waker)) = self.sockets.get_mut(&handle) else {
            return Outcome::Answer(Answer::error(Errno::EBADF));
        };
        let flushed = if socket.rings.has_no_sends() {
            self.driver.poll_flush(socket.id, &Context::from_waker(waker))
        } else {
            Poll::Pending
        };
        match flushed {
            Poll::Ready(Ok(())) => Outcome::Answer(Answer::of(0)),
            Poll::Ready(Err(error)) => Outcome::Answer(Answer::error(errno(&error))),
            Poll::Pending => {
                let limit = Some(u64::from_ne_bytes(*limit)).filter(|limit| *limit != u64::MAX);
                let deadline = limit.map(|limit| clock::now() + Duration::from_nanos(limit));
                self.activate(handle);
                self.wait_as_sender(number, handle, deadline)
            }
        }
    }

    /// Receives what does not go through the ring.
    fn receive(&mut self, handle: u64, frame: Frame<'_>) -> Result<Answer, Errno> {
        let Head { a: flags, b: control_room, .. } = frame.head;
        let control_room = usize::try_from(control_room).unwrap_or(0);
        let room = room_of(frame)?;
        if flags & MSG_OOB != 0 {
            return Ok(Answer::of(0));
        }
        if flags & MSG_ERRQUEUE != 0 {
            return Err(Errno::EAGAIN);
        }
        self.turn(handle);
        let (socket, waker) = self.sockets.get_mut(&handle).ok_or(Errno::EBADF)?;
        let needed = if socket.options.zerocopy { COMPLETION_ROOM } else { SMALL_CONTROL };
        let want_control = control_room >= needed;
        let id = socket.id;
        // What is in the ring comes first, but for notifications.
        let notified =
            want_control && self.driver.with_core(|core, _| core.has_congestion_update(id));
        if socket.rings.has_in_ring() && !notified {
            return Err(Errno::EAGAIN);
        }
        let opts = RecvOpts { peek: flags & MSG_PEEK != 0, want_control };
        let received = match self.driver.poll_recv(id, opts, &Context::from_waker(waker)) {
            Poll::Ready(received) => received.map_err(|error| errno(&error))?,
            Poll::Pending => return Err(Errno::EAGAIN),
        };
        let mut answer = Answer::default();
        let len = received.data.as_ref().map_or(0, Rope::len);
        answer.value = i64::try_from(len).unwrap_or(i64::MAX);
        answer.name = received.source.map(names::bytes).unwrap_or_default();
        let mut control = Room::new(control_room);
        for one in &received.control {
            control.put_control(one, |at| self.driver.wall_clock(at));
        }
        (answer.control, answer.a) = control.finish();
        if len > room {
            answer.a |= MSG_TRUNC;
        }
        answer.message = received.data.map(|data| (data, room));
        // What stood behind it may go through the ring.
        self.turn(handle);
        Ok(answer)
    }

    /// Something happened on a socket: those who wait for it go on, in their order.
    pub(crate) fn socket_is_ready(&mut self, handle: u64) {
        self.activate(handle);
        self.turn(handle);
        self.resume_senders(handle);
        self.refresh(handle);
    }

    /// Makes another attempt at the request that a channel waits for.
    pub(crate) fn try_again(&mut self, number: u64) {
        let Some(channel) = self.channels.get_mut(&number) else { return };
        let Some(waiting) = channel.waiting else { return };
        match self.step(number) {
            None => self.end_channel(number),
            Some(false) => {}
            Some(true) => {
                self.forget_wait(number, waiting);
                if !self.serve(number) {
                    self.end_channel(number);
                }
            }
        }
    }

    /// Ends the wait of a channel, answering its request with an error.
    fn end_wait(&mut self, number: u64, errno: Errno) -> bool {
        let Some(channel) = self.channels.get_mut(&number) else { return false };
        let Some(waiting) = channel.waiting else { return true };
        let (input, start) = channel.take_input();
        let Ok(Some((frame, len))) = Frame::parse(&input[start..]) else { return false };
        let op = frame.head.op;
        channel.put_input(input, len);
        self.forget_wait(number, waiting);
        self.answer(number, op, Answer::error(errno))
    }

    fn forget_wait(&mut self, number: u64, waiting: Waiting) {
        if let Some(channel) = self.channels.get_mut(&number) {
            channel.waiting = None;
        }
        if let Some(at) = waiting.deadline {
            self.deadlines.remove(&(at, number));
        }
        if let Some((socket, _)) = self.sockets.get_mut(&waiting.handle) {
            socket.senders.retain(|n| *n != number);
        }
    }

    /// Ends waits whose time is over.
    fn end_waits(&mut self) {
        while let Some((at, number)) = self.deadlines.first().copied() {
            if at > clock::now() {
                return;
            }
            self.deadlines.remove(&(at, number));
            if !self.end_wait(number, Errno::ETIMEDOUT) || !self.serve(number) {
                self.end_channel(number);
            }
        }
    }

    fn socket_event(&mut self, handle: u64, flags: epoll::EventFlags) {
        if flags.intersects(epoll::EventFlags::HUP | epoll::EventFlags::RDHUP) {
            // A program may have posted and ended.
            self.drain(handle);
            self.close(handle);
        } else {
            self.activate(handle);
            self.refresh(handle);
        }
    }

    /// The last descriptor of a socket was closed.
    pub(crate) fn close(&mut self, handle: u64) {
        let Some((socket, _)) = self.sockets.remove(&handle) else { return };
        self.active.retain(|active| *active != handle);
        self.driver.close(socket.id);
        self.accounts.close_socket(&socket.charge);
        self.by_inode.remove(&socket.inode);
        for number in &socket.senders {
            if !self.end_wait(*number, Errno::EBADF) {
                self.end_channel(*number);
            }
        }
        for known in self.known.values_mut() {
            known.remove(&handle);
        }
    }

    pub(crate) fn end_channel(&mut self, number: u64) {
        if let Some(waiting) = self.channels.get(&number).and_then(|channel| channel.waiting) {
            self.forget_wait(number, waiting);
        }
        if let Some(channel) = self.channels.remove(&number) {
            self.accounts.close_channel(channel.caller.user, channel.counted);
        }
        let known = self.known.remove(&number).unwrap_or_default();
        // The process may have had the lock of a socket, or a token, or have posted without being
        // able to say so.
        for (handle, (socket, _)) in &mut self.sockets {
            socket.rings.owner_is_gone(owner(number));
            if known.contains(handle) {
                socket.replace_token();
            }
        }
        for handle in known {
            self.activate(handle);
        }
    }
}

/// Answers the greeting that a process is about to send, and ends its channel.
fn turn_away(mut stream: UnixStream, errno: Errno) {
    let head = Head::new(Op::Hello, -i64::from(errno.0));
    if let Some(bytes) = head.emit(0, 0, 0) {
        // A new socket has room for it.
        let _ = stream.write(&bytes);
    }
}

/// The number of a channel as the owner of a lock.
fn owner(number: u64) -> u32 {
    (number % u64::from(u32::MAX - 1)) as u32 + 1
}

/// The room for an answer's payload that a request tells.
fn room_of(frame: Frame<'_>) -> Result<usize, Errno> {
    let room = frame.payload.first_chunk().ok_or(Errno::EINVAL)?;
    Ok(usize::try_from(u64::from_ne_bytes(*room)).unwrap_or(usize::MAX))
}

impl Service {
    /// Closes all sockets. What programs send from now on has to be asked for, which fails.
    pub(crate) fn end(mut self) {
        for (socket, _) in self.sockets.values_mut() {
            socket.rings.allow_nothing();
            self.driver.close(socket.id);
        }
    }
}

impl std::fmt::Debug for Service {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let fd = self.epoll.as_raw_fd();
        f.debug_struct("Service").field("epoll", &fd).finish_non_exhaustive()
    }
}
