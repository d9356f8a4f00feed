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
//! ```
//! use std::{net::IpAddr, sync::Arc};
//!
//! use bowline::block::{BlockDevice, sync::{self, Durable}};
//! use bowline::rnbd::{Client, ExportServer, Exports, MapOptions, ServerConfig};
//! use bowline::rtrs::{Engine, EngineConfig, PORT};
//! use bowline::verbs::{Device, SoftConfig, SoftDevice};
//!
//! fn engine(address: IpAddr) -> Result<Arc<Engine>, Box<dyn std::error::Error>> {
//!     let config = SoftConfig { addrs: vec![address], ..SoftConfig::default() };
//!     let device: Arc<dyn Device> = Arc::new(SoftDevice::open(config)?);
//!     Ok(Engine::new(vec![device], EngineConfig::default())?)
//! }
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! // Two machines, usually; here both are this process.
//! let (here, there): (IpAddr, IpAddr) = ([127, 77, 2, 1].into(), [127, 77, 2, 2].into());
//! let mut exports = Exports::new();
//! exports.memory("disk0", 1 << 20, 512)?;
//! let places = [(there, PORT).into()];
//! let (near, far) = (engine(here)?, engine(there)?);
//! let server = ExportServer::open(&far, &places, ServerConfig::default(), exports)?;
//!
//! // More than one path makes the disk outlive any of them.
//! let options = MapOptions::new("example").path(Some(here), there);
//! let client = Client::new(near, options.clone());
//! let disk = client.map("disk0", &options)?;
//! assert_eq!(disk.limits().bytes, 1 << 20);
//!
//! let mut block = [0; 512];
//! sync::write_at(&*disk, 4096, &[7; 512], Durable::Now).map_err(|errno| errno.to_string())?;
//! sync::read_at(&*disk, 4096, &mut block).map_err(|errno| errno.to_string())?;
//! assert_eq!(block, [7; 512]);
//!
//! client.unmap(&disk)?;
//! client.close();
//! server.close();
//! # Ok(())
//! # }
//! ```

pub use bowline_rnbd::client::Outage;
pub use bowline_rnbd_driver::*;
pub use bowline_wire::rnbd::Access;
