//! The end of a run: faults are over, connections end, and nothing is left.

use bowline_roce::{InUse, Instant};

use super::{Event, Phase, World};
use crate::engine::queue::{MS, SEC};
use crate::roce::side::{SideId, Stage};

/// Time in nanoseconds for all requests of programs, without any fault.
const WORK: u64 = 20 * SEC;
/// Time in nanoseconds for all repetitions of a message of a connection manager [CM-40], [CM-42],
/// and a little more.
const EXCHANGE: u64 = 80 * SEC;
/// Time in nanoseconds that a connection manager waits for a slow program [CM-43].
const SERVICE: u64 = 70 * SEC;
/// A program that takes this many nanoseconds or more is slow.
const SLOW: u64 = SEC;
/// Time in nanoseconds in which late datagrams and timers show. A removed queue pair leaves its
/// timer behind until it is due, at the latest when it would have given up its peer [REQ-12].
const QUIET: u64 = 8 * SEC;

impl World {
    pub(super) fn calm(&mut self) {
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

    pub(super) fn check(&mut self) {
        if self.phase == Phase::Draining {
            for id in 0..self.sides.len() {
                let idle = self.sides[id].stage == Stage::Up && self.idle(id) && self.peer_idle(id);
                if idle && !self.stays_for_fresh(id) {
                    self.end(id);
                }
            }
            self.try_fresh();
            if self.phase == Phase::Fresh {
                return;
            }
            let waiting = self.sides.iter().position(|s| s.stage < Stage::Gone);
            let limit = self.end_bound();
            match waiting {
                None if self.deciding > 0 || !self.is_fresh_over() => {}
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
        } else if self.phase == Phase::Fresh {
            self.check_fresh();
        } else if self.phase == Phase::Quiet && self.deciding > 0 {
            self.schedule(QUIET, Event::Check);
        } else if self.phase == Phase::Quiet {
            self.last_look();
        }
    }

    /// Returns the time in nanoseconds in which all connections must have ended after the last
    /// fault, or after the fresh work. Without loss and delay that is the time for the work.
    /// Otherwise a handshake may have to be given up, and then the end of the connection, of which
    /// the peer knows nothing any more. Before that, a peer may have been told to wait for a slow
    /// program.
    pub(super) fn end_bound(&self) -> u64 {
        let decide = self.plan.conns.iter().map(|conn| conn.decide).max().unwrap_or(0);
        if !self.plan.leaves_behind() {
            return WORK + decide;
        }
        WORK + 2 * EXCHANGE + decide + if decide >= SLOW { SERVICE } else { 0 }
    }

    /// Tells whether a side has no requests under way and none still to make.
    pub(super) fn idle(&self, id: SideId) -> bool {
        let side = &self.sides[id];
        side.left == 0 && !side.requests.iter().any(|r| r.signalled)
    }

    pub(super) fn peer_idle(&self, id: SideId) -> bool {
        self.sides[id].peer.is_none_or(|peer| {
            self.sides[peer].stage > Stage::Up
                || self.idle(peer) && self.sides[peer].stage == Stage::Up
        })
    }

    /// Stops the listeners, because all connections are over.
    fn close(&mut self) {
        for host in 0..self.hosts.len() {
            self.close_port(host);
        }
        for stream in 0..self.streams.len() {
            self.close_stream(stream);
        }
        for host in 0..self.hosts.len() {
            let listener = self.hosts[host].listener.take();
            let (Some(id), Some(device)) = (listener, &mut self.hosts[host].device) else {
                continue;
            };
            let result = device.destroy_id(Instant::from_nanos(self.base.now), id);
            self.judge(result.map_err(|e| format!("host {host}: the listener stays: {e}")));
            self.schedule_turn(host);
        }
    }

    /// Makes the last check, after the last late datagram: no timers and no bytes are left, and the
    /// memory is as it must be.
    fn last_look(&mut self) {
        self.done = true;
        for id in 0..self.sides.len() {
            let side = &mut self.sides[id];
            if !side.dead {
                let looked = side.memory.check_all().map_err(|e| format!("side {id}: {e}"));
                self.judge(looked);
            }
        }
        for host in 0..self.hosts.len() {
            self.count(host);
            let Some(device) = &self.hosts[host].device else { continue };
            let (due, left) = (device.poll_timeout(), device.in_use());
            if let Some(due) = due {
                let wait = due.as_nanos().saturating_sub(self.now) / MS;
                self.fail(|| {
                    format!("host {host} still has a timer, due in {wait} ms, and holds {left:?}")
                });
            }
            if left != InUse::default() {
                self.fail(|| format!("host {host} still holds {left:?}"));
            }
        }
    }

    /// Describes what a side waits for.
    pub(super) fn describe(&self, id: SideId) -> String {
        let side = &self.sides[id];
        let first = side.requests.front();
        format!(
            "host {}, {:?}, {:?}, {:?}, {} to post, {} requests, first {first:?}, {} receives, \
             {} messages on their way",
            side.host,
            side.stage,
            side.cm_events_seen,
            side.failure_causes,
            side.left,
            side.requests.len(),
            side.receives.len(),
            side.outgoing.len(),
        )
    }

    /// Returns the state of the run as text.
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
}
