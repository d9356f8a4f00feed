//! Section 5: sending, its accounting, cancelling, zero copy.

use std::io::IoSlice;

use bowline_rds::{
    Config, Control, Error, Interest, LengthLimit, SendControl, SendMsg, TooLong, Transport,
};

use crate::support::*;

fn errno<T: std::fmt::Debug>(result: Result<T, Error>) -> i32 {
    result.expect_err("an error").errno().0
}

const FAR: &str = "10.0.0.2:5000";

// tests: the table of 5.2, row by row
#[test]
fn destinations_that_name_no_host_are_refused() {
    let mut lab = Lab::smaller();
    let s = lab.bound("10.0.0.1:4000");
    for bad in [
        "0.0.0.0:5",
        "255.255.255.255:5",
        "224.0.0.1:5",
        "[::]:5",
        "[ff02::1]:5",
        "[::ffff:0.0.0.0]:5",
        "[::ffff:224.0.0.1]:5",
        "[fe80::1]:5",
    ] {
        assert_eq!(lab.send(s, bad, b"x"), Err(Error::BadAddress), "{bad}");
    }
    assert_eq!(Error::BadAddress.errno(), 22);
    lab.node.check_invariants();
}

// tests
#[test]
fn an_unbound_or_unconnected_socket_is_not_connected() {
    let mut lab = Lab::smaller();
    let unbound = lab.node.socket().expect("a socket");
    assert_eq!(errno(lab.send(unbound, FAR, b"x")), 107);
    // The name is looked at before whether the socket is bound.
    assert_eq!(errno(lab.send(unbound, "0.0.0.0:1", b"x")), 22);
    // Too long comes after not bound.
    assert_eq!(errno(lab.send(unbound, FAR, &vec![0; 2 << 20])), 107);
    let s = lab.bound("10.0.0.1:4000");
    let nobody = SendMsg { payload: &[IoSlice::new(b"x")], ..SendMsg::default() };
    assert_eq!(lab.node.send(lab.now, s, &nobody), Err(Error::NotConnected));
    lab.node.connect(s, addr(FAR)).expect("connected");
    assert_eq!(lab.node.send(lab.now, s, &nobody).expect("sent").len, 1);
    lab.settle();
}

// tests
#[test]
fn a_name_wins_over_the_connected_destination() {
    let mut lab = Lab::smaller();
    let s = lab.bound("10.0.0.1:4000");
    lab.node.connect(s, addr(FAR)).expect("connected");
    lab.send(s, "10.0.0.2:6000", b"x").expect("sent");
    assert_eq!(
        lab.node
            .info()
            .send
            .iter()
            .filter(|m| m.local.port() == 4000)
            .map(|m| m.remote.port())
            .collect::<Vec<_>>(),
        [6000]
    );
}

// tests and row 8
#[test]
fn families_do_not_mix() {
    let mut lab = Lab::smaller();
    let s = lab.bound("10.0.0.1:4000");
    assert_eq!(errno(lab.send(s, "[2001:db8::1]:5", b"x")), 95);
    lab.node.connect(s, addr("[2001:db8::1]:5")).expect("connected");
    let msg = SendMsg { payload: &[IoSlice::new(b"x")], ..SendMsg::default() };
    assert_eq!(lab.node.send(lab.now, s, &msg), Err(Error::FamilyMismatch));
    // A v4-mapped address is the IPv4 one.
    lab.send(s, "[::ffff:10.0.0.2]:5000", b"x").expect("sent");
    let mut six = Lab::new(Config { addrs: vec![ip("2001:db8::1")], ..Config::default() });
    let s = six.bound("[2001:db8::1]:4000");
    assert_eq!(six.send(s, FAR, b"x"), Err(Error::FamilyMismatch));
    six.send(s, "[2001:db8::2]:5000", b"x").expect("sent");
}

// tests rows 9 and 4: scopes
#[test]
fn scopes_must_agree() {
    let mut lab = Lab::new(Config { addrs: vec![ip("fe80::1")], ..Config::default() });
    let s = lab.node.socket().expect("a socket");
    lab.node.bind(s, addr("[fe80::1%3]:4000")).expect("bound");
    assert_eq!(lab.send(s, "[fe80::2%4]:5", b"x"), Err(Error::ScopeMismatch));
    lab.send(s, "[fe80::2%3]:5", b"x").expect("sent");
}

