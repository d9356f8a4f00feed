//! The exports of a server: names, and the stores behind them.

use std::collections::BTreeMap;
use std::fmt;
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bowline_block::backend::{self, Backend, BackendSpec, Filters, filtered};
use bowline_rnbd::{Errno, Failures};
use bowline_rtrs::server::name_fits;
use bowline_wire::rnbd::{Access, NAME_MAX};
use rustix::fs::{FileType, Mode, OFlags, ResolveFlags, Stat, fstat, openat2, stat};

use crate::error::Error;
use crate::tree;

/// Stands for the name of the session in the path of a directory [NB-18].
const SESSION_NAME: &str = "%SESSNAME%";
/// Bytes of a path, its NUL included [NB-18].
const PATH_MAX: usize = 4096;
/// Most attempts of an open that fails because a file is renamed meanwhile.
const OPEN_TRIES: usize = 256;

/// Options of exported files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileOptions {
    /// The file may not be written, whatever access mode a client asks for.
    pub read_only: bool,
    /// Bytes of a logical block: a power of two from 512 to 4096.
    pub block: u32,
    /// Whether to use direct IO where the file system supports it.
    pub direct: bool,
}

impl Default for FileOptions {
    fn default() -> Self {
        Self { read_only: false, block: 512, direct: true }
    }
}

/// Permission for sessions to open an export [NB-50].
///
/// An export without grants is open to every session. An export with grants is open to the sessions
/// that a grant names, with no more access than that grant allows. Grants belong to the file and
/// not to the name: other names of the same file have the same grants.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Grant {
    /// Name of an export, or of a file below the directory as clients send it.
    pub export: String,
    /// The highest access mode allowed: [`Access::Migration`] includes [`Access::Rw`], and that
    /// [`Access::Ro`].
    pub max_access: Access,
    /// Pattern of session names, with `*` for any text; `None`: every session.
    pub session: Option<String>,
}

impl Grant {
    fn admits(&self, session: &str, access: Access) -> bool {
        let named = self.session.as_deref().is_none_or(|pattern| name_fits(pattern, session));
        // Modes are numbered so that each includes the ones before it [NB-7].
        named && access as u8 <= self.max_access as u8
    }
}

/// Identity of the store behind a name: two names of one file have one identity [NB-58].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Identity {
    /// A store of the program, by a number of this server.
    Store(u64),
    /// A file: device and inode.
    File(u64, u64),
    /// A block device: its number.
    Device(u64),
}

impl fmt::Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let numbers =
            |device| format!("{}:{}", rustix::fs::major(device), rustix::fs::minor(device));
        match self {
            Self::Store(number) => write!(f, "store {number} of this server"),
            Self::File(device, inode) => {
                write!(f, "file {inode} of the file system {}", numbers(*device))
            }
            Self::Device(device) => write!(f, "block device {}", numbers(*device)),
        }
    }
}

/// A store that has failed requests.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct FailedStore {
    /// Name of its export in the control tree. Other stores may have had it before, or since.
    pub name: Arc<str>,
    /// What it is, in words that no other store of this server has.
    pub store: String,
    /// It is what the name stands for now.
    pub is_current: bool,
    /// What failed.
    pub failures: Failures,
}

/// An export whose file is no longer at its path. The file that was opened is still served.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Moved {
    /// Name of the export.
    pub export: String,
    /// Path of the file when it was opened.
    pub path: PathBuf,
    /// Why the path cannot be looked up, `ENOENT` when it is gone; `None`: another file is there.
    pub missing: Option<Errno>,
}

#[derive(Clone)]
struct Entry {
    backend: Arc<dyn Backend>,
    identity: Identity,
    read_only: bool,
    /// Path it was opened at.
    path: Option<PathBuf>,
}

struct Directory {
    path: PathBuf,
    /// The open directory: the part of the path before the session's name, or all of it.
    root: OwnedFd,
    by_session: bool,
    options: FileOptions,
    filters: Filters,
}

