//! A capture file holds every packet as it is on the wire.

mod common;
use bowline_testkit::skipped;

use std::net::{IpAddr, Ipv4Addr};
use std::process::Command;

use bowline_roce_driver::SoftConfig;
use bowline_verbs::SendOp;
use bowline_wire::roce::{Outer, split_icrc};
use common::{connect, ip, open, open_with};

fn u32_at(bytes: &[u8], at: usize) -> usize {
    u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap()) as usize
}

/// Frames of a pcapng file.
fn frames(bytes: &[u8]) -> Vec<&[u8]> {
    let mut at = 0;
    let mut found = Vec::new();
    while at < bytes.len() {
        if u32_at(bytes, at) == 6 {
            found.push(&bytes[at + 28..at + 28 + u32_at(bytes, at + 20)]);
        }
        at += u32_at(bytes, at + 4);
    }
    found
}

#[test]
fn every_packet_is_captured_with_its_icrc() {
    // tests [ICRC-21], [ICRC-31]
    let path = std::env::temp_dir().join(format!("bowline-roce-{}.pcapng", std::process::id()));
    let capture = Some(path.clone());
    let (a, b) = (
        open_with(SoftConfig { addrs: vec![ip(40, 1)], capture, ..SoftConfig::default() }),
        open(ip(40, 2)),
    );
    let (near, far) = connect(&a, &b, 1 << 17);
    // So long that it stays one message [REQ-26].
    near.post(1, SendOp::Write(far.remote(0)), 0, 130_000);
    near.done(1);
    near.post(2, SendOp::Read(far.remote(0)), 0, 100_000);
    near.done(2);
    a.close();
    let stats = a.stats();
    assert_eq!(stats.capture_errors, 0);
    let bytes = std::fs::read(&path).unwrap();
    let frames = frames(&bytes);
    let sent = frames.iter().filter(|frame| frame[12..16] == [127, 78, 40, 1]).count() as u64;
    let received = frames.len() as u64 - sent;
    // The background thread may still be counting what it sent when the device was closed.
    let begun = std::time::Instant::now();
    while a.stats().packets_sent != sent && begun.elapsed().as_secs() < 5 {
        std::thread::yield_now();
    }
    assert_eq!(sent, a.stats().packets_sent);
    // An answer that arrives while the device is closed is captured, and no longer counted.
    let (counted, answers) = (a.stats().packets_received, b.stats().packets_sent);
    assert!(counted <= received && received <= answers, "{counted}, {received}, {answers}");
    let mut counted = false;
    for frame in &frames {
        let word = |at: usize| u16::from_be_bytes([frame[at], frame[at + 1]]);
        let address = |at: usize| {
            let octets: [u8; 4] = frame[at..at + 4].try_into().unwrap();
            IpAddr::V4(Ipv4Addr::from(octets))
        };
        assert_eq!(usize::from(word(2)), frame.len());
        assert_eq!((word(6), word(22)), (0x4000, 4791));
        let outer = Outer { from: address(12), to: address(16), source_port: word(20) };
        let (packet, icrc) = split_icrc(&frame[28..]).unwrap();
        assert_eq!(outer.icrc(word(4), packet), icrc);
        counted |= word(4) > 0;
    }
    assert!(counted, "bursts count identifications up");

    match Command::new("tshark").arg("-r").arg(&path).args(["-Y", "infiniband"]).output() {
        Err(_) => skipped::without("tshark"),
        Ok(output) => {
            let text = String::from_utf8_lossy(&output.stdout);
            let complaint = String::from_utf8_lossy(&output.stderr);
            assert_eq!(text.lines().count(), frames.len(), "{text}{complaint}");
            for what in ["ConnectRequest", "ReadyToUse", "RDMA Write First", "RDMA Read Response"] {
                assert!(text.contains(what), "{what} in {text}");
            }
        }
    }
    std::fs::remove_file(&path).unwrap();
}
