//! A disk as a file in a directory, by FUSE: for programs that know neither block devices nor NBD.
//!
//! The file has the size of the disk and cannot change it. It is not cached: write submits to the
//! disk, and fsync is a flush of the disk. Holes (fallocate) are punched by writing zeroes, since a
//! discarded block may have any contents, and programs that punch holes rely on reading zeroes.
//!
//! A killed program stays until its request is answered, since fuser does not pass FUSE_INTERRUPT
//! on.

mod bytes;
mod hand_over;

use std::ffi::{OsStr, OsString};
use std::fmt;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime};

use fuser::{
    BackgroundSession, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation,
    INodeNo, InitFlags, KernelConfig, LockOwner, MountOption, OpenFlags, RenameFlags, ReplyAttr,
    ReplyData, ReplyDirectory, ReplyEmpty, ReplyEntry, ReplyOpen, ReplyStatfs, ReplyWrite, Request,
    Session, SessionACL, TimeOrNow, WriteFlags,
};

use crate::device::{BlockDevice, DiskEvent};
use bytes::{Bytes, FileRequest, MAX_IO, Reply};
use hand_over::Gate;
pub use hand_over::Handed;

const FILE: INodeNo = INodeNo(2);
/// How long the kernel may cache attributes: not at all, since a disk's size can change.
const TTL: Duration = Duration::ZERO;
/// Most asynchronous requests that the kernel keeps in flight.
const BACKGROUND: u16 = 64;
/// How long unmounting waits for the last requests.
const PATIENCE: Duration = Duration::from_secs(2);

/// Options of a mount.
#[derive(Clone, Copy, Debug, Default)]
#[non_exhaustive]
pub struct FuseOptions {
    /// The file cannot be written, even if the disk is writable.
    pub read_only: bool,
    /// Other users can access the mount. Needs root, or `user_allow_other` in the system's
    /// fuse.conf.
    pub allow_other: bool,
}

/// A directory with the file of a disk in it. Dropping it unmounts: at once if nobody has the file
/// open, else when it is closed.
pub struct Mount {
    dir: PathBuf,
    device: u64,
    users: Arc<Mutex<Users>>,
    parts: Arc<Parts>,
    session: Option<BackgroundSession>,
    /// The number of the session's descriptor.
    number: RawFd,
    /// Another process has mounted it.
    is_resumed: bool,
}

/// What a mount and its file system share.
#[derive(Debug)]
struct Parts {
    bytes: Arc<Bytes>,
    /// Where the kernel's requests come from; set before the first one does.
    kernel: OnceLock<OwnedFd>,
    gate: Gate,
}

/// Use of the file.
#[derive(Default)]
struct Users {
    /// Number of opens of the file.
    open: usize,
    /// Opens of the file are refused.
    disabled: bool,
}

fn lock(users: &Mutex<Users>) -> MutexGuard<'_, Users> {
    users.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Mounts a directory with one file, `file_name`, which is the disk.
///
/// # Errors
/// EINVAL for an invalid name; ENOMEM; errors of mounting: neither root nor fusermount3, or no such
/// directory.
pub fn mount(
    disk: Arc<dyn BlockDevice>,
    dir: &Path,
    file_name: &str,
    options: FuseOptions,
) -> io::Result<Mount> {
    if file_name.is_empty() || file_name.contains(['/', '\0']) || [".", ".."].contains(&file_name) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let users = Arc::<Mutex<Users>>::default();
    let (file_system, config) = prepare(&disk, &users, file_name, options)?;
    let parts = Arc::clone(&file_system.parts);
    let session = Session::new(file_system, dir, &config)?;
    begin(session, &disk, dir, file_name, users, parts, false)
}

