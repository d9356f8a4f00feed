//! What each call on an RDS socket asks the node, and what it makes of the answer.

use core::ffi::{c_int, c_void};
use core::ptr;

use bowline_attach::{
    Area, CONTROL_MAX, FILL, Head, NAME_MAX, Op, Piece, Place, Posted, TOKEN_LEN,
};

use crate::areas::{self, InUse};
use crate::channel::{self, Answer, Channel, Node, Nodes};
use crate::real;
use crate::table::{self, Rds};

/// Tokens that are sent at most to fill a socket; fewer do.
const FILL_MAX: usize = 16;

const SOCK_SEQPACKET: c_int = 5;
/// SO_RCVTIMEO, in both of its forms.
const RECEIVE_TIMEOUT: [c_int; 2] = [20, 66];

/// `socket(AF_RDS, ..)`.
pub(crate) fn socket(kind: c_int, protocol: c_int) -> Result<c_int, c_int> {
    let flags = kind & !0xf;
    if flags & !(libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK) != 0 {
        return Err(libc::EINVAL);
    }
    if kind & 0xf != SOCK_SEQPACKET || protocol != 0 {
        return Err(libc::ESOCKTNOSUPPORT);
    }
    // A node that was started anew ends the channels of before.
    let (node, answer, [fd, memory]) = match open(protocol) {
        Err(libc::ENETDOWN) => open(protocol)?,
        done => done?,
    };
    if answer.value < 0 {
        return Err(-answer.value as c_int);
    }
    if fd < 0 || memory < 0 {
        [fd, memory].into_iter().filter(|fd| *fd >= 0).for_each(real::close);
        return Err(libc::EMFILE);
    }
    // What another thread may have found out about the number while it was being closed.
    table::forget(fd);
    if let Err(errno) = areas::map(fd, memory) {
        real::close(fd);
        return Err(errno);
    }
    if flags & libc::SOCK_CLOEXEC == 0 {
        real::clear_cloexec(fd);
    }
    if flags & libc::SOCK_NONBLOCK != 0 {
        real::set_flags(fd, real::flags(fd)? | libc::O_NONBLOCK);
    }
    table::set(fd, node, answer.value.cast_unsigned());
    Ok(fd)
}

/// Asks the host's node for a socket; returns that node, its answer, and the descriptors of the
/// socket and of its memory.
fn open(protocol: c_int) -> Result<(&'static Node, Answer, [c_int; 2]), c_int> {
    // As a kernel without the module says, unless there is a node that refuses this user.
    let absent = |errno| if channel::is_refusal(errno) { errno } else { libc::EAFNOSUPPORT };
    let node = Nodes::of_host().map_err(absent)?;
    let mut channel = node.channel().map_err(absent)?;
    let head = Head { op: Op::Open, value: 0, a: SOCK_SEQPACKET, b: protocol };
    let sent = channel.send(head, &[], &[], &[], None);
    let answer = sent.and_then(|()| channel.answer_with_descriptors());
    match answer {
        Ok((answer, descriptors)) => {
            node.keep(channel);
            Ok((node, answer, descriptors))
        }
        Err(errno) => {
            drop(channel);
            node.forget_channels();
            Err(errno)
        }
    }
}

/// A request with all that may go along.
struct Request<'a> {
    head: Head,
    name: &'a [u8],
    control: &'a [u8],
    payload: &'a [libc::iovec],
    may_wait: bool,
}

impl Rds {
    fn head(&self, op: Op, a: c_int, b: c_int) -> Head {
        Head { op, value: self.handle.cast_signed(), a, b }
    }

    /// Asks the node; returns the channel from which the rest of the answer is to be read. A
    /// channel that is new to the node, or to the socket, is made known first.
    fn ask(&self, request: &Request<'_>) -> Result<(Channel, Answer), c_int> {
        let mut is_known = false;
        loop {
            let mut channel = self.node.channel()?;
            let mut head = request.head;
            if is_known {
                let (handle, memory) = channel.attach(self.fd)?;
                real::close(memory); // it is mapped
                head.value = handle.cast_signed();
            }
            channel.send(head, request.name, request.control, request.payload, None)?;
            let answer = channel.answer(request.may_wait)?;
            if answer.value == -i64::from(libc::EBADF) && !is_known {
                self.node.keep(channel);
                is_known = true;
                continue;
            }
            // With an error of GetOption the length that is needed comes along.
            if answer.value < 0 && head.op != Op::GetOption {
                channel.take(answer.name + answer.control + answer.payload, &[])?;
                self.node.keep(channel);
                self.heed(head.op, answer);
                return Err(-answer.value as c_int);
            }
            return Ok((channel, answer));
        }
    }

    /// Makes the socket unwritable if the node asks for that: what the descriptor shows is up to
    /// whoever has it.
    fn heed(&self, op: Op, answer: Answer) {
        if op != Op::Send || answer.b != FILL {
            return;
        }
        for _ in 0..FILL_MAX {
            if !real::is_writable(self.fd) {
                return;
            }
            let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
            if real::send(self.fd, &[0], flags).is_err() {
                return;
            }
        }
    }

