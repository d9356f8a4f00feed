//! Direct placement of payloads, compared with the ordinary handling of the same packets [RX-13].

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use crate::common::{self, Pair, Seen, Setup, pattern, receive_in_place};
use bowline_roce::{Burst, IdentHint, PlacementOutcome};
use bowline_verbs::{Access, Mtu, Piece, Remote, SendFlags, SendOp, Status};
use bowline_wire::roce::{Bth, Opcode, Outer, Packet, Psn};

const MTU: usize = 1024;
const PACKET: usize = MTU + 16;

/// A pair that has posted one WRITE of `len` bytes, and the bursts it sends: the length of a
/// packet, and the bytes of the burst.
fn writing(len: usize) -> (Pair, SocketAddr, Vec<(usize, Vec<u8>)>) {
    writing_with(&Setup { mtu: Mtu::M1024, ..Setup::default() }, len)
}

fn writing_with(setup: &Setup, len: usize) -> (Pair, SocketAddr, Vec<(usize, Vec<u8>)>) {
    let mut pair = Pair::new(setup);
    pair.nodes[0].fill(0, len, 5);
    let (to, sges) = (pair.nodes[1].remote(0), [pair.nodes[0].sge(0, len)]);
    pair.post(0, 1, SendOp::Write(to), &sges);
    let (mut burst, mut runs) = (Burst::new(), Vec::new());
    while pair.nodes[0].dev.poll_transmit(pair.now, &mut burst) {
        runs.push((burst.segment, burst.bytes.clone()));
    }
    let from = SocketAddr::new(burst.from, burst.source_port);
    (pair, from, runs)
}

/// Receives a run: placed directly if a target is known, else as datagrams.
fn receive(
    pair: &mut Pair,
    side: usize,
    from: SocketAddr,
    segment: usize,
    bytes: &[u8],
) -> PlacementOutcome {
    let (now, to) = (pair.now, pair.nodes[side].addr);
    let dev = &mut pair.nodes[side].dev;
    let landed = receive_in_place(dev, now, from, to, Some(segment), bytes);
    if landed == PlacementOutcome::NoTarget {
        for (k, bytes) in bytes.chunks(segment).enumerate() {
            dev.handle_datagram(now, from, to, IdentHint::Exact(k as u16), bytes);
        }
    }
    landed
}

#[test]
fn what_lands_is_what_was_sent() {
    let len = 100 * MTU + 10;
    let (mut pair, from, runs) = writing(len);
    let landed: Vec<PlacementOutcome> =
        runs.iter().map(|(segment, bytes)| receive(&mut pair, 1, from, *segment, bytes)).collect();
    // The first packet is longer than those behind it, and the last is shorter.
    let [62, 36] = [&runs[1], &runs[2]].map(|(segment, bytes)| bytes.len() / segment) else {
        panic!("{:?}", runs.iter().map(|(_, bytes)| bytes.len()).collect::<Vec<_>>())
    };
    assert_eq!(
        landed,
        [PlacementOutcome::NoTarget, PlacementOutcome::Packets(62), PlacementOutcome::Packets(36)]
    );
    assert!(pair.nodes[1].bytes(0, len) == pattern(len, 5));
    pair.finish(0, 1);
    let counters = pair.nodes[1].dev.counters();
    assert_eq!((counters.rx_landed, counters.rx_packets), (98, 101));
    assert_eq!((counters.requests_executed, counters.requests_duplicate), (1, 0));
    // Each byte was summed once.
    assert_eq!(counters.rx_icrc_bytes + 4 * counters.rx_packets, counters.rx_bytes);
}

#[test]
fn short_messages_are_not_waited_for() {
    for (packets, open_message) in [(5, false), (6, true)] {
        let (mut pair, from, runs) = writing(packets * MTU);
        assert_eq!(pair.nodes[1].dev.open_message(), None);
        receive(&mut pair, 1, from, runs[0].0, &runs[0].1[..runs[0].0]);
        assert_eq!(pair.nodes[1].dev.open_message().is_some(), open_message, "{packets}");
    }
}

