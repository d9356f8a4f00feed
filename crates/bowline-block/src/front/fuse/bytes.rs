//! A disk as a file: any byte may be read and written, whatever the disk's blocks are.
//!
//! ```text
//!   read            whole blocks around the bytes; the bytes are cut out
//!   write           whole blocks: as they are
//!                   parts of blocks: nobody else writes meanwhile; read, change, write
//!   all            [then a flush, if it has to be durable and the disk has no better way]
//! ```

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};

use bowline_rnbd::{Errno, IoOp, Limits};
use bowline_verbs::contain;

use crate::device::{BlockDevice, DeviceMem, DiskDone, DiskIo};
use crate::front::stretches::Stretches;

/// Bytes for the data of requests under way.
const MEMORY: usize = 16 << 20;
/// Bytes of one read or write.
pub(super) const MAX_IO: usize = 1 << 20;

/// Takes the result of a request; the bytes of a read.
pub(super) type Reply = Box<dyn FnOnce(Result<Vec<u8>, Errno>) + Send>;

/// What is asked of the file.
#[derive(Debug)]
pub(super) enum Ask<'a> {
    Read { offset: u64, len: usize },
    Write { offset: u64, bytes: &'a [u8], durable: bool },
    Zero { offset: u64, len: u64, keep: bool },
    Sync,
}

/// A disk, byte by byte.
pub(super) struct Bytes {
    me: Weak<Self>,
    disk: Arc<dyn BlockDevice>,
    memory: DeviceMem,
    state: Mutex<State>,
    /// Memory was given back.
    freed: Condvar,
}

struct State {
    stretches: Stretches,
    slots: Vec<Option<Op>>,
    free: Vec<usize>,
    /// Writes under way.
    writing: usize,
    /// One of them changes parts of blocks, so it is the only one.
    alone: bool,
    /// Writes that wait for that, first come first served.
    waiting: VecDeque<usize>,
    /// Answers of the disk, and whether a call of [`Bytes::done`] is working them off.
    answers: Vec<(u64, i32)>,
    working: bool,
}

struct Op {
    stage: Stage,
    op: IoOp,
    /// First byte asked for, and how many.
    offset: u64,
    len: u64,
    /// Whole blocks around them.
    start: u64,
    span: u64,
    /// Where the data is, and how much of the memory is taken for it.
    place: Option<(usize, usize)>,
    /// Where the blocks are read to that are changed in parts.
    old: Option<(usize, usize)>,
    fua: bool,
    then_flush: bool,
    nounmap: bool,
    /// Requests of the disk under way for it.
    parts: usize,
    errno: i32,
    reply: Option<Reply>,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Stage {
    /// Reads the blocks that are to be changed in parts.
    Old,
    /// Does what was asked for.
    Main,
    /// Makes it durable.
    Flush,
}

impl Bytes {
    pub(super) fn new(disk: Arc<dyn BlockDevice>) -> Result<Arc<Self>, Errno> {
        let memory = disk.memory(MEMORY)?;
        Ok(Arc::new_cyclic(|me| Self {
            me: me.clone(),
            disk,
            memory,
            state: Mutex::new(State {
                stretches: Stretches::new(MEMORY),
                slots: Vec::new(),
                free: Vec::new(),
                writing: 0,
                alone: false,
                waiting: VecDeque::new(),
                answers: Vec::new(),
                working: false,
            }),
            freed: Condvar::new(),
        }))
    }

