//! Packets that are lost, repeated, late, or refused for want of a receive.

use std::time::Duration;

use crate::common::{self, Fate, Pair, Setup, pattern};
use bowline_roce::{Config, Congestion, Counters, GiveUp, Limits};
use bowline_verbs::{
    Access, Mtu, Piece, QpCap, QpInit, QpState, QpType, Qpn, SendFlags, SendOp, Status,
};
use bowline_wire::roce::{ICRC_LEN, NakCode, Opcode, Syndrome};

/// The exchange whose packets are lost one at a time: every kind of message, several packets each,
/// in both directions.
fn exchange(fate: impl FnMut(usize, &common::Seen) -> Fate + 'static) -> Pair {
    let mut pair = Pair::new(&Setup { mtu: Mtu::M256, depth: 2, ..Setup::default() });
    pair.fate = Box::new(fate);
    pair.nodes[0].fill(0, 100_000, 1);
    pair.nodes[1].fill(0, 100_000, 2);
    pair.nodes[1].buffer.write(90_000, &5_u64.to_ne_bytes());
    let pd = pair.nodes[0].pd;
    let slot = pair.nodes[0].dev.alloc_mr(pd).unwrap();
    let key = slot.rkey & !0xff | slot.rkey.wrapping_add(1) & 0xff;
    for id in 0..3 {
        let room = [pair.nodes[1].sge(200_000 + id * 1000, 1000)];
        pair.post_recv(1, id as u64, &room);
    }
    let room = [pair.nodes[0].sge(300_000, 1000)];
    pair.post_recv(0, 9, &room);
    let [a, b] = &pair.nodes;
    let piece = Piece { buffer: a.buffer.clone(), offset: 400_000, len: 5000 };
    let (access, remote) = (Access::LOCAL_WRITE, b.remote(90_000));
    let bind = SendOp::RegMr { key, pieces: vec![piece], iova: 0, access };
    let bound = bowline_verbs::Sge { addr: 500, len: 700, lkey: key };
    let requests = [
        (SendOp::Send, vec![a.sge(0, 700)]),
        (SendOp::Read(b.remote(1000)), vec![a.sge(310_000, 900)]),
        (bind, vec![]),
        (SendOp::FetchAdd { remote, add: 7 }, vec![a.sge(320_000, 8)]),
        (SendOp::Write(b.remote(210_000)), vec![a.sge(5000, 600)]),
        (SendOp::WriteImm(b.remote(220_000), 3), vec![a.sge(6000, 300)]),
        (SendOp::Read(b.remote(2000)), vec![bound]),
        (SendOp::CompareSwap { remote, compare: 12, swap: 99 }, vec![a.sge(320_008, 8)]),
        (SendOp::SendImm(4), vec![a.sge(7000, 10)]),
        (SendOp::LocalInv(key), vec![]),
    ];
    let send_back = [b.sge(9000, 1000)];
    for (id, (op, sges)) in requests.into_iter().enumerate() {
        pair.post(0, id as u64, op, &sges);
    }
    pair.post(1, 50, SendOp::Send, &send_back);
    pair
}

