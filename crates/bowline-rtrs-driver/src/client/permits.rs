//! Who waits for permits: threads and tasks, in the order in which they came [RS-26].
//!
//! ```text
//!   none is free ──> waits ── one is, and it is the first ──> given, woken ──> takes it
//!                      └── it goes, or the session ends ───────────┘ the next one is given it
//! ```
//! A permit that comes back is given away before anybody else can take it, so that who comes later
//! does not pass by, and so that a task that is woken and never looks loses nobody's turn.

use core::cell::RefCell;
use core::task::Waker;
use std::collections::VecDeque;
use std::thread::Thread;

use bowline_rtrs::client::{Permit, PermitKind, Session as Core};
use bowline_verbs::contain;

use super::state::Finished;

/// Who is woken.
#[derive(Debug)]
pub(super) enum Sleeper {
    Thread(Thread),
    Task(Waker),
}

impl Sleeper {
    /// Not while anything is locked: a waker is the program's.
    pub(super) fn wake(self) {
        match self {
            Self::Thread(thread) => thread.unpark(),
            Self::Task(waker) => call(waker),
        }
    }

    /// It is the thread that asks.
    pub(super) fn is_me(&self) -> bool {
        matches!(self, Self::Thread(thread) if thread.id() == std::thread::current().id())
    }
}

thread_local! {
    /// Wakers that this thread will call when the one it is calling returns.
    static NEXT: RefCell<Option<VecDeque<Waker>>> = const { RefCell::new(None) };
}

/// Calls a waker. What that does may wake others, who may do the same: they are called after it,
/// not from within, since there may be any number of them.
fn call(waker: Waker) {
    let mut next = Some(waker);
    // Without the list, in a thread that is ending, they are called from within.
    let _ = NEXT.try_with(|list| match &mut *list.borrow_mut() {
        Some(list) => list.extend(next.take()),
        list => *list = Some(VecDeque::new()),
    });
    while let Some(waker) = next {
        // A panic was printed when it happened.
        let _ = contain(move || waker.wake());
        let take = NEXT.try_with(|list| {
            let mut list = list.borrow_mut();
            let next = list.as_mut().and_then(VecDeque::pop_front);
            if next.is_none() {
                *list = None;
            }
            next
        });
        next = take.ok().flatten();
    }
}

/// Tells one who waits from all others of its session; later ones are greater.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Place(u64);

struct Waiter {
    place: Place,
    kind: PermitKind,
    cpu: u16,
    sleeper: Sleeper,
}

/// All who wait.
#[derive(Default)]
pub(super) struct Queue {
    /// By place; those for IO, and those for service messages, who may have the permit that is kept
    /// from IO [RT-37].
    waiting: [VecDeque<Waiter>; 2],
    /// Permits whose new owners have not taken them yet.
    given: Vec<(Place, Permit)>,
    begun: u64,
}

impl Queue {
    /// Somebody waits for a permit of this kind.
    pub(super) fn is_awaited(&self, kind: PermitKind) -> bool {
        !self.waiting[line(kind)].is_empty()
    }

    /// Somebody waits for a permit of any kind.
    pub(super) fn is_any_awaited(&self) -> bool {
        self.waiting.iter().any(|line| !line.is_empty())
    }

    /// Takes the last place. The core has just refused a permit of this kind, or somebody waits for
    /// one: then it tells of the next that is free.
    pub(super) fn join(&mut self, kind: PermitKind, cpu: u16, sleeper: Sleeper) -> Place {
        let place = Place(self.begun);
        self.begun += 1;
        self.waiting[line(kind)].push_back(Waiter { place, kind, cpu, sleeper });
        place
    }

    /// Gives free permits to those who have waited longest. The core is asked until it refuses one,
    /// so that it tells of the next.
    pub(super) fn give(&mut self, core: &mut Core, out: &mut Finished) {
        let mut refused = [false; 2];
        // Who came first is asked for first, in whichever line: without a permit that is kept, all
        // are the same to both.
        let next = |waiting: &[VecDeque<Waiter>; 2], refused: [bool; 2]| {
            let lines = waiting.iter().enumerate().filter(|(line, _)| !refused[*line]);
            lines.filter_map(|(line, all)| Some((all.front()?.place, line))).min()
        };
        while let Some((place, line)) = next(&self.waiting, refused) {
            let waiting = &mut self.waiting[line];
            let permit = waiting.front().and_then(|first| core.get_permit(first.kind, first.cpu));
            match permit {
                Some(permit) => {
                    self.given.push((place, permit));
                    out.wake.extend(waiting.pop_front().map(|first| first.sleeper));
                }
                None => refused[line] = true,
            }
        }
    }

    /// What a place was given, once.
    pub(super) fn take(&mut self, place: Place) -> Option<Permit> {
        let at = self.given.iter().position(|(owner, _)| *owner == place)?;
        Some(self.given.remove(at).1)
    }

    /// Another one is woken for this place from now on. Returns who is not: to be dropped without
    /// the lock.
    #[must_use]
    pub(super) fn replace(&mut self, place: Place, sleeper: Sleeper) -> Option<Sleeper> {
        let (line, at) = self.find(place)?;
        let waiter = self.waiting[line].get_mut(at)?;
        Some(std::mem::replace(&mut waiter.sleeper, sleeper))
    }

    /// Gives up a place that was given nothing. Returns who would have been woken: to be dropped
    /// without the lock.
    #[must_use]
    pub(super) fn leave(&mut self, place: Place) -> Option<Sleeper> {
        let (line, at) = self.find(place)?;
        self.waiting[line].remove(at).map(|waiter| waiter.sleeper)
    }

    /// The session is over: what was given and not taken goes back, and everybody is woken.
    pub(super) fn end(&mut self, core: &mut Core, out: &mut Finished) {
        self.given.drain(..).for_each(|(_, permit)| core.put_permit(permit));
        let all = self.waiting.iter_mut().flat_map(|line| line.drain(..));
        out.wake.extend(all.map(|waiter| waiter.sleeper));
    }

    fn find(&self, place: Place) -> Option<(usize, usize)> {
        let find = |line: &VecDeque<Waiter>| line.binary_search_by_key(&place, |w| w.place).ok();
        self.waiting.iter().enumerate().find_map(|(at, line)| Some((at, find(line)?)))
    }
}

/// In which line one waits.
fn line(kind: PermitKind) -> usize {
    usize::from(kind == PermitKind::Service)
}
