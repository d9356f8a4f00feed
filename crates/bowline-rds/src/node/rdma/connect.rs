//! Connections over RDMA that begin and end. Spec: `docs/spec/rds-rdma.md`, sections 2 and 8.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use bowline_base::Instant;
use bowline_wire::rds::{
    BowlineConnect, CONNECT_LEN, ConnectData, FRAGMENT_LEN, HEADER_LEN, RDMA_PORT_V4, RDMA_PORT_V6,
    Version,
};

use crate::api::{CloseReason, Event, Misbehaviour, Output, PathEnd, Refusal};
use crate::config::MAX_MESSAGE_KERNEL;
use crate::conn::Peer;
use crate::ids::{ConnId, RdmaLinkId};
use crate::node::Node;
use crate::node::sockets::endpoint;
use crate::node::timers::Timer;
use crate::path::{PathState, UNPLANNED, Unwritten, mark};
use crate::rdma::{
    Check, Credits, RDMA_PIECES, RDMA_PIECES_MAX, RdmaAccept, RdmaLink, RdmaShape, RdmaState, Said,
};
use crate::socket::{interest_bit, mapped, to_socket_addr};

/// Time after which an attempt to connect, or an accepted connection, is given up.
const CONNECT_TIME: Duration = Duration::from_secs(10);
/// Requests of two nodes cross within this time; the peer has one that is older, or never will.
const CROSSED_TIME: Duration = Duration::from_millis(500);
/// A connection that was in service for this time was of use, and is made again at once.
const LASTED_TIME: Duration = Duration::from_millis(200);
/// A peer that has been silent for this time while it is needed is sent a frame, for nothing else
/// finds out that it is gone.
const PROBE_TIME: Duration = Duration::from_secs(10);
/// A peer that has announced no receives for this time is connected to anew: without one nothing
/// can be sent to it.
const CREDIT_TIME: Duration = Duration::from_secs(30);
/// How long a connection for which the peer has sent a request has to show that the peer has it.
/// Two frames may get lost one after the other.
const CHECK_TIME: Duration = Duration::from_secs(1);
/// Fewest requests of a queue, so that a map fits and half-full queues are refilled in time.
const QUEUE_MIN: usize = 8;
/// Fewest requests of the send queue: the largest operation, and a frame [RDMA-32].
const SENDS_MIN: usize = RDMA_PIECES_MAX / RDMA_PIECES + 2;

/// Connections that one peer may make, each with a type of service of its own.
const CONNS_OF_PEER: usize = 8;
/// Local and remote address, scope and type of service.
type RdmaKey = (std::net::Ipv6Addr, std::net::Ipv6Addr, u32, u8);
/// Fewest receives while memory is shared by many connections.
const RECEIVES_MIN: usize = 64;

/// Sizes of the queues of a connection.
#[derive(Clone, Copy, Debug)]
struct Queues {
    sends: usize,
    receives: usize,
    /// Memory of a frame, bytes.
    frame: usize,
}

impl Queues {
    fn shape(self, tos: u8, private_data: [u8; CONNECT_LEN]) -> RdmaShape {
        let Self { sends, receives, frame } = self;
        RdmaShape { sends, receives, frame, private_data, tos }
    }
}

