//! Opening the front ends of a disk: new ones, those that another process has handed over, or what
//! can be taken back from one that was to continue and has not.

use std::{
    fmt,
    path::{Path, PathBuf},
    sync::{Arc, mpsc::Sender},
};

use bowline_block::{
    BlockDevice,
    front::{
        fuse::{self, FuseOptions, Mount},
        nbd::{self, NbdOptions, NbdServer},
        ublk::DeviceId,
        vhost_user::{self, VhostUserOptions, VhostUserServer},
    },
};
use bowline_ctl::fusefs;
use bowline_rnbd_driver::client::Disk;

use super::{
    FrontEndConfig, HandedFrontEnds, Trouble,
    block_device::{DiskBlockDevice, DiskOrigin},
    front_ends::{DiskNotice, FrontEnds},
    noted::NotedDisk,
};
use crate::mount::no_mount;

/// Front ends of a disk that leave the users alone which another process has left them.
pub struct PreparedFrontEnds {
    pub(super) front_ends: FrontEnds,
    /// Their locations.
    pub(super) places: Vec<String>,
}

impl PreparedFrontEnds {
    /// Returns the block device by which programs have this disk, or its file, if it has one.
    pub fn file(&self, disk: &str) -> Option<PathBuf> {
        let FrontEnds { ublk, fuse, .. } = &self.front_ends;
        let device = ublk.as_ref().map(|ublk| ublk.path().to_owned());
        device.or_else(|| fuse.as_ref().map(|mount| mount.dir().join(disk)))
    }
}

impl fmt::Debug for PreparedFrontEnds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PreparedFrontEnds").field("places", &self.places).finish_non_exhaustive()
    }
}

/// A front end that could not be taken back.
#[derive(Clone, Debug)]
pub(super) struct Missing {
    pub(super) what: Lost,
    /// Its location.
    pub(super) place: String,
    /// Why not.
    pub(super) why: Trouble,
}

impl fmt::Display for Missing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { place, why, .. } = self;
        write!(f, "not taken back: {place}: {why}")
    }
}

/// What of a front end that could not be taken back decides whether it may be later.
#[derive(Clone, Debug)]
pub(super) enum Lost {
    /// Its descriptors were this process's, and its users are gone with them.
    ForGood,
    /// The other process may have the device still.
    Ublk(DiskOrigin, Option<DeviceId>),
    /// The other process may listen there still.
    VhostUser(PathBuf),
}

/// Opens front ends of a disk.
pub(super) struct Opener<'a> {
    pub(super) disk: &'a Arc<Disk>,
    /// Its changes are noted for the next process.
    pub(super) noted: Option<Arc<NotedDisk>>,
    pub(super) origin: DiskOrigin,
    /// A service manager is to keep the front ends.
    pub(super) are_kept: bool,
    /// What was handed over is this process's own: no other one continues with it.
    pub(super) takes_back: bool,
    /// Receives why clients are disconnected.
    pub(super) notices: &'a Sender<(String, DiskNotice)>,
}

