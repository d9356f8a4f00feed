//! The plan of a run, drawn from its seed: machines, their network, sessions, disks, their use, and
//! the faults.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::Duration;

use bowline_roce::GiveUp;
use bowline_rtrs::Policy;
use bowline_rtrs::client::ReadKeys;
use bowline_verbs::Mtu;
use bowline_wire::roce::IcrcPolicy;
use bowline_wire::rtrs::PORT;
use serde::{Deserialize, Serialize};

use super::serde_defs;
use super::single_fault::FaultCase;
use super::trial::{self, Trial};
use crate::engine::queue::{MS, SEC, US};
use crate::engine::rng::Rng;
use crate::roce::net::NetPlan;
use crate::roce::plan::{ACK_DELAYS, Hints, HostPlan};

/// A family of runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Scenario {
    /// A mixture of all kinds of faults.
    Swarm,
    /// No faults: nothing may fail, and everything ends soon.
    Calm,
    /// The network loses, repeats, damages and reorders datagrams.
    #[serde(rename = "weather")]
    NetworkFaults,
    /// A fault at a certain step of making or ending a connection.
    Steps,
    /// Lines are cut for a while.
    Cuts,
    /// Programs stall for a while, so that they answer nobody.
    Stalls,
    /// Storage takes seconds.
    Slow,
    /// Storage takes seconds, and lines are cut meanwhile.
    Late,
    /// Machines die and start again.
    Crash,
    /// Paths are added, removed, disconnected and connected again under load.
    Paths,
    /// A client writes to chunks that it must not change any more.
    Hostile,
    /// Keys for single READs, with a server that does not invalidate them or uses them after its
    /// response.
    Keys,
    /// A server with a write cache dies while long writes are under way.
    Volatile,
    /// Disks are unmapped and mapped again while others are in use, the server dies, and not all
    /// paths notice.
    Disks,
    /// Lines delay what they carry while paths are given up, and deliver it later.
    #[serde(rename = "held")]
    DelayedLines,
    /// A single fault at one step of a base run: the seed enumerates the faults and steps.
    #[serde(rename = "each")]
    SingleFault,
}

impl Scenario {
    /// Number of scenarios that seeds draw from.
    const DRAWN: u64 = 15;

    /// All scenarios.
    pub const ALL: [Self; 16] = [
        Self::Swarm,
        Self::Calm,
        Self::NetworkFaults,
        Self::Steps,
        Self::Cuts,
        Self::Stalls,
        Self::Slow,
        Self::Late,
        Self::Crash,
        Self::Paths,
        Self::Hostile,
        Self::Keys,
        Self::Volatile,
        Self::Disks,
        Self::DelayedLines,
        Self::SingleFault,
    ];

    /// The scenario's name on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Swarm => "swarm",
            Self::Calm => "calm",
            Self::NetworkFaults => "weather",
            Self::Steps => "steps",
            Self::Cuts => "cuts",
            Self::Stalls => "stalls",
            Self::Slow => "slow",
            Self::Late => "late",
            Self::Crash => "crash",
            Self::Paths => "paths",
            Self::Hostile => "hostile",
            Self::Keys => "keys",
            Self::Volatile => "volatile",
            Self::Disks => "disks",
            Self::DelayedLines => "held",
            Self::SingleFault => "each",
        }
    }

    /// Finds a scenario by its name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|s| s.name() == name)
    }
}

/// A machine: its devices, and the delay of its program.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct NodePlan {
    pub(crate) hosts: Vec<HostPlan>,
    /// Longest time in nanoseconds until the program handles events of its devices.
    pub(crate) look: u64,
}

/// A disk of the server.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct DiskPlan {
    pub(crate) sectors: u64,
    /// Block size in bytes.
    pub(crate) logical: u32,
    /// Writes are durable only after a flush.
    pub(crate) cache: bool,
    pub(crate) fua: bool,
    /// Reads are answered from the disk's memory directly.
    pub(crate) direct: bool,
    /// Typical and longest duration of an operation, in nanoseconds.
    pub(crate) takes: (u64, u64),
    /// Operations in a thousand that take the longest time.
    pub(crate) slow: u64,
}

