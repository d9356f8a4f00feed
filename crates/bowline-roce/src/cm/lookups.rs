//! Lookups of datagram services: one question and one answer, without a connection [CM-60].
//!
//! ```text
//!   asking    look_up --SIDR_REQ, repeated--> Found, NotFound or Unreachable
//!   asked     SIDR_REQ --> ConnectRequest --answer, reject--> SIDR_REP, kept for repetitions
//! ```

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use bowline_verbs::{
    CmEvent, CmId, ConnRequest, Error, InvalidReason, Object, Qpn, RequestPart, Resource,
};
use bowline_wire::roce::cm::{
    CmMad, CmMessage, SIDR_INFO_LEN, SIDR_REP_PRIVATE_LEN, SIDR_REQ_PRIVATE_LEN, SidrRep, SidrReq,
    SidrStatus,
};
use bowline_wire::roce::{
    CMA_HEADER_LEN, CmaHeader, DEFAULT_PKEY, GSI_QPN, datagram_service_id, datagram_service_port,
};

use super::config::time_of;
use super::conn::MadBytes;
use super::listen::{Found, Listeners};
use super::{Manager, Output, SendMad};
use crate::Instant;
use crate::counters::Counters;

/// Most bytes of a program's data in a SIDR_REQ [CMA-22].
const REQ_DATA_LEN: usize = SIDR_REQ_PRIVATE_LEN - CMA_HEADER_LEN;
/// How long an answer is kept for repetitions of its question: as long as a kernel repeats it.
const ANSWER_KEPT: Duration = Duration::from_secs(66);

/// A lookup of this side.
#[derive(Debug)]
struct Asking {
    local: SocketAddr,
    remote: SocketAddr,
    request_id: u32,
    /// The question; every repetition has the same bytes [GSI-6].
    mad: MadBytes,
    /// How many of `CmConfig::first_resends` have been sent.
    first_resends_done: usize,
    /// How many of the later repetitions are left.
    left: u8,
    timer: Instant,
}

/// A peer's lookup is named by the peer's address, its number and its transaction.
type PeerKey = (IpAddr, u32, u64);

/// A lookup of a peer.
#[derive(Debug)]
struct Asked {
    key: PeerKey,
    listener: CmId,
    local: SocketAddr,
    service_id: u64,
    since: Instant,
    /// The answer, and until when it is kept.
    answer: Option<(MadBytes, Instant)>,
}

/// Lookups, and those who listen for them.
#[derive(Debug, Default)]
pub(super) struct Lookups {
    pub(super) listeners: Listeners,
    asking: BTreeMap<CmId, Asking>,
    by_request: BTreeMap<u32, CmId>,
    asked: BTreeMap<CmId, Asked>,
    by_peer: BTreeMap<PeerKey, CmId>,
    /// Lookups of peers, oldest first.
    oldest: BTreeSet<(Instant, CmId)>,
    timers: BTreeSet<(Instant, CmId)>,
}

impl Lookups {
    /// Number of lookups, of both sides.
    pub(super) fn len(&self) -> usize {
        self.asking.len() + self.asked.len()
    }

    pub(super) fn contains(&self, id: CmId) -> bool {
        self.listeners.contains(id) || self.is_lookup(id)
    }

    pub(super) fn is_lookup(&self, id: CmId) -> bool {
        self.asking.contains_key(&id) || self.asked.contains_key(&id)
    }

    pub(super) fn has_request(&self, request_id: u32) -> bool {
        self.by_request.contains_key(&request_id)
    }

    pub(super) fn local_addr(&self, id: CmId) -> Option<SocketAddr> {
        let own = self.asking.get(&id).map(|one| one.local);
        own.or_else(|| self.asked.get(&id).map(|one| one.local)).or_else(|| self.listeners.at(id))
    }

    pub(super) fn poll_timeout(&self) -> Option<Instant> {
        self.timers.first().map(|(at, _)| *at)
    }

    fn remove_asking(&mut self, id: CmId) -> Option<Asking> {
        let gone = self.asking.remove(&id)?;
        self.by_request.remove(&gone.request_id);
        self.timers.remove(&(gone.timer, id));
        Some(gone)
    }

    fn remove_asked(&mut self, id: CmId) -> Option<Asked> {
        let gone = self.asked.remove(&id)?;
        self.by_peer.remove(&gone.key);
        self.oldest.remove(&(gone.since, id));
        match gone.answer {
            Some((_, until)) => {
                self.timers.remove(&(until, id));
            }
            None => self.listeners.remove_pending(gone.listener),
        }
        Some(gone)
    }

