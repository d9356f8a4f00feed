//! RDMA verbs, and the devices that carry them out.
//!
//! Programs that use [`rtrs`](crate::rtrs) or `rnbd` need a [`Device`] and nothing else
//! from here: a [`SoftDevice`], which is RoCEv2 over UDP sockets of this process, or, with the
//! feature `rdma-core`, a device of the machine.
//!
//! A whole program, `examples/rdma_write.rs`:
//!
//! ```
#![doc = include_str!("../examples/rdma_write.rs")]
//! ```

pub use bowline_roce::{Config as RoceConfig, GiveUp};
pub use bowline_roce_driver::{
    DriverStats as SoftStats, FormerConnections, IcrcPolicy, InUse, PollMode, ROCE_PORT,
    SoftConfig, SoftDevice,
};
pub use bowline_verbs::*;

#[cfg(feature = "rdma-core")]
pub use bowline_rdmacore::RdmaCoreDevice;
