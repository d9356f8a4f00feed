//! What each request does, and what is answered.

use std::net::SocketAddr;
use std::task::{Context, Poll};
use std::time::Duration;

use bowline_base::{Errno, Instant};
use bowline_host_wire::{
    Call, ChannelId, Features, Frame, Greeting, Invalid, Reply, Request, SendCall, SocketHandle,
    VERSION,
};
use bowline_rds::{Interest, RecvOpts, Rope, SendMsg, SocketId, Transport};
use bowline_wire::rds::uapi::{
    MSG_DONTWAIT, MSG_ERRQUEUE, MSG_OOB, MSG_PEEK, MSG_TRUNC, MSG_ZEROCOPY, SIOCRDSGETTOS,
    SIOCRDSSETTOS, SO_RCVBUF, SO_SNDBUF, SOCK_SEQPACKET, SOL_RDS, cmsg_space,
};

use crate::channel::Waiting;
use crate::control::{self, COMPLETION_ROOM, Malformed, Room, STATUS_ROOM};
use crate::core::{Core, Descriptor, Opened, Outside, Rds, SharedMemory};
use crate::names;
use crate::options::{Most, Value};
use crate::rdma::{self, Asked, Refusal};
use crate::rings::Rings;
use crate::socket::HostSocket;

/// Room for a control message of one number.
const SMALL_CONTROL: usize = cmsg_space(8);

/// What becomes of a request.
pub(crate) enum Outcome<G> {
    Answer(Answer<G>),
    Wait(Waiting),
    /// It has no answer.
    Nothing,
}

/// The answer to a request.
pub(crate) struct Answer<G> {
    pub(crate) reply: Reply,
    pub(crate) name: Vec<u8>,
    pub(crate) control: Vec<u8>,
    pub(crate) bytes: Vec<u8>,
    /// So much of a message.
    pub(crate) message: Option<(Rope, usize)>,
    pub(crate) descriptors: Vec<G>,
}

impl<G> Answer<G> {
    /// A reply with nothing but its numbers.
    pub(crate) fn of(reply: Reply) -> Self {
        let (name, control, bytes) = (Vec::new(), Vec::new(), Vec::new());
        Self { reply, name, control, bytes, message: None, descriptors: Vec::new() }
    }

    /// The call has returned 0.
    pub(crate) fn done() -> Self {
        Self::of(Reply::Done)
    }

    pub(crate) fn error(errno: Errno) -> Self {
        Self::of(Reply::error(errno.0))
    }
}

impl<G> From<Value> for Answer<G> {
    fn from(value: Value) -> Self {
        let Value { returned, bytes, optlen } = value;
        let len = i32::try_from(optlen.unwrap_or(bytes.len())).unwrap_or(i32::MAX);
        let reply = match returned {
            Ok(returned) => Reply::Value { returned, len },
            Err(errno) => Reply::Failed { errno: errno.0, fill: false, needed: len },
        };
        Self { bytes, ..Self::of(reply) }
    }
}

impl<O: Outside> Core<O> {
    /// Executes a request of a channel; `descriptor` came along.
    pub(crate) fn execute(
        &mut self,
        number: ChannelId,
        frame: Frame<'_>,
        descriptor: Option<O::Descriptor>,
    ) -> Outcome<O::Given> {
        let request = match Request::parse(&frame) {
            Ok(request) => request,
            Err(Invalid { socket: Some(handle) }) if !self.knows(number, handle) => {
                return Outcome::Answer(Answer::error(Errno::EBADF));
            }
            Err(Invalid { .. }) => return Outcome::Answer(Answer::error(Errno::EINVAL)),
        };
        let result = match request {
            Request::Hello { version: VERSION, .. } => Ok(self.hello(number)),
            Request::Hello { .. } => Err(Errno::EPROTONOSUPPORT),
            Request::HandOver { version, hand_over_version, state_format } => {
                match self.name_successor(number, (version, hand_over_version, state_format)) {
                    Ok(()) => {
                        // The other process is at the end of the connection still.
                        drop(self.remove_channel(number));
                        return Outcome::Nothing;
                    }
                    Err(errno) => Err(errno),
                }
            }
            Request::Open { kind, protocol } => self.open(number, kind, protocol),
            Request::Attach => self.attach(number, descriptor),
            Request::ShowMemory { grant, nonce_at, features } => {
                self.show_memory(number, (grant, features), nonce_at, descriptor)
            }
            Request::ShowWatch => self.show_watch(number, descriptor),
            Request::Wake(handle) => {
                self.activate(handle);
                return Outcome::Nothing;
            }
            Request::Interrupt => return Outcome::Nothing,
            Request::Call(handle, _) if !self.knows(number, handle) => Err(Errno::EBADF),
            Request::Call(handle, call) => match call {
                Call::Send(call) => return self.send(number, handle, &call),
                Call::Flush(limit) => return self.flush(number, handle, limit),
                Call::Receive { flags, control_room, room } => {
                    self.receive(handle, flags, control_room, room)
                }
                _ => self.short(number, handle, call),
            },
        };
        Outcome::Answer(result.unwrap_or_else(Answer::error))
    }

