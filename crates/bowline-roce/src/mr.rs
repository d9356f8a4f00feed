//! Memory regions: keys, and the memory behind them.

use std::sync::Arc;

use bowline_verbs::{
    Access, Buffer, Error, InvalidReason, MrKeys, Object, PdId, Piece, Qpn, Resource,
};

use crate::burst::Burst;
use crate::mw::Window;
use crate::rng::Rng;
use crate::table::{DirectMap, NumberMap, Numbered};

/// End of the index range: all 24 bits, so that keys are hard to guess; rxe uses 19 [MR-1].
const INDEX_END: u32 = 1 << 24;

/// Rights of peers, which a region whose key is withdrawn does not grant.
const REMOTE_RIGHTS: Access = Access::LOCAL_WRITE.complement();

/// Why a key does not grant an access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum KeyError {
    /// No region or window has this key now.
    Unknown,
    /// The region belongs to another protection domain.
    WrongPd,
    /// The region does not grant the right.
    NoAccess,
    /// Part of the range lies outside of the region.
    OutOfRange,
    /// A window is bound to the region.
    InUse,
    /// It is memory of another process, which does not have it.
    NotThere,
}

/// User of a key: either this side, in a protection domain, or the peer of one of its queue pairs.
/// Windows are for peers only.
#[derive(Clone, Copy, Debug)]
pub(crate) struct KeyUser {
    pd: PdId,
    peer_of: Option<Qpn>,
    /// The request was accepted before, so that it does not matter if the key is withdrawn since.
    accepted: bool,
}

impl KeyUser {
    /// The peer of a queue pair whose request was accepted before.
    pub(crate) const fn accepted(pd: PdId, qpn: Qpn) -> Self {
        Self { pd, peer_of: Some(qpn), accepted: true }
    }
}

impl From<PdId> for KeyUser {
    fn from(pd: PdId) -> Self {
        Self { pd, peer_of: None, accepted: false }
    }
}

impl From<(PdId, Qpn)> for KeyUser {
    fn from((pd, qpn): (PdId, Qpn)) -> Self {
        Self { pd, peer_of: Some(qpn), accepted: false }
    }
}

/// All regions and windows of a device, by the upper 24 bits of their keys.
#[derive(Debug)]
pub(crate) struct MrTable {
    regions: DirectMap<Region>,
    max: usize,
    /// For protection domains within another, the other.
    pub(crate) outer_pds: NumberMap<PdId>,
    pub(crate) windows: NumberMap<Window>,
    pub(crate) max_windows: usize,
}

#[derive(Debug)]
pub(crate) struct Region {
    key: u32,
    /// The key the region was created with; still accepted by `deregister`.
    registered_key: u32,
    /// Peers may not use the region at present: [`MrTable::withdraw_keys`].
    withdrawn: bool,
    pd: PdId,
    access: Access,
    iova: u64,
    /// The bound memory; `None` for a free fast-registration region [MR-6].
    memory: Option<Memory>,
    fast: bool,
    /// Number of windows bound to the region.
    windows: u32,
}

const _: () = assert!(size_of::<Option<Region>>() <= 64, "one line of the processor's cache");

impl Numbered for Region {
    fn number(&self) -> u32 {
        self.key >> 8
    }
}

impl Region {
    /// Makes a region without memory or key.
    const fn new(pd: PdId, access: Access, fast: bool) -> Self {
        let (iova, memory, windows) = (0, None, 0);
        Self {
            key: 0,
            registered_key: 0,
            withdrawn: false,
            pd,
            access,
            iova,
            memory,
            fast,
            windows,
        }
    }

    /// Tells whether the program may name this region by `key`.
    const fn has_key(&self, key: u32) -> bool {
        self.key == key || self.registered_key == key
    }
}

#[derive(Debug)]
enum Memory {
    Contiguous { buffer: Arc<Buffer>, offset: usize, len: usize },
    Scattered(Box<ScatterList>),
}

#[derive(Debug)]
struct ScatterList {
    pieces: Vec<Piece>,
    /// For each piece, the number of bytes up to its end.
    ends: Vec<u64>,
}

impl Memory {
    fn new(pieces: Vec<Piece>) -> Option<Self> {
        let mut ends = Vec::with_capacity(pieces.len());
        let mut total: u64 = 0;
        for piece in &pieces {
            if !fits(&piece.buffer, piece.offset, piece.len) {
                return None;
            }
            total = total.checked_add(piece.len as u64)?;
            ends.push(total);
        }
        if let [_] = pieces.as_slice() {
            let piece = pieces.into_iter().next()?;
            return Some(Self::Contiguous {
                buffer: piece.buffer,
                offset: piece.offset,
                len: piece.len,
            });
        }
        Some(Self::Scattered(Box::new(ScatterList { pieces, ends })))
    }

