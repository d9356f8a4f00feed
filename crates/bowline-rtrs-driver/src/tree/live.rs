//! The tree's view of real sessions and servers.

use std::net::IpAddr;
use std::sync::{Arc, LazyLock};

use bowline_ctl::{Errno, PathSpec};
use bowline_rtrs::{PathId, Policy, PortId, client, server};
use bowline_verbs::{Device, PathStats};

use super::{
    ClientPath, ClientSession, ClientStats, Completions, IoStats, PathCommand, ServerPath,
    ServerSession, ServerSessions, Stats,
};
use crate::client::{PathView, Session};
use crate::server::Server;

/// Returns whether the local address of a path belongs to the interface in its scope id. A device
/// that does not know its interface is assumed to match.
pub fn is_on_link<'a>(
    devices: impl IntoIterator<Item = &'a Arc<dyn Device>>,
    path: &PathSpec,
) -> bool {
    let (Some(src), Some(link)) = (path.src, path.link) else { return true };
    let of =
        |device: &Arc<dyn Device>| device.attr().addrs.contains(&src).then(|| device.link_of(src));
    devices.into_iter().find_map(of).is_none_or(|found| found == 0 || found == link)
}

/// Every device in this tree has one port.
const DEVICE_PORT: u8 = 1;

impl ClientSession for Session {
    fn name(&self) -> String {
        Self::name(self).to_owned()
    }

    fn paths(&self) -> Vec<ClientPath> {
        let all = Self::paths(self).into_iter();
        all.map(|path| ClientPath {
            id: path.id,
            src: path.src.ip(),
            dst: path.dst.ip(),
            connected: path.state == client::PathState::Connected,
            device: self.device_name(path.port).unwrap_or_default(),
            port: DEVICE_PORT,
            latency_ns: u64::try_from(path.latency.as_nanos()).unwrap_or(u64::MAX),
            network: network(self.devices(), path.port, path.dst.ip()),
            stats: stats(path),
        })
        .collect()
    }

    fn policy(&self) -> Policy {
        Self::policy(self)
    }

    fn set_policy(&self, policy: Policy) {
        Self::set_policy(self, policy);
    }

    fn max_reconnects(&self) -> i16 {
        Self::max_reconnects(self)
    }

    fn set_max_reconnects(&self, attempts: i16) {
        Self::set_max_reconnects(self, attempts);
    }

    fn add_path(&self, path: PathSpec) -> Result<(), Errno> {
        if !is_on_link(self.devices(), &path) {
            return Err(Errno::ENODEV);
        }
        let added = Self::add_path(self, path.src, path.dst);
        added.map(|_| ()).map_err(|error| error.errno())
    }

    fn command(&self, path: PathId, command: PathCommand) -> Result<(), Errno> {
        let done = match command {
            PathCommand::Reconnect => self.reconnect_path(path),
            PathCommand::Disconnect => self.disconnect_path(path),
            PathCommand::Remove => self.remove_path(path),
        };
        done.map_err(|error| match error.errno() {
            // A failed connection attempt returns the same error, but its path still exists
            // [RS-37].
            Errno::ENOTCONN if !Self::paths(self).iter().any(|known| known.id == path) => {
                Errno::ENODEV
            }
            errno => errno,
        })
    }

    fn reset(&self, path: PathId, what: Stats) {
        let file = match what {
            Stats::Rdma => client::StatsFile::Rdma,
            Stats::Migration => client::StatsFile::Migration,
            Stats::Reconnects => client::StatsFile::Reconnects,
            Stats::Latency => client::StatsFile::Latencies,
            Stats::Completions => client::StatsFile::WcCompletion,
            Stats::All => client::StatsFile::All,
        };
        // The path may be gone; then there is nothing to reset.
        let _ = self.reset_stats(path, file);
    }
}

/// What a device knows about the way to a peer.
fn network(devices: &[Arc<dyn Device>], port: PortId, peer: IpAddr) -> Option<PathStats> {
    let device = devices.get(usize::from(port.0))?;
    device.paths().into_iter().find(|path| path.peer == peer.to_canonical())
}

