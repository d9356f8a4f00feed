//! Everything that runs of devices can reach, declared by name, so that what no seed reaches shows.

use bowline_roce::Counters;
use bowline_verbs::{Completion, Mtu, QpState, Status, WcOpcode};
use bowline_wire::roce::IcrcPolicy;

use super::net::{Delivery, Loss};
use super::plan::{Hints, HostPlan, Plan, Scenario};
use super::side::{Side, Stage};
use crate::engine::coverage::{Choice, Coverage, TIME_SHARES, named, table};

/// Outcomes of requests.
const REQUESTS: [[&str; 10]; 10] = table!(
    [
        "SEND",
        "WRITE",
        "READ",
        "compare and swap",
        "fetch and add",
        "bind",
        "invalidate",
        "FLUSH",
        "atomic write",
        "register"
    ]
    [
        "success",
        "flushed",
        "local operation error",
        "local protection error",
        "bind error",
        "remote access error",
        "remote invalid request",
        "retries exhausted",
        "RNR retries exhausted",
        "another status"
    ]
);

/// For each kind of request, the outcomes that exist, as columns of the table.
const OUTCOMES: [&[usize]; 10] = [
    // A right SEND fails only because of its receive, its key or its peer.
    &[0, 1, 3, 6, 7, 8],
    &[0, 1, 3, 5, 7, 8],
    &[0, 1, 3, 5, 7],
    &[0, 1, 5, 7],
    &[0, 1, 5, 7],
    // A local request never waits for a peer, so it is never the first to fail for want of one.
    &[0, 1, 4],
    &[0, 1, 2],
    &[0, 1, 5, 7],
    &[0, 1, 5, 7],
    &[0, 1, 2],
];

/// Returns the row of a kind of request.
const fn request_row(opcode: WcOpcode) -> usize {
    match opcode {
        WcOpcode::RdmaWrite => 1,
        WcOpcode::RdmaRead => 2,
        WcOpcode::CompSwap => 3,
        WcOpcode::FetchAdd => 4,
        WcOpcode::BindMw => 5,
        WcOpcode::LocalInv => 6,
        WcOpcode::Flush => 7,
        WcOpcode::AtomicWrite => 8,
        WcOpcode::RegMr => 9,
        _ => 0,
    }
}

const fn request_column(status: Status) -> usize {
    match status {
        Status::Success => 0,
        Status::WrFlushErr => 1,
        Status::LocQpOpErr => 2,
        Status::LocProtErr => 3,
        Status::MwBindErr => 4,
        Status::RemAccessErr => 5,
        Status::RemInvReqErr => 6,
        Status::RetryExcErr => 7,
        Status::RnrRetryExcErr => 8,
        _ => 9,
    }
}

const REQUEST_CELLS: usize = REQUESTS.len() * REQUESTS[0].len();

/// Outcomes of receives.
const RECEIVES: [&str; 9] = [
    "a message",
    "with an immediate",
    "with an invalidation",
    "the immediate of a WRITE",
    "flushed",
    "too short",
    "an invalidation of nothing",
    "another mistake of the peer",
    "another status",
];

/// Messages of connection managers, and their attributes [CM-1].
const MESSAGES: [u16; 7] = [0x10, 0x11, 0x12, 0x13, 0x14, 0x15, 0x16];
const MESSAGE_TROUBLE: [[&str; 5]; 7] = table!(
    ["REQ", "MRA", "REJ", "REP", "RTU", "DREQ", "DREP"]
    ["sent", "sent again", "lost", "damaged", "repeated"]
);

/// Effects of networks on datagrams, by kind of datagram.
const NETWORK_EFFECTS: [[&str; 6]; 4] = table!(
    ["management", "request", "answer", "letter"]
    ["lost", "a line cut", "a queue full", "damaged", "repeated", "followed by a forged one"]
);
const NETWORK_EFFECT_CELLS: usize = NETWORK_EFFECTS.len() * NETWORK_EFFECTS[0].len();

table! {
    /// A fault that hits connections.
    pub(crate) enum FaultRow {
        Dies = "device dies",
        ReceiverBefore = "receiver of a management datagram dies before",
        ReceiverAfter = "receiver of a management datagram dies after",
        Sender = "sender of a management datagram dies",
        OneWay = "line cut one way",
        BothWays = "line cut both ways",
        Held = "line held one way",
        HeldBoth = "line held both ways",
    }
    // By the stage of the connection that they struck.
    const FAULTS = ["no connection", "connecting", "idle", "busy", "ending", "lingering"];
}

