//! Block devices of disks (ublk), which outlive their process: a device stays when its process is
//! killed, and the next process that maps the disk finds it by its record and takes it over.
//!
//! A record is a file `ublk-N.json` in the folder of control sockets. Who serves the device has it
//! locked; the kernel unlocks it with the end of a process. [NB-75]

use std::{
    collections::BTreeSet,
    fs::{self, File, OpenOptions},
    io::{self, Read, Write},
    net::IpAddr,
    os::unix::fs::{MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
    sync::Arc,
    sync::atomic::{AtomicBool, Ordering::Relaxed},
    thread,
    time::{Duration, Instant},
};

use bowline_base::entropy::random_u64;
use bowline_block::{
    BlockDevice,
    front::ublk::{self, DeviceId, Ublk, UblkOptions},
};
use bowline_ctl::{create_folder_of, refuse_unsafe_folder};
use serde::{Deserialize, Serialize};

/// How long a process that has handed over a device may take to unlock its record.
const UNLOCK_PATIENCE: Duration = Duration::from_secs(1);
/// How often it is looked whether it has.
const UNLOCK_POLL: Duration = Duration::from_millis(1);
/// Most bytes of a record.
const BYTES_MAX: u64 = 64 << 10;

/// Which disk a device is of.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
pub(super) struct DiskOrigin {
    /// Name of its session.
    pub(super) session: String,
    /// Its name on the server.
    pub(super) device: String,
    /// Addresses of the server.
    pub(super) servers: BTreeSet<IpAddr>,
}

impl DiskOrigin {
    /// Tells whether both are of the same disk, if perhaps over other paths.
    fn is_same(&self, other: &Self) -> bool {
        self.session == other.session
            && self.device == other.device
            && !self.servers.is_disjoint(&other.servers)
    }
}

#[derive(Deserialize, Serialize)]
struct Contents {
    id: u32,
    tag: u64,
    disk: DiskOrigin,
}

/// The record of a device, locked.
#[derive(Debug)]
struct Record {
    file: File,
    path: PathBuf,
}

impl Record {
    fn path(folder: &Path, device: DeviceId) -> PathBuf {
        folder.join(format!("ublk-{}.json", device.id))
    }

    /// Writes the record of a device that this process serves.
    fn write(folder: &Path, device: DeviceId, disk: &DiskOrigin) -> io::Result<Self> {
        let path = Self::path(folder, device);
        create_folder_of(&path)?;
        let record = Self::lock(&path, true)?;
        let mut record = record.ok_or(io::ErrorKind::ResourceBusy)?;
        let contents = Contents { id: device.id, tag: device.tag, disk: disk.clone() };
        record.file.set_len(0)?;
        record.file.write_all(&serde_json::to_vec(&contents)?)?;
        Ok(record)
    }

    /// Locks the record of a device that another process has handed over.
    fn take(folder: &Path, device: DeviceId, disk: &DiskOrigin) -> io::Result<Self> {
        let end = Instant::now() + UNLOCK_PATIENCE;
        loop {
            match Self::write(folder, device, disk) {
                Err(error)
                    if error.kind() == io::ErrorKind::ResourceBusy && Instant::now() < end =>
                {
                    thread::sleep(UNLOCK_POLL);
                }
                taken => return taken,
            }
        }
    }

    /// Finds the device of a disk whose process has ended.
    fn find(folder: &Path, disk: &DiskOrigin) -> Option<(DeviceId, Self)> {
        let is_record = |path: &PathBuf| {
            let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            name.starts_with("ublk-") && name.ends_with(".json")
        };
        refuse_unsafe_folder(folder).ok()?;
        let entries = fs::read_dir(folder).into_iter().flatten().flatten();
        entries.map(|entry| entry.path()).filter(is_record).find_map(|path| {
            // One that is locked has its process; one without access is another user's.
            let record = Self::lock(&path, false).ok().flatten()?;
            let mut text = String::new();
            (&record.file).take(BYTES_MAX).read_to_string(&mut text).ok()?;
            let found: Contents = serde_json::from_str(&text).ok()?;
            let device = DeviceId { id: found.id, tag: found.tag };
            found.disk.is_same(disk).then_some((device, record))
        })
    }

    /// Locks a file; `None` if another process has it locked.
    fn lock(path: &Path, creates: bool) -> io::Result<Option<Self>> {
        loop {
            let mut options = OpenOptions::new();
            options.read(true).write(true).create(creates).mode(0o600);
            let file = options.custom_flags(libc::O_NOFOLLOW).open(path)?;
            match file.try_lock() {
                Ok(()) => {}
                Err(fs::TryLockError::WouldBlock) => return Ok(None),
                Err(fs::TryLockError::Error(error)) => return Err(error),
            }
            let locked = file.metadata()?;
            // Who had it may have removed it before this process had the lock.
            match fs::metadata(path) {
                Ok(there) if (there.dev(), there.ino()) == (locked.dev(), locked.ino()) => {
                    return Ok(Some(Self { file, path: path.to_owned() }));
                }
                Err(error) if !creates => return Err(error),
                _ => {}
            }
        }
    }

    fn remove(self) {
        // It may be gone already.
        let _ = fs::remove_file(&self.path);
    }
}

/// The block device of a disk.
#[derive(Debug)]
pub(super) struct DiskBlockDevice {
    /// Present until the end.
    ublk: Option<Ublk>,
    record: Option<Record>,
    /// A process that was killed has left it.
    is_orphan: bool,
    /// It is left to another process at the end. Relaxed: nothing else depends on it.
    is_left: AtomicBool,
}

impl DiskBlockDevice {
    /// Takes over the device that a process has handed over, or that one which was killed has
    /// left; or makes one. Until [`own`](Self::own), a device of another process is left at the
    /// end as it was found. With `is_own`, this process is the one that has handed it over.
    ///
    /// # Errors
    /// Those of the kernel's driver; `ResourceBusy` when the device has a server still.
    pub(super) fn open(
        disk: &Arc<dyn BlockDevice>,
        origin: &DiskOrigin,
        handed: Option<DeviceId>,
        is_own: bool,
    ) -> io::Result<Self> {
        let folder = bowline_ctl::folder();
        let found = match handed {
            Some(device) => Some((device, Record::take(&folder, device, origin)?)),
            None => Record::find(&folder, origin),
        };
        if let Some((device, record)) = found {
            match ublk::resume(Arc::clone(disk), UblkOptions::default(), &device) {
                Ok(ublk) => {
                    let is_left = AtomicBool::new(true);
                    let is_orphan = handed.is_none();
                    let (ublk, record) = (Some(ublk), Some(record));
                    return Ok(Self { ublk, record, is_orphan, is_left });
                }
                // The system was started again, or somebody has removed it.
                Err(error) if error.kind() == io::ErrorKind::NotFound => record.remove(),
                // The disk is another one by now: not the system's own EINVAL, after which the next
                // attempt may succeed. A process that still runs keeps its own.
                Err(error)
                    if error.kind() == io::ErrorKind::InvalidInput
                        && error.raw_os_error().is_none()
                        && (handed.is_none() || is_own) =>
                {
                    note!("/dev/ublkb{}: {error}: its users get errors", device.id);
                    ublk::remove(&device)?;
                    record.remove();
                }
                Err(error) => return Err(error),
            }
        }
        let (mut record, mut unrecorded) = (None, None);
        let keep = |device: &DeviceId| match Record::write(&folder, *device, origin) {
            Ok(written) => {
                record = Some(written);
                Ok(())
            }
            Err(error) => {
                unrecorded = Some(error.to_string());
                Err(error)
            }
        };
        let options = UblkOptions::default();
        let made = ublk::attach_recoverable(Arc::clone(disk), options, random_u64(), keep);
        match (made, unrecorded) {
            (Ok(ublk), _) => Ok(Self::new(ublk, record)),
            (Err(_), Some(why)) => {
                note!("{}: {why}: the block device ends with this process", folder.display());
                let ublk = ublk::attach(Arc::clone(disk), options)?;
                Ok(Self::new(ublk, None))
            }
            (Err(error), None) => {
                record.into_iter().for_each(Record::remove);
                Err(error)
            }
        }
    }

    /// Ends the device of a disk that nobody serves any more, with its record; its users get
    /// errors. `device`: the one that this process has had.
    ///
    /// # Errors
    /// `ResourceBusy` if another process has that one; those of the kernel's driver. The device
    /// stays then, for the next process that maps the disk.
    pub(super) fn end(origin: &DiskOrigin, device: Option<DeviceId>) -> io::Result<()> {
        end(&bowline_ctl::folder(), origin, device, ublk::remove)
    }

    fn new(ublk: Ublk, record: Option<Record>) -> Self {
        Self { ublk: Some(ublk), record, is_orphan: false, is_left: AtomicBool::new(false) }
    }

    fn ublk(&self) -> &Ublk {
        self.ublk.as_ref().expect("present until the end")
    }

    /// Returns the path of the device.
    pub(super) fn path(&self) -> &Path {
        self.ublk().path()
    }

    /// Tells whether a process that was killed has left it, and may have written to the disk.
    pub(super) const fn is_orphan(&self) -> bool {
        self.is_orphan
    }

    /// Has the device removed at the end.
    pub(super) fn own(&self) {
        self.ublk().own();
        self.is_left.store(false, Relaxed);
    }

    /// As [`Ublk::disable_if_unused`].
    pub(super) fn disable_if_unused(&self) -> bool {
        self.ublk().disable_if_unused()
    }

    /// As [`Ublk::enable`].
    pub(super) fn enable(&self) {
        self.ublk().enable();
    }

    /// As [`Ublk::pause`].
    pub(super) fn pause(&self) {
        self.ublk().pause();
    }

    /// As [`Ublk::is_paused`].
    pub(super) fn is_paused(&self) -> bool {
        self.ublk().is_paused()
    }

    /// As [`Ublk::unpause`].
    pub(super) fn unpause(&self) {
        self.ublk().unpause();
    }

    /// Tells why it cannot continue in another process.
    pub(super) fn cannot_hand_over(&self) -> Option<String> {
        let text = "its ublk device ends with its process, as the kernel cannot keep it or there is \
                    no record of it: unmount it and start again";
        (self.ublk().device().is_none() || self.record.is_none()).then(|| text.to_owned())
    }

    /// Leaves it to another process.
    pub(super) fn hand_over(mut self) -> Option<DeviceId> {
        self.is_left.store(true, Relaxed);
        self.ublk.take().and_then(Ublk::hand_over)
    }
}

impl Drop for DiskBlockDevice {
    fn drop(&mut self) {
        // Before others may look for it.
        drop(self.ublk.take());
        if !self.is_left.load(Relaxed) {
            self.record.take().into_iter().for_each(Record::remove);
        }
    }
}

fn end(
    folder: &Path,
    origin: &DiskOrigin,
    device: Option<DeviceId>,
    remove: impl Fn(&DeviceId) -> io::Result<()>,
) -> io::Result<()> {
    let Some((found, record)) = Record::find(folder, origin) else {
        let is_there = device.is_some_and(|device| Record::path(folder, device).exists());
        return if is_there { Err(io::ErrorKind::ResourceBusy.into()) } else { Ok(()) };
    };
    match remove(&found) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        // The system may have been started again, or somebody has removed it.
        _ => {
            record.remove();
            Ok(())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn origin(session: &str, device: &str, servers: &[&str]) -> DiskOrigin {
        let servers = servers.iter().map(|address| address.parse().unwrap()).collect();
        DiskOrigin { session: session.to_owned(), device: device.to_owned(), servers }
    }

    #[test]
    fn a_record_is_found_for_its_disk_once_its_process_has_ended() {
        // tests [NB-75]
        let folder = std::env::temp_dir().join(format!("bowline-ublk-{}", std::process::id()));
        let disk = origin("s1", "disk0", &["192.0.2.1", "192.0.2.2"]);
        assert!(Record::find(&folder, &disk).is_none(), "no folder");
        let device = DeviceId { id: 3, tag: 0x1234_5678_9abc_def0 };
        let record = Record::write(&folder, device, &disk).unwrap();
        assert!(Record::find(&folder, &disk).is_none(), "its process is there");
        let busy = Record::take(&folder, device, &disk).unwrap_err();
        assert_eq!(busy.kind(), io::ErrorKind::ResourceBusy);
        // The process ends.
        drop(record);
        for other in [
            origin("s2", "disk0", &["192.0.2.1"]),
            origin("s1", "disk1", &["192.0.2.1"]),
            origin("s1", "disk0", &["192.0.2.3"]),
        ] {
            assert!(Record::find(&folder, &other).is_none(), "{other:?}");
        }
        fs::write(folder.join("ublk-1.json"), "{").unwrap();
        fs::write(folder.join("map-1.sock"), "").unwrap();
        let other_path = origin("s1", "disk0", &["192.0.2.2"]);
        let (found, record) = Record::find(&folder, &other_path).unwrap();
        assert_eq!(found, device);
        assert!(Record::find(&folder, &disk).is_none(), "whoever finds it has it");
        drop(record);
        Record::take(&folder, device, &disk).unwrap().remove();
        assert!(Record::find(&folder, &disk).is_none());
        // A device of the same number is another one.
        let next = DeviceId { tag: 7, ..device };
        drop(Record::write(&folder, next, &disk).unwrap());
        assert_eq!(Record::find(&folder, &disk).unwrap().0, next);
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn a_device_that_nobody_serves_is_removed_with_its_record() {
        // tests [NB-75]
        let name = format!("bowline-ublk-end-{}", std::process::id());
        let folder = std::env::temp_dir().join(name);
        let disk = origin("s1", "disk0", &["192.0.2.1"]);
        let device = DeviceId { id: 3, tag: 5 };
        let removed = std::cell::RefCell::new(Vec::new());
        let end_as = |result: Option<io::ErrorKind>| {
            end(&folder, &disk, Some(device), |device| {
                removed.borrow_mut().push(*device);
                result.map_or(Ok(()), |kind| Err(kind.into()))
            })
            .map_err(|error| error.kind())
        };
        assert_eq!(end_as(None), Ok(()), "nothing to end");
        // Another process has it.
        let served = Record::write(&folder, device, &disk).unwrap();
        assert_eq!(end_as(None), Err(io::ErrorKind::ResourceBusy));
        assert!(removed.borrow().is_empty());
        drop(served);
        // It cannot be removed: the next process finds it.
        let denied = io::ErrorKind::PermissionDenied;
        assert_eq!(end_as(Some(denied)), Err(denied));
        drop(Record::find(&folder, &disk).unwrap());
        assert_eq!(end_as(None), Ok(()));
        assert!(Record::find(&folder, &disk).is_none());
        // The system was started again: the record is all that there is.
        drop(Record::write(&folder, device, &disk).unwrap());
        assert_eq!(end_as(Some(io::ErrorKind::NotFound)), Ok(()));
        assert!(!Record::path(&folder, device).exists());
        assert_eq!(*removed.borrow(), [device; 3]);
        fs::remove_dir_all(folder).unwrap();
    }
}
