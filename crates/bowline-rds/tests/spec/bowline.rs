//! Section 20: additions of bowline nodes among themselves.

use std::time::Duration;

use bowline_rds::{
    CloseHow, CloseReason, Config, Error, Event, LengthLimit, Misbehaviour, PathState, TooLong,
};
use bowline_wire::rds::{Flags, Handshake};

use crate::support::*;

/// A message that was begun on path 0 is cancelled, before or after its connection ends. The peer,
/// which is slow, may have all of it: a later message between the two sockets must not come first
/// by another path.
// tests
#[test]
fn a_cancelled_message_that_was_begun_is_not_overtaken() {
    for cancelled_first in [true, false] {
        let (mut lab, s, first) = at(B, 4001).begun(b"early");
        let others: Vec<_> = (1..8).map(|path| lab.bowline(A, 7, path)).collect();
        if cancelled_first {
            lab.node.cancel_all(lab.now, s).expect("bound");
            lab.fail(first, CloseReason::Reset);
        } else {
            lab.fail(first, CloseReason::Reset);
            lab.node.cancel_all(lab.now, s).expect("bound");
        }
        lab.send(s, "10.0.0.1:5000", b"later").expect("queued");
        lab.ms(500);
        let sent = |lab: &mut Lab| others.iter().map(|l| lab.data_frames(*l).len()).sum::<usize>();
        assert_eq!(sent(&mut lab), 0, "the peer may not have read it yet");
        let again = lab.bowline(A, 7, 0);
        assert_eq!(sent(&mut lab), 1);
        assert!(lab.data_frames(again).is_empty(), "the cancelled one does not come again");
    }
}

/// While this node was away another machine had its address, and the peer greets with what that one
/// sent, numbers that this node never used.
// tests [R-2025]
#[test]
fn acknowledgements_for_another_process_release_nothing() {
    let (mut lab, _, link) = at(B, 4001).begun(b"mine");
    lab.fail(link, CloseReason::Reset);
    let link = lab.greeted(A, hello(7, 0, 1 << 40));
    assert_eq!(lab.data_frames(link).len(), 1, "it comes again");
}

fn up(node: &bowline_rds::Node) -> Vec<u8> {
    let paths = node.info().paths;
    let mut up: Vec<_> =
        paths.iter().filter(|p| p.state == PathState::Up).map(|p| p.index).collect();
    up.sort_unstable();
    up
}

/// Two nodes that know each other, with a socket each, of port 4000: path 1.
fn pair() -> (Pair, bowline_rds::SocketId, bowline_rds::SocketId) {
    let mut pair = Pair::bowline();
    let a = pair.bound(0, 4000);
    let b = pair.bound(1, 4000);
    pair.send(0, a, 4000, b"first").expect("sent");
    pair.ms(1000);
    assert_eq!(pair.recv_all(1, b), [b"first"]);
    (pair, a, b)
}

// tests [R-2001] [R-2003]: eight paths, both sides know whom they talk to
#[test]
fn two_nodes_recognise_each_other_and_open_all_paths() {
    let (pair, a, _) = pair();
    assert_eq!(pair.connections(), 8);
    for node in &pair.nodes {
        assert_eq!(up(node), [0, 1, 2, 3, 4, 5, 6, 7]);
        assert_eq!(node.info().connections[0].peer, "bowline");
        assert_eq!(node.info().connections[0].npaths, 8);
        node.check_invariants();
    }
    assert_eq!(pair.nodes[0].send_bytes(a), Ok(0), "acknowledged");
}

// tests the same begun by the larger side
#[test]
fn the_larger_side_begins_with_a_knock() {
    let mut pair = Pair::bowline();
    let a = pair.bound(0, 4000);
    let b = pair.bound(1, 4000);
    pair.send(1, b, 4000, b"from the larger").expect("sent");
    pair.ms(1000);
    assert_eq!(pair.recv_all(0, a), [b"from the larger"]);
    assert_eq!(pair.connections(), 8);
    assert!(pair.counter(1, "bl_knocks_sent") >= 1);
}

// tests [R-2001] [R-2002]
#[test]
fn the_probe_fills_the_extension_area() {
    let mut lab = Lab::new(Config { max_message: 3 << 20, ..config(A) });
    let (_, link) = lab.dial("10.0.0.1:4000", "10.0.0.2:5000", b"x");
    let probe = lab.frames(link).into_iter().find(|f| f.header.is_probe_ping()).expect("a probe");
    assert_eq!(probe.header.ext, [5, 0, 8, 6, 0, 0, 0x11, 0x11, 8, 0, 0x42, 0x10, 0, 0x30, 0, 0]);
}

