//! A session of RTRS: the loops are those that the driver runs.

use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::time::Duration;

use shuttle::sync::{Condvar, Mutex, MutexGuard};
use shuttle::thread::{self, Thread};

use crate::check;
use crate::device_leads::{DeviceGone, DeviceLeads, Devices, WaitFor, Waits};
use crate::followers::Followers;
use crate::net::{Net, Sleeper};

#[derive(Clone, Copy, PartialEq, Eq)]
enum Mistake {
    None,
    /// A thread becomes a follower after it released the lock under which it looked.
    FollowsLate,
    /// Nobody knows the background thread, to wake it.
    HidesHelper,
    /// The thread that handles a completion does not wake the one that waits for it.
    WakesNobody,
    /// The end of requests is counted, but nobody that waits for any is woken.
    CountsInSilence,
}

/// Whose request it is.
enum Owner {
    Thread(Thread),
    Callback,
}

#[derive(Default)]
struct State {
    followers: Followers,
    requests: Vec<Option<Owner>>,
    callbacks: usize,
    over: bool,
}

struct Session {
    leads: DeviceLeads<()>,
    nets: Vec<Net>,
    state: Mutex<State>,
    /// Tells that all callbacks have been called.
    called: Condvar,
    mistake: Mistake,
}

/// The lock. With [`Mistake::FollowsLate`], a thread becomes a follower after it is released.
struct Guard<'a> {
    session: &'a Session,
    state: Option<MutexGuard<'a, State>>,
    followers: usize,
}

impl Deref for Guard<'_> {
    type Target = State;

    fn deref(&self) -> &State {
        self.state.as_ref().unwrap()
    }
}

impl DerefMut for Guard<'_> {
    fn deref_mut(&mut self) -> &mut State {
        self.state.as_mut().unwrap()
    }
}

impl Drop for Guard<'_> {
    fn drop(&mut self) {
        let late = self.session.mistake == Mistake::FollowsLate;
        if late && self.followers().0.len() > self.followers {
            let me = self.followers().pop().unwrap();
            self.state = None;
            self.session.state.lock().unwrap().followers.0.push(me);
        }
    }
}

impl Guard<'_> {
    fn followers(&mut self) -> &mut Followers {
        &mut self.state.as_mut().unwrap().followers
    }
}

impl Devices for Session {
    type Buffers = ();
    type State = State;

    fn lock(&self) -> impl DerefMut<Target = State> {
        let state = self.state.lock().unwrap();
        let followers = state.followers.0.len();
        Guard { session: self, state: Some(state), followers }
    }

    fn followers(state: &mut State) -> &mut Followers {
        &mut state.followers
    }

    fn has_callbacks(state: &State) -> bool {
        state.callbacks > 0
    }

    fn is_over(&self, state: &State) -> bool {
        state.over
    }

    fn is_gone(&self, _: usize) -> bool {
        self.state.lock().unwrap().over
    }

    fn drive(&self, device: usize, (): &mut ()) -> usize {
        let done = self.nets[device].read();
        let mut wake = Vec::new();
        let mut state = self.state.lock().unwrap();
        for request in &done {
            match state.requests[*request].take().expect("a request ends once") {
                Owner::Callback => state.callbacks -= 1,
                Owner::Thread(thread) => wake.push(thread),
            }
        }
        let all_called = state.callbacks == 0;
        drop(state);
        if self.mistake != Mistake::CountsInSilence {
            self.leads.add_ended(self, done.len() as u64);
        }
        if self.mistake != Mistake::WakesNobody {
            wake.iter().for_each(Thread::unpark);
        }
        if all_called || !done.is_empty() {
            self.called.notify_all();
        }
        done.len()
    }

    fn sleep(&self, device: usize, _: Duration) -> Result<(), DeviceGone> {
        self.nets[device].sleep(Sleeper::HelperThatLeads);
        Ok(())
    }

    fn device_gone(&self, _: usize) {
        unreachable!("devices stay");
    }
}

