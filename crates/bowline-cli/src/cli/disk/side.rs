//! Options and set-up of the local devices and the engine.

use std::{
    net::{IpAddr, SocketAddr},
    path::PathBuf,
    sync::Arc,
    time::Duration,
};

use bowline_ctl::PathSpec;
use bowline_node::{
    Failure, Outcome,
    values::{Address, Family, address, interval, joined, route_to},
};
use bowline_rdmacore::RdmaCoreDevice;
use bowline_rnbd_driver::client::MapOptions;
use bowline_roce_driver::{PollMode, SoftConfig};
use bowline_rtrs_driver::{Engine, EngineConfig, PORT, Poll};
use bowline_verbs::{Device, Mtu};

use crate::cli::rdma::{addresses, mtu, open_soft};
use crate::cli::tool::{no_address, path_spec, session_name};

/// The device that needs no hardware.
const SOFT: &str = "soft";

/// Device options that client and server share.
#[derive(Clone, Debug, clap::Args)]
pub(super) struct Side {
    /// RDMA device: soft is RoCE in this process; any other name is a device of rdma-core, such as
    /// rxe0; may be repeated for these
    #[arg(long = "device", value_name = "NAME", default_value = SOFT)]
    providers: Vec<String>,
    /// Port of the server
    #[arg(short, long, value_name = "PORT", default_value_t = PORT, value_parser = clap::value_parser!(u16).range(1..))]
    pub(super) port: u16,
    /// Time without a reply after which a path is dead (soft device); the last path of a kernel
    /// client has half a minute
    #[arg(long, value_name = "TIME", default_value = "3", value_parser = some_time)]
    pub(super) path_dead: Duration,
    /// Largest path MTU: 256, 512, 1024, 2048 or 4096; without it, that of the interface
    #[arg(short, long, value_name = "BYTES", value_parser = mtu)]
    mtu: Option<Mtu>,
    /// Poll for packets and completions without sleeping
    #[arg(long)]
    poll: bool,
    /// Write all packets into a file, pcapng
    #[arg(long, value_name = "FILE")]
    capture: Option<PathBuf>,
}

impl Side {
    /// Starts an engine on the devices that have these addresses.
    pub(super) fn engine(&self, addresses: &[Address]) -> Outcome<Arc<Engine>> {
        self.engine_on(self.open(addresses)?)
    }

    /// Starts an engine on devices that are open.
    pub(super) fn engine_on(&self, devices: Vec<Arc<dyn Device>>) -> Outcome<Arc<Engine>> {
        let poll = if self.poll { Poll::Spin } else { Poll::Adaptive };
        Engine::new(devices, EngineConfig { poll })
            .map_err(|error| Failure::Failed(error.to_string()))
    }

    /// Tells whether the device is the soft one, which needs the UDP port of its addresses.
    pub(super) fn is_soft(&self) -> bool {
        self.providers == [SOFT]
    }

    /// Sets what the options say of a soft device.
    pub(super) fn configure(&self, config: &mut SoftConfig) {
        config.mtu = self.mtu;
        config.poll = if self.poll { PollMode::Spin } else { PollMode::default() };
        config.capture.clone_from(&self.capture);
        config.core.give_up = bowline_roce::GiveUp::After(self.path_dead);
    }

    fn open(&self, addresses: &[Address]) -> Outcome<Vec<Arc<dyn Device>>> {
        if self.is_soft() {
            let device = open_soft(addresses, |config| self.configure(config))?;
            return Ok(vec![device]);
        }
        if self.mtu.is_some() || self.capture.is_some() {
            return Err(Failure::usage("--mtu and --capture need the soft device"));
        }
        self.providers
            .iter()
            .map(|name| {
                let device = RdmaCoreDevice::open(name);
                let device = device.map_err(|error| Failure::failed(format!("{name}: {error}")))?;
                Ok(Arc::new(device) as Arc<dyn Device>)
            })
            .collect()
    }

