//! fio on the doors of a disk: what people get who attach a program, a machine or a database to a
//! disk that `bowline rnbd map` uses. All other cells of disks measure bowline's library.
//!
//! ```text
//!   fio --engine nbd------> NBD socket ----.
//!   fio --direct, libaio -> file by FUSE --'- rnbd map === RTRS === rnbd export --memory
//!   fio --engine nbd------> nbdkit, qemu-nbd over TCP
//!   fio --direct, libaio -> file of nbdfuse -- nbdkit over TCP
//! ```
//! Export, map and the servers of others are processes of their own, as everybody starts them, and
//! bound to no CPU. They are started once and serve all measurements; their memory is written
//! before the first one, since memory that nobody has touched is another matter.

mod fio;
mod server;

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs::File;
use std::net::{Ipv4Addr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use fio::{Engine, Fio};
use server::{Folder, Server};

use crate::block_cells::{memory_file, start_on};
use crate::cell::{Cell, Kind, Subject, Words};
use crate::nodes;
use crate::run::{self, Launcher, Sample};
use crate::sys::{self, Network};

/// Bytes of a disk that is reached over a slow port.
pub(crate) const DISK_APART: u64 = 64 << 20;
/// How long it may take to write a disk once.
const FILL_LIMIT: Duration = Duration::from_secs(60);
/// How long fio may take beyond the time for which it asks.
const FIO_LIMIT: Duration = Duration::from_secs(20);
/// Tells the kernel's FUSE to offer io_uring to those that mount; since Linux 6.14.
const RING: &str = "/sys/module/fuse/parameters/enable_uring";
/// Clients that qemu-nbd serves at a time.
const QEMU_CLIENTS: &str = "16";

/// What is measured by fio, in the order of the tables.
pub(crate) const SUBJECTS: [Subject; 6] = [
    Subject::DoorNbd,
    Subject::DoorFuse,
    Subject::DoorFuseRing,
    Subject::Nbdkit,
    Subject::Nbdfuse,
    Subject::QemuNbd,
];

/// How fio reaches a subject.
const fn engine(subject: Subject) -> Engine {
    match subject {
        Subject::DoorFuse | Subject::DoorFuseRing | Subject::Nbdfuse => Engine::File,
        _ => Engine::Nbd,
    }
}

/// Says what of this machine a subject is measured with, or what is missing for it.
///
/// # Errors
/// Says what is missing, and how to get it.
pub(crate) fn look(subject: Subject) -> Result<String, String> {
    let fio = fio::has(engine(subject))?;
    if subject.is_door() {
        bowline()?;
    }
    if engine(subject) == Engine::File {
        fuse()?;
    }
    if subject == Subject::DoorFuseRing {
        if !Path::new(RING).exists() {
            return Err("FUSE of this kernel has no io_uring; Linux 6.14 or later has it".into());
        }
        File::options().write(true).open(RING).map_err(|e| format!("{RING}: {e}; be root"))?;
    }
    Ok(fio)
}

/// Has the mounts of doors end with this process, however it ends, where that can be had: as root.
pub(crate) fn keep_mounts() {
    // Of others a mount is left that does not answer, if they are killed.
    let _ = sys::own_mounts();
}

/// Says whether files can be shown by FUSE.
fn fuse() -> Result<(), String> {
    if !Path::new("/dev/fuse").exists() {
        return Err("there is no /dev/fuse; modprobe fuse".into());
    }
    if sys::is_root() || Command::new("fusermount3").arg("--version").output().is_ok() {
        return Ok(());
    }
    Err("fusermount3 is not installed, and only root can do without; apt-get install fuse3".into())
}

/// The command that people have: this program, or one beside it.
fn bowline() -> Result<PathBuf, String> {
    let own = std::env::current_exe().map_err(|e| format!("finding this program: {e}"))?;
    match std::env::args().nth(1) {
        Some(word) if word == "bench" => Ok(own),
        _ => beside(&own),
    }
}

/// The command beside a program that is not it.
fn beside(own: &Path) -> Result<PathBuf, String> {
    let beside = own.with_file_name("bowline");
    if beside.exists() {
        return Ok(beside);
    }
    let folder = own.parent().unwrap_or(Path::new("."));
    let folder = folder.display();
    Err(format!("no command bowline in {folder}; cargo build --release --package bowline-cli"))
}

/// Where a disk is served, and where it is used.
pub(crate) struct Place<'a> {
    /// Networks of server and client; none: this process's.
    pub(crate) networks: Option<[&'a Network; 2]>,
    /// Addresses of server and client.
    pub(crate) addresses: (Ipv4Addr, Ipv4Addr),
    /// Bytes of the disk.
    pub(crate) bytes: u64,
}

impl Place<'_> {
    fn at_server(&self, command: &mut Command) {
        self.networks.into_iter().for_each(|[server, _]| server.house(command));
    }

    fn at_client(&self, command: &mut Command) {
        self.networks.into_iter().for_each(|[_, client]| client.house(command));
    }
}

