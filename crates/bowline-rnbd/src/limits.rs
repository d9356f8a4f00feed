//! Limits of a disk in the answer to an OPEN: converted to the message and back.

use bowline_wire::rnbd::{self as wire, OpenRsp};

use crate::{Discard, Errno, Limits};

/// Bytes of a sector, whatever the block size.
const SECTOR: u64 = wire::SECTOR as u64;
/// Largest number of 512-byte sectors of one request, whose length in bytes has 32 bits [NB-59].
const SECTORS_MAX: u32 = Limits::IO_MAX / wire::SECTOR;
/// Bytes of a page, the largest logical block [NB-30].
const PAGE: u32 = 4096;
/// Bytes of the largest power of two that fits the 16-bit field of the physical block size.
const PHYSICAL_MAX: u32 = 1 << 15;

fn sectors(bytes: u64) -> u32 {
    u32::try_from(bytes / SECTOR).unwrap_or(u32::MAX)
}

fn small(n: u32) -> u16 {
    u16::try_from(n).unwrap_or(u16::MAX)
}

/// Builds the answer to an OPEN [NB-9] [NB-47].
pub(crate) fn open_rsp(device_id: u32, limits: &Limits) -> OpenRsp {
    let discard = limits.discard;
    OpenRsp {
        device_id,
        nsectors: limits.bytes / SECTOR,
        max_hw_sectors: sectors(u64::from(limits.max_io)),
        max_write_zeroes_sectors: sectors(u64::from(limits.max_write_zeroes)).min(SECTORS_MAX),
        max_discard_sectors: discard.map_or(0, |d| sectors(d.max_bytes).min(SECTORS_MAX)),
        discard_granularity: discard.map_or(0, |d| d.granularity),
        discard_alignment: discard.map_or(0, |d| d.alignment),
        physical_block_size: small(limits.physical.min(PHYSICAL_MAX)),
        logical_block_size: small(limits.logical),
        max_segments: limits.max_segments,
        secure_discard: u16::from(limits.secure_erase),
        obsolete_rotational: 0,
        cache_policy: if limits.fua { wire::CACHE_FUA } else { 0 }
            | if limits.write_cache { wire::CACHE_WRITE_BACK } else { 0 },
    }
}

/// Limits of a session for each IO.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SessionLimits {
    /// Largest read or write in bytes.
    pub max_io: u32,
    /// Largest number of memory segments of one request.
    pub max_segments: u16,
}

