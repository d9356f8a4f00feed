//! Which path a connection counts for: the one that its greeting names, not the one that its port
//! tells. A router may have changed the port, or no better one was free.

use bowline_rds::{CloseHow, CloseReason, Config, LinkId, PathState, SocketId};
use bowline_wire::rds::Handshake;

use crate::support::*;

/// A connection of the smaller peer from a port.
fn accept_at(lab: &mut Lab, port: u16) -> LinkId {
    lab.accept_from((ip(A), port).into()).expect("accepted")
}

fn receiver(lab: &mut Lab) -> SocketId {
    lab.bound("10.0.0.2:5000")
}

/// The number up to which the node says, in its greeting on a connection, that all has come.
fn greeted_with(lab: &mut Lab, link: LinkId) -> u64 {
    let frames = lab.frames(link);
    let greeting = frames.iter().find(|f| f.header.is_probe_ping() && f.header.sequence == 0);
    greeting.expect("a greeting").header.ack
}

/// Ways in which a connection comes to leave before anything was read on it.
#[derive(Clone, Copy, Debug)]
enum Leaves {
    /// The operator drops it, the only one.
    Dropped,
    /// It waited for a path, and one too many came.
    TooMany,
}

/// What a connection brings that leaves is read to its end. Its greeting names a path other than
/// its port's; the connection that follows names the same path, from a port of yet another one.
// tests [R-2004] [R-422] [R-2012]
#[test]
fn what_a_connection_brings_that_leaves_does_not_come_again() {
    for how in [Leaves::Dropped, Leaves::TooMany] {
        let mut config = config(B);
        config.limits.links_extra_per_peer = 1;
        let mut lab = Lab::new(config);
        let s = receiver(&mut lab);
        lab.slow_cuts = true;
        let leaving = match how {
            Leaves::Dropped => {
                let first = accept_at(&mut lab, 40_001);
                assert_eq!(lab.node.drop_links(lab.now, None), 1);
                lab.settle();
                first
            }
            Leaves::TooMany => {
                accept_at(&mut lab, 40_000);
                let second = accept_at(&mut lab, 40_001);
                accept_at(&mut lab, 40_002);
                second
            }
        };
        assert_eq!(lab.closes, [(leaving, CloseHow::Cut)], "{how:?}");
        let sent = data(1 << 40, 9, 5000, b"once");
        lab.deliver(leaving, &[map_of(&[]), hello(7, 3, 0), sent.clone()]);
        assert_eq!(lab.recv_all(s), [b"once"], "{how:?}");
        lab.fail(leaving, CloseReason::Reset);

        let next = accept_at(&mut lab, 40_006);
        lab.deliver(next, &[map_of(&[]), hello(7, 3, 0), flagged(sent)]);
        assert_eq!(lab.recv_all(s), Vec::<Vec<u8>>::new(), "{how:?}: it came before");
        assert_eq!(greeted_with(&mut lab, next), 1 << 40, "{how:?}: and the peer learns it");
        assert_eq!(lab.counter("recv_drop_old_seq"), 1);
    }
}

/// The first connection has path 0 because it came first, and is dropped by the operator. Another
/// one tells that the peer is a bowline node, before what the first has brought is read.
// tests [R-2004] [R-2023]
#[test]
fn a_connection_that_leaves_spoils_no_numbers_of_the_path_it_was_taken_for() {
    let mut lab = Lab::larger();
    let s = receiver(&mut lab);
    lab.slow_cuts = true;
    let first = accept_at(&mut lab, 40_000);
    lab.node.drop_links(lab.now, None);
    lab.settle();
    let second = accept_at(&mut lab, 40_001);
    lab.deliver(second, &[map_of(&[]), hello(7, 5, 0)]);
    lab.deliver(first, &[hello(7, 3, 0), data(1000, 9, 5000, b"of path 3")]);
    lab.fail(first, CloseReason::Reset);
    let third = accept_at(&mut lab, 40_002);
    lab.deliver(third, &[map_of(&[]), hello(7, 0, 0)]);
    assert_eq!(greeted_with(&mut lab, third), 0);
    lab.deliver(third, &[data(10, 8, 5000, b"of path 0")]);
    assert_eq!(lab.recv_all(s), [b"of path 3", b"of path 0"]);
}

