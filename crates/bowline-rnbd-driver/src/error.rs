//! The error of calls of this crate.

use std::fmt;
use std::io;

use bowline_rnbd::Errno;
use bowline_rtrs_driver::client::Refusal;
use bowline_wire::rnbd::Access;

/// A failed call: what was tried, the error number, and a [kind](Self::kind) to act on.
#[derive(Clone, PartialEq, Eq)]
pub struct Error {
    what: String,
    errno: Errno,
    stage: Stage,
    refusal: Option<Refusal>,
    /// What to do about it.
    hint: Option<&'static str>,
}

/// What failed: the same error numbers mean different things.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// A call of this process.
    Call,
    /// Opening the session; `what` contains the reason.
    Session,
    /// The server's opening of the disk.
    Open,
}

/// What a program may want to tell apart: the kind of an [`Error`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The server cannot be reached, or something else answers there.
    CannotConnect,
    /// The server refused the session: [`Error::refusal`] may tell how.
    Refused,
    /// There is no disk, export or file of this name, for this session.
    NotFound,
    /// The session may only read the disk, or not use it at all; the file may not be opened.
    NotPermitted,
    /// Another session has the disk open for writing; a client has the export open.
    InUse,
    /// The name is taken, or the session has the disk already.
    Exists,
    /// The disk is not mapped, or is being unmapped.
    NotMapped,
    /// A wrong use of a call: options that do not fit, a name that cannot be sent, no path.
    Misuse,
    /// A limit of the system or of the server is reached: memory, descriptors, threads, disks.
    Limit,
    /// The session is closed, or its device is gone.
    Closed,
    /// The system or the server refused: [`Error::errno`] is its number.
    System,
}

impl Error {
    pub(crate) fn new(what: impl Into<String>, errno: Errno) -> Self {
        Self { what: what.into(), errno, stage: Stage::Call, refusal: None, hint: None }
    }

    pub(crate) fn io(what: impl Into<String>, error: &io::Error) -> Self {
        Self::new(what, Errno::of(error))
    }

    pub(crate) fn rtrs(error: &bowline_rtrs_driver::Error) -> Self {
        let (errno, refusal) = (error.errno(), error.refusal());
        Self { what: error.to_string(), errno, stage: Stage::Session, refusal, hint: None }
    }

    /// A server's refusal to open a disk.
    pub(crate) fn open(what: String, errno: Errno, access: Access) -> Self {
        let hint = match (errno, access) {
            (Errno::EACCES, Access::Rw | Access::Migration) => Some(
                "the server lets this session only read it, or not use it at all: to read it, set \
                 `access` to `Access::Ro`",
            ),
            (Errno::EPERM, _) => Some("another session has it open for writing"),
            (Errno::ENOENT, _) => Some("the server has no disk of this name for this session"),
            _ => None,
        };
        Self { hint, stage: Stage::Open, ..Self::new(what, errno) }
    }

    /// Returns the error number.
    pub const fn errno(&self) -> Errno {
        self.errno
    }

    /// Returns what a program may want to tell apart.
    pub const fn kind(&self) -> ErrorKind {
        match (self.errno, self.stage) {
            (Errno::ENOMEM | Errno::EMFILE | Errno::ENFILE | Errno::EAGAIN, _) => ErrorKind::Limit,
            (Errno::EINVAL, _) => ErrorKind::Misuse,
            (Errno::ENOENT, Stage::Call | Stage::Open) => ErrorKind::NotFound,
            (Errno::EACCES, Stage::Call | Stage::Open) => ErrorKind::NotPermitted,
            (Errno::EBUSY, _) | (Errno::EPERM, Stage::Open) => ErrorKind::InUse,
            (Errno::EEXIST, _) => ErrorKind::Exists,
            (Errno::ENXIO, Stage::Call) => ErrorKind::Misuse,
            (Errno::ENODEV | Errno::EALREADY, Stage::Call) => ErrorKind::NotMapped,
            (Errno::ENODEV | Errno::ECONNABORTED, _) => ErrorKind::Closed,
            (Errno::ECONNRESET | Errno::EPERM | Errno::EACCES, Stage::Session) => {
                ErrorKind::Refused
            }
            (
                Errno::ETIMEDOUT | Errno::ECONNREFUSED | Errno::EHOSTUNREACH | Errno::ENETDOWN,
                Stage::Session,
            ) => ErrorKind::CannotConnect,
            _ => ErrorKind::System,
        }
    }

    /// Returns how the server has refused a connection of the session, if it has.
    pub const fn refusal(&self) -> Option<Refusal> {
        self.refusal
    }

    /// Tells whether the session failed to open, and not the disk: the same error numbers then have
    /// other meanings.
    pub const fn is_of_session(&self) -> bool {
        matches!(self.stage, Stage::Session)
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.what)?;
        if self.is_of_session() {
            return Ok(());
        }
        write!(f, ": {}", io::Error::from_raw_os_error(self.errno.0))?;
        self.hint.map_or(Ok(()), |hint| write!(f, ": {hint}"))
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
impl From<Error> for io::Error {
    fn from(error: Error) -> Self {
        error.errno().wrap(error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reason_is_told_once() {
        let error = Error::new("mapping disk0", Errno::ENOENT);
        let text = "mapping disk0: No such file or directory (os error 2)";
        assert_eq!(error.to_string(), text);
        assert_eq!(format!("{error:?}"), text, "what a main that returns it prints");
    }

    #[test]
    fn a_disk_that_may_only_be_read_says_so() {
        let error = |access| Error::open("mapping disk0".into(), Errno::EACCES, access).to_string();
        assert!(error(Access::Rw).ends_with("set `access` to `Access::Ro`"));
        assert!(!error(Access::Ro).contains("Access::Ro"));
    }

    #[test]
    fn the_same_number_is_of_another_kind_for_a_session_and_for_a_disk() {
        let open = |errno| Error::open("mapping disk0".into(), errno, Access::Rw).kind();
        assert_eq!(open(Errno::EPERM), ErrorKind::InUse);
        assert_eq!(open(Errno::EACCES), ErrorKind::NotPermitted);
        assert_eq!(open(Errno::ENOENT), ErrorKind::NotFound);
        let stage = Stage::Session;
        let session = |errno| Error { stage, ..Error::new("opening a session", errno) }.kind();
        assert_eq!(session(Errno::EPERM), ErrorKind::Refused);
        assert_eq!(session(Errno::ETIMEDOUT), ErrorKind::CannotConnect);
        assert_eq!(session(Errno::ENODEV), ErrorKind::Closed);
        assert_eq!(Error::new("unmapping rnbd0", Errno::ENODEV).kind(), ErrorKind::NotMapped);
    }

    #[test]
    fn an_io_error_keeps_the_text_and_gives_the_error_back() {
        let error = io::Error::from(Error::new("mapping disk0", Errno::EACCES));
        assert_eq!(error.kind(), io::ErrorKind::PermissionDenied);
        assert_eq!(error.to_string(), "mapping disk0: Permission denied (os error 13)");
        let error = error.downcast::<Error>().expect("the error itself");
        assert_eq!(error.errno(), Errno::EACCES);
    }
}