/// Mistakes of programs, in the order of [`super::app::mistakes::MISTAKES`].
const MISTAKES: [&str; 12] = [
    "a key",
    "a range",
    "a right",
    "a local key",
    "a local range",
    "a local right",
    "an invalidation",
    "a registration",
    "an invalidation at the peer",
    "a key of an atomic",
    "a key of an atomic write",
    "a key of a FLUSH",
];

const SEQUENCE: [&str; 3] = ["wraps", "wraps in what is sent again", "wraps in answers"];

/// Choices of plans, by host.
const CHOICES: [Choice<HostPlan>; 16] = [
    ("IPv4, strict ICRC", |host| !host.addr.is_ipv6() && host.icrc == IcrcPolicy::Strict),
    ("IPv4, ICRC solved", |host| !host.addr.is_ipv6() && host.icrc == IcrcPolicy::Solve),
    ("IPv4, no ICRC", |host| !host.addr.is_ipv6() && host.icrc == IcrcPolicy::Off),
    ("IPv6, strict ICRC", |host| host.addr.is_ipv6() && host.icrc == IcrcPolicy::Strict),
    ("IPv6, ICRC solved", |host| host.addr.is_ipv6() && host.icrc == IcrcPolicy::Solve),
    ("IPv6, no ICRC", |host| host.addr.is_ipv6() && host.icrc == IcrcPolicy::Off),
    ("identifications right", |host| host.hints == Hints::Right),
    ("identifications missing", |host| host.hints == Hints::None),
    ("identifications mixed", |host| host.hints == Hints::Mixed),
    ("bursts", |host| host.gso),
    ("single packets", |host| !host.gso),
    ("MTU 256", |host| host.mtu == Mtu::M256),
    ("MTU 512", |host| host.mtu == Mtu::M512),
    ("MTU 1024", |host| host.mtu == Mtu::M1024),
    ("MTU 2048", |host| host.mtu == Mtu::M2048),
    ("MTU 4096", |host| host.mtu == Mtu::M4096),
];
const MTUS_DIFFER: &str = "MTUs differ";

/// Counters that stay 0 in these runs: a device has one address, and networks bring it no other
/// packets; management datagrams of another kind are hardly ever forged; a listener never has 128
/// requests at once; queues hold all requests that are posted; every request that is executed can
/// be executed.
const NEVER_COUNTED: [&str; 6] = [
    "drop_address",
    "drop_mad",
    "cm_overflow",
    "cm_pushed_out",
    "cq_overruns",
    "naks_operation_sent",
];

/// Group of fresh work in networks that keep the order of datagrams, and of fresh work in others.
pub(crate) const FRESH_IN_ORDER: &str = "fresh work, in order";
pub(crate) const FRESH_OVERTAKEN: &str = "fresh work, overtaken";

/// Declares all names.
pub(super) fn declare(coverage: &mut Coverage) {
    for (names, outcomes) in REQUESTS.iter().zip(OUTCOMES) {
        outcomes.iter().for_each(|&column| coverage.declare("request", &[names[column]]));
    }
    coverage.declare("receive", &RECEIVES[..8]);
    for (row, names) in MESSAGE_TROUBLE.iter().enumerate() {
        // An MRA is sent once in hundreds of seeds. It is lost from time to time, and hardly ever
        // damaged.
        let count = if row == 1 { 3 } else { names.len() };
        coverage.declare("connection message", &names[..count]);
    }
    // Datagrams that anyone with the key may send are not forged: the last cell of the last row.
    let cells: Vec<_> = NETWORK_EFFECTS.iter().flatten().copied().collect();
    coverage.declare("network", &cells[..NETWORK_EFFECT_CELLS - 1]);
    FAULTS.iter().for_each(|row| coverage.declare("fault", row));
    coverage.declare("queue pair", QUEUE_PAIRS);
    coverage.declare("shared receive queue", SharedRow::NAMES);
    coverage.declare("stream", StreamRow::NAMES);
    // A connection request that outlives its listener comes once in many thousands of seeds.
    let all = CONNECTIONS.iter().filter(|name| **name != "asked of a dead program");
    all.for_each(|name| coverage.declare("connection", &[*name]));
    coverage.declare("memory", MEMORY);
    coverage.declare("mistake", &MISTAKES);
    coverage.declare("sequence number", &SEQUENCE);
    coverage.declare("plan", &CHOICES.map(|(name, _)| name));
    coverage.declare("plan", &[MTUS_DIFFER]);
    coverage.declare("plan", &Scenario::ALL.map(Scenario::name));
    for (name, _) in Counters::default().iter().filter(|(name, _)| !NEVER_COUNTED.contains(name)) {
        coverage.declare("device", &[name]);
    }
    coverage.declare("rest after the last fault", &TIME_SHARES);
    // Fresh work takes at least a handshake and a request, and never needs the whole time.
    coverage.declare(FRESH_IN_ORDER, &TIME_SHARES[..5]);
    coverage.declare(FRESH_OVERTAKEN, &TIME_SHARES[..4]);
}

