//! Devices over which a node speaks RDS, beside TCP.
//!
//! ```text
//! soft                   the soft provider at all addresses of the node, UDP port 4791
//! soft@10.0.0.1          the same at this address only; another address is on TCP
//! rxe0                   a device of rdma-core, at the addresses it has
//! ```

use std::{
    fmt,
    path::PathBuf,
    str::FromStr,
    sync::{Arc, Weak},
    thread,
    time::{Duration, Instant},
};

use bowline::rds::Builder;
use bowline_rdmacore::RdmaCoreDevice;
use bowline_roce_driver::{EarlySockets, FormerConnections, SoftConfig, SoftDevice};
use bowline_verbs::Device;
use serde::Deserialize;

use crate::{
    Failure, Outcome,
    rdma_device::{Purpose, addresses, open_soft},
    values::{Address, own},
};

/// The device that needs no hardware.
const SOFT: &str = "soft";
/// Longest wait until nobody uses a device that a node has given up.
const RELEASE_MAX: Duration = Duration::from_secs(2);
const RELEASE_POLL: Duration = Duration::from_millis(1);

/// What `--rdma` names.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq)]
#[serde(try_from = "String")]
pub enum DeviceName {
    /// The soft provider, at one address or at all of the node.
    Soft(Option<Address>),
    /// A device of rdma-core.
    System(String),
}

impl FromStr for DeviceName {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once('@') {
            Some((SOFT, address)) => own(address).map(|address| Self::Soft(Some(address))),
            Some((name, _)) => Err(format!(
                "a device of rdma-core serves all of its addresses: give {name} without an address"
            )),
            None if text == SOFT => Ok(Self::Soft(None)),
            None if text.is_empty() || text.parse::<Address>().is_ok() => {
                Err(format!("\"{text}\" is not {SOFT}, {SOFT}@ADDRESS or the name of a device"))
            }
            None => Ok(Self::System(text.to_owned())),
        }
    }
}

impl TryFrom<String> for DeviceName {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

/// The devices of a node. Those of rdma-core are open; the soft one is opened when the node starts,
/// since a former node may have its port until then.
#[derive(Clone)]
pub struct Devices {
    /// Addresses of the soft device; none: there is none.
    soft: Vec<Address>,
    /// What the soft one is opened on, if it was made before.
    sockets: EarlySockets,
    system: Vec<Arc<dyn Device>>,
}

impl fmt::Debug for Devices {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Devices").field("soft", &self.soft).finish_non_exhaustive()
    }
}

/// The soft device of a running node, to see whether it is still there.
#[derive(Debug, Default)]
pub struct SoftPort(Weak<SoftDevice>);

impl SoftPort {
    /// Returns the device, if there is one, to be looked at later.
    pub fn of(device: Option<&Arc<SoftDevice>>) -> Self {
        Self(device.map(Arc::downgrade).unwrap_or_default())
    }

    /// Waits until the device is closed and its UDP port is free.
    pub fn wait_until_free(&self) {
        let end = Instant::now() + RELEASE_MAX;
        while self.0.strong_count() > 0 && Instant::now() < end {
            thread::sleep(RELEASE_POLL);
        }
    }
}

impl Devices {
    /// Finds the devices and adds their addresses to those of the node. A node that was not told
    /// its addresses has all but loopback if the soft device is to have all.
    pub fn new(names: Vec<DeviceName>, node: &mut Vec<Address>) -> Outcome<Self> {
        let mut devices =
            Self { soft: Vec::new(), sockets: EarlySockets::default(), system: Vec::new() };
        let add = |all: &mut Vec<Address>, address: Address| {
            if !all.contains(&address) {
                all.push(address);
            }
        };
        if names.contains(&DeviceName::Soft(None)) && node.is_empty() {
            node.extend(addresses().into_iter().filter(|a| !a.is_loopback()).map(Address::from));
            if node.is_empty() {
                return Err(Failure::failed("no address except loopback; give one with --address"));
            }
        }
        let of_node = node.clone();
        for name in names {
            match name {
                DeviceName::Soft(None) => {
                    of_node.iter().for_each(|address| add(&mut devices.soft, *address));
                }
                DeviceName::Soft(Some(address)) => {
                    add(&mut devices.soft, address);
                    add(node, address);
                }
                DeviceName::System(name) => {
                    let device = RdmaCoreDevice::open(&name)
                        .map_err(|error| Failure::failed(format!("{name}: {error}")))?;
                    for ip in device.attr().addrs {
                        let link = Some(device.link_of(ip)).filter(|link| *link != 0);
                        add(node, Address { ip, link });
                    }
                    devices.system.push(Arc::new(device));
                }
            }
        }
        Ok(devices)
    }

