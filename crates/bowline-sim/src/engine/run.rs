//! Runs of one seed and of many.

use std::cell::RefCell;
use std::ops::{ControlFlow, Range};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::coverage::Coverage;
use super::numbers::Numbers;
use super::simulator::World;
use super::trace::TraceMode;

/// Options of a run.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Options<S> {
    /// How much text to keep of a run.
    pub trace: TraceMode,
    /// Scenario to use instead of the one the seed would draw.
    pub scenario: Option<S>,
    /// Real time after which no further seed of a range is started.
    pub time: Option<Duration>,
}

impl<S> Default for Options<S> {
    fn default() -> Self {
        Self { trace: TraceMode::default(), scenario: None, time: None }
    }
}

impl<S> Options<S> {
    /// Sets how much text a run keeps.
    #[must_use]
    pub fn with_trace(mut self, trace: TraceMode) -> Self {
        self.trace = trace;
        self
    }

    /// Limits the real time of a range of seeds; seeds that are left then do not run.
    #[must_use]
    pub fn with_time(mut self, time: Option<Duration>) -> Self {
        self.time = time;
        self
    }

    /// Forces the scenario.
    #[must_use]
    pub fn with_scenario(mut self, scenario: Option<S>) -> Self {
        self.scenario = scenario;
        self
    }
}

/// A broken invariant or promise.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// Description of the broken promise.
    pub what: String,
    /// Virtual time in nanoseconds since the start of the run.
    pub at: u64,
    /// State of the nodes; empty if one of them panicked.
    pub dump: String,
}

/// Result of one seed.
#[derive(Clone, Debug)]
pub struct Outcome<N> {
    /// The seed.
    pub seed: u64,
    /// Name of the scenario that the seed ran.
    pub scenario: &'static str,
    /// The command that runs the seed again.
    pub replay: String,
    /// Hash over every step; equal runs have equal hashes.
    pub trace_hash: u64,
    /// Counters of the run.
    pub stats: N,
    /// States, transitions and faults that the run reached.
    pub coverage: Coverage,
    /// The text that was kept.
    pub lines: Vec<String>,
    /// The first broken promise.
    pub failure: Option<Failure>,
    /// The plan that a failed seed drew, as text for a file. It stays the same when seeds later
    /// draw other plans.
    pub plan: Option<String>,
}

impl<N> Outcome<N> {
    /// Returns a report with everything needed to examine a failure.
    pub fn report(&self) -> String {
        let mut out = String::new();
        for line in &self.lines {
            out += line;
            out.push('\n');
        }
        match &self.failure {
            Some(failure) => {
                out += &failure.dump;
                out += &format!(
                    "seed {} ({}) failed at {:.6} ms: {}\nreplay: {}\n",
                    self.seed,
                    self.scenario,
                    failure.at as f64 / 1e6,
                    failure.what,
                    self.replay
                );
            }
            None => {
                out += &format!(
                    "seed {} ({}) kept every promise, hash {:016x}\n",
                    self.seed, self.scenario, self.trace_hash
                );
            }
        }
        out
    }
}

/// Result of many seeds.
#[derive(Clone, Debug, Default)]
pub struct Summary<N> {
    /// Number of seeds run.
    pub runs: u64,
    /// Sums of the counters.
    pub stats: N,
    /// States, transitions and faults that the runs reached.
    pub coverage: Coverage,
    /// Outcomes of the seeds that failed, with the last lines of their trace; at most twenty.
    pub failures: Vec<Outcome<N>>,
    /// Number of failed seeds.
    pub failed: u64,
}

/// A report of a search over a range of seeds to its caller while it runs.
#[derive(Debug)]
#[non_exhaustive]
pub enum SearchEvent<'a, N> {
    /// The number of finished seeds.
    Done(u64),
    /// A seed has failed: its outcome, with the last lines of its trace.
    Failed(&'a Outcome<N>),
}

/// Maximum number of failures that are kept with their text.
const FAILURES_KEPT: usize = 20;
/// Number of lines of trace shown with a failure.
const FAILURE_LINES: usize = 60;

impl<N: Numbers> Outcome<N> {
    /// Makes the outcome of a run that has not started.
    pub(crate) fn new(seed: u64, scenario: &'static str, replay: String) -> Self {
        Self {
            seed,
            scenario,
            replay,
            trace_hash: 0,
            stats: N::default(),
            coverage: Coverage::default(),
            lines: Vec::new(),
            failure: None,
            plan: None,
        }
    }

    /// Makes a world and steps it to its end. If it panics, the failure holds the panic's text. The
    /// world is kept, so that its trace can be read.
    pub(crate) fn play<W: World<N>>(&mut self, make: impl FnOnce() -> Option<W>) {
        let world = RefCell::new(None);
        let all = || {
            *world.borrow_mut() = make();
            let mut world = world.borrow_mut();
            let Some(world) = world.as_mut() else { return };
            while world.step() {}
        };
        let panicked = quietly(AssertUnwindSafe(all));
        let Some(mut world) = world.into_inner() else {
            let what = panicked.err().unwrap_or_else(|| "no chance is left for it".to_owned());
            self.failure = Some(Failure { what, at: 0, dump: String::new() });
            return;
        };
        let at = world.now();
        let failure = match panicked {
            Err(what) => Some((format!("panic: {what}"), String::new())),
            Ok(()) => world.failure().map(|what| (what, world.dump())),
        };
        self.failure = failure.map(|(what, dump)| Failure { what, at, dump });
        let trace;
        (self.stats, self.coverage, trace) = world.end();
        self.trace_hash = trace.hash();
        self.lines = trace.into_lines();
    }
}

