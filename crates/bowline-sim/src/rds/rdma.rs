//! Queue pairs as their users see them: connections made by messages of the CM, and in each
//! direction a row of frames that arrive once and in order, or not at all once the connection has
//! broken.
//!
//! A frame needs a receive that the other process has posted; without one the sender's NIC tries
//! again for ever. It is complete when it lies in such a receive and the other NIC has said so. A
//! NIC that hears nothing for too long gives up: its own end has broken then, and the other one
//! does not learn of it.
//!
//! ```text
//!   Requesting --REP----------> Ready --broken, DREQ, closed--> Broken --destroyed--> Gone
//!   Responding --RTU, a frame---^  |                              ^
//!       +---------REJ, no answer---|------------------------------+
//! ```
//!
//! This file holds the types and what processes ask for. `cm` makes connections, `transport` moves
//! frames, `wire` checks what nodes send, `faults` breaks things.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::IpAddr;

use bowline_wire::rds::{ConnectData, FRAGMENT_LEN, HEADER_LEN, Header};
use serde::{Deserialize, Serialize};

use self::wire::WireCheck;
use super::ctx::{Ctx, Event, HostId};
use super::net::Reason;
use super::ops::{OpsPlan, Work};
use super::oracle::MessageId;
use super::single_cut::CutCase;

mod cm;
mod faults;
mod transport;
mod wire;

/// A queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct QpId(u32);

impl std::fmt::Display for QpId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "qp{}", self.0)
    }
}

/// A report of the NIC or the CM to a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RdmaNotice {
    /// Another host's queue pair asks for a connection.
    Requested,
    /// The REP, the RTU or a first frame has come.
    Established,
    /// The connection cannot be used any more, or was not made.
    Ended(Reason),
    /// A frame lies in a receive.
    Received,
    /// A work request is complete.
    Sent,
}

/// An event of the CM or of NICs. It concerns the queue pair to which something comes.
#[derive(Clone, Copy, Debug)]
pub(crate) enum RdmaEvent {
    /// The REQ of this queue pair arrives.
    Request(QpId),
    Reply(QpId),
    Reject(QpId),
    ReadyToUse(QpId),
    Disconnect(QpId),
    /// The CM waits for an answer no longer.
    CmTimeout(QpId),
    Frame {
        to: QpId,
        number: u64,
    },
    Ack {
        to: QpId,
        acked: u64,
    },
    /// The other side has no receive posted.
    NotReady(QpId),
    /// The other side refuses a request, and has broken.
    Refused {
        to: QpId,
        number: u64,
    },
    /// The NIC sends again what is not acknowledged.
    Again(QpId),
    /// The NIC looks whether acknowledgements have come.
    Timeout(QpId),
}

/// Properties of the queue pairs of a run.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct RdmaPlan {
    /// Addresses that are served over RDMA.
    pub(crate) addrs: Vec<IpAddr>,
    /// What each host's node and driver do; kernels look at the sizes of queues only.
    pub(crate) nodes: Vec<RdmaNodePlan>,
    /// How many times a NIC sends again before it gives up.
    pub(crate) retries: u32,
    /// Time in nanoseconds after which it sends again.
    pub(crate) timeout: u64,
    /// Time in nanoseconds after which the CM repeats a message.
    pub(crate) cm_timeout: u64,
    /// Connections in a thousand that break after a random number of frames.
    pub(crate) break_permille: u64,
    /// Requests in a thousand of which a copy comes much later.
    pub(crate) late_permille: u64,
    /// What users do with RDMA operations.
    #[serde(default)]
    pub(crate) ops: Option<OpsPlan>,
    /// The one connection that is lost.
    #[serde(default)]
    pub(crate) cut: Option<CutCase>,
}

/// Properties of one host's RDMA.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct RdmaNodePlan {
    pub(crate) send_wr: u32,
    pub(crate) recv_wr: u32,
    pub(crate) unsignaled: u32,
    pub(crate) flow_control: bool,
    /// The driver is woken by solicited frames only.
    pub(crate) solicited: bool,
    /// Most frames that the driver posts or takes at a time.
    pub(crate) batch: usize,
    /// Batches in a thousand whose posting is reported only later.
    pub(crate) slow_post_permille: u64,
    /// Times in a thousand that receives are posted later than frames are taken, and how much later
    /// at most in nanoseconds.
    pub(crate) hold_permille: u64,
    pub(crate) hold: u64,
    /// Longest time in nanoseconds until a queue pair is flushed.
    pub(crate) flush: u64,
    /// Memory of a frame in bytes; 0: that of a kernel's.
    #[serde(default)]
    pub(crate) frame: usize,
    /// Connections in a thousand for which the driver posts no receives at all, or none after some,
    /// until faults are over.
    #[serde(default)]
    pub(crate) deaf_permille: u64,
}

