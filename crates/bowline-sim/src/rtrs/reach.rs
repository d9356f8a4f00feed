//! Coverage: names for every situation that runs of sessions can reach, so that a situation that no
//! seed reaches shows.
//!
//! Runs of [`Scenario::SingleFault`] are counted by a test of their own, and not here.

use bowline_rnbd::IoOp;
use bowline_rtrs::Policy;
use bowline_rtrs::client::{PathState, ReadKeys};
use bowline_rtrs::server::ServerCounters;

use super::client::{Client, Stage};
use super::plan::{Fault, Plan, Scenario};
use super::trial::TrialKind;
use crate::engine::coverage::Coverage;
use crate::engine::coverage::TIME_SHARES;
use crate::roce::reach::table;

/// Changes of a client's path, from the row's state to the column's.
const PATHS: [[&str; 7]; 7] = table!(
    [
        "Connecting",
        "ConnectingErr",
        "Reconnecting",
        "Connected",
        "Closing",
        "Closed",
        "Dead"
    ]
    [
        "then Connecting",
        "then ConnectingErr",
        "then Reconnecting",
        "then Connected",
        "then Closing",
        "then Closed",
        "then Dead"
    ]
);
/// The changes that paths can make, as row and column.
const CHANGES: [(usize, usize); 11] =
    [(0, 1), (0, 3), (0, 4), (1, 2), (1, 4), (2, 0), (2, 4), (3, 2), (3, 4), (4, 5), (5, 2)];

const fn path_row(state: PathState) -> usize {
    match state {
        PathState::Connecting => 0,
        PathState::ConnectingErr => 1,
        PathState::Reconnecting => 2,
        PathState::Connected => 3,
        PathState::Closing => 4,
        PathState::Closed => 5,
        PathState::Dead => 6,
    }
}

/// Records the change of a client's path; its first state is not a change.
pub(super) fn path(coverage: &mut Coverage, from: PathState, to: PathState) {
    coverage.hit("path of a client", PATHS[path_row(from)][path_row(to)]);
}

/// Events of sessions, by the stage of the program.
const SESSIONS: [[&str; 6]; 4] = table!(
    ["opened", "not opened", "lost its last path", "has a path again"]
    ["at first", "while disks are mapped", "while it works", "in the end", "being closed", "over"]
);

/// An event of a session: a row of [`SESSIONS`].
#[derive(Clone, Copy, Debug)]
pub(super) enum SessionEventClass {
    Opened,
    NotOpened,
    Lost,
    Back,
}

const fn session_column(stage: Stage) -> usize {
    match stage {
        Stage::Opening => 0,
        Stage::Mapping => 1,
        Stage::Running => 2,
        Stage::Verifying | Stage::FinalIo => 3,
        Stage::Unmapping | Stage::Closing => 4,
        Stage::Closed => 5,
    }
}

pub(super) fn session(coverage: &mut Coverage, word: SessionEventClass, stage: Stage) {
    coverage.hit("session", SESSIONS[word as usize][session_column(stage)]);
}

/// Faults, by the stage of the client they affect.
const FAULTS: [[&str; 6]; 14] = table!(
    [
        "cut",
        "cut one way",
        "held",
        "held one way",
        "all lines held",
        "server dies",
        "client dies",
        "server stalls",
        "client stalls",
        "order about a path",
        "server closes a path",
        "server dies unseen",
        "a device falls mute",
        "a machine falls silent"
    ]
    ["no session", "opening", "mapping", "idle", "busy", "closing"]
);

/// A class of faults: a row of [`FAULTS`].
#[derive(Clone, Copy, Debug)]
pub(super) enum FaultClass {
    Cut,
    HalfCut,
    MapState,
    HalfHeld,
    AllHeld,
    ServerDies,
    ClientDies,
    ServerStalls,
    ClientStalls,
    Order,
    Kick,
    UnnoticedCrash,
    Mute,
    Silent,
}

impl FaultClass {
    /// The class of a fault, of the server or of a client.
    pub(super) const fn of(fault: Fault, server: bool) -> Self {
        match fault {
            Fault::Cut => Self::Cut,
            Fault::HalfCut => Self::HalfCut,
            Fault::Crash if server => Self::ServerDies,
            Fault::Crash => Self::ClientDies,
            Fault::Stall if server => Self::ServerStalls,
            Fault::Stall => Self::ClientStalls,
            Fault::Path => Self::Order,
            Fault::Kick => Self::Kick,
            Fault::UnnoticedCrash => Self::UnnoticedCrash,
        }
    }
}

