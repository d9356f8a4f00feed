//! The RDMA device that needs no hardware: addresses of this machine that can be one, and who has
//! them.

use std::{
    collections::BTreeSet,
    fs,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    sync::Arc,
};

use bowline_roce_driver::{SoftConfig, SoftDevice};
use bowline_verbs::Error;

use crate::{Failure, Outcome, tentative, values::Address};

mod taken;

pub use crate::holder::{Holder, holder, is_held};
use taken::taken;

/// RoCE's UDP port [OUT-1].
pub const PORT: u16 = 4791;

/// What a command wants a device for, which decides what else it can do.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Purpose {
    /// To serve or map disks, which a process that has the address may do in its place.
    Disks,
    /// For connections of its own.
    Connections,
}

/// Opens the soft provider on addresses of this machine for this purpose, with settings that
/// `change` makes; errors say what to do.
pub fn open_soft(
    addresses: &[Address],
    purpose: Purpose,
    change: impl FnOnce(&mut SoftConfig),
) -> Outcome<Arc<SoftDevice>> {
    tentative::wait(addresses);
    let mut config = soft_config(addresses);
    change(&mut config);
    SoftDevice::open(config).map(Arc::new).map_err(|error| not_opened(addresses, purpose, error))
}

/// Says why the soft provider was not opened, and what to do.
pub fn not_opened(addresses: &[Address], purpose: Purpose, error: Error) -> Failure {
    Failure::Failed(match error {
        Error::AddrNotAvailable => {
            let names: Vec<String> = addresses.iter().map(ToString::to_string).collect();
            tentative::why(addresses).unwrap_or_else(|| {
                format!(
                    "this machine does not have all of these addresses: {}; see `ip address`",
                    names.join(", ")
                )
            })
        }
        Error::AddrInUse(text) => taken(addresses, purpose).unwrap_or(text),
        error => error.to_string(),
    })
}

/// Returns settings of the soft provider at addresses of this machine, with the interfaces of
/// link-local ones.
pub fn soft_config(addresses: &[Address]) -> SoftConfig {
    let addrs = addresses.iter().map(|address| address.ip).collect();
    let links = addresses.iter().filter_map(|address| Some((address.ip, address.link?))).collect();
    SoftConfig { addrs, links, ..SoftConfig::default() }
}

/// Returns the addresses of this machine that RoCE can use: neither multicast nor link-local IPv6
/// ones.
pub fn addresses() -> Vec<IpAddr> {
    let trie = fs::read_to_string("/proc/net/fib_trie").unwrap_or_default();
    let v6 = fs::read_to_string("/proc/net/if_inet6").unwrap_or_default();
    ipv4(&trie).into_iter().map(IpAddr::V4).chain(ipv6(&v6).into_iter().map(IpAddr::V6)).collect()
}

/// Reads the local addresses of the routing table: each stands before a line that says so.
fn ipv4(trie: &str) -> BTreeSet<Ipv4Addr> {
    let mut found = BTreeSet::new();
    let mut last: Option<Ipv4Addr> = None;
    for line in trie.lines() {
        let line = line.trim();
        if let Some(address) = line.strip_prefix("|-- ") {
            last = address.parse().ok();
        } else if line == "/32 host LOCAL" {
            found.extend(last);
        }
    }
    found
}

/// Reads the list of IPv6 addresses: 32 digits, index, prefix length, scope, flags, interface.
fn ipv6(list: &str) -> BTreeSet<Ipv6Addr> {
    let address = |line: &str| {
        let number = u128::from_str_radix(line.split_whitespace().next()?, 16).ok()?;
        Some(Ipv6Addr::from(number))
    };
    list.lines().filter_map(address).filter(|address| !address.is_unicast_link_local()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn local_addresses_are_found_in_the_tables_of_the_system() {
        let trie = "Main:
  +-- 0.0.0.0/0 3 0 5
     |-- 0.0.0.0
        /0 universe UNICAST
        |-- 10.99.0.1
           /32 host LOCAL
        |-- 10.99.0.255
           /32 link BROADCAST
     |-- 127.0.0.1
        /32 host LOCAL
Local:
        |-- 10.99.0.1
           /32 host LOCAL
";
        let wanted = [Ipv4Addr::new(10, 99, 0, 1), Ipv4Addr::LOCALHOST];
        assert_eq!(ipv4(trie).into_iter().collect::<Vec<_>>(), wanted);
        let list = "00000000000000000000000000000001 01 80 10 80       lo
fd990000000000000000000000000001 02 40 00 80     eth0
fe800000000000005054000000000001 02 40 20 80     eth0
";
        let wanted: [Ipv6Addr; 2] = [Ipv6Addr::LOCALHOST, "fd99::1".parse().unwrap()];
        assert_eq!(ipv6(list).into_iter().collect::<Vec<_>>(), wanted);
    }
}
