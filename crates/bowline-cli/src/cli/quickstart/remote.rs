//! Remote writes and reads of the quickstart: node A offers memory, node B writes and reads it.
//!
//! ```text
//! A -> B   write SEED, with the key of memory
//! B        writes the contents of SEED there, then answers; A compares
//! A -> B   read SEED, with the key of memory that has the contents of SEED
//! B        reads it, compares, then answers
//! ```

use std::{
    collections::VecDeque,
    io::IoSlice,
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::{Duration, Instant},
};

use bowline::rds::{
    Control, Error, Message, Node, RdmaMemory, RdmaStatus, SendControl, Socket, Transfer,
};
use bowline_node::{Outcome, signals::Stop};

use super::message::Random;
use crate::cli::common::histogram::Histogram;

/// Port of the sockets on both sides.
const PORT: u16 = 4100;
/// Bytes of memory, all of which are written and read.
pub(crate) const LEN: usize = 1 << 20;
/// Rounds of a write and a read, and the time after which no further one begins.
const ROUNDS: u64 = 64;
const TIME: Duration = Duration::from_secs(3);
const PATIENCE: Duration = Duration::from_secs(10);
const WRITE: u8 = b'w';
const READ: u8 = b'r';
const DONE: u8 = b'd';
const WRONG: u8 = b'x';
/// A request: what to do, and a seed.
const REQUEST_LEN: usize = 9;

/// Results of the remote writes and reads.
#[derive(Debug, Default)]
pub(crate) struct Remote {
    /// Writes and reads together, half of them each.
    pub(crate) operations: u64,
    pub(crate) elapsed: Duration,
    /// Nanoseconds from a request to its answer.
    pub(crate) writes: Histogram,
    pub(crate) reads: Histogram,
    pub(crate) errors: Vec<String>,
}

fn contents(seed: u64) -> Vec<u8> {
    let mut random = Random::new(seed);
    (0..LEN / 8).flat_map(|_| random.next().to_ne_bytes()).collect()
}

fn holds(memory: &RdmaMemory, wanted: &[u8]) -> bool {
    let mut found = vec![0; LEN];
    memory.read(0, &mut found);
    found == wanted
}

/// Offers memory to node B, again and again.
pub(crate) fn offer(
    node: &Node,
    (local, remote): (IpAddr, IpAddr),
    seed: u64,
    stop: &Stop,
) -> Outcome<Remote> {
    let socket = node.bind(SocketAddr::new(local, PORT))?;
    socket.set_recv_timeout(Some(PATIENCE));
    socket.set_send_timeout(Some(PATIENCE));
    let memory = socket.rdma_memory(LEN)?;
    let place = SocketAddr::new(remote, PORT);
    let mut result = Remote::default();
    let start = Instant::now();
    for round in 0..ROUNDS {
        if stop.asked() || start.elapsed() > TIME {
            break;
        }
        for (what, seed) in [WRITE, READ].into_iter().zip(seed.wrapping_add(2 * round)..) {
            let wanted = contents(seed);
            if what == READ {
                memory.write(0, &wanted);
            }
            let began = Instant::now();
            let answer = ask(&socket, place, &memory, what, seed)?;
            let times = if what == WRITE { &mut result.writes } else { &mut result.reads };
            times.record(began.elapsed().as_nanos() as u64);
            result.elapsed += began.elapsed();
            result.operations += 1;
            if what == WRITE && !holds(&memory, &wanted) {
                result.errors.push(format!("remote write {round}: other contents than sent"));
            }
            if answer != [DONE] {
                let name = if what == WRITE { "write" } else { "read" };
                result.errors.push(format!("remote {name} {round}: {}", text(&answer)));
            }
            if !result.errors.is_empty() {
                return Ok(result);
            }
        }
    }
    Ok(result)
}

fn text(answer: &[u8]) -> String {
    match answer.split_first() {
        Some((&WRONG, why)) => String::from_utf8_lossy(why).into_owned(),
        _ => "an answer that nobody gives".to_owned(),
    }
}

