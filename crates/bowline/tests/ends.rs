//! Nodes that end in good order: what their programs received is acknowledged, what theirs sent is
//! written, and peers learn of it. Over TCP, with and without end-to-end acknowledgement, and over
//! RDMA.
#![cfg(feature = "rdma")]

mod common;

use std::sync::{Arc, Barrier};
use std::thread;
use std::time::{Duration, Instant};

use bowline::rds::{Builder, Error, ErrorKind, Event, Node, Socket};
use bowline::verbs::{SoftConfig, SoftDevice};
use common::{LIMIT, addr, builder, ip};

/// Longest time that the end of a node may take here. It is half a second, and more on a machine
/// that has other work.
const END_MAX: Duration = Duration::from_secs(5);

/// How two nodes are connected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    EndToEnd,
    /// By TCP's acknowledgements, as with a kernel.
    ByTcp,
    Rdma,
}

const WAYS: [Way; 3] = [Way::EndToEnd, Way::ByTcp, Way::Rdma];

fn node(way: Way, test: u16, number: u8) -> Node {
    let builder: Builder = match way {
        Way::EndToEnd => builder(test, number),
        Way::ByTcp => builder(test, number).end_to_end(false),
        Way::Rdma => {
            let addrs = vec![ip(test, number)];
            let config = SoftConfig { addrs, ..SoftConfig::default() };
            let device = SoftDevice::open(config).expect("an address of this machine");
            Node::builder().rdma(Arc::new(device))
        }
    };
    builder.build().unwrap()
}

fn socket(node: &Node, test: u16, number: u8) -> Socket {
    let socket = node.bind(addr(test, number, 4000)).unwrap();
    socket.set_recv_timeout(Some(LIMIT));
    socket.set_send_timeout(Some(LIMIT));
    socket
}

fn ended(node: &Node) -> bool {
    node.events().iter().any(|event| matches!(event, Event::PeerEnded { .. }))
}

fn wait_until(what: &str, mut done: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !done() {
        assert!(begun.elapsed() < LIMIT, "no {what}");
        thread::sleep(Duration::from_millis(1));
    }
}

/// Tells how the wait for acknowledgements ended: it must, since the peer has.
fn flushed(sender: &Socket) -> Result<(), ErrorKind> {
    let begun = Instant::now();
    let flushed = sender.flush(Some(2 * LIMIT)).map_err(|error: Error| error.kind());
    assert!(flushed.is_ok() || flushed == Err(ErrorKind::PeerEnded), "{flushed:?}");
    assert!(begun.elapsed() < LIMIT, "{:?}", begun.elapsed());
    flushed
}

/// A receiver takes all messages and ends at once, in one of several ways; its sender learns that
/// all have come.
fn receives_and_ends(way: Way, test: u16, receiver: u8, end: fn(Socket, Node)) {
    const COUNT: u32 = 2000;
    let sender = 3 - receiver;
    let to = addr(test, receiver, 4000);
    let left = node(way, test, sender);
    let right = node(way, test, receiver);
    let a = socket(&left, test, sender);
    let b = socket(&right, test, receiver);
    let receives = thread::spawn(move || {
        let mut bytes = [0; 600];
        for number in 0..COUNT {
            b.recv(&mut bytes).unwrap();
            assert_eq!(bytes[..4], number.to_be_bytes());
        }
        let begun = Instant::now();
        end(b, right);
        begun.elapsed()
    });
    let mut message = [0; 500];
    for number in 0..COUNT {
        message[..4].copy_from_slice(&number.to_be_bytes());
        a.send_to(&message, to).unwrap();
    }
    let took = receives.join().unwrap();
    assert!(took < END_MAX, "the end took {took:?}");
    let flushed = a.flush(Some(LIMIT));
    let outstanding = a.outstanding().unwrap();
    assert!(flushed.is_ok(), "{way:?}, {receiver} receives: {flushed:?}, {outstanding:?}");
    if way != Way::ByTcp {
        wait_until("news of the end", || ended(&left));
    }
}

