//! What a server offers: names, and what is behind them.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bowline_block::backend::{self, Backend, BackendSpec};
use bowline_rnbd::Errno;
use bowline_rtrs::server::name_fits;
use bowline_wire::rnbd::{Access, NAME_MAX};
use rustix::fs::{FileType, Mode, OFlags, ResolveFlags, Stat, fstat, openat2, stat};

use crate::error::Error;
use crate::tree;

/// Stands for the name of the session in the path of a directory [NB-18].
const SESSION_NAME: &str = "%SESSNAME%";
/// Bytes of a path, its NUL included [NB-18].
const PATH_MAX: usize = 4096;
/// How often a lookup is tried that something was renamed beside.
const TRIES: usize = 256;

/// How the files behind exports are used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileOptions {
    /// Nothing may be written, whoever asks.
    pub read_only: bool,
    /// Bytes of a logical block: a power of two from 512 to 4096.
    pub block: u32,
    /// Whether to go around the page cache where the file system can.
    pub direct: bool,
}

impl Default for FileOptions {
    fn default() -> Self {
        Self { read_only: false, block: 512, direct: true }
    }
}

/// What sessions may open an export for [NB-50].
///
/// An export without grants is open to everybody. One that has some is open to sessions that one of
/// them is for, and for no more than it says. They are of what is behind the name: other names of
/// the same file have the same grants.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Grant {
    /// Name of an export, or what a client says for a file below the directory.
    pub export: String,
    /// The most it may be opened for: [`Access::Migration`] includes [`Access::Rw`], and that
    /// [`Access::Ro`].
    pub most: Access,
    /// What the session is called, `*` standing for anything; `None`: whatever it is called.
    pub session: Option<String>,
}

impl Grant {
    fn admits(&self, session: &str, access: Access) -> bool {
        let named = self.session.as_deref().is_none_or(|pattern| name_fits(pattern, session));
        // Each mode has the number after that of the mode it includes [NB-7].
        named && access as u8 <= self.most as u8
    }
}

/// What is behind a name, whatever the name: two names of one file have one identity [NB-58].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Identity {
    /// A store of this server, by number.
    Own(u64),
    /// A file: device and inode.
    File(u64, u64),
    /// A block device: its number.
    Device(u64),
}

/// An export of a file that is not at its path any more: what was opened is served still.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Moved {
    /// Name of the export.
    pub export: String,
    /// Where the file was.
    pub path: PathBuf,
    /// Why nothing is found there, `ENOENT` when the path is gone; `None`: another file is there.
    pub missing: Option<Errno>,
}

#[derive(Clone)]
struct Entry {
    backend: Arc<dyn Backend>,
    identity: Identity,
    read_only: bool,
    /// Where it was opened.
    path: Option<PathBuf>,
}

struct Directory {
    path: PathBuf,
    /// What comes before the session's name, opened; or all of it.
    root: OwnedFd,
    by_session: bool,
    options: FileOptions,
}

/// An export that was found.
pub(super) struct Found {
    pub(super) identity: Identity,
    pub(super) label: String,
    pub(super) read_only: bool,
    pub(super) store: Store,
}

/// Its storage.
pub(super) enum Store {
    /// Already there.
    Open(Arc<dyn Backend>),
    /// A file that was just opened.
    File(OwnedFd, FileOptions),
}

impl Store {
    /// Returns the storage, made if need be.
    pub(super) fn backend(self, read_only: bool) -> Result<Arc<dyn Backend>, Errno> {
        match self {
            Self::Open(backend) => Ok(backend),
            Self::File(fd, FileOptions { block, direct, .. }) => {
                let spec = BackendSpec::File { fd, read_only, block, direct };
                backend::open(spec).map_err(|error| Errno::of(&error))
            }
        }
    }
}

/// What a server offers. Names are compared as they are sent [NB-46].
#[derive(Default)]
pub struct Exports {
    entries: BTreeMap<Vec<u8>, Entry>,
    directory: Option<Directory>,
    grants: Vec<Grant>,
    numbers: u64,
}

impl std::fmt::Debug for Exports {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let names = self.entries.keys().map(|name| String::from_utf8_lossy(name));
        f.debug_struct("Exports")
            .field("names", &names.collect::<Vec<_>>())
            .field("directory", &self.directory.as_ref().map(|directory| &directory.path))
            .finish()
    }
}

