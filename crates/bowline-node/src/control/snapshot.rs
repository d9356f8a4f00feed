//! The state of a node at one moment, as `bowline info --json` prints it.
//!
//! Names are those of the kernel's info interface, written out. A field may be added in any
//! release; none is renamed or removed within one version of the control protocol.

#![expect(missing_docs, reason = "the names are those of the interface, which says what they are")]

use std::{
    net::{IpAddr, Ipv6Addr},
    time::Duration,
};

use bowline::rds::{Info, Node};
use bowline_base::clock;
use bowline_rds::{ConnInfo, LinkInfo, MessageInfo, PathEnd, PathInfo, RdmaInfo, SocketInfo};
use serde::{Deserialize, Serialize};

use crate::values::Address;

/// Everything at one moment.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct Snapshot {
    pub node: NodeFacts,
    /// Milliseconds since the start of the node.
    pub uptime_ms: u64,
    pub counters: Vec<Counter>,
    pub sockets: Vec<SocketRow>,
    pub connections: Vec<ConnectionRow>,
    pub paths: Vec<PathRow>,
    pub recv_messages: Vec<MessageRow>,
    pub send_messages: Vec<MessageRow>,
    pub retrans_messages: Vec<MessageRow>,
    pub tcp_sockets: Vec<TcpRow>,
    /// Absent if no address of the node is on RDMA.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ib_connections: Option<Vec<RdmaRow>>,
}

/// What does not change while the node runs.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct NodeFacts {
    /// Version of the program.
    pub version: String,
    /// Process that runs the node.
    pub pid: u32,
    /// Addresses it serves, link-local ones with their interface; empty means all local ones.
    pub addresses: Vec<Address>,
}

/// One counter, in the order of the kernel.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct Counter {
    pub name: String,
    pub value: u64,
}

/// One RDS socket; port 0 and no address mean that it is not bound or connected.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct SocketRow {
    pub bound_addr: Option<IpAddr>,
    pub bound_port: u16,
    pub connected_addr: Option<IpAddr>,
    pub connected_port: u16,
    /// Effective size, bytes.
    pub sndbuf: u64,
    /// Effective size, bytes.
    pub rcvbuf: u64,
    pub inode: u64,
    /// Payload bytes sent and not acknowledged, and received and not taken.
    pub send_bytes: u64,
    pub recv_bytes: u64,
    /// Messages received and not taken.
    #[serde(default)]
    pub recv_messages: u64,
    /// Whether senders are told to wait.
    pub congested: bool,
    /// Process that opened it, if another than that of the node.
    #[serde(default)]
    pub owner_pid: Option<u32>,
}

/// One pair of addresses; the numbers are those of path 0.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct ConnectionRow {
    pub local_addr: IpAddr,
    pub remote_addr: IpAddr,
    pub tos: u8,
    pub next_tx: u64,
    pub next_rx: u64,
    pub flags: Flags,
    /// tcp or infiniband.
    pub transport: String,
    /// Agreed number of paths; 0: not known yet.
    pub paths: u8,
    /// Implementation of the peer: bowline, kernel or unknown.
    pub peer: String,
    /// The peer has marked at least one of its ports congested.
    #[serde(default)]
    pub congested: bool,
    /// Messages queued for the peer and received, and bytes that the transport took and brought.
    #[serde(default)]
    pub sent_messages: u64,
    #[serde(default)]
    pub received_messages: u64,
    #[serde(default)]
    pub sent_bytes: u64,
    #[serde(default)]
    pub received_bytes: u64,
}

/// State of a connection or a path as `rds-info` shows it.
#[derive(Clone, Copy, Debug, Default, Deserialize, Serialize)]
pub struct Flags {
    pub sending: bool,
    pub connecting: bool,
    pub connected: bool,
}

impl std::fmt::Display for Flags {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let letter = |set: bool, letter: char| if set { letter } else { '-' };
        let text: String = [
            letter(self.sending, 's'),
            letter(self.connecting, 'c'),
            letter(self.connected, 'C'),
            // Only Oracle's kernels know pending errors.
            '-',
        ]
        .iter()
        .collect();
        f.pad(&text)
    }
}

