//! Sending: the checks in the kernel's order, queueing, and the short way within the node. Spec:
//! `docs/spec/rds.md`, sections 5 and 6.6.

use std::io::IoSlice;
use std::net::{Ipv6Addr, SocketAddr};

use bowline_base::Instant;
use bowline_wire::rds::{EXT_AREA_LEN, Flags, Header, RdmaDest, RdmaExt};

use super::Node;
use super::sockets::endpoint;
use super::tx::LOG_SPARE;
use crate::api::{SendControl, SendMsg, Sent};
use crate::config::MAX_MESSAGE_KERNEL;
use crate::conn::Peer;
use crate::error::{Error, LengthLimit};
use crate::hash::path_hash;
use crate::ids::{ConnId, SocketId};
use crate::path::{PathState, TxMsg, UNPLANNED, mark};
use crate::rdma::op::STATUSES_MAX;
use crate::recvq::{Origin, RecvMsg};
use crate::rxbuf::Rope;
use crate::socket::{Bound, Endpoint, Flow, Route, Sock, Transport, interest_bit};

/// Most completion records of one socket that are not received, for it to send with zero copy.
const COMPLETIONS_MAX: usize = 1 << 12;
/// Most cookies in one completion record.
#[doc(alias = "RDS_MAX_ZCOOKIES")]
const COOKIES_PER_RECORD: usize = 8;

fn cookie_of(msg: &SendMsg<'_>) -> Option<u32> {
    msg.control.iter().find_map(|control| match control {
        SendControl::ZcopyCookie(cookie) => Some(*cookie),
        _ => None,
    })
}

impl Node {
    /// Sends a message without waiting.
    ///
    /// When the result names a link, the driver decides whether to write now or to gather more:
    /// no [`Output::Transmit`](crate::Output::Transmit) comes for a send.
    ///
    /// # Errors
    /// In the order of spec section 5.2. [`Error::QueueFull`], [`Error::Congested`] and
    /// [`Error::HandshakePending`] are temporary: a blocking caller registers for
    /// [`Interest::WRITE`](crate::Interest::WRITE) and tries again.
    pub fn send(&mut self, now: Instant, id: SocketId, msg: &SendMsg<'_>) -> Result<Sent, Error> {
        self.now = now;
        let sock = self.sockets.get(id.0).ok_or(Error::BadSocket)?;
        let len = match msg.lent {
            Some(lent) => lent.len(),
            None => msg.payload.iter().map(|s| s.len()).sum(),
        };
        if let Some(route) = &sock.route
            && route.name == msg.name
            && msg.control.is_empty()
            && msg.rdma.is_empty()
            && !msg.zerocopy
            && self.conns.get(route.flow.conn.0).is_some()
        {
            let flow = route.flow;
            self.check_len(sock, len)?;
            return self.send_remote(id, flow, msg, len, None);
        }
        let named = match msg.name {
            Some(name) => {
                let own = sock.bound.map(|bound| bound.at.scope);
                Some(endpoint(name).or_scope(own).checked().ok_or(Error::BadAddress)?)
            }
            None => None,
        };
        let mut to = named.or(sock.dest).ok_or(Error::NotConnected)?;
        let bound = sock.bound.ok_or(Error::NotConnected)?;
        // Also for connected destinations, unlike the kernel, [B-23].
        if to.is_v4() != bound.at.is_v4() {
            return Err(Error::FamilyMismatch);
        }
        if to.scope != bound.at.scope {
            if to.scope != 0 && bound.at.scope != 0 {
                return Err(Error::ScopeMismatch);
            }
            to.scope = to.scope.max(bound.at.scope);
        }
        self.check_len(sock, len)?;
        self.check_control(id, msg, bound.transport)?;
        let is_local =
            bound.transport == Transport::Loopback || self.is_local_at(to.addr, to.scope);
        let flow = if is_local { None } else { Some(self.route(id, bound, to, msg.name)?) };
        if let Some(sock) = self.sockets.get_mut(id.0) {
            sock.has_had_route = true;
        }
        let cookie = self.execute_control(id, msg, to.addr, bound.transport, len)?;
        let Some(flow) = flow else {
            if !msg.rdma.is_empty() {
                return Err(Error::NotSupported); // a program can copy its memory itself
            }
            return self.send_local(id, bound, to, msg, len, cookie);
        };
        self.send_remote(id, flow, msg, len, cookie)
    }

