//! Faults of connections: cuts between the ends, hosts that stop, addresses that leave, routes that
//! change.

use std::net::IpAddr;

use super::keepalive::KEEP_IDLE;
use super::{EndId, EndState, NetEvent, Notice, TcpClose};
use crate::rds::ctx::{Ctx, Event, HostId};

/// How a fault between the ends breaks a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cut {
    /// Both ends get a reset.
    Reset,
    /// One end gets a reset, the other does not learn of it: half-open.
    ResetOne(u8),
    /// Packets are lost from now on.
    Blackhole,
    /// A relay ended both streams cleanly after the bytes it had passed on.
    Fin,
}

impl Ctx {
    /// Draws a way to break a connection.
    pub(crate) fn draw_cut(&mut self) -> Cut {
        match self.rng.below(8) {
            0..=2 => Cut::Reset,
            3 => Cut::ResetOne(0),
            4 => Cut::ResetOne(1),
            5 => Cut::Fin,
            _ => Cut::Blackhole,
        }
    }

    /// Breaks a connection between its ends.
    pub(crate) fn tcp_cut(&mut self, conn: u32, cut: Cut) {
        self.stats.cuts += 1;
        self.note([4, u64::from(conn), 0], || format!("tcp{conn} cut: {cut:?}"));
        let name = match cut {
            Cut::Reset => "reset to both",
            Cut::ResetOne(_) => "reset to one",
            Cut::Blackhole => "black hole",
            Cut::Fin => "FIN to both",
        };
        self.coverage.hit("cut", name);
        match cut {
            Cut::Reset => {
                for to in [0, 1] {
                    let delay = self.base.rng.between(0, self.net.plan.delay.1);
                    self.schedule(delay, Event::Net(NetEvent::RelayedRst { conn, to }));
                }
            }
            Cut::ResetOne(to) => {
                self.schedule(0, Event::Net(NetEvent::RelayedRst { conn, to }));
            }
            Cut::Blackhole => {
                self.conn(conn).blackhole = true;
                self.arm_keep(conn, 0, KEEP_IDLE);
                self.arm_keep(conn, 1, KEEP_IDLE);
            }
            Cut::Fin => {
                let c = self.conn(conn);
                c.relay_closed = true;
                for stream in &mut c.streams {
                    stream.fin_delivered = true;
                }
                for side in [0, 1] {
                    self.tell(EndId { conn, side }, Notice::Readable);
                }
            }
        }
    }

    /// Ends every connection of a host whose process or machine stops.
    pub(crate) fn tcp_host_down(&mut self, host: HostId, silent: bool) {
        let net = &mut self.net.hosts[host];
        net.listening = false;
        net.closing = false;
        net.boot += 1;
        net.up = !silent;
        for conn in 0..self.net.conns.len() as u32 {
            for side in [0, 1] {
                let id = EndId { conn, side };
                let (c, s) = id.index();
                let end = &self.net.conns[c].ends[s];
                if end.host != host {
                    continue;
                }
                let state = end.state;
                // This also applies if this end is gone and the other one does not know it yet.
                self.receiver_died(id);
                if state == EndState::Gone || (state == EndState::Orphan && !silent) {
                    continue;
                }
                if silent {
                    self.remove_end(id);
                    self.arm_keep(conn, 1 - side, KEEP_IDLE);
                } else {
                    // Connections that the listener still has end by a reset.
                    let taken = side == 0 || self.net.conns[c].ends[s].accepted;
                    if !taken && state == EndState::Open {
                        self.coverage.hit("tcp", "closed by a listener");
                    }
                    self.tcp_close(id, if taken { TcpClose::Fin } else { TcpClose::Reset });
                }
            }
        }
    }

    /// Closes the listener of a process that is about to end. New connections are refused, and
    /// connections that the process has not accepted yet end by a reset.
    pub(crate) fn tcp_stop_listening(&mut self, host: HostId) {
        self.net.hosts[host].closing = true;
        for conn in 0..self.net.conns.len() as u32 {
            let end = &self.net.conns[conn as usize].ends[1];
            if end.host == host && !end.accepted && end.state == EndState::Open {
                self.coverage.hit("tcp", "closed by a listener");
                self.tcp_close(EndId { conn, side: 1 }, TcpClose::Reset);
            }
        }
    }

    /// Takes an address from a host: its connections hang.
    pub(crate) fn tcp_address_lost(&mut self, host: HostId, ip: IpAddr) {
        self.net.hosts[host].addrs.retain(|a| *a != ip);
        for conn in 0..self.net.conns.len() as u32 {
            let c = &self.net.conns[conn as usize];
            let hit = |s: usize| c.ends[s].host == host && c.ends[s].addr.ip() == ip;
            if let Some(side) = (0..2).find(|s| hit(*s)) {
                // Peers may meet another node at this address before they meet this one again.
                self.receiver_died(EndId { conn, side: side as u8 });
                self.arm_keep(conn, 0, KEEP_IDLE);
                self.arm_keep(conn, 1, KEEP_IDLE);
            }
        }
    }

    /// Makes keepalive check every connection between two hosts, because a route changed.
    pub(crate) fn tcp_route_changed(&mut self, a: HostId, b: HostId) {
        for conn in 0..self.net.conns.len() as u32 {
            let hosts = self.net.conns[conn as usize].ends.each_ref().map(|e| e.host);
            if hosts == [a, b] || hosts == [b, a] {
                self.arm_keep(conn, 0, KEEP_IDLE);
                self.arm_keep(conn, 1, KEEP_IDLE);
            }
        }
    }
}
