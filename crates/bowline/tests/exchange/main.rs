//! Two nodes in one process: messages, errors, waiting.

use std::io::IoSlice;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use bowline::rds::{
    Control, Error, ErrorKind, Interest, LengthLimit, Node, Paths, PollMode, Socket,
};
use rustix::event::{PollFd, PollFlags};

#[path = "../common/mod.rs"]
mod common;
mod pairs;
use common::{LIMIT, Pair, Stop, addr, builder};

const MIB: usize = 1 << 20;

/// Bytes that differ from message to message and within one.
fn pattern(seed: usize, len: usize) -> Vec<u8> {
    (0..len).map(|i| (i.wrapping_mul(31) ^ (i >> 8) ^ seed.wrapping_mul(97)) as u8).collect()
}

#[test]
fn a_message_arrives_with_its_sender_in_both_directions() {
    let pair = Pair::new(1);
    let (a, b) = pair.sockets(4000);
    assert_eq!(a.send_to(b"hello", pair.b(4000)).unwrap(), 5);
    let mut buf = [0; 64];
    assert_eq!(b.recv_from(&mut buf).unwrap(), (5, pair.a(4000)));
    assert_eq!(&buf[..5], b"hello");
    b.send_to(b"and back", pair.a(4000)).unwrap();
    assert_eq!(a.recv_from(&mut buf).unwrap(), (8, pair.b(4000)));
    assert_eq!(&buf[..8], b"and back");
}

#[test]
fn the_larger_address_can_begin() {
    let pair = Pair::new(2);
    let (a, b) = pair.sockets(4000);
    b.send_to(b"knock", pair.a(4000)).unwrap();
    let message = a.recv_message().unwrap();
    assert_eq!((message.to_vec(), message.source()), (b"knock".to_vec(), pair.b(4000)));
}

#[test]
fn connected_vectored_batched_and_empty_messages_arrive() {
    let pair = Pair::new(3);
    let (a, b) = pair.sockets(4000);
    a.connect(pair.b(4000)).unwrap();
    assert_eq!(a.peer_addr(), Some(pair.b(4000)));
    assert_eq!(a.local_addr(), Some(pair.a(4000)));
    assert_eq!(a.send(b"").unwrap(), 0);
    let pieces = [IoSlice::new(b"one "), IoSlice::new(b""), IoSlice::new(b"message")];
    assert_eq!(a.send_vectored_to(&pieces, pair.b(4000)).unwrap(), 11);
    let batch: Vec<_> = [&b"x"[..], b"yy", b"zzz"].map(|m| (pair.b(4000), m)).to_vec();
    assert_eq!(a.send_batch(&batch).unwrap(), 3);
    let mut got = Vec::new();
    while got.len() < 5 {
        b.recv_batch(&mut got, 10).unwrap();
    }
    let got: Vec<_> = got.iter().map(|m| m.to_vec()).collect();
    assert_eq!(got, [&b""[..], b"one message", b"x", b"yy", b"zzz"]);
}

#[test]
fn a_short_buffer_loses_the_rest_of_one_message_only() {
    let pair = Pair::new(4);
    let (a, b) = pair.sockets(4000);
    a.send_to(b"0123456789", pair.b(4000)).unwrap();
    a.send_to(b"next", pair.b(4000)).unwrap();
    let mut buf = [0; 4];
    assert_eq!(b.recv(&mut buf).unwrap(), 4);
    assert_eq!(&buf, b"0123");
    let peeked = b.peek_message().unwrap();
    assert_eq!(peeked.to_vec(), b"next");
    assert_eq!(b.recv(&mut buf).unwrap(), 4);
    assert_eq!(&buf, b"next");
}

#[test]
fn messages_tell_when_they_arrived() {
    let pair = Pair::new(30);
    let (a, b) = pair.sockets(4000);
    b.set_timestamp(true).unwrap();
    let sent = SystemTime::now();
    a.send_to(b"x", pair.b(4000)).unwrap();
    b.wait(Interest::READ, Some(LIMIT)).unwrap();
    let seen = SystemTime::now();
    thread::sleep(Duration::from_millis(50));
    let message = b.recv_message().unwrap();
    let [Control::Timestamp(at)] = message.control() else { panic!("{:?}", message.control()) };
    // The core's clock may be some milliseconds behind.
    let slack = Duration::from_millis(20);
    assert!(*at + slack >= sent && *at <= seen + slack, "{sent:?} {at:?} {seen:?}");
}

