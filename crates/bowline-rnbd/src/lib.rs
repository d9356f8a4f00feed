//! The RNBD protocol as state machines: exports, devices, access and block IO.
//!
//! No I/O, no threads, no clock and no transport: user messages and the time go in, messages and
//! actions come out. [`server::Core`] serves exports, [`client::Core`] maps them. Numbered rules
//! `[NB-n]` are those of `docs/spec/rnbd.md`.
//!
//! ```
//! use bowline_rnbd::client::{Config, Core, DiskRequest, Event};
//! use bowline_rnbd::{IoOp, Limits, SessionLimits, server};
//! use bowline_wire::rnbd::Access;
//! use bowline_wire::rtrs::Dir;
//! use bowline_base::Instant;
//!
//! let now = Instant::from_nanos(1);
//! let mut client = Core::<&str>::new(Config::default(), 31);
//! client.link_up(now, SessionLimits { max_io: 126_976, max_segments: 128 });
//! let disk = client.map("disk0", Access::Rw)?;
//!
//! let mut server = server::Core::new(server::CoreLimits::default(), 0x5eed);
//! let session = server::SessKey(1);
//! server.link_up(session, "client@server");
//! while let Some(order) = client.poll_service_message() {
//!     let dir = if order.room > 0 { Dir::Read } else { Dir::Write };
//!     match server.message(session, dir, order.room, order.room, &order.usr) {
//!         server::Act::Reply { errno, data } => {
//!             client.service_answer(now, order.token, errno, data.bytes());
//!         }
//!         server::Act::Open { ticket, .. } => {
//!             server.opened(ticket, Ok((server::ExportId(0), Limits::plain(1 << 20))));
//!             let answer = server.poll_answer().expect("of the open");
//!             client.service_answer(now, order.token, answer.errno, answer.data.bytes());
//!         }
//!         other => unreachable!("{other:?}"),
//!     }
//! }
//! assert_eq!(client.poll_event(), Some(Event::Mapped { dev: disk, result: Ok(()) }));
//! # Ok::<(), bowline_rnbd::Errno>(())
//! ```
#![forbid(unsafe_code)]

mod access;
pub mod client;
mod health;
pub mod io;
mod limits;
pub mod server;

pub use bowline_base::Errno;
pub use health::{Failures, LastFailure, Latencies};
pub use io::{Discard, IoOp, Limits};
pub use limits::SessionLimits;
