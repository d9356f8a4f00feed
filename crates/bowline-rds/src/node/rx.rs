//! Receives bytes, cuts them into frames and delivers them to sockets. Spec: `docs/spec/rds.md`,
//! sections 2.4 and 6.1.

use std::time::Duration;

use bowline_base::Instant;
use bowline_wire::rds::{
    Extension, Extensions, Flags, HEADER_LEN, Handshake, Header, MAP_LEN, MapView, PROBE_PORT,
};

use super::Node;
use super::timers::Timer;
use crate::api::{Event, Misbehaviour, Output, Refusal};
use crate::config::MAX_MESSAGE_KERNEL;
use crate::dedup::{Dedup, SourceLink};
use crate::ids::{ConnId, LinkId, RdmaLinkId, SocketId};
use crate::link::Partial;
use crate::path::PathState;
use crate::path::mark;
use crate::rdma::RdmaState;
use crate::recvq::{Origin, Rare, RecvMsg};
use crate::rxbuf::{Rope, RxBuf};
use crate::socket::{Sock, to_socket_addr};

/// Number of buffers received but not parsed at which reading pauses.
const BACKLOG_MAX: usize = 4;
/// A peer that has been quiet for this time on old connections does not repeat messages any more.
const QUIET_TIME: Duration = Duration::from_secs(60);
/// On a younger connection TCP may still be repeating messages: Linux gives up after 15 minutes or,
/// where round trips are long, after 30 (`tcp_retries2`).
const REPEAT_TIME: Duration = Duration::from_secs(30 * 60);
/// How long a peer that has lost a connection is expected back: it repeats messages when it comes
/// back.
const AWAY_TIME: Duration = Duration::from_secs(24 * 60 * 60);
/// Bytes of an incomplete message below which its connection is not dropped for it.
const PARTIAL_SMALL: usize = 16 << 10;
/// How long an acknowledgement that the peer did not ask for waits to go out with another frame.
const ACK_DELAY: Duration = Duration::from_millis(10);
/// Cost of a congestion map, and of another frame without a port, in messages of a turn.
const MAP_COST: usize = 64;
const CONTROL_COST: usize = 4;
/// Number of bytes of processed frames that are acknowledged at once.
pub(super) const ACK_BYTES: u64 = 256 << 10;

impl Node {
    /// Tells whether the driver may read the link.
    pub fn wants_read(&self, id: LinkId) -> bool {
        self.link(id).is_some_and(|l| {
            !l.rx.paused && l.waits_for.is_empty() && l.rx.backlog.len() < BACKLOG_MAX
        })
    }

    /// Takes the bytes of one read; [`process`](Self::process) parses them.
    pub fn handle_data(&mut self, now: Instant, id: LinkId, buf: RxBuf) {
        self.now = now;
        let Some(link) = self.links.get_mut(id.0) else { return };
        self.stats.tcp_data_ready_calls += 1;
        link.rx.bytes += buf.bytes().len() as u64;
        link.rx.backlog.push_back(buf);
        if !link.rx.listed && !link.rx.paused {
            link.rx.listed = true;
            self.ready.push_back(id);
        }
    }

    /// Tells whether bytes wait to be parsed.
    pub fn has_backlog(&self) -> bool {
        !self.ready.is_empty()
    }

    /// Parses received bytes: at most `budget` messages, or fewer frames that cost more. Stops
    /// earlier when a message has come for `until` and that socket holds as much as a reader soon
    /// takes. Returns whether bytes remain.
    pub fn process(&mut self, now: Instant, until: Option<SocketId>, budget: usize) -> bool {
        self.now = now;
        let mut budget = budget;
        while let Some(id) = self.ready.front().copied() {
            match self.process_link(id, until, &mut budget, false) {
                ParseEnd::Empty => {
                    self.ready.pop_front();
                    if let Some(link) = self.links.get_mut(id.0) {
                        link.rx.listed = false;
                    }
                }
                ParseEnd::Satisfied => return self.has_backlog(),
                ParseEnd::Budget => {
                    self.ready.rotate_left(1); // so that no peer starves the others
                    return true;
                }
            }
        }
        false
    }

    /// Parses all bytes that a link has left. A peer must not get round its limit by connecting
    /// again and again: far beyond the limit, the rest waits, and is lost if the connection is
    /// closed.
    pub(super) fn process_all(&mut self, id: LinkId) {
        let mut budget = usize::MAX;
        self.process_link(id, None, &mut budget, true);
        self.ready.retain(|l| *l != id);
        if let Some(link) = self.links.get_mut(id.0) {
            link.rx.listed = false;
        }
    }

