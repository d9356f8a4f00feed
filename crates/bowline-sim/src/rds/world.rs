//! A run, step by step: hosts, their users and the faults.

use std::collections::HashMap;
use std::net::SocketAddr;

use bowline_rds::Config;

use self::users::{Reader, Sender};
use super::bowline::BowlineHost;
use super::ctx::{AppEvent, Ctx, Event, HostEvent, HostId};
use super::host::Host;
use super::kernel::KernelHost;
use super::net::{EndId, HostNet, Net, Notice};
use super::plan::{FaultKind, NodeKind, NodePlan, Plan, Scenario};
use super::rdma::{QpId, RdmaNotice};
use super::reach::{self, Kind, Pairs};
use super::sabotage::Sabotage;
use crate::engine::queue::MS;
use crate::engine::rng::Rng;
use crate::engine::trace::Trace;

mod end;
mod faults;
mod users;

/// Phase of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Phase {
    /// Faults happen.
    Active,
    /// There are no more faults; all messages must arrive.
    Draining,
    /// All messages have arrived. Late duplicates would show now, and TCP finds dead connections.
    Quiet,
    /// All hosts are healthy: each earlier sender sends one more message, which must arrive soon.
    Fresh,
    /// All sockets are closed; nothing may be left.
    Closed,
}

/// State of a run.
pub(crate) struct World {
    pub(crate) ctx: Ctx,
    pub(crate) plan: Plan,
    hosts: Vec<Host>,
    stalled: Vec<bool>,
    /// Reports that a stalled process has not received yet.
    deferred: Vec<Vec<Deferred>>,
    open: Vec<bool>,
    /// Nodes that are shutting down.
    ending: Vec<Option<faults::Ending>>,
    /// When the process of a host that is away began to end in order.
    ended_since: Vec<Option<u64>>,
    /// When a host last began to end, or to run.
    changed_at: Vec<u64>,
    /// How many messages of one socket to another a former process of the receiver has received
    /// and not acknowledged, when the present one began.
    left_unacknowledged: HashMap<(usize, usize), usize>,
    senders: Vec<Sender>,
    readers: Vec<Reader>,
    pub(crate) phase: Phase,
    phase_since: u64,
    /// When to check next whether anything is left.
    next_closed_check: u64,
    kinds: Vec<Kind>,
    pairs: Pairs,
    sabotage: Option<Sabotage>,
    payload: Vec<u8>,
    scratch: Vec<u8>,
}

/// A report to a stalled process.
#[derive(Debug)]
enum Deferred {
    Notice(EndId, Notice),
    Rdma(QpId, RdmaNotice),
    Event(HostEvent),
}

/// Number of steps after which a run is taken to make no progress.
const STEPS_MAX: u64 = 6_000_000;
/// Interval in nanoseconds in which kernel peers try waiting messages again.
const RETRY_INTERVAL: u64 = 300 * MS;

