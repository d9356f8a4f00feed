//! Section 20.6: nodes that end in good order.

use bowline_rds::{CloseHow, CloseReason, Error, Event, PathState};
use bowline_wire::rds::{BowlineExt, Handshake};

use crate::support::*;

/// The farewell of a bowline peer.
fn farewell(ack: u64) -> Frame {
    let bowline = Some(BowlineExt { version: 1, path: 0, max_message: 0 });
    let mut frame = ack_frame(ack);
    frame.header.ext = Handshake { bowline, ..Handshake::default() }.emit();
    frame
}

fn is_farewell(frame: &Frame) -> bool {
    frame.is_ack()
        && Handshake::parse(&frame.header.ext).bowline.is_some_and(|ext| ext.max_message == 0)
}

/// A node with the larger address and one path, connected to a bowline peer.
fn connected() -> (Lab, bowline_rds::SocketId, bowline_rds::LinkId) {
    let (mut lab, socket, link) = at(B, 4001).paths(1).bowline();
    lab.written.clear();
    (lab, socket, link)
}

fn end(lab: &mut Lab) {
    lab.node.end(lab.now);
    lab.settle();
}

// tests [R-2050] [R-2051]
#[test]
fn the_last_frame_acknowledges_all_that_was_taken_and_says_so() {
    let (mut lab, socket, link) = connected();
    lab.deliver(link, &[data(1, 5000, 4001, b"one"), data(2, 5000, 4001, b"two")]);
    assert!(lab.frames(link).is_empty(), "nobody has asked yet");
    end(&mut lab);
    let frames = lab.frames(link);
    assert_eq!(frames.len(), 1);
    assert!(is_farewell(&frames[0]));
    assert_eq!(frames[0].header.ack, 2);
    assert_eq!(lab.closes, [(link, CloseHow::Drain)], "FIN follows");
    assert!(!lab.node.is_told(), "it is on its way");
    lab.fail(link, CloseReason::Eof);
    assert!(lab.node.is_told());
    assert_eq!(lab.recv_all(socket), [b"one", b"two"]);
}

// tests [R-2050]: what is not acknowledged is not taken either
#[test]
fn what_comes_after_the_farewell_stays_with_its_sender() {
    let (mut lab, socket, link) = connected();
    lab.room = 10;
    end(&mut lab);
    assert!(!lab.node.is_told(), "TCP is full");
    lab.deliver(link, &[data(1, 5000, 4001, b"late")]);
    lab.deliver(link, &[data(2, 5000, 4001, &[0; 100_000])]);
    lab.unblock(link, usize::MAX);
    let frames = lab.frames(link);
    assert!(is_farewell(&frames[0]));
    assert_eq!(frames[0].header.ack, 0);
    lab.deliver(link, &[data(3, 5000, 4001, b"later")]);
    assert!(lab.recv_all(socket).is_empty());
    assert!(lab.node.is_told());
}

// tests [R-2050]: a message that was begun is completed, the others wait for the next node
#[test]
fn a_farewell_goes_out_behind_the_message_that_was_begun() {
    let (mut lab, socket, link) = connected();
    lab.room = 40;
    lab.send(socket, "10.0.0.1:5000", b"begun").expect("queued");
    lab.send(socket, "10.0.0.1:5000", b"not begun").expect("queued");
    end(&mut lab);
    lab.unblock(link, usize::MAX);
    let frames = lab.frames(link);
    assert_eq!(frames.len(), 2);
    assert!(frames[0].is_data() && is_farewell(&frames[1]));
    assert_eq!(frames[0].payload, b"begun");
    assert_eq!(lab.closes, [(link, CloseHow::Drain)]);
}

// tests [R-2050]: a kernel would ignore it, and does not see it
#[test]
fn a_kernel_gets_no_farewell() {
    let (mut lab, socket, link) = at(B, 4001).paths(1).kernel(1);
    lab.deliver(link, &[data(2, 5000, 4001, b"one")]);
    lab.written.clear();
    end(&mut lab);
    assert!(lab.frames(link).is_empty());
    assert_eq!(lab.closes, [(link, CloseHow::Drain)]);
    // Its TCP takes for delivered what comes until then.
    lab.deliver(link, &[data(3, 5000, 4001, b"two")]);
    assert_eq!(lab.recv_all(socket), [b"one", b"two"]);
}

