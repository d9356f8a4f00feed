//! Graceful end: a worker that stops on Ctrl-C or SIGTERM. It does the jobs that it has, and its
//! clients learn which those were.
//!
//! ```text
//! cargo run --example graceful_end_worker -- [ADDRESS:PORT [MILLISECONDS PER JOB]]
//! ```
//!
//! By default it is at 127.0.0.1:4000 and takes 20 ms for a job. The node is its own; where the
//! environment names a socket of `bowline node` in BOWLINE_RDS_SOCKET, it is that one, with the
//! same program.

use std::collections::HashMap;
use std::env;
use std::error::Error;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread::sleep;
use std::time::{Duration, SystemTime};

use bowline::rds::{ErrorKind, Interest, Message, Node, Socket};
use signal_hook::consts::{SIGINT, SIGTERM};

/// Longest wait for a job: a signal does not end a wait.
const TURN: Duration = Duration::from_millis(100);
/// Longest wait at the end, until all clients' nodes have what was sent.
const PATIENCE: Duration = Duration::from_secs(5);
/// Most clients that the worker remembers, and most jobs that it does after the signal.
const CLIENTS_MAX: usize = 1024;
const LAST_JOBS_MAX: usize = 1024;

struct Worker {
    socket: Socket,
    /// When this process started, in its messages: clients recognise another worker by it.
    start: u128,
    work: Duration,
    /// All clients, and whether they have been sent all confirmations.
    clients: HashMap<SocketAddr, Confirmed>,
    done: u64,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Confirmed {
    All,
    /// The client took nothing for too long.
    NotAll,
}

impl Worker {
    /// Does a job and confirms it. A job of one client too many is left to other workers.
    fn perform(&mut self, job: &Message) -> Result<(), Box<dyn Error>> {
        let client = job.source();
        let Ok(number) = String::from_utf8_lossy(&job.to_vec()).parse::<u64>() else {
            println!("{client}: not a job");
            return Ok(());
        };
        if self.clients.len() == CLIENTS_MAX && !self.clients.contains_key(&client) {
            println!("{client}: refused, there are {CLIENTS_MAX} clients");
            return Ok(());
        }
        self.clients.entry(client).or_insert(Confirmed::All);
        sleep(self.work);
        self.done += 1;
        self.send(&format!("done {} {number}", self.start), client)
    }

    /// Sends without waiting: a client that takes nothing delays neither the others nor the end. It
    /// loses confirmations instead.
    fn send(&mut self, text: &str, client: SocketAddr) -> Result<(), Box<dyn Error>> {
        let Err(error) = self.socket.send_to(text.as_bytes(), client) else { return Ok(()) };
        println!("{client}: a message was dropped: {error}");
        self.clients.insert(client, Confirmed::NotAll);
        if error.kind() == ErrorKind::QueueFull {
            // All clients share the send buffer: who has most of it loses that.
            let clients = self.socket.outstanding()?;
            if let Some(largest) = clients.iter().max_by_key(|client| client.bytes) {
                self.socket.cancel_sent_to(largest.to)?;
                self.clients.insert(largest.to, Confirmed::NotAll);
            }
        }
        Ok(())
    }

    /// Says goodbye. Messages of a socket come in order: after this one, a client knows which of
    /// its jobs were done. One that has not got all confirmations does not, and gets none.
    fn end(&mut self) -> Result<(), Box<dyn Error>> {
        let all = self.clients.iter().filter(|(_, confirmed)| **confirmed == Confirmed::All);
        let all: Vec<SocketAddr> = all.map(|(client, _)| *client).collect();
        all.into_iter().try_for_each(|client| self.send(&format!("end {}", self.start), client))
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = env::args().skip(1);
    let own: SocketAddr = args.next().as_deref().unwrap_or("127.0.0.1:4000").parse()?;
    let work = Duration::from_millis(args.next().as_deref().unwrap_or("20").parse()?);
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        signal_hook::flag::register(signal, stop.clone())?;
    }
    let node = match env::var_os("BOWLINE_RDS_SOCKET") {
        Some(place) => Node::at(place)?,
        None => Node::builder().address(own.ip()).build()?,
    };
    let socket = node.bind(own)?;
    socket.set_nonblocking(true);
    println!("{own} works");
    let start = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH)?.as_micros();
    let mut worker = Worker { socket, start, work, clients: HashMap::new(), done: 0 };
    while !stop.load(Relaxed) {
        match worker.socket.recv_message() {
            Ok(job) => worker.perform(&job)?,
            Err(error) if error.kind() == ErrorKind::Empty => {
                match worker.socket.wait(Interest::READ, Some(TURN)) {
                    Err(error) if !error.is_timed_out() => return Err(error.into()),
                    _ => {}
                }
            }
            Err(error) => return Err(error.into()),
        }
    }
    // The jobs that wait here now, and no later ones: clients that send more would not let it end.
    let mut last = Vec::new();
    match worker.socket.recv_batch(&mut last, LAST_JOBS_MAX) {
        Err(error) if error.kind() != ErrorKind::Empty => return Err(error.into()),
        _ => {}
    }
    last.iter().try_for_each(|job| worker.perform(job))?;
    worker.end()?;
    println!("{} jobs done, the last {} after the signal", worker.done, last.len());
    // A socket that is dropped takes along what is not acknowledged. A client that has gone, or is
    // stuck, ends this wait with an error; all others have got everything.
    if let Err(error) = worker.socket.flush(Some(PATIENCE)) {
        println!("not everything has arrived: {error}");
    }
    // A node of this process ends with its last handle: it acknowledges what it has received, and
    // its peers learn that it ends. `std::process::exit` here would leave that out.
    drop((worker, node));
    println!("ended");
    Ok(())
}
