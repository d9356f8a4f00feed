//! The rings of one machine, between the thread that takes requests off them and the threads that
//! deliver results.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};

use bowline_ctl::{ClientConnection, ClientHandler};
use bowline_rnbd::{Errno, IoOp, Limits};
use bowline_verbs::Buffer;

use super::inflight::InflightQueue;
use super::log::DirtyLog;
use super::memory::{GuestMemory, Piece, Removed};
use super::request::{self, DiskRange, Parsed, Status, Wanted};
use super::ring::{Broken, Segment, SplitRing, UsedLog};
use super::{RINGS_MAX, VhostUserOptions};
use crate::device::{BlockDevice, DeviceMem, DiskDone, DiskIo};
use crate::front::range_alloc::RangeAllocator;

/// Memory of a machine's connection for data that has to be copied, in bytes.
const COPY_BYTES: usize = 8 << 20;
/// Longest request whose data is copied.
const COPY_MAX: usize = COPY_BYTES / 2;
/// Most requests of a machine that the disk has, and most bytes of them. One request may have more.
const REQUESTS_MAX: usize = 4096;
const BYTES_MAX: usize = 256 << 20;
/// Most pieces of memory of a request that are sent each on its own, when they are short: a few
/// requests cost less than a copy, many cost more.
const PIECES_MAX: usize = 2;
/// A piece of this length is sent on its own in any case.
const PIECE_LONG: usize = 32 << 10;

/// The rings of one machine.
pub(super) struct Rings {
    weak_self: Weak<Self>,
    pub(super) client: ClientConnection,
    pub(super) disk: Arc<dyn BlockDevice>,
    options: VhostUserOptions,
    rings: Vec<Slot>,
    copies: DeviceMem,
    room: Mutex<Room>,
    /// Requests that the disk has.
    in_flight: AtomicUsize,
    /// The connection has ended: nothing reaches the guest any more, so that whoever serves it
    /// next does again what is in flight.
    ended: AtomicBool,
    /// No requests are taken, and failures are left to whoever serves the machine next.
    detached: AtomicBool,
    /// The disk has another size.
    pub(super) resized: AtomicBool,
    /// Wakes the connection's thread.
    pub(super) wake: OwnedFd,
}

/// What requests in flight take, of all rings.
struct Room {
    copies: RangeAllocator,
    requests: usize,
    bytes: usize,
    /// A ring waits until a request ends.
    stalled: bool,
}

#[derive(Default)]
struct Slot {
    state: Mutex<State>,
    /// A request has ended, or the connection.
    changed: Condvar,
}

#[derive(Default)]
struct State {
    running: Option<Running>,
    /// By the index of their first descriptor.
    requests: Vec<Option<Request>>,
    in_flight: usize,
    /// No request is taken, because the ring is disabled or being stopped.
    paused: bool,
    /// The guest has broken the ring.
    broken: bool,
    /// A request is left to whoever serves the machine next.
    has_left: bool,
}

/// What a ring needs to run.
pub(super) struct Running {
    pub(super) ring: SplitRing,
    pub(super) memory: Arc<GuestMemory>,
    pub(super) call: Option<Arc<OwnedFd>>,
    pub(super) error: Option<Arc<OwnedFd>>,
    pub(super) inflight: Option<InflightQueue>,
    /// Requests that were in flight when the former connection ended, to be done again first.
    pub(super) again: VecDeque<u16>,
    /// The guest knows that writes are durable only after a flush.
    pub(super) knows_cache: bool,
    /// Where writes to memory of requests are logged.
    pub(super) log: Option<Arc<DirtyLog>>,
    /// Signalled when something was logged.
    pub(super) log_call: Option<Arc<OwnedFd>>,
}

/// Where writes to the guest's memory are logged.
#[derive(Default)]
pub(super) struct Logs {
    pub(super) memory: Option<Arc<DirtyLog>>,
    pub(super) used: Option<UsedLog>,
    pub(super) call: Option<Arc<OwnedFd>>,
}