#[test]
fn long_messages_arrive_whole_in_every_order_of_sizes() {
    let pair = Pair::with(5, |b| b.max_message_bytes(8 << 20));
    let (a, b) = pair.sockets(4000);
    let sizes = [1, MIB, 47, 3 * MIB + 1, 65_536, 8 << 20, 0, 262_144];
    thread::scope(|s| {
        s.spawn(|| {
            for (i, size) in sizes.into_iter().enumerate() {
                assert_eq!(a.send_to(&pattern(i, size), pair.b(4000)).unwrap(), size);
            }
        });
        for (i, size) in sizes.into_iter().enumerate() {
            let message = b.recv_message().unwrap();
            assert_eq!(message.len(), size, "message {i}");
            assert!(message.to_vec() == pattern(i, size), "contents of message {i}");
        }
    });
}

#[test]
fn one_setting_makes_room_for_long_messages_and_gives_way_to_others() {
    let pair = Pair::with(809, |b| b.default_send_buffer(9000).max_message_bytes(4 << 20));
    let (a, b) = pair.sockets(4000);
    assert_eq!((a.send_buffer(), b.recv_buffer()), (Ok(9000), Ok(8 << 20)));
    let too_long = |socket: &Socket, len| {
        let error = socket.send_to(&vec![0; len], pair.b(4000)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::TooLong);
        let why = error.too_long().unwrap();
        (why.limit, why.of)
    };
    assert_eq!(too_long(&a, 9001), (9000, LengthLimit::SendBuffer));
    a.set_send_buffer(16 << 20).unwrap();
    assert_eq!(a.send_to(&vec![0; 4 << 20], pair.b(4000)).unwrap(), 4 << 20);
    assert_eq!(too_long(&a, (4 << 20) + 1), (4 << 20, LengthLimit::Node));
    assert_eq!(b.recv_message().unwrap().len(), 4 << 20);
}

#[test]
fn a_message_beyond_the_limit_of_the_peer_says_so() {
    let left = builder(810, 1).max_message_bytes(4 << 20).build().unwrap();
    let right = builder(810, 2).build().unwrap();
    let (here, there) = (addr(810, 1, 4000), addr(810, 2, 4000));
    let (a, b) = (left.bind(here).unwrap(), right.bind(there).unwrap());
    a.set_send_timeout(Some(LIMIT));
    let error = a.send_to(&vec![0; 2 << 20], there).unwrap_err();
    let why = error.too_long().unwrap();
    assert_eq!((why.len, why.limit, why.of), (2 << 20, 1 << 20, LengthLimit::Peer));
    drop(b);
}

#[test]
fn addresses_may_be_texts_pairs_and_numbers() {
    let node = Node::builder().address([127, 103, 43, 1]).address("127.103.43.2").build().unwrap();
    let socket = node.bind("127.103.43.1:4000").unwrap();
    assert_eq!(socket.send_to(b"to itself", ("127.103.43.1", 4000)).unwrap(), 9);
    assert_eq!(socket.send_to(b"to another", ([127, 103, 43, 2], 4000)).unwrap(), 10);
    let kind = |error: Error| error.kind();
    assert_eq!(node.bind("localhost:4000").map_err(kind).unwrap_err(), ErrorKind::BadAddress);
    let node = Node::builder().address("localhost").build();
    assert_eq!(node.map_err(kind).unwrap_err(), ErrorKind::BadAddress);
}

#[test]
fn a_socket_in_a_log_is_one_line_without_contents() {
    let pair = Pair::new(45);
    let (a, b) = pair.sockets(4000);
    a.connect(pair.b(4000)).unwrap();
    a.send(b"secret").unwrap();
    b.recv_message().unwrap();
    let text = format!("{a:?}");
    let (local, peer) = (pair.a(4000), pair.b(4000));
    assert_eq!(
        text,
        format!("Socket {{ local: Some({local}), peer: Some({peer}), node: process }}")
    );
    assert_eq!(format!("{:?}", pair.left), "Node(process)");
}