/// A client and its disks.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct ClientPlan {
    /// Local port and server's port of each path the session is opened with.
    pub(crate) paths: Vec<(u8, u8)>,
    pub(crate) io_connections: u16,
    pub(crate) poll_connections: u16,
    #[serde(with = "serde_defs::PolicyDef")]
    pub(crate) policy: Policy,
    #[serde(with = "serde_defs::ReadKeysDef")]
    pub(crate) read_keys: ReadKeys,
    /// The client counts keys, so that servers need not send them; kernels do not.
    pub(crate) counts_keys: bool,
    /// READs in a thousand whose data goes to several places.
    pub(crate) scattered: u64,
    /// Fixed reconnect delay in nanoseconds, as kernels have it.
    pub(crate) kernel_delay: Option<u64>,
    pub(crate) max_reconnects: i16,
    /// Requests wait while the session has no path; otherwise they fail.
    pub(crate) queues: bool,
    /// Requests of the program, and how many are in progress at a time.
    pub(crate) requests: u32,
    pub(crate) depth: usize,
    /// Longest request in bytes.
    pub(crate) request_max: u32,
    /// Longest pause of the program in nanoseconds.
    pub(crate) gap: u64,
    pub(crate) start: u64,
    pub(crate) hostile: bool,
    /// Chance in a thousand, for each round of the program, that it closes its session, to open it
    /// again.
    #[serde(default)]
    pub(crate) leaves: u64,
    pub(crate) disks: Vec<DiskPlan>,
    /// Mean time between two moments in which it gives a disk up or takes one again, if it has
    /// several.
    pub(crate) swap: u64,
}

/// A kind of fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Fault {
    /// A line between a client's port and one of the server's is cut.
    Cut,
    /// A line is cut in one direction only.
    HalfCut,
    /// A machine dies.
    Crash,
    /// A program does nothing for a while.
    Stall,
    /// The client gets a random command for a path.
    Path,
    /// The server closes a path.
    Kick,
    /// The server dies and is back soon, and a line is cut meanwhile, so that one path of a client
    /// does not notice.
    #[serde(rename = "unseen")]
    UnnoticedCrash,
}

/// A fault at a certain step, counted in inputs of the client's core.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct StepPlan {
    pub(crate) client: usize,
    pub(crate) after: u64,
    pub(crate) what: Fault,
}

/// The plan of one run.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Plan {
    pub(crate) scenario: Scenario,
    pub(crate) net: NetPlan,
    /// The machines; the server's comes first.
    pub(crate) nodes: Vec<NodePlan>,
    pub(crate) clients: Vec<ClientPlan>,
    pub(crate) queue_depth: u16,
    pub(crate) chunk: u32,
    pub(crate) invalidate: bool,
    /// Burst size in bytes reported to bindings, if not the devices' own: chunks are shorter than
    /// most device bursts.
    pub(crate) burst: Option<usize>,
    /// The server does not always invalidate the keys it owes, and repeats writes with
    /// old keys.
    #[serde(rename = "rude")]
    pub(crate) misbehaving: bool,
    /// Heartbeats: interval in nanoseconds, how many may be missed, and the silence in nanoseconds
    /// before the peer is probed.
    pub(crate) heartbeat: (u64, u32, u64),
    /// Kinds of faults, and the mean time in nanoseconds between two faults of that kind.
    pub(crate) faults: Vec<(Fault, u64)>,
    pub(crate) step: Option<StepPlan>,
    #[serde(rename = "each")]
    pub(crate) single_fault: Option<FaultCase>,
    /// Cuts in a thousand that delay what the line carries instead of losing it.
    pub(crate) holds: u64,
    /// Longest duration of a fault in nanoseconds.
    pub(crate) fault_max: u64,
    /// Duration of the phase with faults in nanoseconds.
    pub(crate) active: u64,
    /// Additional trials.
    pub(crate) trials: Vec<Trial>,
    /// A fault injected often when a client closes its session.
    #[serde(default)]
    pub(crate) at_close: Option<Fault>,
    /// The run ends with final IO.
    #[serde(default, rename = "fresh")]
    pub(crate) final_io: bool,
}

/// Mixed into the seed of the random numbers for lines that delay.
pub(crate) const HOLDS: u64 = 0x68_6f6c_6473;
/// Faults that may be injected when a session is closed.
const AT_CLOSE: [Fault; 7] = [
    Fault::Cut,
    Fault::HalfCut,
    Fault::Crash,
    Fault::Stall,
    Fault::Path,
    Fault::Kick,
    Fault::UnnoticedCrash,
];
/// Approximate bytes of all requests of a run.
const VOLUME: u64 = 600_000;