impl World {
    pub(crate) fn new(plan: Plan, rng: Rng, trace: Trace, sabotage: Option<Sabotage>) -> Self {
        let hosts_net = plan
            .nodes
            .iter()
            .map(|node| HostNet {
                up: true,
                boot: 0,
                addrs: node.addrs.clone(),
                listening: true,
                closing: false,
                kernel: matches!(node.kind, NodeKind::Kernel(_)),
                end_to_end: matches!(node.kind, NodeKind::Bowline { end_to_end: true, .. }),
            })
            .collect();
        let mut ctx = Ctx::new(rng, Net::new(hosts_net, plan.net.clone()), trace);
        ctx.rdma.plan.clone_from(&plan.rdma);
        ctx.ops.plan = plan.rdma.as_ref().and_then(|rdma| rdma.ops.clone());
        for (index, slot) in plan.slots.iter().enumerate() {
            let end_to_end = ctx.net.hosts[slot.host].end_to_end;
            let addr = SocketAddr::new(slot.addr, slot.port);
            ctx.oracle.add_slot(addr, end_to_end, plan.over_rdma(index), slot.tos);
        }
        let n = plan.nodes.len();
        let greets = |n: &NodePlan| matches!(n.kind, NodeKind::Bowline { end_to_end: true, .. });
        let kernel = |n: &NodePlan| matches!(n.kind, NodeKind::Kernel(_));
        // The numbers of answers do not tell paths apart, nor do ports that were changed.
        let unnamed = plan.net.port_permille > 0 && !plan.nodes.iter().all(greets);
        if unnamed || plan.nodes.iter().any(kernel) {
            ctx.oracle.allow_double_pongs();
        }
        let mut world = Self {
            senders: plan.senders.iter().map(|s| Sender::new(s.messages)).collect(),
            readers: plan.slots.iter().map(|_| Reader::default()).collect(),
            hosts: Vec::new(),
            stalled: vec![false; n],
            deferred: (0..n).map(|_| Vec::new()).collect(),
            open: vec![false; plan.slots.len()],
            ending: vec![None; n],
            ended_since: vec![None; n],
            changed_at: vec![0; n],
            left_unacknowledged: HashMap::new(),
            phase: Phase::Active,
            phase_since: 0,
            next_closed_check: 0,
            kinds: plan.nodes.iter().map(|n| Kind::of(&n.kind)).collect(),
            pairs: Pairs::default(),
            payload: Vec::new(),
            scratch: Vec::new(),
            ctx,
            plan,
            sabotage,
        };
        for host in 0..n {
            let made = world.make_host(host);
            if matches!(made, Host::Kernel(_)) {
                world.ctx.schedule(RETRY_INTERVAL, Event::App(AppEvent::RetryWaiting(host)));
            }
            world.hosts.push(made);
        }
        for slot in 0..world.plan.slots.len() {
            world.open(slot);
        }
        for sender in 0..world.senders.len() {
            let start = world.plan.senders[sender].start;
            world.schedule_send(sender, start);
        }
        for kind in 0..world.plan.faults.len() {
            let wait = world.ctx.rng.wait(world.plan.faults[kind].1);
            world.ctx.schedule(wait, Event::Fault { kind });
        }
        world.ctx.schedule(world.plan.active, Event::App(AppEvent::Calm));
        world
    }

    fn make_host(&mut self, host: HostId) -> Host {
        let rng = &mut self.ctx.base.rng;
        let generation = (rng.next() as u32).max(1);
        match &self.plan.nodes[host].kind {
            NodeKind::Kernel(flavour) => {
                Host::Kernel(Box::new(KernelHost::new(host, *flavour, generation)))
            }
            NodeKind::Bowline { paths, end_to_end, driver, recv_limit, tight } => {
                let mut config = Config::default();
                config.addrs.clone_from(&self.plan.nodes[host].addrs);
                config.paths = *paths;
                config.end_to_end = *end_to_end;
                config.generation = generation;
                // The library does the same: the clock, and a random number below a millisecond.
                config.first_sequence = if self.plan.clock_sequences {
                    ((self.ctx.base.now / MS) << 20) + u64::from(generation & 0xf_ffff)
                } else {
                    1
                };
                config.seed = rng.next();
                if self.plan.scenario == Scenario::Long {
                    config.max_message = 4 << 20;
                }
                if let Some(limit) = recv_limit {
                    config.limits.recv_bytes_per_peer = *limit;
                }
                if let Some(tight) = tight {
                    config.limits.peers_unproven = tight.strangers;
                    config.limits.links_extra_per_peer = tight.extra;
                    config.limits.partial_bytes_total = tight.partial;
                    config.limits.pongs_per_path = tight.pongs;
                    if let Some(sends) = tight.sends {
                        config.limits.send_bytes_total = sends;
                    }
                }
                let sabotage = self.sabotage;
                let rdma = self.ctx.rdma.node(host);
                if let Some(rdma) = rdma {
                    config.sysctl.ib_max_send_wr = rdma.send_wr;
                    config.sysctl.ib_max_recv_wr = rdma.recv_wr;
                    config.sysctl.ib_max_unsignaled_wr = rdma.unsignaled;
                    config.sysctl.ib_flow_control = i32::from(rdma.flow_control);
                }
                let addrs = config.addrs.clone();
                let mut made = BowlineHost::new(host, config, driver.clone(), sabotage);
                if let Some(rdma) = rdma {
                    let served = addrs.into_iter().filter(|addr| self.plan.serves_rdma(*addr));
                    made.serve_rdma(rdma, &served.collect::<Vec<_>>());
                }
                Host::Bowline(Box::new(made))
            }
        }
    }

    fn addr(&self, slot: usize) -> SocketAddr {
        SocketAddr::new(self.plan.slots[slot].addr, self.plan.slots[slot].port)
    }

