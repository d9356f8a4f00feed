//! The world of a run: nodes and processes, one step at a time, faults, and what is checked when
//! everything is at rest.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt::Write;
use std::net::{IpAddr, Ipv4Addr};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use bowline_host::core::{Caller, Core, LOOK, Parts};
use bowline_host::{Policy, Principals, Quota};
use bowline_host_wire::{ChannelId, NodeId, SocketHandle};
use bowline_rds::{Config, Instant, Node, SocketId};

use super::judge::Judge;
use super::kernel::{End, Events, Fd, Token};
use super::net::Net;
use super::node::{BellOf, RdsNode, Sim, SimBell, SimDescriptor, SimRds};
use super::plan::{Fault, FaultPlan, NodePlan, Plan};
use super::program;
use super::push::{LOCK, half, set_half};
use super::sabotage::Sabotage;
use super::shared::Shared;
use crate::engine::queue::{MS, SEC};
use crate::engine::rng::Rng;
use crate::engine::trace::Trace;

/// The user of the nodes.
const OWN: u32 = 0;
/// Rounds of a node within which a request that waits for nothing is answered.
const ROUNDS: u64 = 8;
/// How long everything has to be at rest before a run ends, and how long it may take.
const REST: u64 = SEC;
const REST_MAX: u64 = 60 * SEC;
/// How late a send may be given up, at a node that hands over meanwhile.
const LATE: u64 = 10 * MS;
/// Most steps of a run.
const STEPS_MAX: u64 = 400_000;
const ASLEEP: usize = 128;
const NOTICE: usize = 264;

/// What programs see of a node.
pub(super) struct HostView {
    pub(super) addr: IpAddr,
    pub(super) is_up: Cell<bool>,
    /// Bytes that a channel takes in one direction.
    pub(super) room: usize,
    pub(super) send_buffer: usize,
    pub(super) recv_buffer: usize,
    /// Connections that are not accepted.
    pub(super) backlog: RefCell<VecDeque<(Rc<End>, Caller)>>,
    /// Rounds of its server.
    pub(super) rounds: Cell<u64>,
    port: Cell<u16>,
}

impl HostView {
    pub(super) fn next_port(&self) -> u16 {
        self.port.set(self.port.get() + 1);
        self.port.get()
    }
}

/// What programs see of all nodes.
pub(super) struct Hosts {
    pub(super) all: Vec<HostView>,
    /// Sockets that were bound, and their addresses.
    pub(super) open: RefCell<Vec<(u32, std::net::SocketAddr)>>,
}

/// Where a node's server is.
enum Phase {
    /// About to begin a round.
    Round,
    /// About to sleep, unless the round had something to do.
    Rest { rests: bool },
    /// It sleeps, or looks what has happened.
    Wait { rests: bool, until: Option<u64> },
    /// These have happened.
    Told(VecDeque<(Token, bool)>),
    /// It is handed over, and resumes at a step of the run.
    Parted { parts: Box<Parts<Sim>>, at: u64 },
    /// It is dead until a time.
    Dead { until: u64 },
}

/// A node with its server.
struct Host {
    plan: NodePlan,
    config: Config,
    core: Option<Core<Sim>>,
    rds: Option<Rc<RdsNode>>,
    events: Rc<Events>,
    bell: Arc<SimBell>,
    phase: Phase,
    /// The last round had something to do, and was followed by another without a look at events.
    was_busy: bool,
    /// It is to hand over at the end of this round.
    hands_over: Option<u64>,
}

/// The world of a run.
pub(crate) struct World {
    pub(super) shared: Rc<Shared>,
    hosts: Rc<Hosts>,
    nodes: Vec<Host>,
    net: Net,
    faults: VecDeque<FaultPlan>,
    programs: u64,
    steps: u64,
    /// When a process last took a step, or a fault struck.
    busy: u64,
    quotas: Vec<[usize; 4]>,
    is_ending: bool,
}

