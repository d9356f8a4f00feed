//! The client's side of the tree.

use std::sync::Arc;

use bowline_ctl::{AttrDef, Errno, Node, PathSpec, Value, address_text};
use bowline_rtrs::{PathId, Policy};
use bowline_verbs::PathStats;

use super::{
    ClientPath, ClientSession, ClientStats, Files, Listed, Lookup, PathCommand, Stats, UEVENT,
    command, must_be_one, network, per_cpu, show, text,
};

const ADD_PATH: &str = "Usage: echo [<source addr>@]<destination addr> > add_path\n\n\
                        *addr ::= [ ip:<ipv4|ipv6> | gid:<gid> ]";
/// Limits of `max_reconnect_attempts` [RS-33].
const ATTEMPTS_MIN: i64 = -1;
const ATTEMPTS_MAX: i64 = 9999;

/// Returns the directory of client sessions, one device per session [RS-33]. Calls `sessions` at
/// every access.
pub fn client_node(
    sessions: impl Fn() -> Vec<Arc<dyn ClientSession>> + Send + Sync + 'static,
    files: Files,
) -> Arc<dyn Node> {
    Arc::new(Listed(move || {
        let all = sessions().into_iter();
        all.map(|session| {
            let node: Arc<dyn Node> =
                Arc::new(SessionNode { session: Arc::clone(&session), files });
            (session.name(), node)
        })
        .collect()
    }))
}

struct SessionNode {
    session: Arc<dyn ClientSession>,
    files: Files,
}

impl Node for SessionNode {
    fn attrs(&self) -> &'static [AttrDef] {
        const ALL: [AttrDef; 5] = [
            command("add_path"),
            command("max_reconnect_attempts"),
            command("mpath_policy"),
            UEVENT,
            command("mp_policy"),
        ];
        match self.files {
            Files::All => &ALL,
            Files::Linux612 => ALL.split_last().map_or(&[], |(_, kept)| kept),
        }
    }

    fn read(&self, name: &str) -> Result<Value, Errno> {
        match name {
            "add_path" => Ok(Value::Usage(ADD_PATH)),
            "max_reconnect_attempts" => Ok(Value::Int(self.session.max_reconnects().into())),
            "mpath_policy" | "mp_policy" => text(self.session.policy().to_string()),
            "uevent" => Ok(Value::Empty),
            _ => Err(Errno::ENOENT),
        }
    }

    fn write(&self, name: &str, value: &str) -> Result<(), Errno> {
        match name {
            "add_path" => {
                self.session.add_path(first_line(value).parse::<PathSpec>().map_err(bad)?)
            }
            "max_reconnect_attempts" => {
                self.session.set_max_reconnects(attempts(value)?);
                Ok(())
            }
            "mpath_policy" | "mp_policy" => {
                self.session.set_policy(value.parse::<Policy>()?);
                Ok(())
            }
            _ => Err(Errno::EINVAL),
        }
    }

    fn dirs(&self) -> Vec<(String, Arc<dyn Node>)> {
        let (session, files) = (Arc::clone(&self.session), self.files);
        let paths = Listed(move || {
            let all = session.paths().into_iter();
            all.map(|path| {
                let node = PathNode { session: Arc::clone(&session), id: path.id, files };
                let node: Arc<dyn Node> = Arc::new(node);
                (PathSpec::new(Some(path.src), path.dst).to_string(), node)
            })
            .collect()
        });
        vec![("paths".to_owned(), Arc::new(paths))]
    }
}

/// The line that is parsed; text that a script writes after it is ignored.
fn first_line(text: &str) -> &str {
    text.split('\n').next().unwrap_or_default().trim()
}

/// Maps errors of the address parser. The kernel answers every malformed address with `EINVAL`, and
/// an address where no server is with the error of the connection attempt [RS-34] [RS-47].
fn bad(errno: Errno) -> Errno {
    if errno == Errno::ENODEV { Errno::ENODEV } else { Errno::EINVAL }
}

/// Parses a number of attempts; no blanks are allowed around it [RS-33].
fn attempts(text: &str) -> Result<i16, Errno> {
    let number: i64 =
        text.parse().map_err(|error: std::num::ParseIntError| match error.kind() {
            std::num::IntErrorKind::PosOverflow | std::num::IntErrorKind::NegOverflow => {
                Errno::ERANGE
            }
            _ => Errno::EINVAL,
        })?;
    if i32::try_from(number).is_err() {
        return Err(Errno::ERANGE);
    }
    if !(ATTEMPTS_MIN..=ATTEMPTS_MAX).contains(&number) {
        return Err(Errno::EINVAL);
    }
    i16::try_from(number).map_err(|_| Errno::EINVAL)
}

struct PathNode {
    session: Arc<dyn ClientSession>,
    id: PathId,
    files: Files,
}

impl PathNode {
    fn path(&self) -> Result<ClientPath, Errno> {
        self.session.paths().into_iter().find(|path| path.id == self.id).ok_or(Errno::ENODEV)
    }
}