// tests rows 11, 12, 14: length before control messages
#[test]
fn length_is_bounded_by_the_send_buffer_and_the_protocol() {
    let mut lab = Lab::smaller();
    let s = lab.bound("10.0.0.1:4000");
    let long = vec![0; (1 << 20) + 1];
    let unknown = [SendControl::Unknown(99)];
    assert_eq!(
        lab.send_with(s, FAR, &long[..106_497], &unknown, false),
        Err(Error::MessageTooLong(TooLong::new(106_497, 106_496, LengthLimit::SendBuffer)))
    );
    let too_long = TooLong::new(1, 0, LengthLimit::Node);
    assert_eq!(Error::MessageTooLong(too_long).errno(), 90);
    assert_eq!(errno(lab.send_with(s, FAR, &long[..106_496], &unknown, false)), 22);
    assert!(lab.connects.is_empty(), "errors come before any connection work");
    lab.send(s, FAR, &long[..106_496]).expect("exactly the buffer");
    let t = lab.bound("10.0.0.1:4001");
    lab.node.set_send_buffer(t, 4 << 20).expect("set");
    assert_eq!(errno(lab.send(t, FAR, &long)), 90);
    lab.send(t, FAR, &long[..1 << 20]).expect("1 MiB");
}

// tests rows 13 to 16, 20, 20a, 20b, 21
#[test]
fn control_messages_are_checked_in_the_kernels_order() {
    use SendControl::{Atomic, RdmaArgs, RdmaDest, RdmaMap, Unknown, ZcopyCookie};
    let mut lab = Lab::smaller();
    let s = lab.bound("10.0.0.1:4000");
    let mut errno_of = |control: &[SendControl], zerocopy: bool, payload: &[u8]| {
        lab.send_with(s, FAR, payload, control, zerocopy).map_or_else(|e| e.errno().0, |_| 0)
    };
    assert_eq!(errno_of(&[Unknown(99)], false, b"x"), 22);
    assert_eq!(errno_of(&[RdmaMap, Unknown(99)], false, b"x"), 22, "unknown before unsupported");
    assert_eq!(errno_of(&[], true, b"x"), 22, "zero copy without a cookie");
    assert_eq!(errno_of(&[ZcopyCookie(1), RdmaArgs], true, b"x"), 22, "mixed");
    assert_eq!(errno_of(&[RdmaDest(1), Atomic], false, b"x"), 22, "mixed");
    assert_eq!(errno_of(&[ZcopyCookie(1)], false, b"x"), 22, "cookie without zero copy");
    assert_eq!(errno_of(&[ZcopyCookie(1)], true, b"x"), 22, "zero copy not enabled");
    assert_eq!(errno_of(&[RdmaMap], false, b"x"), 95);
    assert_eq!(errno_of(&[RdmaDest(1)], false, b"x"), 22);
    assert_eq!(errno_of(&[RdmaDest(1), RdmaMap], false, b"x"), 22, "in their order");
    assert_eq!(errno_of(&[RdmaMap, RdmaDest(1)], false, b"x"), 95, "in their order");
    assert_eq!(errno_of(&[RdmaArgs], false, b"x"), 95);
    assert_eq!(errno_of(&[Atomic], false, b"x"), 95);
    lab.node.set_zerocopy(s, true).expect("set");
    let mut errno_of = |control: &[SendControl], zerocopy: bool, payload: &[u8]| {
        lab.send_with(s, FAR, payload, control, zerocopy).map_or_else(|e| e.errno().0, |_| 0)
    };
    assert_eq!(errno_of(&[], true, b"x"), 22, "no cookie, enabled");
    assert_eq!(errno_of(&[ZcopyCookie(1)], true, b""), 22, "empty payload");
    assert_eq!(errno_of(&[ZcopyCookie(1)], true, b"x"), 0);
    // Row 13: only TCP has zero copy.
    let mut any = Lab::new(Config::default());
    let s = any.bound("127.0.0.1:4000");
    assert_eq!(any.node.transport(s), Ok(Some(Transport::Loopback)));
    any.node.set_zerocopy(s, true).expect("set");
    assert_eq!(errno(any.send_with(s, "127.0.0.1:1", b"x", &[ZcopyCookie(1)], true)), 95);
}

