//! Losses on purpose are repaired.

use std::time::Duration;

use crate::common::{connect, ip, open_with};
use bowline_roce_driver::{Impairments, SoftConfig};
use bowline_verbs::{Device, Remote, SendOp, Status, next_key};

#[test]
fn what_is_lost_on_purpose_is_sent_again() {
    const LEN: usize = 1 << 20;
    let open = |host| {
        let config = SoftConfig { addrs: vec![ip(31, host)], ..SoftConfig::default() };
        open_with(SoftConfig {
            impairments: Impairments::parse("loss=2%,way=in", 1).unwrap(),
            ..config
        })
    };
    let (a, b) = connect(&open(1), &open(2), LEN);
    let bytes: Vec<u8> = (0..LEN).map(|i| (i >> 7) as u8 ^ i as u8).collect();
    a.buffer.write(0, &bytes);
    a.post(1, SendOp::Write(b.remote(0)), 0, LEN);
    a.done(1);
    let mut read = vec![0; LEN];
    b.buffer.read(0, &mut read);
    assert!(read == bytes, "written");
    let (lost, again) = (b.dev.stats().packets_dropped, a.dev.counters().packets_resent);
    assert!(lost > 0 && again > 0, "{lost} lost, {again} sent again");
}

#[test]
fn a_bad_network_harms_nothing() {
    const LEN: usize = 1 << 18;
    let bad = "loss=1%,duplicate=2%,reorder=2%,corrupt=1%,ce=5%,delay=200us±100us";
    let open = |host| {
        let impairments = Impairments::parse(bad, 7).unwrap();
        open_with(SoftConfig { addrs: vec![ip(34, host)], impairments, ..SoftConfig::default() })
    };
    let (a, b) = connect(&open(1), &open(2), LEN);
    for round in 0..4_u8 {
        let bytes: Vec<u8> = (0..LEN).map(|i| (i >> 7) as u8 ^ i as u8 ^ round).collect();
        a.buffer.write(0, &bytes);
        a.post(u64::from(round), SendOp::Write(b.remote(0)), 0, LEN);
        a.done(u64::from(round));
        let mut read = vec![0; LEN];
        b.buffer.read(0, &mut read);
        assert!(read == bytes, "written, round {round}");
    }
    let (driver, core) = (b.dev.stats(), b.dev.counters());
    assert!(driver.packets_dropped > 0, "lost");
    assert!(core.drop_icrc > 0, "damaged");
    assert!(core.rx_marked > 0, "marked");
    assert!(a.dev.counters().packets_resent > 0, "sent again");
}

#[test]
fn a_link_that_is_cut_carries_nothing_until_it_is_mended() {
    let open = |host| open_with(SoftConfig { addrs: vec![ip(32, host)], ..SoftConfig::default() });
    let (a, b) = connect(&open(1), &open(2), 64);
    a.buffer.write(0, b"across");
    a.dev.cut(ip(32, 1), Some(ip(32, 2)), true);
    a.post(1, SendOp::Write(b.remote(0)), 0, 6);
    let mut out = Vec::new();
    let came = a.dev.wait_cq(a.cq, false, Some(Duration::from_millis(50))).unwrap();
    assert!(!came && a.dev.poll_cq(a.cq, &mut out, 1).unwrap() == 0);
    let mut read = [1; 6];
    b.buffer.read(0, &mut read);
    assert_eq!(read, [0; 6]);
    a.dev.cut(ip(32, 1), Some(ip(32, 2)), false);
    a.done(1);
    b.buffer.read(0, &mut read);
    assert_eq!(&read, b"across");
    assert!(a.dev.stats().packets_dropped > 0);
}

/// Suspended memory is refused to the peer at once, stays usable on this side, and can be offered
/// again under a new key.
#[test]
fn memory_is_withdrawn_from_a_peer_and_given_back() {
    let open = |host| open_with(SoftConfig { addrs: vec![ip(33, host)], ..SoftConfig::default() });
    let (a, b) = connect(&open(1), &open(2), 64);
    let key = b.keys.rkey;
    a.buffer.write(0, b"first");
    a.post(1, SendOp::Write(b.remote(0)), 0, 5);
    a.done(1);
    b.dev.withdraw_keys(&[key]).unwrap();
    assert!(b.dev.renew_keys(&[(key, key)]).is_err());
    b.dev.renew_keys(&[(key, next_key(key))]).unwrap();
    let renewed = Remote { rkey: next_key(key), ..b.remote(0) };
    a.buffer.write(0, b"again");
    a.post(2, SendOp::Write(renewed), 0, 5);
    a.done(2);
    b.dev.withdraw_keys(&[next_key(key)]).unwrap();
    a.buffer.write(0, b"never");
    a.post(3, SendOp::Write(renewed), 0, 5);
    let refused = a.completion();
    assert_eq!((refused.wr_id, refused.status), (3, Status::RemAccessErr));
    let mut read = [0; 5];
    b.buffer.read(0, &mut read);
    assert_eq!(&read, b"again");
    b.dev.dereg_mr(b.keys.lkey).unwrap();
}
