//! The passive (listening) side.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use bowline_verbs::{
    CmEvent, CmId, ConnParam, ConnRequest, Error, InvalidReason, Mtu, Object, Qpn, RejectReason,
    RequestPart,
};
use bowline_wire::roce::cm::{
    Answered, CmMad, CmMessage, Ids, REP_PRIVATE_LEN, Rep, Req, TRANSPORT_RC, VENDOR_BOWLINE,
    VENDOR_BOWLINE_REP,
};
use bowline_wire::roce::{CMA_HEADER_LEN, CmaHeader, GSI_QPN, service_port};

use super::config::{bounded_timeout, time_of};
use super::conn::{Conn, Peer, Resend, State};
use super::listen::Found;
use super::reject::Refusal;
use super::{Manager, Output, QpOrder, SendMad};
use crate::Instant;
use crate::counters::Counters;

/// Code of the longest REP repetition period that a peer may request: about 4 seconds.
const LONGEST_RESPONSE: u8 = 20;
/// How often a REP is repeated by itself: over some nine seconds, so that losses in a row and a
/// link that comes back do not end a connection whose active program waits to be spoken to. A
/// forged REQ must not cause a longer stream; a peer that is there and has no REP repeats its REQ,
/// which is answered each time [CM-57].
const REP_REPETITIONS: u8 = 5;
/// Code of the shortest period, a quarter of a second.
const SHORTEST_RESPONSE: u8 = 16;

impl Manager {
    /// Handles a REQ.
    pub(super) fn handle_req(
        &mut self,
        now: Instant,
        from: IpAddr,
        to: IpAddr,
        transaction: u64,
        req: &Req,
        counters: &mut Counters,
    ) -> bool {
        if req.local_id == 0 {
            return false;
        }
        if let Some(&id) = self.by_peer.get(&(from, req.guid, req.local_id)) {
            return self.handle_duplicate_req(now, id, counters);
        }
        match self.check_req(now, from, to, req) {
            Ok((listener, header)) => {
                if !self.make_room(listener, counters) {
                    // The peer resends the REQ; there may be room by then.
                    counters.cm_overflow += 1;
                    return true;
                }
                self.take_req(now, listener, header, transaction, req);
            }
            Err(RejectReason::INVALID_GID) => self.refuse_address(to, from, transaction, req),
            Err(reason) => self.refuse(to, from, transaction, Refusal::of_req(req, reason)),
        }
        true
    }

    /// Handles a duplicate REQ [CM-37] [CM-44].
    fn handle_duplicate_req(&mut self, now: Instant, id: CmId, counters: &mut Counters) -> bool {
        let Some(conn) = self.conns.get(&id) else { return false };
        if matches!(conn.state, State::ReqRcvd) {
            self.ask_for_time(now, id, Answered::REQ);
            return true;
        }
        // The REP has a resend timer. When that sends no more, the peer's repetition asks for one.
        if let State::RepSent(Resend { sends_left: 0, mad, .. }) = &conn.state {
            let (from, to, mad) = (conn.local.ip(), conn.remote.ip(), mad.clone());
            counters.cm_resent += 1;
            self.outputs.push_back(Output::Mad(SendMad { from, to, mad }));
            return true;
        }
        false
    }

    /// Checks a new REQ: returns its listener, or the reason of its refusal [CMA-6] [CMA-7]
    /// [CMA-18].
    fn check_req(
        &mut self,
        now: Instant,
        from: IpAddr,
        to: IpAddr,
        req: &Req,
    ) -> Result<(CmId, CmaHeader), RejectReason> {
        if req.transport != TRANSPORT_RC {
            return Err(RejectReason::INVALID_TRANSPORT);
        }
        // Queue pairs 0 and 1 have no connections [CM-56].
        if req.qpn <= GSI_QPN {
            return Err(RejectReason::NO_QP);
        }
        let port = service_port(req.service_id).ok_or(RejectReason::INVALID_SERVICE_ID)?;
        let listener = match self.listeners.find(SocketAddr::new(to, port)) {
            Found::Listener(id) => id,
            Found::OtherAddress => return Err(RejectReason::CONSUMER),
            Found::Nobody => return Err(RejectReason::INVALID_SERVICE_ID),
        };
        let mtu = Mtu::from_code(req.mtu).ok_or(RejectReason::INVALID_MTU)?;
        if mtu > self.port.mtu {
            // The MTU of the request is not negotiated, so it must fit [HDR-9].
            return Err(RejectReason::INVALID_MTU);
        }
        let head = req.private_data.first_chunk().ok_or(RejectReason::CONSUMER)?;
        let header = CmaHeader::parse(head).map_err(|_| RejectReason::CONSUMER)?;
        let consistent = req.local_gid == from.into()
            && header.source == from
            && req.remote_gid == to.into()
            && header.destination == to;
        if !consistent {
            return Err(RejectReason::INVALID_GID);
        }
        // The last check, because it ends an established connection: a REQ that is refused for
        // another reason must not do that [CM-37] [CM-56].
        if let Some(&old) = self.by_peer_qp.get(&(from, req.guid, req.qpn)) {
            self.end_stale(now, old);
            return Err(RejectReason::STALE_CONNECTION);
        }
        Ok((listener, header))
    }

