//! Runs a real `Node` over the simulated TCP and queue pairs. This driver makes random use of every
//! freedom that the contract gives a driver.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::io::IoSlice;
use std::net::{IpAddr, SocketAddr};

use bowline_rds::{
    CloseHow, CloseReason, Config, Control, Error, Event, Instant, Interest, LinkId, Node, Output,
    Received, RecvOpts, RxBuf, RxPool, SendControl, SendMsg, SocketId, TxBatch,
};
use bowline_wire::rds::HEADER_LEN;
use serde::{Deserialize, Serialize};

use super::ctx::{Ctx, HostEvent, HostId};
use super::host::SendResult;
use super::net::{EndId, Notice, ReadOutcome, Reason, TcpClose};
use super::ops::{Extras, NewRegion};
use super::plan::SlotPlan;
use super::sabotage::{Framing, Sabotage};
use crate::engine::queue::{MS, SEC, US};

mod rdma;

use self::rdma::RdmaSide;
pub(crate) use self::rdma::RdmaWork;

/// Random choices of this driver.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct DriverPlan {
    /// Maximum number of bytes per read.
    pub(crate) read_max: usize,
    /// Maximum number of bytes per write.
    pub(crate) write_max: usize,
    /// Maximum number of messages parsed per turn.
    pub(crate) budget: usize,
    /// Longest time in nanoseconds between the arrival of data and their reading.
    pub(crate) lag: u64,
    /// Writes in a thousand that are reported only later.
    pub(crate) slow_write_permille: u64,
    /// Source ports are not those that the node requested.
    pub(crate) any_port: bool,
    /// Turns in a thousand after which the driver reports that it is about to wait.
    pub(crate) idle_permille: u64,
    /// Reads go into pooled buffers.
    pub(crate) pooled: bool,
}

struct Io {
    end: EndId,
    batch: TxBatch,
    /// A write that was made and is not reported yet: bytes taken, blocked.
    unreported: Option<(usize, bool)>,
    paused: bool,
    read_pending: bool,
    framing: Framing,
}

struct Sock {
    id: SocketId,
    waits_to_read: bool,
    /// The latest send was refused because the send queue was full.
    waits_for_room: bool,
    peek_permille: u64,
    /// Where the latest message went.
    latest: Option<SocketAddr>,
}

/// A bowline node and its driver.
pub(crate) struct BowlineHost {
    id: HostId,
    pub(crate) node: Node,
    pool: RxPool,
    plan: DriverPlan,
    links: BTreeMap<LinkId, Io>,
    ends: HashMap<EndId, LinkId>,
    /// Connections to be accepted, in their order.
    listener: VecDeque<EndId>,
    rdma: Option<RdmaSide>,
    pub(crate) rdma_addrs: Vec<IpAddr>,
    socks: BTreeMap<usize, Sock>,
    slots: HashMap<SocketId, usize>,
    timer: (u64, Option<u64>),
    spins: (u64, u32),
    process_pending: bool,
    acks_pending: bool,
    unparsed: usize,
    hands_over: bool,
    /// Bytes of the longest message that was sent.
    longest: usize,
    /// Bytes of queued messages before each is to count all that it takes.
    sends_max: usize,
    /// The node ends in order, and its peers may not know everything yet.
    says_farewell: bool,
    /// The process is late to close its listener, though its peers know everything.
    late_to_close: bool,
    /// When peers have said farewell, by local and remote address.
    ended_peers: HashMap<(IpAddr, IpAddr), Vec<u64>>,
    sabotage: Option<Sabotage>,
}

/// Bytes that a message counts beside its payload.
const OVERHEAD: usize = 128;
/// Bytes of the records of a path for which a node may have memory whatever is queued.
const RECORDS_KEPT: usize = 128 << 10;
/// A port that no plan gives to a socket.
const NOBODYS_PORT: u16 = 9;

/// Interval in nanoseconds in which a node's driver asks how much a kernel peer's TCP has
/// acknowledged.
const TCP_ACK_INTERVAL: u64 = 10 * MS;
/// Number of TCP in `SO_RDS_TRANSPORT`.
const TRANSPORT_TCP: i32 = 2;
const DRAIN_LIMIT: u64 = 2 * SEC;
/// Longest time in which a process that has told its peers closes its listener.
const CLOSE_LATE: u64 = 60 * MS;
/// Longest time in which a node that ends tells its peers so.
const END_LIMIT: u64 = 500 * MS;
/// Number of bytes that a node may leave unparsed before it must refuse to read.
const UNPARSED_MAX: usize = 64 << 20;

