//! What is kept beside the core, under its lock: who waits for which request, and what happened.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::Arc;
use std::thread::Thread;

use bowline_rtrs::bind::Binding;
use bowline_rtrs::client::{
    Completed, Event, PathAddr, PathState, Permit, PermitKind, Session as Core,
};
use bowline_rtrs::{Errno, PathId};
use bowline_verbs::contain;

use super::calls::{Calls, Until};
use super::permits::{Place, Queue, Sleeper};
use crate::Error;
use crate::hub::Side;

/// Gets what requests came to.
pub trait Completer: Send + Sync {
    /// Some requests have ended. Called by the thread that took the completions, without locks
    /// held; it must not block, and it may submit requests, which go out together when it returns.
    /// A panic of it is reported on standard error and ends there: the thread goes on, and others
    /// are told.
    fn completed(&self, done: &[Completed]);
}

/// Who is told of the end of a request, and by which tag.
#[derive(Clone)]
pub struct Done {
    /// Who.
    pub to: Arc<dyn Completer>,
    /// Comes back in [`Completed::tag`].
    pub tag: u64,
}

impl core::fmt::Debug for Done {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Done").field("tag", &self.tag).finish_non_exhaustive()
    }
}

/// What happened to a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkEv {
    /// The last path is lost [RS-17].
    Disconnected,
    /// The first path is back [RS-16].
    Reconnected,
}

/// What happened to a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PathEv {
    /// The path.
    pub id: PathId,
    /// Own address.
    pub src: SocketAddr,
    /// The server's.
    pub dst: SocketAddr,
    /// Its state now.
    pub state: PathState,
}

/// What the program is told in order.
pub(super) enum News {
    Link(LinkEv),
    Path(PathEv),
}

/// What fails, for errors.
const PERMIT: &str = "waiting for a permit";

/// A request in flight, or what it came to. The core knows it by its place.
enum Slot {
    /// The next free one.
    Free(usize),
    /// To be told.
    To(Done),
    /// A thread waits.
    Awaited(Thread),
    /// It has ended, and the thread has not looked yet.
    Ended(i32),
}

/// All requests in flight.
pub(super) struct Slots {
    list: Vec<Slot>,
    free: usize,
    /// Those that are [`Slot::To`].
    to: usize,
}

/// No free slot.
const NONE: usize = usize::MAX;

impl Slots {
    fn new() -> Self {
        Self { list: Vec::new(), free: NONE, to: 0 }
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

    /// A program's function is to be told.
    pub(super) fn told(&mut self, done: Done) -> u64 {
        self.to += 1;
        self.take(Slot::To(done))
    }

    /// Tells whether functions of the program are to be told of requests.
    pub(super) const fn has_told(&self) -> bool {
        self.to > 0
    }

    /// A thread waits.
    pub(super) fn awaited(&mut self, thread: Thread) -> u64 {
        self.take(Slot::Awaited(thread))
    }

    /// Frees a slot. What it held is the program's: to be dropped without the lock, since that may
    /// call the session.
    #[must_use]
    pub(super) fn free(&mut self, at: u64) -> Option<Done> {
        let slot = self.list.get_mut(at as usize)?;
        let held = std::mem::replace(slot, Slot::Free(self.free));
        self.free = at as usize;
        let Slot::To(done) = held else { return None };
        self.to -= 1;
        Some(done)
    }

    /// What an awaited request came to, once; frees its slot.
    pub(super) fn ended(&mut self, at: u64) -> Option<i32> {
        let Some(Slot::Ended(errno)) = self.list.get(at as usize) else {
            return None;
        };
        let errno = *errno;
        // It has told its thread already.
        let _ = self.free(at);
        Some(errno)
    }

    /// A request has ended.
    fn end(&mut self, at: u64, errno: i32, out: &mut Finished) {
        let Some(slot) = self.list.get_mut(at as usize) else {
            return;
        };
        match std::mem::replace(slot, Slot::Ended(errno)) {
            Slot::To(done) => {
                self.to -= 1;
                out.told.push((done.to, Completed { tag: done.tag, errno }));
                // Just emptied.
                let _ = self.free(at);
            }
            Slot::Awaited(thread) => out.wake.push(Sleeper::Thread(thread)),
            other => *slot = other,
        }
    }

    /// All requests have ended, because nobody is left to tell.
    fn end_all(&mut self, errno: i32, out: &mut Finished) {
        for at in 0..self.list.len() {
            self.end(at as u64, errno, out);
        }
    }
}

/// What is to be done without the lock.
#[derive(Default)]
pub(super) struct Finished {
    pub(super) told: Vec<(Arc<dyn Completer>, Completed)>,
    pub(super) wake: Vec<Sleeper>,
    /// Requests that have ended.
    pub(super) ended: u64,
    /// Used again for those that are told together.
    pub(super) group: Vec<Completed>,
}

impl Finished {
    pub(super) fn is_empty(&self) -> bool {
        self.told.is_empty() && self.wake.is_empty()
    }

    /// Tells everybody.
    pub(super) fn tell(&mut self) {
        while let Some((to, _)) = self.told.first() {
            let to = Arc::clone(to);
            let same = self.told.iter().take_while(|(other, _)| Arc::ptr_eq(&to, other)).count();
            self.group.clear();
            self.group.extend(self.told.drain(..same).map(|(_, done)| done));
            let group = &self.group;
            // What it was the last to hold is dropped in there too.
            contain(move || to.completed(group));
        }
    }
}

/// A thread that waits and does not take completions itself.
pub(super) struct Follower {
    pub(super) thread: Thread,
    /// Any completion is what it waits for.
    pub(super) any: bool,
}

/// The core, and what is kept beside it.
pub(super) struct State {
    pub(super) core: Core,
    pub(super) slots: Slots,
    completed: Vec<Completed>,
    pub(super) followers: Vec<Follower>,
    pub(super) permits: Queue,
    pub(super) opened: Option<Result<(), Errno>>,
    pub(super) closed: bool,
    pub(super) calls: Calls,
    pub(super) news: VecDeque<News>,
    /// A thread tells `news`.
    pub(super) telling: bool,
}

impl Side for State {
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
            followers: Vec::new(),
            permits: Queue::default(),
            opened: None,
            closed: false,
            calls: Calls::default(),
            news: VecDeque::new(),
            telling: false,
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
                Event::Disconnected => self.news.push_back(News::Link(LinkEv::Disconnected)),
                Event::Reconnected => self.news.push_back(News::Link(LinkEv::Reconnected)),
                Event::PathAdded { path, result } => self.calls.end(path, Until::Added, result),
                Event::PathReconnected { path, result } => {
                    self.calls.end(path, Until::Reconnected, result);
                }
                Event::PathClosed { path } => self.calls.end(path, Until::Closed, Ok(())),
                Event::PathRemoved { path } => self.calls.end(path, Until::Removed, Ok(())),
                Event::PathState { path: id, addr: PathAddr { src, dst, .. }, state } => {
                    self.news.push_back(News::Path(PathEv { id, src, dst, state }));
                }
                Event::PermitFree => permits = true,
            }
        }
        if permits {
            self.permits.give(&mut self.core, out);
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
        if self.permits.is_awaited(kind) { None } else { self.core.get_permit(kind, cpu).map(Ok) }
    }

    /// What has become of a place; `None` while it waits.
    pub(super) fn outcome(&mut self, place: Place) -> Option<Result<Permit, Error>> {
        match self.permits.take(place) {
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
        let followers = self.followers.iter().map(|follower| follower.thread.clone());
        out.wake.extend(followers.map(Sleeper::Thread));
    }
}
