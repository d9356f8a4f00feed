//! Timeouts and cancellation: the receiver of orders.
//!
//! ```text
//! cargo run --example deadlines_receiver -- [ADDRESS:PORT [MILLISECONDS PER ORDER]]
//! ```
//!
//! By default it is at 127.0.0.1:4000 and takes 700 ms for an order, more than its sender waits.
//! The node is its own; where the environment names a socket of `bowline node` in
//! BOWLINE_RDS_SOCKET, it is that one, with the same program.

use std::env;
use std::error::Error;
use std::net::SocketAddr;
use std::thread::sleep;
use std::time::Duration;

use bowline::rds::Node;

/// Bytes of orders that wait before the port is congested: two of the sender's.
const RECV_BUFFER: usize = 2048;
/// Longest wait until the sender takes a confirmation.
const PATIENCE: Duration = Duration::from_secs(1);

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = env::args().skip(1);
    let own: SocketAddr = args.next().as_deref().unwrap_or("127.0.0.1:4000").parse()?;
    let work = Duration::from_millis(args.next().as_deref().unwrap_or("700").parse()?);
    let node = match env::var_os("BOWLINE_RDS_SOCKET") {
        Some(place) => Node::at(place)?,
        None => Node::builder().address(own.ip()).build()?,
    };
    let socket = node.bind(own)?;
    socket.set_recv_buffer(RECV_BUFFER)?;
    socket.set_send_timeout(Some(PATIENCE));
    println!("{own} takes orders");
    loop {
        let order = socket.recv_message()?;
        let payload = order.to_vec();
        let Some(number) = payload.first_chunk() else { continue };
        sleep(work);
        println!("order {} is done", u32::from_be_bytes(*number));
        // If the node has ended, the next receive fails.
        if let Err(error) = socket.send_to(number, order.source()) {
            println!("{}: takes no confirmation: {error}", order.source());
            socket.cancel_sent_to(order.source())?;
        }
    }
}
