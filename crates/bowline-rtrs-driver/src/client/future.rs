//! Permits and requests as futures, for any runtime.

use core::future::Future;
use core::pin::Pin;
use core::task::{Context, Poll, Waker};
use std::sync::{Arc, Mutex, PoisonError};

use bowline_rtrs::Errno;
use bowline_rtrs::client::{Completed, PermitKind};

use super::permit::Permit;
use super::permits::Place;
use super::session::current_cpu;
use super::shared::Shared;
use super::state::Completer;
use crate::Error;

/// What a request came to, or who waits for that.
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

/// A request in flight. It goes on when this is dropped.
#[derive(Debug)]
#[must_use = "what the request comes to is known when this is awaited"]
pub struct Call {
    /// Why it could not be submitted, or where its end shows.
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
            // Asked once more after it was ready, it is never ready again.
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
                // Not while the cell is locked: it is the program's.
                drop(former);
                Poll::Pending
            }
        }
    }
}

/// A permit that is waited for.
#[must_use = "a permit is taken when this is awaited"]
pub struct GetPermit {
    /// Until it is ready.
    shared: Option<Arc<Shared>>,
    kind: PermitKind,
    /// As if first asked on this processor.
    cpu: Option<u16>,
    /// Among those who wait.
    place: Option<Place>,
}

impl GetPermit {
    pub(super) const fn new(shared: Arc<Shared>, kind: PermitKind, cpu: Option<u16>) -> Self {
        Self { shared: Some(shared), kind, cpu, place: None }
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
        let Self { shared, kind, cpu, place } = &mut *self;
        // Asked once more after it was ready, it is never ready again.
        let Some(session) = shared else { return Poll::Pending };
        let cpu = *cpu.get_or_insert_with(current_cpu);
        let outcome = session.poll_permit(*kind, cpu, place, context.waker());
        let outcome = outcome.map_ok(|permit| Permit::new(permit, session));
        if outcome.is_ready() {
            *shared = None;
        }
        outcome
    }
}

impl Drop for GetPermit {
    fn drop(&mut self) {
        let (Some(session), Some(place)) = (&self.shared, self.place) else { return };
        if let Some(permit) = session.leave(place) {
            session.put_permit(permit);
        }
    }
}

/// Reads what a request came to.
pub(super) fn ended(errno: i32) -> Result<(), Error> {
    match errno {
        0 => Ok(()),
        errno => Err(Error::new("a request", Errno(errno.saturating_abs().max(1)))),
    }
}
