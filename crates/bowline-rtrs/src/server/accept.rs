//! Setup of a path: from a client's first connection request until it knows the chunks.

use core::time::Duration;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use bowline_verbs::{Access, Buffer, Status};
use bowline_wire::rtrs::{
    self, ConAnswer, ConReq, ConRsp, Desc, INFO_REQ_MAX, PathLife, SessionName, emit_info_rsp,
};

use super::path::{ChunkKey, Conn, ConnState, Conns, InternalMemory, Path, PathState, Setup};
use super::sendq::{SendQueue, Signal};
use super::session::{Consent, Session};
use super::{CloseReason, PathStats, Server, ServerEvent, SessId};
use crate::{
    ConnId, Done, Errno, HbConfig, Heartbeat, Instant, Order, PathId, PortId, QpShape, RecvSlot,
    RegionId, RegionKeys, RegionPorts, RequestId, Tag, WrKind,
};

/// Least number of receives for immediates on the service connection [RT-25].
const SERVICE_DEPTH: usize = 512;
/// Receives for notices on each connection; if more come at a time, the device retransmits them.
const NOTICE_RECVS: usize = 8;
/// Least number of work requests that a queue must hold.
pub(super) const QUEUE_MIN: usize = 16;

/// The properties of a path that determine the queues of its connections.
struct Kind {
    port: PortId,
    refresh: bool,
    accepts_notice: bool,
    /// The path has only one connection, for everything.
    single: bool,
}

impl Kind {
    const fn of(path: &Path) -> Self {
        let &Path { port, refresh, accepts_notice, .. } = path;
        Self { port, refresh, accepts_notice, single: path.conns.len() == 1 }
    }
}

/// A connection request of an allowed client.
#[derive(Debug)]
pub(super) struct Asked {
    request: RequestId,
    port: PortId,
    local: SocketAddr,
    remote: SocketAddr,
    what: ConReq,
}

impl Server {
    /// Handles a connection request [RT-19], [RT-28].
    pub(super) fn on_connect_request(
        &mut self,
        now: Instant,
        request: RequestId,
        port: PortId,
        local: SocketAddr,
        remote: SocketAddr,
        private: &[u8],
    ) {
        let (local, remote) = (canonical(local), canonical(remote));
        match self.judge(remote.ip(), private) {
            Ok(what) => self.admit_or_refuse(now, Asked { request, port, local, remote, what }),
            Err(errno) => self.refuse(request, errno),
        }
    }

    fn admit_or_refuse(&mut self, now: Instant, asked: Asked) {
        let request = asked.request;
        if let Err(errno) = self.admit(now, asked) {
            self.refuse(request, errno);
        }
    }

    pub(super) fn refuse(&mut self, request: RequestId, errno: Errno) {
        self.counters.refused += 1;
        self.counters.refused_full += u64::from(errno == Errno::ENOMEM);
        let answer = ConAnswer::Refused(u16::try_from(errno.0).unwrap_or(rtrs::ERRNO_MAX));
        self.orders.push_back(Order::Reject { request, private: answer.emit() });
    }

    /// Reads a request, and decides whether its client may ask at all.
    fn judge(&self, from: IpAddr, private: &[u8]) -> Result<ConReq, Errno> {
        if self.closing {
            return Err(Errno::ECONNRESET);
        }
        let allow = &self.config.allow;
        if !allow.is_empty() && !allow.iter().any(|rule| rule.admits(from)) {
            return Err(Errno::EPERM);
        }
        let asked = ConReq::parse(private).map_err(|_| Errno::ECONNRESET)?;
        if asked.cid_num > self.config.limits.connections_per_path {
            return Err(Errno::ECONNRESET);
        }
        Ok(asked)
    }

    fn admit(&mut self, now: Instant, asked: Asked) -> Result<(), Errno> {
        if self.closing {
            return Err(Errno::ECONNRESET);
        }
        let known = self.sessions.iter().find(|session| session.uuid == asked.what.session);
        let id = match known {
            Some(session) => session.id,
            None if asked.what.first => self.add_session(&asked.what, asked.remote.ip())?,
            None => return Err(Errno::ENXIO),
        };
        let joined = self.join(now, id, asked);
        if joined.is_err() {
            self.end_session_if_over(id);
        }
        joined
    }

