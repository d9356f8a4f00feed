//! Socket calls that move no message. Spec: `docs/spec/rds.md`, section 8.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::SocketAddr;
use std::ops::Bound::{Excluded, Unbounded};

use bowline_base::Instant;

use super::Node;
use crate::api::{Interest, Output, OutstandingMessages, Readiness};
use crate::config::{RECV_BUFFER_MIN, SEND_BUFFER_MIN};
use crate::conn::Conn;
use crate::error::Error;
use crate::ids::{ConnId, SocketId};
use crate::path::{Path, TxMsg, mark};
use crate::rdma::op::{Gone, OpLoad};
use crate::socket::{
    Bound, Endpoint, LatencyTrace, SentTo, Sock, Transport, interest_bit, is_loopback, is_unicast,
    mapped, needs_scope, to_socket_addr,
};

/// Sockets without a file have numbers from here on instead of an inode [R-1013].
const WITHOUT_FILE: u64 = 1 << 32;

/// Bits of [`Node::poll`], as poll(2) has them.
pub mod poll {
    /// POLLIN and POLLRDNORM.
    pub const IN: u32 = 0x41;
    /// POLLOUT and POLLWRNORM.
    pub const OUT: u32 = 0x104;
    /// POLLWRBAND.
    pub const WRBAND: u32 = 0x200;
}

impl Node {
    pub(super) fn sock(&self, id: SocketId) -> Result<&Sock, Error> {
        self.sockets.get(id.0).ok_or(Error::BadSocket)
    }

    pub(super) fn sock_mut(&mut self, id: SocketId) -> Result<&mut Sock, Error> {
        self.sockets.get_mut(id.0).ok_or(Error::BadSocket)
    }

    /// Tells whether sends on a socket are refused until a queued message is released.
    pub(super) fn is_send_full(&self, sock: &Sock) -> bool {
        sock.is_send_full(self.config.limits.send_messages_per_socket, self.many_sends)
    }

    /// Makes a socket, not bound yet.
    ///
    /// # Errors
    /// [`Error::TooManySockets`] at the limit.
    pub fn socket(&mut self) -> Result<SocketId, Error> {
        if self.sockets.len() >= self.config.limits.sockets {
            return Err(Error::TooManySockets);
        }
        let inode = WITHOUT_FILE + self.next_inode;
        self.next_inode += 1;
        Ok(SocketId(self.sockets.insert(Sock {
            bound: None,
            dest: None,
            transport: None,
            sndbuf: self.config.send_buffer.max(SEND_BUFFER_MIN),
            rcvbuf: self.config.recv_buffer.max(RECV_BUFFER_MIN),
            snd_bytes: 0,
            snd_msgs: 0,
            latest: BTreeMap::new(),
            rcv_bytes: 0,
            queue: crate::recvq::RecvQueue::default(),
            lent: VecDeque::new(),
            lent_from: VecDeque::new(),
            congested: false,
            crowded: false,
            interest: 0,
            cong_waiting: false,
            seen_congestion: false,
            monitor: false,
            wait_mask: 0,
            notify_mask: 0,
            poll_generation: 0,
            timestamp: false,
            latency: None,
            traced_since: Instant::default(),
            zerocopy: false,
            recverr: false,
            tos: 0,
            has_had_route: false,
            completions: VecDeque::new(),
            notifications: VecDeque::new(),
            op_load: OpLoad::default(),
            regions: BTreeMap::new(),
            route: None,
            inode,
            owner: None,
        })))
    }

    /// Notes which process opened a socket, and the inode of its file, for the info interface.
    pub fn set_owner(&mut self, id: SocketId, pid: u32, inode: u64) {
        if let Ok(socket) = self.sock_mut(id) {
            socket.owner = Some(pid);
            socket.inode = inode;
        }
    }

