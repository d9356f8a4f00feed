//! Hostile peers over RDMA: hand-made ones, which use the verbs themselves.

use std::io::IoSlice;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bowline::rds::{Control, Event, Misbehaviour, Refusal, SendControl, Transfer};
use bowline::verbs::{
    Access, Buffer, CmEvent, CmId, Completion, ConnParam, CqId, Device, PdId, QpAttr, QpCap,
    QpInit, QpState, QpType, Qpn, RecvWr, Remote, SendFlags, SendOp, SendWr, Sge, SoftConfig,
    SoftDevice, Status, WcOpcode,
};

use crate::common::{LIMIT, addr, ip};
use crate::raw::Frame;
use crate::scene::{FRIEND, NODE, SINK, Scene, wait_until};

/// Receives that a peer posts if it posts any.
const RECEIVES: usize = 512;
/// Memory of a frame that is larger than one may be.
const SLOT: usize = 8192;

pub(crate) fn device(test: u16, node: u8) -> Arc<dyn Device> {
    let config = SoftConfig { addrs: vec![ip(test, node)], ..SoftConfig::default() };
    Arc::new(SoftDevice::open(config).expect("an address of this machine"))
}

/// Private data of a REQ: version 3.1.
fn private_data(from: IpAddr, to: IpAddr) -> Vec<u8> {
    let mut data = Vec::new();
    for addr in [from, to] {
        let IpAddr::V4(addr) = addr else { panic!("{addr}") };
        data.extend(addr.octets());
    }
    data.extend([3, 1, 0, 3]);
    data.resize(56, 0);
    data
}

/// A device with one queue pair, which is connected to the node or was.
struct Peer {
    device: Arc<dyn Device>,
    pd: PdId,
    cq: CqId,
    qpn: Qpn,
    cm: CmId,
    /// Receives, then the memory that is sent.
    buffer: Arc<Buffer>,
    lkey: u32,
    received: Vec<Vec<u8>>,
    ended: bool,
}

impl Peer {
    fn connect(test: u16, at: u8, receives: usize) -> Self {
        Self::try_connect(test, at, receives, &private_data(ip(test, at), ip(test, NODE)))
            .expect("accepted")
    }

    /// Returns `None` when the node refuses.
    fn try_connect(test: u16, at: u8, receives: usize, data: &[u8]) -> Option<Self> {
        let device = device(test, at);
        let pd = device.alloc_pd().unwrap();
        let cq = device.create_cq(4096).unwrap();
        let buffer = Arc::new(Buffer::new((RECEIVES + 1) * SLOT).unwrap());
        let keys = device.reg_mr(pd, &buffer, 0, buffer.len(), None, Access::LOCAL_WRITE).unwrap();
        let (max_send_wr, max_recv_wr, max_send_sge) = (64, RECEIVES, 1);
        let cap = QpCap { max_send_wr, max_recv_wr, max_send_sge, max_recv_sge: 1, max_inline: 0 };
        let qp_type = QpType::Rc;
        let init =
            QpInit { pd, send_cq: cq, recv_cq: cq, srq: None, qp_type, cap, sq_sig_all: true };
        let qpn = device.create_qp(&init).unwrap();
        let access = Some(Access::REMOTE_WRITE | Access::REMOTE_READ | Access::REMOTE_ATOMIC);
        let state = Some(QpState::Init);
        device.modify_qp(qpn, &QpAttr { state, access, ..QpAttr::default() }).unwrap();
        let param = ConnParam {
            qpn,
            private_data: data.to_vec(),
            min_rnr_timer: 10,
            ..ConnParam::default()
        };
        let local = SocketAddr::new(ip(test, at), 0);
        let mut peer = Self {
            device,
            pd,
            cq,
            qpn,
            cm: CmId::default(),
            buffer,
            lkey: keys.lkey,
            received: Vec::new(),
            ended: false,
        };
        (0..receives).for_each(|slot| peer.post_receive(slot as u64));
        peer.cm = peer.device.connect(Some(local), addr(test, NODE, 18_634), &param).unwrap();
        match peer.device.cm_event(LIMIT).unwrap() {
            CmEvent::Established { private_data, .. } => {
                assert_eq!(private_data[8..12], [3, 1, 0, 3]);
                Some(peer)
            }
            CmEvent::Rejected { private_data, .. } => {
                assert_eq!(private_data[..4], [1, 0, 0, 0]);
                None
            }
            other => panic!("{other:?}"),
        }
    }

