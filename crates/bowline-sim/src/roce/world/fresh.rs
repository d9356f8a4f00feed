//! Fresh work after the faults, when all earlier work has come to its end. Healthy connections
//! carry requests again, within a stated time, and without waiting for a retransmission where no
//! datagram overtakes another.
//!
//! Fresh requests go over every connection that is established, in both directions, and a new
//! connection is made between each two hosts that had one. The time for all of it is
//! [`World::fresh_bound`].

use bowline_wire::roce::rnr_timer_ns;

use super::{Event, Phase, World};
use crate::engine::coverage::time_share;
use crate::engine::queue::{MS, US};
use crate::roce::plan::ConnPlan;
use crate::roce::reach::{FRESH_IN_ORDER, FRESH_OVERTAKEN};
use crate::roce::side::{SideId, Stage};

/// Time in nanoseconds without any work before fresh work begins: slow programs have polled, and
/// delayed repetitions of requests have come.
const SETTLE: u64 = 12 * MS;
/// How often the run checks for the end of the fresh work within the time allowed.
const LOOKS: u64 = 32;
/// Round trips of a handshake: one for REQ and REP, one for RTU and the packets that follow at
/// once.
const HANDSHAKE: u64 = 2;
/// Round trips of a request: its own, one in which a receive was missing, and one to repair a wrong
/// order.
const OF_REQUEST: u64 = 3;
/// After this time in nanoseconds, and two round trips, a silent peer is asked how far it has come;
/// and how often that may be needed where datagrams overtake each other. A packet that comes before
/// its turn while a receive is missing is dropped, and its sender is not told a second time.
const PROBE: u64 = 5 * MS;
const OVERTAKEN: u64 = 6;
/// Longest pause in nanoseconds of a program before it posts requests for which it had no room.
const NO_ROOM: u64 = 50 * US;

/// State of the fresh work.
#[derive(Debug)]
pub(crate) struct Fresh {
    /// Since when there has been no work.
    rest_since: Option<u64>,
    since: u64,
    bound: u64,
    /// Connections that have to carry fresh work, by the index of their plan.
    conns: Vec<usize>,
    /// When the last request completed.
    pub(super) last: u64,
    /// The work is done, or there was none.
    over: bool,
}

impl Fresh {
    pub(super) const fn new(requests: u32) -> Self {
        let (rest_since, since, bound, last) = (None, 0, 0, 0);
        Self { rest_since, since, bound, conns: Vec::new(), last, over: requests == 0 }
    }
}

impl World {
    /// Tells whether an idle connection stays, because fresh work is to come over it.
    pub(super) fn stays_for_fresh(&self, id: SideId) -> bool {
        !self.fresh.over && self.is_healthy(id)
    }

    pub(super) const fn is_fresh_over(&self) -> bool {
        self.fresh.over
    }

    /// Tells whether fresh work is in progress.
    pub(crate) fn is_fresh(&self) -> bool {
        self.phase == Phase::Fresh
    }

    /// Tells whether a packet of this operation belongs to fresh work; then all packets of its
    /// connection do.
    pub(crate) fn is_fresh_for(&self, opcode: u8) -> bool {
        self.is_fresh() && opcode < 0x60
    }

    /// Tells whether both sides are up, and no earlier mistake is left that a request may meet.
    fn is_healthy(&self, id: SideId) -> bool {
        let up = |id: SideId| self.sides[id].stage == Stage::Up && !self.sides[id].revoked;
        let conn = &self.plan.conns[self.sides[id].conn];
        let sound = conn.short_receives == 0
            && conn.rnr_retry == 7
            && (conn.managed || conn.patience == (17, 7));
        sound && up(id) && self.sides[id].peer.is_some_and(up)
    }

    /// Begins the fresh work when there has been no work for long enough.
    pub(super) fn try_fresh(&mut self) {
        if self.fresh.over {
            return;
        }
        let rests = |id: SideId| match self.sides[id].stage {
            Stage::Up => self.is_healthy(id) && self.idle(id) && self.peer_idle(id),
            stage => stage >= Stage::Drained,
        };
        let rest = self.deciding == 0
            && self.starts_left == 0
            && (0..self.sides.len()).all(rests)
            && self.net.backlog(self.now) == 0;
        if !rest {
            self.fresh.rest_since = None;
            return;
        }
        let since = *self.fresh.rest_since.get_or_insert(self.now);
        if self.now - since >= SETTLE {
            self.begin_fresh();
        }
    }

    fn begin_fresh(&mut self) {
        let rested = self.now - self.phase_since;
        self.base.coverage.hit("rest after the last fault", time_share(rested, self.end_bound()));
        self.phase = Phase::Fresh;
        let up: Vec<SideId> =
            (0..self.sides.len()).filter(|id| self.sides[*id].stage == Stage::Up).collect();
        for &id in &up {
            let conn = self.sides[id].conn;
            self.sides[id].left = self.plan.fresh;
            refresh(&mut self.plan.conns[conn]);
            self.fresh.conns.push(conn);
        }
        for conn in self.new_conns() {
            self.fresh.conns.push(self.plan.conns.len());
            self.base.schedule(0, Event::Connect(self.plan.conns.len()));
            self.plan.conns.push(conn);
        }
        self.fresh.conns.sort_unstable();
        self.fresh.conns.dedup();
        (self.fresh.since, self.fresh.last) = (self.now, self.now);
        self.fresh.bound = self.fresh_bound();
        let (count, bound) = (self.fresh.conns.len(), self.fresh.bound);
        self.note([14, count as u64, bound], || {
            format!("FRESH WORK over {count} connections, within {bound} ns")
        });
        for id in up {
            self.schedule_post(id, 0);
        }
        self.schedule(bound / LOOKS + 1, Event::Check);
    }

