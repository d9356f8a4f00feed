//! The connection manager: reliable connections as rdma_cm makes them [CM-30] [CMA-1], and lookups
//! of datagram services [CM-60].
//!
//! A state machine that knows queue pairs only by their numbers. In: the program's calls, MADs and
//! the time. Out, by [`Manager::poll_output`] after every input: MADs to send, events for the
//! program, and orders for queue pairs. An order that is `awaited` must be answered with
//! [`Manager::order_done`], since the REP or RTU must not be sent before the queue pair is ready.
//!
//! Every quantity that a peer can increase has a limit in [`CmConfig`]; the excess is dropped and
//! counted, and peers that may not exist are evicted in favour of others (`unproven`). An id of a
//! connection ends with its last event (`Rejected` or `Unreachable` before packets can have
//! arrived, otherwise `TimewaitExit`) or when the program rejects or destroys it; destroying it
//! afterwards is no error.

mod active;
mod config;
mod conn;
mod ending;
mod listen;
mod lookups;
mod passive;
mod reject;
mod timers;
mod unproven;

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::IpAddr;

use bowline_verbs::{CmEvent, CmId, Error, InvalidReason, Object, QpAttr, QpState, Qpn};
use bowline_wire::roce::cm::{CmMad, CmMessage, Ids};

pub use config::CmConfig;
pub(crate) use config::Port;
pub use ending::FormerConnection;

use crate::Instant;
use crate::counters::Counters;
use crate::rng::Rng;
use conn::{Conn, MadBytes, State};
use listen::Listeners;
use lookups::Lookups;

/// A MAD to send, from and to queue pair 1.
#[derive(Debug)]
pub(crate) struct SendMad {
    pub(crate) from: IpAddr,
    pub(crate) to: IpAddr,
    pub(crate) mad: MadBytes,
}

/// Transitions of a queue pair, to be executed in order and before the next output is polled. A
/// step to the present state of the queue pair is skipped.
#[derive(Debug)]
pub(crate) struct QpOrder {
    pub(crate) id: CmId,
    pub(crate) qpn: Qpn,
    pub(crate) steps: Vec<QpAttr>,
    /// The manager continues when it gets the outcome by `order_done`.
    pub(crate) awaited: bool,
    /// The peer takes reports of gaps [CC-12].
    pub(crate) gap_reports: bool,
}

/// An action for the device.
#[derive(Debug)]
pub(crate) enum Output {
    Mad(SendMad),
    Order(QpOrder),
    Event(CmEvent),
}

/// Key of objects that a peer names: the address its messages come from, its node GUID, and a
/// number of its choice. Anybody can put the GUID and number of another node into a message. The
/// address, which answers must reach, is therefore part of the key; a kernel does without [CM-37]
/// [CM-56].
type PeerKey = (IpAddr, u64, u32);

/// The connection manager of one device.
#[derive(Debug)]
pub(crate) struct Manager {
    config: CmConfig,
    port: Port,
    rng: Rng,
    /// Upper half of transaction IDs [GSI-4].
    client: u32,
    next_id: u32,
    listeners: Listeners,
    conns: BTreeMap<CmId, Conn>,
    by_comm_id: BTreeMap<u32, CmId>,
    /// Connections by the peer's address, GUID and communication ID [CM-37] [CM-54].
    by_peer: BTreeMap<PeerKey, CmId>,
    /// Connections by the peer's address, GUID and queue pair [CM-37].
    by_peer_qp: BTreeMap<PeerKey, CmId>,
    by_qp: BTreeMap<Qpn, CmId>,
    timers: BTreeSet<(Instant, CmId)>,
    outputs: VecDeque<Output>,
    /// Unproven connections, oldest first.
    unproven: BTreeSet<(Instant, CmId)>,
    /// Number of connections in `RepSent`.
    awaiting_rtu: usize,
    lookups: Lookups,
}

impl Manager {
    /// Returns the number of listeners and of connections, lookups included.
    pub(crate) fn counts(&self) -> (usize, usize) {
        let listeners = self.listeners.len() + self.lookups.listeners.len();
        (listeners, self.conns.len() + self.lookups.len())
    }

    pub(crate) fn new(config: CmConfig, port: Port, mut rng: Rng) -> Self {
        Self {
            config,
            port,
            client: rng.next_u32(),
            rng,
            next_id: 1,
            listeners: Listeners::default(),
            conns: BTreeMap::new(),
            by_comm_id: BTreeMap::new(),
            by_peer: BTreeMap::new(),
            by_peer_qp: BTreeMap::new(),
            by_qp: BTreeMap::new(),
            timers: BTreeSet::new(),
            outputs: VecDeque::new(),
            unproven: BTreeSet::new(),
            awaiting_rtu: 0,
            lookups: Lookups::default(),
        }
    }

