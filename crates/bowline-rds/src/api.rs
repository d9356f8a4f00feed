//! Inputs and outputs of a node.

use std::fmt;
use std::io::IoSlice;
use std::net::{IpAddr, SocketAddr};
use std::ops::BitOr;
use std::sync::Arc;

use bowline_base::{Errno, Instant};
use serde::{Deserialize, Serialize};

use crate::ids::{LinkId, RdmaLinkId, SocketId};
use crate::rdma::{RdmaOp, RdmaShape, RdmaStatus};
use crate::rxbuf::Rope;

/// A request of the node to its driver.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Output {
    /// Open a TCP connection without blocking; answered by `handle_connected` or `handle_closed`.
    Connect {
        /// Id of the connection from now on.
        link: LinkId,
        /// Address to bind to.
        local: IpAddr,
        /// Peer, port 16385, with its scope.
        remote: SocketAddr,
        /// The source port should be this modulo 8.
        port_mod8: u8,
    },
    /// Close a TCP connection.
    Close {
        /// The connection.
        link: LinkId,
        /// How to close it.
        how: CloseHow,
    },
    /// The link has something to send and is neither busy nor blocked. Repeated only after
    /// `poll_transmit`.
    Transmit {
        /// The link.
        link: LinkId,
    },
    /// An event that a user registered for has happened; the registration is used up.
    Wake {
        /// The socket.
        socket: SocketId,
        /// The events that happened.
        ready: Interest,
    },
    /// The link may be read again, after `wants_read` refused it.
    Resume {
        /// The link.
        link: LinkId,
    },
    /// Read the bytes that have arrived on the link, make TCP find out whether the peer still knows
    /// the connection, then call `handle_checked`.
    CheckAlive {
        /// The link.
        link: LinkId,
    },
    /// Connect over RDMA with a queue pair of this shape, whose receives are posted; answered by
    /// `handle_rdma_established` or `handle_rdma_closed`.
    RdmaConnect {
        /// Id of the connection from now on.
        link: RdmaLinkId,
        /// Address to bind to, with its scope.
        local: SocketAddr,
        /// Peer, with the port of its CM and its scope.
        remote: SocketAddr,
        /// Queues and private data.
        shape: RdmaShape,
    },
    /// The connection has something to send: call `poll_rdma_requests`. Repeated only after that.
    RdmaSend {
        /// The connection.
        link: RdmaLinkId,
    },
    /// Receives may be posted again, after `wants_rdma_frames` refused it.
    RdmaResume {
        /// The connection.
        link: RdmaLinkId,
    },
    /// Refuse new requests of peers for memory, if the device can withdraw its key. Reads that were
    /// begun are to end: it is released only later.
    RdmaUsed {
        /// Number by which the driver knows it.
        tag: u64,
    },
    /// Take memory back from peers.
    RdmaRelease {
        /// Number by which the driver knows it.
        tag: u64,
    },
    /// End the connection; when all its requests are flushed, call `handle_rdma_closed`.
    RdmaClose {
        /// The connection.
        link: RdmaLinkId,
    },
    /// An event for the operator's log.
    Event(Event),
}

/// Why an accepted TCP connection is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AcceptError {
    /// The connection is a knock, and this node dials back: reset it at once.
    Knock,
    /// A limit is reached, or the node is closing: keep the connection open and unread for a
    /// moment, then reset it.
    Refused,
}

/// How to close a TCP connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CloseHow {
    /// With a reset, at once. The node has forgotten the link.
    Reset,
    /// With FIN, at once. The node has forgotten the link.
    Fin,
    /// Send FIN, read until end of file, an error or two seconds, then `handle_closed`.
    Drain,
    /// Stop receiving, read the bytes that TCP has acknowledged to the peer, then call
    /// `handle_closed` and reset. Links for which this is requested are cut in the order of
    /// the requests.
    Cut,
}

