//! Costs of a request that do not depend on the load of the machine: system calls, packets and
//! allocations. Both sides run in one process, so allocations are counted together.

use std::sync::Mutex;

use bowline_roce::{Config, Counters};
use bowline_roce_driver::{DriverStats, SoftConfig};
use bowline_rtrs_driver::Dir;
use bowline_rtrs_driver::client::Session;
use bowline_rtrs_driver::server::ServerConfig;
use bowline_testkit::allocations::{self, Counting};

mod common;
use common::Pair;
use common::load::Load;

/// The count is of the whole process: one test at a time.
static ALONE: Mutex<()> = Mutex::new(());

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const COUNT: u64 = 20_000;

/// Counters of one side.
#[derive(Debug)]
struct Side {
    driver: DriverStats,
    data_packets: u64,
    /// What was counted, by name.
    roce: Vec<(&'static str, u64)>,
}

/// Packets that carry requests or answers of RTRS: all but acknowledgements, and packets that are
/// sent again. A thread that stalls for some milliseconds is probed with its last packet; nothing
/// is lost here.
fn data_packets(counters: &Counters) -> u64 {
    counters.tx_packets - counters.acks_sent - counters.acks_repeated - counters.packets_resent
}

/// The counters that have changed, and by how much.
fn difference(before: &Counters, after: &Counters) -> Vec<(&'static str, u64)> {
    let both = after.iter().zip(before.iter());
    let all = both.map(|((name, after), (_, before))| (name, after.wrapping_sub(before)));
    all.filter(|(_, count)| *count > 0).collect()
}

struct Cost {
    client: Side,
    server: Side,
    allocations: u64,
}

/// What happens to a chunk's key with each answer.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Keys {
    Kept,
    Told,
    Counted,
}

fn cost(net: u8, keys: Keys, dir: Dir, depth: usize, len: usize) -> Cost {
    let config = ServerConfig { always_invalidate: keys != Keys::Kept, ..ServerConfig::default() };
    // A stall of the machine must not look like a loss.
    let pair = Pair::with(net, 1, config, |soft| SoftConfig {
        core: Config { retransmit_min: std::time::Duration::from_secs(2), ..Config::default() },
        ..soft
    });
    let region = pair.server.add_region(std::sync::Arc::clone(&pair.store.memory)).unwrap();
    *pair.store.region.lock().unwrap() = Some(region);
    let builder = pair.builder("test", 1).counts_keys(keys != Keys::Told);
    let session = Session::open(&pair.client_engine, builder).unwrap();
    let load = Load::new(&session, dir, depth, len);
    load.run(COUNT / 2, true);
    let devices = [&pair.client_device, &pair.server_device];
    let before = devices.map(|device| (device.stats(), device.counters()));
    let allocations = allocations::count();
    load.run(COUNT, true);
    let allocations = allocations::count() - allocations;
    let after = devices.map(|device| (device.stats(), device.counters()));
    assert!(load.errors.lock().unwrap().is_empty());
    let [client, server] = std::array::from_fn(|side| Side {
        driver: after[side].0 - before[side].0,
        data_packets: data_packets(&after[side].1) - data_packets(&before[side].1),
        roce: difference(&before[side].1, &after[side].1),
    });
    Cost { client, server, allocations }
}

/// System calls that a side made: those that moved packets, all sleeps, and all that wakes others.
///
/// Left out are looks that found nothing. A thread that looks before it sleeps makes as many as fit
/// into the time until something comes, 0.5 to 2 a request here; no request causes one. Contended
/// locks, of which bowline keeps no count, are left out as well.
fn calls(driver: &DriverStats) -> u64 {
    driver.udp_syscalls() + driver.sleeps + driver.eventfds + driver.hand_overs
}

/// C9: at most 0.5 system calls, on each side, for each request of 4 KiB at depth 32; and nothing
/// is allocated.
#[test]
fn requests_cost_few_calls_and_no_memory() {
    let _alone = ALONE.lock().unwrap_or_else(|e| e.into_inner());
    for (net, keys, dir) in [
        (30, Keys::Kept, Dir::Read),
        (31, Keys::Counted, Dir::Read),
        (32, Keys::Kept, Dir::Write),
        (33, Keys::Counted, Dir::Write),
    ] {
        // The scheduler decides how threads alternate: the median of three runs counts.
        let mut each = [0.0; 3];
        for each in &mut each {
            let cost = cost(net, keys, dir, 32, 4096);
            let calls = calls(&cost.client.driver).max(calls(&cost.server.driver));
            *each = calls as f64 / COUNT as f64;
            println!(
                "{dir:?}, keys {keys:?}: {calls} calls, {} allocations for {COUNT} requests",
                cost.allocations
            );
            // Queues may still grow when the two sides drift apart; nothing grows with the
            // requests.
            assert!(cost.allocations * 100 <= COUNT, "{} allocations", cost.allocations);
        }
        each.sort_by(f64::total_cmp);
        assert!(each[1] <= 0.5, "{dir:?}, keys {keys:?}: {each:?} calls a request");
    }
}

/// C10: a request and its answer are two packets, up to the MTU, also of a READ whose key is
/// refreshed: clients that count keys need not be told them [RT-99]. To be told one costs a READ a
/// packet more, since data cannot come with it. A WRITE of 4 KiB with its headers is longer than
/// the MTU of 4096, so 2 KiB shows the same.
#[test]
fn a_request_and_its_answer_are_a_packet_each() {
    let _alone = ALONE.lock().unwrap_or_else(|e| e.into_inner());
    for (net, keys, dir, len, answer) in [
        (40, Keys::Kept, Dir::Read, 4096, 1),
        (41, Keys::Counted, Dir::Read, 4096, 1),
        (44, Keys::Told, Dir::Read, 4096, 2),
        (42, Keys::Kept, Dir::Write, 2048, 1),
        (43, Keys::Counted, Dir::Write, 2048, 1),
        (45, Keys::Told, Dir::Write, 2048, 1),
    ] {
        let cost = cost(net, keys, dir, 8, len);
        println!(
            "{dir:?}, keys {keys:?}: {:?}",
            (cost.client.data_packets, cost.server.data_packets)
        );
        for (name, side, each) in [("client", &cost.client, 1), ("server", &cost.server, answer)] {
            let packets = side.data_packets;
            // A few belong to setup, teardown and heartbeats.
            let bounds = each * COUNT - 64..=each * COUNT + 64;
            let counted = format!("{packets} packets: {:?}", side.roce);
            assert!(bounds.contains(&packets), "{name}, {dir:?}, {keys:?}: {counted}");
        }
    }
}
