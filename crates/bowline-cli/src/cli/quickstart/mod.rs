//! `bowline quickstart`: two nodes, a gigabyte, broken connections, and the proof that nothing
//! was lost; then a disk of another process, broken paths, and the same proof.
//!
//! First act: node A runs here and prints the progress; node B is a second process ([`peer`]). Both
//! sides do the same work ([`side`]); over RDMA, A's memory is written and read by B before
//! ([`remote`]). Second act: [`disk`], with a [`tree`] of files on it.

mod disk;
mod message;
mod peer;
mod remote;
mod side;
mod tree;

use std::{
    env,
    io::{BufRead, BufReader},
    net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, UdpSocket},
    path::PathBuf,
    process::Child,
    sync::{atomic::Ordering, mpsc},
    thread,
    time::{Duration, Instant},
};

use bowline::rds::Node;
use bowline_node::{
    Failure, Outcome,
    log::{Progress, bytes, count, error_line},
    signals::Stop,
    values::number,
};

pub(crate) use self::peer::{PeerArgs, run_peer};
use self::{
    peer::{Peer, Word},
    remote::Remote,
    side::{Cut, Cuts, ECHO_PORT, Report, SOCKETS, Side, Work},
};
use super::{common::histogram::Histogram, rds::over_rdma::RdmaOption};

const RDS_PORT: u16 = 16385;
const ROCE_PORT: u16 = 4791;
/// Time limit of the run, extended for more data; an act that is not finished by then has failed.
const DEADLINE: Duration = Duration::from_secs(26);
const DEADLINE_BYTES: u64 = 1 << 30;
const SLOWEST_BYTES_PER_SECOND: u64 = 64 << 20;
const READY_TIMEOUT: Duration = Duration::from_secs(5);
/// The round trip is measured for this long, or this many times.
const ECHO_TIME: Duration = Duration::from_millis(800);
const ECHO_ROUNDS: u64 = 10_000;
/// Width of a terminal at which no word is to break.
const COLUMNS: usize = 80;
const TICK: Duration = Duration::from_millis(5);

/// See for yourself: two nodes, then a disk and its user, broken connections, nothing lost.
#[derive(Debug, clap::Args)]
#[command(after_help = "Exit status: 0 everything arrived, 1 failed, 2 usage.")]
pub(crate) struct Args {
    /// Show one part only: rds (datagrams) or rnbd (a disk over two paths)
    #[arg(long, value_name = "ACT", value_parser = ["rds", "rnbd"])]
    only: Option<String>,
    /// Exchange the datagrams over RDMA, on soft RoCE devices, with remote writes and reads of
    /// memory
    #[arg(long)]
    rdma: bool,
    /// Amount of data, both directions together
    #[arg(long, value_name = "BYTES", default_value = "1GiB", value_parser = number)]
    bytes: u64,
    /// How often all connections are cut during the exchange
    #[arg(long, value_name = "N", default_value_t = 6)]
    cuts: u32,
    /// Address of node A [default: 127.0.0.1, or another loopback address if that is in use]
    #[arg(long, value_name = "ADDRESS", requires = "remote")]
    local: Option<IpAddr>,
    /// Address of node B, also local to this machine [default: 127.0.0.2 or another]
    #[arg(long, value_name = "ADDRESS", requires = "local")]
    remote: Option<IpAddr>,
    /// Seed of the random sizes and contents
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// Print one JSON object instead of the story
    #[arg(long)]
    json: bool,
    /// Show progress even when standard error is not a terminal
    #[arg(long)]
    progress: bool,
}

/// Prints a line of the story, unless a program reads the result.
macro_rules! tell {
    ($args:expr, $($arg:tt)*) => { if !$args.json { say!($($arg)*) } };
}
use tell;

/// Results of the first act.
struct Figures {
    a: Report,
    b: Report,
    echo: Histogram,
    elapsed: Duration,
    cuts: u32,
    connections_cut: usize,
    /// Over RDMA only.
    remote: Option<Remote>,
}

