//! Carries a plan out, round by round.

use std::collections::BTreeMap;
use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

use crate::args::Options;
use crate::cell::{Cell, Kind, Subject, Wait};
use crate::doors::Doors;
use crate::nodes;
use crate::peers::Peers;
use crate::plan::{Block, Entry};
use crate::results::{Record, Results};
use crate::run::{Launcher, Sample, until_quiet};
use crate::turns;

/// A run keeps to this time, by measuring disturbed cells only once and by leaving rounds out.
const RUN_LIMIT: Duration = Duration::from_secs(285);
/// The same for a quick run.
const QUICK_LIMIT: Duration = Duration::from_secs(20);
/// How often a disturbed measurement is made, at most.
const TRIES: u32 = 3;

/// A peer leaves the common settings only for a gain of more than a tenth: less may be chance.
const BETTER: f64 = 1.1;

/// How often a measurement is repeated because another process took its addresses.
const COLLISIONS: u32 = 4;

/// A progress line on standard error.
pub(crate) struct Progress {
    terminal: bool,
    last: Option<Instant>,
}

impl Progress {
    /// How often a line is written where it cannot be overwritten.
    const EVERY: Duration = Duration::from_secs(5);

    /// No line has been printed yet.
    pub(crate) fn new() -> Self {
        Self { terminal: std::io::stderr().is_terminal(), last: None }
    }

    /// Tells it.
    pub(crate) fn show(&mut self, text: &str) {
        let mut err = std::io::stderr().lock();
        // Progress that cannot be shown is not worth failing for.
        let _ = if self.terminal {
            write!(err, "\r\x1b[K{text}").and_then(|()| err.flush())
        } else if self.last.is_none_or(|at| at.elapsed() > Self::EVERY) {
            self.last = Some(Instant::now());
            writeln!(err, "{text}")
        } else {
            Ok(())
        };
    }

    /// Takes the line away.
    pub(crate) fn clear(&self) {
        if self.terminal {
            let mut err = std::io::stderr().lock();
            let _ = write!(err, "\r\x1b[K").and_then(|()| err.flush()); // as above
        }
    }
}

/// How a peer does best on this machine: bound to its CPUs or not, and its congestion control.
type Best = BTreeMap<(Subject, Kind), (Option<(usize, usize)>, String)>;

/// Says whether an entry is measured a second time at the end of a round; in turns, no machine
/// changes.
fn is_again(entry: &Entry) -> bool {
    entry.anchor && !entry.cell.takes_turns()
}

/// Carries plans out.
pub(crate) struct Engine<'a> {
    options: &'a Options,
    launcher: &'a Launcher,
    peers: &'a Peers,
    system_cc: &'a str,
    start: Instant,
    progress: Progress,
    best: Best,
    done: usize,
    total: usize,
    results: Results,
    doors: Doors,
}

/// What a run gave.
pub(crate) struct Outcome {
    pub(crate) results: Results,
    pub(crate) rounds: u32,
    /// Peers that did better unbound or with the system's congestion control.
    pub(crate) notes: Vec<String>,
}

impl<'a> Engine<'a> {
    /// Prepares a run.
    pub(crate) fn new(
        options: &'a Options,
        launcher: &'a Launcher,
        peers: &'a Peers,
        system_cc: &'a str,
    ) -> Self {
        Self {
            options,
            launcher,
            peers,
            system_cc,
            start: Instant::now(),
            progress: Progress::new(),
            best: Best::new(),
            done: 0,
            total: 0,
            results: Results::default(),
            doors: Doors::new(options.disk),
        }
    }

    /// Measures everything.
    pub(crate) fn run(mut self, blocks: &[Block]) -> Outcome {
        let runs = |entry: &Entry| usize::from(is_again(entry)) + 1;
        let count = |once: bool| -> usize {
            let all = blocks.iter().flat_map(|b| &b.entries);
            all.filter(|e| e.once == once).map(runs).sum()
        };
        self.total = count(true) + count(false) * self.options.rounds as usize;
        self.try_peers(blocks);
        let mut rounds = 0;
        for round in 0..self.options.rounds {
            let before = Instant::now();
            for block in blocks {
                self.block(block, round);
            }
            rounds += 1;
            if self.start.elapsed() + before.elapsed() > self.limit() {
                break;
            }
        }
        self.progress.clear();
        Outcome { results: self.results, rounds, notes: notes(&self.best, self.options) }
    }

