//! The end of a run: faults are over, all messages arrive, and nothing is left.

use super::{Phase, World};
use crate::engine::queue::{MS, SEC};
use crate::rds::ctx::{AppEvent, Event};
use crate::rds::host::Host;
use crate::rds::plan::{FaultKind, NodeKind, Scenario, SenderPlan};

/// Virtual time in which all messages must have arrived after the last fault, in addition to the
/// time their bytes take. Keepalive and user timeout end dead connections within 30 s, the kind of
/// a silent peer is known after 34 s, a path whose connections are rejected is opened anew after 32
/// s, and these may follow one another.
const DRAIN_MAX: u64 = 120 * SEC;
/// Longest time of a message without faults, in addition to the time its bytes take.
const CALM_LATENCY_MAX: u64 = 20 * SEC;
/// Time in which late duplicates show, and TCP finds every dead connection: keepalive asks after 5
/// s of silence, five times every 5 s.
const QUIET: u64 = 36 * SEC;
/// Additional time in which a kernel that has paired paths anew, and has no place for one of them,
/// gets all of them anew: its peer waits once more for as long as keepalive takes, [R-421].
const QUIET_KERNEL: u64 = 36 * SEC;
/// Round trips in which a message arrives between healthy hosts: a connection is made, both sides
/// greet, the message goes out and is acknowledged, each once more where a knock or a broken
/// connection precedes it.
const FRESH_TRIPS: u64 = 8;
/// Additional time for that: a delay of R-331, and senders that wait for a map or a path count.
const FRESH_TIME: u64 = 1500 * MS;
/// Additional time for that with a kernel, whose users have to try again.
const FRESH_KERNEL: u64 = 4 * SEC;
/// Additional time for that with a kernel at an address where a bowline node was before, if the
/// kernel sends nothing but maps [R-2003].
const FRESH_STRANGER: u64 = 36 * SEC;
/// Additional time for that over RDMA, beside the time in which a NIC gives up: a delay of R-331.
const FRESH_RDMA: u64 = 2 * SEC;
/// Additional time for that if there are credits: a node without any sends nothing by which its NIC
/// could notice a dead peer, and looks every 10 s whether the peer was silent for 30 s.
const FRESH_CREDITS: u64 = 40 * SEC;
/// Length of such a message in bytes.
const FRESH_LEN: usize = 64;
/// Time in which a node must have nothing left after all sockets are closed: started messages are
/// completed, through TCP's longest retransmission timeout or a lost connection.
const CLOSED_MAX: u64 = 90 * SEC;

