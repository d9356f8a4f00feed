//! What a program and the RDS node of its host say to each other.
//!
//! A program's RDS socket is one end of a connected pair of unix sockets, whose other end the node
//! has; the kernel keeps it through `fork`, `exec`, `dup` and `SCM_RIGHTS` like any other. On it go
//! tokens only, *wake tokens* to programs and *fill tokens* to the node: they make it readable and
//! writable, for `poll`, when the RDS socket is, and wake who waits for a message. A node that
//! finds anything else there closes the socket: a program has written to it by a system call that
//! no library has seen, and takes it for sent. Messages go through rings in memory that both share,
//! an [`Area`] for each socket. All other calls, and messages that are long or come with control
//! messages, go over a *channel*, a unix stream socket between one process and the node, of which
//! each end carries frames. The first channel of a process comes about where the node listens;
//! those of a socket that was handed to it, wherever its process is, by an [`offer`] on the socket
//! itself.
//!
//! A channel has one [`Request`] under way, and then its [`Reply`]; both are [`Frame`]s. Both sides
//! take the other for hostile: [`Frame::parse`] checks every length.

#![no_std]
#![deny(unsafe_code)]

pub mod agent;
mod area;
mod frame;
mod ids;
pub mod name;
mod receives;
mod reply;
mod request;
mod sends;
mod sync;
mod tokens;
pub mod watch;

pub use area::{
    AREA_LEN, Area, DESTINATIONS, FILL_TOKEN_LEN, Place, RING_LEN, RING_MESSAGE_MAX, RING_NAME_MAX,
};
pub use frame::{CONTROL_MAX, FRAME_MAX, Frame, HEAD_LEN, Head, Lengths, Malformed, NAME_MAX, Op};
pub use ids::{ChannelId, LockOwner, NodeId, SocketHandle};
pub use receives::{Received, Receives, SavedReceives};
pub use reply::{Features, Reply};
pub use request::{Call, Emitted, Invalid, Request, SendCall};
pub use sends::{Broken, Piece, Pushed, QueuedSend, SavedSends, Sends};
pub use tokens::ProgramEnd;

/// Version of what this crate describes; the first thing that the two sides compare.
pub const VERSION: i32 = 3;

/// Version of what a node hands over to another.
pub const HAND_OVER_VERSION: i32 = 2;

/// First bytes of the abstract name to which the node binds its end of a socket, by which a library
/// sees what may be an RDS socket; digits follow. Nobody listens there, and the name proves
/// nothing: whose socket it is, the kernel says (`SO_PEERCRED`).
pub const NAME_PREFIX: &[u8] = b"\0bowline-rds/";

/// Bytes of an [`offer`]: more than all tokens with which a program fills a socket.
pub const OFFER_LEN: usize = 32;

/// Most fill tokens on a socket. It has as little room as the system lets it have: two take it.
pub const FILL_MAX: usize = 3;

const _: () =
    assert!(FILL_MAX * FILL_TOKEN_LEN < OFFER_LEN, "an offer is recognized by its length");

const OFFER: &[u8; OFFER_LEN - 4] = b"bowline: here is a channel\0\0";

/// What a program sends on the descriptor of a socket to make a channel, with its credentials and
/// one end of a pair of stream sockets that it has made: that end is the node's end of a channel
/// that may name this socket. The node greets on it, with the reply to a [`Request::Hello`] that
/// nobody has sent. `version` is [`VERSION`].
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

/// Bytes of a wake token: its number, which goes up by one.
pub const WAKE_TOKEN_LEN: usize = 4;

/// Level of options of a socket that only a node has, not a kernel. A program cannot name it: its
/// `setsockopt` knows two levels.
pub const NODE_LEVEL: i32 = 0x626f_776c;
/// Option of [`NODE_LEVEL`]: the send buffer, as a `u64` number of bytes. The socket gets all of
/// them, whatever a kernel's sockets may ask for, or none: ENOBUFS beyond the quota of its user.
pub const NODE_SEND_BUFFER: i32 = 1;
/// The same for the receive buffer.
pub const NODE_RECV_BUFFER: i32 = 2;

/// What comes with [`Reply::Welcome`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Greeting {
    /// A random number of this channel; see [`Request::ShowMemory`].
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
