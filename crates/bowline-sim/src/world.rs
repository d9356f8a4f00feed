//! One run: hosts, their users and their troubles, step by step.

use std::net::SocketAddr;

use bowline_rds::Config;

use crate::bowline::BowlineHost;
use crate::ctx::{AppEvent, Ctx, Event, Heal, HostEvent, HostId};
use crate::host::{Host, SendResult};
use crate::kernel::KernelHost;
use crate::net::{EndId, HostNet, Net, Notice};
use crate::plan::{NodeKind, Plan, Scenario};
use crate::queue::{MS, SEC, US};
use crate::rng::Rng;
use crate::sabotage::Sabotage;
use crate::trace::Trace;

/// State of one sender.
#[derive(Debug)]
struct Sender {
    left: u32,
    /// Refused, to be woken by the node.
    waiting: bool,
    /// An event for it is in the queue.
    scheduled: bool,
    next_size: usize,
}

/// State of one reader.
#[derive(Debug, Default)]
struct Reader {
    stopped: bool,
    scheduled: bool,
}

/// Where the run is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Phase {
    /// Faults happen.
    Active,
    /// No more faults; everything must come to its end.
    Draining,
    /// Everything came; late doubles would show now.
    Quiet,
    /// All sockets are closed; nothing may be left.
    Closed,
}

/// One run.
pub(crate) struct World {
    pub(crate) ctx: Ctx,
    pub(crate) plan: Plan,
    hosts: Vec<Host>,
    stalled: Vec<bool>,
    /// What a stalled process has not been told yet.
    deferred: Vec<Vec<Deferred>>,
    open: Vec<bool>,
    /// Nodes told to end.
    ending: Vec<bool>,
    senders: Vec<Sender>,
    readers: Vec<Reader>,
    pub(crate) phase: Phase,
    phase_since: u64,
    /// When to look next whether anything is left.
    closed_look: u64,
    sabotage: Option<Sabotage>,
    payload: Vec<u8>,
    scratch: Vec<u8>,
}

#[derive(Debug)]
enum Deferred {
    Notice(EndId, Notice),
    Event(HostEvent),
}

