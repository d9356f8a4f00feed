//! Transmission on links, and the release of acknowledged messages. Spec: `docs/spec/rds.md`,
//! sections 2.6, 3.4 and 5.3.

use std::sync::Arc;

use bowline_base::Instant;
use bowline_wire::rds::{Flags, HEADER_LEN, Header, MAP_LEN};

use super::Node;
use super::congestion::MAP_REORDER_TIME;
use super::timers::Timer;
use crate::api::SendMemory;
use crate::config::Config;
use crate::conn::{Conn, PathBarrier, Peer};
use crate::ids::{ConnId, LinkId, SocketId};
use crate::link::{Farewell, LinkState, Op, OurGreeting};
use crate::path::{Path, TxMsg, Unwritten, mark};
use crate::rdma::op::Gone;
use crate::socket::{Sock, interest_bit};
use crate::txlog::{TxBatch, TxLog, TxPool};

/// Maximum number of pieces in a batch, below the system's limit for one write.
const PIECES_MAX: usize = 256;
/// The part of the limit of queued messages that logs may take whatever their messages need.
pub(super) const LOG_SPARE: usize = 4;

impl Node {
    /// Tells the driver that a link has something to write, once.
    pub(super) fn signal_transmit(&mut self, id: LinkId) {
        if let Some(link) = self.links.get_mut(id.0)
            && link.state == LinkState::Serving
            && !(link.tx.busy || link.tx.blocked || link.tx.signalled)
        {
            link.tx.signalled = true;
            self.outputs.push_back(crate::api::Output::Transmit { link: id });
        }
    }

    /// Returns the link that carries a connection's maps.
    fn map_link(&self, conn: ConnId) -> Option<LinkId> {
        self.conns.get(conn.0)?.map_link()
    }

    /// Asks the driver to transmit if a map is due.
    pub(super) fn signal_map(&mut self, conn: ConnId) {
        if let Some(link) = self.rdma_link_of(conn) {
            self.signal_rdma(link);
        } else if let Some(link) = self.map_link(conn) {
            self.signal_transmit(link);
        }
    }

    /// Returns the number of bytes that wait to be written on a link.
    pub fn queued_bytes(&self, id: LinkId) -> usize {
        let Some(link) = self.link(id) else { return 0 };
        let waiting = link
            .path
            .and_then(|p| self.conn(link.conn)?.paths.get(usize::from(p)))
            .filter(|p| p.link == Some(id))
            .map_or(0, |p| p.unplanned_bytes());
        (link.tx.plan_bytes + waiting) as usize
    }

    /// Returns the number of bytes kept for the path of a link, sent or not, until the peer
    /// acknowledges them end to end; 0 if TCP's acknowledgements release them.
    pub fn held_bytes(&self, id: LinkId) -> u64 {
        let Some(link) = self.link(id) else { return 0 };
        let Some(conn) = self.conn(link.conn).filter(|c| c.peer.is_bowline()) else { return 0 };
        let path = link.path.and_then(|p| conn.paths.get(usize::from(p)));
        let path = path.filter(|p| p.link == Some(id));
        path.map_or(0, |p| p.queue.front().map_or(0, |m| p.log.held_from(m.log_start)))
    }

    /// Fills `batch` with up to about `max_bytes` bytes to write on a link, and marks the link busy
    /// until [`transmitted`](Self::transmitted). There is one write at a time; writes are
    /// limited in bytes, where a kernel counts messages. Returns the number of bytes; 0
    /// when there is nothing to write, a write is in progress, or TCP is full.
    pub fn poll_transmit(
        &mut self,
        now: Instant,
        id: LinkId,
        batch: &mut TxBatch,
        max_bytes: usize,
    ) -> usize {
        self.now = now;
        batch.clear();
        let Some(link) = self.links.get_mut(id.0) else { return 0 };
        link.tx.signalled = false;
        if link.state != LinkState::Serving || link.tx.busy || link.tx.blocked {
            return 0;
        }
        self.plan(id, max_bytes as u64);
        if self.ending.is_some() {
            self.finish_conn_of(id);
        }
        let Some(link) = self.links.get_mut(id.0) else { return 0 };
        let path = link.path.and_then(|p| self.conns.get(link.conn.0)?.paths.get(usize::from(p)));
        for op in &link.tx.plan {
            let room = max_bytes.saturating_sub(batch.len()) as u64;
            if room == 0 || batch.pieces() >= PIECES_MAX {
                break;
            }
            match op {
                Op::Inline { bytes, from } => {
                    let to = bytes.len().min(from + room as usize);
                    batch.push(Arc::clone(bytes), *from, to);
                }
                Op::Log { from, to } => {
                    if let Some(path) = path {
                        path.log.collect(*from, (*to).min(from + room), batch);
                    }
                }
            }
        }
        if batch.is_empty() {
            self.drain_if_told(id);
            return 0;
        }
        link.tx.busy = true;
        link.tx.writable = false;
        link.tx.in_flight = batch.len() as u64;
        batch.len()
    }

