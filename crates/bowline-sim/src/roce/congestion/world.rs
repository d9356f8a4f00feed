//! A run of a cell: hosts at a switch, in virtual time.
//!
//! ```text
//!   host -- its interface --> switch: the port of each host, rate, queue, delay --> host
//! ```

use bowline_roce::Config;

use super::cells::{Cell, Change};
use super::cubic::Cubic;
use super::link::{Link, OUTER_BYTES, Passage};
use super::measure::{jain, percentile};
use super::station::{Datagram, Done, Station, Work};
use crate::engine::queue::{Queue, SEC, US};
use crate::engine::rng::Rng;

/// Time from an arrival, or a timer, to the turn of a host's program, in nanoseconds.
const TURN: u64 = US;
/// The host with the port that all requests of the others meet.
pub(super) const SERVER: usize = 0;

/// What a run of a cell has shown.
#[derive(Clone, Debug)]
pub struct Report {
    /// Share of the link that carried payload of completed requests, of what it could carry.
    pub used: f64,
    /// Share of the same that a foreign TCP flow carried.
    pub cubic: f64,
    /// Jain's index of the hosts that send in bulk.
    pub fairness: f64,
    /// Least and largest share of a host, of an equal share.
    pub shares: (f64, f64),
    /// Nanoseconds that bulk requests took: median, 99th percentile, longest.
    pub bulk: [u64; 3],
    /// The same of the small requests of a host of its own.
    pub small: [u64; 3],
    /// Packets that the port dropped, and marked.
    pub dropped: u64,
    /// Packets that the port marked.
    pub marked: u64,
    /// Packets that the port carried and dropped.
    pub offered: u64,
    /// Longest time that a packet waited in the port, in nanoseconds.
    pub waited: u64,
    /// Counters of the devices, summed.
    pub counters: Vec<(&'static str, u64)>,
    /// Steps taken.
    pub steps: u64,
    /// The first broken promise.
    pub failure: Option<String>,
}

impl Report {
    /// Returns a counter of the devices, summed.
    pub fn counter(&self, name: &str) -> u64 {
        self.counters.iter().find(|(known, _)| *known == name).map_or(0, |(_, value)| *value)
    }
}

#[derive(Debug)]
enum Event {
    /// A datagram has left its host's interface.
    Switched(Datagram),
    /// A datagram arrives.
    Arrives(Datagram),
    /// A host's program has its turn.
    Turn(usize),
    /// A host has something to do.
    Timer(usize),
    /// The TCP flow's packet is at the switch.
    CubicSwitched(u64),
    /// The TCP flow's acknowledgement is at its sender.
    CubicAcknowledged(u64),
    CubicTimer,
    Change(usize),
    /// Measuring begins.
    Measure,
}

struct World<'a> {
    cell: &'a Cell,
    now: u64,
    queue: Queue<Event>,
    rng: Rng,
    ports: Vec<Link>,
    /// When the interface of each host has sent everything.
    free_at: Vec<u64>,
    stations: Vec<Station>,
    turning: Vec<bool>,
    /// The earliest timer event of each host in the queue.
    timer_at: Vec<Option<u64>>,
    done: Vec<Vec<Done>>,
    cubic: Option<Cubic>,
    cubic_before: u64,
    offered: u64,
    steps: u64,
}

/// Runs a cell.
pub fn run(cell: &Cell, config: &Config, seed: u64) -> Report {
    let mut world = World::new(cell, config, seed);
    let mut failure = None;
    while failure.is_none()
        && let Some((at, event)) = world.queue.pop()
        && at <= cell.end()
    {
        world.now = at;
        world.steps += 1;
        failure = world.step(event).err();
    }
    world.report(failure)
}

