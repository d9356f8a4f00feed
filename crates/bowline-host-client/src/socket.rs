//! Calls on an RDS socket: their requests to the node, and their results from the replies.

use core::ffi::c_int;
use core::marker::PhantomData;
use core::ptr;
use core::time::Duration;

use bowline_host_wire::{
    Area, CONTROL_MAX, Call, FILL_MAX, Lengths, NAME_MAX, Piece, Place, ProgramEnd, Pushed, Reply,
    Request, SendCall, SocketHandle, WAKE_TOKEN_LEN, name,
};

use crate::agent::{self, Given};
use crate::channel::{Channel, Descriptors};
use crate::guarded;
use crate::node::Node;
use crate::reach::{self, Reach};
use crate::system;
use crate::trust;

/// SO_RCVTIMEO, in both of its forms.
const RECEIVE_TIMEOUT: [c_int; 2] = [20, 66];
/// Options of SOL_SOCKET that the system has for sockets of any kind, and that an RDS socket makes
/// nothing of: the descriptor itself keeps them. An option that changes what comes on the
/// descriptor, as a filter does, is not among them.
const GENERIC_OPTIONS: [c_int; 18] = [
    libc::SO_BSDCOMPAT,
    libc::SO_SNDLOWAT,
    libc::SO_BINDTODEVICE,
    libc::SO_LOCK_FILTER,
    libc::SO_RXQ_OVFL,
    libc::SO_WIFI_STATUS,
    libc::SO_NOFCS,
    libc::SO_SELECT_ERR_QUEUE,
    libc::SO_BUSY_POLL,
    libc::SO_MAX_PACING_RATE,
    libc::SO_BPF_EXTENSIONS,
    libc::SO_INCOMING_CPU,
    libc::SO_INCOMING_NAPI_ID,
    libc::SO_TXTIME,
    libc::SO_BINDTOIFINDEX,
    libc::SO_TIMESTAMPING,
    SO_PREFER_BUSY_POLL,
    SO_BUSY_POLL_BUDGET,
];
/// Options of SOL_SOCKET that the kernel lets some processes set; the node, root's of these.
const FORCED_BUFFERS: [c_int; 2] = [libc::SO_SNDBUFFORCE, libc::SO_RCVBUFFORCE];
const SO_PREFER_BUSY_POLL: c_int = 69;
const SO_BUSY_POLL_BUDGET: c_int = 70;

/// Longest value of such an option that is asked for, bytes.
const VALUE_MAX: usize = 256;

fn is_generic(level: c_int, name: c_int) -> bool {
    level == libc::SOL_SOCKET && GENERIC_OPTIONS.contains(&name)
}

/// An RDS socket of this process.
#[derive(Debug)]
pub struct Socket<'a, D: Descriptors> {
    /// Descriptor of the socket.
    pub fd: c_int,
    /// The node that serves the socket.
    pub node: &'a Node<D>,
    /// The node's handle of the socket.
    pub handle: SocketHandle,
}

/// A call with all its parameters.
#[derive(Clone, Copy)]
struct Asked<'a> {
    call: Call<'a>,
    /// A message that follows the request.
    pieces: &'a [libc::iovec],
    may_wait: bool,
    /// Memory of this process that the call refers to.
    memory: Option<&'a Reach>,
    /// The socket's own, of a call after which it may be full.
    area: Option<&'a Area>,
}

impl<'a> Asked<'a> {
    /// A call that never waits.
    const fn of(call: Call<'a>) -> Self {
        Self { call, pieces: &[], may_wait: false, memory: None, area: None }
    }
}

/// A received message or notification.
#[derive(Debug)]
pub struct Message {
    /// Return value of the call.
    pub len: usize,
    /// Flags of the message, as `recvmsg` has them.
    pub flags: c_int,
    /// Name of the sender; empty for a notification.
    pub name: Vec<u8>,
    /// Control messages.
    pub control: Vec<u8>,
}

/// Where the payload of a message goes.
pub trait To {
    /// Room in bytes.
    fn room(&self) -> usize;
    /// Copies a payload of `len` bytes, which fit, out of a ring; tells whether it could. The last
    /// of several copies counts.
    fn copy(&mut self, area: &Area, place: Place, len: usize) -> bool;
    /// Memory for a payload of `len` bytes, as far as they fit. The caller writes to it before it
    /// calls anything else here.
    fn pieces(&mut self, len: usize) -> Vec<libc::iovec>;
}

