//! Request and reply: the server. It answers any number of clients from one socket.
//!
//! ```text
//! cargo run --example request_reply_server -- [ADDRESS:PORT [MILLISECONDS PER REQUEST]]
//! ```
//!
//! By default it is at 127.0.0.1:4000. The node is its own; where the environment names a socket of
//! `bowline node` in BOWLINE_RDS_SOCKET, it is that one, with the same program.

use std::env;
use std::error::Error;
use std::net::SocketAddr;
use std::thread::sleep;
use std::time::Duration;

use bowline::rds::{ErrorKind, Interest, Message, Node, Socket};

/// Bytes before the text of a request: its number, which the reply repeats.
const NUMBER_LEN: usize = 8;

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = env::args().skip(1);
    let own: SocketAddr = args.next().as_deref().unwrap_or("127.0.0.1:4000").parse()?;
    let work = Duration::from_millis(args.next().as_deref().unwrap_or("0").parse()?);
    let node = match env::var_os("BOWLINE_RDS_SOCKET") {
        Some(place) => Node::at(place)?,
        None => Node::builder().address(own.ip()).build()?,
    };
    let socket = node.bind(own)?;
    // No reply waits for its client, because all other clients would wait, too.
    socket.set_nonblocking(true);
    println!("{own} answers");
    loop {
        match socket.recv_message() {
            Ok(request) => {
                sleep(work);
                reply(&socket, &request)?;
            }
            Err(error) if error.kind() == ErrorKind::Empty => socket.wait(Interest::READ, None)?,
            Err(error) => return Err(error.into()),
        }
    }
}

/// Answers a request. A reply that its client does not take now is dropped: the client asks again.
fn reply(socket: &Socket, request: &Message) -> Result<(), Box<dyn Error>> {
    let (client, request) = (request.source(), request.to_vec());
    let Some((number, text)) = request.split_at_checked(NUMBER_LEN) else {
        println!("{client}: not a request");
        return Ok(());
    };
    let reply = [number, &text.to_ascii_uppercase()].concat();
    let Err(error) = socket.send_to(&reply, client) else { return Ok(()) };
    // Most often `Congested`: this client has not received earlier replies. Replies to others are
    // sent as before. No error of one reply ends the server: a client may cause it, as `TooLong`
    // with a request that is longer than this send buffer. If the node has ended, the next receive
    // fails.
    if error.kind() == ErrorKind::QueueFull {
        // All clients share the send buffer, and somebody's node does not acknowledge. Who has most
        // of the buffer loses it.
        let clients = socket.outstanding()?;
        if let Some(largest) = clients.iter().max_by_key(|client| client.bytes) {
            socket.cancel_sent_to(largest.to)?;
        }
    }
    println!("{client}: a reply was dropped: {error}");
    Ok(())
}