/// The result of a lookup.
pub(super) struct Found {
    pub(super) identity: Identity,
    pub(super) label: String,
    pub(super) read_only: bool,
    pub(super) store: Store,
}

/// Storage of a found export.
pub(super) enum Store {
    /// Storage that is open already.
    Open(Arc<dyn Backend>),
    /// A file that was just opened.
    File(OwnedFd, FileOptions, Filters),
}

impl Store {
    /// Returns the storage, and opens it if need be.
    pub(super) fn backend(self, read_only: bool) -> Result<Arc<dyn Backend>, Errno> {
        match self {
            Self::Open(backend) => Ok(backend),
            Self::File(fd, FileOptions { block, direct, .. }, filters) => {
                let spec = BackendSpec::File { fd, read_only, block, direct };
                let backend = backend::open(spec).map_err(|error| Errno::of(&error))?;
                filtered(backend, filters).map_err(|error| Errno::of(&error))
            }
        }
    }
}

/// The exports of a server. Names are compared byte by byte, as sent [NB-46].
#[derive(Clone, Default)]
pub struct Exports {
    entries: BTreeMap<Vec<u8>, Entry>,
    directory: Option<Arc<Directory>>,
    grants: Vec<Grant>,
    numbers: u64,
    /// Of exports that are added.
    filters: Filters,
}

impl fmt::Debug for Exports {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = self.entries.keys().map(|name| String::from_utf8_lossy(name));
        f.debug_struct("Exports")
            .field("names", &names.collect::<Vec<_>>())
            .field("directory", &self.directory.as_ref().map(|directory| &directory.path))
            .finish()
    }
}

impl Exports {
    /// Makes an empty set of exports.
    pub fn new() -> Self {
        Self::default()
    }

    /// Puts filters in front of the storage of all exports that are added from now on, for tests of
    /// who uses them.
    pub fn set_filters(&mut self, filters: Filters) {
        self.filters = filters;
    }

    /// Exports memory: zero at first, lost when the server ends.
    ///
    /// # Errors
    /// `EEXIST` for a name in use, `EINVAL` for a name that cannot be sent or an invalid block
    /// size, `ENOMEM`.
    pub fn memory(&mut self, name: &str, bytes: u64, block: u32) -> Result<(), Error> {
        let backend = backend::open(BackendSpec::Memory { bytes, block });
        let backend = backend.map_err(|error| Error::io(format!("memory for {name}"), &error))?;
        self.backend(name, backend)
    }

    /// Exports a store of the program, which may be [`backend::open`]'s or its own: see
    /// [`Backend`]. It is for reading only if its limits say so; [`set_read_only`] is for any other
    /// one.
    ///
    /// [`set_read_only`]: Self::set_read_only
    ///
    /// # Errors
    /// `EEXIST` for a name in use, `EINVAL` for a name that cannot be sent.
    pub fn backend(&mut self, name: &str, backend: Arc<dyn Backend>) -> Result<(), Error> {
        let failed = |error| Error::io(format!("filters of export {name}"), &error);
        let backend = filtered(backend, self.filters).map_err(failed)?;
        self.numbers += 1;
        let identity = Identity::Store(self.numbers);
        self.add(name, Entry { backend, identity, read_only: false, path: None })
    }

    /// Offers a named export for reading only, whatever its store allows: opens for writing fail
    /// with `EACCES`.
    ///
    /// # Errors
    /// `ENOENT` for a name without an export of its own.
    pub fn set_read_only(&mut self, name: &str) -> Result<(), Error> {
        let failed = || Error::new(format!("export {name}"), Errno::ENOENT);
        self.entries.get_mut(name.as_bytes()).ok_or_else(failed)?.read_only = true;
        Ok(())
    }

