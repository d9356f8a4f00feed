//! `bowline stress`: the load generator of RDS, either end of which can be `rds-stress`.
//!
//! Its node is the host's, or one in this process; tasks are threads with a socket each instead of
//! processes. The active side (`-s`) decides the options, see [`block`].

mod block;
mod message;
mod rdma;
mod report;
mod shared;
mod task;

use std::{
    io::{self, Read},
    net::{IpAddr, Ipv4Addr, SocketAddr, SocketAddrV4, TcpListener, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use bowline_node::{
    Failure, Outcome, control, log,
    signals::Stop,
    values::{Family, address, number, number32},
};

use self::{
    block::{Block, Keys, ReadError, VERSION, exchange_start},
    message::HEADER_LEN,
    report::{RULE, Rates, Totals, heading, histogram_lines, perfdata_heading, round_trips},
    task::{Setup, Tally, Task},
};
use super::{over_rdma::RdmaOption, using::Used};
use crate::cli::common::known::known;

/// Longest message of RDS, bytes.
const MESSAGE_BYTES_MAX: u32 = 1 << 20;
/// Most tasks, and most bytes of buffer that one task may ask for.
const TASKS_MAX: u16 = 512;
const BUFFER_BYTES_MAX: u64 = 4 << 30;
/// Time between the agreement and the first message, then until measuring starts.
const START_DELAY: Duration = Duration::from_secs(2);
const BURN_IN: Duration = Duration::from_secs(2);
/// Longest silence of the other side while options are agreed.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(30);
/// Time in which a peer that has connected must send the options, before the next one is served.
const BLOCK_TIMEOUT: Duration = Duration::from_secs(5);
/// TCP keepalive of the control connection: silence before the first probe, interval of probes, and
/// their number.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(3);
const KEEPALIVE_PAUSE: Duration = Duration::from_secs(1);
const KEEPALIVE_PROBES: u32 = 4;
/// How much earlier than its agreed time a run may end.
const END_SLACK: Duration = Duration::from_secs(1);

/// Exchange messages with a peer as fast as possible and show the rates (as rds-stress does).
///
/// Start it once without -s, then with -s and the address of the first on another host. Either end
/// can be the original rds-stress 2.0.7. Messages from others than the peer are ignored.
///
/// With -D, and --rdma on both sides, each request except the first eleven messages offers memory
/// that the peer reads or writes before it acknowledges. The columns mbi and mbo are the rates of
/// remote operations into and out of the memory of this side, in KiB/s.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Exit status: 0 after a complete run, 1 after a failure or if the peer ended early, 2 usage."
)]
pub(crate) struct Args {
    /// Local address of this side's node
    #[arg(short = 'r', long = "recv-addr", visible_alias = "address", value_name = "ADDRESS")]
    recv_addr: Option<String>,
    /// Peer to connect to; makes this the active side, whose options apply to both
    #[arg(short = 's', long, value_name = "ADDRESS")]
    send_addr: Option<String>,
    /// TCP port of the control connection; the RDS ports follow it
    #[arg(short, long, value_name = "N", default_value = "4000", value_parser = number32)]
    port: u32,
    /// Size of an acknowledgement
    #[arg(short, long, value_name = "BYTES", default_value = "63", value_parser = number32)]
    ack_bytes: u32,
    /// Size of a request
    #[arg(short = 'q', long, value_name = "BYTES", default_value = "1024", value_parser = number32)]
    req_bytes: u32,
    /// Requests outstanding per task of the peer
    #[arg(short, long, value_name = "N", default_value = "1", value_parser = number32)]
    depth: u32,
    /// Tasks per side
    #[arg(short, long, value_name = "N", default_value = "1", value_parser = number32)]
    tasks: u32,
    /// Run time in seconds; 0 means for ever
    #[arg(short = 'T', long, value_name = "SECONDS", default_value = "0", value_parser = number32)]
    time: u32,
    /// Type of service
    #[arg(short = 'Q', long, value_name = "TOS", default_value_t = 0)]
    tos: u8,
    /// Size of a remote read or write, for each request; needs --rdma on both sides
    #[arg(short = 'D', long, value_name = "BYTES", default_value = "0", value_parser = number32)]
    rdma_bytes: u32,
    /// Local buffers of a remote read or write, each of the size of -D
    #[arg(short = 'I', long, value_name = "N", default_value = "1", value_parser = number32)]
    rdma_buffers: u32,
    /// 0 remote reads and writes alternately, 1 reads, 2 writes
    #[arg(short = 'M', long, value_name = "MODE", default_value_t = 0, hide_possible_values = true,
          value_parser = known(&["0", "1", "2"], at_most::<2>))]
    rdma_mode: u8,
    /// Only the active side sends requests
    #[arg(short = 'o', long)]
    one_way: bool,
    /// Measure processor use
    #[arg(short = 'c', long)]
    report_cpu: bool,
    /// Print the final line only
    #[arg(short = 'z', long)]
    report_summary: bool,
    /// Ask the peer for real-time priority; this side keeps its own
    #[arg(short = 'R', long)]
    rtprio: bool,
    /// Check payloads and the data of remote reads and writes
    #[arg(short, long)]
    verify: bool,
    /// Print every message on standard error, on both sides
    #[arg(short = 'V', long)]
    trace: bool,
    /// The peer's operation invalidates the memory key, not the requester
    #[arg(long, value_name = "0|1", default_value_t = 0, hide_possible_values = true,
          value_parser = known(&["0", "1"], at_most::<1>))]
    rdma_use_once: u8,
    /// Register memory by a separate call, not with the request; a bowline node does the same for
    /// both
    #[arg(long, value_name = "0|1", default_value_t = 0, hide_possible_values = true,
          value_parser = known(&["0", "1"], at_most::<1>))]
    rdma_use_get_mr: u8,
    /// Acknowledge a remote read after its data have arrived. With 0, -v may find wrong data, and
    /// --rdma-use-once may end the connection
    #[arg(long, value_name = "0|1", default_value_t = 1, hide_possible_values = true,
          value_parser = known(&["0", "1"], at_most::<1>))]
    rdma_use_fence: u8,
    /// Use memory keys more than once; needs --rdma-use-get-mr 1
    #[arg(long, value_name = "0|1", default_value_t = 0, hide_possible_values = true,
          value_parser = known(&["0", "1"], at_most::<1>))]
    rdma_cache_mrs: u8,
    /// Accepted and ignored, as in the original: operations always report their completion
    #[arg(long, value_name = "0|1", hide = true)]
    rdma_use_notify: Option<u8>,
    /// Offset of buffers from a page boundary, at most 4096
    #[arg(long, value_name = "BYTES", default_value = "0", value_parser = number32)]
    rdma_alignment: u32,
    /// Print at the end how many memory keys were issued more than once
    #[arg(long)]
    rdma_key_o_meter: bool,
    /// Print the options first
    #[arg(long)]
    show_params: bool,
    /// Print comma-separated values instead of the table
    #[arg(long)]
    show_perfdata: bool,
    /// Print every round trip above this many microseconds
    #[arg(long, value_name = "US", default_value = "0xffffffff", value_parser = number)]
    show_outliers: u64,
    /// Print the distribution of round trips at the end
    #[arg(long)]
    show_histogram: bool,
    /// Try to reach the peer again N times, once a second
    #[arg(long, value_name = "N", default_value = "0", value_parser = number32)]
    connect_retries: u32,
    /// Watch congestion explicitly
    #[arg(long, value_name = "0|1", default_value_t = 1)]
    use_cong_monitor: u8,
    /// Send this side's messages without copying them, except those with remote reads or writes
    #[arg(long)]
    zerocopy: bool,
    #[command(flatten)]
    rdma: RdmaOption,
    /// Cut the connection of the running node to the peer (-s) and exit
    #[arg(long)]
    reset: bool,
    /// Asynchronous sends of Oracle's kernels, which do not exist here
    #[arg(long = "async", hide = true)]
    asynchronous: bool,
}

