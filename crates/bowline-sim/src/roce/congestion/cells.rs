//! The cells: networks and programs, and what is expected of the controller in each.

use bowline_verbs::Mtu;

use super::link::{LinkPlan, OUTER_BYTES};
use super::world::{Report, SERVER};

/// Headers of a packet inside its datagram, ICRC included.
const HEADERS: u64 = 12 + 4;
/// Most packets that a cell may take, so that it ends in seconds.
const PACKETS_MAX: u64 = 160_000;
/// A round trip that fills the link may not take more packets than this.
const WINDOW_MAX: u64 = 16_000;
/// Bytes of a buffer that no port is below.
const BUFFER_MIN: u64 = 64 << 10;

const US: u64 = 1_000;
const MS: u64 = 1_000_000;
const SEC: u64 = 1_000_000_000;
const GBIT: u64 = 1_000_000_000;

/// What bulk requests do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// RDMA WRITE.
    Write,
    /// RDMA READ.
    Read,
}

/// Something that happens to the links.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// Bits per second from now on.
    Rate(u64),
    /// Nanoseconds from end to end from now on.
    Delay(u64),
}

/// A network with its programs.
#[derive(Clone, Debug)]
pub struct Cell {
    /// Name, by which cells are chosen.
    pub name: String,
    /// Port of the switch to each host.
    pub port: LinkPlan,
    /// Bits per second of the hosts' interfaces.
    pub interface: u64,
    /// Path MTU.
    pub mtu: Mtu,
    /// Hosts with bulk requests to the one server.
    pub hosts: usize,
    /// Queue pairs of each.
    pub connections: usize,
    /// What these requests do; where it is READ there is one host.
    pub operation: Operation,
    /// Bytes of a request.
    pub size: usize,
    /// Requests that are posted at once on each queue pair.
    pub depth: usize,
    /// One more host sends requests of 4 KiB, one by one.
    pub small: bool,
    /// A foreign TCP flow goes where the data go.
    pub cubic: bool,
    /// What happens to the links, and when, in nanoseconds.
    pub changes: Vec<(u64, Change)>,
    /// Most nanoseconds that a program gets its turn late.
    pub scheduling: u64,
    /// Nanoseconds before measuring begins.
    pub warm: u64,
    /// Nanoseconds that are measured.
    pub time: u64,
    /// What is expected.
    pub goals: Goals,
}

/// Limits that a report must keep.
#[derive(Clone, Copy, Debug, Default)]
pub struct Goals {
    /// Least share of the link.
    pub used: Option<f64>,
    /// Least fairness.
    pub fairness: Option<f64>,
    /// Most nanoseconds of the 99th percentile of small requests.
    pub small: Option<u64>,
    /// Least and largest share of the foreign flow.
    pub cubic: Option<(f64, f64)>,
    /// Most nanoseconds of any request.
    pub longest: Option<u64>,
}

impl Cell {
    /// A cell of one host with one connection.
    pub fn one(name: &str, rate: u64, round_trip: u64, buffer: u64) -> Self {
        let mtu = if rate >= 10 * GBIT { Mtu::M4096 } else { Mtu::M1024 };
        let window = rate / 8 * round_trip / SEC;
        let size = (window / 8).next_power_of_two().clamp(16 << 10, 1 << 20) as usize;
        let mut cell = Self {
            name: name.to_owned(),
            port: LinkPlan::new(rate, round_trip / 2, buffer),
            interface: rate * 4,
            mtu,
            hosts: 1,
            connections: 1,
            operation: Operation::Write,
            size,
            depth: (4 * window as usize / size).clamp(32, 256),
            small: false,
            cubic: false,
            changes: Vec::new(),
            scheduling: 0,
            warm: 0,
            time: 0,
            goals: Goals::default(),
        };
        // A second before, and a second that counts, as far as the packets suffice.
        let packets = rate / 8 / (mtu.bytes() as u64);
        let most = PACKETS_MAX.max(80 * window / mtu.bytes() as u64) * SEC / packets.max(1);
        cell.warm = (SEC + 4 * round_trip).min(most / 2);
        cell.time = SEC.max(10 * round_trip).min(most / 2);
        cell
    }

    /// The host to whose port the data go: that of the only reader, or else the server.
    pub(super) fn data_port(&self) -> usize {
        if self.operation == Operation::Read { 1 } else { SERVER }
    }

    /// Payload bytes of the packets of a TCP flow in this network: the MTU of interfaces is 1500 or
    /// 9000.
    pub(super) fn tcp_payload(&self) -> u64 {
        if self.mtu == Mtu::M4096 { 8960 } else { 1460 }
    }

