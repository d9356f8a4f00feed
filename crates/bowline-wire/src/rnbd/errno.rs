//! Which errors reach an application.

use bowline_base::Errno;

/// Returns the magnitude of the errno an application sees for one that a server sent: those that
/// have a block status of their own stay, all others are EIO; 0 stays 0 [NB-26].
#[doc(alias = "errno_to_blk_status")]
pub const fn status_of_errno(errno: u16) -> u16 {
    if errno == 0 {
        return 0;
    }
    match Errno(errno as i32) {
        Errno::EOPNOTSUPP       // not supported
        | Errno::ETIMEDOUT      // timeout
        | Errno::ENOSPC         // no space
        | Errno::ENOLINK        // transport
        | Errno::EREMOTEIO      // target
        | Errno::EBADE          // reservation conflict
        | Errno::ENODATA        // medium
        | Errno::EILSEQ         // protection
        | Errno::ENOMEM         // resource
        | Errno::EBUSY          // device resource
        | Errno::EAGAIN         // again
        | Errno::ENODEV         // offline
        | Errno::ETOOMANYREFS   // zone open limit
        | Errno::EOVERFLOW      // zone active limit
        | Errno::ETIME          // duration limit
        | Errno::EINVAL         // invalid
        => errno,
        _ => Errno::EIO.0 as u16,
    }
}

#[cfg(test)]
mod tests {
    use super::status_of_errno;

    // tests [NB-26]
    #[test]
    fn keeps_sixteen_errors_and_makes_io_errors_of_the_rest() {
        let kept = (1..=0x1ff).filter(|errno| status_of_errno(*errno) == *errno);
        assert_eq!(
            kept.collect::<alloc::vec::Vec<_>>(),
            [5, 11, 12, 16, 19, 22, 28, 52, 61, 62, 67, 75, 84, 95, 109, 110, 121]
        );
        assert_eq!(status_of_errno(0), 0);
        for errno in [1, 107, 103, 511] {
            assert_eq!(status_of_errno(errno), 5);
        }
    }
}
