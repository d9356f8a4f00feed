//! Sessions that are lost, and come back: which requests wait, which fail, and which are sent
//! again.

use super::*;

#[test]
fn without_a_queue_an_outage_fails_everything() {
    // tests [NB-27] [NB-32]
    let mut rig = Rig::new(Config::default(), 1);
    let dev = rig.mapped("disk0", 0, &DISK);
    rig.io(dev, IoOp::Read, 0, 512, 1);
    rig.io(dev, IoOp::Read, 0, 512, 2);
    rig.core.link_down(rig.now);
    assert_eq!(rig.done(), [(2, -5)]);
    assert_eq!(rig.events(), [Event::Offline { dev }]);
    rig.answer(-103);
    assert_eq!(rig.done(), [(1, -5)], "an application knows no such error");
    assert_eq!(rig.core.state(dev).unwrap().to_string(), "closed");
    rig.io(dev, IoOp::Read, 0, 512, 3);
    assert_eq!(rig.done(), [(3, -5)]);
}

#[test]
fn after_an_outage_everything_is_opened_again_and_waiting_requests_go_out() {
    // tests [NB-16] [NB-54] [NB-32]
    let mut rig = Rig::new(queueing(), 2);
    let (a, b) = (rig.mapped("a", 0, &DISK), rig.mapped("b", 1, &DISK));
    let pending = rig.core.map("c", Access::Rw).unwrap();
    let asked = rig.order();
    for n in 0..3 {
        rig.io(a, IoOp::Write, u64::from(n) * 512, 512, n);
    }
    rig.answer(-103);
    rig.answer(-103);
    assert_eq!(rig.done(), []);
    rig.core.service_answer(rig.now, asked.token, -103, &[]);
    rig.core.link_down(rig.now);
    assert_eq!(
        rig.events(),
        [
            Event::Mapped { dev: pending, result: Err(Errno::ECONNABORTED) },
            Event::Offline { dev: a },
            Event::Offline { dev: b },
        ]
    );
    rig.io(b, IoOp::Read, 0, 512, 10);
    assert!(rig.sends.is_empty());
    rig.pass(5000);
    rig.core.link_up(rig.now, SessionLimits { max_io: 4096, max_segments: 1 });
    assert_eq!(wire::parse(&rig.order().usr), Ok(Request::SessInfo { ver: 2 }));
    let (first, second) = (rig.order(), rig.order());
    assert!(rig.core.poll_service_message().is_none());
    rig.answer_open(second.token, 0, &DISK);
    rig.pump();
    assert_eq!(rig.sends.len(), 1, "b is back, under the id that a had");
    assert_eq!(rig.wire(0).device, 0);
    rig.answer_open(first.token, 1, &Limits { bytes: 2 << 20, ..DISK });
    assert_eq!(
        rig.events(),
        [
            Event::Online { dev: b },
            Event::Resized { dev: a, bytes: 2 << 20 },
            Event::Online { dev: a },
        ]
    );
    assert_eq!(rig.core.limits(a).unwrap().max_io, 4096);
    rig.pump();
    for _ in 0..4 {
        rig.answer(0);
    }
    let mut done = rig.done();
    done.sort_unstable();
    assert_eq!(done, [(0, 0), (1, 0), (2, 0), (10, 0)]);
    assert_eq!(rig.core.infos()[0].stats.resent, 2);
}

#[test]
fn waiting_ends_when_time_is_up() {
    // tests [NB-54]
    let mut rig = Rig::new(queueing(), 2);
    let dev = rig.mapped("a", 0, &DISK);
    rig.core.link_down(rig.now);
    rig.io(dev, IoOp::Write, 0, 512, 1);
    assert_eq!(rig.core.poll_timeout(), Some(rig.now + Duration::from_secs(30)));
    rig.pass(29_999);
    assert_eq!(rig.done(), []);
    rig.pass(1);
    assert_eq!(rig.done(), [(1, -5)]);
    rig.io(dev, IoOp::Write, 0, 512, 2);
    assert_eq!(rig.done(), [(2, -5)], "and later ones do not begin to wait");
    rig.core.link_up(rig.now, SESSION);
    rig.order();
    rig.open("a", 0, &DISK);
    rig.io(dev, IoOp::Write, 0, 512, 3);
    rig.answer(0);
    assert_eq!(rig.done(), [(3, 0)]);
}

