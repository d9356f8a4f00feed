//! The 48-byte header. Spec: `docs/spec/rds.md`, sections 1.1 to 1.3.

use core::fmt;

use super::PROBE_PORT;
use super::ext::{EXT_AREA_LEN, Extensions};
use super::map::MAP_LEN;

/// Length of the header in bytes.
pub const HEADER_LEN: usize = 48;

// sequence, ack, len, sport, dport, flags, credit, padding, csum, extensions
const _: () = assert!(8 + 8 + 4 + 2 + 2 + 1 + 1 + 4 + 2 + EXT_AREA_LEN == HEADER_LEN);
// As `h_len` carries it.
const _: () = assert!(MAP_LEN == 0x2000);

/// The bits of `h_flags`; unknown bits are kept [R-110].
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct Flags(u8);

impl Flags {
    /// No flag.
    pub const NONE: Self = Self(0);
    /// The payload is a congestion map; over TCP only when it is the only bit set [R-108].
    pub const CONG_BITMAP: Self = Self(0x01);
    /// The sender wants an acknowledgement soon; a kernel ignores it over TCP [R-109].
    pub const ACK_REQUIRED: Self = Self(0x02);
    /// The message was started on an earlier connection [R-321].
    pub const RETRANSMITTED: Self = Self(0x04);

    /// Makes flags of the byte on the wire.
    pub const fn from_bits(bits: u8) -> Self {
        Self(bits)
    }

    /// Returns the byte on the wire.
    pub const fn bits(self) -> u8 {
        self.0
    }

    /// Tells whether every bit of `other` is set.
    pub const fn contains(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// Returns both sets of bits together.
    #[must_use]
    pub const fn with(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

impl fmt::Debug for Flags {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Flags({:#04x})", self.0)
    }
}

/// Names joined by `|`, then the unnamed bits as one hexadecimal number; `0` for no flag.
impl fmt::Display for Flags {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const NAMES: [(Flags, &str); 3] = [
            (Flags::CONG_BITMAP, "CONG_BITMAP"),
            (Flags::ACK_REQUIRED, "ACK_REQUIRED"),
            (Flags::RETRANSMITTED, "RETRANSMITTED"),
        ];
        let mut unnamed = self.0;
        let mut between = "";
        for (flag, name) in NAMES {
            if self.contains(flag) {
                write!(f, "{between}{name}")?;
                unnamed &= !flag.0;
                between = "|";
            }
        }
        match (unnamed, self.0) {
            (_, 0) => f.write_str("0"),
            (0, _) => Ok(()),
            _ => write!(f, "{between}{unnamed:#04x}"),
        }
    }
}

/// Why bytes could not be decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum DecodeError {
    /// Fewer bytes than the layout needs.
    Short {
        /// Bytes needed.
        needed: usize,
        /// Bytes available.
        got: usize,
    },
}

impl fmt::Display for DecodeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Short { needed, got } => write!(f, "{needed} bytes needed, {got} there"),
        }
    }
}

impl core::error::Error for DecodeError {}

/// A decoded header. Every bit pattern of 48 bytes is one; `emit(parse(b)) == b` but for the
/// padding, which is ignored on receipt [R-103] and zero when sent [R-102].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Header {
    /// Number of the message on its path; 0 in maps.
    #[doc(alias = "h_sequence")]
    pub sequence: u64,
    /// Highest sequence received in order; over TCP meaningful between bowline nodes only.
    #[doc(alias = "h_ack")]
    pub ack: u64,
    /// Payload bytes that follow; over RDMA those of the whole message, in each of its frames
    /// [IB-50].
    #[doc(alias = "h_len")]
    pub len: u32,
    /// Source RDS port.
    pub sport: u16,
    /// Destination RDS port.
    pub dport: u16,
    /// Flags.
    pub flags: Flags,
    /// RDMA flow-control credits; over TCP 0.
    pub credit: u8,
    /// Header checksum, 0 = none.
    pub csum: u16,
    /// Extension area.
    pub ext: [u8; EXT_AREA_LEN],
}

impl Header {
    /// Reads the first 48 bytes of `bytes`.
    ///
    /// # Errors
    /// [`DecodeError::Short`] when there are fewer.
    pub fn parse(bytes: &[u8]) -> Result<Self, DecodeError> {
        let short = DecodeError::Short { needed: HEADER_LEN, got: bytes.len() };
        let b: &[u8; HEADER_LEN] = bytes.first_chunk().ok_or(short)?;
        Ok(Self::from_bytes(b))
    }

    /// Reads exactly one header.
    #[inline]
    pub fn from_bytes(b: &[u8; HEADER_LEN]) -> Self {
        // One row per eight bytes, as in the picture; the compiler checks that all 48 are present.
        #[rustfmt::skip]
        let [
            q0, q1, q2, q3, q4, q5, q6, q7,
            a0, a1, a2, a3, a4, a5, a6, a7,
            l0, l1, l2, l3, s0, s1, d0, d1,
            flags, credit, _, _, _, _, c0, c1,
            ext @ ..
        ] = *b;
        Self {
            sequence: u64::from_be_bytes([q0, q1, q2, q3, q4, q5, q6, q7]),
            ack: u64::from_be_bytes([a0, a1, a2, a3, a4, a5, a6, a7]),
            len: u32::from_be_bytes([l0, l1, l2, l3]),
            sport: u16::from_be_bytes([s0, s1]),
            dport: u16::from_be_bytes([d0, d1]),
            flags: Flags(flags),
            credit,
            csum: u16::from_be_bytes([c0, c1]),
            ext,
        }
    }