    fn host_of(&self, slot: usize) -> HostId {
        self.plan.slots[slot].host
    }

    fn alive(&self, host: HostId) -> bool {
        self.ctx.net.hosts[host].listening
    }

    /// Tells whether the host has all its addresses.
    fn has_all_addresses(&self, host: HostId) -> bool {
        let mine = &self.ctx.net.hosts[host].addrs;
        self.plan.nodes[host].addrs.iter().all(|a| mine.contains(a))
    }

    /// Takes one step; returns false when the run is over.
    pub(crate) fn step(&mut self) -> bool {
        let Some(event) = self.ctx.next_event() else { return false };
        self.ctx.stats.steps += 1;
        self.dispatch(event);
        self.deliver_notices();
        if self.ctx.stats.steps > STEPS_MAX {
            self.ctx.fail(|| format!("still going after {STEPS_MAX} steps"));
        }
        self.check_overdue();
        self.ctx.failure.is_none() && !(self.phase == Phase::Closed && self.finished())
    }

    fn dispatch(&mut self, event: Event) {
        match event {
            Event::Net(event) => {
                self.ctx.note([50, 0, 0], || format!("{event:?}"));
                self.ctx.net_event(event);
            }
            Event::Rdma(event) => {
                self.ctx.note([52, 0, 0], || format!("{event:?}"));
                self.ctx.rdma_event(event);
            }
            Event::Host { host, boot, what } => {
                if self.ctx.net.hosts[host].boot == boot {
                    self.host_event(host, what);
                }
            }
            Event::App(event) => self.app_event(event),
            Event::Fault { kind } => self.fault(kind),
            Event::Heal(heal) => self.heal(heal),
        }
    }

    fn host_event(&mut self, host: HostId, what: HostEvent) {
        if self.stalled[host] {
            self.deferred[host].push(Deferred::Event(what));
        } else {
            self.ctx.note([51, host as u64, 0], || format!("host {host}: {what:?}"));
            self.hosts[host].event(&mut self.ctx, what);
        }
    }

    fn notice(&mut self, host: HostId, end: EndId, notice: Notice) {
        if !self.ctx.net.has_socket(end) && !matches!(notice, Notice::ConnectFailed(_)) {
            return;
        }
        if self.stalled[host] {
            self.deferred[host].push(Deferred::Notice(end, notice));
        } else {
            self.hosts[host].notice(&mut self.ctx, end, notice);
        }
    }

    fn rdma_notice(&mut self, host: HostId, qp: QpId, notice: RdmaNotice) {
        if self.stalled[host] {
            self.deferred[host].push(Deferred::Rdma(qp, notice));
        } else {
            self.hosts[host].rdma_notice(&mut self.ctx, qp, notice);
        }
    }

    /// Passes TCP's reports to hosts, and the nodes' wake-ups to users.
    fn deliver_notices(&mut self) {
        loop {
            if let Some((end, notice)) = self.ctx.notices.pop_front() {
                let host = self.ctx.net.host(end);
                self.notice(host, end, notice);
            } else if let Some((host, qp, notice)) = self.ctx.rdma_notices.pop_front() {
                self.rdma_notice(host, qp, notice);
            } else if let Some((slot, read, write)) = self.ctx.wakes.pop_front() {
                if read {
                    self.schedule_read(slot);
                }
                if write {
                    self.wake_senders_of(slot);
                }
            } else {
                return;
            }
        }
    }

    fn app_event(&mut self, event: AppEvent) {
        match event {
            AppEvent::Send(sender) => self.send(sender),
            AppEvent::Read(slot) => self.read(slot),
            AppEvent::Reopen(slot) => self.open(slot),
            AppEvent::ResumeReader(slot) => self.resume_reader(slot),
            AppEvent::RetryWaiting(host) => {
                self.ctx.schedule(RETRY_INTERVAL, Event::App(AppEvent::RetryWaiting(host)));
                let awake = self.alive(host) && !self.stalled[host];
                if let (true, Host::Kernel(kernel)) = (awake, &mut self.hosts[host]) {
                    kernel.retry_waiting(&mut self.ctx);
                }
            }
            AppEvent::Check => self.check(),
            AppEvent::Calm => self.calm(),
        }
    }

    /// Adds coverage that is known only at the end.
    pub(crate) fn report_coverage(&mut self) {
        for host in 0..self.hosts.len() {
            self.report_counters(host);
        }
        self.pairs.tell(&mut self.ctx.coverage);
    }

