//! Queue pairs: states, attributes, and the two halves that send and receive.
//!
//! ```text
//!   RESET --> INIT --> RTR --> RTS        any but RESET --> ERR       any --> RESET
//!             receives requests requests and
//!             posted   taken    answers                                       [QP-2]
//!                                 |  ^
//!                                 v  |  requests begun are finished, none is begun
//!                                 SQD                                         [QP-3]
//!
//!   UC and UD: RTS -- a message cannot be sent --> SQE --> RTS
//! ```

use std::net::IpAddr;

use bowline_base::Instant;
use bowline_verbs::{
    Error, InvalidReason, Mtu, QpAttr, QpAttrName, QpInit, QpState, QpType, Qpn, SendWr, UdDest,
};

use crate::burst::{Route, source_port, unconnected_source_port};
use crate::config::{Config, GiveUp};
use crate::congestion::{Path, PathId};
use crate::delayed_ack::DelayedAck;
use crate::gso_loss::GsoLossDetector;
use crate::rc::requester::{Readiness, Requester, Settings};
use crate::rc::responder::Responder;
use crate::uc::UcReceiver;
use crate::ucsend::UcSender;
use crate::ud::UdReceiver;
use crate::udsend::UdSender;

/// A queue pair.
#[derive(Debug)]
pub(crate) struct Qp {
    pub(crate) qpn: Qpn,
    pub(crate) init: QpInit,
    pub(crate) state: QpState,
    /// Present attributes; the field `state` in it is not used.
    pub(crate) attr: QpAttr,
    pub(crate) halves: Halves,
    /// Detects from repeated READ requests that bursts of answers lose all packets but the first.
    pub(crate) answer_gso_loss: GsoLossDetector,
    /// The queue pair is in `Shared::urgent` or `Shared::normal`.
    pub(crate) in_urgent: bool,
    pub(crate) in_normal: bool,
    /// The queue pair waits in the line of its path.
    pub(crate) in_line: bool,
    /// The path to the peer.
    pub(crate) path: PathId,
    /// How often the pending acknowledgement has been deferred.
    pub(crate) ack_defers: u8,
    /// Which half has the next turn when both have something to send: the one that the last burst
    /// passed over.
    pub(crate) requests_next: bool,
    pub(crate) replies_next: bool,
    pub(crate) delayed_ack: DelayedAck,
    /// The valid entry of the timer heap.
    pub(crate) timer_at: Option<Instant>,
    /// The first packet arrived before RTS, and the program was notified.
    pub(crate) heard: bool,
    /// Set while started requests are not complete in SQD; the value tells whether the program
    /// wants to be notified when they are.
    pub(crate) draining: Option<bool>,
}

/// The sending and the receiving half.
#[derive(Debug)]
#[allow(clippy::large_enum_variant, reason = "nearly all are connections, and all are boxed")]
pub(crate) enum Halves {
    Rc { requester: Requester, responder: Responder },
    Uc { sender: UcSender, receiver: UcReceiver },
    Ud { sender: UdSender, receiver: UdReceiver },
}

impl Halves {
    pub(crate) fn new(init: &QpInit, mtu: usize) -> Self {
        match init.qp_type {
            QpType::Rc => Self::Rc {
                requester: Requester::new(init.cap, init.sq_sig_all),
                responder: Responder::new(),
            },
            QpType::Uc => Self::Uc {
                sender: UcSender::new(init.cap, init.sq_sig_all),
                receiver: UcReceiver::new(),
            },
            QpType::Ud => Self::Ud {
                sender: UdSender::new(init.cap, init.sq_sig_all, mtu),
                receiver: UdReceiver::default(),
            },
        }
    }

    /// Queues a send request.
    pub(crate) fn post(&mut self, wr: &SendWr<'_>) -> Result<(), Error> {
        match self {
            Self::Rc { requester, .. } => requester.post(wr),
            Self::Uc { sender, .. } => sender.post(wr),
            Self::Ud { sender, .. } => sender.post(wr),
        }
    }

    /// Takes the newest send requests back, of which none has been looked at: `len` are left.
    pub(crate) fn take_back(&mut self, len: usize) {
        match self {
            Self::Rc { requester, .. } => requester.take_back(len),
            Self::Uc { sender, .. } => sender.take_back(len),
            Self::Ud { sender, .. } => sender.take_back(len),
        }
    }
}

/// Attributes as bit sets, for the table of QP-1.
mod set {
    use bowline_verbs::QpAttrName;