    fn check_len(&self, sock: &Sock, len: usize) -> Result<(), Error> {
        let node = (self.config.max_message as usize, LengthLimit::Node);
        let buffer = (sock.sndbuf, LengthLimit::SendBuffer);
        let (limit, of) = if buffer.0 < node.0 { buffer } else { node };
        if len > limit { Err(Error::too_long(len, limit, of)) } else { Ok(()) }
    }

    /// Makes the checks 13 to 16 of spec section 5.2.
    fn check_control(
        &self,
        id: SocketId,
        msg: &SendMsg<'_>,
        transport: Transport,
    ) -> Result<(), Error> {
        let sock = self.sock(id)?;
        let enabled = sock.zerocopy;
        if !msg.rdma.is_empty() {
            self.check_ops(msg, transport)?;
            // Where errors are asked for, each failure is told.
            let tells = |op: &crate::rdma::RdmaOp| op.notify || sock.recverr;
            if sock.notifications.len() >= STATUSES_MAX && msg.rdma.iter().any(tells) {
                return Err(Error::TooManyStatuses);
            }
        }
        // A kernel refuses it over RDMA, too, where it needs whole pages [ZC-2].
        if msg.zerocopy && enabled && transport == Transport::Loopback {
            return Err(Error::NotSupported);
        }
        let has = |f: fn(&SendControl) -> bool| msg.control.iter().any(f);
        if has(|c| matches!(c, SendControl::Unknown(_))) {
            return Err(Error::BadControl);
        }
        let cookie = cookie_of(msg);
        if msg.zerocopy && cookie.is_none() {
            return Err(Error::BadControl); // [ZC-3]
        }
        if msg.zerocopy && enabled && sock.completions.len() >= COMPLETIONS_MAX {
            return Err(Error::TooManyStatuses); // [ZC-9]
        }
        let announced =
            msg.control.iter().filter(|c| matches!(c, SendControl::RdmaDest(_))).count();
        if announced > 1 && transport == Transport::Ib {
            return Err(Error::BadControl); // [RDMA-12]
        }
        let operation = has(|c| matches!(c, SendControl::RdmaArgs | SendControl::Atomic));
        let key = has(|c| matches!(c, SendControl::RdmaDest(_) | SendControl::RdmaMap));
        if operation && (key || cookie.is_some()) {
            return Err(Error::BadControl);
        }
        Ok(())
    }

    /// Makes the checks 20 and 21 of spec section 5.2, in the order of the control messages.
    fn execute_control(
        &self,
        id: SocketId,
        msg: &SendMsg<'_>,
        to: Ipv6Addr,
        transport: Transport,
        len: usize,
    ) -> Result<Option<u32>, Error> {
        let sock = self.sock(id)?;
        for control in msg.control {
            match control {
                SendControl::ZcopyCookie(_) if !msg.zerocopy || !sock.zerocopy || len == 0 => {
                    return Err(Error::BadControl);
                }
                // Only memory of this socket may be announced, and to peers that may use it
                // [RDMA-12], [RMR-8].
                SendControl::RdmaDest(cookie)
                    if transport == Transport::Ib
                        && cookie != &0
                        && sock.regions.get(&(*cookie as u32)).is_some_and(|r| r.is_for(to)) => {}
                // Without RDMA no key is registered, nor may one go to a kernel, [B-28].
                SendControl::RdmaDest(_) | SendControl::Unknown(_) => {
                    return Err(Error::BadControl);
                }
                SendControl::ZcopyCookie(_) => {}
                SendControl::RdmaMap | SendControl::RdmaArgs | SendControl::Atomic => {
                    return Err(Error::NotSupported);
                }
            }
        }
        Ok(cookie_of(msg))
    }

    /// Makes the checks 24 and 25: congestion, then room in the queue.
    fn admit(
        &mut self,
        id: SocketId,
        congested: bool,
        port: u16,
        blocking: bool,
    ) -> Result<(), Error> {
        let sock = self.sockets.get(id.0).ok_or(Error::BadSocket)?;
        if congested || self.is_send_full(sock) {
            return Err(self.refuse_send(id, congested, port, blocking));
        }
        Ok(())
    }