/// Continues with a mount that another process has [handed over](Mount::hand_over) or left behind at
/// its end: programs have the file open all the time. The options must be the same.
///
/// A request that the other process had read and not answered is executed again, or for the
/// first time; that needs Linux 6.9.
///
/// # Errors
/// As [`mount`].
pub fn resume(
    disk: Arc<dyn BlockDevice>,
    dir: &Path,
    file_name: &str,
    options: FuseOptions,
    handed: Handed,
) -> io::Result<Mount> {
    let users = Arc::new(Mutex::new(Users { open: handed.opens, disabled: false }));
    let (file_system, config) = prepare(&disk, &users, file_name, options)?;
    let parts = Arc::clone(&file_system.parts);
    let session = hand_over::session(file_system, handed.kernel.as_fd(), config)?;
    // An older kernel sends nothing again; after a hand-over, there is nothing to send.
    let _ = hand_over::ask_again(handed.kernel.as_fd());
    begin(session, &disk, dir, file_name, users, parts, true)
}

fn prepare(
    disk: &Arc<dyn BlockDevice>,
    users: &Arc<Mutex<Users>>,
    file_name: &str,
    options: FuseOptions,
) -> io::Result<(DiskFs, fuser::Config)> {
    let bytes =
        Bytes::new(Arc::clone(disk)).map_err(|errno| io::Error::from_raw_os_error(errno.0))?;
    let file_system = DiskFs {
        parts: Arc::new(Parts { bytes, kernel: OnceLock::new(), gate: Gate::default() }),
        users: Arc::clone(users),
        name: file_name.into(),
        read_only: options.read_only,
        owner: (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw()),
        since: SystemTime::now(),
    };
    let mut config = fuser::Config::default();
    config.mount_options = vec![
        MountOption::FSName("bowline".into()),
        MountOption::Subtype("bowline".into()),
        MountOption::DefaultPermissions,
        MountOption::NoSuid,
        MountOption::NoDev,
        MountOption::NoExec,
    ];
    if options.allow_other {
        config.acl = SessionACL::All;
    }
    Ok((file_system, config))
}

fn begin(
    session: Session<DiskFs>,
    disk: &Arc<dyn BlockDevice>,
    dir: &Path,
    file_name: &str,
    users: Arc<Mutex<Users>>,
    parts: Arc<Parts>,
    is_resumed: bool,
) -> io::Result<Mount> {
    let _ = parts.kernel.set(session.as_fd().try_clone_to_owned()?);
    let number = session.as_fd().as_raw_fd();
    let session = session.spawn()?;
    let device = std::fs::metadata(dir)?.dev();
    let (file, mounted) = (dir.join(file_name), Arc::downgrade(&users));
    disk.on_change(Box::new(move |event| {
        if matches!(event, DiskEvent::Resized(_)) && mounted.strong_count() > 0 {
            refresh_size(file.clone());
        }
    }));
    let session = Some(session);
    Ok(Mount { dir: dir.to_owned(), device, users, parts, session, number, is_resumed })
}

/// Makes the kernel fetch the size of the file again, in a thread, since that waits for an answer.
/// Until then, direct asynchronous reads end at the old size.
fn refresh_size(file: PathBuf) {
    let thread = std::thread::Builder::new().name("bowline-fuse-size".to_owned());
    // If this fails, a later access by another program fetches the size.
    let _ = thread.spawn(move || std::fs::metadata(file));
}

impl Mount {
    /// Returns the directory.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Returns how often the file is open. The kernel reports a close a moment after it.
    pub fn opens(&self) -> usize {
        lock(&self.users).open
    }

    /// Refuses further opens of the file if it is not open, until [`Mount::enable`]; returns true
    /// if so.
    pub fn disable_if_unused(&self) -> bool {
        let mut users = lock(&self.users);
        users.disabled |= users.open == 0;
        users.open == 0
    }

    /// Allows opens of the file again.
    pub fn enable(&self) {
        lock(&self.users).disabled = false;
    }

    /// Takes no more requests, until [`Mount::unpause`].
    pub fn pause(&self) {
        self.parts.gate.close();
        // The thread of the session pauses after its next request.
        refresh_size(self.dir.clone());
    }

    /// Tells whether a pause has begun: each request that was begun is answered.
    pub fn is_paused(&self) -> bool {
        self.parts.gate.is_parked() && self.parts.bytes.is_idle()
    }

    /// Takes requests again.
    pub fn unpause(&self) {
        self.parts.gate.open();
    }

