//! Sending over RDMA: messages cut into frames, and what releases them. Spec:
//! `docs/spec/rds-rdma.md`, sections 4 and 7.

use std::cell::Cell;
use std::sync::Arc;
use std::time::Duration;

use bowline_base::Instant;
use bowline_wire::rds::{Flags, HEADER_LEN, Header, MAP_LEN, checksum};

use crate::api::Output;
use crate::conn::Conn;
use crate::ids::{ConnId, RdmaLinkId};
use crate::link::Farewell;
use crate::node::Node;
use crate::node::timers::Timer;
use crate::path::{TxMsg, UNPLANNED, Unwritten, mark};
use crate::rdma::{MapFrames, RdmaLink, RdmaRequest, RdmaSend, RdmaState, Sending};
use crate::stats::Counters;

/// Number of bytes after which the driver posts, and others have their turn.
const BYTES_MAX: u64 = 256 << 10;
/// How long a message waits for an acknowledgement that it has not asked for.
const ASK_TIME: Duration = Duration::from_millis(10);

/// What came of beginning the next message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Begun {
    /// Frames of what was begun come next, if there are any.
    Nothing,
    /// Operations were posted, and no frame follows.
    Posted,
    /// Operations have to wait for room.
    NoRoom,
}

/// How a frame is posted.
#[derive(Clone, Copy, Debug)]
struct How {
    /// It is the last one of its message.
    last: bool,
    fence: bool,
    unsignalled_max: u32,
}

impl Node {
    /// Tells the driver that there is something to post, once.
    pub(in crate::node) fn signal_rdma(&mut self, id: RdmaLinkId) {
        let Some(link) = self.rdma_links.get_mut(id.0) else { return };
        link.tx.again |= link.tx.busy;
        if link.state == RdmaState::Up && !(link.tx.busy || link.tx.signalled) {
            link.tx.signalled = true;
            self.outputs.push_back(Output::RdmaSend { link: id });
        }
    }

    /// Returns the connection over RDMA that serves a peer.
    pub(in crate::node) fn rdma_link_of(&self, conn: ConnId) -> Option<RdmaLinkId> {
        self.conns.get(conn.0)?.rdma.as_ref()?.link
    }

    /// Gives `post` up to `max` frames to send, in order, with the RDMA operations that come before
    /// them. The driver posts them, then calls
    /// [`handle_rdma_posted`](Self::handle_rdma_posted). Returns their number.
    pub fn poll_rdma_requests(
        &mut self,
        now: Instant,
        id: RdmaLinkId,
        max: usize,
        mut post: impl FnMut(RdmaRequest<'_>, &mut dyn Iterator<Item = &[u8]>),
    ) -> usize {
        self.now = now;
        let Some(link) = self.rdma_links.get_mut(id.0) else { return 0 };
        link.tx.signalled = false;
        if link.state != RdmaState::Up || link.tx.busy {
            return 0;
        }
        link.tx.blocked = false;
        link.tx.again = false;
        let (mut count, bytes) = (0, Cell::new(0));
        let mut counted = |request: RdmaRequest<'_>, payload: &mut dyn Iterator<Item = &[u8]>| {
            if let RdmaRequest::Frame(frame) = &request {
                bytes.set(bytes.get() + (HEADER_LEN + frame.len) as u64);
            }
            post(request, payload);
        };
        while count < max && bytes.get() < BYTES_MAX && self.send_rdma_frame(id, &mut counted) {
            count += 1;
        }
        let Some(link) = self.rdma_links.get_mut(id.0) else { return count };
        link.tx.busy = count > 0;
        if let Some(conn) = self.conns.get_mut(link.conn.0) {
            conn.past_written += bytes.get();
        }
        if link.tx.newest != link.tx.asked && !std::mem::replace(&mut link.tx.ask_armed, true) {
            self.arm(now + ASK_TIME, Timer::RdmaAsk(id));
        }
        count
    }

