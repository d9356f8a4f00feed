//! Connecting a lost path again: when, how often, and who hears of it [RS-10] to [RS-15], [RT-91].

use core::time::Duration;

use super::path::{Goal, Join, Manual, Path};
use super::session::Event;
use super::{PathState, Session};
use crate::{Errno, Instant, PathId};

/// The kernel's wait before every attempt [RS-10].
const KERNEL_BACKOFF: Duration = Duration::from_secs(1);
/// Longest delay between attempts, in seconds.
const DELAY_MAX: u64 = 30;
/// A link that stood so long was good: what comes after it is a new outage. Longer than one takes
/// that fails as soon as it is used; a path that is cut every few seconds is none of these.
const GOOD: Duration = Duration::from_secs(2);
/// First delay towards a server that has not noticed the end of the last link; it doubles.
const BUSY_DELAY: Duration = Duration::from_millis(50);
/// So often it doubles.
const BUSY_DOUBLINGS: u32 = 6;
/// A server that has not noticed after so long refuses for another reason.
const BUSY_MAX: Duration = Duration::from_secs(60);
/// And so long whoever has ordered a reconnect waits for it.
const BUSY_ORDERED_MAX: Duration = Duration::from_secs(2);

impl Path {
    /// The next delay of the series 1, 2, 4 .. 30 s, 25 % more or less [RT-91].
    fn next_delay(&mut self, random: u64) -> Duration {
        let seconds = (1_u64 << self.backoff.saturating_sub(1).min(5)).min(DELAY_MAX);
        self.backoff = self.backoff.max(1) + 1;
        Duration::from_millis(seconds * (750 + random % 501))
    }

    /// A link that was up is lost.
    pub(super) fn note_loss(&mut self, now: Instant) {
        self.lost_at = now;
        if now.saturating_since(self.up_at) >= GOOD {
            self.backoff = 0;
        }
    }
}

impl Session {
    /// A path's link is gone, as far as the path waits for it.
    pub(super) fn link_gone(&mut self, now: Instant, id: PathId, errno: Errno, busy: bool) {
        let Some(path) = self.paths.get(id) else { return };
        match path.state {
            PathState::Closing => self.path_closed(id),
            PathState::ConnectingErr if path.manual == Manual::Ordered => {
                self.change(id, PathState::Reconnecting);
                self.retry(now, id);
            }
            PathState::ConnectingErr => self.attempt_failed(now, id, errno, busy),
            PathState::Reconnecting => self.plan_first(now, id),
            _ => {}
        }
    }

    /// Plans the first attempt after a loss.
    fn plan_first(&mut self, now: Instant, id: PathId) {
        let random = self.random();
        let spread = Duration::from_millis(random % 8);
        let Some(path) = self.paths.get_mut(id) else { return };
        match self.config.reconnect_delay {
            Some(delay) if path.manual == Manual::No => {
                path.retry_at = Some(now + delay + spread + KERNEL_BACKOFF);
            }
            None if path.manual == Manual::No && path.backoff > 0 => {
                // It was lost as soon as it was made: no better than an attempt that failed.
                let wait = path.next_delay(random);
                path.retry_at = Some(now + wait);
            }
            _ => {
                path.backoff += 1;
                self.retry(now, id);
            }
        }
    }

    /// The last path is lost. Others wait for their next attempt while nobody waits for them; now
    /// everybody does, so their series begins anew.
    pub(super) fn retry_soon(&mut self, now: Instant) {
        if self.config.reconnect_delay.is_some() {
            return;
        }
        for at in 0..self.list.len() {
            let (id, random) = (self.list[at], self.random());
            let Some(path) = self.paths.get_mut(id) else { continue };
            if let Some(retry_at) = path.retry_at {
                path.backoff = 1;
                let soon = now + path.next_delay(random);
                path.retry_at = Some(retry_at.min(soon));
            }
        }
    }

