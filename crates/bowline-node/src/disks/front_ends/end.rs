//! The end of all front ends, with the process.

use std::{
    thread::{self, JoinHandle},
    time::Instant,
};

use super::{DiskFrontEnds, FrontState, POLL_INTERVAL};
use crate::disks::ending::{CLOSE_PATIENCE, FINISH_PATIENCE, Unserved, Users, unflushed};

impl DiskFrontEnds {
    /// Makes requests fail while the session is lost, so that closing front ends, by commands in
    /// progress too, does not wait for it.
    pub fn fail_fast(&self) {
        self.lock().open().for_each(|(_, front_ends)| front_ends.detach());
        self.client.disks().iter().for_each(|disk| disk.fail_fast());
    }

    /// Says who is cut off by the end, lets the requests that were sent be answered, and makes
    /// requests fail that wait for a server that is not connected. No front end is opened and no
    /// change is taken from then on. Returns what was not served.
    pub fn finish(&self) -> Unserved {
        let mut users = Users::default();
        let mut state = self.lock();
        state.closed = true;
        state.open().for_each(|(name, front_ends)| users.add(name, front_ends));
        drop(state);
        users.tell();
        let mut machines = Vec::new();
        let mut state = self.lock();
        for (name, front) in &mut state.front_states {
            if let FrontState::Open(front_ends) = front {
                front_ends.finish();
                if front_ends.vhost_user.is_some() {
                    machines.push(name.clone());
                }
            }
        }
        drop(state);
        let mut unserved = Unserved::with_machines(machines);
        let is_in_use = |disk: &str| {
            self.lock().open().any(|(name, front)| name == disk && front.is_finishing())
        };
        let end = Instant::now() + FINISH_PATIENCE;
        unserved.finish(&self.client.disks(), end, is_in_use);
        unserved
    }

    /// Closes all front ends, makes durable what was written, and unmaps all disks. Waits for
    /// commands in progress, since front ends that they open would be left behind.
    pub fn close(&self, unserved: &mut Unserved) {
        self.close_all(unserved);
        let mut state = self.lock();
        unserved.append(std::mem::take(&mut state.unserved));
        drop(state);
        unserved.flush(&self.client.disks(), |disk| self.is_inherited(disk));
        self.client.close();
    }

    /// As [`close`](Self::close), but leaves it to another process to make anything durable: that
    /// has the front ends.
    pub fn leave(&self) {
        let mut unserved = Unserved::default();
        self.close_all(&mut unserved);
        unserved.tell();
        self.client.close();
    }

    /// Returns a line for each disk of which something may be lost if the process ends now.
    pub fn unflushed(&self) -> Vec<String> {
        unflushed(&self.client.disks(), |disk| self.is_inherited(disk))
    }

    /// Closes all front ends, at the same time: each may wait for the kernel or for its users.
    fn close_all(&self, unserved: &mut Unserved) {
        let end = Instant::now() + CLOSE_PATIENCE;
        let mut closing: Vec<(String, JoinHandle<()>)> = Vec::new();
        loop {
            self.fail_fast();
            let mut state = self.lock();
            state.closed = true;
            let mut open = Vec::new();
            let is_over = Instant::now() >= end;
            // A thread that has just taken one back leaves it by itself.
            let may_close = state.regaining == 0 || is_over;
            for (name, front) in std::mem::take(&mut state.front_states) {
                match front {
                    FrontState::Open(front_ends) if may_close => open.push((name, front_ends)),
                    FrontState::Open(_) | FrontState::Opening => {
                        state.front_states.insert(name, front);
                    }
                    FrontState::Closing => {}
                }
            }
            let is_quiet = state.commands == 0 && state.front_states.is_empty();
            if is_over {
                state.front_states.clear();
            }
            drop(state);
            for (name, front_ends) in open {
                let missing = front_ends.missing.iter();
                unserved.extend(missing.map(|missing| format!("{name}: {missing}")));
                let close = thread::Builder::new().name("close".to_owned());
                // Without a thread they are closed here, since nobody has them any more.
                closing
                    .extend(close.spawn(|| front_ends.close()).ok().map(|thread| (name, thread)));
            }
            closing.retain(|(_, thread)| !thread.is_finished());
            if is_over || is_quiet && closing.is_empty() {
                break;
            }
            thread::sleep(POLL_INTERVAL);
        }
        let late = closing.into_iter();
        unserved.extend(
            late.map(|(name, _)| format!("{name}: its front ends were not closed in time")),
        );
    }
}
