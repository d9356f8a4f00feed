//! Frames of the kernel over RDMA: how messages are sent, acknowledged and received.

use std::net::SocketAddr;

use bowline_wire::rds::{FRAGMENT_LEN, Flags, HEADER_LEN, Header, checksum, checksum_ok};

use super::super::KernelHost;
use super::super::conn::Message;
use super::{Begun, MAX_UNACKED_BYTES, MAX_UNACKED_PACKETS, State, is_map};
use crate::rds::ctx::Ctx;
use crate::rds::payload::TAG_LEN;
use crate::rds::rdma::{Frame, QpId};

/// Sends without a completion between two with one [IB-71].
const MAX_UNSIGNALLED: u32 = 16;

impl KernelHost {
    /// Gives a message the next number of its connection, and decides whether it asks to be
    /// acknowledged [IB-62], [IB-68].
    pub(super) fn ib_enqueue(&mut self, c: usize, mut message: Message) {
        let conn = &mut self.ib[c];
        message.seq = conn.next_tx;
        conn.next_tx += 1;
        if let Some(sock) = message.owner.and_then(|slot| self.socks.get(&slot)) {
            message.ask = sock.is_half_full();
        }
        self.ib[c].queue.push_back(message);
    }

    /// Sends as much as there is room for [IB-87].
    pub(super) fn ib_transmit(&mut self, ctx: &mut Ctx, c: usize) {
        while let Some(qp) = self.ib_room(c) {
            let Some(begun) = self.ib_begin(ctx, c) else { break };
            let conn = &mut self.ib[c];
            let Begun { header, payload, done } = begun;
            let end = (done + FRAGMENT_LEN).min(payload.len());
            let last = end == payload.len();
            let signalled = last || conn.next_id == 0 || conn.unsignalled >= MAX_UNSIGNALLED;
            conn.unsignalled = if signalled { 0 } else { conn.unsignalled + 1 };
            let frame = frame(conn.next_id, header, payload[done..end].to_vec(), signalled, last);
            conn.next_id += 1;
            if !last {
                conn.begun = Some(Begun { header, payload, done: end });
            }
            ctx.rdma_post(qp, frame);
        }
        self.ib_acknowledge(ctx, c);
    }

    /// Returns the queue pair if another request may be posted.
    fn ib_room(&self, c: usize) -> Option<QpId> {
        let conn = &self.ib[c];
        let room = conn.state == State::Up && conn.next_id - conn.retired < conn.sends as u64;
        conn.qp.filter(|_| room)
    }

    /// Returns the message in progress, or begins the next: the map, or a message of the queue.
    fn ib_begin(&mut self, ctx: &mut Ctx, c: usize) -> Option<Begun> {
        let conn = &mut self.ib[c];
        if let Some(begun) = conn.begun.take() {
            return Some(begun);
        }
        if std::mem::take(&mut conn.map_queued) {
            let header = Header { ack: conn.ack, ..Header::map() };
            let local = conn.local;
            let payload = self.map_frame(local).split_off(HEADER_LEN);
            return Some(Begun { header, payload, done: 0 });
        }
        let message = conn.queue.pop_front()?;
        let mut flags = if message.flagged { Flags::RETRANSMITTED } else { Flags::NONE };
        let counted = conn.unacked_packets == 0 || conn.unacked_bytes < message.payload.len();
        if message.ask || counted {
            flags = flags.with(Flags::ACK_REQUIRED);
        }
        if counted {
            (conn.unacked_packets, conn.unacked_bytes) = (MAX_UNACKED_PACKETS, MAX_UNACKED_BYTES);
        } else {
            conn.unacked_packets -= 1;
            conn.unacked_bytes -= message.payload.len();
        }
        // The frame takes the acknowledgement along [IB-67].
        conn.ack_wanted = false;
        let header = Header {
            sequence: message.seq,
            ack: conn.ack,
            len: message.payload.len() as u32,
            sport: message.sport,
            dport: message.dport,
            flags,
            ..Header::default()
        };
        let payload = message.payload.clone();
        self.ib_excuse_repeated(ctx, c, &message);
        self.ib[c].retrans.push_back(message);
        Some(Begun { header, payload, done: 0 })
    }

    /// The numbers of a kernel begin again when its machine boots. A peer that knows higher ones
    /// takes for a duplicate what is sent again and equals a message of the earlier boot, and may
    /// never have got it [IB-82]. Messages that name themselves do not equal others.
    fn ib_excuse_repeated(&self, ctx: &mut Ctx, c: usize, message: &Message) {
        let conn = &self.ib[c];
        let named = message.payload.len() >= TAG_LEN;
        if !message.flagged || ctx.net.hosts[self.id].boot == 0 {
            return;
        }
        ctx.coverage.hit("kernel over RDMA", "repeats numbers of an earlier boot");
        if named {
            return;
        }
        let from = SocketAddr::new(conn.local, message.sport);
        let to = SocketAddr::new(conn.remote, message.dport);
        if let Some(id) = ctx.oracle.identify(from, to, &message.payload) {
            ctx.oracle.excuse_one(id);
        }
    }