    /// Stores a request and notifies the program.
    fn take_req(
        &mut self,
        now: Instant,
        listener: CmId,
        header: CmaHeader,
        transaction: u64,
        req: &Req,
    ) {
        let id = self.new_id();
        let comm_id = self.new_comm_id();
        let port = self.local_addr(listener).map_or(0, |at| at.port());
        let local = SocketAddr::new(header.destination, port);
        let remote = SocketAddr::new(header.source, header.source_port);
        let conn = Conn {
            comm_id,
            active: false,
            pending_at: Some(listener),
            local,
            remote,
            qpn: None,
            is_led: false,
            peer: Some(Peer {
                comm_id: req.local_id,
                guid: req.guid,
                qpn: req.qpn,
                vendor: req.vendor,
            }),
            transaction,
            // [CMA-11]
            rq_psn: self.rng.next_u24(),
            sq_psn: req.starting_psn,
            mtu: Mtu::from_code(req.mtu).unwrap_or(self.port.mtu),
            flow_label: req.flow_label,
            tos: req.traffic_class,
            ack_timeout: bounded_timeout(req.ack_timeout),
            chosen_timeout: None,
            retry_count: req.retry_count,
            rnr_retry_count: req.rnr_retry_count,
            min_rnr_timer: 0,
            responder_resources: req.responder_resources,
            initiator_depth: req.initiator_depth,
            proposed: (0, 0),
            period: self.rep_period(req.local_timeout),
            max_retries: req.max_retries,
            state: State::ReqRcvd,
            timer: None,
            since: now,
            proven: false,
            forgotten: false,
        };
        self.by_peer.insert((remote.ip(), req.guid, req.local_id), id);
        self.by_peer_qp.insert((remote.ip(), req.guid, req.qpn), id);
        self.listeners.add_pending(listener);
        self.insert(id, conn);
        let request = ConnRequest {
            listener,
            local,
            remote,
            private_data: req.private_data[CMA_HEADER_LEN..].to_vec(),
            responder_resources: req.responder_resources,
            initiator_depth: req.initiator_depth,
            remote_qpn: Qpn(req.qpn),
        };
        self.event(CmEvent::ConnectRequest { id, request });
    }

    /// Returns the period in which a REP is resent, from the peer's response timeout [CM-41].
    fn rep_period(&self, code: u8) -> Duration {
        time_of(code.clamp(SHORTEST_RESPONSE, LONGEST_RESPONSE))
    }

