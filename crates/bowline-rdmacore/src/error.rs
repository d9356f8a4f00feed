//! Numbers of the system as errors of the verbs.

use std::io;

use bowline_base::Errno;
use bowline_verbs::{Error, InvalidReason, Resource};

/// The number of the last call of this thread that failed.
pub(crate) fn last_errno() -> i32 {
    io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO)
}

/// The error of a call that says 0, a number, or -1 with the number in `errno`.
pub(crate) fn check(result: i32) -> Result<(), i32> {
    match result {
        0 => Ok(()),
        -1 => Err(last_errno()),
        n => Err(n.saturating_abs()),
    }
}

/// An object was destroyed. That it is still in use cannot be: the tables know what uses what.
pub(crate) fn freed(result: i32, what: &str) {
    debug_assert_ne!(check(result), Err(libc::EBUSY), "{what}");
}

/// The system refused.
pub(crate) fn system(what: impl Into<String>, errno: i32) -> Error {
    Error::System { what: what.into(), errno: Errno(errno) }
}

/// As [`system`], for what needs memory or handles of the device.
pub(crate) fn limit(what: Resource, errno: i32) -> Error {
    match errno {
        libc::ENOMEM | libc::ENOSPC => Error::Limit(what),
        _ => system(format!("making one of the {what}"), errno),
    }
}

/// An error of a call about addresses; `at` is the address.
pub(crate) fn address(at: impl ToString, errno: i32) -> Error {
    match errno {
        libc::EADDRINUSE => Error::AddrInUse(format!("{} is in use", at.to_string())),
        libc::EADDRNOTAVAIL | libc::ENODEV => Error::AddrNotAvailable,
        _ => system(at.to_string(), errno),
    }
}

/// An error of posting.
pub(crate) fn post(errno: i32) -> Error {
    match errno {
        libc::ENOMEM | libc::ENOBUFS => Error::QueueFull,
        libc::EINVAL => Error::Invalid(InvalidReason::RequestRefused),
        _ => system("posting a request", errno),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_keep_their_meaning() {
        assert_eq!(check(0), Ok(()));
        assert_eq!(check(libc::EINVAL), Err(libc::EINVAL));
        assert_eq!(check(-libc::EBUSY), Err(libc::EBUSY));
        for errno in [libc::EADDRINUSE, libc::EADDRNOTAVAIL, libc::EPERM] {
            assert_eq!(address("10.0.0.1:7", errno).errno(), errno);
        }
        assert_eq!(address("10.0.0.1:7", libc::ENODEV), Error::AddrNotAvailable);
        assert_eq!(post(libc::ENOMEM), Error::QueueFull);
        assert_eq!(limit(Resource::QueuePairs, libc::ENOMEM).errno(), libc::ENOMEM);
        assert_eq!(limit(Resource::QueuePairs, libc::EPERM).errno(), libc::EPERM);
    }
}
