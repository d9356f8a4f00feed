//! TCP connections: accepted, established, given a path. Spec: `docs/spec/rds.md`, sections
//! 2.3 and 2.5.

use std::net::SocketAddr;
use std::time::Duration;

use bowline_base::Instant;
use bowline_wire::rds::{BowlineExt, PROBE_PATHS_MAX};

use super::Node;
use super::sockets::endpoint;
use super::timers::Timer;
use crate::api::{AcceptError, CloseHow, CloseReason, Event, Misbehaviour, Output, Refusal};
use crate::conn::{Conn, Peer};
use crate::ids::{ConnId, LinkId};
use crate::link::{Link, LinkState, Role};
use crate::path::PathState;
use crate::socket::to_socket_addr;

/// A dialled connection that stays open for this time is served by its acceptor, [B-4].
pub(super) const CONFIRM_TIME: Duration = Duration::from_millis(200);
/// How long an acceptor waits for an unknown peer to show what kind of node it is.
const PEER_KIND_TIME: Duration = Duration::from_millis(200);
/// How long an accepted connection may stay without a path.
const EXTRA_TIME: Duration = Duration::from_secs(35);
/// A bowline peer that sends a map and then no greeting for this time is not a bowline node any
/// more. A kernel shows itself sooner: it answers our greeting. The time is longer than keepalive
/// needs to end a dead connection, and shorter than [`EXTRA_TIME`].
const GREETING_TIME: Duration = Duration::from_secs(34);
/// A peer that sends nothing but maps for this time is taken for a kernel. Most kernels show
/// themselves with their first frame.
const SILENT_PEER_TIME: Duration = Duration::from_secs(34);

/// How long a kernel may have only one connection before it is asked how many paths it has, and how
/// long it has to answer.
pub(super) const NPATHS_TIME: Duration = Duration::from_secs(16);

/// After this number of knocks, and this time, the peer is taken not to be served by the connection
/// that it has.
const KNOCKS_MAX: u32 = 8;
const KNOCKS_TIME: Duration = Duration::from_secs(2);

impl Node {
    /// Takes an accepted TCP connection. The connection's two addresses identify the peer;
    /// there is no type of service.
    pub fn handle_accepted(
        &mut self,
        now: Instant,
        local: SocketAddr,
        remote: SocketAddr,
    ) -> Result<LinkId, AcceptError> {
        self.now = now;
        self.stats.links_accepted += 1;
        // Nothing is made for such a peer.
        if !self.config.peers.permits(remote.ip()) {
            self.stats.peers_not_permitted += 1;
            return Err(self.refuse(remote, Refusal::NotPermitted));
        }
        let here = endpoint(local);
        let there = endpoint(remote);
        // Traffic between two local addresses never uses TCP.
        if self.is_local_at(there.addr, there.scope) {
            return Err(self.refuse(remote, Refusal::Local));
        }
        // As for sent messages, the scope of either link-local address is enough.
        let key = (here.addr, there.addr, there.scope.max(here.scope));
        if self.refuses(self.conn_index.get(&key)) {
            return Err(self.refuse(remote, Refusal::Closing));
        }
        let id = match self.conn_index.get(&key) {
            Some(id) => *id,
            None => match self.conn_for_unproven(key) {
                Some(id) => id,
                None => return Err(self.refuse(remote, Refusal::Peers)),
            },
        };
        let Some(conn) = self.conns.get_mut(id.0) else { return Err(AcceptError::Refused) };
        conn.last_used = now;
        if conn.we_dial {
            self.knocked(id);
            return Err(AcceptError::Knock);
        }
        self.take_accepted(id, local, remote)
            .ok_or_else(|| self.refuse(remote, Refusal::LinksOfPeer))
    }

