//! A full window does not degrade to bursts of one packet [REQ-6], [REQ-8].

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::time::Duration;

use crate::common::{self, Fate, Pair, Setup, pattern};
use bowline_roce::{Burst, Config, Congestion, IdentHint};
use bowline_verbs::{Mtu, Remote, SendFlags, SendOp, Status};
use bowline_wire::roce::{Opcode, Packet, Psn};

const LEN: usize = 1 << 20;
const WINDOW: u32 = 64;

#[test]
fn packets_leave_in_bursts_though_acknowledgements_come_one_by_one() {
    let config = Config { congestion: Congestion::Fixed(WINDOW), ..Config::default() };
    let setup = Setup { config, ..Setup::default() };
    let mut pair = Pair::new(&setup);
    let to = pair.nodes[1].remote(0);
    let sges = [pair.nodes[0].sge(0, LEN)];
    // Short messages fill the window unevenly.
    for id in 0..40 {
        let short = [pair.nodes[0].sge(0, 1)];
        pair.post(0, id, SendOp::Write(to), &short);
    }
    pair.post(0, 40, SendOp::Write(to), &sges);
    let mut burst = Burst::new();
    let mut wire: VecDeque<Vec<u8>> = VecDeque::new();
    let (mut bursts, mut packets, mut acks) = (0, 0, 0);
    let mut done = Vec::new();
    while done.len() < 41 {
        while pair.nodes[0].dev.poll_transmit(pair.now, &mut burst) {
            bursts += 1;
            packets += burst.count;
            wire.extend(burst.segments().map(<[u8]>::to_vec));
        }
        let bytes = wire.pop_front().expect("something is on its way");
        let source = |node: &common::Node| SocketAddr::new(node.addr, burst.source_port);
        let (a, b) = (source(&pair.nodes[0]), source(&pair.nodes[1]));
        let hint = IdentHint::Unknown;
        pair.nodes[1].dev.handle_datagram(pair.now, a, b.ip(), hint, &bytes);
        let mut reply = Burst::new();
        while pair.nodes[1].dev.poll_transmit(pair.now, &mut reply) {
            for bytes in reply.segments() {
                acks += 1;
                pair.nodes[0].dev.handle_datagram(pair.now, b, a.ip(), hint, bytes);
            }
        }
        let cq = pair.nodes[0].send_cq;
        pair.nodes[0].dev.poll_cq(cq, &mut done, 64).unwrap();
    }
    let of_long = packets - 40;
    assert_eq!(of_long, LEN / setup.mtu.bytes());
    // One burst for each short message as it is posted; then a quarter of a window each.
    let quarters = of_long / (WINDOW as usize / 4);
    assert!(bursts <= 40 + quarters + 4, "{bursts} bursts of {packets} packets");
    assert!(acks <= 40 + 2 * quarters, "{acks} acknowledgements");
}

/// A burst holds 15 packets of 4 KiB and shorter ones after them.
#[test]
fn a_short_last_packet_goes_with_a_burst_that_is_full() {
    let setup = Setup { mtu: Mtu::M4096, ..Setup::default() };
    let mut pair = Pair::new(&setup);
    let to = pair.nodes[1].remote(0);
    let sges = [pair.nodes[0].sge(0, 32 * 4096 + 100)];
    pair.post(0, 0, SendOp::WriteImm(to, 1), &sges);
    let counts = pair.burst_sizes(0);
    assert_eq!(counts.iter().sum::<usize>(), 33);
    assert_eq!(counts.len(), 3, "{counts:?}");
}

/// When more packets of the short size follow, they get their own burst: one of them in another
/// burst would be acknowledged separately.
#[test]
fn short_packets_that_follow_one_another_stay_together() {
    let bursts = |shorts: u64, more: u64, read: bool| {
        let mut pair = Pair::new(&Setup { mtu: Mtu::M4096, ..Setup::default() });
        let to = pair.nodes[1].remote(0);
        let long = [pair.nodes[0].sge(0, 4096)];
        let short = [pair.nodes[0].sge(0, 28)];
        (0..15).for_each(|id| pair.post(0, id, SendOp::Write(to), &long));
        (0..shorts).for_each(|id| pair.post(0, 15 + id, SendOp::WriteImm(to, 1), &short));
        (0..more).for_each(|id| pair.post(0, 30 + id, SendOp::Write(to), &long));
        if read {
            pair.post(0, 40, SendOp::Read(to), &long);
        }
        pair.burst_sizes(0)
    };
    assert_eq!(bursts(1, 0, false), [16]);
    assert_eq!(bursts(3, 0, false), [15, 3]);
    assert_eq!(bursts(1, 2, false), [16, 2]);
    // A packet does not share a burst with a following packet of another kind.
    assert_eq!(bursts(1, 0, true), [16, 1]);
}

