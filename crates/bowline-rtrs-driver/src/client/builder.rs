//! What a session is opened with.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use bowline_rtrs::client::{ClientConfig, ClientLimits, PathAddr, ReadKeys};
use bowline_rtrs::{Errno, HbConfig, Policy, PortId};
use bowline_verbs::Device;
use bowline_wire::rtrs::{PORT, SessionName};
use std::sync::Arc;

use super::shared::Listeners;
use super::state::{LinkEv, PathEv};
use crate::port::Port;
use crate::{Error, random};

/// Ports from which paths are connected: those that Linux gives to programs that do not care.
const EPHEMERAL: core::ops::RangeInclusive<u16> = 32768..=60999;

/// A path: own address or any, and the server's, with its port unless that is the session's.
pub(super) type BuilderPath = (Option<IpAddr>, IpAddr, Option<u16>);

/// Everything a session is opened with.
pub struct SessionBuilder {
    pub(super) config: ClientConfig,
    pub(super) paths: Vec<BuilderPath>,
    /// IO connections, when the program has chosen.
    pub(super) connections: Option<u16>,
    pub(super) listeners: Listeners,
}

impl core::fmt::Debug for SessionBuilder {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let Self { config, paths, connections, .. } = self;
        f.debug_struct("SessionBuilder")
            .field("config", config)
            .field("paths", paths)
            .field("connections", connections)
            .finish_non_exhaustive()
    }
}

impl SessionBuilder {
    /// Begins with the name of the session, at the server and here.
    ///
    /// # Errors
    /// `EINVAL` for one that is not a good name [RT-68].
    pub fn new(name: &str) -> Result<Self, Error> {
        let name =
            SessionName::new(name).map_err(|_| Error::new("naming a session", Errno::EINVAL))?;
        let config = ClientConfig::new(name, random::number()?);
        Ok(Self { config, paths: Vec::new(), connections: None, listeners: Listeners::default() })
    }

    /// Adds a path: the server's address, and an address of a device of this side, or the one that
    /// suits best.
    #[must_use]
    pub fn path(mut self, src: Option<IpAddr>, dst: IpAddr) -> Self {
        self.paths.push((src, dst, None));
        self
    }

    /// Adds a path to a port of its own; those that are added to the session later go to its
    /// [`port`](Self::port) [NB-34].
    #[must_use]
    pub fn path_to(mut self, src: Option<IpAddr>, dst: SocketAddr) -> Self {
        self.paths.push((src, dst.ip(), Some(dst.port())));
        self
    }

    /// Adds some paths.
    #[must_use]
    pub fn paths(mut self, paths: &[(Option<IpAddr>, IpAddr)]) -> Self {
        self.paths.extend(paths.iter().map(|(src, dst)| (*src, *dst, None)));
        self
    }

    /// Port of the server; 1234.
    #[must_use]
    pub fn port(mut self, port: u16) -> Self {
        self.config.port = if port == 0 { PORT } else { port };
        self
    }

    /// Time between attempts to connect a lost path, as kernels have it [RS-10]; `None`: at once,
    /// then ever longer [RT-91].
    #[must_use]
    pub fn reconnect_delay(mut self, delay: Option<Duration>) -> Self {
        self.config.reconnect_delay = delay;
        self
    }

    /// Attempts to connect a lost path; -1: for ever.
    #[must_use]
    pub fn max_reconnects(mut self, attempts: i16) -> Self {
        self.config.max_reconnects = attempts;
        self
    }

    /// IO connections of each path, at most 4095; requests of a permit take the one of the
    /// processor that it was taken on [RT-37]. 0: everything goes over the service connection.
    /// Without this there is one for each processor this process may use, at most 16, as kernels
    /// have them; but only one when a device of the engine makes its packets in this process: its
    /// connections have one socket and one lock, so more of them only make its bursts smaller.
    #[must_use]
    pub fn io_connections(mut self, connections: u16) -> Self {
        self.connections = Some(connections);
        self
    }