    /// Puts a connection that a peer has made in service, or among those that wait for a path.
    /// Returns `None` if too many wait.
    fn take_accepted(
        &mut self,
        id: ConnId,
        local: SocketAddr,
        remote: SocketAddr,
    ) -> Option<LinkId> {
        let now = self.now;
        let conn = self.conns.get(id.0)?;
        let slot = if conn.peer.is_bowline() {
            None // the peer's probe tells the path
        } else {
            self.free_path_for(conn, remote.port())
        };
        let conn = self.conns.get_mut(id.0)?;
        let unknown = conn.peer == Peer::Unknown;
        let mut link = Link::new(id, None, Role::Accepted, LinkState::Extra, local, remote);
        link.confirmed = true;
        link.since = now;
        conn.links_made += 1;
        link.serial = conn.links_made;
        if let Some(slot) = slot {
            link.awaits_peer_kind = unknown;
            let link = LinkId(self.links.insert(link));
            self.attach(link, slot);
            if unknown {
                self.arm(now + PEER_KIND_TIME, Timer::AwaitPeerKind(link));
            }
            return Some(link);
        }
        let limit = self.config.limits.links_extra_per_peer;
        // Connections that are being cut stay for a while; a flood must not pile them up.
        if conn.extra.len() >= 2 * limit {
            return None;
        }
        let conn = self.conns.get(id.0)?;
        let waits = |l: &&LinkId| self.link(**l).is_some_and(|l| l.state == LinkState::Extra);
        let full = conn.extra.iter().filter(waits).count() >= limit;
        let dropped = if full { self.drop_oldest_extra(id) } else { None };
        let conn = self.conns.get_mut(id.0)?;
        if !conn.peer.is_bowline() {
            link.waits_for = conn.paths.iter().filter_map(|p| p.link).chain(dropped).collect();
        }
        let checks = link.waits_for.clone();
        let link = LinkId(self.links.insert(link));
        conn.extra.push_back(link);
        // A peer that restarted must not be locked out until keepalive ends its old connections
        // [B-22].
        for link in checks {
            self.outputs.push_back(Output::CheckAlive { link });
        }
        self.arm(now + GREETING_TIME, Timer::Greeting(link));
        self.arm(now + EXTRA_TIME, Timer::Extra(link));
        Some(link)
    }

    fn refuse(&mut self, remote: SocketAddr, why: Refusal) -> AcceptError {
        self.stats.links_refused += 1;
        self.event(Event::Refused { remote: remote.ip(), why });
        AcceptError::Refused
    }

    /// Makes the connection object of a peer that connected first. Peers that never sent a whole
    /// frame push out the oldest peer of that kind.
    fn conn_for_unproven(
        &mut self,
        (local, remote, scope): (std::net::Ipv6Addr, std::net::Ipv6Addr, u32),
    ) -> Option<ConnId> {
        self.make_room_for_unproven();
        // If the addresses are configured, a removed address may still receive connections for a
        // moment. Such a connection does not bring the address back.
        if self.config.addrs.is_empty() {
            self.add_local(to_socket_addr(local, 0, 0).ip());
        }
        let id = self.new_conn(local, remote, scope).ok()?;
        self.unproven.push_back(id);
        Some(id)
    }

    /// Makes the connection object of a peer that connected first over RDMA.
    pub(super) fn rdma_conn_for_unproven(
        &mut self,
        key: (std::net::Ipv6Addr, std::net::Ipv6Addr, u32, u8),
    ) -> Option<ConnId> {
        self.make_room_for_unproven();
        let id = self.new_rdma_conn(key).ok()?;
        self.unproven.push_back(id);
        Some(id)
    }

    fn make_room_for_unproven(&mut self) {
        let unproven = |node: &Self, id: &ConnId| {
            node.conn(*id).is_some_and(|c| !c.proven && !c.has_messages() && !c.has_ops())
        };
        if self.unproven.len() >= self.config.limits.peers_unproven {
            let mut list = std::mem::take(&mut self.unproven);
            list.retain(|id| unproven(self, id));
            if list.len() >= self.config.limits.peers_unproven
                && let Some(oldest) = list.pop_front()
            {
                if let Some(conn) = self.conns.get(oldest.0) {
                    let remote = to_socket_addr(conn.remote, 0, 0).ip();
                    self.event(Event::Refused { remote, why: Refusal::PeersUnproven });
                }
                self.stats.strangers_forgotten += 1;
                self.forget_conn(oldest);
            }
            self.unproven = list;
        }
    }

