//! Targets as bullet bars: the line in the middle is what must be reached, the diamond the goal.

use super::canvas::{Anchor, Canvas, GRID, INK, MUTED};
use crate::report::short;
use crate::targets::{Outcome, Verdict};

const ROW: f64 = 22.0;
const NAMES: f64 = 410.0;
const VALUES: f64 = 250.0;
/// The axis runs from a quarter of what must be reached to eight times of it.
const LOW: f64 = 0.25;
const HIGH: f64 = 8.0;

/// Draws all targets; returns where they end.
pub(super) fn panel(c: &mut Canvas, outcomes: &[Outcome], x: f64, y: f64, width: f64) -> f64 {
    let (left, right) = (x + NAMES, x + width - VALUES);
    let across =
        |v: f64| left + (right - left) * (v.clamp(LOW, HIGH) / LOW).ln() / (HIGH / LOW).ln();
    let bottom = y + 20.0 + outcomes.len() as f64 * ROW;
    for tick in [0.25, 0.5, 1.0, 2.0, 4.0, 8.0] {
        let name = if tick == 1.0 { "must".to_owned() } else { format!("x {tick}") };
        c.line((across(tick), y + 14.0), (across(tick), bottom), GRID, 1.0);
        let bold = tick == 1.0;
        c.text(across(tick), y + 10.0, 10.5, MUTED, Anchor::Middle, bold, &name);
    }
    for (i, o) in outcomes.iter().enumerate() {
        row(c, o, (x, y + 20.0 + i as f64 * ROW), (left, right), &across);
    }
    c.line((across(1.0), y + 14.0), (across(1.0), bottom), INK, 1.4);
    bottom
}

fn row(
    c: &mut Canvas,
    o: &Outcome,
    (x, top): (f64, f64),
    (left, right): (f64, f64),
    across: &dyn Fn(f64) -> f64,
) {
    let t = &o.target;
    let smaller = t.metric.smaller_is_better();
    // How many times better than it must be, whichever way better is.
    let reach = |v: f64| if smaller { t.must.max(1e-12) / v.max(1e-12) } else { v / t.must };
    let colour = match o.verdict {
        Verdict::Pass => "#2da44e",
        Verdict::Fail(_) => "#cf222e",
        Verdict::Undecided(_) | Verdict::Ceiling(_) => "#bf8700",
        Verdict::Skipped(_) => "#afb8c1",
    };
    let base = top + 14.5;
    c.text(x, base, 11.5, MUTED, Anchor::Start, true, t.id);
    c.text(x + 38.0, base, 11.5, INK, Anchor::Start, false, t.what);
    c.text(left - 14.0, base, 11.0, MUTED, Anchor::End, false, &t.against_text());
    let sign = if smaller { "<=" } else { ">=" };
    let must = format!("{sign} {}, goal {}", short(t.must), short(t.goal));
    if let Some(ratio) = o.ratio {
        let end = across(reach(ratio.mid));
        c.rect(left, top + 5.5, (end - left).max(2.0), 10.0, colour);
        if ratio.count > 1 {
            let (a, b) = (across(reach(ratio.low)), across(reach(ratio.high)));
            c.line((a, top + 10.5), (b, top + 10.5), INK, 1.0);
        }
        c.diamond((across(reach(t.goal)), top + 10.5), 4.5, INK);
        c.text(right + 14.0, base, 12.0, INK, Anchor::Start, true, &short(ratio.mid));
    }
    c.text(right + 72.0, base, 11.0, MUTED, Anchor::Start, false, &must);
    c.text(right + 250.0, base, 11.5, colour, Anchor::End, true, o.verdict.word());
}
