//! What a program and the RDS node of its host say to each other.
//!
//! A program's RDS socket is one end of a connected pair of unix sockets, whose other end the node
//! has; the kernel keeps it through `fork`, `exec`, `dup` and `SCM_RIGHTS` like any other. On it go
//! tokens only: they make it readable and writable, for `poll`, when the RDS socket is, and wake
//! who waits for a message. Messages go through rings in memory that both share, an [`Area`] for
//! each socket. All other calls, and messages that are long or come with control messages, go over
//! a *channel*, a unix stream socket between one process and the node, of which each end carries
//! frames. The first channel of a process comes about where the node listens; those of a socket
//! that was handed to it, wherever its process is, by an [`offer`] on the socket itself:
//!
//! ```text
//!   0        4      5      6          8         16      20      24            28          32
//!   | length | op   | 0    | name len | value   | a     | b     | control len | 0         |
//!   +--------+------+------+----------+---------+-------+-------+-------------+-----------+
//!   | name (a sockaddr) | control (cmsghdrs) | payload                                     |
//! ```
//!
//! Numbers are in the byte order of the machine, since both sides are on one. `length` is that of
//! the whole frame. A channel has one request under way; its answer has the same `op`. See [`Op`]
//! for what `value`, `a` and `b` are in each.
//!
//! Both sides take the other for hostile: [`Frame::parse`] checks every length.

#![no_std]
#![deny(unsafe_code)]

pub mod agent;
mod area;
mod ids;
pub mod name;
mod receives;
mod sends;

pub use area::{AREA_LEN, Area, DESTINATIONS, Place, RING_LEN, RING_MESSAGE_MAX, RING_NAME_MAX};
pub use ids::{ChannelId, LockOwner, NodeId, SocketHandle};
pub use receives::{Receives, SavedReceives, Taken};
pub use sends::{Broken, Piece, Post, Posted, SavedSends, Sends};

/// Version of what this crate describes; the first thing that the two sides compare.
pub const VERSION: i32 = 3;

/// Version of what a node hands over to another.
pub const HAND_OVER_VERSION: i32 = 2;

/// Bytes before the name of a frame.
pub const HEAD_LEN: usize = 32;

/// Longest frame in bytes: a message of 16 MiB with its name and control messages.
pub const FRAME_MAX: usize = (16 << 20) + (64 << 10);

/// Longest name in bytes: a `sockaddr_storage`.
pub const NAME_MAX: usize = 128;

/// Longest control messages in bytes.
pub const CONTROL_MAX: usize = 16 << 10;

/// First bytes of the abstract name to which the node binds its end of a socket, by which a library
/// sees what may be an RDS socket; digits follow. Nobody listens there, and the name proves
/// nothing: whose socket it is, the kernel says (`SO_PEERCRED`).
pub const NAME_PREFIX: &[u8] = b"\0bowline-rds/";

/// Bytes of an [`offer`]: more than all tokens with which a program fills a socket.
pub const OFFER_LEN: usize = 32;

const OFFER: &[u8; OFFER_LEN - 4] = b"bowline: here is a channel\0\0";

/// What a program sends on the descriptor of a socket to make a channel, with its credentials and
/// one end of a pair of stream sockets that it has made: that end is the node's end of a channel
/// that may name this socket. The node greets on it, with the answer to a [`Op::Hello`] that nobody
/// has sent. `version` is [`VERSION`].
pub fn offer(version: i32) -> [u8; OFFER_LEN] {
    let mut out = [0; OFFER_LEN];
    let (text, number) = out.split_at_mut(OFFER.len());
    text.copy_from_slice(OFFER);
    number.copy_from_slice(&version.to_ne_bytes());
    out
}

/// The version of an [`offer`]; `None` for bytes that are none.
pub fn offered_version(bytes: &[u8]) -> Option<i32> {
    let number = bytes.strip_prefix(OFFER)?;
    Some(i32::from_ne_bytes(number.try_into().ok()?))
}

/// Bytes of the random number that the node tells each channel, and that a program which shows its
/// memory has there.
pub const NONCE_LEN: usize = 16;

/// Bytes of a token: its number, which goes up by one.
pub const TOKEN_LEN: usize = 4;

/// Asks the program, in an answer's `b`, to make the socket unwritable: to send tokens on it until
/// `poll` says that there is no room.
pub const FILL: i32 = 1;

