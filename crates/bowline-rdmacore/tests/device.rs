//! The provider on a real device: the one that `BOWLINE_RDMA_DEVICE` names, such as rxe0. Without
//! it these tests are skipped. The lab runs them in a guest (interop scenario `rdmacore-tests`).

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bowline_rdmacore::{RdmaCoreDevice, list};
use bowline_verbs::{
    Access, AsyncEvent, Buffer, CmEvent, CmId, Completion, ConnParam, CqId, Device, Error,
    InvalidReason, MrKeys, MwBind, MwType, Object, PdId, QpAttr, QpCap, QpInit, QpState, QpType,
    Qpn, RecvWr, RejectReason, Remote, SendFlags, SendOp, SendWr, Sge, Status, UdDest, WcOpcode,
    next_key,
};

use bowline_testkit::skipped;

const LIMIT: Duration = Duration::from_secs(10);
const SIZE: usize = 65_536;
const SENDS: usize = 64;

fn device() -> Option<RdmaCoreDevice> {
    let Ok(name) = std::env::var("BOWLINE_RDMA_DEVICE") else {
        skipped::because("BOWLINE_RDMA_DEVICE names no device");
        return None;
    };
    Some(RdmaCoreDevice::open(&name).unwrap())
}

/// A side of a connection.
struct Side<'a> {
    device: &'a RdmaCoreDevice,
    pd: PdId,
    cq: CqId,
    qpn: Qpn,
    buffer: Arc<Buffer>,
    keys: MrKeys,
}

impl<'a> Side<'a> {
    fn new(device: &'a RdmaCoreDevice) -> Self {
        let pd = device.alloc_pd().unwrap();
        let cq = device.create_cq(256).unwrap();
        let cap = QpCap { max_send_wr: SENDS, max_recv_wr: SENDS, ..QpCap::default() };
        let (qp_type, sq_sig_all) = (QpType::Rc, false);
        let init = QpInit { pd, send_cq: cq, recv_cq: cq, srq: None, qp_type, cap, sq_sig_all };
        let qpn = device.create_qp(&init).unwrap();
        let access = Access::LOCAL_WRITE
            | Access::REMOTE_WRITE
            | Access::REMOTE_READ
            | Access::REMOTE_ATOMIC;
        let to_init =
            QpAttr { state: Some(QpState::Init), access: Some(access), ..QpAttr::default() };
        device.modify_qp(qpn, &to_init).unwrap();
        let buffer = Arc::new(Buffer::new(SIZE).unwrap());
        let keys = device.reg_mr(pd, &buffer, 0, SIZE, None, access).unwrap();
        Self { device, pd, cq, qpn, buffer, keys }
    }

    fn sge(&self, offset: usize, len: u32) -> Sge {
        Sge { addr: self.buffer.addr() + offset as u64, len, lkey: self.keys.lkey }
    }

    fn remote(&self, offset: u64) -> Remote {
        Remote { addr: self.buffer.addr() + offset, rkey: self.keys.rkey }
    }

    fn receive(&self, id: u64, offset: usize, len: u32) {
        self.device.post_recv(self.qpn, &[RecvWr { id, sges: &[self.sge(offset, len)] }]).unwrap();
    }

    fn send(&self, id: u64, op: SendOp, offset: usize, len: u32) {
        let (sges, flags) = ([self.sge(offset, len)], SendFlags::SIGNALED);
        let wr = SendWr { id, op, sges: &sges, inline: &[], flags };
        self.device.post_send(self.qpn, &[wr]).unwrap();
    }

    /// Waits for the next completion.
    fn done(&self) -> Completion {
        let mut out = Vec::new();
        while self.device.poll_cq(self.cq, &mut out, 1).unwrap() == 0 {
            assert!(self.device.wait_cq(self.cq, false, Some(LIMIT)).unwrap(), "no completion");
        }
        out[0]
    }

    fn param(&self, private_data: &[u8]) -> ConnParam {
        let private_data = private_data.to_vec();
        ConnParam {
            qpn: self.qpn,
            private_data,
            responder_resources: 4,
            initiator_depth: 3,
            ..ConnParam::default()
        }
    }

