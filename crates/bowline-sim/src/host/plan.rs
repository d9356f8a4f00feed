//! The plan of a run, drawn from its seed: nodes, processes, what they do, and the faults.

use serde::{Deserialize, Serialize};

use crate::engine::queue::{MS, SEC};
use crate::engine::rng::Rng;

/// A family of runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Scenario {
    /// A mixture of all kinds of faults.
    Swarm,
    /// No faults.
    Calm,
    /// Processes are killed.
    Kills,
    /// Processes share sockets, and some are killed.
    Forks,
    /// Nodes are killed, and start again.
    Crash,
    /// Nodes hand over.
    HandOver,
    /// Programs write to shared memory what they must not.
    Lies,
    /// Programs of several users want more than they may have.
    Crowd,
    /// Receivers are slow, and buffers short.
    Full,
}

impl Scenario {
    /// All scenarios.
    pub const ALL: [Self; 9] = [
        Self::Swarm,
        Self::Calm,
        Self::Kills,
        Self::Forks,
        Self::Crash,
        Self::HandOver,
        Self::Lies,
        Self::Crowd,
        Self::Full,
    ];

    /// The scenario's name on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Swarm => "swarm",
            Self::Calm => "calm",
            Self::Kills => "kills",
            Self::Forks => "forks",
            Self::Crash => "crash",
            Self::HandOver => "handover",
            Self::Lies => "lies",
            Self::Crowd => "crowd",
            Self::Full => "full",
        }
    }

    /// Finds a scenario by its name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|s| s.name() == name)
    }
}

/// What each user but the node's own may have.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct QuotaPlan {
    pub(crate) sockets: usize,
    pub(crate) channels: usize,
    /// Bytes of the buffers of all sockets, in those of one.
    pub(crate) buffers: usize,
}

/// A node.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct NodePlan {
    /// Buffers of a socket in bytes.
    pub(crate) send_buffer: usize,
    pub(crate) recv_buffer: usize,
    /// Messages that the pair of a socket takes in one direction.
    pub(crate) tokens: usize,
    /// Bytes that a channel takes in one direction.
    pub(crate) channel: usize,
    pub(crate) quota: QuotaPlan,
}

/// A process, and what its program does.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct ProcessPlan {
    pub(crate) node: usize,
    /// 0 is the node's own user.
    pub(crate) user: u32,
    /// Sockets that it opens.
    pub(crate) sockets: usize,
    /// Calls that it makes before it does nothing but receive.
    pub(crate) calls: u64,
    /// After so many steps it is killed.
    pub(crate) dies_at: Option<u64>,
    /// It pushes word by word.
    pub(crate) is_slow: bool,
    /// Longest message in bytes.
    pub(crate) len_max: usize,
    /// Messages in a thousand that are too long for a ring.
    pub(crate) longs: u64,
    /// Calls in a thousand that receive, and those that wait.
    pub(crate) receives: u64,
    pub(crate) waits: u64,
    /// Messages in a thousand that the node is asked to send, whether there is credit or not.
    pub(crate) asks: u64,
    /// Calls in a thousand that start a process with the same sockets.
    pub(crate) forks: u64,
    /// Calls in a thousand that write to shared memory what they must not.
    pub(crate) lies: u64,
    /// Calls in a thousand that send many requests at once.
    pub(crate) floods: u64,
    /// It ends when it has made its calls.
    pub(crate) ends: bool,
    /// Nanoseconds after which a send gives up: programs may wait for each other.
    pub(crate) send_timeout: u64,
    /// It pauses up to so long after a call, nanoseconds.
    pub(crate) pause: u64,
}

/// A fault.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Fault {
    /// A node is killed, and starts again after a time.
    Crash { away: u64 },
    /// A node hands over to another, which resumes after so many steps of others.
    HandOver { steps: u64 },
}

/// A fault after so many steps of the run.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct FaultPlan {
    pub(crate) after: u64,
    pub(crate) node: usize,
    pub(crate) what: Fault,
}

/// The plan of one run.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Plan {
    pub(crate) scenario: Scenario,
    pub(crate) nodes: Vec<NodePlan>,
    pub(crate) processes: Vec<ProcessPlan>,
    pub(crate) faults: Vec<FaultPlan>,
    /// How often programs go on in the middle of what a node does, in a thousand.
    pub(crate) between: u64,
    /// Steps of programs in a thousand, the others are those of nodes, where both can go on.
    pub(crate) programs: u64,
}

/// Steps within which faults strike.
const ACTIVE: u64 = 1500;

