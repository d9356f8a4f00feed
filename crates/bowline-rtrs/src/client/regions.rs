//! Memory registered by a session: the program's, and its internal buffers.

use std::sync::Arc;

use bowline_verbs::{Access, Buffer};

use crate::{Errno, MemRef, PortId, RegionId, RegionKeys};

/// A registered region.
#[derive(Debug)]
pub(super) struct Region {
    pub(super) buffer: Arc<Buffer>,
    pub(super) access: Access,
    /// Each device's answer; `None` until it comes.
    keys: Vec<(PortId, Option<Result<RegionKeys, Errno>>)>,
    /// Number of its pieces in requests in flight.
    pub(super) uses: u32,
    /// The program has dropped it.
    dropped: bool,
    /// Only packets that may have to be sent again keep it registered.
    pub(super) lingers: bool,
}

impl Region {
    /// The keys on this device, if registration there succeeded.
    pub(super) fn keys(&self, port: PortId) -> Result<RegionKeys, Errno> {
        let entry = self.keys.iter().find(|(at, _)| *at == port);
        entry.and_then(|(_, keys)| *keys).unwrap_or(Err(Errno::EINVAL))
    }

    fn answered(&self) -> bool {
        self.keys.iter().all(|(_, keys)| keys.is_some())
    }
}

/// All regions, by number. A number is reused when its region is removed and no device's answer is
/// pending.
#[derive(Debug, Default)]
pub(super) struct Regions {
    slots: Vec<Option<Region>>,
}

impl Regions {
    /// Adds a region that is being registered on these devices.
    pub(super) fn add(
        &mut self,
        buffer: Arc<Buffer>,
        access: Access,
        ports: impl Iterator<Item = PortId>,
    ) -> RegionId {
        let keys = ports.map(|port| (port, None)).collect();
        let region = Region { buffer, access, keys, uses: 0, dropped: false, lingers: false };
        let at = self.slots.iter().position(Option::is_none).unwrap_or(self.slots.len());
        if at == self.slots.len() {
            self.slots.push(None);
        }
        self.slots[at] = Some(region);
        RegionId(at as u32)
    }

    pub(super) fn get(&self, id: RegionId) -> Option<&Region> {
        self.slots.get(id.0 as usize)?.as_ref()
    }

    pub(super) fn get_mut(&mut self, id: RegionId) -> Option<&mut Region> {
        self.slots.get_mut(id.0 as usize)?.as_mut()
    }

    /// Whether the piece lies within a registered region with these rights.
    pub(super) fn allows(&self, piece: &MemRef, access: Access) -> bool {
        self.get(piece.region).is_some_and(|region| {
            let end = piece.offset.checked_add(u64::from(piece.len));
            let fits = end.is_some_and(|end| end <= region.buffer.len() as u64);
            fits && !region.dropped && region.access.contains(access)
        })
    }

    /// Records a device's answer.
    pub(super) fn answer(
        &mut self,
        id: RegionId,
        port: PortId,
        keys: Result<RegionKeys, Errno>,
    ) -> Option<RegionId> {
        let region = self.get_mut(id)?;
        let entry = region.keys.iter_mut().find(|(at, _)| *at == port)?;
        entry.1 = Some(keys);
        self.gone(id)
    }

    /// Marks a region as dropped. Returns it if it can be removed.
    pub(super) fn mark_dropped(&mut self, id: RegionId) -> Option<RegionId> {
        self.get_mut(id)?.dropped = true;
        self.gone(id)
    }

    /// Ends the use of a piece. Returns the region if it is dropped and can be removed.
    pub(super) fn release(&mut self, id: RegionId) -> Option<RegionId> {
        let region = self.get_mut(id)?;
        region.uses = region.uses.saturating_sub(1);
        if region.dropped { self.gone(id) } else { None }
    }

    fn gone(&mut self, id: RegionId) -> Option<RegionId> {
        let region = self.get(id)?;
        let over = region.dropped && region.uses == 0 && region.answered() && !region.lingers;
        over.then_some(id)
    }

    /// Removes a region; its number is free.
    pub(super) fn remove(&mut self, id: RegionId) {
        if let Some(slot) = self.slots.get_mut(id.0 as usize) {
            *slot = None;
        }
    }

    /// The remaining regions.
    pub(super) fn ids(&self) -> impl Iterator<Item = RegionId> {
        let there = self.slots.iter().enumerate().filter(|(_, slot)| slot.is_some());
        there.map(|(at, _)| RegionId(at as u32))
    }

    /// Returns the outcome of the registration; `None` until all devices have answered.
    pub(super) fn outcome(&self, id: RegionId) -> Option<Result<(), Errno>> {
        let Some(region) = self.get(id) else { return Some(Err(Errno::EINVAL)) };
        if !region.answered() {
            return None;
        }
        let failed = region.keys.iter().find_map(|(_, keys)| keys.and_then(Result::err));
        Some(failed.map_or(Ok(()), Err))
    }
}