/// A disk behind its door. Its processes end with it.
pub(crate) struct Door<'a> {
    /// Those that use others come first, and end first.
    servers: Vec<Server>,
    /// What tells fio where it is.
    at: String,
    engine: Engine,
    place: Place<'a>,
    folder: Folder,
    /// What a server keeps the disk in.
    _store: Option<File>,
}

impl<'a> Door<'a> {
    /// Starts what shows a disk.
    ///
    /// # Errors
    /// Says what did not start, and what it said.
    pub(crate) fn open(subject: Subject, place: Place<'a>) -> Result<Self, String> {
        let store = (subject == Subject::QemuNbd).then(|| memory_file(place.bytes as usize));
        let (store, path) = store.transpose()?.unzip();
        let mut door = Self {
            servers: Vec::new(),
            at: String::new(),
            engine: engine(subject),
            place,
            folder: Folder::new()?,
            _store: store,
        };
        match subject {
            Subject::DoorNbd | Subject::DoorFuse => door.map()?,
            Subject::DoorFuseRing => {
                let _offered = Offered::make()?;
                door.map()?;
            }
            Subject::QemuNbd => {
                let path = path.unwrap_or_default();
                let args = ["--persistent", "--format", "raw", "--shared", QEMU_CLIENTS, &path];
                door.over_tcp("qemu-nbd", &args)?;
            }
            _ => {
                let size = format!("size={}", door.place.bytes);
                door.over_tcp("nbdkit", &["--foreground", "memory", &size])?;
            }
        }
        if subject == Subject::Nbdfuse {
            let file = door.folder.make("mount")?.join("disk");
            let mut command = Command::new("nbdfuse");
            command.arg(&file).arg(&door.at);
            door.place.at_client(&mut command);
            let server = Server::start("nbdfuse", &mut command, &door.folder)?;
            door.at = file.display().to_string();
            door.servers.insert(0, server);
            door.servers[0].until(|| file.exists().then_some(()))?;
        }
        Ok(door)
    }

    /// Exports a disk and maps it.
    fn map(&mut self) -> Result<(), String> {
        let program = bowline()?;
        let (server, client) = self.place.addresses;
        let mut export = Command::new(&program);
        export.args(["rnbd", "export", "--no-control", "--memory"]);
        export.arg(format!("disk={}", self.place.bytes)).arg(format!("--address={server}"));
        self.place.at_server(&mut export);
        let mut export = Server::start("export", &mut export, &self.folder)?;
        export.says("export disk")?;
        self.servers.push(export);

        let mut map = Command::new(&program);
        map.args(["rnbd", "map", "disk", "--no-control", "--from=bench"]);
        map.arg(format!("--path={client}@{server}"));
        let file = self.engine == Engine::File;
        let at = if file { self.folder.make("mount")? } else { self.folder.path().join("nbd") };
        map.arg(if file { "--fuse" } else { "--nbd" }).arg(&at);
        self.place.at_client(&mut map);
        let mut map = Server::start("map", &mut map, &self.folder)?;
        map.says("mapped disk")?;
        self.servers.insert(0, map);
        self.at = match file {
            // One file is all that such a folder has.
            true => std::fs::read_dir(&at)
                .ok()
                .and_then(|mut files| files.next()?.ok())
                .map(|file| file.path().display().to_string())
                .ok_or_else(|| format!("{} has no file", at.display()))?,
            false => format!("nbd+unix:///?socket={}", at.display()),
        };
        Ok(())
    }