    /// Exports a regular file or a block device. It is opened now: a file that takes its path later
    /// is not served.
    ///
    /// # Errors
    /// As for memory; errors of opening the file; `ENOTBLK` for any other kind of file.
    pub fn file(&mut self, name: &str, path: &Path, options: FileOptions) -> Result<(), Error> {
        let what = || format!("export {name} of {}", path.display());
        let flags = OFlags::CLOEXEC | OFlags::NONBLOCK;
        let mode = if options.read_only { OFlags::RDONLY } else { OFlags::RDWR };
        let fd = rustix::fs::open(path, flags | mode, Mode::empty());
        let fd = fd.map_err(|errno| Error::io(what(), &errno.into()))?;
        let identity = identity(&fd).map_err(|errno| Error::new(what(), errno))?;
        let read_only = options.read_only;
        let backend = Store::File(fd, options, self.filters).backend(read_only);
        let backend = backend.map_err(|errno| Error::new(what(), errno))?;
        self.add(name, Entry { backend, identity, read_only, path: Some(path.to_owned()) })
    }

    fn add(&mut self, name: &str, entry: Entry) -> Result<(), Error> {
        if name.is_empty() || name.len() > NAME_MAX || name.contains('\0') || name.contains("..") {
            return Err(Error::new(format!("export name {name:?}"), Errno::EINVAL));
        }
        if self.entries.contains_key(name.as_bytes()) {
            return Err(Error::new(format!("export {name}"), Errno::EEXIST));
        }
        self.entries.insert(name.as_bytes().to_vec(), entry);
        Ok(())
    }

    /// Exports every regular file and block device below a directory. Symbolic links that lead out
    /// of it are not followed. `%SESSNAME%` in the path stands for the name of the session; the
    /// rest of the path after it is dropped [NB-18] [NB-46].
    ///
    /// # Errors
    /// Errors of opening the directory; `EEXIST` when there is one already.
    pub fn directory(&mut self, path: &Path, options: FileOptions) -> Result<(), Error> {
        let what = || format!("exports below {}", path.display());
        if self.directory.is_some() {
            return Err(Error::new(what(), Errno::EEXIST));
        }
        let text = path.to_str().and_then(|path| path.split_once(SESSION_NAME));
        let root = text.map_or(path, |(before, _)| Path::new(before));
        let root = File::open(root).map_err(|error| Error::io(what(), &error))?;
        let by_session = text.is_some();
        let path = path.to_owned();
        let filters = self.filters;
        let directory = Directory { path, root: root.into(), by_session, options, filters };
        self.directory = Some(Arc::new(directory));
        Ok(())
    }

    /// Adds a grant. A name below the directory is looked up at each open, so its file may be
    /// created later; with `%SESSNAME%`, the name stands for a file of each session.
    ///
    /// # Errors
    /// `ENOENT` for a name without an export of its own, unless there is a directory; `EINVAL` for
    /// a name that no client can open.
    pub fn grant(&mut self, grant: Grant) -> Result<(), Error> {
        if grant.export.contains("..") {
            return Err(Error::new(format!("grant for export {}", grant.export), Errno::EINVAL));
        }
        if !self.entries.contains_key(grant.export.as_bytes()) && self.directory.is_none() {
            return Err(Error::new(format!("grant for export {}", grant.export), Errno::ENOENT));
        }
        self.grants.push(grant);
        Ok(())
    }

    /// Removes a named export with its grants; returns false if there is none of that name.
    pub(super) fn remove(&mut self, name: &str) -> bool {
        let was_there = self.entries.remove(name.as_bytes()).is_some();
        if was_there {
            self.grants.retain(|grant| grant.export != name);
        }
        was_there
    }

    /// Checks an open against the grants.
    fn check_grants(&self, identity: Identity, session: &str, access: Access) -> Result<(), Errno> {
        let (mut open, mut admitted) = (true, false);
        for grant in &self.grants {
            if self.identity(&grant.export, session)? == Some(identity) {
                open = false;
                admitted |= grant.admits(session, access);
            }
        }
        if open || admitted { Ok(()) } else { Err(Errno::EACCES) }
    }

