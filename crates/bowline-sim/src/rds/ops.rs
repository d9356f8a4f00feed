//! RDMA operations of a run: memory that sockets announce, the operations of their peers, and the
//! judge of both.
//!
//! Each operation has a number, which its local addresses and its token name. The NICs report every
//! request that is posted, carried out or answered. Memory of a region:
//!
//! ```text
//!   0           8              16                     cookie: key, and the address of byte 0
//!   +-----------+--------------+----------------+
//!   | fetch-add | compare-swap | reads, writes  |
//!   +-----------+--------------+----------------+
//! ```

use std::any::Any;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Arc, Weak};

use bowline_rds::{RdmaAccess, RdmaHold, RdmaOp, RdmaPiece, RdmaStatus, RdmaWork};
use serde::{Deserialize, Serialize};

use super::ctx::Ctx;
use super::oracle::MessageId;
use super::rdma::QpId;
use crate::engine::rng::Rng;

use self::contents::{Contents, Home};

mod contents;

/// Key of the first region.
const FIRST_KEY: u32 = 0x100;
/// Bytes of local addresses that belong to one operation.
const LOCAL_BITS: u32 = 24;
/// Bytes of a region before those for reads and writes.
const HEAD: usize = 16;
/// Most regions of a socket that are in use at a time.
const REGIONS_MAX: usize = 4;

/// What users do with RDMA operations, in a thousand each.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct OpsPlan {
    /// Messages that announce memory.
    pub(crate) announce: u64,
    /// Messages that have operations, if their sender knows of memory.
    pub(crate) share: u64,
    /// Regions for one use.
    pub(crate) once: u64,
    /// Messages before which memory is taken back.
    pub(crate) free: u64,
    /// Operations with a key or range that is wrong.
    pub(crate) bad: u64,
    pub(crate) notify: u64,
    pub(crate) recverr: u64,
    pub(crate) silent: u64,
    pub(crate) fence: u64,
    /// Requests at which the connection breaks.
    pub(crate) breaks: u64,
    /// Requests that the device does not take.
    pub(crate) refuse: u64,
    /// Longest region in bytes.
    pub(crate) size_max: usize,
}

impl OpsPlan {
    pub(crate) fn draw(rng: &mut Rng) -> Self {
        Self {
            announce: rng.pick(&[50, 200, 500]),
            share: rng.pick(&[100, 500, 900]),
            once: rng.pick(&[0, 300, 1000]),
            free: rng.pick(&[0, 0, 30, 200]),
            bad: rng.pick(&[0, 0, 5, 40]),
            notify: rng.pick(&[1000, 1000, 600]),
            recverr: rng.pick(&[0, 500, 1000]),
            silent: rng.pick(&[0, 200, 700]),
            fence: rng.pick(&[0, 300, 1000]),
            breaks: rng.pick(&[0, 5, 40, 40]),
            refuse: rng.pick(&[0, 0, 10, 40]),
            size_max: rng.magnitude(32, 64 << 10) as usize,
        }
    }
}

/// A request of an operation on its way.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Work {
    /// Number of the operation.
    pub(crate) op: usize,
    /// Place of its first byte in the operation's local memory.
    at: u64,
    len: u64,
    access: RdmaAccess,
    remote: u64,
    rkey: u32,
    whole: bool,
}

impl Work {
    pub(crate) fn new(work: &RdmaWork<'_>) -> Self {
        let first = work.local.first().copied().unwrap_or_default();
        let mut next = first.addr;
        let mut whole = !work.local.is_empty();
        for piece in work.local {
            whole &= piece.addr == next;
            next += u64::from(piece.len);
        }
        Self {
            op: (first.addr >> LOCAL_BITS) as usize,
            at: first.addr & ((1 << LOCAL_BITS) - 1),
            len: next - first.addr,
            access: work.access,
            remote: work.remote,
            rkey: work.rkey,
            whole,
        }
    }

