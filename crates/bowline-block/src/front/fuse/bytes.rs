//! A disk as a file: reads and writes of any byte range, whatever the disk's block size.
//!
//! ```text
//!   read            whole blocks around the bytes; the bytes are cut out
//!   write           whole blocks: as they are
//!                   parts of blocks: nobody else writes meanwhile; read, change, write
//!   all            [then a flush, if it has to be durable and the disk has no better way]
//! ```

use std::collections::VecDeque;
use std::fmt;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};

use bowline_rnbd::{Errno, IoOp, Limits};
use bowline_verbs::{Mem, catch_callback_panic};

use crate::device::{BlockDevice, DeviceMem, DiskDone, DiskIo};
use crate::front::range_alloc::RangeAllocator;
use crate::front::turns::Turns;

/// Memory for the data of requests in flight, in bytes.
pub(super) const MEMORY: usize = 16 << 20;
/// Largest read or write, in bytes.
pub(super) const MAX_IO: usize = 1 << 20;

/// Callback for the result of a request; a read gives the memory of what was read, if it is any.
pub(super) type Reply = Box<dyn FnOnce(Result<Option<&Mem>, Errno>) + Send>;

/// Data in memory of the disk.
#[derive(Clone, Copy, Debug)]
pub(super) struct Data {
    /// Where it begins, at a multiple of a page.
    pub(super) at: usize,
    pub(super) len: usize,
    pub(super) hold: Hold,
}

/// Whose the memory of data is.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Hold {
    /// The request's, with which it is freed.
    Own,
    /// Its channel's, which leaves it alone until the request is answered.
    Lent,
    /// Its channel's, which needs it again at once: what is needed of it is copied.
    Passing,
}

/// A request to the file.
#[derive(Debug)]
pub(super) enum FileRequest {
    /// What is read may be put at `place`, in memory that is its channel's and large enough.
    Read {
        offset: u64,
        len: usize,
        place: Option<usize>,
    },
    Write {
        offset: u64,
        data: Data,
        durable: bool,
    },
    Zero {
        offset: u64,
        len: u64,
        keep: bool,
    },
    Sync,
}

/// A disk with byte granularity.
pub(super) struct Bytes {
    weak_self: Weak<Self>,
    disk: Arc<dyn BlockDevice>,
    memory: DeviceMem,
    state: Mutex<State>,
    /// Wakes threads that wait for memory.
    freed: Condvar,
}

struct State {
    ranges: RangeAllocator,
    slots: Vec<Option<Op>>,
    free: Vec<usize>,
    /// Number of writes in progress.
    writing: usize,
    /// The only write in progress changes parts of blocks and excludes others.
    exclusive: bool,
    /// Writes that wait to begin, first in first out.
    waiting: VecDeque<usize>,
    /// No more writes are taken.
    is_ending: bool,
    /// Answers of the disk, and whether a call of [`Bytes::done`] is handling them.
    answers: Vec<(u64, i32)>,
    draining: bool,
}

struct Op {
    stage: Stage,
    op: IoOp,
    /// Requested range in bytes.
    offset: u64,
    len: u64,
    /// Start and length of the whole blocks around that range.
    start: u64,
    span: u64,
    /// The memory of the data.
    data: Option<Data>,
    /// Offset and length of the memory for the old contents of blocks that are changed in parts.
    old_blocks: Option<(usize, usize)>,
    fua: bool,
    flush_after: bool,
    nounmap: bool,
    /// Number of disk requests in flight for it.
    parts: usize,
    errno: i32,
    reply: Option<Reply>,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Stage {
    /// Reads the old contents of blocks that are changed in parts.
    ReadOld,
    /// Executes the request.
    Main,
    /// Makes it durable.
    Flush,
}

impl Bytes {
    /// `more` bytes of its memory are left to a channel, which finds them behind [`MEMORY`].
    pub(super) fn new(disk: Arc<dyn BlockDevice>, more: usize) -> Result<Arc<Self>, Errno> {
        let memory = disk.memory(MEMORY + more)?;
        Ok(Arc::new_cyclic(|me| Self {
            weak_self: me.clone(),
            disk,
            memory,
            state: Mutex::new(State {
                ranges: RangeAllocator::new(MEMORY),
                slots: Vec::new(),
                free: Vec::new(),
                writing: 0,
                exclusive: false,
                waiting: VecDeque::new(),
                is_ending: false,
                answers: Vec::new(),
                draining: false,
            }),
            freed: Condvar::new(),
        }))
    }

