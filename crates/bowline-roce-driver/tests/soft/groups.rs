//! Multicast groups, over the loopback interface.

use std::net::IpAddr;
use std::process::Command;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use crate::common::{ALL, PATIENCE, ip, open, open_with};
use bowline_roce_driver::{SoftConfig, SoftDevice};
use bowline_testkit::skipped;
use bowline_verbs::{
    Buffer, CqId, Device, Error, InvalidReason, MrKeys, QpAttr, QpCap, QpInit, QpState, QpType,
    Qpn, RecvWr, SendFlags, SendOp, SendWr, Sge, UdDest,
};

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

/// Set where the test runs among interfaces of its own.
const APART: &str = "BOWLINE_TWO_INTERFACES";

// tests [CMA-23]
#[test]
fn a_group_of_a_link_is_joined_on_each_of_two() {
    if std::env::var_os(APART).is_none() {
        let script = "ip link set lo up; for n in 1 2; do \
            ip link add d$n type veth peer name e$n; ip link set e$n up; \
            ip link set d$n up; ip address add fd00:$n::1/64 dev d$n nodad; \
            ip address add fd00:$n::2/64 dev d$n nodad; done; exec \"$0\" \"$@\"";
        let out = Command::new("unshare")
            .args(["-rn", "sh", "-ec", script])
            .arg(std::env::current_exe().unwrap())
            .args(["groups::a_group_of_a_link_is_joined_on_each_of_two", "--exact", "--nocapture"])
            .env(APART, "1")
            .output();
        let out = match out {
            Ok(out) => out,
            Err(error) => return skipped::because(format_args!("no unshare: {error}")),
        };
        let text = String::from_utf8_lossy(&[out.stdout, out.stderr].concat()).into_owned();
        if !text.contains("running 1 test") {
            return skipped::because(format_args!("no interfaces of its own: {text}"));
        }
        assert!(out.status.success(), "{text}");
        return;
    }
    let of = |host: u16| [1, 2].map(|link| IpAddr::from([0xfd00, link, 0, 0, 0, 0, 0, host]));
    let device = |addrs: [IpAddr; 2]| {
        End::new(&open_with(SoftConfig { addrs: addrs.to_vec(), ..SoftConfig::default() }))
    };
    let (member, sender) = (device(of(1)), device(of(2)));
    for group in ["ff02::77", "ff12::77", "ff05::77"] {
        let group: IpAddr = group.parse().unwrap();
        let hears = |from: IpAddr, limit| {
            sender.send(group, from);
            member.heard(limit)
        };
        member.dev.attach(member.qp, group).unwrap();
        for addr in of(1) {
            member.dev.join(group, addr).unwrap();
        }
        for addr in of(2) {
            assert!(hears(addr, PATIENCE), "{group} from {addr}");
        }
        member.dev.leave(group, of(1)[0]).unwrap();
        assert!(hears(of(2)[1], PATIENCE), "{group}: joined there still");
        assert!(!hears(of(2)[0], Duration::from_millis(20)), "{group}: left there");
        member.dev.leave(group, of(1)[1]).unwrap();
        assert_eq!(member.dev.leave(group, of(1)[1]), Err(Error::AddrNotAvailable));
        member.dev.detach(member.qp, group).unwrap();
    }
}
