//! Requests in progress: cut into pieces, sent in slots, and completed once all pieces are
//! answered.

use std::collections::VecDeque;

use bowline_base::Instant;
use bowline_wire::rnbd::{self as wire, Io, IoFlags};
use bowline_wire::rtrs::Dir;

use super::device::{Device, Open, Phase, Seen, supports};
use super::split::first_piece_len;
use super::{DiskRequest, DoneIo, Piece, SendIo};
use crate::{Errno, IoOp};

/// A part of a request: a range that waits to be sent, or a piece that is in flight.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fragment {
    pub(super) parent: u32,
    pub(super) op: IoOp,
    offset: u64,
    len: u32,
    /// Offset of its data in the region, in bytes.
    mem_at: u64,
    /// The slot it was in flight in when its path was lost. It is sent again in the same slot: the
    /// server may still be carrying it out, and orders only requests of one slot [RS-9].
    slot: Option<u16>,
}

#[derive(Debug)]
struct Parent<D> {
    request: DiskRequest<()>,
    /// The caller's completion. `None` once the result was reported: after the last piece, or when
    /// time was up.
    done: Option<D>,
    /// Number of fragments that wait or are in flight.
    left: u32,
    errno: i32,
    /// A flush follows the data, since the server has no FUA.
    flush_after: bool,
    /// That flush was sent.
    flushed: bool,
    /// At least one piece succeeded.
    begun: bool,
    /// The server may have lost pieces that succeeded: the whole request is sent once more.
    redo: bool,
    /// Index of the device, once a piece was sent that changes stored data.
    sent_to: Option<u32>,
    /// It looks whether the server has these bytes, whatever the size of the disk: it is sent all
    /// the same, and not counted.
    is_probe: bool,
    /// A piece was sent whose change may stay in the server's cache.
    cached: bool,
    /// Number of changes of the device that were cached when it was submitted: a flush makes these
    /// durable.
    covers: u64,
    generation: u32,
    /// When it was submitted.
    since: Instant,
}

#[derive(Debug)]
pub(super) struct Queue<D> {
    /// The time of the call that is in progress.
    pub(super) now: Instant,
    parents: Vec<Option<Parent<D>>>,
    free_parents: Vec<u32>,
    slots: Vec<Option<(u32, Fragment)>>,
    free_slots: Vec<u16>,
    /// Number of slots reserved for waiting fragments.
    reserved: usize,
    /// Number of waiting fragments of all devices.
    pub(super) waiting: usize,
    /// Index of the device that may send next (round robin).
    next_device: usize,
    timeouts: VecDeque<(Instant, u32, u32)>,
    /// Device and parent of requests that change stored data and were answered because their time
    /// was up, although the server may still carry them out.
    overdue: Vec<(u32, u32)>,
    generations: u32,
    /// Memory that is zero: region and length in bytes. All pieces of requests that write from
    /// there begin at its first byte, and are no longer than it.
    pub(super) zeroes: Option<(u32, u32)>,
    pub(super) done: Vec<DoneIo<D>>,
    /// Generations of requests that were answered when their time was up and have ended now.
    pub(super) ended: Vec<u32>,
}

/// Tells whether somebody still waits for the request of a timeout.
fn is_awaited<D>(
    parents: &[Option<Parent<D>>],
    &(_, parent, generation): &(Instant, u32, u32),
) -> bool {
    let entry = parents.get(parent as usize).and_then(Option::as_ref);
    entry.is_some_and(|entry| entry.generation == generation && entry.done.is_some())
}

/// Number of timeouts that may be kept whatever the number of requests is.
const TIMEOUTS_KEPT: usize = 64;

impl<D> Queue<D> {
    pub(super) fn new(slots: u16) -> Self {
        Self {
            now: Instant::default(),
            parents: Vec::new(),
            free_parents: Vec::new(),
            slots: vec![None; usize::from(slots)],
            free_slots: (0..slots).rev().collect(),
            reserved: 0,
            waiting: 0,
            next_device: 0,
            timeouts: VecDeque::new(),
            overdue: Vec::new(),
            generations: 0,
            zeroes: None,
            done: Vec::new(),
            ended: Vec::new(),
        }
    }

    pub(super) fn in_flight(&self) -> u32 {
        let taken = self.slots.len() - self.free_slots.len() - self.reserved;
        u32::try_from(taken).unwrap_or(u32::MAX)
    }

    /// Returns the slots with a piece in flight.
    pub(super) fn slots_in_flight(&self) -> impl Iterator<Item = u16> {
        (0..).zip(&self.slots).filter_map(|(slot, taken)| taken.as_ref().map(|_| slot))
    }

