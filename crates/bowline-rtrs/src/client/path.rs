//! A path as the program sees it: two addresses, a state, counters.

use core::time::Duration;

use bowline_wire::rtrs::Uuid;

use super::{ClientStats, PathAddr};
use crate::{Instant, PathId};

/// State of a path [RS-1].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PathState {
    /// An incarnation is being connected.
    Connecting,
    /// Connecting has failed, and the incarnation is being torn down.
    ConnectingErr,
    /// The connection is lost; the next attempt is pending.
    Reconnecting,
    /// Carries IO.
    Connected,
    /// Being closed by command.
    Closing,
    /// Closed, but still listed.
    Closed,
    /// Removed.
    Dead,
}

impl PathState {
    /// Whether the transition table allows this change.
    pub(super) const fn may_become(self, to: Self) -> bool {
        use PathState::{
            Closed, Closing, Connected, Connecting, ConnectingErr, Dead, Reconnecting,
        };
        match to {
            Connecting => matches!(self, Reconnecting),
            Reconnecting => matches!(self, Connected | ConnectingErr | Closed),
            Connected | ConnectingErr => matches!(self, Connecting),
            Closing => matches!(self, Connecting | ConnectingErr | Reconnecting | Connected),
            Closed => matches!(self, Closing),
            Dead => matches!(self, Closed),
        }
    }
}

/// The state of a path, for display.
#[derive(Clone, Debug)]
pub struct PathInfo<'a> {
    /// Id of the path.
    pub id: PathId,
    /// Addresses of the path.
    pub addr: PathAddr,
    /// State of the path.
    pub state: PathState,
    /// Round-trip time of the last heartbeat; 0 before the first answer.
    pub latency: Duration,
    /// Requests in flight.
    pub inflight: u32,
    /// Counters.
    pub stats: &'a ClientStats,
}

/// The state the program wants a path to have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Goal {
    Up,
    Closed,
    Removed,
}

/// The call that waits for the first connection of a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FirstConnect {
    /// `open`.
    Opening,
    /// `add_path`.
    Adding,
    /// None: the path has been connected.
    Done,
}

/// The state of a `reconnect_path` call.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum ManualReconnect {
    /// None is pending.
    #[default]
    No,
    /// Waiting for the end of the present incarnation.
    Ordered,
    /// Waiting for the outcome of the present attempt.
    Running,
}

#[derive(Debug)]
pub(super) struct Path {
    pub(super) addr: PathAddr,
    pub(super) uuid: Uuid,
    pub(super) state: PathState,
    pub(super) goal: Goal,
    pub(super) first_connect: FirstConnect,
    /// The present incarnation, or the one whose end the path waits for.
    pub(super) incarnation: Option<PathId>,
    /// Its next connection may create a session at the server [RT-34].
    pub(super) first: bool,
    pub(super) recon_cnt: u16,
    /// Attempts since the path was lost [RS-13].
    pub(super) attempts: u32,
    /// Attempts since the path was lost that found the server not ready.
    pub(super) busy: u32,
    /// Position in the series of delays.
    pub(super) backoff: u32,
    pub(super) retry_at: Option<Instant>,
    /// When the path was connected last.
    pub(super) up_at: Instant,
    /// When the path was lost.
    pub(super) lost_at: Instant,
    /// The queue depth that the server announced first [RT-30].
    pub(super) depth: Option<u16>,
    /// The server announces another depth now: the path is not reconnected automatically [RS-15].
    pub(super) changed: bool,
    pub(super) manual: ManualReconnect,
    pub(super) latency: Duration,
    pub(super) stats: ClientStats,
}

impl Path {
    pub(super) fn new(
        addr: PathAddr,
        uuid: Uuid,
        first: bool,
        first_connect: FirstConnect,
    ) -> Self {
        Self {
            addr,
            uuid,
            state: PathState::Connecting,
            goal: Goal::Up,
            first_connect,
            incarnation: None,
            first,
            recon_cnt: 0,
            attempts: 0,
            busy: 0,
            backoff: 0,
            retry_at: None,
            up_at: Instant::default(),
            lost_at: Instant::default(),
            depth: None,
            changed: false,
            manual: ManualReconnect::No,
            latency: Duration::ZERO,
            stats: ClientStats::default(),
        }
    }
}
