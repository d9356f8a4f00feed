//! The error of a verb.

use core::fmt;

use bowline_base::Errno;

/// The error of a verb; a verb that fails has changed nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Error {
    /// No such object, or it belongs to another owner. `EINVAL`.
    NoSuch(&'static str),
    /// The object is still in use. `EBUSY`.
    Busy(&'static str),
    /// An argument or attribute is invalid, or not allowed in this state. `EINVAL`.
    Invalid(&'static str),
    /// The queue is full. `ENOMEM`, as verbs have it.
    QueueFull,
    /// A limit of the device or of the settings is reached. `ENOMEM`.
    Limit(&'static str),
    /// Address in use. `EADDRINUSE`.
    AddrInUse(String),
    /// Not an address of this device. `EADDRNOTAVAIL`.
    AddrNotAvailable,
    /// The provider does not support this. `EOPNOTSUPP`.
    NotSupported(&'static str),
    /// The time limit has passed. `ETIMEDOUT`.
    TimedOut,
    /// The device is closed. `ENODEV`.
    Closed,
    /// A system call failed.
    System {
        /// The action that failed, and advice where there is any.
        what: String,
        /// The errno of the system.
        errno: Errno,
    },
}

impl Error {
    /// Returns the errno that a verbs program would get.
    pub const fn errno(&self) -> Errno {
        match self {
            Self::NoSuch(_) | Self::Invalid(_) => Errno::EINVAL,
            Self::Busy(_) => Errno::EBUSY,
            Self::QueueFull | Self::Limit(_) => Errno::ENOMEM,
            Self::AddrInUse(_) => Errno::EADDRINUSE,
            Self::AddrNotAvailable => Errno::EADDRNOTAVAIL,
            Self::NotSupported(_) => Errno::EOPNOTSUPP,
            Self::TimedOut => Errno::ETIMEDOUT,
            Self::Closed => Errno::ENODEV,
            Self::System { errno, .. } => *errno,
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoSuch(what) => write!(f, "no such {what}"),
            Self::Busy(what) => write!(f, "{what} is still in use"),
            Self::Invalid(what) => write!(f, "{what}"),
            Self::QueueFull => write!(f, "the queue is full"),
            Self::Limit(what) => write!(f, "the limit of {what} is reached"),
            Self::AddrInUse(what) => write!(f, "{what}"),
            Self::AddrNotAvailable => write!(f, "not an address of this device"),
            Self::NotSupported(what) => write!(f, "{what} is not supported by this provider"),
            Self::TimedOut => write!(f, "timed out"),
            Self::Closed => write!(f, "the device is closed"),
            Self::System { what, errno } => {
                write!(f, "{what}: {}", std::io::Error::from_raw_os_error(errno.0))
            }
        }
    }
}

impl std::error::Error for Error {}
