//! Why a verb was refused.

use core::fmt;

use bowline_base::Errno;

/// Why a verb was refused; nothing has changed then.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Error {
    /// No such object, or it belongs to another. `EINVAL`.
    NoSuch(&'static str),
    /// The object is still in use. `EBUSY`.
    Busy(&'static str),
    /// An argument or attribute is not right, or not in this state. `EINVAL`.
    Invalid(&'static str),
    /// The queue is full. `ENOMEM`, as verbs have it.
    QueueFull,
    /// A limit of the device or of the settings. `ENOMEM`.
    Limit(&'static str),
    /// Address in use. `EADDRINUSE`.
    AddrInUse(String),
    /// Not an address of this device. `EADDRNOTAVAIL`.
    AddrNotAvailable,
    /// The provider cannot do this. `EOPNOTSUPP`.
    NotSupported(&'static str),
    /// The time is over. `ETIMEDOUT`.
    TimedOut,
    /// The device is closed. `ENODEV`.
    Closed,
    /// The system refused: what was done, the errno, and what to do about it.
    System {
        /// What was tried, and what may help.
        what: String,
        /// The system's number.
        errno: Errno,
    },
}

impl Error {
    /// The errno a verbs program would see.
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
