//! The connecting side [CM-31] to [CM-36], [CMA-8] to [CMA-12].

use std::net::{IpAddr, SocketAddr};

use bowline_verbs::{
    CmEvent, CmId, ConnParam, Error, InvalidReason, Object, Qpn, RejectReason, RequestPart,
    Resource,
};
use bowline_wire::roce::cm::{
    Answered, CmMad, CmMessage, REQ_PRIVATE_LEN, Rep, Req, TRANSPORT_RC, VENDOR_BOWLINE,
    VENDOR_BOWLINE_REP,
};
use bowline_wire::roce::{CMA_HEADER_LEN, CmaHeader, DEFAULT_PKEY, flow_label, service_id};

use super::config::{ack_timeout, bounded_timeout};
use super::conn::{Conn, Peer, State};
use super::reject::Refusal;
use super::{Manager, Output, QpOrder};
use crate::Instant;

/// Most bytes of a program's data in a REQ [CMA-5].
const REQ_DATA_LEN: usize = REQ_PRIVATE_LEN - CMA_HEADER_LEN;
/// LID of routed paths; LIDs have no meaning in RoCEv2 [CM-1].
const NO_LID: u16 = 0xffff;
const HOP_LIMIT: u8 = 64;

/// Checks that something can be asked of an address.
pub(super) fn check_addresses(local: SocketAddr, remote: SocketAddr) -> Result<(), Error> {
    if local.is_ipv4() != remote.is_ipv4() {
        return Err(Error::Invalid(InvalidReason::AddrFamilies));
    }
    if remote.port() == 0 || remote.ip().is_unspecified() || remote.ip().is_multicast() {
        return Err(Error::Invalid(InvalidReason::RemoteAddr));
    }
    Ok(())
}

impl Manager {
    /// Connects from an address of this device; port 0 selects a free port. Nothing is sent before
    /// the REQ [CMA-2].
    pub(crate) fn connect(
        &mut self,
        now: Instant,
        mut local: SocketAddr,
        remote: SocketAddr,
        param: &ConnParam,
    ) -> Result<CmId, Error> {
        RequestPart::ConnectData.check(param.private_data.len() as u64, REQ_DATA_LEN as u64)?;
        check_addresses(local, remote)?;
        self.check_qp(param)?;
        if self.conns.len() + self.lookups.len() >= self.config.max_connections {
            return Err(Error::Limit(Resource::Connections));
        }
        if local.port() == 0 {
            local.set_port(self.ephemeral_port());
        }
        let comm_id = self.new_comm_id();
        let id = self.new_id();
        let conn = Conn {
            comm_id,
            active: true,
            pending_at: None,
            local,
            remote,
            qpn: Some(param.qpn),
            is_led: param.is_led,
            peer: None,
            transaction: self.transaction(comm_id),
            // [CMA-11]
            rq_psn: self.rng.next_u24(),
            sq_psn: 0,
            mtu: self.port.mtu,
            flow_label: flow_label(local.port(), remote.port()),
            tos: param.tos,
            ack_timeout: self.config.ack_timeout(),
            chosen_timeout: param.ack_timeout,
            retry_count: param.retry_count.min(7),
            rnr_retry_count: param.rnr_retry_count.min(7),
            min_rnr_timer: param.min_rnr_timer,
            responder_resources: param.responder_resources.min(self.port.max_rd_atomic),
            initiator_depth: param.initiator_depth.min(self.port.max_rd_atomic),
            proposed: (0, 0),
            period: self.config.req_period(),
            max_retries: self.config.max_retries.min(15),
            state: State::Timewait,
            timer: None,
            since: now,
            // This side started the connection itself.
            proven: true,
            forgotten: false,
        };
        let req = self.req(&conn, param);
        let mad = CmMad { transaction: conn.transaction, message: CmMessage::Req(req) };
        if !conn.is_led {
            let init = QpOrder {
                id,
                qpn: param.qpn,
                steps: vec![conn.to_init(conn.responder_resources)],
                awaited: false,
                gap_reports: false,
            };
            self.outputs.push_back(Output::Order(init));
        }
        let (period, left) = (conn.period, conn.max_retries);
        self.insert(id, conn);
        if let Some(resend) = self.send_until_answered(now, id, Box::new(mad.emit()), period, left)
        {
            self.enter(id, State::ReqSent(resend));
        }
        Ok(id)
    }