/// One path of a connection.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct PathRow {
    pub local_addr: IpAddr,
    pub remote_addr: IpAddr,
    /// As in its connection.
    #[serde(default = "tcp")]
    pub transport: String,
    #[serde(default)]
    pub tos: u8,
    pub path: u8,
    pub next_tx: u64,
    pub next_rx: u64,
    pub flags: Flags,
    /// down, connecting, up and so on.
    pub state: String,
    /// Messages not yet handed to the transport, and handed over but not acknowledged.
    pub send_messages: u64,
    pub retrans_messages: u64,
    /// Times the path lost its TCP or RDMA connection.
    pub resets: u64,
    /// Payload bytes that the peer has not acknowledged.
    #[serde(default)]
    pub queued_bytes: u64,
    /// When and why it last lost that connection, or did not get one.
    #[serde(default)]
    pub last_end: Option<EndRow>,
}

/// Transport of the paths of nodes that know no other.
fn tcp() -> String {
    "tcp".to_owned()
}

/// The end of a TCP or RDMA connection.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct EndRow {
    /// Milliseconds since then.
    pub ago_ms: u64,
    pub reason: String,
}

/// One message in a queue.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct MessageRow {
    pub local_addr: IpAddr,
    pub local_port: u16,
    pub remote_addr: IpAddr,
    pub remote_port: u16,
    pub tos: u8,
    pub seq: u64,
    pub bytes: u64,
}

/// One TCP connection that serves a path.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct TcpRow {
    pub local_addr: IpAddr,
    pub local_port: u16,
    pub remote_addr: IpAddr,
    pub remote_port: u16,
    /// Path it serves.
    pub path: Option<u8>,
    /// Bytes still missing of the header and of the payload that are being received.
    pub hdr_rem: u64,
    pub data_rem: u64,
    /// TCP sequence numbers: start and end of the last message, and what the peer has.
    pub last_sent_nxt: u32,
    pub last_expected_una: u32,
    pub last_seen_una: u32,
    pub received_bytes: u64,
    pub received_messages: u64,
}

/// One connection over RDMA; while it is not up, devices and numbers are zero.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct RdmaRow {
    pub local_addr: IpAddr,
    pub remote_addr: IpAddr,
    pub tos: u8,
    pub sl: u8,
    /// GIDs of the devices.
    pub local_dev: Ipv6Addr,
    pub remote_dev: Ipv6Addr,
    pub send_wr: u32,
    pub recv_wr: u32,
    pub send_sge: u32,
    pub rdma_mr_max: u32,
    pub rdma_mr_size: u32,
    pub cache_allocs: u32,
}

impl Snapshot {
    /// Takes a snapshot of a node.
    pub fn take(node: &Node, facts: &NodeFacts, uptime: Duration) -> Self {
        Self::of(node, node.info(), facts, uptime)
    }

    /// Asks a node for everything but the messages, of which there may be very many.
    pub fn take_without_messages(node: &Node, facts: &NodeFacts, uptime: Duration) -> Self {
        Self::of(node, node.info_without_messages(), facts, uptime)
    }

    fn of(node: &Node, info: Info, facts: &NodeFacts, uptime: Duration) -> Self {
        let counter = |(name, value): (&str, u64)| Counter { name: name.to_owned(), value };
        Self {
            node: facts.clone(),
            uptime_ms: uptime.as_millis() as u64,
            counters: node.counters().into_iter().map(counter).collect(),
            sockets: info.sockets.iter().map(SocketRow::from).collect(),
            connections: info.connections.iter().map(ConnectionRow::from).collect(),
            paths: info.paths.iter().map(PathRow::from).collect(),
            recv_messages: info.recv.iter().map(MessageRow::from).collect(),
            send_messages: info.send.iter().map(MessageRow::from).collect(),
            retrans_messages: info.retrans.iter().map(MessageRow::from).collect(),
            tcp_sockets: info.links.iter().map(TcpRow::from).collect(),
            ib_connections: info.rdma.map(|all| all.iter().map(RdmaRow::from).collect()),
        }
    }
}

