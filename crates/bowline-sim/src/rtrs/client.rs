//! A client: one session with some disks, and the program that uses them.

use std::collections::{BTreeMap, VecDeque};
use std::net::IpAddr;
use std::sync::Arc;

use bowline_rnbd::client::{Core, SendIo, ServiceMessage as Message};
use bowline_rtrs::bind::Binding;
use bowline_rtrs::client::{PathState, Permit, ReadKeys, Session};
use bowline_rtrs::{HbConfig, PathId, RegionId, Wr};
use bowline_verbs::Buffer;

use self::disks::{ClientDisk, MapState};
use self::failover::Failover;
use self::final_io::FinalIo;
use self::intercept::{Interceptor, note_input};
use self::link::Purpose;
use self::placement::Placements;
use self::program::Request;
use super::context::{Base, Event};
use super::fabric::{Own, bench, drain};
use super::plan::ClientPlan;
use super::process::{Process, Translated, translate};
use crate::roce::host::Host;

mod disks;
mod failover;
mod final_io;
mod intercept;
mod link;
mod open;
mod paths;
mod placement;
mod program;
mod recovery;

/// The stage of the program.
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
    /// Some blocks of each disk are written and read within a stated time.
    FinalIo,
    /// The disks are being given up.
    Unmapping,
    /// The session is being closed.
    Closing,
    /// Nothing is left of the session.
    Closed,
}

/// An open session, with everything that ends with it.
#[derive(Debug)]
pub(crate) struct ActiveSession {
    pub(crate) session: Session,
    binding: Binding,
    own: Vec<Own>,
    core: Option<Core<u64>>,
    disks: Vec<MapState>,
    pub(crate) stage: Stage,
    region: RegionId,
    buffer: Arc<Buffer>,
    placements: Placements,
    failover: Failover,
    /// Since when the program waits for a path, in the end.
    lost_since: Option<u64>,
    /// By kind of permit (service, IO): one was refused, and none has become free since.
    refused: [bool; 2],
    /// One permit for each slot, kept as drivers do; none if there is only one permit.
    permits: Vec<Permit>,
    /// By tag: permit and purpose.
    in_flight: BTreeMap<u64, (Option<Permit>, Purpose)>,
    tags: u64,
    messages: VecDeque<Message>,
    sends: VecDeque<SendIo>,
    service_slots: Vec<usize>,
    requests: BTreeMap<u64, Request>,
    places: Vec<usize>,
    /// Verification: the next disk and byte, and whether a read failed.
    verified: (usize, u64),
    unread: bool,
    final_io: Option<FinalIo>,
    /// States of its paths, as reported by events.
    states: BTreeMap<PathId, PathState>,
}

/// A client.
#[derive(Debug)]
pub(crate) struct Client {
    pub(crate) number: usize,
    pub(crate) plan: ClientPlan,
    pub(crate) process: Process,
    pub(crate) active: Option<ActiveSession>,
    disks: Vec<ClientDisk>,
    /// Requests still to be made.
    left: u32,
    requests: u64,
    ports: u16,
    /// The faults are over.
    calm: bool,
    /// Everything is done and nothing is left.
    pub(crate) done: bool,
    /// Inputs of its cores since the start of the run.
    pub(crate) inputs: u64,
    going: bool,
    /// An event to swap a disk is in the queue.
    swapping: bool,
    attacks: Vec<Wr>,
    /// The client has just begun to close its session.
    pub(crate) leaves_now: bool,
}

/// Parameters of the run that all clients share.
pub(crate) struct Common<'a> {
    pub(crate) servers: &'a [IpAddr],
    pub(crate) heartbeat: HbConfig,
    pub(crate) burst: Option<usize>,
    pub(crate) faulty: bool,
    /// Longest time of a request of the final IO without storage, in nanoseconds; 0: no final IO.
    pub(crate) final_io: u64,
    /// From this time on, a path that seems connected is connected.
    pub(crate) sure_from: u64,
}

impl Client {
    /// `first` is the number of its first disk on the server.
    pub(crate) fn new(number: usize, plan: ClientPlan, first: usize, look: u64) -> Self {
        let disks = (first..).zip(&plan.disks);
        Self {
            disks: disks.map(|(number, disk)| ClientDisk::new(number, disk.clone())).collect(),
            number,
            process: Process::new(number + 1, look),
            active: None,
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

    /// Handles events of the devices.
    pub(crate) fn poll(&mut self, base: &mut Base, hosts: &mut [Host], common: &Common<'_>) {
        let now = base.instant();
        while let Some((port, notice)) = self.process.inbox.pop_front() {
            let Some(active) = &mut self.active else { continue };
            let Some(mut bench) = bench(hosts, &active.own, now) else { return };
            match translate(base, &mut active.binding, &mut bench, &active.own, port, notice) {
                Translated::Nothing => {}
                Translated::Input(input) => {
                    self.inputs += 1;
                    note_input(base, self.number, &input);
                    active.session.handle(now, input);
                }
                Translated::Dones(dones) => {
                    self.inputs += dones.len() as u64;
                    base.note([12, self.number as u64, dones.len() as u64], || {
                        format!("client {}: {dones:?}", self.number)
                    });
                    active.session.handle_done(now, &dones);
                }
            }
        }
        self.pump(base, hosts, common);
    }

    /// Runs timers that are due.
    pub(crate) fn wake(&mut self, base: &mut Base, hosts: &mut [Host], common: &Common<'_>) {
        let now = base.instant();
        if let Some(active) = &mut self.active {
            active.session.handle_timeout(now);
            if let Some(core) = &mut active.core {
                core.handle_timeout(now);
            }
        }
        self.pump(base, hosts, common);
    }

    /// Runs the cores until nothing moves any more.
    pub(crate) fn pump(&mut self, base: &mut Base, hosts: &mut [Host], common: &Common<'_>) {
        if self.process.is_silent(base) {
            return;
        }
        let now = base.instant();
        while base.failure.is_none() {
            let Some(active) = &mut self.active else { return };
            let Some(mut bench) = bench(hosts, &active.own, now) else { return };
            let mut intercept = Interceptor {
                base: &mut *base,
                number: self.number,
                inputs: &mut self.inputs,
                attack: (self.plan.hostile && !self.calm)
                    .then_some((active.region, &mut self.attacks)),
                later: Vec::new(),
            };
            drain(&mut active.session, &mut active.binding, &mut bench, now, &mut intercept);
            let early = intercept.later;
            for input in early {
                active.session.handle(now, input);
            }
            active.session.check_invariants();
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

    /// Checks that no key is valid for longer than the READ it was made for.
    fn check_keys(&self, base: &mut Base, hosts: &[Host]) {
        let Some(active) = &self.active else { return };
        if self.plan.read_keys == ReadKeys::PerRequest || self.plan.scattered > 0 {
            let devices = hosts.iter().filter_map(|host| host.device.as_ref());
            let good: usize = devices.map(|device| device.in_use().bound).sum();
            let (number, given) = (self.number, active.session.valid_own_keys());
            if good > given {
                base.fail(|| {
                    format!("client {number}: {good} keys, {given} given: good after the end")
                });
            }
        }
    }
}

/// The event that makes a client's program continue.
fn go(process: &Process, client: usize) -> Event {
    Event::Go { client, boot: process.boot }
}
