//! Direct placement of the payloads of long messages.

use std::sync::Arc;
use std::time::Instant;

use crate::common::{PATIENCE, Side, connect, connect_to, ip, open, open_with};
use bowline_roce_driver::{Impairments, SoftConfig, SoftDevice};
use bowline_verbs::SendOp;

const MIB: usize = 1 << 20;
const MESSAGES: usize = 8;

fn pattern(salt: usize) -> Vec<u8> {
    (0..MIB).map(|i| (i * 31 + (i >> 8) + salt) as u8).collect()
}

fn check(side: &Side, offset: usize, salt: usize) {
    let mut bytes = vec![0; MIB];
    side.buffer.read(offset, &mut bytes);
    assert!(bytes == pattern(salt), "message {salt}");
}

/// Writes messages, one after the other, from the first half of one side's memory to the second of
/// the other's.
fn write(a: &Side, b: &Side, first: usize) {
    for salt in first..first + MESSAGES {
        a.buffer.write(0, &pattern(salt));
        a.post(salt as u64, SendOp::Write(b.remote(MIB)), 0, MIB);
        a.done(salt as u64);
        check(b, MIB, salt);
    }
}

/// Reads them.
fn read(a: &Side, b: &Side) {
    for salt in 0..MESSAGES {
        b.buffer.write(0, &pattern(salt));
        a.post(salt as u64, SendOp::Read(b.remote(0)), MIB, MIB);
        a.done(salt as u64);
        check(a, MIB, salt);
    }
}

/// Repeats something until payloads were placed directly at a device: none are while the sender is
/// slower than the thread that polls.
fn until_some_land(at: &SoftDevice, mut again: impl FnMut()) {
    let start = Instant::now();
    while at.stats().packets_landed == 0 {
        assert!(start.elapsed() < PATIENCE, "{:?}", at.stats());
        again();
    }
}

#[test]
fn writes_and_answers_to_reads_land() {
    let (a, b) = (open(ip(50, 1)), open(ip(50, 2)));
    let (a, b) = connect(&a, &b, 2 * MIB);
    until_some_land(&b.dev, || write(&a, &b, 0));
    until_some_land(&a.dev, || read(&a, &b));
    for side in [&a, &b] {
        assert_eq!(side.dev.counters().rx_landed, side.dev.stats().packets_landed);
    }
}

/// With a capture or losses on purpose, packets are examined before they are placed.
#[test]
fn nothing_lands_where_packets_are_looked_at() {
    let path = std::env::temp_dir().join(format!("bowline-landing-{}.pcapng", std::process::id()));
    let capture = Some(path.clone());
    let config = |host| SoftConfig { addrs: vec![ip(51, host)], ..SoftConfig::default() };
    let captures = open_with(SoftConfig { capture, ..config(2) });
    let loses = open_with(SoftConfig {
        impairments: Impairments::parse("loss=0.1%,way=in", 1).unwrap(),
        ..config(3)
    });
    for far in [captures, loses] {
        let near = open(ip(51, 1));
        let (a, b) = connect(&near, &far, 2 * MIB);
        write(&a, &b, 0);
        assert_eq!(b.dev.stats().packets_landed, 0);
    }
    std::fs::remove_file(path).unwrap();
}

/// Each side gets its own data, and none that was meant for the other.
#[test]
fn two_peers_write_at_the_same_time() {
    let near: [Arc<SoftDevice>; 2] = [open(ip(52, 1)), open(ip(52, 2))];
    let far = open(ip(52, 3));
    let pairs =
        [connect_to(&near[0], &far, 2 * MIB, 7471), connect_to(&near[1], &far, 2 * MIB, 7472)];
    until_some_land(&far, || {
        std::thread::scope(|scope| {
            for ((a, b), first) in pairs.iter().zip([0, 100]) {
                scope.spawn(move || write(a, b, first));
            }
        });
    });
    eprintln!("{} buffers were of the other", far.stats().landings_missed);
}