    pub(super) const ACCESS: u32 = 1;
    pub(super) const QKEY: u32 = 2;
    pub(super) const AV: u32 = 4;
    pub(super) const PATH_MTU: u32 = 8;
    pub(super) const DEST_QPN: u32 = 16;
    pub(super) const RQ_PSN: u32 = 32;
    pub(super) const SQ_PSN: u32 = 64;
    pub(super) const MAX_RD: u32 = 128;
    pub(super) const MAX_DEST_RD: u32 = 256;
    pub(super) const MIN_RNR: u32 = 512;
    pub(super) const TIMEOUT: u32 = 1024;
    pub(super) const RETRY: u32 = 2048;
    pub(super) const RNR_RETRY: u32 = 4096;
    pub(super) const CUR_STATE: u32 = 1 << 13;
    pub(super) const PORT: u32 = 1 << 14;
    pub(super) const PKEY: u32 = 1 << 15;
    pub(super) const SQD_NOTIFY: u32 = 1 << 16;
    pub(super) const SQ_DRAINING: u32 = 1 << 17;

    /// Attributes that may not be changed in SQD while a started request is not complete.
    pub(super) const DRAINED: u32 =
        AV | TIMEOUT | RETRY | RNR_RETRY | MAX_RD | MAX_DEST_RD | PORT | PKEY;

    /// The name of each attribute, in the order in which they are checked.
    pub(super) const NAMES: [(u32, QpAttrName); 18] = [
        (ACCESS, QpAttrName::Access),
        (QKEY, QpAttrName::Qkey),
        (AV, QpAttrName::Av),
        (PATH_MTU, QpAttrName::PathMtu),
        (DEST_QPN, QpAttrName::DestQpn),
        (RQ_PSN, QpAttrName::RqPsn),
        (SQ_PSN, QpAttrName::SqPsn),
        (MAX_RD, QpAttrName::MaxRdAtomic),
        (MAX_DEST_RD, QpAttrName::MaxDestRdAtomic),
        (MIN_RNR, QpAttrName::MinRnrTimer),
        (TIMEOUT, QpAttrName::Timeout),
        (RETRY, QpAttrName::RetryCnt),
        (RNR_RETRY, QpAttrName::RnrRetry),
        (CUR_STATE, QpAttrName::CurState),
        (PORT, QpAttrName::Port),
        (PKEY, QpAttrName::PkeyIndex),
        (SQD_NOTIFY, QpAttrName::SqdNotify),
        (SQ_DRAINING, QpAttrName::SqDraining),
    ];
}

fn given(attr: &QpAttr) -> u32 {
    let flag = |is: bool, bit: u32| if is { bit } else { 0 };
    flag(attr.access.is_some(), set::ACCESS)
        | flag(attr.qkey.is_some(), set::QKEY)
        | flag(attr.av.is_some(), set::AV)
        | flag(attr.path_mtu.is_some(), set::PATH_MTU)
        | flag(attr.dest_qpn.is_some(), set::DEST_QPN)
        | flag(attr.rq_psn.is_some(), set::RQ_PSN)
        | flag(attr.sq_psn.is_some(), set::SQ_PSN)
        | flag(attr.max_rd_atomic.is_some(), set::MAX_RD)
        | flag(attr.max_dest_rd_atomic.is_some(), set::MAX_DEST_RD)
        | flag(attr.min_rnr_timer.is_some(), set::MIN_RNR)
        | flag(attr.timeout.is_some(), set::TIMEOUT)
        | flag(attr.retry_cnt.is_some(), set::RETRY)
        | flag(attr.rnr_retry.is_some(), set::RNR_RETRY)
        | flag(attr.cur_state.is_some(), set::CUR_STATE)
        | flag(attr.port.is_some(), set::PORT)
        | flag(attr.pkey_index.is_some(), set::PKEY)
        | flag(attr.sqd_notify.is_some(), set::SQD_NOTIFY)
        | flag(attr.sq_draining.is_some(), set::SQ_DRAINING)
}