    /// Returns the bytes that messages make this node hold: those that wait for readers or for
    /// acknowledgements, incomplete ones, and the records that recognise repetitions.
    pub fn memory_held(&self) -> usize {
        let received = self.recv_held + self.partial_bytes;
        received + self.pool.memory() + self.dedup_budget.memory()
    }

    /// Sends acknowledgements that peers asked for, because the driver is about to wait for input.
    pub fn idle(&mut self, now: Instant) {
        self.now = now;
        while let Some(id) = self.ack_asked.pop() {
            let Some(link) = self.links.get_mut(id.0) else { continue };
            link.rx.ack.listed = false;
            if link.rx.ack.asked {
                link.rx.ack.due = true;
                self.signal_transmit(id);
            }
        }
    }

    /// Acknowledges all received messages now, whether peers asked for it or not. The node is about
    /// to end, and messages that it does not acknowledge would be sent again to its successor.
    pub fn acknowledge_all(&mut self, now: Instant) {
        self.now = now;
        let owing: Vec<_> = self
            .links
            .iter()
            .filter(|(_, l)| l.rx.ack.bytes > 0)
            .map(|(id, _)| LinkId(id))
            .collect();
        for id in owing {
            if let Some(link) = self.link_mut(id) {
                link.rx.ack.due = true;
                self.signal_transmit(id);
            }
        }
        let over_rdma = self.rdma_links.iter().filter(|(_, link)| link.rx.unacknowledged);
        let over_rdma: Vec<_> = over_rdma.map(|(id, _)| RdmaLinkId(id)).collect();
        for id in over_rdma {
            if let Some(link) = self.rdma_links.get_mut(id.0) {
                link.rx.ack_due = true;
                self.signal_rdma(id);
            }
        }
    }

    /// Returns the length of the longest message that is taken, in bytes.
    pub(super) fn frame_limit(&self) -> usize {
        self.config.max_message.max(MAX_MESSAGE_KERNEL) as usize
    }

    fn process_link(
        &mut self,
        id: LinkId,
        until: Option<SocketId>,
        budget: &mut usize,
        regardless: bool,
    ) -> ParseEnd {
        let limit = self.frame_limit();
        loop {
            let Some(link) = self.links.get_mut(id.0) else { return ParseEnd::Empty };
            let conn = link.conn;
            let Some(buf) = link.rx.backlog.pop_front() else { return ParseEnd::Empty };
            let mut at = std::mem::take(&mut link.rx.offset);
            let full_before = link.rx.backlog.len() + 1 >= BACKLOG_MAX;
            let deaf = link.deaf; // such a link brings nothing that takes memory
            // What was left unread by a connection that never served comes again, if its peer waits
            // for this node's acknowledgements.
            let comes_again =
                link.path.is_none() && self.conn(conn).is_some_and(|c| c.peer.is_bowline());
            let unread = regardless && !comes_again;
            let may = if unread { self.may_take_unread(conn) } else { self.may_receive(conn) };
            let may = may || deaf;
            if !may {
                let Some(link) = self.links.get_mut(id.0) else { return ParseEnd::Empty };
                link.rx.offset = at;
                link.rx.backlog.push_front(buf);
                if !std::mem::replace(&mut link.rx.paused, true) {
                    self.paused.push(id);
                    self.stats.read_pauses += 1;
                }
                return ParseEnd::Empty;
            }
            while at < buf.bytes().len() {
                if let Some(stop) = self.take_plain(id, &buf, &mut at, until, budget) {
                    self.finish_buffer(id, buf, at, full_before);
                    return stop;
                }
                if at == buf.bytes().len() {
                    break;
                }
                let Some(link) = self.links.get_mut(id.0) else { return ParseEnd::Empty };
                let rest = &buf.bytes()[at..];
                let (header, rope, seen) = if let Some(partial) = &mut link.rx.partial {
                    let n = partial.need.min(rest.len());
                    let copied = partial.rope.push(&buf, at, n);
                    partial.need -= n;
                    at += n;
                    self.stats.rx_copied_bytes += copied as u64;
                    if partial.need > 0 {
                        self.partial_bytes += n;
                        self.limit_partials();
                        break;
                    }
                    self.partial_bytes -= partial.rope.len() - n;
                    let Some(partial) = link.rx.partial.take() else { break };
                    (partial.header, partial.rope, partial.first_seen)
                } else {
                    let header = if link.rx.head_len == 0
                        && let Some(bytes) = rest.first_chunk::<HEADER_LEN>()
                    {
                        at += HEADER_LEN;
                        Header::from_bytes(bytes)
                    } else {
                        let n = rest.len().min(HEADER_LEN - link.rx.head_len);
                        let filled = link.rx.head_len;
                        link.rx.head[filled..filled + n].copy_from_slice(&rest[..n]);
                        link.rx.head_len += n;
                        at += n;
                        if link.rx.head_len < HEADER_LEN {
                            break;
                        }
                        link.rx.head_len = 0;
                        Header::from_bytes(&link.rx.head)
                    };
                    let len = header.len as usize;
                    if len > limit {
                        // [B-6]
                        self.stats.peer_oversized += 1;
                        self.misbehaved(id, Misbehaviour::MessageTooLong);
                        return ParseEnd::Empty;
                    }
                    let mut rope = Rope::default();
                    let n = len.min(buf.bytes().len() - at);
                    let copied = rope.push(&buf, at, n);
                    self.stats.rx_copied_bytes += copied as u64;
                    at += n;
                    if n < len {
                        link.rx.partial =
                            Some(Partial { header, rope, need: len - n, first_seen: self.now });
                        self.partial_bytes += n;
                        self.limit_partials();
                        break;
                    }
                    (header, rope, self.now)
                };
                let receiver = self.frame(id, &header, rope, seen);
                *budget = budget.saturating_sub(cost(&header));
                let satisfied = until.is_some() && receiver == until && self.has_enough(until);
                if satisfied || *budget == 0 {
                    self.finish_buffer(id, buf, at, full_before);
                    return if satisfied { ParseEnd::Satisfied } else { ParseEnd::Budget };
                }
            }
            if full_before && self.wants_read(id) {
                self.outputs.push_back(Output::Resume { link: id });
            }
        }
    }

