//! The end of an incarnation: its queues are flushed, its requests move to other paths, its
//! connections are disconnected [RS-5] to [RS-8], [RT-91].

use core::time::Duration;

use bowline_verbs::RejectReason;
use bowline_wire::rtrs::ConAnswer;

use super::incarnation::{ConnState, Phase};
use super::session::{Event, SessionState};
use super::{PathState, Refusal, Session};
use crate::config::DRAIN_MAX;
use crate::{ConnId, Errno, Instant, Order, PathId};

/// Longest wait for the peer's answers to the disconnects [RS-7].
const DISCONNECT_TIMEOUT: Duration = Duration::from_secs(30);
/// How long a path waits for these answers, and a session that is ending [RT-91], [RT-92].
const SHORT_DISCONNECT_TIMEOUT: Duration = Duration::from_secs(1);
/// How long requests in flight may go on when a path is closed by command [RS-8].
const QUIESCE_TIMEOUT: Duration = Duration::from_secs(1);

impl Session {
    /// Handles that the server refused a connection [RT-31].
    pub(super) fn on_refused(
        &mut self,
        now: Instant,
        conn: ConnId,
        reason: RejectReason,
        private: &[u8],
    ) {
        let Some(incarnation) = self.incarnation_of(conn) else { return };
        if incarnation.phase != Phase::Connecting(conn.cid) {
            return self.failed_while_ending(now, conn);
        }
        let consumer = reason == RejectReason::CONSUMER;
        let refusal = match ConAnswer::parse(private) {
            _ if !consumer => Refusal::Manager(reason),
            Ok(ConAnswer::Refused(errno)) => Refusal::Server(Errno(errno.into())),
            Ok(ConAnswer::Accepted(_)) => Refusal::Server(Errno::ECONNRESET),
            Err(error) => Refusal::Answer(error),
        };
        let errno = match refusal {
            Refusal::Server(errno) => errno,
            Refusal::Manager(_) | Refusal::Answer(_) => Errno::ECONNRESET,
        };
        incarnation.busy = consumer && conn.cid == 0 && errno == Errno::ECONNRESET;
        incarnation.conns[usize::from(conn.cid)].state = ConnState::Failed;
        self.refusal = Some(refusal);
        self.fail(now, conn.path, errno);
    }

    /// Handles that an operation on a connection failed.
    pub(super) fn on_failed(&mut self, now: Instant, conn: ConnId, errno: Errno) {
        let Some(incarnation) = self.incarnation_of(conn) else { return };
        let of = &mut incarnation.conns[usize::from(conn.cid)];
        match incarnation.phase {
            Phase::Connecting(cid) if cid == conn.cid => of.state = ConnState::Failed,
            Phase::Draining | Phase::Disconnecting => return self.failed_while_ending(now, conn),
            _ => {}
        }
        self.fail(now, conn.path, errno);
    }

    /// Handles the failure of a connection that was given up while it was being made.
    fn failed_while_ending(&mut self, now: Instant, conn: ConnId) {
        let Some(incarnation) = self.incarnation_of(conn) else { return };
        if incarnation.conns[usize::from(conn.cid)].state == ConnState::Connecting {
            self.on_disconnected(now, conn);
        }
    }

    /// Handles `by` drain completions of a closed connection.
    pub(super) fn on_drained(&mut self, now: Instant, conn: ConnId, by: u8) {
        let Some(incarnation) = self.incarnation_of(conn) else { return };
        if incarnation.phase != Phase::Draining {
            return;
        }
        let of = &mut incarnation.conns[usize::from(conn.cid)];
        of.drained = of.drained.saturating_add(by);
        self.check_drained(now, conn.path);
    }

    /// Handles that the peer has disconnected, or has answered a disconnect.
    pub(super) fn on_disconnected(&mut self, now: Instant, conn: ConnId) {
        let Some(incarnation) = self.incarnation_of(conn) else { return };
        incarnation.conns[usize::from(conn.cid)].disconnected = true;
        match incarnation.phase {
            Phase::Draining => {}
            Phase::Disconnecting => self.check_disconnected(now, conn.path),
            _ => self.fail(now, conn.path, Errno::ECONNRESET),
        }
    }

    /// Ends an incarnation with an error [RS-5].
    pub(super) fn fail(&mut self, now: Instant, inc_id: PathId, errno: Errno) {
        let Some(incarnation) = self.incarnations.get_mut(inc_id) else { return };
        match incarnation.phase {
            Phase::Draining | Phase::Disconnecting => {}
            Phase::Connecting(_) | Phase::Info | Phase::Up | Phase::Quiescing => {
                incarnation.errno = errno;
                self.take_down(now, inc_id);
            }
        }
    }

