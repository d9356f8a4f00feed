//! Flush and atomic write between two devices [HDR-2], [HDR-5], [REQ-3], [RSP-5].

use crate::common::{Fate, Pair, Setup};
use bowline_verbs::{
    Access, Error, FlushOf, Placement, QpAttr, Remote, SendFlags, SendOp, SendWr, Status, WcOpcode,
};
use bowline_wire::roce::Opcode;

fn setup() -> Setup {
    let access = Setup::default().access | Access::FLUSH_GLOBAL | Access::FLUSH_PERSISTENT;
    Setup { access, ..Setup::default() }
}

/// A pair, and memory of the second side that may be flushed.
fn pair() -> (Pair, Remote) {
    let mut pair = Pair::new(&setup());
    let node = &mut pair.nodes[1];
    let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::FLUSH_GLOBAL;
    let keys = node.dev.reg_mr(node.pd, &node.buffer, 4096, 4096, Some(0), access).unwrap();
    (pair, Remote { addr: 0, rkey: keys.rkey })
}

fn flush(remote: Remote, of: FlushOf, placement: Placement) -> SendOp {
    SendOp::Flush { remote, of, placement }
}

#[test]
fn words_are_written_and_flushed_once_whatever_is_lost() {
    // Lost once: the request, its answer, or both.
    for lost in [vec![], vec![0], vec![1], vec![0, 3], vec![1, 2, 4]] {
        let (mut pair, remote) = pair();
        let at = pair.packets();
        pair.fate =
            Box::new(move |n, _| if lost.contains(&(n - at)) { Fate::Drop } else { Fate::Pass });
        pair.nodes[0].fill(0, 8, 9);
        let word = [pair.nodes[0].sge(0, 8)];
        let to = Remote { addr: 16, ..remote };
        pair.post(0, 1, SendOp::AtomicWrite(to), &word);
        pair.post(0, 2, flush(remote, FlushOf::Range(100), Placement::GLOBAL), &[]);
        pair.post(0, 3, flush(remote, FlushOf::Region, Placement::GLOBAL), &[]);
        pair.finish(0, 3);
        let opcodes: Vec<_> = pair.nodes[0].sent.iter().map(|done| done.opcode).collect();
        assert_eq!(opcodes, [WcOpcode::AtomicWrite, WcOpcode::Flush, WcOpcode::Flush]);
        assert_eq!(pair.nodes[1].bytes(4096 + 16, 8), pair.nodes[0].bytes(0, 8));
        assert_eq!(pair.nodes[1].dev.counters().requests_executed, 3);
        let feths: Vec<u32> = pair.log.iter().filter_map(|seen| seen.packet().feth).collect();
        assert_eq!((feths.first(), feths.last()), (Some(&0x01), Some(&0x11)));
        for seen in pair.log.iter().filter(|seen| seen.from == 1) {
            let packet = seen.packet();
            if packet.opcode != Opcode::Acknowledge {
                assert_eq!((packet.opcode, packet.payload.len()), (Opcode::ReadResponseOnly, 0));
            }
        }
    }
}

/// Inline bytes work as well, between reads and writes, as many as the peer allows [REQ-4].
#[test]
fn they_keep_the_order_of_the_queue() {
    let (mut pair, remote) = pair();
    let now = pair.now;
    let whole = pair.nodes[1].remote(4096);
    for n in 0..50_u64 {
        let bytes = n.to_ne_bytes();
        let node = &mut pair.nodes[0];
        let wr = SendWr {
            id: 2 * n,
            op: SendOp::AtomicWrite(remote),
            sges: &[],
            inline: &bytes,
            // A read may see what is written after it [REQ-5].
            flags: SendFlags::INLINE | SendFlags::SIGNALED | SendFlags::FENCE,
        };
        node.dev.post_send(now, node.qp, &[wr]).unwrap();
        let there = [node.sge(8 * n as usize, 8)];
        pair.post(0, 2 * n + 1, SendOp::Read(whole), &there);
    }
    pair.finish(0, 100);
    for n in 0..50_u64 {
        assert_eq!(pair.nodes[0].bytes(8 * n as usize, 8), n.to_ne_bytes());
    }
}

