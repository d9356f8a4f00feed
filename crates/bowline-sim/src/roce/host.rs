//! One device and the driver around it.

use std::net::{IpAddr, SocketAddr};

use bowline_roce::{
    Burst, Config, Device, FormerConnection, GroBuffer, IdentHint, Instant, PlacementOutcome,
};
use bowline_verbs::{CmId, Qpn};

use super::mute::Mutes;
use super::net::Datagram;
use super::plan::{Hints, HostPlan};
use crate::engine::rng::Rng;

/// Service port on which every host listens.
pub(crate) const PORT: u16 = 7174;

/// A host: a device that may die and start again.
#[derive(Debug)]
pub(crate) struct Host {
    pub(crate) plan: HostPlan,
    pub(crate) device: Option<Device>,
    /// Generation of the device.
    pub(crate) boot: u32,
    /// Number of datagrams passed to the device.
    delivered: u64,
    pub(crate) listener: Option<CmId>,
    /// The queue holds an event to send and to deliver.
    pub(crate) turning: bool,
    /// When the earliest timer event in the queue is due.
    pub(crate) timer_at: Option<u64>,
    /// Time of the latest timer events, and their number at that time.
    pub(crate) timer_runs: (u64, u32),
    /// Queue pairs of the device, while programs use them through bindings.
    pub(crate) mutes: Mutes,
    former: Vec<FormerConnection>,
    burst: Burst,
    /// Number of bursts requested.
    sends: u64,
}

/// Maximum number of timer events at the same time; a device with more makes no progress.
const TIMER_RUNS: u32 = 100;
/// Maximum number of segments of a burst.
const BURST_SEGMENTS: usize = 64;
const BURST_BYTES: usize = 65_000;

impl Host {
    pub(crate) fn new(plan: HostPlan) -> Self {
        Self {
            plan,
            device: None,
            boot: 0,
            delivered: 0,
            listener: None,
            turning: false,
            timer_at: None,
            timer_runs: (0, 0),
            mutes: Mutes::default(),
            former: Vec::new(),
            burst: Burst::default(),
            sends: 0,
        }
    }

    /// Starts a device and its listener.
    pub(crate) fn start(&mut self, now: u64, rng: &mut Rng, number: usize) -> Result<(), String> {
        let mut seed = [0; 32];
        for bytes in seed.chunks_exact_mut(8) {
            bytes.copy_from_slice(&rng.next().to_le_bytes());
        }
        let config = Config {
            guid: 0x0200_0000_0000_0001 + number as u64,
            addrs: vec![self.plan.addr],
            mtu: self.plan.mtu,
            icrc: self.plan.icrc,
            gso: self.plan.gso,
            congestion: self.plan.congestion(),
            ack_delay: self.plan.ack_delay,
            give_up: self.plan.give_up,
            ..Config::default()
        };
        let mut device = Device::new(config, seed);
        // Some programs do not keep the list of former connections.
        for former in std::mem::take(&mut self.former) {
            if rng.chance(500) {
                let ended = device.end_former_connection(Instant::from_nanos(now), &former);
                ended.map_err(|e| format!("host {number}: {former:?}: {e}"))?;
            }
        }
        let at = self.plan.listens.map(|port| SocketAddr::new(self.plan.addr, port));
        let listener = at.map(|at| device.listen(at)).transpose();
        self.listener = listener.map_err(|e| format!("host {number}: listen: {e}"))?;
        self.device = Some(device);
        self.boot += 1;
        self.turning = false;
        self.timer_at = None;
        Ok(())
    }

    /// Stops the device. The list of its connections is kept for its next generation [CM-53].
    pub(crate) fn stop(&mut self) {
        self.former = self.device.as_ref().map(Device::former_connections).unwrap_or_default();
        self.device = None;
        self.mutes = Mutes::default();
        self.listener = None;
        self.boot += 1;
        self.turning = false;
        self.timer_at = None;
    }

