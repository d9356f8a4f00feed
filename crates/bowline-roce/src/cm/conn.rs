//! A connection: its attributes and its state.
//!
//! ```text
//! active   ReqSent --REP--> RepRcvd --queue pair ready, RTU--> Established
//!          ReqSent --REP--> Responded --the program has led it, RTU--> Established
//! passive  ReqRcvd --accept--> Accepting --queue pair ready, REP--> RepSent --RTU--> Established
//! both     Established --disconnect, DREQ--> DreqSent --DREP--> Timewait --> gone
//!          Established --DREQ, answered by DREP--> Timewait --> gone
//! ```

use std::net::SocketAddr;
use std::time::Duration;

use bowline_verbs::{Access, AddressVector, CmId, Mtu, QpAttr, QpState, Qpn};
use bowline_wire::roce::MAD_LEN;
use bowline_wire::roce::cm::Ids;

use crate::Instant;

/// An encoded MAD.
pub(crate) type MadBytes = Box<[u8; MAD_LEN]>;

/// The peer of a connection.
#[derive(Clone, Copy, Debug)]
pub(super) struct Peer {
    /// The peer's communication ID of the connection.
    pub(super) comm_id: u32,
    /// Node GUID of the peer.
    pub(super) guid: u64,
    /// Queue pair of the peer.
    pub(super) qpn: u32,
    /// Vendor ID of the peer's extensions.
    pub(super) vendor: u32,
}

/// A message that is resent until it is answered.
#[derive(Debug)]
pub(super) struct Resend {
    /// The message; every repetition has the same bytes [GSI-6].
    pub(super) mad: MadBytes,
    /// How many of `CmConfig::first_resends` have been sent.
    pub(super) first_resends_done: usize,
    /// Time between the later repetitions.
    pub(super) period: Duration,
    /// How many of the later repetitions are left.
    pub(super) left: u8,
    /// How many repetitions may be sent. After them the time of the others passes in silence: a
    /// peer that may not exist is sent little [CM-57].
    pub(super) sends_left: u8,
    /// An MRA has arrived; only the first one counts [CM-43].
    pub(super) extended: bool,
}

/// State of a connection; see the picture above.
#[derive(Debug)]
pub(super) enum State {
    /// The program has not answered the request.
    ReqRcvd,
    /// The program has accepted; the queue pair is being made ready.
    Accepting(MadBytes),
    /// Waits for the RTU.
    RepSent(Resend),
    /// Waits for the REP.
    ReqSent(Resend),
    /// The queue pair is being made ready; holds the peer's private data.
    RepRcvd(Vec<u8>),
    /// The program leads the queue pair, and has not completed the connection.
    Responded,
    /// The connection is up.
    Established,
    /// Waits for the DREP.
    DreqSent(Resend),
    /// The connection is over; its ids stay reserved for a while [CM-45].
    Timewait,
}

/// A connection.
#[derive(Debug)]
pub(super) struct Conn {
    /// This side's communication ID of the connection.
    pub(super) comm_id: u32,
    /// This side is the active (connecting) one.
    pub(super) active: bool,
    /// The listener at which the request counts as pending.
    pub(super) pending_at: Option<CmId>,
    pub(super) local: SocketAddr,
    pub(super) remote: SocketAddr,
    /// This side's queue pair, `None` until a request is accepted.
    pub(super) qpn: Option<Qpn>,
    /// The program leads the queue pair: nothing is ordered for it.
    pub(super) is_led: bool,
    pub(super) peer: Option<Peer>,
    /// Transaction of the handshake [GSI-4].
    pub(super) transaction: u64,
    /// First expected PSN, which this side tells the peer [CM-31].
    pub(super) rq_psn: u32,
    /// First sent PSN, which the peer tells this side [CM-31].
    pub(super) sq_psn: u32,
    pub(super) mtu: Mtu,
    pub(super) flow_label: u32,
    pub(super) tos: u8,
    /// Code of the acknowledgement timeout [CM-33], which the queue pair has unless this side has
    /// chosen another one for it.
    pub(super) ack_timeout: u8,
    pub(super) chosen_timeout: Option<u8>,
    pub(super) retry_count: u8,
    pub(super) rnr_retry_count: u8,
    pub(super) min_rnr_timer: u8,
    /// The peer's proposal while the request is unanswered, this side's values afterwards [CM-32].
    pub(super) responder_resources: u8,
    pub(super) initiator_depth: u8,
    /// The peer's proposal, kept while a request is being accepted.
    pub(super) proposed: (u8, u8),
    /// Period and number of repetitions of REP and DREQ on the passive side [CM-41].
    pub(super) period: Duration,
    pub(super) max_retries: u8,
    pub(super) state: State,
    pub(super) timer: Option<Instant>,
    /// When the connection was created.
    pub(super) since: Instant,
    /// A peer at that address is known to have received a message of this side [CM-57].
    pub(super) proven: bool,
    /// The program has destroyed its id of the connection: no more events.
    pub(super) forgotten: bool,
}

