//! Regions: on which devices they are registered, and their keys.

use std::collections::{BTreeMap, HashMap};
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::Arc;

use bowline_verbs::{Access, Buffer, Error, MrKeys, PdId, Piece, Sge};

use super::domains::Domains;
use super::verbs::{Ports, Verbs};
use crate::{Input, MemRef, PathId, PortId, RegionId, RegionKeys, RegionPorts};

/// A hasher for region numbers. The core counts these, so they need no mixing beyond the one
/// multiplication; the map is never iterated, so its order does not matter.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct RegionHasher(u64);

impl Hasher for RegionHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = self.0 << 8 | u64::from(*byte);
        }
    }

    fn write_u32(&mut self, n: u32) {
        // Spreads the number over the upper bits, which the map uses too.
        self.0 = u64::from(n).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }
}

/// A map by region.
pub(super) type ByRegion<T> = HashMap<u32, T, BuildHasherDefault<RegionHasher>>;

#[derive(Debug, Default)]
struct Region {
    /// The memory; `None` if it was never added.
    buffer: Option<Arc<Buffer>>,
    /// The path whose protection domain it is in, if that path has its own.
    path: Option<PathId>,
    /// For each port the local key of this side's requests; 0: not registered there.
    local: Vec<u32>,
    /// The registrations to end, by port.
    registered: Vec<(PortId, u32)>,
}

/// All regions of a core.
#[derive(Debug, Default)]
pub(super) struct Regions {
    map: ByRegion<Region>,
    /// Keys made for [`Order::AddKeys`](crate::Order::AddKeys).
    keys: BTreeMap<PathId, (PortId, Vec<u32>)>,
    /// The protection domains of a server. All regions of a client are in one domain.
    domains: Option<Domains>,
    /// Devices that are gone.
    gone: Vec<PortId>,
}

impl Regions {
    /// Regions of a server: each path has its own protection domain.
    pub(super) fn of_server() -> Self {
        Self { domains: Some(Domains::default()), ..Self::default() }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.map.is_empty()
            && self.keys.is_empty()
            && self.domains.as_ref().is_none_or(Domains::is_empty)
    }

    /// Returns the protection domain for a queue pair of a path, `None` for the common one. It
    /// exists until [`leave`](Self::leave). Fails on a device that is gone.
    pub(super) fn enter(
        &mut self,
        ports: &mut dyn Ports,
        port: PortId,
        path: PathId,
    ) -> Result<Option<PdId>, Error> {
        if self.gone.contains(&port) {
            return Err(Error::Closed);
        }
        let Some(domains) = &mut self.domains else { return Ok(None) };
        domains.enter(ports, port, path).map(Some)
    }

    /// Ends the use of the domain by a queue pair.
    pub(super) fn leave(&mut self, ports: &mut dyn Ports, path: PathId) {
        if let Some(domains) = &mut self.domains {
            domains.leave(ports, path);
        }
    }

    /// A device is gone.
    pub(super) fn device_gone(&mut self, port: PortId) {
        if !self.gone.contains(&port) {
            self.gone.push(port);
        }
    }

    /// Registers a region and reports its keys, for each device.
    pub(super) fn add(
        &mut self,
        ports: &mut dyn Ports,
        count: usize,
        name: RegionId,
        what: &Registration<'_>,
        out: &mut Vec<Input>,
    ) {
        if let (Some(domains), None) = (&mut self.domains, what.path) {
            let outcome = domains.share(ports, name, what.buffer, what.on);
            // Its keys differ between paths, so none are reported.
            let keys = outcome.map(|()| Vec::new()).map_err(|error| error.errno());
            out.extend(what.ports(count).map(|port| {
                let keys = keys.clone();
                Input::Region { region: name, port, keys }
            }));
            return;
        }
        let buffer = Some(Arc::clone(what.buffer));
        let mut region = Region { buffer, local: vec![0; count], ..Region::default() };
        for port in what.ports(count) {
            let mut made = Vec::new();
            let pd = match (&mut self.domains, what.path) {
                _ if self.gone.contains(&port) => Err(Error::Closed),
                (Some(domains), Some(path)) => match domains.enter(ports, port, path) {
                    Ok(pd) => {
                        region.path = Some(path);
                        Ok(Some(pd))
                    }
                    Err(error) => Err(error),
                },
                _ => Ok(None),
            };
            let mut keys = pd.and_then(|pd| register(ports.port(port), pd, what, &mut made));
            if what.on == RegionPorts::All && matches!(keys, Err(Error::Closed)) {
                // The device is gone, so no path needs keys there; the region is usable on the
                // others.
                keys = Ok((0, vec![RegionKeys::default()]));
            }
            match &keys {
                Ok((local, _)) => {
                    region.local[usize::from(port.0)] = *local;
                    region.registered.extend(made.iter().map(|key| (port, *key)));
                }
                Err(_) => made.iter().for_each(|key| ports.port(port).dereg_mr(*key)),
            }
            let keys = keys.map(|(_, keys)| keys).map_err(|error| error.errno());
            out.push(Input::Region { region: name, port, keys });
        }
        self.map.insert(name.0, region);
    }

