//! Received datagrams: the checks that precede the queue pairs, in the order of section 4 of the
//! spec. A packet that fails a check is dropped and counted, without an answer; no other state has
//! changed by then [RX-11].

use std::net::{IpAddr, SocketAddr};

use bowline_base::Instant;
use bowline_verbs::{AsyncEvent, QpState, Qpn};
use bowline_wire::roce::{
    DEFAULT_PKEY, GSI_QKEY, GSI_QPN, IcrcChecker, IcrcMatch, Opcode, Outer, Packet, PacketError,
    Service, split_icrc,
};

use super::shared::Shared;
use super::{Device, Event, IdentHint};
use crate::counters::Counters;
use crate::qp::{Halves, Qp};
use crate::rc::requester::Outcome;
use crate::rc::responder::PacketOutcome;
use crate::ud::{NETWORK_HEADER_LEN, network_header};

impl Device {
    /// Prefetches the region entries of datagrams that [`handle_datagrams`](Self::handle_datagrams)
    /// is about to be given: an entry may not be in the processor's cache.
    pub fn expect<'a>(&self, payloads: impl Iterator<Item = &'a [u8]>) {
        for rkey in payloads.filter_map(Packet::peek_rkey) {
            self.shared.mrs.prefetch_key(rkey);
        }
    }

    /// Handles the payload of one datagram that arrived at port 4791 of `to`: all bytes from the
    /// first header to the ICRC.
    pub fn handle_datagram(
        &mut self,
        now: Instant,
        from: SocketAddr,
        to: IpAddr,
        ident: IdentHint,
        payload: &[u8],
    ) {
        self.handle_datagrams(now, from, to, core::iter::once((ident, payload)));
    }

    /// Handles several datagrams of one sender, in order. Their completions are reported after the
    /// last datagram. A completion queue that overruns therefore fails its queue pairs only then,
    /// and requests that these queue pairs executed in the meantime are not acknowledged.
    pub fn handle_datagrams<'a>(
        &mut self,
        now: Instant,
        from: SocketAddr,
        to: IpAddr,
        datagrams: impl Iterator<Item = (IdentHint, &'a [u8])>,
    ) {
        let (ip, to) = (from.ip().to_canonical(), to.to_canonical());
        let outer = Outer { from: ip, to, source_port: from.port() };
        // RX-2
        let known = self.shared.config.addrs.contains(&to) || self.groups.has(to);
        self.shared.begin_gathering();
        for (ident, payload) in datagrams {
            let counters = &mut self.shared.counters;
            counters.rx_packets += 1;
            counters.rx_bytes += payload.len() as u64;
            if known {
                self.handle_packet(now, &outer, ident, payload);
            } else {
                counters.drop_address += 1;
            }
        }
        self.shared.end_gathering();
        if !self.shared.overrun.is_empty() {
            self.stop_overrun(now);
        }
    }

    /// `outer` has addresses in canonical form. It is built once for all packets of a sender,
    /// because a load from recently written narrower stores stalls until all earlier stores have
    /// left the store buffer, including the payload of the previous packet.
    fn handle_packet(&mut self, now: Instant, outer: &Outer, ident: IdentHint, payload: &[u8]) {
        let counters = &mut self.shared.counters;
        // RX-3, RX-4
        let Some((bytes, icrc)) = split_icrc(payload) else {
            counters.drop_malformed += 1;
            return;
        };
        let parsed = Packet::parse(bytes);
        // Borrowed, not moved, for the same reason as `outer`.
        let packet = match &parsed {
            // RX-14
            Ok(packet) if packet.bth.dest_qpn == Qpn::MULTICAST.0 && outer.to.is_multicast() => {
                return self.handle_multicast(now, outer, ident, packet, (bytes, icrc));
            }
            Ok(packet) if packet.bth.dest_qpn != Qpn::MULTICAST.0 && !outer.to.is_multicast() => {
                packet
            }
            Ok(_) | Err(PacketError::Version(_) | PacketError::NoQueuePair) => {
                counters.drop_header += 1;
                return;
            }
            Err(_) => {
                counters.drop_malformed += 1;
                return;
            }
        };
        // HDR-14
        if packet.opcode == Opcode::Cnp {
            counters.rx_cnp += 1;
            self.handle_cnp(now, outer, ident, packet, (bytes, icrc));
            return;
        }
        let general = packet.bth.dest_qpn == GSI_QPN;
        let mut qp = None;
        if general {
            if packet.opcode.service() != Service::Ud {
                counters.drop_transport += 1;
                return;
            }
        } else {
            // RX-5, RX-6
            let Some(found) = self.qps.get_mut(&packet.bth.dest_qpn) else {
                counters.drop_no_qp += 1;
                return;
            };
            let counter = match refusal(found, outer, packet) {
                None => None,
                Some(Refusal::Transport) => Some(&mut counters.drop_transport),
                Some(Refusal::State) => Some(&mut counters.drop_state),
                Some(Refusal::Peer) => Some(&mut counters.drop_peer),
            };
            if let Some(counter) = counter {
                *counter += 1;
                return;
            }
            qp = Some(found);
        }
        // RX-7: full members talk with everybody, so the top bit does not matter.
        if packet.bth.pkey | 0x8000 != DEFAULT_PKEY {
            counters.drop_pkey += 1;
            return;
        }
        // RX-8
        let wanted = qp.as_ref().map_or(Some(GSI_QKEY), |qp| qp.attr.qkey);
        if packet.deth.is_some_and(|deth| Some(deth.qkey) != wanted) {
            counters.drop_qkey += 1;
            return;
        }
        let checked = check_icrc(&mut self.icrc, counters, outer, ident, (bytes, icrc));
        let Some(identification) = checked else { return };
        // RX-10
        let Some(qp) = qp else {
            self.handle_general(now, outer.from, outer.to, packet);
            return;
        };
        let header = || network_header(outer.from, outer.to, identification, payload.len());
        self.shared.hand_to(now, qp, packet, header);
        let qpn = qp.qpn;
        if packet.opcode != Opcode::Acknowledge {
            self.last_packet = Some((qpn, packet.opcode));
        }
        self.cm_data_arrived(now, qpn);
    }
}