    fn block(&mut self, block: &Block, round: u32) {
        let wanted = |e: &&Entry| round == 0 || !e.once;
        let (in_turns, alone): (Vec<&Entry>, Vec<&Entry>) =
            block.entries.iter().filter(wanted).partition(|e| e.cell.takes_turns());
        if !in_turns.is_empty() {
            self.in_turns(block, &in_turns, round);
        }
        for entry in &alone {
            self.entry(block, entry, round);
        }
        for entry in alone.into_iter().filter(|e| is_again(e)) {
            self.entry(block, entry, round);
        }
    }

    /// The entry as it is measured: a peer as it does best.
    fn settled(&self, entry: &Entry) -> Entry {
        let mut entry = entry.clone();
        let best = self.best.get(&(entry.cell.subject, entry.cell.kind));
        if let Some((pin, cc)) = best.filter(|_| !entry.as_is) {
            entry.cell.pin = *pin;
            entry.cell.cc.clone_from(cc);
        }
        entry
    }

    /// Says what is measured next, and waits for a quiet machine.
    fn announce(&mut self, block: &Block, label: &str, round: u32) {
        let rounds = self.options.rounds;
        self.progress.show(&format!(
            "round {} of {rounds}, {} of {}: {} {label} ({:.0} s)",
            round + 1,
            self.done + 1,
            self.total,
            block.id,
            self.start.elapsed().as_secs_f64(),
        ));
        if !self.options.quiet_wait.is_zero() {
            self.launcher.wait_quiet(self.options.quiet_wait);
        }
    }

    fn entry(&mut self, block: &Block, entry: &Entry, round: u32) {
        let entry = self.settled(entry);
        self.announce(block, &entry.label, round);
        let result = self.measure(&entry);
        self.results.records.push(Record::new(block, &entry, round, result));
        self.done += 1;
    }

    /// Measures entries side by side, again while the machine is not quiet.
    fn in_turns(&mut self, block: &Block, entries: &[&Entry], round: u32) {
        let mut entries: Vec<Entry> = entries.iter().map(|entry| self.settled(entry)).collect();
        self.announce(block, &format!("and {} more in turns", entries.len() - 1), round);
        let mut best: Vec<Result<Sample, String>> = Vec::new();
        for tries in 1..=self.tries() {
            let start = |entry: &mut Entry| {
                let cell = Cell { window_ms: 0, ..entry.cell.clone() };
                self.placed(cell, |cell, program| self.launcher.start(cell, program))
            };
            let window = self.options.window;
            let mut results = turns::measure(self.launcher, &mut entries, window, start);
            results.iter_mut().flatten().for_each(|sample| sample.tries = tries);
            let foreign = |of: &[Result<Sample, String>]| {
                of.iter().flatten().map(|sample| sample.foreign).fold(0.0, f64::max)
            };
            // A failure is reported, not measured again.
            let failed = results.iter().any(Result::is_err);
            let quiet = !results.iter().flatten().any(Sample::is_disturbed);
            if failed || best.is_empty() || foreign(&results) <= foreign(&best) {
                best = results;
            }
            if failed || quiet {
                break;
            }
        }
        self.done += entries.len();
        for (entry, result) in entries.iter().zip(best) {
            self.results.records.push(Record::new(block, entry, round, result));
        }
    }

    fn measure(&mut self, entry: &Entry) -> Result<Sample, String> {
        if entry.cell.kind.is_by_fio() {
            let (tries, launcher, doors) = (self.tries(), self.launcher, &mut self.doors);
            return until_quiet(tries, || doors.measure(launcher, &entry.cell));
        }
        self.placed(entry.cell.clone(), |cell, program| {
            self.launcher.measure_quiet(cell, program, self.tries())
        })
    }