    /// Connections of each path beside those, for requests with permits of
    /// [`Polled`](super::PermitKind::Polled), whose completions are in queues of their own that the
    /// program polls with [`Session::poll_queue`](super::Session::poll_queue) [RS-31]; none. What
    /// is in a queue that the program does not poll is taken after a quarter of a second or two, so
    /// that a path can be lost or closed without its help.
    #[must_use]
    pub fn poll_connections(mut self, connections: u16) -> Self {
        self.config.poll_connections = connections;
        self
    }

    /// How paths are chosen.
    #[must_use]
    pub fn policy(mut self, policy: Policy) -> Self {
        self.config.policy = policy;
        self
    }

    /// How the server's silence is noticed.
    #[must_use]
    pub fn heartbeat(mut self, heartbeat: HbConfig) -> Self {
        self.config.heartbeat = heartbeat;
        self
    }

    /// Longest time of each step of connecting; 30 s.
    #[must_use]
    pub fn connect_timeout(mut self, limit: Duration) -> Self {
        self.config.connect_timeout = limit;
        self
    }

    /// Keeps a permit back for service messages, so that IO cannot shut them out; yes.
    #[must_use]
    pub fn reserve_service_permit(mut self, yes: bool) -> Self {
        self.config.reserve_service_permit = yes;
        self
    }

    /// The layer above keeps requests while no path is connected [RT-90]; no.
    #[must_use]
    pub fn bridges_outages(mut self, yes: bool) -> Self {
        self.config.bridges_outages = yes;
        self
    }

    /// Longest user message of a request; 512. The session keeps so much for each permit. Servers
    /// have a limit of their own, which is 4096 with the header where nobody has changed it; what
    /// comes of both is [`Attrs::max_hdr`](super::Attrs::max_hdr).
    #[must_use]
    pub fn max_usr(mut self, bytes: u16) -> Self {
        self.config.max_usr = bytes;
        self
    }

    /// Under which keys the server writes the answers to READs; those of the memory, as long as
    /// that is registered. With keys for single requests [`Session::open`](super::Session::open)
    /// fails with `EOPNOTSUPP` on devices that cannot make them, as those of libibverbs cannot.
    #[must_use]
    pub fn read_keys(mut self, keys: ReadKeys) -> Self {
        self.config.read_keys = keys;
        self
    }

    /// Servers of bowline need not tell each new key of a chunk [RT-99]; yes. Otherwise answers are
    /// those a kernel gets.
    #[must_use]
    pub fn counts_keys(mut self, yes: bool) -> Self {
        self.config.counts_keys = yes;
        self
    }

    /// Bounds of what is taken from a server.
    #[must_use]
    pub fn limits(mut self, limits: ClientLimits) -> Self {
        self.config.limits = limits;
        self
    }

    /// Is told when the last path is lost and when one is back; called without locks held, and must
    /// not block. A panic of it ends there, as that of a [`Completer`](super::Completer) does.
    #[must_use]
    pub fn on_link(mut self, on_link: impl Fn(LinkEv) + Send + Sync + 'static) -> Self {
        self.listeners.on_link = Some(Box::new(on_link));
        self
    }

    /// Is told of each change of a path's state, in order, and between what
    /// [`on_link`](Self::on_link) is told, and under the same rules: that redundancy is lost, or
    /// back. A path that is lost is [`Reconnecting`](super::PathState::Reconnecting) until it is
    /// [`Connected`](super::PathState::Connected) again. Attempts to connect are told too, also
    /// those of [`Session::open`](super::Session::open), which may be several.
    #[must_use]
    pub fn on_path(mut self, on_path: impl Fn(PathEv) + Send + Sync + 'static) -> Self {
        self.listeners.on_path = Some(Box::new(on_path));
        self
    }
}

/// IO connections of each path, when the program has not chosen.
pub(super) fn connections(devices: &[Arc<dyn Device>]) -> u16 {
    const MOST: u16 = 16;
    // A device in software has one socket, which more connections do not make faster.
    if devices.iter().any(|device| device.attr().provider == "soft") {
        return 1;
    }
    let processors = std::thread::available_parallelism();
    processors.map_or(1, |count| u16::try_from(count.get()).unwrap_or(MOST).min(MOST))
}

