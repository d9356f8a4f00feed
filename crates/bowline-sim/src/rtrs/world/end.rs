//! After the last fault: within which time everything must be as it was.

use bowline_rtrs::client::PathState;

use super::World;
use crate::engine::coverage::time_share;
use crate::engine::queue::{MS, SEC};
use crate::rtrs::client::Stage;
use crate::rtrs::plan::Plan;
use crate::rtrs::reach;
use crate::rtrs::trial::Ordeal;

/// Round trips of a request: its own, that of a key made or withdrawn for it, and two more in which
/// a receive was missing, or something was repaired that came in another order.
const OF_REQUEST: u64 = 4;
/// After this time, and two round trips, a silent peer is asked how far it has come; how often that
/// is waited for where datagrams overtake each other.
const PROBE: u64 = 5 * MS;
const OVERTAKEN: u64 = 3;

/// Time in which a device of a peer that answers nothing gives it up, and the binding tells so.
const GIVE_UP: u64 = 4 * SEC;
/// Longest time a path that is lost is taken apart: its queue pairs, and then its connections.
const PARTED: u64 = 33 * SEC;
/// Longest pause between two attempts to connect, with what is added by chance [RT-91].
const PAUSE: u64 = 38 * SEC;
/// Longest time of a step of connecting [RT-18].
const CONNECT: u64 = 30 * SEC;
/// What a server waits for clients that have vanished, before their names and disks are free again.
const LINGER: u64 = 30 * SEC;
/// What a server that was closing when the faults ended may need until it is there again.
const RESTART: u64 = 60 * SEC;

/// Time in which a request of fresh work is done, without storage.
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
    /// Time after which a path that seems to be connected is, if nothing goes wrong any more:
    /// programs that do nothing are there again, and silence is noticed. A device that does not
    /// answer is asked soon; one that answers for a program that does not is found out by
    /// heartbeats alone.
    pub(super) fn notice_bound(&self) -> u64 {
        if !self.plan.is_faulty() {
            return 0;
        }
        let programs = self.clients.iter().map(|client| &client.process);
        let stalled = programs.chain([&self.server.process]).map(|p| p.stalled_for(self.base.now));
        let only_heartbeats =
            |ordeal| matches!(ordeal, Ordeal::Silence { .. } | Ordeal::Mute { .. });
        let heartbeats = self.plan.trials.iter().any(|trial| only_heartbeats(trial.what));
        let patience = if heartbeats { self.patience() } else { 0 };
        stalled.max().unwrap_or(0) + patience + self.plan.heartbeat.2 + GIVE_UP
    }

    /// Time in which every path is connected again after the last fault: somebody notices that one
    /// is lost, takes it apart, and connects it again, once the server has forgotten what it had of
    /// it.
    fn back_bound(&self) -> u64 {
        let kernel = self.plan.clients.iter().filter_map(|client| client.kernel_delay).max();
        let slow = self.plan.clients.iter().flat_map(|client| &client.disks).map(|d| d.takes.1);
        let restarts =
            self.plan.trials.iter().any(|trial| matches!(trial.what, Ordeal::Restart { .. }));
        let mut bound = self.notice + PARTED + PAUSE + CONNECT + LINGER;
        bound += kernel.unwrap_or(0) + slow.max().unwrap_or(0);
        bound + if restarts { RESTART } else { 0 }
    }

    /// Judges whether every path is back in time; false when it is not.
    pub(super) fn judge_back(&mut self, spent: u64) -> bool {
        if self.back || self.fresh == 0 {
            return true;
        }
        let bound = self.back_bound();
        let lost = self.clients.iter().find_map(|client| {
            if client.done {
                return None;
            }
            let number = client.number;
            let Some(life) = &client.life else {
                return Some(format!("client {number} has no session"));
            };
            if life.stage > Stage::Fresh {
                return None;
            }
            let mut paths = life.session.paths();
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
