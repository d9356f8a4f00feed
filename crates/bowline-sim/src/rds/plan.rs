//! The plan of a run, drawn from a seed: the cluster, its network, its users and its faults.
//!
//! Each run draws *which* kinds of faults it has before it draws their number: a run with two kinds
//! finds bugs that a run with all kinds would hide.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use serde::{Deserialize, Serialize};

use super::bowline::DriverPlan;
use super::kernel::Flavour;
use super::net::NetPlan;
use super::ops::OpsPlan;
use super::rdma::{RdmaNodePlan, RdmaPlan};
use crate::engine::queue::{MS, SEC, US};
use crate::engine::rng::Rng;

/// A family of runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Scenario {
    /// All kinds of plans.
    Swarm,
    /// No faults; in addition to the usual promises, no socket starves.
    Calm,
    /// Processes and machines stop and start.
    Crash,
    /// Connections break at any byte, end half-open, cross each other.
    Cuts,
    /// At least one peer is a kernel.
    Kernel,
    /// At least one peer is from before multipath, or silent to pings.
    Legacy,
    /// Small receive buffers, and readers that stop.
    Storm,
    /// Addresses disappear, come back, and move to another node.
    Move,
    /// 9 to 16 nodes.
    Mesh,
    /// Two bowline nodes, much data, messages above 1 MiB.
    Long,
    /// Most connections are over RDMA.
    Rdma,
    /// A connection over RDMA is lost at one work request; seeds go through all of them.
    RdmaStep,
    /// Nodes end in order and start again; nothing else goes wrong.
    Ends,
}

impl Scenario {
    /// Every scenario.
    pub const ALL: [Self; 13] = [
        Self::Swarm,
        Self::Calm,
        Self::Crash,
        Self::Cuts,
        Self::Kernel,
        Self::Legacy,
        Self::Storm,
        Self::Move,
        Self::Mesh,
        Self::Long,
        Self::Rdma,
        Self::RdmaStep,
        Self::Ends,
    ];

    /// Returns the name on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Swarm => "swarm",
            Self::Calm => "calm",
            Self::Crash => "crash",
            Self::Cuts => "cuts",
            Self::Kernel => "kernel",
            Self::Legacy => "legacy",
            Self::Storm => "storm",
            Self::Move => "move",
            Self::Mesh => "mesh",
            Self::Long => "long",
            Self::Rdma => "rdma",
            Self::RdmaStep => "rdma-step",
            Self::Ends => "ends",
        }
    }

    /// Finds a scenario by its name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|s| s.name() == name)
    }
}

/// A kind of fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum FaultKind {
    /// A connection breaks.
    Cut,
    /// A process dies and is started again.
    Crash,
    /// A machine fails silently and boots.
    Reboot,
    /// Two hosts do not reach each other.
    Partition,
    /// One host does not reach another, which still reaches it.
    OneWay,
    /// A process makes no progress for a while.
    Stall,
    /// A reader takes no messages for a while.
    StopReader,
    /// A socket is closed and opened again.
    Reopen,
    /// A sender cancels messages.
    Cancel,
    /// A host loses its address for a while.
    AddressLoss,
    /// Another node has the address of a host for a while.
    AddressMove,
    /// The operator drops all connections of a node.
    DropLinks,
    /// All delays are longer for a while.
    Delay,
    /// A node shuts down in order and is started again.
    Shutdown,
    /// A node hands over to another process.
    HandOver,
    /// A process stalls while its connections break and are made again, so that many of a peer
    /// come at once.
    Crowd,
}

impl FaultKind {
    pub(crate) const ALL: [Self; 16] = [
        Self::Cut,
        Self::Crash,
        Self::Reboot,
        Self::Partition,
        Self::OneWay,
        Self::Stall,
        Self::StopReader,
        Self::Reopen,
        Self::Cancel,
        Self::AddressLoss,
        Self::AddressMove,
        Self::DropLinks,
        Self::Delay,
        Self::Shutdown,
        Self::HandOver,
        Self::Crowd,
    ];
}

/// The kind of node on a host.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum NodeKind {
    Bowline {
        paths: u8,
        end_to_end: bool,
        driver: DriverPlan,
        recv_limit: Option<usize>,
        #[serde(default)]
        tight: Option<Tight>,
    },
    Kernel(Flavour),
}

