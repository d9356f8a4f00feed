//! Extension headers. Spec: `docs/spec/rds.md`, section 1.4.
//!
//! Entries are packed back to back in 16 bytes: a type byte, then a payload whose length the type
//! implies; a zero type or the end of the area ends the list. A type this node does not know ends
//! the list too.

/// Length of the extension area in bytes.
pub const EXT_AREA_LEN: usize = 16;
/// Largest number of paths a probe can announce that a kernel obeys.
#[doc(alias = "RDS_MPATH_WORKERS")]
pub const PROBE_PATHS_MAX: u16 = 8;

const NONE: u8 = 0;
const VERSION: u8 = 1;
const RDMA: u8 = 2;
const RDMA_DEST: u8 = 3;
const RDMA_BYTES: u8 = 4;
const NPATHS: u8 = 5;
const GEN_NUM: u8 = 6;
const SPORT_IDX: u8 = 8;
/// bowline's own. Kernels end the list at a type of 16 or more.
const BOWLINE: u8 = 0x42;

/// Address of remote memory, as RDMA_DEST carries it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RdmaDest {
    /// Remote key.
    pub rkey: u32,
    /// Offset in the region, bytes.
    pub offset: u32,
}

/// What one bowline node tells another in a probe; a kernel never looks at it.
///
/// Layout after the type byte 0x42: `version << 4 | path`, then the longest message the sender is
/// ready to receive as a big-endian u32.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BowlineExt {
    /// Version of bowline's additions, 1 to 15; this is version 1.
    pub version: u8,
    /// Path this connection belongs to, 0 to 15.
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
}

impl Iterator for Extensions<'_> {
    type Item = Extension;

    fn next(&mut self) -> Option<Extension> {
        let (&kind, rest) = self.rest.split_first()?;
        self.rest = &[];
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
            NONE => return None,
            _ => return None,
        };
        self.rest = rest;
        Some(ext)
    }
}

fn be32(b: &[u8; 4]) -> u32 {
    u32::from_be_bytes(*b)
}

/// The extensions of a probe ping or pong, in the order this node writes them, [R-440].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Handshake {
    /// Number of paths, absent from peers without multipath.
    pub npaths: Option<u16>,
    /// Generation.
    pub generation: Option<u32>,
    /// Whether source ports tell the path.
    pub sport_idx: bool,
    /// bowline's own part.
    pub bowline: Option<BowlineExt>,
}

impl Handshake {
    /// Collects what an area says; of a repeated extension the last counts.
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
    pub fn emit(&self) -> [u8; EXT_AREA_LEN] {
        let mut area = [0; EXT_AREA_LEN];
        let mut at = 0;
        let mut put = |bytes: &[u8]| {
            area[at..at + bytes.len()].copy_from_slice(bytes);
            at += bytes.len();
        };
        if let Some(n) = self.npaths {
            let [hi, lo] = n.to_be_bytes();
            put(&[NPATHS, hi, lo]);
        }
        if let Some(g) = self.generation {
            let [a, b, c, d] = g.to_be_bytes();
            put(&[GEN_NUM, a, b, c, d]);
        }
        if self.sport_idx {
            put(&[SPORT_IDX, 0]);
        }
        if let Some(b) = self.bowline {
            let [m0, m1, m2, m3] = b.max_message.to_be_bytes();
            put(&[BOWLINE, b.version << 4 | b.path & 15, m0, m1, m2, m3]);
        }
        area
    }
}
