//! `bowline perf`: bandwidth and latency of one verb.
//!
//! The client says in the private data of its connection request what it will do, the server
//! answers with the address of its buffer; all else is the verbs that are measured. Reads, atomics and
//! the bandwidth of writes leave the server's program idle, as they should.

use std::time::Instant;

use bowline_verbs::{
    Access, CmId, ConnParam, ConnRequest, Device, Remote, SendFlags, SendOp, SendWr, Sge,
};

use super::Ended;
use super::arrivals::Arrivals;
use super::link::{Link, Memory, Wish};
use super::local::{Local, listen};
use super::wire::{Mode, Op, Order, decode_offer, encode_offer};
use crate::cli::args::{number, number32};
use crate::cli::histogram::Histogram;
use crate::cli::out::{bytes, count};
use crate::cli::stop::Stop;
use crate::cli::{Failure, Outcome};

/// Round trips before those that count, at most a tenth as many as count.
const WARM_UP: u64 = 1000;
/// Delay that is asked for when no receive is posted: 10 us [RSP-13].
const MIN_RNR_TIMER: u8 = 1;
/// Reads and atomics under way at once.
const READS: u8 = 16;

/// Measure bandwidth or latency of send, write, read or atomic between two bowlines.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Start the server first: `bowline perf --server`. Exit status: 0 measured, \
    1 not, 2 usage."
)]
pub(crate) struct Args {
    /// Serve one client
    #[arg(short, long, conflicts_with = "client", required_unless_present = "client")]
    server: bool,
    /// Connect to this server and measure
    #[arg(short, long, value_name = "ADDRESS")]
    client: Option<String>,
    #[command(flatten)]
    local: Local,
    /// What to measure
    #[arg(short, long, value_enum, default_value = "write")]
    op: Op,
    /// bw: bandwidth, many at a time; lat: latency, one at a time
    #[arg(long, value_enum, default_value = "bw")]
    mode: Mode,
    /// Bytes of a message [default: 64k; for latency 64; an atomic has 8]
    #[arg(long, value_name = "BYTES", value_parser = number32)]
    size: Option<u32>,
    /// Messages
    #[arg(short = 'n', long, value_name = "N", default_value = "1000", value_parser = number)]
    iters: u64,
    /// Most messages under way
    #[arg(long, value_name = "N", default_value = "64", value_parser = number32)]
    depth: u32,
    /// Check the data: a server what was sent or written, a client what was read
    #[arg(short = 'V', long)]
    verify: bool,
    /// Serve one client after another
    #[arg(short = 'P', long, requires = "server")]
    persistent: bool,
    /// Print the result as a JSON object
    #[arg(long)]
    json: bool,
}

/// Runs the command.
pub(crate) fn run(args: &Args) -> Outcome {
    let stop = Stop::install()?;
    match &args.client {
        Some(server) => measure(args, server, &stop),
        None => serve_all(args, &stop),
    }
}

fn serve_all(args: &Args, stop: &Stop) -> Outcome {
    let (device, places) = args.local.serving()?;
    let mut arrivals = Arrivals::new(&*device, stop);
    listen(&*device, &places, args.json)?;
    loop {
        let (id, request) = match arrivals.request() {
            Err(Ended::Stopped) => return Ok(()),
            got => got?,
        };
        let peer = request.remote;
        let mut served = Served::default();
        let text = match serve(args, &*device, stop, &mut arrivals, (id, &request), &mut served) {
            Ok(()) if args.persistent => continue,
            Ok(()) | Err(Ended::Stopped) => return Ok(()),
            Err(Ended::Left) => format!("the client left after {} of {}", served.done, served.of),
            Err(Ended::Failed(text)) => text,
        };
        if !args.persistent {
            return Err(Failure::Failed(format!("{peer}: {text}")));
        }
        note!("bowline perf: {peer}: {text}");
    }
}

/// How far a server has come with an order, warm-up included.
#[derive(Debug, Default)]
struct Served {
    done: u64,
    of: u64,
}

