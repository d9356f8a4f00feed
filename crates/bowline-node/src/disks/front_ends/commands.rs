//! Commands of the control tree, which map and unmap disks with their front ends.

use std::{
    thread,
    time::{Duration, Instant},
};

use bowline_block::BlockDevice;
use bowline_ctl::{Errno, Refused};
use bowline_rnbd_driver::{
    client::MapOptions,
    tree::{DiskInfo, Disks, MapSpec},
};

use super::{
    DiskFrontEnds, DiskKey, DiskNotice, FrontEnds, FrontState, Mapping, POLL_INTERVAL, map_options,
    unmapping,
};
use crate::disks::ending::Users;

/// How long an unmap waits for users of a disk: the kernel reports the end of a use a moment after
/// the program has closed its file.
const CLOSE_GRACE: Duration = Duration::from_millis(200);
/// How long opening front ends may take: a block device takes the longest.
const OPEN_TIMEOUT: Duration = Duration::from_secs(6);

impl DiskFrontEnds {
    /// Counts a command until the returned guard is dropped.
    fn command(&self) -> impl Drop {
        struct Counted<'a>(&'a DiskFrontEnds);
        impl Drop for Counted<'_> {
            fn drop(&mut self) {
                self.0.lock().commands -= 1;
            }
        }
        let mut state = self.lock();
        state.commands += 1;
        state.is_changed = true;
        drop(state);
        Counted(self)
    }

    /// Takes the front ends of a disk, if they are unused or `force` is given [NB-37]. With
    /// `force`, requests that wait for a lost session fail, also those that delay an unmap in
    /// progress or the opening of front ends.
    fn take(&self, disk: &str, force: bool) -> Result<Box<FrontEnds>, Errno> {
        let opened = Instant::now() + OPEN_TIMEOUT;
        let mut left = None;
        loop {
            let mut state = self.lock();
            let mapped = self.client.disk(disk).ok_or(Errno::ENODEV)?;
            let (taken, end) = match state.front_states.get_mut(disk) {
                Some(FrontState::Closing) => (Some(Err(Errno::EALREADY)), opened),
                // It is being mapped, and its front ends are opened next.
                None | Some(FrontState::Opening) => (None, opened),
                Some(front) => {
                    let left = left.get_or_insert_with(|| Instant::now() + CLOSE_GRACE);
                    (front.take(force).map(Ok), *left)
                }
            };
            drop(state);
            if force {
                if let Some(Ok(front_ends)) = &taken {
                    front_ends.detach();
                }
                mapped.fail_fast();
            }
            if let Some(taken) = taken {
                return taken;
            }
            if Instant::now() >= end {
                return Err(Errno::EBUSY);
            }
            thread::sleep(POLL_INTERVAL);
        }
    }

    /// Returns how a command wants its disk mapped, if it says so or has done so before.
    fn wanted(&self, spec: &MapSpec) -> Result<Option<Mapping>, Errno> {
        if spec.options.is_empty() {
            let (session, device) = (spec.session.clone(), spec.device.clone());
            return Ok(self.lock().recall(&DiskKey { session, device }));
        }
        let (how, front_ends) = map_options(&spec.options).map_err(|_| Errno::EINVAL)?;
        let defaults = self.client.defaults();
        let on_path = defaults.on_path.clone();
        let options = MapOptions { on_path, ..how.options(&spec.session, defaults.port) };
        Ok(Some(Mapping { options, front_ends }))
    }
}

impl Disks for DiskFrontEnds {
    fn map(&self, spec: &MapSpec) -> Result<(), Errno> {
        let _command = self.command();
        let wanted = self.wanted(spec)?;
        let options = wanted.as_ref().map_or(self.client.defaults(), |wanted| &wanted.options);
        let disk = self.client.map_spec(spec, options).map_err(|error| error.errno())?;
        let opened = match wanted {
            Some(mapping) => {
                self.remember(&disk, mapping.clone());
                self.open(&disk, &mapping.front_ends)
            }
            None => self.open(&disk, &self.options.beside(disk.local_name())),
        };
        opened.map_err(|error| {
            // Without its front ends the disk is of no use; the caller gets the error.
            let _ = self.client.unmap(&disk);
            error.errno
        })
    }

    fn disks(&self) -> Vec<DiskInfo> {
        Disks::disks(&*self.client)
    }

    fn unmap(&self, disk: &str, force: bool) -> Result<(), Errno> {
        let _command = self.command();
        // Front ends are closed first: the kernel writes its cached data through them, while there
        // is a session.
        self.take(disk, force)?.close();
        let unmapped = Disks::unmap(&*self.client, disk, force);
        let mut state = self.lock();
        // Another disk may have the name already.
        if matches!(state.front_states.get(disk), Some(FrontState::Closing)) {
            state.front_states.remove(disk);
            if unmapped.is_ok() {
                self.notify(disk, DiskNotice::Unmapped);
            }
        }
        unmapped
    }

    /// A disk that is in use does not become smaller, unless `force` is given: its users would lose
    /// what they have behind the new end [NB-74].
    fn resize(&self, disk: &str, sectors: u64, force: bool) -> Result<(), Refused> {
        let mapped = self.client.disk(disk).ok_or(Errno::ENODEV)?;
        let is_open =
            mapped.info().is_some_and(|info| info.state == bowline_rnbd::client::State::Open);
        let bytes = sectors.saturating_mul(512);
        if force || !is_open || bytes >= mapped.limits().bytes {
            return Disks::resize(&*self.client, disk, sectors, force);
        }
        let end = Instant::now() + CLOSE_GRACE;
        loop {
            let state = self.lock();
            if state.closed {
                return Err(unmapping().errno.into());
            }
            let front_ends = match state.front_states.get(disk) {
                Some(FrontState::Open(front_ends)) => Some(front_ends),
                Some(FrontState::Opening) => None,
                Some(FrontState::Closing) | None => return Ok(mapped.resize(bytes)?),
            };
            if let Some(front_ends) = front_ends.filter(|all| all.disable_if_unused()) {
                // With the lock held, so that nobody else disables or enables them.
                let resized = mapped.resize(bytes);
                front_ends.enable();
                return Ok(resized?);
            }
            if Instant::now() >= end {
                let why = if let Some(front_ends) = front_ends {
                    let mut users = Users::default();
                    front_ends.add_users(disk, &mut users);
                    drop(state);
                    format!("the disk is in use: {}", users.line())
                } else {
                    "front ends of the disk are being opened".to_owned()
                };
                return Err(Refused { errno: Errno::EBUSY, why: Some(why) });
            }
            drop(state);
            thread::sleep(POLL_INTERVAL);
        }
    }

    fn remap(&self, disk: &str) -> Result<(), Errno> {
        Disks::remap(&*self.client, disk)
    }
}
