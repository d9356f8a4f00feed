//! Packets whose payloads are received where they belong.
//!
//! Of a long message, a WRITE of the peer or an answer to a READ, it is known where the bytes of
//! the next packets belong. The driver has the system put them there, which saves copying them, and
//! tells what has come. If it is that, in order and with right ICRCs, the packets are done. All
//! else is made whole again from its pieces and taken in as ever, and what it has left in the
//! message's memory is made zero: no peer is shown what another has sent [RX-13]. That memory means
//! nothing before the message has come to its end.

use std::net::{IpAddr, SocketAddr};

use bowline_base::Instant;
use bowline_verbs::{Piece, QpState, Qpn};
use bowline_wire::roce::{BTH_LEN, DEFAULT_PKEY, ICRC_LEN, IcrcMatch, Opcode, Outer, Packet, Psn};

use super::rx::refusal;
use super::{Device, IdentHint};
use crate::qp::Halves;
use crate::rc::requester::Outcome;

/// Most packets that land at once: the system merges no more.
pub const LANDING_PACKETS_MAX: usize = 64;

/// Bytes of the longest datagram, which is also the most that the system merges.
const DATAGRAM_MAX: usize = 65_535;

/// Bytes before the first payload, and the first of those that lie aside.
pub const LANDING_HEAD: usize = BTH_LEN;

/// Bytes between two payloads: an ICRC and a header.
pub const LANDING_GAP: usize = ICRC_LEN + BTH_LEN;

/// When no more packets of a message are to come, it does not pay.
const LANDS_FROM: usize = 4;

/// Packets of so much payload that may come merged. More places than that would be told in vain.
fn landing_packets(payload: usize) -> usize {
    (DATAGRAM_MAX / (payload + LANDING_GAP)).min(LANDING_PACKETS_MAX)
}

/// Where the payloads of the packets that come next belong. All other bytes are received aside, one
/// after the other:
///
/// ```text
///  received | header | payload 0 | ICRC, header | payload 1 | ICRC, header | .. | ICRC | rest
///  aside    | header |           | ICRC, header |           | ICRC, header | .. | ICRC | rest
///  place             | payload 0 |              | payload 1 |              | ..
/// ```
#[derive(Clone, Debug)]
pub struct Landing {
    /// The payloads' place, one behind the other.
    pub place: Piece,
    /// Bytes of each.
    pub payload: usize,
    qpn: Qpn,
    opcode: Opcode,
    psn: Psn,
}

impl Landing {
    /// How many payloads there is a place for.
    pub fn packets(&self) -> usize {
        self.place.len / self.payload
    }

    /// Bytes of a packet.
    const fn packet(&self) -> usize {
        self.payload + LANDING_GAP
    }

    /// How many of the first `len` bytes received are at the place.
    pub fn landed(&self, len: usize) -> usize {
        let whole = (len / self.packet()).min(self.packets());
        let behind = len - whole * self.packet();
        let part = if whole < self.packets() { behind.saturating_sub(LANDING_HEAD) } else { 0 };
        whole * self.payload + part.min(self.payload)
    }

    /// Puts bytes received where a driver has the system put them: for who has no system.
    pub fn scatter(&self, bytes: &[u8], aside: &mut Vec<u8>) {
        let mut rest = bytes;
        for k in 0..self.packets() {
            let gap = if k == 0 { LANDING_HEAD } else { LANDING_GAP };
            let (head, behind) = rest.split_at(gap.min(rest.len()));
            let (payload, behind) = behind.split_at(self.payload.min(behind.len()));
            aside.extend_from_slice(head);
            self.place.buffer.write(self.place.offset + k * self.payload, payload);
            rest = behind;
        }
        aside.extend_from_slice(rest);
    }

    /// Puts together what was received, `len` bytes in all, from packet `first` on.
    fn restore(&self, len: usize, first: usize, aside: &[u8], out: &mut Vec<u8>) {
        let mut at = first * LANDING_GAP;
        let landed = self.landed(len);
        let end = aside.len().min(len - landed);
        for offset in (first * self.payload..landed).step_by(self.payload) {
            let before = if offset == first * self.payload { LANDING_HEAD } else { LANDING_GAP };
            out.extend_from_slice(aside.get(at..at + before).unwrap_or_default());
            at += before;
            let part = self.payload.min(landed - offset);
            self.place.buffer.append_to(self.place.offset + offset, part, out);
        }
        out.extend_from_slice(aside.get(at..end).unwrap_or_default());
    }
}

/// What was received: one datagram, or several of one sender merged.
#[derive(Clone, Copy, Debug)]
pub struct Run<'a> {
    /// Who sent it; `None`: that is not known, and nobody is given it.
    pub from: Option<SocketAddr>,
    /// The own address it came to.
    pub to: IpAddr,
    /// Bytes of each datagram but the last, if they are known to be of one burst of the peer's.
    pub segment: Option<usize>,
    /// Bytes in all.
    pub len: usize,
    /// Those that lie aside, and perhaps others behind them.
    pub aside: &'a [u8],
}

/// What became of [`Device::land`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Landed {
    /// No place is known. Nothing was received.
    NoPlace,
    /// Nothing was received.
    Nothing,
    /// So many packets are at their place, and all else that was received was taken in as ever.
    Packets(usize),
}

/// A message of which much more is to come, where the packet that was taken in last was one of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Amid {
    qpn: Qpn,
    opcode: Opcode,
    /// Bytes of payload of each packet that is to come, but for the last.
    pub payload: usize,
}

