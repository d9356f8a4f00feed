//! A link: one TCP connection, with the framing of what comes in and the plan of what goes out.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::Arc;

use bowline_base::Instant;
use bowline_wire::rds::{HEADER_LEN, Header};

use crate::api::CloseReason;
use crate::ids::{ConnId, LinkId};
use crate::rxbuf::{Rope, RxBuf};

/// What a link is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    /// Opened by this node to serve a path.
    Dial,
    /// A knock: opened by this node, which has the larger address, so that the peer connects
    ///
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
    /// Accepted, but no path is free, or the peer has not said which path it is for.
    Extra,
    /// Closed by this node for sending; what the peer sent before is still read.
    Draining,
    /// Given up before this node saw it established. TCP may have established it meanwhile, and
    /// acknowledged what the peer sent: that is still read.
    Abandoned,
}

impl LinkState {
    /// The link is about to end; what comes on it still counts.
    pub(crate) const fn is_leaving(self) -> bool {
        matches!(self, Self::Draining | Self::Abandoned)
    }
}

/// The greeting that this node sends on a link.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum OurGreeting {
    #[default]
    NotDue,
    /// It goes out before anything else.
    Due,
    Sent,
}

/// The greeting that the peer sends on a link.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum PeerGreeting {
    /// The peer is not known to be a bowline node; messages do not wait.
    #[default]
    NotExpected,
    /// The peer is a bowline node that has not greeted on this link yet.
    Expected,
    Received,
}

/// How far the orderly end of a link has come, when its node ends [R-2050].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Farewell {
    #[default]
    NotDue,
    /// It goes out behind what is planned; no message is planned any more.
    Due,
    /// It is the last frame of the plan. When that is written, the link is drained.
    Planned,
}

/// The exchange that begins a link between bowline nodes [R-2002]: each side sends a probe without
/// a sequence number, and no message goes out before both have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Greeting {
    pub(crate) ours: OurGreeting,
    pub(crate) theirs: PeerGreeting,
    /// Another probe is to be sent outside the queue, since a kernel may have dropped the first.
    pub(crate) probe_again: bool,
    /// A frame other than a congestion map has come on this link.
    pub(crate) heard_frame: bool,
}

impl Greeting {
    /// Makes this node's greeting due, unless it was sent.
    pub(crate) fn owe(&mut self) {
        if self.ours == OurGreeting::NotDue {
            self.ours = OurGreeting::Due;
        }
    }

    /// Makes messages wait for the peer's greeting, unless it has come.
    pub(crate) fn expect(&mut self) {
        if self.theirs == PeerGreeting::NotExpected {
            self.theirs = PeerGreeting::Expected;
        }
    }

    /// Lets messages go out without the peer's greeting. A greeting that has come still tells who
    /// is at the other end of this link, whatever came on another one [R-2003].
    pub(crate) fn expect_no_longer(&mut self) {
        if self.theirs == PeerGreeting::Expected {
            self.theirs = PeerGreeting::NotExpected;
        }
    }

    pub(crate) fn is_received(self) -> bool {
        self.theirs == PeerGreeting::Received
    }

    /// Tells whether messages wait for the exchange to end.
    pub(crate) fn holds_messages(self) -> bool {
        match self.theirs {
            PeerGreeting::NotExpected => false,
            PeerGreeting::Expected => true,
            PeerGreeting::Received => self.ours != OurGreeting::Sent,
        }
    }
}

