//! Error numbers of Linux: what travels in RTRS and RNBD, and what programs are told.

use core::fmt;

/// An error number of Linux: positive, never 0.
///
/// It is shown for people who read an error line: what it means, then the name to look for. `Debug`
/// is the same, because `main` prints this form when it returns the error.
///
/// ```
/// use bowline_base::Errno;
///
/// assert_eq!(Errno::EBUSY.to_string(), "busy (EBUSY)");
/// assert_eq!(Errno::EBUSY.name(), Some("EBUSY"));
/// ```
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Errno(pub i32);

macro_rules! errnos {
    ($($name:ident = $number:literal, $text:literal;)*) => {
        impl Errno {
            $(#[doc = concat!("`", stringify!($name), "`: ", $text, ".")]
            pub const $name: Self = Self($number);)*

            /// Returns its name in C, as `EIO`; `None` for a number that has no constant here.
            pub const fn name(self) -> Option<&'static str> {
                match self.0 {
                    $($number => Some(stringify!($name)),)*
                    _ => None,
                }
            }

            /// Returns what it means; `None` for a number that has no constant here.
            pub const fn text(self) -> Option<&'static str> {
                match self.0 {
                    $($number => Some($text),)*
                    _ => None,
                }
            }
        }
    };
}

// A text is right whoever says it: a session, a disk, its storage or the system.
errnos! {
    EPERM = 1, "not permitted";
    ENOENT = 2, "not found";
    EINTR = 4, "interrupted by a signal";
    EIO = 5, "input or output error";
    ENXIO = 6, "no such session, device or address";
    EBADF = 9, "not an open file or socket";
    EAGAIN = 11, "try again";
    ENOMEM = 12, "out of memory, or over a limit";
    EACCES = 13, "access denied";
    EFAULT = 14, "wrong size or shape of a value";
    ENOTBLK = 15, "not a block device";
    EBUSY = 16, "busy";
    EEXIST = 17, "exists already";
    ENODEV = 19, "no such device";
    ENOTDIR = 20, "not a directory";
    EISDIR = 21, "is a directory";
    EINVAL = 22, "invalid argument";
    ENFILE = 23, "too many open files in all";
    EMFILE = 24, "too many open files";
    ENOTTY = 25, "no such request for this file or socket";
    ENOSPC = 28, "no space left";
    EDOM = 33, "outside the range of the argument";
    ERANGE = 34, "out of range";
    ELOOP = 40, "too many links one behind the other";
    EBADE = 52, "reserved by somebody else";
    ENODATA = 61, "no data there";
    ETIME = 62, "time is up";
    ENOLINK = 67, "link cut";
    ECOMM = 70, "no path is connected";
    EOVERFLOW = 75, "too large";
    EILSEQ = 84, "data fails its check";
    ENOTSOCK = 88, "not a socket";
    EDESTADDRREQ = 89, "no destination address";
    EMSGSIZE = 90, "message too long";
    EPROTOTYPE = 91, "wrong kind of address";
    ENOPROTOOPT = 92, "no such option";
    EPROTONOSUPPORT = 93, "protocol not supported";
    ESOCKTNOSUPPORT = 94, "socket type not supported";
    EOPNOTSUPP = 95, "not supported";
    EAFNOSUPPORT = 97, "address family not supported";
    EADDRINUSE = 98, "address in use";
    EADDRNOTAVAIL = 99, "not an address of this machine";
    ENETDOWN = 100, "network is down";
    ECONNABORTED = 103, "connection aborted";
    ECONNRESET = 104, "connection reset by peer";
    ENOBUFS = 105, "no buffer space, or the port is congested";
    ENOTCONN = 107, "not connected, or not open";
    ESHUTDOWN = 108, "shut down";
    ETOOMANYREFS = 109, "too many references";
    ETIMEDOUT = 110, "timed out";
    ECONNREFUSED = 111, "connection refused";
    EHOSTUNREACH = 113, "no route to host";
    EALREADY = 114, "done already, or under way";
    EREMOTEIO = 121, "input or output error of the far side";
}