    /// Returns the next action; call until `None` after every input.
    pub(crate) fn poll_output(&mut self) -> Option<Output> {
        self.outputs.pop_front()
    }

    /// Tells whether a connection needs the queue pair, which must not be destroyed then.
    pub(crate) fn holds(&self, qpn: Qpn) -> bool {
        self.by_qp.get(&qpn).and_then(|id| self.conns.get(id)).is_some_and(Conn::holds_qp)
    }

    /// Tells whether the number is reserved: a connection needs it, or the peer may still attribute
    /// it to a connection that has ended [QP-6] [CM-45].
    pub(crate) fn reserves(&self, qpn: Qpn) -> bool {
        self.by_qp.contains_key(&qpn)
    }

    /// Tells whether [`data_arrived`](Self::data_arrived) may have an effect now.
    pub(crate) fn awaits_data(&self) -> bool {
        self.awaiting_rtu > 0
    }

    /// Handles a MAD that arrived at the local address `to`; answers go back to `from` [GSI-5]. A
    /// message that matches nothing is dropped [CM-52].
    pub(crate) fn handle_mad(
        &mut self,
        now: Instant,
        from: IpAddr,
        to: IpAddr,
        mad: &[u8],
        counters: &mut Counters,
    ) {
        let Ok(CmMad { transaction, message }) = CmMad::parse(mad) else {
            counters.drop_mad += 1;
            return;
        };
        let taken = match message {
            CmMessage::Req(req) => self.handle_req(now, from, to, transaction, &req, counters),
            CmMessage::Rep(rep) => self.handle_rep(now, from, to, transaction, &rep),
            CmMessage::Rtu(ids) => self.handle_rtu(from, ids),
            CmMessage::Mra(mra) => self.handle_mra(now, from, &mra),
            CmMessage::Rej(rej) => self.handle_rej(now, from, &rej),
            CmMessage::Dreq(dreq) => self.handle_dreq(now, from, to, transaction, dreq),
            CmMessage::Drep(ids) => self.handle_drep(now, from, ids),
            CmMessage::SidrReq(req) => {
                self.handle_sidr_req(now, from, to, transaction, &req, counters)
            }
            CmMessage::SidrRep(rep) => self.handle_sidr_rep(from, to, &rep),
        };
        if !taken {
            counters.cm_ignored += 1;
        }
    }

    /// Reports the outcome of an awaited order.
    pub(crate) fn order_done(&mut self, now: Instant, id: CmId, done: bool) {
        match self.conns.get(&id).map(|conn| &conn.state) {
            Some(State::RepRcvd(_)) => self.active_ready(now, id, done),
            Some(State::Accepting(_)) => self.passive_ready(now, id, done),
            _ => {}
        }
    }

    /// Destroys a listener or connection. A listener's unanswered requests are rejected; a
    /// connection is ended.
    pub(crate) fn destroy_id(&mut self, now: Instant, id: CmId) -> Result<(), Error> {
        if self.listeners.remove(id) {
            let pending: Vec<CmId> = self
                .conns
                .iter()
                .filter(|(_, conn)| conn.pending_at == Some(id))
                .map(|(id, _)| *id)
                .collect();
            for id in pending {
                self.destroy_connection(now, id);
            }
            return Ok(());
        }
        if self.conns.contains_key(&id) {
            self.destroy_connection(now, id);
            return Ok(());
        }
        if self.lookups.contains(id) {
            self.destroy_lookup(now, id);
            return Ok(());
        }
        if self.was_issued(id) { Ok(()) } else { Err(Error::NoSuch(Object::CmId)) }
    }

    /// Tells whether an unknown id has been issued before.
    fn was_issued(&self, id: CmId) -> bool {
        (1..self.next_id).contains(&id.0)
    }

    fn new_id(&mut self) -> CmId {
        loop {
            let id = CmId(self.next_id);
            self.next_id = self.next_id.checked_add(1).unwrap_or(1);
            let is_taken = self.conns.contains_key(&id)
                || self.listeners.contains(id)
                || self.lookups.contains(id);
            if !is_taken {
                return id;
            }
        }
    }

    /// Chooses a communication ID, or number of a lookup: unpredictable, not 0, not in use [CM-30]
    /// [CM-53].
    fn new_comm_id(&mut self) -> u32 {
        loop {
            let drawn = self.rng.next_u32();
            let comm_id = match self.port.part {
                None => drawn,
                Some(part) => u32::from(part) << 24 | drawn & 0xff_ffff,
            };
            let is_taken =
                self.by_comm_id.contains_key(&comm_id) || self.lookups.has_request(comm_id);
            if comm_id != 0 && !is_taken {
                return comm_id;
            }
        }
    }