    fn add_session(&mut self, asked: &ConReq, from: IpAddr) -> Result<SessId, Errno> {
        if !self.has_session_room(from) {
            return Err(Errno::ENOMEM);
        }
        let session = self.sessions.add(|id| Session::new(id, asked.session, from))?;
        Ok(session.id)
    }

    /// Finds or makes the path of a connection.
    fn join(&mut self, now: Instant, id: SessId, request: Asked) -> Result<(), Errno> {
        let Asked { port, local, remote, ref what, .. } = request;
        let asked = what;
        let session = self.sessions.find(id).ok_or(Errno::ENXIO)?;
        let fresh = session.consent == Consent::Down && session.running == 0;
        if session.is_ending() && !fresh {
            return Err(Errno::ECONNRESET);
        }
        let mut paths = session.paths.iter().filter_map(|&slot| self.paths.at(slot));
        if let Some(path) = paths.clone().find(|path| path.uuid == asked.path) {
            let same =
                (path.port, path.local.ip(), path.remote.ip()) == (port, local.ip(), remote.ip());
            // It counts up with each attempt [RT-33]; a late request of an earlier one is refused.
            let ahead = asked.recon_cnt.wrapping_sub(path.attempt);
            if same && path.state == PathState::Connecting && (1..1 << 15).contains(&ahead) {
                let id = path.id;
                self.begin_again(now, id, request);
                return Ok(());
            }
            let same = same
                && (path.state, ahead) == (PathState::Connecting, 0)
                && path.conns.len() == asked.cid_num;
            let kind = Kind::of(path);
            let conn = self.conn(&kind, asked.cid, request.request);
            let (id, cid) = (path.id, asked.cid);
            let path = self.paths.get_mut(id).filter(|_| same).ok_or(Errno::ECONNRESET)?;
            if path.conns.get_mut(cid).is_some() {
                return Err(Errno::ECONNRESET);
            }
            path.conns.ask(cid, conn);
            self.accept_asked(id);
            return Ok(());
        }
        if session.paths.len() >= self.config.limits.paths_per_session {
            return Err(Errno::ECONNRESET);
        }
        if paths.any(|path| (path.local.ip(), path.remote.ip()) == (local.ip(), remote.ip())) {
            return Err(Errno::EEXIST);
        }
        self.add_path(now, id, &request)
    }

    /// Ends a path that its client has not established, and does not mean to any more: it begins
    /// the path once more by this request, which is answered when the queues of the old connections
    /// are dead [RT-102].
    fn begin_again(&mut self, now: Instant, id: PathId, asked: Asked) {
        let Some(path) = self.paths.get_mut(id) else { return };
        path.again = Some(Box::new(asked));
        self.close_path(now, id, CloseReason::ComesAgain);
    }

    /// Makes a path that its client has begun once more. It takes the place of the first attempt,
    /// so a session without another path continues [RT-102].
    pub(super) fn add_again(&mut self, now: Instant, slot: u32, asked: &Asked) {
        let session = self.sessions.get(slot).filter(|_| !self.closing).map(|session| session.id);
        let added = session.ok_or(Errno::ECONNRESET).and_then(|id| self.add_path(now, id, asked));
        if let Err(errno) = added {
            self.refuse(asked.request, errno);
        }
    }

