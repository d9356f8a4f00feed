//! RDS in a program with an event loop of its own, here poll(2): mio, epoll and others wait for the
//! same descriptor.

use std::time::Duration;

use bowline::rds::{Control, ErrorKind, Interest, Node};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

const FROM: &str = "127.77.13.1:4000";
const TO: &str = "127.77.13.2:4000";
const COUNT: u32 = 300;

fn main() -> Result<()> {
    let sender = Node::builder().address("127.77.13.1").build()?.bind(FROM)?;
    let receiver = Node::builder().address("127.77.13.2").build()?.bind(TO)?;
    for socket in [&sender, &receiver] {
        socket.set_nonblocking(true);
    }
    // A destination that is no longer congested is told as a notification among the messages.
    sender.set_cong_monitor(true)?;

    let (mut sent, mut received) = (0, 0);
    let fds = (sender.event_fd()?, receiver.event_fd()?);
    while received < COUNT {
        // Both are tried until they would have to wait: only then does a descriptor tell of the
        // next change.
        while sent < COUNT {
            match sender.send_to(&[sent.to_be_bytes(); 1024].concat(), TO) {
                Ok(_) => sent += 1,
                Err(error) if error.kind().is_would_block() => break,
                Err(error) => return Err(error.into()),
            }
        }
        for socket in [&sender, &receiver] {
            loop {
                match socket.recv_message() {
                    Ok(message) if message.is_notification() => {
                        let is_update = |c: &Control| matches!(c, Control::CongestionUpdate(_));
                        assert!(message.control().iter().any(is_update));
                    }
                    Ok(message) => {
                        assert_eq!(message.to_vec()[..4], received.to_be_bytes());
                        received += 1;
                    }
                    Err(error) if error.kind() == ErrorKind::Empty => break,
                    Err(error) => return Err(error.into()),
                }
            }
        }
        // Readable: there is something to receive, or a send that was refused may succeed now.
        let mut waits = [&fds.0, &fds.1].map(|fd| PollFd::new(&**fd, PollFlags::IN));
        if received < COUNT && poll(&mut waits, Some(&Timespec { tv_sec: 10, tv_nsec: 0 }))? == 0 {
            return Err("nothing has happened for ten seconds".into());
        }
    }
    println!("{received} messages");

    // For a single socket there is no need of a descriptor.
    let idle = receiver.wait(Interest::READ, Some(Duration::from_millis(10)));
    assert_eq!(idle.map_err(|error| error.kind()), Err(ErrorKind::TimedOut));
    Ok(())
}
