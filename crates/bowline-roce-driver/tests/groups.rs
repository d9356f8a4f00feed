//! Multicast groups, over the loopback interface.

mod common;

use std::net::IpAddr;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use bowline_roce_driver::SoftDevice;
use bowline_verbs::{
    Buffer, CqId, Device, Error, InvalidReason, MrKeys, QpAttr, QpCap, QpInit, QpState, QpType,
    Qpn, RecvWr, SendFlags, SendOp, SendWr, Sge, UdDest,
};
use common::{ALL, PATIENCE, ip, open};

const QKEY: u32 = 0x0123_4567;
const LEN: usize = 64;

/// A datagram queue pair with a receive.
struct End {
    dev: Arc<SoftDevice>,
    cq: CqId,
    qp: Qpn,
    buffer: Arc<Buffer>,
    keys: MrKeys,
}

impl End {
    fn new(dev: &Arc<SoftDevice>) -> Self {
        let (pd, cq) = (dev.alloc_pd().unwrap(), dev.create_cq(64).unwrap());
        let (cap, sq_sig_all) = (QpCap::default(), false);
        let init = QpInit {
            pd,
            send_cq: cq,
            recv_cq: cq,
            srq: None,
            qp_type: QpType::Ud,
            cap,
            sq_sig_all,
        };
        let qp = dev.create_qp(&init).unwrap();
        let to = |state| QpAttr { state: Some(state), ..QpAttr::default() };
        let init = QpAttr { qkey: Some(QKEY), ..to(QpState::Init) };
        let rts = QpAttr { sq_psn: Some(0), ..to(QpState::Rts) };
        for attr in [init, to(QpState::Rtr), rts] {
            dev.modify_qp(qp, &attr).unwrap();
        }
        let buffer = Arc::new(Buffer::new(LEN + 40).unwrap());
        let keys = dev.reg_mr(pd, &buffer, 0, LEN + 40, None, ALL).unwrap();
        let end = Self { dev: Arc::clone(dev), cq, qp, buffer, keys };
        end.receive();
        end
    }

    fn receive(&self) {
        let sges = [self.sge(LEN + 40)];
        self.dev.post_recv(self.qp, &[RecvWr { id: 7, sges: &sges }]).unwrap();
    }

    fn sge(&self, len: usize) -> Sge {
        Sge { addr: self.buffer.addr(), len: len as u32, lkey: self.keys.lkey }
    }

    fn send(&self, group: IpAddr, from: IpAddr) {
        let dest = UdDest { addr: group, from: Some(from), qpn: Qpn::MULTICAST, qkey: QKEY };
        let op = SendOp::Datagram(dest, None);
        let flags = SendFlags::INLINE;
        let wr = SendWr { id: 1, op, sges: &[], inline: &[5; LEN], flags };
        self.dev.post_send(self.qp, &[wr]).unwrap();
    }

    /// Takes the completion of the receive, if it comes in time, and posts another one.
    fn heard(&self, limit: Duration) -> bool {
        let begun = Instant::now();
        let mut done = Vec::new();
        while self.dev.poll_cq(self.cq, &mut done, 1).unwrap() == 0 {
            if begun.elapsed() > limit {
                return false;
            }
            thread::yield_now();
        }
        assert_eq!((done[0].wr_id, done[0].byte_len as usize), (7, LEN + 40));
        self.receive();
        true
    }
}

// tests [CMA-23]
#[test]
fn members_on_one_machine_hear_each_other() {
    let group = IpAddr::from([239, 78, 1, 1]);
    let addrs = [1, 2, 3].map(|host| ip(70, host));
    let devices = addrs.map(open);
    let [one, two, three] = devices.each_ref().map(End::new);
    let other = End::new(&devices[0]);
    for (end, addr) in [(&one, addrs[0]), (&two, addrs[1])] {
        end.dev.join(group, addr).unwrap();
        end.dev.attach(end.qp, group).unwrap();
    }
    other.dev.attach(other.qp, group).unwrap();
    // One that is attached without being a member, and a member that is not attached.
    three.dev.attach(three.qp, group).unwrap();
    one.send(group, addrs[0]);
    assert!(two.heard(PATIENCE) && other.heard(PATIENCE));
    two.send(group, addrs[1]);
    assert!(one.heard(PATIENCE) && other.heard(PATIENCE));
    assert!(!two.heard(Duration::ZERO), "its own");
    three.dev.join(group, addrs[2]).unwrap();
    three.dev.detach(three.qp, group).unwrap();
    two.send(group, addrs[1]);
    assert!(one.heard(PATIENCE) && other.heard(PATIENCE));
    assert!(!three.heard(Duration::ZERO));
    // Joined twice, left twice.
    two.dev.join(group, addrs[1]).unwrap();
    two.dev.leave(group, addrs[1]).unwrap();
    one.send(group, addrs[0]);
    assert!(two.heard(PATIENCE) && other.heard(PATIENCE));
    two.dev.leave(group, addrs[1]).unwrap();
    assert_eq!(two.dev.leave(group, addrs[1]), Err(Error::AddrNotAvailable));
    one.send(group, addrs[0]);
    assert!(other.heard(PATIENCE));
    assert!(!two.heard(Duration::from_millis(20)), "it has left");
    // One that goes takes nothing from others.
    drop((two, three));
    let [first, second, third] = devices;
    drop((second, third));
    one.send(group, addrs[0]);
    assert!(other.heard(PATIENCE));
    first.close();
    assert_eq!(first.join(group, addrs[0]), Err(Error::Closed));
}

#[test]
fn what_cannot_be_joined() {
    let addr = ip(70, 4);
    let device = open(addr);
    let unicast = IpAddr::from([10, 0, 0, 1]);
    let no_group = Err(Error::Invalid(InvalidReason::NotMulticast(unicast)));
    assert_eq!(device.join(unicast, addr), no_group);
    let six: IpAddr = "ff05::1".parse().unwrap();
    assert_eq!(device.join(six, addr), Err(Error::Invalid(InvalidReason::AddrFamilies)));
    let group = IpAddr::from([239, 78, 1, 2]);
    assert_eq!(device.join(group, ip(70, 5)), Err(Error::AddrNotAvailable));
    assert_eq!(device.leave(group, addr), Err(Error::AddrNotAvailable));
    // Somebody has the port of all addresses for himself.
    let group = IpAddr::from([239, 78, 1, 3]);
    let taken = std::net::UdpSocket::bind((group, 4791)).unwrap();
    assert!(matches!(device.join(group, addr), Err(Error::AddrInUse(_))));
    drop(taken);
    device.join(group, addr).unwrap();
}
