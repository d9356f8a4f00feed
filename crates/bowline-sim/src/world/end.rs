//! The end of a run: faults are over, everything comes to its end, and nothing is left.

use super::{Phase, World};
use crate::ctx::{AppEvent, Event};
use crate::host::Host;
use crate::plan::Scenario;
use crate::queue::{MS, SEC};

/// Virtual time within which everything must have come after the last fault: the longest timers of
/// TCP and of the protocol one after the other, and time for the data.
const DRAIN_MAX: u64 = 400 * SEC;
/// Longest way of a message when nothing is wrong, besides the time its bytes take.
const CALM_LATENCY_MAX: u64 = 20 * SEC;
/// Time in which late doubles show.
const QUIET: u64 = 3 * SEC;
/// Time in which a node must have nothing left after all sockets are closed: what was begun is
/// completed, through TCP's longest retransmission timeout or a lost connection.
const CLOSED_MAX: u64 = 90 * SEC;

impl World {
    /// The last fault is over: everything is healed at once.
    pub(super) fn calm(&mut self) {
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
            self.open(slot);
            self.read_on(slot);
        }
        self.ctx.schedule(50 * MS, Event::App(AppEvent::Check));
    }

    /// Everything must come to its end in bounded time.
    pub(super) fn check_overdue(&mut self) {
        if self.phase == Phase::Draining && self.ctx.now > self.phase_since + DRAIN_MAX {
            let missing = self.ctx.oracle.missing();
            let stuck = self.stuck();
            self.ctx.fail(|| format!("no end after the last fault: {missing:?}; {stuck}"));
        }
    }

    fn enter(&mut self, phase: Phase) {
        self.phase = phase;
        self.phase_since = self.ctx.now;
    }

    pub(super) fn check(&mut self) {
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
    pub(super) fn finished(&mut self) -> bool {
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
}
