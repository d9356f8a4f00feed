//! The data kept beside the core under its lock: waiters for requests, and undelivered events.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::Arc;
use std::thread::Thread;

use bowline_rtrs::bind::Binding;
use bowline_rtrs::client::{
    Completed, Event, PathAddr, PathState, Permit, PermitKind, Session as Core,
};
use bowline_rtrs::{Errno, PathId};
use bowline_verbs::catch_callback_panic;
use bowline_wait::Followers;

use super::calls::{Calls, Until};
use super::permits::{PermitQueue, WaiterId, WakeTarget};
use crate::Error;
use crate::executor::CoreState;

/// A callback for the results of requests.
pub trait Completer: Send + Sync {
    /// Called when requests have ended, by the thread that took the completions, without locks
    /// held. It must not block. It may submit requests, which go out together when it returns. A
    /// panic is reported on standard error and ends there: the thread goes on, and other completers
    /// are called.
    fn completed(&self, done: &[Completed]);
}

/// The completer to call at the end of a request, and the tag to give it.
#[derive(Clone)]
pub struct Done {
    /// The completer to call.
    pub to: Arc<dyn Completer>,
    /// Comes back in [`Completed::tag`].
    pub tag: u64,
}

impl core::fmt::Debug for Done {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Done").field("tag", &self.tag).finish_non_exhaustive()
    }
}

/// A change of a session's connectivity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkEv {
    /// The last path is lost [RS-17].
    Disconnected,
    /// The first path is back [RS-16].
    Reconnected,
}

/// A change of a path's state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PathEv {
    /// The path.
    pub id: PathId,
    /// Local address.
    pub src: SocketAddr,
    /// The server's address.
    pub dst: SocketAddr,
    /// The new state.
    pub state: PathState,
}

impl PathEv {
    /// Makes one, for tests of programs that are told of such events.
    pub const fn new(id: PathId, src: SocketAddr, dst: SocketAddr, state: PathState) -> Self {
        Self { id, src, dst, state }
    }
}

/// An event for the program's listeners; they are called in order.
pub(super) enum SessionEvent {
    Link(LinkEv),
    Path(PathEv),
}

/// The operation named in errors.
const PERMIT: &str = "waiting for a permit";

/// A request in flight, or its result. The core's tag for the request is the slot's index.
enum Slot {
    /// Unused; holds the index of the next free slot.
    Free(usize),
    /// A completer is to be called.
    Callback(Done),
    /// A thread waits for the result.
    Awaited(Thread),
    /// The result, which the waiting thread has not collected yet.
    Ended(i32),
}

/// All requests in flight.
pub(super) struct Slots {
    list: Vec<Slot>,
    free: usize,
    /// Number of slots that are [`Slot::Callback`].
    callbacks: usize,
}

/// End of the list of free slots.
const NONE: usize = usize::MAX;

impl Slots {
    fn new() -> Self {
        Self { list: Vec::new(), free: NONE, callbacks: 0 }
    }

    fn take(&mut self, slot: Slot) -> u64 {
        let at = match self.list.get_mut(self.free) {
            Some(free) => {
                let at = self.free;
                self.free = if let Slot::Free(next) = free { *next } else { NONE };
                *free = slot;
                at
            }
            None => {
                self.list.push(slot);
                self.list.len() - 1
            }
        };
        at as u64
    }

    /// Takes a slot for a request whose end is reported to a completer.
    pub(super) fn register_completer(&mut self, done: Done) -> u64 {
        self.callbacks += 1;
        self.take(Slot::Callback(done))
    }

    /// Whether requests are in flight whose end is reported to completers.
    pub(super) const fn has_completers(&self) -> bool {
        self.callbacks > 0
    }

    /// Takes a slot for a request for which a thread waits.
    pub(super) fn register_thread(&mut self, thread: Thread) -> u64 {
        self.take(Slot::Awaited(thread))
    }

    /// Frees a slot. Returns the completer it held, which is the program's: to be dropped without
    /// the lock, because its destructor may call the session.
    #[must_use]
    pub(super) fn free(&mut self, at: u64) -> Option<Done> {
        let slot = self.list.get_mut(at as usize)?;
        let held = std::mem::replace(slot, Slot::Free(self.free));
        self.free = at as usize;
        let Slot::Callback(done) = held else { return None };
        self.callbacks -= 1;
        Some(done)
    }

    /// Returns the result of a request for which a thread waits, once; frees its slot.
    pub(super) fn ended(&mut self, at: u64) -> Option<i32> {
        let Some(Slot::Ended(errno)) = self.list.get(at as usize) else {
            return None;
        };
        let errno = *errno;
        // The slot holds no completer any more.
        let _ = self.free(at);
        Some(errno)
    }

    /// Records the end of a request.
    fn end(&mut self, at: u64, errno: i32, out: &mut Finished) {
        let Some(slot) = self.list.get_mut(at as usize) else {
            return;
        };
        match std::mem::replace(slot, Slot::Ended(errno)) {
            Slot::Callback(done) => {
                self.callbacks -= 1;
                out.results.push((done.to, Completed { tag: done.tag, errno }));
                // The slot has just been emptied.
                let _ = self.free(at);
            }
            Slot::Awaited(thread) => out.wake.push(WakeTarget::Thread(thread)),
            other => *slot = other,
        }
    }

