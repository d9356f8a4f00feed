//! TCP as its users see it: two byte streams per connection, bounded buffers at both ends,
//! acknowledgement by the other end's TCP whether or not its process has read, and every way to
//! end.
//!
//! ```text
//!   one direction         read      delivered    sent         written
//!   ----------------------|---------|------------|------------|-----> offset
//!     handed to process   | receive | on the way | send buffer|
//!                         | buffer  |            |            |
//!                     acked: what the sender knows of `delivered`
//! ```
//! Packets are lost when a host is down, a route is blocked or the dice say so, and come again
//! after a retransmission timeout, from the first unacknowledged byte. A packet for a connection
//! its receiver does not know gets a reset. Keepalive and user timeout end what stays silent.

use std::collections::VecDeque;
use std::net::{IpAddr, SocketAddr};

use bowline_wire::rds::TCP_PORT;

use crate::ctx::{Ctx, Event, HostId};
use crate::queue::{MS, SEC};
use crate::tap::Tap;

/// One end of a TCP connection; side 0 connected, side 1 accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct EndId {
    pub(crate) conn: u32,
    pub(crate) side: u8,
}

impl EndId {
    pub(crate) fn other(self) -> Self {
        Self { side: 1 - self.side, ..self }
    }

    fn index(self) -> (usize, usize) {
        (self.conn as usize, usize::from(self.side))
    }
}

impl std::fmt::Display for EndId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "tcp{}{}", self.conn, if self.side == 0 { 'c' } else { 'a' })
    }
}

/// Why a connection is of no more use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reason {
    Refused,
    Reset,
    TimedOut,
    AddrNotAvail,
}

/// What TCP tells a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Notice {
    /// A connect succeeded.
    Connected,
    /// A connect failed.
    ConnectFailed(Reason),
    /// The listener has a connection.
    Incoming,
    /// Data, end of stream or an error can be read.
    Readable,
    /// There is room again after a short write.
    Writable,
    /// The other TCP acknowledged something.
    Acked,
}

/// Result of a read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReadOutcome {
    Data(usize),
    WouldBlock,
    Eof,
    Failed(Reason),
}

/// How a process closes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TcpClose {
    /// Linger 0.
    Reset,
    /// Plain close: a reset if something was not read.
    Fin,
}

/// How something between the ends breaks a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cut {
    /// Both ends get a reset.
    Reset,
    /// One end gets a reset, the other does not learn it: half-open.
    ResetOne(u8),
    /// Packets vanish from now on.
    Blackhole,
    /// A relay ended both streams cleanly after the bytes it had passed on.
    Fin,
}

/// What happens in the network.
#[derive(Clone, Copy, Debug)]
pub(crate) enum NetEvent {
    Syn { conn: u32 },
    SynRetry { conn: u32 },
    SynAck { conn: u32 },
    Established { conn: u32 },
    Segment { conn: u32, side: u8, start: u64, end: u64, fin: bool },
    Ack { conn: u32, side: u8, acked: u64, limit: u64, fin: bool },
    Rst { conn: u32, to: u8 },
    RelayedRst { conn: u32, to: u8 },
    Rto { conn: u32, side: u8 },
    KeepCheck { conn: u32, side: u8 },
}

/// Shape of the network of one run.
#[derive(Clone, Debug)]
pub(crate) struct NetPlan {
    /// One-way delay, nanoseconds.
    pub(crate) delay: (u64, u64),
    /// Largest segment, bytes, drawn per segment up to this.
    pub(crate) segment_max: usize,
    /// Segments are cut at random places, not only at the maximum.
    pub(crate) segment_random: bool,
    /// Send buffer of a connection, bytes.
    pub(crate) send_buffer: (u64, u64),
    /// Receive buffer of a connection, bytes.
    pub(crate) recv_buffer: (u64, u64),
    /// Packets lost of a thousand.
    pub(crate) loss_permille: u64,
    /// A reset may arrive before data sent earlier.
    pub(crate) rst_overtakes: bool,
    /// A reset throws away what the receiver has not read.
    pub(crate) rst_discards: bool,
    /// Connections of a thousand that break after a random number of bytes.
    pub(crate) cut_permille: u64,
}

