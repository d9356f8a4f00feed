//! What a client calls paths it has given up, so that the server ends them [RT-101].
//!
//! ```text
//!     notice, an immediate              behind the 272 bytes of INFO_REQ, for each path
//!     +------+-----------+------+      +-----------+------+
//!     | 3 (4)| UUID (20) |  (8) |      | UUID (20) |  (8) |   in 4 bytes, the upper bits 0
//!     +------+-----------+------+      +-----------+------+
//!                          attempt                   attempt
//! ```

use alloc::vec::Vec;

use super::{INFO_REQ_LEN, MAX_PATHS, Uuid};

/// Bits of the count of attempts.
const LIFE_BITS: u32 = 8;
const LIFE_MASK: u32 = (1 << LIFE_BITS) - 1;
/// Bits of the UUID.
const UUID_MASK: u32 = (1 << 20) - 1;
const ALL_MASK: u32 = UUID_MASK << LIFE_BITS | LIFE_MASK;

/// Most bytes of an INFO_REQ that names paths.
pub const INFO_REQ_MAX: usize = INFO_REQ_LEN + 4 * MAX_PATHS;

/// A path in one of its lives, within its session: 20 bits of its UUID, which are random, and the
/// low 8 bits of its count of attempts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PathLife(u32);

impl PathLife {
    /// The life of a path that began with this attempt [RT-33].
    pub const fn new(path: &Uuid, recon_cnt: u16) -> Self {
        let [a, b, c, ..] = path.0;
        let uuid = u32::from_le_bytes([a, b, c, 0]) & UUID_MASK;
        Self(uuid << LIFE_BITS | recon_cnt as u32 & LIFE_MASK)
    }

    /// Reads the 28 bits of it; what is above them is not looked at.
    pub const fn from_u32(bits: u32) -> Self {
        Self(bits & ALL_MASK)
    }

    /// Its 28 bits.
    pub const fn to_u32(self) -> u32 {
        self.0
    }
}

/// Reads the paths that an INFO_REQ names behind its 272 bytes, at most [`MAX_PATHS`].
pub fn parse_given_up(info_req: &[u8]) -> impl Iterator<Item = PathLife> + '_ {
    let names = info_req.get(INFO_REQ_LEN..).unwrap_or(&[]).as_chunks().0;
    names.iter().take(MAX_PATHS).map(|name| PathLife::from_u32(u32::from_le_bytes(*name)))
}

/// Appends names of paths to an INFO_REQ, at most [`MAX_PATHS`].
pub fn emit_given_up(lives: &[PathLife], info_req: &mut Vec<u8>) {
    info_req.extend(lives.iter().take(MAX_PATHS).flat_map(|life| life.to_u32().to_le_bytes()));
}