    /// Lookups of both sides.
    #[cfg(test)]
    pub(super) fn ids(&self) -> impl Iterator<Item = CmId> {
        self.asking.keys().chain(self.asked.keys()).copied()
    }

    /// Numbers that answers may name.
    #[cfg(test)]
    pub(super) fn request_ids(&self) -> impl Iterator<Item = u32> {
        self.by_request.keys().copied()
    }

    #[cfg(test)]
    pub(super) fn check(&self) {
        assert_eq!(self.asking.len(), self.by_request.len());
        assert_eq!(self.asked.len(), self.by_peer.len());
        assert_eq!(self.asked.len(), self.oldest.len());
        let answered = self.asked.values().filter(|one| one.answer.is_some()).count();
        assert_eq!(self.timers.len(), self.asking.len() + answered);
    }
}

impl Manager {
    /// Listens for lookups of the datagram service of a port, of an address or of all addresses
    /// with an unspecified one. Port 0 selects a free port.
    pub(crate) fn listen_datagrams(&mut self, at: SocketAddr) -> Result<CmId, Error> {
        self.listen_among(|manager| &mut manager.lookups.listeners, at)
    }

    /// Looks up a datagram service; port 0 of the local address selects a free port.
    pub(crate) fn look_up(
        &mut self,
        now: Instant,
        mut local: SocketAddr,
        remote: SocketAddr,
        data: &[u8],
    ) -> Result<CmId, Error> {
        RequestPart::ConnectData.check(data.len() as u64, REQ_DATA_LEN as u64)?;
        super::active::check_addresses(local, remote)?;
        if self.conns.len() + self.lookups.len() >= self.config.max_connections {
            return Err(Error::Limit(Resource::Connections));
        }
        if local.port() == 0 {
            local.set_port(self.ephemeral_port());
        }
        let (request_id, id) = (self.new_comm_id(), self.new_id());
        let (source, destination) = (local.ip(), remote.ip());
        let header = CmaHeader { source_port: local.port(), source, destination };
        let mut private_data = [0; SIDR_REQ_PRIVATE_LEN];
        let (head, rest) = private_data.split_at_mut(CMA_HEADER_LEN);
        head.copy_from_slice(&header.emit());
        rest[..data.len()].copy_from_slice(data);
        let question = SidrReq {
            request_id,
            pkey: DEFAULT_PKEY,
            service_id: datagram_service_id(remote.port()),
            private_data,
        };
        let transaction = self.transaction(request_id);
        let mad = CmMad { transaction, message: CmMessage::SidrReq(question) }.emit();
        let period = self.lookup_period();
        let timer = now + self.config.first_resends.first().copied().unwrap_or(period);
        let mad = Box::new(mad);
        self.outputs.push_back(Output::Mad(SendMad {
            from: source,
            to: destination,
            mad: mad.clone(),
        }));
        let left = self.config.max_retries.min(15);
        let lookup = Asking { local, remote, request_id, mad, first_resends_done: 0, left, timer };
        self.lookups.by_request.insert(request_id, id);
        self.lookups.timers.insert((timer, id));
        self.lookups.asking.insert(id, lookup);
        Ok(id)
    }

    /// Time between two repetitions of a question [CM-61].
    fn lookup_period(&self) -> Duration {
        time_of(self.config.response_timeout)
    }

