//! How a session's memory is cut into chunks, and how a chunk and an offset share 28 bits.
//!
//! ```text
//!     28                    mem_bits                       0
//!      +--------------------+------------------------------+
//!      | chunk index        | offset of the header in it   |
//!      +--------------------+------------------------------+
//! ```

use core::fmt;

use super::MIN_CHUNK;

/// Bits of an immediate behind its type [RT-14].
const PAYLOAD_BITS: u32 = 28;
/// Least room for user message and header: the longest message of RNBD with a READ header.
const MIN_HDR: u32 = 264 + 8 + 16;
/// Most room for user message and header a client believes [RT-32].
const MAX_HDR: u32 = 1 << 20;

/// Why numbers are no [`Geometry`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum GeometryError {
    /// No chunks.
    Depth,
    /// No room for data.
    MaxIo,
    /// Bytes for user message and header that are too few or too many.
    MaxHdr(u32),
    /// Chunks of fewer than 8192 bytes, or, of a server, not a power of two; their size in bytes.
    Chunk(u64),
    /// Index and offset do not fit in 28 bits.
    Bits {
        /// Number of chunks.
        queue_depth: u16,
        /// Bytes of each.
        chunk: u32,
    },
}

impl fmt::Display for GeometryError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Depth => f.write_str("a queue depth of 0"),
            Self::MaxIo => f.write_str("requests of at most 0 bytes"),
            Self::MaxHdr(len) => {
                write!(f, "{len} bytes for a message, instead of {MIN_HDR} to {MAX_HDR}")
            }
            Self::Chunk(len) => write!(f, "chunks of {len} bytes"),
            Self::Bits { queue_depth, chunk } => {
                write!(f, "{queue_depth} chunks of {chunk} bytes need more than 28 bits")
            }
        }
    }
}

impl core::error::Error for GeometryError {}

/// Number and size of a session's chunks. One that exists fits the immediates
/// [RT-9] [RT-15] [RT-16] [RT-32].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    queue_depth: u16,
    max_io: u32,
    max_hdr: u32,
}

impl Geometry {
    /// Makes the geometry of what a server announces, sizes in bytes.
    ///
    /// # Errors
    /// [`GeometryError`].
    pub fn new(queue_depth: u16, max_io: u32, max_hdr: u32) -> Result<Self, GeometryError> {
        if queue_depth == 0 {
            return Err(GeometryError::Depth);
        }
        if max_io == 0 {
            return Err(GeometryError::MaxIo);
        }
        if !(MIN_HDR..=MAX_HDR).contains(&max_hdr) {
            return Err(GeometryError::MaxHdr(max_hdr));
        }
        let len = u64::from(max_io) + u64::from(max_hdr);
        let chunk = u32::try_from(len).map_err(|_| GeometryError::Chunk(len))?;
        if chunk < MIN_CHUNK {
            return Err(GeometryError::Chunk(len));
        }
        if bits(queue_depth.into()) + bits(chunk) > PAYLOAD_BITS {
            return Err(GeometryError::Bits { queue_depth, chunk });
        }
        Ok(Self { queue_depth, max_io, max_hdr })
    }

    /// Makes the geometry a server announces, of the bytes of a chunk and of those kept for user
    /// message and header. Chunks of a server are a power of two [RT-16].
    ///
    /// # Errors
    /// [`GeometryError`].
    pub fn of_chunk(queue_depth: u16, chunk: u32, max_hdr: u32) -> Result<Self, GeometryError> {
        if !chunk.is_power_of_two() {
            return Err(GeometryError::Chunk(chunk.into()));
        }
        Self::new(queue_depth, chunk.saturating_sub(max_hdr), max_hdr)
    }

    /// Returns the number of chunks, at least 1.
    pub fn queue_depth(&self) -> u16 {
        self.queue_depth
    }

    /// Returns the most bytes of data of a request.
    pub fn max_io(&self) -> u32 {
        self.max_io
    }

    /// Returns the bytes kept for user message and header.
    pub fn max_hdr(&self) -> u32 {
        self.max_hdr
    }

