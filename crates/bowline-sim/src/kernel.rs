//! A kernel peer, written from the rules of `docs/spec/rds.md` (sections 2 to 7) with its weak
//! points: it frees messages when TCP has acknowledged them [R-241], resets connections when no
//! path is free [R-210], throws unread bytes away when it closes [R-230], pairs paths by order of
//! acceptance [R-420] and repeats a knock only when something is sent [R-339].
//!
//! ```text
//!   Down --connect--> Connecting --established, smaller--> Up --FIN, RST--> Error
//!    ^  \--accept, larger--------------------------------/                   |
//!    +-------------------------- shutdown work -------------------------------+
//! ```

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::net::{IpAddr, SocketAddr};

use bowline_wire::rds::{
    Flags, HEADER_LEN, Handshake, Header, MAP_LEN, MapView, PROBE_PORT, TCP_PORT,
};

use crate::ctx::{Ctx, HostEvent, HostId};
use crate::host::SendResult;
use crate::net::{EndId, Notice, ReadOutcome, TcpClose};
use crate::oracle::MessageId;
use crate::payload::TAG_LEN;
use crate::queue::MS;

/// What kind of kernel.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Flavour {
    /// Paths announced; 1 with `multipath` off: a peer from before multipath.
    pub(crate) multipath: bool,
    /// Announces generation and source port rule as later kernels do [spec 4.6].
    pub(crate) later: bool,
    /// Answers pings [R-432].
    pub(crate) ping_enable: bool,
    /// Reads its TCP sockets with a delay, so that a close can discard something.
    pub(crate) slow_reader: bool,
}

const MAX_PATHS: usize = 8;
const TICK: u64 = 4 * MS;
/// How long a sender waits for the path count before its user loses patience.
const HANDSHAKE_PATIENCE: u64 = 2_000 * MS;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Down,
    Connecting,
    Up,
    Error,
}

#[derive(Clone, Debug)]
struct Message {
    seq: u64,
    owner: Option<usize>,
    sport: u16,
    dport: u16,
    payload: Vec<u8>,
    ext: [u8; 16],
    flagged: bool,
    flush: bool,
    ack_end: u64,
}

#[derive(Debug)]
struct Path {
    state: State,
    end: Option<EndId>,
    next_tx: u64,
    next_rx: u64,
    queue: VecDeque<Message>,
    retrans: VecDeque<Message>,
    /// Frame being written and how much of it is.
    out: Option<(Vec<u8>, usize)>,
    rx: Vec<u8>,
    delay: u64,
    reconnect_pending: bool,
    read_pending: bool,
}

#[derive(Debug)]
struct Conn {
    local: IpAddr,
    remote: IpAddr,
    npaths: usize,
    probing: bool,
    sport_idx: bool,
    peer_generation: u32,
    remote_map: Vec<u8>,
    map_queued: bool,
    /// Since when senders wait for the handshake.
    waiting_since: Option<u64>,
    paths: Vec<Path>,
}

impl Conn {
    fn smaller(&self) -> bool {
        key(self.local) < key(self.remote)
    }

    fn usable(&self) -> usize {
        self.npaths.max(1)
    }
}

#[derive(Debug)]
struct Sock {
    addr: SocketAddr,
    send_buffer: usize,
    recv_buffer: usize,
    send_bytes: usize,
    recv_bytes: usize,
    queue: VecDeque<(SocketAddr, Vec<u8>)>,
    congested: bool,
    want_read: bool,
    want_write: bool,
}

/// One kernel.
#[derive(Debug)]
pub(crate) struct KernelHost {
    id: HostId,
    flavour: Flavour,
    generation: u32,
    socks: BTreeMap<usize, Sock>,
    conns: Vec<Conn>,
    ends: HashMap<EndId, (usize, usize)>,
    /// Messages of the workload queued on sockets, to recognise what the rules double or lose.
    seen: HashSet<MessageId>,
}

fn key(ip: IpAddr) -> u128 {
    match ip {
        IpAddr::V4(v4) => v4.to_ipv6_mapped().to_bits(),
        IpAddr::V6(v6) => v6.to_bits(),
    }
}

/// Jenkins lookup3 of one word with initial value 0 [R-410], [R-411].
fn port_hash(port: u16) -> u32 {
    let v = 0xdead_beef_u32.wrapping_add(4);
    let (mut a, mut b, mut c) = (u32::from(port).wrapping_add(v), v, v);
    c = (c ^ b).wrapping_sub(b.rotate_left(14));
    a = (a ^ c).wrapping_sub(c.rotate_left(11));
    b = (b ^ a).wrapping_sub(a.rotate_left(25));
    c = (c ^ b).wrapping_sub(b.rotate_left(16));
    a = (a ^ c).wrapping_sub(c.rotate_left(4));
    b = (b ^ a).wrapping_sub(a.rotate_left(14));
    (c ^ b).wrapping_sub(b.rotate_left(24))
}

