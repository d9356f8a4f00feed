//! Errors of the driver, in addition to those of the core.

use core::fmt;
use std::net::SocketAddr;

use bowline_base::Errno;
use rustix::io::Errno as SystemErrno;

/// Why a call failed.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Error {
    /// The core refused the call.
    Core(bowline_rds::Error),
    /// The time limit of the call passed.
    TimedOut,
    /// The node is shut down.
    ShutDown,
    /// Another process listens on the RDS port, such as the kernel's module.
    PortTaken {
        /// Address and port that are taken.
        addr: SocketAddr,
    },
    /// What another node handed over cannot be used.
    HandOver {
        /// What is wrong with it.
        why: String,
    },
    /// An RDMA device cannot be used.
    Rdma {
        /// Why.
        why: String,
        /// Its error number.
        errno: Errno,
    },
    /// The operating system refused.
    Os {
        /// The operation that failed.
        what: &'static str,
        /// The system's error number.
        errno: Errno,
    },
}

impl Error {
    pub(crate) fn os(what: &'static str) -> impl Fn(SystemErrno) -> Self {
        move |errno| Self::Os { what, errno: Errno(errno.raw_os_error()) }
    }

    /// Returns the errno that Linux's own RDS would give.
    pub fn errno(&self) -> Errno {
        match self {
            Self::Core(error) => error.errno(),
            Self::TimedOut => Errno::ETIMEDOUT,
            Self::ShutDown => Errno::ESHUTDOWN,
            Self::PortTaken { .. } => Errno::EADDRINUSE,
            Self::HandOver { .. } => Errno::EINVAL,
            Self::Os { errno, .. } | Self::Rdma { errno, .. } => *errno,
        }
    }
}

impl From<bowline_verbs::Error> for Error {
    fn from(error: bowline_verbs::Error) -> Self {
        Self::Rdma { why: error.to_string(), errno: error.errno() }
    }
}

impl From<bowline_rds::Error> for Error {
    fn from(error: bowline_rds::Error) -> Self {
        Self::Core(error)
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Core(error) => error.fmt(f),
            Self::TimedOut => f.write_str("the time limit passed: try again or wait longer"),
            Self::ShutDown => f.write_str("the node is shut down: build a new one"),
            Self::PortTaken { addr } => write!(
                f,
                "{addr} is in use by the kernel's rds_tcp module or another node: unload the \
                 module, give this node another address, or run it in its own network namespace"
            ),
            Self::HandOver { why } => write!(f, "invalid state handed over: {why}"),
            Self::Rdma { why, .. } => write!(f, "RDMA device: {why}"),
            Self::Os { what, errno } => {
                write!(f, "{what}: {}", std::io::Error::from_raw_os_error(errno.0))
            }
        }
    }
}

impl std::error::Error for Error {}
