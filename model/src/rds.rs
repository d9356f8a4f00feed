//! A node of RDS: threads that wait for messages on sockets of their own, and a task that relies on
//! the background thread.

use std::collections::VecDeque;
use std::sync::Arc;

use shuttle::sync::{Condvar, Mutex, MutexGuard};

use crate::lead::{Lead, Leader};
use crate::net::{Net, Sleeper};
use crate::waiter::Waiter;
use crate::{begin_helper_turn, check, spawn};

/// The number of the task's socket, behind those of threads.
const TASK: usize = 3;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Mistake {
    None,
    /// A thread registers as waiting after it released the lock under which it looked.
    RegistersLate,
    /// A leader that stops leading wakes no thread that could lead.
    LeavesInSilence,
    /// A thread that was woken to lead, and has its message, does not pass the lead on.
    KeepsLead,
    /// A thread that handles a message does not interrupt the sleep of the leader it is for.
    LetsLeaderSleep,
    /// A leader that stops leading does not tell the background thread that a task relies on it.
    ForgetsTask,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum WaitMode {
    Parked,
    Polling,
}

#[derive(Default)]
struct State {
    lead: Lead,
    kicked: bool,
    parked: VecDeque<Arc<Waiter>>,
    /// Messages by socket.
    inbox: [usize; 4],
    waiting: [Option<(Arc<Waiter>, WaitMode)>; 4],
    /// Number of sockets that rely on the background thread.
    watched: usize,
    stop: bool,
}

/// What is done after the lock is released.
#[derive(Default)]
struct Todo {
    kick: bool,
    wake_helper: bool,
    unpark: Vec<Arc<Waiter>>,
}

struct Node {
    net: Net,
    state: Mutex<State>,
    /// The task's waker.
    task: Condvar,
    mistake: Mistake,
}

impl Node {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    fn release_and_run(&self, st: MutexGuard<'_, State>, todo: &mut Todo) {
        drop(st);
        if std::mem::take(&mut todo.kick) {
            self.net.kick_leader();
        }
        if std::mem::take(&mut todo.wake_helper) {
            self.net.kick_helper();
        }
        todo.unpark.drain(..).for_each(|waiter| waiter.unpark());
    }

    fn wait(&self, me: usize) {
        let (waiter, mut todo) = (Arc::new(Waiter::current()), Todo::default());
        let mut parked = false;
        loop {
            let mut st = self.lock();
            if st.inbox[me] > 0 {
                st.inbox[me] -= 1;
                if !(parked && self.mistake == Mistake::KeepsLead) {
                    self.pass_lead_on(&mut st, &mut todo);
                }
                return self.release_and_run(st, &mut todo);
            }
            if self.take_lead(&mut st, &mut todo) {
                return self.poll_until_done(st, me, &waiter, &mut todo);
            }
            if self.mistake == Mistake::RegistersLate {
                drop(st);
                st = self.lock();
            }
            add_waiter(&mut st, me, &waiter, WaitMode::Parked);
            todo.wake_helper |= st.lead.leader() == Leader::Nobody;
            self.release_and_run(st, &mut todo);
            waiter.park(None);
            parked = true;
            remove_waiter(&mut self.lock(), me, &waiter);
        }
    }

    fn take_lead(&self, st: &mut State, todo: &mut Todo) -> bool {
        if st.watched > 0 {
            return false;
        }
        let former = st.lead.take();
        if former == Some(Leader::Helper) {
            st.kicked = false;
            todo.wake_helper = true;
        }
        former.is_some()
    }

    fn pass_lead_on(&self, st: &mut State, todo: &mut Todo) {
        if st.lead.leader() != Leader::Nobody || self.mistake == Mistake::LeavesInSilence {
            return;
        }
        if st.watched > 0 {
            todo.wake_helper |= self.mistake != Mistake::ForgetsTask;
        } else if let Some(next) = st.parked.pop_front()
            && next.mark()
        {
            todo.unpark.push(next);
        }
    }

    fn poll_until_done<'a>(
        &'a self,
        mut st: MutexGuard<'a, State>,
        me: usize,
        waiter: &Arc<Waiter>,
        todo: &mut Todo,
    ) {
        while st.inbox[me] == 0 {
            add_waiter(&mut st, me, waiter, WaitMode::Polling);
            st.lead.fall_asleep(u64::MAX);
            self.release_and_run(st, todo);
            if !waiter.is_woken() && self.net.sleep(Sleeper::Leader) {
                self.lock().kicked = false;
            }
            self.poll_events(Some(waiter), todo);
            st = self.lock();
            st.lead.wake_up();
            remove_waiter(&mut st, me, waiter);
        }
        st.inbox[me] -= 1;
        st.lead.leave();
        self.pass_lead_on(&mut st, todo);
        self.release_and_run(st, todo);
    }

    /// Reads the network.
    fn poll_events(&self, reader: Option<&Arc<Waiter>>, todo: &mut Todo) {
        let arrived = self.net.read();
        if !arrived.is_empty() {
            self.handle(&arrived, reader, todo);
        }
    }

    fn handle(&self, arrived: &[usize], reader: Option<&Arc<Waiter>>, todo: &mut Todo) {
        let mut st = self.lock();
        if reader.is_some() {
            st.lead.wake_up();
        }
        for to in arrived {
            st.inbox[*to] += 1;
            self.collect_wake(&mut st, *to, reader, todo);
        }
        self.release_and_run(st, todo);
    }

    fn collect_wake(
        &self,
        st: &mut State,
        to: usize,
        reader: Option<&Arc<Waiter>>,
        todo: &mut Todo,
    ) {
        if to == TASK {
            self.task.notify_all();
        }
        let mut kick = false;
        if let Some((waiter, mode)) = &st.waiting[to]
            && waiter.mark()
        {
            match mode {
                WaitMode::Parked => todo.unpark.push(Arc::clone(waiter)),
                WaitMode::Polling => kick = !reader.is_some_and(|me| Arc::ptr_eq(me, waiter)),
            }
        }
        let interrupts = self.mistake != Mistake::LetsLeaderSleep;
        if kick && st.lead.is_asleep() && !st.kicked && interrupts {
            st.kicked = true;
            if st.lead.leader() == Leader::Helper {
                todo.wake_helper = true;
            } else {
                todo.kick = true;
            }
        }
    }

    /// The background thread. Its turns come when it is woken; the first time it leads.
    fn help(&self) {
        let (mut epoch, mut todo) = (0, Todo::default());
        loop {
            let mut st = self.lock();
            if st.stop {
                return;
            }
            if st.lead.leader() == Leader::Helper {
                st.kicked = false;
            }
            let is_needed = st.watched > 0;
            let sleeper = begin_helper_turn(&mut st.lead, &mut epoch, is_needed);
            drop(st);
            self.net.sleep(sleeper);
            let mut st = self.lock();
            if st.lead.leader() == Leader::Helper {
                st.lead.wake_up();
                drop(st);
                self.poll_events(None, &mut todo);
            }
        }
    }

    /// A task that is told when its socket has a message, and never reads the network itself.
    fn run_task(&self) {
        let mut todo = Todo::default();
        let mut st = self.lock();
        st.watched += 1;
        todo.wake_helper = true;
        self.release_and_run(st, &mut todo);
        st = self.lock();
        while st.inbox[TASK] == 0 {
            st = self.task.wait(st).unwrap();
        }
    }
}

