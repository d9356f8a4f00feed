//! `bowline recv`.

use std::{
    collections::HashMap,
    fs::File,
    io,
    net::SocketAddr,
    os::fd::AsFd,
    time::{Duration, Instant},
};

use bowline::rds::{Message, Socket};
use bowline_node::{
    Failure, Outcome,
    shares::Amount,
    signals::Stop,
    values::{Address, interval, joined, own_endpoint, sender},
};

use super::{
    BUFFER_BYTES, Meter, SLICE, open,
    output::Output,
    receipt::{Receipt, State},
};
use crate::cli::rds::{over_rdma::RdmaOption, using::Used};

/// Longest wait at the end for senders to take what they are owed.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);
/// Most receipts that wait for their senders, and most senders whose messages are counted.
const DUE_MAX: usize = 1024;
/// Pause before they are offered again.
const PAUSE: Duration = Duration::from_millis(2);
/// How long a receipt waits for its sender.
const DUE_TIME: Duration = Duration::from_secs(5);

/// Receive messages into a file or standard output (as rds-sink did).
///
/// One sender is received at a time, from its first message to the empty message that ends its
/// stream; messages of other senders are discarded until then. RDS does not authenticate senders:
/// without --from anybody who can reach this address may be the first.
///
/// Once a stream has ended and is written, its sender gets a message that says how much that was;
/// `bowline send` waits for it. Where a node of this machine serves the address, the command is one
/// of its programs; elsewhere it has a node of its own.
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
    /// Print statistics to standard error at this interval: seconds, or a number with ms or us
    #[arg(short = 'i', value_name = "TIME", value_parser = interval)]
    interval: Option<Duration>,
    #[command(flatten)]
    rdma: RdmaOption,
    /// Stop after the first stream, at its empty message
    #[arg(long, conflicts_with = "mix")]
    once: bool,
}

/// Runs `bowline recv`.
pub(crate) fn run(args: &RecvArgs) -> Outcome {
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
    let used = Used::at(args.source.into(), &args.rdma)?;
    let socket = open(&used, args.source, BUFFER_BYTES)?;
    let mut meter = Meter::new(args.interval);
    let mut listener = Listener { args, heard: None, ignored: 0, taken: HashMap::new() };
    let mut receipts = Receipts::default();
    let (mut ended, mut all) = (false, true);
    while all && !ended && !stop.asked() {
        let mut inbox = Vec::new();
        match socket.recv_batch(&mut inbox, 256) {
            Ok(_) => {}
            Err(error) if error.is_timed_out() => {}
            Err(error) => return Err(error.into()),
        }
        let (mut wanted, mut ends) = (Vec::with_capacity(inbox.len()), Vec::new());
        for message in inbox {
            let is_end = message.is_empty();
            let is_wanted = listener.wants(&message);
            if is_end {
                ends.extend(listener.receipt(message.source(), is_wanted));
                ended |= args.once && is_wanted;
            } else if is_wanted {
                meter.count(message.len());
                wanted.push(message);
            }
            if ended {
                break;
            }
        }
        if !wanted.is_empty() {
            // This waits for what came before, which is written then.
            all = output.put(wanted, &stop).map_err(failed)?;
            if all {
                receipts.give(&socket);
            }
        }
        let wait = if ends.is_empty() { Duration::ZERO } else { SLICE };
        receipts.owe(ends);
        output.look(wait).map_err(failed)?;
        if output.is_idle() {
            receipts.give(&socket);
        }
        meter.show();
    }
    all &= output.finish(&stop).map_err(failed)?;
    if all {
        let until = Instant::now() + CLOSE_TIMEOUT;
        while receipts.give(&socket) && Instant::now() < until {
            stop.wait(Some(PAUSE));
        }
    }
    meter.end();
    if listener.ignored > 0 {
        note!("bowline recv: {} messages of other senders were ignored", listener.ignored);
    }
    // Senders wait for their receipts, and for the acknowledgement of the last message.
    let _ = socket.flush(Some(CLOSE_TIMEOUT));
    used.node().shutdown(CLOSE_TIMEOUT);
    if all { Ok(()) } else { Err(Failure::failed("stopped before everything was written")) }
}

/// Receipts for streams whose bytes are being written, then sent when that is done.
#[derive(Default)]
struct Receipts(Vec<(Instant, SocketAddr, Receipt)>);

impl Receipts {
    fn owe(&mut self, ends: Vec<(SocketAddr, Receipt)>) {
        let now = Instant::now();
        let room = DUE_MAX.saturating_sub(self.0.len());
        self.0.extend(ends.into_iter().take(room).map(|(to, receipt)| (now, to, receipt)));
    }

    /// Sends those whose senders take them now; tells whether some are left. A sender that takes
    /// nothing gets none.
    fn give(&mut self, socket: &Socket) -> bool {
        if self.0.is_empty() {
            return false;
        }
        socket.set_nonblocking(true);
        self.0.retain(|(since, to, receipt)| {
            let sent = socket.send_to(&receipt.encode(), *to);
            sent.is_err_and(|error| error.is_would_block()) && since.elapsed() < DUE_TIME
        });
        socket.set_nonblocking(false);
        !self.0.is_empty()
    }
}

/// Decides whose messages are taken.
struct Listener<'a> {
    args: &'a RecvArgs,
    /// Sender of the current stream.
    heard: Option<SocketAddr>,
    /// Messages of other senders, which were discarded.
    ignored: u64,
    /// What was taken of each stream that has not ended.
    taken: HashMap<SocketAddr, Amount>,
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
        if self.taken.len() < DUE_MAX || self.taken.contains_key(&source) {
            let taken = self.taken.entry(source).or_default();
            taken.messages += usize::from(!message.is_empty());
            taken.bytes += message.len();
        }
        true
    }

    /// Returns the receipt for a stream that ends, unless too many streams were counted at a time.
    fn receipt(&mut self, of: SocketAddr, is_wanted: bool) -> Option<(SocketAddr, Receipt)> {
        let (state, taken) = if is_wanted {
            (State::Written, self.taken.remove(&of)?)
        } else {
            (State::Ignored, Amount::default())
        };
        Some((of, Receipt { state, taken }))
    }
}