/// Counts that are kept during a run and named only at its end.
#[derive(Debug)]
pub(crate) struct Reached {
    requests: [u32; REQUEST_CELLS],
    receives: [u32; RECEIVES.len()],
    network_effects: [u32; NETWORK_EFFECT_CELLS],
    sequence: [u32; SEQUENCE.len()],
    /// Management datagrams sent, by attribute and transaction, so that repeated ones are
    /// recognised.
    sent: std::collections::BTreeSet<(u16, u64)>,
}

impl Default for Reached {
    fn default() -> Self {
        Self {
            requests: [0; REQUEST_CELLS],
            receives: [0; RECEIVES.len()],
            network_effects: [0; NETWORK_EFFECT_CELLS],
            sequence: [0; SEQUENCE.len()],
            sent: std::collections::BTreeSet::new(),
        }
    }
}

/// Operation of datagrams [GSI-1].
const UD_SEND: u8 = 0x64;

/// Number of header bytes that show what a datagram is.
const HEAD: usize = 44;

/// The first bytes of a datagram.
#[derive(Debug)]
pub(crate) struct Head([u8; HEAD]);

impl Head {
    pub(crate) fn of(bytes: &[u8]) -> Self {
        let mut head = [0; HEAD];
        let len = bytes.len().min(HEAD);
        head[..len].copy_from_slice(&bytes[..len]);
        Self(head)
    }
}

/// Returns the row of [`NETWORK_EFFECTS`] of a datagram.
fn network_effect_row(bytes: &[u8]) -> usize {
    match bytes[0] {
        UD_SEND if bytes[5..8] == [0, 0, 1] => 0,
        0x60.. => 3,
        0x0d..=0x12 => 2,
        _ => 1,
    }
}

impl Reached {
    /// Counts a completed request.
    pub(crate) fn request(&mut self, opcode: WcOpcode, status: Status) {
        self.requests[request_row(opcode) * REQUESTS[0].len() + request_column(status)] += 1;
    }

    /// Counts a completed receive.
    pub(crate) fn receive(&mut self, entry: &Completion) {
        let at = match entry.status {
            Status::Success if entry.opcode == WcOpcode::RecvRdmaWithImm => 3,
            Status::Success if entry.invalidated.is_some() => 2,
            Status::Success if entry.imm.is_some() => 1,
            Status::Success => 0,
            Status::WrFlushErr => 4,
            Status::LocLenErr => 5,
            Status::RemInvReqErr => 6,
            Status::LocQpOpErr | Status::LocProtErr | Status::RemAccessErr => 7,
            _ => 8,
        };
        self.receives[at] += 1;
    }

    /// Counts what the network did with a datagram.
    pub(crate) fn sent(&mut self, coverage: &mut Coverage, head: &Head, delivery: &Delivery) {
        let bytes = &head.0;
        let row = network_effect_row(bytes);
        let mut count =
            |column: usize| self.network_effects[row * NETWORK_EFFECTS[0].len() + column] += 1;
        match delivery.lost {
            Some(Loss::Chance) => count(0),
            Some(Loss::Cut) => count(1),
            Some(Loss::Full) => count(2),
            None => {}
        }
        delivery.damaged.then(|| count(3));
        delivery.repeated.then(|| count(4));
        delivery.forged.then(|| count(5));
        match row {
            0 => self.message(coverage, bytes, delivery),
            1 | 2 if bytes[9..12] == [0; 3] => {
                let again = row == 1 && !self.sent.insert((0, connection(bytes)));
                self.sequence[if row == 2 { 2 } else { usize::from(again) }] += 1;
            }
            _ => {}
        }
    }

