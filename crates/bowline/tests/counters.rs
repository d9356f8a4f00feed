//! Counters that noise cannot touch: system calls, copies, allocations and thread hand-overs per
//! unit of work. One process runs both nodes, so allocations of both sides are counted together.

use std::sync::Mutex;
use std::thread;

use bowline::rds::{DriverStats, Paths, PollMode};
use bowline_testkit::allocations::{self, Counting};

mod common;
use common::Pair;

/// The allocation count is one for the process: one test at a time.
static ALONE: Mutex<()> = Mutex::new(());

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Counters of one side, and allocations of both.
struct Cost {
    sender: DriverStats,
    receiver: DriverStats,
    allocations: u64,
}

/// Streams `count` messages of `size` bytes after a warm-up.
fn stream(pair: &Pair, size: usize, count: u64) -> Cost {
    let (a, b) = pair.sockets(4000);
    for socket in [&a, &b] {
        socket.set_send_buffer(1 << 20).unwrap();
        socket.set_recv_buffer(4 << 20).unwrap();
    }
    let warm = count / 4;
    let mut before = None;
    thread::scope(|s| {
        s.spawn(|| {
            let message = vec![7; size];
            for _ in 0..warm + count {
                a.send_to(&message, pair.b(4000)).unwrap();
            }
            a.flush(None).unwrap();
        });
        let mut buf = vec![0; size];
        for i in 0..warm + count {
            if i == warm {
                before = Some((
                    pair.left.driver_stats(),
                    pair.right.driver_stats(),
                    allocations::count(),
                ));
            }
            assert_eq!(b.recv(&mut buf).unwrap(), size);
        }
    });
    let (left, right, allocations) = before.unwrap();
    Cost {
        sender: pair.left.driver_stats() - left,
        receiver: pair.right.driver_stats() - right,
        allocations: allocations::count() - allocations,
    }
}

/// The background thread polls at intervals, one wait each, at any rate of messages: a slow machine
/// has more polls, not more per message.
fn data_path_calls(stats: DriverStats) -> u64 {
    stats.syscalls() - stats.helper_turns.min(stats.waits)
}

/// Calls of a side that never slept: without its waits and the read that each of them led to. How
/// often a side sleeps is decided by the scheduler: a receiver that is faster than the sender
/// sleeps once for each piece the sender writes.
fn awake_calls(stats: DriverStats) -> u64 {
    stats.syscalls().saturating_sub(stats.helper_turns.min(stats.waits) + 2 * sleeps(stats))
}

fn sleeps(stats: DriverStats) -> u64 {
    stats.waits.saturating_sub(stats.helper_turns)
}

fn check(what: &str, per: f64, bound: f64) {
    println!("{what}: {per:.4}, at most {bound}");
    assert!(per <= bound, "{what}: {per} is above {bound}");
}

/// `slack` allocations are allowed for pools that grow when the two sides drift apart; nothing may
/// grow with the number of messages.
fn check_stream(size: usize, count: u64, calls: f64, slack: f64, test: u16) {
    let _alone = ALONE.lock().unwrap_or_else(|e| e.into_inner());
    let n = count as f64;
    let awake = |stats| awake_calls(stats) as f64 / n;
    let asleep = |stats| sleeps(stats) as f64 / n;
    // The scheduler decides how the two threads alternate: one undisturbed stream of five shows the
    // cost.
    let mut tries = 0;
    let (pair, cost) = loop {
        let pair = Pair::with(test, |b| b.paths(Paths::One).poll(PollMode::Sleep));
        let cost = stream(&pair, size, count);
        tries += 1;
        let most = |of: &dyn Fn(DriverStats) -> f64| of(cost.sender).max(of(cost.receiver));
        let (most_awake, most_asleep) = (most(&awake), most(&asleep));
        println!("stream {tries}, per message: {most_awake:.4} calls, {most_asleep:.4} sleeps");
        if most_awake <= calls && most_asleep <= 2.0 * calls || tries == 5 {
            break (pair, cost);
        }
    };
    println!("sender {:?}\nreceiver {:?}", cost.sender, cost.receiver);
    for (side, stats) in [("sender", cost.sender), ("receiver", cost.receiver)] {
        check(&format!("system calls per message, {side}"), awake(stats), calls);
        check(&format!("sleeps per message, {side}"), asleep(stats), 2.0 * calls);
    }
    check("allocations per message", cost.allocations as f64 / n, slack / n);
    let bytes = n * size as f64;
    check("copies per byte, sender", cost.sender.bytes_copied_in as f64 / bytes, 1.3);
    let copied: u64 = pair
        .right
        .counters()
        .into_iter()
        .filter(|(name, _)| *name == "bl_rx_copied_bytes")
        .map(|(_, value)| value)
        .sum();
    let received = cost.receiver.bytes_copied_out as f64;
    check("copies per byte, receiver", (received + copied as f64) / received, 1.3);
}

