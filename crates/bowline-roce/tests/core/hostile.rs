//! A peer, or a forger of its packets, that sends anything: nothing panics, each request completes
//! exactly once and in order, and memory that was not offered is unchanged.

use std::time::Duration;

use crate::common::{Pair, Setup, pattern};
use bowline_verbs::{Access, QpState, Remote, SendOp, Status};
use bowline_wire::roce::{Aeth, AtomicAckEth, AtomicEth, Bth, Opcode, Packet, Psn, Reth, Syndrome};
use proptest::prelude::*;

#[derive(Clone, Debug)]
struct Forged {
    opcode: Opcode,
    /// Steps from the first PSN of the direction.
    psn: i32,
    syndrome: u8,
    len: usize,
    remote: Remote,
    real_key: bool,
    bytes: u32,
    ack_req: bool,
}

fn forged() -> impl Strategy<Value = Forged> {
    let remote = (any::<u64>(), any::<u32>());
    let len = prop_oneof![Just(0), Just(256), 1..300_usize];
    let responses: Vec<_> = Opcode::ALL.into_iter().filter(|op| op.is_response()).collect();
    let psn = prop_oneof![5 => -3..40_i32, 1 => any::<i32>()];
    let syndrome =
        prop_oneof![3 => Just(0x1f_u8), 2 => 0x20..0x40_u8, 2 => 0x60..0x66_u8, 1 => any::<u8>()];
    (
        prop_oneof![prop::sample::select(Opcode::ALL.to_vec()), prop::sample::select(responses),],
        psn,
        syndrome,
        len,
        remote,
        any::<bool>(),
        prop_oneof![0..5000_u32, any::<u32>()],
        any::<bool>(),
    )
        .prop_map(|(opcode, psn, syndrome, len, (addr, rkey), real_key, bytes, ack_req)| {
            Forged {
                opcode,
                psn,
                syndrome,
                len,
                remote: Remote { addr, rkey },
                real_key,
                bytes,
                ack_req,
            }
        })
}

fn build(pair: &Pair, side: usize, setup: &Setup, forged: &Forged) -> Vec<u8> {
    let node = &pair.nodes[side];
    let first = setup.psns[if forged.opcode.is_response() { side } else { 1 - side }];
    let bth = Bth {
        dest_qpn: node.qp.0,
        psn: Psn::new(first.wrapping_add_signed(forged.psn)),
        ack_req: forged.ack_req,
        ..Bth::default()
    };
    let remote = if forged.real_key {
        Remote { addr: node.buffer.addr() + forged.remote.addr % 4096, rkey: node.keys.rkey }
    } else {
        forged.remote
    };
    let payload = pattern(forged.len, 0xaa);
    let mut packet = Packet::new(forged.opcode, bth);
    packet.reth = Some(Reth { va: remote.addr, rkey: remote.rkey, len: forged.bytes });
    packet.aeth = Some(Aeth { syndrome: Syndrome::from_u8(forged.syndrome), msn: 3 });
    packet.atomic =
        Some(AtomicEth { va: remote.addr & !7, rkey: remote.rkey, swap_or_add: 1, compare: 0 });
    packet.atomic_ack = Some(AtomicAckEth { original: 4 });
    packet.ieth = Some(remote.rkey);
    packet.imm = Some(1);
    packet.payload = &payload;
    let mut bytes = Vec::new();
    packet.emit(&mut bytes);
    bytes
}

fn check(forgeries: &[(bool, Forged)], access: Access) {
    let setup = Setup { mtu: bowline_verbs::Mtu::M256, access, ..Setup::default() };
    let mut pair = Pair::new(&setup);
    pair.keep_log = false;
    pair.nodes[0].fill(1 << 20, 5000, 1);
    for id in 0..5 {
        let room = [pair.nodes[0].sge(600_000, 600)];
        pair.post_recv(0, id, &room);
        let room = [pair.nodes[1].sge(600_000, 600)];
        pair.post_recv(1, id, &room);
    }
    let [a, b] = &pair.nodes;
    let requests = [
        (SendOp::Send, a.sge(0, 600)),
        (SendOp::Read(b.remote(0)), a.sge(700_000, 1000)),
        (SendOp::Write(b.remote(5000)), a.sge(0, 700)),
        (SendOp::FetchAdd { remote: b.remote(0), add: 1 }, a.sge(710_000, 8)),
        (SendOp::SendImm(5), a.sge(0, 100)),
        (SendOp::Read(b.remote(0)), a.sge(720_000, 300)),
    ];
    for (id, (op, sge)) in requests.into_iter().enumerate() {
        pair.post(0, id as u64, op, &[sge]);
    }
    for (wait, forged) in forgeries {
        if *wait {
            pair.settle();
        } else {
            // Sent, but not yet handled by the other side.
            let mut burst = bowline_roce::Burst::new();
            pair.nodes[0].dev.poll_transmit(pair.now, &mut burst);
        }
        let mut bytes = build(&pair, 0, &setup, forged);
        pair.inject(0, &mut bytes);
    }
    pair.run(Duration::from_secs(30), |pair| pair.nodes[0].sent.len() >= 6);
    let sent = &pair.nodes[0].sent;
    let ids: Vec<_> = sent.iter().map(|entry| entry.wr_id).collect();
    assert_eq!(ids, [0, 1, 2, 3, 4, 5]);
    // Nothing succeeds after a failure, and what follows the first one is flushed.
    let failed = sent.iter().position(|entry| entry.status != Status::Success);
    if let Some(failed) = failed {
        assert!(sent[failed + 1..].iter().all(|entry| entry.status == Status::WrFlushErr));
        assert_eq!(pair.nodes[0].state(), QpState::Err);
    }
    assert_eq!(pair.nodes[0].bytes(1 << 20, 5000), pattern(5000, 1));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    /// [REQ-9], [REQ-10], [REQ-15], [RX-11], [QP-4].
    #[test]
    fn forged_packets_do_no_harm(
        forgeries in prop::collection::vec((prop::bool::weighted(0.05), forged()), 1..12),
        reads_only in prop::bool::weighted(0.1),
    ) {
        let access = if reads_only {
            Access::REMOTE_READ
        } else {
            Access::REMOTE_READ | Access::REMOTE_WRITE | Access::REMOTE_ATOMIC
        };
        check(&forgeries, access);
    }
}
