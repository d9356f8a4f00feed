//! Paths: which side connects, which path an accepted connection serves, and what happens to
//! messages when a connection ends.
//!
//! ```text
//!   Down --connect--> Connecting --established, smaller--> Up --FIN, RST--> Error
//!    ^  \--accept, larger--------------------------------/                   |
//!    +-------------------------- shutdown work -------------------------------+
//! ```

use std::net::SocketAddr;

use bowline_wire::rds::TCP_PORT;

use super::KernelHost;
use super::conn::State;
use crate::engine::queue::MS;
use crate::rds::ctx::{Ctx, HostEvent};
use crate::rds::net::{EndId, TcpClose};

const TICK: u64 = 4 * MS;

impl KernelHost {
    pub(super) fn connect_if_down(&mut self, ctx: &mut Ctx, c: usize) {
        for p in 0..self.conns[c].usable() {
            let path = &self.conns[c].paths[p];
            if path.state == State::Down && !path.reconnect_pending {
                self.connect(ctx, c, p);
            }
        }
    }

    /// Runs the connect worker [R-334].
    pub(super) fn connect(&mut self, ctx: &mut Ctx, c: usize, p: usize) {
        let conn = &mut self.conns[c];
        let smaller = conn.smaller();
        let npaths = conn.npaths;
        let path = &mut conn.paths[p];
        path.reconnect_pending = false;
        if path.state != State::Down || (p > 0 && !smaller) {
            return;
        }
        if p > 0 && npaths < 2 {
            self.queue_reconnect(ctx, c, p);
            return;
        }
        let modulo = self.flavour.later.then_some(p as u8);
        let (local, remote) = (conn.local, SocketAddr::new(conn.remote, TCP_PORT));
        match ctx.tcp_connect(self.id, local, modulo, remote) {
            Ok(end) => {
                let path = &mut self.conns[c].paths[p];
                path.state = State::Connecting;
                path.end = Some(end);
                self.ends.insert(end, (c, p));
            }
            Err(_) => self.queue_reconnect(ctx, c, p),
        }
    }

    pub(super) fn connected(&mut self, ctx: &mut Ctx, c: usize, p: usize) {
        if self.conns[c].smaller() {
            self.up(ctx, c, p);
        } else {
            self.drop_path(ctx, c, p);
        }
    }

    pub(super) fn connect_failed(&mut self, ctx: &mut Ctx, end: EndId, c: usize, p: usize) {
        self.ends.remove(&end);
        let path = &mut self.conns[c].paths[p];
        path.end = None;
        path.state = State::Down;
        self.queue_reconnect(ctx, c, p);
    }

    /// Plans the next attempt to connect [R-330], [R-331].
    fn queue_reconnect(&mut self, ctx: &mut Ctx, c: usize, p: usize) {
        if !self.conns[c].smaller() {
            return;
        }
        let path = &mut self.conns[c].paths[p];
        let wait = if path.delay == 0 {
            path.delay = TICK;
            0
        } else {
            let wait = ctx.rng.below(path.delay);
            path.delay = (path.delay * 2).min(1000 * MS);
            wait
        };
        path.reconnect_pending = true;
        ctx.schedule_host(wait, self.id, HostEvent::Connect { conn: c, path: p });
    }

    /// Accepts a connection [R-203], [R-209 to R-213].
    pub(super) fn accept(&mut self, ctx: &mut Ctx, end: EndId) {
        if !ctx.net.accept(end) {
            return;
        }
        let (local, remote) = (ctx.net.local(end).ip(), ctx.net.remote(end));
        if ctx.net.hosts[self.id].addrs.contains(&remote.ip()) {
            ctx.tcp_close(end, TcpClose::Reset);
            return;
        }
        let c = self.conn(local, remote.ip());
        let conn = &self.conns[c];
        if conn.smaller() {
            let path = &conn.paths[0];
            if conn.npaths < 2 && path.state == State::Down && !path.reconnect_pending {
                self.connect(ctx, c, 0);
            }
            ctx.coverage.hit("kernel", "resets a knock");
            ctx.tcp_close(end, TcpClose::Reset);
            return;
        }
        let down = |p: &usize| conn.paths[*p].state == State::Down;
        let by_port = usize::from(remote.port()) % conn.usable();
        let free = if self.flavour.later && conn.sport_idx {
            Some(by_port).filter(down)
        } else {
            (0..conn.usable()).find(down)
        };
        let Some(p) = free else {
            ctx.coverage.hit("kernel", "resets a connection because no path is free");
            ctx.tcp_close(end, TcpClose::Reset);
            return;
        };
        if p > 0 && by_port % conn.usable() != p {
            ctx.coverage.hit("kernel", "two paths change places");
        }
        self.ends.insert(end, (c, p));
        self.conns[c].paths[p].end = Some(end);
        self.up(ctx, c, p);
        if self.conns[c].npaths == 0 && !self.conns[c].probing {
            self.probe(ctx, c);
        }
        self.read(ctx, c, p);
    }

    fn up(&mut self, ctx: &mut Ctx, c: usize, p: usize) {
        let conn = &mut self.conns[c];
        conn.paths[p].state = State::Up;
        conn.paths[p].delay = 0;
        conn.map_queued = true;
        self.transmit(ctx, c, p);
    }

    /// Drops all paths, which come back later, as a change of TCP buffer sizes does.
    pub(crate) fn drop_paths(&mut self, ctx: &mut Ctx) {
        for c in 0..self.conns.len() {
            for p in 0..self.conns[c].paths.len() {
                self.drop_path(ctx, c, p);
            }
        }
        for c in 0..self.ib.len() {
            self.ib_drop(ctx, c);
        }
    }

    /// Drops a path; the work queue shuts it down a little later [R-310], [R-311].
    pub(super) fn drop_path(&mut self, ctx: &mut Ctx, c: usize, p: usize) {
        let path = &mut self.conns[c].paths[p];
        if matches!(path.state, State::Up | State::Connecting) {
            path.state = State::Error;
            let delay =
                if ctx.rng.chance(100) { ctx.rng.below(20 * MS) } else { ctx.rng.below(MS) };
            ctx.schedule_host(delay, self.id, HostEvent::Shutdown { conn: c, path: p });
        }
    }

    /// Shuts a path down [R-311], [R-320], [R-230].
    pub(super) fn shutdown(&mut self, ctx: &mut Ctx, c: usize, p: usize) {
        let conn = &mut self.conns[c];
        let path = &mut conn.paths[p];
        if path.state != State::Error {
            return;
        }
        if let Some(end) = path.end.take() {
            self.ends.remove(&end);
            ctx.tcp_close(end, TcpClose::Fin);
        }
        conn.map_queued = false;
        path.out = None;
        path.rx.clear();
        path.read_pending = false;
        while let Some(mut message) = path.retrans.pop_back() {
            message.flagged = true;
            path.queue.push_front(message);
        }
        path.state = State::Down;
        path.reconnect_pending = false;
        conn.behind |= p == 0 && self.flavour.catches_up;
        self.queue_reconnect(ctx, c, p);
    }
}
