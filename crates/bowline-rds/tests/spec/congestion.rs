//! Sections 6.2, 6.6 and 7: receive accounting, maps, refused senders, monitoring, loopback.

use std::time::Duration;

use bowline_rds::{
    CloseHow, CloseReason, Config, Control, Error, Interest, LinkId, RecvOpts, SendMsg, poll,
};

use crate::support::*;

const FAR: &str = "10.0.0.1:4000";

/// A larger node with a kernel on the smaller address, and a bound socket.
fn with_kernel() -> (Lab, LinkId, bowline_rds::SocketId) {
    let (lab, s, link) = at(B, 5000).kernel(1);
    (lab, link, s)
}

/// Ports marked in the maps the node has sent since the last look.
fn maps(lab: &mut Lab, link: LinkId) -> Vec<Vec<u16>> {
    let maps = lab.frames(link).into_iter().filter(Frame::is_map);
    maps.map(|f| {
        let view = bowline_wire::rds::MapView::new(&f.payload).expect("8192 bytes");
        view.congested_ports().collect()
    })
    .collect()
}

// tests [R-611], T-12
#[test]
fn thresholds_are_strict_on_both_sides() {
    let (mut lab, link, s) = with_kernel();
    lab.node.set_recv_buffer(s, 4000).expect("set");
    lab.deliver(link, &[data(2, 9, 5000, &[0; 4000])]);
    assert!(maps(&mut lab, link).is_empty(), "exactly the buffer");
    lab.deliver(link, &[data(3, 9, 5000, &[0; 1])]);
    let frames = lab.frames(link);
    assert_eq!(frames.len(), 1);
    assert_eq!(frames[0].header, bowline_wire::rds::Header::map(), "all else is zero");
    assert_eq!(frames[0].payload[625], 1, "port 5000 is byte 625, bit 0");
    assert_eq!(frames[0].payload.iter().filter(|b| **b != 0).count(), 1);
    lab.deliver(link, &[data(4, 9, 5000, &[0; 1999])]);
    assert!(maps(&mut lab, link).is_empty(), "marked already");
    lab.recv(s).expect("4000 bytes");
    assert!(maps(&mut lab, link).is_empty(), "at half: 2000");
    lab.recv(s).expect("one byte");
    assert_eq!(maps(&mut lab, link), [[0_u16; 0]], "1999 is below half");
    assert_eq!(lab.counter("cong_update_queued"), 1);
}

// tests, T-28
#[test]
fn messages_are_queued_beyond_the_receive_buffer() {
    let (mut lab, link, s) = with_kernel();
    lab.node.set_recv_buffer(s, 4000).expect("set");
    for n in 0..80 {
        lab.deliver(link, &[data(2 + n, 9, 5000, &[0; 100_000])]);
    }
    assert_eq!(maps(&mut lab, link), [[5000]]);
    assert_eq!(lab.node.info().sockets[0].recv_messages, 80);
    lab.deliver(link, &[data(90, 9, 5000, b"")]);
    assert_eq!(lab.node.info().sockets[0].recv_bytes, 8_000_000, "empty ones count nothing");
}

// tests
#[test]
fn a_new_buffer_size_is_looked_at_with_the_next_byte() {
    let (mut lab, link, s) = with_kernel();
    lab.deliver(link, &[data(2, 9, 5000, &[0; 5000])]);
    lab.node.set_recv_buffer(s, 10).expect("set");
    assert_eq!(lab.node.recv_buffer(s), Ok(1152), "the least there is");
    lab.deliver(link, &[data(3, 9, 5000, b"")]);
    assert!(maps(&mut lab, link).is_empty(), "an empty message changes nothing");
    lab.deliver(link, &[data(4, 9, 5000, b"x")]);
    assert_eq!(maps(&mut lab, link), [[5000]]);
    lab.node.set_recv_buffer(s, 100_000).expect("set");
    lab.deliver(link, &[data(5, 9, 5000, b"")]);
    assert!(maps(&mut lab, link).is_empty());
    lab.deliver(link, &[data(6, 9, 5000, b"x")]);
    assert_eq!(maps(&mut lab, link), [[0_u16; 0]], "adding can clear, too");
}

