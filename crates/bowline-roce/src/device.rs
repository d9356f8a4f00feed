//! The device: queue pairs, memory, completions and the connection manager in one state machine.
//!
//! ```text
//!   handle_datagram --> checks RX-2 .. RX-9 --> queue pair --> completions --> poll_cq
//!   post_send, post_recv ---------------------> queue pair     events -------> poll_event
//!   handle_timeout ---------------------------> queue pair --> packets ------> poll_transmit
//! ```
//! After any input, drain [`Device::poll_transmit`] and [`Device::poll_event`], and set one timer
//! from [`Device::poll_timeout`]. Responses are collected while datagrams come in, and joined; so
//! pass in all datagrams that have arrived before asking for bursts [PERF-6]. Send the bursts
//! before the program processes its completions [REQ-23], or, where the program polls, directly
//! after that, so that few acknowledgements are sent alone.

mod cm;
mod direct_placement;
mod gsi;
mod marks;
mod multicast;
mod rx;
mod shared;
mod tx;
mod usage;
mod verbs;

use std::collections::VecDeque;
use std::time::Duration;

use bowline_verbs::{AsyncEvent, CmEvent, CqId, DeviceAttr, PathStats, QpState, Qpn};
use bowline_wire::roce::{IcrcChecker, Opcode};

pub use self::direct_placement::{
    DirectPlacement, GroBuffer, OpenMessage, PLACEMENT_GAP, PLACEMENT_HEAD, PLACEMENT_PACKETS_MAX,
    PlacementOutcome,
};
pub use self::usage::InUse;

use self::gsi::Gsi;
use self::multicast::Groups;
use self::shared::Shared;
use crate::burst::burst_payload;
use crate::config::Config;
#[cfg(test)]
use crate::congestion::Control;
use crate::counters::Counters;
use crate::qp::Qp;
use crate::rng::Rng;
use crate::table::{NumberMap, Table};
use bowline_base::Instant;

/// Notification for the program.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Event {
    /// A completion queue has an entry that a waiter asked for: sent once per [`Device::arm_cq`].
    CqReady(CqId),
    /// Something happened to a queue pair, a completion queue or the device.
    Async(AsyncEvent),
    /// Something happened to a connection.
    Cm(CmEvent),
}

/// Likely IPv4 identification of a received datagram [ICRC-34].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum IdentHint {
    /// The identification is unknown.
    #[default]
    Unknown,
    /// The identification is probably this number.
    Exact(u16),
}

/// An RDMA device as a state machine.
#[derive(Debug)]
pub struct Device {
    shared: Shared,
    qps: NumberMap<Box<Qp>>,
    /// Protection domains, each with its number of queue pairs, shared receive queues and domains
    /// within it.
    pds: Table<usize>,
    rng: Rng,
    icrc: IcrcChecker,
    /// Numbers of removed queue pairs, which are not reused soon [QP-6].
    retired: VecDeque<u32>,
    gsi: Gsi,
    cm: cm::CmState,
    groups: Groups,
    /// Packet, without its ICRC, that did not fit into the previous burst, and its queue pair.
    carry: Vec<u8>,
    carry_qpn: Option<Qpn>,
    /// Queue pair and opcode of the most recent packet that was no acknowledgement.
    last_packet: Option<(Qpn, Opcode)>,
    /// Queue pairs whose peers are to be notified of congestion.
    cnps: VecDeque<Qpn>,
    /// Buffer in which misplaced datagrams are reassembled.
    reassembly: Vec<u8>,
}

impl Device {
    /// Creates a device. All numbers that a stranger must not guess are derived from `seed`
    /// [CM-53]: 32 bytes from the system's random generator, secret and different for each device.
    /// The seed is not part of [`Config`], since it can have no default.
    pub fn new(mut config: Config, seed: [u8; 32]) -> Self {
        for addr in &mut config.addrs {
            *addr = addr.to_canonical();
        }
        let mut rng = Rng::new(&seed);
        Self {
            qps: NumberMap::default(),
            pds: Table::new(),
            icrc: IcrcChecker::new(config.icrc),
            retired: VecDeque::new(),
            gsi: Gsi::default(),
            groups: Groups::default(),
            cm: cm::CmState::new(&config, &mut rng),
            carry: Vec::new(),
            carry_qpn: None,
            cnps: VecDeque::new(),
            last_packet: None,
            reassembly: Vec::new(),
            rng,
            shared: Shared::new(config),
        }
    }