// tests rows 14 to 20: a message that is refused later has a connection by then
#[test]
fn messages_that_are_refused_late_have_a_connection() {
    use SendControl::{RdmaArgs, RdmaDest, RdmaMap, Unknown, ZcopyCookie};
    let early: [(&[SendControl], bool); 4] = [
        (&[Unknown(99), RdmaDest(1)], false),
        (&[], true),
        (&[ZcopyCookie(1), RdmaArgs], true),
        (&[RdmaMap, RdmaArgs], false),
    ];
    let late: [&[SendControl]; 4] = [&[RdmaDest(1)], &[RdmaMap], &[RdmaArgs], &[ZcopyCookie(1)]];
    for control in late {
        let mut lab = Lab::smaller();
        let s = lab.bound("10.0.0.1:4000");
        for (control, zerocopy) in early {
            lab.send_with(s, FAR, b"x", control, zerocopy).expect_err("refused early");
        }
        assert!(!lab.node.has_had_route(s), "{control:?}");
        assert!(lab.node.info().connections.is_empty(), "{control:?}");
        lab.node.set_tos(s, 0).expect("may still be set");
        lab.send_with(s, FAR, b"x", control, false).expect_err("refused late");
        assert!(lab.node.has_had_route(s), "{control:?}");
        assert_eq!(lab.node.info().connections.len(), 1, "{control:?}");
        assert_eq!(lab.node.set_tos(s, 0), Err(Error::BadValue), "{control:?}");
    }
}

// tests, T-13 and T-22
#[test]
fn admission_looks_at_the_old_total_only() {
    let mut lab = Lab::smaller();
    let s = lab.bound("10.0.0.1:4000");
    for _ in 0..4 {
        lab.send(s, FAR, &[0; 30_000]).expect("below the buffer before it");
    }
    assert_eq!(lab.node.send_bytes(s), Ok(120_000), "one overshoot");
    assert_eq!(lab.send(s, FAR, &[0; 1]), Err(Error::QueueFull));
    assert_eq!(lab.send(s, FAR, b""), Err(Error::QueueFull), "empty messages wait too");
    assert_eq!(Error::QueueFull.errno(), 11);
    assert_eq!(lab.counter("send_queue_full"), 2);
    assert!(!lab.node.readiness(s).expect("ready").writable);
}

// tests and the limit of B-21
#[test]
fn empty_messages_fill_nothing_but_their_number_is_bounded() {
    let mut config = config(A);
    config.limits.send_messages_per_socket = 20_000;
    let mut lab = Lab::new(config);
    let s = lab.bound("10.0.0.1:4000");
    for _ in 0..20_000 {
        let msg = SendMsg { name: Some(addr(FAR)), ..SendMsg::default() };
        lab.node.send(lab.now, s, &msg).expect("sent");
    }
    assert_eq!(lab.node.send_bytes(s), Ok(0));
    assert_eq!(lab.send(s, FAR, b""), Err(Error::QueueFull));
    assert!(!lab.node.readiness(s).expect("ready").writable);
}

// tests
#[test]
fn acknowledgement_gives_the_room_back_and_wakes_writers() {
    let (mut lab, s, link) = at(A, 4000).dials_kernel();
    assert_eq!(lab.node.send_bytes(s), Ok(0));
    let empty_before = lab.counter("send_queue_empty");
    lab.acks = false;
    for _ in 0..4 {
        lab.send(s, FAR, &[0; 30_000]).expect("sent");
    }
    assert_eq!(lab.send(s, FAR, b"x"), Err(Error::QueueFull));
    lab.node.register(s, Interest::WRITE).expect("registered");
    let total = 4 * 30_048_u64;
    lab.node.handle_tcp_acked(lab.now, link, total - 30_047);
    lab.settle();
    assert_eq!(lab.node.send_bytes(s), Ok(120_000), "not the last byte of the first");
    assert!(lab.wakes.is_empty());
    lab.node.handle_tcp_acked(lab.now, link, total - 30_048);
    lab.settle();
    assert_eq!(lab.node.send_bytes(s), Ok(90_000));
    assert_eq!(lab.wakes, [(s, Interest::WRITE)]);
    lab.node.handle_tcp_acked(lab.now, link, 0);
    lab.settle();
    assert_eq!(lab.node.send_bytes(s), Ok(0));
    assert_eq!(lab.counter("send_queue_empty"), empty_before + 1);
}

