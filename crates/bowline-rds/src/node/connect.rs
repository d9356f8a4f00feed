//! When and how often a node connects to a peer. Spec: `docs/spec/rds.md`, sections 2.3 and 3.5.

use std::collections::VecDeque;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use bowline_base::Instant;
use bowline_wire::rds::TCP_PORT;
use serde::{Deserialize, Serialize};

use super::Node;
use super::timers::Timer;
use crate::api::{CloseHow, Output};
use crate::cong::CongMap;
use crate::conn::{Conn, Peer};
use crate::error::Error;
use crate::ids::{ConnId, LinkId};
use crate::link::{Link, LinkState, Partial, Role};
use crate::node::RdmaConn;
use crate::path::{Path, PathState};
use crate::socket::to_socket_addr;

/// A connected peer that has been silent for this time may be forgotten to make room.
const RECLAIM_TIME: Duration = Duration::from_secs(5);
/// For this time after a peer's last whole message, the peer is not forgotten if it has connections
/// without a path or does not take acknowledgements. The time is longer than such a connection is
/// kept.
const UNSETTLED_TIME: Duration = Duration::from_secs(60);
/// For this time after a peer was last used, messages of it that nobody has received protect it.
/// Who does not read cannot keep others out for longer; the messages stay.
const UNREAD_TIME: Duration = Duration::from_secs(60);
/// A message that has been arriving for `SLOW_TIME`, at fewer than `SLOW_RATE` bytes a second, does
/// not keep its sender from being forgotten.
const SLOW_TIME: Duration = Duration::from_secs(10);
const SLOW_RATE: u64 = 4 << 10;
/// Attempts to connect in one second to peers for which there is nothing to send.
const IDLE_DIALS_MAX: u32 = 256;
const IDLE_DIALS_TIME: Duration = Duration::from_secs(1);
/// For this time after a long message was refused, its sender is expected to try again.
const LONG_TIME: Duration = Duration::from_secs(60);
/// Time after which an attempt to connect is given up.
const CONNECT_TIME: Duration = Duration::from_secs(10);

impl Node {
    /// Makes the connection object of an address pair for TCP.
    pub(super) fn new_conn(
        &mut self,
        local: Ipv6Addr,
        remote: Ipv6Addr,
        scope: u32,
    ) -> Result<ConnId, Error> {
        let id = self.insert_conn((local, remote, scope), None)?;
        self.conn_index.insert((local, remote, scope), id);
        Ok(id)
    }

    /// Makes the connection object of an address pair and a type of service for RDMA.
    pub(super) fn new_rdma_conn(
        &mut self,
        (local, remote, scope, tos): (Ipv6Addr, Ipv6Addr, u32, u8),
    ) -> Result<ConnId, Error> {
        let rdma = RdmaConn { tos, ..RdmaConn::default() };
        let id = self.insert_conn((local, remote, scope), Some(rdma))?;
        self.rdma_index.insert((local, remote, scope, tos), id);
        Ok(id)
    }

    fn insert_conn(
        &mut self,
        (local, remote, scope): (Ipv6Addr, Ipv6Addr, u32),
        rdma: Option<RdmaConn>,
    ) -> Result<ConnId, Error> {
        // Neither a message nor a ping has a peer connected to that is not on the list.
        if !self.config.peers.permits(to_socket_addr(remote, 0, 0).ip()) {
            return Err(Error::PeerNotPermitted);
        }
        if self.conns.len() >= self.config.limits.peers && !self.reclaim_idle() {
            return Err(Error::TooManyPeers);
        }
        let local_addr = self.local_addr_of(local, scope);
        let id = ConnId(self.conns.insert(Conn {
            local,
            remote,
            scope,
            local_addr,
            // Over RDMA both sides connect [IB-5].
            we_dial: local < remote || rdma.is_some(),
            npaths: 0,
            npaths_outdated: false,
            npaths_heard_at: self.now,
            npaths_timer: false,
            npaths_asked: None,
            peer: Peer::Unknown,
            peer_generation: 0,
            former: Vec::new(),
            generation_serial: 0,
            doubted: None,
            missed: None,
            peer_sport_idx: false,
            proven: false,
            dial_attempts: 0,
            asked_to_dial: false,
            postponed_path: None,
            paths: vec![Path::new(self.first_sequence)],
            path_barrier: None,
            long_message_refused_at: None,
            kind_timer: false,
            map: CongMap::default(),
            map_received_on: None,
            map_sent_on: None,
            map_changed_link_at: None,
            map_settles_at: None,
            map_other_link_at: None,
            map_refresh_armed: false,
            map_refresh: None,
            map_due: false,
            told_cannot_connect: None,
            peer_ended_at: None,
            peer_gone: false,
            knock: None,
            extra: VecDeque::new(),
            dedup: None,
            links_made: 0,
            past_written: 0,
            past_read: 0,
            recv_held: 0,
            last_used: self.now,
            last_frame_at: self.now,
            rdma,
        }));
        self.local_addrs[local_addr].conns.push(id);
        Ok(id)
    }