impl BowlineHost {
    pub(crate) fn new(
        id: HostId,
        mut config: Config,
        plan: DriverPlan,
        sabotage: Option<Sabotage>,
    ) -> Self {
        let sends_max = config.limits.send_bytes_total;
        if sabotage == Some(Sabotage::NoSendLimit) {
            config.limits.send_bytes_total = usize::MAX;
        }
        Self {
            id,
            node: Node::new(config),
            pool: RxPool::default(),
            plan,
            links: BTreeMap::new(),
            ends: HashMap::new(),
            listener: VecDeque::new(),
            rdma: None,
            rdma_addrs: Vec::new(),
            socks: BTreeMap::new(),
            slots: HashMap::new(),
            timer: (0, None),
            spins: (0, 0),
            process_pending: false,
            acks_pending: false,
            unparsed: 0,
            hands_over: false,
            longest: 0,
            sends_max,
            says_farewell: false,
            late_to_close: false,
            ended_peers: HashMap::new(),
            sabotage,
        }
    }

    pub(crate) fn open(&mut self, ctx: &mut Ctx, slot: usize, addr: SocketAddr, plan: &SlotPlan) {
        let made = self.node.socket().and_then(|id| {
            if plan.tcp {
                self.node.set_transport(id, TRANSPORT_TCP)?;
            }
            if plan.tos != 0 && self.sabotage != Some(Sabotage::RdmaOneTos) {
                self.node.set_tos(id, plan.tos)?;
            }
            self.node.bind(id, addr)?;
            self.node.set_send_buffer(id, plan.send_buffer)?;
            self.node.set_recv_buffer(id, plan.recv_buffer)?;
            self.node.set_cong_monitor(id, plan.monitor)?;
            Ok(id)
        });
        match made {
            Ok(id) => {
                let peek_permille = plan.peek_permille;
                let sock = Sock {
                    id,
                    waits_to_read: false,
                    waits_for_room: false,
                    peek_permille,
                    latest: None,
                };
                self.socks.insert(slot, sock);
                self.slots.insert(id, slot);
            }
            Err(e) => ctx.fail(|| format!("opening {addr}: {e}")),
        }
        self.carry_out(ctx);
    }

    /// Lets a socket be told of failures, or not.
    pub(crate) fn set_recverr(&mut self, slot: usize, on: bool) {
        if let Some(sock) = self.socks.get(&slot) {
            let _ = self.node.set_recverr(sock.id, on);
        }
    }

    /// Registers memory of a socket.
    pub(crate) fn add_region(&mut self, ctx: &mut Ctx, slot: usize, new: NewRegion) {
        let Some(sock) = self.socks.get(&slot) else { return };
        let (key, tag) = (new.key, u64::from(new.key));
        if let Err(e) = self.node.add_region(sock.id, key, new.len, None, new.once, tag) {
            ctx.fail(|| format!("region {key:#x} of socket {slot}: {e}"));
        }
    }

    /// Takes memory of a socket back.
    pub(crate) fn free_region(&mut self, ctx: &mut Ctx, slot: usize, cookie: u64) {
        let Some(sock) = self.socks.get(&slot) else { return };
        if let Err(e) = self.node.free_region(sock.id, cookie) {
            ctx.fail(|| format!("taking {cookie:#x} of socket {slot} back: {e}"));
        }
        self.carry_out(ctx);
    }

    pub(crate) fn close(&mut self, ctx: &mut Ctx, slot: usize) {
        if let Some(sock) = self.socks.remove(&slot) {
            self.slots.remove(&sock.id);
            let from = self.node.local_addr(sock.id).ok().flatten();
            self.node.close(now(ctx), sock.id);
            if self.sabotage == Some(Sabotage::KeepClosed)
                && let (Some(from), Some(to)) = (from, sock.latest)
            {
                self.keep(ctx, from.ip(), to);
            }
            self.carry_out(ctx);
        }
    }

    pub(crate) fn cancel(&mut self, ctx: &mut Ctx, slot: usize, target: SocketAddr) {
        let Some(sock) = self.socks.get(&slot) else { return };
        if let Err(e) = self.node.cancel_sent_to(now(ctx), sock.id, target) {
            ctx.fail(|| format!("cancelling what was sent to {target}: {e}"));
        }
        self.carry_out(ctx);
    }

    pub(crate) fn send(
        &mut self,
        ctx: &mut Ctx,
        slot: usize,
        target: SocketAddr,
        payload: &[u8],
        extras: &Extras,
    ) -> SendResult {
        let Some(sock) = self.socks.get_mut(&slot) else { return SendResult::Closed };
        let pieces = pieces(ctx, payload);
        let blocking = ctx.rng.chance(500);
        let control = extras.announced.map(SendControl::RdmaDest);
        let msg = SendMsg {
            name: Some(target),
            payload: &pieces,
            control: control.as_slice(),
            rdma: &extras.ops,
            blocking,
            ..SendMsg::default()
        };
        self.longest = self.longest.max(payload.len());
        sock.latest = Some(target);
        let result = match self.node.send(now(ctx), sock.id, &msg) {
            Ok(sent) => {
                if !self.node.is_local(target.ip()) {
                    self.check_frames(ctx);
                }
                if sent.len != payload.len() {
                    ctx.fail(|| format!("sent {} of {} bytes", sent.len, payload.len()));
                }
                if let Some(link) = sent.link {
                    // A driver gathers small messages for a while.
                    if sent.queued_bytes > 20_000 || ctx.rng.chance(400) {
                        self.flush(ctx, link);
                    } else if let Some(io) = self.links.get(&link) {
                        let end = io.end;
                        let delay = ctx.rng.below(200 * US);
                        ctx.schedule_host(delay, self.id, HostEvent::Flush(end));
                    }
                }
                SendResult::Sent
            }
            Err(e @ (Error::QueueFull | Error::Congested | Error::HandshakePending)) => {
                sock.waits_for_room = e == Error::QueueFull;
                let why = match e {
                    Error::QueueFull => "queue full",
                    Error::Congested => "congested",
                    _ => "waits for the peer's kind",
                };
                ctx.coverage.hit("send", why);
                let id = sock.id;
                if let Err(e) = self.node.register(id, Interest::WRITE) {
                    ctx.fail(|| format!("register: {e}"));
                }
                SendResult::Wait
            }
            Err(Error::MessageTooLong(_)) => SendResult::TooLong,
            Err(e) => {
                ctx.fail(|| format!("send to {target}: {e}"));
                SendResult::Closed
            }
        };
        self.carry_out(ctx);
        result
    }

