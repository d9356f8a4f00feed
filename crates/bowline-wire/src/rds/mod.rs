//! RDS: the 48-byte header, its extension area, and the congestion map.
//!
//! ```text
//!        0       1       2       3       4       5       6       7
//!    +-------+-------+-------+-------+-------+-------+-------+-------+
//!  0 |                          h_sequence                           |
//!  8 |                             h_ack                             |
//! 16 |             h_len             |    h_sport    |    h_dport    |
//! 24 | flags |credit |           padding             |    h_csum     |
//! 32 |                     extension headers                         |
//! 40 |                                                               |
//!    +-------+-------+-------+-------+-------+-------+-------+-------+
//! ```
//! All integers are big-endian. `h_len` payload bytes follow. Spec: `docs/spec/rds.md`, section 1.

mod ext;
mod header;
mod map;

pub use ext::{
    BowlineExt, EXT_AREA_LEN, Extension, Extensions, Handshake, PROBE_PATHS_MAX, RdmaDest,
};
pub use header::{DecodeError, Flags, HEADER_LEN, Header, checksum, checksum_ok};
pub use map::{MAP_BITS, MAP_LEN, MapView};

/// TCP port of the RDS listener, both address families.
pub const TCP_PORT: u16 = 16385;
/// Source port of a probe ping and destination port of its pong; no socket may bind it.
#[doc(alias = "RDS_FLAG_PROBE_PORT")]
pub const PROBE_PORT: u16 = 1;