    /// Writes the header; padding is zero.
    #[inline]
    pub fn to_bytes(self) -> [u8; HEADER_LEN] {
        let mut out = [0; HEADER_LEN];
        out[0..8].copy_from_slice(&self.sequence.to_be_bytes());
        out[8..16].copy_from_slice(&self.ack.to_be_bytes());
        out[16..20].copy_from_slice(&self.len.to_be_bytes());
        out[20..22].copy_from_slice(&self.sport.to_be_bytes());
        out[22..24].copy_from_slice(&self.dport.to_be_bytes());
        out[24] = self.flags.bits();
        out[25] = self.credit;
        out[30..32].copy_from_slice(&self.csum.to_be_bytes());
        out[32..48].copy_from_slice(&self.ext);
        out
    }

    /// Makes the header of a congestion map [R-702].
    pub const fn map() -> Self {
        Self {
            sequence: 0,
            ack: 0,
            len: MAP_LEN as u32,
            sport: 0,
            dport: 0,
            flags: Flags::CONG_BITMAP,
            credit: 0,
            csum: 0,
            ext: [0; EXT_AREA_LEN],
        }
    }

    /// Tells whether this is a congestion map as the TCP transport recognises one [R-108].
    ///
    /// Its length may still be wrong [R-224].
    pub const fn is_map(&self) -> bool {
        self.flags.bits() == Flags::CONG_BITMAP.bits()
    }

    /// Tells whether this is a probe ping, whose extensions are a handshake [R-116].
    pub const fn is_probe_ping(&self) -> bool {
        !self.is_map() && self.sport == PROBE_PORT && self.dport == 0
    }

    /// Tells whether this is a probe pong, whose extensions are a handshake [R-116].
    pub const fn is_probe_pong(&self) -> bool {
        !self.is_map() && self.sport == 0 && self.dport == PROBE_PORT
    }

    fn kind(&self) -> &'static str {
        match (self.sport, self.dport) {
            _ if self.is_map() => " map",
            _ if self.is_probe_ping() => " probe-ping",
            _ if self.is_probe_pong() => " probe-pong",
            (1.., 0) => " ping",
            (0, 1..) => " pong",
            _ => "",
        }
    }
}

/// One line for logs and captures; fields that are usually zero appear only when they are not.
///
/// ```text
/// seq 7 4000->20000 len 64 flags RETRANSMITTED
/// seq 1 1->0 len 0 flags 0 probe-ping ext npaths 8, gen 0x5eed0001, sport-idx 0
/// seq 9 4000->20000 len 64 flags 0 ack 12 csum 0x8a88 ext ? 07050002
/// ```
/// `?` stands before extension bytes this node does not understand, up to the last one not zero.
impl fmt::Display for Header {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { sequence, ack, len, sport, dport, flags, credit, csum, ext } = self;
        write!(f, "seq {sequence} {sport}->{dport} len {len} flags {flags}{}", self.kind())?;
        if *ack != 0 {
            write!(f, " ack {ack}")?;
        }
        if *credit != 0 {
            write!(f, " credit {credit}")?;
        }
        if *csum != 0 {
            write!(f, " csum {csum:#06x}")?;
        }
        let mut between = " ext ";
        let mut extensions = Extensions::new(ext);
        for extension in extensions.by_ref() {
            write!(f, "{between}{extension}")?;
            between = ", ";
        }
        let mut unread = extensions.rest();
        while let [head @ .., 0] = unread {
            unread = head;
        }
        if !unread.is_empty() {
            write!(f, "{between}? ")?;
            unread.iter().try_for_each(|byte| write!(f, "{byte:02x}"))?;
        }
        Ok(())
    }
}

/// Computes the checksum of R-104 over a header, whatever its checksum field holds.
pub fn checksum(header: &[u8; HEADER_LEN]) -> u16 {
    let field = u16::from_be_bytes([header[30], header[31]]);
    // The field is one of the words summed, so the difference cannot be negative.
    !fold(sum(header).wrapping_sub(u32::from(field)))
}

/// Tells whether a header's checksum is absent or right [R-105].
pub fn checksum_ok(header: &[u8; HEADER_LEN]) -> bool {
    (header[30] == 0 && header[31] == 0) || fold(sum(header)) == 0xffff
}

/// Sums the 24 words; that cannot overflow.
fn sum(header: &[u8; HEADER_LEN]) -> u32 {
    header.as_chunks::<2>().0.iter().map(|word| u32::from(u16::from_be_bytes(*word))).sum()
}

/// Folds the sum to 16 bits: adds the bits above them until none are left.
fn fold(mut sum: u32) -> u16 {
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum as u16
}