impl KernelHost {
    pub(crate) fn new(id: HostId, flavour: Flavour, generation: u32) -> Self {
        Self {
            id,
            flavour,
            generation,
            socks: BTreeMap::new(),
            conns: Vec::new(),
            ends: HashMap::new(),
            seen: HashSet::new(),
        }
    }

    // Sockets.

    pub(crate) fn open(&mut self, slot: usize, addr: SocketAddr, send: usize, recv: usize) {
        let sock = Sock {
            addr,
            send_buffer: send,
            recv_buffer: recv,
            send_bytes: 0,
            recv_bytes: 0,
            queue: VecDeque::new(),
            congested: false,
            want_read: false,
            want_write: false,
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
        if sock.congested {
            self.map_changed(ctx, sock.addr.ip());
        }
    }

    pub(crate) fn cancel(&mut self, slot: usize, target: SocketAddr) {
        let Some(sock) = self.socks.get_mut(&slot) else { return };
        let local = sock.addr.ip();
        let Some(conn) =
            self.conns.iter_mut().find(|c| c.local == local && c.remote == target.ip())
        else {
            return;
        };
        let hit = |m: &Message| m.owner == Some(slot) && m.dport == target.port();
        for path in &mut conn.paths {
            for list in [&mut path.queue, &mut path.retrans] {
                let freed: usize = list.iter().filter(|m| hit(m)).map(|m| m.payload.len()).sum();
                sock.send_bytes -= freed;
                list.retain(|m| !hit(m));
            }
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
        let c = self.conn(addr.ip(), target.ip());
        let mut hash = port_hash(addr.port()) as usize;
        let conn = &self.conns[c];
        // A blocking sender: non-blocking ones may be overtaken by their own later messages.
        if conn.npaths == 0 && !hash.is_multiple_of(MAX_PATHS) {
            if !self.conns[c].probing {
                self.probe(ctx, c);
            }
            self.connect_if_down(ctx, c);
            let now = ctx.now;
            let since = *self.conns[c].waiting_since.get_or_insert(now);
            // A signal makes the sender go on with path 0 [R-414]; without it, it may hang [R-431].
            if now < since + HANDSHAKE_PATIENCE {
                return SendResult::Wait;
            }
            hash = 0;
            ctx.oracle.disorders(slot);
        }
        let path = hash & (self.conns[c].usable().next_power_of_two() - 1);
        self.connect_if_down(ctx, c);
        let congested =
            MapView::new(&self.conns[c].remote_map).is_some_and(|m| m.is_congested(target.port()));
        if (congested && target.port() != 0) || full {
            return SendResult::Wait;
        }
        if let Some(sock) = self.socks.get_mut(&slot) {
            sock.send_bytes += payload.len();
        }
        self.enqueue(ctx, c, path, Some(slot), addr.port(), target.port(), payload, [0; 16]);
        SendResult::Sent
    }

    /// Tries again what only a new send would try [R-339].
    pub(crate) fn nudge(&mut self, ctx: &mut Ctx) {
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

    /// Payload bytes a socket has queued or not acknowledged.
    pub(crate) fn send_bytes(&self, slot: usize) -> usize {
        self.socks.get(&slot).map_or(0, |s| s.send_bytes)
    }

    fn wake(&mut self, ctx: &mut Ctx, slot: usize, read: bool, write: bool) {
        let Some(sock) = self.socks.get_mut(&slot) else { return };
        let (r, w) = (read && sock.want_read, write && sock.want_write);
        sock.want_read &= !r;
        sock.want_write &= !w;
        if r || w {
            ctx.wakes.push_back((slot, r, w));
        }
    }

    // Connections.

    fn conn(&mut self, local: IpAddr, remote: IpAddr) -> usize {
        if let Some(c) = self.conns.iter().position(|c| c.local == local && c.remote == remote) {
            return c;
        }
        let path = || Path {
            state: State::Down,
            end: None,
            next_tx: 1,
            next_rx: 0,
            queue: VecDeque::new(),
            retrans: VecDeque::new(),
            out: None,
            rx: Vec::new(),
            delay: 0,
            reconnect_pending: false,
            read_pending: false,
        };
        self.conns.push(Conn {
            local,
            remote,
            npaths: 0,
            probing: false,
            sport_idx: false,
            peer_generation: 0,
            remote_map: Vec::new(),
            map_queued: false,
            waiting_since: None,
            paths: (0..MAX_PATHS).map(|_| path()).collect(),
        });
        self.conns.len() - 1
    }

    fn connect_if_down(&mut self, ctx: &mut Ctx, c: usize) {
        for p in 0..self.conns[c].usable() {
            let path = &self.conns[c].paths[p];
            if path.state == State::Down && !path.reconnect_pending {
                self.connect(ctx, c, p);
            }
        }
    }

    /// The connect worker [R-334].
    fn connect(&mut self, ctx: &mut Ctx, c: usize, p: usize) {
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

    /// R-330, R-331.
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

    pub(crate) fn event(&mut self, ctx: &mut Ctx, what: HostEvent) {
        match what {
            HostEvent::Connect { conn, path } if self.conns[conn].paths[path].reconnect_pending => {
                self.connect(ctx, conn, path);
            }
            HostEvent::Shutdown { conn, path } => self.shutdown(ctx, conn, path),
            HostEvent::Read(end) => {
                if let Some(&(c, p)) = self.ends.get(&end) {
                    self.conns[c].paths[p].read_pending = false;
                    self.read(ctx, c, p);
                }
            }
            _ => {}
        }
    }

    pub(crate) fn notice(&mut self, ctx: &mut Ctx, end: EndId, notice: Notice) {
        if notice == Notice::Incoming {
            self.accept(ctx, end);
            return;
        }
        let Some(&(c, p)) = self.ends.get(&end) else { return };
        match notice {
            Notice::Connected => {
                if self.conns[c].smaller() {
                    self.up(ctx, c, p);
                } else {
                    self.drop_path(ctx, c, p);
                }
            }
            Notice::ConnectFailed(_) => {
                self.ends.remove(&end);
                let path = &mut self.conns[c].paths[p];
                path.end = None;
                path.state = State::Down;
                self.queue_reconnect(ctx, c, p);
            }
            Notice::Readable if self.flavour.slow_reader => {
                let path = &mut self.conns[c].paths[p];
                if !path.read_pending {
                    path.read_pending = true;
                    let delay = ctx.rng.below(2 * MS);
                    ctx.schedule_host(delay, self.id, HostEvent::Read(end));
                }
            }
            Notice::Readable => self.read(ctx, c, p),
            Notice::Writable => self.kick(ctx, c, p),
            Notice::Acked => self.release(ctx, c, p),
            Notice::Incoming => {}
        }
    }

    /// R-203, R-209 to R-213.
    fn accept(&mut self, ctx: &mut Ctx, end: EndId) {
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
            ctx.tcp_close(end, TcpClose::Reset);
            return;
        };
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
        self.kick(ctx, c, p);
    }

    /// R-310, R-311: the work queue shuts the path down a little later.
    fn drop_path(&mut self, ctx: &mut Ctx, c: usize, p: usize) {
        let path = &mut self.conns[c].paths[p];
        if matches!(path.state, State::Up | State::Connecting) {
            path.state = State::Error;
            let delay =
                if ctx.rng.chance(100) { ctx.rng.below(20 * MS) } else { ctx.rng.below(MS) };
            ctx.schedule_host(delay, self.id, HostEvent::Shutdown { conn: c, path: p });
        }
    }

    /// R-311, R-320, R-230.
    fn shutdown(&mut self, ctx: &mut Ctx, c: usize, p: usize) {
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
        self.queue_reconnect(ctx, c, p);
    }

    // Transmission.

    #[allow(clippy::too_many_arguments)]
    fn enqueue(
        &mut self,
        ctx: &mut Ctx,
        c: usize,
        p: usize,
        owner: Option<usize>,
        sport: u16,
        dport: u16,
        payload: &[u8],
        ext: [u8; 16],
    ) {
        let path = &mut self.conns[c].paths[p];
        let message = Message {
            seq: path.next_tx,
            owner,
            sport,
            dport,
            payload: payload.to_vec(),
            ext,
            flagged: false,
            flush: false,
            ack_end: 0,
        };
        path.next_tx = path.next_tx.wrapping_add(1);
        path.queue.push_back(message);
        self.kick(ctx, c, p);
    }

    fn handshake(&self) -> [u8; 16] {
        if !self.flavour.multipath {
            return [0; 16];
        }
        let later = self.flavour.later;
        let generation = later.then_some(self.generation);
        Handshake { npaths: Some(8), generation, sport_idx: later, bowline: None }.emit()
    }

    /// R-401, R-402.
    fn probe(&mut self, ctx: &mut Ctx, c: usize) {
        if !self.flavour.multipath {
            self.conns[c].npaths = 1;
            return;
        }
        self.conns[c].probing = true;
        let ext = self.handshake();
        self.enqueue(ctx, c, 0, None, PROBE_PORT, 0, &[], ext);
    }

    /// Writes as much as TCP takes [R-522].
    fn kick(&mut self, ctx: &mut Ctx, c: usize, p: usize) {
        loop {
            let conn = &mut self.conns[c];
            let path = &mut conn.paths[p];
            let (State::Up, Some(end)) = (path.state, path.end) else { return };
            if path.out.is_none() {
                if conn.map_queued {
                    conn.map_queued = false;
                    let local = conn.local;
                    let frame = self.map_frame(local);
                    self.conns[c].paths[p].out = Some((frame, 0));
                } else {
                    let Some(mut message) = path.queue.pop_front() else { return };
                    if message.flush {
                        self.lose(ctx, c, &message);
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

    /// A message is dropped by the rule for restarted peers [R-341].
    fn lose(&mut self, ctx: &mut Ctx, c: usize, message: &Message) {
        if let Some(id) =
            self.identify(ctx, c, message.sport, message.dport, &message.payload, true)
        {
            ctx.oracle.excuse(id);
            ctx.stats.kernel_quirks += 1;
        }
        self.free(ctx, message);
    }

    fn free(&mut self, ctx: &mut Ctx, message: &Message) {
        let Some(slot) = message.owner else { return };
        if let Some(sock) = self.socks.get_mut(&slot) {
            sock.send_bytes -= message.payload.len();
            self.wake(ctx, slot, false, true);
        }
    }

    /// R-240 to R-242.
    fn release(&mut self, ctx: &mut Ctx, c: usize, p: usize) {
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

    fn map_frame(&self, local: IpAddr) -> Vec<u8> {
        let mut frame = Header::map().to_bytes().to_vec();
        frame.resize(HEADER_LEN + MAP_LEN, 0);
        for sock in self.socks.values().filter(|s| s.congested && s.addr.ip() == local) {
            let port = sock.addr.port();
            frame[HEADER_LEN + usize::from(port >> 3)] |= 1 << (port & 7);
        }
        frame
    }

    /// R-705.
    fn map_changed(&mut self, ctx: &mut Ctx, local: IpAddr) {
        for c in 0..self.conns.len() {
            if self.conns[c].local == local {
                self.conns[c].map_queued = true;
                self.kick(ctx, c, 0);
            }
        }
    }

    // Reception.

    fn read(&mut self, ctx: &mut Ctx, c: usize, p: usize) {
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

    /// Section 6.1 of the rules.
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
                ctx.oracle.excuse(id);
                ctx.stats.kernel_quirks += 1;
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
                ctx.note([21, header.sequence, 0], || format!("kernel doubles {header}, R-420"));
            }
            (sport, dport) => {
                self.seen.extend(id);
                self.deliver(ctx, c, sport, dport, payload);
            }
        }
    }

    fn identify(
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
        let congested =
            MapView::new(&conn.remote_map).is_some_and(|m| m.is_congested(sport)) && !probe;
        if !congested {
            let ext = if probe { self.handshake() } else { [0; 16] };
            self.enqueue(ctx, c, p, None, 0, sport, &[], ext);
        }
        if probe {
            self.on_handshake(ctx, c, header);
        }
    }

    /// R-404, R-405, R-341.
    fn on_handshake(&mut self, ctx: &mut Ctx, c: usize, header: &Header) {
        if !self.flavour.multipath {
            return;
        }
        let said = Handshake::parse(&header.ext);
        let conn = &mut self.conns[c];
        if let Some(n) = said.npaths {
            conn.npaths = usize::from(n).min(MAX_PATHS);
        }
        conn.npaths = conn.npaths.max(1);
        conn.probing = false;
        conn.sport_idx = said.sport_idx;
        if let Some(generation) = said.generation.filter(|g| *g != 0) {
            if conn.peer_generation != 0 && conn.peer_generation != generation {
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
    }

    fn deliver(&mut self, ctx: &mut Ctx, c: usize, sport: u16, dport: u16, payload: &[u8]) {
        let conn = &self.conns[c];
        let (local, remote) = (conn.local, conn.remote);
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

    fn wake_writers(&mut self, ctx: &mut Ctx) {
        let slots: Vec<usize> = self.socks.keys().copied().collect();
        for slot in slots {
            self.wake(ctx, slot, false, true);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // tests [R-411]
    #[test]
    fn hash_matches_the_vectors_of_the_rules() {
        for (port, hash) in [(1, 0x72a8_2a9b), (4000, 0xca59_0529), (65535, 0x1e1e_8ecb)] {
            assert_eq!(port_hash(port), hash, "port {port}");
        }
    }
}