    /// Takes no more IO on an incarnation, and tears it down when its requests have ended, at the
    /// latest after a second.
    pub(super) fn quiesce(&mut self, now: Instant, inc_id: PathId) {
        let Some(incarnation) = self.incarnations.get_mut(inc_id) else { return };
        match incarnation.phase {
            Phase::Up if incarnation.inflight > 0 => {
                incarnation.phase = Phase::Quiescing;
                incarnation.deadline = Some(now + QUIESCE_TIMEOUT);
            }
            Phase::Up | Phase::Connecting(_) | Phase::Info => self.take_down(now, inc_id),
            Phase::Quiescing | Phase::Draining | Phase::Disconnecting => {}
        }
    }

    /// Tears down quiescing incarnations whose last request has ended.
    pub(super) fn end_quiescing(&mut self, now: Instant) {
        if std::mem::take(&mut self.check_quiet) {
            for id in self.incarnations.ids() {
                let is = |incarnation: &super::incarnation::Incarnation| {
                    incarnation.phase == Phase::Quiescing && incarnation.inflight == 0
                };
                if self.incarnations.get(id).is_some_and(is) {
                    self.take_down(now, id);
                }
            }
        }
    }

    /// Tears an incarnation down: queue pairs to the error state, disconnects.
    pub(super) fn take_down(&mut self, now: Instant, inc_id: PathId) {
        // Drops work requests that are not posted yet: behind the drain markers no completion would
        // be awaited.
        self.batch.wrs.retain(|wr| wr.conn.path != inc_id);
        self.batch.recvs.retain(|recv| recv.conn.path != inc_id);
        let Some(incarnation) = self.incarnations.get_mut(inc_id) else { return };
        incarnation.phase = Phase::Draining;
        incarnation.deadline = Some(now + DRAIN_MAX);
        incarnation.heartbeat = None;
        self.drop_keys(inc_id);
        let Some(incarnation) = self.incarnations.get_mut(inc_id) else { return };
        let kernel_like = self.config.reconnect_delay.is_some() && self.state == SessionState::Open;
        let patience = if kernel_like { DISCONNECT_TIMEOUT } else { SHORT_DISCONNECT_TIMEOUT };
        incarnation.release_at = Some(now + patience);
        for (cid, conn) in incarnation.conns.iter_mut().enumerate() {
            if conn.state == ConnState::Failed {
                conn.drained = 2;
                conn.disconnected = true;
                continue;
            }
            conn.disconnected |= conn.state == ConnState::Connecting;
            let conn = ConnId { path: inc_id, cid: cid as u16 };
            self.orders.push_back(Order::Close { conn });
        }
        let (owner, errno, served) = (incarnation.path, incarnation.errno, incarnation.served);
        if let Some(id) = owner {
            self.path_lost(now, id, errno, served);
        }
        self.check_drained(now, inc_id);
        self.drop_unfenced();
    }

    /// Handles that a path has lost its incarnation.
    fn path_lost(&mut self, now: Instant, id: PathId, errno: Errno, served: bool) {
        let Some(path) = self.paths.get_mut(id) else { return };
        match path.state {
            PathState::Connected => {
                path.note_loss(now, served);
                self.change(id, PathState::Reconnecting);
            }
            PathState::Connecting => self.change(id, PathState::ConnectingErr),
            _ => {}
        }
        if self.state == SessionState::Opening {
            self.fail_open(now, errno);
        }
    }

    /// Handles that queues are not flushed in time: the device no longer executes commands.
    /// Destroys the queue pairs, after which the server can write nothing through them and no
    /// packet leaves. Requests move when that is done, as if the queues had been flushed [RT-100].
    pub(super) fn give_up_draining(&mut self, inc_id: PathId) {
        let Some(incarnation) = self.incarnations.get_mut(inc_id) else { return };
        for (cid, conn) in (0..).zip(&mut incarnation.conns) {
            if !conn.is_drained() {
                conn.state = ConnState::Forgotten;
                // The device can no longer receive the peer's answer.
                conn.disconnected = true;
                self.orders.push_back(Order::Forget { conn: ConnId { path: inc_id, cid } });
            }
        }
    }

    /// Once all queues are flushed: moves the requests, then waits for the peer.
    fn check_drained(&mut self, now: Instant, inc_id: PathId) {
        let Some(incarnation) = self.incarnations.get_mut(inc_id) else { return };
        if incarnation.phase != Phase::Draining
            || !incarnation.conns.iter().all(|conn| conn.is_drained())
        {
            return;
        }
        incarnation.phase = Phase::Disconnecting;
        let ending = matches!(self.state, SessionState::Closing | SessionState::Failing(_));
        let wait = if ending { SHORT_DISCONNECT_TIMEOUT } else { DISCONNECT_TIMEOUT };
        incarnation.deadline = Some(now + wait);
        let counted = std::mem::take(&mut incarnation.counted);
        if counted {
            self.move_requests(now, inc_id);
            self.up -= 1;
            if self.up == 0 {
                self.restart_delays(now);
            }
            if self.up == 0 && matches!(self.state, SessionState::Open | SessionState::Closing) {
                self.events.push_back(Event::Disconnected);
            }
        }
        self.check_disconnected(now, inc_id);
    }

