//! Errors as Linux numbers them: what travels on the wire and what applications see.

use core::fmt;

/// An error as Linux numbers it: positive, never 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Errno(pub i32);

macro_rules! errnos {
    ($($(#[$doc:meta])* $name:ident = $value:literal;)*) => {
        impl Errno {
            $($(#[$doc])* pub const $name: Self = Self($value);)*

            /// Returns the name of the error, as `EIO`, if it is one of those used here.
            pub const fn name(self) -> Option<&'static str> {
                match self.0 {
                    $($value => Some(stringify!($name)),)*
                    _ => None,
                }
            }
        }
    };
}

errnos! {
    /// Not allowed: the access mode, or somebody else's claim, forbids it.
    EPERM = 1;
    /// No such export.
    ENOENT = 2;
    /// An IO error, also what an application sees for errors block devices do not have.
    EIO = 5;
    /// No such device or address: the session does not exist and there is no path to make it.
    ENXIO = 6;
    /// Try again.
    EAGAIN = 11;
    /// No memory, or a limit of the other side is reached.
    ENOMEM = 12;
    /// The file may not be opened so.
    EACCES = 13;
    /// Not a block device.
    ENOTBLK = 15;
    /// In use.
    EBUSY = 16;
    /// There is one already.
    EEXIST = 17;
    /// The device is gone.
    ENODEV = 19;
    /// Not a directory.
    ENOTDIR = 20;
    /// The request is malformed or breaks a limit.
    EINVAL = 22;
    /// Too many open files.
    EMFILE = 24;
    /// No space left in the storage.
    ENOSPC = 28;
    /// Bad exchange: a reservation of somebody else.
    EBADE = 52;
    /// The medium has no data there.
    ENODATA = 61;
    /// Time is up for this command.
    ETIME = 62;
    /// The link to the storage is cut.
    ENOLINK = 67;
    /// Communication failed: the session is not up.
    ECOMM = 70;
    /// Too large for its type.
    EOVERFLOW = 75;
    /// The checksum of the data is wrong.
    EILSEQ = 84;
    /// The message does not fit.
    EMSGSIZE = 90;
    /// Not supported.
    EOPNOTSUPP = 95;
    /// The connection was given up.
    ECONNABORTED = 103;
    /// The connection was reset.
    ECONNRESET = 104;
    /// Not connected; of a device id: not open.
    ENOTCONN = 107;
    /// Shut down.
    ESHUTDOWN = 108;
    /// Too many references.
    ETOOMANYREFS = 109;
    /// Took too long.
    ETIMEDOUT = 110;
    /// Already under way, or already so.
    EALREADY = 114;
    /// An IO error of the far side.
    EREMOTEIO = 121;
}

impl Errno {
    /// Returns the error as results carry it: negative.
    pub const fn neg(self) -> i32 {
        -self.0
    }
}

impl fmt::Display for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name() {
            Some(name) => write!(f, "{name} ({})", self.0),
            None => write!(f, "errno {}", self.0),
        }
    }
}

impl core::error::Error for Errno {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_say_their_names() {
        assert_eq!(Errno::EPERM.to_string(), "EPERM (1)");
        assert_eq!(Errno(4000).to_string(), "errno 4000");
        assert_eq!(Errno::EIO.neg(), -5);
    }
}
