//! Sections 1, 2.4, 2.5, 6.1: framing, duplicates, limits, and peers that send nonsense.

use bowline_rds::{
    CloseHow, CloseReason, Config, Error, Event, LinkId, Misbehaviour, RxBuf, SocketId,
};
use bowline_wire::rds::{Flags, HEADER_LEN};

use crate::support::*;

fn with_kernel() -> (Lab, LinkId, SocketId) {
    let (lab, s, link) = at(B, 5000).kernel(1);
    (lab, link, s)
}

// tests, T-7
#[test]
fn header_fields_without_meaning_are_ignored() {
    let (mut lab, link, s) = with_kernel();
    for bits in [0x02, 0x08, 0x10, 0x20, 0x40, 0x80, 0xf8] {
        let mut frame = data(2, 9, 5000, &[bits]);
        frame.header.flags = Flags::from_bits(bits);
        (frame.header.ack, frame.header.credit, frame.header.csum) = (u64::MAX, 255, 0xbad);
        let mut bytes = frame.bytes();
        bytes[26..30].fill(0xff); // padding
        lab.feed(link, &bytes);
        assert_eq!(lab.recv_all(s), [[bits]], "flags {bits:#x}");
    }
}

// tests, T-8, with the duplicate test of R-422
#[test]
fn gaps_and_lower_numbers_are_taken() {
    let (mut lab, link, s) = with_kernel();
    for seq in [100, 50, 51, 7, u64::MAX] {
        lab.deliver(link, &[data(seq, 9, 5000, &seq.to_be_bytes())]);
    }
    assert_eq!(lab.recv_all(s).len(), 5);
    assert_eq!(lab.node.info().connections[0].next_rx_seq, 0, "wraps [R-602]");
    // Flagged, but not one that was seen on another connection: taken, unlike a kernel would.
    lab.deliver(link, &[flagged(data(50, 9, 5000, b"new text"))]);
    assert_eq!(lab.recv_all(s), [b"new text"]);
}

// tests: what came whole on a connection that broke is dropped when it comes again
#[test]
fn a_repeated_message_is_delivered_once() {
    let (mut lab, link, s) = with_kernel();
    let frames = [data(2, 9, 5000, b"two"), data(3, 9, 5000, b"three")];
    lab.deliver(link, &frames);
    lab.fail(link, CloseReason::Reset);
    let again = lab.accept(A);
    let repeated = frames.clone().map(flagged);
    lab.deliver(again, &repeated);
    lab.deliver(again, &[data(4, 9, 5000, b"four"), flagged(data(5, 9, 5000, b"not seen"))]);
    assert_eq!(lab.recv_all(s), [&b"two"[..], b"three", b"four", b"not seen"]);
    assert_eq!(lab.counter("recv_drop_old_seq"), 2);
    // Again on a third connection.
    lab.fail(again, CloseReason::Reset);
    let third = lab.accept(A);
    lab.deliver(third, &repeated);
    assert_eq!(lab.counter("recv_drop_old_seq"), 4);
    // Unflagged messages are never duplicates.
    lab.deliver(third, &frames);
    assert_eq!(lab.recv_all(s).len(), 2);
}

// tests: paths may be paired differently after a reconnect
#[test]
fn a_repeat_on_another_path_is_recognised() {
    let mut lab = Lab::larger();
    let zero = lab.kernel(A, 8);
    let one = lab.accept(A);
    let s = lab.bound("10.0.0.2:5000");
    lab.deliver(one, &[data(7, 9, 5000, b"on one")]);
    lab.deliver(zero, &[data(7, 9, 5000, b"on zero"), data(3, 9, 5000, b"low")]);
    lab.fail(one, CloseReason::Reset);
    lab.fail(zero, CloseReason::Reset);
    let (first, second) = (lab.accept(A), lab.accept(A));
    lab.deliver(first, &[flagged(data(7, 9, 5000, b"on one"))]);
    lab.deliver(second, &[flagged(data(7, 9, 5000, b"on zero"))]);
    assert_eq!(lab.recv_all(s), [&b"on one"[..], b"on zero", b"low"]);
}