    /// Adds frames to the plan until it is `max` bytes long or no frame is left.
    fn plan(&mut self, id: LinkId, max: u64) {
        let is_map_link = {
            let Some(link) = self.links.get(id.0) else { return };
            let Some(conn) = self.conns.get(link.conn.0) else { return };
            conn.map_due && self.ending.is_none() && self.map_link(link.conn) == Some(id)
        };
        let Some(link) = self.links.get_mut(id.0) else { return };
        let Some(conn) = self.conns.get_mut(link.conn.0) else { return };
        let Some(index) = link.path else { return };
        if link.tx.plan_bytes >= max {
            return;
        }
        if is_map_link {
            conn.map_due = false;
            conn.map_settles_at = None;
            let before = conn.map_sent_on.replace((id, self.now));
            let moved = before.is_some_and(|(on, at)| on != id && self.now < at + MAP_REORDER_TIME);
            if moved
                && !conn.peer.is_bowline()
                && conn.map_changed_link_at.replace(self.now).is_none()
            {
                self.timers.insert((self.now + MAP_REORDER_TIME, Timer::ResendMap(link.conn)));
            }
            let mut ack = 0;
            if conn.peer.is_bowline()
                && let Some(path) = conn.paths.get(usize::from(index))
            {
                ack = path.rx_expected.saturating_sub(1); // [R-2021]
                link.ack_sent();
            }
            let header =
                Header { ack, len: MAP_LEN as u32, flags: Flags::CONG_BITMAP, ..Header::default() };
            let mut bytes = Vec::with_capacity(HEADER_LEN + MAP_LEN);
            bytes.extend_from_slice(&header.to_bytes());
            self.local_addrs[conn.local_addr].map.emit(&mut bytes);
            link.push_inline(&mut self.pool, &bytes);
        }
        if link.greeting.ours == OurGreeting::Due {
            link.greeting.ours = OurGreeting::Sent;
            let expected = conn.paths.get(usize::from(index)).map_or(0, |p| p.rx_expected);
            let probe = Header {
                ack: expected.saturating_sub(1),
                sport: bowline_wire::rds::PROBE_PORT,
                // A kernel drops an old, flagged frame and leaves its expected numbers unchanged.
                flags: if conn.peer.is_bowline() { Flags::NONE } else { Flags::RETRANSMITTED },
                ext: super::handshake::extensions(&self.config, index),
                ..Header::default()
            };
            self.stats.send_pong += 1;
            link.push_inline(&mut self.pool, &probe.to_bytes());
            link.ack_sent();
            if let Some(path) = conn.paths.get_mut(usize::from(index)) {
                path.untold_since = None;
            }
        }
        let to_bowline = conn.peer.is_bowline();
        let Some(path) = conn.paths.get_mut(usize::from(index)) else { return };
        match link.farewell {
            Farewell::NotDue => {}
            Farewell::Due => {
                link.farewell = Farewell::Planned;
                if to_bowline {
                    // What comes from now on is not acknowledged any more, and so not taken.
                    link.deaf = true;
                }
                // As long as the peer has not greeted on this link, it may be a kernel by now.
                if to_bowline && link.greeting.is_received() {
                    let farewell = Header {
                        ack: path.rx_expected.saturating_sub(1),
                        ext: super::handshake::farewell(index),
                        ..Header::default()
                    };
                    self.stats.acks_sent += 1;
                    link.push_inline(&mut self.pool, &farewell.to_bytes());
                    link.ack_sent();
                }
                return self.resume_deaf(id);
            }
            Farewell::Planned => return,
        }
        let held_back =
            conn.missed.is_some() || conn.path_barrier.as_ref().is_some_and(|g| index >= g.first);
        let held_back = held_back || self.ending.is_some(); // [R-2050]
        let hold = link.greeting.holds_messages() || link.awaits_peer_kind || held_back; // [R-2013]
        let more = !hold && path.planned < path.queue.len();
        if link.rx.ack.due || (link.rx.ack.bytes > 0 && (more || !link.tx.plan.is_empty())) {
            let ack = Header { ack: path.rx_expected.saturating_sub(1), ..Header::default() };
            self.stats.acks_sent += 1;
            link.push_inline(&mut self.pool, &ack.to_bytes());
            link.ack_sent();
        }
        let first_new = |path: &Path| {
            let new = |m: &TxMsg| !m.has(mark::RETRANS) && !m.is_dropped();
            let at = path.queue.iter().skip(path.planned).position(new);
            at.map_or(path.queue.len(), |at| path.planned + at)
        };
        let until = match (more, link.greeting.probe_again) {
            (false, false) => return,
            (true, false) => path.queue.len(),
            (false, true) => path.planned,
            (true, true) => first_new(path),
        };
        for msg in path.queue.range_mut(path.planned..until) {
            if link.tx.plan_bytes >= max {
                break;
            }
            path.planned += 1;
            if msg.is_dropped() {
                continue;
            }
            let start = link.tx.written + link.tx.plan_bytes;
            msg.stream_start = start;
            link.last_start = start;
            link.last_end = start + msg.frame_len();
            if msg.has(mark::RETRANS) {
                self.stats.retransmits += 1;
                let head = retransmit_header(&path.log, msg.log_start, to_bowline);
                let from = msg.log_start + HEADER_LEN as u64;
                let to = from + u64::from(msg.len);
                link.push_inline(&mut self.pool, &head);
                if to > from {
                    link.push_log(from, to);
                }
            } else {
                let (from, to) = (msg.log_start, msg.log_start + msg.frame_len());
                link.push_log(from, to);
            }
        }
        path.skip_dropped();
        if link.greeting.probe_again && path.planned == first_new(path) {
            self.stats.send_pong += 1;
            link.push_reminder(&mut self.pool, &self.config, index, path);
        }
    }

