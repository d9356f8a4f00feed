//! A RoCE device: threads that wait for completions on queues of their own.

use std::sync::Arc;

use shuttle::sync::{Condvar, Mutex, MutexGuard};

use crate::lead::{Lead, Leader};
use crate::net::{Net, Sleeper};
use crate::{begin_helper_turn, check, spawn};

#[derive(Clone, Copy, PartialEq, Eq)]
enum Mistake {
    None,
    /// A leader that stops leading tells no follower.
    LeavesInSilence,
    /// A follower that was woken to lead just when its time limit passed does not pass the lead on.
    KeepsLead,
    /// A thread that handles a packet does not interrupt the sleep of the leader it is for.
    LetsLeaderSleep,
    /// A follower is counted after it released the lock under which it looked.
    CountsLate,
}

#[derive(Default)]
struct State {
    lead: Lead,
    followers: usize,
    /// Completions by thread.
    queues: [usize; 3],
    /// The time limit of thread 0 has passed.
    late: bool,
    stop: bool,
}

struct Device {
    net: Net,
    state: Mutex<State>,
    completions: Condvar,
    mistake: Mistake,
}

impl Device {
    fn new(mistake: Mistake) -> Arc<Self> {
        Arc::new(Self {
            net: Net::default(),
            state: Mutex::default(),
            completions: Condvar::new(),
            mistake,
        })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    fn wait(&self, me: usize) {
        let (mut leading, mut followed) = (false, false);
        loop {
            let mut st = self.lock();
            let late = me == 0 && st.late;
            if st.queues[me] > 0 || late {
                st.queues[me] = st.queues[me].saturating_sub(1);
                followed &= self.mistake != Mistake::KeepsLead;
                if leading || (followed && st.lead.leader() == Leader::Nobody) {
                    self.leave_lead(&mut st);
                }
                return;
            }
            if !leading {
                if st.lead.take().is_none() {
                    self.follow(st);
                    followed = true;
                    continue;
                }
                leading = true;
            }
            st.lead.fall_asleep(u64::MAX);
            drop(st);
            self.net.sleep(Sleeper::Leader);
            self.lock().lead.wake_up();
            self.pump();
        }
    }

    fn follow<'a>(&'a self, mut st: MutexGuard<'a, State>) {
        if self.mistake == Mistake::CountsLate {
            drop(st);
            st = self.lock();
        }
        st.followers += 1;
        let mut st = self.completions.wait(st).unwrap();
        st.followers -= 1;
    }

    /// Reads the network.
    fn pump(&self) {
        let arrived = self.net.read();
        self.handle(&arrived);
    }

    fn handle(&self, arrived: &[usize]) {
        let mut st = self.lock();
        arrived.iter().for_each(|to| st.queues[*to] += 1);
        if !arrived.is_empty() {
            self.settle(&mut st);
        }
    }

    fn settle(&self, st: &mut State) {
        if st.followers > 0 {
            self.completions.notify_all();
        }
        let interrupts = self.mistake != Mistake::LetsLeaderSleep;
        if st.lead.is_asleep() && st.lead.leader() == Leader::Application && interrupts {
            st.lead.wake_up();
            self.net.kick_leader();
        }
    }

    fn leave_lead(&self, st: &mut State) {
        st.lead.leave();
        if st.followers > 0 {
            if self.mistake != Mistake::LeavesInSilence {
                self.completions.notify_one();
            }
        } else {
            self.net.kick_helper();
        }
    }

    /// The background thread. Its turns come when it is woken; the first time it leads.
    fn help(&self) {
        let mut epoch = 0;
        loop {
            let mut st = self.lock();
            if st.stop {
                return;
            }
            let sleeper = begin_helper_turn(&mut st.lead, &mut epoch, false);
            drop(st);
            self.net.sleep(sleeper);
            let mut st = self.lock();
            if st.lead.leader() == Leader::Helper {
                st.lead.wake_up();
                drop(st);
                self.pump();
            }
        }
    }
}

/// Three threads, each of which waits for two completions. One packet is handled by a thread that
/// does not wait, as one does that sends or polls; and where `helped`, a background thread leads
/// first.
fn waits(mistake: Mistake, helped: bool) {
    let device = Device::new(mistake);
    let helper = helped.then(|| spawn(&device, |device: &Device, _| device.help(), 0));
    let peer = spawn(
        &device,
        |device: &Device, _| {
            [0, 1, 2, 0, 1].into_iter().for_each(|to| device.net.arrive(to));
            device.handle(&[2]);
        },
        0,
    );
    let waits = |device: &Device, me| {
        device.wait(me);
        device.wait(me);
    };
    let threads = [0, 1, 2].map(|me| spawn(&device, waits, me));
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    peer.join().unwrap();
    device.lock().stop = true;
    device.net.kick_helper();
    helper.into_iter().for_each(|helper| helper.join().unwrap());
}

/// Three threads, of which the first gets no completion and waits only so long.
fn limits(mistake: Mistake) {
    let device = Device::new(mistake);
    let threads = [0, 1, 2].map(|me| spawn(&device, Device::wait, me));
    device.net.arrive(2);
    device.lock().late = true;
    device.net.arrive(1);
    threads.into_iter().for_each(|thread| thread.join().unwrap());
}

#[test]
fn a_wait_that_ends_by_time_hands_the_lead_on() {
    check(|| limits(Mistake::None));
}

#[test]
fn every_completion_ends_its_wait() {
    check(|| waits(Mistake::None, false));
}

#[test]
fn every_completion_ends_its_wait_beside_a_background_thread() {
    check(|| waits(Mistake::None, true));
}

#[test]
#[should_panic(expected = "deadlock")]
fn a_lead_that_is_left_in_silence_is_found() {
    check(|| waits(Mistake::LeavesInSilence, false));
}

#[test]
#[should_panic(expected = "deadlock")]
fn a_late_follower_that_keeps_the_lead_it_was_woken_for_is_found() {
    check(|| limits(Mistake::KeepsLead));
}

#[test]
#[should_panic(expected = "deadlock")]
fn a_leader_that_sleeps_past_its_completion_is_found() {
    check(|| waits(Mistake::LetsLeaderSleep, false));
}

#[test]
#[should_panic(expected = "deadlock")]
fn a_follower_that_is_counted_after_unlocking_is_found() {
    check(|| waits(Mistake::CountsLate, false));
}
