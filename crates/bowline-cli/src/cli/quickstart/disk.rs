//! The second act: a disk of another process, mapped over two paths that break in turn.
//!
//! The other process is `bowline rnbd export` with an image file. Here a tree of files is copied
//! to one half of the disk ([`Tree`]); the other half is filled, then read and written at random
//! with every byte compared, while first one path goes silent and then the other and the tree is
//! read again and again; at the end all of it is read once more.

use std::{
    fs::{self, File},
    io::{BufRead, BufReader, ErrorKind},
    net::{IpAddr, Ipv4Addr, UdpSocket},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::{Arc, mpsc},
    thread,
    time::{Duration, Instant},
};

use bowline_block::BlockDevice;
use bowline_node::{
    Failure, Outcome,
    log::{Progress, bytes, count},
    signals::Stop,
};
use bowline_rnbd::client::Outage;
use bowline_rnbd_driver::client::{Client, MapOptions};
use bowline_roce_driver::{SoftConfig, SoftDevice};
use bowline_rtrs_driver::{Engine, EngineConfig};
use bowline_verbs::Device;

use super::{
    Args, Verdict, failed, tell,
    tree::{Place, Tree},
};
use crate::cli::disk::load::{Load, Report, Shape};

/// Size of the image in bytes, and the part of it with load; the tree is stored after that.
const IMAGE_BYTES: u64 = 256 << 20;
const USED_BYTES: u64 = 128 << 20;
const TREE_FOLDERS: usize = 24;
/// Time between two reads of the tree under load; paths are silent for longer.
const TREE_GAP: Duration = Duration::from_millis(200);
/// Duration of the load, and when which path is cut and healed.
const LOAD_TIME: Duration = Duration::from_secs(6);
const FIRST_CUT: Duration = Duration::from_secs(2);
const SECOND_CUT: Duration = Duration::from_secs(4);
/// Time without an answer after which a path is dead.
const PATH_DEAD: Duration = Duration::from_millis(500);
/// How long requests wait while no path is connected.
const OUTAGE: Duration = Duration::from_secs(30);
const DEPTH: usize = 32;
const READY_TIMEOUT: Duration = Duration::from_secs(10);
const ROCE_PORT: u16 = 4791;
const SESSION: &str = "quickstart";
const EXPORT: &str = "disk0";

/// Addresses of two paths: local ones, and those of the other process.
struct Paths {
    own: [IpAddr; 2],
    theirs: [IpAddr; 2],
}

/// Runs the act.
pub(super) fn run(args: &Args, stop: &Stop) -> Outcome<Verdict> {
    let folder = Folder::new()?;
    let paths = free_paths()?;
    let server = Server::start(&folder.image()?, &paths)?;
    let devices = device(&paths)?;
    introduce(args, &paths, server.pid());
    let (client, disk) = map(&devices, &paths)?;
    let mut progress = Progress::new(args.progress);
    let place = Place { disk: &*disk, range: USED_BYTES..IMAGE_BYTES };
    let tree = copy_tree(args, &folder, &place, stop, &mut progress)?;
    let device: Arc<dyn BlockDevice> = Arc::clone(&disk) as _;
    let shape = Shape {
        bytes: USED_BYTES,
        depth: DEPTH,
        reads_percent: 50,
        // The act shows path failures, not the speed of the disk below the file.
        syncs: false,
        seed: args.seed,
    };
    let mut load = Load::new(device, shape, stop.flag())
        .map_err(|errno| Failure::failed(format!("cannot run the load on the disk: {errno}")))?;
    let filled = load.fill(|report| {
        progress.show(format_args!("   filled {}", bytes(report.bytes)));
        !stop.asked()
    });
    progress.clear();
    tell!(
        args,
        "2. Filling {} of it, at {}/s",
        bytes(filled.bytes),
        bytes((filled.bytes as f64 / filled.elapsed.as_secs_f64().max(1e-6)) as u64)
    );
    tell!(
        args,
        "3. Reading and writing 512 bytes to 256 KiB at random places of these for {} s,\n   {DEPTH} \
         at a time, and the tree again and again:",
        LOAD_TIME.as_secs()
    );
    let mut seen = Seen { tree, reads: 0, wrong: Vec::new() };
    let random = thread::scope(|scope| {
        scope.spawn(|| seen.read_until(&place, Instant::now() + LOAD_TIME, stop));
        break_paths(args, &mut load, &devices, &paths, stop, &mut progress)
    });
    let failovers: u64 = client
        .session(SESSION)
        .map_or(0, |session| session.paths().iter().map(|path| path.stats.failovers).sum());
    let checked = load.check(|_| !stop.asked());
    if seen.wrong.is_empty() && !stop.asked() {
        seen.read(&place);
    }
    drop(load);
    drop(disk);
    client.close();
    drop(server);
    if stop.asked() {
        return Err(stopped());
    }
    Ok(conclude(args, &[&filled, &random, &checked], failovers, &seen))
}