    /// Ends a write: `written` bytes went to TCP; `blocked` when it takes no more for now.
    pub fn transmitted(&mut self, now: Instant, id: LinkId, written: usize, blocked: bool) {
        self.now = now;
        let Some(link) = self.links.get_mut(id.0) else { return };
        if !link.tx.busy {
            return;
        }
        let partial = (written as u64) < link.tx.in_flight;
        link.tx.busy = false;
        link.tx.in_flight = 0;
        link.tx.written += written as u64;
        link.tx.plan_bytes -= written as u64;
        let mut rest = written as u64;
        while rest > 0 {
            let Some(op) = link.tx.plan.front_mut() else { break };
            let n = op.len().min(rest);
            rest -= n;
            if n == op.len() {
                if let Some(Op::Inline { bytes, .. }) = link.tx.plan.pop_front() {
                    self.pool.put(bytes);
                }
                continue;
            }
            match op {
                Op::Log { from, .. } => *from += n,
                Op::Inline { from, .. } => *from += n as usize,
            }
        }
        if blocked {
            self.stats.tcp_sndbuf_full += 1;
        }
        // TCP may have found room again before the driver reported the write that found none.
        let blocked = blocked && !link.tx.writable;
        link.tx.blocked = blocked;
        let ack = std::mem::take(&mut link.tx.peer_ack);
        let owner = link.path.map(|path| (link.conn, path));
        let cancelled = partial && self.unplan_unstarted(id);
        if let Some((conn, path)) = owner {
            if cancelled {
                self.forget_written(conn, path);
            }
            if ack > 0 {
                self.release_by_ack(conn, path, ack);
            }
            self.after_release(conn, path);
        }
        if !blocked {
            self.signal_if_able(id);
        }
        self.drain_if_told(id);
    }

