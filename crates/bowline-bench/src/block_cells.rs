//! Reads and writes of a store of another process: bare UDP, nbdkit over TCP, RTRS and RNBD. The
//! receiver has the store, all of it in memory and filled beforehand; the sender asks, with a fixed
//! number of requests outstanding, and counts.

mod nbd;
mod rnbd;
mod rr;
mod rtrs;

use std::net::{IpAddr, Ipv4Addr};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bowline_roce_driver::{PollMode, SoftConfig, SoftDevice};
use bowline_rtrs_driver::{Engine, EngineConfig, Poll};
use bowline_verbs::Buffer;

use crate::cell::{Cell, Kind, Subject, Wait};
use crate::role::{Laps, Meter, Probe, Role, Side};

pub(crate) use nbd::is_installed as nbdkit_is_installed;

/// Bytes of the store.
const STORE: usize = 64 << 20;
/// Every so many bytes the store says where they are.
const SECTOR: usize = 512;
/// How long the asking side waits before it looks whether it is to end.
const NAP: Duration = Duration::from_millis(50);

/// Runs one side of a cell.
pub(crate) fn run(role: Role) -> Result<(), String> {
    match (role.cell.subject, role.side) {
        (Subject::RrUdp, Side::Rx) => rr::serve(role),
        (Subject::RrUdp, Side::Tx) => rr::ask(role),
        (Subject::Nbdkit, Side::Rx) => nbd::serve(role),
        (Subject::Nbdkit, Side::Tx) => nbd::ask(role),
        (Subject::Rtrs | Subject::RtrsKept, Side::Rx) => rtrs::serve(role),
        (Subject::Rtrs | Subject::RtrsKept, Side::Tx) => rtrs::ask(role),
        (Subject::Rnbd, Side::Rx) => rnbd::serve(role),
        (Subject::Rnbd, Side::Tx) => rnbd::ask(role),
        (subject, _) => Err(format!("{} has no cell {}", subject.name(), role.cell.kind.name())),
    }
}

/// Fills memory: every sector begins with its offset.
fn fill(store: &Buffer) {
    for at in (0..store.len()).step_by(SECTOR) {
        store.write(at, &(at as u64).to_le_bytes());
    }
}

/// The requests of a cell, each at a place of its own choosing.
struct Load {
    size: usize,
    write: bool,
    random: u64,
}

impl Load {
    fn new(cell: &Cell) -> Self {
        Self { size: cell.size, write: cell.kind == Kind::IoWrite, random: 0x9e37_79b9_7f4a_7c15 }
    }

    /// Where the next request goes.
    fn next(&mut self) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        (self.random >> 8) % (STORE / self.size) as u64 * self.size as u64
    }

    /// Checks the first bytes of what was read.
    fn check(&self, offset: u64, first: [u8; 8]) -> Result<(), String> {
        let read = u64::from_le_bytes(first);
        if self.write || read == offset {
            Ok(())
        } else {
            Err(format!("the bytes of offset {read} where those of {offset} were due"))
        }
    }
}

/// Counts requests or times them, as the cell says.
enum Gauge {
    Rate(Meter),
    Laps(Box<Laps>),
}

impl Gauge {
    fn new(role: &Role, probe: Option<Probe>) -> Self {
        if role.cell.kind.is_round_trip() {
            let mut laps = Laps::new(role);
            probe.into_iter().for_each(|probe| laps.set_probe(probe));
            Self::Laps(Box::new(laps))
        } else {
            let mut meter = role.meter();
            probe.into_iter().for_each(|probe| meter.set_probe(probe));
            Self::Rate(meter)
        }
    }

    /// Notes answers; true when that was all.
    fn add(&mut self, answers: usize) -> bool {
        match self {
            Self::Rate(meter) => {
                meter.add(answers as u64);
                false
            }
            Self::Laps(laps) => answers > 0 && laps.lap(),
        }
    }
}

/// Requests that have ended: their slots, and what they came to.
#[derive(Default)]
struct Ended(Mutex<Vec<(u64, i32)>>);

impl Ended {
    fn extend(&self, ended: impl Iterator<Item = (u64, i32)>) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).extend(ended);
    }

    fn take(&self, into: &mut Vec<(u64, i32)>) {
        into.clear();
        std::mem::swap(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner), into);
    }
}

/// Says which slots are free, or which request failed.
fn succeeded(ended: &[(u64, i32)]) -> Result<(), String> {
    match ended.iter().find(|(_, errno)| *errno != 0) {
        Some((slot, errno)) => Err(format!("request {slot} ended with {errno}")),
        None => Ok(()),
    }
}

/// The addresses of a side: one for each path.
fn addresses(cell: &Cell, side: Side) -> Vec<IpAddr> {
    let first = if side == Side::Rx { cell.nodes.0 } else { cell.nodes.1 };
    (0..cell.paths.max(1) as u32)
        .map(|path| IpAddr::V4(Ipv4Addr::from(u32::from(first) + 2 * path)))
        .collect()
}

/// Opens the device and engine of a side.
fn engine(role: &Role) -> Result<(Arc<SoftDevice>, Arc<Engine>), String> {
    let (poll, device_poll) = match role.cell.wait {
        Wait::Adaptive => (Poll::Adaptive, PollMode::Adaptive),
        Wait::Spin => (Poll::Spin, PollMode::Spin),
        Wait::Sleep => (Poll::Adaptive, PollMode::Sleep),
    };
    let addrs = addresses(&role.cell, role.side);
    let config = SoftConfig { addrs, poll: device_poll, ..SoftConfig::default() };
    let device = SoftDevice::open(config).map_err(|e| format!("opening a device: {e}"))?;
    let device = Arc::new(device);
    let engine = Engine::new(vec![Arc::clone(&device) as _], EngineConfig { poll });
    Ok((device, engine.map_err(|e| e.to_string())?))
}

/// Reads what a device counts.
fn probe(device: &Arc<SoftDevice>) -> Probe {
    let device = Arc::clone(device);
    Box::new(move || {
        let stats = device.stats();
        vec![
            ("syscalls", stats.udp_syscalls()),
            ("packets_out", stats.packets_sent),
            ("packets_in", stats.packets_received),
            ("acks", device.counters().acks_sent),
            ("sleeps", stats.sleeps),
        ]
    })
}