/// Records a fault that affects a client.
pub(super) fn fault(coverage: &mut Coverage, class: FaultClass, client: &Client) {
    let column = match client.active.as_ref().map(|active| active.stage) {
        None | Some(Stage::Closed) => 0,
        Some(Stage::Opening) => 1,
        Some(Stage::Mapping) => 2,
        Some(Stage::Unmapping | Stage::Closing) => 5,
        Some(_) if client.requests_running() == 0 => 3,
        Some(_) => 4,
    };
    coverage.hit("fault", FAULTS[class as usize][column]);
}

/// Requests of programs, by their outcome.
const REQUESTS: [[&str; 4]; 5] = table!(
    ["read", "write", "flush", "discard", "write zeroes"]
    ["done", "lost with the session", "given up with its disk", "refused without its disk"]
);

/// The outcome of a request: a column of [`REQUESTS`].
#[derive(Clone, Copy, Debug)]
pub(super) enum Ended {
    Done,
    Lost,
    Dropped,
    Refused,
}

pub(super) fn ended(coverage: &mut Coverage, op: IoOp, how: Ended) {
    let row = match op {
        IoOp::Read => 0,
        IoOp::Write => 1,
        IoOp::Flush => 2,
        IoOp::Discard | IoOp::SecureErase => 3,
        IoOp::WriteZeroes => 4,
    };
    coverage.hit("request", REQUESTS[row][how as usize]);
}

/// Commands for paths, by their outcome.
const ORDERS: [[&str; 2]; 4] =
    table!(["remove", "disconnect", "reconnect", "add"]["taken", "refused"]);

pub(super) fn ordered(coverage: &mut Coverage, what: u64, taken: bool) {
    coverage.hit("order", ORDERS[what.min(3) as usize][usize::from(!taken)]);
}

/// Events of disks.
const DISKS: [&str; 6] = [
    "mapped",
    "not mapped",
    "given up, idle",
    "given up, busy",
    "given up while it is mapped",
    "given up at once after requests",
];

/// An event of a disk: one of [`DISKS`].
#[derive(Clone, Copy, Debug)]
pub(super) enum DiskEventClass {
    Mapped,
    NotMapped,
    Idle,
    Busy,
    Mapping,
    AfterSubmit,
}

pub(super) fn disk(coverage: &mut Coverage, what: DiskEventClass) {
    coverage.hit("disk", DISKS[what as usize]);
}

/// Misbehaviour of clients and servers, and other rare events.
pub(super) const MISDEEDS: [&str; 7] = [
    "a write with the key of a request",
    "a write with the next key",
    "a key left to the client",
    "a write with a key that was",
    "a silence noticed",
    "the server closes, and starts again",
    "attempts to connect are used up",
];

/// One of [`MISDEEDS`].
#[derive(Clone, Copy, Debug)]
pub(super) enum Misdeed {
    Attack,
    AttackNext,
    KeyLeft,
    LateWrite,
    Noticed,
    Restart,
    UsedUp,
}

pub(super) fn misdeed(coverage: &mut Coverage, what: Misdeed) {
    coverage.hit("beside", MISDEEDS[what as usize]);
}

/// Choices that plans can make.
const CHOICES: [&str; 27] = [
    "round robin",
    "least inflight",
    "least latency",
    "long-lived key",
    "keys for single READs",
    "servers tell keys",
    "clients count keys",
    "READs to several places",
    "waits as kernels",
    "attempts to connect bounded",
    "no attempt to connect",
    "requests wait for the session",
    "requests fail with the session",
    "polled connections",
    "one connection for all",
    "several paths",
    "several disks",
    "blocks of 4096",
    "a write cache",
    "FUA",
    "answers from a disk's own memory",
    "chunk keys refreshed",
    "chunk keys kept",
    "a rude server",
    "a hostile client",
    "bursts of another size",
    "IPv6",
];

