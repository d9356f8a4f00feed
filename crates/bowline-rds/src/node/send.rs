//! Sending: the checks in the kernel's order, queueing, and the short way within the node.
//! Spec: `docs/spec/rds.md`, sections 5 and 6.6.

use std::io::IoSlice;
use std::net::SocketAddr;

use bowline_wire::rds::{Flags, Header};

use super::Node;
use super::sockets::checked_endpoint;
use crate::api::{SendControl, SendMsg, Sent};
use crate::config::MAX_MESSAGE_KERNEL;
use crate::conn::Peer;
use crate::error::Error;
use crate::ids::{ConnId, SocketId};
use crate::path::{PathState, TxMsg, UNPLANNED, mark};
use crate::rxbuf::Rope;
use crate::socket::{Bound, Endpoint, RecvMsg, Route, Sock, Transport, want};
use crate::time::Instant;

/// Most cookies in one completion record.
#[doc(alias = "RDS_MAX_ZCOOKIES")]
const COOKIES_PER_RECORD: usize = 8;

impl Node {
    /// Sends a message without waiting.
    ///
    /// When the result names a link, the driver decides whether to write now or to gather more:
    /// no [`Output::Transmit`](crate::Output::Transmit) comes for a send.
    ///
    /// # Errors
    /// In the order of spec section 5.2. [`Error::QueueFull`], [`Error::Congested`] and
    /// [`Error::HandshakePending`] pass: a blocking caller registers for
    /// [`Interest::WRITE`](crate::Interest::WRITE) and tries again.
    pub fn send(&mut self, now: Instant, id: SocketId, msg: &SendMsg<'_>) -> Result<Sent, Error> {
        self.now = now;
        let sock = self.sockets.get(id.0).ok_or(Error::BadSocket)?;
        let len: usize = msg.payload.iter().map(|s| s.len()).sum();
        if let Some(route) = sock.route
            && route.name == msg.name
            && let Some(bound) = sock.bound
            && msg.control.is_empty()
            && !msg.zerocopy
            && self.conns.get(route.conn.0).is_some()
        {
            self.check_len(sock, len)?;
            return self.send_remote(id, bound, (route.to, route.conn), msg, len, None);
        }
        let named = match msg.name {
            Some(name) => Some(checked_endpoint(name).ok_or(Error::BadAddress)?),
            None => None,
        };
        let mut to = named.or(sock.dest).ok_or(Error::NotConnected)?;
        let bound = sock.bound.ok_or(Error::NotConnected)?;
        // Also for connected destinations, unlike the kernel.
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
        let cookie = self.check_control(id, msg, bound.transport, len)?;
        if bound.transport == Transport::Loopback || self.is_local_v6(to.addr) {
            return self.send_local(id, bound, to, msg, len, cookie);
        }
        let conn = self.route(id, bound, to, msg.name)?;
        self.send_remote(id, bound, (to, conn), msg, len, cookie)
    }

    fn check_len(&self, sock: &Sock, len: usize) -> Result<(), Error> {
        let limit = (self.config.max_message as usize).min(sock.sndbuf);
        if len > limit {
            return Err(Error::MessageTooLong { len, limit });
        }
        Ok(())
    }

    /// Rows 13 to 16 and 20 to 21 of the order of checks.
    fn check_control(
        &self,
        id: SocketId,
        msg: &SendMsg<'_>,
        transport: Transport,
        len: usize,
    ) -> Result<Option<u32>, Error> {
        let enabled = self.sock(id)?.zerocopy;
        if msg.zerocopy && enabled && transport != Transport::Tcp {
            return Err(Error::NotSupported);
        }
        let has = |f: fn(&SendControl) -> bool| msg.control.iter().any(f);
        if has(|c| matches!(c, SendControl::Unknown(_))) {
            return Err(Error::BadControl);
        }
        let cookie = msg.control.iter().find_map(|c| match c {
            SendControl::ZcopyCookie(cookie) => Some(*cookie),
            _ => None,
        });
        if msg.zerocopy && cookie.is_none() {
            return Err(Error::BadControl);
        }
        let operation = has(|c| matches!(c, SendControl::RdmaArgs | SendControl::Atomic));
        let key = has(|c| matches!(c, SendControl::RdmaDest(_) | SendControl::RdmaMap));
        if operation && (key || cookie.is_some()) {
            return Err(Error::BadControl);
        }
        // Those that pass so far are carried out in their order.
        for control in msg.control {
            match control {
                SendControl::ZcopyCookie(_) if !msg.zerocopy || !enabled || len == 0 => {
                    return Err(Error::BadControl);
                }
                // No key is registered without RDMA.
                SendControl::RdmaDest(_) | SendControl::Unknown(_) => {
                    return Err(Error::BadControl);
                }
                SendControl::ZcopyCookie(_) => {}
                SendControl::RdmaMap | SendControl::RdmaArgs | SendControl::Atomic => {
                    return Err(Error::NotSupported);
                }
            }
        }
        Ok(cookie)
    }