#[test]
fn errors_carry_the_kernels_numbers() {
    let pair = Pair::new(6);
    let errno = |error: Error| error.errno();
    assert_eq!(errno(pair.left.bind(pair.b(4000)).unwrap_err()), 99);
    let (a, b) = pair.sockets(4000);
    assert_eq!(errno(a.bind(pair.a(4001)).unwrap_err()), 22);
    assert_eq!(errno(pair.left.bind(pair.a(4000)).unwrap_err()), 98);
    let unbound = pair.left.socket().unwrap();
    assert_eq!(errno(unbound.send_to(b"x", pair.b(4000)).unwrap_err()), 107);
    assert_eq!(errno(a.send(b"x").unwrap_err()), 107);
    assert_eq!(errno(a.send_to(&vec![0; 106_497], pair.b(4000)).unwrap_err()), 90);
    assert_eq!(errno(a.send_to(b"x", "255.255.255.255:1").unwrap_err()), 22);
    let taken = builder(6, 1).build().unwrap_err();
    assert_eq!(taken.errno(), 98);
    assert!(taken.to_string().contains("rds_tcp"), "{taken}");
    assert_eq!(Paths::try_from(3).unwrap_err().errno(), 22);
    assert_eq!(builder(6, 3).sysctl("net.rds.nonsense", 1).build().unwrap_err().errno(), 92);

    b.set_nonblocking(true);
    let mut buf = [0; 4];
    let empty = b.recv(&mut buf).unwrap_err();
    assert_eq!((empty.errno().0, empty.is_would_block()), (11, true));
}

#[test]
fn waiting_ends_at_the_time_limit() {
    for (test, mode) in [(7, PollMode::Adaptive), (8, PollMode::Sleep), (9, PollMode::Spin)] {
        let pair = Pair::with(test, |b| b.poll(mode));
        let (a, b) = pair.sockets(4000);
        let limit = Duration::from_millis(60);
        b.set_recv_timeout(Some(limit));
        let start = Instant::now();
        let error = b.recv(&mut [0]).unwrap_err();
        assert_eq!((error.errno().0, error.is_timed_out()), (110, true));
        let took = start.elapsed();
        assert!(took >= limit, "{mode:?}: {took:?}");

        assert_eq!(b.wait(Interest::READ, Some(limit)).unwrap_err().errno(), 110);
        b.wait(Interest::WRITE, Some(limit)).unwrap();

        // No node listens on that address: the queue fills and stays full.
        a.set_send_timeout(Some(limit));
        let nowhere = addr(test, 9, 4000);
        let start = Instant::now();
        let error = (0..1000).find_map(|_| a.send_to(&[0; 4096], nowhere).err()).unwrap();
        assert_eq!(error.errno(), 110);
        assert!(start.elapsed() >= limit);
        a.set_nonblocking(true);
        assert_eq!(a.send_to(b"x", nowhere).unwrap_err().errno(), 11);
        a.cancel_sent_to(nowhere).unwrap();
        a.send_to(b"x", nowhere).unwrap();

        // Nobody reads there, and the port is congested [D-15].
        b.set_recv_buffer(4096).unwrap();
        let refused = loop {
            match a.send_to(&[0; 4096], pair.b(4000)) {
                Err(error) if error.errno() != 11 => break error,
                _ => thread::yield_now(),
            }
        };
        assert_eq!(refused.errno(), 105);
        a.set_nonblocking(false);
        let start = Instant::now();
        assert_eq!(a.send_to(b"x", pair.b(4000)).unwrap_err().errno(), 110);
        assert!(start.elapsed() >= limit);
    }
}

#[test]
fn a_waiting_reader_is_woken_whoever_polls() {
    // Several readers of one node, each on its own socket: one polls, the others are parked.
    const READERS: u16 = 6;
    let pair = Pair::new(10);
    let a = pair.left.bind(pair.a(4000)).unwrap();
    let readers: Vec<_> =
        (0..READERS).map(|i| pair.right.bind(pair.b(5000 + i)).unwrap()).collect();
    thread::scope(|s| {
        for reader in &readers {
            let answer_to = pair.a(4000);
            s.spawn(move || {
                reader.set_recv_timeout(Some(LIMIT));
                let mut buf = [0; 8];
                loop {
                    let n = reader.recv(&mut buf).unwrap();
                    if n == 0 {
                        return;
                    }
                    reader.send_to(&buf[..n], answer_to).unwrap();
                }
            });
        }
        a.set_recv_timeout(Some(LIMIT));
        for round in 0..2000_u32 {
            let port = 5000 + (round * 7 % u32::from(READERS)) as u16;
            a.send_to(&round.to_be_bytes(), pair.b(port)).unwrap();
            let mut buf = [0; 8];
            let (n, from) = a.recv_from(&mut buf).unwrap();
            assert_eq!((&buf[..n], from), (&round.to_be_bytes()[..], pair.b(port)));
        }
        for i in 0..READERS {
            a.send_to(b"", pair.b(5000 + i)).unwrap();
        }
    });
}

