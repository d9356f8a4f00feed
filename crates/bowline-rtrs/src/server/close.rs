//! The end of paths and sessions [RS-19].
//!
//! A path is closed in three steps. Its queue pairs are taken to the error state and flushed, or
//! destroyed if their device does not flush them [RT-100]. Then its chunks may be given to requests
//! of other paths, and the session forgets the path, so that the client can come back at once. The
//! connections are kept until the client has learned of the end, for at most 30 s, to tell it again
//! [RT-93].

use core::fmt;
use core::time::Duration;

use bowline_verbs::Status;

use super::chunks::OpState;
use super::path::{ConnState, PathState};
use super::session::Consent;
use super::{Server, ServerEvent, SessId};
use crate::config::DRAIN_MAX;
use crate::{ConnId, Errno, Instant, Order, PathId};

/// How long the disconnect is repeated to a client that does not answer [RS-6].
const LINGER: Duration = Duration::from_secs(30);
/// The same limit while the server is closing [RT-92].
const LINGER_LAST: Duration = Duration::from_secs(1);

/// The reason why a path was closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum CloseReason {
    /// [`Server::disconnect_path`] or [`Server::close`].
    Local,
    /// The client disconnected.
    Disconnected,
    /// An object could not be made, or a work request not posted.
    Failed(Errno),
    /// A work request failed; the connection is broken.
    Completion(Status),
    /// The client does not answer heartbeats [RT-60].
    Heartbeat,
    /// Nothing was acknowledged, and another path of the session works [RT-93].
    Silent,
    /// Its client begins it once more: the attempt that it belonged to is over [RT-102].
    ComesAgain,
    /// Its client was not proven to exist, and other clients needed the place [RT-66].
    PushedOut,
    /// The path was not established in time [RT-66].
    NotEstablished,
    /// The client repeated a request of this path over another one, so it has given this one up
    /// [RS-9].
    Overtaken,
    /// The client gave notice over another path that it has given up this one [RT-101].
    GivenUp,
    /// The client's address, or the name of its session, is not allowed [RT-64].
    NotAllowed,
    /// Another session has the name [RT-20].
    NameTaken,
    /// INFO_REQ is malformed, or came in a wrong state [RT-68].
    Info,
    /// A message that a server does not accept, or not in this state [RT-67].
    Message,
    /// A request names a chunk or an offset that does not exist [RT-67].
    Chunk,
    /// A request names a chunk whose present request is not answered yet [RT-67].
    ChunkBusy,
    /// The header of a request is malformed or breaks a limit [RT-67].
    Header,
    /// Too many requests wait for their chunks [RT-66].
    TooMany,
    /// The key of a chunk could not be withdrawn, so its request was not carried out [RT-67].
    Withdraw,
}

impl CloseReason {
    /// Whether the client broke a rule.
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

    /// Whether the client, or the name of its session, was not admitted.
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
            Self::ComesAgain => "the client begins it once more",
            Self::PushedOut => "nothing came from the client, and others asked",
            Self::NotEstablished => "not established in time",
            Self::Overtaken => "its requests came over another path",
            Self::GivenUp => "given up by the client",
            Self::NotAllowed => "not admitted",
            Self::NameTaken => "another session has this name",
            Self::Info => "an invalid INFO_REQ",
            Self::Message => "an unexpected message",
            Self::Chunk => "a request outside the chunks",
            Self::ChunkBusy => "a request in a chunk that is in use",
            Self::Header => "a malformed request",
            Self::TooMany => "too many requests are waiting",
            Self::Withdraw => "a memory key could not be invalidated",
        })
    }
}

impl Server {
    /// Closes a path [RS-40].
    pub fn disconnect_path(&mut self, now: Instant, path: PathId) {
        self.close_path(now, path, CloseReason::Local);
    }

