//! Shared receive queues [SRQ-1 to SRQ-5].

use std::time::Duration;

use bowline_roce::{Config, Event, Limits};
use bowline_verbs::{
    Access, AsyncEvent, Error, InvalidReason, Object, PdId, QpAttr, QpCap, QpInit, QpState, QpType,
    Qpn, RecvWr, RequestPart, Resource, SendFlags, SendOp, SendWr, SrqAttr, SrqChange, SrqId,
    SrqInit, Status, UdDest,
};

use crate::common::{Fate, Pair, Setup, pattern, rts_steps};

const SOON: Duration = Duration::from_secs(5);

/// A pair whose side 1 receives at two connections from one queue.
struct Sharing {
    pair: Pair,
    srq: SrqId,
    /// Queue pairs of side 0 and of side 1, by connection.
    qpns: [[Qpn; 2]; 2],
}

impl Sharing {
    fn new(setup: &Setup, max_wr: usize) -> Self {
        let mut pair = Pair::unconnected(setup);
        let pd = pair.nodes[1].pd;
        let srq = pair.nodes[1].dev.create_srq(&SrqInit { pd, max_wr, max_sge: 2 }).unwrap();
        let qpns = [(); 2].map(|()| {
            let qpns = [0, 1].map(|side| {
                let node = &mut pair.nodes[side];
                let srq = (side == 1).then_some(srq);
                let init = init(node.pd, (node.send_cq, node.recv_cq), srq, QpType::Rc);
                node.dev.create_qp(&init).unwrap()
            });
            for side in [0, 1] {
                for attr in rts_steps(setup, side, qpns[1 - side]) {
                    pair.nodes[side].dev.modify_qp(pair.now, qpns[side], &attr).unwrap();
                }
            }
            qpns
        });
        Self { pair, srq, qpns }
    }

    fn post(&mut self, id: u64, offset: usize, len: usize) {
        let node = &mut self.pair.nodes[1];
        let sges = [node.sge(offset, len)];
        node.dev.post_srq_recv(self.srq, &[RecvWr { id, sges: &sges }]).unwrap();
    }

    /// Sends `len` bytes over a connection.
    fn send(&mut self, connection: usize, id: u64, len: usize) {
        let node = &mut self.pair.nodes[0];
        let (op, flags) = (SendOp::Send, SendFlags::SIGNALED);
        let sges = [node.sge(0, len)];
        let wr = SendWr { id, op, sges: &sges, inline: &[], flags };
        node.dev.post_send(self.pair.now, self.qpns[connection][0], &[wr]).unwrap();
    }

    fn limit(&mut self, limit: usize) {
        let change = SrqChange { limit: Some(limit), ..SrqChange::default() };
        self.pair.nodes[1].dev.modify_srq(self.srq, &change).unwrap();
    }

    /// The ids, statuses and queue pairs of receives that have completed since the last call.
    fn received(&mut self) -> Vec<(u64, Status, Qpn)> {
        self.pair.nodes[1].take();
        let all = std::mem::take(&mut self.pair.nodes[1].received);
        all.iter().map(|entry| (entry.wr_id, entry.status, entry.qpn)).collect()
    }

    /// The events of side 1 since the last call.
    fn events(&mut self) -> Vec<AsyncEvent> {
        self.pair.nodes[1].take();
        let all = std::mem::take(&mut self.pair.nodes[1].events);
        let event = |event| if let Event::Async(event) = event { Some(event) } else { None };
        all.into_iter().filter_map(event).collect()
    }
}

fn init(
    pd: PdId,
    (send_cq, recv_cq): (bowline_verbs::CqId, bowline_verbs::CqId),
    srq: Option<SrqId>,
    qp_type: QpType,
) -> QpInit {
    let cap = QpCap { max_recv_wr: 1024, ..QpCap::default() };
    QpInit { pd, send_cq, recv_cq, srq, qp_type, cap, sq_sig_all: false }
}

