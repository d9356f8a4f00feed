//! `bowline rping`: the ping of rdma-core, both roles.
//!
//! ```text
//! client                                server
//!   SEND address, key, length (16 bytes)  ->
//!                                         <- RDMA READ of that buffer
//!                                         <- SEND "go on" (16 bytes)
//!   SEND address, key, length of a second ->
//!                                         <- RDMA WRITE of the same data into that
//!                                         <- SEND "go on"
//! ```
//! The client then compares the two, and begins again; at the end it disconnects. Learned from what
//! the program of rdma-core 44 puts on the wire.

use std::time::{Duration, Instant};

use bowline_node::{
    Outcome,
    signals::Stop,
    values::{interval, number},
};
use bowline_verbs::{Access, CmId, ConnParam, ConnRequest, Device, Remote, SendOp};

use super::Ended;
use super::arrivals::Arrivals;
use super::link::{Link, Memory, QueuePairOptions};
use super::local::ping_size;
use super::serving::{ServeOptions, Side, Then, serve_each};
use super::wire::{ADVERT, Advert, ping_data};
use crate::cli::common::histogram::Histogram;

/// Default size of the server's buffer in bytes.
const SERVER_SIZE: u32 = 65_535;
const CLIENT_SIZE: u32 = 64;
/// Number of posted receives.
const RECEIVES: usize = 4;
/// How long a server that has served its count waits for the client to disconnect.
const LEAVING: Duration = Duration::from_secs(1);

/// Ping by RDMA read and write, as rdma-core's rping does: client or server.
#[derive(Debug, clap::Args)]
#[command(after_help = "Exit status: 0 all pings done and right, 1 failed, 2 usage.")]
pub(crate) struct Args {
    #[command(flatten)]
    side: Side,
    /// Stop after N pings; 0 means never, for a server when the client disconnects
    #[arg(short = 'C', long, value_name = "N", default_value = "0", value_parser = number)]
    count: u64,
    /// Bytes of a ping, 23 to 65535; for a server the largest it accepts [default: 64, server
    /// 65535]
    #[arg(short = 'S', long, value_name = "BYTES", value_parser = ping_size)]
    size: Option<u32>,
    /// Check every byte
    #[arg(short = 'V', long)]
    verify: bool,
    /// Print the data of every ping
    #[arg(short, long)]
    verbose: bool,
    /// Time between pings of a client: seconds, or a number with ms or us
    #[arg(short, long, value_name = "TIME", default_value = "0", value_parser = interval)]
    interval: Duration,
    #[command(flatten)]
    serve_options: ServeOptions,
}

/// Pings done, and how long each took.
#[derive(Debug, Default)]
struct Pings {
    count: u64,
    times: Histogram,
}

/// Runs the command.
pub(crate) fn run(args: &Args) -> Outcome {
    args.side.check()?;
    let stop = Stop::install_with(args.serve_options.duty())?;
    match &args.side.client {
        Some(server) => run_client(args, server, &stop),
        None => run_server(args, &stop),
    }
}

fn run_server(args: &Args, stop: &Stop) -> Outcome {
    let ServeOptions { persistent, json } = args.serve_options;
    let local = &args.side.local;
    serve_each("rping", local, (persistent, json), stop, |device, arrivals, id, request| {
        let mut pings = None;
        let ended = serve(args, device, stop, arrivals, (id, request), &mut pings);
        // No statistics for a peer that never became a client.
        let Some(pings) = pings else { return ended.map(|()| Then::Next) };
        summary(args, "server", &request.remote.to_string(), &pings);
        match ended {
            Ok(()) | Err(Ended::Left) if pings.count >= args.count => Ok(Then::Next),
            Ok(()) | Err(Ended::Left) => {
                let text = format!("left after {} of {} pings", pings.count, args.count);
                Err(Ended::Failed(text))
            }
            Err(ended) => Err(ended),
        }
    })
}