    /// Handles a knock: a peer with a larger address asks to be connected to.
    fn knocked(&mut self, id: ConnId) {
        self.stats.knocks_received += 1;
        let Some(conn) = self.conns.get_mut(id.0) else { return };
        conn.dial_attempts = 0;
        // The peer paid for this knock with a connection, so the attempt to connect is not put off.
        conn.asked_to_dial = true;
        conn.cancel_postponement();
        let Some(path) = conn.paths.first() else { return };
        match (path.state, path.link) {
            (PathState::Down, _) => self.schedule_reconnect(id, 0),
            (PathState::Up, Some(link)) => {
                let made = self.link_mut(link).map(|l| {
                    l.knocks += 1;
                    (l.knocks, l.since)
                });
                // A kernel that had taken the connection for its path 0 would not connect further
                //
                if made.is_some_and(|(n, since)| n >= KNOCKS_MAX && self.now >= since + KNOCKS_TIME)
                {
                    self.cut_link(link);
                } else {
                    self.outputs.push_back(Output::CheckAlive { link });
                }
            }
            _ => {}
        }
    }

    /// Makes room for a newer connection that waits for a path. Of the waiting connections the
    /// oldest goes, one that never sent a byte before others. A kernel keeps no more connections at
    /// a time than paths, so the kernel has given up the oldest one. Cutting it loses nothing,
    /// while resetting the newest one would.
    fn drop_oldest_extra(&mut self, id: ConnId) -> Option<LinkId> {
        let conn = self.conns.get(id.0)?;
        let waiting = |l: &LinkId| {
            let link = self.link(*l).filter(|l| l.state == LinkState::Extra)?;
            Some((link.rx.messages > 0, link.serial, *l))
        };
        let (.., oldest) = conn.extra.iter().filter_map(waiting).min()?;
        self.cut_link(oldest);
        Some(oldest)
    }

    /// The driver has read what had arrived on a link when it was asked to check it.
    pub fn handle_checked(&mut self, now: Instant, checked: LinkId) {
        self.now = now;
        self.process_all(checked);
        let Some(link) = self.link_mut(checked) else { return };
        let conn = link.conn;
        if std::mem::take(&mut link.confirm_when_checked) {
            link.checked = true;
            self.reset_backoff(checked);
        }
        self.stop_waiting_for(conn, checked);
        self.attach_mistaken(conn);
    }

    /// Gives connections a path that wait for the end of another one, which their ports say is of
    /// the same path, though that one is open. A port may have been changed on the way, or no
    /// better one was free; which free path they get does not matter.
    fn attach_mistaken(&mut self, conn_id: ConnId) {
        let Some(conn) = self.conns.get(conn_id.0).filter(|c| !c.peer.is_bowline()) else { return };
        for id in conn.extra.clone() {
            let Some(conn) = self.conns.get(conn_id.0) else { return };
            let Some(link) = self.links.get(id.0) else { continue };
            if link.state == LinkState::Extra
                && link.waits_for.is_empty()
                && let Some(free) = free_path(conn)
            {
                self.attach(id, free);
            }
        }
    }

    /// Ends the wait for link `done`. Links that waited may get a path now, that of a lost link.
    pub(super) fn stop_waiting_for(&mut self, conn: ConnId, done: LinkId) {
        for id in self.links_of(conn) {
            let Some(link) = self.links.get_mut(id.0) else { continue };
            if !link.waits_for.is_empty() {
                link.waits_for.retain(|l| *l != done);
                if link.waits_for.is_empty() {
                    self.outputs.push_back(Output::Resume { link: id });
                }
            }
        }
    }

    /// A TCP connection this node opened is established.
    pub fn handle_connected(&mut self, now: Instant, id: LinkId, local: SocketAddr) {
        self.now = now;
        let Some(link) = self.links.get_mut(id.0) else { return };
        if link.state != LinkState::Connecting {
            return;
        }
        link.local = local;
        link.since = now;
        let conn = link.conn;
        match (link.role, link.path) {
            (Role::Dial, Some(path)) => {
                self.attach(id, path);
                self.arm(now + CONFIRM_TIME, Timer::Confirm(id));
            }
            _ => {
                self.links.remove(id.0);
                self.outputs.push_back(Output::Close { link: id, how: CloseHow::Fin });
                self.after_knock(conn);
            }
        }
    }

    pub(super) fn connect_overdue(&mut self, id: LinkId) {
        if let Some(link) = self.link(id).filter(|l| l.state == LinkState::Connecting) {
            let conn = link.conn;
            self.tell_cannot_connect(conn, CloseReason::TimedOut);
            self.peer_is_away(conn, CloseReason::TimedOut);
            self.abandon_link(id);
        }
    }