/// [SRQ-2]: each message takes the oldest receive, whatever connection it comes by.
#[test]
fn messages_of_all_connections_take_receives_in_order() {
    let mut sharing = Sharing::new(&Setup::default(), 8);
    sharing.pair.nodes[0].fill(0, 5000, 7);
    for id in 0..4 {
        sharing.post(id, id as usize * 8192, 8192);
    }
    let [first, second] = sharing.qpns.map(|qpns| qpns[1]);
    for (n, (connection, len)) in [(0, 10), (1, 5000), (1, 3), (0, 2000)].into_iter().enumerate() {
        sharing.send(connection, n as u64, len);
        sharing.pair.settle();
        let qpn = [first, second][connection];
        assert_eq!(sharing.received(), [(n as u64, Status::Success, qpn)]);
        assert_eq!(sharing.pair.nodes[1].bytes(n * 8192, len), pattern(5000, 7)[..len]);
    }
    assert_eq!(sharing.pair.outcomes(0).len(), 4);
    assert_eq!(sharing.events(), []);
}

/// [SRQ-2]: a message takes its receive with its first packet, so that messages of two connections
/// which arrive at the same time do not mix.
#[test]
fn messages_that_arrive_at_the_same_time_do_not_mix() {
    let mut sharing = Sharing::new(&Setup::default(), 8);
    let node = &sharing.pair.nodes[0];
    node.fill(0, 40_000, 3);
    for id in 0..2 {
        sharing.post(id, id as usize * 50_000, 50_000);
    }
    // The last packet of the first message comes late.
    let first = sharing.qpns[0][1];
    let mut is_lost = false;
    sharing.pair.fate = Box::new(move |_, seen| {
        let bth = seen.packet().bth;
        let lose = seen.from == 0 && bth.dest_qpn == first.0 && seen.packet().opcode.ends();
        if lose && !std::mem::replace(&mut is_lost, true) { Fate::Drop } else { Fate::Pass }
    });
    sharing.send(0, 1, 40_000);
    sharing.send(1, 2, 30_000);
    sharing.pair.finish(0, 2);
    let second = sharing.qpns[1][1];
    let expected = [(1, Status::Success, second), (0, Status::Success, first)];
    assert_eq!(sharing.received(), expected);
    let node = &sharing.pair.nodes[1];
    assert_eq!(node.bytes(0, 40_000), pattern(40_000, 3));
    assert_eq!(node.bytes(50_000, 30_000), pattern(30_000, 3));
}

/// [SRQ-2], [RSP-12].
#[test]
fn an_empty_queue_makes_a_peer_wait() {
    let mut sharing = Sharing::new(&Setup::default(), 8);
    sharing.send(0, 1, 100);
    sharing.pair.settle();
    assert_eq!(sharing.pair.nodes[1].dev.counters().rnr_naks_sent, 1);
    sharing.post(5, 0, 100);
    sharing.pair.finish(0, 1);
    assert_eq!(sharing.received(), [(5, Status::Success, sharing.qpns[0][1])]);
}

#[test]
fn an_empty_queue_is_an_error_to_a_peer_that_does_not_wait() {
    let mut sharing = Sharing::new(&Setup { rnr_retry: 0, ..Setup::default() }, 8);
    sharing.send(0, 1, 100);
    assert!(sharing.pair.run(SOON, |pair| !pair.nodes[0].sent.is_empty()));
    assert_eq!(sharing.pair.outcomes(0), [(1, Status::RnrRetryExcErr)]);
    // The other connection works still.
    sharing.post(5, 0, 100);
    sharing.send(1, 2, 100);
    sharing.pair.settle();
    assert_eq!(sharing.received(), [(5, Status::Success, sharing.qpns[1][1])]);
}

/// [SRQ-4].
#[test]
fn a_limit_is_reported_once() {
    let mut sharing = Sharing::new(&Setup::default(), 8);
    let srq = sharing.srq;
    let reached = AsyncEvent::SrqLimitReached(srq);
    for id in 0..6 {
        sharing.post(id, 0, 100);
    }
    sharing.limit(5);
    assert_eq!(sharing.pair.nodes[1].dev.query_srq(srq).unwrap().limit, 5);
    sharing.send(0, 1, 10);
    sharing.pair.settle();
    assert_eq!(sharing.events(), [], "five are left");
    sharing.send(1, 2, 10);
    sharing.send(1, 3, 10);
    sharing.pair.settle();
    assert_eq!(sharing.events(), [reached]);
    assert_eq!(
        sharing.pair.nodes[1].dev.query_srq(srq),
        Ok(SrqAttr { max_wr: 8, max_sge: 2, limit: 0 })
    );
    // Three are left.
    sharing.limit(3);
    assert_eq!(sharing.events(), []);
    sharing.limit(4);
    assert_eq!(
        sharing.events(),
        [reached],
        "what is so when the limit is armed is reported at once"
    );
    sharing.limit(2);
    sharing.limit(0);
    sharing.send(0, 4, 10);
    sharing.send(0, 5, 10);
    sharing.pair.settle();
    assert_eq!(sharing.events(), [], "disarmed");
}