/// Does what one client orders until it leaves.
fn serve(
    args: &Args,
    device: &dyn Device,
    stop: &Stop,
    arrivals: &mut Arrivals<'_>,
    (id, request): (CmId, &ConnRequest),
    served: &mut Served,
) -> Result<(), Ended> {
    let order = Order::decode(&request.private_data).map_err(Ended::Failed);
    let order = arrivals.or_refuse(id, order)?;
    served.of = order.iterations;
    let (mut link, memory) = arrivals.or_refuse(id, prepare(args, device, stop, &order))?;
    if order.op == Op::Read {
        memory.buffer.write(0, &pattern(order.size));
    }
    link.bind(id);
    let taken = order.recv(&link, &memory, 0, order.receives())?;
    let private_data = encode_offer(memory.remote());
    device.accept(id, &param(&link, private_data))?;
    arrivals.established(id, &request.remote.to_string())?;
    note!(
        "bowline perf: {} {} of {} from {}",
        count(order.iterations),
        order.op.name(),
        bytes(u64::from(order.size)),
        request.remote
    );
    if !order.takes_receives() {
        while !arrivals.left(id, args.local.timeout)? {
            if stop.asked() {
                return Err(Ended::Stopped);
            }
            // Nothing tells that a client was killed, but that it does not acknowledge.
            match link.probe(order.memory) {
                Err(Ended::Left) => break,
                answered => answered?,
            }
        }
        return match order.op {
            Op::Write => check(args, &order, &memory),
            _ => Ok(()),
        };
    }
    let part = memory.part(0, order.size as usize);
    let mut posted = taken;
    while served.done < order.iterations {
        link.received()?;
        if posted < order.iterations {
            posted += order.recv(&link, &memory, posted, 1)?;
        }
        if order.mode == Mode::Lat {
            link.send(0, order.answer(), part)?;
        }
        served.done += 1;
    }
    if !arrivals.left(id, args.local.timeout)? {
        device.disconnect(id)?;
    }
    check(args, &order, &memory)
}

fn measure(args: &Args, server: &str, stop: &Stop) -> Outcome {
    let size = match (args.size, args.op, args.mode) {
        (Some(size), _, _) => size,
        (None, Op::Atomic, _) => 8,
        (None, _, Mode::Bw) => 65_536,
        (None, _, Mode::Lat) => 64,
    };
    let warm_up = match args.mode {
        Mode::Bw => 0,
        Mode::Lat => WARM_UP.min(args.iters / 10),
    };
    let mut order = Order {
        op: args.op,
        mode: args.mode,
        size,
        iterations: args.iters.saturating_add(warm_up),
        depth: if args.mode == Mode::Lat { 1 } else { args.depth },
        memory: Remote::default(),
    };
    order.check().map_err(Failure::Usage)?;
    let (device, local, remote) = args.local.towards(server)?;
    let mut arrivals = Arrivals::new(&*device, stop);
    let (mut link, memory) = prepare(args, &*device, stop, &order)?;
    if matches!(order.op, Op::Send | Op::Write) {
        memory.buffer.write(0, &pattern(order.size));
    }
    order.memory = memory.remote();
    let mut receives = 0;
    if order.mode == Mode::Lat && order.takes_receives() {
        receives = order.recv(&link, &memory, 0, order.receives())?;
    }
    let id = device.connect(Some(local), remote, &param(&link, order.encode()))?;
    link.bind(id);
    let reply = arrivals.established(id, &remote.to_string())?;
    let Some(target) = decode_offer(&reply) else {
        return Err(Failure::failed(format!("{remote} is not a server of bowline perf")));
    };
    let part = memory.part(0, size as usize);
    let measured = match order.mode {
        Mode::Bw => bandwidth(&mut link, &order, target, part).map(|time| {
            report_bandwidth(args, &order, time);
        }),
        Mode::Lat => latency(&mut link, &order, target, &memory, receives, warm_up)
            .map(|times| report_latency(args, &order, &times)),
    };
    // Over reliable connections atomics are done exactly once.
    let checked = match (measured, order.op) {
        (Ok(()), Op::Atomic) => check_sum(&mut link, target, &memory, order.iterations),
        (Ok(()), Op::Read) => check(args, &order, &memory),
        (other, _) => other,
    };
    if device.disconnect(id).is_ok() {
        arrivals.disconnected(id);
    }
    Ok(checked?)
}

