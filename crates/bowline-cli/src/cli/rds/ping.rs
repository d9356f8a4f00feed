//! `bowline ping`: asks the RDS of another node for an answer and shows the round trip.
//!
//! As `rds-ping` does, requests are zero-length datagrams to port 0, sent round robin from several
//! sockets; the remote RDS answers by itself, and the socket that gets an answer identifies the
//! request. Unlike the original, a request that gets no answer in time is reported and its
//! socket replaced, so losses do not silence the tool. When the local address belongs to a node
//! that runs already, the sockets are that node's.

use std::{
    net::SocketAddr,
    path::PathBuf,
    time::{Duration, Instant},
};

use bowline::rds::{Interest, Socket};
use bowline_base::Errno;
use bowline_node::{
    Failure, Outcome,
    control::Client,
    signals::Stop,
    values::{Address, Family, address, interval, joined, number, number32, route_to, with_link},
};

use super::{
    over_rdma::RdmaOption,
    using::{self, Used},
};
use crate::cli::common::histogram::Histogram;

/// Sockets by default, and at most, as rds-ping 2.3 has it.
const SOCKETS: u64 = 8;
const SOCKETS_MAX: u64 = 32;
/// What a node says of connections that were not made.
const REFUSED: &str = "refused";
const UNREACHABLE: &str = "unreachable";
/// Longest wait on one socket while others also expect an answer, and between looks at signals.
const SLICE: Duration = Duration::from_millis(1);
const SIGNAL_SLICE: Duration = Duration::from_millis(100);

/// Ping the RDS of another node and show the round-trip time (as rds-ping does).
#[derive(Debug, clap::Args)]
#[command(after_help = "Exit status: 0 at least one reply, 1 none, 2 usage.")]
pub(crate) struct Args {
    /// Stop after N replies; 0 means never
    #[arg(short = 'c', value_name = "N", default_value = "0", value_parser = number)]
    count: u64,
    /// Time between requests: seconds, or a number with ms or us
    #[arg(short = 'i', value_name = "TIME", default_value = "1", value_parser = interval)]
    interval: Duration,
    /// Local address, a link-local one with its interface, as fe80::1%eth0; without it, the one
    /// that the route has
    #[arg(short = 'I', long = "address", value_name = "ADDRESS")]
    local: Option<String>,
    /// Type of service, 0 to 255; bowline nodes treat all values alike
    #[arg(short = 'Q', value_name = "TOS", default_value = "0", value_parser = number32)]
    tos: u32,
    /// Longest wait for one reply: seconds, or a number with ms or us
    #[arg(short = 'W', value_name = "TIME", default_value = "2", value_parser = interval)]
    timeout: Duration,
    /// Print the summary only
    #[arg(short = 'q')]
    quiet: bool,
    /// Send from this many sockets, 1 to 32, each of which waits for one reply; without it 8, or
    /// the number of requests if that is smaller
    #[arg(short = 'n', long, value_name = "N", value_parser = number)]
    sockets: Option<u64>,
    /// Print the address of the node, not the name given
    #[arg(long)]
    numeric: bool,
    /// Use IPv6
    #[arg(short = '6')]
    v6: bool,
    #[command(flatten)]
    rdma: RdmaOption,
    /// Have the running node with this control socket send and measure; without it, the sockets
    /// are those of the node that serves the local address, if there is one
    #[arg(long, value_name = "PATH", conflicts_with = "rdma")]
    control: Option<PathBuf>,
    /// Print one JSON object per line: every reply, then the summary
    #[arg(long)]
    json: bool,
    /// Node to ping: an address or a host name; a link-local address without an interface has that
    /// of -I
    remote: String,
}

/// One of the sockets and the request it waits for.
struct Slot {
    socket: Socket,
    request: Option<Request>,
    /// Sequence number of the last request that was answered, to recognise a second answer.
    answered: Option<u64>,
}

#[derive(Clone, Copy)]
struct Request {
    sequence: u64,
    sent: Instant,
}

/// Output and statistics, common to both ways of sending.
struct Figures<'a> {
    args: &'a Args,
    local: Address,
    remote: Address,
    sent: u64,
    received: u64,
    times: Histogram,
}

/// Requests from sockets of this process.
struct Direct<'a> {
    figures: Figures<'a>,
    used: Used,
    slots: Vec<Slot>,
}