/// Serves one client until it disconnects. `served` is set once it is connected.
fn serve(
    args: &Args,
    device: &dyn Device,
    stop: &Stop,
    arrivals: &Arrivals<'_>,
    (id, request): (CmId, &ConnRequest),
    served: &mut Option<Pings>,
) -> Result<(), Ended> {
    let room = args.size.unwrap_or(SERVER_SIZE) as usize;
    let (mut link, inbox) = arrivals.or_refuse(id, prepare(args, device, stop))?;
    link.bind(id);
    let data = link.memory(room, Access::LOCAL_WRITE)?;
    device.accept(id, &param(&link))?;
    arrivals.accepted(id, request)?;
    let pings = served.insert(Pings::default());
    link.watch(Remote::default(), arrivals);
    while args.count == 0 || pings.count < args.count {
        let source = hear(&mut link, &inbox)?;
        let began = Instant::now();
        let len = source.len as usize;
        if len > room {
            return Err(Ended::Failed(format!("a ping of {len} bytes is larger than {room}")));
        }
        let part = data.part(0, len);
        link.send(1, SendOp::Read(source.memory), part)?;
        link.sent(1)?;
        let mut bytes = vec![0; len];
        data.buffer.read(0, &mut bytes);
        if args.verify && bytes != ping_data(pings.count, len) {
            return Err(Ended::Failed(format!("ping {}: not rping's data", pings.count)));
        }
        show(args, "server ping data", &bytes);
        link.send_inline(2, &[0; ADVERT])?;
        let sink = hear(&mut link, &inbox)?;
        if sink.len < source.len {
            let text = format!("room for {} bytes only of {len}", sink.len);
            return Err(Ended::Failed(text));
        }
        link.send(3, SendOp::Write(sink.memory), part)?;
        link.send_inline(4, &[0; ADVERT])?;
        pings.done(began);
        if pings.count == args.count {
            link.sent(4)?;
        }
    }
    // The client disconnects, not the server.
    if !arrivals.left(id, LEAVING)? {
        device.disconnect(id)?;
    }
    Ok(())
}

fn run_client(args: &Args, server: &str, stop: &Stop) -> Outcome {
    let (opened, local, remote) = args.side.local.towards(server)?;
    let device = &opened.device;
    let arrivals = Arrivals::new(&**device, stop);
    let mut pings = Pings::default();
    let ended = (|| {
        let make = || {
            let (mut link, inbox) = prepare(args, &**device, stop)?;
            let size = args.size.unwrap_or(CLIENT_SIZE) as usize;
            let source = link.memory(size, Access::REMOTE_READ)?;
            let sink = link.memory(size, Access::LOCAL_WRITE | Access::REMOTE_WRITE)?;
            let param = param(&link);
            Ok((link, (inbox, source, sink), param))
        };
        let limit = args.side.local.timeout;
        let (mut link, (inbox, source, sink), id, _) =
            arrivals.connect((local, remote), limit, make)?;
        let ended = ping(args, &mut link, &inbox, (&source, &sink), stop, &mut pings);
        if device.disconnect(id).is_ok() {
            arrivals.disconnected(id);
        }
        ended
    })();
    summary(args, "client", &remote.to_string(), &pings);
    match ended {
        Err(Ended::Stopped) if args.count == 0 && pings.count > 0 => Ok(()),
        ended => Ok(ended?),
    }
}

/// Sends pings as often as asked.
fn ping(
    args: &Args,
    link: &mut Link<'_>,
    inbox: &Memory,
    (source, sink): (&Memory, &Memory),
    stop: &Stop,
    pings: &mut Pings,
) -> Result<(), Ended> {
    let len = source.buffer.len();
    let advert = |memory: &Memory| Advert { memory: memory.remote(), len: len as u32 }.encode();
    while args.count == 0 || pings.count < args.count {
        let data = ping_data(pings.count, len);
        source.buffer.write(0, &data);
        let began = Instant::now();
        link.send_inline(1, &advert(source))?;
        hear(link, inbox)?;
        link.send_inline(2, &advert(sink))?;
        hear(link, inbox)?;
        pings.done(began);
        let mut back = vec![0; len];
        sink.buffer.read(0, &mut back);
        if args.verify && back != data {
            let at = back.iter().zip(&data).position(|(a, b)| a != b).unwrap_or_default();
            return Err(Ended::Failed(format!("ping {}: byte {at} differs", pings.count - 1)));
        }
        show(args, "ping data", &back);
        let last = args.count > 0 && pings.count >= args.count;
        if !last && !args.interval.is_zero() && stop.wait(Some(args.interval)) {
            return Err(Ended::Stopped);
        }
    }
    Ok(())
}