#[test]
fn readers_of_one_socket_share_its_messages() {
    let pair = Pair::new(11);
    let (a, b) = pair.sockets(4000);
    let total = 3000;
    let seen: Vec<u32> = thread::scope(|s| {
        let readers: Vec<_> = (0..3)
            .map(|_| {
                s.spawn(|| {
                    let mut seen = Vec::new();
                    let mut buf = [0; 8];
                    while b.recv(&mut buf).unwrap() == 4 {
                        seen.push(u32::from_be_bytes(buf[..4].try_into().unwrap()));
                    }
                    seen
                })
            })
            .collect();
        for i in 0..total {
            a.send_to(&u32::to_be_bytes(i), pair.b(4000)).unwrap();
        }
        for _ in 0..3 {
            a.send_to(b"end", pair.b(4000)).unwrap();
        }
        readers.into_iter().flat_map(|r| r.join().unwrap()).collect()
    });
    let mut sorted = seen;
    sorted.sort_unstable();
    assert!(sorted.into_iter().eq(0..total));
}

#[test]
fn a_full_receiver_stops_its_senders_and_no_others() {
    let pair = Pair::new(12);
    let (a, b) = pair.sockets(4000);
    let other = pair.right.bind(pair.b(4001)).unwrap();
    other.set_recv_timeout(Some(LIMIT));
    a.set_nonblocking(true);
    let mut sent = 0_u32;
    let deadline = Instant::now() + LIMIT;
    loop {
        match a.send_to(&[sent as u8; 4000], pair.b(4000)) {
            Ok(_) => sent += 1,
            Err(error) if error.errno() == 11 => thread::yield_now(),
            Err(error) => {
                assert_eq!(error.errno(), 105, "{error}");
                break;
            }
        }
        assert!(Instant::now() < deadline, "no congestion after {sent} messages");
    }
    // Another port of the same node is not affected.
    a.set_nonblocking(false);
    a.send_to(b"past", pair.b(4001)).unwrap();
    assert_eq!(other.recv(&mut [0; 8]).unwrap(), 4);
    // A blocking sender goes on when the receiver has read.
    thread::scope(|s| {
        s.spawn(|| {
            a.send_to(&[sent as u8; 4000], pair.b(4000)).unwrap();
        });
        for i in 0..=sent {
            let mut buf = [0; 4000];
            assert_eq!(b.recv(&mut buf).unwrap(), 4000);
            assert!(buf.iter().all(|byte| *byte == i as u8), "message {i}");
        }
    });
    b.set_nonblocking(true);
    assert_eq!(b.recv(&mut [0]).unwrap_err().errno(), 11);
}

#[test]
fn cancelled_messages_make_room_and_later_ones_arrive() {
    let pair = Pair::new(13);
    let (a, _) = pair.sockets(4000);
    let nowhere = addr(13, 9, 4000);
    for _ in 0..20 {
        a.send_to(&[0; 5000], nowhere).unwrap();
    }
    assert_eq!(a.flush(Some(Duration::from_millis(50))).unwrap_err().errno(), 110);
    a.cancel_sent_to(nowhere).unwrap();
    a.flush(Some(Duration::from_millis(50))).unwrap();
    let b = pair.right.bind(pair.b(4001)).unwrap();
    b.set_recv_timeout(Some(LIMIT));
    a.send_to(b"after", pair.b(4001)).unwrap();
    assert_eq!(b.recv_message().unwrap().to_vec(), b"after");
}

#[test]
fn closing_a_socket_ends_the_calls_on_it() {
    for (test, mode) in [(14, PollMode::Adaptive), (15, PollMode::Sleep)] {
        let pair = Pair::with(test, |b| b.poll(mode));
        let socket = Arc::new(pair.left.bind(pair.a(4000)).unwrap());
        let waiters: Vec<_> = (0..2)
            .map(|_| {
                let socket = Arc::clone(&socket);
                thread::spawn(move || socket.recv(&mut [0]).unwrap_err().errno())
            })
            .collect();
        thread::sleep(Duration::from_millis(50));
        socket.close();
        for waiter in waiters {
            assert_eq!(waiter.join().unwrap(), 9);
        }
        assert_eq!(socket.send_to(b"x", pair.b(4000)).unwrap_err().errno(), 9);
        // The same port again is another socket; the drop of the old handle does not affect it.
        let next = pair.left.bind(pair.a(4000)).unwrap();
        drop(socket);
        assert_eq!(next.local_addr(), Some(pair.a(4000)));
    }
}

