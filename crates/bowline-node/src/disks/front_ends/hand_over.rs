//! Front ends for another process: one that gets them now, or one that resumes them should this one
//! be killed.

use std::{io, sync::Arc, time::Duration};

use bowline_block::front::fuse::Mount;
use bowline_ctl::Errno;
use bowline_rnbd_driver::client::Disk;

use super::{DiskFrontEnds, DiskKey, FrontState};
use crate::{
    disks::{
        HandedFrontEnds, Service, Trouble,
        block_device::DiskBlockDevice,
        ending::{is_durable, is_unflushed},
        kept,
    },
    service_manager::Supervisor,
};

impl DiskFrontEnds {
    /// Tells why the front ends of a disk cannot continue in another process.
    pub fn cannot_hand_over(&self, disk: &str) -> Option<String> {
        let mapped = self.client.disks();
        let state = self.lock();
        if state.is_changed {
            // The name of a disk may be that of another one by now.
            return Some(
                "a command has mapped or unmapped disks, which its options do not say".to_owned(),
            );
        }
        if state.regaining > 0 {
            return Some("it tries to take front ends back still, after a replacement".to_owned());
        }
        match (&mapped[..], state.front_states.get(disk)) {
            ([one], Some(FrontState::Open(front_ends))) if one.local_name() == disk => {
                let ublk = front_ends.ublk.as_ref().and_then(DiskBlockDevice::cannot_hand_over);
                let fuse = || front_ends.fuse.as_ref().and_then(Mount::cannot_hand_over);
                ublk.or_else(|| fuse().map(str::to_owned))
            }
            _ => Some(format!("it has other disks than {disk} by now: unmap them")),
        }
    }

    /// Gives the front ends of a disk away, for another process; they must be of a disk that
    /// [can](Self::cannot_hand_over). Until then, requests that were begun are waited for, and
    /// `waiting` is called again and again.
    ///
    /// # Errors
    /// Requests are not answered in time, and nothing has changed.
    pub fn hand_over(
        &self,
        disk: &str,
        within: Duration,
        waiting: &mut dyn FnMut(),
    ) -> Result<HandedFrontEnds, Trouble> {
        let mut state = self.lock();
        let is_changed = state.is_changed;
        let front = state.front_states.get_mut(disk).filter(|_| !is_changed);
        let Some(FrontState::Open(front_ends)) = front else {
            return Err(Trouble::new(format!("{disk} is being mapped or unmapped"), Errno::EBUSY));
        };
        if !front_ends.pause(within, waiting) {
            let text = format!("requests of {disk} are not answered; is its server there?");
            return Err(Trouble::new(text, Errno::ETIMEDOUT));
        }
        let front_ends = std::mem::take(front_ends);
        state.front_states.remove(disk);
        drop(state);
        let mut handed = front_ends.hand_over();
        if let Some(disk) = self.client.disk(disk) {
            // Only now, since machines were served up to here.
            handed.is_unflushed = Some(is_unflushed(&disk, self.is_inherited(&disk)));
        }
        if let Some(kept) = &handed.kept {
            // The next process may be of a version that does not know the note, and be killed.
            kept::note_unflushed(kept, true);
        }
        Ok(handed)
    }

    /// Tells whether a process before this one has left changes of a disk that are not durable.
    pub(super) fn is_inherited(&self, disk: &Disk) -> bool {
        self.lock().inherited.contains(&DiskKey::of(disk))
    }

    /// Notes for the next process, should this one be killed, that all changes of a disk are
    /// durable, if they are. To be called again and again: with requests in flight it is not known.
    pub fn note_durable(&self, disk: &str) {
        let noted = self.lock().open_of(disk).and_then(|front_ends| front_ends.noted.clone());
        let Some((noted, disk)) = noted.zip(self.client.disk(disk)) else { return };
        let is_inherited = self.is_inherited(&disk);
        noted.withdraw_if(|| is_durable(&disk, is_inherited));
    }

    /// Leaves copies of the front ends of a disk with a service manager, unless it has them: those
    /// that the next process of the service can resume.
    ///
    /// # Errors
    /// Those of the manager, and of the system.
    pub fn keep(&self, disk: &str, service: &Service, supervisor: &Supervisor) -> io::Result<()> {
        let mut state = self.lock();
        let Some(FrontState::Open(front_ends)) = state.front_states.get_mut(disk) else {
            return Ok(());
        };
        let (nbd, fuse) = (front_ends.nbd.as_ref(), front_ends.fuse.as_ref());
        if front_ends.kept.is_some() {
            return Ok(());
        }
        if nbd.is_none() && fuse.is_none() {
            // It may have something that could not be taken back.
            drop(state);
            kept::forget(supervisor);
            return Ok(());
        }
        let kept = Arc::new(kept::state_of(service, fuse.map(Mount::device))?);
        fuse.iter().for_each(|mount| mount.keep_opens(Arc::clone(&kept)));
        let nbd = nbd.map(|server| Arc::clone(server.listener()));
        let fuse = fuse.map(|mount| Arc::clone(mount.kernel()));
        front_ends.noted.iter().for_each(|noted| noted.note_in(&kept));
        front_ends.kept = Some(Arc::clone(&kept));
        drop(state);
        kept::store(supervisor, &kept, nbd.as_deref(), fuse.as_deref())
    }
}