/// Limits of a node that are low enough to be reached.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Tight {
    /// Number of peers that have connected and not sent a whole message.
    pub(crate) strangers: usize,
    /// Number of connections of one peer beyond its paths.
    pub(crate) extra: usize,
    /// Bytes of incomplete messages.
    pub(crate) partial: usize,
    /// Number of pongs queued on a path.
    pub(crate) pongs: usize,
    /// Bytes of queued messages before each counts all that it takes.
    #[serde(default)]
    pub(crate) sends: Option<usize>,
}

impl NodeKind {
    /// Returns the longest time in nanoseconds until the node's driver does pending work.
    pub(crate) fn lag(&self) -> u64 {
        match self {
            Self::Bowline { driver, .. } => driver.lag,
            Self::Kernel(flavour) if flavour.slow_reader => 2 * MS,
            Self::Kernel(_) => 0,
        }
    }
}

/// Plan of a host.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct NodePlan {
    pub(crate) kind: NodeKind,
    pub(crate) addrs: Vec<IpAddr>,
}

/// Plan of a socket.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct SlotPlan {
    pub(crate) host: usize,
    pub(crate) addr: IpAddr,
    pub(crate) port: u16,
    pub(crate) send_buffer: usize,
    pub(crate) recv_buffer: usize,
    /// Number of messages that a reader takes per turn.
    pub(crate) read_burst: usize,
    /// Time between turns in nanoseconds.
    pub(crate) read_gap: u64,
    /// The socket monitors congestion: it is notified of ports that are free again.
    pub(crate) monitor: bool,
    /// How many times in a thousand the reader peeks at a message before it takes it.
    pub(crate) peek_permille: u64,
    /// The socket chooses TCP although its address is served over RDMA.
    #[serde(default)]
    pub(crate) tcp: bool,
    /// Type of service: over RDMA, a connection of its own to each peer.
    #[serde(default)]
    pub(crate) tos: u8,
}

/// Plan of a user who sends.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct SenderPlan {
    pub(crate) slot: usize,
    pub(crate) target: usize,
    /// The user sends pings to the target's address instead of messages to its port.
    pub(crate) pings: bool,
    pub(crate) messages: u32,
    pub(crate) size_max: usize,
    pub(crate) burst: u32,
    pub(crate) gap: u64,
    pub(crate) start: u64,
}

/// Everything that a seed draws before the run.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Plan {
    pub(crate) scenario: Scenario,
    pub(crate) net: NetPlan,
    pub(crate) nodes: Vec<NodePlan>,
    pub(crate) slots: Vec<SlotPlan>,
    pub(crate) senders: Vec<SenderPlan>,
    /// Kinds of faults with their mean intervals in nanoseconds.
    pub(crate) faults: Vec<(FaultKind, u64)>,
    /// For how long faults occur, in nanoseconds.
    pub(crate) active: u64,
    /// Longest duration of a fault in nanoseconds.
    pub(crate) fault_max: u64,
    /// Sequence numbers start from the clock, as the library does it; otherwise from 1, in runs in
    /// which no process is ever replaced.
    pub(crate) clock_sequences: bool,
    /// Some addresses are served over RDMA.
    #[serde(default)]
    pub(crate) rdma: Option<RdmaPlan>,
}

impl Plan {
    /// Removes small buffers, which would hide deliberate mistakes.
    pub(crate) fn widen(&mut self) {
        self.net.send_buffer = (16 << 20, 16 << 20);
        self.net.recv_buffer = (16 << 20, 16 << 20);
    }

