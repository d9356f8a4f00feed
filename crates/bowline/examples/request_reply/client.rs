//! Request and reply: the client. It has a time limit for each attempt, and asks again.
//!
//! ```text
//! cargo run --example request_reply_client -- [ADDRESS [SERVER:PORT [TEXT..]]]
//! ```
//!
//! By default it is at 127.0.0.2 and asks 127.0.0.1:4000; it may start before the server. The node
//! is its own; where the environment names a socket of `bowline node` in BOWLINE_RDS_SOCKET, it is
//! that one, with the same program.

use std::env;
use std::error::Error;
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant, SystemTime};

use bowline::rds::{Node, Socket};

/// Longest wait for a reply before the request is sent again.
const PATIENCE: Duration = Duration::from_millis(500);
/// Attempts before the client gives up.
const ATTEMPTS: u32 = 60;

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = env::args().skip(1);
    let own: IpAddr = args.next().as_deref().unwrap_or("127.0.0.2").parse()?;
    let server: SocketAddr = args.next().as_deref().unwrap_or("127.0.0.1:4000").parse()?;
    let mut texts: Vec<String> = args.collect();
    if texts.is_empty() {
        texts = ["one", "two", "three"].map(str::to_owned).to_vec();
    }
    let node = match env::var_os("BOWLINE_RDS_SOCKET") {
        Some(place) => Node::at(place)?,
        None => Node::builder().address(own).build()?,
    };
    // Port 0 chooses one.
    let socket = node.bind((own, 0))?;
    // Numbers begin with the time, so that no reply to an earlier process has one of this process.
    let start = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH)?.as_micros() as u64;
    for (number, text) in (start..).zip(&texts) {
        println!("{text}: {}", ask(&socket, server, number, text)?);
    }
    Ok(())
}

/// Asks until the reply comes. A request may get lost without an error: nobody has bound the port
/// yet, or the server ended before it answered. All attempts have one number, and any reply with
/// that number will do.
fn ask(
    socket: &Socket,
    server: SocketAddr,
    number: u64,
    text: &str,
) -> Result<String, Box<dyn Error>> {
    let number = number.to_be_bytes();
    let request = [&number, text.as_bytes()].concat();
    for attempt in 1..=ATTEMPTS {
        let end = Instant::now() + PATIENCE;
        // Requests that a server does not take at all fill the send buffer in the end.
        socket.set_send_timeout(Some(PATIENCE));
        match socket.send_to(&request, server) {
            Err(error) if !error.is_timed_out() => return Err(error.into()),
            _ => {}
        }
        loop {
            // One limit for the attempt, however many other messages come.
            socket.set_recv_timeout(Some(end.saturating_duration_since(Instant::now())));
            let reply = match socket.recv_message() {
                Err(error) if error.is_timed_out() => break,
                received => received?,
            };
            match reply.to_vec().strip_prefix(&number) {
                Some(text) if reply.source() == server => {
                    return Ok(String::from_utf8(text.to_vec())?);
                }
                _ => eprintln!("{text}: a late reply to another request was ignored"),
            }
        }
        eprintln!("{text}: no reply to attempt {attempt}");
    }
    // What still waits is no longer wanted.
    socket.cancel_sent_to(server)?;
    Err(format!("{server} does not answer").into())
}
