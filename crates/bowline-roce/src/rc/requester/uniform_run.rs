//! Fast path for a run of uniform packets: packets of one message that differ only in numbers,
//! addresses and data, as most packets of a long message do.

use bowline_verbs::{Access, SendOp};
use bowline_wire::roce::{BTH_LEN, Bth, ICRC_LEN, Packet, RETH_LEN, Reth};

use super::send::opcode;
use super::{Requester, TxCtx};
use crate::burst::Burst;
use crate::sendq::{Request, prefetch_len};

impl Requester {
    /// Appends uniform packets of the request at the cursor, up to the first packet that may
    /// differ: the last one of the message, of the burst or of a gather-list element, or one that
    /// requests an acknowledgement. That packet, and any error of the request, is left to
    /// [`fill`](Self::fill). Key and address are looked up once for the whole run [REQ-16].
    pub(crate) fn fill_uniform_run(&mut self, ctx: &mut TxCtx<'_>, out: &mut Burst) {
        #[cfg(test)]
        if tests::one_by_one() {
            return;
        }
        let Some(mtu) = self.mtu else { return };
        self.window.set_path_window(ctx.path.window_packets());
        let Some(request) =
            self.cursor.request(&self.queue).filter(|request| self.in_uniform_run(request))
        else {
            return;
        };
        let (next, sent) = (self.cursor.next(), self.cursor.sent());
        let mut reth = match &request.op {
            SendOp::Write(remote) if request.per_packet => Some(Reth {
                va: remote.addr.wrapping_add(u64::from(sent) * mtu as u64),
                rkey: remote.rkey,
                len: mtu as u32,
            }),
            _ => None,
        };
        let headers = BTH_LEN + if reth.is_some() { RETH_LEN } else { 0 };
        let left = (request.packets - sent) as usize;
        let room = out.room(ctx.gso, headers + mtu + ICRC_LEN);
        let until_ack_req = self.window.packets_until_ack_req(next) as usize;
        let on_path = ctx.path.room(ctx.now, headers + mtu + ICRC_LEN);
        let count = left.min(room).min(until_ack_req).min(on_path);
        let Some(count) = count.checked_sub(1) else { return };
        if count == 0 {
            return;
        }
        let (offset, ahead) = (sent * mtu as u32, prefetch_len(mtu));
        let len = count * mtu + ahead;
        let index = self.cursor.index();
        let found =
            self.queue.contiguous(index, ctx.mrs, ctx.pd, offset, mtu..=len, Access::empty());
        // Memory of another process may end within a run: it is looked at packet by packet.
        let Some(span) = found.filter(|span| !span.is_foreign()) else { return };
        let count = count.min(span.len() / mtu);
        #[cfg(test)]
        tests::note_together(count);

        let op = opcode(&request.op, request.per_packet, request.per_packet);
        let bth = Bth { dest_qpn: ctx.dest_qpn.0, psn: next, ..Bth::default() };
        let mut packet = Packet::new(op, bth);
        let begin = out.bytes.len();
        for k in 0..count {
            packet.reth = reth;
            span.prefetch((k + 1) * mtu, ahead);
            let start = out.bytes.len();
            out.push(&packet, mtu, |out| {
                span.append_part(k * mtu, mtu, out);
                true
            });
            out.seal(start);
            packet.bth.psn = packet.bth.psn.next();
            reth = reth.map(|reth| Reth { va: reth.va.wrapping_add(mtu as u64), ..reth });
        }

        // The timers start with the first packet of the run. None of its packets fills the window.
        self.note_sent(ctx, next + 1);
        self.cursor.advance(count as u32);
        self.window.sent(self.cursor.next(), count as u32 - 1);
        self.window.close_if_full(self.cursor.next());
        let counted = ctx.path.sent(ctx.now, count, out.bytes.len() - begin);
        self.log.sent(ctx.now, next, self.cursor.next(), counted);
    }

    /// Tells whether the next packets of a request may be sent now, for the first time, and are
    /// uniform: neither first nor last of the message, or of a request sent `per_packet`.
    fn in_uniform_run(&self, request: &Request) -> bool {
        let one_after_another =
            !self.recovery.is_paused() && !self.recovery.has_repair() && self.holes.due().is_none();
        let next = self.cursor.next();
        let fresh = next == self.window.end();
        request.is_started()
            && request.is_data()
            && (request.per_packet || self.cursor.sent() > 0)
            && one_after_another
            && fresh
            && self.window.allows(next)
    }
}

#[cfg(test)]
mod tests;
