//! The info interface. Spec: `docs/spec/rds.md`, section 10.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use bowline_wire::rds::HEADER_LEN;

use super::Node;
use crate::api::PathEnd;
use crate::conn::{Conn, Peer};
use crate::error::Error;
use crate::ids::{ConnId, LinkId, SocketId};
use crate::link::Link;
use crate::path::{Path, PathState, mark};
use crate::rdma::RdmaState;
use crate::socket::{mapped, to_socket_addr};

/// Connection flags of the info interface.
mod flag {
    pub(super) const SENDING: u8 = 0x01;
    pub(super) const CONNECTING: u8 = 0x02;
    pub(super) const CONNECTED: u8 = 0x04;
}

/// Numbers of a kernel's connections over RDMA, of which this node has no counterpart [OBS-3].
mod kernel {
    pub(super) const MAX_SEND_SGE: u32 = 8;
    pub(super) const RDMA_MR_MAX: u32 = 4096;
    pub(super) const RDMA_MR_SIZE: u32 = 257;
}

/// A socket.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct SocketInfo {
    /// Address it is bound to.
    pub bound: Option<SocketAddr>,
    /// Default destination.
    pub connected: Option<SocketAddr>,
    /// Effective send buffer, bytes.
    pub send_buffer: usize,
    /// Effective receive buffer, bytes.
    pub recv_buffer: usize,
    /// Payload bytes queued or unacknowledged.
    pub send_bytes: usize,
    /// Payload bytes waiting to be received.
    pub recv_bytes: usize,
    /// Messages waiting to be received.
    pub recv_messages: usize,
    /// Whether the port is marked congested.
    pub congested: bool,
    /// Inode of the socket's file. A socket without a file has a number that no file has.
    pub inode: u64,
    /// Process that opened it, if another than that of the node.
    pub owner: Option<u32>,
}

/// A connection: a pair of addresses.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ConnInfo {
    /// Local address.
    pub local: IpAddr,
    /// Remote address.
    pub remote: IpAddr,
    /// Name of the transport: `tcp` or `infiniband`.
    pub transport: &'static str,
    /// Type of service; 0 over TCP, where all messages share a connection.
    pub tos: u8,
    /// Sequence number of the next message to send on path 0.
    pub next_tx_seq: u64,
    /// Sequence number expected next on path 0.
    pub next_rx_seq: u64,
    /// Flags of path 0: 1 sending, 2 connecting, 4 connected.
    pub flags: u8,
    /// Agreed number of paths; 0: not known yet.
    pub npaths: u8,
    /// Kind of the peer: `bowline`, `kernel` or `unknown`.
    pub peer: &'static str,
    /// The peer has marked at least one port congested.
    pub congested: bool,
    /// Messages queued for the peer on all paths, pings and pongs included.
    pub sent_messages: u64,
    /// Messages received on all paths, repeated ones not counted.
    pub received_messages: u64,
    /// Bytes that the transport took: messages with their headers, but no RDMA operations.
    pub sent_bytes: u64,
    /// Bytes that the transport brought, counted in the same way.
    pub received_bytes: u64,
}

/// A path.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct PathInfo {
    /// Local address.
    pub local: IpAddr,
    /// Remote address.
    pub remote: IpAddr,
    /// Name of the transport, as in [`ConnInfo`].
    pub transport: &'static str,
    /// Type of service, as in [`ConnInfo`].
    pub tos: u8,
    /// Index, 0 to 7.
    pub index: u8,
    /// State.
    pub state: PathState,
    /// Sequence number of the next message to send.
    pub next_tx_seq: u64,
    /// Sequence number expected next.
    pub next_rx_seq: u64,
    /// Flags: 1 sending, 2 connecting, 4 connected.
    pub flags: u8,
    /// Messages not started.
    pub send_messages: usize,
    /// Messages started and not acknowledged.
    pub retrans_messages: usize,
    /// Payload bytes of messages not started and of messages not acknowledged.
    pub queued_bytes: u64,
    /// How often the path lost its TCP or RDMA connection.
    pub resets: u64,
    /// When and why the path last lost that connection, or did not get one.
    pub last_end: Option<PathEnd>,
}

/// A message of a queue.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct MessageInfo {
    /// Sender of a queued message, receiver of a received one.
    pub local: SocketAddr,
    /// Receiver of a queued message, sender of a received one.
    pub remote: SocketAddr,
    /// Sequence number.
    pub seq: u64,
    /// Payload bytes.
    pub len: u32,
}

