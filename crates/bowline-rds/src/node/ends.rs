//! TCP connections that end: by the peer, by this node's wish, or because another one takes their
//! place. Spec: `docs/spec/rds.md`, sections 2.4 and 2.5.

use std::net::IpAddr;
use std::time::Duration;

use bowline_base::Instant;

use super::Node;
use super::links::NPATHS_TIME;
use crate::api::{CloseHow, CloseReason, Event, Output, PathEnd};
use crate::ids::{ConnId, LinkId, RdmaLinkId};
use crate::link::{Farewell, Link, LinkState, Role};
use crate::path::{PathState, UNPLANNED, Unwritten, mark};
use crate::socket::{mapped, to_socket_addr};

/// For how long all connections of a path are rejected before all connections of the peer are
/// opened anew: longer than a kernel needs to find a dead connection by keepalive.
const REJECTED_TIME: Duration = Duration::from_secs(32);
/// A connection that ends within this time without a byte was rejected.
const REJECT_TIME: Duration = Duration::from_secs(2);
/// How often a peer that never sent a message is dialled without a message for it, before it has to
/// knock again. Where connections are refused, this number of attempts takes some seconds.
const UNPROVEN_DIALS_MAX: u32 = 32;

/// How far the messages of a path got on a link that ends.
#[derive(Clone, Copy, Debug)]
struct LinkProgress {
    /// Messages whose frames begin before this offset of the stream may have been started.
    started_below: u64,
    /// The peer's acknowledgement of messages that a write in progress holds.
    peer_ack: u64,
    /// Generation that the peer told on the link; 0: none.
    generation: u32,
    /// This node's farewell was the last that it sent on the link.
    told: bool,
}

impl LinkProgress {
    fn on(link: &Link) -> Self {
        Self {
            started_below: link.tx.written + link.tx.in_flight,
            peer_ack: link.tx.peer_ack,
            generation: link.generation,
            told: link.farewell == Farewell::Planned && link.tx.plan.is_empty(),
        }
    }
}

impl Node {
    /// Handles the end of a TCP connection; all bytes that arrived on it have been handed over.
    pub fn handle_closed(&mut self, now: Instant, id: LinkId, reason: CloseReason) {
        self.now = now;
        self.process_all(id);
        if reason != CloseReason::Eof
            && let Some(link) = self.links.get_mut(id.0)
            && link.farewell == Farewell::Planned
        {
            link.farewell = Farewell::Due; // it may not have come
        }
        // Else all losses are handled alike: the reason is for the operator.
        if let Some(link) = self.links.get_mut(id.0).filter(|l| !l.state.is_leaving()) {
            link.ended = Some(reason);
            if link.state == LinkState::Connecting {
                let conn = link.conn;
                self.tell_cannot_connect(conn, reason);
                self.peer_is_away(conn, reason);
            }
        }
        self.remove_link(id);
    }

    /// Tells the operator why a peer cannot be connected to, unless that is known.
    pub(super) fn tell_cannot_connect(&mut self, conn: ConnId, why: CloseReason) {
        let Some(conn) = self.conns.get_mut(conn.0) else { return };
        if conn.told_cannot_connect.replace(why) == Some(why) {
            return;
        }
        let [local, remote] = [conn.local, conn.remote].map(|ip| to_socket_addr(ip, 0, 0).ip());
        self.event(Event::CannotConnect { local, remote, why });
    }

    /// Closes a link because this node decided to.
    pub(super) fn close_link(&mut self, id: LinkId, how: CloseHow) {
        if self.links.get(id.0).is_none() {
            return;
        }
        self.outputs.push_back(Output::Close { link: id, how });
        self.remove_link(id);
    }

    /// Sends FIN and reads the remaining bytes before the link goes, [B-5].
    pub(super) fn drain_link(&mut self, id: LinkId) {
        let Some(link) = self.links.get(id.0) else { return };
        match link.state {
            LinkState::Draining | LinkState::Abandoned => return,
            LinkState::Connecting => return self.abandon_link(id),
            LinkState::Serving | LinkState::Extra => {}
        }
        self.leave_service(id);
        self.outputs.push_back(Output::Close { link: id, how: CloseHow::Drain });
    }

