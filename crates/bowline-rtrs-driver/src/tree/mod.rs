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
//! Texts, modes and error numbers are those of Linux 6.12 [RS-32..44]. Files that older kernels
//! had stand beside them, for readers of that time [RS-46], unless [`Files::Linux612`] asks for
//! exactly what 6.12 has.
//!
//! Spec: `docs/spec/rtrs.md`, sections 9 and 10.

mod client;
mod live;
mod server;
#[cfg(test)]
mod tests;
mod view;

use std::sync::Arc;

use bowline_ctl::{AttrDef, Errno, Node, Value};

pub use client::client_node;
pub use live::is_on_link;
pub use server::{ServerParameters, server_node};
pub use view::{
    ClientPath, ClientSession, ClientStats, Completions, IoStats, LATENCY_ROWS, PathCommand,
    ServerPath, ServerSession, ServerSessions, Stats,
};

/// Which files a tree has.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum Files {
    /// Those of Linux 6.12, and those that it dropped [RS-46].
    #[default]
    All,
    /// Exactly those of Linux 6.12.
    Linux612,
}

/// What every device of a class has.
const UEVENT: AttrDef = AttrDef { name: "uevent", mode: 0o644 };

/// Something of an attribute's directory that is looked up again at every use, because it may be
/// gone by then.
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

/// A command file takes "1" and nothing else.
fn must_be_one(value: &str) -> Result<(), Errno> {
    if value == "1" { Ok(()) } else { Err(Errno::EINVAL) }
}

/// A list of numbers as the kernel prints per-processor values: a blank after each.
fn per_cpu(values: &[u64]) -> String {
    values.iter().map(|value| format!("{value} ")).collect()
}

/// A directory with children made on demand.
struct Listed<F>(F);

impl<F: Fn() -> Vec<(String, Arc<dyn Node>)> + Send + Sync> Node for Listed<F> {
    fn dirs(&self) -> Vec<(String, Arc<dyn Node>)> {
        (self.0)()
    }
}