fn check(mut pair: Pair, what: &str) -> Pair {
    let done = pair.run(Duration::from_secs(5), |pair| {
        pair.nodes[0].sent.len() >= 10 && pair.nodes[1].sent.len() == 1
    });
    let [a, b] = &pair.nodes;
    assert!(done, "{what}: {:?} {:?}", a.sent, a.dev.counters());
    let good: Vec<_> = (0..10).map(|id| (id, Status::Success)).collect();
    assert_eq!(pair.outcomes(0), good, "{what}");
    assert_eq!(pair.outcomes(1), [(50, Status::Success)], "{what}");
    // Each message arrived once, unchanged.
    let ids: Vec<_> = b.received.iter().map(|entry| (entry.wr_id, entry.imm)).collect();
    assert_eq!(ids, [(0, None), (1, Some(3)), (2, Some(4))], "{what}");
    assert_eq!(a.received.len(), 1, "{what}");
    let (one, two) = (pattern(100_000, 1), pattern(100_000, 2));
    assert_eq!(b.bytes(200_000, 700), one[..700], "{what}");
    assert_eq!(b.bytes(202_000, 10), one[7000..7010], "{what}");
    assert_eq!(b.bytes(210_000, 600), one[5000..5600], "{what}");
    assert_eq!(b.bytes(220_000, 300), one[6000..6300], "{what}");
    assert_eq!(a.bytes(310_000, 900), two[1000..1900], "{what}");
    assert_eq!(a.bytes(400_500, 700), two[2000..2700], "{what}");
    assert_eq!(a.bytes(300_000, 1000), two[9000..10_000], "{what}");
    let number = |bytes: Vec<u8>| u64::from_ne_bytes(bytes.try_into().unwrap());
    assert_eq!(number(a.bytes(320_000, 8)), 5, "{what}");
    assert_eq!(number(a.bytes(320_008, 8)), 12, "{what}");
    assert_eq!(number(b.bytes(90_000, 8)), 99, "{what}");
    pair
}

/// Checklist 6 and 16: every packet of the exchange is lost once [REQ-9], [REQ-11], [REQ-20],
/// [RSP-3].
#[test]
fn every_packet_may_be_lost_once() {
    let whole = check(exchange(|_, _| Fate::Pass), "nothing lost");
    assert!(whole.packets() > 20, "{}", whole.packets());
    assert_eq!(whole.nodes[0].dev.counters().go_backs, 0);
    for lost in 0..whole.packets() {
        let pair = check(
            exchange(move |n, _| if n == lost { Fate::Drop } else { Fate::Pass }),
            &format!("packet {lost} lost"),
        );
        assert!(pair.now.as_nanos() < 1_500_000_000, "packet {lost} lost: slow");
    }
}

/// Checklist 6, twice as hard.
#[test]
fn any_two_packets_may_be_lost() {
    for first in (0..40).step_by(3) {
        for second in first + 1..50 {
            check(
                exchange(
                    move |n, _| if n == first || n == second { Fate::Drop } else { Fate::Pass },
                ),
                &format!("packets {first} and {second} lost"),
            );
        }
    }
}

/// Checklist 7 [RSP-2].
#[test]
fn every_packet_may_come_twice_or_late() {
    let whole = check(exchange(|_, _| Fate::Pass), "nothing");
    for fate in [Fate::Twice, Fate::Late] {
        for hit in 0..whole.packets() {
            check(
                exchange(move |n, _| if n == hit { fate } else { Fate::Pass }),
                &format!("packet {hit} {fate:?}"),
            );
        }
        check(exchange(move |_, _| fate), &format!("all {fate:?}"));
    }
}

/// A pair whose side 0 knows no more of its round trip than that its first packet was answered
/// when a cut was over.
fn after_a_cut(congestion: Congestion, cut: Duration) -> Pair {
    let config = Config { congestion, ..Config::default() };
    let mut pair = Pair::new(&Setup { mtu: Mtu::M256, config, ..Setup::default() });
    let over = pair.now + cut;
    pair.fate = Box::new(move |_, seen| if seen.at < over { Fate::Drop } else { Fate::Pass });
    send(&mut pair, 256);
    assert!(pair.now > over);
    pair
}

/// Sends a message of this many bytes from side 0, for which side 1 has a receive; returns how long
/// it took until that was known.
fn send(pair: &mut Pair, len: usize) -> Duration {
    let (since, done) = (pair.now, pair.nodes[0].sent.len() + 1);
    let (from, room) = ([pair.nodes[0].sge(0, len)], [pair.nodes[1].sge(0, len)]);
    pair.post_recv(1, done as u64, &room);
    pair.post(0, done as u64, SendOp::Send, &from);
    pair.finish(0, done);
    pair.now.saturating_since(since)
}

