//! `bowline send`.

use std::{
    collections::HashSet,
    fs::File,
    io::{self, Read},
    net::SocketAddr,
    os::fd::AsFd,
    thread,
    time::{Duration, Instant},
};

use bowline::rds::{ErrorKind, Socket};
use bowline_node::{
    Failure, Outcome,
    log::bytes,
    shares::{Amount, Bounds, Shares},
    signals::Stop,
    values::{Family, address, endpoint, interval, number, own_endpoint, towards},
};

use super::{
    BUFFER_BYTES, Meter, SLICE, open,
    receipt::{Receipt, State},
};
use crate::cli::rds::{over_rdma::RdmaOption, using::Used};

const MESSAGE_BYTES_MAX: u64 = 1 << 20;
/// Default limits of unacknowledged messages and bytes.
const MESSAGES_MAX: usize = 1 << 16;
/// Longest wait at the end for receivers that take nothing.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(30);
/// The same, once the command was asked to stop.
const STOP_TIMEOUT: Duration = Duration::from_secs(1);
/// Pause when none of several receivers accepts a message.
const TURN_PAUSE: Duration = Duration::from_millis(2);
/// How long nothing has to happen before the command says what it waits for.
const SILENCE: Duration = Duration::from_secs(1);

/// Send a file or standard input as messages (as rds-gen did).
///
/// At the end each `bowline recv` says how much of the stream it has written. Without its word
/// within the time of -W, and where it is less than was sent, the exit status is 1: what comes to a
/// port that nobody has bound is lost, and RDS acknowledges it all the same. A kernel's programs
/// say nothing; there, 0 means that the kernel has everything.
///
/// Where a node of this machine serves the local address, the command is one of its programs;
/// elsewhere it has a node of its own.
#[derive(Debug, clap::Args)]
#[command(after_help = "Exit status: 0 all was taken, 1 not all, or it is not known, 2 usage.")]
pub(crate) struct SendArgs {
    /// Local address and port, of a link-local address with its interface, as [fe80::1%eth0]:4000
    #[arg(short = 's', value_name = "ADDRESS:PORT", value_parser = own_endpoint)]
    source: SocketAddr,
    /// Destination, by address or host name; may be repeated: each message then goes to one of
    /// them, in turn, and one that does not accept messages is skipped. A link-local one is on the
    /// link of the local address
    #[arg(short = 'd', value_name = "HOST:PORT", required = true)]
    destination: Vec<String>,
    /// File to send; - is standard input
    #[arg(short = 'f', value_name = "FILE", default_value = "-")]
    file: String,
    /// Size of a message
    #[arg(short = 'm', value_name = "BYTES", default_value = "4096", value_parser = number)]
    message: u64,
    /// Stop after this many bytes
    #[arg(short = 'l', value_name = "BYTES", value_parser = number)]
    limit: Option<u64>,
    /// Print statistics to standard error at this interval: seconds, or a number with ms or us
    #[arg(short = 'i', value_name = "TIME", value_parser = interval)]
    interval: Option<Duration>,
    /// Longest wait for a host that does not answer, and for the word of a receiver; with 0, for
    /// the host 30 s, and for no word
    #[arg(short = 'W', value_name = "TIME", default_value = "10", value_parser = interval)]
    wait: Duration,
    #[command(flatten)]
    rdma: RdmaOption,
    /// Do not mark the end of the stream with an empty message, nor wait for a receiver's word
    #[arg(long)]
    no_end: bool,
}

