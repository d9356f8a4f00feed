//! State of a socket.

use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, VecDeque};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6};

use bowline_base::Instant;

use crate::ids::ConnId;
use crate::rdma::RdmaStatus;
use crate::rdma::op::{OpLoad, Region};
use crate::recvq::RecvQueue;
use crate::txlog::SEND_OVERHEAD;

/// Messages, and bytes, that are queued for a waiting reader before parsing stops.
const ENOUGH_MESSAGES: usize = 32;
const ENOUGH_BYTES: usize = 64 << 10;
/// Bytes of the receive buffer for each message that may wait for the reader.
const SMALL_MESSAGE: usize = 64;

/// Transport of a socket, with the kernel's numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Transport {
    /// RDMA.
    #[doc(alias = "RDS_TRANS_IB")]
    Ib = 0,
    /// TCP.
    #[doc(alias = "RDS_TRANS_TCP")]
    Tcp = 2,
    /// Within the node.
    Loopback = 3,
}

/// An address and port with its interface scope; IPv4 is v4-mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) struct Endpoint {
    pub(crate) addr: Ipv6Addr,
    pub(crate) port: u16,
    pub(crate) scope: u32,
}

impl Endpoint {
    pub(crate) const fn is_v4(&self) -> bool {
        self.addr.to_ipv4_mapped().is_some()
    }

    pub(crate) fn to_socket_addr(self) -> SocketAddr {
        to_socket_addr(self.addr, self.port, self.scope)
    }

    /// Adds this scope to a link-local address that was given without one.
    pub(crate) fn or_scope(self, scope: Option<u32>) -> Self {
        let missing = needs_scope(self.addr) && self.scope == 0;
        Self { scope: scope.filter(|_| missing).unwrap_or(self.scope), ..self }
    }

    /// Returns `None` unless the address names one host and has the scope it needs.
    pub(crate) fn checked(self) -> Option<Self> {
        let ok = is_unicast(self.addr) && !(needs_scope(self.addr) && self.scope == 0);
        ok.then_some(self)
    }
}

/// Converts to the form that users see: IPv4 addresses as IPv4.
pub(crate) fn to_socket_addr(addr: Ipv6Addr, port: u16, scope: u32) -> SocketAddr {
    match addr.to_ipv4_mapped() {
        Some(v4) => SocketAddr::from((v4, port)),
        None => SocketAddr::V6(SocketAddrV6::new(addr, port, 0, scope)),
    }
}

/// Converts to the form that the core compares: 128 bits, IPv4 mapped to IPv6.
pub(crate) fn mapped(addr: IpAddr) -> Ipv6Addr {
    match addr {
        IpAddr::V4(v4) => v4.to_ipv6_mapped(),
        IpAddr::V6(v6) => v6,
    }
}

/// Tells whether an address names one host: the rule of bind and send for both families.
pub(crate) fn is_unicast(addr: Ipv6Addr) -> bool {
    match addr.to_ipv4_mapped() {
        Some(v4) => !(v4.is_unspecified() || v4 == Ipv4Addr::BROADCAST || v4.is_multicast()),
        None => !(addr.is_unspecified() || addr.is_multicast()),
    }
}

/// Tells whether an address needs an interface scope.
pub(crate) const fn needs_scope(addr: Ipv6Addr) -> bool {
    addr.is_unicast_link_local()
}

/// Tells whether an address belongs to the loopback transport unless the node claims it.
pub(crate) fn is_loopback(addr: Ipv6Addr) -> bool {
    addr.is_loopback() || addr.to_ipv4_mapped().is_some_and(|v4| v4.is_loopback())
}

/// The address and port of a bound socket.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Bound {
    pub(crate) at: Endpoint,
    pub(crate) local_addr: usize,
    pub(crate) transport: Transport,
}

/// Receive path latency request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LatencyTrace {
    /// Number of positions in use.
    pub count: u8,
    /// The interval at each position, 0 to 2.
    pub positions: [u8; 3],
}

/// Bits of the events that a waiting user registers for.
pub(crate) mod interest_bit {
    pub(crate) const READ: u8 = 1;
    pub(crate) const WRITE: u8 = 2;
}

/// A destination that has passed the checks of a name and is not local.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Route {
    /// The name as the user gave it; `None` for the connected destination.
    pub(crate) name: Option<SocketAddr>,
    pub(crate) flow: Flow,
}

/// Properties that all messages of a socket to one destination share.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Flow {
    pub(crate) conn: ConnId,
    /// Chooses the path [R-2040].
    pub(crate) hash: u32,
    pub(crate) sport: u16,
    pub(crate) dport: u16,
}

/// Number of places of messages that are gone which a socket may keep: to forget each at once costs
/// who sends to many ports in turn half of what a message costs.
const STALE_KEPT: usize = 128;

/// Where messages of a socket wait: at a peer, for a port, on a path.
pub(crate) type SentTo = (ConnId, u16, u8);

