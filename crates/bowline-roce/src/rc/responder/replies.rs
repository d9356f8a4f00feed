//! Replies that a responder has queued, in order, and the saved operations that it can answer
//! again.
//!
//! ```text
//!   queue   Ack 6 | Read slot 0, from 7 | Ack 11 | Atomic slot 1 | Nak 13      sent from the left
//!   saved   [0: read 7..=10] [1: atomic 12]                                    a ring
//! ```
//!
//! Adjacent acknowledgements are merged [RSP-16], and so are NAKs. A saved operation is in the
//! queue at most once, and an unanswered operation does not give up its slot. So the queue has at
//! most five entries per slot and three more, whatever the peer sends.

use std::collections::VecDeque;
use std::time::Duration;

use bowline_base::Instant;
use bowline_verbs::Access;
use bowline_wire::roce::{Aeth, AtomicAckEth, Bth, NakCode, Opcode, Packet, Psn, Syndrome};

use super::RxCtx;
use crate::burst::Burst;
use crate::mr::KeyUser;

/// Most reports of gaps that are queued.
const GAPS_MAX: usize = 64;
/// Delays before an acknowledgement is repeated, and repeated again [RSP-24].
const REPEAT_AFTER: [Duration; 2] = [Duration::from_millis(50), Duration::from_millis(200)];

/// The part of a READ that is still to be answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ReadPart {
    pub(super) va: u64,
    pub(super) key: u32,
    pub(super) len: u32,
}

#[derive(Clone, Copy, Debug)]
enum SavedReply {
    Read(ReadPart),
    /// An atomic; the value before the operation.
    Atomic(u64),
    /// A FLUSH or ATOMIC WRITE, whose response has no data.
    Empty,
}

/// An operation that is not executed again when its request is repeated [RSP-3].
#[derive(Clone, Copy, Debug)]
struct Saved {
    reply: SavedReply,
    first: Psn,
    /// Number of PSNs of the responses.
    count: u32,
    msn: u32,
    /// The whole response has been sent at least once.
    answered: bool,
    /// A reply to the operation is in the queue.
    queued: bool,
}

#[derive(Clone, Copy, Debug)]
enum Reply {
    /// An acknowledgement that was repeated `round` times before.
    Ack {
        psn: Psn,
        msn: u32,
        round: usize,
    },
    Nak {
        psn: Psn,
        msn: u32,
        syndrome: Syndrome,
    },
    /// Packets from `psn` on are missing; none: all before it that were not reported have come.
    Gap {
        psn: Psn,
        count: u32,
    },
    /// The remaining responses of a READ, from `psn` on.
    Read {
        slot: usize,
        part: ReadPart,
        psn: Psn,
        started: bool,
    },
    Atomic {
        slot: usize,
        original: u64,
    },
    Empty {
        slot: usize,
    },
}

/// A scheduled repetition of an acknowledgement that may have been lost.
#[derive(Clone, Copy, Debug)]
struct AckRepeat {
    at: Instant,
    psn: Psn,
    msn: u32,
    round: usize,
}

/// Outcome of filling a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Filled {
    /// There was nothing to send.
    Nothing,
    /// One packet.
    Packet,
    /// One packet was filled, a NAK 0x62: the peer has lost its right to the memory it is reading
    /// [MR-10].
    Revoked,
}

/// Replies not sent yet, and operations answered already.
#[derive(Debug, Default)]
pub(super) struct Replies {
    queue: VecDeque<Reply>,
    saved: Vec<Saved>,
    /// The slot to use next; the oldest one when all are used.
    next: usize,
    answer_slots: usize,
    repeat: Option<AckRepeat>,
    /// Reports of gaps in the queue.
    gaps: usize,
}

impl Replies {
    /// Drops all replies and saved operations; from now on `answer_slots` operations are saved.
    pub(super) fn reset(&mut self, answer_slots: usize) {
        self.queue.clear();
        self.gaps = 0;
        self.saved.clear();
        self.next = 0;
        self.answer_slots = answer_slots;
        self.repeat = None;
    }

    /// Drops all replies and saved operations.
    pub(super) fn clear(&mut self) {
        self.reset(0);
    }