    fn len(&self) -> u64 {
        match self {
            Self::Contiguous { len, .. } => *len as u64,
            Self::Scattered(pieces) => pieces.ends.last().copied().unwrap_or(0),
        }
    }

    /// Calls `each` for every contiguous part of the `len` bytes from `start` on, which must exist.
    fn for_each(&self, start: u64, len: u64, mut each: impl FnMut(&Arc<Buffer>, usize, usize)) {
        match self {
            Self::Contiguous { buffer, offset, .. } => {
                each(buffer, offset + start as usize, len as usize);
            }
            Self::Scattered(pieces) => {
                let mut at = start;
                let end = start + len;
                let mut index = pieces.ends.partition_point(|end| *end <= start);
                while at < end {
                    let piece = &pieces.pieces[index];
                    let skip = (at - (pieces.ends[index] - piece.len as u64)) as usize;
                    let take = (piece.len - skip).min((end - at) as usize);
                    each(&piece.buffer, piece.offset + skip, take);
                    at += take as u64;
                    index += 1;
                }
            }
        }
    }
}

fn fits(buffer: &Buffer, offset: usize, len: usize) -> bool {
    offset.checked_add(len).is_some_and(|end| end <= buffer.len())
}

impl MrTable {
    pub(crate) fn new(max: usize, max_windows: usize) -> Self {
        let most = INDEX_END as usize / 4;
        Self {
            regions: DirectMap::new(),
            max: max.min(most),
            outer_pds: NumberMap::default(),
            windows: NumberMap::default(),
            max_windows: max_windows.min(most),
        }
    }

    /// Registers a stretch of memory [MR-5].
    pub(crate) fn register(
        &mut self,
        rng: &mut Rng,
        pd: PdId,
        memory: (&Arc<Buffer>, usize, usize),
        iova: Option<u64>,
        access: Access,
    ) -> Result<MrKeys, Error> {
        let region = Self::region(pd, memory, iova, access)?;
        self.insert(rng, region)
    }

    /// Gives a registered region another protection domain, memory and rights, and leaves it its
    /// key. No copy is in progress during the call, as for [`deregister`](Self::deregister).
    pub(crate) fn reregister(
        &mut self,
        key: u32,
        pd: PdId,
        memory: (&Arc<Buffer>, usize, usize),
        iova: Option<u64>,
        access: Access,
    ) -> Result<(), Error> {
        let new = Self::region(pd, memory, iova, access)?;
        let Region { registered_key, withdrawn, windows, .. } = *self.registered(key)?;
        if windows > 0 {
            return Err(Error::Busy(Object::MemoryRegion));
        }
        if let Some(region) = self.regions.get_mut(key >> 8) {
            *region = Region { key, registered_key, withdrawn, ..new };
        }
        Ok(())
    }

    /// Makes a region of a stretch of memory, without a key.
    fn region(
        pd: PdId,
        (buffer, offset, len): (&Arc<Buffer>, usize, usize),
        iova: Option<u64>,
        access: Access,
    ) -> Result<Region, Error> {
        if len == 0 || !fits(buffer, offset, len) {
            return Err(Error::Invalid(InvalidReason::OutsideBuffer));
        }
        let writes = Access::REMOTE_WRITE | Access::REMOTE_ATOMIC;
        if access.intersects(writes) && !access.contains(Access::LOCAL_WRITE) {
            return Err(Error::Invalid(InvalidReason::RemoteWriteOnly));
        }
        let iova = match iova {
            _ if access.contains(Access::ZERO_BASED) => 0,
            Some(iova) => iova,
            None => buffer.addr() + offset as u64,
        };
        if iova.checked_add(len as u64).is_none() {
            return Err(Error::Invalid(InvalidReason::AddressWrap));
        }
        let memory = Memory::Contiguous { buffer: Arc::clone(buffer), offset, len };
        Ok(Region { iova, memory: Some(memory), ..Region::new(pd, access, false) })
    }

    /// Creates a region for fast registration, free at first [MR-6].
    pub(crate) fn allocate(&mut self, rng: &mut Rng, pd: PdId) -> Result<MrKeys, Error> {
        let access = Access::empty();
        self.insert(rng, Region::new(pd, access, true))
    }

