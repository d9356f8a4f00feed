//! One measurement: clients and a server in a scene of their own, all for the same window.

use std::thread::sleep;

use super::args::Options;
use super::plan::{Beside, NetCell};
use super::scene::{Ports, Scene};
use crate::cell::{Cell, Subject};
use crate::doors::{self, DISK_APART, Door, Load, Place};
use crate::run::{FOREIGN_LIMIT, Launcher, RESULT_LIMIT, Run, Sample, busily};

/// What was measured.
#[derive(Clone, Debug)]
pub(crate) struct Measured {
    /// Of each client.
    pub(crate) clients: Vec<Sample>,
    /// The TCP flow beside them.
    pub(crate) flow: Option<Sample>,
    /// What the router's ports sent and dropped in the window.
    pub(crate) ports: Ports,
    /// Share of the machine that other programs used.
    pub(crate) foreign: f64,
}

impl Measured {
    /// Payload bytes per second of all clients.
    pub(crate) fn rate(&self) -> f64 {
        self.clients.iter().map(Sample::byte_rate).sum()
    }

    /// Jain's index of fairness: 1 when all clients get the same, 1/n when one gets everything.
    pub(crate) fn fairness(&self) -> f64 {
        let squares: f64 = self.clients.iter().map(|s| s.byte_rate().powi(2)).sum();
        self.rate().powi(2) / (self.clients.len() as f64 * squares).max(f64::MIN_POSITIVE)
    }

    /// The time of a request that a half, or one in a hundred, exceeds, in nanoseconds: of the
    /// client that has it worst.
    pub(crate) fn latency(&self, percentile: Percentile) -> Option<f64> {
        let at = |s: &Sample| s.lat.as_ref()?.get(percentile as usize).copied();
        self.clients.iter().filter_map(at).max().filter(|ns| *ns > 0).map(|ns| ns as f64)
    }

    /// The longest time in which a client had no answer, in nanoseconds.
    pub(crate) fn pause(&self) -> Option<f64> {
        let pause = |s: &Sample| s.words.number("pause_ns").ok();
        self.clients.iter().filter_map(pause).max().map(|ns| ns as f64)
    }

    /// Tells whether other programs used too much of the machine.
    pub(crate) fn is_disturbed(&self) -> bool {
        self.foreign > FOREIGN_LIMIT
    }
}

/// Places of percentiles in the list that a side reports.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Percentile {
    Half = 3,
    Hundredth = 7,
}

/// Measures a cell once with bowline or with its rival.
///
/// # Errors
/// Says what failed, on which side.
pub(crate) fn measure(
    launcher: &Launcher,
    cell: &NetCell,
    subject: Subject,
    options: &Options,
) -> Result<Measured, String> {
    let scene = Scene::build(cell.link, cell.mtu, cell.clients)?;
    if cell.work.is_by_fio() {
        return by_fio(launcher, &scene, cell, subject, options);
    }
    let start = |cell: &Cell, rx, tx| launcher.start_in(cell, None, Some([rx, tx]));
    let mut runs = Vec::new();
    for (n, client) in scene.clients.iter().enumerate() {
        runs.push(start(&cell.client_cell(subject, n, options), &scene.server, client)?);
    }
    runs.extend(flow(launcher, &scene, cell, options)?);
    let loops = cell.loops();
    let (mut samples, ports, foreign) = busily(loops, || watch(launcher, &scene, runs, options))?;
    let flow = if samples.len() > cell.clients { samples.pop() } else { None };
    Ok(Measured { clients: samples, flow, ports, foreign })
}

