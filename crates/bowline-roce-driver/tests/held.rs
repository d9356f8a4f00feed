//! Delayed acknowledgements: while a program polls, they wait for what it sends next.

mod common;

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bowline_roce_driver::SoftDevice;
use bowline_verbs::{Completion, Device, QpAttr, QpState, SendOp, Status};
use common::{PATIENCE, Side, connect, connect_to, ip, open};

/// One test at a time: threads of other tests would delay these.
static ALONE: Mutex<()> = Mutex::new(());

fn alone() -> MutexGuard<'static, ()> {
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Polls until there is an entry with this number.
fn polled(side: &Side, id: u64) -> Completion {
    let start = Instant::now();
    let mut out = Vec::new();
    while side.dev.poll_cq(side.cq, &mut out, 1).unwrap() == 0 || out[0].wr_id != id {
        assert!(start.elapsed() < PATIENCE, "{id} has not ended");
        out.clear();
    }
    out[0]
}

/// Polls on both sides, so that their devices count the programs as polling.
fn warm(sides: [&Side; 2]) {
    let start = Instant::now();
    let mut out = Vec::new();
    while start.elapsed() < Duration::from_millis(5) {
        for side in sides {
            side.dev.poll_cq(side.cq, &mut out, 1).unwrap();
        }
    }
}

/// Fifteen packets of 4 KiB fill a burst: the acknowledgement is sent after it, in the same system
/// call.
#[test]
fn they_go_with_the_answer() {
    const LEN: usize = 15 * 4096;
    const TRIPS: u64 = 200;
    let _alone = alone();
    let (a, b) = (open(ip(40, 1)), open(ip(40, 2)));
    let (near, far) = connect(&a, &b, 1 << 20);
    warm([&near, &far]);
    let round_trips = || {
        let before = [a.stats(), b.stats()];
        for trip in 0..TRIPS {
            for [from, to] in [[&near, &far], [&far, &near]] {
                to.post_recv(2 * trip, 0, LEN);
                from.post(2 * trip + 1, SendOp::Send, 0, LEN);
                assert_eq!(polled(to, 2 * trip).status, Status::Success);
            }
        }
        (a.stats() - before[0]).sends.max((b.stats() - before[1]).sends)
    };
    // While this thread is not scheduled, the background threads send acknowledgements alone.
    let sends = (0..10).map(|_| round_trips()).min();
    assert!(sends <= Some(TRIPS + TRIPS / 10), "{sends:?} calls for {TRIPS} messages");
}

/// The same for a program that answers on several queue pairs: no acknowledgement is sent alone
/// before the answer of its queue pair.
#[test]
fn each_goes_with_its_own_answer() {
    const LEN: usize = 15 * 4096;
    const TRIPS: u64 = 100;
    let _alone = alone();
    let (a, b) = (open(ip(46, 1)), open(ip(46, 2)));
    let (near, far) = connect(&a, &b, 1 << 20);
    let (near_too, far_too) = connect_to(&a, &b, 1 << 20, 7473);
    warm([&near, &far]);
    let round_trips = || {
        let before = b.stats();
        for trip in 0..TRIPS {
            for side in [&far, &far_too, &near, &near_too] {
                side.post_recv(2 * trip, 0, LEN);
            }
            let (nears, fars) = ([&near, &near_too], [&far, &far_too]);
            for (froms, tos) in [(nears, fars), (fars, nears)] {
                froms.iter().for_each(|from| from.post(2 * trip + 1, SendOp::Send, 0, LEN));
                for to in tos {
                    assert_eq!(polled(to, 2 * trip).status, Status::Success);
                }
            }
        }
        (b.stats() - before).sends
    };
    let sends = (0..10).map(|_| round_trips()).min();
    assert!(sends <= Some(2 * TRIPS + TRIPS / 5), "{sends:?} calls for {} messages", 2 * TRIPS);
}

/// A peer learns that its WRITE has arrived, whatever the polling program does then.
#[test]
fn they_go_before_the_end() {
    type Ending = fn(&SoftDevice, &Side);
    let endings: [Ending; 3] = [
        |_, side| side.dev.disconnect(side.id).unwrap(),
        |device, _| device.close(),
        |_, side| {
            let error = QpAttr { state: Some(QpState::Err), ..QpAttr::default() };
            side.dev.modify_qp(side.qp, &error).unwrap();
        },
    ];
    let _alone = alone();
    for (n, end) in (0..).zip(endings) {
        for again in 0..6 {
            let (a, b) = (open(ip(41 + n, 2 * again + 1)), open(ip(41 + n, 2 * again + 2)));
            let (near, far) = connect(&a, &b, 1 << 16);
            warm([&near, &far]);
            far.post_recv(1, 0, 64);
            near.post_recv(3, 0, 64);
            near.post(2, SendOp::Send, 0, 64);
            polled(&far, 1);
            // After a small answer the acknowledgement stays delayed.
            if again % 2 == 1 {
                far.post(4, SendOp::Send, 0, 64);
            }
            end(&b, &far);
            assert_eq!(polled(&near, 2).status, Status::Success, "ending {n}, {again}");
        }
    }
}

/// A WRITE gives the program nothing to answer: its acknowledgement is not delayed, although every
/// poll finds completions of another connection.
#[test]
fn they_do_not_wait_for_a_program_that_was_told_nothing() {
    let _alone = alone();
    let (a, b, c) = (open(ip(45, 1)), open(ip(45, 2)), open(ip(45, 3)));
    let (near, far) = connect(&a, &b, 1 << 16);
    let (busy, sink) = connect_to(&c, &b, 1 << 16, 7472);
    warm([&near, &far]);
    let mut looks = Vec::new();
    let mut out = Vec::new();
    for id in 0..20 {
        near.post(id, SendOp::Write(far.remote(0)), 0, 64);
        let start = Instant::now();
        let mut count = 0;
        out.clear();
        while near.dev.poll_cq(near.cq, &mut out, 1).unwrap() == 0 {
            busy.post(9, SendOp::Write(sink.remote(0)), 0, 64);
            let mut others = Vec::new();
            b.poll_cq(far.cq, &mut others, 1).unwrap();
            while c.poll_cq(busy.cq, &mut others, 16).unwrap() > 0 {}
            count += 1;
            assert!(start.elapsed() < PATIENCE);
        }
        looks.push(count);
    }
    looks.sort_unstable();
    // Delayed acknowledgements would be sent after 96 packets, or at the next turn of the
    // background thread.
    assert!(looks[10] <= 10, "{looks:?}");
}