// tests [R-2010]: map, then the unnumbered probe, on every path and from both sides
#[test]
fn every_connection_begins_with_map_and_greeting() {
    let mut lab = Lab::larger();
    let zero = lab.bowline(A, 7, 0);
    let frames = lab.frames(zero);
    assert!(frames[0].is_map());
    let greeting =
        frames.iter().find(|f| f.header.is_probe_ping() && f.header.sequence == 0).expect("ours");
    assert_eq!(Handshake::parse(&greeting.header.ext).bowline.expect("ours").path, 0);
    let five = lab.accept(A);
    assert!(lab.frames(five).is_empty(), "its path is not known yet");
    lab.deliver(five, &[map_of(&[]), hello(7, 5, 0)]);
    assert_eq!(up(&lab.node), [0, 5], "the nibble tells the path [R-2004]");
    let frames = lab.frames(five);
    assert!(frames.iter().any(|f| f.header.is_probe_ping() && f.header.sequence == 0));
}

// tests [R-2020] [R-2021] [R-2024]
#[test]
fn only_the_peers_word_releases() {
    let (mut lab, s, link) = at(B, 4000).paths(1).bowline();
    lab.written.clear();
    for _ in 0..3 {
        lab.send(s, "10.0.0.1:5000", &[1; 100]).expect("sent");
    }
    let first = lab.data_frames(link)[0].header.sequence;
    assert!(!lab.node.wants_tcp_ack(link));
    lab.node.handle_tcp_acked(lab.now, link, 0);
    assert_eq!(lab.node.send_bytes(s), Ok(300), "TCP's word is not asked");
    lab.deliver(link, &[ack_frame(first - 1)]);
    assert_eq!(lab.node.send_bytes(s), Ok(300));
    lab.deliver(link, &[ack_frame(first)]);
    assert_eq!(lab.node.send_bytes(s), Ok(200));
    lab.deliver(link, &[ack_frame(first - 1)]);
    assert_eq!(lab.node.send_bytes(s), Ok(200), "never back");
    // A map carries one too.
    let mut map = map_of(&[]);
    map.header.ack = first + 1;
    lab.deliver(link, &[map]);
    assert_eq!(lab.node.send_bytes(s), Ok(100));
    // An absurd one releases nothing [R-2025].
    lab.deliver(link, &[ack_frame(u64::MAX)]);
    assert_eq!(lab.node.send_bytes(s), Ok(100));
    lab.deliver(link, &[ack_frame(last_number(&lab))]);
    assert_eq!(lab.node.send_bytes(s), Ok(0));
    lab.room = 0;
    lab.send(s, "10.0.0.1:5000", &[1; 100]).expect("sent");
    lab.deliver(link, &[ack_frame(last_number(&lab))]);
    assert_eq!(lab.node.send_bytes(s), Ok(100));
    lab.unblock(link, usize::MAX);
    assert_eq!(lab.data_frames(link).len(), 1, "and it is sent");
}

// tests [R-2020] [R-2024]: asked for, at once; else after 10 ms or 256 KiB
#[test]
fn acknowledgements_are_sent_when_asked_for_and_else_a_little_later() {
    let (mut lab, taker, link) = at(B, 5000).bowline();
    lab.node.set_recv_buffer(taker, 4 << 20).expect("set");
    let acks = |lab: &mut Lab| -> Vec<u64> {
        let frames = lab.frames(link);
        frames.iter().filter(|f| f.is_ack()).map(|f| f.header.ack).collect()
    };
    acks(&mut lab);
    lab.deliver(link, &[data(10, 9, 5000, b"x")]);
    assert!(acks(&mut lab).is_empty());
    lab.ms(9);
    assert!(acks(&mut lab).is_empty());
    lab.ms(2);
    assert_eq!(acks(&mut lab), [10]);
    let mut asking = data(11, 9, 5000, b"x");
    asking.header.flags = Flags::ACK_REQUIRED;
    lab.deliver(link, &[asking]);
    assert_eq!(acks(&mut lab), [11]);
    assert_eq!(lab.counter("recv_ack_required"), 1);
    lab.deliver(link, &[data(12, 9, 5000, &[0; 150_000])]);
    assert!(acks(&mut lab).is_empty());
    lab.deliver(link, &[data(13, 9, 5000, &[0; 150_000])]);
    assert_eq!(acks(&mut lab), [13], "more than 256 KiB");
    // It goes with what goes anyway.
    let s = lab.bound("10.0.0.2:2");
    lab.deliver(link, &[data(14, 9, 5000, b"x")]);
    lab.node.set_recv_buffer(s, 2000).expect("set");
    lab.deliver(link, &[data(15, 9, 2, &[0; 2001])]);
    let map = lab.frames(link).into_iter().find(Frame::is_map).expect("a map");
    assert_eq!(map.header.ack, 15, "[R-2021]");
    lab.ms(50);
    assert!(acks(&mut lab).is_empty(), "nothing more is owed");
}