    /// Keeps the bytes of incomplete messages within their limit: the connection whose message was
    /// begun first is reset. Pausing would not help, since no message might ever be completed. The
    /// sender sends the message again. Bytes that TCP has acknowledged are still read, and released
    /// soon after.
    pub(super) fn limit_partials(&mut self) {
        let limit = self.config.limits.partial_bytes_total.max(self.frame_limit());
        while self.partial_bytes > limit {
            let staying = || self.links.iter().filter(|(_, l)| !l.state.is_leaving());
            let over_rdma =
                || self.rdma_links.iter().filter(|(_, l)| l.state != RdmaState::Closing);
            let total = staying().map(|(_, l)| l.partial_bytes()).sum::<usize>()
                + over_rdma().map(|(_, l)| l.partial_bytes()).sum::<usize>();
            if total <= limit {
                return;
            }
            let oldest = staying()
                .filter(|(_, l)| l.partial_bytes() > PARTIAL_SMALL)
                .filter_map(|(id, l)| Some((l.rx.partial.as_ref()?.first_seen, LinkId(id))))
                .min();
            let oldest_over_rdma = over_rdma()
                .filter(|(_, l)| l.partial_bytes() > PARTIAL_SMALL)
                .filter_map(|(id, l)| Some((l.rx.partial.as_ref()?.first_seen, RdmaLinkId(id))))
                .min();
            if let Some((at, id)) = oldest_over_rdma
                && oldest.is_none_or(|(oldest, _)| at < oldest)
            {
                self.stats.partials_dropped += 1;
                let conn = self.rdma_links.get(id.0).and_then(|link| self.conn(link.conn));
                if let Some(remote) = conn.map(|conn| to_socket_addr(conn.remote, 0, 0).ip()) {
                    self.event(Event::Refused { remote, why: Refusal::PartialMessages });
                }
                self.close_rdma(id);
                continue;
            }
            let Some((_, id)) = oldest else { return };
            self.stats.partials_dropped += 1;
            if let Some(link) = self.link(id) {
                let remote = link.remote.ip();
                self.event(Event::Refused { remote, why: Refusal::PartialMessages });
            }
            self.cut_link(id);
        }
    }