    /// Asks the driver to transmit if something is due, including what became due during a write
    /// [R-1203]. Messages that have to wait for another event do not count.
    fn signal_if_able(&mut self, id: LinkId) {
        let Some(link) = self.links.get(id.0) else { return };
        let map_due = self.conns.get(link.conn.0).is_some_and(|c| c.map_due);
        let frame_due = link.rx.ack.due || link.farewell == Farewell::Due;
        if frame_due || (map_due && self.map_link(link.conn) == Some(id)) {
            self.signal_transmit(id);
            return;
        }
        if self.queued_bytes(id) == 0 {
            return;
        }
        let held_back = link.path.is_some_and(|index| {
            self.conns.get(link.conn.0).is_some_and(|conn| {
                let barrier = conn.path_barrier.as_ref();
                conn.missed.is_some() || barrier.is_some_and(|g| index >= g.first)
            })
        });
        if link.tx.plan_bytes > 0
            || !(link.greeting.holds_messages() || link.awaits_peer_kind || held_back)
        {
            self.signal_transmit(id);
        }
    }

    /// Takes messages of which no byte was written out of the plan again. So they can still be
    /// cancelled, and are not flagged as repeated if the connection breaks. Tells whether
    /// one is cancelled already.
    fn unplan_unstarted(&mut self, id: LinkId) -> bool {
        let Some(link) = self.links.get_mut(id.0) else { return false };
        let Some(path) =
            link.path.and_then(|p| self.conns.get_mut(link.conn.0)?.paths.get_mut(usize::from(p)))
        else {
            return false;
        };
        let mut cancelled = false;
        let mut end = link.tx.written + link.tx.plan_bytes;
        let mut at = path.planned;
        while at > 0 {
            at -= 1;
            let Some(msg) = path.queue.get_mut(at) else { break };
            if msg.is_dropped() {
                continue;
            }
            if msg.stream_start < link.tx.written || msg.stream_start + msg.frame_len() != end {
                break;
            }
            end = msg.stream_start;
            msg.stream_start = crate::path::UNPLANNED;
            path.planned = at;
            cancelled |= msg.has(mark::CANCELLED);
        }
        let mut cut = link.tx.written + link.tx.plan_bytes - end;
        link.tx.plan_bytes -= cut;
        while cut > 0 {
            let Some(op) = link.tx.plan.back_mut() else { break };
            let n = op.len().min(cut);
            cut -= n;
            if let Op::Log { to, .. } = op {
                *to -= n;
            }
            if op.len() == 0 || matches!(op, Op::Inline { .. }) {
                link.tx.plan.pop_back();
            }
        }
        cancelled
    }

    /// Removes cancelled messages that a queue does not need any more, and lifts the path barrier
    /// if it waited for them.
    pub(super) fn after_release(&mut self, conn_id: ConnId, index: u8) {
        let Some(conn) = self.conns.get_mut(conn_id.0) else { return };
        if let Some(path) = conn.paths.get_mut(usize::from(index)) {
            path.drop_cancelled_first(&mut self.pool);
            let written = || path.link.and_then(|l| Some(self.links.get(l.0)?.tx.written));
            let written_out = path.cancelled_end > 0 && written() >= Some(path.cancelled_end);
            let many = path.has_many_cancelled();
            if written_out {
                self.forget_written(conn_id, index);
            }
            if many {
                self.drop_cancelled(conn_id, index);
            }
        }
        self.check_barrier(conn_id);
    }

    /// Returns what the present link of a path still takes of messages that were begun.
    pub(super) fn unwritten(&self, conn: &Conn, index: u8) -> Unwritten {
        let Some(rdma) = &conn.rdma else {
            let link = conn.paths.get(usize::from(index)).and_then(|path| path.link);
            let written = link.and_then(|link| self.links.get(link.0)).map_or(0, |l| l.tx.written);
            return Unwritten::Stream { written };
        };
        let link = rdma.link.and_then(|link| self.rdma_links.get(link.0));
        Unwritten::Message(link.and_then(|l| l.tx.sending.as_ref().map(|_| l.tx.newest)))
    }

    /// Forgets the bytes of cancelled messages that are not being written any more.
    fn forget_written(&mut self, conn_id: ConnId, index: u8) {
        let Some(conn) = self.conns.get_mut(conn_id.0) else { return };
        let Some(path) = conn.paths.get_mut(usize::from(index)) else { return };
        let link = path.link.and_then(|link| self.links.get(link.0));
        path.forget_written(&mut self.pool, link.map_or(0, |link| link.tx.written));
        path.skip_dropped();
    }

