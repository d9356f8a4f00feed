//! One run: devices, their programs and their troubles, step by step.

use bowline_roce::{Event as DeviceEvent, InUse, Instant};
use bowline_verbs::{CmEvent, CmId, Completion, ConnRequest};

use super::app::{self, App, Owned};
use super::host::Host;
use super::letters::{Letter, Port};
use super::net::{Datagram, Net};
use super::oracle;
use super::plan::{FaultKind, Plan};
use super::sabotage::Sabotage;
use super::side::{Side, SideId, Stage, Trouble};
use super::stats::Stats;
use crate::queue::{MS, Queue, SEC, US};
use crate::rng::Rng;
use crate::trace::Trace;

/// Something due at one moment of virtual time.
#[derive(Debug)]
pub(crate) enum Event {
    /// A datagram arrives.
    Arrive { host: usize, datagram: Datagram },
    /// A timer of a device may be due.
    Timer { host: usize, boot: u32 },
    /// A driver sends what there is and hands out events.
    Turn { host: usize, boot: u32 },
    /// A program begins a connection.
    Connect(usize),
    /// A program takes a queue pair to the state in which it sends.
    SetUp(SideId),
    /// A program answers somebody who wants to connect.
    Decide { host: usize, boot: u32, id: CmId, request: Box<ConnRequest> },
    /// A program posts requests.
    Post(SideId),
    /// A program posts a receive.
    Receive(SideId),
    /// A program sends a datagram.
    Letter(usize),
    /// A program looks at its completions.
    Look(SideId),
    /// A program ends its connection.
    End(SideId),
    /// A program takes the peer's memory away.
    Revoke(SideId),
    /// The next fault of one kind.
    Fault(usize),
    /// A device starts again.
    Boot(usize),
    /// A line is whole again.
    Mend(usize, usize),
    /// The faulty part of the run ends.
    Calm,
    /// Looks whether everything is done.
    Check,
}

/// Where the run is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// Faults happen.
    Active,
    /// No more faults; everything comes to its end.
    Draining,
    /// Nothing is left; late datagrams would show now.
    Quiet,
}

/// One run.
pub(crate) struct World {
    pub(crate) plan: Plan,
    pub(crate) now: u64,
    queue: Queue<Event>,
    pub(crate) rng: Rng,
    pub(crate) trace: Trace,
    pub(crate) stats: Stats,
    /// The first broken promise.
    pub(crate) failure: Option<String>,
    pub(crate) net: Net,
    pub(crate) hosts: Vec<Host>,
    pub(crate) sides: Vec<Side>,
    /// What programs of the hosts send and receive datagrams with.
    pub(crate) ports: Vec<Option<Port>>,
    pub(crate) letters: Vec<Letter>,
    /// Datagrams that programs not yet started are to send.
    pub(crate) letters_left: Vec<u32>,
    /// Requests for connections that programs have not answered.
    deciding: usize,
    phase: Phase,
    phase_since: u64,
    /// The last look has been taken.
    done: bool,
    pub(crate) sabotage: Option<Sabotage>,
    entries: Vec<Completion>,
}

/// Virtual time within which everything must end after the last fault: all repetitions of a
/// connection manager one after the other [CM-40], [CM-42], what it waits for a slow program
/// [CM-43], and time for the data.
const DRAIN_MAX: u64 = 600 * SEC;
/// The same without any fault.
const CALM_MAX: u64 = 20 * SEC;
/// Time in which late datagrams and timers show.
const QUIET: u64 = 3 * SEC;
/// Timers a device may hold besides a few of every queue pair.
const TIMERS: usize = 100;
/// Steps after which a run is taken to go in circles.
const STEPS_MAX: u64 = 1_500_000;
/// Operation of management datagrams [GSI-1].
const UD_SEND: u8 = 0x64;
/// Bursts of one turn after which a device is taken to go in circles.
const BURSTS_MAX: usize = 20_000;

