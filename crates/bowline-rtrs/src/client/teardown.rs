//! The end of a link: its queues run empty, its requests move to other paths, its peer is left
//! [RS-5] to [RS-8], [RT-91].

use core::time::Duration;

use bowline_verbs::RejectReason;
use bowline_wire::rtrs::ConAnswer;

use super::link::{ConnState, Phase};
use super::session::{Event, Life};
use super::{PathState, Refusal, Session};
use crate::config::DRAIN_MAX;
use crate::{ConnId, Errno, Instant, Order, PathId};

/// Longest wait for the peer's answers to the disconnects [RS-7].
const PART_MAX: Duration = Duration::from_secs(30);
/// How long a path waits for them, and the session at its end [RT-91], [RT-92].
const PART_SOON: Duration = Duration::from_secs(1);
/// How long requests in flight may go on when a path is closed on order [RS-8].
const QUIET_MAX: Duration = Duration::from_secs(1);

impl Session {
    /// The server refused a connection [RT-31].
    pub(super) fn on_refused(
        &mut self,
        now: Instant,
        conn: ConnId,
        reason: RejectReason,
        private: &[u8],
    ) {
        let Some(link) = self.link_of(conn) else { return };
        if link.phase != Phase::Connecting(conn.cid) {
            return self.never_made(now, conn);
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
        link.busy = consumer && conn.cid == 0 && errno == Errno::ECONNRESET;
        link.conns[usize::from(conn.cid)].state = ConnState::Failed;
        self.refusal = Some(refusal);
        self.fail(now, conn.path, errno);
    }

    /// Something could not be done on a connection.
    pub(super) fn on_failed(&mut self, now: Instant, conn: ConnId, errno: Errno) {
        let Some(link) = self.link_of(conn) else { return };
        let of = &mut link.conns[usize::from(conn.cid)];
        match link.phase {
            Phase::Connecting(cid) if cid == conn.cid => of.state = ConnState::Failed,
            Phase::Draining | Phase::Parting => return self.never_made(now, conn),
            _ => {}
        }
        self.fail(now, conn.path, errno);
    }

    /// A connection that was given up while it was being made has failed by itself.
    fn never_made(&mut self, now: Instant, conn: ConnId) {
        let Some(link) = self.link_of(conn) else { return };
        if link.conns[usize::from(conn.cid)].state == ConnState::Connecting {
            self.on_disconnected(now, conn);
        }
    }

    /// The queues of a closed connection have run empty by so much.
    pub(super) fn on_drained(&mut self, now: Instant, conn: ConnId, by: u8) {
        let Some(link) = self.link_of(conn) else { return };
        if link.phase != Phase::Draining {
            return;
        }
        let of = &mut link.conns[usize::from(conn.cid)];
        of.drained = of.drained.saturating_add(by);
        self.look_at_drains(now, conn.path);
    }

    /// The peer has left, or answered that this side has.
    pub(super) fn on_disconnected(&mut self, now: Instant, conn: ConnId) {
        let Some(link) = self.link_of(conn) else { return };
        link.conns[usize::from(conn.cid)].parted = true;
        match link.phase {
            Phase::Draining => {}
            Phase::Parting => self.look_at_parting(now, conn.path),
            _ => self.fail(now, conn.path, Errno::ECONNRESET),
        }
    }

    /// An error ends a link [RS-5].
    pub(super) fn fail(&mut self, now: Instant, lid: PathId, errno: Errno) {
        let Some(link) = self.links.get_mut(lid) else { return };
        match link.phase {
            Phase::Draining | Phase::Parting => {}
            Phase::Connecting(_) | Phase::Info | Phase::Up | Phase::Quiet => {
                link.errno = errno;
                self.take_down(now, lid);
            }
        }
    }

    /// Takes no more IO on a link, and ends it when what is in flight has ended, or a second is
    /// over.
    pub(super) fn quiet(&mut self, now: Instant, lid: PathId) {
        let Some(link) = self.links.get_mut(lid) else { return };
        match link.phase {
            Phase::Up if link.inflight > 0 => {
                link.phase = Phase::Quiet;
                link.deadline = Some(now + QUIET_MAX);
            }
            Phase::Up | Phase::Connecting(_) | Phase::Info => self.take_down(now, lid),
            Phase::Quiet | Phase::Draining | Phase::Parting => {}
        }
    }

    /// Ends the links whose last request has ended.
    pub(super) fn look_at_quiet(&mut self, now: Instant) {
        if std::mem::take(&mut self.look_quiet) {
            for id in self.links.ids() {
                let is =
                    |link: &super::link::Link| link.phase == Phase::Quiet && link.inflight == 0;
                if self.links.get(id).is_some_and(is) {
                    self.take_down(now, id);
                }
            }
        }
    }

    /// Takes a link down: queue pairs to error, disconnects.
    pub(super) fn take_down(&mut self, now: Instant, lid: PathId) {
        // What is not posted yet is not: behind the drain markers nobody would wait for it.
        self.batch.wrs.retain(|wr| wr.conn.path != lid);
        self.batch.recvs.retain(|recv| recv.conn.path != lid);
        let Some(link) = self.links.get_mut(lid) else { return };
        link.phase = Phase::Draining;
        link.deadline = Some(now + DRAIN_MAX);
        link.heartbeat = None;
        self.drop_keys(lid);
        let Some(link) = self.links.get_mut(lid) else { return };
        let kernel_like = self.config.reconnect_delay.is_some() && self.life == Life::Open;
        let patience = if kernel_like { PART_MAX } else { PART_SOON };
        link.release_at = Some(now + patience);
        for (cid, conn) in link.conns.iter_mut().enumerate() {
            if conn.state == ConnState::Failed {
                conn.drained = 2;
                conn.parted = true;
                continue;
            }
            conn.parted |= conn.state == ConnState::Connecting;
            let conn = ConnId { path: lid, cid: cid as u16 };
            self.orders.push_back(Order::Close { conn });
        }
        let (owner, errno) = (link.path, link.errno);
        if let Some(id) = owner {
            self.path_lost(now, id, errno);
        }
        self.look_at_drains(now, lid);
        self.look_at_lingering();
    }

    /// The path of a link hears that it is lost.
    fn path_lost(&mut self, now: Instant, id: PathId, errno: Errno) {
        let Some(path) = self.paths.get_mut(id) else { return };
        match path.state {
            PathState::Connected => {
                path.note_loss(now);
                self.change(id, PathState::Reconnecting);
            }
            PathState::Connecting => self.change(id, PathState::ConnectingErr),
            _ => {}
        }
        if self.life == Life::Opening {
            self.fail_open(now, errno);
        }
    }

    /// Queues of a link do not run empty: its device no longer does what it is told. Their queue
    /// pairs are removed, after which the server can write nothing by them and nothing leaves any
    /// more; requests move when that is done, as if they had run empty [RT-100].
    pub(super) fn give_up_draining(&mut self, lid: PathId) {
        let Some(link) = self.links.get_mut(lid) else { return };
        for (cid, conn) in (0..).zip(&mut link.conns) {
            if !conn.is_drained() {
                conn.state = ConnState::Forgotten;
                // Nobody is left who could hear it.
                conn.parted = true;
                self.orders.push_back(Order::Forget { conn: ConnId { path: lid, cid } });
            }
        }
    }

    /// When all queues of a link are empty: moves its requests, then waits for the peer.
    fn look_at_drains(&mut self, now: Instant, lid: PathId) {
        let Some(link) = self.links.get_mut(lid) else { return };
        if link.phase != Phase::Draining || !link.conns.iter().all(|conn| conn.is_drained()) {
            return;
        }
        link.phase = Phase::Parting;
        let ending = matches!(self.life, Life::Closing | Life::Failing(_));
        let wait = if ending { PART_SOON } else { PART_MAX };
        link.deadline = Some(now + wait);
        let counted = std::mem::take(&mut link.counted);
        if counted {
            self.move_requests(now, lid);
            self.up -= 1;
            if self.up == 0 {
                self.retry_soon(now);
            }
            if self.up == 0 && matches!(self.life, Life::Open | Life::Closing) {
                self.events.push_back(Event::Disconnected);
            }
        }
        self.look_at_parting(now, lid);
    }

    /// Moves the requests of a dead link to other paths, with their permits; those that none takes
    /// end [RS-8].
    fn move_requests(&mut self, now: Instant, lid: PathId) {
        let Some(link) = self.links.get_mut(lid) else { return };
        for conn in &mut link.conns {
            conn.waiting.clear();
        }
        self.give_notice(lid);
        let (mut given_up, mut refused) = (false, false);
        for index in 0..self.requests.len() as u16 {
            let request = &self.requests[usize::from(index)];
            if !request.running || request.link != lid {
                continue;
            }
            self.leave_link(index);
            // Answered before the end, and only its key was in the way.
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
                    // Else no path is connected [RT-59].
                    refused |= errno != Errno::ECONNABORTED;
                    self.end_request(now, index, errno.neg());
                }
            }
        }
        if given_up {
            self.fail_joined(now, refused);
        }
    }

    /// Requests were given up that the server may still carry out, in chunks that are used for
    /// others now. A server lets a path join only when what is under way at its INFO_REQ is done,
    /// so a path whose INFO_REQ is older than that has to ask again. Those are the paths that wait
    /// for the answer, and, where requests were `refused` by paths that are up, because they have
    /// no key there or are too long, these as well: data of the chunks' next requests would be
    /// there before the old ones are done, and these would write their results into it [RS-9].
    pub(super) fn fail_joined(&mut self, now: Instant, refused: bool) {
        for id in self.links.ids() {
            let phase = self.links.get(id).map(|link| link.phase);
            if phase == Some(Phase::Info) || refused && phase == Some(Phase::Up) {
                self.fail(now, id, Errno::ECONNABORTED);
            }
        }
    }

    /// When the peer has answered every disconnect, nothing is left of a link.
    fn look_at_parting(&mut self, now: Instant, lid: PathId) {
        let parted = self.links.get(lid).is_some_and(|link| {
            link.phase == Phase::Parting && link.conns.iter().all(|conn| conn.parted)
        });
        if parted {
            self.forget(now, lid);
        }
    }

    /// The path no longer waits for the end of a link, which goes on in the background.
    pub(super) fn release(&mut self, now: Instant, lid: PathId) {
        let Some(link) = self.links.get_mut(lid) else { return };
        link.release_at = None;
        let (errno, busy) = (link.errno, link.busy);
        let Some(id) = link.path.take() else { return };
        let Some(path) = self.paths.get_mut(id) else { return };
        path.link = None;
        self.link_gone(now, id, errno, busy);
    }

    /// Nothing is left of a link.
    pub(super) fn forget(&mut self, now: Instant, lid: PathId) {
        let Some(link) = self.links.get(lid) else { return };
        for (cid, conn) in (0..).zip(&link.conns) {
            if conn.state != ConnState::Forgotten {
                self.orders.push_back(Order::Forget { conn: ConnId { path: lid, cid } });
            }
        }
        let memory = link.memory.as_ref().map(|(region, _)| *region);
        if let Some(region) = memory {
            self.drop_region(region);
        }
        self.release(now, lid);
        self.links.remove(lid);
    }

    /// The session ends: nothing in the background keeps it longer than a second.
    pub(super) fn hurry(&mut self, now: Instant) {
        let soon = now + PART_SOON;
        for id in self.links.ids() {
            let Some(link) = self.links.get_mut(id) else { continue };
            if link.phase == Phase::Parting {
                link.deadline = link.deadline.map(|at| at.min(soon));
            }
            link.release_at = link.release_at.map(|at| at.min(soon));
        }
    }
}