thread_local! {
    static PANIC_TEXT: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// Runs `f`. Returns the text of a panic, and prints nothing for it.
fn quietly(f: AssertUnwindSafe<impl FnOnce()>) -> Result<(), String> {
    static HOOK: std::sync::Once = std::sync::Once::new();
    thread_local! {
        static QUIET: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
    }
    HOOK.call_once(|| {
        let usual = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            if QUIET.get() {
                PANIC_TEXT.set(Some(info.to_string()));
            } else {
                usual(info);
            }
        }));
    });
    QUIET.set(true);
    let result = catch_unwind(f);
    QUIET.set(false);
    result.map_err(|_| PANIC_TEXT.take().unwrap_or_default())
}

/// Runs `one` for a range of seeds on `threads` threads, until `on_event` stops it. Seeds that fail
/// run again with their last steps shown.
pub(crate) fn sweep<S: Copy + Sync, N: Numbers + Send>(
    seeds: Range<u64>,
    threads: usize,
    options: &Options<S>,
    on_event: impl Fn(SearchEvent<'_, N>) -> ControlFlow<()> + Sync,
    one: impl Fn(u64, &Options<S>) -> Outcome<N> + Sync,
) -> Summary<N> {
    let next = AtomicU64::new(seeds.start);
    let begun = Instant::now();
    let stopped = AtomicBool::new(false);
    let is_over = || {
        let late = options.time.is_some_and(|time| begun.elapsed() >= time);
        late || stopped.load(Ordering::Relaxed)
    };
    let summary = Mutex::new(Summary::default());
    let work = || {
        loop {
            if is_over() {
                return;
            }
            let seed = next.fetch_add(1, Ordering::Relaxed);
            if seed >= seeds.end {
                return;
            }
            let mut outcome = one(seed, options);
            if outcome.failure.is_some() && options.trace == TraceMode::Hash {
                outcome = one(seed, &options.clone().with_trace(TraceMode::Last(FAILURE_LINES)));
            }
            let mut summary: std::sync::MutexGuard<'_, Summary<N>> =
                summary.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
            summary.runs += 1;
            summary.stats.add(&outcome.stats);
            summary.coverage.merge(&outcome.coverage);
            let mut goes_on = ControlFlow::Continue(());
            if outcome.failure.is_some() {
                summary.failed += 1;
                goes_on = on_event(SearchEvent::Failed(&outcome));
                if summary.failures.len() < FAILURES_KEPT {
                    summary.failures.push(outcome);
                }
            }
            if goes_on.is_continue() {
                goes_on = on_event(SearchEvent::Done(summary.runs));
            }
            stopped.fetch_or(goes_on.is_break(), Ordering::Relaxed);
        }
    };
    std::thread::scope(|scope| {
        for _ in 1..threads.max(1) {
            scope.spawn(work);
        }
        work();
    });
    let mut summary = summary.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner());
    summary.failures.sort_by_key(|o| o.seed);
    summary
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rds::Stats;

    type Outcome = super::Outcome<Stats>;
    type Options = super::Options<()>;

    /// Makes the outcome of a run without events, which fails if `fails` is true.
    fn outcome(seed: u64, fails: bool) -> Outcome {
        let mut outcome = Outcome::new(seed, "none", String::new());
        let failure = || Failure { what: "lost".to_owned(), at: 0, dump: String::new() };
        outcome.failure = fails.then(failure);
        outcome
    }

    #[test]
    fn a_seed_that_fails_is_told_at_once_and_the_search_goes_on() {
        let told = Mutex::new(Vec::new());
        let on_event = |event: SearchEvent<'_, Stats>| {
            if let (SearchEvent::Failed(outcome), Ok(mut told)) = (event, told.lock()) {
                told.push(outcome.seed);
            }
            ControlFlow::Continue(())
        };
        let one = |seed, _: &Options| {
            if seed == 9 {
                assert_eq!(*told.lock().expect("told"), [3], "before the next");
            }
            outcome(seed, seed % 10 == 3)
        };
        let summary = sweep(0..40, 1, &Options::default(), on_event, one);
        assert_eq!((summary.runs, summary.failed), (40, 4));
        assert_eq!(told.into_inner().expect("told"), [3, 13, 23, 33]);
    }

    #[test]
    fn a_search_that_is_broken_off_has_what_was_run() {
        let on_event = |event: SearchEvent<'_, Stats>| match event {
            SearchEvent::Done(512) => ControlFlow::Break(()),
            _ => ControlFlow::Continue(()),
        };
        let one = |seed, _: &Options| outcome(seed, seed == 100);
        let summary = sweep(0..u64::MAX, 1, &Options::default(), on_event, one);
        assert_eq!((summary.runs, summary.failed), (512, 1));
    }
}