/// Runs the command.
pub(crate) fn run(args: &SendArgs) -> Outcome {
    if !(1..=MESSAGE_BYTES_MAX).contains(&args.message) {
        return Err(Failure::usage(format!("-m must be between 1 and {MESSAGE_BYTES_MAX} bytes")));
    }
    let to = |to: &String| towards(args.source, place(to, args.source)?);
    let mut destination: Vec<SocketAddr> =
        args.destination.iter().map(to).collect::<Outcome<_>>()?;
    let mut known = HashSet::new();
    destination.retain(|to| known.insert(*to));
    let input = match args.file.as_str() {
        "-" => io::stdin().as_fd().try_clone_to_owned().map(File::from),
        file => File::open(file),
    };
    let mut input =
        input.map_err(|error| Failure::failed(format!("cannot open {}: {error}", args.file)))?;
    let stop = Stop::install()?;
    let used = Used::at(args.source.into(), &args.rdma)?;
    // Room for what each receiver may leave unacknowledged, and as much again.
    let share = BUFFER_BYTES.div_ceil(destination.len()).max(args.message as usize);
    let socket = open(&used, args.source, 2 * share * destination.len())?;
    let longest = socket.send_buffer()?;
    if longest < args.message as usize {
        return Err(Failure::failed(format!(
            "-m {} is too long for {}, which gives its programs send buffers of {longest} bytes: \
             start it with --send-buffer {}, or send shorter messages",
            args.message,
            used.name(),
            args.message
        )));
    }
    let mut meter = Meter::new(args.interval);
    let mut buffer = vec![0; args.message as usize];
    let mut left = args.limit.unwrap_or(u64::MAX);
    // The host's node may have given less.
    let share = share.min(longest / destination.len()).max(1);
    let mut sender = Sender::new((&socket, &used), &destination, share, &stop, args.wait);
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
    let finished = sender.finish(!args.no_end);
    meter.end();
    finished?;
    // One that was stopped has sent what it has read.
    let waits = !args.no_end && !args.wait.is_zero() && !stop.asked();
    if waits { sender.confirm() } else { Ok(()) }
}

/// Parses a destination, whose host may be a name.
fn place(text: &str, source: SocketAddr) -> Outcome<SocketAddr> {
    if let Ok(place) = endpoint(text) {
        return Ok(place);
    }
    let named = text.rsplit_once(':').filter(|(host, _)| !host.is_empty() && !host.contains(':'));
    let Some((host, Ok(port))) = named.map(|(host, port)| (host, port.parse())) else {
        return Err(Failure::usage(format!(
            "-d \"{text}\" is not HOST:PORT such as 10.0.0.1:4000 or server:4000"
        )));
    };
    let family = if source.is_ipv4() { Family::V4 } else { Family::V6 };
    Ok(address(host, family)?.at(port))
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

/// One receiver, and what it was sent.
#[derive(Clone, Copy, Debug)]
struct Receiver {
    at: SocketAddr,
    sent: Amount,
    /// Its last word.
    said: Option<Receipt>,
}

impl Receiver {
    fn has_all(&self) -> bool {
        self.said == Some(Receipt { state: State::Written, taken: self.sent })
    }

    /// What is wrong with its word, or that it has said nothing.
    fn complaint(&self, waited: Duration) -> String {
        let (at, sent) = (self.at, bytes(self.sent.bytes as u64));
        match self.said {
            None => format!(
                "{at} has not confirmed its {sent} within {} s, though its node has them: is \
                 `bowline recv` running there? What comes to a port that nobody has bound is lost",
                waited.as_secs_f32()
            ),
            Some(Receipt { state: State::Ignored, .. }) => format!(
                "{at} has ignored its {sent}: `bowline recv` takes the stream of another sender \
                 there, or of others (--from)"
            ),
            Some(Receipt { taken, .. }) => format!(
                "{at} has written {} messages, {}, of the {}, {sent}, that it was sent",
                taken.messages,
                bytes(taken.bytes as u64),
                self.sent.messages
            ),
        }
    }
}

/// Sends each message to the next receiver that takes it.
struct Sender<'a> {
    socket: &'a Socket,
    receivers: Vec<Receiver>,
    next: usize,
    shares: Shares,
    stop: &'a Stop,
    silence: Silence<'a>,
}

impl<'a> Sender<'a> {
    fn new(
        (socket, used): (&'a Socket, &'a Used),
        receivers: &[SocketAddr],
        share: usize,
        stop: &'a Stop,
        limit: Duration,
    ) -> Self {
        let all = Amount { messages: usize::MAX, bytes: usize::MAX };
        let receiver = Amount { messages: MESSAGES_MAX / receivers.len(), bytes: share };
        let shares = Shares::new(Bounds { receiver, host: all, total: all });
        // With a single receiver the send call itself blocks.
        socket.set_nonblocking(receivers.len() > 1);
        let receiver = |at: &SocketAddr| Receiver { at: *at, sent: Amount::default(), said: None };
        let receivers = receivers.iter().map(receiver).collect();
        let limit = if limit.is_zero() { FLUSH_TIMEOUT } else { limit };
        Self { socket, receivers, next: 0, shares, stop, silence: Silence::new(used, limit) }
    }