// tests
#[test]
fn a_message_to_nobody_stays_queued_without_error() {
    let (mut lab, s) = at(A, 4000).sends(FAR, b"x");
    for _ in 0..20 {
        if let Some((link, ..)) = lab.connects.first().copied() {
            lab.fail(link, bowline_rds::CloseReason::Unreachable);
        }
        lab.ms(1000);
    }
    assert_eq!(lab.node.send_messages(s), Ok(1));
    assert!(lab.node.unsent_total() >= 49);
}

// tests: acknowledgements are asked for by budget and when the buffer is half full
#[test]
fn a_sender_near_its_limit_asks_for_an_acknowledgement() {
    let (mut lab, s, link) = at(B, 4000).paths(1).bowline();
    lab.frames(link);
    let asks = |lab: &mut Lab| -> Vec<bool> {
        let frames = lab.data_frames(link);
        frames.iter().map(|f| f.header.flags.bits() & 2 != 0).collect()
    };
    for _ in 0..10 {
        lab.send(s, "10.0.0.1:5000", b"x").expect("sent");
    }
    let mut first = vec![false; 10];
    first[0] = true;
    assert_eq!(asks(&mut lab), first, "short messages wait for an answer to go with");
    assert_eq!(lab.counter("send_ack_required"), 2, "every eighth counts nevertheless");
    lab.send(s, "10.0.0.1:5000", &[0; 53_000]).expect("sent");
    lab.send(s, "10.0.0.1:5000", &[0; 300]).expect("sent");
    assert_eq!(asks(&mut lab), [false, true], "at half of 106496 bytes");
}

// tests, T-14 and T-25
#[test]
fn cancelling_leaves_a_gap_but_completes_what_was_started() {
    let mut lab = Lab::smaller();
    let s = lab.bound("10.0.0.1:4000");
    let other = lab.bound("10.0.0.1:4001");
    let link = lab.dial_kernel(s, FAR);
    lab.acks = false;
    lab.room = 10_000;
    for n in 0..4_u8 {
        lab.send(s, FAR, &[n; 20_000]).expect("sent");
    }
    lab.send(s, "10.0.0.2:5001", b"another port").expect("sent");
    lab.send(other, FAR, b"another socket").expect("sent");
    let held = |lab: &Lab| -> Vec<_> {
        let held = lab.node.outstanding(s).expect("bound");
        held.iter().map(|h| (h.to.to_string(), h.messages, h.bytes)).collect()
    };
    let (far, near) = (FAR.to_owned(), "10.0.0.2:5001".to_owned());
    let before = [(far, 4, 80_000), (near.clone(), 1, 12)];
    assert_eq!(held(&lab), before);
    assert_eq!(lab.node.cancel_sent_to(lab.now, s, addr(FAR)), Ok(()));
    assert_eq!(lab.node.send_bytes(s), Ok(12), "accounting is free at once");
    let begun = [(FAR.to_owned(), 1, 20_000), (near.clone(), 1, 12)];
    assert_eq!(held(&lab), begun, "what is behind the one begun is gone");
    lab.node.check_invariants();
    lab.unblock(link, usize::MAX);
    let frames = lab.data_frames(link);
    let first = frames[0].header.sequence;
    assert_eq!(frames[0].payload, vec![0; 20_000], "started, so completed");
    let rest: Vec<_> =
        frames[1..].iter().map(|f| (f.header.sequence - first, f.payload.clone())).collect();
    assert_eq!(rest, [(4, b"another port".to_vec()), (5, b"another socket".to_vec())]);
    // The started one is not sent again.
    lab.fail(link, bowline_rds::CloseReason::Reset);
    lab.ms(0);
    let again = lab.establish();
    let frames = lab.data_frames(again);
    assert_eq!(frames.iter().map(|f| f.payload.len()).collect::<Vec<_>>(), [12, 14]);
    assert!(frames.iter().all(Frame::retransmitted));
    assert_eq!(held(&lab), [(near, 1, 12)]);
}

