//! Runs of one seed and of many.

use std::cell::RefCell;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::plan::{Plan, Scenario};
use crate::rng::Rng;
use crate::sabotage::Sabotage;
use crate::stats::{Numbers, Stats};
use crate::trace::{Trace, TraceMode};
use crate::world::World;

/// How to run.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Options<S = Scenario> {
    /// Text to keep of a run.
    pub trace: TraceMode,
    /// Scenario instead of the one the seed would draw.
    pub scenario: Option<S>,
}

impl<S> Default for Options<S> {
    fn default() -> Self {
        Self { trace: TraceMode::default(), scenario: None }
    }
}

impl<S> Options<S> {
    /// Sets how much text a run keeps.
    #[must_use]
    pub fn with_trace(mut self, trace: TraceMode) -> Self {
        self.trace = trace;
        self
    }

    /// Forces the scenario.
    #[must_use]
    pub fn with_scenario(mut self, scenario: Option<S>) -> Self {
        self.scenario = scenario;
        self
    }
}

/// A broken promise.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// What was broken.
    pub what: String,
    /// Virtual time, nanoseconds since the start of the run.
    pub at: u64,
    /// State of the nodes; empty if one of them panicked.
    pub dump: String,
}

/// What became of a seed.
#[derive(Clone, Debug)]
pub struct Outcome<N = Stats> {
    /// The command that runs seeds of this kind.
    pub command: &'static str,
    /// The seed.
    pub seed: u64,
    /// Name of the scenario it ran.
    pub scenario: &'static str,
    /// Whether the scenario was forced.
    pub forced: bool,
    /// Hash over every step: equal for equal runs.
    pub trace_hash: u64,
    /// Numbers.
    pub stats: N,
    /// Text kept.
    pub lines: Vec<String>,
    /// The first broken promise.
    pub failure: Option<Failure>,
}

impl<N> Outcome<N> {
    /// The command that runs this seed again.
    pub fn replay_command(&self) -> String {
        let scenario = match self.forced {
            true => format!(" --scenario {}", self.scenario),
            false => String::new(),
        };
        format!("{} --seed {}{scenario} --trace", self.command, self.seed)
    }

    /// Everything a reader needs to look at a failure.
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
                    self.replay_command()
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

/// What became of many seeds.
#[derive(Clone, Debug, Default)]
pub struct Summary<N = Stats> {
    /// Seeds run.
    pub runs: u64,
    /// Sums.
    pub stats: N,
    /// Outcomes of the seeds that failed, with the last lines of their trace; at most twenty.
    pub failures: Vec<Outcome<N>>,
    /// How many failed.
    pub failed: u64,
}

/// Failures kept with their text.
const FAILURES_KEPT: usize = 20;
/// Lines of trace shown with a failure.
const FAILURE_LINES: usize = 60;

/// Runs one seed.
pub fn run(seed: u64, options: &Options) -> Outcome {
    run_with(seed, options, None)
}

/// Runs one seed, with something done wrong on purpose.
pub(crate) fn run_with(seed: u64, options: &Options, sabotage: Option<Sabotage>) -> Outcome {
    let mut rng = Rng::new(seed);
    let mut plan = Plan::draw(&mut rng, options.scenario);
    if sabotage.is_some() {
        plan.widen();
    }
    let outcome = Outcome::new("bowline sim", seed, plan.scenario.name(), options);
    let trace = Trace::new(options.trace);
    outcome.play(|| {
        let mut world = World::new(plan, rng, trace, sabotage);
        let plan = &world.plan;
        world.ctx.note([0, 0, 0], || format!("{plan:#?}"));
        world
    })
}

/// A world as a run sees it.
pub(crate) trait Simulated<N> {
    /// Does what comes next; false at the end.
    fn step(&mut self) -> bool;
    /// Virtual time, nanoseconds.
    fn now(&self) -> u64;
    /// The first broken promise.
    fn failure(&mut self) -> Option<String>;
    /// State of all there is.
    fn dump(&self) -> String;
    /// What was counted, and the trace.
    fn end(self) -> (N, Trace);
}

impl Simulated<Stats> for World {
    fn step(&mut self) -> bool {
        Self::step(self)
    }

    fn now(&self) -> u64 {
        self.ctx.now
    }

    fn failure(&mut self) -> Option<String> {
        self.ctx.failure.take()
    }

    fn dump(&self) -> String {
        Self::dump(self)
    }

    fn end(mut self) -> (Stats, Trace) {
        self.ctx.stats.virtual_ms = self.ctx.now / 1_000_000;
        (self.ctx.stats, self.ctx.trace)
    }
}

impl<N: Numbers> Outcome<N> {
    /// The outcome of a run that is still to be done.
    pub(crate) fn new<S>(
        command: &'static str,
        seed: u64,
        scenario: &'static str,
        options: &Options<S>,
    ) -> Self {
        let (trace_hash, stats, lines, failure) = (0, N::default(), Vec::new(), None);
        let forced = options.scenario.is_some();
        Self { command, seed, scenario, forced, trace_hash, stats, lines, failure }
    }

    /// Makes a world and steps it to its end. A panic becomes its text; the world outlives it, so
    /// that its trace can be read.
    pub(crate) fn play<W: Simulated<N>>(mut self, make: impl FnOnce() -> W) -> Self {
        let world = RefCell::new(None);
        let all = || {
            *world.borrow_mut() = Some(make());
            let mut world = world.borrow_mut();
            let Some(world) = world.as_mut() else { return };
            while world.step() {}
        };
        let panicked = quietly(AssertUnwindSafe(all));
        let Some(mut world) = world.into_inner() else {
            let what = panicked.err().unwrap_or_default();
            self.failure = Some(Failure { what, at: 0, dump: String::new() });
            return self;
        };
        let at = world.now();
        let failure = match panicked {
            Err(what) => Some((format!("panic: {what}"), String::new())),
            Ok(()) => world.failure().map(|what| (what, world.dump())),
        };
        self.failure = failure.map(|(what, dump)| Failure { what, at, dump });
        let trace;
        (self.stats, trace) = world.end();
        self.trace_hash = trace.hash();
        self.lines = trace.into_lines();
        self
    }
}

thread_local! {
    static PANIC_TEXT: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// Runs `f`; a panic becomes its text, and nothing is printed for it.
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

/// Runs a range of seeds on `threads` threads, each seed on one of them.
///
/// `progress` is called now and then with the number of seeds done. Seeds that fail are run again
/// to show their last steps.
pub fn run_many(
    seeds: Range<u64>,
    threads: usize,
    options: &Options,
    progress: impl Fn(u64) + Sync,
) -> Summary {
    sweep(seeds, threads, options, progress, run)
}

/// Runs `one` for a range of seeds on `threads` threads; seeds that fail run again with their last
/// steps shown.
pub(crate) fn sweep<S: Copy + Sync, N: Numbers + Send>(
    seeds: Range<u64>,
    threads: usize,
    options: &Options<S>,
    progress: impl Fn(u64) + Sync,
    one: impl Fn(u64, &Options<S>) -> Outcome<N> + Sync,
) -> Summary<N> {
    let next = AtomicU64::new(seeds.start);
    let summary = Mutex::new(Summary::default());
    let work = || {
        loop {
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
            if outcome.failure.is_some() {
                summary.failed += 1;
                if summary.failures.len() < FAILURES_KEPT {
                    summary.failures.push(outcome);
                }
            }
            if summary.runs.is_multiple_of(256) {
                progress(summary.runs);
            }
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