impl Session {
    fn new(devices: usize, mistake: Mistake) -> Arc<Self> {
        Arc::new(Self {
            leads: DeviceLeads::new(devices),
            nets: (0..devices).map(|_| Net::default()).collect(),
            state: Mutex::default(),
            called: Condvar::new(),
            mistake,
        })
    }

    fn submit(&self, owner: Owner) -> usize {
        let mut state = self.state.lock().unwrap();
        state.callbacks += usize::from(matches!(owner, Owner::Callback));
        state.requests.push(Some(owner));
        state.requests.len() - 1
    }

    /// Submits a request and waits for its end.
    fn run_one(self: &Arc<Self>, waits: Waits) {
        let request = self.submit(Owner::Thread(thread::current()));
        let peer = self.answer(request);
        let ended = |state: &mut State| state.requests[request].is_none().then_some(());
        self.leads.wait(&**self, waits, WaitFor::Own, None, ended).expect("no time limit");
        peer.join().unwrap();
    }

    /// The peer answers at some time.
    fn answer(self: &Arc<Self>, request: usize) -> thread::JoinHandle<()> {
        let session = Arc::clone(self);
        thread::spawn(move || session.nets[request % session.nets.len()].arrive(request))
    }

    fn start_helpers(self: &Arc<Self>) -> Vec<thread::JoinHandle<()>> {
        let start = |device| {
            let session = Arc::clone(self);
            let helper = thread::spawn(move || session.leads.help(&*session, device));
            if self.mistake != Mistake::HidesHelper {
                self.leads.set_helper(device, helper.thread().clone());
            }
            helper
        };
        (0..self.nets.len()).map(start).collect()
    }

    fn end(&self, helpers: Vec<thread::JoinHandle<()>>) {
        self.state.lock().unwrap().over = true;
        self.leads.wake_helpers(self);
        self.nets.iter().for_each(Net::kick_helper);
        helpers.into_iter().for_each(|helper| helper.join().unwrap());
    }

    fn start_threads(
        self: &Arc<Self>,
        count: usize,
        work: fn(&Arc<Self>),
    ) -> Vec<thread::JoinHandle<()>> {
        let start = |_| {
            let session = Arc::clone(self);
            thread::spawn(move || work(&session))
        };
        (0..count).map(start).collect()
    }
}

fn join(threads: Vec<thread::JoinHandle<()>>) {
    threads.into_iter().for_each(|thread| thread.join().unwrap());
}

/// Three threads, two requests each, and no background thread that could take a lead dropped.
fn threads_alone(mistake: Mistake) {
    let session = Session::new(1, mistake);
    join(session.start_threads(3, |session| {
        session.run_one(Waits::Sleeping);
        session.run_one(Waits::Sleeping);
    }));
}

/// Two threads beside a background thread, which may have the lead when they come.
fn threads_and_helper(mistake: Mistake) {
    let session = Session::new(1, mistake);
    let helpers = session.start_helpers();
    join(session.start_threads(2, |session| {
        session.run_one(Waits::Sleeping);
        session.run_one(Waits::Sleeping);
    }));
    session.end(helpers);
}

/// A thread leaves requests to callbacks, waits for one of its own and does not come back.
fn callbacks(mistake: Mistake) {
    let session = Session::new(1, mistake);
    let helpers = session.start_helpers();
    let request = session.submit(Owner::Callback);
    let peer = session.answer(request);
    join(session.start_threads(2, |session| session.run_one(Waits::Sleeping)));
    let mut state = session.state.lock().unwrap();
    while state.callbacks > 0 {
        state = session.called.wait(state).unwrap();
    }
    drop(state);
    peer.join().unwrap();
    session.end(helpers);
}

/// Two threads wait for the end of any request, of which there are three, beside one that waits for
/// its own.
fn any_ended(mistake: Mistake) {
    let session = Session::new(1, mistake);
    let peers = (0..3).map(|_| session.answer(session.submit(Owner::Callback))).collect();
    let mut threads = session.start_threads(2, |session| {
        let mut seen = session.leads.ended();
        while seen < 3 {
            session.leads.wait_ended(&**session, Waits::Sleeping, seen, None);
            seen = session.leads.ended();
        }
    });
    threads.extend(session.start_threads(1, |session| session.run_one(Waits::Sleeping)));
    join(threads);
    join(peers);
}