    pub(super) fn limits(&self) -> Limits {
        self.disk.limits()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // What panics with the lock held is a mistake in here, printed when it happened.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins a request; waits only for memory. The reply may come inside this call.
    pub(super) fn ask(&self, ask: Ask<'_>, reply: Reply) {
        match self.prepare(&ask) {
            Err(errno) => reply(Err(errno)),
            Ok(None) => reply(Ok(Vec::new())),
            Ok(Some(mut op)) => {
                op.reply = Some(reply);
                let mut batch = Vec::new();
                let mut state = self.lock();
                let changes = op.op.changes();
                let slot = state.keep(op);
                if changes {
                    state.waiting.push_back(slot);
                } else {
                    self.requests(&mut state, slot, &mut batch);
                }
                self.admit_next(&mut state, &mut batch);
                drop(state);
                self.disk.submit(&mut batch);
            }
        }
    }

    /// What is to be done; `None` for nothing.
    fn prepare(&self, ask: &Ask<'_>) -> Result<Option<Op>, Errno> {
        let limits = self.disk.limits();
        let (op, offset, asked) = match *ask {
            Ask::Read { offset, len } => (IoOp::Read, offset, len as u64),
            Ask::Write { offset, bytes, .. } => (IoOp::Write, offset, bytes.len() as u64),
            Ask::Zero { offset, len, .. } => (IoOp::WriteZeroes, offset, len),
            Ask::Sync => (IoOp::Flush, 0, 0),
        };
        if op.changes() && limits.read_only {
            return Err(Errno::EPERM);
        }
        if op == IoOp::WriteZeroes && limits.max_write_zeroes == 0 {
            return Err(Errno::EOPNOTSUPP);
        }
        // A disk does not grow: what lies beyond its end is not there, and has no room.
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
        let durable = matches!(ask, Ask::Write { durable: true, .. });
        let mut new = Op {
            stage: Stage::Main,
            op,
            offset,
            len,
            start,
            span,
            place: None,
            old: None,
            fua: durable && limits.fua,
            then_flush: durable && !limits.fua && limits.write_cache,
            nounmap: matches!(ask, Ask::Zero { keep: true, .. }),
            parts: 0,
            errno: 0,
            reply: None,
        };
        if op.has_data() {
            // At most the largest IO and a block at both ends.
            new.place = Some(self.take(span as usize));
        }
        if op == IoOp::Write && partial {
            new.stage = Stage::Old;
            new.old = Some(self.take(span as usize));
        }
        if let (Ask::Write { bytes, .. }, Some((at, _))) = (ask, new.place) {
            let at = self.memory.mem.offset + at + (offset - start) as usize;
            self.memory.mem.buffer.write(at, &bytes[..len as usize]);
        }
        Ok(Some(new))
    }

    fn take(&self, len: usize) -> (usize, usize) {
        let mut state = self.lock();
        loop {
            if let Some(at) = state.stretches.take(len) {
                return (at, len);
            }
            state = self.freed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Requests of the disk for the stage that an operation is in.
    fn requests(&self, state: &mut State, slot: usize, batch: &mut Vec<DiskIo>) {
        let (Some(Some(op)), Some(me)) = (state.slots.get_mut(slot), self.me.upgrade()) else {
            return;
        };
        let done: Arc<dyn DiskDone> = me;
        let (kind, place) = match op.stage {
            Stage::Old => (IoOp::Read, op.old),
            Stage::Main => (op.op, op.place),
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
                mem: place.map(|(at, _)| (self.memory.region, at)),
                tag: slot as u64,
                done: done.clone(),
            });
            at += u64::from(len);
            if at >= end {
                return;
            }
        }
    }

    /// A request of the disk was answered: the next stage begins, or the operation is over.
    fn answered(
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
            Stage::Old => Some(Stage::Main),
            Stage::Main if op.then_flush => Some(Stage::Flush),
            Stage::Main | Stage::Flush => None,
        };
        if let Some(next) = next {
            if op.stage == Stage::Old {
                self.fill_edges(op);
            }
            op.stage = next;
            self.requests(state, slot, batch);
            return None;
        }
        let op = state.slots.get_mut(slot)?.take()?;
        state.free.push(slot);
        if op.op.changes() {
            state.writing -= 1;
            state.alone = false;
            self.admit_next(state, batch);
        }
        Some(op)
    }

