//! The device: everything together.
//!
//! ```text
//!   handle_datagram --> checks RX-2 .. RX-9 --> queue pair --> completions --> poll_cq
//!   post_send, post_recv ---------------------> queue pair     events -------> poll_event
//!   handle_timeout ---------------------------> queue pair --> packets ------> poll_transmit
//! ```
//! After any input: take the bursts of [`Device::poll_transmit`] until there are none, the events
//! of [`Device::poll_event`] likewise, and set one timer from [`Device::poll_timeout`]. Answers are
//! collected while datagrams come in, and joined; so hand in all datagrams there are before asking
//! for bursts [PERF-6], and take the bursts before the program does its work with what has
//! completed [REQ-23]; or just after it, where the program polls, so that few acknowledgements go
//! alone.

mod cm;
mod direct_placement;
mod gsi;
mod rx;
mod shared;
mod tx;
mod usage;
mod verbs;

use std::collections::VecDeque;
use std::time::Duration;

use bowline_verbs::{AsyncEvent, CmEvent, CqId, DeviceAttr, QpState, Qpn};
use bowline_wire::roce::{IcrcChecker, Opcode};

pub use self::direct_placement::{
    DirectPlacement, GroBuffer, OpenMessage, PLACEMENT_GAP, PLACEMENT_HEAD, PLACEMENT_PACKETS_MAX,
    PlacementOutcome,
};
pub use self::usage::InUse;

use self::gsi::Gsi;
use self::shared::Shared;
use crate::burst::burst_payload;
use crate::config::Config;
use crate::counters::Counters;
use crate::qp::Qp;
use crate::rng::Rng;
use crate::table::{NumberMap, Table};
use bowline_base::Instant;

/// Something the program is to be told.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Event {
    /// A completion queue has an entry that was waited for: once for every [`Device::arm_cq`].
    CqReady(CqId),
    /// Something happened to a queue pair, a completion queue or the device.
    Async(AsyncEvent),
    /// Something happened to a connection.
    Cm(CmEvent),
}

/// What is known of the IPv4 identification of a datagram received [ICRC-34].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum IdentHint {
    /// Nothing.
    #[default]
    Unknown,
    /// It is likely to be this.
    Exact(u16),
}

/// An RDMA device as a state machine.
#[derive(Debug)]
pub struct Device {
    shared: Shared,
    qps: NumberMap<Box<Qp>>,
    /// Protection domains, and how many queue pairs are in each.
    pds: Table<usize>,
    rng: Rng,
    icrc: IcrcChecker,
    /// Numbers of queue pairs that are gone: not given again soon [QP-6].
    retired: VecDeque<u32>,
    gsi: Gsi,
    cm: cm::CmState,
    /// A packet made for a burst that had no room for it, without ICRC, and whose it is.
    carry: Vec<u8>,
    carry_qpn: Option<Qpn>,
    /// The queue pair and the opcode of the last packet that was no acknowledgement.
    last_packet: Option<(Qpn, Opcode)>,
    /// What was received where something else was expected, put together.
    reassembly: Vec<u8>,
}

impl Device {
    /// Makes a device. All numbers that a stranger must not guess come from `seed` [CM-53]: 32
    /// bytes that nobody else knows and no other device gets, from the system's generator. They are
    /// no setting, since there can be no default.
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
            cm: cm::CmState::new(&config, &mut rng),
            carry: Vec::new(),
            carry_qpn: None,
            last_packet: None,
            reassembly: Vec::new(),
            rng,
            shared: Shared::new(config),
        }
    }

    /// Limits and addresses. Name and provider are the driver's to change.
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
            max_mr: limits.mrs,
            max_mw: limits.mws,
            max_qp_rd_atom: limits.rd_atomic,
            max_inline: limits.inline,
            fast_registration: true,
            flush: true,
            key_refresh: true,
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

    /// Changes [`Config::ack_delay`](crate::Config::ack_delay): only while somebody looks for what
    /// arrives anyway does it cost nothing to see to acknowledgements a little later.
    pub const fn set_ack_delay(&mut self, delay: Duration) {
        self.shared.config.ack_delay = delay;
    }

    /// Has acknowledgements that wait go out now: before queue pairs end, with which they would be
    /// lost.
    pub fn release_acks(&mut self, now: Instant) {
        for qp in self.qps.values_mut() {
            if qp.delayed_ack.release() {
                self.shared.settle(now, qp, true);
            }
        }
        self.resume_acks();
    }

    /// What has been counted.
    pub const fn counters(&self) -> &Counters {
        &self.shared.counters
    }

    /// Returns the next event.
    pub fn poll_event(&mut self) -> Option<Event> {
        self.shared.events.pop_front()
    }

    /// When [`handle_timeout`](Self::handle_timeout) is to be called. It may turn out then that
    /// nothing was due.
    pub fn poll_timeout(&self) -> Option<Instant> {
        let queue_pairs = self.shared.next_timer();
        [queue_pairs, self.cm_timeout()].into_iter().flatten().min()
    }

    /// Does what has become due.
    pub fn handle_timeout(&mut self, now: Instant) {
        while let Some(qpn) = self.shared.due(now, &self.qps) {
            if let Some(qp) = self.qps.get_mut(&qpn.0) {
                qp.timer_at = None;
                self.shared.handle_qp_timeout(now, qp);
            }
        }
        self.stop_overrun(now);
        self.cm_handle_timeout(now);
    }

    /// Queue pairs whose completion queue has overrun cannot go on.
    fn stop_overrun(&mut self, now: Instant) {
        while let Some(cq) = self.shared.overrun.pop() {
            let mut hit: Vec<u32> = self
                .qps
                .values()
                .filter(|qp| qp.init.send_cq == cq || qp.init.recv_cq == cq)
                .map(|qp| qp.qpn.0)
                .collect();
            // The order of a map must not be seen outside.
            hit.sort_unstable();
            for qpn in hit {
                let Some(qp) = self.qps.get_mut(&qpn) else { continue };
                if qp.state == QpState::Err {
                    // The completion that was to tell of it may be lost.
                    self.shared.events.push_back(Event::Async(AsyncEvent::QpFatal(qp.qpn)));
                }
                self.shared.stop(now, qp);
            }
        }
    }
}
