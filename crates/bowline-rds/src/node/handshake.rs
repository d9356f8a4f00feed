//! Probes and pongs: path count, generation, and whether the peer is a bowline node. Spec:
//! `docs/spec/rds.md`, sections 3.6, 4 and 20.

use std::time::Duration;

use bowline_wire::rds::{BowlineExt, EXT_AREA_LEN, Handshake, Header, PROBE_PATHS_MAX, PROBE_PORT};

use super::Node;
use super::timers::Timer;
use crate::api::{CloseHow, Event, Misbehaviour};
use crate::config::Config;
use crate::conn::{Conn, Peer};
use crate::ids::{ConnId, LinkId};
use crate::link::{LinkState, PeerGreeting, Role};
use crate::path::mark;
use crate::socket::to_socket_addr;

/// Longest reconnect delay, in nanoseconds, of a path after a connection on which the peer greeted.
/// A connection that breaks soon after its greeting costs little time, and a peer that greets and
/// resets is dialled at most a hundred times a second.
const GREETED_DELAY_NS: u64 = 16_000_000;

/// How long a bowline process may be silent on a connection on which something else came first.
/// Kernels answer the greeting as soon as they read it, unless pings are off there.
const MISSED_TIME: Duration = Duration::from_secs(5);

/// The extension area of this node's probes and pongs, [R-433], [R-440], [B-1].
pub(super) fn extensions(config: &Config, path: u8) -> [u8; EXT_AREA_LEN] {
    Handshake {
        npaths: Some(u16::from(config.paths)),
        generation: Some(config.generation),
        sport_idx: true,
        bowline: config.end_to_end.then_some(BowlineExt {
            version: 1,
            path,
            max_message: config.max_message,
        }),
    }
    .emit()
}

/// The extension area of a farewell: the longest message that this node still takes is none
/// [R-2051].
pub(super) fn farewell(path: u8) -> [u8; EXT_AREA_LEN] {
    let bowline = Some(BowlineExt { version: 1, path, max_message: 0 });
    Handshake { bowline, ..Handshake::default() }.emit()
}

/// Tells whether an acknowledgement is a farewell.
pub(super) fn is_farewell(header: &Header) -> bool {
    header.ext[0] != 0
        && Handshake::parse(&header.ext).bowline.is_some_and(|ext| ext.max_message == 0)
}

impl Node {
    /// Queues a probe on path 0, unless one is queued there already. A probe that was begun on an
    /// earlier connection goes out flagged. A kernel that has received it drops it as old
    /// and does not answer; so another probe follows the repeated messages.
    pub(super) fn queue_probe(&mut self, conn_id: ConnId) {
        let ext = extensions(&self.config, 0);
        let Some(conn) = self.conns.get_mut(conn_id.0) else { return };
        let Some(path) = conn.paths.first() else { return };
        let mut probes = path
            .queue
            .iter()
            .filter(|m| m.sport == PROBE_PORT && m.dport == 0 && m.socket.is_none());
        if let Some(probe) = probes.next() {
            if probe.has(mark::RETRANS)
                && let Some(link) = path.link.and_then(|l| self.links.get_mut(l.0))
            {
                link.greeting.probe_again = true;
            }
            return;
        }
        self.queue_control(conn_id, 0, PROBE_PORT, 0, ext, 0);
    }

    /// Returns the part of a probe that shows that its sender is a bowline node.
    pub(super) fn bowline_part(&self, hs: &Handshake) -> Option<BowlineExt> {
        hs.bowline.filter(|b| self.config.end_to_end && b.version >= 1)
    }

