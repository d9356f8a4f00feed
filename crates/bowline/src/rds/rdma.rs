//! Remote reads and writes, and atomics, that go before a message.

use core::ops::Range;
use std::io::IoSlice;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use bowline_rds::{RdmaAccess, RdmaHold, RdmaOp};
use bowline_rds_driver::RdmaMemory;

use super::{Error, Socket};

/// An operation on memory that a peer has announced ([`Control::RdmaDest`](super::Control)). It is
/// executed before its message is sent, at most once: after a connection was lost it is not
/// repeated, and its message is not sent.
#[derive(Clone, Debug)]
pub struct Transfer(RdmaOp);

impl Transfer {
    /// Writes a part of local memory to the peer's memory.
    ///
    /// # Errors
    /// `EINVAL` when the part does not lie within the memory, or is empty.
    pub fn write(memory: &Arc<RdmaMemory>, part: Range<usize>, key: u64) -> Result<Self, Error> {
        Self::new(RdmaAccess::Write, memory, part, key)
    }

    /// Reads from the peer's memory to a part of local memory.
    ///
    /// # Errors
    /// As [`write`](Self::write).
    pub fn read(memory: &Arc<RdmaMemory>, part: Range<usize>, key: u64) -> Result<Self, Error> {
        Self::new(RdmaAccess::Read, memory, part, key)
    }

    /// Swaps 8 bytes of the peer's memory if they are as expected, atomically. The value before is
    /// stored at offset `at` of local memory. Both places must be multiples of 8.
    ///
    /// # Errors
    /// As [`write`](Self::write).
    pub fn compare_swap(
        memory: &Arc<RdmaMemory>,
        at: usize,
        key: u64,
        compare: u64,
        swap: u64,
    ) -> Result<Self, Error> {
        let part = at..at.saturating_add(8);
        Self::new(RdmaAccess::CompareSwap { compare, swap }, memory, part, key)
    }

    /// Adds to 8 bytes of the peer's memory, atomically; otherwise like
    /// [`compare_swap`](Self::compare_swap).
    ///
    /// # Errors
    /// As [`write`](Self::write).
    pub fn fetch_add(
        memory: &Arc<RdmaMemory>,
        at: usize,
        key: u64,
        add: u64,
    ) -> Result<Self, Error> {
        Self::new(RdmaAccess::FetchAdd(add), memory, at..at.saturating_add(8), key)
    }

    fn new(
        access: RdmaAccess,
        memory: &Arc<RdmaMemory>,
        part: Range<usize>,
        key: u64,
    ) -> Result<Self, Error> {
        let bad = bowline_rds::Error::BadValue;
        let piece = memory.piece(part).filter(|piece| piece.len > 0).ok_or(bad)?;
        Ok(Self(RdmaOp {
            access,
            cookie: key,
            offset: 0,
            len: piece.len.into(),
            local: vec![piece],
            fence: false,
            silent: false,
            token: 0,
            notify: false,
            hold: Some(memory.hold()),
        }))
    }

    /// Begins at this offset of the peer's memory, in bytes, instead of its start.
    #[must_use]
    pub fn at(mut self, offset: u64) -> Self {
        self.0.offset = offset;
        self
    }

    /// Adds another part of local memory, which continues in the peer's memory where the one before
    /// it ends.
    ///
    /// # Errors
    /// As [`write`](Self::write); `EINVAL` when the memory is another one.
    pub fn and(mut self, memory: &Arc<RdmaMemory>, part: Range<usize>) -> Result<Self, Error> {
        let bad = bowline_rds::Error::BadValue;
        let piece = memory.piece(part).filter(|piece| piece.len > 0).ok_or(bad)?;
        let same = |hold: &RdmaHold| Arc::as_ptr(&hold.0).addr() == Arc::as_ptr(memory).addr();
        if !self.0.hold.as_ref().is_some_and(same) {
            return Err(bad.into());
        }
        self.0.len += u64::from(piece.len);
        self.0.local.push(piece);
        Ok(self)
    }

    /// Sends the message only after what is read has come.
    #[must_use]
    pub fn fenced(mut self) -> Self {
        self.0.fence = true;
        self
    }

    /// Sends no message if it has no payload: the peer's program notices nothing.
    #[must_use]
    pub fn silent(mut self) -> Self {
        self.0.silent = true;
        self
    }

    /// Tells how it ended, by this number: [`Control::RdmaStatus`](super::Control), once.
    #[must_use]
    pub fn notify(mut self, token: u64) -> Self {
        (self.0.token, self.0.notify) = (token, true);
        self
    }
}

impl Socket {
    /// Makes `len` bytes of memory, all zero, for [`Transfer`]s and for peers.
    ///
    /// # Errors
    /// `ENOTCONN` when the socket is not bound; `EOPNOTSUPP` unless to an address on RDMA;
    /// `ENOMEM`.
    pub fn rdma_memory(&self, len: usize) -> Result<Arc<RdmaMemory>, Error> {
        let (driver, id) = self.in_process()?;
        Ok(driver.rdma_memory(id, len)?)
    }

    /// Lets a peer use a part of memory, exactly these bytes, at most 1 MiB. Returns the key to
    /// announce to it by [`SendControl::RdmaDest`](super::SendControl) or in a payload. A key is of
    /// use to this peer alone, over any connection to it: another that tries it loses its own
    /// connection. Without `peer` every peer that knows the key may use it, for which the device
    /// must be one of this process. With `use_once` it ends with the message that follows the
    /// peer's transfer; the end of the socket ends it in any case.
    ///
    /// # Errors
    /// `ENOTCONN` when the socket is not bound; `EOPNOTSUPP` unless to an address on RDMA, and
    /// without `peer` on a device of rdma-core; `EINVAL` when the part is empty or does not lie
    /// within the memory; `EMSGSIZE` above 1 MiB; `EAGAIN` when the node has as many keys as
    /// [`Limits::rdma_regions`](super::Limits) allows.
    #[doc(alias = "RDS_GET_MR")]
    #[doc(alias = "RDS_GET_MR_FOR_DEST")]
    pub fn rdma_register(
        &self,
        memory: &Arc<RdmaMemory>,
        part: Range<usize>,
        peer: Option<IpAddr>,
        use_once: bool,
    ) -> Result<u64, Error> {
        let (driver, id) = self.in_process()?;
        Ok(driver.rdma_register(id, memory, part, peer, use_once)?)
    }

    /// Takes memory back from peers, at once: a transfer that comes later fails at the peer.
    ///
    /// # Errors
    /// `EINVAL` for a key that is not of this socket, or is taken back already.
    #[doc(alias = "RDS_FREE_MR")]
    pub fn rdma_free(&self, key: u64) -> Result<(), Error> {
        let (driver, id) = self.in_process()?;
        Ok(driver.rdma_free(id, key)?)
    }

    /// Executes transfers, at most one that moves data and one atomic, then sends a message;
    /// returns its length. When this returns, they are queued, and memory must stay as it is until
    /// they are over: see [`Transfer::notify`].
    ///
    /// # Errors
    /// As [`send_to`](Self::send_to); `EMSGSIZE` above 1 MiB; `EINVAL` for two of a kind;
    /// `EOPNOTSUPP` unless bound to an address on RDMA, or to an address of this node.
    pub fn send_rdma(
        &self,
        to: Option<SocketAddr>,
        payload: &[u8],
        transfers: &[Transfer],
    ) -> Result<usize, Error> {
        let ops: Vec<_> = transfers.iter().map(|transfer| transfer.0.clone()).collect();
        self.send_ops(to, &[IoSlice::new(payload)], &ops)
    }
}
