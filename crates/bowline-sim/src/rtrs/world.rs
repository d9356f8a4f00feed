//! One simulated run: machines, their network and their faults, step by step.

use std::net::IpAddr;
use std::ops::Range;
use std::time::Duration;

use bowline_roce::Event as DeviceEvent;
use bowline_rtrs::HbConfig;
use bowline_rtrs::server::ServerConfig;
use bowline_verbs::AsyncEvent;
use bowline_wire::rtrs::Geometry;

use super::client::{Client, Common};
use super::context::{Base, Event, left};
use super::disk::Disk;
use super::fabric::Spans;
use super::plan::{Fault, HOLDS, Plan};
use super::process::{DeviceNotice, Process};
use super::reach::{self, FaultClass};
use super::sabotage::Sabotage;
use super::server::Server;
use super::single_fault::{FaultCase, SingleFault, hold_length};
use crate::engine::base;
use crate::engine::queue::{MS, SEC, US};
use crate::engine::rng::Rng;
use crate::engine::trace::Trace;
use crate::roce::host::Host;
use crate::roce::net::{Datagram, Net};

pub(crate) use self::trials::Step;

mod end;
mod trials;

/// The phase of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// Faults happen.
    Active,
    /// No more faults; programs finish.
    Draining,
    /// The server closes.
    Closing,
    /// Nothing is left; late datagrams would show now.
    Quiet,
}

/// One run.
pub(crate) struct World {
    pub(crate) base: Base,
    plan: Plan,
    net: Net,
    hosts: Vec<Host>,
    spans: Spans,
    servers: Vec<IpAddr>,
    /// Burst size in bytes reported to bindings, if not the devices' own.
    burst: Option<usize>,
    heartbeat: HbConfig,
    server: Server,
    clients: Vec<Client>,
    phase: Phase,
    phase_since: u64,
    done: bool,
    /// The plan's fault at a certain step is still to come.
    step_left: bool,
    /// Number of datagrams that have arrived.
    arrived: u64,
    /// Random numbers for lines that delay what they carry.
    holds: Rng,
    /// Longest time of a final request without storage, in nanoseconds; 0: no final IO.
    final_io: u64,
    /// Longest time after the last fault, in nanoseconds, until the loss of a path is noticed.
    notice: u64,
    /// Virtual time at which that is over: a path that seems connected is connected.
    sure_from: u64,
    /// All paths were connected at one moment after the last fault.
    back: bool,
}

/// Virtual time in nanoseconds within which programs must finish after the last fault. Covers the
/// server's timeout for clients that vanished, the longest pause between attempts to connect, slow
/// storage, and the transfer of the data.
const DRAIN_MAX: u64 = 900 * SEC;
/// The same limit for runs without faults.
const CALM_MAX: u64 = 60 * SEC;
/// Virtual time within which the server must have closed.
const CLOSE_MAX: u64 = 60 * SEC;
/// Longest time that connection managers remember connections and that late datagrams and timers
/// can show.
const QUIET: u64 = 60 * SEC;
/// Interval at which programs repair what faults have left.
const REPAIR: u64 = 3 * SEC;
/// Number of steps after which a run is taken to loop for ever.
const STEPS_MAX: u64 = 3_000_000;
/// Number of bursts in one driver poll after which a device is taken to loop for ever.
const BURSTS_MAX: usize = 20_000;
/// Bytes of a chunk for user message and header.
const MAX_HDR: u32 = 4096;