    /// Gives a region an unused key, of random index and low byte, and adds the region [MR-1].
    fn insert(&mut self, rng: &mut Rng, mut region: Region) -> Result<MrKeys, Error> {
        if self.regions.len() >= self.max {
            return Err(Error::Limit(Resource::MemoryRegions));
        }
        self.regions.reserve();
        region.key = self.free_key(rng, DirectMap::has_free_slot);
        region.registered_key = region.key;
        let keys = MrKeys { lkey: region.key, rkey: region.key };
        self.regions.insert(region);
        Ok(keys)
    }

    /// Returns a random key whose index no region or window has. `is_free` decides for regions.
    pub(crate) fn free_key(
        &self,
        rng: &mut Rng,
        is_free: impl Fn(&DirectMap<Region>, u32) -> bool,
    ) -> u32 {
        // At most half of the region slots and a quarter of the window indexes are taken: four
        // tries on average at worst.
        loop {
            let key = rng.next_u32();
            let index = key >> 8;
            if index != 0 && is_free(&self.regions, index) && !self.windows.contains_key(&index) {
                return key;
            }
        }
    }

    /// Removes a region; returns its protection domain. No copy is in progress during the call, and
    /// later packets look the key up again [MR-11].
    pub(crate) fn deregister(&mut self, lkey: u32) -> Result<PdId, Error> {
        match self.regions.get(lkey >> 8) {
            Some(region) if !region.has_key(lkey) => Err(Error::NoSuch(Object::MemoryRegion)),
            Some(region) if region.windows > 0 => Err(Error::Busy(Object::MemoryRegion)),
            Some(region) => {
                let pd = region.pd;
                self.regions.remove(lkey >> 8);
                Ok(pd)
            }
            None => Err(Error::NoSuch(Object::MemoryRegion)),
        }
    }

    /// Withdraws from peers the keys of all of these regions, or of none on an error; local use
    /// continues.
    pub(crate) fn withdraw_keys(&mut self, keys: &[u32]) -> Result<(), Error> {
        for key in keys {
            let region = self.registered(*key)?;
            if region.withdrawn {
                return Err(Error::Invalid(InvalidReason::KeyWithdrawn));
            }
            // A bound window would still grant access.
            if region.windows > 0 {
                return Err(Error::Busy(Object::MemoryRegion));
            }
        }
        for key in keys {
            if let Some(region) = self.regions.get_mut(key >> 8) {
                region.withdrawn = true;
            }
        }
        Ok(())
    }

    /// Gives regions whose keys are withdrawn new keys, by which peers have access again: all of
    /// the regions, or none on an error [MR-13].
    pub(crate) fn renew_keys(&mut self, keys: &[(u32, u32)]) -> Result<(), Error> {
        for (key, new) in keys {
            if !self.registered(*key)?.withdrawn {
                return Err(Error::Invalid(InvalidReason::KeyNotWithdrawn));
            }
            if key >> 8 != new >> 8 || key == new {
                return Err(Error::Invalid(InvalidReason::NewKey));
            }
        }
        for (_, new) in keys {
            if let Some(region) = self.regions.get_mut(new >> 8) {
                region.key = *new;
                region.withdrawn = false;
            }
        }
        Ok(())
    }

    /// Returns the region that has this key now and is not for fast registration.
    fn registered(&self, key: u32) -> Result<&Region, Error> {
        let region = self.regions.get(key >> 8);
        let found = region.filter(|region| region.key == key && !region.fast);
        found.ok_or(Error::NoSuch(Object::MemoryRegion))
    }

    /// Number of regions.
    pub(crate) fn count(&self) -> usize {
        self.regions.len()
    }

    /// Number of fast-registration regions that are bound to memory.
    pub(crate) fn bound_count(&self) -> usize {
        self.regions.values().filter(|region| region.fast && region.memory.is_some()).count()
    }

    /// Tells whether the protection domain has a region or window.
    pub(crate) fn uses_pd(&self, pd: PdId) -> bool {
        self.regions.values().any(|region| region.pd == pd)
            || self.windows.values().any(|window| window.pd() == pd)
    }

    /// Adds `change` to the number of windows bound to a region.
    pub(crate) fn count_window(&mut self, region: u32, change: i32) {
        if let Some(region) = self.regions.get_mut(region >> 8) {
            region.windows = region.windows.saturating_add_signed(change);
        }
    }

