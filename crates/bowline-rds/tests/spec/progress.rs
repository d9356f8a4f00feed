//! States that must neither stop progress, lose messages nor pile up after an unlucky order of
//! events.

use std::time::Duration;

use bowline_rds::{CloseHow, CloseReason, Error, PathState, RxBuf};
use bowline_wire::rds::{Flags, Handshake};

use crate::support::*;

const FAR: &str = "10.0.0.2:5000";

// tests: each of several successors is read once its own reasons to wait are gone
#[test]
fn connections_that_replace_lost_ones_are_read() {
    let mut lab = Lab::larger();
    let old = lab.kernel_paths(A);
    // The peer opens all its connections again before this side knows that they are lost.
    let mut new = Vec::new();
    for port in 0..8 {
        let local = addr("10.0.0.2:16385");
        let link =
            lab.node.handle_accepted(lab.now, local, addr(&format!("10.0.0.1:{}", 50_000 + port)));
        new.push(link.expect("accepted"));
    }
    for link in old {
        lab.node.handle_closed(lab.now, link, CloseReason::Reset);
    }
    lab.settle();
    for link in new {
        assert!(lab.node.wants_read(link));
        assert!(lab.resumes.contains(&link), "the driver is told");
    }
}

// tests: a connection that is made again does not begin with numbers that were used
#[test]
fn a_forgotten_peer_is_not_sent_old_numbers() {
    let mut small = config(A);
    small.limits.peers = 1;
    let mut lab = Lab::new(small);
    let (s, link) = lab.dial("10.0.0.1:4000", FAR, b"one");
    let before = lab.data_frames(link)[0].header.sequence;
    lab.deliver(link, &[map_of(&[]), hello(7, 0, before)]);
    lab.ms(20);
    let newcomer = lab.send(s, "10.0.0.3:5000", b"too early");
    assert_eq!(newcomer, Err(Error::TooManyPeers), "a connected peer is not pushed out at once");
    lab.ms(5_000);
    lab.send(s, "10.0.0.3:5000", b"makes the node forget").expect("sent");
    assert_eq!(lab.counter("bl_peers_reclaimed"), 1);
    lab.node.cancel_all(lab.now, s).expect("bound");
    lab.ms(20);
    lab.connects.clear();
    lab.send(s, FAR, b"two").expect("sent");
    let link = lab.establish();
    let again = lab.data_frames(link)[0].header.sequence;
    assert!(again > before, "a bowline peer would drop {again} after {before} [R-2023]");
}

// tests: what was cancelled is not waited for
#[test]
fn cancelling_what_the_other_paths_wait_for_lets_them_go() {
    let mut lab = Lab::larger();
    let s = lab.bound("10.0.0.2:4000");
    let t = lab.bound("10.0.0.2:5000"); // path 3, with port 5000
    let zero = lab.accept(A);
    lab.deliver(zero, &[map_of(&[])]);
    lab.room = 0;
    lab.send(s, "10.0.0.1:5000", b"stuck behind a full TCP").expect("sent");
    lab.deliver(zero, &[pong_with(1, npaths_ext(8))]);
    let rest: Vec<_> = (1..8).map(|_| lab.accept(A)).collect();
    lab.unblock(rest[2], usize::MAX);
    lab.send(t, "10.0.0.1:5000", b"held back").expect("sent");
    assert!(lab.data_frames(rest[2]).is_empty(), "path 0 has not caught up");
    lab.node.cancel_all(lab.now, s).expect("bound");
    lab.settle();
    assert_eq!(lab.data_frames(rest[2]).len(), 1, "there is nothing to wait for");
}

// tests: a connection that is being closed gets no path any more
#[test]
fn a_greeting_on_a_connection_that_ends_changes_nothing() {
    let mut lab = Lab::larger();
    lab.bowline(A, 7, 0);
    let late = lab.accept(A);
    lab.advance(Duration::from_secs(36));
    assert!(lab.closes.contains(&(late, CloseHow::Drain)));
    lab.deliver(late, &[map_of(&[]), hello(7, 1, 0)]);
    let states: Vec<_> = lab.node.info().paths.iter().map(|p| p.state).collect();
    assert_eq!(states, [PathState::Up]);
}

// tests: connections that came before the path count was known
#[test]
fn connections_that_overtook_the_handshake_get_their_paths() {
    let mut lab = Lab::larger();
    let first = lab.accept(A);
    lab.deliver(first, &[map_of(&[])]);
    for _ in 1..8 {
        lab.accept(A);
    }
    let up = |lab: &Lab| lab.node.info().paths.iter().filter(|p| p.state == PathState::Up).count();
    assert_eq!(up(&lab), 1);
    lab.deliver(first, &[pong_with(1, npaths_ext(8))]);
    assert_eq!(up(&lab), 8);
}

