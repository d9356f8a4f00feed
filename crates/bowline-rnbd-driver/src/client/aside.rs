//! The memory of requests whose time may run out.
//!
//! A request that was answered because its time was up is still with the server, which may read or
//! write its memory at any time; the program uses that for something else by then. So the data of
//! such requests goes by memory of its own, at the price of a copy. What was late is not used
//! again: the link keeps it until the request is over, and it is then given back.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use bowline_block::{DiskDone, DiskIo};
use bowline_rnbd::{Errno, IoOp};
use bowline_rtrs_driver::client::{Region, Session};
use bowline_verbs::{Buffer, contain};

/// Bytes of memory kept for later requests.
const SPARE_BYTES: usize = 16 << 20;

/// Memory for the requests of one disk.
pub(super) struct Aside {
    session: Arc<Session>,
    /// What the program may name in its requests.
    named: Mutex<Vec<(u32, Weak<Buffer>)>>,
    spare: Mutex<Vec<Region>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Aside {
    pub(super) fn new(session: &Arc<Session>) -> Arc<Self> {
        let (named, spare) = (Mutex::default(), Mutex::default());
        Arc::new(Self { session: Arc::clone(session), named, spare })
    }

    /// From now on requests may name this memory.
    pub(super) fn name(&self, id: u32, buffer: &Arc<Buffer>) {
        let mut named = lock(&self.named);
        // Numbers are used again.
        named.retain(|(known, buffer)| *known != id && buffer.strong_count() > 0);
        named.push((id, Arc::downgrade(buffer)));
    }

    /// Sends the data of a request by memory of its own. One that cannot be sent is answered.
    pub(super) fn lead(self: &Arc<Self>, io: DiskIo) -> Option<DiskIo> {
        let Some((id, at)) = io.mem.filter(|_| io.op.has_data() && io.len > 0) else {
            return Some(io);
        };
        let (to, tag, len) = (Arc::clone(&io.done), io.tag, io.len as usize);
        match self.copied(&io, id, at, len) {
            Ok((theirs, region)) => {
                let mem = Some((region.id().0, 0));
                let theirs = (io.op == IoOp::Read).then_some((theirs, at));
                let region = Mutex::new(Some(region));
                let detour = Detour { aside: Arc::clone(self), region, theirs, len, tag, to };
                Some(DiskIo { mem, tag: 0, done: Arc::new(detour), ..io })
            }
            Err(errno) => {
                contain(|| to.done(&[(tag, errno.neg())]));
                None
            }
        }
    }

    /// Finds memory for a request, and copies what it writes.
    fn copied(
        &self,
        io: &DiskIo,
        id: u32,
        at: usize,
        len: usize,
    ) -> Result<(Arc<Buffer>, Region), Errno> {
        let theirs = lock(&self.named).iter().find(|(named, _)| *named == id).cloned();
        let theirs = theirs.and_then(|(_, buffer)| buffer.upgrade()).ok_or(Errno::EINVAL)?;
        if at.checked_add(len).is_none_or(|end| end > theirs.len()) {
            return Err(Errno::EINVAL);
        }
        let region = self.region(len)?;
        if io.op == IoOp::Write {
            theirs.copy_to(at, region.buffer(), 0, len);
        }
        Ok((theirs, region))
    }

    fn region(&self, len: usize) -> Result<Region, Errno> {
        let mut spare = lock(&self.spare);
        if let Some(at) = spare.iter().position(|region| region.buffer().len() >= len) {
            return Ok(spare.swap_remove(at));
        }
        drop(spare);
        let made = self.session.region(len.next_power_of_two());
        made.map_err(|error| error.errno())
    }

    fn keep(&self, region: Region) {
        let mut spare = lock(&self.spare);
        let kept: usize = spare.iter().map(|region| region.buffer().len()).sum();
        if kept + region.buffer().len() <= SPARE_BYTES {
            spare.push(region);
        }
    }
}

/// One request on its way.
struct Detour {
    aside: Arc<Aside>,
    region: Mutex<Option<Region>>,
    /// Where the program wants what is read.
    theirs: Option<(Arc<Buffer>, usize)>,
    len: usize,
    tag: u64,
    to: Arc<dyn DiskDone>,
}

impl DiskDone for Detour {
    fn done(&self, results: &[(u64, i32)]) {
        let Some((_, errno)) = results.first() else { return };
        // That of a late one stays here: the server may be at it still.
        let is_over = *errno != Errno::ETIMEDOUT.neg();
        if let Some(region) = lock(&self.region).take_if(|_| is_over) {
            if let Some((buffer, at)) = self.theirs.as_ref().filter(|_| *errno == 0) {
                region.buffer().copy_to(0, buffer, *at, self.len);
            }
            self.aside.keep(region);
        }
        self.to.done(&[(self.tag, *errno)]);
    }

    fn is_wanted(&self, op: IoOp) -> bool {
        self.to.is_wanted(op)
    }
}