impl Node {
    /// Takes a connection request over RDMA. `local` and `remote` are the addresses of the CM.
    ///
    /// # Errors
    /// The private data of the refusal.
    pub fn handle_rdma_request(
        &mut self,
        now: Instant,
        local: SocketAddr,
        remote: SocketAddr,
        private_data: &[u8],
    ) -> Result<RdmaAccept, [u8; 4]> {
        self.now = now;
        self.stats.links_accepted += 1;
        let refuse = |node: &mut Self, why| {
            node.stats.links_refused += 1;
            node.event(Event::Refused { remote: remote.ip(), why });
            crate::rdma::RDMA_REJECT
        };
        if !self.config.peers.permits(remote.ip()) {
            self.stats.peers_not_permitted += 1;
            return Err(refuse(self, Refusal::NotPermitted));
        }
        let local_ip = local.ip().to_canonical();
        let remote_ip = remote.ip().to_canonical();
        // The addresses of the private data name the connection; they have to be those of the CM,
        // or a peer could take the place of another [IB-29], [SAFE-5].
        let data = ConnectData::parse(private_data, local_ip.is_ipv6()).filter(|data| {
            (data.source, data.destination) == (remote_ip, local_ip)
                && local_ip.is_ipv4() == remote_ip.is_ipv4()
                && self.rdma_addrs.contains(&local_ip)
        });
        let Some((data, version)) = data.and_then(|data| Some((data, data.negotiated()?))) else {
            self.stats.peer_errors += 1;
            return Err(refuse(self, Refusal::PrivateData));
        };
        if version != Version::V3_1 {
            return Err(refuse(self, Refusal::LaterVersion)); // [IB-116]
        }
        let queues = self.rdma_queues();
        let mut credits = self.rdma_credits(data.credit > 0, queues);
        if !credits.limit(if self.config.sysctl.ib_flow_control() { data.credit } else { 0 }) {
            self.stats.peer_errors += 1;
            return Err(refuse(self, Refusal::PrivateData)); // [IB-79]
        }
        let (here, there) = (endpoint(local), endpoint(remote));
        if self.is_local_at(there.addr, there.scope) {
            return Err(refuse(self, Refusal::Local));
        }
        let scope = there.scope.max(here.scope);
        let key = (here.addr, there.addr, scope, data.tos);
        if self.refuses(self.rdma_index.get(&key)) {
            return Err(refuse(self, Refusal::Closing));
        }
        let conn_id = match self.rdma_index.get(&key) {
            Some(id) => *id,
            None if self.has_many_rdma_conns(key) => return Err(refuse(self, Refusal::Peers)),
            None => match self.rdma_conn_for_unproven(key) {
                Some(id) => id,
                None => return Err(refuse(self, Refusal::Peers)),
            },
        };
        let Some(conn) = self.conns.get_mut(conn_id.0) else {
            return Err(refuse(self, Refusal::Peers));
        };
        conn.last_used = now;
        let present = conn.rdma.as_ref().and_then(|rdma| rdma.link);
        if let Some(present) = present
            && let Some(link) = self.rdma_links.get(present.0)
        {
            match link.state {
                // Both connect at once: the connection of the smaller address stays [IB-31]. An
                // older request went to a process that is gone, or got lost.
                RdmaState::Connecting
                    if here.addr > there.addr || now >= link.begun + CROSSED_TIME =>
                {
                    self.give_up_rdma(present);
                }
                RdmaState::Connecting | RdmaState::Accepted | RdmaState::Closing => {
                    self.stats.ib_connect_raced += 1;
                    return Err(refuse(self, Refusal::Raced));
                }
                // The peer has lost the connection that this node takes to be up [IB-30], or
                // somebody says so in its name [IB-113]. Of a young connection the peer may have
                // sent the request before it was made.
                RdmaState::Up => {
                    if link.since.is_some_and(|since| now >= since + LASTED_TIME) {
                        self.ask_rdma(present);
                    }
                    return Err(refuse(self, Refusal::Raced));
                }
            }
        }
        let mut answer = ConnectData::new(local_ip, remote_ip, Version::V3_1);
        answer.tos = data.tos; // [IB-27]
        answer.credit = credits.take_initial();
        answer.bowline = data.bowline.and(self.rdma_offer());
        let link = self.add_rdma_link(conn_id, RdmaState::Accepted, queues, credits);
        let fragment = self.rdma_fragment_with(data.bowline);
        if let Some(link) = self.rdma_links.get_mut(link.0) {
            link.fragment = fragment;
            link.said = Some(Said { bowline: data.bowline, ack: data.ack });
        }
        Ok(RdmaAccept { link, shape: queues.shape(data.tos, answer.to_bytes()) })
    }

    /// What this node tells a bowline peer; `None` where it behaves like a kernel [IB-110].
    fn rdma_offer(&self) -> Option<BowlineConnect> {
        let frame_kib = u8::try_from((self.rdma_fragment() + HEADER_LEN) / 1024).unwrap_or(u8::MAX);
        let max_message = u16::try_from(self.config.max_message >> 16).unwrap_or(u16::MAX);
        self.config.end_to_end.then_some(BowlineConnect { frame_kib, max_message })
    }

    /// Believes what the request of an accepted connection said: an RTU or a frame has come, for
    /// which the peer needs what this node has answered [IB-34], [IB-111].
    pub(in crate::node) fn rdma_request_proven(&mut self, id: RdmaLinkId) {
        let Some(link) = self.rdma_links.get_mut(id.0) else { return };
        let Some(Said { bowline, ack }) = link.said.take() else { return };
        self.rdma_peer_is(id, bowline);
        self.rdma_acked_before(id, ack);
    }

