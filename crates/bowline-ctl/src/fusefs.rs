//! A tree as files, with FUSE: `cat` reads an attribute, `echo` carries out a command.
//!
//! Needs /dev/fuse and root, or `fusermount3` for other users. Nothing is cached: every access goes
//! to the objects, as in /sys; only the text of an open file is that of one moment until it is read
//! from its start again. A write is one command and its result is the result of write(2). Each
//! command runs in its own thread, so a slow command blocks no other access.

use std::{
    collections::HashMap,
    ffi::OsStr,
    fmt, fs, io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    process::Command,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant, SystemTime},
};

use fuser::{
    BsdFileFlags, Config, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation,
    INodeNo, LockOwner, MountOption, OpenAccMode, OpenFlags, RenameFlags, ReplyAttr, ReplyData,
    ReplyDirectory, ReplyEmpty, ReplyEntry, ReplyOpen, ReplyWrite, Request, TimeOrNow, WriteFlags,
};

use crate::{Errno, Found, Kind, Tree};

/// Source name of a mount in the mount table; mounts of disks use it too.
const NAME: &str = "bowline";
/// Longest command, as in sysfs.
const COMMAND_BYTES_MAX: usize = 4096;
/// Most commands at a time; more are refused with `EAGAIN`.
const COMMANDS_MAX: usize = 64;
/// How long the kernel may cache answers: not at all.
const TTL: Duration = Duration::ZERO;
/// How long unmounting waits for the last requests.
const PATIENCE: Duration = Duration::from_secs(2);
/// How long unmounting waits for commands in progress, and how often it checks.
const END_WAIT: Duration = Duration::from_secs(2);
const END_LOOK: Duration = Duration::from_millis(5);
/// Inode number in listings of entries that were not looked up.
const UNKNOWN: INodeNo = INodeNo(u32::MAX as u64);

/// A mounted tree. Dropping it unmounts it, lazily if it is in use. Commands in progress are
/// answered first, unless that takes more than two seconds.
#[derive(Debug)]
pub struct Mount {
    dir: PathBuf,
    device: u64,
    commands: Arc<AtomicUsize>,
    session: Option<fuser::BackgroundSession>,
}