    /// Counts a message of a connection manager [CM-1].
    fn message(&mut self, coverage: &mut Coverage, bytes: &[u8], delivery: &Delivery) {
        let mad = &bytes[20..];
        let attribute = u16::from_be_bytes([mad[16], mad[17]]);
        let Some(row) = MESSAGES.iter().position(|it| *it == attribute) else { return };
        let transaction = mad[8..16].iter().fold(0, |all, byte| all << 8 | u64::from(*byte));
        let again = !self.sent.insert((attribute, transaction));
        for (column, is) in
            [true, again, delivery.lost.is_some(), delivery.damaged, delivery.repeated]
                .into_iter()
                .enumerate()
        {
            if is {
                coverage.hit("connection message", MESSAGE_TROUBLE[row][column]);
            }
        }
    }

    /// Moves the counts to the coverage.
    pub(crate) fn report(&self, coverage: &mut Coverage) {
        let mut tell = |group, names: &mut dyn Iterator<Item = &'static str>, counts: &[u32]| {
            for (name, count) in names.zip(counts).filter(|(_, count)| **count > 0) {
                coverage.add(group, name, (*count).into());
            }
        };
        tell("request", &mut REQUESTS.iter().flatten().copied(), &self.requests);
        tell("receive", &mut RECEIVES.into_iter(), &self.receives);
        tell("network", &mut NETWORK_EFFECTS.iter().flatten().copied(), &self.network_effects);
        tell("sequence number", &mut SEQUENCE.into_iter(), &self.sequence);
    }
}

/// Returns a number for the connection of a packet, made from its destination.
fn connection(bytes: &[u8]) -> u64 {
    u64::from(bytes[5]) << 16 | u64::from(bytes[6]) << 8 | u64::from(bytes[7])
}

/// Counts the choices of a plan.
pub(super) fn chosen(coverage: &mut Coverage, plan: &Plan) {
    for host in &plan.hosts {
        for (name, _) in CHOICES.iter().filter(|(_, is)| is(host)) {
            coverage.hit("plan", name);
        }
    }
    if plan.hosts.iter().any(|host| host.mtu != plan.hosts[0].mtu) {
        coverage.hit("plan", MTUS_DIFFER);
    }
    coverage.hit("plan", plan.scenario.name());
}

/// Returns the stage of a connection: a column of [`FAULTS`].
fn stage_column(side: &Side) -> usize {
    match side.stage {
        Stage::Connecting => 1,
        Stage::Up if side.requests.is_empty() => 2,
        Stage::Up => 3,
        Stage::Ending => 4,
        _ => 5,
    }
}

/// Counts a fault that hits these connections.
pub(super) fn count_fault<'a>(
    coverage: &mut Coverage,
    fault: FaultRow,
    sides: impl Iterator<Item = &'a Side>,
) {
    let mut any = false;
    for side in sides.filter(|side| side.stage < Stage::Gone) {
        any = true;
        coverage.hit("fault", FAULTS[fault as usize][stage_column(side)]);
    }
    if !any {
        coverage.hit("fault", FAULTS[fault as usize][0]);
    }
}

named! {
    /// What happens to shared receive queues.
    pub(crate) enum SharedRow {
        LimitReached = "limit reached",
        Left = "destroyed with receives",
        Used = "destroyed without receives",
    }
}

named! {
    /// What becomes of messages over unreliable connections.
    pub(crate) enum StreamRow {
        Arrived = "arrived",
        Lost = "lost",
    }
}

/// Counts what becomes of messages over unreliable connections.
pub(super) fn stream(coverage: &mut Coverage, what: StreamRow) {
    coverage.hit("stream", what.name());
}

/// Counts what happens to a shared receive queue.
pub(super) fn shared(coverage: &mut Coverage, what: SharedRow) {
    coverage.hit("shared receive queue", what.name());
}

/// A change of a queue pair.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Step {
    /// The queue pair is in RTR, and not yet in RTS.
    Receives,
    UpByProgram,
    UpByManager,
    Pauses,
    GoesOn,
    /// The program ends the queue pair.
    Ends(QpState),
    /// The queue pair has failed.
    Fails,
    /// The peer has ended the connection.
    Disconnected,
    Destroyed(QpState),
}