// tests and 2.5, T-15 and T-16
#[test]
fn half_a_message_is_discarded_and_whole_ones_count() {
    let (mut lab, link, s) = with_kernel();
    let frame = data(3, 9, 5000, b"cut in two");
    let mut bytes = data(2, 9, 5000, b"whole").bytes();
    bytes.extend_from_slice(&frame.bytes()[..52]);
    // Handed over, and closed before anything was parsed.
    lab.node.handle_data(lab.now, link, RxBuf::from_vec(bytes));
    lab.fail(link, CloseReason::Eof);
    assert_eq!(lab.recv_all(s), [b"whole"]);
    let again = lab.accept(A);
    lab.deliver(again, &[flagged(frame)]);
    assert_eq!(lab.recv_all(s), [b"cut in two"]);
    assert_eq!(lab.node.info().links[0].header_remaining, 48);
}

// tests
#[test]
fn a_message_beyond_the_limit_costs_the_connection() {
    for (max_message, len, taken) in [
        (1 << 20, 1 << 20, true),
        (1 << 20, (1 << 20) + 1, false),
        (2 << 20, 2 << 20, true),
        (1000, 1 << 20, true),
        (1 << 20, u32::MAX, false),
    ] {
        let mut lab = Lab::new(Config { max_message, ..config(B) });
        let link = lab.kernel(A, 1);
        let s = lab.bound("10.0.0.2:5000");
        let mut header = data(2, 9, 5000, b"").header;
        header.len = len;
        lab.feed(link, &header.to_bytes());
        if taken {
            lab.feed(link, &vec![1; len as usize]);
            assert_eq!(lab.recv_all(s)[0].len(), len as usize);
        } else {
            assert_eq!(lab.closes, [(link, CloseHow::Reset)], "{len} of {max_message}");
            assert_eq!(lab.counter("bl_peer_oversized"), 1);
            let what = Misbehaviour::MessageTooLong;
            assert!(lab.events.contains(&Event::Misbehaved { remote: ip(A), what }));
            // The node has forgotten the link.
            lab.feed(link, &[0; 100]);
            assert!(!lab.node.wants_read(link));
        }
    }
}

// tests: what nobody reads is taken all the same
#[test]
fn unknown_extensions_and_ports_do_no_harm() {
    let (mut lab, link, s) = with_kernel();
    let mut frame = data(2, 9, 5000, b"x");
    frame.header.ext = [0xff; 16];
    let mut more = data(3, 9, 5000, b"y");
    more.header.ext[..3].copy_from_slice(&[5, 0, 2]);
    lab.deliver(link, &[frame, more, data(4, 9, 5999, b"nobody")]);
    assert_eq!(lab.recv_all(s), [b"x", b"y"]);
    assert_eq!(lab.counter("recv_drop_no_sock"), 1);
    assert_eq!(lab.node.info().connections[0].npaths, 1, "NPATHS counts in probes only [R-116]");
}

// tests the limits of memory: reading stops, and goes on when readers have made room
#[test]
fn slow_readers_stop_the_reading_of_their_peer() {
    let mut config = config(B);
    config.limits.recv_bytes_per_peer = 10_000;
    let mut lab = Lab::new(config);
    let link = lab.kernel(A, 1);
    let other = lab.kernel("10.0.0.0", 1);
    let s = lab.bound("10.0.0.2:5000");
    for n in 0..4 {
        lab.deliver(link, &[data(2 + n, 9, 5000, &[0; 5000])]);
    }
    assert!(!lab.node.wants_read(link));
    assert_eq!(lab.counter("bl_read_pauses"), 1);
    assert_eq!(lab.node.info().sockets[0].recv_messages, 2, "the rest is not parsed");
    assert!(lab.node.wants_read(other), "the other peer is not stopped");
    lab.resumes.clear();
    lab.recv(s).expect("a message");
    assert_eq!(lab.resumes, [link]);
    assert_eq!(lab.recv_all(s).len(), 3, "all four in the end");
    assert!(lab.node.wants_read(link));
    // One that ends while it is not read is not kept in mind, see the invariants.
    for n in 0..4 {
        lab.deliver(link, &[data(6 + n, 9, 5000, &[0; 5000])]);
    }
    assert!(!lab.node.wants_read(link));
    lab.fail(link, CloseReason::Reset);
    assert_eq!(lab.recv_all(s).len(), 4, "TCP has acknowledged them");
}