    fn send(&mut self, message: &[u8]) -> Outcome {
        self.silence.ends();
        loop {
            for step in 0..self.receivers.len() {
                let index = (self.next + step) % self.receivers.len();
                let to = self.receivers[index].at;
                if (self.receivers.len() == 1 || self.shares.has_room(to, message.len()))
                    && self.try_to(index, message)?
                {
                    self.next = (index + 1) % self.receivers.len();
                    return Ok(());
                }
            }
            if self.stop.asked() {
                return Err(stopped());
            }
            self.silence.look(self.receivers.iter().map(|receiver| receiver.at), "take more")?;
            if self.receivers.len() > 1 {
                self.shares.look(self.socket, Instant::now())?;
                self.stop.wait(Some(TURN_PAUSE));
            }
        }
    }

    /// Sends the end marks, if wanted, and waits until all receivers have acknowledged everything.
    /// Gives up when none has taken anything for some time, which is shorter once the command was
    /// asked to stop, or when those that have not are gone.
    fn finish(&mut self, tell: bool) -> Outcome {
        let mut untold: Vec<usize> =
            if tell { (0..self.receivers.len()).collect() } else { Vec::new() };
        let (mut fewest, mut since) = (usize::MAX, Instant::now());
        let mut end = None;
        self.silence.ends();
        loop {
            let mut left = Vec::new();
            for index in untold {
                if !self.try_to(index, &[])? {
                    left.push(index);
                }
            }
            untold = left;
            let mut gone = false;
            if untold.is_empty() {
                match self.socket.flush(Some(SLICE)) {
                    Ok(()) => return Ok(()),
                    Err(error) => gone = error.kind() == ErrorKind::PeerEnded,
                }
            }
            let held = self.socket.outstanding()?;
            let count = untold.len() + held.iter().map(|held| held.messages).sum::<usize>();
            if count < fewest {
                (fewest, since) = (count, Instant::now());
                self.silence.ends();
            }
            let is_untold = |at| untold.iter().any(|index| self.receivers[*index].at == at);
            let late = |at: &SocketAddr| is_untold(*at) || held.iter().any(|held| held.to == *at);
            let late: Vec<SocketAddr> =
                self.receivers.iter().map(|receiver| receiver.at).filter(late).collect();
            let now = Instant::now();
            if self.stop.asked() && now >= *end.get_or_insert(now + STOP_TIMEOUT) {
                return Err(stopped());
            }
            if gone || now - since >= FLUSH_TIMEOUT {
                let names: Vec<String> = late.iter().map(ToString::to_string).collect();
                let what = if gone {
                    "its node has ended".to_owned()
                } else {
                    format!("and nothing for {} s", FLUSH_TIMEOUT.as_secs())
                };
                return Err(Failure::failed(format!(
                    "{} did not accept everything, {what}; is `bowline recv` running there?",
                    names.join(", ")
                )));
            }
            self.silence.look(late.into_iter(), "acknowledge")?;
            thread::sleep(TURN_PAUSE);
        }
    }

    /// Waits until each receiver has said that it has written everything.
    fn confirm(&mut self) -> Outcome {
        self.socket.set_nonblocking(false);
        let used = self.silence.used;
        let mut silent = Vec::new();
        for receiver in &self.receivers {
            if used.peer(receiver.at.ip()).is_some_and(|peer| peer.is_kernel) {
                note!(
                    "bowline send: {} has its {}; it is a kernel's, which does not say whether a \
                     program took them",
                    receiver.at,
                    bytes(receiver.sent.bytes as u64)
                );
            } else {
                silent.push(receiver.at);
            }
        }
        self.silence.ends();
        let since = Instant::now();
        while !silent.is_empty() && since.elapsed() < self.silence.limit {
            if self.stop.asked() {
                return Err(Failure::failed("stopped before everything was confirmed"));
            }
            match self.socket.recv_message() {
                Ok(message) => {
                    let mut bytes = [0; 64];
                    let len = message.copy_to(&mut bytes);
                    let said = Receipt::decode(&bytes[..len]).filter(|_| message.len() == len);
                    let source = message.source();
                    if let Some(said) = said
                        && let Some(receiver) = self.receivers.iter_mut().find(|r| r.at == source)
                    {
                        receiver.said = Some(said);
                        if receiver.has_all() || said.state == State::Ignored {
                            silent.retain(|at| *at != source);
                        }
                    }
                }
                Err(error) if error.is_timed_out() => {
                    self.silence.say(silent.iter().copied(), "confirm");
                }
                Err(error) => return Err(error.into()),
            }
        }
        let waited = self.silence.limit;
        let is_bad = |receiver: &&Receiver| {
            silent.contains(&receiver.at) || receiver.said.is_some() && !receiver.has_all()
        };
        let bad = self.receivers.iter().filter(is_bad);
        let complaints: Vec<String> = bad.map(|receiver| receiver.complaint(waited)).collect();
        if complaints.is_empty() { Ok(()) } else { Err(Failure::Failed(complaints.join("; "))) }
    }

