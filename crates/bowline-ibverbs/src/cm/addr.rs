//! Addresses of C.

use core::{mem, ptr};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6, UdpSocket};

use super::abi::Storage;

/// Any port: only the way to an address is asked for.
const DISCARD: u16 = 9;

/// No address.
pub(crate) fn none() -> Storage {
    // SAFETY: numbers, for which zeroes are good.
    unsafe { mem::zeroed() }
}

/// Writes an address.
pub(crate) fn storage(at: SocketAddr) -> Storage {
    let mut out = none();
    match at {
        SocketAddr::V4(at) => {
            let name = libc::sockaddr_in {
                sin_family: libc::AF_INET as libc::sa_family_t,
                sin_port: at.port().to_be(),
                sin_addr: libc::in_addr { s_addr: u32::from(*at.ip()).to_be() },
                sin_zero: [0; 8],
            };
            // SAFETY: a storage has room for each kind of address, and is aligned for it.
            unsafe { (&raw mut out).cast::<libc::sockaddr_in>().write(name) };
        }
        SocketAddr::V6(at) => {
            let name = libc::sockaddr_in6 {
                sin6_family: libc::AF_INET6 as libc::sa_family_t,
                sin6_port: at.port().to_be(),
                sin6_flowinfo: 0,
                sin6_addr: libc::in6_addr { s6_addr: at.ip().octets() },
                sin6_scope_id: at.scope_id(),
            };
            // SAFETY: as above.
            unsafe { (&raw mut out).cast::<libc::sockaddr_in6>().write(name) };
        }
    }
    out
}

/// Reads an address that a program gives; `None` for null and other families.
///
/// # Safety
/// The address has as many bytes as its family says.
pub(crate) unsafe fn given(at: *const libc::sockaddr) -> Option<SocketAddr> {
    if at.is_null() {
        return None;
    }
    // SAFETY: every address begins with its family.
    let family = unsafe { at.cast::<libc::sa_family_t>().read_unaligned() };
    match i32::from(family) {
        libc::AF_INET => {
            // SAFETY: of this family.
            let name = unsafe { ptr::read_unaligned(at.cast::<libc::sockaddr_in>()) };
            let ip = Ipv4Addr::from(u32::from_be(name.sin_addr.s_addr));
            Some(SocketAddr::new(ip.into(), u16::from_be(name.sin_port)))
        }
        libc::AF_INET6 => {
            // SAFETY: of this family.
            let name = unsafe { ptr::read_unaligned(at.cast::<libc::sockaddr_in6>()) };
            let ip = Ipv6Addr::from(name.sin6_addr.s6_addr);
            let port = u16::from_be(name.sin6_port);
            Some(SocketAddrV6::new(ip, port, 0, name.sin6_scope_id).into())
        }
        _ => None,
    }
}

/// Reads an address of an id.
pub(crate) fn of(storage: &Storage) -> Option<SocketAddr> {
    // SAFETY: a storage has room for each family.
    unsafe { given(ptr::from_ref(storage).cast()) }
}

/// The address from which the system would send to another one.
pub(crate) fn source_for(remote: SocketAddr) -> Option<IpAddr> {
    let any = if remote.is_ipv4() {
        IpAddr::from(Ipv4Addr::UNSPECIFIED)
    } else {
        Ipv6Addr::UNSPECIFIED.into()
    };
    let socket = UdpSocket::bind((any, 0)).ok()?;
    let mut to = remote;
    to.set_port(DISCARD);
    socket.connect(to).ok()?;
    Some(socket.local_addr().ok()?.ip())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_go_both_ways() {
        for text in ["10.1.2.3:77", "[fe80::1%5]:9", "[::1]:0"] {
            let at: SocketAddr = text.parse().unwrap();
            assert_eq!(of(&storage(at)), Some(at));
        }
        assert_eq!(of(&none()), None);
        // SAFETY: null is no address.
        assert_eq!(unsafe { given(ptr::null()) }, None);
    }
}
