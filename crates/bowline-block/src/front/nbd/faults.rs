//! Clients that break the protocol: how many, and who wants to know why.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Least time between two reports.
const REPORT_INTERVAL: Duration = Duration::from_secs(1);

type Report = Box<dyn Fn(&str) + Send + Sync>;

/// The faults of a server's clients.
#[derive(Default)]
pub(super) struct Faults {
    /// Relaxed: a counter that guards nothing.
    count: AtomicU64,
    report: Mutex<Option<Report>>,
    last: Mutex<Option<Instant>>,
}

impl Faults {
    pub(super) fn count(&self) -> u64 {
        self.count.load(Relaxed)
    }

    pub(super) fn report_to(&self, report: Report) {
        *self.report.lock().unwrap_or_else(PoisonError::into_inner) = Some(report);
    }

    /// Counts a fault, and reports it unless another one was reported just before.
    pub(super) fn note(&self, why: &str) {
        self.count.fetch_add(1, Relaxed);
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if last.is_some_and(|at| at.elapsed() < REPORT_INTERVAL) {
            return;
        }
        *last = Some(Instant::now());
        drop(last);
        if let Some(report) = &*self.report.lock().unwrap_or_else(PoisonError::into_inner) {
            report(&format!("disconnected from an NBD client: {why}"));
        }
    }
}

impl fmt::Debug for Faults {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Faults").field("count", &self.count()).finish_non_exhaustive()
    }
}
