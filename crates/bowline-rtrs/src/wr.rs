//! Orders and inputs of a core: work requests and completions without a device.
//!
//! A core never touches a device. On the hot path it fills a flat, reused [`Batch`], and takes
//! [`Done`]s; on the cold path it gives [`Order`]s and takes [`Input`]s. Orders come before the
//! batch that was made together with them. A device needs no other operations [RT-71].

use core::time::Duration;
use std::net::SocketAddr;
use std::sync::Arc;

use bowline_verbs::{Access, Buffer, RejectReason, Remote, Status, WcOpcode};

use crate::{ConnId, Errno, MemRef, PathId, PortId, RegionId, RequestId, Tag};

/// The operation of a send work request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WrKind {
    /// Send.
    Send,
    /// Send with an immediate.
    SendImm(u32),
    /// Send that invalidates the peer's key.
    SendInv(u32),
    /// RDMA write.
    Write(Remote),
    /// RDMA write with an immediate.
    WriteImm(Remote, u32),
    /// Registers the request's pieces of memory, in order, for the peer: under this key of
    /// [`Order::AddKeys`], from address 0 on [RT-42]. The key is valid before later work requests
    /// go out.
    Register(u32),
    /// Invalidates such a key. Once it has completed, the peer can do nothing with the key.
    Invalidate(u32),
}

/// A send work request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wr {
    /// The connection.
    pub conn: ConnId,
    /// Comes back in the completion.
    pub tag: Tag,
    /// The operation.
    pub kind: WrKind,
    /// Its memory: index and number of pieces in [`Batch::mems`].
    pub mem: (u32, u8),
    /// Completes with an entry also on success.
    pub signal: bool,
}

/// A receive to post.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecvSlot {
    /// The connection.
    pub conn: ConnId,
    /// Comes back in the completion.
    pub tag: Tag,
    /// Memory for a message; `None` for a receive that takes immediates only.
    pub mem: Option<MemRef>,
}

/// Work for the device, carried out in the order of the fields. Work requests of one connection are
/// executed in order: data that one has written is there when the next one completes at the peer
/// [RT-72]. All stay in order except unsignalled WRITEs without immediate. These may be sent
/// earlier, before requests of other kinds, and in two parts, so that one tag may fail twice. The
/// last bytes of one may be sent within the following WRITE with immediate, if that writes to the
/// adjacent memory [RT-97].
#[derive(Clone, Debug, Default)]
pub struct Batch {
    /// Keys to withdraw, so that the peer cannot use them.
    pub withdraw: Vec<(PortId, u32)>,
    /// Keys it can use again: the present one and the new one.
    pub renew: Vec<(PortId, u32, u32)>,
    /// Receives.
    pub recvs: Vec<RecvSlot>,
    /// Send work requests.
    pub wrs: Vec<Wr>,
    /// Memory of the send work requests.
    pub mems: Vec<MemRef>,
}

impl Batch {
    /// Whether the batch is empty.
    pub fn is_empty(&self) -> bool {
        self.withdraw.is_empty()
            && self.renew.is_empty()
            && self.recvs.is_empty()
            && self.wrs.is_empty()
    }

    /// Empties the batch and keeps its allocations.
    pub fn clear(&mut self) {
        self.withdraw.clear();
        self.renew.clear();
        self.recvs.clear();
        self.wrs.clear();
        self.mems.clear();
    }

    /// Returns the memory of a work request of this batch.
    pub fn mems_of(&self, wr: &Wr) -> &[MemRef] {
        let start = wr.mem.0 as usize;
        self.mems.get(start..start + usize::from(wr.mem.1)).unwrap_or(&[])
    }

    /// Adds a send work request with its memory.
    pub fn send(&mut self, conn: ConnId, tag: Tag, kind: WrKind, mems: &[MemRef], signal: bool) {
        debug_assert!(mems.len() <= usize::from(u8::MAX), "a gather list of {}", mems.len());
        let mem = (self.mems.len() as u32, mems.len() as u8);
        self.mems.extend_from_slice(mems);
        self.wrs.push(Wr { conn, tag, kind, mem, signal });
    }
}

/// A completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Done {
    /// The connection.
    pub conn: ConnId,
    /// The tag of the work request.
    pub tag: Tag,
    /// The outcome.
    pub status: Status,
    /// The kind of work request. Undefined unless `status` is a success.
    pub opcode: WcOpcode,
    /// Bytes of the message.
    pub len: u32,
    /// Immediate.
    pub imm: Option<u32>,
    /// The key of this side that the peer has invalidated.
    pub invalidated: Option<u32>,
}

/// Keys of a region, or of a part of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RegionKeys {
    /// Address of its first byte, relative to the region.
    pub addr: u64,
    /// For this side's work requests.
    pub lkey: u32,
    /// For the peer's work requests.
    pub rkey: u32,
}

/// Sizes and rights of a queue pair: a reliable connection, whose receives have one element, with
/// one completion queue for both queues [RT-21], [RT-23].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QpShape {
    /// Send work requests outstanding.
    pub send_wr: usize,
    /// Receives posted.
    pub recv_wr: usize,
    /// Elements of a gather list.
    pub send_sge: usize,
    /// The peer's access rights.
    pub access: Access,
    /// Index of its completion queue: 0 for the one that all connections share, or from 1 on that
    /// of a poll connection, which the program polls itself [RS-31].
    pub queue: u16,
    /// How long the queue pair waits for an acknowledgement before it fails, if the device lets
    /// that be chosen; `None`: the device's default.
    pub give_up: Option<Duration>,
}

