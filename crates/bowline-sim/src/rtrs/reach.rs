//! Coverage: names for every situation that runs of sessions can reach, so that a situation that no
//! seed reaches shows.
//!
//! Runs of [`Scenario::SingleFault`] are counted by a test of their own, and not here.

use bowline_rnbd::IoOp;
use bowline_rtrs::Policy;
use bowline_rtrs::client::{PathState, ReadKeys};
use bowline_rtrs::server::ServerCounters;

use super::client::{Client, Stage};
use super::plan::{ClientPlan, DiskPlan, Fault, Plan, Scenario};
use super::trial::TrialKind;
use crate::engine::coverage::{Choice, Coverage, TIME_SHARES, named, table};

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

table! {
    /// An event of a session.
    pub(super) enum SessionEventClass {
        Opened = "opened",
        NotOpened = "not opened",
        Lost = "lost its last path",
        Back = "has a path again",
    }
    // By the stage of the program.
    const SESSIONS = [
        "at first", "while disks are mapped", "while it works", "in the end", "being closed", "over"
    ];
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

table! {
    /// A class of faults.
    pub(super) enum FaultClass {
        Cut = "cut",
        HalfCut = "cut one way",
        MapState = "held",
        HalfHeld = "held one way",
        AllHeld = "all lines held",
        ServerDies = "server dies",
        ClientDies = "client dies",
        ServerStalls = "server stalls",
        ClientStalls = "client stalls",
        Order = "order about a path",
        Kick = "server closes a path",
        UnnoticedCrash = "server dies unseen",
        Mute = "a device falls mute",
        Silent = "a machine falls silent",
    }
    // By the stage of the client they affect.
    const FAULTS = ["no session", "opening", "mapping", "idle", "busy", "closing"];
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

named! {
    /// An event of a disk.
    pub(super) enum DiskEventClass {
        Mapped = "mapped",
        NotMapped = "not mapped",
        Idle = "given up, idle",
        Busy = "given up, busy",
        Mapping = "given up while it is mapped",
        AfterSubmit = "given up at once after requests",
    }
}

pub(super) fn disk(coverage: &mut Coverage, what: DiskEventClass) {
    coverage.hit("disk", what.name());
}

named! {
    /// Misbehaviour of clients and servers, and other rare events.
    pub(super) enum Misdeed {
        Attack = "a write with the key of a request",
        AttackNext = "a write with the next key",
        KeyLeft = "a key left to the client",
        LateWrite = "a write with a key that was",
        Noticed = "a silence noticed",
        Restart = "the server closes, and starts again",
        UsedUp = "attempts to connect are used up",
    }
}

pub(super) fn misdeed(coverage: &mut Coverage, what: Misdeed) {
    coverage.hit("beside", what.name());
}

/// Choices that plans can make.
const CHOICES: [Choice<Plan>; 27] = [
    ("round robin", |plan| client(plan, |it| it.policy == Policy::RoundRobin)),
    ("least inflight", |plan| client(plan, |it| it.policy == Policy::MinInflight)),
    ("least latency", |plan| client(plan, |it| it.policy == Policy::MinLatency)),
    ("long-lived key", |plan| client(plan, |it| it.read_keys == ReadKeys::LongLived)),
    ("keys for single READs", |plan| client(plan, |it| it.read_keys != ReadKeys::LongLived)),
    ("servers tell keys", |plan| client(plan, |it| !it.counts_keys)),
    ("clients count keys", |plan| client(plan, |it| it.counts_keys)),
    ("READs to several places", |plan| client(plan, |it| it.scattered > 0)),
    ("waits as kernels", |plan| client(plan, |it| it.kernel_delay.is_some())),
    ("attempts to connect bounded", |plan| client(plan, |it| it.max_reconnects > 0)),
    ("no attempt to connect", |plan| client(plan, |it| it.max_reconnects == 0)),
    ("requests wait for the session", |plan| client(plan, |it| it.queues)),
    ("requests fail with the session", |plan| client(plan, |it| !it.queues)),
    ("polled connections", |plan| client(plan, |it| it.poll_connections > 0)),
    ("one connection for all", |plan| {
        client(plan, |it| it.io_connections + it.poll_connections == 0)
    }),
    ("several paths", |plan| client(plan, |it| it.paths.len() > 1)),
    ("several disks", |plan| client(plan, |it| it.disks.len() > 1)),
    ("blocks of 4096", |plan| disk_of(plan, |it| it.logical == 4096)),
    ("a write cache", |plan| disk_of(plan, |it| it.cache)),
    ("FUA", |plan| disk_of(plan, |it| it.fua)),
    ("answers from a disk's own memory", |plan| disk_of(plan, |it| it.direct)),
    ("chunk keys refreshed", |plan| plan.invalidate),
    ("chunk keys kept", |plan| !plan.invalidate),
    ("a rude server", |plan| plan.misbehaving),
    ("a hostile client", |plan| client(plan, |it| it.hostile)),
    ("bursts of another size", |plan| plan.burst.is_some()),
    ("IPv6", |plan| plan.nodes[0].hosts[0].addr.is_ipv6()),
];

fn client(plan: &Plan, is: impl Fn(&ClientPlan) -> bool) -> bool {
    plan.clients.iter().any(is)
}

fn disk_of(plan: &Plan, is: impl Fn(&DiskPlan) -> bool) -> bool {
    plan.clients.iter().flat_map(|client| &client.disks).any(is)
}

/// Records the choices of a plan.
pub(super) fn chosen(coverage: &mut Coverage, plan: &Plan) {
    for (name, _) in CHOICES.iter().filter(|(_, is)| is(plan)) {
        coverage.hit("plan", name);
    }
    coverage.hit("plan", plan.scenario.name());
    for trial in &plan.trials {
        trial_kind(trial.what).inspect(|name| coverage.hit("plan", name));
    }
}

named! {
    /// Trials of plans.
    const TRIAL_KINDS = trial_kind(TrialKind) {
        TrialKind::Silence { node: 0 } => "silent server",
        TrialKind::Silence { .. } => "silent client",
        TrialKind::Restart { .. } => "restart",
        TrialKind::Mute { node: 0, .. } => "mute server",
        TrialKind::Mute { .. } => "mute client",
    }
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
    coverage.declare("disk", DiskEventClass::NAMES);
    coverage.declare("beside", Misdeed::NAMES);
    coverage.declare("plan", &CHOICES.map(|(name, _)| name));
    coverage.declare("plan", TRIAL_KINDS);
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
