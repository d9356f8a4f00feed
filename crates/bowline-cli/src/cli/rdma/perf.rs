//! `bowline perf`: bandwidth and latency of one verb.
//!
//! The client sends its order in the private data of its connection request, and the server answers
//! with the address of its buffer; all other traffic is the measured verb. Reads, atomics and
//! writes (for bandwidth) need nothing of the server's program.

mod flow;
mod report;

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use bowline_base::entropy::random_u64;
use bowline_node::{
    Failure, Outcome,
    signals::Stop,
    values::{interval, number, number32},
};
use bowline_verbs::{Access, CmId, ConnParam, ConnRequest, Device, Qpn, Remote, SendOp, Sge};

use super::Ended;
use super::arrivals::Arrivals;
use super::link::{Link, Memory, PROBE_PAUSE, QueuePairOptions};
use super::serving::{ServeOptions, Side, Then, serve_each};
use super::wire::{Length, Mode, Op, Order, Pairs, decode_offer, encode_offer};
use crate::cli::common::histogram::Histogram;
use flow::{Flow, Moved};
use report::Found;

/// Warm-up: round trips that are not measured, at most a tenth of those that are.
const WARM_UP: u32 = 1000;
/// RNR NAK delay, when no receive is posted: 10 us [RSP-13].
const MIN_RNR_TIMER: u8 = 1;
/// Largest number of outstanding reads and atomics.
const READS: u8 = 16;
/// How long the server may take to end its direction beyond what the client's has taken.
const RESULT_WAIT: Duration = Duration::from_secs(30);
/// Sizes of --all: from two bytes to 8 MiB, as those of perftest.
const ALL_SIZES: std::ops::RangeInclusive<u32> = 1..=23;

/// Measure bandwidth or latency of send, write, read or atomic against another `bowline perf`.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Start the server first, on the other machine: `bowline perf --server`. It runs \
    what the client asks for; if the server has --op, --mode, --size, --count, --duration or \
    --depth too, it refuses a client that asks for something else. Then, for example, \
    `bowline perf --client 10.0.0.1 --op read --size 1m --duration 5`. With --all, --both and \
    --qps the server has to be as new as the client. Exit status: 0 measured, 1 failed, 2 usage."
)]
pub(crate) struct Args {
    #[command(flatten)]
    side: Side,
    /// What to measure [default: write]
    #[arg(short, long, value_enum)]
    op: Option<Op>,
    /// bw: bandwidth, many at a time; lat: latency, one at a time [default: bw]
    #[arg(long, value_enum)]
    mode: Option<Mode>,
    /// Bytes of a message, up to 64m [default: 64k; for latency 64; an atomic has 8]
    #[arg(long, value_name = "BYTES", value_parser = number32)]
    size: Option<u32>,
    /// Measure all sizes that are powers of two, from 2 bytes to 8 MiB, one after the other
    #[arg(short, long, conflicts_with_all = ["size", "server"])]
    all: bool,
    /// Measure both directions at once: the server sends as much to the client, or for as long, and
    /// the result is the sum
    #[arg(short, long, alias = "bidirectional", conflicts_with = "verify")]
    both: bool,
    /// Queue pairs, up to 64, each of which has --count messages, and --depth of them in flight
    /// [default: 1]
    #[arg(short, long, alias = "qp", value_name = "N",
          value_parser = clap::value_parser!(u16).range(1..=i64::from(Order::PAIRS_MAX)))]
    qps: Option<u16>,
    /// Messages [default: 1000]
    #[arg(short = 'n', long, alias = "iters", value_name = "N", value_parser = number)]
    count: Option<u64>,
    /// Measure for this long instead of a count: seconds, or a number with ms
    #[arg(short = 'D', long, value_name = "TIME", conflicts_with = "count", value_parser = interval)]
    duration: Option<Duration>,
    /// Messages in flight, up to 4096; for latency always 1 [default: 64]
    #[arg(long, value_name = "N", value_parser = number32)]
    depth: Option<u32>,
    /// Check the data: a server those sent or written, a client those read
    #[arg(short = 'V', long)]
    verify: bool,
    #[command(flatten)]
    serve_options: ServeOptions,
}