/// The JSON result of an act, and its problems.
struct Verdict {
    object: serde_json::Value,
    wrong: Vec<String>,
}

/// Runs the command.
pub(crate) fn run(args: &Args) -> Outcome {
    if args.rdma && args.only.as_deref() == Some("rnbd") {
        return Err(Failure::usage(
            "--rdma applies to the datagrams: leave out --only rnbd; the disk always uses RDMA",
        ));
    }
    let stop = Stop::install()?;
    let is = |act: &str| args.only.as_deref().is_none_or(|only| only == act);
    let mut verdicts = Vec::new();
    if is("rds") {
        verdicts.push(datagrams(args, &stop)?);
    }
    if is("rnbd") && verdicts.iter().all(|verdict: &Verdict| verdict.wrong.is_empty()) {
        if is("rds") {
            tell!(args, "");
        }
        verdicts.push(disk::run(args, &stop)?);
    }
    end(args, verdicts)
}

/// Prints the overall result, and what to try next.
fn end(args: &Args, verdicts: Vec<Verdict>) -> Outcome {
    let passed = verdicts.iter().all(|verdict| verdict.wrong.is_empty());
    if args.json {
        let problems: Vec<String> = verdicts.iter().flat_map(|v| v.wrong.clone()).collect();
        let mut object = serde_json::json!({ "pass": passed, "problems": problems });
        for verdict in verdicts {
            if let (Some(all), serde_json::Value::Object(members)) =
                (object.as_object_mut(), verdict.object)
            {
                all.extend(members);
            }
        }
        say!("{object}");
    }
    if !passed {
        return Err(Failure::Reported);
    }
    tell!(args, "");
    let bowline = own_name();
    let next = |words: &str, what: &str| {
        let line = format!("   {:<55}  {what}", format!("{bowline} {words}"));
        match line.chars().count() {
            ..=COLUMNS => tell!(args, "{line}"),
            // The command stays whole, so that it can be copied.
            _ => tell!(args, "   {what}:\n   {bowline} {words}"),
        }
    };
    tell!(args, "Next, each in a shell of its own:");
    if args.only.as_deref() != Some("rnbd") {
        next("node --address 127.0.0.1 --echo 4000", "run a node");
        next("ping -I 127.0.0.2 127.0.0.1", "ping it");
        next("info", "look inside it");
        let (rdma, bytes) = if args.rdma { (" --rdma", " -D 64k") } else { ("", "") };
        next(&format!("stress{rdma} -r 127.0.0.3"), "wait for load, then");
        next(&format!("stress{rdma} -r 127.0.0.2 -s 127.0.0.3 -T 5{bytes}"), "make it");
    }
    if args.only.as_deref() != Some("rds") {
        next("rnbd export --memory disk0=1GiB -I 127.0.0.1", "serve a disk");
        let map =
            "rnbd map disk0 --from s1 --path 127.0.0.2@127.0.0.1 \\\n      --nbd /tmp/disk0.sock";
        next(map, "use it");
        next("rnbd dump", "look at both");
    }
    Ok(())
}

/// How a shell here finds this command: by its name, or where that is not in `PATH`, by its path.
fn own_name() -> String {
    const NAME: &str = "bowline";
    let Ok(own) = env::current_exe() else { return NAME.to_owned() };
    let is_own = |folder: PathBuf| folder.join(NAME).canonicalize().is_ok_and(|found| found == own);
    if env::var_os("PATH").is_some_and(|path| env::split_paths(&path).any(is_own)) {
        return NAME.to_owned();
    }
    let here = env::current_dir().unwrap_or_default();
    own.strip_prefix(&here).unwrap_or(&own).display().to_string()
}