    /// Draws the plan of a seed.
    pub(crate) fn draw(rng: &mut Rng, forced: Option<Scenario>) -> Self {
        let scenario = forced.unwrap_or_else(|| match rng.below(100) {
            0..=22 => Scenario::Swarm,
            23..=25 => Scenario::Ends,
            26..=45 => Scenario::Rdma,
            46..=49 => Scenario::Calm,
            50..=58 => Scenario::Crash,
            59..=70 => Scenario::Cuts,
            71..=81 => Scenario::Kernel,
            82..=86 => Scenario::Legacy,
            87..=92 => Scenario::Storm,
            93..=96 => Scenario::Move,
            97 => Scenario::Mesh,
            98 => Scenario::Long,
            _ => Scenario::Ends,
        });
        let nodes = draw_nodes(rng, scenario);
        let slots = draw_slots(rng, scenario, &nodes);
        let mut plan = Self {
            scenario,
            net: draw_net(rng, scenario),
            nodes,
            slots,
            senders: Vec::new(),
            faults: Vec::new(),
            // Some runs last longer than the longest timers of the protocol.
            active: match rng.below(20) {
                0 => rng.magnitude(4 * SEC, 150 * SEC),
                _ => rng.magnitude(20 * MS, 4 * SEC),
            },
            fault_max: 0,
            clock_sequences: rng.chance(700),
            rdma: None,
        };
        if scenario == Scenario::Ends {
            plan.active = plan.active.max(6 * SEC); // ends come to their end
        }
        plan.draw_rdma(rng);
        plan.draw_senders(rng);
        plan.draw_faults(rng);
        plan.draw_ops(rng);
        plan.draw_crowds();
        plan
    }

    /// Draws which addresses are served over RDMA, and by what queue pairs.
    fn draw_rdma(&mut self, rng: &mut Rng) {
        let wanted = self.scenario == Scenario::Rdma;
        if !wanted && !rng.chance(350) {
            return;
        }
        // Some nodes or sockets of that scenario go over TCP all the same.
        let pure = wanted && !rng.chance(200);
        let mut addrs = Vec::new();
        let share = if pure || rng.chance(500) { 1000 } else { rng.between(300, 900) };
        for node in &self.nodes {
            if wanted || matches!(node.kind, NodeKind::Bowline { .. }) {
                addrs.extend(node.addrs.iter().filter(|_| rng.chance(share)));
            }
        }
        let tcp_permille = if pure { 0 } else { rng.pick(&[0, 0, 100, 500]) };
        let tos_permille = rng.pick(&[0, 0, 300, 800]);
        for slot in self.slots.iter_mut().filter(|slot| addrs.contains(&slot.addr)) {
            slot.tcp = rng.chance(tcp_permille);
            if rng.chance(tos_permille) {
                slot.tos = rng.pick(&[1, 0x28, 255]);
            }
        }
        let flow_permille = rng.pick(&[0, 0, 0, 500, 1000]);
        let small_permille = rng.pick(&[0, 300, 1000]);
        let long = self.scenario == Scenario::Long;
        let long_permille = rng.pick(&[0, 500, 1000]);
        let node = |rng: &mut Rng, kind: &NodeKind| {
            let kernel = matches!(kind, NodeKind::Kernel(_));
            let small = rng.chance(small_permille);
            let long_frames = rng.chance(long_permille);
            let recv_wr =
                if small { rng.magnitude(1, 64) } else { rng.magnitude(300, 2_048) } as u32;
            RdmaNodePlan {
                send_wr: if small { rng.magnitude(1, 64) } else { rng.magnitude(64, 512) } as u32,
                recv_wr,
                unsignaled: rng.magnitude(1, 64) as u32,
                flow_control: rng.chance(flow_permille) && !kernel,
                // The longest message has to fit, or nobody would be woken.
                solicited: recv_wr >= 600 && !long && rng.chance(500),
                batch: rng.magnitude(1, 256) as usize,
                slow_post_permille: rng.pick(&[0, 50, 400]),
                hold_permille: rng.pick(&[0, 50, 400]),
                hold: rng.magnitude(US, 50 * MS),
                flush: rng.magnitude(US, 20 * MS),
                frame: if long_frames { 1024 * rng.between(4, 64) as usize } else { 0 },
                deaf_permille: 0,
            }
        };
        self.rdma = Some(RdmaPlan {
            addrs,
            nodes: self.nodes.iter().map(|of| node(rng, &of.kind)).collect(),
            retries: rng.pick(&[1, 1, 3, 7]) as u32,
            timeout: rng.magnitude(100 * MS, 600 * MS),
            cm_timeout: rng.magnitude(200 * MS, 4 * SEC),
            break_permille: 0,
            late_permille: 0,
            ops: None,
            cut: None,
        });
    }

