//! A node for programs that find none: `bowline run` starts it, for all programs of this user in
//! this network namespace, and it ends with the last of them.
//!
//! ```text
//! bowline run --> bowline run-node --> bowline node --until-unused     in a session of its own
//!      |          ends at once                |
//!      +-- exec: the program                  | locks a file while it runs; listens for leases
//!            its children                     |
//!            a lease, open in all of them ----+
//! ```
//!
//! The process between them ends, so that the node is no child of the program, which may wait for
//! any of its children.

use std::{
    env,
    ffi::OsString,
    fs::{self, File, TryLockError},
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, TcpListener},
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use bowline_host::keep_standard_streams;
use bowline_node::{
    Failure, Outcome, leases,
    programs::{self, Reached, Unreachable},
    rdma_device,
};
use bowline_wire::rds::TCP_PORT;

use super::{folder, leased};

/// How long a node may take to start, or to end before the next one starts.
const PATIENCE: Duration = Duration::from_secs(30);
const PAUSE: Duration = Duration::from_millis(10);

/// What service managers tell a process, which is not for its child.
const SERVICE_VARIABLES: [&str; 5] =
    ["NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_FDS", "LISTEN_PID"];

/// Start a command in the background (internal).
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
    words: Vec<OsString>,
}

/// Starts `bowline` with these words, and leaves it alone. What the program was given to have open
/// is not for a node that outlives it.
pub(crate) fn run(args: &Args) -> Outcome {
    let start = || {
        keep_standard_streams()?;
        Command::new(env::current_exe()?).args(&args.words).spawn()
    };
    start().map(drop).map_err(|error| Failure::failed(format!("cannot start a node: {error}")))
}

/// A node, and what keeps it.
pub(super) struct Found {
    /// Where it was reached.
    pub(super) reached: PathBuf,
    /// Where it serves programs, unless that is where they look.
    pub(super) place: Option<PathBuf>,
    /// Of a node that ends without programs.
    pub(super) lease: Option<OwnedFd>,
}

/// Finds a node of this network namespace, or starts one.
pub(super) fn find_or_start() -> Outcome<Found> {
    let home = Home::own();
    let until = Instant::now() + PATIENCE;
    loop {
        let Unreachable { why, is_closed } = match found(home.as_ref().ok()) {
            Ok(found) => return Ok(found),
            Err(none) => none,
        };
        let cannot = |error: &str| {
            Failure::failed(format!(
                "no node serves programs here ({why}), and none starts: {error}"
            ))
        };
        let home = home.as_ref().map_err(|error| cannot(error))?;
        if let Some(lock) = home.lock().map_err(|error| cannot(&error))? {
            // Whoever had the lock before may have started one.
            let start = |_| home.start(lock, is_closed, until).map_err(|error| cannot(&error));
            return found(Some(home)).or_else(start);
        }
        if Instant::now() > until {
            return Err(cannot("another one is about to start or to end, for too long"));
        }
        thread::sleep(PAUSE);
    }
}

/// Looks for a node that serves, as [`find_or_start`] does; `None`: one would be started.
///
/// # Errors
/// Why none would start.
pub(crate) fn look() -> Result<Option<PathBuf>, String> {
    let home = Home::own();
    match reachable(home.as_ref().ok()) {
        Ok(node) => Ok(Some(node.place)),
        Err(none) => {
            home.and_then(|_| free_addresses(none.is_closed)).map(|_| None).map_err(|error| {
                format!("no node serves programs here ({}), and none starts: {error}", none.why)
            })
        }
    }
}

/// Finds a node that serves. Programs do not look into a temporary folder.
fn reachable(home: Option<&Home>) -> Result<Reached, Unreachable> {
    let own = home.filter(|home| home.is_temporary).map(|home| &home.place);
    let places: Vec<_> = programs::places().into_iter().chain(own.cloned()).collect();
    programs::reachable(&places)
}

/// Finds a node that serves, and takes a lease of one that needs it.
fn found(home: Option<&Home>) -> Result<Found, Unreachable> {
    let own = home.filter(|home| home.is_temporary).map(|home| &home.place);
    let node = reachable(home)?;
    let lease = leased(&node).map_err(|why| Unreachable { why, is_closed: false })?;
    let place = Some(node.place.clone()).filter(|place| Some(place) == own);
    Ok(Found { reached: node.place, place, lease })
}

/// The folder in which a node is started, and the name of its files.
struct Home {
    place: PathBuf,
    /// Programs do not look there by themselves.
    is_temporary: bool,
}

impl Home {
    /// Where nodes of this user are; or where this user has no folder of its own there, one for
    /// temporary files. Fails where neither is safe.
    fn own() -> Result<Self, String> {
        let default = programs::default_path();
        let Err(error) = folder::create(bowline_ctl::folder_of(&default)) else {
            return Ok(Self { place: default, is_temporary: false });
        };
        let user = rustix::process::geteuid().as_raw();
        let temporary = env::temp_dir().join(format!("bowline-{user}"));
        match folder::create(&temporary) {
            Ok(()) => {
                let place = temporary.join(default.file_name().unwrap_or_default());
                Ok(Self { place, is_temporary: true })
            }
            Err(other) => Err(format!(
                "{error}; {other}; set XDG_RUNTIME_DIR to a folder that only you may write"
            )),
        }
    }

