//! What is sent at once: packets of equal size to one destination.

use std::net::{IpAddr, Ipv4Addr};

use bowline_verbs::Mtu;
use bowline_wire::roce::{BTH_LEN, ICRC_LEN, IcrcHeads, Outer, RETH_LEN};

/// Most packets of a burst.
pub const BURST_SEGMENTS_MAX: usize = 64;
/// Most bytes of a burst; what one call to the system can take is little more [ICRC-22].
pub const BURST_BYTES_MAX: usize = 65_000;

/// Packets of equal size, but for the last, which may be shorter, to port 4791 of one address. The
/// ICRC of packet k is right for IPv4 identification k [ICRC-21]: the driver sends all of it with
/// one call, from exactly this address and port [ICRC-20].
#[derive(Debug)]
pub struct Burst {
    /// Own address.
    pub from: IpAddr,
    /// Own port [OUT-2].
    pub source_port: u16,
    /// The peer's address.
    pub to: IpAddr,
    /// Type of service or traffic class.
    pub tos: u8,
    /// Bytes of each packet but the last.
    pub segment: usize,
    /// Packets.
    pub count: usize,
    /// The packets, each from its first header to its ICRC.
    pub bytes: Vec<u8>,
    heads: IcrcHeads,
}

impl Default for Burst {
    fn default() -> Self {
        Self::new()
    }
}

impl Burst {
    /// Makes an empty one, to be filled by [`Device::poll_transmit`](crate::Device::poll_transmit)
    /// again and again.
    pub fn new() -> Self {
        let nowhere = IpAddr::V4(Ipv4Addr::UNSPECIFIED);
        Self {
            from: nowhere,
            source_port: 0,
            to: nowhere,
            tos: 0,
            segment: 0,
            count: 0,
            bytes: Vec::with_capacity(BURST_BYTES_MAX + 4200),
            heads: IcrcHeads::new(),
        }
    }

    /// The packets, as the payloads of datagrams.
    pub fn segments(&self) -> impl Iterator<Item = &[u8]> {
        self.bytes.chunks(self.segment.max(1))
    }

    pub(crate) fn begin(&mut self, route: &Route) {
        let Route { from, to, source_port, tos } = *route;
        (self.from, self.to, self.source_port, self.tos) = (from, to, source_port, tos);
        self.segment = 0;
        self.count = 0;
        self.bytes.clear();
    }

    /// Returns over how many bytes ICRCs were computed since this was last asked.
    pub(crate) fn take_summed(&mut self) -> u64 {
        self.heads.take_summed()
    }

    /// Tells whether another packet may be added.
    pub(crate) fn has_room(&self, gso: bool) -> bool {
        self.has_room_for(gso, self.segment)
    }

    /// Tells whether a packet of this many bytes may be added.
    pub(crate) fn has_room_for(&self, gso: bool, len: usize) -> bool {
        let most = if gso { BURST_SEGMENTS_MAX } else { 1 };
        let whole = self.bytes.len() == self.segment * self.count;
        self.count < most
            && whole
            && len <= self.segment
            && self.bytes.len() + len <= BURST_BYTES_MAX
    }

    /// Takes in the packet that begins at `start` of the bytes, and adds its ICRC. If it is longer
    /// than those before, it is taken away and moved to `rest`, for the next burst.
    pub(crate) fn add(&mut self, start: usize, rest: &mut Vec<u8>) -> bool {
        let len = self.bytes.len() - start + ICRC_LEN;
        if self.count == 0 {
            self.segment = len;
        } else if len > self.segment || start + len > BURST_BYTES_MAX {
            rest.clear();
            rest.extend_from_slice(&self.bytes[start..]);
            self.bytes.truncate(start);
            return false;
        }
        let outer = Outer { from: self.from, to: self.to, source_port: self.source_port };
        let packet = self.bytes.get(start..).unwrap_or_default();
        let icrc = self.heads.icrc(&outer, self.count as u16, packet);
        self.bytes.extend_from_slice(&icrc.to_le_bytes());
        self.count += 1;
        true
    }
}

/// Bytes of data of WRITEs of one packet each that a burst holds at a path MTU.
pub const fn burst_payload(mtu: Mtu) -> usize {
    let packet = BTH_LEN + RETH_LEN + mtu.bytes() + ICRC_LEN;
    let fit = BURST_BYTES_MAX / packet;
    let count = if fit < BURST_SEGMENTS_MAX { fit } else { BURST_SEGMENTS_MAX };
    count * mtu.bytes()
}

/// Where the packets of a queue pair go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Route {
    pub(crate) from: IpAddr,
    pub(crate) to: IpAddr,
    pub(crate) source_port: u16,
    pub(crate) tos: u8,
}

/// Source port of a connected queue pair [OUT-2].
pub(crate) fn source_port(flow_label: u32, local_qpn: u32, remote_qpn: u32) -> u16 {
    let mut label = flow_label & 0xf_ffff;
    if label == 0 {
        let mut product = u64::from(local_qpn) * u64::from(remote_qpn);
        product ^= product >> 20;
        product ^= product >> 40;
        label = product as u32 & 0xf_ffff;
    }
    0xc000 | ((label & 0x3fff) ^ (label >> 14)) as u16
}

/// Source port of a queue pair without a connection [OUT-2].
pub(crate) const fn unconnected_source_port(qpn: u32) -> u16 {
    0xc000 + (qpn.wrapping_mul(0x61c8_8647) >> 18) as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    /// [OUT-2].
    #[test]
    fn source_ports_are_those_of_the_captures() {
        assert_eq!(source_port(0xc165b, 1, 2), 54891);
        assert_eq!(source_port(0x69eae, 1, 2), 57012);
        assert_eq!(unconnected_source_port(1), 55410);
        assert!(source_port(0, 0x12_3456, 0xff_fffe) >= 0xc000);
    }

    /// [ICRC-22].
    #[test]
    fn a_burst_has_packets_of_one_size() {
        let local = IpAddr::V4(Ipv4Addr::LOCALHOST);
        let mut burst = Burst::new();
        let mut rest = Vec::new();
        burst.begin(&Route { from: local, to: local, source_port: 50_000, tos: 0 });
        for len in [100, 100, 104] {
            let start = burst.bytes.len();
            burst.bytes.resize(start + len, 1);
            assert_eq!(burst.add(start, &mut rest), len == 100);
        }
        assert_eq!((rest.len(), burst.count, burst.bytes.len()), (104, 2, 208));
        assert!(burst.has_room(true));
        burst.bytes.resize(208 + 60, 2);
        assert!(burst.add(208, &mut rest));
        assert!(!burst.has_room(true));
        assert_eq!(burst.segments().map(<[u8]>::len).collect::<Vec<_>>(), [104, 104, 64]);
    }
}
