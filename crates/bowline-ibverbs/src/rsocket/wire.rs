//! What peers send each other: private data of the connection manager, immediates, and entries of
//! the two tables that a peer writes to.

use bowline_verbs::Remote;

/// Version of the protocol [RSK-2].
const VERSION: u8 = 1;
/// Byte 7 of the hello has the size of the table of mappings [RSK-2].
const HAS_MAPS: u8 = 2;
/// Bytes of a hello.
pub(super) const HELLO_LEN: usize = 40;
/// Bytes of an entry of the table of windows, and of that of mappings.
pub(super) const WINDOW_LEN: usize = 16;
pub(super) const MAP_LEN: usize = 24;
/// Bits of an immediate below the kind of message.
const VALUE_BITS: u32 = 29;
/// Largest number of bytes of a message.
pub(super) const DATA_MAX: usize = (1 << VALUE_BITS) - 1;

/// Memory of a peer, with its key.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Region {
    pub(super) addr: u64,
    pub(super) key: u32,
    pub(super) len: u32,
}

impl Region {
    /// The place `offset` bytes behind the beginning.
    pub(super) fn at(self, offset: u64) -> Remote {
        Remote { addr: self.addr.wrapping_add(offset), rkey: self.key }
    }

    /// Tells whether all of its bytes have addresses, and it has any.
    fn is_memory(self) -> bool {
        self.len > 0 && self.addr.checked_add(self.len.into()).is_some()
    }

    fn big_endian(self) -> [u8; 16] {
        let mut out = [0; 16];
        out[..8].copy_from_slice(&self.addr.to_be_bytes());
        out[8..12].copy_from_slice(&self.key.to_be_bytes());
        out[12..].copy_from_slice(&self.len.to_be_bytes());
        out
    }

    /// An entry of the table of windows [RSK-5].
    pub(super) fn entry(self) -> [u8; WINDOW_LEN] {
        let mut out = [0; WINDOW_LEN];
        out[..8].copy_from_slice(&self.addr.to_le_bytes());
        out[8..12].copy_from_slice(&self.key.to_le_bytes());
        out[12..].copy_from_slice(&self.len.to_le_bytes());
        out
    }

    /// Reads an entry; `None`: not memory.
    pub(super) fn parse_entry(bytes: &[u8; WINDOW_LEN]) -> Option<Self> {
        let [a0, a1, a2, a3, a4, a5, a6, a7, k0, k1, k2, k3, l0, l1, l2, l3] = *bytes;
        let region = Self {
            addr: u64::from_le_bytes([a0, a1, a2, a3, a4, a5, a6, a7]),
            key: u32::from_le_bytes([k0, k1, k2, k3]),
            len: u32::from_le_bytes([l0, l1, l2, l3]),
        };
        region.is_memory().then_some(region)
    }
}

/// A mapping that a side has given its peer [RSK-9].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Map {
    /// What the peer calls its first byte.
    pub(super) offset: u64,
    pub(super) region: Region,
}

impl Map {
    pub(super) fn entry(self) -> [u8; MAP_LEN] {
        let mut out = [0; MAP_LEN];
        out[..8].copy_from_slice(&self.offset.to_le_bytes());
        out[8..].copy_from_slice(&self.region.entry());
        out
    }

    /// Reads an entry; `None`: not memory.
    pub(super) fn parse_entry(bytes: &[u8; MAP_LEN]) -> Option<Self> {
        let (offset, region) = bytes.split_first_chunk::<8>()?;
        let region = Region::parse_entry(region.first_chunk()?)?;
        let offset = u64::from_le_bytes(*offset);
        offset.checked_add(region.len.into())?;
        Some(Self { offset, region })
    }
}

/// The private data of a connect or accept [RSK-2].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Hello {
    /// Messages of data that may be sent before more are allowed.
    pub(super) credits: u16,
    /// Entries of the table of mappings.
    pub(super) maps: u8,
    /// The table of windows; its length is in entries. The table of mappings is behind it.
    pub(super) table: Region,
    /// The first window.
    pub(super) window: Region,
}

impl Hello {
    pub(super) fn bytes(&self) -> [u8; HELLO_LEN] {
        let mut out = [0; HELLO_LEN];
        out[0] = VERSION;
        out[1] = HAS_MAPS;
        out[2..4].copy_from_slice(&self.credits.to_be_bytes());
        out[7] = self.maps;
        out[8..24].copy_from_slice(&self.table.big_endian());
        out[24..].copy_from_slice(&self.window.big_endian());
        out
    }

    /// Reads what a peer sends; `None`: another version, or without sense.
    pub(super) fn parse(bytes: &[u8]) -> Option<Self> {
        let hello: &[u8; HELLO_LEN] = bytes.first_chunk()?;
        let region = |at: usize| {
            let (addr, rest) = hello[at..].split_first_chunk::<8>()?;
            let (key, rest) = rest.split_first_chunk::<4>()?;
            Some(Region {
                addr: u64::from_be_bytes(*addr),
                key: u32::from_be_bytes(*key),
                len: u32::from_be_bytes(*rest.first_chunk()?),
            })
        };
        let (table, window) = (region(8)?, region(24)?);
        let is_known = hello[0] == VERSION && hello[1] & !HAS_MAPS == 0;
        let credits = u16::from_be_bytes([hello[2], hello[3]]);
        let maps = if hello[1] & HAS_MAPS == 0 { 0 } else { hello[7] };
        let is_good = is_known && credits > 0 && table.len > 0 && window.is_memory();
        is_good.then_some(Self { credits, maps, table, window })
    }
}