    /// Lets those writes begin that are next, unless one has to be alone.
    fn admit_next(&self, state: &mut State, batch: &mut Vec<DiskIo>) {
        while let Some(&next) = state.waiting.front() {
            let needs_alone = matches!(state.slots.get(next), Some(Some(op)) if op.old.is_some());
            if state.alone || (needs_alone && state.writing > 0) {
                return;
            }
            state.waiting.pop_front();
            state.alone = needs_alone;
            state.writing += 1;
            self.requests(state, next, batch);
        }
    }

    /// Puts what was there before around the bytes that are written.
    fn fill_edges(&self, op: &Op) {
        let (Some((new, _)), Some((old, _))) = (op.place, op.old) else { return };
        let (buffer, base) = (&self.memory.mem.buffer, self.memory.mem.offset);
        let before = (op.offset - op.start) as usize;
        let after = before + op.len as usize;
        buffer.copy_to(base + old, buffer, base + new, before);
        let rest = op.span as usize - after;
        buffer.copy_to(base + old + after, buffer, base + new + after, rest);
    }

    /// Replies, and gives the memory back.
    fn finish(&self, mut op: Op) {
        let result = match (op.errno, op.op, op.place) {
            (0, IoOp::Read, Some((at, _))) => {
                let mut out = Vec::new();
                let at = self.memory.mem.offset + at + (op.offset - op.start) as usize;
                self.memory.mem.buffer.append_to(at, op.len as usize, &mut out);
                Ok(out)
            }
            (0, ..) => Ok(Vec::new()),
            (errno, ..) => Err(Errno(-errno)),
        };
        let mut state = self.lock();
        for (at, len) in op.place.take().into_iter().chain(op.old.take()) {
            state.stretches.give(at, len);
        }
        drop(state);
        self.freed.notify_all();
        if let Some(reply) = op.reply.take() {
            reply(result);
        }
    }
}

impl State {
    fn keep(&mut self, op: Op) -> usize {
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
        if state.working {
            // Often inside of it: a disk that answers at once would otherwise be asked for the next
            // of all writes that wait inside the answer to the one before.
            return;
        }
        state.working = true;
        let (mut answers, mut batch, mut finished) = (Vec::new(), Vec::new(), Vec::new());
        while !state.answers.is_empty() {
            std::mem::swap(&mut answers, &mut state.answers);
            for (tag, errno) in answers.drain(..) {
                finished.extend(self.answered(&mut state, tag as usize, errno, &mut batch));
            }
            drop(state);
            // Whatever panics in there, the next answers are worked off.
            contain(|| self.disk.submit(&mut batch));
            for op in finished.drain(..) {
                contain(|| self.finish(op));
            }
            state = self.lock();
        }
        // Its memory is for the next call.
        state.answers = answers;
        state.working = false;
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
        Bytes::new(LocalDevice::new("disk", store)).unwrap()
    }