    /// Refuses a message because of congestion, or else because the queue is full.
    #[cold]
    fn refuse_send(&mut self, id: SocketId, congested: bool, port: u16, blocking: bool) -> Error {
        let Some(sock) = self.sockets.get_mut(id.0) else { return Error::BadSocket };
        if !congested {
            self.stats.send_queue_full += 1;
            return Error::QueueFull;
        }
        sock.seen_congestion = true;
        if blocking {
            // The caller's wait honours its timeout; a kernel's wait does not, [B-16].
            self.stats.cong_send_blocked += 1;
        } else {
            self.stats.cong_send_error += 1;
            if sock.monitor {
                if sock.wait_mask == 0 {
                    self.monitors.push(id);
                }
                sock.wait_mask |= 1 << (port & 63);
            }
        }
        Error::Congested
    }

    /// Checks a message that is longer than a kernel takes.
    #[cold]
    fn check_long(&mut self, id: SocketId, conn_id: ConnId, len: usize) -> Result<(), Error> {
        match self.conn(conn_id).ok_or(Error::TooManyPeers)?.peer {
            Peer::Bowline { max_message } if len <= max_message as usize => Ok(()),
            Peer::Bowline { max_message } => {
                Err(Error::too_long(len, max_message as usize, LengthLimit::Peer))
            }
            Peer::Kernel => {
                Err(Error::too_long(len, MAX_MESSAGE_KERNEL as usize, LengthLimit::Peer))
            }
            Peer::Unknown => {
                if let Some(sock) = self.sockets.get_mut(id.0) {
                    sock.seen_congestion = true; // woken with the congestion waiters
                }
                if let Some(conn) = self.conns.get_mut(conn_id.0) {
                    conn.long_message_refused_at = Some(self.now);
                }
                self.connect_all_if_down(conn_id);
                Err(Error::HandshakePending)
            }
        }
    }