#[test]
fn shutdown_delivers_what_was_sent_and_ends_waiting_calls() {
    let pair = Pair::new(16);
    let (a, b) = pair.sockets(4000);
    let reader = pair.left.bind(pair.a(4001)).unwrap();
    let node = pair.left.clone();
    let count = 500_u32;
    thread::scope(|s| {
        let waiting = s.spawn(|| reader.recv(&mut [0]).unwrap_err().errno());
        let receiver = s.spawn(|| {
            for i in 0..count {
                let mut buf = [0; 1000];
                assert_eq!(b.recv(&mut buf).unwrap(), 1000);
                assert_eq!(&buf[..4], &i.to_be_bytes());
            }
        });
        for i in 0..count {
            let mut message = [0; 1000];
            message[..4].copy_from_slice(&i.to_be_bytes());
            a.send_to(&message, pair.b(4000)).unwrap();
        }
        assert!(node.shutdown(LIMIT), "everything was acknowledged");
        receiver.join().unwrap();
        assert_eq!(waiting.join().unwrap(), 108);
        assert_eq!(a.send_to(b"x", pair.b(4000)).unwrap_err().errno(), 108);
    });
    // The address is free again.
    let again = builder(16, 1).build().unwrap();
    let c = again.bind(pair.a(4000)).unwrap();
    c.send_to(b"second life", pair.b(4000)).unwrap();
    assert_eq!(b.recv_message().unwrap().to_vec(), b"second life");
}

#[test]
fn shutdown_says_when_something_was_not_delivered() {
    let pair = Pair::new(17);
    let (a, _) = pair.sockets(4000);
    a.send_to(b"x", addr(17, 9, 4000)).unwrap();
    assert!(!pair.left.shutdown(Duration::from_millis(50)));
}

#[test]
fn the_event_descriptor_follows_the_socket() {
    let pair = Pair::new(18);
    let (a, b) = pair.sockets(4000);
    let fd = b.event_fd().unwrap();
    b.set_nonblocking(true);
    let is_ready = |limit_ms: i64| {
        let mut fds = [PollFd::from_borrowed_fd(fd.as_fd(), PollFlags::IN)];
        let limit = rustix::time::Timespec {
            tv_sec: limit_ms / 1000,
            tv_nsec: limit_ms % 1000 * 1_000_000,
        };
        rustix::event::poll(&mut fds, Some(&limit)).unwrap() == 1
    };
    assert!(!is_ready(0));
    for round in 0..200_u32 {
        a.send_to(&round.to_be_bytes(), pair.b(4000)).unwrap();
        a.send_to(b"second", pair.b(4000)).unwrap();
        let mut got = 0;
        while got < 2 {
            assert!(is_ready(10_000), "round {round}");
            while b.recv(&mut [0; 8]).is_ok() {
                got += 1;
            }
        }
        assert_eq!(got, 2);
        assert!(!is_ready(0), "round {round}: empty and still ready");
    }
}

/// The sender is told that there is room between its refused send and a receive that finds nothing,
/// and waits only then.
#[test]
fn the_event_descriptor_keeps_the_news_for_a_refused_send() {
    let pair = Pair::new(36);
    let (a, b) = pair.sockets(4000);
    a.set_nonblocking(true);
    let fd = a.event_fd().unwrap();
    let is_ready = |limit: Duration| {
        let mut fds = [PollFd::from_borrowed_fd(fd.as_fd(), PollFlags::IN)];
        rustix::event::poll(&mut fds, Some(&limit.try_into().unwrap())).unwrap() == 1
    };
    for round in 0..50 {
        let mut sent = 0;
        while a.send_to(&[7; 8192], pair.b(4000)).is_ok() {
            sent += 1;
        }
        for _ in 0..sent {
            b.recv(&mut [0; 8192]).unwrap();
        }
        a.flush(Some(LIMIT)).unwrap();
        assert!(is_ready(LIMIT), "round {round}: there is room");
        assert_eq!(a.recv(&mut [0; 8]).unwrap_err().kind(), ErrorKind::Empty);
        assert!(is_ready(Duration::ZERO), "round {round}: the send was not tried yet");
        assert_eq!(a.recv(&mut [0; 8]).unwrap_err().kind(), ErrorKind::Empty);
        assert!(!is_ready(Duration::ZERO), "round {round}: it is not wanted any more");
    }
}

