//! RTRS: sessions of several paths to memory of a server, over any [`verbs`](crate::verbs).
//!
//! A client opens a [`Session`](client::Session), takes permits and makes requests: a user message
//! and data, in one direction. A server has a [`Handler`](server::Handler), which is given requests
//! and answers them, at once or later, from any thread. Paths may break and come back in the
//! meantime; a request is carried on over another one. It is the protocol of the Linux kernel's
//! `rtrs-client` and `rtrs-server`. Threads wait for permits and requests, as below; tasks of any
//! runtime await them ([`get_permit_async`](client::Session::get_permit_async),
//! [`call_async`](client::Session::call_async)).
//!
//! ```
//! use std::{net::IpAddr, sync::Arc};
//!
//! use bowline::Errno;
//! use bowline::rtrs::client::{PermitKind, Session, SessionBuilder, Wait};
//! use bowline::rtrs::server::{Handler, LinkEv, Request, Server, ServerConfig};
//! use bowline::rtrs::{Dir, Engine, PORT};
//!
//! /// Says hello to whoever reads.
//! struct Greeter;
//!
//! impl Handler for Greeter {
//!     fn rdma_ev(&self, server: &Server, requests: &mut Vec<Request>) {
//!         let answers = requests.drain(..).map(|request| {
//!             let greeting = [b"hello, ", &*request.usr].concat();
//!             let errno = match (request.dir, server.chunk(&request)) {
//!                 (Dir::Read, Some(chunk)) if request.room as usize >= greeting.len() => {
//!                     chunk.buffer.write(chunk.offset, &greeting);
//!                     0
//!                 }
//!                 _ => Errno::EINVAL.neg(),
//!             };
//!             (request.op, errno, None)
//!         });
//!         server.respond(&mut answers.collect::<Vec<_>>().into_iter());
//!     }
//!
//!     fn link_ev(&self, _: &Server, _: LinkEv) -> Result<(), Errno> {
//!         Ok(())
//!     }
//! }
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! // Two machines, usually; here both are this process.
//! let (here, there): (IpAddr, IpAddr) = ([127, 77, 1, 1].into(), [127, 77, 1, 2].into());
//! let (near, far) = (Engine::soft([here])?, Engine::soft([there])?);
//! let greeter = Arc::new(Greeter);
//! let server = Server::open(&far, &[(there, PORT).into()], ServerConfig::default(), greeter)?;
//!
//! let session = Session::open(&near, SessionBuilder::new("greetings")?.path(Some(here), there))?;
//! let memory = session.region(4096)?;
//! let permit = session.get_permit(PermitKind::Io, Wait::Forever).ok_or("the session is closed")?;
//! session.call(Dir::Read, &permit, b"world", &[memory.piece(0, 4096)])?;
//! session.put_permit(permit);
//!
//! let mut greeting = [0; 12];
//! memory.buffer().read(0, &mut greeting);
//! assert_eq!(&greeting, b"hello, world");
//!
//! session.close();
//! server.close();
//! # Ok(())
//! # }
//! ```

pub use bowline_rtrs_driver::{
    Dir, Engine, EngineConfig, EngineStats, Error, ErrorKind, Geometry, HbConfig, MemRef, PORT,
    PathId, Policy, Poll, PortId, RegionId, SessionName,
};
pub use bowline_wire::rtrs::{ConRspError, GeometryError, NameError, Uuid};

/// The client: sessions, and requests on them.
pub mod client {
    pub use bowline_rtrs_driver::client::{
        Attrs, Call, ClientLimits, ClientStats, Completed, Completer, Done, GetPermit, Latencies,
        LinkEv, PathEv, PathState, PathView, Permit, PermitKind, ReadKeys, Refusal, Region, Req,
        Session, SessionBuilder, StatsFile, Wait,
    };
}

/// The server: takes requests and answers them.
pub mod server {
    pub use bowline_rtrs_driver::server::{
        AllowRule, CloseReason, Handler, LinkEv, Offence, OpId, PathChange, PathEv, PathInfo,
        PathState, PathStats, Request, Server, ServerConfig, ServerCounters, ServerLimits, SessId,
        SessionInfo, Usr,
    };
}

/// Sessions and paths as a [tree](crate::ctl), as under /sys/class/rtrs-client and rtrs-server.
pub mod tree {
    pub use bowline_rtrs_driver::tree::{
        ClientPath, ClientSession, ClientStats, Completions, Files, IoStats, LATENCY_ROWS,
        PathCommand, ServerParameters, ServerPath, ServerSession, ServerSessions, Stats,
        client_node, server_node,
    };
}
