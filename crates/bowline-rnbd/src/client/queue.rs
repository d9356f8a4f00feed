//! Requests on their way: cut into pieces, in slots, and put together again.

use std::collections::VecDeque;

use bowline_base::Instant;
use bowline_wire::rnbd::{self as wire, Io, IoFlags};
use bowline_wire::rtrs::Dir;

use super::device::{Device, supports};
use super::split::first_piece;
use super::{DiskRequest, DiskStats, DoneIo, Piece, SendIo, State};
use crate::{Errno, IoOp};

/// A range of a request that is not at the server, or one piece of it that is.
#[derive(Clone, Copy, Debug)]
pub(super) struct Work {
    pub(super) parent: u32,
    op: IoOp,
    offset: u64,
    len: u32,
    /// From which byte of the region on.
    mem_at: u64,
    /// It was under way in this slot when the session was lost, and goes out again in the same: the
    /// server may be at it still, and lets only requests of one slot wait for each other [RS-9].
    slot: Option<u16>,
}

#[derive(Debug)]
struct Parent<D> {
    request: DiskRequest<()>,
    /// Taken when the result was told: once nothing is left to do, or when time was up.
    done: Option<D>,
    /// Works that wait and pieces that are under way.
    left: u32,
    errno: i32,
    /// A flush follows the data, since the server has no FUA.
    flush_after: bool,
    /// That flush was sent.
    flushed: bool,
    /// A part of it was carried out.
    begun: bool,
    /// The server may have lost that part: all of it is done once more.
    redo: bool,
    /// The device, if a piece of it that changes what is stored was ever sent.
    sent_to: Option<u32>,
    life: u32,
}

#[derive(Debug)]
pub(super) struct Queue<D> {
    parents: Vec<Option<Parent<D>>>,
    free_parents: Vec<u32>,
    slots: Vec<Option<(u32, Work)>>,
    free_slots: Vec<u16>,
    /// Slots kept for works that wait.
    kept: usize,
    /// Works that wait in all devices.
    pub(super) waiting: usize,
    /// The device whose turn it is.
    turn: usize,
    timeouts: VecDeque<(Instant, u32, u32)>,
    /// Requests that change what is stored, answered since time was up, though the server may carry
    /// them out still; and their devices.
    overdue: Vec<(u32, u32)>,
    lives: u32,
    /// Memory that is zero: region and bytes. Pieces of requests that write from there all begin at
    /// its first byte, and are no longer than it.
    pub(super) zeroes: Option<(u32, u32)>,
    pub(super) done: Vec<DoneIo<D>>,
    /// Requests that are over, of those that were answered late.
    pub(super) ended: Vec<u32>,
}

impl<D> Queue<D> {
    pub(super) fn new(slots: u16) -> Self {
        Self {
            parents: Vec::new(),
            free_parents: Vec::new(),
            slots: vec![None; usize::from(slots)],
            free_slots: (0..slots).rev().collect(),
            kept: 0,
            waiting: 0,
            turn: 0,
            timeouts: VecDeque::new(),
            overdue: Vec::new(),
            lives: 0,
            zeroes: None,
            done: Vec::new(),
            ended: Vec::new(),
        }
    }

    pub(super) fn in_flight(&self) -> u32 {
        let taken = self.slots.len() - self.free_slots.len() - self.kept;
        u32::try_from(taken).unwrap_or(u32::MAX)
    }

    /// The slots of what is under way.
    pub(super) fn flying(&self) -> impl Iterator<Item = u16> {
        (0..).zip(&self.slots).filter_map(|(slot, taken)| taken.as_ref().map(|_| slot))
    }

    /// Answers a request that is not carried out.
    pub(super) fn refuse(&mut self, done: D, errno: i32, stats: Option<&mut DiskStats>) {
        if let Some(stats) = stats.filter(|_| errno != 0) {
            stats.errors += 1;
        }
        self.done.push(DoneIo { done, errno, late: None });
    }