    /// Ends a link at once without losing bytes that were acknowledged to the peer's TCP.
    pub(super) fn cut_link(&mut self, id: LinkId) {
        let Some(link) = self.links.get(id.0) else { return };
        match link.state {
            LinkState::Abandoned => return,
            LinkState::Connecting => return self.abandon_link(id),
            LinkState::Serving | LinkState::Extra | LinkState::Draining => {}
        }
        self.leave_service(id);
        self.outputs.push_back(Output::Close { link: id, how: CloseHow::Cut });
    }

    /// Gives up a link that this node has not seen established. On a knock nothing comes.
    pub(super) fn abandon_link(&mut self, id: LinkId) {
        let Some(link) = self.links.get_mut(id.0) else { return };
        if link.role == Role::Knock {
            return self.close_link(id, CloseHow::Reset);
        }
        self.leave_service(id);
        if let Some(link) = self.links.get_mut(id.0) {
            link.state = LinkState::Abandoned;
        }
        self.outputs.push_back(Output::Close { link: id, how: CloseHow::Cut });
    }

    /// Cuts a link whose path gets another link, or whose path is not used any more.
    pub(super) fn retire_link(&mut self, id: LinkId) {
        let Some(link) = self.links.get_mut(id.0) else { return };
        let Some(index) = link.path.filter(|_| link.state != LinkState::Connecting) else {
            self.detach(id, CloseHow::Reset);
            return;
        };
        let (conn_id, progress) = (link.conn, LinkProgress::on(link));
        link.path = None;
        link.state = LinkState::Draining;
        let Some(conn) = self.conns.get_mut(conn_id.0) else { return };
        conn.extra.push_back(id);
        if let Some(path) = conn.paths.get_mut(usize::from(index)) {
            path.link = None;
            path.state = PathState::Down;
            path.last_end = Some(PathEnd { at: self.now, why: None });
        }
        self.reset_path(conn_id, index, progress);
        self.outputs.push_back(Output::Close { link: id, how: CloseHow::Cut });
    }

    /// Stops sending on a link; bytes that come on it still count.
    fn leave_service(&mut self, id: LinkId) {
        let Some(link) = self.links.get_mut(id.0) else { return };
        link.state = LinkState::Draining;
        let by_tcp = self.conns.get(link.conn.0).is_none_or(|conn| !conn.peer.is_bowline());
        link.deaf |= self.ending.is_some() && !by_tcp;
        if let (Some(conn), Some(path)) = (self.conns.get_mut(link.conn.0), link.path)
            && let Some(path) = conn.paths.get_mut(usize::from(path))
            && path.link == Some(id)
        {
            path.state = PathState::Disconnecting;
        }
    }

    /// Forgets a link and finds another one for its path.
    fn remove_link(&mut self, id: LinkId) {
        if let Some((conn, index)) = self.unlink(id) {
            self.replace_link(conn, index);
        }
    }

    /// Closes a link whose path gets another link, or whose path is not used any more.
    pub(super) fn detach(&mut self, id: LinkId, how: CloseHow) {
        if self.links.get(id.0).is_some() {
            self.outputs.push_back(Output::Close { link: id, how });
            self.unlink(id);
        }
    }

