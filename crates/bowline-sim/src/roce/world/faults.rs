//! Faults: devices that die and start again, and lines that are cut.

use super::{Event, Phase, World};
use crate::engine::queue::{MS, US};
use crate::roce::oracle;
use crate::roce::plan::FaultKind;
use crate::roce::reach::{self, FaultRow};
use crate::roce::side::{FailureCauses, Side, Stage};

/// Longest time in nanoseconds that a line holds datagrams: within the lifetime of a packet
/// [CM-33].
const HOLD_MAX: u64 = 250 * MS;

impl World {
    pub(super) fn next_fault(&mut self, kind: usize) {
        let wait = self.base.rng.wait(self.plan.faults[kind].1);
        self.schedule(wait, Event::Fault(kind));
    }

    pub(super) fn fault(&mut self, kind: usize) {
        if self.phase != Phase::Active {
            return;
        }
        self.next_fault(kind);
        let host = self.base.rng.index(self.hosts.len());
        let length = self.base.rng.magnitude(self.plan.fault_min.max(US), self.plan.fault_max);
        match self.plan.faults[kind].0 {
            FaultKind::Crash => self.crash(host, length, FaultRow::Dies),
            FaultKind::Hold => {
                let other = self.base.rng.index(self.hosts.len());
                let both = self.rng.chance(500);
                self.note([15, host as u64, other as u64], || {
                    format!("FAULT held from host {host} to {other}, both {both}")
                });
                self.line_strikes(
                    host,
                    other,
                    if both { FaultRow::HeldBoth } else { FaultRow::Held },
                );
                let until = self.now + length.min(HOLD_MAX);
                self.net.hold(host, other, until);
                if both {
                    self.net.hold(other, host, until);
                }
            }
            FaultKind::Cut => {
                let other = self.base.rng.index(self.hosts.len());
                let both = self.rng.chance(500);
                self.note([9, host as u64, other as u64], || {
                    format!("FAULT no way from host {host} to {other}, both {both}")
                });
                let fault = if both { FaultRow::BothWays } else { FaultRow::OneWay };
                self.line_strikes(host, other, fault);
                self.net.block(host, other, true);
                self.schedule(length, Event::RepairLine(host, other));
                if both {
                    self.net.block(other, host, true);
                    self.schedule(length, Event::RepairLine(other, host));
                }
            }
        }
    }

    fn line_strikes(&mut self, host: usize, other: usize, fault: FaultRow) {
        let ends = |side: &&Side| {
            let conn = &self.plan.conns[side.conn];
            [(conn.from, conn.to), (conn.to, conn.from)].contains(&(host, other))
        };
        reach::count_fault(&mut self.base.coverage, fault, self.sides.iter().filter(ends));
    }

    pub(super) fn crash(&mut self, host: usize, length: u64, fault: FaultRow) {
        if self.hosts[host].device.is_none() {
            return;
        }
        self.note([10, host as u64, 0], || format!("FAULT host {host} dies"));
        self.stats.crashes += 1;
        let boot = self.hosts[host].boot;
        let mine = self.sides.iter().filter(|s| s.host == host && s.boot == boot);
        reach::count_fault(&mut self.base.coverage, fault, mine);
        self.count(host);
        self.ports[host] = None;
        self.ud_sends_left[host] = self.plan.hosts[host].datagrams;
        self.hosts[host].stop();
        for id in 0..self.sides.len() {
            let side = &self.sides[id];
            if side.host == host && side.boot == boot && side.stage < Stage::Gone {
                self.sides[id].stage = Stage::Gone;
                self.sides[id].dead = true;
                oracle::note_cause(&mut self.sides, id, FailureCauses::DIED);
            }
        }
        // Programs that connect to the device may find that it is gone.
        for id in 0..self.sides.len() {
            let conn = &self.plan.conns[self.sides[id].conn];
            if conn.from == host || conn.to == host {
                self.sides[id].failure_causes.add(FailureCauses::DIED);
            }
        }
        self.schedule(length, Event::Boot(host));
    }

    /// Adds the counters of a device, at the end of its generation.
    pub(super) fn count(&mut self, host: usize) {
        let Some(device) = &self.hosts[host].device else { return };
        let counted = device.counters();
        reach::count_device(&mut self.base.coverage, counted);
        self.base.stats.icrc_drops += counted.drop_icrc;
        self.base.stats.landed += counted.rx_landed;
        self.base.stats.resent += counted.packets_resent;
        self.base.stats.repeated += counted.requests_duplicate;
        self.base.stats.rnr_naks += counted.rnr_naks_sent;
        self.base.stats.given_up += counted.retries_exceeded;
        self.base.stats.cm_resent += counted.cm_resent;
    }

    pub(super) fn boot(&mut self, host: usize) {
        if self.hosts[host].device.is_none() {
            self.note([11, host as u64, 0], || format!("host {host} starts"));
            let result = self.hosts[host].start(self.base.now, &mut self.base.rng, host);
            self.judge(result);
            self.open_port(host);
            self.schedule_turn(host);
        }
    }
}
