//! The base transport header and the headers that may follow it [HDR-1] [HDR-2].
//!
//! ```text
//!       0        1        2        3
//!    +--------+--------+--------+--------+
//!  0 | opcode |SM|pp|tv|      P_Key      |   S solicited, M MigReq, pp pad count, tv version
//!  4 |F B .   |  destination queue pair  |   F FECN, B BECN
//!  8 |A .     | packet sequence number   |   A acknowledgement wanted
//!    +--------+--------+--------+--------+
//! ```
//! Every value has an encoding, and every bit pattern of the right length is a value. Fields of 24
//! bits are `u32`; the upper bits are cut off when written. Reserved bits are written as zero and
//! ignored when read [HDR-13].

use alloc::vec::Vec;

use super::opcode::Opcode;
use super::psn::Psn;

/// Length of the base transport header.
pub const BTH_LEN: usize = 12;
/// Length of the RDMA header.
pub const RETH_LEN: usize = 16;
/// Length of the acknowledge header.
pub const AETH_LEN: usize = 4;
/// Length of the header of an atomic request.
pub const ATOMIC_ETH_LEN: usize = 28;
/// Length of the header of an atomic answer.
pub const ATOMIC_ACK_ETH_LEN: usize = 8;
/// Length of an immediate.
pub const IMM_LEN: usize = 4;
/// Length of the header with a key to invalidate.
pub const IETH_LEN: usize = 4;
/// Length of the datagram header.
pub const DETH_LEN: usize = 8;
/// Length of the flush header.
pub const FETH_LEN: usize = 4;
/// Reserved bytes behind the base transport header of a congestion notification [HDR-14].
pub const CNP_RESERVED_LEN: usize = 16;
/// Length of the base transport header and the longest headers behind it: an atomic request
/// [HDR-10].
pub const MAX_HEADER_LEN: usize = BTH_LEN + ATOMIC_ETH_LEN;

/// The default partition key; the only one this stack sends [RX-7].
pub const DEFAULT_PKEY: u16 = 0xffff;

/// The fields of the base transport header that do not follow from the rest of the packet.
///
/// Opcode and pad count belong to [`Packet`](super::Packet); the version and MigReq are sent as 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Bth {
    /// Solicited event: wakes a receiver that waits for solicited completions.
    pub solicited: bool,
    /// Partition key.
    pub pkey: u16,
    /// FECN: a switch saw congestion. FECN and BECN are not covered by the ICRC.
    pub fecn: bool,
    /// BECN: the other end saw congestion [HDR-14].
    pub becn: bool,
    /// Destination queue pair, 24 bits.
    pub dest_qpn: u32,
    /// AckReq: the sender requests an acknowledgement [REQ-8].
    pub ack_req: bool,
    /// Packet sequence number.
    pub psn: Psn,
}

impl Default for Bth {
    fn default() -> Self {
        Self {
            solicited: false,
            pkey: DEFAULT_PKEY,
            fecn: false,
            becn: false,
            dest_qpn: 0,
            ack_req: false,
            psn: Psn::ZERO,
        }
    }
}

impl Bth {
    /// Parses the header, except opcode, pad count and version.
    #[inline]
    pub fn from_bytes(b: &[u8; BTH_LEN]) -> Self {
        let [_, bits, k0, k1, ecn, q0, q1, q2, ack, p0, p1, p2] = *b;
        Self {
            solicited: bits & 0x80 != 0,
            pkey: u16::from_be_bytes([k0, k1]),
            fecn: ecn & 0x80 != 0,
            becn: ecn & 0x40 != 0,
            dest_qpn: u32::from_be_bytes([0, q0, q1, q2]),
            ack_req: ack & 0x80 != 0,
            psn: Psn::new(u32::from_be_bytes([0, p0, p1, p2])),
        }
    }

    /// Encodes the header; `pad` is the pad count, 0 to 3.
    #[inline]
    pub fn to_bytes(self, opcode: Opcode, pad: u8) -> [u8; BTH_LEN] {
        let [k0, k1] = self.pkey.to_be_bytes();
        let [_, q0, q1, q2] = self.dest_qpn.to_be_bytes();
        let [_, p0, p1, p2] = self.psn.get().to_be_bytes();
        let bits = u8::from(self.solicited) << 7 | (pad & 3) << 4;
        let ecn = u8::from(self.fecn) << 7 | u8::from(self.becn) << 6;
        let ack = u8::from(self.ack_req) << 7;
        [opcode.to_u8(), bits, k0, k1, ecn, q0, q1, q2, ack, p0, p1, p2]
    }
}