#[test]
fn a_path_that_is_lost_before_the_session_says_so_makes_no_busy_loop() {
    let mut rig = Rig::new(queueing(), 2);
    let dev = rig.mapped("a", 0, &DISK);
    rig.io(dev, IoOp::Write, 0, 512, 1);
    rig.answer(-103);
    assert!(rig.sends.is_empty(), "held for a while");
    rig.pass(100);
    assert_eq!(rig.sends.len(), 1);
    rig.answer(-103);
    for _ in 0..400 {
        rig.pass(100);
        if !rig.sends.is_empty() {
            rig.answer(-103);
        }
    }
    assert_eq!(rig.done(), [(1, -5)]);
    rig.io(dev, IoOp::Write, 0, 512, 2);
    rig.pass(100);
    rig.core.send_failed(rig.now, rig.sends.remove(0).slot, Errno::ENOMEM);
    rig.pump();
    assert!(rig.sends.is_empty());
    rig.pass(10);
    rig.answer(0);
    assert_eq!(rig.done(), [(2, 0)]);
}

#[test]
fn a_server_that_lost_its_table_never_sees_an_old_id_after_a_new_open() {
    // tests [NB-16] [NB-21] [NB-23]: a restart behind one of two paths
    let mut rig = Rig::new(queueing(), 4);
    let (a, b) = (rig.mapped("a", 0, &DISK), rig.mapped("b", 1, &DISK));
    rig.io(b, IoOp::Write, 0, 512, 1);
    rig.io(a, IoOp::Write, 0, 512, 2);
    rig.answer(-107);
    assert_eq!(rig.events(), [Event::Offline { dev: b }]);
    rig.pass(1000);
    assert!(rig.core.poll_service_message().is_none(), "an IO is under way");
    rig.io(a, IoOp::Write, 512, 512, 3);
    assert_eq!(rig.sends.len(), 1, "and no more begin");
    rig.answer(0);
    assert_eq!(rig.done(), [(2, 0)]);
    // The new server gives b the id that a thinks it has.
    rig.open("b", 0, &DISK);
    assert_eq!(rig.events(), [Event::Online { dev: b }, Event::Offline { dev: a }]);
    rig.pump();
    assert_eq!(rig.sends.len(), 1, "only of b: {:?}", rig.sends);
    rig.answer(0);
    rig.pass(1000);
    rig.open("a", 1, &DISK);
    rig.pump();
    assert_eq!(rig.wire(0).device, 1);
    rig.answer(0);
    assert_eq!(rig.done(), [(1, 0), (3, 0)]);
}

#[test]
fn requests_of_a_disk_can_be_made_to_fail_fast() {
    // tests [NB-54] [NB-37]
    let mut rig = Rig::new(queueing(), 4);
    let [dev, other] = [("a", 0), ("b", 1)].map(|(name, id)| rig.mapped(name, id, &DISK));
    // While the session is up nothing changes.
    rig.io(dev, IoOp::Write, 0, 512, 1);
    rig.core.fail_fast(dev);
    rig.io(dev, IoOp::Write, 0, 512, 2);
    assert_eq!(rig.done(), []);
    rig.answer(0);
    assert_eq!(rig.done(), [(1, 0)]);
    // Neither requests in flight when it was lost wait, nor later ones.
    rig.io(other, IoOp::Write, 0, 512, 3);
    rig.answer(-103);
    rig.answer(-103);
    rig.core.link_down(rig.now);
    rig.io(dev, IoOp::Read, 0, 512, 4);
    rig.io(other, IoOp::Read, 0, 512, 5);
    let failed = rig.done();
    assert_eq!(failed.iter().map(|(request, _)| *request).collect::<Vec<_>>(), [2, 4]);
    assert!(failed.iter().all(|(_, errno)| *errno < 0), "{failed:?}");
    // Each call fails the requests that wait already.
    rig.core.fail_fast(other);
    rig.core.fail_fast(other);
    rig.pump();
    assert_eq!(rig.done(), [(3, -5), (5, -5)]);
    rig.pass(100);
    assert_eq!(rig.core.poll_timeout(), None, "nobody waits for anything");
    // The session comes back before they are unmapped: they are open as before.
    rig.core.link_up(rig.now, SESSION);
    rig.order();
    rig.open("a", 6, &DISK);
    rig.open("b", 7, &DISK);
    rig.io(other, IoOp::Write, 0, 512, 6);
    rig.answer(0);
    assert_eq!(rig.done(), [(6, 0)]);
    rig.core.unmap(dev).unwrap();
    rig.core.fail_fast(dev);
    rig.io(dev, IoOp::Write, 0, 512, 7);
    assert_eq!(rig.done(), [(7, -5)]);
}

