//! Extension headers. Spec: `docs/spec/rds.md`, section 1.4.
//!
//! Entries are packed back to back in 16 bytes: a type byte, then a payload whose length the type
//! implies; a zero type or the end of the area ends the list. A type this node does not know ends
//! the list too [R-117]: a kernel skips the type byte alone and goes on in what may be the
//! payload [R-114], which is worse than missing what follows.
//!
//! ```text bytes 0       3                   8       10                      16
//! +-------+-------------------+-------+-----------------------+ ours   | 05 nn | 06 generation
//! | 08 00 | 42 vp max_message     | +-------+-------------------+-------+-----------------------+
//! ``` In this order every reader finds its part. 6.12 does not know type 8 and skips its type
//! byte; the zero payload then ends its list [R-114]. Later kernels know type 8 and end at 0x42, as
//! any kernel does at a type of 16 or more [R-113].
//!
//! [`RdmaExt`] builds the RDMA types, for messages on RDMA links only: type 3 in a message over TCP
//! takes a kernel down [R-118].

use core::fmt;

/// Length of the extension area in bytes.
pub const EXT_AREA_LEN: usize = 16;
/// Largest number of paths a probe can announce that a kernel obeys.
#[doc(alias = "RDS_MPATH_WORKERS")]
pub const PROBE_PATHS_MAX: u16 = 8;

const VERSION: u8 = 1;
const RDMA: u8 = 2;
const RDMA_DEST: u8 = 3;
const RDMA_BYTES: u8 = 4;
const NPATHS: u8 = 5;
const GEN_NUM: u8 = 6;
const SPORT_IDX: u8 = 8;
/// The extension of bowline itself. Kernels end the list at a type of 16 or more [R-113].
const BOWLINE: u8 = 0x42;

// All parts of a handshake together fill the area exactly; none can fail to fit.
const _: () = assert!((1 + 2) + (1 + 4) + (1 + 1) + (1 + 5) == EXT_AREA_LEN);
const _: () = assert!(BOWLINE >= 16);

/// Address of remote memory, as RDMA_DEST carries it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RdmaDest {
    /// Remote key.
    pub rkey: u32,
    /// Offset in the region, bytes.
    pub offset: u32,
}

impl RdmaDest {
    /// Returns the cookie that stands for the memory in control messages: the key in the low half,
    /// the offset in the high half [R-115].
    pub const fn cookie(self) -> u64 {
        (self.offset as u64) << 32 | self.rkey as u64
    }
}

/// What a message on an RDMA link says about remote memory: one extension, the only one of the
/// message [IB-51].
///
/// For RDMA links only. A 6.12 kernel that gets [`RdmaExt::Dest`] over TCP hits a BUG [R-118].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RdmaExt {
    /// Key that the RDMA operation of the message goes by.
    Op(u32),
    /// Memory handed to the receiving application.
    Dest(RdmaDest),
}

impl RdmaExt {
    /// Writes the whole area.
    pub fn emit(self) -> [u8; EXT_AREA_LEN] {
        let mut out = Writer { area: [0; EXT_AREA_LEN], at: 0 };
        match self {
            Self::Op(rkey) => {
                let [a, b, c, d] = rkey.to_be_bytes();
                out.put(&[RDMA, a, b, c, d]);
            }
            Self::Dest(RdmaDest { rkey, offset }) => {
                let [a, b, c, d] = rkey.to_be_bytes();
                let [e, f, g, h] = offset.to_be_bytes();
                out.put(&[RDMA_DEST, a, b, c, d, e, f, g, h]);
            }
        }
        out.area
    }
}

/// Extension between bowline nodes in a probe; a kernel never reads it.
///
/// Layout after the type byte 0x42: `version << 4 | path`, then the longest message the sender is
/// ready to receive as a big-endian u32.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BowlineExt {
    /// Version of bowline's additions, 1 to 15; this is version 1.
    pub version: u8,
    /// Path of this connection, 0 to 15.
    pub path: u8,
    /// Longest message the sender accepts, bytes.
    pub max_message: u32,
}

/// One extension.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Extension {
    /// Protocol version; never sent by a kernel.
    Version(u32),
    /// Remote key of a finished RDMA operation.
    Rdma(u32),
    /// Remote memory handed to the receiving application.
    RdmaDest(RdmaDest),
    /// Bytes and direction of an RDMA operation (later kernels).
    RdmaBytes {
        /// Byte count.
        bytes: u32,
        /// 1 write, 2 read.
        direction: u8,
    },
    /// Number of paths the sender is ready to use.
    NPaths(u16),
    /// Generation of the sender: changes when it restarts.
    GenNum(u32),
    /// Promise that the source port of path i is i modulo 8.
    SportIdx(u8),
    /// bowline's own.
    Bowline(BowlineExt),
}

impl fmt::Display for Extension {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Version(version) => write!(f, "version {}.{}", version >> 8, version & 0xff),
            Self::Rdma(rkey) => write!(f, "rdma {rkey:#010x}"),
            Self::RdmaDest(RdmaDest { rkey, offset }) => {
                write!(f, "rdma-dest {rkey:#010x}+{offset:#x}")
            }
            Self::RdmaBytes { bytes, direction: 1 } => write!(f, "rdma-bytes {bytes} write"),
            Self::RdmaBytes { bytes, direction: 2 } => write!(f, "rdma-bytes {bytes} read"),
            Self::RdmaBytes { bytes, direction } => write!(f, "rdma-bytes {bytes} dir {direction}"),
            Self::NPaths(n) => write!(f, "npaths {n}"),
            Self::GenNum(generation) => write!(f, "gen {generation:#010x}"),
            Self::SportIdx(payload) => write!(f, "sport-idx {payload}"),
            Self::Bowline(BowlineExt { version, path, max_message }) => {
                write!(f, "bowline v{version} path {path} max {max_message}")
            }
        }
    }
}

