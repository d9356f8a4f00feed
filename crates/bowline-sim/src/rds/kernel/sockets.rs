//! Sockets of a kernel and their users: send, receive, cancel, and wake-ups.

use std::collections::VecDeque;
use std::net::{IpAddr, SocketAddr};

use super::KernelHost;
use super::conn::{MAX_PATHS, Message};
use super::hash::port_hash;
use crate::engine::queue::MS;
use crate::rds::ctx::Ctx;
use crate::rds::host::SendResult;
use crate::rds::plan::SlotPlan;

/// How long a sender waits for the path count, in nanoseconds, before its user interrupts it.
const HANDSHAKE_PATIENCE: u64 = 2_000 * MS;

/// A socket.
#[derive(Debug)]
pub(super) struct Sock {
    pub(super) addr: SocketAddr,
    send_buffer: usize,
    pub(super) recv_buffer: usize,
    pub(super) send_bytes: usize,
    pub(super) recv_bytes: usize,
    pub(super) queue: VecDeque<(SocketAddr, Vec<u8>)>,
    pub(super) congested: bool,
    want_read: bool,
    pub(super) want_write: bool,
    /// Type of service, if it sends over RDMA.
    over_rdma: Option<u8>,
}

impl Sock {
    pub(super) const fn is_half_full(&self) -> bool {
        self.send_bytes >= self.send_buffer / 2
    }
}

impl KernelHost {
    pub(crate) fn open(&mut self, ctx: &Ctx, slot: usize, addr: SocketAddr, plan: &SlotPlan) {
        let sock = Sock {
            addr,
            send_buffer: plan.send_buffer,
            recv_buffer: plan.recv_buffer,
            send_bytes: 0,
            recv_bytes: 0,
            queue: VecDeque::new(),
            congested: false,
            want_read: false,
            want_write: false,
            // RDMA comes first at an address that has it [IB-3].
            over_rdma: (ctx.rdma.serves(addr.ip()) && !plan.tcp).then_some(plan.tos),
        };
        self.socks.insert(slot, sock);
    }

    pub(crate) fn close(&mut self, ctx: &mut Ctx, slot: usize) {
        let Some(sock) = self.socks.remove(&slot) else { return };
        for conn in &mut self.conns {
            for path in &mut conn.paths {
                path.queue.retain(|m| m.owner != Some(slot));
                path.retrans.retain(|m| m.owner != Some(slot));
            }
        }
        for conn in &mut self.ib {
            conn.queue.retain(|m| m.owner != Some(slot));
            conn.retrans.retain(|m| m.owner != Some(slot));
        }
        if sock.congested {
            self.map_changed(ctx, sock.addr.ip());
        }
    }

    pub(crate) fn cancel(&mut self, slot: usize, target: SocketAddr) {
        let Some(sock) = self.socks.get_mut(&slot) else { return };
        let local = sock.addr.ip();
        let hit = |m: &Message| m.owner == Some(slot) && m.dport == target.port();
        let mut remove = |list: &mut VecDeque<Message>| {
            let freed: usize = list.iter().filter(|m| hit(m)).map(|m| m.payload.len()).sum();
            sock.send_bytes -= freed;
            list.retain(|m| !hit(m));
        };
        let conns = self.conns.iter_mut();
        for conn in conns.filter(|c| c.local == local && c.remote == target.ip()) {
            for path in &mut conn.paths {
                remove(&mut path.queue);
                remove(&mut path.retrans);
            }
        }
        let conns = self.ib.iter_mut();
        for conn in conns.filter(|c| c.local == local && c.remote == target.ip()) {
            remove(&mut conn.queue);
            remove(&mut conn.retrans);
        }
    }

    pub(crate) fn want(&mut self, slot: usize, read: bool, write: bool) {
        if let Some(sock) = self.socks.get_mut(&slot) {
            sock.want_read |= read;
            sock.want_write |= write;
        }
    }

    pub(crate) fn recv(&mut self, ctx: &mut Ctx, slot: usize) -> Option<(SocketAddr, Vec<u8>)> {
        let sock = self.socks.get_mut(&slot)?;
        let (source, payload) = sock.queue.pop_front()?;
        sock.recv_bytes -= payload.len();
        if sock.congested && sock.recv_bytes < sock.recv_buffer / 2 {
            sock.congested = false;
            let ip = sock.addr.ip();
            self.map_changed(ctx, ip);
        }
        Some((source, payload))
    }

