//! A page of plots: rates, round trips, growth with sockets and nodes, and the targets.
//!
//! Colours tell what kind of thing is measured: blue is bowline, grey bare sockets, amber another
//! library. Every bar and line carries its name and value, so that nothing has to be looked up.

mod bars;
mod canvas;
mod latency;
mod lines;
mod targets;

use canvas::{Anchor, Canvas, INK, MUTED};

use crate::head::Head;
use crate::plan::{Block, Figure};
use crate::results::Results;
use crate::targets::Outcome;

/// Width of the page, in pixels.
const WIDTH: f64 = 1260.0;
/// Space at the edges and between panels.
const GAP: f64 = 30.0;

/// Names of cells that carry messages one way between two.
const ONE_WAY: &[&str] = &["stream", "bulk", "send", "write"];

/// Draws the page.
pub(crate) fn page(
    head: &Head,
    notes: &[String],
    blocks: &[Block],
    results: &Results,
    outcomes: &[Outcome],
) -> String {
    let mut c = Canvas::default();
    let mut y = header(&mut c, head, notes);
    if let Some(warning) = crate::report::warning(results) {
        c.rect(GAP, y, WIDTH - 2.0 * GAP, 26.0, "#fff1e5");
        c.text(GAP + 10.0, y + 17.5, 12.5, "#bc4c00", Anchor::Start, true, &warning);
        y += 36.0;
    }

    let of = |figure: Figure| blocks.iter().filter(move |b| b.figure == figure);
    let starts = |b: &&Block, words: &[&str]| words.iter().any(|w| b.id.starts_with(w));
    let is_storage = |b: &&Block| b.entries.iter().any(|e| e.cell.kind.is_of_storage());
    let (requests, one_way): (Vec<&Block>, Vec<&Block>) =
        of(Figure::Rate).filter(|b| is_storage(b) || starts(b, ONE_WAY)).partition(is_storage);
    let shared: Vec<&Block> =
        of(Figure::Rate).filter(|b| !is_storage(b) && !starts(b, ONE_WAY)).collect();
    let round: Vec<&Block> = of(Figure::Latency).collect();
    let growth: Vec<&Block> = of(Figure::Curve).collect();

    y = section(
        &mut c,
        y,
        "One way",
        "messages from one to one other",
        &one_way,
        |c, b, x, y, w| bars::panel(c, b, results, (x, y, w)),
    );
    let what = "reads and writes of another process's memory";
    y = section(&mut c, y, "Requests", what, &requests, |c, b, x, y, w| {
        bars::panel(c, b, results, (x, y, w))
    });
    let doors: Vec<&Block> = of(Figure::Doors).collect();
    let what = "fio on what other programs see of a disk";
    y = section(&mut c, y, "Doors", what, &doors, |c, b, x, y, w| {
        bars::panel(c, b, results, (x, y, w))
    });
    let lossy = shared.iter().all(|b| b.id.starts_with("loss"));
    let (name, what) = match lossy {
        true => ("Loss", "packets thrown away by their receivers"),
        false => ("Shared", "sixteen to one, paths, a receiver that sleeps, congestion control"),
    };
    y = section(&mut c, y, name, what, &shared, |c, b, x, y, w| {
        bars::panel(c, b, results, (x, y, w))
    });
    let what = "time by the share of trips that took no longer";
    y = section(&mut c, y, "Round trips", what, &round, |c, b, x, y, w| {
        latency::panel(c, b, results, (x, y, w))
    });
    let what = "CPU time of a 64 B message, sender and receiver, as their number grows";
    y = section(&mut c, y, "Growth", what, &growth, |c, b, x, y, w| {
        lines::panel(c, b, results, (x, y, w))
    });
    if !outcomes.is_empty() {
        title(
            &mut c,
            y,
            "Targets",
            "how far each figure is from what it must be, in the same round",
        );
        y = targets::panel(&mut c, outcomes, GAP, y + 40.0, WIDTH - 2.0 * GAP);
    }
    c.finish(WIDTH, y + GAP)
}

fn header(c: &mut Canvas, head: &Head, notes: &[String]) -> f64 {
    let mut y = 48.0;
    c.text(GAP, y, 26.0, INK, Anchor::Start, true, "bowline bench");
    let right = format!("{}  commit {}", head.date, head.commit);
    c.text(WIDTH - GAP, y, 14.0, MUTED, Anchor::End, false, &right);
    y += 8.0;
    for line in head.lines().iter().skip(1).chain(notes.iter().take(2)) {
        y += 17.0;
        c.text(GAP, y, 12.0, MUTED, Anchor::Start, false, line);
    }
    let peers: Vec<&str> = notes.iter().filter_map(|n| n.strip_prefix("peer ")).collect();
    if !peers.is_empty() {
        y += 17.0;
        c.text(GAP, y, 12.0, MUTED, Anchor::Start, false, &format!("peers: {}", peers.join("; ")));
    }
    y += 26.0;
    let mut x = GAP;
    for (name, label) in
        [("bowline", "bowline"), ("tcpb", "bare sockets"), ("zmq", "other libraries")]
    {
        c.rect(x, y - 10.0, 12.0, 12.0, canvas::colour(name));
        c.text(x + 18.0, y, 12.0, INK, Anchor::Start, false, label);
        x += 130.0;
    }
    c.text(x, y, 12.0, MUTED, Anchor::Start, false, "thin lines: quartiles over rounds");
    y + 16.0
}

fn title(c: &mut Canvas, y: f64, name: &str, what: &str) {
    c.line((GAP, y + 6.0), (WIDTH - GAP, y + 6.0), "#d8dee4", 1.0);
    c.text(GAP, y + 30.0, 17.0, INK, Anchor::Start, true, name);
    let x = GAP + 14.0 + name.len() as f64 * 10.5;
    c.text(x, y + 30.0, 12.5, MUTED, Anchor::Start, false, what);
}

/// Lays panels out in rows of three; each returns its height. Returns where the section ends.
fn section(
    c: &mut Canvas,
    y: f64,
    name: &str,
    what: &str,
    blocks: &[&Block],
    panel: impl Fn(&mut Canvas, &Block, f64, f64, f64) -> f64,
) -> f64 {
    if blocks.is_empty() {
        return y;
    }
    title(c, y, name, what);
    let across = if blocks.len() == 2 || blocks.len() == 4 { 2 } else { 3 };
    let width = (WIDTH - GAP * (across as f64 + 1.0)) / across as f64;
    let mut y = y + 48.0;
    for row in blocks.chunks(across) {
        let mut height = 0.0f64;
        for (i, block) in row.iter().enumerate() {
            let x = GAP + i as f64 * (width + GAP);
            height = height.max(panel(c, block, x, y, width));
        }
        y += height + 22.0;
    }
    y
}
