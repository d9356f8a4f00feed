//! Doors in front of mapped disks, for software that knows nothing of RNBD.

use std::{
    collections::BTreeMap,
    ffi::OsString,
    fmt, io,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc::Sender},
    thread,
    time::{Duration, Instant},
};

use bowline_block::{
    BlockDevice, DiskEvent,
    front::{
        fuse::{self, FuseOptions, Mount},
        nbd::{self, NbdOptions, NbdServer},
        ublk::{self, Ublk, UblkOptions},
    },
};
use bowline_ctl::{Errno, fusefs};
use bowline_rnbd_driver::{
    client::{Client, Disk},
    tree::{DiskInfo, Disks, MapSpec},
};

use super::serving::no_mount;

/// How long somebody who uses a disk may take to be gone: the system tells of the end of a use a
/// moment after the program has closed its file.
const LEAVING: Duration = Duration::from_millis(200);
/// How long doors may take to be opened: a block device takes the longest.
const OPENING: Duration = Duration::from_secs(6);
/// How often it is looked at meanwhile.
const LOOK: Duration = Duration::from_millis(5);

/// Which doors a disk gets.
#[derive(Clone, Debug, Default, clap::Args)]
pub(super) struct Options {
    /// Offer the disk at this unix socket, with the NBD protocol; the place is kept for this disk,
    /// should it be unmapped and mapped again: any other that is mapped later gets one beside it,
    /// with its name here at the end (SOCKET.rnbd1)
    #[arg(long, value_name = "SOCKET")]
    nbd: Option<PathBuf>,
    /// Show the disk as a file in this folder, with its name here (rnbd0); needs FUSE; other disks
    /// as with --nbd (FOLDER.rnbd1/rnbd1). A program that is killed stays until its request has
    /// ended, which may wait for a lost server as long as --outage says
    #[arg(long, value_name = "FOLDER")]
    fuse: Option<PathBuf>,
    /// Make the disk a block device of this machine, /dev/ublkbN, with the size that it has then;
    /// needs Linux 6.4 with ublk_drv, and root. An unmap without force is refused while it or a
    /// partition is mounted or claimed otherwise; that a program merely has it open is not seen
    #[arg(long)]
    ublk: bool,
}

/// Why a door could not be opened.
#[derive(Debug)]
pub(super) struct NoDoor {
    /// Which one, and why.
    text: String,
    errno: Errno,
}

impl NoDoor {
    fn new(text: String, error: &io::Error) -> Self {
        let errno = match error.kind() {
            io::ErrorKind::ResourceBusy => Errno::EBUSY,
            _ => Errno::of(error),
        };
        Self { text, errno }
    }
}

impl fmt::Display for NoDoor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// The doors of one disk.
#[derive(Default)]
struct Open {
    nbd: Option<NbdServer>,
    fuse: Option<Mount>,
    ublk: Option<Ublk>,
}

impl Open {
    /// Lets nobody in any more, unless somebody uses one of them; says whether it is so. They may
    /// be shut already.
    fn disable_if_unused(&self) -> bool {
        let unused = self.nbd.as_ref().is_none_or(NbdServer::disable_if_unused)
            && self.fuse.as_ref().is_none_or(Mount::disable_if_unused)
            && self.ublk.as_ref().is_none_or(Ublk::disable_if_unused);
        if !unused {
            self.enable();
        }
        unused
    }

    /// Lets everybody in again.
    fn enable(&self) {
        self.nbd.iter().for_each(NbdServer::enable);
        self.fuse.iter().for_each(Mount::enable);
        self.ublk.iter().for_each(Ublk::enable);
    }
}

/// What stands in front of a disk.
enum Front {
    /// Doors that are being opened: that may take as long as a first look of the system at the
    /// disk.
    Opening,
    /// Its doors.
    Open(Box<Open>),
    /// Nothing any more: they are being closed, and the disk is being unmapped.
    Closing,
}

impl Front {
    /// Takes the doors, if there are any that nobody uses, or `force` is given.
    fn take(&mut self, force: bool) -> Option<Box<Open>> {
        match self {
            Self::Open(doors) if force || doors.disable_if_unused() => {
                let doors = std::mem::take(doors);
                *self = Self::Closing;
                Some(doors)
            }
            Self::Opening | Self::Open(_) | Self::Closing => None,
        }
    }
}

/// A disk, whatever its name here is: its session, and what it is called on the server.
#[derive(Clone, Debug, Eq, PartialEq)]
struct Which {
    session: String,
    device: String,
}

impl Which {
    fn of(disk: &Disk) -> Self {
        Self { session: disk.session_name().to_owned(), device: disk.name().to_owned() }
    }
}

/// What is told of a disk.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) enum News {
    /// It is mapped, and its doors are open.
    Mapped {
        /// What it is called on the server.
        device: String,
        bytes: u64,
        /// Its name here, and where its doors are.
        places: Vec<String>,
    },
    /// Something has changed.
    Changed(DiskEvent),
    /// A command has unmapped it.
    Unmapped,
}