/// The answers of a peer that has no receive show that the round trip is not the time of the cut.
/// While it has none, packets that overtake others are dropped, and it does not report them again.
// tests [CC-13], [RSP-12]
#[test]
fn what_is_lost_after_a_cut_does_not_wait_for_as_long() {
    let mut pair = after_a_cut(Congestion::Fixed(240), Duration::from_millis(430));
    let took = refused_and_overtaken(&mut pair, 512);
    assert!(took < Duration::from_millis(20), "{took:?}");
}

/// The same for the pace at which packets leave: that of a path is not the length of the cut.
// tests [CC-2], [CC-13]
#[test]
fn what_is_sent_after_a_cut_does_not_leave_at_its_pace() {
    // A probe is answered, so that the time since the first packet is the guess.
    let mut pair = after_a_cut(Congestion::Delay, Duration::from_millis(60));
    let took = refused_and_overtaken(&mut pair, 40 * 256);
    assert!(took < Duration::from_millis(5), "{took:?}");
}

/// Sends a message of this many bytes from side 0, for which side 1 has a receive only after it has
/// refused it; then the second packet overtakes the first one. Returns how long all of it took.
fn refused_and_overtaken(pair: &mut Pair, len: usize) -> Duration {
    let since = pair.now;
    let from = [pair.nodes[0].sge(0, len)];
    pair.post(0, 7, SendOp::Send, &from);
    let refused = pair
        .run(Duration::from_millis(1), |pair| pair.nodes[0].dev.counters().rnr_naks_received > 0);
    assert!(refused);
    let room = [pair.nodes[1].sge(0, len)];
    pair.post_recv(1, 7, &room);
    let next = pair.packets();
    pair.fate = Box::new(move |n, _| if n == next { Fate::Late } else { Fate::Pass });
    pair.finish(0, 2);
    assert!(pair.nodes[1].dev.counters().requests_discarded > 0);
    pair.now.saturating_since(since)
}

/// Another queue pair measures the path after the cut: then the first one knows it as well.
// tests [CC-13]
#[test]
fn a_guess_gives_way_to_what_others_measure() {
    let mut pair = after_a_cut(Congestion::Fixed(240), Duration::from_millis(430));
    let first = use_second_queue_pair(&mut pair, &Setup { mtu: Mtu::M256, ..Setup::default() });
    send(&mut pair, 256);
    (pair.nodes[0].qp, pair.nodes[1].qp) = first;
    pair.lose(&[pair.packets()]);
    let took = send(&mut pair, 256);
    assert!(took < Duration::from_millis(20), "{took:?}");
}

/// What another queue pair measures while a link holds its packet back does not last: the first
/// one knows better when it has an answer.
// tests [CC-2], [CC-13]
#[test]
fn what_others_measure_while_a_link_stands_still_gives_way_to_an_own_answer() {
    let mut pair = after_a_cut(Congestion::Fixed(240), Duration::from_millis(430));
    // Its timer does not run, so its packet is sent once.
    let setup = Setup { mtu: Mtu::M256, timeout: 0, ..Setup::default() };
    let first = use_second_queue_pair(&mut pair, &setup);
    let (from, room) = ([pair.nodes[0].sge(0, 256)], [pair.nodes[1].sge(0, 256)]);
    pair.post_recv(1, 2, &room);
    pair.post(0, 2, SendOp::Send, &from);
    let held = pair.packets();
    pair.lose(&[held]);
    assert!(!pair.run(Duration::from_millis(400), |pair| pair.nodes[0].sent.len() > 1));
    let mut held = pair.log[held].bytes.clone();
    held.truncate(held.len() - ICRC_LEN);
    pair.inject(1, &mut held);
    pair.finish(0, 2);
    (pair.nodes[0].qp, pair.nodes[1].qp) = first;
    send(&mut pair, 256);
    pair.lose(&[pair.packets()]);
    let took = send(&mut pair, 256);
    assert!(took < Duration::from_millis(20), "{took:?}");
}

