//! The server's logic without its outside: requests, rings, accounts and what becomes of programs
//! that end. No descriptor, thread or clock is in here: it reaches those by [`Outside`], which the
//! host implements with the system's, and the simulator (`bowline_sim::host`) with its own.

mod outside;
mod parts;

use std::collections::{BTreeSet, HashMap, HashSet};
use std::fmt;
use std::hash::{BuildHasherDefault, DefaultHasher};
use std::sync::Arc;
use std::task::Waker;
use std::time::Duration;

use bowline_base::{Errno, Instant};
use bowline_host_wire::{
    ChannelId, Frame, NodeId, Op, RING_MESSAGE_MAX, Reply, SocketHandle, VERSION,
};
use bowline_rds::SocketId;

pub use self::outside::{Arrival, Descriptor, Opened, Outside, Rds, SharedMemory};
pub use self::parts::{ChannelPart, Parts, SocketPart};
use crate::accounts::{Accounts, Charge};
pub use crate::caller::{Caller, Credentials};
use crate::channel::{Channel, Waiting};
pub use crate::closer::Owner;
pub use crate::heap::HeapMemory;
use crate::policy::{Policy, Quota};
pub use crate::rdma::{ProcessMemory, Shown};
pub use crate::ready::Bell;
use crate::ready::{Ready, SocketWaker};
use crate::requests::{Answer, Outcome};
use crate::socket::{HostSocket, Offer};

/// Nothing is taken of who sends it, for now.
pub const EDQUOT: Errno = Errno(122);

/// A table whose keys the server chooses, or the system: it is the same in each run of a simulator.
pub(crate) type Map<K, V> = HashMap<K, V, BuildHasherDefault<DefaultHasher>>;
/// The same without values.
pub(crate) type Set<K> = HashSet<K, BuildHasherDefault<DefaultHasher>>;

/// Most channels, of all processes together.
const CHANNELS_MAX: usize = 32_768;
/// Bytes of a channel that are read at once; a message of a ring has room there as well.
const READ: usize = 64 << 10;
const _: () = assert!(READ >= RING_MESSAGE_MAX);
/// Requests of one channel that are executed before others get their turn.
const REQUESTS: usize = 64;
/// How long a channel may be full of requests that wait for the one before them, and how long its
/// user may have sent more than is closed.
const STUFFED: Duration = Duration::from_secs(60);
/// How often the server looks at what tells nobody of itself, and its longest sleep.
pub const LOOK: Duration = Duration::from_millis(200);

/// The server of one node.
pub struct Core<O: Outside> {
    pub(crate) outside: O,
    pub(crate) rds: O::Rds,
    pub(crate) accounts: Accounts,
    pub(crate) ready: Arc<Ready<O::Bell>>,
    /// Number of this node, by which programs know it again.
    pub(crate) number: NodeId,
    /// The network namespace of this node's sockets.
    pub(crate) namespace: u64,
    pub(crate) channels: Map<ChannelId, Channel<O::Descriptor>>,
    /// Which sockets a channel may name.
    pub(crate) known: Map<ChannelId, Set<SocketHandle>>,
    pub(crate) sockets: Map<SocketHandle, (HostSocket<O>, Waker)>,
    /// Sockets that get a turn in each round.
    pub(crate) active: Vec<SocketHandle>,
    /// Handles by the system's number of the programs' ends.
    pub(crate) by_cookie: Map<u64, SocketHandle>,
    deadlines: BTreeSet<(Instant, ChannelId)>,
    /// When it last looked at what tells nobody of itself.
    looked: Option<Instant>,
    /// Channels that have more requests than they may have in one round.
    again: BTreeSet<ChannelId>,
    /// Channels from which nothing is taken until what their user has sent before is closed.
    held_up: BTreeSet<ChannelId>,
    /// Messages that went through rings since the server last slept.
    pub(crate) moved: usize,
    /// Before it last slept, that was one at most.
    pub(crate) sends_singly: bool,
    /// Number of the next channel.
    pub(crate) next: ChannelId,
    /// Where requests are read to, and messages are copied to.
    pub(crate) scratch: Box<[u8]>,
}