impl World {
    pub(crate) fn new(plan: Plan, rng: Rng, trace: Trace, sabotage: Option<Sabotage>) -> Self {
        let hosts = plan.hosts.iter().map(|host| Host::new(host.clone())).collect();
        let net = Net::new(plan.net.clone(), plan.hosts.len());
        let mut world = Self {
            now: SEC,
            queue: Queue::default(),
            rng,
            trace,
            stats: Stats::default(),
            failure: None,
            net,
            hosts,
            sides: Vec::new(),
            ports: plan.hosts.iter().map(|_| None).collect(),
            letters: Vec::new(),
            letters_left: plan.hosts.iter().map(|h| h.letters).collect(),
            deciding: 0,
            phase: Phase::Active,
            phase_since: SEC,
            done: false,
            sabotage,
            entries: Vec::new(),
            plan,
        };
        for host in 0..world.hosts.len() {
            world.boot(host);
        }
        let mut calm = world.plan.active;
        for conn in 0..world.plan.conns.len() {
            let start = world.plan.conns[conn].start;
            calm = calm.max(start + 1);
            world.schedule(start, Event::Connect(conn));
        }
        for kind in 0..world.plan.faults.len() {
            world.next_fault(kind);
        }
        world.schedule(calm, Event::Calm);
        world
    }

    /// Puts `event` into the queue, `delay` from now.
    pub(crate) fn schedule(&mut self, delay: u64, event: Event) {
        self.queue.push(self.now.saturating_add(delay), event);
    }

    /// The same after a time drawn up to `most`.
    pub(crate) fn schedule_within(&mut self, most: u64, event: Event) {
        let delay = self.rng.below(most + 1);
        self.schedule(delay, event);
    }

    /// Records the first broken promise; later ones follow from it.
    pub(crate) fn fail(&mut self, what: impl FnOnce() -> String) {
        if self.failure.is_none() {
            self.failure = Some(what());
        }
    }

    /// Records a broken promise, if it is one.
    pub(crate) fn judge<T>(&mut self, result: Result<T, String>) -> Option<T> {
        match result {
            Ok(value) => Some(value),
            Err(what) => {
                self.fail(|| what);
                None
            }
        }
    }

    /// Adds to the record.
    pub(crate) fn note(&mut self, facts: [u64; 3], text: impl FnOnce() -> String) {
        self.trace.note(self.now, facts, text);
    }

    pub(crate) fn instant(&self) -> Instant {
        Instant::from_nanos(self.now)
    }

    /// Takes one step; false when the run is over.
    pub(crate) fn step(&mut self) -> bool {
        let Some((at, event)) = self.queue.pop() else {
            self.fail(|| "nothing left to happen".into());
            return false;
        };
        self.now = at;
        self.stats.steps += 1;
        if self.stats.steps > STEPS_MAX {
            self.fail(|| format!("still going after {STEPS_MAX} steps"));
        }
        self.dispatch(event);
        self.failure.is_none() && !self.finished()
    }

    fn finished(&self) -> bool {
        self.done
    }

    fn lives(&self, host: usize, boot: u32) -> bool {
        self.hosts[host].boot == boot && self.hosts[host].device.is_some()
    }

    fn dispatch(&mut self, event: Event) {
        match event {
            Event::Arrive { host, datagram } => self.arrive(host, &datagram),
            Event::Timer { host, boot } => {
                if self.lives(host, boot) {
                    let result = self.hosts[host].timer(self.now);
                    if self.judge(result) == Some(true) {
                        self.note([2, host as u64, 0], || format!("timer of host {host}"));
                        self.touched(host);
                    } else {
                        self.set_timer(host);
                    }
                }
            }
            Event::Turn { host, boot } => {
                if self.lives(host, boot) {
                    self.turn(host);
                }
            }
            Event::Connect(conn) => self.connect(conn),
            Event::SetUp(id) => self.set_up(id),
            Event::Decide { host, boot, id, request } => {
                self.deciding -= 1;
                if self.lives(host, boot) {
                    self.decide(host, id, &request);
                }
            }
            Event::Post(id) => self.post(id),
            Event::Receive(id) => self.post_receive(id),
            Event::Letter(host) => self.send_letter(host),
            Event::Look(id) => self.look(id),
            Event::End(id) => {
                if matches!(self.sides[id].stage, Stage::Connecting | Stage::Up) {
                    self.end(id);
                }
            }
            Event::Revoke(id) => self.revoke(id),
            Event::Fault(kind) => self.fault(kind),
            Event::Boot(host) => self.boot(host),
            Event::Mend(from, to) => self.net.block(from, to, false),
            Event::Calm => self.calm(),
            Event::Check => self.check(),
        }
    }