// tests [R-2023]: numbers below the next are dropped, whatever the flags; gaps are legal
#[test]
fn old_numbers_are_dropped_whatever_the_flags() {
    let (mut lab, s, link) = at(B, 5000).bowline();
    lab.deliver(
        link,
        &[
            data(10, 9, 5000, b"ten"),
            data(10, 9, 5000, b"again"),
            flagged(data(9, 9, 5000, b"nine")),
            flagged(data(20, 9, 5000, b"twenty")),
            data(19, 9, 5000, b"nineteen"),
        ],
    );
    assert_eq!(lab.recv_all(s), [&b"ten"[..], b"twenty"]);
    assert_eq!(lab.counter("recv_drop_old_seq"), 3);
    // Another path counts for itself.
    let one = lab.bowline(A, 7, 1);
    lab.deliver(one, &[data(1, 9, 5000, b"one")]);
    assert_eq!(lab.recv_all(s), [b"one"]);
}

// tests [R-2022] [R-2012]: after a cut each message arrives once, in order
#[test]
fn a_cut_loses_and_repeats_nothing() {
    let (mut pair, a, b) = pair();
    let mut want = Vec::new();
    let mut got = Vec::new();
    for n in 0..200_u32 {
        let payload = n.to_be_bytes();
        if pair.send_quiet(0, a, 4000, &payload).is_ok() {
            want.push(payload.to_vec());
        }
        if n % 3 == 2 || n == 199 {
            pair.flush(0);
            pair.ms(1);
        }
        if n % 17 == 5 {
            pair.cut();
        }
        got.extend(pair.recv_all(1, b));
    }
    pair.ms(5000);
    got.extend(pair.recv_all(1, b));
    assert_eq!(got.len(), 200);
    assert_eq!(got, want);
    assert_eq!(pair.nodes[0].send_bytes(a), Ok(0));
    assert!(pair.counter(0, "conn_reset") > 5);
}

// tests [R-2021]: what TCP acknowledged and nobody processed comes again
#[test]
fn messages_lost_behind_tcp_are_sent_again() {
    let (mut pair, a, b) = pair();
    pair.moving = false;
    for n in 0..5_u8 {
        pair.send(0, a, 4000, &[n; 100]).expect("sent");
    }
    // Written, but cut before the other node reads a byte.
    pair.cut();
    assert_eq!(pair.recv(1, b).err(), Some(Error::Empty));
    pair.moving = true;
    pair.ms(2000);
    let got: Vec<_> = pair.recv_all(1, b).iter().map(|m| m[0]).collect();
    assert_eq!(got, [0, 1, 2, 3, 4]);
    assert_eq!(pair.counter(0, "bl_retransmits"), 5);
    assert_eq!(pair.counter(1, "recv_drop_old_seq"), 0, "what was processed is not sent");
}

// tests [R-2022]: processed but not acknowledged is not sent again
#[test]
fn processed_messages_are_not_sent_again() {
    let (mut lab, s, link) = at(B, 4000).paths(1).bowline();
    lab.written.clear();
    for _ in 0..4 {
        lab.send(s, "10.0.0.1:5000", &[1; 100]).expect("sent");
    }
    let first = lab.data_frames(link)[0].header.sequence;
    lab.fail(link, CloseReason::Reset);
    let again = lab.accept(A);
    lab.deliver(again, &[map_of(&[])]);
    assert!(lab.data_frames(again).is_empty(), "it waits for the peer's probe");
    lab.deliver(again, &[hello(7, 0, first + 1)]);
    let repeated: Vec<_> =
        lab.data_frames(again).iter().map(|f| (f.header.sequence, f.retransmitted())).collect();
    assert_eq!(repeated, [(first + 2, true), (first + 3, true)]);
    assert_eq!(lab.node.send_bytes(s), Ok(200));
}

// tests [R-346] [R-2012]: a restarted bowline peer
#[test]
fn a_restarted_peer_gets_no_messages_of_its_predecessor() {
    let (mut lab, s, link) = at(B, 4000).paths(1).bowline();
    lab.deliver(link, &[data(500, 9, 4000, b"high number")]);
    lab.send(s, "10.0.0.1:5000", b"started").expect("sent");
    lab.fail(link, CloseReason::Reset);
    lab.send(s, "10.0.0.1:5000", b"never started").expect("sent");
    let again = lab.greeted(A, hello(8, 0, 0));
    assert!(lab.events.contains(&Event::PeerRestarted { remote: ip(A) }));
    let sent = lab.data_frames(again);
    assert_eq!(sent.len(), 1);
    assert_eq!((&sent[0].payload[..], sent[0].retransmitted()), (&b"never started"[..], false));
    assert_eq!(lab.node.send_messages(s), Ok(1), "the other is gone");
    // Its numbers begin anew.
    lab.deliver(again, &[data(1, 9, 4000, b"low number")]);
    assert_eq!(lab.recv_all(s), [&b"high number"[..], b"low number"]);
}