/// Pieces of memory that a payload goes to.
#[derive(Debug)]
pub struct Pieces<'a> {
    pieces: *const libc::iovec,
    count: usize,
    memory: PhantomData<&'a mut [u8]>,
}

impl Pieces<'_> {
    /// Memory of a program.
    ///
    /// # Safety
    /// For as long as this is there, the pieces are readable, and what they point at is writable.
    pub const unsafe fn new(pieces: &[libc::iovec]) -> Self {
        Self { pieces: pieces.as_ptr(), count: pieces.len(), memory: PhantomData }
    }

    fn all(&self) -> &[libc::iovec] {
        // SAFETY: readable, as `new` was promised.
        unsafe { core::slice::from_raw_parts(self.pieces, self.count) }
    }
}

impl To for Pieces<'_> {
    fn room(&self) -> usize {
        self.all().iter().map(|piece| piece.iov_len).fold(0, usize::saturating_add)
    }

    fn copy(&mut self, area: &Area, mut place: Place, mut len: usize) -> bool {
        self.all().iter().all(|piece| {
            let n = piece.iov_len.min(len);
            let from = area.bytes_at(place, n);
            place = place.skip(n);
            len -= n;
            // SAFETY: writable, as `new` was promised.
            unsafe { guarded::copy(piece.iov_base.cast(), from, n) }
        })
    }

    fn pieces(&mut self, _len: usize) -> Vec<libc::iovec> {
        self.all().to_vec()
    }
}

/// A whole message of any length.
impl To for Vec<u8> {
    fn room(&self) -> usize {
        usize::MAX
    }

    fn copy(&mut self, area: &Area, place: Place, len: usize) -> bool {
        self.resize(len, 0);
        area.copy_out(place, self);
        true
    }

    fn pieces(&mut self, len: usize) -> Vec<libc::iovec> {
        self.resize(len, 0);
        vec![libc::iovec { iov_base: self.as_mut_ptr().cast(), iov_len: len }]
    }
}

impl<D: Descriptors> ProgramEnd for Socket<'_, D> {
    type Error = c_int;

    fn take_token(&self, waits: bool) -> Result<[u8; WAKE_TOKEN_LEN], c_int> {
        let mut token = [0; WAKE_TOKEN_LEN];
        match system::recv(self.fd, &mut token, if waits { 0 } else { libc::MSG_DONTWAIT }) {
            Ok(WAKE_TOKEN_LEN) => Ok(token),
            // The node has closed its end, which may have had unread tokens.
            Ok(_) | Err(libc::ECONNRESET) => Err(libc::ENETDOWN),
            Err(errno) => Err(errno),
        }
    }

    fn wake_node(&self) {
        // A node that is gone is noticed by the next call.
        let _ = self.wake();
    }
}

