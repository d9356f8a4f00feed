//! The error of every call.

use core::fmt;
use std::io;

use bowline_base::Errno;
use bowline_rds::{Error as Core, TooLong};
use bowline_rds_driver::Error as Driver;

/// Why a call failed: one line that says what to do, a [kind](Self::kind) to act on, and an
/// [errno](Self::errno).
///
/// It becomes an [`io::Error`] with its text, of the nearest kind there; that gives it back by
/// `io_error.downcast::<bowline::rds::Error>()`, and its own `raw_os_error()` is `None`.
#[derive(Clone, PartialEq, Eq)]
pub struct Error(Cause);

#[derive(Clone, PartialEq, Eq)]
enum Cause {
    Node(Driver),
    Host(HostError),
    NotAnAddress { text: String, wanted: &'static str },
}

/// What a program may want to tell apart: the kind of an [`Error`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// Nothing to receive, on a socket that does not wait.
    Empty,
    /// The send buffer is full: send again when messages are acknowledged.
    QueueFull,
    /// The destination does not keep up: send again when it is no longer congested.
    Congested,
    /// It is not known yet whether the peer takes so long a message: send again soon.
    PeerUnknown,
    /// A time limit passed.
    TimedOut,
    /// The message is too long: [`Error::too_long`] tells whose limit it is above.
    TooLong,
    /// The address is not one of this node.
    NotLocal,
    /// The port of a socket, or the one of RDS itself, is taken.
    AddressInUse,
    /// A text that is no address, or an address that cannot be used for this: unspecified,
    /// multicast, of the other family, of another interface or transport, or with the reserved port
    /// 1.
    BadAddress,
    /// The socket is not bound, or has no destination.
    NotConnected,
    /// The socket is closed.
    Closed,
    /// The node was shut down.
    ShutDown,
    /// A peer's node has ended in good order without acknowledging everything, and nobody has taken
    /// its place for a second.
    PeerEnded,
    /// No node serves the programs of this host.
    NoNode,
    /// The host's node has ended, and its sockets with it.
    NodeEnded,
    /// The host's node is of another version.
    OtherVersion,
    /// The node does not serve this user, or its list of peers does not have the destination.
    NotPermitted,
    /// A limit of the node, of the user or of the system is reached: sockets, peers, regions of
    /// memory, descriptors, threads.
    Limit,
    /// Not supported by this transport, node or socket, or no such option.
    NotSupported,
    /// A wrong use of a call: a value out of its range, a socket that is bound already, control
    /// messages that do not fit.
    Misuse,
    /// An RDMA device failed.
    Device,
    /// The system refused: [`Error::errno`] is its number.
    System,
}

impl ErrorKind {
    /// Tells whether the same call may succeed later.
    pub const fn is_would_block(self) -> bool {
        matches!(self, Self::Empty | Self::QueueFull | Self::Congested | Self::PeerUnknown)
    }

    fn from_core(error: Core) -> Self {
        match error {
            Core::Empty => Self::Empty,
            Core::QueueFull => Self::QueueFull,
            Core::Congested => Self::Congested,
            Core::HandshakePending => Self::PeerUnknown,
            Core::MessageTooLong(_) => Self::TooLong,
            Core::AddrNotAvailable => Self::NotLocal,
            Core::AddrInUse => Self::AddressInUse,
            Core::ReservedPort
            | Core::BadAddress
            | Core::ScopeMismatch
            | Core::TransportAddress
            | Core::DestinationRequired
            | Core::WrongProtocolType
            | Core::FamilyMismatch => Self::BadAddress,
            Core::NotConnected => Self::NotConnected,
            Core::BadSocket => Self::Closed,
            Core::PeerNotPermitted => Self::NotPermitted,
            Core::PeerEnded => Self::PeerEnded,
            Core::TooManySockets | Core::TooManyRegions | Core::TooManyPeers => Self::Limit,
            Core::NotSupported | Core::NoSuchOption => Self::NotSupported,
            _ => Self::Misuse,
        }
    }

