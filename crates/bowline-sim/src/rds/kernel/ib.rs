//! The kernel's connections over RDMA, by `docs/spec/rds-rdma.md`: one for two addresses and a type
//! of service [IB-4], kept up for ever [IB-5]. Both sides connect; a request that meets another one
//! or a connection in use is refused [IB-30]. Whatever goes wrong drops the connection [IB-99], and
//! receives are posted only when it is established [IB-36]. Neither credits nor operations.
//!
//! ```text
//!   Down --connect, request--> Connecting --established--> Up
//!    ^                              |                       |
//!    +------- shutdown -- Ending <--+------- dropped -------+
//! ```

use std::collections::VecDeque;
use std::net::{IpAddr, SocketAddr};

use bowline_rds::RdmaShape;
use bowline_wire::rds::{ConnectData, FRAGMENT_LEN, HEADER_LEN, Header, MAP_LEN, MapView, Version};

use super::KernelHost;
use super::conn::Message;
use crate::engine::queue::{MS, SEC};
use crate::rds::ctx::{Ctx, HostEvent};
use crate::rds::rdma::{QpId, RdmaNotice};

mod frames;

/// Messages that are not to be acknowledged between two that are [IB-68].
const MAX_UNACKED_PACKETS: u32 = 8;
/// Bytes of such messages.
const MAX_UNACKED_BYTES: usize = 16 << 20;
/// First and longest window of the waiting time before a connection is tried again [IB-32].
const WINDOWS: (u64, u64) = (4 * MS, SEC);
/// Receives that a kernel posts at least: those of the longest message, whose last frame alone
/// wakes it [IB-42].
const LEAST_RECEIVES: usize = 300;
/// Sends at least: one in seventeen is signalled [IB-71].
const LEAST_SENDS: usize = 20;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Down,
    Connecting,
    Up,
    Ending,
}

/// A message of which frames are still to be sent.
#[derive(Debug)]
struct Begun {
    header: Header,
    payload: Vec<u8>,
    done: usize,
}

/// A connection.
#[derive(Debug)]
pub(super) struct IbConn {
    pub(super) local: IpAddr,
    pub(super) remote: IpAddr,
    tos: u8,
    state: State,
    qp: Option<QpId>,
    window: u64,
    next_tx: u64,
    next_rx: u64,
    pub(super) queue: VecDeque<Message>,
    pub(super) retrans: VecDeque<Message>,
    begun: Option<Begun>,
    pub(super) map_queued: bool,
    remote_map: Vec<u8>,
    unacked_packets: u32,
    unacked_bytes: usize,
    /// Size of the send queue, id of the next request, and below which all are complete.
    sends: usize,
    next_id: u64,
    retired: u64,
    unsignalled: u32,
    /// Number of the last message that came, which is to be acknowledged if `ack_wanted`.
    ack: u64,
    ack_wanted: bool,
    /// The acknowledgement that is on its way [IB-66].
    ack_sent: Option<u64>,
    /// The message that is coming.
    coming: Option<(Header, Vec<u8>)>,
}

impl IbConn {
    fn new(local: IpAddr, remote: IpAddr, tos: u8) -> Self {
        Self {
            local,
            remote,
            tos,
            state: State::Down,
            qp: None,
            window: 0,
            next_tx: 1,
            next_rx: 0,
            queue: VecDeque::new(),
            retrans: VecDeque::new(),
            begun: None,
            map_queued: false,
            remote_map: Vec::new(),
            unacked_packets: 0,
            unacked_bytes: MAX_UNACKED_BYTES,
            sends: 0,
            next_id: 0,
            retired: 0,
            unsignalled: 0,
            ack: 0,
            ack_wanted: false,
            ack_sent: None,
            coming: None,
        }
    }

    fn is_congested(&self, port: u16) -> bool {
        MapView::new(&self.remote_map).is_some_and(|map| map.is_congested(port))
    }
}

impl KernelHost {
    /// Returns the connection of two addresses and a type of service, and makes it if there is
    /// none.
    fn ib_conn(&mut self, local: IpAddr, remote: IpAddr, tos: u8) -> usize {
        let known = |c: &IbConn| (c.local, c.remote, c.tos) == (local, remote, tos);
        self.ib.iter().position(known).unwrap_or_else(|| {
            self.ib.push(IbConn::new(local, remote, tos));
            self.ib.len() - 1
        })
    }

