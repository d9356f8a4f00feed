//! Two managers back to back on a network that loses and repeats what a test wants.

mod ends;
mod forged;
mod handshake;
mod hostile;
mod led;
mod lookups;
mod loss;

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use bowline_verbs::{
    CmEvent, CmId, ConnParam, ConnRequest, Mtu, QpAttr, QpState, Qpn, RejectReason,
};
use bowline_wire::roce::MAD_LEN;
use bowline_wire::roce::cm::{CmMad, CmMessage, Rej, Rep, Req};

use super::conn::State;
use super::{CmConfig, Manager, Output, Port, SendMad};
use crate::Instant;
use crate::counters::Counters;
use crate::rng::Rng;

/// The active side.
const A: usize = 0;
/// The passive side.
const P: usize = 1;
const PORT: u16 = 18515;
/// A time at which nothing happens.
const NOW: Instant = Instant::from_nanos(0);
const QP_A: Qpn = Qpn(0x111);
const QP_P: Qpn = Qpn(0x222);

/// A message as it was sent, and when.
#[derive(Clone, Debug)]
struct Sent {
    at: Duration,
    by: usize,
    mad: CmMad,
    bytes: [u8; MAD_LEN],
    to: IpAddr,
}

#[derive(Debug)]
struct Side {
    manager: Manager,
    ip: IpAddr,
    events: Vec<CmEvent>,
    /// Steps ordered, with the number of messages this side had sent before.
    steps: Vec<(Qpn, QpAttr, usize)>,
    sent: usize,
    /// A queue pair of this side may report gaps.
    gap_reports: bool,
    /// Queue pairs cannot be made ready.
    broken: bool,
}

struct Pair {
    sides: [Side; 2],
    now: Instant,
    flight: Vec<Sent>,
    log: Vec<Sent>,
    counters: [Counters; 2],
    /// How often a message arrives: 1 as it should be, 0 lost, 2 twice. Given the message and how
    /// many of its kind there were before.
    delivery: Box<dyn FnMut(&Sent) -> usize>,
}

fn config() -> CmConfig {
    CmConfig { first_resends: Vec::new(), ..CmConfig::default() }
}

fn manager(config: CmConfig, guid: u64) -> Manager {
    let port = Port { guid, mtu: Mtu::M1024, max_rd_atomic: 128, part: None };
    Manager::new(config, port, Rng::new(&[guid as u8; 32]))
}

fn param(qpn: Qpn) -> ConnParam {
    ConnParam { qpn, ..ConnParam::default() }
}

fn ms(at: Duration) -> u64 {
    at.as_millis() as u64
}

impl Pair {
    fn new(config: CmConfig) -> Self {
        let side = |guid: u64, ip: &str| Side {
            manager: manager(config.clone(), guid),
            ip: ip.parse().unwrap(),
            events: Vec::new(),
            steps: Vec::new(),
            sent: 0,
            gap_reports: false,
            broken: false,
        };
        Self {
            sides: [side(0xa, "192.0.2.1"), side(0xb, "192.0.2.2")],
            now: Instant::from_nanos(0),
            flight: Vec::new(),
            log: Vec::new(),
            counters: Default::default(),
            delivery: Box::new(|_| 1),
        }
    }

    /// With a listener on the passive side.
    fn listening(config: CmConfig) -> (Self, CmId) {
        let mut pair = Self::new(config);
        let any: SocketAddr = ([0, 0, 0, 0], PORT).into();
        let listener = pair.sides[P].manager.listen(any).unwrap();
        (pair, listener)
    }

    /// Connected: the pair, and the connection's name on either side.
    fn connected(config: CmConfig) -> (Self, CmId, CmId) {
        let (mut pair, _) = Self::listening(config);
        let (active, passive) = pair.handshake(QP_A, QP_P);
        pair.clear();
        (pair, active, passive)
    }

    /// Connects and accepts; both sides know that the connection stands.
    fn handshake(&mut self, qp_a: Qpn, qp_p: Qpn) -> (CmId, CmId) {
        let (active, passive) = self.accepted(qp_a, qp_p);
        let established = |event: &CmEvent| matches!(event, CmEvent::Established { .. });
        assert!(self.sides.iter().all(|side| side.events.iter().any(established)));
        (active, passive)
    }

    /// Connects and accepts, whatever of the answer arrives.
    fn accepted(&mut self, qp_a: Qpn, qp_p: Qpn) -> (CmId, CmId) {
        let active = self.connect(&param(qp_a));
        let (passive, _) = self.request();
        self.accept(passive, &param(qp_p));
        (active, passive)
    }