    /// Ends all requests, because no completion can come any more.
    fn end_all(&mut self, errno: i32, out: &mut Finished) {
        for at in 0..self.list.len() {
            self.end(at as u64, errno, out);
        }
    }
}

/// Callbacks and wake-ups that are to be done without the lock.
#[derive(Default)]
pub(super) struct Finished {
    pub(super) results: Vec<(Arc<dyn Completer>, Completed)>,
    pub(super) wake: Vec<WakeTarget>,
    /// Number of requests that have ended.
    pub(super) ended: u64,
    /// Reused buffer for results that go to the same completer.
    pub(super) group: Vec<Completed>,
}

impl Finished {
    pub(super) fn is_empty(&self) -> bool {
        self.results.is_empty() && self.wake.is_empty()
    }

    /// Calls all completers.
    pub(super) fn call_completers(&mut self) {
        while let Some((to, _)) = self.results.first() {
            let to = Arc::clone(to);
            let same = self.results.iter().take_while(|(other, _)| Arc::ptr_eq(&to, other)).count();
            self.group.clear();
            self.group.extend(self.results.drain(..same).map(|(_, done)| done));
            let group = &self.group;
            // If this is the last reference to the completer, it is dropped in there too.
            catch_callback_panic(move || to.completed(group));
        }
    }
}

/// The core, and the data kept beside it.
pub(super) struct State {
    pub(super) core: Core,
    pub(super) slots: Slots,
    completed: Vec<Completed>,
    pub(super) followers: Followers,
    pub(super) permits: PermitQueue,
    pub(super) opened: Option<Result<(), Errno>>,
    pub(super) closed: bool,
    pub(super) calls: Calls,
    pub(super) events: VecDeque<SessionEvent>,
    /// A thread is delivering `events`.
    pub(super) delivering: bool,
}

impl CoreState for State {
    type Core = Core;

    fn core(&mut self) -> &mut Core {
        &mut self.core
    }

    fn binding(ports: usize) -> Binding {
        Binding::new(ports)
    }
}

impl State {
    pub(super) fn new(core: Core) -> Self {
        Self {
            core,
            slots: Slots::new(),
            completed: Vec::new(),
            followers: Followers::default(),
            permits: PermitQueue::default(),
            opened: None,
            closed: false,
            calls: Calls::default(),
            events: VecDeque::new(),
            delivering: false,
        }
    }

    /// Takes what the core has to tell. Tells whether it concerns those who wait for calls to end.
    pub(super) fn collect(&mut self, out: &mut Finished) -> bool {
        if self.is_over() {
            self.permits.end(&mut self.core, out);
        }
        self.core.take_completed(&mut self.completed);
        if !self.completed.is_empty() {
            out.ended += self.completed.len() as u64;
            for done in self.completed.drain(..) {
                self.slots.end(done.tag, done.errno, out);
            }
        }
        let (mut control, mut permits) = (false, false);
        while let Some(event) = self.core.poll_event() {
            control |= !matches!(event, Event::PermitFree);
            match event {
                Event::Opened(result) => self.opened = Some(result),
                Event::Closed => self.closed = true,
                Event::Disconnected => {
                    self.events.push_back(SessionEvent::Link(LinkEv::Disconnected));
                }
                Event::Reconnected => {
                    self.events.push_back(SessionEvent::Link(LinkEv::Reconnected));
                }
                Event::PathAdded { path, result } => self.calls.end(path, Until::Added, result),
                Event::PathReconnected { path, result } => {
                    self.calls.end(path, Until::Reconnected, result);
                }
                Event::PathClosed { path } => self.calls.end(path, Until::Closed, Ok(())),
                Event::PathRemoved { path } => self.calls.end(path, Until::Removed, Ok(())),
                Event::PathState { path: id, addr: PathAddr { src, dst, .. }, state } => {
                    self.events.push_back(SessionEvent::Path(PathEv { id, src, dst, state }));
                }
                Event::PermitFree => permits = true,
            }
        }
        if permits {
            self.permits.assign(&mut self.core, out);
        }
        control
    }

    /// The session is closed, or being closed: there are no permits any more.
    fn is_over(&self) -> bool {
        self.closed || !self.core.is_open()
    }

    /// Takes a permit; `None` when there is none, or others have waited for it.
    pub(super) fn take_permit(
        &mut self,
        kind: PermitKind,
        cpu: u16,
    ) -> Option<Result<Permit, Error>> {
        if self.is_over() {
            return Some(Err(Error::closed(PERMIT)));
        }
        if self.permits.has_waiters(kind) { None } else { self.core.get_permit(kind, cpu).map(Ok) }
    }

    /// What has become of a waiter; `None` while it waits.
    pub(super) fn outcome(&mut self, waiter: WaiterId) -> Option<Result<Permit, Error>> {
        match self.permits.take(waiter) {
            Some(permit) => Some(Ok(permit)),
            None => self.is_over().then_some(Err(Error::closed(PERMIT))),
        }
    }

    /// Nothing works any more: the session has ended, or its last device is gone.
    pub(super) fn give_up(&mut self, out: &mut Finished) {
        self.closed = true;
        self.permits.end(&mut self.core, out);
        self.opened.get_or_insert(Err(Errno::ENODEV));
        self.slots.end_all(Errno::ENODEV.neg(), out);
        out.wake.extend(self.followers.threads().cloned().map(WakeTarget::Thread));
    }
}