    /// Tells whether a channel may name a socket.
    fn knows(&self, number: ChannelId, handle: SocketHandle) -> bool {
        self.known.get(&number).is_some_and(|known| known.contains(&handle))
    }

    /// The answer to a greeting.
    pub(crate) fn hello(&self, number: ChannelId) -> Answer<O::Given> {
        let nonce =
            self.channels.get(&number).map_or_else(Default::default, |channel| channel.nonce);
        let greeting = Greeting { nonce, namespace: self.namespace };
        let (node, owner) = (self.number, number.owner());
        let reply = Reply::Welcome { node, owner, features: Features::OWN };
        Answer { bytes: greeting.emit().to_vec(), ..Answer::of(reply) }
    }

    /// A handle for a new socket, which nobody guesses: whoever knows it may tell the node to look.
    fn new_handle(&self) -> SocketHandle {
        loop {
            // The library has room for so many bits.
            let handle = SocketHandle(self.outside.random() >> 17);
            if handle.0 != 0 && !self.sockets.contains_key(&handle) {
                return handle;
            }
        }
    }

    /// A new socket; the program gets the other end.
    fn open(
        &mut self,
        number: ChannelId,
        kind: i32,
        protocol: i32,
    ) -> Result<Answer<O::Given>, Errno> {
        if kind != SOCK_SEQPACKET || protocol != 0 {
            return Err(Errno::ESOCKTNOSUPPORT);
        }
        let (id, charge) = self.socket_for(number)?;
        let Opened { end, cookie, inode, memory, given } = match self.outside.open() {
            Ok(opened) => opened,
            Err(errno) => {
                self.rds.close(id);
                self.accounts.close_socket(&charge);
                return Err(errno);
            }
        };
        let handle = self.new_handle();
        if let Some(process) = self.channels.get(&number).map(|channel| channel.caller.process) {
            self.rds.with_core(|core, _| core.set_owner(id, process.cast_unsigned(), inode));
        }
        let end = end.owned_by(Some(charge.user));
        let rings = Rings::new(memory, self.outside.random());
        let socket = HostSocket::new(id, end, cookie, rings, charge);
        if let Err((errno, charge)) = self.add_socket(handle, socket) {
            self.rds.close(id);
            self.accounts.close_socket(&charge);
            return Err(errno);
        }
        self.known.entry(number).or_default().insert(handle);
        self.refresh(handle);
        Ok(Answer { descriptors: given, ..Answer::of(Reply::Socket(handle)) })
    }

    /// A program shows a descriptor of a socket that another process may have opened.
    fn attach(
        &mut self,
        number: ChannelId,
        descriptor: Option<O::Descriptor>,
    ) -> Result<Answer<O::Given>, Errno> {
        let descriptor = descriptor.ok_or(Errno::EBADF)?;
        let cookie = descriptor.cookie().map_err(|_| Errno::ENOTSOCK)?;
        let handle = *self.by_cookie.get(&cookie).ok_or(Errno::ENOTSOCK)?;
        let (socket, _) = self.sockets.get(&handle).ok_or(Errno::ENOTSOCK)?;
        let memory = socket.rings.memory().share()?;
        self.known.entry(number).or_default().insert(handle);
        Ok(Answer { descriptors: vec![memory], ..Answer::of(Reply::Socket(handle)) })
    }

