//! A disk as a file in a directory, by FUSE: for programs that know neither block devices nor NBD.
//!
//! The file has the size of the disk and cannot change it. It is not cached: write submits to the
//! disk, and fsync is a flush of the disk. Holes (fallocate) are punched by writing zeroes, since a
//! discarded block may have any contents, and programs that punch holes rely on reading zeroes.
//!
//! A killed program stays until its request is answered: a request that was sent is not taken back.
//!
//! ```text
//!   mod         mounts, and unmounts, with fuser
//!   device      requests and answers by /dev/fuse
//!   ring        the same by io_uring, where the kernel offers that
//!   wire        their bytes
//!   file        what each of them does
//!   bytes       reads and writes of any bytes, as requests to the disk
//!   hand_over   pauses, for another process that continues
//! ```

mod bytes;
mod device;
mod file;
mod hand_over;
mod ring;
mod wire;

use std::fmt;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, OnceLock, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime};

use fuser::{Filesystem, InitFlags, KernelConfig, MountOption, Request, Session, SessionACL};

use crate::device::{BlockDevice, DiskEvent};
use bytes::{Bytes, MAX_IO, MEMORY};
use device::Device;
use file::{DiskFile, Users};
use hand_over::Gate;
pub use hand_over::Handed;
use ring::{Layout, Ring};

/// Most asynchronous requests that the kernel keeps in flight.
const BACKGROUND: u16 = 64;
/// Each has memory of its own, and together they leave enough of the rest.
const MOST_THREADS: usize = 4;
/// How long unmounting waits for the last requests.
const PATIENCE: Duration = Duration::from_secs(2);
/// How often it is checked whether threads have ended.
const END_POLL: Duration = Duration::from_millis(1);

/// Options of a mount.
#[derive(Clone, Copy, Debug, Default)]
#[non_exhaustive]
pub struct FuseOptions {
    /// The file cannot be written, even if the disk is writable.
    pub read_only: bool,
    /// Other users can access the mount. Needs root, or `user_allow_other` in the system's
    /// fuse.conf.
    pub allow_other: bool,
    /// Number of threads that take the kernel's requests, at most 4; 0 for half of the processors.
    /// Without effect where requests come by io_uring, which is where Linux 6.14 or later
    /// offers that (the parameter `enable_uring` of its module fuse).
    pub threads: usize,
    /// All requests come by [one descriptor](Mount::kernel), and none by io_uring: whoever keeps
    /// that descriptor can have the mount [resumed](resume) after this process was killed.
    pub one_descriptor: bool,
}

/// A directory with the file of a disk in it. Dropping it unmounts: at once if nobody has the file
/// open, else when it is closed.
pub struct Mount {
    dir: PathBuf,
    device: u64,
    file: Arc<DiskFile>,
    /// Where the kernel's requests come from.
    kernel: Arc<OwnedFd>,
    gate: Arc<Gate>,
    unmounts: Unmounts,
    has_ring: bool,
    threads: Vec<JoinHandle<()>>,
    /// Requests were taken. Relaxed: it guards nothing else.
    has_begun: AtomicBool,
}

/// Who unmounts the directory at the end.
enum Unmounts {
    /// The one who has mounted it: this session.
    Session(Session<Handshake>),
    /// This process, which continues with what another has mounted.
    Here,
    /// Another process, which continues.
    Other,
}

/// What the kernel is answered before there are requests.
struct Handshake {
    /// A ring is asked for, then whether the kernel offers it.
    ring: bool,
    offered: mpsc::Sender<bool>,
}

impl Filesystem for Handshake {
    fn init(&mut self, _req: &Request, config: &mut KernelConfig) -> io::Result<()> {
        // Optional: the kernel may lack this, or take the nearest number.
        let _ = config.add_capabilities(InitFlags::FUSE_ASYNC_DIO);
        let _ = config.set_max_write(MAX_IO as u32);
        let _ = config.set_max_background(BACKGROUND);
        let flag = InitFlags::FUSE_OVER_IO_URING;
        // Who asked waits for it.
        let _ = self.offered.send(self.ring && config.add_capabilities(flag).is_ok());
        Ok(())
    }
}

