//! Addresses as programs give them, `sockaddr_in` and `sockaddr_in6`, with the kernel's checks of
//! their lengths and families. The node checks the rest.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6};

use bowline_base::Errno;

const AF_INET: u16 = 2;
const AF_INET6: u16 = 10;
const IN_LEN: usize = 16;
const IN6_LEN: usize = 28;

fn family(name: &[u8]) -> Option<u16> {
    name.first_chunk().map(|f| u16::from_ne_bytes(*f))
}

fn v4(name: &[u8]) -> Option<SocketAddr> {
    let name = name.first_chunk::<IN_LEN>()?;
    let addr = Ipv4Addr::new(name[4], name[5], name[6], name[7]);
    Some(SocketAddrV4::new(addr, u16::from_be_bytes([name[2], name[3]])).into())
}

fn v6(name: &[u8]) -> Option<SocketAddr> {
    let name = name.first_chunk::<IN6_LEN>()?;
    let port = u16::from_be_bytes([name[2], name[3]]);
    let mut addr = [0; 16];
    addr.copy_from_slice(&name[8..24]);
    let scope = u32::from_ne_bytes([name[24], name[25], name[26], name[27]]);
    Some(SocketAddrV6::new(Ipv6Addr::from(addr), port, 0, scope).into())
}

fn known(name: &[u8], other: Errno) -> Result<SocketAddr, Errno> {
    match family(name).ok_or(Errno::EINVAL)? {
        AF_INET => v4(name).ok_or(Errno::EINVAL),
        AF_INET6 => v6(name).ok_or(Errno::EINVAL),
        _ => Err(other),
    }
}

/// The address of a bind or of a message.
pub(crate) fn to_bind_or_send(name: &[u8]) -> Result<SocketAddr, Errno> {
    known(name, Errno::EINVAL)
}

/// The address of a connect.
pub(crate) fn to_connect(name: &[u8]) -> Result<SocketAddr, Errno> {
    known(name, Errno::EAFNOSUPPORT)
}

/// The address of a cancel, whose family is not looked at.
pub(crate) fn to_cancel(name: &[u8]) -> Result<SocketAddr, Errno> {
    v6(name).or_else(|| v4(name)).ok_or(Errno::EINVAL)
}

/// The bytes of a name, `sockaddr_in` for an IPv4 address, else `sockaddr_in6`, and their number.
pub(crate) fn raw(name: SocketAddr) -> ([u8; IN6_LEN], usize) {
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

/// As [`raw`], for an answer.
pub(crate) fn bytes(name: SocketAddr) -> Vec<u8> {
    let (bytes, len) = raw(name);
    bytes[..len].to_vec()
}

/// The name of a socket that has none: all zeroes.
pub(crate) fn unnamed() -> Vec<u8> {
    vec![0; IN_LEN]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_come_out_as_they_went_in() {
        for text in ["10.0.0.1:4000", "[fd00::1]:65535", "[fe80::1%3]:7"] {
            let name: SocketAddr = text.parse().unwrap();
            assert_eq!(to_bind_or_send(&bytes(name)), Ok(name));
            assert_eq!(to_connect(&bytes(name)), Ok(name));
            assert_eq!(to_cancel(&bytes(name)), Ok(name));
        }
    }

    // tests
    #[test]
    fn short_and_foreign_names_are_refused_as_the_kernel_does() {
        let name = bytes("10.0.0.1:4000".parse().unwrap());
        for len in [0, 1, 2, 15] {
            assert_eq!(to_bind_or_send(&name[..len]), Err(Errno::EINVAL));
            assert_eq!(to_connect(&name[..len]), Err(Errno::EINVAL));
            assert_eq!(to_cancel(&name[..len]), Err(Errno::EINVAL));
        }
        let long = bytes("[fd00::1]:1".parse().unwrap());
        assert_eq!(to_bind_or_send(&long[..27]), Err(Errno::EINVAL));
        let foreign = [[1, 0].as_slice(), &name[2..]].concat();
        assert_eq!(to_bind_or_send(&foreign), Err(Errno::EINVAL));
        assert_eq!(to_connect(&foreign), Err(Errno::EAFNOSUPPORT));
        assert_eq!(to_cancel(&foreign), Ok("10.0.0.1:4000".parse().unwrap()));
    }
}