/// A TCP connection.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct LinkInfo {
    /// Id of the connection in the node.
    pub link: LinkId,
    /// Local address and TCP port.
    pub local: SocketAddr,
    /// Remote address and TCP port.
    pub remote: SocketAddr,
    /// Index of the path that the connection serves.
    pub path: Option<u8>,
    /// Header bytes still missing of the message being received; 48 between messages.
    pub header_remaining: u64,
    /// Payload bytes still missing of the message being received.
    pub data_remaining: u64,
    /// Stream position at which the last message started.
    pub last_sent_nxt: u32,
    /// Stream position after its last byte.
    pub last_expected_una: u32,
    /// Stream position that TCP had acknowledged when it was last asked.
    pub last_seen_una: u32,
    /// Bytes received.
    pub received_bytes: u64,
    /// Messages received.
    pub received_messages: u64,
}

/// A connection over RDMA [OBS-3]. While it is not up, all but the addresses, `tos` and `sl` is
/// zero [OBS-4].
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RdmaInfo {
    /// Local address.
    pub local: IpAddr,
    /// Remote address.
    pub remote: IpAddr,
    /// GID of the local device's port.
    pub local_gid: Ipv6Addr,
    /// GID of the remote device's port.
    pub remote_gid: Ipv6Addr,
    /// Requests of the send queue.
    pub max_send_wr: u32,
    /// Requests of the receive queue.
    pub max_recv_wr: u32,
    /// Pieces of memory of one send, as a kernel tells it.
    pub max_send_sge: u32,
    /// Memory registrations of 1 MiB that a kernel would keep.
    pub rdma_mr_max: u32,
    /// Pages of one of these.
    pub rdma_mr_size: u32,
    /// Type of service.
    pub tos: u8,
    /// Service level, which is the low half of `tos` [IB-27].
    pub sl: u8,
    /// Memory of a kernel's cache of fragments, KiB; a node has none.
    pub cache_allocs: u32,
}

/// A snapshot of the node's state.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Info {
    /// Sockets.
    pub sockets: Vec<SocketInfo>,
    /// Address pairs.
    pub connections: Vec<ConnInfo>,
    /// Paths of the connections.
    pub paths: Vec<PathInfo>,
    /// Messages not started yet.
    pub send: Vec<MessageInfo>,
    /// Messages started and not acknowledged.
    pub retrans: Vec<MessageInfo>,
    /// Messages waiting for their readers.
    pub recv: Vec<MessageInfo>,
    /// TCP connections.
    pub links: Vec<LinkInfo>,
    /// Connections over RDMA; `None` if no address of the node is on RDMA.
    pub rdma: Option<Vec<RdmaInfo>>,
}

/// Whether a snapshot has a row for each message.
#[derive(Clone, Copy, PartialEq, Eq)]
enum MessageRows {
    All,
    None,
}

/// A table in the kernel's binary layout.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InfoTable {
    /// Size of one item in bytes, even if the table is empty.
    pub item_size: usize,
    /// The items, packed.
    pub bytes: Vec<u8>,
}

impl Node {
    /// Takes a snapshot of the node's state; nothing changes meanwhile [R-1206].
    pub fn info(&self) -> Info {
        self.info_with(MessageRows::All, |_| true)
    }

    /// Takes a snapshot as [`info`](Self::info), but with no rows of messages: of those there may
    /// be very many.
    pub fn info_without_messages(&self) -> Info {
        self.info_with(MessageRows::None, |_| true)
    }

    fn info_with(&self, rows: MessageRows, shown: impl Fn(SocketId) -> bool) -> Info {
        let mut info = Info::default();
        for (_, s) in self.sockets.iter().filter(|(id, _)| shown(SocketId(*id))) {
            info.sockets.push(SocketInfo {
                bound: s.bound.map(|b| b.at.to_socket_addr()),
                connected: s.dest.map(|d| d.to_socket_addr()),
                send_buffer: s.sndbuf,
                recv_buffer: s.rcvbuf,
                send_bytes: s.snd_bytes,
                recv_bytes: s.rcv_bytes,
                recv_messages: s.waiting(),
                congested: s.congested,
                inode: s.inode,
                owner: s.owner,
            });
            let Some(bound) = s.bound.as_ref().filter(|_| rows == MessageRows::All) else {
                continue;
            };
            info.recv.extend(s.unread().map(|(from, seq, len)| MessageInfo {
                local: bound.at.to_socket_addr(),
                remote: from.to_socket_addr(),
                seq,
                len: len as u32,
            }));
        }
        for (id, c) in self.conns.iter() {
            self.add_conn(ConnId(id), c, rows, &mut info);
        }
        for (id, l) in self.links.iter() {
            info.links.push(link_info(LinkId(id), l));
        }
        info.rdma = self.has_rdma().then(|| self.rdma_info());
        info
    }