/// Returns required and optional attributes of a transition [QP-1]; `None` if there is no such
/// transition.
fn transition(qp_type: QpType, from: QpState, to: QpState) -> Option<(u32, u32)> {
    use QpState::{Err, Init, Reset, Rtr, Rts, Sqd, Sqe};
    let place = set::PORT | set::PKEY;
    Some(match (qp_type, from, to) {
        (_, _, Reset) => (0, 0),
        (_, from, Err) if from != Reset => (0, 0),
        // Port and partition key have defaults.
        (QpType::Rc, Reset, Init) => (set::ACCESS, place),
        (QpType::Rc, Init, Init) => (0, set::ACCESS | place),
        (QpType::Rc, Init, Rtr) => (
            set::AV | set::PATH_MTU | set::DEST_QPN | set::RQ_PSN | set::MAX_DEST_RD | set::MIN_RNR,
            set::ACCESS | set::PKEY,
        ),
        (QpType::Rc, Rtr, Rts) => (
            set::TIMEOUT | set::RETRY | set::RNR_RETRY | set::SQ_PSN | set::MAX_RD,
            set::CUR_STATE | set::ACCESS | set::MIN_RNR,
        ),
        (QpType::Rc, Rts | Sqd, Rts) => (0, set::CUR_STATE | set::ACCESS | set::MIN_RNR),
        (_, Rts, Sqd) => (0, set::SQD_NOTIFY),
        (QpType::Rc, Sqd, Sqd) => (0, set::DRAINED | set::ACCESS | set::MIN_RNR),
        (QpType::Uc, Reset, Init) => (set::ACCESS, place),
        (QpType::Uc, Init, Init) => (0, set::ACCESS | place),
        (QpType::Uc, Init, Rtr) => {
            (set::AV | set::PATH_MTU | set::DEST_QPN | set::RQ_PSN, set::ACCESS | set::PKEY)
        }
        (QpType::Uc, Rtr, Rts) => (set::SQ_PSN, set::CUR_STATE | set::ACCESS),
        (QpType::Uc, Rts | Sqd | Sqe, Rts) => (0, set::CUR_STATE | set::ACCESS),
        (QpType::Uc, Sqd, Sqd) => (0, set::AV | place | set::ACCESS),
        (QpType::Ud, Reset, Init) => (set::QKEY, place),
        (QpType::Ud, Init, Init) => (0, set::QKEY | place),
        (QpType::Ud, Init, Rtr) | (QpType::Ud, Sqd, Sqd) => (0, set::QKEY | set::PKEY),
        (QpType::Ud, Rts | Sqd | Sqe, Rts) => (0, set::CUR_STATE | set::QKEY),
        (QpType::Ud, Rtr, Rts) => (set::SQ_PSN, set::CUR_STATE | set::QKEY),
        _ => return None,
    })
}

impl Qp {
    /// Tells whether an acknowledgement is all there is to send.
    pub(crate) fn has_ack_only(&self, now: Instant, path: &Path) -> bool {
        match &self.halves {
            Halves::Rc { requester, responder } => {
                let readiness = requester.readiness(now, path);
                responder.has_one_ack() && !(self.requests() && readiness == Readiness::Ready)
            }
            Halves::Uc { .. } | Halves::Ud { .. } => false,
        }
    }

    /// Checks a change of attributes; returns the resulting state.
    pub(crate) fn check(&self, attr: &QpAttr, config: &Config) -> Result<QpState, Error> {
        let to = attr.state.unwrap_or(self.state);
        if attr.cur_state.is_some_and(|state| state != self.state) {
            return Err(Error::Invalid(InvalidReason::CurState(self.state)));
        }
        let Some((required, optional)) = transition(self.init.qp_type, self.state, to) else {
            return Err(Error::Invalid(InvalidReason::Transition { from: self.state, to }));
        };
        let given = given(attr);
        for (bit, name) in set::NAMES {
            if required & bit != 0 && given & bit == 0 {
                return Err(Error::Invalid(InvalidReason::AttrMissing(name)));
            }
            if given & bit != 0 && (required | optional) & bit == 0 {
                return Err(Error::Invalid(InvalidReason::AttrNotAllowed(name)));
            }
        }
        // The transition from RTS to SQD changes nothing else. In SQD, attributes that affect
        // started requests may be changed only after these have completed.
        if self.draining.is_some() && to == QpState::Sqd && given & set::DRAINED != 0 {
            return Err(Error::Invalid(InvalidReason::NotDrained));
        }
        check_values(attr, config)?;
        Ok(to)
    }

