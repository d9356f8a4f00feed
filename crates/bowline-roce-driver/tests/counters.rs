//! Costs of a stream of writes that do not depend on the load of the machine: system calls,
//! acknowledgements and passes of the checksum.

mod common;

use std::time::Duration;

use bowline_roce::{Config, Counters};
use bowline_roce_driver::{DriverStats, SoftConfig};
use bowline_verbs::{Device, SendOp, Status};
use common::{Side, connect, ip, open_with};

const MIB: usize = 1 << 20;
const WRITES: usize = 64;
const DEPTH: usize = 4;
/// 4 KiB packets of all writes.
const PACKETS: u64 = (WRITES * MIB / 4096) as u64;

/// Streams writes with a few outstanding; the target's thread polls meanwhile if `target_polls`.
fn stream(a: &Side, b: &Side, target_polls: bool) {
    let done = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        if target_polls {
            scope.spawn(|| {
                let mut out = Vec::new();
                while !done.load(std::sync::atomic::Ordering::Relaxed) {
                    b.dev.poll_cq(b.cq, &mut out, 16).unwrap();
                }
            });
        }
        let (mut posted, mut finished) = (0, 0);
        while finished < WRITES {
            while posted < WRITES && posted - finished < DEPTH {
                let at = posted % DEPTH * MIB;
                a.post(posted as u64, SendOp::Write(b.remote(at)), at, MIB);
                posted += 1;
            }
            assert_eq!(a.completion().status, Status::Success);
            finished += 1;
        }
        done.store(true, std::sync::atomic::Ordering::Relaxed);
    });
}

fn run(net: u8, target_polls: bool) -> [(DriverStats, Counters); 2] {
    // A stall of the machine must not look like a loss.
    let core = Config { retransmit_min: Duration::from_secs(2), ..Config::default() };
    let open = |host| {
        let (addrs, core) = (vec![ip(net, host)], core.clone());
        open_with(SoftConfig { addrs, core, ..SoftConfig::default() })
    };
    let (a, b) = (open(1), open(2));
    let (a, b) = connect(&a, &b, DEPTH * MIB);
    stream(&a, &b, target_polls);
    let before = [a.dev.stats(), b.dev.stats()];
    stream(&a, &b, target_polls);
    let after = [a.dev.stats(), b.dev.stats()];
    let [a, b] = [&a, &b].map(|side| side.dev.counters());
    [(after[0] - before[0], a), (after[1] - before[1], b)]
}

#[test]
fn a_stream_of_writes_costs_few_calls_and_acknowledgements() {
    for (net, target_polls) in [(20, true), (21, false)] {
        let sides = run(net, target_polls);
        for (side, (stats, core)) in ["sender", "target"].into_iter().zip(&sides) {
            let calls = stats.udp_syscalls();
            eprintln!("{side}: {calls} calls for {PACKETS} packets; {stats:?}");
            // C7: at most 0.10 system calls for each packet of 4 KiB.
            assert!(calls * 10 <= PACKETS, "{side}: {calls} calls for {PACKETS} packets");
            // C11: one pass of the checksum over each byte sent and over each received.
            for (name, summed, all) in [
                ("sent", core.tx_icrc_bytes, core.tx_bytes - 4 * core.tx_packets),
                ("received", core.rx_icrc_bytes, core.rx_bytes - 4 * core.rx_packets),
            ] {
                assert!(all > 0 && summed <= all, "{side}: {summed} passes for {all} bytes {name}");
            }
        }
        let [(sender, core), (target, _)] = &sides;
        assert!(core.tx_icrc_bytes > (2 * WRITES * MIB) as u64, "the data were summed");
        let acks = target.packets_sent;
        // C8: at most one acknowledgement for 15 packets.
        assert!(acks * 15 <= sender.packets_sent, "{acks} acknowledgements");
        assert!(sender.gso_sends * 10 >= sender.sends * 8, "bursts, not packets");
    }
}

/// A poll before a sleep takes the processor from whoever is to send what is waited for.
#[test]
fn polls_that_never_pay_are_left_out() {
    const WAITS: u64 = 48;
    /// Looks of a poll, of which one is made by the wait itself.
    const LOOKS_OF_A_POLL: u64 = 10;
    let (spin, limit) = (Duration::from_millis(2), Duration::from_millis(3));
    let device = open_with(SoftConfig { addrs: vec![ip(26, 1)], spin, ..SoftConfig::default() });
    let cq = device.create_cq(16).unwrap();
    let polls = (0..WAITS).filter(|_| {
        let before = device.stats().empty_looks;
        assert!(!device.wait_cq(cq, false, Some(limit)).unwrap());
        device.stats().empty_looks - before > LOOKS_OF_A_POLL
    });
    let polls = polls.count() as u64;
    // The first finds out, and one in 16 looks whether that is so still.
    assert!(polls <= 1 + WAITS / 16, "{polls} polls before {WAITS} sleeps");
}
