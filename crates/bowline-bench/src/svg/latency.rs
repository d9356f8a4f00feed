//! Distributions of round trip times.

use super::canvas::{Anchor, Canvas, GRID, INK, MUTED, colour, log_ticks};
use crate::plan::Block;
use crate::report::time;
use crate::results::Results;
use crate::role::PERCENTILES;
use crate::stats::median;

const HEIGHT: f64 = 230.0;
const LEFT: f64 = 46.0;
const RIGHT: f64 = 150.0;

/// The shares of trips shown, and the place of each in [`PERCENTILES`].
const SHOWN: [(usize, &str); 7] =
    [(0, "min"), (1, "10 %"), (2, "25 %"), (3, "50 %"), (5, "90 %"), (7, "99 %"), (8, "99.9 %")];

/// Draws one block as lines over the shares of trips; returns the height.
pub(super) fn panel(c: &mut Canvas, block: &Block, results: &Results, at: (f64, f64, f64)) -> f64 {
    let (x, y, width) = at;
    c.text(x, y + 12.0, 13.0, INK, Anchor::Start, true, &block.title);
    let lines: Vec<(&str, Vec<f64>)> = block
        .entries
        .iter()
        .filter_map(|e| {
            let samples = results.samples(&block.id, &e.label);
            let value = |i: usize| {
                median(samples.iter().filter_map(|s| Some(*s.lat.as_ref()?.get(i)? as f64)))
            };
            let values: Option<Vec<f64>> = SHOWN.iter().map(|(i, _)| value(*i)).collect();
            Some((e.label.as_str(), values?))
        })
        .collect();
    let all = || lines.iter().flat_map(|(_, v)| v.iter().copied());
    let (low, high) = (all().fold(f64::MAX, f64::min), all().fold(1.0, f64::max));
    if low > high {
        c.text(x, y + 34.0, 12.0, MUTED, Anchor::Start, false, "nothing was measured");
        return 50.0;
    }
    let (low, high) = (low * 0.8, high * 1.25);
    let (top, bottom) = (y + 26.0, y + HEIGHT - 24.0);
    let (left, right) = (x + LEFT, x + width - RIGHT);
    let across = |i: usize| left + (right - left) * i as f64 / (SHOWN.len() - 1) as f64;
    let up = |ns: f64| bottom - (ns / low).ln() / (high / low).ln() * (bottom - top);
    let ticks = log_ticks(low, high);
    let wide = high / low > 200.0;
    for tick in ticks.into_iter().filter(|t| !wide || is_power_of_ten(*t)) {
        c.line((left, up(tick)), (right, up(tick)), GRID, 1.0);
        c.text(left - 6.0, up(tick) + 4.0, 10.5, MUTED, Anchor::End, false, &round_time(tick));
    }
    for (i, (at, name)) in SHOWN.iter().enumerate() {
        debug_assert!(*at < PERCENTILES.len());
        c.text(across(i), bottom + 16.0, 10.5, MUTED, Anchor::Middle, false, name);
    }
    let mut labels: Vec<(f64, &str, f64)> = Vec::new();
    for (label, values) in &lines {
        let points: Vec<(f64, f64)> =
            values.iter().enumerate().map(|(i, ns)| (across(i), up(*ns))).collect();
        let thick = if *label == "bowline" { 2.6 } else { 1.6 };
        c.polyline(&points, colour(label), thick);
        points.iter().for_each(|p| c.dot(*p, thick, colour(label)));
        if let Some((_, end)) = points.last() {
            labels.push((*end, label, values[3]));
        }
    }
    spread_out(&mut labels, 14.0);
    for (at, label, p50) in labels {
        let text = format!("{label}  p50 {}", time(p50));
        c.text(right + 10.0, at + 4.0, 11.0, INK, Anchor::Start, label == "bowline", &text);
        c.rect(right + 3.0, at - 3.0, 4.0, 7.0, colour(label));
    }
    HEIGHT
}

fn is_power_of_ten(tick: f64) -> bool {
    (tick.log10() - tick.log10().round()).abs() < 1e-9
}

fn round_time(ns: f64) -> String {
    match ns {
        v if v >= 1e6 => format!("{} ms", v / 1e6),
        v if v >= 1e3 => format!("{} us", v / 1e3),
        v => format!("{v} ns"),
    }
}

/// Moves labels apart that would lie on each other.
pub(super) fn spread_out<T, U>(labels: &mut [(f64, T, U)], room: f64) {
    labels.sort_by(|a, b| a.0.total_cmp(&b.0));
    for i in 1..labels.len() {
        let least = labels[i - 1].0 + room;
        if labels[i].0 < least {
            labels[i].0 = least;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_keep_their_order_and_their_distance() {
        let mut labels = vec![(12.0, "b", ()), (10.0, "a", ()), (90.0, "c", ())];
        spread_out(&mut labels, 14.0);
        assert_eq!(labels, [(10.0, "a", ()), (24.0, "b", ()), (90.0, "c", ())]);
    }
}