    /// Puts a link in service for a path.
    pub(super) fn attach(&mut self, id: LinkId, index: u8) {
        let Some(link) = self.links.get_mut(id.0) else { return };
        let (conn_id, since) = (link.conn, link.since);
        let is_later_kernel = index > 0 && self.is_later_kernel_on_path_0(conn_id);
        let Some(link) = self.links.get_mut(id.0) else { return };
        let Some(conn) = self.conns.get_mut(conn_id.0) else { return };
        link.path = Some(index);
        link.state = LinkState::Serving;
        // The dialling side greets at once, the other side when it knows what kind of node the peer
        // is. So a stream that does not begin with a greeting shows that the peer is a kernel
        // [R-2010].
        let dials = self.config.end_to_end && link.role == Role::Dial;
        if conn.peer.is_bowline() || (dials && !is_later_kernel) {
            link.greeting.owe();
        }
        if conn.peer.is_bowline() {
            link.greeting.expect();
            self.timers.insert((self.now + GREETING_TIME, Timer::Greeting(id)));
        }
        conn.extra.retain(|l| *l != id);
        conn.told_cannot_connect = None;
        let path = conn.make_path(index);
        path.state = PathState::Up;
        path.link = Some(id);
        path.reconnect_at = None;
        if link.role == Role::Accepted {
            path.delay = 0;
        }
        let ended_at = path.last_end.map(|end| end.at);
        let unknown = conn.peer == Peer::Unknown && !conn.kind_timer;
        conn.kind_timer |= unknown;
        let bowline = conn.peer.is_bowline();
        let probe = index == 0 && !bowline;
        let (local, remote) = (conn.local, conn.remote);
        let probed = self.links.get_mut(id.0).is_some_and(|l| std::mem::take(&mut l.probe_pending));
        if probed {
            let ext = super::handshake::extensions(&self.config, index);
            self.pong(conn_id, index, bowline_wire::rds::PROBE_PORT, ext);
        }
        self.stats.links_up += 1;
        self.map_for_path(conn_id, ended_at);
        self.verify_npaths(conn_id);
        self.map_refresh_connected(conn_id, index, since);
        self.event(Event::PathUp {
            local: to_socket_addr(local, 0, 0).ip(),
            remote: to_socket_addr(remote, 0, 0).ip(),
            path: index,
        });
        if probe {
            self.queue_probe(conn_id); // anew on every connection, [B-3]
        }
        if unknown {
            self.arm(self.now + SILENT_PEER_TIME, Timer::PeerKind(conn_id));
        }
        self.signal_transmit(id);
        if !bowline {
            // The map goes out by the lowest path, which may have nothing else to send.
            self.signal_map(conn_id);
        }
        if is_later_kernel && self.conns.get(conn_id.0).is_some_and(|c| c.we_dial) {
            // Nothing comes on it that the next one could wait for.
            self.connect_all_if_down(conn_id);
        }
    }

    /// Tells whether the peer has shown on the present connection of path 0 that it is a later
    /// kernel. On its other paths a greeting would only be one more probe that it has to answer,
    /// and for which it tries without a pause until path 0 is empty [R-2010].
    fn is_later_kernel_on_path_0(&self, conn_id: ConnId) -> bool {
        let Some(conn) = self.conns.get(conn_id.0) else { return false };
        let link = conn.paths.first().and_then(|path| self.links.get(path.link?.0));
        conn.is_later_kernel()
            && link.is_some_and(|l| l.state == LinkState::Serving && l.greeting.heard_frame)
    }

    /// Notes that the peer serves this connection: TCP's acknowledgements on it count, the next
    /// attempt to reconnect is immediate, and the next path may be opened.
    pub(super) fn confirm(&mut self, id: LinkId) {
        let Some(link) = self.links.get_mut(id.0) else { return };
        if link.confirmed || link.state != LinkState::Serving {
            return;
        }
        link.confirmed = true;
        let conn_id = link.conn;
        if self.conns.get(conn_id.0).is_some_and(|c| c.we_dial) {
            self.connect_all_if_down(conn_id);
        }
        self.release_by_tcp(id);
    }

    /// A connection has its first frame that is no map. Of a later kernel's other paths those wait
    /// for it that could not be opened when path 0 was confirmed, by its map or by TCP [R-2010].
    pub(super) fn first_frame_on_path(&mut self, id: LinkId) {
        let Some(link) = self.links.get(id.0).filter(|l| l.path == Some(0) && l.confirmed) else {
            return;
        };
        let conn_id = link.conn;
        if self.conns.get(conn_id.0).is_some_and(|c| c.we_dial) {
            self.connect_all_if_down(conn_id);
        }
    }

