//! Reception: frames, in the order of section 6.1 of the rules, and their effects.

use std::net::{IpAddr, SocketAddr};

use bowline_wire::rds::{Flags, HEADER_LEN, Handshake, Header, MAP_LEN, PROBE_PORT};

use super::KernelHost;
use super::conn::{MAX_PATHS, Message, State};
use crate::rds::ctx::Ctx;
use crate::rds::net::ReadOutcome;
use crate::rds::oracle::MessageId;
use crate::rds::payload::TAG_LEN;

impl KernelHost {
    pub(super) fn read(&mut self, ctx: &mut Ctx, c: usize, p: usize) {
        loop {
            let path = &mut self.conns[c].paths[p];
            let (State::Up, Some(end)) = (path.state, path.end) else { return };
            let mut rx = std::mem::take(&mut path.rx);
            let outcome = ctx.tcp_read(end, &mut rx, 1 << 16);
            let mut at = 0;
            while let Ok(header) = Header::parse(&rx[at..]) {
                let len = HEADER_LEN + header.len as usize;
                if rx.len() - at < len {
                    break;
                }
                let payload = at + HEADER_LEN..at + len;
                at += len;
                self.incoming(ctx, c, p, &header, &rx[payload]);
            }
            rx.drain(..at);
            self.conns[c].paths[p].rx = rx;
            match outcome {
                ReadOutcome::Data(_) => {}
                ReadOutcome::WouldBlock => return,
                ReadOutcome::Eof | ReadOutcome::Failed(_) => {
                    self.drop_path(ctx, c, p);
                    return;
                }
            }
        }
    }

    /// Handles a frame by section 6.1 of the rules.
    fn incoming(&mut self, ctx: &mut Ctx, c: usize, p: usize, header: &Header, payload: &[u8]) {
        if header.is_map() {
            if payload.len() == MAP_LEN {
                self.conns[c].remote_map = payload.to_vec();
                self.wake_writers(ctx);
            }
            return;
        }
        let path = &mut self.conns[c].paths[p];
        let flagged = header.flags.contains(Flags::RETRANSMITTED);
        let old = flagged && header.sequence < path.next_rx;
        if !old {
            path.next_rx = header.sequence.wrapping_add(1);
        }
        let id = self.identify(ctx, c, header.sport, header.dport, payload, false);
        if flagged
            && payload.len() < TAG_LEN
            && let Some(id) = id
        {
            ctx.oracle.excuse(id);
        }
        let known = id.is_some_and(|id| payload.len() >= TAG_LEN && self.seen.contains(&id));
        if old {
            if let (Some(id), false) = (id, known) {
                ctx.oracle.dropped(id);
                ctx.stats.kernel_quirks += 1;
                ctx.coverage.hit("kernel", "drops a message as old");
                ctx.coverage.hit("excused", "dropped by a kernel");
                ctx.note([20, header.sequence, 0], || format!("kernel drops {header} by R-601"));
            }
            return;
        }
        match (header.sport, header.dport) {
            (0, 0) => {}
            (sport, 0) => self.on_ping(ctx, c, p, sport, header),
            (0, PROBE_PORT) => {
                self.on_handshake(ctx, c, header);
                self.wake_writers(ctx);
            }
            _ if known => {
                ctx.stats.kernel_quirks += 1;
                ctx.coverage.hit("kernel", "doubles a message");
                ctx.note([21, header.sequence, 0], || format!("kernel doubles {header}, R-420"));
            }
            (sport, dport) => {
                self.seen.extend(id);
                let addrs = (self.conns[c].local, self.conns[c].remote);
                self.deliver(ctx, addrs, sport, dport, payload);
            }
        }
    }

    /// Identifies the workload message of a payload between the ports `sport` and `dport`; `own`:
    /// it goes from this host to the peer.
    pub(super) fn identify(
        &self,
        ctx: &Ctx,
        c: usize,
        sport: u16,
        dport: u16,
        payload: &[u8],
        own: bool,
    ) -> Option<MessageId> {
        let conn = &self.conns[c];
        let (from, to) = if own { (conn.local, conn.remote) } else { (conn.remote, conn.local) };
        let tag = &payload[..payload.len().min(TAG_LEN)];
        ctx.oracle.identify(SocketAddr::new(from, sport), SocketAddr::new(to, dport), tag)
    }

    fn on_ping(&mut self, ctx: &mut Ctx, c: usize, p: usize, sport: u16, header: &Header) {
        if !self.flavour.ping_enable {
            return;
        }
        let conn = &self.conns[c];
        let probe = header.is_probe_ping();
        if probe || !conn.is_congested(sport) {
            let ext = if probe { self.handshake() } else { [0; 16] };
            self.queue(c, p, Message { dport: sport, ext, ..Message::default() });
        }
        if probe {
            self.on_handshake(ctx, c, header);
        }
        // The answer is written only now, so a new generation does not flush it.
        self.transmit(ctx, c, p);
    }