/// A request. The answer's `value` is a result as the system call would have it, or the negative
/// error number; other fields of it are named here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Op {
    /// The first of a channel. `a`: [`VERSION`]. Answer: `value` is the number of the node, `a`
    /// that of the channel, for the lock of [`Area::post`]; payload: a [`Greeting`].
    Hello = 1,
    /// `socket(2)`. `a`: type, `b`: protocol. Answer: `value` is the handle of the new socket; its
    /// descriptor and that of its shared memory come along.
    Open = 2,
    /// Names a socket by its descriptor, which comes along. Answer: `value` is its handle; the
    /// descriptor of its shared memory comes along.
    Attach = 3,
    /// `bind(2)`. `value` is the handle of the socket, here and below. Name: the address.
    Bind = 4,
    /// `connect(2)`. Name: the address.
    Connect = 5,
    /// `getsockname(2)`. Answer: name.
    LocalName = 6,
    /// `getpeername(2)`. Answer: name.
    PeerName = 7,
    /// `sendmsg(2)`. `a`: flags; `b`: 1 if the program may not write to memory that control
    /// messages are about. Name, control, payload. Answer: `b` may be [`FILL`].
    Send = 8,
    /// `recvmsg(2)` of what does not go through the ring, without waiting. `a`: flags, `b`: room
    /// for control messages in bytes, payload: room for the message in bytes as 8 bytes. Answer:
    /// `value` is the length of the whole message, `a` the flags of the message; name, control,
    /// payload. `EAGAIN`: look at the ring.
    Receive = 9,
    /// `setsockopt(2)`. `a`: level, `b`: name, payload: value; control: a byte if the program may
    /// not write to memory that the value is about.
    SetOption = 10,
    /// `getsockopt(2)`. `a`: level, `b`: name, payload: room in bytes as 8 bytes. Answer: payload,
    /// `a`: the length to be told where it is another than the payload's.
    GetOption = 11,
    /// `ioctl(2)`. `a`: request, payload: one byte. Answer: payload.
    Ioctl = 12,
    /// Ends the wait of the request that is under way. It has no answer of its own: that one is
    /// answered, with `EINTR` if nothing has happened.
    Interrupt = 13,
    /// Something has happened in the shared memory of a socket: `value` is its handle. It has no
    /// answer.
    Look = 14,
    /// Asks the node, as the first of a channel, to hand over all it has to the process that asks,
    /// which is another node. `a`: [`VERSION`], `b`: [`HAND_OVER_VERSION`], `value`: that of the
    /// node's state. Answer: `value` is the number of descriptors; each 250 of them come with one
    /// more byte, and that of the state is the first. When the process is ready to go on, it sends
    /// a byte; the node answers with one, and ends. Without these the node takes all back.
    HandOver = 15,
    /// Waits until all messages of the socket are acknowledged. Payload: the time limit in
    /// nanoseconds as 8 bytes, all ones for none.
    Flush = 16,
    /// Cancels all messages of the socket that are not acknowledged.
    CancelAll = 17,
    /// Gives the node access to the memory of the process, for RDMA operations: a descriptor of its
    /// `/proc/self/mem`, opened to be read and written, comes along, or an end of a socket whose
    /// other end gives parts of it. Payload: the address, as 8 bytes, where the nonce of this
    /// channel stands. A program sends it because of a call that is about its memory; no node asks
    /// for it.
    Memory = 18,
}

impl Op {
    const ALL: [Self; 18] = [
        Self::Hello,
        Self::Open,
        Self::Attach,
        Self::Bind,
        Self::Connect,
        Self::LocalName,
        Self::PeerName,
        Self::Send,
        Self::Receive,
        Self::SetOption,
        Self::GetOption,
        Self::Ioctl,
        Self::Interrupt,
        Self::Look,
        Self::HandOver,
        Self::Flush,
        Self::CancelAll,
        Self::Memory,
    ];

    fn of(number: u8) -> Option<Self> {
        Self::ALL.get(usize::from(number).checked_sub(1)?).copied()
    }
}

/// What the answer to a [`Op::Hello`] tells beside its numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Greeting {
    /// A random number of this channel; see [`Op::Memory`].
    pub nonce: [u8; NONCE_LEN],
    /// The network namespace of the node (`SO_NETNS_COOKIE`); 0 where the system does not tell.
    pub namespace: u64,
}

impl Greeting {
    /// Bytes of a greeting.
    pub const LEN: usize = NONCE_LEN + 8;

    /// Its bytes.
    pub fn emit(&self) -> [u8; Self::LEN] {
        let mut out = [0; Self::LEN];
        let (nonce, namespace) = out.split_at_mut(NONCE_LEN);
        nonce.copy_from_slice(&self.nonce);
        namespace.copy_from_slice(&self.namespace.to_ne_bytes());
        out
    }

    /// Reads a greeting; `None` for bytes that are none.
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let (nonce, namespace) = bytes.split_first_chunk()?;
        let namespace = u64::from_ne_bytes(namespace.try_into().ok()?);
        Some(Self { nonce: *nonce, namespace })
    }
}

/// The numbers of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Head {
    /// What is asked, or answered.
    pub op: Op,
    /// See [`Op`].
    pub value: i64,
    /// See [`Op`].
    pub a: i32,
    /// See [`Op`].
    pub b: i32,
}

impl Head {
    /// A head whose `a` and `b` are 0.
    pub const fn new(op: Op, value: i64) -> Self {
        Self { op, value, a: 0, b: 0 }
    }