/// Returns what reads `0` or `1`.
/// Parses a number from 0 to `MOST`.
fn at_most<const MOST: u8>(text: &str) -> Result<u8, String> {
    let found = text.parse().ok().filter(|number| *number <= MOST);
    found.ok_or_else(|| format!("\"{text}\" is not between 0 and {MOST}"))
}

/// Runs the command.
pub(crate) fn run(args: Args) -> Outcome {
    args.check()?;
    if args.reset {
        return reset(&args);
    }
    let stop = Stop::install()?;
    let local = args.recv_addr.as_deref().map(v4).transpose()?;
    match args.send_addr.as_deref().map(v4).transpose()? {
        Some(peer) => run_active(&args, local, peer, &stop),
        None => run_passive(&args, local, &stop),
    }
}

impl Args {
    fn check(&self) -> Outcome {
        let size = HEADER_LEN as u32..=MESSAGE_BYTES_MAX;
        for (name, value) in [("-q", self.req_bytes), ("-a", self.ack_bytes)] {
            if !size.contains(&value) {
                return Err(Failure::usage(format!(
                    "{name} {value} is not between {HEADER_LEN} and {MESSAGE_BYTES_MAX} bytes"
                )));
            }
        }
        let last_port = u64::from(self.port) + u64::from(self.tasks);
        if self.port == 0 || last_port > u64::from(u16::MAX) {
            return Err(Failure::usage(format!(
                "-p {} leaves no room for {} RDS ports after it; choose a smaller port",
                self.port, self.tasks
            )));
        }
        if !(1..=u32::from(TASKS_MAX)).contains(&self.tasks) {
            return Err(Failure::usage(format!("-t must be between 1 and {TASKS_MAX}")));
        }
        if !(1..=u32::from(u16::MAX)).contains(&self.depth) {
            return Err(Failure::usage("-d must be between 1 and 65535"));
        }
        if self.rdma_cache_mrs != 0 && (self.rdma_use_once != 0 || self.rdma_use_get_mr == 0) {
            return Err(Failure::usage(
                "--rdma-cache-mrs 1 needs --rdma-use-get-mr 1, and no --rdma-use-once",
            ));
        }
        let total = u64::from(self.rdma_bytes) * u64::from(self.rdma_buffers);
        if total > rdma::BYTES_MAX || !(1..=rdma::BUFFERS_MAX).contains(&self.rdma_buffers) {
            return Err(Failure::usage(format!(
                "-D {} with -I {}: at most {} bytes in all and {} buffers are possible",
                self.rdma_bytes,
                self.rdma_buffers,
                rdma::BYTES_MAX,
                rdma::BUFFERS_MAX
            )));
        }
        if self.rdma_alignment > rdma::PAGE {
            return Err(Failure::usage(format!("--rdma-alignment is at most {}", rdma::PAGE)));
        }
        if self.reset && self.send_addr.is_none() {
            return Err(Failure::usage("--reset needs the peer: -s ADDRESS"));
        }
        Ok(())
    }