// tests [R-2012] [R-2023]: a connection of a dead process, accepted after its successor's
#[test]
fn last_words_of_a_dead_process_make_nothing_come_twice() {
    let mut lab = Lab::larger();
    let s = lab.bound("10.0.0.2:5000");
    lab.bowline(A, 7, 0);
    let dead = lab.accept(A);
    let other = lab.bowline(A, 7, 1);
    lab.deliver(other, &[data(10, 9, 5000, b"ten")]);
    // Accepted before a connection that says otherwise: it is the older one.
    lab.deliver(dead, &[map_of(&[]), hello(6, 0, 0)]);
    assert!(!lab.events.contains(&Event::PeerRestarted { remote: ip(A) }));
    // Accepted last, it still changes nothing: a living process would dial once more.
    lab.bowline(A, 6, 0);
    assert!(!lab.events.contains(&Event::PeerRestarted { remote: ip(A) }));
    // It does: now the first is the one that returns.
    lab.bowline(A, 6, 0);
    assert!(lab.events.contains(&Event::PeerRestarted { remote: ip(A) }));
    lab.bowline(A, 7, 1); // closed: it may be another late one
    let again = lab.bowline(A, 7, 1);
    lab.deliver(again, &[flagged(data(10, 9, 5000, b"ten")), data(11, 9, 5000, b"eleven")]);
    assert_eq!(lab.recv_all(s), [&b"ten"[..], b"eleven"]);
}

/// The handshake of a connection of a dead process ends when its successor has long been in
/// service, since the last segment was lost until then. What was begun for the successor is not
/// dropped.
// tests
#[test]
fn a_connection_of_a_known_dead_process_changes_nothing() {
    let (mut lab, s, first) = at(B, 4001).paths(1).bowline();
    lab.fail(first, CloseReason::Reset);
    let living = lab.bowline(A, 8, 0);
    lab.events.clear();
    lab.send(s, "10.0.0.1:5000", b"begun").expect("sent");
    assert_eq!(lab.data_frames(living).len(), 1);
    let late = lab.bowline(A, 7, 0);
    assert_eq!(lab.closes.last(), Some(&(late, CloseHow::Fin)));
    assert!(!lab.events.contains(&Event::PeerRestarted { remote: ip(A) }));
    assert_eq!(lab.node.send_messages(s), Ok(1), "it is kept");
    assert_eq!(up(&lab.node), [0]);
    lab.send(s, "10.0.0.1:5000", b"next").expect("sent");
    assert_eq!(lab.data_frames(living).len(), 1, "the living one is served");
}

/// An address goes to another machine and comes back: the first process dials again when its
/// connection is closed.
// tests
#[test]
fn an_earlier_process_that_dials_again_has_returned() {
    let (mut lab, s, first) = at(B, 5000).bowline();
    lab.deliver(first, &[data(10, 9, 5000, b"ten")]);
    lab.fail(first, CloseReason::Reset);
    lab.bowline(A, 8, 0);
    let early = lab.accept(A);
    let returned = lab.bowline(A, 7, 0);
    assert_eq!(lab.closes.last(), Some(&(returned, CloseHow::Fin)));
    lab.events.clear();
    lab.deliver(early, &[map_of(&[]), hello(7, 0, 0)]);
    assert_eq!(lab.closes.last(), Some(&(early, CloseHow::Fin)), "it was made before");
    assert!(lab.events.is_empty(), "{:?}", lab.events);
    let again = lab.bowline(A, 7, 0);
    assert!(lab.events.contains(&Event::PeerRestarted { remote: ip(A) }));
    lab.deliver(again, &[flagged(data(10, 9, 5000, b"ten")), data(11, 9, 5000, b"eleven")]);
    assert_eq!(lab.recv_all(s), [&b"ten"[..], b"eleven"]);
}

/// A pong that waits on a path which the peer no longer uses is moved to path 0, and says there of
/// whom it is, as it did before: without a generation it would be the greeting of a kernel.
// tests
#[test]
fn a_pong_that_is_moved_to_path_0_keeps_its_extensions() {
    let mut lab = Lab::larger();
    lab.bowline(A, 7, 0);
    let third = lab.bowline(A, 7, 3);
    lab.room = 0;
    lab.deliver(third, &[ping_with(9, bowline_ext(7, 3, 1 << 20))]);
    lab.fail(third, CloseReason::Reset);
    lab.room = usize::MAX;
    let zero = lab.accept(A);
    lab.deliver(zero, &[map_of(&[]), pong_with(1, npaths_ext(1))]);
    assert_eq!(lab.node.info().connections[0].npaths, 1);
    let frames = lab.frames(zero);
    let pongs: Vec<_> = frames.iter().filter(|f| f.header.is_probe_pong()).collect();
    let said: Vec<_> = pongs.iter().map(|f| Handshake::parse(&f.header.ext)).collect();
    assert_eq!(said.len(), 1);
    assert_eq!((said[0].generation, said[0].npaths), (Some(0x1111), Some(8)));
    assert_eq!(said[0].bowline.map(|b| b.path), Some(0));
}

