//! What a core orders and what it is told: work requests and completions without a device.
//!
//! A core never touches a device. On the hot path it fills a [`Batch`], flat and used again, and
//! takes [`Done`]s; on the cold path it gives [`Order`]s and takes [`Input`]s. The orders come
//! first, then the batch that was made together with them. These few operations are all a device
//! must have [RT-71].

use core::time::Duration;
use std::net::SocketAddr;
use std::sync::Arc;

use bowline_verbs::{Access, Buffer, RejectReason, Remote, Status, WcOpcode};

use crate::{ConnId, Errno, MemRef, PathId, PortId, RegionId, RequestId, Tag};

/// What a send work request does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WrKind {
    /// Send.
    Send,
    /// Send with an immediate.
    SendImm(u32),
    /// Send, and the peer's key is invalidated.
    SendInv(u32),
    /// RDMA write.
    Write(Remote),
    /// RDMA write with an immediate.
    WriteImm(Remote, u32),
    /// Gives the peer the memory of the request, its pieces in order, under this key of
    /// [`Order::AddKeys`] and from address 0 on [RT-42]. The key is valid before what follows goes
    /// out.
    Register(u32),
    /// Takes it back; when this has completed the peer can do nothing with the key any more.
    Invalidate(u32),
}

/// A send work request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wr {
    /// The connection.
    pub conn: ConnId,
    /// Comes back in the completion.
    pub tag: Tag,
    /// What to do.
    pub kind: WrKind,
    /// Its memory: first and number of pieces in [`Batch::mems`].
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
    /// Where a message goes; `None` for a receive that takes immediates only.
    pub mem: Option<MemRef>,
}

/// Work for the device, carried out in the order of the fields. Work requests of one connection are
/// executed in order: what one has written is there when the next one completes at the peer
/// [RT-72]. All stay in order but for unsignalled WRITEs without immediate: these may go earlier,
/// over requests of other kinds, and in two parts, so that two failures may come of one tag. The
/// end of one may go within the WRITE with immediate behind it, if that writes to the memory behind
/// [RT-97].
#[derive(Clone, Debug, Default)]
pub struct Batch {
    /// Keys the peer can no longer use.
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
    /// Tells whether there is nothing to do.
    pub fn is_empty(&self) -> bool {
        self.withdraw.is_empty()
            && self.renew.is_empty()
            && self.recvs.is_empty()
            && self.wrs.is_empty()
    }

    /// Empties it and keeps its memory.
    pub fn clear(&mut self) {
        self.withdraw.clear();
        self.renew.clear();
        self.recvs.clear();
        self.wrs.clear();
        self.mems.clear();
    }

    /// Returns the memory of one of its work requests.
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
    /// The request's.
    pub tag: Tag,
    /// How it ended.
    pub status: Status,
    /// What it was. Not to be relied on unless `status` is a success.
    pub opcode: WcOpcode,
    /// Bytes of the message.
    pub len: u32,
    /// Immediate.
    pub imm: Option<u32>,
    /// Key of this side that the peer has invalidated.
    pub invalidated: Option<u32>,
}

/// Keys of a region, or of a part of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RegionKeys {
    /// Address of its first byte, in the terms of the region.
    pub addr: u64,
    /// For this side's requests.
    pub lkey: u32,
    /// For the peer's.
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
    /// What the peer may do.
    pub access: Access,
    /// Its completion queue: 0 for the one all have in common, or the number of a poll connection,
    /// from 1 on, whose completions the program takes by itself [RS-31].
    pub queue: u16,
    /// How long it bears that nothing is acknowledged, where the device lets that be chosen;
    /// `None`: as long as the device usually does.
    pub give_up: Option<Duration>,
}

/// Where a region is registered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum On {
    /// On every device.
    All,
    /// On one.
    One(PortId),
}