/// Kind and value of an immediate [RSK-3].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Message {
    /// This many bytes are in the window.
    Data(u32),
    /// The number up to which messages of data may be sent; with 16 bytes, a new window too.
    Credits(u16),
    /// An entry of the table of mappings is written.
    Map(u32),
    /// Nothing more comes, and nothing more is taken.
    Disconnect,
    /// Nothing more comes.
    Shutdown,
}

impl Message {
    pub(super) fn immediate(self) -> u32 {
        let (kind, value) = match self {
            Self::Data(len) => (0, len),
            Self::Credits(limit) => (4, limit.into()),
            Self::Map(index) => (6, index),
            Self::Disconnect => (7, 0),
            Self::Shutdown => (7, 2),
        };
        kind << VALUE_BITS | value
    }

    /// Reads an immediate; `None`: not known.
    pub(super) fn parse(immediate: u32) -> Option<Self> {
        let value = immediate & ((1 << VALUE_BITS) - 1);
        Some(match immediate >> VALUE_BITS {
            0 => Self::Data(value),
            // The upper bits are what a sum of 16-bit numbers has overflowed into [RSK-6].
            4 => Self::Credits(value as u16),
            6 => Self::Map(value),
            7 if value == 0 => Self::Disconnect,
            7 if value == 2 => Self::Shutdown,
            _ => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(text: &str) -> Vec<u8> {
        (0..text.len())
            .step_by(2)
            .map(|at| u8::from_str_radix(&text[at..at + 2], 16).unwrap())
            .collect()
    }

    /// [RSK-2]: captured of librdmacm over rxe.
    #[test]
    fn the_hello_of_rdma_core_is_read_and_written() {
        let whole = bytes(
            "010201800000000400007f96a80030000000093d00000002\
             00007f96ae8ff00000000a8d00010000",
        );
        let hello = Hello::parse(&whole).unwrap();
        assert_eq!(
            hello,
            Hello {
                credits: 384,
                maps: 4,
                table: Region { addr: 0x7f96_a800_3000, key: 0x93d, len: 2 },
                window: Region { addr: 0x7f96_ae8f_f000, key: 0xa8d, len: 65536 },
            }
        );
        assert_eq!(hello.bytes()[..], whole[..HELLO_LEN]);
    }

    /// [RSK-2]
    #[test]
    fn hellos_without_sense_are_refused() {
        let region = Region { addr: 4096, key: 1, len: 2 };
        let good = Hello { credits: 1, maps: 0, table: region, window: region };
        assert_eq!(Hello::parse(&good.bytes()), Some(good));
        assert_eq!(Hello::parse(&good.bytes()[..39]), None);
        for (at, value) in [(0, 0), (0, 2), (1, 1), (1, 6), (3, 0), (23, 0), (39, 0)] {
            let mut bad = good.bytes();
            bad[at] = value;
            assert_eq!(Hello::parse(&bad), None, "byte {at} = {value}");
        }
        let high = Region { addr: u64::MAX, key: 1, len: 2 };
        assert_eq!(Hello::parse(&Hello { window: high, ..good }.bytes()), None);
    }

    /// [RSK-3]
    #[test]
    fn immediates_go_both_ways_and_unknown_ones_are_refused() {
        for (message, immediate) in [
            (Message::Data(10), 10),
            (Message::Credits(0x180), 0x8000_0180),
            (Message::Map(1), 0xc000_0001),
            (Message::Disconnect, 0xe000_0000),
            (Message::Shutdown, 0xe000_0002),
        ] {
            assert_eq!(message.immediate(), immediate);
            assert_eq!(Message::parse(immediate), Some(message));
        }
        assert_eq!(Message::parse(0x8001_0154), Some(Message::Credits(0x154)));
        for unknown in [0x2000_0000, 0x4000_0000, 0x6000_0000, 0xa000_0000, 0xe000_0003] {
            assert_eq!(Message::parse(unknown), None);
        }
    }

    /// [RSK-5], [RSK-9]: captured of librdmacm over rxe.
    #[test]
    fn entries_of_the_tables_are_read_and_written() {
        let window = bytes("0070f3c6517f0000e104000000000100");
        let region = Region::parse_entry(window.first_chunk().unwrap()).unwrap();
        assert_eq!(region, Region { addr: 0x7f51_c6f3_7000, key: 0x4e1, len: 65536 });
        assert_eq!(region.entry()[..], window[..]);
        let entry = bytes("000001000000000040b1309f8b5500001f0d000000100000");
        let map = Map::parse_entry(entry.first_chunk().unwrap()).unwrap();
        let region = Region { addr: 0x558b_9f30_b140, key: 0xd1f, len: 4096 };
        assert_eq!(map, Map { offset: 65536, region });
        assert_eq!(map.entry()[..], entry[..]);
        assert_eq!(Map::parse_entry(&[0; MAP_LEN]), None);
        let last = Map { offset: u64::MAX, region };
        assert_eq!(Map::parse_entry(&last.entry()), None);
    }
}
