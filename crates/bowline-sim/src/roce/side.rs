//! One end of a connection as its program sees it: its queue pair, its memory, what it asked for
//! and what it was told.

use std::collections::VecDeque;

use bowline_verbs::{CmId, CqId, MrKeys, PdId, Qpn, Status, WcOpcode};

use super::life::Linger;
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

/// Why requests of a connection may fail.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Trouble(u8);

impl Trouble {
    /// Somebody has ended it.
    pub(crate) const ENDED: Self = Self(1);
    /// A device has died.
    pub(crate) const DIED: Self = Self(2);
    /// Somebody asked for what is not allowed.
    pub(crate) const MISUSE: Self = Self(4);
    /// The network may be so bad that a peer seems dead.
    pub(crate) const NETWORK: Self = Self(8);
    /// A request has failed for one of the other reasons.
    pub(crate) const FAILED: Self = Self(16);
    /// The connection was never made, or only on one side.
    pub(crate) const UNMADE: Self = Self(32);

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

/// What a fast registration request is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FastStep {
    None,
    Register,
    Invalidate,
}

/// A send request posted and not known to be complete.
#[derive(Debug)]
pub(crate) struct Request {
    pub(crate) number: u64,
    pub(crate) opcode: WcOpcode,
    pub(crate) len: u32,
    pub(crate) signalled: bool,
    /// Failures it has earned by itself.
    pub(crate) may: Statuses,
    /// It must not succeed.
    pub(crate) must_fail: bool,
    /// Own memory it sends from.
    pub(crate) source: Option<AreaId>,
    /// Own memory its result goes to.
    pub(crate) sink: Option<AreaId>,
    /// The peer's memory it writes or reads.
    pub(crate) target: Option<AreaId>,
    /// It takes a receive of the peer.
    pub(crate) message: bool,
    pub(crate) fast: FastStep,
}

impl Request {
    /// A request of which nothing is known but its number.
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

/// Memory a peer was given by a fast registration.
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
    /// Its request's.
    pub(crate) number: u64,
    /// Empty for a write.
    pub(crate) bytes: Vec<u8>,
    pub(crate) len: usize,
    pub(crate) imm: Option<u32>,
    pub(crate) invalidates: Option<u32>,
    pub(crate) write: bool,
    /// The key to be invalidated is none.
    pub(crate) bad_key: bool,
    /// What the program tells its peer with it.
    pub(crate) word: Word,
}

/// What a program tells its peer with a message.
#[derive(Clone, Debug)]
pub(crate) enum Word {
    Nothing,
    /// This memory may be used.
    Grant(Grant),
    /// It is not used any more.
    Release,
}

/// A receive posted and not complete.
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
    /// Free; the last key.
    Free(u32),
    /// The peer has this key.
    Granted(u32),
    /// The peer needs it no more.
    Released(u32),
    /// Being invalidated.
    Ending(u32),
}

impl Fast {
    /// Present key.
    pub(crate) const fn key(self) -> u32 {
        let (Self::Free(key) | Self::Granted(key) | Self::Released(key) | Self::Ending(key)) = self;
        key
    }
}

/// How far a side is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Stage {
    /// Made; waits for the peer.
    Connecting,
    /// Requests may be posted.
    Up,
    /// Its queue pair is in error, or soon; what is posted comes back.
    Ending,
    /// Everything came back.
    Drained,
    /// Nothing is left of it.
    Gone,
}

/// Events of the connection manager that came for a side.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Told {
    pub(crate) established: bool,
    pub(crate) refused: bool,
    pub(crate) disconnected: bool,
    pub(crate) timewait_exit: bool,
}

/// One end of a connection.
#[derive(Debug)]
pub(crate) struct Side {
    pub(crate) host: usize,
    /// Life of the host it belongs to.
    pub(crate) boot: u32,
    /// Index of the connection's plan.
    pub(crate) conn: usize,
    pub(crate) active: bool,
    pub(crate) peer: Option<SideId>,
    /// Who asked for the connection, as a passive side was told.
    pub(crate) asker: Option<SideId>,
    pub(crate) stage: Stage,
    pub(crate) trouble: Trouble,
    pub(crate) told: Told,
    pub(crate) linger: Linger,
    /// Its device has died under it.
    pub(crate) dead: bool,

    pub(crate) pd: PdId,
    pub(crate) send_cq: CqId,
    pub(crate) recv_cq: CqId,
    pub(crate) qpn: Qpn,
    pub(crate) id: Option<CmId>,

    pub(crate) memory: Memory,
    /// Address of the buffer's first byte, in the terms of every region.
    pub(crate) iova: u64,
    /// Sources, receives, sinks.
    pub(crate) local: MrKeys,
    /// Targets and words, for the peer.
    pub(crate) shared: MrKeys,
    /// For the peer to read only, and not for this side to write.
    pub(crate) constant: MrKeys,
    pub(crate) fast: Fast,
    /// The region under a window that serves as the fast region.
    pub(crate) under: Option<MrKeys>,
    /// The shared region is no more.
    pub(crate) revoked: bool,

    pub(crate) requests: VecDeque<Request>,
    pub(crate) receives: VecDeque<Receive>,
    /// Sent, not received by the peer.
    pub(crate) outgoing: VecDeque<Message>,
    pub(crate) send_failed: bool,
    pub(crate) recv_failed: bool,
    /// Messages that succeeded, as far as this side knows.
    pub(crate) succeeded: u64,
    pub(crate) received: u64,

    /// The peer's fast memory that may be used.
    pub(crate) grant: Option<Grant>,
    /// One that may not be used any more.
    pub(crate) stale: Option<Grant>,
    /// Requests still to be posted.
    pub(crate) left: u32,
    pub(crate) next_number: u64,
    /// Requests since the last one that asked for a completion.
    pub(crate) silent: usize,
    /// An event to go on posting is in the queue.
    pub(crate) posting: bool,
    /// Receives to be posted later.
    pub(crate) receives_due: usize,
    /// An event to look at the completions is in the queue.
    pub(crate) looking: bool,
    /// The completion queues are armed: send, receive.
    pub(crate) armed: [bool; 2],
}

impl Side {
    /// A side that has everything it needs of its device, and has asked for nothing.
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
            asker: None,
            stage: Stage::Connecting,
            trouble: Trouble::default(),
            told: Told::default(),
            linger: Linger::No,
            dead: false,
            pd,
            send_cq,
            recv_cq,
            qpn,
            id: None,
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
