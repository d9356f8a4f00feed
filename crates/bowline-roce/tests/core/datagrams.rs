//! Where datagrams leave from.

use std::net::IpAddr;

use bowline_base::Instant;
use bowline_roce::{Burst, Config, Device};
use bowline_verbs::{
    QpAttr, QpCap, QpInit, QpState, QpType, Qpn, SendFlags, SendOp, SendWr, Status, UdDest,
};

#[test]
fn a_datagram_leaves_from_the_address_asked_for() {
    let now = Instant::from_nanos(0);
    let addrs = [1, 2].map(|host| IpAddr::from([10, 0, 0, host]));
    let config = Config { addrs: addrs.to_vec(), ..Config::default() };
    let mut dev = Device::new(config, [1; 32]);
    let (pd, cq) = (dev.alloc_pd().unwrap(), dev.create_cq(10).unwrap());
    let (cap, qp_type) = (QpCap::default(), QpType::Ud);
    let init = QpInit { pd, send_cq: cq, recv_cq: cq, srq: None, qp_type, cap, sq_sig_all: true };
    let qp = dev.create_qp(&init).unwrap();
    let to = |state| QpAttr { state: Some(state), ..QpAttr::default() };
    let init = QpAttr { qkey: Some(1), ..to(QpState::Init) };
    let rts = QpAttr { sq_psn: Some(1), ..to(QpState::Rts) };
    for attr in [init, to(QpState::Rtr), rts] {
        dev.modify_qp(now, qp, &attr).unwrap();
    }
    let mut left = |from| {
        let dest = UdDest { addr: [10, 0, 0, 9].into(), from, qpn: Qpn(7), qkey: 1 };
        let op = SendOp::Datagram(dest, None);
        let wr = SendWr { id: 1, op, sges: &[], inline: b"data", flags: SendFlags::INLINE };
        dev.post_send(now, qp, &[wr]).unwrap();
        let mut burst = Burst::new();
        let from = dev.poll_transmit(now, &mut burst).then_some(burst.from);
        let mut done = Vec::new();
        dev.poll_cq(cq, &mut done, 1).unwrap();
        (from, done[0].status)
    };
    assert_eq!(left(None), (Some(addrs[0]), Status::Success));
    for from in addrs {
        assert_eq!(left(Some(from)), (Some(from), Status::Success));
    }
    let other = IpAddr::from([10, 0, 0, 3]);
    assert_eq!(left(Some(other)), (None, Status::LocQpOpErr), "not an address of this device");
}
