//! More than a node can take: pings, messages that are never read, messages that never end.

use std::io::Write;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::thread;
use std::time::Duration;

use bowline::rds::Limits;

use crate::common::ip;
use crate::memory::{KIB, growth};
use crate::raw::{Frame, dial, ends, greeting, has_ended, message};
use crate::scene::{NODE, Scene, wait_until};

#[test]
fn endless_pings_are_answered_as_far_as_the_peer_listens() {
    const PINGS: u64 = 50_000;
    let scene = Scene::new(943, |b| b);
    let attack = |n: u8, hello: &[u8], first: u64| {
        let (dropped, pinged) = (scene.counter("bl_pongs_dropped"), scene.counter("recv_ping"));
        let ((stream, most), grown) = growth(|| {
            let stream = dial(ip(943, n), ip(943, NODE), Some(4096));
            (&stream).write_all(hello).unwrap();
            let mut most = 0;
            for chunk in 0..PINGS / 500 {
                let mut bytes = Vec::new();
                for i in 0..500 {
                    let sequence = first + chunk * 500 + i;
                    let ping = Frame { sequence, ports: (5, 0), ..Frame::default() };
                    bytes.extend(ping.bytes(&[]));
                }
                (&stream).write_all(&bytes).unwrap();
                let queued = |p: &bowline::rds::PathInfo| p.send_messages + p.retrans_messages;
                let info = scene.node.info();
                let of = info.paths.iter().filter(|p| p.remote == ip(943, n));
                most = most.max(of.map(queued).sum());
            }
            wait_until("all pings", || scene.counter("recv_ping") >= pinged + PINGS);
            (stream, most)
        });
        let dropped = scene.counter("bl_pongs_dropped") - dropped;
        println!("{dropped} not answered, {most} queued, {} KiB", grown / KIB);
        assert!(dropped > PINGS / 2, "{dropped} not answered");
        // The limit is 64; the node's own probe may wait too.
        assert!(most <= 66, "{most} queued");
        stream
    };
    scene.during_traffic(|| {
        // A kernel's TCP acknowledges; a bowline node that does not, keeps what it was sent
        // waiting.
        let ((kernel, bowline), grown) =
            growth(|| (attack(1, &[], 1), attack(2, &greeting(1, 0), 1)));
        assert!(grown < 24 * 1024 * KIB, "{} KiB", grown / KIB);
        (kernel, bowline)
    });
}

#[test]
fn a_peer_that_ignores_congestion_is_not_read() {
    const COUNT: u32 = 8192;
    const PER_PEER: usize = 256 << 10;
    let limits = Limits { recv_bytes_per_peer: PER_PEER, ..Limits::default() };
    let scene = Scene::new(945, |b| b.limits(limits.clone()).default_recv_buffer(16 << 10));
    let sink = scene.sink();
    scene.during_traffic(|| {
        let stream = dial(ip(945, 1), ip(945, NODE), None);
        let written = AtomicU64::new(0);
        thread::scope(|s| {
            s.spawn(|| {
                (&stream).write_all(&greeting(1, 0)).unwrap();
                for i in 0..COUNT {
                    let mut payload = [i as u8; 8192];
                    payload[..4].copy_from_slice(&i.to_be_bytes());
                    (&stream).write_all(&message(1 + u64::from(i), &payload)).unwrap();
                    written.store(u64::from(i), Relaxed);
                }
            });
            wait_until("a pause", || scene.counter("bl_read_pauses") > 0);
            let mut before = u64::MAX;
            wait_until("the writer to be stopped", || {
                thread::sleep(Duration::from_millis(50));
                std::mem::replace(&mut before, written.load(Relaxed)) == before
            });
            assert!(before + 1 < u64::from(COUNT), "TCP took everything: nothing was tried");
            let held: usize =
                scene.node.info().sockets.iter().map(|s| s.recv_bytes).max().unwrap_or(0);
            println!("{before} messages written, {held} bytes wait");
            // What was read before the limit showed comes on top: one read, and what it completed.
            assert!(held <= PER_PEER + (256 << 10) + 8192, "{held} bytes wait");
            let mut buf = [0; 8192];
            for i in 0..COUNT {
                assert_eq!(sink.recv(&mut buf).unwrap(), buf.len());
                assert_eq!(buf[..4], i.to_be_bytes());
                assert!(buf[4..].iter().all(|b| *b == i as u8), "message {i}");
            }
        });
        stream // closed before its end is read, it would take its last messages with it
    });
}

