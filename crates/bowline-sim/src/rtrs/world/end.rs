//! Time limits after the last fault.

use bowline_rtrs::client::PathState;

use super::World;
use crate::engine::coverage::time_share;
use crate::engine::queue::{MS, SEC};
use crate::rtrs::client::Stage;
use crate::rtrs::plan::Plan;
use crate::rtrs::reach;
use crate::rtrs::trial::TrialKind;

/// Round trips of a request: its own, one for a key that is made or withdrawn for it, and two for a
/// missing receive or the repair of reordered datagrams.
const OF_REQUEST: u64 = 4;
/// Nanoseconds after which, plus two round trips, a silent peer is probed; and how often a request
/// can have to wait for that where datagrams overtake each other.
const PROBE: u64 = 5 * MS;
const OVERTAKEN: u64 = 3;

/// Time in which a device gives up a peer that answers nothing, and the binding reports it.
const GIVE_UP: u64 = 4 * SEC;
/// Longest teardown of a lost path: of its queue pairs, then of its connections.
const PARTED: u64 = 33 * SEC;
/// Longest pause between two attempts to connect, including the random part [RT-91].
const PAUSE: u64 = 38 * SEC;
/// Longest time of a step of connecting [RT-18].
const CONNECT: u64 = 30 * SEC;
/// How long a server waits for vanished clients before their names and disks are free again.
const LINGER: u64 = 30 * SEC;
/// How long a server that was closing when the faults ended may need to be started again.
const RESTART: u64 = 60 * SEC;

/// Longest time of a request of the final IO, without storage, in nanoseconds.
pub(super) fn request_bound(plan: &Plan) -> u64 {
    let hosts = || plan.nodes.iter().flat_map(|node| &node.hosts);
    let turn = hosts().map(|host| host.turn).max().unwrap_or(0);
    let ack_delay = hosts().map(|host| host.ack_delay.as_nanos() as u64).max().unwrap_or(0);
    let look = plan.nodes.iter().map(|node| node.look).max().unwrap_or(0);
    let round_trip = 2 * (plan.net.delay + plan.net.jitter + turn + look);
    let overtaken = if plan.net.jitter > 0 { OVERTAKEN * (PROBE + 2 * round_trip) } else { 0 };
    OF_REQUEST * round_trip + ack_delay + overtaken + MS
}

impl World {
    /// Nanoseconds after the last fault until every path that seems connected is connected: stalled
    /// programs run again, and silence is noticed. A device that does not respond is probed soon; a
    /// device that responds for a program that does not is detected by heartbeats alone.
    pub(super) fn notice_bound(&self) -> u64 {
        if !self.plan.is_faulty() {
            return 0;
        }
        let programs = self.clients.iter().map(|client| &client.process);
        let stalled = programs.chain([&self.server.process]).map(|p| p.stalled_for(self.base.now));
        let only_heartbeats =
            |trial_kind| matches!(trial_kind, TrialKind::Silence { .. } | TrialKind::Mute { .. });
        let heartbeats = self.plan.trials.iter().any(|trial| only_heartbeats(trial.what));
        let patience = if heartbeats { self.patience() } else { 0 };
        stalled.max().unwrap_or(0) + patience + self.plan.heartbeat.2 + GIVE_UP
    }

    /// Nanoseconds after the last fault within which every path must be connected again: its loss
    /// is noticed, it is torn down, and connected again once the server has forgotten its state for
    /// it.
    fn reconnect_bound(&self) -> u64 {
        let kernel = self.plan.clients.iter().filter_map(|client| client.kernel_delay).max();
        let slow = self.plan.clients.iter().flat_map(|client| &client.disks).map(|d| d.takes.1);
        let restarts =
            self.plan.trials.iter().any(|trial| matches!(trial.what, TrialKind::Restart { .. }));
        let mut bound = self.notice + PARTED + PAUSE + CONNECT + LINGER;
        bound += kernel.unwrap_or(0) + slow.max().unwrap_or(0);
        bound + if restarts { RESTART } else { 0 }
    }

    /// Judges whether every path is connected in time; false if not.
    pub(super) fn judge_reconnected(&mut self, spent: u64) -> bool {
        if self.back || self.final_io == 0 {
            return true;
        }
        let bound = self.reconnect_bound();
        let lost = self.clients.iter().find_map(|client| {
            if client.done {
                return None;
            }
            let number = client.number;
            let Some(active) = &client.active else {
                return Some(format!("client {number} has no session"));
            };
            if active.stage > Stage::FinalIo {
                return None;
            }
            let mut paths = active.session.paths();
            let away = paths.find(|path| path.state != PathState::Connected);
            away.map(|path| format!("client {number}: {:?} is not back: {:?}", path.id, path.state))
        });
        match lost {
            None => {
                self.back = true;
                self.base.coverage.hit(reach::BACK, time_share(spent, bound));
                true
            }
            Some(lost) if spent > bound => {
                self.base.fail(|| format!("{lost}, {bound} ns after the last fault"));
                false
            }
            Some(_) => true,
        }
    }
}