    /// Executes a fast registration [MR-6]: the region must be free and of this protection domain.
    /// From now on it has only this key [MR-13].
    pub(crate) fn bind(
        &mut self,
        pd: PdId,
        key: u32,
        pieces: Vec<Piece>,
        iova: u64,
        access: Access,
    ) -> Result<(), KeyError> {
        let region = self.regions.get_mut(key >> 8).ok_or(KeyError::Unknown)?;
        if !region.fast || region.memory.is_some() {
            return Err(KeyError::Unknown);
        }
        if region.pd != pd {
            return Err(KeyError::WrongPd);
        }
        if access.contains(Access::FLUSH_PERSISTENT) {
            return Err(KeyError::NoAccess); // no memory here outlives a loss of power
        }
        let memory = Memory::new(pieces).ok_or(KeyError::OutOfRange)?;
        iova.checked_add(memory.len()).ok_or(KeyError::OutOfRange)?;
        let memory = Some(memory);
        let registered_key = region.registered_key;
        *region = Region { key, registered_key, iova, memory, ..Region::new(pd, access, true) };
        Ok(())
    }

    /// Frees a fast-registration region. A region that is free already and has the same key may be
    /// freed again; a region with a bound window may not. If the key names no region, frees a
    /// window of type 2 [MR-7].
    pub(crate) fn invalidate(&mut self, (pd, qpn): (PdId, Qpn), key: u32) -> Result<(), KeyError> {
        let Some(region) = self.regions.get_mut(key >> 8) else {
            return self.invalidate_window(pd, qpn, key);
        };
        if region.key != key || !region.fast {
            return Err(KeyError::Unknown);
        }
        if region.pd != pd {
            return Err(KeyError::WrongPd);
        }
        if region.windows > 0 {
            return Err(KeyError::InUse);
        }
        region.memory = None;
        Ok(())
    }

    /// Invalidates a key for the peer [REQ-17], [RSP-18]: only regions that peers may use at all,
    /// and windows.
    pub(crate) fn invalidate_remote(
        &mut self,
        user: (PdId, Qpn),
        key: u32,
    ) -> Result<(), KeyError> {
        let remote = Access::REMOTE_WRITE | Access::REMOTE_READ | Access::REMOTE_ATOMIC;
        let region = self.regions.get(key >> 8);
        if region.is_some_and(|region| !region.access.intersects(remote)) {
            return Err(KeyError::NoAccess);
        }
        self.invalidate(user, key)
    }

    /// Checks that a region grants the peer these rights, without a range. Windows are not
    /// accepted.
    pub(crate) fn check_whole(&self, pd: PdId, key: u32, need: Access) -> Result<(), KeyError> {
        let start = self.regions.get(key >> 8).ok_or(KeyError::Unknown)?.iova;
        self.check(pd, key, start, 0, need)
    }

    /// Returns the offset within its region of a range that a window is to be bound to.
    pub(crate) fn region_offset(
        &self,
        pd: PdId,
        key: u32,
        va: u64,
        len: u64,
        need: Access,
    ) -> Result<u64, KeyError> {
        self.find(pd.into(), key, va, len, need).map(|(_, start)| start)
    }

    /// Prefetches the table entry of `key`, which need not exist.
    pub(crate) fn prefetch_key(&self, key: u32) {
        self.regions.prefetch(key >> 8);
    }

    /// Checks key, domain, rights and range in that order [MR-2], [MR-3]; returns the memory and
    /// the offset of `va` in it.
    fn find(
        &self,
        user: KeyUser,
        key: u32,
        va: u64,
        len: u64,
        need: Access,
    ) -> Result<(&Memory, u64), KeyError> {
        let pd = user.pd;
        let Some(region) = self.regions.get(key >> 8) else {
            let window = self.windows.get(&(key >> 8)).ok_or(KeyError::Unknown)?;
            let qpn = user.peer_of.ok_or(KeyError::Unknown)?;
            let (region, start) = window.find((pd, qpn), key, va, len, need)?;
            // The region and its memory stay as long as a window is bound to them.
            let region = self.regions.get(region >> 8).ok_or(KeyError::Unknown)?;
            return Ok((region.memory.as_ref().ok_or(KeyError::Unknown)?, start));
        };
        let memory = region.memory.as_ref().ok_or(KeyError::Unknown)?;
        if region.key != key {
            return Err(KeyError::Unknown);
        }
        if region.pd != pd && self.outer_pds.get(&pd.0) != Some(&region.pd) {
            return Err(KeyError::WrongPd);
        }
        let withdrawn = region.withdrawn && !user.accepted;
        if !region.access.contains(need) || withdrawn && need.intersects(REMOTE_RIGHTS) {
            return Err(KeyError::NoAccess);
        }
        let start = va.checked_sub(region.iova).ok_or(KeyError::OutOfRange)?;
        match start.checked_add(len) {
            Some(end) if end <= memory.len() => Ok((memory, start)),
            _ => Err(KeyError::OutOfRange),
        }
    }