/// [SRQ-5]: the receive of a message that has begun is flushed; the others stay for all.
#[test]
fn the_last_receive_of_a_failed_queue_pair_is_reported() {
    let mut sharing = Sharing::new(&Setup::default(), 8);
    for id in 0..2 {
        sharing.post(id, 0, 5000);
    }
    let [first, second] = sharing.qpns.map(|qpns| qpns[1]);
    sharing.pair.fate = Box::new(|_, seen| match seen.packet().opcode.ends() {
        true => Fate::Drop,
        false => Fate::Pass,
    });
    sharing.send(0, 1, 5000);
    sharing.pair.settle();
    let err = QpAttr { state: Some(QpState::Err), ..QpAttr::default() };
    let now = sharing.pair.now;
    sharing.pair.nodes[1].dev.modify_qp(now, first, &err).unwrap();
    assert_eq!(sharing.received(), [(0, Status::WrFlushErr, first)]);
    assert_eq!(sharing.events(), [AsyncEvent::LastWqeReached(first)]);
    sharing.pair.nodes[1].dev.modify_qp(now, first, &err).unwrap();
    assert_eq!(sharing.events(), [], "reported once");
    sharing.pair.fate = Box::new(|_, _| Fate::Pass);
    sharing.send(1, 2, 5000);
    sharing.pair.settle();
    assert_eq!(sharing.received(), [(1, Status::Success, second)]);
}

/// [SRQ-5], [RSP-18]: so is that of one which fails by itself, and no other.
#[test]
fn a_receive_that_is_too_short_fails_one_queue_pair() {
    let mut sharing = Sharing::new(&Setup::default(), 8);
    sharing.post(0, 0, 10);
    sharing.post(1, 0, 100);
    let [first, second] = sharing.qpns.map(|qpns| qpns[1]);
    sharing.send(0, 1, 100);
    sharing.pair.settle();
    assert_eq!(sharing.received(), [(0, Status::LocLenErr, first)]);
    let expected = [AsyncEvent::QpFatal(first), AsyncEvent::LastWqeReached(first)];
    assert_eq!(sharing.events(), expected);
    sharing.send(1, 2, 100);
    sharing.pair.settle();
    assert_eq!(sharing.received(), [(1, Status::Success, second)]);
    assert_eq!(sharing.events(), []);
}

/// [SRQ-3]: memory of receives is that of the queue's domain, and other memory of the queue pair's.
#[test]
fn receives_are_of_the_domain_of_their_queue() {
    let setup = Setup::default();
    let mut sharing = Sharing::new(&setup, 8);
    let node = &mut sharing.pair.nodes[1];
    let other = node.dev.alloc_pd().unwrap();
    let srq = node.dev.create_srq(&SrqInit { pd: other, max_wr: 2, max_sge: 1 }).unwrap();
    let init = init(node.pd, (node.send_cq, node.recv_cq), Some(srq), QpType::Rc);
    let there = node.dev.create_qp(&init).unwrap();
    let here = sharing.qpns[0][0];
    let now = sharing.pair.now;
    let reset = QpAttr { state: Some(QpState::Reset), ..QpAttr::default() };
    sharing.pair.nodes[0].dev.modify_qp(now, here, &reset).unwrap();
    for (side, qpn, peer) in [(0, here, there), (1, there, here)] {
        for attr in rts_steps(&setup, side, peer) {
            sharing.pair.nodes[side].dev.modify_qp(now, qpn, &attr).unwrap();
        }
    }
    let node = &mut sharing.pair.nodes[1];
    let buffer = std::sync::Arc::clone(&node.buffer);
    let keys = node.dev.reg_mr(other, &buffer, 0, 100, None, Access::LOCAL_WRITE).unwrap();
    let mut sge = node.sge(0, 100);
    sge.lkey = keys.lkey;
    node.dev.post_srq_recv(srq, &[RecvWr { id: 1, sges: &[sge] }]).unwrap();
    let own = node.sge(0, 100);
    node.dev.post_srq_recv(srq, &[RecvWr { id: 2, sges: &[own] }]).unwrap();
    sharing.send(0, 1, 100);
    sharing.pair.settle();
    assert_eq!(sharing.received(), [(1, Status::Success, there)]);
    sharing.send(0, 2, 100);
    sharing.pair.settle();
    assert_eq!(sharing.received(), [(2, Status::LocProtErr, there)]);
}

