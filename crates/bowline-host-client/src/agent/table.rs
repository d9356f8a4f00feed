//! The ranges given to nodes, checked for each request of a node.
//!
//! There is no lock. An entry of the table has a stamp that changes each time the entry is filled:
//! values read from an entry are valid if its stamp is the same afterwards (a sequence lock).
//!
//! All accesses are in one order (SeqCst). So who takes a range out and then looks at the accesses
//! under way (`thread::wait_for_access`) pairs with the agent, which says that it begins one and
//! then looks here; and the stamp pairs with itself, around what is read and what is filled in.
//! Relaxed are failures of exchanges, which are not used, and `last`, which is a hint.

use core::sync::atomic::Ordering::{Relaxed, SeqCst};
use core::sync::atomic::{AtomicU64, AtomicUsize};

use bowline_host_wire::watch::Room;

use super::{Access, Range, Stays};

/// Stamps of an empty entry, and of one that is being filled.
const FREE: u64 = 0;
const FILLING: u64 = 1;

/// Connection, socket and grant of ranges.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Owner {
    /// Number of the connection over which the node may use them.
    pub(super) connection: usize,
    /// Socket of the call, by the kernel's number.
    pub(super) socket: u64,
    /// Number of the grant: one for each call.
    pub(super) grant: u64,
}

/// Tells whether a node means a grant, of which it names the lower half of the number; with 0 it
/// means any.
const fn is_meant(grant: u64, named: u32) -> bool {
    named == 0 || grant as u32 == named
}

/// A range in the table.
#[derive(Clone, Copy, Debug)]
pub(super) struct Entry {
    pub(super) owner: Owner,
    pub(super) stays: Stays,
    /// Key of a region for peers, once that is known.
    pub(super) key: Option<u32>,
    /// The node may write there.
    pub(super) is_written: bool,
    at: u64,
    len: u64,
    /// Something else may be in its place by now, which can be seen.
    is_watched: bool,
}

impl Entry {
    /// The pages that this range, if it is watched, shares with one that is to be watched, which
    /// keeps clear of it otherwise.
    pub(super) fn shared_pages(&self, room: &mut Room) -> Option<[u64; 3]> {
        if self.is_watched { room.shared_pages(self.at, self.len) } else { None }
    }

    pub(super) const fn overlaps(&self, at: u64, len: u64) -> bool {
        self.at < at.saturating_add(len) && at < self.at.saturating_add(self.len)
    }
}

/// What a node wants to use.
#[derive(Clone, Copy, Debug)]
pub(super) struct Wanted {
    /// As in a request of a node.
    pub(super) grant: u32,
    pub(super) at: u64,
    pub(super) len: u64,
    /// `None`: any.
    pub(super) access: Option<Access>,
}

/// A range that was found: its entry and stamp.
#[derive(Clone, Copy, Debug)]
pub(super) struct Found {
    place: usize,
    stamp: u64,
    /// The range is watched.
    pub(super) is_watched: bool,
}

/// In the word with access and lifetime: the range is watched.
const WATCHED: u64 = 1 << 15;

struct Place {
    stamp: AtomicU64,
    at: AtomicU64,
    len: AtomicU64,
    /// Access in the lowest byte, lifetime above it, connection above that.
    what: AtomicU64,
    socket: AtomicU64,
    grant: AtomicU64,
    /// The key plus one; 0 for none.
    key: AtomicU64,
}

impl Place {
    const fn new() -> Self {
        Self {
            stamp: AtomicU64::new(FREE),
            at: AtomicU64::new(0),
            len: AtomicU64::new(0),
            what: AtomicU64::new(0),
            socket: AtomicU64::new(0),
            grant: AtomicU64::new(0),
            key: AtomicU64::new(0),
        }
    }

    /// Returns the range of the entry, if it does not change while it is read.
    fn entry(&self) -> Option<(u64, Entry)> {
        let stamp = self.stamp.load(SeqCst);
        if stamp <= FILLING {
            return None;
        }
        let what = self.what.load(SeqCst);
        let owner = Owner {
            connection: (what >> 16) as usize,
            socket: self.socket.load(SeqCst),
            grant: self.grant.load(SeqCst),
        };
        let stays = match what >> 8 & 0x7f {
            0 => Stays::Call,
            1 => Stays::Region,
            _ => Stays::Operation,
        };
        let key = self.key.load(SeqCst).checked_sub(1).map(|key| key as u32);
        let is_written = what & Access::Write as u64 != 0;
        let (at, len) = (self.at.load(SeqCst), self.len.load(SeqCst));
        let is_watched = what & WATCHED != 0;
        let entry = Entry { owner, stays, key, is_written, at, len, is_watched };
        (self.stamp.load(SeqCst) == stamp).then_some((stamp, entry))
    }

