//! Reads and writes of a store of another process: bare UDP and TCP, servers of others over TCP,
//! RTRS and RNBD. The receiver has the store, all of it in memory and filled beforehand; the sender
//! asks, with a fixed number of requests outstanding, and counts.

mod door;
mod failover;
#[cfg(feature = "rivals")]
mod iscsi;
mod nbd;
mod rnbd;
mod rr;
mod rr_tcp;
mod rtrs;
mod server;

use std::fs::File;
use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bowline_roce::GiveUp;
use bowline_roce_driver::{PollMode, SoftConfig, SoftDevice};
use bowline_rtrs_driver::{Engine, EngineConfig, Poll};
use bowline_verbs::Buffer;

use crate::cell::{Cell, Kind, Subject, Wait};
use crate::role::{Laps, Meter, Probe, Role, Side, Sides};
use crate::sys;

pub(crate) use rtrs::large_chunks;
pub(crate) use server::{start_on, version as peer_version};

/// The store contains its own offsets at this interval, in bytes.
const SECTOR: usize = 512;
/// How long a side sleeps, or waits for answers, before it looks whether it is to end.
const NAP: Duration = Duration::from_millis(50);
/// How long a side may be halted for the turns of others.
const HALTED_MAX: Duration = Duration::from_secs(60);

/// The sides of a cell.
pub(crate) fn sides(cell: &Cell) -> Option<Sides> {
    let Sides(serve, ask) = match cell.subject {
        Subject::RrUdp | Subject::RrUdpCrc => Sides(rr::serve, rr::ask),
        Subject::RrTcp => Sides(rr_tcp::serve, rr_tcp::ask),
        Subject::Nbdkit => Sides(nbd::serve_nbdkit, nbd::ask),
        Subject::QemuNbd => Sides(nbd::serve_qemu, nbd::ask),
        #[cfg(feature = "rivals")]
        Subject::Tgt => Sides(iscsi::serve, iscsi::ask),
        Subject::Rtrs if cell.kind.loses_a_path() => Sides(rtrs::serve, failover::ask),
        Subject::Rtrs | Subject::RtrsKept => Sides(rtrs::serve, rtrs::ask),
        Subject::DoorNbd | Subject::DoorFuse => Sides(door::serve, door::ask),
        Subject::Rnbd => Sides(rnbd::serve, rnbd::ask),
        _ => return None,
    };
    Some(Sides(serve, if cell.kind == Kind::DoorWrite { door::ask } else { ask }))
}

/// Fills memory: every sector begins with its offset.
fn fill(store: &Buffer) {
    for at in (0..store.len()).step_by(SECTOR) {
        store.write(at, &(at as u64).to_le_bytes());
    }
}

/// A filled store in a file that is memory, and where programs that this process starts find it.
pub(crate) fn memory_file(bytes: usize) -> Result<(File, String), String> {
    let failed = |e: std::io::Error| format!("a file in memory: {e}");
    let file = sys::memory_file(bytes as u64).map_err(failed)?;
    const PART: usize = 1 << 20;
    let mut part = vec![0; PART];
    for from in (0..bytes).step_by(PART) {
        for (sector, at) in part.chunks_mut(SECTOR).zip((from as u64..).step_by(SECTOR)) {
            sector[..8].copy_from_slice(&at.to_le_bytes());
        }
        file.write_all_at(&part, from as u64).map_err(failed)?;
    }
    let path = format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd());
    Ok((file, path))
}

/// The requests of a cell, each at a place of its own choosing.
struct Load {
    size: usize,
    store: usize,
    write: bool,
    random: u64,
}

impl Load {
    fn new(cell: &Cell) -> Self {
        let (size, store, write) =
            (cell.size, cell.store(), matches!(cell.kind, Kind::IoWrite | Kind::DoorWrite));
        Self { size, store, write, random: 0x9e37_79b9_7f4a_7c15 }
    }

    /// Where the next request goes.
    fn next(&mut self) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        (self.random >> 8) % (self.store / self.size) as u64 * self.size as u64
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
    Rate(Box<Meter>),
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
            if role.cell.apart {
                meter.time_requests(role.cell.depth);
            }
            Self::Rate(Box::new(meter))
        }
    }

    /// Notes that the request of a slot is made.
    #[inline]
    fn asked(&mut self, slot: usize) {
        if let Self::Rate(meter) = self {
            meter.asked(slot);
        }
    }

    /// Notes that the request of a slot was answered.
    #[inline]
    fn answered(&mut self, slot: usize) {
        if let Self::Rate(meter) = self {
            meter.answered(slot);
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
    engine_at(role, addresses(&role.cell, role.side))
}

/// Opens a device at these addresses, and an engine.
fn engine_at(role: &Role, addrs: Vec<IpAddr>) -> Result<(Arc<SoftDevice>, Arc<Engine>), String> {
    let (poll, device_poll) = match role.cell.wait {
        Wait::Adaptive => (Poll::Adaptive, PollMode::Adaptive),
        Wait::Spin => (Poll::Spin, PollMode::Spin),
        Wait::Sleep => (Poll::Adaptive, PollMode::Sleep),
    };
    let mut config = SoftConfig { addrs, poll: device_poll, ..SoftConfig::default() };
    config.core.congestion = role.cell.congestion;
    if role.cell.takes_turns() {
        // Whoever is halted for the turns of others has not gone.
        config.core.give_up = GiveUp::After(HALTED_MAX);
    }
    if role.cell.path_dead_ms > 0 {
        config.core.give_up = GiveUp::After(Duration::from_millis(role.cell.path_dead_ms));
    }
    let device = SoftDevice::open(config).map_err(|e| format!("opening a device: {e}"))?;
    let device = Arc::new(device);
    let engine = Engine::new(vec![Arc::clone(&device) as _], EngineConfig { poll });
    Ok((device, engine.map_err(|e| e.to_string())?))
}

/// What a device counts.
fn counters(device: &SoftDevice) -> Vec<(&'static str, u64)> {
    let (stats, core) = (device.stats(), device.counters());
    vec![
        ("syscalls", stats.udp_syscalls()),
        ("packets_out", stats.packets_sent),
        ("packets_in", stats.packets_received),
        ("acks", core.acks_sent + core.acks_repeated),
        ("sleeps", stats.sleeps),
        ("resent", core.packets_resent),
        ("timeouts", core.timeouts),
        ("naks", core.naks_sequence_sent),
    ]
}

/// Reads it at both ends of the window.
fn probe(device: &Arc<SoftDevice>) -> Probe {
    let device = Arc::clone(device);
    Box::new(move || counters(&device))
}
