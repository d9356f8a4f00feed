//! Messages of the vhost-user protocol, and numbers of virtio's block device. All numbers on the
//! socket are in host byte order, those of virtio little-endian.

use bowline_rnbd::Limits;

/// Length of a message's header in bytes.
pub(super) const HEADER_LEN: usize = 12;
/// Longest body in bytes: all regions of memory, or the whole configuration space.
const BODY_MAX: u32 = 512;
/// Most regions of memory in one message, each with a descriptor.
pub(super) const REGIONS_MAX: usize = 8;
/// Most regions of memory that a machine may have by messages for one each: what KVM allows.
pub(super) const SLOTS_MAX: usize = 509;
/// Length of the configuration space in bytes.
pub(super) const CONFIG_LEN: usize = 256;

const VERSION: u32 = 1;
/// Writes to the used ring are logged.
const RING_IS_LOGGED: u32 = 1;
const VERSION_MASK: u32 = 3;
const REPLY: u32 = 1 << 2;
const NEED_REPLY: u32 = 1 << 3;
/// No descriptor comes with the message.
const NO_FD: u64 = 1 << 8;

/// Message to the machine that its disk's configuration has changed.
const CONFIG_CHANGED: u32 = 2;

/// Protocol features: several queues, a dirty log in a file, acknowledged messages, messages to the
/// machine, the configuration space, the region of requests in flight, and messages for single
/// regions of memory.
pub(super) const MQ: u64 = 1 << 0;
pub(super) const LOG_SHMFD: u64 = 1 << 1;
pub(super) const REPLY_ACK: u64 = 1 << 3;
pub(super) const BACKEND_REQ: u64 = 1 << 5;
pub(super) const CONFIG: u64 = 1 << 9;
pub(super) const INFLIGHT: u64 = 1 << 12;
pub(super) const MEMORY_SLOTS: u64 = 1 << 15;
pub(super) const PROTOCOL_FEATURES: u64 =
    MQ | LOG_SHMFD | REPLY_ACK | BACKEND_REQ | CONFIG | INFLIGHT | MEMORY_SLOTS;

/// Features of virtio, and those of vhost beside them.
const F_SEG_MAX: u64 = 1 << 2;
const F_RO: u64 = 1 << 5;
const F_BLK_SIZE: u64 = 1 << 6;
pub(super) const F_FLUSH: u64 = 1 << 9;
const F_TOPOLOGY: u64 = 1 << 10;
const F_MQ: u64 = 1 << 12;
const F_DISCARD: u64 = 1 << 13;
const F_WRITE_ZEROES: u64 = 1 << 14;
/// Writes to memory are logged.
pub(super) const F_LOG_ALL: u64 = 1 << 26;
pub(super) const F_INDIRECT: u64 = 1 << 28;
pub(super) const F_EVENT_IDX: u64 = 1 << 29;
pub(super) const F_PROTOCOL: u64 = 1 << 30;
const F_VERSION_1: u64 = 1 << 32;

/// Most segments of data of a request: a queue of 128 descriptors, as machines have, holds them
/// with header and status.
const SEGMENTS: u32 = 126;
/// Most ranges of one request to discard or to make zero.
pub(super) const RANGES: usize = 16;
/// Most bytes of one such range, whatever the disk can do.
const RANGE_MAX: u32 = 1 << 30;

/// A region of the machine's memory.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct RegionSpec {
    /// Address in the guest.
    pub(super) guest: u64,
    pub(super) len: u64,
    /// Address in the machine's process.
    pub(super) user: u64,
    /// Offset in the file.
    pub(super) offset: u64,
}

/// Where the parts of a ring are, as addresses in the machine's process.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct RingAddresses {
    pub(super) descriptors: u64,
    pub(super) used: u64,
    pub(super) available: u64,
    /// Where the used ring is for the dirty log, if writes to it are logged.
    pub(super) log: Option<u64>,
}

/// A part of a file.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct FileRange {
    pub(super) len: u64,
    pub(super) offset: u64,
}

/// The region of requests in flight.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct InflightSpec {
    pub(super) len: u64,
    pub(super) offset: u64,
    pub(super) queues: u16,
    pub(super) queue_size: u16,
}