    fn wait(bytes: &Bytes, ask: Ask<'_>) -> Result<Vec<u8>, Errno> {
        let (send, receive) = channel();
        bytes.ask(ask, Box::new(move |result| send.send(result).unwrap()));
        receive.recv().unwrap()
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
                let ask = Ask::Read { offset: offset as u64, len };
                assert_eq!(wait(&disk, ask).unwrap(), model[offset..offset + len]);
            } else {
                let bytes = vec![i as u8; len];
                let ask = Ask::Write { offset: offset as u64, bytes: &bytes, durable: i % 2 == 0 };
                wait(&disk, ask).unwrap();
                model[offset..offset + len].fill(i as u8);
            }
        }
        assert_eq!(wait(&disk, Ask::Read { offset: 0, len: 1 << 16 }).unwrap(), model);
    }

    #[test]
    fn the_end_of_the_disk_is_the_end_of_the_file() {
        let disk = memory(8192);
        assert_eq!(wait(&disk, Ask::Read { offset: 8000, len: 4096 }).unwrap().len(), 192);
        assert_eq!(wait(&disk, Ask::Read { offset: 9000, len: 4096 }).unwrap().len(), 0);
        let write = |offset, bytes| wait(&disk, Ask::Write { offset, bytes, durable: false });
        write(8190, &[5; 10]).unwrap();
        assert_eq!(wait(&disk, Ask::Read { offset: 8188, len: 9 }).unwrap(), [0, 0, 5, 5]);
        assert_eq!(write(8192, &[5; 10]), Err(Errno::ENOSPC));
        let zero = |offset, len| wait(&disk, Ask::Zero { offset, len, keep: false });
        assert_eq!(zero(4096, u64::MAX - 8192), Ok(vec![]));
        assert_eq!(wait(&disk, Ask::Read { offset: 8188, len: 9 }).unwrap(), [0; 4]);
        assert_eq!(zero(100, 200), Err(Errno::EOPNOTSUPP));
        assert_eq!(wait(&disk, Ask::Sync), Ok(vec![]));
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
        let disk = Bytes::new(LocalDevice::new("disk", open(spec).unwrap())).unwrap();
        std::thread::scope(|threads| {
            for t in 0..4_u64 {
                let disk = &disk;
                threads.spawn(move || {
                    // Every thread has every fourth run of 100 bytes; blocks are shared.
                    for i in (t..600).step_by(4) {
                        let bytes = [t as u8 + 1; 100];
                        let ask = Ask::Write { offset: i * 100, bytes: &bytes, durable: false };
                        wait(disk, ask).unwrap();
                        // And whole blocks elsewhere, which may run beside each other.
                        let bytes = [9; 4096];
                        let ask = Ask::Write { offset: 15 * 4096, bytes: &bytes, durable: false };
                        wait(disk, ask).unwrap();
                    }
                });
            }
        });
        let all = wait(&disk, Ask::Read { offset: 0, len: 60_000 }).unwrap();
        for (i, run) in all.chunks(100).enumerate() {
            assert!(run.iter().all(|byte| *byte == i as u8 % 4 + 1), "run {i}");
        }
    }

    /// Keeps its first request until it is told to, then answers each inside the call that brings
    /// it.
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
        let disk = Bytes::new(LocalDevice::new("disk", gone.clone())).unwrap();
        let (send, replies) = channel();
        for write in 0..WRITES {
            let ask = Ask::Write { offset: write * 8192, bytes: &[1; 100], durable: false };
            let send = send.clone();
            disk.ask(ask, Box::new(move |result| send.send((write, result)).unwrap()));
        }
        assert!(replies.try_recv().is_err(), "all wait for the first");
        let (io, done) = gone.0.lock().unwrap().take().unwrap();
        // Less than a quarter of a kilobyte for each.
        let thread = std::thread::Builder::new().stack_size(256 << 10);
        thread.spawn(move || Gone::fail(&io, &*done)).unwrap().join().unwrap();
        let order: Vec<_> = replies.try_iter().collect();
        let all = (0..WRITES).map(|write| (write, Err(Errno::EIO)));
        assert_eq!(order, all.collect::<Vec<_>>());
    }

    /// Fails what touches its second block, and counts writes.
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
        let disk = Bytes::new(LocalDevice::new("disk", faulty.clone())).unwrap();
        let write =
            |offset, bytes: &[u8], durable| wait(&disk, Ask::Write { offset, bytes, durable });
        assert_eq!(write(5000, b"part", false), Err(Errno::EIO));
        assert_eq!(*faulty.0.lock().unwrap(), [(IoOp::Read, 4096)], "nothing was written");
        assert_eq!(write(4096, &[1; 4096], false), Err(Errno::EIO));
        assert_eq!(wait(&disk, Ask::Read { offset: 4097, len: 1 }), Err(Errno::EIO));
        faulty.0.lock().unwrap().clear();
        assert_eq!(write(9000, b"part", true), Ok(vec![]), "later writes go on");
        let seen = [(IoOp::Read, 8192), (IoOp::Write, 8192), (IoOp::Flush, 0)];
        assert_eq!(*faulty.0.lock().unwrap(), seen, "durable without forced access is a flush");
        let state = disk.lock();
        assert_eq!((state.writing, state.alone, state.waiting.len()), (0, false, 0));
    }
}