impl Node for PathNode {
    fn attrs(&self) -> &'static [AttrDef] {
        const {
            &[
                show("state"),
                show("hca_name"),
                show("hca_port"),
                show("src_addr"),
                show("dst_addr"),
                show("cur_latency"),
                command("reconnect"),
                command("disconnect"),
                command("remove_path"),
            ]
        }
    }

    fn read(&self, name: &str) -> Result<Value, Errno> {
        let path = self.path()?;
        match name {
            "state" => text(if path.connected { "connected" } else { "disconnected" }),
            "hca_name" => text(path.device),
            "hca_port" => Ok(Value::Uint(path.port.into())),
            "src_addr" => text(address_text(path.src)),
            "dst_addr" => text(address_text(path.dst)),
            "cur_latency" => text(format!("{} ns", path.latency_ns)),
            "reconnect" => Ok(Value::Usage("Usage: echo 1 > reconnect")),
            "disconnect" => Ok(Value::Usage("Usage: echo 1 > disconnect")),
            "remove_path" => Ok(Value::Usage("Usage: echo 1 > remove_path")),
            _ => Err(Errno::ENOENT),
        }
    }

    fn write(&self, name: &str, value: &str) -> Result<(), Errno> {
        must_be_one(value)?;
        let command = match name {
            "reconnect" => PathCommand::Reconnect,
            "disconnect" => PathCommand::Disconnect,
            "remove_path" => PathCommand::Remove,
            _ => return Err(Errno::ENOENT),
        };
        self.session.command(self.id, command)
    }

    fn dirs(&self) -> Vec<(String, Arc<dyn Node>)> {
        let (session, id) = (Arc::clone(&self.session), self.id);
        let stats: Lookup<ClientStats> = {
            let session = Arc::clone(&session);
            Arc::new(move || {
                session.paths().into_iter().find(|path| path.id == id).map(|path| path.stats)
            })
        };
        let node = StatsNode { session, id, stats, files: self.files };
        vec![("stats".to_owned(), Arc::new(node))]
    }
}

struct StatsNode {
    session: Arc<dyn ClientSession>,
    id: PathId,
    stats: Lookup<ClientStats>,
    files: Files,
}

impl StatsNode {
    fn network(&self) -> Option<PathStats> {
        let paths = self.session.paths();
        paths.into_iter().find(|path| path.id == self.id)?.network
    }
}

impl Node for StatsNode {
    fn attrs(&self) -> &'static [AttrDef] {
        const ALL: [AttrDef; 9] = [
            command("cpu_migration_from"),
            command("cpu_migration_to"),
            command("rdma"),
            command("reconnects"),
            command("reset_all"),
            command("rdma_lat"),
            command("wc_completion"),
            command("cpu_migration"),
            show("network"),
        ];
        match self.files {
            Files::All if self.network().is_some() => &ALL,
            Files::All => ALL.split_last().map_or(&[], |(_, others)| others),
            Files::Linux612 => ALL.split_at(5).0,
        }
    }

    fn read(&self, name: &str) -> Result<Value, Errno> {
        let stats = (self.stats)().ok_or(Errno::ENODEV)?;
        match name {
            "cpu_migration_from" => text(per_cpu(&stats.migration_from)),
            "cpu_migration_to" => text(per_cpu(&stats.migration_to)),
            "cpu_migration" => text(format!(
                "from: {}\nto: {}",
                per_cpu(&stats.migration_from).trim_end(),
                per_cpu(&stats.migration_to).trim_end()
            )),
            "rdma" => Ok(Value::Words(vec![
                ("reads", stats.io.reads),
                ("read_bytes", stats.io.read_bytes),
                ("writes", stats.io.writes),
                ("write_bytes", stats.io.write_bytes),
                ("inflight", stats.io.inflight),
                ("failovers", stats.failovers),
            ])),
            "reconnects" => Ok(Value::Words(vec![
                ("successful", stats.reconnects),
                ("failed", stats.reconnects_failed),
            ])),
            "reset_all" => Ok(Value::Usage("echo 1 to reset all statistics")),
            "network" => self.network().as_ref().map(network).ok_or(Errno::ENOENT),
            "rdma_lat" => text(latency(&stats)),
            "wc_completion" => {
                let all = stats.completions;
                let average = all.total.checked_div(all.calls).unwrap_or(0);
                Ok(Value::Words(vec![("max", all.max), ("average", average)]))
            }
            _ => Err(Errno::ENOENT),
        }
    }

    fn write(&self, name: &str, value: &str) -> Result<(), Errno> {
        let what = match name {
            // The kernel's documentation says 0, its code 1 [RS-46].
            "reset_all" if self.files == Files::All && value == "0" => Stats::All,
            _ => {
                must_be_one(value)?;
                match name {
                    "cpu_migration_from" | "cpu_migration_to" | "cpu_migration" => Stats::Migration,
                    "rdma" => Stats::Rdma,
                    "reconnects" => Stats::Reconnects,
                    "rdma_lat" => Stats::Latency,
                    "wc_completion" => Stats::Completions,
                    "reset_all" => Stats::All,
                    _ => return Err(Errno::ENOENT),
                }
            }
        };
        self.session.reset(self.id, what);
        Ok(())
    }
}

/// The histogram of RS-46 c, without the newline after its last line.
fn latency(stats: &ClientStats) -> String {
    let (rows, last) = stats.latency.split_at(stats.latency.len() - 1);
    let mut out = String::new();
    for (index, (reads, writes)) in rows.iter().enumerate() {
        out.push_str(&format!("{} ms: {reads} {writes}\n", 1u32 << index));
    }
    for (reads, writes) in last {
        out.push_str(&format!(">= 65536 ms: {reads} {writes}\n"));
    }
    let (read, write) = stats.latency_max_ms;
    out.push_str(&format!("maximum ms: {read} {write}"));
    out
}