    /// From now on messages of this kind are lost.
    fn lose(&mut self, kind: &'static str) {
        self.delivery = Box::new(move |sent| usize::from(name(&sent.mad) != kind));
    }

    fn clear(&mut self) {
        self.log.clear();
        for side in &mut self.sides {
            side.events.clear();
            side.steps.clear();
            side.sent = 0;
        }
    }

    fn connect(&mut self, param: &ConnParam) -> CmId {
        let local = SocketAddr::new(self.sides[A].ip, 0);
        let remote = SocketAddr::new(self.sides[P].ip, PORT);
        let id = self.sides[A].manager.connect(self.now, local, remote, param).unwrap();
        self.settle();
        id
    }

    /// Takes the oldest request from the passive side's events.
    fn request(&mut self) -> (CmId, ConnRequest) {
        let events = &mut self.sides[P].events;
        let at = events.iter().position(|event| matches!(event, CmEvent::ConnectRequest { .. }));
        match events.remove(at.expect("a request")) {
            CmEvent::ConnectRequest { id, request } => (id, request),
            _ => unreachable!(),
        }
    }

    fn accept(&mut self, id: CmId, param: &ConnParam) {
        self.sides[P].manager.accept(id, param).unwrap();
        self.settle();
    }

    fn disconnect(&mut self, side: usize, id: CmId) {
        self.sides[side].manager.disconnect(self.now, id).unwrap();
        self.settle();
    }

    /// Does what side `by` wants done.
    fn drain(&mut self, by: usize) {
        let at = self.now.saturating_since(Instant::from_nanos(0));
        let side = &mut self.sides[by];
        while let Some(output) = side.manager.poll_output() {
            match output {
                Output::Mad(SendMad { from, to, mad: bytes }) => {
                    assert_eq!(from, side.ip);
                    side.sent += 1;
                    let mad = CmMad::parse(&*bytes).unwrap();
                    let sent = Sent { at, by, mad, bytes: *bytes, to };
                    for _ in 0..(self.delivery)(&sent) {
                        self.flight.push(sent.clone());
                    }
                    self.log.push(sent);
                }
                Output::Event(event) => side.events.push(event),
                Output::Order(order) => {
                    side.gap_reports |= order.gap_reports;
                    for step in order.steps {
                        side.steps.push((order.qpn, step, side.sent));
                    }
                    if order.awaited {
                        side.manager.order_done(self.now, order.id, !side.broken);
                    }
                }
            }
        }
        side.manager.check();
    }

    /// Hands a message to a side as if it came from `from`.
    fn inject(&mut self, to: usize, from: IpAddr, transaction: u64, message: CmMessage) {
        let bytes = CmMad { transaction, message }.emit();
        self.inject_bytes(to, from, &bytes);
    }

    fn inject_bytes(&mut self, to: usize, from: IpAddr, bytes: &[u8]) {
        let own = self.sides[to].ip;
        let (now, counters) = (self.now, &mut self.counters[to]);
        self.sides[to].manager.handle_mad(now, from, own, bytes, counters);
        self.drain(to);
    }

    /// Delivers until nothing is under way.
    fn settle(&mut self) {
        for by in [A, P] {
            self.drain(by);
        }
        for _ in 0..1000 {
            if self.flight.is_empty() {
                return;
            }
            let Sent { by, bytes, to, .. } = self.flight.remove(0);
            let from = self.sides[by].ip;
            if let Some(dest) = self.sides.iter().position(|side| side.ip == to) {
                self.inject_bytes(dest, from, &bytes);
            }
        }
        panic!("the messages do not come to an end");
    }

    /// Lets time pass, timer by timer.
    fn pass(&mut self, time: Duration) {
        let end = self.now + time;
        for _ in 0..10_000 {
            let due = self.sides.iter().filter_map(|side| side.manager.poll_timeout()).min();
            match due.filter(|due| *due <= end) {
                Some(due) => self.now = self.now.max(due),
                None => {
                    self.now = end;
                    return;
                }
            }
            for (side, counters) in self.sides.iter_mut().zip(&mut self.counters) {
                side.manager.handle_timeout(self.now, counters);
            }
            self.settle();
        }
        panic!("the timers do not come to an end");
    }