    /// Binds a socket; port 0 chooses one.
    ///
    /// # Errors
    /// In this order: [`Error::BadSocket`]; [`Error::AlreadyBound`]; [`Error::BadAddress`];
    /// [`Error::ScopeMismatch`]; [`Error::AddrNotAvailable`] or, with a transport chosen,
    /// [`Error::TransportAddress`]; [`Error::ReservedPort`]; [`Error::AddrInUse`].
    pub fn bind(&mut self, id: SocketId, addr: SocketAddr) -> Result<(), Error> {
        let at = endpoint(addr);
        let at = at.or_scope(self.link_of(at.addr));
        let at = at.checked().ok_or(Error::BadAddress)?;
        let sock = self.sock(id)?;
        if sock.bound.is_some() {
            return Err(Error::AlreadyBound);
        }
        if sock.dest.is_some_and(|d| d.scope != 0 && at.scope != 0 && d.scope != at.scope) {
            return Err(Error::ScopeMismatch);
        }
        let transport = match sock.transport {
            Some(Transport::Tcp) if self.is_local_at(at.addr, at.scope) => Transport::Tcp,
            Some(Transport::Ib) if self.is_rdma_addr(at.addr) => Transport::Ib,
            Some(_) => return Err(Error::TransportAddress),
            None => self.transport_for(at)?,
        };
        if at.port == bowline_wire::rds::PROBE_PORT {
            self.sock_mut(id)?.transport = None;
            return Err(Error::ReservedPort);
        }
        let local_addr = self.local_addr_of(at.addr, at.scope);
        let Some(port) = self.free_port(local_addr, at.port) else {
            self.sock_mut(id)?.transport = None;
            return Err(Error::AddrInUse);
        };
        self.local_addrs[local_addr].ports.insert(port, id); // of this node alone [B-26]
        let sock = self.sock_mut(id)?;
        sock.transport = Some(transport);
        sock.bound = Some(Bound { at: Endpoint { port, ..at }, local_addr, transport });
        Ok(())
    }

    /// Returns the transport of an address. A configured address of this node is served
    /// over TCP even in 127/8, so that several nodes can run on one host.
    fn transport_for(&self, at: Endpoint) -> Result<Transport, Error> {
        let addr = at.addr;
        if self.link_of(addr).is_some_and(|link| link != at.scope) {
            return Err(Error::AddrNotAvailable);
        }
        let owned = self
            .local_addr_index
            .get(&(addr, 0))
            .is_some_and(|local_addr| self.local_addrs[*local_addr].present);
        if owned && self.is_rdma_addr(addr) {
            return Ok(Transport::Ib); // [IB-3]
        }
        if owned && (!is_loopback(addr) || !self.config.addrs.is_empty()) {
            return Ok(Transport::Tcp);
        }
        if is_loopback(addr) && (owned || self.config.addrs.is_empty()) {
            return Ok(Transport::Loopback);
        }
        Err(Error::AddrNotAvailable)
    }

    fn free_port(&mut self, local_addr: usize, port: u16) -> Option<u16> {
        let taken = &self.local_addrs[local_addr].ports;
        if port != 0 {
            return (!taken.contains_key(&port)).then_some(port);
        }
        let start = (self.rng.below(65_534) + 2) as u16;
        (start..=u16::MAX).chain(2..start).find(|p| !taken.contains_key(p))
    }

    /// Sets the default destination; causes no network activity.
    ///
    /// # Errors
    /// [`Error::DestinationRequired`], [`Error::BadAddress`], [`Error::WrongProtocolType`],
    /// [`Error::ScopeMismatch`].
    pub fn connect(&mut self, id: SocketId, addr: SocketAddr) -> Result<(), Error> {
        let to = endpoint(addr);
        if !is_unicast(to.addr) {
            return Err(match addr {
                SocketAddr::V4(v4) if v4.ip().is_unspecified() => Error::DestinationRequired,
                SocketAddr::V4(_) => Error::BadAddress,
                SocketAddr::V6(_) => Error::WrongProtocolType,
            });
        }
        let sock = self.sock_mut(id)?;
        let to = to.or_scope(sock.bound.map(|bound| bound.at.scope));
        if needs_scope(to.addr)
            && (to.scope == 0
                || sock.bound.is_some_and(|b| b.at.scope != 0 && b.at.scope != to.scope))
        {
            return Err(Error::ScopeMismatch);
        }
        sock.dest = Some(to);
        sock.route = None;
        Ok(())
    }

    /// Address the socket is bound to.
    ///
    /// # Errors
    /// [`Error::BadSocket`].
    pub fn local_addr(&self, id: SocketId) -> Result<Option<SocketAddr>, Error> {
        Ok(self.sock(id)?.bound.map(|b| b.at.to_socket_addr()))
    }

    /// Default destination of the socket.
    ///
    /// # Errors
    /// [`Error::BadSocket`]; [`Error::NotConnected`] without one.
    pub fn peer_addr(&self, id: SocketId) -> Result<SocketAddr, Error> {
        self.sock(id)?.dest.map(Endpoint::to_socket_addr).ok_or(Error::NotConnected)
    }

