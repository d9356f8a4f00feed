//! Requests of programs: drawn at random, right ones and wrong ones, each with its expected
//! outcome.

mod mistakes;

use bowline_verbs::{
    Access, FlushOf, MwBind, Placement, Remote, SendFlags, SendOp, SendWr, Sge, Status, WcOpcode,
    next_key,
};

use super::memory::{AreaId, Pieces, Purpose, fill, list, part, sges};
use super::plan::ConnPlan;
use super::reach::{self, LoanEvent};
use super::side::{
    Announcement, Fast, FastStep, Grant, Message, Receive, Request, Side, SideId, Statuses,
};
use crate::engine::coverage::Coverage;
use crate::engine::rng::Rng;
use mistakes::{MISTAKES, MISTAKES_OF_ALL, Mistake};

/// Maximum number of elements of a gather or scatter list.
pub(crate) const SGES: usize = 4;
/// Maximum number of bytes sent inline.
pub(crate) const INLINE: usize = 200;

/// A request that owns the data it refers to.
#[derive(Debug)]
pub(crate) struct OwnedRequest {
    pub(crate) id: u64,
    pub(crate) op: SendOp,
    pub(crate) sges: Vec<Sge>,
    pub(crate) inline: Vec<u8>,
    pub(crate) flags: SendFlags,
}

impl OwnedRequest {
    /// Returns the request as the verbs take it.
    pub(crate) fn wr(&self) -> SendWr<'_> {
        SendWr {
            id: self.id,
            op: self.op.clone(),
            sges: &self.sges,
            inline: &self.inline,
            flags: self.flags,
        }
    }
}

/// Draws requests for one side.
pub(crate) struct App<'a> {
    pub(crate) sides: &'a mut [Side],
    pub(crate) id: SideId,
    pub(crate) peer: SideId,
    pub(crate) plan: &'a ConnPlan,
    pub(crate) rng: &'a mut Rng,
    pub(crate) coverage: &'a mut Coverage,
}