    #[inline]
    fn send_remote(
        &mut self,
        id: SocketId,
        flow: Flow,
        msg: &SendMsg<'_>,
        len: usize,
        cookie: Option<u32>,
    ) -> Result<Sent, Error> {
        let Flow { conn: conn_id, hash, sport, dport } = flow;
        if len > MAX_MESSAGE_KERNEL as usize {
            self.check_long(id, conn_id, len)?;
        }
        let conn = self.conns.get(conn_id.0).ok_or(Error::TooManyPeers)?;
        // All messages between two sockets take one path [R-2040], of the paths that exist now
        // [B-13].
        let index = (hash & u32::from(conn.usable_paths() - 1)) as usize;
        if conn.paths.get(index).is_none_or(|p| p.state != PathState::Up) {
            self.connect_all_if_down(conn_id);
        }
        let conn = self.conns.get_mut(conn_id.0).ok_or(Error::TooManyPeers)?;
        let congested = conn.map.is_set(dport);
        let sock = self.sockets.get_mut(id.0).ok_or(Error::BadSocket)?;
        let messages_max = self.config.limits.send_messages_per_socket;
        let full = sock.is_send_full(messages_max, self.many_sends);
        let refused = congested || full || !sock.op_load.takes(msg.rdma);
        if refused && !(msg.promised && sock.snd_msgs < messages_max) {
            if congested {
                self.doubt_rdma_map(conn_id);
            }
            return Err(self.refuse_send(id, congested, dport, msg.blocking));
        }
        sock.snd_bytes += len; // without the bytes of operations [RDMA-15]
        sock.snd_msgs += 1;
        let half_full = sock.snd_bytes >= sock.sndbuf / 2;
        conn.last_used = self.now;
        let to_bowline = conn.peer.is_bowline();
        let over_rdma = conn.rdma.is_some();
        let rdma_link = conn.rdma.as_ref().and_then(|rdma| rdma.link);
        let path = conn.make_path(index as u8);
        let mut marks = 0;
        // Budgets of R-526. The flag goes on the wire only between bowline nodes, and not
        // because of the count of messages: an answer carries the acknowledgement of a short
        // question.
        path.unacked_packets -= 1;
        path.unacked_bytes -= len as i64;
        let many_bytes = path.unacked_bytes < 0;
        if path.unacked_packets < 0 || many_bytes {
            let packets = self.config.sysctl.max_unacked_packets;
            path.unacked_packets = if over_rdma { packets } else { packets.max(1) - 1 };
            if many_bytes || over_rdma {
                path.unacked_bytes = self.config.sysctl.max_unacked_bytes; // [IB-68]
            }
            self.stats.send_ack_required += 1;
            marks |= mark::ACK_REQUIRED;
        }
        // A sender that will soon have to wait must not wait for a delayed acknowledgement.
        if half_full {
            marks |= mark::ACK_REQUIRED;
        }
        let asks = (half_full || many_bytes) && to_bowline;
        if cookie.is_some() {
            marks |= mark::ZCOPY;
        }
        let mut ext = [0; EXT_AREA_LEN];
        if over_rdma && (!msg.rdma.is_empty() || !msg.control.is_empty()) {
            (ext, marks) = rdma_extension(msg, len, marks);
        }
        // One queue per path, shared by all sockets.
        let seq = path.next_tx_seq;
        let header = Header {
            sequence: seq,
            len: len as u32,
            sport,
            dport,
            flags: if asks { Flags::ACK_REQUIRED } else { Flags::NONE },
            ext,
            ..Header::default()
        };
        let before = sock.latest.insert((conn_id, dport, index as u8), seq).unwrap_or(0);
        let has_stale = sock.has_stale();
        // The record is pushed before the payload is copied: the processor reads the record back in
        // larger pieces than it was written in, and would wait until all stores of the copy reach
        // the cache.
        path.queue.push_back(TxMsg {
            seq,
            log_start: path.log.tail(),
            stream_start: UNPLANNED,
            socket: Some(id),
            len: len as u32,
            cookie: cookie.unwrap_or(0),
            sport,
            dport,
            marks,
            generation: 0,
            before,
        });
        match msg.lent {
            Some(lent) => path.log.append_lent(&mut self.pool, &header.to_bytes(), lent),
            None => path.log.append_frame(&mut self.pool, &header.to_bytes(), msg.payload, len),
        }
        path.next_tx_seq = seq.wrapping_add(1);
        path.sent += 1;
        path.queued_bytes += len as u64;
        self.pool.account(len);
        self.stats.send_queued += 1;
        self.stats.copy_from_user += if msg.lent.is_some() { 0 } else { len as u64 };
        let (link, queued_bytes) = match path.link {
            Some(link) if path.state == PathState::Up => {
                let waiting = path.unplanned_bytes();
                let planned = self.links.get(link.0).map_or(0, |l| l.tx.plan_bytes);
                (Some(link), (waiting + planned) as usize)
            }
            _ => (None, 0),
        };
        if marks & mark::OPS != 0 {
            self.queue_ops(conn_id, seq, id, msg.rdma);
        }
        if has_stale {
            self.forget_stale(id);
        }
        if let Some(link) = rdma_link {
            self.signal_rdma(link);
        }
        let limit = self.config.limits.send_bytes_total;
        if self.pool.accounted() >= limit || self.pool.is_sparse(limit / LOG_SPARE) {
            self.limit_sends();
        }
        Ok(Sent { len, link, queued_bytes })
    }

    /// Returns how many payload bytes may be promised to a sender in advance, for one destination:
    /// as many as can be on their way before it is refused for congestion. `None`: nothing, it has
    /// to ask for each message.
    pub fn send_room(&self, id: SocketId, name: Option<SocketAddr>) -> Option<usize> {
        let sock = self.sockets.get(id.0)?;
        let bound = sock.bound?;
        let to =
            name.map_or(sock.dest, |name| Some(endpoint(name)))?.or_scope(Some(bound.at.scope));
        if to.port == 0 || sock.zerocopy {
            return None;
        }
        if bound.transport == Transport::Loopback || self.is_local_at(to.addr, to.scope) {
            let local = &self.local_addrs[*self.local_addr_index.get(&(to.addr, to.scope))?];
            let receiver = local.ports.get(&to.port).and_then(|id| self.sockets.get(id.0));
            return match receiver {
                // What is sent to a port without a socket is dropped at once.
                None => Some(sock.sndbuf),
                Some(receiver) if receiver.congested => None,
                Some(receiver) => Some(receiver.rcvbuf.saturating_sub(receiver.rcv_bytes)),
            };
        }
        let conn = self.conns.get(self.conn_to(sock.tos, bound, to)?.0)?;
        (!conn.map.is_set(to.port)).then_some(usize::MAX)
    }