    /// Asks for the acknowledgement of the last messages, if nothing that the peer sent has brought
    /// it. Peers acknowledge by themselves only what asks for it [IB-65], and the sender may wait
    /// for all its messages to be acknowledged.
    pub(in crate::node) fn rdma_ask_due(&mut self, id: RdmaLinkId) {
        let Some(link) = self.rdma_links.get_mut(id.0) else { return };
        link.tx.ask_armed = false;
        let asks = link.tx.newest != link.tx.asked && link.acked < link.tx.newest;
        let conn_id = link.conn;
        if !asks || link.state != RdmaState::Up {
            return;
        }
        let Some(path) = self.conns.get_mut(conn_id.0).and_then(|conn| conn.paths.first_mut())
        else {
            return;
        };
        if path.planned < path.queue.len() {
            return; // the timer is armed again when they are begun
        }
        // A message from port 0 to port 0 means nothing. Without payload it would be an
        // acknowledgement [IB-59].
        let header = Header { sequence: path.next_tx_seq, len: 1, ..Header::default() };
        let log_start = path.log.tail();
        path.log.append(&mut self.pool, &header.to_bytes());
        path.log.append(&mut self.pool, &[0]);
        path.queue.push_back(TxMsg {
            seq: path.next_tx_seq,
            log_start,
            stream_start: UNPLANNED,
            socket: None,
            len: 1,
            cookie: 0,
            sport: 0,
            dport: 0,
            marks: mark::ACK_REQUIRED,
            generation: 0,
            before: 0,
        });
        path.next_tx_seq = path.next_tx_seq.wrapping_add(1);
        path.queued_bytes += 1;
        path.sent += 1;
        self.pool.account(1);
        self.stats.send_ack_required += 1;
        self.signal_rdma(id);
    }

    /// The frames of the last [`poll_rdma_requests`](Self::poll_rdma_requests) are posted.
    pub fn handle_rdma_posted(&mut self, now: Instant, id: RdmaLinkId) {
        self.now = now;
        let Some(link) = self.rdma_links.get_mut(id.0) else { return };
        link.tx.busy = false;
        // Room or credits may have come meanwhile.
        let held_up = link.tx.blocked && !link.tx.again;
        if !held_up && self.has_rdma_frame(id) {
            self.signal_rdma(id);
        }
    }

    /// Handles the completion of request `sent`, and of all before it.
    pub fn handle_rdma_sent(&mut self, now: Instant, id: RdmaLinkId, sent: u64) {
        self.now = now;
        let Some(link) = self.rdma_links.get_mut(id.0) else { return };
        if sent >= link.tx.next {
            return;
        }
        link.tx.retired = link.tx.retired.max(sent + 1);
        link.check = link.check.filter(|check| sent < check.from);
        self.stats.ib_tx_cq_event += 1;
        if link.tx.ack_outstanding.is_some_and(|ack| ack <= sent) {
            link.tx.ack_outstanding = None;
        }
        let due = link.rx.ack_due || link.tx.farewell == Farewell::Due;
        let (conn, wants, ends) = (link.conn, link.tx.blocked || due, link.has_told());
        if self.conns.get(conn.0).is_some_and(Conn::has_ops) {
            self.ops_sent(conn, sent);
        }
        if ends {
            self.close_rdma(id); // the peer has the farewell
        } else if wants && self.has_rdma_frame(id) {
            self.signal_rdma(id);
        }
    }

    /// Tells whether requests over RDMA are outstanding, or an acknowledgement waits to be sent. A
    /// node that is about to end its connections lets them get through first.
    pub fn has_rdma_requests(&self) -> bool {
        let mut links = self.rdma_links.iter().filter(|(_, link)| link.state == RdmaState::Up);
        links.any(|(_, link)| link.tx.next > link.tx.retired || link.rx.ack_due)
    }

