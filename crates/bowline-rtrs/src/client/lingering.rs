//! Memory that the program is through with and that was sent from: it stays registered until
//! nothing can be sent again [RT-98].
//!
//! The answer to a request may be quicker than the acknowledgement of its last packet, and only
//! some sends tell that they are over.

use std::collections::VecDeque;

use bowline_verbs::Remote;

use super::Session;
use crate::{ConnId, Order, PathId, RegionId, Tag, WrKind};

/// Bytes that may wait for what is sent next anyhow, or for the next heartbeat.
const WAIT_MAX: usize = 4 << 20;

/// A region that only sends keep.
#[derive(Debug)]
struct One {
    region: RegionId,
    bytes: usize,
    /// The sends after which nothing is to be sent again: connections, and how many of each.
    fences: Vec<(ConnId, u64)>,
}

/// All of them, in the order of their fences.
#[derive(Debug, Default)]
pub(super) struct Lingering {
    all: VecDeque<One>,
    bytes: usize,
}

impl Lingering {
    pub(super) fn is_empty(&self) -> bool {
        self.all.is_empty()
    }
}

impl Session {
    /// Ends a registration that no request uses, once what was sent from it cannot be sent again.
    /// The next request of the connection tells, or the next heartbeat of the session does; when
    /// much waits for that, it is asked at once.
    pub(super) fn order_drop(&mut self, gone: Option<RegionId>) {
        let Some(region) = gone else { return };
        let mut fences = Vec::new();
        for lid in self.links.ids() {
            let Some(link) = self.links.get_mut(lid).filter(|link| link.is_live()) else {
                continue;
            };
            for (cid, conn) in (0..).zip(&mut link.conns) {
                fences.extend(conn.fence().map(|fence| (ConnId { path: lid, cid }, fence)));
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
        self.lingering.all.push_back(One { region, bytes, fences });
        if self.lingering.bytes > WAIT_MAX {
            self.links.ids().into_iter().for_each(|lid| self.end_fences(lid));
        }
    }

    /// Drops regions whose last sends have completed.
    pub(super) fn look_at_lingering(&mut self) {
        while let Some(One { region, bytes, fences }) = self.lingering.all.front() {
            let over = |(conn, fence): &(ConnId, u64)| {
                let link = self.links.get(conn.path).filter(|link| link.is_live());
                let conn = link.and_then(|link| link.conns.get(usize::from(conn.cid)));
                conn.is_none_or(|conn| conn.is_past(*fence))
            };
            if !fences.iter().all(over) {
                return;
            }
            let (region, bytes) = (*region, *bytes);
            self.lingering.bytes -= bytes;
            self.lingering.all.pop_front();
            self.regions.remove(region);
            self.orders.push_back(Order::DropRegion { region });
        }
    }

    /// Sends nothing, but signalled, on connections where somebody waits for the end of what was
    /// sent and nobody sends more. The server does not notice: a write of no bytes needs no key and
    /// takes no receive.
    pub(super) fn end_fences(&mut self, id: PathId) {
        let Some(link) = self.links.get_mut(id).filter(|link| link.is_live()) else { return };
        let start = self.batch.mems.len();
        for (cid, of) in (0..).zip(&mut link.conns) {
            if of.fenced && of.has_room(0) {
                let (conn, tag) = (ConnId { path: id, cid }, Tag::new(Tag::FENCE, 0));
                of.post(&mut self.batch, conn, tag, WrKind::Write(Remote::default()), start);
            }
        }
    }
}
