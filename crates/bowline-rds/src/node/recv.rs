//! Receiving by the application. Spec: `docs/spec/rds.md`, section 6.4.

use std::net::SocketAddr;

use bowline_base::Instant;

use super::Node;
use crate::api::{Control, Received, ReceivedInto, RecvOpts};
use crate::error::Error;
use crate::ids::SocketId;
use crate::recvq::{Payload, Popped, RecvMsg, shrink};
use crate::rxbuf::Rope;
use crate::socket::{LatencyTrace, Sock, to_socket_addr};

/// Longest message that [`Node::recv_into`] copies, bytes. A longer one is copied without keeping
/// others from the node.
const COPY_MAX: usize = 16 << 10;
/// Most ends of operations that one call tells where the caller does not say: as many as fit the
/// 256 bytes for control messages that tools have.
const STATUSES_MAX: usize = 8;

impl Node {
    /// Takes the next message into `buf`, without waiting and without control messages. Copies it
    /// when it is short, else gives its payload. It leaves the queue in the same step, so no other
    /// reader can have it.
    ///
    /// # Errors
    /// As [`recv`](Self::recv).
    #[inline]
    pub fn recv_into(
        &mut self,
        now: Instant,
        id: SocketId,
        buf: &mut [u8],
    ) -> Result<ReceivedInto, Error> {
        let sock = self.sockets.get_mut(id.0).ok_or(Error::BadSocket)?;
        let Some(Popped { origin, sport, len }) = sock.queue.pop_into(buf, COPY_MAX) else {
            let Received { source, data, .. } = self.recv(now, id, RecvOpts::default())?;
            let len = data.as_ref().map_or(0, Rope::len);
            return Ok(ReceivedInto { source: source.ok_or(Error::Empty)?, len, data });
        };
        self.now = now;
        self.stats.recv_delivered += 1;
        self.stats.copy_to_user += len as u64;
        self.unqueue_from_socket(id, origin.conn, len);
        Ok(ReceivedInto {
            source: to_socket_addr(origin.addr, sport, origin.scope),
            len,
            data: None,
        })
    }

    /// Lends the messages at the front of the queue to a reader that will take them by itself:
    /// `put` gets the sender, the length in bytes and the payload of each, until it returns `false`
    /// for one, which stays in the queue. Until they are [given back](Self::give_back), the
    /// socket's buffer and the limits hold them as if they were in the queue. A message with
    /// properties that a control message would tell is not lent, nor any behind it. Returns how
    /// many were lent.
    ///
    /// # Errors
    /// [`Error::BadSocket`]; [`Error::Empty`] when there is neither a message nor a notification.
    pub fn lend(
        &mut self,
        now: Instant,
        id: SocketId,
        mut put: impl FnMut(SocketAddr, usize, &mut dyn Iterator<Item = &[u8]>) -> bool,
    ) -> Result<usize, Error> {
        self.now = now;
        if !self.readiness(id)?.readable {
            return Err(Error::Empty);
        }
        let sock = self.sockets.get_mut(id.0).ok_or(Error::BadSocket)?;
        let mut count = 0;
        // With each message of a socket for zero copy a completion may have to come along.
        while !sock.zerocopy
            && let Some(first) = sock.queue.front_plain()
        {
            let from = first.origin.endpoint(first.sport);
            let (conn, seq, len) = (first.origin.conn, first.seq, first.payload.len());
            let name = from.to_socket_addr();
            let taken = match first.payload {
                Payload::Bytes(bytes) => put(name, len, &mut std::iter::once(bytes)),
                Payload::Rope(rope) => put(name, len, &mut rope.slices()),
            };
            if !taken {
                break;
            }
            sock.queue.drop_front();
            sock.lent.push_back((conn, len));
            sock.lent_from.push_back((from, seq));
            count += 1;
        }
        Ok(count)
    }

    /// The reader has taken the first `count` of the messages that were lent to it: they are
    /// delivered [R-1012].
    pub fn give_back(&mut self, now: Instant, id: SocketId, count: usize) {
        self.now = now;
        for _ in 0..count {
            let Some(sock) = self.sockets.get_mut(id.0) else { return };
            let Some((conn, len)) = sock.lent.pop_front() else { return };
            if sock.lent_from.len() > sock.lent.len() {
                sock.lent_from.pop_front();
            }
            self.stats.recv_delivered += 1;
            self.stats.copy_to_user += len as u64;
            self.unqueue_from_socket(id, conn, len);
        }
        if let Some(sock) = self.sockets.get_mut(id.0) {
            shrink(&mut sock.lent);
            shrink(&mut sock.lent_from);
        }
    }

