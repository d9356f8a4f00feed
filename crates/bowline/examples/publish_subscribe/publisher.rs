//! Publish and subscribe: the publisher. A slow subscriber delays neither it nor the others.
//!
//! ```text
//! cargo run --example publish_subscribe_publisher -- [ADDRESS:PORT [MILLISECONDS]]
//! ```
//!
//! By default it is at 127.0.0.1:4000 and publishes every 10 ms. The node is its own; where the
//! environment names a socket of `bowline node` in BOWLINE_RDS_SOCKET, it is that one, with the
//! same program.

use std::collections::HashMap;
use std::env;
use std::error::Error;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use bowline::rds::{Node, Socket};

/// Length of an update in bytes; it begins with its number.
const UPDATE_LEN: usize = 1024;
/// Bytes that a subscriber's node may leave unacknowledged: 32 updates. More bridge a longer pause,
/// and are older when they arrive.
const SEND_BUFFER: usize = 32 * UPDATE_LEN;
/// Most subscribers; more are ignored until one leaves.
const SUBSCRIBERS_MAX: usize = 64;
/// A subscriber that has not repeated its subscription for this long is forgotten: RDS does not say
/// that a program has ended.
const LEASE: Duration = Duration::from_secs(10);

/// A subscriber has a socket of its own at the publisher. The send buffer is the socket's, so one
/// whose machine does not acknowledge fills its own only.
struct Subscriber {
    socket: Socket,
    renewed: Instant,
    sent: u64,
    dropped: u64,
}

impl Subscriber {
    fn open(node: &Node, own: SocketAddr) -> Result<Self, bowline::rds::Error> {
        let socket = node.bind((own.ip(), 0))?;
        socket.set_send_buffer(SEND_BUFFER)?;
        socket.set_nonblocking(true);
        Ok(Self { socket, renewed: Instant::now(), sent: 0, dropped: 0 })
    }

    /// Sends an update now or not at all. A subscriber that has caught up gets the newest one then.
    fn publish(&mut self, update: &[u8], to: SocketAddr) {
        match self.socket.send_to(update, to) {
            Ok(_) => self.sent += 1,
            // Congested: the program does not receive. QueueFull: its node does not acknowledge. If
            // the publisher's node has ended, the next receive fails.
            Err(_) => self.dropped += 1,
        }
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = env::args().skip(1);
    let own: SocketAddr = args.next().as_deref().unwrap_or("127.0.0.1:4000").parse()?;
    let interval = Duration::from_millis(args.next().as_deref().unwrap_or("10").parse()?);
    let node = match env::var_os("BOWLINE_RDS_SOCKET") {
        Some(place) => Node::at(place)?,
        None => Node::builder().address(own.ip()).build()?,
    };
    let socket = node.bind(own)?;
    println!("{own} publishes");
    let mut subscribers: HashMap<SocketAddr, Subscriber> = HashMap::new();
    let mut next = Instant::now();
    for number in 1_u64.. {
        // Updates that were due while the machine had other work are left out.
        next = Instant::now().max(next + interval);
        // Until the next update is due: who comes, who stays, who leaves.
        loop {
            socket.set_recv_timeout(Some(next.saturating_duration_since(Instant::now())));
            let message = match socket.recv_message() {
                Err(error) if error.is_timed_out() => break,
                received => received?,
            };
            let from = message.source();
            let is_full = subscribers.len() == SUBSCRIBERS_MAX;
            match &*message.to_vec() {
                b"subscribe" => match subscribers.get_mut(&from) {
                    Some(subscriber) => subscriber.renewed = Instant::now(),
                    None if is_full => println!("{from}: there are {SUBSCRIBERS_MAX} already"),
                    None => {
                        subscribers.insert(from, Subscriber::open(&node, own)?);
                        println!("{from} subscribes");
                    }
                },
                b"leave" => leave(from, subscribers.remove(&from)),
                _ => println!("{from}: neither subscribe nor leave"),
            }
            if Instant::now() >= next {
                break;
            }
        }
        let mut update = number.to_be_bytes().to_vec();
        update.resize(UPDATE_LEN, 0);
        for (to, subscriber) in &mut subscribers {
            subscriber.publish(&update, *to);
        }
        let ended = |subscriber: &Subscriber| subscriber.renewed.elapsed() > LEASE;
        // Closing a socket cancels what its subscriber has not acknowledged.
        subscribers.extract_if(|_, subscriber| ended(subscriber)).for_each(|(to, subscriber)| {
            println!("{to} has not been heard for {LEASE:?}");
            leave(to, Some(subscriber));
        });
    }
    Ok(())
}

/// Prints what a subscriber was sent; nothing after a second `leave`.
fn leave(from: SocketAddr, subscriber: Option<Subscriber>) {
    if let Some(Subscriber { sent, dropped, .. }) = subscriber {
        println!("{from} leaves: {sent} updates sent, {dropped} dropped");
    }
}