/// Why a TCP connection is gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum CloseReason {
    /// No process listens on the port.
    Refused,
    /// No route, or the host does not answer.
    Unreachable,
    /// The peer did not answer in time, or keepalive failed.
    TimedOut,
    /// The peer closed the connection.
    Eof,
    /// The peer reset the connection.
    Reset,
    /// The machine does not have the local address.
    AddrNotAvailable,
    /// Another error number of the system.
    Other(i32),
}

impl fmt::Display for CloseReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = match self {
            Self::Refused => "refused",
            Self::Unreachable => "unreachable",
            Self::TimedOut => "no answer",
            Self::Eof => "closed by the peer",
            Self::Reset => "reset by the peer",
            Self::AddrNotAvailable => "no such local address",
            Self::Other(errno) => return Errno(*errno).fmt(f),
        };
        f.write_str(text)
    }
}

/// When and why a path lost its TCP connection, or did not get one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct PathEnd {
    /// When.
    pub at: Instant,
    /// Why the connection ended; `None` when this node ended it, because it was asked to, the peer
    /// broke a rule, or another connection took its place.
    pub why: Option<CloseReason>,
}

/// An event that an operator may want to know. The driver limits the rate at which it logs them.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Event {
    /// A path went into service.
    PathUp {
        /// Local address.
        local: IpAddr,
        /// Remote address.
        remote: IpAddr,
        /// Index of the path.
        path: u8,
    },
    /// A path went out of service.
    PathDown {
        /// Local address.
        local: IpAddr,
        /// Remote address.
        remote: IpAddr,
        /// Index of the path.
        path: u8,
        /// Why it lost its connection; `None` when this node or the peer ends in good order, or
        /// this node ended the connection: because it was asked to, the peer broke a rule, or
        /// another connection took its place.
        why: Option<CloseReason>,
    },
    /// A peer cannot be connected to. The node tries again as long as there are messages for it, or
    /// it has been connected before. Told once for each cause until the peer is connected.
    CannotConnect {
        /// Local address.
        local: IpAddr,
        /// Remote address.
        remote: IpAddr,
        /// The cause.
        why: CloseReason,
    },
    /// A peer broke a rule and lost its connection.
    Misbehaved {
        /// Remote address.
        remote: IpAddr,
        /// The rule.
        what: Misbehaviour,
    },
    /// A peer has restarted.
    PeerRestarted {
        /// Remote address.
        remote: IpAddr,
    },
    /// A peer has said that it ends: it has acknowledged what it took, and takes nothing more. What
    /// it has not acknowledged stays queued for the node that comes in its place [R-2051].
    PeerEnded {
        /// Local address.
        local: IpAddr,
        /// Remote address.
        remote: IpAddr,
    },
    /// A connection was refused, or cut because of a limit.
    Refused {
        /// Remote address.
        remote: IpAddr,
        /// The limit, or what else kept the node from taking the connection.
        why: Refusal,
    },
}

/// The rule that a peer broke.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Misbehaviour {
    /// The generation in the peer's probes differs from the one that it told on this connection.
    GenerationChanged,
    /// A message is longer than the limit of the node, [B-6].
    MessageTooLong,
    /// A bowline peer sent a message before its greeting named the path [R-2013].
    DataBeforeGreeting,
    /// A bowline peer's probe named a path above 7 [R-2004].
    PathOutOfRange,
    /// The version of a connection over RDMA is below 3.1 [IB-20].
    Version,
    /// A frame over RDMA is shorter than its header or its part of the message [IB-81], or longer
    /// than a frame can be [IB-57].
    FrameLength,
    /// The checksum of a frame over RDMA is wrong [IB-81].
    Checksum,
    /// A frame over RDMA belongs to another message than the one that is being received [IB-81].
    FrameOfOther,
    /// A congestion map over RDMA has a wrong length [SAFE-1].
    MapLength,
    /// More flow-control credits than there can be [IB-79].
    Credits,
    /// Something came over RDMA that is no plain SEND [IB-43].
    Completion,
}

