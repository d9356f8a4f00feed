//! The text format of Prometheus, version 0.0.4.
//!
//! ```text
//! # HELP bowline_rds_recv_ping_total Pings answered.
//! # TYPE bowline_rds_recv_ping_total counter
//! bowline_rds_recv_ping_total 3
//! ```

use std::{
    collections::HashSet,
    fmt::{self, Write},
};

use crate::log::shown;

/// The type of a family.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Kind {
    /// Never falls while the process runs.
    Counter,
    /// A state.
    Gauge,
    /// Counts by upper bound, their sum and their number.
    Histogram,
}

impl Kind {
    const fn name(self) -> &'static str {
        match self {
            Self::Counter => "counter",
            Self::Gauge => "gauge",
            Self::Histogram => "histogram",
        }
    }
}

/// A text under construction.
#[derive(Debug, Default)]
pub struct Exposition {
    text: String,
}

impl Exposition {
    /// Begins a family; all its samples follow before the next one begins.
    pub(super) fn family(&mut self, name: &str, kind: Kind, help: &str) -> Family<'_> {
        debug_assert_eq!(kind == Kind::Counter, name.ends_with("_total"), "{name}");
        let help = help.replace('\\', r"\\").replace('\n', r"\n");
        self.write(format_args!("# HELP {name} {help}\n# TYPE {name} {}\n", kind.name()));
        Family { name: name.to_owned(), seen: HashSet::new(), out: self }
    }

    /// Returns the text.
    pub(super) fn finish(self) -> String {
        self.text
    }

    fn write(&mut self, text: fmt::Arguments<'_>) {
        // Writing into a String cannot fail.
        let _ = self.text.write_fmt(text);
    }
}

/// A family whose samples are being written.
pub(super) struct Family<'a> {
    name: String,
    /// Labels of the samples so far: two samples must not have the same.
    seen: HashSet<String>,
    out: &'a mut Exposition,
}

impl Family<'_> {
    /// Writes a sample, unless one with these labels is there.
    pub(super) fn sample(&mut self, labels: &[(&str, &str)], value: impl fmt::Display) {
        self.put("", labels, value);
    }

    /// Writes a histogram: how many observations were at most each bound, where the last bound is
    /// infinite, and the sum of all.
    pub(super) fn histogram(&mut self, labels: &[(&str, &str)], rows: &[(f64, u64)], sum: f64) {
        let mut count = 0;
        for (bound, more) in rows {
            count += more;
            let bound = if bound.is_finite() { bound.to_string() } else { String::from("+Inf") };
            self.put("_bucket", &[labels, &[("le", &bound)]].concat(), count);
        }
        self.put("_sum", labels, sum);
        self.put("_count", labels, count);
    }

    fn put(&mut self, suffix: &str, labels: &[(&str, &str)], value: impl fmt::Display) {
        let labels: Vec<String> =
            labels.iter().map(|(name, value)| format!("{name}=\"{}\"", escaped(value))).collect();
        let labels =
            if labels.is_empty() { String::new() } else { format!("{{{}}}", labels.join(",")) };
        if self.seen.insert(format!("{suffix}{labels}")) {
            let name = &self.name;
            self.out.write(format_args!("{name}{suffix}{labels} {value}\n"));
        }
    }
}

/// Escapes the value of a label.
fn escaped(text: &str) -> String {
    // The format has no escapes for other characters that a terminal would not show.
    let line = |line: &str| shown(line).replace('\\', r"\\").replace('"', r#"\""#);
    text.split('\n').map(line).collect::<Vec<_>>().join(r"\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_peers_call_themselves_stays_within_its_quotes() {
        let mut out = Exposition::default();
        let mut family = out.family("sessions", Kind::Gauge, "One\nline, \\ kept.");
        family.sample(&[("session", "a\"} 7\nb\\c"), ("port", "1")], 3);
        family.sample(&[("session", "\x1b[2J")], 4);
        drop(family);
        assert_eq!(
            out.finish(),
            "# HELP sessions One\\nline, \\\\ kept.\n# TYPE sessions gauge\n\
             sessions{session=\"a\\\"} 7\\nb\\\\c\",port=\"1\"} 3\n\
             sessions{session=\"\\\\u001b[2J\"} 4\n"
        );
    }

    #[test]
    fn samples_of_one_family_differ_in_their_labels() {
        let mut out = Exposition::default();
        let mut family = out.family("up", Kind::Gauge, "Up.");
        family.sample(&[("a", "1")], 1);
        family.sample(&[("a", "1")], 0);
        family.sample(&[], 2);
        drop(family);
        assert_eq!(out.finish(), "# HELP up Up.\n# TYPE up gauge\nup{a=\"1\"} 1\nup 2\n");
    }

    #[test]
    fn a_histogram_counts_up() {
        let mut out = Exposition::default();
        let mut family = out.family("wait_seconds", Kind::Histogram, "Waits.");
        family.histogram(&[("d", "r")], &[(0.001, 2), (0.002, 0), (f64::INFINITY, 1)], 0.5);
        drop(family);
        let text = out.finish();
        let lines: Vec<&str> = text.lines().skip(2).collect();
        assert_eq!(
            lines,
            [
                "wait_seconds_bucket{d=\"r\",le=\"0.001\"} 2",
                "wait_seconds_bucket{d=\"r\",le=\"0.002\"} 2",
                "wait_seconds_bucket{d=\"r\",le=\"+Inf\"} 3",
                "wait_seconds_sum{d=\"r\"} 0.5",
                "wait_seconds_count{d=\"r\"} 3",
            ]
        );
    }
}