// tests: closing clears the bit
#[test]
fn closing_a_congested_socket_clears_its_bit() {
    let (mut lab, link, s) = with_kernel();
    lab.node.set_recv_buffer(s, 2000).expect("set");
    lab.deliver(link, &[data(2, 9, 5000, &[0; 2001])]);
    assert_eq!(maps(&mut lab, link), [[5000]]);
    lab.node.close(lab.now, s);
    lab.settle();
    assert_eq!(maps(&mut lab, link), [[0_u16; 0]]);
}

// tests [R-718] [B-10]
#[test]
fn switching_the_monitor_off_leaves_the_ports_own_bit() {
    let (mut lab, link, s) = with_kernel();
    lab.node.set_recv_buffer(s, 2000).expect("set");
    lab.deliver(link, &[data(2, 9, 5000, &[0; 2001])]);
    lab.node.set_cong_monitor(s, true).expect("set");
    lab.node.set_cong_monitor(s, false).expect("set");
    lab.settle();
    assert_eq!(maps(&mut lab, link), [[5000]]);
    assert!(lab.node.info().sockets[0].congested);
}

// tests: every peer of the address is told, once
#[test]
fn all_peers_of_an_address_get_its_map() {
    let mut lab = Lab::new(Config { addrs: vec![ip(B), ip("10.0.0.9")], ..Config::default() });
    let one = lab.kernel(A, 1);
    let two = lab.kernel("10.0.0.0", 1);
    let s = lab.bound("10.0.0.2:5000");
    let elsewhere = lab.bound("10.0.0.9:5000");
    lab.node.set_recv_buffer(s, 2000).expect("set");
    lab.node.set_recv_buffer(elsewhere, 2000).expect("set");
    lab.deliver(one, &[data(2, 9, 5000, &[0; 2001])]);
    assert_eq!(maps(&mut lab, one), [[5000]]);
    assert_eq!(maps(&mut lab, two), [[5000]]);
    // A map holds the ports of one address only.
    let far = lab.bound("10.0.0.9:77");
    lab.send(far, "10.0.0.9:5000", &[0; 2001]).expect("sent");
    assert!(maps(&mut lab, one).is_empty());
}

// tests, T-11
#[test]
fn a_marked_port_refuses_new_messages_only() {
    let (mut lab, link, s) = with_kernel();
    lab.room = 0;
    lab.send(s, FAR, b"before").expect("sent");
    lab.deliver(link, &[map_of(&[4000])]);
    assert_eq!(lab.counter("cong_update_received"), 2);
    assert_eq!(lab.send(s, FAR, b"x"), Err(Error::Congested));
    assert_eq!(Error::Congested.errno(), 105);
    assert_eq!(lab.counter("cong_send_error"), 1);
    lab.send(s, "10.0.0.1:4001", b"other port").expect("sent");
    lab.send(s, "10.0.0.9:4000", b"other address").expect("sent");
    let blocking = SendMsg { name: Some(addr(FAR)), blocking: true, ..SendMsg::default() };
    assert_eq!(lab.node.send(lab.now, s, &blocking), Err(Error::Congested));
    assert_eq!(lab.counter("cong_send_blocked"), 1);
    assert_eq!(lab.counter("cong_send_error"), 1);
    lab.unblock(link, usize::MAX);
    let sent = lab.data_frames(link);
    assert_eq!(sent[0].payload, b"before", "what was queued goes out");
}

// tests: congestion is tested before the queue
#[test]
fn congestion_comes_before_a_full_queue() {
    let (mut lab, link, s) = with_kernel();
    lab.acks = false;
    lab.send(s, FAR, &[0; 106_496]).expect("sent");
    lab.deliver(link, &[map_of(&[4000])]);
    assert_eq!(lab.send(s, FAR, b"x"), Err(Error::Congested));
    assert_eq!(lab.send(s, "10.0.0.1:4001", b"x"), Err(Error::QueueFull));
}