/// Sends a request with a key of its own; returns the answer.
fn ask(
    socket: &Socket,
    place: SocketAddr,
    memory: &Arc<RdmaMemory>,
    what: u8,
    seed: u64,
) -> Outcome<Vec<u8>> {
    let key = socket.rdma_register(memory, 0..LEN, Some(place.ip()), false)?;
    let request = [&[what][..], &seed.to_be_bytes()].concat();
    let announce = [SendControl::RdmaDest(key)];
    socket.send_message(Some(place), &[IoSlice::new(&request)], &announce)?;
    let answer = loop {
        let message = socket.recv_message()?;
        if message.source() == place {
            break message.to_vec();
        }
    };
    socket.rdma_free(key)?;
    Ok(answer)
}

/// Node B's side.
#[derive(Debug)]
pub(crate) struct Server {
    socket: Socket,
    memory: Arc<RdmaMemory>,
    /// Requests that came before the end of a transfer was told.
    later: VecDeque<Message>,
}

/// Why a request is not answered well.
enum Fault {
    Wrong(String),
    Socket(Error),
}

impl From<Error> for Fault {
    fn from(error: Error) -> Self {
        Self::Socket(error)
    }
}

impl Server {
    pub(crate) fn bind(node: &Node, local: IpAddr) -> Outcome<Self> {
        let socket = node.bind(SocketAddr::new(local, PORT))?;
        let memory = socket.rdma_memory(LEN)?;
        Ok(Self { socket, memory, later: VecDeque::new() })
    }

    /// Serves node A until the node ends.
    pub(crate) fn run(mut self) {
        loop {
            let message = match self.later.pop_front() {
                Some(message) => Ok(message),
                None => self.socket.recv_message(),
            };
            let Ok(message) = message else { return };
            if message.is_notification() {
                continue;
            }
            let answered = match self.carry_out(&message) {
                Ok(()) => Ok(0),
                Err(Fault::Wrong(why)) => {
                    let answer = [&[WRONG], why.as_bytes()].concat();
                    self.socket.send_to(&answer, message.source())
                }
                Err(Fault::Socket(error)) => Err(error),
            };
            if answered.is_err() {
                return;
            }
        }
    }

    fn carry_out(&mut self, message: &Message) -> Result<(), Fault> {
        let mut request = [0; REQUEST_LEN];
        let key = message.control().iter().find_map(|control| match control {
            Control::RdmaDest(key) => Some(*key),
            _ => None,
        });
        let (REQUEST_LEN, Some(key)) = (message.copy_to(&mut request), key) else {
            return Err(Fault::Wrong("this is no request with a key".to_owned()));
        };
        let [what, seed @ ..] = request;
        let (from, seed) = (message.source(), u64::from_be_bytes(seed));
        if what == WRITE {
            self.memory.write(0, &contents(seed));
            let write = Transfer::write(&self.memory, 0..LEN, key)?.notify(seed);
            self.socket.send_rdma(Some(from), &[DONE], &[write])?;
            return self.end();
        }
        self.memory.write(0, &vec![0; LEN]);
        // No message goes with it: the answer is what the comparison says.
        let read = Transfer::read(&self.memory, 0..LEN, key)?.silent().notify(seed);
        self.socket.send_rdma(Some(from), &[], &[read])?;
        self.end()?;
        if !holds(&self.memory, &contents(seed)) {
            return Err(Fault::Wrong("other contents than offered".to_owned()));
        }
        self.socket.send_to(&[DONE], from)?;
        Ok(())
    }

    /// Waits until a transfer is over.
    fn end(&mut self) -> Result<(), Fault> {
        loop {
            let message = self.socket.recv_message()?;
            if !message.is_notification() {
                self.later.push_back(message);
                continue;
            }
            for control in message.control() {
                if let Control::RdmaStatus { status, .. } = control {
                    return match status {
                        RdmaStatus::Success => Ok(()),
                        status => Err(Fault::Wrong(format!("it ended with {status:?}"))),
                    };
                }
            }
        }
    }
}
