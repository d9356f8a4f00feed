//! What the kernel may do with a directory and the one file in it.

use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::SystemTime;

use bowline_rnbd::Errno;
use bowline_verbs::Mem;

use super::bytes::{Bytes, Data, FileRequest};
use super::wire::{self, Attr, Call, Header};
use crate::device::DiskIo;

const EROFS: Errno = Errno(libc::EROFS);
const ENOSYS: Errno = Errno(libc::ENOSYS);
const DIRECTORY: u64 = 1;
const FILE: u64 = 2;
/// Reads and writes pass the kernel's cache by; writes may be in flight together; a close is no
/// flush.
const OPEN_FLAGS: u32 = 1 | 1 << 6 | 1 << 5;

/// A request that is to be answered.
#[derive(Clone, Copy, Debug)]
pub(super) struct To {
    /// The kernel's number of it.
    pub(super) unique: u64,
    /// The channel's place for it, if it has any.
    pub(super) entry: usize,
}

/// The bytes of an answer.
#[derive(Clone, Copy, Debug)]
pub(super) enum Out<'a> {
    Bytes(&'a [u8]),
    /// What was read.
    Mem(&'a Mem),
}

/// A channel to the kernel. Answers come from any thread.
pub(super) trait Answers: Send + Sync {
    fn answer(&self, to: To, result: Result<Out<'_>, Errno>);
}

/// Use of the file.
#[derive(Debug, Default)]
pub(super) struct Users {
    /// Number of opens of the file.
    pub(super) open: usize,
    /// Opens of the file are refused.
    pub(super) disabled: bool,
}

/// The directory and its file.
pub(super) struct DiskFile {
    pub(super) users: Mutex<Users>,
    /// Where it is written how often the file is open.
    pub(super) keeper: OnceLock<Arc<OwnedFd>>,
    pub(super) name: String,
    pub(super) bytes: Arc<Bytes>,
    pub(super) read_only: bool,
    pub(super) owner: (u32, u32),
    pub(super) since: SystemTime,
}

impl DiskFile {
    pub(super) fn users(&self) -> MutexGuard<'_, Users> {
        self.users.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes from now on how often the file is open.
    pub(super) fn keep_opens(&self, keeper: Arc<OwnedFd>) {
        let users = self.users();
        // A mount is kept once.
        let _ = self.keeper.set(keeper);
        self.write_opens(&users);
    }

    fn write_opens(&self, users: &Users) {
        if let Some(keeper) = self.keeper.get() {
            // An error leaves the number of before, which is a guess then.
            let _ = rustix::io::pwrite(keeper, &(users.open as u64).to_ne_bytes(), 0);
        }
    }

    fn is_read_only(&self) -> bool {
        self.read_only || self.bytes.limits().read_only
    }

    fn attr(&self, node: u64) -> Result<Attr, Errno> {
        let (mode, size, links) = match node {
            DIRECTORY => (libc::S_IFDIR | 0o500, 0, 2),
            FILE => {
                let access = if self.is_read_only() { 0o400 } else { 0o600 };
                (libc::S_IFREG | access, self.bytes.limits().bytes, 1)
            }
            _ => return Err(Errno::ENOENT),
        };
        Ok(Attr { node, size, mode, links, owner: self.owner, since: self.since })
    }

    /// Answers a request, now or when the disk has. Requests to the disk are added to `batch`, for
    /// the caller to submit. The data of a write, or the place for what is read, is `data`.
    pub(super) fn serve(
        &self,
        header: &Header,
        call: Option<Call<'_>>,
        data: Option<Data>,
        entry: usize,
        answers: &Arc<dyn Answers>,
        batch: &mut Vec<DiskIo>,
    ) {
        let to = To { unique: header.unique, entry };
        let is_release = matches!(call, Some(Call::Release));
        let answer = match call {
            Some(Call::Unanswered) => return,
            Some(Call::Read { offset, size }) => {
                let len = size as usize;
                let request = FileRequest::Read { offset, len, place: data.map(|data| data.at) };
                let answers = Arc::clone(answers);
                let reply = move |result: Result<Option<&Mem>, Errno>| match result {
                    Ok(Some(mem)) => answers.answer(to, Ok(Out::Mem(mem))),
                    Ok(None) => answers.answer(to, Ok(Out::Bytes(&[]))),
                    Err(errno) => answers.answer(to, Err(errno)),
                };
                return self.bytes.begin(request, Box::new(reply), batch);
            }
            Some(Call::Write { offset, size, flags }) => {
                match data.filter(|data| data.len == size as usize) {
                    Some(data) if !self.is_read_only() => {
                        return self.write(offset, data, flags, to, answers, batch);
                    }
                    _ if self.is_read_only() => Err(EROFS),
                    _ => Err(Errno::EINVAL),
                }
            }
            Some(Call::Fsync) => return self.begin_empty(FileRequest::Sync, to, answers, batch),
            Some(Call::Fallocate { offset, len, mode }) => {
                match self.fallocate(offset, len, mode) {
                    Ok(Some(request)) => return self.begin_empty(request, to, answers, batch),
                    Ok(None) => Ok(Vec::new()),
                    Err(errno) => Err(errno),
                }
            }
            Some(call) => self.look(header.node, call),
            None => Err(Errno::EINVAL),
        };
        self.bytes.take_back(data);
        answers.answer(to, answer.as_deref().map(Out::Bytes).map_err(|errno| *errno));
        if is_release {
            // Only now: an answer that is not given is asked for again.
            self.write_opens(&self.users());
        }
    }

    /// What needs no disk.
    fn look(&self, node: u64, call: Call<'_>) -> Result<Vec<u8>, Errno> {
        match call {
            Call::Lookup(name) if node == DIRECTORY && name == self.name.as_bytes() => {
                self.attr(FILE).map(|attr| wire::entry(&attr))
            }
            Call::Lookup(_) => Err(Errno::ENOENT),
            Call::GetAttr => self.attr(node).map(|attr| wire::attributes(&attr)),
            Call::SetAttr { size, by_handle, access } => {
                // An open with O_TRUNC arrives here and changes nothing, as with a disk. If open
                // handled O_TRUNC, the kernel would take the file for empty and end reads of others
                // at offset 0.
                let on_open = size == Some(0) && !by_handle && !self.is_read_only();
                let attr = self.attr(node)?;
                match size {
                    // As with a disk, the size cannot be changed. Times are accepted and ignored.
                    Some(size) if size != attr.size && !on_open => Err(Errno::EINVAL),
                    _ if access => Err(Errno::EPERM),
                    _ => Ok(wire::attributes(&attr)),
                }
            }
            Call::Open { flags } => {
                let writes = flags & libc::O_ACCMODE as u32 != libc::O_RDONLY as u32;
                if self.is_read_only() && writes {
                    return Err(EROFS);
                }
                let mut users = self.users();
                if users.disabled {
                    return Err(Errno::ENODEV);
                }
                users.open += 1;
                self.write_opens(&users);
                Ok(wire::opened(OPEN_FLAGS))
            }
            Call::OpenDir => Ok(wire::opened(0)),
            Call::Release => {
                let mut users = self.users();
                users.open = users.open.saturating_sub(1);
                Ok(Vec::new())
            }
            Call::ReadDir { offset, size } => {
                let entries: [(u64, u32, &[u8]); 3] = [
                    (DIRECTORY, libc::S_IFDIR, b"."),
                    (DIRECTORY, libc::S_IFDIR, b".."),
                    (FILE, libc::S_IFREG, self.name.as_bytes()),
                ];
                Ok(wire::directory(&entries, offset, size))
            }
            Call::StatFs => Ok(wire::statistics(self.bytes.limits().bytes / 4096)),
            Call::Nothing => Ok(Vec::new()),
            // Entries cannot be created, renamed or removed.
            Call::Change => Err(Errno::EPERM),
            _ => Err(ENOSYS),
        }
    }

    fn begin_empty(
        &self,
        request: FileRequest,
        to: To,
        answers: &Arc<dyn Answers>,
        batch: &mut Vec<DiskIo>,
    ) {
        let answers = Arc::clone(answers);
        let reply = move |result: Result<Option<&Mem>, Errno>| {
            answers.answer(to, result.map(|_| Out::Bytes(&[])));
        };
        self.bytes.begin(request, Box::new(reply), batch);
    }

    fn write(
        &self,
        offset: u64,
        data: Data,
        flags: u32,
        to: To,
        answers: &Arc<dyn Answers>,
        batch: &mut Vec<DiskIo>,
    ) {
        let len = u32::try_from(data.len).unwrap_or(u32::MAX);
        let room = move |bytes: &Bytes| {
            let room = bytes.limits().bytes.saturating_sub(offset);
            u32::try_from(room).unwrap_or(u32::MAX).min(len)
        };
        let (before, bytes) = (room(&self.bytes), Arc::clone(&self.bytes));
        let durable = flags & libc::O_DSYNC as u32 != 0;
        let answers = Arc::clone(answers);
        let reply = move |result: Result<Option<&Mem>, Errno>| match result {
            // A disk that became smaller since has not accepted all bytes.
            Ok(_) => match before.min(room(&bytes)) {
                0 if len > 0 => answers.answer(to, Err(Errno::ENOSPC)),
                written => answers.answer(to, Ok(Out::Bytes(&wire::written(written)))),
            },
            Err(errno) => answers.answer(to, Err(errno)),
        };
        self.bytes.begin(FileRequest::Write { offset, data, durable }, Box::new(reply), batch);
    }

    /// The request for a change of what is allocated; `None` if there is nothing to do.
    fn fallocate(&self, offset: u64, len: u64, mode: u32) -> Result<Option<FileRequest>, Errno> {
        let zero = |keep| Ok(Some(FileRequest::Zero { offset, len, keep }));
        let end = offset.saturating_add(len);
        match mode as i32 & !libc::FALLOC_FL_KEEP_SIZE {
            _ if self.is_read_only() => Err(EROFS),
            libc::FALLOC_FL_PUNCH_HOLE => zero(false),
            libc::FALLOC_FL_ZERO_RANGE => zero(true),
            // Space is allocated up to the end of the disk.
            0 if end <= self.bytes.limits().bytes => Ok(None),
            0 => Err(Errno::ENOSPC),
            _ => Err(Errno::EOPNOTSUPP),
        }
    }
}
