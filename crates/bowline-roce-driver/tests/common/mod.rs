//! Two devices in one process, and a connection between them.
#![allow(dead_code, reason = "not every test uses all of it")]

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bowline_roce_driver::{SoftConfig, SoftDevice};
use bowline_verbs::{
    Access, Buffer, CmEvent, CmId, Completion, ConnParam, CqId, Device, MrKeys, PdId, QpAttr,
    QpCap, QpInit, QpState, QpType, Qpn, RecvWr, Remote, SendFlags, SendOp, SendWr, Sge, Status,
};

/// Longest wait of a test, on the slowest machine.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);
/// Port listened to.
pub(crate) const PORT: u16 = 7471;
/// All rights a program may want.
pub(crate) const ALL: Access = Access::LOCAL_WRITE
    .union(Access::REMOTE_WRITE)
    .union(Access::REMOTE_READ)
    .union(Access::REMOTE_ATOMIC);

/// An address of its own for each test, so that they can run at once.
pub(crate) fn ip(net: u8, host: u8) -> IpAddr {
    IpAddr::from([127, 78, net, host])
}

pub(crate) fn open(addr: IpAddr) -> Arc<SoftDevice> {
    open_with(SoftConfig { addrs: vec![addr], ..SoftConfig::default() })
}

pub(crate) fn open_with(config: SoftConfig) -> Arc<SoftDevice> {
    Arc::new(SoftDevice::open(config).unwrap())
}

/// One end of a connection, with a registered buffer.
#[derive(Debug)]
pub(crate) struct Side {
    pub(crate) dev: Arc<SoftDevice>,
    pub(crate) pd: PdId,
    pub(crate) cq: CqId,
    pub(crate) qp: Qpn,
    pub(crate) buffer: Arc<Buffer>,
    pub(crate) keys: MrKeys,
    pub(crate) id: CmId,
}

impl Side {
    fn new(dev: &Arc<SoftDevice>, len: usize) -> Self {
        let pd = dev.alloc_pd().unwrap();
        let cq = dev.create_cq(1024).unwrap();
        let qp = dev
            .create_qp(&QpInit {
                pd,
                send_cq: cq,
                recv_cq: cq,
                srq: None,
                qp_type: QpType::Rc,
                cap: QpCap::default(),
                sq_sig_all: false,
            })
            .unwrap();
        let (state, access) = (Some(QpState::Init), Some(ALL));
        dev.modify_qp(qp, &QpAttr { state, access, ..QpAttr::default() }).unwrap();
        let buffer = Arc::new(Buffer::new(len).unwrap());
        let keys = dev.reg_mr(pd, &buffer, 0, len, None, ALL).unwrap();
        Self { dev: Arc::clone(dev), pd, cq, qp, buffer, keys, id: CmId(0) }
    }

    pub(crate) fn param(&self) -> ConnParam {
        ConnParam { qpn: self.qp, private_data: b"hello".to_vec(), ..ConnParam::default() }
    }

    pub(crate) fn sge(&self, offset: usize, len: usize) -> Sge {
        Sge {
            addr: self.buffer.addr() + offset as u64,
            len: u32::try_from(len).unwrap(),
            lkey: self.keys.lkey,
        }
    }

    /// Remote address and key of a place in this side's buffer, for the peer.
    pub(crate) fn remote(&self, offset: usize) -> Remote {
        Remote { addr: self.buffer.addr() + offset as u64, rkey: self.keys.rkey }
    }

    pub(crate) fn post(&self, id: u64, op: SendOp, offset: usize, len: usize) {
        let sges = [self.sge(offset, len)];
        let wr = SendWr { id, op, sges: &sges, inline: &[], flags: SendFlags::SIGNALED };
        self.dev.post_send(self.qp, &[wr]).unwrap();
    }

    pub(crate) fn post_recv(&self, id: u64, offset: usize, len: usize) {
        let sges = [self.sge(offset, len)];
        self.dev.post_recv(self.qp, &[RecvWr { id, sges: &sges }]).unwrap();
    }

    /// Polls until there is a completion.
    pub(crate) fn completion(&self) -> Completion {
        let start = Instant::now();
        let mut out = Vec::new();
        while self.dev.poll_cq(self.cq, &mut out, 1).unwrap() == 0 {
            assert!(start.elapsed() < PATIENCE, "no completion: {:?}", self.dev.counters());
        }
        out[0]
    }

    /// Polls until the request `id` has succeeded.
    pub(crate) fn done(&self, id: u64) -> Completion {
        let completion = self.completion();
        assert_eq!((completion.wr_id, completion.status), (id, Status::Success));
        completion
    }
}

/// Makes an end without a connection.
pub(crate) fn unconnected(dev: &Arc<SoftDevice>, len: usize) -> Side {
    Side::new(dev, len)
}

/// Connects `active` to `passive` and returns their ends, the active one first.
pub(crate) fn connect(
    active: &Arc<SoftDevice>,
    passive: &Arc<SoftDevice>,
    len: usize,
) -> (Side, Side) {
    connect_to(active, passive, len, PORT)
}

/// The same at a port.
pub(crate) fn connect_to(
    active: &Arc<SoftDevice>,
    passive: &Arc<SoftDevice>,
    len: usize,
    port: u16,
) -> (Side, Side) {
    let addr = SocketAddr::new(passive.attr().addrs[0], port);
    let listener = passive.listen(addr).unwrap();
    let mut a = Side::new(active, len);
    let mut p = Side::new(passive, len);
    a.id = active.connect(None, addr, &a.param()).unwrap();
    match passive.cm_event(PATIENCE).unwrap() {
        CmEvent::ConnectRequest { id, request } => {
            assert_eq!(request.listener, listener);
            assert_eq!(request.remote_qpn, a.qp);
            assert!(request.private_data.starts_with(b"hello"));
            p.id = id;
            passive.accept(id, &p.param()).unwrap();
        }
        other => panic!("{other:?}"),
    }
    for (dev, id) in [(active, a.id), (passive, p.id)] {
        match dev.cm_event(PATIENCE).unwrap() {
            CmEvent::Established { id: of, .. } => assert_eq!(of, id),
            other => panic!("{other:?}"),
        }
    }
    (a, p)
}
