//! `bowline send` and `bowline recv`: a byte stream through RDS messages, for shell pipes.
//!
//! Options are those of rds-gen and rds-sink. A message of zero bytes marks the end of a stream;
//! `recv --once` stops there.

use std::{
    fs::File,
    io::{self, Read, Write},
    net::SocketAddr,
    time::{Duration, Instant},
};

use bowline::rds::{Node, Socket};

use super::{
    Failure, Outcome,
    args::{endpoint, interval, number},
    out::{Progress, bytes},
    start_node,
    stop::Stop,
};

const SLICE: Duration = Duration::from_millis(100);
const MESSAGE_BYTES_MAX: u64 = 1 << 20;
/// Longest wait at the end until the receivers have everything.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(30);

/// Send a file or standard input as messages (as rds-gen did).
#[derive(Debug, clap::Args)]
pub(crate) struct SendArgs {
    /// Local address and port
    #[arg(short = 's', value_name = "ADDRESS:PORT", value_parser = endpoint)]
    source: SocketAddr,
    /// Destination; with several, messages go to them in turn
    #[arg(short = 'd', value_name = "ADDRESS:PORT", value_parser = endpoint, required = true)]
    destination: Vec<SocketAddr>,
    /// File to send; - is standard input
    #[arg(short = 'f', value_name = "FILE", default_value = "-")]
    file: String,
    /// Size of a message
    #[arg(short = 'm', value_name = "BYTES", default_value = "4096", value_parser = number)]
    message: u64,
    /// Stop after this many bytes
    #[arg(short = 'l', value_name = "BYTES", value_parser = number)]
    limit: Option<u64>,
    /// Print statistics to standard error at this interval
    #[arg(short = 'i', value_name = "TIME", value_parser = interval)]
    interval: Option<Duration>,
    /// Do not mark the end of the stream with an empty message
    #[arg(long)]
    no_end: bool,
}

/// Receive messages into a file or standard output (as rds-sink did).
#[derive(Debug, clap::Args)]
pub(crate) struct RecvArgs {
    /// Local address and port
    #[arg(short = 's', value_name = "ADDRESS:PORT", value_parser = endpoint)]
    source: SocketAddr,
    /// File to write; - is standard output
    #[arg(short = 'f', value_name = "FILE", default_value = "-")]
    file: String,
    /// Print statistics to standard error at this interval
    #[arg(short = 'i', value_name = "TIME", value_parser = interval)]
    interval: Option<Duration>,
    /// End after the first stream, at its empty message
    #[arg(long)]
    once: bool,
}

const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);

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

fn open(node: &Node, source: SocketAddr) -> Outcome<Socket> {
    let socket = node.bind(source)?;
    socket.set_send_timeout(Some(SLICE));
    socket.set_recv_timeout(Some(SLICE));
    let size = 4 * MESSAGE_BYTES_MAX as usize;
    socket.set_send_buffer(size)?;
    socket.set_recv_buffer(size)?;
    Ok(socket)
}

/// Runs `bowline send`.
pub(crate) fn run_send(args: &SendArgs) -> Outcome {
    if !(1..=MESSAGE_BYTES_MAX).contains(&args.message) {
        return Err(Failure::usage(format!("-m must be between 1 and {MESSAGE_BYTES_MAX} bytes")));
    }
    let mut input: Box<dyn Read> = if args.file == "-" {
        Box::new(io::stdin().lock())
    } else {
        Box::new(
            File::open(&args.file)
                .map_err(|error| Failure::failed(format!("cannot open {}: {error}", args.file)))?,
        )
    };
    let stop = Stop::install()?;
    let node = start_node(Node::builder(), &[args.source.ip()])?;
    let socket = open(&node, args.source)?;
    let mut meter = Meter::new(args.interval);
    let mut buffer = vec![0; args.message as usize];
    let mut left = args.limit.unwrap_or(u64::MAX);
    let mut turn = args.destination.iter().cycle();
    while left > 0 && !stop.asked() {
        let wanted = buffer.len().min(usize::try_from(left).unwrap_or(usize::MAX));
        let len = fill(&mut input, &mut buffer[..wanted])
            .map_err(|error| Failure::failed(format!("cannot read {}: {error}", args.file)))?;
        if len == 0 {
            break;
        }
        if let Some(destination) = turn.next() {
            send(&socket, &buffer[..len], *destination, &stop)?;
        }
        left -= len as u64;
        meter.count(len);
        meter.show();
    }
    if !args.no_end {
        for destination in &args.destination {
            send(&socket, &[], *destination, &stop)?;
        }
    }
    meter.end();
    if socket.flush(Some(FLUSH_TIMEOUT)).is_ok() {
        return Ok(());
    }
    Err(Failure::failed(format!(
        "the receivers do not have everything after {} s; is `bowline recv` running there?",
        FLUSH_TIMEOUT.as_secs()
    )))
}

/// Reads until the buffer is full or the input ends.
fn fill(input: &mut dyn Read, buffer: &mut [u8]) -> io::Result<usize> {
    let mut len = 0;
    while len < buffer.len() {
        match input.read(&mut buffer[len..]) {
            Ok(0) => break,
            Ok(count) => len += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(len)
}

fn send(socket: &Socket, message: &[u8], to: SocketAddr, stop: &Stop) -> Outcome {
    loop {
        match socket.send_to(message, to) {
            Ok(_) => return Ok(()),
            Err(error) if error.is_timed_out() => {
                if stop.asked() {
                    return Err(Failure::failed("stopped before everything was sent"));
                }
            }
            Err(error) => return Err(error.into()),
        }
    }
}

/// Runs `bowline recv`.
pub(crate) fn run_recv(args: &RecvArgs) -> Outcome {
    let mut output: Box<dyn Write> = if args.file == "-" {
        Box::new(io::stdout().lock())
    } else {
        Box::new(
            File::create(&args.file)
                .map_err(|error| Failure::failed(format!("cannot write {}: {error}", args.file)))?,
        )
    };
    let failed = |error: io::Error| Failure::failed(format!("cannot write {}: {error}", args.file));
    let stop = Stop::install()?;
    let node = start_node(Node::builder(), &[args.source.ip()])?;
    let socket = open(&node, args.source)?;
    let mut meter = Meter::new(args.interval);
    let mut inbox = Vec::new();
    'streams: while !stop.asked() {
        inbox.clear();
        match socket.recv_batch(&mut inbox, 256) {
            Ok(_) => {}
            Err(error) if error.is_timed_out() => {
                output.flush().map_err(failed)?;
                meter.show();
                continue;
            }
            Err(error) => return Err(error.into()),
        }
        for message in &inbox {
            if message.is_empty() {
                if args.once {
                    break 'streams;
                }
                continue;
            }
            for slice in message.slices() {
                output.write_all(slice).map_err(failed)?;
            }
            meter.count(message.len());
        }
        meter.show();
    }
    output.flush().map_err(failed)?;
    meter.end();
    // The sender waits for the acknowledgement of what was just taken.
    node.shutdown(CLOSE_TIMEOUT);
    Ok(())
}