    fn sge(&self, slot: usize, len: usize) -> Sge {
        let addr = self.buffer.addr() + (slot * SLOT) as u64;
        Sge { addr, len: len as u32, lkey: self.lkey }
    }

    fn post_receive(&self, slot: u64) {
        let sges = [self.sge(slot as usize, 48 + 4096)];
        self.device.post_recv(self.qpn, &[RecvWr { id: slot, sges: &sges }]).unwrap();
    }

    /// Posts a request whose local memory holds `bytes`, and returns how it ended.
    fn post(&mut self, op: SendOp, bytes: &[u8]) -> Status {
        self.buffer.write(RECEIVES * SLOT, bytes);
        let sges = [self.sge(RECEIVES, bytes.len())];
        let flags = SendFlags::SIGNALED | SendFlags::SOLICITED;
        let wr = SendWr { id: u64::MAX, op, sges: &sges, inline: &[], flags };
        self.device.post_send(self.qpn, &[wr]).unwrap();
        let deadline = Instant::now() + LIMIT;
        loop {
            if let Some(done) = self.poll() {
                return done.status;
            }
            assert!(Instant::now() < deadline, "no completion");
        }
    }

    fn send(&mut self, frame: &[u8]) -> Status {
        self.post(SendOp::Send, frame)
    }

    /// Takes completions for a moment; returns that of a request.
    fn poll(&mut self) -> Option<Completion> {
        let _ = self.device.wait_cq(self.cq, false, Some(Duration::from_millis(20)));
        let mut all = Vec::new();
        let _ = self.device.poll_cq(self.cq, &mut all, 1);
        let done = all.pop()?;
        if done.wr_id == u64::MAX {
            return Some(done);
        }
        if done.status == Status::Success && done.opcode == WcOpcode::Recv {
            let mut frame = vec![0; done.byte_len as usize];
            self.buffer.read(done.wr_id as usize * SLOT, &mut frame);
            self.received.push(frame);
            self.post_receive(done.wr_id);
        }
        None
    }

    /// Waits until the node has ended the connection.
    fn ends(&mut self) {
        let deadline = Instant::now() + LIMIT;
        while !self.ended {
            assert!(Instant::now() < deadline, "still connected");
            if let Ok(CmEvent::Disconnected { .. }) =
                self.device.cm_event(Duration::from_millis(20))
            {
                self.ended = true;
            }
            let _ = self.poll();
        }
    }

    fn is_connected(&mut self) -> bool {
        let event = self.device.cm_event(Duration::from_millis(100));
        self.ended |= matches!(event, Ok(CmEvent::Disconnected { .. }));
        !self.ended
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.device.disconnect(self.cm);
        let _ = self.device.destroy_id(self.cm);
        let _ = self.device.destroy_qp(self.qpn);
        let _ = self.device.dereg_mr(self.lkey);
        let _ = self.device.destroy_cq(self.cq);
        let _ = self.device.dealloc_pd(self.pd);
    }
}

fn frame(sequence: u64, len: usize, payload: &[u8]) -> Vec<u8> {
    let len = len as u32;
    Frame { sequence, len, ports: (9, SINK), ..Frame::default() }.bytes(payload)
}