    /// Makes the next reconnect of the path immediate, since its link has lasted. An answer alone
    /// is not enough, or a peer that accepts, answers and resets would be dialled without pause
    ///
    pub(super) fn reset_backoff(&mut self, id: LinkId) {
        let Some(link) = self.links.get_mut(id.0) else { return };
        if !link.confirmed && !link.checked {
            // The connection may have been reset long ago, and this process did not get to look.
            link.confirm_when_checked = true;
            self.outputs.push_back(Output::CheckAlive { link: id });
            return;
        }
        self.confirm(id);
        let Some(link) = self.links.get(id.0) else { return };
        if link.state == LinkState::Serving
            && let Some(index) = link.path
            && let Some(conn) = self.conns.get_mut(link.conn.0)
            && let Some(path) = conn.paths.get_mut(usize::from(index))
        {
            path.delay = 0;
            conn.dial_attempts = 0;
            if index == 0 && conn.we_dial && conn.is_later_kernel() {
                // It has sent nothing on path 0 that the other paths could wait for.
                let conn_id = link.conn;
                self.connect_all_if_down(conn_id);
            }
        }
    }

    /// The time is over in which the peer should have shown what kind of node it is. A peer that
    /// has sent nothing at all may only be slow.
    pub(super) fn kind_overdue(&mut self, id: ConnId) {
        let Some(conn) = self.conns.get_mut(id.0) else { return };
        conn.kind_timer = false;
        if conn.peer != Peer::Unknown {
            return;
        }
        let links = self.links_of(id);
        if links.iter().any(|l| self.link(*l).is_some_and(|l| l.rx.messages > 0)) {
            self.peer_is_kernel(id);
        } else if !links.is_empty() {
            if let Some(conn) = self.conns.get_mut(id.0) {
                conn.kind_timer = true;
            }
            self.arm(self.now + SILENT_PEER_TIME, Timer::PeerKind(id));
        }
    }

    /// Checks the number of paths after a connection of a kernel has come or gone. Another machine,
    /// with fewer paths, may have the peer's address by now: it is asked after a while, if it has
    /// only one connection.
    pub(super) fn verify_npaths(&mut self, conn_id: ConnId) {
        let Some(conn) = self.conns.get_mut(conn_id.0) else { return };
        if conn.peer == Peer::Kernel && conn.npaths > 1 && !conn.we_dial && !conn.npaths_timer {
            conn.npaths_timer = true;
            self.timers.insert((self.now + NPATHS_TIME, Timer::Npaths(conn_id)));
        }
    }

    /// Asks a kernel that has only one connection how many paths it has. If it does not answer
    /// within [`NPATHS_TIME`], it is taken for a kernel with one path, because messages on the
    /// other paths would wait for ever.
    pub(super) fn npaths_overdue(&mut self, id: ConnId) {
        let Some(conn) = self.conns.get_mut(id.0) else { return };
        conn.npaths_timer = false;
        let asked = conn.npaths_asked.take();
        if conn.peer != Peer::Kernel || conn.npaths < 2 {
            return;
        }
        let Some((index, link)) = conn.only_link() else { return };
        if let Some((_, at)) = asked.filter(|(of, _)| *of == link) {
            if conn.npaths_heard_at >= at {
                return; // the peer has all paths, and will connect them
            }
            // Only this node knows which path a connection serves.
            conn.paths.swap(0, index);
            if let Some(link) = self.links.get_mut(link.0) {
                link.path = Some(0);
            }
            self.agree_on_paths(id, None);
            return;
        }
        conn.npaths_asked = Some((link, self.now));
        let ext = super::handshake::extensions(&self.config, index as u8);
        self.queue_control(id, index, bowline_wire::rds::PROBE_PORT, 0, ext, 0);
        self.verify_npaths(id);
    }

    /// The time is over in which a bowline peer should have greeted. A peer that has sent nothing
    /// at all may only be slow.
    pub(super) fn greeting_overdue(&mut self, id: LinkId) {
        let Some(link) = self.link(id).filter(|l| !l.greeting.is_received()) else { return };
        if !self.conn(link.conn).is_some_and(|c| c.peer.is_bowline()) {
            return;
        }
        if link.rx.messages > 0 {
            self.not_greeted(id);
        } else {
            self.arm(self.now + GREETING_TIME, Timer::Greeting(id));
        }
    }