    pub(crate) fn recv(&mut self, ctx: &mut Ctx, slot: usize) -> Option<(SocketAddr, Vec<u8>)> {
        let sock = self.socks.get_mut(&slot)?;
        let id = sock.id;
        let peeked = ctx.rng.chance(sock.peek_permille).then(|| {
            let opts = RecvOpts { peek: true, ..RecvOpts::default() };
            self.node.recv(now(ctx), id, opts).ok().map(taken)
        });
        let received = loop {
            let opts = RecvOpts { want_control: true, ..RecvOpts::default() };
            match self.node.recv(now(ctx), id, opts) {
                // This is a notification without a message.
                Ok(received) if received.source.is_none() => {
                    for control in received.control {
                        let Control::RdmaStatus { token, status } = control else { continue };
                        ctx.op_reported(slot, token, status);
                        if self.sabotage == Some(Sabotage::RdmaReportTwice) {
                            ctx.op_reported(slot, token, status);
                        }
                    }
                }
                Ok(received) => {
                    for control in &received.control {
                        if let Control::RdmaDest(cookie) = control {
                            learned(ctx, slot, received.source, *cookie);
                        }
                    }
                    break Some(taken(received));
                }
                Err(Error::Empty) => {
                    sock.waits_to_read = true;
                    if let Err(e) = self.node.register(id, Interest::READ) {
                        ctx.fail(|| format!("register: {e}"));
                    }
                    break None;
                }
                Err(e) => {
                    ctx.fail(|| format!("recv: {e}"));
                    break None;
                }
            }
        };
        if peeked.is_some_and(|p| p != received) {
            ctx.fail(|| format!("socket {slot}: a peek showed something else than came"));
        }
        self.carry_out(ctx);
        received
    }

    /// Shuts the node down in order: received messages are acknowledged, connections are drained.
    /// One that hands over accepts no more connections, which wait for its successor.
    pub(crate) fn shut_down(&mut self, ctx: &mut Ctx, hands_over: bool) {
        if hands_over {
            self.node.acknowledge_all(now(ctx));
            self.carry_out(ctx);
            self.hands_over = true;
            self.node.close_links(now(ctx));
            return self.carry_out(ctx);
        }
        for link in self.links.keys().copied().collect::<Vec<_>>() {
            self.flush(ctx, link);
        }
        if self.sabotage == Some(Sabotage::EndUntold) {
            return self.end_links(ctx);
        }
        self.node.end(now(ctx));
        self.says_farewell = true;
        ctx.schedule_host(END_LIMIT, self.id, HostEvent::EndLimit);
        self.carry_out(ctx);
    }

    /// Ends the connections of a node whose peers know what they have to know, or cannot be told.
    fn end_links(&mut self, ctx: &mut Ctx) {
        (self.says_farewell, self.late_to_close) = (false, false);
        ctx.tcp_stop_listening(self.id);
        self.node.close_links(now(ctx));
        self.carry_out(ctx);
    }

    /// Goes on as a process that takes over what this one has, when its connections had time to
    /// end.
    pub(crate) fn hand_over(&mut self, ctx: &mut Ctx) {
        for link in self.links.keys().copied().collect::<Vec<_>>() {
            ctx.coverage.hit("driver", "hand-over cuts a connection");
            self.cut(ctx, link);
        }
        self.carry_out(ctx);
        self.rdma_abandon(ctx);
        let mut saved = Vec::new();
        let config = self.node.config().clone();
        let resumed = self
            .node
            .save(now(ctx), &mut saved)
            .and_then(|()| Node::resume(config, now(ctx), &*saved));
        match resumed {
            Ok(node) => {
                self.node = node;
                if let Some(plan) = self.rdma.as_ref().map(|side| side.plan.clone()) {
                    let addrs = self.rdma_addrs.clone();
                    self.serve_rdma(&plan, &addrs);
                }
            }
            Err(e) => return ctx.fail(|| format!("hand-over: {e}")),
        }
        (self.process_pending, self.unparsed, self.hands_over) = (false, 0, false);
        for _ in 0..self.listener.len() {
            ctx.coverage.hit("driver", "connection waits for a successor");
            let delay = ctx.rng.below(self.plan.lag + 1);
            ctx.schedule_host(delay, self.id, HostEvent::Accept);
        }
        // Those who wait ask the new process.
        for slot in self.socks.values_mut() {
            (slot.waits_to_read, slot.waits_for_room) = (false, false);
        }
        ctx.wakes.extend(self.socks.keys().map(|slot| (*slot, true, true)));
        self.carry_out(ctx);
    }

