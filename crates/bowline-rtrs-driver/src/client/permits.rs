//! The queue of threads and tasks that wait for permits, first come, first served [RS-26].
//!
//! ```text
//!   no free permit ──> waiting ── a permit is free, first in line ──> assigned, woken ──> takes it
//!                        └── cancelled, or the session ends ──────────────┘ goes to the next one
//! ```
//! A returned permit is assigned to the first waiter before any other thread can take it. So a
//! later caller cannot overtake a waiter, and a task that is woken but never polled does not block
//! the waiters behind it.

use core::cell::RefCell;
use core::task::Waker;
use std::collections::VecDeque;
use std::thread::Thread;

use bowline_rtrs::client::{Permit, PermitKind, Session as Core};
use bowline_verbs::catch_callback_panic;

use super::state::Finished;

/// The thread or task to wake.
#[derive(Debug)]
pub(super) enum WakeTarget {
    Thread(Thread),
    Task(Waker),
}

impl WakeTarget {
    /// Call without locks held: a waker is code of the program.
    pub(super) fn wake(self) {
        match self {
            Self::Thread(thread) => thread.unpark(),
            Self::Task(waker) => call(waker),
        }
    }

    /// Whether this is the calling thread.
    pub(super) fn is_me(&self) -> bool {
        matches!(self, Self::Thread(thread) if thread.id() == std::thread::current().id())
    }
}

thread_local! {
    /// Wakers that this thread will call when the one it is calling returns.
    static NEXT: RefCell<Option<VecDeque<Waker>>> = const { RefCell::new(None) };
}

/// Calls a waker. The waker may make this thread wake further tasks, whose wakers may do the same.
/// They are queued and called one after the other, not recursively, since their number has no
/// bound.
fn call(waker: Waker) {
    let mut next = Some(waker);
    // In a thread that is ending the queue no longer exists, and wakers are called recursively.
    let _ = NEXT.try_with(|list| match &mut *list.borrow_mut() {
        Some(list) => list.extend(next.take()),
        list => *list = Some(VecDeque::new()),
    });
    while let Some(waker) = next {
        // The panic hook has already reported a panic.
        let _ = catch_callback_panic(move || waker.wake());
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

/// Identifies a waiter within its session; later waiters have greater ids.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct WaiterId(u64);

struct Waiter {
    waiter: WaiterId,
    kind: PermitKind,
    cpu: u16,
    target: WakeTarget,
}

/// All waiters of a session, and the permits assigned to them.
#[derive(Default)]
pub(super) struct PermitQueue {
    /// Two queues ordered by id: waiters for IO permits, and waiters for service permits, which may
    /// also take the permit that is reserved from IO [RT-37].
    waiting: [VecDeque<Waiter>; 2],
    /// Permits assigned to waiters that have not collected them yet.
    assigned: Vec<(WaiterId, Permit)>,
    next_id: u64,
}

impl PermitQueue {
    /// Whether anyone waits for a permit of this kind.
    pub(super) fn has_waiters(&self, kind: PermitKind) -> bool {
        !self.waiting[queue(kind)].is_empty()
    }

    /// Whether anyone waits for a permit of any kind.
    pub(super) fn has_any_waiters(&self) -> bool {
        self.waiting.iter().any(|queue| !queue.is_empty())
    }

    /// Adds a waiter at the end. The core must have just refused a permit of this kind, or another
    /// waiter must be queued for one: only then does the core announce the next free permit.
    pub(super) fn enqueue(&mut self, kind: PermitKind, cpu: u16, target: WakeTarget) -> WaiterId {
        let waiter = WaiterId(self.next_id);
        self.next_id += 1;
        self.waiting[queue(kind)].push_back(Waiter { waiter, kind, cpu, target });
        waiter
    }

    /// Assigns free permits to those who have waited longest. Asks the core until it refuses one,
    /// because only then does it announce the next free permit.
    pub(super) fn assign(&mut self, core: &mut Core, out: &mut Finished) {
        let mut refused = [false; 2];
        // The waiter with the smallest id is served first, whichever queue it is in. Apart from the
        // reserved permit both queues batch_limit all permits.
        let next = |waiting: &[VecDeque<Waiter>; 2], refused: [bool; 2]| {
            let queues = waiting.iter().enumerate().filter(|(queue, _)| !refused[*queue]);
            queues.filter_map(|(queue, all)| Some((all.front()?.waiter, queue))).min()
        };
        while let Some((waiter, queue)) = next(&self.waiting, refused) {
            let waiting = &mut self.waiting[queue];
            let permit = waiting.front().and_then(|first| core.get_permit(first.kind, first.cpu));
            match permit {
                Some(permit) => {
                    self.assigned.push((waiter, permit));
                    out.wake.extend(waiting.pop_front().map(|first| first.target));
                }
                None => refused[queue] = true,
            }
        }
    }

    /// Returns the permit assigned to a waiter, once.
    pub(super) fn take(&mut self, waiter: WaiterId) -> Option<Permit> {
        let at = self.assigned.iter().position(|(owner, _)| *owner == waiter)?;
        Some(self.assigned.remove(at).1)
    }

    /// Replaces the thread or task to wake for a waiter. Returns the former one, to be dropped
    /// without the lock.
    #[must_use]
    pub(super) fn replace(&mut self, waiter: WaiterId, target: WakeTarget) -> Option<WakeTarget> {
        let (queue, at) = self.find(waiter)?;
        let waiter = self.waiting[queue].get_mut(at)?;
        Some(std::mem::replace(&mut waiter.target, target))
    }

    /// Removes a waiter to which no permit was assigned. Returns its wake target, to be dropped
    /// without the lock.
    #[must_use]
    pub(super) fn remove(&mut self, waiter: WaiterId) -> Option<WakeTarget> {
        let (queue, at) = self.find(waiter)?;
        self.waiting[queue].remove(at).map(|waiter| waiter.target)
    }

    /// Ends all waiting when the session is over: assigned permits go back, and everyone is woken.
    pub(super) fn end(&mut self, core: &mut Core, out: &mut Finished) {
        self.assigned.drain(..).for_each(|(_, permit)| core.put_permit(permit));
        let all = self.waiting.iter_mut().flat_map(|queue| queue.drain(..));
        out.wake.extend(all.map(|waiter| waiter.target));
    }

    fn find(&self, waiter: WaiterId) -> Option<(usize, usize)> {
        let find =
            |queue: &VecDeque<Waiter>| queue.binary_search_by_key(&waiter, |w| w.waiter).ok();
        self.waiting.iter().enumerate().find_map(|(at, queue)| Some((at, find(queue)?)))
    }
}

/// Index of the queue for permits of this kind.
fn queue(kind: PermitKind) -> usize {
    usize::from(kind == PermitKind::Service)
}
