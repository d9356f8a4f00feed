//! RDS over RDMA: carries out what the core asks for on a verbs device.
//!
//! ```text
//!   application thread               core (under the lock)            device
//!   send -----------------------> Node::send, poll_rdma_requests --> post_send, one doorbell
//!   recv, while it waits: take_completions --- handle_rdma_frames <- poll_cq
//!                                                                 -> post_recv
//!   threads of a device:
//!     bowline-rdma       takes completions while no application thread does
//!     bowline-rdma-cm    events of connections
//!     bowline-rdma-setup makes and ends queue pairs, which may take long
//! ```

mod completions;
mod domain;
mod memory;
mod pair;
mod port;
mod send;
mod setup;

pub use memory::RdmaMemory;
pub(crate) use pair::Pair;
pub(crate) use port::Port;
pub(crate) use send::Posts;
pub(crate) use setup::Job;

use std::sync::Arc;

use bowline_verbs::Device;

/// Devices over which a node speaks RDS, in addition to TCP.
#[derive(Clone, Default)]
pub struct RdmaDevices(pub Vec<Arc<dyn Device>>);

impl core::fmt::Debug for RdmaDevices {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_list().entries(self.0.iter().map(|device| device.attr().name)).finish()
    }
}
