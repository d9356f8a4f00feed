//! A WRITE of a peer that is coming in, on a connection of either kind.

use bowline_verbs::{Access, Piece};
use bowline_wire::roce::Packet;

use crate::rc::responder::RxCtx;
use crate::recvq::MESSAGE_MAX;

/// A WRITE with `left` of its `total` bytes missing, from address `va` on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct IncomingWrite {
    key: u32,
    va: u64,
    left: u32,
    total: u32,
}

impl IncomingWrite {
    /// Returns the WRITE that a packet belongs to: the current one, or that which the packet
    /// begins. `None`: it does neither.
    pub(crate) fn of(current: Option<Self>, packet: &Packet<'_>) -> Option<Self> {
        let begun = || {
            let reth = packet.reth?;
            Some(Self { key: reth.rkey, va: reth.va, left: reth.len, total: reth.len })
        };
        current.or_else(begun)
    }

    /// Returns its length.
    pub(crate) const fn total(&self) -> u32 {
        self.total
    }

    /// Returns how many bytes are missing.
    pub(crate) const fn left(&self) -> usize {
        self.left as usize
    }

    /// Tells whether a packet has the length that its opcode, the MTU and what is missing allow
    /// [RSP-9].
    pub(crate) fn fits(&self, packet: &Packet<'_>, mtu: usize) -> bool {
        let (op, now) = (packet.opcode, packet.payload.len());
        // More than one packet is missing exactly if the opcode says that more follow.
        let more = self.left() > mtu;
        u64::from(self.total) <= MESSAGE_MAX
            && op.payload_rule().allows(now, mtu)
            && op.ends() != more
            && now == if more { mtu } else { self.left() }
    }

    /// Writes the payload of the next packet to its place. Returns what is missing then, and `None`
    /// if the key does not allow it.
    ///
    /// The whole rest of the range must be valid for the first packet [RSP-10]. It is checked again
    /// for the others, since the region may be gone. Nothing is checked for an empty WRITE.
    pub(crate) fn place(self, ctx: &RxCtx<'_>, bytes: &[u8]) -> Option<Self> {
        if self.left > 0 {
            let (whose, need) = ((ctx.pd, ctx.qpn), Access::REMOTE_WRITE);
            let span =
                ctx.mrs.resolve(whose, self.key, self.va, u64::from(self.left), need).ok()?;
            if !span.reaches(|span| span.write(0, bytes)) {
                return None;
            }
        }
        Some(self.without(bytes.len()))
    }

    /// Returns where the next bytes have their place, at most `most` of them, if
    /// [`place`](Self::place) would write them.
    pub(crate) fn placement(&self, ctx: &RxCtx<'_>, most: u64) -> Option<Piece> {
        let (whose, need) = ((ctx.pd, ctx.qpn), Access::REMOTE_WRITE);
        ctx.mrs.check(whose, self.key, self.va, u64::from(self.left), need).ok()?;
        ctx.mrs.resolve(whose, self.key, self.va, most, need).ok()?.first_contiguous()
    }

    /// Returns what is missing when its next bytes are there.
    #[must_use]
    pub(crate) const fn without(self, bytes: usize) -> Self {
        let va = self.va.wrapping_add(bytes as u64);
        // Never more than are missing, nor than a packet has.
        Self { va, left: self.left.saturating_sub(bytes as u32), ..self }
    }
}