    /// Forgets a link and resets the path it served; returns that path.
    fn unlink(&mut self, id: LinkId) -> Option<(ConnId, u8)> {
        let link = self.links.remove(id.0)?;
        self.partial_bytes -= link.partial_bytes();
        self.ack_asked.retain(|l| *l != id);
        if link.rx.paused {
            self.paused.retain(|l| *l != id);
        }
        let conn_id = link.conn;
        self.stop_waiting_for(conn_id, id);
        let conn = self.conns.get_mut(conn_id.0)?;
        conn.past_written += link.tx.written;
        conn.past_read += link.rx.bytes;
        conn.extra.retain(|l| *l != id);
        if link.role == Role::Knock {
            // Who asks why there is no connection looks at the path.
            if let (Some(path), Some(_)) = (conn.paths.first_mut(), link.ended) {
                path.last_end = Some(PathEnd { at: self.now, why: link.ended });
            }
            self.after_knock(conn_id);
            return None;
        }
        let index = link.path?;
        let path = conn.paths.get_mut(usize::from(index))?;
        if path.link != Some(id) {
            return None;
        }
        let was_up = !matches!(link.state, LinkState::Connecting | LinkState::Abandoned);
        path.link = None;
        path.state = PathState::Down;
        path.last_end = Some(PathEnd { at: self.now, why: link.ended });
        if was_up {
            let short = self.now < link.since + REJECT_TIME;
            let silent = link.role == Role::Dial && link.rx.bytes == 0 && short;
            path.rejected_since = silent.then(|| path.rejected_since.unwrap_or(self.now));
            self.reset_path(conn_id, index, LinkProgress::on(&link));
        }
        Some((conn_id, index))
    }

    /// Finds a new link for a path that has lost its link.
    pub(super) fn replace_link(&mut self, conn_id: ConnId, index: u8) {
        let Some(conn) = self.conns.get(conn_id.0) else { return };
        if conn.we_dial {
            // A peer that only ever knocked is not dialled for ever, and not at all if
            // another may have asked in its name [IB-111].
            let knocked = conn.rdma.as_ref().is_none_or(|rdma| rdma.reached);
            let dials_left = knocked && conn.dial_attempts < UNPROVEN_DIALS_MAX;
            if conn.proven || dials_left || self.wants_peer(conn) {
                self.reopen_all_if_rejected(conn_id, index);
                self.schedule_reconnect(conn_id, index);
            }
            return;
        }
        // The oldest connection without a path takes the place of the lost link. Between
        // bowline nodes the connection itself tells for which path it is.
        let next = conn.extra.iter().copied().find(|l| {
            !conn.peer.is_bowline()
                && self.links.get(l.0).is_some_and(|l| l.state == LinkState::Extra)
        });
        if let Some(next) = next {
            self.attach(next, index);
        } else if self.wants_peer(conn) {
            self.schedule_reconnect(conn_id, 0);
        }
    }

    /// Opens all connections of a kernel anew, in the order of their paths. A kernel that
    /// has restarted may have taken the first connection for a path that it was not for, and then
    /// rejects the connection of that path for ever.
    fn reopen_all_if_rejected(&mut self, conn_id: ConnId, index: u8) {
        let Some(conn) = self.conns.get_mut(conn_id.0).filter(|c| !c.peer.is_bowline()) else {
            return;
        };
        let Some(path) = conn.paths.get_mut(usize::from(index)) else { return };
        let rejected = path.rejected_since;
        if rejected.is_none_or(|since| self.now.saturating_since(since) < REJECTED_TIME) {
            return;
        }
        path.rejected_since = None;
        // Each connection of path 0 begins with a probe.
        let others = conn.paths.iter().skip(1).any(|p| p.state == PathState::Up);
        let first = conn.paths.first().and_then(|p| self.links.get(p.link?.0));
        let silent = first
            .is_some_and(|l| conn.npaths_heard_at < l.since && self.now >= l.since + NPATHS_TIME);
        if index > 0 && (conn.npaths_outdated || (silent && !others)) {
            // The peer's present process never said that it has such a path.
            self.agree_on_paths(conn_id, None);
            return;
        }
        let others: Vec<_> = conn.paths.iter().filter_map(|p| p.link).collect();
        for link in others {
            self.drain_link(link);
        }
    }