    fn block(&self, local: Ipv4Addr, peer: Ipv4Addr) -> Block {
        Block {
            depth: self.depth,
            req_bytes: self.req_bytes,
            ack_bytes: self.ack_bytes,
            rdma_bytes: self.rdma_bytes,
            send_addr: peer,
            recv_addr: local,
            port: self.port as u16,
            tasks: self.tasks as u16,
            run_time: self.time,
            summary_only: self.report_summary,
            rtprio: self.rtprio,
            trace: self.trace,
            verify: self.verify,
            show_params: self.show_params,
            show_perfdata: self.show_perfdata,
            cong_monitor: self.use_cong_monitor != 0,
            keys: Keys {
                use_once: self.rdma_use_once != 0,
                get_mr: self.rdma_use_get_mr != 0,
                fence: self.rdma_use_fence != 0,
                cache: self.rdma_cache_mrs != 0,
                meter: self.rdma_key_o_meter,
            },
            one_way: self.one_way,
            rdma_mode: self.rdma_mode,
            rdma_vector: self.rdma_buffers,
            rdma_alignment: self.rdma_alignment,
            connect_retries: self.connect_retries,
            tos: self.tos,
            asynchronous: self.asynchronous,
        }
    }
}

fn v4(text: &str) -> Outcome<Ipv4Addr> {
    match address(text, Family::V4)?.ip {
        IpAddr::V4(address) => Ok(address),
        // The family was asked for; the control protocol has no room for another.
        IpAddr::V6(address) => Err(Failure::failed(format!("{address} is not an IPv4 address"))),
    }
}

