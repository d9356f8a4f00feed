//! `bowline rnbd verify`: load with every byte compared, over a mapped disk or a file.

use std::{
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant},
};

use bowline_block::{
    BlockDevice, Limits, LocalDevice,
    backend::{BackendSpec, open},
};
use bowline_ctl::address_text;
use bowline_node::{
    Failure, Outcome,
    disks::{DeviceConfig, MapConfig, unmap_all},
    log::{Progress, bytes, count},
    signals::Stop,
    values::{number, some_time},
};
use bowline_rnbd_driver::client::{Client, Disk};
use bowline_rtrs_driver::tree::{ClientPath, ClientSession};

use super::{
    load::{BYTES_MIN, Load, Report, Shape},
    map::mapped,
    options::{DeviceArgs, Further, MapArgs, RouteArgs},
};

/// Read and write a disk at random and compare every byte; its contents are overwritten.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Fills the disk, then reads and writes one block (such as 512 bytes) to 256 KiB at random offsets, \
                  with flushes and FUA writes in between, then reads all of it. Exit status: 0 if no request \
                  failed and all data was right, else 1."
)]
pub(super) struct Args {
    /// Name of the disk on the server; with --file, the path of a file or block device
    #[arg(value_name = "DEVICE")]
    device: String,
    /// DEVICE is a file or block device of this machine
    #[arg(long, conflicts_with = "from")]
    file: bool,
    #[command(flatten)]
    route: RouteArgs,
    #[command(flatten)]
    further: Further,
    #[command(flatten)]
    how: MapArgs,
    #[command(flatten)]
    device_options: DeviceArgs,
    /// How long to read and write at random
    #[arg(short = 'T', long, value_name = "TIME", default_value = "10", value_parser = some_time)]
    time: Duration,
    /// Requests in flight
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = clap::value_parser!(u16).range(1..=1024))]
    depth: u16,
    /// Bytes used, from the start of the disk; needs 5 bytes of memory for each block
    #[arg(long, value_name = "BYTES", default_value = "64MiB", value_parser = number)]
    span: u64,
    /// Percentage of reads
    #[arg(long, value_name = "N", default_value_t = 50, value_parser = clap::value_parser!(u8).range(0..=100))]
    reads: u8,
    /// Seed of all random choices
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Runs the command.
pub(super) fn run(args: &Args) -> Outcome {
    let stop = Stop::install()?;
    if args.file {
        let path = PathBuf::from(&args.device);
        let failed = |error| Failure::failed(format!("{}: {error}", path.display()));
        let file =
            std::fs::OpenOptions::new().read(true).write(true).open(&path).map_err(failed)?;
        let spec =
            BackendSpec::File { fd: file.into(), read_only: false, block: 512, direct: true };
        let backend = open(spec).map_err(failed)?;
        return verify(args, LocalDevice::new(&args.device, backend), None, &stop);
    }
    let route = args.route.route(&args.further)?;
    let (how, local) = (MapConfig::from(&args.how), DeviceConfig::from(&args.device_options));
    let waits = |time| !stop.wait(Some(time));
    let (client, disk) = mapped(&args.device, route, &how, &local, waits, |_, _| {})?;
    let device: Arc<dyn BlockDevice> = disk.clone();
    let result = verify(args, device, Some((&client, &disk)), &stop);
    unmap_all(&client, &stop, || client.close());
    result
}

