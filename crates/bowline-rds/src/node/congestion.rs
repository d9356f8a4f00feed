//! Receive accounting and congestion maps. Spec: `docs/spec/rds.md`, sections 6.2 and 7.

use std::time::Duration;

use bowline_base::Instant;
use bowline_wire::rds::MapView;

use super::Node;
use super::timers::Timer;
use crate::api::Output;
use crate::ids::{ConnId, LinkId, SocketId};
use crate::path::PathState;
use crate::recvq::{Rare, RecvMsg};
use crate::socket::interest_bit;

/// Maps of different connections that come within this time may have overtaken one another: TCP may
/// have delayed one of them by several retransmission timeouts.
pub(super) const MAP_REORDER_TIME: Duration = Duration::from_secs(10);
/// How long after the last of such maps a fresh map is requested.
const MAP_REFRESH_DELAY: Duration = Duration::from_millis(1500);
/// How much older a peer may take a connection to be than this node does. This node accepts the
/// connection when the last segment of TCP's handshake comes, which may have been repeated twice.
/// The time is shorter than [`MAP_REFRESH_DELAY`], so that the map of a renewed connection is not
/// doubted again.
const MAP_ACCEPT_SKEW: Duration = Duration::from_millis(1400);
/// How long after the last of several paths that come up together their peer gets the map again.
const MAP_SETTLE_TIME: Duration = Duration::from_millis(100);
/// Number of bytes that a waiting message counts towards the limits in addition to its payload.
pub(super) const MESSAGE_OVERHEAD: usize = 128;

/// Number of bytes left unread on ended connections that is taken beyond any limit. It is the
/// amount that TCP holds for a peer with eight connections, 1 MiB each. A kernel believes that all
/// of it is delivered.
const UNREAD_REST_MIN: usize = 8 << 20;

impl Node {
    /// Queues a complete message on a socket; `seen` tells when its first and its last byte came.
    #[inline]
    pub(super) fn queue_on_socket(
        &mut self,
        id: SocketId,
        mut msg: RecvMsg,
        seen: (Instant, Instant),
    ) {
        let Some(sock) = self.sockets.get_mut(id.0) else {
            self.stats.recv_drop_dead_sock += 1;
            return;
        };
        let len = msg.data.len();
        self.stats.recv_queued += 1;
        self.stats.recv_bytes_added_to_sock += len as u64;
        if sock.timestamp || sock.latency.is_some() {
            let rare = msg.rare.get_or_insert_with(Box::<Rare>::default);
            rare.queued_at = sock.timestamp.then_some(self.now);
            rare.trace = sock.latency.map(|_| [seen.0, seen.1, self.now]);
        }
        // What programs of this node send each other keeps no peer waiting.
        if let Some(conn) = msg.origin.conn {
            self.recv_held += len + MESSAGE_OVERHEAD;
            if let Some(conn) = self.conns.get_mut(conn.0) {
                conn.recv_held += len + MESSAGE_OVERHEAD;
            }
        }
        sock.queue.push(msg);
        sock.rcv_bytes += len;
        let waits = sock.interest & interest_bit::READ != 0;
        self.update_congestion(id, len);
        if waits {
            self.wake(id, interest_bit::READ);
        }
    }

    /// Accounts for a message taken off a socket's queue.
    #[inline]
    pub(super) fn unqueue_from_socket(&mut self, id: SocketId, conn: Option<ConnId>, len: usize) {
        self.release_held(conn, len);
        self.stats.recv_bytes_freed_fromsock += len as u64;
        let Some(sock) = self.sockets.get_mut(id.0) else { return };
        sock.rcv_bytes -= len;
        self.update_congestion(id, len);
    }

    /// Marks or unmarks a socket's port after its queue changed by `by` bytes, [R-612]. A
    /// change by 0 bytes has no effect, but for the number of messages [B-33].
    #[inline]
    fn update_congestion(&mut self, id: SocketId, by: usize) {
        let Some(sock) = self.sockets.get_mut(id.0) else { return };
        let least = self.config.limits.recv_messages_per_socket;
        let crowded = sock.crowded_at(sock.waiting(), least);
        if by == 0 && crowded == sock.crowded {
            return;
        }
        sock.crowded = crowded;
        let on = crowded || sock.congested_at(sock.rcv_bytes);
        if on == sock.congested {
            return;
        }
        sock.congested = on;
        if let Some(bound) = sock.bound {
            self.set_congested(bound.local_addr, bound.at.port, on);
        }
    }

