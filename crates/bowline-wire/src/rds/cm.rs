//! What two sides tell each other when they connect over RDMA: the private data of the CM's REQ and
//! REP. Spec: `docs/spec/rds-rdma.md`, section 2.
//!
//! ```text
//!  IPv4, 32 bytes                     IPv6, 56 bytes
//!  0  source address                  0  source address
//!  4  destination address            16  destination address
//!  8  common part                    32  common part
//!
//!  common part, 24 bytes, big-endian
//!  0 major   1 minor   2 mask of minors   4 tos   5 reserved   8 ack_seq   16 credit   20 padding,
//!  in which bowline nodes tell each other what they can do
//! ```

use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::header::HEADER_LEN;

/// Port of the RDMA CM for IPv4.
#[doc(alias = "RDS_PORT")]
pub const RDMA_PORT_V4: u16 = 18634;
/// Port of the RDMA CM for IPv6.
#[doc(alias = "RDS_CM_PORT")]
pub const RDMA_PORT_V6: u16 = 16385;
/// Payload bytes of a full frame over RDMA.
#[doc(alias = "RDS_FRAG_SIZE")]
pub const FRAGMENT_LEN: usize = 4096;

/// Length of the private data in a REQ, bytes.
pub const CONNECT_LEN: usize = 56;

/// Minor versions that are supported, one bit each [IB-14].
const MINORS: u16 = 0x0003;

/// A protocol version.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version {
    /// Major.
    pub major: u8,
    /// Minor.
    pub minor: u8,
}

impl Version {
    /// The version that an initiator proposes, and the lowest that is accepted [IB-20].
    pub const V3_1: Self = Self { major: 3, minor: 1 };
}

/// The private data of a REQ or REP [IB-14]. The source is whoever sends it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConnectData {
    /// Address of the sender.
    pub source: IpAddr,
    /// Address of the receiver; of the same family.
    pub destination: IpAddr,
    /// Version proposed or agreed on.
    pub version: Version,
    /// Minor versions that the sender supports, one bit each.
    pub minors: u16,
    /// Type of service of the connection.
    pub tos: u8,
    /// Number of the last message received; 0: none is acknowledged.
    pub ack: u64,
    /// Initial flow-control credits; 0: no flow control.
    pub credit: u32,
    /// What a bowline node can do; kernels send zeroes there and do not look.
    pub bowline: Option<BowlineConnect>,
}

/// What a bowline node tells in the padding of its private data [IB-110].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BowlineConnect {
    /// Memory of the frames that it takes, in KiB.
    pub frame_kib: u8,
    /// Longest message that it takes, in units of 64 KiB.
    pub max_message: u16,
}

/// First byte of the padding of a bowline node.
const BOWLINE: u8 = 0x42;

impl BowlineConnect {
    /// Payload bytes of a full frame: what the memory of a frame leaves, so that frames fill their
    /// packets; never less than a kernel's.
    pub const fn fragment(self) -> usize {
        let fragment = (self.frame_kib as usize * 1024).saturating_sub(HEADER_LEN);
        if fragment > FRAGMENT_LEN { fragment } else { FRAGMENT_LEN }
    }
}

impl ConnectData {
    /// Makes the data of a connection of version `version`.
    pub const fn new(source: IpAddr, destination: IpAddr, version: Version) -> Self {
        Self {
            source,
            destination,
            version,
            minors: MINORS,
            tos: 0,
            ack: 0,
            credit: 0,
            bowline: None,
        }
    }

    /// Reads private data of one address family, which zeroes may follow [IB-16]. Returns `None`
    /// if they are too short.
    pub fn parse(bytes: &[u8], v6: bool) -> Option<Self> {
        let (source, destination, common) = if v6 {
            let (source, rest) = bytes.split_first_chunk::<16>()?;
            let (destination, common) = rest.split_first_chunk::<16>()?;
            (Ipv6Addr::from(*source).into(), Ipv6Addr::from(*destination).into(), common)
        } else {
            let (source, rest) = bytes.split_first_chunk::<4>()?;
            let (destination, common) = rest.split_first_chunk::<4>()?;
            (IpAddr::from(Ipv4Addr::from(*source)), Ipv4Addr::from(*destination).into(), common)
        };
        let common: &[u8; 24] = common.first_chunk()?;
        #[rustfmt::skip]
        let [
            major, minor, m0, m1, tos, _, _, _,
            a0, a1, a2, a3, a4, a5, a6, a7,
            c0, c1, c2, c3, b0, frame_kib, m2, m3,
        ] = *common;
        Some(Self {
            source,
            destination,
            version: Version { major, minor },
            minors: u16::from_be_bytes([m0, m1]),
            tos,
            ack: u64::from_be_bytes([a0, a1, a2, a3, a4, a5, a6, a7]),
            credit: u32::from_be_bytes([c0, c1, c2, c3]),
            bowline: (b0 == BOWLINE)
                .then_some(BowlineConnect { frame_kib, max_message: u16::from_be_bytes([m2, m3]) }),
        })
    }

    /// Returns 56 bytes: those of an IPv4 connection are 32, and zeroes.
    pub fn to_bytes(self) -> [u8; CONNECT_LEN] {
        let mut out = [0; CONNECT_LEN];
        let mut rest = out.iter_mut();
        let mut put = |bytes: &[u8]| rest.by_ref().zip(bytes).for_each(|(out, byte)| *out = *byte);
        for addr in [self.source, self.destination] {
            match addr {
                IpAddr::V4(v4) => put(&v4.octets()),
                IpAddr::V6(v6) => put(&v6.octets()),
            }
        }
        put(&[self.version.major, self.version.minor]);
        put(&self.minors.to_be_bytes());
        put(&[self.tos, 0, 0, 0]);
        put(&self.ack.to_be_bytes());
        put(&self.credit.to_be_bytes());
        if let Some(BowlineConnect { frame_kib, max_message }) = self.bowline {
            put(&[BOWLINE, frame_kib]);
            put(&max_message.to_be_bytes());
        }
        out
    }

    /// Returns the version that a kernel of 6.12 agrees on when these data come in a REQ; `None`:
    /// it refuses [IB-18], [IB-19].
    pub fn negotiated(&self) -> Option<Version> {
        match (self.version, self.minors & MINORS) {
            (Version { major: 4, .. }, common @ 1..) => {
                Some(Version { major: 4, minor: (15 - common.leading_zeros()) as u8 })
            }
            (Version::V3_1, _) => Some(Version::V3_1),
            _ => None,
        }
    }
}
