//! Faults and their ends.

use super::{Deferred, Phase, World};
use crate::engine::queue::{MS, SEC};
use crate::rds::ctx::{AppEvent, Event, Heal, HostId};
use crate::rds::host::Host;
use crate::rds::net::{Cut, EndId};
use crate::rds::plan::{FaultKind, Scenario};

/// Time in nanoseconds between the shutdown of a node and its end.
const ENDING: u64 = 2_200 * MS;
/// Longest time between a peer's farewell and the news that it has not come back: a second, a delay
/// of R-331, and the attempt.
const HEARD_MAX: u64 = 2_800 * MS;
/// Longest time that a host may be away on purpose whose node has ended in order.
const AWAY_MAX: u64 = 3_000 * MS;
/// How many times in a thousand a node ends after its user has received, in [`Scenario::Ends`].
const RECEIVED_LAST: u64 = 20;
/// What a node does that ends in an orderly way.
#[derive(Clone, Copy, Debug)]
pub(super) enum Ending {
    Stops,
    HandsOver,
}

/// Longest time in nanoseconds between a node's wish to hand over and its end, and between that and
/// the beginning of its successor.
const HAND_OVER: u64 = 600 * MS;
/// For how long the connections of a crowd break.
const CROWD: u64 = 200 * MS;

impl World {
    fn fault_length(&mut self) -> u64 {
        self.ctx.rng.magnitude(MS, self.plan.fault_max)
    }

    fn random_host(&mut self) -> HostId {
        self.ctx.rng.index(self.hosts.len())
    }