    /// Draws RDMA operations: for a part of the runs in which most connections are over RDMA. Their
    /// senders are answered, or nobody would know of memory.
    fn draw_ops(&mut self, rng: &mut Rng) {
        if self.scenario != Scenario::Rdma || !rng.chance(400) {
            return;
        }
        if let Some(rdma) = &mut self.rdma {
            rdma.ops = Some(OpsPlan::draw(rng));
        }
        for kind in [FaultKind::Cancel, FaultKind::Reopen] {
            if rng.chance(300) && !self.faults.iter().any(|(other, _)| *other == kind) {
                let interval = rng.magnitude(self.active / 30 + 1, self.active);
                self.faults.push((kind, interval));
            }
        }
        for one in self.senders.clone() {
            let other = |s: &SenderPlan| (s.slot, s.target) == (one.target, one.slot) && !s.pings;
            let reaches =
                !self.over_rdma(one.target) || self.serves_rdma(self.slots[one.slot].addr);
            if one.pings || !reaches || self.senders.iter().any(other) {
                continue;
            }
            let size_max = rng.magnitude(1, 1 << 10) as usize;
            let buffer = &mut self.slots[one.target].send_buffer;
            *buffer = (*buffer).max(size_max);
            let messages = one.messages.min(60);
            let (slot, target) = (one.target, one.slot);
            self.senders.push(SenderPlan { slot, target, messages, size_max, ..one });
        }
    }

    /// Tells whether connections end only where a node ends them.
    pub(crate) fn is_gentle(&self) -> bool {
        use FaultKind as F;
        let gentle = |kind: F| {
            let by_nodes = matches!(kind, F::Shutdown | F::HandOver | F::DropLinks);
            by_nodes || matches!(kind, F::StopReader | F::Reopen | F::Cancel)
        };
        let rdma = self.rdma.as_ref();
        self.faults.iter().all(|(kind, _)| gentle(*kind))
            && (self.net.cut_permille, self.net.loss_permille) == (0, 0)
            && rdma.is_none_or(|r| r.cut.is_none() && (r.break_permille, r.late_permille) == (0, 0))
            && rdma.is_none_or(|r| r.nodes.iter().all(|node| node.deaf_permille == 0))
    }

    /// Tells whether an address is served over RDMA.
    pub(crate) fn serves_rdma(&self, addr: IpAddr) -> bool {
        self.rdma.as_ref().is_some_and(|rdma| rdma.addrs.contains(&addr))
    }

    /// Tells whether a socket sends over RDMA.
    pub(crate) fn over_rdma(&self, slot: usize) -> bool {
        let slot = &self.slots[slot];
        !slot.tcp && self.serves_rdma(slot.addr)
    }

    /// Tells whether a kernel serves an address over RDMA.
    fn has_rdma_kernel(&self) -> bool {
        let kernel = |n: &&NodePlan| matches!(n.kind, NodeKind::Kernel(_));
        let mut addrs = self.nodes.iter().filter(kernel).flat_map(|n| &n.addrs);
        addrs.any(|addr| self.serves_rdma(*addr))
    }

    fn is_kernel(&self, slot: usize) -> bool {
        matches!(self.nodes[self.slots[slot].host].kind, NodeKind::Kernel(_))
    }