    /// Rows 24 and 25: congestion, then room in the queue.
    fn admit(
        &mut self,
        id: SocketId,
        congested: bool,
        port: u16,
        blocking: bool,
    ) -> Result<(), Error> {
        let limit = self.config.limits.send_messages_per_socket;
        let Some(sock) = self.sockets.get_mut(id.0) else { return Err(Error::BadSocket) };
        if congested {
            sock.seen_congestion = true;
            if blocking {
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
            return Err(Error::Congested);
        }
        if sock.snd_bytes >= sock.sndbuf || sock.snd_msgs >= limit {
            self.stats.send_queue_full += 1;
            return Err(Error::QueueFull);
        }
        Ok(())
    }

    fn send_remote(
        &mut self,
        id: SocketId,
        bound: Bound,
        (to, conn_id): (Endpoint, ConnId),
        msg: &SendMsg<'_>,
        len: usize,
        cookie: Option<u32>,
    ) -> Result<Sent, Error> {
        let conn = self.conns.get(conn_id.0).ok_or(Error::TooManyPeers)?;
        if len > MAX_MESSAGE_KERNEL as usize {
            match conn.peer {
                Peer::Bowline { max_message } if len <= max_message as usize => {}
                Peer::Bowline { max_message } => {
                    return Err(Error::MessageTooLong { len, limit: max_message as usize });
                }
                Peer::Kernel => {
                    return Err(Error::MessageTooLong { len, limit: MAX_MESSAGE_KERNEL as usize });
                }
                Peer::Unknown => {
                    if let Some(sock) = self.sockets.get_mut(id.0) {
                        sock.seen_congestion = true; // woken with the congestion waiters
                    }
                    self.connect_all_if_down(conn_id);
                    return Err(Error::HandshakePending);
                }
            }
        }
        let congested = conn.map.is_set(to.port);
        let index = (bound.hash & u32::from(conn.fan() - 1)) as usize;
        let path_up = conn.paths.get(index).is_some_and(|p| p.state == PathState::Up);
        if !path_up {
            self.connect_all_if_down(conn_id);
        }
        self.admit(id, congested, to.port, msg.blocking)?;

        let half_full = self.sock(id).is_ok_and(|s| s.snd_bytes + len >= s.sndbuf / 2);
        let conn = self.conns.get_mut(conn_id.0).ok_or(Error::TooManyPeers)?;
        conn.last_used = self.now;
        let to_bowline = conn.peer.is_bowline();
        let path = conn.make_path(index as u8, self.first_sequence);
        let mut marks = 0;
        let mut flags = Flags::NONE;
        // Budgets of R-526; the flag is on the wire only between bowline nodes.
        path.unacked_packets -= 1;
        path.unacked_bytes -= len as i64;
        if path.unacked_packets < 0 || path.unacked_bytes < 0 {
            path.unacked_packets = self.config.sysctl.max_unacked_packets.max(1) - 1;
            path.unacked_bytes = self.config.sysctl.max_unacked_bytes;
            self.stats.send_ack_required += 1;
            marks |= mark::ACK_REQUIRED;
        }
        // A sender that will soon have to wait must not wait for a delayed acknowledgement.
        if half_full {
            marks |= mark::ACK_REQUIRED;
        }
        if marks & mark::ACK_REQUIRED != 0 && to_bowline {
            flags = Flags::ACK_REQUIRED;
        }
        if cookie.is_some() {
            marks |= mark::ZCOPY;
        }
        let header = Header {
            sequence: path.next_tx_seq,
            len: len as u32,
            sport: bound.at.port,
            dport: to.port,
            flags,
            ..Header::default()
        };
        let log_start = path.log.tail();
        path.log.append(&mut self.pool, &header.to_bytes());
        for slice in msg.payload {
            path.log.append(&mut self.pool, slice);
        }
        path.queue.push_back(TxMsg {
            seq: path.next_tx_seq,
            log_start,
            stream_start: UNPLANNED,
            socket: Some(id),
            len: len as u32,
            cookie: cookie.unwrap_or(0),
            sport: bound.at.port,
            dport: to.port,
            marks,
        });
        path.next_tx_seq = path.next_tx_seq.wrapping_add(1);
        path.queued_bytes += len as u64;
        self.stats.send_queued += 1;
        if let Some(sock) = self.sockets.get_mut(id.0) {
            sock.snd_bytes += len;
            sock.snd_msgs += 1;
        }
        self.stats.copy_from_user += len as u64;
        let (link, queued_bytes) = match path.link {
            Some(link) if path.state == PathState::Up => {
                let waiting = path.unplanned_bytes();
                let planned = self.links.get(link.0).map_or(0, |l| l.tx.plan_bytes);
                (Some(link), (waiting + planned) as usize)
            }
            _ => (None, 0),
        };
        Ok(Sent { len, link, queued_bytes })
    }

    /// Finds or makes the connection to a destination.
    fn route(
        &mut self,
        id: SocketId,
        bound: Bound,
        to: Endpoint,
        name: Option<SocketAddr>,
    ) -> Result<ConnId, Error> {
        let conn = match self.conn_index.get(&(bound.at.addr, to.addr, to.scope)) {
            Some(conn) => *conn,
            None => {
                let conn = self.new_conn(bound.at.addr, to.addr, to.scope)?;
                // The probe goes before the sender's own message.
                self.queue_probe(conn);
                conn
            }
        };
        if let Some(sock) = self.sockets.get_mut(id.0) {
            sock.route = Some(Route { name, to, conn });
        }
        Ok(conn)
    }

    /// Delivers within the node: accounting is free at once, congestion is that of the
    /// receiving socket, as over any other transport.
    fn send_local(
        &mut self,
        id: SocketId,
        bound: Bound,
        to: Endpoint,
        msg: &SendMsg<'_>,
        len: usize,
        cookie: Option<u32>,
    ) -> Result<Sent, Error> {
        let home = self.home_index.get(&(to.addr, to.scope)).copied();
        let congested = home.is_some_and(|h| self.homes[h].map.is_set(to.port));
        self.admit(id, congested, to.port, msg.blocking)?;
        self.stats.send_queued += 1;
        self.stats.copy_from_user += len as u64;
        if let Some(cookie) = cookie {
            self.complete(id, cookie);
        }
        let never = (Instant::default(), Instant::default());
        if to.port == 0 {
            if !self.config.sysctl.ping_enable {
                return Ok(Sent { len, link: None, queued_bytes: 0 });
            }
            self.stats.recv_ping += 1;
            if self.homes[bound.home].map.is_set(bound.at.port) {
                self.stats.cong_send_error += 1;
            } else {
                self.stats.send_pong += 1;
                // From the pinged address to the pinging socket, whatever the two are.
                self.queue_on_socket(
                    id,
                    local_message(Endpoint { port: 0, ..to }, Rope::default()),
                    never,
                );
            }
            return Ok(Sent { len, link: None, queued_bytes: 0 });
        }
        match home.and_then(|h| self.homes[h].ports.get(&to.port).copied()) {
            None => self.stats.recv_drop_no_sock += 1,
            Some(receiver) => {
                let data = Rope::from_vec(gather(msg.payload, len));
                self.queue_on_socket(receiver, local_message(bound.at, data), never);
            }
        }
        Ok(Sent { len, link: None, queued_bytes: 0 })
    }

    /// Gives back what a message counted against its socket, when it is released or cancelled.
    pub(super) fn release_accounting(&mut self, msg: &TxMsg) {
        let Some(id) = msg.socket else { return };
        let Some(sock) = self.sockets.get_mut(id.0) else { return };
        sock.snd_bytes -= msg.len as usize;
        sock.snd_msgs -= 1;
        if sock.snd_bytes == 0 && msg.len > 0 {
            self.stats.send_queue_empty += 1;
        }
        let room = sock.interest & want::WRITE != 0 && sock.snd_bytes < sock.sndbuf;
        if msg.has(mark::ZCOPY) {
            self.complete(id, msg.cookie);
        }
        if room {
            self.wake(id, want::WRITE);
        }
    }

    /// Queues a zero-copy completion; also wakes a blocking reader [B-25].
    fn complete(&mut self, id: SocketId, cookie: u32) {
        let Some(sock) = self.sockets.get_mut(id.0) else { return };
        match sock.completions.front_mut() {
            Some(record) if record.len() < COOKIES_PER_RECORD => record.push(cookie),
            _ => sock.completions.push_back(vec![cookie]),
        }
        self.wake(id, want::READ);
    }

    /// Queues a message of the node itself: a probe or a pong.
    pub(super) fn queue_control(
        &mut self,
        conn: ConnId,
        index: usize,
        sport: u16,
        dport: u16,
        ext: [u8; bowline_wire::rds::EXT_AREA_LEN],
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
        });
        path.next_tx_seq = path.next_tx_seq.wrapping_add(1);
        self.stats.send_queued += 1;
        self.stats.send_pong += 1;
        if let (PathState::Up, Some(link)) = (path.state, path.link) {
            self.signal_transmit(link);
        }
    }
}

fn gather(slices: &[IoSlice<'_>], len: usize) -> Vec<u8> {
    let mut out = Vec::with_capacity(len);
    slices.iter().for_each(|s| out.extend_from_slice(s));
    out
}

fn local_message(from: Endpoint, data: Rope) -> RecvMsg {
    RecvMsg { from, seq: 0, data, conn: None, rdma_dest: None, queued_at: None, trace: None }
}
