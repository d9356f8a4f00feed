//! The end of connections.

use std::net::IpAddr;

use bowline_verbs::{CmEvent, CmId, Error, InvalidReason, Object, RejectReason};
use bowline_wire::roce::cm::{Answered, CmMad, CmMessage, Dreq, Ids};

use super::Manager;
use super::config::time_of;
use super::conn::State;
use super::reject::Refusal;
use crate::Instant;

/// A connection of an earlier process, with the values needed to end it [CM-53].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FormerConnection {
    /// This side's address.
    pub local: IpAddr,
    /// The peer's address.
    pub remote: IpAddr,
    /// This side's communication ID of the connection.
    pub local_id: u32,
    /// The peer's communication ID of the connection.
    pub remote_id: u32,
    /// The peer's queue pair.
    pub remote_qpn: u32,
}

impl Manager {
    /// Ends a connection; a connection that has ended already is left as it is.
    pub(crate) fn disconnect(&mut self, now: Instant, id: CmId) -> Result<(), Error> {
        let Some(conn) = self.conns.get(&id) else {
            let is_other = self.listeners.contains(id) || self.lookups.contains(id);
            let over = self.was_issued(id) && !is_other;
            return if over { Ok(()) } else { Err(Error::NoSuch(Object::Connection)) };
        };
        match conn.state {
            State::Established | State::RepSent(_) | State::Responded => {
                self.end(now, id);
                Ok(())
            }
            State::DreqSent(_) | State::Timewait => Ok(()),
            _ => Err(Error::Invalid(InvalidReason::NotEstablished)),
        }
    }

    /// Ends an established connection: queue pair to ERR, DREQ to the peer.
    fn end(&mut self, now: Instant, id: CmId) {
        let Some(conn) = self.conns.get(&id) else { return };
        let Some(peer) = conn.peer else { return };
        let dreq = Dreq { ids: conn.ids(), remote_qpn: peer.qpn };
        let mad =
            CmMad { transaction: self.transaction(conn.comm_id), message: CmMessage::Dreq(dreq) };
        let (period, left, proven) = (conn.period, conn.max_retries, conn.proven);
        self.order_error(id);
        let mad = Box::new(mad.emit());
        let Some(mut resend) = self.send_until_answered(now, id, mad, period, left) else { return };
        if !proven {
            // Where there may be nobody it is sent once [CM-57].
            (resend.first_resends_done, resend.left) = (usize::MAX, 0);
            self.set_timer(id, Some(now + period));
        }
        self.enter(id, State::DreqSent(resend));
    }

    /// Ends a connection that the peer has lost: its queue pair has been used for another
    /// connection [CM-37].
    pub(super) fn end_stale(&mut self, now: Instant, id: CmId) {
        let conn = self.conns.get(&id);
        if conn.is_some_and(|conn| matches!(conn.state, State::Established | State::RepSent(_))) {
            self.end(now, id);
        }
    }

    /// Handles a DREQ: the peer ends a connection. Answered at once [CM-51], even if this side does
    /// not know the connection [CM-44].
    pub(super) fn handle_dreq(
        &mut self,
        now: Instant,
        from: IpAddr,
        to: IpAddr,
        transaction: u64,
        dreq: Dreq,
    ) -> bool {
        let mirrored = Ids { local: dreq.ids.remote, remote: dreq.ids.local };
        let drep = CmMad { transaction, message: CmMessage::Drep(mirrored) };
        let known = self.by_comm_id.get(&dreq.ids.remote).and_then(|id| self.conns.get(id));
        let Some((id, conn)) = self.find(from, dreq.ids) else {
            // The ids belong to another peer's connection, or to no connection at all.
            if known.is_some_and(|conn| conn.matches_ids(dreq.ids)) {
                return false;
            }
            self.send(to, from, &drep);
            return true;
        };
        if conn.qpn.is_none_or(|qpn| qpn.0 != dreq.remote_qpn) {
            return false;
        }
        self.mark_proven(id);
        let Some(conn) = self.conns.get(&id) else { return false };
        match conn.state {
            State::Established | State::RepSent(_) | State::Responded | State::DreqSent(_) => {
                self.order_error(id);
                self.event_on(id, CmEvent::Disconnected { id });
                self.enter_timewait(now, id);
            }
            State::Timewait => {}
            _ => return false,
        }
        self.send(to, from, &drep);
        true
    }

    /// Handles a DREP: the peer has received the DREQ.
    pub(super) fn handle_drep(&mut self, now: Instant, from: IpAddr, ids: Ids) -> bool {
        let Some((id, conn)) = self.find(from, ids) else { return false };
        if !matches!(conn.state, State::DreqSent(_)) {
            return false;
        }
        self.mark_proven(id);
        self.event_on(id, CmEvent::Disconnected { id });
        self.enter_timewait(now, id);
        true
    }

    /// Enters TIMEWAIT: late packets may arrive for a while [CM-45].
    pub(super) fn enter_timewait(&mut self, now: Instant, id: CmId) {
        self.forget_peer(id);
        self.enter(id, State::Timewait);
        let Some(conn) = self.conns.get(&id) else { return };
        let over = now + time_of(conn.ack_timeout);
        self.set_timer(id, Some(over));
    }

    /// Destroys a connection, ending it as its state requires.
    pub(super) fn destroy_connection(&mut self, now: Instant, id: CmId) {
        let Some(conn) = self.conns.get_mut(&id) else { return };
        conn.forgotten = true;
        let (from, to, transaction) = (conn.local.ip(), conn.remote.ip(), conn.transaction);
        let ids = conn.ids();
        let answered = match conn.state {
            State::Established | State::RepSent(_) => return self.end(now, id),
            State::DreqSent(_) | State::Timewait => return,
            State::ReqSent(_) => {
                self.refuse_by_timeout(id);
                self.order_error(id);
                return self.remove(id);
            }
            State::RepRcvd(_) | State::Responded => Answered::REP,
            State::ReqRcvd | State::Accepting(_) => Answered::REQ,
        };
        let refusal = Refusal::of(ids, answered, RejectReason::CONSUMER);
        self.refuse(from, to, transaction, refusal);
        self.order_error(id);
        self.remove(id);
    }

    /// Returns what a later process needs to end the connections that are established now, and
    /// those whose peers have not confirmed that they have ended.
    pub(crate) fn former_connections(&self) -> impl Iterator<Item = FormerConnection> {
        let is_listed = |state: &State| {
            matches!(state, State::Established | State::RepSent(_) | State::DreqSent(_))
        };
        self.conns.values().filter(move |conn| is_listed(&conn.state)).filter_map(|conn| {
            let peer = conn.peer?;
            Some(FormerConnection {
                local: conn.local.ip(),
                remote: conn.remote.ip(),
                local_id: conn.comm_id,
                remote_id: peer.comm_id,
                remote_qpn: peer.qpn,
            })
        })
    }

    /// Ends a connection of an earlier process: one DREQ, whose answer is ignored [CM-53].
    pub(crate) fn end_former_connection(&mut self, former: &FormerConnection) {
        let dreq = Dreq {
            ids: Ids { local: former.local_id, remote: former.remote_id },
            remote_qpn: former.remote_qpn,
        };
        let transaction = self.transaction(former.local_id);
        let mad = CmMad { transaction, message: CmMessage::Dreq(dreq) };
        self.send(former.local, former.remote, &mad);
    }
}
