//! Sockets in tasks of a tokio runtime.
#![cfg(feature = "tokio")]

use std::time::Duration;

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
                b.send_async(&message.to_vec(), message.source()).await.unwrap();
            }
        };
        let client = async {
            for i in 0..ROUNDS {
                a.send_async(&i.to_be_bytes(), pair.b(4000)).await.unwrap();
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
                a.send_async(&message, pair.b(4000)).await.unwrap();
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
            if let Err(error) = a.send_async(&[0; 5000], nowhere).await {
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
                    d.send_async(&message.to_vec(), message.source()).await.unwrap();
                }
            };
            let client = async {
                for i in 0..500_u32 {
                    c.send_async(&i.to_be_bytes(), pair.b(4001)).await.unwrap();
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
                        sent = a.send_async(&message, pair.b(4000)) => break assert_eq!(sent.unwrap(), 2000),
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
