//! Requests that must fail: mistakes that a program makes on purpose.

use bowline_verbs::{FlushOf, Placement, Remote, SendFlags, SendOp, Sge, Status, WcOpcode};

use super::{App, OwnedRequest};
use crate::roce::memory::{Purpose, sges};
use crate::roce::oracle::note_cause;
use crate::roce::reach;
use crate::roce::side::{Announcement, FailureCauses, Fast, Message, Request, Side, Statuses};

/// Mistakes of a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mistake {
    /// A key that is not valid, or no longer.
    Key,
    /// Bytes beyond the region, or before it.
    Range,
    /// A write to memory that may only be read.
    Right,
    /// A local key that is not valid.
    LocalKey,
    /// Local bytes beyond the region.
    LocalRange,
    /// A result for memory that this side may not write.
    LocalRight,
    /// An invalidation of a key that is not valid.
    Invalidate,
    /// A registration of a registered region.
    Register,
    /// A request that makes the peer invalidate a key that is not valid.
    RemoteInvalidate,
    /// A wrong key in a FETCH_ADD or COMPARE_SWAP.
    AtomicKey,
    /// A wrong key in an ATOMIC_WRITE.
    AtomicWriteKey,
    /// A wrong key in a FLUSH.
    FlushKey,
}

/// All mistakes: first those that every run draws, then those that only some runs draw.
pub(super) const MISTAKES: [Mistake; 12] = [
    Mistake::Key,
    Mistake::Range,
    Mistake::Right,
    Mistake::LocalKey,
    Mistake::LocalRange,
    Mistake::LocalRight,
    Mistake::Invalidate,
    Mistake::Register,
    Mistake::RemoteInvalidate,
    Mistake::AtomicKey,
    Mistake::AtomicWriteKey,
    Mistake::FlushKey,
];
/// Number of [`MISTAKES`] that every run draws.
pub(super) const MISTAKES_OF_ALL: usize = 9;

/// Addresses and keys that mistakes are made with.
struct Addresses {
    /// Address of the peer's shared memory.
    base: u64,
    /// Offset in bytes of the part of it that this side may write.
    target: usize,
    /// Address of the first byte behind that part.
    end: u64,
    /// Offset in bytes of the peer's words for atomics.
    words: usize,
    /// Offset in bytes of the peer's memory that may only be read.
    fixed: usize,
    /// The peer's key of its shared memory.
    shared: u32,
    /// The peer's key of its memory that may only be read.
    constant: u32,
    /// Address of this side's own memory.
    iova: u64,
    /// Local key of that memory.
    lkey: u32,
    /// Offset and length in bytes of what this side may use of it.
    own: (usize, usize),
    /// Offset in bytes of this side's memory that it may not write.
    own_fixed: usize,
    /// Local key of that memory.
    own_constant: u32,
}

impl Addresses {
    fn of(me: &Side, peer: &Side) -> Self {
        let (target, size) = peer.memory.span(&[Purpose::Target, Purpose::Words]);
        Self {
            base: peer.iova,
            target,
            end: peer.iova + (target + size) as u64,
            words: peer.memory.span(&[Purpose::Words]).0,
            fixed: peer.memory.span(&[Purpose::Constant]).0,
            shared: peer.shared.rkey,
            constant: peer.constant.rkey,
            iova: me.iova,
            lkey: me.local.lkey,
            own: me.memory.span(&[Purpose::Source, Purpose::Receive, Purpose::Sink]),
            own_fixed: me.memory.span(&[Purpose::Constant]).0,
            own_constant: me.constant.lkey,
        }
    }
}

/// A request that must fail, and its gather or scatter list.
struct Wrong {
    request: Request,
    place: Vec<Sge>,
}

