//! A disk as a block device of this machine, by the kernel's ublk driver (`ublk_drv`, from Linux
//! 6.4 on; needs root).
//!
//! Spec: `docs/spec/rnbd.md`, NB-52.

mod abi;
mod control;
mod queue;

use std::fmt;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::device::BlockDevice;
use control::Control;
use queue::Queue;

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
/// waited for a little.
pub struct Ublk {
    path: PathBuf,
    id: u32,
    control: Arc<Mutex<Control>>,
    thread: Option<JoinHandle<()>>,
    /// The device, opened exclusively while it is disabled.
    claim: Mutex<Option<File>>,
}

/// Makes a block device of `disk`, with its present size. The device does not follow later changes
/// of the size, which kernels before Linux 6.16 do not support; attach again for that.
///
/// # Errors
/// NotFound without the driver; PermissionDenied without the privilege; InvalidInput for an invalid
/// depth; errors of the system calls.
pub fn attach(disk: Arc<dyn BlockDevice>, options: UblkOptions) -> io::Result<Ublk> {
    if options.depth == 0 || options.depth > abi::MAX_DEPTH {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let mut limits = disk.limits();
    limits.read_only |= options.read_only;
    let max_io = abi::max_io(&limits);
    let mut control = Control::open()?;
    let (id, depth) = control.add(options.depth, max_io)?;
    // From here on, dropping removes the device.
    let path = PathBuf::from(format!("/dev/ublkb{id}"));
    let control = Arc::new(Mutex::new(control));
    let mut ublk = Ublk { path, id, control, thread: None, claim: Mutex::default() };
    lock(&ublk.control).set_params(id, &mut abi::params(&limits, max_io))?;
    let file = open_when_there(Path::new(&format!("/dev/ublkc{id}")))?;
    let queue = Queue::new(file, disk, depth, max_io)?;
    let (ready, is_ready) = mpsc::channel();
    let thread = std::thread::Builder::new().name("bowline-ublk".into()).spawn(move || {
        // The receiver waits for this result.
        queue.run(|result| drop(ready.send(result)));
    })?;
    ublk.thread = Some(thread);
    is_ready.recv().map_err(|_| io::ErrorKind::BrokenPipe)??;
    lock(&ublk.control).start(id)?;
    Ok(ublk)
}

impl Ublk {
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
        // An error means that the device was not started, or is gone.
        let _ = lock(&self.control).stop(self.id);
        if let Some(thread) = self.thread.take() {
            // A panic of the thread was printed when it happened.
            let _ = thread.join();
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