    /// Nanoseconds of a round trip without queues.
    pub const fn round_trip(&self) -> u64 {
        2 * self.port.delay
    }

    /// When the run ends.
    pub(super) const fn end(&self) -> u64 {
        SEC + self.warm + self.time
    }

    /// Share of a link's bytes that can be payload.
    pub(super) fn payload_share(&self) -> f64 {
        let mtu = self.mtu.bytes() as u64;
        mtu as f64 / (mtu + HEADERS + OUTER_BYTES) as f64
    }

    /// Returns the goals that a report misses.
    pub fn missed(&self, report: &Report) -> Vec<String> {
        let mut missed = Vec::new();
        let goals = &self.goals;
        if let Some(least) = goals.used
            && report.used < least
        {
            missed.push(format!("{:.3} of the link, not {least}", report.used));
        }
        if let Some(least) = goals.fairness
            && report.fairness < least
        {
            missed.push(format!("fairness {:.3}, not {least}", report.fairness));
        }
        if let Some((least, most)) = goals.cubic
            && !(least..=most).contains(&report.cubic)
        {
            missed.push(format!("the TCP flow has {:.3}, not {least} to {most}", report.cubic));
        }
        if let Some(most) = goals.small
            && report.small[1] > most
        {
            missed.push(format!("4 KiB take {} us, not {}", report.small[1] / US, most / US));
        }
        if let Some(most) = goals.longest
            && report.bulk[2].max(report.small[2]) > most
        {
            let longest = report.bulk[2].max(report.small[2]);
            missed.push(format!("a request took {} us, not {}", longest / US, most / US));
        }
        missed
    }
}

/// Returns all cells.
pub fn cells() -> Vec<Cell> {
    let mut cells = alone();
    cells.extend(incast());
    cells.extend(beside_cubic());
    cells.extend(faults());
    cells
}

fn rate_name(rate: u64) -> String {
    if rate >= GBIT { format!("{}g", rate / GBIT) } else { format!("{}m", rate / 1_000_000) }
}

fn time_name(time: u64) -> String {
    if time >= MS { format!("{}ms", time / MS) } else { format!("{}us", time / US) }
}

fn bandwidth_delay(rate: u64, round_trip: u64) -> u64 {
    (u128::from(rate) * u128::from(round_trip) / u128::from(8 * SEC)) as u64
}

/// One flow: rates, round trips and buffers.
fn alone() -> Vec<Cell> {
    let mut cells = Vec::new();
    for rate in [GBIT / 10, GBIT, 10 * GBIT, 100 * GBIT, 400 * GBIT] {
        for round_trip in [5 * US, 50 * US, 500 * US, 5 * MS, 100 * MS] {
            let whole = bandwidth_delay(rate, round_trip);
            let packet = if rate >= 10 * GBIT { 4096 } else { 1024 };
            if whole / packet > WINDOW_MAX {
                continue;
            }
            let mut buffers = vec![(whole / 4).max(BUFFER_MIN), whole.max(BUFFER_MIN)];
            buffers.dedup();
            for (index, buffer) in buffers.into_iter().enumerate() {
                let part = if index == 0 { "quarter" } else { "whole" };
                let name = format!("one-{}-{}-{part}", rate_name(rate), time_name(round_trip));
                let mut cell = Cell::one(&name, rate, round_trip, buffer);
                cell.goals.used = Some(0.95);
                cells.push(cell);
            }
        }
    }
    let mut read = Cell::one("read-1g-500us", GBIT, 500 * US, 256 << 10);
    (read.operation, read.goals.used) = (Operation::Read, Some(0.95));
    cells.push(read);
    let mut read = Cell::one("read-200m-100us", GBIT / 5, 100 * US, 128 << 10);
    (read.operation, read.goals.used) = (Operation::Read, Some(0.95));
    cells.push(read);
    let mut marks = Cell::one("ecn-10g-50us", 10 * GBIT, 50 * US, 1 << 20);
    (marks.port.ecn, marks.goals.used) = (Some(150 << 10), Some(0.95));
    cells.push(marks);
    cells
}