    /// Finds the connection to a destination.
    fn conn_to(&self, tos: u8, bound: Bound, to: Endpoint) -> Option<ConnId> {
        let (here, there) = (bound.at.addr, to.addr);
        match bound.transport {
            Transport::Ib => self.rdma_index.get(&(here, there, to.scope, tos)).copied(),
            Transport::Tcp | Transport::Loopback => {
                self.conn_index.get(&(here, there, to.scope)).copied()
            }
        }
    }

    /// Finds or makes the connection to a destination.
    fn route(
        &mut self,
        id: SocketId,
        bound: Bound,
        to: Endpoint,
        name: Option<SocketAddr>,
    ) -> Result<Flow, Error> {
        let tos = self.sock(id)?.tos;
        let conn = match self.conn_to(tos, bound, to) {
            Some(conn) => conn,
            None if bound.transport == Transport::Ib => {
                self.new_rdma_conn((bound.at.addr, to.addr, to.scope, tos))?
            }
            None => {
                let conn = self.new_conn(bound.at.addr, to.addr, to.scope)?;
                // The probe goes before the sender's own message.
                self.queue_probe(conn);
                conn
            }
        };
        let (sport, dport) = (bound.at.port, to.port);
        let flow = Flow { conn, hash: path_hash(sport.wrapping_add(dport)), sport, dport };
        if let Some(sock) = self.sockets.get_mut(id.0) {
            sock.route = Some(Route { name, flow });
        }
        Ok(flow)
    }

    /// Delivers within the node. Accounting is released at once. Congestion is that of the
    /// receiving socket, as over any other transport, [B-8], and unlike a kernel's.
    fn send_local(
        &mut self,
        id: SocketId,
        bound: Bound,
        to: Endpoint,
        msg: &SendMsg<'_>,
        len: usize,
        cookie: Option<u32>,
    ) -> Result<Sent, Error> {
        let local_addr = self.local_addr_index.get(&(to.addr, to.scope)).copied();
        let congested = local_addr.is_some_and(|h| self.local_addrs[h].map.is_set(to.port));
        if !msg.promised {
            self.admit(id, congested, to.port, msg.blocking)?;
        }
        self.stats.send_queued += 1;
        self.stats.copy_from_user += len as u64;
        if let Some(cookie) = cookie {
            self.complete(id, cookie);
        }
        let never = (Instant::default(), Instant::default());
        if to.port == 0 {
            if !self.config.sysctl.ping_enable {
                return Ok(Sent::without_link(len));
            }
            self.stats.recv_ping += 1;
            if self.local_addrs[bound.local_addr].map.is_set(bound.at.port) {
                self.stats.cong_send_error += 1;
            } else {
                self.stats.send_pong += 1;
                // The pong goes from the pinged address to the pinging socket, whatever the two
                // addresses are.
                self.queue_on_socket(
                    id,
                    local_message(Endpoint { port: 0, ..to }, Rope::default()),
                    never,
                );
            }
            return Ok(Sent::without_link(len));
        }
        match local_addr.and_then(|h| self.local_addrs[h].ports.get(&to.port).copied()) {
            None => self.stats.recv_drop_no_sock += 1,
            Some(receiver) => {
                // A lent buffer is copied here: it is given back at once.
                let data = match msg.lent {
                    Some(lent) => lent.to_vec(),
                    None => gather(msg.payload, len),
                };
                let data = Rope::from_vec(data);
                self.queue_on_socket(receiver, local_message(bound.at, data), never);
            }
        }
        Ok(Sent::without_link(len))
    }

    /// Releases the share of a message in its socket's send account.
    pub(super) fn release_message(&mut self, msg: &TxMsg) {
        let Some(id) = msg.socket else { return };
        if msg.has(mark::ZCOPY) {
            self.complete(id, msg.cookie); // [ZC-5]
        }
        self.release_accounting(id, 1, msg.len as usize);
    }