impl Mount {
    /// Returns the directory.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Unmounts the tree, and waits a little for requests in progress.
    fn unmount(&self, session: fuser::BackgroundSession) {
        let guard: thread::JoinHandle<io::Result<()>> = {
            let session = session;
            session.guard
            // Dropping the session unmounts; another process may have done so already.
        };
        let still_there = fs::metadata(&self.dir).is_ok_and(|dir| dir.dev() == self.device);
        if still_there {
            // The mount is in use: it is detached all the same. Without the privilege, fusermount3
            // has done so already.
            let _ = rustix::mount::unmount(&self.dir, rustix::mount::UnmountFlags::DETACH);
        }
        let end = Instant::now() + PATIENCE;
        while !still_there && !guard.is_finished() && Instant::now() < end {
            thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let end = Instant::now() + END_WAIT;
        // Relaxed: the number guards no other memory.
        while self.commands.load(Ordering::Relaxed) > 0 && Instant::now() < end {
            thread::sleep(END_LOOK);
        }
        if let Some(session) = self.session.take() {
            self.unmount(session);
        }
    }
}

/// Creates the directory of a mount if it does not exist. A dead mount of bowline there, as kill -9
/// leaves it, is unmounted.
///
/// # Errors
///
/// `ResourceBusy` for a live mount of bowline, which another one would hide; `NotConnected` for a
/// dead mount of another program, or one that cannot be unmounted; the errors of creating the
/// directory.
pub fn folder(dir: &Path) -> io::Result<()> {
    let is_dead =
        || fs::metadata(dir).is_err_and(|error| error.raw_os_error() == Some(Errno::ENOTCONN.0));
    if is_dead() && (!is_bowline_mount(dir) || !detached(dir) || is_dead()) {
        return Err(io::Error::new(
            io::ErrorKind::NotConnected,
            "a stale mount is in the way: remove it with `umount -l`",
        ));
    }
    if is_bowline_mount(dir) {
        return Err(io::Error::new(
            io::ErrorKind::ResourceBusy,
            "a running bowline has mounted it: choose another folder",
        ));
    }
    fs::create_dir_all(dir)
}

/// Unmounts what a process of bowline has mounted that serves it no longer. Returns false if there
/// is no such mount, or if it cannot be unmounted.
pub fn unmount(dir: &Path) -> bool {
    is_bowline_mount(dir) && detached(dir)
}

/// Unmounts a directory, with `fusermount3` for other users than root.
fn detached(dir: &Path) -> bool {
    let helped = || Command::new("fusermount3").args(["-u", "-z", "--"]).arg(dir).output();
    rustix::mount::unmount(dir, rustix::mount::UnmountFlags::DETACH).is_ok()
        || helped().is_ok_and(|done| done.status.success())
}

/// Reports whether bowline has mounted the directory. The mount may be dead.
fn is_bowline_mount(dir: &Path) -> bool {
    mounted(dir).is_some()
}

/// Tells whether a mount of bowline with this device number is at the directory. Nobody need serve
/// it.
pub fn is_mounted(dir: &Path, device: u64) -> bool {
    let number = format!("{}:{}", rustix::fs::major(device), rustix::fs::minor(device));
    mounted(dir) == Some(number)
}

/// Returns the device number of what bowline has mounted at the directory, as `0:57`.
fn mounted(dir: &Path) -> Option<String> {
    let (parent, name) = (dir.parent()?, dir.file_name()?);
    let parent = if parent.as_os_str().is_empty() { Path::new(".") } else { parent };
    // The directory of a dead mount cannot be looked up itself.
    let place = parent.canonicalize().map(|parent| parent.join(name));
    let mounts = fs::read("/proc/self/mountinfo").unwrap_or_default();
    last_bowline_mount(&String::from_utf8_lossy(&mounts), &place.ok()?).map(str::to_owned)
}

/// Returns the device number of the last mount at `place`, if it is one of bowline.
fn last_bowline_mount<'a>(mounts: &'a str, place: &Path) -> Option<&'a str> {
    let place = place.to_str()?;
    let place = [('\\', "\\134"), (' ', "\\040"), ('\t', "\\011"), ('\n', "\\012")]
        .into_iter()
        .fold(place.to_owned(), |text, (letter, code)| text.replace(letter, code));
    let there = |line: &&str| line.split(' ').nth(4) == Some(place.as_str());
    let last = mounts.lines().rfind(there)?;
    let (_, kind) = last.split_once(" - ")?;
    let is_ours = kind.starts_with("fuse") && kind.split(' ').nth(1) == Some(NAME);
    last.split(' ').nth(2).filter(|_| is_ours)
}

/// Mounts the tree on a directory, which [`folder`] creates or cleans up.
///
/// # Errors
///
/// `PermissionDenied` or `NotFound` where FUSE cannot be used, and the errors of the directory.
pub fn mount(tree: Tree, dir: &Path) -> io::Result<Mount> {
    folder(dir)?;
    let mut config = Config::default();
    config.mount_options = vec![
        MountOption::FSName(NAME.to_owned()),
        MountOption::DefaultPermissions,
        MountOption::NoDev,
        MountOption::NoSuid,
        MountOption::NoExec,
    ];
    let files = Files::new(tree);
    let commands = Arc::clone(&files.commands);
    let session = fuser::spawn_mount(files, dir, &config)?;
    let device = fs::metadata(dir)?.dev();
    Ok(Mount { dir: dir.to_owned(), device, commands, session: Some(session) })
}

/// Maps inode numbers to paths. A number stays valid until the kernel forgets it.
#[derive(Debug)]
struct Inodes {
    by_number: HashMap<u64, (String, u64)>,
    by_path: HashMap<String, u64>,
    next: u64,
}

impl Inodes {
    fn new() -> Self {
        let root = INodeNo::ROOT.0;
        Self {
            by_number: HashMap::from([(root, (String::new(), 1))]),
            by_path: HashMap::from([(String::new(), root)]),
            next: root + 1,
        }
    }

    fn path(&self, number: u64) -> Result<String, Errno> {
        self.by_number.get(&number).map(|(path, _)| path.clone()).ok_or(Errno::ENOENT)
    }

    /// Counts one look-up of a path by the kernel.
    fn count_lookup(&mut self, path: &str) -> u64 {
        if let Some(number) = self.by_path.get(path) {
            if let Some((_, count)) = self.by_number.get_mut(number) {
                *count += 1;
            }
            return *number;
        }
        let number = self.next;
        self.next += 1;
        self.by_number.insert(number, (path.to_owned(), 1));
        self.by_path.insert(path.to_owned(), number);
        number
    }

