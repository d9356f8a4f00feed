//! Conventions of rdma_cm: service ids, GIDs, and the header in front of a REQ's private data.
//!
//! ```text
//!     REQ private data, 92 bytes
//!        0     1        2..4    4..20            20..36            36..92
//!     +-----+--------+-------+----------------+-----------------+---------------+
//!     |  0  | 4x, 6x | port  | source address | destination     | consumer data |
//!     +-----+--------+-------+----------------+-----------------+---------------+
//! ```
//! IPv4 addresses are the last four bytes of their 16, after **zeroes**; in a GID they are mapped
//! (`::ffff:a.b.c.d`) [CMA-3] [CMA-4].

use core::fmt;
use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Length of the header in front of the private data of a REQ or SIDR_REQ.
#[doc(alias = "cma_hdr")]
pub const CMA_HEADER_LEN: usize = 36;

/// Port space of reliable connections [CMA-1].
#[doc(alias = "RDMA_PS_TCP")]
const PORT_SPACE_TCP: u16 = 0x0106;

/// Port space of datagram services [CMA-20].
#[doc(alias = "RDMA_PS_UDP")]
const PORT_SPACE_UDP: u16 = 0x0111;

/// Returns the service id of a port of datagram services [CMA-20].
pub const fn datagram_service_id(port: u16) -> u64 {
    (PORT_SPACE_UDP as u64) << 16 | port as u64
}

/// Returns the port of a service id of datagram services; `None` for other service ids [CMA-20].
pub const fn datagram_service_port(service_id: u64) -> Option<u16> {
    if service_id >> 16 == PORT_SPACE_UDP as u64 { Some(service_id as u16) } else { None }
}

/// Returns the service id of a port of reliable connections [CMA-1].
pub const fn service_id(port: u16) -> u64 {
    (PORT_SPACE_TCP as u64) << 16 | port as u64
}

/// Returns the port of a service id of reliable connections; `None` for other service ids [CMA-1].
pub const fn service_port(service_id: u64) -> Option<u16> {
    if service_id >> 16 == PORT_SPACE_TCP as u64 { Some(service_id as u16) } else { None }
}

/// Returns the flow label of a connection by its ports [CMA-9].
pub const fn flow_label(source_port: u16, destination_port: u16) -> u32 {
    (source_port as u32 * 31 + destination_port as u32) & 0xf_ffff
}

/// Address of an RDMA port: an IPv6 address, or an IPv4-mapped one [CMA-3].
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Gid(pub [u8; 16]);

impl Gid {
    /// Returns the IP address.
    pub fn ip(self) -> IpAddr {
        Ipv6Addr::from(self.0).to_canonical()
    }
}

impl From<IpAddr> for Gid {
    fn from(ip: IpAddr) -> Self {
        match ip {
            IpAddr::V4(ip) => Self(ip.to_ipv6_mapped().octets()),
            IpAddr::V6(ip) => Self(ip.octets()),
        }
    }
}

impl fmt::Debug for Gid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Gid({})", self.ip())
    }
}

/// Why the private data of a REQ does not begin with a valid header [CMA-6].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum CmaError {
    /// Version other than 0.
    Version(u8),
    /// IP version other than 4 and 6.
    IpVersion(u8),
}

impl fmt::Display for CmaError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Version(version) => write!(f, "rdma_cm header of version {version:#04x}"),
            Self::IpVersion(version) => write!(f, "rdma_cm header of IP version {version}"),
        }
    }
}

impl core::error::Error for CmaError {}

/// The header in front of a REQ's private data [CMA-4]. Both addresses are of one family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[doc(alias = "cma_hdr")]
pub struct CmaHeader {
    /// Port of the connecting side.
    pub source_port: u16,
    /// Address of the connecting side.
    pub source: IpAddr,
    /// Address connected to.
    pub destination: IpAddr,
}

impl CmaHeader {
    /// Parses a header. The first 12 bytes of an IPv4 address are ignored.
    ///
    /// # Errors
    /// [`CmaError`].
    pub fn parse(bytes: &[u8; CMA_HEADER_LEN]) -> Result<Self, CmaError> {
        let [version, ip, p0, p1, rest @ ..] = *bytes;
        if version != 0 {
            return Err(CmaError::Version(version));
        }
        #[rustfmt::skip]
        let [
            s0, s1, s2, s3, s4, s5, s6, s7, s8, s9, s10, s11, s12, s13, s14, s15,
            d0, d1, d2, d3, d4, d5, d6, d7, d8, d9, d10, d11, d12, d13, d14, d15,
        ] = rest;
        let (source, destination) = match ip >> 4 {
            4 => (IpAddr::from([s12, s13, s14, s15]), IpAddr::from([d12, d13, d14, d15])),
            6 => (
                IpAddr::from([
                    s0, s1, s2, s3, s4, s5, s6, s7, s8, s9, s10, s11, s12, s13, s14, s15,
                ]),
                IpAddr::from([
                    d0, d1, d2, d3, d4, d5, d6, d7, d8, d9, d10, d11, d12, d13, d14, d15,
                ]),
            ),
            other => return Err(CmaError::IpVersion(other)),
        };
        Ok(Self { source_port: u16::from_be_bytes([p0, p1]), source, destination })
    }

    /// Encodes the header; its IP version is that of the source address.
    pub fn emit(&self) -> [u8; CMA_HEADER_LEN] {
        let mut out = [0; CMA_HEADER_LEN];
        out[1] = if self.source.is_ipv4() { 0x40 } else { 0x60 };
        out[2..4].copy_from_slice(&self.source_port.to_be_bytes());
        out[4..20].copy_from_slice(&padded(self.source));
        out[20..36].copy_from_slice(&padded(self.destination));
        out
    }
}

/// Returns an address in 16 bytes, IPv4 after zeroes.
fn padded(ip: IpAddr) -> [u8; 16] {
    match ip {
        IpAddr::V4(ip) => u128::from(Ipv4Addr::to_bits(ip)).to_be_bytes(),
        IpAddr::V6(ip) => ip.octets(),
    }
}
