//! Numbers and layouts of the kernel's ublk interface, as bytes: commands of `/dev/ublk-control`
//! and of a device's queue.

use bowline_rnbd::{IoOp, Limits};

/// Bytes of one request's description, which the kernel writes.
pub(super) const DESC_LEN: usize = 24;
/// Largest number of descriptors in the mapping of one queue.
pub(super) const MAX_DEPTH: u16 = 4096;
pub(super) const INFO_LEN: usize = 64;
pub(super) const PARAMS_LEN: usize = 60;

/// Commands of the control device, as numbers that say direction and size (`_IOWR('u', n, 32
/// bytes)`, or `_IOR`).
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[repr(u32)]
pub(super) enum Control {
    GetDevInfo = READ | command(0x02, 32),
    AddDev = READ | WRITE | command(0x04, 32),
    DelDev = READ | WRITE | command(0x05, 32),
    StartDev = READ | WRITE | command(0x06, 32),
    StopDev = READ | WRITE | command(0x07, 32),
    SetParams = READ | WRITE | command(0x08, 32),
    GetParams = READ | command(0x09, 32),
    StartUserRecovery = READ | WRITE | command(0x10, 32),
    EndUserRecovery = READ | WRITE | command(0x11, 32),
}

/// Commands of a queue.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[repr(u32)]
pub(super) enum Io {
    /// Waits for the first request of a tag.
    Fetch = READ | WRITE | command(0x20, 16),
    /// Gives a result, and waits for the next request of that tag.
    CommitAndFetch = READ | WRITE | command(0x21, 16),
}

/// Directions of a command.
const WRITE: u32 = 1 << 30;
const READ: u32 = 1 << 31;

const fn command(number: u32, size: u32) -> u32 {
    size << 16 | (b'u' as u32) << 8 | number
}

/// The device stays when its server ends: requests wait for the next server.
const F_USER_RECOVERY: u64 = 1 << 3;
/// What the former server was given and has not answered goes to the next one, too.
const F_USER_RECOVERY_REISSUE: u64 = 1 << 4;
/// The kernel takes the commands above, not bare numbers.
const F_CMD_IOCTL_ENCODE: u64 = 1 << 6;
const F_RECOVERABLE: u64 = F_USER_RECOVERY | F_USER_RECOVERY_REISSUE;

/// Attributes of a device.
const READ_ONLY: u32 = 1;
const VOLATILE_CACHE: u32 = 1 << 2;
const FUA: u32 = 1 << 3;
/// Kinds of parameters.
const BASIC: u32 = 1;
const DISCARD: u32 = 2;

/// A control command: `data` of `len` bytes at `addr`, or a number.
pub(super) fn control(dev_id: u32, addr: u64, len: u16, data: u64) -> [u8; 80] {
    let mut out = [0; 80];
    out[..4].copy_from_slice(&dev_id.to_ne_bytes());
    // No queue in particular.
    out[4..6].copy_from_slice(&u16::MAX.to_ne_bytes());
    out[6..8].copy_from_slice(&len.to_ne_bytes());
    out[8..16].copy_from_slice(&addr.to_ne_bytes());
    out[16..24].copy_from_slice(&data.to_ne_bytes());
    out
}

/// A queue's command: the result of the last request of a tag, and the memory of the next.
pub(super) fn io(tag: u16, result: i32, addr: u64) -> [u8; 16] {
    let mut out = [0; 16];
    out[2..4].copy_from_slice(&tag.to_ne_bytes());
    out[4..8].copy_from_slice(&result.to_ne_bytes());
    out[8..].copy_from_slice(&addr.to_ne_bytes());
    out
}

/// A device as the kernel describes it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Info {
    pub(super) id: u32,
    pub(super) depth: u16,
    pub(super) max_io: u32,
    pub(super) state: DevState,
    /// It stays when its server ends.
    pub(super) is_recoverable: bool,
    /// What its server has put down there.
    pub(super) tag: u64,
    /// The user who has made it.
    pub(super) owner: u32,
}