/// Makes the queue pair and posts its receives.
fn prepare<'a>(
    args: &Args,
    device: &'a dyn Device,
    stop: &'a Stop,
) -> Result<(Link<'a>, Memory), Ended> {
    let access = Access::LOCAL_WRITE | Access::REMOTE_READ | Access::REMOTE_WRITE;
    let (poll, timeout) = (args.side.local.poll, args.side.local.timeout);
    let queue_pairs = 1;
    let (sends, receives) = (16, RECEIVES);
    let options = QueuePairOptions { access, sends, receives, queue_pairs, poll, timeout };
    let mut link = Link::new(device, stop, options)?;
    let inbox = link.memory(RECEIVES * ADVERT, Access::LOCAL_WRITE)?;
    for slot in 0..RECEIVES {
        link.receive(slot as u64, Some(inbox.part(slot * ADVERT, ADVERT)))?;
    }
    Ok((link, inbox))
}

fn param(link: &Link<'_>) -> ConnParam {
    let qpn = link.qpn();
    ConnParam { qpn, responder_resources: 1, initiator_depth: 1, ..ConnParam::default() }
}

/// The next message of the peer; its receive is posted again.
fn hear(link: &mut Link<'_>, inbox: &Memory) -> Result<Advert, Ended> {
    let done = link.received()?;
    if done.byte_len as usize != ADVERT {
        let text = format!("a message of {} bytes; rping's have {ADVERT}", done.byte_len);
        return Err(Ended::Failed(text));
    }
    // The id of a receive is the index of its buffer.
    let at = (done.wr_id as usize % RECEIVES) * ADVERT;
    let mut bytes = [0; ADVERT];
    inbox.buffer.read(at, &mut bytes);
    link.receive(done.wr_id, Some(inbox.part(at, ADVERT)))?;
    Ok(Advert::decode(bytes))
}

impl Pings {
    fn done(&mut self, began: Instant) {
        self.count += 1;
        self.times.record(began.elapsed().as_nanos() as u64);
    }
}

/// Prints the data of a ping, up to its zero, as the original does.
fn show(args: &Args, what: &str, data: &[u8]) {
    if args.verbose {
        let text = data.split(|byte| *byte == 0).next().unwrap_or_default();
        say!("{what}: {}", text.escape_ascii().to_string().replace("\\\\", "\\"));
    }
}

fn summary(args: &Args, role: &str, peer: &str, pings: &Pings) {
    let times = &pings.times;
    let usec = |nanos: u64| nanos as f64 / 1000.0;
    let (min, max) = (usec(times.min()), usec(times.max()));
    let (median, p99) = (usec(times.percentile(50.0)), usec(times.percentile(99.0)));
    if args.serve_options.json {
        say_of_peer!(
            "{}",
            serde_json::json!({
                "role": role,
                "peer": peer,
                "pings": pings.count,
                "verified": args.verify,
                "usec": { "min": min, "median": median, "p99": p99, "max": max },
            })
        );
    } else if role == "client" {
        say!("--- {peer} rping statistics ---");
        say!("{} pings{}", pings.count, if args.verify { ", every byte checked" } else { "" });
        if pings.count > 0 {
            say!("time min/median/p99/max = {min:.1}/{median:.1}/{p99:.1}/{max:.1} us");
        }
    } else {
        note_of_peer!("bowline rping: {} pings of {peer}", pings.count);
    }
}