    fn forget(&mut self, number: u64, times: u64) {
        if number == INodeNo::ROOT.0 {
            return;
        }
        if let Some((path, count)) = self.by_number.get_mut(&number) {
            *count = count.saturating_sub(times);
            if *count == 0 {
                self.by_path.remove(path.as_str());
                self.by_number.remove(&number);
            }
        }
    }
}

struct Files {
    tree: Tree,
    inodes: Mutex<Inodes>,
    /// Texts of open files that are being read, by handle, until they are closed.
    texts: Mutex<HashMap<u64, Arc<str>>>,
    next_handle: AtomicU64,
    commands: Arc<AtomicUsize>,
    since: SystemTime,
    owner: (u32, u32),
}

impl fmt::Debug for Files {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Files").finish_non_exhaustive()
    }
}

impl Files {
    fn new(tree: Tree) -> Self {
        let owner = (rustix::process::getuid().as_raw(), rustix::process::getgid().as_raw());
        Self {
            tree,
            inodes: Mutex::new(Inodes::new()),
            texts: Mutex::default(),
            next_handle: AtomicU64::new(0),
            commands: Arc::new(AtomicUsize::new(0)),
            since: SystemTime::now(),
            owner,
        }
    }

    fn inodes(&self) -> MutexGuard<'_, Inodes> {
        self.inodes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn path(&self, inode: INodeNo) -> Result<String, Errno> {
        self.inodes().path(inode.0)
    }

    fn find(&self, inode: INodeNo) -> Result<(String, Found), Errno> {
        let path = self.path(inode)?;
        let found = self.tree.lookup(&path)?;
        Ok((path, found))
    }

    fn attr(&self, inode: u64, found: &Found) -> FileAttr {
        let (kind, perm, size) = match found {
            Found::Dir(_) => (FileType::Directory, 0o755, 0),
            Found::Attr(_, def) => (FileType::RegularFile, def.mode, COMMAND_BYTES_MAX as u64),
            Found::Link(target) => (FileType::Symlink, 0o777, target.len() as u64),
        };
        FileAttr {
            ino: INodeNo(inode),
            size,
            blocks: 0,
            atime: self.since,
            mtime: self.since,
            ctime: self.since,
            crtime: self.since,
            kind,
            perm,
            nlink: 1,
            uid: self.owner.0,
            gid: self.owner.1,
            rdev: 0,
            blksize: COMMAND_BYTES_MAX as u32,
            flags: 0,
        }
    }

    fn child(&self, parent: INodeNo, name: &OsStr) -> Result<FileAttr, Errno> {
        let name = name.to_str().ok_or(Errno::ENOENT)?;
        let path = format!("{}/{name}", self.path(parent)?);
        let found = self.tree.lookup(&path)?;
        let number = self.inodes().count_lookup(&path);
        Ok(self.attr(number, &found))
    }

    fn texts(&self) -> MutexGuard<'_, HashMap<u64, Arc<str>>> {
        self.texts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the text of an open file. As in sysfs, a read at the start asks the object, and
    /// those after it go on in what it told.
    fn text(&self, inode: INodeNo, handle: FileHandle, offset: u64) -> Result<Arc<str>, Errno> {
        if offset > 0
            && let Some(text) = self.texts().get(&handle.0)
        {
            return Ok(Arc::clone(text));
        }
        let text: Arc<str> = self.tree.read(&self.path(inode)?)?.to_string().into();
        self.texts().insert(handle.0, Arc::clone(&text));
        Ok(text)
    }

    fn entries(&self, inode: INodeNo) -> Result<Vec<(INodeNo, FileType, String)>, Errno> {
        let path = self.path(inode)?;
        let all = self.tree.list(&path)?;
        let inodes = self.inodes();
        let number = |name: &str| {
            let known = inodes.by_path.get(&format!("{path}/{name}"));
            known.map_or(UNKNOWN, |number| INodeNo(*number))
        };
        let mut list = vec![
            (inode, FileType::Directory, ".".to_owned()),
            (UNKNOWN, FileType::Directory, "..".to_owned()),
        ];
        list.extend(all.into_iter().map(|entry| {
            let kind = match entry.kind {
                Kind::Dir => FileType::Directory,
                Kind::Attr(_) => FileType::RegularFile,
                Kind::Link(_) => FileType::Symlink,
            };
            (number(&entry.name), kind, entry.name)
        }));
        Ok(list)
    }

