//! Sockets in tasks of a tokio runtime.
#![cfg(feature = "tokio")]

use std::io::IoSlice;
use std::time::Duration;

use bowline::rds::{ErrorKind, Interest};

mod common;
use common::{LIMIT, Pair, addr};

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap()
}

#[test]
fn tasks_exchange_messages_on_one_thread() {
    const ROUNDS: u32 = 1000;
    let pair = Pair::new(800);
    let (a, b) = pair.sockets(4000);
    runtime().block_on(async {
        let server = async {
            for _ in 0..ROUNDS {
                let message = b.recv_async().await.unwrap();
                b.send_to_async(&message.to_vec(), message.source()).await.unwrap();
            }
        };
        let client = async {
            for i in 0..ROUNDS {
                a.send_to_async(&i.to_be_bytes(), pair.b(4000)).await.unwrap();
                assert_eq!(a.recv_async().await.unwrap().to_vec(), i.to_be_bytes());
            }
        };
        let both = async { tokio::join!(server, client) };
        tokio::time::timeout(LIMIT, both).await.unwrap();
    });
}

#[test]
fn a_task_waits_for_room_and_for_time_limits() {
    let pair = Pair::new(801);
    let (a, b) = pair.sockets(4000);
    runtime().block_on(async {
        b.set_recv_timeout(Some(Duration::from_millis(30)));
        assert_eq!(b.recv_async().await.unwrap_err().errno(), 110);
        b.set_recv_timeout(None);
        let sender = async {
            for i in 0..2000_u32 {
                let mut message = [0; 2000];
                message[..4].copy_from_slice(&i.to_be_bytes());
                a.send_to_async(&message, pair.b(4000)).await.unwrap();
            }
        };
        let receiver = async {
            for i in 0..2000_u32 {
                let message = b.recv_async().await.unwrap();
                assert_eq!(message.to_vec()[..4], i.to_be_bytes());
            }
        };
        let both = async { tokio::join!(sender, receiver) };
        tokio::time::timeout(LIMIT, both).await.unwrap();

        a.set_send_timeout(Some(Duration::from_millis(30)));
        let nowhere = addr(801, 9, 4000);
        let mut errno = 0;
        for _ in 0..100 {
            if let Err(error) = a.send_to_async(&[0; 5000], nowhere).await {
                errno = error.errno().0;
                break;
            }
        }
        assert_eq!(errno, 110);
    });
}

#[test]
fn a_thread_and_a_task_wait_on_the_same_node() {
    let pair = Pair::new(802);
    let (a, b) = pair.sockets(4000);
    let (c, d) = pair.sockets(4001);
    std::thread::scope(|s| {
        s.spawn(|| {
            for _ in 0..500 {
                let message = b.recv_message().unwrap();
                b.send_to(&message.to_vec(), message.source()).unwrap();
            }
        });
        s.spawn(|| {
            for i in 0..500_u32 {
                a.send_to(&i.to_be_bytes(), pair.b(4000)).unwrap();
                assert_eq!(a.recv_message().unwrap().to_vec(), i.to_be_bytes());
            }
        });
        runtime().block_on(async {
            let server = async {
                for _ in 0..500 {
                    let message = d.recv_async().await.unwrap();
                    d.send_to_async(&message.to_vec(), message.source()).await.unwrap();
                }
            };
            let client = async {
                for i in 0..500_u32 {
                    c.send_to_async(&i.to_be_bytes(), pair.b(4001)).await.unwrap();
                    assert_eq!(c.recv_async().await.unwrap().to_vec(), i.to_be_bytes());
                }
            };
            let both = async { tokio::join!(server, client) };
            tokio::time::timeout(LIMIT, both).await.unwrap();
        });
    });
}

/// Calls that are dropped while they wait neither lose nor repeat a message.
#[test]
fn calls_may_be_dropped_while_they_wait() {
    const COUNT: u32 = 2000;
    let pair = Pair::new(803);
    let (a, b) = pair.sockets(4000);
    runtime().block_on(async {
        // A turn of the others, after which it has waited long enough.
        let soon = || tokio::task::yield_now();
        let mut dropped = [0, 0];
        let [sends, receives] = &mut dropped;
        let sender = async {
            for i in 0..COUNT {
                let mut message = [0; 2000];
                message[..4].copy_from_slice(&i.to_be_bytes());
                loop {
                    tokio::select! {
                        biased;
                        sent = a.send_to_async(&message, pair.b(4000)) => break assert_eq!(sent.unwrap(), 2000),
                        () = soon() => *sends += 1,
                    };
                }
            }
        };
        let receiver = async {
            for i in 0..COUNT {
                let message = loop {
                    tokio::select! {
                        biased;
                        message = b.recv_async() => break message.unwrap(),
                        () = soon() => *receives += 1,
                    };
                };
                assert_eq!(message.to_vec()[..4], i.to_be_bytes());
            }
        };
        let both = async { tokio::join!(sender, receiver) };
        tokio::time::timeout(LIMIT, both).await.unwrap();
        assert!(dropped.iter().all(|count| *count > 0), "sends and receives dropped: {dropped:?}");
    });
}