    /// Removes cancelled messages wherever they stand in a queue, and gives back their memory.
    pub(super) fn drop_cancelled(&mut self, conn_id: ConnId, index: u8) {
        let Some(conn) = self.conns.get(conn_id.0) else { return };
        let unwritten = self.unwritten(conn, index);
        let Some(conn) = self.conns.get_mut(conn_id.0) else { return };
        let Some(path) = conn.paths.get_mut(usize::from(index)) else { return };
        let barrier = conn.path_barrier.as_ref();
        let barrier = barrier.and_then(|barrier| barrier.until.get(usize::from(index)).copied());
        path.drop_cancelled(&mut self.pool, unwritten, barrier);
    }

    /// Returns the memory that messages take until they are released.
    pub fn send_memory(&self) -> SendMemory {
        let paths = || self.conns.iter().flat_map(|(_, conn)| &conn.paths);
        SendMemory {
            frames: self.pool.memory(),
            records: paths().map(|p| p.queue.capacity()).sum::<usize>() * size_of::<TxMsg>(),
            accounted: self.pool.accounted(),
            paths: paths().count(),
        }
    }

    /// Keeps the memory of all logs near to what their messages need, and notes whether these are
    /// more than is good.
    #[cold]
    pub(super) fn limit_sends(&mut self) {
        let limit = self.config.limits.send_bytes_total;
        if self.pool.is_sparse(limit / LOG_SPARE) {
            for path in self.conns.iter_mut().flat_map(|conn| &mut conn.paths) {
                path.compact(&mut self.pool, true);
            }
        }
        self.many_sends |= self.pool.accounted() >= limit;
    }

    /// Messages are fewer again: lets those send who were refused because there were many.
    #[cold]
    pub(super) fn allow_sends(&mut self) {
        self.many_sends = false;
        let waits = |sock: &Sock| sock.interest & interest_bit::WRITE != 0;
        let waiting = self.sockets.iter().filter(|(_, sock)| waits(sock));
        let waiting: Vec<_> = waiting.map(|(id, _)| SocketId(id)).collect();
        waiting.into_iter().for_each(|id| self.wake(id, interest_bit::WRITE));
    }

    /// Handles TCP's report that it takes bytes again.
    pub fn handle_writable(&mut self, now: Instant, id: LinkId) {
        self.now = now;
        let Some(link) = self.links.get_mut(id.0) else { return };
        link.tx.writable = link.tx.busy;
        if link.tx.blocked {
            link.tx.blocked = false;
            self.signal_transmit(id);
        }
    }

    /// Tells whether messages on this link are released by TCP's own acknowledgements.
    pub fn wants_tcp_ack(&self, id: LinkId) -> bool {
        let Some(link) = self.link(id) else { return false };
        link.state == LinkState::Serving
            && link.tx.acked < link.tx.written
            && self.conn(link.conn).is_some_and(|c| !c.peer.is_bowline())
    }

    /// Tells whether this link's peer releases its messages by TCP's own acknowledgements.
    pub fn owes_tcp_ack(&self, id: LinkId) -> bool {
        let conn = self.link(id).and_then(|link| self.conn(link.conn));
        conn.is_some_and(|conn| !conn.peer.is_bowline())
    }

    /// Lists the links of which [`wants_tcp_ack`](Self::wants_tcp_ack) is true.
    pub fn links_wanting_tcp_ack(&self, out: &mut Vec<LinkId>) {
        out.extend(
            self.links.iter().map(|(id, _)| LinkId(id)).filter(|id| self.wants_tcp_ack(*id)),
        );
    }

    /// Handles TCP's report of how many written bytes are not acknowledged yet.
    pub fn handle_tcp_acked(&mut self, now: Instant, id: LinkId, unacked_bytes: u64) {
        self.now = now;
        let Some(link) = self.links.get_mut(id.0) else { return };
        let acked = link.tx.written.saturating_sub(unacked_bytes);
        if acked > link.tx.acked {
            link.tx.acked = acked;
            self.stats.tcp_write_space_calls += 1;
            self.release_by_tcp(id);
        }
    }