/// [SRQ-2], [RX-12]: a datagram without a receive is dropped.
#[test]
fn datagrams_take_shared_receives() {
    let mut sharing = Sharing::new(&Setup::default(), 8);
    let (srq, now, key) = (sharing.srq, sharing.pair.now, 7);
    let qpns = [0, 1].map(|side| {
        let node = &mut sharing.pair.nodes[side];
        let srq = (side == 1).then_some(srq);
        let init = init(node.pd, (node.send_cq, node.recv_cq), srq, QpType::Ud);
        let qpn = node.dev.create_qp(&init).unwrap();
        let none = QpAttr::default();
        for attr in [
            QpAttr { state: Some(QpState::Init), qkey: Some(key), ..none },
            QpAttr { state: Some(QpState::Rtr), ..none },
            QpAttr { state: Some(QpState::Rts), sq_psn: Some(1), ..none },
        ] {
            node.dev.modify_qp(now, qpn, &attr).unwrap();
        }
        qpn
    });
    let dest = UdDest { addr: sharing.pair.nodes[1].addr, qpn: qpns[1], qkey: key, from: None };
    for (id, is_posted) in [(1, false), (2, true)] {
        if is_posted {
            sharing.post(9, 0, 200);
        }
        let node = &mut sharing.pair.nodes[0];
        let (op, sges) = (SendOp::Datagram(dest, None), [node.sge(0, 100)]);
        let wr = SendWr { id, op, sges: &sges, inline: &[], flags: SendFlags::SIGNALED };
        node.dev.post_send(now, qpns[0], &[wr]).unwrap();
        sharing.pair.settle();
    }
    assert_eq!(sharing.pair.nodes[1].dev.counters().ud_dropped, 1);
    assert_eq!(sharing.received(), [(9, Status::Success, qpns[1])]);
    let err = QpAttr { state: Some(QpState::Err), ..QpAttr::default() };
    sharing.pair.nodes[1].dev.modify_qp(now, qpns[1], &err).unwrap();
    assert_eq!(sharing.events(), [AsyncEvent::LastWqeReached(qpns[1])]);
}