/// A frame on its way.
#[derive(Clone, Debug)]
pub(crate) struct Frame {
    pub(crate) id: u64,
    pub(crate) header: [u8; HEADER_LEN],
    pub(crate) payload: Vec<u8>,
    pub(crate) signalled: bool,
    pub(crate) solicited: bool,
    /// It comes to nobody, though its sender is told that it has come: a mistake made on purpose.
    pub(crate) lost: bool,
    /// It waits until reads and atomics before it are answered.
    pub(crate) fence: bool,
    /// It is no frame but a request of an operation.
    pub(crate) work: Option<Work>,
    /// A request that is carried out before it once more: a mistake made on purpose.
    pub(crate) again: Option<Work>,
}

impl Frame {
    /// Returns a request of an operation.
    pub(crate) fn of_work(work: &bowline_rds::RdmaWork<'_>) -> Self {
        Self {
            id: work.id,
            header: [0; HEADER_LEN],
            payload: Vec::new(),
            signalled: work.signalled,
            solicited: false,
            lost: false,
            fence: false,
            work: Some(Work::new(work)),
            again: None,
        }
    }
}

/// A request for a connection, as a process sees it.
#[derive(Clone, Debug)]
pub(crate) struct Request {
    pub(crate) local: IpAddr,
    pub(crate) remote: IpAddr,
    pub(crate) private_data: Vec<u8>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum QpState {
    Requesting,
    Responding,
    Ready,
    Broken(Reason),
    Gone,
}

#[derive(Debug)]
struct Qp {
    host: HostId,
    boot: u32,
    local: IpAddr,
    remote: IpAddr,
    peer: Option<QpId>,
    state: QpState,
    private_data: Vec<u8>,
    cm_tries: u32,
    /// Whether both sides limit themselves to posted receives.
    limited: bool,
    /// Frames that the other NIC has not acknowledged; the first has number `acked`.
    queue: VecDeque<Frame>,
    acked: u64,
    /// Frames with lower numbers are on their way.
    sent: u64,
    /// Number of the next frame that is posted.
    next: u64,
    last_arrival: u64,
    /// Latest time at which the other NIC was heard of.
    heard: u64,
    retries: u32,
    timer: bool,
    again: bool,
    completions: VecDeque<u64>,
    /// The request that the peer has refused. Its completion comes after the others.
    refused: Option<u64>,
    breaks_at: Option<u64>,
    /// Frames that were on their way when this end broke still arrive.
    lingers: bool,
    /// The end of this connection is not told to the other side.
    mute: bool,
    /// Number of the frame that comes next.
    expected: u64,
    receives: usize,
    /// The process of this side posts no receives, but says that it did; their number.
    withheld: Option<usize>,
    /// Memory of a receive in bytes.
    frame: usize,
    arrived: VecDeque<Frame>,
    check: WireCheck,
    /// Messages that were sent, by their numbers, in runs with operations.
    named: BTreeMap<u64, MessageId>,
}

/// All queue pairs of a run.
#[derive(Debug, Default)]
pub(crate) struct Fabric {
    pub(crate) plan: Option<RdmaPlan>,
    qps: Vec<Qp>,
    /// Requests that a process has been told of and has not answered, with its host.
    asked: BTreeSet<(QpId, HostId)>,
    /// Addresses that other nodes have for a while.
    moved: BTreeSet<IpAddr>,
    /// Work requests that have come to the place where the one connection is lost.
    counted: u64,
}

impl Fabric {
    /// Notes that an address is at another node than usual, or at its own again.
    pub(crate) fn address_moved(&mut self, addr: IpAddr, away: bool) {
        if away {
            self.moved.insert(addr);
        } else {
            self.moved.remove(&addr);
        }
    }

    /// Tells whether an address is served over RDMA.
    pub(crate) fn serves(&self, addr: IpAddr) -> bool {
        self.plan.as_ref().is_some_and(|plan| plan.addrs.contains(&addr))
    }

    pub(crate) fn node(&self, host: HostId) -> Option<&RdmaNodePlan> {
        self.plan.as_ref()?.nodes.get(host)
    }

    pub(crate) fn host(&self, id: QpId) -> HostId {
        self.qp(id).host
    }

    fn qp(&self, id: QpId) -> &Qp {
        &self.qps[id.0 as usize]
    }

    fn qp_mut(&mut self, id: QpId) -> &mut Qp {
        &mut self.qps[id.0 as usize]
    }

    fn ids(&self) -> impl DoubleEndedIterator<Item = QpId> + use<> {
        (0..self.qps.len() as u32).map(QpId)
    }

    /// Returns the connections whose two ends are in use, each by one end.
    pub(crate) fn live(&self) -> Vec<QpId> {
        let ready = |id: QpId| self.qp(id).state == QpState::Ready;
        let live = |id: &QpId| ready(*id) && self.qp(*id).peer.is_some_and(|p| *id < p && ready(p));
        self.ids().filter(live).collect()
    }

    /// Tells whether a queue pair is in use though the other end is not.
    pub(crate) fn is_alone(&self, id: QpId) -> bool {
        let ready = |id: QpId| self.qp(id).state == QpState::Ready;
        ready(id) && !self.qp(id).peer.is_some_and(ready)
    }

