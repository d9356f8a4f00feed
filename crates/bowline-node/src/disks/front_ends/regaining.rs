//! Front ends that could not be taken back at once, since the process that was to continue with
//! them has them for a while longer.

use std::{
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use bowline_rnbd_driver::client::Disk;

use super::{DiskFrontEnds, FrontEnds, FrontState};
use crate::disks::{
    block_device::DiskBlockDevice,
    opening::{Lost, Missing},
};

/// How often it is tried to take back what could not be at first.
const REGAIN_POLL: Duration = Duration::from_millis(50);

impl DiskFrontEnds {
    /// Tries for a while, in a thread of its own, to open front ends that could not be taken back
    /// when the others were: the process that was to continue with them may end only then.
    pub fn regain(self: &Arc<Self>, disk: &Arc<Disk>, within: Duration) {
        let mut state = self.lock();
        let front = state.front_states.get(disk.local_name());
        let is_any = |front_ends: &FrontEnds| {
            front_ends.missing.iter().any(|missing| !matches!(missing.what, Lost::ForGood))
        };
        if !matches!(front, Some(FrontState::Open(front_ends)) if is_any(front_ends)) {
            return;
        }
        state.regaining += 1;
        drop(state);
        note!("{}: what is not taken back is tried again for {within:?}", disk.local_name());
        let (disks, disk) = (Arc::clone(self), Arc::clone(disk));
        let regain = move || {
            let end = Instant::now() + within;
            while disks.regain_once(&disk) && Instant::now() < end {
                thread::sleep(REGAIN_POLL);
            }
            disks.lock().regaining -= 1;
        };
        if let Err(error) = thread::Builder::new().name("regain".to_owned()).spawn(regain) {
            note!("what is not taken back is not tried again: {error}");
            self.lock().regaining -= 1;
        }
    }

    /// Tries once to open what is missing of a disk's front ends. Returns true if that is worth
    /// another attempt.
    fn regain_once(&self, disk: &Arc<Disk>) -> bool {
        let name = disk.local_name();
        let noted_and_missing =
            |front_ends: &mut FrontEnds| (front_ends.noted.clone(), front_ends.missing.clone());
        let found = self.lock().open_of(name).map(noted_and_missing);
        let (noted, missing) = found.unwrap_or_default();
        let opener = self.opener(disk, noted, true);
        let mut is_left = false;
        for Missing { what, place, .. } in missing {
            let (ublk, vhost_user) = match &what {
                Lost::ForGood => continue,
                Lost::Ublk(origin, device) => (opener.ublk(origin, *device).map(Some), Ok(None)),
                Lost::VhostUser(path) => (Ok(None), opener.vhost_user(path).map(Some)),
            };
            let mut state = self.lock();
            // They may have been closed since, and the end waits for this thread.
            let Some(front_ends) = state.open_of(name) else {
                drop(state);
                ublk.into_iter().flatten().for_each(|device| device.own());
                return false;
            };
            let Some(at) = front_ends.missing.iter().position(|missing| missing.place == place)
            else {
                continue;
            };
            match (ublk, vhost_user) {
                (Err(why), _) | (_, Err(why)) => {
                    front_ends.missing[at].why = why;
                    is_left = true;
                }
                (Ok(ublk), Ok(vhost_user)) => {
                    ublk.iter().for_each(DiskBlockDevice::unpause);
                    ublk.iter().for_each(DiskBlockDevice::own);
                    // It may be another one, if the former was removed.
                    let path =
                        ublk.as_ref().map(|device| format!("ublk {}", device.path().display()));
                    note!("{name}: taken back: {}", path.as_ref().unwrap_or(&place));
                    front_ends.ublk = front_ends.ublk.take().or(ublk);
                    front_ends.vhost_user = front_ends.vhost_user.take().or(vhost_user);
                    front_ends.missing.remove(at);
                }
            }
        }
        is_left
    }

    /// Tells whether a disk had front ends, none of which could be taken back.
    pub fn has_lost_all(&self, disk: &str) -> bool {
        let mut state = self.lock();
        state.regaining == 0
            && state.open_of(disk).is_some_and(|front_ends| {
                let FrontEnds { nbd, fuse, ublk, vhost_user, missing, .. } = front_ends;
                !missing.is_empty()
                    && nbd.is_none()
                    && fuse.is_none()
                    && ublk.is_none()
                    && vhost_user.is_none()
            })
    }
}
