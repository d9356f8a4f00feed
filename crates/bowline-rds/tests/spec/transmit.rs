//! Sections 2.6, 3.4 and 5.3: what goes out on a connection, what is released, what is repeated.

use bowline_rds::{CloseReason, Config, Interest, LinkId, Output, RxBuf, SocketId, TxBatch};

use crate::support::*;

const FAR: &str = "10.0.0.2:5000";

// tests: what was cancelled behind a released message holds nothing up
#[test]
fn a_cancelled_tail_does_not_stay_in_the_queue() {
    let (mut lab, s, link) = at(A, 4000).paths(1).dials_kernel();
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
    assert_eq!(lab.node.queued_bytes(link), 0, "nothing is left");
}

// tests [R-2021]: the same between bowline nodes, and the gate opens
#[test]
fn a_cancelled_message_does_not_keep_the_other_paths_waiting() {
    let (mut lab, s) = at(A, 11000).sends(FAR, b"while unknown"); // path 1 of 8
    lab.send(s, "10.0.0.2:6000", b"cancelled").expect("sent");
    lab.room = 8240 + 48 + 10;
    let link = lab.establish();
    lab.node.cancel_sent_to(lab.now, s, addr("10.0.0.2:6000")).expect("cancelled");
    lab.unblock(link, usize::MAX);
    let sent = lab.data_frames(link);
    assert_eq!(sent.len(), 1);
    lab.deliver(link, &[map_of(&[]), ping_with(1, bowline_ext(9, 0, 1 << 20))]);
    let next = lab.establish();
    lab.deliver(next, &[map_of(&[]), hello(9, 1, 0)]);
    lab.send(s, FAR, b"on path 1").expect("sent");
    assert!(lab.data_frames(next).is_empty(), "path 0 has not caught up");
    lab.deliver(link, &[ack_frame(sent[0].header.sequence)]);
    assert_eq!(lab.data_frames(next)[0].payload, b"on path 1");
}

/// A node of one path, a bowline peer of it, and a socket that sends to it.
fn with_bowline() -> (Lab, SocketId, LinkId) {
    let (mut lab, s, link) = at(B, 4000).paths(1).bowline();
    lab.written.clear();
    (lab, s, link)
}

/// A message is being written: the peer has it all, and says so, before the driver reports the
/// write, whose length is returned.
fn acknowledged_during_a_write(lab: &mut Lab, s: SocketId, link: LinkId) -> usize {
    let sent = lab.send_slow(s, "10.0.0.1:5000", &[7; 1000]);
    assert_eq!(sent.link, Some(link));
    let mut batch = TxBatch::default();
    let n = lab.node.poll_transmit(lab.now, link, &mut batch, 1 << 20);
    assert!(n > 1000);
    lab.node.handle_data(lab.now, link, RxBuf::from_vec(ack_frame(last_number(lab)).bytes()));
    n
}

// tests [R-2021] [R-2025]
#[test]
fn an_acknowledgement_during_a_write_counts_when_the_write_ends() {
    let (mut lab, s, link) = with_bowline();
    let n = acknowledged_during_a_write(&mut lab, s, link);
    lab.node.process(lab.now, None, usize::MAX);
    lab.node.check_invariants();
    lab.node.transmitted(lab.now, link, n, false);
    lab.settle();
    assert_eq!(lab.node.send_bytes(s), Ok(0));
}

// tests [R-2021]: the peer acknowledges the last message and ends before the write is reported
#[test]
fn an_acknowledgement_during_a_write_counts_when_the_connection_ends_first() {
    let (mut lab, s, link) = with_bowline();
    let n = acknowledged_during_a_write(&mut lab, s, link);
    lab.node.handle_closed(lab.now, link, CloseReason::Eof);
    lab.node.check_invariants();
    lab.node.transmitted(lab.now, link, n, false);
    lab.settle();
    assert_eq!(lab.node.send_bytes(s), Ok(0));
}

// tests [R-2025]: an absurd acknowledgement in the middle of a write that TCP takes in part
#[test]
fn an_absurd_acknowledgement_releases_nothing_that_is_still_to_be_written() {
    let (mut lab, s, link) = with_bowline();
    lab.room = 0;
    for n in 0..3_u8 {
        let payload = [n; 1000];
        lab.send(s, "10.0.0.1:5000", &payload).expect("sent");
    }
    lab.deliver(link, &[ack_frame(last_number(&lab))]);
    assert_eq!(lab.node.send_bytes(s), Ok(3000), "none was written");
    lab.node.handle_writable(lab.now, link);
    let mut batch = TxBatch::default();
    let n = lab.node.poll_transmit(lab.now, link, &mut batch, 1 << 20);
    assert_eq!(n, 3 * 1048);
    lab.node.handle_data(lab.now, link, RxBuf::from_vec(ack_frame(last_number(&lab)).bytes()));
    lab.node.process(lab.now, None, usize::MAX);
    lab.written.entry(link).or_default().extend(batch.slices().flatten().take(1500));
    lab.node.transmitted(lab.now, link, 1500, true);
    lab.node.check_invariants();
    lab.unblock(link, usize::MAX);
    let frames = lab.data_frames(link);
    assert_eq!(frames.iter().map(|f| f.payload[0]).collect::<Vec<_>>(), [0, 1, 2]);
}

