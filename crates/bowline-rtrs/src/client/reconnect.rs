//! Reconnecting a lost path: when, how often, and which callers are told [RS-10] to [RS-15],
//! [RT-91].

use core::time::Duration;

use super::path::{FirstConnect, Goal, ManualReconnect, Path};
use super::session::Event;
use super::{PathState, Session};
use crate::{Errno, Instant, PathId};

/// The kernel's fixed wait before every attempt [RS-10].
const KERNEL_BACKOFF: Duration = Duration::from_secs(1);
/// Longest delay between attempts, in seconds, while another path carries the requests.
const DELAY_MAX: u64 = 30;
/// The same while no path is connected and every request waits for the next attempt. A quarter of
/// the time that requests wait by default [NB-54], so that they outlive several attempts.
const OUTAGE_DELAY_MAX: u64 = 8;
/// A connection that lasted this long was good, so its loss begins a new outage. Longer than a
/// connection lasts that fails as soon as it is used; shorter than the intervals of a path that is
/// cut every few seconds.
const GOOD_CONNECTION: Duration = Duration::from_secs(2);
/// First delay towards a server that has not noticed the end of the former incarnation; it doubles.
const BUSY_DELAY: Duration = Duration::from_millis(50);
/// Number of times it doubles.
const BUSY_DOUBLINGS: u32 = 6;
/// After this time a server that still refuses does so for another reason.
const BUSY_MAX: Duration = Duration::from_secs(60);
/// How long a `reconnect_path` call waits for such a server.
const BUSY_ORDERED_MAX: Duration = Duration::from_secs(2);

impl Path {
    /// Returns the next delay of the series 1, 2, 4 .. `longest` s, 25 % more or less [RT-91].
    fn next_delay(&mut self, random: u64, longest: u64) -> Duration {
        let seconds = (1_u64 << self.backoff.saturating_sub(1).min(5)).min(longest);
        self.backoff = self.backoff.max(1) + 1;
        Duration::from_millis(seconds * (750 + random % 501))
    }

    /// Records that a connected path is lost, on which the server had `served` IO or had not. A
    /// short connection that served some is worth making again soon: on a network that loses
    /// packets each may last no longer [RT-82]. But for the first, the next attempt is not made at
    /// once, as the IO that is repeated may be what ended the connection.
    pub(super) fn note_loss(&mut self, now: Instant, served: bool) {
        self.lost_at = now;
        if now.saturating_since(self.up_at) >= GOOD_CONNECTION {
            self.backoff = 0;
        } else if served {
            self.backoff = self.backoff.min(1);
        }
    }
}

impl Session {
    /// Returns the longest delay between attempts now, in seconds.
    const fn longest_delay(&self) -> u64 {
        if self.up == 0 { OUTAGE_DELAY_MAX } else { DELAY_MAX }
    }

    /// Handles that a path's incarnation has ended, or that the path no longer waits for it.
    pub(super) fn incarnation_gone(&mut self, now: Instant, id: PathId, errno: Errno, busy: bool) {
        let Some(path) = self.paths.get(id) else { return };
        match path.state {
            PathState::Closing => self.path_closed(id),
            PathState::ConnectingErr if path.manual == ManualReconnect::Ordered => {
                self.change(id, PathState::Reconnecting);
                self.retry(now, id);
            }
            PathState::ConnectingErr => self.attempt_failed(now, id, errno, busy),
            PathState::Reconnecting => self.schedule_first_retry(now, id),
            _ => {}
        }
    }

    /// Schedules the first attempt after a loss.
    fn schedule_first_retry(&mut self, now: Instant, id: PathId) {
        let (random, longest) = (self.random(), self.longest_delay());
        let spread = Duration::from_millis(random % 8);
        let Some(path) = self.paths.get_mut(id) else { return };
        match self.config.reconnect_delay {
            Some(delay) if path.manual == ManualReconnect::No => {
                path.retry_at = Some(now + delay + spread + KERNEL_BACKOFF);
            }
            None if path.manual == ManualReconnect::No && path.backoff > 0 => {
                // The connection was lost as soon as it was made: treated like a failed attempt.
                let wait = path.next_delay(random, longest);
                path.retry_at = Some(now + wait);
            }
            _ => {
                path.backoff += 1;
                self.retry(now, id);
            }
        }
    }