/// Mounts a directory with one file, `file_name`, which is the disk.
///
/// # Errors
/// EINVAL for an invalid name; ENOMEM; errors of mounting: neither root nor fusermount3, or no such
/// directory.
pub fn mount(
    disk: Arc<dyn BlockDevice>,
    dir: &Path,
    file_name: &str,
    options: FuseOptions,
) -> io::Result<Mount> {
    if file_name.is_empty() || file_name.contains(['/', '\0']) || [".", ".."].contains(&file_name) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let mut config = fuser::Config::default();
    config.mount_options = vec![
        MountOption::FSName("bowline".into()),
        MountOption::Subtype("bowline".into()),
        MountOption::DefaultPermissions,
        MountOption::NoSuid,
        MountOption::NoDev,
        MountOption::NoExec,
    ];
    if options.allow_other {
        config.acl = SessionACL::All;
    }
    let mut ring = !options.one_descriptor;
    let mut serve = || Served::new(&disk, dir, file_name, options, &config, &mut ring);
    let Served { file, kernel, unmounts, gate, threads } = match serve() {
        // Where there is a ring, it may be what failed.
        Err(_) if ring => {
            ring = false;
            Served::new(&disk, dir, file_name, options, &config, &mut ring)?
        }
        served => served?,
    };
    let device = std::fs::metadata(dir)?.dev();
    refresh_on_change(&disk, &file, dir.join(file_name));
    let (dir, kernel, has_ring) = (dir.to_owned(), Arc::new(kernel), ring);
    let has_begun = AtomicBool::new(true);
    Ok(Mount { dir, device, file, kernel, gate, unmounts, has_ring, threads, has_begun })
}

/// Continues with a mount that another process has [handed over](Mount::hand_over): programs have
/// the file open all the time. The options must be the same.
///
/// The mount is paused until [`Mount::unpause`]: nothing is taken from the kernel. Dropped before
/// that, it stays mounted, for whoever has a copy of the descriptor.
///
/// The mount may have been given to a process that has ended since. What that one had read by the
/// same descriptor and not answered is executed again, or for the first time (Linux 6.9).
///
/// # Errors
/// ENOMEM; no descriptors left.
pub fn resume(
    disk: Arc<dyn BlockDevice>,
    dir: &Path,
    file_name: &str,
    options: FuseOptions,
    handed: Handed,
) -> io::Result<Mount> {
    let users = Users { open: handed.opens, disabled: false };
    let count = options.device_threads();
    let file = new_file(&disk, file_name, options, users, count * MAX_IO)?;
    let (kernel, gate) = (handed.kernel, Arc::new(Gate::closed()));
    let way = Way { count, is_shared: options.one_descriptor };
    let threads = serve_by_device(kernel.try_clone()?, &file, &gate, way)?;
    refresh_on_change(&disk, &file, dir.join(file_name));
    let (dir, device) = (dir.to_owned(), handed.device);
    let (unmounts, has_ring, has_begun) = (Unmounts::Here, false, AtomicBool::new(false));
    Ok(Mount { dir, device, file, kernel, gate, unmounts, has_ring, threads, has_begun })
}

/// A file that is mounted and served.
struct Served {
    file: Arc<DiskFile>,
    kernel: OwnedFd,
    unmounts: Unmounts,
    gate: Arc<Gate>,
    threads: Vec<JoinHandle<()>>,
}

impl Served {
    /// Mounts the file. With `ring` it is served by io_uring if the kernel offers that; `ring` is
    /// whether it did.
    fn new(
        disk: &Arc<dyn BlockDevice>,
        dir: &Path,
        file_name: &str,
        options: FuseOptions,
        config: &fuser::Config,
        ring: &mut bool,
    ) -> io::Result<Self> {
        let count = options.device_threads();
        let start = MEMORY + count * MAX_IO;
        // Made before the kernel waits for it.
        let made = Layout::for_this_machine(start)
            .filter(|_| *ring)
            .and_then(|layout| Some((layout, ring::build(layout).ok()?)));
        *ring = false;
        let (offered, is_offered) = mpsc::channel();
        let session = Session::new(Handshake { ring: made.is_some(), offered }, dir, config)?;
        let mut mounted = Mounted { session: Some(session), dir };
        let made = made.filter(|_| is_offered.try_recv() == Ok(true));
        *ring = made.is_some();
        let more = made.as_ref().map_or(0, |(layout, _)| layout.len());
        let memory = count * MAX_IO + more;
        let file = new_file(disk, file_name, options, Users::default(), memory)?;
        let mut threads = Vec::new();
        if let Some((layout, made)) = made {
            let ring = Ring::new(made, layout, mounted.kernel()?, Arc::clone(&file))?;
            let (send, ready) = mpsc::channel();
            threads.push(start_thread("bowline-fuse-ring", move || {
                // Who started it waits for this.
                ring.run(|result| drop(send.send(result)));
            })?);
            ready.recv().map_err(io::Error::other)??;
        }
        // By the ring come all but a few.
        let count = if threads.is_empty() { count } else { 1 };
        let gate = Arc::default();
        let way = Way { count, is_shared: options.one_descriptor };
        threads.extend(serve_by_device(mounted.kernel()?, &file, &gate, way)?);
        let kernel = mounted.kernel()?;
        let unmounts = mounted.session.take().map_or(Unmounts::Other, Unmounts::Session);
        Ok(Self { file, kernel, unmounts, gate, threads })
    }
}

