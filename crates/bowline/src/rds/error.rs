//! The error of every call.

use core::fmt;

use bowline_base::Errno;

/// Why a call failed: one line that says what to do, and an errno.
#[derive(Clone, PartialEq, Eq)]
pub struct Error(Cause);

#[derive(Clone, PartialEq, Eq)]
enum Cause {
    Node(bowline_rds_driver::Error),
    Host(HostError),
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
    /// Another error number of a call.
    Call(Errno),
}

impl HostError {
    /// Why there is no node.
    pub(super) const fn of_search(errno: Errno) -> Self {
        match errno {
            Errno::EPROTONOSUPPORT => Self::Version,
            Errno::EACCES | Errno::EMFILE | Errno::ENFILE => Self::Refused(errno),
            _ => Self::Absent(errno),
        }
    }

    /// Why a call of a socket failed.
    pub(super) const fn of_call(errno: Errno) -> Self {
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
            Self::Refused(errno) | Self::Call(errno) => errno,
        }
    }
}

impl fmt::Display for HostError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Absent(why) => write!(
                f,
                "no node serves programs of this host, {why}: start one with `bowline node`"
            ),
            Self::Version => f.write_str(
                "the host's node is of another version: restart it with the one of this program",
            ),
            Self::Refused(Errno::EACCES) => f.write_str(
                "the host's node does not serve this user: see `--allow-user` of `bowline node`",
            ),
            Self::Refused(why) => write!(
                f,
                "{why}: this process, this user or the host's node has no descriptors or sockets \
                 left"
            ),
            Self::Ended => f.write_str(
                "the host's node has ended, and this socket with it: start one with `bowline \
                 node`, and look for it again",
            ),
            Self::OwnersAffair => f.write_str(
                "that is up to whoever runs the host's node: use the command `bowline` there",
            ),
            Self::NotForIts => f.write_str(
                "sockets of the host's node do not have that: see the documentation of the call",
            ),
            Self::Call(errno) => errno.fmt(f),
        }
    }
}

impl Error {
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
        }
    }

    /// Tells whether the same call may succeed later: the queue is full or empty, the destination
    /// is congested, or the peer is not known yet.
    pub fn is_would_block(&self) -> bool {
        matches!(&self.0, Cause::Node(error) if bowline_rds_driver::Driver::would_block(error))
    }

    /// Tells whether a time limit passed.
    pub fn is_timed_out(&self) -> bool {
        self.0 == Cause::Node(bowline_rds_driver::Error::TimedOut)
    }
}

impl From<bowline_rds_driver::Error> for Error {
    fn from(error: bowline_rds_driver::Error) -> Self {
        Self(Cause::Node(error))
    }
}

impl From<bowline_rds::Error> for Error {
    fn from(error: bowline_rds::Error) -> Self {
        Self(Cause::Node(error.into()))
    }
}

impl From<HostError> for Error {
    fn from(error: HostError) -> Self {
        Self(Cause::Host(error))
    }
}

impl From<Error> for std::io::Error {
    fn from(error: Error) -> Self {
        Self::from_raw_os_error(error.errno().0)
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
        }
    }
}

impl std::error::Error for Error {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_main_that_returns_it_prints_what_to_do() {
        let error = Error::from(bowline_rds_driver::Error::TimedOut);
        let text = format!("{:?}", Box::<dyn std::error::Error>::from(error.clone()));
        assert_eq!(text, format!("{error} (errno 110)"));
    }
}