/// A thread waits for the end of any request, while a background thread may have the lead and keep
/// it.
fn any_ended_beside_helper(mistake: Mistake) {
    let session = Session::new(1, mistake);
    let helpers = session.start_helpers();
    let peer = session.answer(session.submit(Owner::Callback));
    join(session.start_threads(1, |session| {
        while session.leads.ended() == 0 {
            session.leads.wait_ended(&**session, Waits::Sleeping, 0, None);
        }
    }));
    peer.join().unwrap();
    session.end(helpers);
}

/// A thread serves its client until it has no request left: what it submits is left to callbacks.
/// Where another thread takes completions, it sleeps until the client has its answer, and another
/// request.
fn serve(session: &Arc<Session>) {
    for _ in 0..2 {
        let request = session.submit(Owner::Callback);
        let peer = session.answer(request);
        let is_waiting = || session.state.lock().unwrap().requests[request].is_some();
        while is_waiting() {
            // A client that has its answer sends another request, or hangs up: it ends the sleep.
            let sleep = || {
                if is_waiting() {
                    session.nets[0].sleep(Sleeper::Leader);
                }
                Ok(true)
            };
            if session.leads.take_turn(&**session, is_waiting, sleep).is_none() {
                let mut state = session.state.lock().unwrap();
                while state.requests[request].is_some() {
                    state = session.called.wait(state).unwrap();
                }
            }
        }
        session.leads.leave(&**session);
        peer.join().unwrap();
    }
}

/// Two threads that serve clients, beside a background thread, which may have the lead when they
/// come.
fn doors(mistake: Mistake) {
    let session = Session::new(1, mistake);
    let helpers = session.start_helpers();
    join(session.start_threads(2, serve));
    session.end(helpers);
}

/// With two devices, threads that may sleep leave the leads to the background threads.
fn two_devices(mistake: Mistake) {
    let session = Session::new(2, mistake);
    let helpers = session.start_helpers();
    join(session.start_threads(2, |session| {
        session.run_one(Waits::Sleeping);
        session.run_one(Waits::Sleeping);
    }));
    session.end(helpers);
}

#[test]
fn threads_alone_hand_the_lead_on() {
    check(|| threads_alone(Mistake::None));
}

#[test]
fn threads_and_a_background_thread_hand_the_lead_on() {
    check(|| threads_and_helper(Mistake::None));
}

#[test]
fn the_background_thread_takes_what_is_left_to_callbacks() {
    check(|| callbacks(Mistake::None));
}

#[test]
fn who_waits_for_any_request_is_woken_by_each() {
    check(|| any_ended(Mistake::None));
}

#[test]
fn who_waits_for_any_request_is_woken_by_a_background_thread() {
    check(|| any_ended_beside_helper(Mistake::None));
}

#[test]
fn threads_that_serve_clients_take_turns() {
    check(|| doors(Mistake::None));
}

#[test]
fn the_background_threads_of_two_devices_wake_who_waits() {
    check(|| two_devices(Mistake::None));
}

#[test]
#[should_panic(expected = "deadlock")]
fn a_thread_that_follows_after_unlocking_is_found() {
    check(|| threads_alone(Mistake::FollowsLate));
}

#[test]
#[should_panic(expected = "deadlock")]
fn a_background_thread_that_nobody_wakes_is_found() {
    check(|| callbacks(Mistake::HidesHelper));
}

#[test]
#[should_panic(expected = "deadlock")]
fn a_completion_that_wakes_nobody_is_found() {
    check(|| two_devices(Mistake::WakesNobody));
}

#[test]
#[should_panic(expected = "deadlock")]
fn ends_that_are_counted_in_silence_are_found() {
    check(|| any_ended_beside_helper(Mistake::CountsInSilence));
}
