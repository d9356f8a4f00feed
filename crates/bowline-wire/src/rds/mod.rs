//! RDS: the 48-byte header, its extension area, the congestion map, and the private data of
//! connections over RDMA.
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
//! All integers are big-endian. Over TCP `h_len` payload bytes follow. Over RDMA each SEND is a
//! frame: a header, and at most 4096 of the `h_len` payload bytes of its message. Spec:
//! `docs/spec/rds.md`, section 1, and `docs/spec/rds-rdma.md`.

mod cm;
mod ext;
mod header;
mod map;
pub mod uapi;

pub use cm::{
    BowlineConnect, CONNECT_LEN, ConnectData, FRAGMENT_LEN, RDMA_PORT_V4, RDMA_PORT_V6, Version,
};
pub use ext::{
    BowlineExt, EXT_AREA_LEN, Extension, Extensions, Handshake, PROBE_PATHS_MAX, RdmaDest, RdmaExt,
};
pub use header::{DecodeError, Flags, HEADER_LEN, Header, checksum, checksum_ok};
pub use map::{MAP_BITS, MAP_LEN, MapView};

/// TCP port of the RDS listener, both address families.
pub const TCP_PORT: u16 = 16385;
/// Source port of a probe ping and destination port of its pong; no socket may bind it.
#[doc(alias = "RDS_FLAG_PROBE_PORT")]
pub const PROBE_PORT: u16 = 1;