impl Plan {
    pub(crate) fn draw(rng: &mut Rng, forced: Option<Scenario>) -> Self {
        use Scenario as S;
        let scenario = forced.unwrap_or_else(|| S::ALL[rng.index(S::ALL.len())]);
        let swarm = scenario == S::Swarm;
        let is = |which| scenario == which || swarm;
        let full = scenario == S::Full || rng.chance(300);
        let crowd = scenario == S::Crowd || swarm && rng.chance(300);
        let nodes = 1 + rng.index(2);
        let nodes = (0..nodes).map(|_| NodePlan::draw(rng, full, crowd)).collect::<Vec<_>>();
        let count = if crowd { rng.between(3, 8) } else { rng.between(2, 5) };
        let mut processes: Vec<_> = (0..count)
            .map(|_| {
                let mut process = ProcessPlan::draw(rng, nodes.len(), full);
                if crowd {
                    process.user = rng.below(3) as u32;
                    process.sockets = rng.between(1, 4) as usize;
                    process.floods = rng.pick(&[0, 0, 100]);
                }
                if is(S::Kills) && rng.chance(400) || is(S::Forks) && rng.chance(300) {
                    process.dies_at = Some(rng.magnitude(1, 600));
                }
                if is(S::Forks) && rng.chance(600) {
                    process.forks = rng.pick(&[30, 100, 200]);
                }
                process
            })
            .collect();
        if is(S::Lies) {
            let liar = rng.index(processes.len());
            processes[liar].lies = rng.pick(&[30, 100, 400]);
        }
        if scenario == S::Full && rng.chance(500) {
            // One that sends much at once, and the others are slow.
            processes.iter_mut().for_each(|process| process.pause = 300 * MS);
            let first = &mut processes[0];
            (first.calls, first.receives, first.waits, first.pause) = (300, 0, 0, 0);
        }
        let mut faults = Vec::new();
        if is(S::Crash) && rng.chance(if swarm { 300 } else { 1000 }) {
            let what = Fault::Crash { away: rng.magnitude(MS, SEC) };
            faults.push(FaultPlan::draw(rng, nodes.len(), what));
        }
        if is(S::HandOver) {
            for _ in 0..rng.between(1, 3) {
                let what = Fault::HandOver { steps: rng.magnitude(1, 200) };
                faults.push(FaultPlan::draw(rng, nodes.len(), what));
            }
        }
        faults.sort_by_key(|fault| fault.after);
        let between = rng.pick(&[0, 20, 100, 300]);
        let programs = rng.pick(&[200, 500, 700, 900]);
        Self { scenario, nodes, processes, faults, between, programs }
    }
}

impl FaultPlan {
    fn draw(rng: &mut Rng, nodes: usize, what: Fault) -> Self {
        Self { after: rng.below(ACTIVE), node: rng.index(nodes), what }
    }
}

impl NodePlan {
    fn draw(rng: &mut Rng, full: bool, crowd: bool) -> Self {
        let buffer = |rng: &mut Rng| {
            if full { rng.magnitude(2304, 12_000) } else { rng.magnitude(16_000, 106_496) }
        };
        let (send_buffer, recv_buffer) = (buffer(rng) as usize, buffer(rng) as usize);
        let quota = if crowd {
            QuotaPlan {
                sockets: rng.between(1, 5) as usize,
                channels: rng.between(1, 6) as usize,
                buffers: rng.between(1, 5) as usize,
            }
        } else {
            QuotaPlan { sockets: 100, channels: 100, buffers: 100 }
        };
        Self {
            send_buffer,
            recv_buffer,
            tokens: rng.between(3, 8) as usize,
            channel: rng.magnitude(512, 200_000) as usize,
            quota,
        }
    }
}

impl ProcessPlan {
    fn draw(rng: &mut Rng, nodes: usize, full: bool) -> Self {
        let long = if rng.chance(150) { 50_000 } else { 3000 };
        Self {
            node: rng.index(nodes),
            user: if rng.chance(700) { 0 } else { 1 },
            sockets: 1 + rng.index(2),
            calls: rng.magnitude(5, 60),
            dies_at: None,
            is_slow: rng.chance(500),
            len_max: if full { 1500 } else { rng.magnitude(16, long) as usize },
            longs: rng.pick(&[0, 0, 0, 50]),
            receives: rng.pick(&[0, 200, 500, 800]),
            waits: rng.pick(&[0, 300, 700, 1000]),
            asks: rng.pick(&[0, 0, 100, 500]),
            forks: 0,
            lies: 0,
            floods: rng.pick(&[0, 0, 0, 20]),
            ends: rng.chance(250),
            send_timeout: rng.pick(&[5 * MS, 50 * MS, 300 * MS]),
            pause: rng.pick(&[0, 0, MS, 300 * MS]),
        }
    }
}