/// Cuts the connection to the peer in the node that runs on this host.
fn reset(args: &Args) -> Outcome {
    let peer = args.send_addr.as_deref().map(v4).transpose()?.map(IpAddr::V4);
    control::Client::connect(None)?.drop_connections(peer)?;
    Ok(())
}

/// Refuses what this side cannot do, with the reason.
fn refuse_unsupported(args: &Args, block: &Block) -> Outcome {
    if block.rdma_bytes > 0 && !args.rdma.is_wanted() {
        return Err(Failure::failed(
            "remote reads and writes (-D) are not possible over TCP: start both sides with --rdma, \
             or run without -D",
        ));
    }
    if block.asynchronous {
        return Err(Failure::failed(
            "asynchronous sends (--async) are a control message of Oracle's kernels alone; run \
             without it",
        ));
    }
    let slot = u64::from(block.req_bytes) + u64::from(block.ack_bytes);
    let slots = u64::from(block.depth) * u64::from(block.tasks) * 2;
    let sizes = HEADER_LEN as u32..=MESSAGE_BYTES_MAX;
    let port = u32::from(block.port) + u32::from(block.tasks);
    if !sizes.contains(&block.req_bytes)
        || !sizes.contains(&block.ack_bytes)
        || !(1..=TASKS_MAX).contains(&block.tasks)
        || !(1..=u32::from(u16::MAX)).contains(&block.depth)
        || port > u32::from(u16::MAX)
        || slot * slots > BUFFER_BYTES_MAX
    {
        return Err(Failure::failed(format!(
            "the options ask for {} tasks with {} requests of {} + {} bytes outstanding from port \
             {}, which is out of bounds; use smaller numbers",
            block.tasks, block.depth, block.req_bytes, block.ack_bytes, block.port
        )));
    }
    let memory = rdma::memory_of_task(block).saturating_mul(block.tasks.into());
    if block.rdma_bytes > 0
        && (block.rdma_total() > rdma::BYTES_MAX
            || !(1..=rdma::BUFFERS_MAX).contains(&block.rdma_vector)
            || block.rdma_alignment > rdma::PAGE
            || memory > BUFFER_BYTES_MAX)
    {
        return Err(Failure::failed(format!(
            "the options ask for remote reads and writes of {} times {} bytes, {} times at once by \
             each of {} tasks with each of the peer, which is out of bounds; use smaller numbers",
            block.rdma_vector, block.rdma_bytes, block.depth, block.tasks
        )));
    }
    Ok(())
}

/// Refuses what a program of the host's node cannot do.
fn refuse_shared(block: &Block, used: &Used) -> Outcome {
    if block.rdma_bytes > 0 && used.is_shared() {
        return Err(Failure::failed(format!(
            "remote reads and writes (-D) need a node of this command, and {} has the address: \
             give another one with -r, or run without -D",
            used.name()
        )));
    }
    Ok(())
}

fn run_active(args: &Args, local: Option<Ipv4Addr>, peer: Ipv4Addr, stop: &Stop) -> Outcome {
    let target = SocketAddrV4::new(peer, args.port as u16);
    if !args.report_summary {
        say!("connecting to {target}");
    }
    let mut stream = connect(local, target, args.connect_retries, stop)?;
    let lost = |error: io::Error| {
        Failure::failed(format!("{target} closed the connection during negotiation: {error}"))
    };
    let local = match stream.local_addr().map_err(lost)?.ip() {
        IpAddr::V4(address) => address,
        IpAddr::V6(address) => return Err(Failure::failed(format!("{address} is not IPv4"))),
    };
    let block = args.block(local, peer);
    refuse_unsupported(args, &block)?;
    stream.set_read_timeout(Some(HANDSHAKE_TIMEOUT)).map_err(lost)?;
    io::Write::write_all(&mut stream, &block.encode()).map_err(lost)?;
    let setup = setup(args, block, local, peer, true);
    Run::new(args, setup, stream, true)?.run(stop)
}