    /// Releases the limits' share of a message of `len` bytes, and resumes reading where a limit
    /// stopped it.
    #[inline]
    pub(super) fn release_held(&mut self, conn: Option<ConnId>, len: usize) {
        let Some(conn) = conn else { return };
        self.recv_held -= len + MESSAGE_OVERHEAD;
        if let Some(conn) = self.conns.get_mut(conn.0) {
            conn.recv_held -= len + MESSAGE_OVERHEAD;
        }
        if !self.paused.is_empty() || !self.rdma_paused.is_empty() {
            self.resume_reading();
        }
    }

    /// Tells whether the limits allow more bytes of this peer; a kernel has no such limits.
    pub(super) fn may_receive(&self, conn: ConnId) -> bool {
        self.holds_below(conn, |limit| limit)
    }

    /// Tells whether the limits allow the bytes left unread on an ended connection, which cannot
    /// wait.
    pub(super) fn may_take_unread(&self, conn: ConnId) -> bool {
        self.holds_below(conn, |limit| limit.saturating_add(limit.max(UNREAD_REST_MIN)))
    }

    /// Tells whether the limits allow another frame. So many receives of the connection were posted
    /// before the limits were reached, and its frames in them cannot wait.
    pub(super) fn may_take_frames(&self, conn: ConnId, receives: usize) -> bool {
        let posted = receives * (self.rdma_fragment() + MESSAGE_OVERHEAD);
        self.holds_below(conn, |limit| limit.saturating_add(limit.max(posted)))
    }

    fn holds_below(&self, conn: ConnId, bound: impl Fn(usize) -> usize) -> bool {
        let limits = &self.config.limits;
        self.recv_held < bound(limits.recv_bytes_total)
            && self.conn(conn).is_none_or(|c| c.recv_held < bound(limits.recv_bytes_per_peer))
    }

    fn resume_reading(&mut self) {
        let mut paused = std::mem::take(&mut self.paused);
        paused.retain(|id| {
            let Some(link) = self.links.get(id.0) else { return false };
            if !self.may_receive(link.conn) {
                return true;
            }
            self.unpause(*id);
            false
        });
        self.paused.append(&mut paused);
        let mut paused = std::mem::take(&mut self.rdma_paused);
        paused.retain(|id| {
            let Some(link) = self.rdma_links.get(id.0) else { return false };
            if !self.may_receive(link.conn) {
                return true;
            }
            if let Some(link) = self.rdma_links.get_mut(id.0) {
                link.rx.paused = false;
            }
            self.outputs.push_back(Output::RdmaResume { link: *id });
            false
        });
        self.rdma_paused.append(&mut paused);
    }

    pub(super) fn unpause(&mut self, id: LinkId) {
        let Some(link) = self.links.get_mut(id.0) else { return };
        link.rx.paused = false;
        if !link.rx.backlog.is_empty() && !link.rx.listed {
            link.rx.listed = true;
            self.ready.push_back(id);
        }
        self.outputs.push_back(Output::Resume { link: id });
    }

    /// Marks or unmarks a port of a local address, and makes the changed map due for the peers.
    pub(super) fn set_congested(&mut self, local_addr: usize, port: u16, on: bool) {
        let Some(local_addr) = self.local_addrs.get_mut(local_addr) else { return };
        let changed = if on { local_addr.map.set(port) } else { local_addr.map.clear(port) };
        if !changed {
            return;
        }
        if on {
            self.stats.cong_update_queued += 1;
        }
        // Peers that are not connected get the map when they connect.
        for id in local_addr.conns.clone() {
            if let Some(conn) = self.conns.get_mut(id.0) {
                conn.map_due = true;
            }
            self.signal_map(id);
        }
        if !on {
            // Senders within this node get no map.
            self.congestion_changed(1 << (port & 63));
        }
    }

    /// Takes a peer's map.
    ///
    /// A kernel sends maps on whatever path transmits next, a bowline node on the lowest
    /// path in service, and a map does not tell its age. Maps of different connections that come
    /// close together may be read in another order than they were sent, so the map that is read
    /// last may be an old one.
    pub(super) fn map_received(&mut self, id: ConnId, link: LinkId, map: &MapView<'_>) {
        self.stats.cong_update_received += 1;
        let now = self.now;
        let since = self.link(link).map_or(now, |l| l.since);
        let Some(conn) = self.conns.get_mut(id.0) else { return };
        let freed = conn.map.replace(map);
        if let Some((_, at)) =
            conn.map_received_on.replace((link, now)).filter(|(last, _)| *last != link)
        {
            conn.map_other_link_at = Some(at);
        }
        // A map that was read elsewhere before this connection was made is older than all that
        // comes on this connection.
        let raced = conn
            .map_other_link_at
            .is_some_and(|at| since <= at + MAP_ACCEPT_SKEW && now < at + MAP_REORDER_TIME);
        if raced && !conn.map.is_empty() && !conn.map_refresh_armed {
            conn.map_refresh_armed = true;
            self.arm(now + MAP_REFRESH_DELAY, Timer::RefreshMap(id));
        }
        self.congestion_changed(freed);
    }

