//! What is sent arrives, whatever its size and the MTU [checklist 11 of the spec].

use crate::common::{self, Pair, Setup, pattern};
use bowline_roce::{Config, Congestion};
use bowline_verbs::{Access, Mtu, Piece, SendFlags, SendOp, SendWr, Sge, Status, WcOpcode};
use bowline_wire::roce::Opcode;
use std::time::Duration;

fn sizes(mtu: Mtu) -> Vec<usize> {
    let mtu = mtu.bytes();
    vec![0, 1, 3, 4, mtu - 1, mtu, mtu + 1, 2 * mtu, (1 << 20) + 3]
}

/// [REQ-2], [REQ-3], [REQ-15], [HDR-11].
#[test]
fn every_size_arrives_at_every_mtu() {
    for mtu in Mtu::ALL {
        for v6 in [false, true] {
            let mut pair = Pair::new(&Setup { mtu, v6, ..Setup::default() });
            pair.keep_log = false;
            let mut id = 0;
            for len in sizes(mtu) {
                let seed = len as u8 ^ mtu.code();
                pair.nodes[0].fill(100, len, seed);
                let from = [pair.nodes[0].sge(100, len)];
                let to = pair.nodes[1].remote(2 << 20);
                let ops = [
                    (SendOp::Send, WcOpcode::Send, true, None),
                    (SendOp::SendImm(0x0102_0304), WcOpcode::Send, true, Some(0x0102_0304)),
                    (SendOp::Write(to), WcOpcode::RdmaWrite, false, None),
                    (SendOp::WriteImm(to, 77), WcOpcode::RdmaWrite, true, Some(77)),
                ];
                for (op, opcode, received, imm) in ops {
                    id += 1;
                    let write = matches!(op, SendOp::WriteImm(..));
                    let room = [pair.nodes[1].sge(2 << 20, len)];
                    if received {
                        pair.post_recv(1, id, if write { &[] } else { &room });
                    }
                    pair.nodes[1].fill(2 << 20, len + 1, !seed);
                    pair.post(0, id, op, &from);
                    pair.finish(0, 1);
                    let sent = pair.nodes[0].sent.pop().unwrap();
                    assert_eq!((sent.wr_id, sent.opcode, sent.byte_len), (id, opcode, len as u32));
                    assert_eq!(pair.nodes[1].bytes(2 << 20, len), pattern(len, seed));
                    let after = pair.nodes[1].bytes((2 << 20) + len, 1);
                    assert_eq!(after[0], pattern(len + 1, !seed)[len]);
                    let got = pair.nodes[1].received.pop();
                    assert_eq!(got.is_some(), received);
                    if let Some(got) = got {
                        assert_eq!((got.wr_id, got.status), (id, Status::Success));
                        assert_eq!((got.byte_len, got.imm), (len as u32, imm));
                        let kind = if write { WcOpcode::RecvRdmaWithImm } else { WcOpcode::Recv };
                        assert_eq!(got.opcode, kind);
                    }
                }
                pair.nodes[1].fill(0, len, seed ^ 0x55);
                let (room, at) = ([pair.nodes[0].sge(3 << 20, len)], pair.nodes[1].remote(0));
                pair.post(0, 9, SendOp::Read(at), &room);
                pair.finish(0, 1);
                let read = pair.nodes[0].sent.pop().unwrap();
                assert_eq!((read.opcode, read.byte_len), (WcOpcode::RdmaRead, len as u32));
                assert_eq!(pair.nodes[0].bytes(3 << 20, len), pattern(len, seed ^ 0x55));
            }
            let counters = pair.nodes[0].dev.counters();
            assert_eq!((counters.go_backs, counters.timeouts, counters.drop_icrc), (0, 0, 0));
        }
    }
}

/// A zero-length write or read may name any key [REQ-2], [RSP-10].
#[test]
fn nothing_can_be_written_with_any_key() {
    let mut pair = Pair::new(&Setup::default());
    let nowhere = bowline_verbs::Remote { addr: 17, rkey: 0xdead_beef };
    pair.post(0, 1, SendOp::Write(nowhere), &[]);
    pair.post(0, 2, SendOp::Read(nowhere), &[]);
    pair.finish(0, 2);
}