/// RDMA extended transport header: destination of a WRITE or source of a READ.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Reth {
    /// Address in the memory of the responder.
    pub va: u64,
    /// Key of that memory.
    pub rkey: u32,
    /// Length of the whole message in bytes; the responder refuses more than 2^31 [HDR-12].
    pub len: u32,
}

impl Reth {
    /// Reads the header.
    #[inline]
    pub fn from_bytes(b: &[u8; RETH_LEN]) -> Self {
        let [v0, v1, v2, v3, v4, v5, v6, v7, k0, k1, k2, k3, l0, l1, l2, l3] = *b;
        Self {
            va: u64::from_be_bytes([v0, v1, v2, v3, v4, v5, v6, v7]),
            rkey: u32::from_be_bytes([k0, k1, k2, k3]),
            len: u32::from_be_bytes([l0, l1, l2, l3]),
        }
    }

    /// Appends the header.
    #[inline]
    pub fn emit(self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.va.to_be_bytes());
        out.extend_from_slice(&self.rkey.to_be_bytes());
        out.extend_from_slice(&self.len.to_be_bytes());
    }
}

/// Reason of a NAK: the low five bits of its syndrome [REQ-10].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum NakCode {
    /// 0x60: packets before this one are missing.
    PsnSequence,
    /// 0x61: the queue pair does not accept the request.
    InvalidRequest,
    /// 0x62: the key does not grant the access.
    RemoteAccess,
    /// 0x63: the responder failed.
    RemoteOperational,
    /// 0x64: for reliable datagrams; has no meaning here.
    InvalidRdRequest,
    /// Any other code, 0x05 to 0x1f.
    Other(u8),
}

impl NakCode {
    const fn from_bits(bits: u8) -> Self {
        match bits & 0x1f {
            0 => Self::PsnSequence,
            1 => Self::InvalidRequest,
            2 => Self::RemoteAccess,
            3 => Self::RemoteOperational,
            4 => Self::InvalidRdRequest,
            code => Self::Other(code),
        }
    }

    const fn bits(self) -> u8 {
        match self {
            Self::PsnSequence => 0,
            Self::InvalidRequest => 1,
            Self::RemoteAccess => 2,
            Self::RemoteOperational => 3,
            Self::InvalidRdRequest => 4,
            Self::Other(code) => code & 0x1f,
        }
    }
}

/// Kind of a response: the first byte of the acknowledge header [REQ-10].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Syndrome {
    /// Positive acknowledgement, with a credit code of five bits; [`Syndrome::ACK`] carries no
    /// credits.
    Ack(u8),
    /// RNR NAK: no receive is posted. Retry later, after a timer code of five bits.
    Rnr(u8),
    /// NAK: the request is refused, or packets are missing.
    Nak(NakCode),
    /// Any other byte: 0x40 to 0x5f and from 0x80 on.
    Reserved(u8),
}

impl Syndrome {
    /// Positive acknowledgement without credits, as this stack sends it [RSP-22].
    pub const ACK: Self = Self::Ack(0x1f);

    /// Report of a gap, between peers that have agreed on it: as many packets as the MSN says, from
    /// the PSN on, are missing, and later ones have arrived. It acknowledges nothing [CC-10].
    pub const GAP: Self = Self::Reserved(0x40);

    /// Decodes the byte on the wire.
    pub const fn from_u8(byte: u8) -> Self {
        match byte >> 5 {
            0 => Self::Ack(byte & 0x1f),
            1 => Self::Rnr(byte & 0x1f),
            3 => Self::Nak(NakCode::from_bits(byte)),
            _ => Self::Reserved(byte),
        }
    }

    /// Returns the byte on the wire; codes are truncated to five bits.
    pub const fn to_u8(self) -> u8 {
        match self {
            Self::Ack(credits) => credits & 0x1f,
            Self::Rnr(timer) => 0x20 | (timer & 0x1f),
            Self::Nak(code) => 0x60 | code.bits(),
            Self::Reserved(byte) => byte,
        }
    }
}