impl Errno {
    /// Returns the number of a system error, `EIO` for an error that did not come from the system.
    #[cfg(feature = "std")]
    pub fn of(error: &std::io::Error) -> Self {
        error.raw_os_error().map_or(Self::EIO, Self)
    }

    /// Returns the kind that the standard library has for it, or else the nearest one: `Other` when
    /// none is near.
    ///
    /// ```
    /// use std::io::ErrorKind;
    ///
    /// use bowline_base::Errno;
    ///
    /// assert_eq!(Errno::ETIMEDOUT.kind(), ErrorKind::TimedOut);
    /// assert_eq!(Errno::EMSGSIZE.kind(), ErrorKind::InvalidInput);
    /// ```
    #[cfg(feature = "std")]
    pub fn kind(self) -> std::io::ErrorKind {
        use std::io::ErrorKind;
        let kind = |errno| std::io::Error::from_raw_os_error(errno).kind();
        match self {
            Self::EMSGSIZE | Self::EDESTADDRREQ | Self::EPROTOTYPE | Self::EFAULT => {
                ErrorKind::InvalidInput
            }
            Self::ENOPROTOOPT
            | Self::EPROTONOSUPPORT
            | Self::ESOCKTNOSUPPORT
            | Self::EAFNOSUPPORT => ErrorKind::Unsupported,
            Self::ENXIO | Self::ENODEV => ErrorKind::NotFound,
            Self::ESHUTDOWN => ErrorKind::BrokenPipe,
            Self::ETIME => ErrorKind::TimedOut,
            Self::EILSEQ => ErrorKind::InvalidData,
            Self::ENFILE | Self::EMFILE => ErrorKind::QuotaExceeded,
            // The kind of numbers that the library knows no kind for has no name.
            Self(errno) if kind(errno) == kind(i32::MAX) => ErrorKind::Other,
            Self(errno) => kind(errno),
        }
    }

    /// Makes an error of the standard library from one that has this number: its text and its
    /// `Debug` stay, and `downcast` gives it back. `raw_os_error` is `None`.
    #[cfg(feature = "std")]
    pub fn wrap(self, error: impl core::error::Error + Send + Sync + 'static) -> std::io::Error {
        std::io::Error::new(self.kind(), error)
    }

    /// Returns the text of the C library, as strerror(3).
    ///
    /// ```
    /// assert_eq!(bowline_base::Errno::EEXIST.strerror(), "File exists");
    /// ```
    #[cfg(feature = "std")]
    pub fn strerror(self) -> String {
        let text = alloc::format!("{}", std::io::Error::from(self));
        match text.rfind(" (os error") {
            Some(end) => text[..end].into(),
            None => text,
        }
    }

    /// Returns the error as results carry it: negative.
    pub const fn neg(self) -> i32 {
        -self.0
    }
}

/// Compares with a number such as libc's constants.
impl PartialEq<i32> for Errno {
    fn eq(&self, number: &i32) -> bool {
        self.0 == *number
    }
}

impl fmt::Debug for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.text(), self.name()) {
            (Some(text), Some(name)) => write!(f, "{text} ({name})"),
            _ => write!(f, "error {}", self.0),
        }
    }
}

impl core::error::Error for Errno {}

#[cfg(feature = "std")]
impl From<Errno> for std::io::Error {
    fn from(errno: Errno) -> Self {
        Self::from_raw_os_error(errno.0)
    }
}

#[cfg(test)]
mod tests {
    use alloc::{format, string::ToString};

    use super::*;

    #[test]
    fn errors_say_what_they_mean_and_their_names() {
        assert_eq!(Errno::EPERM.to_string(), "not permitted (EPERM)");
        assert_eq!(format!("{:?}", Errno::EPERM), "not permitted (EPERM)");
        assert_eq!(Errno(4000).to_string(), "error 4000");
        assert_eq!(Errno(4000).name(), None);
        assert_eq!(Errno::EIO.neg(), -5);
    }
}
