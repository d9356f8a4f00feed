//! Memory that the program has dropped, but from which packets may have to be sent again: it stays
//! registered until that is impossible [RT-98].
//!
//! The response to a request may arrive before the acknowledgement of its last packet, and only
//! some sends are signalled.

use std::collections::VecDeque;

use bowline_verbs::Remote;

use super::Session;
use crate::{ConnId, Order, PathId, RegionId, Tag, WrKind};

/// Bytes of such memory that may wait for the next signalled send or heartbeat.
const WAIT_MAX: usize = 4 << 20;

/// A dropped region that only sends keep registered.
#[derive(Debug)]
struct LingeringRegion {
    region: RegionId,
    bytes: usize,
    /// Number of sends of each connection after whose completion the region is free.
    fences: Vec<(ConnId, u64)>,
}

/// All such regions, in the order of their fences.
#[derive(Debug, Default)]
pub(super) struct Lingering {
    regions: VecDeque<LingeringRegion>,
    bytes: usize,
}

impl Lingering {
    pub(super) fn is_empty(&self) -> bool {
        self.regions.is_empty()
    }
}

impl Session {
    /// Ends a registration that no request uses, once no packet can have to be sent again from it.
    /// The next request of each connection or the next heartbeat of the session shows that; if many
    /// bytes wait, fences are posted at once.
    pub(super) fn order_drop(&mut self, gone: Option<RegionId>) {
        let Some(region) = gone else { return };
        let mut fences = Vec::new();
        for inc_id in self.incarnations.ids() {
            let Some(incarnation) =
                self.incarnations.get_mut(inc_id).filter(|incarnation| incarnation.is_live())
            else {
                continue;
            };
            for (cid, conn) in (0..).zip(&mut incarnation.conns) {
                fences.extend(conn.fence().map(|fence| (ConnId { path: inc_id, cid }, fence)));
            }
        }
        if fences.is_empty() {
            self.regions.remove(region);
            self.orders.push_back(Order::DropRegion { region });
            return;
        }
        let Some(kept) = self.regions.get_mut(region) else { return };
        kept.lingers = true;
        let bytes = kept.buffer.len();
        self.lingering.bytes += bytes;
        self.lingering.regions.push_back(LingeringRegion { region, bytes, fences });
        if self.lingering.bytes > WAIT_MAX {
            self.incarnations.ids().into_iter().for_each(|inc_id| self.post_fences(inc_id));
        }
    }

    /// Drops regions whose last sends have completed.
    pub(super) fn drop_unfenced(&mut self) {
        while let Some(LingeringRegion { region, bytes, fences }) = self.lingering.regions.front() {
            let over = |(conn, fence): &(ConnId, u64)| {
                let incarnation =
                    self.incarnations.get(conn.path).filter(|incarnation| incarnation.is_live());
                let conn = incarnation
                    .and_then(|incarnation| incarnation.conns.get(usize::from(conn.cid)));
                conn.is_none_or(|conn| conn.is_past(*fence))
            };
            if !fences.iter().all(over) {
                return;
            }
            let (region, bytes) = (*region, *bytes);
            self.lingering.bytes -= bytes;
            self.lingering.regions.pop_front();
            self.regions.remove(region);
            self.orders.push_back(Order::DropRegion { region });
        }
    }

    /// Sends nothing, but signalled, on connections where somebody waits for the end of what was
    /// sent and nobody sends more. The server does not notice: a write of no bytes needs no key and
    /// takes no receive.
    pub(super) fn post_fences(&mut self, id: PathId) {
        let Some(incarnation) =
            self.incarnations.get_mut(id).filter(|incarnation| incarnation.is_live())
        else {
            return;
        };
        let start = self.batch.mems.len();
        for (cid, of) in (0..).zip(&mut incarnation.conns) {
            if of.fenced && of.has_room(0) {
                let (conn, tag) = (ConnId { path: id, cid }, Tag::new(Tag::FENCE, 0));
                of.post(&mut self.batch, conn, tag, WrKind::Write(Remote::default()), start);
            }
        }
    }
}