/// What a device does.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum DevState {
    /// It was not started, or is stopped.
    Dead,
    /// It has a server.
    Live,
    /// Its server has ended, and it waits for the next one.
    Quiesced,
    /// None that this program makes.
    Other,
}

/// Description of a new device with one queue, which the kernel completes. With a tag it stays
/// when its server ends.
pub(super) fn new_device(depth: u16, max_io: u32, tag: Option<u64>) -> [u8; INFO_LEN] {
    let mut out = [0; INFO_LEN];
    out[..2].copy_from_slice(&1_u16.to_ne_bytes());
    out[2..4].copy_from_slice(&depth.to_ne_bytes());
    out[8..12].copy_from_slice(&max_io.to_ne_bytes());
    // Any free number.
    out[12..16].copy_from_slice(&u32::MAX.to_ne_bytes());
    let flags = F_CMD_IOCTL_ENCODE | if tag.is_some() { F_RECOVERABLE } else { 0 };
    out[24..32].copy_from_slice(&flags.to_ne_bytes());
    out[32..40].copy_from_slice(&tag.unwrap_or(0).to_ne_bytes());
    out
}

impl Info {
    /// Reads the kernel's description.
    pub(super) fn parse(bytes: &[u8; INFO_LEN]) -> Self {
        let half = |at: usize| u16::from_ne_bytes([bytes[at], bytes[at + 1]]);
        let word = |at: usize| u32::from_ne_bytes(std::array::from_fn(|n| bytes[at + n]));
        let long = |at: usize| u64::from_ne_bytes(std::array::from_fn(|n| bytes[at + n]));
        Self {
            id: word(12),
            depth: half(2),
            max_io: word(8),
            state: match half(4) {
                0 => DevState::Dead,
                1 => DevState::Live,
                2 => DevState::Quiesced,
                _ => DevState::Other,
            },
            is_recoverable: long(24) & F_RECOVERABLE == F_RECOVERABLE,
            tag: long(32),
            owner: word(40),
        }
    }
}

/// Largest IO in bytes that both the kernel and the disk support, in whole pages.
pub(super) fn max_io(limits: &Limits) -> u32 {
    const MOST: u32 = 512 << 10;
    (limits.max_io - limits.max_io % 4096).clamp(4096, MOST)
}

/// Parameters of a disk. [NB-52]
pub(super) fn params(limits: &Limits, max_io: u32) -> [u8; PARAMS_LEN] {
    let mut attrs = 0;
    for (has, attr) in [
        (limits.read_only, READ_ONLY),
        (limits.write_cache, VOLATILE_CACHE),
        (limits.write_cache && limits.fua, FUA),
    ] {
        attrs |= if has { attr } else { 0 };
    }
    let changes = !limits.read_only;
    let discard = limits.discard.filter(|_| changes);
    let zeroes = if changes { limits.max_write_zeroes / 512 } else { 0 };
    let types = if discard.is_some() || zeroes > 0 { BASIC | DISCARD } else { BASIC };
    // The kernel requires a granularity for writes of zeroes too, which use the same parameters.
    let granularity = discard.map_or(0, |d| d.granularity).max(limits.logical);
    let sectors = |bytes: u64| u32::try_from(bytes / 512).unwrap_or(u32::MAX);
    let physical = limits.physical.clamp(limits.logical, 1 << 16);
    let mut out = Vec::with_capacity(PARAMS_LEN);
    out.extend((PARAMS_LEN as u32).to_ne_bytes());
    out.extend(types.to_ne_bytes());
    out.extend(attrs.to_ne_bytes());
    // Shifts of the logical and physical block, of the best IO and of the smallest.
    for bytes in [limits.logical, physical, max_io, physical] {
        out.push(bytes.ilog2() as u8);
    }
    out.extend((max_io / 512).to_ne_bytes());
    out.extend(0_u32.to_ne_bytes());
    out.extend((limits.bytes / 512).to_ne_bytes());
    out.extend(0_u64.to_ne_bytes());
    out.extend(discard.map_or(0, |d| d.alignment).to_ne_bytes());
    out.extend(granularity.to_ne_bytes());
    out.extend(discard.map_or(0, |d| sectors(d.max_bytes)).to_ne_bytes());
    out.extend(zeroes.to_ne_bytes());
    out.extend(u16::from(discard.is_some()).to_ne_bytes());
    out.extend([0; 2]);
    let mut bytes = [0; PARAMS_LEN];
    bytes.copy_from_slice(&out);
    bytes
}