    /// Tells whether the peer answers with data.
    pub(crate) fn reads(&self) -> bool {
        self.access != RdmaAccess::Write
    }

    /// Tells whether a part of it can be carried out.
    pub(crate) const fn is_divisible(&self) -> bool {
        !self.access.is_atomic() && self.len > 1
    }
}

#[derive(Debug)]
struct Region {
    slot: usize,
    base: u64,
    contents: Contents,
    once: bool,
    /// NICs let peers use it.
    live: bool,
    /// Its user took it back, or closed the socket.
    freed: bool,
    /// Its process has ended.
    dead: bool,
    /// Its node refuses it to peers since it was used, and releases it later.
    used: bool,
    releases: u32,
    /// Fetch-adds that were carried out.
    adds: u64,
    /// What fetch-adds have brought home: each number once.
    counts: BTreeSet<u64>,
}

impl Region {
    /// Returns the place of a range of addresses, if all of it is inside.
    fn range(&self, remote: u64, len: u64) -> Option<(usize, usize)> {
        let from = usize::try_from(remote.checked_sub(self.base)?).ok()?;
        let to = from.checked_add(usize::try_from(len).ok()?)?;
        (to <= self.contents.len()).then_some((from, to))
    }
}

#[derive(Debug)]
struct Op {
    slot: usize,
    target: usize,
    message: Option<MessageId>,
    access: RdmaAccess,
    /// Key, and address of the first byte.
    key: u32,
    remote: u64,
    len: u64,
    fence: bool,
    notify: bool,
    recverr: bool,
    hold: Weak<dyn Any + Send + Sync>,
    qp: Option<QpId>,
    /// Requests by their place in the operation: their ids, and how much of them is carried out.
    posted: BTreeMap<u64, u64>,
    done: BTreeMap<u64, u64>,
    /// What its requests have read.
    home: Home,
    refused: bool,
    /// The node knows that it was carried out.
    completed: bool,
    /// The node knows that the operation has failed.
    failed: Option<RdmaStatus>,
    cancelled: bool,
    /// The message of the operation has arrived at the peer's node.
    came: bool,
    /// The connection of the operation has ended.
    ended: bool,
    reported: Option<RdmaStatus>,
    /// Its process or socket has ended: nothing is reported any more.
    gone: bool,
}

impl Op {
    fn is_done(&self) -> bool {
        self.done.values().sum::<u64>() == self.len
    }
}

/// What accompanies a message.
#[derive(Clone, Debug, Default)]
pub(crate) struct Extras {
    pub(crate) announced: Option<u64>,
    pub(crate) ops: Vec<RdmaOp>,
    /// Nothing is sent but the operations.
    pub(crate) silent: bool,
}

/// A new region.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NewRegion {
    pub(crate) key: u32,
    pub(crate) len: u64,
    pub(crate) once: bool,
}

/// How a NIC answers a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    Done,
    /// The key or the range is wrong.
    Refused,
}

/// All regions and operations of a run.
#[derive(Debug, Default)]
pub(crate) struct Ops {
    pub(crate) plan: Option<OpsPlan>,
    regions: Vec<Region>,
    ops: Vec<Op>,
    by_message: HashMap<MessageId, Vec<usize>>,
    by_qp: HashMap<QpId, Vec<usize>>,
    /// Regions that the peers of a socket have announced to it.
    known: BTreeMap<(usize, usize), Vec<u32>>,
}

impl Ops {
    fn region(&self, key: u32) -> Option<&Region> {
        self.regions.get(key.checked_sub(FIRST_KEY)? as usize)
    }

    fn region_mut(&mut self, key: u32) -> Option<&mut Region> {
        self.regions.get_mut(key.checked_sub(FIRST_KEY)? as usize)
    }

    fn cookie(&self, key: u32) -> u64 {
        self.region(key).map_or(0, |region| region.base << 32) | u64::from(key)
    }