    fn close(self) {
        self.device.destroy_qp(self.qpn).unwrap();
        self.device.dereg_mr(self.keys.lkey).unwrap();
        self.device.destroy_cq(self.cq).unwrap();
        self.device.dealloc_pd(self.pd).unwrap();
    }
}

fn place(device: &RdmaCoreDevice, port: u16) -> SocketAddr {
    SocketAddr::new(device.attr().addrs[0], port)
}

/// Two devices of the same name, one side connects to the other.
fn connect(a: &Side<'_>, b: &Side<'_>, port: u16) -> (CmId, CmId, CmId) {
    connect_from(a, 0, b, port)
}

/// The same, from a given local port.
fn connect_from(a: &Side<'_>, from: u16, b: &Side<'_>, port: u16) -> (CmId, CmId, CmId) {
    let at = place(b.device, port);
    let listener = b.device.listen(at).unwrap();
    let local = SocketAddr::new(at.ip(), from);
    let from = a.device.connect(Some(local), at, &a.param(b"hello")).unwrap();
    let CmEvent::ConnectRequest { id: to, request } = b.device.cm_event(LIMIT).unwrap() else {
        panic!("not a request");
    };
    assert_eq!((request.listener, request.local, request.remote.ip()), (listener, at, at.ip()));
    assert_eq!(request.private_data.len(), 56);
    assert!(request.private_data.starts_with(b"hello\0"));
    assert_eq!((request.responder_resources, request.initiator_depth), (4, 3));
    assert_eq!(request.remote_qpn, a.qpn);
    b.device.accept(to, &b.param(b"welcome")).unwrap();
    match a.device.cm_event(LIMIT).unwrap() {
        CmEvent::Established { id, private_data, .. } => {
            assert_eq!((id, private_data.len()), (from, 196));
            assert!(private_data.starts_with(b"welcome\0"));
        }
        other => panic!("{other:?}"),
    }
    let established = b.device.cm_event(LIMIT).unwrap();
    assert!(matches!(established, CmEvent::Established { id, .. } if id == to), "{established:?}");
    (from, to, listener)
}