/// Keeps as many requests under way as the depth allows; returns seconds.
fn bandwidth(link: &mut Link<'_>, order: &Order, target: Remote, part: Sge) -> Result<f64, Ended> {
    let wr = SendWr {
        id: 0,
        op: order.request(target),
        sges: std::slice::from_ref(&part),
        inline: &[],
        flags: SendFlags::SIGNALED,
    };
    let wrs = vec![wr; order.depth as usize];
    let (mut posted, mut done) = (0, 0);
    let began = Instant::now();
    while done < order.iterations {
        let room = (u64::from(order.depth) - (posted - done)).min(order.iterations - posted);
        if room > 0 {
            link.post(wrs.get(..room as usize).unwrap_or(&wrs))?;
            posted += room;
        }
        link.completion()?;
        done += 1 + link.more();
    }
    Ok(began.elapsed().as_secs_f64())
}

/// Does one request after the other; returns how long each took, in nanoseconds.
fn latency(
    link: &mut Link<'_>,
    order: &Order,
    target: Remote,
    memory: &Memory,
    mut receives: u64,
    warm_up: u64,
) -> Result<Histogram, Ended> {
    let part = memory.part(0, order.size as usize);
    let mut times = Histogram::default();
    for number in 0..order.iterations {
        let began = Instant::now();
        link.send(1, order.request(target), part)?;
        if order.takes_receives() {
            link.received()?;
            if receives < order.iterations {
                receives += order.recv(link, memory, receives, 1)?;
            }
        } else {
            link.completion()?;
        }
        if number >= warm_up {
            times.record(began.elapsed().as_nanos() as u64);
        }
    }
    Ok(times)
}

/// The data that are sent, written or read: no two packets of a message are alike.
fn pattern(size: u32) -> Vec<u8> {
    (0..size).map(|n| (n.wrapping_mul(31) ^ (n >> 8)) as u8).collect()
}

/// Compares what has come with the pattern, if that was asked for.
fn check(args: &Args, order: &Order, memory: &Memory) -> Result<(), Ended> {
    if !args.verify {
        return Ok(());
    }
    let mut got = vec![0; order.size as usize];
    memory.buffer.read(0, &mut got);
    match got.iter().zip(pattern(order.size)).position(|(got, wanted)| *got != wanted) {
        None => Ok(()),
        Some(at) => Err(Ended::Failed(format!("byte {at} of {} differs", order.size))),
    }
}

/// Reads the server's sum of all atomics.
fn check_sum(
    link: &mut Link<'_>,
    target: Remote,
    memory: &Memory,
    wanted: u64,
) -> Result<(), Ended> {
    link.send(2, SendOp::Read(target), memory.part(0, 8))?;
    link.sent(2)?;
    let mut sum = [0; 8];
    memory.buffer.read(0, &mut sum);
    match u64::from_ne_bytes(sum) {
        sum if sum == wanted => Ok(()),
        sum => Err(Ended::Failed(format!("{wanted} additions of 1 make {sum} at the server"))),
    }
}

impl Order {
    /// Tells whether the server has to post receives.
    fn takes_receives(&self) -> bool {
        self.op == Op::Send || (self.op == Op::Write && self.mode == Mode::Lat)
    }

    /// Receives posted at first: twice what can be under way.
    fn receives(&self) -> u64 {
        if self.takes_receives() { (2 * u64::from(self.depth)).min(self.iterations) } else { 0 }
    }