    pub(super) fn fault(&mut self, kind: usize) {
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

    fn strike(&mut self, what: FaultKind) {
        use FaultKind as F;
        match what {
            F::Cut => self.cut_connection(what),
            F::Crash | F::Reboot => {
                let host = self.random_host();
                if self.stop_host(host, what == F::Reboot) {
                    self.count_fault(what, host);
                }
            }
            F::Partition | F::OneWay => self.partition(what),
            F::Stall => self.stall(what),
            F::StopReader => self.stop_reader(what),
            F::Reopen => self.reopen_later(what),
            F::Cancel => self.cancel(),
            F::AddressLoss => self.lose_address(what, None),
            F::AddressMove => {
                let taker = self.random_host();
                self.lose_address(what, Some(taker));
            }
            F::DropLinks => self.drop_links(what),
            F::Shutdown => {
                let host = self.random_host();
                self.shut_down(host, what, Ending::Stops, ENDING);
            }
            F::HandOver => {
                let time = self.ctx.rng.below(HAND_OVER);
                let host = self.random_host();
                self.shut_down(host, what, Ending::HandsOver, time);
            }
            F::Crowd => self.crowd(what),
            F::Delay => {
                self.ctx.net.delay_factor = self.ctx.rng.magnitude(2, 200);
                for host in 0..self.hosts.len() {
                    self.count_fault(what, host);
                }
                let length = self.fault_length().min(SEC);
                self.ctx.schedule(length, Event::Heal(Heal::Delay));
            }
        }
    }

    /// Cuts a connection at a random place, sometimes one that is being made.
    fn cut_connection(&mut self, what: FaultKind) {
        let begun = self.ctx.net.connecting();
        if !begun.is_empty() && self.ctx.rng.chance(250) {
            let conn = self.ctx.rng.pick(&begun);
            self.ctx.coverage.hit("cut", "while connecting");
            self.ctx.tcp_cut(conn, Cut::Blackhole);
            return;
        }
        let live = self.ctx.rdma.live();
        if !live.is_empty() && (self.ctx.net.live().is_empty() || self.ctx.rng.chance(500)) {
            let qp = self.ctx.rng.pick(&live);
            let host = self.ctx.rdma.host(qp);
            self.ctx.rdma_cut(qp);
            self.count_fault(what, host);
            return;
        }
        let live = self.ctx.net.live();
        if !live.is_empty() {
            let conn = self.ctx.rng.pick(&live);
            let cut = self.ctx.draw_cut();
            self.ctx.tcp_cut(conn, cut);
            for side in [0, 1] {
                let host = self.ctx.net.host(EndId { conn, side });
                self.count_fault(what, host);
            }
        }
    }

    /// Parts two hosts, in both directions or in one.
    fn partition(&mut self, what: FaultKind) {
        let (a, b) = (self.random_host(), self.random_host());
        if a != b {
            self.note_fault(format_args!("{what:?} {a} -> {b}"));
            self.count_fault(what, a);
            self.block(a, b);
            if what == FaultKind::Partition {
                self.block(b, a);
            }
            self.ctx.tcp_route_changed(a, b);
        }
    }

    /// Stops a host for a while.
    fn stall(&mut self, what: FaultKind) {
        let host = self.random_host();
        if !self.stalled[host] && self.alive(host) {
            self.note_fault(format_args!("stall of {host}"));
            self.count_fault(what, host);
            self.stalled[host] = true;
            let length = self.fault_length();
            self.ctx.schedule(length, Event::Heal(Heal::Resume(host)));
        }
    }

    /// Stops a host for a while; its peers' connections break again and again meanwhile.
    fn crowd(&mut self, what: FaultKind) {
        let host = self.random_host();
        if !self.stalled[host] && self.alive(host) {
            self.note_fault(format_args!("a crowd at {host}"));
            self.count_fault(what, host);
            self.stalled[host] = true;
            self.break_accepted(host, self.ctx.now + CROWD);
            let length = CROWD + self.fault_length();
            self.ctx.schedule(length, Event::Heal(Heal::Resume(host)));
        }
    }

    /// Breaks the connections that peers have made to a host, now and until a time.
    fn break_accepted(&mut self, host: HostId, until: u64) {
        if self.phase != Phase::Active {
            return;
        }
        for conn in self.ctx.net.live() {
            if self.ctx.net.host(EndId { conn, side: 1 }) == host && self.ctx.rng.chance(800) {
                let cut = self.ctx.rng.pick(&[Cut::Reset, Cut::ResetOne(0), Cut::Fin]);
                self.ctx.tcp_cut(conn, cut);
            }
        }
        let wait = self.ctx.rng.magnitude(MS, CROWD / 4);
        if self.ctx.now + wait < until {
            self.ctx.schedule(wait, Event::Heal(Heal::Crowd { host, until }));
        }
    }

    /// Makes the reader of a socket stop for a while.
    fn stop_reader(&mut self, what: FaultKind) {
        let slot = self.ctx.rng.index(self.readers.len());
        if !self.readers[slot].stopped {
            self.note_fault(format_args!("reader of {slot} stops"));
            self.count_fault(what, self.host_of(slot));
            self.readers[slot].stopped = true;
            let length = self.fault_length();
            self.ctx.schedule(length, Event::App(AppEvent::ResumeReader(slot)));
        }
    }

    /// Closes a socket, to open it again later.
    fn reopen_later(&mut self, what: FaultKind) {
        let slot = self.ctx.rng.index(self.readers.len());
        if self.open[slot] && !self.stalled[self.host_of(slot)] {
            self.ctx.stats.reopened += 1;
            self.count_fault(what, self.host_of(slot));
            self.close(slot);
            let length = self.fault_length() / 8;
            self.ctx.schedule(length, Event::App(AppEvent::Reopen(slot)));
        }
    }

    /// Makes a host drop its connections, all of them or those to one peer.
    fn drop_links(&mut self, what: FaultKind) {
        let host = self.random_host();
        if self.stalled[host] || !self.alive(host) {
            return;
        }
        let peer = self.random_host();
        let peer = self.ctx.rng.chance(500).then(|| self.plan.nodes[peer].addrs[0]);
        match &mut self.hosts[host] {
            Host::Bowline(node) => node.drop_links(&mut self.ctx, peer),
            Host::Kernel(kernel) => kernel.drop_paths(&mut self.ctx),
        }
        self.count_fault(what, host);
    }

    /// Ends a node in order right after one of its users has received something, now and then.
    pub(super) fn end_after_receiving(&mut self, host: HostId) {
        let may = self.plan.scenario == Scenario::Ends && self.phase == Phase::Active;
        if may && self.ctx.rng.chance(RECEIVED_LAST) {
            self.ctx.stats.faults += 1;
            self.shut_down(host, FaultKind::Shutdown, Ending::Stops, ENDING);
        }
    }

    /// Ends a host in an orderly way.
    fn shut_down(&mut self, host: HostId, what: FaultKind, how: Ending, time: u64) {
        if !self.stalled[host]
            && self.alive(host)
            && self.has_all_addresses(host)
            && self.ending[host].is_none()
            && let Host::Bowline(node) = &mut self.hosts[host]
        {
            self.ending[host] = Some(how);
            self.changed_at[host] = self.ctx.now;
            node.shut_down(&mut self.ctx, matches!(how, Ending::HandsOver));
            self.note_fault(format_args!("host {host} shuts down"));
            self.count_fault(what, host);
            self.ctx.schedule(time, Event::Heal(Heal::Ended(host)));
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
            self.ctx.ops.cancelled(plan.slot, plan.target);
            let owed = self.ctx.oracle.cancelled(plan.slot, plan.target);
            self.ctx.coverage.add("excused", "cancelled", owed);
            self.count_fault(FaultKind::Cancel, host);
            self.hosts[host].cancel(&mut self.ctx, plan.slot, target);
        }
    }

    /// Stops a process (or, if silently, a whole machine), which comes back after a while. Tells
    /// whether it was running.
    pub(super) fn stop_host(&mut self, host: HostId, silent: bool) -> bool {
        let away = self.fault_length();
        self.stop_host_for(host, silent, away)
    }

    fn stop_host_for(&mut self, host: HostId, silent: bool, away: u64) -> bool {
        if !self.alive(host) || !self.has_all_addresses(host) {
            return false;
        }
        self.note_fault(format_args!("host {host} stops{}", if silent { " silently" } else { "" }));
        self.ctx.stats.crashes += 1;
        for slot in 0..self.open.len() {
            if self.host_of(slot) == host && self.open[slot] {
                self.open[slot] = false;
                self.excuse_socket(slot);
                self.wake_senders_of(slot);
            }
        }
        let slots: Vec<usize> = (0..self.open.len()).filter(|s| self.host_of(*s) == host).collect();
        self.ctx.oracle.process_gone(&slots);
        for slot in &slots {
            self.ctx.ops.closed(&mut self.ctx.base.rng, *slot, true);
        }
        self.stalled[host] = false;
        self.ending[host] = None;
        self.deferred[host].clear();
        self.ctx.rdma_host_down(host, silent);
        self.ctx.tcp_host_down(host, silent);
        self.report_counters(host);
        self.ctx.schedule(away, Event::Heal(Heal::Boot(host)));
        true
    }

    /// Excuses all messages to and from a socket.
    pub(super) fn excuse_socket(&mut self, slot: usize) {
        let owed = self.ctx.oracle.closed(slot);
        self.ctx.coverage.add("excused", "socket or process gone", owed);
    }

    /// A host loses an address; a bowline node may take it meanwhile.
    fn lose_address(&mut self, what: FaultKind, taker: Option<HostId>) {
        let host = self.random_host();
        let index = self.ctx.rng.index(self.plan.nodes[host].addrs.len());
        let ip = self.plan.nodes[host].addrs[index];
        let local_senders = self
            .plan
            .senders
            .iter()
            .any(|s| self.host_of(s.slot) == host && self.host_of(s.target) == host);
        let stays = self.alive(host) && self.has_all_addresses(host);
        if !stays || self.ending[host].is_some() || local_senders {
            return;
        }
        self.note_fault(format_args!("{ip} leaves host {host} for {taker:?}"));
        self.count_fault(what, host);
        for slot in 0..self.open.len() {
            if self.plan.slots[slot].addr == ip {
                self.excuse_socket(slot);
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
            if let Some(plan) = self.ctx.rdma.node(taker).filter(|_| self.plan.serves_rdma(ip)) {
                let addrs: Vec<_> = node.rdma_addrs.iter().copied().chain([ip]).collect();
                node.serve_rdma(plan, &addrs);
                self.ctx.rdma.address_moved(ip, true);
            }
            self.ctx.net.hosts[taker].addrs.push(ip);
            let slots: Vec<usize> =
                (0..self.open.len()).filter(|s| self.plan.slots[*s].addr == ip).collect();
            self.ctx.oracle.address_moved(&slots);
        }
        let length = self.fault_length();
        self.ctx.schedule(length, Event::Heal(Heal::Address { host, index }));
    }

    pub(super) fn heal(&mut self, heal: Heal) {
        self.ctx.note([61, 0, 0], || format!("HEAL {heal:?}"));
        match heal {
            Heal::Route { from, to } => self.ctx.net.block(from, to, false),
            Heal::Boot(host) => self.boot(host),
            Heal::Ended(host) => self.ended(host),
            Heal::TakenOver(host) => self.resume(host),
            Heal::Resume(host) => self.resume(host),
            Heal::Address { host, index } => self.return_address(host, index),
            Heal::Delay => self.ctx.net.delay_factor = 1,
            Heal::Crowd { host, until } => self.break_accepted(host, until),
        }
    }

    pub(super) fn ended(&mut self, host: HostId) {
        match self.ending[host].take() {
            None => {}
            Some(Ending::Stops) => {
                self.judge_end(host);
                let begun = self.changed_at[host];
                // Often for long enough that those who wait for it must have heard of it.
                let is_long = self.ctx.rng.chance(500);
                let away = if is_long { self.ctx.rng.below(AWAY_MAX) } else { self.fault_length() };
                if self.stop_host_for(host, false, away) {
                    self.ended_since[host] = Some(begun);
                }
            }
            Some(Ending::HandsOver) => self.hand_over(host),
        }
    }

    /// Checks that a node which ends in order has acknowledged what its users have received, to
    /// senders whose nodes ran all the while. Where TCP's acknowledgements count, a driver may end
    /// a connection without having asked for the last ones.
    fn judge_end(&mut self, host: HostId) {
        let begun = self.changed_at[host];
        if self.ctx.now < begun + ENDING {
            return; // the run cut the end short
        }
        if !self.plan.is_gentle() {
            return self.ctx.coverage.hit("orderly end", "a fault came between");
        }
        let slots = 0..self.open.len();
        let pairs: Vec<_> = slots
            .clone()
            .filter(|to| self.host_of(*to) == host && self.open[*to])
            .flat_map(|to| slots.clone().map(move |from| (from, to)))
            .filter(|(from, _)| self.open[*from] && self.host_of(*from) != host)
            .collect();
        for (from, to) in pairs {
            let peer = self.host_of(from);
            let same = self.changed_at[peer] < begun && self.ending[peer].is_none();
            let Host::Bowline(_) = &self.hosts[peer] else { continue };
            let over_rdma = self.plan.over_rdma(from);
            let end_to_end = [host, peer].iter().all(|host| self.ctx.net.hosts[*host].end_to_end);
            if !same || self.stalled[peer] || !(over_rdma || end_to_end) {
                continue;
            }
            let unacknowledged = self.unacknowledged(from, to);
            let before = self.left_unacknowledged.get(&(from, to)).copied().unwrap_or_default();
            if unacknowledged > before {
                let what = unacknowledged - before;
                self.ctx.fail(|| {
                    format!("{what} messages of {from} were received and not acknowledged by {to}")
                });
            }
            let how = if over_rdma { "judged over RDMA" } else { "judged" };
            self.ctx.coverage.hit("orderly end", how);
        }
    }

    /// Returns how many messages of a socket its peer's processes have received and not
    /// acknowledged.
    fn unacknowledged(&self, from: usize, to: usize) -> usize {
        let Host::Bowline(sender) = &self.hosts[self.host_of(from)] else { return 0 };
        let kept = sender.unacknowledged(self.addr(from), self.addr(to));
        kept.saturating_sub(self.ctx.oracle.not_received(from, to))
    }

    /// A process begins: what those before it have left comes again, or not in its time.
    fn begins(&mut self, host: HostId) {
        self.changed_at[host] = self.ctx.now;
        for to in 0..self.open.len() {
            for from in 0..self.open.len() {
                if self.host_of(to) != host {
                    continue;
                }
                let left = self.unacknowledged(from, to);
                self.left_unacknowledged.insert((from, to), left);
            }
        }
    }

    /// Another process takes over what a node has; until it begins, connections wait and nobody
    /// answers.
    fn hand_over(&mut self, host: HostId) {
        let slots: Vec<usize> = (0..self.open.len()).filter(|s| self.host_of(*s) == host).collect();
        if let Host::Bowline(node) = &mut self.hosts[host] {
            node.hand_over(&mut self.ctx);
            // Memory, and the operations that use it, end with the process.
            for slot in slots {
                for message in self.ctx.ops.handed_over(&mut self.ctx.base.rng, slot) {
                    self.ctx.oracle.excuse_one(message);
                }
            }
            self.stalled[host] = true;
            let gap = self.ctx.rng.below(HAND_OVER);
            self.ctx.schedule(gap, Event::Heal(Heal::TakenOver(host)));
        }
    }

    /// Checks that users who wait for a peer that has ended in order, and has not come back, hear
    /// of it [R-2053].
    fn judge_wait(&mut self, host: HostId) {
        let Some(begun) = self.ended_since[host].take() else { return };
        if !self.plan.is_gentle() {
            return;
        }
        let addrs = &self.plan.nodes[host].addrs;
        for slot in (0..self.open.len()).filter(|slot| self.open[*slot]) {
            let peer = self.host_of(slot);
            let same = self.changed_at[peer] < begun && self.ending[peer].is_none();
            let Host::Bowline(sender) = &self.hosts[peer] else { continue };
            if peer == host || !same || self.stalled[peer] {
                continue;
            }
            let known = self.ctx.now.saturating_sub(HEARD_MAX);
            match sender.waits_for_ended((slot, self.addr(slot)), addrs, (begun, known)) {
                Some(true) => {
                    self.ctx.fail(|| format!("socket {slot} waits for a peer that has ended"));
                }
                Some(false) => self.ctx.coverage.hit("orderly end", "those who wait hear of it"),
                None => {}
            }
        }
    }

    pub(super) fn boot(&mut self, host: HostId) {
        if self.alive(host) {
            return;
        }
        self.judge_wait(host);
        self.begins(host);
        self.ctx.net.hosts[host].up = true;
        self.ctx.net.hosts[host].listening = true;
        self.hosts[host] = self.make_host(host);
        for slot in 0..self.open.len() {
            if self.host_of(slot) == host {
                self.open(slot);
            }
        }
    }

    pub(super) fn resume(&mut self, host: HostId) {
        if !std::mem::take(&mut self.stalled[host]) {
            return;
        }
        self.begins(host);
        for what in std::mem::take(&mut self.deferred[host]) {
            match what {
                Deferred::Notice(end, notice) => self.notice(host, end, notice),
                Deferred::Rdma(qp, notice) => self.rdma_notice(host, qp, notice),
                Deferred::Event(what) => self.hosts[host].event(&mut self.ctx, what),
            }
        }
    }

    pub(super) fn return_address(&mut self, host: HostId, index: usize) {
        let ip = self.plan.nodes[host].addrs[index];
        match self.ctx.net.owner(ip) {
            Some(owner) if owner == host => return,
            Some(taker) => {
                self.ctx.tcp_address_lost(taker, ip);
                if let Host::Bowline(node) = &mut self.hosts[taker] {
                    node.node.remove_local(ip);
                    if let Some(plan) = self.ctx.rdma.node(taker) {
                        let mut addrs = node.rdma_addrs.clone();
                        addrs.retain(|addr| *addr != ip);
                        node.serve_rdma(plan, &addrs);
                    }
                }
            }
            None => {}
        }
        self.ctx.rdma.address_moved(ip, false);
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
}