/// A connection of the process before leaves while its successor is at work.
// tests
#[test]
fn numbers_of_an_earlier_process_on_a_connection_it_left_count_for_nothing() {
    let mut lab = Lab::larger();
    let s = receiver(&mut lab);
    lab.slow_cuts = true;
    let waits = accept_at(&mut lab, 40_000);
    let old = accept_at(&mut lab, 40_001);
    lab.deliver(old, &[map_of(&[]), hello(7, 0, 0)]);
    lab.node.drop_links(lab.now, None);
    lab.settle();
    lab.deliver(waits, &[hello(7, 2, 0)]);
    lab.fail(old, CloseReason::Reset);
    let new = accept_at(&mut lab, 40_002);
    lab.deliver(new, &[map_of(&[]), hello(8, 2, 0)]);
    lab.deliver(waits, &[data(1 << 41, 9, 5000, b"of the dead")]);
    lab.deliver(new, &[data(1 << 40, 9, 5000, b"of the living")]);
    assert!(lab.recv_all(s).contains(&b"of the living".to_vec()));
}

/// This node acknowledges by TCP alone, its peer end to end: what the peer's greeting names tells
/// its paths apart all the same.
// tests
#[test]
fn a_greeting_names_the_path_to_a_node_that_does_not_greet() {
    let mut lab = Lab::new(Config { end_to_end: false, ..config(B) });
    let s = receiver(&mut lab);
    let greeting = || flagged(hello(7, 3, 0));
    let sent = data(100, 9, 5000, b"once");
    let first = accept_at(&mut lab, 40_001);
    lab.deliver(first, &[map_of(&[]), greeting(), sent.clone()]);
    lab.fail(first, CloseReason::Reset);
    let second = accept_at(&mut lab, 40_006);
    lab.deliver(second, &[map_of(&[]), greeting(), flagged(sent.clone())]);
    assert_eq!(lab.recv_all(s), [b"once"]);
    // Of another path it is another message, whatever the port.
    lab.fail(second, CloseReason::Reset);
    let third = accept_at(&mut lab, 40_014);
    lab.deliver(third, &[map_of(&[]), flagged(hello(7, 4, 0)), flagged(sent)]);
    assert_eq!(lab.recv_all(s), [b"once"]);
}

/// The probe of a node that acknowledges by TCP alone: its ports tell its paths.
fn plain_probe(sequence: u64) -> Frame {
    let plain = Handshake { npaths: Some(8), generation: Some(7), sport_idx: true, bowline: None };
    ping_with(sequence, plain.emit())
}

/// The peer acknowledges by TCP alone, and a router changes its ports.
// tests
#[test]
fn numbers_of_the_clock_need_no_port_to_be_known_again() {
    let mut lab = Lab::larger();
    let s = receiver(&mut lab);
    let clock = 1 << 40;
    let first = accept_at(&mut lab, 40_001);
    let sent = data(clock + 1, 9, 5000, b"once");
    lab.deliver(first, &[map_of(&[]), plain_probe(clock), sent.clone()]);
    lab.fail(first, CloseReason::Reset);
    let second = accept_at(&mut lab, 40_006);
    lab.deliver(second, &[map_of(&[]), flagged(sent)]);
    assert_eq!(lab.recv_all(s), [b"once"]);
}

/// Two connections from ports of one remainder: the later one waits for the end of the earlier, but
/// not when that was looked at and is open.
// tests
#[test]
fn a_port_of_a_path_that_is_served_does_not_keep_a_connection_without_one() {
    let mut lab = Lab::larger();
    lab.slow_checks = true;
    let first = accept_at(&mut lab, 40_000);
    lab.deliver(first, &[map_of(&[]), plain_probe(1)]);
    let second = accept_at(&mut lab, 40_008);
    let up = |lab: &Lab| {
        let up = |p: &&bowline_rds::PathInfo| p.state == PathState::Up;
        lab.node.info().paths.iter().filter(up).map(|p| p.index).collect::<Vec<_>>()
    };
    assert_eq!(up(&lab), [0], "the earlier one may be about to end");
    assert_eq!(lab.checks, [first]);
    lab.node.handle_checked(lab.now, first);
    lab.settle();
    assert_eq!(up(&lab), [0, 1]);
    assert!(lab.frames(second).iter().all(|f| !f.header.is_map()), "path 0 carries the map");
}
