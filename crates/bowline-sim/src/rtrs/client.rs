//! A client: one session with some disks, and the program that uses them.

use std::collections::{BTreeMap, VecDeque};
use std::net::IpAddr;
use std::sync::Arc;

use bowline_rnbd::client::{Core, SendIo, ServiceMessage as Message};
use bowline_rtrs::bind::Binding;
use bowline_rtrs::client::{PathState, Permit, ReadKeys, Session};
use bowline_rtrs::{HbConfig, PathId, RegionId, Wr};
use bowline_verbs::Buffer;

use self::disks::{Held, Mine};
use self::eyes::{Eyes, note_input};
use self::failover::Failover;
use self::fresh::Fresh;
use self::landing::Landings;
use self::link::Purpose;
use self::program::Request;
use super::base::{Base, Event};
use super::fabric::{Own, bench, drain};
use super::plan::ClientPlan;
use super::process::{Heard, Process, hear};
use crate::roce::host::Host;

mod back;
mod disks;
mod eyes;
mod failover;
mod fresh;
mod landing;
mod life;
mod link;
mod paths;
mod program;

/// How far the program is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Stage {
    /// The session is being opened.
    Opening,
    /// The first disk is being mapped.
    Mapping,
    /// Requests are made.
    Running,
    /// All of the disks is read, in the end.
    Verifying,
    /// A little is done on each of them, in a time that is stated.
    Fresh,
    /// The disks are being given up.
    Unmapping,
    /// The session is being closed.
    Closing,
    /// Nothing is left of it.
    Closed,
}

/// A session while it lives.
#[derive(Debug)]
pub(crate) struct Life {
    pub(crate) session: Session,
    binding: Binding,
    own: Vec<Own>,
    core: Option<Core<u64>>,
    disks: Vec<Held>,
    pub(crate) stage: Stage,
    region: RegionId,
    buffer: Arc<Buffer>,
    landings: Landings,
    failover: Failover,
    /// Since when the program waits for a path, in the end.
    lost_since: Option<u64>,
    /// By kind of permit, for messages and for IO: one was refused, and none can be had yet.
    refused: [bool; 2],
    /// Permits of the slots, kept as drivers do; none where there is only one.
    permits: Vec<Permit>,
    /// By tag: permit and purpose.
    asked: BTreeMap<u64, (Option<Permit>, Purpose)>,
    tags: u64,
    messages: VecDeque<Message>,
    sends: VecDeque<SendIo>,
    service_slots: Vec<usize>,
    requests: BTreeMap<u64, Request>,
    places: Vec<usize>,
    /// Verification: the next disk and byte, and whether something could not be read.
    verified: (usize, u64),
    unread: bool,
    fresh: Option<Fresh>,
    /// States of its paths, as they were told.
    states: BTreeMap<PathId, PathState>,
}

/// A client.
#[derive(Debug)]
pub(crate) struct Client {
    pub(crate) number: usize,
    pub(crate) plan: ClientPlan,
    pub(crate) process: Process,
    pub(crate) life: Option<Life>,
    disks: Vec<Mine>,
    /// Requests still to be made.
    left: u32,
    requests: u64,
    ports: u16,
    /// Nothing goes wrong any more.
    calm: bool,
    /// Everything is done and nothing is left.
    pub(crate) done: bool,
    /// Inputs of its core, ever.
    pub(crate) inputs: u64,
    going: bool,
    /// An event to give a disk up is in the queue.
    swapping: bool,
    attacks: Vec<Wr>,
    /// It has begun to close its session just now.
    pub(crate) leaves_now: bool,
}

/// What a run has in common for all clients.
pub(crate) struct Common<'a> {
    pub(crate) servers: &'a [IpAddr],
    pub(crate) heartbeat: HbConfig,
    pub(crate) burst: Option<usize>,
    pub(crate) faulty: bool,
    /// Time for a request of fresh work without storage; 0 if there is none.
    pub(crate) fresh: u64,
    /// From then on a path that seems to be connected is.
    pub(crate) sure_from: u64,
}