/// Makes a second queue pair between the sides, which is used from now on; returns the first one.
fn use_second_queue_pair(pair: &mut Pair, setup: &Setup) -> (Qpn, Qpn) {
    let first = (pair.nodes[0].qp, pair.nodes[1].qp);
    let second = [0, 1].map(|side| {
        let node = &mut pair.nodes[side];
        let cap = QpCap { max_send_wr: 16, max_recv_wr: 16, ..QpCap::default() };
        let (pd, send_cq, recv_cq) = (node.pd, node.send_cq, node.recv_cq);
        let init =
            QpInit { pd, send_cq, recv_cq, srq: None, qp_type: QpType::Rc, cap, sq_sig_all: false };
        node.qp = node.dev.create_qp(&init).unwrap();
        node.qp
    });
    for side in 0..2 {
        for attr in common::rts_steps(setup, side, second[1 - side]) {
            pair.nodes[side].dev.modify_qp(pair.now, second[side], &attr).unwrap();
        }
    }
    first
}

/// Losses at random, with much in flight; everything arrives once and in order.
#[test]
fn a_lossy_wire_delivers_everything_once() {
    for seed in 0..20_u64 {
        let mut pair = Pair::new(&Setup { mtu: Mtu::M256, ..Setup::default() });
        pair.keep_log = false;
        let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        pair.fate = Box::new(move |_, _| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            match state % 50 {
                0 => Fate::Drop,
                1 => Fate::Late,
                2 => Fate::Twice,
                _ => Fate::Pass,
            }
        });
        for side in 0..2 {
            pair.nodes[side].fill(0, 1 << 20, side as u8);
        }
        for id in 0..60 {
            let room = [pair.nodes[1].sge((2 << 20) + id * 5000, 5000)];
            pair.post_recv(1, id as u64, &room);
            let from = [pair.nodes[0].sge(id * 100, 5000)];
            pair.post(0, 2 * id as u64, SendOp::Send, &from);
            let into = [pair.nodes[0].sge((2 << 20) + id * 4000, 4000)];
            let at = pair.nodes[1].remote(id * 50);
            pair.post(0, 2 * id as u64 + 1, SendOp::Read(at), &into);
        }
        pair.finish(0, 120);
        let (one, two) = (pattern(1 << 20, 0), pattern(1 << 20, 1));
        for id in 0..60 {
            let got = pair.nodes[1].bytes((2 << 20) + id * 5000, 5000);
            assert_eq!(got, one[id * 100..id * 100 + 5000]);
            let got = pair.nodes[0].bytes((2 << 20) + id * 4000, 4000);
            assert_eq!(got, two[id * 50..id * 50 + 4000]);
        }
        let order: Vec<_> = pair.nodes[1].received.iter().map(|entry| entry.wr_id).collect();
        assert_eq!(order, (0..60).collect::<Vec<_>>());
    }
}

/// Peers that discard packets after a gap, as a kernel does.
fn forgetful() -> Config {
    let limits = Limits { reorder_bytes: 0, ..Limits::default() };
    Config { limits, ..Config::default() }
}

/// What was sent again, and why.
fn again(counters: &Counters) -> [u64; 5] {
    let Counters { packets_resent, repairs, go_backs, probes, timeouts, .. } = *counters;
    [packets_resent, repairs, go_backs, probes, timeouts]
}

/// Side 0 writes `packets` packets, some of which are lost.
fn write_with_losses(config: Config, packets: usize, lost: &[usize]) -> Pair {
    let mut pair = Pair::new(&Setup { mtu: Mtu::M256, config, ..Setup::default() });
    pair.nodes[0].fill(0, 256 * packets, 9);
    pair.lose(lost);
    let (to, from) = (pair.nodes[1].remote(0), [pair.nodes[0].sge(0, 256 * packets)]);
    pair.post(0, 1, SendOp::Write(to), &from);
    pair.finish(0, 1);
    assert_eq!(pair.nodes[1].bytes(0, 256 * packets), pattern(256 * packets, 9));
    pair
}

