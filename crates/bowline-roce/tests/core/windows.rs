//! Memory windows between two devices: bound, used, invalidated, refused [MR-9], [MR-7], [MR-12].

use std::sync::Arc;

use crate::common::{Fate, Pair, Setup, pattern};
use bowline_verbs::{
    Access, Buffer, Error, InvalidReason, MrKeys, MwBind, MwType, Object, Remote, SendFlags,
    SendOp, Status, WcOpcode, next_key,
};

const READ: Access = Access::REMOTE_READ;
const BOTH: Access = READ.union(Access::REMOTE_WRITE);

/// A pair whose second side has a region that only windows give to the peer.
fn pair() -> (Pair, Arc<Buffer>, MrKeys) {
    let mut pair = Pair::new(&Setup::default());
    let node = &mut pair.nodes[1];
    let buffer = Arc::new(Buffer::new(8192).unwrap());
    buffer.write(0, &pattern(8192, 3));
    let access = Access::LOCAL_WRITE | Access::MW_BIND;
    let keys = node.dev.reg_mr(node.pd, &buffer, 0, 8192, Some(0x10_0000), access).unwrap();
    (pair, buffer, keys)
}

fn to(keys: MrKeys, access: Access) -> MwBind {
    MwBind { lkey: keys.lkey, addr: 0x10_0000 + 1000, len: 3000, access }
}

fn remote(rkey: u32) -> Remote {
    Remote { addr: 0x10_0000 + 1000, rkey }
}

fn bind(pair: &mut Pair, id: u64, key: u32, to: MwBind) {
    pair.post(1, id, SendOp::BindMw { key, to }, &[]);
    pair.settle();
}

fn window(pair: &mut Pair, kind: MwType) -> u32 {
    let node = &mut pair.nodes[1];
    node.dev.alloc_mw(node.pd, kind).unwrap()
}

#[test]
fn a_window_is_bound_used_and_taken_back_by_either_side() {
    let (mut pair, buffer, keys) = pair();
    let mut key = window(&mut pair, MwType::Type2);
    for (round, by_peer) in [false, true, false].into_iter().enumerate() {
        let round = round as u64;
        key = next_key(key);
        bind(&mut pair, 10 * round, key, to(keys, BOTH));
        let done = *pair.nodes[1].sent.last().unwrap();
        assert_eq!((done.opcode, done.status), (WcOpcode::BindMw, Status::Success));
        // Three packets, and back.
        let (bytes, there) = ([pair.nodes[0].sge(0, 3000)], [pair.nodes[0].sge(4000, 3000)]);
        pair.nodes[0].fill(0, 3000, round as u8);
        pair.post(0, 1, SendOp::Write(remote(key)), &bytes);
        pair.post(0, 2, SendOp::Read(remote(key)), &there);
        pair.settle();
        assert_eq!(pair.nodes[0].bytes(4000, 3000), pattern(3000, round as u8));
        let mut around = Vec::new();
        buffer.append_to(998, 2, &mut around);
        buffer.append_to(4000, 2, &mut around);
        let all = pattern(8192, 3);
        assert_eq!(around, [&all[998..1000], &all[4000..4002]].concat());
        if by_peer {
            pair.post_recv(1, 5, &[]);
            pair.post(0, 3, SendOp::SendInv(key), &[]);
            pair.settle();
            assert_eq!(pair.nodes[1].received.last().unwrap().invalidated, Some(key));
        } else {
            pair.post(1, 10 * round + 1, SendOp::LocalInv(key), &[]);
            pair.settle();
            assert_eq!(pair.nodes[1].sent.last().unwrap().opcode, WcOpcode::LocalInv);
        }
        assert!(pair.nodes[1].sent.iter().all(|done| done.status == Status::Success));
    }
    // The old key is invalid, and the memory is unchanged [MR-13].
    let bytes = [pair.nodes[0].sge(0, 8)];
    pair.post(0, 9, SendOp::Write(remote(key)), &bytes);
    pair.settle();
    assert_eq!(pair.outcomes(0).last(), Some(&(9, Status::RemAccessErr)));
    let node = &mut pair.nodes[1];
    assert_eq!(node.dev.in_use().mws, 1);
    node.dev.dealloc_mw(key).unwrap();
    assert_eq!(node.dev.dealloc_mw(key), Err(Error::NoSuch(Object::MemoryWindow)));
    node.dev.dereg_mr(keys.lkey).unwrap();
}

/// Each case has its own pair, since it ends the connection.
#[test]
fn what_a_window_does_not_give_is_refused() {
    for (what, op) in [
        ("range", SendOp::Write(Remote { addr: 0x10_0000 + 3993, rkey: 0 })),
        ("before", SendOp::Read(Remote { addr: 0x10_0000 + 999, rkey: 0 })),
        ("right", SendOp::Write(remote(0))),
        ("atomic", SendOp::FetchAdd { remote: remote(0), add: 1 }),
    ] {
        let (mut pair, buffer, keys) = pair();
        let key = next_key(window(&mut pair, MwType::Type2));
        let access = if what == "right" { READ } else { BOTH };
        bind(&mut pair, 0, key, to(keys, access));
        let mut op = op;
        match &mut op {
            SendOp::Write(at) | SendOp::Read(at) => at.rkey = key,
            SendOp::FetchAdd { remote, .. } => remote.rkey = key,
            _ => unreachable!(),
        }
        let bytes = [pair.nodes[0].sge(0, 8)];
        pair.post(0, 1, op, &bytes);
        pair.settle();
        assert_eq!(pair.outcomes(0), [(1, Status::RemAccessErr)], "{what}");
        let mut now = Vec::new();
        buffer.append_to(0, 8192, &mut now);
        assert_eq!(now, pattern(8192, 3), "{what}");
    }
}