fn setup(args: &Args, block: Block, local: Ipv4Addr, remote: Ipv4Addr, requests: bool) -> Setup {
    let (foreign, outlier_us) = (Arc::default(), args.show_outliers);
    Setup { block, local, remote, requests, foreign, outlier_us, zerocopy: args.zerocopy }
}

fn connect(
    local: Option<Ipv4Addr>,
    target: SocketAddrV4,
    retries: u32,
    stop: &Stop,
) -> Outcome<TcpStream> {
    let mut left = retries;
    loop {
        let error = match connect_from(local, target) {
            Ok(stream) => return Ok(stream),
            Err(error) => error,
        };
        let again = matches!(
            error.kind(),
            io::ErrorKind::ConnectionRefused
                | io::ErrorKind::HostUnreachable
                | io::ErrorKind::NetworkUnreachable
        );
        if !again || left == 0 || stop.wait(Some(Duration::from_secs(1))) {
            return Err(Failure::failed(format!(
                "cannot reach the peer's control port {target}: {error}; start the passive side \
                 first or use --connect-retries"
            )));
        }
        left -= 1;
    }
}

fn connect_from(local: Option<Ipv4Addr>, target: SocketAddrV4) -> io::Result<TcpStream> {
    use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, connect, socket_with};
    let Some(local) = local else { return TcpStream::connect(target) };
    let socket = socket_with(AddressFamily::INET, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    bind(&socket, &SocketAddrV4::new(local, 0))?;
    connect(&socket, &target)?;
    Ok(socket.into())
}

fn run_passive(args: &Args, local: Option<Ipv4Addr>, stop: &Stop) -> Outcome {
    let address = SocketAddrV4::new(local.unwrap_or(Ipv4Addr::UNSPECIFIED), args.port as u16);
    let listener = TcpListener::bind(address).map_err(|error| {
        Failure::failed(format!(
            "cannot listen on control port {address}: {error}; choose another with -p, and for two \
             commands at one address start `bowline node` there first"
        ))
    })?;
    say!("waiting for incoming connection on {address}");
    let (stream, local, block) = loop {
        let (stream, peer) = accept(&listener, stop)?;
        let local = stream.local_addr();
        let local = local.map_err(|error| Failure::failed(format!("{peer}: {error}")))?;
        say!("accepted connection from {peer} on {local}");
        match Block::read(&mut Deadline { stream: &stream, end: Instant::now() + BLOCK_TIMEOUT }) {
            Ok(block) => break (stream, local, block),
            Err(ReadError::Version(version)) => {
                return Err(Failure::failed(format!(
                    "{peer} is rds-stress {version}, whose opening is not known here; take \
                     rds-stress {VERSION} or `bowline stress` on both sides"
                )));
            }
            // This may be any program; the peer is still expected.
            Err(ReadError::Stream(error)) => note!(
                "bowline stress: {peer} closed the connection during negotiation: {error}; waiting for \
                 another"
            ),
        }
    };
    drop(listener);
    stream
        .set_read_timeout(Some(HANDSHAKE_TIMEOUT))
        .map_err(|error| Failure::failed(format!("cannot wait for the peer: {error}")))?;
    refuse_unsupported(args, &block)?;
    let IpAddr::V4(local) = local.ip() else {
        return Err(Failure::failed(format!("{local} is not IPv4")));
    };
    let (remote, requests) = (block.recv_addr, !block.one_way);
    Run::new(args, setup(args, block, local, remote, requests), stream, false)?.run(stop)
}

/// A stream with one deadline for all reads, however slowly bytes arrive.
struct Deadline<'a> {
    stream: &'a TcpStream,
    end: Instant,
}

impl Read for Deadline<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let left = self.end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        self.stream.set_read_timeout(Some(left))?;
        self.stream.read(buffer)
    }
}

fn accept(listener: &TcpListener, stop: &Stop) -> Outcome<(TcpStream, SocketAddr)> {
    let failed = |error: io::Error| Failure::failed(format!("cannot accept the peer: {error}"));
    listener.set_nonblocking(true).map_err(failed)?;
    loop {
        match listener.accept() {
            Ok((stream, peer)) => {
                stream.set_nonblocking(false).map_err(failed)?;
                return Ok((stream, peer));
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                if stop.wait(Some(Duration::from_millis(100))) {
                    return Err(Failure::failed("stopped before a peer connected"));
                }
            }
            Err(error) => return Err(failed(error)),
        }
    }
}

