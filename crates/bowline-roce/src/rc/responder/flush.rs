//! FLUSH and ATOMIC WRITE: requests that are answered by an empty READ response [HDR-5], and that
//! are saved and answered again like atomics.
//!
//! A flush to global visibility is a fence here, since the memory is ordinary memory of the
//! processor. The memory does not survive a loss of power, so no region or queue pair has the right
//! that a flush to persistent memory needs.

use std::sync::atomic::{Ordering, fence};

use bowline_verbs::{Access, Placement};
use bowline_wire::roce::{Opcode, Packet};

use super::{Fault, Responder, RxCtx};
use crate::recvq::MESSAGE_MAX;

/// Levels of selectivity of a flush [HDR-2].
const RANGE: u32 = 0;
const REGION: u32 = 1;

impl Responder {
    /// Tells whether a request is answered by an empty READ response.
    pub(super) const fn has_empty_response(opcode: Opcode) -> bool {
        matches!(opcode, Opcode::Flush | Opcode::AtomicWrite)
    }

    /// Executes a FLUSH or ATOMIC WRITE.
    pub(super) fn flush_or_atomic_write(
        &mut self,
        ctx: &mut RxCtx<'_>,
        packet: &Packet<'_>,
    ) -> Result<(), Fault> {
        if packet.opcode == Opcode::Flush {
            self.flush_memory(ctx, packet)?;
        } else {
            self.atomic_write(ctx, packet)?;
        }
        self.count_message();
        let psn = packet.bth.psn;
        self.replies.empty(psn, self.msn);
        self.expected = psn.next();
        self.executed = psn;
        Ok(())
    }

    fn flush_memory(&self, ctx: &RxCtx<'_>, packet: &Packet<'_>) -> Result<(), Fault> {
        let (Some(feth), Some(reth)) = (packet.feth, packet.reth) else {
            return Err(Fault::Invalid);
        };
        let wanted = Placement::from_bits((feth & 0xf) as u8).ok_or(Fault::Invalid)?;
        let whole = match feth >> 4 & 3 {
            RANGE => false,
            REGION => true,
            _ => return Err(Fault::Invalid),
        };
        if wanted.is_empty() || !packet.payload.is_empty() {
            return Err(Fault::Invalid);
        }
        let mut need = Access::empty();
        need.set(Access::FLUSH_GLOBAL, wanted.contains(Placement::GLOBAL));
        need.set(Access::FLUSH_PERSISTENT, wanted.contains(Placement::PERSISTENT));
        if !ctx.access.contains(need) || !self.replies.can_save() {
            return Err(Fault::Invalid); // [RSP-5], [RSP-6]
        }
        if whole {
            ctx.mrs.check_whole(ctx.pd, reth.rkey, need).map_err(|_| Fault::Access)?;
        } else if u64::from(reth.len) > MESSAGE_MAX {
            return Err(Fault::Invalid); // [HDR-12]
        } else if reth.len > 0 {
            let len = u64::from(reth.len);
            ctx.mrs.check(ctx.pd, reth.rkey, reth.va, len, need).map_err(|_| Fault::Access)?;
        }
        fence(Ordering::SeqCst);
        Ok(())
    }

    fn atomic_write(&self, ctx: &RxCtx<'_>, packet: &Packet<'_>) -> Result<(), Fault> {
        if !ctx.access.contains(Access::REMOTE_WRITE) || !self.replies.can_save() {
            return Err(Fault::Invalid); // [RSP-5], [RSP-6]
        }
        let (Some(reth), Ok(bytes)) = (packet.reth, <[u8; 8]>::try_from(packet.payload)) else {
            return Err(Fault::Invalid); // [RSP-9]
        };
        if reth.len != 8 {
            return Err(Fault::Invalid);
        }
        let span = ctx
            .mrs
            .resolve((ctx.pd, ctx.qpn), reth.rkey, reth.va, 8, Access::REMOTE_WRITE)
            .map_err(|_| Fault::Access)?;
        if !reth.va.is_multiple_of(8) {
            return Err(Fault::Invalid); // as [RSP-11]
        }
        // The bytes keep their order, like those of a WRITE.
        let reached = span.reaches(|span| {
            span.update(0, |_| u64::from_ne_bytes(bytes));
        });
        if reached { Ok(()) } else { Err(Fault::Access) }
    }
}
