//! The part of verbs that a binding needs. None of it waits.

use std::net::SocketAddr;
use std::sync::Arc;

use bowline_verbs::{Access, Buffer, CmId, ConnParam, Error, MrKeys, PdId, Qpn, RecvWr, SendWr};

use crate::{PortAttr, PortId, QpShape};

/// A device, with one completion queue for everything of a core, and one protection domain for
/// whatever has none of its own. The methods are those of [`bowline_verbs::Device`] unless they say
/// more.
pub trait Verbs {
    /// What the core is told of it.
    fn attr(&self) -> PortAttr;

    /// Makes a protection domain.
    ///
    /// # Errors
    /// Those of the device.
    fn alloc_pd(&mut self) -> Result<PdId, Error>;

    /// Removes one of [`alloc_pd`](Self::alloc_pd), in which nothing is left.
    fn dealloc_pd(&mut self, pd: PdId);

    /// Makes a queue pair, in the common domain if in no other, and takes it to INIT. It has room
    /// for one request more of each kind than the shape says, if the device can: the markers of
    /// [`Order::Close`](crate::Order::Close).
    ///
    /// # Errors
    /// Also [`Error::Limit`] when the completion queue might overrun.
    fn create_qp(&mut self, pd: Option<PdId>, shape: &QpShape) -> Result<Qpn, Error>;

    /// Takes a queue pair to ERR.
    ///
    /// # Errors
    /// Those of the device.
    fn fail_qp(&mut self, qpn: Qpn) -> Result<(), Error>;

    /// Removes a queue pair.
    ///
    /// # Errors
    /// Those of the device.
    fn destroy_qp(&mut self, qpn: Qpn) -> Result<(), Error>;

    /// Registers memory, in the common domain if in no other.
    ///
    /// # Errors
    /// Those of the device.
    fn reg_mr(
        &mut self,
        pd: Option<PdId>,
        buffer: &Arc<Buffer>,
        offset: usize,
        len: usize,
        iova: u64,
        access: Access,
    ) -> Result<MrKeys, Error>;

    /// Makes a region for [`SendOp::RegMr`](bowline_verbs::SendOp::RegMr); returns its first key.
    ///
    /// # Errors
    /// Those of the device.
    fn alloc_mr(&mut self) -> Result<u32, Error>;

    /// Ends a registration, by the local key it began with.
    fn dereg_mr(&mut self, lkey: u32);

    /// Takes memory away from peers.
    ///
    /// # Errors
    /// Those of the device; nothing has changed then.
    fn withdraw_keys(&mut self, keys: &[u32]) -> Result<(), Error>;

    /// Gives it back.
    ///
    /// # Errors
    /// Those of the device; nothing has changed then.
    fn renew_keys(&mut self, keys: &[(u32, u32)]) -> Result<(), Error>;

    /// Posts sends.
    ///
    /// # Errors
    /// Those of the device, and how many were posted.
    fn post_send(&mut self, qpn: Qpn, wrs: &[SendWr<'_>]) -> Result<(), (usize, Error)>;

    /// Posts receives.
    ///
    /// # Errors
    /// Those of the device, and how many were posted.
    fn post_recv(&mut self, qpn: Qpn, wrs: &[RecvWr<'_>]) -> Result<(), (usize, Error)>;

    /// Connects.
    ///
    /// # Errors
    /// Those of the device.
    fn connect(
        &mut self,
        local: SocketAddr,
        remote: SocketAddr,
        param: &ConnParam,
    ) -> Result<CmId, Error>;

    /// Accepts.
    ///
    /// # Errors
    /// Those of the device.
    fn accept(&mut self, id: CmId, param: &ConnParam) -> Result<(), Error>;

    /// Refuses.
    ///
    /// # Errors
    /// Those of the device.
    fn reject(&mut self, id: CmId, private: &[u8]) -> Result<(), Error>;

    /// Disconnects.
    ///
    /// # Errors
    /// Those of the device.
    fn disconnect(&mut self, id: CmId) -> Result<(), Error>;

    /// Forgets a connection.
    ///
    /// # Errors
    /// Those of the device.
    fn destroy_id(&mut self, id: CmId) -> Result<(), Error>;
}

/// The devices of a core.
pub trait Ports {
    /// How many there are.
    fn count(&self) -> usize;

    /// One of them; ids are below [`count`](Self::count).
    fn port(&mut self, port: PortId) -> &mut dyn Verbs;
}
