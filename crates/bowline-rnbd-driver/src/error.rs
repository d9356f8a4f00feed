//! The error of calls of this crate.

use std::fmt;
use std::io;

use bowline_rnbd::Errno;
use bowline_rtrs_driver::client::Refusal;

/// A failed call: what was tried, and the error number.
#[derive(Debug)]
pub struct Error {
    what: String,
    errno: Errno,
    /// The session could not be opened, and `what` contains the reason.
    of_session: bool,
    refusal: Option<Refusal>,
}

impl Error {
    pub(crate) fn new(what: impl Into<String>, errno: Errno) -> Self {
        Self { what: what.into(), errno, of_session: false, refusal: None }
    }

    pub(crate) fn io(what: impl Into<String>, error: &io::Error) -> Self {
        Self::new(what, Errno::of(error))
    }

    pub(crate) fn rtrs(error: &bowline_rtrs_driver::Error) -> Self {
        let (errno, refusal) = (error.errno(), error.refusal());
        Self { what: error.to_string(), errno, of_session: true, refusal }
    }

    /// Returns the error number.
    pub const fn errno(&self) -> Errno {
        self.errno
    }

    /// Returns how the server has refused a connection of the session, if it has.
    pub const fn refusal(&self) -> Option<Refusal> {
        self.refusal
    }

    /// Tells whether the session failed to open, and not the disk: the same error numbers then have
    /// other meanings.
    pub const fn is_of_session(&self) -> bool {
        self.of_session
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.what)?;
        if self.of_session {
            return Ok(());
        }
        write!(f, ": {}", io::Error::from_raw_os_error(self.errno.0))
    }
}

impl std::error::Error for Error {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reason_is_told_once() {
        let error = Error::new("mapping disk0", Errno::ENOENT);
        assert_eq!(error.to_string(), "mapping disk0: No such file or directory (os error 2)");
    }
}
