//! What a program asks the node.

use core::time::Duration;

use crate::frame::{Frame, HEAD_LEN, Head, Op};
use crate::ids::SocketHandle;
use crate::reply::Features;

/// A request. A channel has one under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request<'a> {
    /// The first of a channel. On a channel that was [offered](crate::offer) nobody sends it, and
    /// the node answers it all the same.
    Hello {
        /// [`VERSION`](crate::VERSION).
        version: i32,
        /// What the program can do beside that; a node of before takes no notice.
        features: Features,
    },
    /// `socket(2)`. With the reply come the socket's descriptor and that of its memory.
    Open {
        /// The type.
        kind: i32,
        /// The protocol.
        protocol: i32,
    },
    /// Names a socket by its descriptor, which comes along. With the reply comes the descriptor of
    /// its memory.
    Attach,
    /// Something is new in the shared memory of a socket. It has no reply.
    Wake(SocketHandle),
    /// Ends the wait of the request that is under way. It has no reply of its own: that one is
    /// answered, with `EINTR` if nothing has happened.
    Interrupt,
    /// Gives the node access to the memory of the process, for RDMA operations: a descriptor of its
    /// `/proc/self/mem`, opened to be read and written, comes along, or an end of a socket whose
    /// other end gives parts of it. A program sends it because of a call that is about its memory;
    /// no node asks for it.
    ShowMemory {
        /// What that other end calls the memory.
        grant: u64,
        /// The address at which the nonce of this channel stands.
        nonce_at: u64,
        /// What that other end can do; nothing of a program of before.
        features: Features,
    },
    /// Gives the node a means to see whether memory is still what a call has named: a `userfaultfd`
    /// of the process comes along. A program sends it after [`Request::ShowMemory`] with its whole
    /// memory, to nodes that have [`Features::WATCH`].
    ShowWatch,
    /// Asks the node, as the first of a channel, to hand over all it has to the process that asks,
    /// which is another node. Each 250 of the descriptors come with one more byte, and that of the
    /// state is the first. When the process is ready to resume, it sends a byte; the node answers
    /// with one, and ends. Without these the node takes all back.
    HandOver {
        /// [`VERSION`](crate::VERSION).
        version: i32,
        /// [`HAND_OVER_VERSION`](crate::HAND_OVER_VERSION).
        hand_over_version: i32,
        /// Format of the node's own state.
        state_format: i64,
    },
    /// A call on a socket.
    Call(SocketHandle, Call<'a>),
}

/// A call on a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call<'a> {
    /// `bind(2)` to a name.
    Bind(&'a [u8]),
    /// `connect(2)` to a name.
    Connect(&'a [u8]),
    /// `getsockname(2)`.
    LocalName,
    /// `getpeername(2)`.
    PeerName,
    /// `sendmsg(2)`.
    Send(SendCall<'a>),
    /// `recvmsg(2)` of what does not go through the ring, without waiting. `EAGAIN`: look at the
    /// ring.
    Receive {
        /// Flags of the call.
        flags: i32,
        /// Room for control messages in bytes.
        control_room: usize,
        /// Room for the message in bytes.
        room: usize,
    },
    /// `setsockopt(2)`.
    SetOption {
        /// Level of the option.
        level: i32,
        /// The option.
        option: i32,
        /// Its value.
        value: &'a [u8],
        /// The program may write to memory that the value is about.
        may_write: bool,
    },
    /// `getsockopt(2)`.
    GetOption {
        /// Level of the option.
        level: i32,
        /// The option.
        option: i32,
        /// Room for the value in bytes.
        room: usize,
    },
    /// `ioctl(2)` of a byte.
    Ioctl {
        /// The request.
        request: i32,
        /// The byte.
        byte: Option<u8>,
    },
    /// Waits until all messages of the socket are acknowledged, at most so long.
    Flush(Option<Duration>),
    /// Cancels all messages of the socket that are not acknowledged.
    CancelAll,
}

/// The arguments of `sendmsg(2)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SendCall<'a> {
    /// Flags of the call.
    pub flags: i32,
    /// The program may write to memory that control messages are about.
    pub may_write: bool,
    /// The destination; empty for the connected one.
    pub name: &'a [u8],
    /// Control messages.
    pub control: &'a [u8],
    /// The message.
    pub payload: &'a [u8],
}

/// A request whose arguments are missing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Invalid {
    /// The socket of a call.
    pub socket: Option<SocketHandle>,
}

