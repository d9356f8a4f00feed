//! The beginning of connections: the handshake, its repetitions, and reports to the listener.

use std::net::{IpAddr, SocketAddr};

use bowline_wire::rds::TCP_PORT;

use super::keepalive::KEEP_IDLE;
use super::{Conn, End, EndId, EndState, NetEvent, Notice, Reach, Reason, Stream};
use crate::engine::queue::SEC;
use crate::rds::ctx::{Ctx, Event, HostId};

impl Ctx {
    /// Starts a non-blocking connect from `local`, with a source port that is `modulo` 8 if given.
    pub(crate) fn tcp_connect(
        &mut self,
        host: HostId,
        local: IpAddr,
        modulo: Option<u8>,
        remote: SocketAddr,
    ) -> Result<EndId, Reason> {
        if !self.net.hosts[host].addrs.contains(&local) {
            return Err(Reason::AddrNotAvail);
        }
        let changed = self.net.plan.port_permille;
        let any = modulo.is_some() && changed > 0 && self.rng.chance(changed);
        if any {
            self.coverage.hit("tcp", "another port than was asked for");
        }
        let port = match modulo.filter(|_| !any) {
            Some(m) => (self.net.next_port & !7) | u16::from(m & 7),
            None => self.net.next_port | self.rng.below(8) as u16,
        };
        self.net.next_port =
            if self.net.next_port > 60_000 { 32_768 } else { self.net.next_port + 8 };
        let target = self.net.owner(remote.ip());
        let end_to_end =
            target.is_some_and(|t| self.net.hosts[t].end_to_end && self.net.hosts[host].end_to_end);
        let streams = [self.draw_stream(), self.draw_stream()];
        let conn = self.net.conns.len() as u32;
        self.net.conns.push(Conn {
            ends: [
                End::new(host, SocketAddr::new(local, port), EndState::SynSent),
                // The owner is looked up again when the SYN arrives.
                End::new(target.unwrap_or(host), remote, EndState::Gone),
            ],
            streams,
            blackhole: false,
            relay_closed: false,
            end_to_end,
            syn_tries: 0,
        });
        self.stats.connects += 1;
        let id = EndId { conn, side: 0 };
        self.note([1, u64::from(conn), u64::from(port)], || {
            format!("{id} connects {local}:{port} -> {remote}")
        });
        self.packet(id, NetEvent::Syn { conn }, true);
        Ok(id)
    }

    /// Draws the buffers of a new stream, and where it breaks, if it does.
    fn draw_stream(&mut self) -> Stream {
        let (lo, hi) = self.net.plan.send_buffer;
        let send_cap = self.rng.magnitude(lo, hi);
        let (lo, hi) = self.net.plan.recv_buffer;
        let recv_cap = self.rng.magnitude(lo, hi);
        let breaks = self.net.faulty && self.base.rng.chance(self.net.plan.cut_permille);
        let cut = breaks.then(|| (self.rng.magnitude(1, 200_000), self.draw_cut()));
        Stream::new(send_cap, recv_cap, cut)
    }

    pub(super) fn on_syn(&mut self, conn: u32) {
        let from = EndId { conn, side: 0 };
        let lost = self.lost();
        let c = &self.net.conns[conn as usize];
        let target = self.net.owner(c.ends[1].addr.ip());
        let blocked = target.is_none_or(|t| self.net.is_blocked(c.ends[0].host, t));
        let unroutable = self.net.owner(c.ends[0].addr.ip()) != Some(c.ends[0].host);
        let (Some(target), false) = (target, lost || blocked || unroutable) else {
            self.coverage.hit("tcp", "SYN lost");
            self.schedule(SEC, Event::Net(NetEvent::SynRetry { conn }));
            return;
        };
        if c.ends[0].state == EndState::Gone && c.ends[1].state == EndState::Gone {
            return;
        }
        if c.ends[1].state == EndState::Gone {
            let host = &self.net.hosts[target];
            if !host.listening || host.closing || c.ends[1].addr.port() != TCP_PORT {
                self.coverage.hit("tcp", "SYN refused");
                self.packet(from.other(), NetEvent::RelayedRst { conn, to: 0 }, true);
                return;
            }
            let end_to_end =
                self.net.hosts[target].end_to_end && self.net.hosts[c.ends[0].host].end_to_end;
            if c.ends[1].established > 0 {
                self.coverage.hit("tcp", "SYN comes to a host that was restarted meanwhile");
            }
            let now = self.now;
            // Nothing is left of an earlier boot of the host: neither its end of the stream nor the
            // bytes that were sent to its process.
            let streams = [self.draw_stream(), self.draw_stream()];
            let c = self.conn(conn);
            c.end_to_end = end_to_end;
            c.streams = streams;
            let addr = c.ends[1].addr;
            c.ends[1] = End::new(target, addr, EndState::Open);
            c.ends[1].established = now;
        }
        self.packet(from.other(), NetEvent::SynAck { conn }, true);
    }