    /// Closes a socket: its queued and unacknowledged messages are cancelled, its received messages
    /// are dropped.
    pub fn close(&mut self, now: Instant, id: SocketId) {
        self.now = now;
        let Some(sock) = self.sockets.remove(id.0) else { return };
        if sock.cong_waiting {
            self.cong_waiters.retain(|s| *s != id);
        }
        if sock.wait_mask != 0 {
            self.monitors.retain(|s| *s != id);
        }
        if let Some(bound) = sock.bound {
            self.local_addrs[bound.local_addr].ports.remove(&bound.at.port);
            if sock.congested {
                self.set_congested(bound.local_addr, bound.at.port, false);
            }
        }
        self.stats.recv_bytes_freed_fromsock += sock.rcv_bytes as u64;
        for (_, _, len, conn) in sock.queue.iter() {
            self.release_held(conn, len);
        }
        for (conn, len) in &sock.lent {
            self.release_held(*conn, *len);
        }
        if sock.snd_msgs > 0 {
            self.cancel(id, sock.latest);
        }
        // Memory goes last, since what is cancelled may have announced it [RDMA-6].
        sock.regions.into_values().for_each(|region| self.release_region(region));
        self.release_used_regions(|_, of| of == id);
    }

    /// Removes all messages of the socket to one destination.
    ///
    /// # Errors
    /// [`Error::BadSocket`]; [`Error::NotConnected`] when not bound.
    pub fn cancel_sent_to(
        &mut self,
        now: Instant,
        id: SocketId,
        to: SocketAddr,
    ) -> Result<(), Error> {
        self.now = now;
        if self.sock(id)?.bound.is_none() {
            return Err(Error::NotConnected);
        }
        let to = endpoint(to);
        let sock = self.sockets.get_mut(id.0).ok_or(Error::BadSocket)?;
        let mut chosen = BTreeMap::new();
        // From peer to peer, whatever the number of its ports.
        let mut next = sock.latest.first_key_value();
        while let Some(((conn, ..), _)) = next {
            if self.conns.get(conn.0).is_some_and(|c| c.remote == to.addr) {
                chosen.extend(sock.latest.range((*conn, to.port, 0)..=(*conn, to.port, u8::MAX)));
            }
            let others = (Excluded((*conn, u16::MAX, u8::MAX)), Unbounded);
            next = sock.latest.range(others).next();
        }
        for to in chosen.keys() {
            sock.latest.remove(to);
        }
        self.cancel(id, chosen);
        Ok(())
    }

    /// Removes all messages of the socket to all destinations, as the manual page promises for
    /// RDS_CANCEL_SENT_TO without an address [D-13].
    ///
    /// # Errors
    /// [`Error::BadSocket`]; [`Error::NotConnected`] when not bound.
    pub fn cancel_all(&mut self, now: Instant, id: SocketId) -> Result<(), Error> {
        self.now = now;
        if self.sock(id)?.bound.is_none() {
            return Err(Error::NotConnected);
        }
        let all = std::mem::take(&mut self.sock_mut(id)?.latest);
        self.cancel(id, all);
        Ok(())
    }

    /// Returns the number of messages of the socket that the node keeps, one entry for each
    /// destination: queued and unacknowledged messages, and cancelled ones that are being written.
    ///
    /// # Errors
    /// [`Error::BadSocket`]; [`Error::NotConnected`] when not bound.
    pub fn outstanding(&self, id: SocketId) -> Result<Vec<OutstandingMessages>, Error> {
        let sock = self.sock(id)?;
        let bound = sock.bound.ok_or(Error::NotConnected)?;
        let mut held: BTreeMap<SocketAddr, (usize, usize)> = BTreeMap::new();
        let mut count = |conn: &Conn, msg: &TxMsg| {
            let to = to_socket_addr(conn.remote, msg.dport, conn.scope);
            let (messages, bytes) = held.entry(to).or_default();
            *messages += 1;
            *bytes += msg.len as usize;
        };
        for (to, last) in &sock.latest {
            let Some(conn) = self.conns.get(to.0.0) else { continue };
            let Some(path) = conn.paths.get(usize::from(to.2)) else { continue };
            path.sent_by(id, to.1, *last).for_each(|msg| count(conn, msg));
        }
        for (_, conn) in self.conns.iter().filter(|(_, c)| c.local == bound.at.addr) {
            let unwritten = conn.paths.iter().flat_map(Path::unwritten);
            unwritten.filter(|m| m.socket == Some(id)).for_each(|msg| count(conn, msg));
        }
        let entry = |(to, (messages, bytes))| OutstandingMessages { to, messages, bytes };
        Ok(held.into_iter().map(entry).collect())
    }