/// A run whose options are agreed and whose tasks exist.
struct Run<'a> {
    args: &'a Args,
    block: Block,
    used: Used,
    stream: TcpStream,
    active: bool,
    over: Arc<AtomicBool>,
    foreign: Arc<AtomicU64>,
    tasks: Vec<Task>,
    tallies: Vec<Arc<Tally>>,
}

/// How measuring ended.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum End {
    /// After the agreed time, or when the active side ended it.
    Whole,
    /// By a signal, or because a task failed.
    Stopped,
    /// The other side is gone.
    PeerGone,
}

impl<'a> Run<'a> {
    fn new(args: &'a Args, setup: Setup, stream: TcpStream, active: bool) -> Outcome<Self> {
        let block = setup.block.clone();
        let used = Used::at(IpAddr::V4(setup.local).into(), &args.rdma)?;
        refuse_shared(&block, &used)?;
        let tasks = (0..block.tasks)
            .map(|index| Task::new(&used, setup.clone(), index).map_err(Failure::Failed))
            .collect::<Outcome<Vec<_>>>()?;
        let tallies = tasks.iter().map(Task::tally).collect();
        let (over, foreign) = (Arc::default(), setup.foreign);
        Ok(Self { args, block, used, stream, active, over, foreign, tasks, tallies })
    }

    /// Whether the sides have two addresses, so that each can have a node of its own.
    fn tells_apart(&self) -> bool {
        self.block.send_addr != self.block.recv_addr
    }

    fn run(mut self, stop: &Stop) -> Outcome {
        if self.block.show_params {
            for line in format!("{:#?}", self.block).lines() {
                say!("{}", line.trim_end_matches(','));
            }
        }
        let broke_off = |error: io::Error| {
            let hint = match self.active {
                true if self.tells_apart() => "; if it is rds-stress, it must be 2.0.7",
                true => {
                    "; both sides at one address need a node that both use: start `bowline node` \
                     there first"
                }
                false => "",
            };
            Failure::failed(format!(
                "the peer closed the connection before the start: {error}{hint}"
            ))
        };
        keep_alive(&self.stream).map_err(broke_off)?;
        exchange_start(&mut &self.stream, self.active).map_err(broke_off)?;
        // The active side starts measuring later than this one.
        let least = START_DELAY + BURN_IN + Duration::from_secs(self.block.run_time.into());
        let end = Instant::now() + least.saturating_sub(END_SLACK);
        let quiet = self.block.summary_only;
        if !quiet {
            say!("negotiated options, tasks will start in 2 seconds");
            log::text("Starting up");
        }
        self.pause(START_DELAY, stop);
        let mut threads = Vec::new();
        for task in std::mem::take(&mut self.tasks) {
            let (over, flag) = (Arc::clone(&self.over), stop.flag());
            let body = move || {
                let result = task.run(&over);
                // A failed task ends the whole run.
                if result.is_err() {
                    flag.store(true, Ordering::Relaxed);
                }
                result
            };
            let thread = thread::Builder::new().name("stress-task".into()).spawn(body);
            threads.push(thread.map_err(|error| {
                Failure::failed(format!("cannot start a task: {error}; use fewer tasks with -t"))
            })?);
        }
        self.pause(BURN_IN, stop);
        if !quiet {
            say!("");
        }
        let mut failed = false;
        if self.measure(stop, end) == End::PeerGone {
            failed = true;
            note!("bowline stress: the peer ended before the run was complete; look at its output");
        }
        self.over.store(true, Ordering::Relaxed);
        for thread in threads {
            let text = match thread.join() {
                Ok(Ok(())) => continue,
                Ok(Err(text)) => text,
                Err(_) => "a task panicked; please report this".to_owned(),
            };
            failed = true;
            note!("bowline stress: {text}");
        }
        let foreign = self.foreign.load(Ordering::Relaxed);
        if foreign > 0 {
            note!("bowline stress: {foreign} messages from others than the peer were ignored");
        }
        // The end of the control connection ends the other side. Sockets are closed after it, so
        // that no task there sends to a closed port.
        drop(self.stream);
        if failed { Err(Failure::Reported) } else { Ok(()) }
    }