    /// Prepares a path to begin again on another connection, [R-321].
    fn reset_path(&mut self, conn_id: ConnId, index: u8, progress: LinkProgress) {
        let Some(conn) = self.conns.get_mut(conn_id.0) else { return };
        let Some(path) = conn.paths.get_mut(usize::from(index)) else { return };
        path.drop_forgotten(&mut self.pool); // the peer has received nothing of it
        for msg in path.queue.iter_mut().take(path.planned) {
            if msg.stream_start != UNPLANNED && msg.stream_start < progress.started_below {
                msg.marks |= mark::RETRANS | mark::ACK_REQUIRED;
                if progress.generation != 0 {
                    msg.generation = progress.generation;
                }
            }
            msg.stream_start = UNPLANNED;
        }
        if let Some(barrier) = conn.path_barrier.as_mut().filter(|_| path.has_cancelled_started()) {
            barrier.unsettled |= 1 << index;
        }
        path.planned = 0;
        path.resets += 1;
        path.unacked_packets = 0;
        path.unacked_bytes = 0;
        if conn.peer.is_bowline() && path.rx_expected > 0 && !progress.told {
            path.untold_since = Some(self.now);
        }
        path.drop_cancelled(&mut self.pool, Unwritten::Message(None), None);
        // Maps may have been lost with this connection.
        conn.map_due = true;
        let (local, remote) = (conn.local, conn.remote);
        let is_orderly = self.ending.is_some() || conn.peer_ended_at.is_some();
        let why = path.last_end.and_then(|end| end.why).filter(|_| !is_orderly);
        if progress.peer_ack > 0 {
            // The peer had the messages that a write in progress holds; the write cannot report it
            // any more.
            self.release_by_ack(conn_id, index, progress.peer_ack);
        }
        self.stats.conn_reset += 1;
        self.verify_npaths(conn_id);
        self.event(Event::PathDown {
            local: to_socket_addr(local, 0, 0).ip(),
            remote: to_socket_addr(remote, 0, 0).ip(),
            path: index,
            why,
        });
        self.check_barrier(conn_id);
        self.signal_map(conn_id);
    }

    /// Cuts every connection, or those of one peer; returns their number. Paths reconnect by
    /// the usual rules, and nothing is lost: bytes that TCP has acknowledged to the peer are read
    /// first.
    pub fn drop_links(&mut self, now: Instant, peer: Option<IpAddr>) -> usize {
        self.now = now;
        let peer = peer.map(mapped);
        let mut chosen: Vec<_> = self
            .links
            .iter()
            .filter(|(_, l)| {
                peer.is_none_or(|p| self.conns.get(l.conn.0).is_some_and(|c| c.remote == p))
            })
            .map(|(id, l)| (l.serial, LinkId(id)))
            .collect();
        // Bytes that a peer sent on an older connection come before those it sent on a newer one.
        chosen.sort_unstable();
        for (_, id) in &chosen {
            self.cut_link(*id);
        }
        let over_rdma = self.rdma_links.iter().filter(|(_, l)| {
            peer.is_none_or(|p| self.conns.get(l.conn.0).is_some_and(|c| c.remote == p))
        });
        let over_rdma: Vec<_> = over_rdma.map(|(id, _)| RdmaLinkId(id)).collect();
        over_rdma.iter().for_each(|id| self.close_rdma(*id));
        chosen.len() + over_rdma.len()
    }

    /// Stops connecting and accepting, and closes every TCP connection after reading its remaining
    /// bytes. Queued messages stay queued: wait for [`Node::unsent_total`] to be 0 first.
    pub fn close_links(&mut self, now: Instant) {
        self.now = now;
        self.closing = true;
        self.drain_links();
        self.close_rdma_links();
    }

    /// Ends at once all connections that have not ended, without losing bytes that were
    /// acknowledged to the peers' TCP.
    pub fn cut_links(&mut self, now: Instant) {
        self.now = now;
        let all: Vec<_> = self.links.iter().map(|(id, _)| LinkId(id)).collect();
        for id in all {
            self.cut_link(id);
        }
    }

    fn close_rdma_links(&mut self) {
        let all: Vec<_> = self.rdma_links.iter().map(|(id, _)| RdmaLinkId(id)).collect();
        all.into_iter().for_each(|id| self.close_rdma(id));
    }

    pub(super) fn drain_links(&mut self) {
        let all: Vec<_> = self.links.iter().map(|(id, _)| LinkId(id)).collect();
        for id in all {
            self.drain_link(id);
        }
    }
}