    /// Starts a server of NBD over TCP.
    fn over_tcp(&mut self, program: &'static str, args: &[&str]) -> Result<(), String> {
        let address = self.place.addresses.0;
        let bind = || TcpListener::bind((address, 0));
        let socket = match self.place.networks {
            Some([server, _]) => server.inside(bind),
            None => bind(),
        };
        let failed = |e: std::io::Error| format!("a socket for {program} at {address}: {e}");
        let socket = socket.map_err(failed)?;
        self.at = format!("nbd://{}", socket.local_addr().map_err(failed)?);
        self.servers.push(Server::of(program, start_on(program, args, socket.into())?));
        Ok(())
    }

    /// Writes the whole disk once.
    ///
    /// # Errors
    /// Says what fio said.
    pub(crate) fn fill(&self) -> Result<(), String> {
        let size = 128 << 10;
        let load = Load { write: true, size, depth: 8, jobs: 1, window: None };
        self.start(&load)?.result(Instant::now() + FILL_LIMIT).map(drop)
    }

    /// Has fio ask.
    fn start(&self, load: &Load) -> Result<Fio, String> {
        let mut command = fio::command(load, self.engine, &self.at, self.place.bytes);
        self.place.at_client(&mut command);
        Fio::start(command, load.write)
    }

    /// The processes that serve.
    pub(crate) fn pids(&self) -> impl Iterator<Item = u32> {
        self.servers.iter().map(Server::pid)
    }

    /// The processors' time that each has used.
    fn used(&self) -> Vec<(&'static str, u64)> {
        self.servers.iter().map(|server| (server.name(), server.cpu_ns())).collect()
    }
}

/// FUSE offers io_uring as long as this is there.
struct Offered {
    before: String,
}

impl Offered {
    fn make() -> Result<Self, String> {
        let failed = |e: std::io::Error| format!("{RING}: {e}");
        let before = std::fs::read_to_string(RING).map_err(failed)?;
        std::fs::write(RING, "Y").map_err(failed)?;
        Ok(Self { before })
    }
}

impl Drop for Offered {
    fn drop(&mut self) {
        // It could be written a moment ago.
        let _ = std::fs::write(RING, &self.before);
    }
}

/// What fio asks for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Load {
    pub(crate) write: bool,
    /// Bytes of a request.
    pub(crate) size: usize,
    /// Requests outstanding of each process.
    pub(crate) depth: usize,
    /// Processes that ask at a time.
    pub(crate) jobs: usize,
    /// How long; none: until the whole disk was written once, in its order.
    pub(crate) window: Option<Duration>,
}

impl Load {
    /// What a cell asks for.
    pub(crate) fn of(cell: &Cell) -> Self {
        Self {
            write: cell.kind == Kind::FioWrite,
            size: cell.size,
            depth: cell.depth,
            jobs: cell.flows,
            window: Some(Duration::from_millis(cell.window_ms)),
        }
    }
}

