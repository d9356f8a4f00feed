//! Outgoing management datagrams (MADs) of queue pair 1 [GSI-1].

use std::collections::VecDeque;
use std::net::IpAddr;

use bowline_verbs::{Qpn, UdDest};
use bowline_wire::roce::{GSI_QKEY, GSI_QPN, MAD_LEN, Packet, Psn};

use super::Device;
use crate::burst::{Burst, Route, unconnected_source_port};
use crate::ud::Datagram;

/// Most MADs queued. Beyond that a MAD is dropped; the timer of its sender resends it.
const WAITING_MAX: usize = 4096;

/// Management datagrams to be sent.
#[derive(Debug, Default)]
pub(super) struct Gsi {
    waiting: VecDeque<(IpAddr, IpAddr, Box<[u8; MAD_LEN]>)>,
    next: Psn,
}

impl Gsi {
    /// Datagrams that wait to be sent.
    pub(super) fn waiting(&self) -> usize {
        self.waiting.len()
    }
}

impl Device {
    /// Queues a management datagram for queue pair 1 of an address.
    pub(super) fn send_mad(&mut self, from: IpAddr, to: IpAddr, mad: Box<[u8; MAD_LEN]>) {
        if self.gsi.waiting.len() >= WAITING_MAX {
            self.shared.counters.drop_mad += 1;
            return;
        }
        self.gsi.waiting.push_back((from, to, mad));
    }

    /// Fills a burst with the next management datagram.
    pub(super) fn fill_mad(&mut self, burst: &mut Burst) -> bool {
        let Some((from, to, mad)) = self.gsi.waiting.pop_front() else { return false };
        // OUT-2
        let source_port =
            self.shared.config.source_port.unwrap_or_else(|| unconnected_source_port(GSI_QPN));
        burst.begin(&Route { from, to, source_port, tos: 0 });
        let datagram = Datagram {
            dest: UdDest { addr: to, from: Some(from), qpn: Qpn(GSI_QPN), qkey: GSI_QKEY },
            source: Qpn(GSI_QPN),
            psn: self.gsi.next,
            imm: None,
            solicited: false,
            ack_req: true,
        };
        self.gsi.next = self.gsi.next.next();
        Packet { payload: &mad[..], ..datagram.packet() }.emit(&mut burst.bytes);
        self.shared.counters.tx_mads += 1;
        burst.add(0, &mut self.carry)
    }
}
