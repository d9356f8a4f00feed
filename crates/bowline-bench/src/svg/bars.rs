//! Bars of rates.

use super::canvas::{Anchor, Canvas, GRID, INK, MUTED, colour};
use crate::cell::Subject;
use crate::plan::Block;
use crate::report::short;
use crate::results::Results;
use crate::run::Sample;
use crate::stats::{Spread, spread};

const ROW: f64 = 19.0;
const NAMES: f64 = 108.0;
/// Width of a letter of a name, for names that need more room.
const LETTER: f64 = 6.3;
const VALUES: f64 = 96.0;

/// From this size on, bytes say more than messages.
const BYTES_FROM: usize = 8192;

/// Draws one block as horizontal bars, the best on top; returns the height.
pub(super) fn panel(c: &mut Canvas, block: &Block, results: &Results, at: (f64, f64, f64)) -> f64 {
    let (x, y, width) = at;
    let as_bytes = block.entries.iter().any(|e| e.cell.size >= BYTES_FROM);
    let unit = if as_bytes { "GB/s" } else { "messages/s" };
    c.text(x, y + 12.0, 13.0, INK, Anchor::Start, true, &block.title);
    c.text(x + width, y + 12.0, 11.0, MUTED, Anchor::End, false, unit);

    // Messages of one block may differ in size; their bytes can be compared.
    let value = |s: &Sample| if as_bytes { s.byte_rate() } else { s.rate() };
    let mut bars: Vec<((&str, String), usize, Option<Spread>)> = block
        .entries
        .iter()
        .map(|e| {
            let name = (e.label.as_str(), Subject::shown(&e.label));
            let samples = results.samples(&block.id, &e.label);
            (name, e.cell.size, spread(samples.iter().map(|s| value(s))))
        })
        .collect();
    let mid = |s: &Option<Spread>| s.map_or(-1.0, |s| s.mid);
    bars.sort_by(|(_, _, a), (_, _, b)| mid(b).total_cmp(&mid(a)));
    let max = bars.iter().filter_map(|(_, _, s)| Some((*s)?.high)).fold(1e-9, f64::max);
    let longest = bars.iter().map(|((_, shown), _, _)| shown.len()).max().unwrap_or(0);
    let names = NAMES.max(longest as f64 * LETTER + 8.0);
    let room = width - names - VALUES;
    let left = x + names;
    let bottom = y + 22.0 + bars.len() as f64 * ROW;
    c.line((left, y + 20.0), (left, bottom), GRID, 1.0);
    for (i, ((label, shown), size, rate)) in bars.iter().enumerate() {
        let top = y + 22.0 + i as f64 * ROW;
        let own = label.starts_with("bowline") || colour(label) == colour("bowline");
        c.text(left - 8.0, top + 13.0, 11.5, INK, Anchor::End, own, shown);
        let Some(rate) = rate else {
            c.text(left + 6.0, top + 13.0, 11.0, "#cf222e", Anchor::Start, false, "failed");
            continue;
        };
        let long = |v: f64| v / max * room;
        c.rect(left, top + 2.5, long(rate.mid).max(1.0), ROW - 6.0, colour(label));
        if rate.count > 1 {
            let middle = top + ROW / 2.0 - 0.5;
            let (low, high) = (left + long(rate.low), left + long(rate.high));
            c.line((low, middle), (high, middle), INK, 1.0);
            for end in [low, high] {
                c.line((end, middle - 2.5), (end, middle + 2.5), INK, 1.0);
            }
        }
        let text = if as_bytes {
            format!("{:.2}  ({}/s)", rate.mid / 1e9, short(rate.mid / *size as f64))
        } else {
            short(rate.mid)
        };
        let from = left + long(rate.high.max(rate.mid)) + 6.0;
        c.text(from, top + 13.0, 11.0, MUTED, Anchor::Start, own, &text);
    }
    bottom - y
}
