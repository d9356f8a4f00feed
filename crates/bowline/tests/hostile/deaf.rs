//! Peers that do not read what they are sent.

use std::io::Write;
use std::time::{Duration, Instant};

use crate::common::{LIMIT, addr, ip};
use crate::memory::{KIB, growth};
use crate::raw::{Frame, dial, frame_for, greeting};
use crate::scene::{NODE, Scene};

#[test]
fn a_peer_that_never_reads_keeps_its_own_messages_waiting() {
    let scene = Scene::new(944, |b| b);
    let sink = scene.sink();
    scene.during_traffic(|| {
        let stream = dial(ip(944, 1), ip(944, NODE), Some(4096));
        (&stream).write_all(&greeting(1, 0)).unwrap();
        sink.set_nonblocking(true);
        let (sent, grown) = growth(|| {
            let mut sent = 0;
            let mut full: Option<Instant> = None;
            // For some time after the first one that is not taken.
            while sent < 1000 && full.is_none_or(|since| since.elapsed().as_millis() < 200) {
                match sink.send_to(&[3; 8192], addr(944, 1, 77)) {
                    Ok(_) => sent += 1,
                    Err(error) => {
                        assert_eq!(error.errno(), 11);
                        full.get_or_insert_with(Instant::now);
                    }
                }
            }
            sent
        });
        println!("{sent} messages taken, {} KiB", grown / KIB);
        // The send buffer, which may be passed by one message.
        assert_eq!(sent, 106_496 / 8192);
        // The peer begins to read.
        for _ in 0..sent {
            let (sequence, payload) = frame_for(&stream, 77);
            assert_eq!(payload, [3; 8192]);
            let ack = Frame { ack: sequence, ..Frame::default() };
            (&stream).write_all(&ack.bytes(&[])).unwrap();
        }
        sink.flush(Some(LIMIT)).unwrap();
        stream
    });
}

#[test]
fn a_peer_that_never_reads_does_not_hold_up_the_end() {
    let scene = Scene::new(949, |b| b);
    let sink = scene.sink();
    let stream = dial(ip(949, 1), ip(949, NODE), Some(4096));
    (&stream).write_all(&greeting(1, 0)).unwrap();
    for _ in 0..10 {
        sink.send_to(&[3; 8192], addr(949, 1, 77)).unwrap();
    }
    let start = Instant::now();
    assert!(!scene.node.shutdown(Duration::from_millis(200)), "not acknowledged");
    let took = start.elapsed();
    assert!(took < Duration::from_secs(5), "it took {took:?}");
}