    fn draw_senders(&mut self, rng: &mut Rng) {
        let long = self.scenario == Scenario::Long;
        let most = (self.nodes.len() as u64 * 3).clamp(4, 24);
        let count = rng.between(1, most);
        // Each run is small; there are many.
        let mut budget: usize = if long { 24 << 20 } else { 6 << 20 };
        for _ in 0..count {
            let (slot, target) = (rng.index(self.slots.len()), rng.index(self.slots.len()));
            let (from, to) = (&self.slots[slot], &self.slots[target]);
            let same_host = from.host == to.host;
            let both_kernels = self.is_kernel(slot) && self.is_kernel(target);
            let families = from.addr.is_ipv4() == to.addr.is_ipv4();
            if both_kernels || !families || (same_host && (self.is_kernel(slot) || rng.chance(700)))
            {
                continue;
            }
            let size_max = if long {
                rng.magnitude(1 << 16, 3 << 20) as usize
            } else {
                rng.magnitude(1, 128 << 10) as usize
            };
            if self.over_rdma(slot) && !self.serves_rdma(to.addr) {
                continue; // the two have no transport in common
            }
            let by_kernel = self.is_kernel(slot) || self.is_kernel(target);
            let size_max = if by_kernel { size_max.min(1 << 20) } else { size_max };
            let messages = match rng.below(20) {
                0 => rng.magnitude(100, 1_500),
                _ => rng.magnitude(1, 150),
            };
            // Sizes are drawn by magnitude, so the mean is about a sixth of the maximum.
            let messages = messages.min((budget / (size_max / 6 + 64)) as u64) as u32;
            budget = budget.saturating_sub(messages as usize * (size_max / 6 + 64));
            if messages == 0 {
                continue;
            }
            let wanted = &mut self.slots[slot].send_buffer;
            *wanted = (*wanted).max(size_max);
            self.senders.push(SenderPlan {
                slot,
                target,
                pings: rng.chance(60) && !same_host,
                messages,
                size_max,
                burst: rng.magnitude(1, 32) as u32,
                gap: rng.magnitude(US, self.active / u64::from(messages).max(1) + US),
                start: rng.below(self.active / 2 + 1),
            });
        }
    }

    fn draw_faults(&mut self, rng: &mut Rng) {
        use FaultKind as F;
        let permille = |kind: F| match (self.scenario, kind) {
            (Scenario::Calm, _) => 0,
            (Scenario::Ends, F::Shutdown) => 1000,
            (Scenario::Ends, F::HandOver | F::DropLinks) => 200,
            (Scenario::Ends, F::StopReader | F::Reopen | F::Cancel) => 150,
            (Scenario::Ends, _) => 0,
            (Scenario::Crash, F::Crash | F::Reboot) => 800,
            (Scenario::Cuts, F::Cut) => 900,
            (Scenario::Cuts, F::Partition | F::OneWay | F::DropLinks) => 300,
            (Scenario::Rdma, F::Cut) => 500,
            (Scenario::Rdma, F::Crash | F::Reboot | F::HandOver) => 250,
            (Scenario::Rdma, F::AddressLoss | F::AddressMove) => 150,
            (Scenario::Storm, F::StopReader) => 950,
            (Scenario::Move, F::AddressLoss | F::AddressMove) => 800,
            (Scenario::Long, F::Crash | F::Reboot | F::Shutdown) => 0,
            (_, F::AddressLoss | F::AddressMove) => 60,
            (_, F::Crash | F::Reboot) => 150,
            (_, F::Shutdown | F::HandOver) => 100,
            (_, F::DropLinks) => 300,
            _ => 200,
        };
        // Another node's numbers at its peer's address are more than a kernel tells apart [IB-82].
        let stays = self.has_rdma_kernel();
        let drawn = |kind: &F| *kind != F::Crowd && !(stays && *kind == F::AddressMove);
        for kind in F::ALL.into_iter().filter(drawn) {
            if rng.chance(permille(kind)) {
                let interval = rng.magnitude(self.active / 30 + 1, self.active);
                self.faults.push((kind, interval));
            }
        }
        // Sequence numbers that begin again with a new process are not safe.
        let renews = |k: F| matches!(k, F::Crash | F::Reboot | F::Shutdown | F::AddressMove);
        self.clock_sequences |= self.faults.iter().any(|(kind, _)| renews(*kind));
        // Nor can a peer tell paths apart that use the same numbers.
        let plain = |n: &NodePlan| !matches!(n.kind, NodeKind::Bowline { end_to_end: true, .. });
        self.clock_sequences |= self.nodes.iter().any(plain);
        self.fault_max = match rng.below(20) {
            0 => 45 * SEC,
            _ => rng.magnitude(5 * MS, 3 * SEC),
        };
        let cuts = match self.scenario {
            Scenario::Calm | Scenario::Ends => 0,
            Scenario::Cuts => 300,
            _ => 150,
        };
        if rng.chance(cuts) {
            self.net.cut_permille = rng.magnitude(20, 600);
        }
        let calm = matches!(self.scenario, Scenario::Calm | Scenario::Ends);
        if let Some(rdma) = self.rdma.as_mut().filter(|_| !calm) {
            if rng.chance(300) {
                rdma.break_permille = rng.magnitude(20, 800);
            }
            rdma.late_permille = rng.pick(&[0, 0, 30, 300]);
            let deaf_permille = rng.pick(&[0, 0, 0, 0, 100, 500]);
            for node in rdma.nodes.iter_mut().filter(|_| rng.chance(500)) {
                node.deaf_permille = deaf_permille;
            }
        }
        if !calm && rng.chance(150) {
            self.net.loss_permille = rng.magnitude(1, 60);
        }
    }