    /// Evaluates a probe ping or pong. Returns `false` when the link is gone.
    pub(super) fn handshake(&mut self, id: LinkId, header: &Header) -> bool {
        let hs = Handshake::parse(&header.ext);
        let bowline = self.bowline_part(&hs);
        let Some(link) = self.links.get_mut(id.0) else { return false };
        let (conn_id, serial) = (link.conn, link.serial);
        link.awaits_peer_kind = false;
        let generation = hs.generation.unwrap_or(0);
        if generation != 0 {
            if link.generation != 0 && link.generation != generation {
                // A process has one generation, and each change costs a search through all that is
                // remembered.
                self.misbehaved(id, Misbehaviour::GenerationChanged);
                return false;
            }
            link.generation = generation;
        }
        if link.role == Role::Accepted
            && let Some(named) = hs.bowline.filter(|b| b.path < PROBE_PATHS_MAX as u8)
        {
            // It tells repeated messages of the paths apart, also where this node acknowledges by
            // TCP alone.
            link.named_path = Some(named.path);
        }
        if bowline.is_none() && link.greeting.is_received() {
            // One process sends all that comes on a connection, and this one has greeted.
            return true;
        }
        let Some(conn) = self.conns.get(conn_id.0) else { return false };
        let known = conn.peer_generation;
        let differs = generation != 0 && known != 0 && generation != known;
        let earlier = differs || (known == 0 && conn.met_before(generation));
        if earlier && serial < conn.generation_serial {
            // The greeting of a process that has been replaced already.
            self.close_link(id, CloseHow::Fin);
            return false;
        }
        let met_before = conn.met_before(generation);
        let doubtful = met_before || (differs && self.is_served_by(conn_id, known));
        if bowline.is_some() && doubtful && !self.has_dialled_again(id, generation) {
            self.close_link(id, CloseHow::Fin);
            return false;
        }
        if let Some(b) = bowline
            && !self.path_named(id, b)
        {
            return false;
        }
        let Some(conn) = self.conns.get_mut(conn_id.0) else { return false };
        conn.peer_sport_idx = hs.sport_idx;
        let was_bowline = conn.peer.is_bowline();
        let before = conn.peer_generation;
        let restarted = differs || (was_bowline && bowline.is_none());
        if generation != 0 {
            conn.generation_serial = conn.generation_serial.max(serial);
            conn.peer_generation = generation;
            conn.doubted = None;
        }
        if restarted {
            self.peer_restarted(conn_id, id, (before, generation));
        } else if before == 0 && conn.met_before(generation) {
            // The earlier process was away, and a node that told no generation had its address
            // meanwhile.
            conn.change_generation(0, generation);
        }
        if restarted || before != generation {
            self.peer_is_back(conn_id);
        }
        self.process_is_known(conn_id, generation);
        match bowline {
            Some(b) => self.peer_is_bowline(conn_id, id, b, header),
            None => self.peer_is_kernel(conn_id),
        }
        let usable_before = self.conn(conn_id).map_or(0, Conn::usable_paths);
        self.agree_on_paths(conn_id, hs.npaths);
        if self.conn(conn_id).is_some_and(|conn| conn.usable_paths() < usable_before) {
            self.another_process_has_fewer_paths(conn_id, id);
        }
        self.signal_transmit(id);
        self.links.get(id.0).is_some()
    }

    /// Cuts what leads to the process that had more paths: should it still be there, it would keep
    /// the messages of its other paths as long as one of them is connected.
    fn another_process_has_fewer_paths(&mut self, conn_id: ConnId, present: LinkId) {
        let serial = self.link(present).map_or(0, |link| link.serial);
        let Some(conn) = self.conn(conn_id).filter(|conn| !conn.peer.is_bowline()) else { return };
        let links: Vec<_> = conn.paths.iter().filter_map(|path| path.link).collect();
        for id in links {
            if self.link(id).is_some_and(|link| link.serial < serial) {
                self.cut_link(id);
            }
        }
    }

    /// Tells whether a link on which the process of this generation greeted is in service.
    fn is_served_by(&self, conn_id: ConnId, generation: u32) -> bool {
        let Some(conn) = self.conns.get(conn_id.0) else { return false };
        let links = conn.paths.iter().filter_map(|path| self.links.get(path.link?.0));
        links.into_iter().any(|link| link.generation == generation)
    }

    /// Tells whether another process than the present one, which greets on this link, is alive. The
    /// alternative is that it died and left a connection whose handshake ended only now. A living
    /// process dials again after its first connection was closed.
    fn has_dialled_again(&mut self, id: LinkId, generation: u32) -> bool {
        let Some(link) = self.links.get(id.0) else { return false };
        if link.role == Role::Dial {
            return true; // the peer accepted a connection that this node made lately
        }
        let serial = link.serial;
        let Some(conn) = self.conns.get_mut(link.conn.0) else { return false };
        if let Some((of, closed_at)) = conn.doubted
            && of == generation
        {
            return serial > closed_at;
        }
        conn.doubted = Some((generation, conn.links_made));
        false
    }

    fn peer_is_bowline(&mut self, conn_id: ConnId, id: LinkId, b: BowlineExt, header: &Header) {
        let Some(conn) = self.conns.get_mut(conn_id.0) else { return };
        let first = !conn.peer.is_bowline();
        conn.peer = Peer::Bowline { max_message: b.max_message };
        if let Some(path) = conn.paths.get_mut(usize::from(b.path)) {
            path.delay = path.delay.min(GREETED_DELAY_NS);
        }
        if let Some(link) = self.links.get_mut(id.0) {
            link.greeting.owe();
            link.greeting.theirs = PeerGreeting::Received;
        }
        if header.sequence == 0 {
            self.release_by_ack(conn_id, b.path, header.ack);
        }
        self.check_barrier(conn_id);
        self.finish_conn(conn_id);
        if first {
            // Senders of long messages wait for the peer's kind to be known.
            self.wake_refused(crate::socket::interest_bit::WRITE);
        }
    }

