//! A disk as a block device of this machine, by the kernel's ublk driver (`ublk_drv`, from Linux
//! 6.4 on; needs root).
//!
//! A device that is [recoverable](attach_recoverable) stays when its process ends: programs that
//! use it wait, and another process [resumes](resume) it.
//!
//! Spec: `docs/spec/rnbd.md`, NB-52 and NB-75.

mod abi;
mod control;
mod queue;
mod recovery;

use std::fmt;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::device::{BlockDevice, DeviceMem};
use control::Control;
use queue::{Inbox, Queue, Wanted};
pub use recovery::{DeviceId, attach_recoverable, remove, resume};

/// How long the kernel may take to create the device's files.
const PATIENCE: Duration = Duration::from_secs(5);
/// How long removing waits for users that have the device open.
const DELETE_TIMEOUT: Duration = Duration::from_secs(2);

/// Options of a ublk device.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct UblkOptions {
    /// The device cannot be written, even if the disk is writable.
    pub read_only: bool,
    /// Queue depth, 1 to 4096 requests. Default: 128.
    pub depth: u16,
}

impl Default for UblkOptions {
    fn default() -> Self {
        Self { read_only: false, depth: 128 }
    }
}

/// A block device. Dropping it removes the device, once requests in flight were answered. Users
/// that still have it open get errors; the kernel keeps its number until they close it, which is
/// waited for a little. One that was [resumed](resume) is removed only after [`Ublk::own`].
pub struct Ublk {
    path: PathBuf,
    id: u32,
    /// By which the device is known to the next process, if it is recoverable.
    tag: Option<u64>,
    /// What happens to it when this is dropped.
    end: Mutex<End>,
    control: Arc<Mutex<Control>>,
    server: Option<Server>,
    /// The device, opened exclusively while it is disabled.
    claim: Mutex<Option<File>>,
}

/// What serves a device in this process.
struct Server {
    inbox: Arc<Inbox>,
    /// Returns the memory of requests.
    thread: JoinHandle<DeviceMem>,
}

/// What happens to the device at the end.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum End {
    /// It is removed.
    Removed,
    /// It stays for another process.
    Left,
}

/// Makes a block device of `disk`, with its present size. The device does not follow later changes
/// of the size, which kernels before Linux 6.16 do not support; attach again for that.
///
/// # Errors
/// NotFound without the driver; PermissionDenied without the privilege; InvalidInput for an invalid
/// depth; errors of the system calls.
pub fn attach(disk: Arc<dyn BlockDevice>, options: UblkOptions) -> io::Result<Ublk> {
    attach_with(disk, options, None, |_| Ok(()))
}

fn attach_with(
    disk: Arc<dyn BlockDevice>,
    options: UblkOptions,
    tag: Option<u64>,
    keep: impl FnOnce(&DeviceId) -> io::Result<()>,
) -> io::Result<Ublk> {
    if options.depth == 0 || options.depth > abi::MAX_DEPTH {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let mut limits = disk.limits();
    limits.read_only |= options.read_only;
    let max_io = abi::max_io(&limits);
    let mut control = Control::open()?;
    let info = control.add(options.depth, max_io, tag)?;
    // From here on, dropping removes the device.
    let mut ublk = Ublk::new(info.id, tag.filter(|_| info.is_recoverable), control);
    lock(&ublk.control).set_params(info.id, &mut abi::params(&limits, max_io))?;
    if let Some(device) = ublk.device() {
        keep(&device)?;
    }
    ublk.serve(disk, info.depth, max_io)?;
    lock(&ublk.control).start(info.id)?;
    Ok(ublk)
}

impl Ublk {
    fn new(id: u32, tag: Option<u64>, control: Control) -> Self {
        Self {
            path: PathBuf::from(format!("/dev/ublkb{id}")),
            id,
            tag,
            end: Mutex::new(End::Removed),
            control: Arc::new(Mutex::new(control)),
            server: None,
            claim: Mutex::default(),
        }
    }

    /// Starts the thread that serves the device; every tag waits for a request then.
    fn serve(&mut self, disk: Arc<dyn BlockDevice>, depth: u16, max_io: u32) -> io::Result<()> {
        let file = open_when_there(Path::new(&format!("/dev/ublkc{}", self.id)))?;
        let queue = Queue::new(file, disk, depth, max_io)?;
        let inbox = queue.inbox();
        let (ready, is_ready) = mpsc::channel();
        let thread = std::thread::Builder::new().name("bowline-ublk".into()).spawn(move || {
            // The receiver waits for this result.
            queue.run(|result| drop(ready.send(result)))
        })?;
        self.server = Some(Server { inbox, thread });
        is_ready.recv().map_err(|_| io::ErrorKind::BrokenPipe)?
    }

    /// Returns the path of the device, for example `/dev/ublkb0`.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Claims the device if no other program has claimed it, so that it cannot be mounted, until
    /// [`Ublk::enable`]; returns true if so.
    ///
    /// A device or a partition is claimed by mounting it, swapping to it, stacking another device
    /// on it, or opening it with `O_EXCL`. The kernel reports no other users: a program that merely
    /// has the device open, such as dd, is not noticed.
    pub fn disable_if_unused(&self) -> bool {
        let mut claim = lock(&self.claim);
        if claim.is_some() {
            return true;
        }
        let opened = OpenOptions::new().read(true).custom_flags(libc::O_EXCL).open(&self.path);
        // A device that is gone is unused; if it cannot be opened for another reason, its use is
        // unknown.
        let gone = |errno| matches!(errno, libc::ENOENT | libc::ENXIO | libc::ENODEV);
        let unused = opened.as_ref().map_or_else(|e| e.raw_os_error().is_some_and(gone), |_| true);
        *claim = opened.ok();
        unused
    }

    /// Allows other programs to claim the device again.
    pub fn enable(&self) {
        *lock(&self.claim) = None;
    }

    /// Deletes the device. The kernel answers once the device is no longer open, which may be
    /// never.
    fn delete(&self) {
        let (id, control) = (self.id, Arc::clone(&self.control));
        let (done, is_gone) = mpsc::channel();
        let thread = std::thread::Builder::new().name("bowline-ublk-end".into()).spawn(move || {
            // The receiver may be gone when this took too long.
            let _ = done.send(lock(&control).delete(id));
        });
        match thread {
            Ok(_) => drop(is_gone.recv_timeout(DELETE_TIMEOUT)),
            Err(_) => drop(lock(&self.control).delete(id)),
        }
    }
}

impl Drop for Ublk {
    fn drop(&mut self) {
        // Releases our claim, which counts as a user.
        self.enable();
        if *lock(&self.end) == End::Left {
            return self.leave();
        }
        if let Some(server) = &self.server {
            // The kernel waits for the answers of what is held.
            server.inbox.set(Wanted::Open);
        }
        // An error means that the device was not started, or is gone.
        let _ = lock(&self.control).stop(self.id);
        if let Some(server) = self.server.take() {
            // A panic of the thread was printed when it happened.
            let _ = server.thread.join();
        }
        self.delete();
    }
}

impl fmt::Debug for Ublk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ublk").field("path", &self.path).finish_non_exhaustive()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn open_when_there(path: &Path) -> io::Result<File> {
    let end = Instant::now() + PATIENCE;
    loop {
        match OpenOptions::new().read(true).write(true).open(path) {
            Err(_) if Instant::now() < end => std::thread::sleep(Duration::from_millis(5)),
            result => return result,
        }
    }
}
