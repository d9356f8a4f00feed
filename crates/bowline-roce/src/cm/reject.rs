//! Refusals (REJ), sent and received [CM-3] [CM-10] [CM-11].

use std::net::IpAddr;
use std::time::Duration;

use bowline_verbs::{CmEvent, CmId, Error, InvalidReason, Object, RejectReason, RequestPart};
use bowline_wire::roce::Gid;
use bowline_wire::roce::cm::{
    Answered, CmMad, CmMessage, Ids, REJ_INFO_LEN, REJ_PRIVATE_LEN, Rej, Rep, Req,
};

use super::Manager;
use super::conn::State;
use crate::Instant;

/// How soon a request is repeated that found no listener.
const LISTENER_PERIOD: Duration = Duration::from_millis(20);

/// Contents of a REJ.
#[derive(Clone, Copy, Debug)]
pub(super) struct Refusal<'a> {
    ids: Ids,
    answered: Answered,
    reason: RejectReason,
    info: &'a [u8],
    data: &'a [u8],
}

impl<'a> Refusal<'a> {
    pub(super) fn of(ids: Ids, answered: Answered, reason: RejectReason) -> Self {
        Self { ids, answered, reason, info: &[], data: &[] }
    }

    /// Refuses a REQ of which nothing is stored: this side has no communication ID for it [CM-36].
    pub(super) fn of_req(req: &Req, reason: RejectReason) -> Self {
        Self::of(Ids { local: 0, remote: req.local_id }, Answered::REQ, reason)
    }

    pub(super) fn of_rep(rep: &Rep, reason: RejectReason) -> Self {
        Self::of(Ids { local: rep.remote_id, remote: rep.local_id }, Answered::REP, reason)
    }

    /// Adds additional reject information, cut to 72 bytes.
    pub(super) fn with_info(self, info: &'a [u8]) -> Self {
        Self { info: &info[..info.len().min(REJ_INFO_LEN)], ..self }
    }

    /// Adds the program's private data, cut to 148 bytes.
    fn with_data(self, data: &'a [u8]) -> Self {
        Self { data: &data[..data.len().min(REJ_PRIVATE_LEN)], ..self }
    }
}

impl Manager {
    /// Sends a REJ.
    pub(super) fn refuse(
        &mut self,
        from: IpAddr,
        to: IpAddr,
        transaction: u64,
        refusal: Refusal<'_>,
    ) {
        let mut rej = Rej {
            local_id: refusal.ids.local,
            remote_id: refusal.ids.remote,
            answered: refusal.answered,
            reason: refusal.reason.0,
            info_len: refusal.info.len() as u8,
            info: [0; REJ_INFO_LEN],
            private_data: [0; REJ_PRIVATE_LEN],
        };
        rej.info[..refusal.info.len()].copy_from_slice(refusal.info);
        rej.private_data[..refusal.data.len()].copy_from_slice(refusal.data);
        self.send(from, to, &CmMad { transaction, message: CmMessage::Rej(rej) });
    }

    /// Refuses a REQ because of an address in it, and tells the peer the correct address [CM-11].
    pub(super) fn refuse_address(&mut self, from: IpAddr, to: IpAddr, transaction: u64, req: &Req) {
        let gid = Gid::from(from);
        let refusal = Refusal::of_req(req, RejectReason::INVALID_GID).with_info(&gid.0);
        self.refuse(from, to, transaction, refusal);
    }

    /// Refuses a request on behalf of the program, with at most 148 bytes of private data [CMA-13].
    pub(crate) fn reject(
        &mut self,
        now: Instant,
        id: CmId,
        private_data: &[u8],
    ) -> Result<(), Error> {
        self.reject_for(now, id, RejectReason::CONSUMER, private_data)
    }

    /// Refuses a request, or the peer's answer to one, for a reason of the program's; a lookup has
    /// no reasons.
    pub(crate) fn reject_for(
        &mut self,
        now: Instant,
        id: CmId,
        reason: RejectReason,
        private_data: &[u8],
    ) -> Result<(), Error> {
        if self.lookups.is_lookup(id) {
            return self.refuse_lookup(now, id, private_data);
        }
        RequestPart::RejectData.check(private_data.len() as u64, REJ_PRIVATE_LEN as u64)?;
        let conn = self.conns.get(&id).ok_or(Error::NoSuch(Object::Connection))?;
        let answered = match conn.state {
            State::ReqRcvd => Answered::REQ,
            State::Responded => Answered::REP,
            _ => return Err(Error::Invalid(InvalidReason::NotARequest)),
        };
        let (from, to, transaction) = (conn.local.ip(), conn.remote.ip(), conn.transaction);
        let refusal = Refusal::of(conn.ids(), answered, reason);
        self.refuse(from, to, transaction, refusal.with_data(private_data));
        self.remove(id);
        Ok(())
    }