impl App<'_> {
    /// Draws a request that must fail.
    pub(super) fn mistake(&mut self, kind: Mistake) -> Option<OwnedRequest> {
        reach::count_mistake(self.coverage, kind as usize);
        let len = self.len().max(8);
        let number = self.number();
        let mut request = Request::new(number, WcOpcode::RdmaWrite);
        request.must_fail = true;
        request.may = Statuses::only(Status::RemAccessErr);
        let at = Addresses::of(&self.sides[self.id], &self.sides[self.peer]);
        let (own, own_len) = at.own;
        let len = len.min(own_len) as u32;
        request.len = len;
        let place = vec![Sge { addr: at.iova + own as u64, len, lkey: at.lkey }];
        let mut wrong = Wrong { request, place };
        let op = self.wrong_op(kind, &at, &mut wrong);
        let Wrong { mut request, mut place } = wrong;
        request.opcode = opcode_of(&op);
        if matches!(op, SendOp::LocalInv(_) | SendOp::RegMr { .. } | SendOp::BindMw { .. }) {
            place.clear();
        }
        if matches!(op, SendOp::Read(_)) && kind != Mistake::LocalRight {
            let me = self.me();
            let (area, pieces) = me.memory.lend(Purpose::Sink, number, request.len as usize)?;
            place = sges(&pieces, at.iova, at.lkey);
            request.sink = Some(area);
            request.len = place[0].len;
        }
        if let SendOp::SendInv(key) = op {
            request.message = true;
            self.me().outgoing.push_back(Message {
                number,
                bytes: Vec::new(),
                len: 0,
                imm: None,
                invalidates: Some(key),
                write: false,
                bad_key: true,
                announcement: Announcement::Nothing,
            });
        }
        note_cause(self.sides, self.id, FailureCauses::MISUSE);
        Some(self.done(request, op, (place, Vec::new()), SendFlags::SIGNALED))
    }

    /// Draws the operation of a mistake, and makes the rest of the request what that needs.
    fn wrong_op(&mut self, kind: Mistake, at: &Addresses, wrong: &mut Wrong) -> SendOp {
        let Addresses { base, target, end, words, fixed, shared, constant, .. } = *at;
        let Addresses { iova, lkey, own: (own, own_len), own_fixed, own_constant, .. } = *at;
        let me = &self.sides[self.id];
        let len = u64::from(wrong.request.len);
        let remote = |addr, rkey| Remote { addr, rkey };
        let local = Statuses::only(Status::LocProtErr);
        let operation = Statuses::only(Status::LocQpOpErr);
        let bad = self.rng.next() as u32;
        match kind {
            Mistake::Key => match (&me.stale, bad % 3) {
                (Some(stale), _) => SendOp::Write(remote(stale.iova, stale.key)),
                (None, 0) => SendOp::Write(remote(base + target as u64, shared ^ (1 + bad % 255))),
                (None, 1) => SendOp::Read(remote(base + target as u64, shared ^ 1 << 30)),
                (None, _) => SendOp::Write(remote(base + target as u64, shared ^ 1 << 31)),
            },
            Mistake::Range => match bad % 3 {
                0 => {
                    // At most one packet: packets before the one with the wrong byte may be written
                    // [REQ-26].
                    let short = len.min(200);
                    (wrong.place[0].len, wrong.request.len) = (short as u32, short as u32);
                    SendOp::Write(remote(end - short + 1, shared))
                }
                1 => SendOp::Read(remote(base + target as u64 - 1, shared)),
                _ => SendOp::Write(remote(u64::MAX - 3, shared)),
            },
            Mistake::Right => SendOp::Write(remote(base + fixed as u64, constant)),
            Mistake::LocalKey => {
                wrong.place[0].lkey ^= 1 << 31;
                wrong.request.may = local;
                SendOp::Write(remote(base + target as u64, shared))
            }
            Mistake::LocalRange => {
                // At most one packet: packets before the one with the wrong byte would be sent.
                let short = len.min(200);
                wrong.place[0].addr = iova + (own + own_len) as u64 - short + 1;
                wrong.place[0].len = short as u32;
                wrong.request.len = short as u32;
                wrong.request.may = local;
                SendOp::Send
            }
            Mistake::LocalRight => {
                wrong.place =
                    vec![Sge { addr: iova + own_fixed as u64, len: 1, lkey: own_constant }];
                wrong.request.len = 1;
                wrong.request.may = local;
                SendOp::Read(remote(base + target as u64, shared))
            }
            Mistake::Invalidate => {
                wrong.request.may = operation;
                SendOp::LocalInv(lkey)
            }
            Mistake::Register => {
                wrong.request.may = operation;
                let key = me.fast.key();
                match me.fast {
                    Fast::Released(_) => {
                        if me.under.is_some() {
                            wrong.request.may = Statuses::only(Status::MwBindErr);
                        }
                        self.registration(key).0
                    }
                    _ => SendOp::LocalInv(key ^ 1 << 31),
                }
            }
            Mistake::AtomicKey => {
                (wrong.place[0].len, wrong.request.len) = (8, 8);
                let remote = remote(base + words as u64, shared ^ 1 << 31);
                match bad % 2 {
                    0 => SendOp::FetchAdd { remote, add: 1 },
                    _ => SendOp::CompareSwap { remote, compare: 0, swap: 1 },
                }
            }
            Mistake::AtomicWriteKey => {
                (wrong.place[0].len, wrong.request.len) = (8, 8);
                SendOp::AtomicWrite(remote(base + words as u64, shared ^ 1 << 31))
            }
            Mistake::FlushKey => {
                (wrong.place, wrong.request.len) = (Vec::new(), 0);
                let remote = remote(base + words as u64, shared ^ 1 << 31);
                SendOp::Flush { remote, of: FlushOf::Region, placement: Placement::GLOBAL }
            }
            Mistake::RemoteInvalidate => {
                // The bytes are delivered before the key is checked [RSP-18].
                wrong.request.must_fail = false;
                wrong.request.len = 0;
                wrong.place.clear();
                wrong.request.may = Statuses::only(Status::RemInvReqErr);
                SendOp::SendInv(shared)
            }
        }
    }
}

fn opcode_of(op: &SendOp) -> WcOpcode {
    match op {
        SendOp::Send | SendOp::SendInv(_) => WcOpcode::Send,
        SendOp::Read(_) => WcOpcode::RdmaRead,
        SendOp::FetchAdd { .. } => WcOpcode::FetchAdd,
        SendOp::CompareSwap { .. } => WcOpcode::CompSwap,
        SendOp::AtomicWrite(_) => WcOpcode::AtomicWrite,
        SendOp::Flush { .. } => WcOpcode::Flush,
        SendOp::LocalInv(_) => WcOpcode::LocalInv,
        SendOp::RegMr { .. } => WcOpcode::RegMr,
        SendOp::BindMw { .. } => WcOpcode::BindMw,
        _ => WcOpcode::RdmaWrite,
    }
}
