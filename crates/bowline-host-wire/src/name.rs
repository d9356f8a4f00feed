//! Addresses as the system has them, `sockaddr_in` and `sockaddr_in6`.

use core::net::{Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6};

/// Family of a `sockaddr_in`.
pub const AF_INET: u16 = 2;
/// Family of a `sockaddr_in6`.
pub const AF_INET6: u16 = 10;
/// Length of a `sockaddr_in`.
pub const IN_LEN: usize = 16;
/// Length of a `sockaddr_in6`.
pub const IN6_LEN: usize = 28;

/// The family of a name.
pub fn family(name: &[u8]) -> Option<u16> {
    name.first_chunk().map(|f| u16::from_ne_bytes(*f))
}

/// Reads a `sockaddr_in`, whatever family it tells.
pub fn v4(name: &[u8]) -> Option<SocketAddr> {
    let name = name.first_chunk::<IN_LEN>()?;
    let addr = Ipv4Addr::new(name[4], name[5], name[6], name[7]);
    Some(SocketAddrV4::new(addr, u16::from_be_bytes([name[2], name[3]])).into())
}

/// Reads a `sockaddr_in6`, whatever family it tells.
pub fn v6(name: &[u8]) -> Option<SocketAddr> {
    let name = name.first_chunk::<IN6_LEN>()?;
    let port = u16::from_be_bytes([name[2], name[3]]);
    let mut addr = [0; 16];
    addr.copy_from_slice(&name[8..24]);
    let scope = u32::from_ne_bytes([name[24], name[25], name[26], name[27]]);
    Some(SocketAddrV6::new(Ipv6Addr::from(addr), port, 0, scope).into())
}

/// The bytes of a name, `sockaddr_in` for an IPv4 address, else `sockaddr_in6`, and their number.
pub fn raw(name: SocketAddr) -> ([u8; IN6_LEN], usize) {
    let mut out = [0; IN6_LEN];
    out[2..4].copy_from_slice(&name.port().to_be_bytes());
    match name {
        SocketAddr::V4(name) => {
            out[0..2].copy_from_slice(&AF_INET.to_ne_bytes());
            out[4..8].copy_from_slice(&name.ip().octets());
            (out, IN_LEN)
        }
        SocketAddr::V6(name) => {
            out[0..2].copy_from_slice(&AF_INET6.to_ne_bytes());
            out[8..24].copy_from_slice(&name.ip().octets());
            out[24..28].copy_from_slice(&name.scope_id().to_ne_bytes());
            (out, IN6_LEN)
        }
    }
}

/// Tells whether bytes are a name that a call gives to a program, all zeroes for a socket that has
/// none.
pub fn is_given(name: &[u8]) -> bool {
    match (name.len(), family(name)) {
        (IN_LEN, Some(AF_INET)) | (IN6_LEN, Some(AF_INET6)) => true,
        (IN_LEN, _) => name.iter().all(|byte| *byte == 0),
        _ => false,
    }
}

/// Reads a name.
pub fn parse(name: &[u8]) -> Option<SocketAddr> {
    match family(name)? {
        AF_INET => v4(name),
        AF_INET6 => v6(name),
        _ => None,
    }
}