    pub(super) fn limits(&self) -> Limits {
        self.disk.limits()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Only a bug in this module panics with the lock held; the panic was printed.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins a request, whose requests to the disk are added to `batch`; waits only for memory,
    /// with those submitted. The reply may come inside this call.
    pub(super) fn begin(&self, request: FileRequest, reply: Reply, batch: &mut Vec<DiskIo>) {
        match self.prepare(&request, batch) {
            Ok(Some(mut op)) => {
                op.reply = Some(reply);
                let mut state = self.lock();
                let changes = op.op.changes();
                if changes && state.is_ending {
                    drop(state);
                    op.errno = Errno::EIO.neg();
                    return self.finish(op);
                }
                let slot = state.insert(op);
                if changes {
                    state.waiting.push_back(slot);
                } else {
                    self.add_requests(&mut state, slot, batch);
                }
                self.admit_next(&mut state, batch);
            }
            done => {
                if let FileRequest::Write { data, .. } = request {
                    self.take_back(Some(data));
                }
                reply(done.map(|_| None));
            }
        }
    }

    /// Submits what was begun.
    pub(super) fn send(&self, batch: &mut Vec<DiskIo>) {
        if !batch.is_empty() {
            self.disk.submit(batch);
        }
    }

    /// Checks a request and prepares its operation; `None` if there is nothing to do.
    fn prepare(&self, request: &FileRequest, batch: &mut Vec<DiskIo>) -> Result<Option<Op>, Errno> {
        let limits = self.disk.limits();
        let (op, offset, asked) = match *request {
            FileRequest::Read { offset, len, .. } => (IoOp::Read, offset, len as u64),
            FileRequest::Write { offset, data, .. } => (IoOp::Write, offset, data.len as u64),
            FileRequest::Zero { offset, len, .. } => (IoOp::WriteZeroes, offset, len),
            FileRequest::Sync => (IoOp::Flush, 0, 0),
        };
        if op.changes() && limits.read_only {
            return Err(Errno::EPERM);
        }
        if op == IoOp::WriteZeroes && limits.max_write_zeroes == 0 {
            return Err(Errno::EOPNOTSUPP);
        }
        // A disk does not grow: bytes beyond its end are neither read nor written.
        let len = asked.min(limits.bytes.saturating_sub(offset));
        let block = u64::from(limits.logical);
        let start = offset - offset % block;
        let span = (offset + len).next_multiple_of(block) - start;
        let partial = start != offset || span != len;
        match op {
            IoOp::Flush if !limits.write_cache => return Ok(None),
            IoOp::Flush => {}
            IoOp::Write if asked > 0 && len == 0 => return Err(Errno::ENOSPC),
            IoOp::Read | IoOp::Write if asked > MAX_IO as u64 => return Err(Errno::EINVAL),
            IoOp::WriteZeroes if partial => return Err(Errno::EOPNOTSUPP),
            _ if len == 0 => return Ok(None),
            _ => {}
        }
        let durable = matches!(request, FileRequest::Write { durable: true, .. });
        let mut new = Op {
            stage: Stage::Main,
            op,
            offset,
            len,
            start,
            span,
            data: None,
            old_blocks: None,
            fua: durable && limits.fua,
            flush_after: durable && !limits.fua && limits.write_cache,
            nounmap: matches!(request, FileRequest::Zero { keep: true, .. }),
            parts: 0,
            errno: 0,
            reply: None,
        };
        let whole = |data: &Data| !partial && data.hold != Hold::Passing;
        match *request {
            FileRequest::Read { place: Some(at), .. } if !partial => {
                new.data = Some(Data { at, len: span as usize, hold: Hold::Lent });
            }
            FileRequest::Write { data, .. } if whole(&data) => new.data = Some(data),
            FileRequest::Read { .. } | FileRequest::Write { .. } => {
                // At most the largest IO and a block at each end. What a write of parts of blocks
                // needs is taken together: nobody waits for memory who has some.
                let half = RangeAllocator::taken_by(span as usize);
                let changes_parts = op == IoOp::Write && partial;
                let (at, _) = self.allocate(if changes_parts { 2 * half } else { half }, batch);
                new.data = Some(Data { at, len: span as usize, hold: Hold::Own });
                if changes_parts {
                    new.stage = Stage::ReadOld;
                    new.old_blocks = Some((at + half, span as usize));
                }
                if let FileRequest::Write { data, .. } = *request {
                    let (buffer, base) = (&self.memory.mem.buffer, self.memory.mem.offset);
                    let to = base + at + (offset - start) as usize;
                    buffer.copy_to(base + data.at, buffer, to, len as usize);
                    self.take_back(Some(data));
                }
            }
            FileRequest::Zero { .. } | FileRequest::Sync => {}
        }
        Ok(Some(new))
    }

    /// Memory of the disk, for a channel.
    pub(super) fn mem(&self, at: usize, len: usize) -> Mem {
        assert!(at + len <= self.memory.len(), "memory outside of what there is");
        Mem {
            buffer: Arc::clone(&self.memory.mem.buffer),
            offset: self.memory.mem.offset + at,
            len,
        }
    }

    /// Takes back memory of a request that was not begun.
    pub(super) fn take_back(&self, data: Option<Data>) {
        if let Some(data) = data.filter(|data| data.hold == Hold::Own) {
            self.lock().ranges.free(data.at, data.len);
            self.freed.notify_all();
        }
    }

    /// Takes back what lies behind the first `len` bytes of memory that was allocated.
    pub(super) fn shrink(&self, at: usize, allocated: usize, len: usize) {
        let kept = RangeAllocator::taken_by(len);
        if kept < allocated {
            let rest = Data { at: at + kept, len: allocated - kept, hold: Hold::Own };
            self.take_back(Some(rest));
        }
    }

    /// Allocates memory if there is any.
    pub(super) fn try_allocate(&self, len: usize) -> Option<usize> {
        self.lock().ranges.allocate(len)
    }

    /// Allocates memory, and waits for it, with `batch` submitted.
    fn allocate(&self, len: usize, batch: &mut Vec<DiskIo>) -> (usize, usize) {
        if let Some(at) = self.try_allocate(len) {
            return (at, len);
        }
        // Memory comes back when others take the answers.
        self.send(batch);
        self.disk.leave();
        let mut state = self.lock();
        loop {
            if let Some(at) = state.ranges.allocate(len) {
                return (at, len);
            }
            state = self.freed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Answers requests in this thread, or sleeps until some have ended or `other` can be read;
    /// `None` if other threads answer them.
    pub(super) fn turn(&self, turns: &mut Turns, other: BorrowedFd<'_>) -> Option<usize> {
        turns.take(&*self.disk, other, &|| self.are_pending())
    }

    /// The thread with these turns answers no more for a while.
    pub(super) fn leave(&self, turns: &mut Turns) {
        turns.leave(&*self.disk);
    }

    /// Tells whether every request was answered, by whom ever.
    pub(super) fn is_idle(&self) -> bool {
        let state = self.lock();
        state.slots.len() == state.free.len() && state.answers.is_empty() && !state.draining
    }

    /// Refuses writes with EIO from now on; those that were taken continue.
    pub(super) fn end_changes(&self) {
        self.lock().is_ending = true;
    }

    /// Tells whether no write is in progress.
    pub(super) fn is_unchanging(&self) -> bool {
        let state = self.lock();
        state.writing == 0 && state.waiting.is_empty()
    }

    pub(super) fn are_pending(&self) -> bool {
        let state = self.lock();
        state.slots.len() > state.free.len()
    }

    /// Adds the disk requests for the present stage of an operation.
    fn add_requests(&self, state: &mut State, slot: usize, batch: &mut Vec<DiskIo>) {
        let (Some(Some(op)), Some(me)) = (state.slots.get_mut(slot), self.weak_self.upgrade())
        else {
            return;
        };
        let done: Arc<dyn DiskDone> = me;
        let (kind, place) = match op.stage {
            Stage::ReadOld => (IoOp::Read, op.old_blocks.map(|(at, _)| at)),
            Stage::Main => (op.op, op.data.map(|data| data.at)),
            Stage::Flush => (IoOp::Flush, None),
        };
        let (mut at, end) = match kind {
            IoOp::Flush => (0, 0),
            _ => (op.start, op.start + op.span),
        };
        let block = self.disk.limits().logical.max(1);
        let most = u64::from(u32::MAX - u32::MAX % block);
        loop {
            let len = most.min(end - at) as u32;
            op.parts += 1;
            batch.push(DiskIo {
                op: kind,
                offset: at,
                len,
                fua: op.fua && kind == IoOp::Write,
                nounmap: op.nounmap,
                mem: place.map(|at| (self.memory.region, at)),
                tag: slot as u64,
                done: done.clone(),
            });
            at += u64::from(len);
            if at >= end {
                return;
            }
        }
    }

    /// Handles the answer to a disk request: begins the next stage, or returns the finished
    /// operation.
    fn handle_answer(
        &self,
        state: &mut State,
        slot: usize,
        errno: i32,
        batch: &mut Vec<DiskIo>,
    ) -> Option<Op> {
        let op = state.slots.get_mut(slot)?.as_mut()?;
        op.parts = op.parts.saturating_sub(1);
        if op.errno == 0 {
            op.errno = errno;
        }
        if op.parts > 0 {
            return None;
        }
        let next = match op.stage {
            _ if op.errno != 0 => None,
            Stage::ReadOld => Some(Stage::Main),
            Stage::Main if op.flush_after => Some(Stage::Flush),
            Stage::Main | Stage::Flush => None,
        };
        if let Some(next) = next {
            if op.stage == Stage::ReadOld {
                self.fill_edges(op);
            }
            op.stage = next;
            self.add_requests(state, slot, batch);
            return None;
        }
        let op = state.slots.get_mut(slot)?.take()?;
        state.free.push(slot);
        if op.op.changes() {
            state.writing -= 1;
            state.exclusive = false;
            self.admit_next(state, batch);
        }
        Some(op)
    }

    /// Begins the next waiting writes, unless one must be exclusive.
    fn admit_next(&self, state: &mut State, batch: &mut Vec<DiskIo>) {
        while let Some(&next) = state.waiting.front() {
            let needs_exclusive =
                matches!(state.slots.get(next), Some(Some(op)) if op.old_blocks.is_some());
            if state.exclusive || (needs_exclusive && state.writing > 0) {
                return;
            }
            state.waiting.pop_front();
            state.exclusive = needs_exclusive;
            state.writing += 1;
            self.add_requests(state, next, batch);
        }
    }

    /// Copies the old contents around the bytes that are written.
    fn fill_edges(&self, op: &Op) {
        let (Some(Data { at: new, .. }), Some((old, _))) = (op.data, op.old_blocks) else { return };
        let (buffer, base) = (&self.memory.mem.buffer, self.memory.mem.offset);
        let before = (op.offset - op.start) as usize;
        let after = before + op.len as usize;
        buffer.copy_to(base + old, buffer, base + new, before);
        let rest = op.span as usize - after;
        buffer.copy_to(base + old + after, buffer, base + new + after, rest);
    }

    /// Replies, and frees the memory.
    fn finish(&self, mut op: Op) {
        let mem = op
            .data
            .filter(|_| op.op == IoOp::Read)
            .map(|data| self.mem(data.at + (op.offset - op.start) as usize, op.len as usize));
        if let Some(reply) = op.reply.take() {
            // Its memory comes back even if that panics.
            catch_callback_panic(|| match op.errno {
                0 => reply(Ok(mem.as_ref())),
                errno => reply(Err(Errno(-errno))),
            });
        }
        let mut state = self.lock();
        if let Some(data) = op.data.take().filter(|data| data.hold == Hold::Own) {
            state.ranges.free(data.at, data.len);
        }
        if let Some((at, len)) = op.old_blocks.take() {
            state.ranges.free(at, len);
        }
        drop(state);
        self.freed.notify_all();
    }
}

impl State {
    fn insert(&mut self, op: Op) -> usize {
        let slot = self.free.pop().unwrap_or_else(|| {
            self.slots.push(None);
            self.slots.len() - 1
        });
        self.slots[slot] = Some(op);
        slot
    }
}

impl DiskDone for Bytes {
    fn done(&self, results: &[(u64, i32)]) {
        let mut state = self.lock();
        state.answers.extend_from_slice(results);
        if state.draining {
            // This call is often nested in the draining one. Without this check, a disk that
            // answers at once would recurse for each waiting write.
            return;
        }
        state.draining = true;
        let (mut answers, mut batch, mut finished) = (Vec::new(), Vec::new(), Vec::new());
        while !state.answers.is_empty() {
            std::mem::swap(&mut answers, &mut state.answers);
            for (tag, errno) in answers.drain(..) {
                finished.extend(self.handle_answer(&mut state, tag as usize, errno, &mut batch));
            }
            drop(state);
            // After a panic in there, the next answers are still handled.
            catch_callback_panic(|| self.disk.submit(&mut batch));
            for op in finished.drain(..) {
                self.finish(op);
            }
            state = self.lock();
        }
        // Keeps the allocation for the next call.
        state.answers = answers;
        state.draining = false;
    }
}

impl fmt::Debug for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Bytes").field("disk", &self.disk.name()).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;
    use crate::LocalDevice;
    use crate::backend::{BackendSpec, open};

    fn memory(bytes: u64) -> Arc<Bytes> {
        let store = open(BackendSpec::Memory { bytes, block: 4096 }).unwrap();
        Bytes::new(LocalDevice::new("disk", store), 0).unwrap()
    }

    fn submit(bytes: &Bytes, ask: FileRequest, reply: Reply) {
        let mut batch = Vec::new();
        bytes.begin(ask, reply, &mut batch);
        bytes.send(&mut batch);
    }

    fn wait(bytes: &Bytes, ask: FileRequest) -> Result<Vec<u8>, Errno> {
        let (send, receive) = channel();
        let reply = move |result: Result<Option<&Mem>, Errno>| {
            let read = result.map(|mem| {
                let mut out = Vec::new();
                if let Some(mem) = mem {
                    mem.buffer.append_to(mem.offset, mem.len, &mut out);
                }
                out
            });
            send.send(read).unwrap();
        };
        submit(bytes, ask, Box::new(reply));
        receive.recv().unwrap()
    }

    fn read(offset: u64, len: usize) -> FileRequest {
        FileRequest::Read { offset, len, place: None }
    }

    /// A write of these bytes, which are put into memory of the disk before.
    fn write_of(disk: &Bytes, offset: u64, bytes: &[u8], durable: bool) -> FileRequest {
        let (at, len) = disk.allocate(bytes.len(), &mut Vec::new());
        disk.memory.write(at, bytes);
        FileRequest::Write { offset, data: Data { at, len, hold: Hold::Own }, durable }
    }

    #[test]
    fn any_byte_can_be_written_and_its_neighbours_stay() {
        let disk = memory(1 << 16);
        let mut model = vec![0_u8; 1 << 16];
        let mut random = 1_u64;
        let mut below = |n: usize| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(99);
            (random >> 33) as usize % n
        };
        for i in 0..2000 {
            let offset = below(model.len());
            let len = below((model.len() - offset).min(20_000)) + 1;
            if i % 3 == 0 {
                let ask = read(offset as u64, len);
                assert_eq!(wait(&disk, ask).unwrap(), model[offset..offset + len]);
            } else {
                let bytes = vec![i as u8; len];
                let ask = write_of(&disk, offset as u64, &bytes, i % 2 == 0);
                wait(&disk, ask).unwrap();
                model[offset..offset + len].fill(i as u8);
            }
        }
        assert_eq!(wait(&disk, read(0, 1 << 16)).unwrap(), model);
    }

    #[test]
    fn the_end_of_the_disk_is_the_end_of_the_file() {
        let disk = memory(8192);
        assert_eq!(wait(&disk, read(8000, 4096)).unwrap().len(), 192);
        assert_eq!(wait(&disk, read(9000, 4096)).unwrap().len(), 0);
        let write = |offset, bytes: &[u8]| wait(&disk, write_of(&disk, offset, bytes, false));
        write(8190, &[5; 10]).unwrap();
        assert_eq!(wait(&disk, read(8188, 9)).unwrap(), [0, 0, 5, 5]);
        assert_eq!(write(8192, &[5; 10]), Err(Errno::ENOSPC));
        let zero = |offset, len| wait(&disk, FileRequest::Zero { offset, len, keep: false });
        assert_eq!(zero(4096, u64::MAX - 8192), Ok(vec![]));
        assert_eq!(wait(&disk, read(8188, 9)).unwrap(), [0; 4]);
        assert_eq!(zero(100, 200), Err(Errno::EOPNOTSUPP));
        assert_eq!(wait(&disk, FileRequest::Sync), Ok(vec![]));
    }

    #[test]
    fn partial_writes_from_many_threads_lose_nothing() {
        let path = std::env::temp_dir().join(format!("bowline-bytes-{}", std::process::id()));
        let file = std::fs::File::create_new(&path).unwrap();
        file.set_len(1 << 16).unwrap();
        let file = std::fs::OpenOptions::new().read(true).write(true).open(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        let spec =
            BackendSpec::File { fd: file.into(), read_only: false, block: 4096, direct: true };
        let disk = Bytes::new(LocalDevice::new("disk", open(spec).unwrap()), 0).unwrap();
        std::thread::scope(|threads| {
            for t in 0..4_u64 {
                let disk = &disk;
                threads.spawn(move || {
                    // Each thread writes every fourth run of 100 bytes; threads share blocks.
                    for i in (t..600).step_by(4) {
                        let bytes = [t as u8 + 1; 100];
                        let ask = write_of(disk, i * 100, &bytes, false);
                        wait(disk, ask).unwrap();
                        // It also writes whole blocks elsewhere, which may run concurrently.
                        let bytes = [9; 4096];
                        let ask = write_of(disk, 15 * 4096, &bytes, false);
                        wait(disk, ask).unwrap();
                    }
                });
            }
        });
        let all = wait(&disk, read(0, 60_000)).unwrap();
        for (i, run) in all.chunks(100).enumerate() {
            assert!(run.iter().all(|byte| *byte == i as u8 % 4 + 1), "run {i}");
        }
    }

    /// Holds its first request until released, then answers each request inside the call that
    /// submits it.
    #[derive(Default)]
    struct Gone(Mutex<Option<(crate::backend::BackendIo, Arc<dyn crate::backend::BackendDone>)>>);

    impl Gone {
        fn fail(io: &crate::backend::BackendIo, done: &dyn crate::backend::BackendDone) {
            let (token, errno) = (io.token, Errno::EIO.neg());
            done.done(&[crate::backend::BackendResult { token, errno, direct: None }]);
        }
    }

    impl crate::backend::Backend for Gone {
        fn limits(&self) -> Limits {
            Limits { logical: 4096, ..Limits::plain(1 << 30) }
        }

        fn submit(
            &self,
            io: &mut Vec<crate::backend::BackendIo>,
            done: &Arc<dyn crate::backend::BackendDone>,
        ) {
            for io in io.drain(..) {
                let mut first = self.0.lock().unwrap();
                if io.offset == 0 && first.is_none() {
                    *first = Some((io, done.clone()));
                    continue;
                }
                drop(first);
                Self::fail(&io, &**done);
            }
        }

        fn resize(&self) -> std::io::Result<u64> {
            Ok(1 << 30)
        }
    }

    #[test]
    fn many_writes_that_fail_at_once_take_no_stack() {
        const WRITES: u64 = 1500;
        let gone = Arc::new(Gone::default());
        let disk = Bytes::new(LocalDevice::new("disk", gone.clone()), 0).unwrap();
        let (send, replies) = channel();
        for write in 0..WRITES {
            let ask = write_of(&disk, write * 8192, &[1; 100], false);
            let send = send.clone();
            let reply = move |result: Result<Option<&Mem>, Errno>| {
                send.send((write, result.map(drop))).unwrap();
            };
            submit(&disk, ask, Box::new(reply));
        }
        assert!(replies.try_recv().is_err(), "all wait for the first");
        let (io, done) = gone.0.lock().unwrap().take().unwrap();
        // Less than 256 bytes of stack for each write.
        let thread = std::thread::Builder::new().stack_size(256 << 10);
        thread.spawn(move || Gone::fail(&io, &*done)).unwrap().join().unwrap();
        let order: Vec<_> = replies.try_iter().collect();
        let all = (0..WRITES).map(|write| (write, Err(Errno::EIO)));
        assert_eq!(order, all.collect::<Vec<_>>());
    }

    /// Fails requests that touch its second block, and records writes.
    struct Faulty(Mutex<Vec<(IoOp, u64)>>);

    impl crate::backend::Backend for Faulty {
        fn limits(&self) -> Limits {
            Limits { logical: 4096, write_cache: true, ..Limits::plain(1 << 16) }
        }

        fn submit(
            &self,
            io: &mut Vec<crate::backend::BackendIo>,
            done: &Arc<dyn crate::backend::BackendDone>,
        ) {
            for io in io.drain(..) {
                self.0.lock().unwrap().push((io.op, io.offset));
                let errno = if io.offset == 4096 { -libc::EIO } else { 0 };
                let token = io.token;
                done.done(&[crate::backend::BackendResult { token, errno, direct: None }]);
            }
        }

        fn resize(&self) -> std::io::Result<u64> {
            Ok(1 << 16)
        }
    }

    #[test]
    fn a_failed_read_stops_a_partial_write_and_nothing_else() {
        let faulty = Arc::new(Faulty(Mutex::default()));
        let disk = Bytes::new(LocalDevice::new("disk", faulty.clone()), 0).unwrap();
        let write =
            |offset, bytes: &[u8], durable| wait(&disk, write_of(&disk, offset, bytes, durable));
        assert_eq!(write(5000, b"part", false), Err(Errno::EIO));
        assert_eq!(*faulty.0.lock().unwrap(), [(IoOp::Read, 4096)], "nothing was written");
        assert_eq!(write(4096, &[1; 4096], false), Err(Errno::EIO));
        assert_eq!(wait(&disk, read(4097, 1)), Err(Errno::EIO));
        faulty.0.lock().unwrap().clear();
        assert_eq!(write(9000, b"part", true), Ok(vec![]), "later writes go on");
        let seen = [(IoOp::Read, 8192), (IoOp::Write, 8192), (IoOp::Flush, 0)];
        assert_eq!(*faulty.0.lock().unwrap(), seen, "durable without forced access is a flush");
        let state = disk.lock();
        assert_eq!((state.writing, state.exclusive, state.waiting.len()), (0, false, 0));
    }
}
