//! Errors of the socket calls, each with the errno a kernel would give.

use core::fmt;

use bowline_base::Errno;

/// Why a call failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Error {
    /// The socket is closed or never was.
    BadSocket,
    /// The socket is not bound, or has no destination.
    NotConnected,
    /// The socket is bound already.
    AlreadyBound,
    /// Port 1 belongs to the path handshake.
    ReservedPort,
    /// The address cannot be used here: unspecified, broadcast, multicast or without its scope.
    BadAddress,
    /// Interface scopes of the two addresses differ.
    ScopeMismatch,
    /// The address does not belong to this node.
    AddrNotAvailable,
    /// The address is not one the chosen transport can serve.
    TransportAddress,
    /// Another socket has this address and port.
    AddrInUse,
    /// A destination is required and the given one is unspecified.
    DestinationRequired,
    /// The address is not one that can be connected to.
    WrongProtocolType,
    /// IPv4 and IPv6 addresses mixed.
    FamilyMismatch,
    /// The message is longer than a limit.
    MessageTooLong(TooLong),
    /// The socket's send queue is full.
    QueueFull,
    /// The destination port is congested.
    Congested,
    /// It is not known yet whether the peer takes so long a message.
    HandshakePending,
    /// Nothing to receive.
    Empty,
    /// A control message that cannot be used, or not with the others.
    BadControl,
    /// The transport cannot do this.
    NotSupported,
    /// No such option, or its transport is absent.
    NoSuchOption,
    /// A value outside its range.
    BadValue,
    /// A value of a setting outside its range, which this is in words.
    BadSetting(&'static str),
    /// A value whose shape is wrong where the kernel reports a fault.
    Fault,
    /// The node has as many sockets as it may have.
    TooManySockets,
    /// Peers may use as many regions of memory of the node as its limit allows.
    TooManyRegions,
    /// The socket has as many ends of RDMA operations, or of sends without a copy, unread as it may
    /// have.
    TooManyStatuses,
    /// The node has as many peers as it may have.
    TooManyPeers,
    /// The list of peers does not permit the destination.
    PeerNotPermitted,
    /// What is not acknowledged waits for a peer that has ended, and nobody has taken its place.
    PeerEnded,
}

/// A message, or an RDMA transfer, that is longer than a limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct TooLong {
    /// Its length in bytes.
    pub len: usize,
    /// Most bytes that would have been taken; for [`LengthLimit::Pieces`] pieces.
    pub limit: usize,
    /// What has that limit.
    pub of: LengthLimit,
}

impl TooLong {
    /// Makes the reason of an error.
    pub const fn new(len: usize, limit: usize, of: LengthLimit) -> Self {
        Self { len, limit, of }
    }
}

/// What limits the length of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum LengthLimit {
    /// The send buffer of the socket.
    SendBuffer,
    /// The longest message of this node.
    Node,
    /// The longest message that the peer takes: what its node is set to, 1 MiB for a kernel.
    Peer,
    /// What an RDMA transfer or registered memory may have.
    Transfer,
    /// The number of pieces of local memory in an RDMA transfer.
    Pieces,
}

impl fmt::Display for TooLong {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { len, limit, of } = self;
        match of {
            LengthLimit::SendBuffer => write!(
                f,
                "the message of {len} bytes is longer than the send buffer of {limit}: enlarge the \
                 socket's send buffer, or split the message"
            ),
            LengthLimit::Node => write!(
                f,
                "the message of {len} bytes is longer than the {limit} that this node sends: raise \
                 its longest message, or split the message"
            ),
            LengthLimit::Peer => write!(
                f,
                "the message of {len} bytes is longer than the {limit} that the peer takes: raise \
                 the longest message of its node, which a kernel cannot, or split the message"
            ),
            LengthLimit::Transfer => write!(
                f,
                "the transfer or memory of {len} bytes is longer than the {limit} that one may \
                 have: split it"
            ),
            LengthLimit::Pieces => write!(
                f,
                "the transfer of {len} bytes has more than {limit} pieces of memory: split it"
            ),
        }
    }
}