/// Has an fio of its own ask at each door at the same time. Returns a sample of each.
///
/// # Errors
/// Says what the first fio that failed has said.
pub(crate) fn measure(doors: &[Door<'_>], load: &Load) -> Result<Vec<Sample>, String> {
    let before: Vec<_> = doors.iter().map(Door::used).collect();
    let started: Vec<Fio> = doors.iter().map(|door| door.start(load)).collect::<Result<_, _>>()?;
    let end = Instant::now() + load.window.unwrap_or_default() + FIO_LIMIT;
    let asked: Vec<fio::Asked> =
        started.into_iter().map(|fio| fio.result(end)).collect::<Result<_, _>>()?;
    let samples = doors.iter().zip(before).zip(asked);
    Ok(samples.map(|((door, before), asked)| sample(&before, &door.used(), asked, load)).collect())
}

/// Puts together what fio has counted and what the servers have used.
fn sample(
    before: &[(&'static str, u64)],
    after: &[(&'static str, u64)],
    asked: fio::Asked,
    load: &Load,
) -> Sample {
    let mut said = String::new();
    let mut served = 0.0;
    for ((name, before), (_, after)) in before.iter().zip(after) {
        let each = after.saturating_sub(*before) as f64 / asked.count as f64;
        served += each;
        let _ = write!(said, "cpu_{name}={each:.0} "); // writing to a String cannot fail
    }
    let own = asked.cpu_ns as f64 / asked.count as f64;
    let _ = write!(said, "cpu_fio={own:.0}"); // likewise
    Sample {
        count: asked.count,
        seconds: asked.seconds,
        bytes: load.size,
        rx_cpu: served,
        tx_cpu: own,
        rx_syscalls: None,
        tx_syscalls: None,
        lat: Some(asked.times),
        words: Words::parse(said.split(' ')),
        other: Words::default(),
        foreign: 0.0,
        tries: 1,
    }
}

/// The processors' time of a request in each process, as the sample of a door has it: the servers,
/// the nearest to fio first, then fio.
pub(crate) fn shares(sample: &Sample) -> Vec<(&'static str, f64)> {
    let names = ["map", "export", "nbdfuse", "nbdkit", "qemu-nbd", "fio"];
    let of =
        |name: &'static str| Some((name, sample.words.number(&format!("cpu_{name}")).ok()? as f64));
    names.into_iter().filter_map(of).collect()
}

/// All doors of a run, each opened when it is measured first.
pub(crate) struct Doors {
    /// Of each disk.
    bytes: u64,
    open: BTreeMap<Subject, Result<Door<'static>, String>>,
}

impl Doors {
    /// None is open yet.
    pub(crate) const fn new(bytes: u64) -> Self {
        Self { bytes, open: BTreeMap::new() }
    }

    /// Measures a cell once; loops that never sleep run beside it, as many as it says.
    ///
    /// # Errors
    /// Says what failed.
    pub(crate) fn measure(&mut self, launcher: &Launcher, cell: &Cell) -> Result<Sample, String> {
        let (subject, bytes) = (cell.subject, self.bytes);
        let door = self.open.entry(subject).or_insert_with(|| Self::door(subject, bytes));
        let door = std::slice::from_ref(door.as_ref().map_err(Clone::clone)?);
        let load = Load::of(cell);
        run::busily(cell.busy, || {
            let watch = launcher.watch(door.iter().flat_map(Door::pids).collect());
            let samples = measure(door, &load)?;
            let foreign = watch.foreign();
            let sample = samples.into_iter().next().ok_or("nothing was measured")?;
            Ok(Sample { foreign, ..sample })
        })
    }

    fn door(subject: Subject, bytes: u64) -> Result<Door<'static>, String> {
        let place = Place { networks: None, addresses: nodes::free_roce(), bytes };
        let door = Door::open(subject, place)?;
        door.fill()?;
        Ok(door)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_process_has_its_time_of_the_processors() {
        let asked = fio::Asked { count: 100, seconds: 0.5, times: vec![7; 11], cpu_ns: 30_000 };
        let load = Load {
            write: false,
            size: 4096,
            depth: 1,
            jobs: 1,
            window: Some(Duration::from_millis(500)),
        };
        let before = [("map", 1000), ("export", 5000)];
        let sample = sample(&before, &[("map", 21_000), ("export", 15_000)], asked, &load);
        assert_eq!((sample.rate(), sample.byte_rate()), (200.0, 819_200.0));
        assert_eq!((sample.rx_cpu, sample.tx_cpu), (300.0, 300.0));
        assert_eq!(shares(&sample), [("map", 200.0), ("export", 100.0), ("fio", 300.0)]);
    }

    #[test]
    fn without_the_command_it_is_said_what_builds_it() {
        let folder = Folder::new().unwrap();
        let own = folder.path().join("bowline-bench");
        let why = beside(&own).unwrap_err();
        assert!(why.ends_with("cargo build --release --package bowline-cli"), "{why}");
        File::create(folder.path().join("bowline")).unwrap();
        assert_eq!(beside(&own), Ok(folder.path().join("bowline")));
    }
}
