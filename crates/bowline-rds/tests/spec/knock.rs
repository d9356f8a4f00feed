//! How the larger node asks the smaller one to connect ("knocks"), and what that one does.

use std::time::Duration;

use bowline_rds::{AcceptError, CloseHow, CloseReason, Config, Error, Interest};

use crate::connect::up;
use crate::support::*;

// tests, T-18 and T-27
#[test]
fn a_knock_makes_the_smaller_side_connect() {
    let mut lab = Lab::smaller();
    let knock = lab.node.handle_accepted(lab.now, addr("10.0.0.1:16385"), addr("10.0.0.2:40000"));
    assert_eq!(knock, Err(AcceptError::Knock), "it is reset at once");
    lab.settle();
    assert_eq!(lab.counter("bl_knocks_received"), 1);
    lab.ms(0);
    let link = lab.establish();
    assert_eq!(up(&lab), [0]);
    assert_eq!(lab.try_accept(B), None, "a knock while the path is up");
    assert_eq!(lab.checks, [link], "the connection is looked at");
    lab.ms(1000);
    assert!(lab.connects.is_empty(), "but no dial-back");
}

/// A larger kernel knew more paths of an earlier node at this address. It takes the only connection
/// of the present node for its path 1, and asks for path 0 for ever.
// tests
#[test]
fn a_kernel_that_knocks_on_and_on_gets_another_connection() {
    let mut lab = Lab::smaller();
    assert_eq!(lab.try_accept(B), None);
    lab.ms(0);
    let link = lab.establish();
    for _ in 0..7 {
        lab.ms(300);
        assert_eq!(lab.try_accept(B), None);
    }
    assert!(lab.closes.is_empty(), "these may be from before it had the connection");
    lab.ms(300);
    assert_eq!(lab.try_accept(B), None);
    assert_eq!(lab.closes, [(link, CloseHow::Cut)]);
    lab.ms(2000);
    assert_ne!(lab.establish(), link);
    assert_eq!(up(&lab), [0]);
}

/// A larger kernel asks often while a connection is young: that is no reason to end it.
// tests
#[test]
fn knocks_in_quick_succession_end_no_connection() {
    let mut lab = Lab::smaller();
    assert_eq!(lab.try_accept(B), None);
    lab.ms(0);
    lab.establish();
    for _ in 0..20 {
        lab.ms(50);
        assert_eq!(lab.try_accept(B), None);
    }
    assert!(lab.closes.is_empty());
}

/// The peer asked to be connected to and then went away for good, without ever sending anything.
// tests
#[test]
fn a_stranger_that_only_knocked_is_not_dialled_for_ever() {
    let mut lab = Lab::smaller();
    let refuse = |lab: &mut Lab| {
        let mut dials = 0;
        for _ in 0..600 {
            lab.ms(100);
            while let Some((link, ..)) = lab.connects.pop() {
                dials += 1;
                lab.node.handle_closed(lab.now, link, CloseReason::Refused);
                lab.settle();
            }
        }
        dials
    };
    assert_eq!(lab.try_accept(B), None);
    assert_eq!(refuse(&mut lab), 32);
    assert_eq!(lab.try_accept(B), None);
    assert_eq!(refuse(&mut lab), 32, "it is dialled again when it knocks again");
    let s = lab.bound("10.0.0.1:4000");
    lab.send(s, "10.0.0.2:5000", b"for it").expect("sent");
    assert!(refuse(&mut lab) > 60, "as long as there is something for it, without end");
}

/// Many that only knocked, and as many that were in service, are away at once. Nothing is queued
/// for any.
// tests
#[test]
fn connecting_to_many_that_are_away_is_bounded() {
    let mut lab = Lab::smaller();
    for n in 0..1000_u16 {
        let peer = format!("10.1.{}.{}", n / 200, n % 200 + 1);
        assert_eq!(lab.try_accept(&peer), None);
        lab.ms(10);
        if n < 600 {
            let link = lab.establish();
            lab.deliver(link, &[map_of(&[])]);
            lab.node.handle_closed(lab.now, link, CloseReason::Reset);
            lab.settle();
        }
    }
    let mut dials = 0;
    for ms in 0..3000 {
        lab.ms(1);
        dials = if ms < 1000 { 0 } else { dials };
        while let Some((link, ..)) = lab.connects.pop() {
            dials += 1;
            lab.node.handle_closed(lab.now, link, CloseReason::Refused);
            lab.settle();
        }
    }
    // Two budgets of 256 a second each; two seconds touch three of them.
    assert!(dials <= 2 * 3 * 256, "{dials} in two seconds");
    assert!(dials > 256, "{dials}: all are tried");
    // One of them comes back, and asks; so does one for which there is a message now.
    assert_eq!(lab.try_accept("10.1.0.1"), None);
    let s = lab.bound("10.0.0.1:4000");
    lab.send(s, "10.1.0.2:5000", b"for it").expect("sent");
    let mut back = Vec::new();
    for _ in 0..1100 {
        lab.ms(1);
        while let Some((link, remote, _)) = lab.connects.pop() {
            back.push(remote.ip().to_string());
            lab.node.handle_closed(lab.now, link, CloseReason::Refused);
            lab.settle();
        }
    }
    assert!(["10.1.0.1", "10.1.0.2"].iter().all(|peer| back.iter().any(|b| b == peer)));
}

