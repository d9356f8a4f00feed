//! Ids of paths, connections, ports, regions and work requests.

/// Most paths of one core at a time.
pub const PATHS_MAX: u16 = 1 << 12;

/// A path of a core. When a slot is reused it gets another generation, so that events for the
/// former path are recognized and ignored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PathId {
    /// Index in the core's table, below [`PATHS_MAX`].
    pub slot: u16,
    /// How often the slot was used before, wrapping.
    pub generation: u8,
}

/// A connection of a path.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ConnId {
    /// The path.
    pub path: PathId,
    /// Number of the connection within its path, below 4096; 0 is the service connection.
    pub cid: u16,
}

impl ConnId {
    /// Packs it in 32 bits: the upper half of a work request id, whose lower half is a [`Tag`].
    pub const fn pack(self) -> u32 {
        let PathId { slot, generation } = self.path;
        (slot as u32 & 0xfff) << 20 | (generation as u32) << 12 | self.cid as u32 & 0xfff
    }

    /// Undoes [`pack`](Self::pack).
    pub const fn unpack(n: u32) -> Self {
        let path = PathId { slot: (n >> 20) as u16, generation: (n >> 12) as u8 };
        Self { path, cid: (n & 0xfff) as u16 }
    }
}

/// A device, by its index in the list given to the core.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PortId(pub u8);

/// Memory registered by order of a core.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RegionId(pub u32);

/// A connection request that is not answered yet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(pub u32);

/// A range of registered memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct MemRef {
    /// The memory.
    pub region: RegionId,
    /// Where the range begins, in bytes; also its address, since every region begins at 0.
    pub offset: u64,
    /// Length in bytes.
    pub len: u32,
}

/// The core's part of a work request id: the kind of request, and an index.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Tag(pub u32);

impl Tag {
    /// A work request of an IO: the client's write into a chunk.
    pub const IO: u32 = 1;
    /// A heartbeat or its answer.
    pub const HEARTBEAT: u32 = 2;
    /// A receive.
    pub const RECV: u32 = 3;
    /// A message about the path: INFO_REQ, INFO_RSP, and the receive for it.
    pub const INFO: u32 = 4;
    /// A response of the server.
    pub const REPLY: u32 = 5;
    /// A marker at the end of a closed connection's queues. The binding posts it, the core counts
    /// it.
    pub const DRAIN: u32 = 6;
    /// The client registers memory for a single request, or invalidates its key.
    pub const KEY: u32 = 7;
    /// The client wants to know that all earlier sends have completed.
    pub const FENCE: u32 = 8;

    /// Makes a tag of this kind; the index must be below 2^28.
    pub const fn new(kind: u32, index: u32) -> Self {
        Self(kind << 28 | index & 0x0fff_ffff)
    }

    /// The kind: one of the constants.
    pub const fn kind(self) -> u32 {
        self.0 >> 28
    }

    /// The index.
    pub const fn index(self) -> u32 {
        self.0 & 0x0fff_ffff
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_connection_survives_the_packing() {
        let conn = ConnId { path: PathId { slot: 4095, generation: 255 }, cid: 4095 };
        assert_eq!(conn.pack(), u32::MAX);
        assert_eq!(ConnId::unpack(conn.pack()), conn);
        let conn = ConnId { path: PathId { slot: 1, generation: 2 }, cid: 3 };
        assert_eq!(conn.pack(), 0x0010_2003);
        assert_eq!(ConnId::unpack(conn.pack()), conn);
    }

    #[test]
    fn a_tag_tells_kind_and_index() {
        let tag = Tag::new(Tag::DRAIN, 1);
        assert_eq!((tag.0, tag.kind(), tag.index()), (0x6000_0001, Tag::DRAIN, 1));
    }
}