    fn area(&self) -> Result<InUse, c_int> {
        areas::of(self.fd).ok_or(libc::EBADF)
    }

    /// Tells the node to look at the memory of this socket.
    fn look(&self) -> Result<(), c_int> {
        let mut channel = self.node.channel()?;
        channel.look(self.handle)?;
        self.node.keep(channel);
        Ok(())
    }

    /// Something was received: if it was the last, the socket is not readable any more.
    fn received(&self, area: &Area) {
        while area.has_token() && area.has_nothing() {
            let mut token = [0; TOKEN_LEN];
            if real::recv(self.fd, &mut token, libc::MSG_DONTWAIT) != Ok(TOKEN_LEN) {
                return;
            }
            self.token_taken(area, token);
        }
    }

    /// A token was taken from the socket. If there is still something to receive, the node is to
    /// send another: others wait for it, and `poll` shows it.
    fn token_taken(&self, area: &Area, token: [u8; TOKEN_LEN]) {
        area.token_taken(u32::from_ne_bytes(token));
        if !area.has_nothing() {
            let _ = self.look();
        }
    }

    /// Requests that never wait; returns value, name and payload of the answer.
    fn short(
        &self,
        head: Head,
        name: &[u8],
        payload: &[u8],
    ) -> Result<(Answer, Vec<u8>, Vec<u8>), c_int> {
        let piece =
            libc::iovec { iov_base: payload.as_ptr().cast_mut().cast(), iov_len: payload.len() };
        let request = Request { head, name, control: &[], payload: &[piece], may_wait: false };
        let (mut channel, answer) = self.ask(&request)?;
        let name = channel.take_bytes(answer.name)?;
        channel.take(answer.control, &[])?;
        let payload = channel.take_bytes(answer.payload)?;
        self.node.keep(channel);
        Ok((answer, name, payload))
    }

    pub(crate) fn bind(&self, name: &[u8]) -> Result<c_int, c_int> {
        self.short(self.head(Op::Bind, 0, 0), name, &[]).map(|_| 0)
    }

    pub(crate) fn connect(&self, name: &[u8]) -> Result<c_int, c_int> {
        self.short(self.head(Op::Connect, 0, 0), name, &[]).map(|_| 0)
    }

    pub(crate) fn name(&self, peer: bool) -> Result<Vec<u8>, c_int> {
        let op = if peer { Op::PeerName } else { Op::LocalName };
        self.short(self.head(op, 0, 0), &[], &[]).map(|(_, name, _)| name)
    }

    pub(crate) fn set_option(
        &self,
        level: c_int,
        name: c_int,
        value: &[u8],
    ) -> Result<c_int, c_int> {
        self.short(self.head(Op::SetOption, level, name), &[], value)?;
        // Waiting is up to the descriptor.
        if level == libc::SOL_SOCKET && RECEIVE_TIMEOUT.contains(&name) {
            real::set_receive_timeout(self.fd, name, value);
        }
        Ok(0)
    }

    /// Returns the value, the length to be told, and what the call returns; or an error number
    /// along with a length.
    pub(crate) fn get_option(
        &self,
        level: c_int,
        name: c_int,
        room: usize,
    ) -> Result<(Vec<u8>, c_int, i64), c_int> {
        let room = (room as u64).to_ne_bytes();
        let (answer, _, value) = self.short(self.head(Op::GetOption, level, name), &[], &room)?;
        if answer.value < 0 && answer.a == 0 {
            return Err(-answer.value as c_int);
        }
        Ok((value, answer.a, answer.value))
    }

    pub(crate) fn ioctl(&self, request: c_int, byte: u8) -> Result<Option<u8>, c_int> {
        let (_, _, value) = self.short(self.head(Op::Ioctl, request, 0), &[], &[byte])?;
        Ok(value.first().copied())
    }

    fn is_nonblocking(&self, flags: c_int) -> bool {
        flags & libc::MSG_DONTWAIT != 0
            || real::flags(self.fd).is_ok_and(|flags| flags & libc::O_NONBLOCK != 0)
    }

    pub(crate) fn send(
        &self,
        flags: c_int,
        name: &[u8],
        control: &[u8],
        payload: &[libc::iovec],
    ) -> Result<usize, c_int> {
        if flags & !libc::MSG_DONTWAIT == 0 && control.is_empty() && self.post(name, payload)? {
            let len = payload.iter().map(|piece| piece.iov_len).sum();
            return Ok(len);
        }
        if name.len() > NAME_MAX || control.len() > CONTROL_MAX {
            return Err(if name.len() > NAME_MAX { libc::EINVAL } else { libc::ENOBUFS });
        }
        let may_wait = !self.is_nonblocking(flags);
        let flags = if may_wait { flags } else { flags | libc::MSG_DONTWAIT };
        let head = self.head(Op::Send, flags, 0);
        let (channel, answer) = self.ask(&Request { head, name, control, payload, may_wait })?;
        self.node.keep(channel);
        self.heed(Op::Send, answer);
        Ok(answer.value as usize)
    }

