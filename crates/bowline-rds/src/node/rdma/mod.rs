//! Connections over RDMA. The queue of messages, the sockets and the congestion maps are those that
//! TCP uses; these files replace its links. Spec: `docs/spec/rds-rdma.md`.

mod connect;
mod ops;
mod rx;
mod tx;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::ids::RdmaLinkId;
use crate::rdma::Remembered;
use crate::rdma::op::TxOps;

/// What a connection over RDMA has instead of TCP connections.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct RdmaConn {
    /// Type of service, a part of the connection's identity [IB-4].
    pub(crate) tos: u8,
    /// The queue pair in use. There is at most one.
    #[serde(skip)]
    pub(crate) link: Option<RdmaLinkId>,
    /// RDMA operations of queued messages, by the number of the message.
    #[serde(skip)]
    pub(crate) ops: BTreeMap<u64, TxOps>,
    /// A connection of the peer's, or to it, was established at some time: messages reach its
    /// address. A request alone anybody can send in its name.
    #[serde(default)]
    pub(crate) reached: bool,
    /// What a kernel has sent lately.
    #[serde(default)]
    pub(crate) remembered: Option<Box<Remembered>>,
}
