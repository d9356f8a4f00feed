//! Frames that make no sense, and frames in an order that makes none.

use std::io::Write;
use std::time::Duration;

use crate::common::{LIMIT, addr, ip};
use crate::raw::{Frame, MAP, dial, ends, frame_for, garbage, greeting, message};
use crate::scene::{NODE, SINK, Scene, wait_until};

#[test]
fn nonsense_costs_its_sender_the_connection() {
    let scene = Scene::new(940, |b| b);
    let sink = scene.sink();
    let node = ip(940, NODE);
    scene.during_traffic(|| {
        // A long enough row of bytes announces a message of any length.
        let stream = dial(ip(940, 1), node, None);
        drop((&stream).write_all(&garbage(64 << 10)));
        ends(&stream);
        assert_eq!(scene.counter("bl_peer_oversized"), 1);

        let stream = dial(ip(940, 2), node, None);
        let long = Frame { sequence: 1, len: (1 << 20) + 1, ports: (9, SINK), ..Frame::default() };
        (&stream).write_all(&long.bytes(&[])).unwrap();
        ends(&stream);
        assert_eq!(scene.counter("bl_peer_oversized"), 2);
        assert_eq!(scene.counter("bl_peer_errors"), 2);

        // Streams that end early: within a header, within a payload, a byte before its end.
        let cuts = [20, 48, 148, 1047];
        for (n, cut) in cuts.into_iter().enumerate() {
            let resets = scene.counter("conn_reset");
            let stream = dial(ip(940, 3 + n as u8), node, None);
            (&stream).write_all(&message(1, &[7; 1000])[..cut]).unwrap();
            drop(stream);
            wait_until("the end", || scene.counter("conn_reset") > resets);
        }

        // A map of a wrong length is ignored; the connection continues.
        let stream = dial(ip(940, 10), node, None);
        for len in [100, 0, 8191, 8193, 1 << 20] {
            let map = Frame { len, flags: MAP, ..Frame::default() };
            (&stream).write_all(&map.bytes(&vec![0xff; len as usize])).unwrap();
        }
        (&stream).write_all(&message(1, b"after the maps")).unwrap();
        assert_eq!(sink.recv_message().unwrap().to_vec(), b"after the maps");
        let info = scene.node.info();
        let known = info.connections.iter().find(|c| c.remote == ip(940, 10)).unwrap();
        assert!(!known.congested);
        assert_eq!(scene.counter("bl_peer_nonsense"), 5);
    });
    sink.set_nonblocking(true);
    assert_eq!(sink.recv(&mut [0; 8]).unwrap_err().errno(), 11, "nothing of that is delivered");
}

#[test]
fn a_peer_that_breaks_the_order_harms_its_own_messages_only() {
    let scene = Scene::new(941, |b| b);
    let sink = scene.sink();
    let node = ip(941, NODE);
    let next = || sink.recv_message().unwrap().to_vec();
    scene.during_traffic(|| {
        // Repeated sequence numbers, old ones, and the largest possible.
        let stream = dial(ip(941, 1), node, None);
        (&stream).write_all(&greeting(1, 0)).unwrap();
        for (sequence, payload) in
            [(5, b"five"), (5, b"late"), (3, b"late"), (1 << 60, b"leap"), (6, b"late")]
        {
            (&stream).write_all(&message(sequence, payload)).unwrap();
        }
        (&stream).write_all(&message(u64::MAX, b"last")).unwrap();
        assert_eq!([next(), next(), next()], [b"five", b"leap", b"last"]);
        assert_eq!(scene.counter("recv_drop_old_seq"), 3);
        // Its next process begins anew. While the earlier one's connection is there, the first of
        // the next is closed, and the second is believed.
        let doubted = dial(ip(941, 1), node, None);
        (&doubted).write_all(&greeting(2, 0)).unwrap();
        ends(&doubted);
        let again = dial(ip(941, 1), node, None);
        (&again).write_all(&greeting(2, 0)).unwrap();
        (&again).write_all(&message(1, b"anew")).unwrap();
        assert_eq!(next(), b"anew");
        ends(&stream);
        assert_eq!(scene.counter("bl_peer_restarts"), 1);

        // Greeted as a bowline node on one connection, and not on the next.
        let stream = dial(ip(941, 2), node, None);
        (&stream).write_all(&greeting(1, 0)).unwrap();
        (&stream).write_all(&message(1, b"greeted")).unwrap();
        assert_eq!(next(), b"greeted");
        let rude = dial(ip(941, 2), node, None);
        (&rude).write_all(&message(1, b"rude")).unwrap();
        assert_eq!(next(), b"rude", "taken for a kernel that has its address now");
        ends(&stream);
        assert_eq!(scene.counter("bl_peer_restarts"), 2);

        // The other way round: a second connection is in use when the first one greets.
        let first = dial(ip(941, 3), node, None);
        (&first).write_all(&message(1, b"one")).unwrap();
        assert_eq!(next(), b"one");
        let second = dial(ip(941, 3), node, None);
        (&second).write_all(&message(2, b"two")).unwrap();
        assert_eq!(next(), b"two");
        (&first).write_all(&greeting(1, 0)).unwrap();
        (&first).write_all(&message(3, b"three")).unwrap();
        assert_eq!(next(), b"three");
        (&second).write_all(&message(4, b"not greeted")).unwrap();
        ends(&second);
        assert_eq!(scene.counter("bl_peer_errors"), 1);

        // Acknowledgements of messages never sent, before and after the numbers are in use, are
        // ignored.
        let to = addr(941, 4, 77);
        for payload in [b"a", b"b", b"c"] {
            sink.send_to(payload, to).unwrap();
        }
        let stream = dial(ip(941, 4), node, None);
        let ack = Frame { ack: u64::MAX, ..Frame::default() }.bytes(&[]);
        (&stream).write_all(&greeting(1, u64::MAX)).unwrap();
        (&stream).write_all(&ack).unwrap();
        let mut last = 0;
        for payload in [b"a", b"b", b"c"] {
            let (number, came) = frame_for(&stream, 77);
            assert_eq!(came, payload);
            last = number;
        }
        (&stream).write_all(&ack).unwrap();
        assert!(sink.flush(Some(Duration::from_millis(100))).is_err());
        (&stream).write_all(&Frame { ack: last, ..Frame::default() }.bytes(&[])).unwrap();
        sink.flush(Some(LIMIT)).unwrap();
        (first, second, again, rude, stream)
    });
    sink.set_nonblocking(true);
    assert_eq!(sink.recv(&mut [0; 8]).unwrap_err().errno(), 11, "nothing else is delivered");
}
