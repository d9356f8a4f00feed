//! Unpredictable bytes, from the system.

use rustix::io::Errno;
use rustix::rand::{GetRandomFlags, getrandom};

/// Returns unpredictable bytes, fit for keys that a stranger must not guess.
///
/// # Errors
/// Those of getrandom(2): `ENOSYS` before Linux 3.17.
pub fn random_bytes<const N: usize>() -> std::io::Result<[u8; N]> {
    let mut bytes = [0; N];
    let mut filled = 0;
    while filled < N {
        match getrandom(&mut bytes[filled..], GetRandomFlags::empty()) {
            Ok(count) => filled += count,
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(bytes)
}

/// Returns an unpredictable number.
///
/// # Panics
/// When the system gives no random bytes, as before Linux 3.17.
#[must_use]
pub fn random_u64() -> u64 {
    u64::from_ne_bytes(random_bytes().expect("getrandom(2), which Linux has since 3.17"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn random_bytes_differ() {
        let one: [u8; 16] = random_bytes().expect("bytes");
        assert_ne!(one, random_bytes().expect("bytes"));
    }
}
