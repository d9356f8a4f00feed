//! Peers that, as kernels do, acknowledge by TCP alone.

use std::thread;
use std::time::{Duration, Instant};

mod common;
use common::{LIMIT, Pair};

#[test]
fn the_default_send_buffer_keeps_a_stream_flowing() {
    // The buffer takes thirteen of these: the sender waits for TCP's acknowledgements all the time.
    const COUNT: u32 = 40_000;
    let pair = Pair::with(900, |b| b.end_to_end(false));
    let (a, b) = pair.sockets(4000);
    let start = Instant::now();
    thread::scope(|s| {
        s.spawn(|| {
            let mut message = [0; 8192];
            for i in 0..COUNT {
                message[..4].copy_from_slice(&i.to_be_bytes());
                a.send_to(&message, pair.b(4000)).unwrap();
            }
        });
        let mut buf = [0; 8192];
        for i in 0..COUNT {
            b.recv(&mut buf).unwrap();
            assert_eq!(buf[..4], i.to_be_bytes());
        }
    });
    // Half a second when all is well; thirty seconds if each wait took its turn of a timer.
    let took = start.elapsed();
    println!("{COUNT} messages in {took:?}");
    assert!(took < Duration::from_secs(15), "{took:?}");
}

#[test]
fn what_a_peer_acknowledged_before_it_left_is_acknowledged() {
    for round in 0..10 {
        let pair = Pair::with(910 + round, |b| b.end_to_end(false));
        let (a, b) = pair.sockets(4000);
        for _ in 0..5 {
            a.send_to(&[1; 2000], pair.b(4000)).unwrap();
        }
        for _ in 0..5 {
            b.recv(&mut [0; 2000]).unwrap();
        }
        pair.right.shutdown(LIMIT);
        a.flush(Some(LIMIT)).unwrap();
    }
}
