//! A link: one TCP connection, with the framing of what comes in and the plan of what goes out.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::Arc;

use bowline_base::Instant;
use bowline_wire::rds::{HEADER_LEN, Header};

use crate::ids::{ConnId, LinkId};
use crate::rxbuf::{Rope, RxBuf};

/// What a link is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    /// Opened by this node, to be put in service.
    Dial,
    /// Opened by this node only to be noticed.
    Knock,
    /// Opened by the peer.
    Accepted,
}

/// How far a link has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LinkState {
    /// TCP handshake under way.
    Connecting,
    /// Serves the path.
    Serving,
    /// Accepted, but no path is free, or it is not known yet for which one it is.
    Extra,
    /// This node closed its direction and reads what is left.
    Draining,
}

/// The greeting of a link between bowline nodes [R-2002]: each side sends a probe that is not
/// numbered, and no message goes out before both are through.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Hello {
    /// The link begins with a greeting, whoever the peer is.
    pub(crate) due: bool,
    /// The peer is a bowline node: messages wait until both have greeted.
    pub(crate) needed: bool,
    pub(crate) sent: bool,
    pub(crate) got: bool,
    /// A further probe is to be sent, outside the queue.
    pub(crate) remind: bool,
    /// Something other than a map has come.
    pub(crate) spoken: bool,
}

impl Hello {
    /// Messages have to wait.
    pub(crate) const fn pending(self) -> bool {
        self.needed && !(self.sent && self.got)
    }
}

/// A stretch of the outgoing byte stream.
#[derive(Clone, Debug)]
pub(crate) enum Op {
    /// Bytes of the path's log.
    Log { from: u64, to: u64 },
    /// Bytes made for the purpose: maps, probes, acknowledgements, headers of retransmissions.
    Inline { bytes: Arc<Vec<u8>>, from: usize },
}

impl Op {
    pub(crate) fn len(&self) -> u64 {
        match self {
            Self::Log { from, to } => to - from,
            Self::Inline { bytes, from } => (bytes.len() - from) as u64,
        }
    }
}

/// Outgoing half.
#[derive(Debug, Default)]
pub(crate) struct Tx {
    /// Committed to the wire, not written yet.
    pub(crate) plan: VecDeque<Op>,
    pub(crate) plan_bytes: u64,
    /// Bytes TCP has taken.
    pub(crate) written: u64,
    /// Bytes the peer's TCP has acknowledged.
    pub(crate) acked: u64,
    /// Bytes handed out by `poll_transmit` and not reported yet.
    pub(crate) in_flight: u64,
    pub(crate) busy: bool,
    pub(crate) blocked: bool,
    /// The peer's acknowledgement of what a write in progress holds.
    pub(crate) peer_ack: u64,
    /// TCP reported room while a write was under way.
    pub(crate) writable: bool,
    /// `Output::Transmit` is out and not answered.
    pub(crate) signalled: bool,
}

/// A message being received.
#[derive(Debug)]
pub(crate) struct Partial {
    pub(crate) header: Header,
    pub(crate) rope: Rope,
    pub(crate) need: usize,
    pub(crate) first_seen: Instant,
}

/// Incoming half.
#[derive(Debug)]
pub(crate) struct Rx {
    pub(crate) backlog: VecDeque<RxBuf>,
    /// Bytes of the backlog's first buffer that are done.
    pub(crate) offset: usize,
    pub(crate) head: [u8; HEADER_LEN],
    pub(crate) head_len: usize,
    pub(crate) partial: Option<Partial>,
    pub(crate) bytes: u64,
    pub(crate) messages: u64,
    /// In the node's list of links with a backlog.
    pub(crate) listed: bool,
    /// Reading was refused.
    pub(crate) paused: bool,
    /// Acknowledgement owed to a bowline peer, in bytes of frames processed.
    pub(crate) ack_owed: u64,
    /// The peer asked for it.
    pub(crate) ack_asked: bool,
    /// In the node's list of links that were asked.
    pub(crate) ack_listed: bool,
    pub(crate) ack_now: bool,
    pub(crate) ack_timer: bool,
}

/// One TCP connection.
#[derive(Debug)]
pub(crate) struct Link {
    pub(crate) conn: ConnId,
    pub(crate) path: Option<u8>,
    /// The path whose numbers the peer uses here: another one than `path` until it has read which
    /// one was dialled [R-2004].
    pub(crate) numbers: Option<u8>,
    pub(crate) role: Role,
    pub(crate) state: LinkState,
    pub(crate) hello: Hello,
    /// Grows with every link of the peer.
    pub(crate) serial: u64,
    /// How often the peer has asked to be connected to while this link was path 0.
    pub(crate) knocks: u32,
    /// When its TCP connection was established, as far as this node knows.
    pub(crate) since: Instant,
    /// Generation the peer has told on this link; 0: none yet.
    pub(crate) generation: u32,
    pub(crate) local: SocketAddr,
    pub(crate) remote: SocketAddr,
    /// The peer has shown that it serves this connection.
    pub(crate) confirmed: bool,
    /// It counts as served when it has been looked at; and it has been.
    pub(crate) confirm_checked: bool,
    pub(crate) checked: bool,
    /// Is not read until what these older links have received is processed.
    pub(crate) waits_for: Vec<LinkId>,
    /// Messages wait until the peer has said who it is, or a moment has passed.
    pub(crate) shy: bool,
    /// A probe came before the link had a path; it is answered on that path.
    pub(crate) probed: bool,
    pub(crate) tx: Tx,
    pub(crate) rx: Rx,
    /// TCP positions of the last message started, for the info interface.
    pub(crate) last_start: u64,
    pub(crate) last_end: u64,
}

impl Link {
    /// The path that what comes on this link belongs to.
    #[inline]
    pub(crate) fn incoming_path(&self) -> Option<u8> {
        self.numbers.or(self.path)
    }

    /// The path that acknowledgements on this link are for, if that is sure: while the peer moves
    /// it from one path to another, what it says may be of either.
    pub(crate) fn acked_path(&self) -> Option<u8> {
        self.path.filter(|_| self.numbers.is_none())
    }

    /// Bytes held of a message that is not complete.
    pub(crate) fn partial_bytes(&self) -> usize {
        self.rx.partial.as_ref().map_or(0, |p| p.rope.len())
    }

    pub(crate) fn new(
        conn: ConnId,
        path: Option<u8>,
        role: Role,
        state: LinkState,
        local: SocketAddr,
        remote: SocketAddr,
    ) -> Self {
        Self {
            conn,
            path,
            numbers: None,
            role,
            state,
            hello: Hello::default(),
            serial: 0,
            knocks: 0,
            since: Instant::default(),
            generation: 0,
            local,
            remote,
            confirmed: false,
            confirm_checked: false,
            checked: false,
            waits_for: Vec::new(),
            shy: false,
            probed: false,
            tx: Tx::default(),
            rx: Rx {
                backlog: VecDeque::new(),
                offset: 0,
                head: [0; HEADER_LEN],
                head_len: 0,
                partial: None,
                bytes: 0,
                messages: 0,
                listed: false,
                paused: false,
                ack_owed: 0,
                ack_asked: false,
                ack_listed: false,
                ack_now: false,
                ack_timer: false,
            },
            last_start: 0,
            last_end: 0,
        }
    }
}
