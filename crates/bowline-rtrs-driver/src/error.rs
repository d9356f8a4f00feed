//! The error of a call or of a request.

use core::fmt;

use bowline_rtrs::Errno;
use bowline_rtrs::client::Refusal;

/// The error of a call or of a request.
#[derive(Clone, PartialEq, Eq)]
pub struct Error {
    what: &'static str,
    kind: ErrorKind,
    refusal: Option<Refusal>,
}

/// The kinds of [`Error`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ErrorKind {
    /// An error of the protocol or reported by the peer.
    Protocol(Errno),
    /// A device's error.
    Device(bowline_verbs::Error),
    /// The only suitable device is gone, or cannot be used.
    Unusable {
        /// Name of the device.
        device: String,
        /// The device's error.
        why: bowline_verbs::Error,
    },
    /// A system call's error.
    System(Errno),
    /// The engine, session or server is closed. `ENODEV`.
    Closed,
}

impl Error {
    const fn of(what: &'static str, kind: ErrorKind) -> Self {
        Self { what, kind, refusal: None }
    }

    pub(crate) fn refused(self, refusal: Option<Refusal>) -> Self {
        Self { refusal, ..self }
    }

    /// The server's refusal, if the server refused the connection.
    pub const fn refusal(&self) -> Option<Refusal> {
        self.refusal
    }

    pub(crate) const fn new(what: &'static str, errno: Errno) -> Self {
        Self::of(what, ErrorKind::Protocol(errno))
    }

    pub(crate) const fn closed(what: &'static str) -> Self {
        Self::of(what, ErrorKind::Closed)
    }

    pub(crate) const fn device(what: &'static str, error: bowline_verbs::Error) -> Self {
        Self::of(what, ErrorKind::Device(error))
    }

    pub(crate) const fn unusable(
        what: &'static str,
        device: String,
        why: bowline_verbs::Error,
    ) -> Self {
        Self::of(what, ErrorKind::Unusable { device, why })
    }

    pub(crate) fn system(what: &'static str, error: &std::io::Error) -> Self {
        let errno = Errno::of(error);
        Self::of(what, ErrorKind::System(errno))
    }

    /// The kind of the error.
    pub const fn kind(&self) -> &ErrorKind {
        &self.kind
    }

    /// The error number.
    pub const fn errno(&self) -> Errno {
        match &self.kind {
            ErrorKind::Protocol(errno) | ErrorKind::System(errno) => *errno,
            ErrorKind::Device(error) | ErrorKind::Unusable { why: error, .. } => error.errno(),
            ErrorKind::Closed => Errno::ENODEV,
        }
    }
}

/// The operation that was tried and its error, in one line.
impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: ", self.what)?;
        match &self.kind {
            ErrorKind::Protocol(errno) => write!(f, "{errno}"),
            ErrorKind::Device(error) => write!(f, "{error}"),
            ErrorKind::Unusable { device, why: bowline_verbs::Error::Closed } => {
                write!(f, "{device} is gone")
            }
            ErrorKind::Unusable { device, why } => write!(f, "{device}: {why}"),
            ErrorKind::System(errno) => write!(f, "{}", std::io::Error::from_raw_os_error(errno.0)),
            ErrorKind::Closed => write!(f, "it is closed"),
        }?;
        self.refusal.map_or(Ok(()), |refusal| write!(f, ", {refusal}"))
    }
}

/// The same text, because `main` prints this form when it returns the error.
impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl std::error::Error for Error {}

/// The error stays inside: `downcast` gives it back.
impl From<Error> for std::io::Error {
    fn from(error: Error) -> Self {
        error.errno().wrap(error)
    }
}