impl<O: Outside> Core<O> {
    /// A server without channels and sockets.
    pub(crate) fn new(
        outside: O,
        rds: O::Rds,
        accounts: Accounts,
        bell: O::Bell,
        (number, namespace): (NodeId, u64),
    ) -> Self {
        Self {
            outside,
            rds,
            accounts,
            ready: Arc::new(Ready::new(bell)),
            number,
            namespace,
            channels: Map::default(),
            known: Map::default(),
            sockets: Map::default(),
            active: Vec::new(),
            by_cookie: Map::default(),
            deadlines: BTreeSet::new(),
            looked: None,
            again: BTreeSet::new(),
            held_up: BTreeSet::new(),
            moved: 0,
            sends_singly: false,
            next: ChannelId(1),
            scratch: vec![0; READ].into_boxed_slice(),
        }
    }

    /// A server that runs as the user `own`, with what its programs may do.
    pub fn start(
        outside: O,
        rds: O::Rds,
        bell: O::Bell,
        (own, policy, default_quota): (u32, Policy, Quota),
        number: NodeId,
    ) -> Self {
        let accounts = Accounts::new(own, policy, default_quota, Arc::default());
        Self::new(outside, rds, accounts, bell, (number, 0))
    }

    /// Wakes the server, or keeps it from falling asleep.
    pub fn ring(&self) {
        self.ready.ring();
    }

    /// What each user has: sockets, channels, bytes of send and receive buffers, and bytes of
    /// requests and replies.
    pub fn usage(&self) -> Vec<(u32, [usize; 5])> {
        self.accounts.usage()
    }

    /// Channels and sockets.
    pub fn counts(&self) -> (usize, usize) {
        (self.channels.len(), self.sockets.len())
    }

    /// The sockets, in the order of their handles.
    pub fn sockets(&self) -> Vec<SocketView> {
        let view = |(handle, (socket, _)): (&SocketHandle, &(HostSocket<O>, Waker))| SocketView {
            handle: *handle,
            id: socket.id,
            user: socket.charge.user,
            cookie: socket.cookie,
            has_sends: !socket.rings.has_no_sends(),
            has_work: socket.rings.has_work(),
            senders: socket.senders.len(),
        };
        let mut all: Vec<_> = self.sockets.iter().map(view).collect();
        all.sort_unstable_by_key(|view| view.handle);
        all
    }

    /// How long the server may sleep, though nothing happens: [`LOOK`] at most.
    pub fn time_to_sleep(&self) -> Duration {
        let now = self.outside.now();
        let look = self.looked.map_or(now, |at| at + LOOK);
        let until = self.deadlines.first().map_or(look, |(at, _)| look.min(*at));
        until.saturating_since(now)
    }

    /// Looks at what tells nobody of itself, where that is due: at first, and [`LOOK`] after the
    /// last time, also where something happens all the time. Tells whether it was.
    pub fn look_if_due(&mut self) -> bool {
        let now = self.outside.now();
        if self.looked.is_some_and(|at| now.saturating_since(at) < LOOK) {
            return false;
        }
        self.looked = Some(now);
        self.check_idle();
        self.check_full();
        for number in std::mem::take(&mut self.held_up) {
            self.channel_event(number, false);
        }
        self.end_stuffed(now);
        true
    }

    /// A program has connected. Returns what is to become of a connection that is refused: see
    /// [`turn_away`](Self::turn_away).
    ///
    /// # Errors
    /// The error to answer.
    pub fn accept(
        &mut self,
        stream: O::Descriptor,
        caller: Caller,
    ) -> Result<ChannelId, (Errno, O::Descriptor)> {
        let owner = self.accounts.owner(&caller);
        self.admit(stream.owned_by(owner), caller, Set::default())
    }
    /// Takes in a channel, if its user may have one; it may name some sockets. Returns its number.
    fn admit(
        &mut self,
        stream: O::Descriptor,
        caller: Caller,
        known: Set<SocketHandle>,
    ) -> Result<ChannelId, (Errno, O::Descriptor)> {
        let user = caller.user;
        let full = self.channels.len() >= CHANNELS_MAX;
        let is_behind = self.outside.is_behind(Some(user));
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
        let number = self.next;
        self.next = ChannelId(number.0 + 1);
        let random = [self.outside.random(), self.outside.random()];
        let watched = Channel::new(stream, caller, random)
            .and_then(|channel| self.watch_channel(number, channel));
        match watched {
            Ok(()) => _ = self.known.insert(number, known),
            // It has ended without an answer.
            Err(_) => self.accounts.close_channel(user, 0),
        }
        Ok(number)
    }

