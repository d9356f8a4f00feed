//! Connections that break, peers that die: every message arrives once and in order all the same.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use bowline::rds::{Builder, Limits, Paths, PollMode, Socket};

mod common;
use common::{LIMIT, Pair, addr, builder, ip};

/// Sizes that end frames everywhere in a segment.
fn size(i: u32) -> usize {
    [4, 64, 1000, 4096, 30_000, 100_000][i as usize % 6] + (i as usize % 13)
}

fn send_numbered(socket: &Socket, to: std::net::SocketAddr, count: u32) {
    let mut message = vec![0; 200_000];
    for i in 0..count {
        let len = size(i);
        message[..4].copy_from_slice(&i.to_be_bytes());
        message[len - 1] = i as u8;
        socket.send_to(&message[..len], to).unwrap();
    }
    socket.flush(Some(LIMIT)).unwrap();
}

fn receive_numbered(socket: &Socket, count: u32) {
    for i in 0..count {
        let message = socket.recv_message().unwrap().to_vec();
        assert_eq!(message[..4], i.to_be_bytes(), "message {i}");
        assert_eq!(message.len(), size(i), "length of message {i}");
        assert_eq!(message.last(), Some(&(i as u8)).filter(|_| size(i) > 4).or(message.last()));
    }
    socket.set_nonblocking(true);
    assert_eq!(socket.recv(&mut [0]).unwrap_err().errno(), 11, "nothing comes twice");
}

fn cut_under_load(test: u16, set: impl Fn(Builder) -> Builder) {
    const COUNT: u32 = 4000;
    let pair = Pair::with(test, set);
    let (a, b) = pair.sockets(4000);
    let (c, d) = pair.sockets(4001);
    let done = AtomicBool::new(false);
    let cuts = thread::scope(|s| {
        let cutter = s.spawn(|| {
            let mut cuts = 0;
            while !done.load(Ordering::Relaxed) {
                thread::sleep(Duration::from_millis(7));
                cuts += pair.left.drop_connections(None);
                thread::sleep(Duration::from_millis(5));
                cuts += pair.right.drop_connections(Some(ip(test, 1)));
            }
            cuts
        });
        let streams = [
            s.spawn(|| send_numbered(&a, pair.b(4000), COUNT)),
            s.spawn(|| receive_numbered(&b, COUNT)),
            s.spawn(|| send_numbered(&d, pair.a(4001), COUNT)),
            s.spawn(|| receive_numbered(&c, COUNT)),
        ];
        let results = streams.map(|stream| stream.join());
        done.store(true, Ordering::Relaxed);
        results.into_iter().for_each(|result| result.unwrap());
        cutter.join().unwrap()
    });
    assert!(cuts > 3, "only {cuts} connections were cut");
}

#[test]
fn cut_connections_lose_and_repeat_nothing() {
    cut_under_load(700, |b| b);
}

#[test]
fn cut_connections_lose_and_repeat_nothing_on_one_path() {
    cut_under_load(701, |b| b.paths(Paths::One).poll(PollMode::Sleep));
}

#[test]
fn a_sender_waits_for_a_peer_that_is_not_there_yet() {
    let left = builder(702, 1).build().unwrap();
    let a = left.bind(addr(702, 1, 4000)).unwrap();
    a.send_to(b"early", addr(702, 2, 4000)).unwrap();
    thread::sleep(Duration::from_millis(200));
    let right = builder(702, 2).build().unwrap();
    let b = right.bind(addr(702, 2, 4000)).unwrap();
    b.set_recv_timeout(Some(LIMIT));
    assert_eq!(b.recv_message().unwrap().to_vec(), b"early");
    a.flush(Some(LIMIT)).unwrap();
}

const CHILD_COUNT: u32 = 20_000;

/// Starts this test program again as a receiver that prints what it gets.
fn start_receiver() -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "child_that_receives", "--ignored", "--nocapture"])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap()
}