    /// Notes that a buffer is parsed up to offset `at`. If the buffer is used up and had stopped
    /// reading, reading is resumed.
    fn finish_buffer(&mut self, id: LinkId, buf: RxBuf, at: usize, full_before: bool) {
        let Some(link) = self.links.get_mut(id.0) else { return };
        if at < buf.bytes().len() {
            link.rx.offset = at;
            link.rx.backlog.push_front(buf);
        } else if full_before && self.wants_read(id) {
            self.outputs.push_back(Output::Resume { link: id });
        }
    }

    /// Tells whether parsing on would queue more than a reader soon takes.
    fn has_enough(&self, id: Option<SocketId>) -> bool {
        id.and_then(|id| self.sockets.get(id.0)).is_none_or(Sock::has_enough)
    }

    /// Handles one complete frame [spec section 6.1], whatever its checksum; returns the
    /// socket on which its message was queued.
    #[inline]
    fn frame(
        &mut self,
        id: LinkId,
        header: &Header,
        rope: Rope,
        seen: Instant,
    ) -> Option<SocketId> {
        let link = self.links.get_mut(id.0)?;
        link.rx.messages += 1;
        if !link.greeting.heard_frame && !header.is_map() {
            link.greeting.heard_frame = true;
            if !self.is_greeting(header) {
                self.not_greeted(id);
            }
            self.first_frame_on_path(id);
        }
        let link = self.links.get_mut(id.0)?;
        let conn_id = link.conn;
        let (path, acked) = (link.incoming_path(), link.acked_path());
        let (pathless, generation) = (link.path.is_none(), link.generation);
        let source = SourceLink { link: id, serial: link.serial, sender_path: link.sender_path() };
        let deaf = link.deaf;
        if !link.confirmed {
            self.confirm(id);
        } else if link.awaits_peer_kind && !header.is_map() {
            // A map does not show what kind of node the peer is; the next frame does.
            link.awaits_peer_kind = false;
            self.signal_transmit(id);
        }
        if header.is_map() {
            // A map has no sequence number to compare with earlier ones.
            self.conns.get_mut(conn_id.0)?.touch(self.now);
            self.map_frame(id, header, &rope);
            return None;
        }
        if header.sport.min(header.dport) == 0 && self.is_greeting(header) {
            self.conns.get_mut(conn_id.0)?.touch(self.now);
            return self.greeting(id, header);
        }
        let conn = self.conns.get_mut(conn_id.0)?;
        conn.touch(self.now);
        let by_path = conn.peer_sport_idx;
        if conn.peer.is_bowline() {
            let of_earlier = pathless && generation != conn.peer_generation;
            if header.sequence == 0 && header.len == 0 && header.sport == 0 && header.dport == 0 {
                self.stats.acks_received += 1;
                if let Some(path) = acked {
                    self.release_by_ack(conn_id, path, header.ack);
                }
                if super::handshake::is_farewell(header) {
                    self.peer_ends(id);
                }
                return None;
            }
            if deaf {
                return None; // it is not acknowledged either
            }
            // Numbers of an earlier process, on a connection that it left, are compared with
            // nothing.
            let Some(path) = path.filter(|_| !of_earlier) else {
                // A connection that leaves and has not named a path gets none; its messages come
                // again.
                if !self.link(id)?.state.is_leaving() {
                    self.misbehaved(id, Misbehaviour::DataBeforeGreeting);
                }
                return None;
            };
            if !self.next_in_order(id, path, header) {
                return None;
            }
            // Before the peer's kind was known, the peer may have sent this message under a number
            // of another path.
            if header.flags.contains(Flags::RETRANSMITTED)
                && let Some(dedup) = self.conns.get_mut(conn_id.0)?.dedup.as_mut()
                && dedup.is_duplicate(source, by_path, header, &rope)
            {
                self.stats.recv_drop_old_seq += 1;
                return None;
            }
        } else {
            if conn.dedup.is_none() {
                self.timers.insert((self.now + QUIET_TIME, Timer::ForgetAfterQuiet(conn_id)));
            }
            let budget = &self.dedup_budget;
            let dedup = conn.dedup.get_or_insert_with(|| Box::new(Dedup::new(budget)));
            if dedup.is_duplicate(source, by_path, header, &rope) {
                self.stats.recv_drop_old_seq += 1;
                // The answer may be waiting on a path that is down.
                if header.is_probe_ping() {
                    self.ping(id, header);
                }
                return None;
            }
            let index = usize::from(path.unwrap_or(0));
            if let Some(path) = conn.paths.get_mut(index) {
                path.next_rx_seq = header.sequence.wrapping_add(1);
                path.received += 1;
            }
        }
        if header.dport == 0 {
            self.ping(id, header);
            return None;
        }
        if header.sport == 0 && header.dport == PROBE_PORT {
            self.handshake(id, header);
            return None;
        }
        self.deliver(conn_id, header, rope, seen)
    }