/// Runs the command.
pub(crate) fn run(args: &Args) -> Outcome {
    if args.tos > 255 {
        return Err(Failure::usage(format!("-Q {} is not between 0 and 255", args.tos)));
    }
    let sockets = args.sockets.unwrap_or(match args.count {
        0 => SOCKETS,
        count => count.min(SOCKETS),
    });
    if !(1..=SOCKETS_MAX).contains(&sockets) {
        return Err(Failure::usage(format!(
            "-n {sockets} is not a number of sockets between 1 and {SOCKETS_MAX}; for addresses \
             instead of names use --numeric"
        )));
    }
    if args.timeout.is_zero() {
        return Err(Failure::usage("-W must be greater than 0"));
    }
    let family = if args.v6 { Family::V6 } else { Family::Any };
    let mut remote = address(&args.remote, family)?;
    if remote.ip.is_unspecified() {
        return Err(Failure::usage(format!(
            "{remote} is no address of a node: name the one to ping"
        )));
    }
    let mut given = args.local.as_ref().map(|local| address(local, family)).transpose()?;
    if let Some(given) = &mut given {
        joined(given, &mut remote)?;
    }
    let mut client = args.control.as_ref().map(|path| Client::connect(Some(path))).transpose()?;
    let mut local = match (&mut client, given) {
        (Some(client), _) => node_address(&client.snapshot()?.node.addresses, given, remote)?,
        (None, Some(given)) => given,
        (None, None) => route_to(remote)?,
    };
    joined(&mut local, &mut remote)?;
    for address in [local, remote] {
        with_link(address).map_err(Failure::usage)?;
    }
    if local.ip.is_ipv4() != remote.ip.is_ipv4() {
        return Err(Failure::usage(format!(
            "{local} and {remote} are of different address families"
        )));
    }
    let stop = Stop::install()?;
    let times = Histogram::default();
    let figures = Figures { args, local, remote, sent: 0, received: 0, times };
    let start = Instant::now();
    let figures = match client
        .map_or_else(|| way(local, &args.rdma), |client| Ok(Way::Through(client)))?
    {
        Way::Direct(used) => {
            let slots = (0..sockets)
                .map(|_| Ok(Slot { socket: open(&used, local)?, request: None, answered: None }))
                .collect::<Outcome<Vec<_>>>()?;
            let mut direct = Direct { figures, used, slots };
            direct.ping(&stop)?;
            direct.figures
        }
        Way::Through(client) => ping_through(figures, client, &stop)?,
    };
    figures.summary(start.elapsed());
    if figures.received == 0 { Err(Failure::Reported) } else { Ok(()) }
}

enum Way {
    Direct(Used),
    Through(Client),
}

/// Returns the address that a running node sends from: the given one, else the one routing picks if
/// the node serves it, else one of the node's. `addresses` are those the node serves; empty: all of
/// this machine.
fn node_address(
    addresses: &[Address],
    given: Option<Address>,
    remote: Address,
) -> Outcome<Address> {
    let of_node = |given: &Address| {
        if addresses.is_empty() {
            return Some(*given);
        }
        addresses.iter().find(|address| address.covers(*given)).copied()
    };
    let list = || addresses.iter().map(Address::to_string).collect::<Vec<_>>().join(", ");
    if let Some(given) = given {
        return of_node(&given).ok_or_else(|| {
            Failure::usage(format!("the node does not serve {given}; it serves {}", list()))
        });
    }
    let routed = route_to(remote);
    if let Ok(local) = &routed
        && let Some(local) = of_node(local)
    {
        return Ok(local);
    }
    let of_family = |address: &&Address| {
        address.ip.is_ipv4() == remote.ip.is_ipv4()
            && (remote.link.is_none() || address.link.is_none() || address.link == remote.link)
    };
    match addresses.iter().find(of_family) {
        Some(local) => Ok(*local),
        None if addresses.is_empty() => routed,
        None => Err(Failure::usage(format!(
            "the node serves no address of the family of {remote}, only {}",
            list()
        ))),
    }
}

/// Decides who sends: sockets of this process, or a node that runs at the address and serves no
/// programs.
fn way(local: Address, rdma: &RdmaOption) -> Outcome<Way> {
    match Used::at(local, rdma) {
        Ok(used) => Ok(Way::Direct(used)),
        Err(failure) => match Client::serving(local) {
            Some(_) if rdma.is_wanted() => Err(Failure::usage(format!(
                "{} sends the requests, over RDMA if it has --rdma itself: leave it out here",
                using::name(local)
            ))),
            Some(client) => Ok(Way::Through(client)),
            None => Err(failure),
        },
    }
}