    fn add_path(&mut self, now: Instant, session: SessId, asked: &Asked) -> Result<(), Errno> {
        let &Asked { request, port, local, remote, what: ref asked } = asked;
        let attr = self.ports.get(usize::from(port.0)).ok_or(Errno::ENODEV)?;
        if !self.has_room(asked.cid_num, remote.ip()) {
            return Err(Errno::ENOMEM);
        }
        let id = self.paths.vacancy().ok_or(Errno::ENOMEM)?;
        let refresh = self.config.always_invalidate && attr.key_refresh;
        let depth = self.config.geometry.queue_depth();
        let buffer =
            Buffer::new(InternalMemory::bytes(depth, refresh)).map_err(|_| Errno::ENOMEM)?;
        let own = InternalMemory::new(self.next_region(), Arc::new(buffer), depth);
        let (accepts_notice, single) = (asked.gives_notice, asked.cid_num == 1);
        let kind = Kind { port, refresh, accepts_notice, single };
        let mut conns = Conns::new(asked.cid_num);
        conns.ask(asked.cid, self.conn(&kind, asked.cid, request));
        let path = Path {
            id,
            session: session.slot,
            uuid: asked.path,
            generation: PathLife::new(&asked.path, asked.recon_cnt),
            attempt: asked.recon_cnt,
            again: None,
            port,
            local,
            remote,
            state: PathState::Connecting,
            setup: Setup::Preparing,
            proven: false,
            refresh,
            counted: refresh && asked.counts_keys,
            accepts_notice,
            given_up: false,
            conns,
            internal: own,
            region: None,
            keys: vec![ChunkKey { rkey: 0, taken: false }; usize::from(depth)],
            info_rsp_len: 0,
            heartbeat: None,
            deadline: now + self.config.limits.prove,
            drain_by: now,
            waiting: 0,
            stats: PathStats::default(),
            turn: (0, 0),
        };
        self.wake_at(path.deadline);
        self.orders.push_back(Order::AddRegion {
            region: path.internal.region,
            buffer: Arc::clone(&path.internal.buffer),
            access: Access::LOCAL_WRITE,
            granule: None,
            ports: RegionPorts::One(port),
            path: Some(id),
        });
        self.paths.add(path);
        if let Some(session) = self.sessions.get_mut(session.slot) {
            session.paths.push(id.slot);
        }
        self.add_stranger(now, id);
        Ok(())
    }

    /// Makes the state of a requested connection.
    fn conn(&self, kind: &Kind, cid: u16, request: RequestId) -> Conn {
        let size = self.shape(kind, cid).send_wr - 1;
        Conn {
            state: ConnState::Requested,
            request: Some(request),
            established: false,
            disconnected: false,
            queue: SendQueue::new(size as u32, self.config.geometry.queue_depth()),
        }
    }

    /// Sizes of a connection's queues: those of the kernel [RT-22], plus one entry in each for the
    /// drain marker.
    fn shape(&self, path: &Kind, cid: u16) -> QpShape {
        let &Kind { port, refresh, accepts_notice, single } = path;
        let depth = usize::from(self.config.geometry.queue_depth());
        let service = 2 * SERVICE_DEPTH + 2;
        let send = match (cid, refresh) {
            (0, _) if !single => service,
            (0, true) => service + 5 * depth,
            (0, false) => service + 3 * depth,
            (_, true) => 5 * depth + 1,
            (_, false) => 3 * depth + 1,
        };
        QpShape {
            send_wr: (send + 1).max(QUEUE_MIN).min(self.queue_max(port)),
            recv_wr: self.receives(port, cid, accepts_notice) + 2,
            send_sge: 1,
            access: Access::LOCAL_WRITE | Access::REMOTE_WRITE,
            queue: 0,
            give_up: (!accepts_notice).then(|| self.silence_limit()),
        }
    }

    /// How long the queue pairs of non-bowline clients tolerate silence: longer than the heartbeat
    /// needs to detect a dead client, so that they never decide that themselves [RT-93].
    fn silence_limit(&self) -> Duration {
        let HbConfig { interval, missed_max, .. } = self.config.heartbeat;
        interval.saturating_mul(missed_max.saturating_add(3))
    }

    /// Receives for immediates on a connection [RT-25]. All requests of a client may come on one,
    /// with some notices between them.
    fn receives(&self, port: PortId, cid: u16, accepts_notice: bool) -> usize {
        let depth = usize::from(self.config.geometry.queue_depth());
        let notices = if accepts_notice { NOTICE_RECVS } else { 0 };
        let wanted = notices + if cid == 0 { SERVICE_DEPTH.max(depth + 8) } else { depth };
        wanted.min(self.queue_max(port) - 2)
    }