    /// Forgets the records of a peer once it can repeat none of its messages. If many messages are
    /// remembered for all peers together, most records go after a minute.
    pub(super) fn forget_after_quiet(&mut self, id: ConnId) {
        let Some(conn) = self.conns.get(id.0).filter(|c| c.dedup.is_some()) else { return };
        let quiet = conn.last_used + QUIET_TIME;
        let mut until = quiet;
        let mut unread = false;
        for link in self.links_of(id).into_iter().filter_map(|l| self.link(l)) {
            until = until.max(link.since + REPEAT_TIME);
            unread |= link.rx.paused || !link.rx.backlog.is_empty() || !link.waits_for.is_empty();
        }
        if unread {
            // Repeated messages may have come already, and wait to be parsed.
            until = until.max(self.now + QUIET_TIME);
        }
        let used = conn.paths.iter().take(usize::from(conn.npaths.max(1)));
        if used.filter(|p| p.resets > 0).any(|p| p.state != PathState::Up) {
            until = until.max(conn.last_used + AWAY_TIME);
        }
        let tight = self.dedup_budget.is_tight() && quiet <= self.now && !unread;
        let Some(conn) = self.conns.get_mut(id.0) else { return };
        if until <= self.now {
            conn.dedup = None;
            return;
        }
        if let Some(dedup) = conn.dedup.as_mut().filter(|_| tight) {
            dedup.trim();
        }
        self.timers.insert((until.min(self.now + QUIET_TIME), Timer::ForgetAfterQuiet(id)));
    }

    fn map_frame(&mut self, id: LinkId, header: &Header, rope: &Rope) {
        let Some(link) = self.links.get(id.0) else { return };
        let (conn_id, path) = (link.conn, link.acked_path());
        if let Some(path) = path
            && self.conns.get(conn_id.0).is_some_and(|c| c.peer.is_bowline())
        {
            self.release_by_ack(conn_id, path, header.ack); // [R-2021]
        }
        if rope.len() != MAP_LEN {
            self.stats.peer_nonsense += 1;
            return; // consumed and ignored
        }
        let mut bytes = vec![0; MAP_LEN];
        rope.copy_to(&mut bytes);
        if let Some(map) = MapView::new(&bytes) {
            self.map_received(conn_id, id, &map);
        }
    }

    /// Tells whether a frame is the greeting of a bowline node; greetings are handled before
    /// numbers are checked.
    fn is_greeting(&self, header: &Header) -> bool {
        let ping = header.sport == PROBE_PORT && header.dport == 0;
        let pong = header.sport == 0 && header.dport == PROBE_PORT;
        (ping || pong) && self.bowline_part(&Handshake::parse(&header.ext)).is_some()
    }

    fn greeting(&mut self, id: LinkId, header: &Header) -> Option<SocketId> {
        if !self.handshake(id, header) {
            return None;
        }
        let link = self.links.get(id.0)?;
        let (conn_id, path) = (link.conn, link.path);
        let numbers = link.incoming_path()?;
        if header.sequence == 0 {
            return None; // the peer's greeting on this link; ours goes out independently of it
        }
        // A numbered probe is a message like others, but it is answered even when it is repeated.
        let fresh = self.next_in_order(id, numbers, header);
        if let Some(path) = path
            && header.dport == 0
            && self.config.sysctl.ping_enable
        {
            self.stats.recv_ping += u64::from(fresh);
            let ext = super::handshake::extensions(&self.config, path);
            self.pong(conn_id, path, PROBE_PORT, ext);
        }
        None
    }

