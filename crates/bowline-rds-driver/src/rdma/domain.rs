//! Protection domains: each peer has its own, in which the queue pairs of all its connections are.
//! So a key is of use only to the peer in whose domain the memory is registered, over each of that
//! peer's connections, and the device sees to it [SAFE-12], [RMR-8].

use core::fmt;
use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use bowline_rds::Error as CoreError;
use bowline_verbs::{Access, Buffer, Device, Error, MrKeys, PdId};

use super::RdmaMemory;

/// A protection domain. It ends when nothing is in it any more.
pub(crate) struct Domain {
    device: Arc<dyn Device>,
    pub(crate) pd: PdId,
    /// The domain in which it is, if any.
    _outer: Option<Arc<Self>>,
}

impl Drop for Domain {
    fn drop(&mut self) {
        let _ = self.device.dealloc_pd(self.pd);
    }
}

/// Memory that is registered in a domain, until this is dropped.
pub(crate) struct Region {
    domain: Arc<Domain>,
    pub(crate) keys: MrKeys,
    /// What the memory is part of, where that is to be kept for as long.
    memory: Option<Arc<RdmaMemory>>,
}

impl Region {
    /// Registers `len` bytes of a buffer, from `offset` on. The first has the address `iova`, or
    /// that of the memory.
    pub(crate) fn new(
        domain: &Arc<Domain>,
        buffer: &Arc<Buffer>,
        (offset, len): (usize, usize),
        iova: Option<u64>,
        access: Access,
    ) -> Result<Self, Error> {
        let keys = domain.device.reg_mr(domain.pd, buffer, offset, len, iova, access)?;
        Ok(Self { domain: Arc::clone(domain), keys, memory: None })
    }

    /// Keeps what the memory is part of.
    pub(crate) fn of(mut self, memory: &Arc<RdmaMemory>) -> Self {
        self.memory = Some(Arc::clone(memory));
        self
    }

    pub(crate) fn is_in(&self, domain: &Arc<Domain>) -> bool {
        Arc::ptr_eq(&self.domain, domain)
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        let _ = self.domain.device.dereg_mr(self.keys.lkey);
        // Not given back before the device has let go of it.
        drop(self.memory.take());
    }
}

/// The domains of a device.
pub(crate) struct Domains {
    device: Arc<dyn Device>,
    /// The domain in which those of the peers are; `None` on a device that has none within another.
    outer: Option<Arc<Domain>>,
    of_peers: Mutex<HashMap<IpAddr, Weak<Domain>>>,
}

impl Domains {
    pub(crate) fn new(device: &Arc<dyn Device>) -> Result<Self, Error> {
        let device = Arc::clone(device);
        let outer = if device.attr().inner_pds {
            let pd = device.alloc_pd()?;
            Some(Arc::new(Domain { device: Arc::clone(&device), pd, _outer: None }))
        } else {
            None
        };
        Ok(Self { device, outer, of_peers: Mutex::default() })
    }

    /// Returns the domain of a peer, which is made if there is none.
    pub(crate) fn of_peer(&self, peer: IpAddr) -> Result<Arc<Domain>, Error> {
        let peer = peer.to_canonical();
        let mut of_peers = self.of_peers.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(domain) = of_peers.get(&peer).and_then(Weak::upgrade) {
            return Ok(domain);
        }
        let pd = match &self.outer {
            Some(outer) => self.device.alloc_inner_pd(outer.pd)?,
            None => self.device.alloc_pd()?,
        };
        let (device, outer) = (Arc::clone(&self.device), self.outer.clone());
        let domain = Arc::new(Domain { device, pd, _outer: outer });
        of_peers.retain(|_, domain| domain.strong_count() > 0);
        of_peers.insert(peer, Arc::downgrade(&domain));
        Ok(domain)
    }

    /// Returns the domain in which operations with a peer find their local memory: on a device that
    /// can, one for all peers.
    pub(crate) fn of_operations(&self, peer: IpAddr) -> Result<Arc<Domain>, Error> {
        self.outer.as_ref().map_or_else(|| self.of_peer(peer), |outer| Ok(Arc::clone(outer)))
    }

    /// Returns the domain whose memory all peers may use.
    pub(crate) fn of_all(&self) -> Result<&Arc<Domain>, CoreError> {
        self.outer.as_ref().ok_or(CoreError::NotSupported)
    }
}

impl fmt::Debug for Domains {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let of_peers = self.of_peers.lock().unwrap_or_else(PoisonError::into_inner);
        f.debug_struct("Domains").field("peers", &of_peers.len()).finish_non_exhaustive()
    }
}
