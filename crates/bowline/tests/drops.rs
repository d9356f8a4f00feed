//! Connections that a node drops itself: nothing is lost, whether the other end learns what has
//! arrived by acknowledgements of the node or, as a kernel does, of TCP.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

use bowline::rds::{Limits, Node, Paths, Socket};

mod common;
use common::{LIMIT, Pair, Stop, addr, builder};

/// Messages of one flood.
const COUNT: u32 = 12_000;

/// Sizes that end messages everywhere in a segment, few of them long.
fn size(i: u32) -> usize {
    let long = if i.is_multiple_of(97) { 70_000 } else { 0 };
    [4, 900, 64, 4096, 300, 9000][i as usize % 6] + i as usize % 13 + long
}

fn send_numbered(socket: &Socket, to: std::net::SocketAddr, count: u32) {
    let mut message = vec![0; 100_000];
    for i in 0..count {
        message[..4].copy_from_slice(&i.to_be_bytes());
        socket.send_to(&message[..size(i)], to).unwrap();
    }
    socket.flush(Some(LIMIT)).unwrap();
}

fn receive_numbered(socket: &Socket, count: u32, done: &AtomicU32) {
    for i in 0..count {
        let message = socket.recv_message().unwrap().to_vec();
        let came = u32::from_be_bytes(*message.first_chunk().unwrap());
        assert_eq!(came, i, "message {came} came for {i}");
        assert_eq!(message.len(), size(i), "length of message {i}");
        done.store(i, Relaxed);
    }
    socket.set_nonblocking(true);
    assert_eq!(socket.recv(&mut [0]).unwrap_err().errno(), 11, "nothing comes twice");
}

/// Takes processor time, so that threads are interrupted everywhere.
fn burn(stop: &AtomicBool) {
    while !stop.load(Relaxed) {
        std::hint::spin_loop();
    }
}

/// One node floods the other, which drops its connections; from half of the messages on, the
/// sender drops them.
fn flood(test: u16, sender_end_to_end: bool, receiver_end_to_end: bool) {
    let node = |n, end_to_end| {
        let builder = builder(test, n)
            .paths(if sender_end_to_end { Paths::Eight } else { Paths::One })
            .sysctl("net.rds.reconnect_max_delay_ms", 5);
        builder.end_to_end(end_to_end).build().unwrap()
    };
    let left = node(1, sender_end_to_end);
    let right = node(2, receiver_end_to_end);
    let pair = Pair { test, left, right };
    let (a, b) = pair.sockets(4000);
    let (over, received) = (AtomicBool::new(false), AtomicU32::new(0));
    let cuts = thread::scope(|s| {
        let cutter = s.spawn(|| {
            let mut cuts = [0, 0];
            let mut before = 0;
            while !over.load(Relaxed) {
                thread::sleep(Duration::from_millis(3));
                // Connections that are dropped before the first message is through carry nothing.
                let now = received.load(Relaxed);
                if now == before {
                    continue;
                }
                before = now;
                let second = now >= COUNT / 2;
                let node = if second { &pair.left } else { &pair.right };
                cuts[usize::from(second)] += node.drop_connections(None);
            }
            cuts
        });
        let burners = [(); 2].map(|()| s.spawn(|| burn(&over)));
        let streams = [
            s.spawn(|| send_numbered(&a, pair.b(4000), COUNT)),
            s.spawn(|| receive_numbered(&b, COUNT, &received)),
        ];
        let results = streams.map(thread::ScopedJoinHandle::join);
        over.store(true, Relaxed);
        results.into_iter().for_each(|result| result.unwrap());
        burners.into_iter().for_each(|burner| burner.join().unwrap());
        cutter.join().unwrap()
    });
    assert!(cuts.iter().all(|cuts| *cuts > 3), "{cuts:?} connections were cut");
}

#[test]
fn what_tcp_acknowledged_to_the_sender_survives_a_drop() {
    flood(720, false, true);
}

#[test]
fn a_receiver_that_goes_by_tcp_drops_and_is_dropped() {
    flood(721, true, false);
}

#[test]
fn nothing_is_lost_where_both_go_by_tcp() {
    flood(722, false, false);
}

#[test]
fn nothing_is_lost_where_both_acknowledge_themselves() {
    flood(723, true, true);
}

fn counter(node: &Node, name: &str) -> u64 {
    node.counters().iter().find(|(known, _)| *known == name).map(|(_, value)| *value).unwrap()
}

#[test]
fn a_connection_that_is_not_read_is_dropped_without_loss() {
    let small = Limits { recv_bytes_per_peer: 100_000, ..Limits::default() };
    let left = builder(724, 1).paths(Paths::One).end_to_end(false).build().unwrap();
    // The socket has room for all messages, or the sender would stop by itself.
    let right = builder(724, 2).paths(Paths::One).end_to_end(false).limits(small);
    let right = right.default_recv_buffer(256 << 20).build().unwrap();
    let pair = Pair { test: 724, left, right };
    let (a, b) = pair.sockets(4000);
    let over = AtomicBool::new(false);
    let sent = AtomicU32::new(0);
    thread::scope(|s| {
        let stop = Stop(&over);
        s.spawn(|| {
            let mut message = vec![0; 100_000];
            for i in 0..COUNT {
                if over.load(Relaxed) {
                    break;
                }
                message[..4].copy_from_slice(&i.to_be_bytes());
                if a.send_to(&message[..size(i)], addr(724, 2, 4000)).is_err() {
                    break;
                }
                sent.store(i + 1, Relaxed);
            }
        });
        // Once nothing moves, what TCP has room for at the receiver is acknowledged and not read.
        let end = Instant::now() + LIMIT;
        let (mut count, mut since) = (0, Instant::now());
        while counter(&pair.right, "bl_read_pauses") == 0
            || since.elapsed() < Duration::from_millis(200)
        {
            assert!(Instant::now() < end, "the receiver's connections are read on and on");
            thread::sleep(Duration::from_millis(1));
            if sent.load(Relaxed) != count {
                (count, since) = (sent.load(Relaxed), Instant::now());
            }
        }
        assert!(pair.right.drop_connections(None) > 0);
        receive_numbered(&b, COUNT, &AtomicU32::new(0));
        drop(stop);
    });
    assert_eq!(sent.load(Relaxed), COUNT);
}
