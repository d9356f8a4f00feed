//! The congestion map: one bit per port. Spec: `docs/spec/rds.md`, section 7.1.

/// Length of a map on the wire, bytes.
pub const MAP_LEN: usize = 8192;
/// Number of ports.
pub const MAP_BITS: usize = 65536;

/// A map as it lies on the wire: port p is bit `p & 7` of byte `p >> 3`.
#[derive(Clone, Copy, Debug)]
pub struct MapView<'a>(&'a [u8; MAP_LEN]);

impl<'a> MapView<'a> {
    /// Looks at a payload; `None` unless it is exactly 8192 bytes.
    pub fn new(payload: &'a [u8]) -> Option<Self> {
        payload.try_into().ok().map(Self)
    }

    /// Tells whether `port` is congested.
    pub fn is_congested(&self, port: u16) -> bool {
        self.0[usize::from(port >> 3)] & (1 << (port & 7)) != 0
    }

    /// The map as 1024 words; bit k of word w is port `64 w + k`.
    pub fn words(&self) -> impl Iterator<Item = u64> + 'a {
        self.0.as_chunks::<8>().0.iter().map(|w| u64::from_le_bytes(*w))
    }
}
