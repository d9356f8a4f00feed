//! Doors in front of mapped disks, for software that knows nothing of RNBD.

use std::{
    collections::BTreeMap,
    ffi::OsString,
    fs, io,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use bowline_block::{
    BlockDevice,
    front::{
        fuse::{self, FuseOptions, Mount},
        nbd::{self, NbdOptions, NbdServer},
        ublk::{self, Ublk, UblkOptions},
    },
};
use bowline_ctl::{
    Errno,
    errno::{EBUSY, EIO, ENODEV},
};
use bowline_rnbd_driver::{
    client::{Client, Disk},
    tree::{DiskInfo, Disks, MapSpec},
};

/// Which doors a disk gets.
#[derive(Clone, Debug, Default, clap::Args)]
pub(super) struct Options {
    /// Offer the disk at this unix socket, with the NBD protocol; a disk that is mapped later gets
    /// one beside it, with its own name at the end
    #[arg(long, value_name = "SOCKET")]
    nbd: Option<PathBuf>,
    /// Show the disk as a file in this folder, with its name here (rnbd0); needs FUSE; later disks
    /// as with --nbd
    #[arg(long, value_name = "FOLDER")]
    fuse: Option<PathBuf>,
    /// Make the disk a block device of this machine, /dev/ublkbN; needs Linux 6.4 with ublk_drv, and
    /// root
    #[arg(long)]
    ublk: bool,
}

/// The doors of one disk.
#[derive(Default)]
struct Open {
    nbd: Option<NbdServer>,
    fuse: Option<Mount>,
    ublk: Option<Ublk>,
}

impl Open {
    fn in_use(&self) -> bool {
        self.nbd.as_ref().is_some_and(|server| server.connections() > 0)
    }
}

/// The disks of a client, and a door in front of each. Commands that come by the tree open and
/// close doors as well.
pub(super) struct Doors {
    client: Arc<Client>,
    options: Options,
    open: Mutex<BTreeMap<String, Open>>,
}

impl Doors {
    pub(super) fn new(client: Arc<Client>, options: Options) -> Arc<Self> {
        Arc::new(Self { client, options, open: Mutex::default() })
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Open>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Opens the doors of a disk; returns where they are.
    pub(super) fn open(&self, disk: &Arc<Disk>) -> io::Result<Vec<String>> {
        let mut open = self.lock();
        let first = open.is_empty();
        let name = disk.local_name().to_owned();
        let place = |path: &Path| if first { path.to_owned() } else { beside(path, &name) };
        let mut doors = Open::default();
        let mut said = Vec::new();
        if let Some(path) = self.options.nbd.as_deref().map(place) {
            let device: Arc<dyn BlockDevice> = Arc::<Disk>::clone(disk);
            doors.nbd = Some(nbd::serve(device, &path, NbdOptions::default())?);
            said.push(format!("nbd {}", path.display()));
        }
        if let Some(dir) = self.options.fuse.as_deref().map(place) {
            let device: Arc<dyn BlockDevice> = Arc::<Disk>::clone(disk);
            fs::create_dir_all(&dir)?;
            doors.fuse = Some(fuse::mount(device, &dir, &name, FuseOptions::default())?);
            said.push(format!("fuse {}", dir.join(&name).display()));
        }
        if self.options.ublk {
            let device: Arc<dyn BlockDevice> = Arc::<Disk>::clone(disk);
            let ublk = ublk::attach(device, UblkOptions::default())?;
            said.push(format!("ublk {}", ublk.path().display()));
            doors.ublk = Some(ublk);
        }
        open.insert(name, doors);
        Ok(said)
    }

    /// Reports whether disks are mapped.
    pub(super) fn has_disks(&self) -> bool {
        !self.client.disks().is_empty()
    }

    /// Closes all doors and gives all disks up.
    pub(super) fn close(&self) {
        self.lock().clear();
        self.client.close();
    }
}

/// Returns the place of a later disk's door.
fn beside(path: &Path, name: &str) -> PathBuf {
    let mut text: OsString = path.as_os_str().to_owned();
    text.push(".");
    text.push(name);
    text.into()
}

impl Disks for Doors {
    fn map(&self, spec: &MapSpec) -> Result<(), Errno> {
        Disks::map(&*self.client, spec)?;
        let is = |disk: &Arc<Disk>| {
            disk.session_name() == spec.session
                && disk.info().is_some_and(|info| info.mapping_path == spec.device)
        };
        let disk = self.client.disks().into_iter().find(is).ok_or(ENODEV)?;
        self.open(&disk).map(|_| ()).map_err(|error| {
            // Without its door the disk is of no use; whoever asked is told.
            let _ = self.client.unmap(&disk);
            error.raw_os_error().unwrap_or(EIO)
        })
    }

    fn disks(&self) -> Vec<DiskInfo> {
        Disks::disks(&*self.client)
    }

    fn unmap(&self, disk: &str, force: bool) -> Result<(), Errno> {
        let doors = {
            let mut open = self.lock();
            if !force && open.get(disk).is_some_and(Open::in_use) {
                return Err(EBUSY);
            }
            open.remove(disk)
        };
        drop(doors);
        Disks::unmap(&*self.client, disk, force)
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
}