    /// Finds the memory of a range. An empty `need` means a local read [MR-4].
    pub(crate) fn resolve(
        &self,
        user: impl Into<KeyUser>,
        key: u32,
        va: u64,
        len: u64,
        need: Access,
    ) -> Result<Span<'_>, KeyError> {
        let (memory, start) = self.find(user.into(), key, va, len, need)?;
        Ok(Span { memory, start, len })
    }

    /// Checks a range without using it.
    pub(crate) fn check(
        &self,
        user: impl Into<KeyUser>,
        key: u32,
        va: u64,
        len: u64,
        need: Access,
    ) -> Result<(), KeyError> {
        self.find(user.into(), key, va, len, need).map(drop)
    }

    /// Copies a range of local memory to the end of `out`.
    pub(crate) fn gather(
        &self,
        pd: PdId,
        key: u32,
        va: u64,
        len: usize,
        out: &mut Burst,
    ) -> Result<(), KeyError> {
        let span = self.resolve(pd, key, va, len as u64, Access::empty())?;
        if span.reaches(|span| span.append_to(out)) { Ok(()) } else { Err(KeyError::NotThere) }
    }

    /// Prefetches a range of local memory, if the range is valid.
    pub(crate) fn prefetch(&self, pd: PdId, key: u32, va: u64, len: usize) {
        if let Ok((memory, start)) = self.find(pd.into(), key, va, len as u64, Access::empty()) {
            memory.for_each(start, len as u64, |buffer, offset, len| buffer.prefetch(offset, len));
        }
    }

    /// Copies bytes to local memory.
    pub(crate) fn scatter(
        &self,
        pd: PdId,
        key: u32,
        va: u64,
        bytes: &[u8],
    ) -> Result<(), KeyError> {
        let len = bytes.len() as u64;
        let span = self.resolve(pd, key, va, len, Access::LOCAL_WRITE)?;
        if span.reaches(|span| span.write(0, bytes)) { Ok(()) } else { Err(KeyError::NotThere) }
    }
}

fn write(memory: &Memory, start: u64, mut bytes: &[u8]) {
    memory.for_each(start, bytes.len() as u64, |buffer, offset, len| {
        let (now, rest) = bytes.split_at(len);
        buffer.write(offset, now);
        bytes = rest;
    });
}

/// A validated range. Do not keep it: validate again before the next packet [MR-10].
#[derive(Clone, Copy, Debug)]
pub(crate) struct Span<'a> {
    memory: &'a Memory,
    start: u64,
    len: u64,
}