fn introduce(args: &Args, paths: &Paths, pid: u32) {
    tell!(args, "bowline quickstart: a disk of another process, over two paths");
    tell!(args, "");
    for (index, (own, theirs)) in paths.own.iter().zip(&paths.theirs).enumerate() {
        tell!(args, "   path {}  {own} to {theirs}", index + 1);
    }
    tell!(args, "");
    tell!(
        args,
        "The other process, {pid}, exports a file of {}\n(RNBD over RTRS over RoCEv2). This one maps it\nand \
         compares every byte it reads with what it wrote.",
        bytes(IMAGE_BYTES)
    );
    tell!(args, "");
}

/// Makes a tree of files and copies it to the disk.
fn copy_tree(
    args: &Args,
    folder: &Folder,
    place: &Place<'_>,
    stop: &Stop,
    progress: &mut Progress,
) -> Outcome<Tree> {
    let root = folder.path("tree");
    let tree = Tree::make(&root, args.seed, TREE_FOLDERS).map_err(|error| {
        Failure::failed(format!("cannot make files in {}: {error}; set TMPDIR", root.display()))
    })?;
    let copied = Tree::copy(&root, place, &mut |done| {
        progress.show(format_args!("   copied {}", bytes(done)));
        !stop.asked()
    });
    progress.clear();
    copied.map_err(|error| match stop.asked() {
        true => stopped(),
        false => Failure::failed(format!("the tree is not on the disk: {error}")),
    })?;
    tell!(
        args,
        "1. Copying a tree of {} folders and {} files to it, {}",
        tree.folders(),
        tree.files(),
        bytes(tree.bytes())
    );
    Ok(tree)
}

fn stopped() -> Failure {
    Failure::failed("stopped before the end, without a result")
}

/// A tree on the disk, and the results of reading it.
struct Seen {
    tree: Tree,
    reads: u64,
    wrong: Vec<String>,
}

impl Seen {
    fn read(&mut self, place: &Place<'_>) {
        self.wrong.extend(self.tree.check(place));
        self.reads += 1;
    }

    /// Reads the tree until `end`, or until a difference is found.
    fn read_until(&mut self, place: &Place<'_>, end: Instant, stop: &Stop) {
        while self.wrong.is_empty() && Instant::now() < end && !stop.asked() {
            self.read(place);
            thread::sleep(TREE_GAP);
        }
    }
}

/// Load, with the first path silent in the second third of the time and the second in the last.
fn break_paths(
    args: &Args,
    load: &mut Load,
    device: &SoftDevice,
    paths: &Paths,
    stop: &Stop,
    progress: &mut Progress,
) -> Report {
    let cut = |index: usize, on| device.cut(paths.own[index], Some(paths.theirs[index]), on);
    let start = Instant::now();
    let mut done = 0;
    let report = load.random(|report| {
        let time = start.elapsed();
        if done == 0 && time >= FIRST_CUT {
            cut(0, true);
            done = 1;
            progress.clear();
            tell!(args, "   at {} s: path 1 goes silent", FIRST_CUT.as_secs());
        } else if done == 1 && time >= SECOND_CUT {
            cut(0, false);
            cut(1, true);
            done = 2;
            progress.clear();
            tell!(args, "   at {} s: path 1 is back, path 2 goes silent", SECOND_CUT.as_secs());
        }
        progress.show(format_args!("   {} requests", count(report.operations())));
        !stop.asked() && time < LOAD_TIME
    });
    cut(0, false);
    cut(1, false);
    progress.clear();
    report
}

