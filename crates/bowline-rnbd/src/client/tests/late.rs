//! Requests whose time is up while they are in flight [NB-28].

use super::*;

const LIMIT: Duration = Duration::from_secs(1);

/// A client with an IO timeout of one second.
fn limited(outage: Outage, slots: u16) -> Rig {
    Rig::new(Config { outage, io_timeout: Some(LIMIT), ..Config::default() }, slots)
}

#[test]
fn a_request_that_takes_too_long_is_answered_and_its_slot_stays_taken() {
    // tests [NB-28]
    let mut rig = limited(Outage::FailFast, 1);
    let dev = rig.mapped("a", 0, &DISK);
    rig.io(dev, IoOp::Write, 0, 512, 1);
    rig.pass(500);
    rig.io(dev, IoOp::Write, 0, 512, 2);
    rig.pass(500);
    assert_eq!(rig.done(), [(1, -110)]);
    assert_eq!(rig.sends.len(), 1, "the server still has it");
    rig.pass(500);
    assert_eq!(rig.done(), [(2, -110)]);
    rig.answer(0);
    assert!(rig.sends.is_empty(), "what nobody waits for is not sent");
    assert_eq!(rig.done(), []);
    assert_eq!(rig.core.poll_timeout(), None);
    rig.io(dev, IoOp::Write, 0, 512, 3);
    rig.answer(0);
    assert_eq!(rig.done(), [(3, 0)]);
}

// The rig checks after each request how many timeouts are kept.
#[test]
fn a_request_without_an_answer_does_not_keep_the_timeouts_of_others() {
    // tests [NB-28]
    let mut rig = limited(Outage::FailFast, 8);
    let dev = rig.mapped("a", 0, &DISK);
    rig.io(dev, IoOp::Write, 0, 512, 1);
    let stuck = rig.sends.remove(0);
    for n in 2..1000 {
        rig.io(dev, IoOp::Read, 4096, 512, n);
        rig.answer(0);
    }
    assert_eq!(rig.done().len(), 998);
    rig.pass(1000);
    assert_eq!(rig.done(), [(1, -110)]);
    rig.core.io_answer(rig.now, stuck.slot, 0);
    rig.pump();
    assert_eq!(rig.core.poll_timeout(), None);
}

#[test]
fn an_overdue_write_does_not_overwrite_a_newer_one() {
    // tests [NB-28]
    let mut rig = limited(Outage::FailFast, 8);
    let (a, b) = (rig.mapped("a", 0, &DISK), rig.mapped("b", 1, &DISK));
    rig.io(a, IoOp::Write, 4096, 4096, 1);
    rig.pass(1000);
    assert_eq!(rig.done(), [(1, -110)]);
    // Writes to other disks, writes to other bytes of this one, and reads do not wait.
    rig.io(b, IoOp::Write, 4096, 4096, 2);
    rig.io(a, IoOp::Write, 0, 4096, 3);
    rig.io(a, IoOp::Write, 8192, 512, 4);
    rig.io(a, IoOp::Read, 4096, 512, 5);
    assert_eq!(rig.sends.len(), 5);
    rig.io(a, IoOp::Write, 7680, 1024, 6);
    assert_eq!(rig.sends.len(), 5, "the last of the bytes is still being written");
    rig.io(a, IoOp::Write, 16384, 512, 7);
    assert_eq!(rig.sends.len(), 6, "others pass it");
    assert_eq!(rig.ended(), [0; 0]);
    rig.answer(0);
    assert_eq!(rig.ended().len(), 1);
    assert_eq!((rig.sends.len(), rig.wire(5).sector), (6, 15));
    for _ in 0..6 {
        rig.answer(0);
    }
    assert_eq!(rig.done(), [(2, 0), (3, 0), (4, 0), (5, 0), (7, 0), (6, 0)]);
    assert_eq!(rig.ended(), [0; 0]);
}

#[test]
fn an_overdue_write_is_resent_in_its_slot_before_newer_ones() {
    // tests [NB-28] [NB-54]: the server may still carry it out, behind a path that was lost
    let mut rig = limited(WAIT, 8);
    let dev = rig.mapped("a", 0, &DISK);
    rig.io(dev, IoOp::Write, 0, 512, 1);
    let slot = rig.sends[0].slot;
    // The path is lost before the time of the request is up, or after.
    rig.answer(-103);
    assert!(rig.sends.is_empty());
    rig.core.link_down(rig.now);
    rig.pass(1000);
    assert_eq!(rig.done(), [(1, -110)]);
    rig.core.link_up(rig.now, SESSION);
    rig.order();
    rig.open("a", 0, &DISK);
    rig.io(dev, IoOp::Write, 0, 512, 2);
    assert_eq!(rig.sends.len(), 1, "{:?}", rig.sends);
    assert_eq!(rig.sends[0].slot, slot);
    rig.answer(0);
    assert_eq!(rig.ended().len(), 1);
    assert_eq!(rig.sends.len(), 1);
    rig.answer(0);
    assert_eq!(rig.done(), [(2, 0)]);
}

#[test]
fn a_write_that_waits_for_an_overdue_one_becomes_overdue_itself() {
    // tests [NB-28]
    let mut rig = limited(Outage::FailFast, 8);
    let dev = rig.mapped("a", 0, &DISK);
    rig.io(dev, IoOp::Discard, 0, 4096, 0);
    rig.io(dev, IoOp::Write, 0, 4096, 1);
    rig.pass(1000);
    rig.io(dev, IoOp::Write, 0, 4096, 2);
    rig.pass(1000);
    assert_eq!(rig.done(), [(0, -95), (1, -110), (2, -110)]);
    rig.answer(-5);
    assert!(rig.sends.is_empty(), "nobody waits for it any more");
    rig.io(dev, IoOp::Write, 0, 4096, 3);
    rig.answer(0);
    assert_eq!(rig.done(), [(3, 0)]);
}

#[test]
fn an_overdue_write_waits_for_nothing() {
    // tests [NB-28] [NB-54]: two writes to the same bytes, in flight at the same time
    let mut rig = limited(WAIT, 8);
    let dev = rig.mapped("a", 0, &DISK);
    rig.io(dev, IoOp::Write, 0, 1024, 1);
    rig.io(dev, IoOp::Write, 512, 1024, 2);
    rig.answer(-103);
    rig.answer(-103);
    rig.core.link_down(rig.now);
    rig.pass(1000);
    assert_eq!(rig.done(), [(1, -110), (2, -110)]);
    rig.core.link_up(rig.now, SESSION);
    rig.order();
    rig.open("a", 0, &DISK);
    rig.io(dev, IoOp::Write, 512, 512, 3);
    assert_eq!(rig.sends.len(), 2, "both go out again, and what is newer waits");
    rig.answer(0);
    rig.answer(0);
    rig.answer(0);
    assert_eq!(rig.done(), [(3, 0)]);
    assert_eq!(rig.ended().len(), 2);
}
