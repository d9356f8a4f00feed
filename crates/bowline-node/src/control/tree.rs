//! The control tree of a node: what it is, its settings, counters and connections, in the shape of
//! /sys.
//!
//! ```text
//! class/rds/node -> ../../devices/virtual/rds/node
//! class/rds/node/{addresses, pid, uptime_ms, version}
//!               /info                        all tables at one moment, as `bowline info --json`
//!               /state                       the same without the messages
//!               /{drop, probe}               commands
//!               /sysctl/<setting>            as net.rds.ping_enable, to read and write
//!               /counters/<counter>
//!               /connections/<local@remote>/{flags, next_rx, next_tx, npaths, peer, transport}
//!                                          /paths/<index>/{flags, .., resets, state}
//! class/{rtrs,rnbd}-{client,server}, block, module            the disks of the node
//! proc/sys/net/rds/{ping_enable, .., tcp/rds_tcp_sndbuf, .., ib/max_send_wr, ..}     as in /proc
//! ```
//!
//! Directories of connections have the names of RTRS's paths, and values the names and texts of
//! `bowline info`; those over RDMA have `,infiniband` behind their name, and a type of service
//! other than 0 behind that. The kernel has no such tree: its RDS is seen by `rds-info` only.

use std::{
    collections::BTreeMap,
    net::IpAddr,
    sync::{Arc, LazyLock},
    time::{Duration, Instant},
};

use bowline::rds::Node;
use bowline_ctl::{AttrDef, Caller, Dir, Errno, Node as Object, PathSpec, Sys, Tree, Value};
use bowline_rds::{CloseReason, Counters, SYSCTL_NAMES};

use super::snapshot::{ConnectionRow, NodeFacts, PathRow, Snapshot};
use crate::{disks::HostDisks, values::Address};

/// The directory of the node; a process has one.
pub(super) const NODE: &str = "/class/rds/node";
/// Argument of `drop` for the connections to all peers.
pub(super) const ALL_PEERS: &str = "all";
/// Shortest and longest wait for the answer to a probe.
const PROBE_MIN: Duration = Duration::from_millis(1);
pub(super) const PROBE_MAX: Duration = Duration::from_secs(60);
/// Longest part of that wait between checks whether the client still waits.
const PROBE_SLICE: Duration = Duration::from_millis(100);

static SETTINGS: LazyLock<Vec<AttrDef>> =
    LazyLock::new(|| SYSCTL_NAMES.iter().map(|name| AttrDef { name, mode: 0o644 }).collect());
static COUNTERS: LazyLock<Vec<AttrDef>> =
    LazyLock::new(|| Counters::default().iter().map(|(name, _)| show(name)).collect());
/// Those of a node without RDMA.
static COUNTERS_OF_TCP: LazyLock<Vec<AttrDef>> = LazyLock::new(|| {
    let all = Counters::default();
    let of_tcp = all.iter().filter(|(name, _)| !name.starts_with("ib_"));
    of_tcp.map(|(name, _)| show(name)).collect()
});

/// Returns the tree of a node that starts now.
pub(crate) fn tree(node: Node, facts: NodeFacts, disks: &Arc<HostDisks>) -> Tree {
    let proc = proc(&node);
    let object = NodeObject { node, facts, started: Instant::now() };
    let class = Dir::new().with("node", Arc::new(object));
    disks.objects(Sys::new().class("rds", Arc::new(class)).proc(Arc::new(proc))).tree()
}

/// Returns the settings as a kernel has them below /proc.
fn proc(node: &Node) -> Dir {
    let tcp = SettingsDir { node: node.clone(), files: &PROC_RDS_TCP, below: Vec::new() };
    let ib = SettingsDir { node: node.clone(), files: &PROC_RDS_IB, below: Vec::new() };
    let below: Vec<(String, Arc<dyn Object>)> =
        vec![("ib".to_owned(), Arc::new(ib)), ("tcp".to_owned(), Arc::new(tcp))];
    let rds = SettingsDir { node: node.clone(), files: &PROC_RDS, below };
    let net = Dir::new().with("rds", Arc::new(rds));
    Dir::new().with("sys", Arc::new(Dir::new().with("net", Arc::new(net))))
}

const fn show(name: &'static str) -> AttrDef {
    AttrDef { name, mode: 0o444 }
}

const fn command(name: &'static str) -> AttrDef {
    AttrDef { name, mode: 0o644 }
}

fn text(text: impl Into<String>) -> Result<Value, Errno> {
    Ok(Value::Text(text.into()))
}