    /// Forgets the peer that has been idle for longest and closes its TCP connections. Returns
    /// whether there was an idle peer [B-18].
    fn reclaim_idle(&mut self) -> bool {
        let oldest =
            self.conns.iter().filter(|(_, c)| self.is_idle(c)).min_by_key(|(_, c)| c.last_used);
        let Some((id, _)) = oldest else { return false };
        self.stats.peers_reclaimed += 1;
        self.forget_conn(ConnId(id));
        true
    }

    /// Tells whether a peer may be forgotten. Unfinished messages and connections protect a peer
    /// for a while only. Otherwise a crowd of peers that each began something would keep out all
    /// later ones.
    fn is_idle(&self, conn: &Conn) -> bool {
        let silent = self.now.saturating_since(conn.last_used);
        if conn.has_messages() || conn.has_ops() || conn.recv_held > 0 && silent < UNREAD_TIME {
            return false;
        }
        let up = conn.paths.iter().any(|p| p.state == PathState::Up);
        if up && silent < RECLAIM_TIME {
            return false; // a connected peer is not pushed out unless it has been silent
        }
        if let Some(link) = conn.rdma.as_ref().and_then(|rdma| self.rdma_links.get(rdma.link?.0)) {
            return !link.rx.paused && link.rx.partial.as_ref().is_none_or(|p| self.is_slow(p));
        }
        let serving = conn.paths.iter().filter_map(|p| p.link);
        let mut links = serving.chain(conn.extra.iter().copied()).filter_map(|l| self.link(l));
        if links.clone().any(|l| l.rx.paused) {
            return false; // this node, not the peer, is what holds the traffic up
        }
        let settled = conn.extra.is_empty()
            && links.clone().all(|l| l.rx.ack.bytes == 0 && l.rx.backlog.is_empty());
        (settled || self.now.saturating_since(conn.last_frame_at) >= UNSETTLED_TIME)
            && !links.any(|l| l.rx.partial.as_ref().is_some_and(|p| !self.is_slow(p)))
    }

    /// Tells whether a message arrives so slowly that it does not protect its sender.
    fn is_slow(&self, partial: &Partial) -> bool {
        let since = self.now.saturating_since(partial.first_seen);
        since >= SLOW_TIME && (partial.rope.len() as u64) < since.as_secs() * SLOW_RATE
    }

    /// Removes a connection with everything it has.
    pub(super) fn forget_conn(&mut self, id: ConnId) {
        for link in self.links_of(id) {
            if let Some(gone) = self.links.remove(link.0) {
                self.partial_bytes -= gone.partial_bytes();
            }
            self.ack_asked.retain(|l| *l != link);
            self.paused.retain(|l| *l != link);
            self.outputs.push_back(Output::Close { link, how: CloseHow::Reset });
        }
        if let Some(link) = self.rdma_link_of(id) {
            self.give_up_rdma(link);
        }
        let Some(mut conn) = self.conns.remove(id.0) else { return };
        self.peers_gone -= usize::from(conn.peer_gone);
        match &conn.rdma {
            None => self.conn_index.remove(&(conn.local, conn.remote, conn.scope)),
            Some(rdma) => self.rdma_index.remove(&(conn.local, conn.remote, conn.scope, rdma.tos)),
        };
        self.local_addrs[conn.local_addr].conns.retain(|c| *c != id);
        for path in &mut conn.paths {
            // A bowline peer remembers the numbers it has received, and would drop repeated ones.
            self.first_sequence = self.first_sequence.max(path.next_tx_seq);
            while let Some(msg) = path.pop_front(&mut self.pool) {
                if !msg.has(crate::path::mark::CANCELLED) {
                    self.release_message(&msg);
                }
            }
        }
        let freed = conn.map.take();
        if freed != 0 {
            self.congestion_changed(freed);
        }
    }

    /// Returns all TCP connections of a peer.
    pub(super) fn links_of(&self, id: ConnId) -> Vec<LinkId> {
        let Some(conn) = self.conns.get(id.0) else { return Vec::new() };
        conn.paths
            .iter()
            .filter_map(|p| p.link)
            .chain(conn.knock)
            .chain(conn.extra.clone())
            .collect()
    }