    /// Closes everything; no client is admitted any more [RS-28]. [`ServerEvent::Closed`] comes
    /// when all operations are answered and all paths gone; silent clients delay it by at most 1 s.
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
        self.report_closed();
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
                ConnState::Requested => {
                    closed.state = ConnState::Gone;
                    if let Some(request) = closed.request.take() {
                        self.refuse(request, errno);
                    }
                }
                ConnState::Live => {
                    closed.state = ConnState::Closing(0);
                    for late in std::mem::take(&mut closed.queue.deferred) {
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

    /// Drops requests of a path that wait for a chunk.
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

    /// Handles one of the two drain markers of a connection.
    pub(super) fn on_drain_marker(&mut self, now: Instant, conn: ConnId) {
        let Some(closed) = self.conn_mut(conn) else { return };
        match closed.state {
            ConnState::Closing(0) => closed.state = ConnState::Closing(1),
            ConnState::Closing(_) => self.on_drained(now, conn),
            _ => {}
        }
    }

    /// Handles that the queues of a connection are flushed, or destroyed.
    pub(super) fn on_drained(&mut self, now: Instant, conn: ConnId) {
        let Some(drained) = self.conn_mut(conn) else { return };
        match drained.state {
            ConnState::Closing(_) => drained.state = ConnState::Drained,
            ConnState::Forgetting => drained.state = ConnState::Gone,
            _ => return,
        }
        self.forget_if_client_knows(conn);
        self.empty_if_drained(now, conn.path);
    }

    /// Handles that the client has disconnected, or has answered a disconnect.
    pub(super) fn on_disconnected(&mut self, now: Instant, conn: ConnId) {
        let Some(told) = self.conn_mut(conn) else { return };
        told.disconnected = true;
        self.close_path(now, conn.path, CloseReason::Disconnected);
        self.forget_if_client_knows(conn);
        self.remove_if_gone(conn.path);
    }

    /// Destroys a connection whose end the client knows.
    fn forget_if_client_knows(&mut self, conn: ConnId) {
        let Some(told) = self.conn_mut(conn) else { return };
        if told.state == ConnState::Drained && (told.disconnected || !told.established) {
            told.state = ConnState::Gone;
            self.orders.push_back(Order::Forget { conn });
        }
    }

    /// Handles that the queues of a closed path are not flushed in time: the device does not
    /// execute commands any more. Destroys the queue pairs; when that is done, the path counts as
    /// flushed [RT-100].
    pub(super) fn give_up_draining(&mut self, id: PathId) {
        self.forget_conns(id, |state| {
            matches!(state, ConnState::Closing(_)).then_some(ConnState::Forgetting)
        });
    }

    /// Ends the wait for the client of a closed path.
    pub(super) fn give_up_waiting(&mut self, id: PathId) {
        self.forget_conns(id, |state| {
            matches!(state, ConnState::Drained).then_some(ConnState::Gone)
        });
        self.remove_if_gone(id);
    }

    /// Destroys the connections for which `next` gives a new state.
    fn forget_conns(&mut self, id: PathId, next: impl Fn(ConnState) -> Option<ConnState>) {
        let Some(path) = self.paths.get_mut(id) else { return };
        for (cid, late) in path.conns.iter_mut() {
            if let Some(state) = next(late.state) {
                late.state = state;
                self.orders.push_back(Order::Forget { conn: ConnId { path: id, cid } });
            }
        }
    }

    /// Handles that all queue pairs of the path are dead: its chunks are free for other paths, and
    /// the session forgets it.
    fn empty_if_drained(&mut self, now: Instant, id: PathId) {
        let Some(path) = self.paths.get_mut(id) else { return };
        if path.state != PathState::Closing || !path.is_drained() {
            return;
        }
        path.state = PathState::Closed;
        self.given_up -= usize::from(path.given_up);
        let slot = path.session;
        self.orders.push_back(Order::DropRegion { region: path.internal.region });
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
        let again = self.paths.get_mut(id).and_then(|path| path.again.take());
        self.connect_joined(now, slot);
        self.remove_if_gone(id);
        if let Some(asked) = again {
            self.add_again(now, slot, &asked);
        }
        self.end_slot_if_over(slot);
    }

    fn remove_if_gone(&mut self, id: PathId) {
        let gone = |path: &&super::path::Path| path.state == PathState::Closed && path.is_gone();
        if self.paths.get(id).filter(gone).is_some() {
            self.paths.remove(id.slot);
            self.report_closed();
        }
    }

    pub(super) fn end_slot_if_over(&mut self, slot: u32) {
        if let Some(session) = self.sessions.get(slot) {
            self.end_session_if_over(session.id);
        }
    }

    /// Ends a session without paths and operations, unless the upper layer is being asked about it.
    pub(super) fn end_session_if_over(&mut self, id: SessId) {
        let Some(session) = self.sessions.find(id) else { return };
        if !session.is_ending() || session.running > 0 || session.consent == Consent::Asked {
            return;
        }
        if session.consent == Consent::Up {
            self.events.push_back(ServerEvent::Down { session: id });
        }
        self.sessions.remove(id.slot);
        self.report_closed();
    }

    fn report_closed(&mut self) {
        if self.closing && self.paths.is_empty() && self.sessions.len() == 0 {
            self.events.push_back(ServerEvent::Closed);
        }
    }
}