    /// Moves the requests of a dead incarnation to other paths, with their permits; requests that
    /// no path takes fail [RS-8].
    fn move_requests(&mut self, now: Instant, inc_id: PathId) {
        let Some(incarnation) = self.incarnations.get_mut(inc_id) else { return };
        for conn in &mut incarnation.conns {
            conn.waiting.clear();
        }
        self.give_notice(inc_id);
        let (mut given_up, mut refused) = (false, false);
        for index in 0..self.requests.len() as u16 {
            let request = &self.requests[usize::from(index)];
            if !request.running || request.incarnation != inc_id {
                continue;
            }
            self.leave_incarnation(index);
            // The response came before the end; only the key had to be invalidated.
            if let Some(errno) = self.requests[usize::from(index)].answered.take() {
                self.end_request(now, index, errno);
                continue;
            }
            self.requests[usize::from(index)].moved = true;
            match self.submit(index) {
                Ok(id) => {
                    if let Some(path) = self.paths.get_mut(id) {
                        path.stats.failovers += 1;
                    }
                }
                Err(errno) => {
                    given_up = true;
                    // Any other error means that a path is connected [RT-59].
                    refused |= errno != Errno::ECONNABORTED;
                    self.end_request(now, index, errno.neg());
                }
            }
        }
        if given_up {
            self.fail_stale_joins(now, refused);
        }
    }

    /// Requests were given up that the server may still carry out, in chunks that now serve other
    /// requests. A server lets a path join only when all requests in progress at its INFO_REQ are
    /// done. So a path whose INFO_REQ is older than that must ask again. Those are the paths that
    /// wait for INFO_RSP. If requests were `refused` by connected paths, because these have no key
    /// or a shorter limit, these paths must ask again too: otherwise data of the chunks' next
    /// requests would arrive before the old requests are done, and those would write their results
    /// into it [RS-9].
    pub(super) fn fail_stale_joins(&mut self, now: Instant, refused: bool) {
        for id in self.incarnations.ids() {
            let phase = self.incarnations.get(id).map(|incarnation| incarnation.phase);
            if phase == Some(Phase::Info) || refused && phase == Some(Phase::Up) {
                self.fail(now, id, Errno::ECONNABORTED);
            }
        }
    }

    /// Removes an incarnation once the peer has answered every disconnect.
    fn check_disconnected(&mut self, now: Instant, inc_id: PathId) {
        let disconnected = self.incarnations.get(inc_id).is_some_and(|incarnation| {
            incarnation.phase == Phase::Disconnecting
                && incarnation.conns.iter().all(|conn| conn.disconnected)
        });
        if disconnected {
            self.forget(now, inc_id);
        }
    }

    /// Detaches an incarnation from its path, which no longer waits for its end.
    pub(super) fn release(&mut self, now: Instant, inc_id: PathId) {
        let Some(incarnation) = self.incarnations.get_mut(inc_id) else { return };
        incarnation.release_at = None;
        let (errno, busy) = (incarnation.errno, incarnation.busy);
        let Some(id) = incarnation.path.take() else { return };
        let Some(path) = self.paths.get_mut(id) else { return };
        path.incarnation = None;
        self.incarnation_gone(now, id, errno, busy);
    }

    /// Destroys everything of an incarnation.
    pub(super) fn forget(&mut self, now: Instant, inc_id: PathId) {
        let Some(incarnation) = self.incarnations.get(inc_id) else { return };
        for (cid, conn) in (0..).zip(&incarnation.conns) {
            if conn.state != ConnState::Forgotten {
                self.orders.push_back(Order::Forget { conn: ConnId { path: inc_id, cid } });
            }
        }
        let memory = incarnation.memory.as_ref().map(|(region, _)| *region);
        if let Some(region) = memory {
            self.drop_region(region);
        }
        self.release(now, inc_id);
        self.incarnations.remove(inc_id);
    }

    /// Shortens all timeouts to a second, because the session ends.
    pub(super) fn shorten_timeouts(&mut self, now: Instant) {
        let soon = now + SHORT_DISCONNECT_TIMEOUT;
        for id in self.incarnations.ids() {
            let Some(incarnation) = self.incarnations.get_mut(id) else { continue };
            if incarnation.phase == Phase::Disconnecting {
                incarnation.deadline = incarnation.deadline.map(|at| at.min(soon));
            }
            incarnation.release_at = incarnation.release_at.map(|at| at.min(soon));
        }
    }
}