fn document(snapshot: &Snapshot) -> Result<Value, Errno> {
    serde_json::to_string(snapshot).map(Value::Document).map_err(|_| Errno::EIO)
}

struct NodeObject {
    node: Node,
    facts: NodeFacts,
    started: Instant,
}

impl Object for NodeObject {
    fn attrs(&self) -> &'static [AttrDef] {
        const {
            &[
                show("addresses"),
                show("pid"),
                show("uptime_ms"),
                show("version"),
                show("info"),
                show("namespace"),
                show("state"),
                command("drop"),
                command("probe"),
            ]
        }
    }

    fn read(&self, name: &str) -> Result<Value, Errno> {
        let facts = &self.facts;
        match name {
            "addresses" => {
                let all: Vec<String> = facts.addresses.iter().map(Address::to_string).collect();
                text(all.join(" "))
            }
            "pid" => Ok(Value::Uint(facts.pid.into())),
            "uptime_ms" => Ok(Value::Uint(self.started.elapsed().as_millis() as u64)),
            "version" => text(facts.version.clone()),
            "namespace" => Ok(Value::Uint(bowline_host::network_namespace())),
            "info" => {
                let snapshot = Snapshot::take(&self.node, facts, self.started.elapsed());
                document(&snapshot)
            }
            "state" => {
                let uptime = self.started.elapsed();
                let snapshot = Snapshot::take_without_messages(&self.node, facts, uptime);
                document(&snapshot)
            }
            "drop" => Ok(Value::Usage("Usage: echo <address>|all > drop")),
            "probe" => Ok(Value::Usage("Usage: echo <local> <remote> <timeout in ms> > probe")),
            _ => Err(Errno::ENOENT),
        }
    }

    /// Results of the commands: number of connections cut, and round trip time in nanoseconds.
    fn call(&self, name: &str, value: &str, caller: &Caller) -> Result<Option<Value>, Errno> {
        let found = match name {
            "drop" => self.node.drop_connections(peer(value)?) as u64,
            "probe" => {
                let (local, remote, timeout) = probe_words(value).ok_or(Errno::EINVAL)?;
                let time = probe(&self.node, caller, local, remote, timeout);
                let why = |error: bowline::rds::Error| {
                    let errno = error.errno();
                    let is_late = errno == Errno::ETIMEDOUT || errno == Errno::EAGAIN;
                    is_late
                        .then(|| why_silent(&self.node, local, remote))
                        .flatten()
                        .unwrap_or(errno)
                };
                time.map_err(why)?.as_nanos() as u64
            }
            _ => return Err(Errno::ENOENT),
        };
        Ok(Some(Value::Uint(found)))
    }

    fn dirs(&self) -> Vec<(String, Arc<dyn Object>)> {
        let node = || self.node.clone();
        vec![
            (
                "sysctl".to_owned(),
                Arc::new(SettingsDir { node: node(), files: &SETTINGS, below: Vec::new() }),
            ),
            ("counters".to_owned(), Arc::new(CountersDir(node()))),
            ("connections".to_owned(), Arc::new(ConnectionsDir(node()))),
        ]
    }
}

/// Parses the argument of `drop`: a peer, or `None` for all.
fn peer(value: &str) -> Result<Option<IpAddr>, Errno> {
    match value {
        ALL_PEERS => Ok(None),
        peer => peer.parse().map(Some).map_err(|_| Errno::EINVAL),
    }
}

/// Parses the arguments of `probe`: addresses of this node and of the other, and milliseconds.
fn probe_words(value: &str) -> Option<(Address, Address, Duration)> {
    let mut words = value.split_ascii_whitespace();
    let (local, remote) = (words.next()?.parse().ok()?, words.next()?.parse().ok()?);
    let timeout = Duration::from_millis(words.next()?.parse().ok()?);
    words.next().is_none().then_some((local, remote, timeout.clamp(PROBE_MIN, PROBE_MAX)))
}

/// Sends one RDS ping, and waits for the answer for as long as the client waits.
fn probe(
    node: &Node,
    caller: &Caller,
    local: Address,
    remote: Address,
    timeout: Duration,
) -> Result<Duration, bowline::rds::Error> {
    let socket = node.bind(local.at(0))?;
    let start = Instant::now();
    socket.set_send_timeout(Some(timeout));
    socket.send_to(&[], remote.at(0))?;
    loop {
        let left = timeout.saturating_sub(start.elapsed());
        socket.set_recv_timeout(Some(left.min(PROBE_SLICE)));
        match socket.recv_from(&mut []) {
            Ok(_) => return Ok(start.elapsed()),
            Err(error) if error.is_timed_out() && left > PROBE_SLICE && !caller.is_gone() => {}
            Err(error) => return Err(error),
        }
    }
}

