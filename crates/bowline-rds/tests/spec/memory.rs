//! Memory of messages follows what they count for, whatever stands in front of them.

use std::time::Duration;

use bowline_base::Errno;
use bowline_rds::{CloseReason, Config, Error, Interest, Limits, Node, SendControl, SocketId};

use crate::support::*;

/// Payload of a message that counts.
const BIG: usize = 65_000;
/// A peer with a larger address, which is connected to, and that does not answer.
const SILENT: &str = "10.0.0.2:5000";

/// Memory that a node may have beside what its messages count: what two chunks of each of eight
/// paths have spare, and records.
const SPARE: usize = 8 * 2 * (64 << 10) + (64 << 10);

fn memory(lab: &Lab) -> usize {
    let memory = lab.node.send_memory();
    memory.frames + memory.records
}

fn accounted(lab: &Lab) -> usize {
    lab.node.send_memory().accounted
}

fn check(lab: &Lab) {
    let (memory, accounted) = (memory(lab), accounted(lab));
    assert!(memory <= 3 * accounted + SPARE, "{memory} bytes for {accounted}");
}

// tests, [R-531], [R-532]: the node's own probe is in front, and never moves
#[test]
fn what_is_sent_to_a_silent_peer_and_cancelled_takes_no_memory() {
    let mut lab = Lab::smaller();
    let keeps = lab.bound("10.0.0.1:4000");
    for round in 0..500 {
        let s = lab.bound("10.0.0.1:4001");
        lab.send(s, SILENT, &[1; BIG]).expect("sent");
        lab.node.close(lab.now, s);
        lab.send(keeps, SILENT, &[2; BIG]).expect("sent");
        match round % 2 {
            0 => lab.node.cancel_sent_to(lab.now, keeps, addr(SILENT)).expect("bound"),
            _ => lab.node.cancel_all(lab.now, keeps).expect("bound"),
        }
        lab.node.check_invariants();
        check(&lab);
        assert!(accounted(&lab) <= 256, "only the probe stays");
        assert!(memory(&lab) < SPARE);
    }
    let link = lab.establish();
    lab.deliver(link, &[map_of(&[]), pong_with(1, npaths_ext(1))]);
    assert_eq!(lab.data_frames(link), [], "nothing of it is sent");
}

// tests, [R-530]: an unacknowledged message of another socket is in front
#[test]
fn what_is_cancelled_behind_a_living_message_takes_no_memory() {
    for room in [0, 100, 200_000, usize::MAX] {
        let (mut lab, living, link) = at(B, 4000).paths(1).bowline();
        lab.send(living, "10.0.0.1:5000", b"living").expect("sent");
        lab.room = room;
        for _ in 0..300 {
            let s = lab.bound("10.0.0.2:4001");
            lab.send(s, "10.0.0.1:5000", &[1; BIG]).expect("sent");
            lab.send(s, "10.0.0.1:5000", b"short").expect("sent");
            lab.node.close(lab.now, s);
            lab.node.check_invariants();
            check(&lab);
            let most = if room == usize::MAX { 1000 } else { 256 << 10 };
            assert!(accounted(&lab) <= most, "{}", accounted(&lab));
        }
        assert_eq!(lab.node.outstanding(living).expect("bound").len(), 1);
        // What had been begun comes to its end, and the living message is there to be repeated.
        lab.unblock(link, usize::MAX);
        lab.fail(link, CloseReason::Reset);
        let link = lab.bowline(A, 7, 0);
        let frames = lab.data_frames(link);
        assert_eq!(frames.iter().map(|f| &f.payload[..]).collect::<Vec<_>>(), [b"living"]);
        lab.deliver(link, &[ack_frame(frames[0].header.sequence)]);
        assert_eq!(accounted(&lab), 0);
        assert!(memory(&lab) < 100_000, "records alone");
    }
}

// tests: each message that stays keeps little of what was around it
#[test]
fn short_messages_do_not_keep_the_long_ones_between_them() {
    let mut lab = Lab::smaller();
    let living = lab.bound("10.0.0.1:4000");
    let mut others: Vec<SocketId> = Vec::new();
    for n in 0..400_u32 {
        lab.send(living, SILENT, &n.to_be_bytes()).expect("sent");
        if others.len() == 16 {
            others.drain(..).for_each(|s| lab.node.close(lab.now, s));
            lab.node.check_invariants();
            check(&lab);
        }
        let s = lab.bound("10.0.0.1:0");
        lab.send(s, SILENT, &[1; BIG]).expect("sent");
        others.push(s);
    }
    others.drain(..).for_each(|s| lab.node.close(lab.now, s));
    check(&lab);
    // All that stays comes out whole and in order, also from a node that goes on elsewhere.
    let mut bytes = Vec::new();
    lab.node.close_links(lab.now);
    lab.settle();
    lab.node.save(lab.now, &mut bytes).expect("saved");
    assert!(bytes.len() < 100_000, "{} bytes are handed on", bytes.len());
    lab.node = Node::resume(config(A), lab.now, &bytes[..]).expect("read");
    lab.node.check_invariants();
    check(&lab);
    lab.connects.clear();
    lab.ms(2000);
    let link = lab.establish();
    lab.deliver(link, &[map_of(&[]), pong_with(1, npaths_ext(1))]);
    let frames = lab.data_frames(link);
    assert!(
        frames.iter().map(|f| f.payload.clone()).eq((0..400_u32).map(|n| n.to_be_bytes().to_vec())),
        "{} messages",
        frames.len()
    );
}