    /// Returns limits and addresses. The driver overrides name and provider.
    pub fn attr(&self) -> DeviceAttr {
        let config = &self.shared.config;
        let limits = &config.limits;
        DeviceAttr {
            name: "bowline0".to_owned(),
            provider: "soft",
            guid: config.guid,
            addrs: config.addrs.clone(),
            mtu: config.mtu,
            max_qp: limits.qps,
            max_qp_wr: limits.wrs,
            max_sge: limits.sges,
            max_cq: limits.cqs,
            max_cqe: limits.cqes,
            max_srq: limits.srqs,
            max_srq_wr: limits.wrs,
            max_srq_sge: limits.sges,
            max_mr: limits.mrs,
            max_mw: limits.mws,
            max_qp_rd_atom: limits.rd_atomic,
            max_inline: limits.inline,
            fast_registration: true,
            flush: true,
            key_refresh: true,
            inner_pds: true,
            burst: if config.gso { burst_payload(config.mtu) } else { 0 },
            lazy_cq: true,
        }
    }

    /// The settings.
    pub const fn config(&self) -> &Config {
        &self.shared.config
    }

    /// Allows or forbids bursts of more than one packet [ICRC-23].
    pub const fn set_gso(&mut self, gso: bool) {
        self.shared.config.gso = gso;
    }

    /// Changes [`Config::ack_delay`](crate::Config::ack_delay). A delay costs nothing only while
    /// some thread polls for arrivals anyway.
    pub const fn set_ack_delay(&mut self, delay: Duration) {
        self.shared.config.ack_delay = delay;
    }

    /// Makes all delayed acknowledgements due now. For use before queue pairs are removed, which
    /// would discard them.
    pub fn release_acks(&mut self, now: Instant) {
        for qp in self.qps.values_mut() {
            if qp.delayed_ack.release() {
                self.shared.settle(now, qp, true);
            }
        }
        self.resume_acks();
    }

    /// Returns the counters.
    pub const fn counters(&self) -> &Counters {
        &self.shared.counters
    }

    /// Returns what is known about the paths to the peers of queue pairs.
    pub fn paths(&self) -> impl Iterator<Item = PathStats> {
        self.shared.paths.stats()
    }

    /// Returns the next event.
    pub fn poll_event(&mut self) -> Option<Event> {
        self.shared.events.pop_front()
    }

    /// Returns when to call [`handle_timeout`](Self::handle_timeout). That call may find that
    /// nothing was due.
    pub fn poll_timeout(&self) -> Option<Instant> {
        let queue_pairs = self.shared.next_timer();
        [queue_pairs, self.cm_timeout()].into_iter().flatten().min()
    }

    /// Runs all timers that are due.
    pub fn handle_timeout(&mut self, now: Instant) {
        while let Some(qpn) = self.shared.due(now, &self.qps) {
            if let Some(qp) = self.qps.get_mut(&qpn.0) {
                qp.timer_at = None;
                self.shared.handle_qp_timeout(now, qp);
            }
        }
        self.shared.run_path_timers(now);
        self.stop_overrun(now);
        self.cm_handle_timeout(now);
    }

    /// The controller of a queue pair's path.
    #[cfg(test)]
    pub(crate) fn path_control(&mut self, qp: Qpn) -> &mut Control {
        let path = self.qps[&qp.0].path;
        self.shared.paths.get_mut(path).control_mut()
    }

    /// Gives the path of a queue pair another controller.
    #[cfg(test)]
    pub(crate) fn set_path_control(&mut self, qp: Qpn, control: Control) {
        *self.path_control(qp) = control;
    }

    /// Fails the queue pairs whose completion queue has overrun.
    fn stop_overrun(&mut self, now: Instant) {
        while let Some(cq) = self.shared.overrun.pop() {
            let mut hit: Vec<u32> = self
                .qps
                .values()
                .filter(|qp| qp.init.send_cq == cq || qp.init.recv_cq == cq)
                .map(|qp| qp.qpn.0)
                .collect();
            // The iteration order of the map must not be observable.
            hit.sort_unstable();
            for qpn in hit {
                let Some(qp) = self.qps.get_mut(&qpn) else { continue };
                if qp.state == QpState::Err {
                    // The completion that would have reported the error may be the lost entry.
                    self.shared.events.push_back(Event::Async(AsyncEvent::QpFatal(qp.qpn)));
                }
                self.shared.stop(now, qp);
            }
        }
    }
}