    /// Returns the identity of the file that a grant names now. A failed lookup is an error: it
    /// must not be mistaken for a name without a file.
    fn identity(&self, name: &str, session: &str) -> Result<Option<Identity>, Errno> {
        if let Some(entry) = self.entries.get(name.as_bytes()) {
            return Ok(Some(entry.identity));
        }
        let Some(directory) = &self.directory else { return Ok(None) };
        let path = directory.relative(name, session);
        match path.and_then(|path| directory.stat(&path)) {
            Ok(identity) => Ok(Some(identity)),
            // No file that could be opened has this name.
            Err(Errno::ENOENT | Errno::ENOTDIR | Errno::ENOTBLK) => Ok(None),
            // The system is busy, the disk has failed, or a directory may not be searched: the file
            // may exist.
            Err(_) => Err(Errno::EACCES),
        }
    }

    /// Returns the names of exports, without files below the directory.
    pub fn names(&self) -> impl Iterator<Item = &[u8]> {
        self.entries.keys().map(Vec::as_slice)
    }

    /// Returns the store of a named export.
    pub(super) fn store(&self, name: &str) -> Option<(Identity, Arc<dyn Backend>)> {
        let entry = self.entries.get(name.as_bytes())?;
        Some((entry.identity, Arc::clone(&entry.backend)))
    }

    /// Checks the paths of named exports; returns the exports whose files are no longer there.
    pub(super) fn moved(&self) -> Vec<Moved> {
        let all = self.entries.iter();
        all.filter_map(|(name, entry)| {
            let path = entry.path.as_ref()?;
            let missing = match stat(path).map_err(errno_of).and_then(|stat| identity_of(&stat)) {
                Ok(identity) if identity == entry.identity => return None,
                // A directory, for example, counts as another file.
                Ok(_) | Err(Errno::ENOTBLK) => None,
                Err(errno) => Some(errno),
            };
            let export = String::from_utf8_lossy(name).into_owned();
            Some(Moved { export, path: path.clone(), missing })
        })
        .collect()
    }

    /// Tells whether a named export with another identity has this place in the control tree.
    pub(super) fn offers_another(&self, place: &str, than: Identity) -> bool {
        let mut all = self.entries.iter();
        all.any(|(name, entry)| {
            entry.identity != than && tree::dir_name(&String::from_utf8_lossy(name)) == place
        })
    }

    /// Tells whether a named export is read-only.
    pub(super) fn read_only(&self, name: &str) -> bool {
        self.entries.get(name.as_bytes()).is_some_and(|entry| entry.read_only)
    }

    /// Looks up and opens an export for a session.
    pub(super) fn find(&self, name: &[u8], session: &str, access: Access) -> Result<Found, Errno> {
        if let Some(entry) = self.entries.get(name) {
            self.check_grants(entry.identity, session, access)?;
            return Ok(Found {
                identity: entry.identity,
                label: String::from_utf8_lossy(name).into_owned(),
                read_only: entry.read_only,
                store: Store::Open(Arc::clone(&entry.backend)),
            });
        }
        let directory = self.directory.as_ref().ok_or(Errno::ENOENT)?;
        let name = std::str::from_utf8(name).map_err(|_| Errno::ENOENT)?;
        let path = directory.relative(name, session)?;
        let (options, filters) = (directory.options, directory.filters);
        // Opening a tape, a watchdog or a FIFO has side effects, so the kind of file is checked
        // first. A file that takes its place in between is detected after the open.
        let expected = directory.stat(&path)?;
        self.check_grants(expected, session, access)?;
        let open = |mode| directory.open(&path, mode | OFlags::NONBLOCK);
        let write = access != Access::Ro;
        let written = if options.read_only { None } else { Some(open(OFlags::RDWR)) };
        let (fd, read_only) = match written {
            Some(Ok(fd)) => (fd, false),
            None if !write => (open(OFlags::RDONLY).map_err(errno_of)?, true),
            Some(Err(error)) if !write && unwritable(error) => {
                (open(OFlags::RDONLY).map_err(errno_of)?, true)
            }
            Some(Err(error)) => return Err(errno_of(error)),
            None => return Err(Errno::EACCES),
        };
        let identity = identity(&fd)?;
        if identity != expected {
            return Err(Errno::ENOENT);
        }
        Ok(Found { identity, label: path, read_only, store: Store::File(fd, options, filters) })
    }
}

