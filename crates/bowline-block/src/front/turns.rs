//! Turns of a thread that serves a client and answers its requests as well.

use std::os::fd::BorrowedFd;

use crate::device::BlockDevice;

/// How often a thread does not ask for a turn after it got none: whoever has the lead keeps it.
const SKIPPED: u32 = 16;

/// The turns of one thread.
#[derive(Debug, Default)]
pub(super) struct Turns {
    /// The thread has answered last, and others rely on it.
    has_turn: bool,
    skip: u32,
}

impl Turns {
    /// Takes a turn, as [`BlockDevice::take_turn`]; `None`: others answer.
    pub(super) fn take(
        &mut self,
        disk: &dyn BlockDevice,
        other: BorrowedFd<'_>,
        is_waiting: &dyn Fn() -> bool,
    ) -> Option<usize> {
        if self.skip > 0 {
            self.skip -= 1;
            // Somebody has to answer what was submitted.
            disk.leave();
            return None;
        }
        let taken = disk.take_turn(other, is_waiting);
        self.has_turn = taken.is_some();
        self.skip = if taken.is_some() { 0 } else { SKIPPED };
        taken
    }

    /// Leaves the answers to others, before the thread waits for something else.
    pub(super) fn leave(&mut self, disk: &dyn BlockDevice) {
        if std::mem::take(&mut self.has_turn) {
            disk.leave();
        }
    }
}
