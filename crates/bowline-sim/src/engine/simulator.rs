//! What the three simulators have in common: a seed draws a start, a start makes a world, and the
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

/// One of the simulators.
pub(crate) trait Simulator {
    /// What a seed draws.
    type Plan: Clone + Debug + Serialize + DeserializeOwned;
    /// Families of plans.
    type Scenario: Copy + Sync;
    /// What a run counts.
    type Stats: Numbers + Send;
    /// What a run can do wrong on purpose.
    type Sabotage: Copy;
    /// A run.
    type World: World<Self::Stats>;

    /// Its name in kept plans.
    const NAME: &'static str;
    /// The command that runs its seeds.
    const COMMAND: &'static str;

    /// Draws what a seed stands for.
    fn draw(seed: u64, forced: Option<Self::Scenario>) -> Start<Self::Plan>;

    /// Makes known what its runs can reach.
    fn declare(coverage: &mut Coverage);

    /// The name of a plan's scenario.
    fn scenario(plan: &Self::Plan) -> &'static str;

    /// Makes the world of a start; `None` when it has too few generators of chance.
    fn world(
        start: Start<Self::Plan>,
        trace: Trace,
        sabotage: Option<Self::Sabotage>,
    ) -> Option<Self::World>;
}

/// A run as its caller sees it.
pub(crate) trait World<N> {
    /// Does what comes next; false at the end.
    fn step(&mut self) -> bool;
    /// Virtual time, nanoseconds.
    fn now(&self) -> u64;
    /// The first broken promise.
    fn failure(&mut self) -> Option<String>;
    /// State of all there is.
    fn dump(&self) -> String;
    /// What was counted and reached, and the trace.
    fn end(self) -> (N, Coverage, Trace);
}

/// Runs one seed, with something done wrong on purpose where a test asks for it.
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

/// The text of what a seed draws.
pub(crate) fn keep<S: Simulator>(seed: u64, options: &Options<S::Scenario>) -> String {
    let start = S::draw(seed, options.scenario);
    let (simulator, about) = (S::NAME.to_owned(), String::new());
    // Maps with keys of text and numbers are all there is in a plan: nothing JSON cannot say.
    serde_json::to_string_pretty(&Kept { simulator, about, seed, start }).unwrap_or_default()
}

/// Runs a kept plan; `name` is that of its file.
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

/// Gives the module of a simulator what its users call.
macro_rules! runs_of {
    ($simulator:ty) => {
        /// Runs one seed.
        pub fn run(seed: u64, options: &Options) -> Outcome {
            $crate::engine::simulator::run_seed::<$simulator>(seed, options, None)
        }

        /// What a seed draws, as text for a file; [`run_kept`] runs it.
        pub fn keep(seed: u64, options: &Options) -> String {
            $crate::engine::simulator::keep::<$simulator>(seed, options)
        }

        /// Runs a plan that was kept; `name` is that of its file, for reports.
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
        /// failure and after each seed; when it returns `Break`, no further seed is begun.
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

    /// How many seeds from this one on it takes, of so many at most, until what is done wrong is
    /// noticed in one in which nothing is noticed otherwise.
    pub(crate) fn seeds_to_find<S: Simulator>(
        how: S::Sabotage,
        from: u64,
        most: u64,
    ) -> Option<u64> {
        let options = Options::default();
        let fails = |seed, how| run_seed::<S>(seed, &options, how).failure.is_some();
        (0..most).find(|n| fails(from + n, Some(how)) && !fails(from + n, None)).map(|n| n + 1)
    }

    /// Where seeds begin that nobody has looked at.
    fn fresh_from() -> u64 {
        let given = std::env::var("BOWLINE_FRESH_FROM").ok().and_then(|from| from.parse().ok());
        let clock = || std::time::UNIX_EPOCH.elapsed().map_or(0, |since| since.as_millis() as u64);
        given.unwrap_or_else(clock)
    }

    /// Each of these is noticed within 10,000 fresh seeds.
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
