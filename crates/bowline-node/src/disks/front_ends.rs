//! Front ends of mapped disks, for software that knows nothing of RNBD.

mod regaining;

use std::{
    collections::{BTreeMap, BTreeSet},
    ffi::OsString,
    fmt, io,
    os::{fd::OwnedFd, unix::net::UnixListener},
    path::{self, Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc::Sender},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use bowline_block::{
    BlockDevice, DiskEvent,
    front::{fuse::Mount, nbd::NbdServer, vhost_user::VhostUserServer},
};
use bowline_ctl::{Errno, Refused, fusefs};
use bowline_rnbd_driver::{
    client::{Client, Disk, MapOptions},
    tree::{DiskInfo, Disks, MapSpec},
};
use bowline_rtrs_driver::tree::ClientSession;
use serde::{Deserialize, Serialize};

use super::{
    HandedFrontEnds, Trouble,
    block_device::{DiskBlockDevice, DiskOrigin},
    client::ClientObjects,
    ending::{
        CLOSE_PATIENCE, FINISH_PATIENCE, Unserved, Users, is_durable, is_unflushed, unflushed,
    },
    kept,
    mapping::MapConfig,
    noted::NotedDisk,
    opening::{Lost, Missing, Opener, PreparedFrontEnds},
    replace::Service,
};
use crate::{Failure, Outcome, config::entry::Entry, service_manager::Supervisor};

/// How long an unmap waits for users of a disk: the kernel reports the end of a use a moment after
/// the program has closed its file.
const CLOSE_GRACE: Duration = Duration::from_millis(200);
/// How long opening front ends may take: a block device takes the longest.
const OPEN_TIMEOUT: Duration = Duration::from_secs(6);
/// Most disks whose front ends are remembered after they were unmapped.
const REMEMBERED_MAX: usize = 1024;
/// How often it is checked whether front ends have paused.
const PAUSE_POLL: Duration = Duration::from_millis(1);
/// How often the state is checked meanwhile.
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// Which front ends a disk has.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(default, rename_all = "kebab-case")]
pub struct FrontEndConfig {
    /// Unix socket at which the disk is served with the NBD protocol.
    pub nbd: Option<PathBuf>,
    /// Folder in which the disk is a file, by FUSE.
    pub fuse: Option<PathBuf>,
    /// Whether the disk is a block device of this machine.
    pub ublk: bool,
    /// Unix socket at which the disk is served to virtual machines, by vhost-user.
    pub vhost_user: Option<PathBuf>,
}

impl FrontEndConfig {
    /// Returns a place that these front ends and others both want.
    pub fn shared_with(&self, other: &Self) -> Option<&Path> {
        let sockets = |config: &'_ Self| [config.nbd.clone(), config.vhost_user.clone()];
        let theirs = sockets(other);
        let ours = [&self.nbd, &self.vhost_user].into_iter().flatten();
        let socket = ours
            .map(PathBuf::as_path)
            .find(|path| theirs.iter().flatten().any(|other| other == path));
        let folder = self.fuse.as_deref().filter(|folder| other.fuse.as_deref() == Some(folder));
        socket.or(folder)
    }

    /// Returns the same places, whatever the working folder.
    ///
    /// # Errors
    /// A place is empty, or there is no working folder.
    pub fn absolute(&self) -> Outcome<Self> {
        let absolute = |place: &Option<PathBuf>| {
            let made = place.as_ref().map(path::absolute).transpose();
            made.map_err(|error| Failure::usage(format!("the place of a front end: {error}")))
        };
        Ok(Self {
            nbd: absolute(&self.nbd)?,
            fuse: absolute(&self.fuse)?,
            ublk: self.ublk,
            vhost_user: absolute(&self.vhost_user)?,
        })
    }

    /// Removes what a process has left at these places that has had them: a socket at which nobody
    /// listens, a mount that nobody serves. `listener`: nobody will accept what comes there, though
    /// a service manager may have a copy.
    pub fn clear(&self, listener: Option<&UnixListener>) {
        // An error means that it does not listen.
        listener.map(|listener| rustix::net::shutdown(listener, rustix::net::Shutdown::Both));
        if let Some(Ok((_listener, file))) = self.nbd.as_deref().map(bowline_ctl::listen) {
            file.remove();
        }
        self.fuse.as_deref().map(fusefs::unmount);
    }

    /// Returns the front ends of another disk, with its local name appended to each place.
    fn beside(&self, name: &str) -> Self {
        let sibling = |path: &PathBuf| sibling_path(path, name);
        Self {
            nbd: self.nbd.as_ref().map(sibling),
            fuse: self.fuse.as_ref().map(sibling),
            ublk: self.ublk,
            vhost_user: self.vhost_user.as_ref().map(sibling),
        }
    }
}

/// Parses the options of a command that says how a disk is mapped [NB-63]; the access mode has a
/// word of its own there.
pub fn map_options(words: &[String]) -> Result<(MapConfig, FrontEndConfig), String> {
    let mut entry = Entry::of_words(words.iter().map(String::as_str))?;
    if entry.has("access") {
        return Err("the access mode is a word of its own: ro, rw or migration".to_owned());
    }
    let options = (entry.group()?, entry.group()?);
    entry.finish().map(|()| options)
}

/// The front ends of one disk.
#[derive(Default)]
pub(super) struct FrontEnds {
    pub(super) nbd: Option<NbdServer>,
    pub(super) fuse: Option<Mount>,
    pub(super) ublk: Option<DiskBlockDevice>,
    pub(super) vhost_user: Option<VhostUserServer>,
    /// A service manager keeps them, together with this state of theirs.
    pub(super) kept: Option<Arc<OwnedFd>>,
    /// The disk, if what it is asked to change is noted for the next process.
    pub(super) noted: Option<Arc<NotedDisk>>,
    /// Those that could not be taken back.
    pub(super) missing: Vec<Missing>,
}

impl FrontEnds {
    /// Disables all front ends if none is in use; returns true if so. They may be disabled already.
    fn disable_if_unused(&self) -> bool {
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
    fn pause(&self, within: Duration, waiting: &mut dyn FnMut()) -> bool {
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
    fn unpause(&self) {
        self.nbd.iter().for_each(NbdServer::unpause);
        self.fuse.iter().for_each(Mount::unpause);
        self.ublk.iter().for_each(DiskBlockDevice::unpause);
    }

    /// Gives away what another process continues with; the rest ends.
    fn hand_over(self) -> HandedFrontEnds {
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
    fn detach(&self) {
        self.vhost_user.iter().for_each(VhostUserServer::detach);
    }

    /// Adds the users of a disk, the one of its block device included.
    fn add_users(&self, disk: &str, users: &mut Users) {
        users.add(disk, self);
        if let Some(ublk) = &self.ublk {
            if !ublk.disable_if_unused() {
                users.add_device(ublk.path());
            }
            ublk.enable();
        }
    }

    /// Takes no more changes, at the end of the process: what was begun is answered.
    fn finish(&mut self) {
        self.nbd.iter_mut().for_each(NbdServer::finish);
        self.fuse.iter().for_each(Mount::finish);
        // Machines keep what waits for the next process, before it fails here.
        self.detach();
    }

    /// Tells whether requests are in progress after [`finish`](Self::finish). A block device has
    /// them until it is closed.
    fn is_finishing(&self) -> bool {
        self.nbd.as_ref().is_some_and(|nbd| nbd.connections() > 0)
            || self.fuse.as_ref().is_some_and(|mount| !mount.is_unchanging())
    }

    /// Closes all front ends. A block device that could not be taken back is ended, too, unless
    /// another process has it.
    fn close(mut self: Box<Self>) {
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
    fn enable(&self) {
        self.nbd.iter().for_each(NbdServer::enable);
        self.fuse.iter().for_each(Mount::enable);
        self.ublk.iter().for_each(DiskBlockDevice::enable);
        self.vhost_user.iter().for_each(VhostUserServer::enable);
    }
}

/// State of the front ends of a disk.
enum FrontState {
    /// Being opened: that may take as long as the kernel's first scan of the disk.
    Opening,
    /// Open.
    Open(Box<FrontEnds>),
    /// Being closed, after which the disk is unmapped.
    Closing,
}

impl FrontState {
    /// Takes the front ends, if they are open, and unused or `force` is given.
    fn take(&mut self, force: bool) -> Option<Box<FrontEnds>> {
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

/// Identity of a disk, independent of its local name: its session, and its name on the server.
#[derive(Clone, Debug, Eq, Ord, PartialEq, PartialOrd)]
struct DiskKey {
    session: String,
    device: String,
}

impl DiskKey {
    fn of(disk: &Disk) -> Self {
        Self { session: disk.session_name().to_owned(), device: disk.name().to_owned() }
    }
}

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

#[derive(Default)]
struct State {
    /// Disks that have had front ends, and those that they were given. A program that returns to
    /// such a path expects this disk, should it be unmapped and mapped again.
    remembered: Vec<(DiskKey, Mapping)>,
    /// State of each disk's front ends, by its local name.
    front_states: BTreeMap<String, FrontState>,
    /// Number of tree commands in progress that map or unmap disks.
    commands: usize,
    /// There was such a command.
    is_changed: bool,
    /// Disks that another process had before, which may have answered changes of them that no
    /// flush had made durable.
    inherited: BTreeSet<DiskKey>,
    /// All disks are unmapped for good.
    closed: bool,
    /// Number of disks whose missing front ends are tried again.
    regaining: usize,
    /// What was not made durable of disks whose front ends were being opened then.
    unserved: Unserved,
}

/// How a disk was mapped; a command that does not say more maps it so again.
#[derive(Clone, Debug)]
pub struct Mapping {
    /// Options but session and paths.
    pub options: MapOptions,
    /// Its front ends.
    pub front_ends: FrontEndConfig,
}

impl State {
    /// The front ends of a disk are not being opened any more, and not open either.
    fn end_opening(&mut self, disk: &str) {
        if matches!(self.front_states.get(disk), Some(FrontState::Opening)) {
            self.front_states.remove(disk);
        }
    }

    /// Returns the front ends of a disk if they are open, and are to be.
    fn open_of(&mut self, disk: &str) -> Option<&mut FrontEnds> {
        match self.front_states.get_mut(disk) {
            Some(FrontState::Open(front_ends)) if !self.closed => Some(front_ends),
            _ => None,
        }
    }

    fn open(&self) -> impl Iterator<Item = (&String, &FrontEnds)> {
        self.front_states.iter().filter_map(|(name, front)| match front {
            FrontState::Open(front_ends) => Some((name, &**front_ends)),
            FrontState::Opening | FrontState::Closing => None,
        })
    }

    fn remember(&mut self, disk: DiskKey, mapping: Mapping) {
        self.remembered.retain(|(known, _)| *known != disk);
        if self.remembered.len() == REMEMBERED_MAX {
            self.remembered.remove(0);
        }
        self.remembered.push((disk, mapping));
    }

    fn recall(&self, disk: &DiskKey) -> Option<Mapping> {
        let known = self.remembered.iter().find(|(known, _)| known == disk);
        known.map(|(_, mapping)| mapping.clone())
    }
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
    fn is_inherited(&self, disk: &Disk) -> bool {
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

    /// Makes requests fail while the session is lost, so that closing front ends, by commands in
    /// progress too, does not wait for it.
    pub fn fail_fast(&self) {
        self.lock().open().for_each(|(_, front_ends)| front_ends.detach());
        self.client.disks().iter().for_each(|disk| disk.fail_fast());
    }

    /// Says who is cut off by the end, lets the requests that were sent be answered, and makes
    /// requests fail that wait for a server that is not connected. No front end is opened and no
    /// change is taken from then on. Returns what was not served.
    pub fn finish(&self) -> Unserved {
        let mut users = Users::default();
        let mut state = self.lock();
        state.closed = true;
        state.open().for_each(|(name, front_ends)| users.add(name, front_ends));
        drop(state);
        users.tell();
        let mut machines = Vec::new();
        let mut state = self.lock();
        for (name, front) in &mut state.front_states {
            if let FrontState::Open(front_ends) = front {
                front_ends.finish();
                if front_ends.vhost_user.is_some() {
                    machines.push(name.clone());
                }
            }
        }
        drop(state);
        let mut unserved = Unserved::with_machines(machines);
        let is_in_use = |disk: &str| {
            self.lock().open().any(|(name, front)| name == disk && front.is_finishing())
        };
        let end = Instant::now() + FINISH_PATIENCE;
        unserved.finish(&self.client.disks(), end, is_in_use);
        unserved
    }

    /// Closes all front ends, makes durable what was written, and unmaps all disks. Waits for
    /// commands in progress, since front ends that they open would be left behind.
    pub fn close(&self, unserved: &mut Unserved) {
        self.close_all(unserved);
        let mut state = self.lock();
        unserved.append(std::mem::take(&mut state.unserved));
        drop(state);
        unserved.flush(&self.client.disks(), |disk| self.is_inherited(disk));
        self.client.close();
    }

    /// As [`close`](Self::close), but leaves it to another process to make anything durable: that
    /// has the front ends.
    pub fn leave(&self) {
        let mut unserved = Unserved::default();
        self.close_all(&mut unserved);
        unserved.tell();
        self.client.close();
    }

    /// Returns a line for each disk of which something may be lost if the process ends now.
    pub fn unflushed(&self) -> Vec<String> {
        unflushed(&self.client.disks(), |disk| self.is_inherited(disk))
    }

    /// Closes all front ends, at the same time: each may wait for the kernel or for its users.
    fn close_all(&self, unserved: &mut Unserved) {
        let end = Instant::now() + CLOSE_PATIENCE;
        let mut closing: Vec<(String, JoinHandle<()>)> = Vec::new();
        loop {
            self.fail_fast();
            let mut state = self.lock();
            state.closed = true;
            let mut open = Vec::new();
            let is_over = Instant::now() >= end;
            // A thread that has just taken one back leaves it by itself.
            let may_close = state.regaining == 0 || is_over;
            for (name, front) in std::mem::take(&mut state.front_states) {
                match front {
                    FrontState::Open(front_ends) if may_close => open.push((name, front_ends)),
                    FrontState::Open(_) | FrontState::Opening => {
                        state.front_states.insert(name, front);
                    }
                    FrontState::Closing => {}
                }
            }
            let is_quiet = state.commands == 0 && state.front_states.is_empty();
            if is_over {
                state.front_states.clear();
            }
            drop(state);
            for (name, front_ends) in open {
                let missing = front_ends.missing.iter();
                unserved.extend(missing.map(|missing| format!("{name}: {missing}")));
                let close = thread::Builder::new().name("close".to_owned());
                // Without a thread they are closed here, since nobody has them any more.
                closing
                    .extend(close.spawn(|| front_ends.close()).ok().map(|thread| (name, thread)));
            }
            closing.retain(|(_, thread)| !thread.is_finished());
            if is_over || is_quiet && closing.is_empty() {
                break;
            }
            thread::sleep(POLL_INTERVAL);
        }
        let late = closing.into_iter();
        unserved.extend(
            late.map(|(name, _)| format!("{name}: its front ends were not closed in time")),
        );
    }
}

/// Why nothing is mapped at the end of the process.
fn unmapping() -> Trouble {
    Trouble::new("all disks are being unmapped", Errno::ENODEV)
}

/// Returns the path of a front end of another disk.
fn sibling_path(path: &Path, name: &str) -> PathBuf {
    let mut text: OsString = path.as_os_str().to_owned();
    text.push(".");
    text.push(name);
    text.into()
}

impl ClientObjects for DiskFrontEnds {
    fn sessions(&self) -> Vec<Arc<dyn ClientSession>> {
        let all = self.client.sessions().into_iter();
        all.map(|session| session as Arc<dyn ClientSession>).collect()
    }
}

impl DiskFrontEnds {
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

#[cfg(test)]
mod tests {
    use bowline_rnbd::client::Outage;

    use super::*;

    #[test]
    fn front_ends_of_later_disks_have_sibling_paths() {
        let path = sibling_path(Path::new("/run/disk.sock"), "rnbd1");
        assert_eq!(path, Path::new("/run/disk.sock.rnbd1"));
    }

    #[test]
    fn a_disk_comes_back_as_it_was_mapped() {
        let which = |session: &str, device: &str| DiskKey {
            session: session.into(),
            device: device.into(),
        };
        let at = |place: &str| Mapping {
            options: MapOptions::new("s"),
            front_ends: FrontEndConfig { nbd: Some(place.into()), ..FrontEndConfig::default() },
        };
        let mut state = State::default();
        state.remember(which("s1", "a"), at("/a"));
        state.remember(which("s1", "b"), at("/b"));
        state.remember(which("s1", "a"), at("/c"));
        let nbd = |state: &State, session, device| {
            state.recall(&which(session, device)).and_then(|mapping| mapping.front_ends.nbd)
        };
        assert_eq!(nbd(&state, "s1", "a"), Some("/c".into()));
        assert_eq!(nbd(&state, "s1", "b"), Some("/b".into()));
        assert_eq!(nbd(&state, "s2", "a"), None);
        for number in 0..REMEMBERED_MAX {
            state.remember(which("s3", &number.to_string()), at("/d"));
        }
        assert_eq!((state.remembered.len(), nbd(&state, "s1", "b")), (REMEMBERED_MAX, None));
    }

    #[test]
    fn commands_say_how_a_disk_is_mapped() {
        // tests [NB-63]
        let options = |words: &[&str]| {
            let words: Vec<String> = words.iter().map(|word| (*word).to_owned()).collect();
            map_options(&words)
        };
        let (how, found) = options(&["nbd=/run/a.sock", "outage=fail", "ublk=true"]).unwrap();
        assert_eq!(how.outage, Outage::FailFast);
        assert_eq!(found.nbd.as_deref(), Some(Path::new("/run/a.sock")));
        assert!(found.ublk && found.fuse.is_none());
        for word in ["nbd", "x=y", "access=ro", "outage=never", "ublk=2"] {
            assert!(options(&[word]).is_err(), "{word}");
        }
    }
}
