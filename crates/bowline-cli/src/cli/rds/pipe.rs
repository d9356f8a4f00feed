//! `bowline send` and `bowline recv`: a byte stream through RDS messages, for shell pipes.
//!
//! Options are those of rds-gen and rds-sink. A message of zero bytes marks the end of a stream;
//! `recv --once` stops there. `recv` takes one stream at a time, unless told otherwise.

mod output;

use std::{
    fs::File,
    io::{self, Read},
    net::SocketAddr,
    os::fd::AsFd,
    thread,
    time::{Duration, Instant},
};

use bowline::rds::{ErrorKind, Message, Node, Socket};
use bowline_node::{
    Failure, Outcome,
    log::{Progress, bytes},
    shares::{Amount, Bounds, Shares},
    signals::Stop,
    values::{Address, endpoint, interval, joined, number, own_endpoint, sender, towards},
};
use output::Output;

use super::over_rdma::RdmaOption;

const SLICE: Duration = Duration::from_millis(100);
const MESSAGE_BYTES_MAX: u64 = 1 << 20;
/// Default limits of unacknowledged messages and bytes.
const MESSAGES_MAX: usize = 1 << 16;
const BUFFER_BYTES: usize = 4 << 20;
/// Longest wait at the end for receivers that take nothing.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(30);
/// The same, once the command was asked to stop.
const STOP_TIMEOUT: Duration = Duration::from_secs(1);
/// Pause when none of several receivers accepts a message.
const TURN_PAUSE: Duration = Duration::from_millis(2);

/// Send a file or standard input as messages (as rds-gen did).
#[derive(Debug, clap::Args)]
pub(crate) struct SendArgs {
    /// Local address and port, of a link-local address with its interface, as [fe80::1%eth0]:4000
    #[arg(short = 's', value_name = "ADDRESS:PORT", value_parser = own_endpoint)]
    source: SocketAddr,
    /// Destination; may be repeated: each message then goes to one of them, in turn, and one that
    /// does not accept messages is skipped. A link-local one is on the link of the local address
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
    #[command(flatten)]
    rdma: RdmaOption,
    /// Do not mark the end of the stream with an empty message
    #[arg(long)]
    no_end: bool,
}