    /// Releases messages that TCP has acknowledged, unless the peer acknowledges end to end: a
    /// kernel's h_ack is 0.
    pub(super) fn release_by_tcp(&mut self, id: LinkId) {
        let Some(link) = self.links.get(id.0) else { return };
        let (conn_id, acked) = (link.conn, link.tx.acked);
        let Some(index) = link.path else { return };
        if !link.confirmed {
            return;
        }
        loop {
            let Some(conn) = self.conns.get_mut(conn_id.0) else { return };
            if conn.peer != Peer::Kernel {
                return;
            }
            let Some(path) = conn.paths.get_mut(usize::from(index)) else { return };
            let Some(front) = path.queue.front().filter(|_| path.planned > 0) else { break };
            let unplanned = front.stream_start == crate::path::UNPLANNED;
            if !unplanned && front.stream_start + front.frame_len() > acked {
                break;
            }
            self.release_front(conn_id, index);
        }
        self.after_release(conn_id, index);
    }

    /// Releases messages that a bowline peer has processed: all up to number `ack` [R-2020].
    pub(super) fn release_by_ack(&mut self, conn_id: ConnId, index: u8, ack: u64) {
        let Some(conn) = self.conns.get_mut(conn_id.0) else { return };
        let Some(path) = conn.paths.get_mut(usize::from(index)) else { return };
        if ack >= path.next_tx_seq {
            // The number was never used here. Another process had this address meanwhile, and the
            // peer does not know yet that it is gone [R-2025].
            return;
        }
        let mut link = path.link.and_then(|l| self.links.get_mut(l.0));
        let mut count = 0;
        for msg in &path.queue {
            // A message that was not sent is not released, whatever the peer says [R-2025].
            let started = path.planned > count || msg.has(mark::RETRANS | mark::CANCELLED);
            if msg.seq > ack || !started {
                break;
            }
            // A frame that is partly written stays until it is written to its end. The peer may
            // have received messages that a write in progress holds; the end of the write checks
            // again.
            if let Some(link) = &mut link
                && msg.stream_start != crate::path::UNPLANNED
                && msg.stream_start + msg.frame_len() > link.tx.written
            {
                if msg.stream_start < link.tx.written + link.tx.in_flight {
                    link.tx.peer_ack = link.tx.peer_ack.max(ack);
                }
                break;
            }
            count += 1;
        }
        // A connection that was of use is made again at once. A pong does not count, since it
        // serves only a peer that wants to be dialled without pause.
        if path.queue.iter().take(count).any(|m| m.socket.is_some() && !m.is_dropped()) {
            path.delay = 0;
        }
        self.release_first(conn_id, index, count);
        self.after_release(conn_id, index);
    }

    /// Releases the first `count` messages of a path. Neighbouring messages of one socket are
    /// accounted for together.
    pub(super) fn release_first(&mut self, conn_id: ConnId, index: u8, count: usize) {
        let mut left = count;
        while left > 0 {
            let Some(conn) = self.conns.get_mut(conn_id.0) else { return };
            let Some(path) = conn.paths.get_mut(usize::from(index)) else { return };
            let special = mark::CANCELLED | mark::PONG | mark::ZCOPY | mark::OPS;
            let Some(socket) = path.queue.front().map(|m| m.socket) else { return };
            let (mut run, mut bytes) = (0, 0);
            for msg in path.queue.iter().take(left) {
                if msg.socket != socket || msg.has(special) {
                    break;
                }
                run += 1;
                bytes += msg.len as usize;
            }
            if run == 0 {
                left -= 1;
                self.release_front(conn_id, index);
                continue;
            }
            left -= run;
            path.pop_plain(run, bytes, &mut self.pool);
            if let Some(id) = socket {
                self.release_accounting(id, run, bytes);
            }
        }
    }

    fn release_front(&mut self, conn_id: ConnId, index: u8) {
        let Some(conn) = self.conns.get_mut(conn_id.0) else { return };
        let Some(path) = conn.paths.get_mut(usize::from(index)) else { return };
        let Some(msg) = path.pop_front(&mut self.pool) else { return };
        if msg.has(mark::OPS) {
            self.ops_gone(conn_id, msg.seq, Gone::Acknowledged);
        }
        if !msg.has(mark::CANCELLED) {
            self.release_message(&msg);
        }
    }