    /// Returns the regions of a socket that its user has not taken back.
    fn regions_of(&self, slot: usize) -> Vec<u32> {
        let used = |(at, r): (usize, &Region)| {
            (r.slot == slot && r.live && !r.freed).then_some(FIRST_KEY + at as u32)
        };
        self.regions.iter().enumerate().filter_map(used).collect()
    }

    /// Chooses memory that a socket takes back.
    pub(crate) fn draw_free(&mut self, rng: &mut Rng, slot: usize) -> Option<u64> {
        let free = self.plan.as_ref()?.free;
        let all = self.regions_of(slot);
        if all.is_empty() || !rng.chance(free) {
            return None;
        }
        let key = rng.pick(&all);
        let cookie = self.cookie(key);
        self.region_mut(key)?.freed = true;
        // Its peers learn of it in another way, or not at all.
        if rng.chance(800) {
            self.known.values_mut().for_each(|keys| keys.retain(|k| *k != key));
        }
        Some(cookie)
    }

    /// Chooses memory to announce; it may have to be registered first.
    pub(crate) fn draw_announced(
        &mut self,
        rng: &mut Rng,
        slot: usize,
    ) -> Option<(u64, Option<NewRegion>)> {
        let plan = self.plan.as_ref()?;
        if !rng.chance(plan.announce) {
            return None;
        }
        let all = self.regions_of(slot);
        if all.len() >= REGIONS_MAX || (!all.is_empty() && rng.chance(300)) {
            return Some((self.cookie(rng.pick(&all)), None));
        }
        let len = HEAD + rng.magnitude(8, plan.size_max as u64) as usize;
        let once = rng.chance(plan.once);
        let key = FIRST_KEY + self.regions.len() as u32;
        self.regions.push(Region {
            slot,
            base: 8 * rng.below(512),
            contents: Contents::new(key, len),
            once,
            live: true,
            freed: false,
            dead: false,
            used: false,
            releases: 0,
            adds: 0,
            counts: BTreeSet::new(),
        });
        Some((self.cookie(key), Some(NewRegion { key, len: len as u64, once })))
    }

    /// Draws the operations of a message.
    pub(crate) fn draw(
        &mut self,
        rng: &mut Rng,
        (slot, target): (usize, usize),
        faulty: bool,
    ) -> Extras {
        let mut extras = Extras::default();
        let Some(plan) = self.plan.clone() else { return extras };
        let Some(keys) = self.known.get(&(slot, target)).filter(|keys| !keys.is_empty()).cloned()
        else {
            return extras;
        };
        if !rng.chance(plan.share) {
            return extras;
        }
        extras.silent = rng.chance(plan.silent);
        let (moves, atomic) =
            rng.pick(&[(true, false), (true, false), (false, true), (true, true)]);
        for is_atomic in [false, true] {
            if !(if is_atomic { atomic } else { moves }) {
                continue;
            }
            let key = rng.pick(&keys);
            let cookie = self.cookie(key);
            let Some(region) = self.region(key) else { continue };
            let room = (region.contents.len() - HEAD) as u64;
            let number = self.ops.len();
            let (access, mut offset, len) = match (is_atomic, rng.chance(500)) {
                (true, true) => (RdmaAccess::FetchAdd(1), 0, 8),
                (true, false) => {
                    let compare = self.word(key);
                    (RdmaAccess::CompareSwap { compare, swap: number as u64 }, 8, 8)
                }
                (false, write) => {
                    let offset = rng.below(room);
                    let access = if write { RdmaAccess::Write } else { RdmaAccess::Read };
                    (access, HEAD as u64 + offset, rng.between(1, room - offset))
                }
            };
            let mut key = key;
            let (mut cookie, base) = (cookie, cookie >> 32);
            if faulty && rng.chance(plan.bad) {
                if rng.chance(500) {
                    key = rng.pick(&[0, 7, u32::MAX]);
                    cookie = (base << 32) | u64::from(key);
                } else {
                    offset += 8 * (room.div_ceil(8) + 2);
                }
            }
            let count = if is_atomic { 1 } else { rng.magnitude(1, 40).min(len) };
            let mut local = Vec::new();
            let mut at = 0;
            for left in (1..=count).rev() {
                let piece = if left == 1 { len - at } else { (len / count).max(1) };
                let addr = ((number as u64) << LOCAL_BITS) + at;
                local.push(RdmaPiece { addr, len: piece as u32, lkey: 7 });
                at += piece;
            }
            let hold: Arc<dyn Any + Send + Sync> = Arc::new(());
            let notify = rng.chance(plan.notify);
            let fence = rng.chance(plan.fence);
            self.ops.push(Op {
                slot,
                target,
                message: None,
                access,
                key,
                remote: base + offset,
                len,
                fence,
                notify,
                recverr: false,
                hold: Arc::downgrade(&hold),
                qp: None,
                posted: BTreeMap::new(),
                done: BTreeMap::new(),
                home: Home::default(),
                refused: false,
                completed: false,
                came: false,
                failed: None,
                cancelled: false,
                ended: false,
                reported: None,
                gone: false,
            });
            extras.ops.push(RdmaOp {
                access,
                cookie,
                offset,
                // More may be announced than is transferred.
                len: if is_atomic { len } else { len + rng.below(3) },
                local,
                fence,
                silent: extras.silent,
                token: number as u64 + 1,
                notify,
                hold: Some(RdmaHold(hold)),
            });
        }
        extras
    }