/// The first act.
fn datagrams(args: &Args, stop: &Stop) -> Outcome<Verdict> {
    let (local, remote) = match (args.local, args.remote) {
        (Some(local), Some(remote)) => (local, remote),
        _ => free_pair(args.rdma)?,
    };
    if local == remote || local.is_ipv4() != remote.is_ipv4() {
        return Err(Failure::usage("--local and --remote must be two addresses of one family"));
    }
    let node = start_node(local, args.rdma)?;
    let bytes_each = args.bytes.div_ceil(2);
    let cuts = Cuts::of_a(args.cuts, bytes_each);
    let work = Work { remote, bytes: bytes_each, seed: args.seed, cuts };
    let theirs = Work { seed: args.seed.wrapping_add(1000), ..work.clone() };
    let mut peer = Peer::start(remote, local, &theirs, args.rdma)?;
    match peer.listen(READY_TIMEOUT) {
        Some(Word::Ready) => {}
        Some(Word::Lost(text)) => return Err(Failure::Failed(text)),
        _ => return Err(Failure::failed("the second process did not start in time")),
    }
    introduce(args, local, remote, peer.pid());
    let echo = measure_echo(&node, local, remote, stop)?;
    tell!(
        args,
        "1. Round trip of 64 bytes over idle connections, {} times:\n   half within {} us, 99 of \
         100 within {} us",
        count(echo.count()),
        echo.percentile(50.0) / 1000,
        echo.percentile(99.0) / 1000
    );
    let mut written_and_read = None;
    if args.rdma {
        let done = remote::offer(&node, (local, remote), args.seed, stop)?;
        tell_remote(args, &done);
        written_and_read = Some(done);
    }
    let sockets = Side::bind(&node, local)?;
    tell!(
        args,
        "{}. Moving {} of messages, cutting every connection on the way:",
        step(args, 2),
        bytes(args.bytes)
    );
    let start = Instant::now();
    peer.tell("start");
    let (told, cuts) = mpsc::channel();
    let on_cut = move |cut| {
        // The receiver is gone at the end of the run.
        let _ = told.send(cut);
    };
    let side = Side::start(&node, sockets, work, on_cut)?;
    let mut result = move_data(args, side, &cuts, &mut peer, stop, start, echo);
    result.remote = written_and_read;
    peer.tell("quit");
    drop(peer);
    if stop.asked() {
        return Err(Failure::failed("stopped before the end, without a result"));
    }
    Ok(conclude(args, &result))
}

/// Starts a node, over RDMA if that is wanted.
fn start_node(local: IpAddr, rdma: bool) -> Outcome<Node> {
    let option = if rdma { RdmaOption::soft() } else { RdmaOption::default() };
    option.start_node(local.into())
}

/// Returns the number of a step that has it over TCP.
fn step(args: &Args, number: u32) -> u32 {
    number + u32::from(args.rdma)
}

/// What a connection between the nodes is.
fn kind(args: &Args) -> &'static str {
    if args.rdma { "RDMA" } else { "TCP" }
}

/// Finds two loopback addresses whose ports are free: the well-known ones if possible.
fn free_pair(rdma: bool) -> Outcome<(IpAddr, IpAddr)> {
    let block = (std::process::id() % 200) as u8 + 20;
    for (a, b) in [((0, 1), (0, 2)), ((block, 1), (block, 2)), ((block, 3), (block, 4))] {
        let address = |(high, low)| IpAddr::V4(Ipv4Addr::new(127, 0, high, low));
        let pair = (address(a), address(b));
        let free = |address: IpAddr| {
            TcpListener::bind((address, RDS_PORT)).is_ok()
                && (!rdma || UdpSocket::bind((address, ROCE_PORT)).is_ok())
        };
        if free(pair.0) && free(pair.1) {
            return Ok(pair);
        }
    }
    if rdma {
        return Err(Failure::failed(format!(
            "TCP port {RDS_PORT} or UDP port {ROCE_PORT} is in use on the loopback addresses \
             (ss -tulnp); name two other local addresses with --local and --remote"
        )));
    }
    Err(Failure::failed(format!(
        "TCP port {RDS_PORT} is in use on the loopback addresses, perhaps by the kernel's rds_tcp; \
         unload it (modprobe -r rds_tcp) or name two other local addresses with --local and \
         --remote"
    )))
}

