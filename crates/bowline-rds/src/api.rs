//! What goes into a node and what comes out of it.

use std::io::IoSlice;
use std::net::{IpAddr, SocketAddr};
use std::ops::BitOr;

use bowline_base::Instant;

use crate::ids::{LinkId, SocketId};
use crate::rxbuf::Rope;

/// What a node wants from its driver.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Output {
    /// Open a TCP connection without blocking; answered by `handle_connected` or `handle_closed`.
    Connect {
        /// Names the connection from now on.
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
        /// Which one.
        link: LinkId,
        /// In what way.
        how: CloseHow,
    },
    /// The link has something to send and is neither busy nor blocked. Repeated only after
    /// `poll_transmit`.
    Transmit {
        /// Which one.
        link: LinkId,
    },
    /// Something that a user registered for has happened; the registration is used up.
    Wake {
        /// Which socket.
        socket: SocketId,
        /// What happened.
        ready: Interest,
    },
    /// Reading, refused by `wants_read`, is wanted again.
    Resume {
        /// Which link.
        link: LinkId,
    },
    /// Read what has arrived on the link, make TCP find out whether the peer still has it, then
    /// call `handle_checked`.
    CheckAlive {
        /// Which link.
        link: LinkId,
    },
    /// Something for the operator's log.
    Event(Event),
}

/// Why an accepted TCP connection is not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TurnedAway {
    /// It was made only to be noticed, and this node dials back: reset it at once.
    Knock,
    /// A limit is reached, or the node is closing: keep it for a moment unread, then reset it
    ///
    Refused,
}

/// How to close a TCP connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CloseHow {
    /// With a reset, at once. The node has forgotten the link.
    Reset,
    /// In the ordinary way, at once. The node has forgotten the link.
    Fin,
    /// Send FIN, read until end of file, an error or two seconds, then `handle_closed`.
    Drain,
    /// Take nothing more from the peer, read what TCP has acknowledged to it, then `handle_closed`
    /// and a reset. Asked for several links, in this order.
    Cut,
}

/// Why a TCP connection is gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum CloseReason {
    /// Nobody listens.
    Refused,
    /// No route, or the host does not answer.
    Unreachable,
    /// No answer in time, or keepalive failed.
    TimedOut,
    /// The peer closed it.
    Eof,
    /// The peer reset it.
    Reset,
    /// The local address is not there.
    AddrNotAvailable,
    /// Another error number of the system.
    Other(i32),
}

/// Something an operator may want to know. Rate limits are the driver's part.
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
    },
    /// A peer broke a rule and lost its connection.
    Misbehaved {
        /// Remote address.
        remote: IpAddr,
        /// Which rule.
        what: &'static str,
    },
    /// A peer has restarted.
    PeerRestarted {
        /// Remote address.
        remote: IpAddr,
    },
    /// A connection was refused because of a limit.
    Refused {
        /// Remote address.
        remote: IpAddr,
        /// Which limit.
        limit: &'static str,
    },
}

/// What a waiting user wants to hear of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Interest(pub(crate) u8);

impl Interest {
    /// A message or notification can be received.
    pub const READ: Self = Self(crate::socket::want::READ);
    /// A send that was refused may succeed now.
    pub const WRITE: Self = Self(crate::socket::want::WRITE);

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

/// What can be done with a socket now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Readiness {
    /// A message or notification waits.
    pub readable: bool,
    /// There is room in the send queue; says nothing of congestion.
    pub writable: bool,
}

/// A message to send.
#[derive(Clone, Copy, Debug, Default)]
pub struct SendMsg<'a> {
    /// Destination; without it the connected one.
    pub name: Option<SocketAddr>,
    /// Payload, piece by piece.
    pub payload: &'a [IoSlice<'a>],
    /// Control messages in their order.
    pub control: &'a [SendControl],
    /// The application wants a completion cookie (MSG_ZEROCOPY).
    pub zerocopy: bool,
    /// The caller will wait when refused; matters for counters and monitoring only.
    pub blocking: bool,
}

/// A control message given with a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum SendControl {
    /// Cookie to be returned when the message is released.
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

/// A message taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sent {
    /// Payload bytes.
    pub len: usize,
    /// Link it will go out on, when that is up.
    pub link: Option<LinkId>,
    /// Bytes that wait for `poll_transmit` on that link, this message's included.
    pub queued_bytes: usize,
}

/// What a node keeps of the messages of one socket to one destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Held {
    /// Destination.
    pub to: SocketAddr,
    /// Messages, empty ones included.
    pub messages: usize,
    /// Payload bytes.
    pub bytes: usize,
}

/// How to receive.
#[derive(Clone, Copy, Debug, Default)]
pub struct RecvOpts {
    /// Leave the message in the queue.
    pub peek: bool,
    /// The caller takes control messages; without it notifications stay queued [B-17].
    pub want_control: bool,
}

/// What was received.
#[derive(Clone, Debug)]
pub struct Received {
    /// Sender; `None` with a notification alone.
    pub source: Option<SocketAddr>,
    /// Payload; `None` with a notification alone.
    pub data: Option<Rope>,
    /// Control messages in the kernel's order.
    pub control: Vec<Control>,
}

/// A message that was copied, or is to be.
#[derive(Clone, Debug)]
pub struct Taken {
    /// Sender.
    pub source: SocketAddr,
    /// Bytes of the message. As many as fit are in the buffer, unless there is `data`.
    pub len: usize,
    /// Payload that the caller has to copy itself.
    pub data: Option<Rope>,
}

/// A control message given with a received one.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Control {
    /// Port groups (port mod 64) in which a refused destination may be free now.
    #[doc(alias = "RDS_CMSG_CONG_UPDATE")]
    CongestionUpdate(u64),
    /// Remote memory key from the sender.
    #[doc(alias = "RDS_CMSG_RDMA_DEST")]
    RdmaDest(u64),
    /// When the message was queued.
    Timestamp(Instant),
    /// Receive path latency, ns.
    #[doc(alias = "RDS_CMSG_RXPATH_LATENCY")]
    Latency {
        /// What was asked for.
        trace: crate::socket::LatencyTrace,
        /// One interval for each position.
        nanos: [u64; 3],
    },
    /// Cookies of zero-copy messages that are through.
    #[doc(alias = "RDS_CMSG_ZCOPY_COMPLETION")]
    ZcopyCompletion(Vec<u32>),
}