impl Span<'_> {
    /// Does something with the span; tells whether all its memory was there. That of another
    /// process may not be: [`Buffer::of_process`].
    #[must_use]
    pub(crate) fn reaches(&self, access: impl FnOnce(&Self)) -> bool {
        let before = self.faults();
        access(self);
        self.faults() == before
    }

    fn faults(&self) -> u64 {
        let mut faults = 0;
        self.memory.for_each(self.start, self.len, |buffer, _, _| faults += buffer.faults());
        faults
    }

    /// Tells whether this is memory of another process, or part of it.
    pub(crate) fn is_foreign(&self) -> bool {
        let mut foreign = false;
        self.memory.for_each(self.start, self.len, |buffer, _, _| foreign |= buffer.is_foreign());
        foreign
    }

    /// Copies as many of the bytes into the span as fit from `offset` on.
    pub(crate) fn write(&self, offset: u64, bytes: &[u8]) {
        let room = self.len.saturating_sub(offset).min(bytes.len() as u64) as usize;
        if room > 0 {
            write(self.memory, self.start + offset, &bytes[..room]);
        }
    }

    /// Appends the whole span to `out`.
    pub(crate) fn append_to(&self, out: &mut Burst) {
        self.append_part(0, self.len as usize, out);
    }

    /// Appends the `len` bytes from `offset` on, which must exist, to `out`.
    pub(crate) fn append_part(&self, offset: usize, len: usize, out: &mut Burst) {
        debug_assert!((offset + len) as u64 <= self.len, "a part of the span");
        self.memory.for_each(self.start + offset as u64, len as u64, |buffer, offset, len| {
            out.append(buffer, offset, len);
        });
    }

    /// Returns the first contiguous part of the span.
    pub(crate) fn first_contiguous(&self) -> Option<Piece> {
        let mut first = None;
        self.memory.for_each(self.start, self.len, |buffer, offset, len| {
            first.get_or_insert_with(|| Piece { buffer: Arc::clone(buffer), offset, len });
        });
        first
    }

    /// Prefetches up to `len` bytes from `offset` on, as far as the span has them.
    pub(crate) fn prefetch(&self, offset: usize, len: usize) {
        let len = self.len.saturating_sub(offset as u64).min(len as u64);
        if len > 0 {
            self.memory.for_each(self.start + offset as u64, len, |buffer, offset, len| {
                buffer.prefetch(offset, len);
            });
        }
    }

    /// Length in bytes.
    pub(crate) const fn len(&self) -> usize {
        self.len as usize
    }

    /// Changes the 8 bytes at `offset`, a number in host byte order, and returns their old value.
    /// Atomic for other threads if the bytes are aligned in memory [RSP-11].
    pub(crate) fn update(&self, offset: u64, mut change: impl FnMut(u64) -> u64) -> u64 {
        let mut whole = None;
        if offset.checked_add(8).is_some_and(|end| end <= self.len) {
            self.memory.for_each(self.start + offset, 8, |buffer, offset, len| {
                if len == 8 && (buffer.addr() + offset as u64).is_multiple_of(8) {
                    whole = Some(buffer.update(offset, &mut change));
                }
            });
        }
        whole.unwrap_or_else(|| {
            let mut bytes = Vec::with_capacity(8);
            let len = self.len.saturating_sub(offset).min(8);
            if len > 0 {
                self.memory.for_each(self.start + offset, len, |buffer, offset, len| {
                    buffer.append_to(offset, len, &mut bytes);
                });
            }
            bytes.resize(8, 0);
            let old = u64::from_ne_bytes(bytes.try_into().unwrap_or_default());
            self.write(offset, &change(old).to_ne_bytes());
            old
        })
    }
}

#[cfg(test)]
mod tests {
    use bowline_verbs::next_key;

    use super::*;

    const PD: PdId = PdId(1);
    const WHOSE: (PdId, Qpn) = (PD, Qpn(5));

    fn table() -> (MrTable, Rng) {
        (MrTable::new(1000, 0), Rng::new(&[7; 32]))
    }

    fn piece(buffer: &Arc<Buffer>, offset: usize, len: usize) -> Piece {
        Piece { buffer: Arc::clone(buffer), offset, len }
    }

    /// [MR-2], [MR-3], [MR-4], [MR-5].
    #[test]
    fn a_key_grants_its_own_region_only() {
        let (mut table, mut rng) = table();
        let buffer = Arc::new(Buffer::new(4096).unwrap());
        let access = Access::LOCAL_WRITE | Access::REMOTE_READ;
        let region = (&buffer, 100, 200);
        let key = table.register(&mut rng, PD, region, Some(5000), access).unwrap().rkey;
        assert_ne!(key >> 8, 0);
        let ask = |pd, key, va, len, need| table.check(pd, key, va, len, need);
        assert_eq!(ask(PD, key, 5000, 200, Access::REMOTE_READ), Ok(()));
        assert_eq!(ask(PD, key, 5200, 0, Access::empty()), Ok(()));
        assert_eq!(ask(PD, key ^ 1, 5000, 1, Access::empty()), Err(KeyError::Unknown));
        assert_eq!(ask(PD, key ^ 256, 5000, 1, Access::empty()), Err(KeyError::Unknown));
        assert_eq!(ask(PdId(2), key, 5000, 1, Access::empty()), Err(KeyError::WrongPd));
        assert_eq!(ask(PD, key, 5000, 1, Access::REMOTE_WRITE), Err(KeyError::NoAccess));
        for (va, len) in [(4999, 1), (5000, 201), (5199, 2), (5201, 0), (u64::MAX, 2)] {
            assert_eq!(ask(PD, key, va, len, Access::empty()), Err(KeyError::OutOfRange));
        }
        assert_eq!(ask(PD, key, 5001, u64::MAX, Access::empty()), Err(KeyError::OutOfRange));
        table.resolve(PD, key, 5010, 3, access).unwrap().write(1, b"xyz");
        table.deregister(key).unwrap();
        assert_eq!(table.check(PD, key, 5000, 1, Access::empty()), Err(KeyError::Unknown));
        assert!(table.deregister(key).is_err());
        let mut out = [1; 5];
        buffer.read(109, &mut out);
        assert_eq!(&out, b"\0\0xy\0");
    }