    // Hosts and the network.

    fn arrive(&mut self, host: usize, datagram: &Datagram) {
        if self.hosts[host].device.is_none() {
            return;
        }
        self.stats.datagrams += 1;
        let len = datagram.bytes.len() as u64;
        let opcode = datagram.bytes.first().copied().unwrap_or(0);
        self.note([1, host as u64, len << 8 | u64::from(opcode)], || {
            let word = |at: usize| {
                let bytes = datagram.bytes.get(at..at + 4).unwrap_or(&[0; 4]);
                u32::from_be_bytes(bytes.try_into().unwrap_or_default())
            };
            let (from, qpn, psn) = (datagram.from, word(4) & 0xff_ffff, word(8));
            format!(
                "host {host} <- {from}: opcode {opcode:#04x} QPN {qpn:#x} PSN {:#x}{} {len} bytes, \
                 then {:08x}",
                psn & 0xff_ffff,
                if psn >> 31 == 1 { " ack" } else { "" },
                word(12)
            )
        });
        let deadly = opcode == UD_SEND
            && self.phase == Phase::Active
            && self.rng.chance(self.plan.deadly_mads);
        let which = if deadly { self.rng.below(3) } else { 3 };
        let length = self.plan.fault_max;
        if which == 0 {
            let length = self.rng.magnitude(US, length);
            return self.crash(host, length);
        }
        if !self.sabotaged_arrival(host, datagram) {
            self.hosts[host].deliver(self.now, &mut self.rng, datagram);
        }
        self.touched(host);
        let sender = self.hosts.iter().position(|h| h.addr() == datagram.from.ip());
        if let (1 | 2, Some(sender)) = (which, sender) {
            let length = self.rng.magnitude(US, length);
            self.crash(if which == 1 { host } else { sender }, length);
        }
    }

    /// A device was given something: its driver has to look at it.
    pub(crate) fn touched(&mut self, host: usize) {
        self.set_timer(host);
        let Host { boot, turning, .. } = self.hosts[host];
        if !turning && self.hosts[host].device.is_some() {
            self.hosts[host].turning = true;
            self.schedule_within(self.hosts[host].plan.turn, Event::Turn { host, boot });
        }
    }

    fn set_timer(&mut self, host: usize) {
        if let Some(due) = self.hosts[host].next_timer(self.now) {
            let boot = self.hosts[host].boot;
            self.schedule(due - self.now, Event::Timer { host, boot });
        }
    }

    fn turn(&mut self, host: usize) {
        self.hosts[host].turning = false;
        self.events(host);
        for bursts in 0.. {
            if bursts == BURSTS_MAX {
                self.fail(|| format!("host {host} never stops sending"));
                return;
            }
            let Self { hosts, net, rng, now, queue, stats, plan, .. } = self;
            let (now, number) = (*now, host);
            let sent = hosts[host].send(now, |datagram| {
                let Some(to) = plan.hosts.iter().position(|h| h.addr == datagram.to) else {
                    return;
                };
                stats.sent += 1;
                let fate = net.send(now, rng, (number, to), datagram);
                stats.damaged += u64::from(fate.damaged);
                stats.lost += u64::from(fate.arrivals.is_empty());
                for (at, datagram) in fate.arrivals {
                    queue.push(at, Event::Arrive { host: to, datagram });
                }
            });
            if self.judge(sent) != Some(true) {
                break;
            }
        }
        self.events(host);
        self.set_timer(host);
        self.check_bounds(host);
    }

    /// What a device holds for itself is bounded by what programs have made.
    fn check_bounds(&mut self, host: usize) {
        let Some(device) = &self.hosts[host].device else { return };
        let held = device.in_use();
        if held.timers > TIMERS + 4 * held.qps || held.mads > 0 || held.events > 0 {
            self.fail(|| format!("host {host} holds too much: {held:?}"));
        }
    }