    fn word(&self, key: u32) -> u64 {
        self.region(key).map_or(0, |region| region.contents.word(8))
    }

    /// Notes the message that the newest operations belong to. A silent one has none.
    pub(crate) fn sending(&mut self, count: usize, message: Option<MessageId>, recverr: bool) {
        let first = self.ops.len() - count;
        for (at, op) in self.ops.iter_mut().enumerate().skip(first) {
            (op.message, op.recverr) = (message, recverr);
            if let Some(message) = message {
                self.by_message.entry(message).or_default().push(at);
            }
        }
    }

    /// Forgets the newest operations, whose message was refused.
    pub(crate) fn refused(&mut self, count: usize) {
        for op in self.ops.drain(self.ops.len() - count..) {
            op.message.map(|message| self.by_message.remove(&message));
        }
    }

    /// Notes that a user cancels.
    pub(crate) fn cancelled(&mut self, slot: usize, target: usize) {
        let hit = |op: &&mut Op| op.slot == slot && op.target == target && op.reported.is_none();
        self.ops.iter_mut().filter(hit).for_each(|op| op.cancelled = true);
    }

    /// Notes that a socket is closed, or its process has ended.
    pub(crate) fn closed(&mut self, rng: &mut Rng, slot: usize, process: bool) {
        if self.plan.is_none() {
            return;
        }
        self.take_regions(rng, slot, process);
        self.ops.iter_mut().filter(|op| op.slot == slot).for_each(|op| op.gone = true);
    }

    /// Notes that another process has taken over a socket. Its operations have ended, and the
    /// socket is told of them. Returns their messages, which may be lost.
    pub(crate) fn handed_over(&mut self, rng: &mut Rng, slot: usize) -> Vec<MessageId> {
        if self.plan.is_none() {
            return Vec::new();
        }
        self.take_regions(rng, slot, true);
        let mut messages = Vec::new();
        for op in self.ops.iter_mut().filter(|op| op.slot == slot && !op.gone) {
            op.ended = true;
            messages.extend(op.message.filter(|_| !op.came));
        }
        messages
    }

