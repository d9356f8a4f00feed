//! Keys that are good for one READ only [RT-42], [RT-43].
//!
//! ```text
//!   posted:   register memory under the next key of the permit, then the request, which asks the
//!             server to invalidate the key
//!   answer:   the server has invalidated it -> the request ends
//!             it has not                    -> invalidated here, then the request ends [RT-54]
//!   link lost: all keys of the link are ended before anything else of it [RS-8]
//! ```
//! So the program hears of the end of a request only when the server cannot reach its memory any
//! more [RT-69]. Keys belong to a link: what moves to another one gets a key of that.

use std::collections::VecDeque;

use bowline_wire::rtrs::Dir;

use super::config::ReadKeys;
use super::link::{HEARTBEAT_RESERVE, Link};
use super::{PathAddr, Session};
use crate::{ConnId, Done, Errno, Instant, MemRef, Order, PathId, PortAttr, Tag, WrKind};

/// Most pieces of a request [RT-42].
pub(super) const PIECES_MAX: usize = 128;

/// Where a link stands with its keys.
#[derive(Debug, Default)]
pub(super) enum Keys {
    /// Nobody has needed any.
    #[default]
    None,
    /// They are being made.
    Asked,
    /// One for each permit, the one used last, and whose each is, by its upper 24 bits in order.
    Ready(Vec<u32>, Vec<(u32, u16)>),
    /// They could not be made.
    Failed(Errno),
}

impl Keys {
    fn made(keys: Vec<u32>) -> Self {
        let mut owners: Vec<(u32, u16)> = keys.iter().map(|key| key >> 8).zip(0..).collect();
        owners.sort_unstable();
        Self::Ready(keys, owners)
    }

    /// The key of a permit.
    fn of(&self, index: u16) -> Option<u32> {
        match self {
            Self::Ready(keys, _) => keys.get(usize::from(index)).copied(),
            _ => None,
        }
    }

    /// Takes the next key of a permit.
    pub(super) fn next(&mut self, index: u16) -> Option<u32> {
        let Self::Ready(keys, _) = self else { return None };
        let key = keys.get_mut(usize::from(index))?;
        *key = bowline_verbs::next_key(*key);
        Some(*key)
    }

    /// Whose key this is.
    fn owner(&self, key: u32) -> Option<u16> {
        let Self::Ready(_, owners) = self else { return None };
        let at = owners.binary_search_by_key(&(key >> 8), |(name, _)| *name).ok()?;
        let (_, index) = owners.get(at)?;
        (self.of(*index) == Some(key)).then_some(*index)
    }

    pub(super) const fn is_ready(&self) -> bool {
        matches!(self, Self::Ready(..))
    }
}

/// What the server may do with the memory of a request in flight.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Grant {
    /// The request has no key of its own, or is not posted.
    #[default]
    None,
    /// It may write there.
    Given,
    /// No more.
    Over,
}

/// Joins pieces that follow each other.
pub(super) fn join(pieces: &mut Vec<MemRef>) {
    pieces.dedup_by(|next, before| {
        let follows = before.region == next.region
            && before.offset.checked_add(before.len.into()) == Some(next.offset);
        let len = before.len.checked_add(next.len).filter(|_| follows);
        if let Some(len) = len {
            before.len = len;
        }
        len.is_some()
    });
}

impl Link {
    /// Sees to it that there are keys, one for each permit.
    ///
    /// # Errors
    /// [`Errno::EINVAL`] when the device has none; why they could not be made.
    pub(super) fn want_keys(
        &mut self,
        path: PathId,
        device: Option<&PortAttr>,
        orders: &mut VecDeque<Order>,
    ) -> Result<(), Errno> {
        match self.keys {
            Keys::Ready(..) | Keys::Asked => Ok(()),
            Keys::Failed(errno) => Err(errno),
            Keys::None if device.is_none_or(|device| !device.fast_registration) => {
                Err(Errno::EINVAL)
            }
            Keys::None => {
                self.keys = Keys::Asked;
                let count = self.geometry.map_or(0, |geometry| geometry.queue_depth());
                orders.push_back(Order::AddKeys { path, port: self.port, count });
                Ok(())
            }
        }
    }
}