impl App<'_> {
    fn me(&mut self) -> &mut Side {
        &mut self.sides[self.id]
    }

    fn number(&mut self) -> u64 {
        let me = self.me();
        me.next_number += 1;
        me.next_number
    }

    /// Draws the next request, or two requests that belong together. Returns none if there is no
    /// room for them now.
    pub(crate) fn next(&mut self) -> Vec<OwnedRequest> {
        if self.sides[self.id].requests.len() + 2 > self.plan.send_depth {
            return Vec::new();
        }
        let more = self.plan.misregister;
        if more > 0 && matches!(self.me().fast, Fast::Released(_)) && self.rng.chance(more) {
            return self.mistake(Mistake::Register).into_iter().collect();
        }
        if self.rng.chance(self.plan.misuse) {
            let kinds = if more > 0 { &MISTAKES[..] } else { &MISTAKES[..MISTAKES_OF_ALL] };
            let kind = self.rng.pick(kinds);
            return self.mistake(kind).into_iter().collect();
        }
        let drawn = match self.rng.below(100) {
            0..30 => self.send(Announcement::Nothing, None),
            30..50 => self.write(false),
            50..58 => self.write(true),
            58..74 => self.read(),
            74..85 => self.atomic(),
            85..92 => return self.fast(),
            _ => self.give_back(),
        };
        drawn.into_iter().collect()
    }

    fn len(&mut self) -> usize {
        let (mtu, max) = (self.plan.mtu.bytes(), self.plan.message_max);
        let len = match self.rng.below(12) {
            0 => 0,
            1 => 1 + self.rng.index(8),
            2 => mtu - 1,
            3 => mtu,
            4 => mtu + 1,
            5 => 2 * mtu,
            6 => max,
            _ => self.rng.magnitude(1, max as u64) as usize,
        };
        len.min(max)
    }

    fn payload(&mut self, len: usize) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(len + 8);
        fill(self.rng.next(), len, &mut bytes);
        bytes
    }

    /// Writes bytes to the memory that they are sent from.
    fn gather(&mut self, request: &mut Request, bytes: &[u8]) -> Option<(Vec<Sge>, Vec<u8>)> {
        if bytes.len() <= INLINE && self.rng.chance(250) {
            return Some((Vec::new(), bytes.to_vec()));
        }
        let me = &mut self.sides[self.id];
        let area = me.memory.take(self.rng, Purpose::Source, bytes.len())?;
        let pieces = me.memory.cut(self.rng, area, bytes.len(), SGES);
        me.memory.write(&pieces, bytes);
        request.source = Some(area);
        Some((sges(&pieces, me.iova, me.local.lkey), Vec::new()))
    }

    /// Returns a request that was drawn; from now on it is expected to complete.
    fn done(
        &mut self,
        mut request: Request,
        op: SendOp,
        (sges, inline): (Vec<Sge>, Vec<u8>),
        mut flags: SendFlags,
    ) -> OwnedRequest {
        let (plan, misuse) = (self.plan, request.may != Statuses::NONE);
        let ask = self.rng.chance(plan.signalled);
        let me = &mut self.sides[self.id];
        let last = !me.memory.has_free(Purpose::Source)
            || !me.memory.has_free(Purpose::Sink)
            || me.left <= 2
            || 2 * (me.silent + 2) > plan.send_depth;
        if ask || last || misuse {
            flags |= SendFlags::SIGNALED;
            me.silent = 0;
        } else {
            me.silent += 1;
        }
        if !inline.is_empty() {
            flags |= SendFlags::INLINE;
        }
        request.signalled = plan.signal_all || flags.contains(SendFlags::SIGNALED);
        if request.message && plan.rnr_retry < 7 {
            request.may = request.may.and(Status::RnrRetryExcErr);
        }
        if request.message && plan.short_receives > 0 {
            request.may = request.may.and(Status::RemInvReqErr);
        }
        me.left = me.left.saturating_sub(1);
        let id = request.number;
        me.requests.push_back(request);
        OwnedRequest { id, op, sges, inline, flags }
    }

    /// Draws a message to a receive, perhaps one that ends a grant.
    fn send(
        &mut self,
        announcement: Announcement,
        invalidates: Option<u32>,
    ) -> Option<OwnedRequest> {
        let len = self.len();
        let bytes = self.payload(len);
        let number = self.number();
        let mut request = Request::new(number, WcOpcode::Send);
        let place = self.gather(&mut request, &bytes)?;
        request.len = len as u32;
        request.message = true;
        let imm = self.rng.chance(400).then(|| self.rng.next() as u32);
        let imm = imm.filter(|_| invalidates.is_none());
        let op = match (invalidates, imm) {
            (Some(key), _) => SendOp::SendInv(key),
            (None, Some(imm)) => SendOp::SendImm(imm),
            (None, None) => SendOp::Send,
        };
        let (write, bad_key) = (false, false);
        let me = self.me();
        me.outgoing.push_back(Message {
            number,
            bytes,
            len,
            imm,
            invalidates,
            write,
            bad_key,
            announcement,
        });
        let fence = match &me.grant {
            // Memory that is given back must not be read any more [REQ-5].
            Some(_) if me.requests.iter().any(Request::is_read) => SendFlags::FENCE,
            _ => SendFlags::empty(),
        };
        let solicited = if self.rng.chance(300) { SendFlags::SOLICITED } else { fence };
        Some(self.done(request, op, place, fence | solicited))
    }

    /// Draws a range of the peer's memory that this side may use.
    fn target(
        &mut self,
        purposes: &[Purpose],
        len: usize,
    ) -> Option<(AreaId, Pieces, Remote, bool)> {
        let (me, peer) = (&self.sides[self.id], &self.sides[self.peer]);
        if let Some(grant) = &me.grant
            && grant.len >= len
            && purposes.contains(&Purpose::Fast)
            && self.rng.chance(400)
        {
            let skip = self.rng.index(grant.len - len + 1);
            let addr = grant.iova + skip as u64;
            let remote = Remote { addr, rkey: grant.key };
            return Some((grant.area, part(&grant.pieces, skip, len), remote, false));
        }
        let purpose = self.rng.pick(purposes);
        let areas: Vec<AreaId> = (peer.memory.of(purpose).into_iter())
            .filter(|id| purpose != Purpose::Fast && peer.memory.range(*id).1 >= len)
            .collect();
        if areas.is_empty() {
            return None;
        }
        let area = self.rng.pick(&areas);
        let (start, room) = peer.memory.range(area);
        let at = start + self.rng.index(room - len + 1);
        let constant = purpose == Purpose::Constant;
        let rkey = if constant { peer.constant.rkey } else { peer.shared.rkey };
        let remote = Remote { addr: peer.iova + at as u64, rkey };
        let pieces = if len > 0 { vec![(at, len)] } else { Vec::new() };
        Some((area, pieces, remote, !constant && peer.revoked))
    }

    /// Returns a fence if needed: a write must not overtake a read of the same memory.
    fn fence(&mut self, area: AreaId) -> SendFlags {
        let after = |r: &Request| r.is_read() && r.target == Some(area);
        if self.me().requests.iter().any(after) || self.rng.chance(100) {
            SendFlags::FENCE
        } else {
            SendFlags::empty()
        }
    }

    fn write(&mut self, immediate: bool) -> Option<OwnedRequest> {
        let len = self.len();
        let (area, pieces, remote, revoked) =
            self.target(&[Purpose::Target, Purpose::Fast], len)?;
        let bytes = self.payload(len);
        let number = self.number();
        let mut request = Request::new(number, WcOpcode::RdmaWrite);
        let place = self.gather(&mut request, &bytes)?;
        request.len = len as u32;
        request.message = immediate;
        request.target = Some(area);
        if revoked && len > 0 {
            (request.may, request.must_fail) = (Statuses::only(Status::RemAccessErr), true);
        } else if !bytes.is_empty() {
            self.sides[self.peer].memory.expect(area, number, pieces, bytes);
        }
        let flags = self.fence(area);
        let mut op = SendOp::Write(remote);
        if immediate {
            let imm = self.rng.next() as u32;
            op = SendOp::WriteImm(remote, imm);
            self.me().outgoing.push_back(Message {
                number,
                bytes: Vec::new(),
                len,
                imm: Some(imm),
                invalidates: None,
                write: true,
                bad_key: false,
                announcement: Announcement::Nothing,
            });
        }
        Some(self.done(request, op, place, flags))
    }

    /// Draws memory for a result of this side.
    fn scatter(&mut self, request: &mut Request, bytes: Vec<u8>) -> Option<Vec<Sge>> {
        let me = &mut self.sides[self.id];
        let area = me.memory.take(self.rng, Purpose::Sink, bytes.len())?;
        let pieces = me.memory.cut(self.rng, area, bytes.len(), SGES);
        let list = sges(&pieces, me.iova, me.local.lkey);
        request.sink = Some(area);
        me.memory.expect(area, request.number, pieces, bytes);
        Some(list)
    }

    fn read(&mut self) -> Option<OwnedRequest> {
        use Purpose as P;
        let len = self.len();
        let purposes = [P::Target, P::Target, P::Constant, P::Fast];
        let (area, pieces, remote, revoked) = self.target(&purposes, len)?;
        let number = self.number();
        let mut request = Request::new(number, WcOpcode::RdmaRead);
        let expected = self.sides[self.peer].memory.expected_bytes(area, &pieces);
        let place = self.scatter(&mut request, expected)?;
        request.len = len as u32;
        request.target = Some(area);
        if revoked && len > 0 {
            (request.may, request.must_fail) = (Statuses::only(Status::RemAccessErr), true);
        }
        let flags = if self.rng.chance(100) { SendFlags::FENCE } else { SendFlags::empty() };
        Some(self.done(request, SendOp::Read(remote), (place, Vec::new()), flags))
    }

    fn atomic(&mut self) -> Option<OwnedRequest> {
        let peer = &self.sides[self.peer];
        let areas = peer.memory.of(Purpose::Words);
        let area = self.rng.pick(&areas);
        let (start, room) = peer.memory.range(area);
        let at = start + 8 * self.rng.index(room / 8);
        let old = peer.memory.expected_bytes(area, &[(at, 8)]);
        let revoked = peer.revoked;
        let remote = Remote { addr: peer.iova + at as u64, rkey: peer.shared.rkey };
        let number = self.number();
        let before = u64::from_ne_bytes(old.as_slice().try_into().ok()?);
        let operand = self.rng.next();
        let (op, opcode, after) = match self.rng.below(4) {
            3 => return self.atomic_write((area, at), remote, operand),
            0 => {
                let add = if self.rng.chance(500) { 1 } else { operand };
                (SendOp::FetchAdd { remote, add }, WcOpcode::FetchAdd, before.wrapping_add(add))
            }
            1 => {
                let op = SendOp::CompareSwap { remote, compare: before, swap: operand };
                (op, WcOpcode::CompSwap, operand)
            }
            _ => {
                let compare = before ^ 1 << self.rng.below(64);
                let op = SendOp::CompareSwap { remote, compare, swap: operand };
                (op, WcOpcode::CompSwap, before)
            }
        };
        let mut request = Request::new(number, opcode);
        let place = self.scatter(&mut request, old)?;
        request.len = 8;
        request.target = Some(area);
        if revoked {
            (request.may, request.must_fail) = (Statuses::only(Status::RemAccessErr), true);
        } else {
            let bytes = after.to_ne_bytes().to_vec();
            self.sides[self.peer].memory.expect(area, number, vec![(at, 8)], bytes);
        }
        let flags = self.fence(area);
        Some(self.done(request, op, (place, Vec::new()), flags))
    }

    /// Writes a word atomically, perhaps followed by a request that makes it visible to all at the
    /// peer.
    fn atomic_write(
        &mut self,
        (area, at): (AreaId, usize),
        remote: Remote,
        word: u64,
    ) -> Option<OwnedRequest> {
        let number = self.number();
        let flush = self.rng.chance(300);
        let opcode = if flush { WcOpcode::Flush } else { WcOpcode::AtomicWrite };
        let mut request = Request::new(number, opcode);
        let (mut place, mut op) = ((Vec::new(), Vec::new()), SendOp::AtomicWrite(remote));
        if flush {
            let of = match self.rng.below(3) {
                0 => FlushOf::Region,
                most => FlushOf::Range(4 * most as u32),
            };
            op = SendOp::Flush { remote, of, placement: Placement::GLOBAL };
        } else {
            place = self.gather(&mut request, &word.to_ne_bytes())?;
            request.len = 8;
        }
        request.target = Some(area);
        if self.sides[self.peer].revoked {
            (request.may, request.must_fail) = (Statuses::only(Status::RemAccessErr), true);
        } else if !flush {
            let bytes = word.to_ne_bytes().to_vec();
            self.sides[self.peer].memory.expect(area, number, vec![(at, 8)], bytes);
        }
        let flags = self.fence(area);
        Some(self.done(request, op, place, flags))
    }

    /// Takes the next step with this side's fast region: grants it to the peer, or takes it back.
    fn fast(&mut self) -> Vec<OwnedRequest> {
        let room = self.me().requests.len() + 4 <= self.plan.send_depth;
        match self.me().fast {
            Fast::Free(key) if room => self.register(key),
            Fast::Released(key) => {
                let number = self.number();
                let mut request = Request::new(number, WcOpcode::LocalInv);
                request.fast = FastStep::Invalidate;
                reach::loan(self.coverage, LoanEvent::InvalidatedHere);
                self.me().fast = Fast::Ending(key);
                let nothing = (Vec::new(), Vec::new());
                vec![self.done(request, SendOp::LocalInv(key), nothing, SendFlags::SIGNALED)]
            }
            _ => self.send(Announcement::Nothing, None).into_iter().collect(),
        }
    }

    fn registration(&mut self, key: u32) -> (SendOp, Grant) {
        let me = &mut self.sides[self.id];
        let area = me.memory.of(Purpose::Fast)[0];
        let (start, len) = me.memory.range(area);
        if let Some(under) = me.under {
            let mut access = Access::REMOTE_WRITE | Access::REMOTE_READ;
            let addr = me.iova + start as u64;
            access.set(Access::ZERO_BASED, self.rng.chance(300));
            let from_zero = access.contains(Access::ZERO_BASED);
            let iova = if from_zero { 0 } else { addr };
            let to = MwBind { lkey: under.lkey, addr, len: len as u64, access };
            let pieces = vec![(start, len)];
            return (SendOp::BindMw { key, to }, Grant { key, iova, area, pieces, len });
        }
        let pieces = me.memory.cut(self.rng, area, len, SGES);
        let iova = self.rng.next() >> 8;
        let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ;
        let op = SendOp::RegMr { key, pieces: list(&me.memory, &pieces), iova, access };
        (op, Grant { key, iova, area, pieces, len })
    }

    fn register(&mut self, old: u32) -> Vec<OwnedRequest> {
        let key = next_key(old);
        let number = self.number();
        let (op, grant) = self.registration(key);
        // Without a message the peer would not learn of the grant: check first that there is room
        // for one.
        if !self.me().memory.has_free(Purpose::Source) {
            return Vec::new();
        }
        let opcode = match op {
            SendOp::BindMw { .. } => WcOpcode::BindMw,
            _ => WcOpcode::RegMr,
        };
        let mut request = Request::new(number, opcode);
        reach::loan(
            self.coverage,
            match &op {
                SendOp::BindMw { to, .. } => {
                    LoanEvent::Bound { from_zero: to.access.contains(Access::ZERO_BASED) }
                }
                _ => LoanEvent::Registered,
            },
        );
        request.fast = FastStep::Register;
        self.me().fast = Fast::Granted(key);
        let flags = SendFlags::empty();
        let mut out = vec![self.done(request, op, (Vec::new(), Vec::new()), flags)];
        out.extend(self.send(Announcement::Grant(grant), None));
        out
    }

    /// Ends the use of the peer's fast region.
    fn give_back(&mut self) -> Option<OwnedRequest> {
        let Some(grant) = self.me().grant.clone() else {
            return self.send(Announcement::Nothing, None);
        };
        let owned = if self.rng.chance(500) {
            self.send(Announcement::Nothing, Some(grant.key))?
        } else {
            self.send(Announcement::Release, None)?
        };
        let invalidates = matches!(owned.op, SendOp::SendInv(_));
        let how = if invalidates { LoanEvent::Invalidated } else { LoanEvent::Released };
        reach::loan(self.coverage, how);
        let me = self.me();
        me.grant = None;
        // Only a key that the peer has invalidated before it sees the next request is surely
        // useless.
        me.stale = invalidates.then_some(grant);
        Some(owned)
    }
}

/// Draws a receive to post, if there is memory for it.
pub(crate) fn receive(side: &mut Side, plan: &ConnPlan, rng: &mut Rng) -> Option<(u64, Vec<Sge>)> {
    let area = side.memory.take(rng, Purpose::Receive, plan.message_max)?;
    let (_, mut len) = side.memory.range(area);
    if rng.chance(plan.short_receives) {
        len = rng.index(len + 1);
    }
    let pieces = side.memory.cut(rng, area, len, SGES);
    side.next_number += 1;
    let number = side.next_number;
    let list = sges(&pieces, side.iova, side.local.lkey);
    side.receives.push_back(Receive { number, area, pieces, len });
    Some((number, list))
}
