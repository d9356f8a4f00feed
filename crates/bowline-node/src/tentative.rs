//! IPv6 addresses that nobody can use yet: for a second or two after it was configured, an address
//! is *tentative*, while the system asks its link whether another machine has it.

use std::{
    fs,
    net::{IpAddr, Ipv6Addr},
    thread,
    time::{Duration, Instant},
};

use crate::values::Address;

/// Longest wait for addresses. The check takes as many seconds as `dad_transmits` says, by default
/// one; without a carrier it does not begin.
const PATIENCE: Duration = Duration::from_secs(10);
const PAUSE: Duration = Duration::from_millis(50);
/// The IPv6 addresses of this network namespace.
const LIST: &str = "/proc/self/net/if_inet6";

/// What keeps an address from being used.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Trouble {
    /// The system is still asking, or waits for a carrier.
    Tentative,
    /// Another machine has it.
    Duplicate,
}

/// Waits, for a limited time, until none of these addresses is tentative; says so if that takes a
/// moment.
pub fn wait(addresses: &[Address]) {
    let until = Instant::now() + PATIENCE;
    let mut is_noted = false;
    while let Some(address) = tentative(addresses) {
        if !is_noted {
            is_noted = true;
            note!(
                "waiting up to {} s for {address}, which is tentative: the system is asking whether \
                 another machine has it",
                PATIENCE.as_secs()
            );
        }
        if Instant::now() >= until {
            return;
        }
        thread::sleep(PAUSE);
    }
}

fn tentative(addresses: &[Address]) -> Option<Address> {
    let v6 = addresses.iter().filter(|address| address.ip.is_ipv6());
    let mut v6 = v6.peekable();
    v6.peek()?;
    let list = fs::read_to_string(LIST).unwrap_or_default();
    v6.find(|address| trouble(&list, address) == Some(Trouble::Tentative)).copied()
}

/// Says what keeps one of these addresses from being used, which this machine has.
pub fn why(addresses: &[Address]) -> Option<String> {
    let list = fs::read_to_string(LIST).unwrap_or_default();
    addresses.iter().find_map(|address| {
        Some(match trouble(&list, address)? {
            Trouble::Tentative => format!(
                "{address} is still tentative; is its link up? See `ip address`, and try again"
            ),
            Trouble::Duplicate => {
                format!("another machine on the link has {address} (duplicate address)")
            }
        })
    })
}

/// Looks an address up: 32 digits, index, prefix length, scope, flags, interface. It is usable
/// where any interface has it usable.
fn trouble(list: &str, address: &Address) -> Option<Trouble> {
    const OPTIMISTIC: u8 = 0x04;
    const DAD_FAILED: u8 = 0x08;
    const TENTATIVE: u8 = 0x40;
    let IpAddr::V6(ip) = address.ip else { return None };
    let state = |line: &str| {
        let mut words = line.split_whitespace();
        let at = Ipv6Addr::from(u128::from_str_radix(words.next()?, 16).ok()?);
        let link = u32::from_str_radix(words.next()?, 16).ok()?;
        let flags = u8::from_str_radix(words.nth(2)?, 16).ok()?;
        let is_it = at == ip && address.link.is_none_or(|wanted| wanted == link);
        is_it.then_some(match flags & (OPTIMISTIC | DAD_FAILED | TENTATIVE) {
            flags if flags & DAD_FAILED != 0 => Some(Trouble::Duplicate),
            TENTATIVE => Some(Trouble::Tentative),
            _ => None,
        })
    };
    let mut states = list.lines().filter_map(state);
    let first = states.next()??;
    states.all(|other| other.is_some()).then_some(first)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_tentative_by_its_flags_and_link() {
        let list = "fd000000000000000000000000000001 02 40 00 c0     eth0\n\
                    fd000000000000000000000000000002 02 40 00 80     eth0\n\
                    fd000000000000000000000000000003 02 40 00 c8     eth0\n\
                    fd000000000000000000000000000004 02 40 00 44     eth0\n\
                    fe800000000000000000000000000001 0a 40 20 c0     eth1\n\
                    fe800000000000000000000000000001 0b 40 20 80     eth2\n";
        let of = |ip: &str, link| trouble(list, &Address { ip: ip.parse().unwrap(), link });
        assert_eq!(of("fd00::1", None), Some(Trouble::Tentative));
        assert_eq!(of("fd00::2", None), None);
        assert_eq!(of("fd00::3", None), Some(Trouble::Duplicate));
        assert_eq!(of("fd00::4", None), None, "optimistic ones can be used");
        assert_eq!(of("fd00::5", None), None, "it is not there");
        assert_eq!(of("fe80::1", Some(10)), Some(Trouble::Tentative));
        assert_eq!(of("fe80::1", Some(11)), None);
        assert_eq!(of("fe80::1", None), None);
        assert_eq!(of("10.0.0.1", None), None);
    }
}