/// Runs the command.
pub(crate) fn run(args: &Args) -> Outcome {
    args.side.check()?;
    let stop = Stop::install_with(args.serve_options.duty())?;
    if let Some(server) = &args.side.client {
        return measure(args, server, &stop);
    }
    let ServeOptions { persistent, json } = args.serve_options;
    let local = &args.side.local;
    serve_each("perf", local, (persistent, json), &stop, |device, arrivals, id, request| {
        let mut served = 0;
        match serve(args, device, &stop, arrivals, (id, request), &mut served) {
            Err(Ended::Left) => {
                let text = match Order::decode(&request.private_data).map(|order| order.length) {
                    Ok(Length::Count(count)) => {
                        format!("the client left after {served} of {count}")
                    }
                    _ => format!("the client left after {served}"),
                };
                Err(Ended::Failed(text))
            }
            ended => ended,
        }
    })
}

/// What the command line asks for. On a server all of it is optional: the client's order decides.
fn ordered(args: &Args) -> Order {
    let (op, mode) = (args.op.unwrap_or(Op::Write), args.mode.unwrap_or(Mode::Bw));
    let size = args.size.unwrap_or(match (op, mode) {
        (Op::Atomic, _) => 8,
        (_, Mode::Bw) => 65_536,
        (_, Mode::Lat) => 64,
    });
    let length = match args.duration {
        Some(time) => Length::Time(time),
        None => Length::Count(args.count.unwrap_or(1000)),
    };
    let depth = if mode == Mode::Lat { 1 } else { args.depth.unwrap_or(64) };
    let client = random_u64().max(1);
    let pairs = match args.qps {
        Some(count) if count > 1 => Pairs { count, index: 0, client },
        _ => Pairs::ONE,
    };
    let (both, more) = (args.both, false);
    let (memory, warm_up) = (Remote::default(), 0);
    let mut order = Order { op, mode, size, length, depth, memory, warm_up, pairs, both, more };
    if mode == Mode::Lat {
        order.warm_up = match &mut order.length {
            Length::Count(count) => {
                let warm_up =
                    u32::try_from(*count / 10).map_or(WARM_UP, |tenth| WARM_UP.min(tenth));
                *count = count.saturating_add(warm_up.into());
                warm_up
            }
            Length::Time(_) => WARM_UP,
        };
    }
    order
}

/// Checks that a client's order agrees with the options of the server, where those are given.
fn agree(args: &Args, order: &Order) -> Result<(), Ended> {
    let own = ordered(args);
    let pairs = [
        (args.op.is_some() && own.op != order.op, own.op.text(), order.op.text()),
        (args.mode.is_some() && own.mode != order.mode, own.mode.text(), order.mode.text()),
        (
            args.size.is_some() && own.size != order.size,
            format!("--size {}", own.size),
            format!("--size {}", order.size),
        ),
        (
            (args.count.is_some() || args.duration.is_some()) && own.counted() != order.counted(),
            own.counted().text(),
            order.counted().text(),
        ),
        (
            args.depth.is_some() && order.mode == Mode::Bw && args.depth != Some(order.depth),
            format!("--depth {}", args.depth.unwrap_or_default()),
            format!("--depth {}", order.depth),
        ),
        (
            args.qps.is_some() && own.pairs.count != order.pairs.count,
            format!("--qps {}", own.pairs.count),
            format!("--qps {}", order.pairs.count),
        ),
        (own.both && !order.both, "--both".to_owned(), "one direction".to_owned()),
    ];
    let differ = pairs.into_iter().filter(|(differs, ..)| *differs);
    let (mine, theirs): (Vec<_>, Vec<_>) = differ.map(|(_, own, other)| (own, other)).unzip();
    match mine.is_empty() {
        true => Ok(()),
        false => Err(Ended::Failed(format!(
            "use the same options: the server has {}, the client {}",
            mine.join(" "),
            theirs.join(" ")
        ))),
    }
}