    /// Posts a message to the ring of sends. Returns `false` when the node has to be asked.
    fn post(&self, name: &[u8], payload: &[libc::iovec]) -> Result<bool, c_int> {
        const PIECES: usize = 8;
        // Where there is nothing, the system says EFAULT.
        let is_nothing = |piece: &libc::iovec| piece.iov_base.is_null() && piece.iov_len > 0;
        if payload.len() > PIECES || payload.iter().any(is_nothing) {
            return Ok(false);
        }
        let mut pieces = [Piece { base: ptr::null(), len: 0 }; PIECES];
        for (piece, given) in pieces.iter_mut().zip(payload) {
            *piece = Piece { base: given.iov_base.cast(), len: given.iov_len };
        }
        let area = self.area()?;
        let mut channel = self.node.channel()?;
        // SAFETY: the caller's pieces, who promises that they are readable.
        let posted = unsafe { area.post(channel.number, name, &pieces[..payload.len()]) };
        if posted == Posted::Wake {
            channel.look(self.handle)?;
        }
        self.node.keep(channel);
        Ok(posted != Posted::Ask)
    }

    /// Receives into `to`; returns the length of the whole message, its flags, name and control
    /// messages.
    pub(crate) fn receive(
        &self,
        flags: c_int,
        control_room: usize,
        to: &[libc::iovec],
    ) -> Result<Message, c_int> {
        let area = self.area()?;
        if flags & (libc::MSG_OOB | libc::MSG_ERRQUEUE) != 0 {
            return self.receive_from_node(flags, control_room, to);
        }
        let room = to.iter().map(|piece| piece.iov_len).fold(0, usize::saturating_add);
        let mut waited = false;
        // A notification comes before all messages.
        if control_room > 0 && area.has_more() {
            match self.receive_from_node(flags, control_room, to) {
                Err(libc::EAGAIN) => {}
                done => {
                    self.received(&area);
                    return done;
                }
            }
        }
        loop {
            let copy = |place: Place, len: usize| copy_out(&area, place, len.min(room), to);
            let taken = area.take(flags & libc::MSG_PEEK != 0, copy).map_err(|_| libc::EIO)?;
            if let Some(taken) = taken {
                if taken.notice {
                    let _ = self.look();
                }
                self.received(&area);
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
                    // What there is needs room for control messages, which this call does not have.
                    Err(libc::EAGAIN) if waited => real::pause(),
                    Err(libc::EAGAIN) => {}
                    done => {
                        self.received(&area);
                        return done;
                    }
                }
            }
            let mut token = [0; TOKEN_LEN];
            match real::recv(self.fd, &mut token, flags & libc::MSG_DONTWAIT) {
                Ok(TOKEN_LEN) => self.token_taken(&area, token),
                Ok(_) => return Err(libc::ENETDOWN),
                Err(libc::EAGAIN) if area.has_message() => {}
                Err(libc::EAGAIN) if !self.is_nonblocking(flags) => return Err(libc::ETIMEDOUT),
                Err(errno) => return Err(errno),
            }
            waited = true;
        }
    }

    /// Receives what does not go through the ring, without waiting.
    fn receive_from_node(
        &self,
        flags: c_int,
        control_room: usize,
        to: &[libc::iovec],
    ) -> Result<Message, c_int> {
        let room = to.iter().map(|piece| piece.iov_len).fold(0, usize::saturating_add);
        let room_bytes = (room as u64).to_ne_bytes();
        let piece = libc::iovec {
            iov_base: ptr::from_ref(&room_bytes).cast::<c_void>().cast_mut(),
            iov_len: room_bytes.len(),
        };
        let head = self.head(Op::Receive, flags, control_room.min(CONTROL_MAX) as c_int);
        let request = Request { head, name: &[], control: &[], payload: &[piece], may_wait: false };
        let (mut channel, answer) = self.ask(&request)?;
        let name = channel.take_bytes(answer.name)?;
        let control = channel.take_bytes(answer.control)?;
        channel.take(answer.payload, to)?;
        self.node.keep(channel);
        let whole = answer.value as usize;
        let len = if flags & libc::MSG_TRUNC != 0 { whole } else { whole.min(room) };
        Ok(Message { len, flags: answer.a, name, control })
    }
}

/// Copies bytes of a ring to where they are wanted.
fn copy_out(area: &Area, mut place: Place, mut len: usize, to: &[libc::iovec]) {
    for piece in to {
        let n = piece.iov_len.min(len);
        // SAFETY: the caller's piece, who promises that it is writable.
        unsafe { area.copy_out_to(place, piece.iov_base.cast(), n) };
        place = place.skip(n);
        len -= n;
    }
}

/// What was received.
pub(crate) struct Message {
    /// What the call returns.
    pub(crate) len: usize,
    pub(crate) flags: c_int,
    pub(crate) name: Vec<u8>,
    pub(crate) control: Vec<u8>,
}
