//! Protection domains of a server: one for each path, so that a peer can reach only the memory of
//! its path, whatever keys it knows or guesses [RT-64].

use std::sync::Arc;

use bowline_verbs::{Access, Buffer, Error, PdId};

use super::regions::ByRegion;
use super::verbs::{Ports, Verbs};
use crate::{PathId, PortId, RegionId, RegionPorts};

/// The domain of a path. It exists while a region or a queue pair uses it.
#[derive(Debug)]
struct Domain {
    generation: u8,
    port: PortId,
    pd: PdId,
    /// Number of regions and queue pairs that use it.
    users: usize,
    /// Local keys of the shared memory, for this side's requests.
    shared: ByRegion<u32>,
}

/// Memory registered in every domain.
#[derive(Debug)]
struct Shared {
    name: RegionId,
    buffer: Arc<Buffer>,
    on: RegionPorts,
}

impl Shared {
    fn is_on(&self, port: PortId) -> bool {
        matches!(self.on, RegionPorts::All)
            || matches!(self.on, RegionPorts::One(one) if one == port)
    }

    fn register(&self, verbs: &mut dyn Verbs, pd: PdId) -> Result<u32, Error> {
        let len = self.buffer.len();
        let keys = verbs.reg_mr(Some(pd), &self.buffer, 0, len, 0, Access::LOCAL_WRITE)?;
        Ok(keys.lkey)
    }
}

/// The domains of a server's paths.
#[derive(Debug, Default)]
pub(super) struct Domains {
    /// By the path's slot.
    paths: Vec<Option<Domain>>,
    shared: Vec<Shared>,
}

impl Domains {
    pub(super) fn is_empty(&self) -> bool {
        self.shared.is_empty() && self.paths.iter().all(Option::is_none)
    }

    fn at_mut(&mut self, path: PathId) -> Option<&mut Domain> {
        let domain = self.paths.get_mut(usize::from(path.slot))?.as_mut();
        domain.filter(|domain| domain.generation == path.generation)
    }

    /// Returns the domain of a path, which is made if necessary, and counts one more user;
    /// [`leave`](Self::leave) ends the use.
    pub(super) fn enter(
        &mut self,
        ports: &mut dyn Ports,
        port: PortId,
        path: PathId,
    ) -> Result<PdId, Error> {
        if let Some(domain) = self.at_mut(path) {
            domain.users += 1;
            return Ok(domain.pd);
        }
        let verbs = ports.port(port);
        let pd = verbs.alloc_pd()?;
        let mut shared = ByRegion::default();
        for region in self.shared.iter().filter(|region| region.is_on(port)) {
            match region.register(verbs, pd) {
                Ok(lkey) => _ = shared.insert(region.name.0, lkey),
                Err(error) => {
                    shared.values().for_each(|lkey| verbs.dereg_mr(*lkey));
                    verbs.dealloc_pd(pd);
                    return Err(error);
                }
            }
        }
        let slot = usize::from(path.slot);
        if self.paths.len() <= slot {
            self.paths.resize_with(slot + 1, || None);
        }
        // A core reuses a slot only when nothing of the earlier generation is left.
        self.paths[slot] = Some(Domain { generation: path.generation, port, pd, users: 1, shared });
        Ok(pd)
    }

    /// Ends a use; with the last one the domain is destroyed.
    pub(super) fn leave(&mut self, ports: &mut dyn Ports, path: PathId) {
        let Some(domain) = self.at_mut(path) else { return };
        domain.users -= 1;
        if domain.users > 0 {
            return;
        }
        if let Some(gone) = self.paths[usize::from(path.slot)].take() {
            let verbs = ports.port(gone.port);
            gone.shared.values().for_each(|lkey| verbs.dereg_mr(*lkey));
            verbs.dealloc_pd(gone.pd);
        }
    }

    /// Registers memory from which all paths on these ports can be answered, present paths and
    /// later ones.
    pub(super) fn share(
        &mut self,
        ports: &mut dyn Ports,
        name: RegionId,
        buffer: &Arc<Buffer>,
        on: RegionPorts,
    ) -> Result<(), Error> {
        let region = Shared { name, buffer: Arc::clone(buffer), on };
        let mut outcome = Ok(());
        for domain in self.paths.iter_mut().flatten().filter(|domain| region.is_on(domain.port)) {
            match region.register(ports.port(domain.port), domain.pd) {
                Ok(lkey) => _ = domain.shared.insert(name.0, lkey),
                // Responses from this memory fail on this path, and end it.
                Err(error) => outcome = Err(error),
            }
        }
        self.shared.push(region);
        outcome
    }

    /// Ends the registration of shared memory.
    pub(super) fn unshare(&mut self, ports: &mut dyn Ports, name: RegionId) {
        self.shared.retain(|region| region.name != name);
        for domain in self.paths.iter_mut().flatten() {
            if let Some(lkey) = domain.shared.remove(&name.0) {
                ports.port(domain.port).dereg_mr(lkey);
            }
        }
    }

    /// The local key of shared memory for requests of a path.
    pub(super) fn shared_key(&self, path: PathId, name: RegionId) -> Option<u32> {
        let domain = self.paths.get(usize::from(path.slot))?.as_ref();
        let domain = domain.filter(|domain| domain.generation == path.generation)?;
        domain.shared.get(&name.0).copied()
    }
}