fn verify(
    args: &Args,
    disk: Arc<dyn BlockDevice>,
    mapped: Option<(&Client, &Disk)>,
    stop: &Stop,
) -> Outcome {
    let go_on = || {
        let asked = stop.asked();
        if let Some((_, disk)) = mapped.filter(|_| asked) {
            // The end does not wait for a lost session.
            disk.fail_fast();
        }
        !asked
    };
    let shape = Shape {
        bytes: args.span,
        depth: args.depth.into(),
        reads_percent: args.reads.into(),
        syncs: true,
        seed: args.seed,
    };
    let limits = disk.limits();
    let mut load = Load::new(disk, shape, stop.flag()).map_err(|errno| {
        let why = match limits {
            _ if args.span < BYTES_MIN => format!("--span {} is too small", args.span),
            Limits { bytes: 0, logical, .. } => {
                format!("it is smaller than a block of {logical} bytes")
            }
            Limits { bytes, .. } if bytes < BYTES_MIN => format!("it has {bytes} bytes"),
            _ => {
                return Failure::Errno(
                    errno,
                    format!("{}: cannot run the verified load: {errno}", args.device),
                );
            }
        };
        let text =
            format!("{}: {why}; a verified load needs at least {BYTES_MIN} bytes", args.device);
        Failure::Errno(errno, text)
    })?;
    let mut progress = Progress::new(false);
    let filled = load.fill(|report| {
        progress.show(format_args!("filled {}", bytes(report.bytes)));
        go_on()
    });
    let start = Instant::now();
    let random = load.random(|report| {
        progress.show(format_args!("{} requests", count(report.operations())));
        go_on() && start.elapsed() < args.time
    });
    let last = load.check(|report| {
        progress.show(format_args!("compared {}", bytes(report.bytes)));
        go_on()
    });
    progress.clear();
    if stop.asked() {
        return Err(Failure::failed("stopped before the end, without a result"));
    }
    let sessions = mapped.map(|(client, _)| client.sessions()).unwrap_or_default();
    let paths = sessions.iter().flat_map(|session| ClientSession::paths(&**session)).collect();
    tell(args, &[&filled, &random, &last], paths)
}

fn tell(args: &Args, reports: &[&Report; 3], paths: Vec<ClientPath>) -> Outcome {
    let [filled, random, last] = reports;
    let failed: u64 = reports.iter().map(|report| report.failed).sum();
    let damaged: u64 = reports.iter().map(|report| report.damaged).sum();
    let rate =
        |report: &Report| (report.bytes as f64 / report.elapsed.as_secs_f64().max(1e-6)) as u64;
    let iops = random.operations() as f64 / random.elapsed.as_secs_f64().max(1e-6);
    let failovers: u64 = paths.iter().map(|path| path.stats.failovers).sum();
    let problems: Vec<&String> = reports.iter().flat_map(|report| &report.problems).collect();
    if args.json {
        say!(
            "{}",
            serde_json::json!({
                "pass": failed == 0 && damaged == 0,
                "operations": random.operations(),
                "reads": random.reads,
                "writes": random.writes,
                "durable_writes": random.durable,
                "flushes": random.flushes,
                "bytes": random.bytes,
                "seconds": random.elapsed.as_secs_f64(),
                "iops": iops,
                "latency_usec": {
                    "p50": random.times.percentile(50.0) / 1000,
                    "p99": random.times.percentile(99.0) / 1000,
                    "max": random.times.max() / 1000,
                },
                "longest_pause_ms": random.pause.as_millis() as u64,
                "fill_bytes_per_second": rate(filled),
                "check_bytes_per_second": rate(last),
                "failed": failed,
                "damaged_blocks": damaged,
                "problems": problems,
                "failovers": failovers,
                "paths": paths.iter().map(|path| serde_json::json!({
                    "src_addr": address_text(path.src),
                    "dst_addr": address_text(path.dst),
                    "state": state(path),
                    "failovers": path.stats.failovers,
                    "reconnects": path.stats.reconnects,
                })).collect::<Vec<_>>(),
            })
        );
    } else {
        say!("filled    {} at {}/s", bytes(filled.bytes), bytes(rate(filled)));
        say!(
            "random    {} requests, {}/s, {:.0} IOPS; half within {} us, 99 of 100 within {} us; longest \
             pause {} ms",
            count(random.operations()),
            bytes(rate(random)),
            iops,
            random.times.percentile(50.0) / 1000,
            random.times.percentile(99.0) / 1000,
            random.pause.as_millis()
        );
        say!(
            "          {} of these writes with FUA, {} flushes",
            count(random.durable),
            count(random.flushes)
        );
        say!("compared  {} at {}/s", bytes(last.bytes), bytes(rate(last)));
        for path in &paths {
            say!(
                "path      {} to {}: {}, connected again {} times, took over {} requests",
                path.src,
                path.dst,
                state(path),
                count(path.stats.reconnects),
                count(path.stats.failovers)
            );
        }
        for problem in &problems {
            say!("          {problem}");
        }
        say!("{failed} requests failed, {damaged} blocks damaged");
    }
    if failed == 0 && damaged == 0 { Ok(()) } else { Err(Failure::Reported) }
}

const fn state(path: &ClientPath) -> &'static str {
    if path.connected { "connected" } else { "disconnected" }
}