#[test]
fn what_was_received_last_is_acknowledged_before_the_node_is_dropped() {
    let ends = |way, at: u16| {
        for (receiver, round) in [(1, 0), (2, 0), (1, 1), (2, 1), (1, 2), (2, 2), (1, 3), (2, 3)] {
            let test = 310 + 10 * at + 2 * round;
            receives_and_ends(way, test, receiver, |socket, node| drop((socket, node)));
            receives_and_ends(way, test + 1, receiver, |socket, node| {
                drop(node);
                drop(socket);
            });
        }
    };
    thread::scope(|scope| {
        for (at, way) in (0..).zip(WAYS) {
            scope.spawn(move || ends(way, at));
        }
    });
}

#[test]
fn what_was_received_last_is_acknowledged_before_the_node_shuts_down() {
    for (at, way) in (0..).zip(WAYS) {
        for receiver in [1, 2] {
            let end = |_: Socket, node: Node| assert!(node.shutdown(LIMIT));
            receives_and_ends(way, 340 + 2 * at, receiver, end);
        }
    }
}

/// Connections that the operator has dropped are made again, to tell what the broken ones may not
/// have told.
#[test]
fn what_was_received_last_is_acknowledged_while_connections_are_made_again() {
    for (at, way) in (0..).zip([Way::EndToEnd, Way::Rdma]) {
        for receiver in [1, 2] {
            for round in 0..5 {
                let test = 350 + 10 * at + round;
                receives_and_ends(way, test, receiver, |socket, node| {
                    node.drop_connections(None);
                    drop((socket, node));
                });
            }
        }
    }
}

/// What a receiver had not taken stays with the sender, who learns that nobody takes it.
#[test]
fn a_sender_learns_that_its_receiver_ended_before_it_took_everything() {
    // All at once: over RDMA an attempt to connect lasts for ten seconds.
    thread::scope(|scope| {
        for (at, way) in (0..).zip(WAYS) {
            for receiver in [1, 2] {
                // Short ones, and one of which the receiver has a part at its end.
                for (n, size) in (0..).zip([1000, 200_000]) {
                    let test = 370 + 10 * at + 2 * u16::from(receiver) + n;
                    scope.spawn(move || ends_before_it_took_everything(way, test, receiver, size));
                }
            }
        }
    });
}

fn ends_before_it_took_everything(way: Way, test: u16, receiver: u8, size: usize) {
    let sender = 3 - receiver;
    let left = node(way, test, sender);
    let right = node(way, test, receiver);
    let a = socket(&left, test, sender);
    let b = socket(&right, test, receiver);
    a.set_send_buffer(64 << 20).unwrap();
    b.set_recv_buffer(256 << 20).unwrap();
    let to = addr(test, receiver, 4000);
    a.send_to(&vec![1; size], to).unwrap();
    b.recv_message().unwrap();
    let ends = thread::spawn(move || drop((b, right)));
    for _ in 0..200 {
        a.send_to(&vec![1; size], to).unwrap();
    }
    ends.join().unwrap();
    if way == Way::ByTcp {
        return; // TCP cannot tell
    }
    let what = format!("news of the end, {way:?}, {receiver} receives {size} bytes");
    wait_until(&what, || ended(&left));
    let outstanding = a.outstanding().unwrap();
    let known = flushed(&a);
    assert_eq!(known.is_ok(), a.outstanding().unwrap().is_empty(), "{outstanding:?}");
    // Another node takes what is left, or what was begun is dropped with its receiver.
    let next = node(way, test, receiver);
    let c = socket(&next, test, receiver);
    c.set_recv_buffer(256 << 20).unwrap();
    wait_until("node in its place", || a.flush(Some(LIMIT)).is_ok());
    a.send_to(b"last", to).unwrap();
    while c.recv_message().unwrap().to_vec() != b"last" {}
}

#[test]
fn what_was_sent_last_arrives_when_the_node_shuts_down() {
    for (at, way) in (0..).zip(WAYS) {
        for sender in [1, 2] {
            let (test, receiver) = (400 + at, 3 - sender);
            let (left, right) = (node(way, test, sender), node(way, test, receiver));
            let (a, b) = (socket(&left, test, sender), socket(&right, test, receiver));
            for number in 0..1000_u32 {
                a.send_to(&number.to_be_bytes(), addr(test, receiver, 4000)).unwrap();
            }
            assert!(left.shutdown(LIMIT), "{way:?}");
            for number in 0..1000_u32 {
                assert_eq!(b.recv_message().unwrap().to_vec(), number.to_be_bytes());
            }
        }
    }
}