fn introduce(args: &Args, local: IpAddr, remote: IpAddr, pid: u32) {
    let sockets = u32::from(SOCKETS);
    let over = if args.rdma { ", over RDMA" } else { "" };
    tell!(args, "bowline quickstart: reliable datagrams between two nodes on this machine{over}");
    tell!(args, "");
    tell!(args, "   node A  {local:<15}  this process, {}", std::process::id());
    tell!(args, "   node B  {remote:<15}  a second process, {pid}");
    tell!(args, "");
    let (share, how) = if args.rdma {
        (format!("one RDMA connection, RoCE on UDP port {ROCE_PORT}"), "(queue pairs end)")
    } else {
        (format!("a few TCP connections to port {RDS_PORT}"), "(TCP reset)")
    };
    tell!(
        args,
        "Each node has {sockets} sockets, and every socket sends to all {sockets} of the other \
         node:\n{} flows that share {share}.\nMeanwhile all \
         connections are cut {how} {} times, as a failing switch\nwould do. Every message \
         carries its number and a checksum; receivers expect each\nnumber once, in order.",
        2 * sockets * sockets,
        args.cuts
    );
    tell!(args, "");
}

fn tell_remote(args: &Args, done: &Remote) {
    let seconds = done.elapsed.as_secs_f64().max(1e-6);
    let moved = done.operations * remote::LEN as u64;
    tell!(
        args,
        "2. Node B writes and reads memory of node A, {} each, {} times: {}/s\n   half of the \
         writes within {:.1} ms, of the reads within {:.1} ms; all contents compared",
        bytes(remote::LEN as u64),
        count(done.operations),
        bytes((moved as f64 / seconds) as u64),
        done.writes.percentile(50.0) as f64 / 1e6,
        done.reads.percentile(50.0) as f64 / 1e6
    );
}

/// Sends a small message to node B and back, again and again.
fn measure_echo(node: &Node, local: IpAddr, remote: IpAddr, stop: &Stop) -> Outcome<Histogram> {
    let socket = node.bind(SocketAddr::new(local, ECHO_PORT))?;
    socket.set_recv_timeout(Some(READY_TIMEOUT));
    socket.set_send_timeout(Some(READY_TIMEOUT));
    let place = SocketAddr::new(remote, ECHO_PORT);
    let mut buffer = [0; 64];
    let mut times = Histogram::default();
    let mut start = Instant::now();
    let mut round = 0;
    while round <= ECHO_ROUNDS && start.elapsed() < ECHO_TIME && !stop.asked() {
        let sent = Instant::now();
        socket.send_to(&buffer, place)?;
        socket.recv_from(&mut buffer)?;
        if round == 0 {
            // The first message also establishes the connections.
            start = Instant::now();
        } else {
            times.record(sent.elapsed().as_nanos() as u64);
        }
        round += 1;
    }
    Ok(times)
}