    /// Returns the bytes of a chunk.
    pub fn chunk(&self) -> u32 {
        self.max_io + self.max_hdr
    }

    /// Returns how many bits of an immediate are the offset [RT-15].
    pub fn mem_bits(&self) -> u32 {
        PAYLOAD_BITS - bits(self.queue_depth.into())
    }

    /// Returns what [`Imm::Request`](super::Imm::Request) carries for a header at `off` in chunk
    /// `id` [RT-15].
    pub fn request_payload(&self, id: u16, off: u32) -> u32 {
        (u32::from(id) << self.mem_bits() | off) & ((1 << PAYLOAD_BITS) - 1)
    }

    /// Takes the payload of a request apart: chunk and offset. `None` when there is no such chunk
    /// or the offset is beyond it [RT-44] [RT-67].
    pub fn split(&self, payload: u32) -> Option<(u16, u32)> {
        let id = u16::try_from(payload >> self.mem_bits()).ok()?;
        let off = payload & ((1 << self.mem_bits()) - 1);
        (id < self.queue_depth && off < self.chunk()).then_some((id, off))
    }
}

/// Bits needed to count to `n`: the logarithm rounded up, 0 for 1 [RT-9].
fn bits(n: u32) -> u32 {
    n.saturating_sub(1).checked_ilog2().map_or(0, |log| log + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    // tests [RT-15] [RT-16]
    #[test]
    fn splits_28_bits_as_the_table_says() -> Result<(), GeometryError> {
        for (depth, mem_bits, chunk) in [
            (1, 28, 256 << 20),
            (128, 21, 2 << 20),
            (512, 19, 512 << 10),
            (513, 18, 256 << 10),
            (1024, 18, 256 << 10),
            (2048, 17, 128 << 10),
            (32768, 13, 8 << 10),
        ] {
            let geometry = Geometry::of_chunk(depth, chunk, 4096)?;
            assert_eq!(geometry.mem_bits(), mem_bits);
            let twice = Geometry::of_chunk(depth, chunk * 2, 4096);
            assert!(matches!(twice, Err(GeometryError::Bits { .. })), "{depth}");
            let (id, off) = (depth - 1, chunk - 1);
            let payload = geometry.request_payload(id, off);
            assert!(payload < 1 << 28);
            assert_eq!(geometry.split(payload), Some((id, off)));
        }
        assert!(Geometry::of_chunk(32769, 8192, 4096).is_err());
        Ok(())
    }

    // tests [RT-32]
    #[test]
    fn refuses_what_cannot_be() {
        use GeometryError as E;
        assert_eq!(Geometry::new(0, 126_976, 4096), Err(E::Depth));
        assert_eq!(Geometry::new(512, 0, 8192), Err(E::MaxIo));
        assert_eq!(Geometry::new(512, 126_976, 287), Err(E::MaxHdr(287)));
        assert_eq!(Geometry::new(1, 4096, 2 << 20), Err(E::MaxHdr(2 << 20)));
        assert_eq!(Geometry::new(1, u32::MAX, 4096), Err(E::Chunk(u64::from(u32::MAX) + 4096)));
        assert_eq!(Geometry::new(1, 4095, 4096), Err(E::Chunk(8191)));
        assert_eq!(Geometry::of_chunk(1, 12288, 4096), Err(E::Chunk(12288)));
        assert_eq!(Geometry::of_chunk(1, 4096, 8192), Err(E::MaxIo));
        assert!(Geometry::new(512, 1 << 20, 4096).is_err());
    }

    // tests [RT-44] [RT-67]
    #[test]
    fn splits_only_what_is_in_a_chunk() -> Result<(), GeometryError> {
        let geometry = Geometry::of_chunk(500, 131_072, 4096)?;
        assert_eq!(geometry.split(499 << 19 | 131_071), Some((499, 131_071)));
        assert_eq!(geometry.split(500 << 19), None);
        assert_eq!(geometry.split(131_072), None);
        let one = Geometry::of_chunk(1, 8192, 4096)?;
        assert_eq!(one.split(u32::MAX), None);
        assert_eq!(one.split(8191), Some((0, 8191)));
        Ok(())
    }
}