// tests [R-2050]: else a peer sends again what was taken on what might have been refused
#[test]
fn a_connection_on_which_nothing_came_back_lasts_until_it_counts() {
    let (mut lab, socket, first) = at(B, 4001).paths(2).kernel(2);
    let second = lab.accept(A);
    lab.deliver(second, &[data(1, 5000, 4001, b"one")]);
    assert!(lab.frames(second).is_empty());
    lab.ms(100);
    end(&mut lab);
    assert_eq!(lab.closes, [(first, CloseHow::Drain)], "on this one something came back");
    assert!(!lab.node.is_told());
    lab.ms(149);
    assert_eq!(lab.closes.len(), 1);
    lab.ms(2);
    assert_eq!(lab.closes[1..], [(second, CloseHow::Drain)]);
    assert!(lab.node.is_told());
    assert_eq!(lab.recv_all(socket), [b"one"]);
}

/// A kernel has taken the address of a bowline node, and has not shown itself yet.
// tests [R-2050] [R-2051]
#[test]
fn a_connection_on_which_nobody_has_greeted_gets_no_farewell() {
    let (mut lab, socket, link) = at(A, 4001).paths(1).dials_bowline("10.0.0.2:5000", b"x");
    lab.fail(link, CloseReason::Eof);
    lab.ms(1);
    let link = lab.establish();
    lab.written.clear();
    end(&mut lab);
    assert!(!lab.frames(link).iter().any(is_farewell));
    assert_eq!(lab.closes, [(link, CloseHow::Drain)], "FIN alone");
    assert!(lab.node.is_told());
    // What a kernel's TCP counts as delivered is taken.
    lab.deliver(link, &[map_of(&[]), data(1, 5000, 4001, b"of a kernel")]);
    assert_eq!(lab.recv_all(socket), [b"of a kernel"]);
}

// tests [R-2052]: the greeting of the next connection tells
#[test]
fn a_connection_that_broke_is_made_again_to_tell_the_peer() {
    let (mut lab, socket, link) = connected();
    lab.deliver(link, &[data(1, 5000, 4001, b"one")]);
    assert_eq!(lab.recv_all(socket), [b"one"]);
    lab.fail(link, CloseReason::Reset);
    end(&mut lab);
    assert!(!lab.node.is_told());
    assert!(lab.try_accept("10.0.0.9").is_none(), "others are refused");
    let again = lab.bowline(A, 7, 0);
    let frames = lab.frames(again);
    assert!(frames.iter().any(|f| f.header.is_probe_ping() && f.header.ack == 1));
    assert!(frames.last().is_some_and(is_farewell));
    assert!(!lab.node.is_told(), "it is on its way");
    lab.fail(again, CloseReason::Eof);
    assert!(lab.node.is_told());
    assert!(lab.try_accept(A).is_none(), "it knows all");
}

// tests [R-2052]: what a reset has overtaken may not have come
#[test]
fn a_farewell_that_a_reset_has_overtaken_is_said_again() {
    let (mut lab, _, link) = connected();
    lab.deliver(link, &[data(1, 5000, 4001, b"one")]);
    end(&mut lab);
    assert!(lab.frames(link).last().is_some_and(is_farewell));
    lab.fail(link, CloseReason::Reset);
    assert!(!lab.node.is_told());
    let again = lab.bowline(A, 7, 0);
    let frames = lab.frames(again);
    assert!(frames.iter().any(|f| f.header.is_probe_ping() && f.header.ack == 1));
    assert!(frames.last().is_some_and(is_farewell));
    lab.fail(again, CloseReason::Eof);
    assert!(lab.node.is_told());
}

// tests [R-2052]: a peer that does not close holds nobody up for longer than others
#[test]
fn a_farewell_to_a_peer_that_does_not_close_is_waited_for_for_a_while() {
    let (mut lab, _, link) = connected();
    lab.deliver(link, &[data(1, 5000, 4001, b"one")]);
    end(&mut lab);
    lab.ms(299);
    assert!(!lab.node.is_told());
    lab.ms(2);
    assert!(lab.node.is_told());
}