    /// Accepts a request [CMA-10]. The REP is sent when the queue pair is ready.
    pub(crate) fn accept(&mut self, id: CmId, param: &ConnParam) -> Result<(), Error> {
        RequestPart::AcceptData.check(param.private_data.len() as u64, REP_PRIVATE_LEN as u64)?;
        let conn = self.conns.get(&id).ok_or(Error::NoSuch(Object::Connection))?;
        if !matches!(conn.state, State::ReqRcvd) {
            return Err(Error::Invalid(InvalidReason::NotARequest));
        }
        self.check_qp(param)?;
        let (limit, guid) = (self.port.max_rd_atomic, self.port.guid);
        let ack_delay = self.config.ack_delay;
        let Some(conn) = self.conns.get_mut(&id) else {
            return Err(Error::NoSuch(Object::Connection));
        };
        // Within the peer's proposal [CM-32].
        let (theirs, ours) = (conn.responder_resources, conn.initiator_depth);
        let initiator_depth = param.initiator_depth.min(theirs).min(limit);
        let responder_resources = param.responder_resources.min(ours).min(limit);
        let mut private_data = [0; REP_PRIVATE_LEN];
        private_data[..param.private_data.len()].copy_from_slice(&param.private_data);
        let Ids { local, remote } = conn.ids();
        let gap_reports =
            !param.is_led && conn.peer.is_some_and(|peer| peer.vendor == VENDOR_BOWLINE);
        let rep = Rep {
            local_id: local,
            remote_id: remote,
            // A kernel is told nothing.
            vendor: if gap_reports { VENDOR_BOWLINE_REP } else { 0 },
            qpn: param.qpn.0,
            starting_psn: conn.rq_psn,
            responder_resources,
            initiator_depth,
            ack_delay,
            flow_control: false,
            rnr_retry_count: param.rnr_retry_count.min(7),
            srq: false,
            guid,
            private_data,
        };
        let mad = CmMad { transaction: conn.transaction, message: CmMessage::Rep(rep) };
        let proposed = (conn.responder_resources, conn.initiator_depth);
        (conn.qpn, conn.is_led) = (Some(param.qpn), param.is_led);
        conn.min_rnr_timer = param.min_rnr_timer;
        conn.chosen_timeout = param.ack_timeout;
        (conn.responder_resources, conn.initiator_depth) = (responder_resources, initiator_depth);
        if param.tos != 0 {
            conn.tos = param.tos;
        }
        let steps = if param.is_led {
            Vec::new()
        } else {
            vec![
                conn.to_init(responder_resources),
                conn.to_rtr(responder_resources),
                conn.to_rts(initiator_depth),
            ]
        };
        conn.proposed = proposed;
        self.by_qp.insert(param.qpn, id);
        self.enter(id, State::Accepting(Box::new(mad.emit())));
        let order = QpOrder { id, qpn: param.qpn, steps, awaited: true, gap_reports };
        self.outputs.push_back(Output::Order(order));
        Ok(())
    }

    /// Continues after the order for the queue pair: sends the REP. If the queue pair could not be
    /// made ready, it may have made some of its transitions and goes to ERR. The peer has not been
    /// told anything, and the request is as it was.
    pub(super) fn passive_ready(&mut self, now: Instant, id: CmId, done: bool) {
        let Some(conn) = self.conns.get_mut(&id) else { return };
        let State::Accepting(mad) = &conn.state else { return };
        if done {
            let (mad, period, left) = (mad.clone(), conn.period, conn.max_retries);
            self.no_longer_pending(id);
            if let Some(resend) = self.send_until_answered(now, id, mad, period, left) {
                self.enter(id, State::RepSent(Resend { sends_left: REP_REPETITIONS, ..resend }));
            }
            return;
        }
        (conn.responder_resources, conn.initiator_depth) = conn.proposed;
        self.order_error(id);
        let Some(conn) = self.conns.get_mut(&id) else { return };
        if let Some(qpn) = conn.qpn.take() {
            self.by_qp.remove(&qpn);
        }
        self.enter(id, State::ReqRcvd);
    }

    /// Handles an RTU: the peer has received the REP.
    pub(super) fn handle_rtu(&mut self, from: IpAddr, ids: Ids) -> bool {
        let Some((id, conn)) = self.find(from, ids) else { return false };
        if !matches!(conn.state, State::RepSent(_)) {
            return false;
        }
        self.established(id);
        true
    }

    /// Handles the first packet of a connection, which proves the same as an RTU [CM-50].
    pub(crate) fn data_arrived(&mut self, qpn: Qpn) {
        let Some(&id) = self.by_qp.get(&qpn) else { return };
        if self.conns.get(&id).is_some_and(|conn| matches!(conn.state, State::RepSent(_))) {
            self.established(id);
        }
    }

    /// Notes that a message has come on the queue pair of an accepted request, as the program says;
    /// tells whether the connection was not established before.
    pub(crate) fn note_established(&mut self, id: CmId) -> Result<bool, Error> {
        let conn = self.conns.get(&id).ok_or(Error::NoSuch(Object::Connection))?;
        match conn.state {
            State::RepSent(_) => {
                self.established(id);
                Ok(true)
            }
            State::Established => Ok(false),
            _ => Err(Error::Invalid(InvalidReason::NotEstablished)),
        }
    }

    fn established(&mut self, id: CmId) {
        self.mark_proven(id);
        self.set_timer(id, None);
        self.enter(id, State::Established);
        let Some(conn) = self.conns.get(&id) else { return };
        let event = CmEvent::Established {
            id,
            private_data: Vec::new(),
            responder_resources: conn.responder_resources,
            initiator_depth: conn.initiator_depth,
        };
        self.event_on(id, event);
    }
}