impl World {
    pub(crate) fn new(
        plan: Plan,
        rng: Rng,
        extra: Rng,
        trace: Trace,
        sabotage: Option<Sabotage>,
    ) -> Self {
        let mut spans = Vec::new();
        let mut hosts = Vec::new();
        for node in &plan.nodes {
            let start = hosts.len();
            hosts.extend(node.hosts.iter().cloned().map(Host::new));
            spans.push(start..hosts.len());
        }
        let net = Net::new(plan.net.clone(), hosts.len());
        let (interval, missed_max, probe) = plan.heartbeat;
        let heartbeat = HbConfig {
            interval: Duration::from_nanos(interval),
            missed_max: if sabotage == Some(Sabotage::Patience) { u32::MAX } else { missed_max },
            fast_path_detection: true,
            probe_interval: Duration::from_nanos(probe),
            ..HbConfig::default()
        };
        let holds = Rng::new(extra.clone().next() ^ HOLDS);
        let base = base::Base::new(rng, trace);
        let mut base = Base { base, extra, sabotage, final_io: false };
        reach::chosen(&mut base.coverage, &plan);
        base.note([0, 0, 0], || format!("{plan:#?}"));
        let disks = plan.clients.iter().flat_map(|client| &client.disks);
        let disks = disks.map(|disk| Disk::new(disk.clone())).collect::<Result<Vec<_>, _>>();
        let disks = base.judge(disks).unwrap_or_default();
        let config = ServerConfig {
            always_invalidate: plan.invalidate,
            heartbeat,
            usr_min: 2,
            ..ServerConfig::default()
        };
        let geometry = Geometry::of_chunk(plan.queue_depth, plan.chunk, MAX_HDR);
        let geometry = base.judge(geometry.map_err(|e| format!("geometry: {e}")));
        let config = ServerConfig { geometry: geometry.unwrap_or(config.geometry), ..config };
        let must_not_change = plan.clients.iter().enumerate().flat_map(|(number, client)| {
            std::iter::repeat_n(plan.protects_chunks_of(number), client.disks.len())
        });
        let must_not_change = must_not_change.collect();
        let look = plan.nodes[0].look;
        let server = Server::new(config, disks, must_not_change, plan.misbehaving, look);
        let mut first = 0;
        let clients = plan.clients.iter().enumerate().map(|(n, client)| {
            let disk = first;
            first += client.disks.len();
            Client::new(n, client.clone(), disk, plan.nodes[n + 1].look)
        });
        let clients = clients.collect();
        let mut world = Self {
            net,
            servers: plan.nodes[0].hosts.iter().map(|host| host.addr).collect(),
            hosts,
            spans: Spans(spans),
            heartbeat,
            burst: plan.burst,
            server,
            clients,
            phase: Phase::Active,
            phase_since: SEC,
            done: false,
            step_left: plan.step.is_some(),
            arrived: 0,
            holds,
            final_io: if plan.final_io { end::request_bound(&plan) } else { 0 },
            notice: 0,
            sure_from: 0,
            back: false,
            base,
            plan,
        };
        for node in 0..world.plan.nodes.len() {
            world.boot(node);
        }
        for kind in 0..world.plan.faults.len() {
            world.next_fault(kind);
        }
        let active = world.plan.active;
        world.base.schedule(active, Event::Calm);
        world.begin_trials();
        world
    }

    /// Takes one step; false when the run is over.
    pub(crate) fn step(&mut self) -> bool {
        let Some(event) = self.base.next_event() else { return false };
        self.base.stats.steps += 1;
        if self.base.stats.steps > STEPS_MAX {
            self.base.fail(|| format!("still going after {STEPS_MAX} steps"));
        }
        self.dispatch(event);
        self.base.failure.is_none() && !self.done
    }

    fn process(&mut self, node: usize) -> &mut Process {
        match node.checked_sub(1) {
            None => &mut self.server.process,
            Some(client) => &mut self.clients[client].process,
        }
    }

    fn is_current_boot(&self, host: usize, boot: u32) -> bool {
        self.hosts[host].boot == boot && self.hosts[host].device.is_some()
    }

    fn is_running(&mut self, node: usize, boot: u32) -> bool {
        let process = self.process(node);
        process.alive && process.boot == boot
    }