    /// Asks on a connection that is up whether the peer still has it. A peer that does not answer
    /// is gone, and may connect anew [IB-113].
    fn ask_rdma(&mut self, id: RdmaLinkId) {
        let until = self.now + CHECK_TIME;
        let Some(link) = self.rdma_links.get_mut(id.0).filter(|link| link.check.is_none()) else {
            return;
        };
        link.check = Some(Check { from: link.tx.next, until });
        link.rx.ack_due = true;
        self.signal_rdma(id);
        self.arm(until, Timer::RdmaCheck(id));
    }

    /// A sender is refused because of a map. If that came long ago, the peer may have lost the
    /// connection since, and what was congested with it [IB-114].
    #[cold]
    pub(in crate::node) fn doubt_rdma_map(&mut self, conn: ConnId) {
        let Some(conn) = self.conn(conn) else { return };
        let Some(id) = conn.rdma.as_ref().and_then(|rdma| rdma.link) else { return };
        let heard_at = conn.last_frame_at;
        let Some(link) = self.rdma_links.get_mut(id.0) else { return };
        let Some(since) = link.since.filter(|_| link.state == RdmaState::Up) else { return };
        let known_at = heard_at.max(since).max(link.asked_at);
        let mute = link.credits.available() == 0;
        if self.now.saturating_since(known_at) >= PROBE_TIME && !mute {
            link.asked_at = self.now;
            self.ask_rdma(id);
        }
    }

    pub(in crate::node) fn rdma_check_overdue(&mut self, id: RdmaLinkId) {
        let Some(link) = self.rdma_links.get(id.0).filter(|l| l.state == RdmaState::Up) else {
            return;
        };
        // The timer may be that of an earlier look.
        if link.check.is_some_and(|check| check.until <= self.now) {
            self.stats.ib_listen_closed_stale += 1;
            self.close_rdma(id);
        }
    }

    /// Payload bytes of a full frame of a peer that says this.
    fn rdma_fragment_with(&self, said: Option<BowlineConnect>) -> usize {
        let said = said.filter(|_| self.config.end_to_end);
        said.map_or(FRAGMENT_LEN, |said| said.fragment().min(self.rdma_fragment()))
    }

    /// Notes what kind of node a peer is, as it says when it connects.
    fn rdma_peer_is(&mut self, id: RdmaLinkId, said: Option<BowlineConnect>) {
        let fragment = self.rdma_fragment_with(said);
        let said = said.filter(|_| self.config.end_to_end);
        let Some(link) = self.rdma_links.get_mut(id.0) else { return };
        link.fragment = fragment;
        let Some(conn) = self.conns.get_mut(link.conn.0) else { return };
        let before = std::mem::replace(
            &mut conn.peer,
            match said {
                None => Peer::Kernel,
                Some(said) => Peer::Bowline {
                    max_message: (u32::from(said.max_message) << 16).max(MAX_MESSAGE_KERNEL),
                },
            },
        );
        if before == Peer::Unknown {
            // Senders of long messages wait for the peer's kind to be known.
            self.wake_refused(interest_bit::WRITE);
        }
    }

    /// Sets the memory of a frame that the driver can receive, in bytes: a kernel's, or a multiple
    /// of 1024 for long frames between bowline nodes.
    pub fn set_rdma_frame(&mut self, bytes: usize) {
        self.rdma_frame = bytes;
    }

    /// Payload bytes of the longest frame that this node takes.
    pub(in crate::node) fn rdma_fragment(&self) -> usize {
        self.rdma_frame.saturating_sub(HEADER_LEN).max(FRAGMENT_LEN)
    }

    fn rdma_credits(&self, peer_has: bool, queues: Queues) -> Credits {
        if self.config.sysctl.ib_flow_control() && peer_has {
            Credits::announcing(queues.receives as u32)
        } else {
            Credits::default()
        }
    }

    /// Tells whether a peer has so many connections, by type of service, that it may not make
    /// another: limits hold for each of them.
    fn has_many_rdma_conns(&self, (local, remote, scope, _): RdmaKey) -> bool {
        let same = |key: &&RdmaKey| (key.0, key.1, key.2) == (local, remote, scope);
        self.rdma_index.keys().filter(same).count() >= CONNS_OF_PEER
    }