    /// Applies checked attributes, and starts the halves that the transition activates.
    pub(crate) fn apply(&mut self, attr: &QpAttr, to: QpState, config: &Config) {
        let now = &mut self.attr;
        now.access = attr.access.or(now.access);
        now.qkey = attr.qkey.or(now.qkey);
        now.av = attr.av.or(now.av);
        now.path_mtu = attr.path_mtu.or(now.path_mtu);
        now.dest_qpn = attr.dest_qpn.or(now.dest_qpn);
        now.rq_psn = attr.rq_psn.or(now.rq_psn);
        now.sq_psn = attr.sq_psn.or(now.sq_psn);
        now.max_rd_atomic = attr.max_rd_atomic.or(now.max_rd_atomic);
        now.max_dest_rd_atomic = attr.max_dest_rd_atomic.or(now.max_dest_rd_atomic);
        now.min_rnr_timer = attr.min_rnr_timer.or(now.min_rnr_timer);
        now.timeout = attr.timeout.or(now.timeout);
        now.retry_cnt = attr.retry_cnt.or(now.retry_cnt);
        now.rnr_retry = attr.rnr_retry.or(now.rnr_retry);
        now.give_up = attr.give_up.or(now.give_up);
        now.port = attr.port.or(now.port).or(Some(PORT));
        now.pkey_index = attr.pkey_index.or(now.pkey_index).or(Some(0));
        if to == QpState::Sqd && self.state != to {
            self.draining = Some(attr.sqd_notify.unwrap_or(false));
        } else if to != QpState::Sqd {
            self.draining = None;
        }
        let mtu = self.mtu(config);
        let (from, attr) = (self.state, self.attr);
        let congestion = match attr.av {
            Some(av) => config.congestion.between(av.local, av.remote),
            None => config.congestion,
        };
        let settings = Settings {
            mtu,
            max_rd_atomic: attr.max_rd_atomic.unwrap_or_default(),
            timeout: attr.timeout.unwrap_or_default(),
            retry_cnt: attr.retry_cnt.unwrap_or_default(),
            rnr_retry: attr.rnr_retry.unwrap_or_default(),
            congestion,
            give_up: attr.give_up.map_or(config.give_up, GiveUp::After),
            retransmit_min: config.retransmit_min,
        };
        match &mut self.halves {
            Halves::Rc { requester, responder } => match (from, to) {
                (QpState::Init, QpState::Rtr) => responder.start(
                    attr.rq_psn.unwrap_or_default(),
                    attr.max_dest_rd_atomic.unwrap_or_default(),
                    attr.min_rnr_timer.unwrap_or_default(),
                ),
                (QpState::Rtr | QpState::Rts | QpState::Sqd, QpState::Rts | QpState::Sqd) => {
                    responder.set_rnr_timer(attr.min_rnr_timer.unwrap_or_default());
                    requester.set_sqd(to == QpState::Sqd);
                    if from == QpState::Rtr {
                        requester.start(&settings, attr.sq_psn.unwrap_or_default());
                    } else if from == to && to == QpState::Sqd && self.draining.is_none() {
                        requester.change(&settings);
                        responder.set_depth(attr.max_dest_rd_atomic.unwrap_or_default());
                    }
                }
                _ => {}
            },
            Halves::Uc { sender, receiver } => match (from, to) {
                (QpState::Init, QpState::Rtr) => {
                    receiver.start(attr.rq_psn.unwrap_or_default());
                }
                (QpState::Rtr, QpState::Rts) => {
                    sender.start(attr.sq_psn.unwrap_or_default(), mtu);
                }
                _ => {}
            },
            Halves::Ud { sender, .. } => {
                if (from, to) == (QpState::Rtr, QpState::Rts) {
                    sender.start(attr.sq_psn.unwrap_or_default());
                }
            }
        }
        self.state = to;
        if to == QpState::Reset {
            self.attr = QpAttr::default();
            self.halves = Halves::new(&self.init, config.mtu.bytes());
            self.heard = false;
            self.draining = None;
            self.delayed_ack = DelayedAck::default();
            self.answer_gso_loss = GsoLossDetector::for_answers();
        }
    }

    /// Payload bytes of a full packet.
    pub(crate) fn mtu(&self, config: &Config) -> usize {
        self.attr.path_mtu.unwrap_or(config.mtu).bytes()
    }

    /// Returns the route of a connection's packets.
    pub(crate) fn route(&self, config: &Config) -> Option<Route> {
        let av = self.attr.av?;
        let dest = self.attr.dest_qpn?;
        let source_port =
            config.source_port.unwrap_or_else(|| source_port(av.flow_label, self.qpn.0, dest.0));
        Some(Route { from: av.local, to: av.remote, source_port, tos: av.tos })
    }