    /// Returns the path that a connection from TCP port `port` of a kernel is to serve, if one is
    /// free: the path that the port tells, [B-2], or the lowest one.
    fn free_path_for(&self, conn: &Conn, port: u16) -> Option<u8> {
        let named = |port: u16| (port % u16::from(conn.npaths.max(1))) as u8;
        if conn.peer_sport_idx {
            let index = named(port);
            if is_free(conn, index) {
                return Some(index);
            }
            // The earlier connection of the path is about to end, as far as is known yet. A
            // connection that came before this rule was known stays, and has left another path
            // free.
            let holder = conn.paths.get(usize::from(index)).and_then(|p| self.link(p.link?));
            if holder.is_some_and(|l| named(l.remote.port()) == index) {
                return None;
            }
        }
        free_path(conn)
    }

    /// Gives a waiting connection a path, if one that it may serve is free.
    pub(super) fn attach_extra(&mut self, id: LinkId) {
        let Some(link) = self.link(id).filter(|l| l.state == LinkState::Extra) else { return };
        let Some(conn) = self.conns.get(link.conn.0) else { return };
        let slot = self.free_path_for(conn, link.remote.port());
        if let Some(slot) = slot {
            self.attach(id, slot);
        }
    }

    pub(super) fn extra_overdue(&mut self, id: LinkId) {
        if self.link(id).is_some_and(|l| l.state == LinkState::Extra) {
            self.drain_link(id);
        }
    }

    /// Resets the connection of a peer that broke a rule.
    pub(super) fn misbehaved(&mut self, id: LinkId, what: Misbehaviour) {
        let Some(link) = self.link(id) else { return };
        let remote = link.remote.ip();
        self.stats.peer_errors += 1;
        self.event(Event::Misbehaved { remote, what });
        self.close_link(id, CloseHow::Reset);
    }

    /// A bowline peer has told the path of a link. An accepted link moves to that path, whose older
    /// link is stale [R-2011]. On a link that this node dialled, the peer has not read yet which
    /// path the link is for, and uses the numbers of the path it takes it for [R-2004]. A link that
    /// leaves serves no other path, but what it brings has the numbers of the path named.
    pub(super) fn path_named(&mut self, id: LinkId, named: BowlineExt) -> bool {
        let BowlineExt { path: index, max_message, .. } = named;
        if index >= PROBE_PATHS_MAX as u8 {
            self.misbehaved(id, Misbehaviour::PathOutOfRange);
            return false;
        }
        let Some(link) = self.links.get_mut(id.0) else { return false };
        if link.path == Some(index) {
            link.numbering_path = None;
            return true;
        }
        if link.role == Role::Dial || link.state.is_leaving() {
            link.numbering_path = Some(index);
            return true;
        }
        let conn_id = link.conn;
        if let Some(old) = link.path {
            // The link got a path by the order of its arrival. If no message has gone out, it moves
            // to the other path. Otherwise the peer has to dial again, now that its kind is known.
            let Some(conn) = self.conns.get_mut(conn_id.0) else { return false };
            let Some(path) = conn.paths.get_mut(usize::from(old)) else { return false };
            if path.planned > 0 {
                conn.peer = Peer::Bowline { max_message };
                self.close_link(id, CloseHow::Reset);
                // Senders of long messages wait for the peer's kind to be known.
                self.wake_refused(crate::socket::interest_bit::WRITE);
                return false;
            }
            path.link = None;
            path.state = PathState::Down;
            if let Some(link) = self.links.get_mut(id.0) {
                link.path = None;
                link.state = LinkState::Extra;
            }
        }
        let stale = self
            .conns
            .get(conn_id.0)
            .and_then(|c| c.paths.get(usize::from(index)))
            .and_then(|p| p.link);
        if let Some(stale) = stale {
            self.detach(stale, CloseHow::Reset);
        }
        self.attach(id, index);
        true
    }
}

fn is_free(conn: &Conn, index: u8) -> bool {
    conn.paths.get(usize::from(index)).is_none_or(|path| path.state == PathState::Down)
}

/// Returns the lowest path of a peer that has no connection.
fn free_path(conn: &Conn) -> Option<u8> {
    (0..conn.npaths.max(1)).find(|index| is_free(conn, *index))
}