    /// Draws ports that are changed, and connections that come all at once. They have a generator
    /// of their own: all else of a seed, and the runs of [`Scenario::RdmaStep`], is as without
    /// them.
    fn draw_crowds(&mut self) {
        let mut rng = Rng::new(self.active);
        if rng.chance(150) && !self.tells_paths_by_ports() {
            self.net.port_permille = rng.pick(&[1000, 1000, 500, 50]);
        }
        let permille = match self.scenario {
            Scenario::Calm => 0,
            Scenario::Cuts => 300,
            _ => 100,
        };
        if rng.chance(permille) {
            let interval = rng.magnitude(self.active / 30 + 1, self.active);
            self.faults.push((FaultKind::Crowd, interval));
        }
    }

    /// Tells whether a kernel's peers know its paths by its ports alone: all its paths begin with
    /// the same low numbers.
    fn tells_paths_by_ports(&self) -> bool {
        let later = |n: &NodePlan| matches!(&n.kind, NodeKind::Kernel(flavour) if flavour.later);
        self.nodes.iter().any(later)
    }
}

fn draw_nodes(rng: &mut Rng, scenario: Scenario) -> Vec<NodePlan> {
    let count = match (scenario, rng.below(100)) {
        (Scenario::Mesh, _) => rng.between(9, 16),
        (Scenario::Long, _) => 2,
        (_, 0..=59) => 2,
        (_, 60..=79) => 3,
        (_, 80..=93) => 4,
        _ => rng.between(5, 8),
    } as usize;
    let v6 = rng.chance(100);
    let all_end_to_end = rng.chance(450) || scenario == Scenario::Long;
    let kernels = match scenario {
        Scenario::Kernel | Scenario::Legacy => 400,
        Scenario::Swarm | Scenario::Cuts | Scenario::Crash | Scenario::Storm | Scenario::Move
            if rng.chance(350) =>
        {
            300
        }
        Scenario::Rdma if rng.chance(300) => 400,
        _ => 0,
    };
    let mut last_bytes: Vec<u8> = (1..=32).collect();
    rng.shuffle(&mut last_bytes);
    let address = |n: u8| match v6 {
        true => IpAddr::V6(Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, u16::from(n))),
        false => IpAddr::V4(Ipv4Addr::new(10, 0, 0, n)),
    };
    let forced = rng.index(count);
    let mut nodes = Vec::new();
    for i in 0..count {
        let legacy = scenario == Scenario::Legacy;
        let must = kernels == 400 && i == forced;
        // With two nodes of which one is a kernel, the other is a bowline node.
        let may = kernels > 0 && !(count == 2 && i != forced);
        let kind = if must || (may && rng.chance(kernels)) {
            let multipath = !rng.chance(if legacy { 700 } else { 150 });
            let later = rng.chance(400);
            NodeKind::Kernel(Flavour {
                multipath,
                later,
                catches_up: later,
                // With pings off and several paths a kernel never tells a restarted peer how many
                // paths it has.
                ping_enable: multipath || rng.chance(600),
                slow_reader: rng.chance(300),
            })
        } else {
            NodeKind::Bowline {
                paths: if rng.chance(600) { 8 } else { 1 },
                end_to_end: all_end_to_end || rng.chance(500),
                driver: draw_driver(rng),
                recv_limit: rng.chance(80).then(|| rng.magnitude(2_000, 200_000) as usize),
                tight: (scenario != Scenario::Long && rng.chance(80))
                    .then(|| draw_tight(rng, all_end_to_end && kernels == 0)),
            }
        };
        let addrs = (0..if rng.chance(120) { 2 } else { 1 })
            .map(|k| address(last_bytes[2 * i + k]))
            .collect();
        nodes.push(NodePlan { kind, addrs });
    }
    // The port rule is a promise to peers that do not learn the path from a greeting.
    let greets = |n: &NodePlan| matches!(n.kind, NodeKind::Bowline { end_to_end: true, .. });
    if !nodes.iter().all(greets) {
        for node in &mut nodes {
            if let NodeKind::Bowline { driver, .. } = &mut node.kind {
                driver.any_port = false;
            }
        }
    }
    nodes
}