/// Lets a running node send the requests, one at a time; it also measures.
fn ping_through<'a>(
    mut figures: Figures<'a>,
    mut client: Client,
    stop: &Stop,
) -> Outcome<Figures<'a>> {
    let args = figures.args;
    let mut due = Instant::now();
    loop {
        figures.sent += 1;
        match client.probe(figures.local, figures.remote, args.timeout)? {
            Ok(time) => figures.answered(figures.sent, time, figures.remote.at(0)),
            Err(errno) => figures.report_error(figures.sent, errno),
        }
        due = (due + args.interval).max(Instant::now());
        let over = args.count > 0 && figures.sent >= args.count;
        if over || stop.wait(Some(due.saturating_duration_since(Instant::now()))) {
            return Ok(figures);
        }
    }
}

fn open(used: &Used, local: Address) -> Outcome<Socket> {
    let socket = used.bind(local.at(0))?;
    socket.set_send_timeout(Some(SIGNAL_SLICE));
    socket.set_nonblocking(true);
    Ok(socket)
}

impl Direct<'_> {
    fn ping(&mut self, stop: &Stop) -> Outcome {
        let mut due = Instant::now();
        while !stop.asked() && !self.finished() {
            let now = Instant::now();
            if self.figures.wants_to_send() && now >= due {
                self.request(stop);
                due = (due + self.figures.args.interval).max(now);
            }
            let until = if self.figures.wants_to_send() { Some(due) } else { None };
            self.wait(until)?;
            self.collect()?;
            self.expire()?;
        }
        Ok(())
    }

    fn finished(&self) -> bool {
        let count = self.figures.args.count;
        let waiting = self.slots.iter().any(|slot| slot.request.is_some());
        count > 0 && (self.figures.received >= count || (!self.figures.wants_to_send() && !waiting))
    }

    /// Sends the next request from the next socket, unless that one still waits for an answer.
    fn request(&mut self, stop: &Stop) {
        let index = (self.figures.sent % self.slots.len() as u64) as usize;
        if self.slots[index].request.is_some() {
            return;
        }
        self.figures.sent += 1;
        let sequence = self.figures.sent;
        let sent = Instant::now();
        let destination = self.figures.remote.at(0);
        let slot = &mut self.slots[index];
        // Sending blocks, in slices: the first message to a host may have to wait until both sides
        // have agreed on the number of paths.
        slot.socket.set_nonblocking(false);
        let error = loop {
            match slot.socket.send_to(&[], destination) {
                Ok(_) => {
                    slot.socket.set_nonblocking(true);
                    slot.request = Some(Request { sequence, sent });
                    return;
                }
                Err(error) if error.is_timed_out() || error.is_would_block() => {
                    if stop.asked() || sent.elapsed() >= self.figures.args.timeout {
                        break error;
                    }
                }
                Err(error) => break error,
            }
        };
        slot.socket.set_nonblocking(true);
        let is_late = error.is_timed_out() || error.is_would_block();
        let errno = if is_late { self.why_silent() } else { error.errno() };
        self.figures.report_error(sequence, errno);
    }

    /// Waits for an answer to the latest request until the next one is due.
    fn wait(&self, until: Option<Instant>) -> Outcome {
        let now = Instant::now();
        let waiting = self.slots.iter().filter(|slot| slot.request.is_some()).count();
        let youngest = self.slots.iter().max_by_key(|slot| slot.request.map(|r| r.sequence));
        let mut time = until.map_or(SIGNAL_SLICE, |until| until.saturating_duration_since(now));
        time = time.min(if waiting > 1 { SLICE } else { SIGNAL_SLICE });
        let oldest = self.slots.iter().filter_map(|slot| slot.request).map(|r| r.sent).min();
        if let Some(oldest) = oldest {
            let expires = oldest + self.figures.args.timeout;
            time = time.min(expires.saturating_duration_since(now));
        }
        if !time.is_zero()
            && let Some(slot) = youngest
        {
            match slot.socket.wait(Interest::READ, Some(time)) {
                Err(error) if !error.is_timed_out() => return Err(error.into()),
                _ => {}
            }
        }
        Ok(())
    }

    /// Takes every answer that has arrived.
    fn collect(&mut self) -> Outcome {
        for index in 0..self.slots.len() {
            loop {
                let source = match self.slots[index].socket.recv_from(&mut []) {
                    Ok((_, source)) => source,
                    Err(error) if error.is_would_block() => break,
                    Err(error) => return Err(error.into()),
                };
                let arrived = Instant::now();
                let slot = &mut self.slots[index];
                match (slot.request.take(), slot.answered) {
                    (Some(request), _) => {
                        slot.answered = Some(request.sequence);
                        let time = arrived.duration_since(request.sent);
                        self.figures.answered(request.sequence, time, source);
                    }
                    (None, Some(sequence)) => self.figures.report(sequence, None, source, true),
                    (None, None) => {}
                }
            }
        }
        Ok(())
    }

    /// Why there is no answer, as far as the node knows.
    fn why_silent(&self) -> Errno {
        let peer = self.used.peer(self.figures.remote.ip).filter(|peer| !peer.is_connected);
        match peer.and_then(|peer| peer.last_end).as_deref() {
            Some(REFUSED) => Errno::ECONNREFUSED,
            Some(UNREACHABLE) => Errno::EHOSTUNREACH,
            _ => Errno::ETIMEDOUT,
        }
    }

    /// Gives up requests that waited too long. Their sockets are replaced, so that a late answer is
    /// not taken for the answer to a later request.
    fn expire(&mut self) -> Outcome {
        for index in 0..self.slots.len() {
            let Some(request) = self.slots[index].request else { continue };
            if request.sent.elapsed() >= self.figures.args.timeout {
                self.slots[index] = Slot {
                    socket: open(&self.used, self.figures.local)?,
                    request: None,
                    answered: None,
                };
                let errno = self.why_silent();
                self.figures.report_error(request.sequence, errno);
            }
        }
        Ok(())
    }
}