// tests, T-11
#[test]
fn no_pong_goes_to_a_marked_port() {
    let (mut lab, link, _) = with_kernel();
    lab.deliver(link, &[map_of(&[77]), data(2, 77, 0, b""), data(3, 78, 0, b"")]);
    let frames = lab.frames(link);
    assert_eq!(frames.len(), 1);
    assert_eq!((frames[0].header.sport, frames[0].header.dport), (0, 78));
    assert_eq!(lab.counter("cong_send_error"), 1);
}

// tests, T-10
#[test]
fn maps_of_another_shape_have_no_effect() {
    let (mut lab, link, s) = with_kernel();
    let mut odd = map_of(&[4000]);
    odd.header.flags = bowline_wire::rds::Flags::from_bits(0x05);
    let mut short = map_of(&[4000]);
    short.payload.truncate(8191);
    short.header.len = 8191;
    let mut long = map_of(&[4000]);
    long.payload.push(0);
    long.header.len = 8193;
    lab.deliver(link, &[odd, short, long]);
    lab.send(s, FAR, b"not congested").expect("sent");
    assert!(lab.closes.is_empty(), "and are no reason to drop the connection");
    assert_eq!(lab.counter("bl_peer_nonsense"), 2, "those of a wrong length are counted");
    // The last one counts as a whole.
    lab.deliver(link, &[map_of(&[4000, 4001]), map_of(&[4001])]);
    lab.send(s, FAR, b"x").expect("sent");
    assert_eq!(lab.send(s, "10.0.0.1:4001", b"x"), Err(Error::Congested));
}

// tests
#[test]
fn congestion_of_a_peer_survives_a_disconnect() {
    let (mut lab, link, s) = with_kernel();
    lab.deliver(link, &[map_of(&[4000])]);
    lab.fail(link, CloseReason::Reset);
    assert_eq!(lab.send(s, FAR, b"x"), Err(Error::Congested));
    let again = lab.accept(A);
    lab.deliver(again, &[map_of(&[])]);
    lab.send(s, FAR, b"x").expect("sent");
}

// tests, and the real transitions of D-10
#[test]
fn a_monitor_reports_the_groups_that_became_free() {
    let (mut lab, link, s) = with_kernel();
    lab.node.set_cong_monitor(s, true).expect("set");
    lab.deliver(link, &[map_of(&[4000, 4001, 130])]);
    for port in [4000, 4001, 130] {
        assert_eq!(lab.send(s, &format!("10.0.0.1:{port}"), b"x"), Err(Error::Congested));
    }
    assert!(!lab.node.readiness(s).expect("ready").readable);
    lab.node.register(s, Interest::READ).expect("registered");
    lab.deliver(link, &[map_of(&[4001, 130])]);
    assert!(lab.wakes.contains(&(s, Interest::READ)));
    lab.deliver(link, &[map_of(&[4001])]);
    assert_eq!(lab.node.poll(s), Ok(poll::IN | poll::OUT), "no band bit with the monitor on");
    let got = lab.recv(s).expect("a notification");
    assert!(got.source.is_none() && got.data.is_none());
    assert_eq!(got.control, [Control::CongestionUpdate(1 << (4000 % 64) | 1 << (130 % 64))]);
    assert_eq!(lab.recv(s).err(), Some(Error::Empty), "reading clears it");
    // Off: forgotten.
    assert_eq!(lab.send(s, "10.0.0.1:4001", b"x"), Err(Error::Congested));
    lab.node.set_cong_monitor(s, false).expect("set");
    lab.deliver(link, &[map_of(&[])]);
    assert_eq!(lab.recv(s).err(), Some(Error::Empty));
}

// tests the order of 6.4, and B-17: a notification waits for a reader that takes it
#[test]
fn notifications_come_before_messages_but_not_to_readers_without_control() {
    let (mut lab, link, s) = with_kernel();
    lab.node.set_cong_monitor(s, true).expect("set");
    lab.deliver(link, &[map_of(&[4000])]);
    assert_eq!(lab.send(s, FAR, b"x"), Err(Error::Congested));
    lab.deliver(link, &[map_of(&[]), data(2, 9, 5000, b"text")]);
    let plain = RecvOpts { peek: true, ..RecvOpts::default() };
    let got = lab.node.recv(lab.now, s, plain).expect("the message");
    assert_eq!(text(&got), b"text");
    assert_eq!(lab.recv(s).expect("notification").control.len(), 1);
    assert_eq!(text(&lab.recv(s).expect("message")), b"text");
}

