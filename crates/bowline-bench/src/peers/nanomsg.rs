//! nanomsg, which runs inside the bench's own processes.

use std::net::{Ipv4Addr, TcpListener};

use super::settle;
use crate::payload::{Checker, Loss, Maker};
use crate::role::{Laps, Role, done, stopping};
use crate::sys::{NanoKind, NanoSocket};

/// nanomsg cannot bind to a port of the system's choice, so one is taken and given back.
fn free_port() -> Result<u16, String> {
    TcpListener::bind((Ipv4Addr::LOCALHOST, 0))
        .and_then(|l| l.local_addr())
        .map(|a| a.port())
        .map_err(|e| format!("finding a free port: {e}"))
}

fn bind(role: &mut Role, kind: NanoKind) -> Result<NanoSocket, String> {
    let socket = NanoSocket::new(kind, role.cell.buffer)?;
    let endpoint = format!("tcp://127.0.0.1:{}", free_port()?);
    socket.bind(&endpoint)?;
    settle(role);
    role.ready(&format!("endpoint={endpoint}"))?;
    Ok(socket)
}

fn connect(role: &mut Role, kind: NanoKind) -> Result<NanoSocket, String> {
    role.ready("")?;
    let socket = NanoSocket::new(kind, role.cell.buffer)?;
    socket.connect(role.peer("endpoint"))?;
    settle(role);
    Ok(socket)
}

pub(super) fn rx(mut role: Role) -> Result<(), String> {
    let socket = bind(&mut role, NanoKind::Pull)?;
    let mut checker = Checker::new(1, role.cell.size, Loss::Forbidden);
    let mut meter = role.meter();
    let mut buf = vec![0; role.cell.size + 1];
    loop {
        let n = socket.recv(&mut buf)?;
        checker.check(&buf[..n])?;
        meter.add(1);
    }
}

pub(super) fn tx(mut role: Role) -> Result<(), String> {
    let socket = connect(&mut role, NanoKind::Push)?;
    let mut maker = Maker::new(0, role.cell.size);
    let mut sent = 0;
    while !stopping() {
        socket.send(maker.next())?;
        sent += 1;
    }
    done(sent, 0);
    Ok(())
}

pub(super) fn answer(mut role: Role) -> Result<(), String> {
    let socket = bind(&mut role, NanoKind::Pair)?;
    let mut buf = vec![0; role.cell.size + 1];
    loop {
        let n = socket.recv(&mut buf)?;
        socket.send(&buf[..n])?;
    }
}

pub(super) fn ask(mut role: Role) -> Result<(), String> {
    let socket = connect(&mut role, NanoKind::Pair)?;
    let mut maker = Maker::new(0, role.cell.size);
    let mut checker = Checker::new(1, role.cell.size, Loss::Forbidden);
    let mut buf = vec![0; role.cell.size + 1];
    let mut laps = Laps::new(&role);
    while !stopping() {
        socket.send(maker.next())?;
        let n = socket.recv(&mut buf)?;
        checker.check(&buf[..n])?;
        if laps.lap() {
            break;
        }
    }
    Ok(())
}
