//! The settings a session is opened with.

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

/// Local ports of paths: Linux's default range of ephemeral ports.
const EPHEMERAL: core::ops::RangeInclusive<u16> = 32768..=60999;

/// A path: the local address, or any; the server's address; and its port, unless it is the
/// session's.
pub(super) type BuilderPath = (Option<IpAddr>, IpAddr, Option<u16>);

/// The settings a session is opened with.
pub struct SessionBuilder {
    pub(super) config: ClientConfig,
    pub(super) paths: Vec<BuilderPath>,
    /// Number of IO connections, if the program has chosen it.
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
    /// Starts with the name of the session, which is its name at the server and in this engine.
    ///
    /// # Errors
    /// `EINVAL` for an invalid name [RT-68].
    pub fn new(name: &str) -> Result<Self, Error> {
        let name =
            SessionName::new(name).map_err(|_| Error::new("naming a session", Errno::EINVAL))?;
        let config = ClientConfig::new(name, random::number()?);
        Ok(Self { config, paths: Vec::new(), connections: None, listeners: Listeners::default() })
    }

    /// Adds a path to this address of the server, from an address of a local device; `None` chooses
    /// the most suitable one.
    #[must_use]
    pub fn path(mut self, src: Option<IpAddr>, dst: IpAddr) -> Self {
        self.paths.push((src, dst, None));
        self
    }

    /// Adds a path to a port other than the session's. Paths that are added to the session later go
    /// to its [`port`](Self::port) [NB-34].
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

    /// Port of the server; default 1234.
    #[must_use]
    pub fn port(mut self, port: u16) -> Self {
        self.config.port = if port == 0 { PORT } else { port };
        self
    }

    /// Time between attempts to reconnect a lost path, fixed as in kernels [RS-10]. Default `None`:
    /// the first attempt is made at once, the next ones after growing delays [RT-91].
    #[must_use]
    pub fn reconnect_delay(mut self, delay: Option<Duration>) -> Self {
        self.config.reconnect_delay = delay;
        self
    }

    /// Attempts to reconnect a lost path; -1: no limit.
    #[must_use]
    pub fn max_reconnects(mut self, attempts: i16) -> Self {
        self.config.max_reconnects = attempts;
        self
    }

    /// IO connections of each path, at most 4095. Requests take the connection of the processor on
    /// which their permit was taken [RT-37]. With 0 they go over the service connection. By default
    /// there is one IO connection for each processor this process may use, at most 16, as in
    /// kernels. If a device of the engine makes its packets in this process, the default is 1: its
    /// connections share one socket and one lock, so more of them only make its bursts smaller.
    #[must_use]
    pub fn io_connections(mut self, connections: u16) -> Self {
        self.connections = Some(connections);
        self
    }

    /// Poll connections of each path, in addition to the IO connections; default 0. They carry
    /// requests with permits of [`Polled`](super::PermitKind::Polled). Their completions go to
    /// separate queues, which the program polls with
    /// [`Session::poll_queue`](super::Session::poll_queue) [RS-31]. If the program does not poll a
    /// queue, the engine empties it after 200 to 500 ms, so that a path can be lost or closed
    /// without the program's help.
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

    /// How a silent server is detected.
    #[must_use]
    pub fn heartbeat(mut self, heartbeat: HbConfig) -> Self {
        self.config.heartbeat = heartbeat;
        self
    }

    /// Longest time of each step of connecting; default 30 s.
    #[must_use]
    pub fn connect_timeout(mut self, limit: Duration) -> Self {
        self.config.connect_timeout = limit;
        self
    }

    /// Reserves a permit for service messages, so that IO cannot block them; default yes.
    #[must_use]
    pub fn reserve_service_permit(mut self, yes: bool) -> Self {
        self.config.reserve_service_permit = yes;
        self
    }

    /// Tells the session that the layer above keeps requests while no path is connected [RT-90];
    /// default no.
    #[must_use]
    pub fn bridges_outages(mut self, yes: bool) -> Self {
        self.config.bridges_outages = yes;
        self
    }

    /// Longest user message of a request in bytes; default 512. The session allocates this much for
    /// each permit. A server has its own limit, by default 4096 including the header; the effective
    /// limit is [`Attrs::max_hdr`](super::Attrs::max_hdr).
    #[must_use]
    pub fn max_usr(mut self, bytes: u16) -> Self {
        self.config.max_usr = bytes;
        self
    }

    /// The keys under which the server writes the data of READs. By default candidates of the
    /// registered memory. With keys for single requests [`Session::open`](super::Session::open)
    /// fails with `EOPNOTSUPP` on devices that cannot make them, such as candidates of libibverbs.
    #[must_use]
    pub fn read_keys(mut self, keys: ReadKeys) -> Self {
        self.config.read_keys = keys;
        self
    }

    /// Allows a bowline server to omit the new keys of chunks from its responses, because the
    /// client counts them [RT-99]; default yes. If not, the server's responses are candidates a
    /// kernel would get.
    #[must_use]
    pub fn counts_keys(mut self, yes: bool) -> Self {
        self.config.counts_keys = yes;
        self
    }