impl World {
    /// Ends all faults at once, because the faulty part of the run is over.
    pub(super) fn calm(&mut self) {
        self.ctx.note([62, 0, 0], || "CALM".into());
        self.enter(Phase::Draining);
        self.ctx.net.faulty = false;
        self.ctx.net.delay_factor = 1;
        self.ctx.rdma_calm();
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
            self.open(slot);
            self.resume_reader(slot);
        }
        self.ctx.schedule(50 * MS, Event::App(AppEvent::Check));
    }

    /// Checks that all work ends in bounded time.
    pub(super) fn check_overdue(&mut self) {
        let overdue = self.phase == Phase::Draining
            && self.ctx.now > self.phase_since + DRAIN_MAX
            && self.ctx.now > self.phase_since + DRAIN_MAX + self.transfer_time();
        if overdue {
            let missing = self.missing();
            let stuck = self.stuck();
            self.ctx.fail(|| format!("no end after the last fault: {missing:?}; {stuck}"));
        }
    }

    /// Describes what has not come: a message, or the end of an operation.
    fn missing(&self) -> Option<String> {
        self.ctx.oracle.missing().or_else(|| self.ctx.ops.missing())
    }

    fn enter(&mut self, phase: Phase) {
        self.phase = phase;
        self.phase_since = self.ctx.now;
    }

    pub(super) fn check(&mut self) {
        match self.phase {
            Phase::Active => {}
            Phase::Draining => {
                let done = (0..self.senders.len()).all(|s| self.has_sent(s))
                    && self.missing().is_none()
                    && (0..self.open.len()).all(|s| self.send_bytes(s) == 0);
                if done {
                    self.report_recovery();
                    self.enter(Phase::Quiet);
                } else if self.plan.scenario == Scenario::Calm
                    && self.ctx.now > self.phase_since + CALM_LATENCY_MAX + self.transfer_time()
                {
                    let missing = self.missing();
                    let stuck = self.stuck();
                    self.ctx.fail(|| format!("starved without any fault: {missing:?}; {stuck}"));
                }
            }
            Phase::Quiet => {
                if self.ctx.now > self.phase_since + self.quiet_time() {
                    self.enter(Phase::Fresh);
                    self.send_fresh();
                }
            }
            Phase::Fresh => {
                let missing = self.missing();
                let all_sent = (0..self.senders.len()).all(|s| self.has_sent(s));
                if !all_sent || missing.is_some() {
                    if self.ctx.now > self.phase_since + self.fresh_limit() {
                        let stuck = self.stuck();
                        self.ctx.fail(|| {
                            format!("no traffic though all is well: {missing:?}; {stuck}")
                        });
                    }
                } else {
                    for slot in 0..self.open.len() {
                        self.close(slot);
                    }
                    self.enter(Phase::Closed);
                }
            }
            Phase::Closed => {}
        }
        let most = if self.phase == Phase::Fresh { 20 * MS } else { 500 * MS };
        let wait = (self.ctx.now - self.phase_since).clamp(20 * MS, most);
        self.ctx.schedule(wait, Event::App(AppEvent::Check));
    }

    /// Returns a generous estimate of the time that all data of the run take through the narrowest
    /// window, including the time of their senders.
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
        // A pause is at most eight times its mean, and many pauses are seldom above twice their
        // mean.
        let pause = |s: &SenderPlan| s.gap * (8 + 2 * u64::from(s.messages));
        let pauses = self.plan.senders.iter().map(pause).max();
        (bytes / window + 1) * 2 * self.plan.net.delay.1 + gaps * turns + pauses.unwrap_or(0)
    }

    /// Tells whether a sender has sent everything, or its kernel cannot continue.
    fn has_sent(&self, sender: usize) -> bool {
        self.senders[sender].left == 0 || self.is_stranded(sender)
    }

    fn is_stranded(&self, sender: usize) -> bool {
        let slot = self.plan.senders[sender].slot;
        match &self.hosts[self.host_of(slot)] {
            Host::Kernel(kernel) => {
                let target = self.addr(self.plan.senders[sender].target);
                kernel.is_stranded(slot) || kernel.waits_for_the_dead(&self.ctx, slot, target)
            }
            Host::Bowline(_) => false,
        }
    }

    /// Makes each earlier sender send one more message.
    fn send_fresh(&mut self) {
        for sender in 0..self.senders.len() {
            if !self.is_stranded(sender) && !self.plan.senders[sender].pings {
                self.senders[sender].add_message(FRESH_LEN);
                // Whatever time the sender had planned before.
                self.ctx.schedule(0, Event::App(AppEvent::Send(sender)));
            }
        }
    }

    fn with_kernels(&self) -> bool {
        self.plan.nodes.iter().any(|n| matches!(n.kind, NodeKind::Kernel(_)))
    }

    fn quiet_time(&self) -> u64 {
        QUIET + if self.with_kernels() { QUIET_KERNEL } else { 0 }
    }

    /// Returns the time within which that message must have arrived.
    fn fresh_limit(&self) -> u64 {
        let gaps: u64 = self.plan.slots.iter().map(|s| s.read_gap).sum();
        let moves = self.plan.faults.iter().any(|(kind, _)| *kind == FaultKind::AddressMove);
        let kernel = FRESH_KERNEL + if moves { FRESH_STRANGER } else { 0 };
        let lag: u64 = self.plan.nodes.iter().map(|n| n.kind.lag()).max().unwrap_or(0);
        let trip = 2 * (self.plan.net.delay.1 + lag);
        // Nobody looks after idle queue pairs, so only now is it found which of them are dead.
        let rdma = self.plan.rdma.as_ref().map_or(0, |rdma| {
            let flush = rdma.nodes.iter().map(|n| n.flush + n.hold).max().unwrap_or(0);
            let limited = rdma.nodes.iter().any(|n| n.flow_control);
            let credits = if limited { FRESH_CREDITS } else { 0 };
            FRESH_RDMA + credits + u64::from(rdma.retries + 2) * rdma.timeout + 4 * flush
        });
        let kernel = if self.with_kernels() { kernel } else { 0 };
        FRESH_TRIPS * trip + FRESH_TIME + gaps + kernel + rdma
    }

    /// Reports how long it took until all messages had arrived after the last fault, in addition to
    /// the time for the data.
    fn report_recovery(&mut self) {
        let took = (self.ctx.now - self.phase_since).saturating_sub(self.transfer_time());
        let name = match took / SEC {
            0 => "1 s",
            1..5 => "5 s",
            5..15 => "15 s",
            15..40 => "40 s",
            40..80 => "80 s",
            80..120 => "120 s",
            _ => "more than 120 s",
        };
        self.ctx.coverage.hit("recovered within", name);
    }

    fn send_bytes(&self, slot: usize) -> usize {
        match &self.hosts[self.host_of(slot)] {
            // The memory of a kernel peer is not checked.
            Host::Kernel(_) => 0,
            host => host.send_bytes(slot),
        }
    }

    /// After all sockets are closed: tells whether nothing is left, which must be so soon.
    pub(super) fn finished(&mut self) -> bool {
        if self.ctx.now < self.next_closed_check {
            return false;
        }
        self.next_closed_check = self.ctx.now + 500 * MS;
        if let Some((what, n)) = self.ctx.ops.left() {
            if self.ctx.now < self.phase_since + CLOSED_MAX {
                return false;
            }
            self.ctx.fail(|| format!("{n} {what} not released after closing all"));
        }
        if let Err(what) = self.ctx.ops.check_counters() {
            self.ctx.fail(|| what);
        }
        for host in 0..self.hosts.len() {
            let Host::Bowline(node) = &self.hosts[host] else { continue };
            let info = node.node.info();
            // Messages that this host would send from an address that now belongs to another host
            // stay with it; so do the node's own messages (ports 0 and 1) to peers to which no user
            // sends any more.
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

    /// Describes who waits for what, for a report.
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
}
