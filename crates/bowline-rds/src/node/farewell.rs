//! The orderly end of a node: each peer gets the last acknowledgements, and learns that they are
//! the last. Spec: `docs/spec/rds.md`, section 20.6.

use std::time::Duration;

use bowline_base::Instant;

use super::Node;
use super::timers::Timer;
use crate::api::{CloseReason, Event, Output};
use crate::conn::Conn;
use crate::error::Error;
use crate::ids::{ConnId, LinkId, RdmaLinkId, SocketId};
use crate::link::{Farewell, Link, LinkState, Role};
use crate::path::Path;
use crate::rdma::{RdmaLink, RdmaState};
use crate::socket::{Sock, interest_bit, to_socket_addr};

/// How long a connection that broke is expected back: peers dial again at once, and one that has
/// not done so by then is away.
const UNTOLD_TIME: Duration = Duration::from_millis(500);
/// Longest time that a node which ends waits for such connections.
const WAIT_TIME: Duration = Duration::from_millis(300);
/// Age at which a connection counts for its peer though nothing came back on it, with time for the
/// peer to notice.
const COUNTS_AFTER: Duration = Duration::from_millis(250);
/// How long a peer that has ended is expected back before those who wait for it are told: services
/// are restarted within this time.
const GONE_TIME: Duration = Duration::from_secs(1);

impl Node {
    /// Begins to end in good order [R-2050]: no message is sent any more, all that was taken is
    /// acknowledged, and each connection ends with a farewell. Connections are made only to tell
    /// peers what a connection that broke may not have told them. When
    /// [`is_told`](Self::is_told), or after a time limit, [`close_links`](Self::close_links) ends
    /// the rest.
    pub fn end(&mut self, now: Instant) {
        self.now = now;
        if self.ending.is_some() {
            return;
        }
        self.ending = Some(now + WAIT_TIME);
        self.arm(now + WAIT_TIME, Timer::Farewell);
        self.finish_links();
    }

    /// Ends all connections in good order, as far as they have come.
    pub(super) fn finish_links(&mut self) {
        let links: Vec<_> = self.links.iter().map(|(id, _)| LinkId(id)).collect();
        for id in links {
            self.finish_link(id);
        }
        let over_rdma: Vec<_> = self.rdma_links.iter().map(|(id, _)| RdmaLinkId(id)).collect();
        for id in over_rdma {
            self.finish_rdma(id);
        }
    }

    /// Tells whether all peers that can be told know what was taken, once the node
    /// [ends](Self::end).
    pub fn is_told(&self) -> bool {
        let mut links = self.links.iter();
        let mut over_rdma = self.rdma_links.iter();
        !links.any(|(_, link)| link.state == LinkState::Serving || self.is_on_its_way(link))
            && !over_rdma.any(|(_, link)| link.state == RdmaState::Up)
            && !self.conns.iter().any(|(_, conn)| self.is_untold(conn))
    }

    /// Tells whether a farewell that acknowledges something may still be lost with its connection:
    /// until the peer has closed as well, or all time for it is over.
    fn is_on_its_way(&self, link: &Link) -> bool {
        let waits = self.ending.is_some_and(|until| self.now < until);
        let path = || {
            let conn = self.conn(link.conn)?;
            conn.paths.get(usize::from(link.path?))
        };
        waits
            && link.farewell == Farewell::Planned
            && link.greeting.is_received()
            && path().is_some_and(|path| path.rx_expected > 0)
    }

    /// Ends the links of a peer in good order, which now may know all that was taken on the links
    /// before them.
    pub(super) fn finish_conn(&mut self, id: ConnId) {
        if self.ending.is_some() && self.conn(id).is_some_and(|conn| !self.is_untold(conn)) {
            self.links_of(id).into_iter().for_each(|link| self.finish_link(link));
        }
    }