fn add_waiter(st: &mut State, me: usize, waiter: &Arc<Waiter>, mode: WaitMode) {
    waiter.arm();
    st.waiting[me] = Some((Arc::clone(waiter), mode));
    if mode == WaitMode::Parked {
        st.parked.push_back(Arc::clone(waiter));
    }
}

fn remove_waiter(st: &mut State, me: usize, waiter: &Arc<Waiter>) {
    st.waiting[me] = None;
    st.parked.retain(|parked| !Arc::ptr_eq(parked, waiter));
}

/// Three threads, each of which waits for two messages. One message is handled by a thread that
/// does not wait, as one does that sends. Where `helped`, a background thread leads first, and a
/// task comes that relies on it.
fn waits(mistake: Mistake, helped: bool) {
    let node = Arc::new(Node {
        net: Net::default(),
        state: Mutex::default(),
        task: Condvar::new(),
        mistake,
    });
    let helper = helped.then(|| spawn(&node, |node: &Node, _| node.help(), 0));
    let task = helped.then(|| spawn(&node, |node: &Node, _| node.run_task(), 0));
    let peer = spawn(
        &node,
        |node: &Node, _| {
            [0, 1, 2, TASK, 0, 1].into_iter().for_each(|to| node.net.arrive(to));
            node.handle(&[2], None, &mut Todo::default());
        },
        0,
    );
    let waits = |node: &Node, me| {
        node.wait(me);
        node.wait(me);
    };
    let threads = [0, 1, 2].map(|me| spawn(&node, waits, me));
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    peer.join().unwrap();
    task.into_iter().for_each(|task| task.join().unwrap());
    node.lock().stop = true;
    node.net.kick_helper();
    helper.into_iter().for_each(|helper| helper.join().unwrap());
}

#[test]
fn every_message_ends_its_wait() {
    check(|| waits(Mistake::None, false));
}

#[test]
fn every_message_ends_its_wait_beside_a_background_thread_and_a_task() {
    check(|| waits(Mistake::None, true));
}

#[test]
#[should_panic(expected = "deadlock")]
fn a_thread_that_registers_after_unlocking_is_found() {
    check(|| waits(Mistake::RegistersLate, false));
}

#[test]
#[should_panic(expected = "deadlock")]
fn a_lead_that_is_left_in_silence_is_found() {
    check(|| waits(Mistake::LeavesInSilence, false));
}

#[test]
#[should_panic(expected = "deadlock")]
fn a_thread_that_keeps_the_lead_it_was_woken_for_is_found() {
    check(|| waits(Mistake::KeepsLead, false));
}

#[test]
#[should_panic(expected = "deadlock")]
fn a_leader_that_sleeps_past_its_message_is_found() {
    check(|| waits(Mistake::LetsLeaderSleep, false));
}

#[test]
#[should_panic(expected = "deadlock")]
fn a_background_thread_that_is_not_told_is_found() {
    check(|| waits(Mistake::ForgetsTask, true));
}