    /// Tells whether a frame waits to be sent.
    pub(in crate::node) fn has_rdma_frame(&self, id: RdmaLinkId) -> bool {
        let Some(link) = self.rdma_links.get(id.0) else { return false };
        let Some(conn) = self.conns.get(link.conn.0) else { return false };
        let begun = link.tx.sending.is_some() || link.tx.map.is_some();
        if link.tx.farewell != Farewell::NotDue {
            let due = link.tx.farewell == Farewell::Due;
            return begun || due && link.tx.ack_outstanding.is_none();
        }
        let waits = conn.paths.first().is_some_and(|path| path.planned < path.queue.len());
        let ack = link.rx.ack_due && link.tx.ack_outstanding.is_none();
        waits || ack || conn.map_due || begun
    }

    /// Begins to send the map if it is due and nothing else was begun.
    fn begin_rdma_map(&mut self, id: RdmaLinkId) {
        let Some(link) = self.rdma_links.get_mut(id.0) else { return };
        let Some(conn) = self.conns.get_mut(link.conn.0) else { return };
        if link.tx.farewell != Farewell::NotDue && link.tx.next > 0 {
            return; // a connection begins with the map [IB-37], and needs no other one
        }
        if link.tx.map.is_none() && link.tx.sending.is_none() && std::mem::take(&mut conn.map_due) {
            let mut bytes = Vec::with_capacity(MAP_LEN);
            self.local_addrs[conn.local_addr].map.emit(&mut bytes);
            let header = Header { ack: link.rx.ack, ..Header::map() };
            link.tx.map = Some(MapFrames { header, bytes: Arc::new(bytes), sent: 0 });
        }
    }