#[derive(Default)]
struct State {
    /// Whose the places are that were asked for. Who comes back to one of them means this disk, so
    /// no other disk ever gets them.
    owner: Option<Which>,
    /// Of each disk, by its name here.
    fronts: BTreeMap<String, Front>,
    /// Commands of the tree under way that map or unmap disks.
    commands: usize,
}

impl State {
    /// Tells whether a disk has the places that were asked for: the first one ever has.
    fn owns(&mut self, disk: Which) -> bool {
        *self.owner.get_or_insert_with(|| disk.clone()) == disk
    }
}

/// The disks of a client, and a door in front of each. Commands that come by the tree open and
/// close doors as well.
pub(super) struct Doors {
    client: Arc<Client>,
    options: Options,
    state: Mutex<State>,
    /// Who is told what happens to disks, by their names here.
    news: Sender<(String, News)>,
}

impl Doors {
    /// Makes doors for the disks of a client; what happens to disks is told to `news`, from when
    /// they have theirs.
    pub(super) fn new(
        client: Arc<Client>,
        options: Options,
        news: Sender<(String, News)>,
    ) -> Arc<Self> {
        Arc::new(Self { client, options, state: Mutex::default(), news })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Opens the doors of a disk, and tells where they are. Others may be opened and closed
    /// meanwhile.
    pub(super) fn open(&self, disk: &Arc<Disk>) -> Result<(), NoDoor> {
        let name = disk.local_name();
        let mut state = self.lock();
        let plain = state.owns(Which::of(disk));
        if let Some(Front::Closing) = state.fronts.insert(name.to_owned(), Front::Opening) {
            // Whoever unmaps the one that had the name is not done yet.
            self.tell(name, News::Unmapped);
        }
        drop(state);
        let opened = self.doors_of(disk, plain);
        let mut state = self.lock();
        let front = state.fronts.get_mut(name).filter(|front| matches!(front, Front::Opening));
        match (opened, front) {
            (Ok((doors, places)), Some(front)) => {
                *front = Front::Open(Box::new(doors));
                // With the lock held: before anything else is told of it.
                let (device, bytes) = (disk.name().to_owned(), disk.limits().bytes);
                self.tell(name, News::Mapped { device, bytes, places });
                let (news, of) = (self.news.clone(), name.to_owned());
                disk.on_change(Box::new(move |event| {
                    // At the end nobody listens any more.
                    let _ = news.send((of.clone(), News::Changed(event)));
                }));
                Ok(())
            }
            (Ok(unwanted), None) => {
                drop(state);
                drop(unwanted);
                Err(NoDoor { text: "all disks are being given up".into(), errno: Errno::ENODEV })
            }
            (Err(why), front) => {
                if front.is_some() {
                    state.fronts.remove(name);
                }
                Err(why)
            }
        }
    }

    fn tell(&self, disk: &str, news: News) {
        // At the end nobody listens any more.
        let _ = self.news.send((disk.to_owned(), news));
    }

    /// Opens doors, and says where the disk is now; the places are those that were asked for, if
    /// `plain`.
    fn doors_of(&self, disk: &Arc<Disk>, plain: bool) -> Result<(Open, Vec<String>), NoDoor> {
        let name = disk.local_name();
        let place = |path: &Path| if plain { path.to_owned() } else { beside(path, name) };
        let mut doors = Open::default();
        let mut said = vec![name.to_owned()];
        if let Some(path) = self.options.nbd.as_deref().map(place) {
            let device: Arc<dyn BlockDevice> = Arc::<Disk>::clone(disk);
            let served = nbd::serve(device, &path, NbdOptions::default());
            doors.nbd = Some(served.map_err(|error| {
                NoDoor::new(format!("cannot listen on {}: {error}", path.display()), &error)
            })?);
            said.push(format!("nbd {}", path.display()));
        }
        if let Some(dir) = self.options.fuse.as_deref().map(place) {
            let device: Arc<dyn BlockDevice> = Arc::<Disk>::clone(disk);
            let mounted = fusefs::folder(&dir)
                .and_then(|()| fuse::mount(device, &dir, name, FuseOptions::default()));
            doors.fuse =
                Some(mounted.map_err(|error| NoDoor::new(no_mount(&dir, &error), &error))?);
            said.push(format!("fuse {}", dir.join(name).display()));
        }
        if self.options.ublk {
            let device: Arc<dyn BlockDevice> = Arc::<Disk>::clone(disk);
            let attached = ublk::attach(device, UblkOptions::default());
            let ublk = attached
                .map_err(|error| NoDoor::new(format!("no block device: {error}"), &error))?;
            said.push(format!("ublk {}", ublk.path().display()));
            doors.ublk = Some(ublk);
        }
        Ok((doors, said))
    }

    /// Reports whether disks are mapped, or a command is under way.
    pub(super) fn is_needed(&self) -> bool {
        let state = self.lock();
        state.commands > 0 || !state.fronts.is_empty()
    }

    /// Counts a command until what is returned is dropped.
    fn command(&self) -> impl Drop {
        struct One<'a>(&'a Doors);
        impl Drop for One<'_> {
            fn drop(&mut self) {
                self.0.lock().commands -= 1;
            }
        }
        self.lock().commands += 1;
        One(self)
    }

    /// Takes the doors of a disk away, if nobody uses them or `force` is given [NB-37]. By force,
    /// requests that wait for a lost session fail, also those that keep an unmap that is under way
    /// already, or doors from being opened.
    fn take(&self, disk: &str, force: bool) -> Result<Box<Open>, Errno> {
        let opened = Instant::now() + OPENING;
        let mut left = None;
        loop {
            let mut state = self.lock();
            let mapped = self.client.disk(disk).ok_or(Errno::ENODEV)?;
            let (taken, end) = match state.fronts.get_mut(disk) {
                Some(Front::Closing) => (Some(Err(Errno::EALREADY)), opened),
                // It is being mapped: whoever does that opens its doors next.
                None | Some(Front::Opening) => (None, opened),
                Some(front) => {
                    let left = left.get_or_insert_with(|| Instant::now() + LEAVING);
                    (front.take(force).map(Ok), *left)
                }
            };
            drop(state);
            if force {
                mapped.fail_fast();
            }
            if let Some(taken) = taken {
                return taken;
            }
            if Instant::now() >= end {
                return Err(Errno::EBUSY);
            }
            thread::sleep(LOOK);
        }
    }

    /// From now on no request waits for a lost session, so that doors that are closed, by commands
    /// under way too, have nothing to wait for that may take so long.
    pub(super) fn fail_fast(&self) {
        self.client.disks().iter().for_each(|disk| disk.fail_fast());
    }

    /// Closes all doors and gives all disks up. Commands that are still at it are waited for: what
    /// they have opened would stay behind.
    pub(super) fn close(&self) {
        let end = Instant::now() + OPENING;
        loop {
            self.fail_fast();
            let mut state = self.lock();
            state.fronts.retain(|_, front| matches!(front, Front::Opening));
            if state.commands == 0 || Instant::now() >= end {
                state.fronts.clear();
                break;
            }
            drop(state);
            thread::sleep(LOOK);
        }
        self.client.close();
    }
}

