//! Many queue pairs of one device: each gets its turn, its timer, and no memory per packet.
#![allow(unsafe_code, reason = "the allocator that counts")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use bowline_roce::{Burst, Config, Congestion, Device, IdentHint, Instant};
use bowline_verbs::{
    Access, AddressVector, Buffer, Completion, CqId, MrKeys, Mtu, QpAttr, QpCap, QpInit, QpState,
    QpType, Qpn, RecvWr, Remote, SendFlags, SendOp, SendWr, Sge, Status,
};
use bowline_wire::roce::{Opcode, Packet};

struct Counting;

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

// SAFETY: everything is done by the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.with(|count| count.set(count.get() + 1));
        // SAFETY: as the caller promises.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: as the caller promises.
        unsafe { System.dealloc(at, layout) };
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        ALLOCATIONS.with(|count| count.set(count.get() + 1));
        // SAFETY: as the caller promises.
        unsafe { System.realloc(at, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const LEN: usize = 1 << 20;

struct Side {
    dev: Device,
    addr: IpAddr,
    cq: CqId,
    qps: Vec<Qpn>,
    buffer: Arc<Buffer>,
    keys: MrKeys,
    burst: Burst,
}

fn side(last: u8, count: usize, cq_depth: usize) -> Side {
    let addr = IpAddr::from([10, 0, 0, last]);
    let congestion = Congestion::Fixed(240);
    let config = Config { addrs: vec![addr], congestion, ..Config::default() };
    let mut dev = Device::new(config, [last; 32]);
    let (pd, cq) = (dev.alloc_pd().unwrap(), dev.create_cq(cq_depth).unwrap());
    let init = QpInit {
        pd,
        send_cq: cq,
        recv_cq: cq,
        srq: None,
        qp_type: QpType::Rc,
        cap: QpCap::default(),
        sq_sig_all: true,
    };
    let qps = (0..count).map(|_| dev.create_qp(&init).unwrap()).collect();
    let buffer = Arc::new(Buffer::new(LEN).unwrap());
    let all = Access::LOCAL_WRITE | Access::REMOTE_READ | Access::REMOTE_WRITE;
    let keys = dev.reg_mr(pd, &buffer, 0, LEN, None, all).unwrap();
    Side { dev, addr, cq, qps, buffer, keys, burst: Burst::new() }
}

const START: Instant = Instant::from_nanos(1);

fn pair(count: usize) -> [Side; 2] {
    let mut sides = [side(1, count, 1 << 16), side(2, count, 1 << 16)];
    for i in 0..count {
        let qpns = [sides[0].qps[i], sides[1].qps[i]];
        let addrs = [sides[0].addr, sides[1].addr];
        for (n, side) in sides.iter_mut().enumerate() {
            let av = AddressVector { local: addrs[n], remote: addrs[1 - n], flow_label: 0, tos: 0 };
            let access = Access::REMOTE_READ | Access::REMOTE_WRITE;
            for attr in [
                QpAttr { state: Some(QpState::Init), access: Some(access), ..QpAttr::default() },
                QpAttr {
                    state: Some(QpState::Rtr),
                    av: Some(av),
                    path_mtu: Some(Mtu::M1024),
                    dest_qpn: Some(qpns[1 - n]),
                    rq_psn: Some(7),
                    max_dest_rd_atomic: Some(4),
                    min_rnr_timer: Some(1),
                    ..QpAttr::default()
                },
                QpAttr {
                    state: Some(QpState::Rts),
                    timeout: Some(17),
                    retry_cnt: Some(7),
                    rnr_retry: Some(7),
                    sq_psn: Some(7),
                    max_rd_atomic: Some(4),
                    ..QpAttr::default()
                },
            ] {
                side.dev.modify_qp(START, qpns[n], &attr).unwrap();
            }
        }
    }
    sides
}

/// Delivers packets until both sides are quiet; returns the destinations of all packets, in order.
fn carry(sides: &mut [Side; 2], now: Instant, mut each: impl FnMut(usize, &Packet<'_>)) {
    loop {
        let mut any = false;
        for n in 0..2 {
            let [a, b] = sides;
            let (from, to) = if n == 0 { (a, b) } else { (b, a) };
            while from.dev.poll_transmit(now, &mut from.burst) {
                any = true;
                let source = SocketAddr::new(from.burst.from, from.burst.source_port);
                for (k, bytes) in from.burst.segments().enumerate() {
                    each(n, &Packet::parse(&bytes[..bytes.len() - 4]).unwrap());
                    let hint = IdentHint::Exact(k as u16);
                    to.dev.handle_datagram(now, source, to.addr, hint, bytes);
                }
            }
        }
        if !any {
            return;
        }
    }
}

fn poll(side: &mut Side, out: &mut Vec<Completion>) {
    out.clear();
    side.dev.poll_cq(side.cq, out, usize::MAX).unwrap();
    assert!(out.iter().all(|entry| entry.status == Status::Success));
}

/// Queue pairs send one burst each in turn, however much each has to send.
#[test]
fn queue_pairs_take_turns() {
    let mut sides = pair(5);
    let remote = Remote { addr: sides[1].buffer.addr(), rkey: sides[1].keys.rkey };
    let sges = [Sge { addr: sides[0].buffer.addr(), len: 1 << 20, lkey: sides[0].keys.lkey }];
    for i in 0..5 {
        let qp = sides[0].qps[i];
        let wr = SendWr {
            id: 1,
            op: SendOp::Write(remote),
            sges: &sges,
            inline: &[],
            flags: SendFlags::empty(),
        };
        sides[0].dev.post_send(START, qp, &[wr]).unwrap();
    }
    let mut order: Vec<u32> = Vec::new();
    let mut longest = 0;
    let mut run = 0;
    carry(&mut sides, START, |n, packet| {
        if n == 0 {
            let qpn = packet.bth.dest_qpn;
            run = if order.last() == Some(&qpn) { run + 1 } else { 1 };
            longest = longest.max(run);
            order.push(qpn);
        }
    });
    assert!(longest <= 64, "{longest}");
    let seen: std::collections::BTreeSet<_> = order[..320].iter().collect();
    assert_eq!(seen.len(), 5);
}

/// Posts `op` of ten bytes to a queue pair.
fn post(side: &mut Side, at: usize, op: SendOp) {
    let sges = [Sge { addr: side.buffer.addr(), len: 10, lkey: side.keys.lkey }];
    let wr = SendWr { id: 1, op, sges: &sges, inline: &[], flags: SendFlags::empty() };
    side.dev.post_send(START, side.qps[at], &[wr]).unwrap();
}

/// Bursts of a side, each as the queue pairs and kinds of its packets; they arrive nowhere.
fn bursts(side: &mut Side) -> Vec<Vec<(u32, Opcode)>> {
    let mut all = Vec::new();
    while side.dev.poll_transmit(START, &mut side.burst) {
        let packet = |bytes: &[u8]| {
            let packet = Packet::parse(&bytes[..bytes.len() - 4]).unwrap();
            (packet.bth.dest_qpn, packet.opcode)
        };
        all.push(side.burst.segments().map(packet).collect());
    }
    all
}

/// Sides of which the second owes acknowledgements on all queue pairs, and where the first's memory
/// is.
fn owing(count: usize, op: fn(Remote) -> SendOp) -> ([Side; 2], Remote) {
    let mut sides = pair(count);
    let [near, far] = &sides;
    let at = |side: &Side| Remote { addr: side.buffer.addr(), rkey: side.keys.rkey };
    let (near, far) = (at(near), at(far));
    (0..count).for_each(|i| post(&mut sides[0], i, op(far)));
    let [from, to] = &mut sides;
    while from.dev.poll_transmit(START, &mut from.burst) {
        let source = SocketAddr::new(from.burst.from, from.burst.source_port);
        for bytes in from.burst.segments() {
            to.dev.handle_datagram(START, source, to.addr, IdentHint::Unknown, bytes);
        }
    }
    (sides, near)
}

/// [PERF-6]: when a program posts to several queue pairs, the acknowledgement of each is sent with
/// its own requests.
#[test]
fn acknowledgements_of_others_wait_for_what_is_posted_there() {
    let (mut sides, remote) = owing(3, SendOp::Write);
    let peers: Vec<u32> = sides[0].qps.iter().map(|qp| qp.0).collect();
    let far = &mut sides[1];
    for (i, peer) in peers.into_iter().enumerate() {
        post(far, i, SendOp::Write(remote));
        assert_eq!(far.dev.defer_acks(START, far.qps[i]), i < 2);
        let both = vec![(peer, Opcode::WriteOnly), (peer, Opcode::Acknowledge)];
        assert_eq!(bursts(far), [both]);
        far.dev.resume_acks();
    }
    assert!(bursts(far).is_empty());
}

/// [RSP-25]: acknowledgements are delayed only shortly, and other answers not at all.
#[test]
fn an_acknowledgement_is_set_aside_a_few_times() {
    let (mut sides, remote) = owing(2, SendOp::Write);
    let peers: Vec<u32> = sides[0].qps.iter().map(|qp| qp.0).collect();
    let far = &mut sides[1];
    let mut alone = 0;
    for round in 0..6 {
        post(far, 0, SendOp::Write(remote));
        assert_eq!(far.dev.defer_acks(START, far.qps[0]), round < 3);
        let sent = bursts(far);
        alone += sent.iter().filter(|burst| **burst == [(peers[1], Opcode::Acknowledge)]).count();
        assert_eq!(alone, usize::from(round >= 3), "{sent:?}");
        far.dev.resume_acks();
    }
    let (mut sides, _) = owing(2, SendOp::Read);
    let far = &mut sides[1];
    assert!(!far.dev.defer_acks(START, far.qps[0]));
    assert_eq!(bursts(far).len(), 2);
    // Before a queue pair ends, delayed acknowledgements are sent, whichever queue pair they are
    // for.
    let (mut sides, _) = owing(2, SendOp::Write);
    let far = &mut sides[1];
    assert!(far.dev.defer_acks(START, far.qps[0]));
    far.dev.release_acks(START);
    assert_eq!(bursts(far).len(), 2);
    // The acknowledgement of a destroyed queue pair is dropped.
    let (mut sides, _) = owing(2, SendOp::Write);
    let far = &mut sides[1];
    assert!(far.dev.defer_acks(START, far.qps[0]));
    far.dev.destroy_qp(far.qps[1]).unwrap();
    far.dev.resume_acks();
    assert_eq!(bursts(far).len(), 1);
}

/// A long read that is being answered does not keep acknowledgements waiting.
#[test]
fn replies_go_before_requests_and_bulk() {
    let mut sides = pair(2);
    let remote = Remote { addr: sides[1].buffer.addr(), rkey: sides[1].keys.rkey };
    let sges = [Sge { addr: sides[0].buffer.addr(), len: 1 << 20, lkey: sides[0].keys.lkey }];
    let flags = SendFlags::empty();
    for (i, op) in [SendOp::Read(remote), SendOp::Write(remote)].into_iter().enumerate() {
        let len = if i == 0 { 1 << 20 } else { 10 };
        let sges = [Sge { len, ..sges[0] }];
        let wr = SendWr { id: 1, op, sges: &sges, inline: &[], flags };
        let qp = sides[0].qps[i];
        sides[0].dev.post_send(START, qp, &[wr]).unwrap();
    }
    let mut responses = 0;
    let mut before_ack = None;
    carry(&mut sides, START, |n, packet| {
        if n == 1 {
            match packet.opcode {
                Opcode::Acknowledge => before_ack = before_ack.or(Some(responses)),
                _ => responses += 1,
            }
        }
    });
    assert_eq!(responses, 1024);
    assert!(before_ack.is_some_and(|count| count <= 64), "{before_ack:?}");
}

/// Each of many silent connections is timed by itself, and the timers end.
#[test]
fn every_queue_pair_has_its_timer() {
    let mut sides = pair(300);
    let [a, _] = &mut sides;
    let mut now = START;
    for (i, qp) in a.qps.clone().into_iter().enumerate() {
        now = START + Duration::from_micros(i as u64 * 37);
        let wr = SendWr {
            id: i as u64,
            op: SendOp::Send,
            sges: &[],
            inline: &[],
            flags: SendFlags::empty(),
        };
        a.dev.post_send(now, qp, &[wr]).unwrap();
        while a.dev.poll_transmit(now, &mut a.burst) {}
    }
    let mut out = Vec::new();
    let mut wakes = 0;
    while let Some(at) = a.dev.poll_timeout() {
        assert!(at >= now || wakes == 0);
        now = at.max(now);
        a.dev.handle_timeout(now);
        while a.dev.poll_transmit(now, &mut a.burst) {}
        wakes += 1;
        assert!(wakes < 20_000);
    }
    a.dev.poll_cq(a.cq, &mut out, usize::MAX).unwrap();
    let ids: Vec<_> = out.iter().map(|entry| (entry.wr_id, entry.status)).collect();
    let all: Vec<_> = (0..300).map(|id| (id, Status::RetryExcErr)).collect();
    assert_eq!(ids, all);
    assert_eq!(now.saturating_since(START).as_millis() / 100, 37);
}

/// In the steady state nothing is allocated, whatever is done.
#[test]
fn packets_cost_no_allocation() {
    let mut sides = pair(4);
    let mut out = Vec::with_capacity(1 << 12);
    let mut now = START;
    let mut counted = 0;
    for round in 0..60 {
        if round == 20 {
            counted = ALLOCATIONS.with(Cell::get);
        }
        let keys = [sides[0].keys, sides[1].keys];
        let addrs = [sides[0].buffer.addr(), sides[1].buffer.addr()];
        for n in 0..2 {
            let remote = Remote { addr: addrs[1 - n], rkey: keys[1 - n].rkey };
            let list = |len| [Sge { addr: addrs[n] + 9, len, lkey: keys[n].lkey }];
            let side = &mut sides[n];
            for i in 0..4 {
                let qp = side.qps[i];
                let room = list(5000);
                for id in 0..4 {
                    side.dev.post_recv(now, qp, &[RecvWr { id, sges: &room }]).unwrap();
                }
                for (id, len) in [40, 900, 5000, 300_000].into_iter().enumerate() {
                    let (short, long) = (list(len.min(5000)), list(len));
                    let flags = SendFlags::empty();
                    let (id, inline) = (id as u64, &[1; 30][..]);
                    let wrs = [
                        SendWr { id, op: SendOp::Send, sges: &short, inline: &[], flags },
                        SendWr { id, op: SendOp::Write(remote), sges: &long, inline: &[], flags },
                        SendWr { id, op: SendOp::Read(remote), sges: &long, inline: &[], flags },
                        SendWr {
                            id,
                            op: SendOp::Write(remote),
                            sges: &[],
                            inline,
                            flags: SendFlags::INLINE,
                        },
                    ];
                    side.dev.post_send(now, qp, &wrs).unwrap();
                }
            }
        }
        carry(&mut sides, now, |_, _| {});
        now = now + Duration::from_millis(3);
        for side in &mut sides {
            side.dev.handle_timeout(now);
            poll(side, &mut out);
            assert_eq!(out.len(), 4 * (16 + 4), "{:?}", side.dev.counters());
        }
    }
    assert_eq!(ALLOCATIONS.with(Cell::get) - counted, 0);
    for side in &sides {
        let counters = side.dev.counters();
        assert_eq!((counters.go_backs, counters.timeouts), (0, 0));
    }
}