    /// Ends a link in good order, as far as it has come.
    pub(super) fn finish_link(&mut self, id: LinkId) {
        let Some(link) = self.links.get(id.0) else { return };
        let Some(conn) = self.conns.get(link.conn.0) else { return };
        let bowline = conn.peer.is_bowline();
        let needed = self.is_untold(conn);
        let counts_from = self.counts_from(link, bowline);
        match link.state {
            // The peer opens its paths one after the other, so those that are open stay till then.
            LinkState::Serving | LinkState::Extra | LinkState::Connecting if needed => {}
            LinkState::Serving => {
                if let Some(at) = counts_from {
                    self.arm(at, Timer::Farewell);
                } else if let Some(link) = self.links.get_mut(id.0)
                    && link.farewell == Farewell::NotDue
                {
                    link.farewell = Farewell::Due;
                    self.signal_transmit(id);
                }
            }
            LinkState::Extra | LinkState::Connecting => self.drain_link(id),
            LinkState::Draining | LinkState::Abandoned => {
                if let Some(link) = self.links.get_mut(id.0) {
                    link.deaf |= bowline;
                }
                self.resume_deaf(id);
            }
        }
    }

    /// When a link that a peer of TCP's acknowledgements has opened counts for that peer, if it
    /// does not yet: a short connection on which nothing came back might have been refused.
    fn counts_from(&self, link: &Link, bowline: bool) -> Option<Instant> {
        let until = link.since + COUNTS_AFTER;
        let is_silent = link.role == Role::Accepted && link.tx.written == 0;
        (!bowline && is_silent && link.rx.messages > 0 && self.now < until).then_some(until)
    }

    /// A frame is planned on a link, which may be the greeting that told the last of it.
    pub(super) fn finish_conn_of(&mut self, id: LinkId) {
        if let Some(conn) = self.link(id).map(|link| link.conn) {
            self.finish_conn(conn);
        }
    }

    /// Ends a connection over RDMA in good order, as far as it has come.
    pub(super) fn finish_rdma(&mut self, id: RdmaLinkId) {
        let Some(link) = self.rdma_links.get(id.0) else { return };
        let needed = self.conn(link.conn).is_some_and(|conn| self.is_untold(conn));
        match link.state {
            // What the last connection may not have told comes again, and is acknowledged then.
            RdmaState::Connecting | RdmaState::Accepted | RdmaState::Up if needed => {}
            RdmaState::Connecting | RdmaState::Accepted | RdmaState::Closing => self.close_rdma(id),
            RdmaState::Up => {
                if let Some(link) = self.rdma_links.get_mut(id.0)
                    && link.tx.farewell == Farewell::NotDue
                {
                    link.tx.farewell = Farewell::Due;
                    self.signal_rdma(id);
                }
            }
        }
    }

    /// Closes this node's direction of a link when its farewell is written.
    pub(super) fn drain_if_told(&mut self, id: LinkId) {
        let told = self.link(id).is_some_and(|link| {
            link.farewell == Farewell::Planned && link.tx.plan.is_empty() && !link.tx.busy
        });
        if told {
            self.drain_link(id);
        }
    }

    /// Has a link that was not read for want of memory read again: what it brings takes none.
    pub(super) fn resume_deaf(&mut self, id: LinkId) {
        let Some(link) = self.links.get_mut(id.0).filter(|link| link.deaf && link.rx.paused) else {
            return;
        };
        link.rx.paused = false;
        self.paused.retain(|paused| *paused != id);
        if !link.rx.backlog.is_empty() && !std::mem::replace(&mut link.rx.listed, true) {
            self.ready.push_back(id);
        }
        self.outputs.push_back(Output::Resume { link: id });
    }

    /// Tells whether the peer may not know what was acknowledged last, and a connection of it broke
    /// lately or is about to end without a farewell: another one is made at once.
    pub(super) fn is_untold(&self, conn: &Conn) -> bool {
        let waits = self.ending.is_some_and(|until| self.now < until);
        if !waits || conn.peer_ended_at.is_some() {
            return false;
        }
        let over_rdma = conn.rdma.as_ref().and_then(|rdma| self.rdma_links.get(rdma.link?.0));
        let begins =
            |link: &RdmaLink| matches!(link.state, RdmaState::Connecting | RdmaState::Accepted);
        if over_rdma.is_some_and(|link| begins(link) && link.rx.ack > 0) {
            return true; // messages may be taken before it is known to be established [IB-39]
        }
        // Over RDMA nothing but acknowledgements tells any peer what was taken [IB-112].
        if conn.rdma.is_none() && !conn.peer.is_bowline() {
            return false;
        }
        let lately = |path: &Path| path.untold_since.is_some_and(|at| self.now < at + UNTOLD_TIME);
        let breaks = |path: &Path| {
            let link = path.link.and_then(|link| self.link(link));
            path.rx_expected > 0
                && link.is_some_and(|l| l.state.is_leaving() && l.farewell != Farewell::Planned)
        };
        conn.paths.iter().any(|path| lately(path) || breaks(path))
            || over_rdma.is_some_and(|link| {
                link.state == RdmaState::Closing && !link.has_told() && link.rx.ack > 0
            })
    }