    pub(super) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// Tells whether the queue holds a single acknowledgement and nothing else.
    pub(super) fn is_one_ack(&self) -> bool {
        self.queue.len() == 1 && matches!(self.queue.front(), Some(Reply::Ack { .. }))
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.queue.len()
    }

    /// Queues an acknowledgement of everything up to `psn`, which is never before the last
    /// acknowledged PSN [RSP-16].
    pub(super) fn ack(&mut self, psn: Psn, msn: u32) {
        if let Some(Reply::Ack { .. }) = self.queue.back() {
            self.queue.pop_back();
        }
        self.queue.push_back(Reply::Ack { psn, msn, round: 0 });
    }

    /// Queues a NAK of `psn`. It acknowledges everything before `psn`, so it replaces
    /// acknowledgements and NAKs at the end of the queue.
    pub(super) fn nak(&mut self, psn: Psn, msn: u32, syndrome: Syndrome) {
        while let Some(Reply::Ack { .. } | Reply::Nak { .. }) = self.queue.back() {
            self.queue.pop_back();
        }
        self.queue.push_back(Reply::Nak { psn, msn, syndrome });
    }

    /// Tells whether one more report of a gap may be queued.
    pub(super) fn may_report_gap(&self) -> bool {
        self.gaps < GAPS_MAX
    }

    /// Queues the report that `count` packets from `psn` on are missing [CC-10].
    pub(super) fn report_gap(&mut self, psn: Psn, count: u32) {
        self.gaps += 1;
        self.queue.push_back(Reply::Gap { psn, count });
    }

    /// Queues the report that everything before `psn` has arrived but for the gaps that were
    /// reported [CC-14].
    pub(super) fn report_progress(&mut self, psn: Psn) {
        if let Some(Reply::Gap { count: 0, .. }) = self.queue.back() {
            self.queue.pop_back();
            self.gaps -= 1;
        }
        self.report_gap(psn, 0);
    }

    /// Removes a sequence NAK that has not been sent yet, after the missing packet has arrived.
    pub(super) fn forget_gap(&mut self) {
        while let Some(
            Reply::Ack { .. } | Reply::Nak { syndrome: Syndrome::Nak(NakCode::PsnSequence), .. },
        ) = self.queue.back()
        {
            self.queue.pop_back();
        }
    }

    /// Queues a NAK that refuses `psn` finally.
    pub(super) fn refuse(&mut self, psn: Psn, msn: u32, code: NakCode) {
        self.queue.push_back(Reply::Nak { psn, msn, syndrome: Syndrome::Nak(code) });
    }

    /// Tells whether one more operation can be saved: a slot is free, or its operation has been
    /// answered [RSP-6].
    pub(super) fn can_save(&self) -> bool {
        self.answer_slots != 0 && self.saved.get(self.next).is_none_or(|oldest| oldest.answered)
    }

    /// Queues the answer to a READ [RSP-14]; `can_save` must hold.
    pub(super) fn read(&mut self, psn: Psn, count: u32, msn: u32, part: ReadPart) {
        let slot = self.save(SavedReply::Read(part), psn, count, msn);
        self.queue.push_back(Reply::Read { slot, part, psn, started: false });
    }

    /// Queues the answer to an atomic operation [RSP-11]; `can_save` must hold.
    pub(super) fn atomic(&mut self, psn: Psn, msn: u32, original: u64) {
        let slot = self.save(SavedReply::Atomic(original), psn, 1, msn);
        self.queue.push_back(Reply::Atomic { slot, original });
    }

    /// Queues the answer to a FLUSH or ATOMIC WRITE [HDR-5]; `can_save` must hold.
    pub(super) fn empty(&mut self, psn: Psn, msn: u32) {
        let slot = self.save(SavedReply::Empty, psn, 1, msn);
        self.queue.push_back(Reply::Empty { slot });
    }