/// A closed socket takes along what is not written. What only waits for more is written before, as
/// a kernel would have written it at once.
#[test]
fn what_was_gathered_is_written_before_socket_and_node_are_dropped() {
    for (at, way) in (0..).zip(WAYS) {
        for sender in [1, 2] {
            let (test, receiver) = (410 + at, 3 - sender);
            let (left, right) = (node(way, test, sender), node(way, test, receiver));
            let (a, b) = (socket(&left, test, sender), socket(&right, test, receiver));
            let to = addr(test, receiver, 4000);
            // They know each other, and the path that the messages take is up.
            for _ in 0..50 {
                a.send_to(b"before", to).unwrap();
                b.recv_message().unwrap();
                thread::sleep(Duration::from_millis(2));
            }
            a.flush(Some(LIMIT)).unwrap();
            for number in 0..100_u32 {
                a.send_to(&number.to_be_bytes(), to).unwrap();
            }
            drop((a, left));
            for number in 0..100_u32 {
                assert_eq!(b.recv_message().unwrap().to_vec(), number.to_be_bytes(), "{way:?}");
            }
        }
    }
}

#[test]
fn two_nodes_that_end_at_once_have_all_that_they_sent_to_each_other() {
    const COUNT: u32 = 500;
    for (at, way) in (0..).zip(WAYS) {
        for round in 0..4 {
            let test = 420 + 10 * at + round;
            let together = Barrier::new(2);
            let run = |own: u8| {
                let node = node(way, test, own);
                let socket = socket(&node, test, own);
                together.wait();
                for number in 0..COUNT {
                    socket.send_to(&number.to_be_bytes(), addr(test, 3 - own, 4000)).unwrap();
                }
                for number in 0..COUNT {
                    assert_eq!(socket.recv_message().unwrap().to_vec(), number.to_be_bytes());
                }
                // The one that ends first has acknowledged what it received.
                let begun = Instant::now();
                assert!(node.shutdown(LIMIT), "{way:?}: {own} has messages left");
                drop((socket, node));
                assert!(begun.elapsed() < END_MAX);
            };
            thread::scope(|scope| {
                scope.spawn(|| run(1));
                run(2);
            });
        }
    }
}

#[test]
fn a_receiver_that_is_congested_ends_and_its_sender_learns_it() {
    for (at, way) in (0..).zip(WAYS) {
        let test = 450 + at;
        let (left, right) = (node(way, test, 1), node(way, test, 2));
        let (a, b) = (socket(&left, test, 1), socket(&right, test, 2));
        b.set_recv_buffer(4000).unwrap();
        a.set_send_buffer(1 << 20).unwrap();
        a.set_nonblocking(true);
        let refused = || a.send_to(&[1; 1000], addr(test, 2, 4000)).err().map(|e| e.kind());
        wait_until("congestion", || refused() == Some(ErrorKind::Congested));
        let begun = Instant::now();
        // The program has not taken them; the node has.
        assert!(right.shutdown(Duration::ZERO), "it has sent nothing");
        assert!(begun.elapsed() < END_MAX);
        drop((b, right));
        if way != Way::ByTcp {
            let _ = flushed(&a);
        }
    }
}

/// A peer that takes nothing does not hold the end up.
#[test]
fn a_node_whose_peer_is_stuck_ends_soon() {
    use std::net::TcpListener;
    let test = 460;
    let listener = TcpListener::bind((ip(test, 2), 16_385)).unwrap();
    let left = node(Way::EndToEnd, test, 1);
    let a = socket(&left, test, 1);
    a.set_send_buffer(64 << 20).unwrap();
    let message = vec![7; 1 << 20];
    for _ in 0..32 {
        a.send_to(&message, addr(test, 2, 4000)).unwrap();
    }
    let _stuck = listener.accept().unwrap();
    thread::sleep(Duration::from_millis(100)); // TCP is full
    let begun = Instant::now();
    drop((a, left));
    assert!(begun.elapsed() < END_MAX, "{:?}", begun.elapsed());
}