/// Converts an OPEN answer to the limits of a disk of this session [NB-30] [NB-59].
///
/// # Errors
/// `EOVERFLOW` for a size above [`Limits::BYTES_MAX`], `EINVAL` for other values that no disk can
/// have.
pub(crate) fn of_open_rsp(
    rsp: &OpenRsp,
    session: SessionLimits,
    read_only: bool,
) -> Result<Limits, Errno> {
    let logical = u32::from(rsp.logical_block_size);
    if !logical.is_power_of_two() || !(512..=PAGE).contains(&logical) {
        return Err(Errno::EINVAL);
    }
    let unit = u64::from(logical);
    // Users of the disk rely on a power of two; servers whose block size does not fit the field
    // send 65535.
    let physical = rsp.physical_block_size.checked_ilog2().map_or(0, |log| 1 << log);
    // A granularity that is no multiple of the block size is ignored.
    let whole = |bytes: &u32| *bytes > 0 && bytes.is_multiple_of(logical);
    let granularity = Some(rsp.discard_granularity).filter(whole).unwrap_or(logical);
    let most = |sectors: u32, unit: u64| {
        let bytes = u64::from(sectors.min(SECTORS_MAX)) * SECTOR;
        bytes - bytes % unit
    };
    let discard = match most(rsp.max_discard_sectors, u64::from(granularity)) {
        0 => most(rsp.max_discard_sectors, unit),
        bytes => bytes,
    };
    let cache = rsp.cache_policy & wire::CACHE_WRITE_BACK != 0;
    let bytes = rsp.nsectors.checked_mul(SECTOR).filter(|bytes| *bytes <= Limits::BYTES_MAX);
    let bytes = bytes.ok_or(Errno::EOVERFLOW)?;
    let max_io = session.max_io - session.max_io % logical;
    if max_io == 0 {
        return Err(Errno::EINVAL);
    }
    Ok(Limits {
        bytes: bytes - bytes % unit,
        logical,
        physical: logical.max(physical),
        max_io,
        max_segments: session.max_segments,
        discard: (discard > 0).then_some(Discard {
            max_bytes: discard,
            granularity,
            alignment: rsp.discard_alignment % granularity,
        }),
        max_write_zeroes: u32::try_from(most(rsp.max_write_zeroes_sectors, unit))
            .unwrap_or(u32::MAX),
        secure_erase: rsp.secure_discard != 0 && discard > 0,
        write_cache: cache,
        fua: cache && rsp.cache_policy & wire::CACHE_FUA != 0,
        read_only,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const SESSION: SessionLimits = SessionLimits { max_io: 126_976, max_segments: 128 };

    fn full() -> Limits {
        Limits {
            discard: Some(Discard { max_bytes: 1 << 30, granularity: 4096, alignment: 512 }),
            max_write_zeroes: 1 << 30,
            write_cache: true,
            fua: true,
            ..Limits::plain(1 << 40)
        }
    }

    #[test]
    fn session_limits_replace_storage_limits_in_the_answer() {
        // tests [NB-9] [NB-30]
        let read = of_open_rsp(&open_rsp(3, &full()), SESSION, true).unwrap();
        let wanted = Limits { max_io: 126_976, max_segments: 128, read_only: true, ..full() };
        assert_eq!(read, wanted);
        assert_eq!(open_rsp(3, &full()).device_id, 3);
        assert_eq!(open_rsp(3, &full()).cache_policy, 3);
    }

    #[test]
    fn lengths_beyond_thirty_two_bits_are_cut() {
        // tests [NB-47] [NB-59]
        let huge = Limits {
            discard: Some(Discard { max_bytes: u64::MAX, granularity: 4096, alignment: 0 }),
            max_write_zeroes: u32::MAX,
            ..full()
        };
        let rsp = open_rsp(0, &huge);
        assert_eq!(rsp.max_discard_sectors, 8_388_607);
        let kernel = OpenRsp { max_discard_sectors: u32::MAX, ..rsp };
        let read = of_open_rsp(&kernel, SESSION, false).unwrap();
        assert_eq!(read.discard.unwrap().max_bytes, (1 << 32) - 4096, "whole pieces of 4096");
    }

    #[test]
    fn a_physical_block_is_a_power_of_two_however_large_it_was() {
        // tests [NB-9] [NB-30]
        for physical in [1 << 15, 1 << 16, 1 << 20] {
            let rsp = open_rsp(0, &Limits { physical, ..full() });
            assert_eq!(rsp.physical_block_size, 32_768);
            assert_eq!(of_open_rsp(&rsp, SESSION, false).unwrap().physical, 32_768);
        }
        for (sent, taken) in [(0, 512), (256, 512), (6000, 4096), (u16::MAX, 32_768)] {
            let rsp = OpenRsp { physical_block_size: sent, ..open_rsp(0, &full()) };
            assert_eq!(of_open_rsp(&rsp, SESSION, false).unwrap().physical, taken, "{sent}");
        }
    }

    #[test]
    fn fua_without_a_cache_is_none() {
        // tests [NB-30]
        let rsp = OpenRsp { cache_policy: 1, ..open_rsp(0, &full()) };
        let read = of_open_rsp(&rsp, SESSION, false).unwrap();
        assert!(!read.fua && !read.write_cache);
    }

    #[test]
    fn block_sizes_out_of_range_make_no_disk() {
        // tests [NB-30]
        for size in [0, 256, 768, 8192] {
            let rsp = OpenRsp { logical_block_size: size, ..open_rsp(0, &full()) };
            assert_eq!(of_open_rsp(&rsp, SESSION, false), Err(Errno::EINVAL), "{size}");
        }
    }
}
