//! Permits and requests as futures, for any runtime.

use core::future::Future;
use core::pin::Pin;
use core::task::{Context, Poll, Waker};
use std::sync::{Arc, Mutex, PoisonError};

use bowline_rtrs::Errno;
use bowline_rtrs::client::{Completed, PermitKind};

use super::permit::Permit;
use super::permits::WaiterId;
use super::session::current_cpu;
use super::shared::Shared;
use super::state::Completer;
use crate::Error;

/// The result of a request, or the waker of the task that waits for it.
#[derive(Debug, Default)]
pub(super) struct Cell(Mutex<Outcome>);

#[derive(Debug, Default)]
struct Outcome {
    errno: Option<i32>,
    waker: Option<Waker>,
}

impl Completer for Cell {
    fn completed(&self, done: &[Completed]) {
        let mut outcome = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        outcome.errno = done.first().map(|done| done.errno);
        let waker = outcome.waker.take();
        drop(outcome);
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

/// A request in flight. Dropping the future does not cancel the request.
#[derive(Debug)]
#[must_use = "what the request comes to is known when this is awaited"]
pub struct Call {
    /// The cell that gets the result, or the error if the request could not be submitted.
    begun: Result<Arc<Cell>, Option<Error>>,
}

impl Call {
    pub(super) fn new(begun: Result<Arc<Cell>, Error>) -> Self {
        Self { begun: begun.map_err(Some) }
    }
}

impl Future for Call {
    type Output = Result<(), Error>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let cell = match &mut self.begun {
            Ok(cell) => cell,
            // Polled again after it was ready: the future stays pending.
            Err(error) => {
                return error.take().map_or(Poll::Pending, |error| Poll::Ready(Err(error)));
            }
        };
        let mut outcome = cell.0.lock().unwrap_or_else(PoisonError::into_inner);
        match outcome.errno {
            Some(errno) => Poll::Ready(ended(errno)),
            None => {
                let former = outcome.waker.replace(context.waker().clone());
                drop(outcome);
                // Dropped without the cell's lock: a waker is code of the program.
                drop(former);
                Poll::Pending
            }
        }
    }
}

/// A permit that a task waits for.
#[must_use = "a permit is taken when this is awaited"]
pub struct GetPermit {
    /// The session, until the future is ready.
    shared: Option<Arc<Shared>>,
    kind: PermitKind,
    /// The processor whose connection to use; by default that of the first poll.
    cpu: Option<u16>,
    /// The task's position in the queue of waiters.
    waiter: Option<WaiterId>,
}

impl GetPermit {
    pub(super) const fn new(shared: Arc<Shared>, kind: PermitKind, cpu: Option<u16>) -> Self {
        Self { shared: Some(shared), kind, cpu, waiter: None }
    }
}

impl core::fmt::Debug for GetPermit {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("GetPermit").field("kind", &self.kind).finish_non_exhaustive()
    }
}

impl Future for GetPermit {
    type Output = Result<Permit, Error>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let Self { shared, kind, cpu, waiter } = &mut *self;
        // Polled again after it was ready: the future stays pending.
        let Some(session) = shared else { return Poll::Pending };
        let cpu = *cpu.get_or_insert_with(current_cpu);
        let outcome = session.poll_permit(*kind, cpu, waiter, context.waker());
        let outcome = outcome.map_ok(|permit| Permit::new(permit, session));
        if outcome.is_ready() {
            *shared = None;
        }
        outcome
    }
}

impl Drop for GetPermit {
    fn drop(&mut self) {
        let (Some(session), Some(waiter)) = (&self.shared, self.waiter) else { return };
        if let Some(permit) = session.cancel_wait(waiter) {
            session.put_permit(permit);
        }
    }
}

/// Converts the result of a request.
pub(super) fn ended(errno: i32) -> Result<(), Error> {
    match errno {
        0 => Ok(()),
        errno => Err(Error::new("a request", Errno(errno.saturating_abs().max(1)))),
    }
}