/// Checks the ICRC of a packet [RX-9]; returns the identification that it is right for, or `None`
/// if there is none. `packet` is what [`split_icrc`] returned.
#[inline]
pub(super) fn check_icrc(
    checker: &mut IcrcChecker,
    counters: &mut Counters,
    outer: &Outer,
    ident: IdentHint,
    (bytes, icrc): (&[u8], u32),
) -> Option<u16> {
    let likely = match &ident {
        IdentHint::Unknown => &[][..],
        IdentHint::Exact(ident) => core::slice::from_ref(ident),
    };
    let checked = checker.check(outer, bytes, icrc, likely);
    counters.rx_icrc_bytes += checker.take_summed();
    match checked {
        Ok(IcrcMatch::Unchecked) => Some(0),
        Ok(IcrcMatch::Exact(ident)) => Some(ident),
        Ok(IcrcMatch::Solved(ident)) => {
            counters.icrc_solved += 1;
            Some(ident)
        }
        Err(_) => {
            counters.drop_icrc += 1;
            None
        }
    }
}

impl Shared {
    /// Hands a checked packet to the half of its queue pair that it is for. `header` makes the
    /// network header that precedes a datagram in its buffer.
    #[inline]
    pub(super) fn hand_to(
        &mut self,
        now: Instant,
        qp: &mut Qp,
        packet: &Packet<'_>,
        header: impl FnOnce() -> [u8; NETWORK_HEADER_LEN],
    ) {
        if qp.state == QpState::Rtr && !qp.heard {
            qp.heard = true;
            self.events.push_back(Event::Async(AsyncEvent::CommEstablished(qp.qpn)));
        }
        let context = self.qp_context(qp);
        let mut outcome = Outcome::Idle;
        match &mut qp.halves {
            // Responses go to the requester, all other packets to the responder [RX-10].
            Halves::Rc { requester, .. } if packet.opcode.is_response() => {
                outcome = requester.handle(&mut self.tx(now, context), packet);
            }
            Halves::Rc { responder, .. } => {
                let before = self.counters.requests_duplicate;
                // A fault takes effect in `Shared::settle`.
                let _: PacketOutcome = responder.handle(&mut self.rx(now, context), packet);
                let again = self.counters.requests_duplicate != before;
                // A duplicate of a single packet proves nothing: the network may have duplicated
                // it.
                if again
                    && packet.opcode == Opcode::ReadRequest
                    && packet.reth.is_some_and(|reth| reth.len as usize > context.mtu())
                {
                    qp.answer_gso_loss.note_restart(packet.bth.psn);
                }
            }
            Halves::Uc { receiver, .. } => {
                if receiver.handle(&mut self.rx(now, context), packet) == PacketOutcome::Fatal {
                    outcome = Outcome::Failed;
                }
            }
            Halves::Ud { receiver, .. } => {
                let qkey = qp.attr.qkey.unwrap_or_default();
                let ctx = &mut self.rx(now, context);
                if receiver.handle(ctx, qkey, &header(), packet) == PacketOutcome::Fatal {
                    outcome = Outcome::Failed;
                }
            }
        }
        if let Some(srq) = qp.init.srq {
            self.report_srq_limit(srq);
        }
        self.detect_gso_loss(qp);
        self.after(now, qp, outcome, true);
    }
}

/// Why a queue pair does not accept a packet.
pub(super) enum Refusal {
    Transport,
    State,
    Peer,
}

#[inline]
pub(super) fn refusal(qp: &Qp, outer: &Outer, packet: &Packet<'_>) -> Option<Refusal> {
    let service = match qp.halves {
        Halves::Rc { .. } => Service::Rc,
        Halves::Uc { .. } => Service::Uc,
        Halves::Ud { .. } => Service::Ud,
    };
    if packet.opcode.service() != service {
        return Some(Refusal::Transport);
    }
    let least = if packet.opcode.is_response() { QpState::Rts } else { QpState::Rtr };
    // In ERR, packets are discarded without an answer [QP-4].
    if qp.state < least || qp.state == QpState::Err {
        return Some(Refusal::State);
    }
    match &qp.attr.av {
        Some(av) if service != Service::Ud && (av.remote != outer.from || av.local != outer.to) => {
            Some(Refusal::Peer)
        }
        _ => None,
    }
}

impl Device {
    /// Handles a checked datagram for the general services.
    fn handle_general(&mut self, now: Instant, from: IpAddr, to: IpAddr, packet: &Packet<'_>) {
        // GSI-1
        match <&[u8; bowline_wire::roce::MAD_LEN]>::try_from(packet.payload) {
            Ok(mad) => {
                self.shared.counters.rx_mads += 1;
                self.handle_mad(now, from, to, mad);
            }
            Err(_) => self.shared.counters.drop_malformed += 1,
        }
    }

    /// Tells whether a number may be assigned to a new queue pair [QP-6].
    pub(super) fn is_free(&self, qpn: Qpn) -> bool {
        qpn.0 > 1
            && qpn != Qpn::MULTICAST
            && !self.qps.contains_key(&qpn.0)
            && !self.retired.contains(&qpn.0)
            && !self.cm_reserves(qpn)
    }
}
