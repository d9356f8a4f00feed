//! Direct placement: the payloads of arriving packets are received at their destination.
//!
//! While a long message is under way, either a WRITE of the peer or the answer to a READ, the
//! destination of the next payloads is known. The driver passes it to the system in the receive
//! call, which saves one copy, and reports what arrived. If the arriving packets are the expected
//! ones, in order and with correct ICRCs, they are done. All other bytes are reassembled from their
//! pieces and handled as ordinary datagrams, and the destination memory they were written to is
//! zeroed, so that no peer sees what another peer sent [RX-13]. The contents of that memory are
//! undefined until the message is complete.

use std::net::{IpAddr, SocketAddr};

use bowline_base::Instant;
use bowline_verbs::{Piece, QpState, Qpn};
use bowline_wire::roce::{BTH_LEN, DEFAULT_PKEY, ICRC_LEN, IcrcMatch, Opcode, Outer, Packet, Psn};

use super::rx::refusal;
use super::{Device, IdentHint};
use crate::qp::Halves;
use crate::rc::requester::Outcome;

/// Most packets received in place by one call: UDP_GRO merges no more.
pub const PLACEMENT_PACKETS_MAX: usize = 64;

/// Bytes of the longest datagram, which is also the most that UDP_GRO merges.
const DATAGRAM_MAX: usize = 65_535;

/// Bytes of the header before the first payload: the first framing bytes.
pub const PLACEMENT_HEAD: usize = BTH_LEN;

/// Bytes between two payloads: the ICRC of one packet and the header of the next.
pub const PLACEMENT_GAP: usize = ICRC_LEN + BTH_LEN;

/// A message with at most this many full packets left is not worth receiving in place.
const BYTES_LEFT_MIN: usize = 4;

/// Returns how many packets of `payload` bytes one merged buffer can hold. Further destinations
/// would never be used.
fn placement_packets(payload: usize) -> usize {
    (DATAGRAM_MAX / (payload + PLACEMENT_GAP)).min(PLACEMENT_PACKETS_MAX)
}

/// Destination of the payloads of the next packets. All other bytes, the framing, are received into
/// a separate buffer, one after the other:
///
/// ```text
///  received | header | payload 0 | ICRC, header | payload 1 | ICRC, header | .. | ICRC | rest
///  aside    | header |           | ICRC, header |           | ICRC, header | .. | ICRC | rest
///  place             | payload 0 |              | payload 1 |              | ..
/// ```
#[derive(Clone, Debug)]
pub struct DirectPlacement {
    /// Memory of all payloads, which follow one another without a gap.
    pub place: Piece,
    /// Bytes of each payload.
    pub payload: usize,
    qpn: Qpn,
    opcode: Opcode,
    psn: Psn,
}

impl DirectPlacement {
    /// Returns the number of payloads that have a destination.
    pub fn packets(&self) -> usize {
        self.place.len / self.payload
    }

    /// Bytes of a packet, ICRC included.
    const fn packet(&self) -> usize {
        self.payload + PLACEMENT_GAP
    }

    /// Returns how many of the first `len` received bytes are payload at its destination.
    pub fn bytes_in_place(&self, len: usize) -> usize {
        let whole = (len / self.packet()).min(self.packets());
        let behind = len - whole * self.packet();
        let part = if whole < self.packets() { behind.saturating_sub(PLACEMENT_HEAD) } else { 0 };
        whole * self.payload + part.min(self.payload)
    }

    /// Distributes received bytes as the scattering receive call of a driver does. For simulators
    /// and tests, which have no such call.
    pub fn scatter(&self, bytes: &[u8], framing: &mut Vec<u8>) {
        let mut rest = bytes;
        for k in 0..self.packets() {
            let gap = if k == 0 { PLACEMENT_HEAD } else { PLACEMENT_GAP };
            let (head, behind) = rest.split_at(gap.min(rest.len()));
            let (payload, behind) = behind.split_at(self.payload.min(behind.len()));
            framing.extend_from_slice(head);
            self.place.buffer.write(self.place.offset + k * self.payload, payload);
            rest = behind;
        }
        framing.extend_from_slice(rest);
    }

    /// Rebuilds the received datagrams from their pieces, `len` bytes in all, beginning with packet
    /// `first`.
    fn restore(&self, len: usize, first: usize, framing: &[u8], out: &mut Vec<u8>) {
        let mut at = first * PLACEMENT_GAP;
        let landed = self.bytes_in_place(len);
        let end = framing.len().min(len - landed);
        for offset in (first * self.payload..landed).step_by(self.payload) {
            let before =
                if offset == first * self.payload { PLACEMENT_HEAD } else { PLACEMENT_GAP };
            out.extend_from_slice(framing.get(at..at + before).unwrap_or_default());
            at += before;
            let part = self.payload.min(landed - offset);
            self.place.buffer.append_to(self.place.offset + offset, part, out);
        }
        out.extend_from_slice(framing.get(at..end).unwrap_or_default());
    }
}