impl<D: Descriptors> Socket<'_, D> {
    /// A channel for a request. A request about memory of this process needs a channel over which
    /// the node was given that memory; it was made through this socket, so that no other process
    /// gets it.
    fn channel_for(&self, asked: &Asked<'_>) -> Result<Channel<D>, c_int> {
        let Some(reach) = asked.memory else {
            return self.node.channel(self.fd);
        };
        if let Some(channel) = self.node.idle_channel_that_has_shown() {
            return Ok(channel);
        }
        let maker = trust::maker(self.fd).ok_or(libc::EBADF)?;
        let (mut channel, welcome) = self.node.new_channel(self.fd)?;
        let greeter = welcome.greeter;
        // Both are checked: whoever made the pair may have given its other end away.
        let shown = if [maker, greeter].iter().all(|one| trust::may_have_memory(one.user)) {
            let memory = system::open_memory()?;
            let shown = channel.show_memory(&welcome, memory);
            system::close(memory);
            shown.and_then(|()| channel.show_watch(&welcome))
        } else {
            match self.give(trust::number_of(greeter), reach) {
                // The node says so, unless something else is wrong with the request.
                Err(libc::EOPNOTSUPP) => return Ok(channel),
                given => channel.show_given(given?),
            }
        };
        match shown {
            Err(libc::ENETDOWN) => Err(libc::ENETDOWN),
            // A node that refuses it also refuses the request.
            _ => Ok(channel),
        }
    }

    /// Gives a node the memory of a request.
    fn give(&self, node: u64, reach: &Reach) -> Result<Given, c_int> {
        let socket = agent::socket_of(self.fd).ok_or(libc::EBADF)?;
        let given = agent::give::<D>(node, socket, reach)?;
        // Another thread has closed the socket, perhaps before the memory was given.
        let is_open = agent::socket_of(self.fd) == Some(socket);
        if is_open { Ok(given) } else { Err(libc::EBADF) }
    }

    /// Withdraws the region with a key from a node that uses it through the agent.
    fn free_memory(&self, cookie: u64) {
        if let Some(socket) = agent::socket_of(self.fd) {
            agent::take_back(socket, Some(cookie));
        }
    }

    /// Sends a request; returns the channel, from which the rest of the reply must be read. A
    /// channel that is new to the socket is attached first.
    fn ask(&self, asked: &Asked<'_>) -> Result<(Channel<D>, Reply, Lengths), c_int> {
        let mut handle = self.handle;
        let mut is_known = false;
        loop {
            let mut channel = self.channel_for(asked)?;
            if is_known {
                match channel.attach(self.fd) {
                    Ok((known, memory)) => {
                        system::close(memory); // it is mapped
                        handle = known;
                    }
                    Err(libc::ENOTSOCK) => {
                        // The node has closed a socket that it does not know any more.
                        self.node.keep(channel);
                        return Err(libc::EIO);
                    }
                    Err(errno) => return Err(errno),
                }
            }
            channel.send(&Request::Call(handle, asked.call), asked.pieces, None)?;
            let mut may_wait = asked.may_wait;
            if may_wait {
                let is_interrupted;
                (channel, is_interrupted) = channel.wait_long()?;
                may_wait = !is_interrupted;
            }
            let (reply, lengths) = channel.reply(may_wait)?;
            if reply.errno() == Some(libc::EBADF) && !is_known {
                channel.skip(lengths)?;
                self.node.keep(channel);
                is_known = true;
                continue;
            }
            match reply {
                // The reply has the length that is needed, and the value as far as it fits.
                Reply::Failed { needed, .. } if needed != 0 => {}
                Reply::Failed { errno, fill, .. } => {
                    channel.skip(lengths)?;
                    self.node.keep(channel);
                    if let Some(area) = asked.area.filter(|_| fill) {
                        self.fill(area);
                    }
                    return Err(errno);
                }
                _ => {}
            }
            return Ok((channel, reply, lengths));
        }
    }

    /// Sends a request and returns the numbers of its reply only. Without a whole reply the call
    /// has failed: the node then keeps none of the memory given for it.
    fn call(&self, asked: &Asked<'_>) -> Result<Reply, c_int> {
        let (mut channel, reply, lengths) = self.ask(asked)?;
        channel.skip(lengths)?;
        channel.accept();
        self.node.keep(channel);
        Ok(reply)
    }

    /// Makes the socket unwritable on the node's request, since only the holder of the descriptor
    /// can do that.
    fn fill(&self, area: &Area) {
        for _ in 0..FILL_MAX {
            if !system::is_writable(self.fd) {
                return;
            }
            let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
            if system::send(self.fd, &area.fill_token(), flags).is_err() {
                return;
            }
        }
    }

    /// Wakes the node: the memory of this socket has changed.
    fn wake(&self) -> Result<(), c_int> {
        let mut channel = self.node.channel(self.fd)?;
        channel.wake(self.handle)?;
        self.node.keep(channel);
        Ok(())
    }

    /// Calls that never wait; returns name and payload of the reply as well.
    fn short(&self, call: Call<'_>) -> Result<(Reply, Vec<u8>, Vec<u8>), c_int> {
        let (mut channel, reply, lengths) = self.ask(&Asked::of(call))?;
        let name = channel.take_bytes(lengths.name)?;
        channel.take(lengths.control, Vec::new())?;
        let payload = channel.take_bytes(lengths.payload)?;
        self.node.keep(channel);
        if !name.is_empty() && !name::is_given(&name) {
            return Err(libc::EPROTO);
        }
        Ok((reply, name, payload))
    }

    /// `bind(2)`.
    ///
    /// # Errors
    /// The node's error, here and below; ENETDOWN when the node has ended.
    pub fn bind(&self, name: &[u8]) -> Result<c_int, c_int> {
        self.short(Call::Bind(name)).map(|_| 0)
    }

    /// `connect(2)`.
    ///
    /// # Errors
    /// As [`bind`](Self::bind).
    pub fn connect(&self, name: &[u8]) -> Result<c_int, c_int> {
        self.short(Call::Connect(name)).map(|_| 0)
    }

    /// `getsockname(2)`, or `getpeername(2)`.
    ///
    /// # Errors
    /// As [`bind`](Self::bind).
    pub fn name(&self, peer: bool) -> Result<Vec<u8>, c_int> {
        let (_, name, _) = self.short(if peer { Call::PeerName } else { Call::LocalName })?;
        if name.is_empty() { Err(libc::EPROTO) } else { Ok(name) }
    }

    /// `setsockopt(2)`.
    ///
    /// # Errors
    /// As [`bind`](Self::bind).
    pub fn set_option(&self, level: c_int, name: c_int, value: &[u8]) -> Result<c_int, c_int> {
        if is_generic(level, name) {
            return system::set_any_option(self.fd, (level, name), value).map(|()| 0);
        }
        let forces = level == libc::SOL_SOCKET && FORCED_BUFFERS.contains(&name);
        if forces && value.len() >= size_of::<c_int>() && !system::may(name, value)? {
            return Err(libc::EPERM);
        }
        let reach = Reach::for_option(level, name, value);
        let may_write = reach.as_ref().is_none_or(Reach::is_writable);
        if let Some(cookie) = reach::freed(level, name, value) {
            self.free_memory(cookie);
        }
        let call = Call::SetOption { level, option: name, value, may_write };
        self.call(&Asked { memory: reach.as_ref(), ..Asked::of(call) })?;
        // Blocking is a property of the descriptor.
        if level == libc::SOL_SOCKET && RECEIVE_TIMEOUT.contains(&name) {
            system::set_receive_timeout(self.fd, name, value);
        }
        Ok(0)
    }

    /// `getsockopt(2)`. Returns the value, `optlen` to return, and what the call returns: that
    /// may be an error number along with a length.
    ///
    /// # Errors
    /// As [`bind`](Self::bind).
    pub fn get_option(
        &self,
        level: c_int,
        name: c_int,
        room: usize,
    ) -> Result<(Vec<u8>, c_int, c_int), c_int> {
        if is_generic(level, name) {
            let mut value = vec![0; room.min(VALUE_MAX)];
            let len = system::get_any_option(self.fd, (level, name), &mut value)?;
            value.truncate(len);
            return Ok((value, len as c_int, 0));
        }
        let (reply, _, value) = self.short(Call::GetOption { level, option: name, room })?;
        // Only an error reports a length beyond the room.
        let (returned, len, most) = match reply {
            Reply::Value { returned, len } => (returned, len, room),
            Reply::Failed { errno, needed, .. } => (-errno, needed, usize::MAX),
            _ => return Err(libc::EPROTO),
        };
        let optlen = usize::try_from(len).unwrap_or(0).min(most);
        Ok((value, c_int::try_from(optlen).unwrap_or(c_int::MAX), returned))
    }

    /// `ioctl(2)` of a byte.
    ///
    /// # Errors
    /// As [`bind`](Self::bind).
    pub fn ioctl(&self, request: c_int, byte: u8) -> Result<Option<u8>, c_int> {
        let (_, _, value) = self.short(Call::Ioctl { request, byte: Some(byte) })?;
        Ok(value.first().copied())
    }

    /// Tells whether a call with these flags may not wait.
    pub fn is_nonblocking(&self, flags: c_int) -> bool {
        flags & libc::MSG_DONTWAIT != 0
            || system::flags(self.fd).is_ok_and(|flags| flags & libc::O_NONBLOCK != 0)
    }

    /// `sendmsg(2)`.
    ///
    /// # Safety
    /// What the pieces of the payload point at is readable.
    ///
    /// # Errors
    /// As [`bind`](Self::bind); EINTR when a signal has ended the wait.
    pub unsafe fn send(
        &self,
        area: &Area,
        flags: c_int,
        name: &[u8],
        control: &[u8],
        payload: &[libc::iovec],
    ) -> Result<usize, c_int> {
        // SAFETY: as the caller promises.
        let push = || unsafe { self.push(area, name, payload) };
        if flags & !libc::MSG_DONTWAIT == 0 && control.is_empty() && push()? {
            let len = payload.iter().map(|piece| piece.iov_len).sum();
            return Ok(len);
        }
        if name.len() > NAME_MAX || control.len() > CONTROL_MAX {
            return Err(if name.len() > NAME_MAX { libc::EINVAL } else { libc::ENOBUFS });
        }
        let may_wait = !self.is_nonblocking(flags);
        let flags = if may_wait { flags } else { flags | libc::MSG_DONTWAIT };
        let reach = Reach::for_control(control);
        let may_write = reach.as_ref().is_none_or(Reach::is_writable);
        // The message is in pieces.
        let call = Call::Send(SendCall { flags, may_write, name, control, payload: &[] });
        let (memory, area) = (reach.as_ref(), Some(area));
        let asked = Asked { call, pieces: payload, may_wait, memory, area };
        let Reply::Sent { len: sent, fill } = self.call(&asked)? else {
            return Err(libc::EPROTO);
        };
        if let Some(area) = area.filter(|_| fill) {
            self.fill(area);
        }
        let len = payload.iter().map(|piece| piece.iov_len).fold(0, usize::saturating_add);
        Ok(sent.min(len))
    }

    /// Pushes a message to the ring of sends. Returns `false` if it needs a request instead.
    ///
    /// # Safety
    /// As for [`send`](Self::send).
    unsafe fn push(
        &self,
        area: &Area,
        name: &[u8],
        payload: &[libc::iovec],
    ) -> Result<bool, c_int> {
        const PIECES: usize = 8;
        // For memory that does not exist the kernel says EFAULT.
        let is_nothing = |piece: &libc::iovec| piece.iov_base.is_null() && piece.iov_len > 0;
        if payload.len() > PIECES || payload.iter().any(is_nothing) {
            return Ok(false);
        }
        let mut pieces = [Piece { base: ptr::null(), len: 0 }; PIECES];
        for (piece, given) in pieces.iter_mut().zip(payload) {
            *piece = Piece { base: given.iov_base.cast(), len: given.iov_len };
        }
        let mut channel = self.node.channel(self.fd)?;
        let copy = |place: Place, piece: &Piece| {
            let to = area.bytes_at(place, piece.len);
            // SAFETY: the caller's pieces, who promises that they are readable.
            unsafe { guarded::copy(to, piece.base, piece.len) }
        };
        let pushed = area.push_with(channel.owner(), name, &pieces[..payload.len()], copy);
        if pushed == Some(Pushed::Wake) {
            channel.wake(self.handle)?;
        }
        self.node.keep(channel);
        pushed.map(|pushed| pushed != Pushed::Ask).ok_or(libc::EFAULT)
    }

    /// `recvmsg(2)` into `to`. `token` is a wake token for which the caller has waited; the node
    /// does not know yet that it is taken.
    ///
    /// # Errors
    /// EAGAIN when there is nothing and the call may not wait; ETIMEDOUT after the socket's time
    /// limit; EINTR when a signal has ended the wait; EIO for memory that is invalid; ENETDOWN when
    /// the node is gone.
    pub fn receive(
        &self,
        area: &Area,
        flags: c_int,
        control_room: usize,
        to: &mut impl To,
        mut token: Option<[u8; WAKE_TOKEN_LEN]>,
    ) -> Result<Message, c_int> {
        let is_special = flags & (libc::MSG_OOB | libc::MSG_ERRQUEUE) != 0;
        // A notification comes before all messages.
        let is_first = control_room > 0 && area.has_more();
        if (is_special || is_first) && area.needs_wake_token(token.take()) {
            self.wake_node();
        }
        if is_special {
            return self.receive_from_node(flags, control_room, to);
        }
        let room = to.room();
        let mut waited = false;
        if is_first {
            match self.receive_from_node(flags, control_room, to) {
                Err(libc::EAGAIN) => {}
                done => {
                    area.received(self);
                    return done;
                }
            }
        }
        loop {
            let mut is_there = true;
            let copy = |place: Place, len: usize| {
                is_there = to.copy(area, place, len.min(room));
                is_there
            };
            let taken = area.take_with(flags & libc::MSG_PEEK != 0, copy);
            // Behind the message: mostly that was all, and the node need not be woken.
            let wants_token = area.needs_wake_token(token.take());
            if wants_token || matches!(&taken, Ok(Some(taken)) if taken.notice) {
                self.wake_node();
            }
            let taken = taken.map_err(|_| libc::EIO)?;
            if !is_there && taken.is_none() {
                return Err(libc::EFAULT);
            }
            if let Some(taken) = taken {
                area.received(self);
                if !name::is_given(&taken.name[..taken.name_len]) {
                    return Err(libc::EIO);
                }
                let cut = if taken.len > room { libc::MSG_TRUNC } else { 0 };
                return Ok(Message {
                    len: if flags & libc::MSG_TRUNC != 0 { taken.len } else { taken.len.min(room) },
                    flags: cut,
                    name: taken.name[..taken.name_len].to_vec(),
                    control: Vec::new(),
                });
            }
            if area.has_more() {
                match self.receive_from_node(flags, control_room, to) {
                    Err(libc::EAGAIN) if area.has_message() || !area.has_more() => continue,
                    // The next message has control messages, for which this call has no room.
                    Err(libc::EAGAIN) if self.is_nonblocking(flags) => return Err(libc::EAGAIN),
                    Err(libc::EAGAIN) if waited => system::pause(),
                    Err(libc::EAGAIN) => {}
                    done => {
                        area.received(self);
                        return done;
                    }
                }
            }
            match self.take_token(flags & libc::MSG_DONTWAIT == 0) {
                Err(libc::EAGAIN) if area.has_message() => {}
                Err(libc::EAGAIN) if !self.is_nonblocking(flags) => return Err(libc::ETIMEDOUT),
                taken => token = Some(taken?),
            }
            waited = true;
        }
    }

    /// Receives by a request instead of the ring, without waiting.
    fn receive_from_node(
        &self,
        flags: c_int,
        control_room: usize,
        to: &mut impl To,
    ) -> Result<Message, c_int> {
        let room = to.room();
        let control_room = control_room.min(CONTROL_MAX);
        let call = Call::Receive { flags, control_room, room };
        let (mut channel, reply, lengths) = self.ask(&Asked::of(call))?;
        let Reply::Received { len: whole, flags: message_flags } = reply else {
            return Err(libc::EPROTO);
        };
        let name = channel.take_bytes(lengths.name)?;
        let control = channel.take_bytes(lengths.control)?;
        channel.take(lengths.payload, to.pieces(lengths.payload))?;
        self.node.keep(channel);
        let has_name = name.is_empty() || name::is_given(&name);
        if !has_name || control.len() > control_room || !reach::is_control_of_rds(&control) {
            return Err(libc::EPROTO);
        }
        let len = if flags & libc::MSG_TRUNC != 0 { whole } else { whole.min(room) };
        Ok(Message { len, flags: message_flags, name, control })
    }

    /// Waits at most `limit` until the descriptor is ready for one of `events` (POLLIN, POLLOUT);
    /// returns the ready ones.
    ///
    /// # Errors
    /// ETIMEDOUT after `limit`; EINTR when a signal has ended the wait; ENETDOWN when the node is
    /// gone.
    pub fn wait(&self, area: &Area, events: i16, limit: Option<Duration>) -> Result<i16, c_int> {
        loop {
            let ready = system::poll(self.fd, events, limit)?;
            if ready & (libc::POLLHUP | libc::POLLERR) != 0 {
                return Err(libc::ENETDOWN);
            }
            let ready = ready & events;
            if ready == 0 {
                return Err(libc::ETIMEDOUT);
            }
            if ready & libc::POLLIN == 0 || !area.has_nothing() {
                return Ok(ready);
            }
            // The wake token is for a message that another thread has received.
            match area.take_wake_token(self, false) {
                Ok(()) | Err(libc::EAGAIN) => {}
                Err(errno) => return Err(errno),
            }
        }
    }

    /// Waits at most `limit` until all messages sent are acknowledged.
    ///
    /// # Errors
    /// ETIMEDOUT after `limit`; EINTR when a signal has ended the wait; ENETDOWN when the node is
    /// gone.
    pub fn flush(&self, limit: Option<Duration>) -> Result<(), c_int> {
        self.call(&Asked { may_wait: true, ..Asked::of(Call::Flush(limit)) }).map(drop)
    }

    /// Cancels all messages sent and not acknowledged.
    ///
    /// # Errors
    /// ENOTCONN when the socket is not bound; ENETDOWN when the node is gone.
    pub fn cancel_all(&self) -> Result<(), c_int> {
        self.short(Call::CancelAll).map(drop)
    }
}