impl Opener<'_> {
    /// Opens front ends; those that were handed over serve nobody yet. Of those that are taken back
    /// one that fails is missing, and stops no other.
    ///
    /// # Errors
    /// One of them cannot be opened.
    pub(super) fn open(
        &self,
        options: &FrontEndConfig,
        handed: HandedFrontEnds,
    ) -> Result<PreparedFrontEnds, Trouble> {
        let name = self.disk.local_name();
        let HandedFrontEnds { nbd, fuse, kept, ublk, is_unflushed: _ } = handed;
        let listener = nbd.as_ref().map(|nbd| Arc::clone(&nbd.listener));
        let was_mounted = fuse.is_some();
        let noted = self.noted.clone();
        let mut front_ends = FrontEnds { kept, noted, ..FrontEnds::default() };
        let mut places = vec![name.to_owned()];
        if let Some(path) = &options.nbd {
            let place = format!("nbd {}", path.display());
            match self.nbd(path, nbd) {
                Ok(served) => {
                    front_ends.nbd = Some(served);
                    places.push(place);
                }
                Err(why) => self.misses(&mut front_ends, Lost::ForGood, place, why)?,
            }
        }
        if let Some(dir) = &options.fuse {
            let place = format!("fuse {}", dir.join(name).display());
            let is_one = self.are_kept || front_ends.kept.is_some();
            match self.fuse(dir, is_one, fuse) {
                Ok(mounted) => {
                    front_ends.kept.iter().for_each(|kept| mounted.keep_opens(Arc::clone(kept)));
                    front_ends.fuse = Some(mounted);
                    places.push(place);
                }
                Err(why) => self.misses(&mut front_ends, Lost::ForGood, place, why)?,
            }
        }
        if options.ublk {
            match self.ublk(&self.origin, ublk) {
                Ok(device) => {
                    places.push(format!("ublk {}", device.path().display()));
                    front_ends.ublk = Some(device);
                }
                Err(why) => {
                    let path = ublk.map(|one| format!("ublk /dev/ublkb{}", one.id));
                    let place = path.unwrap_or_else(|| "ublk".to_owned());
                    self.misses(
                        &mut front_ends,
                        Lost::Ublk(self.origin.clone(), ublk),
                        place,
                        why,
                    )?;
                }
            }
        }
        if let Some(path) = &options.vhost_user {
            let place = format!("vhost-user {}", path.display());
            match self.vhost_user(path) {
                Ok(served) => {
                    front_ends.vhost_user = Some(served);
                    places.push(place);
                }
                Err(why) => {
                    self.misses(&mut front_ends, Lost::VhostUser(path.clone()), place, why)?;
                }
            }
        }
        let nbd = options.nbd.clone().filter(|_| front_ends.nbd.is_none());
        let fuse = options.fuse.clone().filter(|_| front_ends.fuse.is_none());
        if nbd.is_some() || fuse.is_some() {
            // A service manager has to keep less.
            front_ends.kept = None;
            // Nobody continues with them, and no client is to wait for that. A mount that was not
            // handed over is another process's.
            let fuse = fuse.filter(|_| was_mounted);
            FrontEndConfig { nbd, fuse, ..FrontEndConfig::default() }.clear(listener.as_deref());
        }
        Ok(PreparedFrontEnds { front_ends, places })
    }

    /// Notes a front end that is taken back and cannot be opened.
    fn misses(
        &self,
        front_ends: &mut FrontEnds,
        what: Lost,
        place: String,
        why: Trouble,
    ) -> Result<(), Trouble> {
        if !self.takes_back {
            return Err(why);
        }
        front_ends.missing.push(Missing { what, place, why });
        Ok(())
    }

    fn device(&self) -> Arc<dyn BlockDevice> {
        match &self.noted {
            Some(noted) => Arc::<NotedDisk>::clone(noted),
            None => Arc::<Disk>::clone(self.disk),
        }
    }

    /// Returns what tells why clients are disconnected.
    fn trouble(&self) -> impl Fn(&str) + Send + Sync + use<> {
        let (notices, name) = (self.notices.clone(), self.disk.local_name().to_owned());
        move |why: &str| {
            // The receiver is gone when the process ends.
            let _ = notices.send((name.clone(), DiskNotice::Trouble(why.to_owned())));
        }
    }

    fn nbd(&self, path: &Path, handed: Option<nbd::Handed>) -> Result<NbdServer, Trouble> {
        let served = match handed {
            Some(handed) => nbd::resume(self.device(), path, NbdOptions::default(), handed),
            None => nbd::serve(self.device(), path, NbdOptions::default()),
        };
        let served = served.map_err(|error| {
            Trouble::io(format!("cannot listen on {}: {error}", path.display()), &error)
        })?;
        served.on_fault(self.trouble());
        Ok(served)
    }

    fn fuse(
        &self,
        dir: &Path,
        one_descriptor: bool,
        handed: Option<fuse::Handed>,
    ) -> Result<Mount, Trouble> {
        let (device, name) = (self.device(), self.disk.local_name());
        let mut options = FuseOptions::default();
        options.one_descriptor = one_descriptor;
        let mounted = match handed {
            Some(handed) => fuse::resume(device, dir, name, options, handed),
            None => fusefs::folder(dir).and_then(|()| fuse::mount(device, dir, name, options)),
        };
        mounted.map_err(|error| Trouble::io(no_mount(dir, &error), &error))
    }

    pub(super) fn ublk(
        &self,
        origin: &DiskOrigin,
        handed: Option<DeviceId>,
    ) -> Result<DiskBlockDevice, Trouble> {
        let opened = DiskBlockDevice::open(&self.device(), origin, handed, self.takes_back);
        opened.map_err(|error| Trouble::io(format!("no block device: {error}"), &error))
    }

    pub(super) fn vhost_user(&self, path: &Path) -> Result<VhostUserServer, Trouble> {
        let options = VhostUserOptions::default();
        let served = vhost_user::serve(self.device(), path, options, self.trouble());
        served.map_err(|error| {
            Trouble::io(format!("cannot listen on {}: {error}", path.display()), &error)
        })
    }
}