    /// Returns the stamp of the entry if a connection may do this access here, and whether it is
    /// watched.
    fn lets(&self, connection: usize, wanted: &Wanted) -> Option<(u64, bool)> {
        let Wanted { grant, at, len, access } = *wanted;
        let access = access.map_or(0, |access| access as u8);
        let stamp = self.stamp.load(SeqCst);
        let what = self.what.load(SeqCst);
        let offset = at.checked_sub(self.at.load(SeqCst))?;
        let is_let = stamp > FILLING
            && (what >> 16) as usize == connection
            && is_meant(self.grant.load(SeqCst), grant)
            && what as u8 & access == access
            && offset.checked_add(len)? <= self.len.load(SeqCst);
        (is_let && self.stamp.load(SeqCst) == stamp).then_some((stamp, what & WATCHED != 0))
    }
}

/// All ranges that a process has given.
pub(super) struct Table<const N: usize> {
    places: [Place; N],
    /// All entries from this one on are empty.
    end: AtomicUsize,
    /// The entry of the last request: the next one likely uses it, too.
    last: AtomicUsize,
    stamps: AtomicU64,
}

impl<const N: usize> Table<N> {
    pub(super) const fn new() -> Self {
        let places = [const { Place::new() }; N];
        let (end, last) = (AtomicUsize::new(0), AtomicUsize::new(0));
        Self { places, end, last, stamps: AtomicU64::new(FILLING + 1) }
    }

    fn used(&self) -> &[Place] {
        &self.places[..self.end.load(SeqCst).min(N)]
    }

    /// Adds ranges, of which those with some indices are watched; `false` if there is not enough
    /// room, and then some may have been added.
    pub(super) fn add(
        &self,
        owner: Owner,
        ranges: &[Range],
        is_watched: impl Fn(usize) -> bool,
    ) -> bool {
        let mut places = self.places.iter().enumerate();
        ranges.iter().enumerate().all(|(n, range)| {
            let take = |place: &Place| {
                place.stamp.compare_exchange(FREE, FILLING, SeqCst, Relaxed).is_ok()
            };
            let Some((at, place)) = places.find(|(_, place)| take(place)) else { return false };
            self.end.fetch_max(at + 1, SeqCst);
            let watched = if is_watched(n) { WATCHED } else { 0 };
            let what = range.access as u64 | (range.stays as u64) << 8 | watched;
            place.at.store(range.at, SeqCst);
            place.len.store(range.len, SeqCst);
            place.what.store(what | (owner.connection as u64) << 16, SeqCst);
            place.socket.store(owner.socket, SeqCst);
            place.grant.store(owner.grant, SeqCst);
            place.key.store(0, SeqCst);
            place.stamp.store(self.stamps.fetch_add(1, SeqCst), SeqCst);
            true
        })
    }

    /// Finds one range that contains all that is wanted and that a connection may use so.
    pub(super) fn find(&self, connection: usize, wanted: &Wanted) -> Option<Found> {
        let lets = |n: usize, place: &Place| {
            let (stamp, is_watched) = place.lets(connection, wanted)?;
            Some(Found { place: n, stamp, is_watched })
        };
        let last = self.last.load(Relaxed);
        if let Some(found) = self.places.get(last).and_then(|place| lets(last, place)) {
            return Some(found);
        }
        let found = self.used().iter().enumerate().find_map(|(n, place)| lets(n, place))?;
        self.last.store(found.place, Relaxed);
        Some(found)
    }

    /// Tells whether a range that was found is still given.
    pub(super) fn is_still(&self, Found { place, stamp, .. }: Found) -> bool {
        self.places.get(place).is_some_and(|place| place.stamp.load(SeqCst) == stamp)
    }

    /// Removes ranges; tells whether one of them was writable.
    pub(super) fn take_out(&self, which: impl Fn(&Entry) -> bool) -> bool {
        let mut is_written = false;
        for place in self.used() {
            if let Some((stamp, entry)) = place.entry()
                && which(&entry)
                && place.stamp.compare_exchange(stamp, FREE, SeqCst, Relaxed).is_ok()
            {
                is_written |= entry.is_written;
            }
        }
        is_written
    }

    /// Empties the table, in a process where no other thread uses it.
    pub(super) fn clear(&self) {
        self.used().iter().for_each(|place| place.stamp.store(FREE, SeqCst));
    }