// tests: of messages that were written and cancelled one record stays, for the barrier
#[test]
fn later_paths_wait_for_the_last_message_that_was_written_and_cancelled() {
    let mut lab = Lab::larger();
    let s = lab.bound("10.0.0.2:4000");
    let first = lab.accept(A);
    lab.deliver(first, &[map_of(&[])]);
    lab.acks = false;
    lab.ms(250); // the peer has not shown what it is, and messages go on
    for _ in 0..50 {
        lab.send(s, "10.0.0.1:5000", &[1; 1000]).expect("sent");
        lab.node.cancel_all(lab.now, s).expect("bound");
    }
    assert!(!lab.data_frames(first).is_empty(), "written");
    assert!(accounted(&lab) <= 256, "{}", accounted(&lab));
    // The peer turns out to have eight paths: those above 0 wait for what is on the way.
    lab.deliver(first, &[pong_with(1, npaths_ext(8))]);
    let others: Vec<_> = (1..8).map(|_| lab.accept(A)).collect();
    lab.ms(250);
    for port in 5000..5016 {
        lab.send(s, &format!("10.0.0.1:{port}"), b"later").expect("sent");
    }
    let on_others =
        |lab: &mut Lab| -> usize { others.iter().map(|link| lab.data_frames(*link).len()).sum() };
    assert_eq!(on_others(&mut lab), 0, "they are held back");
    lab.acks = true;
    lab.settle();
    assert!(on_others(&mut lab) > 0, "all was acknowledged");
}

// tests [B-21]: messages without payload fill no buffer, so others limit them
#[test]
fn with_many_messages_in_the_node_each_counts_all_that_it_takes() {
    let limits = Limits { send_bytes_total: 1 << 20, ..Limits::default() };
    let mut lab = Lab::new(Config { limits, ..config(A) });
    let fill = |lab: &mut Lab| {
        let s = lab.bound("10.0.0.1:0");
        let sent = (0..20_000).take_while(|_| lab.send_empty(s, SILENT).is_ok()).count();
        (s, sent)
    };
    let (first, sent) = fill(&mut lab);
    assert!((8000..9000).contains(&sent), "{sent}: there is room for 1 MiB");
    let more: Vec<_> = (0..20).map(|_| fill(&mut lab)).collect();
    assert!(more.iter().all(|(_, sent)| *sent == 106_496 / 128), "{more:?}");
    assert_eq!(lab.node.readiness(first).map(|ready| ready.writable), Ok(false));
    check(&lab);
    let fresh = lab.bound("10.0.0.1:4000");
    lab.send_empty(fresh, SILENT).expect("a socket that has nothing may always send");
    // Who waits is told when there are fewer.
    lab.node.register(first, Interest::WRITE).expect("open");
    lab.settle();
    lab.wakes.clear();
    more.iter().for_each(|(s, _)| lab.node.close(lab.now, *s));
    lab.settle();
    assert!(lab.wakes.is_empty(), "its own still fill the node");
    lab.node.cancel_all(lab.now, first).expect("bound");
    lab.settle();
    assert!(lab.wakes.iter().any(|(of, _)| *of == first));
    check(&lab);
    assert!(memory(&lab) < SPARE);
}

// tests [ZC-9]
#[test]
fn completions_that_nobody_receives_are_bounded() {
    let mut lab = Lab::smaller();
    let s = lab.bound("10.0.0.1:4000");
    lab.node.set_zerocopy(s, true).expect("open");
    let mut sent = 0;
    let refused = loop {
        let cookie = [SendControl::ZcopyCookie(sent)];
        match lab.send_with(s, SILENT, b"x", &cookie, true) {
            Ok(_) => sent += 1,
            Err(error) => break error,
        }
        lab.node.cancel_all(lab.now, s).expect("bound");
        assert!(sent < 10_000);
    };
    assert_eq!((refused, refused.errno()), (Error::TooManyStatuses, Errno::ENOBUFS));
    lab.send(s, SILENT, b"x").expect("others are sent");
    lab.node.cancel_all(lab.now, s).expect("bound");
    lab.recv(s).expect("a completion");
    lab.send_with(s, SILENT, b"x", &[SendControl::ZcopyCookie(1)], true).expect("sent again");
    lab.advance(Duration::from_secs(1));
}