impl Conn {
    /// Returns the communication IDs as in a message to the peer; 0 for a peer that is not known
    /// yet.
    pub(super) fn ids(&self) -> Ids {
        Ids { local: self.comm_id, remote: self.peer.map_or(0, |peer| peer.comm_id) }
    }

    /// Tells whether a message of the peer with these ids belongs to this connection [CM-36].
    pub(super) fn matches_ids(&self, by_peer: Ids) -> bool {
        let ids = self.ids();
        ids.remote != 0 && by_peer == Ids { local: ids.remote, remote: ids.local }
    }

    /// Tells whether the connection needs its queue pair.
    pub(super) fn holds_qp(&self) -> bool {
        !self.is_led && !matches!(self.state, State::DreqSent(_) | State::Timewait)
    }

    /// Returns how many READs and atomics this side answers, and has outstanding: what is agreed,
    /// or the most that the unanswered request allows.
    fn depths(&self, most: u8) -> (u8, u8) {
        match self.state {
            State::ReqRcvd => (self.initiator_depth.min(most), self.responder_resources.min(most)),
            _ => (self.responder_resources, self.initiator_depth),
        }
    }

    /// Returns the attributes of a transition of the queue pair, if its values are known. `most` is
    /// the device's limit of READs and atomics.
    pub(super) fn attr(&self, to: QpState, most: u8) -> Option<QpAttr> {
        let (responder, initiator) = self.depths(most);
        match to {
            QpState::Init => Some(self.to_init(responder)),
            QpState::Rtr if self.peer.is_some() => Some(self.to_rtr(responder)),
            QpState::Rts if self.peer.is_some() => Some(self.to_rts(initiator)),
            _ => None,
        }
    }

    /// From RESET to INIT [CMA-12].
    pub(super) fn to_init(&self, responder: u8) -> QpAttr {
        let mut access = Access::REMOTE_WRITE;
        if responder > 0 {
            access |= Access::REMOTE_READ | Access::REMOTE_ATOMIC;
            access |= Access::FLUSH_GLOBAL | Access::FLUSH_PERSISTENT;
        }
        QpAttr { state: Some(QpState::Init), access: Some(access), ..QpAttr::default() }
    }

    /// From INIT to RTR [CMA-12] [CMA-16].
    pub(super) fn to_rtr(&self, responder: u8) -> QpAttr {
        QpAttr {
            state: Some(QpState::Rtr),
            av: Some(AddressVector {
                local: self.local.ip(),
                remote: self.remote.ip(),
                flow_label: self.flow_label,
                tos: self.tos,
            }),
            path_mtu: Some(self.mtu),
            dest_qpn: self.peer.map(|peer| Qpn(peer.qpn)),
            rq_psn: Some(self.rq_psn),
            max_dest_rd_atomic: Some(responder),
            min_rnr_timer: Some(self.min_rnr_timer),
            ..QpAttr::default()
        }
    }

    /// From RTR to RTS [CMA-12] [CM-35].
    pub(super) fn to_rts(&self, initiator: u8) -> QpAttr {
        QpAttr {
            state: Some(QpState::Rts),
            sq_psn: Some(self.sq_psn),
            max_rd_atomic: Some(initiator),
            timeout: Some(self.chosen_timeout.unwrap_or(self.ack_timeout)),
            retry_cnt: Some(self.retry_count),
            rnr_retry: Some(self.rnr_retry_count),
            ..QpAttr::default()
        }
    }
}