/// Receive messages into a file or standard output (as rds-sink did).
///
/// One sender is received at a time, from its first message to the empty message that ends its
/// stream; messages of other senders are discarded until then. RDS does not authenticate senders:
/// without --from anybody who can reach this address may be the first.
#[derive(Debug, clap::Args)]
pub(crate) struct RecvArgs {
    /// Local address and port, of a link-local address with its interface, as [fe80::1%eth0]:4000
    #[arg(short = 's', value_name = "ADDRESS:PORT", value_parser = own_endpoint)]
    source: SocketAddr,
    /// Receive from this sender only; may be repeated
    #[arg(long, value_name = "ADDRESS[:PORT]", value_parser = sender)]
    from: Vec<(Address, Option<u16>)>,
    /// Receive from several senders at the same time, in the order of arrival
    #[arg(long)]
    mix: bool,
    /// File to write; - is standard output
    #[arg(short = 'f', value_name = "FILE", default_value = "-")]
    file: String,
    /// Print statistics to standard error at this interval
    #[arg(short = 'i', value_name = "TIME", value_parser = interval)]
    interval: Option<Duration>,
    #[command(flatten)]
    rdma: RdmaOption,
    /// Stop after the first stream, at its empty message
    #[arg(long, conflicts_with = "mix")]
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

fn open(node: &Node, source: SocketAddr, buffer: usize) -> Outcome<Socket> {
    let socket = node.bind(source)?;
    socket.set_send_timeout(Some(SLICE));
    socket.set_recv_timeout(Some(SLICE));
    socket.set_send_buffer(buffer)?;
    socket.set_recv_buffer(buffer)?;
    Ok(socket)
}

/// Runs `bowline send`.
pub(crate) fn run_send(args: &SendArgs) -> Outcome {
    if !(1..=MESSAGE_BYTES_MAX).contains(&args.message) {
        return Err(Failure::usage(format!("-m must be between 1 and {MESSAGE_BYTES_MAX} bytes")));
    }
    let to = |to: &SocketAddr| towards(args.source, *to);
    let destination: Vec<SocketAddr> = args.destination.iter().map(to).collect::<Outcome<_>>()?;
    let input = match args.file.as_str() {
        "-" => io::stdin().as_fd().try_clone_to_owned().map(File::from),
        file => File::open(file),
    };
    let mut input =
        input.map_err(|error| Failure::failed(format!("cannot open {}: {error}", args.file)))?;
    let stop = Stop::install()?;
    let node = args.rdma.start_node(args.source.into())?;
    // Room for what each receiver may leave unacknowledged, and as much again.
    let share = BUFFER_BYTES.div_ceil(destination.len()).max(args.message as usize);
    let socket = open(&node, args.source, 2 * share * destination.len())?;
    let mut meter = Meter::new(args.interval);
    let mut buffer = vec![0; args.message as usize];
    let mut left = args.limit.unwrap_or(u64::MAX);
    let mut sender = Sender::new(&socket, &destination, share, &stop);
    while left > 0 && !stop.asked() {
        let wanted = buffer.len().min(usize::try_from(left).unwrap_or(usize::MAX));
        let len = fill(&mut input, &mut buffer[..wanted], &stop)
            .map_err(|error| Failure::failed(format!("cannot read {}: {error}", args.file)))?;
        if len == 0 {
            break;
        }
        sender.send(&buffer[..len])?;
        left -= len as u64;
        meter.count(len);
        meter.show();
    }
    let late = sender.finish(!args.no_end)?;
    meter.end();
    if late.is_empty() {
        return Ok(());
    }
    if stop.asked() {
        return Err(stopped());
    }
    let names: Vec<String> = late.iter().map(ToString::to_string).collect();
    Err(Failure::failed(format!(
        "{} did not accept everything, and nothing for {} s; is `bowline recv` running there?",
        names.join(", "),
        FLUSH_TIMEOUT.as_secs()
    )))
}

fn stopped() -> Failure {
    Failure::failed("stopped before everything was sent")
}

/// Reads until the buffer is full, the input ends, or the command is to stop.
fn fill(input: &mut File, buffer: &mut [u8], stop: &Stop) -> io::Result<usize> {
    let mut len = 0;
    while len < buffer.len() {
        // The writer of a pipe may be slow; a read returns what is there without waiting.
        if stop.wait_for(&*input)? {
            break;
        }
        match input.read(&mut buffer[len..]) {
            Ok(0) => break,
            Ok(count) => len += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(len)
}

/// Sends each message to the next receiver that takes it.
struct Sender<'a> {
    socket: &'a Socket,
    receivers: &'a [SocketAddr],
    next: usize,
    shares: Shares,
    stop: &'a Stop,
}

impl<'a> Sender<'a> {
    fn new(socket: &'a Socket, receivers: &'a [SocketAddr], share: usize, stop: &'a Stop) -> Self {
        let all = Amount { messages: usize::MAX, bytes: usize::MAX };
        let receiver = Amount { messages: MESSAGES_MAX / receivers.len(), bytes: share };
        let shares = Shares::new(Bounds { receiver, host: all, total: all });
        // With a single receiver the send call itself blocks.
        socket.set_nonblocking(receivers.len() > 1);
        Self { socket, receivers, next: 0, shares, stop }
    }

    fn send(&mut self, message: &[u8]) -> Outcome {
        loop {
            for step in 0..self.receivers.len() {
                let index = (self.next + step) % self.receivers.len();
                let to = self.receivers[index];
                if (self.receivers.len() == 1 || self.shares.has_room(to, message.len()))
                    && self.try_to(to, message)?
                {
                    self.next = (index + 1) % self.receivers.len();
                    return Ok(());
                }
            }
            if self.stop.asked() {
                return Err(stopped());
            }
            if self.receivers.len() > 1 {
                self.shares.look(self.socket, Instant::now())?;
                self.stop.wait(Some(TURN_PAUSE));
            }
        }
    }

    /// Sends the end marks, if wanted, and waits until all receivers have acknowledged everything.
    /// Gives up when none has taken anything for some time, which is shorter once the command was
    /// asked to stop, or when those that have not are gone. Returns the receivers that are not
    /// done.
    fn finish(&mut self, tell: bool) -> Outcome<Vec<SocketAddr>> {
        let mut untold = if tell { self.receivers.to_vec() } else { Vec::new() };
        let (mut fewest, mut since) = (usize::MAX, Instant::now());
        let mut end = None;
        loop {
            let mut left = Vec::new();
            for to in untold {
                if !self.try_to(to, &[])? {
                    left.push(to);
                }
            }
            untold = left;
            let mut gone = false;
            if untold.is_empty() {
                match self.socket.flush(Some(SLICE)) {
                    Ok(()) => return Ok(Vec::new()),
                    Err(error) => gone = error.kind() == ErrorKind::PeerEnded,
                }
            }
            let held = self.socket.outstanding()?;
            let count = untold.len() + held.iter().map(|held| held.messages).sum::<usize>();
            if count < fewest {
                (fewest, since) = (count, Instant::now());
            }
            let now = Instant::now();
            let stops = self.stop.asked() && now >= *end.get_or_insert(now + STOP_TIMEOUT);
            if stops || gone || now - since >= FLUSH_TIMEOUT {
                let late = |to: &&SocketAddr| {
                    untold.contains(to) || held.iter().any(|held| held.to == **to)
                };
                return Ok(self.receivers.iter().filter(late).copied().collect());
            }
            thread::sleep(TURN_PAUSE);
        }
    }

    /// Sends to this receiver, if it accepts the message now.
    fn try_to(&mut self, to: SocketAddr, message: &[u8]) -> Outcome<bool> {
        match self.socket.send_to(message, to) {
            Ok(_) => {
                if self.receivers.len() > 1 {
                    self.shares.sent(to, message.len(), Instant::now());
                }
                Ok(true)
            }
            Err(error) if error.is_timed_out() || error.is_would_block() => Ok(false),
            Err(error) => Err(error.into()),
        }
    }
}

/// Runs `bowline recv`.
pub(crate) fn run_recv(args: &RecvArgs) -> Outcome {
    let file = match args.file.as_str() {
        "-" => io::stdout().as_fd().try_clone_to_owned().map(File::from),
        file => File::create(file),
    };
    let failed = |error: io::Error| Failure::failed(format!("cannot write {}: {error}", args.file));
    let file = file.map_err(failed)?;
    for (from, _) in &args.from {
        joined(&mut args.source.into(), &mut { *from })?;
    }
    let stop = Stop::install()?;
    let mut output = Output::start(file)
        .map_err(|error| Failure::failed(format!("cannot start a thread: {error}")))?;
    let node = args.rdma.start_node(args.source.into())?;
    let socket = open(&node, args.source, BUFFER_BYTES)?;
    let mut meter = Meter::new(args.interval);
    let mut listener = Listener { args, heard: None, ignored: 0 };
    let (mut ended, mut all) = (false, true);
    while all && !ended && !stop.asked() {
        let mut inbox = Vec::new();
        match socket.recv_batch(&mut inbox, 256) {
            Ok(_) => {}
            Err(error) if error.is_timed_out() => {}
            Err(error) => return Err(error.into()),
        }
        let mut wanted = Vec::with_capacity(inbox.len());
        for message in inbox {
            if !listener.wants(&message) {
                continue;
            }
            if !message.is_empty() {
                meter.count(message.len());
                wanted.push(message);
            } else if args.once {
                ended = true;
                break;
            }
        }
        if wanted.is_empty() {
            output.look(Duration::ZERO).map_err(failed)?;
        } else {
            all = output.put(wanted, &stop).map_err(failed)?;
        }
        meter.show();
    }
    all &= output.finish(&stop).map_err(failed)?;
    meter.end();
    if listener.ignored > 0 {
        note!("bowline recv: {} messages of other senders were ignored", listener.ignored);
    }
    // The sender waits for the acknowledgement of the last message.
    node.shutdown(CLOSE_TIMEOUT);
    if all { Ok(()) } else { Err(Failure::failed("stopped before everything was written")) }
}

/// Decides whose messages are taken.
struct Listener<'a> {
    args: &'a RecvArgs,
    /// Sender of the current stream.
    heard: Option<SocketAddr>,
    /// Messages of other senders, which were discarded.
    ignored: u64,
}

impl Listener<'_> {
    fn wants(&mut self, message: &Message) -> bool {
        let (source, from) = (message.source(), &self.args.from);
        let named = |(address, port): &(Address, Option<u16>)| {
            Address::from(source).covers(*address) && port.is_none_or(|port| port == source.port())
        };
        let may = from.is_empty() || from.iter().any(named);
        if !may || self.heard.is_some_and(|heard| heard != source) {
            if self.ignored == 0 {
                match self.heard.filter(|_| may) {
                    None => note!("bowline recv: messages of {source} are ignored"),
                    Some(heard) => note!(
                        "bowline recv: messages of {source} are ignored until the stream of \
                         {heard} ends; receive all with --mix"
                    ),
                }
            }
            self.ignored += 1;
            return false;
        }
        // An empty message is the end.
        self.heard = (!self.args.mix && !message.is_empty()).then_some(source);
        true
    }
}
