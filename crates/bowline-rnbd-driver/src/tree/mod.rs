//! The control tree of RNBD: mapped disks and exports as under /sys.
//!
//! ```text
//! rnbd-client/ctl/{map_device, devices/<path>@<session> -> block/rnbd0}
//! block/rnbd0/{size, ro, stat}
//!            /rnbd/{state, session, mapping_path, .., unmap_device, resize, remap_device}
//!            /bowline/{failed_requests, last_failure, queue, read_latencies, write_latencies}
//! rnbd-server/ctl/{export_device, unexport_device}          if the process takes such commands
//! rnbd-server/ctl/devices/<export>/{block_dev -> block/<export>}
//!                                 /sessions/<session>/{access_mode, .., force_close}
//! ```
//!
//! Texts, modes and error numbers are those of Linux 6.12 [NB-34..40].
//!
//! Spec: `docs/spec/rnbd.md`, sections 8 and 9.

mod client;
mod health;
mod map;
mod server;
#[cfg(test)]
mod tests;
mod view;

use std::sync::Arc;

use bowline_ctl::{AttrDef, Errno, Node, Value};

pub use client::{client_node, disks_node};
pub use map::{MapPath, MapSpec, PATHS_MAX};
pub use server::{Parameters, exports_node, server_node};
pub use view::{
    DiskInfo, DiskState, Disks, ExportCommands, ExportInfo, Exports, OpenInfo, Queue, Traffic,
};

/// The attribute that every device of a class has.
const UEVENT: AttrDef = AttrDef { name: "uevent", mode: 0o644 };

const fn show(name: &'static str) -> AttrDef {
    AttrDef { name, mode: 0o444 }
}

const fn command(name: &'static str) -> AttrDef {
    AttrDef { name, mode: 0o644 }
}

fn text(text: impl Into<String>) -> Result<Value, Errno> {
    Ok(Value::Text(text.into()))
}

/// A directory whose children are listed on demand.
struct DynamicDir<F>(F);

impl<F: Fn() -> Vec<(String, Arc<dyn Node>)> + Send + Sync> Node for DynamicDir<F> {
    fn dirs(&self) -> Vec<(String, Arc<dyn Node>)> {
        (self.0)()
    }
}

/// Attributes that every block device has: size, read-only flag and counters.
struct Block {
    bytes: u64,
    read_only: bool,
    traffic: Traffic,
}

impl Block {
    const ATTRS: [AttrDef; 3] = [show("ro"), show("size"), show("stat")];

    fn read(&self, name: &str) -> Result<Value, Errno> {
        match name {
            "ro" => Ok(Value::Uint(self.read_only.into())),
            "size" => Ok(Value::Uint(self.bytes / 512)),
            "stat" => text(self.traffic.stat()),
            _ => Err(Errno::ENOENT),
        }
    }
}

/// Returns a name as a directory name, without slashes [NB-36].
pub(crate) fn dir_name(name: &str) -> String {
    name.replace('/', "!")
}