#[test]
fn lists_are_gathered_and_scattered() {
    let mut pair = Pair::new(&Setup { mtu: Mtu::M256, ..Setup::default() });
    pair.nodes[0].fill(0, 4096, 3);
    let node = &pair.nodes[0];
    let from = [node.sge(1000, 300), node.sge(0, 0), node.sge(5, 1), node.sge(2000, 699)];
    let node = &pair.nodes[1];
    let to = [node.sge(7, 255), node.sge(5000, 2), node.sge(900, 0), node.sge(10_000, 900)];
    pair.post_recv(1, 1, &to);
    pair.post(0, 2, SendOp::Send, &from);
    pair.finish(0, 1);
    let whole = pattern(4096, 3);
    let sent = [&whole[1000..1300], &whole[5..6], &whole[2000..2699]].concat();
    let node = &pair.nodes[1];
    let got = [node.bytes(7, 255), node.bytes(5000, 2), node.bytes(10_000, 743)].concat();
    assert_eq!(got, sent);
    // And back by a read into a list.
    pair.nodes[1].buffer.write(50_000, &sent);
    let (at, node) = (pair.nodes[1].remote(50_000), &pair.nodes[0]);
    let into = [node.sge(20_000, 257), node.sge(30_000, 743)];
    pair.post(0, 3, SendOp::Read(at), &into);
    pair.finish(0, 2);
    let node = &pair.nodes[0];
    assert_eq!([node.bytes(20_000, 257), node.bytes(30_000, 743)].concat(), sent);
}

#[test]
fn inline_bytes_are_taken_at_once() {
    let mut pair = Pair::new(&Setup::default());
    for round in 0..50_u8 {
        let room = [pair.nodes[1].sge(0, 300)];
        pair.post_recv(1, 1, &room);
        let mut bytes = pattern(usize::from(round) * 5, round);
        let node = &mut pair.nodes[0];
        let wr =
            SendWr { id: 1, op: SendOp::Send, sges: &[], inline: &bytes, flags: SendFlags::INLINE };
        node.dev.post_send(pair.now, node.qp, &[wr.clone(), wr]).unwrap();
        bytes.fill(0xee);
        pair.post_recv(1, 2, &room);
        pair.settle();
        let len = usize::from(round) * 5;
        assert_eq!(pair.nodes[1].bytes(0, len), pattern(len, round));
        assert_eq!(pair.nodes[1].received.len(), 2 * (usize::from(round) + 1));
    }
    // No request was signalled [REQ-15].
    assert_eq!(pair.nodes[0].sent, []);
}

/// [REQ-18], [RSP-11].
#[test]
fn atomics_change_the_peers_memory_once() {
    let mut pair = Pair::new(&Setup::default());
    pair.nodes[1].buffer.write(64, &40_u64.to_ne_bytes());
    let (remote, room) = (pair.nodes[1].remote(64), [pair.nodes[0].sge(16, 8)]);
    let value = |pair: &Pair, side: usize, at| {
        u64::from_ne_bytes(pair.nodes[side].bytes(at, 8).try_into().unwrap())
    };
    pair.post(0, 1, SendOp::FetchAdd { remote, add: 2 }, &room);
    pair.finish(0, 1);
    assert_eq!((value(&pair, 0, 16), value(&pair, 1, 64)), (40, 42));
    pair.post(0, 2, SendOp::CompareSwap { remote, compare: 42, swap: u64::MAX }, &room);
    pair.finish(0, 2);
    assert_eq!((value(&pair, 0, 16), value(&pair, 1, 64)), (42, u64::MAX));
    pair.post(0, 3, SendOp::CompareSwap { remote, compare: 42, swap: 1 }, &room);
    pair.finish(0, 3);
    assert_eq!((value(&pair, 0, 16), value(&pair, 1, 64)), (u64::MAX, u64::MAX));
    pair.post(0, 4, SendOp::FetchAdd { remote, add: 3 }, &room);
    pair.finish(0, 4);
    assert_eq!(value(&pair, 1, 64), 2);
    let kinds: Vec<_> = pair.nodes[0].sent.iter().map(|entry| entry.opcode).collect();
    use WcOpcode::{CompSwap, FetchAdd};
    assert_eq!(kinds, [FetchAdd, CompSwap, CompSwap, FetchAdd]);
}