/// [REQ-26]: a burst continues across messages, since all packets have the same form.
#[test]
fn packets_of_writes_are_all_alike() {
    let setup = Setup { mtu: Mtu::M4096, ..Setup::default() };
    let mut pair = Pair::new(&setup);
    let to = pair.nodes[1].remote(0);
    pair.nodes[0].fill(0, 64 * 4096, 5);
    let (mut burst, mut counts, mut wire) = (Burst::new(), Vec::new(), Vec::new());
    for id in 0..8 {
        let to = Remote { addr: to.addr + 8 * 4096 * id, ..to };
        let pages = if id < 7 { 8 } else { 7 };
        let sges = [pair.nodes[0].sge(8 * 4096 * id as usize, pages * 4096)];
        pair.post(0, id, SendOp::Write(to), &sges);
    }
    while pair.nodes[0].dev.poll_transmit(pair.now, &mut burst) {
        counts.push(burst.count);
        wire.extend(burst.segments().map(<[u8]>::to_vec));
    }
    assert_eq!(counts, [15, 15, 15, 15, 3]);
    assert!(wire.iter().all(|packet| packet[0] == Opcode::WriteOnly as u8));
    let from = SocketAddr::new(pair.nodes[0].addr, burst.source_port);
    let at = pair.nodes[1].addr;
    for bytes in &wire {
        pair.nodes[1].dev.handle_datagram(pair.now, from, at, IdentHint::Unknown, bytes);
    }
    assert_eq!(pair.nodes[1].bytes(0, 63 * 4096), pattern(64 * 4096, 5)[..63 * 4096]);
}

/// [RT-97]: WRITEs with and without immediate share a burst if their packets have one size, headers
/// included.
#[test]
fn an_immediate_does_not_end_a_burst() {
    let mut pair = Pair::new(&Setup { mtu: Mtu::M4096, ..Setup::default() });
    let to = pair.nodes[1].remote(0);
    let (data, message) = ([pair.nodes[0].sge(0, 2070)], [pair.nodes[0].sge(0, 2066)]);
    for id in 0..15 {
        pair.post(0, 2 * id, SendOp::Write(to), &data);
        pair.post(0, 2 * id + 1, SendOp::WriteImm(to, 1), &message);
    }
    assert_eq!(pair.burst_sizes(0), [30]);
}

/// [REQ-26]: a message is not split when each packet is sent alone, nor when the peer's program is
/// told its length.
#[test]
fn writes_stay_one_message_where_nothing_is_gained() {
    for (gso, op) in
        [(false, SendOp::Write as fn(Remote) -> SendOp), (true, |to| SendOp::WriteImm(to, 1))]
    {
        let mut pair = Pair::new(&Setup { mtu: Mtu::M4096, ..Setup::default() });
        pair.nodes[0].dev.set_gso(gso);
        let to = pair.nodes[1].remote(0);
        let sges = [pair.nodes[0].sge(0, 3 * 4096)];
        pair.post(0, 0, op(to), &sges);
        let (mut burst, mut opcodes) = (Burst::new(), Vec::new());
        while pair.nodes[0].dev.poll_transmit(pair.now, &mut burst) {
            opcodes.extend(burst.segments().map(|packet| Opcode::from_u8(packet[0]).unwrap()));
        }
        let last = if gso { Opcode::WriteLastImm } else { Opcode::WriteLast };
        assert_eq!(opcodes, [Opcode::WriteFirst, Opcode::WriteMiddle, last]);
    }
}

