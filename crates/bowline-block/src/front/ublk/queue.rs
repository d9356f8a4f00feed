//! The queue of one device: one thread, since the kernel requires all commands to come from one.
//!
//! ```text
//!   per tag:  Fetch --request--> DiskIo --answered--> CommitAndFetch --request--> ...
//!                                          \-- by another thread: list, and the eventfd wakes
//!   the disk goes: every waiting tag is told so, and the thread ends
//!   closed:        what is fetched is held
//!   left:          the thread ends once the disk has no request; what was fetched and not answered
//!                  the kernel gives to the next server, and so what has failed since
//! ```
#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::ThreadId;

use bowline_rnbd::{Errno, IoOp};
use io_uring::{IoUring, opcode, squeue, types};

use super::abi::{self, Desc};
use crate::device::{BlockDevice, DeviceMem, DiskDone, DiskIo};

/// User data of the eventfd's read.
const WAKE: u64 = u64::MAX;

/// What others leave to the queue's thread: answers, and whether it takes requests.
pub(super) struct Inbox {
    answers: Mutex<Vec<(u64, i32)>>,
    gate: Mutex<Gate>,
    wake: OwnedFd,
    /// The queue's thread, which needs no wake-up for its answers.
    thread: OnceLock<ThreadId>,
}

#[derive(Default)]
struct Gate {
    wanted: Wanted,
    /// It is not open, and the disk has no request; the thread sets it.
    is_idle: bool,
}

/// What becomes of requests that the kernel has.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(super) enum Wanted {
    /// They are given to the disk.
    #[default]
    Open,
    /// They are held.
    Closed,
    /// They are left to the next server.
    Left,
}

impl Inbox {
    fn lock(&self) -> MutexGuard<'_, Vec<(u64, i32)>> {
        // A list of plain numbers is always consistent.
        self.answers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn gate(&self) -> MutexGuard<'_, Gate> {
        // Plain values are always consistent.
        self.gate.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wake(&self) {
        // Fails only when the counter is full, and then the thread is awake.
        let _ = rustix::io::write(&self.wake, &1_u64.to_ne_bytes());
    }

    /// Says what becomes of requests from now on.
    pub(super) fn set(&self, wanted: Wanted) {
        self.gate().wanted = wanted;
        self.wake();
    }

    /// Tells whether the queue is not open, and the disk has none of its requests.
    pub(super) fn is_idle(&self) -> bool {
        let gate = self.gate();
        gate.wanted != Wanted::Open && gate.is_idle
    }
}

impl DiskDone for Inbox {
    fn done(&self, results: &[(u64, i32)]) {
        let mut list = self.lock();
        let was_empty = list.is_empty();
        list.extend_from_slice(results);
        drop(list);
        if was_empty && self.thread.get() != Some(&std::thread::current().id()) {
            self.wake();
        }
    }
}

/// The kernel's request descriptors, one for each tag.
struct Descs {
    at: *mut std::ffi::c_void,
    len: usize,
}

// SAFETY: the mapping belongs to this value alone and is only read.
unsafe impl Send for Descs {}

impl Descs {
    fn map(file: &File, depth: u16) -> io::Result<Self> {
        let len = (usize::from(depth) * abi::DESC_LEN).next_multiple_of(4096);
        let (read, shared) = (rustix::mm::ProtFlags::READ, rustix::mm::MapFlags::SHARED);
        // SAFETY: a mapping at an address of the system's choosing touches no memory that exists.
        let at = unsafe { rustix::mm::mmap(std::ptr::null_mut(), len, read, shared, file, 0) }?;
        Ok(Self { at, len })
    }

    fn get(&self, tag: u16) -> Desc {
        let at = usize::from(tag) * abi::DESC_LEN;
        assert!(at + abi::DESC_LEN <= self.len, "a tag beyond the depth");
        // SAFETY: in the mapping, as just checked, which starts at a page.
        let at = unsafe { self.at.byte_add(at) };
        // SAFETY: as above; 8-aligned, as 24 is a multiple of 8. The kernel wrote it before it
        // completed the command for this tag, and writes it again only after the next one.
        let words = unsafe { at.cast::<[u32; 2]>().read_volatile() };
        // SAFETY: within the same description.
        let at = unsafe { at.byte_add(8) };
        // SAFETY: as above.
        let start = unsafe { at.cast::<u64>().read_volatile() };
        Desc::new(words[0], words[1], start)
    }
}