    /// Releases the share of some messages in their socket's send account.
    pub(super) fn release_accounting(&mut self, id: SocketId, messages: usize, bytes: usize) {
        let Some(sock) = self.sockets.get_mut(id.0) else { return };
        sock.snd_bytes -= bytes;
        sock.snd_msgs -= messages;
        if sock.snd_bytes == 0 && bytes > 0 {
            self.stats.send_queue_empty += 1;
        }
        let has_stale = sock.has_stale();
        if sock.interest & interest_bit::WRITE != 0 && sock.snd_bytes < sock.sndbuf {
            self.wake(id, interest_bit::WRITE);
        }
        if has_stale {
            self.forget_stale(id);
        }
        if self.many_sends && self.pool.accounted() < self.config.limits.send_bytes_total / 8 * 7 {
            self.allow_sends();
        }
    }

    /// Queues a zero-copy completion; also wakes a blocking reader [B-25].
    fn complete(&mut self, id: SocketId, cookie: u32) {
        let Some(sock) = self.sockets.get_mut(id.0) else { return };
        match sock.completions.front_mut() {
            // The oldest record is filled, as in a kernel [ZC-7].
            Some(record) if record.len() < COOKIES_PER_RECORD => record.push(cookie),
            _ => sock.completions.push_back(vec![cookie]),
        }
        self.wake(id, interest_bit::READ);
    }

    /// Queues a message that the node itself sends: a probe or a pong.
    pub(super) fn queue_control(
        &mut self,
        conn: ConnId,
        index: usize,
        sport: u16,
        dport: u16,
        ext: [u8; EXT_AREA_LEN],
        marks: u8,
    ) {
        let Some(conn) = self.conns.get_mut(conn.0) else { return };
        let Some(path) = conn.paths.get_mut(index) else { return };
        let header = Header { sequence: path.next_tx_seq, sport, dport, ext, ..Header::default() };
        let log_start = path.log.tail();
        path.log.append(&mut self.pool, &header.to_bytes());
        path.queue.push_back(TxMsg {
            seq: path.next_tx_seq,
            log_start,
            stream_start: UNPLANNED,
            socket: None,
            len: 0,
            cookie: 0,
            sport,
            dport,
            marks,
            generation: 0,
            before: 0,
        });
        path.next_tx_seq = path.next_tx_seq.wrapping_add(1);
        path.sent += 1;
        self.pool.account(0);
        self.stats.send_queued += 1;
        self.stats.send_pong += 1;
        if let (PathState::Up, Some(link)) = (path.state, path.link) {
            self.signal_transmit(link);
        } else if let Some(link) = conn.rdma.as_ref().and_then(|rdma| rdma.link) {
            self.signal_rdma(link);
        }
    }
}

/// Returns the extension of a message over RDMA that has operations or announces memory [RDMA-16],
/// and its marks.
fn rdma_extension(msg: &SendMsg<'_>, len: usize, mut marks: u8) -> ([u8; EXT_AREA_LEN], u8) {
    let announced = msg.control.iter().find_map(|control| match control {
        SendControl::RdmaDest(cookie) => {
            Some(RdmaExt::Dest(RdmaDest { rkey: *cookie as u32, offset: (*cookie >> 32) as u32 }))
        }
        _ => None,
    });
    let moved = msg.rdma.iter().find(|op| !op.access.is_atomic()).map(|op| RdmaExt::Op(op.rkey()));
    if !msg.rdma.is_empty() {
        marks |= mark::OPS;
        if len == 0 && announced.is_none() && msg.rdma.iter().all(|op| op.silent) {
            marks |= mark::SILENT;
        }
    }
    (announced.or(moved).map_or([0; EXT_AREA_LEN], RdmaExt::emit), marks)
}

fn gather(slices: &[IoSlice<'_>], len: usize) -> Vec<u8> {
    let mut out = Vec::with_capacity(len);
    slices.iter().for_each(|s| out.extend_from_slice(s));
    out
}

fn local_message(from: Endpoint, data: Rope) -> RecvMsg {
    let origin = Origin { addr: from.addr, scope: from.scope, conn: None };
    RecvMsg { origin, sport: from.port, seq: 0, data, rare: None }
}