    /// Takes the memory of a socket from peers.
    fn take_regions(&mut self, rng: &mut Rng, slot: usize, process: bool) {
        for region in self.regions.iter_mut().filter(|region| region.slot == slot) {
            region.freed = true;
            region.dead |= process && region.releases == 0;
            region.used &= !process;
            region.live &= !process;
        }
        let announced = rng.chance(800);
        self.known.retain(|(one, of), _| *one != slot && (*of != slot || !announced));
    }

    /// Describes an operation whose completion was not reported.
    pub(crate) fn missing(&self) -> Option<String> {
        let owed = |op: &&Op| op.notify && op.reported.is_none() && !op.gone;
        if let Some(op) = self.ops.iter().find(owed) {
            return Some(format!("the completion of {op:?} was not reported"));
        }
        // Failures of operations whose success is not reported. What the peer has acknowledged is
        // no failure of a write.
        let fails = |op: &&Op| {
            let open = op.recverr && !op.notify && !op.gone;
            let failed = op.ended && !op.completed && !op.cancelled;
            open && failed && (op.access != RdmaAccess::Write || op.failed.is_some())
        };
        let untold = self.ops.iter().filter(fails).find(|op| op.reported.is_none());
        untold.map(|op| format!("the failure of {op:?} was not reported"))
    }

    /// Describes what is left after all sockets are closed.
    pub(crate) fn left(&self) -> Option<(&'static str, usize)> {
        let regions = self.regions.iter().filter(|r| r.used || r.releases == 0 && !r.dead).count();
        let held = self.ops.iter().filter(|op| op.hold.strong_count() > 0).count();
        [("regions", regions), ("held memory", held)].into_iter().find(|(_, n)| *n > 0)
    }

    /// Checks the counters of all regions.
    pub(crate) fn check_counters(&self) -> Result<(), String> {
        for (at, region) in self.regions.iter().enumerate() {
            let key = FIRST_KEY + at as u32;
            let count = region.contents.word(0);
            let of = |op: &&Op| op.key == key && op.access == RdmaAccess::FetchAdd(1);
            let sure = |op: &&Op| op.reported == Some(RdmaStatus::Success);
            let least = self.ops.iter().filter(of).filter(sure).count() as u64;
            let unsure = |op: &&Op| op.reported != Some(RdmaStatus::RemoteError);
            let most = self.ops.iter().filter(of).filter(unsure).count() as u64;
            if count != region.adds || !(least..=most).contains(&count) {
                return Err(format!("region {key:#x} counts {count}, not {least} to {most}"));
            }
        }
        Ok(())
    }

    /// Notes that a node refuses a region to peers, since it was used.
    pub(crate) fn used(&mut self, tag: u64) -> Result<(), String> {
        let key = tag as u32;
        if self.region(key).is_none_or(|region| !region.once || region.freed) {
            return Err(format!("region {key:#x} is used, which is not for one use"));
        }
        self.released(tag)?;
        self.region_mut(key).into_iter().for_each(|region| region.used = true);
        Ok(())
    }

    /// Notes that a node releases a region.
    pub(crate) fn released(&mut self, tag: u64) -> Result<(), String> {
        let key = tag as u32;
        if let Some(region) = self.region_mut(key).filter(|region| region.used) {
            region.used = false;
            return Ok(());
        }
        let moved =
            self.ops.iter().any(|op| op.key == key && !op.access.is_atomic() && op.is_done());
        let Some(region) = self.region_mut(key) else {
            return Err(format!("region {key:#x} is released, which there is not"));
        };
        region.releases += 1;
        region.live = false;
        if region.releases > 1 {
            return Err(format!("region {key:#x} is released twice"));
        }
        if !(region.freed || (region.once && moved)) {
            return Err(format!("region {key:#x} is released without a reason"));
        }
        self.known.values_mut().for_each(|keys| keys.retain(|k| *k != key));
        Ok(())
    }