    fn rdma_info(&self) -> Vec<RdmaInfo> {
        let over_rdma = self.conns.iter().filter_map(|(_, conn)| Some((conn, conn.rdma.as_ref()?)));
        let all = over_rdma.map(|(conn, rdma)| {
            let link = rdma.link.and_then(|link| self.rdma_links.get(link.0));
            let link = link.filter(|link| link.state == RdmaState::Up);
            let number = |value: u32| if link.is_some() { value } else { 0 };
            let gid = |addr: Ipv6Addr| link.map_or(Ipv6Addr::UNSPECIFIED, |_| addr);
            RdmaInfo {
                local: to_socket_addr(conn.local, 0, conn.scope).ip(),
                remote: to_socket_addr(conn.remote, 0, conn.scope).ip(),
                local_gid: gid(conn.local),
                remote_gid: gid(conn.remote),
                max_send_wr: link.map_or(0, |link| link.tx.slots as u32),
                max_recv_wr: link.map_or(0, |link| link.receives as u32),
                max_send_sge: number(kernel::MAX_SEND_SGE),
                rdma_mr_max: number(kernel::RDMA_MR_MAX),
                rdma_mr_size: number(kernel::RDMA_MR_SIZE),
                tos: rdma.tos,
                sl: rdma.tos & 0x0f,
                cache_allocs: 0,
            }
        });
        all.collect()
    }

    fn add_conn(&self, id: ConnId, c: &Conn, rows: MessageRows, info: &mut Info) {
        let local = to_socket_addr(c.local, 0, c.scope).ip();
        let remote = to_socket_addr(c.remote, 0, c.scope).ip();
        let (transport, tos) = match &c.rdma {
            Some(rdma) => ("infiniband", rdma.tos), // [OBS-4]
            None => ("tcp", 0),
        };
        let links = || self.links_of(id).into_iter().filter_map(|l| self.links.get(l.0));
        for (index, p) in c.paths.iter().enumerate() {
            let flags = self.path_flags(c, p);
            if index == 0 {
                info.connections.push(ConnInfo {
                    local,
                    remote,
                    transport,
                    tos,
                    next_tx_seq: p.next_tx_seq,
                    next_rx_seq: p.next_rx_seq,
                    flags,
                    npaths: if c.rdma.is_some() { 1 } else { c.npaths }, // [IB-4]
                    peer: match c.peer {
                        Peer::Unknown => "unknown",
                        Peer::Kernel => "kernel",
                        Peer::Bowline { .. } => "bowline",
                    },
                    congested: !c.map.is_empty(),
                    sent_messages: c.paths.iter().map(|p| p.sent).sum(),
                    received_messages: c.paths.iter().map(|p| p.received).sum(),
                    sent_bytes: c.past_written + links().map(|l| l.tx.written).sum::<u64>(),
                    received_bytes: c.past_read + links().map(|l| l.rx.bytes).sum::<u64>(),
                });
            }
            let live = p.queue.iter().enumerate().filter(|(_, m)| !m.has(mark::CANCELLED));
            let mut send = 0;
            let mut retrans = 0;
            for (at, m) in live {
                let started = at < p.planned || m.has(mark::RETRANS);
                *(if started { &mut retrans } else { &mut send }) += 1;
                if rows == MessageRows::None {
                    continue;
                }
                // A kernel shows no addresses in this table [B-31].
                let row = MessageInfo {
                    local: to_socket_addr(c.local, m.sport, c.scope),
                    remote: to_socket_addr(c.remote, m.dport, c.scope),
                    seq: m.seq,
                    len: m.len,
                };
                if started {
                    info.retrans.push(row);
                } else {
                    info.send.push(row);
                }
            }
            info.paths.push(PathInfo {
                local,
                remote,
                transport,
                tos,
                index: index as u8,
                state: p.state,
                next_tx_seq: p.next_tx_seq,
                next_rx_seq: p.next_rx_seq,
                flags,
                send_messages: send,
                retrans_messages: retrans,
                queued_bytes: p.queued_bytes,
                resets: p.resets,
                last_end: p.last_end,
            });
        }
    }

