//! The client: sessions, and requests on them.

mod builder;
mod calls;
mod future;
mod names;
mod permit;
mod permits;
mod region;
mod session;
mod shared;
mod state;

pub use bowline_rtrs::client::{
    Attrs, ClientLimits, ClientStats, Completed, Latencies, PathState, PermitKind, ReadKeys,
    Refusal, StatsFile,
};
pub(crate) use names::Names;

pub use builder::SessionBuilder;
pub use future::{Call, GetPermit};
pub use permit::Permit;
pub use region::Region;
pub use session::{PathView, Req, Session, Wait};
pub use state::{Completer, Done, LinkEv, PathEv};
