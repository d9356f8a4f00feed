//! The steps that all four simulators share: a seed draws a start, a start makes a world, and the
//! world is stepped to its end.

use std::fmt::Debug;
use std::ops::{ControlFlow, Range};

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::coverage::Coverage;
use super::kept::{Kept, NotAPlan, Start};
use super::numbers::Numbers;
use super::run::{Options, Outcome, SearchEvent, Summary, sweep};
use super::trace::{Trace, TraceMode};

/// A simulator.
pub(crate) trait Simulator {
    /// The plan of a run, drawn from a seed.
    type Plan: Clone + Debug + Serialize + DeserializeOwned;
    /// Families of plans.
    type Scenario: Copy + Sync;
    /// Counters of a run.
    type Stats: Numbers + Send;
    /// Mistakes that a run can make on purpose.
    type Sabotage: Copy;
    /// The state of a run.
    type World: World<Self::Stats>;

    /// Name of the simulator in kept plans.
    const NAME: &'static str;
    /// The command that runs its seeds.
    const COMMAND: &'static str;

    /// Draws the start of a seed.
    fn draw(seed: u64, forced: Option<Self::Scenario>) -> Start<Self::Plan>;

    /// Declares everything that runs can reach.
    fn declare(coverage: &mut Coverage);

    /// Returns the name of a plan's scenario.
    fn scenario(plan: &Self::Plan) -> &'static str;

    /// Makes the world of a start; returns `None` if the start has too few random generators.
    fn world(
        start: Start<Self::Plan>,
        trace: Trace,
        sabotage: Option<Self::Sabotage>,
    ) -> Option<Self::World>;
}

/// The state of a run, as the code that drives it sees it.
pub(crate) trait World<N> {
    /// Takes the next step; returns false at the end.
    fn step(&mut self) -> bool;
    /// Returns the virtual time in nanoseconds.
    fn now(&self) -> u64;
    /// Returns the first broken promise.
    fn failure(&mut self) -> Option<String>;
    /// Returns the state of all nodes as text.
    fn dump(&self) -> String;
    /// Returns the counters, the coverage and the trace.
    fn end(self) -> (N, Coverage, Trace);
}

/// Runs one seed, with a mistake made on purpose if a test asks for it.
pub(crate) fn run_seed<S: Simulator>(
    seed: u64,
    options: &Options<S::Scenario>,
    sabotage: Option<S::Sabotage>,
) -> Outcome<S::Stats> {
    let start = S::draw(seed, options.scenario);
    let scenario = S::scenario(&start.plan);
    let forced = match options.scenario {
        Some(_) => format!(" --scenario {scenario}"),
        None => String::new(),
    };
    let replay = format!("{} --seed {seed}{forced} --trace", S::COMMAND);
    let mut outcome = Outcome::new(seed, scenario, replay);
    outcome.play(|| S::world(start, Trace::new(options.trace), sabotage));
    if outcome.failure.is_some() {
        outcome.plan = Some(keep::<S>(seed, options));
    }
    outcome
}

/// Returns the plan of a seed as text for a file.
pub(crate) fn keep<S: Simulator>(seed: u64, options: &Options<S::Scenario>) -> String {
    let start = S::draw(seed, options.scenario);
    let (simulator, about) = (S::NAME.to_owned(), String::new());
    // Serialising cannot fail: all maps of a plan have keys of text or numbers.
    serde_json::to_string_pretty(&Kept { simulator, about, seed, start }).unwrap_or_default()
}

/// Runs a kept plan; `name` is the name of its file.
pub(crate) fn run_kept<S: Simulator>(
    text: &str,
    name: &str,
    trace: TraceMode,
) -> Result<Outcome<S::Stats>, NotAPlan> {
    let kept: Kept<S::Plan> =
        serde_json::from_str(text).map_err(|error| NotAPlan(error.to_string()))?;
    if kept.simulator != S::NAME {
        return Err(NotAPlan(format!("it is for {}", kept.simulator)));
    }
    let replay = format!("bowline sim --plan {name} --trace");
    let mut outcome = Outcome::new(kept.seed, S::scenario(&kept.start.plan), replay);
    outcome.play(|| S::world(kept.start, Trace::new(trace), None));
    if outcome.failure.is_some() {
        outcome.plan = Some(text.to_owned());
    }
    Ok(outcome)
}