/// [REQ-26]: of a split WRITE that the peer refuses, the packets before the wrong one have been
/// written. It fails like an unsplit one, and so do later requests.
#[test]
fn a_write_of_many_packets_is_refused_at_the_one_that_is_wrong() {
    for (gso, written) in [(true, 2048), (false, 0)] {
        let mut pair = Pair::new(&Setup { mtu: Mtu::M2048, ..Setup::default() });
        pair.nodes[0].dev.set_gso(gso);
        pair.nodes[0].fill(0, 5 * 1024, 9);
        let room = 2500;
        let end = common::BUFFER - room;
        pair.nodes[1].fill(end, room, !9);
        for (id, at, len) in [(1, 0, 5000), (2, end, 5 * 1024), (3, 8192, 3000)] {
            let to = pair.nodes[1].remote(at);
            let sges = [pair.nodes[0].sge(0, len)];
            pair.post(0, id, SendOp::Write(to), &sges);
        }
        pair.run(Duration::from_secs(2), |pair| pair.nodes[0].sent.len() == 3);
        let ends: Vec<Status> = pair.nodes[0].sent.iter().map(|done| done.status).collect();
        assert_eq!(ends, [Status::Success, Status::RemAccessErr, Status::WrFlushErr]);
        let mut expected = pattern(room, !9);
        expected[..written].copy_from_slice(&pattern(5 * 1024, 9)[..written]);
        assert!(pair.nodes[1].bytes(end, room) == expected, "gso {gso}");
    }
}

/// [REQ-26]: a WRITE stays split or unsplit as it began, while bursts are switched on and off and
/// packets are lost.
#[test]
fn writes_survive_losses_and_the_end_of_bursts() {
    for round in 0..40_u32 {
        let mut pair = Pair::new(&Setup { mtu: Mtu::M2048, ..Setup::default() });
        let mut dice = round.wrapping_mul(2_654_435_761) | 1;
        pair.fate = Box::new(move |_, _| {
            dice = dice.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            match dice >> 24 {
                0..12 => Fate::Drop,
                12..18 => Fate::Late,
                18..24 => Fate::Twice,
                _ => Fate::Pass,
            }
        });
        const EACH: usize = 20 * 1024;
        pair.nodes[0].fill(0, 8 * EACH, round as u8);
        for id in 0..8 {
            let at = id * EACH;
            let to = pair.nodes[1].remote(at);
            let sges = [pair.nodes[0].sge(at, EACH)];
            pair.post(0, id as u64, SendOp::Write(to), &sges);
        }
        let mut gso = round % 2 == 0;
        for _ in 0..20_000 {
            if pair.nodes[0].sent.len() == 8 {
                break;
            }
            gso = !gso;
            pair.nodes[0].dev.set_gso(gso);
            pair.run(Duration::from_micros(300), |_| false);
        }
        assert_eq!(pair.nodes[0].sent.len(), 8, "round {round}");
        assert!(pair.nodes[0].sent.iter().all(|done| done.status == Status::Success));
        assert!(pair.nodes[0].bytes(0, 8 * EACH) == pair.nodes[1].bytes(0, 8 * EACH));
    }
}

/// [REQ-26]: the longest WRITE that is split, and a longer one that is not.
#[test]
fn long_writes_stay_one_message() {
    for (len, first) in [(120 << 10, Opcode::WriteOnly), ((120 << 10) + 1, Opcode::WriteFirst)] {
        let mut pair = Pair::new(&Setup { mtu: Mtu::M4096, ..Setup::default() });
        let to = pair.nodes[1].remote(0);
        let sges = [pair.nodes[0].sge(0, len)];
        pair.post(0, 0, SendOp::Write(to), &sges);
        let mut burst = Burst::new();
        assert!(pair.nodes[0].dev.poll_transmit(pair.now, &mut burst));
        assert_eq!(burst.bytes[0], first as u8);
    }
}

/// Returns everything that a side sends before it receives an answer, without ICRCs.
fn sent(pair: &mut Pair, gso: bool) -> Vec<Vec<u8>> {
    pair.nodes[0].dev.set_gso(gso);
    let (mut burst, mut packets) = (Burst::new(), Vec::new());
    while pair.nodes[0].dev.poll_transmit(pair.now, &mut burst) {
        packets.extend(burst.segments().map(|packet| packet[..packet.len() - 4].to_vec()));
    }
    packets
}

