//! Bursts: packets of equal size to one destination, sent with one system call (UDP GSO).

use std::net::{IpAddr, Ipv4Addr};

use bowline_verbs::{Buffer, Mtu};
use bowline_wire::roce::{BTH_LEN, ICRC_LEN, IcrcHeads, Outer, Packet, RETH_LEN, pad};

/// Most packets of a burst.
pub const BURST_SEGMENTS_MAX: usize = 64;
/// Most bytes of a burst; one system call can send little more [ICRC-22].
pub const BURST_BYTES_MAX: usize = 65_000;

/// Shortest payload, in bytes, whose ICRC is computed while it is copied. For shorter payloads the
/// separate pass over the headers costs more than it saves (10 ns).
const SUMMED_FROM: usize = 1280;

/// Packets of equal size, except that the last may be shorter, to port 4791 of one address. The
/// ICRC of packet k is correct for IPv4 identification k [ICRC-21]: the driver must send the whole
/// burst with one call, from exactly this address and port [ICRC-20].
#[derive(Debug)]
pub struct Burst {
    /// Local address.
    pub from: IpAddr,
    /// Local port [OUT-2].
    pub source_port: u16,
    /// The peer's address.
    pub to: IpAddr,
    /// Type of service or traffic class.
    pub tos: u8,
    /// Bytes of each packet except the last.
    pub segment: usize,
    /// Number of packets.
    pub count: usize,
    /// The packets, each from its first header to its ICRC.
    pub bytes: Vec<u8>,
    heads: IcrcHeads,
    /// CRC state of the packet being built.
    sum: Option<Sum>,
    /// Bytes summed here since the last `take_summed`.
    summed: u64,
}

/// CRC over the beginning of a packet.
#[derive(Clone, Copy, Debug)]
struct Sum {
    crc: u32,
    /// Offset in the burst of the first byte that is not summed yet.
    end: usize,
}

impl Default for Burst {
    fn default() -> Self {
        Self::new()
    }
}

impl Burst {
    /// Makes an empty burst, to be filled repeatedly by
    /// [`Device::poll_transmit`](crate::Device::poll_transmit).
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
            sum: None,
            summed: 0,
        }
    }

    /// Returns the packets, which are the payloads of datagrams.
    pub fn segments(&self) -> impl Iterator<Item = &[u8]> {
        self.bytes.chunks(self.segment.max(1))
    }

    pub(crate) fn begin(&mut self, route: &Route) {
        let Route { from, to, source_port, tos } = *route;
        (self.from, self.to, self.source_port, self.tos) = (from, to, source_port, tos);
        self.segment = 0;
        self.count = 0;
        self.bytes.clear();
        self.sum = None;
    }

    /// Returns the number of bytes over which ICRCs were computed since the last call.
    pub(crate) fn take_summed(&mut self) -> u64 {
        self.heads.take_summed() + std::mem::take(&mut self.summed)
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

    /// How many packets of this many bytes, ICRC included, may be added.
    pub(crate) fn room(&self, gso: bool, len: usize) -> usize {
        if self.count > 0 && (len != self.segment || !self.has_room(gso)) {
            return 0;
        }
        let most = if gso { BURST_SEGMENTS_MAX } else { 1 };
        (most - self.count).min((BURST_BYTES_MAX - self.bytes.len()) / len)
    }

    /// Appends a packet without its ICRC: headers, `len` bytes of payload, which `fill` appends,
    /// and the pad. Returns `false` if `fill` does; the burst is unchanged then.
    pub(crate) fn push(
        &mut self,
        packet: &Packet<'_>,
        len: usize,
        fill: impl FnOnce(&mut Self) -> bool,
    ) -> bool {
        let start = self.bytes.len();
        packet.emit_headers(&mut self.bytes, len);
        let body = self.bytes.len();
        let whole = body - start + len + pad(len);
        // A packet that is moved to the next burst gets another ICRC there.
        self.sum = if len >= SUMMED_FROM && self.takes(start, whole + ICRC_LEN) {
            let (outer, ident) = (self.outer(), self.count as u16);
            let crc = self.heads.begin(&outer, ident, &self.bytes[start..], whole);
            Some(Sum { crc, end: body })
        } else {
            None
        };
        let filled = fill(self);
        if filled {
            debug_assert_eq!(self.bytes.len(), body + len, "the payload is as long as was said");
            self.bytes.resize(start + whole, 0);
        } else {
            self.bytes.truncate(start);
            self.sum = None;
        }
        filled
    }

    /// Appends payload from registered memory.
    pub(crate) fn append(&mut self, buffer: &Buffer, offset: usize, len: usize) {
        match &mut self.sum {
            Some(sum) if sum.end == self.bytes.len() => {
                sum.crc = buffer.append_summed(offset, len, &mut self.bytes, sum.crc);
                sum.end += len;
                self.summed += len as u64;
            }
            _ => buffer.append_to(offset, len, &mut self.bytes),
        }
    }

    /// Accepts the packet that begins at offset `start`, and appends its ICRC. A packet longer than
    /// the earlier ones is moved to `rest`, for the next burst.
    pub(crate) fn add(&mut self, start: usize, rest: &mut Vec<u8>) -> bool {
        let len = self.bytes.len() - start + ICRC_LEN;
        if !self.takes(start, len) {
            rest.clear();
            rest.extend_from_slice(&self.bytes[start..]);
            self.bytes.truncate(start);
            return false;
        }
        self.seal(start);
        true
    }

    /// Accepts a packet that is known to fit into this burst.
    pub(crate) fn seal(&mut self, start: usize) {
        if self.count == 0 {
            self.segment = self.bytes.len() - start + ICRC_LEN;
        }
        let icrc = match self.sum.take() {
            Some(Sum { crc, end }) => {
                let left = &self.bytes[end..];
                self.summed += left.len() as u64;
                bowline_crc::update(crc, left)
            }
            None => {
                let (outer, ident) = (self.outer(), self.count as u16);
                self.heads.icrc(&outer, ident, &self.bytes[start..])
            }
        };
        self.bytes.extend_from_slice(&icrc.to_le_bytes());
        self.count += 1;
    }

    /// Tells whether a packet of `len` bytes, ICRC included, that begins at offset `start` fits
    /// into this burst.
    const fn takes(&self, start: usize, len: usize) -> bool {
        self.count == 0 || len <= self.segment && start + len <= BURST_BYTES_MAX
    }

    const fn outer(&self) -> Outer {
        Outer { from: self.from, to: self.to, source_port: self.source_port }
    }
}