named! {
    /// States that queue pairs leave, and the reason.
    const QUEUE_PAIRS = queue_pair(Step) {
        Step::Receives => "Init to RTR for a while",
        Step::UpByProgram => "Init to RTS, by its program",
        Step::UpByManager => "Init to RTS, by the connection manager",
        Step::Pauses => "RTS to SQD",
        Step::GoesOn => "SQD to RTS",
        Step::Ends(QpState::Init) => "Init to Error",
        Step::Ends(QpState::Rtr) => "RTR to Error",
        Step::Ends(QpState::Rts) => "RTS to Error, by its program",
        Step::Ends(QpState::Sqd) => "SQD to Error",
        Step::Fails => "RTS to Error, by a failure",
        Step::Disconnected => "RTS to Error, by the connection manager",
        Step::Destroyed(QpState::Init) => "destroyed in Init",
        Step::Destroyed(QpState::Rts) => "destroyed in RTS",
        Step::Destroyed(QpState::Err) => "destroyed in Error",
    }
}

pub(super) fn stepped(coverage: &mut Coverage, step: Step) {
    queue_pair(step).inspect(|name| coverage.hit("queue pair", name));
}

/// Events of a connection.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Link {
    Asked,
    Unmanaged,
    Established { active: bool },
    RefusedByProgram,
    Nobody,
    TooLarge,
    RefusedOtherwise,
    Unreachable { active: bool },
    Disconnected { active: bool },
    TimewaitOver,
    GivenUp { active: bool },
    Abrupt,
    TooLate,
    Withdrawn,
}

named! {
    /// Events of connections that programs receive, and their reactions.
    const CONNECTIONS = connection_event(Link) {
        Link::Asked => "asked for",
        Link::Unmanaged => "made without a manager",
        Link::Established { active: true } => "active: established",
        Link::Established { active: false } => "passive: established",
        Link::RefusedByProgram => "active: refused by the program",
        Link::Nobody => "active: nobody listens",
        Link::TooLarge => "active: MTU too large",
        Link::RefusedOtherwise => "active: refused for another reason",
        Link::Unreachable { active: true } => "active: unreachable",
        Link::Unreachable { active: false } => "passive: unreachable",
        Link::Disconnected { active: true } => "active: disconnected",
        Link::Disconnected { active: false } => "passive: disconnected",
        Link::TimewaitOver => "time wait is over",
        Link::GivenUp { active: true } => "given up by the active side while connecting",
        Link::GivenUp { active: false } => "given up by the passive side while connecting",
        Link::Abrupt => "left without a word",
        Link::TooLate => "asked of a dead program",
        Link::Withdrawn => "withdrawn before the answer",
    }
}

pub(super) fn linked(coverage: &mut Coverage, link: Link) {
    connection_event(link).inspect(|name| coverage.hit("connection", name));
}

/// Events of memory.
#[derive(Clone, Copy, Debug)]
pub(crate) enum LoanEvent {
    Registered,
    Bound { from_zero: bool },
    Invalidated,
    Released,
    InvalidatedHere,
    TakenAway { busy: bool },
}

named! {
    /// Events of memory that peers may use for a time.
    const MEMORY = memory_event(LoanEvent) {
        LoanEvent::Registered => "region registered",
        LoanEvent::Bound { from_zero: false } => "window bound",
        LoanEvent::Bound { from_zero: true } => "window bound from zero",
        LoanEvent::Invalidated => "given back by an invalidation",
        LoanEvent::Released => "given back by a word",
        LoanEvent::InvalidatedHere => "invalidated by its own side",
        LoanEvent::TakenAway { busy: false } => "region taken away, idle",
        LoanEvent::TakenAway { busy: true } => "region taken away, in use",
    }
}

pub(super) fn loan(coverage: &mut Coverage, what: LoanEvent) {
    memory_event(what).inspect(|name| coverage.hit("memory", name));
}

/// Counts a mistake of a program, as numbered in [`MISTAKES`].
pub(super) fn count_mistake(coverage: &mut Coverage, kind: usize) {
    coverage.hit("mistake", MISTAKES[kind]);
}

/// Counts what a device has counted.
pub(super) fn count_device(coverage: &mut Coverage, counters: &Counters) {
    for (name, count) in counters.iter().filter(|(_, count)| *count > 0) {
        coverage.add("device", name, count);
    }
}