impl Error {
    /// A message that is too long.
    pub(crate) const fn too_long(len: usize, limit: usize, of: LengthLimit) -> Self {
        Self::MessageTooLong(TooLong::new(len, limit, of))
    }

    /// Returns the errno that Linux's own RDS gives in this case.
    pub const fn errno(&self) -> Errno {
        match self {
            Self::BadSocket => Errno::EBADF,
            Self::QueueFull | Self::HandshakePending | Self::Empty | Self::TooManyRegions => {
                Errno::EAGAIN
            }
            Self::TooManyPeers => Errno::ENOMEM,
            Self::Fault => Errno::EFAULT,
            Self::AlreadyBound
            | Self::ReservedPort
            | Self::BadAddress
            | Self::ScopeMismatch
            | Self::BadControl
            | Self::BadValue
            | Self::BadSetting(_) => Errno::EINVAL,
            Self::TooManySockets => Errno::ENFILE,
            Self::DestinationRequired => Errno::EDESTADDRREQ,
            Self::MessageTooLong(_) => Errno::EMSGSIZE,
            Self::WrongProtocolType => Errno::EPROTOTYPE,
            Self::NoSuchOption | Self::TransportAddress => Errno::ENOPROTOOPT,
            Self::FamilyMismatch | Self::NotSupported => Errno::EOPNOTSUPP,
            Self::AddrInUse => Errno::EADDRINUSE,
            Self::AddrNotAvailable => Errno::EADDRNOTAVAIL,
            Self::Congested | Self::TooManyStatuses => Errno::ENOBUFS,
            Self::NotConnected => Errno::ENOTCONN,
            Self::PeerNotPermitted => Errno::EHOSTUNREACH,
            Self::PeerEnded => Errno::ECONNREFUSED,
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = match self {
            Self::BadSocket => "the socket is closed",
            Self::NotConnected => "the socket is not bound or has no destination: bind it first",
            Self::AlreadyBound => "the socket is bound already: use another socket",
            Self::ReservedPort => "port 1 is reserved for the path handshake: choose another port",
            Self::BadAddress => {
                "the address is unspecified, broadcast, multicast or lacks its scope: \
                 give a unicast address"
            }
            Self::ScopeMismatch => "the two addresses are on different interfaces",
            Self::AddrNotAvailable => {
                "the address is not local: a socket binds to one of its node's addresses, a node to \
                one of this machine's (`ip address`)"
            }
            Self::TransportAddress => "the chosen transport cannot serve this address",
            Self::AddrInUse => "the port is taken on this address: choose another or 0 for any",
            Self::DestinationRequired => "a destination address is required",
            Self::WrongProtocolType => "the address cannot be connected to",
            Self::FamilyMismatch => "IPv4 and IPv6 addresses cannot be mixed",
            Self::MessageTooLong(too_long) => return too_long.fmt(f),
            Self::QueueFull => "the send queue is full: wait until the socket is writable",
            Self::Congested => "the destination port is congested: wait and send again",
            Self::HandshakePending => "the peer is not known yet: wait and send again",
            Self::Empty => "nothing to receive yet",
            Self::BadControl => "invalid control messages, or an invalid combination of them",
            Self::NotSupported => "the transport does not support this",
            Self::NoSuchOption => "no such option on this transport",
            Self::BadValue => "the value is outside its range",
            Self::BadSetting(range) => return write!(f, "the value is not {range}"),
            Self::Fault => "the value has the wrong size or shape",
            Self::TooManySockets => "the node has as many sockets as its limit allows",
            Self::TooManyRegions => "the node has as many regions of memory as its limit allows",
            Self::TooManyStatuses => {
                "too many completions of operations or of zero-copy sends are queued: receive \
                 them and send again"
            }
            Self::TooManyPeers => "the node has as many peers as its limit allows",
            Self::PeerEnded => {
                "the peer's node has ended without acknowledging everything: the rest waits for \
                 another node there"
            }
            Self::PeerNotPermitted => "the node's list of peers does not permit this destination",
        };
        f.write_str(text)
    }
}

impl core::error::Error for Error {}
