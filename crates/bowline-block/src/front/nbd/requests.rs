//! Requests of one connection that are not answered yet, and the memory of their data.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use bowline_rnbd::Errno;
use bowline_verbs::Mem;

use crate::device::{BlockDevice, DeviceMem};
use crate::front::stretches::Stretches;

/// Requests under way, of one connection.
const MAX_REQUESTS: usize = 256;
/// Bytes of requests with memory of their own: two of the largest.
const MAX_OWN: usize = 2 * super::wire::MAX_PAYLOAD as usize;

/// Where the data of a request is.
#[derive(Debug)]
pub(super) enum Place {
    /// It has none.
    Nowhere,
    /// In the connection's memory.
    Shared(usize),
    /// In memory of its own, for large ones.
    Own(DeviceMem),
}

/// One request under way.
#[derive(Debug)]
pub(super) struct Request {
    pub(super) cookie: u64,
    pub(super) place: Place,
    /// Bytes of data.
    pub(super) len: u32,
    /// The data goes to the client.
    pub(super) is_read: bool,
    /// A flush has to follow before it is answered.
    pub(super) then_flush: bool,
}

/// All of one connection.
pub(super) struct Requests {
    shared_memory: DeviceMem,
    table: Mutex<Table>,
    /// A request was answered, or the connection closed.
    changed: Condvar,
}

struct Table {
    slots: Vec<Option<Request>>,
    free: Vec<u32>,
    stretches: Stretches,
    own_bytes: usize,
    /// Requests whose reply was not sent.
    pending: usize,
    /// The client takes no replies any more.
    hung_up: bool,
    closed: bool,
}

impl Requests {
    pub(super) fn new(shared_memory: DeviceMem) -> Self {
        let table = Table {
            slots: Vec::new(),
            free: Vec::new(),
            stretches: Stretches::new(shared_memory.mem.len),
            own_bytes: 0,
            pending: 0,
            hung_up: false,
            closed: false,
        };
        Self { shared_memory, table: Mutex::new(table), changed: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        // What panics with the lock held is a mistake in here, printed when it happened.
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts a request with so many bytes of data and gets memory for them. While there is none,
    /// calls `before` once, which is to begin what was taken before, and waits. `None`: the
    /// connection was closed, or there is nobody any more to wait for. An error is counted too: it
    /// has to be answered.
    pub(super) fn place(
        &self,
        disk: &dyn BlockDevice,
        len: u32,
        before: impl FnOnce(),
    ) -> Option<Result<Place, Errno>> {
        let len = len as usize;
        let own = len > self.shared_memory.mem.len / 8;
        let mut before = Some(before);
        let mut table = self.lock();
        loop {
            if table.closed {
                return None;
            }
            if table.pending < MAX_REQUESTS {
                if own && table.own_bytes + len <= MAX_OWN {
                    table.pending += 1;
                    table.own_bytes += len;
                    drop(table);
                    let own = disk.memory(len).map(Place::Own);
                    return Some(own.inspect_err(|_| self.lock().own_bytes -= len));
                }
                let place = match len {
                    _ if own => None,
                    0 => Some(Place::Nowhere),
                    _ => table.stretches.take(len).map(Place::Shared),
                };
                if let Some(place) = place {
                    table.pending += 1;
                    return Some(Ok(place));
                }
            }
            if let Some(before) = before.take() {
                drop(table);
                before();
                table = self.lock();
                continue;
            }
            if table.hung_up {
                return None;
            }
            table = self.changed.wait(table).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// The memory at a place, and its name to the disk.
    pub(super) fn memory(&self, place: &Place, len: u32) -> Option<(Mem, (u32, usize))> {
        let (from, at) = match place {
            Place::Nowhere => return None,
            Place::Shared(at) => (&self.shared_memory, *at),
            Place::Own(own) => (own, 0),
        };
        let mem = Mem {
            buffer: from.mem.buffer.clone(),
            offset: from.mem.offset + at,
            len: len as usize,
        };
        Some((mem, (from.region, at)))
    }

    /// Keeps a request; returns its tag.
    pub(super) fn add(&self, request: Request) -> u64 {
        let mut table = self.lock();
        let slot = table.free.pop().unwrap_or_else(|| {
            table.slots.push(None);
            table.slots.len() as u32 - 1
        });
        table.slots[slot as usize] = Some(request);
        slot.into()
    }

    /// Takes an answered request. The first of two answers of one that is to be flushed gives
    /// `Err`: the flush is to be asked for, under the same tag.
    pub(super) fn answered(&self, tag: u64, errno: i32) -> Option<Result<Request, ()>> {
        let mut table = self.lock();
        let slot = table.slots.get_mut(usize::try_from(tag).ok()?)?;
        let request = slot.as_mut()?;
        if request.then_flush && errno == 0 {
            request.then_flush = false;
            return Some(Err(()));
        }
        let request = slot.take()?;
        table.free.push(tag as u32);
        Some(Ok(request))
    }

    /// A reply was sent, or never will be: its memory is free.
    pub(super) fn give_back(&self, place: &Place, len: u32) {
        let mut table = self.lock();
        match place {
            Place::Nowhere => {}
            Place::Shared(at) => table.stretches.give(*at, len as usize),
            Place::Own(_) => table.own_bytes -= len as usize,
        }
        table.pending -= 1;
        drop(table);
        self.changed.notify_all();
    }

    /// A request that finds no memory is not waited for any more.
    pub(super) fn hung_up(&self) {
        self.lock().hung_up = true;
        self.changed.notify_all();
    }

    /// Nobody waits for memory any more.
    pub(super) fn close(&self) {
        self.lock().closed = true;
        self.changed.notify_all();
    }

    /// Waits until every reply was sent, or the connection closed.
    pub(super) fn wait_all(&self) {
        let mut table = self.lock();
        while table.pending > 0 && !table.closed {
            table = self.changed.wait(table).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl std::fmt::Debug for Requests {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Requests").field("pending", &self.lock().pending).finish_non_exhaustive()
    }
}