    /// Returns the addresses a server listens on: those given, or all but loopback.
    pub(super) fn places(&self, given: &[String]) -> Outcome<Vec<Address>> {
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
    pub(super) fn with_port(&self, addresses: &[Address]) -> Vec<SocketAddr> {
        addresses.iter().map(|address| SocketAddr::new(address.ip, self.port)).collect()
    }
}

/// Options of a client's session and its paths.
#[derive(Clone, Debug, clap::Args)]
pub(super) struct Towards {
    /// The server: a host name or address, or with --path the session name. Without --path the
    /// session name is HOST_ADDRESS@SERVER, with the name and source address of this machine
    #[arg(long, value_name = "SERVER")]
    from: Option<String>,
    /// A path: DESTINATION or SOURCE@DESTINATION, link-local addresses with their interface, as
    /// fe80::1%eth0; may be repeated. Without it, one path along the route to the server
    #[arg(long, value_name = "PATH", requires = "from")]
    path: Vec<String>,
}

/// The option of a client that has a device of its own.
#[derive(Clone, Debug, clap::Args)]
pub(super) struct Further {
    /// Another local address, for paths that are added later; may be repeated
    #[arg(short = 'I', long = "address", value_name = "ADDRESS")]
    address: Vec<String>,
}

impl Further {
    /// Adds the addresses to those of a route.
    pub(super) fn add_to(&self, route: &mut Route) -> Outcome {
        for text in &self.address {
            route.own.push(address(text, Family::Any)?);
        }
        route.own.sort();
        route.own.dedup();
        one_link_each(&route.own)
    }
}

/// A session to be opened.
#[derive(Clone, Debug)]
pub(super) struct Route {
    pub(super) session: String,
    pub(super) paths: Vec<(Option<IpAddr>, IpAddr)>,
    /// Local addresses of all paths, present and later ones.
    pub(super) own: Vec<Address>,
}

impl Route {
    /// Returns options of mapping a disk over the paths of the route.
    pub(super) fn on(&self, options: MapOptions) -> MapOptions {
        self.paths.iter().fold(options, |options, (src, dst)| options.path(*src, *dst))
    }

    /// Returns its first path, in the form of the command line.
    pub(super) fn path_text(&self) -> String {
        match self.paths.first() {
            Some((Some(src), dst)) => format!("{src}@{dst}"),
            Some((None, dst)) => dst.to_string(),
            None => "SOURCE@DESTINATION".to_owned(),
        }
    }
}

impl Towards {
    /// Checks what can be checked without a server and without its name being looked up.
    pub(super) fn check(&self) -> Outcome {
        match self.from.as_deref() {
            None => return Err(Failure::usage("from is missing")),
            Some(from) if !self.path.is_empty() => no_address(from)?,
            Some(_) => {}
        }
        self.path.iter().try_for_each(|text| path_spec(text).map(drop))
    }

    /// Returns the server, or the session with given paths.
    pub(super) fn server(&self) -> &str {
        self.from.as_deref().unwrap_or_default()
    }

    /// Determines the addresses and the name of the session [NB-42].
    pub(super) fn route(&self) -> Outcome<Route> {
        let from =
            self.from.as_deref().ok_or_else(|| Failure::usage("--from SERVER is missing"))?;
        let (session, specs) = if self.path.is_empty() {
            let dst = address(from, Family::Any)?;
            let src = route_to(dst)?;
            let link = dst.link.or(src.link);
            let name = session_name(from, Some(src.ip));
            (name, vec![PathSpec { link, ..PathSpec::new(Some(src.ip), dst.ip) }])
        } else {
            no_address(from)?;
            let specs = self.path.iter().map(|text| path_spec(text));
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
            "{} is on two links, but a process can use it on one of them only; give the other link another address",
            one.ip
        ))),
        None => Ok(()),
    }
}

/// Parses a time above zero.
pub(super) fn some_time(text: &str) -> Result<Duration, String> {
    match interval(text)? {
        Duration::ZERO => Err(format!("the time must be greater than 0")),
        time => Ok(time),
    }
}