/// What the network knows of a host.
#[derive(Clone, Debug)]
pub(crate) struct HostNet {
    pub(crate) up: bool,
    pub(crate) boot: u32,
    pub(crate) addrs: Vec<IpAddr>,
    pub(crate) listening: bool,
    /// A kernel, with the losses the rules allow to kernels.
    pub(crate) kernel: bool,
    /// Releases messages by acknowledgement frames when the peer does too.
    pub(crate) end_to_end: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum EndState {
    SynSent,
    Open,
    /// The process is gone; TCP still sends what was written.
    Orphan,
    /// Broken; what arrived can still be read.
    Dead(Reason),
    Gone,
}

#[derive(Debug)]
struct End {
    host: HostId,
    addr: SocketAddr,
    state: EndState,
    established: u64,
    died: u64,
    keep_pending: bool,
    keep_missed: u8,
    blocked: bool,
    /// The listener has told its process.
    announced: bool,
}

#[derive(Debug)]
struct Dir {
    buf: VecDeque<u8>,
    read: u64,
    delivered: u64,
    sent: u64,
    written: u64,
    acked: u64,
    send_cap: u64,
    recv_cap: u64,
    limit: u64,
    advertised: u64,
    fin: bool,
    fin_sent: bool,
    fin_delivered: bool,
    fin_acked: bool,
    last_arrival: u64,
    rto_pending: bool,
    rto: u64,
    progress: u64,
    cut: Option<(u64, Cut)>,
    tap: Tap,
    /// Bytes the receiving TCP had acknowledged and no process will ever read.
    discard: Option<(u64, u64)>,
}

#[derive(Debug)]
struct Conn {
    ends: [End; 2],
    dirs: [Dir; 2],
    blackhole: bool,
    relay_closed: bool,
    end_to_end: bool,
    syn_tries: u32,
}

/// Every host and connection.
#[derive(Debug)]
pub(crate) struct Net {
    pub(crate) hosts: Vec<HostNet>,
    pub(crate) plan: NetPlan,
    /// Delays are so many times longer.
    pub(crate) delay_factor: u64,
    /// New connections still get cut, and packets lost.
    pub(crate) faulty: bool,
    /// Resets are the operator's will: what they lose is excused.
    pub(crate) dropping: bool,
    blocked: Vec<bool>,
    conns: Vec<Conn>,
    next_port: u16,
}

enum Reach {
    Peer,
    Stranger,
    Lost,
}

const RTO_MIN: u64 = 200 * MS;
const RTO_MAX: u64 = 4 * SEC;
/// TCP_USER_TIMEOUT of the driver, and near enough for a kernel peer.
const USER_TIMEOUT: u64 = 30 * SEC;
/// Keepalive idle time and interval [R-205].
const KEEP_IDLE: u64 = 5 * SEC;
const KEEP_COUNT: u8 = 5;
/// How long a connector towards a kernel distrusts a connection that never brought a byte [R-216].
const GRACE: u64 = 200 * MS;

impl Net {
    pub(crate) fn new(hosts: Vec<HostNet>, plan: NetPlan) -> Self {
        let n = hosts.len();
        Self {
            hosts,
            plan,
            delay_factor: 1,
            faulty: true,
            dropping: false,
            blocked: vec![false; n * n],
            conns: Vec::new(),
            next_port: 32_768,
        }
    }

    /// Blocks or opens the way from one host to another.
    pub(crate) fn block(&mut self, from: HostId, to: HostId, blocked: bool) {
        let n = self.hosts.len();
        self.blocked[from * n + to] = blocked;
    }

    /// The host that answers for an address.
    pub(crate) fn owner(&self, ip: IpAddr) -> Option<HostId> {
        self.hosts.iter().position(|h| h.addrs.contains(&ip))
    }

    /// The peer's address.
    pub(crate) fn remote(&self, end: EndId) -> SocketAddr {
        let (conn, side) = end.other().index();
        self.conns[conn].ends[side].addr
    }

    /// The own address.
    pub(crate) fn local(&self, end: EndId) -> SocketAddr {
        let (conn, side) = end.index();
        self.conns[conn].ends[side].addr
    }

    /// The host an end lives on.
    pub(crate) fn host(&self, end: EndId) -> HostId {
        let (conn, side) = end.index();
        self.conns[conn].ends[side].host
    }

    /// Connections with both ends in use, for faults to choose from.
    pub(crate) fn live(&self) -> Vec<u32> {
        let open = |e: &End| e.state == EndState::Open;
        let live = |c: &Conn| c.ends.iter().all(open) && !c.blackhole;
        (0..self.conns.len()).filter(|&i| live(&self.conns[i])).map(|i| i as u32).collect()
    }

    /// Bytes TCP has taken and not seen acknowledged, a FIN counted as one [SIOCOUTQ].
    pub(crate) fn unacked(&self, end: EndId) -> u64 {
        let (conn, side) = end.index();
        let dir = &self.conns[conn].dirs[side];
        dir.written - dir.acked + u64::from(dir.fin && !dir.fin_acked)
    }

    /// Bytes the other TCP has acknowledged.
    pub(crate) fn acked(&self, end: EndId) -> u64 {
        let (conn, side) = end.index();
        self.conns[conn].dirs[side].acked
    }