// tests
#[test]
fn cancel_needs_a_bound_socket_and_an_exact_destination() {
    let mut lab = Lab::smaller();
    let unbound = lab.node.socket().expect("a socket");
    assert_eq!(lab.node.cancel_sent_to(lab.now, unbound, addr(FAR)), Err(Error::NotConnected));
    let s = lab.bound("10.0.0.1:4000");
    lab.send(s, FAR, b"kept").expect("sent");
    for other in ["10.0.0.3:5000", "10.0.0.2:5001", "10.0.0.2:0"] {
        lab.node.cancel_sent_to(lab.now, s, addr(other)).expect("nothing to cancel");
        assert_eq!(lab.node.send_bytes(s), Ok(4), "{other}");
    }
}

// tests
#[test]
fn closing_cancels_and_frees_the_port_at_once() {
    let (mut lab, s) = at(A, 4000).sends(FAR, b"never seen");
    lab.node.close(lab.now, s);
    lab.node.check_invariants();
    assert_eq!(lab.node.unsent_total(), 0);
    assert_eq!(lab.node.send_bytes(s), Err(Error::BadSocket));
    assert_eq!(Error::BadSocket.errno(), 9);
    let again = lab.bound("10.0.0.1:4000");
    assert_ne!(again, s, "an id is never used for another socket");
    let link = lab.establish();
    lab.deliver(link, &[map_of(&[]), pong_with(1, npaths_ext(1))]);
    assert!(lab.data_frames(link).is_empty());
}

// tests
#[test]
fn completions_come_eight_to_a_record() {
    let (mut lab, s, link) = at(A, 4000).dials_kernel();
    lab.node.set_zerocopy(s, true).expect("set");
    lab.acks = false;
    for cookie in 0..10 {
        lab.send_with(s, FAR, b"x", &[SendControl::ZcopyCookie(cookie)], true).expect("sent");
    }
    assert!(!lab.node.readiness(s).expect("ready").readable);
    lab.node.register(s, Interest::READ).expect("registered");
    lab.node.handle_tcp_acked(lab.now, link, 0);
    lab.settle();
    assert_eq!(lab.wakes, [(s, Interest::READ)]);
    assert!(lab.node.readiness(s).expect("ready").readable);
    let record = |lab: &mut Lab| lab.recv(s).map(|r| r.control);
    assert_eq!(record(&mut lab), Ok(vec![Control::ZcopyCompletion((0..8).collect())]));
    // The ninth began a record; the tenth found the first one full and began another.
    assert_eq!(record(&mut lab), Ok(vec![Control::ZcopyCompletion(vec![8])]));
    assert_eq!(record(&mut lab), Ok(vec![Control::ZcopyCompletion(vec![9])]));
    assert_eq!(record(&mut lab), Err(Error::Empty));
    // A cancelled message completes too.
    lab.send_with(s, FAR, b"x", &[SendControl::ZcopyCookie(77)], true).expect("sent");
    lab.node.cancel_sent_to(lab.now, s, addr(FAR)).expect("cancelled");
    assert_eq!(record(&mut lab), Ok(vec![Control::ZcopyCompletion(vec![77])]));
}

// tests: what was cancelled behind a released message holds nothing up
#[test]
fn a_cancelled_tail_does_not_keep_the_queue_busy() {
    let (mut lab, s, link) = at(A, 4000).dials_kernel();
    lab.acks = false;
    lab.room = 10;
    lab.send(s, FAR, b"started").expect("sent");
    lab.send(s, "10.0.0.2:6000", b"not started").expect("sent");
    lab.node.cancel_sent_to(lab.now, s, addr("10.0.0.2:6000")).expect("cancelled");
    lab.unblock(link, usize::MAX);
    lab.node.handle_tcp_acked(lab.now, link, 0);
    lab.settle();
    assert_eq!(lab.data_frames(link).len(), 1);
    assert_eq!(lab.node.unsent_total(), 0);
    assert_eq!(lab.node.queued_bytes(link), 0);
}