/// Whoever has greeted on a connection stays the same process on it, whatever its further probes
/// and pongs leave out.
// tests
#[test]
fn a_pong_without_extensions_after_a_greeting_is_no_restart() {
    let (mut lab, _, first) = at(B, 4001).begun(b"begun");
    lab.fail(first, CloseReason::Reset);
    let link = lab.bowline(A, 7, 0);
    lab.deliver(link, &[pong_with(5, [0; 16])]);
    let peer = &lab.node.info().connections[0];
    assert_eq!((peer.peer, peer.npaths), ("bowline", 8));
    assert_eq!(lab.counter("bl_peer_restarts"), 0);
    assert_eq!(lab.data_frames(link).len(), 1, "it is repeated, not dropped");
}

// tests [R-2011]
#[test]
fn a_newer_connection_replaces_the_older_one_of_its_path() {
    let (mut lab, s, old) = at(B, 5000).bowline();
    lab.deliver(old, &[data(10, 9, 5000, b"ten")]);
    let new = lab.bowline(A, 7, 0);
    assert_eq!(lab.closes, [(old, CloseHow::Reset)]);
    assert_eq!(up(&lab.node), [0]);
    let greeting = lab.frames(new).into_iter().find(|f| f.header.is_probe_ping()).expect("ours");
    assert_eq!(greeting.header.ack, 10, "says what it has [R-2012]");
    lab.deliver(new, &[flagged(data(10, 9, 5000, b"ten")), data(11, 9, 5000, b"eleven")]);
    assert_eq!(lab.recv_all(s), [&b"ten"[..], b"eleven"]);
}

/// While another machine had this node's address, the peer took it for a kernel. It sends on the
/// new connection before it has read the greeting, which looks like a kernel's sending: what was
/// begun for it is kept until it greets.
// tests
#[test]
fn a_peer_that_sends_before_it_greets_is_the_same_process() {
    for same in [true, false] {
        let (mut lab, s, first) = at(B, 4001).begun(b"begun");
        lab.fail(first, CloseReason::Reset);
        lab.send(s, "10.0.0.1:5000", b"behind it").expect("queued");
        let link = lab.accept(A);
        lab.deliver(link, &[map_of(&[]), data(50, 9, 4001, b"early")]);
        assert_eq!(lab.recv_all(s), [b"early"]);
        assert!(lab.data_frames(link).is_empty(), "nothing for the process goes to a kernel");
        let link = if same {
            // It may be a dead process's, and is closed; a living one dials again.
            lab.deliver(link, &[hello(7, 0, 0)]);
            lab.bowline(A, 7, 0)
        } else {
            lab.deliver(link, &[pong_with(51, npaths_ext(8))]);
            link
        };
        let got = lab.payloads(link);
        let expected: &[&[u8]] = if same { &[b"begun", b"behind it"] } else { &[b"behind it"] };
        assert_eq!(got, expected);
        assert_eq!(lab.counter("bl_send_drop_restart") == 0, same);
    }
}

/// The time of one doubt does not end the next one early.
// tests
#[test]
fn each_missed_greeting_has_its_own_time() {
    let (mut lab, _) = at(B, 4001).sends("10.0.0.1:5000", b"begun");
    let mut link = lab.bowline(A, 7, 0);
    for wait in [3000, 3000] {
        lab.data_frames(link);
        lab.fail(link, CloseReason::Reset);
        let early = lab.accept(A);
        lab.deliver(early, &[map_of(&[]), data(50, 9, 4001, b"early")]);
        lab.ms(wait);
        assert_eq!(lab.counter("bl_send_drop_restart"), 0);
        lab.deliver(early, &[hello(7, 0, 0)]);
        link = lab.bowline(A, 7, 0);
        assert_eq!(lab.data_frames(link).len(), 1, "it is repeated");
    }
}

/// One that neither greets nor answers is another node after a while.
// tests
#[test]
fn a_peer_that_never_greets_is_another_node() {
    let (mut lab, s) = at(B, 4001).sends("10.0.0.1:5000", b"begun");
    let first = lab.bowline(A, 7, 0);
    lab.fail(first, CloseReason::Reset);
    lab.send(s, "10.0.0.1:5000", b"behind it").expect("queued");
    let link = lab.accept(A);
    lab.deliver(link, &[map_of(&[]), data(50, 9, 4001, b"early")]);
    lab.ms(4900);
    assert!(lab.data_frames(link).is_empty());
    lab.ms(200);
    let got = lab.payloads(link);
    assert_eq!(got, [b"behind it"]);
}

