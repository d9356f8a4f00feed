//! Watching memory of a program: whether what is at an address is what was there when a call named
//! it, as far as the kernel tells.
//!
//! A kernel that has memory for RDMA pins its pages. Here the memory is reached by its address, and
//! the program may unmap it and map something else there, by a call of the C library's own that
//! nobody sees. So the mapping is registered with a `userfaultfd` of the program, for faults that
//! never come: no page is protected. A mapping loses this when it is unmapped or moved, and what
//! takes its place does not have it. [`LOOK`] asks: it takes protection away that is nowhere, and
//! fails where some of the range is mapped and not registered. It passes over what is not mapped.
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

const EINTR: i32 = 4;
const EAGAIN: i32 = 11;
const EBUSY: i32 = 16;

const PAGE: u64 = 4096;
/// What is registered around a range where that can be: so that few mappings are split, and no huge
/// page is.
const AROUND: u64 = 2 << 20;

/// The argument of [`API`]: the version, and no features.
pub const fn api() -> [u64; 3] {
    [0xaa, 0, 0]
}

/// The pages that a range touches: the first address, and the one behind them; `None` for what is
/// too long or empty.
fn pages(at: u64, len: u64) -> Option<[u64; 2]> {
    let end = at.checked_add(len).filter(|_| len > 0)?;
    Some([at - at % PAGE, end.checked_next_multiple_of(PAGE)?])
}

/// Where a range may be registered. What is registered counts as being what it was, whatever it is:
/// a watched range whose memory was replaced would be there again. So nothing is registered that is
/// of other watched ranges, but for those that share a page with this one; these are to be looked
/// at before, for good.
#[derive(Clone, Copy, Debug)]
pub struct Room {
    /// The pages of the range.
    start: u64,
    end: u64,
    /// What is around them and of no other range.
    from: u64,
    to: u64,
}

impl Room {
    /// Where a range may be registered if no other is watched; `None` for one that is too long or
    /// empty.
    pub fn of(at: u64, len: u64) -> Option<Self> {
        let [start, end] = pages(at, len)?;
        let from = start - start % AROUND;
        // At the end of all addresses there is no whole chunk.
        let to = end.checked_next_multiple_of(AROUND).unwrap_or(end);
        Some(Self { start, end, from, to })
    }

    /// The address from which on other ranges matter, and the one behind the last that does.
    pub const fn bounds(&self) -> [u64; 2] {
        [self.from, self.to]
    }

    /// Keeps clear of another range that is watched. Returns the pages that both have, as the
    /// argument of [`LOOK`]; `None` if they share none.
    pub fn shared_pages(&mut self, at: u64, len: u64) -> Option<[u64; 3]> {
        let [start, end] = pages(at, len)?;
        if end <= self.start {
            self.from = self.from.max(end);
            return None;
        }
        if start >= self.end {
            self.to = self.to.min(start);
            return None;
        }
        // What the other has on one side of the shared pages is registered no more than what
        // lies farther off.
        if start < self.start {
            self.from = self.start;
        }
        if end > self.end {
            self.to = self.end;
        }
        let (first, last) = (start.max(self.start), end.min(self.end));
        Some([first, last - first, 0])
    }

    /// Arguments of [`REGISTER`]: the second is for where the first is refused.
    pub const fn register(&self) -> [[u64; 4]; 2] {
        /// `UFFDIO_REGISTER_MODE_WP`.
        const MODE: u64 = 2;
        let Self { start, end, from, to } = *self;
        [[from, to - from, MODE, 0], [start, end - start, MODE, 0]]
    }
}

/// The argument of [`LOOK`] for a range.
pub fn look(at: u64, len: u64) -> Option<[u64; 3]> {
    pages(at, len).map(|[start, end]| [start, end - start, 0])
}

/// Arguments of [`LOOK`] for each page of a range: a look at all of them at once would not find a
/// page that something else was mapped at and is not mapped now.
pub fn look_at_each(at: u64, len: u64) -> impl Iterator<Item = [u64; 3]> {
    let [start, end] = pages(at, len).unwrap_or_default();
    (start..end).step_by(PAGE as usize).map(|page| [page, PAGE, 0])
}

/// Makes a request, which returns an error number, and makes it again where the system asks for
/// that. It does so for as long as an event about the memory has not been read. The library asks
/// for no events; a program that does may never read them. So this ends after some attempts, with
/// `EAGAIN`.
///
/// # Errors
/// Those of the request.
pub fn insist(mut request: impl FnMut() -> Result<(), i32>) -> Result<(), i32> {
    const ATTEMPTS: u32 = 64;
    for _ in 0..ATTEMPTS {
        match request() {
            Err(EINTR | EAGAIN) => {}
            done => return done,
        }
    }
    Err(EAGAIN)
}