    /// Adds the counters of a host's process, which has ended.
    fn report_counters(&mut self, host: HostId) {
        if let Host::Bowline(node) = &self.hosts[host] {
            reach::node(&mut self.ctx.coverage, &node.node);
        }
    }

    /// Counts a fault of a host.
    fn count_fault(&mut self, what: FaultKind, host: HostId) {
        reach::fault(&mut self.ctx.coverage, what, self.kinds[host]);
    }

    /// Returns the state of all nodes, for a report.
    pub(crate) fn dump(&self) -> String {
        let mut out = String::new();
        for (id, host) in self.hosts.iter().enumerate() {
            if let Host::Bowline(node) = host {
                let info = node.node.info();
                out += &format!("host {id} {:?}\n", self.plan.nodes[id].addrs);
                for conn in &info.connections {
                    out += &format!("  {conn:?}\n");
                }
                for path in &info.paths {
                    out += &format!("  {path:?}\n");
                }
                for link in &info.links {
                    out += &format!("  {link:?}\n");
                }
                for sock in &info.sockets {
                    out += &format!("  {sock:?}\n");
                }
            }
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::trace::TraceMode;

    /// The host of a kernel is off. It tries no messages again, and keeps none for the kernel that
    /// boots next.
    #[test]
    fn a_kernel_that_is_off_tries_nothing_again() {
        let mut tried = 0;
        for seed in 0..40 {
            let mut rng = Rng::new(seed);
            let plan = Plan::draw(&mut rng, Some(Scenario::Kernel));
            let kernel = |n: &NodePlan| matches!(n.kind, NodeKind::Kernel(_));
            let Some(host) = plan.nodes.iter().position(kernel) else { continue };
            let mut world = World::new(plan, rng, Trace::new(TraceMode::Hash), None);
            while world.ctx.now < world.plan.active / 2 && world.step() {}
            if !world.alive(host) || !world.has_all_addresses(host) {
                continue;
            }
            tried += 1;
            world.stop_host(host, true);
            let connects = world.ctx.stats.connects;
            world.app_event(AppEvent::RetryWaiting(host));
            assert_eq!(world.ctx.stats.connects, connects, "seed {seed}");
        }
        assert!(tried > 10, "{tried} kernels");
    }

    /// A node that connects sends one message to a later kernel, which has nothing to send itself
    /// but answers. A greeting on each path had it try on seven paths, until its last answer on
    /// path 0 was acknowledged.
    // tests [R-2010]
    #[test]
    fn a_later_kernel_is_not_kept_busy_by_a_node_that_connects() {
        let mut tried = 0;
        for seed in 0..200 {
            let mut rng = Rng::new(seed);
            let mut plan = Plan::draw(&mut rng, Some(Scenario::Kernel));
            plan.faults.clear();
            (plan.net.loss_permille, plan.net.cut_permille, plan.rdma) = (0, 0, None);
            for node in &mut plan.nodes {
                match &mut node.kind {
                    NodeKind::Kernel(flavour) => {
                        (flavour.multipath, flavour.ping_enable) = (true, true);
                        (flavour.later, flavour.catches_up) = (true, true);
                    }
                    NodeKind::Bowline { paths, end_to_end, .. } => {
                        (*paths, *end_to_end) = (8, true);
                    }
                }
            }
            let (slots, nodes) = (&plan.slots, &plan.nodes);
            let is_kernel =
                |slot: usize| matches!(nodes[slots[slot].host].kind, NodeKind::Kernel(_));
            plan.senders.retain(|s| {
                let dials = slots[s.slot].addr < slots[s.target].addr;
                !s.pings && dials && !is_kernel(s.slot) && is_kernel(s.target)
            });
            plan.senders.truncate(1);
            let Some(sender) = plan.senders.first_mut() else { continue };
            sender.messages = 1;
            let mut world = World::new(plan, rng, Trace::new(TraceMode::Hash), None);
            while world.step() {}
            assert_eq!(world.ctx.failure, None, "seed {seed}");
            assert!(world.ctx.stats.received > 0, "seed {seed}");
            assert_eq!(world.ctx.stats.kernel_tries, 0, "seed {seed}");
            tried += 1;
        }
        assert!(tried > 10, "{tried} connections");
    }
}
