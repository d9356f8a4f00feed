//! The kernel's requests by io_uring, where it offers that (Linux 6.14 with the parameter
//! `enable_uring` of its module): requests are taken and answered in batches by one system call,
//! in memory that both sides know.
//!
//! ```text
//!   per entry:  Register --request--> disk --answered--> CommitAndFetch --request--> ...
//!                                         \-- by another thread: list, and the eventfd wakes
//!   unmounted: every entry ends with an error, then the thread
//! ```
//!
//! Each processor has a queue of entries. Forgotten nodes and interrupts still come by /dev/fuse.
#![allow(unsafe_code)]

use std::io;
use std::mem::offset_of;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::ThreadId;

use bowline_rnbd::Errno;
use io_uring::{IoUring, cqueue, opcode, squeue, types};
use rustix::event::{EventfdFlags, eventfd};

use super::bytes::{Bytes, Data, Hold, MAX_IO};
use super::file::{Answers, DiskFile, Out, To};
use super::wire::{self, Call, HEADER, Header};
use crate::front::turns::Turns;

/// User data of the eventfd's read.
const WAKE: u64 = u64::MAX;
/// Entries of all queues together, of a MiB each, as far as each queue has eight.
const ENTRIES: usize = 64;
/// With more processors, entries for each would take too much memory.
const MOST_QUEUES: usize = 16;
/// Name of the only request whose arguments have no fixed part.
const LOOKUP: u32 = 1;

/// The memory by which one request comes and is answered, beside its data.
#[repr(C)]
struct EntryHeader {
    /// The request's header, then the answer's.
    header: [u8; 128],
    /// The fixed part of the request's arguments.
    args: [u8; 128],
    flags: u64,
    commit: u64,
    /// Bytes in the data's memory, of the request, then of the answer.
    len: u32,
    padding: u32,
    reserved: u64,
}

/// Distance of two of them.
const HEADER_SPACE: usize = 512;
const _: () = assert!(size_of::<EntryHeader>() == 288);

/// A command to the kernel.
#[derive(Clone, Copy, Debug)]
enum Command {
    Register = 1,
    CommitAndFetch = 2,
}

/// How many queues and entries there are, and where their memory lies.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Layout {
    queues: usize,
    depth: usize,
    /// Where the memory begins.
    start: usize,
}

impl Layout {
    /// The one for this machine, with memory from `start` on; `None` where processors are not
    /// known, not numbered from 0 on without a gap, or too many: the kernel waits for a queue of
    /// each.
    pub(super) fn for_this_machine(start: usize) -> Option<Self> {
        let text = std::fs::read_to_string("/sys/devices/system/cpu/possible").ok()?;
        processors(&text).filter(|n| *n <= MOST_QUEUES).map(|n| Self::with_queues(n, start))
    }

    fn with_queues(queues: usize, start: usize) -> Self {
        Self { queues, depth: (ENTRIES / queues).clamp(8, ENTRIES / 2), start }
    }

    fn entries(self) -> usize {
        self.queues * self.depth
    }

    /// Memory that it needs, in bytes.
    pub(super) fn len(self) -> usize {
        self.data(self.entries()) - self.start
    }

    fn header(self, entry: usize) -> usize {
        self.start + entry * HEADER_SPACE
    }

    fn data(self, entry: usize) -> usize {
        self.start + (self.entries() * HEADER_SPACE).next_multiple_of(4096) + entry * MAX_IO
    }
}

/// The number of processors of a list as `0-3`, if they are numbered from 0 on.
fn processors(text: &str) -> Option<usize> {
    let text = text.trim();
    let last: usize = text.strip_prefix("0-").unwrap_or(text).parse().ok()?;
    (text == "0" || text.starts_with("0-")).then_some(last + 1)
}

/// Answers on their way to the ring's thread; the entries have them already.
struct Waiting {
    layout: Layout,
    bytes: Arc<Bytes>,
    list: Mutex<Vec<usize>>,
    wake: OwnedFd,
    /// The ring's thread, which needs no wake-up for its answers.
    thread: OnceLock<ThreadId>,
}

impl Waiting {
    fn lock(&self) -> MutexGuard<'_, Vec<usize>> {
        // A list of plain numbers is always consistent.
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn read(&self, at: usize, out: &mut [u8]) {
        let mem = self.bytes.mem(at, out.len());
        mem.buffer.read(mem.offset, out);
    }

    fn write(&self, at: usize, bytes: &[u8]) {
        let mem = self.bytes.mem(at, bytes.len());
        mem.buffer.write(mem.offset, bytes);
    }
}