// tests the limit of the whole node
#[test]
fn the_memory_of_the_node_is_bounded_too() {
    let mut config = config(B);
    config.limits.recv_bytes_total = 10_000;
    let mut lab = Lab::new(config);
    let links = [lab.kernel(A, 1), lab.kernel("10.0.0.0", 1)];
    let s = lab.bound("10.0.0.2:5000");
    for n in 0..4 {
        lab.deliver(links[n as usize % 2], &[data(2 + n, 9, 5000, &[0; 5000])]);
    }
    assert_eq!(lab.node.info().sockets[0].recv_messages, 2);
    assert!(links.iter().all(|l| !lab.node.wants_read(*l)));
    lab.node.close(lab.now, s);
    lab.settle();
    assert!(links.iter().all(|l| lab.node.wants_read(*l)), "closing makes room");
}

/// Empty messages fill no buffer, so their number congests a port [B-33].
#[test]
fn many_empty_messages_congest_a_port() {
    let mut config = config(B);
    config.limits.recv_messages_per_socket = 100;
    config.recv_buffer = 4000; // room for 62 small messages
    let mut lab = Lab::new(config);
    let link = lab.kernel(A, 1);
    let reader = lab.bound("10.0.0.2:5000");
    let sender = lab.bound("10.0.0.2:6000");
    let is_congested = |lab: &Lab| lab.node.info().sockets[0].congested;
    lab.deliver(link, &(2..52).map(|n| data(n, 9, 5000, b"")).collect::<Vec<_>>());
    for _ in 0..50 {
        lab.send(sender, "10.0.0.2:5000", b"").expect("room for 100");
    }
    assert!(!is_congested(&lab));
    lab.send(sender, "10.0.0.2:5000", b"").expect("the one too many is taken");
    assert!(is_congested(&lab));
    assert_eq!(lab.send(sender, "10.0.0.2:5000", b""), Err(Error::Congested));
    for _ in 0..51 {
        lab.recv(reader).expect("one of 101");
        assert!(is_congested(&lab));
    }
    lab.recv(reader).expect("one of 50");
    assert!(!is_congested(&lab), "fewer than half");
    lab.send(sender, "10.0.0.2:5000", b"").expect("room again");
    // A peer that sends all the same finds the bound as well.
    lab.deliver(link, &(52..200).map(|n| data(n, 9, 5000, b"")).collect::<Vec<_>>());
    assert!(is_congested(&lab));
}

/// Programs that leave each other's messages unread keep no peer waiting [B-33].
#[test]
fn messages_within_the_node_stop_no_peer() {
    let mut config = config(B);
    config.limits.recv_bytes_total = 10_000;
    let mut lab = Lab::new(config);
    let link = lab.kernel(A, 1);
    let unread = lab.bound("10.0.0.2:5000");
    let other = lab.bound("10.0.0.2:6000");
    for _ in 0..20 {
        lab.send(other, "10.0.0.2:5000", &[0; 1000]).expect("room in its buffer");
    }
    lab.deliver(link, &[data(2, 9, 6000, b"mine")]);
    assert!(lab.node.wants_read(link));
    assert_eq!(lab.recv(other).map(|got| text(&got)), Ok(b"mine".to_vec()));
    assert_eq!(lab.recv_all(unread).len(), 20);
}

