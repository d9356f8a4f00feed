//! Settings of a node.

use std::io::{self, Read};
use std::net::{IpAddr, Ipv6Addr};
use std::os::fd::OwnedFd;
use std::time::{SystemTime, UNIX_EPOCH};

use bowline_base::entropy::random_u64;
use bowline_rds::{Limits, PeerList};
use bowline_rds_driver::{Driver, DriverConfig, PollMode};

use super::{Error, Node, ToIp};

/// Collects the settings of a node; [`build`](Self::build) checks them and starts it.
#[derive(Clone, Debug)]
#[must_use = "a builder does nothing until build() is called"]
pub struct Builder {
    config: DriverConfig,
    sysctls: Vec<(String, i64)>,
    /// Buffers that were asked for.
    send_buffer: Option<usize>,
    recv_buffer: Option<usize>,
    /// Longest message that was asked for.
    max_message: Option<u32>,
    /// The first mistake.
    mistake: Option<Error>,
}

/// How many TCP connections there are to each peer that supports several.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Paths {
    /// One.
    One,
    /// Eight, over which sockets are spread.
    #[default]
    Eight,
}

/// For numbers of options and files.
impl TryFrom<u8> for Paths {
    type Error = Error;

    /// # Errors
    /// `EINVAL` for other numbers than 1 and 8.
    fn try_from(number: u8) -> Result<Self, Error> {
        match number {
            1 => Ok(Self::One),
            8 => Ok(Self::Eight),
            _ => Err(bowline_rds::Error::BadValue.into()),
        }
    }
}

impl Builder {
    pub(super) fn new() -> Self {
        Self {
            config: DriverConfig::default(),
            sysctls: Vec::new(),
            send_buffer: None,
            recv_buffer: None,
            max_message: None,
            mistake: None,
        }
    }

    /// Adds an address of the node. It must be an address of this machine; the node listens on each
    /// of its addresses, port 16385. A node without any address uses all addresses of the machine.
    /// For link-local addresses see [`address_on`](Self::address_on). A text that is no address
    /// fails in [`build`](Self::build).
    pub fn address(mut self, address: impl ToIp) -> Self {
        let address = match address.to_ip() {
            Ok(address) => address.to_canonical(),
            Err(error) => {
                self.mistake.get_or_insert(error);
                return self;
            }
        };
        if !self.config.core.addrs.contains(&address) {
            self.config.core.addrs.push(address);
        }
        self
    }

    /// Adds a link-local address of the interface with this number (if_nametoindex). The node
    /// listens there only and reaches link-local peers there. The interface is the scope of
    /// addresses given without one.
    pub fn address_on(mut self, address: Ipv6Addr, interface: u32) -> Self {
        let link = (address, interface);
        if !self.config.core.links.contains(&link) {
            self.config.core.links.push(link);
        }
        self.address(address)
    }

    /// Sets the number of TCP connections to each peer that supports several; by default eight.
    pub fn paths(mut self, paths: Paths) -> Self {
        self.config.core.paths = match paths {
            Paths::One => 1,
            Paths::Eight => 8,
        };
        self
    }

    /// Sets the effective send buffer of new sockets in bytes; the default is 106496, or more with
    /// [`max_message_bytes`](Self::max_message_bytes).
    pub fn default_send_buffer(mut self, bytes: usize) -> Self {
        self.send_buffer = Some(bytes);
        self
    }

    /// Sets the effective receive buffer of new sockets in bytes; the default is 106496, or more
    /// with [`max_message_bytes`](Self::max_message_bytes).
    pub fn default_recv_buffer(mut self, bytes: usize) -> Self {
        self.recv_buffer = Some(bytes);
        self
    }

    /// Sets the length of the longest message in bytes; the default, 1 MiB, is the most that
    /// kernels take. Longer messages go only to bowline nodes with as high a limit.
    ///
    /// This is all that long messages need: new sockets have send and receive buffers of at least
    /// two such messages, unless [`default_send_buffer`](Self::default_send_buffer) or
    /// [`default_recv_buffer`](Self::default_recv_buffer) sets them. (Without this setting the send
    /// buffer, of 104 KiB, limits messages.)
    pub fn max_message_bytes(mut self, bytes: u32) -> Self {
        self.max_message = Some(bytes);
        self
    }

    /// Adds an RDMA device, and its addresses to those of the node. Sockets that are bound to such
    /// an address use RDMA, unless [`set_transport`](super::Socket::set_transport) chose TCP.
    /// The node handles all events of the device's connections, so nothing else can connect on it.
    #[cfg(feature = "rdma")]
    pub fn rdma(mut self, device: std::sync::Arc<dyn crate::verbs::Device>) -> Self {
        for address in device.attr().addrs {
            self = match address {
                IpAddr::V6(v6) if v6.is_unicast_link_local() => {
                    self.address_on(v6, device.link_of(address))
                }
                address => self.address(address),
            };
        }
        self.config.rdma.0.push(device);
        self
    }

    /// Sets how threads wait for the network.
    pub fn poll(mut self, mode: PollMode) -> Self {
        self.config.poll = mode;
        self
    }

    /// Sets the TCP congestion control of all connections. `None`, the default, stands for `cubic`
    /// between addresses of this machine and for the system's default elsewhere.
    pub fn congestion_control(mut self, name: Option<String>) -> Self {
        self.config.congestion_control = name;
        self
    }