/// What the runs of a plan have, by its scenario and by chance.
struct Features {
    scenario: Scenario,
    /// Caches of disks lose what was not flushed when the server dies.
    volatile: bool,
    /// Keys are good for one READ, or pieces of memory are scattered.
    keys: bool,
    /// Clients have several disks and give them up now and then.
    disks: bool,
    /// Lines hold what they are given, and deliver it late.
    held: bool,
    /// Datagrams are lost, delayed and repeated.
    network_faults: bool,
    /// A fault at a drawn step of making a connection.
    steps: bool,
    /// Requests overlap while answers are late.
    late: bool,
    /// Lines are cut.
    cuts: bool,
    /// Programs stall.
    stalls: bool,
    /// Storage takes long.
    slow: bool,
    /// Machines die.
    crash: bool,
    /// Paths are added and removed.
    paths: bool,
    /// The first client writes to chunks that the server has.
    hostile: bool,
}

impl Features {
    fn draw(rng: &mut Rng, extra: &mut Rng, forced: Option<Scenario>) -> Self {
        use Scenario as S;
        // Weighted twice, because a hostile client acts at the critical moment in few of its runs.
        let drawn = match rng.below(Scenario::DRAWN + 1) {
            Scenario::DRAWN => S::Hostile,
            drawn => Scenario::ALL[drawn as usize],
        };
        let scenario = forced.unwrap_or(drawn);
        let volatile = scenario == S::Volatile;
        let keys = scenario == S::Keys;
        let disks = scenario == S::Disks;
        let held = scenario == S::DelayedLines;
        let any = |rng: &mut Rng, of: S, often: u64| {
            scenario == of || scenario == S::Swarm && rng.chance(often)
        };
        let network_faults = any(rng, S::NetworkFaults, 300);
        let steps = any(rng, S::Steps, 250);
        let late = any(rng, S::Late, 150);
        let cuts = any(rng, S::Cuts, 350) || late || (keys || disks) && extra.chance(500) || held;
        let stalls = any(rng, S::Stalls, 200);
        let slow = any(rng, S::Slow, 250) || late;
        let crash = any(rng, S::Crash, 300) || volatile || disks && extra.chance(500);
        let paths = any(rng, S::Paths, 300) || disks && extra.chance(700);
        let hostile = any(rng, S::Hostile, 150);
        Self {
            scenario,
            volatile,
            keys,
            disks,
            held,
            network_faults,
            steps,
            late,
            cuts,
            stalls,
            slow,
            crash,
            paths,
            hostile,
        }
    }

    /// Draws what a client does differently because of the features of the run.
    fn adjust_client(
        &self,
        (rng, extra): (&mut Rng, &mut Rng),
        client: &mut ClientPlan,
        active: u64,
    ) {
        // In most runs there is work as long as there are faults.
        if rng.chance(700) {
            client.gap = active / u64::from(client.requests) * 8;
        }
        client.leaves = extra.pick(&[0, 0, 0, 0, 0, 30, 200]);
        if self.hostile || self.held || self.volatile || self.disks {
            client.leaves = 0;
        }
        if client.hostile && self.scenario == Scenario::Hostile {
            // The server keeps chunks for long while more requests come.
            client.disks[0].takes.0 = extra.pick(&[200 * US, 5 * MS, 20 * MS]);
            client.depth = client.depth.max(8);
            client.requests = client.requests.max(80);
            client.gap = client.gap.min(MS);
        }
        if client.hostile && rng.chance(700) {
            client.paths.truncate(1);
        }
        if self.slow && rng.chance(700) {
            client.disks[0].takes.1 = rng.magnitude(100 * MS, 20 * SEC);
            client.disks[0].slow = rng.pick(&[10, 100, 500]);
        }
        if self.late && rng.chance(700) {
            // Few sectors, so that requests overlap often.
            client.disks[0].sectors = 16;
            client.request_max = 4096;
        }
        if self.paths && rng.chance(300) {
            client.max_reconnects = rng.between(0, 3) as i16;
        }
        if extra.chance(if self.keys { 600 } else { 150 }) {
            client.read_keys = ReadKeys::PerRequest;
        }
        if extra.chance(if self.keys { 600 } else { 150 }) {
            client.scattered = extra.pick(&[100, 500, 1000]);
        }
        if extra.chance(150) {
            client.io_connections = 4;
        }
        if extra.chance(100) {
            client.poll_connections = extra.between(1, 2) as u16;
        }
        self.adjust_load(extra, client, active);
    }

