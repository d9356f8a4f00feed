//! Graceful end: a client of the worker. It knows of each of its jobs whether it was done, and it
//! tells a worker that has ended from one that is lost.
//!
//! ```text
//! cargo run --example graceful_end_client --
//!     [ADDRESS [WORKER:PORT [MILLISECONDS UNTIL A WORKER IS LOST]]]
//! ```
//!
//! By default it is at 127.0.0.2, its worker is at 127.0.0.1:4000, which starts before the client,
//! and is lost after five seconds of silence. The node is its own; where the environment names a
//! socket of `bowline node` in BOWLINE_RDS_SOCKET, it is that one, with the same program.

use std::collections::BTreeSet;
use std::env;
use std::error::Error;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use bowline::rds::Node;

/// Jobs that are sent before the first of them is confirmed.
const JOBS_AHEAD: usize = 8;

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = env::args().skip(1);
    let own: IpAddr = args.next().as_deref().unwrap_or("127.0.0.2").parse()?;
    let worker: SocketAddr = args.next().as_deref().unwrap_or("127.0.0.1:4000").parse()?;
    let patience = Duration::from_millis(args.next().as_deref().unwrap_or("5000").parse()?);
    let node = match env::var_os("BOWLINE_RDS_SOCKET") {
        Some(place) => Node::at(place)?,
        None => Node::builder().address(own).build()?,
    };
    let socket = node.bind((own, 0))?;
    socket.set_recv_timeout(Some(patience));
    socket.set_send_timeout(Some(patience));
    let (mut next, mut done) = (1_u64, 0);
    // Jobs that were sent and are not confirmed.
    let mut open = BTreeSet::new();
    // When the worker has started, as it says itself.
    let mut known: Option<String> = None;
    loop {
        while open.len() < JOBS_AHEAD {
            open.insert(next);
            match socket.send_to(next.to_string().as_bytes(), worker) {
                Err(error) if error.is_timed_out() => {
                    open.remove(&next);
                    return Err(lost(worker, done, open.len()));
                }
                sent => sent?,
            };
            next += 1;
        }
        let message = match socket.recv_message() {
            Err(error) if error.is_timed_out() => return Err(lost(worker, done, open.len())),
            received => received?,
        };
        if message.source() != worker {
            continue;
        }
        let text = String::from_utf8(message.to_vec())?;
        let mut words = text.split(' ');
        let (what, start, job) = (words.next(), words.next().unwrap_or_default(), words.next());
        // Another process has no say about the jobs of the one before.
        if known.get_or_insert_with(|| start.to_owned()) != start {
            return Err(lost(worker, done, open.len()));
        }
        match (what, job.and_then(|job| job.parse().ok())) {
            (Some("done"), Some(job)) if open.remove(&job) => {
                done += 1;
                println!("job {job} done");
            }
            (Some("end"), _) => break,
            _ => println!("{worker} sent {text:?}"),
        }
    }
    // The worker has said so after its last confirmation: what is open now, it has not done.
    println!("{worker} has ended: {done} jobs done, {} not done", open.len());
    Ok(())
}

/// The worker, its machine or the network: nobody says which, nor what became of the open jobs.
fn lost(worker: SocketAddr, done: u64, open: usize) -> Box<dyn Error> {
    format!("{worker} is lost: {done} jobs done, {open} perhaps").into()
}