    pub(crate) fn send_bytes(&self, slot: usize) -> usize {
        self.socks.get(&slot).map_or(0, |s| self.node.send_messages(s.id).unwrap_or(0))
    }

    pub(crate) fn drop_links(&mut self, ctx: &mut Ctx, peer: Option<IpAddr>) {
        let n = self.node.drop_links(now(ctx), peer);
        ctx.note([30, n as u64, 0], || format!("host {} drops {n} links", self.id));
        self.carry_out(ctx);
    }

    pub(crate) fn notice(&mut self, ctx: &mut Ctx, end: EndId, notice: Notice) {
        let at = now(ctx);
        if notice == Notice::Incoming {
            self.listener.push_back(end);
            let delay = ctx.rng.below(self.plan.lag + 1);
            ctx.schedule_host(delay, self.id, HostEvent::Accept);
            return;
        }
        let Some(&link) = self.ends.get(&end) else { return };
        match notice {
            Notice::Connected => self.node.handle_connected(at, link, ctx.net.local(end)),
            Notice::ConnectFailed(reason) => {
                if self.sabotage == Some(Sabotage::TakeRefusal) {
                    self.node.handle_connected(at, link, ctx.net.local(end));
                }
                self.forget(link);
                self.node.handle_closed(at, link, close_reason(reason));
            }
            Notice::Readable => self.read_soon(ctx, link),
            Notice::Writable => self.node.handle_writable(at, link),
            Notice::Acked | Notice::Incoming => {}
        }
        self.carry_out(ctx);
    }

    pub(crate) fn event(&mut self, ctx: &mut Ctx, what: HostEvent) {
        let at = now(ctx);
        match what {
            HostEvent::Accept => {
                if !self.hands_over
                    && let Some(end) = self.listener.pop_front()
                {
                    self.accept(ctx, end);
                }
            }
            HostEvent::Read(end) => {
                if let Some(&link) = self.ends.get(&end) {
                    self.read(ctx, link);
                }
            }
            HostEvent::Process => {
                self.process_pending = false;
                self.process(ctx);
            }
            HostEvent::Timer(number) => {
                if number == self.timer.0 {
                    self.timer.1 = None;
                    self.node.handle_timeout(at);
                }
            }
            HostEvent::Flush(end) => {
                if let Some(&link) = self.ends.get(&end) {
                    self.flush(ctx, link);
                }
            }
            HostEvent::FinishWrite(end) => {
                if let Some(&link) = self.ends.get(&end) {
                    self.report_write(ctx, link);
                    self.flush(ctx, link);
                }
            }
            HostEvent::TcpAcks => {
                self.acks_pending = false;
                self.ask_tcp(ctx);
            }
            HostEvent::DrainLimit(end) => {
                if let Some(&link) = self.ends.get(&end) {
                    ctx.coverage.hit("driver", "drain took too long");
                    self.cut(ctx, link);
                }
            }
            HostEvent::EndLimit => {
                if self.late_to_close {
                    self.end_links(ctx);
                } else if self.says_farewell {
                    ctx.coverage.hit("driver", "not all peers could be told of the end");
                    self.end_links(ctx);
                }
            }
            HostEvent::Rdma(work) => self.rdma_work(ctx, work),
            HostEvent::TryPath { .. }
            | HostEvent::Shutdown { .. }
            | HostEvent::Connect { .. }
            | HostEvent::IbShutdown { .. }
            | HostEvent::IbConnect { .. } => {}
        }
        self.carry_out(ctx);
    }

    fn forget(&mut self, link: LinkId) -> Option<EndId> {
        let io = self.links.remove(&link)?;
        self.ends.remove(&io.end);
        Some(io.end)
    }

    fn adopt(&mut self, link: LinkId, end: EndId) {
        let batch = TxBatch::default();
        let framing = Framing::default();
        let io = Io { end, batch, unreported: None, paused: false, read_pending: false, framing };
        self.links.insert(link, io);
        self.ends.insert(end, link);
    }

    fn accept(&mut self, ctx: &mut Ctx, end: EndId) {
        if !ctx.net.accept(end) {
            return;
        }
        let (local, remote) = (ctx.net.local(end), ctx.net.remote(end));
        match self.node.handle_accepted(now(ctx), local, remote) {
            Ok(link) => {
                self.adopt(link, end);
                self.read_soon(ctx, link);
            }
            Err(_) => ctx.tcp_close(end, TcpClose::Reset),
        }
    }

