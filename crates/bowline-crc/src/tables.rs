//! Sixteen bytes at once by tables, for processors with slow carry-less multiplication.
//!
//! These are emulated processors. For a KiB, QEMU 7.2 takes 2.7 us with carry-less products and
//! QEMU 10 1.1 us, if nothing else runs; both take 1.5 us with these tables. Within bowline, QEMU
//! 10 took some 13 us for the products (on a Sapphire Rapids, which itself takes 0.03 us). The
//! reason is not known, and a measurement at the start does not show it.

/// The polynomial without x^32; the highest bit is the coefficient of x^0.
const POLY: u32 = 0xedb8_8320;
const STRIDE: usize = 16;

/// Remainder of a byte that is followed by this many other bytes.
static TABLES: [[u32; 256]; STRIDE] = tables();

const fn tables() -> [[u32; 256]; STRIDE] {
    let mut tables = [[0; 256]; STRIDE];
    let mut behind = 0;
    while behind < STRIDE {
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

/// Returns the remainder of one byte.
const fn divided(byte: u32) -> u32 {
    let (mut sum, mut bit) = (byte, 0);
    while bit < 8 {
        sum = if sum & 1 == 1 { (sum >> 1) ^ POLY } else { sum >> 1 };
        bit += 1;
    }
    sum
}

/// Continues a CRC.
pub(crate) fn update(crc: u32, bytes: &[u8]) -> u32 {
    let (rows, rest) = bytes.as_chunks::<STRIDE>();
    let mut sum = !crc;
    for row in rows {
        // The bytes are taken from a register: an emulator needs long for each single-byte load
        // from memory.
        let row = u128::from_le_bytes(*row) ^ u128::from(sum);
        let halves = [row as u64, (row >> 64) as u64];
        sum = 0;
        for at in 0..STRIDE {
            let byte = (halves[at / 8] >> (at % 8 * 8)) as u8;
            sum ^= TABLES[STRIDE - 1 - at][usize::from(byte)];
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