    /// Cancels all messages of a socket that are named by the latest of each; messages that are
    /// being written are completed on the wire. Costs as much as these messages are: a
    /// program may cancel in a loop, or close many sockets at once.
    fn cancel(&mut self, id: SocketId, latest: BTreeMap<SentTo, u64>) {
        let mut released = Vec::new();
        let mut paths: Vec<(ConnId, u8)> = Vec::new();
        for ((conn_id, dport, index), last) in latest {
            let Some(conn) = self.conns.get(conn_id.0) else { continue };
            let unwritten = self.unwritten(conn, index);
            let Some(conn) = self.conns.get_mut(conn_id.0) else { continue };
            let Some(path) = conn.paths.get_mut(usize::from(index)) else { continue };
            let count = released.len();
            path.cancel(&mut self.pool, (id, dport, last), unwritten, |msg| {
                released.push((conn_id, index, msg.clone()));
            });
            let mut cancelled = released.iter().skip(count).peekable();
            if cancelled.peek().is_none() {
                continue;
            }
            path.skip_dropped();
            paths.push((conn_id, index));
            // It was started on a link that has ended, and is not sent again, but the peer may have
            // received all of it.
            if cancelled.any(|(.., msg)| msg.has(mark::RETRANS))
                && let Some(barrier) = &mut conn.path_barrier
            {
                barrier.unsettled |= 1 << index;
            }
        }
        paths.sort_unstable();
        paths.dedup();
        for (conn, index) in paths {
            self.after_release(conn, index);
        }
        released.sort_unstable_by_key(|(conn, index, msg)| (*conn, *index, msg.seq));
        for (.., msg) in &released {
            self.release_message(msg);
        }
        for (conn, _, msg) in released.iter().filter(|(.., msg)| msg.has(mark::OPS)) {
            self.ops_gone(*conn, msg.seq, Gone::Cancelled);
        }
    }

    /// Releases a message that was cancelled alone, while its record is still queued.
    pub(super) fn release_one(&mut self, conn_id: ConnId, index: u8, msg: &TxMsg) {
        let to = (conn_id, msg.dport, index);
        let path = self.conns.get(conn_id.0).and_then(|conn| conn.paths.get(usize::from(index)));
        if let Some(id) = msg.socket
            && let Some(sock) = self.sockets.get_mut(id.0)
            && sock.latest.get(&to) == Some(&msg.seq)
        {
            let before = path.and_then(|path| path.sent_by(id, msg.dport, msg.seq).next());
            match before {
                Some(before) => sock.latest.insert(to, before.seq),
                None => sock.latest.remove(&to),
            };
        }
        self.release_message(msg);
    }

    /// Forgets where messages of a socket were queued that are gone. Messages leave a path at its
    /// front: of those that are cancelled elsewhere nothing is noted.
    #[cold]
    pub(super) fn forget_stale(&mut self, id: SocketId) {
        let Some(sock) = self.sockets.get_mut(id.0) else { return };
        let conns = &self.conns;
        sock.latest.retain(|(conn, _, index), last| {
            let path = conns.get(conn.0).and_then(|conn| conn.paths.get(usize::from(*index)));
            path.and_then(|path| path.queue.front()).is_some_and(|first| first.seq <= *last)
        });
    }

    /// Notes anew whose messages are queued on a path, and in which order.
    pub(super) fn note_senders(&mut self, conn_id: ConnId, index: u8) {
        let Some(conn) = self.conns.get_mut(conn_id.0) else { return };
        let Some(path) = conn.paths.get_mut(usize::from(index)) else { return };
        let mut with_stale = BTreeSet::new();
        for msg in path.queue.iter_mut().filter(|msg| !msg.has(mark::CANCELLED)) {
            let Some(id) = msg.socket else { continue };
            if let Some(sock) = self.sockets.get_mut(id.0) {
                let latest = sock.latest.insert((conn_id, msg.dport, index), msg.seq);
                msg.before = latest.filter(|before| *before < msg.seq).unwrap_or(0);
                if sock.has_stale() {
                    with_stale.insert(id);
                }
            }
        }
        with_stale.into_iter().for_each(|id| self.forget_stale(id));
    }