    /// Regions of a domain are for the domains within it too, but not the other way round.
    #[test]
    fn a_domain_within_another_uses_the_regions_of_both() {
        let (mut table, mut rng) = table();
        let buffer = Arc::new(Buffer::new(64).unwrap());
        let (inner, sibling) = (PdId(2), PdId(3));
        table.outer_pds.insert(inner.0, PD);
        table.outer_pds.insert(sibling.0, PD);
        let access = Access::LOCAL_WRITE | Access::REMOTE_READ;
        let [of_outer, of_inner] = [PD, inner].map(|pd| {
            table.register(&mut rng, pd, (&buffer, 0, 64), Some(0), access).unwrap().rkey
        });
        let ask = |pd: PdId, key| {
            [(pd, Qpn(5)).into(), KeyUser::from(pd)]
                .map(|user: KeyUser| table.check(user, key, 0, 8, Access::REMOTE_READ))
        };
        for (pd, key, answer) in [
            (PD, of_outer, Ok(())),
            (inner, of_outer, Ok(())),
            (sibling, of_outer, Ok(())),
            (inner, of_inner, Ok(())),
            (sibling, of_inner, Err(KeyError::WrongPd)),
            (PD, of_inner, Err(KeyError::WrongPd)),
            (PdId(4), of_outer, Err(KeyError::WrongPd)),
        ] {
            assert_eq!(ask(pd, key), [answer; 2], "{pd:?}");
        }
    }

    /// [MR-6], [MR-7], [MR-13].
    #[test]
    fn fast_registration_has_two_states_and_one_key() {
        let (mut table, mut rng) = table();
        let (a, b) = (Arc::new(Buffer::new(64).unwrap()), Arc::new(Buffer::new(64).unwrap()));
        let key = table.allocate(&mut rng, PD).unwrap().rkey;
        let next = key & !0xff | key.wrapping_add(1) & 0xff;
        assert_eq!(table.check(PD, key, 0, 0, Access::empty()), Err(KeyError::Unknown));
        let pieces = vec![piece(&a, 60, 4), piece(&b, 0, 0), piece(&b, 1, 7), piece(&a, 0, 5)];
        let all = Access::all() - Access::FLUSH_PERSISTENT;
        assert_eq!(table.bind(PdId(2), next, pieces.clone(), 9, all), Err(KeyError::WrongPd));
        assert_eq!(table.bound_count(), 0);
        assert_eq!(table.bind(PD, next, pieces.clone(), 9, all), Ok(()));
        assert_eq!(table.bound_count(), 1);
        assert_eq!(table.bind(PD, next, pieces, 9, all), Err(KeyError::Unknown));
        assert_eq!(table.check(PD, key, 9, 1, Access::empty()), Err(KeyError::Unknown));
        table.scatter(PD, next, 10, b"0123456789abcde").unwrap();
        let mut out = Burst::new();
        table.gather(PD, next, 9, 16, &mut out).unwrap();
        assert_eq!(out.bytes, b"\x000123456789abcde");
        assert_eq!(table.gather(PD, next, 9, 17, &mut out), Err(KeyError::OutOfRange));
        let mut got = [0; 3];
        b.read(1, &mut got);
        assert_eq!(&got, b"345");
        let span = table.resolve(PD, next, 9 + 2, 9, all).unwrap();
        let old = span.update(0, |n| n + 1);
        assert_eq!(old, u64::from_ne_bytes(*b"12345678"));
        assert_eq!(table.invalidate_remote(WHOSE, key), Err(KeyError::Unknown));
        assert_eq!(table.invalidate_remote(WHOSE, next), Ok(()));
        assert_eq!(table.invalidate(WHOSE, next), Ok(()));
        assert_eq!(table.check(PD, next, 9, 1, Access::empty()), Err(KeyError::Unknown));
        let plain = table.register(&mut rng, PD, (&a, 0, 8), None, all).unwrap();
        assert_eq!(table.invalidate(WHOSE, plain.lkey), Err(KeyError::Unknown));
        let outside = vec![piece(&a, 60, 5)];
        assert_eq!(table.bind(PD, key, outside, 9, all), Err(KeyError::OutOfRange));
        assert_eq!(table.bound_count(), 0);
        // The key a region was created with still names it for removal.
        assert_eq!(table.deregister(key ^ 0x80), Err(Error::NoSuch(Object::MemoryRegion)));
        assert_eq!(table.deregister(key), Ok(PD));
    }