// tests [R-2003]: a kernel in the place of a bowline node is served as one, and loses nothing
#[test]
fn a_kernel_in_the_place_of_a_bowline_node_is_served() {
    let (mut lab, s, old) = at(B, 5000).paths(1).bowline();
    lab.deliver(old, &[data(900, 9, 5000, b"bowline")]);
    lab.fail(old, CloseReason::Reset);
    // It speaks with low numbers, and of no greeting.
    let kernel = lab.accept(A);
    lab.deliver(kernel, &[map_of(&[]), data(1, 9, 5000, b"kernel")]);
    assert_eq!(lab.recv_all(s), [&b"bowline"[..], b"kernel"]);
    assert_eq!(lab.node.info().connections[0].peer, "kernel");
    assert_eq!(up(&lab.node), [0]);
    let t = lab.bound("10.0.0.2:2");
    lab.send(t, "10.0.0.1:9", b"to the kernel").expect("sent");
    lab.ms(1000);
    assert!(lab.node.send_bytes(t) == Ok(0), "TCP releases now");
}

// tests the same for a node that dials
#[test]
fn a_dialled_kernel_in_the_place_of_a_bowline_node_is_served() {
    let (mut lab, s, old) = at(A, 5000).paths(1).dials("10.0.0.2:9", b"x");
    lab.deliver(old, &[map_of(&[]), hello(7, 0, 0), data(900, 9, 5000, b"bowline")]);
    assert_eq!(lab.node.info().connections[0].peer, "bowline");
    lab.fail(old, CloseReason::Eof);
    lab.ms(0);
    let link = lab.establish();
    lab.deliver(link, &[map_of(&[]), ping_with(1, npaths_ext(8)), data(2, 9, 5000, b"kernel")]);
    assert_eq!(lab.recv_all(s), [&b"bowline"[..], b"kernel"]);
    assert_eq!(lab.node.info().connections[0].peer, "kernel");
}

/// What the peer had sent on an earlier connection, as to a kernel, is read late. On the later one
/// it has greeted, and that counts when it is known as a bowline node again.
// tests [R-2003]
#[test]
fn a_connection_with_a_greeting_keeps_it() {
    let (mut lab, s, first) = at(A, 5000).paths(2).dials_bowline("10.0.0.2:9", b"x");
    let earlier = lab.establish();
    lab.fail(first, CloseReason::Reset);
    lab.ms(0);
    let later = lab.establish();
    lab.deliver(later, &[map_of(&[]), hello(7, 0, 0)]);
    lab.deliver(earlier, &[data(20, 9, 5000, b"as to a kernel")]);
    assert_eq!(lab.recv_all(s), [b"as to a kernel"]);
    assert_eq!(lab.node.info().connections[0].peer, "kernel");
    lab.fail(earlier, CloseReason::Eof);
    lab.ms(0);
    let again = lab.establish();
    lab.deliver(again, &[hello(7, 1, 0)]);
    lab.ms(40_000);
    assert_eq!(lab.node.info().connections[0].peer, "bowline");
    assert_eq!(up(&lab.node), [0, 1]);
}

// tests [R-2030]
#[test]
fn long_messages_go_to_bowline_nodes_only() {
    let long = vec![5; (1 << 20) + 1];
    let big = |local| Config {
        max_message: 4 << 20,
        send_buffer: 8 << 20,
        recv_buffer: 8 << 20,
        ..config(local)
    };
    let mut pair = Pair::new(big(A), Config { generation: 2, ..big(B) });
    let a = pair.bound(0, 4000);
    let b = pair.bound(1, 4000);
    let refused = pair.send_quiet(0, a, 4000, &long);
    assert_eq!(refused, Err(Error::HandshakePending), "not known yet");
    assert_eq!(Error::HandshakePending.errno(), 11);
    pair.nodes[0].register(a, bowline_rds::Interest::WRITE).expect("registered");
    pair.ms(1000);
    assert_eq!(pair.wakes.len(), 1, "told when it is known");
    pair.send(0, a, 4000, &long).expect("sent");
    pair.ms(100);
    assert!(pair.recv_all(1, b) == [&long[..]]);
    let beyond = vec![0; (4 << 20) + 1];
    let above = |len, limit, of| Error::MessageTooLong(TooLong::new(len, limit, of));
    let refused = pair.send(0, a, 4000, &beyond);
    assert_eq!(refused, Err(above(beyond.len(), 4 << 20, LengthLimit::Node)));

    // A peer that takes less.
    let mut pair = Pair::new(big(A), Config { generation: 2, ..config(B) });
    let a = pair.bound(0, 4000);
    pair.send(0, a, 4000, b"x").expect("sent");
    pair.ms(1000);
    let of_the_peer = above(long.len(), 1 << 20, LengthLimit::Peer);
    assert_eq!(pair.send(0, a, 4000, &long), Err(of_the_peer));
    // A kernel.
    let mut lab = Lab::new(big(B));
    lab.kernel(A, 1);
    let s = lab.bound("10.0.0.2:4000");
    assert_eq!(lab.send(s, "10.0.0.1:9", &long), Err(of_the_peer));
    lab.send(s, "10.0.0.1:9", &long[1..]).expect("1 MiB is fine");
}