/// A fenced request waits for reads, another does not [REQ-5].
#[test]
fn a_fence_waits_for_reads() {
    for fence in [false, true] {
        let mut pair = Pair::new(&Setup::default());
        let (at, room) = (pair.nodes[1].remote(0), [pair.nodes[0].sge(0, 3000)]);
        let from = [pair.nodes[0].sge(0, 10)];
        pair.post(0, 1, SendOp::Read(at), &room);
        let flags = if fence { SendFlags::FENCE } else { SendFlags::empty() };
        pair.post_flags(0, 2, SendOp::Write(at), &from, flags | SendFlags::SIGNALED);
        pair.finish(0, 2);
        let place =
            |opcode| pair.log.iter().position(|seen| seen.packet().opcode == opcode).unwrap();
        let (write, read) = (place(Opcode::WriteOnly), place(Opcode::ReadResponseLast));
        assert_eq!(write > read, fence);
    }
}

/// [REQ-4].
#[test]
fn no_more_reads_than_agreed_are_outstanding() {
    let mut pair = Pair::new(&Setup { depth: 2, ..Setup::default() });
    for id in 0..10 {
        let (at, room) = (pair.nodes[1].remote(0), [pair.nodes[0].sge(0, 2000)]);
        pair.post(0, id, SendOp::Read(at), &room);
    }
    pair.finish(0, 10);
    let mut outstanding = 0;
    for seen in &pair.log {
        match seen.packet().opcode {
            Opcode::ReadRequest => outstanding += 1,
            Opcode::ReadResponseLast => outstanding -= 1,
            _ => {}
        }
        assert!(outstanding <= 2);
    }
    let mut pair = Pair::new(&Setup { depth: 0, ..Setup::default() });
    let node = &mut pair.nodes[0];
    let (op, flags) = (SendOp::Read(node.remote(0)), SendFlags::empty());
    let wr = SendWr { id: 1, op, sges: &[], inline: &[], flags };
    assert!(node.dev.post_send(pair.now, node.qp, &[wr]).is_err());
}

/// [REQ-6], [REQ-8]: no more than a window is unacknowledged, and the window never stalls.
#[test]
fn the_window_holds_without_an_answer() {
    let config = Config { congestion: Congestion::Fixed(32), ..Config::default() };
    let mut pair = Pair::new(&Setup { config, mtu: Mtu::M256, ..Setup::default() });
    pair.fate =
        Box::new(|_, seen| if seen.from == 1 { common::Fate::Drop } else { common::Fate::Pass });
    let (to, from) = (pair.nodes[1].remote(0), [pair.nodes[0].sge(0, 100_000)]);
    pair.post(0, 1, SendOp::Write(to), &from);
    pair.settle();
    assert_eq!(pair.packets() - pair.log.iter().filter(|seen| seen.from == 1).count(), 32);
    let last = pair.log.iter().rfind(|seen| seen.from == 0).unwrap();
    assert!(last.packet().bth.ack_req);
    pair.fate = Box::new(|_, _| common::Fate::Pass);
    pair.finish(0, 1);
}

/// [REQ-8], [REQ-25]: an unsignalled message requests no acknowledgement of its own; that of the
/// next message covers it.
#[test]
fn messages_nobody_waits_for_are_acknowledged_with_the_next() {
    let mut pair = Pair::new(&Setup::default());
    let (to, from) = (pair.nodes[1].remote(0), [pair.nodes[0].sge(0, 6000)]);
    let wr = |id, flags| SendWr { id, op: SendOp::Write(to), sges: &from, inline: &[], flags };
    let silent = SendFlags::empty();
    let wrs = [wr(1, silent), wr(2, SendFlags::SIGNALED), wr(3, silent), wr(4, silent)];
    let node = &mut pair.nodes[0];
    node.dev.post_send(pair.now, node.qp, &wrs).unwrap();
    pair.finish(0, 1);
    pair.settle();
    let sent = pair.log.iter().filter(|seen| seen.from == 0).enumerate();
    let asking = sent.filter(|(_, seen)| seen.packet().bth.ack_req).map(|(at, _)| at);
    // Six packets each; no request follows the last.
    assert_eq!(asking.collect::<Vec<_>>(), [11, 23]);
}