    /// Starts a command; the reply follows when it is done.
    fn command(&self, inode: INodeNo, data: &[u8], reply: ReplyWrite) {
        let text = match std::str::from_utf8(data) {
            Ok(text) if data.len() <= COMMAND_BYTES_MAX => text.to_owned(),
            _ => return reply.error(code(Errno::EINVAL)),
        };
        let path = match self.path(inode) {
            Ok(path) => path,
            Err(errno) => return reply.error(code(errno)),
        };
        // Relaxed: the number guards no other memory.
        if self.commands.fetch_add(1, Ordering::Relaxed) >= COMMANDS_MAX {
            self.commands.fetch_sub(1, Ordering::Relaxed);
            return reply.error(code(Errno::EAGAIN));
        }
        let (tree, running) = (self.tree.clone(), Arc::clone(&self.commands));
        // A reply that is dropped with the closure answers EIO by itself.
        let started = thread::Builder::new().name("bowline-ctl-cmd".into()).spawn(move || {
            match tree.write(&path, &text) {
                Ok(()) => reply.written(text.len() as u32),
                Err(errno) => reply.error(code(errno)),
            }
            running.fetch_sub(1, Ordering::Relaxed);
        });
        if started.is_err() {
            self.commands.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

fn code(errno: Errno) -> fuser::Errno {
    fuser::Errno::from_i32(errno.0)
}

impl Filesystem for Files {
    fn lookup(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        match self.child(parent, name) {
            Ok(attr) => reply.entry(&TTL, &attr, Generation(0)),
            Err(errno) => reply.error(code(errno)),
        }
    }

    fn forget(&self, _: &Request, inode: INodeNo, times: u64) {
        self.inodes().forget(inode.0, times);
    }

    fn getattr(&self, _: &Request, inode: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        match self.find(inode) {
            Ok((_, found)) => reply.attr(&TTL, &self.attr(inode.0, &found)),
            Err(errno) => reply.error(code(errno)),
        }
    }

    /// Truncation and times change nothing, as in sysfs; modes and owners are fixed.
    fn setattr(
        &self,
        _: &Request,
        inode: INodeNo,
        mode: Option<u32>,
        uid: Option<u32>,
        gid: Option<u32>,
        _: Option<u64>,
        _: Option<TimeOrNow>,
        _: Option<TimeOrNow>,
        _: Option<SystemTime>,
        _: Option<FileHandle>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        if mode.is_some() || uid.is_some() || gid.is_some() {
            return reply.error(code(Errno::EPERM));
        }
        match self.find(inode) {
            Ok((_, found)) => reply.attr(&TTL, &self.attr(inode.0, &found)),
            Err(errno) => reply.error(code(errno)),
        }
    }

    fn mknod(&self, _: &Request, _: INodeNo, _: &OsStr, _: u32, _: u32, _: u32, reply: ReplyEntry) {
        // Here and below: entries cannot be created, renamed or removed. Without these methods the
        // answer would be ENOSYS.
        reply.error(code(Errno::EPERM));
    }

    fn mkdir(&self, _: &Request, _: INodeNo, _: &OsStr, _: u32, _: u32, reply: ReplyEntry) {
        reply.error(code(Errno::EPERM));
    }

    fn unlink(&self, _: &Request, _: INodeNo, _: &OsStr, reply: ReplyEmpty) {
        reply.error(code(Errno::EPERM));
    }

    fn rmdir(&self, _: &Request, _: INodeNo, _: &OsStr, reply: ReplyEmpty) {
        reply.error(code(Errno::EPERM));
    }

    fn rename(
        &self,
        _: &Request,
        _: INodeNo,
        _: &OsStr,
        _: INodeNo,
        _: &OsStr,
        _: RenameFlags,
        reply: ReplyEmpty,
    ) {
        reply.error(code(Errno::EPERM));
    }

    fn readlink(&self, _: &Request, inode: INodeNo, reply: ReplyData) {
        match self.find(inode) {
            Ok((_, Found::Link(target))) => reply.data(target.as_bytes()),
            Ok(_) => reply.error(code(Errno::EINVAL)),
            Err(errno) => reply.error(code(errno)),
        }
    }

    /// Root passes the kernel's check of modes, and is refused here as sysfs does.
    fn open(&self, _: &Request, inode: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        let mode = flags.acc_mode();
        let (read, write) = (mode != OpenAccMode::O_WRONLY, mode != OpenAccMode::O_RDONLY);
        match self.find(inode) {
            Ok((_, Found::Attr(_, def)))
                if (!read || def.is_readable()) && (!write || def.is_writable()) =>
            {
                // Relaxed: handles differ, and that is all.
                let handle = FileHandle(self.next_handle.fetch_add(1, Ordering::Relaxed));
                reply.opened(handle, FopenFlags::FOPEN_DIRECT_IO);
            }
            Ok((_, Found::Attr(..))) => reply.error(code(Errno::EACCES)),
            Ok(_) => reply.error(code(Errno::EISDIR)),
            Err(errno) => reply.error(code(errno)),
        }
    }

    fn read(
        &self,
        _: &Request,
        inode: INodeNo,
        handle: FileHandle,
        offset: u64,
        size: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        match self.text(inode, handle, offset) {
            Ok(text) => {
                let text = text.as_bytes();
                let start = usize::try_from(offset).unwrap_or(usize::MAX).min(text.len());
                let end = start.saturating_add(size as usize).min(text.len());
                reply.data(&text[start..end]);
            }
            Err(errno) => reply.error(code(errno)),
        }
    }

    fn write(
        &self,
        _: &Request,
        inode: INodeNo,
        _: FileHandle,
        _: u64,
        data: &[u8],
        _: WriteFlags,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        self.command(inode, data, reply);
    }

    /// Writes are not buffered, so closing a file does nothing.
    fn flush(&self, _: &Request, _: INodeNo, _: FileHandle, _: LockOwner, reply: ReplyEmpty) {
        reply.ok();
    }

    fn release(
        &self,
        _: &Request,
        _: INodeNo,
        handle: FileHandle,
        _: OpenFlags,
        _: Option<LockOwner>,
        _: bool,
        reply: ReplyEmpty,
    ) {
        self.texts().remove(&handle.0);
        reply.ok();
    }

    fn readdir(
        &self,
        _: &Request,
        inode: INodeNo,
        _: FileHandle,
        offset: u64,
        mut reply: ReplyDirectory,
    ) {
        let entries = match self.entries(inode) {
            Ok(entries) => entries,
            Err(errno) => return reply.error(code(errno)),
        };
        let skip = usize::try_from(offset).unwrap_or(usize::MAX);
        for (index, (number, kind, name)) in entries.into_iter().enumerate().skip(skip) {
            if reply.add(number, index as u64 + 1, kind, name) {
                break;
            }
        }
        reply.ok();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_mounts_of_bowline_are_ours() {
        let mounts = "\
22 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw
40 22 0:50 / /tmp/a rw,nosuid - fuse bowline rw,user_id=0
41 22 0:51 / /tmp/b rw - fuse.bowline bowline rw,user_id=0
42 22 0:52 / /tmp/my\\040disk rw shared:7 - fuse.bowline bowline rw
43 22 0:53 / /tmp/c rw - fuse.sshfs bowline@host:/ rw
44 40 0:54 / /tmp/a rw - tmpfs bowline rw
";
        for (place, ours) in [
            ("/tmp/a", false),
            ("/tmp/b", true),
            ("/tmp/my disk", true),
            ("/tmp/c", false),
            ("/tmp", false),
            ("/", false),
        ] {
            let found = last_bowline_mount(mounts, Path::new(place));
            assert_eq!(found.is_some(), ours, "{place}");
        }
    }

    #[test]
    fn inode_numbers_live_as_long_as_the_kernel_remembers_them() {
        let mut inodes = Inodes::new();
        let number = inodes.count_lookup("/a");
        assert_eq!(inodes.count_lookup("/a"), number);
        inodes.forget(number, 1);
        assert_eq!(inodes.path(number).as_deref(), Ok("/a"));
        inodes.forget(number, 1);
        assert_eq!(inodes.path(number), Err(Errno::ENOENT));
        assert_ne!(inodes.count_lookup("/a"), number);
        inodes.forget(INodeNo::ROOT.0, 100);
        assert_eq!(inodes.path(INodeNo::ROOT.0).as_deref(), Ok(""));
    }
}
