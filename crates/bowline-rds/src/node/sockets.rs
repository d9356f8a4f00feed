//! Socket calls that move no message. Spec: `docs/spec/rds.md`, section 8.

use std::collections::{BTreeMap, VecDeque};
use std::net::{Ipv6Addr, SocketAddr};

use bowline_base::Instant;

use super::Node;
use crate::api::{Interest, Output, OutstandingMessages, Readiness};
use crate::config::{RECV_BUFFER_MIN, SEND_BUFFER_MIN};
use crate::error::Error;
use crate::ids::{ConnId, SocketId};
use crate::path::{TxMsg, mark};
use crate::rdma::op::{Gone, OpLoad};
use crate::socket::{
    Bound, Endpoint, LatencyTrace, Sock, Transport, interest_bit, is_loopback, is_unicast, mapped,
    needs_scope, to_socket_addr,
};

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
        let inode = self.next_inode;
        self.next_inode += 1;
        Ok(SocketId(self.sockets.insert(Sock {
            bound: None,
            dest: None,
            transport: None,
            sndbuf: self.config.send_buffer.max(SEND_BUFFER_MIN),
            rcvbuf: self.config.recv_buffer.max(RECV_BUFFER_MIN),
            snd_bytes: 0,
            snd_msgs: 0,
            rcv_bytes: 0,
            queue: crate::recvq::RecvQueue::default(),
            lent: VecDeque::new(),
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
            zerocopy: false,
            recverr: false,
            tos: 0,
            completions: VecDeque::new(),
            notifications: VecDeque::new(),
            op_load: OpLoad::default(),
            regions: BTreeMap::new(),
            route: None,
            inode,
            owner: None,
        })))
    }

    /// Notes which process opened a socket, for the info interface.
    pub fn set_owner(&mut self, id: SocketId, pid: u32) {
        if let Ok(socket) = self.sock_mut(id) {
            socket.owner = Some(pid);
        }
    }

    /// Binds a socket; port 0 chooses one.
    ///
    /// # Errors
    /// In this order: [`Error::BadSocket`]; [`Error::AlreadyBound`]; [`Error::BadAddress`];
    /// [`Error::ReservedPort`]; [`Error::ScopeMismatch`]; [`Error::AddrNotAvailable`] or, with a
    /// transport chosen, [`Error::TransportAddress`]; [`Error::AddrInUse`].
    pub fn bind(&mut self, id: SocketId, addr: SocketAddr) -> Result<(), Error> {
        let at = endpoint(addr);
        let at = at.or_scope(self.link_of(at.addr));
        let at = at.checked().ok_or(Error::BadAddress)?;
        let sock = self.sock(id)?;
        if sock.bound.is_some() {
            return Err(Error::AlreadyBound);
        }
        if at.port == bowline_wire::rds::PROBE_PORT {
            self.sock_mut(id)?.transport = None;
            return Err(Error::ReservedPort);
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
            self.cancel_where(|m| m.socket == Some(id), None);
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
        self.cancel_where(|m| m.socket == Some(id) && m.dport == to.port, Some(to.addr));
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
        self.cancel_where(|m| m.socket == Some(id), None);
        Ok(())
    }

    /// Returns the number of messages of the socket that the node keeps, one entry for each
    /// destination: queued and unacknowledged messages, and cancelled ones that are being written.
    /// Searches all messages that are queued from the socket's address.
    ///
    /// # Errors
    /// [`Error::BadSocket`]; [`Error::NotConnected`] when not bound.
    #[doc(alias = "held")]
    pub fn outstanding(&self, id: SocketId) -> Result<Vec<OutstandingMessages>, Error> {
        let bound = self.sock(id)?.bound.ok_or(Error::NotConnected)?;
        let mut held: BTreeMap<SocketAddr, (usize, usize)> = BTreeMap::new();
        for (_, conn) in self.conns.iter().filter(|(_, c)| c.local == bound.at.addr) {
            let kept = |m: &&TxMsg| m.socket == Some(id) && !m.has(mark::GONE);
            for msg in conn.paths.iter().flat_map(|p| &p.queue).filter(kept) {
                let to = to_socket_addr(conn.remote, msg.dport, conn.scope);
                let (messages, bytes) = held.entry(to).or_default();
                *messages += 1;
                *bytes += msg.len as usize;
            }
        }
        let entry = |(to, (messages, bytes))| OutstandingMessages { to, messages, bytes };
        Ok(held.into_iter().map(entry).collect())
    }

    /// Cancels messages; messages that are being written are completed on the wire.
    fn cancel_where(&mut self, which: impl Fn(&TxMsg) -> bool, remote: Option<Ipv6Addr>) {
        let mut released = Vec::new();
        let mut ops = Vec::new();
        let ids: Vec<_> = self
            .conns
            .iter()
            .filter(|(_, c)| remote.is_none_or(|r| c.remote == r))
            .map(|(id, _)| id)
            .collect();
        for id in ids {
            let Some(conn) = self.conns.get_mut(id) else { continue };
            let mut changed = [false; 8];
            for ((index, path), changed) in conn.paths.iter_mut().enumerate().zip(&mut changed) {
                let cancelled = path.cancel(&which);
                if cancelled.is_empty() {
                    continue;
                }
                *changed = true;
                if let Some(barrier) =
                    conn.path_barrier.as_mut().filter(|_| path.has_cancelled_started())
                {
                    barrier.unsettled |= 1 << index;
                }
                let with_ops = cancelled.iter().filter(|msg| msg.has(mark::OPS));
                ops.extend(with_ops.map(|msg| (ConnId(id), msg.seq)));
                released.extend(cancelled);
            }
            for (index, _) in (0..).zip(changed).filter(|(_, changed)| *changed) {
                self.drop_cancelled(ConnId(id), index);
            }
            self.check_barrier(ConnId(id));
        }
        for msg in released {
            self.release_message(&msg);
        }
        for (conn, seq) in ops {
            self.ops_gone(conn, seq, Gone::Cancelled);
        }
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

    /// Returns the effective send buffer in bytes.
    ///
    /// # Errors
    /// [`Error::BadSocket`].
    pub fn send_buffer(&self, id: SocketId) -> Result<usize, Error> {
        self.sock(id).map(|s| s.sndbuf)
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
        let sock = self.sock_mut(id)?;
        if trace.count > 3 {
            return Err(Error::Fault);
        }
        sock.latency = None;
        if trace.positions.iter().take(usize::from(trace.count)).any(|p| *p > 2) {
            return Err(Error::Fault);
        }
        sock.latency = (trace.count > 0).then_some(trace);
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
    /// [`Error::BadSocket`]; [`Error::BadValue`] when it is set, or a message was sent.
    #[doc(alias = "SIOCRDSSETTOS")]
    pub fn set_tos(&mut self, id: SocketId, tos: u8) -> Result<(), Error> {
        let sock = self.sock_mut(id)?;
        if sock.tos != 0 || sock.route.is_some() {
            return Err(Error::BadValue);
        }
        sock.tos = tos;
        Ok(())
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

    use crate::{Config, Error, Instant, Node, SendMsg};

    // tests [D-13]
    #[test]
    fn cancel_all_takes_back_messages_to_every_destination() {
        let now = Instant::default();
        let local = "10.0.0.1".parse().expect("an address");
        let mut node = Node::new(Config { addrs: vec![local], ..Config::default() });
        let socket = node.socket().expect("room for one");
        assert_eq!(node.cancel_all(now, socket), Err(Error::NotConnected));
        node.bind(socket, (local, 4000).into()).expect("a free port");
        for to in ["10.0.0.2:4000", "10.0.0.3:5000"] {
            let name = Some(to.parse().expect("an address"));
            let payload = [IoSlice::new(b"five!")];
            let msg = SendMsg { name, payload: &payload, ..SendMsg::default() };
            node.send(now, socket, &msg).expect("room in the queue");
        }
        assert_eq!(node.send_bytes(socket), Ok(10));
        node.cancel_all(now, socket).expect("bound");
        assert_eq!(node.send_bytes(socket), Ok(0));
        node.check_invariants();
    }
}
