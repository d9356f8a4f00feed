//! Unpredictable numbers from the system.

use bowline_base::entropy::random_bytes;
use bowline_wire::rtrs::Uuid;

use crate::Error;

/// Returns unpredictable bytes.
fn bytes<const N: usize>() -> Result<[u8; N], Error> {
    random_bytes().map_err(|error| Error::system("asking for random bytes", &error))
}

/// Makes a random UUID of version 4 [RT-1].
pub(crate) fn uuid() -> Result<Uuid, Error> {
    let mut uuid: [u8; 16] = bytes()?;
    uuid[6] = uuid[6] & 0x0f | 0x40;
    uuid[8] = uuid[8] & 0x3f | 0x80;
    Ok(Uuid(uuid))
}

/// Makes a random number.
pub(crate) fn number() -> Result<u64, Error> {
    Ok(u64::from_le_bytes(bytes()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uuids_are_random_ones_and_differ() {
        let (a, b) = (uuid().unwrap(), uuid().unwrap());
        assert_ne!(a.0, b.0);
        assert_eq!((a.0[6] >> 4, a.0[8] >> 6), (4, 2));
    }
}