impl FuseOptions {
    /// How many threads take requests by /dev/fuse, if there is no other way.
    fn device_threads(self) -> usize {
        let count = match self.threads {
            0 => std::thread::available_parallelism().map_or(1, |cpus| cpus.get() / 2),
            count => count,
        };
        count.clamp(1, MOST_THREADS)
    }
}

/// `more` bytes of its memory are for those who take requests.
fn new_file(
    disk: &Arc<dyn BlockDevice>,
    name: &str,
    options: FuseOptions,
    users: Users,
    more: usize,
) -> io::Result<Arc<DiskFile>> {
    let bytes = Bytes::new(Arc::clone(disk), more);
    Ok(Arc::new(DiskFile {
        users: Mutex::new(users),
        keeper: OnceLock::new(),
        name: name.into(),
        read_only: options.read_only,
        bytes: bytes.map_err(|errno| io::Error::from_raw_os_error(errno.0))?,
        owner: (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw()),
        since: SystemTime::now(),
    }))
}

/// How threads take requests by /dev/fuse.
#[derive(Clone, Copy)]
struct Way {
    /// At most this many: where there can be no more, one is enough.
    count: usize,
    /// All by one descriptor. What was read from another one fails when that is closed.
    is_shared: bool,
}

/// Starts threads that take requests by /dev/fuse.
fn serve_by_device(
    kernel: OwnedFd,
    file: &Arc<DiskFile>,
    gate: &Arc<Gate>,
    Way { count, is_shared }: Way,
) -> io::Result<Vec<JoinHandle<()>>> {
    let first = Device { fd: kernel };
    let another = |_| match is_shared {
        true => first.fd.try_clone().map(|fd| Device { fd }).ok(),
        false => first.another().ok(),
    };
    let others: Vec<_> = (1..count).map_while(another).collect();
    let serve = |device: Device, index: usize| {
        let (device, file, gate) = (Arc::new(device), Arc::clone(file), Arc::clone(gate));
        let own = MEMORY + index * MAX_IO;
        start_thread("bowline-fuse", move || device::serve(&device, &file, own, &gate))
    };
    let mut threads = vec![serve(first, 0)?];
    threads.extend((1..).zip(others).map_while(|(index, device)| serve(device, index).ok()));
    Ok(threads)
}

/// A file that is mounted and perhaps not served: unmounted when dropped.
struct Mounted<'a> {
    session: Option<Session<Handshake>>,
    dir: &'a Path,
}

impl Mounted<'_> {
    fn kernel(&self) -> io::Result<OwnedFd> {
        let session = self.session.as_ref().ok_or(io::ErrorKind::NotConnected)?;
        session.as_fd().try_clone_to_owned()
    }
}

impl Drop for Mounted<'_> {
    fn drop(&mut self) {
        // Who has begun to use it already waits for an answer, and keeps it from being unmounted.
        if let Some(mut session) = self.session.take()
            && session.unmount().is_err()
        {
            let _ = rustix::mount::unmount(self.dir, rustix::mount::UnmountFlags::DETACH);
        }
    }
}

fn start_thread(name: &str, body: impl FnOnce() + Send + 'static) -> io::Result<JoinHandle<()>> {
    std::thread::Builder::new().name(name.to_owned()).spawn(body)
}

/// Tells the kernel when the size of the file changes, while it is mounted.
fn refresh_on_change(disk: &Arc<dyn BlockDevice>, file: &Arc<DiskFile>, path: PathBuf) {
    let mounted = Arc::downgrade(file);
    disk.on_change(Box::new(move |event| {
        if matches!(event, DiskEvent::Resized(_)) && mounted.strong_count() > 0 {
            refresh_size(path.clone());
        }
    }));
}

/// Makes the kernel fetch the size of the file again, in a thread, since that waits for an answer.
/// Until then, direct asynchronous reads end at the old size.
fn refresh_size(file: PathBuf) {
    let thread = std::thread::Builder::new().name("bowline-fuse-size".to_owned());
    // If this fails, a later access by another program fetches the size.
    let _ = thread.spawn(move || std::fs::metadata(file));
}

impl Mount {
    /// Returns the directory.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Returns where the kernel's requests come from.
    pub const fn kernel(&self) -> &Arc<OwnedFd> {
        &self.kernel
    }

    /// Returns the device number of the mount, by which it is known.
    pub const fn device(&self) -> u64 {
        self.device
    }

    /// Writes how often the file is open, 8 bytes in the machine's order, to the beginning of
    /// `keeper` whenever that changes: should this process be killed, the next one knows. A number
    /// that was not written in time is too large.
    pub fn keep_opens(&self, keeper: Arc<OwnedFd>) {
        self.file.keep_opens(keeper);
    }