    /// Registers for one wake-up. After registering, try the operation again, then wait for
    /// [`Output::Wake`](crate::Output::Wake).
    ///
    /// # Errors
    /// [`Error::BadSocket`].
    pub fn register(&mut self, id: SocketId, interest: Interest) -> Result<(), Error> {
        let sock = self.sock_mut(id)?;
        sock.interest |= interest.0;
        if interest.0 & interest_bit::WRITE != 0 && sock.seen_congestion && !sock.cong_waiting {
            sock.cong_waiting = true;
            self.cong_waiters.push(id);
        }
        Ok(())
    }

    pub(super) fn wake(&mut self, id: SocketId, bits: u8) {
        let Some(sock) = self.sockets.get_mut(id.0) else { return };
        let hit = sock.interest & bits;
        if hit != 0 {
            sock.interest &= !hit;
            self.outputs.push_back(Output::Wake { socket: id, ready: Interest(hit) });
        }
    }

    /// Returns which operations on the socket can succeed now, without side effects.
    ///
    /// # Errors
    /// [`Error::BadSocket`].
    pub fn readiness(&self, id: SocketId) -> Result<Readiness, Error> {
        let sock = self.sock(id)?;
        Ok(Readiness {
            // Notifications [RDMA-26] and completions [ZC-8] too.
            readable: !sock.queue.is_empty()
                || sock.notify_mask != 0
                || !sock.notifications.is_empty()
                || !sock.completions.is_empty(),
            writable: !self.is_send_full(sock),
        })
    }

    /// Evaluates poll(2) as the kernel does, with its side effects to: a change of
    /// any congestion map is shown once. The result never contains an error or a hangup.
    ///
    /// # Errors
    /// [`Error::BadSocket`].
    pub fn poll(&mut self, id: SocketId) -> Result<u32, Error> {
        let ready = self.readiness(id)?;
        let generation = self.cong_generation;
        let sock = self.sock_mut(id)?;
        let mut bits = 0;
        if ready.readable {
            bits |= poll::IN;
        }
        if !sock.monitor && sock.poll_generation != generation {
            sock.poll_generation = generation;
            bits |= poll::IN | poll::WRBAND;
        }
        if ready.writable {
            bits |= poll::OUT;
        }
        if bits != 0 {
            sock.seen_congestion = false;
        }
        Ok(bits)
    }

    /// Payload bytes of the socket that are queued or unacknowledged.
    ///
    /// # Errors
    /// [`Error::BadSocket`].
    pub fn send_bytes(&self, id: SocketId) -> Result<usize, Error> {
        self.sock(id).map(|s| s.snd_bytes)
    }

    /// Messages of the socket that are queued or unacknowledged, empty ones included.
    ///
    /// # Errors
    /// [`Error::BadSocket`].
    pub fn send_messages(&self, id: SocketId) -> Result<usize, Error> {
        self.sock(id).map(|s| s.snd_msgs)
    }

    /// Returns the effective send and receive buffer that a new socket has, in bytes.
    pub fn default_buffers(&self) -> (usize, usize) {
        let send = self.config.send_buffer.max(SEND_BUFFER_MIN);
        (send, self.config.recv_buffer.max(RECV_BUFFER_MIN))
    }

    /// Returns the effective send buffer in bytes.
    ///
    /// # Errors
    /// [`Error::BadSocket`].
    pub fn send_buffer(&self, id: SocketId) -> Result<usize, Error> {
        self.sock(id).map(|s| s.sndbuf)
    }

    /// Tells whether a socket's port is marked congested: senders wait until enough is received.
    #[must_use]
    pub fn is_congested(&self, id: SocketId) -> bool {
        self.sockets.get(id.0).is_some_and(|sock| sock.congested)
    }

    /// Returns the effective receive buffer in bytes.
    ///
    /// # Errors
    /// [`Error::BadSocket`].
    pub fn recv_buffer(&self, id: SocketId) -> Result<usize, Error> {
        self.sock(id).map(|s| s.rcvbuf)
    }

    /// Sets the effective send buffer in bytes; at least 2304.
    ///
    /// # Errors
    /// [`Error::BadSocket`].
    pub fn set_send_buffer(&mut self, id: SocketId, bytes: usize) -> Result<(), Error> {
        self.sock_mut(id)?.sndbuf = bytes.max(SEND_BUFFER_MIN);
        self.wake(id, interest_bit::WRITE);
        Ok(())
    }