    /// Answers a repeated FLUSH or ATOMIC WRITE, as atomics are [RSP-3]. Tells whether it was
    /// saved.
    pub(super) fn repeat_empty(&mut self, psn: Psn) -> bool {
        let is_it = |saved: &Saved| matches!(saved.reply, SavedReply::Empty) && saved.first == psn;
        let Some(slot) = self.find_newest(is_it) else { return false };
        if !std::mem::replace(&mut self.saved[slot].queued, true) {
            self.queue.push_back(Reply::Empty { slot });
        }
        true
    }

    /// Changes the number of saved operations to `answer_slots`; the newest ones are kept.
    pub(super) fn resize(&mut self, answer_slots: usize) {
        let all = self.saved.len();
        if all > 0 && all == self.answer_slots {
            // Brings the oldest operation to the front.
            self.saved.rotate_left(self.next);
        }
        let turned = if all == self.answer_slots { self.next } else { 0 };
        let gone = all.saturating_sub(answer_slots);
        self.saved.drain(..gone);
        self.queue.retain_mut(|reply| {
            let Some(slot) = reply.slot_mut() else { return true };
            let place = (*slot + all - turned) % all.max(1);
            *slot = place.saturating_sub(gone);
            place >= gone
        });
        self.answer_slots = answer_slots;
        self.next = if self.saved.len() < answer_slots { self.saved.len() } else { 0 };
    }

    fn save(&mut self, reply: SavedReply, first: Psn, count: u32, msn: u32) -> usize {
        debug_assert!(self.can_save());
        let saved = Saved { reply, first, count, msn, answered: false, queued: true };
        let slot = self.next;
        self.next = (slot + 1) % self.answer_slots.max(1);
        match self.saved.get_mut(slot) {
            Some(oldest) => {
                // The peer must have its answer, otherwise it would have more operations
                // outstanding than allowed. So repeating that answer is useless.
                if oldest.queued {
                    self.queue.retain(|reply| reply.slot() != Some(slot));
                }
                *oldest = saved;
            }
            None => self.saved.push(saved),
        }
        slot
    }

    /// Answers a repeated READ request, or its rest, from `psn` on [RSP-3]. Tells whether the READ
    /// was saved.
    pub(super) fn repeat_read(&mut self, psn: Psn, count: u32, part: ReadPart) -> bool {
        let found = self.find_newest(|saved| {
            let SavedReply::Read(whole) = saved.reply else { return false };
            let skipped = psn.since(saved.first);
            skipped < saved.count && count <= saved.count - skipped && part.is_within(&whole)
        });
        let Some(slot) = found else { return false };
        let again = Reply::Read { slot, part, psn, started: false };
        if !std::mem::replace(&mut self.saved[slot].queued, true) {
            self.queue.push_back(again);
            return true;
        }
        // The READ is still being answered. If the peer wants a part that was sent already, the
        // answer goes back; otherwise the peer was only impatient.
        for reply in &mut self.queue {
            if let Reply::Read { slot: of, psn: at, .. } = reply
                && *of == slot
                && psn.is_before(*at)
            {
                *reply = again;
            }
        }
        true
    }

    /// Answers a repeated atomic request [RSP-3]. Tells whether it was saved.
    pub(super) fn repeat_atomic(&mut self, psn: Psn) -> bool {
        let found = self.find_newest(|saved| saved.original().is_some() && saved.first == psn);
        let Some(slot) = found else { return false };
        let saved = &mut self.saved[slot];
        if let Some(original) = saved.original()
            && !std::mem::replace(&mut saved.queued, true)
        {
            self.queue.push_back(Reply::Atomic { slot, original });
        }
        true
    }

    fn find_newest(&self, is_it: impl Fn(&Saved) -> bool) -> Option<usize> {
        let (newer, older) = (0..self.next.min(self.saved.len()), self.next..self.saved.len());
        newer.rev().chain(older.rev()).find(|slot| is_it(&self.saved[*slot]))
    }

    /// Appends the next packet to `out`, from base transport header to pad.
    pub(super) fn fill(&mut self, ctx: &mut RxCtx<'_>, dest_qpn: u32, out: &mut Burst) -> Filled {
        while let Some(reply) = self.queue.pop_front() {
            self.repeat = None;
            let filled = self.fill_one(ctx, dest_qpn, out, reply);
            if filled != Filled::Nothing {
                return filled;
            }
        }
        Filled::Nothing
    }