    /// A region whose key is withdrawn is usable by this side only, until its key is renewed; the
    /// old key becomes invalid.
    #[test]
    fn regions_with_withdrawn_keys_refuse_peers() {
        let (mut table, mut rng) = table();
        let buffer = Arc::new(Buffer::new(64).unwrap());
        let write = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
        let mut new = |table: &mut MrTable| {
            table.register(&mut rng, PD, (&buffer, 0, 64), Some(0), write).unwrap().rkey
        };
        let (a, b) = (new(&mut table), new(&mut table));
        let may = |table: &MrTable, key| table.check(WHOSE, key, 0, 8, Access::REMOTE_WRITE);
        let no_such = Err(Error::NoSuch(Object::MemoryRegion));
        assert_eq!(table.withdraw_keys(&[a, b ^ 1]), no_such, "all regions or none");
        let not_withdrawn = Error::Invalid(InvalidReason::KeyNotWithdrawn);
        assert_eq!(table.renew_keys(&[(a, next_key(a))]), Err(not_withdrawn));
        assert_eq!(may(&table, a), Ok(()));
        table.withdraw_keys(&[a, b]).unwrap();
        assert!(table.withdraw_keys(&[a]).is_err());
        assert_eq!(
            (may(&table, a), may(&table, b)),
            (Err(KeyError::NoAccess), Err(KeyError::NoAccess))
        );
        table.scatter(PD, a, 3, b"mine").unwrap();
        for bad in [a, a ^ 1 << 8] {
            assert!(table.renew_keys(&[(b, next_key(b)), (a, bad)]).is_err());
        }
        table.renew_keys(&[(a, next_key(a))]).unwrap();
        assert_eq!(may(&table, a), Err(KeyError::Unknown));
        assert_eq!(may(&table, next_key(a)), Ok(()));
        assert_eq!(may(&table, b), Err(KeyError::NoAccess));
        assert_eq!(table.deregister(a), Ok(PD), "the key it was registered with");
        assert_eq!(table.deregister(b), Ok(PD));
        let fast = table.allocate(&mut rng, PD).unwrap().rkey;
        assert_eq!(table.withdraw_keys(&[fast]), no_such);
    }

    #[test]
    fn a_region_that_is_registered_again_keeps_its_key() {
        let (mut table, mut rng) = table();
        let buffer = Arc::new(Buffer::new(4096).unwrap());
        let other = Arc::new(Buffer::new(100).unwrap());
        let first = (&buffer, 0, 4096);
        let keys = table.register(&mut rng, PD, first, Some(0), Access::LOCAL_WRITE).unwrap();
        let change = |table: &mut MrTable, pd, len, access| {
            table.reregister(keys.lkey, pd, (&other, 0, len), Some(7000), access)
        };
        let read = Access::REMOTE_READ;
        assert!(change(&mut table, PD, 101, read).is_err(), "more than there is");
        let find = |table: &MrTable, pd, va| {
            table.region_offset(pd, keys.lkey, va, 50, Access::LOCAL_WRITE)
        };
        assert_eq!(find(&table, PD, 4046), Ok(4046), "nothing has changed");
        assert_eq!(change(&mut table, PdId(2), 100, Access::LOCAL_WRITE), Ok(()));
        assert_eq!(find(&table, PdId(2), 7050), Ok(50));
        assert_eq!(find(&table, PdId(2), 4046), Err(KeyError::OutOfRange));
        assert_eq!(find(&table, PD, 7050), Err(KeyError::WrongPd));
        table.count_window(keys.lkey, 1);
        assert_eq!(change(&mut table, PD, 100, read), Err(Error::Busy(Object::MemoryRegion)));
        table.count_window(keys.lkey, -1);
        assert_eq!(table.deregister(keys.lkey), Ok(PdId(2)));
        let gone = Err(Error::NoSuch(Object::MemoryRegion));
        assert_eq!(change(&mut table, PD, 100, read), gone);
        let fast = table.allocate(&mut rng, PD).unwrap().lkey;
        assert_eq!(table.reregister(fast, PD, first, None, read), gone, "it is bound by requests");
    }

    #[test]
    fn the_number_of_regions_is_limited() {
        let mut table = MrTable::new(2, 0);
        let mut rng = Rng::new(&[1; 32]);
        let first = table.allocate(&mut rng, PD).unwrap();
        let second = table.allocate(&mut rng, PD).unwrap();
        assert_ne!(first, second);
        assert_eq!(table.allocate(&mut rng, PD), Err(Error::Limit(Resource::MemoryRegions)));
    }
}
