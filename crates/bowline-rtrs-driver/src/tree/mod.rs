//! The control tree of RTRS: sessions and paths as under /sys/class/rtrs-client and
//! /sys/class/rtrs-server.
//!
//! ```text
//! rtrs-client/<session>/{add_path, max_reconnect_attempts, mpath_policy}
//!                      /paths/<src@dst>/{state, hca_name, .., reconnect, disconnect, remove_path}
//!                                      /stats/{rdma, reconnects, .., reset_all}
//! rtrs-server/<session>/paths/<client@server>/{hca_name, .., disconnect, stats/rdma}
//! ```
//!
//! Where the device tells, stats/network says what it knows about the way to the peer [RS-50].
//!
//! Texts, modes and error numbers are those of Linux 6.12 [RS-32..44]. Files that only older
//! kernels had are present too, for tools of that time [RS-46], unless [`Files::Linux612`] asks for
//! exactly the files of 6.12.
//!
//! Spec: `docs/spec/rtrs.md`, sections 9 and 10.

mod client;
mod live;
mod server;
#[cfg(test)]
mod tests;
mod view;

use std::sync::Arc;
use std::time::Duration;

use bowline_ctl::{AttrDef, Errno, Node, Value};
use bowline_verbs::PathStats;

pub use client::client_node;
pub use live::is_on_link;
pub use server::{ServerParameters, server_node};
pub use view::{
    ClientPath, ClientSession, ClientStats, Completions, IoStats, LATENCY_ROWS, PathCommand,
    ServerPath, ServerSession, ServerSessions, Stats,
};

/// The set of files in a tree.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum Files {
    /// The files of Linux 6.12, and those of older kernels that 6.12 dropped [RS-46].
    #[default]
    All,
    /// Exactly the files of Linux 6.12.
    Linux612,
}

/// The attribute that every device of a class has.
const UEVENT: AttrDef = AttrDef { name: "uevent", mode: 0o644 };

/// Looks up the object behind a directory at every access, because it may be gone by then.
type Lookup<T> = Arc<dyn Fn() -> Option<T> + Send + Sync>;

const fn show(name: &'static str) -> AttrDef {
    AttrDef { name, mode: 0o444 }
}

const fn command(name: &'static str) -> AttrDef {
    AttrDef { name, mode: 0o644 }
}

fn text(text: impl Into<String>) -> Result<Value, Errno> {
    Ok(Value::Text(text.into()))
}

/// Checks a value written to a command file: only "1" is allowed.
fn must_be_one(value: &str) -> Result<(), Errno> {
    if value == "1" { Ok(()) } else { Err(Errno::EINVAL) }
}

/// The file `stats/network`: what a device knows about the way to a peer, in microseconds, bytes
/// and bytes per second; 0 where there is no limit or nothing was measured [RS-50].
fn network(path: &PathStats) -> Value {
    let micros = |time: Duration| u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
    Value::Words(vec![
        ("round_trip_usec", path.round_trip.map_or(0, micros)),
        ("least_round_trip_usec", micros(path.least_round_trip)),
        ("window", path.window.unwrap_or(0)),
        ("in_flight", path.in_flight),
        ("rate", path.rate.unwrap_or(0)),
        ("lost_gaps", path.lost_gaps),
        ("lost_timeouts", path.lost_timeouts),
        ("congestion_losses", path.congestion_losses),
        ("resent", path.resent),
        ("cnps_received", path.cnps_received),
        ("cnps_sent", path.cnps_sent),
    ])
}

/// Formats per-processor values as the kernel does: a blank after each.
fn per_cpu(values: &[u64]) -> String {
    values.iter().map(|value| format!("{value} ")).collect()
}

/// A directory whose children are made at every access.
struct Listed<F>(F);

impl<F: Fn() -> Vec<(String, Arc<dyn Node>)> + Send + Sync> Node for Listed<F> {
    fn dirs(&self) -> Vec<(String, Arc<dyn Node>)> {
        (self.0)()
    }
}
