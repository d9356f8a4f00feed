//! Remote writes that messages announce, over RDMA.
//!
//! The receiver has a ring of slots, whose keys it tells the sender; each message says that the
//! next slot was written, and each answer that a slot was read.

use std::net::SocketAddr;
use std::sync::Arc;

use bowline::rds::{Control, Message, Node, RdmaMemory, SendControl, Socket, Transfer};

use super::{RX_PORT, TX_PORT, failed, probe};
use crate::payload::{Maker, SpotCheck};
use crate::role::{Role, done, stopping};

/// Slots of the ring; one fewer are outstanding, as with bare verbs.
const SLOTS: usize = 4;

/// One side: its node, its socket, and memory for the ring.
fn open(role: &Role, at: SocketAddr) -> Result<(Node, Socket, Arc<RdmaMemory>), String> {
    let node = super::node(&role.cell, &[at.ip()])?;
    let socket = node.bind(at).map_err(failed("bind"))?;
    let memory = socket.rdma_memory(SLOTS * role.cell.size).map_err(failed("rdma_memory"))?;
    let body = Maker::new(0, role.cell.size).buffer();
    (0..SLOTS).for_each(|slot| memory.write(slot * role.cell.size, &body));
    Ok((node, socket, memory))
}

fn addresses(role: &Role) -> [SocketAddr; 2] {
    let (rx, tx) = role.cell.nodes;
    [(rx, RX_PORT).into(), (tx, TX_PORT).into()]
}

pub(super) fn written(mut role: Role) -> Result<(), String> {
    let [here, there] = addresses(&role);
    let size = role.cell.size;
    let (node, socket, memory) = open(&role, here)?;
    role.ready("")?;
    for slot in 0..SLOTS {
        let part = slot * size..(slot + 1) * size;
        let key = socket.rdma_register(&memory, part, Some(there.ip()), false);
        let control = [SendControl::RdmaDest(key.map_err(failed("rdma_register"))?)];
        socket.send_message(Some(there), &[], &control).map_err(failed("send_message"))?;
    }
    let mut check = SpotCheck::new(0, size);
    let mut meter = role.meter();
    meter.set_probe(probe(&node));
    let mut buf = [0; 8];
    for seq in 0.. {
        socket.recv_from(&mut buf).map_err(failed("recv_from"))?;
        let slot = (seq % SLOTS as u64) as usize * size;
        check.check(seq, |at, bytes| memory.read(slot + at, bytes))?;
        socket.send_to(&[], there).map_err(failed("send_to"))?;
        meter.add(1);
    }
    Ok(())
}

fn key_of(message: &Message) -> Result<u64, String> {
    let key = message.control().iter().find_map(|control| match control {
        Control::RdmaDest(key) => Some(*key),
        _ => None,
    });
    key.ok_or_else(|| "a message without a key".to_owned())
}

pub(super) fn write(mut role: Role) -> Result<(), String> {
    let [there, here] = addresses(&role);
    let size = role.cell.size;
    let (node, socket, memory) = open(&role, here)?;
    role.ready("")?;
    let mut keys = [0; SLOTS];
    for key in &mut keys {
        *key = key_of(&socket.recv_message().map_err(failed("recv_message"))?)?;
    }
    let mut maker = Maker::new(0, size);
    let (mut sent, mut read) = (0, 0);
    let mut buf = [0; 8];
    while !stopping() {
        while sent < read + SLOTS as u64 - 1 {
            let slot = (sent % SLOTS as u64) as usize;
            maker.next_at(|at, bytes| memory.write(slot * size + at, bytes));
            let part = slot * size..(slot + 1) * size;
            let transfer = Transfer::write(&memory, part, keys[slot]).map_err(failed("write"))?;
            socket.send_rdma(Some(there), &[0; 8], &[transfer]).map_err(failed("send_rdma"))?;
            sent += 1;
        }
        socket.recv_from(&mut buf).map_err(failed("recv_from"))?;
        read += 1;
    }
    done(sent, node.driver_stats().busy_syscalls());
    std::process::exit(0); // the receiver is told to end next: nothing is left to flush
}