// tests [IB-43], [IB-81], [SAFE-1], [SAFE-2]
#[test]
fn frames_that_break_rules_cost_their_sender_the_connection_only() {
    let scene = Scene::over_rdma(960, |b| b);
    let sink = scene.sink();
    let length = Misbehaviour::FrameLength;
    let mut damaged = frame(1, 0, b"");
    damaged[31] = 1;
    let none = Remote { addr: 0, rkey: 0 };
    let cases = [
        ("short", vec![(SendOp::Send, vec![0; 20])], length),
        ("empty", vec![(SendOp::Send, Vec::new())], length),
        ("a byte too long", vec![(SendOp::Send, frame(1, 4097, &[7; 4097]))], length),
        ("long", vec![(SendOp::Send, frame(1, 8000, &[7; 8000]))], length),
        ("less than promised", vec![(SendOp::Send, frame(1, 4097, &[7; 4095]))], length),
        (
            "longer than a message may be",
            vec![(SendOp::Send, frame(1, (1 << 20) + 1, &[7; 4096]))],
            Misbehaviour::MessageTooLong,
        ),
        ("damaged", vec![(SendOp::Send, damaged)], Misbehaviour::Checksum),
        (
            "two messages mixed",
            vec![
                (SendOp::Send, frame(1, 5000, &[7; 4096])),
                (SendOp::Send, frame(2, 5000, &[7; 904])),
            ],
            Misbehaviour::FrameOfOther,
        ),
        ("an immediate", vec![(SendOp::SendImm(5), frame(1, 0, b""))], Misbehaviour::Completion),
        ("a write", vec![(SendOp::WriteImm(none, 5), Vec::new())], Misbehaviour::Completion),
    ];
    scene.during_traffic(|| {
        for (at, (what, requests, why)) in (1..).zip(cases) {
            let mut peer = Peer::connect(960, at, RECEIVES);
            for (op, bytes) in requests {
                peer.post(op, &bytes);
            }
            peer.ends();
            wait_until(what, || scene.counter("bl_peer_errors") == u64::from(at));
            let told = Event::Misbehaved { remote: ip(960, at), what: why };
            let events = scene.node.events();
            assert_eq!(events.iter().filter(|event| **event == told).count(), 1, "{what}");
        }
    });
    sink.set_nonblocking(true);
    assert_eq!(sink.recv(&mut [0; 8]).unwrap_err().errno(), 11, "nothing of that is delivered");
}

// tests [IB-18], [IB-29], [SAFE-5]
#[test]
fn requests_in_the_name_of_another_are_refused() {
    let scene = Scene::over_rdma(961, |b| b);
    let node = ip(961, NODE);
    scene.during_traffic(|| {
        let friend = private_data(ip(961, FRIEND), node);
        let turned = private_data(node, ip(961, 1));
        let mut old = private_data(ip(961, 1), node);
        old[9] = 0;
        for data in [friend, turned, old, Vec::new(), vec![0xff; 56]] {
            assert!(Peer::try_connect(961, 1, RECEIVES, &data).is_none());
        }
        assert_eq!(scene.counter("bl_peer_errors"), 5);
        let told = Event::Refused { remote: ip(961, 1), why: Refusal::PrivateData };
        assert_eq!(scene.node.events().iter().filter(|event| **event == told).count(), 5);
        // The same peer with its own name.
        let sink = scene.sink();
        let mut peer = Peer::connect(961, 1, RECEIVES);
        assert_eq!(peer.send(&frame(1, 2, b"me")), Status::Success);
        assert_eq!(sink.recv_message().unwrap().to_vec(), b"me");
        // Its map comes first, before anything that it is sent [IB-37].
        sink.send_to(b"you", addr(961, 1, 77)).unwrap();
        wait_until("three frames", || {
            let _ = peer.poll();
            peer.received.len() >= 3
        });
        let kinds: Vec<_> = peer.received.iter().map(|f| (f.len(), f[24] & 1)).collect();
        assert_eq!(kinds[..3], [(4144, 1), (4144, 1), (51, 0)]);
    });
}