    /// Takes the peer for a kernel, because the first frame on a link that is not a map is no
    /// greeting of a bowline node.
    pub(super) fn not_greeted(&mut self, id: LinkId) {
        let Some(link) = self.links.get(id.0) else { return };
        let (conn_id, path, serial) = (link.conn, link.path, link.serial);
        let Some(conn) = self.conns.get_mut(conn_id.0) else { return };
        let was_bowline = conn.peer.is_bowline();
        self.peers_gone -= usize::from(conn.is_back());
        if was_bowline {
            conn.generation_serial = conn.generation_serial.max(serial);
            let before = std::mem::take(&mut conn.peer_generation);
            conn.peer_sport_idx = false;
            if conn.has_begun(before) {
                let until = self.now + MISSED_TIME;
                conn.missed = Some((before, until));
                self.arm(until, Timer::Missed(conn_id));
            }
            self.peer_restarted(conn_id, id, (before, 0));
        }
        self.peer_is_kernel(conn_id);
        // The kernel may be from before multipath and silent to pings; if it has more paths, it
        // says so. A connection of another path is kept until then, with the bytes that have come
        // on it.
        if was_bowline && path.unwrap_or(0) == 0 {
            self.agree_on_paths(conn_id, None);
        }
        if path.is_none() {
            self.attach_extra(id);
        }
    }

    /// The peer acknowledges by TCP alone.
    pub(super) fn peer_is_kernel(&mut self, conn_id: ConnId) {
        let Some(conn) = self.conns.get_mut(conn_id.0) else { return };
        if conn.peer == Peer::Kernel {
            return;
        }
        conn.peer = Peer::Kernel;
        let links: Vec<_> = conn.paths.iter().filter_map(|p| p.link).collect();
        for id in links {
            if let Some(link) = self.links.get_mut(id.0) {
                link.greeting.expect_no_longer();
            }
            self.release_by_tcp(id);
            self.signal_transmit(id);
        }
        self.wake_refused(crate::socket::interest_bit::WRITE);
    }

    /// Sets the number of paths. A higher number opens further paths; a lower one moves
    /// queued messages.
    pub(super) fn agree_on_paths(&mut self, conn_id: ConnId, announced: Option<u16>) {
        let ours = self.config.paths.clamp(1, PROBE_PATHS_MAX as u8);
        let now = self.now;
        let Some(conn) = self.conns.get_mut(conn_id.0) else { return };
        let before = conn.usable_paths();
        let after = match announced {
            Some(n) => (n.min(PROBE_PATHS_MAX) as u8).min(ours),
            // Peers with multipath always say how many paths they have. A peer from before
            // multipath may have taken the place of one with it. A kernel would leave the number as
            // it is.
            None => 1,
        };
        conn.npaths = after.max(1);
        conn.npaths_outdated = false;
        conn.npaths_heard_at = now;
        let usable_paths = conn.usable_paths();
        let we_dial = conn.we_dial;
        if usable_paths != before {
            // Messages of two sockets move to another path.
            let next = conn.unused_sequence();
            let kept = if usable_paths > before { usize::from(before) } else { 0 };
            for path in conn.paths.iter_mut().skip(kept) {
                path.next_tx_seq = next;
            }
        }
        if usable_paths > before {
            self.raise_barrier(conn_id, before);
        }
        if usable_paths < before {
            self.move_to_usable_paths(conn_id);
        }
        if we_dial {
            self.connect_all_if_down(conn_id);
            return;
        }
        // Connections may have come before the number. Those of a bowline node say themselves for
        // which path they are.
        let Some(conn) = self.conns.get(conn_id.0).filter(|c| !c.peer.is_bowline()) else { return };
        for link in conn.extra.clone() {
            self.attach_extra(link);
        }
    }

    /// Moves messages of paths that the peer no longer uses to those that the messages between the
    /// same sockets take from now on, with new numbers, behind the messages that wait there.
    fn move_to_usable_paths(&mut self, conn_id: ConnId) {
        let Some(conn) = self.conns.get_mut(conn_id.0) else { return };
        let usable_paths = usize::from(conn.usable_paths());
        let by_tcp = !conn.peer.is_bowline();
        let links: Vec<_> = conn.paths.iter().skip(usable_paths).filter_map(|p| p.link).collect();
        for link in links {
            if by_tcp {
                // The link may have brought bytes that are not processed yet.
                self.retire_link(link);
            } else {
                self.detach(link, CloseHow::Fin);
            }
        }
        let Some(conn) = self.conns.get_mut(conn_id.0) else { return };
        let used = usable_paths.min(conn.paths.len());
        let (to_paths, unused) = conn.paths.split_at_mut(used);
        for (index, path) in unused.iter_mut().enumerate() {
            // The number of usable paths is a power of two, and the path is chosen by the low bits
            // of the hash.
            let to = index & (usable_paths - 1);
            let greeting = extensions(&self.config, to as u8);
            let Some(to) = to_paths.get_mut(to) else { continue };
            path.move_messages(to, &mut self.pool, greeting);
        }
        conn.path_barrier = None;
        (0..used as u8).for_each(|index| self.note_senders(conn_id, index));
        self.signal_map(conn_id);
    }