    /// Answers a request that is not carried out.
    pub(super) fn refuse(&mut self, done: D, errno: i32, seen: Option<&mut Seen>) {
        if let Some(seen) = seen.filter(|_| errno != 0) {
            seen.stats.errors += 1;
        }
        self.done.push(DoneIo { done, errno, late: None });
    }

    /// Accepts a request. The caller queues the returned fragment in its device.
    pub(super) fn admit(
        &mut self,
        request: DiskRequest<D>,
        timeout: Option<Instant>,
        seen: &Seen,
    ) -> Fragment {
        let DiskRequest { op, offset, len, fua, nounmap, mem, done } = request;
        let request = DiskRequest { op, offset, len, fua, nounmap, mem, done: () };
        self.generations = self.generations.wrapping_add(1);
        let generation = self.generations;
        let entry = Parent {
            request,
            done: Some(done),
            left: 1,
            errno: 0,
            flush_after: false,
            flushed: false,
            begun: false,
            redo: false,
            sent_to: None,
            is_probe: false,
            cached: false,
            covers: seen.cached,
            generation,
            since: self.now,
        };
        let parent = match self.free_parents.pop() {
            Some(at) => {
                self.parents[at as usize] = Some(entry);
                at
            }
            None => {
                self.parents.push(Some(entry));
                u32::try_from(self.parents.len() - 1).expect("fewer requests than 2^32")
            }
        };
        if let Some(at) = timeout {
            // One request that is not answered keeps those of all others that were.
            if self.timeouts.len() >= self.timeouts_max() {
                let parents = &self.parents;
                self.timeouts.retain(|timeout| is_awaited(parents, timeout));
            }
            self.timeouts.push_back((at, parent, generation));
        }
        let mem_at = mem.map_or(0, |(_, at)| at);
        Fragment { parent, op, offset, len, mem_at, slot: None }
    }

    /// As [`admit`](Self::admit), for a read of bytes that the disk may not have.
    pub(super) fn admit_probe(
        &mut self,
        request: DiskRequest<D>,
        timeout: Option<Instant>,
        seen: &Seen,
    ) -> Fragment {
        let fragment = self.admit(request, timeout, seen);
        if let Some(Some(entry)) = self.parents.get_mut(fragment.parent as usize) {
            entry.is_probe = true;
        }
        fragment
    }

    /// Tells whether a fragment is of a probe.
    pub(super) fn is_probe(&self, fragment: &Fragment) -> bool {
        let entry = self.parents.get(fragment.parent as usize).and_then(Option::as_ref);
        entry.is_some_and(|entry| entry.is_probe)
    }

    /// Number of timeouts at which those of requests that were answered are forgotten.
    fn timeouts_max(&self) -> usize {
        2 * self.parents.len() + TIMEOUTS_KEPT
    }

    /// Counts one fragment of a request as ended. Returns the fragment that has to follow: a flush,
    /// or the whole request once more.
    pub(super) fn finish(
        &mut self,
        parent: u32,
        errno: i32,
        seen: Option<&mut Seen>,
    ) -> Option<Fragment> {
        let slot = self.parents.get_mut(parent as usize)?;
        let entry = slot.as_mut()?;
        entry.left -= 1;
        if entry.errno == 0 {
            entry.errno = errno;
        }
        entry.begun |= errno == 0;
        if entry.left > 0 {
            return None;
        }
        let continues = entry.errno == 0 && entry.done.is_some();
        if continues && std::mem::take(&mut entry.redo) {
            entry.left = 1;
            entry.begun = false;
            // Its flush may have been carried out before the loss.
            entry.flush_after |= entry.flushed;
            let DiskRequest { op, offset, len, mem, .. } = entry.request;
            let mem_at = mem.map_or(0, |(_, at)| at);
            return Some(Fragment { parent, op, offset, len, mem_at, slot: None });
        }
        if continues && std::mem::take(&mut entry.flush_after) {
            entry.left = 1;
            entry.flushed = true;
            return Some(Fragment {
                parent,
                op: IoOp::Flush,
                offset: 0,
                len: 0,
                mem_at: 0,
                slot: None,
            });
        }
        let entry = slot.take()?;
        self.free_parents.push(parent);
        self.overdue.retain(|(_, overdue)| *overdue != parent);
        if let Some(seen) = seen.filter(|_| !entry.is_probe) {
            if entry.errno == 0 {
                seen.took(entry.request.op, self.now.saturating_since(entry.since));
                seen.cached += u64::from(entry.cached);
                if entry.request.op == IoOp::Flush {
                    seen.flushed = seen.flushed.max(entry.covers);
                }
            }
            count(&mut seen.stats, &entry.request, entry.errno);
        }
        match entry.done {
            Some(done) => self.done.push(DoneIo { done, errno: entry.errno, late: None }),
            None => self.ended.push(entry.generation),
        }
        None
    }

