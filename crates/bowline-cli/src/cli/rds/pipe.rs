//! `bowline send` and `bowline recv`: a byte stream through RDS messages, for shell pipes.
//!
//! Options are those of rds-gen and rds-sink. A message of zero bytes marks the end of a stream;
//! `recv --once` stops there. `recv` takes one stream at a time, unless `--mix` is given. It
//! answers the end of a stream with a [receipt], since RDS itself acknowledges what no program
//! gets.

mod output;
mod receipt;
mod recv;
mod send;

use std::{
    net::SocketAddr,
    time::{Duration, Instant},
};

use bowline::rds::Socket;
use bowline_base::Errno;
use bowline_node::{
    Failure, Outcome,
    log::{Progress, bytes},
};

pub(crate) use recv::{RecvArgs, run as run_recv};
pub(crate) use send::{SendArgs, run as run_send};

use super::using::Used;

const SLICE: Duration = Duration::from_millis(100);
const BUFFER_BYTES: usize = 4 << 20;

/// Statistics on standard error, when asked for or on a terminal.
struct Meter {
    progress: Progress,
    interval: Option<Duration>,
    start: Instant,
    shown: Instant,
    messages: u64,
    total: u64,
}

impl Meter {
    fn new(interval: Option<Duration>) -> Self {
        let now = Instant::now();
        let progress = Progress::new(false);
        Self { progress, interval, start: now, shown: now, messages: 0, total: 0 }
    }

    fn count(&mut self, len: usize) {
        self.messages += 1;
        self.total += len as u64;
    }

    fn text(&self) -> String {
        let seconds = self.start.elapsed().as_secs_f64().max(1e-6);
        let rate = (self.total as f64 / seconds) as u64;
        format!("{} messages, {}, {}/s", self.messages, bytes(self.total), bytes(rate))
    }

    fn show(&mut self) {
        match self.interval {
            Some(interval) if self.shown.elapsed() >= interval => {
                self.shown = Instant::now();
                note!("{}", self.text());
            }
            Some(_) => {}
            None => {
                let text = self.text();
                self.progress.show(format_args!("{text}"));
            }
        }
    }

    fn end(&mut self) {
        self.progress.clear();
        if self.interval.is_some() {
            note!("{}", self.text());
        }
    }
}

fn open(used: &Used, source: SocketAddr, buffer: usize) -> Outcome<Socket> {
    let socket = used.bind(source).map_err(|error| {
        if error.errno() != Errno::EACCES {
            return error.into();
        }
        Failure::failed(format!(
            "{} does not let this user bind to {source}: see [[access.bind]] of its configuration",
            used.name()
        ))
    })?;
    socket.set_send_timeout(Some(SLICE));
    socket.set_recv_timeout(Some(SLICE));
    socket.set_send_buffer(buffer)?;
    socket.set_recv_buffer(buffer)?;
    Ok(socket)
}