// tests [R-2052]: a peer that does not come back holds nobody up
#[test]
fn a_peer_that_is_away_is_not_waited_for() {
    let (mut lab, _, link) = connected();
    lab.deliver(link, &[data(1, 5000, 4001, b"one")]);
    lab.fail(link, CloseReason::Reset);
    lab.ms(600);
    end(&mut lab);
    assert!(lab.node.is_told());

    let (mut lab, _, link) = at(A, 4001).paths(1).dials("10.0.0.2:5000", b"x");
    lab.deliver(link, &[map_of(&[]), hello(7, 0, 0), data(1, 5000, 4001, b"one")]);
    lab.fail(link, CloseReason::Reset);
    lab.ms(1);
    end(&mut lab);
    assert!(!lab.node.is_told(), "it dials");
    let (dialled, ..) = lab.connects[0];
    lab.fail(dialled, CloseReason::Refused);
    assert!(lab.node.is_told(), "nobody is there");
    lab.ms(2000);
    assert!(lab.connects.is_empty(), "it does not go on");
}

// tests [R-2051] [R-2053]
#[test]
fn a_sender_learns_that_its_peer_has_ended_and_did_not_come_back() {
    let (mut lab, socket, link) = at(A, 4001).paths(1).dials_bowline("10.0.0.2:5000", b"taken");
    lab.send(socket, "10.0.0.2:5000", b"not taken").expect("queued");
    let first = lab.data_frames(link)[0].header.sequence;
    lab.deliver(link, &[farewell(first)]);
    let news = |lab: &Lab| {
        lab.events.iter().filter(|event| matches!(event, Event::PeerEnded { .. })).count()
    };
    assert_eq!(news(&lab), 1);
    lab.deliver(link, &[farewell(first)]);
    assert_eq!(news(&lab), 1, "once");
    assert_eq!(lab.node.send_messages(socket), Ok(1), "the other is acknowledged");
    lab.fail(link, CloseReason::Eof);
    let end = lab.now + std::time::Duration::from_secs(10);
    let begun = lab.now;
    while lab.node.is_flushed(socket) == Ok(false) {
        assert!(lab.now < end, "nobody says so");
        lab.ms(1);
        if let Some((dialled, ..)) = lab.connects.first().copied() {
            lab.fail(dialled, CloseReason::Refused);
        }
    }
    assert_eq!(lab.node.is_flushed(socket), Err(Error::PeerEnded));
    assert!(lab.now >= begun + std::time::Duration::from_secs(1), "a service may be restarted");
    lab.send(socket, "10.0.0.2:5000", b"for the next").expect("queued");
    // Another node takes its place.
    while lab.connects.is_empty() {
        lab.ms(1);
    }
    let link = lab.establish();
    lab.deliver(link, &[map_of(&[]), hello(8, 0, 0)]);
    assert_eq!(lab.node.is_flushed(socket), Ok(false));
    let sent = lab.data_frames(link);
    assert_eq!(sent.len(), 1, "what was begun for the earlier process is gone with it [R-346]");
    assert_eq!(sent[0].payload, b"for the next");
    lab.deliver(link, &[ack_frame(sent[0].header.sequence)]);
    assert_eq!(lab.node.is_flushed(socket), Ok(true));
}

/// A sender with the smaller address, whose peer has said farewell.
fn ended_peer() -> (Lab, bowline_rds::SocketId) {
    let (mut lab, socket, link) = at(A, 4001).paths(1).dials_bowline("10.0.0.2:5000", b"taken");
    let last = lab.data_frames(link)[0].header.sequence;
    lab.deliver(link, &[farewell(last)]);
    lab.fail(link, CloseReason::Eof);
    lab.send(socket, "10.0.0.2:5000", b"not taken").expect("queued");
    (lab, socket)
}

/// Refuses the node's attempts to connect for so many milliseconds.
fn refuse_for(lab: &mut Lab, ms: u64) {
    for _ in 0..ms {
        lab.ms(1);
        while let Some((dialled, ..)) = lab.connects.first().copied() {
            lab.fail(dialled, CloseReason::Refused);
        }
    }
}

/// The peer dials again at once. The kernel of the host that ends completes the connection, which
/// nobody takes from the listener any more; it dies with the process.
// tests [R-2053]
#[test]
fn a_connection_that_only_a_backlog_took_does_not_bring_a_peer_back() {
    for times in 1..4 {
        let (mut lab, socket) = ended_peer();
        for _ in 0..times {
            while lab.connects.is_empty() {
                lab.ms(1);
            }
            let link = lab.establish();
            lab.ms(3);
            lab.fail(link, CloseReason::Reset);
        }
        refuse_for(&mut lab, 3000);
        assert_eq!(lab.node.is_flushed(socket), Err(Error::PeerEnded), "{times}");
    }
}