    /// Frees a slot; returns its device and fragment.
    pub(super) fn free_slot(&mut self, slot: u16) -> Option<(u32, Fragment)> {
        let taken = self.slots.get_mut(usize::from(slot))?.take()?;
        self.free_slots.push(slot);
        Some(taken)
    }

    /// Reserves the slot that was just freed for a fragment that has to be sent again.
    pub(super) fn reserve_slot(&mut self, fragment: Fragment, slot: u16) -> Fragment {
        if self.free_slots.last() != Some(&slot) {
            return fragment;
        }
        self.free_slots.pop();
        self.reserved += 1;
        Fragment { slot: Some(slot), ..fragment }
    }

    /// Frees the slot that was reserved for a fragment.
    pub(super) fn unreserve_slot(&mut self, fragment: &Fragment) {
        if let Some(slot) = fragment.slot {
            self.reserved -= 1;
            self.free_slots.push(slot);
        }
    }

    /// Tells whether a waiting fragment is still wanted, or has to be sent all the same.
    pub(super) fn must_stay(&self, fragment: &Fragment, wanted: impl Fn(&D, IoOp) -> bool) -> bool {
        let entry = self.parents.get(fragment.parent as usize).and_then(Option::as_ref);
        // A request that was answered because its time was up has no requester any more.
        let requester = entry.and_then(|entry| Some((entry.done.as_ref()?, entry.request.op)));
        fragment.slot.is_some() && fragment.op.changes()
            || requester.is_none_or(|(of, op)| wanted(of, op))
    }

    /// Takes a reserved slot away from a device that is not open, when there is no other slot.
    fn steal_reserved_slot(&mut self, devices: &mut [Option<Device>]) {
        let closed = devices.iter_mut().flatten().filter(|d| !d.is_open());
        let reserved = closed.flat_map(|d| d.waiting.iter_mut().rev());
        if let Some(fragment) = reserved.into_iter().find(|fragment| fragment.slot.is_some()) {
            let slot = fragment.slot.take();
            self.reserved -= 1;
            self.free_slots.extend(slot);
        }
    }

    /// Marks writes of a device to be replayed as a whole if a part of them succeeded: the server
    /// may have lost what it had not flushed, and the next flush must make all of it durable.
    /// Writes in flight are marked too, since an answer may have arrived that was not delivered
    /// here yet.
    pub(super) fn replay_unflushed(
        &mut self,
        index: u32,
        waiting: &VecDeque<Fragment>,
        also: Option<u32>,
    ) {
        let sent = self.slots.iter().flatten().filter(|(of, _)| *of == index);
        let sent = sent.map(|(_, fragment)| (fragment.parent, true));
        let others = waiting.iter().map(|fragment| fragment.parent).chain(also);
        for (parent, sent) in sent.chain(others.map(|parent| (parent, false))) {
            let entry = self.parents.get_mut(parent as usize).and_then(Option::as_mut);
            let Some(entry) = entry.filter(|entry| entry.begun || sent) else { continue };
            entry.redo |= matches!(entry.request.op, IoOp::Write | IoOp::WriteZeroes);
        }
    }

    /// Fills the free slots, round robin over all open devices.
    pub(super) fn pump(&mut self, devices: &mut [Option<Device>], into: &mut Vec<SendIo>) {
        let count = devices.len();
        let mut idle = 0;
        while idle < count && self.waiting > 0 {
            if self.free_slots.is_empty() && self.reserved > 0 && wants_slot(devices) {
                self.steal_reserved_slot(devices);
            }
            if self.free_slots.is_empty() && self.reserved == 0 {
                break;
            }
            let index = self.next_device % count;
            self.next_device = index + 1;
            let device = devices[index].as_mut().filter(|d| d.is_open());
            let sent = device.and_then(|device| {
                let index = u32::try_from(index).ok()?;
                self.next_send(index, device)
            });
            match sent {
                Some(io) => {
                    idle = 0;
                    into.push(io);
                }
                None => idle += 1,
            }
        }
    }

