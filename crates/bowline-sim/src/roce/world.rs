//! A run, step by step: devices, their programs and the faults.

use bowline_verbs::{CmId, Completion, ConnRequest};

use self::fresh::Fresh;
use super::datagrams::{Port, UdDatagram};
use super::host::Host;
use super::net::{Datagram, Net};
use super::plan::Plan;
use super::reach::{self, Reached};
use super::sabotage::Sabotage;
use super::side::{Side, SideId, Stage};
use super::stats::Stats;
use super::streams::Stream;
use crate::engine::base::{Base, has_base};
use crate::engine::queue::SEC;
use crate::engine::rng::Rng;
use crate::engine::trace::Trace;

mod drivers;
mod end;
mod faults;
mod fresh;
mod work;

/// An event that is due at some virtual time.
#[derive(Debug)]
pub(crate) enum Event {
    /// A datagram arrives.
    Arrive { host: usize, datagram: Datagram },
    /// A timer of a device may be due.
    Timer { host: usize, boot: u32 },
    /// A driver sends datagrams and delivers events.
    Turn { host: usize, boot: u32 },
    /// A program begins a connection.
    Connect(usize),
    /// A program moves a queue pair to the state in which it can send.
    SetUp(SideId),
    /// A program answers a connection request.
    Decide { host: usize, boot: u32, id: CmId, request: Box<ConnRequest> },
    /// A program posts requests.
    Post(SideId),
    /// A program resumes a queue that it has paused.
    Resume(SideId),
    /// A program posts a receive.
    Receive(SideId),
    /// A program sends a datagram.
    UdSend(usize),
    /// A stream over an unreliable connection begins.
    Stream(usize),
    /// A stream sends its next message.
    StreamSend(usize),
    /// A program polls its completions.
    Poll(SideId),
    /// A program ends its connection.
    End(SideId),
    /// A program removes memory that the peer uses.
    Revoke(SideId),
    /// The next fault of one kind.
    Fault(usize),
    /// A device starts again.
    Boot(usize),
    /// A line is repaired.
    RepairLine(usize, usize),
    /// The faulty part of the run ends.
    Calm,
    /// Checks whether all work is done.
    Check,
}

/// Phase of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// Faults happen.
    Active,
    /// There are no more faults; all work comes to its end.
    Draining,
    /// Healthy connections carry fresh work.
    Fresh,
    /// All work is done; late datagrams would show now.
    Quiet,
}

/// State of a run.
pub(crate) struct World {
    pub(crate) base: Base<Event, Stats>,
    pub(crate) plan: Plan,
    pub(crate) reached: Reached,
    pub(crate) net: Net,
    pub(crate) hosts: Vec<Host>,
    pub(crate) sides: Vec<Side>,
    /// UD queue pairs of the hosts' programs.
    pub(crate) ports: Vec<Option<Port>>,
    pub(crate) ud_datagrams: Vec<UdDatagram>,
    /// Streams over unreliable connections, while they are there.
    pub(crate) streams: Vec<Option<Stream>>,
    /// Number of UD datagrams that programs which have not started will send.
    pub(crate) ud_sends_left: Vec<u32>,
    /// Number of connection requests that programs have not answered.
    deciding: usize,
    phase: Phase,
    phase_since: u64,
    /// The last check has been made.
    done: bool,
    /// Number of connections whose programs have not started.
    pub(crate) starts_left: usize,
    fresh: Fresh,
    pub(crate) sabotage: Option<Sabotage>,
    entries: Vec<Completion>,
}

has_base!(World, Event, Stats);

/// Number of steps after which a run is taken to make no progress.
const STEPS_MAX: u64 = 1_500_000;

impl World {
    pub(crate) fn new(plan: Plan, rng: Rng, trace: Trace, sabotage: Option<Sabotage>) -> Self {
        let hosts = plan.hosts.iter().map(|host| Host::new(host.clone())).collect();
        let net = Net::new(plan.net.clone(), plan.hosts.len());
        let mut world = Self {
            base: Base::new(rng, trace),
            reached: Reached::default(),
            net,
            hosts,
            sides: Vec::new(),
            ports: plan.hosts.iter().map(|_| None).collect(),
            ud_datagrams: Vec::new(),
            streams: plan.streams.iter().map(|_| None).collect(),
            ud_sends_left: plan.hosts.iter().map(|h| h.datagrams).collect(),
            deciding: 0,
            phase: Phase::Active,
            phase_since: SEC,
            done: false,
            starts_left: plan.conns.len(),
            fresh: Fresh::new(plan.fresh),
            sabotage,
            entries: Vec::new(),
            plan,
        };
        reach::chosen(&mut world.base.coverage, &world.plan);
        for host in 0..world.hosts.len() {
            world.boot(host);
        }
        let mut calm = world.plan.active;
        for conn in 0..world.plan.conns.len() {
            let start = world.plan.conns[conn].start;
            calm = calm.max(start + 1);
            world.schedule(start, Event::Connect(conn));
        }
        for stream in 0..world.plan.streams.len() {
            let start = world.plan.streams[stream].start;
            world.schedule(start, Event::Stream(stream));
        }
        for kind in 0..world.plan.faults.len() {
            world.next_fault(kind);
        }
        world.schedule(calm, Event::Calm);
        world
    }

    /// Takes one step; returns false when the run is over.
    pub(crate) fn step(&mut self) -> bool {
        let Some(event) = self.next_event() else { return false };
        self.stats.steps += 1;
        if self.stats.steps > STEPS_MAX {
            self.fail(|| format!("still going after {STEPS_MAX} steps"));
        }
        self.dispatch(event);
        self.failure.is_none() && !self.done
    }

    pub(crate) fn lives(&self, host: usize, boot: u32) -> bool {
        self.hosts[host].boot == boot && self.hosts[host].device.is_some()
    }

    fn dispatch(&mut self, event: Event) {
        match event {
            Event::Arrive { host, datagram } => self.arrive(host, &datagram),
            Event::Timer { host, boot } => {
                if self.lives(host, boot) {
                    let result = self.hosts[host].timer(self.base.now);
                    if self.judge(result) == Some(true) {
                        self.note([2, host as u64, 0], || format!("timer of host {host}"));
                        self.schedule_turn(host);
                    } else {
                        self.set_timer(host);
                    }
                }
            }
            Event::Turn { host, boot } => {
                if self.lives(host, boot) {
                    self.turn(host);
                }
            }
            Event::Connect(conn) => self.connect(conn),
            Event::SetUp(id) => self.set_up(id),
            Event::Decide { host, boot, id, request } => {
                self.deciding -= 1;
                if self.lives(host, boot) {
                    self.decide(host, id, &request);
                }
            }
            Event::Post(id) => self.post(id),
            Event::Resume(id) => self.resume(id),
            Event::Receive(id) => self.post_receive(id),
            Event::UdSend(host) => self.send_ud(host),
            Event::Stream(n) => self.begin_stream(n),
            Event::StreamSend(n) => self.send_stream(n),
            Event::Poll(id) => self.poll_completions(id),
            Event::End(id) => {
                let may = self.phase != Phase::Fresh;
                if may && matches!(self.sides[id].stage, Stage::Connecting | Stage::Up) {
                    self.end(id);
                }
            }
            Event::Revoke(_) if self.phase == Phase::Fresh => {}
            Event::Revoke(id) => self.revoke(id),
            Event::Fault(kind) => self.fault(kind),
            Event::Boot(host) => self.boot(host),
            Event::RepairLine(from, to) => self.net.block(from, to, false),
            Event::Calm => self.calm(),
            Event::Check => self.check(),
        }
    }
}