impl fmt::Display for Misbehaviour {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::GenerationChanged => "generation changed within a connection",
            Self::MessageTooLong => "message longer than the limit",
            Self::DataBeforeGreeting => "data before the greeting",
            Self::PathOutOfRange => "path of a connection",
            Self::Version => "version of the protocol",
            Self::FrameLength => "length of a frame",
            Self::Checksum => "checksum of a header",
            Self::FrameOfOther => "frame of another message",
            Self::MapLength => "length of a congestion map",
            Self::Credits => "too many credits",
            Self::Completion => "something else than a SEND",
        })
    }
}

/// Why a connection was refused or cut: mostly one of [`Limits`](crate::Limits).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Refusal {
    /// The remote address is one of this node: local traffic never uses TCP.
    Local,
    /// The node is being shut down.
    Closing,
    /// `Limits::peers`.
    Peers,
    /// `Limits::peers_unproven`: a newer peer took the place of this one, the oldest of those that
    /// never sent a message.
    PeersUnproven,
    /// `Limits::links_extra_per_peer`.
    LinksOfPeer,
    /// The list of peers does not permit it.
    NotPermitted,
    /// `Limits::partial_bytes_total`: the connection with the oldest unfinished message was cut.
    PartialMessages,
    /// The private data of a request over RDMA: of an unknown version, or for other addresses than
    /// those of the request [IB-18], [IB-29].
    PrivateData,
    /// The peer proposes version 4 of the protocol over RDMA, which is another dialect; it is to
    /// propose 3.1 [IB-116].
    LaterVersion,
    /// The peer is connected, or both connect at once [IB-30].
    Raced,
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Local => "its address is local to this node",
            Self::Closing => "the node is closing",
            Self::Peers => "limit of peers",
            Self::PeersUnproven => "limit of peers that never sent a message",
            Self::LinksOfPeer => "limit of connections of one peer",
            Self::NotPermitted => "the list of peers does not permit it",
            Self::PartialMessages => "limit of unfinished messages",
            Self::PrivateData => "version or addresses of the request",
            Self::LaterVersion => "it proposes version 4 of the protocol, and is to propose 3.1",
            Self::Raced => "another connection of the peer exists",
        })
    }
}

/// Events that a waiting user registers for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Interest(pub(crate) u8);

impl Interest {
    /// A message or notification can be received.
    pub const READ: Self = Self(crate::socket::interest_bit::READ);
    /// A send that was refused may succeed now.
    pub const WRITE: Self = Self(crate::socket::interest_bit::WRITE);

    /// Tells whether everything in `other` is in `self`.
    pub const fn contains(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }
}

impl BitOr for Interest {
    type Output = Self;

    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

/// Operations on a socket that can succeed now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Readiness {
    /// A message or notification waits.
    pub readable: bool,
    /// There is room in the send queue. The destination may still be congested.
    pub writable: bool,
}

/// A message to send.
#[derive(Clone, Copy, Debug, Default)]
pub struct SendMsg<'a> {
    /// Destination; `None` stands for the connected one.
    pub name: Option<SocketAddr>,
    /// Payload, piece by piece.
    pub payload: &'a [IoSlice<'a>],
    /// Control messages in their order.
    pub control: &'a [SendControl],
    /// The payload in a buffer that stays as it is until the message is released, instead of
    /// `payload`: it is not copied.
    pub lent: Option<&'a Arc<Vec<u8>>>,
    /// RDMA operations to carry out first: at most one that moves data and one atomic.
    pub rdma: &'a [RdmaOp],
    /// The application wants a completion cookie (MSG_ZEROCOPY).
    pub zerocopy: bool,
    /// The caller waits if the send is refused. It matters for counters and monitoring only.
    pub blocking: bool,
    /// The sender was told before that there is room for this message
    /// ([`Node::send_room`](crate::Node::send_room)): neither congestion nor a full queue refuses
    /// it, but for a queue with as many messages as there may be.
    pub promised: bool,
}