// tests [VERBS-1], [QP-8]
#[test]
fn every_operation_does_what_it_says() {
    let (Some(one), Some(two)) = (device(), device()) else { return };
    let (a, b) = (Side::new(&one), Side::new(&two));
    let (from, to, _) = connect(&a, &b, 7301);
    let (state, attr) = one.query_qp(a.qpn).unwrap();
    assert_eq!((state, attr.dest_qpn), (QpState::Rts, Some(b.qpn)));
    let av = attr.av.unwrap();
    assert_eq!((av.local, av.remote), (one.attr().addrs[0], two.attr().addrs[0]));
    assert_eq!(attr.path_mtu, Some(one.attr().mtu));

    b.receive(1, 0, 4096);
    a.buffer.write(0, b"some words");
    a.send(2, SendOp::SendImm(0x0102_0304), 0, 10);
    let got = b.done();
    assert_eq!((got.wr_id, got.status, got.opcode), (1, Status::Success, WcOpcode::Recv));
    assert_eq!((got.byte_len, got.imm, got.qpn), (10, Some(0x0102_0304), b.qpn));
    assert_eq!((a.done().wr_id, a.done_none()), (2, ()));

    b.receive(3, 0, 0);
    a.send(4, SendOp::WriteImm(b.remote(100), 7), 0, 10);
    let got = b.done();
    assert_eq!((got.opcode, got.imm, got.byte_len), (WcOpcode::RecvRdmaWithImm, Some(7), 10));
    let mut bytes = [0; 10];
    b.buffer.read(100, &mut bytes);
    assert_eq!(&bytes, b"some words");
    assert_eq!(a.done().opcode, WcOpcode::RdmaWrite);

    b.buffer.write(0, &41_u64.to_ne_bytes());
    a.send(5, SendOp::FetchAdd { remote: b.remote(0), add: 1 }, 1000, 8);
    assert_eq!(a.done().opcode, WcOpcode::FetchAdd);
    a.send(6, SendOp::CompareSwap { remote: b.remote(0), compare: 42, swap: 77 }, 1008, 8);
    assert_eq!(a.done().opcode, WcOpcode::CompSwap);
    a.send(7, SendOp::Read(b.remote(0)), 1016, 8);
    assert_eq!(a.done().opcode, WcOpcode::RdmaRead);
    for (at, wanted) in [(1000, 41_u64), (1008, 42), (1016, 77)] {
        let mut word = [0; 8];
        a.buffer.read(at, &mut word);
        assert_eq!(u64::from_ne_bytes(word), wanted);
    }

    // More requests than are handed over at once, only the last one signalled; inline bytes are
    // copied at the call.
    (0..40).for_each(|n| b.receive(100 + n, 0, 16));
    let texts: Vec<[u8; 4]> = (0..40_u32).map(u32::to_be_bytes).collect();
    let wrs: Vec<SendWr<'_>> = texts
        .iter()
        .enumerate()
        .map(|(n, text)| SendWr {
            id: n as u64,
            op: SendOp::Send,
            sges: &[],
            inline: text,
            flags: if n == 39 {
                SendFlags::INLINE | SendFlags::SIGNALED
            } else {
                SendFlags::INLINE
            },
        })
        .collect();
    one.post_send(a.qpn, &wrs).unwrap();
    assert_eq!(a.done().wr_id, 39);
    for n in 0..40 {
        let got = b.done();
        assert_eq!((got.wr_id, got.byte_len), (100 + n, 4));
    }

    // Operations that userspace verbs lack are refused; the other requests of the list are posted.
    let good = SendWr {
        id: 1,
        op: SendOp::Write(b.remote(0)),
        sges: &[],
        inline: &[],
        flags: SendFlags::SIGNALED,
    };
    let bad = SendWr {
        op: SendOp::RegMr { key: 0, pieces: Vec::new(), iova: 0, access: Access::empty() },
        ..good.clone()
    };
    assert!(matches!(one.post_send(a.qpn, &[good, bad]), Err((1, Error::NotSupported(_)))));
    assert_eq!(a.done().wr_id, 1);
    assert!(matches!(one.alloc_mr(a.pd), Err(Error::NotSupported(_))));

    // Objects in use cannot be destroyed.
    assert_eq!(one.destroy_cq(a.cq), Err(Error::Busy(Object::CompletionQueue)));
    assert_eq!(one.dealloc_pd(a.pd), Err(Error::Busy(Object::ProtectionDomain)));
    assert_eq!(one.destroy_qp(a.qpn), Err(Error::Busy(Object::QueuePair)));

    // At the end everything posted is flushed on both sides, with its own opcode.
    b.receive(9, 0, 16);
    one.disconnect(from).unwrap();
    let flushed = b.done();
    assert_eq!((flushed.wr_id, flushed.status, flushed.is_recv()), (9, Status::WrFlushErr, true));
    for (device, id) in [(&one, from), (&two, to)] {
        let event = device.cm_event(LIMIT).unwrap();
        assert_eq!(event, CmEvent::Disconnected { id });
        device.destroy_id(id).unwrap();
    }
    assert_eq!(one.query_qp(a.qpn).unwrap().0, QpState::Err);
    a.close();
    b.close();
}

impl Side<'_> {
    /// Nothing has completed.
    fn done_none(&self) {
        let began = Instant::now();
        let limit = Duration::from_millis(50);
        assert!(!self.device.wait_cq(self.cq, false, Some(limit)).unwrap());
        assert!(began.elapsed() >= limit);
    }
}

#[test]
fn memory_without_a_key_is_not_touched() {
    let (Some(one), Some(two)) = (device(), device()) else { return };
    let (a, b) = (Side::new(&one), Side::new(&two));
    connect(&a, &b, 7302);
    a.receive(5, 0, 16);
    b.receive(8, 0, 16);
    // One byte beyond the region.
    a.send(1, SendOp::Write(b.remote(SIZE as u64 - 7)), 0, 8);
    let failed = a.done();
    assert_eq!((failed.wr_id, failed.status, failed.is_recv()), (1, Status::RemAccessErr, false));
    let flushed = a.done();
    assert_eq!((flushed.wr_id, flushed.status, flushed.is_recv()), (5, Status::WrFlushErr, true));
    assert_eq!((b.done().wr_id, b.done_none()), (8, ()));
}