/// Returns the nanoseconds to wait after an RNR NAK, by the low five bits of `code` [RSP-13].
pub const fn rnr_timer_ns(code: u8) -> u64 {
    const MICROSECONDS: [u32; 32] = [
        655_360, 10, 20, 30, 40, 60, 80, 120, 160, 240, 320, 480, 640, 960, 1280, 1920, 2560, 3840,
        5120, 7680, 10_240, 15_360, 20_480, 30_720, 40_960, 61_440, 81_920, 122_880, 163_840,
        245_760, 327_680, 491_520,
    ];
    // A five-bit index is always within 32 entries.
    #[allow(clippy::indexing_slicing)]
    let microseconds = MICROSECONDS[(code & 0x1f) as usize];
    microseconds as u64 * 1000
}

/// Acknowledge header.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Aeth {
    /// Kind of the response.
    pub syndrome: Syndrome,
    /// Message sequence number of the responder, 24 bits; informative.
    pub msn: u32,
}

impl Default for Aeth {
    fn default() -> Self {
        Self { syndrome: Syndrome::ACK, msn: 0 }
    }
}

impl Aeth {
    /// Reads the header.
    #[inline]
    pub fn from_bytes(b: &[u8; AETH_LEN]) -> Self {
        let [syndrome, m0, m1, m2] = *b;
        Self { syndrome: Syndrome::from_u8(syndrome), msn: u32::from_be_bytes([0, m0, m1, m2]) }
    }

    /// Appends the header.
    #[inline]
    pub fn emit(self, out: &mut Vec<u8>) {
        let [_, m0, m1, m2] = self.msn.to_be_bytes();
        out.extend_from_slice(&[self.syndrome.to_u8(), m0, m1, m2]);
    }
}

/// Header of an atomic request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct AtomicEth {
    /// Address in the memory of the responder.
    pub va: u64,
    /// Key of that memory.
    pub rkey: u32,
    /// Value to swap in, or to add.
    pub swap_or_add: u64,
    /// Value to compare with; 0 for fetch and add.
    pub compare: u64,
}

impl AtomicEth {
    /// Reads the header.
    #[inline]
    pub fn from_bytes(b: &[u8; ATOMIC_ETH_LEN]) -> Self {
        #[rustfmt::skip]
        let [
            v0, v1, v2, v3, v4, v5, v6, v7,
            k0, k1, k2, k3,
            s0, s1, s2, s3, s4, s5, s6, s7,
            c0, c1, c2, c3, c4, c5, c6, c7,
        ] = *b;
        Self {
            va: u64::from_be_bytes([v0, v1, v2, v3, v4, v5, v6, v7]),
            rkey: u32::from_be_bytes([k0, k1, k2, k3]),
            swap_or_add: u64::from_be_bytes([s0, s1, s2, s3, s4, s5, s6, s7]),
            compare: u64::from_be_bytes([c0, c1, c2, c3, c4, c5, c6, c7]),
        }
    }

    /// Appends the header.
    #[inline]
    pub fn emit(self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.va.to_be_bytes());
        out.extend_from_slice(&self.rkey.to_be_bytes());
        out.extend_from_slice(&self.swap_or_add.to_be_bytes());
        out.extend_from_slice(&self.compare.to_be_bytes());
    }
}

/// Header of an atomic answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct AtomicAckEth {
    /// The value before the operation.
    pub original: u64,
}

impl AtomicAckEth {
    /// Reads the header.
    #[inline]
    pub fn from_bytes(b: &[u8; ATOMIC_ACK_ETH_LEN]) -> Self {
        Self { original: u64::from_be_bytes(*b) }
    }

    /// Appends the header.
    #[inline]
    pub fn emit(self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.original.to_be_bytes());
    }
}

/// Datagram header.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Deth {
    /// Key of the destination queue pair [RX-8].
    pub qkey: u32,
    /// Sending queue pair, 24 bits.
    pub source_qpn: u32,
}

impl Deth {
    /// Reads the header.
    #[inline]
    pub fn from_bytes(b: &[u8; DETH_LEN]) -> Self {
        let [k0, k1, k2, k3, _, q0, q1, q2] = *b;
        Self {
            qkey: u32::from_be_bytes([k0, k1, k2, k3]),
            source_qpn: u32::from_be_bytes([0, q0, q1, q2]),
        }
    }

    /// Appends the header.
    #[inline]
    pub fn emit(self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.qkey.to_be_bytes());
        let [_, q0, q1, q2] = self.source_qpn.to_be_bytes();
        out.extend_from_slice(&[0, q0, q1, q2]);
    }
}