    fn ib_of(&self, qp: QpId) -> Option<usize> {
        self.ib.iter().position(|conn| conn.qp == Some(qp))
    }

    /// Puts a message of a socket into the queue, unless the peer's port is congested.
    pub(super) fn ib_send(
        &mut self,
        ctx: &mut Ctx,
        (local, remote, tos): (IpAddr, IpAddr, u8),
        message: Message,
    ) -> bool {
        let c = self.ib_conn(local, remote, tos);
        self.ib_connect(ctx, c);
        if message.dport != 0 && self.ib[c].is_congested(message.dport) {
            return false;
        }
        self.ib_enqueue(c, message);
        self.ib_transmit(ctx, c);
        true
    }

    fn ib_shape(&self, ctx: &Ctx, c: usize) -> RdmaShape {
        let conn = &self.ib[c];
        let data = ConnectData::new(conn.local, conn.remote, Version::V3_1);
        let sends = ctx.rdma.node(self.id).map_or(0, |node| node.send_wr as usize);
        RdmaShape {
            sends: sends.max(LEAST_SENDS),
            receives: 0,
            frame: HEADER_LEN + FRAGMENT_LEN,
            private_data: ConnectData { tos: conn.tos, ..data }.to_bytes(),
            tos: conn.tos,
        }
    }

    /// Connects, if the connection is down.
    pub(super) fn ib_connect(&mut self, ctx: &mut Ctx, c: usize) {
        let shape = self.ib_shape(ctx, c);
        let conn = &mut self.ib[c];
        if conn.state != State::Down {
            return;
        }
        match ctx.rdma_connect(self.id, (conn.local, conn.remote), &shape) {
            Ok(qp) => {
                (conn.state, conn.qp, conn.sends) = (State::Connecting, Some(qp), shape.sends);
            }
            Err(_) => self.ib_connect_later(ctx, c),
        }
    }

    /// Plans the next attempt: the first at once [IB-32].
    fn ib_connect_later(&mut self, ctx: &mut Ctx, c: usize) {
        let window = &mut self.ib[c].window;
        let wait = ctx.rng.below(*window);
        *window = (*window * 2).clamp(WINDOWS.0, WINDOWS.1);
        ctx.schedule_host(wait, self.id, HostEvent::IbConnect { conn: c });
    }

    pub(crate) fn rdma_notice(&mut self, ctx: &mut Ctx, qp: QpId, notice: RdmaNotice) {
        if notice == RdmaNotice::Requested {
            return self.ib_requested(ctx, qp);
        }
        let Some(c) = self.ib_of(qp) else { return };
        match notice {
            RdmaNotice::Established => self.ib_established(ctx, c),
            RdmaNotice::Ended(_) => self.ib_drop(ctx, c),
            RdmaNotice::Received => self.ib_receive(ctx, c),
            RdmaNotice::Sent => self.ib_completed(ctx, c),
            RdmaNotice::Requested => {}
        }
    }

    /// Answers a request [IB-18], [IB-30].
    fn ib_requested(&mut self, ctx: &mut Ctx, request: QpId) {
        let asked = ctx.rdma.request(request);
        let data = ConnectData::parse(&asked.private_data, asked.local.is_ipv6());
        let Some(data) = data.filter(|data| data.negotiated().is_some()) else {
            return ctx.rdma_refuse(self.id, request);
        };
        let c = self.ib_conn(asked.local, asked.remote, data.tos);
        match self.ib[c].state {
            State::Down => {
                let shape = self.ib_shape(ctx, c);
                let qp = ctx.rdma_accept(self.id, request, &shape);
                let conn = &mut self.ib[c];
                (conn.state, conn.qp, conn.sends) = (State::Connecting, Some(qp), shape.sends);
                if data.ack != 0 {
                    self.ib_acked(ctx, c, data.ack);
                }
            }
            State::Up => {
                ctx.coverage.hit("kernel over RDMA", "drops a connection for a later request");
                ctx.rdma_refuse(self.id, request);
                self.ib_drop(ctx, c);
            }
            State::Connecting => {
                ctx.coverage.hit("kernel over RDMA", "refuses while it connects");
                ctx.rdma_refuse(self.id, request);
            }
            State::Ending => {
                ctx.coverage.hit("kernel over RDMA", "refuses while a connection ends");
                ctx.rdma_refuse(self.id, request);
            }
        }
    }

