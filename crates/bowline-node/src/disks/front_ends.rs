//! Front ends of mapped disks, for software that knows nothing of RNBD.

mod commands;
mod config;
mod end;
mod hand_over;
mod one_disk;
mod regaining;
mod state;

use std::{
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc::Sender},
    time::Duration,
};

use bowline_block::{BlockDevice, DiskEvent};
use bowline_ctl::Errno;
use bowline_rnbd_driver::client::{Client, Disk};
use bowline_rtrs_driver::tree::ClientSession;

pub use config::{FrontEndConfig, map_options};
pub(super) use one_disk::FrontEnds;
pub use state::Mapping;

use one_disk::FrontState;
use state::{DiskKey, State};

use super::{
    HandedFrontEnds, Trouble,
    block_device::{DiskBlockDevice, DiskOrigin},
    client::ClientObjects,
    ending::Unserved,
    kept,
    noted::NotedDisk,
    opening::{Opener, PreparedFrontEnds},
};

/// How often the state is checked by who waits for it.
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// An event of a disk that is reported.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum DiskNotice {
    /// The disk is mapped, and its front ends are open.
    Mapped {
        /// Name of the disk on the server.
        device: String,
        /// Its size.
        bytes: u64,
        /// Its local name, and the locations of its front ends.
        places: Vec<String>,
    },
    /// An event of the disk.
    Changed(DiskEvent),
    /// A virtual machine breaks the rules of its disk, and why.
    Trouble(String),
    /// A command has unmapped the disk.
    Unmapped,
}

/// The disks of a client with the front ends of each. Commands of the control tree open and close
/// front ends too.
pub struct DiskFrontEnds {
    client: Arc<Client>,
    options: FrontEndConfig,
    /// A service manager is to keep them, should this process be killed.
    are_kept: bool,
    state: Mutex<State>,
    /// Receives events of disks, by their local names.
    notices: Sender<(String, DiskNotice)>,
}

impl fmt::Debug for DiskFrontEnds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DiskFrontEnds").finish_non_exhaustive()
    }
}

impl DiskFrontEnds {
    /// Manages front ends for the disks of a client. Events of a disk are sent to `notices` once
    /// its front ends are open.
    pub fn new(
        client: Arc<Client>,
        options: FrontEndConfig,
        notices: Sender<(String, DiskNotice)>,
    ) -> Arc<Self> {
        let (are_kept, state) = (false, Mutex::default());
        Arc::new(Self { client, options, are_kept, state, notices })
    }