/// The bytes of a request, in parts.
#[derive(Clone, Copy, Debug)]
pub struct Emitted<'a> {
    head: [u8; HEAD_LEN],
    name: &'a [u8],
    control: &'a [u8],
    payload: Payload<'a>,
}

#[derive(Clone, Copy, Debug)]
enum Payload<'a> {
    Bytes(&'a [u8]),
    Number([u8; 8]),
    Byte([u8; 1]),
}

impl Payload<'_> {
    fn bytes(&self) -> &[u8] {
        match self {
            Self::Bytes(bytes) => bytes,
            Self::Number(number) => number,
            Self::Byte(byte) => byte,
        }
    }
}

impl Emitted<'_> {
    /// What is to be sent, one after the other.
    pub fn parts(&self) -> [&[u8]; 4] {
        [&self.head, self.name, self.control, self.payload.bytes()]
    }
}

/// In the place of control messages of an option: the program may not write to its memory.
const MAY_NOT_WRITE: &[u8] = &[1];
/// As a time limit: none.
const NO_LIMIT: u64 = u64::MAX;

impl<'a> Request<'a> {
    /// What a frame asks.
    ///
    /// # Errors
    /// [`Invalid`]; what is there without need is not looked at.
    pub fn parse(frame: &Frame<'a>) -> Result<Self, Invalid> {
        let Head { op, value, a, b } = frame.head;
        let socket = SocketHandle(value.cast_unsigned());
        let call = match op {
            Op::Hello => {
                let features = Features(b.cast_unsigned());
                return Ok(Self::Hello { version: a, features });
            }
            Op::Open => return Ok(Self::Open { kind: a, protocol: b }),
            Op::Attach => return Ok(Self::Attach),
            Op::Wake => return Ok(Self::Wake(socket)),
            Op::Interrupt => return Ok(Self::Interrupt),
            Op::Memory => {
                let nonce_at = frame.payload.try_into().map(u64::from_ne_bytes);
                let nonce_at = nonce_at.map_err(|_| Invalid { socket: None })?;
                let (grant, features) = (value.cast_unsigned(), Features(b.cast_unsigned()));
                return Ok(Self::ShowMemory { grant, nonce_at, features });
            }
            Op::Watch => return Ok(Self::ShowWatch),
            Op::HandOver => {
                let (version, hand_over_version, state_format) = (a, b, value);
                return Ok(Self::HandOver { version, hand_over_version, state_format });
            }
            _ => Call::parse(frame),
        };
        let call = call.ok_or(Invalid { socket: Some(socket) })?;
        Ok(Self::Call(socket, call))
    }

    fn head(&self) -> Head {
        match *self {
            Self::Hello { version: a, features } => {
                Head { op: Op::Hello, value: 0, a, b: features.0.cast_signed() }
            }
            Self::Open { kind: a, protocol: b } => Head { op: Op::Open, value: 0, a, b },
            Self::Attach => Head::new(Op::Attach, 0),
            Self::Wake(socket) => Head::new(Op::Wake, socket.0.cast_signed()),
            Self::Interrupt => Head::new(Op::Interrupt, 0),
            Self::ShowMemory { grant, features, .. } => {
                let (value, b) = (grant.cast_signed(), features.0.cast_signed());
                Head { op: Op::Memory, value, a: 0, b }
            }
            Self::ShowWatch => Head::new(Op::Watch, 0),
            Self::HandOver { version: a, hand_over_version: b, state_format: value } => {
                Head { op: Op::HandOver, value, a, b }
            }
            Self::Call(socket, ref call) => {
                let (op, a, b) = call.numbers();
                Head { op, value: socket.0.cast_signed(), a, b }
            }
        }
    }