    /// Sends this node's map once more: some time after maps have moved from one connection to
    /// another, for a kernel that is slow to read the first one may take the older map for the
    /// newer one, and would keep it until this node's map changes again; and when paths
    /// have come up behind it.
    pub(super) fn resend_map(&mut self, id: ConnId) {
        let now = self.now;
        let Some(conn) = self.conns.get_mut(id.0) else { return };
        let settled = conn.map_settles_at.take_if(|at| *at <= now).is_some();
        let moved = conn.map_changed_link_at.take_if(|at| *at + MAP_REORDER_TIME <= now).is_some();
        let later = conn.map_changed_link_at.map(|at| at + MAP_REORDER_TIME);
        for at in [conn.map_settles_at, later].into_iter().flatten() {
            self.timers.insert((at, Timer::ResendMap(id)));
        }
        if settled || moved {
            conn.map_due = true;
            self.signal_map(id);
        }
    }

    /// Makes this node's map due since a path has come up that had its last link until `ended_at`.
    /// If the map has gone out since, this is one of several paths that come up together, and the
    /// map is sent once more behind the last of them: until then the peer may have read an old
    /// one on an earlier connection of one of them.
    pub(super) fn map_for_path(&mut self, id: ConnId, ended_at: Option<Instant>) {
        let at = self.now + MAP_SETTLE_TIME;
        let Some(conn) = self.conns.get_mut(id.0) else { return };
        if !conn.has_sent_map_since(ended_at) {
            conn.map_due = true;
        } else if conn.map_settles_at.replace(at).is_none() {
            self.arm(at, Timer::ResendMap(id));
        }
    }

    /// Renews the highest idle connection, because a map comes with every new connection,
    /// . No earlier map is newer than that one.
    pub(super) fn refresh_map(&mut self, id: ConnId) {
        let now = self.now;
        let Some(conn) = self.conns.get_mut(id.0) else { return };
        conn.map_refresh_armed = false;
        if conn.map.is_empty() {
            return;
        }
        let quiet_from = conn.map_received_on.map_or(now, |(_, at)| at + MAP_REFRESH_DELAY);
        let idle = conn
            .paths
            .iter()
            .enumerate()
            .rev()
            .find(|(_, p)| p.state == PathState::Up && p.queue.is_empty() && p.link.is_some());
        match idle.and_then(|(index, p)| Some((index as u8, p.link?))) {
            Some((index, link)) if quiet_from <= now => {
                self.stats.map_refreshes += 1;
                conn.map_refresh = Some((index, now));
                self.drain_link(link);
            }
            _ => {
                conn.map_refresh_armed = true;
                self.arm(quiet_from.max(now + MAP_REFRESH_DELAY), Timer::RefreshMap(id));
            }
        }
    }

    /// Checks the connection that a path got after its last one was ended for a fresh map. If the
    /// connection had waited for a path, its map came long ago, so the doubt remains.
    pub(super) fn map_refresh_connected(&mut self, id: ConnId, index: u8, since: Instant) {
        let Some(conn) = self.conns.get_mut(id.0) else { return };
        let Some((_, at)) = conn.map_refresh.take_if(|(of, _)| *of == index) else { return };
        if since < at && !conn.map.is_empty() && !conn.map_refresh_armed {
            conn.map_refresh_armed = true;
            self.arm(self.now + MAP_REFRESH_DELAY, Timer::RefreshMap(id));
        }
    }

    /// Wakes senders that were refused for a reason that may be over, however they wait [B-32].
    pub(super) fn wake_refused(&mut self, bits: u8) {
        for id in std::mem::take(&mut self.cong_waiters) {
            if let Some(sock) = self.sockets.get_mut(id.0) {
                sock.cong_waiting = false;
            }
            self.wake(id, bits);
        }
    }

    /// Wakes senders that wait for congestion to end. `freed` holds the port groups in which it
    /// ended [D-10], [B-11]; a kernel names all groups.
    pub(super) fn congestion_changed(&mut self, freed: u64) {
        self.cong_generation += 1;
        self.wake_refused(interest_bit::WRITE | interest_bit::READ);
        if self.monitors.is_empty() {
            return;
        }
        for id in std::mem::take(&mut self.monitors) {
            let Some(sock) = self.sockets.get_mut(id.0) else { continue };
            let hit = sock.wait_mask & freed;
            sock.notify_mask |= hit;
            sock.wait_mask &= !freed;
            if sock.wait_mask != 0 {
                self.monitors.push(id);
            }
            if hit != 0 {
                self.wake(id, interest_bit::READ);
            }
        }
    }
}
