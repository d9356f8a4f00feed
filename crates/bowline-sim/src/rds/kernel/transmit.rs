//! Transmission: messages, maps, pings and probes of the kernel.

use std::net::IpAddr;

use bowline_wire::rds::{Flags, HEADER_LEN, Handshake, Header, MAP_LEN, PROBE_PORT};

use super::KernelHost;
use super::conn::{Message, State};
use crate::engine::queue::MS;
use crate::rds::ctx::{Ctx, HostEvent};

/// How soon a path tries again that waits for path 0. In a kernel it is some microseconds; here
/// each attempt is an event.
const TRY_AGAIN: u64 = MS / 4;

impl KernelHost {
    /// Gives a message the next number of its path, and writes as much as possible.
    pub(super) fn enqueue(&mut self, ctx: &mut Ctx, c: usize, p: usize, message: Message) {
        self.queue(c, p, message);
        self.transmit(ctx, c, p);
    }

    /// Gives a message the next number of its path.
    pub(super) fn queue(&mut self, c: usize, p: usize, mut message: Message) {
        let path = &mut self.conns[c].paths[p];
        message.seq = path.next_tx;
        path.next_tx = path.next_tx.wrapping_add(1);
        path.queue.push_back(message);
    }

    pub(super) fn handshake(&self) -> [u8; 16] {
        if !self.flavour.multipath {
            return [0; 16];
        }
        let later = self.flavour.later;
        let generation = later.then_some(self.generation);
        Handshake { npaths: Some(8), generation, sport_idx: later, bowline: None }.emit()
    }

    /// Sends a probe, [R-402].
    pub(super) fn probe(&mut self, ctx: &mut Ctx, c: usize) {
        if !self.flavour.multipath {
            self.conns[c].npaths = 1;
            return;
        }
        self.conns[c].probing = true;
        let ext = self.handshake();
        self.enqueue(ctx, c, 0, Message { sport: PROBE_PORT, ext, ..Message::default() });
    }

    /// Writes as much as TCP takes.
    pub(super) fn transmit(&mut self, ctx: &mut Ctx, c: usize, p: usize) {
        loop {
            let conn = &mut self.conns[c];
            let path = &mut conn.paths[p];
            let (State::Up, Some(end)) = (path.state, path.end) else { return };
            let begins = path.out.is_none() && !conn.map_queued && !path.queue.is_empty();
            if p > 0 && begins && conn.waits_for_path_0() {
                self.try_later(ctx, c, p);
                return;
            }
            let conn = &mut self.conns[c];
            let path = &mut conn.paths[p];
            if path.out.is_none() {
                if conn.map_queued {
                    conn.map_queued = false;
                    let local = conn.local;
                    let frame = self.map_frame(local);
                    self.conns[c].paths[p].out = Some((frame, 0));
                } else {
                    let Some(mut message) = path.queue.pop_front() else { return };
                    if message.flush {
                        self.drop_for_restart(ctx, c, &message);
                        continue;
                    }
                    let header = Header {
                        sequence: message.seq,
                        len: message.payload.len() as u32,
                        sport: message.sport,
                        dport: message.dport,
                        flags: if message.flagged { Flags::RETRANSMITTED } else { Flags::NONE },
                        ext: message.ext,
                        ..Header::default()
                    };
                    let mut frame = header.to_bytes().to_vec();
                    frame.extend_from_slice(&message.payload);
                    message.ack_end = ctx.net.written(end) + frame.len() as u64;
                    path.retrans.push_back(message);
                    path.out = Some((frame, 0));
                }
            }
            let path = &mut self.conns[c].paths[p];
            let Some((frame, done)) = &mut path.out else { return };
            match ctx.tcp_write(end, &frame[*done..]) {
                Ok(n) => {
                    *done += n;
                    if *done < frame.len() {
                        return;
                    }
                    path.out = None;
                }
                Err(_) => {
                    self.drop_path(ctx, c, p);
                    return;
                }
            }
        }
    }

    /// Has a path try again: a kernel's worker does so at once, as often as it can.
    fn try_later(&mut self, ctx: &mut Ctx, c: usize, p: usize) {
        ctx.stats.kernel_tries += 1;
        ctx.coverage.hit("kernel", "a path waits for path 0");
        if !std::mem::replace(&mut self.conns[c].paths[p].try_pending, true) {
            ctx.schedule_host(TRY_AGAIN, self.id, HostEvent::TryPath { conn: c, path: p });
        }
    }

    /// Drops a message by the rule for restarted peers.
    fn drop_for_restart(&mut self, ctx: &mut Ctx, c: usize, message: &Message) {
        if let Some(id) =
            self.identify(ctx, c, message.sport, message.dport, &message.payload, true)
        {
            ctx.oracle.excuse(id);
            ctx.stats.kernel_quirks += 1;
            ctx.coverage.hit("kernel", "drops a message of a restarted peer's");
            ctx.coverage.hit("excused", "dropped by a kernel");
        }
        self.free(ctx, message);
    }

    pub(super) fn free(&mut self, ctx: &mut Ctx, message: &Message) {
        let Some(slot) = message.owner else { return };
        if let Some(sock) = self.socks.get_mut(&slot) {
            sock.send_bytes -= message.payload.len();
            self.wake(ctx, slot, false, true);
        }
    }

    /// Releases messages that TCP has acknowledged to.
    pub(super) fn release(&mut self, ctx: &mut Ctx, c: usize, p: usize) {
        let Some(end) = self.conns[c].paths[p].end else { return };
        let acked = ctx.net.acked(end);
        loop {
            let retrans = &mut self.conns[c].paths[p].retrans;
            if retrans.front().is_none_or(|m| m.ack_end > acked) {
                return;
            }
            if let Some(message) = retrans.pop_front() {
                self.free(ctx, &message);
            }
        }
    }

    pub(super) fn map_frame(&self, local: IpAddr) -> Vec<u8> {
        let mut frame = Header::map().to_bytes().to_vec();
        frame.resize(HEADER_LEN + MAP_LEN, 0);
        for sock in self.socks.values().filter(|s| s.congested && s.addr.ip() == local) {
            let port = sock.addr.port();
            frame[HEADER_LEN + usize::from(port >> 3)] |= 1 << (port & 7);
        }
        frame
    }

    /// Sends a changed map.
    pub(super) fn map_changed(&mut self, ctx: &mut Ctx, local: IpAddr) {
        for c in 0..self.conns.len() {
            if self.conns[c].local == local {
                self.conns[c].map_queued = true;
                self.transmit(ctx, c, 0);
            }
        }
        self.ib_map_changed(ctx, local);
    }
}