/// Why a peer has not answered, where it cannot be connected to.
fn why_silent(node: &Node, local: Address, remote: Address) -> Option<Errno> {
    let info = node.info_without_messages();
    let rows = info.paths.iter().map(|path| (path.last_end, PathRow::from(path)));
    let is_path = |row: &PathRow| (row.local_addr, row.remote_addr) == (local.ip, remote.ip);
    let rows: Vec<_> = rows.filter(|(_, row)| is_path(row)).collect();
    if rows.iter().any(|(_, row)| row.flags.connected) {
        return None;
    }
    match rows.into_iter().find_map(|(end, _)| end?.why)? {
        CloseReason::Refused => Some(Errno::ECONNREFUSED),
        CloseReason::Unreachable => Some(Errno::EHOSTUNREACH),
        _ => None,
    }
}

/// Settings as files; their names may be short ones.
struct SettingsDir {
    node: Node,
    files: &'static [AttrDef],
    below: Vec<(String, Arc<dyn Object>)>,
}

impl Object for SettingsDir {
    fn attrs(&self) -> &'static [AttrDef] {
        self.files
    }

    fn read(&self, name: &str) -> Result<Value, Errno> {
        self.node.sysctl(name).map(Value::Int).map_err(|error| error.errno())
    }

    fn write(&self, name: &str, value: &str) -> Result<(), Errno> {
        let value = value.parse().map_err(|_| Errno::EINVAL)?;
        self.node.set_sysctl(name, value).map_err(|error| error.errno())
    }

    fn dirs(&self) -> Vec<(String, Arc<dyn Object>)> {
        self.below.clone()
    }
}

/// Settings of a kernel below /proc/sys/net/rds, and below its directories [OBS-1].
static PROC_RDS: LazyLock<Vec<AttrDef>> = LazyLock::new(|| proc_files("net.rds."));
static PROC_RDS_TCP: LazyLock<Vec<AttrDef>> = LazyLock::new(|| proc_files("net.rds.tcp."));
static PROC_RDS_IB: LazyLock<Vec<AttrDef>> = LazyLock::new(|| proc_files("net.rds.ib."));

/// Returns the files of one directory; the names of the manual are no files of a kernel.
fn proc_files(prefix: &str) -> Vec<AttrDef> {
    let kernel = SYSCTL_NAMES.iter().filter(|name| !MANUAL_NAMES.contains(name));
    let below = kernel.filter_map(|name| name.strip_prefix(prefix));
    below.filter(|file| !file.contains('.')).map(command).collect()
}

/// Names of settings in the manual that a kernel does not have [D-3].
pub const MANUAL_NAMES: [&str; 2] =
    ["net.rds.reconnect_delay_min_ms", "net.rds.reconnect_delay_max_ms"];

struct CountersDir(Node);

impl Object for CountersDir {
    fn attrs(&self) -> &'static [AttrDef] {
        let has_rdma = self.0.driver().with_core(|core, _| core.has_rdma());
        if has_rdma { &COUNTERS } else { &COUNTERS_OF_TCP }
    }

    fn read(&self, name: &str) -> Result<Value, Errno> {
        let counters = self.0.counters().into_iter();
        let mut found = counters.filter(|(known, _)| *known == name);
        found.next().map(|(_, value)| Value::Uint(value)).ok_or(Errno::ENOENT)
    }
}

struct ConnectionsDir(Node);

impl Object for ConnectionsDir {
    /// Queries the node once for all connections; their objects keep the result.
    fn dirs(&self) -> Vec<(String, Arc<dyn Object>)> {
        let info = self.0.info();
        let mut paths: BTreeMap<_, Vec<PathRow>> = BTreeMap::new();
        for path in &info.paths {
            let key = (path.local, path.remote, path.transport, path.tos);
            paths.entry(key).or_default().push(path.into());
        }
        let connections = info.connections.iter().map(|connection| {
            let (local, remote) = (connection.local, connection.remote);
            let (transport, tos) = (connection.transport, connection.tos);
            let paths = paths.remove(&(local, remote, transport, tos)).unwrap_or_default();
            let object: Arc<dyn Object> = Arc::new(Connection { row: connection.into(), paths });
            let mut name = PathSpec::new(Some(local), remote).to_string();
            if transport != "tcp" {
                name += &format!(",{transport}");
            }
            if tos != 0 {
                name += &format!(",{tos}");
            }
            (name, object)
        });
        connections.collect()
    }
}

