//! Congestion notifications that nobody asked for [CC-7]: whose they count as, and what they do.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use bowline_roce::{Config, Congestion, IdentHint};
use bowline_verbs::{QpAttr, QpState, SendOp};
use bowline_wire::roce::{Bth, Opcode, Outer, Packet};

use crate::common::{Pair, Setup};

fn pair() -> Pair {
    let config = Config { congestion: Congestion::Delay, ..Config::default() };
    Pair::new(&Setup { config, ..Setup::default() })
}

fn notification(qpn: u32) -> Vec<u8> {
    let mut bytes = Vec::new();
    let bth = Bth { dest_qpn: qpn, becn: true, ..Bth::default() };
    Packet::new(Opcode::Cnp, bth).emit(&mut bytes);
    bytes
}

/// Hands side 0 a notification with a right ICRC for these addresses.
fn deliver(pair: &mut Pair, (from, to): (IpAddr, IpAddr), qpn: u32) {
    let mut bytes = notification(qpn);
    Outer { from, to, source_port: 50_000 }.append_icrc(0, &mut bytes, 0);
    let dev = &mut pair.nodes[0].dev;
    let from = SocketAddr::new(from, 50_000);
    dev.handle_datagram(pair.now, from, to, IdentHint::Unknown, &bytes);
}

/// Notifications that side 0 has heeded, and its window.
fn heeded(pair: &Pair) -> (u64, u64) {
    let path = pair.nodes[0].dev.paths().next().expect("a path");
    (path.cnps_received, path.window.expect("it changes"))
}

fn write(pair: &mut Pair, count: usize) {
    let before = pair.nodes[0].sent.len();
    let (sge, remote) = ([pair.nodes[0].sge(0, 16 << 10)], pair.nodes[1].remote(0));
    for id in 0..count {
        pair.post(0, id as u64, SendOp::Write(remote), &sge);
    }
    pair.finish(0, before + count);
}

// tests [CC-7]
#[test]
fn a_notification_counts_from_the_peer_of_its_queue_pair_only() {
    let mut pair = pair();
    write(&mut pair, 20);
    let (own, peer) = (pair.nodes[0].addr, pair.nodes[1].addr);
    let third: IpAddr = "10.9.9.9".parse().unwrap();
    let qpn = pair.nodes[0].qp.0;
    let before = heeded(&pair);
    for (addrs, qpn) in [
        ((third, own), qpn),
        ((own, own), qpn),
        ((peer, own), qpn ^ 1),
        ((peer, own), 1),
        ((peer, own), 0),
    ] {
        deliver(&mut pair, addrs, qpn);
        assert_eq!(heeded(&pair), before, "{addrs:?} {qpn}");
    }
    // From the peer, but damaged.
    let mut bytes = notification(qpn);
    Outer { from: peer, to: own, source_port: 50_000 }.append_icrc(0, &mut bytes, 0);
    *bytes.last_mut().unwrap() ^= 1;
    let from = SocketAddr::new(peer, 50_000);
    let dev = &mut pair.nodes[0].dev;
    dev.handle_datagram(pair.now, from, own, IdentHint::Unknown, &bytes);
    assert_eq!(heeded(&pair), before, "wrong ICRC");

    deliver(&mut pair, (peer, own), qpn);
    let after = heeded(&pair);
    assert_eq!(after.0, before.0 + 1);
    assert!(after.1 < before.1, "{after:?} {before:?}");

    // Of a queue pair in ERR nothing counts.
    let error = QpAttr { state: Some(QpState::Err), ..QpAttr::default() };
    let (now, qp) = (pair.now, pair.nodes[0].qp);
    pair.nodes[0].dev.modify_qp(now, qp, &error).unwrap();
    let before = pair.nodes[0].dev.paths().next().map(|path| path.cnps_received);
    deliver(&mut pair, (peer, own), qpn);
    assert_eq!(pair.nodes[0].dev.paths().next().map(|path| path.cnps_received), before);
}

/// Whoever forges the peer's address and knows the queue pair can send as many as they like: within
/// a round trip they count once, for half of the window at most.
// tests [CC-7]
#[test]
fn any_number_of_notifications_counts_once_a_round_trip() {
    let mut pair = pair();
    write(&mut pair, 20);
    let (own, peer, qpn) = (pair.nodes[0].addr, pair.nodes[1].addr, pair.nodes[0].qp.0);
    let (_, before) = heeded(&pair);
    for _ in 0..10_000 {
        deliver(&mut pair, (peer, own), qpn);
    }
    let (count, after) = heeded(&pair);
    assert_eq!(count, 10_000);
    assert!(after < before && after >= before / 2, "{before} {after}");
    assert_eq!(pair.nodes[0].state(), QpState::Rts);
}

/// A stream of them slows the queue pair down, and neither stops nor ends it.
// tests [CC-7]
#[test]
fn a_stream_of_notifications_neither_stops_nor_ends_a_queue_pair() {
    let mut pair = pair();
    let (own, peer, qpn) = (pair.nodes[0].addr, pair.nodes[1].addr, pair.nodes[0].qp.0);
    let (sge, remote) = ([pair.nodes[0].sge(0, 16 << 10)], pair.nodes[1].remote(0));
    for id in 0..100 {
        pair.post(0, id, SendOp::Write(remote), &sge);
    }
    let mut rounds = 0;
    while pair.nodes[0].sent.len() < 100 {
        rounds += 1;
        assert!(rounds < 100_000, "{} of 100", pair.nodes[0].sent.len());
        for _ in 0..20 {
            deliver(&mut pair, (peer, own), qpn);
        }
        pair.run(Duration::from_micros(100), |_| false);
    }
    assert_eq!(pair.nodes[0].state(), QpState::Rts);
    let (_, during) = heeded(&pair);
    for _ in 0..50 {
        write(&mut pair, 100);
    }
    let (_, later) = heeded(&pair);
    assert!(later > during, "it recovers: {during} {later}");
}