/// The process that ends still takes a connection, for a path on which it has to tell something.
// tests [R-2053] [R-2052]
#[test]
fn a_process_that_has_said_farewell_is_not_back_when_it_greets() {
    let (mut lab, socket) = ended_peer();
    lab.ms(1);
    let link = lab.establish();
    lab.deliver(link, &[map_of(&[]), hello(7, 0, 0)]);
    lab.fail(link, CloseReason::Eof);
    refuse_for(&mut lab, 3000);
    assert_eq!(lab.node.is_flushed(socket), Err(Error::PeerEnded));
}

// tests [R-2053] [R-2003]
#[test]
fn whoever_shows_another_process_brings_a_peer_back() {
    let frames = [
        ("another generation", hello(8, 0, 0)),
        ("a kernel", ping_with(1, npaths_ext(1))),
        ("a message of a kernel", data(1, 5000, 4001, b"x")),
    ];
    for (what, first) in frames {
        let (mut lab, socket) = ended_peer();
        refuse_for(&mut lab, 3000);
        assert_eq!(lab.node.is_flushed(socket), Err(Error::PeerEnded), "{what}");
        while lab.connects.is_empty() {
            lab.ms(1);
        }
        let link = lab.establish();
        lab.deliver(link, &[map_of(&[]), first]);
        assert!(lab.node.is_flushed(socket).is_ok(), "{what}");
        // That one has not ended, however long it is away.
        lab.fail(link, CloseReason::Reset);
        lab.send(socket, "10.0.0.2:5000", b"more").expect("queued");
        refuse_for(&mut lab, 3000);
        assert_eq!(lab.node.is_flushed(socket), Ok(false), "{what}");
    }
}

/// The successor has a connection already when the farewell on the last one of its predecessor is
/// read, and greets after that.
// tests [R-2051] [R-2053]
#[test]
fn a_late_farewell_of_an_earlier_process_does_not_end_its_successor() {
    let (mut lab, socket, first) = at(A, 4001).paths(2).dials_bowline("10.0.0.2:5000", b"taken");
    let last = last_number(&lab);
    lab.deliver(first, &[ack_frame(last)]);
    let second = lab.establish();
    lab.deliver(second, &[hello(7, 1, 0)]);
    lab.fail(first, CloseReason::Eof);
    lab.ms(1);
    let new = lab.establish();
    lab.deliver(second, &[farewell(0)]);
    lab.fail(second, CloseReason::Eof);
    lab.deliver(new, &[map_of(&[]), hello(8, 0, 0)]);
    lab.fail(new, CloseReason::Reset);
    lab.send(socket, "10.0.0.2:5000", b"for the successor").expect("queued");
    refuse_for(&mut lab, 3000);
    assert_eq!(lab.node.is_flushed(socket), Ok(false));
}

// tests [R-2050]: both at the same time, with messages under way
#[test]
fn two_nodes_that_end_at_once_know_of_each_other_what_was_taken() {
    let mut pair = Pair::bowline();
    let (a, b) = (pair.bound(0, 4000), pair.bound(1, 4000));
    for _ in 0..20 {
        pair.send(0, a, 4000, b"to the larger").expect("sent");
        pair.send(1, b, 4000, b"to the smaller").expect("sent");
        pair.ms(20);
    }
    pair.send_quiet(0, a, 4000, b"last").expect("sent");
    pair.send_quiet(1, b, 4000, b"last").expect("sent");
    pair.flush(0);
    pair.flush(1);
    pair.settle();
    for node in &mut pair.nodes {
        node.end(pair.now);
    }
    pair.ms(50);
    for (side, socket) in [(0, a), (1, b)] {
        assert_eq!(pair.recv_all(side, socket).len(), 21);
        assert_eq!(pair.nodes[side].send_messages(socket), Ok(0), "side {side}");
        assert!(pair.nodes[side].is_told());
        let up = pair.nodes[side].info().paths.iter().any(|p| p.state == PathState::Up);
        assert!(!up, "all connections have ended");
    }
}