    fn read_soon(&mut self, ctx: &mut Ctx, link: LinkId) {
        let Some(io) = self.links.get_mut(&link) else { return };
        if !io.read_pending && !io.paused {
            io.read_pending = true;
            let end = io.end;
            let delay = ctx.rng.below(self.plan.lag + 1);
            ctx.schedule_host(delay, self.id, HostEvent::Read(end));
        }
    }

    /// Reads until nothing is left, the node refuses, or the turn is over.
    fn read(&mut self, ctx: &mut Ctx, link: LinkId) {
        for _ in 0..4 {
            let Some(io) = self.links.get_mut(&link) else { return };
            io.read_pending = false;
            let deaf = self.sabotage == Some(Sabotage::Deaf) && ctx.rng.chance(20);
            if deaf || !self.node.wants_read(link) {
                ctx.coverage.hit("driver", "read refused by the node");
                io.paused = true;
                return;
            }
            let end = io.end;
            let max = 1 + ctx.rng.index(self.plan.read_max);
            let (outcome, buf) = if self.plan.pooled {
                let mut buf = self.pool.get();
                let outcome = ctx.tcp_read(end, buf.vec(), max);
                if matches!(outcome, ReadOutcome::Data(_)) {
                    (outcome, Some(self.pool.freeze(buf)))
                } else {
                    self.pool.put_back(buf);
                    (outcome, None)
                }
            } else {
                let mut buf = Vec::new();
                let outcome = ctx.tcp_read(end, &mut buf, max);
                (outcome, Some(RxBuf::from_vec(buf)))
            };
            match (outcome, buf) {
                (ReadOutcome::Data(n), Some(buf)) => {
                    self.unparsed += n;
                    if self.unparsed > UNPARSED_MAX {
                        ctx.fail(|| "a node that parses nothing still wants to read".into());
                    }
                    self.node.handle_data(now(ctx), link, buf);
                    self.process(ctx);
                }
                (ReadOutcome::Eof, _) => return self.ended(ctx, link, CloseReason::Eof),
                (ReadOutcome::Failed(reason), _) => {
                    return self.ended(ctx, link, close_reason(reason));
                }
                _ => return,
            }
        }
        self.read_soon(ctx, link);
    }

    /// Reads the bytes that have arrived, as far as the node takes them, and finds out whether the
    /// connection has ended.
    fn read_all(&mut self, ctx: &mut Ctx, link: LinkId) {
        loop {
            let Some(io) = self.links.get(&link) else { return };
            let last = !ctx.net.unread(io.end);
            if !self.node.wants_read(link) {
                self.node.process(now(ctx), None, usize::MAX);
                if !self.node.wants_read(link) {
                    return;
                }
            }
            self.read(ctx, link);
            if last {
                return;
            }
        }
    }

    /// Resets a connection after reading all bytes that TCP has acknowledged, even if the node
    /// refuses to read.
    fn cut(&mut self, ctx: &mut Ctx, link: LinkId) {
        let Some(end) = self.forget(link) else { return };
        while self.sabotage != Some(Sabotage::Unread) {
            let mut bytes = Vec::new();
            match ctx.tcp_read(end, &mut bytes, self.plan.read_max) {
                ReadOutcome::Data(_) => {
                    ctx.coverage.hit("driver", "cut with bytes unread");
                    self.node.handle_data(now(ctx), link, RxBuf::from_vec(bytes));
                }
                _ => break,
            }
        }
        ctx.tcp_close(end, TcpClose::Reset);
        self.node.handle_closed(now(ctx), link, CloseReason::Reset);
    }

    fn ended(&mut self, ctx: &mut Ctx, link: LinkId, reason: CloseReason) {
        if let Some(end) = self.forget(link) {
            self.node.handle_closed(now(ctx), link, reason);
            ctx.tcp_close(end, TcpClose::Fin);
        }
    }

    fn process(&mut self, ctx: &mut Ctx) {
        let until = if self.socks.is_empty() || ctx.rng.chance(700) {
            None
        } else {
            self.socks.values().nth(ctx.rng.index(self.socks.len())).map(|s| s.id)
        };
        let budget = 1 + ctx.rng.index(self.plan.budget);
        if !self.node.process(now(ctx), until, budget) {
            self.unparsed = 0;
            if ctx.rng.chance(self.plan.idle_permille) {
                self.node.idle(now(ctx));
            }
        }
    }