    /// Sends an acknowledgement if one is asked for and none is on its way [IB-65], [IB-66].
    fn ib_acknowledge(&mut self, ctx: &mut Ctx, c: usize) {
        let Some(qp) = self.ib_room(c) else { return };
        let conn = &mut self.ib[c];
        // A map goes first [IB-37].
        if !conn.ack_wanted || conn.ack_sent.is_some() || conn.next_id == 0 {
            return;
        }
        conn.ack_wanted = false;
        conn.ack_sent = Some(conn.next_id);
        let header = Header { ack: conn.ack, ..Header::default() };
        let ack = frame(conn.next_id, header, Vec::new(), true, true);
        conn.next_id += 1;
        ctx.rdma_post(qp, ack);
    }

    /// Takes completions of sends.
    pub(super) fn ib_completed(&mut self, ctx: &mut Ctx, c: usize) {
        let conn = &mut self.ib[c];
        let Some(qp) = conn.qp else { return };
        let Some(last) = ctx.rdma_take_completions(qp, usize::MAX).pop() else { return };
        conn.retired = last + 1;
        conn.ack_sent = conn.ack_sent.filter(|id| *id > last);
        self.ib_transmit(ctx, c);
    }

    /// Takes frames, once a solicited one is among them [IB-42].
    pub(super) fn ib_receive(&mut self, ctx: &mut Ctx, c: usize) {
        let conn = &self.ib[c];
        let Some(qp) = conn.qp.filter(|_| matches!(conn.state, State::Up | State::Connecting))
        else {
            return;
        };
        if !ctx.rdma_is_solicited(qp) {
            return;
        }
        let frames = ctx.rdma_take(qp, usize::MAX);
        let came = ctx.rdma.came(qp, &frames);
        came.into_iter().for_each(|message| ctx.ops.came(message));
        for frame in &frames {
            if let Err(what) = self.ib_incoming(ctx, c, &frame.header, &frame.payload) {
                let header = Header::from_bytes(&frame.header);
                return ctx.fail(|| format!("a kernel drops {qp}, {what}: {header:?}"));
            }
        }
        ctx.rdma_post_receives(qp, frames.len());
        self.ib_transmit(ctx, c);
    }

    /// Handles a frame, step by step [IB-81].
    fn ib_incoming(
        &mut self,
        ctx: &mut Ctx,
        c: usize,
        bytes: &[u8; HEADER_LEN],
        payload: &[u8],
    ) -> Result<(), &'static str> {
        if !checksum_ok(bytes) {
            return Err("wrong checksum");
        }
        let header = Header::from_bytes(bytes);
        self.ib_acked(ctx, c, header.ack);
        if header.sport == 0 && header.dport == 0 && payload.is_empty() {
            // A farewell is for bowline nodes [IB-112].
            return if header.ext == [0; 16] { Ok(()) } else { Err("an extension of an ack") };
        }
        let conn = &mut self.ib[c];
        let (first, mut whole) = conn.coming.take().unwrap_or((header, Vec::new()));
        let same = |h: &Header| (h.sequence, h.len, h.sport, h.dport);
        if same(&first) != same(&header) {
            return Err("frames of a message differ");
        }
        let rest = first.len as usize - whole.len();
        if payload.len() < rest.min(FRAGMENT_LEN) {
            return Err("a frame is too short");
        }
        whole.extend_from_slice(&payload[..rest.min(FRAGMENT_LEN)]);
        if rest > FRAGMENT_LEN {
            conn.coming = Some((first, whole));
            return Ok(());
        }
        if is_map(&first) {
            conn.remote_map = whole;
            self.wake_writers(ctx);
            return Ok(());
        }
        self.ib_deliver(ctx, c, &first, &whole);
        let conn = &mut self.ib[c];
        conn.ack = first.sequence;
        conn.ack_wanted |= first.flags.contains(Flags::ACK_REQUIRED);
        Ok(())
    }

    /// Delivers a message [IB-82].
    fn ib_deliver(&mut self, ctx: &mut Ctx, c: usize, header: &Header, payload: &[u8]) {
        let conn = &mut self.ib[c];
        if header.sequence < conn.next_rx && header.flags.contains(Flags::RETRANSMITTED) {
            ctx.coverage.hit("kernel over RDMA", "drops a duplicate");
            return;
        }
        conn.next_rx = header.sequence + 1;
        let (local, remote) = (conn.local, conn.remote);
        match (header.sport, header.dport) {
            (0, 0) => ctx.coverage.hit("kernel over RDMA", "is asked to acknowledge"),
            (sport, 0) => {
                if self.flavour.ping_enable && !self.ib[c].is_congested(sport) {
                    self.ib_enqueue(c, Message { dport: sport, ..Message::default() });
                }
            }
            (sport, dport) => {
                ctx.coverage.hit("kernel over RDMA", "gets a message");
                self.deliver(ctx, (local, remote), sport, dport, payload);
            }
        }
    }

    /// Releases messages that the peer has acknowledged [IB-64].
    pub(super) fn ib_acked(&mut self, ctx: &mut Ctx, c: usize, ack: u64) {
        while self.ib[c].retrans.front().is_some_and(|message| message.seq <= ack) {
            if let Some(message) = self.ib[c].retrans.pop_front() {
                self.free(ctx, &message);
            }
        }
    }
}

/// Returns a frame; the last one of a message is solicited [IB-42].
fn frame(id: u64, header: Header, payload: Vec<u8>, signalled: bool, solicited: bool) -> Frame {
    let csum = checksum(&Header { csum: 0, ..header }.to_bytes());
    Frame {
        id,
        header: Header { csum, ..header }.to_bytes(),
        payload,
        signalled,
        solicited,
        lost: false,
        fence: false,
        work: None,
        again: None,
    }
}
