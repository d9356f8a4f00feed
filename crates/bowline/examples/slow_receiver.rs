//! RDS: a receiver that does not keep up, and what its sender can do.

use std::thread;
use std::time::Duration;

use bowline::rds::{ErrorKind, Interest, Node};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

const FROM: &str = "127.77.11.1:4000";
const TO: &str = "127.77.11.2:4000";
const MESSAGE: [u8; 8192] = [7; 8192];
const MORE: usize = 500;

fn main() -> Result<()> {
    let sender = Node::builder().address("127.77.11.1").build()?.bind(FROM)?;
    let receiver = Node::builder().address("127.77.11.2").build()?.bind(TO)?;
    receiver.set_recv_timeout(Some(Duration::from_secs(10)));

    // A program that has better things to do than to wait is told what it would wait for.
    sender.set_nonblocking(true);
    let mut sent = 0;
    let why = loop {
        match sender.send_to(&MESSAGE, TO) {
            Ok(_) => sent += 1,
            // The send buffer is full of messages that the other node has not acknowledged yet.
            Err(error) if error.kind() == ErrorKind::QueueFull => {
                sender.wait(Interest::WRITE, Some(Duration::from_secs(10)))?;
            }
            Err(error) => break error,
        }
    };
    // The receive buffer is, of messages that its program has not received: both have 104 KiB,
    // unless `set_send_buffer` and `set_recv_buffer` say otherwise. Other destinations take
    // messages as before.
    println!("{sent} messages are on their way, then: {why}");
    assert_eq!(why.kind(), ErrorKind::Congested);

    // One that can wait sets a limit. Nothing is sent when it has passed.
    sender.set_nonblocking(false);
    sender.set_send_timeout(Some(Duration::from_millis(100)));
    let why = sender.send_to(&MESSAGE, TO).expect_err("nobody has received anything");
    assert_eq!(why.kind(), ErrorKind::TimedOut);

    // Once the receiver is at it, the sender goes at its speed, and nothing is lost.
    sender.set_send_timeout(Some(Duration::from_secs(10)));
    thread::scope(|scope| {
        let receives = scope.spawn(|| -> std::result::Result<usize, bowline::rds::Error> {
            let mut buf = [0; 8192];
            for received in 0..sent + MORE {
                assert_eq!(receiver.recv(&mut buf)?, MESSAGE.len(), "message {received}");
            }
            Ok(sent + MORE)
        });
        for _ in 0..MORE {
            sender.send_to(&MESSAGE, TO)?;
        }
        let received = receives.join().expect("no panic")?;
        println!("{received} messages came, each once and in order");
        Ok(())
    })
}
