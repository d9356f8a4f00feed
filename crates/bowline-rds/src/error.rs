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
    /// The message is longer than `limit` bytes.
    MessageTooLong {
        /// Bytes of the message.
        len: usize,
        /// Most bytes that would have been taken.
        limit: usize,
    },
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
    /// A value whose shape is wrong where the kernel reports a fault.
    Fault,
    /// The node has as many sockets as it may have.
    TooManySockets,
    /// The node has as many peers as it may have.
    TooManyPeers,
    /// The list of peers does not permit the destination.
    PeerNotPermitted,
}

impl Error {
    /// Returns the errno that Linux's own RDS gives in this case.
    pub const fn errno(&self) -> Errno {
        match self {
            Self::BadSocket => Errno::EBADF,
            Self::QueueFull | Self::HandshakePending | Self::Empty => Errno::EAGAIN,
            Self::TooManyPeers => Errno::ENOMEM,
            Self::Fault => Errno::EFAULT,
            Self::AlreadyBound
            | Self::ReservedPort
            | Self::BadAddress
            | Self::ScopeMismatch
            | Self::BadControl
            | Self::BadValue => Errno::EINVAL,
            Self::TooManySockets => Errno::ENFILE,
            Self::DestinationRequired => Errno::EDESTADDRREQ,
            Self::MessageTooLong { .. } => Errno::EMSGSIZE,
            Self::WrongProtocolType => Errno::EPROTOTYPE,
            Self::NoSuchOption | Self::TransportAddress => Errno::ENOPROTOOPT,
            Self::FamilyMismatch | Self::NotSupported => Errno::EOPNOTSUPP,
            Self::AddrInUse => Errno::EADDRINUSE,
            Self::AddrNotAvailable => Errno::EADDRNOTAVAIL,
            Self::Congested => Errno::ENOBUFS,
            Self::NotConnected => Errno::ENOTCONN,
            Self::PeerNotPermitted => Errno::EHOSTUNREACH,
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
                "the address is not local to this node: bind to one of the node's addresses"
            }
            Self::TransportAddress => "the chosen transport cannot serve this address",
            Self::AddrInUse => "the port is taken on this address: choose another or 0 for any",
            Self::DestinationRequired => "a destination address is required",
            Self::WrongProtocolType => "the address cannot be connected to",
            Self::FamilyMismatch => "IPv4 and IPv6 addresses cannot be mixed",
            Self::MessageTooLong { len, limit } => {
                return write!(
                    f,
                    "the message of {len} bytes is longer than the {limit} that are possible: \
                     raise the send buffer or the node's message limit, or split it"
                );
            }
            Self::QueueFull => "the send queue is full: wait until the socket is writable",
            Self::Congested => "the destination port is congested: wait and send again",
            Self::HandshakePending => "the peer is not known yet: wait and send again",
            Self::Empty => "nothing to receive yet",
            Self::BadControl => "the control messages cannot be used, or not together",
            Self::NotSupported => "the transport does not support this",
            Self::NoSuchOption => "no such option on this transport",
            Self::BadValue => "the value is outside its range",
            Self::Fault => "the value has the wrong size or shape",
            Self::TooManySockets => "the node has as many sockets as its limit allows",
            Self::TooManyPeers => "the node has as many peers as its limit allows",
            Self::PeerNotPermitted => "the node's list of peers does not permit this destination",
        };
        f.write_str(text)
    }
}

impl core::error::Error for Error {}
