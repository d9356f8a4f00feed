//! A device that fails as hardware does, without being closed.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::Duration;

use bowline_roce_driver::SoftDevice;
use bowline_verbs::{
    Access, AsyncEvent, Buffer, CmEvent, CmId, Completion, ConnParam, CqId, Device, DeviceAttr,
    Error, MrKeys, MwBind, MwType, PdId, QpAttr, QpInit, QpState, Qpn, RecvWr, Resource, SendFlags,
    SendWr,
};

/// Longest wait in the device itself, so that it is noticed when it dies meanwhile.
const LOOK: Duration = Duration::from_millis(20);

/// A soft device that can be made to fail.
pub(crate) struct Frail {
    of: Arc<SoftDevice>,
    /// It reports success and does nothing; but removals are carried out.
    mute: AtomicBool,
    /// It reports once that it has failed.
    fatal: AtomicBool,
    /// No object can be created.
    full: AtomicBool,
}

impl Frail {
    pub(crate) fn new(of: &Arc<SoftDevice>) -> Arc<Self> {
        let no = AtomicBool::default;
        Arc::new(Self { of: Arc::clone(of), mute: no(), fatal: no(), full: no() })
    }

    /// Makes the device fail silently.
    pub(crate) fn fall_mute(&self) {
        self.mute.store(true, SeqCst);
    }

    /// Makes the device fail and report it.
    pub(crate) fn fail(&self) {
        self.fall_mute();
        self.fatal.store(true, SeqCst);
    }

    /// From now on no object can be created.
    pub(crate) fn fill_up(&self) {
        self.full.store(true, SeqCst);
    }

    fn is_mute(&self) -> bool {
        self.mute.load(SeqCst)
    }

    fn room(&self) -> Result<(), Error> {
        if self.full.load(SeqCst) { Err(Error::Limit(Resource::Memory)) } else { Ok(()) }
    }

    /// Waits; returns whether the soft device is to be asked.
    fn sleep(&self, limit: Duration) -> bool {
        if self.is_mute() {
            std::thread::sleep(limit.min(LOOK));
        }
        !self.is_mute()
    }
}

impl Device for Frail {
    fn attr(&self) -> DeviceAttr {
        self.of.attr()
    }

    fn alloc_pd(&self) -> Result<PdId, Error> {
        self.room()?;
        self.of.alloc_pd()
    }

    fn dealloc_pd(&self, pd: PdId) -> Result<(), Error> {
        self.of.dealloc_pd(pd)
    }

    fn reg_mr(
        &self,
        pd: PdId,
        buffer: &Arc<Buffer>,
        offset: usize,
        len: usize,
        iova: Option<u64>,
        access: Access,
    ) -> Result<MrKeys, Error> {
        self.of.reg_mr(pd, buffer, offset, len, iova, access)
    }

    fn alloc_mr(&self, pd: PdId) -> Result<MrKeys, Error> {
        self.of.alloc_mr(pd)
    }

    fn dereg_mr(&self, lkey: u32) -> Result<(), Error> {
        self.of.dereg_mr(lkey)
    }

    fn withdraw_keys(&self, keys: &[u32]) -> Result<(), Error> {
        self.of.withdraw_keys(keys)
    }

    fn renew_keys(&self, keys: &[(u32, u32)]) -> Result<(), Error> {
        self.of.renew_keys(keys)
    }

    fn alloc_mw(&self, pd: PdId, kind: MwType) -> Result<u32, Error> {
        self.of.alloc_mw(pd, kind)
    }

    fn bind_mw(
        &self,
        qp: Qpn,
        window: u32,
        id: u64,
        to: &MwBind,
        flags: SendFlags,
    ) -> Result<u32, Error> {
        self.of.bind_mw(qp, window, id, to, flags)
    }

    fn dealloc_mw(&self, window: u32) -> Result<(), Error> {
        self.of.dealloc_mw(window)
    }

    fn create_cq(&self, depth: usize) -> Result<CqId, Error> {
        self.room()?;
        self.of.create_cq(depth)
    }

    fn destroy_cq(&self, cq: CqId) -> Result<(), Error> {
        self.of.destroy_cq(cq)
    }

    fn poll_cq(&self, cq: CqId, out: &mut Vec<Completion>, max: usize) -> Result<usize, Error> {
        if self.is_mute() { Ok(0) } else { self.of.poll_cq(cq, out, max) }
    }

    fn wait_cq(&self, cq: CqId, solicited: bool, limit: Option<Duration>) -> Result<bool, Error> {
        let limit = limit.unwrap_or(LOOK).min(LOOK);
        if self.sleep(limit) { self.of.wait_cq(cq, solicited, Some(limit)) } else { Ok(false) }
    }

    fn create_qp(&self, init: &QpInit) -> Result<Qpn, Error> {
        self.room()?;
        self.of.create_qp(init)
    }

    fn modify_qp(&self, qp: Qpn, attr: &QpAttr) -> Result<(), Error> {
        if self.is_mute() { Ok(()) } else { self.of.modify_qp(qp, attr) }
    }

    fn query_qp(&self, qp: Qpn) -> Result<(QpState, QpAttr), Error> {
        self.of.query_qp(qp)
    }

    fn destroy_qp(&self, qp: Qpn) -> Result<(), Error> {
        self.of.destroy_qp(qp)
    }

    fn post_send(&self, qp: Qpn, wrs: &[SendWr<'_>]) -> Result<(), (usize, Error)> {
        if self.is_mute() { Ok(()) } else { self.of.post_send(qp, wrs) }
    }

    fn post_recv(&self, qp: Qpn, wrs: &[RecvWr<'_>]) -> Result<(), (usize, Error)> {
        if self.is_mute() { Ok(()) } else { self.of.post_recv(qp, wrs) }
    }

    fn async_event(&self, limit: Duration) -> Result<AsyncEvent, Error> {
        if self.fatal.swap(false, SeqCst) {
            return Ok(AsyncEvent::DeviceFatal);
        }
        if self.sleep(limit) { self.of.async_event(limit) } else { Err(Error::TimedOut) }
    }

    fn listen(&self, at: SocketAddr) -> Result<CmId, Error> {
        self.of.listen(at)
    }

    fn connect(
        &self,
        local: Option<SocketAddr>,
        remote: SocketAddr,
        param: &ConnParam,
    ) -> Result<CmId, Error> {
        self.of.connect(local, remote, param)
    }

    fn accept(&self, id: CmId, param: &ConnParam) -> Result<(), Error> {
        self.of.accept(id, param)
    }

    fn reject(&self, id: CmId, private_data: &[u8]) -> Result<(), Error> {
        self.of.reject(id, private_data)
    }

    fn disconnect(&self, id: CmId) -> Result<(), Error> {
        if self.is_mute() { Ok(()) } else { self.of.disconnect(id) }
    }

    fn destroy_id(&self, id: CmId) -> Result<(), Error> {
        self.of.destroy_id(id)
    }

    fn cm_event(&self, limit: Duration) -> Result<CmEvent, Error> {
        let limit = limit.min(LOOK);
        if self.sleep(limit) { self.of.cm_event(limit) } else { Err(Error::TimedOut) }
    }
}
