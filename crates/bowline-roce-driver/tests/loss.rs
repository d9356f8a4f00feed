//! Loss on purpose, and that it is made good.

mod common;

use bowline_roce_driver::SoftConfig;
use bowline_verbs::SendOp;
use common::{connect, ip, open_with};

#[test]
fn what_is_lost_on_purpose_is_sent_again() {
    const LEN: usize = 1 << 20;
    let open = |host| {
        let config = SoftConfig { addrs: vec![ip(31, host)], ..SoftConfig::default() };
        open_with(SoftConfig { drop_one_in: Some(50), ..config })
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
