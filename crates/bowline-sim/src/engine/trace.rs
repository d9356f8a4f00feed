//! The record of a run: always a hash, and text on demand.
//!
//! The hash covers every step, so runs with equal hashes took the same steps. Text costs more than
//! the run itself, and is made only when a seed is run again to be examined.

use std::collections::VecDeque;

use super::rng::mix;

/// How much text a run keeps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TraceMode {
    /// Only the hash.
    #[default]
    Hash,
    /// The given number of lines, the last ones.
    Last(usize),
    /// Every line.
    All,
}

/// The record of a run.
#[derive(Debug)]
pub(crate) struct Trace {
    hash: u64,
    keep: usize,
    lines: VecDeque<String>,
}

impl Trace {
    pub(crate) fn new(mode: TraceMode) -> Self {
        let keep = match mode {
            TraceMode::Hash => 0,
            TraceMode::Last(n) => n,
            TraceMode::All => usize::MAX,
        };
        Self { hash: 0xcbf2_9ce4_8422_2325, keep, lines: VecDeque::new() }
    }

    /// Adds an event: `facts` to the hash, and `text` to the lines if they are kept.
    pub(crate) fn note(&mut self, now: u64, facts: [u64; 3], text: impl FnOnce() -> String) {
        let folded = facts.iter().fold(now, |h, f| h.rotate_left(23) ^ f.wrapping_mul(0x9e37));
        self.hash = mix(self.hash ^ folded);
        if self.keep > 0 {
            if self.lines.len() == self.keep {
                self.lines.pop_front();
            }
            self.lines.push_back(format!("{:>13.6} {}", now as f64 / 1e6, text()));
        }
    }

    pub(crate) fn hash(&self) -> u64 {
        self.hash
    }

    pub(crate) fn into_lines(self) -> Vec<String> {
        self.lines.into()
    }
}