/// [SRQ-1], [SRQ-2]: calls in an order that does not work are refused, and change nothing.
#[test]
fn calls_in_the_wrong_order_are_refused() {
    let limits = Limits { srqs: 2, wrs: 16, sges: 4, ..Limits::default() };
    let setup = Setup { config: Config { limits, ..Config::default() }, ..Setup::default() };
    // Queue pairs of the pair itself have longer queues.
    let mut dev = bowline_roce::Device::new(
        Config { addrs: vec![[10, 0, 0, 1].into()], ..setup.config },
        [1; 32],
    );
    let now = bowline_roce::Instant::from_nanos(1);
    let pd = dev.alloc_pd().unwrap();
    let cq = dev.create_cq(10).unwrap();
    let want = SrqInit { pd, max_wr: 2, max_sge: 1 };
    let invalid = |reason| Err(Error::Invalid(reason));
    let gone = Error::NoSuch(Object::SharedReceiveQueue);
    for (init, error) in [
        (SrqInit { pd: PdId(999), ..want }, Error::NoSuch(Object::ProtectionDomain)),
        (SrqInit { max_wr: 0, ..want }, Error::Invalid(InvalidReason::SrqSize)),
        (SrqInit { max_wr: 17, ..want }, Error::Limit(Resource::WorkRequests)),
        (SrqInit { max_sge: 5, ..want }, Error::Limit(Resource::Sges)),
    ] {
        assert_eq!(dev.create_srq(&init), Err(error));
    }
    let srq = dev.create_srq(&want).unwrap();
    let other = dev.create_srq(&want).unwrap();
    assert_eq!(dev.create_srq(&want), Err(Error::Limit(Resource::SharedReceiveQueues)));
    assert_eq!(dev.destroy_srq(other), Ok(()));
    assert_eq!(dev.destroy_srq(other), Err(gone.clone()));
    assert_eq!(dev.modify_srq(other, &SrqChange::default()), Err(gone.clone()));
    assert_eq!(dev.query_srq(other), Err(gone.clone()));
    let one = RecvWr { id: 1, sges: &[] };
    assert_eq!(dev.post_srq_recv(other, &[one]), Err((0, gone.clone())));
    assert_eq!(dev.dealloc_pd(pd), Err(Error::Busy(Object::ProtectionDomain)));

    let cap = QpCap { max_recv_wr: 1 << 30, max_send_wr: 1, ..QpCap::default() };
    let init = init(pd, (cq, cq), Some(srq), QpType::Rc);
    let init = QpInit { cap, ..init };
    assert_eq!(dev.create_qp(&QpInit { srq: Some(other), ..init }), Err(gone.clone()));
    let qp = dev.create_qp(&init).expect("the size of its own queue does not count");
    assert_eq!(dev.destroy_srq(srq), Err(Error::Busy(Object::SharedReceiveQueue)));
    let attr =
        QpAttr { state: Some(QpState::Init), access: Some(Access::empty()), ..QpAttr::default() };
    dev.modify_qp(now, qp, &attr).unwrap();
    let refused = Error::Invalid(InvalidReason::SharedReceives);
    assert_eq!(dev.post_recv(now, qp, &[one]), Err((0, refused)));
    let sge = bowline_verbs::Sge::default();
    let long = RecvWr { id: 2, sges: &[sge; 2] };
    let too_long =
        InvalidReason::TooLong { part: RequestPart::SharedScatterList, limit: 1, given: 2 };
    assert_eq!(dev.post_srq_recv(srq, &[one, long]), Err((1, Error::Invalid(too_long))));
    assert_eq!(dev.post_srq_recv(srq, &[one, one]), Err((1, Error::QueueFull)));

    let change = |max_wr, limit| SrqChange { max_wr, limit };
    assert_eq!(dev.modify_srq(srq, &change(Some(1), None)), invalid(InvalidReason::SrqSize));
    assert_eq!(dev.modify_srq(srq, &change(None, Some(3))), invalid(InvalidReason::SrqLimit));
    let too_many = Err(Error::Limit(Resource::WorkRequests));
    assert_eq!(dev.modify_srq(srq, &change(Some(17), Some(1))), too_many);
    assert_eq!(dev.query_srq(srq), Ok(SrqAttr { max_wr: 2, max_sge: 1, limit: 0 }));
    assert_eq!(dev.modify_srq(srq, &change(Some(3), Some(2))), Ok(()));
    assert_eq!(dev.post_srq_recv(srq, &[one]), Ok(()), "there is room for one more");
    assert_eq!(dev.modify_srq(srq, &change(Some(2), None)), invalid(InvalidReason::SrqSize));

    dev.destroy_qp(qp).unwrap();
    dev.destroy_cq(cq).expect("a queue pair that could not be made holds none");
    assert_eq!(dev.destroy_srq(srq), Ok(()));
    assert_eq!(dev.dealloc_pd(pd), Ok(()));
    assert_eq!(dev.in_use(), bowline_roce::InUse::default());
}

/// A reset drops the receive of a message that has begun, and leaves the queue alone.
#[test]
fn a_reset_takes_nothing_from_the_queue() {
    let setup = Setup::default();
    let mut sharing = Sharing::new(&setup, 8);
    for id in 0..2 {
        sharing.post(id, 0, 5000);
    }
    sharing.pair.fate = Box::new(|_, seen| match seen.packet().opcode.ends() {
        true => Fate::Drop,
        false => Fate::Pass,
    });
    sharing.send(0, 1, 5000);
    sharing.pair.settle();
    let now = sharing.pair.now;
    let reset = QpAttr { state: Some(QpState::Reset), ..QpAttr::default() };
    for side in [0, 1] {
        let (qpn, peer) = (sharing.qpns[0][side], sharing.qpns[0][1 - side]);
        sharing.pair.nodes[side].dev.modify_qp(now, qpn, &reset).unwrap();
        for attr in rts_steps(&setup, side, peer) {
            sharing.pair.nodes[side].dev.modify_qp(now, qpn, &attr).unwrap();
        }
    }
    sharing.pair.fate = Box::new(|_, _| Fate::Pass);
    sharing.send(0, 2, 5000);
    sharing.pair.settle();
    assert_eq!(sharing.received(), [(1, Status::Success, sharing.qpns[0][1])]);
    assert_eq!(sharing.events(), []);
}