    /// Waits, printing a dot per second, until the time is over or the run is stopped.
    fn pause(&self, time: Duration, stop: &Stop) {
        for _ in 0..time.as_secs() {
            if !self.block.summary_only {
                log::text(".");
            }
            if stop.wait(Some(Duration::from_secs(1))) {
                return;
            }
        }
    }

    /// Prints the figures of each second until `end`, or until the peer ends the run.
    fn measure(&self, stop: &Stop, end: Instant) -> End {
        let block = &self.block;
        let cpu = self.args.report_cpu || block.show_perfdata;
        let first_counters = self.used.node().counters();
        if block.show_perfdata {
            say!("{}", perfdata_heading(&first_counters));
        } else if !block.summary_only {
            say!("{}", heading());
        }
        let start = Instant::now();
        let first = Totals::take(&self.tallies, cpu);
        let (mut before, mut counters) = (first, first_counters.clone());
        let mut second = 0;
        let how = loop {
            second += 1;
            let due = start + Duration::from_secs(second);
            if stop.wait(Some(due.saturating_duration_since(Instant::now()))) {
                break End::Stopped;
            }
            match self.connection() {
                Connection::Stands => {}
                // The active side ended the run: at the agreed time, or a run without one.
                Connection::Ended
                    if !self.active && (block.run_time == 0 || Instant::now() >= end) =>
                {
                    break End::Whole;
                }
                Connection::Ended | Connection::Broken => break End::PeerGone,
            }
            let over = self.active && block.run_time > 0 && second >= u64::from(block.run_time);
            let after = Totals::take(&self.tallies, cpu);
            let rates = Rates::between(block, &before, &after);
            let counters_now = self.used.node().counters();
            if block.summary_only {
            } else if block.show_perfdata {
                say!("{}", rates.perfdata(block, &counters_now, &counters));
            } else {
                say!("{}", rates.line());
            }
            (before, counters) = (after, counters_now);
            if over {
                break End::Whole;
            }
        };
        // The part after the last whole second is not measured, since the two sides stop at
        // different times. Only a run that ends within its first second uses it.
        let last = if second > 1 && how != End::Stopped {
            before
        } else {
            Totals::take(&self.tallies, cpu)
        };
        self.summary(&first, &last, &first_counters);
        how
    }

    fn summary(&self, first: &Totals, last: &Totals, counters: &[(&'static str, u64)]) {
        let rates = Rates::between(&self.block, first, last);
        if self.block.show_perfdata {
            say!("{}", rates.perfdata(&self.block, &self.used.node().counters(), counters));
        } else {
            if !self.block.summary_only {
                say!("{RULE}");
            }
            say!("{}  (average)", rates.line());
        }
        if self.args.show_histogram {
            for line in histogram_lines(&round_trips(&self.tallies)) {
                say!("{line}");
            }
        }
    }

    /// Returns the state of the control connection.
    fn connection(&self) -> Connection {
        if self.stream.set_nonblocking(true).is_err() {
            return Connection::Broken;
        }
        match (&self.stream).read(&mut [0; 16]) {
            Ok(0) => Connection::Ended,
            Ok(_) => Connection::Stands,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Connection::Stands,
            Err(_) => Connection::Broken,
        }
    }
}

/// State of the control connection.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Connection {
    Stands,
    /// The peer has closed it.
    Ended,
    /// It was reset, or the peer's machine does not answer.
    Broken,
}

/// Enables TCP keepalive: the system notices when the peer's machine is gone.
fn keep_alive(stream: &TcpStream) -> io::Result<()> {
    use rustix::net::sockopt;
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, KEEPALIVE_IDLE)?;
    sockopt::set_tcp_keepintvl(stream, KEEPALIVE_PAUSE)?;
    sockopt::set_tcp_keepcnt(stream, KEEPALIVE_PROBES)?;
    Ok(())
}