/// Records the choices of a plan.
pub(super) fn chosen(coverage: &mut Coverage, plan: &Plan) {
    let mut chosen = [false; CHOICES.len()];
    for client in &plan.clients {
        let keys = client.read_keys == ReadKeys::LongLived;
        let policy = match client.policy {
            Policy::RoundRobin => 0,
            Policy::MinInflight => 1,
            _ => 2,
        };
        chosen[policy] = true;
        chosen[if keys { 3 } else { 4 }] = true;
        chosen[if client.counts_keys { 6 } else { 5 }] = true;
        chosen[7] |= client.scattered > 0;
        chosen[8] |= client.kernel_delay.is_some();
        chosen[9] |= client.max_reconnects > 0;
        chosen[10] |= client.max_reconnects == 0;
        chosen[if client.queues { 11 } else { 12 }] = true;
        chosen[13] |= client.poll_connections > 0;
        chosen[14] |= client.io_connections + client.poll_connections == 0;
        chosen[15] |= client.paths.len() > 1;
        chosen[16] |= client.disks.len() > 1;
        chosen[24] |= client.hostile;
        for disk in &client.disks {
            chosen[17] |= disk.logical == 4096;
            chosen[18] |= disk.cache;
            chosen[19] |= disk.fua;
            chosen[20] |= disk.direct;
        }
    }
    chosen[if plan.invalidate { 21 } else { 22 }] = true;
    chosen[23] |= plan.misbehaving;
    chosen[25] |= plan.burst.is_some();
    chosen[26] |= plan.nodes[0].hosts[0].addr.is_ipv6();
    for (name, _) in CHOICES.iter().zip(chosen).filter(|(_, is)| *is) {
        coverage.hit("plan", name);
    }
    coverage.hit("plan", plan.scenario.name());
    for trial in &plan.trials {
        coverage.hit("plan", trial_kind(trial.what));
    }
}

const TRIAL_KINDS: [&str; 5] =
    ["silent server", "silent client", "restart", "mute server", "mute client"];

const fn trial_kind(what: TrialKind) -> &'static str {
    TRIAL_KINDS[match what {
        TrialKind::Silence { node: 0 } => 0,
        TrialKind::Silence { .. } => 1,
        TrialKind::Restart { .. } => 2,
        TrialKind::Mute { node: 0, .. } => 3,
        TrialKind::Mute { .. } => 4,
    }]
}

/// Names for the times that paths needed to be connected after the last fault, and that final IO
/// needed, as shares of the allowed time.
pub(super) const BACK: &str = "all paths back";
pub(super) const FRESH: &str = "fresh work";

/// Records the counters of a server since its last start.
pub(super) fn counted(coverage: &mut Coverage, counters: &ServerCounters) {
    for (name, count) in counters.iter().filter(|(_, count)| *count > 0) {
        coverage.add("server", name, count);
    }
}

/// Server counters that these runs never move: no client sends made-up immediates, and send queues
/// are not full of responses for so long that a heartbeat is due.
const UNMOVED_COUNTERS: [&str; 2] = ["immediates_ignored", "heartbeats_dropped"];

/// Makes all names known.
pub(super) fn declare(coverage: &mut Coverage) {
    for (row, column) in CHANGES {
        coverage.declare("path of a client", &[PATHS[row][column]]);
    }
    // A session opens once; one that loses its last path while it maps its first disk is closed.
    for (row, columns) in [(0, 0..1), (1, 0..1), (2, 1..5), (3, 2..4)] {
        coverage.declare("session", &SESSIONS[row][columns]);
    }
    FAULTS[..12].iter().for_each(|row| coverage.declare("fault", row));
    // Events that occur at most once in a run hardly ever coincide with the close of a session.
    FAULTS[12..].iter().for_each(|row| coverage.declare("fault", &row[..5]));
    REQUESTS.iter().for_each(|row| coverage.declare("request", row));
    // These runs never reach the limit of paths, so adding one is never refused.
    ORDERS[..3].iter().for_each(|row| coverage.declare("order", row));
    coverage.declare("order", &ORDERS[3][..1]);
    coverage.declare("disk", &DISKS);
    coverage.declare("beside", &MISDEEDS);
    coverage.declare("plan", &CHOICES);
    coverage.declare("plan", &TRIAL_KINDS);
    let drawn = Scenario::ALL.into_iter().filter(|scenario| *scenario != Scenario::SingleFault);
    drawn.for_each(|scenario| coverage.declare("plan", &[scenario.name()]));
    for (name, _) in
        ServerCounters::default().iter().filter(|(name, _)| !UNMOVED_COUNTERS.contains(name))
    {
        coverage.declare("server", &[name]);
    }
    // Only very rare combinations take nearly all of the allowed time.
    coverage.declare(BACK, &TIME_SHARES[..5]);
    coverage.declare(FRESH, &TIME_SHARES);
}
