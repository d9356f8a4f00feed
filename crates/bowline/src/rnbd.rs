//! RNBD: disks of other machines, over [`rtrs`](crate::rtrs).
//!
//! An [`ExportServer`] offers memory, files and block devices under names; a [`Client`] maps them,
//! each a [`Disk`], which is a [`BlockDevice`](crate::block::BlockDevice): for programs, and for
//! the [front ends](crate::block::front) by which other software reaches it. It is the protocol of
//! the Linux kernel's `rnbd-client` and `rnbd-server`.
//!
//! A program that was killed and is started again gets its session back at once, since its device
//! first ends the connections of its former life; where it notes them is
//! [`SoftConfig::former_connections`](crate::verbs::SoftConfig::former_connections). Without that
//! its server refuses the session, with `ECONNRESET`, until it has noticed: some seconds with a
//! server of bowline, up to 35 with a kernel's.
//!
//! A disk over two paths:
//!
//! ```
//! use std::net::IpAddr;
//!
//! use bowline::block::{DiskHandle, Durable};
//! use bowline::rnbd::{Client, ExportServer, Exports, MapOptions, ServerConfig};
//! use bowline::rtrs::{Engine, PORT};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! // Two machines with two networks, usually; here all are this process.
//! let here: [IpAddr; 2] = [[127, 77, 2, 1].into(), [127, 77, 2, 3].into()];
//! let there: [IpAddr; 2] = [[127, 77, 2, 2].into(), [127, 77, 2, 4].into()];
//!
//! let mut exports = Exports::new();
//! exports.memory("disk0", 1 << 20, 512)?;
//! let places = there.map(|address| (address, PORT).into());
//! let far = Engine::soft(there)?;
//! let server = ExportServer::open(&far, &places, ServerConfig::default(), exports)?;
//!
//! // Requests go on over the other path when one is lost.
//! let options = MapOptions::new("example").paths(here.into_iter().zip(there));
//! let client = Client::new(Engine::soft(here)?, options);
//! let disk = client.map("disk0")?;
//!
//! let io = DiskHandle::new(disk.clone());
//! io.write_at(4096, &[7; 512], Durable::Now)?;
//! let mut block = [0; 512];
//! io.read_at(4096, &mut block)?;
//! assert_eq!(block, [7; 512]);
//!
//! client.unmap(&disk)?;
//! client.close();
//! server.close();
//! # Ok(())
//! # }
//! ```

pub use bowline_rnbd::client::{Config as IoConfig, DevId, DevInfo, Outage, State};
pub use bowline_rnbd::server::{
    ClientChange, ClientEv, CoreLimits, ExportId, OpenId, OpenInfo, SessKey,
};
pub use bowline_rnbd::{Failures, LastFailure, Latencies};
pub use bowline_rnbd_driver::client::{DiskStats, OnPath};
pub use bowline_rnbd_driver::server::{FailedStore, Moved};
pub use bowline_rnbd_driver::{
    Client, Disk, Error, ErrorKind, ExportServer, Exports, FileOptions, Grant, MapOptions,
    ServerConfig,
};
pub use bowline_wire::rnbd::Access;

/// Disks and exports as a [tree](crate::ctl), as under /sys/class/rnbd-client and rnbd-server.
pub mod tree {
    pub use bowline_rnbd_driver::tree::{
        DiskInfo, DiskState, Disks, ExportCommands, ExportInfo, Exports, MapPath, MapSpec,
        OpenInfo, PATHS_MAX, Parameters, Queue, Traffic, client_node, disks_node, exports_node,
        server_node,
    };
}