/// [REQ-14], [RSP-20].
#[test]
fn a_solicited_send_wakes_who_waits_for_it() {
    let mut pair = Pair::new(&Setup::default());
    let room = [pair.nodes[1].sge(0, 4000)];
    let from = [pair.nodes[0].sge(0, 4000)];
    for id in 0..2 {
        pair.post_recv(1, id, &room);
    }
    let cq = pair.nodes[1].recv_cq;
    assert_eq!(pair.nodes[1].dev.arm_cq(cq, true), Ok(true));
    pair.post(0, 1, SendOp::Send, &from);
    pair.finish(0, 1);
    assert_eq!(pair.nodes[1].events, []);
    pair.post_flags(0, 2, SendOp::Send, &from, SendFlags::SOLICITED | SendFlags::SIGNALED);
    pair.finish(0, 2);
    assert_eq!(pair.nodes[1].events, [bowline_roce::Event::CqReady(cq)]);
    let marked: Vec<_> = pair
        .log
        .iter()
        .filter(|seen| seen.packet().bth.solicited)
        .map(|seen| seen.packet().opcode)
        .collect();
    assert_eq!(marked, [Opcode::SendLast]);
}

/// [MR-6], [MR-8], [REQ-17]: a key is registered by a work request, used by the peer and
/// invalidated by the peer.
#[test]
fn a_region_is_bound_used_and_invalidated() {
    let mut pair = Pair::new(&Setup::default());
    let pd = pair.nodes[0].pd;
    let slot = pair.nodes[0].dev.alloc_mr(pd).unwrap();
    pair.nodes[0].fill(0, 100_000, 9);
    for round in 1..=3_u32 {
        let key = slot.rkey & !0xff | slot.rkey.wrapping_add(round) & 0xff;
        let piece = |offset, len| Piece { buffer: pair.nodes[0].buffer.clone(), offset, len };
        let pieces = vec![piece(1000, 500), piece(70_000, 5000)];
        let access = Access::REMOTE_READ;
        let op = SendOp::RegMr { key, pieces, iova: 1 << 40, access };
        pair.post(0, 1, op, &[]);
        let room = [pair.nodes[1].sge(0, 8)];
        pair.post_recv(1, 2, &room);
        let from = [Sge { addr: 1 << 40, len: 8, lkey: key }];
        pair.post(0, 2, SendOp::Send, &from);
        pair.finish(0, 2);
        let into = [pair.nodes[1].sge(1000, 5500)];
        let remote = bowline_verbs::Remote { addr: 1 << 40, rkey: key };
        pair.post(1, 3, SendOp::Read(remote), &into);
        let room = [pair.nodes[0].sge(200_000, 8)];
        pair.post_recv(0, 4, &room);
        // Without the fence the region might be invalidated while the read is answered [MR-10].
        let flags = SendFlags::FENCE | SendFlags::SIGNALED;
        pair.post_flags(1, 5, SendOp::SendInv(key), &[], flags);
        pair.finish(1, 2);
        let whole = pattern(100_000, 9);
        let expected = [&whole[1000..1500], &whole[70_000..75_000]].concat();
        assert_eq!(pair.nodes[1].bytes(1000, 5500), expected);
        assert_eq!(pair.nodes[0].received.pop().unwrap().invalidated, Some(key));
        for node in &mut pair.nodes {
            node.sent.clear();
        }
    }
    // The region is released now: a local invalidation with its last key succeeds, with another key
    // it fails.
    let key = slot.rkey & !0xff | slot.rkey.wrapping_add(3) & 0xff;
    pair.post(0, 6, SendOp::LocalInv(key), &[]);
    pair.finish(0, 1);
    assert_eq!(pair.nodes[0].sent[0].opcode, WcOpcode::LocalInv);
    pair.post(0, 7, SendOp::LocalInv(key ^ 1), &[]);
    pair.run(Duration::from_millis(1), |_| false);
    assert_eq!(pair.outcomes(0)[1], (7, Status::LocQpOpErr));
}