// tests that end to end can be switched off
#[test]
fn without_end_to_end_two_nodes_are_kernels_to_each_other() {
    let off = |local| Config { end_to_end: false, ..config(local) };
    let mut pair = Pair::new(off(A), Config { generation: 2, ..off(B) });
    let a = pair.bound(0, 4000);
    let b = pair.bound(1, 4000);
    for n in 0..20_u8 {
        pair.send(0, a, 4000, &[n]).expect("sent");
        if n == 10 {
            pair.ms(2000);
        }
    }
    pair.ms(2000);
    assert_eq!(pair.recv_all(1, b).len(), 20);
    assert_eq!(pair.nodes[0].info().connections[0].peer, "kernel");
    assert_eq!(pair.nodes[0].send_bytes(a), Ok(0), "released by TCP");
    assert_eq!(pair.counter(1, "bl_acks_sent"), 0);
    assert_eq!(pair.connections(), 8);
}

// tests a mixed pair: one side offers, the other does not
#[test]
fn one_side_alone_stays_with_the_kernels_rules() {
    for offering in 0..2 {
        let make = |side: usize, local| Config {
            end_to_end: side == offering,
            generation: 1 + side as u32,
            ..config(local)
        };
        let mut pair = Pair::new(make(0, A), make(1, B));
        let a = pair.bound(0, 4000);
        let b = pair.bound(1, 4000);
        for n in 0..10_u8 {
            pair.send(0, a, 4000, &[n]).expect("sent");
            pair.send(1, b, 4000, &[n]).expect("sent");
        }
        pair.ms(3000);
        for (side, socket) in [(0, a), (1, b)] {
            let got: Vec<_> = pair.recv_all(side, socket).iter().map(|m| m[0]).collect();
            assert_eq!(got, (0..10).collect::<Vec<_>>());
            assert_eq!(pair.nodes[side].send_bytes(socket), Ok(0));
            assert_eq!(pair.nodes[side].info().connections[0].peer, "kernel");
        }
    }
}

// tests hostile greetings
#[test]
fn a_greeting_for_an_impossible_path_costs_the_connection() {
    let mut lab = Lab::larger();
    let link = lab.greeted(A, hello(7, 9, 0));
    assert_eq!(lab.closes, [(link, CloseHow::Reset)]);
    assert_eq!(lab.counter("bl_peer_errors"), 1);
    let misbehaved = Event::Misbehaved { remote: ip(A), what: Misbehaviour::PathOutOfRange };
    assert!(lab.events.contains(&misbehaved), "{:?}", lab.events);
}

// tests congestion end to end, and order over all paths
#[test]
fn congestion_stops_the_sender_and_ends() {
    let (mut pair, a, b) = pair();
    pair.nodes[1].set_recv_buffer(b, 2000).expect("set");
    let mut sent = 0;
    while pair.send(0, a, 4000, &[sent as u8; 500]) != Err(Error::Congested) {
        sent += 1;
        assert!(sent < 20);
    }
    assert!(sent >= 5);
    pair.nodes[0].register(a, bowline_rds::Interest::WRITE).expect("registered");
    for n in 0..sent {
        assert_eq!(text(&pair.recv(1, b).expect("a message"))[0], n as u8);
    }
    assert!(!pair.wakes.is_empty(), "told when it ends");
    pair.send(0, a, 4000, b"on").expect("sent");
    pair.advance(Duration::from_millis(10));
    assert_eq!(pair.recv_all(1, b), [b"on"]);
}

// tests small windows and chunks between two nodes: bytes are cut anywhere
#[test]
fn small_windows_change_nothing() {
    for (chunk, window) in [(1, 100), (7, 49), (1000, 1001), (100_000, 3)] {
        let mut pair = Pair::new(
            Config { paths: 1, ..config(A) },
            Config { paths: 1, generation: 2, ..config(B) },
        );
        (pair.chunk, pair.window) = (chunk, window);
        let a = pair.bound(0, 4000);
        let b = pair.bound(1, 4000);
        let want: Vec<_> = (0..10_u8).map(|n| vec![n; usize::from(n) * 200]).collect();
        for payload in &want {
            pair.send(0, a, 4000, payload).expect("sent");
        }
        pair.ms(2000);
        assert_eq!(pair.recv_all(1, b), want, "chunk {chunk}, window {window}");
        assert_eq!(pair.nodes[0].send_bytes(a), Ok(0));
    }
}