// tests [CM-10], [CMA-13]
#[test]
fn refusals_are_told() {
    let (Some(one), Some(two)) = (device(), device()) else { return };
    let (a, b) = (Side::new(&one), Side::new(&two));
    let at = place(&two, 7303);
    let id = one.connect(Some(SocketAddr::new(at.ip(), 0)), at, &a.param(&[])).unwrap();
    match one.cm_event(LIMIT).unwrap() {
        CmEvent::Rejected { id: of, reason, .. } => {
            assert_eq!((of, reason), (id, RejectReason::INVALID_SERVICE_ID));
        }
        other => panic!("{other:?}"),
    }
    one.destroy_id(id).unwrap();
    two.listen(at).unwrap();
    assert!(matches!(two.listen(at), Err(Error::AddrInUse(_))));
    let elsewhere = "192.0.2.77:7303".parse().unwrap();
    assert_eq!(two.listen(elsewhere), Err(Error::AddrNotAvailable));
    let fresh = Side::new(&one);
    let id = one.connect(None, at, &fresh.param(&[])).unwrap();
    let CmEvent::ConnectRequest { id: request, .. } = two.cm_event(LIMIT).unwrap() else {
        panic!("not a request");
    };
    assert!(matches!(two.accept(request, &b.param(&[0; 197])), Err(Error::Invalid(_))));
    two.reject(request, b"no room").unwrap();
    match one.cm_event(LIMIT).unwrap() {
        CmEvent::Rejected { id: of, reason, private_data } => {
            assert_eq!((of, reason), (id, RejectReason::CONSUMER));
            assert!(private_data.starts_with(b"no room\0"));
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(two.reject(CmId(99_999), &[]), Err(Error::NoSuch(Object::Connection)));
}

#[test]
fn several_threads_wait_for_one_queue() {
    let (Some(one), Some(two)) = (device(), device()) else { return };
    let (a, b) = (Side::new(&one), Side::new(&two));
    connect(&a, &b, 7304);
    (0..20).for_each(|n| b.receive(n, 0, 16));
    let taken = std::thread::scope(|scope| {
        let waiter = || {
            let (mut out, end) = (Vec::new(), Instant::now() + LIMIT);
            let mut count = 0;
            while Instant::now() < end {
                let there = two.wait_cq(b.cq, false, Some(Duration::from_millis(300))).unwrap();
                count += two.poll_cq(b.cq, &mut out, 1).unwrap();
                if !there {
                    break;
                }
            }
            count
        };
        let waiters = [scope.spawn(waiter), scope.spawn(waiter), scope.spawn(waiter)];
        for n in 0..20 {
            a.send(n, SendOp::Send, 0, 8);
            std::thread::sleep(Duration::from_millis(2));
        }
        waiters.into_iter().map(|waiter| waiter.join().unwrap()).sum::<usize>()
    });
    assert_eq!(taken, 20);
}

#[test]
fn connections_leave_nothing_behind() {
    let (Some(one), Some(two)) = (device(), device()) else { return };
    for n in 0..30 {
        let (a, b) = (Side::new(&one), Side::new(&two));
        let (from, to, listener) = connect(&a, &b, 7400 + n);
        if n % 2 == 0 {
            two.disconnect(to).unwrap();
        }
        one.destroy_id(from).unwrap();
        two.destroy_id(to).unwrap();
        two.destroy_id(listener).unwrap();
        a.close();
        b.close();
    }
}

// tests [RT-35]
#[test]
fn several_connections_leave_from_one_port() {
    let (Some(one), Some(two)) = (device(), device()) else { return };
    let (a, b) = (Side::new(&one), Side::new(&two));
    let (c, d) = (Side::new(&one), Side::new(&two));
    let first = connect_from(&a, 40_100, &b, 7450);
    let second = connect_from(&c, 40_100, &d, 7451);
    for (from, to, listener) in [first, second] {
        one.destroy_id(from).unwrap();
        two.destroy_id(to).unwrap();
        two.destroy_id(listener).unwrap();
    }
    for side in [a, b, c, d] {
        side.close();
    }
}

#[test]
fn what_is_not_there_is_told() {
    let Some(device) = device() else { return };
    let attr = device.attr();
    assert!(attr.guid != 0 && !attr.addrs.is_empty() && attr.max_qp > 0 && !attr.fast_registration);
    assert!(attr.max_inline >= 16);
    let listed = list().unwrap();
    assert!(listed.iter().any(|listed| listed.name == attr.name && listed.attr.is_ok()));
    let error = RdmaCoreDevice::open("bowline-no-such").unwrap_err().to_string();
    assert!(error.contains("bowline-no-such") && error.contains(&attr.name), "{error}");
    let none = Err(Error::NoSuch(Object::CompletionQueue));
    assert_eq!(device.poll_cq(CqId(99), &mut Vec::new(), 1), none);
    let pd = device.alloc_pd().unwrap();
    let buffer = Arc::new(Buffer::new(4096).unwrap());
    let outside = device.reg_mr(pd, &buffer, 4000, 97, None, Access::empty());
    assert_eq!(outside, Err(Error::Invalid(InvalidReason::OutsideBuffer)));
    assert_eq!(device.cm_event(Duration::ZERO), Err(Error::TimedOut));
    assert_eq!(device.async_event(Duration::ZERO), Err(Error::TimedOut));
}

/// Memory that a peer can access only by windows.
fn hidden(side: &Side<'_>) -> (Arc<Buffer>, MrKeys) {
    let buffer = Arc::new(Buffer::new(8192).unwrap());
    buffer.write(0, &[7; 8192]);
    let access = Access::LOCAL_WRITE | Access::MW_BIND;
    let keys = side.device.reg_mr(side.pd, &buffer, 0, 8192, None, access).unwrap();
    (buffer, keys)
}

fn window_at(buffer: &Buffer, keys: MrKeys) -> MwBind {
    let access = Access::REMOTE_WRITE | Access::REMOTE_READ;
    MwBind { lkey: keys.lkey, addr: buffer.addr() + 1000, len: 3000, access }
}

// tests [MR-9], [MR-7], [MR-12], [MR-13]
#[test]
fn windows_are_bound_used_and_invalidated() {
    let (Some(one), Some(two)) = (device(), device()) else { return };
    assert!(two.attr().max_mw > 0);
    let (a, b) = (Side::new(&one), Side::new(&two));
    let (from, to_id, _) = connect(&a, &b, 7305);
    let (buffer, keys) = hidden(&b);
    let to = window_at(&buffer, keys);
    let mut key = two.alloc_mw(b.pd, MwType::Type2).unwrap();
    a.buffer.write(0, &[9; 3000]);
    for by_peer in [false, true, true, false] {
        key = next_key(key);
        b.send(1, SendOp::BindMw { key, to }, 0, 0);
        let done = b.done();
        assert_eq!((done.status, done.opcode), (Status::Success, WcOpcode::BindMw));
        let remote = Remote { addr: to.addr, rkey: key };
        a.send(2, SendOp::Write(remote), 0, 3000);
        assert_eq!(a.done().status, Status::Success);
        a.send(3, SendOp::Read(remote), 4000, 3000);
        assert_eq!(a.done().status, Status::Success);
        let mut bytes = [0; 3002];
        buffer.read(999, &mut bytes);
        assert_eq!((bytes[0], bytes[1], bytes[3000], bytes[3001]), (7, 9, 9, 7));
        if by_peer {
            b.receive(4, 0, 16);
            a.send(5, SendOp::SendInv(key), 0, 4);
            let got = b.done();
            // rxe's flags do not show the invalidation to programs; a second binding of the window
            // does.
            assert_eq!(got.status, Status::Success);
            assert!(got.invalidated.is_none_or(|shown| shown == key), "{got:?}");
            assert_eq!(a.done().status, Status::Success);
        } else {
            b.send(6, SendOp::LocalInv(key), 0, 0);
            let done = b.done();
            assert_eq!((done.status, done.opcode), (Status::Success, WcOpcode::LocalInv));
        }
    }
    // The key is no longer valid.
    a.send(7, SendOp::Write(Remote { addr: to.addr, rkey: key }), 0, 8);
    assert_eq!(a.done().status, Status::RemAccessErr);
    for (device, id) in [(&one, from), (&two, to_id)] {
        device.destroy_id(id).unwrap();
    }
    two.dealloc_mw(key).unwrap();
    assert_eq!(two.dealloc_mw(key), Err(Error::NoSuch(Object::MemoryWindow)));
    two.dereg_mr(keys.lkey).unwrap();
    a.close();
    b.close();
}

#[test]
fn a_window_of_type_1_keeps_its_region() {
    let (Some(one), Some(two)) = (device(), device()) else { return };
    let (a, b) = (Side::new(&one), Side::new(&two));
    connect(&a, &b, 7306);
    let (buffer, keys) = hidden(&b);
    let to = window_at(&buffer, keys);
    let first = two.alloc_mw(b.pd, MwType::Type1).unwrap();
    let flags = SendFlags::SIGNALED;
    let key = two.bind_mw(b.qpn, first, 1, &to, flags).unwrap();
    assert_ne!(key, first);
    let done = b.done();
    assert_eq!((done.wr_id, done.status, done.opcode), (1, Status::Success, WcOpcode::BindMw));
    a.send(2, SendOp::Read(Remote { addr: to.addr, rkey: key }), 0, 3000);
    assert_eq!(a.done().status, Status::Success);
    assert_eq!(two.dereg_mr(keys.lkey), Err(Error::Busy(Object::MemoryRegion)));
    let by_send = SendOp::BindMw { key: next_key(key), to };
    let wr = SendWr { id: 3, op: by_send, sges: &[], inline: &[], flags };
    let kind = Error::Invalid(InvalidReason::WindowType(MwType::Type1));
    assert_eq!(two.post_send(b.qpn, &[wr]), Err((0, kind)));
    let second = two.bind_mw(b.qpn, key, 4, &MwBind { len: 0, ..to }, flags).unwrap();
    assert_eq!(b.done().status, Status::Success);
    two.dereg_mr(keys.lkey).unwrap();
    two.dealloc_mw(second).unwrap();
}

/// [QP-7]: more than the region has.
#[test]
fn a_wrong_binding_fails() {
    let (Some(one), Some(two)) = (device(), device()) else { return };
    let (a, b) = (Side::new(&one), Side::new(&two));
    connect(&a, &b, 7307);
    let (buffer, keys) = hidden(&b);
    let to = MwBind { len: 8000, ..window_at(&buffer, keys) };
    let key = next_key(two.alloc_mw(b.pd, MwType::Type2).unwrap());
    b.send(1, SendOp::BindMw { key, to }, 0, 0);
    // rxe flushes it like every request, and reports no more [QP-10].
    let status = b.done().status;
    assert!(matches!(status, Status::MwBindErr | Status::WrFlushErr), "{status:?}");
    assert_eq!(two.query_qp(b.qpn).unwrap().0, QpState::Err);
}

// tests [QP-1], [QP-3]
#[test]
fn a_send_queue_is_drained_and_goes_on() {
    let (Some(one), Some(two)) = (device(), device()) else { return };
    let (a, b) = (Side::new(&one), Side::new(&two));
    connect(&a, &b, 7308);
    let state = |state| QpAttr { state: Some(state), ..QpAttr::default() };
    let sqd = QpAttr { sqd_notify: Some(true), ..state(QpState::Sqd) };
    for n in 0..20 {
        a.send(n, SendOp::Write(b.remote(0)), 0, 60_000);
    }
    one.modify_qp(a.qpn, &sqd).unwrap();
    loop {
        match one.async_event(LIMIT).unwrap() {
            AsyncEvent::SqDrained(qpn) => break assert_eq!(qpn, a.qpn),
            other => println!("{other:?}"),
        }
    }
    let (now, attr) = one.query_qp(a.qpn).unwrap();
    assert_eq!((now, attr.sq_draining), (QpState::Sqd, Some(false)));
    one.modify_qp(a.qpn, &QpAttr { cur_state: Some(QpState::Sqd), ..state(QpState::Rts) }).unwrap();
    for n in 0..20 {
        assert_eq!((a.done().wr_id, n), (n, n));
    }
    a.send(99, SendOp::Write(b.remote(0)), 0, 8);
    assert_eq!(a.done().wr_id, 99);
}

/// A datagram queue pair in RTS, with memory.
fn datagrams<'a>(device: &'a RdmaCoreDevice, qkey: u32) -> Side<'a> {
    let pd = device.alloc_pd().unwrap();
    let cq = device.create_cq(64).unwrap();
    let cap = QpCap { max_send_wr: 16, max_recv_wr: 16, ..QpCap::default() };
    let (qp_type, sq_sig_all) = (QpType::Ud, false);
    let init = QpInit { pd, send_cq: cq, recv_cq: cq, srq: None, qp_type, cap, sq_sig_all };
    let qpn = device.create_qp(&init).unwrap();
    let state = |state| QpAttr { state: Some(state), ..QpAttr::default() };
    for attr in [
        QpAttr { qkey: Some(qkey), ..state(QpState::Init) },
        state(QpState::Rtr),
        QpAttr { sq_psn: Some(5), ..state(QpState::Rts) },
    ] {
        device.modify_qp(qpn, &attr).unwrap();
    }
    let buffer = Arc::new(Buffer::new(SIZE).unwrap());
    let keys = device.reg_mr(pd, &buffer, 0, SIZE, None, Access::LOCAL_WRITE).unwrap();
    Side { device, pd, cq, qpn, buffer, keys }
}