/// A message of the machine's process.
#[derive(Debug, Eq, PartialEq)]
pub(super) enum Message {
    GetFeatures,
    SetFeatures(u64),
    SetOwner,
    SetMemory(Vec<RegionSpec>),
    SetLog(FileRange),
    SetLogCall,
    SetRingSize(u32, u32),
    SetRingAddresses(u32, RingAddresses),
    SetRingBase(u32, u32),
    GetRingBase(u32),
    SetRingKick(u32, HasFd),
    SetRingCall(u32, HasFd),
    SetRingError(u32, HasFd),
    GetProtocolFeatures,
    SetProtocolFeatures(u64),
    GetQueueNum,
    SetRingEnabled(u32, bool),
    SetBackendChannel,
    /// Offset and length; the flags are returned.
    GetConfig(u32, u32, u32),
    SetConfig,
    GetInflight(InflightSpec),
    SetInflight(InflightSpec),
    GetMemorySlots,
    AddMemory(RegionSpec),
    RemoveMemory(RegionSpec),
}

/// Whether a descriptor comes with a message.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum HasFd {
    Yes,
    No,
}

/// The header of a message.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Header {
    pub(super) request: u32,
    pub(super) needs_reply: bool,
    /// Bytes of the body.
    pub(super) len: usize,
}

/// Numbers of a body, one after the other.
struct Numbers<'a>(&'a [u8]);

impl Numbers<'_> {
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (first, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*first)
    }

    fn u16(&mut self) -> Option<u16> {
        self.take().map(u16::from_ne_bytes)
    }

    fn u32(&mut self) -> Option<u32> {
        self.take().map(u32::from_ne_bytes)
    }

    fn u64(&mut self) -> Option<u64> {
        self.take().map(u64::from_ne_bytes)
    }

    fn region(&mut self) -> Option<RegionSpec> {
        let (guest, len) = (self.u64()?, self.u64()?);
        Some(RegionSpec { guest, len, user: self.u64()?, offset: self.u64()? })
    }
}

impl Header {
    /// Reads a header; `None` when it is not one of a request.
    pub(super) fn parse(bytes: &[u8; HEADER_LEN]) -> Option<Self> {
        let mut numbers = Numbers(bytes);
        let (request, flags, len) = (numbers.u32()?, numbers.u32()?, numbers.u32()?);
        let is_request = flags & VERSION_MASK == VERSION && flags & REPLY == 0;
        let header = Self { request, needs_reply: flags & NEED_REPLY != 0, len: len as usize };
        (is_request && len <= BODY_MAX).then_some(header)
    }
}