    /// Draws the disks and requests of the scenarios that need particular ones.
    fn adjust_load(&self, extra: &mut Rng, client: &mut ClientPlan, active: u64) {
        // Derived instead of drawn, so that everything drawn after it stays the same.
        client.counts_keys = client.start.is_multiple_of(2);
        if self.volatile {
            client.queues = true;
            client.max_reconnects = -1;
            client.disks[0].cache = true;
            client.disks[0].fua &= extra.chance(500);
            let most = client.disks[0].sectors as u32 * 512;
            client.request_max = most.min(extra.pick(&[16_384, 40_960]));
            client.disks[0].takes.0 = extra.pick(&[200 * US, 5 * MS, 50 * MS]);
        }
        if self.held {
            // Few sectors, so that requests overlap often, and requests always in progress.
            client.disks[0].sectors = 16;
            client.request_max = 4096;
            client.requests = extra.between(200, 400) as u32;
            client.gap = active / u64::from(client.requests) * extra.between(1, 8);
            client.depth = client.depth.max(4);
        }
        if self.disks {
            // Requests always in progress.
            client.request_max = client.request_max.min(8192);
            client.requests = extra.between(100, 400) as u32;
            client.gap = active / u64::from(client.requests) * extra.between(1, 8);
            client.depth = client.depth.max(4);
        }
    }

    /// Draws which faults are injected, and how often.
    fn draw_faults(&self, rng: &mut Rng, active: u64) -> Vec<(Fault, u64)> {
        let mut faults = Vec::new();
        let mut add = |rng: &mut Rng, on: bool, fault: Fault| {
            if on {
                faults.push((fault, active / rng.between(1, 6) + 1));
            }
        };
        add(rng, self.cuts, Fault::Cut);
        let half = self.cuts && rng.chance(300) || self.held;
        add(rng, half, Fault::HalfCut);
        add(rng, self.crash, Fault::Crash);
        add(rng, self.stalls, Fault::Stall);
        add(rng, self.paths, Fault::Path);
        let kick = (self.paths || self.cuts) && rng.chance(400);
        add(rng, kick, Fault::Kick);
        add(rng, self.disks, Fault::UnnoticedCrash);
        faults
    }
}

fn draw_step(rng: &mut Rng, clients: usize) -> StepPlan {
    StepPlan {
        client: rng.index(clients),
        after: rng.magnitude(1, 100) - 1,
        what: rng.pick(&[
            Fault::Cut,
            Fault::Cut,
            Fault::HalfCut,
            Fault::Crash,
            Fault::Crash,
            Fault::Stall,
            Fault::Path,
            Fault::Kick,
        ]),
    }
}

