//! Requests of one connection that are not answered yet, and the memory of their data.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use bowline_rnbd::Errno;
use bowline_verbs::Mem;

use super::reply::Origin;
use super::work::Work;
use crate::device::{BlockDevice, DeviceMem};
use crate::front::range_alloc::RangeAllocator;

/// Most requests in flight of one connection.
const MAX_REQUESTS: usize = 256;
/// Most bytes of separate memory: two of the largest requests.
const MAX_SEPARATE: usize = 2 * super::wire::MAX_PAYLOAD as usize;

/// Memory of a request's data.
#[derive(Debug)]
pub(super) enum Place {
    /// The request has no data.
    None,
    /// In the connection's memory.
    Shared(usize),
    /// Separate memory, for a large request.
    Separate(DeviceMem),
}

/// A request in flight.
#[derive(Debug)]
pub(super) struct Request {
    pub(super) origin: Origin,
    pub(super) place: Place,
    /// Bytes of data.
    pub(super) len: u32,
    /// What the disk was not asked for yet.
    pub(super) rest: Work,
    /// A flush has to follow before the answer.
    pub(super) flush_after: bool,
}

/// All requests of one connection.
pub(super) struct Requests {
    shared_memory: DeviceMem,
    table: Mutex<Table>,
    /// A request was answered, or the connection closed.
    changed: Condvar,
}

struct Table {
    slots: Vec<Option<Request>>,
    free: Vec<u32>,
    ranges: RangeAllocator,
    separate_bytes: usize,
    /// Number of requests whose reply was not sent; what an earlier process has left counts as one.
    pending: usize,
    /// Threads that wait for a change. Waking nobody costs a system call, too.
    waiting: usize,
    /// The client has hung up.
    hung_up: bool,
    /// The reading thread is wanted elsewhere.
    paused: bool,
    closed: bool,
}

/// Why a request gets no memory.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum NoPlace {
    /// The reading thread is wanted elsewhere; the request is taken back.
    Paused,
    /// The connection was closed, or the client has hung up.
    Gone,
}

impl Requests {
    /// `are_left`: an earlier process has left replies to send.
    pub(super) fn new(shared_memory: DeviceMem, are_left: bool) -> Self {
        let table = Table {
            slots: Vec::new(),
            free: Vec::new(),
            ranges: RangeAllocator::new(shared_memory.mem.len),
            separate_bytes: 0,
            pending: are_left.into(),
            waiting: 0,
            hung_up: false,
            paused: false,
            closed: false,
        };
        Self { shared_memory, table: Mutex::new(table), changed: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        // Only a bug in this module panics with the lock held; the panic was printed.
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells whether the data of a request gets separate memory, which takes its time.
    pub(super) fn is_separate(&self, len: u32) -> bool {
        len as usize > self.shared_memory.mem.len / 8
    }

    fn wait<'a>(&self, mut table: MutexGuard<'a, Table>) -> MutexGuard<'a, Table> {
        table.waiting += 1;
        let mut table = self.changed.wait(table).unwrap_or_else(PoisonError::into_inner);
        table.waiting -= 1;
        table
    }

    /// Counts a request and allocates memory for its `len` bytes of data. If there is none, calls
    /// `before` once, which submits earlier requests, and waits. A failed allocation is counted
    /// too, since it has to be answered.
    pub(super) fn allocate(
        &self,
        disk: &dyn BlockDevice,
        len: u32,
        before: impl FnOnce(),
    ) -> Result<Result<Place, Errno>, NoPlace> {
        let separate = self.is_separate(len);
        let len = len as usize;
        let mut before = Some(before);
        let mut table = self.lock();
        loop {
            if table.closed {
                return Err(NoPlace::Gone);
            }
            if table.pending < MAX_REQUESTS {
                if separate && table.separate_bytes + len <= MAX_SEPARATE {
                    table.pending += 1;
                    table.separate_bytes += len;
                    drop(table);
                    let place = disk.memory(len).map(Place::Separate);
                    return Ok(place.inspect_err(|_| self.lock().separate_bytes -= len));
                }
                let place = match len {
                    _ if separate => None,
                    0 => Some(Place::None),
                    _ => table.ranges.allocate(len).map(Place::Shared),
                };
                if let Some(place) = place {
                    table.pending += 1;
                    return Ok(Ok(place));
                }
            }
            if let Some(before) = before.take() {
                drop(table);
                before();
                table = self.lock();
                continue;
            }
            if table.hung_up {
                return Err(NoPlace::Gone);
            }
            if table.paused {
                return Err(NoPlace::Paused);
            }
            table = self.wait(table);
        }
    }