/// A uniform run has the same bytes as packets built one by one, also for data in pieces of any
/// length.
#[test]
fn packets_made_together_are_the_same() {
    let ops: [fn(Remote) -> SendOp; 3] =
        [|_| SendOp::Send, |_| SendOp::SendImm(7), |to| SendOp::WriteImm(to, 7)];
    for (round, op) in (0..30).flat_map(|round| ops.map(|op| (round, op))) {
        let setup = Setup { mtu: Mtu::M256, ..Setup::default() };
        let [together, single] = [true, false].map(|gso| {
            let mut pair = Pair::new(&setup);
            pair.nodes[0].fill(0, 80_000, 3);
            for id in 0..3 {
                let (mut at, mut sges) = (7, Vec::new());
                for k in 0..4 {
                    let len = (round * 977 + k * k * 3331 + id * 53) % 9100;
                    sges.push(pair.nodes[0].sge(at, len));
                    at += len + 5;
                }
                pair.post(0, id as u64, op(Remote { addr: 1000, rkey: 7 }), &sges);
            }
            sent(&mut pair, gso)
        });
        // When the window has room for only a part of a burst, the burst waits.
        assert!(
            together.len() <= single.len() && together.len() > single.len() - 60,
            "round {round}"
        );
        assert!(together[..] == single[..together.len()], "round {round}");
    }
}

/// [REQ-6]: also when more packets of the same form follow.
#[test]
fn packets_made_together_end_where_the_window_is_full() {
    let mut pair = Pair::new(&Setup { mtu: Mtu::M256, ..Setup::default() });
    // Bursts of one packet, after which the window may have room for one packet only.
    for id in 0..235 {
        let sges = [pair.nodes[0].sge(0, 10 + id)];
        pair.post(0, id as u64, SendOp::Send, &sges);
    }
    let sges = [pair.nodes[0].sge(0, 100 * 256)];
    pair.post(0, 235, SendOp::Send, &sges);
    let packets = sent(&mut pair, true);
    assert_eq!(packets.len(), 240);
    let asks = |packet: &Vec<u8>| Packet::parse(packet).unwrap().bth.ack_req;
    assert_eq!(
        packets[235..].iter().map(asks).collect::<Vec<_>>(),
        [false, false, false, false, true]
    );
}

/// [REQ-26], [REQ-8]: PSNs, addresses, data and acknowledgement requests are right across the ends
/// of bursts and pieces.
#[test]
fn writes_made_together_are_what_they_should_be() {
    let pieces = [9000, 4096, 15_000, 4672];
    let (each, writes) = (pieces.iter().sum::<usize>(), 13);
    let len = writes * each;
    let mut pair = Pair::new(&Setup { mtu: Mtu::M4096, ..Setup::default() });
    pair.nodes[0].fill(0, len, 3);
    let to = pair.nodes[1].remote(64);
    for id in 0..writes {
        let mut at = id * each;
        let sges = pieces.map(|len| {
            at += len;
            pair.nodes[0].sge(at - len, len)
        });
        let to = Remote { addr: to.addr + (id * each) as u64, ..to };
        let flags = if id + 1 < writes { SendFlags::empty() } else { SendFlags::SIGNALED };
        pair.post_flags(0, 1, SendOp::Write(to), &sges, flags);
    }
    let packets = sent(&mut pair, true);
    let (data, asks) = (pattern(len, 3), 240 / 3);
    assert_eq!(packets.len(), len.div_ceil(4096));
    for (k, (packet, data)) in packets.iter().zip(data.chunks(4096)).enumerate() {
        let packet = Packet::parse(packet).unwrap();
        let reth = packet.reth.unwrap();
        assert_eq!(packet.opcode, Opcode::WriteOnly);
        assert_eq!(packet.bth.psn, Psn::new(Setup::default().psns[0]) + k as u32);
        assert_eq!(packet.bth.ack_req, k + 1 == packets.len() || k % asks == asks - 1, "{k}");
        let va = to.addr + 4096 * k as u64;
        assert_eq!((reth.va, reth.rkey, reth.len as usize), (va, to.rkey, data.len()));
        assert!(packet.payload == data, "packet {k}");
    }
}