    /// Handles a change of the peer's process. Messages begun on a connection to the earlier
    /// process are dropped at once, and its numbers are forgotten. A message begun
    /// on a link whose generation is not known may have reached the present process, and is kept.
    /// This node's numbers go on, so that they never go down [B-27].
    fn peer_restarted(&mut self, conn_id: ConnId, present: LinkId, (from, to): (u32, u32)) {
        self.stats.peer_restarts += 1;
        // Connections made after the one that tells the generation belong to the new process.
        let serial = self.link(present).map_or(0, |l| l.serial);
        let stale: Vec<_> = self.links_of(conn_id).into_iter().filter(|l| *l != present).collect();
        // Messages of a peer that acknowledges end to end come again, unless its process is gone.
        let by_tcp = self.conn(conn_id).is_some_and(|c| c.dedup.is_some());
        for id in stale {
            let Some(link) = self.link(id) else { continue };
            let later = link.serial > serial
                || matches!(link.state, LinkState::Extra | LinkState::Connecting)
                || (link.generation == to && to != 0);
            if later {
                continue;
            }
            // A link whose generation is not known may belong to the present process as well.
            if by_tcp || link.generation == 0 {
                self.cut_link(id);
            } else {
                self.close_link(id, CloseHow::Reset);
            }
        }
        let Some(conn) = self.conns.get_mut(conn_id.0) else { return };
        conn.npaths_outdated = true;
        let remote = to_socket_addr(conn.remote, 0, 0).ip();
        if let Some(dedup) = &mut conn.dedup {
            dedup.forget_reusable_numbers(serial);
        }
        let freed = conn.map.take();
        conn.change_generation(from, to);
        if let Some(barrier) = &mut conn.path_barrier {
            barrier.unsettled = 0; // the earlier process takes no messages any more
        }
        if self.conns.get(conn_id.0).is_some_and(|conn| conn.missed.is_none()) {
            self.drop_started(conn_id, from);
        }
        if freed != 0 {
            self.congestion_changed(freed);
        }
        self.check_barrier(conn_id);
        self.event(Event::PeerRestarted { remote });
    }

    /// The peer is a process of this generation, or a node that tells none (0). If that is not the
    /// one that was missed, what was begun for the missed one is dropped.
    pub(super) fn process_is_known(&mut self, conn_id: ConnId, generation: u32) {
        let Some(conn) = self.conns.get_mut(conn_id.0) else { return };
        let Some((missed, _)) = conn.missed.take() else { return };
        if missed != generation {
            self.drop_started(conn_id, missed);
        }
        for id in self.links_of(conn_id) {
            self.signal_transmit(id);
        }
    }

    /// A process that was missed has not greeted in time.
    pub(super) fn missed_overdue(&mut self, conn_id: ConnId) {
        let missed = self.conns.get(conn_id.0).and_then(|conn| conn.missed);
        // The timer may be that of an earlier one.
        if missed.is_some_and(|(_, until)| until <= self.now) {
            self.process_is_known(conn_id, 0);
        }
    }

    /// Drops messages that were begun on a connection to the process of this generation, which is
    /// gone.
    pub(super) fn drop_started(&mut self, conn_id: ConnId, generation: u32) {
        let Some(conn) = self.conns.get(conn_id.0).filter(|_| generation != 0) else { return };
        let unwritten: Vec<_> =
            (0..conn.paths.len() as u8).map(|index| self.unwritten(conn, index)).collect();
        let Some(conn) = self.conns.get_mut(conn_id.0) else { return };
        let mut dropped = Vec::new();
        for ((index, path), unwritten) in (0..).zip(&mut conn.paths).zip(unwritten) {
            path.cancel_begun(&mut self.pool, generation, unwritten, |msg| {
                dropped.push((index, msg.clone()));
            });
        }
        self.stats.send_drop_restart += dropped.len() as u64;
        for (index, msg) in &dropped {
            self.release_one(conn_id, *index, msg);
        }
        (0..8).for_each(|index| self.drop_cancelled(conn_id, index));
    }
}