    /// As [`new`](Self::new); front ends are such that a service manager can [keep](Self::keep)
    /// them.
    pub fn new_keepable(
        client: Arc<Client>,
        options: FrontEndConfig,
        notices: Sender<(String, DiskNotice)>,
    ) -> Arc<Self> {
        let (are_kept, state) = (true, Mutex::default());
        Arc::new(Self { client, options, are_kept, state, notices })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the client.
    pub const fn client(&self) -> &Arc<Client> {
        &self.client
    }

    /// Remembers how a disk was mapped, should it be unmapped and mapped again.
    pub fn remember(&self, disk: &Disk, mapping: Mapping) {
        self.lock().remember(DiskKey::of(disk), mapping);
    }

    /// Opens front ends of a disk, and reports their locations. Those of other disks may be opened
    /// and closed meanwhile.
    pub fn open(&self, disk: &Arc<Disk>, front_ends: &FrontEndConfig) -> Result<(), Trouble> {
        let prepared = self.prepare(disk, front_ends, HandedFrontEnds::default(), false)?;
        self.begin(disk, prepared)
    }

    /// As [`open`](Self::open), but continues with what another process has
    /// [handed over](Self::hand_over), and leaves its users alone until [`begin`](Self::begin).
    /// What is dropped before that is left to whoever has copies of it.
    ///
    /// With `takes_back` it was this process that has handed them over, or one before it that was
    /// killed. Then a failure of one stops no other: it is reported, and [`regain`](Self::regain)
    /// tries again.
    pub fn prepare(
        &self,
        disk: &Arc<Disk>,
        front_ends: &FrontEndConfig,
        handed: HandedFrontEnds,
        takes_back: bool,
    ) -> Result<PreparedFrontEnds, Trouble> {
        let name = disk.local_name();
        let is_said = handed.is_unflushed.is_some();
        let may_be_unflushed = handed.may_be_unflushed();
        self.begin_opening(disk, may_be_unflushed)?;
        let kept = handed.kept.as_ref();
        if let Some(kept) = kept.filter(|_| may_be_unflushed) {
            // The former process may be of a version that does not know the note.
            kept::note_unflushed(kept, true);
        }
        let is_noted = self.are_kept || kept.is_some();
        let noted = is_noted.then(|| NotedDisk::new(disk, kept));
        let opened = self.opener(disk, noted, takes_back).open(front_ends, handed);
        let prepared = opened.inspect_err(|_| self.lock().end_opening(name))?;
        if !is_said && prepared.front_ends.ublk.as_ref().is_some_and(DiskBlockDevice::is_orphan) {
            self.lock().inherited.insert(DiskKey::of(disk));
        }
        prepared.front_ends.missing.iter().for_each(|missing| note!("{name}: {missing}"));
        Ok(prepared)
    }

    fn opener<'a>(
        &'a self,
        disk: &'a Arc<Disk>,
        noted: Option<Arc<NotedDisk>>,
        takes_back: bool,
    ) -> Opener<'a> {
        let (are_kept, notices) = (self.are_kept, &self.notices);
        Opener { disk, noted, origin: self.origin(disk), are_kept, takes_back, notices }
    }

    /// Notes that front ends of a disk are being opened; with `is_inherited`, a process before this
    /// one has left changes that are not durable.
    pub(super) fn begin_opening(&self, disk: &Disk, is_inherited: bool) -> Result<(), Trouble> {
        let mut state = self.lock();
        if state.closed {
            return Err(unmapping());
        }
        if is_inherited {
            state.inherited.insert(DiskKey::of(disk));
        }
        let name = disk.local_name();
        if let Some(FrontState::Closing) =
            state.front_states.insert(name.to_owned(), FrontState::Opening)
        {
            // The unmap of the last disk of this name has not ended yet.
            self.notify(name, DiskNotice::Unmapped);
        }
        Ok(())
    }

    /// Gives up front ends that were [prepared](Self::prepare) and are dropped before
    /// [`begin`](Self::begin).
    pub fn abandon(&self, disk: &Disk) {
        self.lock().end_opening(disk.local_name());
    }

    /// Serves the users of front ends that were [prepared](Self::prepare), and reports their
    /// locations; unless all disks are being unmapped since.
    pub fn begin(&self, disk: &Arc<Disk>, prepared: PreparedFrontEnds) -> Result<(), Trouble> {
        let name = disk.local_name();
        let PreparedFrontEnds { front_ends, places } = prepared;
        let mut state = self.lock();
        let is_closed = state.closed;
        let front =
            state.front_states.get_mut(name).filter(|front| matches!(front, FrontState::Opening));
        let Some(front) = front.filter(|_| !is_closed) else {
            let is_inherited = state.inherited.contains(&DiskKey::of(disk));
            drop(state);
            let machines = front_ends.vhost_user.iter().map(|_| name.to_owned()).collect();
            // Clients may have come to its socket, and written.
            drop(front_ends);
            let mut unserved = Unserved::with_machines(machines);
            unserved.flush(&[Arc::clone(disk)], |_| is_inherited);
            let mut state = self.lock();
            state.unserved.append(unserved);
            state.end_opening(name);
            return Err(unmapping());
        };
        front_ends.unpause();
        // Now this process has it: it is removed at the end.
        front_ends.ublk.iter().for_each(DiskBlockDevice::own);
        *front = FrontState::Open(Box::new(front_ends));
        // With the lock held, so that it is the first notice of the disk.
        let (device, bytes) = (disk.name().to_owned(), disk.limits().bytes);
        self.notify(name, DiskNotice::Mapped { device, bytes, places });
        let (notices, local_name) = (self.notices.clone(), name.to_owned());
        disk.on_change(Box::new(move |event| {
            // The receiver is gone when the process ends.
            let _ = notices.send((local_name.clone(), DiskNotice::Changed(event)));
        }));
        Ok(())
    }

    /// Returns where a disk comes from.
    fn origin(&self, disk: &Disk) -> DiskOrigin {
        let session = disk.session_name().to_owned();
        let paths = self.client.session(&session).map(|session| ClientSession::paths(&*session));
        let servers = paths.into_iter().flatten().map(|path| path.dst).collect();
        DiskOrigin { session, device: disk.name().to_owned(), servers }
    }

    /// Tells whether a disk has front ends.
    pub fn has(&self, disk: &str) -> bool {
        self.lock().front_states.contains_key(disk)
    }

    fn notify(&self, disk: &str, notices: DiskNotice) {
        // The receiver is gone when the process ends.
        let _ = self.notices.send((disk.to_owned(), notices));
    }

    /// Reports whether disks are mapped, or a command is in progress.
    pub fn is_needed(&self) -> bool {
        let state = self.lock();
        state.commands > 0 || !state.front_states.is_empty()
    }
}

/// Why nothing is mapped at the end of the process.
fn unmapping() -> Trouble {
    Trouble::new("all disks are being unmapped", Errno::ENODEV)
}

impl ClientObjects for DiskFrontEnds {
    fn sessions(&self) -> Vec<Arc<dyn ClientSession>> {
        let all = self.client.sessions().into_iter();
        all.map(|session| session as Arc<dyn ClientSession>).collect()
    }
}
