//! The thread that executes what programs ask for.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Waker;
use std::time::Duration;

use bowline_base::{Errno, Instant, clock};
use bowline_host_wire::{
    ChannelId, Frame, NodeId, Op, RING_MESSAGE_MAX, Reply, SocketHandle, VERSION,
};
use bowline_rds_driver::Driver;
use rustix::event::{EventfdFlags, Timespec, epoll};
use rustix::net::send;
use rustix::net::sockopt::set_socket_passcred;

use crate::accounts::{Accounts, Charge};
use crate::agent;
use crate::caller::{Caller, take_descriptors};
use crate::channel::{AT_ONCE, Channel, Waiting};
use crate::closer::{self, Passed};
use crate::hand_over::Successor;
use crate::namespace::network_namespace;
use crate::network::Network;
use crate::ready::{Ready, SocketWaker};
use crate::requests::{Answer, Outcome};
use crate::socket::{HostSocket, Offer};

/// What an epoll event is about: the kind in the upper 8 bits, a number below.
const WAKES: u64 = 0;
/// The first wakes this thread for sockets on which something has happened.
const BELL: u64 = WAKES;
pub(crate) const KICK: u64 = WAKES | 1;
pub(crate) const NETWORK: u64 = WAKES | 2;
const LISTENER: u64 = 1 << 56;
const CHANNEL: u64 = 2 << 56;
const SOCKET: u64 = 3 << 56;
const KIND: u64 = 0xff << 56;

/// Most channels, of all processes together.
const CHANNELS_MAX: usize = 32_768;
const EMFILE: i32 = 24;
/// Bytes of a channel that are read at once; a message of a ring has room there as well.
const READ: usize = 64 << 10;
const _: () = assert!(READ >= RING_MESSAGE_MAX);
/// Requests of one channel that are executed before others get their turn.
const REQUESTS: usize = 64;
/// Events that are taken at once.
const EVENTS: usize = 256;
/// How long a channel may be full of requests that wait for the one before them.
const STUFFED: Duration = Duration::from_secs(60);
/// Longest sleep, so that an end of the host is noticed.
const LOOK: Duration = Duration::from_millis(200);

pub(crate) fn errno(error: &bowline_rds_driver::Error) -> Errno {
    error.errno()
}

pub(crate) struct Service {
    pub(crate) driver: Driver,
    pub(crate) accounts: Accounts,
    stop: Arc<AtomicBool>,
    epoll: OwnedFd,
    network: Network,
    pub(crate) ready: Arc<Ready>,
    pub(crate) listener: UnixListener,
    /// Number of this node, by which programs know it again.
    pub(crate) number: NodeId,
    /// The network namespace of this node's sockets.
    pub(crate) namespace: u64,
    pub(crate) channels: HashMap<ChannelId, Channel>,
    /// Which sockets a channel may name.
    pub(crate) known: HashMap<ChannelId, HashSet<SocketHandle>>,
    pub(crate) sockets: HashMap<SocketHandle, (HostSocket, Waker)>,
    /// Sockets that get a turn in each round.
    pub(crate) active: Vec<SocketHandle>,
    /// When the sockets were last looked at from whose rings programs may have taken messages.
    looked: Instant,
    /// Handles by the system's number of the programs' ends.
    pub(crate) by_cookie: HashMap<u64, SocketHandle>,
    deadlines: BTreeSet<(Instant, ChannelId)>,
    /// Channels that have more requests than they may have in one round.
    again: BTreeSet<ChannelId>,
    /// Number of the next channel.
    pub(crate) next: ChannelId,
    /// Who is to resume in this node's place.
    pub(crate) successor: Arc<Successor>,
    /// A descriptor that is given up to refuse a connection when there is no other.
    spare: Option<OwnedFd>,
    /// Where requests are read to, and messages are copied to.
    pub(crate) scratch: Box<[u8]>,
}

impl Service {
    /// Watches the listener.
    pub(crate) fn new(
        driver: Driver,
        accounts: Accounts,
        listener: UnixListener,
        number: NodeId,
        stop: Arc<AtomicBool>,
        successor: Arc<Successor>,
    ) -> std::io::Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let ready = Arc::new(Ready::new()?);
        let network = Network::new(&driver, &epoll)?;
        let service = Self {
            driver,
            accounts,
            stop,
            epoll,
            network,
            ready,
            listener,
            number,
            namespace: network_namespace(),
            channels: HashMap::new(),
            known: HashMap::new(),
            sockets: HashMap::new(),
            active: Vec::new(),
            looked: clock::now(),
            by_cookie: HashMap::new(),
            deadlines: BTreeSet::new(),
            again: BTreeSet::new(),
            next: ChannelId(1),
            successor,
            spare: Some(rustix::event::eventfd(0, EventfdFlags::CLOEXEC)?),
            scratch: vec![0; READ].into_boxed_slice(),
        };
        service.watch(service.ready.bell().as_fd(), BELL, epoll::EventFlags::IN)?;
        // Before it is known who connects, nobody sends anything but bytes.
        take_descriptors(&service.listener, false);
        // Connections take that over.
        set_socket_passcred(&service.listener, true)?;
        service.listener.set_nonblocking(true)?;
        service.watch(service.listener.as_fd(), LISTENER, epoll::EventFlags::IN)?;
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