    /// Requests that never wait.
    fn short(
        &mut self,
        number: ChannelId,
        handle: SocketHandle,
        call: Call<'_>,
    ) -> Result<Answer<O::Given>, Errno> {
        // What was sent before comes first.
        self.drain(handle);
        let (socket, _) = self.sockets.get_mut(&handle).ok_or(Errno::EBADF)?;
        let id = socket.id;
        let rds = |error: bowline_rds::Error| error.errno();
        match call {
            Call::Bind(name) => {
                let name = names::to_bind_or_send(name)?;
                match self.bind(number, id, name) {
                    Err(Errno::EADDRINUSE) if self.close_ended(name) => {
                        self.bind(number, id, name)?;
                    }
                    done => done?,
                }
            }
            Call::Connect(name) => {
                let name = names::to_connect(name)?;
                socket.rings.allow_nothing();
                self.rds.with_core(|core, _| core.connect(id, name)).map_err(rds)?;
            }
            Call::LocalName => {
                let (name, peer) = self
                    .rds
                    .with_core(|core, _| {
                        core.local_addr(id).map(|name| (name, core.peer_addr(id).ok()))
                    })
                    .map_err(rds)?;
                let name = name.map_or_else(|| names::unnamed(peer), names::bytes);
                return Ok(Answer { name, ..Answer::done() });
            }
            Call::PeerName => {
                let name = self.rds.with_core(|core, _| core.peer_addr(id)).map_err(rds)?;
                return Ok(Answer { name: names::bytes(name), ..Answer::done() });
            }
            Call::SetOption { level, option, value, may_write } => {
                if level == SOL_RDS
                    && let Some(done) =
                        self.set_memory_option((number, id), option, value, may_write)
                {
                    return Ok(done.unwrap_or_else(Answer::from));
                }
                let largest = self.largest_buffers(option);
                let caller = self.channels.get(&number).map(|channel| channel.caller.user);
                let (socket, _) = self.sockets.get_mut(&handle).ok_or(Errno::EBADF)?;
                let options = &mut socket.options;
                let quota = self.accounts.most(&socket.charge);
                // Of root's programs the library has asked the kernel which of them may.
                let most = Most { quota, largest, forces: caller == Some(0) };
                let (name, value) = ((level, option), (value, &most));
                self.rds.with_core(|core, now| options.set(core, now, id, name, value))?;
                // A smaller buffer may be full of what programs were lent for a larger one.
                socket.rings.renew_notice(&self.rds, id);
                self.count_buffers(handle);
                self.activate(handle);
                self.refresh(handle);
            }
            Call::GetOption { level, option, room } => {
                let name = (level, option);
                let value = match self.table(number, name) {
                    Some(table) => Value::table(table?, room),
                    None => {
                        let (socket, _) = self.sockets.get(&handle).ok_or(Errno::EBADF)?;
                        let options = &socket.options;
                        self.rds.with_core(|core, _| options.get(core, id, name, room))?
                    }
                };
                return Ok(value.into());
            }
            Call::CancelAll => {
                self.rds.with_core(|core, now| core.cancel_all(now, id)).map_err(rds)?;
            }
            Call::Ioctl { request, byte } => {
                let has_had_route = socket.has_had_route;
                return self.ioctl(id, has_had_route, request, byte);
            }
            Call::Send(_) | Call::Receive { .. } | Call::Flush(_) => return Err(Errno::EINVAL),
        }
        Ok(Answer::done())
    }

    /// Largest buffers that sockets get for the asking, if an option is about one. A node may have
    /// larger ones from the start.
    fn largest_buffers(&self, option: i32) -> (usize, usize) {
        if ![SO_SNDBUF, SO_RCVBUF].contains(&option) {
            return (0, 0);
        }
        let largest = self.outside.largest_buffers();
        let own = self.rds.with_core(|core, _| core.default_buffers());
        (largest.0.max(own.0), largest.1.max(own.1))
    }

    /// Closes a socket at an address whose last descriptor was closed before this request was made:
    /// the system reports both in any order. Returns whether there was one.
    fn close_ended(&mut self, name: SocketAddr) -> bool {
        let is_there = |socket: &HostSocket<O>| {
            let own = self.rds.with_core(|core, _| core.local_addr(socket.id));
            own == Ok(Some(name)) && socket.has_ended()
        };
        let ended = self.sockets.iter().find(|(_, (socket, _))| is_there(socket));
        let Some(handle) = ended.map(|(handle, _)| *handle) else { return false };
        self.drain(handle);
        self.close(handle);
        true
    }

    /// The type of service: over RDMA each has connections of its own [IB-4]; over TCP everything
    /// is 0.
    fn ioctl(
        &self,
        id: SocketId,
        has_had_route: bool,
        request: i32,
        given: Option<u8>,
    ) -> Result<Answer<O::Given>, Errno> {
        let transport = self.rds.with_core(|core, _| core.transport(id));
        let transport = transport.map_err(|e| e.errno())?;
        let has_tos = matches!(transport, Some(Transport::Tcp | Transport::Ib));
        match request {
            SIOCRDSSETTOS if has_tos && has_had_route => Err(Errno::EINVAL),
            SIOCRDSSETTOS if transport == Some(Transport::Ib) => {
                let tos = given.ok_or(Errno::EFAULT)?;
                self.rds.with_core(|core, _| core.set_tos(id, tos)).map_err(|e| e.errno())?;
                Ok(Answer::done())
            }
            SIOCRDSSETTOS if has_tos => Ok(Answer::done()),
            SIOCRDSGETTOS => {
                let tos = self.rds.with_core(|core, _| core.tos(id)).map_err(|e| e.errno())?;
                Ok(Answer { bytes: vec![tos], ..Answer::done() })
            }
            _ => Err(Errno::ENOTTY),
        }
    }