    fn fill_one(
        &mut self,
        ctx: &mut RxCtx<'_>,
        dest_qpn: u32,
        out: &mut Burst,
        reply: Reply,
    ) -> Filled {
        match reply {
            Reply::Ack { psn, msn, round } => {
                acknowledge(out, dest_qpn, psn, Syndrome::ACK, msn);
                self.repeat = REPEAT_AFTER.get(round).map(|pause| AckRepeat {
                    at: ctx.now + *pause,
                    psn,
                    msn,
                    round: round + 1,
                });
                ctx.counters.acks_sent += 1;
                ctx.counters.acks_repeated += u64::from(round > 0);
            }
            Reply::Nak { psn, msn, syndrome } => {
                count_nak(ctx, syndrome);
                acknowledge(out, dest_qpn, psn, syndrome, msn);
            }
            Reply::Gap { psn, count } => {
                self.gaps -= 1;
                ctx.counters.gaps_reported += u64::from(count > 0);
                acknowledge(out, dest_qpn, psn, Syndrome::GAP, count & 0xff_ffff);
            }
            Reply::Atomic { slot, original } => {
                let saved = &mut self.saved[slot];
                (saved.answered, saved.queued) = (true, false);
                let mut packet = response(Opcode::AtomicAcknowledge, dest_qpn, saved.first);
                packet.aeth = Some(Aeth { syndrome: Syndrome::ACK, msn: saved.msn });
                packet.atomic_ack = Some(AtomicAckEth { original });
                packet.emit(&mut out.bytes);
            }
            Reply::Empty { slot } => {
                let saved = &mut self.saved[slot];
                (saved.answered, saved.queued) = (true, false);
                let mut packet = response(Opcode::ReadResponseOnly, dest_qpn, saved.first);
                packet.aeth = Some(Aeth { syndrome: Syndrome::ACK, msn: saved.msn });
                packet.emit(&mut out.bytes);
            }
            Reply::Read { slot, part, psn, started } => {
                return self.fill_read(ctx, dest_qpn, out, (slot, part, psn, started));
            }
        }
        Filled::Packet
    }

    /// Fills the next response of a READ. The key is looked up again for each packet [MR-10]; that
    /// it is withdrawn concerns later requests only.
    fn fill_read(
        &mut self,
        ctx: &mut RxCtx<'_>,
        dest_qpn: u32,
        out: &mut Burst,
        (slot, part, psn, started): (usize, ReadPart, Psn, bool),
    ) -> Filled {
        let msn = self.saved[slot].msn;
        let len = part.len.min(ctx.mtu as u32); // at most 4096 [HDR-7]
        let left = part.len - len;
        let need = Access::REMOTE_READ;
        let span = match len {
            0 => None, // neither key nor address are looked at [RSP-10]
            _ => {
                let whose = KeyUser::accepted(ctx.pd, ctx.qpn);
                Some(ctx.mrs.resolve(whose, part.key, part.va, len.into(), need))
            }
        };
        let span = match span.transpose() {
            Ok(span) => span,
            // The peer may have had its answer long ago, and this request may be a late duplicate.
            Err(_) if self.saved[slot].answered => {
                self.saved[slot].queued = false;
                ctx.counters.requests_discarded += 1;
                return Filled::Nothing;
            }
            Err(_) => return self.revoke(ctx, out, (dest_qpn, psn, msn)),
        };
        let opcode = match (started, left == 0) {
            (false, true) => Opcode::ReadResponseOnly,
            (false, false) => Opcode::ReadResponseFirst,
            (true, false) => Opcode::ReadResponseMiddle,
            (true, true) => Opcode::ReadResponseLast,
        };
        let mut packet = response(opcode, dest_qpn, psn);
        packet.aeth = Some(Aeth { syndrome: Syndrome::ACK, msn });
        let filled = out.push(&packet, len as usize, |out| {
            span.is_none_or(|span| span.reaches(|span| span.append_to(out)))
        });
        if !filled {
            return self.revoke(ctx, out, (dest_qpn, psn, msn));
        }
        if left == 0 {
            let saved = &mut self.saved[slot];
            (saved.answered, saved.queued) = (true, false);
        } else {
            let va = part.va.wrapping_add(u64::from(len));
            let part = ReadPart { va, len: left, ..part };
            self.queue.push_front(Reply::Read { slot, part, psn: psn.next(), started: true });
        }
        Filled::Packet
    }