/// Iterator over the extensions of an area; ends at the first type it does not know or that does
/// not fit.
#[derive(Clone, Debug)]
pub struct Extensions<'a> {
    rest: &'a [u8],
}

impl<'a> Extensions<'a> {
    /// Starts at the beginning of `area`.
    pub fn new(area: &'a [u8; EXT_AREA_LEN]) -> Self {
        Self { rest: area }
    }

    /// Returns the bytes not read yet; once the iterator has ended, those it does not understand
    /// and the padding.
    pub fn rest(&self) -> &'a [u8] {
        self.rest
    }
}

impl Iterator for Extensions<'_> {
    type Item = Extension;

    fn next(&mut self) -> Option<Extension> {
        // `self.rest` moves only past what was understood, so that the end stays the end.
        let (&kind, rest) = self.rest.split_first()?;
        let (ext, rest) = match kind {
            VERSION => rest.split_first_chunk().map(|(b, r)| (Extension::Version(be32(b)), r))?,
            RDMA => rest.split_first_chunk().map(|(b, r)| (Extension::Rdma(be32(b)), r))?,
            RDMA_DEST => {
                let (rkey, rest) = rest.split_first_chunk()?;
                let (offset, rest) = rest.split_first_chunk()?;
                let dest = RdmaDest { rkey: be32(rkey), offset: be32(offset) };
                (Extension::RdmaDest(dest), rest)
            }
            RDMA_BYTES => {
                let (&[b0, b1, b2, b3, direction, _, _, _], rest) = rest.split_first_chunk()?;
                let bytes = u32::from_be_bytes([b0, b1, b2, b3]);
                (Extension::RdmaBytes { bytes, direction }, rest)
            }
            NPATHS => {
                let (&b, rest) = rest.split_first_chunk()?;
                (Extension::NPaths(u16::from_be_bytes(b)), rest)
            }
            GEN_NUM => rest.split_first_chunk().map(|(b, r)| (Extension::GenNum(be32(b)), r))?,
            SPORT_IDX => rest.split_first().map(|(&b, r)| (Extension::SportIdx(b), r))?,
            BOWLINE => {
                let (&[vp, m0, m1, m2, m3], rest) = rest.split_first_chunk()?;
                let max_message = u32::from_be_bytes([m0, m1, m2, m3]);
                let ext = BowlineExt { version: vp >> 4, path: vp & 15, max_message };
                (Extension::Bowline(ext), rest)
            }
            // NONE, and what this node does not know [R-117], [B-24].
            _ => return None,
        };
        self.rest = rest;
        Some(ext)
    }
}

impl core::iter::FusedIterator for Extensions<'_> {}

fn be32(b: &[u8; 4]) -> u32 {
    u32::from_be_bytes(*b)
}

/// The extensions of a probe ping or pong, in the order this node writes them [R-344], [R-440].
///
/// They mean something on those two messages only [R-116].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Handshake {
    /// Number of paths, absent from peers without multipath.
    pub npaths: Option<u16>,
    /// Generation; 0 says as little as none [R-341].
    pub generation: Option<u32>,
    /// Whether source ports tell the path; absent is off [R-440].
    pub sport_idx: bool,
    /// bowline's own part.
    pub bowline: Option<BowlineExt>,
}

impl Handshake {
    /// Collects what an area says; of a repeated extension the last counts [R-404].
    pub fn parse(area: &[u8; EXT_AREA_LEN]) -> Self {
        let mut out = Self::default();
        for ext in Extensions::new(area) {
            match ext {
                Extension::NPaths(n) => out.npaths = Some(n),
                Extension::GenNum(g) => out.generation = Some(g),
                Extension::SportIdx(_) => out.sport_idx = true,
                Extension::Bowline(b) => out.bowline = Some(b),
                _ => {}
            }
        }
        out
    }

    /// Writes the whole area; all parts together are exactly 16 bytes.
    ///
    /// Of the bowline part's `version` and `path` the low four bits are written.
    pub fn emit(&self) -> [u8; EXT_AREA_LEN] {
        let mut out = Writer { area: [0; EXT_AREA_LEN], at: 0 };
        if let Some(n) = self.npaths {
            let [hi, lo] = n.to_be_bytes();
            out.put(&[NPATHS, hi, lo]);
        }
        if let Some(g) = self.generation {
            let [a, b, c, d] = g.to_be_bytes();
            out.put(&[GEN_NUM, a, b, c, d]);
        }
        if self.sport_idx {
            out.put(&[SPORT_IDX, 0]);
        }
        if let Some(b) = self.bowline {
            let [m0, m1, m2, m3] = b.max_message.to_be_bytes();
            out.put(&[BOWLINE, b.version << 4 | b.path & 15, m0, m1, m2, m3]);
        }
        out.area
    }
}

/// Fills an area from the front; the rest of it stays zero [R-117].
struct Writer {
    area: [u8; EXT_AREA_LEN],
    at: usize,
}

impl Writer {
    fn put<const N: usize>(&mut self, entry: &[u8; N]) {
        let free = self.area.get_mut(self.at..).and_then(|rest| rest.first_chunk_mut());
        debug_assert!(free.is_some(), "the parts are known to fit, see the assertion above");
        if let Some(free) = free {
            *free = *entry;
            self.at += N;
        }
    }
}
