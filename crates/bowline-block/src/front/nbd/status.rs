//! Extents of a disk for NBD_CMD_BLOCK_STATUS.

use bowline_rnbd::Limits;

use super::reply::Descriptor;
use crate::device::{Allocation, BlockDevice};

/// Most extents that the disk is asked for in one request: each may take two system calls.
const LOOKUPS_MAX: usize = 1024;

/// NBD_STATE_HOLE and NBD_STATE_ZERO.
const HOLE_AND_ZERO: u32 = 3;

/// How far the extents may go.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Extents {
    /// One, within the request.
    One,
    /// As many as there are; the last may continue beyond the request.
    Several,
}

/// Returns the first extents of a range that is not empty and lies within the disk: whole blocks,
/// at least one of them. May wait for the storage.
pub(super) fn descriptors(
    disk: &dyn BlockDevice,
    limits: &Limits,
    offset: u64,
    len: u64,
    extents: Extents,
) -> Vec<Descriptor> {
    let end = offset + len;
    let known_until = if extents == Extents::One { end } else { limits.bytes };
    let mut out: Vec<Descriptor> = Vec::new();
    let mut at = offset;
    for _ in 0..LOOKUPS_MAX {
        let rest = known_until - at;
        let found = disk.extent(at, rest);
        let found = whole_blocks(found.len, found.allocation, limits.logical.into(), rest);
        match out.last_mut() {
            Some(last) if last.state == found.state => last.len += found.len,
            Some(_) if extents == Extents::One => break,
            _ => out.push(found),
        }
        at += found.len;
        if at >= end {
            break;
        }
    }
    out
}

/// Rounds an extent to blocks: one that is a hole in part is not a hole.
fn whole_blocks(len: u64, allocation: Allocation, block: u64, rest: u64) -> Descriptor {
    let len = len.min(rest);
    match len - len % block {
        whole if allocation == Allocation::Hole && whole > 0 => {
            Descriptor { len: whole, state: HOLE_AND_ZERO }
        }
        _ => {
            let hole = allocation == Allocation::Hole;
            let len = if hole { block } else { len.next_multiple_of(block).max(block) };
            Descriptor { len: len.min(rest), state: 0 }
        }
    }
}

#[cfg(test)]
mod tests {
    use bowline_rnbd::Errno;

    use super::*;
    use crate::device::{DeviceMem, DiskEvent, DiskIo, Extent};

    /// A disk of 1 MiB whose extents are these lengths, in turn data and hole.
    struct Striped(&'static [u64]);

    impl BlockDevice for Striped {
        fn limits(&self) -> Limits {
            Limits::plain(1 << 20)
        }
        fn name(&self) -> &str {
            "striped"
        }
        fn memory(&self, _: usize) -> Result<DeviceMem, Errno> {
            Err(Errno::ENOMEM)
        }
        fn submit(&self, _: &mut Vec<DiskIo>) {}
        fn on_change(&self, _: Box<dyn Fn(DiskEvent) + Send + Sync>) {}
        fn extent(&self, offset: u64, _: u64) -> Extent {
            let mut begin = 0;
            for (i, len) in self.0.iter().cycle().enumerate() {
                if begin + len > offset {
                    let hole = i % 2 == 1;
                    let allocation = if hole { Allocation::Hole } else { Allocation::Unknown };
                    return Extent { len: begin + len - offset, allocation };
                }
                begin += len;
            }
            Extent { len: 0, allocation: Allocation::Hole }
        }
    }

    fn found(stripes: &'static [u64], offset: u64, len: u64, extents: Extents) -> Vec<(u64, u32)> {
        let disk = Striped(stripes);
        let found = descriptors(&disk, &disk.limits(), offset, len, extents);
        found.into_iter().map(|found| (found.len, found.state)).collect()
    }

    #[test]
    fn extents_cover_the_request_and_the_last_may_be_longer() {
        let stripes = &[4096, 8192, 4096, 1 << 20];
        let all = vec![(4096, 0), (8192, 3), (4096, 0), ((1 << 20) - 16_384, 3)];
        assert_eq!(found(stripes, 0, 1 << 20, Extents::Several), all);
        assert_eq!(found(stripes, 0, 16_896, Extents::Several), all, "up to the end of the disk");
        assert_eq!(found(stripes, 4608, 512, Extents::Several), [(7680, 3)]);
        assert_eq!(found(stripes, 4608, 512, Extents::One), [(512, 3)]);
        assert_eq!(found(stripes, 4608, 1 << 19, Extents::One), [(7680, 3)]);
    }

    #[test]
    fn a_block_that_is_a_hole_in_part_is_data() {
        let stripes = &[100, 1000, 100, 1 << 20];
        // Holes from 100 to 1100, and from 1200 on.
        let blocks = [(512, 0), (512, 3), (512, 0), ((1 << 20) - 1536, 3)];
        assert_eq!(found(stripes, 0, 4096, Extents::Several), blocks);
    }

    #[test]
    fn a_store_that_says_nonsense_ends_in_some_answer() {
        // Nothing at all, and more extents than are looked for.
        assert_eq!(found(&[], 0, 4096, Extents::Several), [(4096, 0)]);
        let many = found(&[512, 512], 0, 1 << 20, Extents::Several);
        assert_eq!(many.len(), LOOKUPS_MAX);
    }
}