fn errno_of(error: rustix::io::Errno) -> Errno {
    match error {
        // The path leads out of the directory: treated as missing.
        rustix::io::Errno::XDEV => Errno::ENOENT,
        rustix::io::Errno::ISDIR => Errno::ENOTBLK,
        error => Errno(error.raw_os_error()),
    }
}

/// Tells whether an error means that a file can be read but not written: because of its mode, its
/// file system, its immutability, or because it is being executed.
const fn unwritable(error: rustix::io::Errno) -> bool {
    use rustix::io::Errno;
    matches!(error, Errno::ACCESS | Errno::ROFS | Errno::PERM | Errno::TXTBSY)
}

fn identity(fd: &OwnedFd) -> Result<Identity, Errno> {
    fstat(fd).map_err(errno_of).and_then(|stat| identity_of(&stat))
}

/// Returns the identity of a file; `ENOTBLK` when its kind cannot be exported.
fn identity_of(stat: &Stat) -> Result<Identity, Errno> {
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile => Ok(Identity::File(stat.st_dev, stat.st_ino)),
        FileType::BlockDevice => Ok(Identity::Device(stat.st_rdev)),
        _ => Err(Errno::ENOTBLK),
    }
}

impl Directory {
    /// Returns the path below the root [NB-17] [NB-18].
    fn relative(&self, name: &str, session: &str) -> Result<String, Errno> {
        let whole = self.path.as_os_str().len() + name.len() + session.len();
        if name.contains("..") || whole + 2 > PATH_MAX {
            return Err(Errno::EINVAL);
        }
        let first = self.by_session.then_some(session);
        let parts = first.into_iter().chain(name.split('/').filter(|part| !part.is_empty()));
        let path = parts.collect::<Vec<_>>().join("/");
        if path.is_empty() { Err(Errno::ENOTBLK) } else { Ok(path) }
    }

    fn open(&self, path: &str, flags: OFlags) -> rustix::io::Result<OwnedFd> {
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS;
        let flags = flags | OFlags::CLOEXEC;
        let open = || openat2(self.root.as_fd(), path, flags, Mode::empty(), resolve);
        // A symbolic link may contain `..`. If any file is renamed meanwhile, the kernel cannot
        // tell whether the link leads out, and returns EAGAIN.
        let mut tries = (1..OPEN_TRIES).map(|_| open());
        tries.find(|opened| !matches!(opened, Err(rustix::io::Errno::AGAIN))).unwrap_or_else(open)
    }

