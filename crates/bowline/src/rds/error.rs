//! The error of every call.

use core::fmt;

use bowline_base::Errno;

/// Why a call failed: one line that says what to do, and an errno.
#[derive(Clone, PartialEq, Eq)]
pub struct Error(bowline_rds_driver::Error);

impl Error {
    /// Returns the errno that Linux's own RDS sockets give in this case: `EMSGSIZE` (90) for a
    /// message too long, `EAGAIN` (11) when a call that must not wait would have to, `ENOBUFS`
    /// (105) for a congested destination, `ETIMEDOUT` (110) after a time limit, `ENOTCONN` (107),
    /// `EADDRINUSE` (98), `EADDRNOTAVAIL` (99), `EINVAL` (22), `EOPNOTSUPP` (95), `ESHUTDOWN` (108)
    /// after [`Node::shutdown`](super::Node::shutdown).
    pub fn errno(&self) -> Errno {
        self.0.errno()
    }

    /// Tells whether the same call may succeed later: the queue is full or empty, the destination
    /// is congested, or the peer is not known yet.
    pub fn is_would_block(&self) -> bool {
        bowline_rds_driver::Driver::would_block(&self.0)
    }

    /// Tells whether a time limit passed.
    pub fn is_timed_out(&self) -> bool {
        self.0 == bowline_rds_driver::Error::TimedOut
    }
}

impl From<bowline_rds_driver::Error> for Error {
    fn from(error: bowline_rds_driver::Error) -> Self {
        Self(error)
    }
}

impl From<bowline_rds::Error> for Error {
    fn from(error: bowline_rds::Error) -> Self {
        Self(error.into())
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
        write!(f, "{} (errno {})", self.0, self.errno().0)
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
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
