//! Checklist 5 to 7 and 16: whatever one packet meets, the result is the same.

use std::time::Duration;

use bowline_verbs::{Completion, SendFlags, SendOp, Sge, Status};

use crate::world::{EVERY, Fault, Region, Setup, World, pattern};

/// An exchange with everything in it.
struct Exchange {
    world: World,
    /// Of B: what was sent to it, and what was written.
    received: Vec<Region>,
    written: Region,
    counted: Region,
    /// Of A: what was read, and what atomics returned.
    read: Region,
    returned: Region,
}

const LEN: usize = 700;
const REQUESTS: usize = 12;

impl Exchange {
    fn new(setup: &Setup) -> Self {
        let mut world = World::new(setup);
        let received: Vec<_> = (0..4).map(|_| world.b.region(LEN, EVERY)).collect();
        for (id, region) in received.iter().enumerate() {
            world.recv(id as u64, &[region.sge(0, LEN)]);
        }
        let written = world.b.region(2 * LEN, EVERY);
        let counted = world.b.region(8, EVERY);
        let source = world.b.filled(&pattern(LEN, 2), EVERY);
        let read = world.a.region(2 * LEN, EVERY);
        let returned = world.a.region(24, EVERY);
        let from = world.a.filled(&pattern(LEN, 1), EVERY);
        let slot = world.a.device.alloc_mr(world.a.pd).unwrap().rkey;

        let all = &[from.sge(0, LEN)];
        world.send(0, SendOp::Send, all);
        world.bind(1, slot, &from, LEN);
        // Through the region that is ended later, so that it must not be ended too early [REQ-5].
        let through = Sge { addr: 0, len: LEN as u32, lkey: slot };
        world.send(2, SendOp::Write(written.remote(0)), &[through]);
        world.send(3, SendOp::Read(source.remote(0)), &[read.sge(0, LEN)]);
        let add = |add| SendOp::FetchAdd { remote: counted.remote(0), add };
        world.send(4, add(5), &[returned.sge(0, 8)]);
        world.send(5, SendOp::SendImm(1), &[from.sge(0, 1)]);
        let swap = SendOp::CompareSwap { remote: counted.remote(0), compare: 5, swap: 100 };
        world.send_flags(6, swap, &[returned.sge(8, 8)], SendFlags::FENCE);
        world.send(7, SendOp::WriteImm(written.remote(LEN as u64), 2), all);
        world.send(8, SendOp::LocalInv(slot), &[]);
        world.bind(9, slot & !0xff | slot.wrapping_add(1) & 0xff, &from, LEN);
        world.send(10, SendOp::Read(source.remote(0)), &[read.sge(LEN, LEN)]);
        world.send(11, add(1), &[returned.sge(16, 8)]);
        Self { world, received, written, counted, read, returned }
    }

    /// Everything has happened, once, in order.
    fn check(&mut self) {
        self.world.run_until(REQUESTS);
        self.world.run(Duration::from_secs(1));
        let expected: Vec<_> = (0..REQUESTS as u64).map(|id| (id, Status::Success)).collect();
        assert_eq!(self.world.a.statuses(), expected);
        let received: Vec<_> = self
            .world
            .b
            .done
            .drain(..)
            .map(|Completion { wr_id, status, byte_len, imm, .. }| {
                assert_eq!(status, Status::Success);
                (wr_id, byte_len as usize, imm)
            })
            .collect();
        assert_eq!(received, [(0, LEN, None), (1, 1, Some(1)), (2, LEN, Some(2))]);
        let (sent, source) = (pattern(LEN, 1), pattern(LEN, 2));
        assert_eq!(self.received[0].bytes(0, LEN), sent);
        assert_eq!(self.received[1].bytes(0, 1), sent[..1]);
        assert_eq!(self.received[2].bytes(0, LEN), [0; LEN]);
        assert_eq!(self.written.bytes(0, 2 * LEN), [&sent[..], &sent].concat());
        assert_eq!(self.read.bytes(0, 2 * LEN), [&source[..], &source].concat());
        assert_eq!([0, 8, 16].map(|at| self.returned.word(at)), [0, 5, 100]);
        assert_eq!(self.counted.word(0), 101);
        for end in [&self.world.a, &self.world.b] {
            assert_eq!(end.device.counters().qp_errors, 0);
        }
    }
}

/// Packets of an exchange in which nothing goes wrong, without repeated acknowledgements.
fn packets(setup: &Setup) -> usize {
    let mut exchange = Exchange::new(setup);
    exchange.world.run_until(REQUESTS);
    let sent = exchange.world.sent;
    exchange.check();
    assert_eq!(exchange.world.a.device.counters().go_backs, 0);
    sent
}

fn each_packet(fault: Fault) {
    for gso in [true, false] {
        let setup = Setup { gso, ..Setup::default() };
        for index in 0..packets(&setup) {
            let mut exchange = Exchange::new(&setup);
            exchange.world.fault =
                Box::new(move |n| if n == index { fault } else { Fault::Deliver });
            exchange.check();
        }
    }
}

/// [REQ-9], [REQ-11], [REQ-20], [RSP-2], [RSP-3].
#[test]
fn any_packet_may_be_lost() {
    each_packet(Fault::Drop);
}

/// Checklist 7.
#[test]
fn any_packet_may_come_twice() {
    each_packet(Fault::Twice);
}