/// Only lost packets are sent again, if the peer keeps packets after a gap [REQ-11].
#[test]
fn a_peer_that_keeps_gets_only_what_is_missing() {
    let pair = write_with_losses(Config::default(), 200, &[10, 20, 21, 40, 63, 100]);
    assert_eq!(again(pair.nodes[0].dev.counters()), [6, 6, 0, 0, 0]);
    let kept = pair.nodes[1].dev.counters();
    assert_eq!(kept.requests_discarded, 0);
    assert_eq!(kept.requests_kept, kept.requests_replayed);
    // No timer had to expire.
    assert!(pair.now.as_nanos() < 1_003_000_000, "{:?}", pair.now);
}

/// Consecutive lost packets are sent again together, without the other packets of their burst.
#[test]
fn a_burst_lost_whole_is_sent_again_in_few_rounds() {
    let lost: Vec<usize> = (20..60).collect();
    let pair = write_with_losses(Config::default(), 200, &lost);
    let [resent, repairs, go_backs, _, timeouts] = again(pair.nodes[0].dev.counters());
    assert_eq!((repairs, go_backs, timeouts), (2, 1, 0));
    assert!((40..=180).contains(&resent), "{resent}");
}

/// A peer that keeps nothing after a gap is noticed by one further packet and sent everything
/// again; later losses need no such packet.
#[test]
fn a_peer_that_keeps_nothing_gets_all_again() {
    let pair = write_with_losses(forgetful(), 60, &[10]);
    assert_eq!(again(pair.nodes[0].dev.counters()), [50, 1, 1, 0, 0]);
    assert_eq!(pair.nodes[1].dev.counters().requests_discarded, 49);
    let mut pair = write_with_losses(forgetful(), 60, &[10]);
    let sent = pair.packets();
    pair.lose(&[sent + 30]);
    let (to, from) = (pair.nodes[1].remote(0), [pair.nodes[0].sge(0, 256 * 60)]);
    pair.post(0, 2, SendOp::Write(to), &from);
    pair.finish(0, 2);
    assert_eq!(again(pair.nodes[0].dev.counters()), [50 + 30, 1, 2, 0, 0]);
}

/// When the end of a message, or a packet sent again, is lost, the peer is probed long before the
/// timer expires, and that counts as no retry [REQ-12], [REQ-22].
#[test]
fn what_is_lost_at_the_end_is_asked_for() {
    for config in [Config::default(), forgetful()] {
        for lost in [&[59][..], &[55, 56, 57, 58, 59], &[10, 60], &[60]] {
            let pair = write_with_losses(config.clone(), 60, lost);
            let counters = pair.nodes[0].dev.counters();
            assert_eq!(counters.timeouts, 0, "{lost:?}: {counters:?}");
            assert!(counters.probes > 0);
            let waited = pair.now.as_nanos() - 1_000_000_000;
            // A probe, and where its answer tells too little a second one, twice as late [CC-13].
            assert!(waited < 23_000_000, "{lost:?}: {waited} ns");
        }
    }
}

/// [REQ-24]: of a long READ many packets are unanswered, though it is one request; of a short one
/// few.
#[test]
fn a_lost_read_request_is_sent_again_soon() {
    for (len, least, most) in [(100 << 10, 1, 4), (4 << 10, 5, 8)] {
        let mut pair = Pair::new(&Setup::default());
        pair.lose(&[0]);
        let sges = [pair.nodes[0].sge(0, len)];
        let (from, begin) = (pair.nodes[1].remote(0), pair.now);
        pair.post(0, 1, SendOp::Read(from), &sges);
        pair.finish(0, 1);
        let took = pair.now.saturating_since(begin);
        let expected = Duration::from_millis(least)..Duration::from_millis(most);
        assert!(expected.contains(&took), "{len} bytes took {took:?}");
    }
}

