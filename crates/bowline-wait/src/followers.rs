//! Threads that sleep while another one takes completions.

use crate::sync::{Thread, current};

/// A sleeping thread.
#[derive(Debug)]
pub(crate) struct Follower {
    pub(crate) thread: Thread,
    /// The thread waits for any completion, not only for one request's.
    any: bool,
}

/// All of them, under the driver's lock. There are no more than threads of the program.
#[derive(Debug, Default)]
pub struct Followers(pub(crate) Vec<Follower>);

impl Followers {
    /// Adds the calling thread.
    pub(crate) fn add_me(&mut self, any: bool) {
        self.0.push(Follower { thread: current(), any });
    }

    /// Removes the calling thread, if another one has not done so.
    pub(crate) fn remove_me(&mut self) {
        let me = current().id();
        self.0.retain(|follower| follower.thread.id() != me);
    }

    /// Takes the one that came last: its data is most likely still in the cache.
    pub(crate) fn pop(&mut self) -> Option<Follower> {
        self.0.pop()
    }

    /// The threads that wait for any completion, without the calling one.
    pub(crate) fn waiting_for_any(&self) -> impl Iterator<Item = &Thread> {
        let me = current().id();
        let any = self.0.iter().filter(|follower| follower.any);
        any.map(|follower| &follower.thread).filter(move |thread| thread.id() != me)
    }

    /// All threads, to be woken because nothing comes any more.
    pub fn threads(&self) -> impl Iterator<Item = &Thread> {
        self.0.iter().map(|follower| &follower.thread)
    }
}
