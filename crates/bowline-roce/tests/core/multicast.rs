//! Multicast groups.

use std::net::{IpAddr, SocketAddr};

use crate::common::{Node, Pair, Setup, pattern};
use bowline_base::Instant;
use bowline_roce::{Burst, IdentHint};
use bowline_verbs::{
    Error, InvalidReason, Object, QpAttr, QpCap, QpInit, QpState, QpType, Qpn, RecvWr, SendFlags,
    SendOp, SendWr, UdDest,
};

const QKEY: u32 = 0x0123_4567;

fn group(v6: bool) -> IpAddr {
    if v6 { "ff05::7".parse().unwrap() } else { [239, 7, 7, 7].into() }
}

fn to(state: QpState) -> QpAttr {
    QpAttr { state: Some(state), ..QpAttr::default() }
}

/// A datagram queue pair that is ready.
fn datagrams(node: &mut Node, now: Instant) -> Qpn {
    let init = QpInit {
        pd: node.pd,
        send_cq: node.send_cq,
        recv_cq: node.recv_cq,
        srq: None,
        qp_type: QpType::Ud,
        cap: QpCap::default(),
        sq_sig_all: false,
    };
    let qp = node.dev.create_qp(&init).unwrap();
    let init = QpAttr { qkey: Some(QKEY), ..to(QpState::Init) };
    let rts = QpAttr { sq_psn: Some(1), ..to(QpState::Rts) };
    for attr in [init, to(QpState::Rtr), rts] {
        node.dev.modify_qp(now, qp, &attr).unwrap();
    }
    qp
}

fn receive(node: &mut Node, now: Instant, qp: Qpn, id: u64) {
    let sges = [node.sge(id as usize * 2000, 1040)];
    node.dev.post_recv(now, qp, &[RecvWr { id, sges: &sges }]).unwrap();
}

/// What a datagram to an address is on the wire, and where it comes from.
fn sent(node: &mut Node, now: Instant, qp: Qpn, dest: UdDest) -> (SocketAddr, Vec<u8>) {
    let sges = [node.sge(0, 1000)];
    let op = SendOp::Datagram(dest, None);
    let wr = SendWr { id: 1, op, sges: &sges, inline: &[], flags: SendFlags::empty() };
    node.dev.post_send(now, qp, &[wr]).unwrap();
    let mut burst = Burst::new();
    assert!(node.dev.poll_transmit(now, &mut burst));
    assert_eq!((burst.from, burst.to), (node.addr, dest.addr));
    (SocketAddr::new(burst.from, burst.source_port), burst.bytes.clone())
}

/// The ids of the receives that are complete since the last time.
fn received(node: &mut Node) -> Vec<u64> {
    node.take();
    let mut ids: Vec<u64> = node.received.drain(..).map(|done| done.wr_id).collect();
    ids.sort_unstable();
    ids
}

// tests [RX-14]
#[test]
fn every_attached_queue_pair_gets_a_copy() {
    for v6 in [false, true] {
        let mut pair = Pair::unconnected(&Setup { v6, ..Setup::default() });
        let now = pair.now;
        let group = group(v6);
        let [from, to] = &mut pair.nodes;
        from.fill(0, 1000, 6);
        let sender = datagrams(from, now);
        let all: Vec<Qpn> = (0..3).map(|_| datagrams(to, now)).collect();
        let dest = UdDest { addr: group, from: Some(from.addr), qpn: Qpn::MULTICAST, qkey: QKEY };
        let (source, bytes) = sent(from, now, sender, dest);
        let arrives = |to: &mut Node, at: IpAddr, bytes: &[u8]| {
            to.dev.handle_datagram(now, source, at, IdentHint::Unknown, bytes);
            received(to)
        };
        let post = |to: &mut Node| {
            for (id, qp) in (1..).zip(&all) {
                receive(to, now, *qp, id);
            }
        };
        post(to);
        assert_eq!(arrives(to, group, &bytes), [], "nobody is attached");
        assert_eq!(to.dev.counters().drop_address, 1);
        for qp in [all[0], all[1], all[1]] {
            to.dev.attach(qp, group).unwrap();
        }
        assert_eq!(arrives(to, group, &bytes), [1, 2], "each once");
        for id in [1, 2] {
            assert_eq!(to.bytes(id * 2000 + 40, 1000), pattern(1000, 6));
            // The network header names the group.
            let at = if v6 { 24..40 } else { 36..40 };
            let named = to.bytes(id * 2000 + at.start, at.len());
            match group {
                IpAddr::V4(group) => assert_eq!(named, group.octets()),
                IpAddr::V6(group) => assert_eq!(named, group.octets()),
            }
        }
        // To an own address, or with another number, it is no datagram for a group.
        let drops = to.dev.counters().drop_header;
        assert_eq!(arrives(to, to.addr, &bytes), []);
        let (_, one) = sent(from, now, sender, UdDest { qpn: all[2], ..dest });
        assert_eq!(arrives(to, group, &one), []);
        assert_eq!(to.dev.counters().drop_header, drops + 2);
        // Another key, and bytes that were changed.
        post(to);
        let (_, other) = sent(from, now, sender, UdDest { qkey: QKEY + 1, ..dest });
        assert_eq!(arrives(to, group, &other), []);
        assert_eq!(to.dev.counters().drop_qkey, 2);
        let mut changed = bytes.clone();
        changed[100] ^= 1;
        assert_eq!(arrives(to, group, &changed), []);
        assert_eq!(to.dev.counters().drop_icrc, 1);
        // One leaves, another is removed.
        to.dev.detach(all[0], group).unwrap();
        assert_eq!(arrives(to, group, &bytes), [2]);
        to.dev.destroy_qp(all[1]).unwrap();
        let unknown = to.dev.counters().drop_address;
        assert_eq!(arrives(to, group, &bytes), []);
        assert_eq!(to.dev.counters().drop_address, unknown + 1);
    }
}

// tests [RX-14]
#[test]
fn a_sender_does_not_hear_itself() {
    let mut pair = Pair::unconnected(&Setup::default());
    let (now, group) = (pair.now, group(false));
    let node = &mut pair.nodes[0];
    let [sender, other] = [(); 2].map(|()| datagrams(node, now));
    for (id, qp) in [(1, sender), (2, other)] {
        node.dev.attach(qp, group).unwrap();
        receive(node, now, qp, id);
    }
    let dest = UdDest { addr: group, from: None, qpn: Qpn::MULTICAST, qkey: QKEY };
    let (own, bytes) = sent(node, now, sender, dest);
    node.dev.handle_datagram(now, own, group, IdentHint::Unknown, &bytes);
    assert_eq!(received(node), [2]);
}

#[test]
fn what_cannot_be_attached() {
    let mut pair = Pair::unconnected(&Setup::default());
    let (now, group) = (pair.now, group(false));
    let node = &mut pair.nodes[0];
    let (connected, qp) = (node.qp, datagrams(node, now));
    let dev = &mut node.dev;
    let none = Err(Error::NoSuch(Object::QueuePair));
    assert_eq!(dev.attach(Qpn(0x99), group), none);
    assert_eq!(dev.attach(connected, group), Err(Error::Invalid(InvalidReason::TypeToAttach)));
    let addr = IpAddr::from([10, 0, 0, 9]);
    assert_eq!(dev.attach(qp, addr), Err(Error::Invalid(InvalidReason::NotMulticast(addr))));
    assert_eq!(dev.detach(qp, group), none);
    dev.attach(qp, group).unwrap();
    dev.detach(qp, group).unwrap();
    assert_eq!(dev.detach(qp, group), none);
}