    /// Tells whether a message to `name` has a sender's and a receiver's address.
    fn has_both_names(&self, handle: SocketHandle, name: Option<SocketAddr>) -> bool {
        let Some((socket, _)) = self.sockets.get(&handle) else { return true };
        let id = socket.id;
        self.rds.with_core(|core, _| {
            core.local_addr(id).is_ok_and(|own| own.is_some())
                && (name.is_some() || core.peer_addr(id).is_ok())
        })
    }

    fn send(
        &mut self,
        number: ChannelId,
        handle: SocketHandle,
        call: &SendCall<'_>,
    ) -> Outcome<O::Given> {
        let SendCall { flags, may_write, .. } = *call;
        let may_wait = flags & MSG_DONTWAIT == 0;
        let known = MSG_DONTWAIT | MSG_ZEROCOPY;
        let name = || {
            if flags & !known != 0 {
                return Err(Errno::EOPNOTSUPP);
            }
            let given = !call.name.is_empty();
            given.then(|| names::to_bind_or_send(call.name)).transpose()
        };
        let name = match name() {
            Ok(name) => name,
            Err(errno) => return Outcome::Answer(Answer::error(errno)),
        };
        let given = match control::parse(call.control) {
            Ok(given) => given,
            // Control messages are looked at after both names.
            Err(_) if !self.has_both_names(handle, name) => {
                return Outcome::Answer(Answer::error(Errno::ENOTCONN));
            }
            Err(Malformed { has_route }) => {
                if let Some((socket, _)) = self.sockets.get_mut(&handle) {
                    socket.has_had_route |= has_route;
                }
                return Outcome::Answer(Answer::error(Errno::EINVAL));
            }
        };
        // What was sent before comes first.
        self.drain(handle);
        let Some((socket, _)) = self.sockets.get(&handle) else {
            return Outcome::Answer(Answer::error(Errno::EBADF));
        };
        let id = socket.id;
        // They wait for room, as this one has to.
        let comes_first = socket.rings.has_no_sends();
        let asked = if comes_first {
            self.translate_control((number, id), name, &given, may_write)
        } else {
            Ok(Asked::default())
        };
        let asked = match asked {
            Ok(asked) => asked,
            Err(refusal) => {
                // The program asks again once it has shown its memory.
                let is_late = !matches!(refusal, Refusal::MemoryNeeded)
                    && self.has_both_names(handle, name)
                    && rdma::check_together(&given).is_ok();
                if let Some((socket, _)) = self.sockets.get_mut(&handle) {
                    socket.has_had_route |= is_late;
                }
                return Outcome::Answer(refusal.into());
            }
        };
        let Some((socket, waker)) = self.sockets.get_mut(&handle) else {
            return Outcome::Answer(Answer::error(Errno::EBADF));
        };
        let payload = [std::io::IoSlice::new(call.payload)];
        let message = SendMsg {
            name,
            payload: &payload,
            control: &asked.control,
            rdma: &asked.ops,
            zerocopy: flags & MSG_ZEROCOPY != 0,
            blocking: may_wait,
            ..SendMsg::default()
        };
        let cx = Context::from_waker(waker);
        let sent = if !comes_first {
            socket.retry = true; // the next round looks whether there is some
            if may_wait {
                Poll::Pending
            } else {
                Poll::Ready(Err(bowline_rds::Error::QueueFull.into()))
            }
        } else if may_wait {
            self.rds.poll_send(socket.id, &message, &cx)
        } else {
            Poll::Ready(self.rds.send(socket.id, &message))
        };
        // The first message to a destination comes here, and not by the ring.
        if !socket.has_had_route {
            socket.has_had_route = !matches!(sent, Poll::Ready(Err(_)))
                || self.rds.with_core(|core, _| core.has_had_route(id));
        }
        if !matches!(sent, Poll::Ready(Ok(_))) {
            asked.forget(&self.rds, id);
        }
        let Poll::Ready(sent) = sent else {
            let deadline = socket.options.send_timeout.map(|limit| self.outside.now() + limit);
            return self.wait_as_sender(number, handle, deadline);
        };
        let fill = self.rds.poll_ready(socket.id, Interest::WRITE, &cx).is_pending();
        if fill {
            socket.rings.renew_credit(&self.rds, socket.id);
        } else if sent.is_ok() && given.is_empty() && flags & MSG_ZEROCOPY == 0 {
            socket.rings.allow(&self.rds, socket.id, call.name, name);
        }
        let reply = match sent {
            Ok(len) => Reply::Sent { len, fill },
            Err(error) => Reply::Failed { errno: error.errno().0, fill, needed: 0 },
        };
        self.activate(handle);
        Outcome::Answer(Answer::of(reply))
    }