/// Packets of others that arrive during a message are handled as usual, and leave nothing in its
/// memory.
#[test]
fn what_others_send_leaves_nothing_behind() {
    let len = 80 * MTU;
    let (mut pair, from, runs) = writing(len);
    pair.nodes[1].fill(0, len, 9);
    receive(&mut pair, 1, from, runs[0].0, &runs[0].1);
    let stranger = SocketAddr::new(IpAddr::from([10, 0, 0, 9]), 50_000);
    let expected =
        [pattern(len, 5)[..2 * MTU].to_vec(), pattern(len, 9)[2 * MTU..].to_vec()].concat();
    for (count, cut) in [(0, 0), (1, 0), (1, 300), (5, 0), (62, 1000)] {
        let mut bytes = runs[1].1[..count * PACKET].to_vec();
        bytes.truncate(bytes.len() - cut);
        let before = pair.nodes[1].dev.counters().clone();
        assert_eq!(receive(&mut pair, 1, stranger, PACKET, &bytes), PlacementOutcome::Packets(0));
        let after = pair.nodes[1].dev.counters();
        assert_eq!(after.rx_packets - before.rx_packets, count as u64);
        let dropped =
            |counters: &bowline_roce::Counters| counters.drop_peer + counters.drop_malformed;
        assert_eq!(dropped(after) - dropped(&before), count as u64);
        let hit =
            (bytes.len() / PACKET * MTU + (bytes.len() % PACKET).saturating_sub(12)).min(62 * MTU);
        let now = pair.nodes[1].bytes(0, len);
        assert!(
            now[..2 * MTU] == expected[..2 * MTU]
                && now[2 * MTU + hit..] == expected[2 * MTU + hit..]
        );
        assert!(now[2 * MTU..2 * MTU + hit].iter().all(|byte| *byte == 0), "{count} packets");
        pair.nodes[1].fill(2 * MTU, 78 * MTU, 0);
        pair.nodes[1].buffer.write(2 * MTU, &expected[2 * MTU..]);
    }
    // The message goes on.
    assert_eq!(receive(&mut pair, 1, from, runs[1].0, &runs[1].1), PlacementOutcome::Packets(62));
    for (segment, bytes) in &runs[2..] {
        receive(&mut pair, 1, from, *segment, bytes);
    }
    assert!(pair.nodes[1].bytes(0, len) == pattern(len, 5));
    pair.finish(0, 1);
}