impl Answers for Waiting {
    fn answer(&self, to: To, result: Result<Out<'_>, Errno>) {
        let data = self.layout.data(to.entry);
        let result = result.map(|out| match out {
            Out::Bytes(bytes) => {
                self.write(data, bytes);
                bytes.len()
            }
            Out::Mem(read) => {
                let place = self.bytes.mem(data, read.len);
                if read.offset != place.offset {
                    read.buffer.copy_to(read.offset, &place.buffer, place.offset, read.len);
                }
                read.len
            }
        });
        let header = self.layout.header(to.entry);
        self.write(header, &wire::answer_header(to.unique, result));
        let len = result.unwrap_or(0) as u32;
        self.write(header + offset_of!(EntryHeader, len), &len.to_ne_bytes());
        let mut list = self.lock();
        let was_empty = list.is_empty();
        list.push(to.entry);
        drop(list);
        if was_empty && self.thread.get() != Some(&std::thread::current().id()) {
            // Fails only when the counter is full, and then the thread is awake.
            let _ = rustix::io::write(&self.wake, &1_u64.to_ne_bytes());
        }
    }
}

/// The ring with all entries.
pub(super) struct Ring {
    /// Dropped first, which ends what was begun, should its thread panic.
    ring: IoUring<squeue::Entry128, cqueue::Entry>,
    layout: Layout,
    file: Arc<DiskFile>,
    device: OwnedFd,
    waiting: Arc<Waiting>,
    /// Memory of each entry: its header, and its data.
    places: Vec<[libc::iovec; 2]>,
    woken: Box<u64>,
    /// Entries that wait for a request or have one.
    alive: usize,
    answered: Vec<usize>,
}

// SAFETY: the addresses in `places` are of memory that `file` holds, and only the kernel
// uses them.
unsafe impl Send for Ring {}

/// Makes a ring for a layout: before the kernel counts on one.
pub(super) fn build(layout: Layout) -> io::Result<IoUring<squeue::Entry128, cqueue::Entry>> {
    // A command for each entry, and the eventfd's read.
    let entries = u32::try_from(layout.entries() + 1).map_err(io::Error::other)?;
    IoUring::builder().build(entries)
}

impl Ring {
    /// `file` has the memory that the layout needs.
    pub(super) fn new(
        ring: IoUring<squeue::Entry128, cqueue::Entry>,
        layout: Layout,
        device: OwnedFd,
        file: Arc<DiskFile>,
    ) -> io::Result<Self> {
        let piece = |at: usize, len: usize| {
            let mem = file.bytes.mem(at, len);
            libc::iovec {
                iov_base: (mem.buffer.addr() + mem.offset as u64) as *mut _,
                iov_len: len,
            }
        };
        let places = (0..layout.entries())
            .map(|entry| {
                let header = piece(layout.header(entry), size_of::<EntryHeader>());
                [header, piece(layout.data(entry), MAX_IO)]
            })
            .collect();
        let waiting = Waiting {
            layout,
            bytes: Arc::clone(&file.bytes),
            list: Mutex::default(),
            wake: eventfd(0, EventfdFlags::CLOEXEC)?,
            thread: OnceLock::new(),
        };
        Ok(Self {
            ring,
            layout,
            file,
            device,
            waiting: Arc::new(waiting),
            places,
            woken: Box::new(0),
            alive: layout.entries(),
            answered: Vec::new(),
        })
    }

    /// Serves until the file is unmounted. Calls `ready` once every entry waits for a request.
    pub(super) fn run(mut self, ready: impl FnOnce(io::Result<()>)) {
        // Set once, here.
        let _ = self.waiting.thread.set(std::thread::current().id());
        for entry in 0..self.alive {
            self.command(Command::Register, entry, 0);
        }
        self.listen();
        if let Err(error) = self.ring.submit() {
            return ready(Err(error));
        }
        let mut completed = Vec::new();
        self.take_completions(&mut completed);
        let refused = completed.iter().find(|(entry, result)| *entry != WAKE && *result < 0);
        // After a refusal it is unmounted, which ends the other entries.
        ready(refused.map_or(Ok(()), |(_, errno)| Err(io::Error::from_raw_os_error(-errno))));
        self.serve(completed);
        self.cancel_wake_read();
    }

    fn take_completions(&mut self, completed: &mut Vec<(u64, i32)>) {
        let queue = self.ring.completion();
        completed.extend(queue.map(|entry| (entry.user_data(), entry.result())));
    }

    fn serve(&mut self, mut completed: Vec<(u64, i32)>) {
        let answers: Arc<dyn Answers> = Arc::clone(&self.waiting) as _;
        let file = Arc::clone(&self.file);
        let (mut turns, mut batch) = (Turns::default(), Vec::new());
        loop {
            for (entry, result) in completed.drain(..) {
                match usize::try_from(entry) {
                    _ if entry == WAKE && result >= 0 => self.listen(),
                    _ if entry == WAKE => {}
                    Ok(entry) if result >= 0 => self.request(entry, &answers, &mut batch),
                    // It is unmounted.
                    _ => self.alive -= 1,
                }
            }
            file.bytes.send(&mut batch);
            if self.alive == 0 {
                break;
            }
            self.give_answers();
            let is_idle = if file.bytes.are_pending() {
                // Fails when a signal interrupts, or when completions are pending.
                let _ = self.ring.submit();
                self.ring.completion().is_empty()
                    && file.bytes.turn(&mut turns, self.fd()).is_none()
            } else {
                file.bytes.leave(&mut turns);
                true
            };
            // A turn that ended because the device is gone may have left answers of this thread,
            // for which nobody wakes it.
            if is_idle && self.waiting.lock().is_empty() {
                let _ = self.ring.submit_and_wait(1);
            }
            self.take_completions(&mut completed);
        }
        file.bytes.leave(&mut turns);
    }

