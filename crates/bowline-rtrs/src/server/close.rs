//! The end of paths and sessions [RS-19].
//!
//! A path is closed in three steps. Its queue pairs are killed and emptied, or removed if their
//! device does not empty them [RT-100]; then its chunks may be given to requests of other paths,
//! and the session does not know it any more, so that the client can come back at once. Until the
//! client has heard of the end, or for 30 s, the connections are kept to tell it again [RT-93].

use core::fmt;
use core::time::Duration;

use bowline_verbs::Status;

use super::chunks::OpState;
use super::path::{ConnState, PathState};
use super::session::Link;
use super::{Server, ServerEvent, SessId};
use crate::config::DRAIN_MAX;
use crate::{ConnId, Errno, Instant, Order, PathId};

/// How long the end of a connection is told to a client that does not answer [RS-6].
const LINGER: Duration = Duration::from_secs(30);
/// The same when the server ends [RT-92].
const LINGER_LAST: Duration = Duration::from_secs(1);

/// Why a path was closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum CloseReason {
    /// [`Server::disconnect_path`] or [`Server::close`].
    Local,
    /// The client disconnected.
    Disconnected,
    /// Something could not be made or posted.
    Failed(Errno),
    /// A work request failed; the connection is broken.
    Completion(Status),
    /// The client does not answer [RT-60].
    Heartbeat,
    /// Nothing is acknowledged, and another path of the session works [RT-93].
    Silent,
    /// Nothing had proved that the client is there, and others asked [RT-66].
    PushedOut,
    /// It was not established in time [RT-66].
    NotEstablished,
    /// The client repeated a request of this path over another one: it has given this one up
    /// [RS-9].
    Overtaken,
    /// The client says over another path that it has given up this one [RT-101].
    GivenUp,
    /// The client, or the name of its session, is not one that may come [RT-64].
    NotAllowed,
    /// Another session has the name [RT-20].
    NameTaken,
    /// INFO_REQ is malformed, or came when it should not [RT-68].
    Info,
    /// A message that is not one for a server, or not one for now [RT-67].
    Message,
    /// A request names a chunk or an offset that does not exist [RT-67].
    Chunk,
    /// A request names a chunk of which another is not answered yet [RT-67].
    ChunkBusy,
    /// The header of a request is malformed or breaks a limit [RT-67].
    Header,
    /// Too many requests wait for their chunks [RT-66].
    TooMany,
    /// The key of a chunk could not be withdrawn, so its request was not carried out [RT-67].
    Withdraw,
}

impl CloseReason {
    /// Tells whether the client broke a rule.
    pub const fn is_violation(self) -> bool {
        matches!(
            self,
            Self::Info
                | Self::Message
                | Self::Chunk
                | Self::ChunkBusy
                | Self::Header
                | Self::TooMany
                | Self::Withdraw
        )
    }

    /// Tells whether the client, or the name of its session, was not admitted.
    pub const fn is_refusal(self) -> bool {
        matches!(self, Self::NotAllowed | Self::NameTaken)
    }
}

impl fmt::Display for CloseReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Local => "disconnected here",
            Self::Disconnected => "disconnected by the client",
            Self::Failed(errno) => return errno.fmt(f),
            Self::Completion(Status::RetryExcErr) => "nothing is acknowledged",
            Self::Completion(status) => return write!(f, "a work request failed: {status:?}"),
            Self::Heartbeat => "the client does not answer",
            Self::Silent => "nothing is acknowledged, and another path works",
            Self::PushedOut => "nothing came from the client, and others asked",
            Self::NotEstablished => "not established in time",
            Self::Overtaken => "its requests came over another path",
            Self::GivenUp => "given up by the client",
            Self::NotAllowed => "not admitted",
            Self::NameTaken => "another session has this name",
            Self::Info => "a wrong INFO_REQ",
            Self::Message => "a message that does not belong here",
            Self::Chunk => "a request in no chunk",
            Self::ChunkBusy => "a request in a chunk that is in use",
            Self::Header => "a malformed request",
            Self::TooMany => "too many requests wait",
            Self::Withdraw => "a key could not be withdrawn",
        })
    }
}

impl Server {
    /// Closes a path [RS-40].
    pub fn disconnect_path(&mut self, now: Instant, path: PathId) {
        self.close_path(now, path, CloseReason::Local);
    }

