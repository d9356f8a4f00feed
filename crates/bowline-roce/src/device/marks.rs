//! Congestion marks: data with a mark is answered by a notification (CNP), and a notification makes
//! the sender slower [CC-6], [CC-7], [HDR-14].

use std::net::{IpAddr, SocketAddr};

use bowline_base::Instant;
use bowline_verbs::{QpState, Qpn};
use bowline_wire::roce::{Bth, Opcode, Outer, Packet, split_icrc};

use super::rx::check_icrc;
use super::{Device, IdentHint};
use crate::burst::Burst;
use crate::qp::{Halves, Qp};

/// The ECN bits of a type of service.
const ECN: u8 = 0b11;
/// Congestion experienced, in these bits.
const CE: u8 = 0b11;
/// Marks can be carried, ECT(0), in these bits [CC-5].
pub(super) const ECT: u8 = 0b10;
/// Most notifications that wait to be sent.
const CNPS_MAX: usize = 64;

impl Device {
    /// Notes the type of service with which a datagram arrived, or several of one sender. To be
    /// called, with one of them, before they are handled.
    pub fn note_tos(
        &mut self,
        now: Instant,
        from: SocketAddr,
        to: IpAddr,
        tos: u8,
        datagram: &[u8],
    ) {
        if tos & ECN != CE {
            return;
        }
        let packet = split_icrc(datagram).and_then(|(bytes, _)| Packet::parse(bytes).ok());
        if let Some(packet) = packet.filter(|packet| packet.opcode != Opcode::Cnp) {
            self.note_mark(now, from.ip(), to, Qpn(packet.bth.dest_qpn));
        }
    }

    /// The same for datagrams that are probably for this queue pair.
    pub(super) fn note_tos_of(
        &mut self,
        now: Instant,
        from: SocketAddr,
        to: IpAddr,
        tos: u8,
        qpn: Qpn,
    ) {
        if tos & ECN == CE {
            self.note_mark(now, from.ip(), to, qpn);
        }
    }

    /// Lets a notification be sent to the sender of a marked datagram, seldom enough [CC-6].
    #[cold]
    fn note_mark(&mut self, now: Instant, from: IpAddr, to: IpAddr, qpn: Qpn) {
        self.shared.counters.rx_marked += 1;
        let Some(qp) = self.qps.get(&qpn.0) else { return };
        let is_peer = is_peer(qp, from.to_canonical(), to.to_canonical());
        let is_peer = is_peer && self.cnps.len() < CNPS_MAX;
        if is_peer && self.shared.paths.get_mut(qp.path).may_notify(now) {
            self.cnps.push_back(qp.qpn);
        }
    }

    /// Fills a burst with the next notification.
    pub(super) fn fill_cnp(&mut self, burst: &mut Burst) -> bool {
        while let Some(Qpn(qpn)) = self.cnps.pop_front() {
            let Some(qp) = self.qps.get(&qpn).filter(|qp| qp.state != QpState::Err) else {
                continue;
            };
            let (Some(route), Some(dest)) = (qp.route(&self.shared.config), qp.attr.dest_qpn)
            else {
                continue;
            };
            burst.begin(&route);
            let bth = Bth { dest_qpn: dest.0, becn: true, ..Bth::default() };
            Packet::new(Opcode::Cnp, bth).emit(&mut burst.bytes);
            burst.seal(0);
            self.shared.counters.tx_cnp += 1;
            return true;
        }
        false
    }

    /// Takes a notification: the path of its queue pair is congested.
    pub(super) fn handle_cnp(
        &mut self,
        now: Instant,
        outer: &Outer,
        ident: IdentHint,
        packet: &Packet<'_>,
        sealed: (&[u8], u32),
    ) {
        let Some(qp) = self.qps.get(&packet.bth.dest_qpn) else { return };
        if !is_peer(qp, outer.from, outer.to) {
            return;
        }
        let path = qp.path;
        let counters = &mut self.shared.counters;
        if check_icrc(&mut self.icrc, counters, outer, ident, sealed).is_some() {
            self.shared.paths.get_mut(path).marked(now);
        }
    }
}

/// Tells whether a connected queue pair talks with this peer.
fn is_peer(qp: &Qp, from: IpAddr, to: IpAddr) -> bool {
    matches!(qp.halves, Halves::Rc { .. })
        && qp.state >= QpState::Rtr
        && qp.state != QpState::Err
        && qp.attr.av.is_some_and(|av| av.remote == from && av.local == to)
}