fn conclude(args: &Args, reports: &[&Report; 3], failovers: u64, seen: &Seen) -> Verdict {
    let [filled, random, checked] = reports;
    let operations: u64 = reports.iter().map(|report| report.operations()).sum();
    let lost: u64 = reports.iter().map(|report| report.failed).sum();
    let damaged: u64 = reports.iter().map(|report| report.damaged).sum();
    let mut wrong: Vec<String> = reports.iter().flat_map(|r| r.problems.clone()).collect();
    wrong.extend(seen.wrong.iter().cloned());
    if lost + damaged > 0 {
        wrong.push(format!("{lost} operations failed, {damaged} blocks are damaged"));
    }
    if checked.bytes != USED_BYTES {
        wrong.push(format!("{} were compared in the end", bytes(checked.bytes)));
    }
    if failovers == 0 {
        wrong.push("no request was ever moved from a silent path to the other".to_owned());
    }
    let iops = random.operations() as f64 / random.elapsed.as_secs_f64().max(1e-6);
    let object = serde_json::json!({ "disk": {
        "operations": operations,
        "seconds": random.elapsed.as_secs_f64(),
        "iops": iops,
        "bytes": random.bytes,
        "fill_bytes_per_second": filled.bytes as f64 / filled.elapsed.as_secs_f64().max(1e-6),
        "latency_usec": {
            "p50": random.times.percentile(50.0) / 1000,
            "p99": random.times.percentile(99.0) / 1000,
            "max": random.times.max() / 1000,
        },
        "longest_pause_ms": random.pause.as_millis() as u64,
        "failovers": failovers,
        "failed": lost,
        "damaged_blocks": damaged,
        "files": seen.tree.files(),
        "tree_bytes": seen.tree.bytes(),
        "tree_reads": seen.reads,
    }});
    tell!(args, "4. Reading all of it again, every byte compared");
    tell!(args, "");
    tell!(
        args,
        "   moved      {} in {:.2} s: {} requests per second,\n              both paths silent in turn",
        bytes(random.bytes),
        random.elapsed.as_secs_f64(),
        count(iops as u64)
    );
    tell!(
        args,
        "   paths      {} requests moved to the other path; the longest pause was {} ms\n              \
         (a path is dead after {} ms)",
        count(failovers),
        random.pause.as_millis(),
        PATH_DEAD.as_millis()
    );
    tell!(
        args,
        "   tree       {} files, {}, read {} times: {}",
        count(seen.tree.files()),
        bytes(seen.tree.bytes()),
        seen.reads,
        if seen.wrong.is_empty() { "every checksum right" } else { "not as it was" }
    );
    tell!(args, "");
    if wrong.is_empty() {
        tell!(
            args,
            "PASS  {lost} of {} operations failed, every byte is as it was written",
            count(operations)
        );
    } else {
        failed(args, &wrong);
    }
    Verdict { object, wrong }
}

fn device(paths: &Paths) -> Outcome<Arc<SoftDevice>> {
    let mut core = SoftConfig::default().core;
    core.give_up = bowline_roce::GiveUp::After(PATH_DEAD);
    let config = SoftConfig { addrs: paths.own.to_vec(), core, ..SoftConfig::default() };
    let device = SoftDevice::open(config).map_err(|error| Failure::Failed(error.to_string()))?;
    Ok(Arc::new(device))
}