    /// Returns where the kernel's requests come from: who keeps a copy can [resume] the mount after
    /// a sudden end of this process.
    ///
    /// # Errors
    /// No descriptors left.
    pub fn kernel(&self) -> io::Result<OwnedFd> {
        self.parts.kernel.get().ok_or(io::ErrorKind::NotConnected)?.try_clone()
    }

    /// Leaves a mount that [is paused](Self::is_paused), and returns what another process needs to
    /// [resume](resume) it: programs notice a pause.
    ///
    /// # Errors
    /// No descriptors left: it is unmounted.
    pub fn hand_over(mut self) -> io::Result<Handed> {
        let kernel = self.kernel()?;
        hand_over::end(self.number)?;
        self.parts.gate.open();
        if let Some(session) = self.session.take() {
            let end = Instant::now() + PATIENCE;
            while !session.guard.is_finished() && Instant::now() < end {
                std::thread::sleep(Duration::from_millis(1));
            }
            // It would unmount.
            std::mem::forget(session);
        }
        let opens = self.opens();
        Ok(Handed { kernel, opens })
    }

    /// Unmounts the directory, and waits a little for requests in flight.
    fn unmount(&self, session: BackgroundSession) {
        let guard: JoinHandle<io::Result<()>> = {
            let session = session;
            session.guard
            // Dropping the session unmounts.
        };
        let still_there = std::fs::metadata(&self.dir).is_ok_and(|dir| dir.dev() == self.device);
        if still_there {
            // The file is open: detach the mount, which then serves its users only. Without the
            // privilege, fusermount has done the same already.
            let detached = rustix::mount::unmount(&self.dir, rustix::mount::UnmountFlags::DETACH);
            if detached.is_err() && self.is_resumed {
                let mut helper = Command::new("fusermount3");
                // Without it, or where it fails, the mount stays, and answers ENOTCONN.
                let _ = helper.args(["-u", "-q", "-z", "--"]).arg(&self.dir).status();
            }
        }
        let end = Instant::now() + PATIENCE;
        while !guard.is_finished() && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        self.parts.gate.open();
        if let Some(session) = self.session.take() {
            self.unmount(session);
        }
    }
}

impl fmt::Debug for Mount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mount").field("dir", &self.dir).finish_non_exhaustive()
    }
}

/// The file system: a directory and a file.
struct DiskFs {
    parts: Arc<Parts>,
    users: Arc<Mutex<Users>>,
    name: OsString,
    read_only: bool,
    owner: (u32, u32),
    since: SystemTime,
}

impl DiskFs {
    fn is_read_only(&self) -> bool {
        self.read_only || self.parts.bytes.limits().read_only
    }

    fn attr(&self, ino: INodeNo) -> Option<FileAttr> {
        let (kind, perm, size) = match ino {
            INodeNo::ROOT => (FileType::Directory, 0o500, 0),
            FILE => {
                let perm = if self.is_read_only() { 0o400 } else { 0o600 };
                (FileType::RegularFile, perm, self.parts.bytes.limits().bytes)
            }
            _ => return None,
        };
        Some(FileAttr {
            ino,
            size,
            blocks: size / 512,
            atime: self.since,
            mtime: self.since,
            ctime: self.since,
            crtime: self.since,
            kind,
            perm,
            nlink: if kind == FileType::Directory { 2 } else { 1 },
            uid: self.owner.0,
            gid: self.owner.1,
            rdev: 0,
            blksize: 4096,
            flags: 0,
        })
    }

    fn empty(&self, ask: FileRequest<'_>, reply: ReplyEmpty) {
        self.submit(
            ask,
            Box::new(move |result| match result {
                Ok(_) => reply.ok(),
                Err(errno) => reply.error(Errno::from_i32(errno.0)),
            }),
        );
    }

    /// Submits a request, then answers those that end before the kernel has another one.
    fn submit(&self, ask: FileRequest<'_>, reply: Reply) {
        self.parts.bytes.submit(ask, reply);
        self.serve();
    }

