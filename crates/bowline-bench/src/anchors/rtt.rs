//! Request and answer over bare sockets, spinning or sleeping.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{Ipv4Addr, TcpStream, UdpSocket};

use super::stream::SEQP_BUFFER;
use super::{accept, at, connect, is_gone, listen};
use crate::cell::Wait;
use crate::payload::{Checker, Loss, Maker};
use crate::role::{Laps, Role, stopping};
use crate::sys;

/// Fills `buf`; polls a non-blocking stream. Returns false at its end.
fn read_all(stream: &mut TcpStream, mut buf: &mut [u8]) -> Result<bool, String> {
    while !buf.is_empty() {
        match stream.read(buf) {
            Ok(0) => return Ok(false),
            Ok(n) => buf = &mut buf[n..],
            Err(e) if e.kind() == ErrorKind::WouldBlock => std::hint::spin_loop(),
            Err(e) if is_gone(&e) => return Ok(false),
            Err(e) => return Err(at("read")(e)),
        }
    }
    Ok(true)
}

fn write_all(stream: &mut TcpStream, mut buf: &[u8]) -> Result<bool, String> {
    while !buf.is_empty() {
        match stream.write(buf) {
            Ok(n) => buf = &buf[n..],
            Err(e) if e.kind() == ErrorKind::WouldBlock => {}
            Err(e) if is_gone(&e) => return Ok(false),
            Err(e) => return Err(at("write")(e)),
        }
    }
    Ok(true)
}

pub(super) fn tcp_rx(mut role: Role) -> Result<(), String> {
    let listener = listen(&mut role)?;
    let mut stream = accept(&listener)?;
    stream.set_nonblocking(role.cell.wait == Wait::Spin).map_err(at("O_NONBLOCK"))?;
    let mut buf = vec![0; role.cell.size];
    while read_all(&mut stream, &mut buf)? && write_all(&mut stream, &buf)? {}
    Ok(())
}

pub(super) fn tcp_tx(mut role: Role) -> Result<(), String> {
    role.ready("")?;
    let mut stream = connect(&role)?;
    stream.set_nonblocking(role.cell.wait == Wait::Spin).map_err(at("O_NONBLOCK"))?;
    let mut maker = Maker::new(0, role.cell.size);
    let mut checker = Checker::new(1, role.cell.size, Loss::Forbidden);
    let mut buf = vec![0; role.cell.size];
    let mut laps = Laps::new(&role);
    while !stopping() {
        if !write_all(&mut stream, maker.next())? || !read_all(&mut stream, &mut buf)? {
            return Err("the answering side closed the connection".into());
        }
        checker.check(&buf)?;
        if laps.lap() {
            break;
        }
    }
    Ok(())
}

fn udp_socket(role: &Role) -> io::Result<UdpSocket> {
    let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0))?;
    socket.set_nonblocking(role.cell.wait == Wait::Spin)?;
    Ok(socket)
}

fn udp_recv(socket: &UdpSocket, buf: &mut [u8]) -> Result<usize, String> {
    loop {
        match socket.recv(buf) {
            Err(e) if e.kind() == ErrorKind::WouldBlock => std::hint::spin_loop(),
            got => return got.map_err(at("recv")),
        }
    }
}

pub(super) fn udp_rx(mut role: Role) -> Result<(), String> {
    let socket = udp_socket(&role).map_err(at("bind"))?;
    let port = socket.local_addr().map_err(at("getsockname"))?.port();
    role.ready(&format!("port={port}"))?;
    let asking = role.peer_addr()?;
    socket.connect(asking).map_err(at("connect"))?;
    let mut buf = vec![0; role.cell.size + 1];
    loop {
        let n = udp_recv(&socket, &mut buf)?;
        socket.send(&buf[..n]).map_err(at("send"))?;
    }
}

pub(super) fn udp_tx(mut role: Role) -> Result<(), String> {
    let socket = udp_socket(&role).map_err(at("bind"))?;
    let port = socket.local_addr().map_err(at("getsockname"))?.port();
    role.ready(&format!("port={port}"))?;
    socket.connect(role.peer_addr()?).map_err(at("connect"))?;
    let mut maker = Maker::new(0, role.cell.size);
    let mut checker = Checker::new(1, role.cell.size, Loss::Forbidden);
    let mut buf = vec![0; role.cell.size + 1];
    let mut laps = Laps::new(&role);
    while !stopping() {
        socket.send(maker.next()).map_err(at("send"))?;
        let n = udp_recv(&socket, &mut buf)?;
        checker.check(&buf[..n])?;
        if laps.lap() {
            break;
        }
    }
    Ok(())
}

pub(super) fn seqp_rx(mut role: Role) -> Result<(), String> {
    let name = format!("bowline-bench-{}", std::process::id());
    let listener = sys::SeqPacket::listen(&name).map_err(at("listen"))?;
    role.ready(&format!("name={name}"))?;
    let socket = listener.accept(SEQP_BUFFER).map_err(at("accept"))?;
    let mut buf = vec![0; role.cell.size + 1];
    loop {
        match socket.recv(&mut buf).map_err(at("recv"))? {
            0 => return Ok(()),
            n => socket.send(&buf[..n]).map_err(at("send"))?,
        };
    }
}

pub(super) fn seqp_tx(mut role: Role) -> Result<(), String> {
    role.ready("")?;
    let socket = sys::SeqPacket::connect(role.peer("name"), SEQP_BUFFER).map_err(at("connect"))?;
    let mut maker = Maker::new(0, role.cell.size);
    let mut checker = Checker::new(1, role.cell.size, Loss::Forbidden);
    let mut buf = vec![0; role.cell.size + 1];
    let mut laps = Laps::new(&role);
    while !stopping() {
        socket.send(maker.next()).map_err(at("send"))?;
        let n = socket.recv(&mut buf).map_err(at("recv"))?;
        checker.check(&buf[..n])?;
        if laps.lap() {
            break;
        }
    }
    Ok(())
}
