//! One end of a connection as its program sees it: its queue pair, its memory, its requests and the
//! events it received.

use std::collections::VecDeque;

use bowline_verbs::{CmId, CqId, MrKeys, PdId, Qpn, SrqId, Status, WcOpcode};

use super::connections::Linger;
use super::memory::{AreaId, Memory, Pieces};

/// Index of a side.
pub(crate) type SideId = usize;

/// A set of statuses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Statuses(u32);

impl Statuses {
    pub(crate) const NONE: Self = Self(0);

    pub(crate) const fn only(status: Status) -> Self {
        Self(1 << status as u8)
    }

    pub(crate) const fn and(self, status: Status) -> Self {
        Self(self.0 | 1 << status as u8)
    }

    pub(crate) const fn has(self, status: Status) -> bool {
        self.0 & 1 << status as u8 != 0
    }
}

/// Reasons why requests of a connection may fail.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct FailureCauses(u8);

impl FailureCauses {
    /// A program has ended the connection.
    pub(crate) const ENDED: Self = Self(1);
    /// A device has died.
    pub(crate) const DIED: Self = Self(2);
    /// A program made a request that is not allowed.
    pub(crate) const MISUSE: Self = Self(4);
    /// The network may be so bad that a peer seems dead.
    pub(crate) const NETWORK: Self = Self(8);
    /// A request has failed for one of the other reasons.
    pub(crate) const FAILED: Self = Self(16);
    /// The connection was never established, or only on one side.
    pub(crate) const NOT_ESTABLISHED: Self = Self(32);

    pub(crate) const fn any(self) -> bool {
        self.0 != 0
    }

    pub(crate) const fn has(self, other: Self) -> bool {
        self.0 & other.0 != 0
    }

    pub(crate) fn add(&mut self, other: Self) {
        self.0 |= other.0;
    }
}

/// The kind of a request that concerns fast registration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FastStep {
    None,
    Register,
    Invalidate,
}

/// A send request that is posted and not known to be complete.
#[derive(Debug)]
pub(crate) struct Request {
    pub(crate) number: u64,
    pub(crate) opcode: WcOpcode,
    pub(crate) len: u32,
    pub(crate) signalled: bool,
    /// Statuses with which this request itself may fail.
    pub(crate) may: Statuses,
    /// The request must not succeed.
    pub(crate) must_fail: bool,
    /// Local memory that the request sends from.
    pub(crate) source: Option<AreaId>,
    /// Local memory that the result goes to.
    pub(crate) sink: Option<AreaId>,
    /// The peer's memory that the request writes or reads.
    pub(crate) target: Option<AreaId>,
    /// The request consumes a receive of the peer.
    pub(crate) message: bool,
    pub(crate) fast: FastStep,
}

impl Request {
    /// Makes a request of which only the number and the operation are known.
    pub(crate) fn new(number: u64, opcode: WcOpcode) -> Self {
        Self {
            number,
            opcode,
            len: 0,
            signalled: false,
            may: Statuses::NONE,
            must_fail: false,
            source: None,
            sink: None,
            target: None,
            message: false,
            fast: FastStep::None,
        }
    }

    pub(crate) fn is_read(&self) -> bool {
        self.opcode == WcOpcode::RdmaRead
    }
}

/// Memory that a peer may use after a fast registration.
#[derive(Clone, Debug)]
pub(crate) struct Grant {
    pub(crate) key: u32,
    pub(crate) iova: u64,
    pub(crate) area: AreaId,
    pub(crate) pieces: Pieces,
    pub(crate) len: usize,
}

/// A message on its way to a receive.
#[derive(Debug)]
pub(crate) struct Message {
    /// Number of the message's request.
    pub(crate) number: u64,
    /// Payload; empty for a write.
    pub(crate) bytes: Vec<u8>,
    pub(crate) len: usize,
    pub(crate) imm: Option<u32>,
    pub(crate) invalidates: Option<u32>,
    pub(crate) write: bool,
    /// The key to be invalidated is not valid.
    pub(crate) bad_key: bool,
    /// The program's announcement to its peer in this message.
    pub(crate) announcement: Announcement,
}

/// A program's announcement to its peer.
#[derive(Clone, Debug)]
pub(crate) enum Announcement {
    Nothing,
    /// The peer may use this memory.
    Grant(Grant),
    /// The peer's memory is not used any more.
    Release,
}

/// A receive that is posted and not complete.
#[derive(Debug)]
pub(crate) struct Receive {
    pub(crate) number: u64,
    pub(crate) area: AreaId,
    pub(crate) pieces: Pieces,
    pub(crate) len: usize,
}

/// State of a side's region for fast registration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fast {
    /// The region is free; the last key.
    Free(u32),
    /// The peer may use this key.
    Granted(u32),
    /// The peer does not need this key any more.
    Released(u32),
    /// This key is being invalidated.
    Ending(u32),
}

impl Fast {
    /// Returns the present key.
    pub(crate) const fn key(self) -> u32 {
        let (Self::Free(key) | Self::Granted(key) | Self::Released(key) | Self::Ending(key)) = self;
        key
    }
}