// tests
#[test]
fn poll_shows_a_changed_map_once() {
    let (mut lab, _, s) = with_kernel();
    assert_eq!(lab.node.poll(s), Ok(0x345), "a map has come before the socket was made");
    assert_eq!(lab.node.poll(s), Ok(0x104));
    let mut fresh = Lab::larger();
    let f = fresh.node.socket().expect("a socket");
    assert_eq!(fresh.node.poll(f), Ok(0x104), "writable though unbound");
    fresh.node.check_invariants();
}

// tests, T-29
#[test]
fn a_refused_sender_is_woken_by_any_map() {
    let (mut lab, link, s) = with_kernel();
    lab.deliver(link, &[map_of(&[4000])]);
    lab.node.register(s, Interest::WRITE).expect("registered");
    lab.deliver(link, &[map_of(&[4000])]);
    assert!(lab.wakes.is_empty(), "no send was refused before");
    assert_eq!(lab.send(s, FAR, b"x"), Err(Error::Congested));
    lab.node.register(s, Interest::WRITE).expect("registered");
    lab.node.register(s, Interest::WRITE).expect("registered");
    lab.deliver(link, &[map_of(&[4000])]);
    assert_eq!(lab.wakes, [(s, Interest::WRITE)], "once, whatever changed");
    // An evaluation of poll uses the mark up.
    assert_eq!(lab.send(s, FAR, b"x"), Err(Error::Congested));
    lab.node.poll(s).expect("polled");
    lab.wakes.clear();
    lab.node.register(s, Interest::WRITE).expect("registered");
    lab.deliver(link, &[map_of(&[])]);
    assert!(lab.wakes.is_empty());
}

// tests
#[test]
fn own_addresses_are_reached_without_tcp() {
    let mut lab = Lab::new(Config { addrs: vec![ip(A), ip(B)], ..Config::default() });
    let a = lab.bound("10.0.0.1:4000");
    let b = lab.bound("10.0.0.2:5000");
    lab.send(a, "10.0.0.2:5000", b"near").expect("sent");
    assert_eq!(lab.node.send_bytes(a), Ok(0), "free at once");
    assert!(lab.connects.is_empty());
    let got = lab.recv(b).expect("a message");
    assert_eq!((got.source, text(&got)), (Some(addr("10.0.0.1:4000")), b"near".to_vec()));
    lab.send(a, "10.0.0.2:5001", b"nobody").expect("sent, and dropped");
    assert_eq!(lab.counter("recv_drop_no_sock"), 1);
}

// tests: congestion is that of the receiver, the pong goes to the pinger
#[test]
fn loopback_between_two_addresses_is_like_any_other_way() {
    let mut lab = Lab::new(Config { addrs: vec![ip(A), ip(B)], ..Config::default() });
    let a = lab.bound("10.0.0.1:4000");
    let b = lab.bound("10.0.0.2:4000");
    lab.node.set_recv_buffer(b, 2000).expect("set");
    lab.send(a, "10.0.0.2:4000", &[0; 2001]).expect("sent");
    assert_eq!(lab.send(a, "10.0.0.2:4000", b"x"), Err(Error::Congested));
    lab.send(b, "10.0.0.1:4000", b"the other way is free").expect("sent");
    lab.node.register(a, Interest::WRITE).expect("registered");
    lab.recv(b).expect("drained");
    assert_eq!(lab.wakes, [(a, Interest::WRITE)], "no map comes, but waiters are woken [R-653]");
    lab.send(a, "10.0.0.2:4000", b"x").expect("sent");
    lab.recv(a).expect("the other way");
    lab.send(a, "10.0.0.2:0", b"ping").expect("sent");
    let pong = lab.recv(a).expect("a pong");
    assert_eq!((pong.source, text(&pong)), (Some(addr("10.0.0.2:0")), vec![]));
    assert_eq!(lab.counter("recv_ping"), 1);
    // No pong to a congested pinger, none when pings are off.
    lab.node.set_recv_buffer(a, 2000).expect("set");
    lab.send(b, "10.0.0.1:4000", &[0; 2001]).expect("sent");
    lab.send(a, "10.0.0.2:0", b"").expect("sent");
    assert_eq!(lab.counter("cong_send_error"), 2);
    lab.recv(a).expect("the long one");
    assert_eq!(lab.recv(a).err(), Some(Error::Empty));
    lab.node.set_sysctl(lab.now, "net.rds.ping_enable", 0).expect("set");
    lab.send(a, "10.0.0.2:0", b"").expect("sent");
    assert_eq!(lab.recv(a).err(), Some(Error::Empty));
}