    /// Starts the attempts to connect that a send finds missing. Paths are opened one after
    /// the other, each only when the one before is in service, so that the acceptor numbers them in
    /// the same order. A delayed attempt that is planned stays as it is.
    pub(super) fn connect_all_if_down(&mut self, id: ConnId) {
        let Some(conn) = self.conns.get(id.0).filter(|conn| self.may_connect(conn)) else { return };
        if !conn.we_dial {
            let down = conn.paths.first().is_some_and(|p| {
                p.state == PathState::Down && p.reconnect_at.is_none() && conn.knock.is_none()
            });
            if down {
                self.start_knock(id);
            }
            return;
        }
        if conn.postponed_path.is_some()
            && self.has_use_for(conn)
            && let Some(conn) = self.conns.get_mut(id.0)
        {
            conn.cancel_postponement();
        }
        if let Some(index) = self.next_to_connect(id) {
            self.start_connect(id, index);
        }
    }

    /// Returns the path of a peer with a larger address that is to be connected now.
    fn next_to_connect(&self, id: ConnId) -> Option<u8> {
        let conn = self.conns.get(id.0)?;
        for index in 0..conn.npaths.max(1) {
            match conn.paths.get(usize::from(index)) {
                Some(p) if p.state == PathState::Up => {
                    let link = p.link.and_then(|l| self.links.get(l.0));
                    // How the others begin depends on what the address of a later kernel sends on
                    // path 0 [R-2010]. It knows them by their ports, in whatever order they come
                    // and says nothing on them.
                    let later = conn.is_later_kernel() && self.config.end_to_end;
                    let heard = |l: &Link| {
                        l.greeting.heard_frame || self.now >= l.since + super::links::CONFIRM_TIME
                    };
                    let follows = |l: &Link| match index {
                        0 => l.confirmed && (!later || heard(l)),
                        _ => l.confirmed || later,
                    };
                    if !link.is_some_and(follows) {
                        return None;
                    }
                }
                Some(p) if p.state == PathState::Down && p.reconnect_at.is_none() => {
                    return Some(index);
                }
                None => return Some(index),
                Some(_) => return None,
            }
        }
        None
    }

    /// Opens a TCP connection for a path. This node has the smaller address.
    fn start_connect(&mut self, id: ConnId, index: u8) {
        let Some(conn) = self.conns.get_mut(id.0) else { return };
        if conn.rdma.is_some() {
            return self.start_rdma_connect(id);
        }
        conn.make_path(index);
        let (local, remote) = conn_addrs(conn);
        conn.links_made += 1;
        conn.dial_attempts = conn.dial_attempts.saturating_add(1);
        let here = SocketAddr::new(local, 0);
        let mut link = Link::new(id, Some(index), Role::Dial, LinkState::Connecting, here, remote);
        link.serial = conn.links_made;
        let link = LinkId(self.links.insert(link));
        let path = &mut conn.paths[usize::from(index)];
        path.state = PathState::Connecting;
        path.link = Some(link);
        path.reconnect_at = None;
        self.outputs.push_back(Output::Connect { link, local, remote, port_mod8: index });
        self.arm(self.now + CONNECT_TIME, Timer::Connect(link));
    }

    /// Knocks: connects only so that the peer, which has the smaller address, connects.
    pub(super) fn start_knock(&mut self, id: ConnId) {
        let Some(conn) = self.conns.get_mut(id.0) else { return };
        let (local, remote) = conn_addrs(conn);
        let link = LinkId(self.links.insert(Link::new(
            id,
            None,
            Role::Knock,
            LinkState::Connecting,
            SocketAddr::new(local, 0),
            remote,
        )));
        conn.knock = Some(link);
        if let Some(path) = conn.paths.first_mut() {
            path.reconnect_at = None;
        }
        self.stats.knocks_sent += 1;
        // A kernel that has restarted may have one connection, which this node takes for another
        // path than the kernel's path 0. It opens no more before it is told how many paths there
        // are.
        let served = conn.paths.iter().find(|p| p.state == PathState::Up).and_then(|p| p.link);
        if let Some(served) = served.filter(|_| !conn.peer.is_bowline()) {
            if let Some(served) = self.link_mut(served) {
                served.greeting.probe_again = true;
            }
            self.signal_transmit(served);
        }
        self.outputs.push_back(Output::Connect { link, local, remote, port_mod8: 0 });
        self.arm(self.now + CONNECT_TIME, Timer::Connect(link));
    }

