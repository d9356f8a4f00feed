//! RDMA operations: checked, posted before their messages, and reported once each. Spec:
//! `docs/spec/rds-rdma.md`, sections 9 and 10.

use std::collections::btree_map::Entry;
use std::net::{IpAddr, Ipv6Addr};
use std::time::Duration;

use bowline_base::Instant;

use crate::api::{Output, SendControl, SendMsg};
use crate::error::{Error, LengthLimit};
use crate::ids::{ConnId, RdmaLinkId, SocketId};
use crate::node::Node;
use crate::node::timers::Timer;
use crate::path::{TxMsg, UNPLANNED, Unwritten, mark};
use crate::rdma::op::{Gone, Part, RDMA_MAX, RDMA_PIECES, RDMA_PIECES_MAX, Region, TxOps};
use crate::rdma::{RdmaAccess, RdmaOp, RdmaRequest, RdmaStatus, RdmaWork};
use crate::socket::{Transport, interest_bit, mapped};

/// Size of a page, by which counters tell small regions from large ones [RMR-1].
const PAGE: u64 = 4096;
/// How long memory that a peer has used stays on the device: longer than a requester repeats a
/// READ, eight times half a second [IB-24], [IB-26].
const USED_TIME: Duration = Duration::from_secs(5);
/// Number of such regions; with more, the oldest is released.
const USED_MAX: usize = 4096;

/// Tells whether a region of this length counts as small [RMR-1].
const fn is_small(len: u64) -> bool {
    len <= 2 * PAGE
}

impl Node {
    /// Checks the operations of a message, in the order of RDMA-11 and RDMA-12.
    pub(in crate::node) fn check_ops(
        &self,
        msg: &SendMsg<'_>,
        transport: Transport,
    ) -> Result<(), Error> {
        let too_long = |len: u64, limit: usize, of: LengthLimit| {
            Error::too_long(usize::try_from(len).unwrap_or(usize::MAX), limit, of)
        };
        let bytes = msg.rdma.iter().filter(|op| !op.access.is_atomic()).map(|op| op.len);
        let bytes = bytes.fold(0, u64::saturating_add);
        if bytes > RDMA_MAX {
            return Err(too_long(bytes, RDMA_MAX as usize, LengthLimit::Transfer));
        }
        for op in msg.rdma {
            if op.local.is_empty() || op.local.iter().any(|piece| piece.len == 0) {
                return Err(Error::BadControl);
            }
            if op.local.len() > RDMA_PIECES_MAX {
                return Err(too_long(bytes, RDMA_PIECES_MAX, LengthLimit::Pieces));
            }
        }
        let announces =
            |c: &SendControl| matches!(c, SendControl::RdmaDest(_) | SendControl::ZcopyCookie(_));
        let [first, second] = [false, true]
            .map(|atomic| msg.rdma.iter().filter(|op| op.access.is_atomic() == atomic).count());
        if msg.control.iter().any(announces) || first > 1 || second > 1 {
            return Err(Error::BadControl);
        }
        for op in msg.rdma {
            let local = op.local_len().ok_or(Error::BadControl)?;
            let remote = op.remote().ok_or(Error::BadControl)?;
            // Less may be transferred than was announced, but not more.
            if local > op.len {
                return Err(Error::BadControl);
            }
            if op.access.is_atomic() {
                if local != 8 || op.local.len() != 1 || op.local.iter().any(|p| p.addr % 8 != 0) {
                    return Err(Error::Fault); // [ATOM-4]
                }
                if remote % 8 != 0 {
                    return Err(Error::BadControl); // [ATOM-2]
                }
            }
        }
        if transport != Transport::Ib {
            return Err(Error::NotSupported); // [RDMA-14]
        }
        Ok(())
    }

