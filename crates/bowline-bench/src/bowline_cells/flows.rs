//! Streams from many sockets to one, and round trips.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use bowline::rds::{Node, Socket};

use super::{RX_PORT, TX_PORT, add_port, failed, probe};
use crate::payload::{Checker, Loss, Maker};
use crate::role::{Laps, Role, done, stopping};

/// Messages given to or taken from the library in one call, at most.
const BATCH: usize = 64;

fn batch_size(size: usize) -> usize {
    (256 * 1024 / size).clamp(1, BATCH)
}

fn rx_addr(role: &Role) -> SocketAddr {
    (role.cell.nodes.0, RX_PORT).into()
}

/// Builds the node of one side and binds its sockets.
fn open(role: &Role, ip: IpAddr, port: u16, sockets: usize) -> Result<(Node, Vec<Socket>), String> {
    let node = super::node(&role.cell, &[ip])?;
    let sockets = (0..sockets)
        .map(|i| node.bind((ip, add_port(port, i)?)).map_err(failed("bind")))
        .collect::<Result<Vec<_>, String>>()?;
    Ok((node, sockets))
}

fn open_rx(role: &mut Role) -> Result<(Node, Socket), String> {
    let (node, mut sockets) = open(role, role.cell.nodes.0.into(), RX_PORT, 1)?;
    role.ready("")?;
    let socket = sockets.pop().ok_or("no socket was opened")?;
    Ok((node, socket))
}

fn open_tx(role: &mut Role) -> Result<(Node, Vec<Socket>), String> {
    let opened = open(role, role.cell.nodes.1.into(), TX_PORT, role.cell.flows)?;
    role.ready("")?;
    Ok(opened)
}

pub(super) fn stream_rx(mut role: Role) -> Result<(), String> {
    let (node, socket) = open_rx(&mut role)?;
    let mut checker = Checker::new(role.cell.flows, role.cell.size, Loss::Forbidden);
    let mut meter = role.meter();
    meter.set_probe(probe(&node));
    let mut buf = vec![0; role.cell.size + 1];
    loop {
        let (n, _) = socket.recv_from(&mut buf).map_err(failed("recv_from"))?;
        checker.check(&buf[..n.min(buf.len())])?;
        meter.add(1);
    }
}

pub(super) fn stream_tx(mut role: Role) -> Result<(), String> {
    let (node, sockets) = open_tx(&mut role)?;
    let to = rx_addr(&role);
    let mut makers: Vec<Maker> =
        (0..role.cell.flows).map(|flow| Maker::new(flow, role.cell.size)).collect();
    let mut sent = 0;
    while !stopping() {
        for (socket, maker) in sockets.iter().zip(&mut makers) {
            socket.send_to(maker.next(), to).map_err(failed("send_to"))?;
            sent += 1;
        }
    }
    done(sent, node.driver_stats().busy_syscalls());
    std::process::exit(0); // the receiver is told to end next: nothing is left to flush
}

/// Sends from buffers in turn: one is free again long before its turn comes, since all of them are
/// more than fit the send buffer.
pub(super) fn shared_tx(mut role: Role) -> Result<(), String> {
    let (node, sockets) = open_tx(&mut role)?;
    let socket = sockets.first().ok_or("no socket was opened")?;
    let to = rx_addr(&role);
    let mut maker = Maker::new(0, role.cell.size);
    let count = 2 * role.cell.buffer / role.cell.size;
    let mut ring: Vec<_> = (0..count).map(|_| Arc::new(maker.buffer())).collect();
    let mut sent = 0;
    while !stopping() {
        let buffer = &mut ring[sent % count];
        match Arc::get_mut(buffer) {
            Some(bytes) => maker.next_in(bytes),
            None => {
                std::thread::yield_now();
                continue;
            }
        }
        socket.send_shared(buffer, Some(to), None).map_err(failed("send_shared"))?;
        sent += 1;
    }
    done(sent as u64, node.driver_stats().busy_syscalls());
    std::process::exit(0); // the receiver is told to end next: nothing is left to flush
}

pub(super) fn batch_rx(mut role: Role) -> Result<(), String> {
    let (node, socket) = open_rx(&mut role)?;
    let mut checker = Checker::new(role.cell.flows, role.cell.size, Loss::Forbidden);
    let mut meter = role.meter();
    meter.set_probe(probe(&node));
    let mut buf = vec![0; role.cell.size + 1];
    let max = batch_size(role.cell.size);
    let mut messages = Vec::with_capacity(max);
    loop {
        socket.recv_batch(&mut messages, max).map_err(failed("recv_batch"))?;
        for message in messages.drain(..) {
            let n = message.copy_to(&mut buf);
            checker.check(&buf[..n.min(buf.len())])?;
            meter.add(1);
        }
    }
}

pub(super) fn batch_tx(mut role: Role) -> Result<(), String> {
    let (node, sockets) = open_tx(&mut role)?;
    let to = rx_addr(&role);
    let max = batch_size(role.cell.size);
    let mut makers: Vec<Maker> =
        (0..role.cell.flows).map(|flow| Maker::new(flow, role.cell.size)).collect();
    let mut pools: Vec<Vec<Vec<u8>>> =
        makers.iter().map(|maker| (0..max).map(|_| maker.buffer()).collect()).collect();
    let mut sent = 0;
    while !stopping() {
        for ((socket, maker), pool) in sockets.iter().zip(&mut makers).zip(&mut pools) {
            for buf in pool.iter_mut() {
                maker.next_in(buf);
            }
            let batch: Vec<(SocketAddr, &[u8])> =
                pool.iter().map(|buf| (to, buf.as_slice())).collect();
            let mut at = 0;
            while at < batch.len() {
                at += socket.send_batch(&batch[at..]).map_err(failed("send_batch"))?;
            }
            sent += at as u64;
        }
    }
    done(sent, node.driver_stats().busy_syscalls());
    std::process::exit(0); // the receiver is told to end next: nothing is left to flush
}

pub(super) fn answer(mut role: Role) -> Result<(), String> {
    let (_node, socket) = open_rx(&mut role)?;
    let mut buf = vec![0; role.cell.size + 1];
    loop {
        let (n, from) = socket.recv_from(&mut buf).map_err(failed("recv_from"))?;
        socket.send_to(&buf[..n.min(buf.len())], from).map_err(failed("send_to"))?;
    }
}

pub(super) fn ask(mut role: Role) -> Result<(), String> {
    let (node, sockets) = open_tx(&mut role)?;
    let socket = sockets.first().ok_or("no socket was opened")?;
    let to = rx_addr(&role);
    let mut maker = Maker::new(0, role.cell.size);
    let mut checker = Checker::new(1, role.cell.size, Loss::Forbidden);
    let mut buf = vec![0; role.cell.size + 1];
    let mut laps = Laps::new(&role);
    laps.set_probe(probe(&node));
    while !stopping() {
        socket.send_to(maker.next(), to).map_err(failed("send_to"))?;
        let (n, _) = socket.recv_from(&mut buf).map_err(failed("recv_from"))?;
        checker.check(&buf[..n.min(buf.len())])?;
        if laps.lap() {
            break;
        }
    }
    std::process::exit(0); // the answering side is told to end next: nothing is left to flush
}