/// Finds the device and address of a path, of devices that are not `gone`, and chooses a port
/// [RT-35].
pub(super) fn resolve(
    ports: &[Arc<Port>],
    gone: impl Fn(usize) -> bool,
    (src, dst): (Option<IpAddr>, IpAddr),
    port: u16,
) -> Result<PathAddr, Error> {
    const WHAT: &str = "finding a device for a path";
    let (src, dst) = (src.map(|src| src.to_canonical()), dst.to_canonical());
    let find = |of_gone: bool| {
        let those = ports.iter().enumerate().filter(|(index, _)| gone(*index) == of_gone);
        let mut all = those.flat_map(|(index, port)| {
            let addrs = port.device().attr().addrs.into_iter();
            addrs.map(move |addr| (index, addr.to_canonical()))
        });
        match src {
            Some(src) => all.find(|(_, addr)| *addr == src),
            None => {
                let same = all.filter(|(_, addr)| addr.is_ipv4() == dst.is_ipv4());
                same.min_by_key(|(_, addr)| bits(*addr) ^ bits(dst))
            }
        }
    };
    let nothing = if src.is_some() { Errno::EADDRNOTAVAIL } else { Errno::ENODEV };
    let (index, src) = find(false).ok_or_else(|| match find(true) {
        Some((index, _)) => ports[index].unusable_for(WHAT),
        None => Error::new(WHAT, nothing),
    })?;
    let range = u64::from(EPHEMERAL.end() - EPHEMERAL.start()) + 1;
    let chosen = EPHEMERAL.start() + u16::try_from(random::number()? % range).unwrap_or(0);
    Ok(PathAddr {
        port: PortId(u8::try_from(index).unwrap_or(u8::MAX)),
        src: SocketAddr::new(src, chosen),
        dst: SocketAddr::new(dst, port),
    })
}

/// Why a session with these paths could not be had. Linux takes addresses of two families for the
/// same, and says no more than that the path is there already [RT-28].
pub(super) fn refused(what: &'static str, errno: Errno, paths: &[PathAddr]) -> Error {
    const MIXED: &str =
        "connecting paths of IPv4 and of IPv6, of which Linux servers take one kind in a session";
    let apart = |(at, one): (usize, &PathAddr)| {
        let ips = |path: &PathAddr| (path.src.ip(), path.dst.ip());
        paths[..at].iter().all(|other| ips(one) != ips(other))
    };
    let mixed = paths.iter().any(|path| path.dst.is_ipv4())
        && paths.iter().any(|path| path.dst.is_ipv6())
        && paths.iter().enumerate().all(apart);
    Error::new(if errno == Errno::EEXIST && mixed { MIXED } else { what }, errno)
}

fn bits(addr: IpAddr) -> u128 {
    match addr {
        IpAddr::V4(addr) => u128::from(addr.to_bits()) << 96,
        IpAddr::V6(addr) => addr.to_bits(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // tests [RT-28]
    #[test]
    fn a_path_refused_for_its_family_is_called_that() {
        let path = |ips: [&str; 2]| {
            let [src, dst] = ips.map(|ip| SocketAddr::new(ip.parse().unwrap(), 1234));
            PathAddr { port: PortId(0), src, dst }
        };
        let four = path(["10.0.0.1", "10.0.0.2"]);
        let other = path(["10.0.1.1", "10.0.1.2"]);
        let six = path(["fd00::1", "fd00::2"]);
        let told = |errno, paths: &[PathAddr]| {
            let error = refused("opening a session", errno, paths);
            assert_eq!(error.errno(), errno);
            error.to_string()
        };
        let mixed = "connecting paths of IPv4 and of IPv6, of which Linux servers take one kind in a \
                     session: exists already (EEXIST)";
        assert_eq!(told(Errno::EEXIST, &[four, six]), mixed);
        assert_eq!(told(Errno::EEXIST, &[six, other, four]), mixed);
        let plain = "opening a session: exists already (EEXIST)";
        assert_eq!(told(Errno::EEXIST, &[four, other]), plain);
        assert_eq!(told(Errno::EEXIST, &[six]), plain);
        assert_eq!(told(Errno::EEXIST, &[six, four, four]), plain, "the same path twice");
        assert_eq!(told(Errno::EBUSY, &[four, six]), "opening a session: busy (EBUSY)");
    }
}