    /// Checks that the queue pair belongs to no other connection, including one in TIMEWAIT.
    pub(super) fn check_qp(&self, param: &ConnParam) -> Result<(), Error> {
        if param.qpn.0 == 0 || param.qpn.0 >= 1 << 24 {
            return Err(Error::NoSuch(Object::QueuePair));
        }
        if self.reserves(param.qpn) {
            return Err(Error::Busy(Object::QueuePair));
        }
        Ok(())
    }

    /// Makes the REQ [CMA-8].
    fn req(&self, conn: &Conn, param: &ConnParam) -> Req {
        let (source, destination) = (conn.local.ip(), conn.remote.ip());
        let header = CmaHeader { source_port: conn.local.port(), source, destination };
        let mut private_data = [0; REQ_PRIVATE_LEN];
        let (head, data) = private_data.split_at_mut(CMA_HEADER_LEN);
        head.copy_from_slice(&header.emit());
        data[..param.private_data.len()].copy_from_slice(&param.private_data);
        Req {
            local_id: conn.comm_id,
            // The program's own queue pair takes no reports of gaps.
            vendor: if conn.is_led { 0 } else { VENDOR_BOWLINE },
            service_id: service_id(conn.remote.port()),
            guid: self.port.guid,
            qpn: param.qpn.0,
            responder_resources: conn.responder_resources,
            initiator_depth: conn.initiator_depth,
            remote_timeout: self.config.response_timeout,
            transport: TRANSPORT_RC,
            flow_control: false,
            // First PSN of the passive side's packets [CM-31].
            starting_psn: conn.rq_psn,
            local_timeout: self.config.response_timeout,
            retry_count: conn.retry_count,
            pkey: DEFAULT_PKEY,
            mtu: conn.mtu.code(),
            rnr_retry_count: conn.rnr_retry_count,
            max_retries: self.config.max_retries.min(15),
            srq: false,
            local_lid: NO_LID,
            remote_lid: NO_LID,
            // Destination of the peer's packets [CM-39].
            local_gid: source.into(),
            remote_gid: destination.into(),
            flow_label: conn.flow_label,
            packet_rate: 0,
            traffic_class: conn.tos,
            hop_limit: HOP_LIMIT,
            service_level: 0,
            subnet_local: false,
            ack_timeout: conn.ack_timeout,
            private_data,
        }
    }

    /// Handles a REP: the peer accepts.
    pub(super) fn handle_rep(
        &mut self,
        now: Instant,
        from: IpAddr,
        to: IpAddr,
        transaction: u64,
        rep: &Rep,
    ) -> bool {
        let Some(&id) = self.by_comm_id.get(&rep.remote_id) else { return false };
        let Some(conn) = self.conns.get(&id) else { return false };
        if conn.remote.ip() != from || conn.local.ip() != to || !conn.active {
            return false;
        }
        match conn.state {
            State::ReqSent(_) => {}
            State::Established if conn.ids().remote == rep.local_id => {
                // The RTU was lost, or crossed this REP [CM-44] [CM-50].
                self.send_rtu(id);
                return true;
            }
            State::Responded if conn.ids().remote == rep.local_id => {
                self.ask_for_time(now, id, Answered::REP);
                return true;
            }
            _ => return false,
        }
        if rep.local_id == 0
            || rep.qpn == 0
            || self.by_peer.contains_key(&(from, rep.guid, rep.local_id))
        {
            return false;
        }
        if let Some(&old) = self.by_peer_qp.get(&(from, rep.guid, rep.qpn)) {
            self.refuse(
                to,
                from,
                transaction,
                Refusal::of_rep(rep, RejectReason::STALE_CONNECTION),
            );
            self.end_stale(now, old);
            self.rejected(now, id, RejectReason::STALE_CONNECTION, Vec::new());
            return true;
        }
        self.take_rep(id, rep);
        true
    }