/// Returns the payload bytes of a full burst of one-packet WRITEs at a path MTU.
pub const fn burst_payload(mtu: Mtu) -> usize {
    let packet = BTH_LEN + RETH_LEN + mtu.bytes() + ICRC_LEN;
    let fit = BURST_BYTES_MAX / packet;
    let count = if fit < BURST_SEGMENTS_MAX { fit } else { BURST_SEGMENTS_MAX };
    count * mtu.bytes()
}

/// Addresses, port and type of service of a queue pair's packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Route {
    pub(crate) from: IpAddr,
    pub(crate) to: IpAddr,
    pub(crate) source_port: u16,
    pub(crate) tos: u8,
}

/// Returns the source port of a connected queue pair [OUT-2].
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

/// Returns the source port of a queue pair without a connection [OUT-2].
pub(crate) const fn unconnected_source_port(qpn: u32) -> u16 {
    0xc000 + (qpn.wrapping_mul(0x61c8_8647) >> 18) as u16
}

#[cfg(test)]
mod tests {
    use bowline_wire::roce::{Bth, Opcode, split_icrc};

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

    /// [ICRC-21]: whether a payload is summed while it is copied or not, and out of one piece or
    /// many.
    #[test]
    fn every_packet_has_its_icrc_and_each_byte_is_summed_once() {
        let local = IpAddr::V4(Ipv4Addr::LOCALHOST);
        let buffer = Buffer::new(10_000).unwrap();
        buffer.write(0, &(0..10_000).map(|i| ((i * i) >> 7) as u8).collect::<Vec<_>>());
        let packet = Packet::new(Opcode::WriteOnly, Bth { dest_qpn: 7, ..Bth::default() });
        let (mut burst, mut rest) = (Burst::new(), Vec::new());
        burst.begin(&Route { from: local, to: local, source_port: 50_000, tos: 0 });
        let push = |burst: &mut Burst, len: usize, cuts: &[usize]| {
            burst.push(&packet, len, |out| {
                let mut at = 3;
                for piece in cuts.iter().copied().chain([len - cuts.iter().sum::<usize>()]) {
                    out.append(&buffer, at, piece);
                    at += piece;
                }
                true
            })
        };
        for (len, cuts) in [
            (4096, &[][..]),
            (SUMMED_FROM, &[]),
            (SUMMED_FROM - 1, &[7]),
            (4095, &[0, 1, 2000]),
            (1001, &[1000]),
            (0, &[]),
        ] {
            let start = burst.bytes.len();
            assert!(push(&mut burst, len, cuts) && burst.add(start, &mut rest));
            let (covered, icrc) = split_icrc(&burst.bytes[start..]).unwrap();
            assert_eq!(icrc, burst.outer().icrc(burst.count as u16 - 1, covered), "{len} bytes");
            let read = Packet::parse(covered).unwrap();
            let mut expected = vec![0; len];
            buffer.read(3, &mut expected);
            assert!(read.payload == expected, "{len} bytes");
        }
        assert_eq!(burst.take_summed(), (burst.bytes.len() - 6 * ICRC_LEN) as u64);
        // A packet that cannot be filled leaves nothing behind.
        let before = burst.bytes.clone();
        let half = |out: &mut Burst| {
            out.append(&buffer, 0, 1000);
            false
        };
        assert!(!burst.push(&packet, 2000, half));
        assert_eq!(burst.bytes, before);
        packet.emit(&mut burst.bytes);
        assert!(burst.add(before.len(), &mut rest));
        let (covered, icrc) = split_icrc(&burst.bytes[before.len()..]).unwrap();
        assert_eq!(icrc, burst.outer().icrc(6, covered));
        // A packet that is too long is not summed before it is in its burst.
        burst.segment = 1000;
        burst.take_summed();
        let start = burst.bytes.len();
        assert!(push(&mut burst, 1000, &[]) && !burst.add(start, &mut rest));
        assert_eq!((burst.take_summed(), rest.len(), burst.bytes.len()), (0, 1028, start));
    }
}