    /// Does something with a cell whose addresses nobody has.
    fn placed<T>(
        &self,
        mut cell: Cell,
        mut act: impl FnMut(&Cell, Option<&std::path::Path>) -> Result<T, String>,
    ) -> Result<T, String> {
        let program = self.peers.path(cell.subject);
        let mut result = Err(String::new());
        for _ in 0..COLLISIONS {
            match cell.subject {
                subject if subject.has_devices() => cell.nodes = nodes::free_roce(),
                subject if subject.is_bowline() || subject.is_of_host() => {
                    cell.nodes = nodes::free();
                }
                _ => {}
            }
            result = act(&cell, program);
            if !result.as_ref().is_err_and(|why| nodes::is_collision(why)) {
                break;
            }
        }
        result
    }

    /// How long the run may take. Longer windows and more rounds than the defaults were asked for
    /// knowingly.
    fn limit(&self) -> Duration {
        let (limit, rounds) = if self.options.quick { (QUICK_LIMIT, 1) } else { (RUN_LIMIT, 5) };
        let rounds = f64::from(self.options.rounds) / f64::from(rounds);
        let window = self.options.window.as_secs_f64() / 0.25;
        limit.mul_f64(rounds.max(1.0) * window.max(1.0))
    }

    /// Repeats are allowed as long as the run keeps to its time.
    fn tries(&self) -> u32 {
        let due = self.limit().mul_f64(self.done as f64 / self.total.max(1) as f64);
        let slack = Duration::from_secs(3);
        if self.start.elapsed() <= due + slack { TRIES } else { 1 }
    }

    /// Finds out how each peer does best, in one size per kind of cell.
    fn try_peers(&mut self, blocks: &[Block]) {
        let mut seen = Vec::new();
        for entry in blocks.iter().flat_map(|b| &b.entries) {
            let key = (entry.cell.subject, entry.cell.kind);
            // One request after the other: bound and unbound stand beside each other.
            let both = entry.cell.kind == Kind::IoPing;
            if !entry.cell.subject.is_peer() || both || entry.as_is || seen.contains(&key) {
                continue;
            }
            seen.push(key);
            let mut cell = entry.cell.clone();
            cell.window_ms = cell.window_ms.min(200);
            if cell.kind == Kind::Stream {
                cell.size = 8192;
            }
            let mut ways = vec![(cell.pin, cell.cc.clone())];
            // Two processes that spin must not meet on one CPU, where they would wait for each
            // other.
            if cell.pin.is_some() && cell.wait != Wait::Spin {
                ways.push((None, cell.cc.clone()));
            }
            if !cell.cc.is_empty() && cell.cc != self.system_cc {
                ways.push((cell.pin, self.system_cc.to_owned()));
            }
            let name = cell.subject.name();
            self.progress.show(&format!("trying how {name} does best"));
            let program = self.peers.path(cell.subject);
            let rate = |(pin, cc): &(Option<(usize, usize)>, String)| {
                let mut cell = cell.clone();
                cell.pin = *pin;
                cell.cc.clone_from(cc);
                self.launcher.measure(&cell, program).map_or(0.0, |sample| sample.rate())
            };
            let Some((first, others)) = ways.split_first() else { continue };
            let mut best = (rate(first), first);
            for way in others {
                let rate = rate(way);
                if rate > best.0 * BETTER {
                    best = (rate, way);
                }
            }
            self.best.insert(key, best.1.clone());
        }
    }
}

fn notes(best: &Best, options: &Options) -> Vec<String> {
    best.iter()
        .map(|((subject, kind), (pin, cc))| {
            let pinned = match (pin.is_some(), options.pin.is_some()) {
                (true, _) => "pinned",
                (false, true) => "unpinned",
                (false, false) => "unpinned as all",
            };
            let cc = if cc.is_empty() { String::new() } else { format!(", {cc}") };
            format!("{} {}: {pinned}{cc}", subject.name(), kind.name())
        })
        .collect()
}