// tests
#[test]
fn the_loopback_transport_reaches_nothing_outside() {
    let mut lab = Lab::new(Config::default());
    let s = lab.bound("127.0.0.1:4000");
    lab.send(s, "10.0.0.2:5000", b"x").expect("sent, and dropped");
    assert_eq!(lab.counter("recv_drop_no_sock"), 1);
    assert_eq!(lab.counter("send_queued"), 1);
    lab.send(s, "127.0.0.1:4000", b"self").expect("sent");
    assert_eq!(lab.recv_all(s), [b"self"]);
}

// tests: maps of two connections that come together may be read in the wrong order
#[test]
fn a_map_that_may_be_an_old_one_is_had_again() {
    let (mut lab, s, first) = at(B, 5000).kernel(8);
    let others: Vec<_> = (1..8).map(|_| lab.accept(A)).collect();
    // one connection: the last map is the newest, however long it stands
    lab.ms(300);
    lab.deliver(first, &[map_of(&[4000])]);
    lab.ms(2000);
    assert!(lab.closes.is_empty(), "{:?}", lab.closes);
    // read as free first and congested then; it was the other way round
    lab.deliver(first, &[map_of(&[])]);
    lab.ms(100);
    lab.deliver(others[2], &[map_of(&[4000])]);
    assert_eq!(lab.send(s, FAR, b"x"), Err(Error::Congested));
    lab.ms(1490);
    assert!(lab.closes.is_empty(), "there may still be one on its way");
    lab.ms(20);
    assert_eq!(lab.closes, [(others[6], CloseHow::Drain)]);
    assert_eq!(lab.counter("bl_map_refreshes"), 1);
    lab.node.handle_closed(lab.now, others[6], CloseReason::Eof);
    lab.settle();
    let again = lab.accept(A);
    lab.deliver(again, &[map_of(&[])]);
    lab.send(s, FAR, b"x").expect("sent");
    lab.ms(3000);
    assert_eq!(lab.closes.len(), 1);
}

// tests: the fresh map itself is no reason to ask for another
#[test]
fn a_port_that_is_congested_is_asked_about_once() {
    let mut lab = Lab::larger();
    let first = lab.kernel(A, 8);
    let others: Vec<_> = (1..8).map(|_| lab.accept(A)).collect();
    lab.deliver(first, &[map_of(&[4001])]);
    lab.deliver(others[2], &[map_of(&[4000])]);
    lab.ms(1510);
    assert_eq!(lab.closes, [(others[6], CloseHow::Drain)]);
    lab.node.handle_closed(lab.now, others[6], CloseReason::Eof);
    lab.settle();
    let again = lab.accept(A);
    lab.deliver(again, &[map_of(&[4000])]);
    lab.ms(5000);
    assert_eq!(lab.counter("bl_map_refreshes"), 1);
}

/// A kernel writes its map into the full buffer of one connection, then a newer one into that of
/// another, where there is room. The older one comes behind another old one of its connection, and
/// long after the newer, since TCP had to send it again.
// tests
#[test]
fn an_old_map_is_doubted_whatever_came_before_it_on_its_connection() {
    let mut lab = Lab::larger();
    let first = lab.kernel(A, 8);
    let others: Vec<_> = (1..8).map(|_| lab.accept(A)).collect();
    lab.deliver(others[2], &[map_of(&[])]);
    lab.ms(300);
    lab.deliver(first, &[map_of(&[])]);
    lab.ms(300);
    lab.deliver(first, &[map_of(&[4000])]);
    lab.ms(1510);
    assert_eq!(lab.closes, [(others[6], CloseHow::Drain)], "for a fresh one");
}