    /// Tells whether there are requests whose reply was not sent.
    pub(super) fn are_pending(&self) -> bool {
        self.lock().pending > 0
    }

    /// Returns the memory of a request, and its region id and offset.
    pub(super) fn memory(&self, place: &Place, len: u32) -> Option<(Mem, (u32, usize))> {
        let (from, at) = match place {
            Place::None => return None,
            Place::Shared(at) => (&self.shared_memory, *at),
            Place::Separate(own) => (own, 0),
        };
        let mem = Mem {
            buffer: from.mem.buffer.clone(),
            offset: from.mem.offset + at,
            len: len as usize,
        };
        Some((mem, (from.region, at)))
    }

    /// Stores a request; returns its tag.
    pub(super) fn add(&self, request: Request) -> u64 {
        let mut table = self.lock();
        let slot = table.free.pop().unwrap_or_else(|| {
            table.slots.push(None);
            table.slots.len() as u32 - 1
        });
        table.slots[slot as usize] = Some(request);
        slot.into()
    }

    /// Removes an answered request. `Err` while there is more to do for it: the caller then submits
    /// that piece under the same tag.
    pub(super) fn complete(&self, tag: u64, errno: i32) -> Option<Result<Request, Work>> {
        let mut table = self.lock();
        let slot = table.slots.get_mut(usize::try_from(tag).ok()?)?;
        let request = slot.as_mut()?;
        if request.rest.len > 0 && errno == 0 {
            return Some(Err(request.rest.take_piece()));
        }
        if request.flush_after && errno == 0 {
            request.flush_after = false;
            return Some(Err(Work::FLUSH));
        }
        let request = slot.take()?;
        table.free.push(tag as u32);
        Some(Ok(request))
    }

    /// Frees the memory of a request whose reply was sent, or never will be.
    pub(super) fn release(&self, place: &Place, len: u32) {
        let mut table = self.lock();
        match place {
            Place::None => {}
            Place::Shared(at) => table.ranges.free(*at, len as usize),
            Place::Separate(_) => table.separate_bytes -= len as usize,
        }
        table.pending -= 1;
        let is_awaited = table.waiting > 0;
        drop(table);
        if is_awaited {
            self.changed.notify_all();
        }
    }

    /// Makes requests that find no memory end instead of waiting.
    pub(super) fn stop_waiting(&self) {
        self.lock().hung_up = true;
        self.changed.notify_all();
    }

    /// Makes requests that find no memory be taken back, or lets them wait again.
    pub(super) fn pause(&self, paused: bool) {
        self.lock().paused = paused;
        self.changed.notify_all();
    }

    /// Returns how many requests have replies that were not sent, if the disk has answered all.
    pub(super) fn answered(&self) -> Option<usize> {
        let table = self.lock();
        (table.slots.len() == table.free.len()).then_some(table.pending)
    }

    /// Ends all waits for memory.
    pub(super) fn close(&self) {
        self.lock().closed = true;
        self.changed.notify_all();
    }

    /// Waits until every reply was sent, or the connection closed; returns false if a pause has
    /// begun before.
    pub(super) fn wait_all(&self) -> bool {
        let mut table = self.lock();
        while table.pending > 0 && !table.closed {
            if table.paused {
                return false;
            }
            table = self.wait(table);
        }
        true
    }
}

impl std::fmt::Debug for Requests {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Requests").field("pending", &self.lock().pending).finish_non_exhaustive()
    }
}