    fn queue_max(&self, port: PortId) -> usize {
        self.ports.get(usize::from(port.0)).map_or(QUEUE_MIN, |attr| attr.max_qp_wr)
    }

    /// Accepts the requested connections, once the path's internal memory is registered.
    fn accept_asked(&mut self, id: PathId) {
        let Some(path) = self.paths.get(id).filter(|path| path.setup != Setup::Preparing) else {
            return;
        };
        let kind = Kind::of(path);
        let accepts_notice = path.accepts_notice;
        let info_req = path.internal.info_req(accepts_notice);
        let count = path.conns.len();
        let counted_keys = path.counted;
        let new_rkey = path.refresh && !counted_keys;
        let geometry = self.config.geometry;
        let answer = ConRsp { geometry, new_rkey, counted_keys, accepts_notice };
        let private = ConAnswer::Accepted(answer).emit();
        for cid in 0..count {
            let shape = self.shape(&kind, cid);
            let conn = ConnId { path: id, cid };
            let Some(asked) = self.conn_mut(conn) else { continue };
            let (ConnState::Requested, Some(request)) = (asked.state, asked.request) else {
                continue;
            };
            asked.state = ConnState::Live;
            let tag = Tag::new(Tag::INFO, 0);
            let first = (cid == 0).then_some(RecvSlot { conn, tag, mem: Some(info_req) });
            self.counters.accepted += 1;
            self.orders.push_back(Order::Accept { conn, request, shape, private, first });
        }
    }

    /// Handles a registration: of the path's internal memory, or of the chunks. Memory of the upper
    /// layer needs no action.
    pub(super) fn registered(
        &mut self,
        now: Instant,
        region: RegionId,
        _port: PortId,
        keys: Result<Vec<RegionKeys>, Errno>,
    ) {
        let Some(path) = self
            .paths
            .iter()
            .find(|path| path.internal.region == region || path.region == Some(region))
        else {
            return;
        };
        let (id, own) = (path.id, path.internal.region == region);
        match (keys, path.state, path.setup) {
            (Ok(_), PathState::Connecting, Setup::Preparing) if own => {
                if let Some(path) = self.paths.get_mut(id) {
                    path.setup = Setup::Connecting;
                }
                self.accept_asked(id);
            }
            (Ok(keys), PathState::Connecting, Setup::Registering) if !own => {
                if self.describe(id, &keys).is_none() {
                    return self.close_path(now, id, CloseReason::Failed(Errno::EINVAL));
                }
                self.ask_upper_layer(now, id);
            }
            (Err(errno), PathState::Connecting, _) => {
                self.close_path(now, id, CloseReason::Failed(errno));
            }
            _ => {}
        }
    }

    /// Handles INFO_REQ, or the failure of its receive [RT-20], [RT-68].
    pub(super) fn info_request(&mut self, now: Instant, done: &Done) {
        let id = done.conn.path;
        if done.status == Status::Success {
            self.prove(now, id);
        }
        let judged = self.judge_info(done);
        let (name, given_up) = match judged {
            Ok(judged) => judged,
            Err(reason) => return self.close_path(now, id, reason),
        };
        let session = self.paths.get(id).map(|path| path.session);
        let session = session.and_then(|slot| self.sessions.get_mut(slot));
        if session.is_none_or(|session| session.allocate_chunks(&self.config.geometry).is_err()) {
            return self.close_path(now, id, CloseReason::Failed(Errno::ENOMEM));
        }
        given_up.into_iter().for_each(|generation| self.notice(now, id, generation));
        let Some(path) = self.paths.get_mut(id) else { return };
        path.setup = Setup::Registering;
        let (port, accepts_notice) = (path.port, path.accepts_notice);
        let (refresh, session) = (path.refresh, path.session);
        let count = path.conns.len();
        for cid in 0..count {
            let (conn, tag) = (ConnId { path: id, cid }, Tag::new(Tag::RECV, 0));
            let slot = RecvSlot { conn, tag, mem: None };
            let receives = self.receives(port, cid, accepts_notice);
            self.batch.recvs.extend(std::iter::repeat_n(slot, receives));
        }
        let region = self.next_region();
        let Some(session) = self.sessions.get_mut(session) else { return };
        session.name = Some(name);
        session.join();
        self.orders.push_back(Order::AddRegion {
            region,
            buffer: Arc::clone(&session.buffer),
            access: Access::LOCAL_WRITE | Access::REMOTE_WRITE,
            granule: refresh.then_some(self.config.geometry.chunk()),
            ports: RegionPorts::One(port),
            path: Some(id),
        });
        if let Some(path) = self.paths.get_mut(id) {
            path.region = Some(region);
        }
    }

