//! Memory for RDMA operations: of this side, and what peers may use.

use core::any::Any;
use core::fmt;
use core::ops::Range;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};

use bowline_base::clock;
use bowline_rds::{Error as CoreError, RdmaHold, RdmaOp, RdmaPiece, SendMsg, SocketId};
use bowline_verbs::{Access, Buffer, ForeignMemory};

use super::Port;
use super::domain::{Domain, Region};
use crate::driver::Driver;
use crate::error::Error;
use crate::shared::Shared;

/// Rights of peers to announced memory, whatever they are told they may do [RMR-6], [ATOM-7].
const SHARED: Access = Access::LOCAL_WRITE
    .union(Access::REMOTE_WRITE)
    .union(Access::REMOTE_READ)
    .union(Access::REMOTE_ATOMIC);

/// Size of a page in bytes, as peers know it.
const PAGE: u64 = 4096;

/// Memory that RDMA operations read and write. It is given back when neither the program nor an
/// operation nor a peer uses it any more.
pub struct RdmaMemory {
    buffer: Arc<Buffer>,
    /// Registered when first used: once, or on a device of rdma-core once for each peer.
    regions: Arc<Mutex<Vec<Region>>>,
    /// What is dropped with the last use of this.
    _guard: Option<Arc<dyn Any + Send + Sync>>,
}

impl fmt::Debug for RdmaMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RdmaMemory").field("len", &self.len()).finish_non_exhaustive()
    }
}

impl RdmaMemory {
    /// Bytes.
    pub fn len(&self) -> usize {
        self.buffer.len()
    }

    /// Tells whether there is none.
    pub fn is_empty(&self) -> bool {
        self.buffer.is_empty()
    }

    /// Copies bytes from `offset` on to `out`. Peers and operations may change them meanwhile.
    ///
    /// # Panics
    /// When they do not lie within the memory.
    pub fn read(&self, offset: usize, out: &mut [u8]) {
        self.buffer.read(offset, out);
    }

    /// Copies `bytes` to the memory, from `offset` on.
    ///
    /// # Panics
    /// When they do not fit.
    pub fn write(&self, offset: usize, bytes: &[u8]) {
        self.buffer.write(offset, bytes);
    }

    /// Returns a piece of the memory for an operation; `None` if it does not lie within. Its key is
    /// filled in when it is sent, for it depends on the peer.
    #[doc(hidden)]
    pub fn piece(&self, range: Range<usize>) -> Option<RdmaPiece> {
        if range.end > self.buffer.len() {
            return None;
        }
        let len = u32::try_from(range.end.checked_sub(range.start)?).ok()?;
        let addr = self.buffer.addr() + range.start as u64;
        Some(RdmaPiece { addr, len, lkey: 0 })
    }

    /// Returns what keeps the memory in place while an operation uses it.
    #[doc(hidden)]
    pub fn hold(self: &Arc<Self>) -> RdmaHold {
        let memory: Arc<Self> = Arc::clone(self);
        RdmaHold(memory)
    }
}

impl RdmaMemory {
    fn new(buffer: Buffer) -> Arc<Self> {
        Arc::new(Self { buffer: Arc::new(buffer), regions: Arc::default(), _guard: None })
    }

    /// The memory of another process: see [`Buffer::of_process`]. Only devices of software can use
    /// it; others refuse it with EOPNOTSUPP.
    pub fn of_process(memory: Arc<dyn ForeignMemory>) -> Arc<Self> {
        Self::new(Buffer::of_process(memory))
    }

    /// The same memory for some uses: `guard` is dropped when the last of the regions and of the
    /// operations has ended that were made with what this returns.
    pub fn guarded(&self, guard: Arc<dyn Any + Send + Sync>) -> Arc<Self> {
        let (buffer, regions) = (Arc::clone(&self.buffer), Arc::clone(&self.regions));
        Arc::new(Self { buffer, regions, _guard: Some(guard) })
    }

    /// Returns the key of the memory in a domain.
    fn lkey(&self, domain: &Arc<Domain>) -> Result<u32, Error> {
        let mut regions = self.regions.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(region) = regions.iter().find(|region| region.is_in(domain)) {
            return Ok(region.keys.lkey);
        }
        let all = (0, self.len());
        let region = Region::new(domain, &self.buffer, all, None, Access::LOCAL_WRITE)?;
        let lkey = region.keys.lkey;
        regions.push(region);
        Ok(lkey)
    }
}

impl Driver {
    /// Makes `len` bytes of memory, all zero, for operations.
    ///
    /// # Errors
    /// [`Error::Core`] with `NotConnected` when the socket is not bound, `NotSupported` unless to
    /// an address on RDMA; [`Error::Rdma`] when there is no memory.
    pub fn rdma_memory(&self, id: SocketId, len: usize) -> Result<Arc<RdmaMemory>, Error> {
        self.shared().port_of(id)?;
        let buffer = Buffer::new(len).map_err(|error| Error::Rdma {
            why: error.to_string(),
            errno: bowline_base::Errno::of(&error),
        })?;
        Ok(RdmaMemory::new(buffer))
    }