// tests [R-705] [R-2024]: what becomes due while a write is under way is not forgotten
#[test]
fn frames_that_become_due_during_a_write_are_sent_after_it() {
    let (mut lab, s, link) = with_bowline();
    lab.node.set_recv_buffer(s, 2000).expect("set");
    let sent = lab.send_slow(s, "10.0.0.1:5000", b"x");
    let mut batch = TxBatch::default();
    let n = lab.node.poll_transmit(lab.now, link, &mut batch, 1 << 20);
    assert!(n > 0 && sent.link == Some(link));
    lab.node.handle_data(lab.now, link, RxBuf::from_vec(data(1, 9, 4000, &[0; 2001]).bytes()));
    lab.node.process(lab.now, None, usize::MAX);
    lab.node.transmitted(lab.now, link, n, false);
    lab.written.clear();
    lab.settle();
    let frames = lab.frames(link);
    assert!(frames.iter().any(|f| f.is_map() && f.payload[4000 / 8] == 1), "{frames:?}");
    // The same for an acknowledgement that the peer asked for.
    lab.send_slow(s, "10.0.0.1:5000", b"x");
    let n = lab.node.poll_transmit(lab.now, link, &mut batch, 1 << 20);
    let mut asking = data(2, 9, 4001, b"y");
    asking.header.flags = bowline_wire::rds::Flags::ACK_REQUIRED;
    lab.node.handle_data(lab.now, link, RxBuf::from_vec(asking.bytes()));
    lab.node.process(lab.now, None, usize::MAX);
    lab.node.idle(lab.now);
    lab.node.transmitted(lab.now, link, n, false);
    assert!(
        std::iter::from_fn(|| lab.node.poll_output()).any(|o| o == Output::Transmit { link }),
        "the acknowledgement is announced"
    );
}

// tests, T-13
#[test]
fn started_messages_come_again_flagged_and_the_others_plain() {
    let (mut lab, s, link) = at(A, 4000).paths(1).dials_kernel();
    lab.acks = false;
    lab.room = 40_000;
    for n in 0..4_u8 {
        lab.send(s, FAR, &[n; 30_000]).expect("sent");
    }
    let before = lab.written[&link].clone();
    let first = bowline_wire::rds::Header::parse(&before).expect("a header").sequence;
    lab.fail(link, CloseReason::Reset);
    assert_eq!(lab.counter("conn_reset"), 1);
    lab.ms(0);
    lab.room = usize::MAX;
    let again = lab.establish();
    let frames = lab.frames(again);
    assert!(frames[0].is_map(), "the map goes first [R-313]");
    let data: Vec<_> = frames.iter().filter(|f| f.is_data()).collect();
    assert_eq!(data.iter().map(|f| f.payload[0]).collect::<Vec<_>>(), [0, 1, 2, 3]);
    assert_eq!(
        data.iter().map(|f| f.header.sequence - first).collect::<Vec<_>>(),
        [0, 1, 2, 3],
        "numbers are kept"
    );
    assert_eq!(
        data.iter().map(|f| f.header.flags.bits()).collect::<Vec<_>>(),
        [4, 4, 0, 0],
        "of the second a part was written"
    );
}

// tests
#[test]
fn maps_are_never_repeated_but_probes_are() {
    let mut lab = Lab::new(Config { paths: 1, ..config(A) });
    lab.acks = false;
    let (_, link) = lab.dial("10.0.0.1:4000", FAR, b"x");
    // Number 0 is the greeting, made anew for each connection [R-2010].
    let numbered = |f: &&Frame| f.header.is_probe_ping() && f.header.sequence != 0;
    let frames = lab.frames(link);
    let probe = frames.iter().find(numbered).expect("a probe");
    assert_eq!(probe.header.sequence, 1);
    lab.fail(link, CloseReason::Eof);
    lab.ms(0);
    let again = lab.establish();
    let frames = lab.frames(again);
    let probes: Vec<_> = frames.iter().filter(numbered).collect();
    assert_eq!((probes[0].header.sequence, probes[0].retransmitted()), (1, true));
    assert_eq!(frames.iter().filter(|f| f.is_map()).count(), 1);
    assert_eq!(frames.iter().find(|f| f.is_map()).expect("a map").header.flags.bits(), 1);
}