impl Figures<'_> {
    fn wants_to_send(&self) -> bool {
        self.args.count == 0 || self.sent < self.args.count
    }

    fn answered(&mut self, sequence: u64, time: Duration, source: SocketAddr) {
        self.received += 1;
        self.times.record(time.as_nanos() as u64);
        self.report(sequence, Some(time), source, false);
    }

    fn report(&self, sequence: u64, time: Option<Duration>, source: SocketAddr, again: bool) {
        if self.args.quiet {
            return;
        }
        let usec = time.map_or(0, |time| time.as_micros());
        if self.args.json {
            let line = serde_json::json!({
                "type": if again { "duplicate" } else { "reply" },
                "sequence": sequence,
                "usec": usec as u64,
                "source": source.ip().to_string(),
            });
            say!("{line}");
            return;
        }
        let other = if source.ip() == self.remote.ip {
            String::new()
        } else {
            format!(" ({})", source.ip())
        };
        let again = if again { " DUP!" } else { "" };
        say!("{sequence:4}: {usec} usec{other}{again}");
    }

    fn report_error(&self, sequence: u64, errno: Errno) {
        let text = errno.strerror();
        if self.args.json {
            let line = serde_json::json!({
                "type": "error", "sequence": sequence, "errno": errno.0, "error": text,
            });
            if !self.args.quiet {
                say!("{line}");
            }
        } else if !self.args.quiet {
            say!("{sequence:4}: ERROR: {text}");
        }
    }

    fn summary(&self, elapsed: Duration) {
        let lost = self.sent.saturating_sub(self.received);
        let percent = if self.sent == 0 { 0.0 } else { 100.0 * lost as f64 / self.sent as f64 };
        let times = &self.times;
        let micro = |nanos: f64| nanos / 1000.0;
        let (min, mean) = (micro(times.min() as f64), micro(times.mean()));
        let (max, mdev) = (micro(times.max() as f64), micro(times.deviation()));
        if self.args.json {
            let line = serde_json::json!({
                "type": "summary",
                "destination": self.remote.to_string(),
                "source": self.local.to_string(),
                "sent": self.sent,
                "received": self.received,
                "lost_percent": percent,
                "elapsed_ms": elapsed.as_millis() as u64,
                "rtt_usec": { "min": min, "avg": mean, "max": max, "mdev": mdev },
            });
            say!("{line}");
            return;
        }
        let name =
            if self.args.numeric { self.remote.to_string() } else { self.args.remote.clone() };
        say!("");
        say!("--- {name} rds ping statistics ---");
        say!(
            "{} requests sent, {} replies received, {percent:.0}% lost, time {} ms",
            self.sent,
            self.received,
            elapsed.as_millis()
        );
        if self.received > 0 {
            say!("round trip min/avg/max/mdev = {min:.0}/{mean:.0}/{max:.0}/{mdev:.0} usec");
        }
    }
}