    /// Begins to send the next message if nothing else was begun: its operations are posted, and
    /// its frames come next.
    fn begin_rdma_message(
        &mut self,
        id: RdmaLinkId,
        post: &mut impl FnMut(RdmaRequest<'_>, &mut dyn Iterator<Item = &[u8]>),
    ) -> Begun {
        loop {
            let Some(link) = self.rdma_links.get_mut(id.0) else { return Begun::NoRoom };
            let Some(conn) = self.conns.get_mut(link.conn.0) else { return Begun::NoRoom };
            let Some(path) = conn.paths.first_mut() else { return Begun::NoRoom };
            let ends = link.tx.farewell != Farewell::NotDue;
            if link.tx.map.is_some() || link.tx.sending.is_some() || ends {
                return Begun::Nothing;
            }
            let Some(msg) = path.queue.get_mut(path.planned) else { return Begun::Nothing };
            // An acknowledgement that is taken along now has to go out [IB-67].
            if !link.may_send(&mut self.stats) {
                return Begun::NoRoom;
            }
            let mut fence = false;
            if msg.has(mark::OPS) {
                let ops = conn.rdma.as_ref().and_then(|rdma| rdma.ops.get(&msg.seq));
                let Some(ops) = ops else {
                    // Operations of an earlier process are lost with its memory.
                    let (conn_id, msg) = (link.conn, msg.clone());
                    path.cancel_at(&mut self.pool, path.planned, Unwritten::Message(None));
                    path.skip_dropped();
                    self.release_one(conn_id, 0, &msg);
                    self.after_release(conn_id, 0);
                    continue;
                };
                if !ops.posted {
                    if ops.requests() >= link.tx.room() {
                        link.tx.blocked = true; // all of them, or none [IB-88]
                        self.stats.ib_tx_ring_full += 1;
                        return Begun::NoRoom;
                    }
                    let seq = msg.seq;
                    if msg.has(mark::SILENT) {
                        // No frame follows [RDMA-24], [IB-92].
                        msg.stream_start = link.tx.next;
                        path.planned += 1;
                        path.skip_dropped();
                        self.post_ops(id, seq, post);
                        return Begun::Posted;
                    }
                    self.post_ops(id, seq, post);
                    continue;
                }
                fence = ops.fence();
            }
            path.planned += 1;
            msg.stream_start = link.tx.next;
            let mut header = path.log.header(msg.log_start);
            header.ack = link.rx.ack;
            header.flags = Flags::NONE;
            link.tx.newest = msg.seq;
            if msg.has(mark::ACK_REQUIRED) {
                link.tx.asked = msg.seq;
                header.flags = header.flags.with(Flags::ACK_REQUIRED);
            }
            if msg.has(mark::RETRANS) {
                header.flags = header.flags.with(Flags::RETRANSMITTED);
                self.stats.retransmits += 1;
            }
            if std::mem::take(&mut link.rx.ack_due) {
                self.stats.ib_ack_send_piggybacked += 1;
            }
            link.rx.unacknowledged = false;
            let from = msg.log_start + HEADER_LEN as u64;
            link.tx.sending = Some(Sending { header, from, to: from + u64::from(msg.len), fence });
            path.skip_dropped();
            return Begun::Nothing;
        }
    }

    /// Sends the next frame: of a map or message that was begun, then of the map, then of the next
    /// message, then an acknowledgement [IB-87]. Returns `false` when there is none, or no room.
    fn send_rdma_frame(
        &mut self,
        id: RdmaLinkId,
        post: &mut impl FnMut(RdmaRequest<'_>, &mut dyn Iterator<Item = &[u8]>),
    ) -> bool {
        self.begin_rdma_map(id);
        match self.begin_rdma_message(id, post) {
            Begun::Nothing => {}
            Begun::Posted => return true,
            Begun::NoRoom => return false,
        }
        let Some(link) = self.rdma_links.get_mut(id.0) else { return false };
        let Some(conn) = self.conns.get_mut(link.conn.0) else { return false };
        let Some(path) = conn.paths.first_mut() else { return false };
        let ack_due = match link.tx.farewell {
            Farewell::NotDue => link.rx.ack_due,
            Farewell::Due => true,
            Farewell::Planned => false,
        };
        let wants_ack = ack_due && link.tx.ack_outstanding.is_none();
        if link.tx.map.is_none() && link.tx.sending.is_none() && !wants_ack {
            if link.rx.ack_due {
                self.stats.ib_ack_send_delayed += 1;
            }
            return false;
        }
        if !link.may_send(&mut self.stats) {
            return false;
        }
        let unsignalled_max = self.config.sysctl.ib_max_unsignaled_wr;
        let announced = if let Some(map) = &mut link.tx.map {
            let (header, bytes, at) = (map.header, Arc::clone(&map.bytes), map.sent);
            let len = map.next_len(link.fragment);
            map.sent += len;
            let last = map.sent == MAP_LEN;
            if last {
                link.tx.map = None;
            }
            let mut payload = bytes.get(at..at + len).into_iter();
            let how = How { last, fence: false, unsignalled_max };
            link.post(post, header, (len, &mut payload), how)
        } else if let Some(sending) = &mut link.tx.sending {
            let from = sending.from;
            let to = sending.to.min(from + link.fragment as u64);
            let last = to == sending.to;
            let (header, fence) = (sending.header, sending.fence);
            sending.from = to;
            if last {
                link.tx.sending = None;
            }
            let mut payload = path.log.slices(from, to);
            let how = How { last, fence, unsignalled_max };
            link.post(post, header, ((to - from) as usize, &mut payload), how)
        } else {
            link.rx.ack_due = false;
            link.rx.unacknowledged = false;
            link.tx.ack_outstanding = Some(link.tx.next);
            self.stats.ib_ack_sent += 1;
            let mut header = Header { ack: link.rx.ack, ..Header::default() };
            if link.tx.farewell == Farewell::Due {
                link.tx.farewell = Farewell::Planned;
                link.rx.deaf = true; // what comes from now on is not acknowledged any more
                path.untold_since = None;
                if conn.peer.is_bowline() {
                    header.ext = crate::node::handshake::farewell(0);
                }
            }
            let how = How { last: true, fence: false, unsignalled_max };
            link.post(post, header, (0, &mut std::iter::empty()), how)
        };
        if link.tx.sending.is_none() {
            path.forget_written(&mut self.pool, u64::MAX); // the driver has copied all of it
        }
        self.stats.ib_tx_credit_updates += u64::from(announced);
        true
    }

    /// Releases the messages that the peer has acknowledged: all that were sent up to number `ack`
    /// [IB-64]. A number that was not sent releases nothing [SAFE-4].
    pub(in crate::node) fn rdma_acked(&mut self, id: RdmaLinkId, ack: u64) {
        let Some(link) = self.rdma_links.get_mut(id.0) else { return };
        if ack <= link.acked {
            return;
        }
        link.acked = ack;
        let conn_id = link.conn;
        let unfinished = link.tx.sending.as_ref().map(|_| link.tx.newest);
        let Some(conn) = self.conns.get_mut(conn_id.0) else { return };
        let Some(path) = conn.paths.first_mut() else { return };
        // Before anything was sent on this connection, the peer may acknowledge what was sent on
        // the one before [IB-96].
        let begun = path.queue.iter().take_while(|msg| msg.has(mark::RETRANS)).count();
        let sent = match unfinished {
            None => path.planned,
            Some(seq) => path.planned.min(path.queue.partition_point(|msg| msg.seq < seq)),
        };
        let sent = sent.max(begun);
        let count = path.queue.iter().take(sent).take_while(|msg| msg.seq <= ack).count();
        self.release_first(conn_id, 0, count);
        self.after_release(conn_id, 0);
    }

    /// Releases what private data acknowledge of the connection before [IB-95]. A number that was
    /// not sent there is not one of this peer, and releases nothing [IB-96].
    pub(in crate::node) fn rdma_acked_before(&mut self, id: RdmaLinkId, ack: u64) {
        let Some(link) = self.rdma_links.get(id.0) else { return };
        let Some(path) = self.conn(link.conn).and_then(|conn| conn.paths.first()) else { return };
        let begun = path.queue.iter().take_while(|msg| msg.has(mark::RETRANS));
        if begun.last().is_some_and(|last| ack <= last.seq) {
            self.rdma_acked(id, ack);
        }
    }
}

impl RdmaLink {
    /// Tells whether there are room and credits for a frame. If not, the pass ends, and goes on
    /// when a request completes or credits come [IB-91].
    fn may_send(&mut self, stats: &mut Counters) -> bool {
        let counter = if self.tx.room() == 0 {
            &mut stats.ib_tx_ring_full
        } else if self.credits.available() == 0 {
            &mut stats.ib_tx_throttle
        } else {
            return true;
        };
        *counter += 1;
        self.tx.blocked = true;
        false
    }

    /// Gives a frame to the driver. Tells whether it announces credits.
    fn post(
        &mut self,
        post: &mut impl FnMut(RdmaRequest<'_>, &mut dyn Iterator<Item = &[u8]>),
        mut header: Header,
        (len, payload): (usize, &mut dyn Iterator<Item = &[u8]>),
        How { last, fence, unsignalled_max }: How,
    ) -> bool {
        header.credit = self.credits.sent();
        header.csum = 0;
        let mut bytes = header.to_bytes();
        header.csum = checksum(&bytes); // after the last change of the header [IB-50]
        bytes = header.to_bytes();
        let stops = self.tx.room() == 1 || self.credits.available() == 0;
        let signalled = last || stops || self.tx.unsignalled >= unsignalled_max;
        self.tx.unsignalled = if signalled { 0 } else { self.tx.unsignalled + 1 };
        let id = self.tx.next;
        self.tx.next += 1;
        let solicited = last || self.credits.available() == 0; // [IB-42], [IB-77]
        let send = RdmaSend { id, header: bytes, len, signalled, solicited, fence };
        post(RdmaRequest::Frame(send), payload);
        header.credit > 0
    }
}