/// What a core wants done, apart from work requests. Carried out in order, before the batch that
/// was made together with it.
#[derive(Debug)]
pub enum Order {
    /// Register memory. Addresses begin at 0. Answered by [`Input::Region`], once for each device.
    AddRegion {
        /// Its name.
        region: RegionId,
        /// The memory.
        buffer: Arc<Buffer>,
        /// Rights of the keys told in the answer. For this side's requests the binding registers
        /// the memory once more.
        access: Access,
        /// One key for each part of so many bytes; `None`: one key.
        granule: Option<u32>,
        /// On which devices.
        ports: On,
        /// The path it is for, if it is for one.
        path: Option<PathId>,
    },
    /// End a registration. After it nothing of the region is touched.
    DropRegion {
        /// Which.
        region: RegionId,
    },
    /// Make keys for [`WrKind::Register`], none of which is good for anything yet. Answered by
    /// [`Input::Keys`].
    AddKeys {
        /// Whose they are; one set for each.
        path: PathId,
        /// On which device.
        port: PortId,
        /// How many.
        count: u16,
    },
    /// End these keys, whatever they are good for at the moment: after it the peer can do nothing
    /// with them.
    DropKeys {
        /// Whose.
        path: PathId,
    },
    /// Make a queue pair and connect it. Answered by [`Input::Established`], [`Input::Refused`] or
    /// [`Input::Failed`].
    Connect {
        /// Its name.
        conn: ConnId,
        /// On which device.
        port: PortId,
        /// Own address; the port is never 0.
        local: SocketAddr,
        /// The peer's.
        remote: SocketAddr,
        /// The queue pair.
        shape: QpShape,
        /// CON_REQ.
        private: [u8; 56],
        /// Retransmissions asked of the peer's queue pair [RT-90].
        retry_count: u8,
    },
    /// Make a queue pair and accept. Answered by [`Input::Established`] or [`Input::Failed`]; after
    /// that the request may still be refused.
    Accept {
        /// Its name.
        conn: ConnId,
        /// What is accepted.
        request: RequestId,
        /// The queue pair.
        shape: QpShape,
        /// CON_RSP.
        private: [u8; 56],
        /// Posted before the accept.
        first: Option<RecvSlot>,
    },
    /// Refuse.
    Reject {
        /// What is refused.
        request: RequestId,
        /// CON_RSP with the errno.
        private: [u8; 56],
    },
    /// Take the queue pair to ERR, post a signalled empty send and an empty receive behind what is
    /// there ([`Tag::DRAIN`]), and disconnect. The core counts the two completions;
    /// [`Input::Drained`] comes instead when they could not be posted. [`Input::Disconnected`]
    /// follows when the peer has answered, if the connection was established. A queue pair that the
    /// device does not take to ERR is removed, and both inputs come at once.
    Close {
        /// Which.
        conn: ConnId,
    },
    /// Remove connection and queue pair. Nothing comes of this name any more but
    /// [`Input::Drained`], which says that it is done.
    Forget {
        /// Which.
        conn: ConnId,
    },
}

/// What a core is told besides completions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Input {
    /// A region was registered on a device, or not.
    Region {
        /// Which.
        region: RegionId,
        /// The device.
        port: PortId,
        /// One entry, or one for each granule.
        keys: Result<Vec<RegionKeys>, Errno>,
    },
    /// Keys were made, or not.
    Keys {
        /// Whose.
        path: PathId,
        /// The keys: the lowest byte is the program's to choose.
        keys: Result<Vec<u32>, Errno>,
    },
    /// A client wants to connect.
    Asked {
        /// Its name.
        request: RequestId,
        /// The device.
        port: PortId,
        /// Own address.
        local: SocketAddr,
        /// The client's.
        remote: SocketAddr,
        /// CON_REQ.
        private: Vec<u8>,
    },
    /// A connection is made.
    Established {
        /// Which.
        conn: ConnId,
        /// The peer's data.
        private: Vec<u8>,
    },
    /// The peer refused.
    Refused {
        /// Which.
        conn: ConnId,
        /// Why: by its program, or by its connection manager.
        reason: RejectReason,
        /// The peer's data.
        private: Vec<u8>,
    },
    /// Not reachable, an address that does not serve, an order that could not be carried out, or a
    /// request that could not be posted.
    Failed {
        /// Which connection.
        conn: ConnId,
        /// Why.
        errno: Errno,
    },
    /// The queues of a closed connection are empty, or gone with it: nothing of it touches memory
    /// or leaves any more.
    Drained {
        /// Which.
        conn: ConnId,
    },
    /// The peer has disconnected, or answered that this side has.
    Disconnected {
        /// Which.
        conn: ConnId,
    },
}
