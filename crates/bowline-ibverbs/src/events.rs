//! Events behind a descriptor that programs read, poll and set to non-blocking mode.

use core::ffi::c_int;
use std::collections::VecDeque;
use std::io::IoSliceMut;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use rustix::event::{EventfdFlags, eventfd};
use rustix::io::{Errno, ReadWriteFlags, preadv2};

/// A descriptor without positions.
const AT_ONCE: u64 = u64::MAX;

/// Locks what a thread that has panicked may have left: all here is whole between two statements.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Events that wait to be read.
#[derive(Debug)]
pub(crate) struct Events<T> {
    /// Counts them. It can be read while there are any.
    count: OwnedFd,
    queue: Mutex<VecDeque<T>>,
}

impl<T> Events<T> {
    pub(crate) fn new() -> Result<Self, Errno> {
        let count = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::SEMAPHORE)?;
        Ok(Self { count, queue: Mutex::default() })
    }

    pub(crate) fn fd(&self) -> c_int {
        self.count.as_raw_fd()
    }

    pub(crate) fn push(&self, event: T) {
        lock(&self.queue).push_back(event);
        // The number is far from its end: an event takes memory.
        let _ = rustix::io::write(&self.count, &1_u64.to_ne_bytes());
    }

    /// Returns the next event; waits for it unless the program has set the descriptor not to.
    pub(crate) fn next(&self) -> Result<T, Errno> {
        loop {
            let mut one = [0; 8];
            rustix::io::read(&self.count, &mut one[..])?;
            // What was taken back is counted still.
            if let Some(event) = lock(&self.queue).pop_front() {
                return Ok(event);
            }
        }
    }

    /// Moves events that nobody has read to another descriptor.
    pub(crate) fn move_to(&self, other: &Self, is_meant: impl Fn(&T) -> bool) {
        let mut queue = lock(&self.queue);
        let (moved, stays) = queue.drain(..).partition::<VecDeque<T>, _>(is_meant);
        *queue = stays;
        self.uncount(moved.len());
        drop(queue);
        moved.into_iter().for_each(|event| other.push(event));
    }

    /// Takes back events that nobody has read; returns how many.
    pub(crate) fn take_back(&self, is_gone: impl Fn(&T) -> bool) -> u32 {
        let mut queue = lock(&self.queue);
        let before = queue.len();
        queue.retain(|event| !is_gone(event));
        let gone = before - queue.len();
        self.uncount(gone);
        gone as u32 // an event takes more than a byte
    }

    /// Removes events from the count, which another thread may have taken for itself: it finds no
    /// event then, and waits again.
    fn uncount(&self, number: usize) {
        for _ in 0..number {
            let mut one = [0; 8];
            let pieces = &mut [IoSliceMut::new(&mut one)];
            // Without waiting, whatever the program has set.
            if preadv2(&self.count, pieces, AT_ONCE, ReadWriteFlags::NOWAIT).is_err() {
                break;
            }
        }
    }
}

/// Events of an object that are to be read and acknowledged, or taken back, before it may go.
#[derive(Debug, Default)]
pub(crate) struct Unacknowledged {
    count: Mutex<u64>,
    none: Condvar,
}

impl Unacknowledged {
    pub(crate) fn add(&self) {
        *lock(&self.count) += 1;
    }

    pub(crate) fn acknowledge(&self, number: u32) {
        let mut count = lock(&self.count);
        *count = count.saturating_sub(number.into());
        if *count == 0 {
            self.none.notify_all();
        }
    }

    pub(crate) fn wait_for_all(&self) {
        let mut count = lock(&self.count);
        while *count > 0 {
            count = self.none.wait(count).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

#[cfg(test)]
mod tests {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};

    use super::*;

    fn can_be_read(events: &Events<i32>) -> bool {
        let mut fds = [PollFd::new(&events.count, PollFlags::IN)];
        poll(&mut fds, Some(&Timespec::default())).unwrap() == 1
    }

    #[test]
    fn events_come_in_order_and_without_those_that_were_taken_back() {
        let events = Events::new().unwrap();
        (1..=4).for_each(|n| events.push(n));
        assert_eq!(events.take_back(|n| n % 2 == 1), 2);
        assert_eq!((events.next(), events.next()), (Ok(2), Ok(4)));
        assert!(!can_be_read(&events), "nothing is left of those");
        events.push(5);
        assert!(can_be_read(&events));
        let other = Events::new().unwrap();
        events.move_to(&other, |_| true);
        assert_eq!((can_be_read(&events), can_be_read(&other)), (false, true));
        assert_eq!(other.next(), Ok(5));
        let flags = fcntl_getfl(&events.count).unwrap();
        fcntl_setfl(&events.count, flags | OFlags::NONBLOCK).unwrap();
        assert_eq!(events.next(), Err(Errno::AGAIN));
    }

    #[test]
    fn what_was_read_is_waited_for() {
        let events = Unacknowledged::default();
        events.wait_for_all();
        events.add();
        events.add();
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| events.wait_for_all());
            events.acknowledge(1);
            assert!(!waits.is_finished());
            events.acknowledge(9);
        });
    }
}
