//! Many connections at once, many in succession, and connections that never last.

use std::io::Write;
use std::net::{IpAddr, TcpListener, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use bowline::rds::{Limits, Paths};
use rustix::net::sockopt;

use crate::common::{LIMIT, addr, builder, ip};
use crate::descriptors::descriptors;
use crate::memory::{KIB, growth};
use crate::raw::{Frame, dial, frame_for, greeting, has_ended, listen};
use crate::scene::{ECHO, NODE, Scene, exchange, wait_until};

#[test]
fn a_crowd_that_says_nothing_is_held_within_the_limits() {
    const PEERS: u8 = 40;
    const EACH: usize = 10;
    let limits = Limits { peers_unproven: 16, links_extra_per_peer: 2, ..Limits::default() };
    let scene = Scene::new(942, |b| b.limits(limits.clone()));
    let late = builder(942, 202).build().unwrap();
    let (crowd, grown) = scene.during_traffic(|| {
        growth(|| {
            let mut crowd = Vec::new();
            for n in 0..PEERS as usize * EACH {
                let stream = dial(ip(942, 1 + (n % PEERS as usize) as u8), ip(942, NODE), None);
                drop((&stream).write(b"x"));
                crowd.push(stream);
            }
            wait_until("all to be accepted", || {
                scene.counter("bl_links_accepted") >= crowd.len() as u64
            });
            // A node that connects now is served all the same.
            let socket = late.bind(addr(942, 202, ECHO)).unwrap();
            socket.set_recv_timeout(Some(LIMIT));
            for round in 0..10 {
                exchange(&socket, addr(942, NODE, ECHO), round);
            }
            crowd
        })
    });
    let info = scene.node.info();
    let of_crowd = |remote: IpAddr| remote < ip(942, NODE);
    let peers = info.connections.iter().filter(|c| of_crowd(c.remote)).count();
    let links = info.links.iter().filter(|l| of_crowd(l.remote.ip())).count();
    println!("{peers} peers and {links} connections stay; memory grew by {} KiB", grown / KIB);
    assert!(peers <= 16, "{peers} peers");
    assert!(links <= 16 * (1 + 2), "{links} connections");
    // Connections that the node has dropped are closed, not kept for ever.
    let closed = || crowd.iter().filter(|s| has_ended(s)).count();
    wait_until("the others to end", || closed() >= crowd.len() - links);
    assert!(grown < 6 * 1024 * KIB, "{} KiB", grown / KIB);
}

#[test]
fn connections_that_come_and_go_leave_nothing() {
    const COUNT: u64 = 1000;
    let limits = Limits { peers_unproven: 4, ..Limits::default() };
    // One path: no more descriptors are taken for the friend while they are counted.
    let scene = Scene::new(950, |b| b.paths(Paths::One).limits(limits.clone()));
    scene.during_traffic(|| {
        let before = descriptors();
        let (_, grown) = growth(|| {
            for n in 0..COUNT {
                let stream = dial(ip(950, 1 + (n % 10) as u8), ip(950, NODE), None);
                // Some are closed in order, some in the middle of a header, some are reset.
                if n % 3 > 0 {
                    drop((&stream).write(&[0; 47]));
                }
                if n % 3 > 1 {
                    sockopt::set_socket_linger(&stream, Some(Duration::ZERO)).unwrap();
                }
            }
            // The system does not hand over each one that was reset before its turn.
            wait_until("them to be gone", || {
                let info = scene.node.info();
                scene.counter("bl_links_accepted") >= COUNT / 2
                    && !info.links.iter().any(|l| l.remote.ip() < ip(950, NODE))
            });
        });
        // A refused one is kept for a second.
        wait_until("their descriptors", || descriptors() <= before);
        let peers = scene.node.info().connections.len();
        println!("{peers} peers are known, memory grew by {} KiB", grown / KIB);
        assert!(peers <= 4 + 2, "{peers} peers");
        assert!(grown < 4 * 1024 * KIB, "{} KiB", grown / KIB);
    });
}

/// How often a node dials a peer within half a second that does this with each connection before
/// it resets it. It is waited for longer where it would have come to nothing else.
fn dialled(listener: &TcpListener, serve: impl Fn(&TcpStream, u64)) -> u64 {
    let end = Instant::now() + Duration::from_millis(500);
    let mut times = 0;
    while Instant::now() < end || times < 2 && Instant::now() < end + LIMIT {
        match listener.accept() {
            Ok((stream, _)) => {
                times += 1;
                stream.set_nonblocking(false).unwrap();
                stream.set_read_timeout(Some(LIMIT)).unwrap();
                serve(&stream, times);
                sockopt::set_socket_linger(&stream, Some(Duration::ZERO)).unwrap();
            }
            Err(_) => thread::sleep(Duration::from_micros(200)),
        }
    }
    times
}

// tests
#[test]
fn a_peer_that_resets_each_connection_is_not_dialled_without_pause() {
    let scene = Scene::new(948, |b| b.paths(Paths::One));
    let sink = scene.sink();
    scene.during_traffic(|| {
        let plain = listen(ip(948, 210));
        sink.send_to(b"x", addr(948, 210, 77)).unwrap();
        let at_once = dialled(&plain, |_, _| {});
        let polite = listen(ip(948, 211));
        sink.send_to(b"x", addr(948, 211, 77)).unwrap();
        let greeted = dialled(&polite, |mut stream, _| {
            drop(stream.write_all(&greeting(1, 0)));
            frame_for(stream, 77);
        });
        // A connection that has carried a message is made again at once; a pong that the peer
        // requested itself does not count.
        let cunning = listen(ip(948, 212));
        sink.send_to(b"x", addr(948, 212, 77)).unwrap();
        let pinged = dialled(&cunning, |mut stream, sequence| {
            let ping = Frame { sequence, ports: (5, 0), ..Frame::default() };
            let ack = Frame { ack: u64::MAX, ..Frame::default() };
            drop(stream.write_all(&greeting(1, u64::MAX)));
            drop(stream.write_all(&ping.bytes(&[])));
            frame_for(stream, 5);
            drop(stream.write_all(&ack.bytes(&[])));
        });
        println!("dialled {at_once}, {greeted} and {pinged} times in half a second");
        assert!((2..60).contains(&at_once), "{at_once} times");
        assert!((2..200).contains(&greeted), "{greeted} times");
        assert!((2..200).contains(&pinged), "{pinged} times");
    });
}
