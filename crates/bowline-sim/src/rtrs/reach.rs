//! What runs of sessions can come to: the names of all of it, so that what no seed reaches shows.
//!
//! What goes wrong at every step in turn ([`Scenario::Each`]) is counted by its own test, and not
//! here.

use bowline_rnbd::IoOp;
use bowline_rtrs::Policy;
use bowline_rtrs::client::{PathState, ReadKeys};
use bowline_rtrs::server::ServerCounters;

use super::client::{Client, Stage};
use super::plan::{Fault, Plan, Scenario};
use super::trial::Ordeal;
use crate::engine::coverage::Coverage;
use crate::engine::coverage::TIME_SHARES;
use crate::roce::reach::table;

/// Changes of paths at the client, from a row to a column.
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
/// The changes that paths may make, by row and column.
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

/// A path of a client has changed; the first state of one is not told.
pub(super) fn path(coverage: &mut Coverage, from: PathState, to: PathState) {
    coverage.hit("path of a client", PATHS[path_row(from)][path_row(to)]);
}

/// What sessions are told, by how far their program is.
const SESSIONS: [[&str; 6]; 4] = table!(
    ["opened", "not opened", "lost its last path", "has a path again"]
    ["at first", "while disks are mapped", "while it works", "in the end", "being closed", "over"]
);

/// What a session is told: a row of [`SESSIONS`].
#[derive(Clone, Copy, Debug)]
pub(super) enum Word {
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
        Stage::Verifying | Stage::Fresh => 3,
        Stage::Unmapping | Stage::Closing => 4,
        Stage::Closed => 5,
    }
}

pub(super) fn session(coverage: &mut Coverage, word: Word, stage: Stage) {
    coverage.hit("session", SESSIONS[word as usize][session_column(stage)]);
}

/// Faults, by how far the client was that they struck.
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

/// What goes wrong: a row of [`FAULTS`].
#[derive(Clone, Copy, Debug)]
pub(super) enum Blow {
    Cut,
    HalfCut,
    Held,
    HalfHeld,
    AllHeld,
    ServerDies,
    ClientDies,
    ServerStalls,
    ClientStalls,
    Order,
    Kick,
    Unseen,
    Mute,
    Silent,
}

impl Blow {
    /// What a fault is, of the server or not.
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
            Fault::Unseen => Self::Unseen,
        }
    }
}

/// Something goes wrong with a client.
pub(super) fn struck(coverage: &mut Coverage, blow: Blow, client: &Client) {
    let column = match client.life.as_ref().map(|life| life.stage) {
        None | Some(Stage::Closed) => 0,
        Some(Stage::Opening) => 1,
        Some(Stage::Mapping) => 2,
        Some(Stage::Unmapping | Stage::Closing) => 5,
        Some(_) if client.requests_running() == 0 => 3,
        Some(_) => 4,
    };
    coverage.hit("fault", FAULTS[blow as usize][column]);
}

/// What becomes of requests of programs.
const REQUESTS: [[&str; 4]; 5] = table!(
    ["read", "write", "flush", "discard", "write zeroes"]
    ["done", "lost with the session", "given up with its disk", "refused without its disk"]
);

/// How a request ended: a column of [`REQUESTS`].
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

/// What somebody orders about paths, and what becomes of it.
const ORDERS: [[&str; 2]; 4] =
    table!(["remove", "disconnect", "reconnect", "add"]["taken", "refused"]);

pub(super) fn ordered(coverage: &mut Coverage, what: u64, taken: bool) {
    coverage.hit("order", ORDERS[what.min(3) as usize][usize::from(!taken)]);
}

/// What happens to disks.
const DISKS: [&str; 6] = [
    "mapped",
    "not mapped",
    "given up, idle",
    "given up, busy",
    "given up while it is mapped",
    "given up at once after requests",
];

/// What happens to a disk: one of [`DISKS`].
#[derive(Clone, Copy, Debug)]
pub(super) enum OfDisk {
    Mapped,
    NotMapped,
    Idle,
    Busy,
    Mapping,
    Haste,
}

pub(super) fn disk(coverage: &mut Coverage, what: OfDisk) {
    coverage.hit("disk", DISKS[what as usize]);
}