fn move_data(
    args: &Args,
    side: Side,
    our_cuts: &mpsc::Receiver<Cut>,
    peer: &mut Peer,
    stop: &Stop,
    start: Instant,
    echo: Histogram,
) -> Figures {
    let mut progress = Progress::new(args.progress);
    let watched = side.progress();
    let share = args.bytes.div_ceil(2).max(1);
    let (mut cuts, mut connections_cut) = (0, 0);
    let mut theirs: Option<Report> = None;
    let more = args.bytes.saturating_sub(DEADLINE_BYTES) / SLOWEST_BYTES_PER_SECOND;
    let deadline = DEADLINE + Duration::from_secs(more);
    let mut cut = |progress: &mut Progress, name: &str, cut: Cut| {
        cuts += 1;
        connections_cut += cut.connections;
        progress.clear();
        let Cut { percent, connections } = cut;
        let what = if args.rdma {
            "ends its RDMA connection".to_owned()
        } else {
            format!("resets its {connections} TCP connections")
        };
        tell!(args, "   node {name} at {percent:2} %: {what}");
    };
    let problem = loop {
        while let Ok(made) = our_cuts.try_recv() {
            cut(&mut progress, "A", made);
        }
        match peer.listen(TICK) {
            Some(Word::Cut(made)) => cut(&mut progress, "B", made),
            Some(Word::Report(report)) => theirs = Some(*report),
            Some(Word::Lost(text)) => break Some(text),
            Some(Word::Ready) | None => {}
        }
        let received = watched.received.load(Ordering::Relaxed);
        let percent = (100 * received / share).min(100);
        progress.show(format_args!("   {percent} % of {}", bytes(args.bytes)));
        if side.is_finished() && theirs.is_some() {
            break None;
        }
        if watched.abort.load(Ordering::Relaxed) && side.is_finished() {
            break None;
        }
        if stop.asked() {
            break Some("stopped".to_owned());
        }
        if start.elapsed() > deadline {
            break Some(format!("not done after {} s", deadline.as_secs()));
        }
    };
    progress.clear();
    // The slower side counts: both have everything now.
    let elapsed = start.elapsed();
    if problem.is_some() {
        watched.abort.store(true, Ordering::Relaxed);
        peer.tell("abort");
    }
    let mut a = side.finish();
    a.errors.extend(problem);
    let b = theirs.unwrap_or_default();
    while let Ok(made) = our_cuts.try_recv() {
        cut(&mut progress, "A", made);
    }
    Figures { a, b, echo, elapsed, cuts, connections_cut, remote: None }
}

/// Compares what was sent with what was received, flow by flow.
fn verdict(result: &Figures) -> Vec<String> {
    let Figures { a, b, .. } = result;
    let mut wrong = Vec::new();
    wrong.extend(result.remote.iter().flat_map(|remote| remote.errors.clone()));
    for (name, report) in [("A", a), ("B", b)] {
        wrong.extend(report.errors.iter().map(|error| format!("node {name}: {error}")));
        for (what, number) in [
            ("came twice", report.repeated),
            ("were missing before a later one", report.missing),
            ("were damaged", report.damaged),
        ] {
            if number > 0 {
                wrong.push(format!("node {name}: {} messages {what}", count(number)));
            }
        }
    }
    for (from, to, sent, received) in
        [("A", "B", &a.sent, &b.received), ("B", "A", &b.sent, &a.received)]
    {
        let flows = usize::from(SOCKETS) * usize::from(SOCKETS);
        let differ = (0..flows).filter(|flow| sent.get(*flow) != received.get(*flow)).count();
        if differ > 0 || sent.len() != flows {
            wrong.push(format!(
                "from {from} to {to}: {} messages sent, {} received, {differ} of {flows} flows \
                 differ",
                count(sent.iter().sum()),
                count(received.iter().sum())
            ));
        }
    }
    wrong
}