struct Connection {
    row: ConnectionRow,
    paths: Vec<PathRow>,
}

impl Object for Connection {
    fn attrs(&self) -> &'static [AttrDef] {
        const {
            &[
                show("flags"),
                show("next_rx"),
                show("next_tx"),
                show("npaths"),
                show("peer"),
                show("transport"),
            ]
        }
    }

    fn read(&self, name: &str) -> Result<Value, Errno> {
        match name {
            "flags" => text(self.row.flags.to_string()),
            "next_rx" => Ok(Value::Uint(self.row.next_rx)),
            "next_tx" => Ok(Value::Uint(self.row.next_tx)),
            "npaths" => Ok(Value::Uint(self.row.paths.into())),
            "peer" => text(self.row.peer.clone()),
            "transport" => text(self.row.transport.clone()),
            _ => Err(Errno::ENOENT),
        }
    }

    fn dirs(&self) -> Vec<(String, Arc<dyn Object>)> {
        let paths = self.paths.iter().fold(Dir::new(), |dir, path| {
            dir.with(path.path.to_string(), Arc::new(PathObject(path.clone())))
        });
        vec![("paths".to_owned(), Arc::new(paths))]
    }
}

struct PathObject(PathRow);

impl Object for PathObject {
    fn attrs(&self) -> &'static [AttrDef] {
        const {
            &[
                show("flags"),
                show("next_rx"),
                show("next_tx"),
                show("resets"),
                show("retrans_messages"),
                show("send_messages"),
                show("state"),
            ]
        }
    }

    fn read(&self, name: &str) -> Result<Value, Errno> {
        match name {
            "flags" => text(self.0.flags.to_string()),
            "next_rx" => Ok(Value::Uint(self.0.next_rx)),
            "next_tx" => Ok(Value::Uint(self.0.next_tx)),
            "resets" => Ok(Value::Uint(self.0.resets)),
            "retrans_messages" => Ok(Value::Uint(self.0.retrans_messages)),
            "send_messages" => Ok(Value::Uint(self.0.send_messages)),
            "state" => text(self.0.state.clone()),
            _ => Err(Errno::ENOENT),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_words_of_commands_are_parsed() {
        let address = |text: &str| text.parse::<Address>().unwrap();
        let words = |time| (address("10.0.0.1"), address("::1"), time);
        assert_eq!(probe_words("10.0.0.1 ::1 20"), Some(words(Duration::from_millis(20))));
        assert_eq!(probe_words("10.0.0.1 ::1 0"), Some(words(PROBE_MIN)));
        assert_eq!(probe_words("10.0.0.1 ::1 99999999"), Some(words(PROBE_MAX)));
        for text in ["", "10.0.0.1", "10.0.0.1 ::1", "10.0.0.1 ::1 -1", "x ::1 1", "::1 ::1 1 1"] {
            assert_eq!(probe_words(text), None, "{text}");
        }
        assert_eq!(peer("all"), Ok(None));
        assert_eq!(peer("10.0.0.1"), Ok(Some(IpAddr::from([10, 0, 0, 1]))));
        assert_eq!(peer(""), Err(Errno::EINVAL));
        assert_eq!(peer("elsewhere"), Err(Errno::EINVAL));
    }

    #[test]
    fn every_setting_of_the_specification_is_there() {
        let spec = include_str!("../../../../docs/spec/rds.md");
        let rows = spec.lines().filter_map(|line| line.strip_prefix("| net.rds."));
        let named: Vec<&str> = rows.filter_map(|row| row.split(' ').next()).collect();
        assert_eq!(named.len(), 7, "{named:?}");
        for name in named {
            assert!(SYSCTL_NAMES.contains(&format!("net.rds.{name}").as_str()), "{name}");
        }
    }

    #[test]
    fn every_setting_and_counter_is_a_file() {
        assert_eq!(SETTINGS.len(), SYSCTL_NAMES.len());
        let below = (PROC_RDS_TCP.len(), PROC_RDS_IB.len());
        let kernel = PROC_RDS.len() + below.0 + below.1 + MANUAL_NAMES.len();
        assert_eq!((kernel, below), (SYSCTL_NAMES.len(), (2, 4)));
        assert!(SETTINGS.iter().all(|def| def.is_readable() && def.is_writable()));
        assert_eq!(COUNTERS.len(), Counters::default().iter().count());
        assert!(COUNTERS.iter().all(|def| !def.is_writable()));
    }
}