/// State of one socket.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Sock {
    pub(crate) bound: Option<Bound>,
    pub(crate) dest: Option<Endpoint>,
    pub(crate) transport: Option<Transport>,
    pub(crate) sndbuf: usize,
    pub(crate) rcvbuf: usize,
    pub(crate) snd_bytes: usize,
    pub(crate) snd_msgs: usize,
    /// Number of the latest message on each path to each port: it leads to those before it. Entries
    /// whose messages are gone stay as long as they are [not too many](Self::has_stale).
    #[serde(skip)]
    pub(crate) latest: BTreeMap<SentTo, u64>,
    pub(crate) rcv_bytes: usize,
    pub(crate) queue: RecvQueue,
    /// Connection and length in bytes of each message that is lent to the reader.
    pub(crate) lent: VecDeque<(Option<ConnId>, usize)>,
    /// Sender and number of each of the last messages in `lent`. The first ones have no entry if an
    /// earlier version of the node has lent them, which keeps `lent` alone.
    #[serde(default)]
    pub(crate) lent_from: VecDeque<(Endpoint, u64)>,
    /// This socket's port is marked in the congestion map of its address.
    pub(crate) congested: bool,
    /// So many messages wait for the reader that the port is congested, however short they are.
    pub(crate) crowded: bool,
    #[serde(skip)]
    pub(crate) interest: u8,
    /// The socket stands in the node's list of sockets to wake at the next map.
    #[serde(skip)]
    pub(crate) cong_waiting: bool,
    /// A send was refused because of congestion since the last poll.
    pub(crate) seen_congestion: bool,
    pub(crate) monitor: bool,
    pub(crate) wait_mask: u64,
    pub(crate) notify_mask: u64,
    /// Congestion generation at the last poll.
    pub(crate) poll_generation: u64,
    pub(crate) timestamp: bool,
    pub(crate) latency: Option<LatencyTrace>,
    /// When `latency` was set: messages that came before have no times.
    #[serde(default)]
    pub(crate) traced_since: Instant,
    pub(crate) zerocopy: bool,
    pub(crate) recverr: bool,
    /// Type of service: over RDMA each has connections of its own.
    #[serde(default)]
    pub(crate) tos: u8,
    /// A send has had a destination to go to, even if it was then refused.
    #[serde(default)]
    pub(crate) has_had_route: bool,
    pub(crate) completions: VecDeque<Vec<u32>>,
    /// How RDMA operations ended, oldest first.
    #[serde(default)]
    pub(crate) notifications: VecDeque<(u64, RdmaStatus)>,
    /// What the operations of its queued messages take.
    #[serde(skip)]
    pub(crate) op_load: OpLoad,
    /// Memory that peers may use, by its remote key.
    #[serde(skip)]
    pub(crate) regions: BTreeMap<u32, Region>,
    /// The latest remote destination, kept to skip the checks when it is used again.
    #[serde(skip)]
    pub(crate) route: Option<Route>,
    /// Inode of the program's file, or a number of this node's choice [R-1013].
    pub(crate) inode: u64,
    /// Process that opened it, if another than that of the node.
    pub(crate) owner: Option<u32>,
}

impl Sock {
    /// Tells whether sends are refused until a queued message is released; `many`: each counts with
    /// all that it takes, since there are many in the node.
    #[inline]
    pub(crate) const fn is_send_full(&self, messages_max: usize, many: bool) -> bool {
        let beside = if many { self.snd_msgs * SEND_OVERHEAD } else { 0 };
        self.snd_bytes + beside >= self.sndbuf || self.snd_msgs >= messages_max
    }

    /// Tells whether most entries of `latest` are of messages that are gone.
    #[inline]
    pub(crate) fn has_stale(&self) -> bool {
        self.latest.len() > 2 * self.snd_msgs + STALE_KEPT
    }

    /// Tells whether enough messages wait that parsing stops: enough to be worth a reader's
    /// wake-up, but too few to congest the socket.
    #[inline]
    pub(crate) fn has_enough(&self) -> bool {
        self.queue.len() >= ENOUGH_MESSAGES || self.rcv_bytes >= (self.rcvbuf / 4).min(ENOUGH_BYTES)
    }

    /// Tells whether the port is congested when `bytes` wait for the reader, [R-612].
    #[inline]
    pub(crate) const fn congested_at(&self, bytes: usize) -> bool {
        if self.congested { bytes >= self.rcvbuf / 2 } else { bytes > self.rcvbuf }
    }

    /// Number of messages that wait for the reader, lent ones included.
    #[inline]
    pub(crate) fn waiting(&self) -> usize {
        self.queue.len() + self.lent.len()
    }

    /// Sender, number and length in bytes of each message that waits for the reader, the oldest
    /// first [R-1011]. Lent messages whose sender is not known are left out.
    pub(crate) fn unread(&self) -> impl Iterator<Item = (Endpoint, u64, usize)> {
        let unknown = self.lent.len().saturating_sub(self.lent_from.len());
        let lent = self.lent.iter().skip(unknown).zip(&self.lent_from);
        let lent = lent.map(|((_, len), (from, seq))| (*from, *seq, *len));
        lent.chain(self.queue.iter().map(|(from, seq, len, _)| (from, seq, len)))
    }

    /// Tells whether `messages` for the reader congest the port. Every socket may have `least`,
    /// one with a large buffer as many as fill it with [`SMALL_MESSAGE`] bytes each [B-33].
    #[inline]
    pub(crate) fn crowded_at(&self, messages: usize, least: usize) -> bool {
        let most = least.max(self.rcvbuf / SMALL_MESSAGE);
        if self.crowded { messages >= most / 2 } else { messages > most }
    }
}