    const fn from_system(errno: Errno) -> Self {
        match errno {
            Errno::EMFILE | Errno::ENFILE | Errno::ENOMEM | Errno::EAGAIN => Self::Limit,
            _ => Self::System,
        }
    }

    const fn from_host(error: HostError) -> Self {
        match error {
            HostError::Absent(_) => Self::NoNode,
            HostError::Version => Self::OtherVersion,
            HostError::Refused(Errno::EACCES) => Self::NotPermitted,
            HostError::Refused(_) | HostError::Buffer | HostError::SmallBuffer => Self::Limit,
            HostError::Ended => Self::NodeEnded,
            HostError::OwnersAffair | HostError::NotForIts => Self::NotSupported,
            HostError::Call(Errno::EMSGSIZE) => Self::TooLong,
            HostError::Call(Errno::ECONNREFUSED) => Self::PeerEnded,
            HostError::Call(Errno::EINVAL | Errno::EFAULT) => Self::Misuse,
            HostError::Call(Errno::EOPNOTSUPP | Errno::ENOPROTOOPT) => Self::NotSupported,
            HostError::Call(errno) => Self::from_system(errno),
        }
    }

    /// The nearest kind of the standard library; that of the errno where there is none.
    const fn io_kind(self) -> Option<io::ErrorKind> {
        Some(match self {
            Self::Empty | Self::QueueFull | Self::Congested | Self::PeerUnknown => {
                io::ErrorKind::WouldBlock
            }
            Self::TimedOut => io::ErrorKind::TimedOut,
            Self::TooLong | Self::BadAddress | Self::Misuse => io::ErrorKind::InvalidInput,
            Self::NotLocal => io::ErrorKind::AddrNotAvailable,
            Self::AddressInUse => io::ErrorKind::AddrInUse,
            Self::NotConnected => io::ErrorKind::NotConnected,
            Self::PeerEnded => io::ErrorKind::ConnectionRefused,
            Self::Closed | Self::ShutDown => io::ErrorKind::BrokenPipe,
            Self::NoNode => io::ErrorKind::NotFound,
            Self::NodeEnded => io::ErrorKind::NetworkDown,
            Self::NotPermitted => io::ErrorKind::PermissionDenied,
            Self::Limit => io::ErrorKind::QuotaExceeded,
            Self::NotSupported | Self::OtherVersion => io::ErrorKind::Unsupported,
            Self::Device | Self::System => return None,
        })
    }
}

/// What the library and the host's node have against each other.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum HostError {
    /// No node serves programs; what the system says about that.
    Absent(Errno),
    /// A node of another version does.
    Version,
    /// The node lets this process have no channel or socket.
    Refused(Errno),
    /// The node has ended.
    Ended,
    /// What was asked for is up to the node's owner.
    OwnersAffair,
    /// What this library does not do with sockets of the host's node.
    NotForIts,
    /// The buffer would be larger than the quota of this user allows.
    Buffer,
    /// A node of an earlier version has made the buffer only as large as the system lets sockets
    /// ask for.
    SmallBuffer,
    /// Another error number of a call.
    Call(Errno),
}

impl HostError {
    /// Why there is no node.
    pub(super) const fn from_search(errno: Errno) -> Self {
        match errno {
            Errno::EPROTONOSUPPORT => Self::Version,
            Errno::EACCES | Errno::EMFILE | Errno::ENFILE => Self::Refused(errno),
            _ => Self::Absent(errno),
        }
    }

    /// Why a call of a socket failed.
    pub(super) const fn from_call(errno: Errno) -> Self {
        match errno {
            Errno::EPROTONOSUPPORT => Self::Version,
            Errno::EMFILE | Errno::ENFILE => Self::Refused(errno),
            Errno::ENETDOWN => Self::Ended,
            _ => Self::Call(errno),
        }
    }

    const fn errno(self) -> Errno {
        match self {
            Self::Absent(_) => Errno::EAFNOSUPPORT,
            Self::Version => Errno::EPROTONOSUPPORT,
            Self::Ended => Errno::ENETDOWN,
            Self::OwnersAffair | Self::NotForIts => Errno::EOPNOTSUPP,
            Self::Buffer | Self::SmallBuffer => Errno::ENOBUFS,
            Self::Refused(errno) | Self::Call(errno) => errno,
        }
    }
}