impl Message {
    /// Reads a message; `None` when the request is unknown or its body is not one of it.
    pub(super) fn parse(request: u32, body: &[u8]) -> Option<Self> {
        let mut numbers = Numbers(body);
        let message = match request {
            1 => Self::GetFeatures,
            2 => Self::SetFeatures(numbers.u64()?),
            // Of its successor, which says who is the owner no more, nothing follows either.
            3 | 4 => Self::SetOwner,
            5 => {
                let (count, _padding) = (numbers.u32()? as usize, numbers.u32()?);
                if count > REGIONS_MAX {
                    return None;
                }
                Self::SetMemory((0..count).map(|_| numbers.region()).collect::<Option<_>>()?)
            }
            6 => Self::SetLog(FileRange { len: numbers.u64()?, offset: numbers.u64()? }),
            7 => Self::SetLogCall,
            8 => Self::SetRingSize(numbers.u32()?, numbers.u32()?),
            9 => {
                let (ring, flags) = (numbers.u32()?, numbers.u32()?);
                let (descriptors, used) = (numbers.u64()?, numbers.u64()?);
                let (available, log) = (numbers.u64()?, numbers.u64()?);
                let log = (flags & RING_IS_LOGGED != 0).then_some(log);
                Self::SetRingAddresses(ring, RingAddresses { descriptors, used, available, log })
            }
            10 => Self::SetRingBase(numbers.u32()?, numbers.u32()?),
            11 => {
                let (ring, _nothing) = (numbers.u32()?, numbers.u32()?);
                Self::GetRingBase(ring)
            }
            12..=14 => {
                let number = numbers.u64()?;
                let fd = if number & NO_FD == 0 { HasFd::Yes } else { HasFd::No };
                let ring = (number & 0xff) as u32;
                match request {
                    12 => Self::SetRingKick(ring, fd),
                    13 => Self::SetRingCall(ring, fd),
                    _ => Self::SetRingError(ring, fd),
                }
            }
            15 => Self::GetProtocolFeatures,
            16 => Self::SetProtocolFeatures(numbers.u64()?),
            17 => Self::GetQueueNum,
            18 => Self::SetRingEnabled(numbers.u32()?, numbers.u32()? != 0),
            21 => Self::SetBackendChannel,
            24 => {
                let (offset, len, flags) = (numbers.u32()?, numbers.u32()?, numbers.u32()?);
                if u64::from(offset) + u64::from(len) > CONFIG_LEN as u64
                    || numbers.0.len() != len as usize
                {
                    return None;
                }
                return Some(Self::GetConfig(offset, len, flags));
            }
            25 => return Some(Self::SetConfig),
            31 | 32 => {
                let (len, offset) = (numbers.u64()?, numbers.u64()?);
                let spec = InflightSpec {
                    len,
                    offset,
                    queues: numbers.u16()?,
                    queue_size: numbers.u16()?,
                };
                // Some send the structure with its padding.
                if numbers.0.len() > 4 {
                    return None;
                }
                let message = if request == 31 { Self::GetInflight } else { Self::SetInflight };
                return Some(message(spec));
            }
            36 => Self::GetMemorySlots,
            37 | 38 => {
                let _padding = numbers.u64()?;
                let message = if request == 37 { Self::AddMemory } else { Self::RemoveMemory };
                message(numbers.region()?)
            }
            _ => return None,
        };
        numbers.0.is_empty().then_some(message)
    }
}

/// Returns a reply to `request`.
pub(super) fn reply(request: u32, body: &[u8]) -> Vec<u8> {
    message(request, VERSION | REPLY, body)
}

/// Returns the message to the machine that the configuration has changed.
pub(super) fn config_changed() -> Vec<u8> {
    message(CONFIG_CHANGED, VERSION, &[])
}

fn message(request: u32, flags: u32, body: &[u8]) -> Vec<u8> {
    let len = body.len() as u32;
    let header = [request, flags, len].into_iter().flat_map(u32::to_ne_bytes);
    header.chain(body.iter().copied()).collect()
}

/// Returns the body of a reply about the region of requests in flight, as long as the request's.
pub(super) fn inflight_body(spec: &InflightSpec, len: usize) -> Vec<u8> {
    let mut body = [spec.len.to_ne_bytes(), spec.offset.to_ne_bytes()].concat();
    body.extend(spec.queues.to_ne_bytes());
    body.extend(spec.queue_size.to_ne_bytes());
    body.resize(len, 0);
    body
}

/// Returns the features of a disk with these limits.
pub(super) fn features(limits: &Limits) -> u64 {
    let always = F_SEG_MAX
        | F_BLK_SIZE
        | F_TOPOLOGY
        | F_MQ
        | F_LOG_ALL
        | F_INDIRECT
        | F_EVENT_IDX
        | F_PROTOCOL
        | F_VERSION_1;
    let if_so = |so, feature| if so { feature } else { 0 };
    always
        | if_so(limits.read_only, F_RO)
        | if_so(limits.write_cache, F_FLUSH)
        | if_so(discard_sectors(limits) > 0, F_DISCARD)
        | if_so(zeroes_sectors(limits) > 0, F_WRITE_ZEROES)
}

fn discard_sectors(limits: &Limits) -> u32 {
    limits.discard.map_or(0, |discard| whole(limits, discard.max_bytes))
}

fn zeroes_sectors(limits: &Limits) -> u32 {
    whole(limits, limits.max_write_zeroes.into())
}

/// Returns at most `bytes` in sectors, as whole blocks.
fn whole(limits: &Limits, bytes: u64) -> u32 {
    let bytes = bytes.min(RANGE_MAX.into()) as u32;
    (bytes - bytes % limits.logical) / 512
}