/// A kernel has had the probe, and its answer was lost with the connection. It drops the repeated
/// probe as old, so one that is not flagged follows: behind what is repeated, with the number of
/// the last of that, or the kernel would take its copies for new ones.
// tests
#[test]
fn a_probe_that_is_repeated_is_followed_by_one_that_a_kernel_answers() {
    let mut lab = Lab::new(Config { paths: 1, ..config(A) });
    lab.acks = false;
    let (s, link) = lab.dial("10.0.0.1:4000", FAR, b"x");
    lab.frames(link);
    lab.fail(link, CloseReason::Eof);
    lab.send(s, FAR, b"new").expect("queued");
    lab.ms(0);
    let again = lab.establish();
    let frames = lab.frames(again);
    let numbered = frames.iter().filter(|f| f.header.sequence != 0);
    let sent: Vec<_> = numbered
        .map(|f| (f.header.sequence, f.header.is_probe_ping(), f.retransmitted()))
        .collect();
    assert_eq!(sent, [(1, true, true), (2, false, true), (2, true, false), (3, false, false)]);
    // Once it has gone out, it is not written again.
    lab.send(s, FAR, b"more").expect("sent");
    assert!(lab.frames(again).iter().all(|f| !f.header.is_probe_ping()));
}

// tests: release goes by the last byte, in order
#[test]
fn tcp_releases_whole_messages_only() {
    let (mut lab, s, link) = at(B, 4000).paths(1).kernel(1);
    lab.acks = false;
    for len in [100, 0, 50] {
        lab.send(s, "10.0.0.1:5000", &vec![1; len]).expect("sent");
    }
    assert!(lab.node.wants_tcp_ack(link));
    for (unacked, left) in [(147, 150), (146, 50), (98, 50), (1, 50), (0, 0)] {
        lab.node.handle_tcp_acked(lab.now, link, unacked);
        lab.settle();
        assert_eq!(lab.node.send_bytes(s), Ok(left), "{unacked} unacknowledged");
    }
    assert!(!lab.node.wants_tcp_ack(link));
    lab.node.handle_tcp_acked(lab.now, link, 100);
    assert_eq!(lab.node.send_bytes(s), Ok(0), "acknowledgements never go back");
}

// tests: nothing counts on a dialled connection that is not confirmed
#[test]
fn tcp_acknowledgement_counts_once_the_peer_has_shown_itself() {
    let (mut lab, s, link) = at(A, 4000).paths(1).dials_kernel();
    lab.fail(link, CloseReason::Eof);
    lab.send(s, FAR, b"into a connection that is reset").expect("sent");
    lab.ms(0);
    let swallowed = lab.establish();
    assert_eq!(lab.data_frames(swallowed).len(), 1);
    lab.fail(swallowed, CloseReason::Reset);
    assert_eq!(lab.node.send_messages(s), Ok(1), "acknowledged by TCP, but not served");
    lab.ms(1000);
    let served = lab.establish();
    lab.ms(100);
    assert_eq!(lab.node.send_messages(s), Ok(1), "not confirmed yet");
    lab.ms(200);
    assert_eq!(lab.node.send_messages(s), Ok(0), "it stayed open");
    let again = lab.data_frames(served);
    assert_eq!(again.len(), 1);
    assert!(again[0].retransmitted());
}

// tests: a due map goes between messages, never inside one
#[test]
fn a_map_waits_for_the_end_of_a_started_message() {
    let (mut lab, s, link) = at(B, 4000).paths(1).kernel(1);
    lab.node.set_recv_buffer(s, 2000).expect("set");
    lab.room = 5_000;
    lab.send(s, "10.0.0.1:5000", &[3; 20_000]).expect("sent");
    lab.send(s, "10.0.0.1:5000", &[4; 20_000]).expect("sent");
    lab.deliver(link, &[data(2, 9, 4000, &[0; 2001])]);
    lab.unblock(link, usize::MAX);
    let kinds: Vec<_> =
        lab.frames(link).iter().map(|f| if f.is_map() { 0 } else { f.payload[0] }).collect();
    assert_eq!(kinds, [3, 0, 4]);
}

// tests: a full TCP stops the link until it has room
#[test]
fn a_full_tcp_stops_writing() {
    let (mut lab, s, link) = at(B, 4000).paths(1).kernel(1);
    lab.room = 0;
    lab.send(s, "10.0.0.1:5000", b"waits").expect("sent");
    assert_eq!(lab.counter("tcp_sndbuf_full"), 1);
    assert_eq!(lab.node.queued_bytes(link), 53);
    lab.room = usize::MAX;
    lab.write(link);
    assert!(lab.data_frames(link).is_empty(), "not before TCP has room");
    lab.unblock(link, usize::MAX);
    assert_eq!(lab.data_frames(link).len(), 1);
    assert_eq!(lab.node.queued_bytes(link), 0);
}

// tests: a refused writer is woken by whatever makes room
#[test]
fn cancelling_wakes_a_waiting_writer() {
    let (mut lab, s) = at(A, 4000).paths(1).sends(FAR, &[0; 106_496]);
    lab.node.register(s, Interest::WRITE).expect("registered");
    lab.node.cancel_sent_to(lab.now, s, addr(FAR)).expect("cancelled");
    lab.settle();
    assert_eq!(lab.wakes, [(s, Interest::WRITE)]);
}