    /// Validates INFO_REQ; returns the name in it, and the paths it says are given up.
    fn judge_info(&self, done: &Done) -> Result<(SessionName, Vec<PathLife>), CloseReason> {
        if done.status != Status::Success {
            return Err(CloseReason::Completion(done.status));
        }
        let path = self.paths.get(done.conn.path).ok_or(CloseReason::Info)?;
        let ready = done.conn.cid == 0
            && done.imm.is_none()
            && (path.state, path.setup) == (PathState::Connecting, Setup::Connecting)
            && path.conns.are_all_asked()
            && path.conns.iter().all(|(_, conn)| conn.state == ConnState::Live);
        if !ready {
            return Err(CloseReason::Info);
        }
        let mut bytes = [0; INFO_REQ_MAX];
        let len = bytes.len().min(done.len as usize);
        path.internal.buffer.read(0, &mut bytes[..len]);
        let name = rtrs::parse_info_req(&bytes[..len]).map_err(|_| CloseReason::Info)?;
        let rules = &self.config.allow;
        let may = |rule: &super::AllowRule| {
            rule.admits(path.remote.ip()) && rule.admits_name(name.as_str())
        };
        if !rules.is_empty() && !rules.iter().any(may) {
            return Err(CloseReason::NotAllowed);
        }
        // A session has one name, and a name belongs to one session [RS-48].
        let clash = self.sessions.iter().any(|session| match &session.name {
            Some(taken) => (session.id.slot == path.session) != (*taken == name),
            None => false,
        });
        if clash {
            return Err(CloseReason::NameTaken);
        }
        let given_up = rtrs::parse_given_up(&bytes[..len]).filter(|_| path.accepts_notice);
        Ok((name, given_up.collect()))
    }

    /// Stores the keys of the chunks and writes INFO_RSP [RT-7] to [RT-10]. `None` if the keys are
    /// not those that were ordered.
    fn describe(&mut self, id: PathId, keys: &[RegionKeys]) -> Option<()> {
        let geometry = self.config.geometry;
        let path = self.paths.get_mut(id)?;
        let count = if path.refresh { path.keys.len() } else { 1 };
        let len = geometry.chunk() * u32::from(geometry.queue_depth()) / count as u32;
        if keys.len() != count {
            return None;
        }
        for (chunk, keys) in path.keys.iter_mut().zip(keys) {
            chunk.rkey = keys.rkey;
        }
        let descs = keys.iter().map(|keys| Desc { addr: keys.addr, key: keys.rkey, len });
        let mut bytes = Vec::new();
        emit_info_rsp(descs, &mut bytes);
        path.info_rsp_len = bytes.len() as u32;
        let at = path.internal.info_rsp(path.info_rsp_len);
        path.internal.buffer.write(at.offset as usize, &bytes);
        Some(())
    }

    /// Asks the upper layer, if it does not know the session yet [RS-27].
    fn ask_upper_layer(&mut self, now: Instant, id: PathId) {
        let Some(path) = self.paths.get_mut(id) else { return };
        path.setup = Setup::Linking;
        let Some(session) = self.sessions.get_mut(path.session) else { return };
        let Some(name) = session.name.clone() else { return };
        let (link, session_id) = (session.consent, session.id);
        let first = link == Consent::Down;
        if first {
            session.consent = Consent::Asked;
        }
        let slot = path.session;
        self.events.push_back(ServerEvent::Up { session: session_id, name, path: id, first });
        self.connect_joined(now, slot);
    }