    pub(crate) fn send(
        &mut self,
        ctx: &mut Ctx,
        slot: usize,
        target: SocketAddr,
        payload: &[u8],
    ) -> SendResult {
        let Some(sock) = self.socks.get(&slot) else { return SendResult::Closed };
        let addr = sock.addr;
        let full = sock.send_bytes >= sock.send_buffer;
        if payload.len() > sock.send_buffer {
            return SendResult::TooLong;
        }
        if let Some(tos) = sock.over_rdma {
            return self.send_over_rdma(ctx, slot, (addr, target, tos), full, payload);
        }
        let c = self.conn(addr.ip(), target.ip());
        let mut hash = port_hash(addr.port()) as usize;
        let conn = &self.conns[c];
        // This is a blocking sender: messages of a non-blocking one may overtake each other.
        if conn.npaths == 0 && !hash.is_multiple_of(MAX_PATHS) {
            if !self.conns[c].probing {
                self.probe(ctx, c);
            }
            self.connect_if_down(ctx, c);
            let now = ctx.now;
            let since = *self.conns[c].waiting_since.get_or_insert(now);
            // A signal makes the sender continue with path 0; without it, it may hang
            //
            if now < since + HANDSHAKE_PATIENCE {
                return SendResult::Wait;
            }
            hash = 0;
            ctx.coverage.hit("kernel", "sends on without the path count");
            ctx.oracle.allow_disorder(slot);
        }
        let path = hash & (self.conns[c].usable().next_power_of_two() - 1);
        self.connect_if_down(ctx, c);
        let congested = self.conns[c].is_congested(target.port());
        if (congested && target.port() != 0) || full {
            return SendResult::Wait;
        }
        if let Some(sock) = self.socks.get_mut(&slot) {
            sock.send_bytes += payload.len();
        }
        let message = Message {
            owner: Some(slot),
            sport: addr.port(),
            dport: target.port(),
            payload: payload.to_vec(),
            ..Message::default()
        };
        self.enqueue(ctx, c, path, message);
        SendResult::Sent
    }

    /// Returns address and type of service of a socket that sends over RDMA, and whether it is
    /// full.
    pub(super) fn ib_socket(&self, slot: usize) -> Option<(IpAddr, u8, bool)> {
        let sock = self.socks.get(&slot)?;
        Some((sock.addr.ip(), sock.over_rdma?, sock.send_bytes >= sock.send_buffer))
    }

    fn send_over_rdma(
        &mut self,
        ctx: &mut Ctx,
        slot: usize,
        (addr, target, tos): (SocketAddr, SocketAddr, u8),
        full: bool,
        payload: &[u8],
    ) -> SendResult {
        if full {
            return SendResult::Wait;
        }
        if let Some(sock) = self.socks.get_mut(&slot) {
            sock.send_bytes += payload.len();
        }
        let message = Message {
            owner: Some(slot),
            sport: addr.port(),
            dport: target.port(),
            payload: payload.to_vec(),
            ..Message::default()
        };
        if self.ib_send(ctx, (addr.ip(), target.ip(), tos), message) {
            return SendResult::Sent;
        }
        if let Some(sock) = self.socks.get_mut(&slot) {
            sock.send_bytes -= payload.len();
        }
        SendResult::Wait
    }

    /// Tries again messages that only a new send would try.
    pub(crate) fn retry_waiting(&mut self, ctx: &mut Ctx) {
        for c in 0..self.conns.len() {
            let waiting = self.conns[c].paths.iter().any(|p| !p.queue.is_empty());
            if waiting || self.socks.values().any(|s| s.want_write) {
                self.connect_if_down(ctx, c);
            }
        }
        let waiting: Vec<usize> =
            self.socks.iter().filter(|(_, s)| s.want_write).map(|(slot, _)| *slot).collect();
        for slot in waiting {
            self.wake(ctx, slot, false, true);
        }
    }

    /// Returns the payload bytes that a socket has queued or unacknowledged.
    pub(crate) fn send_bytes(&self, slot: usize) -> usize {
        self.socks.get(&slot).map_or(0, |s| s.send_bytes)
    }

    /// Tells whether messages of a socket wait on paths that the peer does not have.
    pub(crate) fn is_stranded(&self, slot: usize) -> bool {
        self.conns.iter().flat_map(|c| c.beyond()).any(|m| m.owner == Some(slot))
    }

    pub(super) fn wake(&mut self, ctx: &mut Ctx, slot: usize, read: bool, write: bool) {
        let Some(sock) = self.socks.get_mut(&slot) else { return };
        let (r, w) = (read && sock.want_read, write && sock.want_write);
        sock.want_read &= !r;
        sock.want_write &= !w;
        if r || w {
            ctx.wakes.push_back((slot, r, w));
        }
    }

    pub(super) fn wake_writers(&mut self, ctx: &mut Ctx) {
        let slots: Vec<usize> = self.socks.keys().copied().collect();
        for slot in slots {
            self.wake(ctx, slot, false, true);
        }
    }
}