/// Serves one client until it disconnects; counts its messages in `served`.
fn serve(
    args: &Args,
    device: &dyn Device,
    stop: &Stop,
    arrivals: &Arrivals<'_>,
    (id, request): (CmId, &ConnRequest),
    served: &mut u64,
) -> Result<Then, Ended> {
    let order = Order::decode(&request.private_data).map_err(Ended::Failed);
    let order = order.and_then(|order| match order.pairs.index {
        0 => Ok(order),
        _ => Err(Ended::Failed("a further queue pair of a client that is not served".to_owned())),
    });
    let order = arrivals.or_refuse(id, order)?;
    arrivals.or_refuse(id, agree(args, &order))?;
    let (mut link, memory) = arrivals.or_refuse(id, prepare(args, device, stop, &order))?;
    if order.op == Op::Read || order.both && order.op != Op::Atomic {
        memory.buffer.write(0, &pattern(order.size));
    }
    link.bind(id);
    let taken = order.recv(&link, &memory, 0, order.receives())?;
    let private_data = encode_offer(memory.remote());
    device.accept(id, &param(private_data.clone(), link.qpn()))?;
    arrivals.accepted(id, request)?;
    for (index, qpn) in link.qpns().into_iter().enumerate().skip(1) {
        let is_it = |request: &ConnRequest| {
            Order::decode(&request.private_data).is_ok_and(|further| {
                let Pairs { client, index: of, .. } = further.pairs;
                client == order.pairs.client && usize::from(of) == index
            })
        };
        let (id, request) = arrivals.further(is_it, args.side.local.timeout)?;
        link.bind_further(qpn, id);
        device.accept(id, &param(private_data.clone(), qpn))?;
        arrivals.accepted(id, &request)?;
    }
    note_of_peer!("bowline perf: {order} from {}", request.remote);
    let then = if order.more { Then::Same } else { Then::Next };
    if order.both || order.pairs.count > 1 && order.takes_receives() {
        link.watch(order.memory, arrivals);
        let mut flow = Flow::new(&link, &order, order.memory, order.part(&memory));
        if order.both {
            let moved = flow.run(&mut link)?;
            moved.publish(&memory.buffer, order.size as usize);
        }
        return match flow.receive(&mut link, served) {
            // Only the client knows when the time is over. It disconnects then.
            Err(Ended::Left) if matches!(order.length, Length::Time(_)) => Ok(then),
            Err(ended) => Err(ended),
            Ok(()) => {
                while !arrivals.left(id, PROBE_PAUSE)? {
                    match link.probe(order.memory) {
                        Err(Ended::Left) => break,
                        answered => answered?,
                    }
                }
                check(args, &order, &memory).map(|()| then)
            }
        };
    }
    if !order.takes_receives() {
        while !arrivals.left(id, PROBE_PAUSE)? {
            if stop.asked() {
                return Err(Ended::Stopped);
            }
            // A killed client is noticed only because it does not acknowledge: the link probes it.
            match link.probe(order.memory) {
                Err(Ended::Left) => break,
                answered => answered?,
            }
        }
        return match order.op {
            Op::Write => check(args, &order, &memory).map(|()| then),
            _ => Ok(then),
        };
    }
    link.watch(order.memory, arrivals);
    match answer(&mut link, &order, &memory, taken, served) {
        // Only the client knows when the time is over. It disconnects then.
        Err(Ended::Left) if matches!(order.length, Length::Time(_)) => {}
        ended => ended?,
    }
    if !arrivals.left(id, args.side.local.timeout)? {
        device.disconnect(id)?;
    }
    check(args, &order, &memory).map(|()| then)
}

/// Receives the client's messages, and answers each where round trips are measured.
fn answer(
    link: &mut Link<'_>,
    order: &Order,
    memory: &Memory,
    mut posted: u64,
    served: &mut u64,
) -> Result<(), Ended> {
    let part = memory.part(0, order.size as usize);
    let limit = order.length.limit();
    while *served < limit {
        link.received()?;
        if posted < limit {
            posted += order.recv(link, memory, posted, 1)?;
        }
        if order.mode == Mode::Lat {
            link.send(0, order.answer(), part)?;
        }
        *served += 1;
    }
    Ok(())
}

