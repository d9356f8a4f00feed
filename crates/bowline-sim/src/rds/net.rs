//! TCP as its users see it: two byte streams per connection, bounded buffers at both ends,
//! acknowledgement by the other end's TCP whether or not its process has read, and all the ways in
//! which a connection ends.
//!
//! Packets are lost when a host is down, a route is blocked or the random generator decides it.
//! They are sent again after a retransmission timeout, from the first unacknowledged byte. A packet
//! for a connection that its receiver does not know gets a reset. Keepalive and user timeout end
//! connections that stay silent.
//!
//! This file holds the types, the hosts and the routes, and the transport of packets. Each part of
//! a connection's existence has a file that handles its packets.

use std::net::{IpAddr, SocketAddr};

use serde::{Deserialize, Serialize};

use self::stream::Stream;
use super::ctx::{Ctx, Event, HostId};

mod close;
mod connect;
mod faults;
mod keepalive;
mod losses;
mod stream;
mod tap;
#[cfg(test)]
pub(crate) mod tests;
mod transfer;

pub(crate) use self::faults::Cut;

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

/// Reason why a connection cannot be used any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reason {
    Refused,
    Reset,
    TimedOut,
    AddrNotAvail,
}

/// A report of TCP to a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Notice {
    /// A connect succeeded.
    Connected,
    /// A connect failed.
    ConnectFailed(Reason),
    /// The listener has a connection that is ready to be accepted.
    Incoming,
    /// Data, end of stream or an error can be read.
    Readable,
    /// There is room again after an incomplete write.
    Writable,
    /// The other TCP acknowledged some bytes.
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

/// How a process closes a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TcpClose {
    /// Linger 0.
    Reset,
    /// Plain close: sends a reset if some bytes were not read.
    Fin,
}

/// An event of the network.
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

/// Properties of the network of a run.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct NetPlan {
    /// One-way delay in nanoseconds.
    pub(crate) delay: (u64, u64),
    /// Largest segment in bytes; each segment draws a limit up to this.
    pub(crate) segment_max: usize,
    /// Segments are cut at random places, not only at the maximum.
    pub(crate) segment_random: bool,
    /// Send buffer of a connection in bytes.
    pub(crate) send_buffer: (u64, u64),
    /// Receive buffer of a connection in bytes.
    pub(crate) recv_buffer: (u64, u64),
    /// Packets in a thousand that are lost.
    pub(crate) loss_permille: u64,
    /// A reset may arrive before data sent earlier.
    pub(crate) rst_overtakes: bool,
    /// Connections in a thousand that break after a random number of bytes.
    pub(crate) cut_permille: u64,
    /// Connections in a thousand whose port is not the one that the driver asked for: no such port
    /// was free, or a router changed it.
    #[serde(default)]
    pub(crate) port_permille: u64,
}

/// State of a host in the network.
#[derive(Clone, Debug)]
pub(crate) struct HostNet {
    pub(crate) up: bool,
    pub(crate) boot: u32,
    pub(crate) addrs: Vec<IpAddr>,
    pub(crate) listening: bool,
    /// The process is about to end, and has closed its listener.
    pub(crate) closing: bool,
    /// The host is a kernel, which may lose messages as the rules allow.
    pub(crate) kernel: bool,
    /// The host's node releases messages by acknowledgement frames if the peer does so too.
    pub(crate) end_to_end: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum EndState {
    SynSent,
    Open,
    /// The process is gone; TCP still sends the bytes that were written.
    Orphan,
    /// The connection is broken; bytes that arrived can still be read.
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
    /// The listener has reported the connection to its process.
    announced: bool,
    /// The process has accepted the connection.
    accepted: bool,
}

impl End {
    fn new(host: HostId, addr: SocketAddr, state: EndState) -> Self {
        Self {
            host,
            addr,
            state,
            established: 0,
            died: 0,
            keep_pending: false,
            keep_missed: 0,
            blocked: false,
            announced: false,
            accepted: false,
        }
    }
}

#[derive(Debug)]
struct Conn {
    ends: [End; 2],
    /// The streams that the two ends write.
    streams: [Stream; 2],
    blackhole: bool,
    relay_closed: bool,
    end_to_end: bool,
    syn_tries: u32,
}

/// All hosts and connections.
#[derive(Debug)]
pub(crate) struct Net {
    pub(crate) hosts: Vec<HostNet>,
    pub(crate) plan: NetPlan,
    /// Factor by which delays are longer.
    pub(crate) delay_factor: u64,
    /// New connections may be cut, and packets lost.
    pub(crate) faulty: bool,
    blocked: Vec<bool>,
    conns: Vec<Conn>,
    next_port: u16,
}

/// Destination of a packet.
enum Reach {
    /// The other end of the connection.
    Peer,
    /// A host that does not know the connection.
    UnknownHost,
    Lost,
}

impl Net {
    pub(crate) fn new(hosts: Vec<HostNet>, plan: NetPlan) -> Self {
        let n = hosts.len();
        Self {
            hosts,
            plan,
            delay_factor: 1,
            faulty: true,
            blocked: vec![false; n * n],
            conns: Vec::new(),
            next_port: 32_768,
        }
    }