    /// Returns the route of a datagram; `None` if no local address is of this family, or the one
    /// asked for is not.
    pub(crate) fn datagram_route(&self, dest: &UdDest, config: &Config) -> Option<Route> {
        let (to, wanted) = (dest.addr, dest.from.map(|from| from.to_canonical()));
        let fits = |addr: &&IpAddr| {
            addr.is_ipv4() == to.is_ipv4() && wanted.is_none_or(|from| from == **addr)
        };
        let from = config.addrs.iter().find(fits)?;
        let source_port = config.source_port.unwrap_or_else(|| unconnected_source_port(self.qpn.0));
        Some(Route { from: *from, to, source_port, tos: 0 })
    }

    /// Tells whether requests are sent: all of them in RTS, only started ones in SQD [QP-3].
    pub(crate) const fn requests(&self) -> bool {
        matches!(self.state, QpState::Rts | QpState::Sqd)
    }

    /// Tells whether an unreliable connection has a message to send: in SQD only one that has begun
    /// [QP-3].
    pub(crate) fn has_message(&self, sender: &UcSender) -> bool {
        match self.state {
            QpState::Rts => sender.len() > 0,
            QpState::Sqd => sender.is_within_message(),
            _ => false,
        }
    }

    /// Tells, once, that all started requests are complete in SQD, if the program wants to be
    /// notified.
    pub(crate) fn has_drained(&mut self) -> bool {
        let drained = match &self.halves {
            Halves::Rc { requester, .. } => requester.is_drained(),
            Halves::Uc { sender, .. } => !sender.is_within_message(),
            // A datagram is complete as soon as it is started.
            Halves::Ud { .. } => true,
        };
        if self.state != QpState::Sqd || !drained {
            return false;
        }
        self.draining.take().unwrap_or(false)
    }

    /// Bytes that the path counts as in flight, and that READs have asked for.
    pub(crate) const fn in_flight(&self) -> (u64, u64) {
        match &self.halves {
            Halves::Rc { requester, .. } => (requester.in_flight(), requester.asked()),
            Halves::Uc { .. } | Halves::Ud { .. } => (0, 0),
        }
    }

    /// Number of incomplete send requests.
    pub(crate) fn sends(&self) -> usize {
        match &self.halves {
            Halves::Rc { requester, .. } => requester.len(),
            Halves::Uc { sender, .. } => sender.len(),
            Halves::Ud { sender, .. } => sender.len(),
        }
    }
}

/// Number of the only port.
const PORT: u8 = 1;
/// Largest number of 24 bits, as PSNs and QPNs have.
const BITS_24: u32 = 0xff_ffff;

fn check_values(attr: &QpAttr, config: &Config) -> Result<(), Error> {
    let code = |value: Option<u8>| value.map(u32::from);
    let bytes = |mtu: Mtu| mtu.bytes() as u32;
    let most_reads = u32::from(config.limits.rd_atomic);
    let limits = [
        (QpAttrName::RqPsn, attr.rq_psn, BITS_24),
        (QpAttrName::SqPsn, attr.sq_psn, BITS_24),
        (QpAttrName::DestQpn, attr.dest_qpn.map(|qpn| qpn.0), BITS_24),
        (QpAttrName::MaxRdAtomic, code(attr.max_rd_atomic), most_reads),
        (QpAttrName::MaxDestRdAtomic, code(attr.max_dest_rd_atomic), most_reads),
        (QpAttrName::MinRnrTimer, code(attr.min_rnr_timer), 31),
        (QpAttrName::Timeout, code(attr.timeout), 31),
        (QpAttrName::RetryCnt, code(attr.retry_cnt), 7),
        (QpAttrName::RnrRetry, code(attr.rnr_retry), 7),
        (QpAttrName::PathMtu, attr.path_mtu.map(bytes), bytes(config.mtu)),
    ];
    for (attr, given, limit) in limits {
        if let Some(given) = given.filter(|given| *given > limit) {
            return Err(Error::Invalid(InvalidReason::AttrTooLarge { attr, limit, given }));
        }
    }
    let exists = [
        (QpAttrName::DestQpn, attr.dest_qpn.is_none_or(|qpn| qpn.0 > 1)),
        (QpAttrName::Port, attr.port.is_none_or(|port| port == PORT)),
        (QpAttrName::PkeyIndex, attr.pkey_index.is_none_or(|index| index == 0)),
        (QpAttrName::Av, attr.av.is_none_or(|av| av.local.is_ipv4() == av.remote.is_ipv4())),
    ];
    if let Some((name, _)) = exists.into_iter().find(|(_, exists)| !exists) {
        return Err(Error::Invalid(InvalidReason::AttrValue(name)));
    }
    match attr.av {
        Some(av) if !config.addrs.contains(&av.local) => Err(Error::AddrNotAvailable),
        _ => Ok(()),
    }
}