impl fmt::Display for HostError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Absent(why) => write!(
                f,
                "no node serves programs of this host ({why}): start one with `bowline node`"
            ),
            Self::Version => f.write_str(
                "the host's node has another version: restart it with the version of this program",
            ),
            Self::Refused(Errno::EACCES) => f.write_str(
                "the host's node does not serve this user: see `--allow-user` of `bowline node`",
            ),
            Self::Refused(why) => write!(
                f,
                "{why}: this process, this user or the host's node has no descriptors or sockets \
                 left"
            ),
            Self::Call(Errno::ECONNREFUSED) => Core::PeerEnded.fmt(f),
            Self::Ended => f.write_str(
                "the host's node has ended, and this socket with it: start a node with `bowline \
                 node` and open a new socket",
            ),
            Self::OwnersAffair => f.write_str(
                "only the owner of the host's node can do that, with the command `bowline`",
            ),
            Self::NotForIts => f.write_str(
                "sockets of the host's node do not support this: see the documentation of the call",
            ),
            Self::Buffer => f.write_str(
                "the sockets of this user may not have so large buffers at the host's node: ask \
                 for less, or raise `send-bytes` and `recv-bytes` of the user's quota in the \
                 node's configuration",
            ),
            Self::SmallBuffer => f.write_str(
                "the host's node is of an earlier version, and its sockets' buffers are no larger \
                 than net.core.wmem_max and rmem_max: restart the node, or raise these with sysctl",
            ),
            Self::Call(errno) => errno.fmt(f),
        }
    }
}

impl Error {
    pub(super) fn not_an_address(text: &str, wanted: &'static str) -> Self {
        Self(Cause::NotAnAddress { text: text.to_owned(), wanted })
    }

    /// Returns the errno that Linux's own RDS sockets give in this case: `EMSGSIZE` (90) for a
    /// message too long, `EAGAIN` (11) when a call that must not wait would have to, `ENOBUFS`
    /// (105) for a congested destination, `ETIMEDOUT` (110) after a time limit, `ENOTCONN` (107),
    /// `EADDRINUSE` (98), `EADDRNOTAVAIL` (99), `EINVAL` (22), `EOPNOTSUPP` (95), `ESHUTDOWN` (108)
    /// after [`Node::shutdown`](super::Node::shutdown). When the host's node has ended, it is
    /// `ENETDOWN` (100).
    pub fn errno(&self) -> Errno {
        match &self.0 {
            Cause::Node(error) => error.errno(),
            Cause::Host(error) => error.errno(),
            Cause::NotAnAddress { .. } => Errno::EINVAL,
        }
    }

    /// Returns what a program may want to tell apart.
    pub fn kind(&self) -> ErrorKind {
        match &self.0 {
            Cause::Node(Driver::Core(error)) => ErrorKind::from_core(*error),
            Cause::Node(Driver::TimedOut) => ErrorKind::TimedOut,
            Cause::Node(Driver::ShutDown) => ErrorKind::ShutDown,
            Cause::Node(Driver::PortTaken { .. }) => ErrorKind::AddressInUse,
            Cause::Node(Driver::Rdma { .. }) => ErrorKind::Device,
            Cause::Node(Driver::Os { errno, .. }) => ErrorKind::from_system(*errno),
            Cause::Node(_) => ErrorKind::Misuse,
            Cause::Host(error) => ErrorKind::from_host(*error),
            Cause::NotAnAddress { .. } => ErrorKind::BadAddress,
        }
    }

    /// Returns the length of a message that is too long, and the limit that it is above. `None`
    /// for other errors, and when the host's node does not say which limit it was.
    pub fn too_long(&self) -> Option<TooLong> {
        match &self.0 {
            Cause::Node(Driver::Core(Core::MessageTooLong(too_long))) => Some(*too_long),
            _ => None,
        }
    }

