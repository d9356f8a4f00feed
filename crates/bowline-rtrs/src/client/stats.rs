//! Counters of a path.

use core::time::Duration;

use bowline_wire::rtrs::Dir;

/// Rows of the histogram: 1, 2, 4 .. 65536 ms, and the rest [RS-46].
const ROWS: usize = 18;
/// Number of processors that are counted separately.
const CPUS_MAX: usize = 1024;

/// Times from submission to completion [RS-46].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Latencies {
    /// Requests by latency, reads and writes: at most 1, 2, 4 .. 65536 ms, and more.
    pub rows: [[u64; 2]; ROWS],
    /// The highest latency of reads and of writes.
    pub max: [Duration; 2],
    /// All latencies of reads and of writes together.
    pub sum: [Duration; 2],
}

impl Latencies {
    fn note(&mut self, dir: Dir, took: Duration) {
        let row = if took <= Duration::from_millis(1) {
            0
        } else {
            let ms = u64::try_from(took.as_nanos().div_ceil(1_000_000)).unwrap_or(u64::MAX);
            (ms - 1).ilog2() as usize + 1
        };
        let column = usize::from(dir == Dir::Write);
        self.rows[row.min(ROWS - 1)][column] += 1;
        self.max[column] = self.max[column].max(took);
        self.sum[column] += took;
    }
}

/// Counters of a client path [RS-41], [RS-42], [RS-46].
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ClientStats {
    /// Requests of direction READ that were posted.
    pub reads: u64,
    /// Bytes of these requests, user message and data.
    pub read_bytes: u64,
    /// Requests of direction WRITE that were posted.
    pub writes: u64,
    /// Bytes of these requests, user message and data.
    pub write_bytes: u64,
    /// Requests taken over from other paths.
    pub failovers: u64,
    /// Reconnections that succeeded; -1 before the path was connected for the first time.
    pub reconnects: i64,
    /// Attempts to reconnect that failed.
    pub reconnects_failed: i64,
    /// For each processor: completions expected on it that were handled on another.
    pub migration_from: Vec<u64>,
    /// For each processor: completions handled on it that were expected on another.
    pub migration_to: Vec<u64>,
    /// Times from submission to completion.
    pub latencies: Latencies,
    /// Most completions handled at a time.
    pub wc_max: u64,
    /// Completions handled.
    pub wc_total: u64,
    /// Number of times completions were handled.
    pub wc_calls: u64,
}

impl Default for ClientStats {
    fn default() -> Self {
        Self {
            reads: 0,
            read_bytes: 0,
            writes: 0,
            write_bytes: 0,
            failovers: 0,
            reconnects: -1,
            reconnects_failed: 0,
            migration_from: Vec::new(),
            migration_to: Vec::new(),
            latencies: Latencies::default(),
            wc_max: 0,
            wc_total: 0,
            wc_calls: 0,
        }
    }
}

/// A file of statistics that can be reset by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StatsFile {
    /// `cpu_migration_from` and `cpu_migration_to`, which are reset together.
    Migration,
    /// `reconnects`.
    Reconnects,
    /// `rdma`.
    Rdma,
    /// `rdma_lat`.
    Latencies,
    /// `wc_completion`.
    WcCompletion,
    /// All.
    All,
}

impl ClientStats {
    pub(super) fn posted(&mut self, dir: Dir, bytes: u64) {
        match dir {
            Dir::Read => {
                self.reads += 1;
                self.read_bytes += bytes;
            }
            Dir::Write => {
                self.writes += 1;
                self.write_bytes += bytes;
            }
        }
    }

    pub(super) fn completed(&mut self, dir: Dir, took: Duration, expected: u16, actual: u16) {
        self.latencies.note(dir, took);
        if expected != actual {
            bump(&mut self.migration_from, expected);
            bump(&mut self.migration_to, actual);
        }
    }

    pub(super) fn handled(&mut self, completions: u64) {
        self.wc_max = self.wc_max.max(completions);
        self.wc_total += completions;
        self.wc_calls += 1;
    }

    /// Resets the counters in one file to 0. Requests in flight are a state, not a counter, and
    /// stay.
    pub(super) fn reset(&mut self, file: StatsFile) {
        let is = |one| file == one || file == StatsFile::All;
        if is(StatsFile::Migration) {
            self.migration_from.clear();
            self.migration_to.clear();
        }
        if is(StatsFile::Reconnects) {
            (self.reconnects, self.reconnects_failed) = (0, 0);
        }
        if is(StatsFile::Rdma) {
            (self.reads, self.read_bytes, self.writes, self.write_bytes) = (0, 0, 0, 0);
            self.failovers = 0;
        }
        if is(StatsFile::Latencies) {
            self.latencies = Latencies::default();
        }
        if is(StatsFile::WcCompletion) {
            (self.wc_max, self.wc_total, self.wc_calls) = (0, 0, 0);
        }
    }
}

fn bump(of: &mut Vec<u64>, cpu: u16) {
    let at = usize::from(cpu).min(CPUS_MAX - 1);
    if of.len() <= at {
        of.resize(at + 1, 0);
    }
    of[at] += 1;
}

#[cfg(test)]
mod tests {
    use super::*;

    // tests [RS-46]
    #[test]
    fn a_request_is_in_the_first_row_it_fits() {
        let mut latencies = Latencies::default();
        for (us, row) in [
            (0, 0),
            (1_000, 0),
            (1_001, 1),
            (2_000, 1),
            (2_001, 2),
            (65_536_000, 16),
            (65_536_001, 17),
            (9_999_999_999, 17),
        ] {
            let before = latencies.rows[row][0];
            latencies.note(Dir::Read, Duration::from_micros(us));
            assert_eq!(latencies.rows[row][0], before + 1, "{us} us");
        }
        let sum: u64 = 1_000 + 1_001 + 2_000 + 2_001 + 65_536_000 + 65_536_001 + 9_999_999_999;
        assert_eq!(latencies.sum, [Duration::from_micros(sum), Duration::ZERO]);
        assert_eq!(latencies.max, [Duration::from_micros(9_999_999_999), Duration::ZERO]);
    }

    // tests [RS-42]
    #[test]
    fn a_reset_clears_what_the_file_shows() {
        let mut stats = ClientStats::default();
        stats.posted(Dir::Write, 10);
        stats.completed(Dir::Write, Duration::from_millis(3), 1, 2);
        stats.reset(StatsFile::Reconnects);
        assert_eq!((stats.reconnects, stats.writes), (0, 1));
        assert_eq!((stats.migration_from[1], stats.migration_to[2]), (1, 1));
        stats.reset(StatsFile::All);
        assert_eq!(stats, ClientStats { reconnects: 0, ..ClientStats::default() });
    }
}