/// All connections of a hundred peers, with eight paths each, are lost at once.
// tests
#[test]
fn peers_with_many_paths_are_dialled_again_at_once() {
    let mut lab = Lab::smaller();
    let mut links = Vec::new();
    for n in 1..=100 {
        assert_eq!(lab.try_accept(&format!("10.1.0.{n}")), None);
        lab.ms(10);
        let link = lab.establish();
        lab.deliver(link, &[map_of(&[]), pong_with(1, npaths_ext(8))]);
        links.push(link);
        for _ in 1..8 {
            links.push(lab.establish());
            lab.ms(201);
        }
    }
    lab.connects.clear();
    for link in links {
        lab.node.handle_closed(lab.now, link, CloseReason::Reset);
    }
    lab.settle();
    lab.ms(50);
    assert_eq!(lab.connects.len(), 100, "path 0 of each");
}

// tests
#[test]
fn the_larger_side_only_knocks() {
    let (mut lab, s) = at(B, 4000).sends("10.0.0.1:5000", b"x");
    assert_eq!(lab.connects.len(), 1);
    lab.send(s, "10.0.0.1:5000", b"y").expect("sent");
    assert_eq!(lab.connects.len(), 1, "one knock at a time");
    let knock = lab.establish();
    assert_eq!(lab.closes, [(knock, CloseHow::Fin)]);
    assert!(lab.frames(knock).is_empty(), "nothing is sent on it");
    let link = lab.accept(A);
    lab.deliver(link, &[map_of(&[]), pong_with(1, npaths_ext(1))]);
    let payloads: Vec<_> = lab.data_frames(link).into_iter().map(|f| f.payload).collect();
    assert_eq!(payloads, [b"x", b"y"]);
    lab.connects.clear();
    lab.advance(Duration::from_secs(10));
    assert!(lab.connects.is_empty(), "no knock without need");
}

// tests: a knock that failed is repeated while there is something to send
#[test]
fn a_failed_knock_is_repeated_while_something_waits() {
    let (mut lab, s) = at(B, 4000).sends("10.0.0.1:5000", b"x");
    for _ in 0..5 {
        let (knock, ..) = lab.connects[0];
        lab.fail(knock, CloseReason::Refused);
        let why = lab.node.info().paths[0].last_end.and_then(|end| end.why);
        assert_eq!(why, Some(CloseReason::Refused), "for those who ask why there is no answer");
        lab.ms(1001);
        assert_eq!(lab.connects.len(), 1);
    }
    lab.node.close(lab.now, s);
    let (knock, ..) = lab.connects[0];
    lab.fail(knock, CloseReason::Refused);
    lab.ms(5000);
    assert!(lab.connects.is_empty(), "the node's own probe is not worth a knock");
}

/// The first message to a peer is longer than a kernel takes, so the sender has to learn first what
/// the peer is. The peer is not there when this node, the larger one, knocks.
// tests [R-331] [R-339] [R-2030]
#[test]
fn a_sender_of_a_long_first_message_is_not_forgotten_when_the_knock_fails() {
    let mut lab = Lab::new(Config { max_message: 4 << 20, ..config(B) });
    let s = lab.bound("10.0.0.2:4000");
    lab.node.set_send_buffer(s, 4 << 20).expect("a buffer");
    let long = vec![1; 2 << 20];
    assert_eq!(lab.send(s, "10.0.0.1:9", &long), Err(Error::HandshakePending));
    lab.node.register(s, Interest::WRITE).expect("registered");
    let mut knocks = 0;
    for _ in 0..200 {
        lab.ms(500);
        while let Some((link, ..)) = lab.connects.first().copied() {
            knocks += 1;
            lab.fail(link, CloseReason::Refused);
        }
    }
    assert!((90..=200).contains(&knocks), "{knocks} knocks in 100 s of a waiting sender");
    let link = lab.accept(A);
    lab.deliver(link, &[map_of(&[]), ping_with(0, bowline_ext(0x77, 0, 4 << 20))]);
    assert!(lab.wakes.iter().any(|w| w.0 == s && w.1.contains(Interest::WRITE)), "woken");
    lab.send(s, "10.0.0.1:9", &long).expect("sent");
}

/// A program that does not wait but tries again and again does not make the node knock as often.
// tests
#[test]
fn trying_a_long_message_again_and_again_does_not_knock_as_often() {
    let mut lab = Lab::new(Config { max_message: 4 << 20, ..config(B) });
    let s = lab.bound("10.0.0.2:4000");
    lab.node.set_send_buffer(s, 4 << 20).expect("a buffer");
    let long = vec![1; 2 << 20];
    let mut knocks = 0;
    for _ in 0..20_000 {
        assert_eq!(lab.send(s, "10.0.0.1:9", &long), Err(Error::HandshakePending));
        while let Some((link, ..)) = lab.connects.first().copied() {
            knocks += 1;
            lab.fail(link, CloseReason::Refused);
        }
        lab.ms(1);
    }
    assert!((15..=80).contains(&knocks), "{knocks} knocks in 20 s");
    lab.ms(100_000);
    lab.connects.clear();
    lab.ms(100_000);
    assert!(lab.connects.is_empty(), "nobody has asked for long");
}
