//! What the node answers.

use crate::frame::{Head, Malformed, Op};
use crate::ids::{LockOwner, NodeId, SocketHandle};

/// What one side can do beyond what [`VERSION`](crate::VERSION) says, a bit each. They stand
/// where both sides of before write zeroes and read nothing: a side that does not know a bit leaves
/// the other without what it is for. A program on an [offered](crate::offer) channel has said
/// nothing of itself in a greeting.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Features(pub u32);

impl Features {
    /// A node takes [`Request::ShowWatch`](crate::Request::ShowWatch).
    pub const WATCH: Self = Self(1);
    /// The agent of a program knows by which call memory was given
    /// ([`agent::Request::grant`](crate::agent::Request)).
    pub const GRANTS: Self = Self(2);
    /// What this version can do.
    pub const OWN: Self = Self(Self::WATCH.0 | Self::GRANTS.0);

    /// Tells whether all of these are among them.
    pub const fn include(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }
}

/// The numbers of a reply; what comes with them follows its head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reply {
    /// To a greeting. Payload: a [`Greeting`](crate::Greeting).
    Welcome {
        /// The node.
        node: NodeId,
        /// The channel, in locks.
        owner: LockOwner,
        /// What the node can do; nothing of a node of before.
        features: Features,
    },
    /// A socket was opened, or is known by its descriptor.
    Socket(SocketHandle),
    /// The call has returned 0; name or payload are what it was for.
    Done,
    /// A message was sent.
    Sent {
        /// What the call returns.
        len: usize,
        /// The program is to make the socket unwritable: to send tokens on it until `poll` says
        /// that there is no room.
        fill: bool,
    },
    /// Something was received: name, control messages, payload.
    Received {
        /// Length of the whole message.
        len: usize,
        /// Flags of the message.
        flags: i32,
    },
    /// The value of an option, in the payload.
    Value {
        /// What the call returns.
        returned: i32,
        /// The length for the caller.
        len: i32,
    },
    /// The node hands over so many descriptors.
    HandOver(usize),
    /// The call has failed.
    Failed {
        /// The error number.
        errno: i32,
        /// As of [`Sent`](Self::Sent).
        fill: bool,
        /// Length of an option for which there is too little room, or 0.
        needed: i32,
    },
}

/// Tells a program to fill its socket.
const FILL: i32 = 1;
const ERRNO_MAX: i64 = 4095;
/// The error number of a reply that has none which the system knows.
const EPROTO: i32 = 71;

fn count(len: usize) -> i64 {
    i64::try_from(len).unwrap_or(i64::MAX)
}

impl Reply {
    /// A call that has failed.
    pub const fn error(errno: i32) -> Self {
        Self::Failed { errno, fill: false, needed: 0 }
    }

    /// The error number, if the call has failed.
    pub const fn errno(&self) -> Option<i32> {
        match *self {
            Self::Failed { errno, .. } => Some(errno),
            _ => None,
        }
    }

    /// The head of the reply to a request.
    pub fn emit(&self, op: Op) -> Head {
        let (value, a, b) = match *self {
            Self::Welcome { node, owner, features } => {
                (node.0.cast_signed(), owner.0.cast_signed(), features.0.cast_signed())
            }
            Self::Socket(socket) => (socket.0.cast_signed(), 0, 0),
            Self::Done => (0, 0, 0),
            Self::Sent { len, fill } => (count(len), 0, i32::from(fill) * FILL),
            Self::Received { len, flags } => (count(len), flags, 0),
            Self::Value { returned, len } => (i64::from(returned), len, 0),
            Self::HandOver(descriptors) => (count(descriptors), 0, 0),
            Self::Failed { errno, fill, needed } => {
                (-i64::from(errno), needed, i32::from(fill) * FILL)
            }
        };
        Head { op, value, a, b }
    }

    /// Reads the head of a reply.
    ///
    /// # Errors
    /// [`Malformed`] for a greeting without a channel, and for replies to what has none.
    pub fn parse(head: &Head) -> Result<Self, Malformed> {
        let Head { op, value, a, b } = *head;
        let fill = b == FILL;
        if value < 0 {
            let errno = value.checked_neg().filter(|errno| *errno <= ERRNO_MAX);
            let errno = errno.map_or(EPROTO, |errno| errno as i32);
            let fill = fill && op == Op::Send;
            let needed = if op == Op::GetOption { a } else { 0 };
            return Ok(Self::Failed { errno, fill, needed });
        }
        let number = value.cast_unsigned();
        let len = usize::try_from(number).unwrap_or(usize::MAX);
        Ok(match op {
            Op::Hello if a == 0 => return Err(Malformed),
            Op::Hello => Self::Welcome {
                node: NodeId(number),
                owner: LockOwner(a.cast_unsigned()),
                features: Features(b.cast_unsigned()),
            },
            Op::Open | Op::Attach => Self::Socket(SocketHandle(number)),
            Op::Send => Self::Sent { len, fill },
            Op::Receive => Self::Received { len, flags: a },
            Op::GetOption => {
                Self::Value { returned: i32::try_from(value).unwrap_or(i32::MAX), len: a }
            }
            Op::HandOver => Self::HandOver(len),
            Op::Bind
            | Op::Connect
            | Op::LocalName
            | Op::PeerName
            | Op::SetOption
            | Op::Ioctl
            | Op::Flush
            | Op::CancelAll
            | Op::Memory
            | Op::Watch => Self::Done,
            Op::Interrupt | Op::Wake => return Err(Malformed),
        })
    }
}