// tests: a path that is served by the connection for another does not keep the one
// meant for it waiting
#[test]
fn connections_that_came_before_the_port_rule_leave_no_path_unserved() {
    let mut lab = Lab::larger();
    let rule = Handshake { npaths: Some(8), sport_idx: true, ..Handshake::default() }.emit();
    // The peer's path 3 is the first to come back, and serves path 0 here.
    let first = lab.accept_from(addr("10.0.0.1:50003")).expect("accepted");
    lab.deliver(first, &[map_of(&[]), pong_with(1, rule)]);
    for port in [50_000, 50_001, 50_002, 50_004, 50_005, 50_006, 50_007] {
        lab.accept_from(addr(&format!("10.0.0.1:{port}"))).expect("accepted");
    }
    assert!(lab.node.info().links.iter().all(|l| l.path.is_some()));
    // One whose path still has its own earlier connection waits for that to go.
    lab.accept_from(addr("10.0.0.1:50012")).expect("accepted");
    assert_eq!(lab.node.info().links.iter().filter(|l| l.path.is_none()).count(), 1);
}

// tests: whichever path was lost last
#[test]
fn the_larger_side_knocks_for_messages_of_any_path() {
    let mut lab = Lab::larger();
    let zero = lab.kernel(A, 8);
    let one = lab.accept(A);
    let s = lab.bound("10.0.0.2:4000"); // path 1
    lab.fail(zero, CloseReason::Reset);
    assert!(lab.connects.is_empty());
    lab.acks = false;
    lab.send(s, "10.0.0.1:5000", b"x").expect("sent");
    lab.fail(one, CloseReason::Reset);
    lab.ms(1);
    assert_eq!(lab.connects.len(), 1, "nobody else would bring the peer back");
}

// A peer that connects and goes, over and over, leaves nothing that stays.
#[test]
fn reconnecting_peers_leave_no_timers_behind() {
    let mut lab = Lab::larger();
    for _ in 0..500 {
        let link = lab.accept(A);
        lab.fail(link, CloseReason::Reset);
        lab.ms(1);
    }
    lab.accept(A);
    // All that is left after a while is what the last connection needs.
    lab.advance(Duration::from_secs(40));
    let mut due = 0;
    let end = lab.now + Duration::from_secs(40);
    while let Some(at) = lab.node.poll_timeout().filter(|at| *at < end) {
        due += 1;
        lab.now = at;
        lab.node.handle_timeout(at);
    }
    assert!(due < 10, "{due} timers in 40 s");
}

// tests [R-2024]: a peer that asks all the time costs the receiver no memory
#[test]
fn acknowledgements_asked_for_are_remembered_once_per_connection() {
    let (mut lab, s, link) = at(B, 5000).bowline();
    for n in 1..=100 {
        let mut frame = data(n, 9, 5000, b"");
        frame.header.flags = Flags::ACK_REQUIRED;
        lab.node.handle_data(lab.now, link, RxBuf::from_vec(frame.bytes()));
        lab.node.process(lab.now, None, usize::MAX);
        lab.node.check_invariants();
        // Something goes the other way and takes the acknowledgement along: never idle.
        let _ = lab.send_slow(s, "10.0.0.1:9", b"");
        lab.write(link);
    }
}

// tests: what is announced takes nothing, and what is unfinished is bounded
#[test]
fn unfinished_messages_of_many_peers_are_bounded() {
    let mut small = config("10.0.255.1");
    small.limits.partial_bytes_total = 1 << 20;
    let mut lab = Lab::new(small);
    let mut links = Vec::new();
    for peer in 1..=8 {
        let link = lab.accept(&format!("10.0.0.{peer}"));
        lab.deliver(link, &[map_of(&[])]);
        lab.closes.clear();
        let whole = data(2, 9, 5000, &vec![peer; 1 << 20]).bytes();
        lab.feed(link, &whole[..200_000]);
        links.push(link);
        lab.ms(1);
    }
    assert_eq!(lab.counter("bl_partials_dropped"), 3, "5 of 200 000 bytes fit");
    for link in &links[..3] {
        assert!(!lab.node.wants_read(*link), "those begun first are gone");
    }
    for link in &links[3..] {
        assert!(lab.node.wants_read(*link));
    }
}