    /// Returns the sizes of the queues of a new connection. They are smaller when there are many,
    /// so that the frames of all connections together do not take much more memory than a quarter
    /// of what may wait for readers.
    fn rdma_queues(&self) -> Queues {
        let sysctl = &self.config.sysctl;
        let number = |of: u32| usize::try_from(of).unwrap_or(usize::MAX);
        let frame = HEADER_LEN + self.rdma_fragment();
        let share = self.config.limits.recv_bytes_total / 4 / frame / (self.rdma_links.len() + 1);
        let receives = number(sysctl.ib_max_recv_wr);
        // Of long frames there are fewer.
        let long = self.rdma_fragment() > FRAGMENT_LEN;
        let receives = if long { receives / 2 } else { receives };
        Queues {
            sends: number(sysctl.ib_max_send_wr).min(share).max(SENDS_MIN),
            receives: receives.min(share.max(RECEIVES_MIN)).max(QUEUE_MIN),
            frame,
        }
    }

    /// Makes a connection the one that its peer is served by.
    fn add_rdma_link(
        &mut self,
        conn_id: ConnId,
        state: RdmaState,
        queues: Queues,
        credits: Credits,
    ) -> RdmaLinkId {
        let queues = (queues.sends, queues.receives);
        let mut link = RdmaLink::new(conn_id, state, queues, credits);
        link.begun = self.now;
        let link = RdmaLinkId(self.rdma_links.insert(link));
        if let Some(conn) = self.conns.get_mut(conn_id.0) {
            conn.links_made += 1;
            let path = conn.make_path(0);
            path.state = PathState::Connecting;
            path.reconnect_at = None;
            if let Some(rdma) = &mut conn.rdma {
                rdma.link = Some(link);
            }
        }
        self.arm(self.now + CONNECT_TIME, Timer::RdmaConnect(link));
        link
    }

    /// Connects to a peer over RDMA [IB-33].
    pub(in crate::node) fn start_rdma_connect(&mut self, conn_id: ConnId) {
        let Some(conn) = self.conns.get_mut(conn_id.0) else { return };
        let Some(rdma) = &conn.rdma else { return };
        conn.dial_attempts = conn.dial_attempts.saturating_add(1);
        let (tos, scope) = (rdma.tos, conn.scope);
        let local = to_socket_addr(conn.local, 0, scope);
        let mut remote = to_socket_addr(conn.remote, 0, scope);
        remote.set_port(if remote.is_ipv4() { RDMA_PORT_V4 } else { RDMA_PORT_V6 });
        let queues = self.rdma_queues();
        let mut credits = self.rdma_credits(true, queues);
        let mut data = ConnectData::new(local.ip(), remote.ip(), Version::V3_1); // [IB-21]
        data.tos = tos;
        data.credit = credits.take_initial();
        data.bowline = self.rdma_offer();
        let shape = queues.shape(tos, data.to_bytes());
        let link = self.add_rdma_link(conn_id, RdmaState::Connecting, queues, credits);
        self.outputs.push_back(Output::RdmaConnect { link, local, remote, shape });
    }

    /// Handles the establishment of a connection [IB-36]: by the peer's REP, whose private data are
    /// given, or by its RTU, which has none [IB-17].
    pub fn handle_rdma_established(
        &mut self,
        now: Instant,
        id: RdmaLinkId,
        private_data: Option<&[u8]>,
    ) {
        self.now = now;
        let flow_control = self.config.sysctl.ib_flow_control();
        let Some(link) = self.rdma_links.get_mut(id.0) else { return };
        if !matches!(link.state, RdmaState::Connecting | RdmaState::Accepted) {
            return;
        }
        let Some(conn) = self.conns.get_mut(link.conn.0) else { return };
        let conn_id = link.conn;
        let (local, remote) = (conn.local, conn.remote);
        let mut ack = 0;
        if let Some(bytes) = private_data
            && let Some(data) = ConnectData::parse(bytes, local.to_ipv4_mapped().is_none())
            && data.version.major != 0
        {
            // [IB-20]
            if data.version < Version::V3_1 {
                return self.rdma_misbehaved(id, Misbehaviour::Version);
            }
            if !link.credits.limit(if flow_control { data.credit } else { 0 }) {
                return self.rdma_misbehaved(id, Misbehaviour::Credits); // [IB-79]
            }
            ack = data.ack;
        }
        let answer = private_data
            .and_then(|bytes| ConnectData::parse(bytes, local.to_ipv4_mapped().is_none())?.bowline);
        link.state = RdmaState::Up;
        link.since = Some(now);
        if private_data.is_some() {
            self.rdma_peer_is(id, answer);
        }
        self.rdma_request_proven(id);
        let Some(conn) = self.conns.get_mut(conn_id.0) else { return };
        if let Some(rdma) = &mut conn.rdma {
            rdma.reached = true;
        }
        let path = conn.make_path(0);
        path.state = PathState::Up;
        conn.told_cannot_connect = None;
        self.peers_gone -= usize::from(conn.is_back());
        conn.map_due = true; // the first thing that is sent [IB-37]
        self.stats.links_up += 1;
        self.event(Event::PathUp {
            local: to_socket_addr(local, 0, 0).ip(),
            remote: to_socket_addr(remote, 0, 0).ip(),
            path: 0,
        });
        self.rdma_acked_before(id, ack);
        self.signal_map(conn_id);
        self.arm(now + PROBE_TIME, Timer::RdmaProbe(id));
        if self.ending.is_some() {
            self.finish_rdma(id);
        }
    }

