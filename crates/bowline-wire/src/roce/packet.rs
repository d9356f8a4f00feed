//! One packet from the base transport header to the pad: parse and emit.

use alloc::vec::Vec;
use core::fmt;

use super::header::{
    AETH_LEN, ATOMIC_ACK_ETH_LEN, ATOMIC_ETH_LEN, Aeth, AtomicAckEth, AtomicEth, BTH_LEN, Bth,
    CNP_RESERVED_LEN, DETH_LEN, Deth, FETH_LEN, IETH_LEN, IMM_LEN, RETH_LEN, Reth,
};
use super::opcode::{Opcode, PayloadRule};

/// Why a packet is dropped silently before any queue pair handles it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum PacketError {
    /// Fewer bytes than the headers and the announced pad need [RX-3].
    Short {
        /// Bytes needed.
        needed: usize,
        /// Bytes there.
        got: usize,
    },
    /// The opcode is not in the table of opcodes [RX-3].
    UnknownOpcode(u8),
    /// The transport version is not 0 [RX-4].
    Version(u8),
    /// The destination is queue pair 0, which does not exist in RoCE [RX-4].
    NoQueuePair,
    /// Headers, payload and pad are not a multiple of four bytes, so the pad count is wrong
    /// [HDR-3].
    Pad,
    /// The packet has payload although its opcode has none [HDR-5].
    Payload {
        /// The opcode.
        opcode: Opcode,
        /// Bytes there.
        got: usize,
    },
}

impl fmt::Display for PacketError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Short { needed, got } => write!(f, "{needed} bytes needed, {got} there"),
            Self::UnknownOpcode(byte) => write!(f, "unknown opcode {byte:#04x}"),
            Self::Version(version) => write!(f, "transport version {version}"),
            Self::NoQueuePair => f.write_str("destination queue pair 0"),
            Self::Pad => f.write_str("pad count and length do not agree"),
            Self::Payload { opcode, got } => write!(f, "{got} payload bytes in {opcode}"),
        }
    }
}

impl core::error::Error for PacketError {}

/// A packet without its ICRC.
///
/// In a packet from [`Packet::parse`], a header is `Some` exactly if the opcode has it. When a
/// packet is encoded, a header that the opcode has and that is `None` is written as zeroes, and a
/// header that the opcode does not have is left out, so that the result is always well formed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Packet<'a> {
    /// Kind of the packet.
    pub opcode: Opcode,
    /// Base transport header.
    pub bth: Bth,
    /// Datagram header.
    pub deth: Option<Deth>,
    /// Flush header: placement and selectivity, undecoded.
    pub feth: Option<u32>,
    /// RDMA header.
    pub reth: Option<Reth>,
    /// Acknowledge header.
    pub aeth: Option<Aeth>,
    /// Atomic request.
    pub atomic: Option<AtomicEth>,
    /// Atomic answer.
    pub atomic_ack: Option<AtomicAckEth>,
    /// Immediate, its bytes as a big-endian number.
    pub imm: Option<u32>,
    /// Key to invalidate.
    pub ieth: Option<u32>,
    /// Payload without pad.
    pub payload: &'a [u8],
}

impl<'a> Packet<'a> {
    /// Makes a packet without extension headers and without payload.
    pub const fn new(opcode: Opcode, bth: Bth) -> Self {
        Self {
            opcode,
            bth,
            deth: None,
            feth: None,
            reth: None,
            aeth: None,
            atomic: None,
            atomic_ack: None,
            imm: None,
            ieth: None,
            payload: &[],
        }
    }

    /// Returns the remote key in an unchecked packet, if it probably has one. For prefetching.
    pub fn peek_rkey(bytes: &[u8]) -> Option<u32> {
        let (bth, rest) = bytes.split_first_chunk::<BTH_LEN>()?;
        let opcode = Opcode::from_u8(bth[0])?;
        if opcode.has_reth() && !opcode.has_feth() {
            Some(Reth::from_bytes(rest.first_chunk()?).rkey)
        } else if opcode.has_atomic() {
            Some(AtomicEth::from_bytes(rest.first_chunk()?).rkey)
        } else {
            None
        }
    }

