//! Sixteen bytes at once by tables, for processors whose instructions for it are slow.
//!
//! That is those which an emulator makes up. QEMU 7.2 takes 2.7 us for the carry-less products of a
//! KiB, QEMU 10 1.1 us, if nothing else runs, and both 1.5 us for looking it up here. Within
//! bowline QEMU 10 took some 13 us for the products (on a Sapphire Rapids, which itself takes 0.03
//! us); why, is not known, but measuring at the start does not tell.

/// x^32 and the lower powers, the highest bit being that of x^0.
const POLY: u32 = 0xedb8_8320;
const AT_ONCE: usize = 16;

/// What a byte comes to with so many bytes behind it.
static TABLES: [[u32; 256]; AT_ONCE] = tables();

const fn tables() -> [[u32; 256]; AT_ONCE] {
    let mut tables = [[0; 256]; AT_ONCE];
    let mut behind = 0;
    while behind < AT_ONCE {
        let mut byte = 0;
        while byte < 256 {
            tables[behind][byte] = if behind == 0 {
                divided(byte as u32)
            } else {
                let sum = tables[behind - 1][byte];
                (sum >> 8) ^ tables[0][(sum & 0xff) as usize]
            };
            byte += 1;
        }
        behind += 1;
    }
    tables
}

/// The remainder of one byte.
const fn divided(byte: u32) -> u32 {
    let (mut sum, mut bit) = (byte, 0);
    while bit < 8 {
        sum = if sum & 1 == 1 { (sum >> 1) ^ POLY } else { sum >> 1 };
        bit += 1;
    }
    sum
}

/// Goes on with a CRC.
pub(crate) fn update(crc: u32, bytes: &[u8]) -> u32 {
    let (rows, rest) = bytes.as_chunks::<AT_ONCE>();
    let mut sum = !crc;
    for row in rows {
        // Bytes of a register: an emulator takes long for each that is fetched from memory by
        // itself.
        let row = u128::from_le_bytes(*row) ^ u128::from(sum);
        let halves = [row as u64, (row >> 64) as u64];
        sum = 0;
        for at in 0..AT_ONCE {
            let byte = (halves[at / 8] >> (at % 8 * 8)) as u8;
            sum ^= TABLES[AT_ONCE - 1 - at][usize::from(byte)];
        }
    }
    for byte in rest {
        sum = (sum >> 8) ^ TABLES[0][usize::from(sum as u8 ^ byte)];
    }
    !sum
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_length_has_the_sum() {
        let bytes: Vec<u8> = (0..400_u32).map(|n| ((n * n) >> 3) as u8).collect();
        for len in 0..bytes.len() {
            for crc in [0, !0, 0x1234_5678] {
                let mut hasher = crc32fast::Hasher::new_with_initial(crc);
                hasher.update(&bytes[..len]);
                assert_eq!(update(crc, &bytes[..len]), hasher.finalize(), "{len} bytes");
            }
        }
    }
}