/// Returns the bytes of a request for the parameters of a device.
pub(super) fn no_params() -> [u8; PARAMS_LEN] {
    let mut out = [0; PARAMS_LEN];
    out[..4].copy_from_slice(&(PARAMS_LEN as u32).to_ne_bytes());
    out
}

/// Tells whether a device with these parameters can continue with a disk that would have `now`: it
/// may have become longer, and differ in what is only a hint. [NB-75]
pub(super) fn can_continue(device: &[u8; PARAMS_LEN], now: &[u8; PARAMS_LEN]) -> bool {
    let word =
        |of: &[u8; PARAMS_LEN], at: usize| u32::from_ne_bytes(std::array::from_fn(|n| of[at + n]));
    let sectors = |of: &[u8; PARAMS_LEN]| u64::from_ne_bytes(std::array::from_fn(|n| of[24 + n]));
    // The kernel adds kinds of its own.
    let kinds = |of: &[u8; PARAMS_LEN]| word(of, 4) & (BASIC | DISCARD);
    let logical_block = |of: &[u8; PARAMS_LEN]| of[12];
    let discard = |of: &[u8; PARAMS_LEN]| (kinds(of) & DISCARD != 0).then(|| of[40..].to_vec());
    kinds(device) == kinds(now)
        && word(device, 8) == word(now, 8)
        && logical_block(device) == logical_block(now)
        && sectors(device) <= sectors(now)
        && discard(device) == discard(now)
}

/// One request, as the kernel describes it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Desc {
    /// `None`: none that a disk knows.
    pub(super) op: Option<IoOp>,
    pub(super) fua: bool,
    pub(super) nounmap: bool,
    pub(super) sectors: u32,
    pub(super) start_sector: u64,
}

impl Desc {
    /// From the first three words of the description. [NB-52]
    pub(super) fn new(op_flags: u32, sectors: u32, start_sector: u64) -> Self {
        let op = match op_flags & 0xff {
            0 => Some(IoOp::Read),
            1 => Some(IoOp::Write),
            2 => Some(IoOp::Flush),
            3 => Some(IoOp::Discard),
            5 => Some(IoOp::WriteZeroes),
            _ => None,
        };
        let (fua, nounmap) = (op_flags & 1 << 13 != 0, op_flags & 1 << 15 != 0);
        Self { op, fua, nounmap, sectors, start_sector }
    }
}

#[cfg(test)]
mod tests {
    use bowline_rnbd::Discard;

    use super::*;

    #[test]
    fn the_largest_disk_and_the_largest_discards_are_told_whole() {
        // tests [NB-52]
        let max_bytes = u64::from(Limits::IO_MAX);
        let discard = Discard { max_bytes, granularity: 1 << 31, alignment: (1 << 31) - 512 };
        let bytes = Limits::BYTES_MAX - 511;
        let reported = params(&Limits { discard: Some(discard), ..Limits::plain(bytes) }, 1 << 19);
        assert_eq!(reported[24..32], (bytes / 512).to_ne_bytes());
        let words = [(1 << 31) - 512, 1 << 31, Limits::IO_MAX / 512].map(u32::to_ne_bytes);
        assert_eq!(reported[40..52], words.concat());
        assert_eq!(params(&Limits::plain(0), 1 << 19)[24..32], [0; 8]);
    }