    /// Closes everything; nobody is admitted any more [RS-28]. [`ServerEvent::Closed`] comes when
    /// everything is answered and gone, for which silent clients are waited 1 s.
    pub fn close(&mut self, now: Instant) {
        self.closing = true;
        for slot in 0..self.paths.slots() {
            let Some(path) = self.paths.at_mut(slot) else { continue };
            let last = now + LINGER_LAST;
            if matches!(path.state, PathState::Closing | PathState::Closed) {
                path.deadline = path.deadline.min(last);
                path.drain_by = path.drain_by.min(last);
            }
            let id = path.id;
            self.close_path(now, id, CloseReason::Local);
            self.wake_at(last);
        }
        self.tell_closed();
    }

    pub(super) fn close_path(&mut self, now: Instant, id: PathId, reason: CloseReason) {
        let Some(path) = self.paths.get_mut(id) else { return };
        if matches!(path.state, PathState::Closing | PathState::Closed) {
            return;
        }
        let (was, slot) = (super::info(path), path.session);
        path.state = PathState::Closing;
        path.heartbeat = None;
        path.deadline = now + if self.closing { LINGER_LAST } else { LINGER };
        path.drain_by = path.deadline.min(now + DRAIN_MAX);
        let errno = match reason {
            CloseReason::Failed(errno) => errno,
            _ => Errno::ECONNRESET,
        };
        let (drain_by, count) = (path.drain_by, path.conns.len());
        self.remove_stranger(id);
        for cid in 0..count {
            let conn = ConnId { path: id, cid };
            let Some(closed) = self.conn_mut(conn) else { continue };
            match closed.state {
                ConnState::Asked => {
                    closed.state = ConnState::Gone;
                    if let Some(request) = closed.request.take() {
                        self.refuse(request, errno);
                    }
                }
                ConnState::Live => {
                    closed.state = ConnState::Closing(0);
                    for late in std::mem::take(&mut closed.queue.late) {
                        if let Some(op) = self.ops.find(late.op, OpState::Queued) {
                            op.state = OpState::Answered;
                            self.counters.answers_dropped += 1;
                        }
                    }
                    self.orders.push_back(Order::Close { conn });
                }
                _ => {}
            }
        }
        self.forget_waiting(now, id);
        self.counters.paths_closed += 1;
        self.counters.paths_violated += u64::from(reason.is_violation());
        self.counters.paths_refused += u64::from(reason.is_refusal());
        self.wake_at(drain_by);
        if let Some(session) = self.sessions.get(slot) {
            let connected = was.state == PathState::Connected;
            let name = session.name.clone().filter(|_| connected);
            let (session, path) = (session.id, was);
            self.events.push_back(ServerEvent::PathClosed { session, name, path, reason });
        }
        self.empty_if_drained(now, id);
    }

    /// Requests of a path that waited for a chunk are over.
    fn forget_waiting(&mut self, now: Instant, id: PathId) {
        let Some(path) = self.paths.get_mut(id).filter(|path| path.waiting > 0) else { return };
        let Some(session) = self.sessions.get_mut(path.session) else { return };
        let mut gone = Vec::new();
        for chunk in &mut session.chunks {
            chunk.forget(&mut self.ops, id, &mut gone);
        }
        gone.iter().for_each(|epoch| session.end(*epoch));
        session.waiting -= gone.len();
        self.waiting -= gone.len();
        path.waiting -= gone.len();
        path.stats.inflight = path.stats.inflight.saturating_sub(gone.len() as u32);
        self.counters.requests_dropped += gone.len() as u64;
        let slot = path.session;
        self.connect_joined(now, slot);
    }

    /// One of the two markers at the ends of a connection's queues.
    pub(super) fn marker(&mut self, now: Instant, conn: ConnId) {
        let Some(closed) = self.conn_mut(conn) else { return };
        match closed.state {
            ConnState::Closing(0) => closed.state = ConnState::Closing(1),
            ConnState::Closing(_) => self.drained(now, conn),
            _ => {}
        }
    }

    /// The queues of a connection are empty, or gone.
    pub(super) fn drained(&mut self, now: Instant, conn: ConnId) {
        let Some(drained) = self.conn_mut(conn) else { return };
        match drained.state {
            ConnState::Closing(_) => drained.state = ConnState::Drained,
            ConnState::Forgetting => drained.state = ConnState::Gone,
            _ => return,
        }
        self.forget_if_told(conn);
        self.empty_if_drained(now, conn.path);
    }

