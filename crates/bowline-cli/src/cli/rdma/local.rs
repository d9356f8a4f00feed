//! Devices of this machine: its addresses with the soft provider on them, and those of rdma-core.

use std::collections::BTreeSet;
use std::fs;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use bowline_node::{
    Failure, Outcome,
    values::{Address, Family, address, interval, joined, number, number32, route_to},
};
use bowline_rdmacore::RdmaCoreDevice;
use bowline_roce::Congestion;
use bowline_roce_driver::{PollMode, SoftConfig, SoftDevice};
use bowline_verbs::{Device, Error, Mtu};

use super::taken::taken;

/// The device that needs no hardware.
const SOFT: &str = "soft";

/// Options for the local side, common to all commands that connect.
#[derive(Clone, Debug, clap::Args)]
pub(super) struct Local {
    /// The device: soft is RoCE in this process; any other name is one of rdma-core, such as rxe0
    #[arg(long, value_name = "NAME", default_value = SOFT)]
    device: String,
    /// Local address, a link-local one with its interface, as fe80::1%eth0; without it, the one
    /// that routing picks, for a server all of them
    #[arg(short = 'I', long = "address", value_name = "ADDRESS")]
    address: Option<String>,
    /// Port of the connection manager
    #[arg(short, long, value_name = "PORT", default_value = "7174", value_parser = clap::value_parser!(u16).range(1..))]
    port: u16,
    /// Largest path MTU: 256, 512, 1024, 2048 or 4096; without it, what the interface carries
    #[arg(short, long, value_name = "BYTES", value_parser = mtu)]
    mtu: Option<Mtu>,
    /// What limits the packets in flight: delay, of queues on the way; fixed:PACKETS of each
    /// queue pair; auto: delay, and fixed:240 within a host; or, for comparison, cubic or swift
    #[arg(long, value_name = "HOW", default_value = "auto")]
    congestion: Congestion,
    /// Longest wait for the peer
    #[arg(short = 'W', long, value_name = "TIME", default_value = "30", value_parser = wait)]
    pub(super) timeout: Duration,
    /// Look for packets and completions without sleeping
    #[arg(long)]
    pub(super) poll: bool,
    /// Write all packets into a file, pcapng
    #[arg(long, value_name = "FILE")]
    capture: Option<PathBuf>,
}

impl Local {
    /// Opens the device that reaches a server; returns its address and the server's.
    pub(super) fn towards(
        &self,
        server: &str,
    ) -> Outcome<(Arc<dyn Device>, SocketAddr, SocketAddr)> {
        let family = match self.given()?.map(|given| given.ip) {
            Some(IpAddr::V4(_)) => Family::V4,
            Some(IpAddr::V6(_)) => Family::V6,
            None => Family::Any,
        };
        let mut remote = address(server, family)?;
        let mut local = match self.given()? {
            Some(local) => local,
            None => route_to(remote)?,
        };
        joined(&mut local, &mut remote)?;
        let device = self.open(&[local])?;
        Ok((device, SocketAddr::new(local.ip, 0), SocketAddr::new(remote.ip, self.port)))
    }

    /// Opens the device of a server; returns where it is to listen.
    pub(super) fn serving(&self) -> Outcome<(Arc<dyn Device>, Vec<SocketAddr>)> {
        let mut addresses = match self.given()? {
            Some(address) => vec![address],
            None if self.device != SOFT => Vec::new(),
            None => {
                let all = addresses().into_iter().filter(|address| !address.is_loopback());
                all.map(Address::from).collect()
            }
        };
        if addresses.is_empty() && self.device == SOFT {
            return Err(Failure::failed("no address but loopback; give one with --address"));
        }
        let device = self.open(&addresses)?;
        if addresses.is_empty() {
            addresses = device.attr().addrs.into_iter().map(Address::from).collect();
        }
        if addresses.is_empty() {
            let text = format!("{} has no address; give one with --address", self.device);
            return Err(Failure::Failed(text));
        }
        Ok((device, addresses.into_iter().map(|a| SocketAddr::new(a.ip, self.port)).collect()))
    }

    /// The path MTU asked for.
    pub(super) fn mtu(&self) -> Option<Mtu> {
        self.mtu
    }

    fn open(&self, addresses: &[Address]) -> Outcome<Arc<dyn Device>> {
        if self.device == SOFT {
            let (mtu, capture) = (self.mtu, self.capture.clone());
            let device = soft(addresses, mtu, capture, self.poll, self.congestion);
            return Ok(device.map_err(|error| not_opened(addresses, error))?);
        }
        if self.mtu.is_some() || self.capture.is_some() {
            return Err(Failure::Usage("--mtu and --capture need the soft device".to_owned()));
        }
        match RdmaCoreDevice::open(&self.device) {
            Ok(device) => Ok(Arc::new(device)),
            Err(error) => Err(Failure::Failed(error.to_string())),
        }
    }