    /// Posts receives; returns how many.
    fn recv(&self, link: &Link<'_>, memory: &Memory, id: u64, n: u64) -> Result<u64, Ended> {
        let part = (self.op == Op::Send).then(|| memory.part(0, self.size as usize));
        for k in 0..n {
            link.receive(id + k, part)?;
        }
        Ok(n)
    }

    /// What the client posts.
    fn request(&self, target: Remote) -> SendOp {
        match (self.op, self.mode) {
            (Op::Send, _) => SendOp::Send,
            (Op::Write, Mode::Bw) => SendOp::Write(target),
            (Op::Write, Mode::Lat) => SendOp::WriteImm(target, 0),
            (Op::Read, _) => SendOp::Read(target),
            (Op::Atomic, _) => SendOp::FetchAdd { remote: target, add: 1 },
        }
    }

    /// What the server posts for each.
    fn answer(&self) -> SendOp {
        match self.op {
            Op::Write => SendOp::WriteImm(self.memory, 0),
            _ => SendOp::Send,
        }
    }
}

fn prepare<'a>(
    args: &Args,
    device: &'a dyn Device,
    stop: &'a Stop,
    order: &Order,
) -> Result<(Link<'a>, Memory), Ended> {
    let access =
        Access::LOCAL_WRITE | Access::REMOTE_READ | Access::REMOTE_WRITE | Access::REMOTE_ATOMIC;
    let wish = Wish {
        access,
        sends: order.depth as usize + 16,
        receives: 2 * order.depth as usize + 16,
        poll: args.local.poll,
        timeout: args.local.timeout,
    };
    let mut link = Link::new(device, stop, wish)?;
    let memory = link.memory(order.size as usize, access)?;
    Ok((link, memory))
}

fn param(link: &Link<'_>, private_data: Vec<u8>) -> ConnParam {
    ConnParam {
        qpn: link.qpn(),
        private_data,
        responder_resources: READS,
        initiator_depth: READS,
        min_rnr_timer: MIN_RNR_TIMER,
        ..ConnParam::default()
    }
}

fn report_bandwidth(args: &Args, order: &Order, seconds: f64) {
    let rate = order.iterations as f64 / seconds;
    let gigabytes = rate * f64::from(order.size) / 1e9;
    if args.json {
        say!(
            "{}",
            serde_json::json!({
                "op": order.op.name(),
                "mode": "bw",
                "size": order.size,
                "iterations": order.iterations,
                "depth": order.depth,
                "seconds": seconds,
                "gigabytes_per_second": gigabytes,
                "messages_per_second": rate,
            })
        );
    } else {
        say!(
            "{}: {} of {}, depth {}: {gigabytes:.3} GB/s, {} messages/s",
            order.op.name(),
            count(order.iterations),
            bytes(u64::from(order.size)),
            order.depth,
            count(rate as u64)
        );
    }
}

fn report_latency(args: &Args, order: &Order, times: &Histogram) {
    let usec = |nanos: u64| nanos as f64 / 1000.0;
    let at = |percent| usec(times.percentile(percent));
    let (min, max) = (usec(times.min()), usec(times.max()));
    if args.json {
        say!(
            "{}",
            serde_json::json!({
                "op": order.op.name(),
                "mode": "lat",
                "size": order.size,
                "iterations": times.count(),
                "round_trip_usec": {
                    "min": min,
                    "median": at(50.0),
                    "p90": at(90.0),
                    "p99": at(99.0),
                    "p999": at(99.9),
                    "max": max,
                },
            })
        );
    } else {
        say!(
            "{}: {} of {}, round trip min/median/p90/p99/p99.9/max = \
             {min:.1}/{:.1}/{:.1}/{:.1}/{:.1}/{max:.1} us",
            order.op.name(),
            count(times.count()),
            bytes(u64::from(order.size)),
            at(50.0),
            at(90.0),
            at(99.0),
            at(99.9)
        );
    }
}