/// The same where fio asks: each client has a disk of its own, and its own way to it.
fn by_fio(
    launcher: &Launcher,
    scene: &Scene,
    cell: &NetCell,
    subject: Subject,
    options: &Options,
) -> Result<Measured, String> {
    scene.choose(&options.cc)?;
    let open = |(n, client)| {
        let networks = Some([&scene.server, client]);
        let place = Place { networks, addresses: Scene::addresses(n), bytes: DISK_APART };
        Door::open(subject, place)
    };
    let doors = scene.clients.iter().enumerate().map(open).collect::<Result<Vec<_>, _>>()?;
    let load = Load::of(&cell.client_cell(subject, 0, options));
    let mut flow = flow(launcher, scene, cell, options)?;
    busily(cell.loops(), || {
        // Its window begins after the warm-up, too.
        flow.iter_mut().for_each(Run::go);
        doors::measure(&doors, &Load { window: Some(options.warm), ..load })?;
        let servers = doors.iter().flat_map(Door::pids);
        let pids = servers.chain(flow.iter().flat_map(|run| run.pids.clone())).collect();
        let watch = launcher.watch_programs(pids);
        let before = scene.ports()?;
        let clients = doors::measure(&doors, &load)?;
        let (ports, foreign) = (scene.ports()?.since(before), watch.foreign());
        let flow = flow.map(|mut run| {
            let words = run.wait_counting("result", options.window + RESULT_LIMIT)?;
            run.finish(words, foreign)
        });
        Ok(Measured { clients, flow: flow.transpose()?, ports, foreign })
    })
}

/// Starts the TCP flow beside a cell, if there is one.
fn flow(
    launcher: &Launcher,
    scene: &Scene,
    cell: &NetCell,
    options: &Options,
) -> Result<Option<Run>, String> {
    let (Beside::Tcp, Some(client)) = (cell.beside, scene.clients.first()) else {
        return Ok(None);
    };
    let (rx, tx) = match cell.work.comes_back() {
        true => (client, &scene.server),
        false => (&scene.server, client),
    };
    launcher.start_in(&cell.flow_cell(options), None, Some([rx, tx])).map(Some)
}

/// Lets all runs go at once, and waits for what they count.
fn watch(
    launcher: &Launcher,
    scene: &Scene,
    mut runs: Vec<Run>,
    options: &Options,
) -> Result<(Vec<Sample>, Ports, f64), String> {
    runs.iter_mut().for_each(Run::go);
    sleep(options.warm);
    let watch = launcher.watch_programs(runs.iter().flat_map(|run| run.pids.clone()).collect());
    let before = scene.ports()?;
    // Everybody goes on until all have counted, and is asked to end only then.
    let mut counted = Vec::new();
    for run in &mut runs {
        counted.push(run.wait_counting("result", options.window + RESULT_LIMIT)?);
    }
    let ports = scene.ports()?.since(before);
    let foreign = watch.foreign();
    let samples = runs.into_iter().zip(counted);
    let samples = samples.map(|(run, words)| run.finish(words, foreign)).collect::<Result<_, _>>();
    Ok((samples?, ports, foreign))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cell::Words;

    fn sample(rate: u64, lat: Option<Vec<u64>>, pause: &str) -> Sample {
        Sample {
            count: rate,
            seconds: 1.0,
            bytes: 10,
            rx_cpu: 0.0,
            tx_cpu: 0.0,
            rx_syscalls: None,
            tx_syscalls: None,
            lat,
            words: Words::parse([pause]),
            other: Words::default(),
            foreign: 0.0,
            tries: 1,
        }
    }

    #[test]
    fn clients_are_taken_together_and_the_worst_time_counts() {
        let times = |p99| Some(vec![0, 0, 0, 50, 0, 0, 0, p99, 0, 0, 0]);
        let clients =
            vec![sample(300, times(80), "pause_ns=7"), sample(100, times(90), "pause_ns=5")];
        let ports = Ports::default();
        let both = Measured { clients, flow: None, ports, foreign: 0.0 };
        assert!((both.rate() - 4000.0).abs() < 1e-9);
        assert!((both.fairness() - 0.8).abs() < 1e-9);
        assert_eq!(both.latency(Percentile::Hundredth), Some(90.0));
        assert_eq!((both.latency(Percentile::Half), both.pause()), (Some(50.0), Some(7.0)));
        let untimed = Measured { clients: vec![sample(1, None, "")], ..both };
        assert_eq!((untimed.latency(Percentile::Half), untimed.pause()), (None, None));
    }
}
