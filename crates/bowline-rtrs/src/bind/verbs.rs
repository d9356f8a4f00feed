//! The part of verbs that a binding needs. No call blocks.

use std::net::SocketAddr;
use std::sync::Arc;

use bowline_verbs::{Access, Buffer, CmId, ConnParam, Error, MrKeys, PdId, Qpn, RecvWr, SendWr};

use crate::{PortAttr, PortId, QpShape};

/// A device, with one completion queue for all connections of a core, and one common protection
/// domain. The methods are those of [`bowline_verbs::Device`], with the differences stated here.
pub trait Verbs {
    /// The attributes that the core needs.
    fn attr(&self) -> PortAttr;

    /// Makes a protection domain.
    ///
    /// # Errors
    /// Those of the device.
    fn alloc_pd(&mut self) -> Result<PdId, Error>;

    /// Destroys a domain of [`alloc_pd`](Self::alloc_pd), which must be empty.
    fn dealloc_pd(&mut self, pd: PdId);

    /// Makes a queue pair, in the common domain by default, and takes it to INIT. It has room for
    /// one request more of each kind than the shape says, if the device allows: for the drain
    /// markers of [`Order::Close`](crate::Order::Close).
    ///
    /// # Errors
    /// Also [`Error::Limit`] when the completion queue might overrun.
    fn create_qp(&mut self, pd: Option<PdId>, shape: &QpShape) -> Result<Qpn, Error>;

    /// Takes a queue pair to ERR.
    ///
    /// # Errors
    /// Those of the device.
    fn fail_qp(&mut self, qpn: Qpn) -> Result<(), Error>;

    /// Destroys a queue pair.
    ///
    /// # Errors
    /// Those of the device.
    fn destroy_qp(&mut self, qpn: Qpn) -> Result<(), Error>;

    /// Registers memory, in the common domain by default.
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

    /// Ends a registration, by its first local key.
    fn dereg_mr(&mut self, lkey: u32);

    /// Withdraws remote keys.
    ///
    /// # Errors
    /// Those of the device; nothing has changed then.
    fn withdraw_keys(&mut self, keys: &[u32]) -> Result<(), Error>;

    /// Renews withdrawn keys.
    ///
    /// # Errors
    /// Those of the device; nothing has changed then.
    fn renew_keys(&mut self, keys: &[(u32, u32)]) -> Result<(), Error>;

    /// Posts sends.
    ///
    /// # Errors
    /// Those of the device, and the number of work requests posted.
    fn post_send(&mut self, qpn: Qpn, wrs: &[SendWr<'_>]) -> Result<(), (usize, Error)>;

    /// Posts receives.
    ///
    /// # Errors
    /// Those of the device, and the number of work requests posted.
    fn post_recv(&mut self, qpn: Qpn, wrs: &[RecvWr<'_>]) -> Result<(), (usize, Error)>;

    /// Begins a connection.
    ///
    /// # Errors
    /// Those of the device.
    fn connect(
        &mut self,
        local: SocketAddr,
        remote: SocketAddr,
        param: &ConnParam,
    ) -> Result<CmId, Error>;

    /// Accepts a connection request.
    ///
    /// # Errors
    /// Those of the device.
    fn accept(&mut self, id: CmId, param: &ConnParam) -> Result<(), Error>;

    /// Refuses a connection request.
    ///
    /// # Errors
    /// Those of the device.
    fn reject(&mut self, id: CmId, private: &[u8]) -> Result<(), Error>;

    /// Disconnects.
    ///
    /// # Errors
    /// Those of the device.
    fn disconnect(&mut self, id: CmId) -> Result<(), Error>;

    /// Destroys a connection-manager id.
    ///
    /// # Errors
    /// Those of the device.
    fn destroy_id(&mut self, id: CmId) -> Result<(), Error>;
}

/// The devices of a core.
pub trait Ports {
    /// The number of devices.
    fn count(&self) -> usize;

    /// One device; ids are below [`count`](Self::count).
    fn port(&mut self, port: PortId) -> &mut dyn Verbs;
}