    /// An attempt has failed: the end of a path that was never up, else the next one is planned.
    pub(super) fn attempt_failed(&mut self, now: Instant, id: PathId, errno: Errno, busy: bool) {
        let random = self.random();
        let delay = self.config.reconnect_delay;
        let Some(path) = self.paths.get_mut(id) else { return };
        match path.join {
            Join::Opening => return self.fail_open(now, errno),
            Join::Adding => {
                self.change(id, PathState::Closing);
                self.change(id, PathState::Closed);
                self.remove(id);
                return self.events.push_back(Event::PathAdded { path: id, result: Err(errno) });
            }
            Join::Member => {}
        }
        let lost_for = now.saturating_since(path.lost_at);
        let early = lost_for < BUSY_MAX;
        // Nor is it the end of an order to connect [RT-91].
        let goes_on = busy && delay.is_none() && lost_for < BUSY_ORDERED_MAX;
        let manual = !goes_on && std::mem::take(&mut path.manual) != Manual::No;
        let wait = if let Some(delay) = delay {
            path.stats.reconnects_failed += 1;
            delay + Duration::from_millis(random % 8) + KERNEL_BACKOFF
        } else if busy && early {
            // The server has the old link still: not an attempt in the sense of the limit.
            path.attempts = path.attempts.saturating_sub(1);
            path.busy += 1;
            BUSY_DELAY * (1 << (path.busy - 1).min(BUSY_DOUBLINGS))
        } else {
            path.stats.reconnects_failed += 1;
            path.next_delay(random)
        };
        path.retry_at = Some(now + wait);
        self.change(id, PathState::Reconnecting);
        if manual {
            let result = Err(Errno::ENOTCONN);
            self.events.push_back(Event::PathReconnected { path: id, result });
        }
    }

    /// Connects a lost path again, unless its attempts are used up [RS-13], [RS-15].
    pub(super) fn retry(&mut self, now: Instant, id: PathId) {
        // Unsigned, so -1 is as good as for ever.
        let max = i32::from(self.config.max_reconnects) as u32;
        let Some(path) = self.paths.get_mut(id) else { return };
        if path.state != PathState::Reconnecting {
            return;
        }
        if path.manual == Manual::No && (path.changed || path.attempts >= max) {
            path.goal = Goal::Closed;
            self.change(id, PathState::Closing);
            return self.path_closed(id);
        }
        if path.manual == Manual::Ordered {
            path.manual = Manual::Running;
        }
        path.attempts = path.attempts.saturating_add(1);
        path.retry_at = None;
        self.change(id, PathState::Connecting);
        self.start_link(now, id);
    }

    /// Changes the state of a path and tells.
    pub(super) fn change(&mut self, id: PathId, state: PathState) {
        let Some(path) = self.paths.get_mut(id) else { return };
        debug_assert!(path.state.may_become(state), "{:?} to {state:?}", path.state);
        path.state = state;
        let addr = path.addr;
        self.events.push_back(Event::PathState { path: id, addr, state });
    }

    /// Nothing is left of a path that was to be closed.
    pub(super) fn path_closed(&mut self, id: PathId) {
        let Some(path) = self.paths.get_mut(id) else { return };
        path.retry_at = None;
        let (goal, join) = (path.goal, path.join);
        let manual = std::mem::take(&mut path.manual) != Manual::No;
        self.change(id, PathState::Closed);
        if manual {
            let result = Err(Errno::ENOTCONN);
            self.events.push_back(Event::PathReconnected { path: id, result });
        }
        if join == Join::Adding {
            let result = Err(Errno::ECONNABORTED);
            self.events.push_back(Event::PathAdded { path: id, result });
        }
        self.events.push_back(Event::PathClosed { path: id });
        if goal == Goal::Removed || join == Join::Adding {
            self.remove(id);
            self.events.push_back(Event::PathRemoved { path: id });
        }
    }

    /// Takes a closed path out of the list. What round-robin took last is its successor then
    /// [RS-21].
    fn remove(&mut self, id: PathId) {
        self.change(id, PathState::Dead);
        let at = self.list.iter().position(|&one| one == id);
        if let Some(at) = at {
            let next = self.list[(at + 1) % self.list.len()];
            self.list.remove(at);
            let last = (next != id).then_some(next);
            for one in self.last_path.iter_mut().filter(|one| **one == Some(id)) {
                *one = last;
            }
        }
        self.paths.remove(id);
    }
}