impl Exports {
    /// Offers nothing yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Offers memory: zero at first, lost at the end.
    ///
    /// # Errors
    /// `EEXIST` for a name there is, `EINVAL` for one that cannot be sent or a block size that is
    /// none, `ENOMEM`.
    pub fn memory(&mut self, name: &str, bytes: u64, block: u32) -> Result<(), Error> {
        let backend = backend::open(BackendSpec::Memory { bytes, block });
        let backend = backend.map_err(|error| Error::io(format!("memory for {name}"), &error))?;
        self.backend(name, backend, false)
    }

    /// Offers a store of the caller's.
    ///
    /// # Errors
    /// `EEXIST` for a name there is, `EINVAL` for one that cannot be sent.
    pub fn backend(
        &mut self,
        name: &str,
        backend: Arc<dyn Backend>,
        read_only: bool,
    ) -> Result<(), Error> {
        self.numbers += 1;
        let identity = Identity::Own(self.numbers);
        self.add(name, Entry { backend, identity, read_only, path: None })
    }

    /// Offers a regular file or a block device. It is opened now: what takes its path later is not
    /// served.
    ///
    /// # Errors
    /// As for memory; what opening the file comes to; `ENOTBLK` for what is neither.
    pub fn file(&mut self, name: &str, path: &Path, options: FileOptions) -> Result<(), Error> {
        let what = || format!("export {name} of {}", path.display());
        let flags = OFlags::CLOEXEC | OFlags::NONBLOCK;
        let mode = if options.read_only { OFlags::RDONLY } else { OFlags::RDWR };
        let fd = rustix::fs::open(path, flags | mode, Mode::empty());
        let fd = fd.map_err(|errno| Error::io(what(), &errno.into()))?;
        let identity = identity(&fd).map_err(|errno| Error::new(what(), errno))?;
        let read_only = options.read_only;
        let backend = Store::File(fd, options).backend(read_only);
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

    /// Offers every regular file and block device below a directory, which symbolic links do not
    /// leave. `%SESSNAME%` in the path stands for the name of the session; what comes after it is
    /// dropped [NB-18] [NB-46].
    ///
    /// # Errors
    /// What opening the directory comes to; `EEXIST` when there is one already.
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
        self.directory = Some(Directory { path, root: root.into(), by_session, options });
        Ok(())
    }

    /// Says who may open an export for what. A name below the directory is looked up when somebody
    /// opens something, so its file may come later; with `%SESSNAME%`, it is of each session's own.
    ///
    /// # Errors
    /// `ENOENT` for a name that is not offered by itself, unless there is a directory; `EINVAL` for
    /// one that nobody can open anything by.
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

    /// Judges an open by the grants.
    fn judge(&self, identity: Identity, session: &str, access: Access) -> Result<(), Errno> {
        let (mut open, mut admitted) = (true, false);
        for grant in &self.grants {
            if self.identity(&grant.export, session)? == Some(identity) {
                open = false;
                admitted |= grant.admits(session, access);
            }
        }
        if open || admitted { Ok(()) } else { Err(Errno::EACCES) }
    }

    /// Returns what is behind the name of a grant now. An error when that is not to be known now:
    /// then nobody may take it for a name that is not there.
    fn identity(&self, name: &str, session: &str) -> Result<Option<Identity>, Errno> {
        if let Some(entry) = self.entries.get(name.as_bytes()) {
            return Ok(Some(entry.identity));
        }
        let Some(directory) = &self.directory else { return Ok(None) };
        let path = directory.relative(name, session);
        match path.and_then(|path| directory.look(&path)) {
            Ok(identity) => Ok(Some(identity)),
            // Nothing that anybody could open is there.
            Err(Errno::ENOENT | Errno::ENOTDIR | Errno::ENOTBLK) => Ok(None),
            // The system was busy, the disk has failed, a folder is closed: the file may be there.
            Err(_) => Err(Errno::EACCES),
        }
    }

    /// Returns the names that are offered one by one.
    pub fn names(&self) -> impl Iterator<Item = &[u8]> {
        self.entries.keys().map(Vec::as_slice)
    }

    /// Returns the store behind a name that is offered by itself.
    pub(super) fn store(&self, name: &str) -> Option<(Identity, Arc<dyn Backend>)> {
        let entry = self.entries.get(name.as_bytes())?;
        Some((entry.identity, Arc::clone(&entry.backend)))
    }