    /// Serves the paths of a session that need not wait any longer: the upper layer has accepted
    /// the session, and everything is answered that was in progress when the last of them joined.
    ///
    /// A client that loses all its paths gives up its requests, and reuses their chunks as soon as
    /// a path is back. A given-up request that is still carried out would write its result into the
    /// new request, or write the new request's data to its own place [RS-9].
    pub(super) fn connect_joined(&mut self, now: Instant, slot: u32) {
        let ready = |session: &&Session| session.consent == Consent::Up && session.old == 0;
        let session = self.sessions.get(slot).filter(ready);
        let Some(session) = session.filter(|_| !self.awaits_given_up(slot)) else { return };
        for at in 0..session.paths.len() {
            let Some(&path) = self.sessions.get(slot).and_then(|session| session.paths.get(at))
            else {
                return;
            };
            let waits =
                |path: &&Path| (path.state, path.setup) == (PathState::Connecting, Setup::Linking);
            if let Some(path) = self.paths.at(path).filter(waits) {
                let id = path.id;
                self.connect(now, id);
            }
        }
    }

    /// Gives the upper layer's answer to the first [`ServerEvent::Up`] of a session: it is served,
    /// or its paths are closed.
    pub fn answer_link(&mut self, now: Instant, session: SessId, ok: bool) {
        let Some(asked) = self.sessions.get_mut(session.slot) else { return };
        if asked.id != session || asked.consent != Consent::Asked {
            return;
        }
        asked.consent = if ok { Consent::Up } else { Consent::Down };
        let ids: Vec<PathId> = (self.paths.iter())
            .filter(|path| path.session == session.slot && path.state == PathState::Connecting)
            .filter(|path| path.setup == Setup::Linking)
            .map(|path| path.id)
            .collect();
        if ok {
            self.connect_joined(now, session.slot);
        } else {
            ids.into_iter().for_each(|id| self.close_path(now, id, CloseReason::NotAllowed));
        }
        self.end_session_if_over(session);
    }

    /// Serves the path from now on; INFO_RSP tells the client [RT-20].
    fn connect(&mut self, now: Instant, id: PathId) {
        let Some(path) = self.paths.get_mut(id) else { return };
        path.state = PathState::Connected;
        let heartbeat = Heartbeat::new(self.config.heartbeat, now);
        // Clients that do not give notice have no given-up paths to name [RT-101].
        let heartbeat = if path.accepts_notice { heartbeat } else { heartbeat.patient() };
        let next = heartbeat.next();
        path.heartbeat = Some(heartbeat);
        let (conn, mem) = (path.conn_id(0), path.internal.info_rsp(path.info_rsp_len));
        if let Some(service) = path.conns.get_mut(0) {
            let queue = &mut service.queue;
            queue.send(&mut self.batch, conn, Tag::INFO, WrKind::Send, &[mem], Signal::Yes);
        }
        let (path, name) = (super::info(path), self.sessions.get(path.session));
        if let Some(name) = name.and_then(|session| session.name.clone()) {
            self.events.push_back(ServerEvent::PathConnected { name, path });
        }
        self.counters.paths_connected += 1;
        self.wake_at(next);
    }

    /// Handles that an order could not be carried out, or a work request not posted.
    pub(super) fn failed(&mut self, now: Instant, conn: ConnId, errno: Errno) {
        let pending = self.conn_mut(conn).and_then(|conn| conn.request.take());
        if let Some(request) = pending {
            self.refuse(request, errno);
        }
        self.close_path(now, conn.path, CloseReason::Failed(errno));
    }
}

/// Converts IPv4-mapped addresses, which a dual-stack listener reports, to IPv4 [RS-32].
fn canonical(addr: SocketAddr) -> SocketAddr {
    SocketAddr::new(addr.ip().to_canonical(), addr.port())
}