    /// Notes that a socket gets a cookie from another one.
    pub(crate) fn learned(&mut self, slot: usize, from: usize, cookie: u64) -> Result<(), String> {
        let key = cookie as u32;
        let right = self.region(key).is_some_and(|r| r.slot == from) && self.cookie(key) == cookie;
        if !right {
            return Err(format!("socket {slot} gets the cookie {cookie:#x}, not of socket {from}"));
        }
        if self.region(key).is_some_and(|region| !region.freed && region.live) {
            let keys = self.known.entry((slot, from)).or_default();
            keys.retain(|k| *k != key);
            keys.push(key);
        }
        Ok(())
    }

    /// Checks a message that a socket gets: its operations came first, and memory for one use is
    /// released.
    pub(crate) fn delivered(&self, slot: usize, message: MessageId) -> Result<(), String> {
        for at in self.by_message.get(&message).into_iter().flatten() {
            let op = &self.ops[*at];
            if !op.is_done() {
                return Err(format!("a message arrives without its operation: {op:?}"));
            }
            if let Some(region) = self.region(op.key)
                && region.slot == slot
                && region.once
                && !op.access.is_atomic()
                && region.releases == 0
                && !region.dead
            {
                return Err(format!("region {:#x} was used and is not released", op.key));
            }
        }
        Ok(())
    }

    /// Checks a completion that a socket gets.
    pub(crate) fn reported(
        &mut self,
        slot: usize,
        token: u64,
        status: RdmaStatus,
    ) -> Result<usize, String> {
        let fault = !matches!(status, RdmaStatus::Success | RdmaStatus::Cancelled);
        let number = (token as usize).wrapping_sub(1);
        let Some(op) = self.ops.get_mut(number) else {
            return Err(format!("socket {slot} gets {status:?} of no operation"));
        };
        let is_asked_for = op.notify || (op.recverr && fault);
        let right = match status {
            RdmaStatus::Success => op.is_done() && op.failed.is_none(),
            RdmaStatus::RemoteError => op.refused && op.failed == Some(status),
            RdmaStatus::Cancelled => op.cancelled && op.failed.is_none(),
            // It may have been executed when its message was lost.
            RdmaStatus::Dropped => op.ended && !(op.notify && op.completed) && op.failed.is_none(),
            RdmaStatus::OtherError => op.failed == Some(status),
        };
        let what = if op.slot != slot || op.gone || !is_asked_for {
            "is reported to another socket"
        } else if op.reported.is_some() {
            "is reported twice"
        } else if !right {
            "is the wrong status"
        } else if op.hold.strong_count() > 0 {
            "is reported while memory is held"
        } else {
            op.reported = Some(status);
            if status == RdmaStatus::Success {
                self.check_home(number)?;
            }
            return Ok(number);
        };
        Err(format!("{status:?} {what}: {op:?}"))
    }

    /// Checks the memory of an operation that succeeded.
    fn check_home(&mut self, number: usize) -> Result<(), String> {
        let op = &self.ops[number];
        let Some(at) = op.key.checked_sub(FIRST_KEY) else { return Ok(()) };
        let Some(region) = self.regions.get_mut(at as usize) else { return Ok(()) };
        if op.access == RdmaAccess::Write {
            return Ok(());
        }
        if op.home.len() != op.len {
            return Err(format!("success is reported before all bytes have arrived: {op:?}"));
        }
        if op.access == RdmaAccess::Read
            && let Some(at) = op.home.wrong(&region.contents)
        {
            return Err(format!("byte {at} was never in the region: {op:?}"));
        }
        if let (RdmaAccess::FetchAdd(_), Some(count)) = (op.access, op.home.word())
            && !region.counts.insert(count)
        {
            return Err(format!("{count} was fetched twice: {op:?}"));
        }
        Ok(())
    }

    /// Notes that the answer of a request has come home.
    fn came_home(&mut self, work: &Work) {
        if let Some(op) = self.ops.get_mut(work.op) {
            op.home.come(work.at);
        }
    }

