//! Cost of a message as the number of sockets or nodes grows.

use super::canvas::{Anchor, Canvas, GRID, INK, MUTED};
use crate::plan::Block;
use crate::report::time;
use crate::results::Results;
use crate::stats::median;

const HEIGHT: f64 = 210.0;
const LEFT: f64 = 52.0;
const RIGHT: f64 = 86.0;

/// Draws one block as two lines over a logarithmic number; returns the height.
pub(super) fn panel(c: &mut Canvas, block: &Block, results: &Results, at: (f64, f64, f64)) -> f64 {
    let (x, y, width) = at;
    c.text(x, y + 12.0, 13.0, INK, Anchor::Start, true, &block.title);
    let points: Vec<(f64, f64, f64)> = block
        .entries
        .iter()
        .filter_map(|e| {
            let samples = results.samples(&block.id, &e.label);
            let tx = median(samples.iter().map(|s| s.tx_cpu))?;
            let rx = median(samples.iter().map(|s| s.rx_cpu))?;
            Some((e.cell.flows as f64, tx, rx))
        })
        .collect();
    let Some((last, _, _)) = points.last().copied() else {
        c.text(x, y + 34.0, 12.0, MUTED, Anchor::Start, false, "nothing was measured");
        return 50.0;
    };
    let max = points.iter().map(|(_, tx, rx)| tx.max(*rx)).fold(1.0, f64::max) * 1.1;
    let (top, bottom) = (y + 26.0, y + HEIGHT - 24.0);
    let (left, right) = (x + LEFT, x + width - RIGHT);
    let across = |n: f64| left + (right - left) * n.ln() / last.max(2.0).ln();
    let up = |ns: f64| bottom - ns / max * (bottom - top);
    let step = step(max);
    for i in 0..=(max / step) as u32 {
        let tick = f64::from(i) * step;
        c.line((left, up(tick)), (right, up(tick)), GRID, 1.0);
        c.text(left - 6.0, up(tick) + 4.0, 10.5, MUTED, Anchor::End, false, &time(tick));
    }
    for (n, _, _) in &points {
        c.text(across(*n), bottom + 16.0, 10.5, MUTED, Anchor::Middle, false, &n.to_string());
    }
    let mut labels = Vec::new();
    for (name, colour, pick) in [("send", "#1f6feb", 0), ("receive", "#79b1f7", 1)] {
        let line: Vec<(f64, f64)> = points
            .iter()
            .map(|(n, tx, rx)| (across(*n), up(if pick == 0 { *tx } else { *rx })))
            .collect();
        c.polyline(&line, colour, 2.2);
        line.iter().for_each(|p| c.dot(*p, 2.6, colour));
        if let Some((_, end)) = line.last() {
            labels.push((*end, name, colour));
        }
    }
    super::latency::spread_out(&mut labels, 14.0);
    for (at, name, colour) in labels {
        c.text(right + 10.0, at + 4.0, 11.5, colour, Anchor::Start, true, name);
    }
    HEIGHT
}

/// A round distance of about a quarter of `max`.
fn step(max: f64) -> f64 {
    let rough = max / 4.0;
    let decade = 10f64.powf(rough.log10().floor());
    [1.0, 2.0, 5.0, 10.0].map(|m| m * decade).into_iter().find(|s| *s >= rough).unwrap_or(rough)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_are_round() {
        assert_eq!([step(400.0), step(430.0), step(9.0)], [100.0, 200.0, 5.0]);
    }
}