    /// Writes the bytes a link has to send, or as many as TCP takes.
    fn flush(&mut self, ctx: &mut Ctx, link: LinkId) {
        loop {
            let Some(io) = self.links.get_mut(&link) else { return };
            if io.unreported.is_some() {
                return;
            }
            io.batch.clear();
            let max = 1 + ctx.rng.index(self.plan.write_max);
            let n = self.node.poll_transmit(now(ctx), link, &mut io.batch, max);
            if n == 0 {
                return;
            }
            if n != io.batch.len() {
                let len = io.batch.len();
                ctx.fail(|| format!("a batch of {len} bytes announced as {n}"));
            }
            if let Some(how) = self.sabotage.filter(|how| how.needs_room()) {
                let mut bytes: Vec<u8> = io.batch.slices().flatten().copied().collect();
                io.framing.mangle(how, &mut ctx.rng, &mut bytes);
                // Buffers are large in runs with mistakes; the node is told that all bytes were
                // written.
                if ctx.tcp_write(io.end, &bytes) != Ok(bytes.len()) {
                    return;
                }
                io.unreported = Some((n, false));
                self.report_write(ctx, link);
                continue;
            }
            let mut written = 0;
            for slice in io.batch.slices() {
                let Ok(taken) = ctx.tcp_write(io.end, slice) else {
                    ctx.coverage.hit("driver", "write failed");
                    break;
                };
                written += taken;
                if taken < slice.len() {
                    break;
                }
            }
            if written < n {
                let mut offered = io.batch.slices().collect::<Vec<_>>().concat();
                offered.drain(..written);
                ctx.tcp_offered(io.end, &offered);
            }
            io.unreported = Some((written, written < n));
            if ctx.rng.chance(self.plan.slow_write_permille) {
                let end = io.end;
                ctx.coverage.hit("driver", "write reported late");
                let delay = ctx.rng.below(300 * US);
                ctx.schedule_host(delay, self.id, HostEvent::FinishWrite(end));
                return;
            }
            self.report_write(ctx, link);
        }
    }

    fn report_write(&mut self, ctx: &mut Ctx, link: LinkId) {
        let Some(io) = self.links.get_mut(&link) else { return };
        if let Some((written, blocked)) = io.unreported.take() {
            self.node.transmitted(now(ctx), link, written, blocked);
        }
    }

    fn ask_tcp(&mut self, ctx: &mut Ctx) {
        let mut wanting = Vec::new();
        self.node.links_wanting_tcp_ack(&mut wanting);
        for link in wanting {
            let Some(io) = self.links.get(&link) else { continue };
            if io.unreported.is_none() {
                let unacked = ctx.net.unacked(io.end);
                self.node.handle_tcp_acked(now(ctx), link, unacked);
            }
        }
    }

    /// Carries out the node's requests, arms its timer, and checks its invariants.
    pub(crate) fn carry_out(&mut self, ctx: &mut Ctx) {
        let mut rounds = 0;
        while let Some(output) = self.node.poll_output() {
            self.output(ctx, output);
            rounds += 1;
            if rounds > 100_000 {
                ctx.fail(|| "a node asks for things without end".into());
                return;
            }
        }
        self.arm(ctx);
        self.node.check_invariants();
        self.check_accounts(ctx);
        self.check_waiters(ctx);
        if self.says_farewell && !self.late_to_close && self.node.is_told() {
            // Until the listener is closed, the system completes connections that nobody takes.
            self.late_to_close = ctx.rng.chance(300);
            if self.late_to_close {
                let delay = ctx.rng.below(CLOSE_LATE);
                return ctx.schedule_host(delay, self.id, HostEvent::EndLimit);
            }
            self.end_links(ctx);
        }
    }

    /// Tells whether a user who waits for all that socket `slot` has sent still waits, though it
    /// is all for a peer with these addresses that said farewell at `since` or later, and before
    /// `until`, on each connection that the messages may go by: one for each type of service.
    pub(crate) fn waits_for_ended(
        &self,
        (slot, bound): (usize, SocketAddr),
        addrs: &[IpAddr],
        (since, until): (u64, u64),
    ) -> Option<bool> {
        let sock = self.socks.get(&slot)?;
        let info = self.node.info();
        let mut left =
            info.send.iter().chain(&info.retrans).filter(|m| m.local == bound).peekable();
        left.peek()?;
        let has_ended = |ip: IpAddr| {
            let ends = self.ended_peers.get(&(bound.ip(), ip));
            let ends = ends.into_iter().flatten().filter(|at| (since..until).contains(*at)).count();
            let conns = info.connections.iter().filter(|c| (c.local, c.remote) == (bound.ip(), ip));
            ends > 0 && ends >= conns.count()
        };
        let all = left.map(|m| m.remote.ip()).all(|ip| addrs.contains(&ip) && has_ended(ip));
        all.then(|| self.node.is_flushed(sock.id) == Ok(false))
    }

    /// Returns how many messages from one address to another are not acknowledged.
    pub(crate) fn unacknowledged(&self, from: SocketAddr, to: SocketAddr) -> usize {
        let info = self.node.info();
        let kept = info.send.iter().chain(&info.retrans);
        kept.filter(|message| message.local == from && message.remote == to).count()
    }

