//! Jobs: what a command starts, each in a thread of its own.

mod node;
mod small;
mod speed;
mod stream;

use crate::backend::{Backend, Failure, Mode, Outcome, Socket, Wish};
use crate::generator::MAX_MESSAGE;
use crate::protocol::{Args, Command, Event};
use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Duration;

/// Send buffer of jobs that do not name one, bytes.
const SNDBUF: usize = 2 * MAX_MESSAGE;
/// How often a waiting receiver looks whether it was stopped.
const TICK: Duration = Duration::from_millis(250);

type Ended = Result<Event, Failure>;

/// What a job shares with the commands about it.
#[derive(Default)]
pub(crate) struct Control {
    gate: Mutex<Gate>,
    changed: Condvar,
    stopped: AtomicBool,
    messages: AtomicU64,
    bytes: AtomicU64,
    socket: Mutex<Option<Arc<dyn Socket>>>,
}

#[derive(Debug, Default)]
struct Gate {
    go: bool,
    closing: bool,
    flush: Duration,
}

/// A running job.
struct Job {
    id: String,
    args: Args,
    backend: Arc<dyn Backend>,
    control: Arc<Control>,
}

/// All jobs of the process.
pub(crate) struct Jobs {
    backend: Arc<dyn Backend>,
    jobs: HashMap<String, Arc<Control>>,
}

impl Jobs {
    pub(crate) fn new(backend: Arc<dyn Backend>) -> Self {
        Self { backend, jobs: HashMap::new() }
    }

    /// Does one command: starts a job or speaks to one.
    pub(crate) fn command(&mut self, c: Command) {
        let verb = match c.verb.as_str() {
            "send" => Job::send,
            "recv" => Job::recv,
            "fill" => Job::fill,
            "echo" => Job::echo,
            "rtt" => Job::rtt,
            "ping" => Job::ping,
            "flood" => Job::flood,
            "sink" => Job::sink,
            "info" => Job::info,
            "sysctl" => Job::sysctl,
            "cut" => Job::cut,
            _ => {
                let done = match self.jobs.get(&c.id) {
                    Some(control) => control.command(&c),
                    None => Err(format!("no job {} and no verb {}", c.id, c.verb)),
                };
                if let Err(e) = done {
                    Event::new(&c.id, "refused").text("error", &e).emit();
                }
                return;
            }
        };
        let control = Arc::new(Control::default());
        self.jobs.insert(c.id.clone(), Arc::clone(&control));
        let job = Job { id: c.id, args: c.args, backend: Arc::clone(&self.backend), control };
        std::thread::spawn(move || {
            let ended = verb(&job);
            // the socket is closed before anybody hears of the end
            *lock(&job.control.socket) = None;
            match ended {
                Ok(event) => event.emit(),
                Err(e) => {
                    let event = job.event("error").text("error", &e.to_string());
                    event.num("messages", job.messages()).num("errno", e.errno as u64).emit();
                }
            }
        });
    }
}

fn lock<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    m.lock().unwrap_or_else(|e| e.into_inner())
}

impl Control {
    fn command(&self, c: &Command) -> Result<(), String> {
        match c.verb.as_str() {
            "go" => lock(&self.gate).go = true,
            "stop" => self.stopped.store(true, Ordering::Relaxed),
            "close" => {
                self.stopped.store(true, Ordering::Relaxed);
                let flush = Duration::try_from_secs_f64(c.args.or("flush", 0.0)?);
                *lock(&self.gate) =
                    Gate { go: true, closing: true, flush: flush.map_err(|e| e.to_string())? };
            }
            "stat" => Event::new(&c.id, "stat")
                .num("messages", self.messages.load(Ordering::Relaxed))
                .num("bytes", self.bytes.load(Ordering::Relaxed))
                .emit(),
            "cancel" => {
                let to = c.args.need("to")?;
                let socket = lock(&self.socket).clone().ok_or("the job has no socket")?;
                socket.cancel(to).map_err(|e| e.to_string())?;
                Event::new(&c.id, "cancelled").emit();
            }
            other => return Err(format!("unknown: {other}")),
        }
        self.changed.notify_all();
        Ok(())
    }
}

/// A failure of the scenario's own making: a wrong argument or message.
fn wrong(text: impl Into<String>) -> Failure {
    Failure { errno: 0, text: text.into() }
}

impl From<String> for Failure {
    fn from(text: String) -> Self {
        wrong(text)
    }
}

impl Job {
    fn event(&self, name: &str) -> Event {
        Event::new(&self.id, name)
    }

    fn messages(&self) -> u64 {
        self.control.messages.load(Ordering::Relaxed)
    }

    fn count(&self, bytes: usize) {
        self.control.messages.fetch_add(1, Ordering::Relaxed);
        self.control.bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    fn bytes(&self) -> u64 {
        self.control.bytes.load(Ordering::Relaxed)
    }

    fn stopped(&self) -> bool {
        self.control.stopped.load(Ordering::Relaxed)
    }

    fn wait_go(&self) {
        let gate = lock(&self.control.gate);
        let waited = self.control.changed.wait_while(gate, |g| !g.go);
        drop(waited.unwrap_or_else(|e| e.into_inner()));
    }

    /// Says `paused` and waits for `go`.
    fn pause(&self, at: u64) {
        lock(&self.control.gate).go = false;
        self.event("paused").num("at", at).emit();
        self.wait_go();
    }

    /// Keeps the socket until `close`, as what it has not sent dies with it.
    /// Number of messages left after the time to flush.
    fn wait_close(&self, socket: &dyn Socket) -> Outcome<u64> {
        let gate = lock(&self.control.gate);
        let gate = self.control.changed.wait_while(gate, |g| !g.closing);
        let flush = gate.unwrap_or_else(|e| e.into_inner()).flush;
        Ok(socket.unsent(flush)? as u64)
    }

    /// The job's socket, bound to `bind=`.
    fn open(&self, sndbuf: usize, rcvbuf: usize, mode: Mode) -> Outcome<Arc<dyn Socket>> {
        let bind = match self.args.need::<SocketAddr>("bind") {
            Ok(a) => a,
            Err(e) => {
                let ip = self.args.need("bind").map_err(|_| e)?;
                SocketAddr::new(ip, 0)
            }
        };
        let socket: Arc<dyn Socket> =
            Arc::from(self.backend.bind(Wish { bind, sndbuf, rcvbuf })?);
        socket.set_mode(mode)?;
        *lock(&self.control.socket) = Some(Arc::clone(&socket));
        Ok(socket)
    }

    fn ready(&self, socket: &dyn Socket) -> Outcome<()> {
        self.event("ready").text("addr", &socket.local()?.to_string()).emit();
        Ok(())
    }
}
