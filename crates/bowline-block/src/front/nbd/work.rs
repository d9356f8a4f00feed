//! Requests that the disk executes in pieces, one after the other: those that are longer than a
//! piece, and those with a flush at the end.

use std::sync::{Mutex, MutexGuard, PoisonError};

use bowline_rnbd::IoOp;

/// Longest piece of a request in bytes: whole blocks of any disk, and its length fits 32 bits.
const PIECE_MAX: u64 = 1 << 31;

/// What the disk still has to do for a request. Only requests without data are longer than a piece.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Work {
    pub(super) op: IoOp,
    pub(super) offset: u64,
    pub(super) len: u64,
    /// Zeroed blocks stay allocated.
    pub(super) nounmap: bool,
}

impl Work {
    pub(super) const FLUSH: Self = Self { op: IoOp::Flush, offset: 0, len: 0, nounmap: false };

    /// Takes off the next piece: its length fits 32 bits.
    pub(super) fn take_piece(&mut self) -> Self {
        let piece = Self { len: self.len.min(PIECE_MAX), ..*self };
        self.offset += piece.len;
        self.len -= piece.len;
        piece
    }
}

/// Pieces after the first, with the tags of their requests. A disk may answer a piece before it has
/// returned from taking it, so one thread submits at a time, and none of them inside its own call:
/// the stack does not grow with the length of a request.
#[derive(Debug, Default)]
pub(super) struct WorkQueue {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    pieces: Vec<(Work, u64)>,
    /// A thread is at it, and looks again before it ends.
    is_submitting: bool,
}

impl WorkQueue {
    fn lock(&self) -> MutexGuard<'_, State> {
        // Only a bug in this module panics with the lock held; the panic was printed.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds pieces, and calls `submit` until all are submitted, unless another call of this is in
    /// progress, which takes these, too.
    pub(super) fn add(&self, pieces: Vec<(Work, u64)>, submit: impl Fn(Vec<(Work, u64)>)) {
        let mut state = self.lock();
        state.pieces.extend(pieces);
        if std::mem::replace(&mut state.is_submitting, true) {
            return;
        }
        loop {
            let pieces = std::mem::take(&mut state.pieces);
            if pieces.is_empty() {
                state.is_submitting = false;
                return;
            }
            drop(state);
            submit(pieces);
            state = self.lock();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_request_is_taken_piece_by_piece() {
        let (op, nounmap) = (IoOp::WriteZeroes, true);
        let mut work = Work { op, offset: 4096, len: (5 << 30) + 512, nounmap };
        let mut pieces = Vec::new();
        while work.len > 0 {
            let piece = work.take_piece();
            assert_eq!((piece.op, piece.nounmap), (op, nounmap));
            pieces.push((piece.offset, piece.len));
        }
        let gib = 1 << 30;
        let wanted = [(4096, 2 * gib), (4096 + 2 * gib, 2 * gib), (4096 + 4 * gib, gib + 512)];
        assert_eq!(pieces, wanted);
    }

    #[test]
    fn pieces_that_are_answered_at_once_do_not_nest() {
        let queue = WorkQueue::default();
        let (nested, left) = (std::cell::Cell::new(0), std::cell::Cell::new(100_000));
        queue.add(vec![(Work::FLUSH, 0)], |pieces| {
            nested.set(nested.get() + 1);
            assert_eq!((nested.get(), pieces.len()), (1, 1));
            left.set(left.get() - 1);
            if left.get() > 0 {
                queue.add(pieces, |_| panic!("inside of another call"));
            }
            nested.set(nested.get() - 1);
        });
        assert_eq!(left.get(), 0);
        queue.add(vec![(Work::FLUSH, 1)], |pieces| assert_eq!(pieces, [(Work::FLUSH, 1)]));
    }
}