    /// Handles a question of a peer.
    pub(super) fn handle_sidr_req(
        &mut self,
        now: Instant,
        from: IpAddr,
        to: IpAddr,
        transaction: u64,
        question: &SidrReq,
        counters: &mut Counters,
    ) -> bool {
        let key = (from, question.request_id, transaction);
        if let Some(known) = self.lookups.by_peer.get(&key) {
            let known = self.lookups.asked.get(known).and_then(|asked| asked.answer.as_ref());
            if let Some((mad, _)) = known {
                counters.cm_resent += 1;
                let mad = mad.clone();
                self.outputs.push_back(Output::Mad(SendMad { from: to, to: from, mad }));
            }
            return true;
        }
        let (listener, header) = match self.check_question(from, to, question) {
            Ok(found) => found,
            Err(status) => {
                let answer = answer(question.request_id, question.service_id, status, &[]);
                let mad = CmMad { transaction, message: CmMessage::SidrRep(answer) };
                self.send(to, from, &mad);
                return true;
            }
        };
        if !self.make_room_for_lookup(listener, counters) {
            // The peer repeats the question; there may be room by then.
            counters.cm_overflow += 1;
            return true;
        }
        let id = self.new_id();
        let port = self.lookups.listeners.at(listener).map_or(0, |at| at.port());
        let local = SocketAddr::new(header.destination, port);
        let remote = SocketAddr::new(header.source, header.source_port);
        let service_id = question.service_id;
        let asked = Asked { key, listener, local, service_id, since: now, answer: None };
        self.lookups.by_peer.insert(key, id);
        self.lookups.oldest.insert((now, id));
        self.lookups.listeners.add_pending(listener);
        self.lookups.asked.insert(id, asked);
        let request = ConnRequest {
            listener,
            local,
            remote,
            private_data: question.private_data[CMA_HEADER_LEN..].to_vec(),
            responder_resources: 0,
            initiator_depth: 0,
            remote_qpn: Qpn(0),
        };
        self.event(CmEvent::ConnectRequest { id, request });
        true
    }

    /// Checks a question: returns its listener, or why there is no other answer [CM-62].
    fn check_question(
        &self,
        from: IpAddr,
        to: IpAddr,
        question: &SidrReq,
    ) -> Result<(CmId, CmaHeader), SidrStatus> {
        let port = datagram_service_port(question.service_id).ok_or(SidrStatus::UNSUPPORTED)?;
        let listener = match self.lookups.listeners.find(SocketAddr::new(to, port)) {
            Found::Listener(id) => id,
            Found::OtherAddress | Found::Nobody => return Err(SidrStatus::UNSUPPORTED),
        };
        let head = question.private_data.first_chunk().ok_or(SidrStatus::REJECT)?;
        let header = CmaHeader::parse(head).map_err(|_| SidrStatus::REJECT)?;
        if header.source != from || header.destination != to {
            return Err(SidrStatus::REJECT);
        }
        Ok((listener, header))
    }

    /// Makes room for a peer's lookup, as for requests of connections [CM-57]: the oldest one goes.
    /// Tells whether there is room.
    fn make_room_for_lookup(&mut self, listener: CmId, counters: &mut Counters) -> bool {
        let (pending, all) = (self.config.max_pending, self.config.max_unproven);
        if self.lookups.listeners.pending(listener) >= pending {
            let at = |id: &CmId| {
                let asked = self.lookups.asked.get(id).filter(|asked| asked.answer.is_none());
                asked.map(|asked| asked.listener)
            };
            let mut oldest = self.lookups.oldest.iter().map(|(_, id)| *id);
            if let Some(oldest) = oldest.find(|id| at(id) == Some(listener)) {
                self.push_out_lookup(oldest, counters);
            }
        }
        if self.lookups.asked.len() >= all
            && let Some(&(_, oldest)) = self.lookups.oldest.first()
        {
            self.push_out_lookup(oldest, counters);
        }
        self.lookups.listeners.pending(listener) < pending && self.lookups.asked.len() < all
    }

    fn push_out_lookup(&mut self, id: CmId, counters: &mut Counters) {
        counters.cm_pushed_out += 1;
        if self.lookups.remove_asked(id).is_some_and(|asked| asked.answer.is_none()) {
            self.event(CmEvent::Unreachable { id });
        }
    }

    /// Answers a peer's lookup with a queue pair and its key.
    pub(crate) fn answer_lookup(
        &mut self,
        now: Instant,
        id: CmId,
        qpn: Qpn,
        qkey: u32,
        data: &[u8],
    ) -> Result<(), Error> {
        if qpn.0 <= GSI_QPN || qpn.0 >= Qpn::MULTICAST.0 {
            return Err(Error::NoSuch(Object::QueuePair));
        }
        self.send_answer(now, id, SidrStatus::FOUND, (qpn, qkey), data)
    }

    /// Refuses a peer's lookup.
    pub(super) fn refuse_lookup(
        &mut self,
        now: Instant,
        id: CmId,
        data: &[u8],
    ) -> Result<(), Error> {
        self.send_answer(now, id, SidrStatus::REJECT, (Qpn(0), 0), data)
    }