fn measure(args: &Args, server: &str, stop: &Stop) -> Outcome {
    let order = ordered(args);
    order.check().map_err(Failure::Usage)?;
    if args.all && order.op == Op::Atomic {
        return Err(Failure::usage("--all: atomics have 8 bytes"));
    }
    let (opened, local, remote) = args.side.local.towards(server)?;
    let device = &*opened.device;
    let arrivals = Arrivals::new(device, stop);
    if !args.all {
        return Ok(measure_one(args, device, &arrivals, stop, order, (local, remote))?);
    }
    for power in ALL_SIZES {
        let (size, more) = (1 << power, power < *ALL_SIZES.end());
        let order = Order { size, more, ..order };
        measure_one(args, device, &arrivals, stop, order, (local, remote))?;
    }
    Ok(())
}

/// Measures one order between these addresses, and prints the result.
fn measure_one<'a>(
    args: &Args,
    device: &'a dyn Device,
    arrivals: &Arrivals<'a>,
    stop: &'a Stop,
    mut order: Order,
    (local, remote): (SocketAddr, SocketAddr),
) -> Result<(), Ended> {
    let make = || {
        let (link, memory) = prepare(args, device, stop, &order)?;
        if matches!(order.op, Op::Send | Op::Write) || order.both && order.op == Op::Read {
            memory.buffer.write(0, &pattern(order.size));
        }
        order.memory = memory.remote();
        let mut receives = 0;
        if (order.mode == Mode::Lat || order.both) && order.takes_receives() {
            receives = order.recv(&link, &memory, 0, order.receives())?;
        }
        let param = param(order.encode(), link.qpn());
        Ok((link, (memory, receives), param))
    };
    let limit = args.side.local.timeout;
    let (mut link, (memory, receives), id, reply) =
        arrivals.connect((local, remote), limit, make)?;
    let Some(target) = decode_offer(&reply) else {
        return Err(Ended::Failed(format!("{remote} is not a server of bowline perf")));
    };
    for (index, qpn) in (0..).zip(link.qpns()).skip(1) {
        let order = Order { pairs: Pairs { index, ..order.pairs }, ..order };
        let param = param(order.encode(), qpn);
        arrivals.connect_further(&mut link, (local, remote), &param, limit)?;
    }
    let mtu = device.query_qp(link.qpn()).ok().and_then(|(_, attr)| attr.path_mtu);
    let json = args.serve_options.json;
    let found = Found { json, order: &order, mtu, device };
    let measured = match order.mode {
        Mode::Bw => bandwidth(&mut link, &order, target, &memory).map(|(out, back)| {
            found.bandwidth(out, back);
            out.done
        }),
        Mode::Lat => latency(&mut link, &order, target, &memory, receives).map(|(done, times)| {
            found.latency(&times);
            done
        }),
    };
    // Reliable connections execute each atomic exactly once.
    let checked = measured.and_then(|done| match order.op {
        Op::Atomic => check_sum(&mut link, target, &memory, done),
        Op::Read => check(args, &order, &memory),
        Op::Send | Op::Write => Ok(()),
    });
    if device.disconnect(id).is_ok() {
        arrivals.disconnected(id);
    }
    checked
}

/// Moves what is ordered; returns what this side has moved, and of both directions what the other
/// one has.
fn bandwidth(
    link: &mut Link<'_>,
    order: &Order,
    target: Remote,
    memory: &Memory,
) -> Result<(Moved, Option<Moved>), Ended> {
    let mut flow = Flow::new(link, order, target, order.part(memory));
    let own = flow.run(link)?;
    if !order.both {
        return Ok((own, None));
    }
    let size = order.size as usize;
    let place = Remote { addr: target.addr + u64::from(order.size), rkey: target.rkey };
    let begins = Instant::now();
    loop {
        // It is written when the other side has moved all of its own.
        if let Some(other) = flow.fetch(link, place, memory, size)? {
            return Ok((own, Some(other)));
        }
        let limit = match order.length {
            Length::Time(time) => time + RESULT_WAIT,
            Length::Count(_) => RESULT_WAIT + begins.duration_since(flow.began()),
        };
        if begins.elapsed() >= limit {
            return Err(Ended::Failed("the server does not end its direction".to_owned()));
        }
    }
}