    /// Plans the next attempt for a path: the first at once, later ones after a random part
    /// of a delay that doubles. The delay is reset only when a connection has lasted,
    /// [B-30].
    pub(super) fn schedule_reconnect(&mut self, id: ConnId, index: u8) {
        let min = self.config.sysctl.reconnect_min_delay_ms * 1_000_000;
        let max = self.config.sysctl.reconnect_max_delay_ms * 1_000_000;
        let random = self.rng.next_u64();
        let may = self.conn(id).is_some_and(|conn| self.may_connect(conn));
        let Some(conn) = self.conns.get_mut(id.0) else { return };
        let Some(path) = conn.paths.get_mut(usize::from(index)) else { return };
        if !may || path.state != PathState::Down || path.reconnect_at.is_some() {
            return;
        }
        let wait = if path.delay == 0 {
            path.delay = min;
            0
        } else {
            let wait = random % path.delay.max(1);
            path.delay = (path.delay * 2).clamp(min, max);
            wait
        };
        self.reconnect_at(id, index, self.now + Duration::from_nanos(wait));
    }

    fn reconnect_at(&mut self, id: ConnId, index: u8, at: Instant) {
        let Some(conn) = self.conns.get_mut(id.0) else { return };
        let Some(path) = conn.paths.get_mut(usize::from(index)) else { return };
        path.reconnect_at = Some(at);
        self.arm(at, Timer::Reconnect(id, index));
    }

    /// Makes the attempt to connect whose time has come.
    pub(super) fn reconnect_due(&mut self, id: ConnId, index: u8) {
        let Some(conn) = self.conns.get_mut(id.0) else { return };
        let Some(path) = conn.paths.get_mut(usize::from(index)) else { return };
        if path.reconnect_at.is_none_or(|at| at > self.now) {
            return;
        }
        path.reconnect_at = None; // whatever is decided below [B-14]
        if path.state != PathState::Down {
            return;
        }
        if conn.we_dial {
            conn.postponed_path = None;
            let proven = usize::from(conn.proven);
            let asked = std::mem::take(&mut conn.asked_to_dial);
            let idle = self.conn(id).is_some_and(|conn| !asked && !self.has_use_for(conn));
            if idle
                && self.next_to_connect(id) == Some(index)
                && let Some(free_at) = self.idle_dials[proven].take(self.now)
            {
                // Many peers are away, and are dialled in turn.
                let wait = self.rng.next_u64() % IDLE_DIALS_TIME.as_nanos() as u64;
                self.reconnect_at(id, index, free_at + Duration::from_nanos(wait));
                if let Some(conn) = self.conns.get_mut(id.0) {
                    conn.postponed_path = Some(index);
                }
                return;
            }
            self.connect_all_if_down(id);
        } else if index == 0
            && let Some(conn) = self.conn(id)
            && conn.knock.is_none()
            && self.wants_peer(conn)
        {
            self.start_knock(id);
        }
    }

    /// Plans the next knock, as long as this node has something for the peer, [B-29].
    pub(super) fn after_knock(&mut self, id: ConnId) {
        let Some(conn) = self.conns.get_mut(id.0) else { return };
        conn.knock = None;
        if self.conn(id).is_some_and(|conn| self.wants_peer(conn)) {
            self.schedule_reconnect(id, 0);
        }
    }

    /// Tells whether a connection to the peer is needed: a message is queued, or a sender may wait
    /// for a port that was congested when the peer was last connected, or for the peer to show
    /// whether it takes long messages.
    pub(super) fn wants_peer(&self, conn: &Conn) -> bool {
        let waited_for = !self.cong_waiters.is_empty();
        self.has_use_for(conn) || (waited_for && !conn.map.is_empty())
    }

    /// Tells the same without the peer's congestion map, which a peer could use to be dialled.
    fn has_use_for(&self, conn: &Conn) -> bool {
        let waited_for = !self.cong_waiters.is_empty();
        let long = conn.peer == Peer::Unknown
            && conn
                .long_message_refused_at
                .is_some_and(|at| waited_for || self.now.saturating_since(at) < LONG_TIME);
        conn.has_messages() || long
    }
}

/// Counts attempts, by the second, to connect to peers that no sender waits for.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(super) struct IdleDials {
    since: Instant,
    made: u32,
}

impl IdleDials {
    /// Counts an attempt. If the limit is reached, returns when there is room for the next one.
    fn take(&mut self, now: Instant) -> Option<Instant> {
        if now >= self.since + IDLE_DIALS_TIME {
            *self = Self { since: now, made: 0 };
        }
        if self.made >= IDLE_DIALS_MAX {
            return Some(self.since + IDLE_DIALS_TIME);
        }
        self.made += 1;
        None
    }
}

fn conn_addrs(conn: &Conn) -> (IpAddr, SocketAddr) {
    let local = to_socket_addr(conn.local, 0, conn.scope).ip();
    (local, to_socket_addr(conn.remote, TCP_PORT, conn.scope))
}