#[test]
fn a_connected_task_sends_from_slices_and_receives_into_a_buffer() {
    let pair = Pair::new(804);
    let (a, b) = pair.sockets(4000);
    runtime().block_on(async {
        let calls = async {
            assert_eq!(a.send_async(b"x").await.unwrap_err().kind(), ErrorKind::NotConnected);
            a.connect(pair.b(4000)).unwrap();
            assert_eq!(a.send_async(b"hello").await.unwrap(), 5);
            let parts = [IoSlice::new(b"he"), IoSlice::new(b"llo")];
            assert_eq!(a.send_vectored_to_async(&parts, pair.b(4000)).await.unwrap(), 5);
            let mut buf = [0; 8];
            for _ in 0..2 {
                assert_eq!(b.recv_from_async(&mut buf).await.unwrap(), (5, pair.a(4000)));
                assert_eq!(buf[..5], *b"hello");
            }
        };
        tokio::time::timeout(LIMIT, calls).await.unwrap();
    });
}

/// A runtime of several threads moves tasks between them.
#[test]
fn futures_may_change_their_thread() {
    fn may<T: Send>(_: T) {}
    let pair = Pair::new(808);
    let (a, b) = pair.sockets(4000);
    may(a.send_async(b"x"));
    may(a.send_batch_async(&[(pair.b(4000), b"x")]));
    may(a.send_vectored_to_async(&[IoSlice::new(b"x")], pair.b(4000)));
    may(b.recv_async());
    may(b.recv_from_async(&mut [0; 8]));
    may(b.recv_batch_async(&mut Vec::new(), 2));
    may(a.flush_async());
    may(pair.left.shutdown_async(LIMIT));
}

/// All messages arrive once and in order, although many of the calls are dropped.
#[test]
fn batches_may_be_dropped_while_they_wait() {
    const COUNT: u32 = 4000;
    let pair = Pair::new(805);
    let (a, b) = pair.sockets(4000);
    runtime().block_on(async {
        let soon = || tokio::task::yield_now();
        let mut dropped = [0, 0];
        let [sends, receives] = &mut dropped;
        let sender = async {
            let mut next = 0;
            while next < COUNT {
                let numbered = |i: u32| [&i.to_be_bytes()[..], &[0; 1996]].concat();
                let batch: Vec<_> = (next..COUNT.min(next + 16)).map(numbered).collect();
                let batch: Vec<_> = batch.iter().map(|one| (pair.b(4000), &one[..])).collect();
                tokio::select! {
                    biased;
                    sent = a.send_batch_async(&batch) => next += sent.unwrap() as u32,
                    () = soon() => *sends += 1,
                };
            }
        };
        let receiver = async {
            let mut all = Vec::new();
            while all.len() < COUNT as usize {
                tokio::select! {
                    biased;
                    got = b.recv_batch_async(&mut all, 16) => assert!((1..=16).contains(&got.unwrap())),
                    () = soon() => *receives += 1,
                };
            }
            for (i, message) in (0..COUNT).zip(&all) {
                assert_eq!(message.to_vec()[..4], i.to_be_bytes());
            }
        };
        let both = async { tokio::join!(sender, receiver) };
        tokio::time::timeout(LIMIT, both).await.unwrap();
        assert!(dropped.iter().all(|count| *count > 0), "sends and receives dropped: {dropped:?}");
    });
}

#[test]
fn a_flush_waits_for_acknowledgements_and_may_be_dropped() {
    let pair = Pair::new(806);
    let (a, b) = pair.sockets(4000);
    runtime().block_on(async {
        // Nobody answers there.
        a.send_to(b"kept", addr(806, 9, 4000)).unwrap();
        let flush = tokio::time::timeout(Duration::from_millis(30), a.flush_async()).await;
        assert!(flush.is_err(), "not acknowledged");
        a.cancel_sent_to(addr(806, 9, 4000)).unwrap();

        a.send_to(b"hello", pair.b(4000)).unwrap();
        tokio::time::timeout(LIMIT, a.flush_async()).await.unwrap().unwrap();
        let to_b = a.outstanding().unwrap().into_iter().find(|all| all.to == pair.b(4000));
        assert_eq!(to_b, None);
        b.wait_async(Interest::READ).await.unwrap();
        assert_eq!(b.recv_message().unwrap().to_vec(), b"hello");
        a.close();
        assert_eq!(a.flush_async().await.unwrap_err().kind(), ErrorKind::Closed);
    });
}

#[test]
fn a_shutdown_lets_other_tasks_run_and_may_be_dropped_before_it_ends_anything() {
    let pair = Pair::new(807);
    let (a, b) = pair.sockets(4000);
    runtime().block_on(async {
        let nowhere = addr(807, 9, 4000);
        a.send_to(b"kept", nowhere).unwrap();
        let dropped =
            tokio::time::timeout(Duration::from_millis(30), pair.left.shutdown_async(LIMIT)).await;
        assert!(dropped.is_err(), "a message is not acknowledged");
        a.send_to(b"the node runs on", pair.b(4000)).unwrap();
        assert_eq!(b.recv_async().await.unwrap().to_vec(), b"the node runs on");
        a.cancel_sent_to(nowhere).unwrap();

        a.send_to(b"last", pair.b(4000)).unwrap();
        let waiting = async { a.recv_async().await.unwrap_err().kind() };
        let all = async { tokio::join!(pair.left.shutdown_async(LIMIT), waiting) };
        let (acknowledged, waited) = tokio::time::timeout(LIMIT, all).await.unwrap();
        assert!(acknowledged);
        assert_eq!(waited, ErrorKind::ShutDown);
        assert_eq!(b.recv_async().await.unwrap().to_vec(), b"last");
        assert_eq!(a.send_to_async(b"x", nowhere).await.unwrap_err().kind(), ErrorKind::ShutDown);
    });
}
