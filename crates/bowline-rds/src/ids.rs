//! Ids of the objects of a node.

use serde::{Deserialize, Serialize};

/// Id of a socket of a node. It is never used again for another socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct SocketId(pub(crate) (u32, u32));

/// Id of a TCP connection of a node. It is never used again, like [`SocketId`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct LinkId(pub(crate) (u32, u32));

/// Id of a connection over RDMA of a node: one queue pair. It is never used again, like
/// [`SocketId`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct RdmaLinkId(pub(crate) (u32, u32));

/// Id of a pair of addresses that exchange messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub(crate) struct ConnId(pub(crate) (u32, u32));

impl SocketId {
    /// A small number, unique among the sockets that exist now.
    pub const fn index(self) -> usize {
        self.0.0 as usize
    }
}

impl RdmaLinkId {
    /// A small number, unique among the connections over RDMA that exist now.
    pub const fn index(self) -> usize {
        self.0.0 as usize
    }
}

impl LinkId {
    /// A small number, unique among the TCP connections that exist now.
    pub const fn index(self) -> usize {
        self.0.0 as usize
    }
}
