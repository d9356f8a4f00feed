//! The transport of bytes between the ends: buffers, windows, acknowledgements, repetition.

use super::{EndId, EndState, NetEvent, Notice, Reach, ReadOutcome, Reason};
use crate::engine::queue::SEC;
use crate::rds::ctx::{Ctx, Event};

/// TCP_USER_TIMEOUT of the driver in nanoseconds, which approximates a kernel peer's as well.
const USER_TIMEOUT: u64 = 30 * SEC;

impl Ctx {
    /// Writes what fits into the send buffer.
    pub(crate) fn tcp_write(&mut self, id: EndId, bytes: &[u8]) -> Result<usize, Reason> {
        let (c, side) = id.index();
        let conn = &mut self.net.conns[c];
        match conn.ends[side].state {
            EndState::Open => {}
            EndState::Dead(reason) => return Err(reason),
            EndState::SynSent | EndState::Orphan | EndState::Gone => return Err(Reason::Reset),
        }
        let stream = &mut conn.streams[side];
        if stream.fin {
            return Err(Reason::Reset);
        }
        let n = bytes.len().min(stream.room() as usize);
        if n < bytes.len() {
            conn.ends[side].blocked = true;
            self.base.coverage.hit("tcp", "send buffer full");
        }
        if n > 0 {
            stream.write(self.base.now, &bytes[..n]);
            let (local, remote) = (conn.ends[side].addr.ip(), conn.ends[1 - side].addr.ip());
            stream.tap.feed(&bytes[..n], (local, remote), id.conn, &mut self.oracle);
            self.pump(id);
            self.persist(id);
        }
        Ok(n)
    }

    /// Arms the timer that asks whether the window is still shut, when that alone holds back what
    /// was written: the packet that opened it may have been lost while nothing was waiting.
    fn persist(&mut self, id: EndId) {
        let (c, side) = id.index();
        let stream = &self.net.conns[c].streams[side];
        if stream.limit <= stream.sent && stream.written > stream.sent {
            self.arm_rto(id.conn, id.side);
        }
    }

    /// Reads up to `max` bytes of what has arrived and appends them to `out`.
    pub(crate) fn tcp_read(&mut self, id: EndId, out: &mut Vec<u8>, max: usize) -> ReadOutcome {
        let (c, side) = id.index();
        let conn = &mut self.net.conns[c];
        let state = conn.ends[side].state;
        let stream = &mut conn.streams[1 - side];
        if stream.has_unread() {
            let n = stream.read(out, max);
            // A window update is sent as soon as it is worth a packet.
            if state == EndState::Open && stream.is_nearly_shut() {
                self.send_ack(id.other());
            }
            return ReadOutcome::Data(n);
        }
        match state {
            EndState::Dead(reason) => ReadOutcome::Failed(reason),
            EndState::Orphan | EndState::Gone => ReadOutcome::Failed(Reason::Reset),
            EndState::SynSent => ReadOutcome::WouldBlock,
            EndState::Open if stream.fin_delivered => ReadOutcome::Eof,
            EndState::Open => ReadOutcome::WouldBlock,
        }
    }

    /// Sends what the window allows.
    pub(super) fn pump(&mut self, id: EndId) {
        let (c, side) = id.index();
        loop {
            let plan = &self.net.plan;
            let stream = &mut self.net.conns[c].streams[side];
            let start = stream.sent;
            let mut end = stream.written.min(stream.limit).min(start + plan.segment_max as u64);
            if plan.segment_random && end > start + 1 {
                end = start + self.base.rng.magnitude(1, end - start);
            }
            if let Some((at, _)) = stream.cut
                && start < at
            {
                end = end.min(at);
            }
            let fin = stream.fin && !stream.fin_sent && end >= stream.written;
            if end <= start && !fin {
                return;
            }
            end = end.max(start);
            stream.sent = end;
            stream.fin_sent |= fin;
            let segment = NetEvent::Segment { conn: id.conn, side: id.side, start, end, fin };
            self.packet(id, segment, true);
        }
    }

    /// Acknowledges the direction that `sender` writes.
    fn send_ack(&mut self, sender: EndId) {
        let (c, side) = sender.index();
        let stream = &mut self.net.conns[c].streams[side];
        let ack = NetEvent::Ack {
            conn: sender.conn,
            side: sender.side,
            acked: stream.delivered,
            limit: stream.advertise(),
            fin: stream.fin_delivered,
        };
        self.packet(sender.other(), ack, false);
    }

