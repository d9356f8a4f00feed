//! The congestion map: one bit per port. Spec: `docs/spec/rds.md`, section 7.1.

use core::fmt;

/// Length of a map on the wire, bytes.
pub const MAP_LEN: usize = 8192;
/// Number of ports.
pub const MAP_BITS: usize = 65536;

const _: () = assert!(MAP_LEN * 8 == MAP_BITS && MAP_BITS == u16::MAX as usize + 1);

/// Largest number of ports that the `Display` form names; it only counts the others.
const PORTS_SHOWN: usize = 8;

/// A map in wire format: port p is bit `p & 7` of byte `p >> 3`.
#[derive(Clone, Copy, Debug)]
pub struct MapView<'a>(&'a [u8; MAP_LEN]);

impl<'a> MapView<'a> {
    /// Makes a view of a payload; `None` unless it has exactly 8192 bytes.
    pub fn new(payload: &'a [u8]) -> Option<Self> {
        payload.try_into().ok().map(Self)
    }

    /// Tells whether `port` is congested.
    pub fn is_congested(&self, port: u16) -> bool {
        // The index of any port is within the map, which the compiler can see too.
        self.0.get(usize::from(port >> 3)).is_some_and(|byte| byte & (1 << (port & 7)) != 0)
    }

    /// The map as 1024 words; bit k of word w is port `64 w + k`.
    pub fn words(&self) -> impl Iterator<Item = u64> + 'a {
        self.0.as_chunks::<8>().0.iter().map(|w| u64::from_le_bytes(*w))
    }

    /// The congested ports, lowest first.
    pub fn congested_ports(&self) -> impl Iterator<Item = u16> + 'a {
        let map = *self;
        (0..=u16::MAX).filter(move |port| map.is_congested(*port))
    }
}

/// `no port congested`, or how many and the lowest eight of them.
impl fmt::Display for MapView<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let count: u32 = self.words().map(u64::count_ones).sum();
        match count {
            0 => return f.write_str("no port congested"),
            1 => f.write_str("1 port congested:")?,
            _ => write!(f, "{count} ports congested:")?,
        }
        for port in self.congested_ports().take(PORTS_SHOWN) {
            write!(f, " {port}")?;
        }
        if count as usize > PORTS_SHOWN { f.write_str(" ...") } else { Ok(()) }
    }
}
