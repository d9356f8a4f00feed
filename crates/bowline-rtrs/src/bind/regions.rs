//! Regions: where they are registered, and under which keys.

use std::collections::{BTreeMap, HashMap};
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::Arc;

use bowline_verbs::{Access, Buffer, Error, MrKeys, Piece, Sge};

use super::errno_of;
use super::verbs::{Ports, Verbs};
use crate::{Input, MemRef, On, PathId, PortId, RegionId, RegionKeys};

/// Region numbers are counted by the core, so they need no mixing; and nobody walks through the map,
/// so its order does not matter.
#[derive(Clone, Copy, Debug, Default)]
struct Plain(u64);

impl Hasher for Plain {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = self.0 << 8 | u64::from(*byte);
        }
    }

    fn write_u32(&mut self, n: u32) {
        // The map looks at the upper bits too.
        self.0 = u64::from(n).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }
}

#[derive(Debug, Default)]
struct Region {
    /// The memory; `None` for one that nobody added.
    buffer: Option<Arc<Buffer>>,
    /// The key of this side's requests, for each port; 0: not registered there.
    local: Vec<u32>,
    /// Registrations of each port, to be ended.
    registered: Vec<(PortId, u32)>,
}

/// All regions of a core.
#[derive(Debug, Default)]
pub(super) struct Regions {
    map: HashMap<u32, Region, BuildHasherDefault<Plain>>,
    /// Keys of [`Order::AddKeys`](crate::Order::AddKeys), as they were made.
    keys: BTreeMap<PathId, (PortId, Vec<u32>)>,
}

impl Regions {
    pub(super) fn is_empty(&self) -> bool {
        self.map.is_empty() && self.keys.is_empty()
    }

    /// Registers a region and tells its keys, for each device.
    pub(super) fn add(
        &mut self,
        ports: &mut dyn Ports,
        count: usize,
        name: RegionId,
        buffer: &Arc<Buffer>,
        (access, granule, on): (Access, Option<u32>, On),
        out: &mut Vec<Input>,
    ) {
        let region = self.map.entry(name.0).or_default();
        region.buffer = Some(Arc::clone(buffer));
        region.local.resize(count, 0);
        for index in 0..count {
            let port = PortId(u8::try_from(index).unwrap_or(u8::MAX));
            if matches!(on, On::One(one) if one != port) {
                continue;
            }
            let mut made = Vec::new();
            let keys = register(ports.port(port), buffer, access, granule, &mut made);
            match &keys {
                Ok((local, _)) => {
                    region.local[index] = *local;
                    region.registered.extend(made.iter().map(|key| (port, *key)));
                }
                Err(_) => made.iter().for_each(|key| ports.port(port).dereg_mr(*key)),
            }
            let keys = keys.map(|(_, keys)| keys).map_err(|error| errno_of(&error));
            out.push(Input::Region { region: name, port, keys });
        }
    }

    /// Ends all registrations of a region.
    pub(super) fn drop_region(&mut self, ports: &mut dyn Ports, name: RegionId) {
        for (port, key) in self.map.remove(&name.0).unwrap_or_default().registered {
            ports.port(port).dereg_mr(key);
        }
    }

    /// Makes keys, all or none.
    pub(super) fn add_keys(
        &mut self,
        ports: &mut dyn Ports,
        path: PathId,
        port: PortId,
        count: u16,
    ) -> Result<Vec<u32>, Error> {
        let verbs = ports.port(port);
        let mut made = Vec::with_capacity(count.into());
        for _ in 0..count {
            match verbs.alloc_mr() {
                Ok(key) => made.push(key),
                Err(error) => {
                    made.iter().for_each(|key| verbs.dereg_mr(*key));
                    return Err(error);
                }
            }
        }
        self.keys.insert(path, (port, made.clone()));
        Ok(made)
    }

    /// Ends all keys of a path.
    pub(super) fn drop_keys(&mut self, ports: &mut dyn Ports, path: PathId) {
        let (port, keys) = self.keys.remove(&path).unwrap_or_default();
        for key in keys {
            ports.port(port).dereg_mr(key);
        }
    }

    /// The memory of a request that registers it. What is not there is left out: the range that the
    /// peer was told is then too long for the key, and its write fails, as it must.
    pub(super) fn pieces(&self, mems: &[MemRef]) -> Vec<Piece> {
        let piece = |mem: &MemRef| {
            let buffer = self.map.get(&mem.region.0)?.buffer.as_ref()?;
            let (offset, len) = (usize::try_from(mem.offset).ok()?, mem.len as usize);
            Some(Piece { buffer: Arc::clone(buffer), offset, len })
        };
        mems.iter().filter_map(piece).collect()
    }

    /// Memory in the terms of a port. What is not registered there gets a key that is nobody's: the
    /// request then fails, as it must.
    pub(super) fn sge(&self, port: PortId, mem: &MemRef) -> Sge {
        let region = self.map.get(&mem.region.0);
        let lkey = region.and_then(|region| region.local.get(usize::from(port.0)));
        Sge { addr: mem.offset, len: mem.len, lkey: lkey.copied().unwrap_or(0) }
    }
}

/// Registers memory on one device: for peers, whole or in parts, and for this side's requests, so that
/// these do not depend on what peers may at the moment. Adds what it has registered to `made`.
fn register(
    verbs: &mut dyn Verbs,
    buffer: &Arc<Buffer>,
    access: Access,
    granule: Option<u32>,
    made: &mut Vec<u32>,
) -> Result<(u32, Vec<RegionKeys>), Error> {
    let mut one = |offset: usize, len: usize, access| -> Result<MrKeys, Error> {
        let keys = verbs.reg_mr(buffer, offset, len, offset as u64, access)?;
        made.push(keys.lkey);
        Ok(keys)
    };
    let local = one(0, buffer.len(), Access::LOCAL_WRITE)?;
    let step = match granule {
        // Nothing of it is the peer's.
        _ if access == Access::LOCAL_WRITE => {
            let MrKeys { lkey, rkey } = local;
            return Ok((lkey, vec![RegionKeys { addr: 0, lkey, rkey }]));
        }
        Some(step) if step > 0 => step as usize,
        _ => buffer.len().max(1),
    };
    let mut keys = Vec::with_capacity(buffer.len().div_ceil(step));
    for offset in (0..buffer.len()).step_by(step) {
        let MrKeys { rkey, .. } = one(offset, step.min(buffer.len() - offset), access)?;
        keys.push(RegionKeys { addr: offset as u64, lkey: local.lkey, rkey });
    }
    Ok((local.lkey, keys))
}