#[test]
fn sockets_of_one_node_reach_each_other() {
    let pair = Pair::new(19);
    let a = pair.left.bind(pair.a(4000)).unwrap();
    let b = pair.left.bind(pair.a(4001)).unwrap();
    thread::scope(|s| {
        s.spawn(|| {
            b.set_recv_timeout(Some(LIMIT));
            for _ in 0..1000 {
                let message = b.recv_message().unwrap();
                b.send_to(&message.to_vec(), message.source()).unwrap();
            }
        });
        a.set_recv_timeout(Some(LIMIT));
        for i in 0..1000_u32 {
            a.send_to(&i.to_be_bytes(), pair.a(4001)).unwrap();
            assert_eq!(a.recv_message().unwrap().to_vec(), i.to_be_bytes());
        }
    });
    assert!(pair.left.info().links.is_empty(), "no TCP within a node");
}

#[test]
fn a_lonely_message_is_not_left_behind() {
    // The second message of a burst is gathered; nothing follows that would flush it.
    let pair = Pair::new(20);
    let (a, b) = pair.sockets(4000);
    b.set_recv_timeout(Some(Duration::from_secs(5)));
    a.send_to(b"first", pair.b(4000)).unwrap();
    b.recv(&mut [0; 8]).unwrap();
    for _ in 0..100 {
        a.send_to(b"one", pair.b(4000)).unwrap();
        a.send_to(b"two", pair.b(4000)).unwrap();
        b.recv(&mut [0; 8]).unwrap();
        b.recv(&mut [0; 8]).unwrap();
    }
}

#[test]
fn many_senders_to_one_socket_keep_their_order() {
    const SENDERS: u16 = 4;
    const EACH: u32 = 5000;
    let pair = Pair::new(21);
    let sink = pair.right.bind(pair.b(4000)).unwrap();
    sink.set_recv_timeout(Some(LIMIT));
    thread::scope(|s| {
        for i in 0..SENDERS {
            let socket = pair.left.bind(pair.a(5000 + i)).unwrap();
            let to = pair.b(4000);
            s.spawn(move || {
                for n in 0..EACH {
                    let mut message = [0; 200];
                    message[..4].copy_from_slice(&n.to_be_bytes());
                    socket.send_to(&message, to).unwrap();
                }
                socket.flush(Some(LIMIT)).unwrap();
            });
        }
        let mut next = [0; SENDERS as usize];
        let mut buf = [0; 200];
        for _ in 0..u32::from(SENDERS) * EACH {
            let (n, from) = sink.recv_from(&mut buf).unwrap();
            let from = usize::from(from.port() - 5000);
            assert_eq!((n, &buf[..4]), (200, &u32::to_be_bytes(next[from])[..]));
            next[from] += 1;
        }
        assert_eq!(next, [EACH; SENDERS as usize]);
    });
}

#[test]
fn a_peer_that_never_pauses_hides_no_other() {
    const BYTES: usize = 16 << 10;
    let pair = Pair::new(22);
    let other = builder(22, 3).build().unwrap();
    let flooded = pair.right.bind(pair.b(4000)).unwrap();
    let quiet = pair.right.bind(pair.b(4001)).unwrap();
    let from_other = other.bind(addr(22, 3, 4002)).unwrap();
    let flood = pair.left.bind(pair.a(4003)).unwrap();
    flooded.set_recv_timeout(Some(Duration::from_millis(500)));
    quiet.set_recv_timeout(Some(LIMIT));
    let over = AtomicBool::new(false);
    let done = || over.load(Relaxed);
    thread::scope(|s| {
        let _end = Stop(&over);
        s.spawn(|| {
            while !done() {
                flood.send_to(&[1; BYTES], pair.b(4000)).unwrap();
            }
        });
        s.spawn(|| {
            let mut buf = [0; BYTES];
            while flooded.recv_from(&mut buf).is_ok() || !done() {}
        });
        for n in 0..20_u8 {
            from_other.send_to(&[n], pair.b(4001)).unwrap();
            let mut buf = [0; 8];
            assert_eq!(quiet.recv_from(&mut buf).unwrap().0, 1);
            assert_eq!(buf[0], n);
        }
    });
}
