//! The front ends of one disk: what is done with all of them.

use std::{
    os::fd::OwnedFd,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use bowline_block::front::{fuse::Mount, nbd::NbdServer, vhost_user::VhostUserServer};

use crate::disks::{
    HandedFrontEnds,
    block_device::DiskBlockDevice,
    ending::Users,
    noted::NotedDisk,
    opening::{Lost, Missing},
};

/// How often it is checked whether front ends have paused.
const PAUSE_POLL: Duration = Duration::from_millis(1);

/// The front ends of one disk.
#[derive(Default)]
pub(in crate::disks) struct FrontEnds {
    pub(in crate::disks) nbd: Option<NbdServer>,
    pub(in crate::disks) fuse: Option<Mount>,
    pub(in crate::disks) ublk: Option<DiskBlockDevice>,
    pub(in crate::disks) vhost_user: Option<VhostUserServer>,
    /// A service manager keeps them, together with this state of theirs.
    pub(in crate::disks) kept: Option<Arc<OwnedFd>>,
    /// The disk, if what it is asked to change is noted for the next process.
    pub(in crate::disks) noted: Option<Arc<NotedDisk>>,
    /// Those that could not be taken back.
    pub(in crate::disks) missing: Vec<Missing>,
}

impl FrontEnds {
    /// Disables all front ends if none is in use; returns true if so. They may be disabled already.
    pub(super) fn disable_if_unused(&self) -> bool {
        let unused = self.nbd.as_ref().is_none_or(NbdServer::disable_if_unused)
            && self.fuse.as_ref().is_none_or(Mount::disable_if_unused)
            && self.ublk.as_ref().is_none_or(DiskBlockDevice::disable_if_unused)
            && self.vhost_user.as_ref().is_none_or(VhostUserServer::disable_if_unused);
        if !unused {
            self.enable();
        }
        unused
    }

    /// Makes the front ends take no more requests, and waits until those in progress were answered;
    /// calls `waiting` again and again. Returns false if that takes too long: they take requests
    /// again.
    pub(super) fn pause(&self, within: Duration, waiting: &mut dyn FnMut()) -> bool {
        self.nbd.iter().for_each(NbdServer::pause);
        self.fuse.iter().for_each(Mount::pause);
        self.ublk.iter().for_each(DiskBlockDevice::pause);
        let end = Instant::now() + within;
        loop {
            let is_paused = self.nbd.as_ref().is_none_or(NbdServer::is_paused)
                && self.fuse.as_ref().is_none_or(Mount::is_paused)
                && self.ublk.as_ref().is_none_or(DiskBlockDevice::is_paused);
            if is_paused {
                return true;
            }
            if Instant::now() >= end {
                self.unpause();
                return false;
            }
            waiting();
            thread::sleep(PAUSE_POLL);
        }
    }

    /// Takes requests, again or for the first time.
    pub(super) fn unpause(&self) {
        self.nbd.iter().for_each(NbdServer::unpause);
        self.fuse.iter().for_each(Mount::unpause);
        self.ublk.iter().for_each(DiskBlockDevice::unpause);
    }

    /// Gives away what another process continues with; the rest ends.
    pub(super) fn hand_over(self) -> HandedFrontEnds {
        self.detach();
        let ublk = self.ublk.and_then(DiskBlockDevice::hand_over);
        let ublk = ublk.or_else(|| {
            self.missing.iter().find_map(|missing| match &missing.what {
                Lost::Ublk(_, device) => *device,
                Lost::ForGood | Lost::VhostUser(_) => None,
            })
        });
        let nbd = self.nbd.map(NbdServer::hand_over);
        let fuse = self.fuse.map(Mount::hand_over);
        HandedFrontEnds { nbd, fuse, ublk, kept: self.kept, is_unflushed: None }
    }

    /// Lets go of users that outlive this process: requests that fail from now on are no errors of
    /// virtual machines, which wait for another process that serves them.
    pub(super) fn detach(&self) {
        self.vhost_user.iter().for_each(VhostUserServer::detach);
    }

    /// Adds the users of a disk, the one of its block device included.
    pub(super) fn add_users(&self, disk: &str, users: &mut Users) {
        users.add(disk, self);
        if let Some(ublk) = &self.ublk {
            if !ublk.disable_if_unused() {
                users.add_device(ublk.path());
            }
            ublk.enable();
        }
    }

    /// Takes no more changes, at the end of the process: what was begun is answered.
    pub(super) fn finish(&mut self) {
        self.nbd.iter_mut().for_each(NbdServer::finish);
        self.fuse.iter().for_each(Mount::finish);
        // Machines keep what waits for the next process, before it fails here.
        self.detach();
    }

    /// Tells whether requests are in progress after [`finish`](Self::finish). A block device has
    /// them until it is closed.
    pub(super) fn is_finishing(&self) -> bool {
        self.nbd.as_ref().is_some_and(|nbd| nbd.connections() > 0)
            || self.fuse.as_ref().is_some_and(|mount| !mount.is_unchanging())
    }

    /// Closes all front ends. A block device that could not be taken back is ended, too, unless
    /// another process has it.
    pub(super) fn close(mut self: Box<Self>) {
        let missing = std::mem::take(&mut self.missing);
        drop(self);
        for missing in missing {
            let Lost::Ublk(origin, device) = &missing.what else { continue };
            if let Err(error) = DiskBlockDevice::end(origin, *device) {
                note!("{} stays: {error}", missing.place);
            }
        }
    }

    /// Enables all front ends again.
    pub(super) fn enable(&self) {
        self.nbd.iter().for_each(NbdServer::enable);
        self.fuse.iter().for_each(Mount::enable);
        self.ublk.iter().for_each(DiskBlockDevice::enable);
        self.vhost_user.iter().for_each(VhostUserServer::enable);
    }
}

/// State of the front ends of a disk.
pub(super) enum FrontState {
    /// Being opened: that may take as long as the kernel's first scan of the disk.
    Opening,
    /// Open.
    Open(Box<FrontEnds>),
    /// Being closed, after which the disk is unmapped.
    Closing,
}

impl FrontState {
    /// Takes the front ends, if they are open, and unused or `force` is given.
    pub(super) fn take(&mut self, force: bool) -> Option<Box<FrontEnds>> {
        match self {
            Self::Open(front_ends) if force || front_ends.disable_if_unused() => {
                let front_ends = std::mem::take(front_ends);
                *self = Self::Closing;
                Some(front_ends)
            }
            Self::Opening | Self::Open(_) | Self::Closing => None,
        }
    }
}