struct Request {
    memory: Arc<GuestMemory>,
    status: Piece,
    /// Bytes written to the guest's memory when it succeeds.
    written: u32,
    /// Parts that the disk has.
    parts: usize,
    errno: i32,
    /// A flush has to follow before the answer.
    flush_after: bool,
    /// Bytes of its data.
    len: usize,
    /// Memory of the data, unless it was copied from there.
    pieces: Vec<Piece>,
    /// The data goes to that memory.
    is_read: bool,
    /// Place of the copy, when the data is copied.
    copy: Option<usize>,
}

/// What became of a call to take requests.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Taken {
    /// All there were.
    All,
    /// Some; others may be there.
    Some,
    /// The ring is broken, from now on.
    Broken(Broken),
}

enum Prepared {
    Answered(u32),
    Begun,
    /// There is no room until another request ends.
    Stalled,
}

impl Rings {
    pub(super) fn new(
        client: ClientConnection,
        disk: Arc<dyn BlockDevice>,
        options: VhostUserOptions,
        wake: OwnedFd,
    ) -> Result<Arc<Self>, Errno> {
        let copies = disk.memory(COPY_BYTES)?;
        Ok(Arc::new_cyclic(|me| Self {
            weak_self: me.clone(),
            client,
            disk,
            options,
            rings: std::iter::repeat_with(Slot::default).take(RINGS_MAX).collect(),
            copies,
            room: Mutex::new(Room {
                copies: RangeAllocator::new(COPY_BYTES),
                requests: 0,
                bytes: 0,
                stalled: false,
            }),
            in_flight: AtomicUsize::new(0),
            ended: AtomicBool::new(false),
            detached: AtomicBool::new(false),
            resized: AtomicBool::new(false),
            wake,
        }))
    }

    /// Returns the limits of the disk as the guest sees them.
    pub(super) fn limits(&self) -> Limits {
        let limits = self.disk.limits();
        Limits { read_only: limits.read_only || self.options.read_only, ..limits }
    }

    /// Tells whether requests of a connection that has ended may still reach the disk.
    pub(super) fn lingers(&self) -> bool {
        // Acquire: pairs with the Release of `finish`.
        self.ended.load(Ordering::Acquire) && self.in_flight.load(Ordering::Acquire) > 0
    }

    /// Wakes the connection's thread.
    pub(super) fn wake(&self) {
        signal(&self.wake);
    }

    fn lock(&self, index: usize) -> MutexGuard<'_, State> {
        // Only a bug of this module panics with the lock held; the panic was printed.
        self.rings[index].state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock_room(&self) -> MutexGuard<'_, Room> {
        self.room.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts a ring.
    pub(super) fn start(&self, index: usize, running: Running) {
        let mut state = self.lock(index);
        state.requests.resize_with(running.ring.size().into(), || None);
        state.running = Some(running);
        (state.paused, state.broken) = (false, false);
    }

    pub(super) fn is_running(&self, index: usize) -> bool {
        self.lock(index).running.is_some()
    }

    /// Tells whether the guest has broken a ring.
    pub(super) fn is_broken(&self, index: usize) -> bool {
        self.lock(index).broken
    }

    /// Changes a running ring.
    pub(super) fn change(&self, index: usize, change: impl FnOnce(&mut Running)) {
        if let Some(running) = &mut self.lock(index).running {
            change(running);
        }
    }

    /// Sets the descriptor that is signalled when a ring is broken, as it may be already.
    pub(super) fn set_error(&self, index: usize, error: Option<Arc<OwnedFd>>) {
        let mut state = self.lock(index);
        if state.broken {
            error.iter().for_each(|error| signal(error));
        }
        if let Some(running) = &mut state.running {
            running.error = error;
        }
    }

    /// Sets whether requests of a ring are taken.
    pub(super) fn pause(&self, index: usize, paused: bool) {
        self.lock(index).paused = paused;
    }