    fn next_send(&mut self, index: u32, device: &mut Device) -> Option<SendIo> {
        let Phase::Open(Open { wire_id, limits }) = &device.phase else { return None };
        loop {
            // An overdue request must not overwrite a newer one: a change of the same bytes waits,
            // and other requests pass it. An overdue request itself waits for nothing.
            let blocked = |fragment: &Fragment| {
                let entry = self.parents.get(fragment.parent as usize).and_then(Option::as_ref);
                fragment.op.changes()
                    && entry.is_some_and(|entry| entry.done.is_some())
                    && self.overdue.iter().any(|of| self.overlaps(*of, index, fragment))
            };
            let at = match self.overdue.is_empty() {
                true => 0,
                false => device.waiting.iter().position(|fragment| !blocked(fragment))?,
            };
            let fragment = device.waiting.get_mut(at)?;
            let entry = self.parents[fragment.parent as usize].as_ref()?;
            let (over, is_probe) = (entry.done.is_none(), entry.is_probe);
            // One that the server may be at still goes out again, so that others wait for its end.
            let errno = match fragment.op {
                // Its time was up before it could be sent.
                _ if over && fragment.slot.is_none() => Some(0),
                IoOp::Flush => None,
                // The disk has changed since the request was submitted [NB-55].
                op if !supports(limits, op) => Some(Errno::EOPNOTSUPP.neg()),
                _ if is_probe => None,
                _ if !limits.holds(fragment.offset, fragment.len.into()) => Some(Errno::EIO.neg()),
                _ => None,
            };
            if let Some(errno) = errno {
                let (parent, fragment) = (fragment.parent, *fragment);
                device.waiting.remove(at);
                self.waiting -= 1;
                self.unreserve_slot(&fragment);
                self.finish(parent, errno, Some(&mut device.seen));
                continue;
            }
            let entry = self.parents[fragment.parent as usize].as_mut()?;
            let reserved = fragment.slot.take();
            let slot = reserved.or_else(|| self.free_slots.last().copied())?;
            let request = entry.request;
            let from = request.mem.map(|(region, _)| region);
            let zeroes = self.zeroes.filter(|(region, _)| from == Some(*region));
            let most = zeroes.map_or(fragment.len, |(_, len)| len.min(fragment.len));
            let len = first_piece_len(limits, fragment.op, fragment.offset, most);
            let piece = Fragment { len, ..*fragment };
            if len < fragment.len {
                entry.left += 1;
                fragment.offset += u64::from(len);
                fragment.mem_at += u64::from(len);
                fragment.len -= len;
            } else {
                device.waiting.remove(at);
                self.waiting -= 1;
            }
            if piece.op.changes() {
                entry.sent_to = Some(index);
            }
            match reserved {
                Some(_) => self.reserved -= 1,
                None => _ = self.free_slots.pop(),
            }
            self.slots[usize::from(slot)] = Some((index, piece));
            device.in_flight += 1;
            // Decided by the server's present limits, which may have changed since the request was
            // submitted.
            let durable = limits.write_cache && (request.fua || device.write_through);
            entry.cached |= limits.write_cache && !durable && piece.op.changes();
            let fua = durable && limits.fua;
            entry.flush_after |= durable && piece.op.changes() && !(fua && piece.op == IoOp::Write);
            let io = message(*wire_id, &piece, fua, request.nounmap);
            let dir = match piece.op {
                IoOp::Read | IoOp::Flush => Dir::Read,
                _ => Dir::Write,
            };
            let data = from.filter(|_| piece.op.has_data());
            let offset = if zeroes.is_some() { 0 } else { piece.mem_at };
            let data = data.map(|region| Piece { region, offset, len });
            return Some(SendIo { slot, dir, usr: io.emit(), data });
        }
    }

    /// Tells whether a request of a device and a fragment touch the same bytes.
    fn overlaps(&self, (device, parent): (u32, u32), index: u32, fragment: &Fragment) -> bool {
        let entry = self.parents.get(parent as usize).and_then(Option::as_ref);
        entry.filter(|_| device == index).is_some_and(|Parent { request: of, .. }| {
            of.offset < fragment.offset + u64::from(fragment.len)
                && fragment.offset < of.offset + u64::from(of.len)
        })
    }

    pub(super) fn next_timeout(&self) -> Option<Instant> {
        self.timeouts.front().map(|&(at, ..)| at)
    }