    /// Returns how often the file is open. The kernel reports a close a moment after it.
    pub fn opens(&self) -> usize {
        self.file.users().open
    }

    /// Refuses further opens of the file if it is not open, until [`Mount::enable`]; returns true
    /// if so.
    pub fn disable_if_unused(&self) -> bool {
        let mut users = self.file.users();
        users.disabled |= users.open == 0;
        users.open == 0
    }

    /// Allows opens of the file again.
    pub fn enable(&self) {
        self.file.users().disabled = false;
    }

    /// Refuses changes with EIO from now on, and opens of the file; changes that were begun are
    /// answered. For the end of a process, so that no change is answered after its last flush.
    pub fn finish(&self) {
        self.file.users().disabled = true;
        self.file.bytes.end_changes();
    }

    /// Tells whether each change that was begun is answered.
    pub fn is_unchanging(&self) -> bool {
        self.file.bytes.is_unchanging()
    }

    /// Tells why another process cannot continue with it.
    pub fn cannot_hand_over(&self) -> Option<&'static str> {
        self.has_ring.then_some(
            "a mount that is served by io_uring ends with its process: unmount it and start again, \
             or set the parameter enable_uring of the kernel's module fuse to N before it is \
             mounted",
        )
    }

    /// Takes no more requests, until [`Mount::unpause`].
    pub fn pause(&self) {
        self.gate.close();
        let (dir, threads) = (self.dir.clone(), self.threads.len());
        // Each wakes a thread. When all are paused, the next waits for whoever continues.
        let wake = move || (0..threads).for_each(|_| _ = std::fs::metadata(&dir));
        // If this fails, requests of programs do the same.
        let _ = start_thread("bowline-fuse-wake", wake);
    }

    /// Tells whether a pause has begun: each request that was begun is answered.
    pub fn is_paused(&self) -> bool {
        let serving = self.threads.iter().filter(|thread| !thread.is_finished()).count();
        self.gate.parked() == serving && self.file.bytes.is_idle()
    }

    /// Takes requests, again or for the first time.
    pub fn unpause(&self) {
        if !self.has_begun.swap(true, Relaxed) {
            // An older kernel sends nothing again; after a hand-over, there is nothing to send.
            let _ = hand_over::ask_again(self.kernel.as_fd());
        }
        self.gate.open();
    }

    /// Leaves a mount that [is paused](Self::is_paused), and returns what another process needs to
    /// [`resume`] it: programs notice a pause.
    pub fn hand_over(mut self) -> Handed {
        self.gate.hand_over();
        self.wait_for_threads();
        if let Unmounts::Session(session) = std::mem::replace(&mut self.unmounts, Unmounts::Other) {
            // It would unmount.
            std::mem::forget(session);
        }
        Handed { kernel: Arc::clone(&self.kernel), opens: self.opens(), device: self.device }
    }

    /// Waits a little for the threads to end.
    fn wait_for_threads(&self) {
        let end = Instant::now() + PATIENCE;
        let is_done = || self.threads.iter().all(JoinHandle::is_finished);
        while !is_done() && Instant::now() < end {
            std::thread::sleep(END_POLL);
        }
    }

    /// Unmounts the directory, and waits a little for requests in flight.
    fn unmount(&mut self) {
        let unmounts = std::mem::replace(&mut self.unmounts, Unmounts::Other);
        let is_here = match unmounts {
            Unmounts::Session(session) => {
                // Unmounts.
                drop(session);
                false
            }
            Unmounts::Here => true,
            Unmounts::Other => return,
        };
        let still_there = std::fs::metadata(&self.dir).is_ok_and(|dir| dir.dev() == self.device);
        if still_there {
            // The file is open: detach the mount, which then serves its users only. Without the
            // privilege, fusermount has done the same already.
            let detached = rustix::mount::unmount(&self.dir, rustix::mount::UnmountFlags::DETACH);
            if is_here && detached.is_err() {
                let mut helper = Command::new("fusermount3");
                // Without it, or where it fails, the mount stays, and answers ENOTCONN.
                let _ = helper.args(["-u", "-q", "-z", "--"]).arg(&self.dir).status();
            }
        }
        self.wait_for_threads();
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        if !self.has_begun.load(Relaxed) {
            // Another process has a copy of the descriptor, and continues.
            self.gate.hand_over();
            return self.wait_for_threads();
        }
        // A mount that ends serves its users no longer.
        self.gate.open();
        self.unmount();
    }
}

impl fmt::Debug for Mount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mount").field("dir", &self.dir).finish_non_exhaustive()
    }
}