    /// The client has disconnected, or answered that this side has.
    pub(super) fn disconnected(&mut self, now: Instant, conn: ConnId) {
        let Some(told) = self.conn_mut(conn) else { return };
        told.disconnected = true;
        self.close_path(now, conn.path, CloseReason::Disconnected);
        self.forget_if_told(conn);
        self.remove_if_gone(conn.path);
    }

    /// Forgets a connection of whose end the client knows.
    fn forget_if_told(&mut self, conn: ConnId) {
        let Some(told) = self.conn_mut(conn) else { return };
        if told.state == ConnState::Drained && (told.disconnected || !told.established) {
            told.state = ConnState::Gone;
            self.orders.push_back(Order::Forget { conn });
        }
    }

    /// Queues of a closed path do not run empty: its device no longer does what it is told. Their
    /// queue pairs are removed, and when that is done the path is as if they had run empty
    /// [RT-100].
    pub(super) fn give_up_draining(&mut self, id: PathId) {
        self.forget_those(id, |state| {
            matches!(state, ConnState::Closing(_)).then_some(ConnState::Forgetting)
        });
    }

    /// The patience with a closed path's client is over.
    pub(super) fn give_up_waiting(&mut self, id: PathId) {
        self.forget_those(id, |state| {
            matches!(state, ConnState::Drained).then_some(ConnState::Gone)
        });
        self.remove_if_gone(id);
    }

    /// Forgets the connections of a path that are to be in another state then.
    fn forget_those(&mut self, id: PathId, next: impl Fn(ConnState) -> Option<ConnState>) {
        let Some(path) = self.paths.get_mut(id) else { return };
        for (cid, late) in path.conns.iter_mut() {
            if let Some(state) = next(late.state) {
                late.state = state;
                self.orders.push_back(Order::Forget { conn: ConnId { path: id, cid } });
            }
        }
    }

    /// No queue pair of the path lives any more: its chunks are free for other paths, the session
    /// forgets it.
    fn empty_if_drained(&mut self, now: Instant, id: PathId) {
        let Some(path) = self.paths.get_mut(id) else { return };
        if path.state != PathState::Closing || !path.is_drained() {
            return;
        }
        path.state = PathState::Closed;
        self.given_up -= usize::from(path.given_up);
        let slot = path.session;
        self.orders.push_back(Order::DropRegion { region: path.own.region });
        if let Some(region) = path.region.take() {
            self.orders.push_back(Order::DropRegion { region });
        }
        let held: Vec<u32> = self.sessions.get(slot).map_or_else(Vec::new, |session| {
            let holders = session.chunks.iter().map(|chunk| chunk.holder);
            holders.filter(|&holder| self.ops.is_answered(holder, id)).collect()
        });
        held.into_iter().for_each(|op| self.release(op));
        if let Some(session) = self.sessions.get_mut(slot) {
            session.paths.retain(|&path| path != id.slot);
        }
        self.connect_joined(now, slot);
        self.end_slot_if_over(slot);
        self.remove_if_gone(id);
    }

    fn remove_if_gone(&mut self, id: PathId) {
        let gone = |path: &&super::path::Path| path.state == PathState::Closed && path.is_gone();
        if self.paths.get(id).filter(gone).is_some() {
            self.paths.remove(id.slot);
            self.tell_closed();
        }
    }

    pub(super) fn end_slot_if_over(&mut self, slot: u32) {
        if let Some(session) = self.sessions.get(slot) {
            self.end_session_if_over(session.id);
        }
    }

    /// Ends a session without paths and operations, unless the upper layer is just being asked
    /// about it.
    pub(super) fn end_session_if_over(&mut self, id: SessId) {
        let Some(session) = self.sessions.find(id) else { return };
        if !session.is_ending() || session.running > 0 || session.link == Link::Asked {
            return;
        }
        if session.link == Link::Up {
            self.events.push_back(ServerEvent::Down { session: id });
        }
        self.sessions.remove(id.slot);
        self.tell_closed();
    }

    fn tell_closed(&mut self) {
        if self.closing && self.paths.is_empty() && self.sessions.len() == 0 {
            self.events.push_back(ServerEvent::Closed);
        }
    }
}