/// A run is placed up to the first packet that is damaged, missing or of another message; the
/// packets after it are handled as usual.
#[test]
fn a_run_counts_up_to_what_is_wrong() {
    let len = 80 * MTU;
    let damaged = |bytes: &mut Vec<u8>| bytes[3 * PACKET + 500] ^= 1;
    let missing = |bytes: &mut Vec<u8>| drop(bytes.drain(3 * PACKET..4 * PACKET));
    let twice = |bytes: &mut Vec<u8>| {
        let again = bytes[2 * PACKET..3 * PACKET].to_vec();
        bytes.splice(3 * PACKET..3 * PACKET, again);
    };
    type Harm<'a> = &'a dyn Fn(&mut Vec<u8>);
    for (harm, lost) in [(&damaged as Harm<'_>, 1), (&missing, 1), (&twice, 0)] {
        let (mut pair, from, runs) = writing(len);
        receive(&mut pair, 1, from, runs[0].0, &runs[0].1);
        let mut bytes = runs[1].1.clone();
        harm(&mut bytes);
        // Identifications are unknown, since the damage shifts them.
        let (now, to) = (pair.now, pair.nodes[1].addr);
        let landed = receive_in_place(&mut pair.nodes[1].dev, now, from, to, Some(PACKET), &bytes);
        assert_eq!(landed, PlacementOutcome::Packets(3));
        let counters = pair.nodes[1].dev.counters();
        assert_eq!((counters.rx_landed, counters.naks_sequence_sent), (3, 0));
        for (segment, bytes) in &runs[2..] {
            receive(&mut pair, 1, from, *segment, bytes);
        }
        pair.finish(0, 1);
        assert_eq!(pair.nodes[0].dev.counters().naks_sequence_received, lost);
        assert_eq!(pair.nodes[0].sent[0].status, Status::Success);
        assert!(pair.nodes[1].bytes(0, len) == pattern(len, 5));
    }
}

/// [RSP-10], [MR-11]: an invalid key stops direct placement, too.
#[test]
fn nothing_lands_where_the_key_is_gone() {
    let (mut pair, from, runs) = writing(80 * MTU);
    receive(&mut pair, 1, from, runs[0].0, &runs[0].1);
    assert!(pair.nodes[1].dev.open_message().is_some());
    let key = pair.nodes[1].keys.rkey;
    pair.nodes[1].dev.dereg_mr(key).unwrap();
    assert_eq!(receive(&mut pair, 1, from, runs[1].0, &runs[1].1), PlacementOutcome::NoTarget);
    assert_eq!(pair.nodes[1].dev.open_message(), None);
    assert!(pair.nodes[1].bytes(2 * MTU, 60 * MTU).iter().all(|byte| *byte == 0));
    pair.run(Duration::from_secs(1), |pair| !pair.nodes[0].sent.is_empty());
    assert_eq!(pair.nodes[0].sent[0].status, Status::RemAccessErr);
}

/// What a side has sent, without the parts that depend on memory addresses.
fn outline(log: &[Seen]) -> Vec<(usize, Opcode, Psn, bool, usize)> {
    let line = |seen: &Seen| {
        let Packet { opcode, bth, payload, .. } = seen.packet();
        (seen.from, opcode, bth.psn, bth.ack_req, payload.len())
    };
    log.iter().map(line).collect()
}

/// Two pairs with the same history, one of them with direct placement, send the same packets at the
/// same times, with the same results. Packets are lost, repeated, damaged and late, in runs that
/// begin and end anywhere.
#[test]
fn landing_changes_nothing_but_copies() {
    for seed in 1..=60_u64 {
        let [lands, plain] = [true, false].map(|lands| history(seed, lands));
        assert!(lands.landed > 0, "seed {seed}");
        assert_eq!(plain.landed, 0);
        assert_eq!(lands.sent, plain.sent, "seed {seed}");
        assert!(lands.memory == plain.memory, "seed {seed}");
        assert_eq!(lands.ended, plain.ended, "seed {seed}");
    }
}

struct Outcome {
    landed: u64,
    sent: Vec<(usize, Opcode, Psn, bool, usize)>,
    memory: [Vec<u8>; 2],
    ended: Vec<(u64, Status)>,
}

fn history(seed: u64, lands: bool) -> Outcome {
    const EACH: usize = 400_000;
    let mut dice = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mut below = move |n: usize| {
        dice ^= dice << 13;
        dice ^= dice >> 7;
        dice ^= dice << 17;
        (dice >> 32) as usize % n
    };
    let mtu = [Mtu::M256, Mtu::M1024, Mtu::M2048, Mtu::M4096][seed as usize % 4];
    let mut pair = Pair::new(&Setup { mtu, ..Setup::default() });
    let requests = 6;
    pair.nodes[0].fill(0, requests * EACH, seed as u8);
    pair.nodes[1].fill(0, requests * EACH, !seed as u8);
    for id in 0..requests {
        let (at, len) = (id * EACH, 1 + below(EACH - 100));
        let cut = below(len);
        let sges = [pair.nodes[0].sge(at, cut), pair.nodes[0].sge(at + cut, len - cut)];
        let to = pair.nodes[1].remote(at);
        let op: fn(Remote) -> SendOp = if below(2) == 0 { SendOp::Write } else { SendOp::Read };
        pair.post_flags(0, id as u64, op(to), &sges, SendFlags::SIGNALED);
    }
    let mut burst = Burst::new();
    for _ in 0..5000 {
        if pair.nodes[0].sent.len() == requests {
            break;
        }
        let mut any = false;
        for side in 0..2 {
            while pair.nodes[side].dev.poll_transmit(pair.now, &mut burst) {
                any = true;
                let from = SocketAddr::new(burst.from, burst.source_port);
                let mut packets: Vec<Vec<u8>> = burst.segments().map(<[u8]>::to_vec).collect();
                for (place, bytes) in packets.iter().enumerate() {
                    let seen = (side, pair.now, place, common::Fate::Pass, bytes.clone());
                    let (from, at, place, fate, bytes) = seen;
                    pair.log.push(Seen { from, at, place, fate, bytes });
                }
                match below(12) {
                    0 => drop(packets.remove(below(packets.len()))),
                    1 => {
                        let k = below(packets.len());
                        packets.insert(k, packets[k].clone());
                    }
                    2 => {
                        let k = below(packets.len());
                        let at = below(packets[k].len());
                        packets[k][at] ^= 1 << below(8);
                    }
                    3 => {
                        let (a, b) = (below(packets.len()), below(packets.len()));
                        packets.swap(a, b);
                    }
                    _ => {}
                }
                // In runs of packets of one size.
                while !packets.is_empty() {
                    let first = packets[0].len();
                    let same = packets.iter().take_while(|packet| packet.len() == first).count();
                    let run: Vec<u8> = packets.drain(..1 + below(same)).flatten().collect();
                    let (now, to) = (pair.now, pair.nodes[1 - side].addr);
                    let dev = &mut pair.nodes[1 - side].dev;
                    let segment = (run.len() > first).then_some(first);
                    if !lands
                        || receive_in_place(dev, now, from, to, segment, &run)
                            == PlacementOutcome::NoTarget
                    {
                        for (k, bytes) in run.chunks(first).enumerate() {
                            let hint =
                                segment.map_or(IdentHint::Unknown, |_| IdentHint::Exact(k as u16));
                            dev.handle_datagram(now, from, to, hint, bytes);
                        }
                    }
                }
            }
        }
        pair.nodes.iter_mut().for_each(common::Node::take);
        if !any {
            let due = pair.nodes.iter().filter_map(|node| node.dev.poll_timeout()).min();
            pair.now = due.expect("something is waited for").max(pair.now);
            for node in &mut pair.nodes {
                node.dev.handle_timeout(pair.now);
            }
        }
    }
    assert_eq!(pair.nodes[0].sent.len(), requests, "seed {seed}");
    Outcome {
        landed: pair.nodes.iter().map(|node| node.dev.counters().rx_landed).sum(),
        sent: outline(&pair.log),
        memory: [0, 1].map(|side| pair.nodes[side].bytes(0, requests * EACH)),
        ended: pair.nodes[0].sent.iter().map(|done| (done.wr_id, done.status)).collect(),
    }
}

/// Returns a run of copies of the packet `like` (with its ICRC) that carry these PSNs.
fn numbered(like: &[u8], from: SocketAddr, to: IpAddr, psns: impl Iterator<Item = Psn>) -> Vec<u8> {
    let outer = Outer { from: from.ip(), to, source_port: from.port() };
    let mut run = Vec::new();
    for (ident, psn) in (0..).zip(psns) {
        let mut packet = like[..like.len() - 4].to_vec();
        packet[9..12].copy_from_slice(&psn.get().to_be_bytes()[1..]);
        outer.append_icrc(ident, &mut packet, 0);
        run.extend(packet);
    }
    run
}

/// [REQ-9]: a peer cannot answer more of a READ than was requested so far.
#[test]
fn answers_to_what_was_not_asked_for_do_not_land() {
    let mut pair = Pair::new(&Setup { mtu: Mtu::M1024, depth: 1, ..Setup::default() });
    let (asked, len) = (240, 300 * MTU);
    pair.nodes[1].fill(0, len, 5);
    let (from, sges) = (pair.nodes[1].remote(0), [pair.nodes[0].sge(0, len)]);
    pair.post(0, 1, SendOp::Read(from), &sges);
    let (mut burst, mut runs) = (Burst::new(), Vec::new());
    for side in 0..2 {
        while pair.nodes[side].dev.poll_transmit(pair.now, &mut burst) {
            let peer = SocketAddr::new(burst.from, burst.source_port);
            if side == 0 {
                receive(&mut pair, 1, peer, burst.segment, &burst.bytes.clone());
            } else {
                runs.push((peer, burst.segment, burst.bytes.clone()));
            }
        }
    }
    let (peer, ..) = runs.pop().unwrap();
    let like = runs[1].2[..PACKET].to_vec();
    let come: usize = runs.iter().map(|(_, segment, bytes)| bytes.len().div_ceil(*segment)).sum();
    for (peer, segment, bytes) in &runs {
        receive(&mut pair, 0, *peer, *segment, bytes);
    }
    // A last packet sent as a middle one, and packets after it.
    let (first, to) = (Psn::new(Setup::default().psns[0]), pair.nodes[0].addr);
    let run = numbered(&like, peer, to, (come..asked + 3).map(|k| first + k as u32));
    assert_eq!(receive(&mut pair, 0, peer, PACKET, &run), PlacementOutcome::Packets(asked - come));
    assert_eq!(pair.nodes[0].dev.counters().responses_ignored, 3);
    pair.finish(0, 1);
    let rest = (asked - 1) * MTU;
    assert!(pair.nodes[0].bytes(rest + MTU, len - rest - MTU) == pattern(len, 5)[rest + MTU..]);
}

/// An answer that ends the queue pair while another READ waits.
#[test]
fn a_bad_answer_ends_what_is_under_way() {
    let mut pair = Pair::new(&Setup { mtu: Mtu::M1024, ..Setup::default() });
    for id in 0..2 {
        let (from, sges) = (pair.nodes[1].remote(0), [pair.nodes[0].sge(0, 20 * MTU)]);
        pair.post(0, id, SendOp::Read(from), &sges);
    }
    let mut burst = Burst::new();
    while pair.nodes[0].dev.poll_transmit(pair.now, &mut burst) {}
    let bth = Bth {
        dest_qpn: pair.nodes[0].qp.0,
        psn: Psn::new(Setup::default().psns[0]),
        ..Bth::default()
    };
    let mut packet = Packet::new(Opcode::ReadResponseMiddle, bth);
    packet.payload = &[7; 100];
    let mut bytes = Vec::new();
    packet.emit(&mut bytes);
    pair.inject(0, &mut bytes);
    assert_eq!(pair.nodes[0].dev.open_message(), None);
    pair.nodes[0].take();
    let ends: Vec<Status> = pair.nodes[0].sent.iter().map(|done| done.status).collect();
    assert_eq!(ends, [Status::BadRespErr, Status::WrFlushErr]);
}

/// A region of several pieces, one of which ends within a packet.
#[test]
fn payloads_land_in_the_pieces_of_a_region() {
    let mut pair = Pair::new(&Setup { mtu: Mtu::M1024, ..Setup::default() });
    let node = &mut pair.nodes[1];
    let key = node.dev.alloc_mr(node.pd).unwrap().rkey;
    let lens = [10 * MTU, 30 * MTU + 100, 50, 40 * MTU];
    let mut at = 7;
    let pieces = lens.map(|len| {
        at += len + 64;
        Piece { buffer: Arc::clone(&node.buffer), offset: at - len, len }
    });
    let (access, iova) = (Access::LOCAL_WRITE | Access::REMOTE_WRITE, 1 << 40);
    let bind = SendOp::RegMr { key, pieces: pieces.to_vec(), iova, access };
    pair.post(1, 1, bind, &[]);
    pair.finish(1, 1);
    let len: usize = lens.iter().sum();
    pair.nodes[0].fill(0, len, 5);
    let sges = [pair.nodes[0].sge(0, len)];
    pair.post(0, 2, SendOp::Write(Remote { addr: iova, rkey: key }), &sges);
    let (mut burst, mut landed) = (Burst::new(), 0);
    while pair.nodes[0].dev.poll_transmit(pair.now, &mut burst) {
        let from = SocketAddr::new(burst.from, burst.source_port);
        // The size of a run varies, so that parts of a READ begin anywhere.
        for run in burst.bytes.chunks(7 * burst.segment) {
            if let PlacementOutcome::Packets(n) = receive(&mut pair, 1, from, burst.segment, run) {
                landed += n;
            }
        }
    }
    assert!(landed > 40, "{landed}");
    let written: Vec<u8> =
        pieces.iter().flat_map(|piece| pair.nodes[1].bytes(piece.offset, piece.len)).collect();
    assert!(written == pattern(len, 5));
    // No byte around them has changed.
    let all = pair.nodes[1].bytes(0, at + 1000);
    let mut outside = vec![true; all.len()];
    for piece in &pieces {
        outside[piece.offset..piece.offset + piece.len].fill(false);
    }
    assert!(all.iter().zip(outside).all(|(byte, outside)| !outside || *byte == 0));
    pair.finish(0, 1);
}

/// A message that is sent again is never placed directly, since the owner may be reading its
/// memory: datagrams of others change nothing there.
// tests [RX-13]
#[test]
fn memory_without_direct_placement_keeps_what_nobody_wrote() {
    let len = 80 * MTU;
    let setup = Setup { mtu: Mtu::M1024, direct_placement: false, ..Setup::default() };
    let (mut pair, from, runs) = writing_with(&setup, len);
    pair.nodes[1].fill(0, len, 9);
    receive(&mut pair, 1, from, runs[0].0, &runs[0].1);
    let stranger = SocketAddr::new(IpAddr::from([10, 0, 0, 9]), 50_000);
    let before = pair.nodes[1].bytes(0, len);
    assert_eq!(receive(&mut pair, 1, stranger, PACKET, &runs[1].1), PlacementOutcome::NoTarget);
    assert!(pair.nodes[1].bytes(0, len) == before);
    for (segment, bytes) in &runs[1..] {
        assert_eq!(receive(&mut pair, 1, from, *segment, bytes), PlacementOutcome::NoTarget);
    }
    assert!(pair.nodes[1].bytes(0, len) == pattern(len, 5));
}
