//! Paths on which nothing is acknowledged any more [RT-88] [RT-93].

use std::time::Duration;

use bowline_rtrs::server::{CloseReason, ServerConfig};
use bowline_rtrs::{HbConfig, PathId};
use bowline_wire::rtrs::Imm;

use super::rig::{Path, Rig, config};

const A: &str = "10.0.0.2";
const B: &str = "10.0.0.3";

/// A session of two paths; of a bowline, or not.
fn two(bowline: bool, heartbeat: HbConfig) -> (Rig, [Path; 2]) {
    let mut rig = Rig::with(ServerConfig { heartbeat, ..config() });
    rig.gives_notice = bowline;
    let paths = [rig.path(1, 1, A, 2), rig.path(1, 2, B, 2)];
    (rig, paths)
}

/// Lets time pass. Messages on paths that are not cut are acknowledged, but never answered.
fn pass(rig: &mut Rig, cut: &[PathId], seconds: u64) -> Vec<(PathId, CloseReason)> {
    rig.cut = cut.iter().copied().collect();
    rig.pass(Duration::from_secs(seconds));
    rig.take_closed()
}

/// Clients on paths that are not cut answer, as one that sends something every second.
fn pass_busy(
    rig: &mut Rig,
    cut: &[PathId],
    alive: &Path,
    seconds: u64,
) -> Vec<(PathId, CloseReason)> {
    rig.cut = cut.iter().copied().collect();
    for _ in 0..seconds * 2 {
        rig.pass(Duration::from_millis(500));
        rig.hear(alive.conn(0), Imm::HbAck);
    }
    rig.take_closed()
}

// tests [RT-93]: a kernel client fails its requests when no path is left, so the server waits for
// it as long as a kernel server does
#[test]
fn the_last_paths_of_a_kernel_outlive_an_outage() {
    let (mut rig, paths) = two(false, HbConfig::default());
    let ids = paths.each_ref().map(|path| path.id);
    for cut in [&ids[..], &ids[..1]] {
        for conn in [0, 1] {
            let bears = rig.give_up[&paths[0].conn(conn)];
            assert!(bears.is_some_and(|time| time > Duration::from_secs(35)), "{bears:?}");
        }
        // The other path, if there is one, is known to be alive by now; otherwise neither is given
        // up in favour of the other.
        let closed = if cut.len() == 2 {
            pass(&mut rig, cut, 6)
        } else {
            pass_busy(&mut rig, cut, &paths[1], 6)
        };
        let expected: &[_] = if cut.len() == 2 { &[] } else { &[(ids[0], CloseReason::Silent)] };
        assert_eq!(closed, expected, "{} wires cut", cut.len());
        if cut.len() == 2 {
            // Both paths are mended.
            for path in &paths {
                rig.hear(path.conn(0), Imm::HbAck);
            }
        }
    }
    // A single path is waited for for half a minute.
    assert_eq!(pass(&mut rig, &ids, 29), []);
    assert_eq!(pass(&mut rig, &ids, 7), [(ids[1], CloseReason::Heartbeat)]);
}

// tests [RT-93]: two paths that fall silent at different times are not given up in favour of each
// other
#[test]
fn of_two_silent_paths_neither_is_the_better_one() {
    for shift in (0..1000).step_by(50) {
        let (mut rig, paths) = two(false, HbConfig::default());
        let ids = paths.each_ref().map(|path| path.id);
        for path in &paths {
            rig.pass(Duration::from_millis(shift));
            rig.hear(path.conn(0), Imm::HbAck);
        }
        assert_eq!(pass(&mut rig, &ids, 28), [], "{shift} ms apart");
    }
}

// tests [RT-93]: of two cut wires one is mended a moment before the other; the path that works
// first is no reason to give up the second
#[test]
fn the_last_path_to_come_back_is_not_given_up() {
    for late in (100..2_500).step_by(50) {
        let (mut rig, paths) = two(false, HbConfig::default());
        let ids = paths.each_ref().map(|path| path.id);
        assert_eq!(pass(&mut rig, &ids, 6), []);
        let mut answers = |cut: &[PathId], ms: u64| {
            rig.cut = cut.iter().copied().collect();
            for path in paths.iter().filter(|path| !cut.contains(&path.id)) {
                rig.hear(path.conn(0), Imm::HbAck);
            }
            rig.pass(Duration::from_millis(ms));
        };
        (0..late / 50).for_each(|_| answers(&ids[1..], 50));
        (0..100).for_each(|_| answers(&[], 50));
        assert_eq!(rig.take_closed(), [], "{late} ms later");
    }
}

// tests [RT-88], [RT-93]: the server closes no silent path early if the client is a bowline, or if
// its own configuration has no fast path detection
#[test]
fn bowlines_and_slow_detection_are_left_to_others() {
    let (mut rig, paths) = two(true, HbConfig::default());
    assert_eq!(rig.give_up[&paths[0].conn(0)], None, "as the device has it");
    assert_eq!(pass_busy(&mut rig, &[paths[0].id], &paths[1], 10), []);
    let slow = HbConfig { fast_path_detection: false, ..HbConfig::default() };
    let (mut rig, paths) = two(false, slow);
    assert_eq!(pass_busy(&mut rig, &[paths[0].id], &paths[1], 28), []);
}