    pub(super) fn arm_rto(&mut self, conn: u32, side: u8) {
        if let Some(rto) = self.conn(conn).streams[usize::from(side)].start_rto() {
            self.schedule(rto, Event::Net(NetEvent::Rto { conn, side }));
        }
    }

    pub(super) fn on_segment(&mut self, from: EndId, start: u64, end: u64, fin: bool) {
        match self.arrival(from) {
            Reach::Peer => {}
            Reach::UnknownHost => {
                self.coverage.hit("tcp", "data comes to another host");
                self.refuse_stray(from);
                return;
            }
            Reach::Lost => {
                self.coverage.hit("tcp", "data lost");
                self.arm_rto(from.conn, from.side);
                return;
            }
        }
        let (c, side) = from.index();
        let receiver = from.other();
        if receiver.side == 1 {
            // A segment acknowledges as the packet before it would have.
            if !self.net.conns[c].ends[1 - side].announced {
                self.coverage.hit("tcp", "handshake completed by a segment");
            }
            self.announce(receiver);
        }
        let conn = &mut self.net.conns[c];
        let stream = &mut conn.streams[side];
        match conn.ends[1 - side].state {
            EndState::Open if !conn.relay_closed => {}
            EndState::Orphan if end <= stream.delivered && !conn.relay_closed => {}
            EndState::SynSent => return,
            state => {
                let what = match state {
                    EndState::Dead(_) => "data comes to an end that is broken",
                    _ => "data comes to an end that is closed",
                };
                self.coverage.hit("tcp", what);
                if state == EndState::Orphan {
                    self.remove_end(receiver);
                }
                self.send_rst(from);
                return;
            }
        }
        let (fresh, ended) = stream.deliver(start, end, fin);
        let cut = stream.due_cut();
        if start > stream.delivered {
            self.arm_rto(from.conn, from.side);
        }
        self.send_ack(from);
        if fresh || ended {
            self.tell(receiver, Notice::Readable);
        }
        if let Some(cut) = cut
            && self.net.faulty
        {
            self.coverage.hit("cut", "at a byte");
            self.tcp_cut(from.conn, cut);
        }
    }

    pub(super) fn on_ack(&mut self, sender: EndId, acked: u64, limit: u64, fin: bool) {
        match self.arrival(sender.other()) {
            Reach::Peer => {}
            Reach::UnknownHost => {
                self.refuse_stray(sender.other());
                return;
            }
            Reach::Lost => {
                self.coverage.hit("tcp", "acknowledgement lost");
                self.arm_rto(sender.conn, sender.side);
                return;
            }
        }
        let now = self.now;
        let (c, side) = sender.index();
        let conn = &mut self.net.conns[c];
        if !matches!(conn.ends[side].state, EndState::Open | EndState::Orphan) {
            return;
        }
        let stream = &mut conn.streams[side];
        let progress = stream.handle_ack(now, acked, limit, fin);
        let writable = conn.ends[side].blocked && stream.has_room_again();
        if writable {
            conn.ends[side].blocked = false;
        }
        if conn.ends[side].state == EndState::Open {
            if progress {
                self.tell(sender, Notice::Acked);
            }
            if writable {
                self.tell(sender, Notice::Writable);
            }
        }
        self.pump(sender);
        self.finish_orphan(sender);
    }

    pub(super) fn on_rto(&mut self, id: EndId) {
        let now = self.now;
        let (c, side) = id.index();
        let conn = &mut self.net.conns[c];
        let state = conn.ends[side].state;
        let stream = &mut conn.streams[side];
        stream.end_rto();
        if !matches!(state, EndState::Open | EndState::Orphan) {
            return;
        }
        if !stream.is_owed() {
            stream.reset_rto();
            return;
        }
        if now.saturating_sub(stream.progress) > USER_TIMEOUT {
            self.coverage.hit("tcp", "user timeout");
            self.break_end(id, Reason::TimedOut);
            return;
        }
        self.base.coverage.hit("tcp", "retransmission timeout");
        stream.rewind();
        let at = stream.sent;
        if stream.limit <= at && stream.written > at {
            // The window is closed: ask whether it still is.
            self.coverage.hit("tcp", "window probe");
            let probe =
                NetEvent::Segment { conn: id.conn, side: id.side, start: at, end: at, fin: false };
            self.packet(id, probe, true);
            self.arm_rto(id.conn, id.side);
        } else {
            self.pump(id);
        }
    }
}