/// The answer to the read behind it comes first, and is not asked for again [REQ-9].
#[test]
fn an_answer_may_overtake_that_to_an_atomic_write() {
    let (mut pair, remote) = pair();
    pair.fate = Box::new(|_, seen| {
        let packet = seen.packet();
        let answers_write = packet.opcode == Opcode::ReadResponseOnly && packet.payload.is_empty();
        if answers_write { Fate::Late } else { Fate::Pass }
    });
    let whole = pair.nodes[1].remote(0);
    pair.nodes[1].fill(0, 64, 7);
    let word = [pair.nodes[0].sge(0, 8)];
    let there = [pair.nodes[0].sge(64, 64)];
    pair.post(0, 1, SendOp::AtomicWrite(remote), &word);
    pair.post(0, 2, SendOp::Read(whole), &there);
    pair.finish(0, 2);
    assert_eq!(pair.nodes[0].bytes(64, 64), pair.nodes[1].bytes(0, 64));
    let reads = pair.log.iter().filter(|seen| seen.packet().opcode == Opcode::ReadRequest);
    assert_eq!(reads.count(), 1);
}

#[test]
fn what_is_not_allowed_is_refused() {
    let (range, global) = (FlushOf::Range(8), Placement::GLOBAL);
    let plain = Remote::default();
    let inv = Status::RemInvReqErr;
    let acc = Status::RemAccessErr;
    let none = |_: &mut Setup| {};
    type Case = (SendOp, Status, fn(&mut Setup), bool);
    let cases: [Case; 6] = [
        // No memory survives a loss of power.
        (flush(plain, range, Placement::all()), acc, none, true),
        (flush(plain, FlushOf::Range(4097), global), acc, none, true),
        (flush(plain, range, global), inv, |s| s.access -= Access::FLUSH_GLOBAL, true),
        (flush(plain, FlushOf::Region, global), acc, none, false),
        (SendOp::AtomicWrite(Remote { addr: 4096, rkey: 0 }), acc, none, true),
        (SendOp::AtomicWrite(plain), inv, |s| s.access -= Access::REMOTE_WRITE, true),
    ];
    for (op, status, change, good_key) in cases {
        let mut setup = setup();
        change(&mut setup);
        let mut pair = Pair::new(&setup);
        let node = &mut pair.nodes[1];
        let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::FLUSH_GLOBAL;
        let keys = node.dev.reg_mr(node.pd, &node.buffer, 0, 4096, Some(0), access).unwrap();
        let key = keys.rkey ^ u32::from(!good_key);
        let (op, len) = match op {
            SendOp::AtomicWrite(at) => (SendOp::AtomicWrite(Remote { rkey: key, ..at }), 8),
            SendOp::Flush { remote, of, placement } => {
                (flush(Remote { rkey: key, ..remote }, of, placement), 0)
            }
            other => (other, 0),
        };
        let said = format!("{op:?}");
        let sges = [pair.nodes[0].sge(0, len)];
        pair.post(0, 1, op, if len > 0 { &sges } else { &[] });
        pair.settle();
        assert_eq!(pair.outcomes(0), [(1, status)], "{said}");
    }
    let (mut pair, remote) = pair();
    let node = &mut pair.nodes[0];
    let odd = Remote { addr: 4, ..remote };
    let word = [node.sge(0, 8)];
    for (op, sges) in [
        (SendOp::AtomicWrite(odd), &word[..]),
        (SendOp::AtomicWrite(remote), &[]),
        (flush(remote, range, Placement::empty()), &[]),
        (flush(remote, range, global), &word[..]),
        (flush(remote, FlushOf::Range(u32::MAX), global), &[]),
    ] {
        let wr = SendWr { id: 1, op, sges, inline: &[], flags: SendFlags::empty() };
        let posted = node.dev.post_send(pair.now, node.qp, &[wr]);
        assert!(matches!(posted, Err((0, Error::Invalid(_)))), "{posted:?}");
    }
    let persistent = Access::LOCAL_WRITE | Access::FLUSH_PERSISTENT;
    let refused = node.dev.reg_mr(node.pd, &node.buffer, 0, 8, None, persistent);
    assert!(matches!(refused, Err(Error::NotSupported(_))));
    // A queue pair that allows no outstanding one.
    let mut pair = Pair::new(&Setup { depth: 0, ..setup() });
    let node = &mut pair.nodes[0];
    let op = flush(remote, range, global);
    let wr = SendWr { id: 1, op, sges: &[], inline: &[], flags: SendFlags::empty() };
    assert!(node.dev.post_send(pair.now, node.qp, &[wr]).is_err());
    assert_eq!(node.dev.modify_qp(pair.now, node.qp, &QpAttr::default()), Ok(()));
}