    pub(super) fn on_syn_retry(&mut self, conn: u32) {
        let c = self.conn(conn);
        if c.ends[0].state != EndState::SynSent {
            return;
        }
        c.syn_tries += 1;
        if matches!(c.ends[1].state, EndState::Dead(_)) {
            self.break_end(EndId { conn, side: 0 }, Reason::Reset);
        } else if c.syn_tries > 60 {
            self.coverage.hit("tcp", "SYN given up");
            self.break_end(EndId { conn, side: 0 }, Reason::TimedOut);
        } else {
            self.packet(EndId { conn, side: 0 }, NetEvent::Syn { conn }, true);
        }
    }

    pub(super) fn on_syn_ack(&mut self, conn: u32) {
        let (from, to) = (EndId { conn, side: 1 }, EndId { conn, side: 0 });
        match self.arrival(from) {
            Reach::Peer => {}
            Reach::UnknownHost => {
                self.coverage.hit("tcp", "SYN-ACK comes to another host");
                self.refuse_stray(from);
                self.schedule(SEC, Event::Net(NetEvent::SynRetry { conn }));
                return;
            }
            Reach::Lost => {
                self.coverage.hit("tcp", "SYN-ACK lost");
                self.schedule(SEC, Event::Net(NetEvent::SynRetry { conn }));
                self.arm_keep(conn, 1, KEEP_IDLE);
                return;
            }
        }
        let now = self.now;
        let c = self.conn(conn);
        if c.ends[0].state != EndState::SynSent {
            return;
        }
        c.ends[0].state = EndState::Open;
        c.ends[0].established = now;
        self.note([6, u64::from(conn), 0], || format!("{to} established"));
        self.tell(to, Notice::Connected);
        self.packet(to, NetEvent::Established { conn }, true);
    }

    pub(super) fn on_established(&mut self, conn: u32) {
        let (from, to) = (EndId { conn, side: 0 }, EndId { conn, side: 1 });
        match self.arrival(from) {
            Reach::Peer => self.announce(to),
            Reach::UnknownHost => self.refuse_stray(from),
            Reach::Lost => {
                self.coverage.hit("tcp", "last packet of the handshake lost");
                let ends = &self.net.conns[conn as usize].ends;
                if ends[0].state == EndState::Gone {
                    // No TCP repeats the packet. A process that has the connection already, by a
                    // segment that followed, finds out by keepalive; a listener forgets the
                    // connection.
                    if ends[1].announced {
                        self.arm_keep(conn, 1, KEEP_IDLE);
                    } else {
                        self.remove_end(to);
                    }
                } else {
                    self.schedule(SEC, Event::Net(NetEvent::Established { conn }));
                }
            }
        }
    }

    /// Handles the completion of an accepted connection's handshake.
    pub(super) fn announce(&mut self, id: EndId) {
        let (c, side) = id.index();
        let end = &mut self.net.conns[c].ends[side];
        if !std::mem::replace(&mut end.announced, true) {
            self.tell(id, Notice::Incoming);
            self.report_overtaken(id);
        }
    }

    /// Tells the oracle which messages a kernel has written on a connection that is reported after
    /// one that was begun later.
    fn report_overtaken(&mut self, id: EndId) {
        let between = |c: &Conn| c.ends.each_ref().map(|e| e.addr.ip());
        let (earlier, later) = self.net.conns.split_at(id.conn as usize + 1);
        let Some(conn) = earlier.last() else { return };
        let overtook = |c: &&Conn| c.ends[1].announced && between(c) == between(conn);
        if self.net.hosts[conn.ends[0].host].kernel && later.iter().any(|c| overtook(&c)) {
            for message in conn.streams[0].tap.messages() {
                self.oracle.overtaken(message);
            }
        }
    }
}