/// Losses here and there do not shrink the window [REQ-6].
#[test]
fn accidents_do_not_shrink_the_window() {
    let mut pair = Pair::new(&Setup { mtu: Mtu::M256, ..Setup::default() });
    pair.keep_log = false;
    pair.fate = Box::new(|n, _| if n % 97 == 5 { Fate::Drop } else { Fate::Pass });
    let (to, from) = (pair.nodes[1].remote(0), [pair.nodes[0].sge(0, 4 << 20)]);
    pair.post(0, 1, SendOp::Write(to), &from);
    pair.finish(0, 1);
    let [resent, _, go_backs, _, timeouts] = again(pair.nodes[0].dev.counters());
    let useful = (4 << 20) / 256;
    assert!(resent < useful / 50, "{resent} of {useful}");
    assert!(go_backs <= 2 && timeouts == 0, "{go_backs} {timeouts}");
}

/// A loss in the middle of a burst costs one NAK [RSP-2]; what is sent again is what was sent
/// before.
#[test]
fn a_gap_costs_one_nak() {
    let pair = write_with_losses(forgetful(), 60, &[10]);
    let counters = pair.nodes[0].dev.counters();
    assert_eq!((counters.go_backs, counters.naks_sequence_received), (1, 1));
    let naks: Vec<_> = pair
        .log
        .iter()
        .filter_map(|seen| seen.packet().aeth)
        .filter(|aeth| matches!(aeth.syndrome, Syndrome::Nak(_)))
        .collect();
    assert_eq!(naks.len(), 1);
    assert_eq!(naks[0].syndrome, Syndrome::Nak(NakCode::PsnSequence));
    // The packets sent again are those sent before.
    let mut first = std::collections::BTreeMap::new();
    for seen in pair.log.iter().filter(|seen| seen.from == 0) {
        let mut packet = seen.packet();
        packet.bth.ack_req = false;
        let mut bytes = Vec::new();
        packet.emit(&mut bytes);
        let before = first.entry(packet.bth.psn.get()).or_insert_with(|| bytes.clone());
        assert_eq!(*before, bytes);
    }
}

/// After a loss in the middle of its answer, a read asks for what is missing only [REQ-11].
#[test]
fn a_read_asks_for_what_is_missing() {
    let mut pair = Pair::new(&Setup { mtu: Mtu::M256, ..Setup::default() });
    pair.lose(&[4]);
    pair.nodes[1].fill(0, 256 * 10, 7);
    let (at, into) = (pair.nodes[1].remote(0), [pair.nodes[0].sge(0, 256 * 10)]);
    pair.post(0, 1, SendOp::Read(at), &into);
    pair.finish(0, 1);
    assert_eq!(pair.nodes[0].bytes(0, 2560), pattern(2560, 7));
    let asked: Vec<_> = pair
        .log
        .iter()
        .filter(|seen| seen.packet().opcode == Opcode::ReadRequest)
        .map(|seen| seen.packet())
        .collect();
    assert_eq!(asked.len(), 2);
    let (whole, rest) = (asked[0].reth.unwrap(), asked[1].reth.unwrap());
    assert_eq!((rest.va - whole.va, rest.len), (3 * 256, 256));
    assert_eq!(asked[1].bth.psn, asked[0].bth.psn + 3);
}