/// Many senders into one port, with and without a host that sends small requests.
fn incast() -> Vec<Cell> {
    let mut cells = Vec::new();
    for (rate, round_trip, buffer) in [
        (GBIT, 200 * US, 256 << 10),
        (10 * GBIT, 50 * US, 512 << 10),
        (100 * GBIT, 20 * US, 2 << 20),
    ] {
        for hosts in [2, 8, 32, 64] {
            let name = format!("incast-{}-{hosts}", rate_name(rate));
            let mut cell = Cell::one(&name, rate, round_trip, buffer);
            (cell.hosts, cell.size, cell.depth) = (hosts, 16 << 10, 32);
            cell.interface = rate;
            cell.small = true;
            cell.goals.used = Some(0.9);
            cell.goals.fairness = Some(0.9);
            cells.push(cell);
        }
    }
    let mut many = Cell::one("connections-1g-16", GBIT, 200 * US, 256 << 10);
    (many.hosts, many.connections, many.size, many.depth) = (2, 16, 16 << 10, 16);
    (many.goals.used, many.goals.fairness) = (Some(0.9), Some(0.9));
    cells.push(many);
    cells
}

/// One flow beside a TCP flow.
fn beside_cubic() -> Vec<Cell> {
    let (slow, fast) = ((GBIT / 5, 100 * US, 128 << 10), (GBIT, 100 * US, 256 << 10));
    let long = (GBIT, 5 * MS, 640 << 10);
    [(Operation::Write, slow), (Operation::Write, fast), (Operation::Write, long)]
        .map(|(operation, link)| (operation, link, Mtu::M1024))
        .into_iter()
        .chain([(Operation::Read, slow, Mtu::M1024), (Operation::Read, fast, Mtu::M1024)])
        .chain([(Operation::Write, fast, Mtu::M4096), (Operation::Read, fast, Mtu::M4096)])
        .map(|(operation, (rate, round_trip, buffer), mtu)| {
            let read = if operation == Operation::Read { "read-" } else { "" };
            let jumbo = if mtu == Mtu::M4096 { "-jumbo" } else { "" };
            let name = format!("cubic-{read}{}-{}{jumbo}", rate_name(rate), time_name(round_trip));
            let mut cell = Cell::one(&name, rate, round_trip, buffer);
            (cell.operation, cell.mtu, cell.cubic) = (operation, mtu, true);
            (cell.warm, cell.time) = (4 * SEC, 8 * SEC);
            cell.goals.cubic = Some((0.25, 0.75));
            cell
        })
        .collect()
}

/// Loss, reordering and changes.
fn faults() -> Vec<Cell> {
    let base = |name: &str| Cell::one(name, GBIT, 2 * MS, 512 << 10);
    let mut cells = Vec::new();
    for (name, loss, least) in [("loss-0.1", 10, 0.9), ("loss-1", 100, 0.8)] {
        let mut cell = base(name);
        (cell.port.loss, cell.goals.used) = (loss, Some(least));
        cells.push(cell);
    }
    let mut lan = Cell::one("loss-1-10g-50us", 10 * GBIT, 50 * US, 512 << 10);
    (lan.port.loss, lan.goals.used) = (100, Some(0.8));
    cells.push(lan);
    let mut late = base("late-3");
    (late.port.late, late.port.late_by, late.goals.used) = (30, 500 * US, Some(0.9));
    cells.push(late);
    let mut halves = base("halves");
    halves.changes = vec![(halves.warm / 2, Change::Rate(GBIT / 2))];
    halves.goals.used = Some(0.9);
    cells.push(halves);
    let mut longer = base("longer");
    longer.changes = vec![(longer.warm / 4, Change::Delay(5 * MS))];
    longer.goals.used = Some(0.9);
    cells.push(longer);
    let mut shorter = base("shorter");
    shorter.changes = vec![(shorter.warm / 2, Change::Delay(100 * US))];
    shorter.goals.used = Some(0.9);
    cells.push(shorter);
    // Programs that get their turn late: the round trip is that of the processor.
    for (name, rate, scheduling) in [
        ("late-turns-50m", GBIT / 20, 4 * MS),
        ("late-turns-200m", GBIT / 5, 2 * MS),
        ("late-turns-1g", GBIT, MS),
    ] {
        let mut cell = Cell::one(name, rate, 200 * US, 256 << 10);
        (cell.size, cell.depth, cell.scheduling) = (4096, 64, scheduling);
        cell.goals.used = Some(0.9);
        cells.push(cell);
    }
    for (name, loss) in [("small-loss-1", 100), ("small-loss-0.1", 10)] {
        let mut tail = Cell::one(name, 10 * GBIT, 50 * US, 512 << 10);
        (tail.hosts, tail.small, tail.size, tail.depth) = (1, true, 4096, 1);
        tail.port.loss = loss;
        (tail.warm, tail.time) = (10 * MS, SEC);
        tail.goals.longest = Some(50 * MS);
        cells.push(tail);
    }
    cells
}