/// A received buffer: one datagram, or several of one sender that UDP_GRO merged.
#[derive(Clone, Copy, Debug)]
pub struct GroBuffer<'a> {
    /// Sender; `None` if unknown, in which case the bytes are discarded.
    pub from: Option<SocketAddr>,
    /// Local address the buffer arrived at.
    pub to: IpAddr,
    /// Bytes of each datagram except the last, if all are known to belong to one burst of the peer.
    pub segment: Option<usize>,
    /// Type of service of all datagrams.
    pub tos: u8,
    /// Bytes of all datagrams together.
    pub len: usize,
    /// The framing bytes; may be followed by bytes that do not belong to this buffer.
    pub framing: &'a [u8],
}

/// Outcome of [`Device::receive_in_place`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PlacementOutcome {
    /// No destination is known, so nothing was received.
    NoTarget,
    /// Nothing was received.
    Nothing,
    /// This many packets were received in place. All other received bytes were handled as ordinary
    /// datagrams.
    Packets(usize),
}

/// A long message that is still being received, and to which the most recent packet belonged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpenMessage {
    qpn: Qpn,
    opcode: Opcode,
    /// Payload bytes of each packet to come, except the last.
    pub payload: usize,
}

impl Device {
    /// Returns the message that the most recent packet, acknowledgements aside, belonged to, if its
    /// next packets are worth [receiving in place](Self::receive_in_place).
    pub fn open_message(&self) -> Option<OpenMessage> {
        let (qpn, opcode) = self.last_packet?;
        let qp = self.qps.get(&qpn.0).filter(|qp| qp.state != QpState::Err)?;
        let Halves::Rc { requester, responder } = &qp.halves else { return None };
        let (left, opcode) = match opcode {
            Opcode::WriteFirst | Opcode::WriteMiddle => {
                (responder.write_bytes_left(), Opcode::WriteMiddle)
            }
            Opcode::ReadResponseFirst | Opcode::ReadResponseMiddle => {
                (requester.read_bytes_left(), Opcode::ReadResponseMiddle)
            }
            _ => return None,
        };
        let payload = qp.mtu(&self.shared.config);
        (left > BYTES_LEFT_MIN * payload).then_some(OpenMessage { qpn, opcode, payload })
    }