    /// Answers requests in flight until the kernel has another one: every call of the kernel's ends
    /// so, since nobody else may be doing it.
    fn serve(&self) {
        if let Some(kernel) = self.parts.kernel.get() {
            self.parts.bytes.serve_until(kernel.as_fd());
        }
        if self.parts.gate.is_closed() {
            self.parts.bytes.leave();
            self.parts.gate.park();
        }
    }
}

impl Filesystem for DiskFs {
    fn init(&mut self, _req: &Request, config: &mut KernelConfig) -> io::Result<()> {
        // Optional: the kernel may lack this, or take the nearest number.
        let _ = config.add_capabilities(InitFlags::FUSE_ASYNC_DIO);
        let _ = config.set_max_write(MAX_IO as u32);
        let _ = config.set_max_background(BACKGROUND);
        Ok(())
    }

    fn lookup(&self, _req: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        match self.attr(FILE) {
            Some(attr) if parent == INodeNo::ROOT && name == self.name => {
                reply.entry(&TTL, &attr, Generation(0));
            }
            _ => reply.error(Errno::ENOENT),
        }
        self.serve();
    }

    fn getattr(&self, _req: &Request, ino: INodeNo, _fh: Option<FileHandle>, reply: ReplyAttr) {
        match self.attr(ino) {
            Some(attr) => reply.attr(&TTL, &attr),
            None => reply.error(Errno::ENOENT),
        }
        self.serve();
    }

    fn setattr(
        &self,
        _req: &Request,
        ino: INodeNo,
        mode: Option<u32>,
        uid: Option<u32>,
        gid: Option<u32>,
        size: Option<u64>,
        _atime: Option<TimeOrNow>,
        _mtime: Option<TimeOrNow>,
        _ctime: Option<SystemTime>,
        fh: Option<FileHandle>,
        _crtime: Option<SystemTime>,
        _chgtime: Option<SystemTime>,
        _bkuptime: Option<SystemTime>,
        _flags: Option<fuser::BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        // An open with O_TRUNC arrives here and changes nothing, as with a disk. If open handled
        // O_TRUNC, the kernel would take the file for empty and end reads of others at offset 0.
        let on_open = size == Some(0) && fh.is_none() && !self.is_read_only();
        match self.attr(ino) {
            None => reply.error(Errno::ENOENT),
            // As with a disk, the size cannot be changed. Times are accepted and ignored.
            Some(attr) if size.is_some_and(|size| size != attr.size) && !on_open => {
                reply.error(Errno::EINVAL);
            }
            Some(_) if mode.is_some() || uid.is_some() || gid.is_some() => {
                reply.error(Errno::EPERM);
            }
            Some(attr) => reply.attr(&TTL, &attr),
        }
        self.serve();
    }

    fn mknod(&self, _: &Request, _: INodeNo, _: &OsStr, _: u32, _: u32, _: u32, reply: ReplyEntry) {
        // Here and below: entries cannot be created, renamed or removed. Without these methods the
        // answer would be ENOSYS.
        reply.error(Errno::EPERM);
    }

    fn mkdir(&self, _: &Request, _: INodeNo, _: &OsStr, _: u32, _: u32, reply: ReplyEntry) {
        reply.error(Errno::EPERM);
    }

    fn unlink(&self, _: &Request, _: INodeNo, _: &OsStr, reply: ReplyEmpty) {
        reply.error(Errno::EPERM);
    }

    fn rmdir(&self, _: &Request, _: INodeNo, _: &OsStr, reply: ReplyEmpty) {
        reply.error(Errno::EPERM);
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
        reply.error(Errno::EPERM);
    }

    fn open(&self, _req: &Request, _ino: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        if self.is_read_only() && flags.acc_mode() != fuser::OpenAccMode::O_RDONLY {
            return reply.error(Errno::EROFS);
        }
        let mut users = lock(&self.users);
        if users.disabled {
            return reply.error(Errno::ENODEV);
        }
        users.open += 1;
        drop(users);
        let flags = FopenFlags::FOPEN_DIRECT_IO
            | FopenFlags::FOPEN_PARALLEL_DIRECT_WRITES
            | FopenFlags::FOPEN_NOFLUSH;
        reply.opened(FileHandle(0), flags);
        self.serve();
    }