impl World {
    pub(crate) fn new(plan: &Plan, rng: Rng, trace: Trace, sabotage: Option<Sabotage>) -> Self {
        let shared = Rc::new(Shared::new(rng, trace, plan.between, sabotage));
        let view = |(at, node): (usize, &NodePlan)| HostView {
            addr: IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1 + at as u8)),
            is_up: Cell::new(true),
            room: node.channel,
            send_buffer: node.send_buffer,
            recv_buffer: node.recv_buffer,
            backlog: RefCell::default(),
            rounds: Cell::new(0),
            port: Cell::new(4000),
        };
        let hosts = Rc::new(Hosts {
            all: plan.nodes.iter().enumerate().map(view).collect(),
            open: RefCell::default(),
        });
        let quota = |node: &NodePlan| {
            let buffers = node.quota.buffers;
            let (send, recv) = (buffers * node.send_buffer, buffers * node.recv_buffer);
            [node.quota.sockets, node.quota.channels, send, recv]
        };
        let quotas = plan.nodes.iter().map(quota).collect();
        let mut world = Self {
            shared: Rc::clone(&shared),
            hosts: Rc::clone(&hosts),
            nodes: Vec::new(),
            net: Net::default(),
            faults: plan.faults.clone().into(),
            programs: plan.programs,
            steps: 0,
            busy: 0,
            quotas,
            is_ending: false,
        };
        for (at, node) in plan.nodes.iter().enumerate() {
            let config = Config {
                addrs: vec![hosts.all[at].addr],
                generation: 1 + at as u32,
                seed: shared.random(),
                send_buffer: node.send_buffer,
                recv_buffer: node.recv_buffer,
                ..Config::default()
            };
            let host = Host {
                plan: node.clone(),
                config,
                core: None,
                rds: None,
                events: Rc::default(),
                bell: Arc::default(),
                phase: Phase::Round,
                was_busy: false,
                hands_over: None,
            };
            world.nodes.push(host);
            world.start(at, None);
        }
        for process in &plan.processes {
            program::start(&shared, &hosts, process.clone(), Vec::new());
        }
        world
    }

    /// Starts a node, with the RDS node of another if it resumes in its place.
    fn start(&mut self, at: usize, rds: Option<Node>) {
        let host = &mut self.nodes[at];
        let shared = &self.shared;
        let rds = rds.unwrap_or_else(|| Node::new(host.config.clone()));
        let rds = Rc::new(RdsNode::new(rds, Rc::clone(shared)));
        host.events = Rc::default();
        host.events.lose.set(if shared.sabotage == Some(Sabotage::LoseEvent) { 9 } else { 0 });
        host.bell = Arc::default();
        host.bell.is_dumb.store(shared.sabotage == Some(Sabotage::DumbBell), Ordering::Relaxed);
        let outside = Sim {
            shared: Rc::clone(shared),
            events: Rc::clone(&host.events),
            tokens: host.plan.tokens,
        };
        let [sockets, channels, send_bytes, recv_bytes] = self.quotas[at];
        let mut quota = Quota { sockets, channels, send_bytes, recv_bytes };
        if shared.sabotage == Some(Sabotage::NoQuota) {
            quota = Quota::NONE;
        }
        let attach = Principals { everybody: true, ..Principals::default() };
        let policy = Policy { attach, quota: Some(quota), ..Policy::default() };
        let bell = BellOf(Arc::clone(&host.bell));
        let number = NodeId(shared.random() >> 1);
        let core =
            Core::start(outside, SimRds(Rc::clone(&rds)), bell, (OWN, policy, quota), number);
        (host.core, host.rds) = (Some(core), Some(rds));
        host.phase = Phase::Round;
        self.hosts.all[at].is_up.set(true);
    }

    fn rds(&self) -> Vec<Option<Rc<RdsNode>>> {
        self.nodes.iter().map(|node| node.rds.clone()).collect()
    }

    /// Takes one step; returns false at the end.
    pub(crate) fn step(&mut self) -> bool {
        if self.shared.failure.borrow().is_some() {
            return false;
        }
        self.steps += 1;
        self.shared.count(|stats| stats.steps += 1);
        if self.steps > STEPS_MAX {
            self.shared.fail(|| "it does not come to an end".into());
            return false;
        }
        self.strike();
        let processes = self.shared.runnable();
        let nodes: Vec<usize> = (0..self.nodes.len()).filter(|at| self.can_run(*at)).collect();
        let all = self.rds();
        let is_busy = self.net.carry_out(&all);
        let arrivals = self.net.arrivals(&all);
        let nodes_can = !nodes.is_empty() || !arrivals.is_empty();
        if !processes.is_empty() && (!nodes_can || self.shared.chance(self.programs)) {
            let at = processes[self.shared.below(processes.len() as u64) as usize];
            self.busy = self.shared.now.get();
            self.shared.step_process(at);
        } else if nodes_can {
            let pick = self.shared.below((nodes.len() + arrivals.len()) as u64) as usize;
            match nodes.get(pick) {
                Some(at) => self.step_node(*at),
                None => {
                    let place = arrivals[pick - nodes.len()];
                    if let Some(rds) = &all[place.0] {
                        self.net.deliver(place, rds);
                    }
                }
            }
        } else if !is_busy {
            return self.rest();
        }
        true
    }

    /// Lets the next fault strike if it is due.
    fn strike(&mut self) {
        let Some(fault) = self.faults.front().copied().filter(|f| f.after <= self.steps) else {
            return;
        };
        self.faults.pop_front();
        self.busy = self.shared.now.get();
        let at = fault.node;
        if self.nodes[at].core.is_none() {
            return;
        }
        match fault.what {
            Fault::Crash { away } => self.kill_node(at, away),
            Fault::HandOver { steps } => self.nodes[at].hands_over = Some(steps),
        }
    }

    fn kill_node(&mut self, at: usize, away: u64) {
        self.shared.note([2, at as u64, away], || format!("node {at} is killed"));
        self.shared.hit("a node", "is killed");
        self.shared.count(|stats| stats.nodes_killed += 1);
        for socket in &mut self.shared.judge.borrow_mut().sockets {
            socket.may_lose |= socket.node == at;
            socket.is_gone |= socket.node == at;
        }
        self.hosts.all[at].is_up.set(false);
        self.hosts.all[at].backlog.borrow_mut().clear();
        self.nodes[at].core = None;
        self.nodes[at].rds = None;
        self.nodes[at].hands_over = None;
        let config = &mut self.nodes[at].config;
        config.generation += 2;
        // As the library begins at the clock: an acknowledgement that was for the node of
        // before is above or below all that the next one sends.
        config.first_sequence = u64::from(config.generation) << 20;
        self.net.node_ended(at);
        self.nodes[at].phase = Phase::Dead { until: self.shared.now.get() + away };
    }

    fn can_run(&self, at: usize) -> bool {
        let now = self.shared.now.get();
        let host = &self.nodes[at];
        match &host.phase {
            Phase::Round | Phase::Rest { .. } | Phase::Told(_) => true,
            Phase::Wait { until: None, .. } => true,
            Phase::Wait { until: Some(until), .. } => {
                *until <= now
                    || self.timer(at).is_some_and(|timer| timer <= now)
                    || host.bell.is_rung()
                    || host.hands_over.is_some()
                    || !host.events.is_empty()
                    || !self.hosts.all[at].backlog.borrow().is_empty()
            }
            // Others may have nothing to do meanwhile.
            Phase::Parted { at, .. } => *at <= self.steps || self.shared.runnable().is_empty(),
            Phase::Dead { until } => *until <= now,
        }
    }

    fn step_node(&mut self, at: usize) {
        let host = &mut self.nodes[at];
        let shared = Rc::clone(&self.shared);
        let wrong = |how| shared.sabotage == Some(how);
        let now = shared.now.get();
        match std::mem::replace(&mut host.phase, Phase::Round) {
            Phase::Round => {
                let Some(core) = &mut host.core else { return };
                let view = &self.hosts.all[at];
                view.rounds.set(view.rounds.get() + 1);
                let again = !wrong(Sabotage::ForgetRequests) && core.serve_again();
                let is_busy = core.round() | again;
                if let Some(rds) = &host.rds {
                    rds.call(|node, now| {
                        if node.poll_timeout().is_some_and(|at| at <= now) {
                            node.handle_timeout(now);
                        }
                        node.idle(now);
                    });
                }
                let rests = core.may_rest(is_busy);
                host.was_busy = !rests && !host.was_busy;
                if !host.was_busy {
                    host.phase = Phase::Rest { rests };
                }
                self.check_asked(at);
            }
            Phase::Rest { rests } => {
                let Some(core) = &mut host.core else { return };
                let mut may_sleep = rests && core.fall_asleep();
                may_sleep |= wrong(Sabotage::SleepAnyway) && rests;
                let sleep = if wrong(Sabotage::NoDeadlines) { LOOK } else { core.time_to_sleep() };
                let until = may_sleep.then(|| now + sleep.as_nanos() as u64);
                host.phase = Phase::Wait { rests, until };
            }
            Phase::Wait { rests, .. } => {
                if let Some(steps) = host.hands_over.take() {
                    return self.hand_over(at, steps);
                }
                let Some(core) = &mut host.core else { return };
                if rests {
                    core.wake_up();
                }
                let backlog = std::mem::take(&mut *self.hosts.all[at].backlog.borrow_mut());
                for (end, caller) in backlog {
                    let fd = Fd::End(end);
                    let stream = SimDescriptor { fd, shared: Rc::clone(&shared) };
                    if let Err((errno, stream)) = core.accept(stream, caller) {
                        core.turn_away(stream, errno);
                    }
                }
                host.phase = Phase::Told(host.events.take().into());
            }
            Phase::Told(mut told) => {
                let Some(core) = &mut host.core else { return };
                match told.pop_front() {
                    Some((Token::Channel(number), ended)) => {
                        core.channel_event(ChannelId(number), ended);
                        host.phase = Phase::Told(told);
                    }
                    Some((Token::Socket(handle), ended)) => {
                        core.socket_event(SocketHandle(handle), ended);
                        host.phase = Phase::Told(told);
                    }
                    None => {
                        if !wrong(Sabotage::NoDeadlines) {
                            core.end_waits();
                        }
                        core.count_refusals();
                        core.look_if_due();
                    }
                }
            }
            Phase::Parted { parts, .. } => self.resume(at, *parts),
            Phase::Dead { .. } => {
                shared.hit("a node", "starts again");
                self.start(at, None);
            }
        }
        self.spoil(at);
    }

    /// Makes the mistakes that are made in shared memory.
    fn spoil(&self, at: usize) {
        let Some(how) = self.shared.sabotage else { return };
        let sleeps = matches!(self.nodes[at].phase, Phase::Wait { until: Some(_), .. });
        for (_, memory) in self.shared.memories.borrow().values() {
            let Some(memory) = memory.upgrade() else { continue };
            match how {
                Sabotage::SleepUnseen if sleeps => set_half(&memory, ASLEEP, 0),
                Sabotage::NoNotice => memory.store(NOTICE, u64::MAX),
                _ => {}
            }
        }
    }

    /// The server leaves all it has to another process.
    fn hand_over(&mut self, at: usize, steps: u64) {
        let Some(core) = self.nodes[at].core.take() else { return };
        self.shared.note([3, at as u64, steps], || format!("node {at} hands over"));
        self.shared.hit("a node", "hands over");
        self.shared.count(|stats| stats.hand_overs += 1);
        let parts = core.take_apart();
        self.nodes[at].events = Rc::default();
        let Some(mut parts) = parts.copied() else {
            self.shared.fail(|| "what is handed over cannot be read".into());
            return;
        };
        if self.shared.sabotage == Some(Sabotage::LoseChannel) {
            parts.channels.pop();
        }
        let at_step = self.steps + steps;
        self.nodes[at].phase = Phase::Parted { parts: Box::new(parts), at: at_step };
    }

    fn resume(&mut self, at: usize, parts: Parts<Sim>) {
        self.shared.note([4, at as u64, 0], || format!("node {at} resumes"));
        self.shared.hit("a node", "resumes");
        let Some(rds) = self.nodes[at].rds.take() else { return };
        rds.call(|node, now| node.acknowledge_all(now));
        let all = |this: &Self, rds: &Rc<RdsNode>| {
            let mut all = this.rds();
            all[at] = Some(Rc::clone(rds));
            all
        };
        let nodes = all(self, &rds);
        while self.net.carry_out(&nodes) {}
        rds.call(|node, now| node.close_links(now));
        while self.net.carry_out(&nodes) {}
        self.net.node_ended(at);
        let mut bytes = Vec::new();
        let saved = rds.call(|node, now| node.save(now, &mut bytes));
        let now = Instant::from_nanos(self.shared.now.get());
        let node = Node::resume(self.nodes[at].config.clone(), now, bytes.as_slice());
        match (saved, node) {
            (Ok(()), Ok(node)) => self.start(at, Some(node)),
            (saved, node) => {
                self.shared.fail(|| format!("saved {saved:?}, resumed {:?}", node.err()));
                return;
            }
        }
        if let Some(core) = &mut self.nodes[at].core {
            core.resume(parts);
        }
        // Their requests wait while nobody serves them.
        for process in self.shared.processes.borrow().iter().filter(|p| p.node == at) {
            if let Some(asked) = &mut *process.asked.borrow_mut() {
                asked.rounds = self.hosts.all[at].rounds.get();
            }
        }
    }

    /// Requests that wait for nothing are answered soon.
    fn check_asked(&self, at: usize) {
        let rounds = self.hosts.all[at].rounds.get();
        for process in self.shared.processes.borrow().iter().filter(|p| p.node == at) {
            let asked = process.asked.borrow();
            let Some(asked) = asked.as_ref() else { continue };
            if rounds > asked.rounds + ROUNDS && !asked.stream.is_readable() {
                let (id, what) = (process.id, asked.what);
                self.shared.fail(|| format!("process {id} has no answer to {what}"));
            }
        }
    }

    /// Nothing can go on: checks that nothing should, and lets time pass.
    fn rest(&mut self) -> bool {
        self.check_rest();
        let mut judge = self.shared.judge.borrow_mut();
        for (socket, record) in judge.sockets.iter_mut().enumerate() {
            record.was_taken = false;
            let mut others = (0..self.nodes.len()).filter(|other| *other != record.node);
            record.is_unheard &= !others.all(|other| self.net.is_connected(record.node, other));
            record.is_unacknowledged &= self.has_unacknowledged(socket as u32);
        }
        drop(judge);
        let now = self.shared.now.get();
        let processes = self.shared.processes.borrow().clone();
        let is_still = processes.iter().all(|process| {
            process.is_over() || process.is_idle.get() && process.wakes_at().is_none()
        });
        let is_up = self.nodes.iter().all(|node| node.core.is_some());
        let is_done = is_still && is_up && self.faults.is_empty();
        let rested = now.saturating_sub(self.busy);
        let result = self.shared.judge.borrow().end();
        if self.is_ending {
            if rested >= REST {
                self.check_end();
                return false;
            }
        } else if rested >= REST_MAX || is_done && rested >= REST && result.is_ok() {
            if !is_done {
                let stuck = processes.iter().find(|p| !p.is_over() && !p.is_idle.get());
                let what = stuck.map(|p| {
                    let blocked = p.blocked.borrow();
                    (p.id, blocked.as_ref().map(|blocked| blocked.what))
                });
                self.shared.fail(|| format!("it does not come to rest: {what:?}"));
            }
            if let Err(what) = result {
                self.shared.fail(|| what);
            }
            // Everybody goes, and leaves nothing.
            self.is_ending = true;
            self.busy = now;
            processes.iter().for_each(|process| process.kill());
            return true;
        }
        // A fault that no step brings comes now.
        if is_still && let Some(fault) = self.faults.front_mut() {
            fault.after = 0;
            return true;
        }
        let next = self.next_time().unwrap_or(now + MS).max(now + 1);
        self.shared.now.set(next);
        true
    }

    /// When the RDS node of a node has something to do.
    fn timer(&self, at: usize) -> Option<u64> {
        let host = &self.nodes[at];
        let rds = host.rds.as_ref().filter(|_| host.core.is_some())?;
        rds.node.borrow().poll_timeout().map(Instant::as_nanos)
    }

    fn next_time(&self) -> Option<u64> {
        let processes = self.shared.processes.borrow();
        let waits = processes.iter().filter(|p| !p.is_over()).filter_map(|p| p.wakes_at());
        let nodes = self.nodes.iter().filter_map(|node| match &node.phase {
            Phase::Wait { until, .. } => *until,
            Phase::Dead { until } => Some(*until),
            _ => None,
        });
        // The server's thread has the timers of the node as well.
        let timers = (0..self.nodes.len()).filter_map(|at| self.timer(at));
        waits.chain(nodes).chain(timers).min()
    }

    /// Checks what holds when nothing can go on.
    fn check_rest(&self) {
        let now = self.shared.now.get();
        let mut judge = self.shared.judge.borrow_mut();
        let sleepers = self.check_processes(&judge, now);
        let processes = self.shared.processes.borrow();
        let writers: BTreeSet<u32> = processes
            .iter()
            .filter(|process| !process.is_over())
            .filter_map(|process| process.writes_on.get())
            .collect();
        for (at, host) in self.nodes.iter().enumerate() {
            let Some(core) = &host.core else { continue };
            for view in core.sockets() {
                let memories = self.shared.memories.borrow();
                let found = memories.iter().find(|(_, (handle, _))| *handle == view.handle);
                let Some((socket, (_, memory))) = found else { continue };
                if view.has_sends {
                    self.shared.hit("at rest", "pushed and stalled");
                }
                let sleeper = sleepers.get(socket);
                let has_something = sleeper.is_some() && self.has_something(*socket);
                let is_locked = memory.upgrade().is_some_and(|memory| half(&memory, LOCK) != 0);
                let waits = writers.contains(socket) && self.has_room(view.id, host);
                let wrong = has_something || view.has_work || is_locked || waits;
                if judge.sleeps(*socket, wrong, now) {
                    self.shared.fail(|| match sleeper {
                        Some(id) if has_something => {
                            format!("process {id} sleeps, there is something on socket {socket}")
                        }
                        _ if waits => format!("socket {socket} has room, and does not show it"),
                        _ if is_locked => format!("socket {socket} stays locked"),
                        _ => format!("node {at} sleeps, something is pushed on socket {socket}"),
                    });
                }
            }
            self.check_quotas(at, core);
        }
    }

    /// Checks what processes wait for; returns who waits for something on a socket.
    fn check_processes(&self, judge: &Judge, now: u64) -> BTreeMap<u32, u32> {
        let mut sleepers = BTreeMap::new();
        for process in self.shared.processes.borrow().iter().filter(|p| !p.is_over()) {
            let blocked = process.blocked.borrow();
            let Some(blocked) = blocked.as_ref() else { continue };
            sleepers.extend(blocked.receives_on.iter().map(|socket| (*socket, process.id)));
            let is_up = self.nodes[process.node].core.is_some();
            let id = process.id;
            if let Some((from, to)) = process.sends.get().filter(|_| blocked.what == "send") {
                self.shared.hit("at rest", "a sender waits");
                let is_sure = |socket: u32| {
                    let record = &judge.sockets[socket as usize];
                    let is_there = self.nodes[record.node].core.is_some();
                    is_there && !record.is_spoiled && !record.is_unsure && record.holders > 0
                };
                let is_empty = judge.sockets[to as usize].unread == 0;
                // While no connection stands, nobody learns that a port of another node has room.
                let [here, there] = [from, to].map(|socket| judge.sockets[socket as usize].node);
                let is_notified = here == there || self.net.is_connected(here, there);
                let is_empty = is_empty && judge.outstanding(from) == 0;
                let is_empty = is_empty && !self.has_unacknowledged(from);
                let is_empty = is_empty && !judge.may_have_more(to, |id| self.has_ended(id));
                if is_sure(from) && is_sure(to) && is_empty && is_notified {
                    self.shared.fail(|| format!("process {id} waits to send, and there is room"));
                }
            }
            let gives_up = process.gives_up.get().filter(|_| is_up && blocked.what == "send");
            if gives_up.is_some_and(|at| now > at + LATE) {
                self.shared.fail(|| format!("process {id} should have given up to send"));
            }
        }
        sleepers
    }

    fn check_quotas(&self, at: usize, core: &Core<Sim>) {
        for (user, [sockets, channels, send, recv, _]) in core.usage() {
            let most = self.quotas[at];
            let has = [sockets, channels, send, recv];
            if user != OWN && has.iter().zip(most).any(|(has, most)| *has > most) {
                self.shared.fail(|| format!("user {user} has {has:?} of {most:?}"));
            }
            let counted = core.sockets().iter().filter(|view| view.user == user).count();
            if counted != sockets {
                self.shared
                    .fail(|| format!("user {user} has {counted} sockets, and pays for {sockets}"));
            }
        }
    }

    fn has_ended(&self, process: u32) -> bool {
        let processes = self.shared.processes.borrow();
        processes.iter().find(|p| p.id == process).is_none_or(|p| p.is_over())
    }

    /// Tells whether a node keeps what a socket has sent until its peer acknowledges it, which may
    /// take until a timer of that peer.
    fn has_unacknowledged(&self, socket: u32) -> bool {
        let memories = self.shared.memories.borrow();
        let Some((handle, _)) = memories.get(&socket) else { return false };
        self.nodes.iter().any(|host| {
            let (Some(core), Some(rds)) = (&host.core, &host.rds) else { return false };
            let views = core.sockets();
            let view = views.iter().find(|view| view.handle == *handle);
            view.is_some_and(|view| rds.node.borrow().send_bytes(view.id) != Ok(0))
        })
    }

    fn has_room(&self, id: SocketId, host: &Host) -> bool {
        let ready = host.rds.as_ref().map(|rds| rds.node.borrow().readiness(id));
        matches!(ready, Some(Ok(ready)) if ready.writable)
    }

    /// Tells whether a program finds something on a socket, or its node something for it.
    fn has_something(&self, socket: u32) -> bool {
        let memories = self.shared.memories.borrow();
        let Some((handle, memory)) = memories.get(&socket) else { return false };
        let Some(memory) = memory.upgrade() else { return false };
        let area = memory.area();
        let in_node = || {
            self.nodes.iter().any(|host| {
                let (Some(core), Some(rds)) = (&host.core, &host.rds) else { return false };
                let views = core.sockets();
                let view = views.iter().find(|view| view.handle == *handle);
                let readable = |id| rds.node.borrow().readiness(id).is_ok_and(|r| r.readable);
                view.is_some_and(|view| readable(view.id))
            })
        };
        area.has_message() || area.has_more() || in_node()
    }

    /// Nobody is left: nothing is, either.
    fn check_end(&self) {
        for (at, host) in self.nodes.iter().enumerate() {
            let Some(core) = &host.core else { continue };
            let (channels, sockets) = core.counts();
            let usage = core.usage();
            let left = host.rds.as_ref().map_or(0, |rds| rds.node.borrow().info().sockets.len());
            if channels + sockets + usage.len() + left > 0 {
                self.shared.fail(|| {
                    format!(
                        "node {at} keeps {channels} channels, {sockets} sockets, {left} of RDS, \
                         and counts {usage:?}"
                    )
                });
            }
        }
        self.shared.hit("at rest", "nothing");
    }

    pub(crate) fn dump(&self) -> String {
        let mut out = String::new();
        for (at, host) in self.nodes.iter().enumerate() {
            let phase = match &host.phase {
                Phase::Round => "round".into(),
                Phase::Rest { rests } => format!("rests: {rests}"),
                Phase::Wait { until, .. } => format!("wait until {until:?}"),
                Phase::Told(told) => format!("told {told:?}"),
                Phase::Parted { .. } => "handed over".into(),
                Phase::Dead { .. } => "dead".into(),
            };
            let _ = writeln!(out, "node {at}: {phase}");
            for view in host.core.iter().flat_map(Core::sockets) {
                let _ = writeln!(out, "  {view:?}");
            }
            if let Some(rds) = &host.rds {
                for socket in rds.node.borrow().info().sockets {
                    let _ = writeln!(out, "  {socket:?}");
                }
            }
        }
        for process in self.shared.processes.borrow().iter().filter(|p| !p.is_over()) {
            let blocked = process.blocked.borrow();
            let what = blocked.as_ref().map_or("runs", |blocked| blocked.what);
            let (id, node, idle) = (process.id, process.node, process.is_idle.get());
            let sockets = process.sockets.borrow();
            let _ = writeln!(
                out,
                "process {id} of node {node}: {what}, idle {idle}, sockets {sockets:?}"
            );
        }
        for (number, socket) in self.shared.judge.borrow().sockets.iter().enumerate() {
            let _ = writeln!(out, "socket {number}: {socket:?}");
        }
        out
    }
}

impl Drop for World {
    fn drop(&mut self) {
        // Processes have what has them.
        let processes = self.shared.processes.take();
        processes.iter().for_each(|process| process.kill());
    }
}