#[test]
#[ignore = "not a test: the process that a_killed_peer_comes_back starts and kills"]
fn child_that_receives() {
    let node = builder(703, 2).build().unwrap();
    let socket = node.bind(addr(703, 2, 4000)).unwrap();
    socket.set_recv_timeout(Some(LIMIT));
    let mut buf = [0; 500];
    let dropped = node.counters().into_iter().find(|(name, _)| *name == "recv_drop_no_sock");
    println!("dropped {}.", dropped.unwrap().1);
    loop {
        socket.recv(&mut buf).unwrap();
        let i = u32::from_be_bytes(buf[..4].try_into().unwrap());
        println!("got {i}.");
        if i + 1 == CHILD_COUNT {
            node.shutdown(LIMIT);
            return;
        }
    }
}

#[test]
fn a_killed_peer_comes_back() {
    let node = builder(703, 1).build().unwrap();
    let socket = node.bind(addr(703, 1, 4000)).unwrap();
    socket.set_send_timeout(Some(LIMIT));
    let lives = thread::scope(|s| {
        s.spawn(|| {
            for i in 0..CHILD_COUNT {
                let mut message = [0; 500];
                message[..4].copy_from_slice(&i.to_be_bytes());
                socket.send_to(&message, addr(703, 2, 4000)).unwrap();
            }
            socket.flush(Some(LIMIT)).unwrap();
        });
        let deadline = Instant::now() + LIMIT;
        let mut lives = Vec::new();
        for life in 0..3 {
            let mut child = start_receiver();
            let lines = BufReader::new(child.stdout.take().unwrap()).lines();
            let (mut got, mut dropped) = (Vec::new(), 0);
            // The test harness prints too, the first number on a line with it. The last line of a
            // killed process may be cut short.
            let number = |line: &str, word| {
                let number = line.split(word).nth(1)?.strip_suffix('.')?;
                Some(number.parse::<u32>().unwrap())
            };
            for line in lines {
                let line = line.unwrap();
                got.extend(number(&line, "got "));
                dropped = number(&line, "dropped ").unwrap_or(dropped);
                assert!(Instant::now() < deadline, "life {life} got {} messages", got.len());
                if life < 2 && got.len() == 3000 {
                    // Its output is still read to the end.
                    child.kill().unwrap();
                }
            }
            child.wait().unwrap();
            lives.push((got, dropped));
        }
        lives
    });
    for (got, _) in &lives {
        assert!(got.windows(2).all(|w| w[1] == w[0] + 1), "one life sees no gap and no repetition");
    }
    // Messages that one process had not acknowledged are sent again to the next, so none can be
    // missing, except those that the dead process had received and not printed, and those that came
    // before a process had bound its socket.
    assert_eq!(lives[0].0[0], lives[0].1);
    assert_eq!(lives[2].0.last(), Some(&(CHILD_COUNT - 1)));
    // Its receive queue, and what was sent before it could say that the queue is full.
    let in_hand = 2 * 106_496 / 500 + 1;
    for pair in lives.windows(2) {
        let (last, next) = (*pair[0].0.last().unwrap(), pair[1].0[0]);
        let dropped = pair[1].1;
        assert!(next <= last + 1 + in_hand + dropped, "from {last} to {next}, {dropped} dropped");
    }
}

/// Opens a TCP connection as a peer of a node would.
fn connect_from(from: std::net::IpAddr, to: std::net::SocketAddr) -> std::net::TcpStream {
    let family = rustix::net::AddressFamily::INET;
    let socket = rustix::net::socket(family, rustix::net::SocketType::STREAM, None).unwrap();
    rustix::net::bind(&socket, &std::net::SocketAddr::new(from, 0)).unwrap();
    rustix::net::connect(&socket, &to).unwrap();
    socket.into()
}

// tests: a refused connection is not reset at once, or its opener would storm
#[test]
fn a_refused_connection_is_kept_for_a_second() {
    let limits = Limits { links_extra_per_peer: 0, ..Limits::default() };
    let node = builder(240, 2).limits(limits).build().unwrap();
    let (peer, port) = (ip(240, 1), addr(240, 2, 16385));
    let taken = connect_from(peer, port);
    let mut refused = connect_from(peer, port);
    refused.set_read_timeout(Some(LIMIT)).unwrap();
    let begun = Instant::now();
    let end = std::io::Read::read(&mut refused, &mut [0; 1]);
    assert!(matches!(end, Ok(0)) || end.is_err(), "no byte is sent on it");
    let kept = begun.elapsed();
    assert!(kept >= Duration::from_millis(900), "closed after {kept:?}");
    assert_eq!(node.info().links.len(), 1);
    drop(taken);
}