    fn fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the ring is open for as long as `self` is borrowed.
        unsafe { BorrowedFd::borrow_raw(self.ring.as_raw_fd()) }
    }

    /// Ends the eventfd's read: the kernel may write to `woken` until then.
    fn cancel_wake_read(&mut self) {
        // Fails only when the counter is full, and then the read ends too.
        let _ = rustix::io::write(&self.waiting.wake, &1_u64.to_ne_bytes());
        while !self.ring.completion().any(|entry| entry.user_data() == WAKE) {
            let _ = self.ring.submit_and_wait(1);
        }
    }

    fn request(
        &self,
        entry: usize,
        answers: &Arc<dyn Answers>,
        batch: &mut Vec<crate::device::DiskIo>,
    ) {
        let at = self.layout.header(entry);
        let mut head = [0; HEADER];
        self.waiting.read(at, &mut head);
        let mut len = [0; 4];
        self.waiting.read(at + offset_of!(EntryHeader, len), &mut len);
        // The kernel has checked that it fits.
        let len = (u32::from_ne_bytes(len) as usize).min(MAX_IO);
        // Never: there are as many bytes as in a header.
        let Some(header) = Header::parse(&head) else { return };
        let data = self.layout.data(entry);
        let mut fixed = [0; 128];
        let mut name = Vec::new();
        let args: &[u8] = if header.opcode == LOOKUP {
            name.resize(len, 0);
            self.waiting.read(data, &mut name);
            &name
        } else {
            self.waiting.read(at + offset_of!(EntryHeader, args), &mut fixed);
            &fixed
        };
        let call = Call::parse(&header, args);
        let data = Data { at: data, len, hold: Hold::Lent };
        self.file.serve(&header, call, Some(data), entry, answers, batch);
    }

    fn give_answers(&mut self) {
        let mut answered = std::mem::take(&mut self.answered);
        std::mem::swap(&mut answered, &mut *self.waiting.lock());
        for entry in answered.drain(..) {
            let mut commit = [0; 8];
            let at = self.layout.header(entry) + offset_of!(EntryHeader, commit);
            self.waiting.read(at, &mut commit);
            self.command(Command::CommitAndFetch, entry, u64::from_ne_bytes(commit));
        }
        self.answered = answered;
    }

    fn command(&mut self, command: Command, entry: usize, commit: u64) {
        let mut cmd = [0; 80];
        cmd[8..16].copy_from_slice(&commit.to_ne_bytes());
        let queue = (entry / self.layout.depth) as u16;
        cmd[16..18].copy_from_slice(&queue.to_ne_bytes());
        let places = self.places[entry].as_ptr();
        let mut sqe = opcode::UringCmd80::new(types::Fd(self.device.as_raw_fd()), command as u32)
            .cmd(cmd)
            .addr(Some(places as u64))
            .build()
            .user_data(entry as u64);
        // The number of pieces at that address, which the library leaves out, is at byte 24 of a
        // submission.
        let pieces = (&raw mut sqe).cast::<u32>().wrapping_add(6);
        // SAFETY: within the 128 bytes of `sqe`, which is aligned for larger numbers, has the
        // kernel's own layout and takes any bits.
        unsafe { pieces.write(2) };
        self.push(&sqe);
    }

    fn listen(&mut self) {
        let fd = types::Fd(self.waiting.wake.as_raw_fd());
        let to = (&raw mut *self.woken).cast();
        let entry = opcode::Read::new(fd, to, 8).build().user_data(WAKE);
        self.push(&entry.into());
    }

    fn push(&mut self, entry: &squeue::Entry128) {
        // SAFETY: the memory is an entry's, which `file` holds, or `places` or `woken`; `run`
        // returns once no entry has a command any more and the read is over, or nothing was begun.
        let pushed = unsafe { self.ring.submission().push(entry) };
        assert!(pushed.is_ok(), "more commands than entries");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_have_memory_of_their_own_on_any_machine() {
        for (text, count) in
            [("0-1\n", Some(2)), ("0\n", Some(1)), ("0-3,8-15\n", None), ("", None)]
        {
            assert_eq!(processors(text), count, "{text}");
        }
        assert_eq!(processors("1-2"), None);
        for queues in 1..=MOST_QUEUES {
            let layout = Layout::with_queues(queues, 4096);
            assert!(layout.depth >= 8);
            let last = layout.entries() - 1;
            assert!(layout.header(last) + HEADER_SPACE <= layout.data(0));
            assert!(layout.data(0).is_multiple_of(4096));
            assert!(layout.data(last) + MAX_IO <= 4096 + layout.len(), "{queues} queues");
            assert!(layout.len() <= 129 << 20, "{queues} queues");
        }
    }
}
