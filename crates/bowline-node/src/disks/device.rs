//! The local devices of disks, and the paths to a server.

use std::{
    net::{IpAddr, SocketAddr},
    path::PathBuf,
    sync::Arc,
    time::Duration,
};

use bowline_ctl::PathSpec;
use bowline_rdmacore::RdmaCoreDevice;
use bowline_rnbd_driver::client::MapOptions;
use bowline_roce_driver::{PollMode, SoftConfig};
use bowline_rtrs_driver::{Engine, EngineConfig, PORT, Poll};
use bowline_verbs::{Device, Mtu};
use serde::Deserialize;

use super::{
    Trouble,
    paths::{no_address, path_spec, session_name},
    values::positive,
};
use crate::{
    Failure, Outcome,
    config::entry::field_parsers,
    rdma_device::{Purpose, addresses, open_soft},
    values::{Address, Family, address, joined, mtu, route_to, some_time},
};

/// The device that needs no hardware.
const SOFT: &str = "soft";

/// The local devices of client and server.
#[derive(Clone, Debug, Deserialize)]
#[serde(default, rename_all = "kebab-case")]
pub struct DeviceConfig {
    /// The soft one, or those of rdma-core.
    pub device: Vec<String>,
    /// Port of the server.
    #[serde(deserialize_with = "some_port")]
    pub port: u16,
    /// Time without an answer after which a path is dead (soft device).
    #[serde(deserialize_with = "time")]
    pub path_dead: Duration,
    /// Largest path MTU; `None`: that of the interface.
    #[serde(deserialize_with = "path_mtu")]
    pub mtu: Option<Mtu>,
    /// Poll for packets and completions without sleeping.
    pub poll: bool,
    /// File for all packets, pcapng.
    pub capture: Option<PathBuf>,
}

impl Default for DeviceConfig {
    fn default() -> Self {
        Self {
            device: vec![SOFT.to_owned()],
            port: PORT,
            path_dead: Duration::from_secs(3),
            mtu: None,
            poll: false,
            capture: None,
        }
    }
}

field_parsers! {
    some_port: u16 = positive;
    time: Duration = some_time;
    path_mtu: Option<Mtu> = |text| mtu(text).map(Some);
}

impl DeviceConfig {
    /// Starts an engine on the devices that have these addresses.
    pub fn engine(&self, addresses: &[Address]) -> Outcome<Arc<Engine>> {
        self.engine_on(self.open(addresses)?)
    }

    /// Starts an engine on devices that are open.
    pub fn engine_on(&self, devices: Vec<Arc<dyn Device>>) -> Outcome<Arc<Engine>> {
        let poll = if self.poll { Poll::Spin } else { Poll::Adaptive };
        Engine::new(devices, EngineConfig { poll })
            .map_err(|error| Failure::Failed(error.to_string()))
    }

    /// Tells whether the device is the soft one, which needs the UDP port of its addresses.
    pub fn is_soft(&self) -> bool {
        self.device == [SOFT]
    }

    /// Sets what the options say of a soft device.
    pub fn configure(&self, config: &mut SoftConfig) {
        config.mtu = self.mtu;
        config.poll = if self.poll { PollMode::Spin } else { PollMode::default() };
        config.capture.clone_from(&self.capture);
        config.core.give_up = bowline_roce::GiveUp::After(self.path_dead);
    }

    fn open(&self, addresses: &[Address]) -> Outcome<Vec<Arc<dyn Device>>> {
        if self.is_soft() {
            let device = open_soft(addresses, Purpose::Disks, |config| self.configure(config))?;
            return Ok(vec![device]);
        }
        if self.mtu.is_some() || self.capture.is_some() {
            return Err(Failure::usage("--mtu and --capture need the soft device"));
        }
        self.device
            .iter()
            .map(|name| {
                let device = RdmaCoreDevice::open(name);
                let device = device.map_err(|error| Failure::failed(format!("{name}: {error}")))?;
                Ok(Arc::new(device) as Arc<dyn Device>)
            })
            .collect()
    }

    /// Returns the addresses a server listens on: those given, or all but loopback.
    pub fn places(&self, given: &[String]) -> Outcome<Vec<Address>> {
        let mut found =
            given.iter().map(|text| address(text, Family::Any)).collect::<Outcome<Vec<_>>>()?;
        one_link_each(&found)?;
        if found.is_empty() {
            let all = addresses().into_iter().filter(|address| !address.is_loopback());
            found = all.map(Address::from).collect();
        }
        if found.is_empty() {
            return Err(Failure::failed("no address except loopback; give one with --address"));
        }
        Ok(found)
    }