    /// Hands out what the device has to say.
    fn events(&mut self, host: usize) {
        loop {
            let Some(device) = &mut self.hosts[host].device else { return };
            let Some(event) = device.poll_event() else { return };
            match event {
                DeviceEvent::CqReady(cq) => {
                    let boot = self.hosts[host].boot;
                    let mine = |s: &Side| s.host == host && s.boot == boot;
                    let side = self.sides.iter().position(|s| {
                        mine(s) && s.stage < Stage::Gone && (s.send_cq == cq || s.recv_cq == cq)
                    });
                    if side.is_none() && self.port_ready(host, cq) {
                        continue;
                    }
                    // The program may have removed it a moment ago.
                    let Some(id) = side else { continue };
                    self.note([3, id as u64, cq.0.into()], || format!("side {id}: {cq:?} ready"));
                    let which = usize::from(self.sides[id].send_cq != cq);
                    if !std::mem::take(&mut self.sides[id].armed[which]) {
                        self.fail(|| format!("side {id}: {cq:?} was not armed and is reported"));
                    }
                    if self.sabotage != Some(Sabotage::LoseReady) || self.rng.chance(900) {
                        self.schedule_look(id);
                    }
                }
                DeviceEvent::Async(event) => {
                    self.note([4, host as u64, 0], || format!("host {host}: {event:?}"));
                }
                DeviceEvent::Cm(event) => self.connection_event(host, event),
                other => self.fail(|| format!("host {host}: {other:?}, of which nothing is known")),
            }
        }
    }

    fn schedule_look(&mut self, id: SideId) {
        if !std::mem::replace(&mut self.sides[id].looking, true) {
            let most = self.plan.hosts[self.sides[id].host].look;
            self.schedule_within(most, Event::Look(id));
        }
    }

    // Programs.

    /// Whether the side's program still runs.
    pub(crate) fn runs(&self, id: SideId) -> bool {
        let side = &self.sides[id];
        side.stage < Stage::Gone && self.lives(side.host, side.boot)
    }

    pub(crate) fn look(&mut self, id: SideId) {
        self.sides[id].looking = false;
        if !self.runs(id) || self.sides[id].stage >= Stage::Drained {
            return;
        }
        let (host, queues) =
            (self.sides[id].host, [self.sides[id].send_cq, self.sides[id].recv_cq]);
        let count = if queues[0] == queues[1] { 1 } else { 2 };
        for (which, cq) in queues.into_iter().enumerate().take(count) {
            let mut refused = false;
            loop {
                let mut entries = std::mem::take(&mut self.entries);
                entries.clear();
                let most = 1 + self.rng.index(16);
                let Some(device) = &mut self.hosts[host].device else { return };
                let polled = device.poll_cq(cq, &mut entries, most);
                let n = match polled {
                    Ok(n) if n == entries.len() && n <= most => n,
                    bad => {
                        self.fail(|| format!("side {id}: polling {most} gave {bad:?}"));
                        return;
                    }
                };
                self.sabotaged_entries(&mut entries);
                for entry in &entries {
                    self.completed(id, entry);
                }
                self.entries = entries;
                if n > 0 {
                    refused = false;
                    continue;
                }
                if self.sides[id].armed[which] || self.failure.is_some() {
                    break;
                }
                if refused {
                    self.fail(|| format!("side {id}: {cq:?} is empty and cannot be armed"));
                    return;
                }
                let Some(device) = &mut self.hosts[host].device else { return };
                let armed = device.arm_cq(cq, false).map_err(|e| format!("side {id}: arm: {e}"));
                match self.judge(armed) {
                    Some(true) => {
                        self.sides[id].armed[which] = true;
                        break;
                    }
                    Some(false) => refused = true,
                    None => return,
                }
            }
        }
        self.touched(host);
        self.go_on(id);
    }

    fn completed(&mut self, id: SideId, entry: &Completion) {
        let facts = [5, id as u64, entry.wr_id << 16 | (entry.status as u64) << 8];
        self.note(facts, || format!("side {id}: {entry:?}"));
        if self.failure.is_some() {
            return;
        }
        let verdict = oracle::completed(&mut self.sides, id, entry);
        let Some(verdict) = self.judge(verdict) else { return };
        self.stats.completions += 1;
        self.stats.received += u64::from(verdict.received);
        self.stats.bytes += verdict.bytes;
        self.stats.failed += u64::from(verdict.failed);
        if verdict.received && self.sides[id].stage <= Stage::Up {
            self.sides[id].receives_due += 1;
            let delay = self.plan.conns[self.sides[id].conn].recv_delay;
            self.schedule_within(delay, Event::Receive(id));
        }
    }