/// A kernel's map stands in a connection whose handshake ends late for this side, since its last
/// segment is lost. A newer one comes first, on another connection.
// tests
#[test]
fn the_map_of_a_connection_that_was_accepted_late_is_doubted() {
    let mut lab = Lab::larger();
    let first = lab.kernel(A, 8);
    let others: Vec<_> = (1..7).map(|_| lab.accept(A)).collect();
    lab.deliver(first, &[map_of(&[])]);
    lab.ms(600);
    let late = lab.accept(A);
    lab.deliver(late, &[map_of(&[4000])]);
    lab.ms(1510);
    assert_eq!(lab.closes.len(), 1, "one is made anew");
    assert!(others.contains(&lab.closes[0].0) || lab.closes[0].0 == late);
    lab.node.handle_closed(lab.now, lab.closes[0].0, CloseReason::Eof);
    lab.settle();
    let again = lab.accept(A);
    lab.deliver(again, &[map_of(&[])]);
    let s = lab.bound("10.0.0.2:5000");
    lab.send(s, FAR, b"x").expect("sent");
}

/// The connection that is ended for a fresh map was dead already, and the one by which the kernel
/// had replaced it waits here for a path: its map came long ago, so another connection is ended.
// tests
#[test]
fn a_connection_that_waited_for_a_path_brings_no_fresh_map() {
    let (mut lab, s, first) = at(B, 5000).kernel(8);
    let others: Vec<_> = (1..8).map(|_| lab.accept(A)).collect();
    let waiting = lab.accept(A);
    lab.deliver(first, &[map_of(&[])]);
    lab.deliver(waiting, &[map_of(&[4000])]);
    lab.ms(1510);
    assert_eq!(lab.closes, [(others[6], CloseHow::Drain)]);
    lab.node.handle_closed(lab.now, others[6], CloseReason::Reset);
    lab.settle();
    lab.ms(1510);
    assert_eq!(lab.closes[1..], [(waiting, CloseHow::Drain)], "it has that path now");
    lab.node.handle_closed(lab.now, waiting, CloseReason::Eof);
    lab.settle();
    let fresh = lab.accept(A);
    lab.deliver(fresh, &[map_of(&[])]);
    lab.send(s, FAR, b"x").expect("sent");
    lab.ms(3000);
    assert_eq!(lab.counter("bl_map_refreshes"), 2);
}

/// The connection that carried our map is lost, and the map goes out on another one. A kernel that
/// is slow to read may take the older one for the newer: so it gets the map once more, and then no
/// more.
// tests
#[test]
fn a_map_that_went_over_to_another_connection_is_sent_once_more() {
    let mut lab = Lab::larger();
    let zero = lab.kernel(A, 8);
    let one = lab.accept(A);
    assert!(!lab.frames(one).iter().any(Frame::is_map), "the lowest path has it");
    lab.fail(zero, CloseReason::Reset);
    assert_eq!(lab.frames(one).iter().filter(|f| f.is_map()).count(), 1);
    lab.advance(Duration::from_secs(9));
    assert!(!lab.frames(one).iter().any(Frame::is_map));
    lab.advance(Duration::from_secs(2));
    assert_eq!(lab.frames(one).iter().filter(|f| f.is_map()).count(), 1);
    lab.advance(Duration::from_secs(60));
    assert!(!lab.frames(one).iter().any(Frame::is_map));
}

/// A kernel had read maps of this address's earlier process late, from a connection that has ended
/// since; it makes that one anew. The others have nothing to send.
// tests
#[test]
fn a_connection_of_a_higher_path_brings_a_map_by_the_lowest() {
    let mut lab = Lab::larger();
    let links = lab.kernel_paths(A);
    lab.fail(links[3], CloseReason::Reset);
    links.iter().for_each(|l| drop(lab.frames(*l)));
    lab.accept(A);
    assert!(lab.frames(links[0]).iter().any(Frame::is_map));
}
