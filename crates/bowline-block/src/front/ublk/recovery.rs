//! A device that stays without a server, for the next process: the kernel holds its requests.
//!
//! ```text
//!   live       its server serves
//!   quiesced   the server has ended, by itself or killed: users wait
//!   live       another process has taken the device up; what the former server was given and has
//!              not answered, it is given again
//! ```

use std::io;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use super::abi::{self, DevState, Info};
use super::control::Control;
use super::queue::Wanted;
use super::{End, PATIENCE, Ublk, UblkOptions, attach_with, lock};
use crate::device::BlockDevice;

/// How often the state of a device is looked at while it is waited for.
const POLL: Duration = Duration::from_millis(1);

/// A recoverable device, for another process.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct DeviceId {
    /// Its number, as in `/dev/ublkb0`.
    pub id: u32,
    /// What the process that has made it has put down in the kernel, so that another device of this
    /// number is not taken for it.
    pub tag: u64,
}

/// As [`attach`](super::attach), but makes a device that stays when this process is killed: users
/// wait until a process [resumes](resume) it or [removes](remove) it. `keep` is called before
/// anybody can use it, so that it is known to the next process; not with a kernel that lacks this,
/// whose device is removed with its process.
///
/// # Errors
/// As [`attach`](super::attach), and those of `keep`.
pub fn attach_recoverable(
    disk: Arc<dyn BlockDevice>,
    options: UblkOptions,
    tag: u64,
    keep: impl FnOnce(&DeviceId) -> io::Result<()>,
) -> io::Result<Ublk> {
    attach_with(disk, options, Some(tag), keep)
}

/// Serves a recoverable device whose process has ended or has [left](Ublk::hand_over) it, with the
/// same disk. It is paused: users wait until [`Ublk::unpause`]. Until [`Ublk::own`] it is left
/// again when it is dropped. `options.depth` is ignored.
///
/// # Errors
/// NotFound if there is no such device; ResourceBusy if it has a server still; InvalidInput if the
/// disk is shorter than the device or has other properties; as [`attach`](super::attach) otherwise.
pub fn resume(
    disk: Arc<dyn BlockDevice>,
    options: UblkOptions,
    device: &DeviceId,
) -> io::Result<Ublk> {
    let mut limits = disk.limits();
    limits.read_only |= options.read_only;
    let mut control = Control::open()?;
    let info = when_quiesced(&mut control, device)?;
    let params = control.params(device.id)?;
    if !abi::can_continue(&params, &abi::params(&limits, info.max_io)) {
        let text = "the disk is shorter than its block device, or has other properties by now";
        return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
    }
    // Its character device may be closed a moment after it is quiesced.
    until(|| match control.start_recovery(device.id) {
        Err(error) if error.kind() == io::ErrorKind::ResourceBusy => Ok(None),
        done => done.map(Some),
    })?;
    let mut ublk = Ublk::new(device.id, Some(device.tag), control);
    *lock(&ublk.end) = End::Left;
    ublk.serve(disk, info.depth, info.max_io)?;
    // Nobody has said yet that this process may have its users.
    ublk.pause();
    lock(&ublk.control).end_recovery(device.id)?;
    Ok(ublk)
}

/// Removes a recoverable device whose process has ended or has left it. Its users get errors.
///
/// # Errors
/// As [`resume`].
pub fn remove(device: &DeviceId) -> io::Result<()> {
    let mut control = Control::open()?;
    when_quiesced(&mut control, device)?;
    drop(Ublk::new(device.id, Some(device.tag), control));
    Ok(())
}

/// Waits until a device has no server; returns its description.
fn when_quiesced(control: &mut Control, device: &DeviceId) -> io::Result<Info> {
    let user = rustix::process::geteuid().as_raw();
    until(|| {
        let info = control.info(device.id).map_err(|error| match error.raw_os_error() {
            Some(libc::ENODEV) => io::ErrorKind::NotFound.into(),
            _ => error,
        })?;
        if info.tag != device.tag || info.owner != user || !info.is_recoverable {
            return Err(io::ErrorKind::NotFound.into());
        }
        if info.state == DevState::Dead {
            // Its process has ended before anybody could use it.
            control.delete(device.id)?;
            return Err(io::ErrorKind::NotFound.into());
        }
        Ok((info.state == DevState::Quiesced).then_some(info))
    })
}

/// Waits for something; `ResourceBusy` if it does not come.
fn until<T>(mut done: impl FnMut() -> io::Result<Option<T>>) -> io::Result<T> {
    let end = Instant::now() + PATIENCE;
    loop {
        if let Some(found) = done()? {
            return Ok(found);
        }
        if Instant::now() >= end {
            return Err(io::ErrorKind::ResourceBusy.into());
        }
        thread::sleep(POLL);
    }
}

impl Ublk {
    /// Returns what another process needs to [`resume`] it; `None` if it is not recoverable.
    pub fn device(&self) -> Option<DeviceId> {
        self.tag.map(|tag| DeviceId { id: self.id, tag })
    }

    /// Gives no more requests to the disk, until [`Ublk::unpause`].
    pub fn pause(&self) {
        self.set(Wanted::Closed);
    }

    /// Tells whether it is paused, and all requests that the disk was given have their answers.
    pub fn is_paused(&self) -> bool {
        self.server.as_ref().is_some_and(|server| server.inbox.is_idle())
    }

    /// Gives requests to the disk again.
    pub fn unpause(&self) {
        self.set(Wanted::Open);
    }

    /// Leaves a recoverable device to another process. Requests that the disk has are waited for;
    /// those that fail from now on, and all others, are given to that process. A device that is not
    /// recoverable is removed, and `None` returned.
    pub fn hand_over(self) -> Option<DeviceId> {
        let device = self.device();
        if device.is_some() {
            *lock(&self.end) = End::Left;
        }
        device
    }

    /// Has a device that was [resumed](resume) removed when it is dropped.
    pub fn own(&self) {
        *lock(&self.end) = End::Removed;
    }

    fn set(&self, wanted: Wanted) {
        if let Some(server) = &self.server {
            server.inbox.set(wanted);
        }
    }

    /// Ends the server without its device.
    pub(super) fn leave(&mut self) {
        let Some(server) = self.server.take() else { return };
        server.inbox.set(Wanted::Left);
        // A panic of the thread was printed when it happened.
        let Ok(memory) = server.thread.join() else { return };
        // The kernel may write to the memory until then.
        let quiesced = until(|| {
            let info = lock(&self.control).info(self.id)?;
            Ok((info.state != DevState::Live).then_some(()))
        });
        if quiesced.is_err() {
            std::mem::forget(memory);
        }
    }
}