    /// After completions: there may be room for more, or nothing is left to come.
    fn go_on(&mut self, id: SideId) {
        let side = &self.sides[id];
        match side.stage {
            Stage::Connecting | Stage::Up if side.send_failed || side.recv_failed => self.end(id),
            Stage::Up => self.schedule_post(id, 0),
            Stage::Ending => self.try_bury(id),
            _ => {}
        }
    }

    pub(crate) fn schedule_post(&mut self, id: SideId, delay: u64) {
        let side = &mut self.sides[id];
        if side.left > 0 && !std::mem::replace(&mut side.posting, true) {
            self.schedule(delay, Event::Post(id));
        }
    }

    fn post(&mut self, id: SideId) {
        self.sides[id].posting = false;
        let Some(peer) = self.sides[id].peer else { return };
        if !self.runs(id) || self.sides[id].stage != Stage::Up {
            return;
        }
        let conn = self.sides[id].conn;
        let burst = 1 + self.rng.below(self.plan.conns[conn].burst);
        let mut requests: Vec<Owned> = Vec::new();
        for _ in 0..burst {
            if self.sides[id].left == 0 {
                break;
            }
            let (sides, plan, rng) = (&mut self.sides, &self.plan.conns[conn], &mut self.rng);
            let next = App { sides, id, peer, plan, rng }.next();
            if next.is_empty() {
                break;
            }
            requests.extend(next);
        }
        if requests.is_empty() {
            // Goes on after a completion; if none is to come, later.
            if !self.sides[id].requests.iter().any(|r| r.signalled) {
                self.schedule_post(id, 50 * US);
            }
            return;
        }
        for request in &requests {
            let facts = [6, id as u64, request.id];
            self.note(facts, || {
                let Owned { id: number, op, sges, inline, flags } = request;
                let inline = inline.len();
                format!("side {id} posts {number}: {op:?} {sges:x?} {inline} inline {flags:?}")
            });
        }
        self.stats.posted += requests.len() as u64;
        let wrs: Vec<_> = requests.iter().map(Owned::wr).collect();
        let (host, qpn, now) = (self.sides[id].host, self.sides[id].qpn, self.instant());
        if let Some(device) = &mut self.hosts[host].device {
            let result = device.post_send(now, qpn, &wrs);
            drop(wrs);
            self.judge(result.map_err(|(n, e)| format!("side {id}: request {n} refused: {e}")));
        }
        self.touched(host);
        let gap = self.plan.conns[conn].gap;
        let delay = self.rng.below(gap + 1);
        self.schedule_post(id, delay);
    }

    pub(crate) fn post_receive(&mut self, id: SideId) {
        if !self.runs(id) || self.sides[id].stage > Stage::Up || self.sides[id].receives_due == 0 {
            return;
        }
        let side = &mut self.sides[id];
        let plan = &self.plan.conns[side.conn];
        side.receives_due -= 1;
        let Some((number, sges)) = app::receive(side, plan, &mut self.rng) else {
            self.fail(|| format!("side {id}: no memory for a receive"));
            return;
        };
        self.note([7, id as u64, number], || format!("side {id} posts receive {number} {sges:x?}"));
        let (host, qpn, now) = (self.sides[id].host, self.sides[id].qpn, self.instant());
        let Some(device) = &mut self.hosts[host].device else { return };
        let wr = bowline_verbs::RecvWr { id: number, sges: &sges };
        let result = device.post_recv(now, qpn, &[wr]);
        self.judge(result.map_err(|(_, e)| format!("side {id}: receive {number} refused: {e}")));
        self.touched(host);
    }