/// Runs a range of seeds on `threads` threads, each seed on one of them.
pub(crate) fn run_many<S: Simulator>(
    seeds: Range<u64>,
    threads: usize,
    options: &Options<S::Scenario>,
    on_event: impl Fn(SearchEvent<'_, S::Stats>) -> ControlFlow<()> + Sync,
) -> Summary<S::Stats> {
    let one = |seed, options: &Options<S::Scenario>| run_seed::<S>(seed, options, None);
    let mut summary = sweep(seeds, threads, options, on_event, one);
    S::declare(&mut summary.coverage);
    summary
}

/// Gives the module of a simulator its public functions.
macro_rules! runs_of {
    ($simulator:ty) => {
        /// Runs one seed.
        pub fn run(seed: u64, options: &Options) -> Outcome {
            $crate::engine::simulator::run_seed::<$simulator>(seed, options, None)
        }

        /// Returns the plan of a seed as text for a file; [`run_kept`] runs it.
        pub fn keep(seed: u64, options: &Options) -> String {
            $crate::engine::simulator::keep::<$simulator>(seed, options)
        }

        /// Runs a kept plan; `name` is the name of its file, for reports.
        ///
        /// # Errors
        /// When the text is no plan of this simulator.
        pub fn run_kept(
            text: &str,
            name: &str,
            trace: $crate::TraceMode,
        ) -> Result<Outcome, $crate::NotAPlan> {
            $crate::engine::simulator::run_kept::<$simulator>(text, name, trace)
        }

        /// Runs a range of seeds on `threads` threads, each seed on one of them.
        ///
        /// A seed that fails is run again to show its last steps. `on_event` is called for each
        /// failure and after each seed; when it returns `Break`, no further seed is started.
        pub fn run_many(
            seeds: std::ops::Range<u64>,
            threads: usize,
            options: &Options,
            on_event: impl Fn($crate::SearchEvent<'_, Stats>) -> std::ops::ControlFlow<()> + Sync,
        ) -> Summary {
            $crate::engine::simulator::run_many::<$simulator>(seeds, threads, options, on_event)
        }
    };
}
pub(crate) use runs_of;

#[cfg(test)]
pub(crate) mod tests {
    use super::{Simulator, run_seed};
    use crate::engine::run::Options;

    /// Returns how many seeds, from this one on, it takes until a deliberate mistake is noticed, in
    /// a seed that fails only because of the mistake. Tries at most the given number of seeds.
    pub(crate) fn seeds_to_find<S: Simulator>(
        how: S::Sabotage,
        from: u64,
        most: u64,
    ) -> Option<u64> {
        let options = Options::default();
        let fails = |seed, how| run_seed::<S>(seed, &options, how).failure.is_some();
        (0..most).find(|n| fails(from + n, Some(how)) && !fails(from + n, None)).map(|n| n + 1)
    }

    /// Returns the first of the seeds that nobody has run before.
    fn fresh_from() -> u64 {
        let given = std::env::var("BOWLINE_FRESH_FROM").ok().and_then(|from| from.parse().ok());
        let clock = || std::time::UNIX_EPOCH.elapsed().map_or(0, |since| since.as_millis() as u64);
        given.unwrap_or_else(clock)
    }

    /// Checks that each mistake is noticed within 10,000 fresh seeds.
    pub(crate) fn assert_found<S: Simulator>(all: &[S::Sabotage])
    where
        S::Sabotage: std::fmt::Debug,
    {
        const MOST: u64 = 10_000;
        let from = fresh_from();
        let mut missed = Vec::new();
        for &how in all {
            let found = seeds_to_find::<S>(how, from, MOST);
            println!("{how:?}: {found:?} seeds from {from}");
            missed.extend(found.is_none().then_some(how));
        }
        assert!(missed.is_empty(), "{missed:?} not noticed within {MOST} seeds from {from}");
    }
}