/// A peer sends what gives work and fills no receive buffer, as fast as it can. Another one's
/// message arrives behind that.
// tests the turns of `process`
#[test]
fn a_flood_of_pings_or_maps_waits_for_its_turn() {
    let pings: Vec<_> = (2..5_000).map(|n| data(n, 9, 0, b"")).collect();
    let maps: Vec<_> = (0..30).map(|_| map_of(&[77])).collect();
    for (flooding, counter, turn) in [(pings, "recv_ping", 64), (maps, "cong_update_received", 4)] {
        let mut lab = Lab::new(config(B));
        let flood = lab.kernel(A, 1);
        let other = lab.kernel("10.0.0.0", 1);
        let s = lab.bound("10.0.0.2:5000");
        let before = lab.counter(counter);
        let bytes = flooding.iter().flat_map(Frame::bytes).collect();
        lab.node.handle_data(lab.now, flood, RxBuf::from_vec(bytes));
        let message = RxBuf::from_vec(data(2, 9, 5000, b"mine").bytes());
        lab.node.handle_data(lab.now, other, message);
        assert!(lab.node.process(lab.now, None, 256));
        assert_eq!(lab.counter(counter) - before, turn);
        assert!(lab.node.process(lab.now, None, 256));
        assert!(lab.counter(counter) - before <= 2 * turn);
        assert_eq!(lab.recv(s).map(|got| text(&got)), Ok(b"mine".to_vec()));
    }
}

// tests the contract of `process` and of reading: a full backlog always ends in a Resume
#[test]
fn a_full_backlog_resumes_reading_however_it_is_parsed() {
    for budget in [1, 2, usize::MAX] {
        let (mut lab, link, s) = with_kernel();
        let mut n = 0;
        while lab.node.wants_read(link) {
            n += 1;
            let bytes = data(1 + n, 9, 5000, b"x").bytes();
            lab.node.handle_data(lab.now, link, RxBuf::from_vec(bytes));
        }
        let until = (budget == 2).then_some(s);
        let mut resumed = false;
        for _ in 0..2 * n {
            lab.node.process(lab.now, until, budget);
            let out = std::iter::from_fn(|| lab.node.poll_output()).collect::<Vec<_>>();
            resumed |= out.contains(&bowline_rds::Output::Resume { link });
        }
        assert!(resumed && lab.node.wants_read(link), "budget {budget}");
        assert!(!lab.node.has_backlog());
        assert_eq!(lab.recv_all(s).len() as u64, n);
    }
}

// tests `process`: it stops for the reader that waits, and shares its budget
#[test]
fn parsing_stops_for_a_waiting_reader() {
    let (mut lab, link, s) = with_kernel();
    let other = lab.bound("10.0.0.2:5001");
    lab.node.set_recv_buffer(s, 1152).expect("set");
    let bytes: Vec<u8> = [5001, 5001, 5000, 5001]
        .iter()
        .enumerate()
        .flat_map(|(n, port)| data(2 + n as u64, 9, *port, &[0; 400]).bytes())
        .collect();
    lab.node.handle_data(lab.now, link, RxBuf::from_vec(bytes));
    assert!(lab.node.process(lab.now, Some(s), usize::MAX), "bytes remain");
    assert!(lab.node.readiness(s).expect("ready").readable);
    assert!(!lab.node.process(lab.now, None, usize::MAX));
    assert_eq!(lab.recv_all(other).len(), 3);
}

// tests: what older connections have received comes first
#[test]
fn an_extra_connection_is_not_read_before_the_older_ones_are() {
    let mut lab = Lab::larger();
    let link = lab.kernel(A, 1);
    let local = addr("10.0.0.2:16385");
    let extra = lab.node.handle_accepted(lab.now, local, addr("10.0.0.1:41000")).expect("taken");
    assert!(!lab.node.wants_read(extra), "until the first is looked at");
    lab.node.handle_checked(lab.now, link);
    assert!(lab.node.wants_read(extra));
    let resumed = std::iter::from_fn(|| lab.node.poll_output())
        .any(|o| o == bowline_rds::Output::Resume { link: extra });
    assert!(resumed);
    lab.node.check_invariants();
}

// tests that a stream of anything at all breaks nothing but its own connection
#[test]
fn streams_of_one_byte_value() {
    for byte in [0x00, 0x01, 0x04, 0x42, 0x7f, 0xff] {
        let mut lab = Lab::larger();
        let link = lab.accept(A);
        let honest = lab.kernel("10.0.0.0", 1);
        let s = lab.bound("10.0.0.2:5000");
        for _ in 0..100 {
            lab.feed(link, &vec![byte; HEADER_LEN * 7 + 5]);
        }
        lab.deliver(honest, &[data(2, 9, 5000, b"served")]);
        assert_eq!(lab.recv_all(s), [b"served"], "byte {byte}");
    }
}