    /// Receives the next packets of a message at their destination and handles them. `receive` is
    /// given the destination and must be the only writer to it during the call; it returns `None`
    /// if nothing was received.
    pub fn receive_in_place<'a>(
        &mut self,
        now: Instant,
        open_message: OpenMessage,
        receive: impl FnOnce(&DirectPlacement) -> Option<GroBuffer<'a>>,
    ) -> PlacementOutcome {
        let Some(placement) = self.placement(now, open_message) else {
            return PlacementOutcome::NoTarget;
        };
        let Some(run) = receive(&placement) else { return PlacementOutcome::Nothing };
        if let Some(from) = run.from {
            self.note_tos_of(now, from, run.to, run.tos, placement.qpn);
        }
        let good = self.accept_in_place(now, &placement, &run);
        if good > 0 && good * placement.packet() == run.len {
            return PlacementOutcome::Packets(good);
        }
        let mut rest = std::mem::take(&mut self.reassembly);
        rest.clear();
        placement.restore(run.len, good, run.framing, &mut rest);
        let others = placement.bytes_in_place(run.len).saturating_sub(good * placement.payload);
        let at = placement.place.offset + good * placement.payload;
        placement.place.buffer.clear(at, others);
        match (run.from, run.segment) {
            (None, _) => {}
            (Some(from), None) => {
                self.handle_datagram(now, from, run.to, IdentHint::Unknown, &rest);
            }
            (Some(from), Some(segment)) => {
                let datagrams = rest.chunks(segment.max(1)).zip(good..);
                let datagrams = datagrams.map(|(bytes, k)| (run.ident(k), bytes));
                self.handle_datagrams(now, from, run.to, datagrams);
            }
        }
        self.reassembly = rest;
        PlacementOutcome::Packets(good)
    }

    fn placement(&mut self, now: Instant, open_message: OpenMessage) -> Option<DirectPlacement> {
        let OpenMessage { qpn, opcode, payload } = open_message;
        let qp = self.qps.get(&qpn.0)?;
        if qp.state < QpState::Rtr || qp.state == QpState::Err {
            return None;
        }
        let context = self.shared.qp_context(qp);
        if context.mtu() != payload {
            return None; // reconnected with another path MTU
        }
        let most = placement_packets(payload) * payload;
        let Halves::Rc { requester, responder } = &qp.halves else { return None };
        let (psn, mut place) = if opcode == Opcode::WriteMiddle {
            responder.placement(&self.shared.rx(now, context), most)?
        } else {
            requester.placement(&self.shared.tx(now, context), most)?
        };
        if !place.buffer.allows_direct_placement() {
            return None;
        }
        place.len -= place.len % payload;
        (place.len > 0).then_some(DirectPlacement { place, payload, qpn, opcode, psn })
    }

    /// Accepts the expected packets, up to the first unexpected one; returns their number.
    fn accept_in_place(
        &mut self,
        now: Instant,
        placement: &DirectPlacement,
        run: &GroBuffer<'_>,
    ) -> usize {
        let DirectPlacement { ref place, payload, qpn, opcode, .. } = *placement;
        let to = run.to.to_canonical();
        let ours = self.shared.config.addrs.contains(&to); // RX-2
        let alike = run.segment.unwrap_or(run.len) == placement.packet();
        let Some(from) = run.from.filter(|_| ours && alike) else { return 0 };
        let outer = Outer { from: from.ip().to_canonical(), to, source_port: from.port() };
        let outer = &outer;
        let whole = (run.len / placement.packet()).min(placement.packets());
        let Some(qp) = self.qps.get_mut(&qpn.0) else { return 0 };
        let context = self.shared.qp_context(qp);
        let mut good = 0;
        let (gaps, _) = run.framing.as_chunks::<PLACEMENT_GAP>();
        for (k, bytes) in gaps.iter().enumerate().take(whole) {
            let [head @ .., i0, i1, i2, i3] = bytes;
            // The checks of `handle_packet`, in the same order.
            let Ok(packet) = Packet::parse(head) else { break };
            if packet.opcode != opcode
                || packet.bth.dest_qpn != qpn.0
                || packet.bth.psn != placement.psn + k as u32
                || refusal(qp, outer, &packet).is_some()
                || packet.bth.pkey | 0x8000 != DEFAULT_PKEY
            {
                break;
            }
            let sum = |crc| place.buffer.sum(place.offset + k * payload, payload, crc);
            let likely = match run.ident(k) {
                IdentHint::Unknown => &[][..],
                IdentHint::Exact(ident) => &[ident],
            };
            let icrc = u32::from_le_bytes([*i0, *i1, *i2, *i3]);
            let checked = self.icrc.check_parts(outer, head, (payload, sum), icrc, likely);
            let counters = &mut self.shared.counters;
            counters.rx_icrc_bytes += self.icrc.take_summed();
            match checked {
                Ok(IcrcMatch::Unchecked | IcrcMatch::Exact(_)) => {}
                Ok(IcrcMatch::Solved(_)) => counters.icrc_solved += 1,
                Err(_) => break,
            }
            counters.rx_packets += 1;
            counters.rx_bytes += placement.packet() as u64;
            counters.rx_landed += 1;
            good += 1;
            let Halves::Rc { requester, responder } = &mut qp.halves else { break };
            if opcode == Opcode::WriteMiddle {
                responder.accept_in_place(&self.shared.rx(now, context), packet.bth.ack_req);
            } else {
                requester.accept_in_place(&mut self.shared.tx(now, context));
            }
        }
        if good > 0 {
            self.last_packet = Some((qpn, opcode));
            self.shared.detect_gso_loss(qp);
            self.shared.after(now, qp, Outcome::Idle, true);
            if !self.shared.overrun.is_empty() {
                self.stop_overrun(now);
            }
            self.cm_data_arrived(now, qpn);
        }
        good
    }
}

impl GroBuffer<'_> {
    /// Returns the likely IPv4 identification of datagram `k`: a bowline peer numbers the datagrams
    /// of a burst from 0 [ICRC-34].
    fn ident(&self, k: usize) -> IdentHint {
        match self.segment {
            None => IdentHint::Unknown,
            Some(_) => IdentHint::Exact(u16::try_from(k).unwrap_or(u16::MAX)),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use bowline_verbs::Buffer;

    use super::*;

    #[test]
    fn restore_reverses_scatter() {
        let buffer = Arc::new(Buffer::new(1000).unwrap());
        let place = Piece { buffer, offset: 100, len: 3 * 40 };
        let (opcode, psn) = (Opcode::WriteMiddle, Psn::ZERO);
        let placement = DirectPlacement { place, payload: 40, qpn: Qpn(7), opcode, psn };
        let bytes: Vec<u8> = (1..=250).collect();
        for len in 0..=bytes.len() {
            let (mut framing, mut whole) = (Vec::new(), Vec::new());
            placement.scatter(&bytes[..len], &mut framing);
            assert_eq!(framing.len() + placement.bytes_in_place(len), len);
            for first in 0..=3.min(len / placement.packet()) {
                whole.clear();
                placement.restore(len, first, &framing, &mut whole);
                assert_eq!(whole, bytes[first * placement.packet()..len], "{len} from {first}");
            }
        }
    }
}