    /// Parses a packet; `bytes` go from the base transport header to the pad, without the ICRC.
    ///
    /// Checks that the packet is well formed, independently of its destination [RX-3] [RX-4].
    /// Whether the payload fits the path MTU is for the responder to check and answer [RSP-9]. That
    /// check also finds a pad in a first or middle packet [HDR-3], since such a payload is never as
    /// long as an MTU. The values of the pad bytes are ignored.
    ///
    /// # Errors
    /// [`PacketError`]: drop the packet and count it.
    pub fn parse(bytes: &'a [u8]) -> Result<Self, PacketError> {
        let short = |needed| PacketError::Short { needed, got: bytes.len() };
        let (bth, rest) = bytes.split_first_chunk::<BTH_LEN>().ok_or(short(BTH_LEN))?;
        let [opcode, bits, ..] = *bth;
        let opcode = Opcode::from_u8(opcode).ok_or(PacketError::UnknownOpcode(opcode))?;
        let pad = usize::from(bits >> 4 & 3);
        let needed = BTH_LEN + opcode.header_len() + pad;
        if bytes.len() < needed {
            return Err(short(needed));
        }
        let version = bits & 0x0f;
        if version != 0 {
            return Err(PacketError::Version(version));
        }
        let bth = Bth::from_bytes(bth);
        if bth.dest_qpn == 0 {
            return Err(PacketError::NoQueuePair);
        }
        if !bytes.len().is_multiple_of(4) {
            return Err(PacketError::Pad);
        }

        let mut rest = Headers { rest, needed, got: bytes.len() };
        let mut packet = Self::new(opcode, bth);
        if opcode.has_deth() {
            packet.deth = Some(Deth::from_bytes(rest.take::<DETH_LEN>()?));
        }
        if opcode.has_feth() {
            packet.feth = Some(u32::from_be_bytes(*rest.take::<FETH_LEN>()?));
        }
        if opcode.has_reth() {
            packet.reth = Some(Reth::from_bytes(rest.take::<RETH_LEN>()?));
        }
        if opcode.has_aeth() {
            packet.aeth = Some(Aeth::from_bytes(rest.take::<AETH_LEN>()?));
        }
        if opcode.has_atomic() {
            packet.atomic = Some(AtomicEth::from_bytes(rest.take::<ATOMIC_ETH_LEN>()?));
        }
        if opcode.has_atomic_ack() {
            packet.atomic_ack = Some(AtomicAckEth::from_bytes(rest.take::<ATOMIC_ACK_ETH_LEN>()?));
        }
        if opcode.has_imm() {
            packet.imm = Some(u32::from_be_bytes(*rest.take::<IMM_LEN>()?));
        }
        if opcode.has_ieth() {
            packet.ieth = Some(u32::from_be_bytes(*rest.take::<IETH_LEN>()?));
        }
        if opcode == Opcode::Cnp {
            rest.take::<CNP_RESERVED_LEN>()?;
        }
        let padded = rest.rest;
        let len = padded.len().checked_sub(pad).ok_or(short(needed))?;
        packet.payload = padded.get(..len).ok_or(short(needed))?;
        if opcode.payload_rule() == PayloadRule::Nothing && !padded.is_empty() {
            return Err(PacketError::Payload { opcode, got: padded.len() });
        }
        Ok(packet)
    }

    /// Appends the packet, from the base transport header to the pad; returns the number of bytes.
    pub fn emit(&self, out: &mut Vec<u8>) -> usize {
        let start = out.len();
        self.emit_headers(out, self.payload.len());
        out.extend_from_slice(self.payload);
        out.extend(core::iter::repeat_n(0, pad(self.payload.len())));
        out.len().saturating_sub(start)
    }