    /// Takes over the values of the REP, and orders the queue pair to be made ready.
    fn take_rep(&mut self, id: CmId, rep: &Rep) {
        self.set_timer(id, None);
        let packet_life = self.config.ack_timeout().saturating_sub(1);
        let Some(conn) = self.conns.get_mut(&id) else { return };
        conn.peer =
            Some(Peer { comm_id: rep.local_id, guid: rep.guid, qpn: rep.qpn, vendor: rep.vendor });
        conn.sq_psn = rep.starting_psn;
        // The peer chose within the proposed limits [CM-32]; this side does not trust larger
        // values.
        let (responder, initiator) = (conn.responder_resources, conn.initiator_depth);
        conn.responder_resources = rep.initiator_depth.min(responder);
        conn.initiator_depth = rep.responder_resources.min(initiator);
        conn.rnr_retry_count = rep.rnr_retry_count;
        conn.ack_timeout = bounded_timeout(ack_timeout(rep.ack_delay, packet_life));
        let steps = vec![conn.to_rtr(conn.responder_resources), conn.to_rts(conn.initiator_depth)];
        let qpn = conn.qpn.unwrap_or(Qpn(0));
        let is_led = conn.is_led;
        let gap_reports = rep.vendor == VENDOR_BOWLINE_REP;
        let ip = conn.remote.ip();
        self.by_peer.insert((ip, rep.guid, rep.local_id), id);
        self.by_peer_qp.insert((ip, rep.guid, rep.qpn), id);
        if is_led {
            return self.responded(id, rep);
        }
        self.enter(id, State::RepRcvd(rep.private_data.to_vec()));
        self.outputs.push_back(Output::Order(QpOrder {
            id,
            qpn,
            steps,
            awaited: true,
            gap_reports,
        }));
    }

    /// Tells the program, which leads the queue pair, that the peer accepts.
    fn responded(&mut self, id: CmId, rep: &Rep) {
        self.enter(id, State::Responded);
        let Some(conn) = self.conns.get(&id) else { return };
        let event = CmEvent::Responded {
            id,
            private_data: rep.private_data.to_vec(),
            responder_resources: conn.responder_resources,
            initiator_depth: conn.initiator_depth,
            remote_qpn: Qpn(rep.qpn),
        };
        self.event_on(id, event);
    }

    /// Completes a connect whose queue pair the program has made ready.
    pub(crate) fn establish(&mut self, id: CmId) -> Result<(), Error> {
        let conn = self.conns.get(&id).ok_or(Error::NoSuch(Object::Connection))?;
        if !matches!(conn.state, State::Responded) {
            return Err(Error::Invalid(InvalidReason::NotResponded));
        }
        self.send_rtu(id);
        self.enter(id, State::Established);
        Ok(())
    }

    /// Continues after the order for the queue pair. If the queue pair could not be made ready, the
    /// connection is refused, and the program gets the event of a refusal by the peer.
    pub(super) fn active_ready(&mut self, now: Instant, id: CmId, done: bool) {
        let Some(conn) = self.conns.get_mut(&id) else { return };
        if !done {
            let (transaction, ids) = (conn.transaction, conn.ids());
            let (from, to) = (conn.local.ip(), conn.remote.ip());
            let refusal = Refusal::of(ids, Answered::REP, RejectReason::CONSUMER);
            self.refuse(from, to, transaction, refusal);
            self.rejected(now, id, RejectReason::CONSUMER, Vec::new());
            return;
        }
        let State::RepRcvd(private_data) = &mut conn.state else { return };
        let event = CmEvent::Established {
            id,
            private_data: std::mem::take(private_data),
            responder_resources: conn.responder_resources,
            initiator_depth: conn.initiator_depth,
        };
        self.send_rtu(id);
        self.enter(id, State::Established);
        self.event_on(id, event);
    }

    fn send_rtu(&mut self, id: CmId) {
        if let Some(conn) = self.conns.get(&id) {
            let (transaction, ids) = (conn.transaction, conn.ids());
            self.send_on(id, transaction, CmMessage::Rtu(ids));
        }
    }
}