    /// Takes a request in; the work returned has to wait in its device.
    pub(super) fn admit(&mut self, request: DiskRequest<D>, timeout: Option<Instant>) -> Work {
        let DiskRequest { op, offset, len, fua, nounmap, mem, done } = request;
        let request = DiskRequest { op, offset, len, fua, nounmap, mem, done: () };
        self.lives = self.lives.wrapping_add(1);
        let life = self.lives;
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
            life,
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
            self.timeouts.push_back((at, parent, life));
        }
        let mem_at = mem.map_or(0, |(_, at)| at);
        Work { parent, op, offset, len, mem_at, slot: None }
    }

    /// Counts one work or piece of a request as over. Returns what has to follow: a flush, or all
    /// of it once more.
    pub(super) fn finish(
        &mut self,
        parent: u32,
        errno: i32,
        stats: Option<&mut DiskStats>,
    ) -> Option<Work> {
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
        let goes_on = entry.errno == 0 && entry.done.is_some();
        if goes_on && std::mem::take(&mut entry.redo) {
            entry.left = 1;
            entry.begun = false;
            // The flush that it had may have been before the loss.
            entry.flush_after |= entry.flushed;
            let DiskRequest { op, offset, len, mem, .. } = entry.request;
            let mem_at = mem.map_or(0, |(_, at)| at);
            return Some(Work { parent, op, offset, len, mem_at, slot: None });
        }
        if goes_on && std::mem::take(&mut entry.flush_after) {
            entry.left = 1;
            entry.flushed = true;
            return Some(Work {
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
        if let Some(stats) = stats {
            count(stats, &entry.request, entry.errno);
        }
        match entry.done {
            Some(done) => self.done.push(DoneIo { done, errno: entry.errno, late: None }),
            None => self.ended.push(entry.life),
        }
        None
    }

    /// Frees a slot; returns its device and work.
    pub(super) fn free(&mut self, slot: u16) -> Option<(u32, Work)> {
        let taken = self.slots.get_mut(usize::from(slot))?.take()?;
        self.free_slots.push(slot);
        Some(taken)
    }

    /// Keeps the slot that was just freed for a work that has to go out again.
    pub(super) fn keep(&mut self, work: Work, slot: u16) -> Work {
        if self.free_slots.last() != Some(&slot) {
            return work;
        }
        self.free_slots.pop();
        self.kept += 1;
        Work { slot: Some(slot), ..work }
    }

    /// Frees the slot that was kept for a work.
    pub(super) fn unkeep(&mut self, work: &Work) {
        if let Some(slot) = work.slot {
            self.kept -= 1;
            self.free_slots.push(slot);
        }
    }

    /// Tells whether a work that waits is wanted, or has to go on all the same.
    pub(super) fn stays(&self, work: &Work, wanted: impl Fn(&D, IoOp) -> bool) -> bool {
        let entry = self.parents.get(work.parent as usize).and_then(Option::as_ref);
        // What was answered because its time was up has nobody who asks.
        let asks = entry.and_then(|entry| Some((entry.done.as_ref()?, entry.request.op)));
        work.slot.is_some() && work.op.changes() || asks.is_none_or(|(of, op)| wanted(of, op))
    }

    /// Takes a slot that is kept for a device nothing can be sent to, when there is no other.
    fn take_kept(&mut self, devices: &mut [Option<Device>]) {
        let closed = devices.iter_mut().flatten().filter(|d| d.state != State::Open);
        let kept = closed.flat_map(|d| d.waiting.iter_mut().rev());
        if let Some(work) = kept.into_iter().find(|work| work.slot.is_some()) {
            let slot = work.slot.take();
            self.kept -= 1;
            self.free_slots.extend(slot);
        }
    }

    /// The server may have lost what it has not flushed of these requests of a device: those of
    /// which a part is done are to be done again as a whole, so that what a flush makes durable is
    /// all of them. Of what is under way the answer of a part may have come already and not be told
    /// here yet.
    pub(super) fn shake(&mut self, index: u32, waiting: &VecDeque<Work>, also: Option<u32>) {
        let flying = self.slots.iter().flatten().filter(|(of, _)| *of == index);
        let flying = flying.map(|(_, work)| (work.parent, true));
        let others = waiting.iter().map(|work| work.parent).chain(also);
        for (parent, flies) in flying.chain(others.map(|parent| (parent, false))) {
            let entry = self.parents.get_mut(parent as usize).and_then(Option::as_mut);
            let Some(entry) = entry.filter(|entry| entry.begun || flies) else { continue };
            entry.redo |= matches!(entry.request.op, IoOp::Write | IoOp::WriteZeroes);
        }
    }

    /// Fills the free slots, by turns from all devices that are open.
    pub(super) fn pump(&mut self, devices: &mut [Option<Device>], into: &mut Vec<SendIo>) {
        let count = devices.len();
        let mut idle = 0;
        while idle < count && self.waiting > 0 {
            if self.free_slots.is_empty() && self.kept > 0 && wants_slot(devices) {
                self.take_kept(devices);
            }
            if self.free_slots.is_empty() && self.kept == 0 {
                break;
            }
            let index = self.turn % count;
            self.turn = index + 1;
            let device = devices[index].as_mut().filter(|d| d.state == State::Open);
            let sent = device.and_then(|device| {
                let index = u32::try_from(index).ok()?;
                self.send_one(index, device)
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

    fn send_one(&mut self, index: u32, device: &mut Device) -> Option<SendIo> {
        let limits = device.limits.as_ref()?;
        loop {
            // What is newer must not be overwritten by what is overdue: it waits, and others pass
            // it. What is overdue itself waits for nothing.
            let late = |work: &Work| {
                let entry = self.parents.get(work.parent as usize).and_then(Option::as_ref);
                work.op.changes()
                    && entry.is_some_and(|entry| entry.done.is_some())
                    && self.overdue.iter().any(|of| self.overlaps(*of, index, work))
            };
            let at = match self.overdue.is_empty() {
                true => 0,
                false => device.waiting.iter().position(|work| !late(work))?,
            };
            let work = device.waiting.get_mut(at)?;
            let over = self.parents[work.parent as usize].as_ref()?.done.is_none();
            // One that the server may be at still goes out again, so that others wait for its end.
            let errno = match work.op {
                // Time was up before it could go out.
                _ if over && work.slot.is_none() => Some(0),
                IoOp::Flush => None,
                // The disk came back as another than it was when the request came [NB-55].
                op if !supports(limits, op) => Some(Errno::EOPNOTSUPP.neg()),
                _ if !limits.holds(work.offset, work.len.into()) => Some(Errno::EIO.neg()),
                _ => None,
            };
            if let Some(errno) = errno {
                let (parent, work) = (work.parent, *work);
                device.waiting.remove(at);
                self.waiting -= 1;
                self.unkeep(&work);
                self.finish(parent, errno, Some(&mut device.stats));
                continue;
            }
            let entry = self.parents[work.parent as usize].as_mut()?;
            let kept = work.slot.take();
            let slot = kept.or_else(|| self.free_slots.last().copied())?;
            let request = entry.request;
            let from = request.mem.map(|(region, _)| region);
            let zeroes = self.zeroes.filter(|(region, _)| from == Some(*region));
            let most = zeroes.map_or(work.len, |(_, len)| len.min(work.len));
            let len = first_piece(limits, work.op, work.offset, most);
            let piece = Work { len, ..*work };
            if len < work.len {
                entry.left += 1;
                work.offset += u64::from(len);
                work.mem_at += u64::from(len);
                work.len -= len;
            } else {
                device.waiting.remove(at);
                self.waiting -= 1;
            }
            if piece.op.changes() {
                entry.sent_to = Some(index);
            }
            match kept {
                Some(_) => self.kept -= 1,
                None => _ = self.free_slots.pop(),
            }
            self.slots[usize::from(slot)] = Some((index, piece));
            device.in_flight += 1;
            // Judged by what the server has now, which may be another than when the request came.
            let durable = limits.write_cache && (request.fua || device.write_through);
            let fua = durable && limits.fua;
            entry.flush_after |= durable && piece.op.changes() && !(fua && piece.op == IoOp::Write);
            let io = message(device.wire_id, &piece, fua, request.nounmap);
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

    /// Tells whether a request of a device, and a work, are of the same bytes.
    fn overlaps(&self, (device, parent): (u32, u32), index: u32, work: &Work) -> bool {
        let entry = self.parents.get(parent as usize).and_then(Option::as_ref);
        entry.filter(|_| device == index).is_some_and(|Parent { request: of, .. }| {
            of.offset < work.offset + u64::from(work.len)
                && work.offset < of.offset + u64::from(of.len)
        })
    }

    pub(super) fn next_timeout(&self) -> Option<Instant> {
        self.timeouts.front().map(|&(at, ..)| at)
    }

    /// Answers requests that take too long. What is at the server stays there, and later requests
    /// that change the same bytes wait for its end.
    pub(super) fn time_out(&mut self, now: Instant) {
        while let Some(&(at, parent, life)) = self.timeouts.front().filter(|t| t.0 <= now) {
            self.timeouts.pop_front();
            debug_assert!(at <= now, "in order, since all wait equally long");
            let entry = self.parents.get_mut(parent as usize).and_then(Option::as_mut);
            let Some(entry) = entry.filter(|entry| entry.life == life) else { continue };
            let Some(done) = entry.done.take() else { continue };
            // Counted as an error when the last piece is back.
            entry.errno = Errno::ETIMEDOUT.neg();
            self.overdue.extend(entry.sent_to.map(|device| (device, parent)));
            let errno = Errno::ETIMEDOUT.neg();
            self.done.push(DoneIo { done, errno, late: Some(life) });
        }
        // Those that were answered in time need no entry.
        while let Some(&(_, parent, life)) = self.timeouts.front() {
            let entry = self.parents.get(parent as usize).and_then(Option::as_ref);
            if entry.is_some_and(|entry| entry.life == life && entry.done.is_some()) {
                break;
            }
            self.timeouts.pop_front();
        }
    }

    pub(super) fn check_invariants(&self, devices: &[Option<Device>]) {
        let mut left = vec![0; self.parents.len()];
        for work in devices.iter().flatten().flat_map(|device| &device.waiting) {
            left[work.parent as usize] += 1;
        }
        for (_, work) in self.slots.iter().flatten() {
            left[work.parent as usize] += 1;
        }
        for (at, parent) in self.parents.iter().enumerate() {
            let counted = parent.as_ref().map_or(0, |parent| parent.left);
            assert_eq!(left[at], counted, "what is left of request {at}");
        }
        let taken = self.slots.iter().flatten().count();
        let kept = devices.iter().flatten().flat_map(|device| &device.waiting);
        let kept: Vec<u16> = kept.filter_map(|work| work.slot).collect();
        assert_eq!(kept.len(), self.kept, "slots that are kept");
        assert_eq!(taken + kept.len() + self.free_slots.len(), self.slots.len(), "slots");
        for slot in kept {
            let used = self.slots[usize::from(slot)].is_some() || self.free_slots.contains(&slot);
            assert!(!used, "slot {slot} is kept");
        }
    }
}

fn message(device: u32, piece: &Work, fua: bool, nounmap: bool) -> Io {
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

fn count(stats: &mut DiskStats, request: &DiskRequest<()>, errno: i32) {
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

/// Tells whether something could be sent if there was a slot for it.
fn wants_slot(devices: &[Option<Device>]) -> bool {
    let open = devices.iter().flatten().filter(|device| device.state == State::Open);
    open.filter_map(|device| device.waiting.front()).any(|work| work.slot.is_none())
}
