//! Names of the objects of a node.

/// A socket of a node. Stays unique: a closed socket's id never names another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SocketId(pub(crate) (u32, u32));

/// A TCP connection of a node. Stays unique like [`SocketId`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LinkId(pub(crate) (u32, u32));

/// A pair of addresses that exchange messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct ConnId(pub(crate) (u32, u32));

impl SocketId {
    /// A small number, unique among the sockets that exist now.
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