/// What clients and servers do that they must not, and what is late.
pub(super) const WRONGS: [&str; 7] = [
    "a write with the key of a request",
    "a write with the next key",
    "a key left to the client",
    "a write with a key that was",
    "a silence noticed",
    "the server closes, and starts again",
    "attempts to connect are used up",
];

/// One of [`WRONGS`].
#[derive(Clone, Copy, Debug)]
pub(super) enum Wrong {
    Attack,
    AttackNext,
    KeyLeft,
    LateWrite,
    Noticed,
    Restart,
    UsedUp,
}

pub(super) fn wrong(coverage: &mut Coverage, what: Wrong) {
    coverage.hit("beside", WRONGS[what as usize]);
}

/// What plans may choose.
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

/// What a plan has chosen.
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
    chosen[23] |= plan.rude;
    chosen[25] |= plan.burst.is_some();
    chosen[26] |= plan.nodes[0].hosts[0].addr.is_ipv6();
    for (name, _) in CHOICES.iter().zip(chosen).filter(|(_, is)| *is) {
        coverage.hit("plan", name);
    }
    coverage.hit("plan", plan.scenario.name());
    for trial in &plan.trials {
        coverage.hit("plan", ordeal(trial.what));
    }
}

const ORDEALS: [&str; 5] =
    ["silent server", "silent client", "restart", "mute server", "mute client"];

const fn ordeal(what: Ordeal) -> &'static str {
    ORDEALS[match what {
        Ordeal::Silence { node: 0 } => 0,
        Ordeal::Silence { .. } => 1,
        Ordeal::Restart { .. } => 2,
        Ordeal::Mute { node: 0, .. } => 3,
        Ordeal::Mute { .. } => 4,
    }]
}

/// Paths that are back after the last fault, and fresh work: how much of its time it needed.
pub(super) const BACK: &str = "all paths back";
pub(super) const FRESH: &str = "fresh work";

/// What a server has counted in one of its lives.
pub(super) fn counted(coverage: &mut Coverage, counters: &ServerCounters) {
    for (name, count) in counters.iter().filter(|(_, count)| *count > 0) {
        coverage.add("server", name, count);
    }
}

/// Counters of servers that nothing in these runs moves: no client sends immediates of its own
/// making, and send queues are not full of answers for so long that a heartbeat is due.
const STILL: [&str; 2] = ["immediates_ignored", "heartbeats_dropped"];

/// Makes all names known.
pub(super) fn declare(coverage: &mut Coverage) {
    for (row, column) in CHANGES {
        coverage.declare("path of a client", &[PATHS[row][column]]);
    }
    // A session is opened once; one that loses its last path while it maps its first disk is
    // closed.
    for (row, columns) in [(0, 0..1), (1, 0..1), (2, 1..5), (3, 2..4)] {
        coverage.declare("session", &SESSIONS[row][columns]);
    }
    FAULTS[..12].iter().for_each(|row| coverage.declare("fault", row));
    // What comes once in a run at most hardly meets the moments in which a session is closed.
    FAULTS[12..].iter().for_each(|row| coverage.declare("fault", &row[..5]));
    REQUESTS.iter().for_each(|row| coverage.declare("request", row));
    // There is no bound of paths that these runs come to.
    ORDERS[..3].iter().for_each(|row| coverage.declare("order", row));
    coverage.declare("order", &ORDERS[3][..1]);
    coverage.declare("disk", &DISKS);
    coverage.declare("beside", &WRONGS);
    coverage.declare("plan", &CHOICES);
    coverage.declare("plan", &ORDEALS);
    let drawn = Scenario::ALL.into_iter().filter(|scenario| *scenario != Scenario::Each);
    drawn.for_each(|scenario| coverage.declare("plan", &[scenario.name()]));
    for (name, _) in ServerCounters::default().iter().filter(|(name, _)| !STILL.contains(name)) {
        coverage.declare("server", &[name]);
    }
    // What comes together only once in a blue moon takes nearly all of it.
    coverage.declare(BACK, &TIME_SHARES[..5]);
    coverage.declare(FRESH, &TIME_SHARES);
}