#[test]
fn connecting_again_does_not_get_round_the_limits() {
    const PER_PEER: usize = 256 << 10;
    let limits = Limits { recv_bytes_per_peer: PER_PEER, ..Limits::default() };
    let scene = Scene::new(951, |b| b.limits(limits.clone()));
    let sink = scene.sink();
    scene.during_traffic(|| {
        let mut sequence = 0;
        let mut connect = |greets: bool, peer: u8| {
            let stream = dial(ip(951, peer), ip(951, NODE), None);
            let mut bytes = if greets { greeting(1, 0) } else { Vec::new() };
            for _ in 0..60 {
                sequence += 1;
                bytes.extend(message(sequence, &[9; 4096]));
            }
            // The node may end the connection at any time.
            stream.set_write_timeout(Some(Duration::from_millis(50))).unwrap();
            drop((&stream).write_all(&bytes));
            thread::sleep(Duration::from_millis(5));
        };
        let mut most = 0;
        // What ended connections of a peer that goes by TCP leave is taken as far as 8 MiB more; 19
        // MiB are offered.
        for (peer, greets, rest) in [(1, true, 512 << 10), (2, false, 8 << 20)] {
            most += PER_PEER + rest;
            for _ in 0..80 {
                connect(greets, peer);
            }
            let info = scene.node.info();
            let held: usize = info.sockets.iter().map(|s| s.recv_bytes).max().unwrap_or(0);
            println!("{held} bytes wait, {} pauses", scene.counter("bl_read_pauses"));
            assert!(held <= most, "{held} bytes wait");
        }
    });
    drop(sink);
}

/// The memory that a flood took is returned to the system afterwards.
#[cfg(target_env = "gnu")]
#[test]
fn memory_of_a_flood_goes_back_to_the_system() {
    const PEERS: u8 = 150;
    const PIECE: usize = 1_000_000;
    let resident = || {
        let pages = std::fs::read_to_string("/proc/self/statm").unwrap();
        pages.split(' ').nth(1).unwrap().parse::<usize>().unwrap() * 4096
    };
    let _scene = Scene::new(952, |b| b);
    let before = resident();
    let whole = message(1, &vec![5; PIECE + 1]);
    let start = |n: u8| {
        let stream = dial(ip(952, n), ip(952, NODE), None);
        (&stream).write_all(&whole[..48 + PIECE]).unwrap();
        stream
    };
    let peers: Vec<_> = (1..=PEERS).map(start).collect();
    let most = usize::from(PEERS) * PIECE;
    wait_until("the node to hold it all", || resident() > before + most * 9 / 10);
    drop(peers);
    wait_until("it to be given back", || resident() < before + most / 3);
}

#[test]
fn unfinished_messages_lose_the_oldest() {
    const PIECE: usize = 256 << 10;
    const LEN: usize = 300 << 10;
    // Four pieces, and what completes one of the messages.
    let limits = Limits { partial_bytes_total: 4 * PIECE + (128 << 10), ..Limits::default() };
    let scene = Scene::new(946, |b| b.limits(limits.clone()));
    let sink = scene.sink();
    scene.during_traffic(|| {
        let start = |n: u8| {
            let stream = dial(ip(946, n), ip(946, NODE), None);
            let whole = message(1, &vec![n; LEN]);
            (&stream).write_all(&whole[..48 + PIECE]).unwrap();
            let came = || {
                let info = scene.node.info();
                info.links
                    .iter()
                    .any(|l| l.remote.ip() == ip(946, n) && l.received_bytes >= (48 + PIECE) as u64)
            };
            // Dropped messages are gone.
            wait_until("its beginning", || came() || has_ended(&stream));
            stream.set_nonblocking(false).unwrap();
            (stream, whole)
        };
        let (peers, grown) = growth(|| (1..=12).map(start).collect::<Vec<_>>());
        println!("memory grew by {} KiB", grown / KIB);
        wait_until("drops", || scene.counter("bl_partials_dropped") >= 8);
        assert_eq!(scene.counter("bl_partials_dropped"), 8);
        let (dropped, kept) = peers.split_at(8);
        for (stream, _) in dropped {
            ends(stream);
        }
        for (stream, whole) in kept {
            (&*stream).write_all(&whole[48 + PIECE..]).unwrap();
            assert_eq!(sink.recv_message().unwrap().to_vec(), whole[48..]);
        }
        assert_eq!(scene.counter("bl_partials_dropped"), 8);
        peers
    });
}