    /// Answers requests whose time is up. Their pieces stay in flight; later requests that change
    /// the same bytes wait for their end.
    pub(super) fn time_out(&mut self, now: Instant) {
        while let Some(&(at, parent, generation)) = self.timeouts.front().filter(|t| t.0 <= now) {
            self.timeouts.pop_front();
            debug_assert!(at <= now, "in order, since all wait equally long");
            let entry = self.parents.get_mut(parent as usize).and_then(Option::as_mut);
            let Some(entry) = entry.filter(|entry| entry.generation == generation) else {
                continue;
            };
            let Some(done) = entry.done.take() else { continue };
            // Counted as an error when the last piece is back.
            entry.errno = Errno::ETIMEDOUT.neg();
            self.overdue.extend(entry.sent_to.map(|device| (device, parent)));
            let errno = Errno::ETIMEDOUT.neg();
            self.done.push(DoneIo { done, errno, late: Some(generation) });
        }
        // Requests that were answered in time need no entry.
        while self.timeouts.front().is_some_and(|timeout| !is_awaited(&self.parents, timeout)) {
            self.timeouts.pop_front();
        }
    }

    pub(super) fn check_invariants(&self, devices: &[Option<Device>]) {
        assert!(self.timeouts.len() <= self.timeouts_max(), "timeouts of requests long answered");
        let mut left = vec![0; self.parents.len()];
        for fragment in devices.iter().flatten().flat_map(|device| &device.waiting) {
            left[fragment.parent as usize] += 1;
        }
        for (_, fragment) in self.slots.iter().flatten() {
            left[fragment.parent as usize] += 1;
        }
        for (at, parent) in self.parents.iter().enumerate() {
            let counted = parent.as_ref().map_or(0, |parent| parent.left);
            assert_eq!(left[at], counted, "what is left of request {at}");
        }
        let taken = self.slots.iter().flatten().count();
        let reserved = devices.iter().flatten().flat_map(|device| &device.waiting);
        let reserved: Vec<u16> = reserved.filter_map(|fragment| fragment.slot).collect();
        assert_eq!(reserved.len(), self.reserved, "slots that are reserved");
        assert_eq!(taken + reserved.len() + self.free_slots.len(), self.slots.len(), "slots");
        for slot in reserved {
            let used = self.slots[usize::from(slot)].is_some() || self.free_slots.contains(&slot);
            assert!(!used, "slot {slot} is reserved");
        }
    }
}

fn message(device: u32, piece: &Fragment, fua: bool, nounmap: bool) -> Io {
    // As kernel clients set them [NB-12] [NB-13].
    let (op, flags) = match piece.op {
        IoOp::Read => (wire::OP_READ, IoFlags::SYNC),
        IoOp::Write if fua => (wire::OP_WRITE, IoFlags::SYNC | IoFlags::FUA),
        IoOp::Write => (wire::OP_WRITE, IoFlags::SYNC),
        IoOp::Flush => (wire::OP_FLUSH, IoFlags::SYNC | IoFlags::FUA),
        IoOp::Discard => (wire::OP_DISCARD, IoFlags::SYNC),
        IoOp::SecureErase => (wire::OP_SECURE_ERASE, IoFlags::SYNC),
        IoOp::WriteZeroes if nounmap => (wire::OP_WRITE_ZEROES, IoFlags::SYNC | IoFlags::NOUNMAP),
        IoOp::WriteZeroes => (wire::OP_WRITE_ZEROES, IoFlags::SYNC),
    };
    let sector = if piece.op == IoOp::Flush { u64::MAX } else { piece.offset / 512 };
    Io { device, sector, op, flags, len: piece.len, prio: 0 }
}

fn count(stats: &mut super::DiskStats, request: &DiskRequest<()>, errno: i32) {
    let bytes = u64::from(request.len);
    let (requests, total) = match request.op {
        _ if errno != 0 => {
            stats.errors += 1;
            return;
        }
        IoOp::Flush => {
            stats.flushes += 1;
            return;
        }
        IoOp::Read => (&mut stats.reads, &mut stats.read_bytes),
        IoOp::Write => (&mut stats.writes, &mut stats.written_bytes),
        IoOp::Discard | IoOp::SecureErase | IoOp::WriteZeroes => {
            (&mut stats.discards, &mut stats.discarded_bytes)
        }
    };
    *requests += 1;
    *total += bytes;
}

/// Tells whether a fragment waits for nothing but a slot.
fn wants_slot(devices: &[Option<Device>]) -> bool {
    let open = devices.iter().flatten().filter(|device| device.is_open());
    open.filter_map(|device| device.waiting.front()).any(|fragment| fragment.slot.is_none())
}