    /// Sets the effective receive buffer in bytes; at least 1152. Congestion is evaluated with the
    /// next change of the queue.
    ///
    /// # Errors
    /// [`Error::BadSocket`].
    pub fn set_recv_buffer(&mut self, id: SocketId, bytes: usize) -> Result<(), Error> {
        self.sock_mut(id)?.rcvbuf = bytes.max(RECV_BUFFER_MIN);
        Ok(())
    }

    /// Switches congestion monitoring.
    ///
    /// # Errors
    /// [`Error::BadSocket`].
    pub fn set_cong_monitor(&mut self, id: SocketId, on: bool) -> Result<(), Error> {
        let sock = self.sock_mut(id)?;
        sock.monitor = on;
        if !on {
            // The port's bit in the map stays as accounting left it [B-10].
            sock.wait_mask = 0;
            sock.notify_mask = 0;
            self.monitors.retain(|s| *s != id);
        }
        Ok(())
    }

    /// Switches time stamps of received messages.
    ///
    /// # Errors
    /// [`Error::BadSocket`].
    pub fn set_timestamp(&mut self, id: SocketId, on: bool) -> Result<(), Error> {
        self.sock_mut(id)?.timestamp = on;
        Ok(())
    }

    /// Switches receive path latency; a count of 0 ends it, [SAFE-17].
    ///
    /// # Errors
    /// [`Error::BadSocket`]; [`Error::Fault`] for a count above 3 or a position above 2, which
    /// leaves it off.
    pub fn set_latency_trace(&mut self, id: SocketId, trace: LatencyTrace) -> Result<(), Error> {
        let now = self.now;
        let sock = self.sock_mut(id)?;
        if trace.count > 3 {
            return Err(Error::Fault);
        }
        sock.latency = None;
        if trace.positions.iter().take(usize::from(trace.count)).any(|p| *p > 2) {
            return Err(Error::Fault);
        }
        sock.latency = (trace.count > 0).then_some(trace);
        sock.traced_since = now;
        Ok(())
    }

    /// Allows zero-copy sends and their completions (SO_ZEROCOPY) [ZC-1].
    ///
    /// # Errors
    /// [`Error::BadSocket`].
    pub fn set_zerocopy(&mut self, id: SocketId, on: bool) -> Result<(), Error> {
        self.sock_mut(id)?.zerocopy = on;
        Ok(())
    }

    /// Switches RDS_RECVERR; affects RDMA operations that are sent from now on, [RDMA-10].
    ///
    /// # Errors
    /// [`Error::BadSocket`].
    pub fn set_recverr(&mut self, id: SocketId, on: bool) -> Result<(), Error> {
        self.sock_mut(id)?.recverr = on;
        Ok(())
    }

    /// Sets the type of service, once, before the first message [IB-4], [TOOL-1]. Only RDMA knows
    /// it.
    ///
    /// # Errors
    /// [`Error::BadSocket`]; [`Error::BadValue`] when it is set, or a send has had a destination.
    #[doc(alias = "SIOCRDSSETTOS")]
    pub fn set_tos(&mut self, id: SocketId, tos: u8) -> Result<(), Error> {
        let sock = self.sock_mut(id)?;
        if sock.tos != 0 || sock.has_had_route {
            return Err(Error::BadValue);
        }
        sock.tos = tos;
        Ok(())
    }

    /// Tells whether a send of the socket has had a destination to go to. It may have been refused
    /// then; the type of service cannot be set any more.
    pub fn has_had_route(&self, id: SocketId) -> bool {
        self.sockets.get(id.0).is_some_and(|sock| sock.has_had_route)
    }

    /// Type of service of the socket.
    ///
    /// # Errors
    /// [`Error::BadSocket`].
    #[doc(alias = "SIOCRDSGETTOS")]
    pub fn tos(&self, id: SocketId) -> Result<u8, Error> {
        self.sock(id).map(|s| s.tos)
    }

    /// Tells whether RDS_RECVERR is on.
    ///
    /// # Errors
    /// [`Error::BadSocket`].
    pub fn recverr(&self, id: SocketId) -> Result<bool, Error> {
        self.sock(id).map(|s| s.recverr)
    }