    /// Ends all registrations of a region.
    pub(super) fn drop_region(&mut self, ports: &mut dyn Ports, name: RegionId) {
        let Some(region) = self.map.remove(&name.0) else {
            if let Some(domains) = &mut self.domains {
                domains.unshare(ports, name);
            }
            return;
        };
        for (port, key) in region.registered {
            ports.port(port).dereg_mr(key);
        }
        if let Some(path) = region.path {
            self.leave(ports, path);
        }
    }

    /// Makes keys for a path: all of them, or none.
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

    /// The memory of a work request that registers it. Pieces that do not exist are left out: the
    /// key is then too short for the range announced to the peer, and its write fails, as it must.
    pub(super) fn pieces(&self, mems: &[MemRef]) -> Vec<Piece> {
        let piece = |mem: &MemRef| {
            let buffer = self.map.get(&mem.region.0)?.buffer.as_ref()?;
            let (offset, len) = (usize::try_from(mem.offset).ok()?, mem.len as usize);
            Some(Piece { buffer: Arc::clone(buffer), offset, len })
        };
        mems.iter().filter_map(piece).collect()
    }

    /// The gather element for a range, on a port and for a path. A region not registered there gets
    /// key 0, which is never valid, so the request fails, as it must.
    pub(super) fn sge(&self, port: PortId, path: PathId, mem: &MemRef) -> Sge {
        let lkey = match self.map.get(&mem.region.0) {
            Some(region) => region.local.get(usize::from(port.0)).copied(),
            None => self.domains.as_ref().and_then(|all| all.shared_key(path, mem.region)),
        };
        Sge { addr: mem.offset, len: mem.len, lkey: lkey.unwrap_or(0) }
    }
}

/// A registration to make.
#[derive(Debug)]
pub(super) struct Registration<'a> {
    pub(super) buffer: &'a Arc<Buffer>,
    pub(super) access: Access,
    pub(super) granule: Option<u32>,
    pub(super) on: RegionPorts,
    /// The path it belongs to, if any.
    pub(super) path: Option<PathId>,
}

impl Registration<'_> {
    /// The devices to register it on, of `count` ports.
    fn ports(&self, count: usize) -> impl Iterator<Item = PortId> + use<> {
        let on = self.on;
        let all = (0..count).map(|index| PortId(u8::try_from(index).unwrap_or(u8::MAX)));
        all.filter(move |port| !matches!(on, RegionPorts::One(one) if one != *port))
    }
}

/// Registers memory on one device: for peers, whole or in parts, and a second time for this side's
/// requests, so that these do not depend on the peers' keys. Adds the registrations to `made`.
fn register(
    verbs: &mut dyn Verbs,
    pd: Option<PdId>,
    what: &Registration<'_>,
    made: &mut Vec<u32>,
) -> Result<(u32, Vec<RegionKeys>), Error> {
    let Registration { buffer, access, granule, .. } = *what;
    let mut one = |offset: usize, len: usize, access| -> Result<MrKeys, Error> {
        let keys = verbs.reg_mr(pd, buffer, offset, len, offset as u64, access)?;
        made.push(keys.lkey);
        Ok(keys)
    };
    let local = one(0, buffer.len(), Access::LOCAL_WRITE)?;
    let step = match granule {
        // The peer has no access.
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