    /// A program has sent one end of a pair on a socket, for a channel.
    pub(crate) fn take_offer(&mut self, handle: SocketHandle, offer: Offer<O::Descriptor>) {
        let Some((stream, caller, version)) = offer.channel() else { return };
        let stream = stream.owned_by(self.accounts.owner(&caller));
        let admitted = if version == VERSION {
            self.admit(stream, caller, Set::from_iter([handle]))
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
    pub fn turn_away(&mut self, stream: O::Descriptor, errno: Errno) {
        let head = Reply::error(errno.0).emit(Op::Hello);
        if let Some(bytes) = head.emit(0, 0, 0) {
            // A new socket has room for it.
            let _ = stream.send(&bytes, &[]);
        }
        stream.end();
    }

    /// Watches a channel, for which there may be no descriptors or memory left.
    pub(crate) fn watch_channel(
        &mut self,
        number: ChannelId,
        channel: Channel<O::Descriptor>,
    ) -> Result<(), Errno> {
        self.outside.watch_channel(number, channel.stream())?;
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
        socket: HostSocket<O>,
    ) -> Result<(), (Errno, Charge)> {
        if let Err(errno) = self.outside.watch_socket(handle, socket.end()) {
            return Err((errno, socket.charge));
        }
        let waker = SocketWaker { handle, ready: Arc::clone(&self.ready) };
        self.by_cookie.insert(socket.cookie, handle);
        self.sockets.insert(handle, (socket, Waker::from(Arc::new(waker))));
        Ok(())
    }

    /// Reads a channel, and executes what it asks for; the other end may be gone, `has_ended`.
    pub fn channel_event(&mut self, number: ChannelId, has_ended: bool) {
        let Some(channel) = self.channels.get_mut(&number) else { return };
        let open = channel.flush().and_then(|()| channel.fill(&mut self.scratch));
        // Another program of the user's may have done that, or a burst.
        let is_held_up = open == Err(EDQUOT);
        if is_held_up {
            self.held_up.insert(number);
        }
        let goes_on = (is_held_up || open == Ok(true))
            && self.count_held(number)
            && self.serve(number)
            && self.has_taken_descriptor(number);
        // The request and the end of a short-lived process are told of together; the read does not
        // return 0.
        if !goes_on || has_ended || !self.count_held(number) {
            self.end_channel(number);
        }
    }

    /// Ends channels from which nothing could be taken for long, as they are full or held up: what
    /// is behind is not read, and may be what keeps the other end open when its process is gone.
    /// The library has one request under way.
    pub(crate) fn end_stuffed(&mut self, now: Instant) {
        let held_up = &self.held_up;
        let is_stuffed = |number, channel: &mut Channel<O::Descriptor>| {
            let is_one = channel.is_full() || held_up.contains(number);
            channel.full_since = channel.full_since.filter(|_| is_one).or(is_one.then_some(now));
            channel.full_since.is_some_and(|since| now.saturating_since(since) >= STUFFED)
        };
        let stuffed = self.channels.iter_mut().filter_map(|(n, c)| is_stuffed(n, c).then_some(*n));
        for number in stuffed.collect::<Vec<_>>() {
            self.end_channel(number);
        }
    }

    /// Tells whether a channel keeps no descriptor. One comes in one piece with a request that
    /// takes it; kept for a request that does not come, it could keep the channel's own other end
    /// open, which waits in its queue.
    fn has_taken_descriptor(&self, number: ChannelId) -> bool {
        let keeps = |channel: &Channel<O::Descriptor>| {
            channel.has_descriptor() && !self.again.contains(&number)
        };
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
    pub fn serve_again(&mut self) -> bool {
        let again = std::mem::take(&mut self.again);
        for number in &again {
            if !self.serve(*number) || !self.has_taken_descriptor(*number) {
                self.end_channel(*number);
            }
        }
        !again.is_empty()
    }

    /// Tells whether there are requests that wait for the next round.
    pub(crate) fn has_requests(&self) -> bool {
        !self.again.is_empty()
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
            Op::Attach | Op::Memory | Op::Watch => {
                self.channels.get_mut(&number)?.take_descriptor()
            }
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
                channel.full_since = None;
                Some(true)
            }
            Outcome::Answer(answer) => {
                channel.put_input(input, len);
                channel.full_since = None;
                channel.greeted |= matches!(answer.reply, Reply::Welcome { .. });
                self.answer(number, op, answer).then_some(true)
            }
        }
    }

    fn answer(&mut self, number: ChannelId, op: Op, answer: Answer<O::Given>) -> bool {
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
        if input.is_empty() {
            // Its request is being tried again at this moment, and finds out by itself.
            return true;
        }
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
    pub fn end_waits(&mut self) {
        while let Some((at, number)) = self.deadlines.first().copied() {
            if at > self.outside.now() {
                return;
            }
            self.deadlines.remove(&(at, number));
            if !self.end_wait(number, Errno::ETIMEDOUT) || !self.serve(number) {
                self.end_channel(number);
            }
        }
    }

    /// Something has happened on a socket; all programs may have closed it, `has_ended`.
    pub fn socket_event(&mut self, handle: SocketHandle, has_ended: bool) {
        if has_ended {
            // A program may have pushed and ended.
            self.drain(handle);
            self.close(handle);
        } else {
            if let Some((socket, _)) = self.sockets.get_mut(&handle) {
                socket.unread = true;
            }
            self.activate(handle);
            self.refresh(handle);
        }
    }

    /// The last descriptor of a socket was closed.
    pub(crate) fn close(&mut self, handle: SocketHandle) {
        let Some((mut socket, _)) = self.sockets.remove(&handle) else { return };
        // Who still has it asks, and hears that it is closed.
        socket.rings.allow_nothing();
        // What programs have taken is delivered [R-1012], as far as the memory is not corrupt.
        let _ = socket.rings.release(&self.rds, socket.id);
        self.active.retain(|active| *active != handle);
        self.rds.close(socket.id);
        self.accounts.close_socket(&socket.charge);
        self.by_cookie.remove(&socket.cookie);
        for number in &socket.senders {
            if !self.end_wait(*number, Errno::EBADF) {
                self.end_channel(*number);
            }
        }
        self.outside.unwatch(socket.end());
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
    pub(crate) fn remove_channel(&mut self, number: ChannelId) -> Option<Channel<O::Descriptor>> {
        if let Some(waiting) = self.channels.get(&number).and_then(|channel| channel.waiting) {
            self.forget_wait(number, waiting);
        }
        let removed = self.channels.remove(&number);
        if let Some(channel) = &removed {
            self.accounts.close_channel(channel.caller.user, channel.counted);
            self.outside.unwatch(channel.stream());
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

/// A socket of a server, as a judge sees it.
#[derive(Clone, Copy, Debug)]
pub struct SocketView {
    /// Its handle.
    pub handle: SocketHandle,
    /// Its number in the node.
    pub id: SocketId,
    /// Who has opened it.
    pub user: u32,
    /// The system's number of the programs' end.
    pub cookie: u64,
    /// Something is pushed and not sent.
    pub has_sends: bool,
    /// Something is pushed that may be sent now.
    pub has_work: bool,
    /// Channels whose requests wait for room to send.
    pub senders: usize,
}

/// Has structs with types of the outside shown by their names.
macro_rules! shown_by_name {
    ($($name:ident),+) => {
        $(impl<O: Outside> fmt::Debug for $name<O> {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.debug_struct(stringify!($name)).finish_non_exhaustive()
            }
        })+
    };
}
shown_by_name!(Core, Opened, Parts, ChannelPart, SocketPart);