    fn path_flags(&self, c: &Conn, p: &Path) -> u8 {
        let busy = match &c.rdma {
            Some(rdma) => {
                let link = rdma.link.and_then(|link| self.rdma_links.get(link.0));
                link.is_some_and(|link| link.tx.busy)
            }
            None => p.link.and_then(|l| self.links.get(l.0)).is_some_and(|l| l.tx.busy),
        };
        (if busy { flag::SENDING } else { 0 })
            | match p.state {
                PathState::Connecting => flag::CONNECTING,
                PathState::Up => flag::CONNECTED,
                _ => 0,
            }
    }

    /// Returns the counters that apply to this node: without addresses on RDMA, those of RDMA are
    /// left out, as by a kernel without its module.
    pub fn listed_counters(&self) -> Vec<(&'static str, u64)> {
        let listed = |(name, _): &(&str, u64)| self.has_rdma() || !name.starts_with("ib_");
        self.stats.iter().filter(listed).collect()
    }

    /// Counts requests of programs that whoever serves them with this node has refused.
    pub fn count_refused_programs(&mut self, count: u64) {
        self.stats.programs_refused += count;
    }

    /// Returns one of the kernel's tables, options 10000 to 10017.
    ///
    /// # Errors
    /// [`Error::NoSuchOption`] for tables that this node does not have: those of RDMA if none of
    /// its addresses is on RDMA [R-1001].
    pub fn info_option(&self, option: u32) -> Result<InfoTable, Error> {
        info_table(self.info(), &self.listed_counters(), option)
    }

    /// Returns one of the kernel's tables with only those sockets, and messages of sockets, that
    /// `shown` tells. Counters, connections and TCP connections belong to nobody and are all there.
    ///
    /// # Errors
    /// As [`info_option`](Self::info_option).
    pub fn info_option_of(
        &self,
        option: u32,
        shown: impl Fn(SocketId) -> bool,
    ) -> Result<InfoTable, Error> {
        let mut info = self.info_with(MessageRows::All, shown);
        let bound = info.sockets.iter().filter_map(|socket| socket.bound);
        let places: BTreeSet<_> = bound.map(place).collect();
        for messages in [&mut info.send, &mut info.retrans] {
            messages.retain(|message| places.contains(&place(message.local)));
        }
        info_table(info, &self.listed_counters(), option)
    }
}

/// An address without its scope.
fn place(at: SocketAddr) -> (IpAddr, u16) {
    (at.ip(), at.port())
}