/// Returns the place of another disk's door.
fn beside(path: &Path, name: &str) -> PathBuf {
    let mut text: OsString = path.as_os_str().to_owned();
    text.push(".");
    text.push(name);
    text.into()
}

impl Disks for Doors {
    fn map(&self, spec: &MapSpec) -> Result<(), Errno> {
        let _command = self.command();
        Disks::map(&*self.client, spec)?;
        let wanted = Which { session: spec.session.clone(), device: spec.device.clone() };
        let is = |disk: &Arc<Disk>| Which::of(disk) == wanted && disk.info().is_some();
        let disk = self.client.disks().into_iter().find(is).ok_or(Errno::ENODEV)?;
        self.open(&disk).map_err(|error| {
            // Without its door the disk is of no use; whoever asked is told.
            let _ = self.client.unmap(&disk);
            error.errno
        })
    }

    fn disks(&self) -> Vec<DiskInfo> {
        Disks::disks(&*self.client)
    }

    fn unmap(&self, disk: &str, force: bool) -> Result<(), Errno> {
        let _command = self.command();
        // Doors go first: what the system has still to write goes out through them, as long as
        // there is a session.
        drop(self.take(disk, force)?);
        let unmapped = Disks::unmap(&*self.client, disk, force);
        let mut state = self.lock();
        // Another disk may have got the name already.
        if matches!(state.fronts.get(disk), Some(Front::Closing)) {
            state.fronts.remove(disk);
            if unmapped.is_ok() {
                self.tell(disk, News::Unmapped);
            }
        }
        unmapped
    }

    fn resize(&self, disk: &str, sectors: u64) -> Result<(), Errno> {
        Disks::resize(&*self.client, disk, sectors)
    }

    fn remap(&self, disk: &str) -> Result<(), Errno> {
        Disks::remap(&*self.client, disk)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn doors_of_later_disks_stand_beside_the_first() {
        let path = beside(Path::new("/run/disk.sock"), "rnbd1");
        assert_eq!(path, Path::new("/run/disk.sock.rnbd1"));
    }

    #[test]
    fn the_place_that_was_asked_for_is_of_one_disk() {
        let which =
            |session: &str, device: &str| Which { session: session.into(), device: device.into() };
        let mut state = State::default();
        assert!(state.owns(which("s1", "a")));
        assert!(!state.owns(which("s1", "b")) && !state.owns(which("s2", "a")));
        assert!(state.owns(which("s1", "a")));
    }
}
