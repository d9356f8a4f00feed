//! Why a call was refused.

use std::fmt;
use std::io;

use bowline_rnbd::Errno;

/// Why a call was refused: what was tried, and the error number.
#[derive(Debug)]
pub struct Error {
    what: String,
    errno: Errno,
}

impl Error {
    pub(crate) fn new(what: impl Into<String>, errno: Errno) -> Self {
        Self { what: what.into(), errno }
    }

    pub(crate) fn io(what: impl Into<String>, error: &io::Error) -> Self {
        Self::new(what, errno_of(error))
    }

    pub(crate) fn rtrs(error: &bowline_rtrs_driver::Error) -> Self {
        Self { what: error.to_string(), errno: Errno(error.errno()) }
    }

    /// Returns the error number.
    pub const fn errno(&self) -> Errno {
        self.errno
    }
}

/// Returns the number of a system's error.
pub(crate) fn errno_of(error: &io::Error) -> Errno {
    Errno(error.raw_os_error().unwrap_or(Errno::EIO.0))
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.what, self.errno)
    }
}

impl std::error::Error for Error {}