// tests
#[test]
fn messages_of_a_quiet_peer_are_forgotten() {
    let (mut lab, s, link) = at(B, 5000).kernel(1);
    lab.deliver(link, &[data(2, 9, 5000, b"once")]);
    lab.advance(Duration::from_secs(59));
    lab.fail(link, CloseReason::Reset);
    let link = lab.accept(A);
    lab.deliver(link, &[flagged(data(2, 9, 5000, b"once"))]);
    assert_eq!(lab.recv_all(s).len(), 1, "repeated within a minute");
    lab.advance(Duration::from_secs(60 * 60));
    lab.fail(link, CloseReason::Reset);
    let link = lab.accept(A);
    lab.deliver(link, &[flagged(data(2, 9, 5000, b"once"))]);
    assert_eq!(lab.recv_all(s).len(), 1, "nothing is remembered for ever");
}

/// A network was parted for hours, or swallowed what was repeated on the new connection until TCP
/// got through: what the peer repeats was delivered before.
// tests
#[test]
fn messages_of_a_peer_are_remembered_while_they_may_come_again() {
    for (away, held_up) in [(3 * 60, 0), (0, 15)] {
        let (mut lab, s, link) = at(B, 5000).kernel(1);
        lab.deliver(link, &[data(2, 9, 5000, b"once")]);
        assert_eq!(lab.recv_all(s).len(), 1);
        lab.fail(link, CloseReason::Reset);
        lab.advance(Duration::from_secs(60 * away));
        let link = lab.accept(A);
        lab.advance(Duration::from_secs(60 * held_up));
        lab.deliver(link, &[flagged(data(2, 9, 5000, b"once"))]);
        assert_eq!(lab.recv_all(s).len(), 0, "{away} {held_up}");
    }
}

/// The same where this node dials, and an attempt is under way at every moment.
// tests
#[test]
fn messages_of_a_peer_are_remembered_while_it_is_dialled() {
    let (mut lab, s, link) = at(A, 4000).dials_kernel();
    lab.advance(Duration::from_secs(60 * 60));
    lab.deliver(link, &[data(2, 9, 4000, b"once")]);
    assert_eq!(lab.recv_all(s).len(), 1);
    lab.fail(link, CloseReason::TimedOut);
    for _ in 0..20 {
        lab.advance(Duration::from_secs(10));
        if let Some((attempt, ..)) = lab.connects.first().copied() {
            lab.fail(attempt, CloseReason::TimedOut);
        }
    }
    lab.advance(Duration::from_secs(2));
    let link = lab.establish();
    lab.deliver(link, &[flagged(data(2, 9, 4000, b"once"))]);
    assert_eq!(lab.recv_all(s).len(), 0);
}

/// A reader has stopped, and what came again waits unread for longer than anything is remembered.
// tests
#[test]
fn messages_of_a_peer_are_remembered_while_some_wait_unread() {
    let mut config = config(B);
    config.limits.recv_bytes_per_peer = 1000;
    let mut lab = Lab::new(config);
    let s = lab.bound("10.0.0.2:5000");
    let link = lab.kernel(A, 1);
    lab.deliver(link, &[data(2, 9, 5000, &[1; 600]), data(3, 9, 5000, &[2; 600])]);
    lab.fail(link, CloseReason::Reset);
    let link = lab.accept(A);
    lab.deliver(
        link,
        &[flagged(data(2, 9, 5000, &[1; 600])), flagged(data(3, 9, 5000, &[2; 600]))],
    );
    lab.advance(Duration::from_secs(2 * 60 * 60));
    assert_eq!(lab.recv_all(s).len(), 2);
    lab.ms(10);
    assert_eq!(lab.recv_all(s).len(), 0);
}

/// A node that remembers much of all peers together remembers the latest of a peer that has been
/// away for a minute, and forgets the rest.
// tests
#[test]
fn peers_that_are_away_do_not_use_up_what_may_be_remembered() {
    let mut config = config(B);
    config.limits.duplicate_records_total = 2000;
    let mut lab = Lab::new(config);
    let s = lab.bound("10.0.0.2:5000");
    let link = lab.kernel(A, 1);
    let sent: Vec<_> = (2..1302).map(|n| data(n, 9, 5000, b"once")).collect();
    lab.deliver(link, &sent);
    assert_eq!(lab.recv_all(s).len(), 1300);
    lab.fail(link, CloseReason::Reset);
    lab.advance(Duration::from_secs(121));
    let link = lab.accept(A);
    lab.deliver(link, &[flagged(data(1301, 9, 5000, b"once"))]);
    assert_eq!(lab.recv_all(s).len(), 0, "the latest are remembered");
    lab.deliver(link, &[flagged(data(2, 9, 5000, b"once"))]);
    assert_eq!(lab.recv_all(s).len(), 1);
}
