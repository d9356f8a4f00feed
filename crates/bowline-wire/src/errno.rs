//! Error numbers of Linux: what travels in RTRS and RNBD, and what programs are told.

use core::fmt;

/// An error number of Linux: positive, never 0.
///
/// `Display` is for people who read an error line: what it means, then the name to look for. `Debug` is the
/// name alone.
///
/// ```
/// use bowline_wire::Errno;
///
/// assert_eq!(Errno::EBUSY.to_string(), "busy (EBUSY)");
/// assert_eq!(format!("{:?}", Errno::EBUSY), "EBUSY");
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
    EIO = 5, "input or output error";
    ENXIO = 6, "no such session, device or address";
    EAGAIN = 11, "try again";
    ENOMEM = 12, "out of memory, or over a limit";
    EACCES = 13, "access denied";
    ENOTBLK = 15, "not a block device";
    EBUSY = 16, "busy";
    EEXIST = 17, "exists already";
    ENODEV = 19, "no such device";
    ENOTDIR = 20, "not a directory";
    EINVAL = 22, "invalid argument";
    EMFILE = 24, "too many open files";
    ENOSPC = 28, "no space left";
    ERANGE = 34, "out of range";
    EBADE = 52, "reserved by somebody else";
    ENODATA = 61, "no data there";
    ETIME = 62, "time is up";
    ENOLINK = 67, "link cut";
    ECOMM = 70, "no path is connected";
    EOVERFLOW = 75, "too large";
    EILSEQ = 84, "data fails its check";
    EMSGSIZE = 90, "message too long";
    EOPNOTSUPP = 95, "not supported";
    EADDRINUSE = 98, "address in use";
    EADDRNOTAVAIL = 99, "not an address of this machine";
    ECONNABORTED = 103, "connection aborted";
    ECONNRESET = 104, "connection reset by peer";
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
    /// Returns the error as results carry it: negative.
    pub const fn neg(self) -> i32 {
        -self.0
    }
}

impl fmt::Debug for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name() {
            Some(name) => f.write_str(name),
            None => write!(f, "Errno({})", self.0),
        }
    }
}

impl fmt::Display for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.text() {
            Some(text) => write!(f, "{text} ({self:?})"),
            None => write!(f, "error {}", self.0),
        }
    }
}

impl core::error::Error for Errno {}

#[cfg(test)]
mod tests {
    use alloc::{format, string::ToString};

    use super::*;

    #[test]
    fn errors_say_what_they_mean_and_their_names() {
        assert_eq!(Errno::EPERM.to_string(), "not permitted (EPERM)");
        assert_eq!(format!("{:?}", Errno::EPERM), "EPERM");
        assert_eq!(Errno(4000).to_string(), "error 4000");
        assert_eq!(format!("{:?}", Errno(4000)), "Errno(4000)");
        assert_eq!(Errno::EIO.neg(), -5);
    }
}
