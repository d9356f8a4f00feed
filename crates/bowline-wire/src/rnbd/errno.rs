//! Which errors reach an application.

/// Returns the magnitude of the errno an application sees for one that a server sent: those that
/// have a block status of their own stay, all others are EIO; 0 stays 0 [NB-26].
#[doc(alias = "errno_to_blk_status")]
pub const fn status_of_errno(errno: u16) -> u16 {
    const EIO: u16 = 5;
    match errno {
        0       // success
        | 95    // EOPNOTSUPP: not supported
        | 110   // ETIMEDOUT: timeout
        | 28    // ENOSPC: no space
        | 67    // ENOLINK: transport
        | 121   // EREMOTEIO: target
        | 52    // EBADE: reservation conflict
        | 61    // ENODATA: medium
        | 84    // EILSEQ: protection
        | 12    // ENOMEM: resource
        | 16    // EBUSY: device resource
        | 11    // EAGAIN: again
        | 19    // ENODEV: offline
        | 109   // ETOOMANYREFS: zone open limit
        | 75    // EOVERFLOW: zone active limit
        | 62    // ETIME: duration limit
        | 22    // EINVAL: invalid
        => errno,
        _ => EIO,
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