    /// Tells whether one of the devices has this address.
    pub fn covers(&self, address: Address) -> bool {
        self.soft.contains(&address)
            || self.system.iter().any(|device| device.attr().addrs.contains(&address.ip))
    }

    /// Returns the addresses of the soft device.
    pub fn soft(&self) -> &[Address] {
        &self.soft
    }

    /// Tells whether a node with these devices needs libraries and files of rdma-core.
    pub fn are_of_system(&self) -> bool {
        !self.system.is_empty()
    }

    /// Returns the folder in which the soft device keeps files.
    pub fn folder(&self) -> Option<PathBuf> {
        if self.soft.is_empty() { None } else { FormerConnections::RunFolder.folder() }
    }

    /// Makes the sockets of the soft device, which get smaller buffers later: see
    /// [`EarlySockets`].
    pub fn make_sockets(&mut self) {
        let addresses: Vec<_> = self.soft.iter().map(|address| address.ip).collect();
        self.sockets = EarlySockets::new(&addresses, SoftConfig::default().socket_buffer);
    }

    /// Opens the soft device, if there is one, with settings that `change` makes.
    pub fn open_soft(
        &self,
        change: impl FnOnce(&mut SoftConfig),
    ) -> Outcome<Option<Arc<SoftDevice>>> {
        if self.soft.is_empty() {
            return Ok(None);
        }
        let change = |config: &mut SoftConfig| {
            config.early_sockets = self.sockets.clone();
            change(config);
        };
        open_soft(&self.soft, Purpose::Connections, change).map(Some)
    }

    /// Gives the devices to a node: the soft one, which is open by now, and the others.
    pub fn add_to(&self, builder: Builder, soft: Option<Arc<dyn Device>>) -> Builder {
        soft.into_iter().chain(self.system.iter().cloned()).fold(builder, Builder::rdma)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_named_plainly() {
        let name = |text: &str| text.parse::<DeviceName>();
        let address: Address = "10.0.0.1".parse().unwrap();
        assert_eq!(name("soft"), Ok(DeviceName::Soft(None)));
        assert_eq!(name("soft@10.0.0.1"), Ok(DeviceName::Soft(Some(address))));
        assert_eq!(name("rxe0"), Ok(DeviceName::System("rxe0".to_owned())));
        for text in ["", "10.0.0.1", "soft@", "soft@nowhere", "soft@fe80::1", "rxe0@10.0.0.1"] {
            assert!(name(text).is_err(), "{text}");
        }
    }

    #[test]
    fn the_soft_device_is_at_the_addresses_of_the_node_or_at_those_named() {
        let list = |all: &[&str]| all.iter().map(|a| a.parse().unwrap()).collect::<Vec<Address>>();
        let soft = |at: Option<&str>| DeviceName::Soft(at.map(|at| at.parse().unwrap()));
        let mut node = list(&["127.0.0.1", "127.0.0.2"]);
        let devices = Devices::new(vec![soft(None)], &mut node).unwrap();
        assert_eq!((devices.soft(), node.len()), (&node[..], 2));
        let devices = Devices::new(vec![soft(Some("127.0.0.2"))], &mut node).unwrap();
        assert_eq!((devices.soft(), node.len()), (&list(&["127.0.0.2"])[..], 2));
        let devices = Devices::new(vec![soft(Some("127.0.0.3"))], &mut node).unwrap();
        assert!(devices.covers(node[2]) && !devices.covers(node[0]));
        assert_eq!(node, list(&["127.0.0.1", "127.0.0.2", "127.0.0.3"]));
    }
}