    /// Keeps the operations of a message that is queued with this number.
    pub(in crate::node) fn queue_ops(
        &mut self,
        conn_id: ConnId,
        seq: u64,
        socket: SocketId,
        ops: &[RdmaOp],
    ) {
        let recverr = self.sockets.get(socket.0).is_some_and(|sock| sock.recverr);
        // [RDMA-30]
        self.stats.send_rdma += ops.iter().filter(|op| !op.access.is_atomic()).count() as u64;
        // An operation that moves data comes before an atomic [RDMA-17].
        let ordered = [false, true]
            .into_iter()
            .flat_map(|atomic| ops.iter().filter(move |op| op.access.is_atomic() == atomic));
        let parts =
            ordered.map(|op| Part { op: op.clone(), last: 0, done: false, failed: None }).collect();
        let share = self.sockets.get(socket.0).map(|sock| sock.op_load.share(ops));
        let ops = TxOps { _share: share, socket, recverr, parts, posted: false, gone: None };
        if let Some(rdma) = self.conns.get_mut(conn_id.0).and_then(|conn| conn.rdma.as_mut()) {
            rdma.ops.insert(seq, ops);
        }
    }

    /// Gives the requests of the operations of a message to the driver, on the connection of the
    /// message [RDMA-20]. All have room [IB-88].
    pub(super) fn post_ops(
        &mut self,
        id: RdmaLinkId,
        seq: u64,
        post: &mut impl FnMut(RdmaRequest<'_>, &mut dyn Iterator<Item = &[u8]>),
    ) {
        let Some(link) = self.rdma_links.get_mut(id.0) else { return };
        let Some(rdma) = self.conns.get_mut(link.conn.0).and_then(|conn| conn.rdma.as_mut()) else {
            return;
        };
        let Some(ops) = rdma.ops.get_mut(&seq) else { return };
        ops.posted = true;
        for part in &mut ops.parts {
            let requests = part.op.requests();
            let mut remote = part.op.remote().unwrap_or(0);
            for (at, local) in part.op.local.chunks(RDMA_PIECES).enumerate() {
                // Each operation is told from the others by a completion of its own [RDMA-23].
                let signalled = at + 1 == requests;
                let id = link.tx.next;
                link.tx.next += 1;
                let (access, rkey) = (part.op.access, part.op.rkey());
                let work = RdmaWork { id, access, remote, rkey, local, signalled };
                post(RdmaRequest::Work(work), &mut std::iter::empty());
                remote += local.iter().map(|piece| u64::from(piece.len)).sum::<u64>();
                part.last = id;
            }
        }
        link.tx.unsignalled = 0;
    }

    /// Ends the operations whose requests are complete: all up to number `sent`.
    pub(super) fn ops_sent(&mut self, conn_id: ConnId, sent: u64) {
        let Some(conn) = self.conns.get_mut(conn_id.0) else { return };
        let Some(rdma) = conn.rdma.as_mut() else { return };
        let (mut told, mut over) = (Vec::new(), Vec::new());
        for (seq, ops) in rdma.ops.iter_mut().take_while(|(_, ops)| ops.posted) {
            for part in ops.parts.iter_mut().filter(|part| !part.done && part.last <= sent) {
                part.done = true;
                part.op.hold = None;
                let bytes = part.op.local_len().unwrap_or(0);
                match part.op.access {
                    RdmaAccess::Write => self.stats.send_rdma_bytes += bytes,
                    RdmaAccess::Read => self.stats.recv_rdma_bytes += bytes,
                    RdmaAccess::CompareSwap { .. } => self.stats.ib_atomic_cswp += 1,
                    RdmaAccess::FetchAdd(_) => self.stats.ib_atomic_fadd += 1,
                }
                let status = match ops.gone {
                    Some(Gone::Cancelled) => RdmaStatus::Cancelled,
                    _ => RdmaStatus::Success,
                };
                told.extend(part.op.token_if_notified().map(|token| (ops.socket, token, status)));
            }
            if ops.is_done() {
                over.push(*seq);
            }
        }
        let mut released = Vec::new();
        for seq in over {
            let Entry::Occupied(ops) = rdma.ops.entry(seq) else { continue };
            // No frame is sent for a silent message, so no acknowledgement comes for it [RDMA-24].
            let silent = conn.paths.first_mut().and_then(|path| {
                let at = path.queue.binary_search_by_key(&seq, |msg| msg.seq).ok()?;
                let msg = path.queue.get_mut(at).filter(|msg| msg.has(mark::SILENT))?;
                msg.stream_start = UNPLANNED;
                Some((path, at))
            });
            if let Some((path, at)) = silent {
                let msg = path.queue.get(at).filter(|msg| !msg.has(mark::CANCELLED));
                if let Some(msg) = msg {
                    released.push(msg.clone());
                    path.cancel_at(&mut self.pool, at, Unwritten::Message(None));
                }
                ops.remove();
            } else if ops.get().gone.is_some() {
                ops.remove();
            }
        }
        released.iter().for_each(|msg| self.release_one(conn_id, 0, msg));
        told.into_iter().for_each(|(socket, token, status)| self.notify(socket, token, status));
        self.after_release(conn_id, 0);
    }

    /// Notes that the message of operations has left the queue.
    pub(in crate::node) fn ops_gone(&mut self, conn_id: ConnId, seq: u64, why: Gone) {
        let Some(conn) = self.conns.get_mut(conn_id.0) else { return };
        let Some(rdma) = conn.rdma.as_mut() else { return };
        let Entry::Occupied(mut ops) = rdma.ops.entry(seq) else { return };
        if ops.get().posted && !ops.get().is_done() {
            // Requests may still touch memory: the end of the last one is waited for.
            ops.get_mut().gone.get_or_insert(why);
            return;
        }
        let ops = ops.remove();
        let open = ops.parts.iter().filter(|part| !part.done);
        let told = open.filter_map(|part| part.op.token_if_notified());
        for token in told {
            self.notify(ops.socket, token, RdmaStatus::Cancelled);
        }
    }

    /// Tells whether operations that were posted on a connection have not ended.
    pub fn has_rdma_ops(&self, id: RdmaLinkId) -> bool {
        let conn = self.rdma_links.get(id.0).and_then(|link| self.conn(link.conn));
        let rdma = conn.and_then(|conn| conn.rdma.as_ref());
        rdma.is_some_and(|rdma| rdma.ops.values().any(|ops| ops.posted && !ops.is_done()))
    }

    /// Handles the failure of request `failed`. Of an operation it is reported when the connection
    /// has ended, so that none of its requests touches memory any more.
    pub fn handle_rdma_failed(
        &mut self,
        now: Instant,
        id: RdmaLinkId,
        failed: u64,
        status: RdmaStatus,
    ) {
        self.now = now;
        let Some(link) = self.rdma_links.get(id.0) else { return };
        let rdma = self.conns.get_mut(link.conn.0).and_then(|conn| conn.rdma.as_mut());
        let Some(rdma) = rdma else { return };
        // The first part that is not over and ends with this request or a later one.
        let mut parts =
            rdma.ops.values_mut().filter(|ops| ops.posted).flat_map(|ops| &mut ops.parts);
        if let Some(part) = parts.find(|part| !part.done && part.last >= failed)
            && part.last - failed < part.op.requests() as u64
        {
            part.failed.get_or_insert(status);
        }
    }

    /// Ends all operations, which another process cannot carry out for it has not got their memory,
    /// and drops their messages. All connections have ended.
    pub(in crate::node) fn drop_all_ops(&mut self) {
        let all: Vec<_> = self.conns.iter().map(|(id, _)| ConnId(id)).collect();
        for id in all {
            self.drop_ops(id, |_| true);
            self.drop_cancelled(id, 0);
        }
    }

    /// Ends those operations of a connection that has ended. They are never repeated, since nobody
    /// knows how far they came [IB-97], [IB-98].
    pub(super) fn drop_ops(&mut self, conn_id: ConnId, which: impl Fn(&TxOps) -> bool) {
        let Some(conn) = self.conns.get_mut(conn_id.0) else { return };
        let (Some(rdma), Some(path)) = (conn.rdma.as_mut(), conn.paths.first_mut()) else { return };
        let mut released = Vec::new();
        let mut told = Vec::new();
        let ended: Vec<_> =
            rdma.ops.iter().filter(|(_, ops)| which(ops)).map(|(seq, _)| *seq).collect();
        for seq in ended {
            let Some(ops) = rdma.ops.remove(&seq) else { continue };
            for part in ops.parts.iter().filter(|part| !part.done) {
                let reads = part.op.access != RdmaAccess::Write;
                let status = match (part.failed, ops.gone) {
                    (Some(failed), _) => failed,
                    (None, Some(Gone::Cancelled)) => RdmaStatus::Cancelled,
                    // What the peer has acknowledged came after what was written.
                    (None, Some(Gone::Acknowledged)) if !reads => RdmaStatus::Success,
                    (None, _) => RdmaStatus::Dropped,
                };
                let fault = !matches!(status, RdmaStatus::Success | RdmaStatus::Cancelled);
                if part.op.notify || ops.recverr && fault {
                    told.push((ops.socket, part.op.token, status)); // [RDMA-28]
                }
            }
            let Ok(at) = path.queue.binary_search_by_key(&seq, |msg| msg.seq) else { continue };
            if let Some(msg) = path.queue.get(at).filter(|msg| !msg.has(mark::CANCELLED)) {
                // It was carried out, and its message does not arrive.
                let untold = ops.is_done() && ops.parts.iter().all(|part| !part.op.notify);
                let first = ops.parts.first().filter(|_| untold && !msg.has(mark::SILENT));
                if let Some(part) = first.filter(|_| ops.recverr) {
                    told.push((ops.socket, part.op.token, RdmaStatus::Dropped)); // [RDMA-28]
                }
                released.push(msg.clone());
                path.cancel_at(&mut self.pool, at, Unwritten::Message(None));
            }
        }
        released.iter().for_each(|msg: &TxMsg| self.release_one(conn_id, 0, msg));
        told.into_iter().for_each(|(socket, token, status)| self.notify(socket, token, status));
    }

    /// Tells a socket how an operation ended [RDMA-21].
    fn notify(&mut self, id: SocketId, token: u64, status: RdmaStatus) {
        let Some(sock) = self.sockets.get_mut(id.0) else { return };
        sock.notifications.push_back((token, status));
        self.wake(id, interest_bit::READ);
    }

    /// Tells whether the messages of a socket go over RDMA.
    ///
    /// # Errors
    /// [`Error::BadSocket`]; [`Error::NotConnected`] when not bound; [`Error::NotSupported`] unless
    /// bound to an address on RDMA.
    pub fn check_rdma_socket(&self, id: SocketId) -> Result<(), Error> {
        let bound = self.sock(id)?.bound.ok_or(Error::NotConnected)?;
        if bound.transport == Transport::Ib { Ok(()) } else { Err(Error::NotSupported) }
    }

    /// Tells whether a socket may register memory, before the driver does [RDMA-3].
    ///
    /// # Errors
    /// Those of [`check_rdma_socket`](Self::check_rdma_socket); [`Error::BadValue`] for no bytes;
    /// [`Error::MessageTooLong`] for more than an operation can have; [`Error::TooManyRegions`] at
    /// the node's limit.
    pub fn check_region(&mut self, id: SocketId, len: u64) -> Result<(), Error> {
        self.check_rdma_socket(id)?;
        if len == 0 {
            return Err(Error::BadValue);
        }
        if len > RDMA_MAX {
            let (len, limit) = (usize::try_from(len).unwrap_or(usize::MAX), RDMA_MAX as usize);
            return Err(Error::too_long(len, limit, LengthLimit::Transfer));
        }
        // A kernel exceeds its limit without telling [RMR-2].
        if self.regions >= self.config.limits.rdma_regions {
            if is_small(len) {
                self.stats.ib_rdma_mr_8k_pool_depleted += 1;
            } else {
                self.stats.ib_rdma_mr_1m_pool_depleted += 1;
            }
            return Err(Error::TooManyRegions);
        }
        Ok(())
    }

    /// Notes that `peer`, or else every peer, may use memory of a socket by this key, which the
    /// device accepts from no other [SAFE-12]. The driver knows it as `tag`, and releases it at
    /// [`Output::RdmaRelease`].
    ///
    /// # Errors
    /// Those of [`check_region`](Self::check_region); then the driver releases it at once.
    pub fn add_region(
        &mut self,
        id: SocketId,
        rkey: u32,
        len: u64,
        peer: Option<IpAddr>,
        use_once: bool,
        tag: u64,
    ) -> Result<(), Error> {
        self.check_region(id, len)?;
        let small = is_small(len);
        if small {
            self.stats.ib_rdma_mr_8k_alloc += 1;
        } else {
            self.stats.ib_rdma_mr_1m_alloc += 1;
        }
        self.regions += 1;
        let peer = peer.map(mapped);
        self.sock_mut(id)?.regions.insert(rkey, Region { tag, peer, use_once, small });
        Ok(())
    }

    /// Takes memory back from peers, at once [RDMA-7], [RDMA-8]. A cookie of 0 stands for memory
    /// that was taken back already, which there is none of.
    ///
    /// # Errors
    /// [`Error::BadSocket`]; [`Error::NotConnected`] when not bound; [`Error::BadValue`] for a key
    /// that is not of this socket.
    pub fn free_region(&mut self, id: SocketId, cookie: u64) -> Result<(), Error> {
        let sock = self.sock_mut(id)?;
        let bound = sock.bound.ok_or(Error::NotConnected)?;
        if cookie == 0 && bound.transport == Transport::Ib {
            return Ok(()); // [RDMA-9]
        }
        let region = sock.regions.remove(&(cookie as u32)).ok_or(Error::BadValue)?;
        self.release_region(region);
        Ok(())
    }

    /// Releases memory for one use, since a peer that may use it says that it did [RDMA-31]. A READ
    /// whose message did not wait for it may be under way still, and its requester may have to
    /// repeat it: the device keeps the memory for a while [RMR-9].
    pub(in crate::node) fn region_used(&mut self, id: SocketId, rkey: u32, by: Ipv6Addr) {
        let Some(sock) = self.sockets.get_mut(id.0) else { return };
        if sock.regions.get(&rkey).is_some_and(|region| region.use_once && region.is_for(by))
            && let Some(region) = sock.regions.remove(&rkey)
        {
            self.regions -= 1;
            self.outputs.push_back(Output::RdmaUsed { tag: region.tag });
            if self.used_regions.is_empty() {
                self.arm(self.now + USED_TIME, Timer::RdmaUsed);
            }
            self.used_regions.push_back((self.now + USED_TIME, id, region));
            if self.used_regions.len() > USED_MAX
                && let Some((_, _, oldest)) = self.used_regions.pop_front()
            {
                self.end_region(oldest);
            }
        }
    }

    pub(in crate::node) fn used_regions_due(&mut self) {
        let now = self.now;
        self.release_used_regions(|at, _| at <= now);
        if let Some((at, ..)) = self.used_regions.front() {
            self.arm(*at, Timer::RdmaUsed);
        }
    }

    /// Releases memory that was used, at these times or of these sockets.
    pub(in crate::node) fn release_used_regions(
        &mut self,
        which: impl Fn(Instant, SocketId) -> bool,
    ) {
        let mut used = std::mem::take(&mut self.used_regions);
        used.retain(|(at, of, region)| {
            let over = which(*at, *of);
            if over {
                self.end_region(*region);
            }
            !over
        });
        self.used_regions = used;
    }

    pub(in crate::node) fn release_region(&mut self, region: Region) {
        self.regions -= 1;
        self.end_region(region);
    }

    fn end_region(&mut self, region: Region) {
        if region.small {
            self.stats.ib_rdma_mr_8k_free += 1;
        } else {
            self.stats.ib_rdma_mr_1m_free += 1;
        }
        self.outputs.push_back(Output::RdmaRelease { tag: region.tag });
    }
}