impl Device {
    /// The message that the last packet was of, acknowledgements left aside, if it may
    /// [`land`](Self::land).
    pub fn amid(&self) -> Option<Amid> {
        let (qpn, opcode) = self.last?;
        let qp = self.qps.get(&qpn.0).filter(|qp| qp.state != QpState::Err)?;
        let Halves::Rc { requester, responder } = &qp.halves else { return None };
        let (left, opcode) = match opcode {
            Opcode::WriteFirst | Opcode::WriteMiddle => (responder.left(), Opcode::WriteMiddle),
            Opcode::ReadResponseFirst | Opcode::ReadResponseMiddle => {
                (requester.left(), Opcode::ReadResponseMiddle)
            }
            _ => return None,
        };
        let payload = qp.mtu(&self.shared.config);
        (left > LANDS_FROM * payload).then_some(Amid { qpn, opcode, payload })
    }

    /// Has `receive` receive what comes next to where packets come that go on with a message, and
    /// takes it in. `receive` is told where these belong, and is the only one to write there
    /// meanwhile; it returns `None` if it has received nothing.
    pub fn land<'a>(
        &mut self,
        now: Instant,
        amid: Amid,
        receive: impl FnOnce(&Landing) -> Option<Run<'a>>,
    ) -> Landed {
        let Some(landing) = self.landing(now, amid) else { return Landed::NoPlace };
        let Some(run) = receive(&landing) else { return Landed::Nothing };
        let good = self.take_landed(now, &landing, &run);
        if good > 0 && good * landing.packet() == run.len {
            return Landed::Packets(good);
        }
        let mut rest = std::mem::take(&mut self.stray);
        rest.clear();
        landing.restore(run.len, good, run.aside, &mut rest);
        let others = landing.landed(run.len).saturating_sub(good * landing.payload);
        let at = landing.place.offset + good * landing.payload;
        landing.place.buffer.clear(at, others);
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
        self.stray = rest;
        Landed::Packets(good)
    }

    fn landing(&mut self, now: Instant, amid: Amid) -> Option<Landing> {
        let Amid { qpn, opcode, payload } = amid;
        let qp = self.qps.get(&qpn.0)?;
        if qp.state < QpState::Rtr || qp.state == QpState::Err {
            return None;
        }
        let name = self.shared.name(qp);
        if name.mtu() != payload {
            return None; // connected anew
        }
        let most = landing_packets(payload) * payload;
        let Halves::Rc { requester, responder } = &qp.halves else { return None };
        let (psn, mut place) = if opcode == Opcode::WriteMiddle {
            responder.landing(&self.shared.rx(now, name), most)?
        } else {
            requester.landing(&self.shared.tx(now, name), most)?
        };
        if !place.buffer.allows_direct_placement() {
            return None;
        }
        place.len -= place.len % payload;
        (place.len > 0).then_some(Landing { place, payload, qpn, opcode, psn })
    }

    /// Takes the packets that are what was expected, up to the first that is not; returns how many
    /// these are.
    fn take_landed(&mut self, now: Instant, landing: &Landing, run: &Run<'_>) -> usize {
        let Landing { ref place, payload, qpn, opcode, .. } = *landing;
        let to = run.to.to_canonical();
        let known = self.shared.config.addrs.contains(&to); // RX-2
        let alike = run.segment.unwrap_or(run.len) == landing.packet();
        let Some(from) = run.from.filter(|_| known && alike) else { return 0 };
        let outer = Outer { from: from.ip().to_canonical(), to, source_port: from.port() };
        let outer = &outer;
        let whole = (run.len / landing.packet()).min(landing.packets());
        let Some(qp) = self.qps.get_mut(&qpn.0) else { return 0 };
        let name = self.shared.name(qp);
        let mut good = 0;
        let (gaps, _) = run.aside.as_chunks::<LANDING_GAP>();
        for (k, bytes) in gaps.iter().enumerate().take(whole) {
            let [head @ .., i0, i1, i2, i3] = bytes;
            // All that is checked of a packet that comes by itself, in the same order.
            let Ok(packet) = Packet::parse(head) else { break };
            if packet.opcode != opcode
                || packet.bth.dest_qpn != qpn.0
                || packet.bth.psn != landing.psn + k as u32
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
            counters.rx_bytes += landing.packet() as u64;
            counters.rx_landed += 1;
            good += 1;
            let Halves::Rc { requester, responder } = &mut qp.halves else { break };
            if opcode == Opcode::WriteMiddle {
                responder.take_landed(&self.shared.rx(now, name), packet.bth.ack_req);
            } else {
                requester.take_landed(&mut self.shared.tx(now, name));
            }
        }
        if good > 0 {
            self.last = Some((qpn, opcode));
            self.shared.watch_bursts(qp);
            self.shared.after(now, qp, Outcome::Idle, true);
            if !self.shared.overrun.is_empty() {
                self.stop_overrun(now);
            }
            self.cm_data_arrived(now, qpn);
        }
        good
    }
}

impl Run<'_> {
    /// What is known of the identification of its datagrams: a peer like this one has numbered
    /// those of a burst [ICRC-34].
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
    fn what_is_scattered_is_put_together_again() {
        let buffer = Arc::new(Buffer::new(1000).unwrap());
        let place = Piece { buffer, offset: 100, len: 3 * 40 };
        let (opcode, psn) = (Opcode::WriteMiddle, Psn::ZERO);
        let landing = Landing { place, payload: 40, qpn: Qpn(7), opcode, psn };
        let bytes: Vec<u8> = (1..=250).collect();
        for len in 0..=bytes.len() {
            let (mut aside, mut whole) = (Vec::new(), Vec::new());
            landing.scatter(&bytes[..len], &mut aside);
            assert_eq!(aside.len() + landing.landed(len), len);
            for first in 0..=3.min(len / landing.packet()) {
                whole.clear();
                landing.restore(len, first, &aside, &mut whole);
                assert_eq!(whole, bytes[first * landing.packet()..len], "{len} from {first}");
            }
        }
    }
}