#[test]
fn a_refused_open_is_tried_again_while_requests_may_wait() {
    // tests [NB-61] [NB-62]
    let mut rig = Rig::new(queueing(), 4);
    let dev = rig.mapped("a", 0, &DISK);
    rig.core.link_down(rig.now);
    rig.core.link_up(rig.now, SESSION);
    rig.order();
    rig.io(dev, IoOp::Write, 0, 512, 1);
    for _ in 0..3 {
        let order = rig.order();
        rig.core.service_answer(rig.now, order.token, -1, &[]);
        assert!(rig.core.poll_service_message().is_none());
        rig.pass(1000);
    }
    rig.open("a", 0, &DISK);
    rig.pump();
    rig.answer(0);
    assert_eq!(rig.done(), [(1, 0)]);
}

#[test]
fn io_in_flight_is_resent_in_its_slot() {
    // tests [RS-9] [NB-54]
    let mut rig = Rig::new(queueing(), 4);
    let dev = rig.mapped("disk0", 3, &DISK);
    for n in 0..6 {
        rig.io(dev, IoOp::Write, u64::from(n) * 4096, 4096, n);
    }
    let slots: Vec<_> = (0..4).map(|at| (rig.wire(at).sector, rig.sends[at].slot)).collect();
    rig.answer(0);
    assert_eq!(rig.sends.len(), 4, "the fifth took its place");
    let fifth = rig.sends[3].slot;
    assert_eq!(fifth, slots[0].1);
    for _ in 0..4 {
        rig.answer(Errno::ECONNABORTED.neg());
    }
    rig.core.link_down(rig.now);
    rig.core.link_up(rig.now, SESSION);
    let _hello = rig.order();
    rig.open("disk0", 4, &DISK);
    rig.pump();
    let again: Vec<_> = (0..4).map(|at| (rig.wire(at).sector, rig.sends[at].slot)).collect();
    let mut expected = slots[1..].to_vec();
    expected.push((32, fifth));
    expected.reverse();
    assert_eq!(again, expected);
    for _ in 0..5 {
        rig.answer(0);
    }
    assert_eq!(rig.done().len(), 6);
}

#[test]
fn slots_of_a_disk_that_does_not_come_back_are_not_lost_to_others() {
    // tests [NB-54]
    let mut rig = Rig::new(queueing(), 2);
    let gone = rig.mapped("gone", 3, &DISK);
    let other = rig.mapped("other", 4, &DISK);
    rig.io(gone, IoOp::Write, 0, 512, 1);
    rig.io(gone, IoOp::Write, 512, 512, 2);
    rig.answer(Errno::ECONNABORTED.neg());
    rig.answer(Errno::ECONNABORTED.neg());
    rig.core.link_down(rig.now);
    rig.io(other, IoOp::Write, 0, 512, 3);
    rig.core.link_up(rig.now, SESSION);
    let _hello = rig.order();
    let open = rig.order();
    rig.core.service_answer(rig.now, open.token, Errno::ENOENT.neg(), &[]);
    rig.open("other", 4, &DISK);
    rig.pump();
    assert_eq!(rig.sends.len(), 1);
    rig.answer(0);
    assert_eq!(rig.done(), [(3, 0)]);
    rig.core.unmap(gone).unwrap();
    rig.pump();
    assert_eq!(rig.done(), [(2, -5), (1, -5)]);
}

