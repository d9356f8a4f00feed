//! Devices of this machine: its addresses with the soft provider on them, and those of rdma-core.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use bowline_node::{
    Failure, Outcome, programs,
    rdma_device::{Purpose, addresses, not_opened, soft_config},
    tentative,
    values::{Address, Family, address, joined, mtu, number32, route_to, some_time},
    verbs,
};
use bowline_rdmacore::RdmaCoreDevice;
use bowline_roce::Congestion;
use bowline_roce_driver::{Guest, Joined, PollMode, PortSpace, SoftConfig, SoftDevice};
use bowline_verbs::{Device, Error, Mtu};

use crate::cli::{
    common::known::{MTUS, known},
    rds::run::verbs::Outlook,
};

/// The device that needs no hardware.
const SOFT: &str = "soft";

/// Options for the local side, common to all commands that connect.
#[derive(Clone, Debug, clap::Args)]
pub(super) struct Local {
    /// RDMA device: soft is RoCE in this process, at the addresses of the node that runs as verbs
    /// programs of `bowline run` have it, elsewhere alone; any other name is a device of rdma-core,
    /// such as rxe0
    #[arg(long, value_name = "NAME", default_value = SOFT)]
    device: String,
    /// Local address, a link-local one with its interface, as fe80::1%eth0; without it, the one
    /// that the route has; a server uses all
    #[arg(short = 'I', long = "address", value_name = "ADDRESS")]
    address: Option<String>,
    /// Port of the connection manager
    #[arg(short, long, value_name = "PORT", default_value = "7174", value_parser = clap::value_parser!(u16).range(1..))]
    port: u16,
    /// Largest path MTU: 256, 512, 1024, 2048 or 4096; without it, that of the interface
    #[arg(short, long, value_name = "BYTES", hide_possible_values = true, value_parser = known(MTUS, mtu))]
    mtu: Option<Mtu>,
    /// Congestion control: delay, which limits packets in flight by queueing delay; fixed:PACKETS
    /// in flight for each queue pair; auto, which is delay, and fixed:240 within a host; or, for
    /// comparison, cubic or swift
    #[arg(long, value_name = "HOW", default_value = "auto", hide_possible_values = true,
          value_parser = known(&["auto", "delay", "cubic", "swift", "fixed:240"], Congestion::from_str))]
    congestion: Congestion,
    /// Longest wait for the peer
    #[arg(short = 'W', long, value_name = "TIME", default_value = "30", value_parser = some_time)]
    pub(super) timeout: Duration,
    /// Poll for packets and completions without sleeping
    #[arg(long)]
    pub(super) poll: bool,
    /// Write all packets into a file, pcapng
    #[arg(long, value_name = "FILE")]
    capture: Option<PathBuf>,
}

impl Local {
    /// Opens the device that reaches a server; returns its address and the server's.
    pub(super) fn towards(&self, server: &str) -> Outcome<(Opened, SocketAddr, SocketAddr)> {
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
    pub(super) fn serving(&self) -> Outcome<(Opened, Vec<SocketAddr>)> {
        let mut addresses = match self.given()? {
            Some(address) => vec![address],
            None if self.device != SOFT => Vec::new(),
            None => {
                let all = addresses().into_iter().filter(|address| !address.is_loopback());
                all.map(Address::from).collect()
            }
        };
        if addresses.is_empty() && self.device == SOFT {
            return Err(Failure::failed("no address except loopback; give one with --address"));
        }
        let device = self.open(&addresses)?;
        if addresses.is_empty() {
            addresses = device.device.attr().addrs.into_iter().map(Address::from).collect();
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

    fn open(&self, addresses: &[Address]) -> Outcome<Opened> {
        if self.device == SOFT {
            let config = |addresses| {
                let (mtu, capture) = (self.mtu, self.capture.clone());
                config(addresses, mtu, capture, self.poll, self.congestion)
            };
            if let Some(opened) = Opened::shared(addresses, config(&[])) {
                return opened;
            }
            let device = open_config(addresses, config(addresses));
            return Ok(Opened::own(
                device.map_err(|error| not_opened(addresses, Purpose::Connections, error))?,
            ));
        }
        if self.mtu.is_some() || self.capture.is_some() {
            return Err(Failure::Usage("--mtu and --capture need the soft device".to_owned()));
        }
        match RdmaCoreDevice::open(&self.device) {
            Ok(device) => Ok(Opened::own(Arc::new(device))),
            Err(error) => Err(Failure::Failed(error.to_string())),
        }
    }

    fn given(&self) -> Outcome<Option<Address>> {
        self.address.as_deref().map(|text| address(text, Family::Any)).transpose()
    }
}

/// A device that is open.
pub(super) struct Opened {
    pub(super) device: Arc<dyn Device>,
    /// Among those of other processes, at the addresses of the host's node.
    guest: Option<Guest>,
}

impl Opened {
    fn own(device: Arc<dyn Device>) -> Self {
        Self { device, guest: None }
    }

    /// Opens a device among those of the verbs programs of the host's node, if that shares all of
    /// these addresses. Nothing is opened at the node to find out.
    fn shared(addresses: &[Address], config: SoftConfig) -> Option<Outcome<Self>> {
        let node = programs::reachable(&programs::places()).ok()?.place;
        let place = verbs::beside(&node);
        if !bowline_ctl::is_socket(&place) {
            return None;
        }
        let outlook = Outlook::of(Some(&place)).ok()?;
        let is_shared = |of: &Address| outlook.gids.iter().any(|at| at.addr == of.ip);
        let process = outlook.node.map_or_else(String::new, |(pid, _)| format!(", process {pid},"));
        addresses.iter().all(is_shared).then(|| {
            let joined = Joined::at(&place).map_err(|error| {
                Failure::failed(format!(
                    "the node at {}{process} gives this command no RDMA: {error}",
                    node.display()
                ))
            })?;
            let (guest, device) = joined.open(config)?;
            Ok(Self { device, guest: Some(guest) })
        })
    }

    /// Listens on all of these places, and says so as the first line of the output.
    pub(super) fn listen(&self, places: &[SocketAddr], json: bool) -> Outcome {
        for place in places {
            let listens = self.guest.as_ref().map(|guest| guest.listen(PortSpace::Tcp, *place));
            let listens = listens.unwrap_or(Ok(())).and_then(|()| self.device.listen(*place));
            listens.map_err(|error| Failure::failed(format!("{place}: {error}")))?;
        }
        let names: Vec<String> = places.iter().map(ToString::to_string).collect();
        if json {
            say!("{}", serde_json::json!({ "listening": names }));
        } else {
            say!("listening on {}", names.join(", "));
        }
        Ok(())
    }
}

fn open_config(addresses: &[Address], config: SoftConfig) -> Result<Arc<SoftDevice>, Error> {
    tentative::wait(addresses);
    Ok(Arc::new(SoftDevice::open(config)?))
}

fn config(
    addresses: &[Address],
    mtu: Option<Mtu>,
    capture: Option<PathBuf>,
    poll: bool,
    congestion: Congestion,
) -> SoftConfig {
    let poll = if poll { PollMode::Spin } else { PollMode::default() };
    let mut config = SoftConfig { mtu, capture, poll, ..soft_config(addresses) };
    config.core.congestion = congestion;
    config
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_those_of_the_original() {
        assert_eq!(ping_size("23"), Ok(23));
        assert_eq!(ping_size("65535"), Ok(65_535));
        for text in ["22", "64k", "0", "x"] {
            assert!(ping_size(text).is_err(), "{text}");
        }
    }
}