    /// Compares what the node keeps of messages with what its open sockets have sent and not taken
    /// back, beside what has to be written to its end and what the node itself sends.
    fn check_accounts(&self, ctx: &mut Ctx) {
        let memory = self.node.send_memory();
        let frame = HEADER_LEN + self.longest;
        let written = self.links.len() * 3 * (self.plan.write_max + frame);
        let over_rdma =
            if self.rdma.is_some() { memory.paths * (frame + 80 * OVERHEAD) } else { 0 };
        let pongs = self.node.config().limits.pongs_per_path;
        let own = memory.paths * (pongs + 8) * OVERHEAD;
        let of_socket = |sock: &Sock| {
            let count = self.node.send_messages(sock.id).unwrap_or(0);
            self.node.send_bytes(sock.id).unwrap_or(0) + count * OVERHEAD
        };
        let sent = self.socks.values().map(of_socket).sum::<usize>();
        // Operations that are over wait for a while at the side of messages.
        let sent = if self.rdma.is_some() { 2 * sent } else { sent };
        if memory.accounted > sent + written + over_rdma + own {
            ctx.fail(|| format!("host {} keeps {memory:?}, sockets have {sent}", self.id));
        }
        if memory.records > memory.paths * RECORDS_KEPT + 4 * memory.accounted {
            ctx.fail(|| format!("host {} has too many records: {memory:?}", self.id));
        }
    }

    /// Compares the memory of frames with what they count for, as a node does with each message
    /// that it queues for a peer.
    fn check_frames(&self, ctx: &mut Ctx) {
        let memory = self.node.send_memory();
        if memory.frames > self.sends_max / 4 && memory.frames / 4 > memory.accounted {
            ctx.fail(|| format!("host {} has too much memory of frames: {memory:?}", self.id));
        }
    }

    /// Leaves behind what no open socket has sent, as a node that forgets nothing of a closed one.
    fn keep(&mut self, ctx: &mut Ctx, from: IpAddr, to: SocketAddr) {
        let payload = vec![0; self.longest];
        let pieces = [IoSlice::new(&payload)];
        let name = Some(SocketAddr::new(to.ip(), NOBODYS_PORT));
        let msg = SendMsg { name, payload: &pieces, ..SendMsg::default() };
        if let Ok(id) = self.node.socket()
            && self.node.bind(id, SocketAddr::new(from, 0)).is_ok()
        {
            // It may be congested.
            let _ = self.node.send(now(ctx), id, &msg);
        }
    }

    fn output(&mut self, ctx: &mut Ctx, output: Output) {
        let at = now(ctx);
        match output {
            Output::Connect { link, local, remote, port_mod8 } => {
                if self.sabotage == Some(Sabotage::StayAway) && !ctx.net.faulty {
                    self.node.handle_closed(at, link, CloseReason::Refused);
                    return;
                }
                let modulo = (!self.plan.any_port).then_some(port_mod8);
                match ctx.tcp_connect(self.id, local, modulo, remote) {
                    Ok(end) => self.adopt(link, end),
                    Err(reason) => self.node.handle_closed(at, link, close_reason(reason)),
                }
            }
            Output::Close { link, how: CloseHow::Drain } => {
                if let Some(io) = self.links.get(&link) {
                    let end = io.end;
                    ctx.tcp_shutdown(end);
                    ctx.schedule_host(DRAIN_LIMIT, self.id, HostEvent::DrainLimit(end));
                    self.read_soon(ctx, link);
                }
            }
            Output::Close { link, how: CloseHow::Cut } => self.cut(ctx, link),
            Output::Close { link, how } => {
                if let Some(end) = self.forget(link) {
                    let how = match how {
                        CloseHow::Reset => TcpClose::Reset,
                        _ => TcpClose::Fin,
                    };
                    ctx.tcp_close(end, how);
                }
            }
            Output::Transmit { link } => self.flush(ctx, link),
            Output::Wake { socket, ready } => self.woken(ctx, socket, ready),
            Output::Resume { link } => {
                if let Some(io) = self.links.get_mut(&link) {
                    io.paused = false;
                    self.read_soon(ctx, link);
                }
            }
            Output::CheckAlive { link } => {
                if let Some(io) = self.links.get(&link) {
                    let end = io.end;
                    ctx.coverage.hit("driver", "connection checked");
                    self.read_all(ctx, link);
                    ctx.tcp_probe(end);
                    if self.links.contains_key(&link) {
                        self.node.handle_checked(at, link);
                    }
                }
            }
            Output::RdmaConnect { link, local, remote, shape } => {
                self.rdma_connect(ctx, link, (local.ip(), remote.ip()), &shape);
            }
            Output::RdmaUsed { .. } if self.sabotage == Some(Sabotage::RdmaKeep) => {}
            Output::RdmaUsed { tag } => {
                ctx.coverage.hit("ops", "region used");
                if let Err(what) = ctx.ops.used(tag) {
                    ctx.fail(|| what);
                }
            }
            Output::RdmaRelease { tag } => {
                ctx.coverage.hit("ops", "region released");
                if let Err(what) = ctx.ops.released(tag) {
                    ctx.fail(|| what);
                }
            }
            Output::RdmaSend { link } => self.rdma_send_soon(ctx, link),
            Output::RdmaResume { link } => self.rdma_resume(ctx, link),
            Output::RdmaClose { link } => self.rdma_close(ctx, link),
            Output::Event(Event::Misbehaved { remote, what }) => {
                ctx.fail(|| format!("host {} says {remote} broke a rule: {what}", self.id));
            }
            Output::Event(event) => {
                if self.sabotage == Some(Sabotage::ForgetOnRestart)
                    && matches!(event, Event::PeerRestarted { .. })
                {
                    self.forget_all_sent(ctx);
                }
                if let Event::PeerEnded { local, remote } = event {
                    self.ended_peers.entry((local, remote)).or_default().push(ctx.now);
                }
                ctx.note([31, 0, 0], || format!("host {}: {event:?}", self.id));
            }
            _ => {}
        }
    }