    /// Stops a ring, once its requests have ended; returns the number of the next request. `None`:
    /// it does not run, or the connection has ended, or some request was left to another one.
    pub(super) fn stop(&self, index: usize) -> Option<u16> {
        let mut state = self.lock(index);
        state.paused = true;
        while state.in_flight > 0 {
            // Under the lock that `end` takes before it notifies.
            if self.ended.load(Ordering::Acquire) {
                return None;
            }
            let changed = &self.rings[index].changed;
            state = changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        let running = state.running.take();
        running.filter(|_| !state.has_left).map(|running| running.ring.next())
    }

    /// Waits until requests that use memory which is no longer there have ended; returns false if
    /// the connection has ended first.
    pub(super) fn wait_for_users(&self, removed: &[Removed]) -> bool {
        for (index, slot) in self.rings.iter().enumerate() {
            let mut state = self.lock(index);
            while state.requests.iter().flatten().any(|request| request.uses(removed)) {
                // Under the lock that `end` takes before it notifies.
                if self.ended.load(Ordering::Acquire) {
                    return false;
                }
                state = slot.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
        }
        true
    }

    /// Takes no more requests, and answers none that fails; wakes the connection's thread.
    pub(super) fn detach(&self) {
        // Release: who causes failures afterwards has `finish` see this.
        self.detached.store(true, Ordering::Release);
        self.wake();
    }

    pub(super) fn is_detached(&self) -> bool {
        self.detached.load(Ordering::Acquire)
    }

    /// Waits until all requests or the connection have ended.
    pub(super) fn wait_for_all(&self) {
        for (index, slot) in self.rings.iter().enumerate() {
            let mut state = self.lock(index);
            // Under the lock that `end` takes before it notifies.
            while state.in_flight > 0 && !self.ended.load(Ordering::Acquire) {
                state = slot.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
        }
    }

    /// Ends the connection: no result reaches the guest from now on.
    pub(super) fn end(&self) {
        self.ended.store(true, Ordering::Release);
        for (index, slot) in self.rings.iter().enumerate() {
            // Whoever writes results now is done with it, and whoever waits sees the end.
            drop(self.lock(index));
            slot.changed.notify_all();
        }
        self.disk.cancel_unwanted();
    }

    /// Takes requests off a ring, no more than it has descriptors, and appends them to a batch.
    pub(super) fn take(&self, index: usize, batch: &mut Vec<DiskIo>) -> Taken {
        let mut guard = self.lock(index);
        let state = &mut *guard;
        let stopped = self.ended.load(Ordering::Acquire) || self.is_detached();
        if state.paused || state.broken || stopped {
            return Taken::All;
        }
        let Some(running) = &mut state.running else { return Taken::All };
        let (limits, mut segments, mut answered) = (self.limits(), Vec::new(), Vec::new());
        let mut taken = Taken::Some;
        for _ in 0..running.ring.size() {
            let again = running.again.front().copied();
            let head = match again.map_or_else(|| running.ring.take(), |head| Ok(Some(head))) {
                Ok(Some(head)) => head,
                Ok(None) => {
                    taken = Taken::All;
                    break;
                }
                Err(broken) => {
                    taken = Taken::Broken(broken);
                    break;
                }
            };
            let slot = &mut state.requests[usize::from(head)];
            segments.clear();
            let prepared = if slot.is_some() {
                Err(Broken("a request that is in flight already"))
            } else {
                self.prepare(index, head, running, &limits, &mut segments, slot, batch)
            };
            match prepared {
                Ok(Prepared::Stalled) => {
                    if again.is_none() {
                        running.ring.give_back();
                    }
                    taken = Taken::All;
                    break;
                }
                Ok(Prepared::Begun) => state.in_flight += 1,
                Ok(Prepared::Answered(written)) => answered.push((head, written)),
                Err(broken) => {
                    taken = Taken::Broken(broken);
                    break;
                }
            }
            running.again.pop_front();
        }
        if !answered.is_empty() {
            running.put_used(&answered);
        }
        if let Taken::Broken(_) = taken {
            state.broken = true;
            running.error.iter().for_each(|error| signal(error));
        }
        taken
    }

    /// Makes requests to the disk of one of the guest, or answers it.
    #[expect(clippy::too_many_arguments, reason = "parts of one locked state, borrowed apart")]
    fn prepare(
        &self,
        index: usize,
        head: u16,
        running: &mut Running,
        limits: &Limits,
        segments: &mut Vec<Segment>,
        slot: &mut Option<Request>,
        batch: &mut Vec<DiskIo>,
    ) -> Result<Prepared, Broken> {
        running.ring.segments(&running.memory, head, segments)?;
        let Parsed { wanted, status } = request::parse(&running.memory, segments, limits)?;
        let mut request = Request {
            memory: Arc::clone(&running.memory),
            status,
            written: 1,
            parts: 0,
            errno: 0,
            flush_after: false,
            len: 0,
            pieces: Vec::new(),
            is_read: false,
            copy: None,
        };
        let begin = batch.len();
        let tag = (index as u64) << 16 | u64::from(head);
        let planned = match wanted {
            Wanted::Answered(status) => Planned::Answered(status, 0),
            Wanted::Name(pieces) => {
                let name = request::name_bytes(self.disk.name());
                let written = running.memory.write(&pieces, &name);
                running.mark(&running.memory, &pieces);
                // No longer than the name.
                Planned::Answered(Status::Ok, written as u32)
            }
            Wanted::Flush | Wanted::Ranges(..) if self.reserve(&request, None).is_none() => {
                Planned::Stalled
            }
            Wanted::Flush => {
                batch.push(self.io(IoOp::Flush, 0, 0, tag));
                Planned::Begun
            }
            Wanted::Ranges(op, ranges) => {
                batch.extend(ranges.iter().map(|range| self.range(op, range, tag)));
                Planned::Begun
            }
            Wanted::Data { op, offset, len, pieces } => {
                let asked = Asked { op, offset, len, tag };
                self.plan_data(&asked, limits, pieces, &mut request, batch)
            }
        };
        match planned {
            Planned::Stalled => return Ok(Prepared::Stalled),
            Planned::Answered(answer, written) => {
                if let Some(inflight) = &mut running.inflight {
                    inflight.taken(head);
                }
                running.put_status(&request, answer);
                return Ok(Prepared::Answered(written + 1));
            }
            Planned::Begun => {}
        }
        // Of an operation that changes the disk, when the guest sends no flush for it.
        let durable = |io: &DiskIo| io.op.changes() && limits.write_cache && !running.knows_cache;
        for io in &mut batch[begin..] {
            if durable(io) {
                let native = limits.fua && io.op == IoOp::Write;
                io.fua = native;
                request.flush_after |= !native;
            }
        }
        request.parts = batch.len() - begin;
        if let Some(inflight) = &mut running.inflight {
            inflight.taken(head);
        }
        self.in_flight.fetch_add(1, Ordering::Relaxed);
        *slot = Some(request);
        Ok(Prepared::Begun)
    }

    /// Reads and writes the guest's memory directly where that takes few requests; otherwise the
    /// data is copied once.
    fn plan_data(
        &self,
        asked: &Asked,
        limits: &Limits,
        pieces: Vec<Piece>,
        request: &mut Request,
        batch: &mut Vec<DiskIo>,
    ) -> Planned {
        let (op, len) = (asked.op, asked.len as usize);
        let direct = |piece: &Piece| {
            let registered = &request.memory.files[piece.file].registered;
            let region = registered.as_ref().map(|memory| memory.region);
            region.filter(|_| piece.len.is_multiple_of(limits.logical as usize))
        };
        let can_be_direct = pieces.iter().all(|piece| direct(piece).is_some());
        let few = pieces.len() <= PIECES_MAX || len / pieces.len() >= PIECE_LONG;
        if op == IoOp::Read {
            (request.written, request.is_read) = (request.written + asked.len, true);
        }
        request.len = len;
        if can_be_direct && (few || len > COPY_MAX) {
            if self.reserve(request, None).is_none() {
                return Planned::Stalled;
            }
            let mut offset = asked.offset;
            for piece in &pieces {
                let mem = direct(piece).map(|region| (region, piece.at));
                // Part of a length that fits.
                let part = DiskIo { mem, ..self.io(op, offset, piece.len as u32, asked.tag) };
                batch.push(part);
                offset += piece.len as u64;
            }
            request.pieces = pieces;
            return Planned::Begun;
        }
        if len > COPY_MAX {
            return Planned::Answered(Status::IoError, 0);
        }
        let Some(at) = self.reserve(request, Some(len)) else { return Planned::Stalled };
        if op == IoOp::Write {
            let mut to = self.copies.mem.offset + at;
            for piece in &pieces {
                let from = &request.memory.files[piece.file].buffer;
                from.copy_to(piece.at, &self.copies.mem.buffer, to, piece.len);
                to += piece.len;
            }
        }
        request.copy = Some(at);
        if request.is_read {
            request.pieces = pieces;
        }
        let mem = Some((self.copies.region, at));
        batch.push(DiskIo { mem, ..self.io(op, asked.offset, asked.len, asked.tag) });
        Planned::Begun
    }

    /// Makes room for a request, and for a copy of its data; returns the place of the copy. `None`:
    /// the thread is woken when there may be room.
    fn reserve(&self, request: &Request, copied: Option<usize>) -> Option<usize> {
        let mut room = self.lock_room();
        let fits = room.requests == 0
            || (room.requests < REQUESTS_MAX && room.bytes + request.len <= BYTES_MAX);
        let at = match copied.filter(|_| fits) {
            Some(len) => room.copies.allocate(len),
            None => fits.then_some(0),
        };
        match at {
            Some(_) => (room.requests, room.bytes) = (room.requests + 1, room.bytes + request.len),
            None => room.stalled = true,
        }
        at
    }

    /// Gives back the room of a request; returns true if a ring waits for it.
    fn release(&self, request: &Request) -> bool {
        let mut room = self.lock_room();
        (room.requests, room.bytes) = (room.requests - 1, room.bytes - request.len);
        if let Some(at) = request.copy {
            room.copies.free(at, request.len);
        }
        std::mem::take(&mut room.stalled)
    }

    fn range(&self, op: IoOp, range: &DiskRange, tag: u64) -> DiskIo {
        DiskIo { nounmap: range.nounmap, ..self.io(op, range.offset, range.len, tag) }
    }

    fn io(&self, op: IoOp, offset: u64, len: u32, tag: u64) -> DiskIo {
        DiskIo::new(op, offset, len, self.done()).tag(tag)
    }

    fn done(&self) -> Arc<dyn DiskDone> {
        self.weak_self.upgrade().expect("whoever calls this has one")
    }

    /// Handles results of requests of one ring; returns tags of those that a flush has to follow.
    fn finish(&self, index: usize, results: &[(u64, i32)]) -> Vec<u64> {
        let (mut used, mut flushes) = (Vec::new(), Vec::new());
        let mut guard = self.lock(index);
        let state = &mut *guard;
        // Under the lock that `end` takes.
        let ended = self.ended.load(Ordering::Acquire);
        let (mut count, mut stalled) = (0, false);
        for (tag, errno) in results {
            let head = *tag as u16;
            let Some(slot) = state.requests.get_mut(usize::from(head)) else { continue };
            let Some(request) = slot else { continue };
            if request.errno == 0 {
                request.errno = *errno;
            }
            request.parts -= 1;
            if request.parts > 0 {
                continue;
            }
            if request.flush_after && request.errno == 0 && !ended {
                (request.flush_after, request.parts) = (false, 1);
                flushes.push(*tag);
                continue;
            }
            let Some(request) = slot.take() else { continue };
            count += 1;
            if request.errno != 0 && !ended && self.is_detached() {
                state.has_left = true;
                stalled |= self.release(&request);
                continue;
            }
            // Requests end before their ring does.
            if let Some(running) = state.running.as_ref().filter(|_| !ended) {
                if let Some(at) = request.copy.filter(|_| request.is_read && request.errno == 0) {
                    self.copy_back(&request.memory, at, &request.pieces);
                }
                if request.is_read {
                    // A read that failed may have written some of it.
                    running.mark(&request.memory, &request.pieces);
                }
                running.put_status(&request, Status::of(request.errno));
            }
            stalled |= self.release(&request);
            used.push((head, if request.errno == 0 { request.written } else { 1 }));
        }
        if let Some(running) = &mut state.running
            && !(ended || state.broken || used.is_empty())
        {
            running.put_used(&used);
        }
        state.in_flight -= count;
        drop(guard);
        self.rings[index].changed.notify_all();
        // Release: what was done to the disk and to memory is done for whoever serves next.
        self.in_flight.fetch_sub(count, Ordering::Release);
        if stalled {
            self.wake();
        }
        flushes
    }

    fn copy_back(&self, memory: &GuestMemory, at: usize, to: &[Piece]) {
        let mut from = self.copies.mem.offset + at;
        for piece in to {
            let buffer: &Buffer = &memory.files[piece.file].buffer;
            self.copies.mem.buffer.copy_to(from, buffer, piece.at, piece.len);
            from += piece.len;
        }
    }
}

struct Asked {
    op: IoOp,
    offset: u64,
    len: u32,
    tag: u64,
}

enum Planned {
    Answered(Status, u32),
    Begun,
    Stalled,
}

impl Request {
    fn uses(&self, removed: &[Removed]) -> bool {
        let is_there = |piece: &Piece| removed.iter().any(|part| self.memory.is_in(piece, part));
        is_there(&self.status) || self.pieces.iter().any(is_there)
    }
}

impl Running {
    /// Sets where writes are logged.
    pub(super) fn set_logs(&mut self, logs: Logs) {
        (self.log, self.log_call) = (logs.memory, logs.call);
        self.ring.set_log(logs.used);
    }

    fn put_status(&self, request: &Request, status: Status) {
        request.memory.write(&[request.status], &[status as u8]);
        self.mark(&request.memory, &[request.status]);
    }

    /// Logs that memory was written.
    fn mark(&self, memory: &GuestMemory, pieces: &[Piece]) {
        if let Some(log) = &self.log {
            pieces.iter().for_each(|piece| memory.mark(log, piece));
        }
    }

    /// Tells the guest that requests are done, with the numbers of bytes written to their memory.
    fn put_used(&mut self, used: &[(u16, u32)]) {
        let heads = || used.iter().map(|(head, _)| *head);
        if let Some(inflight) = &self.inflight {
            inflight.begin_used(heads());
        }
        let wants_call = self.ring.put_used(used.iter().copied());
        if let Some(inflight) = &self.inflight {
            inflight.end_used(heads(), self.ring.next_used());
        }
        self.log_call.iter().for_each(|call| signal(call));
        if wants_call {
            self.call.iter().for_each(|call| signal(call));
        }
    }
}

impl DiskDone for Rings {
    fn is_wanted(&self, _: IoOp) -> bool {
        !self.ended.load(Ordering::Acquire)
    }

    fn done(&self, results: &[(u64, i32)]) {
        for one_ring in results.chunk_by(|(one, _), (other, _)| one >> 16 == other >> 16) {
            let index = (one_ring[0].0 >> 16) as usize;
            let flush = |tag| self.io(IoOp::Flush, 0, 0, tag);
            let flushes = self.finish(index, one_ring);
            if !flushes.is_empty() {
                self.disk.submit(&mut flushes.into_iter().map(flush).collect());
            }
        }
    }
}

impl ClientHandler for Rings {
    fn hung_up(&self) {
        self.end();
    }

    fn abort(&self) {
        self.end();
    }
}

/// Signals an event descriptor, which does not wait.
pub(super) fn signal(event: &OwnedFd) {
    // Fails when the counter is full, and then the event is there.
    let _ = rustix::io::write(event, &1_u64.to_ne_bytes());
}
