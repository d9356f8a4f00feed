//! Timeouts and cancellation: the sender of orders. Each has a deadline, and when that has passed,
//! the sender says what it knows of the order.
//!
//! ```text
//! cargo run --example deadlines_sender -- [ADDRESS [RECEIVER:PORT [ORDERS [MILLISECONDS]]]]
//! ```
//!
//! By default it is at 127.0.0.2 and sends ten orders to 127.0.0.1:4000, with 200 ms for each. The
//! node is its own; where the environment names a socket of `bowline node` in BOWLINE_RDS_SOCKET,
//! it is that one, with the same program.

use std::env;
use std::error::Error;
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use bowline::rds::{Node, Socket};

/// Length of an order in bytes; it begins with its number.
const ORDER_LEN: usize = 1024;

/// What is known of an order when its deadline has passed.
enum Outcome {
    /// The receiver has confirmed it.
    Done,
    /// The send failed. Nothing of it will ever arrive.
    NotSent,
    /// The receiver's node has acknowledged it. It waits there for its program, which may be slow,
    /// or it was dropped, because no program has the port.
    AtItsNode,
    /// It was sent, not acknowledged, and is cancelled. It may arrive or not.
    Unknown,
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Done => "done",
            Self::NotSent => "not sent",
            Self::AtItsNode => "at its node, not done yet",
            Self::Unknown => "cancelled, may arrive or not",
        })
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = env::args().skip(1);
    let own: IpAddr = args.next().as_deref().unwrap_or("127.0.0.2").parse()?;
    let receiver: SocketAddr = args.next().as_deref().unwrap_or("127.0.0.1:4000").parse()?;
    let orders: u32 = args.next().as_deref().unwrap_or("10").parse()?;
    let limit = Duration::from_millis(args.next().as_deref().unwrap_or("200").parse()?);
    let node = match env::var_os("BOWLINE_RDS_SOCKET") {
        Some(place) => Node::at(place)?,
        None => Node::builder().address(own).build()?,
    };
    let socket = node.bind((own, 0))?;
    for number in 1..=orders {
        let outcome = order(&socket, receiver, number, Instant::now() + limit)?;
        println!("order {number}: {outcome}");
    }
    Ok(())
}

/// Sends an order and waits until it is confirmed, both until `deadline`.
fn order(
    socket: &Socket,
    receiver: SocketAddr,
    number: u32,
    deadline: Instant,
) -> Result<Outcome, bowline::rds::Error> {
    let left = || Some(deadline.saturating_duration_since(Instant::now()));
    let mut payload = number.to_be_bytes().to_vec();
    payload.resize(ORDER_LEN, 0);
    // Waits while the receiver is congested, or the send buffer full.
    socket.set_send_timeout(left());
    match socket.send_to(&payload, receiver) {
        Err(error) if error.is_timed_out() => return Ok(Outcome::NotSent),
        sent => sent?,
    };
    loop {
        socket.set_recv_timeout(left());
        let mut confirmed = [0; 4];
        let from = match socket.recv_from(&mut confirmed) {
            Err(error) if error.is_timed_out() => break,
            received => received?.1,
        };
        match u32::from_be_bytes(confirmed) {
            _ if from != receiver => {}
            confirmed if confirmed == number => return Ok(Outcome::Done),
            // What was known of an earlier order may change later.
            earlier => println!("order {earlier}: done, too late"),
        }
    }
    // Nothing is left queued by this function, so what is outstanding is this order, or an earlier
    // one that was being written when it was cancelled. Too little is claimed then, never too much.
    if socket.outstanding()?.iter().all(|queued| queued.to != receiver) {
        return Ok(Outcome::AtItsNode);
    }
    socket.cancel_sent_to(receiver)?;
    Ok(Outcome::Unknown)
}