    /// Refuses to answer a READ any further: its memory is not there any more.
    fn revoke(
        &mut self,
        ctx: &mut RxCtx<'_>,
        out: &mut Burst,
        (dest_qpn, psn, msn): (u32, Psn, u32),
    ) -> Filled {
        self.clear();
        let syndrome = Syndrome::Nak(NakCode::RemoteAccess);
        count_nak(ctx, syndrome);
        acknowledge(out, dest_qpn, psn, syndrome, msn);
        Filled::Revoked
    }

    /// Returns when an acknowledgement is to be repeated.
    pub(super) fn poll_timeout(&self) -> Option<Instant> {
        self.repeat.map(|repeat| repeat.at)
    }

    /// Repeats the last acknowledgement if its time has come and nothing was sent since [RSP-24].
    pub(super) fn handle_timeout(&mut self, now: Instant) {
        if let Some(repeat) = self.repeat.take_if(|repeat| repeat.at <= now)
            && self.queue.is_empty()
        {
            let AckRepeat { psn, msn, round, .. } = repeat;
            self.queue.push_back(Reply::Ack { psn, msn, round });
        }
    }
}

impl Saved {
    const fn original(&self) -> Option<u64> {
        match self.reply {
            SavedReply::Atomic(original) => Some(original),
            SavedReply::Read(_) | SavedReply::Empty => None,
        }
    }
}

impl Reply {
    const fn slot(&self) -> Option<usize> {
        match self {
            Self::Read { slot, .. } | Self::Atomic { slot, .. } | Self::Empty { slot } => {
                Some(*slot)
            }
            Self::Ack { .. } | Self::Nak { .. } | Self::Gap { .. } => None,
        }
    }

    const fn slot_mut(&mut self) -> Option<&mut usize> {
        match self {
            Self::Read { slot, .. } | Self::Atomic { slot, .. } | Self::Empty { slot } => {
                Some(slot)
            }
            Self::Ack { .. } | Self::Nak { .. } | Self::Gap { .. } => None,
        }
    }
}

impl ReadPart {
    /// Tells whether this part lies within `whole`.
    const fn is_within(&self, whole: &Self) -> bool {
        if self.len == 0 {
            return whole.len == 0; // of any key and address [RSP-10]
        }
        let Some(skipped) = self.va.checked_sub(whole.va) else { return false };
        self.key == whole.key
            && skipped <= whole.len as u64
            && self.len as u64 <= whole.len as u64 - skipped
    }
}

/// Makes a response packet without extension headers [RSP-17].
fn response(opcode: Opcode, dest_qpn: u32, psn: Psn) -> Packet<'static> {
    Packet::new(opcode, Bth { dest_qpn, psn, ..Bth::default() })
}

fn acknowledge(out: &mut Burst, dest_qpn: u32, psn: Psn, syndrome: Syndrome, msn: u32) {
    let mut packet = response(Opcode::Acknowledge, dest_qpn, psn);
    packet.aeth = Some(Aeth { syndrome, msn });
    packet.emit(&mut out.bytes);
}

fn count_nak(ctx: &mut RxCtx<'_>, syndrome: Syndrome) {
    let counters = &mut *ctx.counters;
    let counter = match syndrome {
        Syndrome::Rnr(_) => &mut counters.rnr_naks_sent,
        Syndrome::Nak(NakCode::PsnSequence) => &mut counters.naks_sequence_sent,
        Syndrome::Nak(NakCode::RemoteAccess) => &mut counters.naks_access_sent,
        Syndrome::Nak(NakCode::RemoteOperational) => &mut counters.naks_operation_sent,
        _ => &mut counters.naks_invalid_sent,
    };
    *counter += 1;
}
