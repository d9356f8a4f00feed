//! A device on which long waits end only when an event arrives.

use std::net::SocketAddr;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

use bowline_roce_driver::SoftDevice;
use bowline_verbs::{
    Access, AsyncEvent, Buffer, CmEvent, CmId, Completion, ConnParam, CqId, Device, DeviceAttr,
    Error, MrKeys, MwBind, MwType, PdId, QpAttr, QpInit, QpState, Qpn, RecvWr, SendFlags, SendWr,
};

/// A wait of this length or more is treated as endless.
const LONG: Duration = Duration::from_millis(100);

pub(crate) struct Drowsy(pub(crate) Arc<SoftDevice>);

impl Device for Drowsy {
    fn wait_cq(&self, cq: CqId, solicited: bool, limit: Option<Duration>) -> Result<bool, Error> {
        self.0.wait_cq(cq, solicited, limit.filter(|limit| *limit < LONG))
    }

    fn wait_cq_or(
        &self,
        cq: CqId,
        other: BorrowedFd<'_>,
        limit: Duration,
    ) -> Result<Option<bool>, Error> {
        self.0.wait_cq_or(cq, other, limit)
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
        self.0.reg_mr(pd, buffer, offset, len, iova, access)
    }

    as_ever! {
        0:
        fn attr() -> DeviceAttr;
        fn alloc_pd() -> Result<PdId, Error>;
        fn dealloc_pd(pd: PdId) -> Result<(), Error>;
        fn alloc_mr(pd: PdId) -> Result<MrKeys, Error>;
        fn dereg_mr(lkey: u32) -> Result<(), Error>;
        fn withdraw_keys(keys: &[u32]) -> Result<(), Error>;
        fn renew_keys(keys: &[(u32, u32)]) -> Result<(), Error>;
        fn alloc_mw(pd: PdId, kind: MwType) -> Result<u32, Error>;
        fn bind_mw(qp: Qpn, window: u32, id: u64, to: &MwBind, flags: SendFlags) -> Result<u32, Error>;
        fn dealloc_mw(window: u32) -> Result<(), Error>;
        fn create_cq(depth: usize) -> Result<CqId, Error>;
        fn destroy_cq(cq: CqId) -> Result<(), Error>;
        fn poll_cq(cq: CqId, out: &mut Vec<Completion>, max: usize) -> Result<usize, Error>;
        fn create_qp(init: &QpInit) -> Result<Qpn, Error>;
        fn modify_qp(qp: Qpn, attr: &QpAttr) -> Result<(), Error>;
        fn query_qp(qp: Qpn) -> Result<(QpState, QpAttr), Error>;
        fn destroy_qp(qp: Qpn) -> Result<(), Error>;
        fn post_send(qp: Qpn, wrs: &[SendWr<'_>]) -> Result<(), (usize, Error)>;
        fn post_recv(qp: Qpn, wrs: &[RecvWr<'_>]) -> Result<(), (usize, Error)>;
        fn async_event(limit: Duration) -> Result<AsyncEvent, Error>;
        fn listen(at: SocketAddr) -> Result<CmId, Error>;
        fn connect(local: Option<SocketAddr>, remote: SocketAddr, param: &ConnParam) -> Result<CmId, Error>;
        fn accept(id: CmId, param: &ConnParam) -> Result<(), Error>;
        fn reject(id: CmId, private_data: &[u8]) -> Result<(), Error>;
        fn disconnect(id: CmId) -> Result<(), Error>;
        fn destroy_id(id: CmId) -> Result<(), Error>;
        fn cm_event(limit: Duration) -> Result<CmEvent, Error>;
    }
}