impl Plan {
    /// Draws the plan of a seed. Everything added to plans later is drawn from `extra`, so that old
    /// seeds keep their plans.
    pub(crate) fn draw(rng: &mut Rng, extra: &mut Rng, forced: Option<Scenario>) -> Self {
        // Separate generators, so that what they draw does not change the rest of the plan.
        let mut trials = Rng::new(extra.clone().next());
        let mut holds = Rng::new(extra.clone().next() ^ HOLDS);
        let features = Features::draw(rng, extra, forced);
        let Features { scenario, held, disks, keys, .. } = features;
        use Scenario as S;
        let count = rng.pick(&[1, 1, 1, 2, 3]) + usize::from(features.hostile);
        let v6 = rng.chance(300);
        let mtu = rng.pick(&[Mtu::M512, Mtu::M1024, Mtu::M1024, Mtu::M4096, Mtu::M4096]);
        let give_up = rng.pick(&[500 * MS, 3 * SEC, 3 * SEC]);
        let mut number = 0;
        let nodes: Vec<NodePlan> = (0..=count)
            .map(|at| {
                let ports = rng.pick(&[1, 1, 2, 2, 3]).max(if disks || held { 2 } else { 1 });
                let hosts = (0..ports).map(|_| {
                    number += 1;
                    draw_host(rng, (number, at == 0), (v6, mtu), give_up)
                });
                let hosts: Vec<HostPlan> = hosts.collect();
                NodePlan { hosts, look: rng.pick(&[0, 2 * US, 50 * US, 2 * MS]) }
            })
            .collect();
        let net = draw_net(rng, features.network_faults);
        let queue_depth = rng.pick(&[1, 2, 3, 8, 16, 32]);
        let chunk = rng.pick(&[8192, 8192, 16_384, 32_768]);
        let active = rng
            .magnitude(10 * MS, if features.slow || features.stalls { 30 * SEC } else { 8 * SEC });
        // Long enough to notice that a server is gone.
        let active = active.max(if disks { 3 * SEC } else { 0 });
        let active = active.max(if held { 10 * SEC } else { 0 });
        let servers = nodes[0].hosts.len();
        let clients = (0..count)
            .map(|at| {
                let own = nodes[at + 1].hosts.len();
                let mut client = draw_client(rng, (own, servers), queue_depth, count as u64);
                client.hostile = features.hostile && at == 0;
                features.adjust_client((rng, extra), &mut client, active);
                client
            })
            .collect::<Vec<_>>();
        let trials = trial::draw(&mut trials, scenario, nodes.len(), active);
        let interval = rng.pick(&[500 * MS, SEC, 5 * SEC]);
        let faults = features.draw_faults(rng, active);
        let step = features.steps.then(|| draw_step(rng, count));
        let refreshed = if scenario == S::Hostile { 900 } else { 600 };
        let mut plan = Self {
            scenario,
            net,
            nodes,
            clients,
            queue_depth,
            chunk,
            invalidate: rng.chance(refreshed),
            misbehaving: extra.chance(if keys {
                500
            } else if scenario == S::Swarm {
                100
            } else {
                0
            }),
            heartbeat: (interval, rng.pick(&[2, 5]), rng.pick(&[200 * MS, SEC])),
            burst: extra.chance(600).then(|| extra.pick(&[512, 4096, 8192, 12_288])),
            faults,
            step,
            single_fault: None,
            holds: if held { 1000 } else { holds.pick(&[0, 0, 300, 700]) },
            fault_max: rng.magnitude(MS, if disks { SEC } else { 20 * SEC }),
            active,
            trials,
            at_close: None,
            final_io: true,
        };
        if !plan.faults.is_empty() && extra.chance(500) {
            let what = extra.pick(&AT_CLOSE);
            plan.at_close = Some(what);
        }
        for (node, client) in plan.nodes[1..].iter().zip(&mut plan.clients) {
            draw_disks(extra, client, active, disks);
            if (disks || held) && client.paths.len() == 1 {
                // All paths it can have, so that not all of them notice the same fault.
                client.paths = all_pairs(node.hosts.len(), servers);
            }
        }
        plan
    }

    /// Whether the server must keep this client from changing its chunks. A client with several
    /// paths has a key for each; only the key of the path a request came by is withdrawn [RT-44].
    pub(crate) fn protects_chunks_of(&self, client: usize) -> bool {
        let one = self.clients[client].paths.len() == 1;
        let more = self.faults.iter().any(|(fault, _)| *fault == Fault::Path)
            || self.step.is_some_and(|step| step.what == Fault::Path);
        !self.clients[client].hostile || self.invalidate && one && !more
    }

    /// Whether there are faults of any kind, so that paths may be lost.
    pub(crate) fn is_faulty(&self) -> bool {
        let net = &self.net;
        let disturbed = net.loss + net.repeat + net.damage + net.forge + net.jitter > 0;
        let wrong = !self.faults.is_empty()
            || self.step.is_some()
            || self.single_fault.is_some()
            || self.misbehaving;
        disturbed || wrong || !self.trials.is_empty() || self.clients.iter().any(|c| c.hostile)
    }
}

fn draw_host(
    rng: &mut Rng,
    (n, listens): (u8, bool),
    (v6, mtu): (bool, Mtu),
    give_up: u64,
) -> HostPlan {
    let hints = rng.pick(&[Hints::Right, Hints::Right, Hints::Mixed]);
    HostPlan {
        addr: match v6 {
            true => IpAddr::V6(Ipv6Addr::new(0xfd77, 0, 0, 0, 0, 0, 0, n.into())),
            false => IpAddr::V4(Ipv4Addr::new(10, 77, 0, n)),
        },
        mtu,
        icrc: IcrcPolicy::Solve,
        gso: rng.chance(700),
        window: rng.pick(&[16, 0, 240]),
        hints,
        ack_delay: Duration::from_nanos(rng.pick(&ACK_DELAYS)),
        turn: rng.pick(&[0, 2 * US, 20 * US, 200 * US]),
        look: 0,
        datagrams: 0,
        listens: listens.then_some(PORT),
        give_up: GiveUp::After(Duration::from_nanos(give_up)),
    }
}

