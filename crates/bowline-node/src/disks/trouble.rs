//! Why something about a disk failed: a text for people, and the error number that the control tree
//! answers with.

use std::{fmt, io};

use bowline_ctl::Errno;

use crate::Failure;

/// Why something failed.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Trouble {
    /// The text.
    pub text: String,
    /// The number.
    pub errno: Errno,
}

impl Trouble {
    /// Returns a failure with a text of one line.
    pub fn new(text: impl Into<String>, errno: Errno) -> Self {
        Self { text: text.into(), errno }
    }

    /// Returns the failure that a system call has told.
    pub fn io(text: String, error: &io::Error) -> Self {
        let errno = match error.kind() {
            io::ErrorKind::ResourceBusy => Errno::EBUSY,
            _ => Errno::of(error),
        };
        Self { text, errno }
    }
}

impl fmt::Display for Trouble {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl From<bowline_rnbd_driver::Error> for Trouble {
    fn from(error: bowline_rnbd_driver::Error) -> Self {
        Self { text: error.to_string(), errno: error.errno() }
    }
}

impl From<Trouble> for Failure {
    fn from(trouble: Trouble) -> Self {
        Self::Failed(trouble.text)
    }
}