fn conclude(args: &Args, result: &Figures) -> Verdict {
    let Figures { a, b, elapsed, .. } = result;
    let wrong = verdict(result);
    let messages: u64 = a.received.iter().chain(&b.received).sum();
    let moved = a.received_bytes + b.received_bytes;
    let seconds = elapsed.as_secs_f64().max(1e-6);
    let mut delivery = a.delivery.clone();
    delivery.merge(&b.delivery);
    let again = a.retransmits + b.retransmits;
    let dropped = a.duplicates_dropped + b.duplicates_dropped;
    let percentiles = |times: &Histogram, scale: u64| {
        serde_json::json!({
            "p50": times.percentile(50.0) / scale,
            "p99": times.percentile(99.0) / scale,
            "p99_9": times.percentile(99.9) / scale,
            "max": times.max() / scale,
        })
    };
    let mut object = serde_json::json!({
        "messages": messages,
        "bytes": moved,
        "seconds": seconds,
        "round_trip_usec": percentiles(&result.echo, 1000),
        "delivery_usec": percentiles(&delivery, 1),
        "cuts": result.cuts,
        "connections_cut": result.connections_cut,
        "messages_sent_again": again,
        "repeats_dropped": dropped,
    });
    if let Some(remote) = &result.remote {
        object["remote"] = serde_json::json!({
            "operations": remote.operations,
            "bytes": remote.operations * remote::LEN as u64,
            "seconds": remote.elapsed.as_secs_f64(),
            "write_usec": percentiles(&remote.writes, 1000),
            "read_usec": percentiles(&remote.reads, 1000),
        });
    }
    tell!(args, "{}. Comparing what was sent with what arrived, {} flows", step(args, 3), 2 * 256);
    tell!(args, "");
    tell!(
        args,
        "   moved      {} in {seconds:.2} s: {}/s, {} messages/s",
        bytes(moved),
        bytes((moved as f64 / seconds) as u64),
        count((messages as f64 / seconds) as u64)
    );
    tell!(args, "   messages   {}, 64 bytes to 1 MiB, both ways", count(messages));
    tell!(
        args,
        "   delivery   half within {:.1} ms, 99 of 100 within {:.1} ms,\n              the slowest {:.1} ms \
         (queues full, cuts included)",
        delivery.percentile(50.0) as f64 / 1000.0,
        delivery.percentile(99.0) as f64 / 1000.0,
        delivery.max() as f64 / 1000.0
    );
    tell!(
        args,
        "   cuts       {} times, {} {} connections;\n              {} messages were sent again, {} \
         repeats dropped",
        result.cuts,
        result.connections_cut,
        kind(args),
        count(again),
        count(dropped)
    );
    tell!(args, "");
    if wrong.is_empty() {
        tell!(
            args,
            "PASS  {} messages arrived exactly once, in order, with the right checksum",
            count(messages)
        );
    } else {
        failed(args, &wrong);
    }
    Verdict { object, wrong }
}

fn failed(args: &Args, wrong: &[String]) {
    for line in wrong {
        tell!(args, "   {line}");
    }
    tell!(args, "FAIL  please report this with the output of `bowline --version` and the above");
}

/// Passes on the log of a process, so that no line of it goes into this one's progress.
fn pass_on_log(child: &mut Child) {
    let Some(log) = child.stderr.take() else { return };
    thread::spawn(move || {
        for line in BufReader::new(log).lines().map_while(Result::ok) {
            error_line(format_args!("{line}"));
        }
    });
}

/// Waits for the end of a process whose input has ended.
fn wait_for_exit(child: &mut Child) {
    for _ in 0..300 {
        if !matches!(child.try_wait(), Ok(None)) {
            return;
        }
        thread::sleep(Duration::from_millis(10));
    }
    // It hangs; the run has proven everything already.
    let _ = child.kill();
    let _ = child.wait();
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report() -> Report {
        Report { sent: vec![3; 256], received: vec![3; 256], ..Report::default() }
    }

    fn result(a: Report, b: Report) -> Figures {
        let (echo, elapsed) = (Histogram::default(), Duration::from_secs(1));
        Figures { a, b, echo, elapsed, cuts: 0, connections_cut: 0, remote: None }
    }

    #[test]
    fn equal_counts_pass_and_every_difference_fails() {
        assert!(verdict(&result(report(), report())).is_empty());
        let wrong: [fn(&mut Report); 6] = [
            |report| report.sent[7] = 4,
            |report| report.received[255] = 2,
            |report| report.repeated = 1,
            |report| report.missing = 1,
            |report| report.damaged = 1,
            |report| report.errors.push("gone".to_owned()),
        ];
        for change in wrong {
            let mut changed = report();
            change(&mut changed);
            assert_eq!(verdict(&result(report(), changed.clone())).len(), 1);
            assert_eq!(verdict(&result(changed, report())).len(), 1);
        }
        assert!(!verdict(&result(report(), Report::default())).is_empty());
    }
}