fn map(
    device: &Arc<SoftDevice>,
    paths: &Paths,
) -> Outcome<(Arc<Client>, Arc<bowline_rnbd_driver::client::Disk>)> {
    let devices = vec![Arc::clone(device) as Arc<dyn Device>];
    let engine = Engine::new(devices, EngineConfig::default())
        .map_err(|error| Failure::Failed(error.to_string()))?;
    let mut options = MapOptions::new(SESSION).outage(Outage::Queue(OUTAGE));
    for (own, theirs) in paths.own.iter().zip(&paths.theirs) {
        options = options.path(Some(*own), *theirs);
    }
    let client = Client::new(engine, options.clone());
    let disk =
        client.map_with(EXPORT, &options).map_err(|error| Failure::Failed(error.to_string()))?;
    Ok((client, disk))
}

/// Finds loopback addresses whose RoCE port is free.
fn free_paths() -> Outcome<Paths> {
    let block = (std::process::id() % 200) as u8 + 20;
    for high in [block, block.wrapping_add(7) % 200 + 20, 240] {
        let address = |low: u8| IpAddr::V4(Ipv4Addr::new(127, high, 77, low));
        let all = [1, 2, 3, 4].map(address);
        if all.iter().all(|address| UdpSocket::bind((*address, ROCE_PORT)).is_ok()) {
            return Ok(Paths { own: [all[0], all[1]], theirs: [all[2], all[3]] });
        }
    }
    Err(Failure::failed(format!(
        "UDP port {ROCE_PORT} is in use on the loopback addresses (ss -ulnp)"
    )))
}

/// A new folder for the image and the tree; removed at the end.
pub(super) struct Folder(PathBuf);

impl Folder {
    pub(super) fn new() -> Outcome<Self> {
        let mut number = 0;
        loop {
            let name = format!("bowline-quickstart-{}-{number}", std::process::id());
            let path = std::env::temp_dir().join(name);
            match fs::create_dir(&path) {
                Ok(()) => return Ok(Self(path)),
                // Left by a killed process with the same process id.
                Err(error) if error.kind() == ErrorKind::AlreadyExists => number += 1,
                Err(error) => {
                    let text = format!("cannot make {}: {error}; set TMPDIR", path.display());
                    return Err(Failure::failed(text));
                }
            }
        }
    }

    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    fn image(&self) -> Outcome<PathBuf> {
        let path = self.path("disk.img");
        let made = File::create(&path).and_then(|file| file.set_len(IMAGE_BYTES));
        made.map_err(|error| Failure::failed(format!("cannot make {}: {error}", path.display())))?;
        Ok(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        // If this fails, the system clears its temporary files.
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// The other process; dropping it ends it.
struct Server {
    child: Child,
}

impl Server {
    fn start(image: &Path, paths: &Paths) -> Outcome<Self> {
        let cannot = |error: std::io::Error| {
            Failure::failed(format!("cannot start the second process: {error}"))
        };
        let mut child = Command::new(std::env::current_exe().map_err(cannot)?)
            .args(["rnbd", "export", "--until-input-ends", "--no-control", "--path-dead"])
            .arg(format!("{}ms", PATH_DEAD.as_millis()))
            .arg("--file")
            .arg(format!("{EXPORT}={}", image.display()))
            .args(paths.theirs.iter().flat_map(|a| ["--address".to_owned(), a.to_string()]))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(cannot)?;
        super::pass_on_log(&mut child);
        let (told, said) = mpsc::channel();
        if let Some(output) = child.stdout.take() {
            thread::spawn(move || {
                // All output is read: a process whose reader is gone ends.
                for line in BufReader::new(output).lines().map_while(Result::ok) {
                    // Only the first line is waited for.
                    let _ = told.send(line);
                }
            });
        }
        let server = Self { child };
        match said.recv_timeout(READY_TIMEOUT) {
            Ok(line) if line.starts_with("listening on ") => Ok(server),
            _ => Err(Failure::failed("the second process did not start in time")),
        }
    }

    fn pid(&self) -> u32 {
        self.child.id()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        drop(self.child.stdin.take());
        super::wait_for_exit(&mut self.child);
    }
}
