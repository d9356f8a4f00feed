//! An acknowledgement may end a burst of requests, but is not put off by more than one [REQ-23].

use crate::common::{Pair, Setup};
use bowline_roce::{Burst, Config, Congestion};
use bowline_verbs::{Mtu, SendOp};
use bowline_wire::roce::{Opcode, Packet};

/// Side 1 has many messages of `len` bytes to write when it receives one to acknowledge; returns
/// the indices of its bursts with an acknowledgement.
fn burst_of_the_acknowledgement(mtu: Mtu, len: usize) -> usize {
    let config = Config { congestion: Congestion::Fixed(4096), ..Config::default() };
    let mut pair = Pair::new(&Setup { config, mtu, ..Setup::default() });
    let room = [pair.nodes[1].sge(0, 64)];
    pair.post_recv(1, 1, &room);
    let (big, remote) = ([pair.nodes[1].sge(0, len)], pair.nodes[0].remote(0));
    for id in 0..20 {
        pair.post(1, id, SendOp::Write(remote), &big);
    }
    let small = [pair.nodes[0].sge(0, 64)];
    pair.post(0, 2, SendOp::Send, &small);
    let mut burst = Burst::new();
    pair.carry();
    for n in 1.. {
        assert!(pair.nodes[1].dev.poll_transmit(pair.now, &mut burst));
        let opcode = |bytes: &[u8]| Packet::parse(&bytes[..bytes.len() - 4]).unwrap().opcode;
        if burst.segments().any(|bytes| opcode(bytes) == Opcode::Acknowledge) {
            return n;
        }
    }
    unreachable!();
}

#[test]
fn an_acknowledgement_waits_for_one_burst_at_most() {
    for mtu in Mtu::ALL {
        for len in [0, 1, 100, mtu.bytes() + 100, 200 * mtu.bytes() + 100] {
            assert!(burst_of_the_acknowledgement(mtu, len) <= 2, "{mtu:?} {len}");
        }
    }
}
