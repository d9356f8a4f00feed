//! RDS: a program that ends without losing what it has sent, and without a thread that hangs.

use std::thread;
use std::time::Duration;

use bowline::rds::{ErrorKind, Node};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

const FROM: &str = "127.77.12.1:4000";
const TO: &str = "127.77.12.2:4000";

fn main() -> Result<()> {
    let node = Node::builder().address("127.77.12.1").build()?;
    let other = Node::builder().address("127.77.12.2").build()?;
    let socket = node.bind(FROM)?;
    let receiver = other.bind(TO)?;

    thread::scope(|scope| {
        // A thread that receives, as most programs have one: the shutdown below ends its wait.
        let waits = scope.spawn(|| socket.recv_message().expect_err("nobody sends to it").kind());

        for number in 0..100_u32 {
            socket.send_to(&number.to_be_bytes(), TO)?;
        }
        // A socket that is dropped, and a process that ends, take along what is not acknowledged.
        // This waits until everything of all sockets is, at most so long, and then ends the node.
        // `Socket::flush` waits for one socket.
        if !node.shutdown(Duration::from_secs(10)) {
            return Err("not everything has reached its node".into());
        }
        assert_eq!(waits.join().expect("no panic"), ErrorKind::ShutDown);
        Result::Ok(())
    })?;

    // What was acknowledged has reached the receiver's node, and waits there for its program.
    for number in 0..100_u32 {
        assert_eq!(receiver.recv_message()?.to_vec(), number.to_be_bytes());
    }
    println!("all has come");
    Ok(())
}