    /// Looks where the files are now that are offered by themselves; returns those that have gone
    /// from their paths.
    pub(super) fn moved(&self) -> Vec<Moved> {
        let all = self.entries.iter();
        all.filter_map(|(name, entry)| {
            let path = entry.path.as_ref()?;
            let missing = match stat(path).map_err(system).and_then(|stat| kind(&stat)) {
                Ok(identity) if identity == entry.identity => return None,
                // A folder, say, is another file too.
                Ok(_) | Err(Errno::ENOTBLK) => None,
                Err(errno) => Some(errno),
            };
            let export = String::from_utf8_lossy(name).into_owned();
            Some(Moved { export, path: path.clone(), missing })
        })
        .collect()
    }

    /// Tells whether something else than this is offered by itself, and has this place in the
    /// control tree.
    pub(super) fn offers_another(&self, place: &str, than: Identity) -> bool {
        let mut all = self.entries.iter();
        all.any(|(name, entry)| {
            entry.identity != than && tree::plain(&String::from_utf8_lossy(name)) == place
        })
    }

    /// Tells whether a name that is offered by itself may not be written.
    pub(super) fn read_only(&self, name: &str) -> bool {
        self.entries.get(name.as_bytes()).is_some_and(|entry| entry.read_only)
    }

    /// Finds what a session asks for.
    pub(super) fn find(&self, name: &[u8], session: &str, access: Access) -> Result<Found, Errno> {
        if let Some(entry) = self.entries.get(name) {
            self.judge(entry.identity, session, access)?;
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
        let options = directory.options;
        // Opening a tape, a watchdog or a FIFO already does something: it is looked at before. What
        // takes its place in between is found out after.
        let kind = directory.look(&path)?;
        self.judge(kind, session, access)?;
        let open = |mode| directory.open(&path, mode | OFlags::NONBLOCK);
        let write = access != Access::Ro;
        let written = if options.read_only { None } else { Some(open(OFlags::RDWR)) };
        let (fd, read_only) = match written {
            Some(Ok(fd)) => (fd, false),
            None if !write => (open(OFlags::RDONLY).map_err(system)?, true),
            Some(Err(error)) if !write && unwritable(error) => {
                (open(OFlags::RDONLY).map_err(system)?, true)
            }
            Some(Err(error)) => return Err(system(error)),
            None => return Err(Errno::EACCES),
        };
        let identity = identity(&fd)?;
        if identity != kind {
            return Err(Errno::ENOENT);
        }
        Ok(Found { identity, label: path, read_only, store: Store::File(fd, options) })
    }
}

fn system(error: rustix::io::Errno) -> Errno {
    match error {
        // Out of the directory: as if it were not there.
        rustix::io::Errno::XDEV => Errno::ENOENT,
        rustix::io::Errno::ISDIR => Errno::ENOTBLK,
        error => Errno(error.raw_os_error()),
    }
}

/// Tells whether an error says that a file can at most be read: by its mode, its file system, its
/// immutability, or because it is being executed.
const fn unwritable(error: rustix::io::Errno) -> bool {
    use rustix::io::Errno;
    matches!(error, Errno::ACCESS | Errno::ROFS | Errno::PERM | Errno::TXTBSY)
}

fn identity(fd: &OwnedFd) -> Result<Identity, Errno> {
    fstat(fd).map_err(system).and_then(|stat| kind(&stat))
}

/// Tells what it is that was looked at; `ENOTBLK` when that can be no export.
fn kind(stat: &Stat) -> Result<Identity, Errno> {
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
        // A link with `..` in it: when anything at all is renamed meanwhile, the system cannot tell
        // whether it leads out.
        let mut tries = (1..TRIES).map(|_| open());
        tries.find(|opened| !matches!(opened, Err(rustix::io::Errno::AGAIN))).unwrap_or_else(open)
    }

    /// Finds out what is at a path, without opening it.
    fn look(&self, path: &str) -> Result<Identity, Errno> {
        identity(&self.open(path, OFlags::PATH).map_err(system)?)
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;
    use std::sync::atomic::{AtomicBool, Ordering};

    use rustix::fs::{IFlags, ioctl_getflags, ioctl_setflags};

    use super::*;

    /// A directory of this test alone, removed at its end.
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
            // The system clears its temporary files where this fails.
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

    fn grant(export: &str, most: Access, session: Option<&str>) -> Grant {
        Grant { export: export.to_owned(), most, session: session.map(str::to_owned) }
    }

    /// What a session may open a name for.
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
    fn grants_say_who_may_open_what_and_how() {
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
    fn grants_are_of_the_file_whatever_its_name() {
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
        // A name of its own does not open the way around it.
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
    fn a_grant_that_cannot_be_looked_up_refuses_everybody() {
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
    fn what_can_only_be_read_can_be_opened_for_that() {
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
