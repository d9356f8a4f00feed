//! An acknowledgement is sent in the same burst as requests to the same peer [PERF-6].

use std::net::SocketAddr;

use crate::common::{Pair, Setup};
use bowline_roce::{Burst, Config, IdentHint};
use bowline_verbs::{Mtu, SendOp};
use bowline_wire::roce::{Opcode, Packet};

/// Side 0 sends a message, and side 1 posts one of `len` bytes before it acknowledges; returns the
/// opcodes of side 1's bursts.
fn bursts(gso: bool, len: usize) -> Vec<Vec<Opcode>> {
    // Acknowledgements that wait are tested in late.rs.
    let config = Config { gso, ..Config::default() };
    bursts_of(&Setup { config, ..Setup::default() }, 0, len)
}

/// The same as [`bursts`], after WRITEs of 4 KiB, `data` bytes in all.
fn bursts_of(setup: &Setup, data: usize, len: usize) -> Vec<Vec<Opcode>> {
    let mut pair = Pair::new(setup);
    for side in 0..2 {
        let room = [pair.nodes[side].sge(0, 4096)];
        pair.post_recv(side, 1, &room);
    }
    let mut burst = Burst::new();
    let bytes = [pair.nodes[0].sge(0, 64)];
    pair.post(0, 2, SendOp::Send, &bytes);
    pair.carry();
    let to = pair.nodes[0].remote(8192);
    for _ in 0..data / 4096 {
        let bytes = [pair.nodes[1].sge(0, 4096)];
        pair.post(1, 4, SendOp::Write(to), &bytes);
    }
    let bytes = [pair.nodes[1].sge(0, len)];
    pair.post(1, 3, SendOp::Send, &bytes);
    let mut sent = Vec::new();
    let mut packets = Vec::new();
    while pair.nodes[1].dev.poll_transmit(pair.now, &mut burst) {
        let opcode = |bytes: &[u8]| Packet::parse(&bytes[..bytes.len() - 4]).unwrap().opcode;
        sent.push(burst.segments().map(opcode).collect());
        packets.extend(burst.segments().map(<[u8]>::to_vec));
    }
    let (from, to) = (SocketAddr::new(pair.nodes[1].addr, burst.source_port), pair.nodes[0].addr);
    for packet in packets {
        pair.nodes[0].dev.handle_datagram(pair.now, from, to, IdentHint::Unknown, &packet);
    }
    pair.finish(0, 1);
    pair.finish(1, 1 + data / 4096);
    sent
}

#[test]
fn it_ends_a_burst_of_requests() {
    use Opcode::{Acknowledge as Ack, SendFirst as First, SendLast as Last, SendOnly as Only};
    assert_eq!(bursts(true, 64), [vec![Only, Ack]]);
    // The last packet of a burst may be shorter than the others, but only the last.
    assert_eq!(bursts(true, 2000), [vec![First, Last], vec![Ack]]);
    assert_eq!(bursts(true, 2048), [vec![First, Last, Ack]]);
    // An acknowledgement is longer than a message without bytes.
    assert_eq!(bursts(true, 0), [vec![Only], vec![Ack]]);
    assert_eq!(bursts(false, 64), [vec![Ack], vec![Only]]);
}

/// After a row of long packets a burst has room for one short packet. That is left to the
/// acknowledgement, which would have to be sent alone otherwise.
#[test]
fn it_ends_a_burst_that_is_full() {
    let setup = Setup { mtu: Mtu::M4096, ..Setup::default() };
    let mut first = vec![Opcode::WriteOnly; 15];
    first.push(Opcode::Acknowledge);
    assert_eq!(bursts_of(&setup, 15 * 4096, 64), [first, vec![Opcode::SendOnly]]);
}