/// A control message that accompanies a message to send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum SendControl {
    /// Cookie to be returned when the message is released; the program chooses it [ZC-4].
    ZcopyCookie(u32),
    /// Remote memory key for the receiver.
    RdmaDest(u64),
    /// Register memory and send its key.
    RdmaMap,
    /// Do an RDMA operation.
    RdmaArgs,
    /// Do an atomic operation.
    Atomic,
    /// A type at level SOL_RDS that does not exist.
    Unknown(u32),
}

/// A message that was accepted for sending.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sent {
    /// Payload bytes.
    pub len: usize,
    /// Link on which the message goes out; `None` while its path has no link.
    pub link: Option<LinkId>,
    /// Bytes that wait for `poll_transmit` on that link, this message's included.
    pub queued_bytes: usize,
}

impl Sent {
    /// A message of `len` bytes for which there is nothing to write.
    pub(crate) const fn without_link(len: usize) -> Self {
        Self { len, link: None, queued_bytes: 0 }
    }
}

/// Memory that messages take until they are released, and what they count for, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SendMemory {
    /// Memory of their frames, but for payloads that applications have lent.
    pub frames: usize,
    /// Memory of their records.
    pub records: usize,
    /// Their payloads, and 128 bytes for each.
    pub accounted: usize,
    /// Number of paths.
    pub paths: usize,
}

/// Messages of one socket to one destination that the node still keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OutstandingMessages {
    /// Destination.
    pub to: SocketAddr,
    /// Number of messages, including empty ones.
    pub messages: usize,
    /// Payload bytes.
    pub bytes: usize,
}

/// Options of a receive call.
#[derive(Clone, Copy, Debug, Default)]
pub struct RecvOpts {
    /// Leave the message in the queue.
    pub peek: bool,
    /// The caller takes control messages; without it notifications stay queued [B-17].
    pub want_control: bool,
    /// Most ends of RDMA operations that the caller takes at once; 0 stands for eight.
    pub statuses_max: usize,
}

/// Result of a receive call.
#[derive(Clone, Debug)]
pub struct Received {
    /// Sender; `None` with a notification alone.
    pub source: Option<SocketAddr>,
    /// Payload; `None` with a notification alone.
    pub data: Option<Rope>,
    /// Control messages in the kernel's order.
    pub control: Vec<Control>,
}

/// A message taken off the queue: copied to the caller's buffer, or left to the caller to copy.
#[derive(Clone, Debug)]
pub struct ReceivedInto {
    /// Sender.
    pub source: SocketAddr,
    /// Length of the message in bytes. Without `data`, its first bytes fill the caller's buffer.
    pub len: usize,
    /// Payload, if the caller has to copy it.
    pub data: Option<Rope>,
}

/// A control message that accompanies a received message.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Control {
    /// Port groups (port mod 64) in which a refused destination may be free now.
    #[doc(alias = "RDS_CMSG_CONG_UPDATE")]
    CongestionUpdate(u64),
    /// Remote memory key from the sender.
    #[doc(alias = "RDS_CMSG_RDMA_DEST")]
    RdmaDest(u64),
    /// How an RDMA operation ended.
    #[doc(alias = "RDS_CMSG_RDMA_STATUS")]
    RdmaStatus {
        /// Number that its sender gave it.
        token: u64,
        /// How it ended.
        status: RdmaStatus,
    },
    /// When the message was queued.
    Timestamp(Instant),
    /// Latencies of the receive path in nanoseconds.
    #[doc(alias = "RDS_CMSG_RXPATH_LATENCY")]
    Latency {
        /// The positions that the user asked for.
        trace: crate::socket::LatencyTrace,
        /// One interval for each position.
        nanos: [u64; 3],
    },
    /// Cookies of zero-copy messages that were sent and released, at most eight [ZC-6].
    #[doc(alias = "RDS_CMSG_ZCOPY_COMPLETION")]
    ZcopyCompletion(Vec<u32>),
}
