//! A stream and round trips over plain RDS sockets.

use std::io::{self, ErrorKind};
use std::net::SocketAddrV4;

use crate::cell::Wait;
use crate::payload::{Checker, Loss, Maker};
use crate::role::{Laps, Role, done, stopping};
use crate::sys::{self, RdsSocket};

const RX_PORT: u16 = 4000;
const TX_PORT: u16 = 4001;

fn failed(call: &'static str) -> impl FnOnce(io::Error) -> String {
    move |error| format!("{call}: {error}")
}

fn receiver(role: &Role) -> SocketAddrV4 {
    SocketAddrV4::new(role.cell.nodes.0, RX_PORT)
}

fn sender(role: &Role) -> SocketAddrV4 {
    SocketAddrV4::new(role.cell.nodes.1, TX_PORT)
}

/// Opens the socket of one side, and is ready.
fn open(role: &mut Role, at: SocketAddrV4) -> Result<RdsSocket, String> {
    let socket = RdsSocket::bind(at).map_err(failed("bind"))?;
    // 0 leaves the buffers as a program that does not ask finds them.
    if role.cell.buffer > 0 {
        sys::set_buffers(&socket, role.cell.buffer).map_err(failed("buffers"))?;
    }
    role.ready("")?;
    Ok(socket)
}

/// Receives a message, asleep or polling.
fn receive(socket: &RdsSocket, buf: &mut [u8], wait: Wait) -> Result<usize, String> {
    loop {
        match sys::receive(socket, buf, wait != Wait::Spin) {
            Err(error) if error.kind() == ErrorKind::WouldBlock => std::hint::spin_loop(),
            got => return got.map_err(failed("recv")),
        }
    }
}

pub(super) fn stream_rx(mut role: Role) -> Result<(), String> {
    let at = receiver(&role);
    let socket = open(&mut role, at)?;
    let mut checker = Checker::new(1, role.cell.size, Loss::Forbidden);
    let mut meter = role.meter();
    let mut buf = vec![0; role.cell.size + 1];
    loop {
        let n = receive(&socket, &mut buf, role.cell.wait)?;
        checker.check(&buf[..n])?;
        meter.add(1);
    }
}

pub(super) fn stream_tx(mut role: Role) -> Result<(), String> {
    let at = sender(&role);
    let socket = open(&mut role, at)?;
    let to = receiver(&role);
    let mut maker = Maker::new(0, role.cell.size);
    let mut sent = 0;
    while !stopping() {
        socket.send_to(maker.next(), to).map_err(failed("sendto"))?;
        sent += 1;
    }
    done(sent, 0);
    Ok(())
}

pub(super) fn answer(mut role: Role) -> Result<(), String> {
    let at = receiver(&role);
    let socket = open(&mut role, at)?;
    let to = sender(&role);
    let mut buf = vec![0; role.cell.size + 1];
    loop {
        let n = receive(&socket, &mut buf, role.cell.wait)?;
        socket.send_to(&buf[..n], to).map_err(failed("sendto"))?;
    }
}

pub(super) fn ask(mut role: Role) -> Result<(), String> {
    let at = sender(&role);
    let socket = open(&mut role, at)?;
    let to = receiver(&role);
    let mut maker = Maker::new(0, role.cell.size);
    let mut checker = Checker::new(1, role.cell.size, Loss::Forbidden);
    let mut buf = vec![0; role.cell.size + 1];
    let mut laps = Laps::new(&role);
    while !stopping() {
        socket.send_to(maker.next(), to).map_err(failed("sendto"))?;
        let n = receive(&socket, &mut buf, role.cell.wait)?;
        checker.check(&buf[..n])?;
        if laps.lap() {
            break;
        }
    }
    Ok(())
}