#[test]
fn streaming_64_bytes_costs_next_to_nothing() {
    check_stream(64, 1_000_000, 0.01, 1000.0, 600);
}

#[test]
fn streaming_8_kib_shares_system_calls() {
    check_stream(8192, 100_000, 0.12, 1000.0, 601);
}

/// What a sleeping round trip costs: system calls and thread hand-overs of the side that has more,
/// and allocations of both for each message.
fn sleeping_round_trip() -> [(&'static str, f64, f64); 3] {
    let pair = Pair::with(602, |b| b.paths(Paths::One).poll(PollMode::Sleep));
    let (a, b) = pair.sockets(4000);
    const ROUNDS: u64 = 5000;
    const WARM: u64 = 500;
    let mut before = None;
    thread::scope(|s| {
        s.spawn(|| {
            let mut buf = [0; 64];
            for _ in 0..ROUNDS + WARM {
                b.recv(&mut buf).unwrap();
                b.send_to(&buf, pair.a(4000)).unwrap();
            }
        });
        let mut buf = [0; 64];
        for i in 0..ROUNDS + WARM {
            if i == WARM {
                before = Some((
                    pair.left.driver_stats(),
                    pair.right.driver_stats(),
                    allocations::count(),
                ));
            }
            a.send_to(&buf, pair.b(4000)).unwrap();
            a.recv(&mut buf).unwrap();
        }
    });
    let (left, right, allocations) = before.unwrap();
    let allocations = allocations::count() - allocations;
    let n = ROUNDS as f64;
    let sides = [pair.left.driver_stats() - left, pair.right.driver_stats() - right];
    println!("{sides:?}");
    let most = |of: fn(DriverStats) -> u64| sides.map(of).into_iter().max().unwrap_or(0) as f64;
    // One poll of the background thread in a few may come between a reader's poll and its sleep.
    let hand_overs = |stats: DriverStats| stats.hand_overs.saturating_sub(stats.helper_turns / 8);
    [
        ("system calls per round trip", most(data_path_calls) / n, 4.0),
        ("thread hand-overs per round trip", most(hand_overs) / n, 0.005),
        ("allocations per message", allocations as f64 / (2.0 * n), 0.005),
    ]
}

#[test]
fn a_sleeping_round_trip_takes_four_system_calls_and_no_other_thread() {
    let _alone = ALONE.lock().unwrap_or_else(|e| e.into_inner());
    // The scheduler decides who runs: one undisturbed run of ten shows the cost.
    let is_undisturbed =
        |costs: &[(&str, f64, f64)]| costs.iter().all(|(_, per, bound)| per <= bound);
    let costs = (0..10).map(|_| sleeping_round_trip()).find(|costs| is_undisturbed(costs));
    for (what, per, bound) in costs.unwrap_or_else(sleeping_round_trip) {
        check(what, per, bound);
    }
}