impl<'a> World<'a> {
    fn new(cell: &'a Cell, config: &Config, seed: u64) -> Self {
        let lanes = cell.hosts * cell.connections;
        let mut stations = vec![Station::new(cell, config, SERVER, lanes * cell.size + (1 << 12))];
        let hosts = 1 + cell.hosts + usize::from(cell.small);
        for host in 1..hosts {
            let (small, last) = (cell.small && host == hosts - 1, cell.connections * cell.size);
            let bytes = if small { 1 << 12 } else { last };
            stations.push(Station::new(cell, config, host, bytes));
        }
        let mut at = 0;
        for host in 1..hosts {
            let small = cell.small && host == hosts - 1;
            let (server, others) = stations.split_at_mut(1);
            for _ in 0..if small { 1 } else { cell.connections } {
                let work = Work {
                    operation: cell.operation,
                    size: if small { 1 << 12 } else { cell.size },
                    depth: if small { 1 } else { cell.depth },
                    thinks: small,
                };
                let size = work.size;
                others[host - 1].connect(&mut server[0], work, at, SEC);
                at += size;
            }
        }
        let mut world = Self {
            cell,
            now: SEC,
            queue: Queue::default(),
            rng: Rng::new(seed),
            ports: (0..hosts).map(|_| Link::new(cell.port)).collect(),
            free_at: vec![0; hosts],
            stations,
            turning: vec![false; hosts],
            timer_at: vec![None; hosts],
            done: vec![Vec::new(); hosts],
            cubic: cell.cubic.then(|| Cubic::new(cell.tcp_payload())),
            cubic_before: 0,
            offered: 0,
            steps: 0,
        };
        for host in 1..hosts {
            // Programs do not begin at once.
            let wait = world.rng.below(cell.round_trip() + 1);
            world.queue.push(SEC + wait, Event::Timer(host));
        }
        if cell.cubic {
            world.queue.push(SEC, Event::CubicTimer);
        }
        for (index, (at, _)) in cell.changes.iter().enumerate() {
            world.queue.push(SEC + at, Event::Change(index));
        }
        world.queue.push(SEC + cell.warm, Event::Measure);
        world
    }

    fn step(&mut self, event: Event) -> Result<(), String> {
        match event {
            Event::Switched(datagram) => self.switch(datagram),
            Event::Arrives(datagram) => {
                let host = datagram.to;
                self.stations[host].take(self.now, &datagram);
                self.schedule_turn(host);
            }
            Event::Turn(host) => {
                self.turning[host] = false;
                return self.turn(host);
            }
            Event::Timer(host) => {
                if self.timer_at[host].is_some_and(|at| at <= self.now) {
                    self.timer_at[host] = None;
                }
                self.schedule_turn(host);
            }
            Event::CubicSwitched(number) => {
                self.offered += 1;
                let port = &mut self.ports[self.cell.data_port()];
                let len = self.cubic.as_ref().map_or(0, Cubic::packet);
                let passage = port.pass(self.now, &mut self.rng, len, 0);
                if let Passage::Arrives(at, _) = passage {
                    let back = at + self.cell.port.delay;
                    self.queue.push(back, Event::CubicAcknowledged(number));
                }
            }
            Event::CubicAcknowledged(number) => {
                let now = self.now;
                if let Some(flow) = &mut self.cubic {
                    flow.acknowledged(now, number);
                }
                self.send_cubic();
            }
            Event::CubicTimer => {
                let now = self.now;
                if let Some(flow) = &mut self.cubic
                    && flow.deadline().is_some_and(|at| at <= now)
                {
                    flow.expired(now);
                }
                self.send_cubic();
                let next = self.cubic.as_ref().and_then(Cubic::deadline);
                self.queue.push(next.unwrap_or(0).max(now + SEC / 100), Event::CubicTimer);
            }
            Event::Change(index) => {
                let (_, change) = self.cell.changes[index];
                for port in &mut self.ports {
                    match change {
                        Change::Rate(rate) => port.plan.rate = rate,
                        Change::Delay(delay) => port.plan.delay = delay,
                    }
                }
            }
            Event::Measure => {
                self.done.iter_mut().for_each(Vec::clear);
                self.cubic_before = self.cubic.as_ref().map_or(0, |flow| flow.delivered);
                for port in &mut self.ports {
                    (port.overflows, port.marks, port.longest) = (0, 0, 0);
                }
                self.offered = 0;
            }
        }
        Ok(())
    }