fn info_table(
    info: Info,
    counters: &[(&'static str, u64)],
    option: u32,
) -> Result<InfoTable, Error> {
    let mut t = Table::default();
    let v6 = option >= 10_011;
    let item_size = match option {
        10_000 => {
            for (name, value) in counters {
                t.text(name, 32);
                t.u64(*value);
            }
            40
        }
        10_001 | 10_011 => {
            for c in info.connections.iter().filter(|c| v6 || c.local.is_ipv4()) {
                t.u64(c.next_tx_seq);
                t.u64(c.next_rx_seq);
                t.addr(c.local, v6);
                t.addr(c.remote, v6);
                t.text(c.transport, 16);
                t.0.push(c.flags);
                if !v6 {
                    t.0.push(0);
                }
            }
            if v6 { 65 } else { 42 }
        }
        10_003..=10_005 | 10_012..=10_014 => {
            let rows = match option {
                10_003 | 10_012 => &info.send,
                10_004 | 10_013 => &info.retrans,
                _ => &info.recv,
            };
            for m in rows.iter().filter(|m| v6 || m.local.is_ipv4()) {
                t.u64(m.seq);
                t.u32(m.len);
                t.addr(m.local.ip(), v6);
                t.addr(m.remote.ip(), v6);
                t.port(m.local.port());
                t.port(m.remote.port());
                t.0.extend([0, 0]);
            }
            if v6 { 50 } else { 26 }
        }
        10_006 | 10_015 => {
            for s in &info.sockets {
                if !v6 && !s.bound.is_some_and(|b| b.is_ipv4()) {
                    continue;
                }
                let any = SocketAddr::from(([0, 0, 0, 0], 0));
                let bound = s.bound.unwrap_or(any);
                let connected = s.connected.unwrap_or(any);
                t.u32(u32::try_from(s.send_buffer).unwrap_or(u32::MAX));
                t.addr(bound.ip(), v6);
                t.addr(connected.ip(), v6);
                t.port(bound.port());
                t.port(connected.port());
                t.u32(u32::try_from(s.recv_buffer).unwrap_or(u32::MAX));
                t.u64(s.inode);
            }
            if v6 { 52 } else { 28 }
        }
        10_007 | 10_016 => {
            for l in info.links.iter().filter(|l| l.path.is_some()) {
                if !v6 && !l.local.is_ipv4() {
                    continue;
                }
                t.addr(l.local.ip(), v6);
                t.port(l.local.port());
                t.addr(l.remote.ip(), v6);
                t.port(l.remote.port());
                t.u64(l.header_remaining);
                t.u64(l.data_remaining);
                t.u32(l.last_sent_nxt);
                t.u32(l.last_expected_una);
                t.u32(l.last_seen_una);
                if !v6 {
                    t.0.push(0);
                }
            }
            if v6 { 64 } else { 41 }
        }
        10_008 | 10_017 => {
            let all = info.rdma.ok_or(Error::NoSuchOption)?;
            all.iter().filter(|c| v6 || c.local.is_ipv4()).for_each(|c| t.rdma(c, v6));
            if v6 { 92 } else { 68 }
        }
        _ => return Err(Error::NoSuchOption),
    };
    debug_assert_eq!(t.0.len() % item_size, 0, "items have the kernel's size");
    Ok(InfoTable { item_size, bytes: t.0 })
}

fn link_info(link: LinkId, l: &Link) -> LinkInfo {
    LinkInfo {
        link,
        local: l.local,
        remote: l.remote,
        path: l.path,
        header_remaining: if l.rx.partial.is_some() {
            0
        } else {
            (HEADER_LEN - l.rx.head_len) as u64
        },
        data_remaining: l.rx.partial.as_ref().map_or(0, |p| p.need as u64),
        last_sent_nxt: l.last_start as u32,
        last_expected_una: l.last_end as u32,
        last_seen_una: l.tx.acked as u32,
        received_bytes: l.rx.bytes,
        received_messages: l.rx.messages,
    }
}

/// A table in the kernel's layout: integers in host order, addresses and ports in network order
/// [R-1004].
#[derive(Default)]
struct Table(Vec<u8>);

impl Table {
    fn u64(&mut self, v: u64) {
        self.0.extend(v.to_ne_bytes());
    }

    fn u32(&mut self, v: u32) {
        self.0.extend(v.to_ne_bytes());
    }

    /// Appends a connection over RDMA [OBS-3].
    fn rdma(&mut self, c: &RdmaInfo, v6: bool) {
        self.addr(c.local, v6);
        self.addr(c.remote, v6);
        self.0.extend(c.local_gid.octets());
        self.0.extend(c.remote_gid.octets());
        for number in [c.max_send_wr, c.max_recv_wr, c.max_send_sge, c.rdma_mr_max, c.rdma_mr_size]
        {
            self.u32(number);
        }
        self.0.extend([c.tos, c.sl, 0, 0]); // the rest of the word is zero [SAFE-13]
        self.u32(c.cache_allocs);
    }

    fn port(&mut self, v: u16) {
        self.0.extend(v.to_be_bytes());
    }

    fn text(&mut self, v: &str, len: usize) {
        let end = self.0.len() + len;
        self.0.extend(v.as_bytes().iter().take(len - 1));
        self.0.resize(end, 0);
    }

    fn addr(&mut self, v: IpAddr, v6: bool) {
        match v {
            IpAddr::V4(v4) if !v6 => self.0.extend(v4.octets()),
            // An IPv4 socket cannot have an IPv6 destination; the kernel would show zeros.
            IpAddr::V6(_) if !v6 => self.0.extend([0; 4]),
            IpAddr::V4(v4) if v4.is_unspecified() => self.0.extend([0; 16]),
            v => self.0.extend(mapped(v).octets()),
        }
    }
}