    /// Checks that local memory may still be touched.
    fn touch(&self, work: &Work) -> Result<(), String> {
        let Some(op) = self.ops.get(work.op) else { return Ok(()) };
        if op.reported.is_some() || op.hold.strong_count() == 0 {
            return Err(format!("memory is accessed after the completion was reported: {op:?}"));
        }
        Ok(())
    }

    /// Notes that a message has come to a node.
    pub(crate) fn came(&mut self, message: MessageId) {
        for at in self.by_message.get(&message).into_iter().flatten() {
            self.ops[*at].came = true;
        }
    }

    /// Notes that a node gets the completion of a request and of all before it.
    pub(crate) fn completed(&mut self, qp: QpId, id: u64) {
        for at in self.by_qp.get(&qp).into_iter().flatten() {
            let op = &mut self.ops[*at];
            op.completed |= op.posted.last_key_value().is_some_and(|(_, last)| *last <= id);
        }
    }

    /// Notes that a node gets the failure of a request.
    pub(crate) fn failed(&mut self, qp: QpId, id: u64, status: RdmaStatus) {
        for at in self.by_qp.get(&qp).into_iter().flatten() {
            let op = &mut self.ops[*at];
            if op.posted.values().any(|of| *of == id) {
                op.failed.get_or_insert(status);
            }
        }
    }

    fn posted(&mut self, qp: QpId, id: u64, work: &Work) -> Result<(), String> {
        let Some(op) = self.ops.get_mut(work.op) else {
            return Err(format!("a request of no operation: {work:?}"));
        };
        let expected = op.posted.last_key_value().is_none_or(|(last, _)| *last < work.at)
            && work.whole
            && work.access == op.access
            && work.at + work.len <= op.len
            && work.remote == op.remote + work.at
            && work.rkey == op.key;
        let again = op.qp.is_some_and(|of| of != qp) || op.posted.insert(work.at, id).is_some();
        if again || !expected || op.reported.is_some() {
            let what =
                if again { "is posted again" } else { "is not the request of the operation" };
            return Err(format!("{work:?} {what}: {op:?}"));
        }
        if op.qp.replace(qp).is_none() {
            self.by_qp.entry(qp).or_default().push(work.op);
        }
        let region = op.key.checked_sub(FIRST_KEY).and_then(|at| self.regions.get(at as usize));
        if let Some(region) = region.filter(|_| op.access == RdmaAccess::Read)
            && let Some(range) = region.range(op.remote, op.len)
        {
            op.home.begin(&region.contents, range);
        }
        Ok(())
    }

    fn carried_out(&mut self, work: &Work, share: u64) -> Result<Answer, String> {
        let found = self.region(work.rkey).filter(|region| region.live);
        let range = found.and_then(|region| region.range(work.remote, work.len));
        let Some(op) = self.ops.get_mut(work.op) else { return Ok(Answer::Refused) };
        let Some((from, _)) = range else {
            op.refused = true;
            return Ok(Answer::Refused);
        };
        if op.done.insert(work.at, share).is_some() {
            return Err(format!("{work:?} is executed twice: {op:?}"));
        }
        let Some(region) = self.region_mut(work.rkey) else { return Ok(Answer::Refused) };
        region.adds += u64::from(work.access == RdmaAccess::FetchAdd(1));
        let contents = &mut region.contents;
        let answer = contents.read((from, from + if work.reads() { share as usize } else { 0 }));
        let word = contents.word(from);
        match work.access {
            RdmaAccess::Read => {}
            RdmaAccess::Write => contents.write((from, from + share as usize), work.op, work.at),
            RdmaAccess::FetchAdd(add) => contents.set_word(from, word + add),
            RdmaAccess::CompareSwap { compare, swap } if word == compare => {
                contents.set_word(from, swap);
            }
            RdmaAccess::CompareSwap { .. } => {}
        }
        self.ops[work.op].home.answer(work.at, answer);
        Ok(Answer::Done)
    }