    /// Tells whether the same call may succeed later: the queue is full or empty, the destination
    /// is congested, or the peer is not known yet.
    pub fn is_would_block(&self) -> bool {
        self.kind().is_would_block()
    }

    /// Tells whether a time limit passed.
    pub fn is_timed_out(&self) -> bool {
        self.kind() == ErrorKind::TimedOut
    }
}

impl From<Driver> for Error {
    fn from(error: Driver) -> Self {
        Self(Cause::Node(error))
    }
}

impl From<Core> for Error {
    fn from(error: Core) -> Self {
        Self(Cause::Node(error.into()))
    }
}

impl From<HostError> for Error {
    fn from(error: HostError) -> Self {
        Self(Cause::Host(error))
    }
}

impl From<Error> for io::Error {
    fn from(error: Error) -> Self {
        let kind = error.kind().io_kind().unwrap_or_else(|| error.errno().kind());
        Self::new(kind, error)
    }
}

/// The same text with the errno, because `main` prints this form when it returns the error.
impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self} (errno {})", self.errno().0)
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Cause::Node(error) => error.fmt(f),
            Cause::Host(error) => error.fmt(f),
            Cause::NotAnAddress { text, wanted } => write!(f, "{text:?} is not {wanted}"),
        }
    }
}

impl std::error::Error for Error {}

#[cfg(test)]
mod tests {
    use bowline_rds::LengthLimit;

    use super::*;

    #[test]
    fn a_main_that_returns_it_prints_what_to_do() {
        let error = Error::from(Driver::TimedOut);
        let text = format!("{:?}", Box::<dyn std::error::Error>::from(error.clone()));
        assert_eq!(text, format!("{error} (errno 110)"));
    }

    #[test]
    fn congested_and_full_are_told_apart_by_kind_and_may_both_succeed_later() {
        let [congested, full] = [Core::Congested, Core::QueueFull].map(Error::from);
        assert_eq!(congested.kind(), ErrorKind::Congested);
        assert_eq!(full.kind(), ErrorKind::QueueFull);
        assert!(congested.is_would_block() && full.is_would_block());
        assert_eq!(io::Error::from(congested).kind(), io::ErrorKind::WouldBlock);
        assert_eq!(io::Error::from(full).kind(), io::ErrorKind::WouldBlock);
    }

    #[test]
    fn an_io_error_keeps_the_text_and_gives_the_error_back() {
        let error = Error::from(Core::MessageTooLong(TooLong::new(9, 8, LengthLimit::Peer)));
        let io = io::Error::from(error.clone());
        assert_eq!(io.kind(), io::ErrorKind::InvalidInput);
        assert_eq!(io.to_string(), error.to_string());
        let back = io.downcast::<Error>().expect("the error itself");
        assert_eq!(back.errno(), Errno::EMSGSIZE);
        assert_eq!(back.too_long().map(|too_long| too_long.of), Some(LengthLimit::Peer));
    }

    #[test]
    fn a_message_too_long_says_whose_limit_it_is_above() {
        let text = |of| TooLong::new(9, 8, of).to_string();
        assert!(text(LengthLimit::SendBuffer).contains("send buffer of 8"));
        assert!(text(LengthLimit::Node).contains("this node"));
        assert!(text(LengthLimit::Peer).contains("the peer takes"));
    }

    #[test]
    fn errors_of_the_system_have_its_kinds() {
        let os = |errno| Error::from(Driver::Os { what: "watching", errno });
        assert_eq!(os(Errno::EMFILE).kind(), ErrorKind::Limit);
        assert_eq!(os(Errno::EACCES).kind(), ErrorKind::System);
        assert_eq!(io::Error::from(os(Errno::EACCES)).kind(), io::ErrorKind::PermissionDenied);
        let absent = Error::from(HostError::from_search(Errno::ENOENT));
        assert_eq!(absent.kind(), ErrorKind::NoNode);
        assert_eq!(io::Error::from(absent).kind(), io::ErrorKind::NotFound);
    }
}
