//! A path as the program sees it: two addresses, a state, counters.

use core::time::Duration;

use bowline_wire::rtrs::Uuid;

use super::{ClientStats, PathAddr};
use crate::{Instant, PathId};

/// State of a path [RS-1].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PathState {
    /// A link is being made.
    Connecting,
    /// Making a link has failed, and what there was of it is being taken down.
    ConnectingErr,
    /// The link is lost; the next one is waited for.
    Reconnecting,
    /// Carries IO.
    Connected,
    /// Being closed on order.
    Closing,
    /// Closed, and listed still.
    Closed,
    /// Removed.
    Dead,
}

impl PathState {
    /// Tells whether the change is one of the table; nobody makes another.
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

/// A path, for those who look.
#[derive(Clone, Debug)]
pub struct PathInfo<'a> {
    /// Its name.
    pub id: PathId,
    /// Its addresses.
    pub addr: PathAddr,
    /// Its state.
    pub state: PathState,
    /// Time the last heartbeat took to be answered; 0 before the first.
    pub latency: Duration,
    /// Requests in flight.
    pub inflight: u32,
    /// Counters.
    pub stats: &'a ClientStats,
}

/// What the program wants of a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Goal {
    Up,
    Closed,
    Removed,
}

/// Who waits for the path to come up for the first time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Join {
    /// `open`.
    Opening,
    /// `add_path`.
    Adding,
    /// Nobody: it has been up.
    Member,
}

/// Whether `reconnect_path` waits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Manual {
    /// No.
    #[default]
    No,
    /// For the end of the present link.
    Ordered,
    /// For the outcome of the present attempt.
    Running,
}

#[derive(Debug)]
pub(super) struct Path {
    pub(super) addr: PathAddr,
    pub(super) uuid: Uuid,
    pub(super) state: PathState,
    pub(super) goal: Goal,
    pub(super) join: Join,
    /// The link it has, or is making, or whose end it waits for.
    pub(super) link: Option<PathId>,
    /// Its next connection may make a session at the server [RT-34].
    pub(super) first: bool,
    pub(super) recon_cnt: u16,
    /// Attempts since it was lost [RS-13].
    pub(super) attempts: u32,
    /// Attempts since it was lost that the server was not ready for.
    pub(super) busy: u32,
    /// Place in the series of delays.
    pub(super) backoff: u32,
    pub(super) retry_at: Option<Instant>,
    /// When it came up last.
    pub(super) up_at: Instant,
    /// When it was lost.
    pub(super) lost_at: Instant,
    /// What the server announced the first time [RT-30].
    pub(super) depth: Option<u16>,
    /// The server announces another depth now: it is not connected again by itself [RS-15].
    pub(super) changed: bool,
    pub(super) manual: Manual,
    pub(super) latency: Duration,
    pub(super) stats: ClientStats,
}

impl Path {
    pub(super) fn new(addr: PathAddr, uuid: Uuid, first: bool, join: Join) -> Self {
        Self {
            addr,
            uuid,
            state: PathState::Connecting,
            goal: Goal::Up,
            join,
            link: None,
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
            manual: Manual::No,
            latency: Duration::ZERO,
            stats: ClientStats::default(),
        }
    }
}