/// Many messages in both directions at the same time.
#[test]
fn traffic_in_both_directions_does_not_mix() {
    let mut pair = Pair::new(&Setup { mtu: Mtu::M4096, ..Setup::default() });
    pair.keep_log = false;
    for side in 0..2 {
        pair.nodes[side].fill(0, 1 << 20, side as u8);
        for id in 0..200 {
            let room = [pair.nodes[side].sge(2 << 20, 9000)];
            pair.post_recv(side, id, &room);
        }
    }
    for id in 0..200 {
        for side in 0..2 {
            let from = [pair.nodes[side].sge(id as usize * 17, id as usize * 40)];
            pair.post(side, id, SendOp::Send, &from);
        }
    }
    pair.finish(0, 200);
    pair.finish(1, 200);
    for side in 0..2 {
        let got = &pair.nodes[side].received;
        assert!(
            got.iter().enumerate().all(|(id, entry)| {
                entry.wr_id == id as u64 && entry.byte_len == id as u32 * 40
            })
        );
        let last = pattern(1 << 20, 1 - side as u8)[199 * 17..][..199 * 40].to_vec();
        assert_eq!(pair.nodes[side].bytes(2 << 20, 199 * 40), last);
    }
}

/// [REQ-4], [REQ-6]: a long read is requested in parts, with no more outstanding than agreed.
#[test]
fn a_long_read_is_asked_for_in_parts() {
    for depth in [1, 2, 3, 16] {
        let config = Config { congestion: Congestion::Fixed(32), ..Config::default() };
        let setup = Setup { config, mtu: Mtu::M256, depth, ..Setup::default() };
        let mut pair = Pair::new(&setup);
        pair.nodes[1].fill(0, 200_000, depth);
        let (at, into) = (pair.nodes[1].remote(0), [pair.nodes[0].sge(0, 200_000)]);
        for id in 0..3 {
            pair.post(0, id, SendOp::Read(at), &into);
        }
        pair.finish(0, 3);
        assert_eq!(pair.nodes[0].bytes(0, 200_000), pattern(200_000, depth));
        let (mut outstanding, mut most, mut asked, mut len) = (0_i32, 0, 0, 0);
        for seen in &pair.log {
            let packet = seen.packet();
            match packet.opcode {
                Opcode::ReadRequest => {
                    outstanding += 1;
                    asked += 1;
                    len += packet.reth.unwrap().len;
                }
                Opcode::ReadResponseLast | Opcode::ReadResponseOnly => outstanding -= 1,
                _ => {}
            }
            most = most.max(outstanding);
        }
        assert!(most <= i32::from(depth).min(3), "{most}");
        assert_eq!((asked, len), (75, 600_000));
    }
}

/// [REQ-4]: parts of long reads and small reads together are no more than agreed.
#[test]
fn parts_and_small_reads_are_counted_together() {
    for depth in 1..6 {
        let config = Config { congestion: Congestion::Fixed(16), ..Config::default() };
        let setup = Setup { config, mtu: Mtu::M256, depth, ..Setup::default() };
        let mut pair = Pair::new(&setup);
        pair.nodes[1].fill(0, 10_000, depth);
        let at = pair.nodes[1].remote(0);
        for (id, packets) in [17, 1, 1, 18, 1, 16, 17, 17, 1, 33, 1].into_iter().enumerate() {
            let into = [pair.nodes[0].sge(id * 10_000, packets * 256)];
            pair.post(0, id as u64, SendOp::Read(at), &into);
        }
        let lost = 20;
        pair.lose(&[lost]);
        pair.finish(0, 11);
        assert_eq!(pair.nodes[0].bytes(90_000, 33 * 256), pattern(10_000, depth)[..33 * 256]);
        let mut open = std::collections::BTreeSet::new();
        for seen in &pair.log {
            let packet = seen.packet();
            let psn = packet.bth.psn.get().wrapping_sub(0xff_fff0) & 0xff_ffff;
            match packet.opcode {
                Opcode::ReadRequest => {
                    let len = packet.reth.unwrap().len;
                    open.insert(psn + len.div_ceil(256));
                }
                opcode if opcode.is_read_response() && seen.fate == common::Fate::Pass => {
                    open.retain(|end| *end > psn + 1);
                }
                _ => {}
            }
            assert!(open.len() <= usize::from(depth), "{depth} {open:?}");
        }
    }
}