    /// Bytes ever written.
    pub(crate) fn written(&self, end: EndId) -> u64 {
        let (conn, side) = end.index();
        self.conns[conn].dirs[side].written
    }

    /// Tells whether there is something to read but an end or an error.
    pub(crate) fn unread(&self, end: EndId) -> bool {
        let (conn, side) = end.index();
        let dir = &self.conns[conn].dirs[1 - side];
        dir.delivered > dir.read && self.held(end)
    }

    /// Tells whether the process still has the socket.
    pub(crate) fn held(&self, end: EndId) -> bool {
        let (conn, side) = end.index();
        !matches!(self.conns[conn].ends[side].state, EndState::Gone | EndState::Orphan)
    }

    fn reach(&self, from: EndId) -> Reach {
        let (c, side) = from.index();
        let conn = &self.conns[c];
        let (source, target) = (&conn.ends[side], &conn.ends[1 - side]);
        if conn.blackhole || self.owner(source.addr.ip()) != Some(source.host) {
            return Reach::Lost;
        }
        let Some(owner) = self.owner(target.addr.ip()) else { return Reach::Lost };
        if self.blocked[source.host * self.hosts.len() + owner] || !self.hosts[owner].up {
            return Reach::Lost;
        }
        if owner != target.host || target.state == EndState::Gone {
            return Reach::Stranger;
        }
        Reach::Peer
    }
}

impl Ctx {
    fn conn(&mut self, conn: u32) -> &mut Conn {
        &mut self.net.conns[conn as usize]
    }

    fn tell(&mut self, end: EndId, notice: Notice) {
        self.notices.push_back((end, notice));
    }

    /// Sends a packet from an end; packets that are `ordered` do not overtake each other.
    fn packet(&mut self, from: EndId, event: NetEvent, ordered: bool) {
        let (lo, hi) = self.net.plan.delay;
        let delay = self.rng.between(lo, hi) * self.net.delay_factor;
        let mut at = self.now + delay;
        let (c, side) = from.index();
        if ordered {
            let dir = &mut self.net.conns[c].dirs[side];
            at = at.max(dir.last_arrival);
            dir.last_arrival = at;
        }
        self.schedule_at(at, Event::Net(event));
    }

    fn lost(&mut self) -> bool {
        let loss = self.net.plan.loss_permille;
        loss > 0 && self.net.faulty && self.rng.chance(loss)
    }

    fn arm_rto(&mut self, conn: u32, side: u8) {
        let dir = &mut self.conn(conn).dirs[usize::from(side)];
        if !dir.rto_pending {
            dir.rto_pending = true;
            let rto = dir.rto;
            dir.rto = (rto * 2).min(RTO_MAX);
            self.schedule(rto, Event::Net(NetEvent::Rto { conn, side }));
        }
    }