    /// Checks a frame that is about to be sent: what was begun on another connection is not
    /// repeated, and a fence is kept.
    pub(crate) fn check_frame(
        &self,
        qp: QpId,
        message: MessageId,
        fence: bool,
    ) -> Result<(), String> {
        let all = self.by_message.get(&message).into_iter().flatten().map(|at| &self.ops[*at]);
        let mut fenced = false;
        for op in all {
            fenced |= op.fence;
            if op.qp != Some(qp) || op.posted.is_empty() {
                return Err(format!("a message is sent without its operation: {op:?}"));
            }
        }
        if fenced && !fence {
            return Err(format!("a message without the fence of its operation: {message:?}"));
        }
        Ok(())
    }
}

impl Ctx {
    fn judge<T>(&mut self, judged: Result<T, String>) -> Option<T> {
        match judged {
            Ok(value) => Some(value),
            Err(what) => {
                self.fail(|| what);
                None
            }
        }
    }

    /// Notes that a request is posted.
    pub(crate) fn op_posted(&mut self, qp: QpId, id: u64, work: &Work) {
        self.note([90, work.op as u64, work.at], || format!("{qp}: {work:?}"));
        let judged = self.ops.posted(qp, id, work);
        self.judge(judged);
    }

    /// Notes that a NIC touches the local memory of a request.
    pub(crate) fn op_touches(&mut self, work: &Work) {
        let judged = self.ops.touch(work);
        self.judge(judged);
    }

    /// Notes that the answer of a request has come.
    pub(crate) fn op_answered(&mut self, work: &Work) {
        self.op_touches(work);
        self.ops.came_home(work);
    }

    /// Carries out a request, or the first `share` bytes of it.
    pub(crate) fn op_carry_out(&mut self, work: &Work, partly: bool) -> Answer {
        let share = if partly { work.len / 2 } else { work.len };
        let judged = self.ops.carried_out(work, share);
        let answer = self.judge(judged).unwrap_or(Answer::Done);
        self.note([91, work.op as u64, work.at], || format!("{work:?}, {share} bytes: {answer:?}"));
        let name = match (answer, work.access) {
            (Answer::Refused, _) => "refused",
            (_, RdmaAccess::Write) => "write",
            (_, RdmaAccess::Read) => "read",
            (_, RdmaAccess::FetchAdd(_)) => "fetch-add",
            (_, RdmaAccess::CompareSwap { .. }) => "compare-swap",
        };
        self.coverage.hit("ops", name);
        answer
    }

    /// Notes that none of the requests of a connection touches memory any more. The messages whose
    /// operations were begun may be lost.
    pub(crate) fn ops_connection_ended(&mut self, qp: QpId) {
        for at in self.ops.by_qp.remove(&qp).unwrap_or_default() {
            let op = &mut self.ops.ops[at];
            op.ended = true;
            if let Some(message) = op.message.filter(|_| !op.came) {
                self.oracle.excuse_one(message);
            }
        }
    }

    /// Notes the completion that a socket gets.
    pub(crate) fn op_reported(&mut self, slot: usize, token: u64, status: RdmaStatus) {
        self.note([92, slot as u64, token], || format!("socket {slot}: {token} is {status:?}"));
        let judged = self.ops.reported(slot, token, status);
        let name = match status {
            RdmaStatus::Success => "reported: success",
            RdmaStatus::RemoteError => "reported: remote error",
            RdmaStatus::Cancelled => "reported: cancelled",
            RdmaStatus::Dropped => "reported: dropped",
            RdmaStatus::OtherError => "reported: other error",
        };
        self.coverage.hit("ops", name);
        if let Some(number) = self.judge(judged)
            && let Some(qp) = self.ops.ops[number].qp
            && self.rdma.has_work(qp, number)
        {
            self.fail(|| format!("operation {number} is reported {status:?} and still in flight"));
        }
    }
}