    fn schedule_turn(&mut self, host: usize) {
        if !std::mem::replace(&mut self.turning[host], true) {
            let late = self.rng.below(self.cell.scheduling + 1);
            self.queue.push(self.now + TURN + late, Event::Turn(host));
        }
    }

    fn turn(&mut self, host: usize) -> Result<(), String> {
        let (now, nic) = (self.now, self.cell.interface);
        let (queue, free_at) = (&mut self.queue, &mut self.free_at[host]);
        let next = self.stations[host].turn(now, &mut self.done[host], |datagram| {
            let len = datagram.bytes.len() as u64 + OUTER_BYTES;
            *free_at =
                (*free_at).max(now) + (u128::from(len) * 8_000_000_000 / u128::from(nic)) as u64;
            queue.push(*free_at, Event::Switched(datagram));
        })?;
        if let Some(at) = next
            && self.timer_at[host].is_none_or(|known| at < known)
        {
            self.timer_at[host] = Some(at);
            self.queue.push(at, Event::Timer(host));
        }
        Ok(())
    }

    fn switch(&mut self, mut datagram: Datagram) {
        let len = datagram.bytes.len() as u64 + OUTER_BYTES;
        self.offered += 1;
        let port = &mut self.ports[datagram.to];
        if let Passage::Arrives(at, tos) = port.pass(self.now, &mut self.rng, len, datagram.tos) {
            datagram.tos = tos;
            self.queue.push(at, Event::Arrives(datagram));
        }
    }

    fn send_cubic(&mut self) {
        let now = self.now;
        while let Some(number) = self.cubic.as_mut().and_then(|flow| flow.send(now)) {
            self.queue.push(now, Event::CubicSwitched(number));
        }
    }

    fn report(&self, failure: Option<String>) -> Report {
        let cell = self.cell;
        let seconds = cell.time as f64 / 1e9;
        let rate = self.ports[SERVER].plan.rate as f64 / 8.0;
        let could = rate * cell.payload_share() * seconds;
        let bulk = 1..=cell.hosts;
        let sums: Vec<f64> = bulk
            .clone()
            .map(|host| self.done[host].iter().map(|done| done.bytes as f64).sum())
            .collect();
        let sum: f64 = sums.iter().sum();
        let equal = sum / sums.len().max(1) as f64;
        let took = |hosts: &mut dyn Iterator<Item = usize>| {
            let mut all: Vec<u64> =
                hosts.flat_map(|host| self.done[host].iter().map(|done| done.took)).collect();
            [500, 990, 1000].map(|per_mille| percentile(&mut all, per_mille))
        };
        let tcp = self.cubic.as_ref().map_or(0, |flow| flow.delivered - self.cubic_before);
        let (least, most) =
            sums.iter().fold((f64::MAX, 0.0_f64), |(a, b), s| (a.min(*s), b.max(*s)));
        let ports = || self.ports.iter();
        let judged = |(host, station): (usize, &Station)| {
            station.check(&self.stations[SERVER]).map_err(|what| format!("host {host}: {what}"))
        };
        let checked = self.stations.iter().enumerate().skip(1).try_for_each(judged);
        let mut counters: Vec<(&str, u64)> = Vec::new();
        for station in &self.stations {
            for (at, (name, value)) in station.device.counters().iter().enumerate() {
                match counters.get_mut(at) {
                    Some((_, sum)) => *sum += value,
                    None => counters.push((name, value)),
                }
            }
        }
        Report {
            used: sum / could,
            cubic: tcp as f64
                / (rate * self.cubic.as_ref().map_or(1.0, Cubic::payload_share) * seconds),
            fairness: jain(&sums),
            shares: (least / equal, most / equal),
            bulk: took(&mut bulk.clone()),
            small: took(&mut (cell.hosts + 1..self.stations.len())),
            dropped: ports().map(|port| port.overflows).sum(),
            marked: ports().map(|port| port.marks).sum(),
            offered: self.offered,
            waited: ports()
                .map(|port| port.longest * 8_000_000_000 / port.plan.rate)
                .max()
                .unwrap_or(0),
            counters,
            steps: self.steps,
            failure: failure.or(checked.err()),
        }
    }
}