impl Drop for Descs {
    fn drop(&mut self) {
        // SAFETY: mapped by `map` with this length; nothing refers to it any more.
        let _ = unsafe { rustix::mm::munmap(self.at, self.len) };
    }
}

/// The queue of one device.
pub(super) struct Queue {
    file: File,
    disk: Arc<dyn BlockDevice>,
    descs: Descs,
    memory: DeviceMem,
    max_io: u32,
    ring: IoUring,
    inbox: Arc<Inbox>,
    woken: Box<u64>,
    /// Tags that wait for a request or have one.
    alive: u16,
    /// Tags with a request that the disk has not been given.
    fetched: Vec<u16>,
    /// Number of requests that the disk has.
    begun: usize,
    batch: Vec<DiskIo>,
    answered: Vec<(u64, i32)>,
}

impl Queue {
    pub(super) fn new(
        file: File,
        disk: Arc<dyn BlockDevice>,
        depth: u16,
        max_io: u32,
    ) -> io::Result<Self> {
        let memory = disk
            .memory(usize::from(depth) * max_io as usize)
            .map_err(|errno| io::Error::from_raw_os_error(errno.0))?;
        let descs = Descs::map(&file, depth)?;
        let wake = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC)?;
        let (answers, gate) = (Mutex::default(), Mutex::default());
        let inbox = Inbox { answers, gate, wake, thread: OnceLock::new() };
        Ok(Self {
            file,
            disk,
            descs,
            memory,
            max_io,
            // One command for each tag, and the eventfd's read.
            ring: IoUring::builder().build(u32::from(depth) + 1)?,
            inbox: Arc::new(inbox),
            woken: Box::new(0),
            alive: depth,
            fetched: Vec::new(),
            begun: 0,
            batch: Vec::new(),
            answered: Vec::new(),
        })
    }

    /// Returns what others need of it.
    pub(super) fn inbox(&self) -> Arc<Inbox> {
        Arc::clone(&self.inbox)
    }

    /// Serves until the device is stopped, or left. Calls `ready` once every tag waits for a
    /// request. Returns the memory, to which the kernel may write until a device that was left is
    /// quiesced.
    pub(super) fn run(mut self, ready: impl FnOnce(io::Result<()>)) -> DeviceMem {
        // Set once, here.
        let _ = self.inbox.thread.set(std::thread::current().id());
        let depth = self.alive;
        for tag in 0..depth {
            self.command(abi::Io::Fetch, tag, 0);
        }
        self.listen();
        let begun = self.ring.submit();
        let failed = begun.is_err();
        ready(begun.map(drop));
        if failed {
            return self.memory;
        }
        let mut completed = Vec::new();
        while self.alive > 0 {
            // Fails when a signal interrupts, or when completions are pending.
            let _ = self.ring.submit_and_wait(1);
            let queue = self.ring.completion();
            completed.extend(queue.map(|entry| (entry.user_data(), entry.result())));
            for (tag, result) in completed.drain(..) {
                match u16::try_from(tag) {
                    Ok(tag) if result >= 0 => self.fetched.push(tag),
                    // The device is stopped, or the tag cannot be served any more.
                    Ok(_) => self.alive -= 1,
                    Err(_) => self.listen(),
                }
            }
            let wanted = self.wanted();
            if wanted == Wanted::Open {
                self.begin_fetched();
            }
            self.give_answers(wanted);
            if wanted != Wanted::Open && self.begun == 0 && self.is_settled(wanted) {
                break;
            }
        }
        self.cancel_wake_read();
        self.memory
    }

    /// Returns what becomes of requests.
    fn wanted(&self) -> Wanted {
        let mut gate = self.inbox.gate();
        if gate.wanted == Wanted::Open {
            // Before a request is begun.
            gate.is_idle = false;
        }
        gate.wanted
    }

    /// Says that the disk has no request. Returns true if the queue is left.
    fn is_settled(&mut self, wanted: Wanted) -> bool {
        self.inbox.gate().is_idle = true;
        if wanted != Wanted::Left {
            return false;
        }
        // The last answers reach the kernel.
        while !self.ring.submission().is_empty() {
            // Fails when a signal interrupts.
            let _ = self.ring.submit();
        }
        true
    }

    fn begin_fetched(&mut self) {
        let mut fetched = std::mem::take(&mut self.fetched);
        fetched.drain(..).for_each(|tag| self.request(tag));
        self.fetched = fetched;
        if !self.batch.is_empty() {
            self.begun += self.batch.len();
            self.disk.submit(&mut self.batch);
            // This thread takes no turns.
            self.disk.leave();
        }
    }

    /// Ends the eventfd's read: the kernel may write to `woken` until then.
    fn cancel_wake_read(&mut self) {
        // The read ends also when the counter is full.
        self.inbox.wake();
        while !self.ring.completion().any(|entry| entry.user_data() == WAKE) {
            let _ = self.ring.submit_and_wait(1);
        }
    }

    fn address(&self, tag: u16) -> u64 {
        let at = self.memory.mem.offset + usize::from(tag) * self.max_io as usize;
        self.memory.mem.buffer.addr() + at as u64
    }

    fn request(&mut self, tag: u16) {
        let desc = self.descs.get(tag);
        let bytes = u64::from(desc.sectors) * 512;
        let (Some(op), Ok(len)) = (desc.op, u32::try_from(bytes)) else {
            self.command(abi::Io::CommitAndFetch, tag, Errno::EOPNOTSUPP.neg());
            return;
        };
        if op.has_data() && len > self.max_io {
            self.command(abi::Io::CommitAndFetch, tag, Errno::EINVAL.neg());
            return;
        }
        let at = usize::from(tag) * self.max_io as usize;
        let is_flush = op == IoOp::Flush;
        self.batch.push(DiskIo {
            op,
            offset: if is_flush { 0 } else { desc.start_sector.saturating_mul(512) },
            len: if is_flush { 0 } else { len },
            fua: desc.fua && op == IoOp::Write,
            nounmap: desc.nounmap,
            mem: op.has_data().then_some((self.memory.region, at)),
            tag: tag.into(),
            done: self.inbox.clone(),
        });
    }

    fn give_answers(&mut self, wanted: Wanted) {
        let mut answered = std::mem::take(&mut self.answered);
        std::mem::swap(&mut answered, &mut *self.inbox.lock());
        self.begun -= answered.len();
        for (tag, errno) in answered.drain(..) {
            if wanted == Wanted::Left && errno < 0 {
                // For want of a server, perhaps: the next one is given the request again.
                continue;
            }
            // Only tags of this queue were submitted.
            let tag = tag as u16;
            let bytes = self.descs.get(tag).sectors.saturating_mul(512);
            let result = if errno < 0 { errno } else { i32::try_from(bytes).unwrap_or(i32::MAX) };
            self.command(abi::Io::CommitAndFetch, tag, result);
        }
        self.answered = answered;
    }

    fn command(&mut self, command: abi::Io, tag: u16, result: i32) {
        let fd = types::Fd(self.file.as_raw_fd());
        let cmd = abi::io(tag, result, self.address(tag));
        let entry = opcode::UringCmd16::new(fd, command as u32).cmd(cmd).build();
        self.push(&entry.user_data(tag.into()));
    }

    fn listen(&mut self) {
        let fd = types::Fd(self.inbox.wake.as_raw_fd());
        let to = (&raw mut *self.woken).cast();
        self.push(&opcode::Read::new(fd, to, 8).build().user_data(WAKE));
    }

    fn push(&mut self, entry: &squeue::Entry) {
        // SAFETY: the memory is that of the tag in `self.memory`, or `self.woken`; `run` returns
        // once the read is over, and no tag has a command any more, or nothing was begun, or the
        // caller keeps the memory until the kernel has given up the commands.
        let pushed = unsafe { self.ring.submission().push(entry) };
        assert!(pushed.is_ok(), "more commands than tags");
    }
}