    /// The bytes of the request, before `more` bytes that continue its payload: those of a
    /// message in pieces. `None` if a part of it is too long.
    pub fn emit(&self, more: usize) -> Option<Emitted<'a>> {
        let (name, control, payload): (&[u8], &[u8], _) = match *self {
            Self::ShowMemory { nonce_at, .. } => {
                (&[], &[], Payload::Number(nonce_at.to_ne_bytes()))
            }
            Self::Call(_, call) => call.parts(),
            _ => (&[], &[], Payload::Bytes(&[])),
        };
        let len = payload.bytes().len().checked_add(more)?;
        let head = self.head().emit(name.len(), control.len(), len)?;
        Some(Emitted { head, name, control, payload })
    }
}

impl<'a> Call<'a> {
    fn parse(frame: &Frame<'a>) -> Option<Self> {
        let Head { op, a, b, .. } = frame.head;
        let Frame { name, control, payload, .. } = *frame;
        let number = || payload.first_chunk().map(|number| u64::from_ne_bytes(*number));
        let room = || Some(usize::try_from(number()?).unwrap_or(usize::MAX));
        Some(match op {
            Op::Bind => Self::Bind(name),
            Op::Connect => Self::Connect(name),
            Op::LocalName => Self::LocalName,
            Op::PeerName => Self::PeerName,
            Op::Send => {
                let may_write = b == 0;
                Self::Send(SendCall { flags: a, may_write, name, control, payload })
            }
            Op::Receive => {
                let control_room = usize::try_from(b).unwrap_or(0);
                Self::Receive { flags: a, control_room, room: room()? }
            }
            Op::SetOption => {
                let may_write = control.is_empty();
                Self::SetOption { level: a, option: b, value: payload, may_write }
            }
            Op::GetOption => Self::GetOption { level: a, option: b, room: room()? },
            Op::Ioctl => Self::Ioctl { request: a, byte: payload.first().copied() },
            Op::Flush => {
                let limit = Some(number()?).filter(|limit| *limit != NO_LIMIT);
                Self::Flush(limit.map(Duration::from_nanos))
            }
            Op::CancelAll => Self::CancelAll,
            Op::Hello
            | Op::Open
            | Op::Attach
            | Op::Interrupt
            | Op::Wake
            | Op::HandOver
            | Op::Memory
            | Op::Watch => return None,
        })
    }

    /// The kind, and two of the numbers of a head.
    fn numbers(&self) -> (Op, i32, i32) {
        match *self {
            Self::Bind(_) => (Op::Bind, 0, 0),
            Self::Connect(_) => (Op::Connect, 0, 0),
            Self::LocalName => (Op::LocalName, 0, 0),
            Self::PeerName => (Op::PeerName, 0, 0),
            Self::Send(send) => (Op::Send, send.flags, i32::from(!send.may_write)),
            Self::Receive { flags, control_room, .. } => {
                (Op::Receive, flags, i32::try_from(control_room).unwrap_or(i32::MAX))
            }
            Self::SetOption { level, option, .. } => (Op::SetOption, level, option),
            Self::GetOption { level, option, .. } => (Op::GetOption, level, option),
            Self::Ioctl { request, .. } => (Op::Ioctl, request, 0),
            Self::Flush(_) => (Op::Flush, 0, 0),
            Self::CancelAll => (Op::CancelAll, 0, 0),
        }
    }

    /// Name, control messages and payload.
    fn parts(self) -> (&'a [u8], &'a [u8], Payload<'a>) {
        let bytes = |bytes| Payload::Bytes(bytes);
        match self {
            Self::Bind(name) | Self::Connect(name) => (name, &[], bytes(&[])),
            Self::LocalName | Self::PeerName | Self::CancelAll => (&[], &[], bytes(&[])),
            Self::Send(send) => (send.name, send.control, bytes(send.payload)),
            Self::Receive { room, .. } | Self::GetOption { room, .. } => {
                (&[], &[], Payload::Number((room as u64).to_ne_bytes()))
            }
            Self::SetOption { value, may_write, .. } => {
                (&[], if may_write { &[] } else { MAY_NOT_WRITE }, bytes(value))
            }
            Self::Ioctl { byte, .. } => {
                (&[], &[], byte.map_or(bytes(&[]), |byte| Payload::Byte([byte])))
            }
            Self::Flush(limit) => {
                let limit = limit.map(|limit| u64::try_from(limit.as_nanos()).unwrap_or(NO_LIMIT));
                (&[], &[], Payload::Number(limit.unwrap_or(NO_LIMIT).to_ne_bytes()))
            }
        }
    }
}
