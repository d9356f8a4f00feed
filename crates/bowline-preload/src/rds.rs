//! What each call on an RDS socket asks the node, and what it makes of the answer.

use core::ffi::{c_int, c_void};
use core::ptr;

use bowline_attach::{CONTROL_MAX, FILL, Head, NAME_MAX, Op, TOKEN_LEN};

use crate::channel::{Answer, Channel, Nodes};
use crate::real;
use crate::table::{self, Rds};

/// Tokens that are sent at most to fill a socket; fewer do.
const FILL_MAX: usize = 16;

const SOCK_SEQPACKET: c_int = 5;

/// `socket(AF_RDS, ..)`.
pub(crate) fn socket(kind: c_int, protocol: c_int) -> Result<c_int, c_int> {
    let flags = kind & !0xf;
    if flags & !(libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK) != 0 {
        return Err(libc::EINVAL);
    }
    if kind & 0xf != SOCK_SEQPACKET || protocol != 0 {
        return Err(libc::ESOCKTNOSUPPORT);
    }
    // As a kernel without the module says.
    let node = Nodes::of_host().map_err(|_| libc::EAFNOSUPPORT)?;
    let mut channel = node.channel().map_err(|_| libc::EAFNOSUPPORT)?;
    let head = Head { op: Op::Open, value: 0, a: SOCK_SEQPACKET, b: protocol };
    channel.send(head, &[], &[], &[], None)?;
    let (answer, fd) = channel.answer_with_descriptor()?;
    if answer.value < 0 {
        return Err(-answer.value as c_int);
    }
    if fd < 0 {
        return Err(libc::EMFILE);
    }
    node.keep(channel);
    if flags & libc::SOCK_CLOEXEC == 0 {
        real::clear_cloexec(fd);
    }
    if flags & libc::SOCK_NONBLOCK != 0 {
        real::set_flags(fd, real::flags(fd)? | libc::O_NONBLOCK);
    }
    table::set(fd, node, answer.value.cast_unsigned());
    Ok(fd)
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
                head.value = channel.attach(self.fd)?.cast_signed();
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

    /// Does what the node asks for: what the descriptor shows is up to whoever has it.
    fn heed(&self, op: Op, answer: Answer) {
        match op {
            Op::Send if answer.b == FILL => {
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
            Op::Receive if answer.b != 0 => self.take_tokens(answer.b.cast_unsigned()),
            _ => {}
        }
    }

    /// Takes tokens up to this one from the socket.
    fn take_tokens(&self, last: u32) {
        loop {
            let mut token = [0; TOKEN_LEN];
            if real::recv(self.fd, &mut token, libc::MSG_DONTWAIT) != Ok(TOKEN_LEN) {
                return;
            }
            let after = u32::from_ne_bytes(token).wrapping_sub(last).cast_signed();
            if after > 0 {
                // It stands for something that came meanwhile.
                let _ = self.short(self.head(Op::Look, 0, 0), &[], &[]);
            }
            if after >= 0 {
                return;
            }
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
        self.short(self.head(Op::SetOption, level, name), &[], value).map(|_| 0)
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

    /// The flags of a call, with that of a socket that does not block.
    fn with_nonblocking(&self, flags: c_int) -> c_int {
        let nonblocking = flags & libc::MSG_DONTWAIT != 0
            || real::flags(self.fd).is_ok_and(|flags| flags & libc::O_NONBLOCK != 0);
        if nonblocking { flags | libc::MSG_DONTWAIT } else { flags }
    }

    pub(crate) fn send(
        &self,
        flags: c_int,
        name: &[u8],
        control: &[u8],
        payload: &[libc::iovec],
    ) -> Result<usize, c_int> {
        if name.len() > NAME_MAX || control.len() > CONTROL_MAX {
            return Err(if name.len() > NAME_MAX { libc::EINVAL } else { libc::ENOBUFS });
        }
        let flags = self.with_nonblocking(flags);
        let head = self.head(Op::Send, flags, 0);
        let may_wait = flags & libc::MSG_DONTWAIT == 0;
        let (channel, answer) = self.ask(&Request { head, name, control, payload, may_wait })?;
        self.node.keep(channel);
        self.heed(Op::Send, answer);
        Ok(answer.value as usize)
    }

    /// Receives into `to`; returns the length of the whole message, its flags, name and control
    /// messages.
    pub(crate) fn receive(
        &self,
        flags: c_int,
        control_room: usize,
        to: &[libc::iovec],
    ) -> Result<Message, c_int> {
        let flags = self.with_nonblocking(flags);
        let room = to.iter().map(|piece| piece.iov_len).fold(0, usize::saturating_add);
        let room_bytes = (room as u64).to_ne_bytes();
        let piece = libc::iovec {
            iov_base: ptr::from_ref(&room_bytes).cast::<c_void>().cast_mut(),
            iov_len: room_bytes.len(),
        };
        let head = self.head(Op::Receive, flags, control_room.min(CONTROL_MAX) as c_int);
        let may_wait = flags & libc::MSG_DONTWAIT == 0;
        let request = Request { head, name: &[], control: &[], payload: &[piece], may_wait };
        let (mut channel, answer) = self.ask(&request)?;
        let name = channel.take_bytes(answer.name)?;
        let control = channel.take_bytes(answer.control)?;
        channel.take(answer.payload, to)?;
        self.node.keep(channel);
        self.heed(Op::Receive, answer);
        let whole = answer.value as usize;
        let len = if flags & libc::MSG_TRUNC != 0 { whole } else { whole.min(room) };
        Ok(Message { len, flags: answer.a, name, control })
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