/// Checklist 9 [REQ-12], [REQ-22], [QP-4].
#[test]
fn a_silent_peer_is_given_up_in_time() {
    let mut pair = Pair::new(&Setup::default());
    pair.fate = Box::new(|_, _| Fate::Drop);
    let room = [pair.nodes[0].sge(0, 10)];
    pair.post_recv(0, 70, &room);
    pair.post_recv(0, 71, &room);
    for id in 0..3 {
        pair.post_flags(0, id, SendOp::Send, &room, SendFlags::empty());
    }
    let start = pair.now;
    assert!(pair.run(Duration::from_secs(10), |pair| pair.nodes[0].sent.len() == 3));
    let waited = pair.now.saturating_since(start);
    assert!((3700..3900).contains(&waited.as_millis()), "{waited:?}");
    use Status::{RetryExcErr, WrFlushErr};
    assert_eq!(pair.outcomes(0), [(0, RetryExcErr), (1, WrFlushErr), (2, WrFlushErr)]);
    let flushed: Vec<_> =
        pair.nodes[0].received.iter().map(|entry| (entry.wr_id, entry.status)).collect();
    assert_eq!(flushed, [(70, WrFlushErr), (71, WrFlushErr)]);
    assert_eq!(pair.nodes[0].state(), QpState::Err);
    // Four probes, then 200 ms, since no round trip is known, doubled up to the agreed timeout.
    let times: Vec<_> = pair
        .log
        .iter()
        .filter(|seen| seen.packet().bth.psn.get() == Setup::default().psns[0])
        .map(|seen| seen.at.saturating_since(start).as_millis())
        .collect();
    assert_eq!(times[..8], [0, 7, 21, 49, 105, 200, 600, 1136]);
    // What is posted now is flushed at once [REQ-19], [QP-9].
    pair.post(0, 8, SendOp::Send, &room);
    pair.post_recv(0, 9, &room);
    pair.settle();
    assert_eq!(pair.outcomes(0).last(), Some(&(8, WrFlushErr)));
    assert_eq!(pair.nodes[0].received.last().map(|entry| entry.wr_id), Some(9));
}

/// [REQ-22]: the timeout that the program sets; 0 means never [REQ-12].
#[test]
fn patience_can_be_chosen() {
    let config = Config { give_up: GiveUp::After(Duration::from_millis(100)), ..Config::default() };
    let never = Config { give_up: GiveUp::RetryCountSevenForever, ..Config::default() };
    // A queue pair can have a timeout of its own.
    let own = Duration::from_millis(300);
    for (config, retry_cnt, give_up, limit) in [
        (config.clone(), 7, None, Some(100)),
        (never.clone(), 7, None, None),
        (never.clone(), 1, None, Some(536)),
        (config, 7, Some(own), Some(300)),
        (never, 7, Some(own), Some(300)),
    ] {
        let mut pair = Pair::new(&Setup { config, retry_cnt, give_up, ..Setup::default() });
        pair.fate = Box::new(|_, _| Fate::Drop);
        pair.post(0, 1, SendOp::Send, &[]);
        let start = pair.now;
        let ended = pair.run(Duration::from_secs(20), |pair| pair.nodes[0].sent.len() == 1);
        assert_eq!(ended, limit.is_some());
        if let Some(limit) = limit {
            assert_eq!(pair.now.saturating_since(start).as_millis(), limit);
        }
    }
}

/// Checklist 8 [REQ-13], [RSP-12], [RSP-13].
#[test]
fn a_missing_receive_delays_for_the_time_asked() {
    for (code, micros) in [(0, 655_360), (1, 10), (12, 640), (31, 491_520)] {
        let setup = Setup { min_rnr_timer: code, ..Setup::default() };
        let mut pair = Pair::new(&setup);
        let from = [pair.nodes[0].sge(0, 3000)];
        pair.post(0, 1, SendOp::Send, &from);
        pair.post(0, 2, SendOp::Send, &from);
        pair.settle();
        let (asked, packets) = (pair.now, pair.packets());
        let room = [pair.nodes[1].sge(0, 3000)];
        for id in 0..2 {
            pair.post_recv(1, id, &room);
        }
        pair.finish(0, 2);
        let resumed = pair.log[packets..].iter().find(|seen| seen.from == 0).unwrap();
        let waited = resumed.at.saturating_since(asked);
        assert!(waited <= Duration::from_micros(micros), "{waited:?}");
        assert!(waited + Duration::from_micros(5) >= Duration::from_micros(micros), "{waited:?}");
        assert_eq!(pair.nodes[0].dev.counters().rnr_naks_received, 1);
    }
}