    /// Sends an acknowledgement that nobody asked for if the peer may be gone: its machine may have
    /// failed after it took all frames and before it acknowledged them, or cleared its map. A peer
    /// that is there takes no notice.
    pub(in crate::node) fn rdma_probe(&mut self, id: RdmaLinkId) {
        let Some(link) = self.rdma_links.get(id.0).filter(|l| l.state == RdmaState::Up) else {
            return;
        };
        let Some(conn) = self.conn(link.conn) else { return };
        let silent =
            self.now.saturating_since(conn.last_frame_at.max(link.since.unwrap_or(self.now)));
        let mute = link.credits.available() == 0 && link.tx.next == link.tx.retired;
        if silent >= PROBE_TIME && self.wants_peer(conn) {
            if mute && silent >= CREDIT_TIME {
                return self.close_rdma(id);
            }
            if let Some(link) = self.rdma_links.get_mut(id.0) {
                link.rx.ack_due = true;
                self.signal_rdma(id);
            }
        }
        self.arm(self.now + PROBE_TIME, Timer::RdmaProbe(id));
    }

    pub(in crate::node) fn rdma_connect_overdue(&mut self, id: RdmaLinkId) {
        let Some(link) = self.rdma_links.get(id.0) else { return };
        match link.state {
            RdmaState::Connecting => {
                let conn = link.conn;
                self.tell_cannot_connect(conn, CloseReason::TimedOut);
                self.peer_is_away(conn, CloseReason::TimedOut);
                self.give_up_rdma(id);
                self.replace_link(conn, 0);
            }
            RdmaState::Accepted => self.close_rdma(id),
            RdmaState::Up | RdmaState::Closing => {}
        }
    }

    /// Gives up a connection and forgets it at once: an attempt to connect, on which nothing was
    /// sent, or one of a peer that is forgotten.
    pub(in crate::node) fn give_up_rdma(&mut self, id: RdmaLinkId) {
        self.close_rdma(id);
        self.unlink_rdma(id);
    }

    /// Ends a connection [IB-93]. Its requests may still read and write memory until the driver
    /// reports that it is closed.
    pub(in crate::node) fn close_rdma(&mut self, id: RdmaLinkId) {
        let Some(link) = self.rdma_links.get_mut(id.0) else { return };
        if link.state == RdmaState::Closing {
            return;
        }
        link.state = RdmaState::Closing;
        if let Some(path) = self.conns.get_mut(link.conn.0).and_then(|c| c.paths.first_mut()) {
            path.state = PathState::Disconnecting;
        }
        self.outputs.push_back(Output::RdmaClose { link: id });
    }

    /// Ends the connection of a peer that broke a rule which the driver or its device checks.
    pub fn handle_rdma_misbehaviour(&mut self, now: Instant, id: RdmaLinkId, what: Misbehaviour) {
        self.now = now;
        let closing = |link: &RdmaLink| link.state == RdmaState::Closing;
        if self.rdma_links.get(id.0).is_some_and(|link| !closing(link)) {
            self.rdma_misbehaved(id, what);
        }
    }