    /// Returns the first bytes of a frame with so many bytes of name, control messages and payload.
    /// `None` if one of them is too long.
    pub fn emit(&self, name: usize, control: usize, payload: usize) -> Option<[u8; HEAD_LEN]> {
        let len = HEAD_LEN.checked_add(name)?.checked_add(control)?.checked_add(payload)?;
        if name > NAME_MAX || control > CONTROL_MAX || len > FRAME_MAX {
            return None;
        }
        let mut out = [0; HEAD_LEN];
        out[0..4].copy_from_slice(&(len as u32).to_ne_bytes());
        out[4] = self.op as u8;
        out[6..8].copy_from_slice(&(name as u16).to_ne_bytes());
        out[8..16].copy_from_slice(&self.value.to_ne_bytes());
        out[16..20].copy_from_slice(&self.a.to_ne_bytes());
        out[20..24].copy_from_slice(&self.b.to_ne_bytes());
        out[24..28].copy_from_slice(&(control as u32).to_ne_bytes());
        Some(out)
    }
}

/// A whole frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Frame<'a> {
    /// Its numbers.
    pub head: Head,
    /// A `sockaddr`, or nothing.
    pub name: &'a [u8],
    /// Control messages as `recvmsg` lays them out.
    pub control: &'a [u8],
    /// What is left.
    pub payload: &'a [u8],
}

/// Bytes that are no frame: the connection is of no use any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Malformed;

impl<'a> Frame<'a> {
    /// Takes a frame off the front of a stream; returns it and its length. `Ok(None)`: more bytes
    /// are needed.
    ///
    /// # Errors
    /// [`Malformed`].
    pub fn parse(bytes: &'a [u8]) -> Result<Option<(Self, usize)>, Malformed> {
        let Some(head) = bytes.first_chunk::<HEAD_LEN>() else { return Ok(None) };
        let number =
            |at: usize| u32::from_ne_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
        let len = number(0) as usize;
        let name = usize::from(u16::from_ne_bytes([head[6], head[7]]));
        let control = number(24) as usize;
        let op = Op::of(head[4]).ok_or(Malformed)?;
        let fits = name <= NAME_MAX && control <= CONTROL_MAX && len <= FRAME_MAX;
        if !fits || HEAD_LEN + name + control > len {
            return Err(Malformed);
        }
        let Some(frame) = bytes.get(HEAD_LEN..len) else { return Ok(None) };
        let (name, rest) = frame.split_at(name);
        let (control, payload) = rest.split_at(control);
        let value = head.get(8..16).and_then(|b| b.try_into().ok()).map_or(0, i64::from_ne_bytes);
        let head = Head { op, value, a: number(16).cast_signed(), b: number(20).cast_signed() };
        Ok(Some((Self { head, name, control, payload }, len)))
    }
}

#[cfg(test)]
mod tests {
    extern crate std;

    use std::vec::Vec;

    use super::*;

    fn bytes(head: Head, name: &[u8], control: &[u8], payload: &[u8]) -> Vec<u8> {
        let head = head.emit(name.len(), control.len(), payload.len()).expect("it fits");
        [&head, name, control, payload].concat()
    }

    #[test]
    fn a_frame_comes_out_as_it_went_in() {
        let head = Head { op: Op::Send, value: -7, a: i32::MIN, b: 3 };
        let mut stream = bytes(head, b"name", b"control", b"payload");
        let len = stream.len();
        stream.extend(bytes(Head::new(Op::Look, 1), b"", b"", b""));
        let frame = Frame { head, name: b"name", control: b"control", payload: b"payload" };
        assert_eq!(Frame::parse(&stream), Ok(Some((frame, len))));
        for cut in 0..len {
            assert_eq!(Frame::parse(&stream[..cut]), Ok(None), "{cut}");
        }
        for op in Op::ALL {
            let stream = bytes(Head::new(op, 0), b"", b"", b"");
            assert_eq!(Frame::parse(&stream).map(|f| f.map(|(f, _)| f.head.op)), Ok(Some(op)));
        }
    }

    #[test]
    fn lengths_that_do_not_fit_are_refused() {
        let good = bytes(Head::new(Op::Bind, 0), b"name", b"", b"");
        let with = |at: usize, new: &[u8]| {
            let mut bad = good.clone();
            bad[at..at + new.len()].copy_from_slice(new);
            bad
        };
        for bad in [
            with(0, &31u32.to_ne_bytes()),
            with(0, &(FRAME_MAX as u32 + 1).to_ne_bytes()),
            with(0, &u32::MAX.to_ne_bytes()),
            with(4, &[0]),
            with(4, &[Op::ALL.len() as u8 + 1]),
            with(6, &5u16.to_ne_bytes()),
            with(6, &u16::MAX.to_ne_bytes()),
            with(24, &1u32.to_ne_bytes()),
            with(24, &u32::MAX.to_ne_bytes()),
        ] {
            assert_eq!(Frame::parse(&bad), Err(Malformed), "{bad:?}");
        }
        assert_eq!(Head::new(Op::Bind, 0).emit(NAME_MAX + 1, 0, 0), None);
        assert_eq!(Head::new(Op::Bind, 0).emit(0, CONTROL_MAX + 1, 0), None);
        assert_eq!(Head::new(Op::Bind, 0).emit(0, 0, FRAME_MAX), None);
        assert_eq!(FRAME_MAX, (16 << 20) + (64 << 10), "as SECURITY.md tells");
    }
}