    /// Tells whether connections to a peer may be made.
    pub(super) fn may_connect(&self, conn: &Conn) -> bool {
        !self.closing && (self.ending.is_none() || self.is_untold(conn))
    }

    /// Tells whether a connection that a peer makes is refused because the node ends.
    pub(super) fn refuses(&self, conn: Option<&ConnId>) -> bool {
        let known = || conn.and_then(|id| self.conn(*id)).is_some_and(|conn| self.is_untold(conn));
        self.closing || self.ending.is_some() && !known()
    }

    /// Handles a farewell of a peer: it has acknowledged what it took, and takes no more.
    pub(super) fn peer_ends(&mut self, id: LinkId) {
        let Some(link) = self.link(id) else { return };
        let (conn_id, generation) = (link.conn, link.generation);
        // A process that was replaced already may have ended as well.
        if self.conn(conn_id).is_some_and(|conn| conn.peer_generation == generation) {
            self.conn_ends(conn_id);
        }
    }

    pub(super) fn conn_ends(&mut self, id: ConnId) {
        let Some(conn) = self.conns.get_mut(id.0) else { return };
        if conn.peer_ended_at.replace(self.now).is_none() {
            let [local, remote] = [conn.local, conn.remote].map(|ip| to_socket_addr(ip, 0, 0).ip());
            self.event(Event::PeerEnded { local, remote });
        }
    }

    /// Another process has shown itself at the address of a peer [R-2053].
    pub(super) fn peer_is_back(&mut self, id: ConnId) {
        let Some(conn) = self.conns.get_mut(id.0) else { return };
        self.peers_gone -= usize::from(conn.is_back());
    }

    /// A peer could not be connected to.
    pub(super) fn peer_is_away(&mut self, id: ConnId, why: CloseReason) {
        let Some(conn) = self.conns.get_mut(id.0) else { return };
        if why == CloseReason::Refused && conn.rdma.is_none() {
            // Nobody is there who could be told. Over RDMA a peer refuses also while it asks.
            conn.paths.iter_mut().for_each(|path| path.untold_since = None);
            self.finish_conn(id);
        }
        let Some(conn) = self.conns.get_mut(id.0) else { return };
        let expected = |at: Instant| self.now < at + GONE_TIME;
        if conn.peer_gone || conn.peer_ended_at.is_none_or(expected) {
            return;
        }
        conn.peer_gone = true;
        self.peers_gone += 1;
        let waits = |sock: &Sock| sock.snd_msgs > 0 && sock.interest & interest_bit::WRITE != 0;
        let waiting: Vec<_> =
            self.sockets.iter().filter(|(_, s)| waits(s)).map(|(id, _)| SocketId(id)).collect();
        waiting.into_iter().for_each(|id| self.wake(id, interest_bit::WRITE));
    }

    /// Tells whether everything that a socket has sent is acknowledged.
    ///
    /// # Errors
    /// [`Error::BadSocket`]; [`Error::PeerEnded`] when all that is not acknowledged waits for peers
    /// that have ended and have not come back [R-2053].
    pub fn is_flushed(&self, id: SocketId) -> Result<bool, Error> {
        let sock = self.sock(id)?;
        if sock.snd_msgs == 0 || self.peers_gone == 0 {
            return Ok(sock.snd_msgs == 0);
        }
        let waits_for_living = sock.latest.iter().any(|((conn, dport, index), last)| {
            let conn = self.conns.get(conn.0).filter(|conn| !conn.peer_gone);
            let path = conn.and_then(|conn| conn.paths.get(usize::from(*index)));
            path.is_some_and(|path| path.sent_by(id, *dport, *last).next().is_some())
        });
        if waits_for_living { Ok(false) } else { Err(Error::PeerEnded) }
    }
}
