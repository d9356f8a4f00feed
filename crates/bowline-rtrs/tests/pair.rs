//! Client core against server core, through bindings and a network made of a few tables. Everything
//! happens in an order drawn from a seed, paths are killed and cut, and acknowledged data must be
//! readable.

mod pair {
    pub(crate) mod net;
    pub(crate) mod world;
}

use pair::world::{Plan, World};

fn run(plan: Plan) -> World {
    let mut world = World::new(plan);
    world.open();
    world.run();
    world.finish();
    world
}

// tests [RT-18], [RT-38] to [RT-57], [RT-99] of both sides
#[test]
fn both_sides_agree_with_and_without_refresh() {
    for refresh in [false, true] {
        for (io_connections, counts_keys) in [(0, true), (1, false), (1, true), (3, false)] {
            let calm = Plan::calm(u64::from(io_connections));
            let world = run(Plan { refresh, counts_keys, io_connections, ..calm });
            assert!(world.done > 1000 && world.failed == 0, "{} {}", world.done, world.failed);
            assert_eq!(world.failovers, 0);
        }
    }
}

// tests [RS-8], [RS-9], [RS-19]
#[test]
fn paths_die_and_nothing_is_lost() {
    let (mut done, mut failed, mut waited, mut failovers) = (0, 0, 0, 0);
    // More with `SEEDS=n`.
    let seeds = std::env::var("SEEDS").map_or(40, |seeds| seeds.parse().expect("a number"));
    // 1394: a request given up while INFO_RSP was on its way.
    for seed in (0..seeds).chain([1394]) {
        let world = run(Plan::rough(seed));
        done += world.done;
        failed += world.failed;
        waited += world.server.counters().requests_waited;
        failovers += world.failovers;
    }
    assert!(done > 6_000, "{done} done, {failed} failed");
    assert!(waited > 5, "{waited} requests met their first copy, of {failovers} repeated");
    assert!(failovers > 60, "{failovers} repeated");
}

// tests [RS-9]: a server that begins a repeated request at once corrupts data, and this test
// notices
#[test]
fn the_test_notices_what_it_is_for() {
    let seen = (0..120).any(|seed| {
        let plan = Plan { answer_twice: true, ..Plan::rough(seed) };
        std::panic::catch_unwind(|| drop(run(plan))).is_err()
    });
    assert!(seen);
}

// tests [RT-101]: requests of paths that were cut and given up arrive late, and change nothing
#[test]
fn what_comes_late_over_a_path_that_was_given_up_does_no_harm() {
    let seeds = std::env::var("SEEDS").map_or(300, |seeds| seeds.parse().expect("a number"));
    let notices = |seed| {
        let world = run(Plan { holds: true, ..Plan::rough(seed) });
        let counters = world.server.counters();
        counters.notices - counters.notices_ignored
    };
    let closed: u64 = (0..seeds).map(notices).sum();
    assert!(closed > 100, "{closed} paths closed that were given up");
}

// tests [RT-101]: without notices the late requests corrupt data, and this test notices
#[test]
fn the_test_notices_a_server_that_is_not_told() {
    let seen = (0..300).any(|seed| {
        let plan = Plan { holds: true, mute: true, ..Plan::rough(seed) };
        std::panic::catch_unwind(|| drop(run(plan))).is_err()
    });
    assert!(seen);
}

// tests [RT-28]: the last row, over the binding
#[test]
fn a_server_without_queue_pairs_says_so() {
    let mut world = World::new(Plan::calm(1));
    assert_eq!(world.open_in_vain(), Some(bowline_rtrs::Errno::ENOMEM));
}