fn draw_net(rng: &mut Rng, network_faults: bool) -> NetPlan {
    let delay = rng.magnitude(US, 2 * MS);
    let some = |rng: &mut Rng, most: u64| {
        if network_faults && rng.chance(600) { rng.magnitude(1, most) } else { 0 }
    };
    NetPlan {
        delay,
        jitter: if network_faults && rng.chance(600) { rng.magnitude(1, 4 * delay) } else { 0 },
        loss: some(rng, 60),
        repeat: some(rng, 200),
        damage: some(rng, 40),
        forge: some(rng, 30),
        any_opcode: true,
        queue: u64::MAX / 4096,
        per_kib: 80,
    }
}

/// All pairs of a client's port and a server's port.
fn all_pairs(own: usize, servers: usize) -> Vec<(u8, u8)> {
    (0..own).flat_map(|a| (0..servers).map(move |b| (a as u8, b as u8))).collect()
}

fn draw_client(
    rng: &mut Rng,
    (own, servers): (usize, usize),
    queue_depth: u16,
    count: u64,
) -> ClientPlan {
    let mut pairs = all_pairs(own, servers);
    rng.shuffle(&mut pairs);
    pairs.truncate(1 + rng.index(pairs.len().min(4)));
    let logical = rng.pick(&[512, 512, 4096]);
    let blocks = rng.pick(&[8, 32, 64]);
    let request_max = rng.magnitude(512, 70_000).next_multiple_of(u64::from(logical));
    let share = VOLUME / (request_max / 2 + 200) / count;
    let takes = rng.pick(&[0, 5 * US, 200 * US, 5 * MS]);
    ClientPlan {
        paths: pairs,
        io_connections: rng.pick(&[0, 1, 1, 2, 3]),
        poll_connections: 0,
        policy: rng.pick(&[Policy::RoundRobin, Policy::MinInflight, Policy::MinLatency]),
        read_keys: ReadKeys::LongLived,
        counts_keys: true,
        scattered: 0,
        kernel_delay: rng.chance(150).then(|| rng.magnitude(MS, 5 * SEC)),
        max_reconnects: -1,
        queues: rng.chance(600),
        requests: rng.magnitude(4, share.clamp(8, 150)) as u32,
        depth: rng.pick(&[1, 2, 8, 2 * usize::from(queue_depth)]),
        request_max: (request_max as u32).min(blocks as u32 * 4096),
        gap: rng.pick(&[0, 20 * US, MS, 100 * MS]),
        start: rng.magnitude(1, 5 * MS),
        hostile: false,
        leaves: 0,
        disks: vec![DiskPlan {
            sectors: blocks * 8,
            logical,
            cache: rng.chance(600),
            fua: rng.chance(500),
            direct: rng.chance(300),
            takes: (takes, 20 * takes),
            slow: 50,
        }],
        swap: 0,
    }
}

/// Draws the further disks of a client, and how often they are swapped; in runs `about` disks there
/// is at least one.
fn draw_disks(extra: &mut Rng, client: &mut ClientPlan, active: u64, about: bool) {
    let more = if about { extra.pick(&[1, 2, 3]) } else { extra.pick(&[0, 0, 0, 1, 2, 3]) };
    if more == 0 {
        return;
    }
    let first = client.disks[0].clone();
    client.disks.extend((0..more).map(|_| DiskPlan {
        sectors: 8 * extra.pick(&[2, 2, 8, 32]),
        // A request must hold at least one block.
        logical: if client.request_max < 4096 { 512 } else { extra.pick(&[512, 4096]) },
        cache: extra.chance(600),
        fua: extra.chance(500),
        direct: extra.chance(300),
        ..first
    }));
    // Enough requests for each disk.
    client.requests += client.requests * more / 2;
    client.swap = active / extra.magnitude(4, 100);
}
