//! What happens between the steps of programs and node: a process may end, and a store be
//! forgotten.

use std::cell::Cell;
use std::sync::atomic::Ordering;

use shuttle::thread::{self, ThreadId};

/// The node may look at what belongs to programs, to check it.
pub(crate) const LOOKS: bool = true;

thread_local! {
    /// The thread whose process is killed, and after how many steps.
    static KILLED: Cell<Option<(ThreadId, usize)>> = const { Cell::new(None) };
    /// Where no store is seen.
    static FORGOTTEN: Cell<Option<usize>> = const { Cell::new(None) };
}

/// From now on, stores at a place are forgotten. Nobody is killed.
pub(crate) fn forget(at: Option<usize>) {
    KILLED.set(None);
    FORGOTTEN.set(at);
}

/// The calling thread is killed after so many steps. It goes on to the end of its call, but nobody
/// sees what it does.
pub(crate) fn die_after(steps: usize) {
    KILLED.set(Some((thread::current().id(), steps)));
}

fn left() -> Option<usize> {
    let (killed, left) = KILLED.get()?;
    (killed == thread::current().id()).then_some(left)
}

pub(crate) fn is_dead() -> bool {
    left() == Some(0)
}

/// Tells whether the next step of the calling thread takes place.
pub(crate) fn acts() -> bool {
    let Some(left) = left() else { return true };
    KILLED.set(Some((thread::current().id(), left.saturating_sub(1))));
    left > 0
}

pub(crate) fn forgets(at: usize) -> bool {
    FORGOTTEN.get() == Some(at)
}

pub(crate) fn ordered<T>(order: Ordering, step: impl FnOnce(Ordering) -> T) -> T {
    step(order)
}

pub(crate) fn fence(order: Ordering) {
    shuttle::sync::atomic::fence(order);
}