impl Client {
    /// `first`: the number of its first disk on the server.
    pub(crate) fn new(number: usize, plan: ClientPlan, first: usize, look: u64) -> Self {
        let disks = (first..).zip(&plan.disks);
        Self {
            disks: disks.map(|(number, disk)| Mine::new(number, disk.clone())).collect(),
            number,
            process: Process::new(number + 1, look),
            life: None,
            left: plan.requests,
            requests: 0,
            ports: 0,
            calm: false,
            done: false,
            inputs: 0,
            going: false,
            swapping: false,
            attacks: Vec::new(),
            leaves_now: false,
            plan,
        }
    }

    fn request_bytes(&self) -> usize {
        self.plan.request_max as usize
    }

    /// Looks at what the devices have told.
    pub(crate) fn look(&mut self, base: &mut Base, hosts: &mut [Host], common: &Common<'_>) {
        let now = base.instant();
        while let Some((port, notice)) = self.process.inbox.pop_front() {
            let Some(life) = &mut self.life else { continue };
            let Some(mut bench) = bench(hosts, &life.own, now) else { return };
            match hear(base, &mut life.binding, &mut bench, &life.own, port, notice) {
                Heard::Nothing => {}
                Heard::Input(input) => {
                    self.inputs += 1;
                    note_input(base, self.number, &input);
                    life.session.handle(now, input);
                }
                Heard::Dones(dones) => {
                    self.inputs += dones.len() as u64;
                    base.note([12, self.number as u64, dones.len() as u64], || {
                        format!("client {}: {dones:?}", self.number)
                    });
                    life.session.handle_done(now, &dones);
                }
            }
        }
        self.pump(base, hosts, common);
    }

    /// Looks at the clock.
    pub(crate) fn wake(&mut self, base: &mut Base, hosts: &mut [Host], common: &Common<'_>) {
        let now = base.instant();
        if let Some(life) = &mut self.life {
            life.session.handle_timeout(now);
            if let Some(core) = &mut life.core {
                core.handle_timeout(now);
            }
        }
        self.pump(base, hosts, common);
    }

    /// Moves everything that can move.
    pub(crate) fn pump(&mut self, base: &mut Base, hosts: &mut [Host], common: &Common<'_>) {
        if self.process.is_silent(base) {
            return;
        }
        let now = base.instant();
        while base.failure.is_none() {
            let Some(life) = &mut self.life else { return };
            let Some(mut bench) = bench(hosts, &life.own, now) else { return };
            let mut watch = Eyes {
                base: &mut *base,
                number: self.number,
                inputs: &mut self.inputs,
                attack: (self.plan.hostile && !self.calm)
                    .then_some((life.region, &mut self.attacks)),
                later: Vec::new(),
            };
            drain(&mut life.session, &mut life.binding, &mut bench, now, &mut watch);
            let early = watch.later;
            for input in early {
                life.session.handle(now, input);
            }
            life.session.check_invariants();
            self.check_keys(base, hosts);
            let moved = self.completions(base)
                | self.events(base, common)
                | self.messages(base)
                | self.sends(base)
                | self.results(base, common)
                | self.disk_events(base, common);
            if !moved {
                break;
            }
        }
        self.settle(base, hosts);
    }

    /// No key is good for longer than the READ it was made for.
    fn check_keys(&self, base: &mut Base, hosts: &[Host]) {
        let Some(life) = &self.life else { return };
        if self.plan.read_keys == ReadKeys::PerRequest || self.plan.scattered > 0 {
            let devices = hosts.iter().filter_map(|host| host.device.as_ref());
            let good: usize = devices.map(|device| device.in_use().bound).sum();
            let (number, given) = (self.number, life.session.keys_given());
            if good > given {
                base.fail(|| {
                    format!("client {number}: {good} keys, {given} given: good after the end")
                });
            }
        }
    }
}

/// The program of a client goes on.
fn go(process: &Process, client: usize) -> Event {
    Event::Go { client, boot: process.boot }
}