impl Session {
    /// Tells whether the devices of these paths can do what the session is to do with keys.
    pub(super) fn suits<'a>(&self, mut addrs: impl Iterator<Item = &'a PathAddr>) -> bool {
        let fast = |addr: &PathAddr| {
            let port = self.ports.get(usize::from(addr.port.0));
            port.is_none_or(|port| port.fast_registration)
        };
        self.config.read_keys == ReadKeys::LongLived || addrs.all(fast)
    }

    /// Tells whether a READ of so many pieces has a key of its own.
    pub(super) fn is_fast(&self, dir: Dir, pieces: usize) -> bool {
        let per_request = self.config.read_keys == ReadKeys::PerRequest;
        dir == Dir::Read && (pieces > 1 || pieces == 1 && per_request)
    }

    /// Keys were made, or not.
    pub(super) fn on_keys(&mut self, now: Instant, lid: PathId, keys: Result<Vec<u32>, Errno>) {
        let depth = self.agreed.map_or(0, |agreed| usize::from(agreed.depth));
        let Some(link) = self.links.get_mut(lid) else { return };
        if !matches!(link.keys, Keys::Asked) {
            return;
        }
        match keys {
            Ok(keys) if keys.len() == depth => link.keys = Keys::made(keys),
            Ok(_) => link.keys = Keys::Failed(Errno::ENOMEM),
            Err(errno) => link.keys = Keys::Failed(errno),
        }
        if let Keys::Failed(errno) = link.keys {
            if self.config.read_keys == ReadKeys::PerRequest {
                return self.fail(now, lid, errno);
            }
            self.end_keyless(now, lid, errno);
        }
        let conns = self.links.get(lid).map_or(0, |link| link.conns.len() as u16);
        for cid in 0..conns {
            self.post_waiting(ConnId { path: lid, cid });
        }
    }

    /// Ends the requests that wait for keys there will not be.
    fn end_keyless(&mut self, now: Instant, lid: PathId, errno: Errno) {
        let mut given_up = false;
        for index in 0..self.requests.len() as u16 {
            let request = &self.requests[usize::from(index)];
            if !request.running || request.link != lid || !request.fast {
                continue;
            }
            given_up |= request.moved;
            let cid = usize::from(request.cid);
            if let Some(link) = self.links.get_mut(lid) {
                link.conns[cid].waiting.retain(|waiting| *waiting != index);
            }
            self.leave_link(index);
            self.end_request(now, index, errno.neg());
        }
        if given_up {
            self.fail_joined(now, true);
        }
    }

    /// Gives the server the memory of a request about to be posted. Returns the key.
    pub(super) fn grant(&mut self, index: u16) -> Option<u32> {
        let request = &mut self.requests[usize::from(index)];
        let link = self.links.get_mut(request.link)?;
        let key = link.keys.next(index)?;
        request.grant = Grant::Given;
        let start = self.batch.mems.len();
        self.batch.mems.extend_from_slice(&request.data);
        let conn = ConnId { path: request.link, cid: request.cid };
        let of = &mut link.conns[usize::from(request.cid)];
        of.granted += 1;
        let tag = Tag::new(Tag::KEY, index.into());
        of.post_unsignalled(&mut self.batch, conn, tag, WrKind::Register(key), start);
        Some(key)
    }

    /// The server has invalidated a key; `false` if it is none of a request on this connection.
    pub(super) fn on_invalidated(&mut self, conn: ConnId, key: u32) -> bool {
        let link = self.links.get(conn.path);
        let Some(index) = link.and_then(|link| link.keys.owner(key)) else { return false };
        let request = &mut self.requests[usize::from(index)];
        let mine = request.running && (request.link, request.cid) == (conn.path, conn.cid);
        let given = mine && request.grant == Grant::Given && request.answered.is_none();
        if given {
            request.grant = Grant::Over;
        }
        given
    }

    /// An answer came while the server may reach the memory still: the key is invalidated first
    /// [RT-54], [RT-69]. `false` when there is nothing to wait for.
    pub(super) fn revoke(&mut self, conn: ConnId, index: u16, errno: i32) -> bool {
        let request = &mut self.requests[usize::from(index)];
        if request.grant != Grant::Given {
            return false;
        }
        request.answered = Some(errno);
        let Some(link) = self.links.get_mut(conn.path) else { return true };
        // The keys of a link that ends do so by themselves.
        if link.is_live() {
            link.conns[usize::from(conn.cid)].revoking.push_back(index);
            self.post_revocations(conn);
        }
        true
    }

    /// Posts the invalidations for which there is room.
    pub(super) fn post_revocations(&mut self, conn: ConnId) {
        let Some(link) = self.links.get_mut(conn.path) else { return };
        let Link { conns, keys, .. } = link;
        let Some(of) = conns.get_mut(usize::from(conn.cid)) else { return };
        while of.has_room(HEARTBEAT_RESERVE) {
            let Some(index) = of.revoking.pop_front() else { return };
            let Some(key) = keys.of(index) else { continue };
            let start = self.batch.mems.len();
            let tag = Tag::new(Tag::KEY, index.into());
            let kind = WrKind::Invalidate(key);
            of.post_signalled(&mut self.batch, conn, tag, kind, start, true);
        }
    }

    /// A key is invalidated: its request ends, if that has been answered.
    pub(super) fn on_revoked(&mut self, now: Instant, done: &Done) {
        let Ok(index) = u16::try_from(done.tag.index()) else { return };
        let Some(request) = self.requests.get_mut(usize::from(index)) else { return };
        let mine =
            request.running && (request.link, request.cid) == (done.conn.path, done.conn.cid);
        if let Some(errno) = request.answered.take_if(|_| mine) {
            self.leave_link(index);
            self.end_request(now, index, errno);
        }
    }

    /// A link ends: the server can do nothing with its keys from the next order on.
    pub(super) fn drop_keys(&mut self, lid: PathId) {
        let Some(link) = self.links.get_mut(lid) else { return };
        let keys = std::mem::take(&mut link.keys);
        link.conns.iter_mut().for_each(|conn| conn.revoking.clear());
        if matches!(keys, Keys::Asked | Keys::Ready(..)) {
            self.orders.push_back(Order::DropKeys { path: lid });
        }
    }
}