    /// Serves until the host ends or hands over. This thread reads the network as well, so that
    /// what comes for a program needs no other.
    pub(crate) fn run(mut self) -> Self {
        let mut events = Vec::with_capacity(EVENTS);
        while !self.stop.load(Ordering::Relaxed) {
            let is_busy = self.serve_again() | self.round();
            let next = self.network.turn(&self.epoll);
            let may_sleep = !is_busy && self.fall_asleep();
            let sleep = if may_sleep { self.time_to_sleep().min(next) } else { Duration::ZERO };
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
                    WAKES => self.network.wake_up(token),
                    LISTENER => self.accept(),
                    CHANNEL => self.channel_event(ChannelId(token & !KIND), event.flags),
                    _ => self.socket_event(SocketHandle(token & !KIND), event.flags),
                }
            }
            self.end_waits();
            self.count_refusals();
            let now = clock::now();
            if now.saturating_since(self.looked) >= LOOK {
                self.looked = now;
                self.check_idle();
                self.check_full();
                self.end_stuffed(now);
                agent::look_at_all();
                closer::tidy();
            }
        }
        self
    }

    fn time_to_sleep(&self) -> Duration {
        let until = self.deadlines.first().map(|(at, _)| at.saturating_since(clock::now()));
        until.unwrap_or(LOOK).min(LOOK)
    }

    fn accept(&mut self) {
        let stream = match self.listener.accept() {
            Ok((stream, _)) => Passed::new(None, stream),
            Err(error) if error.raw_os_error() == Some(EMFILE) => {
                // Accepted and dropped: the program gets an error now instead of waiting.
                self.spare = None;
                if let Ok((stream, _)) = self.listener.accept() {
                    Passed::new(None, stream).end();
                }
                self.spare = rustix::event::eventfd(0, EventfdFlags::CLOEXEC).ok();
                return;
            }
            _ => return,
        };
        let Ok(caller) = Caller::of(&stream) else { return stream.end() };
        let owner = self.accounts.owner(&caller);
        if let Err((errno, stream)) = self.admit(stream.owned_by(owner), caller, HashSet::new()) {
            self.turn_away(stream, errno);
        }
    }

    /// Takes in a channel, if its user may have one; it may name some sockets. Returns its number.
    fn admit(
        &mut self,
        stream: Passed,
        caller: Caller,
        known: HashSet<SocketHandle>,
    ) -> Result<ChannelId, (Errno, Passed)> {
        let user = caller.user;
        let full = self.channels.len() >= CHANNELS_MAX;
        let is_behind = closer::is_behind(Some(user));
        let admitted = match self.accounts.open_channel(&caller) {
            Ok(()) if full || is_behind => {
                self.accounts.close_channel(user, 0);
                Err(if full { Errno::ENFILE } else { Errno::EMFILE })
            }
            admitted => admitted,
        };
        if let Err(errno) = admitted {
            return Err((errno, stream));
        }
        take_descriptors(&stream, true);
        let number = self.next;
        self.next = ChannelId(number.0 + 1);
        let watched =
            Channel::new(stream, caller).and_then(|channel| self.watch_channel(number, channel));
        match watched {
            Ok(()) => _ = self.known.insert(number, known),
            // It has ended without an answer.
            Err(_) => self.accounts.close_channel(user, 0),
        }
        Ok(number)
    }

    /// A program has sent one end of a pair on a socket, for a channel.
    pub(crate) fn take_offer(&mut self, handle: SocketHandle, offer: Offer) {
        let Some((stream, caller, version)) = offer.channel() else { return };
        let stream = stream.owned_by(self.accounts.owner(&caller));
        let admitted = if version == VERSION {
            self.admit(stream, caller, HashSet::from([handle]))
        } else {
            Err((Errno::EPROTONOSUPPORT, stream))
        };
        match admitted {
            Ok(number) => self.greet(number),
            Err((errno, stream)) => self.turn_away(stream, errno),
        }
    }

    /// Greets on a channel that was offered. One whose other end is a channel of this node as well
    /// ends by that: nobody greets twice.
    fn greet(&mut self, number: ChannelId) {
        let answer = self.hello(number);
        if let Some(channel) = self.channels.get_mut(&number) {
            channel.greeted = true;
        }
        if !self.answer(number, Op::Hello, answer) {
            self.end_channel(number);
        }
    }

    /// Answers the greeting that a process is about to send, and ends its channel.
    fn turn_away(&mut self, stream: Passed, errno: Errno) {
        let head = Reply::error(errno.0).emit(Op::Hello);
        if let Some(bytes) = head.emit(0, 0, 0) {
            // A new socket has room for it.
            let _ = send(&stream, &bytes, AT_ONCE);
        }
        stream.end();
    }

    /// Watches a channel, for which there may be no descriptors or memory left.
    pub(crate) fn watch_channel(
        &mut self,
        number: ChannelId,
        channel: Channel,
    ) -> Result<(), rustix::io::Errno> {
        let flags = epoll::EventFlags::IN | epoll::EventFlags::OUT | epoll::EventFlags::ET;
        self.watch(channel.fd(), CHANNEL | number.0, flags)?;
        self.channels.insert(number, channel);
        Ok(())
    }

    /// Requests of a channel may be there already.
    pub(crate) fn resume_requests(&mut self, number: ChannelId) {
        self.again.insert(number);
    }

    /// A request waits that began to wait in another process.
    pub(crate) fn resume_wait(&mut self, number: ChannelId, waiting: Waiting) {
        if let Some(at) = waiting.deadline {
            self.deadlines.insert((at, number));
        }
    }

    /// Takes a socket in.
    pub(crate) fn add_socket(
        &mut self,
        handle: SocketHandle,
        socket: HostSocket,
    ) -> Result<(), (rustix::io::Errno, Charge)> {
        let flags = epoll::EventFlags::IN | epoll::EventFlags::RDHUP | epoll::EventFlags::ET;
        if let Err(errno) = self.watch(socket.end(), SOCKET | handle.0, flags) {
            return Err((errno, socket.charge));
        }
        let waker = SocketWaker { handle, ready: Arc::clone(&self.ready) };
        self.by_cookie.insert(socket.cookie, handle);
        self.sockets.insert(handle, (socket, Waker::from(Arc::new(waker))));
        Ok(())
    }

    /// Reads a channel, and executes what it asks for.
    fn channel_event(&mut self, number: ChannelId, flags: epoll::EventFlags) {
        let Some(channel) = self.channels.get_mut(&number) else { return };
        let open = channel.flush().and_then(|()| channel.fill(&mut self.scratch));
        let goes_on = matches!(open, Ok(true))
            && self.count_held(number)
            && self.serve(number)
            && self.has_taken_descriptor(number);
        // epoll reports the request and the hang-up of a short-lived process in one edge; the read
        // does not return 0.
        let has_ended = flags.contains(epoll::EventFlags::HUP);
        if !goes_on || has_ended || !self.count_held(number) {
            self.end_channel(number);
        }
    }

    /// Ends channels that have been full for long: what is behind is not read, and may be what
    /// keeps the other end open when its process is gone. The library has one request under way.
    fn end_stuffed(&mut self, now: Instant) {
        let is_stuffed = |channel: &mut Channel| {
            let since = if channel.is_full() { channel.full_since.or(Some(now)) } else { None };
            channel.full_since = since;
            since.is_some_and(|since| now.saturating_since(since) >= STUFFED)
        };
        let stuffed = self.channels.iter_mut().filter_map(|(n, c)| is_stuffed(c).then_some(*n));
        for number in stuffed.collect::<Vec<_>>() {
            self.end_channel(number);
        }
    }

    /// Tells whether a channel keeps no descriptor. One comes in one piece with a request that
    /// takes it; kept for a request that does not come, it could keep the channel's own other end
    /// open, which waits in its queue.
    fn has_taken_descriptor(&self, number: ChannelId) -> bool {
        let keeps = |channel: &Channel| channel.has_descriptor() && !self.again.contains(&number);
        !self.channels.get(&number).is_some_and(keeps)
    }

    /// Executes the requests of a channel, up to one that waits. Returns `false` when the
    /// channel is of no use any more.
    fn serve(&mut self, number: ChannelId) -> bool {
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

    /// Resumes channels that had more requests than they may have in one round. Returns
    /// whether there were any.
    fn serve_again(&mut self) -> bool {
        let again = std::mem::take(&mut self.again);
        for number in &again {
            if !self.serve(*number) || !self.has_taken_descriptor(*number) {
                self.end_channel(*number);
            }
        }
        !again.is_empty()
    }

    fn is_waiting(&self, number: ChannelId) -> bool {
        self.channels.get(&number).is_some_and(|channel| channel.waiting.is_some())
    }

    /// Executes the first request of a channel. Returns whether it is done; `None`: the channel
    /// is of no use any more.
    fn step(&mut self, number: ChannelId) -> Option<bool> {
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
            Op::Attach | Op::Memory => self.channels.get_mut(&number)?.take_descriptor(),
            _ => None,
        };
        let outcome = self.execute(number, frame, descriptor);
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
                channel.greeted |= matches!(answer.reply, Reply::Welcome { .. });
                self.answer(number, op, answer).then_some(true)
            }
        }
    }

    fn answer(&mut self, number: ChannelId, op: Op, answer: Answer) -> bool {
        let Some(channel) = self.channels.get_mut(&number) else { return false };
        let Answer { reply, name, control, bytes, message, descriptors } = answer;
        let mut pieces: Vec<&[u8]> = vec![&bytes];
        if let Some((rope, mut left)) = message.as_ref().map(|(rope, len)| (rope, *len)) {
            for slice in rope.slices() {
                let piece = &slice[..slice.len().min(left)];
                left -= piece.len();
                pieces.push(piece);
            }
        }
        let descriptors: Vec<_> = descriptors.iter().map(AsFd::as_fd).collect();
        channel.answer(reply.emit(op), &name, &control, &pieces, &descriptors).is_ok()
    }

    /// Something happened on a socket: those who wait for it try again, in their order.
    pub(crate) fn socket_is_ready(&mut self, handle: SocketHandle) {
        self.activate(handle);
        self.turn(handle);
        self.resume_senders(handle);
        self.refresh(handle);
    }

    /// Makes another attempt at the request that a channel waits for.
    pub(crate) fn try_again(&mut self, number: ChannelId) {
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
    pub(crate) fn end_wait(&mut self, number: ChannelId, errno: Errno) -> bool {
        let Some(channel) = self.channels.get_mut(&number) else { return false };
        let Some(waiting) = channel.waiting else { return true };
        let (input, start) = channel.take_input();
        let Ok(Some((frame, len))) = Frame::parse(&input[start..]) else { return false };
        let op = frame.head.op;
        channel.put_input(input, len);
        self.forget_wait(number, waiting);
        self.answer(number, op, Answer::error(errno))
    }

    fn forget_wait(&mut self, number: ChannelId, waiting: Waiting) {
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

    fn socket_event(&mut self, handle: SocketHandle, flags: epoll::EventFlags) {
        if flags.intersects(epoll::EventFlags::HUP | epoll::EventFlags::RDHUP) {
            // A program may have pushed and ended.
            self.drain(handle);
            self.close(handle);
        } else {
            self.activate(handle);
            self.refresh(handle);
        }
    }

    /// The last descriptor of a socket was closed.
    pub(crate) fn close(&mut self, handle: SocketHandle) {
        let Some((mut socket, _)) = self.sockets.remove(&handle) else { return };
        // Who still has it asks, and hears that it is closed.
        socket.rings.allow_nothing();
        self.active.retain(|active| *active != handle);
        self.driver.close(socket.id);
        self.accounts.close_socket(&socket.charge);
        self.by_cookie.remove(&socket.cookie);
        for number in &socket.senders {
            if !self.end_wait(*number, Errno::EBADF) {
                self.end_channel(*number);
            }
        }
        let _ = epoll::delete(&self.epoll, socket.end());
        socket.close();
        for known in self.known.values_mut() {
            known.remove(&handle);
        }
    }

    pub(crate) fn end_channel(&mut self, number: ChannelId) {
        if let Some(channel) = self.remove_channel(number) {
            channel.end();
        }
    }

    /// Takes a channel out of the table, whatever becomes of its connection.
    pub(crate) fn remove_channel(&mut self, number: ChannelId) -> Option<Channel> {
        if let Some(waiting) = self.channels.get(&number).and_then(|channel| channel.waiting) {
            self.forget_wait(number, waiting);
        }
        let removed = self.channels.remove(&number);
        if let Some(channel) = &removed {
            self.accounts.close_channel(channel.caller.user, channel.counted);
            let _ = epoll::delete(&self.epoll, channel.fd());
        }
        let known = self.known.remove(&number).unwrap_or_default();
        // The process may have had the lock of a socket, or a wake token, or have pushed without
        // being able to say so.
        for (handle, (socket, _)) in &mut self.sockets {
            socket.rings.owner_is_gone(number.owner());
            if known.contains(handle) {
                socket.replace_wake_token();
            }
        }
        for handle in known {
            self.activate(handle);
        }
        removed
    }
}

impl Service {
    /// Closes all sockets. What programs send from now on has to be asked for, which fails. Another
    /// node may have them as well, and take everything back.
    pub(crate) fn end(mut self) {
        for (socket, _) in self.sockets.values_mut() {
            socket.rings.allow_nothing();
            self.driver.close(socket.id);
        }
        // Who has not been accepted may have sent descriptors, before Linux 6.16.
        drop(Passed::new(None, self.listener));
    }
}

impl std::fmt::Debug for Service {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let fd = self.epoll.as_raw_fd();
        f.debug_struct("Service").field("epoll", &fd).finish_non_exhaustive()
    }
}