/// Checklist 7.
#[test]
fn any_packet_may_come_late() {
    for by in [1, 2, 5, 20] {
        each_packet(Fault::Late(by));
    }
}

/// Two in a row, and what is sent instead of them.
#[test]
fn any_packets_in_a_row_may_be_lost() {
    let setup = Setup::default();
    for index in 0..packets(&setup) {
        for count in [2, 3, 5, 9] {
            let mut exchange = Exchange::new(&setup);
            exchange.world.fault = Box::new(move |n| {
                if (index..index + count).contains(&n) { Fault::Drop } else { Fault::Deliver }
            });
            exchange.check();
        }
    }
}

/// A quarter of all packets, in both directions.
#[test]
fn a_bad_wire_is_survived() {
    for seed in 1..200_u64 {
        let setup = Setup { gso: seed % 2 == 0, reads: 1 + (seed % 4) as u8, ..Setup::default() };
        let mut exchange = Exchange::new(&setup);
        let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        exchange.world.fault = Box::new(move |_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            match state >> 32 & 15 {
                0 | 1 => Fault::Drop,
                2 => Fault::Twice,
                3 => Fault::Late((state >> 40) as usize & 7),
                _ => Fault::Deliver,
            }
        });
        exchange.check();
    }
}

/// [RSP-24]: the last acknowledgement is lost; the peer, whose timer is long, gets another.
#[test]
fn a_lost_last_acknowledgement_is_healed() {
    let mut world = World::new(&Setup::default());
    let (from, to) = (world.a.filled(b"hello", EVERY), world.b.region(5, EVERY));
    world.recv(1, &[to.sge(0, 5)]);
    world.fault = Box::new(|n| if n == 1 { Fault::Drop } else { Fault::Deliver });
    world.send(1, SendOp::Send, &[from.sge(0, 5)]);
    world.run_until(1);
    assert_eq!(world.a.statuses(), [(1, Status::Success)]);
}

/// [RSP-2]: one gap, one NAK, one going back.
#[test]
fn a_gap_costs_one_nak() {
    let mut world = World::new(&Setup::default());
    let bytes = pattern(256 * 40, 3);
    let (from, to) = (world.a.filled(&bytes, EVERY), world.b.region(bytes.len(), EVERY));
    world.fault = Box::new(|n| if n == 10 { Fault::Drop } else { Fault::Deliver });
    world.send(1, SendOp::Write(to.remote(0)), &[from.sge(0, bytes.len())]);
    world.settle();
    assert_eq!(world.a.statuses(), [(1, Status::Success)]);
    assert_eq!(to.bytes(0, bytes.len()), bytes);
    let (a, b) = (world.a.device.counters(), world.b.device.counters());
    assert_eq!((b.naks_sequence_sent, a.go_backs, a.packets_resent, a.timeouts), (1, 1, 30, 0));
}

/// [REQ-9 d], [REQ-11]: the rest of a READ is asked for once.
#[test]
fn a_gap_in_an_answer_costs_one_request() {
    let mut world = World::new(&Setup::default());
    let bytes = pattern(256 * 40, 3);
    let (to, from) = (world.a.region(bytes.len(), EVERY), world.b.filled(&bytes, EVERY));
    world.fault = Box::new(|n| if n == 10 { Fault::Drop } else { Fault::Deliver });
    world.send(1, SendOp::Read(from.remote(0)), &[to.sge(0, bytes.len())]);
    world.settle();
    assert_eq!(world.a.statuses(), [(1, Status::Success)]);
    assert_eq!(to.bytes(0, bytes.len()), bytes);
    let counters = world.a.device.counters();
    assert_eq!((counters.go_backs, counters.packets_resent, counters.timeouts), (1, 1, 0));
    assert_eq!(world.sent, 1 + 40 + 1 + 31);
}

/// [REQ-9 b]: the acknowledgement of what is behind it tells that an answer was lost.
#[test]
fn a_lost_answer_is_noticed_by_the_next_acknowledgement() {
    let mut world = World::new(&Setup::default());
    let (to, from) = (world.a.region(8, EVERY), world.b.filled(b"12345678", EVERY));
    world.fault = Box::new(|n| if n == 2 { Fault::Drop } else { Fault::Deliver });
    world.send(1, SendOp::Read(from.remote(0)), &[to.sge(0, 8)]);
    world.send(2, SendOp::Write(from.remote(0)), &[]);
    world.settle();
    assert_eq!(world.a.statuses(), [(1, Status::Success), (2, Status::Success)]);
    assert_eq!(world.a.device.counters().timeouts, 0);
}

/// [REQ-5]: with a fence a request sees what the READ before it has brought.
#[test]
fn a_fenced_request_waits_for_answers() {
    let mut world = World::new(&Setup::default());
    let bytes = pattern(600, 4);
    let (through, from) = (world.a.region(600, EVERY), world.b.filled(&bytes, EVERY));
    let to = world.b.region(600, EVERY);
    world.send(1, SendOp::Read(from.remote(0)), &[through.sge(0, 600)]);
    let all = [through.sge(0, 600)];
    world.send_flags(2, SendOp::Write(to.remote(0)), &all, SendFlags::FENCE);
    world.settle();
    assert_eq!(world.a.statuses(), [(1, Status::Success), (2, Status::Success)]);
    assert_eq!(to.bytes(0, 600), bytes);
}
