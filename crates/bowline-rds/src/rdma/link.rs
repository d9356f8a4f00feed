//! The state of one connection over RDMA.

use std::sync::Arc;

use bowline_base::Instant;
use bowline_wire::rds::{BowlineConnect, FRAGMENT_LEN, Header, MAP_LEN};

use super::Credits;
use crate::api::CloseReason;
use crate::ids::ConnId;
use crate::link::{Farewell, Partial};

/// How far a connection has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RdmaState {
    /// The REQ is under way.
    Connecting,
    /// The peer's request is accepted, and its RTU is under way.
    Accepted,
    /// In service.
    Up,
    /// Ended by this node; requests are being flushed.
    Closing,
}

/// The message that is being sent, frame by frame. It stands before the first message that was not
/// begun.
#[derive(Clone, Debug)]
pub(crate) struct Sending {
    /// Header of all its frames [IB-54].
    pub(crate) header: Header,
    /// Offset of the rest of the payload in the path's log, and where the payload ends.
    pub(crate) from: u64,
    pub(crate) to: u64,
    pub(crate) fence: bool,
}

/// The congestion map that is being sent.
#[derive(Clone, Debug)]
pub(crate) struct MapFrames {
    pub(crate) header: Header,
    pub(crate) bytes: Arc<Vec<u8>>,
    pub(crate) sent: usize,
}

impl MapFrames {
    /// Number of bytes of the next frame.
    pub(crate) fn next_len(&self, fragment: usize) -> usize {
        fragment.min(MAP_LEN - self.sent)
    }
}

/// What the request of an accepted connection said. Anybody can send one in the name of a peer
/// [IB-111].
#[derive(Clone, Copy, Debug)]
pub(crate) struct Said {
    pub(crate) bowline: Option<BowlineConnect>,
    pub(crate) ack: u64,
}

/// A look at whether the peer still has a connection for which it has sent a request [IB-113].
#[derive(Clone, Copy, Debug)]
pub(crate) struct Check {
    /// The peer has the connection if a request of this id, or a later one, completes.
    pub(crate) from: u64,
    /// When the connection is ended otherwise.
    pub(crate) until: Instant,
}

/// Outgoing half of a connection.
#[derive(Debug, Default)]
pub(crate) struct RdmaTx {
    /// Number of requests that may be outstanding.
    pub(crate) slots: usize,
    /// Id of the next request.
    pub(crate) next: u64,
    /// Requests with lower ids are complete.
    pub(crate) retired: u64,
    /// Requests since the last one that has a completion.
    pub(crate) unsignalled: u32,
    pub(crate) sending: Option<Sending>,
    pub(crate) map: Option<MapFrames>,
    /// The driver is posting: between `poll_rdma_requests` and its report.
    pub(crate) busy: bool,
    /// There was a reason to post while the driver was posting.
    pub(crate) again: bool,
    /// The driver was asked to post and has not done so yet.
    pub(crate) signalled: bool,
    /// A pass ended for want of room or credits.
    pub(crate) blocked: bool,
    /// Id of the acknowledgement that is outstanding. There is one at a time [IB-66].
    pub(crate) ack_outstanding: Option<u64>,
    /// Number of the newest message that was begun, and of the newest one that asks for an
    /// acknowledgement.
    pub(crate) newest: u64,
    pub(crate) asked: u64,
    /// A timer runs that has the acknowledgement of the newest message asked for.
    pub(crate) ask_armed: bool,
    /// The farewell of a node that ends: its last acknowledgement, behind what was begun.
    pub(crate) farewell: Farewell,
}

impl RdmaTx {
    /// Number of requests that may be posted.
    pub(crate) const fn room(&self) -> usize {
        self.slots.saturating_sub((self.next - self.retired) as usize)
    }
}

/// Incoming half of a connection.
#[derive(Debug, Default)]
pub(crate) struct RdmaRx {
    pub(crate) partial: Option<Partial>,
    /// Number of the last complete message; 0: none [IB-64].
    pub(crate) ack: u64,
    /// The peer asked for an acknowledgement, or is to learn of credits.
    pub(crate) ack_due: bool,
    /// Messages came since the last acknowledgement.
    pub(crate) unacknowledged: bool,
    /// The driver was told not to post receives, since a limit on memory is reached.
    pub(crate) paused: bool,
    /// Nothing more is acknowledged on this connection, for the node ends: messages that come are
    /// not taken.
    pub(crate) deaf: bool,
}

/// One connection over RDMA.
#[derive(Debug)]
pub(crate) struct RdmaLink {
    pub(crate) conn: ConnId,
    pub(crate) state: RdmaState,
    /// Number of receives that the driver keeps posted.
    pub(crate) receives: usize,
    /// When the attempt to connect, or the accepted connection, began.
    pub(crate) begun: Instant,
    /// When the connection went into service.
    pub(crate) since: Option<Instant>,
    /// The highest acknowledgement of the peer.
    pub(crate) acked: u64,
    /// Payload bytes of a full frame.
    pub(crate) fragment: usize,
    pub(crate) credits: Credits,
    pub(crate) tx: RdmaTx,
    pub(crate) rx: RdmaRx,
    /// What the peer's request said, until an RTU or a frame shows that the peer sent it.
    pub(crate) said: Option<Said>,
    /// The peer seems to have lost the connection.
    pub(crate) check: Option<Check>,
    /// When it was last asked whether the peer still has the connection with a map that refuses
    /// messages.
    pub(crate) asked_at: Instant,
    /// What ended the connection before this node did.
    pub(crate) ended: Option<CloseReason>,
}

impl RdmaLink {
    pub(crate) fn new(
        conn: ConnId,
        state: RdmaState,
        (slots, receives): (usize, usize),
        credits: Credits,
    ) -> Self {
        Self {
            conn,
            state,
            receives,
            begun: Instant::default(),
            since: None,
            acked: 0,
            fragment: FRAGMENT_LEN,
            credits,
            tx: RdmaTx { slots, ..RdmaTx::default() },
            rx: RdmaRx::default(),
            said: None,
            check: None,
            asked_at: Instant::default(),
            ended: None,
        }
    }

    /// Tells whether the peer has this node's farewell, and with it the last acknowledgement: until
    /// the frame is complete it may not have come.
    pub(crate) fn has_told(&self) -> bool {
        self.tx.farewell == Farewell::Planned && self.tx.ack_outstanding.is_none()
    }

    /// Returns the bytes that are held of an incomplete message.
    pub(crate) fn partial_bytes(&self) -> usize {
        self.rx.partial.as_ref().map_or(0, |partial| partial.rope.len())
    }
}