    /// Records the key of the region of a grant.
    pub(super) fn set_key(&self, grant: u64, key: u32) {
        for place in self.used() {
            if let Some((_, entry)) = place.entry()
                && entry.owner.grant == grant
                && entry.stays == Stays::Region
            {
                place.key.store(u64::from(key) + 1, SeqCst);
            }
        }
    }

    /// Tells whether there is such a range.
    pub(super) fn any(&self, which: impl Fn(&Entry) -> bool) -> bool {
        self.used().iter().filter_map(Place::entry).any(|(_, entry)| which(&entry))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWNER: Owner = Owner { connection: 3, socket: 5, grant: 9 };

    fn range(at: u64, len: u64, access: Access, stays: Stays) -> Range {
        Range { at, len, access, stays }
    }

    fn any(at: u64, len: u64, access: Option<Access>) -> Wanted {
        Wanted { grant: 0, at, len, access }
    }

    // tests [RMR-12]
    #[test]
    fn only_what_lies_in_one_given_range_is_found() {
        let table = Table::<4>::new();
        let region = range(1000, 100, Access::Both, Stays::Region);
        let read = range(1100, 50, Access::Read, Stays::Operation);
        let last = range(u64::MAX - 9, 8, Access::Write, Stays::Operation);
        assert!(table.add(OWNER, &[region, read, last], |_| false));
        let finds = |at, len, access| table.find(3, &any(at, len, Some(access))).is_some();
        for access in [Access::Read, Access::Write, Access::Both] {
            assert!(finds(1000, 100, access) && finds(1099, 1, access) && finds(1000, 1, access));
            assert!(!finds(999, 1, access) && !finds(999, 2, access) && !finds(1000, 101, access));
            assert!(!finds(1099, 2, access), "of two neighbours");
            assert!(!finds(1050, u64::MAX, access) && !finds(u64::MAX, 1, access));
        }
        assert!(finds(1100, 50, Access::Read) && !finds(1100, 1, Access::Write));
        assert!(!finds(1100, 1, Access::Both));
        assert!(finds(u64::MAX - 9, 8, Access::Write) && !finds(u64::MAX - 9, 8, Access::Read));
        assert!(!finds(u64::MAX - 9, 9, Access::Write) && !finds(u64::MAX - 1, 1, Access::Write));
        assert!(
            table.find(3, &any(1100, 50, None)).is_some()
                && table.find(3, &any(1150, 1, None)).is_none()
        );
        assert!(table.find(2, &any(1000, 1, None)).is_none(), "of another node");
    }

    // tests [RMR-13]
    #[test]
    fn a_node_that_names_a_grant_finds_nothing_of_another() {
        let table = Table::<2>::new();
        let region = range(1000, 100, Access::Both, Stays::Region);
        let (first, second) = (1 << 32 | 8, 1 << 32 | 9);
        assert!(table.add(Owner { grant: second, ..OWNER }, &[region], |_| false));
        let finds = |grant| table.find(3, &Wanted { grant, ..any(1000, 8, None) }).is_some();
        assert!(finds(9) && finds(0) && !finds(8) && !finds(1));
        assert!(table.add(Owner { grant: first, ..OWNER }, &[region], |_| false));
        assert!(finds(8) && finds(9) && !finds(7));
    }

    // tests [RMR-12]
    #[test]
    fn what_was_taken_out_is_gone_and_its_place_is_used_again() {
        let table = Table::<2>::new();
        let region = range(1000, 100, Access::Both, Stays::Region);
        let read = range(5000, 100, Access::Read, Stays::Operation);
        assert!(table.add(OWNER, &[region, read], |_| false));
        assert!(!table.add(OWNER, &[region], |_| false), "full");
        let found = table.find(3, &any(1000, 8, None)).unwrap();
        table.set_key(8, 1);
        table.set_key(9, 0xffff_ffff);
        assert!(!table.take_out(|entry| entry.key == Some(1)));
        assert!(table.is_still(found));
        assert!(!table.take_out(|entry| entry.stays == Stays::Operation), "it was only read");
        assert!(table.take_out(|entry| entry.key == Some(0xffff_ffff) && entry.owner == OWNER));
        assert!(!table.is_still(found) && table.find(3, &any(1000, 8, None)).is_none());
        assert!(!table.any(|_| true));
        assert!(table.add(OWNER, &[region, region], |_| false));
        assert!(!table.is_still(found), "another in the same place");
        assert!(table.take_out(|entry| entry.key.is_none()), "the key of before is not its");
    }
}