// tests [IB-25], [IB-84]
#[test]
fn a_peer_that_posts_no_receives_keeps_its_own_messages_waiting() {
    let scene = Scene::over_rdma(962, |b| b);
    let sink = scene.sink();
    scene.during_traffic(|| {
        let mut peer = Peer::connect(962, 1, 0);
        assert_eq!(peer.send(&frame(1, 2, b"hi")), Status::Success);
        assert_eq!(sink.recv_message().unwrap().to_vec(), b"hi");
        sink.set_nonblocking(true);
        let taken = (0..1000).take_while(|_| sink.send_to(&[3; 8192], addr(962, 1, 77)).is_ok());
        assert_eq!(taken.count(), 106_496 / 8192, "the send buffer");
        std::thread::sleep(Duration::from_millis(300));
        assert!(peer.is_connected(), "it may yet post some");
        assert!(sink.flush(Some(Duration::from_millis(10))).is_err());
        // It begins to receive.
        (0..RECEIVES).for_each(|slot| peer.post_receive(slot as u64));
        wait_until("the map and all messages", || {
            let _ = peer.poll();
            peer.received.len() >= 2 + 2 * 13
        });
        let last = u64::from_be_bytes(peer.received[27][..8].try_into().unwrap());
        peer.send(&Frame { ack: last, ..Frame::default() }.bytes(&[]));
        sink.flush(Some(LIMIT)).unwrap();
    });
    // Nor does such a peer hold up the end.
    let peer = Peer::connect(962, 2, 0);
    sink.send_to(b"x", addr(962, 2, 77)).unwrap();
    let start = Instant::now();
    assert!(!scene.node.shutdown(Duration::from_millis(200)), "not acknowledged");
    let took = start.elapsed();
    assert!(took < Duration::from_secs(5), "it took {took:?}");
    drop(peer);
}

// tests [SAFE-4], [SAFE-12]
#[test]
fn memory_is_reached_by_its_key_within_its_bounds_and_until_it_is_taken_back() {
    let scene = Scene::over_rdma(963, |b| b);
    let sink = scene.sink();
    let memory = sink.rdma_memory(12_288).unwrap();
    let key = sink.rdma_register(&memory, 4100..4200, None, false).unwrap() as u32;
    let freed = sink.rdma_register(&memory, 0..4096, None, false).unwrap() as u32;
    sink.rdma_free(u64::from(freed)).unwrap();
    let of_other = sink.rdma_register(&memory, 0..100, Some(ip(963, 50)), false).unwrap() as u32;
    // Addresses count from the start of the page [RDMA-2].
    let at = |addr: u64| Remote { addr: addr.wrapping_add(4100 % 4096), rkey: key };
    let bytes = [9; 100];
    let refused = [
        ("a key of nothing", SendOp::Write(Remote { addr: 0, rkey: 0 })),
        ("a key that was never told", SendOp::Write(Remote { addr: 0, rkey: key ^ 0x0101_0101 })),
        ("a neighbour of a key", SendOp::Write(Remote { addr: 0, rkey: key ^ 1 })),
        ("a key that was taken back", SendOp::Write(Remote { addr: 0, rkey: freed })),
        ("a key for another peer", SendOp::Write(Remote { addr: 0, rkey: of_other })),
        ("a byte past the end", SendOp::Write(at(1))),
        ("before the start", SendOp::Write(at(u64::MAX))),
        ("round the end of all addresses", SendOp::Write(at(u64::MAX - 99))),
        ("more than there is", SendOp::Read(at(50))),
        ("an address of this process", SendOp::Read(at(std::ptr::from_ref(&key) as u64))),
        ("a key taken from its owner", SendOp::SendInv(key)),
    ];
    scene.during_traffic(|| {
        for (peer, (what, op)) in (1..).zip(refused) {
            let mut peer = Peer::connect(963, peer, RECEIVES);
            let ends = matches!(op, SendOp::SendInv(_));
            let payload = if ends { frame(1, 0, b"") } else { bytes.to_vec() };
            let status = peer.post(op, &payload);
            if ends {
                peer.ends();
            } else {
                assert_eq!(status, Status::RemAccessErr, "{what}");
            }
        }
        // Its owner's peer reaches it, whatever others have tried, and no byte around it. What is
        // for it alone as well, over each of its connections.
        let own = ip(963, 50);
        for class in [0, 7] {
            let mut data = private_data(own, ip(963, NODE));
            data[12] = class;
            let mut peer = Peer::try_connect(963, 50, RECEIVES, &data).expect("accepted");
            assert_eq!(peer.post(SendOp::Write(at(0)), &bytes), Status::Success);
            let alone = Remote { addr: 0, rkey: of_other };
            assert_eq!(peer.post(SendOp::Read(alone), &[0; 100]), Status::Success, "{class}");
        }
        let mut all = vec![0; 12_288];
        memory.read(0, &mut all);
        assert!(all[4100..4200] == bytes);
        assert!(all[..4100].iter().chain(&all[4200..]).all(|byte| *byte == 0));
    });
    sink.set_nonblocking(true);
    assert_eq!(sink.recv(&mut [0; 8]).unwrap_err().errno(), 11);
}