// tests [RX-8], [RX-12]
#[test]
fn datagrams_arrive_with_their_header() {
    let (Some(one), Some(two)) = (device(), device()) else { return };
    let (a, b) = (datagrams(&one, 0x1111), datagrams(&two, 0x2222));
    let (state, attr) = two.query_qp(b.qpn).unwrap();
    assert_eq!((state, attr.qkey), (QpState::Rts, Some(0x2222)));
    let addrs = two.attr().addrs;
    assert!(!addrs.is_empty());
    for addr in addrs {
        let dest = UdDest { addr, from: None, qpn: b.qpn, qkey: 0x2222 };
        for imm in [None, Some(0x0102_0304)] {
            b.receive(1, 0, 2048);
            a.buffer.write(0, b"to whom it may concern");
            // A datagram with the wrong key is dropped silently.
            let wrong = UdDest { qkey: 0x2223, ..dest };
            a.send(2, SendOp::Datagram(wrong, None), 0, 22);
            a.send(3, SendOp::Datagram(dest, imm), 0, 22);
            assert_eq!((a.done().wr_id, a.done().wr_id), (2, 3));
            let got = b.done();
            assert_eq!((got.wr_id, got.status, got.opcode), (1, Status::Success, WcOpcode::Recv));
            assert_eq!((got.byte_len, got.imm, got.src_qp), (62, imm, a.qpn));
            assert!(got.grh);
            let mut bytes = [0; 62];
            b.buffer.read(0, &mut bytes);
            assert_eq!(&bytes[40..], b"to whom it may concern");
            if let std::net::IpAddr::V4(addr) = addr {
                assert_eq!((bytes[20], &bytes[36..40]), (0x45, &addr.octets()[..]));
            }
        }
    }
    let mtu = one.attr().mtu.bytes() as u32;
    let dest = UdDest { addr: one.attr().addrs[0], from: None, qpn: b.qpn, qkey: 0x2222 };
    for (op, len) in [(SendOp::Datagram(dest, None), mtu + 1), (SendOp::Send, 8)] {
        let (sges, flags) = ([a.sge(0, len)], SendFlags::SIGNALED);
        let wr = SendWr { id: 9, op, sges: &sges, inline: &[], flags };
        assert!(matches!(one.post_send(a.qpn, &[wr]), Err((0, Error::Invalid(_)))));
    }
    a.close();
    b.close();
}

/// Threads create and destroy objects at the same time; nothing is left or lost.
#[test]
fn objects_are_made_from_many_threads() {
    let Some(device) = device() else { return };
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| (0..20).for_each(|_| Side::new(&device).close()));
        }
    });
}
