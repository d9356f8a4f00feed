//! What a stream of writes costs in system calls and acknowledgements, whatever the machine does
//! besides.

mod common;

use std::time::Duration;

use bowline_roce::Config;
use bowline_roce_driver::{DriverStats, SoftConfig};
use bowline_verbs::{Device, SendOp, Status};
use common::{Side, connect, ip, open_with};

const MIB: usize = 1 << 20;
const WRITES: usize = 64;
const DEPTH: usize = 4;
/// 4 KiB packets of all writes.
const PACKETS: u64 = (WRITES * MIB / 4096) as u64;

/// Streams writes with a few outstanding; the target's thread polls all the while if told so.
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

fn run(net: u8, target_polls: bool) -> [DriverStats; 2] {
    // A machine that stands still for a moment must not look like a loss.
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
    [after[0] - before[0], after[1] - before[1]]
}

#[test]
fn a_stream_of_writes_costs_few_calls_and_acknowledgements() {
    for (net, target_polls) in [(20, true), (21, false)] {
        let sides = run(net, target_polls);
        for (side, stats) in ["sender", "target"].into_iter().zip(&sides) {
            let calls = stats.udp_syscalls();
            eprintln!("{side}: {calls} calls for {PACKETS} packets; {stats:?}");
            // C7: at most 0.10 system calls for each packet of 4 KiB.
            assert!(calls * 10 <= PACKETS, "{side}: {calls} calls for {PACKETS} packets");
        }
        let acks = sides[1].packets_sent;
        // C8: at most one acknowledgement for 15 packets.
        assert!(acks * 15 <= sides[0].packets_sent, "{acks} acknowledgements");
        assert!(sides[0].gso_sends * 10 >= sides[0].sends * 8, "bursts, not packets");
    }
}