    /// Runs a client with its devices.
    fn client(
        &mut self,
        client: usize,
        act: impl FnOnce(&mut Client, &mut Base, &mut [Host], &Common<'_>),
    ) {
        let span = self.spans.0[client + 1].clone();
        let faulty = self.plan.is_faulty();
        let common = Common {
            servers: &self.servers,
            heartbeat: self.heartbeat,
            burst: self.burst,
            faulty,
            final_io: self.final_io,
            sure_from: self.sure_from,
        };
        act(&mut self.clients[client], &mut self.base, &mut self.hosts[span.clone()], &common);
        self.touched(span);
        self.check_step_fault(client);
    }

    /// Runs the server with its devices.
    fn server(&mut self, act: impl FnOnce(&mut Server, &mut Base, &mut [Host])) {
        let span = self.spans.0[0].clone();
        act(&mut self.server, &mut self.base, &mut self.hosts[span.clone()]);
        self.touched(span);
    }

    fn dispatch(&mut self, event: Event) {
        match event {
            Event::Arrive { host, datagram } => self.arrive(host, &datagram),
            Event::Timer { host, boot } => {
                if self.is_current_boot(host, boot) {
                    let result = self.hosts[host].timer(self.base.now);
                    self.base.judge(result);
                    self.touched(host..host + 1);
                }
            }
            Event::Turn { host, boot } => {
                if self.is_current_boot(host, boot) {
                    self.turn(host);
                }
            }
            Event::Poll { node, boot } => {
                if self.is_running(node, boot) {
                    let mut process = std::mem::replace(self.process(node), Process::new(node, 0));
                    let due = process.poll_due(&mut self.base);
                    *self.process(node) = process;
                    match node.checked_sub(1) {
                        _ if !due => {}
                        None => self.server(Server::poll),
                        Some(client) => self.client(client, Client::poll),
                    }
                }
            }
            Event::Wake { node, boot } => {
                if self.is_running(node, boot) {
                    let mut process = std::mem::replace(self.process(node), Process::new(node, 0));
                    let due = process.timer_due(&mut self.base);
                    *self.process(node) = process;
                    match node.checked_sub(1) {
                        _ if !due => {}
                        None => self.server(Server::wake),
                        Some(client) => self.client(client, Client::wake),
                    }
                }
            }
            Event::Begin { client, boot } => {
                if self.is_running(client + 1, boot) {
                    self.client(client, Client::begin);
                }
            }
            Event::Go { client, boot } => {
                if self.is_running(client + 1, boot) {
                    self.client(client, Client::go);
                }
            }
            Event::Swap { client, boot } => {
                if self.is_running(client + 1, boot) {
                    self.client(client, Client::swap);
                }
            }
            Event::Stored { boot, number } => {
                if self.is_running(0, boot) {
                    self.server(|server, base, hosts| server.stored(base, hosts, number));
                }
            }
            Event::Opened { boot, ticket } => {
                if self.is_running(0, boot) {
                    self.server(|server, base, hosts| server.opened(base, hosts, ticket));
                }
            }
            Event::Fault(kind) => self.fault(kind),
            Event::Boot(node) => self.boot(node),
            Event::Mend(from, to) => self.net.block(from, to, false),
            Event::Calm => self.calm(),
            Event::Repair => {
                if self.phase == Phase::Draining {
                    for client in 0..self.clients.len() {
                        self.client(client, Client::repair);
                    }
                    self.base.schedule(REPAIR, Event::Repair);
                }
            }
            Event::Check => self.check(),
            Event::Trial(step) => self.trial(step),
        }
    }

    // Devices and the network.

    fn arrive(&mut self, host: usize, datagram: &Datagram) {
        if self.hosts[host].device.is_none() {
            return;
        }
        let len = datagram.bytes.len() as u64;
        let opcode = datagram.bytes.first().copied().unwrap_or(0);
        self.base.note([1, host as u64, len << 8 | u64::from(opcode)], || {
            let word = |at: usize| {
                let bytes = datagram.bytes.get(at..at + 4).unwrap_or(&[0; 4]);
                u32::from_be_bytes(bytes.try_into().unwrap_or_default())
            };
            let (from, qpn, psn) = (datagram.from, word(4) & 0xff_ffff, word(8) & 0xff_ffff);
            format!("host {host} <- {from}: {opcode:#04x} QPN {qpn:#x} PSN {psn:#x} {len} bytes")
        });
        let fault_case =
            self.plan.single_fault.filter(|fault_case| fault_case.after == self.arrived);
        self.arrived += 1;
        if fault_case.is_some_and(|fault_case| !self.inject_at_arrival(fault_case, host, datagram))
        {
            return;
        }
        if self.hosts[host].mutes.ignores(&datagram.bytes) {
            return;
        }
        self.hosts[host].deliver(self.base.now, &mut self.base.rng, datagram);
        self.touched(host..host + 1);
    }

    /// Schedules driver polls of devices that were given work.
    fn touched(&mut self, span: Range<usize>) {
        for host in span {
            self.set_timer(host);
            let Host { boot, turning, .. } = self.hosts[host];
            if !turning && self.hosts[host].device.is_some() {
                self.hosts[host].turning = true;
                let most = self.hosts[host].plan.turn;
                self.base.schedule_within(most, Event::Turn { host, boot });
            }
        }
    }

    fn set_timer(&mut self, host: usize) {
        if let Some(due) = self.hosts[host].next_timer(self.base.now) {
            let boot = self.hosts[host].boot;
            self.base.schedule_at(due, Event::Timer { host, boot });
        }
    }

    fn turn(&mut self, host: usize) {
        self.hosts[host].turning = false;
        self.events(host);
        for bursts in 0.. {
            if bursts == BURSTS_MAX {
                self.base.fail(|| format!("host {host} never stops sending"));
                return;
            }
            let Self { hosts, net, base, .. } = self;
            let addrs: Vec<IpAddr> = hosts.iter().map(Host::addr).collect();
            let now = base.now;
            let sent = hosts[host].send(now, |datagram| {
                let Some(to) = addrs.iter().position(|addr| *addr == datagram.to) else { return };
                base.stats.sent += 1;
                let delivery = net.send(now, &mut base.rng, (host, to), datagram);
                base.stats.lost += u64::from(delivery.arrivals.is_empty());
                for (at, datagram) in delivery.arrivals {
                    base.schedule_at(at, Event::Arrive { host: to, datagram });
                }
            });
            if self.base.judge(sent) != Some(true) {
                break;
            }
        }
        self.events(host);
        self.set_timer(host);
    }

    /// Moves a device's events to the inbox of its program.
    fn events(&mut self, host: usize) {
        let (node, port) = self.spans.of(host);
        loop {
            let Some(device) = &mut self.hosts[host].device else { return };
            let Some(event) = device.poll_event() else { return };
            let notice = match event {
                DeviceEvent::CqReady(cq) => DeviceNotice::Cq(cq),
                DeviceEvent::Cm(event) => DeviceNotice::Cm(event),
                DeviceEvent::Async(AsyncEvent::QpFatal(qpn)) => DeviceNotice::Fatal(qpn),
                _ => continue,
            };
            let mut process = std::mem::replace(self.process(node), Process::new(node, 0));
            process.enqueue(&mut self.base, port, notice);
            *self.process(node) = process;
        }
    }

    // Machines.

    fn boot(&mut self, node: usize) {
        let span = self.spans.0[node].clone();
        if self.hosts[span.start].device.is_some() {
            return;
        }
        for host in span.clone() {
            let Self { hosts, base, .. } = self;
            let started = hosts[host].start(base.now, &mut base.rng, host);
            self.base.judge(started);
        }
        self.process(node).start();
        self.base.note([5, node as u64, 0], || format!("machine {node} starts"));
        match node.checked_sub(1) {
            None => {
                let burst = self.burst;
                self.server(|server, base, hosts| {
                    let started = server.start(base, hosts, burst);
                    base.judge(started);
                });
            }
            Some(client) => {
                let boot = self.clients[client].process.boot;
                let start = self.clients[client].plan.start;
                self.base.schedule(start, Event::Begin { client, boot });
                self.touched(span);
            }
        }
    }

    /// Kills a machine; it starts again after a random time of at most `most` nanoseconds.
    fn crash(&mut self, node: usize, most: u64) {
        let span = self.spans.0[node].clone();
        if self.hosts[span.start].device.is_none() {
            return;
        }
        self.base.stats.crashes += 1;
        self.base.note([6, node as u64, 0], || format!("machine {node} dies"));
        self.hosts[span].iter_mut().for_each(Host::stop);
        match node.checked_sub(1) {
            None => {
                self.server.died(&mut self.base);
                self.clients.iter_mut().for_each(Client::server_died);
            }
            Some(client) => self.clients[client].died(&mut self.base),
        }
        let length = self.base.rng.magnitude(US, most);
        self.base.schedule(length, Event::Boot(node));
    }

    // Faults.

    fn next_fault(&mut self, kind: usize) {
        let wait = self.base.rng.wait(self.plan.faults[kind].1);
        self.base.schedule(wait, Event::Fault(kind));
    }

    fn fault(&mut self, kind: usize) {
        if self.phase != Phase::Active {
            return;
        }
        let client = self.base.rng.index(self.clients.len());
        self.inject_fault(self.plan.faults[kind].0, client);
        self.next_fault(kind);
    }

    /// Injects a fault at this client, or at the server.
    fn inject_fault(&mut self, what: Fault, client: usize) {
        self.base.stats.faults += 1;
        self.base.note([7, what as u64, client as u64], || format!("{what:?}, client {client}"));
        let length = self.base.rng.magnitude(US, self.plan.fault_max);
        let node = if self.base.rng.chance(500) { 0 } else { client + 1 };
        let mut class = FaultClass::of(what, node == 0);
        match what {
            Fault::Cut | Fault::HalfCut | Fault::UnnoticedCrash => {
                let (mine, others) = (self.spans.0[client + 1].clone(), self.spans.0[0].clone());
                let one = mine.start + self.base.rng.index(mine.len());
                let other = others.start + self.base.rng.index(others.len());
                let ways = |one, other| match (what, node) {
                    (Fault::HalfCut, 0) => vec![(one, other)],
                    (Fault::HalfCut, _) => vec![(other, one)],
                    _ => vec![(one, other), (other, one)],
                };
                let unseen = what == Fault::UnnoticedCrash;
                if !unseen && self.holds.chance(self.plan.holds) {
                    let all = self.holds.chance(400);
                    let half = what == Fault::HalfCut;
                    class = match (all, half) {
                        (true, _) => FaultClass::AllHeld,
                        (_, true) => FaultClass::HalfHeld,
                        _ => FaultClass::MapState,
                    };
                    reach::fault(&mut self.base.coverage, class, &self.clients[client]);
                    for (a, b) in mine.flat_map(|a| others.clone().map(move |b| (a, b))) {
                        if all || (a, b) == (one, other) {
                            let length = hold_length(&mut self.holds);
                            self.hold(&ways(a, b), length);
                        }
                    }
                    return;
                }
                reach::fault(&mut self.base.coverage, class, &self.clients[client]);
                let length = if unseen { self.base.rng.between(10 * MS, 3 * SEC) } else { length };
                for (from, to) in ways(one, other) {
                    self.net.block(from, to, true);
                    self.base.schedule(length, Event::Mend(from, to));
                }
                if unseen {
                    self.crash(0, 10 * MS);
                }
            }
            Fault::Crash => {
                reach::fault(&mut self.base.coverage, class, &self.clients[client]);
                self.crash(node, self.plan.fault_max);
            }
            Fault::Stall => {
                reach::fault(&mut self.base.coverage, class, &self.clients[client]);
                let now = self.base.now;
                self.process(node).stall(now, length.max(MS));
            }
            Fault::Path => {
                reach::fault(&mut self.base.coverage, class, &self.clients[client]);
                self.client(client, Client::order_path);
            }
            Fault::Kick => {
                reach::fault(&mut self.base.coverage, class, &self.clients[client]);
                self.server(Server::kick);
            }
        }
    }

    /// Makes lines delay what they carry until `length` nanoseconds from now: nothing is lost.
    fn hold(&mut self, lines: &[(usize, usize)], length: u64) {
        self.base.stats.holds += 1;
        let until = self.base.now + length;
        self.base.note([10, until, 0], || format!("{lines:?} are held until {until} ns"));
        lines.iter().for_each(|&(from, to)| self.net.hold(from, to, until));
    }

    /// Injects the plan's fault at the arrival of a datagram; returns whether the datagram is still
    /// delivered.
    fn inject_at_arrival(
        &mut self,
        fault_case: FaultCase,
        host: usize,
        datagram: &Datagram,
    ) -> bool {
        let from = self.hosts.iter().position(|host| host.addr() == datagram.from.ip());
        let Some(from) = from.filter(|_| self.is_before_end()) else { return true };
        let FaultCase { fault, lasts, .. } = fault_case;
        self.base.stats.faults += 1;
        self.base.note([9, fault as u64, host as u64], || format!("{fault:?}, host {host}"));
        let (there, back) = ((from, host), (host, from));
        let lines: &[_] = match fault {
            SingleFault::Cut | SingleFault::Hold => &[there, back],
            SingleFault::CutThere | SingleFault::HoldThere => &[there],
            SingleFault::CutBack => &[back],
            _ => &[],
        };
        if matches!(fault, SingleFault::Hold | SingleFault::HoldThere) {
            self.hold(lines, lasts);
            return true;
        }
        for &(from, to) in lines {
            self.net.block(from, to, true);
            self.base.schedule(lasts, Event::Mend(from, to));
        }
        let (receiver, sender) = (self.spans.of(host).0, self.spans.of(from).0);
        match fault {
            SingleFault::ReceiverDies => self.crash(receiver, lasts),
            SingleFault::SenderDies => self.crash(sender, lasts),
            SingleFault::ReceiverStalls => {
                let now = self.base.now;
                self.process(receiver).stall(now, lasts);
            }
            _ => {}
        }
        matches!(
            fault,
            SingleFault::CutBack | SingleFault::SenderDies | SingleFault::ReceiverStalls
        )
    }

    /// Injects the plan's fault at a certain step, and the one at the close of a session.
    fn check_step_fault(&mut self, client: usize) {
        let leaves = std::mem::take(&mut self.clients[client].leaves_now);
        if let Some(what) = self.plan.at_close.filter(|_| leaves && self.phase == Phase::Active)
            && self.base.extra.chance(300)
        {
            self.inject_fault(what, client);
        }
        let Some(step) = self.plan.step.filter(|_| self.step_left) else { return };
        if step.client == client && self.clients[client].inputs > step.after {
            self.step_left = false;
            if self.phase == Phase::Active {
                self.inject_fault(step.what, client);
            }
        }
    }

    // The end.

    fn calm(&mut self) {
        self.base.note([8, 0, 0], || "no more faults".into());
        self.phase = Phase::Draining;
        self.phase_since = self.base.now;
        self.net.faulty = false;
        self.server.calm = true;
        self.notice = self.notice_bound();
        self.sure_from = self.base.now + self.notice;
        for from in 0..self.hosts.len() {
            for to in 0..self.hosts.len() {
                self.net.block(from, to, false);
            }
        }
        for node in 0..self.plan.nodes.len() {
            self.boot(node);
        }
        for client in 0..self.clients.len() {
            self.client(client, |client, base, _, _| client.calm(base));
        }
        self.base.schedule(REPAIR, Event::Repair);
        self.base.schedule(MS, Event::Check);
    }

    fn check(&mut self) {
        let spent = self.base.now - self.phase_since;
        if self.phase == Phase::Draining && !self.judge_reconnected(spent) {
            return;
        }
        let limit = |most: u64| if self.plan.is_faulty() { most } else { most.min(CALM_MAX) };
        let next = match self.phase {
            Phase::Active => return,
            Phase::Draining if self.is_all_done() => Phase::Closing,
            Phase::Closing if self.server.running.as_ref().is_none_or(|r| r.closed) => Phase::Quiet,
            Phase::Quiet if spent >= QUIET => return self.end(),
            Phase::Draining if spent > limit(DRAIN_MAX) => {
                return self.base.fail(|| "it never ends".into());
            }
            Phase::Closing if spent > CLOSE_MAX => {
                return self.base.fail(|| "the server does not close".into());
            }
            phase => phase,
        };
        if next != self.phase {
            self.phase = next;
            self.phase_since = self.base.now;
            match next {
                Phase::Closing => self.server(Server::close),
                Phase::Quiet => self.server(Server::end),
                _ => {}
            }
        }
        self.base.schedule(200 * MS, Event::Check);
    }

    /// Tells whether every machine runs and every program is done.
    fn is_all_done(&self) -> bool {
        let clients = self.clients.iter().all(|client| client.process.alive && client.done);
        clients && self.server.process.alive
    }

    fn end(&mut self) {
        self.done = true;
        for host in 0..self.hosts.len() {
            let Some(device) = &self.hosts[host].device else { continue };
            if let Some(what) = left(device) {
                self.base.fail(|| format!("host {host}: something is left: {what}"));
            }
        }
    }

    /// Describes the plan and the state of all parts, for the report of a failure.
    pub(crate) fn dump(&self) -> String {
        let mut out = format!("{:#?}\n{:?} since {} ns\n", self.plan, self.phase, self.phase_since);
        for client in &self.clients {
            let number = client.number;
            let running = client.requests_running();
            let Some(active) = &client.active else {
                out += &format!("client {number}: no session, done {}\n", client.done);
                continue;
            };
            let (stage, inflight) = (active.stage, active.session.inflight());
            out +=
                &format!("client {number}: {stage:?}, {running} requests, {inflight} in flight\n");
            for path in active.session.paths() {
                let (id, state) = (path.id, path.state);
                out += &format!("  {id:?} {state:?} {:?} {} in flight\n", path.addr, path.inflight);
            }
        }
        if let Some(running) = &self.server.running {
            for session in running.sessions.sessions() {
                out += &format!("server: {session:?}\n");
            }
            out += &format!("server: {:?}\n", running.sessions.counters());
        }
        out
    }
}