    /// Chooses the transport before bind by its number.
    ///
    /// [`Error::NotSupported`] if the socket has a transport; [`Error::BadValue`] for a number that
    /// names no transport; [`Error::NoSuchOption`] for a transport that this node does not have.
    pub fn set_transport(&mut self, id: SocketId, number: i32) -> Result<(), Error> {
        let has_rdma = self.has_rdma();
        let sock = self.sock_mut(id)?;
        if sock.transport.is_some() {
            return Err(Error::NotSupported);
        }
        match number {
            0 if has_rdma => sock.transport = Some(Transport::Ib),
            2 => sock.transport = Some(Transport::Tcp),
            0 | 1 => return Err(Error::NoSuchOption),
            _ => return Err(Error::BadValue),
        }
        Ok(())
    }

    /// Transport of the socket, if it has one.
    ///
    /// # Errors
    /// [`Error::BadSocket`].
    pub fn transport(&self, id: SocketId) -> Result<Option<Transport>, Error> {
        self.sock(id).map(|s| s.transport)
    }
}

/// Converts an address to an endpoint.
pub(super) fn endpoint(addr: SocketAddr) -> Endpoint {
    let scope = match addr {
        SocketAddr::V4(_) => 0,
        SocketAddr::V6(v6) => {
            if needs_scope(*v6.ip()) {
                v6.scope_id()
            } else {
                0
            }
        }
    };
    Endpoint { addr: mapped(addr.ip()), port: addr.port(), scope }
}

#[cfg(test)]
mod tests {
    use std::io::IoSlice;
    use std::net::{IpAddr, SocketAddr};
    use std::sync::Arc;

    use crate::ids::ConnId;
    use crate::path::steps;
    use crate::{Config, Error, Instant, Node, SendMsg, SocketId};