    fn forget_all_sent(&mut self, ctx: &mut Ctx) {
        let info = self.node.info();
        for message in info.send.iter().chain(&info.retrans) {
            for sock in self.socks.values() {
                // Sockets that did not send the message have nothing to cancel.
                let _ = self.node.cancel_sent_to(now(ctx), sock.id, message.remote);
            }
        }
    }

    fn woken(&mut self, ctx: &mut Ctx, socket: SocketId, ready: Interest) {
        let Some(&slot) = self.slots.get(&socket) else { return };
        let (read, write) = (ready.contains(Interest::READ), ready.contains(Interest::WRITE));
        if self.sabotage == Some(Sabotage::LoseWake) && read && ctx.rng.chance(50) {
            return;
        }
        if let Some(sock) = self.socks.get_mut(&slot) {
            sock.waits_to_read &= !read;
            sock.waits_for_room &= !write;
        }
        ctx.wakes.push_back((slot, read, write));
    }

    fn arm(&mut self, ctx: &mut Ctx) {
        if self.node.has_backlog() && !self.process_pending {
            self.process_pending = true;
            let delay = ctx.rng.below(self.plan.lag + 1);
            ctx.schedule_host(delay, self.id, HostEvent::Process);
        }
        let due = self.node.poll_timeout().map(Instant::as_nanos);
        if due != self.timer.1 {
            self.timer = (self.timer.0 + 1, due);
            if let Some(due) = due {
                let what = HostEvent::Timer(self.timer.0);
                ctx.schedule_host(due.saturating_sub(ctx.now), self.id, what);
                self.spins = if due > ctx.now { (0, 0) } else { (due, self.spins.1 + 1) };
                if self.spins.1 > 10_000 {
                    ctx.fail(|| "a timer is due again and again".into());
                }
            }
        }
        if !self.acks_pending {
            let mut wanting = Vec::new();
            self.node.links_wanting_tcp_ack(&mut wanting);
            if !wanting.is_empty() {
                self.acks_pending = true;
                ctx.schedule_host(TCP_ACK_INTERVAL, self.id, HostEvent::TcpAcks);
            }
        }
    }

    /// Checks that no user waits for an event that has happened.
    fn check_waiters(&self, ctx: &mut Ctx) {
        for (slot, sock) in &self.socks {
            match self.node.readiness(sock.id) {
                Ok(ready) => {
                    if ready.readable && sock.waits_to_read {
                        ctx.fail(|| format!("the reader of socket {slot} was not woken"));
                    }
                    if ready.writable && sock.waits_for_room {
                        ctx.fail(|| format!("a sender of socket {slot} was not woken"));
                    }
                }
                Err(e) => ctx.fail(|| format!("readiness of socket {slot}: {e}")),
            }
        }
    }
}

fn now(ctx: &Ctx) -> Instant {
    Instant::from_nanos(ctx.now)
}

/// Notes that a socket gets a cookie.
fn learned(ctx: &mut Ctx, slot: usize, from: Option<SocketAddr>, cookie: u64) {
    if let Some(from) = from.and_then(|from| ctx.oracle.slot_at(from))
        && let Err(what) = ctx.ops.learned(slot, from, cookie)
    {
        ctx.fail(|| what);
    }
}

fn taken(received: Received) -> (SocketAddr, Vec<u8>) {
    let rope = received.data.unwrap_or_default();
    let mut out = vec![0; rope.len()];
    rope.copy_to(&mut out);
    (received.source.unwrap_or_else(|| SocketAddr::from(([0; 4], 0))), out)
}

/// Cuts a payload into pieces, as a vectored send may.
fn pieces<'a>(ctx: &mut Ctx, payload: &'a [u8]) -> Vec<IoSlice<'a>> {
    if ctx.rng.chance(800) {
        return vec![IoSlice::new(payload)];
    }
    let (a, b) = payload.split_at(ctx.rng.index(payload.len() + 1));
    vec![IoSlice::new(a), IoSlice::new(&[]), IoSlice::new(b)]
}

fn close_reason(reason: Reason) -> CloseReason {
    match reason {
        Reason::Refused => CloseReason::Refused,
        Reason::Reset => CloseReason::Reset,
        Reason::TimedOut => CloseReason::TimedOut,
        Reason::AddrNotAvail => CloseReason::AddrNotAvailable,
    }
}