    /// Returns these addresses with the port.
    pub fn with_port(&self, addresses: &[Address]) -> Vec<SocketAddr> {
        addresses.iter().map(|address| SocketAddr::new(address.ip, self.port)).collect()
    }
}

/// The session of a client and its paths.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct RouteConfig {
    /// The server, or with paths the name of the session.
    pub from: Option<String>,
    /// Paths: `DESTINATION` or `SOURCE@DESTINATION`.
    pub path: Vec<String>,
}

/// A session to be opened.
#[derive(Clone, Debug)]
pub struct Route {
    /// Name of the session.
    pub session: String,
    /// Source and destination of each path.
    pub paths: Vec<(Option<IpAddr>, IpAddr)>,
    /// Local addresses of all paths, present and later ones.
    pub own: Vec<Address>,
}

impl Route {
    /// Adds local addresses, for paths that are added later.
    pub fn add_own(&mut self, addresses: &[String]) -> Outcome {
        for text in addresses {
            self.own.push(address(text, Family::Any)?);
        }
        self.own.sort();
        self.own.dedup();
        one_link_each(&self.own)
    }

    /// Returns options of mapping a disk over the paths of the route.
    pub fn on(&self, options: MapOptions) -> MapOptions {
        self.paths.iter().fold(options, |options, (src, dst)| options.path(*src, *dst))
    }

    /// Returns its first path, in the form of the command line.
    pub fn path_text(&self) -> String {
        match self.paths.first() {
            Some((Some(src), dst)) => format!("{src}@{dst}"),
            Some((None, dst)) => dst.to_string(),
            None => "SOURCE@DESTINATION".to_owned(),
        }
    }
}

impl RouteConfig {
    /// Checks what can be checked without a server and without its name being looked up.
    pub fn check(&self) -> Outcome {
        match self.from.as_deref() {
            None => return Err(Failure::usage("from is missing")),
            Some(from) if !self.path.is_empty() => no_address(from).map_err(refusal)?,
            Some(_) => {}
        }
        self.path.iter().try_for_each(|text| path_spec(text).map(drop).map_err(refusal))
    }

    /// Returns the server, or the session with given paths.
    pub fn server(&self) -> &str {
        self.from.as_deref().unwrap_or_default()
    }

    /// Determines the addresses and the name of the session [NB-42].
    pub fn route(&self) -> Outcome<Route> {
        let from =
            self.from.as_deref().ok_or_else(|| Failure::usage("--from SERVER is missing"))?;
        let (session, specs) = if self.path.is_empty() {
            let dst = address(from, Family::Any)?;
            let src = route_to(dst)?;
            let link = dst.link.or(src.link);
            let name = session_name(from, Some(src.ip));
            (name, vec![PathSpec { link, ..PathSpec::new(Some(src.ip), dst.ip) }])
        } else {
            no_address(from).map_err(refusal)?;
            let specs = self.path.iter().map(|text| path_spec(text).map_err(refusal));
            (from.to_owned(), specs.collect::<Outcome<Vec<_>>>()?)
        };
        let mut paths = Vec::new();
        let mut own = Vec::new();
        for spec in specs {
            let mut dst = Address { ip: spec.dst, link: spec.link };
            let mut src = match spec.src {
                Some(ip) => Address { ip, link: spec.link },
                None => route_to(dst)?,
            };
            joined(&mut src, &mut dst)?;
            paths.push((Some(src.ip), dst.ip));
            own.push(src);
        }
        own.sort();
        own.dedup();
        one_link_each(&own)?;
        Ok(Route { session, paths, own })
    }
}

/// Refuses an address on several links: packets do not show which link they belong to.
fn one_link_each(own: &[Address]) -> Outcome {
    let is_of_another = |one: &Address| own.iter().any(|other| other.ip == one.ip && other != one);
    match own.iter().find(|one| is_of_another(one)) {
        Some(one) => Err(Failure::usage(format!(
            "{} is on two links: a process can have it on one of them; give the others other addresses",
            one.ip
        ))),
        None => Ok(()),
    }
}

/// A mistake in a path or a name has an exit status of its own.
fn refusal(trouble: Trouble) -> Failure {
    Failure::Errno(trouble.errno, trouble.text)
}