/// A stretch of the outgoing byte stream.
#[derive(Clone, Debug)]
pub(crate) enum Op {
    /// Bytes of the path's log.
    Log { from: u64, to: u64 },
    /// Bytes that are in no log: maps, probes, acknowledgements, headers of retransmissions.
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

/// Outgoing half of a link. Offsets count bytes of its stream.
#[derive(Debug, Default)]
pub(crate) struct Tx {
    /// Stretches that go out next, in order. They are committed: a message of which a part is
    /// here is sent to its end.
    pub(crate) plan: VecDeque<Op>,
    /// Bytes in `plan`.
    pub(crate) plan_bytes: u64,
    /// Bytes that this node's TCP has taken.
    pub(crate) written: u64,
    /// Bytes that the peer's TCP has acknowledged.
    pub(crate) acked: u64,
    /// Bytes that the driver took by `poll_transmit` and has not reported as written.
    pub(crate) in_flight: u64,
    /// The driver is writing: between `poll_transmit` and its report.
    pub(crate) busy: bool,
    /// TCP took no more; the driver reports when it does.
    pub(crate) blocked: bool,
    /// The highest end-to-end acknowledgement that came while the driver was writing. It is
    /// applied after the write, which may hold the acknowledged bytes.
    pub(crate) peer_ack: u64,
    /// TCP reported room while the driver was writing.
    pub(crate) writable: bool,
    /// The driver was asked to write by `Output::Transmit` and has not done so yet.
    pub(crate) signalled: bool,
}

/// A message of which a part has been received.
#[derive(Debug)]
pub(crate) struct Partial {
    pub(crate) header: Header,
    pub(crate) rope: Rope,
    /// Length of the payload in bytes.
    pub(crate) need: usize,
    pub(crate) first_seen: Instant,
}

/// The acknowledgement that this node owes a bowline peer on a link [R-2020].
#[derive(Debug, Default)]
pub(crate) struct AckOwed {
    /// Bytes of frames processed since the last acknowledgement; 0: none is owed.
    pub(crate) bytes: u64,
    /// The peer asked for it: it goes out as soon as the driver waits for input.
    pub(crate) asked: bool,
    /// The link stands in the node's list of links whose peers asked.
    pub(crate) listed: bool,
    /// It goes out with the next write.
    pub(crate) due: bool,
    /// The timer is armed that makes it due.
    pub(crate) timer_armed: bool,
}

impl AckOwed {
    /// An acknowledgement has gone out, alone or with something else.
    pub(crate) fn settle(&mut self) {
        (self.bytes, self.due, self.asked) = (0, false, false);
    }
}

/// Incoming half of a link.
#[derive(Debug)]
pub(crate) struct Rx {
    /// Buffers that were read and are not processed yet, oldest first.
    pub(crate) backlog: VecDeque<RxBuf>,
    /// Bytes of the first buffer that are processed.
    pub(crate) offset: usize,
    /// The first `head_len` bytes of a header that is split between two reads.
    pub(crate) head: [u8; HEADER_LEN],
    pub(crate) head_len: usize,
    pub(crate) partial: Option<Partial>,
    /// Bytes and frames received so far.
    pub(crate) bytes: u64,
    pub(crate) messages: u64,
    /// The link stands in the node's list of links with a backlog.
    pub(crate) listed: bool,
    /// The driver was told not to read, since a limit on memory is reached.
    pub(crate) paused: bool,
    pub(crate) ack: AckOwed,
}

/// One TCP connection.
#[derive(Debug)]
pub(crate) struct Link {
    pub(crate) conn: ConnId,
    /// Index of the path that the link serves.
    pub(crate) path: Option<u8>,
    /// Index of the path whose sequence numbers the peer uses on this link, when it is not `path`:
    /// until the peer has read for which path the link was dialled, or because the link leaves and
    /// takes no other path any more [R-2004].
    pub(crate) numbering_path: Option<u8>,
    /// Index of the path that the peer named on a link that it dialled, whatever its port says.
    pub(crate) named_path: Option<u8>,
    pub(crate) role: Role,
    pub(crate) state: LinkState,
    pub(crate) greeting: Greeting,
    pub(crate) farewell: Farewell,
    /// The peer acknowledges end to end, and nothing more can be acknowledged to it on this link,
    /// for the node ends: messages that come are not taken.
    pub(crate) deaf: bool,
    /// Counts the links of the connection: a later link has a higher serial.
    pub(crate) serial: u64,
    /// How often the peer has knocked while this link served path 0.
    pub(crate) knocks: u32,
    /// When the TCP connection was established, as this node saw it.
    pub(crate) since: Instant,
    /// Generation that the peer told on this link; 0: none yet.
    pub(crate) generation: u32,
    pub(crate) local: SocketAddr,
    pub(crate) remote: SocketAddr,
    /// The peer has shown that it serves this link, by a byte or by not closing it for
    /// `CONFIRM_TIME`.
    pub(crate) confirmed: bool,
    /// The link counts as confirmed once the driver has looked whether it is still open, and
    /// whether the driver has.
    pub(crate) confirm_when_checked: bool,
    pub(crate) checked: bool,
    /// Older links whose received bytes must be processed before this link is read.
    pub(crate) waits_for: Vec<LinkId>,
    /// Messages wait until the peer has shown what kind of node it is, or `PEER_KIND_TIME` has
    /// passed.
    pub(crate) awaits_peer_kind: bool,
    /// A probe came before the link served a path; it is answered when the link does.
    pub(crate) probe_pending: bool,
    pub(crate) tx: Tx,
    pub(crate) rx: Rx,
    /// Offsets in the stream where the latest message began and ends, for the info interface.
    pub(crate) last_start: u64,
    pub(crate) last_end: u64,
    /// What ended the connection before this node did.
    pub(crate) ended: Option<CloseReason>,
}

impl Link {
    /// Returns the path that incoming sequence numbers belong to.
    #[inline]
    pub(crate) fn incoming_path(&self) -> Option<u8> {
        self.numbering_path.or(self.path).or(self.named_path)
    }

    /// Returns the peer's path of a link that the peer dialled: the one that it named, or the one
    /// that its port tells, if its ports tell paths, [R-2004].
    #[inline]
    pub(crate) fn sender_path(&self) -> Option<u8> {
        let by_port = (self.remote.port() % 8) as u8;
        (self.role == Role::Accepted).then(|| self.named_path.unwrap_or(by_port))
    }

    /// Returns the path that acknowledgements on this link are for; `None` while the peer may still
    /// mean the path that the link served before.
    pub(crate) fn acked_path(&self) -> Option<u8> {
        self.path.filter(|_| self.numbering_path.is_none())
    }

    /// Returns the bytes that are held of an incomplete message.
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
            numbering_path: None,
            named_path: None,
            role,
            state,
            greeting: Greeting::default(),
            farewell: Farewell::default(),
            deaf: false,
            serial: 0,
            knocks: 0,
            since: Instant::default(),
            generation: 0,
            local,
            remote,
            confirmed: false,
            confirm_when_checked: false,
            checked: false,
            waits_for: Vec::new(),
            awaits_peer_kind: false,
            probe_pending: false,
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
                ack: AckOwed::default(),
            },
            last_start: 0,
            last_end: 0,
            ended: None,
        }
    }
}