    fn arm_keep(&mut self, conn: u32, side: u8, delay: u64) {
        let end = &mut self.conn(conn).ends[usize::from(side)];
        if !end.keep_pending && end.state == EndState::Open {
            end.keep_pending = true;
            self.schedule(delay, Event::Net(NetEvent::KeepCheck { conn, side }));
        }
    }

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
        let port = match modulo {
            Some(m) => (self.net.next_port & !7) | u16::from(m & 7),
            None => self.net.next_port | self.rng.below(8) as u16,
        };
        self.net.next_port =
            if self.net.next_port > 60_000 { 32_768 } else { self.net.next_port + 8 };
        let end = |host, addr, state| End {
            host,
            addr,
            state,
            established: 0,
            died: 0,
            keep_pending: false,
            keep_missed: 0,
            blocked: false,
            announced: false,
        };
        let target = self.net.owner(remote.ip());
        let end_to_end =
            target.is_some_and(|t| self.net.hosts[t].end_to_end && self.net.hosts[host].end_to_end);
        let dirs = [self.new_dir(), self.new_dir()];
        let conn = self.net.conns.len() as u32;
        self.net.conns.push(Conn {
            ends: [
                end(host, SocketAddr::new(local, port), EndState::SynSent),
                // The owner is looked up again when the SYN arrives.
                end(target.unwrap_or(host), remote, EndState::Gone),
            ],
            dirs,
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

    fn new_dir(&mut self) -> Dir {
        let (lo, hi) = self.net.plan.send_buffer;
        let send_cap = self.rng.magnitude(lo, hi);
        let (lo, hi) = self.net.plan.recv_buffer;
        let recv_cap = self.rng.magnitude(lo, hi);
        let cut = if self.net.faulty && self.rng.chance(self.net.plan.cut_permille) {
            let at = self.rng.magnitude(1, 200_000);
            Some((at, self.draw_cut()))
        } else {
            None
        };
        Dir {
            buf: VecDeque::new(),
            read: 0,
            delivered: 0,
            sent: 0,
            written: 0,
            acked: 0,
            send_cap,
            recv_cap,
            limit: recv_cap,
            advertised: recv_cap,
            fin: false,
            fin_sent: false,
            fin_delivered: false,
            fin_acked: false,
            last_arrival: 0,
            rto_pending: false,
            rto: RTO_MIN,
            progress: 0,
            cut,
            tap: Tap::default(),
            discard: None,
        }
    }

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

    /// Writes what fits into the send buffer.
    pub(crate) fn tcp_write(&mut self, id: EndId, bytes: &[u8]) -> Result<usize, Reason> {
        let (c, side) = id.index();
        let conn = &mut self.net.conns[c];
        match conn.ends[side].state {
            EndState::Open => {}
            EndState::Dead(reason) => return Err(reason),
            EndState::SynSent | EndState::Orphan | EndState::Gone => return Err(Reason::Reset),
        }
        let dir = &mut conn.dirs[side];
        if dir.fin {
            return Err(Reason::Reset);
        }
        let room = dir.send_cap.saturating_sub(dir.written - dir.acked) as usize;
        let n = bytes.len().min(room);
        if n < bytes.len() {
            conn.ends[side].blocked = true;
        }
        if n > 0 {
            if dir.written == dir.acked {
                dir.progress = self.now;
            }
            dir.buf.extend(&bytes[..n]);
            dir.written += n as u64;
            let (local, remote) = (conn.ends[side].addr.ip(), conn.ends[1 - side].addr.ip());
            dir.tap.feed(&bytes[..n], (local, remote), id.conn, &mut self.oracle);
            self.pump(id);
        }
        Ok(n)
    }

    /// Notes what a process offered to TCP in vain: it may count the messages as begun.
    pub(crate) fn tcp_offered(&mut self, id: EndId, bytes: &[u8]) {
        let (c, side) = id.index();
        let conn = &mut self.net.conns[c];
        let ends = (conn.ends[side].addr.ip(), conn.ends[1 - side].addr.ip());
        conn.dirs[side].tap.attempt(bytes, ends, &mut self.oracle);
    }

    /// Sends what the window allows.
    fn pump(&mut self, id: EndId) {
        let (c, side) = id.index();
        loop {
            let plan = &self.net.plan;
            let dir = &self.net.conns[c].dirs[side];
            let mut end = dir.written.min(dir.limit).min(dir.sent + plan.segment_max as u64);
            if plan.segment_random && end > dir.sent + 1 {
                end = dir.sent + self.rng.magnitude(1, end - dir.sent);
            }
            if let Some((at, _)) = dir.cut
                && dir.sent < at
            {
                end = end.min(at);
            }
            let fin = dir.fin && !dir.fin_sent && end >= dir.written;
            if end <= dir.sent && !fin {
                return;
            }
            let dir = &mut self.net.conns[c].dirs[side];
            let start = dir.sent;
            dir.sent = end.max(start);
            dir.fin_sent |= fin;
            let segment =
                NetEvent::Segment { conn: id.conn, side: id.side, start, end: dir.sent, fin };
            self.packet(id, segment, true);
        }
    }

    /// Reads up to `max` bytes of what has arrived and appends them to `out`.
    pub(crate) fn tcp_read(&mut self, id: EndId, out: &mut Vec<u8>, max: usize) -> ReadOutcome {
        let (c, side) = id.index();
        let conn = &mut self.net.conns[c];
        let state = conn.ends[side].state;
        let dir = &mut conn.dirs[1 - side];
        let there = (dir.delivered - dir.read) as usize;
        if there > 0 {
            let n = there.min(max);
            let (front, back) = dir.buf.as_slices();
            let first = n.min(front.len());
            out.extend_from_slice(&front[..first]);
            out.extend_from_slice(&back[..n - first]);
            dir.buf.drain(..n);
            dir.read += n as u64;
            dir.tap.forget(dir.read);
            // A window update as soon as it is worth a packet.
            let nearly_shut = dir.advertised - dir.delivered < dir.recv_cap / 4;
            if state == EndState::Open && nearly_shut {
                self.send_ack(id.other());
            }
            return ReadOutcome::Data(n);
        }
        match state {
            EndState::Dead(reason) => ReadOutcome::Failed(reason),
            EndState::Orphan | EndState::Gone => ReadOutcome::Failed(Reason::Reset),
            EndState::SynSent => ReadOutcome::WouldBlock,
            EndState::Open if dir.fin_delivered => ReadOutcome::Eof,
            EndState::Open => ReadOutcome::WouldBlock,
        }
    }

    /// Acknowledges the direction that `sender` writes.
    fn send_ack(&mut self, sender: EndId) {
        let (c, side) = sender.index();
        let dir = &mut self.net.conns[c].dirs[side];
        dir.advertised = dir.advertised.max(dir.read + dir.recv_cap);
        let ack = NetEvent::Ack {
            conn: sender.conn,
            side: sender.side,
            acked: dir.delivered,
            limit: dir.advertised,
            fin: dir.fin_delivered,
        };
        self.packet(sender.other(), ack, false);
    }

    /// Closes the socket; the id means nothing to its process afterwards.
    pub(crate) fn tcp_close(&mut self, id: EndId, how: TcpClose) {
        let (c, side) = id.index();
        let conn = &mut self.net.conns[c];
        let state = conn.ends[side].state;
        let incoming = &conn.dirs[1 - side];
        let unread = (incoming.read, incoming.delivered);
        self.note([2, u64::from(id.conn), how as u64], || {
            format!("{id} closed {how:?} in {state:?}, {} bytes unread", unread.1 - unread.0)
        });
        match state {
            EndState::Gone | EndState::Orphan => {}
            EndState::SynSent | EndState::Dead(_) => {
                self.discard(id.other(), unread);
                self.vanish(id);
            }
            EndState::Open if how == TcpClose::Reset || unread.1 > unread.0 => {
                self.discard(id.other(), unread);
                self.vanish(id);
                self.send_rst(id.other());
            }
            EndState::Open => {
                let conn = self.conn(id.conn);
                conn.ends[side].state = EndState::Orphan;
                conn.ends[side].died = 0;
                conn.dirs[side].fin = true;
                self.pump(id);
                self.finish_orphan(id);
            }
        }
    }

    /// Ends the own stream and keeps reading.
    pub(crate) fn tcp_shutdown(&mut self, id: EndId) {
        let (c, side) = id.index();
        let conn = &mut self.net.conns[c];
        if conn.ends[side].state == EndState::Open {
            conn.dirs[side].fin = true;
            self.note([3, u64::from(id.conn), 0], || format!("{id} shut down for writing"));
            self.pump(id);
        }
    }

    /// An end no longer exists; nobody is told.
    fn vanish(&mut self, id: EndId) {
        let now = self.now;
        let (c, side) = id.index();
        let end = &mut self.net.conns[c].ends[side];
        if !matches!(end.state, EndState::Dead(_)) {
            end.died = now;
        }
        end.state = EndState::Gone;
        self.settle(id);
        let conn = &mut self.net.conns[c];
        if conn.ends.iter().all(|e| e.state == EndState::Gone) {
            for dir in &mut conn.dirs {
                dir.buf = VecDeque::new();
                dir.tap = Tap::default();
            }
        }
    }

    /// A packet that `sender` sent reached a host that does not know the connection.
    fn refuse_stray(&mut self, sender: EndId) {
        let rst = NetEvent::RelayedRst { conn: sender.conn, to: sender.side };
        self.packet(sender.other(), rst, true);
    }

    /// Sends a reset towards `target`.
    fn send_rst(&mut self, target: EndId) {
        let ordered = !(self.net.plan.rst_overtakes && self.rng.chance(500));
        self.packet(target.other(), NetEvent::Rst { conn: target.conn, to: target.side }, ordered);
    }

    /// Notes that the bytes `range` that `sender` wrote were acknowledged and never read. That is
    /// a kernel's right; a bowline node has it only when told to drop its connections.
    fn discard(&mut self, sender: EndId, range: (u64, u64)) {
        let (c, side) = sender.index();
        let receiver = self.net.host(sender.other());
        let may = self.net.hosts[receiver].kernel || self.net.dropping;
        let conn = &mut self.net.conns[c];
        if conn.end_to_end || range.0 == range.1 || !may {
            return;
        }
        let dir = &mut conn.dirs[side];
        let old = dir.discard.unwrap_or(range);
        dir.discard = Some((old.0.min(range.0), old.1.max(range.1)));
        self.settle(sender);
    }

    /// Decides, once the sender's end is over, which losses the rules allow: messages whose bytes
    /// a TCP acknowledged and no process read [R-241], unless the sender had to distrust the
    /// connection [R-216].
    fn settle(&mut self, sender: EndId) {
        let (c, side) = sender.index();
        let kernel_sender = {
            let host = self.net.conns[c].ends[side].host;
            self.net.hosts[host].kernel
        };
        let conn = &mut self.net.conns[c];
        let end = &conn.ends[side];
        let over = matches!(end.state, EndState::Dead(_) | EndState::Gone);
        let heard = conn.dirs[1 - side].delivered > 0;
        let old = end.died.saturating_sub(end.established) + 5 * MS >= GRACE;
        let trusted = heard || old || sender.side == 1 || kernel_sender;
        let dir = &mut conn.dirs[side];
        let Some((from, to)) = dir.discard else { return };
        if !over || !trusted {
            return;
        }
        let to = to.min(dir.acked);
        for message in dir.tap.messages_ending_in(from, to) {
            self.oracle.excuse(message);
        }
    }

    fn finish_orphan(&mut self, id: EndId) {
        let (c, side) = id.index();
        let conn = &self.net.conns[c];
        let done = conn.dirs[side].fin_acked
            || matches!(conn.ends[1 - side].state, EndState::Gone | EndState::Dead(_));
        if conn.ends[side].state == EndState::Orphan && done {
            self.vanish(id);
        }
    }

    /// Makes TCP find out soon whether the other end is alive.
    pub(crate) fn tcp_probe(&mut self, id: EndId) {
        self.arm_keep(id.conn, id.side, SEC);
    }

    /// Breaks a connection between its ends.
    pub(crate) fn tcp_cut(&mut self, conn: u32, cut: Cut) {
        self.stats.cuts += 1;
        self.note([4, u64::from(conn), 0], || format!("tcp{conn} cut: {cut:?}"));
        match cut {
            Cut::Reset => {
                for to in [0, 1] {
                    let delay = self.rng.between(0, self.net.plan.delay.1);
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
                for dir in &mut c.dirs {
                    dir.fin_delivered = true;
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
                // Also where this end is gone and the other does not know it yet.
                self.receiver_died(id);
                if state == EndState::Gone || (state == EndState::Orphan && !silent) {
                    continue;
                }
                if silent {
                    self.vanish(id);
                    self.arm_keep(conn, 1 - side, KEEP_IDLE);
                } else {
                    self.tcp_close(id, TcpClose::Fin);
                }
            }
        }
    }

    /// What the peer wrote to this end and will yet write can no longer be asked back.
    fn receiver_died(&mut self, id: EndId) {
        let (c, side) = id.index();
        let tap = &mut self.net.conns[c].dirs[1 - side].tap;
        for message in tap.receiver_died() {
            self.oracle.excuse(message);
        }
    }

    /// An address no longer belongs to a host: its connections hang.
    pub(crate) fn tcp_address_lost(&mut self, host: HostId, ip: IpAddr) {
        self.net.hosts[host].addrs.retain(|a| *a != ip);
        for conn in 0..self.net.conns.len() as u32 {
            let c = &self.net.conns[conn as usize];
            let hit = |s: usize| c.ends[s].host == host && c.ends[s].addr.ip() == ip;
            if let Some(side) = (0..2).find(|s| hit(*s)) {
                // Others may meet another node at this address before they meet this one again.
                self.receiver_died(EndId { conn, side: side as u8 });
                self.arm_keep(conn, 0, KEEP_IDLE);
                self.arm_keep(conn, 1, KEEP_IDLE);
            }
        }
    }

    /// Makes keepalive look at every connection between two hosts, as a route changed.
    pub(crate) fn tcp_route_changed(&mut self, a: HostId, b: HostId) {
        for conn in 0..self.net.conns.len() as u32 {
            let hosts = self.net.conns[conn as usize].ends.each_ref().map(|e| e.host);
            if hosts == [a, b] || hosts == [b, a] {
                self.arm_keep(conn, 0, KEEP_IDLE);
                self.arm_keep(conn, 1, KEEP_IDLE);
            }
        }
    }

    /// An end breaks; what has arrived can still be read.
    fn die(&mut self, id: EndId, reason: Reason) {
        let now = self.now;
        let (c, side) = id.index();
        let end = &mut self.net.conns[c].ends[side];
        match end.state {
            EndState::SynSent => {
                let why = if reason == Reason::Reset { Reason::Refused } else { reason };
                self.vanish(id);
                self.tell(id, Notice::ConnectFailed(why));
            }
            EndState::Open => {
                end.state = EndState::Dead(reason);
                end.died = now;
                self.note([5, u64::from(id.conn), u64::from(id.side)], || {
                    format!("{id} broken: {reason:?}")
                });
                if self.net.plan.rst_discards && reason == Reason::Reset {
                    let dir = &mut self.net.conns[c].dirs[1 - side];
                    let unread = (dir.read, dir.delivered);
                    dir.buf.drain(..(unread.1 - unread.0) as usize);
                    dir.read = dir.delivered;
                    // Not the process's doing, whoever it is.
                    let dropping = std::mem::replace(&mut self.net.dropping, true);
                    self.discard(id.other(), unread);
                    self.net.dropping = dropping;
                }
                self.settle(id);
                self.finish_orphan(id.other());
                self.tell(id, Notice::Readable);
            }
            EndState::Orphan => self.vanish(id),
            EndState::Dead(_) | EndState::Gone => {}
        }
    }

    /// Does what a packet or a timer of TCP brings.
    pub(crate) fn net_event(&mut self, event: NetEvent) {
        match event {
            NetEvent::Syn { conn } => self.on_syn(conn),
            NetEvent::SynRetry { conn } => self.on_syn_retry(conn),
            NetEvent::SynAck { conn } => self.on_syn_ack(conn),
            NetEvent::Established { conn } => self.on_established(conn),
            NetEvent::Segment { conn, side, start, end, fin } => {
                self.on_segment(EndId { conn, side }, start, end, fin);
            }
            NetEvent::Ack { conn, side, acked, limit, fin } => {
                self.on_ack(EndId { conn, side }, acked, limit, fin);
            }
            NetEvent::Rst { conn, to } => {
                let target = EndId { conn, side: to };
                match self.net.reach(target.other()) {
                    Reach::Peer => self.die(target, Reason::Reset),
                    Reach::Stranger => {}
                    Reach::Lost => self.arm_keep(conn, to, KEEP_IDLE),
                }
            }
            NetEvent::RelayedRst { conn, to } => {
                self.die(EndId { conn, side: to }, Reason::Reset);
                self.arm_keep(conn, 1 - to, KEEP_IDLE);
            }
            NetEvent::Rto { conn, side } => self.on_rto(EndId { conn, side }),
            NetEvent::KeepCheck { conn, side } => self.on_keep_check(EndId { conn, side }),
        }
    }

    fn on_syn(&mut self, conn: u32) {
        let from = EndId { conn, side: 0 };
        let lost = self.lost();
        let c = &self.net.conns[conn as usize];
        let target = self.net.owner(c.ends[1].addr.ip());
        let blocked = target.is_none_or(|t| {
            let n = self.net.hosts.len();
            !self.net.hosts[t].up || self.net.blocked[c.ends[0].host * n + t]
        });
        let unroutable = self.net.owner(c.ends[0].addr.ip()) != Some(c.ends[0].host);
        let (Some(target), false) = (target, lost || blocked || unroutable) else {
            self.schedule(SEC, Event::Net(NetEvent::SynRetry { conn }));
            return;
        };
        if c.ends[0].state == EndState::Gone && c.ends[1].state == EndState::Gone {
            return;
        }
        if c.ends[1].state == EndState::Gone {
            if !self.net.hosts[target].listening || c.ends[1].addr.port() != TCP_PORT {
                self.packet(from.other(), NetEvent::RelayedRst { conn, to: 0 }, true);
                return;
            }
            let end_to_end =
                self.net.hosts[target].end_to_end && self.net.hosts[c.ends[0].host].end_to_end;
            let now = self.now;
            let c = self.conn(conn);
            c.end_to_end = end_to_end;
            c.ends[1].host = target;
            c.ends[1].state = EndState::Open;
            c.ends[1].established = now;
        }
        self.packet(from.other(), NetEvent::SynAck { conn }, true);
    }

    fn on_syn_retry(&mut self, conn: u32) {
        let c = self.conn(conn);
        if c.ends[0].state != EndState::SynSent {
            return;
        }
        c.syn_tries += 1;
        if matches!(c.ends[1].state, EndState::Dead(_)) {
            self.die(EndId { conn, side: 0 }, Reason::Reset);
        } else if c.syn_tries > 60 {
            self.die(EndId { conn, side: 0 }, Reason::TimedOut);
        } else {
            self.packet(EndId { conn, side: 0 }, NetEvent::Syn { conn }, true);
        }
    }

    fn on_syn_ack(&mut self, conn: u32) {
        let (from, to) = (EndId { conn, side: 1 }, EndId { conn, side: 0 });
        let lost = self.lost();
        match self.net.reach(from) {
            Reach::Peer if !lost => {}
            Reach::Stranger if !lost => {
                self.refuse_stray(from);
                self.schedule(SEC, Event::Net(NetEvent::SynRetry { conn }));
                return;
            }
            _ => {
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

    fn on_established(&mut self, conn: u32) {
        let (from, to) = (EndId { conn, side: 0 }, EndId { conn, side: 1 });
        let lost = self.lost();
        match self.net.reach(from) {
            Reach::Peer if !lost => self.announce(to),
            Reach::Stranger if !lost => self.refuse_stray(from),
            _ => {
                let dead = self.net.conns[conn as usize].ends[0].state == EndState::Gone;
                if dead {
                    self.vanish(to);
                } else {
                    self.schedule(SEC, Event::Net(NetEvent::Established { conn }));
                }
            }
        }
    }

    /// The handshake of an accepted connection is complete.
    fn announce(&mut self, id: EndId) {
        let (c, side) = id.index();
        let end = &mut self.net.conns[c].ends[side];
        if !std::mem::replace(&mut end.announced, true) {
            self.tell(id, Notice::Incoming);
        }
    }

    fn on_segment(&mut self, from: EndId, start: u64, end: u64, fin: bool) {
        let lost = self.lost();
        match self.net.reach(from) {
            Reach::Peer if !lost => {}
            Reach::Stranger if !lost => {
                self.refuse_stray(from);
                return;
            }
            _ => {
                self.arm_rto(from.conn, from.side);
                return;
            }
        }
        let (c, side) = from.index();
        let receiver = from.other();
        if receiver.side == 1 {
            self.announce(receiver); // a segment acknowledges as the lost packet would have
        }
        let conn = &mut self.net.conns[c];
        let dir = &mut conn.dirs[side];
        match conn.ends[1 - side].state {
            EndState::Open if !conn.relay_closed => {}
            EndState::Orphan if end <= dir.delivered && !conn.relay_closed => {}
            EndState::SynSent => return,
            state => {
                if state == EndState::Orphan {
                    self.vanish(receiver);
                }
                self.send_rst(from);
                return;
            }
        }
        let fresh = start <= dir.delivered && end > dir.delivered;
        if fresh {
            dir.delivered = end;
        }
        if start > dir.delivered {
            self.arm_rto(from.conn, from.side);
        }
        let dir = &mut self.net.conns[c].dirs[side];
        let ended = fin && start <= dir.delivered && !dir.fin_delivered;
        dir.fin_delivered |= ended;
        let cut = dir.cut.filter(|(at, _)| dir.delivered >= *at);
        if cut.is_some() {
            dir.cut = None;
        }
        self.send_ack(from);
        if fresh || ended {
            self.tell(receiver, Notice::Readable);
        }
        if let Some((_, cut)) = cut
            && self.net.faulty
        {
            self.tcp_cut(from.conn, cut);
        }
    }

    fn on_ack(&mut self, sender: EndId, acked: u64, limit: u64, fin: bool) {
        let lost = self.lost();
        match self.net.reach(sender.other()) {
            Reach::Peer if !lost => {}
            Reach::Stranger if !lost => {
                self.refuse_stray(sender.other());
                return;
            }
            _ => {
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
        let dir = &mut conn.dirs[side];
        let progress = acked > dir.acked;
        if progress || limit > dir.limit || fin {
            dir.progress = now;
            dir.rto = RTO_MIN;
        }
        dir.acked = dir.acked.max(acked);
        dir.sent = dir.sent.max(dir.acked);
        dir.limit = dir.limit.max(limit);
        dir.fin_acked |= fin && dir.fin;
        let free = dir.send_cap.saturating_sub(dir.written - dir.acked);
        let writable = conn.ends[side].blocked && free * 3 >= dir.send_cap;
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

    fn on_rto(&mut self, id: EndId) {
        let now = self.now;
        let (c, side) = id.index();
        let conn = &mut self.net.conns[c];
        let state = conn.ends[side].state;
        let dir = &mut conn.dirs[side];
        dir.rto_pending = false;
        if !matches!(state, EndState::Open | EndState::Orphan) {
            return;
        }
        let waiting = dir.acked < dir.written || (dir.fin && !dir.fin_acked);
        if !waiting {
            dir.rto = RTO_MIN;
            return;
        }
        if now.saturating_sub(dir.progress) > USER_TIMEOUT {
            self.die(id, Reason::TimedOut);
            return;
        }
        dir.sent = dir.acked;
        dir.fin_sent = false;
        if dir.limit <= dir.sent && dir.written > dir.sent {
            // The window is shut: ask whether it still is.
            let at = dir.sent;
            let probe =
                NetEvent::Segment { conn: id.conn, side: id.side, start: at, end: at, fin: false };
            self.packet(id, probe, true);
            self.arm_rto(id.conn, id.side);
        } else {
            self.pump(id);
        }
    }

    fn on_keep_check(&mut self, id: EndId) {
        let (c, side) = id.index();
        let end = &mut self.net.conns[c].ends[side];
        end.keep_pending = false;
        if end.state != EndState::Open {
            return;
        }
        let missed = end.keep_missed + 1;
        let answer = match self.net.reach(id) {
            Reach::Peer => match self.net.reach(id.other()) {
                Reach::Peer => {
                    let peer = self.net.conns[c].ends[1 - side].state;
                    if matches!(peer, EndState::Dead(_)) { Reach::Stranger } else { Reach::Peer }
                }
                _ => Reach::Lost,
            },
            other => other,
        };
        let end = &mut self.net.conns[c].ends[side];
        match answer {
            Reach::Peer => end.keep_missed = 0,
            Reach::Stranger => self.die(id, Reason::Reset),
            Reach::Lost if missed > KEEP_COUNT => self.die(id, Reason::TimedOut),
            Reach::Lost => {
                end.keep_missed = missed;
                self.arm_keep(id.conn, id.side, KEEP_IDLE);
            }
        }
    }
}
