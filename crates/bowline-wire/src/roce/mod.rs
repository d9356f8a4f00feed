//! RoCEv2: the InfiniBand headers inside UDP datagrams, and their checksum.
//!
//! ```text
//! IP | UDP to 4791 | base transport header | further headers | payload | pad | ICRC
//! ```
//! [`Packet`] covers the bytes between the UDP header and the ICRC. All integers except the ICRC
//! are big-endian. Spec: `docs/spec/roce.md`, sections 1 to 3.

pub mod cm;
mod cma;
mod header;
mod icrc;
mod mad;
mod opcode;
mod packet;
mod psn;

pub use cma::{
    CMA_HEADER_LEN, CmaError, CmaHeader, Gid, datagram_service_id, datagram_service_port,
    flow_label, service_id, service_port,
};
pub use header::{
    AETH_LEN, ATOMIC_ACK_ETH_LEN, ATOMIC_ETH_LEN, Aeth, AtomicAckEth, AtomicEth, BTH_LEN, Bth,
    CNP_RESERVED_LEN, DEFAULT_PKEY, DETH_LEN, Deth, FETH_LEN, IETH_LEN, IMM_LEN, MAX_HEADER_LEN,
    NakCode, RETH_LEN, Reth, Syndrome, rnr_timer_ns,
};
pub use icrc::{
    ICRC_LEN, IcrcChecker, IcrcError, IcrcHeads, IcrcMatch, IcrcPolicy, Outer, split_icrc,
};
pub use mad::{GSI_QKEY, GSI_QPN, MAD_HEADER_LEN, MAD_LEN, MAD_MESSAGE_LEN, MadError, MadHeader};
pub use opcode::{Opcode, PayloadRule, Service};
pub use packet::{Packet, PacketError, pad};
pub use psn::Psn;

/// UDP destination port of all packets, requests and responses alike [OUT-1].
pub const UDP_PORT: u16 = 4791;