fn stats(path: PathView) -> ClientStats {
    let PathView { inflight, stats, .. } = path;
    // A counter that has not been initialized is shown as 0 [RS-42].
    let count = |number: i64| u64::try_from(number).unwrap_or(0);
    let ms = |time: core::time::Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
    ClientStats {
        io: IoStats {
            reads: stats.reads,
            read_bytes: stats.read_bytes,
            writes: stats.writes,
            write_bytes: stats.write_bytes,
            inflight: inflight.into(),
        },
        failovers: stats.failovers,
        reconnects: count(stats.reconnects),
        reconnects_failed: count(stats.reconnects_failed),
        migration_from: per_processor(stats.migration_from),
        migration_to: per_processor(stats.migration_to),
        latency: stats.latencies.rows.map(|[reads, writes]| (reads, writes)),
        latency_max_ms: (ms(stats.latencies.max[0]), ms(stats.latencies.max[1])),
        latency_sum: stats.latencies.sum.into(),
        completions: Completions {
            max: stats.wc_max,
            total: stats.wc_total,
            calls: stats.wc_calls,
        },
    }
}

/// Extends the list to one number for each processor of the machine, including idle ones [RS-41].
fn per_processor(mut counts: Vec<u64>) -> Vec<u64> {
    static POSSIBLE: LazyLock<usize> = LazyLock::new(|| {
        let all = std::fs::read_to_string("/sys/devices/system/cpu/possible");
        let all = all.ok().and_then(|text| numbers(&text));
        // Falls back to the processors that this process may use.
        all.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from))
    });
    let processors = *POSSIBLE;
    if counts.len() < processors {
        counts.resize(processors, 0);
    }
    counts
}

/// Counts the numbers in a list such as `0-3,8`.
fn numbers(list: &str) -> Option<usize> {
    list.trim_end().split(',').try_fold(0_usize, |count, part| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (usize, usize) = (first.parse().ok()?, last.parse().ok()?);
        count.checked_add(last.checked_sub(first)?.checked_add(1)?)
    })
}

impl ServerSessions for Server {
    /// A path is listed from its INFO_REQ until it closes [RS-40].
    fn sessions(&self) -> Vec<ServerSession> {
        let all = Self::sessions(self).into_iter();
        all.filter_map(|session| {
            let name = session.name?.as_str().to_owned();
            let connected =
                session.paths.into_iter().filter(|p| p.state == server::PathState::Connected);
            let paths = connected.map(|path| ServerPath {
                id: path.path,
                client: path.remote.ip(),
                server: path.local.ip(),
                device: self.device_name(path.port).unwrap_or_default(),
                port: DEVICE_PORT,
                io: IoStats {
                    reads: path.stats.reads,
                    read_bytes: path.stats.read_bytes,
                    writes: path.stats.writes,
                    write_bytes: path.stats.write_bytes,
                    inflight: path.stats.inflight.into(),
                },
                completions: Completions {
                    max: path.stats.wc_max,
                    total: path.stats.wc_total,
                    calls: path.stats.wc_calls,
                },
                network: network(self.devices(), path.port, path.remote.ip()),
            });
            Some(ServerSession { name, paths: paths.collect() })
        })
        .collect()
    }

    fn disconnect(&self, path: PathId) -> Result<(), Errno> {
        self.disconnect_path(path).map_err(|error| match error.errno() {
            Errno::ENOTCONN => Errno::ENODEV,
            errno => errno,
        })
    }

    fn reset(&self, path: PathId, what: Stats) {
        if matches!(what, Stats::Rdma | Stats::All) {
            self.reset_rdma(path);
        }
        if matches!(what, Stats::Completions | Stats::All) {
            self.reset_completions(path);
        }
    }
}

#[cfg(test)]
mod tests {
    use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

    use super::*;

    #[test]
    fn there_is_a_number_for_every_possible_processor() {
        // tests [RS-41]
        for (list, count) in [("0\n", 1), ("0-3\n", 4), ("0-3,8,10-11\n", 7)] {
            assert_eq!(numbers(list), Some(count), "{list}");
        }
        for list in ["", "x", "3-0", "0-", "0,,1"] {
            assert_eq!(numbers(list), None, "{list}");
        }
        let Ok(all) = std::fs::read_to_string("/sys/devices/system/cpu/possible") else {
            return bowline_testkit::skipped::because("the system does not tell its processors");
        };
        // A process restricted to one processor shows the same columns.
        let allowed = sched_getaffinity(None).unwrap();
        let first = (0..CpuSet::MAX_CPU).find(|cpu| allowed.is_set(*cpu)).unwrap();
        let mut one = CpuSet::new();
        one.set(first);
        let columns = std::thread::spawn(move || {
            sched_setaffinity(None, &one).unwrap();
            per_processor(vec![7])
        });
        let columns = columns.join().unwrap();
        assert_eq!(columns.len(), numbers(&all).unwrap());
        assert_eq!(columns[0], 7);
    }
}
