//! A histogram of times with two significant digits and a fixed size.
//!
//! Values below 64 have a bucket each; above, every power of two is cut into 32 buckets, so a
//! percentile is at most 3 % above the true value.

use serde::{Deserialize, Serialize};

const FINE: u64 = 64;
const PER_POWER: usize = 32;
const BUCKETS: usize = FINE as usize + (64 - 6) * PER_POWER;

/// Counts values of any unit; merges with others of its kind.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) struct Histogram {
    buckets: Box<[u64]>,
    count: u64,
    sum: f64,
    squares: f64,
    min: u64,
    max: u64,
}

impl Default for Histogram {
    fn default() -> Self {
        Self {
            buckets: vec![0; BUCKETS].into_boxed_slice(),
            count: 0,
            sum: 0.0,
            squares: 0.0,
            min: u64::MAX,
            max: 0,
        }
    }
}

impl Histogram {
    /// Counts one value.
    pub(crate) fn record(&mut self, value: u64) {
        self.buckets[bucket(value)] += 1;
        self.count += 1;
        self.sum += value as f64;
        self.squares += value as f64 * value as f64;
        self.min = self.min.min(value);
        self.max = self.max.max(value);
    }

    /// Adds everything another histogram counted.
    pub(crate) fn merge(&mut self, other: &Self) {
        for (mine, theirs) in self.buckets.iter_mut().zip(&other.buckets) {
            *mine += theirs;
        }
        self.count += other.count;
        self.sum += other.sum;
        self.squares += other.squares;
        self.min = self.min.min(other.min);
        self.max = self.max.max(other.max);
    }

    /// Returns how many values were counted.
    pub(crate) fn count(&self) -> u64 {
        self.count
    }

    /// Returns the smallest value, 0 when nothing was counted.
    pub(crate) fn min(&self) -> u64 {
        if self.count == 0 { 0 } else { self.min }
    }

    /// Returns the largest value, 0 when nothing was counted.
    pub(crate) fn max(&self) -> u64 {
        self.max
    }

    /// Returns the mean, 0 when nothing was counted.
    pub(crate) fn mean(&self) -> f64 {
        if self.count == 0 { 0.0 } else { self.sum / self.count as f64 }
    }

    /// Returns the standard deviation, which `ping` calls mdev.
    pub(crate) fn deviation(&self) -> f64 {
        if self.count == 0 {
            return 0.0;
        }
        let mean = self.mean();
        (self.squares / self.count as f64 - mean * mean).max(0.0).sqrt()
    }

    /// Returns the value that `percent` of the counted values do not exceed.
    pub(crate) fn percentile(&self, percent: f64) -> u64 {
        let wanted = ((percent / 100.0) * self.count as f64).ceil().max(1.0) as u64;
        let mut seen = 0;
        for (index, count) in self.buckets.iter().enumerate() {
            seen += count;
            if seen >= wanted {
                return highest(index).clamp(self.min(), self.max);
            }
        }
        self.max
    }

    /// Returns how many values lie in `low..high`, exact when both are powers of two.
    pub(crate) fn between(&self, low: u64, high: u64) -> u64 {
        self.buckets
            .iter()
            .enumerate()
            .filter(|(index, _)| (low..high).contains(&highest(*index)))
            .map(|(_, count)| count)
            .sum()
    }
}

fn bucket(value: u64) -> usize {
    if value < FINE {
        return value as usize;
    }
    let power = value.ilog2();
    let within = (value >> (power - 5)) as usize & (PER_POWER - 1);
    FINE as usize + (power as usize - 6) * PER_POWER + within
}

/// Returns the largest value that falls into a bucket.
fn highest(index: usize) -> u64 {
    if index < FINE as usize {
        return index as u64;
    }
    let power = (index - FINE as usize) / PER_POWER + 6;
    let within = ((index - FINE as usize) % PER_POWER) as u64;
    let step = 1u64 << (power - 5);
    (1u64 << power) + within * step + (step - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_value_lies_in_the_bucket_whose_bounds_contain_it() {
        for value in (0..5000).chain([1 << 20, (1 << 40) + 12345, u64::MAX]) {
            let index = bucket(value);
            assert!(value <= highest(index), "{value}");
            assert!(index == 0 || value > highest(index - 1), "{value}");
        }
    }

    #[test]
    fn percentiles_are_close() {
        let mut histogram = Histogram::default();
        for value in 1..=10_000 {
            histogram.record(value);
        }
        let median = histogram.percentile(50.0);
        assert!((5000..=5160).contains(&median), "{median}");
        assert_eq!(histogram.percentile(100.0), 10_000);
        assert_eq!((histogram.min(), histogram.max(), histogram.count()), (1, 10_000, 10_000));
        assert_eq!(histogram.between(1024, 2048), 1024);
        assert!((histogram.mean() - 5000.5).abs() < 0.01);
    }

    #[test]
    fn an_empty_histogram_answers() {
        let histogram = Histogram::default();
        assert_eq!((histogram.min(), histogram.max(), histogram.percentile(99.0)), (0, 0, 0));
        assert_eq!(histogram.deviation(), 0.0);
    }
}