    /// Lets `peer` use a part of memory, exactly these bytes, until it is taken back by
    /// [`rdma_free`](Self::rdma_free), by the end of the socket or, with `use_once`, by the message
    /// of the peer when it has used it. Without `peer` every peer may, if it knows the number.
    /// Returns the number to announce to a peer [RDMA-5].
    ///
    /// # Errors
    /// [`Error::Core`] with those of [`bowline_rds::Node::check_region`], with `BadValue` when the
    /// part does not lie within the memory, and with `NotSupported` when memory of the device
    /// cannot be for every peer; [`Error::Rdma`] when the device refuses.
    pub fn rdma_register(
        &self,
        id: SocketId,
        memory: &Arc<RdmaMemory>,
        part: Range<usize>,
        peer: Option<IpAddr>,
        use_once: bool,
    ) -> Result<u64, Error> {
        let sh = self.shared();
        let len = part.len();
        self.with_core(|core, _| core.check_region(id, len as u64))?;
        let index = sh.port_of(id)?;
        if memory.piece(part.clone()).is_none() {
            return Err(CoreError::BadValue.into());
        }
        let port = &sh.rdma[index];
        let domain = match peer {
            Some(peer) => port.domains.of_peer(peer)?,
            None => Arc::clone(port.domains.of_all()?),
        };
        // Addresses are offsets in the first page, as with a kernel, so that what is aligned here
        // is so for the peer; but the region has exactly these bytes [RDMA-2].
        let offset = (memory.buffer.addr() + part.start as u64) % PAGE;
        let part = (part.start, len);
        let region = Region::new(&domain, &memory.buffer, part, Some(offset), SHARED)?;
        let region = region.of(memory);
        let keys = region.keys;
        port.regions().insert(keys.lkey, region);
        let tag = (index as u64) << 32 | u64::from(keys.lkey);
        let added = self
            .with_core(|core, _| core.add_region(id, keys.rkey, len as u64, peer, use_once, tag));
        added.inspect_err(|_| sh.release_region(tag))?;
        Ok(offset << 32 | u64::from(keys.rkey))
    }

    /// Takes memory back from peers, at once.
    ///
    /// # Errors
    /// Those of [`bowline_rds::Node::free_region`].
    pub fn rdma_free(&self, id: SocketId, cookie: u64) -> Result<(), Error> {
        self.with_core(|core, _| core.free_region(id, cookie))?;
        Ok(())
    }
}

impl Shared {
    /// Returns the index of the device that serves the address of a socket.
    fn port_of(&self, id: SocketId) -> Result<usize, Error> {
        let mut st = self.lock();
        st.at(clock::now());
        let bound = st.core.local_addr(id)?.ok_or(CoreError::NotConnected)?;
        st.core.check_rdma_socket(id)?;
        let serves = |port: &Port| port.addrs().contains(&bound.ip());
        Ok(self.rdma.iter().position(serves).ok_or(CoreError::NotSupported)?)
    }

    /// Returns the operations of a message with the keys of their memory for its destination. A
    /// message that cannot be sent keeps them as they are, and the core tells what is wrong.
    pub(crate) fn register_local(
        &self,
        id: SocketId,
        msg: &SendMsg<'_>,
    ) -> Result<Vec<RdmaOp>, Error> {
        let mut ops = msg.rdma.to_vec();
        let to = msg.name.or_else(|| self.lock().core.peer_addr(id).ok());
        let (Some(to), Ok(index)) = (to, self.port_of(id)) else { return Ok(ops) };
        let domain = self.rdma[index].domains.of_operations(to.ip())?;
        for op in &mut ops {
            let memory = op.hold.as_ref().and_then(|hold| hold.0.downcast_ref::<RdmaMemory>());
            if let Some(memory) = memory {
                let lkey = memory.lkey(&domain)?;
                op.local.iter_mut().for_each(|piece| piece.lkey = lkey);
            }
        }
        Ok(ops)
    }

    /// Refuses new requests of peers for memory that the core knows by this number, if the device
    /// can; otherwise they end with its release.
    pub(crate) fn withdraw_region(&self, tag: u64) {
        let Some(port) = self.rdma.get((tag >> 32) as usize) else { return };
        let rkey = port.regions().get(&(tag as u32)).map(|region| region.keys.rkey);
        if let Some(rkey) = rkey {
            let _ = port.device.withdraw_keys(&[rkey]);
        }
    }

    /// Takes memory back that the core knows by this number, at once [RMR-7].
    pub(crate) fn release_region(&self, tag: u64) {
        if let Some(port) = self.rdma.get((tag >> 32) as usize) {
            let region = port.regions().remove(&(tag as u32));
            drop(region); // not under the lock: a device may take its time
        }
    }
}