/// Registers a range, each time by a request that is made as [`insist`] says; `false` where the
/// system refuses that, as for files.
///
/// # Errors
/// `EBUSY` where no attempt was the last.
pub fn begin(
    room: &Room,
    mut register: impl FnMut(&mut [u64; 4]) -> Result<(), i32>,
) -> Result<bool, i32> {
    for mut range in room.register() {
        match insist(|| register(&mut range)) {
            Ok(()) => return Ok(true),
            Err(EAGAIN) => return Err(EBUSY),
            Err(_) => {}
        }
    }
    Ok(false)
}

#[cfg(test)]
mod tests {
    extern crate std;

    use super::*;

    #[test]
    fn ranges_are_whole_pages() {
        assert_eq!(look(4096, 4096), Some([4096, 4096, 0]));
        assert_eq!(look(4095, 2), Some([0, 8192, 0]));
        assert_eq!(look(5, 0), None);
        assert_eq!(look(u64::MAX, 1), None);
        assert_eq!(look(u64::MAX - 5, 2), None);
        let each = |at, len| look_at_each(at, len).collect::<std::vec::Vec<_>>();
        assert_eq!(each(4095, 2), [[0, 4096, 0], [4096, 4096, 0]]);
        assert_eq!(each(5, 0), [[0; 3]; 0]);
        let register = |at, len| Room::of(at, len).map(|room| room.register());
        let both = [[0, 4 << 20, 2, 0], [(2 << 20) - 4096, 8192, 2, 0]];
        assert_eq!(register((2 << 20) - 5, 10), Some(both));
        let last = u64::MAX - 8191;
        let both = [[last - last % (2 << 20), (2 << 20) - 4096, 2, 0], [last, 4096, 2, 0]];
        assert_eq!(register(last + 5, 1), Some(both), "no chunk ends there");
        assert_eq!(register(5, 0), None);
    }

    // tests [RMR-13]
    #[test]
    fn what_is_registered_has_no_page_of_another_range_but_of_one_that_is_looked_at() {
        const CHUNK: u64 = 2 << 20;
        let page = |n: u64| 5 * CHUNK + 4096 * n;
        let mut room = Room::of(page(100) + 5, 8192).unwrap();
        let shared = |first: u64, count: u64| Some([page(first), 4096 * count, 0]);
        for (at, len, pages) in [
            (page(10), 4096, None),
            (page(7), 9 * 4096 - 1, None),
            (page(100), 4, shared(100, 1)),
            (page(102) + 4095, 1, shared(102, 1)),
            (page(110), 1, None),
            (page(105), 1, None),
            (page(100), 0, None),
        ] {
            assert_eq!(room.shared_pages(at, len), pages, "{at:x} {len}");
        }
        let own = [page(100), 3 * 4096, 2, 0];
        assert_eq!(room.register(), [[page(16), 89 * 4096, 2, 0], own]);
        assert_eq!(room.bounds(), [page(16), page(105)]);
        // What others have beyond the shared pages is not registered either.
        assert_eq!(room.shared_pages(page(99), 4097), shared(100, 1));
        assert_eq!(room.register(), [[page(100), 5 * 4096, 2, 0], own]);
        assert_eq!(room.shared_pages(page(90), 20 * 4096), shared(100, 3));
        assert_eq!(room.register(), [own; 2]);
    }

    #[test]
    fn a_request_that_is_always_to_be_made_again_is_made_some_times() {
        let count = |answer: fn(u32) -> Result<(), i32>| {
            let mut made = 0;
            let done = insist(|| {
                made += 1;
                answer(made)
            });
            (done, made < 1000)
        };
        assert_eq!(count(|_| Err(EAGAIN)), (Err(EAGAIN), true));
        assert_eq!(count(|_| Err(EINTR)), (Err(EAGAIN), true));
        assert_eq!(count(|made| if made < 9 { Err(EAGAIN) } else { Ok(()) }), (Ok(()), true));
        assert_eq!(count(|_| Err(2)), (Err(2), true));
        let room = Room::of(4096, 1).unwrap();
        assert_eq!(begin(&room, |_| Err(EAGAIN)), Err(EBUSY));
        assert_eq!(begin(&room, |_| Err(22)), Ok(false));
        assert_eq!(begin(&room, |range| if range[1] > 4096 { Err(22) } else { Ok(()) }), Ok(true));
    }
}