    /// Blocks or opens the route from one host to another.
    pub(crate) fn block(&mut self, from: HostId, to: HostId, blocked: bool) {
        let n = self.hosts.len();
        self.blocked[from * n + to] = blocked;
    }

    /// Returns the host that has an address.
    pub(crate) fn owner(&self, ip: IpAddr) -> Option<HostId> {
        self.hosts.iter().position(|h| h.addrs.contains(&ip))
    }

    /// Returns the peer's address.
    pub(crate) fn remote(&self, end: EndId) -> SocketAddr {
        let (conn, side) = end.other().index();
        self.conns[conn].ends[side].addr
    }

    /// Returns the local address.
    pub(crate) fn local(&self, end: EndId) -> SocketAddr {
        let (conn, side) = end.index();
        self.conns[conn].ends[side].addr
    }

    /// Returns the host of an end.
    pub(crate) fn host(&self, end: EndId) -> HostId {
        let (conn, side) = end.index();
        self.conns[conn].ends[side].host
    }

    /// Returns the connections with both ends in use, from which faults choose.
    pub(crate) fn live(&self) -> Vec<u32> {
        let open = |e: &End| e.state == EndState::Open;
        let live = |c: &Conn| c.ends.iter().all(open) && !c.blackhole;
        (0..self.conns.len()).filter(|&i| live(&self.conns[i])).map(|i| i as u32).collect()
    }

    /// Returns the connections whose handshake is under way.
    pub(crate) fn connecting(&self) -> Vec<u32> {
        let connecting = |c: &Conn| c.ends[0].state == EndState::SynSent && !c.blackhole;
        (0..self.conns.len()).filter(|&i| connecting(&self.conns[i])).map(|i| i as u32).collect()
    }

    /// Returns the bytes that TCP has taken and not seen acknowledged; a FIN counts as one
    /// [SIOCOUTQ].
    pub(crate) fn unacked(&self, end: EndId) -> u64 {
        let (conn, side) = end.index();
        self.conns[conn].streams[side].unacked()
    }

    /// Returns the number of bytes that the other TCP has acknowledged.
    pub(crate) fn acked(&self, end: EndId) -> u64 {
        let (conn, side) = end.index();
        self.conns[conn].streams[side].acked
    }

    /// Returns the number of all bytes written.
    pub(crate) fn written(&self, end: EndId) -> u64 {
        let (conn, side) = end.index();
        self.conns[conn].streams[side].written
    }

    /// Tells whether bytes can be read, not only an end or an error.
    pub(crate) fn unread(&self, end: EndId) -> bool {
        let (conn, side) = end.index();
        self.conns[conn].streams[1 - side].has_unread() && self.has_socket(end)
    }

    /// Accepts a connection from the listener; returns false when the connection is gone.
    pub(crate) fn accept(&mut self, end: EndId) -> bool {
        let (conn, side) = end.index();
        self.conns[conn].ends[side].accepted = true;
        self.has_socket(end)
    }

    /// Tells whether the process still has the socket.
    pub(crate) fn has_socket(&self, end: EndId) -> bool {
        let (conn, side) = end.index();
        !matches!(self.conns[conn].ends[side].state, EndState::Gone | EndState::Orphan)
    }

    /// Tells whether packets of one host do not reach another.
    pub(crate) fn is_blocked(&self, from: HostId, to: HostId) -> bool {
        self.blocked[from * self.hosts.len() + to] || !self.hosts[to].up
    }

    /// Returns the destination of a packet of an end, if the packet is not lost at random.
    fn reach(&self, from: EndId) -> Reach {
        let (c, side) = from.index();
        let conn = &self.conns[c];
        let (source, target) = (&conn.ends[side], &conn.ends[1 - side]);
        if conn.blackhole || self.owner(source.addr.ip()) != Some(source.host) {
            return Reach::Lost;
        }
        let Some(owner) = self.owner(target.addr.ip()) else { return Reach::Lost };
        if self.is_blocked(source.host, owner) {
            return Reach::Lost;
        }
        if owner != target.host || target.state == EndState::Gone {
            return Reach::UnknownHost;
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
            let stream = &mut self.net.conns[c].streams[side];
            at = at.max(stream.last_arrival);
            stream.last_arrival = at;
        }
        self.schedule_at(at, Event::Net(event));
    }

    /// Draws whether a packet is lost on its way.
    pub(crate) fn lost(&mut self) -> bool {
        let loss = self.net.plan.loss_permille;
        loss > 0 && self.net.faulty && self.rng.chance(loss)
    }

    /// Returns the destination of a packet of an end.
    fn arrival(&mut self, from: EndId) -> Reach {
        if self.lost() { Reach::Lost } else { self.net.reach(from) }
    }

    /// Handles a packet or a timer of TCP.
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
            NetEvent::Rst { conn, to } => self.on_rst(EndId { conn, side: to }),
            NetEvent::RelayedRst { conn, to } => self.on_relayed_rst(EndId { conn, side: to }),
            NetEvent::Rto { conn, side } => self.on_rto(EndId { conn, side }),
            NetEvent::KeepCheck { conn, side } => self.on_keep_check(EndId { conn, side }),
        }
    }
}
