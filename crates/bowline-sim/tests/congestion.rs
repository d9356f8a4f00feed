//! What the controller of RoCE keeps, in a few of the cells. All of them run in
//! `bowline sim --roce --cells`.

use bowline_roce::{Config, Congestion};
use bowline_sim::roce::congestion::{Cell, Report, cells, run};

fn cell(name: &str) -> Cell {
    cells().into_iter().find(|cell| cell.name == name).expect(name)
}

fn report(name: &str, congestion: Congestion) -> Report {
    run(&cell(name), &Config { congestion, ..Config::default() }, 1)
}

#[test]
fn one_cell_of_each_kind_keeps_its_floor() {
    for name in [
        "one-1g-500us-quarter",
        "read-200m-100us",
        "ecn-10g-50us",
        "late-3",
        "late-turns-200m",
        "small-loss-1",
    ] {
        let broken = cell(name).broken(&report(name, Congestion::Delay));
        assert!(broken.is_empty(), "{name}: {broken:?}");
    }
}

/// The fixed window of before, with the same losses.
#[test]
fn one_per_cent_of_loss_costs_less_than_with_a_fixed_window() {
    let ours = report("loss-1", Congestion::Delay).used;
    let before = report("loss-1", Congestion::Fixed(240)).used;
    assert!(ours >= 1.3 * before, "{ours:.3} and {before:.3}");
}

#[test]
fn what_is_below_a_floor_is_told() {
    let cell = cell("late-3");
    let mut report = report("late-3", Congestion::Delay);
    report.used = 0.5;
    assert_eq!(cell.broken(&report).len(), 1);
    assert_eq!(cell.missed(&report).len(), 1);
    report.failure = Some("a request completed twice".to_owned());
    assert_eq!(cell.broken(&report).len(), 2);
    let mut nothing = self::report("small-loss-1", Congestion::Delay);
    nothing.small = [0; 3];
    assert_eq!(self::cell("small-loss-1").broken(&nothing).len(), 1);
}