/// This node has restarted, and its peer does not know it yet: the peer takes the connection of
/// path 1 for the only path of a kernel, its path 0, and says so, before it reads what was dialled.
/// It has not restarted, so nothing that was begun on path 0 is dropped; and what it sent meanwhile
/// is known by the numbers of path 0 when it comes again there.
// tests [R-2004] [R-346] [R-2023]
#[test]
fn a_peer_that_takes_a_connection_for_another_path_has_not_restarted() {
    let (mut lab, s, zero) = at(A, 4000).dials_bowline("10.0.0.2:5000", b"begun on path 0");
    let one = lab.establish();
    lab.fail(zero, CloseReason::Reset);
    let probe = ping_with(9, bowline_ext(7, 0, 1 << 20));
    lab.deliver(
        one,
        &[map_of(&[]), probe, data(10, 9, 4000, b"ten"), data(11, 9, 4000, b"eleven of path 0")],
    );
    assert_eq!(lab.counter("bl_peer_restarts"), 0);
    assert_eq!(lab.node.send_messages(s), Ok(1));
    lab.deliver(one, &[hello(7, 1, 0), data(3, 9, 4000, b"three of path 1")]);
    assert_eq!(lab.recv_all(s), [&b"ten"[..], b"eleven of path 0", b"three of path 1"]);
    lab.ms(2000);
    let again = lab.connects.iter().find(|(.., lane)| *lane == 0).expect("path 0 is dialled").0;
    lab.establish_link(again);
    lab.deliver(again, &[hello(7, 0, 0)]);
    assert!(lab.data_frames(again)[0].retransmitted());
    lab.deliver(
        again,
        &[flagged(data(11, 9, 4000, b"eleven of path 0")), data(12, 9, 4000, b"twelve")],
    );
    assert_eq!(lab.recv_all(s), [b"twelve"]);
}

/// A path that no node has breaks the rules, on a connection this node dialled as on others.
// tests [R-2004]
#[test]
fn a_path_above_seven_ends_the_connection() {
    let (mut lab, s, link) = at(A, 4000).dials("10.0.0.2:5000", b"x");
    lab.deliver(link, &[hello(7, 8, 0)]);
    assert_eq!(lab.closes, [(link, CloseHow::Reset)]);
    assert_eq!(lab.node.send_messages(s), Ok(1));
}

/// The other side of it: a node that took a connection for path 0, and has sent on it, resets it
/// when it reads that it is path 1. It knows now whom it talks to, and waits on the next one until
/// it is named.
// tests [R-2011] [R-2004]
#[test]
fn a_node_that_took_a_connection_for_another_path_knows_its_peer_then() {
    let mut lab = Lab::larger();
    let link = lab.accept(A);
    let s = lab.bound("10.0.0.2:4000");
    lab.send(s, "10.0.0.1:5000", b"x").expect("sent");
    lab.ms(250);
    assert_eq!(lab.data_frames(link).len(), 1, "it has waited long enough");
    lab.deliver(link, &[hello(7, 1, 0)]);
    assert_eq!(lab.closes, [(link, CloseHow::Reset)]);
    let next = lab.accept(A);
    lab.ms(250);
    assert!(lab.frames(next).is_empty());
    lab.deliver(next, &[hello(7, 0, 0)]);
    assert_eq!(lab.data_frames(next).len(), 1);
}

/// A node's address was a kernel's for a while, which answered no probe. When the node is back, the
/// same process, it goes on where it was: what it repeats was delivered.
// tests [R-346] [R-2023]
#[test]
fn a_node_that_was_away_goes_on_where_it_was() {
    let (mut lab, s, link) = at(B, 5000).bowline();
    lab.deliver(link, &[data(10, 9, 5000, b"once")]);
    lab.fail(link, CloseReason::TimedOut);
    let kernel = lab.accept(A);
    lab.deliver(kernel, &[map_of(&[]), data(1, 9, 5000, b"of the kernel")]);
    lab.fail(kernel, CloseReason::TimedOut);
    lab.bowline(A, 7, 0); // closed: it may be a late one of before
    let back = lab.bowline(A, 7, 0);
    lab.deliver(back, &[flagged(data(10, 9, 5000, b"once")), data(11, 9, 5000, b"more")]);
    assert_eq!(lab.recv_all(s), [&b"once"[..], b"of the kernel", b"more"]);
}