/// Virtual time within which everything must have come after the last fault: the longest timers of
/// TCP and of the protocol one after the other, and time for the data.
const DRAIN_MAX: u64 = 400 * SEC;
/// Steps after which a run is taken to go in circles.
const STEPS_MAX: u64 = 6_000_000;
const QUIET: u64 = 3 * SEC;
/// Longest way of a message when nothing is wrong, besides the time its bytes take.
const CALM_LATENCY_MAX: u64 = 20 * SEC;
/// Time in which a node must have nothing left after all sockets are closed: what was begun is
/// completed, through TCP's longest retransmission timeout or a lost connection.
const CLOSED_MAX: u64 = 90 * SEC;
/// Time between a node's being told to end and its being gone.
const ENDING: u64 = 2_200 * MS;
const NUDGE: u64 = 300 * MS;

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
                kernel: matches!(node.kind, NodeKind::Kernel(_)),
                end_to_end: matches!(node.kind, NodeKind::Bowline { end_to_end: true, .. }),
            })
            .collect();
        let mut ctx = Ctx::new(rng, Net::new(hosts_net, plan.net.clone()), trace);
        for slot in &plan.slots {
            let end_to_end = ctx.net.hosts[slot.host].end_to_end;
            ctx.oracle.add_slot(SocketAddr::new(slot.addr, slot.port), end_to_end);
        }
        let n = plan.nodes.len();
        if plan.nodes.iter().any(|n| matches!(n.kind, NodeKind::Kernel(_))) {
            ctx.oracle.loosen_pongs();
        }
        let senders = plan.senders.iter().map(|s| Sender {
            left: s.messages,
            waiting: false,
            scheduled: false,
            next_size: 0,
        });
        let mut world = Self {
            senders: senders.collect(),
            readers: plan.slots.iter().map(|_| Reader::default()).collect(),
            hosts: Vec::new(),
            stalled: vec![false; n],
            deferred: (0..n).map(|_| Vec::new()).collect(),
            open: vec![false; plan.slots.len()],
            ending: vec![false; n],
            phase: Phase::Active,
            phase_since: 0,
            closed_look: 0,
            payload: Vec::new(),
            scratch: Vec::new(),
            ctx,
            plan,
            sabotage,
        };
        for host in 0..n {
            let made = world.make_host(host);
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
        let rng = &mut self.ctx.rng;
        let generation = (rng.next() as u32).max(1);
        match &self.plan.nodes[host].kind {
            NodeKind::Kernel(flavour) => {
                self.ctx.schedule(NUDGE, Event::App(AppEvent::Nudge(host)));
                Host::Kernel(Box::new(KernelHost::new(host, *flavour, generation)))
            }
            NodeKind::Bowline { paths, end_to_end, driver, recv_limit } => {
                let mut config = Config::default();
                config.addrs.clone_from(&self.plan.nodes[host].addrs);
                config.paths = *paths;
                config.end_to_end = *end_to_end;
                config.generation = generation;
                config.first_sequence =
                    if self.plan.clock_sequences { (self.ctx.now / MS) << 20 } else { 1 };
                config.seed = rng.next();
                if self.plan.scenario == Scenario::Long {
                    config.max_message = 4 << 20;
                }
                if let Some(limit) = recv_limit {
                    config.limits.recv_bytes_per_peer = *limit;
                }
                let sabotage = self.sabotage;
                Host::Bowline(Box::new(BowlineHost::new(host, config, driver.clone(), sabotage)))
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

    /// Whether every address of the host is where it belongs.
    fn at_home(&self, host: HostId) -> bool {
        let mine = &self.ctx.net.hosts[host].addrs;
        self.plan.nodes[host].addrs.iter().all(|a| mine.contains(a))
    }

    fn open(&mut self, slot: usize) {
        let plan = self.plan.slots[slot].clone();
        let host = plan.host;
        if self.open[slot] || !self.alive(host) {
            return;
        }
        if !self.ctx.net.hosts[host].addrs.contains(&plan.addr) {
            // The address is away: its owner tries again.
            self.ctx.schedule(50 * MS, Event::App(AppEvent::Reopen(slot)));
            return;
        }
        let addr = self.addr(slot);
        self.open[slot] = true;
        self.ctx.oracle.opened(slot);
        self.ctx.note([40, slot as u64, 0], || format!("host {host} opens {addr}, socket {slot}"));
        self.hosts[host].open(&mut self.ctx, slot, addr, &plan);
        self.schedule_read(slot);
    }

    fn close(&mut self, slot: usize) {
        if !self.open[slot] {
            return;
        }
        let host = self.host_of(slot);
        self.open[slot] = false;
        self.ctx.oracle.closed(slot);
        self.ctx.note([41, slot as u64, 0], || format!("host {host} closes socket {slot}"));
        self.hosts[host].close(&mut self.ctx, slot);
        self.wake_senders_of(slot);
    }

    fn schedule_send(&mut self, sender: usize, delay: u64) {
        let state = &mut self.senders[sender];
        if !state.scheduled {
            state.scheduled = true;
            self.ctx.schedule(delay, Event::App(AppEvent::Send(sender)));
        }
    }

    fn schedule_read(&mut self, slot: usize) {
        let reader = &mut self.readers[slot];
        if !reader.scheduled && !reader.stopped {
            reader.scheduled = true;
            let delay = self.ctx.rng.below(self.plan.slots[slot].read_gap + 1);
            self.ctx.schedule(delay, Event::App(AppEvent::Read(slot)));
        }
    }

    fn wake_senders_of(&mut self, slot: usize) {
        for sender in 0..self.senders.len() {
            if self.plan.senders[sender].slot == slot && self.senders[sender].waiting {
                self.senders[sender].waiting = false;
                let delay = self.ctx.rng.below(20 * US);
                self.schedule_send(sender, delay);
            }
        }
    }

    /// Takes one step; false when the run is over.
    pub(crate) fn step(&mut self) -> bool {
        let Some(event) = self.ctx.next_event() else {
            self.ctx.fail(|| "nothing left to happen".into());
            return false;
        };
        self.ctx.stats.steps += 1;
        self.dispatch(event);
        self.deliver_notices();
        if self.ctx.stats.steps > STEPS_MAX {
            self.ctx.fail(|| format!("still going after {STEPS_MAX} steps"));
        }
        if self.phase == Phase::Draining && self.ctx.now > self.phase_since + DRAIN_MAX {
            let missing = self.ctx.oracle.missing();
            let stuck = self.stuck();
            self.ctx.fail(|| format!("no end after the last fault: {missing:?}; {stuck}"));
        }
        self.ctx.failure.is_none() && !(self.phase == Phase::Closed && self.finished())
    }

    fn dispatch(&mut self, event: Event) {
        match event {
            Event::Net(event) => {
                self.ctx.note([50, 0, 0], || format!("{event:?}"));
                self.ctx.net_event(event);
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

    /// Tells hosts what TCP has for them, and users what nodes have for them.
    fn deliver_notices(&mut self) {
        loop {
            if let Some((end, notice)) = self.ctx.notices.pop_front() {
                let host = self.ctx.net.host(end);
                if !self.ctx.net.held(end) && !matches!(notice, Notice::ConnectFailed(_)) {
                    continue;
                }
                if self.stalled[host] {
                    self.deferred[host].push(Deferred::Notice(end, notice));
                } else {
                    self.hosts[host].notice(&mut self.ctx, end, notice);
                }
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
            AppEvent::ReadOn(slot) => {
                self.readers[slot].stopped = false;
                self.schedule_read(slot);
            }
            AppEvent::Nudge(host) => {
                self.ctx.schedule(NUDGE, Event::App(AppEvent::Nudge(host)));
                if let (false, Host::Kernel(kernel)) = (self.stalled[host], &mut self.hosts[host]) {
                    kernel.nudge(&mut self.ctx);
                }
            }
            AppEvent::Check => self.check(),
            AppEvent::Calm => self.calm(),
        }
    }

    fn send(&mut self, sender: usize) {
        self.senders[sender].scheduled = false;
        let plan = self.plan.senders[sender].clone();
        let host = self.host_of(plan.slot);
        if self.senders[sender].left == 0 || self.senders[sender].waiting {
            return;
        }
        if !self.open[plan.slot] || self.stalled[host] {
            self.schedule_send(sender, 20 * MS);
            return;
        }
        let mut target = self.addr(plan.target);
        if plan.pings {
            target.set_port(0);
        }
        for _ in 0..plan.burst {
            if self.senders[sender].left == 0 {
                return;
            }
            if self.senders[sender].next_size == 0 {
                self.senders[sender].next_size = 1 + self.draw_size(plan.size_max);
            }
            let len = self.senders[sender].next_size - 1;
            match self.send_one(plan.slot, plan.target, target, len, plan.pings) {
                SendResult::Sent => {
                    self.senders[sender].left -= 1;
                    self.senders[sender].next_size = 0;
                }
                SendResult::Wait => {
                    self.senders[sender].waiting = true;
                    return;
                }
                SendResult::Closed => break,
                SendResult::TooLong => {
                    let buffer = self.plan.slots[plan.slot].send_buffer;
                    self.ctx.fail(|| format!("{len} bytes are too long, buffer {buffer}"));
                    return;
                }
            }
        }
        let gap = self.ctx.rng.wait(plan.gap);
        self.schedule_send(sender, gap);
    }

    fn draw_size(&mut self, max: usize) -> usize {
        let rng = &mut self.ctx.rng;
        match rng.below(20) {
            0 => 0,
            1 => max.min(1),
            2 => max,
            _ => rng.magnitude(1, max as u64) as usize,
        }
    }

    fn send_one(
        &mut self,
        slot: usize,
        target: usize,
        to: SocketAddr,
        len: usize,
        ping: bool,
    ) -> SendResult {
        let mut payload = std::mem::take(&mut self.payload);
        self.ctx.oracle.next_payload(slot, target, len, &mut payload);
        // Judged first: what the node does inside the call may already concern the message.
        if ping {
            self.ctx.oracle.pinged(slot);
        } else {
            self.ctx.oracle.sent(slot, target, len);
        }
        let host = self.host_of(slot);
        let result = self.hosts[host].send(&mut self.ctx, slot, to, &payload);
        if result == SendResult::Sent {
            self.ctx.stats.sent += 1;
        } else {
            self.ctx.stats.refused += 1;
            if ping {
                self.ctx.oracle.unpinged(slot);
            } else {
                self.ctx.oracle.unsent(slot, target);
            }
        }
        self.ctx.note([42, slot as u64, len as u64], || {
            format!("socket {slot} sends {len} bytes to {to}: {result:?}")
        });
        self.payload = payload;
        result
    }

    fn read(&mut self, slot: usize) {
        self.readers[slot].scheduled = false;
        let host = self.host_of(slot);
        if !self.open[slot] || self.readers[slot].stopped {
            return;
        }
        if self.stalled[host] {
            self.readers[slot].scheduled = true;
            self.ctx.schedule(20 * MS, Event::App(AppEvent::Read(slot)));
            return;
        }
        for _ in 0..self.plan.slots[slot].read_burst {
            let Some((source, payload)) = self.hosts[host].recv(&mut self.ctx, slot) else {
                return;
            };
            self.ctx.stats.received += 1;
            self.ctx.stats.received_bytes += payload.len() as u64;
            let len = payload.len();
            self.ctx.note([43, slot as u64, len as u64], || {
                format!("socket {slot} gets {len} bytes from {source}")
            });
            let judged = self.ctx.oracle.received(slot, source, &payload, &mut self.scratch);
            if let Err(what) = judged {
                self.ctx.fail(|| what);
            }
        }
        self.schedule_read(slot);
    }

    // Faults.

    fn fault_length(&mut self) -> u64 {
        self.ctx.rng.magnitude(MS, self.plan.fault_max)
    }

    fn random_host(&mut self) -> HostId {
        self.ctx.rng.index(self.hosts.len())
    }

    fn fault(&mut self, kind: usize) {
        if self.phase != Phase::Active {
            return;
        }
        let (what, interval) = self.plan.faults[kind];
        let wait = self.ctx.rng.wait(interval);
        self.ctx.schedule(wait, Event::Fault { kind });
        self.ctx.stats.faults += 1;
        self.strike(what);
    }

    fn note_fault(&mut self, what: std::fmt::Arguments<'_>) {
        self.ctx.note([60, 0, 0], || format!("FAULT {what}"));
    }

    fn strike(&mut self, what: crate::plan::FaultKind) {
        use crate::plan::FaultKind as F;
        match what {
            F::Cut => {
                let live = self.ctx.net.live();
                if !live.is_empty() {
                    let conn = self.ctx.rng.pick(&live);
                    let cut = self.ctx.draw_cut();
                    self.ctx.tcp_cut(conn, cut);
                }
            }
            F::Crash => {
                let host = self.random_host();
                self.stop_host(host, false);
            }
            F::Reboot => {
                let host = self.random_host();
                self.stop_host(host, true);
            }
            F::Partition | F::OneWay => {
                let (a, b) = (self.random_host(), self.random_host());
                if a != b {
                    self.note_fault(format_args!("{what:?} {a} -> {b}"));
                    self.block(a, b);
                    if what == F::Partition {
                        self.block(b, a);
                    }
                    self.ctx.tcp_route_changed(a, b);
                }
            }
            F::Stall => {
                let host = self.random_host();
                if !self.stalled[host] && self.alive(host) {
                    self.note_fault(format_args!("stall of {host}"));
                    self.stalled[host] = true;
                    let length = self.fault_length();
                    self.ctx.schedule(length, Event::Heal(Heal::Resume(host)));
                }
            }
            F::StopReader => {
                let slot = self.ctx.rng.index(self.readers.len());
                if !self.readers[slot].stopped {
                    self.note_fault(format_args!("reader of {slot} stops"));
                    self.readers[slot].stopped = true;
                    let length = self.fault_length();
                    self.ctx.schedule(length, Event::App(AppEvent::ReadOn(slot)));
                }
            }
            F::Reopen => {
                let slot = self.ctx.rng.index(self.readers.len());
                if self.open[slot] && !self.stalled[self.host_of(slot)] {
                    self.ctx.stats.reopened += 1;
                    self.close(slot);
                    let length = self.fault_length() / 8;
                    self.ctx.schedule(length, Event::App(AppEvent::Reopen(slot)));
                }
            }
            F::Cancel => self.cancel(),
            F::AddressLoss => self.lose_address(None),
            F::AddressMove => {
                let taker = self.random_host();
                self.lose_address(Some(taker));
            }
            F::DropLinks => {
                let host = self.random_host();
                if self.stalled[host] || !self.alive(host) {
                    return;
                }
                let peer = self.random_host();
                let peer = self.ctx.rng.chance(500).then(|| self.plan.nodes[peer].addrs[0]);
                if let Host::Bowline(node) = &mut self.hosts[host] {
                    self.ctx.net.dropping = true;
                    node.drop_links(&mut self.ctx, peer);
                    self.ctx.net.dropping = false;
                }
            }
            F::Shutdown => {
                let host = self.random_host();
                if !self.stalled[host]
                    && self.alive(host)
                    && self.at_home(host)
                    && !self.ending[host]
                    && let Host::Bowline(node) = &mut self.hosts[host]
                {
                    self.ending[host] = true;
                    node.shut_down(&mut self.ctx);
                    self.note_fault(format_args!("host {host} shuts down"));
                    self.ctx.schedule(ENDING, Event::Heal(Heal::Ended(host)));
                }
            }
            F::Delay => {
                self.ctx.net.delay_factor = self.ctx.rng.magnitude(2, 200);
                let length = self.fault_length().min(SEC);
                self.ctx.schedule(length, Event::Heal(Heal::Delay));
            }
        }
    }

    fn block(&mut self, from: HostId, to: HostId) {
        self.ctx.net.block(from, to, true);
        let length = self.fault_length();
        self.ctx.schedule(length, Event::Heal(Heal::Route { from, to }));
    }

    fn cancel(&mut self) {
        if self.senders.is_empty() {
            return;
        }
        let plan = self.plan.senders[self.ctx.rng.index(self.senders.len())].clone();
        let host = self.host_of(plan.slot);
        if self.open[plan.slot] && !self.stalled[host] && !plan.pings {
            let target = self.addr(plan.target);
            self.note_fault(format_args!("socket {} cancels to {target}", plan.slot));
            self.ctx.oracle.cancelled(plan.slot, plan.target);
            self.hosts[host].cancel(&mut self.ctx, plan.slot, target);
        }
    }

    /// A process (or, silently, a whole machine) stops and comes back after a while.
    fn stop_host(&mut self, host: HostId, silent: bool) {
        if !self.alive(host) || !self.at_home(host) {
            return;
        }
        self.note_fault(format_args!("host {host} stops{}", if silent { " silently" } else { "" }));
        self.ctx.stats.crashes += 1;
        for slot in 0..self.open.len() {
            if self.host_of(slot) == host && self.open[slot] {
                self.open[slot] = false;
                self.ctx.oracle.closed(slot);
                self.wake_senders_of(slot);
            }
        }
        let slots: Vec<usize> = (0..self.open.len()).filter(|s| self.host_of(*s) == host).collect();
        self.ctx.oracle.process_gone(&slots);
        self.stalled[host] = false;
        self.ending[host] = false;
        self.deferred[host].clear();
        self.ctx.tcp_host_down(host, silent);
        let length = self.fault_length();
        self.ctx.schedule(length, Event::Heal(Heal::Boot(host)));
    }

    /// A host loses an address; a bowline node may take it meanwhile.
    fn lose_address(&mut self, taker: Option<HostId>) {
        let host = self.random_host();
        let index = self.ctx.rng.index(self.plan.nodes[host].addrs.len());
        let ip = self.plan.nodes[host].addrs[index];
        let local_senders = self
            .plan
            .senders
            .iter()
            .any(|s| self.host_of(s.slot) == host && self.host_of(s.target) == host);
        if !self.alive(host) || !self.at_home(host) || self.ending[host] || local_senders {
            return;
        }
        self.note_fault(format_args!("{ip} leaves host {host} for {taker:?}"));
        for slot in 0..self.open.len() {
            if self.plan.slots[slot].addr == ip {
                self.ctx.oracle.closed(slot);
            }
        }
        self.ctx.tcp_address_lost(host, ip);
        if let Host::Bowline(node) = &mut self.hosts[host] {
            node.node.remove_local(ip);
        }
        if let Some(taker) = taker.filter(|t| *t != host && self.alive(*t))
            && let Host::Bowline(node) = &mut self.hosts[taker]
        {
            node.node.add_local(ip);
            self.ctx.net.hosts[taker].addrs.push(ip);
            let slots: Vec<usize> =
                (0..self.open.len()).filter(|s| self.plan.slots[*s].addr == ip).collect();
            self.ctx.oracle.address_moved(&slots);
        }
        let length = self.fault_length();
        self.ctx.schedule(length, Event::Heal(Heal::Address { host, index }));
    }

    fn heal(&mut self, heal: Heal) {
        self.ctx.note([61, 0, 0], || format!("HEAL {heal:?}"));
        match heal {
            Heal::Route { from, to } => self.ctx.net.block(from, to, false),
            Heal::Boot(host) => self.boot(host),
            Heal::Ended(host) => self.ended(host),
            Heal::Resume(host) => self.resume(host),
            Heal::Address { host, index } => self.return_address(host, index),
            Heal::Delay => self.ctx.net.delay_factor = 1,
        }
    }

    fn ended(&mut self, host: HostId) {
        if std::mem::take(&mut self.ending[host]) {
            self.stop_host(host, false);
        }
    }

    fn boot(&mut self, host: HostId) {
        if self.alive(host) {
            return;
        }
        self.ctx.net.hosts[host].up = true;
        self.ctx.net.hosts[host].listening = true;
        self.hosts[host] = self.make_host(host);
        for slot in 0..self.open.len() {
            if self.host_of(slot) == host {
                self.open(slot);
            }
        }
    }

    fn resume(&mut self, host: HostId) {
        if !std::mem::take(&mut self.stalled[host]) {
            return;
        }
        for what in std::mem::take(&mut self.deferred[host]) {
            match what {
                Deferred::Notice(end, notice) => {
                    if self.ctx.net.held(end) || matches!(notice, Notice::ConnectFailed(_)) {
                        self.hosts[host].notice(&mut self.ctx, end, notice);
                    }
                }
                Deferred::Event(what) => self.hosts[host].event(&mut self.ctx, what),
            }
        }
    }

    fn return_address(&mut self, host: HostId, index: usize) {
        let ip = self.plan.nodes[host].addrs[index];
        match self.ctx.net.owner(ip) {
            Some(owner) if owner == host => return,
            Some(taker) => {
                self.ctx.tcp_address_lost(taker, ip);
                if let Host::Bowline(node) = &mut self.hosts[taker] {
                    node.node.remove_local(ip);
                }
            }
            None => {}
        }
        self.ctx.net.hosts[host].addrs.push(ip);
        if let Host::Bowline(node) = &mut self.hosts[host] {
            node.node.add_local(ip);
        }
        for slot in 0..self.open.len() {
            if self.plan.slots[slot].addr == ip && self.open[slot] {
                self.ctx.oracle.reachable_again(slot);
            }
        }
    }

    // The end.

    /// The last fault is over: everything is healed at once.
    fn calm(&mut self) {
        self.ctx.note([62, 0, 0], || "CALM".into());
        self.enter(Phase::Draining);
        self.ctx.net.faulty = false;
        self.ctx.net.delay_factor = 1;
        let n = self.hosts.len();
        for from in 0..n {
            for to in 0..n {
                self.ctx.net.block(from, to, false);
            }
        }
        for host in 0..n {
            self.resume(host);
            for index in 0..self.plan.nodes[host].addrs.len() {
                self.return_address(host, index);
            }
            self.ended(host);
            self.boot(host);
        }
        for slot in 0..self.readers.len() {
            self.readers[slot].stopped = false;
            self.open(slot);
            self.schedule_read(slot);
        }
        self.ctx.schedule(50 * MS, Event::App(AppEvent::Check));
    }

    fn enter(&mut self, phase: Phase) {
        self.phase = phase;
        self.phase_since = self.ctx.now;
    }

    fn check(&mut self) {
        match self.phase {
            Phase::Active => {}
            Phase::Draining => {
                let done = self.senders.iter().all(|s| s.left == 0)
                    && self.ctx.oracle.missing().is_none()
                    && (0..self.open.len()).all(|s| self.send_bytes(s) == 0);
                if done {
                    self.enter(Phase::Quiet);
                } else if self.plan.scenario == Scenario::Calm
                    && self.ctx.now > self.phase_since + CALM_LATENCY_MAX + self.transfer_time()
                {
                    let missing = self.ctx.oracle.missing();
                    self.ctx.fail(|| format!("starved without any fault: {missing:?}"));
                }
            }
            Phase::Quiet => {
                if self.ctx.now > self.phase_since + QUIET {
                    for slot in 0..self.open.len() {
                        self.close(slot);
                    }
                    self.enter(Phase::Closed);
                }
            }
            Phase::Closed => {}
        }
        let wait = (self.ctx.now - self.phase_since).clamp(20 * MS, 500 * MS);
        self.ctx.schedule(wait, Event::App(AppEvent::Check));
    }

    /// A generous guess of the time all data of the run take through the narrowest window.
    fn transfer_time(&self) -> u64 {
        let bytes: u64 = self
            .plan
            .senders
            .iter()
            .map(|s| u64::from(s.messages) * (s.size_max as u64 + 9_000))
            .sum();
        let window = self.plan.net.recv_buffer.0.min(self.plan.net.send_buffer.0);
        let gaps: u64 = self.plan.slots.iter().map(|s| s.read_gap).max().unwrap_or(0);
        let turns: u64 = self.plan.senders.iter().map(|s| u64::from(s.messages)).sum();
        (bytes / window + 1) * 2 * self.plan.net.delay.1 + gaps * turns
    }

    fn send_bytes(&self, slot: usize) -> usize {
        match &self.hosts[self.host_of(slot)] {
            // What a kernel peer keeps is not ours to judge.
            Host::Kernel(_) => 0,
            host => host.send_bytes(slot),
        }
    }

    /// After everything is closed: tells whether nothing is left, which must be so soon.
    fn finished(&mut self) -> bool {
        if self.ctx.now < self.closed_look {
            return false;
        }
        self.closed_look = self.ctx.now + 500 * MS;
        for host in 0..self.hosts.len() {
            let Host::Bowline(node) = &self.hosts[host] else { continue };
            let info = node.node.info();
            // What this host would say as an address that is another's again stays with it, and so
            // does the node's own talk (ports 0 and 1) with peers nobody sends to any more.
            let own = |m: &&bowline_rds::MessageInfo| {
                self.plan.nodes[host].addrs.contains(&m.local.ip()) && m.local.port() > 1
            };
            let left = [
                ("sockets", info.sockets.len()),
                ("messages to send", info.send.iter().filter(own).count()),
                ("messages to repeat", info.retrans.iter().filter(own).count()),
                ("received messages", info.recv.len()),
                ("bytes to send", node.node.unsent_total() as usize),
            ];
            if let Some((what, n)) = left.into_iter().find(|(_, n)| *n > 0) {
                if self.ctx.now < self.phase_since + CLOSED_MAX {
                    return false;
                }
                self.ctx.fail(|| format!("host {host} still has {n} {what} after closing all"));
            }
        }
        true
    }

    /// Who waits for what, for a report.
    fn stuck(&self) -> String {
        let mut out = String::new();
        for (i, (state, plan)) in self.senders.iter().zip(&self.plan.senders).enumerate() {
            if state.left > 0 {
                let (from, to) = (self.addr(plan.slot), self.addr(plan.target));
                let waits = if state.waiting { ", waits" } else { "" };
                out += &format!("sender {i} {from} -> {to} has {} left{waits}; ", state.left);
            }
        }
        for slot in 0..self.open.len() {
            let n = self.send_bytes(slot);
            if n > 0 {
                out += &format!("socket {slot} has {n} messages not released; ");
            }
        }
        out
    }

    /// What every node knows, for a report.
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
