//! Addresses as programs give them, `sockaddr_in` and `sockaddr_in6`, with the kernel's checks of
//! their lengths and families. The node checks the rest.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};

use bowline_base::Errno;
use bowline_host_wire::name::{self, AF_INET, AF_INET6, v4, v6};

fn known(name: &[u8], other: Errno) -> Result<SocketAddr, Errno> {
    match name::family(name).ok_or(Errno::EINVAL)? {
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

/// The bytes of a name, for an answer.
pub(crate) fn bytes(name: SocketAddr) -> Vec<u8> {
    let (bytes, len) = name::raw(name);
    bytes[..len].to_vec()
}

/// The name of a socket that has none: all zeroes, but for the family of what it is
/// connected to.
pub(crate) fn unnamed(peer: Option<SocketAddr>) -> Vec<u8> {
    match peer {
        None => vec![0; name::IN_LEN],
        Some(SocketAddr::V4(_)) => bytes((Ipv4Addr::UNSPECIFIED, 0).into()),
        Some(SocketAddr::V6(_)) => bytes((Ipv6Addr::UNSPECIFIED, 0).into()),
    }
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