/// Returns the configuration space of a disk with these limits.
pub(super) fn config(limits: &Limits, queues: u16) -> [u8; CONFIG_LEN] {
    let mut config = [0; CONFIG_LEN];
    let mut put = |at: usize, bytes: &[u8]| config[at..at + bytes.len()].copy_from_slice(bytes);
    put(0, &(limits.bytes / 512).to_le_bytes());
    put(12, &SEGMENTS.to_le_bytes());
    put(20, &limits.logical.to_le_bytes());
    let blocks = (limits.physical / limits.logical.max(1)).max(1);
    put(24, &[blocks.ilog2() as u8]);
    // Smallest and best unit of IO, in blocks.
    put(26, &u16::try_from(blocks).unwrap_or(1).to_le_bytes());
    put(34, &queues.to_le_bytes());
    put(36, &discard_sectors(limits).to_le_bytes());
    put(40, &(RANGES as u32).to_le_bytes());
    let granularity = limits.discard.map_or(limits.logical, |discard| discard.granularity);
    put(44, &(granularity / 512).max(1).to_le_bytes());
    put(48, &zeroes_sectors(limits).to_le_bytes());
    put(52, &(RANGES as u32).to_le_bytes());
    // Blocks that are made zero may lose their place.
    put(56, &[1]);
    config
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(words: &[u64]) -> Vec<u8> {
        words.iter().flat_map(|word| word.to_ne_bytes()).collect()
    }

    #[test]
    fn messages_have_the_length_that_their_kind_has() {
        assert_eq!(Message::parse(2, &words(&[7])), Some(Message::SetFeatures(7)));
        assert_eq!(Message::parse(2, &words(&[7, 8])), None);
        assert_eq!(Message::parse(2, &[1, 2]), None);
        assert_eq!(Message::parse(1, &[]), Some(Message::GetFeatures));
        assert_eq!(Message::parse(99, &[]), None);
        assert_eq!(Message::parse(13, &words(&[0x103])), Some(Message::SetRingCall(3, HasFd::No)));
        let region = RegionSpec { guest: 1, len: 2, user: 3, offset: 4 };
        let table = words(&[1, 1, 2, 3, 4]);
        assert_eq!(Message::parse(5, &table), Some(Message::SetMemory(vec![region])));
        assert_eq!(Message::parse(5, &table[..32]), None);
        assert_eq!(Message::parse(5, &words(&[u64::MAX])), None);
        let slot = words(&[0, 1, 2, 3, 4]);
        assert_eq!(Message::parse(37, &slot), Some(Message::AddMemory(region)));
        assert_eq!(Message::parse(38, &slot), Some(Message::RemoveMemory(region)));
        assert_eq!(Message::parse(37, &slot[..32]), None);
        let spec = InflightSpec { len: 5, offset: 6, queues: 7, queue_size: 8 };
        let body = inflight_body(&spec, 24);
        for len in [20, 24] {
            assert_eq!(Message::parse(32, &body[..len]), Some(Message::SetInflight(spec)));
        }
        assert_eq!(Message::parse(31, &body[..19]), None);
    }

    #[test]
    fn the_configuration_is_read_within_its_bounds() {
        let get = |offset: u32, len: u32, body: usize| {
            let mut bytes: Vec<u8> =
                [offset, len, 0].into_iter().flat_map(u32::to_ne_bytes).collect();
            bytes.resize(12 + body, 0);
            Message::parse(24, &bytes)
        };
        assert_eq!(get(0, 60, 60), Some(Message::GetConfig(0, 60, 0)));
        assert_eq!(get(200, 57, 57), None);
        assert_eq!(get(u32::MAX, 60, 60), None);
        assert_eq!(get(0, 60, 59), None);
    }

    #[test]
    fn a_header_is_one_of_a_request_of_this_version() {
        let header = |flags: u32, len: u32| {
            let bytes: Vec<u8> = [1, flags, len].into_iter().flat_map(u32::to_ne_bytes).collect();
            Header::parse(bytes.as_slice().try_into().unwrap())
        };
        assert_eq!(header(1, 8), Some(Header { request: 1, needs_reply: false, len: 8 }));
        assert!(header(9, 8).is_some_and(|header| header.needs_reply));
        for (flags, len) in [(0, 8), (2, 8), (5, 8), (1, BODY_MAX + 1), (1, u32::MAX)] {
            assert_eq!(header(flags, len), None, "{flags} {len}");
        }
    }
}