    /// Sends to this receiver, if it accepts the message now.
    fn try_to(&mut self, index: usize, message: &[u8]) -> Outcome<bool> {
        let receiver = &mut self.receivers[index];
        match self.socket.send_to(message, receiver.at) {
            Ok(_) => {
                receiver.sent.messages += usize::from(!message.is_empty());
                receiver.sent.bytes += message.len();
                if self.receivers.len() > 1 {
                    let to = self.receivers[index].at;
                    self.shares.sent(to, message.len(), Instant::now());
                }
                Ok(true)
            }
            Err(error) if error.is_timed_out() || error.is_would_block() => Ok(false),
            Err(error) => Err(error.into()),
        }
    }
}

/// A time in which no receiver has taken anything.
struct Silence<'a> {
    used: &'a Used,
    /// Longest wait for hosts that do not answer.
    limit: Duration,
    since: Instant,
    /// When the node was last asked about them.
    looked: Instant,
    has_said: bool,
}

impl<'a> Silence<'a> {
    fn new(used: &'a Used, limit: Duration) -> Self {
        let now = Instant::now();
        Self { used, limit, since: now, looked: now, has_said: false }
    }

    fn ends(&mut self) {
        let now = Instant::now();
        (self.since, self.looked, self.has_said) = (now, now, false);
    }

    /// Says after a second what is waited for.
    fn say(&mut self, receivers: impl Iterator<Item = SocketAddr>, what: &str) {
        if self.has_said || self.since.elapsed() < SILENCE {
            return;
        }
        self.has_said = true;
        let names: Vec<String> = receivers.map(|at| at.to_string()).collect();
        note!("bowline send: waiting for {} to {what}", names.join(", "));
    }

    /// Does so, too, and gives up when the host of none of them answers.
    fn look(&mut self, receivers: impl Iterator<Item = SocketAddr> + Clone, what: &str) -> Outcome {
        if self.since.elapsed() < SILENCE.min(self.limit) || self.looked.elapsed() < SILENCE / 2 {
            return Ok(());
        }
        self.looked = Instant::now();
        let trouble = |at: SocketAddr| Some(format!("{at} ({})", self.used.trouble(at.ip())?));
        let troubles: Option<Vec<String>> = receivers.clone().map(trouble).collect();
        let Some(troubles) = troubles else {
            self.say(receivers, what);
            return Ok(());
        };
        let names = troubles.join(", ");
        if self.since.elapsed() < self.limit {
            if !std::mem::replace(&mut self.has_said, true) {
                note!("bowline send: waiting for a node at {names}");
            }
            return Ok(());
        }
        Err(Failure::failed(format!(
            "no connection to {names} for {} s; is a node running there, as that of `bowline recv`?",
            self.limit.as_secs_f32()
        )))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_destination_may_be_a_name() {
        let source = "127.0.0.1:5".parse().unwrap();
        assert_eq!(place("10.0.0.1:4", source).unwrap(), "10.0.0.1:4".parse().unwrap());
        assert_eq!(place("localhost:4000", source).unwrap(), "127.0.0.1:4000".parse().unwrap());
        for text in ["localhost", ":4000", "localhost:x", "::1:4000", "localhost:70000"] {
            assert!(matches!(place(text, source), Err(Failure::Usage(_))), "{text}");
        }
    }
}