#[test]
fn writes_a_server_may_have_lost_are_resent_as_a_whole() {
    // tests [NB-54]: with a write cache, pieces acknowledged before an outage do not count, even if
    // the loss of the session is reported before their answers.
    for (cache, again, down_first) in [(true, 3, false), (false, 2, false), (true, 3, true)] {
        let disk = Limits { write_cache: cache, ..DISK };
        let mut rig = Rig::new(queueing(), 8);
        let dev = rig.mapped("disk0", 3, &disk);
        rig.io(dev, IoOp::Write, 0, 3 * 8192, 1);
        rig.io(dev, IoOp::Read, 65_536, 3 * 8192, 2);
        assert_eq!(rig.sends.len(), 6);
        if down_first {
            rig.core.link_down(rig.now);
        }
        rig.answer(0);
        for _ in 0..2 {
            rig.answer(Errno::ECONNABORTED.neg());
        }
        rig.answer(0);
        for _ in 0..2 {
            rig.answer(Errno::ECONNABORTED.neg());
        }
        if !down_first {
            rig.core.link_down(rig.now);
        }
        rig.core.link_up(rig.now, SESSION);
        let _hello = rig.order();
        rig.open("disk0", 3, &disk);
        rig.pump();
        let (mut writes, mut reads) = (Vec::new(), 0);
        while !rig.sends.is_empty() {
            let io = rig.wire(0);
            match io.op {
                wire::OP_WRITE => writes.push(io.sector),
                _ => reads += 1,
            }
            rig.answer(0);
        }
        writes.sort_unstable();
        assert_eq!(reads, 2, "what was read was read");
        assert_eq!(rig.done().len(), 2);
        match again {
            3 => assert_eq!(writes, [0, 16, 16, 32, 32], "the rest, then all of it"),
            _ => assert_eq!(writes, [16, 32]),
        }
    }
}

#[test]
fn data_that_may_be_lost_are_resent_before_their_flush() {
    // tests [NB-54] [NB-26]
    let limits = Limits { fua: false, ..DISK };
    let mut rig = Rig::new(queueing(), 8);
    let dev = rig.mapped("disk0", 3, &limits);
    let request = DiskRequest {
        op: IoOp::Write,
        offset: 0,
        len: 512,
        fua: true,
        nounmap: false,
        mem: Some((7, 0)),
        done: 1,
    };
    rig.core.submit(rig.now, dev, request);
    rig.pump();
    rig.answer(0);
    assert_eq!(rig.wire(0).op, wire::OP_FLUSH);
    rig.answer(Errno::ENOTCONN.neg());
    rig.pass(60_000);
    rig.open("disk0", 9, &limits);
    rig.pump();
    let mut ops = Vec::new();
    while !rig.sends.is_empty() {
        ops.push(rig.wire(0).op);
        rig.answer(0);
    }
    assert_eq!(ops, [wire::OP_FLUSH, wire::OP_WRITE, wire::OP_FLUSH]);
    assert_eq!(rig.done(), [(1, 0)]);
}

#[test]
fn unwanted_requests_end_unless_the_server_may_carry_out_a_change() {
    // tests [NB-54]
    let mut rig = Rig::new(queueing(), 2);
    let dev = rig.mapped("disk0", 0, &DISK);
    rig.io(dev, IoOp::Write, 0, 512, 1);
    rig.io(dev, IoOp::Read, 512, 512, 2);
    rig.io(dev, IoOp::Write, 1024, 512, 3);
    rig.io(dev, IoOp::Read, 2048, 512, 4);
    rig.core.cancel_unwanted(|done, _| *done != 3);
    rig.core.check_invariants();
    assert_eq!(rig.done(), [(3, -5)], "it was not sent yet");
    rig.answer(-103);
    rig.answer(-103);
    rig.core.link_down(rig.now);
    rig.io(dev, IoOp::Write, 4096, 512, 5);
    rig.core.cancel_unwanted(|_, op| op != IoOp::Read);
    rig.core.check_invariants();
    assert_eq!(rig.done(), [(2, -5), (4, -5)]);
    rig.core.cancel_unwanted(|_, _| false);
    rig.core.check_invariants();
    assert_eq!(rig.done(), [(5, -5)]);
    rig.core.link_up(rig.now, SESSION);
    rig.order();
    rig.open("disk0", 0, &DISK);
    rig.pump();
    assert_eq!((rig.sends.len(), rig.wire(0).sector), (1, 0), "the server may be at it");
    rig.answer(0);
    assert_eq!(rig.done(), [(1, 0)]);
}