/// The devices on which a region is registered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RegionPorts {
    /// On every device.
    All,
    /// On one.
    One(PortId),
}

/// A command of a core, apart from work requests. Carried out in order, before the batch that was
/// made together with it.
#[derive(Debug)]
pub enum Order {
    /// Registers memory. Addresses begin at 0. Answered by [`Input::Region`], once for each device.
    AddRegion {
        /// Id of the region.
        region: RegionId,
        /// The memory.
        buffer: Arc<Buffer>,
        /// Access rights of the keys in the answer. For this side's requests the binding registers
        /// the memory a second time.
        access: Access,
        /// Bytes of the parts that get a key each; `None`: one key for all.
        granule: Option<u32>,
        /// On which devices.
        ports: RegionPorts,
        /// The path that uses it, if only one does.
        path: Option<PathId>,
    },
    /// Ends a registration. After it the region's memory is not accessed.
    DropRegion {
        /// The region.
        region: RegionId,
    },
    /// Makes keys for [`WrKind::Register`], which are not valid for any memory yet. Answered by
    /// [`Input::Keys`].
    AddKeys {
        /// The path; it has one set of keys.
        path: PathId,
        /// The device.
        port: PortId,
        /// Number of keys.
        count: u16,
    },
    /// Ends a path's keys, whether they are registered or not: after it the peer can do nothing
    /// with them.
    DropKeys {
        /// The path.
        path: PathId,
    },
    /// Makes a queue pair and connects it. Answered by [`Input::Established`], [`Input::Refused`]
    /// or [`Input::Failed`].
    Connect {
        /// Id of the connection.
        conn: ConnId,
        /// The device.
        port: PortId,
        /// Local address; its port is never 0.
        local: SocketAddr,
        /// The peer's address.
        remote: SocketAddr,
        /// Sizes and rights of the queue pair.
        shape: QpShape,
        /// CON_REQ.
        private: [u8; 56],
        /// Retransmissions requested of the peer's queue pair [RT-90].
        retry_count: u8,
    },
    /// Makes a queue pair and accepts a connection request. Answered by [`Input::Established`] or
    /// [`Input::Failed`]; after `Failed` the request can still be refused.
    Accept {
        /// Id of the connection.
        conn: ConnId,
        /// The connection request.
        request: RequestId,
        /// Sizes and rights of the queue pair.
        shape: QpShape,
        /// CON_RSP.
        private: [u8; 56],
        /// A receive to post before accepting.
        first: Option<RecvSlot>,
    },
    /// Refuses a connection request.
    Reject {
        /// The connection request.
        request: RequestId,
        /// CON_RSP with the errno.
        private: [u8; 56],
    },
    /// Takes the queue pair to ERR, posts a signalled empty send and an empty receive behind all
    /// other work requests ([`Tag::DRAIN`]), and disconnects. The core counts the two completions;
    /// if they cannot be posted, [`Input::Drained`] comes instead. If the connection was
    /// established, [`Input::Disconnected`] follows when the peer has answered. A queue pair that
    /// the device does not take to ERR is destroyed, and both inputs come at once.
    Close {
        /// The connection.
        conn: ConnId,
    },
    /// Destroys connection and queue pair. After it no input comes for the id, except
    /// [`Input::Drained`], which confirms it.
    Forget {
        /// The connection.
        conn: ConnId,
    },
}

/// An event for a core, apart from completions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Input {
    /// A region was registered on a device, or could not be.
    Region {
        /// The region.
        region: RegionId,
        /// The device.
        port: PortId,
        /// One entry, or one for each granule.
        keys: Result<Vec<RegionKeys>, Errno>,
    },
    /// Keys were made, or could not be.
    Keys {
        /// The path.
        path: PathId,
        /// The keys; the program chooses their lowest byte.
        keys: Result<Vec<u32>, Errno>,
    },
    /// A client requests a connection.
    ConnectRequest {
        /// Id of the request.
        request: RequestId,
        /// The device.
        port: PortId,
        /// Local address.
        local: SocketAddr,
        /// The client's address.
        remote: SocketAddr,
        /// CON_REQ.
        private: Vec<u8>,
    },
    /// A connection is made.
    Established {
        /// The connection.
        conn: ConnId,
        /// The peer's private data.
        private: Vec<u8>,
    },
    /// The peer refused a connection.
    Refused {
        /// The connection.
        conn: ConnId,
        /// Whether its program or its connection manager refused.
        reason: RejectReason,
        /// The peer's private data.
        private: Vec<u8>,
    },
    /// A connection failed: the peer is unreachable or does not listen, an order could not be
    /// carried out, or a work request could not be posted.
    Failed {
        /// The connection.
        conn: ConnId,
        /// The error.
        errno: Errno,
    },
    /// The queues of a closed connection are flushed, or destroyed: no work request of it accesses
    /// memory or sends packets any more.
    Drained {
        /// The connection.
        conn: ConnId,
    },
    /// The peer has disconnected, or has answered a disconnect.
    Disconnected {
        /// The connection.
        conn: ConnId,
    },
}