    /// Appends the headers for a payload of `payload_len` bytes that the caller copies from
    /// elsewhere. The caller must then append the payload and [`pad`] zeros; `self.payload` is not
    /// used.
    ///
    /// ```
    /// use bowline_wire::roce::{Bth, Opcode, Packet, Psn, pad};
    ///
    /// let bth = Bth { dest_qpn: 0x123, ack_req: true, psn: Psn::new(67), ..Bth::default() };
    /// let mut out = Vec::new();
    /// Packet::new(Opcode::SendOnly, bth).emit_headers(&mut out, 5);
    /// out.extend_from_slice(b"hello");
    /// out.resize(out.len() + pad(5), 0);
    ///
    /// let read = Packet::parse(&out)?;
    /// assert_eq!((read.bth, read.payload), (bth, &b"hello"[..]));
    /// # Ok::<(), bowline_wire::roce::PacketError>(())
    /// ```
    pub fn emit_headers(&self, out: &mut Vec<u8>, payload_len: usize) {
        let opcode = self.opcode;
        out.extend_from_slice(&self.bth.to_bytes(opcode, pad(payload_len) as u8));
        if opcode.has_deth() {
            self.deth.unwrap_or_default().emit(out);
        }
        if opcode.has_feth() {
            out.extend_from_slice(&self.feth.unwrap_or_default().to_be_bytes());
        }
        if opcode.has_reth() {
            self.reth.unwrap_or_default().emit(out);
        }
        if opcode.has_aeth() {
            self.aeth.unwrap_or_default().emit(out);
        }
        if opcode.has_atomic() {
            self.atomic.unwrap_or_default().emit(out);
        }
        if opcode.has_atomic_ack() {
            self.atomic_ack.unwrap_or_default().emit(out);
        }
        if opcode.has_imm() {
            out.extend_from_slice(&self.imm.unwrap_or_default().to_be_bytes());
        }
        if opcode.has_ieth() {
            out.extend_from_slice(&self.ieth.unwrap_or_default().to_be_bytes());
        }
        if opcode == Opcode::Cnp {
            out.extend_from_slice(&[0; CNP_RESERVED_LEN]);
        }
    }
}

/// The unparsed bytes, and the numbers for the error if they are too few.
struct Headers<'a> {
    rest: &'a [u8],
    needed: usize,
    got: usize,
}

impl<'a> Headers<'a> {
    fn take<const N: usize>(&mut self) -> Result<&'a [u8; N], PacketError> {
        let short = PacketError::Short { needed: self.needed, got: self.got };
        let (head, rest) = self.rest.split_first_chunk().ok_or(short)?;
        self.rest = rest;
        Ok(head)
    }
}

/// Returns the length of the pad behind `len` payload bytes: 0 to 3 [HDR-3].
pub const fn pad(len: usize) -> usize {
    len.wrapping_neg() & 3
}

/// One line for logs: opcode, destination, PSN, and the fields that are present.
///
/// ```text
/// send-only qp 0x11 psn 0xb298ce ack-req len 16
/// acknowledge qp 0x11 psn 0xb298ce Ack(31) msn 1
/// ```
impl fmt::Display for Packet<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { opcode, bth, deth, feth, reth, aeth, atomic, atomic_ack, imm, ieth, payload } =
            self;
        write!(f, "{opcode} qp {:#x} psn {}", bth.dest_qpn, bth.psn)?;
        for (set, name) in [
            (bth.solicited, " solicited"),
            (bth.ack_req, " ack-req"),
            (bth.fecn, " fecn"),
            (bth.becn, " becn"),
        ] {
            if set {
                f.write_str(name)?;
            }
        }
        if bth.pkey != super::DEFAULT_PKEY {
            write!(f, " pkey {:#06x}", bth.pkey)?;
        }
        if let Some(Deth { qkey, source_qpn }) = deth {
            write!(f, " from qp {source_qpn:#x} qkey {qkey:#x}")?;
        }
        if let Some(feth) = feth {
            write!(f, " flush {feth:#x}")?;
        }
        if let Some(Reth { va, rkey, len }) = reth {
            write!(f, " va {va:#x} rkey {rkey:#x} of {len}")?;
        }
        if let Some(Aeth { syndrome, msn }) = aeth {
            write!(f, " {syndrome:?} msn {msn}")?;
        }
        if let Some(AtomicEth { va, rkey, swap_or_add, compare }) = atomic {
            write!(f, " va {va:#x} rkey {rkey:#x} value {swap_or_add:#x} compare {compare:#x}")?;
        }
        if let Some(AtomicAckEth { original }) = atomic_ack {
            write!(f, " original {original:#x}")?;
        }
        if let Some(imm) = imm {
            write!(f, " imm {imm:#x}")?;
        }
        if let Some(ieth) = ieth {
            write!(f, " invalidate {ieth:#x}")?;
        }
        if !payload.is_empty() {
            write!(f, " len {}", payload.len())?;
        }
        Ok(())
    }
}