    fn revoke(&mut self, id: SideId) {
        if !self.runs(id) || self.sides[id].stage > Stage::Up || self.sides[id].revoked {
            return;
        }
        self.note([8, id as u64, 0], || format!("side {id} deregisters the shared region"));
        let (host, key) = (self.sides[id].host, self.sides[id].shared.lkey);
        if let Some(device) = &mut self.hosts[host].device {
            let result = device.dereg_mr(key).map_err(|e| format!("side {id}: deregister: {e}"));
            self.judge(result);
        }
        let result = oracle::revoked(&mut self.sides, id);
        self.judge(result);
        self.touched(host);
    }

    // Faults.

    fn next_fault(&mut self, kind: usize) {
        let wait = self.rng.wait(self.plan.faults[kind].1);
        self.schedule(wait, Event::Fault(kind));
    }

    fn fault(&mut self, kind: usize) {
        if self.phase != Phase::Active {
            return;
        }
        self.next_fault(kind);
        let host = self.rng.index(self.hosts.len());
        let length = self.rng.magnitude(US, self.plan.fault_max);
        match self.plan.faults[kind].0 {
            FaultKind::Crash => self.crash(host, length),
            FaultKind::Cut => {
                let other = self.rng.index(self.hosts.len());
                let both = self.rng.chance(500);
                self.note([9, host as u64, other as u64], || {
                    format!("FAULT no way from host {host} to {other}, both {both}")
                });
                self.net.block(host, other, true);
                self.schedule(length, Event::Mend(host, other));
                if both {
                    self.net.block(other, host, true);
                    self.schedule(length, Event::Mend(other, host));
                }
            }
        }
    }

    fn crash(&mut self, host: usize, length: u64) {
        if self.hosts[host].device.is_none() {
            return;
        }
        self.note([10, host as u64, 0], || format!("FAULT host {host} dies"));
        self.stats.crashes += 1;
        let boot = self.hosts[host].boot;
        self.count(host);
        self.ports[host] = None;
        self.letters_left[host] = self.plan.hosts[host].letters;
        self.hosts[host].stop();
        for id in 0..self.sides.len() {
            let side = &self.sides[id];
            if side.host == host && side.boot == boot && side.stage < Stage::Gone {
                self.sides[id].stage = Stage::Gone;
                self.sides[id].dead = true;
                oracle::trouble(&mut self.sides, id, Trouble::DIED);
            }
        }
        // Whoever is connecting to it may find it gone.
        for id in 0..self.sides.len() {
            let conn = &self.plan.conns[self.sides[id].conn];
            if conn.from == host || conn.to == host {
                self.sides[id].trouble.add(Trouble::DIED);
            }
        }
        self.schedule(length, Event::Boot(host));
    }

    /// Adds what a device has counted, at the end of its life.
    fn count(&mut self, host: usize) {
        let Some(device) = &self.hosts[host].device else { return };
        let counted = device.counters();
        self.stats.icrc_drops += counted.drop_icrc;
        self.stats.resent += counted.packets_resent;
        self.stats.repeated += counted.requests_duplicate;
        self.stats.rnr_naks += counted.rnr_naks_sent;
        self.stats.given_up += counted.retries_exceeded;
        self.stats.cm_resent += counted.cm_resent;
    }

    fn boot(&mut self, host: usize) {
        if self.hosts[host].device.is_none() {
            self.note([11, host as u64, 0], || format!("host {host} starts"));
            let result = self.hosts[host].start(self.now, &mut self.rng, host);
            self.judge(result);
            self.open_port(host);
            self.touched(host);
        }
    }

    // The end.

    fn calm(&mut self) {
        self.note([12, 0, 0], || "CALM".into());
        self.phase = Phase::Draining;
        self.phase_since = self.now;
        self.net.faulty = false;
        for from in 0..self.hosts.len() {
            self.boot(from);
            for to in 0..self.hosts.len() {
                self.net.block(from, to, false);
            }
        }
        self.schedule(MS, Event::Check);
    }