    /// Draws a new connection for every two hosts that had one.
    fn new_conns(&self) -> Vec<ConnPlan> {
        let mut pairs = std::collections::BTreeSet::new();
        let mut out = Vec::new();
        for conn in &self.plan.conns {
            let (one, other) = (conn.from.min(conn.to), conn.from.max(conn.to));
            if pairs.insert((one, other)) {
                // The host with the smaller packets asks, since the other host can take them.
                let mtu = |host: usize| self.plan.hosts[host].mtu;
                let (from, to) = if mtu(one) <= mtu(other) { (one, other) } else { (other, one) };
                let mut fresh = ConnPlan { from, to, mtu: mtu(from), ..conn.clone() };
                refresh(&mut fresh);
                (fresh.managed, fresh.reject, fresh.wrong_port) = (true, false, false);
                (fresh.short_receives, fresh.rnr_retry, fresh.patience) = (0, 7, (17, 7));
                (fresh.end_after, fresh.abrupt) = ([None; 2], false);
                (fresh.requests, fresh.decide) = ([self.plan.fresh; 2], 0);
                out.push(fresh);
            }
        }
        out
    }

    /// Returns the time in nanoseconds for the fresh work: a handshake, then the requests of both
    /// sides of a connection one after the other, each with the longest of all waits that programs
    /// and devices may make; and once, for all connections together, the time that their bytes take
    /// on one line.
    fn fresh_bound(&self) -> u64 {
        let most = |of: &dyn Fn(usize) -> u64| (0..self.hosts.len()).map(of).max().unwrap_or(0);
        let turn = most(&|host| self.plan.hosts[host].turn);
        let look = most(&|host| self.plan.hosts[host].look);
        let ack_delay = most(&|host| self.plan.hosts[host].ack_delay.as_nanos() as u64);
        let net = &self.plan.net;
        let round_trip = 2 * (net.delay + net.jitter + turn);
        // Lending a region to the peer takes a request and a message.
        let requests = 2 * (u64::from(self.plan.fresh) + 1);
        let (mut bytes, mut longest) = (0, 0);
        for &conn in &self.fresh.conns {
            let conn = &self.plan.conns[conn];
            bytes += requests * OF_REQUEST * (conn.message_max as u64 + 1_000);
            let missing = rnr_timer_ns(conn.min_rnr_timer) + conn.recv_delay + look;
            let waits = ack_delay + 2 * look + missing + NO_ROOM;
            longest = longest.max(requests * (OF_REQUEST * round_trip + waits));
        }
        let overtaken = if net.jitter > 0 { OVERTAKEN * (PROBE + 2 * round_trip) } else { 0 };
        HANDSHAKE * (round_trip + 2 * look) + longest + bytes * net.per_kib / 1024 + overtaken
    }

    /// Checks the fresh work; when it is done, all connections end.
    pub(super) fn check_fresh(&mut self) {
        let undone = self.fresh.conns.iter().find(|conn| !self.has_carried(**conn)).copied();
        let spent = self.now - self.fresh.since;
        let bound = self.fresh.bound;
        match undone {
            Some(conn) if spent > bound => {
                let state: Vec<String> = (0..self.sides.len())
                    .filter(|id| self.sides[*id].conn == conn)
                    .map(|id| format!("side {id}: {}", self.describe(id)))
                    .collect();
                self.fail(|| {
                    format!(
                        "connection {conn} carries no fresh work within {bound} ns after the faults: \
                         {state:?}"
                    )
                });
            }
            Some(_) => self.schedule(bound / LOOKS + 1, Event::Check),
            None => {
                if !self.fresh.conns.is_empty() {
                    let took = self.fresh.last - self.fresh.since;
                    let group =
                        if self.plan.net.jitter > 0 { FRESH_OVERTAKEN } else { FRESH_IN_ORDER };
                    self.coverage.hit(group, time_share(took, bound));
                }
                self.fresh.over = true;
                self.phase = Phase::Draining;
                self.phase_since = self.now;
                self.schedule(0, Event::Check);
            }
        }
    }

    /// Tells whether both sides of a connection are up and have no work left.
    fn has_carried(&self, conn: usize) -> bool {
        let mut sides = (0..self.sides.len())
            .filter(|id| self.sides[*id].conn == conn && self.sides[*id].stage == Stage::Up);
        let done = |id: SideId| self.idle(id) && self.peer_idle(id);
        sides.next().is_some_and(done) && sides.next().is_some_and(done)
    }
}

/// Turns a connection's plan into one of small, right requests, made at once.
fn refresh(conn: &mut ConnPlan) {
    conn.message_max = conn.message_max.min(2 * conn.mtu.bytes());
    (conn.misuse, conn.misregister, conn.pauses, conn.gap) = (0, 0, 0, 0);
    conn.deregister_after = None;
}
