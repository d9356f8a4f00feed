//! Publish and subscribe: a subscriber, which may be slow.
//!
//! ```text
//! cargo run --example publish_subscribe_subscriber --
//!     [ADDRESS [PUBLISHER:PORT [UPDATES [MILLISECONDS PER UPDATE [BYTES]]]]]
//! ```
//!
//! By default it is at 127.0.0.2, takes 200 updates of 127.0.0.1:4000 as fast as they come, and has
//! a receive buffer of 104 KiB; it may start before the publisher. The node is its own; where the
//! environment names a socket of `bowline node` in BOWLINE_RDS_SOCKET, it is that one, with the
//! same program.

use std::env;
use std::error::Error;
use std::net::{IpAddr, SocketAddr};
use std::thread::sleep;
use std::time::{Duration, Instant};

use bowline::rds::Node;

/// Interval of subscriptions. A publisher that was started again has forgotten its subscribers.
const RENEWAL: Duration = Duration::from_secs(1);

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = env::args().skip(1);
    let own: IpAddr = args.next().as_deref().unwrap_or("127.0.0.2").parse()?;
    let publisher: SocketAddr = args.next().as_deref().unwrap_or("127.0.0.1:4000").parse()?;
    let wanted: u64 = args.next().as_deref().unwrap_or("200").parse()?;
    let work = Duration::from_millis(args.next().as_deref().unwrap_or("0").parse()?);
    let buffer: usize = args.next().as_deref().unwrap_or("106496").parse()?;
    let node = match env::var_os("BOWLINE_RDS_SOCKET") {
        Some(place) => Node::at(place)?,
        None => Node::builder().address(own).build()?,
    };
    let socket = node.bind((own, 0))?;
    // A port is congested when more bytes than that wait. A small buffer has fewer and so younger
    // updates in it, a large one bridges longer pauses without a gap.
    socket.set_recv_buffer(buffer)?;
    socket.set_recv_timeout(Some(RENEWAL));
    let mut subscribed: Option<Instant> = None;
    let (mut taken, mut missed, mut last) = (0, 0, None);
    while taken < wanted {
        if subscribed.is_none_or(|at| at.elapsed() >= RENEWAL) {
            socket.send_to(b"subscribe", publisher)?;
            subscribed = Some(Instant::now());
        }
        let update = match socket.recv_message() {
            Err(error) if error.is_timed_out() => continue,
            received => received?,
        };
        // Each subscriber has a port of its own at the publisher.
        let payload = update.to_vec();
        let Some(number) = payload.first_chunk().filter(|_| update.source().ip() == publisher.ip())
        else {
            continue;
        };
        let number = u64::from_be_bytes(*number);
        // Messages of one socket come in order, so a gap is what the publisher has dropped.
        match last {
            Some(last) if number > last => missed += number - last - 1,
            Some(_) => println!("the publisher has started again"),
            None => println!("the first update is number {number}"),
        }
        last = Some(number);
        taken += 1;
        sleep(work);
    }
    socket.send_to(b"leave", publisher)?;
    // Or the message ends with the socket. The publisher may have gone: that is no failure here.
    let left = socket.flush(Some(RENEWAL));
    println!("{taken} updates taken, {missed} missed");
    if let Err(error) = left {
        println!("the publisher may not know that this subscriber has left: {error}");
    }
    Ok(())
}