/// Stage in the existence of a side.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Stage {
    /// The side is made and waits for the peer.
    Connecting,
    /// Requests may be posted.
    Up,
    /// The queue pair is in the error state, or soon will be; posted requests are flushed.
    Ending,
    /// All requests have completed.
    Drained,
    /// All objects of the side are removed.
    Gone,
}

/// Events of the connection manager that came for a side.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct CmEventsSeen {
    pub(crate) established: bool,
    pub(crate) refused: bool,
    pub(crate) disconnected: bool,
    pub(crate) timewait_exit: bool,
}

/// The shared receive queue of a side.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SharedReceives {
    pub(crate) srq: SrqId,
    /// The limit, while it is armed; otherwise 0.
    pub(crate) limit: usize,
    /// The device has reported that the queue pair takes no receive any more, and the program has
    /// polled its completions since.
    pub(crate) is_reported: bool,
    pub(crate) is_last: bool,
}

/// One end of a connection.
#[derive(Debug)]
pub(crate) struct Side {
    pub(crate) host: usize,
    /// Generation of the device that the side belongs to.
    pub(crate) boot: u32,
    /// Index of the connection's plan.
    pub(crate) conn: usize,
    pub(crate) active: bool,
    pub(crate) peer: Option<SideId>,
    /// The side that asked for the connection, as a passive side learned it.
    pub(crate) requester: Option<SideId>,
    pub(crate) stage: Stage,
    pub(crate) failure_causes: FailureCauses,
    pub(crate) cm_events_seen: CmEventsSeen,
    pub(crate) linger: Linger,
    /// The side's device has died.
    pub(crate) dead: bool,

    pub(crate) pd: PdId,
    pub(crate) send_cq: CqId,
    pub(crate) recv_cq: CqId,
    pub(crate) qpn: Qpn,
    pub(crate) id: Option<CmId>,
    pub(crate) shared_receives: Option<SharedReceives>,

    pub(crate) memory: Memory,
    /// Address of the buffer's first byte in all regions.
    pub(crate) iova: u64,
    /// Region of sources, receives and sinks.
    pub(crate) local: MrKeys,
    /// Region of targets and announced memory, for the peer.
    pub(crate) shared: MrKeys,
    /// Region that the peer may read and this side may not write.
    pub(crate) constant: MrKeys,
    pub(crate) fast: Fast,
    /// The region under a memory window that serves as the fast region.
    pub(crate) under: Option<MrKeys>,
    /// The shared region is removed.
    pub(crate) revoked: bool,

    pub(crate) requests: VecDeque<Request>,
    pub(crate) receives: VecDeque<Receive>,
    /// Messages that are sent and not received by the peer.
    pub(crate) outgoing: VecDeque<Message>,
    pub(crate) send_failed: bool,
    pub(crate) recv_failed: bool,
    /// Number of messages that succeeded, as far as this side knows.
    pub(crate) succeeded: u64,
    pub(crate) received: u64,

    /// Fast memory of the peer that this side may use.
    pub(crate) grant: Option<Grant>,
    /// Fast memory of the peer that this side may not use any more.
    pub(crate) stale: Option<Grant>,
    /// Number of requests still to be posted.
    pub(crate) left: u32,
    pub(crate) next_number: u64,
    /// Number of requests since the last one that asked for a completion.
    pub(crate) silent: usize,
    /// The queue holds an event to go on posting.
    pub(crate) posting: bool,
    /// Number of receives to be posted later.
    pub(crate) receives_due: usize,
    /// The queue holds an event to poll the completions.
    pub(crate) looking: bool,
    /// The send and receive completion queues are armed.
    pub(crate) armed: [bool; 2],
}

impl Side {
    /// Makes a side that has all objects it needs of its device, and has requested nothing.
    pub(crate) fn new(
        memory: Memory,
        iova: u64,
        (pd, send_cq, recv_cq, qpn): (PdId, CqId, CqId, Qpn),
        [local, shared, constant]: [MrKeys; 3],
        fast: MrKeys,
        under: Option<MrKeys>,
    ) -> Self {
        Self {
            host: 0,
            boot: 0,
            conn: 0,
            active: false,
            peer: None,
            requester: None,
            stage: Stage::Connecting,
            failure_causes: FailureCauses::default(),
            cm_events_seen: CmEventsSeen::default(),
            linger: Linger::No,
            dead: false,
            pd,
            send_cq,
            recv_cq,
            qpn,
            id: None,
            shared_receives: None,
            memory,
            iova,
            local,
            shared,
            constant,
            fast: Fast::Free(fast.rkey),
            under,
            revoked: false,
            requests: VecDeque::new(),
            receives: VecDeque::new(),
            outgoing: VecDeque::new(),
            send_failed: false,
            recv_failed: false,
            succeeded: 0,
            received: 0,
            grant: None,
            stale: None,
            left: 0,
            next_number: 0,
            silent: 0,
            posting: false,
            receives_due: 0,
            looking: false,
            armed: [false; 2],
        }
    }
}