    fn transaction(&self, comm_id: u32) -> u64 {
        u64::from(self.client) << 32 | u64::from(comm_id)
    }

    fn insert(&mut self, id: CmId, conn: Conn) {
        self.by_comm_id.insert(conn.comm_id, id);
        if let Some(qpn) = conn.qpn {
            self.by_qp.insert(qpn, id);
        }
        if !conn.proven {
            self.unproven.insert((conn.since, id));
        }
        self.conns.insert(id, conn);
    }

    fn send(&mut self, from: IpAddr, to: IpAddr, mad: &CmMad) {
        self.outputs.push_back(Output::Mad(SendMad { from, to, mad: Box::new(mad.emit()) }));
    }

    /// Sends a message to the peer of a connection.
    fn send_on(&mut self, id: CmId, transaction: u64, message: CmMessage) {
        if let Some(conn) = self.conns.get(&id) {
            let (from, to) = (conn.local.ip(), conn.remote.ip());
            self.send(from, to, &CmMad { transaction, message });
        }
    }

    fn event(&mut self, event: CmEvent) {
        self.outputs.push_back(Output::Event(event));
    }

    /// Queues an event of a connection, unless the program has destroyed its id.
    fn event_on(&mut self, id: CmId, event: CmEvent) {
        if self.conns.get(&id).is_some_and(|conn| !conn.forgotten) {
            self.event(event);
        }
    }

    /// Orders the queue pair of a connection, if it has one, into ERR.
    fn order_error(&mut self, id: CmId) {
        let conn = self.conns.get(&id).filter(|conn| !conn.is_led);
        if let Some(qpn) = conn.and_then(|conn| conn.qpn) {
            let error = QpAttr { state: Some(QpState::Err), ..QpAttr::default() };
            let order = QpOrder { id, qpn, steps: vec![error], awaited: false, gap_reports: false };
            self.outputs.push_back(Output::Order(order));
        }
    }

    /// Returns the attributes of a transition of a connection's queue pair.
    pub(crate) fn connection_attr(&self, id: CmId, to: QpState) -> Result<QpAttr, Error> {
        let conn = self.conns.get(&id).ok_or(Error::NoSuch(Object::Connection))?;
        let unknown = Error::Invalid(InvalidReason::NoConnectionAttr(to));
        conn.attr(to, self.port.max_rd_atomic).ok_or(unknown)
    }

    /// Stops counting a request as pending at its listener: it was answered or is gone.
    fn no_longer_pending(&mut self, id: CmId) {
        if let Some(listener) = self.conns.get_mut(&id).and_then(|conn| conn.pending_at.take()) {
            self.listeners.remove_pending(listener);
        }
    }

    /// Forgets the peer's ids, so that it may reuse them [CM-44] [CM-54].
    fn forget_peer(&mut self, id: CmId) {
        let Some(conn) = self.conns.get(&id) else { return };
        if let Some(peer) = conn.peer {
            let ip = conn.remote.ip();
            for (map, key) in [
                (&mut self.by_peer, (ip, peer.guid, peer.comm_id)),
                (&mut self.by_peer_qp, (ip, peer.guid, peer.qpn)),
            ] {
                if map.get(&key) == Some(&id) {
                    map.remove(&key);
                }
            }
        }
    }

    /// Changes the state of a connection.
    fn enter(&mut self, id: CmId, state: State) {
        let Some(conn) = self.conns.get_mut(&id) else { return };
        let sent = |state: &State| usize::from(matches!(state, State::RepSent(_)));
        self.awaiting_rtu = self.awaiting_rtu + sent(&state) - sent(&conn.state);
        conn.state = state;
    }

    /// Removes a connection and all its ids.
    fn remove(&mut self, id: CmId) {
        self.no_longer_pending(id);
        self.forget_peer(id);
        self.set_timer(id, None);
        self.enter(id, State::Timewait);
        let Some(conn) = self.conns.remove(&id) else { return };
        self.unproven.remove(&(conn.since, id));
        self.by_comm_id.remove(&conn.comm_id);
        if let Some(qpn) = conn.qpn {
            self.by_qp.remove(&qpn);
        }
    }

    /// Finds the connection that both ids of a message name [CM-36]. The message must come from the
    /// peer's address. The kernel does not check that [CM-53], which helps only forgers [CM-56].
    fn find(&self, from: IpAddr, ids: Ids) -> Option<(CmId, &Conn)> {
        let id = *self.by_comm_id.get(&ids.remote)?;
        let conn = self.conns.get(&id)?;
        (conn.matches_ids(ids) && conn.remote.ip() == from).then_some((id, conn))
    }
}