    /// Limits on what the client accepts from a server.
    #[must_use]
    pub fn limits(mut self, limits: ClientLimits) -> Self {
        self.config.limits = limits;
        self
    }

    /// Calls `on_link` when the last path is lost and when one is connected again. It is called
    /// without locks held and must not block. A panic of it is caught, like that of a
    /// [`Completer`](super::Completer).
    #[must_use]
    pub fn on_link(mut self, on_link: impl Fn(LinkEv) + Send + Sync + 'static) -> Self {
        self.listeners.on_link = Some(Box::new(on_link));
        self
    }

    /// Calls `on_path` for each change of a path's state, so that the program sees when redundancy
    /// is lost or restored. Calls are in order, also with respect to [`on_link`](Self::on_link),
    /// and under the same rules. A lost path is [`Reconnecting`](super::PathState::Reconnecting)
    /// until it is [`Connected`](super::PathState::Connected) again. Attempts to connect are
    /// reported too, including candidates of [`Session::open`](super::Session::open), which may
    /// make several.
    #[must_use]
    pub fn on_path(mut self, on_path: impl Fn(PathEv) + Send + Sync + 'static) -> Self {
        self.listeners.on_path = Some(Box::new(on_path));
        self
    }
}

/// Default number of IO connections of each path.
pub(super) fn connections(devices: &[Arc<dyn Device>]) -> u16 {
    const MAX: u16 = 16;
    // A software device has one socket, which more connections do not make faster.
    if devices.iter().any(|device| device.attr().provider == "soft") {
        return 1;
    }
    let processors = std::thread::available_parallelism();
    processors.map_or(1, |count| u16::try_from(count.get()).unwrap_or(MAX).min(MAX))
}

/// Finds a device for a path among candidates that are not `gone`, and chooses the local address
/// and port [RT-35].
pub(super) fn resolve(
    ports: &[Arc<Port>],
    gone: impl Fn(usize) -> bool,
    (src, dst): (Option<IpAddr>, IpAddr),
    port: u16,
) -> Result<PathAddr, Error> {
    const WHAT: &str = "finding a device for a path";
    let (src, dst) = (src.map(|src| src.to_canonical()), dst.to_canonical());
    let find = |want_gone: bool| {
        let candidates = ports.iter().enumerate().filter(|(index, _)| gone(*index) == want_gone);
        let mut all = candidates.flat_map(|(index, port)| {
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
    let not_found = if src.is_some() { Errno::EADDRNOTAVAIL } else { Errno::ENODEV };
    let (index, src) = find(false).ok_or_else(|| match find(true) {
        Some((index, _)) => ports[index].unusable_for(WHAT),
        None => Error::new(WHAT, not_found),
    })?;
    let range = u64::from(EPHEMERAL.end() - EPHEMERAL.start()) + 1;
    let chosen = EPHEMERAL.start() + u16::try_from(random::number()? % range).unwrap_or(0);
    Ok(PathAddr {
        port: PortId(u8::try_from(index).unwrap_or(u8::MAX)),
        src: SocketAddr::new(src, chosen),
        dst: SocketAddr::new(dst, port),
    })
}

/// The error of a session that could not be opened with these paths. Linux treats
/// addresses of two families as equal, and reports only that the path exists already [RT-28].
pub(super) fn refused(what: &'static str, errno: Errno, paths: &[PathAddr]) -> Error {
    const MIXED: &str =
        "connecting paths of IPv4 and of IPv6, of which Linux servers take one kind in a session";
    let differ = |(at, path): (usize, &PathAddr)| {
        let ips = |path: &PathAddr| (path.src.ip(), path.dst.ip());
        paths[..at].iter().all(|other| ips(path) != ips(other))
    };
    let mixed = paths.iter().any(|path| path.dst.is_ipv4())
        && paths.iter().any(|path| path.dst.is_ipv6())
        && paths.iter().enumerate().all(differ);
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
        let message = |errno, paths: &[PathAddr]| {
            let error = refused("opening a session", errno, paths);
            assert_eq!(error.errno(), errno);
            error.to_string()
        };
        let mixed = "connecting paths of IPv4 and of IPv6, of which Linux servers take one kind in a \
                     session: exists already (EEXIST)";
        assert_eq!(message(Errno::EEXIST, &[four, six]), mixed);
        assert_eq!(message(Errno::EEXIST, &[six, other, four]), mixed);
        let plain = "opening a session: exists already (EEXIST)";
        assert_eq!(message(Errno::EEXIST, &[four, other]), plain);
        assert_eq!(message(Errno::EEXIST, &[six]), plain);
        assert_eq!(message(Errno::EEXIST, &[six, four, four]), plain, "the same path twice");
        assert_eq!(message(Errno::EBUSY, &[four, six]), "opening a session: busy (EBUSY)");
    }
}