    /// The request waits until messages of the socket are acknowledged. One that waits already
    /// keeps its deadline.
    fn wait_as_sender(
        &mut self,
        number: ChannelId,
        handle: SocketHandle,
        deadline: Option<Instant>,
    ) -> Outcome<O::Given> {
        if let Some((socket, _)) = self.sockets.get_mut(&handle)
            && !socket.senders.contains(&number)
        {
            socket.senders.push_back(number);
        }
        let before = self.channels.get(&number).and_then(|channel| channel.waiting);
        Outcome::Wait(before.unwrap_or(Waiting { handle, deadline }))
    }

    /// Waits until everything is acknowledged.
    fn flush(
        &mut self,
        number: ChannelId,
        handle: SocketHandle,
        limit: Option<Duration>,
    ) -> Outcome<O::Given> {
        // What was sent before comes first.
        self.drain(handle);
        let Some((socket, waker)) = self.sockets.get_mut(&handle) else {
            return Outcome::Answer(Answer::error(Errno::EBADF));
        };
        let flushed = if socket.rings.has_no_sends() {
            self.rds.poll_flush(socket.id, &Context::from_waker(waker))
        } else {
            Poll::Pending
        };
        match flushed {
            Poll::Ready(Ok(())) => Outcome::Answer(Answer::done()),
            Poll::Ready(Err(error)) => Outcome::Answer(Answer::error(error.errno())),
            Poll::Pending => {
                let deadline = limit.map(|limit| self.outside.now() + limit);
                self.activate(handle);
                self.wait_as_sender(number, handle, deadline)
            }
        }
    }

    /// Receives what does not go through the ring.
    fn receive(
        &mut self,
        handle: SocketHandle,
        flags: i32,
        control_room: usize,
        room: usize,
    ) -> Result<Answer<O::Given>, Errno> {
        if flags & MSG_OOB != 0 {
            return Ok(Answer::of(Reply::Received { len: 0, flags: 0 }));
        }
        if flags & MSG_ERRQUEUE != 0 {
            return Err(Errno::EAGAIN);
        }
        self.turn(handle);
        let (socket, waker) = self.sockets.get_mut(&handle).ok_or(Errno::EBADF)?;
        let needed = if socket.options.zerocopy { COMPLETION_ROOM } else { SMALL_CONTROL };
        let id = socket.id;
        // The ends of operations come alone, and cut where there is too little room [RDMA-25].
        let has_status = control_room > 0 && self.rds.with_core(|core, _| core.has_status(id));
        let want_control = control_room >= needed || has_status;
        // What is in the ring comes first, but for notifications.
        let notified = want_control && self.rds.with_core(|core, _| core.has_notification(id));
        if socket.rings.has_in_ring() && !notified {
            return Err(Errno::EAGAIN);
        }
        let statuses_max = (control_room / STATUS_ROOM).max(1);
        let opts = RecvOpts { peek: flags & MSG_PEEK != 0, want_control, statuses_max };
        let received = match self.rds.poll_recv(id, opts, &Context::from_waker(waker)) {
            Poll::Ready(received) => received.map_err(|error| error.errno())?,
            Poll::Pending => return Err(Errno::EAGAIN),
        };
        let len = received.data.as_ref().map_or(0, Rope::len);
        let mut control = Room::new(control_room);
        for one in &received.control {
            control.put_control(one, |at| self.rds.wall_clock(at));
        }
        let (control, mut flags) = control.finish();
        if len > room {
            flags |= MSG_TRUNC;
        }
        let name = received.source.map(names::bytes).unwrap_or_default();
        let message = received.data.map(|data| (data, room));
        let reply = Reply::Received { len, flags };
        let answer = Answer { name, control, message, ..Answer::of(reply) };
        // Messages queued behind this one may fit into the ring.
        self.turn(handle);
        Ok(answer)
    }
}