// tests [SAFE-7], [SAFE-8]
#[test]
fn a_refused_operation_and_memory_that_is_kept_do_not_hold_up_other_messages() {
    let scene = Scene::over_rdma(964, |b| b);
    let sink = scene.sink();
    let friend = scene.friend.bind(addr(964, FRIEND, SINK)).unwrap();
    friend.set_recv_timeout(Some(LIMIT));
    let memory = sink.rdma_memory(4096).unwrap();
    let key = sink.rdma_register(&memory, 0..4096, Some(ip(964, FRIEND)), false).unwrap();
    let announce = [SendControl::RdmaDest(key)];
    let to = addr(964, FRIEND, SINK);
    sink.send_message(Some(to), &[IoSlice::new(b"here")], &announce).unwrap();
    let told = friend.recv_message().unwrap();
    assert_eq!(told.control(), [Control::RdmaDest(key)]);
    let local = friend.rdma_memory(4096).unwrap();
    for round in 0..3 {
        // Past the end: the connection ends with it, while the memory stays registered.
        let bad = Transfer::write(&local, 0..8, key).unwrap().at(4092).notify(round);
        friend.send_rdma(Some(addr(964, NODE, SINK)), b"never", &[bad]).unwrap();
        let end = friend.recv_message().unwrap();
        assert!(
            matches!(end.control(), [Control::RdmaStatus { token, status }]
                if *token == round && *status as i32 == 1),
            "{end:?}"
        );
        let start = Instant::now();
        friend.send_to(b"after", addr(964, NODE, SINK)).unwrap();
        assert_eq!(sink.recv_message().unwrap().to_vec(), b"after");
        assert!(start.elapsed() < Duration::from_secs(3), "{:?}", start.elapsed());
    }
    // Memory that was made for another node's device is as good as its own.
    memory.write(8, &[5; 8]);
    let foreign = Transfer::write(&memory, 8..16, key).unwrap().notify(9);
    friend.send_rdma(Some(addr(964, NODE, SINK)), b"x", &[foreign]).unwrap();
    assert_eq!(sink.recv_message().unwrap().to_vec(), b"x");
    let mut found = [0; 8];
    memory.read(0, &mut found);
    assert_eq!(found, [5; 8]);
    // Parts that do not lie within memory.
    for part in [0..0, 4000..4097, usize::MAX - 1..usize::MAX, 0..usize::MAX] {
        assert!(Transfer::read(&local, part.clone(), key).is_err(), "{part:?}");
        assert!(friend.rdma_register(&local, part.clone(), None, false).is_err(), "{part:?}");
    }
    assert!(Transfer::fetch_add(&local, usize::MAX, key, 1).is_err());
    assert!(friend.rdma_memory(usize::MAX).is_err());
}