    const LOCAL: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 1));
    /// A peer that is not connected to.
    const PEER: &str = "10.0.0.2:4000";

    fn now() -> Instant {
        Instant::default()
    }

    fn addr(text: &str) -> SocketAddr {
        text.parse().expect("an address")
    }

    fn node() -> Node {
        Node::new(Config { addrs: vec![LOCAL], ..Config::default() })
    }

    fn bound(node: &mut Node) -> SocketId {
        let socket = node.socket().expect("room for one");
        node.bind(socket, (LOCAL, 0).into()).expect("a free port");
        socket
    }

    fn send(node: &mut Node, socket: SocketId, to: &str, payload: &[u8]) {
        let payload = [IoSlice::new(payload)];
        let msg = SendMsg { name: Some(addr(to)), payload: &payload, ..SendMsg::default() };
        node.send(now(), socket, &msg).expect("room in the queue");
    }

    // tests [D-13]
    #[test]
    fn cancel_all_takes_back_messages_to_every_destination() {
        let mut node = node();
        let socket = node.socket().expect("room for one");
        assert_eq!(node.cancel_all(now(), socket), Err(Error::NotConnected));
        node.bind(socket, (LOCAL, 4000).into()).expect("a free port");
        for to in ["10.0.0.2:4000", "10.0.0.3:5000"] {
            send(&mut node, socket, to, b"five!");
        }
        assert_eq!(node.send_bytes(socket), Ok(10));
        node.cancel_all(now(), socket).expect("bound");
        assert_eq!(node.send_bytes(socket), Ok(0));
        node.check_invariants();
    }

    // tests: whoever may open many sockets could stop the node for minutes
    #[test]
    fn closing_many_sockets_looks_at_each_message_a_few_times() {
        const SOCKETS: usize = 400;
        const EACH: usize = 50;
        for in_turn in [true, false] {
            let mut node = node();
            let sockets: Vec<_> = (0..SOCKETS).map(|_| bound(&mut node)).collect();
            for at in 0..SOCKETS * EACH {
                let of = if in_turn { at % SOCKETS } else { at / EACH };
                send(&mut node, sockets[of], PEER, b"");
            }
            steps::take();
            for socket in sockets {
                node.close(now(), socket);
            }
            let steps = steps::take();
            assert!(steps <= 20 * SOCKETS * EACH, "{steps} for {}", SOCKETS * EACH);
            assert_eq!(node.send_memory().accounted, 128, "only the probe stays");
            node.check_invariants();
        }
    }

    // tests: a program may cancel in a loop
    #[test]
    fn cancelling_looks_only_at_what_it_takes_back() {
        const OTHERS: usize = 20_000;
        const ROUNDS: usize = 2_000;
        let mut node = node();
        let (others, socket) = (bound(&mut node), bound(&mut node));
        for _ in 0..OTHERS {
            send(&mut node, others, PEER, b"");
        }
        send(&mut node, socket, "10.0.0.2:4001", b"stays");
        steps::take();
        for _ in 0..ROUNDS {
            node.cancel_sent_to(now(), socket, addr(PEER)).expect("bound");
            node.cancel_sent_to(now(), others, addr("10.0.0.2:4001")).expect("bound");
        }
        assert_eq!(steps::take(), 0, "there is nothing to cancel");
        for _ in 0..ROUNDS {
            send(&mut node, socket, PEER, b"goes");
            node.cancel_sent_to(now(), socket, addr(PEER)).expect("bound");
        }
        let steps = steps::take();
        assert!(steps <= 20 * ROUNDS + 5 * OTHERS, "{steps} steps");
        assert_eq!(node.send_bytes(socket), Ok(5));
        assert_eq!(node.send_messages(others), Ok(OTHERS));
        node.check_invariants();
    }

    // tests: what moves to another path is known there, and no more where it was
    #[test]
    fn a_socket_knows_little_of_where_its_messages_were() {
        const PORTS: u16 = 148;
        const KEPT: usize = 10;
        let mut node = node();
        let socket = bound(&mut node);
        send(&mut node, socket, PEER, b"");
        let conn_id = ConnId(node.conns.iter().next().expect("that of the peer").0);
        node.cancel_all(now(), socket).expect("bound");
        node.agree_on_paths(conn_id, Some(8));
        (0..PORTS).for_each(|n| send(&mut node, socket, &format!("10.0.0.2:{}", 5000 + n), b""));
        // Those on the first paths have arrived.
        let mut left = usize::from(PORTS);
        for index in 0..8 {
            while left > KEPT
                && !node.conns.get(conn_id.0).expect("it stays").paths[usize::from(index)]
                    .queue
                    .is_empty()
            {
                node.release_first(conn_id, index, 1);
                left = node.send_messages(socket).expect("open");
            }
        }
        node.check_invariants();
        assert_eq!(node.sock(socket).expect("open").latest.len(), usize::from(PORTS));
        node.agree_on_paths(conn_id, Some(1));
        node.check_invariants();
        assert_eq!(node.send_messages(socket), Ok(KEPT));
        node.close(now(), socket);
        node.check_invariants();
    }

    // tests, [R-530]: where a message is missing, others are passed over as well
    #[test]
    fn cancelling_finds_what_came_before_a_message_that_was_dropped_alone() {
        const OTHERS: usize = 5000;
        const GONE: u32 = 7;
        for is_latest in [true, false] {
            let mut node = node();
            let (others, socket) = (bound(&mut node), bound(&mut node));
            let send_some = |node: &mut Node| {
                send(node, socket, PEER, b"one");
                (0..OTHERS).for_each(|_| send(node, others, PEER, b""));
            };
            send_some(&mut node);
            send(&mut node, socket, PEER, b"begun");
            let conn_id = ConnId(node.conns.iter().next().expect("that of the peer").0);
            for path in node.conns.iter_mut().flat_map(|conn| &mut conn.paths) {
                path.queue.back_mut().into_iter().for_each(|msg| msg.generation = GONE);
            }
            (0..OTHERS).for_each(|_| send(&mut node, others, PEER, b""));
            if !is_latest {
                send_some(&mut node);
            }
            node.drop_started(conn_id, GONE);
            node.check_invariants();
            let left = if is_latest { 1 } else { 2 };
            assert_eq!(node.send_messages(socket), Ok(left));
            send(&mut node, socket, PEER, b"the last");
            steps::take();
            node.cancel_sent_to(now(), socket, addr(PEER)).expect("bound");
            let steps = steps::take();
            assert!(steps <= 20, "{steps} steps for {}", left + 1);
            assert_eq!(node.send_messages(socket), Ok(0));
            node.check_invariants();
        }
    }

    // What is cancelled one by one is forgotten one by one, though its record waits for more.
    #[test]
    fn a_cancelled_message_gives_its_buffer_back_at_once() {
        let mut node = node();
        let (others, socket) = (bound(&mut node), bound(&mut node));
        let lent = Arc::new(vec![1; 5000]);
        send(&mut node, others, PEER, b"before");
        let msg = SendMsg { name: Some(addr(PEER)), lent: Some(&lent), ..SendMsg::default() };
        node.send(now(), socket, &msg).expect("room in the queue");
        send(&mut node, others, PEER, b"behind");
        assert_eq!(Arc::strong_count(&lent), 2);
        node.cancel_sent_to(now(), socket, addr(PEER)).expect("bound");
        assert_eq!(Arc::strong_count(&lent), 1);
        node.check_invariants();
    }
}