    /// Takes a connection into use [IB-36].
    fn ib_established(&mut self, ctx: &mut Ctx, c: usize) {
        let receives = ctx.rdma.node(self.id).map_or(0, |node| node.recv_wr as usize);
        let conn = &mut self.ib[c];
        let (State::Connecting, Some(qp)) = (conn.state, conn.qp) else { return };
        (conn.state, conn.window, conn.map_queued) = (State::Up, 0, true);
        ctx.rdma_post_receives(qp, receives.max(LEAST_RECEIVES));
        let reply = ctx.rdma.reply(qp);
        let said = reply.and_then(|data| ConnectData::parse(&data, self.ib[c].local.is_ipv6()));
        if let Some(said) = said.filter(|said| said.ack != 0) {
            self.ib_acked(ctx, c, said.ack);
        }
        self.ib_transmit(ctx, c);
    }

    /// Drops a connection; the work queue shuts it down a little later, sometimes after one of the
    /// seconds in which it waits for requests to end [IB-93].
    pub(super) fn ib_drop(&mut self, ctx: &mut Ctx, c: usize) {
        let conn = &mut self.ib[c];
        if !matches!(conn.state, State::Up | State::Connecting) {
            return;
        }
        conn.state = State::Ending;
        if let Some(qp) = conn.qp {
            ctx.rdma_disconnect(qp);
        }
        let delay = if ctx.rng.chance(200) { SEC } else { ctx.rng.below(20 * MS) };
        ctx.schedule_host(delay, self.id, HostEvent::IbShutdown { conn: c });
    }

    /// Shuts a connection down: what was sent and not acknowledged is sent again [IB-70], [IB-94].
    pub(super) fn ib_shutdown(&mut self, ctx: &mut Ctx, c: usize) {
        let conn = &mut self.ib[c];
        if conn.state != State::Ending {
            return;
        }
        if let Some(qp) = conn.qp.take() {
            ctx.rdma_destroy(qp);
        }
        (conn.ack, conn.ack_wanted, conn.ack_sent) = (0, false, None);
        (conn.next_id, conn.retired, conn.unsignalled) = (0, 0, 0);
        (conn.begun, conn.coming, conn.map_queued) = (None, None, false);
        (conn.unacked_packets, conn.unacked_bytes) = (MAX_UNACKED_PACKETS, MAX_UNACKED_BYTES);
        while let Some(mut message) = conn.retrans.pop_back() {
            (message.flagged, message.ask) = (true, true);
            conn.queue.push_front(message);
        }
        conn.state = State::Down;
        self.ib_connect_later(ctx, c);
    }

    /// Tells whether a sender waits for what never comes: an acknowledgement or a map of a peer
    /// whose machine went off when nothing was on its way to it. Nobody looks after idle queue
    /// pairs.
    pub(crate) fn waits_for_the_dead(&self, ctx: &Ctx, slot: usize, target: SocketAddr) -> bool {
        let Some((local, tos, full)) = self.ib_socket(slot) else { return false };
        let dead = |conn: &&IbConn| {
            let alone = conn.qp.is_some_and(|qp| ctx.rdma.is_alone(qp));
            conn.state == State::Up && alone && conn.queue.is_empty() && conn.begun.is_none()
        };
        self.ib.iter().filter(dead).any(|conn| {
            let its = (conn.local, conn.remote, conn.tos) == (local, target.ip(), tos);
            let holds = conn.retrans.iter().any(|message| message.owner == Some(slot));
            (full && holds) || (its && conn.is_congested(target.port()))
        })
    }

    /// Sends a changed map [IB-61].
    pub(super) fn ib_map_changed(&mut self, ctx: &mut Ctx, local: IpAddr) {
        for c in 0..self.ib.len() {
            if self.ib[c].local == local && self.ib[c].state == State::Up {
                self.ib[c].map_queued = true;
                self.ib_transmit(ctx, c);
            }
        }
    }
}

/// Tells whether a frame has a whole map [IB-60].
fn is_map(header: &Header) -> bool {
    header.is_map() && header.len as usize == MAP_LEN
}