    /// Gives up a connection that is not up and tells the peer. The REJ carries this node's GUID
    /// and communication ID, since the peer may not have an ID for the connection yet [CM-36]
    /// [CM-40].
    pub(super) fn refuse_by_timeout(&mut self, id: CmId) {
        let Some(conn) = self.conns.get(&id) else { return };
        let (from, to, transaction) = (conn.local.ip(), conn.remote.ip(), conn.transaction);
        let answered = if conn.active { Answered::REQ } else { Answered::OTHER };
        let guid = self.port.guid.to_be_bytes();
        let refusal = Refusal::of(conn.ids(), answered, RejectReason::TIMEOUT);
        self.refuse(from, to, transaction, refusal.with_info(&guid));
    }

    /// Handles a REJ: the peer refuses or gives up.
    pub(super) fn handle_rej(&mut self, now: Instant, from: IpAddr, rej: &Rej) -> bool {
        let Some(id) = self.find_refused(from, rej) else { return false };
        let reason = RejectReason(rej.reason);
        if reason != RejectReason::INVALID_SERVICE_ID || !self.asks_again(now, id) {
            self.rejected(now, id, reason, rej.private_data.to_vec());
        }
        true
    }

    /// Repeats a request soon that found no listener, unless it has waited for one long enough
    /// [CM-58]. The peer has stored nothing of it.
    fn asks_again(&mut self, now: Instant, id: CmId) -> bool {
        let Some(conn) = self.conns.get_mut(&id) else { return false };
        let State::ReqSent(resend) = &mut conn.state else { return false };
        if now.saturating_since(conn.since) >= self.config.listener_patience {
            return false;
        }
        // As a request of this moment: no repetition is used up.
        resend.first_resends_done = 0;
        resend.left = conn.max_retries;
        self.set_timer(id, Some(now + LISTENER_PERIOD));
        true
    }

    /// Finds the connection that a REJ refers to [CM-36].
    fn find_refused(&self, from: IpAddr, rej: &Rej) -> Option<CmId> {
        let ids = Ids { local: rej.local_id, remote: rej.remote_id };
        let by_guid = || {
            let guid = rej.info().first_chunk().map(|guid| u64::from_be_bytes(*guid))?;
            let timeout = rej.reason == RejectReason::TIMEOUT.0;
            self.by_peer.get(&(from, guid, rej.local_id)).filter(|_| timeout)
        };
        let id = *self.by_comm_id.get(&rej.remote_id).or_else(by_guid)?;
        let conn = self.conns.get(&id).filter(|conn| conn.remote.ip() == from)?;
        let names_conn = match conn.state {
            // The peer's communication ID is not known yet, or 0 in the message.
            State::ReqSent(_) => true,
            State::ReqRcvd => conn.matches_ids(ids) || by_guid() == Some(&id),
            State::RepSent(_) => conn.matches_ids(ids) || by_guid() == Some(&id),
            State::Responded | State::Established => conn.matches_ids(ids),
            State::RepRcvd(_) | State::Accepting(_) | State::DreqSent(_) | State::Timewait => false,
        };
        names_conn.then_some(id)
    }

    /// Ends a connection that either side has refused.
    pub(super) fn rejected(
        &mut self,
        now: Instant,
        id: CmId,
        reason: RejectReason,
        private_data: Vec<u8>,
    ) {
        let Some(conn) = self.conns.get(&id) else { return };
        let keeps_timewait = match conn.state {
            // The peer knows the queue pair and may have sent to it: packets can be late [CM-45]
            // [CM-56].
            State::Established | State::RepSent(_) | State::RepRcvd(_) | State::Responded => true,
            // No queue pair has been used, so nothing can be late.
            State::ReqRcvd => false,
            _ => reason == RejectReason::STALE_CONNECTION,
        };
        self.order_error(id);
        self.event_on(id, CmEvent::Rejected { id, reason, private_data });
        if keeps_timewait {
            self.enter_timewait(now, id);
        } else {
            self.remove(id);
        }
    }
}
