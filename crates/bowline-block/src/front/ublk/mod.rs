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
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::device::BlockDevice;
use control::Control;
use queue::Queue;

/// How long the system may take to make the device's files.
const PATIENCE: Duration = Duration::from_secs(5);

/// How a disk becomes a block device.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct UblkOptions {
    /// The device cannot be written, whatever the disk can.
    pub read_only: bool,
    /// Requests under way, 1 to 4096. 128 if nothing is said.
    pub depth: u16,
}

impl Default for UblkOptions {
    fn default() -> Self {
        Self { read_only: false, depth: 128 }
    }
}

/// A block device. Dropping it removes the device, once requests under way were answered: what has
/// it open gets errors.
pub struct Ublk {
    path: PathBuf,
    id: u32,
    control: Control,
    thread: Option<JoinHandle<()>>,
}

/// Makes a block device of `disk`, with the size that it has now.
///
/// # Errors
/// NotFound without the driver; PermissionDenied without the privilege; InvalidInput for a depth
/// that cannot be; the system's.
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
    let mut ublk = Ublk { path, id, control, thread: None };
    ublk.control.set_params(id, &mut abi::params(&limits, max_io))?;
    let file = open_when_there(Path::new(&format!("/dev/ublkc{id}")))?;
    let queue = Queue::new(file, disk, depth, max_io)?;
    let (ready, is_ready) = mpsc::channel();
    let thread = std::thread::Builder::new().name("bowline-ublk".into()).spawn(move || {
        // The receiver waits for exactly this.
        queue.run(|result| drop(ready.send(result)));
    })?;
    ublk.thread = Some(thread);
    is_ready.recv().map_err(|_| io::ErrorKind::BrokenPipe)??;
    ublk.control.start(id)?;
    Ok(ublk)
}

impl Ublk {
    /// The device, as `/dev/ublkb0`.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Ublk {
    fn drop(&mut self) {
        // A device that was not started, or is gone, says so: as good.
        let _ = self.control.stop(self.id);
        if let Some(thread) = self.thread.take() {
            // A panic of the thread was printed when it happened.
            let _ = thread.join();
        }
        let _ = self.control.delete(self.id);
    }
}

impl fmt::Debug for Ublk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ublk").field("path", &self.path).finish_non_exhaustive()
    }
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