    /// Returns the identity of the file at a path, without opening it.
    fn stat(&self, path: &str) -> Result<Identity, Errno> {
        identity(&self.open(path, OFlags::PATH).map_err(errno_of)?)
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;
    use std::sync::atomic::{AtomicBool, Ordering};

    use rustix::fs::{IFlags, ioctl_getflags, ioctl_setflags};

    use super::*;

    /// A temporary directory of one test, removed at its end.
    struct Scratch(PathBuf);

    impl Scratch {
        fn new(name: &str) -> Self {
            let dir = std::env::temp_dir().join(format!("bowline-{name}-{}", std::process::id()));
            std::fs::create_dir_all(&dir).unwrap();
            Self(dir)
        }

        fn file(&self, name: &str) -> PathBuf {
            let path = self.0.join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(&path, [7; 8192]).unwrap();
            path
        }
    }

    impl Drop for Scratch {
        fn drop(&mut self) {
            // If this fails, the system clears its temporary files.
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    fn error(found: Result<Found, Errno>) -> Errno {
        found.err().expect("an error")
    }

    #[test]
    fn only_what_is_offered_is_found() {
        // tests [NB-46]
        let mut exports = Exports::new();
        exports.memory("disk0", 1 << 20, 512).unwrap();
        assert_eq!(exports.memory("disk0", 1, 512).unwrap_err().errno(), Errno::EEXIST);
        for name in ["", "a..b", &"x".repeat(255)] {
            assert_eq!(exports.memory(name, 1 << 20, 512).unwrap_err().errno(), Errno::EINVAL);
        }
        assert!(exports.find(b"disk0", "s", Access::Rw).is_ok());
        assert_eq!(error(exports.find(b"/disk0", "s", Access::Rw)), Errno::ENOENT);
        assert_eq!(exports.names().collect::<Vec<_>>(), [b"disk0"]);
    }

    #[test]
    fn one_file_has_one_identity_whatever_its_name() {
        // tests [NB-58]
        let scratch = Scratch::new("identity");
        let path = scratch.file("a.img");
        std::fs::hard_link(&path, scratch.0.join("b.img")).unwrap();
        let mut exports = Exports::new();
        exports.file("disk0", &path, FileOptions::default()).unwrap();
        exports.directory(&scratch.0, FileOptions::default()).unwrap();
        let of = |name: &[u8]| exports.find(name, "s", Access::Rw).unwrap().identity;
        assert_eq!(of(b"disk0"), of(b"//a.img"));
        assert_eq!(of(b"disk0"), of(b"b.img"));
    }

    #[test]
    fn a_directory_is_not_left() {
        // tests [NB-17] [NB-18] [NB-46]
        let scratch = Scratch::new("beneath");
        let inside = scratch.file("exports/in/a.img");
        scratch.file("secret.img");
        let root = scratch.0.join("exports");
        symlink("../secret.img", root.join("up")).unwrap();
        symlink(scratch.0.join("secret.img"), root.join("away")).unwrap();
        symlink("in/a.img", root.join("within")).unwrap();
        let mut exports = Exports::new();
        exports.directory(&root, FileOptions::default()).unwrap();
        assert!(exports.find(b"within", "s", Access::Rw).is_ok());
        assert!(exports.find(b"/in//a.img", "s", Access::Rw).is_ok());
        assert_eq!(error(exports.find(b"up", "s", Access::Rw)), Errno::ENOENT);
        assert_eq!(error(exports.find(b"away", "s", Access::Rw)), Errno::ENOENT);
        assert_eq!(error(exports.find(b"../secret.img", "s", Access::Rw)), Errno::EINVAL);
        assert_eq!(error(exports.find(b"in", "s", Access::Ro)), Errno::ENOTBLK);
        assert_eq!(error(exports.find(b"/", "s", Access::Ro)), Errno::ENOTBLK);
        assert_eq!(error(exports.find(b"none", "s", Access::Ro)), Errno::ENOENT);
        assert!(inside.exists());
    }

    #[test]
    fn a_directory_may_be_of_the_session() {
        // tests [NB-18]
        let scratch = Scratch::new("session");
        scratch.file("s1/a.img");
        let mut exports = Exports::new();
        let path = scratch.0.join("%SESSNAME%/dropped");
        exports.directory(&path, FileOptions::default()).unwrap();
        assert!(exports.find(b"a.img", "s1", Access::Rw).is_ok());
        assert_eq!(error(exports.find(b"a.img", "s2", Access::Rw)), Errno::ENOENT);
    }

    fn grant(export: &str, max_access: Access, session: Option<&str>) -> Grant {
        Grant { export: export.to_owned(), max_access, session: session.map(str::to_owned) }
    }

    /// Access modes with which a session may open a name.
    fn modes(exports: &Exports, name: &str, session: &str) -> Vec<Access> {
        let all = [Access::Ro, Access::Rw, Access::Migration].into_iter();
        let open = |access: &Access| match exports.find(name.as_bytes(), session, *access) {
            Ok(_) => true,
            Err(errno) => {
                assert_eq!(errno, Errno::EACCES, "{name} {session}");
                false
            }
        };
        all.filter(open).collect()
    }

    #[test]
    fn grants_limit_sessions_and_access_modes() {
        // tests [NB-50]
        const NONE: [Access; 0] = [];
        let all = [Access::Ro, Access::Rw, Access::Migration];
        let mut exports = Exports::new();
        for name in ["disk0", "disk1", "disk2"] {
            exports.memory(name, 4096, 512).unwrap();
        }
        exports.grant(grant("disk0", Access::Ro, None)).unwrap();
        exports.grant(grant("disk0", Access::Rw, Some("vm*@host"))).unwrap();
        exports.grant(grant("disk0", Access::Migration, Some("vm7@*"))).unwrap();
        exports.grant(grant("disk1", Access::Rw, Some("s1"))).unwrap();
        assert_eq!(modes(&exports, "disk0", "other"), all[..1]);
        assert_eq!(modes(&exports, "disk0", "vm1@host"), all[..2]);
        assert_eq!(modes(&exports, "disk0", "vm7@host"), all, "the best one counts");
        assert_eq!(modes(&exports, "disk1", "s1"), all[..2]);
        assert_eq!(modes(&exports, "disk1", "s2"), NONE);
        assert_eq!(modes(&exports, "disk2", "s2"), all, "it has no grants");
        let unknown = exports.grant(grant("disk9", Access::Ro, None));
        assert_eq!(unknown.unwrap_err().errno(), Errno::ENOENT);
    }

    #[test]
    fn grants_apply_to_the_file_under_every_name() {
        // tests [NB-50] [NB-58]
        const NONE: [Access; 0] = [];
        let scratch = Scratch::new("grants");
        let path = scratch.file("s1/in/a.img");
        scratch.file("s1/free.img");
        std::fs::hard_link(&path, scratch.0.join("s1/hard.img")).unwrap();
        symlink("in/a.img", scratch.0.join("s1/soft.img")).unwrap();
        let names = ["in/a.img", "//in/./a.img", "hard.img", "soft.img"];
        let mut exports = Exports::new();
        exports.directory(&scratch.0.join("%SESSNAME%"), FileOptions::default()).unwrap();
        exports.grant(grant("later.img", Access::Ro, None)).unwrap();
        exports.grant(grant("/in/a.img", Access::Ro, Some("s*"))).unwrap();
        for name in names {
            assert_eq!(modes(&exports, name, "s1"), [Access::Ro], "{name}");
        }
        assert_eq!(modes(&exports, "free.img", "s1").len(), 3);
        scratch.file("s1/later.img");
        assert_eq!(modes(&exports, "later.img", "s1"), [Access::Ro], "looked up when it is opened");
        // A grant for a named export does not open the file's other names.
        exports.file("disk0", &path, FileOptions::default()).unwrap();
        exports.grant(grant("disk0", Access::Ro, Some("x"))).unwrap();
        exports.grants.retain(|grant| grant.export == "disk0");
        for name in names {
            assert_eq!(modes(&exports, name, "s1"), NONE, "{name}");
        }
    }

    #[test]
    fn a_grant_holds_whatever_is_renamed_meanwhile() {
        // tests [NB-17] [NB-50]
        const NONE: [Access; 0] = [];
        let scratch = Scratch::new("renames");
        scratch.file("pool/vm1.img");
        scratch.file("unrelated");
        std::fs::create_dir(scratch.0.join("s")).unwrap();
        symlink("../pool/vm1.img", scratch.0.join("s/vm1.img")).unwrap();
        let mut exports = Exports::new();
        exports.directory(&scratch.0, FileOptions::default()).unwrap();
        exports.grant(grant("s/vm1.img", Access::Ro, Some("friend"))).unwrap();
        let stop = AtomicBool::new(false);
        std::thread::scope(|threads| {
            threads.spawn(|| {
                let (one, other) = (scratch.0.join("unrelated"), scratch.0.join("renamed"));
                while !stop.load(Ordering::Relaxed) {
                    std::fs::rename(&one, &other).unwrap();
                    std::fs::rename(&other, &one).unwrap();
                }
            });
            let all = || {
                for _ in 0..3000 {
                    assert_eq!(modes(&exports, "pool/vm1.img", "evil"), NONE);
                    assert_eq!(modes(&exports, "s/vm1.img", "friend"), [Access::Ro]);
                }
            };
            let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(all));
            stop.store(true, Ordering::Relaxed);
            result.unwrap();
        });
    }

    #[test]
    fn a_grant_that_cannot_be_looked_up_refuses_every_session() {
        // tests [NB-50]
        let scratch = Scratch::new("unknown");
        scratch.file("a.img");
        symlink("round", scratch.0.join("round")).unwrap();
        let mut exports = Exports::new();
        exports.directory(&scratch.0, FileOptions::default()).unwrap();
        let dotted = exports.grant(grant("s/../a.img", Access::Ro, Some("friend")));
        assert_eq!(dotted.unwrap_err().errno(), Errno::EINVAL, "it would be of nothing");
        for nothing in ["none", "a.img/none", "/"] {
            exports.grant(grant(nothing, Access::Ro, Some("friend"))).unwrap();
        }
        assert!(exports.find(b"a.img", "s", Access::Rw).is_ok(), "it has no grants");
        exports.grant(grant("round", Access::Ro, Some("friend"))).unwrap();
        assert_eq!(error(exports.find(b"a.img", "s", Access::Ro)), Errno::EACCES);
    }

    #[test]
    fn an_unwritable_file_can_be_opened_read_only() {
        // tests [NB-17]
        let scratch = Scratch::new("unwritable");
        let image = scratch.file("gold.img");
        let mut exports = Exports::new();
        exports.directory(&scratch.0, FileOptions::default()).unwrap();
        let program = scratch.0.join("program");
        std::fs::copy("/bin/sleep", &program).unwrap();
        let mut running = std::process::Command::new(&program).arg("60").spawn().unwrap();
        let found = exports.find(b"program", "s", Access::Ro).map(|found| found.read_only);
        running.kill().unwrap();
        running.wait().unwrap();
        assert_eq!(found, Ok(true), "it is being executed");
        let file = File::open(&image).unwrap();
        let flags = ioctl_getflags(&file).unwrap_or(IFlags::empty());
        if let Err(error) = ioctl_setflags(&file, flags | IFlags::IMMUTABLE) {
            return bowline_testkit::skipped::because(format!(
                "no file can be made immutable: {error}"
            ));
        }
        let read = exports.find(b"gold.img", "s", Access::Ro).map(|found| found.read_only);
        let write = exports.find(b"gold.img", "s", Access::Rw).err();
        ioctl_setflags(&file, flags).unwrap();
        assert_eq!((read, write), (Ok(true), Some(Errno::EPERM)));
    }

    #[test]
    fn a_read_only_directory_takes_no_writer() {
        // tests [NB-17]
        let scratch = Scratch::new("readonly");
        scratch.file("a.img");
        let mut exports = Exports::new();
        let options = FileOptions { read_only: true, ..FileOptions::default() };
        exports.directory(&scratch.0, options).unwrap();
        assert_eq!(error(exports.find(b"a.img", "s", Access::Rw)), Errno::EACCES);
        assert!(exports.find(b"a.img", "s", Access::Ro).unwrap().read_only);
    }
}