    /// Handles the handshake of a peer, [R-405], [R-341].
    fn on_handshake(&mut self, ctx: &mut Ctx, c: usize, header: &Header) {
        if !self.flavour.multipath {
            return;
        }
        let said = Handshake::parse(&header.ext);
        let conn = &mut self.conns[c];
        let first = conn.npaths == 0;
        if let Some(n) = said.npaths {
            conn.npaths = usize::from(n).min(MAX_PATHS);
            conn.behind |= first && self.flavour.catches_up;
        }
        conn.npaths = conn.npaths.max(1);
        conn.probing = false;
        conn.sport_idx = said.sport_idx;
        if let Some(generation) = said.generation.filter(|g| *g != 0) {
            if conn.peer_generation != 0 && conn.peer_generation != generation {
                ctx.coverage.hit("kernel", "peer restarted");
                for path in &mut conn.paths {
                    path.next_tx = 1;
                    path.next_rx = 0;
                    path.retrans.iter_mut().for_each(|m| m.flush = true);
                }
            }
            conn.peer_generation = generation;
        }
        if conn.npaths > 1 && conn.smaller() {
            self.connect_if_down(ctx, c);
        }
        self.excuse_stranded(ctx, c);
    }

    /// Excuses messages that wait on paths the peer does not have: a kernel can neither move them
    /// nor connect those paths.
    fn excuse_stranded(&self, ctx: &mut Ctx, c: usize) {
        let conn = &self.conns[c];
        for message in conn.beyond().filter(|m| m.owner.is_some()) {
            let id = self.identify(ctx, c, message.sport, message.dport, &message.payload, true);
            if let Some(id) = id {
                ctx.oracle.excuse(id);
                ctx.coverage.hit("kernel", "messages wait on paths that are no more");
                ctx.coverage.hit("excused", "dropped by a kernel");
            }
        }
    }

    pub(super) fn deliver(
        &mut self,
        ctx: &mut Ctx,
        (local, remote): (IpAddr, IpAddr),
        sport: u16,
        dport: u16,
        payload: &[u8],
    ) {
        let bound = SocketAddr::new(local, dport);
        let Some((&slot, sock)) = self.socks.iter_mut().find(|(_, s)| s.addr == bound) else {
            return;
        };
        sock.queue.push_back((SocketAddr::new(remote, sport), payload.to_vec()));
        sock.recv_bytes += payload.len();
        if !sock.congested && sock.recv_bytes > sock.recv_buffer {
            sock.congested = true;
            self.map_changed(ctx, local);
        }
        self.wake(ctx, slot, true, false);
    }
}

#[cfg(test)]
mod tests {
    use std::net::{IpAddr, SocketAddr};

    use bowline_wire::rds::TCP_PORT;

    use super::*;
    use crate::rds::kernel::Flavour;
    use crate::rds::net::NetEvent;
    use crate::rds::net::tests::two_hosts;

    /// Makes a kernel, 10.0.0.2, that has accepted a connection from 10.0.0.1.
    fn connected() -> (Ctx, KernelHost) {
        let mut ctx = two_hosts(true);
        let flavour = Flavour {
            multipath: true,
            later: true,
            ping_enable: true,
            slow_reader: false,
            catches_up: true,
        };
        let mut kernel = KernelHost::new(1, flavour, 9);
        let to = SocketAddr::from(([10, 0, 0, 2], TCP_PORT));
        let end = ctx.tcp_connect(0, IpAddr::from([10, 0, 0, 1]), None, to).expect("an end");
        for event in [
            NetEvent::Syn { conn: end.conn },
            NetEvent::SynAck { conn: end.conn },
            NetEvent::Established { conn: end.conn },
        ] {
            ctx.net_event(event);
        }
        kernel.accept(&mut ctx, end.other());
        (ctx, kernel)
    }

    fn probe(generation: u32) -> Header {
        let said = Handshake {
            npaths: Some(8),
            generation: Some(generation),
            sport_idx: true,
            bowline: None,
        };
        Header { sequence: 1, sport: PROBE_PORT, ext: said.emit(), ..Header::default() }
    }

    /// The answer to a probe with a new generation is queued before the generation is handled, but
    /// not written: so it is not among the messages that are flushed then.
    // tests
    #[test]
    fn the_answer_to_a_probe_of_a_new_process_is_not_flushed() {
        let (mut ctx, mut kernel) = connected();
        kernel.incoming(&mut ctx, 0, 0, &probe(1), &[]);
        kernel.incoming(&mut ctx, 0, 0, &probe(2), &[]);
        let path = &kernel.conns[0].paths[0];
        let pongs: Vec<_> =
            path.retrans.iter().filter(|m| m.sport == 0 && m.dport == PROBE_PORT).collect();
        assert_eq!(pongs.iter().map(|m| m.flush).collect::<Vec<_>>(), [true, false]);
    }
}