    fn check(&mut self) {
        if self.phase == Phase::Draining {
            for id in 0..self.sides.len() {
                if self.sides[id].stage == Stage::Up && self.idle(id) && self.peer_idle(id) {
                    self.end(id);
                }
            }
            let waiting = self.sides.iter().position(|s| s.stage < Stage::Gone);
            let limit = match self.plan.scenario {
                super::Scenario::Calm => CALM_MAX,
                _ => DRAIN_MAX,
            };
            match waiting {
                None if self.deciding > 0 => {}
                None => {
                    self.phase = Phase::Quiet;
                    self.phase_since = self.now;
                    self.close();
                    self.schedule(QUIET, Event::Check);
                    return;
                }
                Some(id) if self.now > self.phase_since + limit => {
                    let state = self.describe(id);
                    self.fail(|| format!("side {id} never ends: {state}"));
                }
                Some(_) => {}
            }
            let wait = ((self.now - self.phase_since) / 4).clamp(MS, SEC);
            self.schedule(wait, Event::Check);
        } else if self.phase == Phase::Quiet && self.deciding > 0 {
            self.schedule(QUIET, Event::Check);
        } else if self.phase == Phase::Quiet {
            self.last_look();
        }
    }

    /// Nothing that will be told about is under way, and nothing is to be asked for.
    fn idle(&self, id: SideId) -> bool {
        let side = &self.sides[id];
        side.left == 0 && !side.requests.iter().any(|r| r.signalled)
    }

    fn peer_idle(&self, id: SideId) -> bool {
        self.sides[id].peer.is_none_or(|peer| {
            self.sides[peer].stage > Stage::Up
                || self.idle(peer) && self.sides[peer].stage == Stage::Up
        })
    }

    /// All connections are over: listeners go.
    fn close(&mut self) {
        for host in 0..self.hosts.len() {
            self.close_port(host);
            let listener = self.hosts[host].listener.take();
            let (Some(id), Some(device)) = (listener, &mut self.hosts[host].device) else {
                continue;
            };
            let result = device.destroy_id(Instant::from_nanos(self.now), id);
            self.judge(result.map_err(|e| format!("host {host}: the listener stays: {e}")));
            self.touched(host);
        }
    }

    /// After the last late datagram: no timer, no byte left, and the memory is as it must be.
    fn last_look(&mut self) {
        self.done = true;
        for id in 0..self.sides.len() {
            let side = &mut self.sides[id];
            if !side.dead {
                let looked = side.memory.look_all().map_err(|e| format!("side {id}: {e}"));
                self.judge(looked);
            }
        }
        for host in 0..self.hosts.len() {
            self.count(host);
            let Some(device) = &self.hosts[host].device else { continue };
            let (due, left) = (device.poll_timeout(), device.in_use());
            if let Some(due) = due {
                let wait = due.as_nanos().saturating_sub(self.now) / MS;
                self.fail(|| format!("host {host} still has a timer, due in {wait} ms"));
            }
            if left != InUse::default() {
                self.fail(|| format!("host {host} still holds {left:?}"));
            }
        }
    }

    /// What a side waits for.
    fn describe(&self, id: SideId) -> String {
        let side = &self.sides[id];
        let first = side.requests.front();
        format!(
            "host {}, {:?}, {:?}, {:?}, {} to post, {} requests, first {first:?}, {} receives, \
             {} messages on their way",
            side.host,
            side.stage,
            side.told,
            side.trouble,
            side.left,
            side.requests.len(),
            side.receives.len(),
            side.outgoing.len(),
        )
    }

    /// All that can be said about the end of a run.
    pub(crate) fn dump(&self) -> String {
        let mut out = String::new();
        for id in 0..self.sides.len() {
            out += &format!("side {id}: {}\n", self.describe(id));
        }
        for (number, host) in self.hosts.iter().enumerate() {
            if let Some(device) = &host.device {
                out += &format!("host {number}: {:?}\n", device.counters());
            }
        }
        out
    }

    fn connection_event(&mut self, host: usize, event: CmEvent) {
        self.note([13, host as u64, 0], || format!("host {host}: {event:?}"));
        let boot = self.hosts[host].boot;
        if let CmEvent::ConnectRequest { id, request } = event {
            let most =
                self.side_of(&request).map_or(0, |s| self.plan.conns[self.sides[s].conn].decide);
            let request = Box::new(request);
            self.deciding += 1;
            self.schedule_within(most, Event::Decide { host, boot, id, request });
        } else {
            self.told(host, event);
        }
    }
}