impl From<u8> for Flags {
    fn from(bits: u8) -> Self {
        Self { sending: bits & 1 != 0, connecting: bits & 2 != 0, connected: bits & 4 != 0 }
    }
}

impl From<&SocketInfo> for SocketRow {
    fn from(info: &SocketInfo) -> Self {
        Self {
            bound_addr: info.bound.map(|place| place.ip()),
            bound_port: info.bound.map_or(0, |place| place.port()),
            connected_addr: info.connected.map(|place| place.ip()),
            connected_port: info.connected.map_or(0, |place| place.port()),
            sndbuf: info.send_buffer as u64,
            rcvbuf: info.recv_buffer as u64,
            inode: info.inode,
            send_bytes: info.send_bytes as u64,
            recv_bytes: info.recv_bytes as u64,
            recv_messages: info.recv_messages as u64,
            congested: info.congested,
            owner_pid: info.owner,
        }
    }
}

impl From<&ConnInfo> for ConnectionRow {
    fn from(info: &ConnInfo) -> Self {
        Self {
            local_addr: info.local,
            remote_addr: info.remote,
            tos: info.tos,
            next_tx: info.next_tx_seq,
            next_rx: info.next_rx_seq,
            flags: info.flags.into(),
            transport: info.transport.to_owned(),
            paths: info.npaths,
            peer: info.peer.to_owned(),
            congested: info.congested,
            sent_messages: info.sent_messages,
            received_messages: info.received_messages,
            sent_bytes: info.sent_bytes,
            received_bytes: info.received_bytes,
        }
    }
}

impl From<&PathInfo> for PathRow {
    fn from(info: &PathInfo) -> Self {
        Self {
            local_addr: info.local,
            remote_addr: info.remote,
            transport: info.transport.to_owned(),
            tos: info.tos,
            path: info.index,
            next_tx: info.next_tx_seq,
            next_rx: info.next_rx_seq,
            flags: info.flags.into(),
            state: format!("{:?}", info.state).to_lowercase(),
            send_messages: info.send_messages as u64,
            retrans_messages: info.retrans_messages as u64,
            resets: info.resets,
            queued_bytes: info.queued_bytes,
            last_end: info.last_end.map(EndRow::from),
        }
    }
}

impl From<PathEnd> for EndRow {
    fn from(end: PathEnd) -> Self {
        let ago = clock::now().saturating_since(end.at);
        let reason = end.why.map_or_else(|| "ended by this node".to_owned(), |why| why.to_string());
        Self { ago_ms: ago.as_millis() as u64, reason }
    }
}

impl From<&MessageInfo> for MessageRow {
    fn from(info: &MessageInfo) -> Self {
        Self {
            local_addr: info.local.ip(),
            local_port: info.local.port(),
            remote_addr: info.remote.ip(),
            remote_port: info.remote.port(),
            tos: 0,
            seq: info.seq,
            bytes: u64::from(info.len),
        }
    }
}

impl From<&LinkInfo> for TcpRow {
    fn from(info: &LinkInfo) -> Self {
        Self {
            local_addr: info.local.ip(),
            local_port: info.local.port(),
            remote_addr: info.remote.ip(),
            remote_port: info.remote.port(),
            path: info.path,
            hdr_rem: info.header_remaining,
            data_rem: info.data_remaining,
            last_sent_nxt: info.last_sent_nxt,
            last_expected_una: info.last_expected_una,
            last_seen_una: info.last_seen_una,
            received_bytes: info.received_bytes,
            received_messages: info.received_messages,
        }
    }
}

impl From<&RdmaInfo> for RdmaRow {
    fn from(info: &RdmaInfo) -> Self {
        Self {
            local_addr: info.local,
            remote_addr: info.remote,
            tos: info.tos,
            sl: info.sl,
            local_dev: info.local_gid,
            remote_dev: info.remote_gid,
            send_wr: info.max_send_wr,
            recv_wr: info.max_recv_wr,
            send_sge: info.max_send_sge,
            rdma_mr_max: info.rdma_mr_max,
            rdma_mr_size: info.rdma_mr_size,
            cache_allocs: info.cache_allocs,
        }
    }
}