    /// Restarts the delays of all paths when the last connected path is lost, because every request
    /// now waits for them.
    pub(super) fn restart_delays(&mut self, now: Instant) {
        if self.config.reconnect_delay.is_some() {
            return;
        }
        for at in 0..self.list.len() {
            let (id, random) = (self.list[at], self.random());
            let Some(path) = self.paths.get_mut(id) else { continue };
            if let Some(retry_at) = path.retry_at {
                path.backoff = 1;
                let soon = now + path.next_delay(random, OUTAGE_DELAY_MAX);
                path.retry_at = Some(retry_at.min(soon));
            }
        }
    }

    /// Handles a failed attempt: removes a path that was never connected, else schedules the next
    /// attempt.
    pub(super) fn attempt_failed(&mut self, now: Instant, id: PathId, errno: Errno, busy: bool) {
        let (random, longest) = (self.random(), self.longest_delay());
        let delay = self.config.reconnect_delay;
        let Some(path) = self.paths.get_mut(id) else { return };
        match path.first_connect {
            FirstConnect::Opening => return self.fail_open(now, errno),
            FirstConnect::Adding => {
                self.change(id, PathState::Closing);
                self.change(id, PathState::Closed);
                self.remove(id);
                return self.events.push_back(Event::PathAdded { path: id, result: Err(errno) });
            }
            FirstConnect::Done => {}
        }
        let lost_for = now.saturating_since(path.lost_at);
        let early = lost_for < BUSY_MAX;
        // A busy server does not end a `reconnect_path` call either [RT-91].
        let goes_on = busy && delay.is_none() && lost_for < BUSY_ORDERED_MAX;
        let manual = !goes_on && std::mem::take(&mut path.manual) != ManualReconnect::No;
        let wait = if let Some(delay) = delay {
            path.stats.reconnects_failed += 1;
            delay + Duration::from_millis(random % 8) + KERNEL_BACKOFF
        } else if busy && early {
            // The server still has the former incarnation: this attempt does not count.
            path.attempts = path.attempts.saturating_sub(1);
            path.busy += 1;
            BUSY_DELAY * (1 << (path.busy - 1).min(BUSY_DOUBLINGS))
        } else {
            path.stats.reconnects_failed += 1;
            path.next_delay(random, longest)
        };
        path.retry_at = Some(now + wait);
        self.change(id, PathState::Reconnecting);
        if manual {
            let result = Err(Errno::ENOTCONN);
            self.events.push_back(Event::PathReconnected { path: id, result });
        }
    }

    /// Reconnects a lost path, unless its attempts are used up [RS-13], [RS-15].
    pub(super) fn retry(&mut self, now: Instant, id: PathId) {
        // As unsigned number -1 is practically unlimited.
        let max = i32::from(self.config.max_reconnects) as u32;
        let Some(path) = self.paths.get_mut(id) else { return };
        if path.state != PathState::Reconnecting {
            return;
        }
        if path.manual == ManualReconnect::No && (path.changed || path.attempts >= max) {
            path.goal = Goal::Closed;
            self.change(id, PathState::Closing);
            return self.path_closed(id);
        }
        if path.manual == ManualReconnect::Ordered {
            path.manual = ManualReconnect::Running;
        }
        path.attempts = path.attempts.saturating_add(1);
        path.retry_at = None;
        self.change(id, PathState::Connecting);
        self.start_incarnation(now, id);
    }

    /// Changes the state of a path and reports it.
    pub(super) fn change(&mut self, id: PathId, state: PathState) {
        let Some(path) = self.paths.get_mut(id) else { return };
        debug_assert!(path.state.may_become(state), "{:?} to {state:?}", path.state);
        path.state = state;
        let addr = path.addr;
        self.events.push_back(Event::PathState { path: id, addr, state });
    }

    /// Handles that a path to be closed has no incarnation any more.
    pub(super) fn path_closed(&mut self, id: PathId) {
        let Some(path) = self.paths.get_mut(id) else { return };
        path.retry_at = None;
        let (goal, join) = (path.goal, path.first_connect);
        let manual = std::mem::take(&mut path.manual) != ManualReconnect::No;
        self.change(id, PathState::Closed);
        if manual {
            let result = Err(Errno::ENOTCONN);
            self.events.push_back(Event::PathReconnected { path: id, result });
        }
        if join == FirstConnect::Adding {
            let result = Err(Errno::ECONNABORTED);
            self.events.push_back(Event::PathAdded { path: id, result });
        }
        self.events.push_back(Event::PathClosed { path: id });
        if goal == Goal::Removed || join == FirstConnect::Adding {
            self.remove(id);
            self.events.push_back(Event::PathRemoved { path: id });
        }
    }

    /// Removes a closed path from the list. Where round-robin took it last, its successor takes its
    /// place [RS-21].
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