/// Checklist 8 [REQ-13].
#[test]
fn rnr_retries_are_counted_unless_seven() {
    for (rnr_retry, tries) in [(0, Some(1)), (3, Some(4)), (7, None)] {
        let mut pair = Pair::new(&Setup { rnr_retry, ..Setup::default() });
        pair.post(0, 1, SendOp::Send, &[]);
        pair.post(0, 2, SendOp::Send, &[]);
        // Longer than a silent peer is waited for.
        let ended = pair.run(Duration::from_secs(6), |pair| pair.nodes[0].sent.len() == 2);
        assert_eq!(ended, tries.is_some());
        let naks = pair.nodes[0].dev.counters().rnr_naks_received;
        if let Some(tries) = tries {
            assert_eq!(naks, tries);
            use Status::{RnrRetryExcErr, WrFlushErr};
            assert_eq!(pair.outcomes(0), [(1, RnrRetryExcErr), (2, WrFlushErr)]);
        } else {
            assert!(naks > 1000);
            assert_eq!(pair.nodes[0].state(), QpState::Rts);
            pair.post_recv(1, 1, &[]);
            pair.post_recv(1, 2, &[]);
            pair.finish(0, 2);
        }
    }
}

/// On a path that keeps the identification of only the first packet of a burst, the side that
/// notices sends no more bursts to that peer [ICRC-23].
#[test]
fn a_path_that_breaks_bursts_gets_single_packets() {
    for read in [false, true] {
        let mut pair = Pair::new(&Setup { mtu: Mtu::M256, ..Setup::default() });
        pair.fate = Box::new(|_, seen| if seen.place > 0 { Fate::Drop } else { Fate::Pass });
        let (from, to) = if read { (1, 0) } else { (0, 1) };
        pair.nodes[from].fill(0, 500_000, 3);
        let (remote, sges) = (pair.nodes[1].remote(0), [pair.nodes[0].sge(0, 500_000)]);
        let op = if read { SendOp::Read(remote) } else { SendOp::Write(remote) };
        pair.post(0, 1, op, &sges);
        pair.finish(0, 1);
        assert_eq!(pair.nodes[to].bytes(0, 500_000), pattern(500_000, 3));
        assert_eq!(pair.nodes[from].dev.counters().bursts_given_up, 1, "{read}");
        let counters = pair.nodes[0].dev.counters();
        assert!(counters.go_backs < 20, "{counters:?}");
    }
}

/// [REQ-6]: a loss halves the window, which grows back; on a wire with a bounded queue few packets
/// are lost.
#[test]
fn the_window_finds_what_the_wire_holds() {
    let mut pair = Pair::new(&Setup { mtu: Mtu::M256, ..Setup::default() });
    pair.keep_log = false;
    // Packets of one side beyond 100 without an answer are lost.
    let mut row = 0;
    pair.fate = Box::new(move |_, seen| {
        row = if seen.from == 0 { row + 1 } else { 0 };
        if row > 100 { Fate::Drop } else { Fate::Pass }
    });
    let (to, from) = (pair.nodes[1].remote(0), [pair.nodes[0].sge(0, 4 << 20)]);
    for id in 0..4 {
        pair.post(0, id, SendOp::Write(to), &from);
    }
    pair.finish(0, 4);
    let counters = pair.nodes[0].dev.counters();
    let useful = (4 << 22) / 256;
    assert!(counters.packets_resent * 7 < useful, "{counters:?}");
    assert!(counters.timeouts < 5, "{counters:?}");
}