    fn send_answer(
        &mut self,
        now: Instant,
        id: CmId,
        status: SidrStatus,
        (qpn, qkey): (Qpn, u32),
        data: &[u8],
    ) -> Result<(), Error> {
        RequestPart::AcceptData.check(data.len() as u64, SIDR_REP_PRIVATE_LEN as u64)?;
        let no_request = Error::Invalid(InvalidReason::NotARequest);
        let asked = self.lookups.asked.get_mut(&id).ok_or(no_request.clone())?;
        if asked.answer.is_some() {
            return Err(no_request);
        }
        let (to, request_id, transaction) = asked.key;
        let from = asked.local.ip();
        let rep = answer(request_id, asked.service_id, status, data);
        let rep = SidrRep { qpn: qpn.0, qkey, ..rep };
        let mad = Box::new(CmMad { transaction, message: CmMessage::SidrRep(rep) }.emit());
        let until = now + ANSWER_KEPT;
        asked.answer = Some((mad.clone(), until));
        let listener = asked.listener;
        self.lookups.listeners.remove_pending(listener);
        self.lookups.timers.insert((until, id));
        self.outputs.push_back(Output::Mad(SendMad { from, to, mad }));
        Ok(())
    }

    /// Handles the answer to a question.
    pub(super) fn handle_sidr_rep(&mut self, from: IpAddr, to: IpAddr, rep: &SidrRep) -> bool {
        let Some(&id) = self.lookups.by_request.get(&rep.request_id) else { return false };
        let Some(asking) = self.lookups.asking.get(&id) else { return false };
        let is_found = rep.status == SidrStatus::FOUND;
        if asking.remote.ip() != from
            || asking.local.ip() != to
            || rep.service_id != datagram_service_id(asking.remote.port())
            || is_found && (rep.qpn <= GSI_QPN || rep.qpn == Qpn::MULTICAST.0)
        {
            return false;
        }
        self.lookups.remove_asking(id);
        let private_data = rep.private_data.to_vec();
        self.event(if is_found {
            CmEvent::Found { id, private_data, qpn: Qpn(rep.qpn), qkey: rep.qkey }
        } else {
            CmEvent::NotFound { id, status: rep.status.0, private_data }
        });
        true
    }

    /// Runs the timers of lookups that are due.
    pub(super) fn lookups_handle_timeout(&mut self, now: Instant, counters: &mut Counters) {
        while let Some(&(at, id)) = self.lookups.timers.first().filter(|(at, _)| *at <= now) {
            self.lookups.timers.remove(&(at, id));
            if self.lookups.asked.contains_key(&id) {
                self.lookups.remove_asked(id);
                continue;
            }
            let period = self.lookup_period();
            let early = &self.config.first_resends;
            let Some(asking) = self.lookups.asking.get_mut(&id) else { continue };
            if asking.first_resends_done < early.len() {
                asking.first_resends_done += 1;
            } else if asking.left > 0 {
                asking.left -= 1;
            } else {
                counters.cm_timeouts += 1;
                self.lookups.remove_asking(id);
                self.event(CmEvent::Unreachable { id });
                continue;
            }
            let next = early.get(asking.first_resends_done).copied().unwrap_or(period);
            asking.timer = now + next;
            let (from, to, mad) = (asking.local.ip(), asking.remote.ip(), asking.mad.clone());
            self.lookups.timers.insert((now + next, id));
            counters.cm_resent += 1;
            self.outputs.push_back(Output::Mad(SendMad { from, to, mad }));
        }
    }

    /// Destroys a lookup, or a listener for them, whose unanswered lookups are refused.
    pub(super) fn destroy_lookup(&mut self, now: Instant, id: CmId) {
        if self.lookups.listeners.contains(id) {
            let pending = self.lookups.asked.iter().filter(|(_, asked)| asked.listener == id);
            let pending: Vec<CmId> = pending.map(|(id, _)| *id).collect();
            // Those that are answered stay as they are.
            pending.into_iter().for_each(|id| drop(self.refuse_lookup(now, id, &[])));
            self.lookups.listeners.remove(id);
            return;
        }
        self.lookups.remove_asking(id);
        // One that is answered stays for repetitions of its question.
        let _ = self.refuse_lookup(now, id, &[]);
    }
}

fn answer(request_id: u32, service_id: u64, status: SidrStatus, data: &[u8]) -> SidrRep {
    let mut private_data = [0; SIDR_REP_PRIVATE_LEN];
    private_data[..data.len()].copy_from_slice(data);
    SidrRep {
        request_id,
        status,
        info_len: 0,
        qpn: 0,
        service_id,
        qkey: 0,
        info: [0; SIDR_INFO_LEN],
        private_data,
    }
}