    /// Makes paths from `first` on wait for the messages queued on lower paths.
    pub(super) fn raise_barrier(&mut self, conn_id: ConnId, first: u8) {
        let Some(conn) = self.conns.get_mut(conn_id.0) else { return };
        let until = conn.paths.iter().take(usize::from(first)).map(|p| p.next_tx_seq).collect();
        conn.path_barrier = Some(PathBarrier { first, until, unsettled: 0 });
        self.check_barrier(conn_id);
    }

    /// Lifts the barrier once the messages it waits for are released.
    pub(super) fn check_barrier(&mut self, conn_id: ConnId) {
        let Some(conn) = self.conns.get_mut(conn_id.0) else { return };
        let Some(barrier) = &conn.path_barrier else { return };
        for path in &mut conn.paths {
            if path.begins_with_many_dropped() {
                path.drop_forgotten(&mut self.pool); // they would be passed over each time
            }
        }
        let bowline = conn.peer.is_bowline();
        let through =
            barrier.until.iter().zip(&conn.paths).enumerate().all(|(index, (until, path))| {
                let greeted = || {
                    let link = path.link.and_then(|l| self.links.get(l.0));
                    link.is_some_and(|l| l.greeting.is_received())
                };
                if bowline && barrier.unsettled & (1 << index) != 0 && !greeted() {
                    return false;
                }
                // Probes, pongs and messages that will never be sent cannot be overtaken.
                let counts = |m: &&TxMsg| m.socket.is_some() && !m.is_dropped();
                let first = path.queue.iter().find(counts);
                first.is_none_or(|m| m.seq >= *until)
            });
        if through {
            conn.path_barrier = None;
            let links: Vec<_> = conn.paths.iter().filter_map(|p| p.link).collect();
            for link in links {
                self.signal_transmit(link);
            }
        }
    }

    /// Returns the payload bytes and messages that are queued or unacknowledged, over all peers.
    pub fn unsent_total(&self) -> u64 {
        self.conns
            .iter()
            .flat_map(|(_, c)| &c.paths)
            .flat_map(|p| &p.queue)
            .filter(|m| m.socket.is_some() && !m.has(mark::CANCELLED))
            .map(|m| m.frame_len())
            .sum()
    }
}

/// Returns the header of a message that is sent again, with its flag.
fn retransmit_header(log: &TxLog, start: u64, bowline: bool) -> [u8; HEADER_LEN] {
    let mut header = log.header(start);
    header.flags = Flags::RETRANSMITTED;
    if bowline {
        header.flags = header.flags.with(Flags::ACK_REQUIRED);
    }
    header.to_bytes()
}

impl crate::link::Link {
    fn push_inline(&mut self, pool: &mut TxPool, bytes: &[u8]) {
        self.tx.plan_bytes += bytes.len() as u64;
        self.tx.plan.push_back(Op::Inline { bytes: pool.copy_to_chunk(bytes), from: 0 });
    }

    fn push_log(&mut self, from: u64, to: u64) {
        self.tx.plan_bytes += to - from;
        if let Some(Op::Log { to: end, .. }) = self.tx.plan.back_mut()
            && *end == from
        {
            *end = to;
        } else {
            self.tx.plan.push_back(Op::Log { from, to });
        }
    }

    /// Writes another probe, outside the queue. It repeats the number of the last message sent,
    /// which changes a kernel's expected number least. So it goes out behind all repeated
    /// messages; otherwise a kernel would take repeated messages for new ones, or new ones for
    /// repeated ones.
    fn push_reminder(&mut self, pool: &mut TxPool, config: &Config, index: u8, path: &Path) {
        self.greeting.probe_again = false;
        let next = path.queue.get(path.planned).map_or(path.next_tx_seq, |m| m.seq);
        let probe = Header {
            sequence: next.wrapping_sub(1),
            sport: bowline_wire::rds::PROBE_PORT,
            ext: super::handshake::extensions(config, index),
            ..Header::default()
        };
        self.push_inline(pool, &probe.to_bytes());
    }

    fn ack_sent(&mut self) {
        self.rx.ack.settle();
    }
}