    /// A file of this node, beside its place.
    fn file(&self, extension: &str) -> PathBuf {
        self.place.with_extension(extension)
    }

    /// Locks this folder's node; `None`: one that runs has the lock.
    fn lock(&self) -> Result<Option<File>, String> {
        let path = self.file("lock");
        let file = folder::open(&path)?;
        match file.try_lock() {
            Ok(()) => Ok(Some(file)),
            Err(TryLockError::WouldBlock) => Ok(None),
            Err(TryLockError::Error(error)) => Err(format!("{}: {error}", path.display())),
        }
    }

    /// Starts a node, which has the lock until it ends.
    fn start(&self, lock: File, is_closed: bool, until: Instant) -> Result<Found, String> {
        let trouble = |error: io::Error| format!("{}: {error}", self.place.display());
        let addresses = free_addresses(is_closed)?;
        let log = self.file("log");
        let out = folder::open(&log)?;
        out.set_len(0).map_err(trouble)?;
        let mut command = Command::new(env::current_exe().map_err(trouble)?);
        command.args(["run-node", "--", "node", "--until-unused"]);
        for address in &addresses {
            command.arg("--address").arg(address.to_string());
        }
        if self.is_temporary {
            command.arg("--programs").arg(&self.place);
            command.arg("--control").arg(self.file("control"));
        }
        SERVICE_VARIABLES.iter().chain(&["LD_PRELOAD"]).for_each(|name| {
            command.env_remove(name);
        });
        command.current_dir("/").stdin(Stdio::from(lock));
        command.stdout(out.try_clone().map_err(trouble)?).stderr(out);
        command.status().map_err(trouble)?;
        // It has the lock as long as it runs, by its standard input.
        drop(command);
        let lease = Some(self.wait(until)?);
        self.tell(&addresses, &log);
        let place = Some(self.place.clone()).filter(|_| self.is_temporary);
        Ok(Found { reached: self.place.clone(), place, lease })
    }

    /// Waits until the node gives a lease.
    fn wait(&self, until: Instant) -> Result<OwnedFd, String> {
        loop {
            if let Ok(Some(lease)) = leases::take(&self.place) {
                return Ok(lease);
            }
            if self.lock().is_ok_and(|lock| lock.is_some()) {
                return Err(self.last_words());
            }
            if Instant::now() > until {
                return Err(format!("it is not ready; see {}", self.file("log").display()));
            }
            thread::sleep(PAUSE);
        }
    }

    /// What the node has said last, without its name.
    fn last_words(&self) -> String {
        let log = self.file("log");
        let text = fs::read_to_string(&log).unwrap_or_default();
        match text.lines().last() {
            Some(line) => line.strip_prefix("bowline node: ").unwrap_or(line).to_owned(),
            None => format!("it ended; see {}", log.display()),
        }
    }

    /// Says that a node runs now, in one line.
    fn tell(&self, addresses: &[IpAddr], log: &Path) {
        let on = match addresses {
            [] => "all addresses of this machine".to_owned(),
            some => some.iter().map(IpAddr::to_string).collect::<Vec<_>>().join(", "),
        };
        let control = self.file("control");
        let ask = if self.is_temporary {
            format!("; ask it with --control {}", control.display())
        } else {
            String::new()
        };
        note!(
            "bowline run: no node ran here; started one for programs of this user, on {on}; it \
             ends with the last of them; its log: {}{ask}",
            log.display()
        );
    }
}

/// Addresses for a node: none, which stands for all, or where others have some, the rest. Where a
/// node may serve that is `closed` to this user, and others have some, it is there: what it keeps
/// from this user, another node is not to give.
fn free_addresses(closed: bool) -> Result<Vec<IpAddr>, String> {
    let bind = |ip: IpAddr| TcpListener::bind((ip, TCP_PORT));
    let all = bind(Ipv6Addr::UNSPECIFIED.into());
    let is_taken = |error: &io::Error| error.kind() == io::ErrorKind::AddrInUse;
    let all =
        all.or_else(
            |error| {
                if is_taken(&error) { Err(error) } else { bind(Ipv4Addr::UNSPECIFIED.into()) }
            },
        );
    let Err(error) = all else { return Ok(Vec::new()) };
    if !is_taken(&error) {
        return Err(format!("TCP port {TCP_PORT}: {error}"));
    }
    let is_free = |ip: &IpAddr| bind(*ip).is_ok();
    let free: Vec<_> =
        rdma_device::addresses().into_iter().filter(|ip| !closed && is_free(ip)).collect();
    if free.is_empty() {
        return Err(format!(
            "TCP port {TCP_PORT} is in use, perhaps by a node of another user, who may give you \
             access (--allow-user)"
        ));
    }
    Ok(free)
}