    fn given(&self) -> Outcome<Option<Address>> {
        self.address.as_deref().map(|text| address(text, Family::Any)).transpose()
    }
}

/// Listens on all of these places, and says so as the first line of the output.
pub(super) fn listen(device: &dyn Device, places: &[SocketAddr], json: bool) -> Outcome {
    for place in places {
        device.listen(*place).map_err(|error| Failure::failed(format!("{place}: {error}")))?;
    }
    let names: Vec<String> = places.iter().map(ToString::to_string).collect();
    if json {
        say!("{}", serde_json::json!({ "listening": names }));
    } else {
        say!("listening on {}", names.join(", "));
    }
    Ok(())
}

/// Opens the soft provider on addresses of this machine.
pub(super) fn soft(
    addresses: &[Address],
    mtu: Option<Mtu>,
    capture: Option<PathBuf>,
    poll: bool,
    congestion: Congestion,
) -> Result<Arc<SoftDevice>, Error> {
    let poll = if poll { PollMode::Spin } else { PollMode::default() };
    let (addrs, links) = addrs_and_links(addresses);
    let mut config = SoftConfig { addrs, links, mtu, capture, poll, ..SoftConfig::default() };
    config.core.congestion = congestion;
    Ok(Arc::new(SoftDevice::open(config)?))
}

/// Opens the soft provider on addresses of this machine, with settings that `change` makes; errors
/// say what to do.
pub(crate) fn open_soft(
    addresses: &[Address],
    change: impl FnOnce(&mut SoftConfig),
) -> Outcome<Arc<SoftDevice>> {
    let (addrs, links) = addrs_and_links(addresses);
    let mut config = SoftConfig { addrs, links, ..SoftConfig::default() };
    change(&mut config);
    SoftDevice::open(config).map(Arc::new).map_err(|error| not_opened(addresses, error))
}

/// Says why the soft provider was not opened, and what to do.
fn not_opened(addresses: &[Address], error: Error) -> Failure {
    Failure::Failed(match error {
        Error::AddrNotAvailable => {
            let names: Vec<String> = addresses.iter().map(ToString::to_string).collect();
            format!(
                "this machine has not all of these addresses: {}; see `ip address`",
                names.join(", ")
            )
        }
        Error::AddrInUse(text) => taken(addresses).unwrap_or(text),
        error => error.to_string(),
    })
}

/// Splits addresses and the interfaces of link-local ones, for the soft provider.
fn addrs_and_links(addresses: &[Address]) -> (Vec<IpAddr>, Vec<(IpAddr, u32)>) {
    let links = addresses.iter().filter_map(|address| Some((address.ip, address.link?)));
    (addresses.iter().map(|address| address.ip).collect(), links.collect())
}

/// Parses a path MTU.
pub(crate) fn mtu(text: &str) -> Result<Mtu, String> {
    let bytes = number(text)?;
    let found = Mtu::ALL.into_iter().find(|mtu| mtu.bytes() as u64 == bytes);
    found.ok_or_else(|| format!("\"{text}\" is not 256, 512, 1024, 2048 or 4096"))
}

/// Parses a timeout, which must not be zero.
fn wait(text: &str) -> Result<Duration, String> {
    match interval(text)? {
        Duration::ZERO => Err(format!("\"{text}\" is no time to wait; give more than 0")),
        limit => Ok(limit),
    }
}

/// Parses a size of rping.
pub(super) fn ping_size(text: &str) -> Result<u32, String> {
    match number32(text)? {
        size @ PING_SIZE_MIN..=PING_SIZE_MAX => Ok(size),
        size => Err(format!("{size} is not between {PING_SIZE_MIN} and {PING_SIZE_MAX}")),
    }
}

/// The sizes that the original takes.
const PING_SIZE_MIN: u32 = 23;
const PING_SIZE_MAX: u32 = 65_535;

/// Returns the addresses of this machine that RoCE can use: neither multicast nor link-local IPv6
/// ones.
pub(crate) fn addresses() -> Vec<IpAddr> {
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

    #[test]
    fn sizes_are_those_of_the_original() {
        assert_eq!(ping_size("23"), Ok(23));
        assert_eq!(ping_size("65535"), Ok(65_535));
        for text in ["22", "64k", "0", "x"] {
            assert!(ping_size(text).is_err(), "{text}");
        }
        assert_eq!(mtu("4k"), Ok(Mtu::M4096));
        assert!(mtu("1500").is_err());
    }

    #[test]
    fn a_wait_is_longer_than_nothing() {
        assert_eq!(wait("1ms"), Ok(Duration::from_millis(1)));
        for text in ["0", "0ms", "1e-12", "-1", "x"] {
            assert!(wait(text).is_err(), "{text}");
        }
    }
}
