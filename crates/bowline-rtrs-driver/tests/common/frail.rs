//! A device that fails as hardware does, without being closed.

use std::net::SocketAddr;
use std::os::fd::BorrowedFd;
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
    fn alloc_pd(&self) -> Result<PdId, Error> {
        self.room()?;
        self.of.alloc_pd()
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

    fn create_cq(&self, depth: usize) -> Result<CqId, Error> {
        self.room()?;
        self.of.create_cq(depth)
    }

    fn poll_cq(&self, cq: CqId, out: &mut Vec<Completion>, max: usize) -> Result<usize, Error> {
        if self.is_mute() { Ok(0) } else { self.of.poll_cq(cq, out, max) }
    }

    fn wait_cq(&self, cq: CqId, solicited: bool, limit: Option<Duration>) -> Result<bool, Error> {
        let limit = limit.unwrap_or(LOOK).min(LOOK);
        if self.sleep(limit) { self.of.wait_cq(cq, solicited, Some(limit)) } else { Ok(false) }
    }

    fn wait_cq_or(
        &self,
        cq: CqId,
        other: BorrowedFd<'_>,
        limit: Duration,
    ) -> Result<Option<bool>, Error> {
        let limit = limit.min(LOOK);
        if self.sleep(limit) { self.of.wait_cq_or(cq, other, limit) } else { Ok(Some(false)) }
    }

    fn create_qp(&self, init: &QpInit) -> Result<Qpn, Error> {
        self.room()?;
        self.of.create_qp(init)
    }

    fn modify_qp(&self, qp: Qpn, attr: &QpAttr) -> Result<(), Error> {
        if self.is_mute() { Ok(()) } else { self.of.modify_qp(qp, attr) }
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

    fn disconnect(&self, id: CmId) -> Result<(), Error> {
        if self.is_mute() { Ok(()) } else { self.of.disconnect(id) }
    }

    fn cm_event(&self, limit: Duration) -> Result<CmEvent, Error> {
        let limit = limit.min(LOOK);
        if self.sleep(limit) { self.of.cm_event(limit) } else { Err(Error::TimedOut) }
    }

    as_ever! {
        of:
        fn attr() -> DeviceAttr;
        fn dealloc_pd(pd: PdId) -> Result<(), Error>;
        fn alloc_mr(pd: PdId) -> Result<MrKeys, Error>;
        fn dereg_mr(lkey: u32) -> Result<(), Error>;
        fn withdraw_keys(keys: &[u32]) -> Result<(), Error>;
        fn renew_keys(keys: &[(u32, u32)]) -> Result<(), Error>;
        fn alloc_mw(pd: PdId, kind: MwType) -> Result<u32, Error>;
        fn bind_mw(qp: Qpn, window: u32, id: u64, to: &MwBind, flags: SendFlags) -> Result<u32, Error>;
        fn dealloc_mw(window: u32) -> Result<(), Error>;
        fn destroy_cq(cq: CqId) -> Result<(), Error>;
        fn query_qp(qp: Qpn) -> Result<(QpState, QpAttr), Error>;
        fn destroy_qp(qp: Qpn) -> Result<(), Error>;
        fn listen(at: SocketAddr) -> Result<CmId, Error>;
        fn connect(local: Option<SocketAddr>, remote: SocketAddr, param: &ConnParam) -> Result<CmId, Error>;
        fn accept(id: CmId, param: &ConnParam) -> Result<(), Error>;
        fn reject(id: CmId, private_data: &[u8]) -> Result<(), Error>;
        fn destroy_id(id: CmId) -> Result<(), Error>;
    }
}