/// [QP-7]: the binding fails, and the queue pair with it.
#[test]
fn a_wrong_binding_fails() {
    let cases: [fn(MwBind) -> MwBind; 3] = [
        |to| MwBind { len: 8000, ..to },
        |to| MwBind { len: 0, ..to },
        |to| MwBind { lkey: to.lkey ^ 1, ..to },
    ];
    for change in cases {
        let (mut pair, _, keys) = pair();
        let key = next_key(window(&mut pair, MwType::Type2));
        bind(&mut pair, 1, key, change(to(keys, READ)));
        assert_eq!(pair.outcomes(1), [(1, Status::MwBindErr)]);
        assert_eq!(pair.nodes[1].state(), bowline_verbs::QpState::Err);
    }
}

/// [REQ-20]: a resend does not bind again.
#[test]
fn a_binding_is_done_once() {
    let (mut pair, _, keys) = pair();
    let key = next_key(window(&mut pair, MwType::Type2));
    pair.post_recv(0, 1, &[]);
    pair.post_recv(0, 2, &[]);
    pair.fate = Box::new(|n, _| if n == 0 { Fate::Drop } else { Fate::Pass });
    pair.post(1, 1, SendOp::Send, &[]);
    pair.post(1, 2, SendOp::BindMw { key, to: to(keys, READ) }, &[]);
    pair.post(1, 3, SendOp::Send, &[]);
    pair.finish(1, 3);
    assert!(pair.nodes[1].dev.counters().packets_resent > 0);
    let there = [pair.nodes[0].sge(0, 3000)];
    pair.post(0, 4, SendOp::Read(remote(key)), &there);
    pair.finish(0, 1);
    assert_eq!(pair.nodes[0].bytes(0, 3000), pattern(8192, 3)[1000..4000]);
}

#[test]
fn a_window_of_type_1_gets_its_keys_from_the_device() {
    let (mut pair, _, keys) = pair();
    let first = window(&mut pair, MwType::Type1);
    let now = pair.now;
    let node = &mut pair.nodes[1];
    let (qp, flags) = (node.qp, SendFlags::SIGNALED);
    let by_send = bowline_verbs::SendWr {
        id: 1,
        op: SendOp::BindMw { key: next_key(first), to: to(keys, READ) },
        sges: &[],
        inline: &[],
        flags,
    };
    let posted = node.dev.post_send(now, qp, &[by_send]);
    let kind = |kind| Error::Invalid(InvalidReason::WindowType(kind));
    assert_eq!(posted, Err((0, kind(MwType::Type1))));
    // Two bindings at once: the second one lasts.
    let one = node.dev.bind_mw(now, qp, first, 1, &to(keys, READ), flags).unwrap();
    let two = node.dev.bind_mw(now, qp, first, 2, &to(keys, READ), flags).unwrap();
    assert_eq!((one, two), (next_key(first), next_key(one)));
    let second_kind = node.dev.alloc_mw(node.pd, MwType::Type2).unwrap();
    let wrong = node.dev.bind_mw(now, qp, second_kind, 3, &to(keys, READ), flags);
    assert_eq!(wrong, Err(kind(MwType::Type2)));
    pair.settle();
    let there = [pair.nodes[0].sge(0, 3000)];
    pair.post(0, 1, SendOp::Read(remote(two)), &there);
    pair.finish(0, 1);
    let node = &mut pair.nodes[1];
    assert_eq!(node.dev.dereg_mr(keys.lkey), Err(Error::Busy(Object::MemoryRegion)));
    let ended = MwBind { len: 0, ..to(keys, READ) };
    node.dev.bind_mw(pair.now, qp, two, 4, &ended, flags).unwrap();
    pair.settle();
    pair.nodes[1].dev.dereg_mr(keys.lkey).unwrap();
    pair.post(0, 2, SendOp::Read(remote(two)), &there);
    pair.settle();
    assert_eq!(pair.outcomes(0).last(), Some(&(2, Status::RemAccessErr)));
}

/// A peer that invalidates what it may not ends the connection [RSP-18].
#[test]
fn a_peer_invalidates_no_window_of_type_1() {
    let (mut pair, _, keys) = pair();
    let first = window(&mut pair, MwType::Type1);
    let node = &mut pair.nodes[1];
    let (now, qp, flags) = (pair.now, node.qp, SendFlags::SIGNALED);
    let key = node.dev.bind_mw(now, qp, first, 1, &to(keys, READ), flags).unwrap();
    pair.settle();
    pair.post_recv(1, 5, &[]);
    pair.post(0, 3, SendOp::SendInv(key), &[]);
    pair.settle();
    assert_eq!(pair.nodes[1].received[0].status, Status::RemInvReqErr);
}