/// Sends one request after the other. Returns their number with the warm-up, and the time of each
/// measured one in nanoseconds.
fn latency(
    link: &mut Link<'_>,
    order: &Order,
    target: Remote,
    memory: &Memory,
    mut receives: u64,
) -> Result<(u64, Histogram), Ended> {
    let part = memory.part(0, order.size as usize);
    let mut times = Histogram::default();
    let limit = order.length.limit();
    let (mut done, start) = (0, Instant::now());
    while done < limit {
        let began = Instant::now();
        if let Length::Time(time) = order.length
            && times.count() > 0
            && began - start >= time
        {
            break;
        }
        link.send(1, order.request(target), part)?;
        if order.takes_receives() {
            link.received()?;
            if receives < limit {
                receives += order.recv(link, memory, receives, 1)?;
            }
        } else {
            link.completion()?;
        }
        if done >= u64::from(order.warm_up) {
            times.record(began.elapsed().as_nanos() as u64);
        }
        done += 1;
    }
    Ok((done, times))
}

/// Test data in which no two packets of a message are equal.
fn pattern(size: u32) -> Vec<u8> {
    (0..size).map(|n| (n.wrapping_mul(31) ^ (n >> 8)) as u8).collect()
}

/// Compares received data with the pattern, if `--check` was given.
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
        sum => Err(Ended::Failed(format!("the sum at the server is {sum} instead of {wanted}"))),
    }
}

impl Order {
    /// How many messages are measured, or how long.
    fn counted(&self) -> Length {
        match self.length {
            Length::Count(count) => Length::Count(count - u64::from(self.warm_up).min(count)),
            time => time,
        }
    }

    /// Tells whether the verb consumes receives of the server.
    fn takes_receives(&self) -> bool {
        self.op == Op::Send || (self.op == Op::Write && self.mode == Mode::Lat)
    }

    /// Receives posted at the start: twice the depth.
    fn receives(&self) -> u64 {
        if self.takes_receives() { (2 * u64::from(self.depth)).min(self.length.limit()) } else { 0 }
    }

    /// Posts receives, to each queue pair; returns how many.
    fn recv(&self, link: &Link<'_>, memory: &Memory, id: u64, n: u64) -> Result<u64, Ended> {
        let part = (self.op == Op::Send).then(|| memory.part(0, self.size as usize));
        for qpn in link.qpns() {
            for k in 0..n {
                link.receive_on(qpn, id + k, part)?;
            }
        }
        Ok(n)
    }

    /// Where messages are sent from and received. What atomics return has a place of its own, since
    /// the other side may add to the first bytes.
    fn part(&self, memory: &Memory) -> Sge {
        match self.op {
            Op::Atomic => memory.part(self.size as usize + Moved::BYTES, self.size as usize),
            _ => memory.part(0, self.size as usize),
        }
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
    let options = QueuePairOptions {
        access,
        sends: order.depth as usize + 16,
        receives: 2 * order.depth as usize + 16,
        queue_pairs: order.pairs.count.into(),
        poll: args.side.local.poll,
        timeout: args.side.local.timeout,
    };
    let mut link = Link::new(device, stop, options)?;
    let returned = if order.op == Op::Atomic { order.size as usize } else { 0 };
    let memory = link.memory(order.size as usize + Moved::BYTES + returned, access)?;
    Ok((link, memory))
}

fn param(private_data: Vec<u8>, qpn: Qpn) -> ConnParam {
    ConnParam {
        qpn,
        private_data,
        responder_resources: READS,
        initiator_depth: READS,
        min_rnr_timer: MIN_RNR_TIMER,
        ..ConnParam::default()
    }
}