    #[test]
    fn layouts_are_the_kernels() {
        assert_eq!(Control::AddDev as u32, 0xc020_7504);
        assert_eq!(Io::CommitAndFetch as u32, 0xc010_7521);
        let command = control(3, 0x1122, 60, 9);
        assert_eq!(command[..8], [3, 0, 0, 0, 0xff, 0xff, 60, 0]);
        assert_eq!((command[8], command[9], command[16]), (0x22, 0x11, 9));
        assert_eq!(io(5, -5, 1), [0, 0, 5, 0, 0xfb, 0xff, 0xff, 0xff, 1, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(Control::GetDevInfo as u32, 0x8020_7502);
        assert_eq!(Control::EndUserRecovery as u32, 0xc020_7511);
        let mut described = new_device(128, 1 << 19, Some(0x1234));
        described[4] = 2;
        let expected = Info {
            id: u32::MAX,
            depth: 128,
            max_io: 1 << 19,
            state: DevState::Quiesced,
            is_recoverable: true,
            tag: 0x1234,
            owner: 0,
        };
        assert_eq!(Info::parse(&described), expected);
        assert!(!Info::parse(&new_device(128, 1 << 19, None)).is_recoverable);
    }

    #[test]
    fn attributes_say_what_the_disk_can_do() {
        // tests [NB-52]
        let discard = Discard { max_bytes: 8 << 20, granularity: 4096, alignment: 512 };
        let limits = Limits {
            write_cache: true,
            fua: true,
            discard: Some(discard),
            max_write_zeroes: 1 << 20,
            ..Limits::plain(1 << 30)
        };
        let word = |bytes: &[u8; PARAMS_LEN], at: usize| {
            u32::from_ne_bytes(bytes[at..at + 4].try_into().unwrap())
        };
        let all = params(&limits, 1 << 19);
        assert_eq!((word(&all, 0), word(&all, 4), word(&all, 8)), (60, 3, 0b1100));
        assert_eq!(all[12..16], [9, 12, 19, 12]);
        assert_eq!((word(&all, 16), word(&all, 24)), (1024, 1 << 21));
        assert_eq!((word(&all, 40), word(&all, 44)), (512, 4096));
        assert_eq!((word(&all, 48), word(&all, 52), all[56]), (16384, 2048, 1));
        let zeroes = params(&Limits { discard: None, ..limits }, 1 << 19);
        assert_eq!((word(&zeroes, 4), word(&zeroes, 44), word(&zeroes, 48)), (3, 512, 0));
        assert_eq!((word(&zeroes, 52), zeroes[56]), (2048, 0));
        let ro = params(&Limits { read_only: true, write_cache: false, ..limits }, 1 << 19);
        assert_eq!((word(&ro, 4), word(&ro, 8)), (1, 1));
        assert_eq!(max_io(&limits), 512 << 10);
        assert_eq!(max_io(&Limits { max_io: 126_976 + 512, ..limits }), 126_976);
    }

    #[test]
    fn a_device_continues_with_the_same_disk_or_a_longer_one() {
        // tests [NB-75]
        let discard = Discard { max_bytes: 8 << 20, granularity: 4096, alignment: 512 };
        let limits = Limits { write_cache: true, fua: true, ..Limits::plain(1 << 30) };
        let now = |limits: Limits| params(&limits, 1 << 19);
        let mut device = now(limits);
        // A kind that the kernel adds.
        device[4] |= 1 << 2;
        let fits = |limits: Limits| can_continue(&device, &now(limits));
        assert!(fits(limits) && fits(Limits { bytes: 2 << 30, physical: 8192, ..limits }));
        for other in [
            Limits { bytes: (1 << 30) - 512, ..limits },
            Limits { logical: 4096, physical: 4096, ..limits },
            Limits { write_cache: false, ..limits },
            Limits { fua: false, ..limits },
            Limits { read_only: true, ..limits },
            Limits { discard: Some(discard), ..limits },
        ] {
            assert!(!fits(other), "{other:?}");
        }
    }

    #[test]
    fn requests_are_told_apart() {
        // tests [NB-52]
        let write = Desc::new(1 | 1 << 13, 8, 100);
        assert_eq!((write.op, write.fua, write.nounmap), (Some(IoOp::Write), true, false));
        assert_eq!(Desc::new(5 | 1 << 15, 8, 0).op, Some(IoOp::WriteZeroes));
        assert_eq!(Desc::new(4, 8, 0).op, None, "write same");
        assert_eq!(Desc::new(12, 8, 0).op, None, "zones");
    }
}