fn draw_tight(rng: &mut Rng, all_end_to_end: bool) -> Tight {
    let mut tight = Tight {
        // Messages on refused connections are lost to a peer that goes by TCP's acknowledgements;
        // so there is room for all of its connections.
        strangers: if all_end_to_end { rng.between(1, 4) } else { 32 } as usize,
        extra: if all_end_to_end { rng.between(1, 8) } else { rng.between(8, 12) } as usize,
        // There is room for several of the longest messages.
        partial: rng.magnitude(400 << 10, 2 << 20) as usize,
        pongs: rng.between(1, 64) as usize,
        sends: None,
    };
    // Not drawn by itself, so that seeds stay what they were.
    tight.sends = Some(tight.partial >> (tight.pongs % 5));
    tight
}

fn draw_driver(rng: &mut Rng) -> DriverPlan {
    DriverPlan {
        read_max: rng.magnitude(512, 256 << 10) as usize,
        write_max: rng.magnitude(512, 256 << 10) as usize,
        budget: rng.magnitude(1, 512) as usize,
        lag: rng.magnitude(1, 5 * MS),
        slow_write_permille: rng.pick(&[0, 0, 50, 400]),
        any_port: rng.chance(150),
        idle_permille: rng.pick(&[0, 100, 1000]),
        pooled: rng.chance(150),
    }
}

fn draw_net(rng: &mut Rng, scenario: Scenario) -> NetPlan {
    let least = rng.magnitude(US, 2 * MS);
    let most = least + rng.magnitude(US, 15 * MS);
    let small = scenario != Scenario::Long && rng.chance(300);
    NetPlan {
        delay: (least, most),
        segment_max: if scenario == Scenario::Long {
            65_536
        } else {
            rng.magnitude(1_400, 65_536) as usize
        },
        segment_random: scenario != Scenario::Long && rng.chance(300),
        send_buffer: if small { (4_096, 16_384) } else { (32_768, 1 << 20) },
        recv_buffer: if small { (4_096, 16_384) } else { (32_768, 1 << 20) },
        loss_permille: 0,
        rst_overtakes: rng.chance(300),
        cut_permille: 0,
        port_permille: 0,
    }
}

fn draw_slots(rng: &mut Rng, scenario: Scenario, nodes: &[NodePlan]) -> Vec<SlotPlan> {
    let common = rng.between(2, 65_535) as u16;
    let mut slots: Vec<SlotPlan> = Vec::new();
    for (host, node) in nodes.iter().enumerate() {
        let count = if nodes.len() > 8 { 1 } else { rng.between(1, 3) };
        for _ in 0..count {
            let addr = rng.pick(&node.addrs);
            let port = if rng.chance(400) { common } else { rng.between(2, 65_535) as u16 };
            if slots.iter().any(|s| s.addr == addr && s.port == port) {
                continue;
            }
            let storm = scenario == Scenario::Storm;
            let slow = rng.chance(if storm { 500 } else { 100 });
            slots.push(SlotPlan {
                host,
                addr,
                port,
                send_buffer: rng.magnitude(2_304, 400 << 10) as usize,
                recv_buffer: rng.magnitude(1_152, if storm { 8 << 10 } else { 400 << 10 }) as usize,
                read_burst: if slow { 1 } else { rng.magnitude(1, 64) as usize },
                read_gap: if slow { rng.magnitude(US, 5 * MS) } else { rng.below(20 * US) },
                monitor: rng.chance(150),
                peek_permille: rng.pick(&[0, 0, 0, 100]),
                tcp: false,
                tos: 0,
            });
        }
    }
    slots
}