    /// Messages sent by a side, by name.
    fn names(&self, by: usize) -> Vec<&'static str> {
        self.log.iter().filter(|sent| sent.by == by).map(|sent| name(&sent.mad)).collect()
    }

    fn last(&self, by: usize) -> &Sent {
        self.log.iter().rev().find(|sent| sent.by == by).expect("a message")
    }

    fn last_rej(&self, by: usize) -> Rej {
        match self.last(by).mad.message {
            CmMessage::Rej(rej) => rej,
            other => panic!("{other:?}"),
        }
    }

    fn req(&self) -> (u64, Req) {
        let found = self.log.iter().rev().find_map(|sent| match sent.mad.message {
            CmMessage::Req(req) => Some((sent.mad.transaction, req)),
            _ => None,
        });
        found.expect("a REQ")
    }

    fn rep(&self) -> (u64, Rep) {
        let found = self.log.iter().rev().find_map(|sent| match sent.mad.message {
            CmMessage::Rep(rep) => Some((sent.mad.transaction, rep)),
            _ => None,
        });
        found.expect("a REP")
    }

    /// States the queue pair of a side was ordered into.
    fn states(&self, side: usize) -> Vec<QpState> {
        self.sides[side].steps.iter().filter_map(|(_, step, _)| step.state).collect()
    }

    fn step(&self, side: usize, state: QpState) -> QpAttr {
        let found = self.sides[side].steps.iter().find(|(_, step, _)| step.state == Some(state));
        found.expect("a step").1
    }

    fn assert_nothing_left(&self) {
        for side in &self.sides {
            side.manager.assert_empty();
        }
    }
}

fn name(mad: &CmMad) -> &'static str {
    match mad.message {
        CmMessage::Req(_) => "REQ",
        CmMessage::Mra(_) => "MRA",
        CmMessage::Rej(_) => "REJ",
        CmMessage::Rep(_) => "REP",
        CmMessage::Rtu(_) => "RTU",
        CmMessage::Dreq(_) => "DREQ",
        CmMessage::Drep(_) => "DREP",
        CmMessage::SidrReq(_) => "SIDR_REQ",
        CmMessage::SidrRep(_) => "SIDR_REP",
    }
}

fn disconnected(id: CmId) -> CmEvent {
    CmEvent::Disconnected { id }
}

fn rejected(id: CmId, reason: RejectReason) -> CmEvent {
    CmEvent::Rejected { id, reason, private_data: Vec::new() }
}

impl Manager {
    /// What holds between inputs.
    fn check(&self) {
        let count = |wanted: fn(&State) -> bool| {
            self.conns.values().filter(|conn| wanted(&conn.state)).count()
        };
        assert_eq!(self.conns.len(), self.by_comm_id.len());
        assert_eq!(self.awaiting_rtu, count(|state| matches!(state, State::RepSent(_))));
        let unproven = self.conns.iter().filter(|(_, conn)| !conn.proven);
        let unproven = unproven.map(|(id, conn)| (conn.since, *id)).collect();
        assert_eq!(self.unproven, unproven);
        assert!(self.unproven.len() <= self.config.max_unproven);
        assert_eq!(count(|state| matches!(state, State::ReqRcvd)), {
            self.conns.values().filter(|conn| conn.pending_at.is_some()).count()
        });
        assert!(self.conns.len() <= self.config.max_connections);
        assert_eq!(count(|state| matches!(state, State::RepRcvd(_) | State::Accepting(_))), 0);
        assert_eq!(self.timers.len(), self.conns.values().filter(|c| c.timer.is_some()).count());
        self.lookups.check();
        assert!(self.by_peer.len() <= self.conns.len());
        assert!(self.by_peer_qp.len() <= self.conns.len());
        for (id, conn) in &self.conns {
            assert_eq!(self.by_comm_id.get(&conn.comm_id), Some(id));
            let waits = |state: &State| {
                matches!(state, State::ReqRcvd | State::Responded | State::Established)
            };
            let timed = !waits(&conn.state);
            assert_eq!(conn.timer.is_some(), timed, "{conn:?}");
            if let Some(qpn) = conn.qpn {
                assert_eq!(self.by_qp.get(&qpn), Some(id));
            }
        }
    }

    fn assert_empty(&self) {
        assert!(self.conns.is_empty(), "{:?}", self.conns);
        assert!(self.by_comm_id.is_empty() && self.by_qp.is_empty());
        assert!(self.by_peer.is_empty() && self.by_peer_qp.is_empty());
        assert!(self.timers.is_empty() && self.outputs.is_empty());
        assert_eq!((self.unproven.len(), self.awaiting_rtu), (0, 0));
        assert_eq!(self.lookups.len(), 0);
    }
}