    /// Compares a number with those that a bowline peer has sent before [R-2023]; returns `false`
    /// for a duplicate. In either case an acknowledgement is owed.
    #[inline]
    fn next_in_order(&mut self, id: LinkId, index: u8, header: &Header) -> bool {
        let Some(link) = self.links.get_mut(id.0) else { return false };
        let Some(conn) = self.conns.get_mut(link.conn.0) else { return false };
        // A connection that leaves may be of a path that has no other yet.
        let path = conn.make_path(index);
        link.rx.ack.bytes += HEADER_LEN as u64 + u64::from(header.len);
        if header.flags.contains(Flags::ACK_REQUIRED) {
            self.stats.recv_ack_required += 1;
            link.rx.ack.asked = true;
            if !link.rx.ack.listed {
                link.rx.ack.listed = true;
                self.ack_asked.push(id);
            }
        }
        let fresh = header.sequence >= path.rx_expected;
        if fresh {
            path.rx_expected = header.sequence.saturating_add(1);
            path.next_rx_seq = path.rx_expected;
            path.received += 1;
        } else {
            self.stats.recv_drop_old_seq += 1;
        }
        if link.rx.ack.bytes >= ACK_BYTES && !link.rx.ack.due {
            link.rx.ack.due = true;
            self.signal_transmit(id);
        } else if !link.rx.ack.timer_armed {
            link.rx.ack.timer_armed = true;
            self.timers.insert((self.now + ACK_DELAY, Timer::Ack(id)));
        }
        fresh
    }

    /// Handles a ping: a message to port 0.
    fn ping(&mut self, id: LinkId, header: &Header) {
        if header.sport == 0 || !self.config.sysctl.ping_enable {
            return;
        }
        let Some(link) = self.links.get_mut(id.0) else { return };
        let (conn, path) = (link.conn, link.path.unwrap_or(0));
        self.stats.recv_ping += 1;
        let probe = header.sport == PROBE_PORT;
        if probe && link.path.is_none() {
            link.probe_pending = true;
            self.handshake(id, header);
            return;
        }
        let ext = if probe { super::handshake::extensions(&self.config, path) } else { [0; 16] };
        self.pong(conn, path, header.sport, ext);
        if probe {
            self.handshake(id, header);
        }
    }

    pub(super) fn pong(&mut self, conn_id: ConnId, index: u8, to: u16, ext: [u8; 16]) {
        let Some(conn) = self.conns.get_mut(conn_id.0) else { return };
        if conn.map.is_set(to) {
            self.stats.cong_send_error += 1;
            return;
        }
        let Some(path) = conn.paths.get_mut(usize::from(index)) else { return };
        if path.pongs >= self.config.limits.pongs_per_path {
            self.stats.pongs_dropped += 1; // [B-20]
            return;
        }
        path.pongs += 1;
        self.queue_control(conn_id, usize::from(index), 0, to, ext, mark::PONG);
    }

    #[inline]
    pub(super) fn deliver(
        &mut self,
        conn_id: ConnId,
        header: &Header,
        data: Rope,
        seen: Instant,
    ) -> Option<SocketId> {
        let conn = self.conns.get(conn_id.0)?;
        // Only sockets of the address at which the connection ends may receive [R-1205].
        let Some(socket) = self.local_addrs[conn.local_addr].ports.get(&header.dport).copied()
        else {
            self.stats.recv_drop_no_sock += 1;
            return None;
        };
        let origin = Origin { addr: conn.remote, scope: conn.scope, conn: Some(conn_id) };
        let over_rdma = conn.rdma.is_some();
        let (mut rare, mut used) = (None, None);
        if header.ext[0] != 0 {
            for ext in Extensions::new(&header.ext) {
                match ext {
                    Extension::RdmaDest(dest) => {
                        let key = Some(dest.cookie()).filter(|cookie| *cookie != 0);
                        rare = Some(Box::new(Rare { rdma_dest: key, ..Rare::default() }));
                    }
                    Extension::Rdma(rkey) if over_rdma => used = Some(rkey),
                    _ => {}
                }
            }
        }
        if let Some(rkey) = used {
            self.region_used(socket, rkey, origin.addr);
        }
        let msg = RecvMsg { origin, sport: header.sport, seq: header.sequence, data, rare };
        self.queue_on_socket(socket, msg, (seen, self.now));
        Some(socket)
    }
}

/// Returns the cost of a frame, in messages. Without a cost, a peer could send control frames as
/// fast as it likes, because no reader slows them down.
const fn cost(header: &Header) -> usize {
    if header.is_map() {
        MAP_COST
    } else if header.dport == 0 || header.sport == 0 {
        CONTROL_COST
    } else {
        1
    }
}

/// Reason why parsing of a link stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ParseEnd {
    /// All bytes are parsed, or the link may not go on.
    Empty,
    /// The socket for which a reader waits has a message.
    Satisfied,
    /// It is another link's turn.
    Budget,
}