    /// Tells whether the end of an RDMA operation waits.
    pub fn has_status(&self, id: SocketId) -> bool {
        self.sockets.get(id.0).is_some_and(|sock| !sock.notifications.is_empty())
    }

    /// Tells whether a notification waits that comes before all messages.
    pub fn has_notification(&self, id: SocketId) -> bool {
        let waits = |sock: &Sock| sock.notify_mask != 0 || !sock.notifications.is_empty();
        self.sockets.get(id.0).is_some_and(waits)
    }

    /// Takes the next notification or message, without waiting.
    ///
    /// # Errors
    /// [`Error::BadSocket`]; [`Error::Empty`] when there is nothing.
    pub fn recv(&mut self, now: Instant, id: SocketId, opts: RecvOpts) -> Result<Received, Error> {
        self.now = now;
        let sock = self.sockets.get_mut(id.0).ok_or(Error::BadSocket)?;
        let mut control = Vec::new();
        if opts.want_control && !sock.notifications.is_empty() {
            // They come alone [RDMA-25], oldest first [RDMA-29].
            let most = if opts.statuses_max == 0 { STATUSES_MAX } else { opts.statuses_max };
            let count = sock.notifications.len().min(most);
            let told = sock.notifications.drain(..count);
            control.extend(told.map(|(token, status)| Control::RdmaStatus { token, status }));
            shrink(&mut sock.notifications);
            return Ok(Received { source: None, data: None, control });
        }
        if opts.want_control && sock.notify_mask != 0 {
            control.push(Control::CongestionUpdate(std::mem::take(&mut sock.notify_mask)));
            return Ok(Received { source: None, data: None, control });
        }
        let msg = if opts.peek { sock.queue.peek() } else { sock.queue.pop() };
        let Some(msg) = msg else {
            if opts.want_control
                && sock.zerocopy
                && let Some(done) = sock.completions.pop_front()
            {
                control.push(Control::ZcopyCompletion(done)); // alone [ZC-8]
                return Ok(Received { source: None, data: None, control });
            }
            if !opts.want_control && !opts.peek {
                sock.notifications.clear(); // lost, as by a kernel [RDMA-25]
            }
            return Err(Error::Empty);
        };
        if opts.want_control {
            if let Some(rare) = &msg.rare {
                control.extend(rare.rdma_dest.map(Control::RdmaDest));
                control.extend(rare.queued_at.map(Control::Timestamp));
            }
            if let Some(trace) = sock.latency {
                let known = msg.rare.as_ref().and_then(|rare| rare.trace);
                // Nobody has taken the times of one that came before the option.
                let nanos = intervals(trace, &known.unwrap_or([sock.traced_since; 3]), now);
                control.push(Control::Latency { trace, nanos });
            }
            // A peek does not consume completions [B-17].
            if sock.zerocopy
                && !opts.peek
                && let Some(done) = sock.completions.pop_front()
            {
                control.push(Control::ZcopyCompletion(done));
            }
        }
        self.stats.recv_delivered += 1;
        self.stats.copy_to_user += msg.data.len() as u64;
        if !opts.peek {
            self.unqueue_from_socket(id, msg.origin.conn, msg.data.len());
        }
        let RecvMsg { origin, sport, data, .. } = msg;
        let source = Some(to_socket_addr(origin.addr, sport, origin.scope));
        Ok(Received { source, data: Some(data), control })
    }
}

/// Intervals between the points 0 to 3 of R-641.
fn intervals(trace: LatencyTrace, points: &[Instant; 3], now: Instant) -> [u64; 3] {
    let [first, complete, queued] = *points;
    let all = [(first, complete), (complete, queued), (queued, now)];
    let mut nanos = [0; 3];
    for (out, position) in nanos.iter_mut().zip(trace.positions).take(usize::from(trace.count)) {
        if let Some((from, to)) = all.get(usize::from(position)) {
            *out = u64::try_from(to.saturating_since(*from).as_nanos()).unwrap_or(u64::MAX);
        }
    }
    nanos
}