    fn release(
        &self,
        _req: &Request,
        _ino: INodeNo,
        _fh: FileHandle,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        _flush: bool,
        reply: ReplyEmpty,
    ) {
        let mut users = lock(&self.users);
        users.open = users.open.saturating_sub(1);
        drop(users);
        reply.ok();
        self.serve();
    }

    fn read(
        &self,
        _req: &Request,
        _ino: INodeNo,
        _fh: FileHandle,
        offset: u64,
        size: u32,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        self.submit(
            FileRequest::Read { offset, len: size as usize },
            Box::new(move |result| match result {
                Ok(bytes) => reply.data(&bytes),
                Err(errno) => reply.error(Errno::from_i32(errno.0)),
            }),
        );
    }

    fn write(
        &self,
        _req: &Request,
        _ino: INodeNo,
        _fh: FileHandle,
        offset: u64,
        data: &[u8],
        _write_flags: WriteFlags,
        flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        if self.is_read_only() {
            return reply.error(Errno::EROFS);
        }
        let len = u32::try_from(data.len()).unwrap_or(u32::MAX);
        let room = move |bytes: &Bytes| {
            let room = bytes.limits().bytes.saturating_sub(offset);
            u32::try_from(room).unwrap_or(u32::MAX).min(len)
        };
        let (before, bytes) = (room(&self.parts.bytes), Arc::clone(&self.parts.bytes));
        let durable = flags.0 & libc::O_DSYNC != 0;
        self.submit(
            FileRequest::Write { offset, bytes: data, durable },
            Box::new(move |result| match result {
                // A disk that became smaller meanwhile has not accepted all bytes.
                Ok(_) => match before.min(room(&bytes)) {
                    0 if len > 0 => reply.error(Errno::ENOSPC),
                    written => reply.written(written),
                },
                Err(errno) => reply.error(Errno::from_i32(errno.0)),
            }),
        );
    }

    fn fsync(
        &self,
        _req: &Request,
        _ino: INodeNo,
        _fh: FileHandle,
        _datasync: bool,
        reply: ReplyEmpty,
    ) {
        self.empty(FileRequest::Sync, reply);
    }

    fn fallocate(
        &self,
        _req: &Request,
        _ino: INodeNo,
        _fh: FileHandle,
        offset: u64,
        length: u64,
        mode: i32,
        reply: ReplyEmpty,
    ) {
        let zero = |keep| FileRequest::Zero { offset, len: length, keep };
        let end = offset.saturating_add(length);
        match mode & !libc::FALLOC_FL_KEEP_SIZE {
            _ if self.is_read_only() => reply.error(Errno::EROFS),
            libc::FALLOC_FL_PUNCH_HOLE => self.empty(zero(false), reply),
            libc::FALLOC_FL_ZERO_RANGE => self.empty(zero(true), reply),
            // Space is allocated up to the end of the disk.
            0 if end <= self.parts.bytes.limits().bytes => reply.ok(),
            0 => reply.error(Errno::ENOSPC),
            _ => reply.error(Errno::EOPNOTSUPP),
        }
    }

    fn readdir(
        &self,
        _req: &Request,
        _ino: INodeNo,
        _fh: FileHandle,
        offset: u64,
        mut reply: ReplyDirectory,
    ) {
        let entries = [
            (INodeNo::ROOT, FileType::Directory, OsStr::new(".")),
            (INodeNo::ROOT, FileType::Directory, OsStr::new("..")),
            (FILE, FileType::RegularFile, &self.name),
        ];
        for (next, (ino, kind, name)) in (1..).zip(entries) {
            if next > offset && reply.add(ino, next, kind, name) {
                break;
            }
        }
        reply.ok();
        self.serve();
    }

    fn statfs(&self, _req: &Request, _ino: INodeNo, reply: ReplyStatfs) {
        reply.statfs(self.parts.bytes.limits().bytes / 4096, 0, 0, 1, 0, 4096, 255, 4096);
        self.serve();
    }
}
