//! Watching memory of a program: whether what is at an address is what was there when a call named
//! it, as far as the kernel tells.
//!
//! A kernel that has memory for RDMA pins its pages. Here the memory is reached by its address, and
//! the program may unmap it and map something else there, by a call of the C library's own that
//! nobody sees. So the mapping is registered with a `userfaultfd` of the program, for faults that
//! never come: no page is protected. A mapping loses this when it is unmapped or moved, and what
//! takes its place does not have it. [`LOOK`] asks: it takes protection away that is nowhere, and
//! fails where some of the range is not registered.
//!
//! No event is asked for, so that a program never waits for who watches. Not every mapping can be
//! watched: files cannot, nor can anything before Linux 5.7.

/// Flags of the descriptor. No fault is handled, so that users who may not see the kernel's may
/// make one: close-on-exec, non-blocking, `UFFD_USER_MODE_ONLY`.
pub const FLAGS: i32 = 0o2_000_000 | 0o4_000 | 1;
/// How the system names such a descriptor.
pub const NAME: &str = "anon_inode:[userfaultfd]";
/// What `fstatfs` says of it (`ANON_INODE_FS_MAGIC`).
pub const FILE_SYSTEM: u32 = 0x0904_1934;

/// `UFFDIO_API`.
pub const API: u32 = 0xc018_aa3f;
/// `UFFDIO_REGISTER`.
pub const REGISTER: u32 = 0xc020_aa00;
/// `UFFDIO_WRITEPROTECT`, which here protects nothing.
pub const LOOK: u32 = 0xc018_aa06;

const PAGE: u64 = 4096;
/// What is registered around a range where that can be: so that few mappings are split, and no huge
/// page is.
const AROUND: u64 = 2 << 20;

/// The argument of [`API`]: the version, and no features.
pub const fn api() -> [u64; 3] {
    [0xaa, 0, 0]
}

/// Address and length of what has this alignment and contains a range; `None` for what is too long
/// or empty.
fn around(at: u64, len: u64, alignment: u64) -> Option<[u64; 2]> {
    let end = at.checked_add(len).filter(|_| len > 0)?;
    let end = end.checked_next_multiple_of(alignment)?;
    let start = at - at % alignment;
    Some([start, end - start])
}

/// Arguments of [`REGISTER`] for a range: the next is for where one is refused.
pub fn register(at: u64, len: u64) -> impl Iterator<Item = [u64; 4]> {
    /// `UFFDIO_REGISTER_MODE_WP`.
    const MODE: u64 = 2;
    [AROUND, PAGE]
        .into_iter()
        .filter_map(move |alignment| around(at, len, alignment))
        .map(|[start, len]| [start, len, MODE, 0])
}

/// The argument of [`LOOK`] for a range.
pub fn look(at: u64, len: u64) -> Option<[u64; 3]> {
    around(at, len, PAGE).map(|[start, len]| [start, len, 0])
}

#[cfg(test)]
mod tests {
    extern crate std;

    use super::*;
    use std::vec::Vec;

    #[test]
    fn ranges_are_whole_pages() {
        assert_eq!(look(4096, 4096), Some([4096, 4096, 0]));
        assert_eq!(look(4095, 2), Some([0, 8192, 0]));
        assert_eq!(look(5, 0), None);
        assert_eq!(look(u64::MAX, 1), None);
        assert_eq!(look(u64::MAX - 5, 2), None);
        let all: Vec<_> = register((2 << 20) - 5, 10).collect();
        assert_eq!(all, [[0, 4 << 20, 2, 0], [(2 << 20) - 4096, 8192, 2, 0]]);
        assert_eq!(register(u64::MAX - 8192, 1).count(), 1, "no chunk ends there");
    }
}