    /// Tells whether requests of an operation may still touch memory.
    pub(crate) fn has_work(&self, id: QpId, op: usize) -> bool {
        let qp = self.qp(id);
        let of = |frame: &Frame| frame.work.is_some_and(|work| work.op == op);
        qp.state == QpState::Ready && qp.queue.iter().any(of)
    }

    /// Returns the messages that frames complete which the process has taken.
    pub(crate) fn came(&self, id: QpId, frames: &[Frame]) -> Vec<MessageId> {
        let qp = self.qp(id);
        let Some(peer) = qp.peer.map(|peer| self.qp(peer)) else { return Vec::new() };
        let numbers = frames.iter().map(|frame| Header::from_bytes(&frame.header).sequence);
        let whole = numbers.filter(|number| qp.check.has_come(*number));
        whole.filter_map(|number| peer.named.get(&number).copied()).collect()
    }

    /// Returns the requests of operations that a connection leaves behind.
    pub(crate) fn works(&self, id: QpId) -> Vec<Work> {
        self.qp(id).queue.iter().filter_map(|frame| frame.work).collect()
    }

    /// Tells whether the process has frames to take.
    pub(crate) fn has_arrived(&self, id: QpId) -> bool {
        !self.qp(id).arrived.is_empty()
    }

    /// Returns the request of another host's queue pair, as the host sees it to which it goes.
    pub(crate) fn request(&self, id: QpId) -> Request {
        let qp = self.qp(id);
        let private_data = qp.private_data.clone();
        Request { local: qp.remote, remote: qp.local, private_data }
    }

    /// Returns the number of payload bytes of a full frame, as the two sides have agreed [IB-110].
    fn fragment(&self, request: QpId, answer: QpId) -> usize {
        let said = [request, answer].map(|id| {
            let qp = self.qp(id);
            ConnectData::parse(&qp.private_data, qp.local.is_ipv6())?.bowline
        });
        match said {
            [Some(one), Some(other)] => one.fragment().min(other.fragment()),
            _ => FRAGMENT_LEN,
        }
    }

    /// Returns the type of service of a connection.
    fn tos(&self, id: QpId) -> Option<u8> {
        let qp = self.qp(id);
        Some(ConnectData::parse(&qp.private_data, qp.local.is_ipv6())?.tos)
    }

    /// Returns the private data of the REP that this queue pair has got; none if it responded.
    pub(crate) fn reply(&self, id: QpId) -> Option<Vec<u8>> {
        let peer = self.qp(id).peer.filter(|peer| *peer > id)?;
        Some(self.qp(peer).private_data.clone())
    }
}

impl Ctx {
    /// Tells a process of something, unless it has ended.
    fn rdma_tell(&mut self, id: QpId, notice: RdmaNotice) {
        let qp = self.rdma.qp(id);
        let host = qp.host;
        if qp.state != QpState::Gone && self.net.hosts[host].boot == qp.boot {
            self.rdma_notices.push_back((host, id, notice));
        }
    }

    fn rdma_delay(&mut self) -> u64 {
        let (lo, hi) = self.net.plan.delay;
        self.rng.between(lo, hi) * self.net.delay_factor
    }

    fn rdma_later(&mut self, event: RdmaEvent) {
        let delay = self.rdma_delay();
        self.schedule(delay, Event::Rdma(event));
    }

    /// Tells whether a packet of a queue pair reaches the host of another one.
    fn rdma_reaches(&mut self, from: QpId, to: QpId) -> bool {
        let lost = self.lost();
        let (from, to) = (self.rdma.qp(from), self.rdma.qp(to));
        let unroutable = self.net.owner(from.local) != Some(from.host)
            || self.net.hosts[from.host].boot != from.boot
            || self.net.owner(to.local) != Some(to.host);
        !lost && !unroutable && !self.net.is_blocked(from.host, to.host)
    }

    /// Tells whether a queue pair exists, and its process.
    fn rdma_lives(&self, id: QpId) -> bool {
        let qp = self.rdma.qp(id);
        qp.state != QpState::Gone && self.net.hosts[qp.host].boot == qp.boot
    }

    pub(crate) fn rdma_event(&mut self, event: RdmaEvent) {
        match event {
            RdmaEvent::Request(id) => self.on_request(id),
            RdmaEvent::Reply(id) => self.on_reply(id),
            RdmaEvent::Reject(id) => self.on_reject(id),
            RdmaEvent::ReadyToUse(id) => self.on_ready_to_use(id),
            RdmaEvent::Disconnect(id) => self.on_disconnect(id),
            RdmaEvent::CmTimeout(id) => self.on_cm_timeout(id),
            RdmaEvent::Frame { to, number } => self.on_frame(to, number),
            RdmaEvent::Ack { to, acked } => self.on_frame_acked(to, acked),
            RdmaEvent::NotReady(id) => self.on_not_ready(id),
            RdmaEvent::Refused { to, number } => self.on_refused(to, number),
            RdmaEvent::Again(id) => self.on_again(id),
            RdmaEvent::Timeout(id) => self.on_frame_timeout(id),
        }
    }
}
