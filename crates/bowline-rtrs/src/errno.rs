//! Error numbers, those of Linux.

use core::fmt;

/// An error number, positive, never 0.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Errno(pub i32);

macro_rules! numbers {
    ($($name:ident = $number:literal, $text:literal;)*) => {
        impl Errno {
            $(#[doc = concat!("`", stringify!($name), "`: ", $text, ".")]
            pub const $name: Self = Self($number);)*

            /// The name in C; `None` for a number this crate does not use.
            pub const fn name(self) -> Option<&'static str> {
                match self.0 {
                    $($number => Some(stringify!($name)),)*
                    _ => None,
                }
            }

            /// What it means; `None` for a number this crate does not use.
            pub const fn text(self) -> Option<&'static str> {
                match self.0 {
                    $($number => Some($text),)*
                    _ => None,
                }
            }
        }
    };
}

numbers! {
    EPERM = 1, "not permitted";
    EIO = 5, "input or output error";
    ENXIO = 6, "no such session";
    EAGAIN = 11, "try again";
    ENOMEM = 12, "out of memory";
    EBUSY = 16, "busy";
    EEXIST = 17, "exists already";
    ENODEV = 19, "no such device";
    EINVAL = 22, "invalid argument";
    ENOSPC = 28, "no space left";
    ERANGE = 34, "out of range";
    ECOMM = 70, "no path is connected";
    EMSGSIZE = 90, "message too long";
    EOPNOTSUPP = 95, "not supported";
    EADDRINUSE = 98, "address in use";
    EADDRNOTAVAIL = 99, "not an address of this machine";
    ECONNABORTED = 103, "connection aborted";
    ECONNRESET = 104, "connection reset by peer";
    ENOTCONN = 107, "not connected";
    ETIMEDOUT = 110, "timed out";
    ECONNREFUSED = 111, "connection refused";
    EHOSTUNREACH = 113, "no route to host";
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
            Some(text) => f.write_str(text),
            None => write!(f, "error {}", self.0),
        }
    }
}

impl core::error::Error for Errno {}