    /// Passes a datagram to the device; tells whether its payload was placed in the wrong memory.
    pub(crate) fn deliver(&mut self, now: u64, rng: &mut Rng, datagram: &Datagram) -> bool {
        let hint = match (self.plan.hints, rng.below(3)) {
            (Hints::None, _) | (Hints::Mixed, 0) => IdentHint::Unknown,
            (Hints::Mixed, 1) => IdentHint::Exact(rng.below(4) as u16),
            _ => IdentHint::Exact(datagram.ident),
        };
        let Some(device) = &mut self.device else { return false };
        let now = Instant::from_nanos(now);
        let Datagram { from, to, ident, ref bytes, .. } = *datagram;
        self.delivered += 1;
        if let Some(open_message) =
            device.open_message().filter(|_| !self.delivered.is_multiple_of(4))
        {
            let framing = &mut Vec::new();
            let segment = (ident == 0).then_some(bytes.len());
            let landed = device.receive_in_place(now, open_message, |placement| {
                placement.scatter(bytes, framing);
                Some(GroBuffer { from: Some(from), to, segment, tos: 0, len: bytes.len(), framing })
            });
            if landed != PlacementOutcome::NoTarget {
                return landed == PlacementOutcome::Packets(0);
            }
        }
        device.handle_datagram(now, from, to, hint, bytes);
        false
    }

    /// Splits the next burst into datagrams; returns false when there is nothing to send.
    pub(crate) fn send(
        &mut self,
        now: u64,
        mut each: impl FnMut(Datagram),
    ) -> Result<bool, String> {
        let Some(device) = &mut self.device else { return Ok(false) };
        let now = Instant::from_nanos(now);
        self.sends += 1;
        // From time to time acknowledgements wait until all else is sent, as if a program posted
        // meanwhile.
        let held = self.sends.is_multiple_of(3) && device.defer_acks(now, Qpn(0));
        let mut sent = device.poll_transmit(now, &mut self.burst);
        device.resume_acks();
        if held && !sent {
            sent = device.poll_transmit(now, &mut self.burst);
        }
        if !sent {
            return Ok(false);
        }
        let Burst { from, source_port, to, segment, count, ref bytes, .. } = self.burst;
        let fits = count > 0
            && count <= if self.plan.gso { BURST_SEGMENTS } else { 1 }
            && bytes.len() <= BURST_BYTES
            && segment > 0
            && bytes.len().div_ceil(segment) == count;
        if !fits || from != self.plan.addr {
            let len = bytes.len();
            return Err(format!("a burst of {count} segments of {segment}, {len} bytes, {from}"));
        }
        for (ident, bytes) in bytes.chunks(segment).enumerate() {
            each(Datagram {
                from: SocketAddr::new(from, source_port),
                to,
                ident: ident as u16,
                bytes: bytes.to_vec(),
            });
        }
        Ok(true)
    }

    /// Handles a timer event; tells whether the device did anything. Fails if it makes no progress.
    pub(crate) fn timer(&mut self, now: u64) -> Result<bool, String> {
        if self.timer_at.is_some_and(|at| at <= now) {
            self.timer_at = None;
        }
        let Some(device) = &mut self.device else { return Ok(false) };
        let at = Instant::from_nanos(now);
        if device.poll_timeout().is_none_or(|due| due > at) {
            return Ok(false);
        }
        device.handle_timeout(at);
        let runs = if self.timer_runs.0 == now { self.timer_runs.1 + 1 } else { 0 };
        self.timer_runs = (now, runs);
        if runs > TIMER_RUNS {
            return Err("a timer that is handled stays due".into());
        }
        Ok(true)
    }

    /// Returns when a timer event must be put into the queue, if the queue lacks a needed one.
    pub(crate) fn next_timer(&mut self, now: u64) -> Option<u64> {
        let due = self.device.as_ref()?.poll_timeout()?.as_nanos().max(now);
        if self.timer_at.is_some_and(|at| at <= due) {
            return None;
        }
        self.timer_at = Some(due);
        Some(due)
    }

    pub(crate) fn addr(&self) -> IpAddr {
        self.plan.addr
    }
}