    /// Ends the connection of a peer that broke a rule.
    pub(in crate::node) fn rdma_misbehaved(&mut self, id: RdmaLinkId, what: Misbehaviour) {
        let Some(link) = self.rdma_links.get(id.0) else { return };
        let Some(conn) = self.conns.get(link.conn.0) else { return };
        let remote = to_socket_addr(conn.remote, 0, 0).ip();
        self.stats.peer_errors += 1;
        self.event(Event::Misbehaved { remote, what });
        self.close_rdma(id);
    }

    /// Handles the end of a connection, or the failure of an attempt. None of its requests touches
    /// memory any more.
    pub fn handle_rdma_closed(&mut self, now: Instant, id: RdmaLinkId, reason: CloseReason) {
        self.now = now;
        let Some(link) = self.rdma_links.get_mut(id.0) else { return };
        let conn = link.conn;
        if link.state != RdmaState::Closing {
            link.ended = Some(reason);
        }
        if link.state == RdmaState::Connecting {
            self.tell_cannot_connect(conn, reason);
            self.peer_is_away(conn, reason);
        }
        self.unlink_rdma(id);
        self.replace_link(conn, 0);
    }

    /// Forgets a connection and prepares its path to begin again on another one [IB-94]. The
    /// numbers of messages go on [IB-83].
    pub(in crate::node) fn unlink_rdma(&mut self, id: RdmaLinkId) {
        let Some(link) = self.rdma_links.remove(id.0) else { return };
        self.partial_bytes -= link.partial_bytes();
        self.rdma_paused.retain(|paused| *paused != id);
        let sysctl = &self.config.sysctl;
        let (packets, bytes) = (sysctl.max_unacked_packets, sysctl.max_unacked_bytes);
        let Some(conn) = self.conns.get_mut(link.conn.0) else { return };
        let Some(rdma) = conn.rdma.as_mut().filter(|rdma| rdma.link == Some(id)) else { return };
        rdma.link = None;
        let Some(path) = conn.paths.first_mut() else { return };
        path.state = PathState::Down;
        path.last_end = Some(PathEnd { at: self.now, why: link.ended });
        // Messages may have been taken on one that was not known to be established [IB-39].
        let was_used = link.since.is_some() || link.rx.ack > 0;
        if was_used && path.next_rx_seq > 0 && !link.has_told() {
            path.untold_since = Some(self.now);
        }
        let Some(since) = link.since else { return };
        self.drop_ops(link.conn, |ops| ops.posted);
        let Some(conn) = self.conns.get_mut(link.conn.0) else { return };
        let Some(path) = conn.paths.first_mut() else { return };
        for msg in path.queue.iter_mut().take(path.planned) {
            if msg.stream_start != UNPLANNED {
                msg.marks |= mark::RETRANS | mark::ACK_REQUIRED;
                msg.stream_start = UNPLANNED;
            }
        }
        path.planned = 0;
        path.resets += 1;
        path.unacked_packets = packets;
        path.unacked_bytes = bytes;
        if self.now >= since + LASTED_TIME {
            path.delay = 0;
            conn.dial_attempts = 0;
        }
        path.drop_cancelled(&mut self.pool, Unwritten::Message(None), None);
        let (local, remote) = (conn.local, conn.remote);
        let is_orderly = self.ending.is_some() || conn.peer_ended_at.is_some();
        self.stats.conn_reset += 1;
        self.event(Event::PathDown {
            local: to_socket_addr(local, 0, 0).ip(),
            remote: to_socket_addr(remote, 0, 0).ip(),
            path: 0,
            why: link.ended.filter(|_| !is_orderly),
        });
    }

    /// Names the addresses that are served over RDMA. Sockets that are bound already keep their
    /// transport.
    pub fn set_rdma_addrs(&mut self, addrs: impl IntoIterator<Item = IpAddr>) {
        self.rdma_addrs = addrs.into_iter().map(|addr| addr.to_canonical()).collect();
    }

    /// Tells whether the node still wants a connection, which it asked for or accepted.
    pub fn wants_rdma_link(&self, id: RdmaLinkId) -> bool {
        self.rdma_links.get(id.0).is_some_and(|link| link.state != RdmaState::Closing)
    }

    /// Tells whether an address of this node is served over RDMA.
    pub fn has_rdma(&self) -> bool {
        !self.rdma_addrs.is_empty()
    }

    /// Tells whether an address is served over RDMA.
    pub(in crate::node) fn is_rdma_addr(&self, addr: std::net::Ipv6Addr) -> bool {
        self.rdma_addrs.iter().any(|of| mapped(*of) == addr)
    }
}