    /// Sets one of the kernel's settings by its name, such as `net.rds.ping_enable`.
    pub fn sysctl(mut self, name: &str, value: i64) -> Self {
        self.sysctls.push((name.to_owned(), value));
        self
    }

    /// Switches acknowledgement by the receiving node, in addition to TCP's, with peers that
    /// support it. It is on by default.
    pub fn end_to_end(mut self, on: bool) -> Self {
        self.config.core.end_to_end = on;
        self
    }

    /// Sets the limits of memory and of numbers of objects.
    pub fn limits(mut self, limits: Limits) -> Self {
        self.config.core.limits = limits;
        self
    }

    /// Sets which peers may connect, and may be sent to; by default everybody may. Connections of
    /// others are refused, and sends to them fail with `EHOSTUNREACH` (113).
    pub fn peers(mut self, peers: PeerList) -> Self {
        self.config.core.peers = peers;
        self
    }

    /// Starts the node: listens on port 16385 and starts one background thread.
    ///
    /// # Errors
    /// `EINVAL` for a setting out of its range, for a link-local address without its interface or
    /// with two; `ENOPROTOOPT` (92) for an unknown sysctl; `EADDRINUSE` when the kernel's rds_tcp
    /// or another node has the port; `EADDRNOTAVAIL` for an address the machine does not have; what
    /// the system reports when it has no descriptors or threads left.
    pub fn build(self) -> Result<Node, Error> {
        self.start(Driver::start)
    }

    /// Starts the node with what another one of this machine has
    /// [handed over](Node::hand_over): its sockets, messages that wait, and its peers, who take it
    /// for the same process. The number of paths and end-to-end acknowledgement are those of the
    /// former node. Its sockets are for who knows their ids, as the host of a node does
    /// ([`Node::driver`]). `listeners` are those that were handed over; `commit` is called when
    /// everything is ready and before anything happens, and its error ends the attempt.
    ///
    /// # Errors
    /// Those of [`build`](Self::build); `EINVAL` for what cannot be read or is of another version.
    pub fn resume(
        self,
        from: impl Read,
        listeners: Vec<OwnedFd>,
        commit: impl FnOnce() -> io::Result<()>,
    ) -> Result<Node, Error> {
        self.start(|config| Driver::resume(config, from, listeners, commit))
    }

    fn start(
        self,
        start: impl FnOnce(DriverConfig) -> Result<Driver, bowline_rds_driver::Error>,
    ) -> Result<Node, Error> {
        let Self { mut config, sysctls, send_buffer, recv_buffer, max_message, mistake } = self;
        if let Some(error) = mistake {
            return Err(error);
        }
        let core = &mut config.core;
        if let Some(bytes) = max_message {
            core.max_message = bytes;
            let two = (bytes as usize).saturating_mul(2);
            core.send_buffer = core.send_buffer.max(two);
            core.recv_buffer = core.recv_buffer.max(two);
        }
        core.send_buffer = send_buffer.unwrap_or(core.send_buffer);
        core.recv_buffer = recv_buffer.unwrap_or(core.recv_buffer);
        if core.max_message == 0 {
            return Err(bowline_rds::Error::BadValue.into());
        }
        if core.addrs.iter().any(|ip| ip.is_unspecified() || ip.is_multicast()) {
            return Err(bowline_rds::Error::BadAddress.into());
        }
        check_links(core)?;
        let seed = random_u64();
        core.seed = seed;
        core.generation = (random_u64() as u32).max(1);
        core.first_sequence = first_sequence();
        // Settings are tried on a node without a network first, so that a bad one has no effect.
        let mut trial = bowline_rds::Node::new(core.clone());
        for (name, value) in &sysctls {
            trial.set_sysctl(bowline_rds::Instant::from_nanos(0), name, *value)?;
        }
        let node = Node::from_driver(start(config)?);
        for (name, value) in &sysctls {
            node.set_sysctl(name, *value)?;
        }
        Ok(node)
    }
}

/// Checks that each link-local address has one interface, and no other address has any.
fn check_links(core: &bowline_rds::Config) -> Result<(), Error> {
    let is_link_local = |ip: &IpAddr| matches!(ip, IpAddr::V6(ip) if ip.is_unicast_link_local());
    let count = |ip: &IpAddr| core.links.iter().filter(|(of, _)| of == ip).count();
    for ip in &core.addrs {
        match (is_link_local(ip), count(ip)) {
            (true, 1) | (false, 0) => {}
            (true, 2..) => return Err(bowline_rds::Error::ScopeMismatch.into()),
            _ => return Err(bowline_rds::Error::BadAddress.into()),
        }
    }
    let zero = core.links.iter().any(|(_, link)| *link == 0);
    if zero { Err(bowline_rds::Error::BadAddress.into()) } else { Ok(()) }
}

/// Returns a number that grows from start to start, as long as a node sends fewer than a million
/// messages per millisecond: a kernel drops messages with numbers that an earlier process has used
/// . Two nodes that start in one millisecond get different numbers: an address may move
/// between them, and an acknowledgement to one must not count for the other [R-2025].
fn first_sequence() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    1 + (u64::try_from(since.as_millis()).unwrap_or(0) << 20) + (random_u64() & 0xf_ffff)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::first_sequence;

    // tests
    #[test]
    fn a_later_start_begins_above_a_million_messages_of_an_earlier_one() {
        let earlier = first_sequence();
        std::thread::sleep(Duration::from_millis(2));
        assert!(first_sequence() > earlier + 1_000_000);
    }
}
