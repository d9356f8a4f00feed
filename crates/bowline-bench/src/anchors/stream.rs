//! Messages one way: framed TCP in three ways, UDP, and unix sockets with message boundaries.
//!
//! A frame is its payload's length in four bytes, little-endian, and the payload.

use std::io::{ErrorKind, IoSlice, Read, Write};
use std::net::{Ipv4Addr, TcpStream, UdpSocket};

use super::{accept, at, connect, is_gone, listen, raw_fds};
use crate::payload::{Checker, Loss, Maker};
use crate::role::{Role, done, stopping};
use crate::sys;

const HEADER: usize = 4;
const STAGE: usize = 64 * 1024;
const READ: usize = 256 * 1024;
/// Kernel limit on the pieces of one gathering write.
const PIECES: usize = 1024;

/// Takes frames out of a byte stream; every payload is copied out once.
struct Deframer {
    out: Vec<u8>,
    head: [u8; HEADER],
    have: usize,
    want: usize,
}

impl Deframer {
    fn new(size: usize) -> Self {
        Self { out: vec![0; size], head: [0; HEADER], have: 0, want: 0 }
    }

    /// Consumes `bytes` and hands over each complete payload; returns how many there were.
    #[inline]
    fn feed(&mut self, mut bytes: &[u8], checker: &mut Checker) -> Result<u64, String> {
        let mut complete = 0;
        while !bytes.is_empty() {
            // The common case: header and payload are both here.
            if self.have == 0
                && let Some((head, rest)) = bytes.split_first_chunk::<HEADER>()
            {
                let len = self.length(*head)?;
                if let Some((payload, rest)) = rest.split_at_checked(len) {
                    let out = &mut self.out[..len];
                    out.copy_from_slice(payload);
                    checker.check(out)?;
                    complete += 1;
                    bytes = rest;
                    continue;
                }
            }
            if self.have < HEADER {
                let n = bytes.len().min(HEADER - self.have);
                self.head[self.have..self.have + n].copy_from_slice(&bytes[..n]);
                self.have += n;
                bytes = &bytes[n..];
                if self.have == HEADER {
                    self.want = self.length(self.head)?;
                }
                continue;
            }
            let filled = self.have - HEADER;
            let n = bytes.len().min(self.want - filled);
            self.out[filled..filled + n].copy_from_slice(&bytes[..n]);
            self.have += n;
            bytes = &bytes[n..];
            if filled + n == self.want {
                checker.check(&self.out[..self.want])?;
                complete += 1;
                self.have = 0;
            }
        }
        Ok(complete)
    }

    #[inline]
    fn length(&self, head: [u8; HEADER]) -> Result<usize, String> {
        let len = u32::from_le_bytes(head) as usize;
        if len == 0 || len > self.out.len() {
            return Err(format!("a frame of {len} bytes"));
        }
        Ok(len)
    }
}

pub(super) fn tcp_rx(mut role: Role) -> Result<(), String> {
    let (flows, size) = (role.cell.flows, role.cell.size);
    let listener = listen(&mut role)?;
    let mut streams = Vec::with_capacity(flows);
    for _ in 0..flows {
        streams.push(accept(&listener)?);
    }
    let mut deframers: Vec<Deframer> = (0..flows).map(|_| Deframer::new(size)).collect();
    let mut checker = Checker::new(flows, size, Loss::Forbidden);
    let mut meter = role.meter();
    let mut buf = vec![0; READ];
    let mut poller = match flows {
        1 => None,
        _ => Some(sys::Poller::new(&raw_fds(&streams)).map_err(at("epoll"))?),
    };
    let mut ready = vec![0];
    loop {
        if let Some(poller) = &mut poller {
            ready.clear();
            ready.extend(poller.wait().map_err(at("epoll_wait"))?);
            meter.syscalls += 1;
        }
        for &i in &ready {
            let n = match streams[i].read(&mut buf) {
                Ok(0) => return Ok(()),
                Ok(n) => n,
                Err(e) if is_gone(&e) => return Ok(()),
                Err(e) => return Err(at("read")(e)),
            };
            meter.syscalls += 1;
            meter.add(deframers[i].feed(&buf[..n], &mut checker)?);
        }
    }
}

fn connect_all(role: &mut Role) -> Result<Vec<TcpStream>, String> {
    role.ready("")?;
    (0..role.cell.flows).map(|_| connect(role)).collect()
}

fn makers(role: &Role) -> Vec<Maker> {
    (0..role.cell.flows).map(|flow| Maker::new(flow, role.cell.size)).collect()
}

/// Bytes on their way into one connection, written when there are 64 KiB of them.
struct Stage {
    stream: TcpStream,
    buf: Vec<u8>,
    len: usize,
    writes: u64,
}

impl Stage {
    #[inline]
    fn push(&mut self, mut bytes: &[u8]) -> std::io::Result<()> {
        while let Some((now, later)) = bytes.split_at_checked(STAGE - self.len) {
            self.buf[self.len..].copy_from_slice(now);
            self.stream.write_all(&self.buf)?;
            self.writes += 1;
            self.len = 0;
            bytes = later;
        }
        self.buf[self.len..self.len + bytes.len()].copy_from_slice(bytes);
        self.len += bytes.len();
        Ok(())
    }
}

pub(super) fn tcpb_tx(mut role: Role) -> Result<(), String> {
    let streams = connect_all(&mut role)?;
    let mut makers = makers(&role);
    let mut stages: Vec<Stage> = streams
        .into_iter()
        .map(|stream| Stage { stream, buf: vec![0; STAGE], len: 0, writes: 0 })
        .collect();
    let header = (role.cell.size as u32).to_le_bytes();
    let mut sent = 0;
    let burst = (STAGE / role.cell.size).max(1);
    while !stopping() {
        for _ in 0..burst {
            for (maker, stage) in makers.iter_mut().zip(&mut stages) {
                let pushed = stage.push(&header).and_then(|()| stage.push(maker.next()));
                match pushed {
                    Ok(()) => sent += 1,
                    Err(e) if is_gone(&e) => return Ok(()),
                    Err(e) => return Err(at("write")(e)),
                }
            }
        }
    }
    done(sent, stages.iter().map(|s| s.writes).sum());
    Ok(())
}

/// Writes all of several pieces; returns the number of calls it took.
fn write_all_pieces(
    stream: &mut TcpStream,
    mut pieces: &mut [IoSlice<'_>],
) -> std::io::Result<u64> {
    let mut calls = 0;
    while !pieces.is_empty() {
        let n = stream.write_vectored(pieces)?;
        calls += 1;
        if n == 0 {
            return Err(ErrorKind::WriteZero.into());
        }
        IoSlice::advance_slices(&mut pieces, n);
    }
    Ok(calls)
}

pub(super) fn tcp1_tx(mut role: Role) -> Result<(), String> {
    let mut streams = connect_all(&mut role)?;
    let mut makers = makers(&role);
    let header = (role.cell.size as u32).to_le_bytes();
    let (mut sent, mut calls) = (0, 0);
    while !stopping() {
        for (maker, stream) in makers.iter_mut().zip(&mut streams) {
            let mut pieces = [IoSlice::new(&header), IoSlice::new(maker.next())];
            match write_all_pieces(stream, &mut pieces) {
                Ok(n) => calls += n,
                Err(e) if is_gone(&e) => return Ok(()),
                Err(e) => return Err(at("writev")(e)),
            }
            sent += 1;
        }
    }
    done(sent, calls);
    Ok(())
}

/// Bytes of sent messages that are kept, as a sender does until the peer has acknowledged them.
const KEPT: usize = 4 << 20;

pub(super) fn tcpk_tx(mut role: Role) -> Result<(), String> {
    let mut streams = connect_all(&mut role)?;
    let mut makers = makers(&role);
    let size = role.cell.size;
    let header = (size as u32).to_le_bytes();
    let mut kept = vec![0; KEPT.max(size)];
    let (mut at, mut sent, mut calls) = (0, 0, 0);
    while !stopping() {
        for (maker, stream) in makers.iter_mut().zip(&mut streams) {
            if at + size > kept.len() {
                at = 0;
            }
            let copy = &mut kept[at..at + size];
            copy.copy_from_slice(maker.next());
            at += size;
            let mut pieces = [IoSlice::new(&header), IoSlice::new(copy)];
            match write_all_pieces(stream, &mut pieces) {
                Ok(n) => calls += n,
                Err(e) if is_gone(&e) => return Ok(()),
                Err(e) => return Err(super::at("writev")(e)),
            }
            sent += 1;
        }
    }
    done(sent, calls);
    Ok(())
}

pub(super) fn tcpz_tx(mut role: Role) -> Result<(), String> {
    let mut streams = connect_all(&mut role)?;
    let mut makers = makers(&role);
    let size = role.cell.size;
    let header = (size as u32).to_le_bytes();
    let batch = (STAGE / (size + HEADER)).clamp(1, PIECES / 2);
    let mut pools: Vec<Vec<Vec<u8>>> =
        makers.iter().map(|maker| (0..batch).map(|_| maker.buffer()).collect()).collect();
    let (mut sent, mut calls) = (0, 0);
    while !stopping() {
        for ((maker, stream), pool) in makers.iter_mut().zip(&mut streams).zip(&mut pools) {
            for buf in pool.iter_mut() {
                maker.next_in(buf);
            }
            let mut pieces = Vec::with_capacity(2 * batch);
            for buf in pool.iter() {
                pieces.push(IoSlice::new(&header));
                pieces.push(IoSlice::new(buf));
            }
            match write_all_pieces(stream, &mut pieces) {
                Ok(n) => calls += n,
                Err(e) if is_gone(&e) => return Ok(()),
                Err(e) => return Err(at("writev")(e)),
            }
            sent += batch as u64;
        }
    }
    done(sent, calls);
    Ok(())
}

/// Receive buffer of the UDP anchor, in bytes; the kernel caps it at its limit.
const UDP_BUFFER: usize = 4 << 20;

pub(super) fn udp_rx(mut role: Role) -> Result<(), String> {
    let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).map_err(at("bind"))?;
    sys::set_buffers(&socket, UDP_BUFFER).map_err(at("SO_RCVBUF"))?;
    let port = socket.local_addr().map_err(at("getsockname"))?.port();
    role.ready(&format!("port={port}"))?;
    let mut checker = Checker::new(1, role.cell.size, Loss::Allowed);
    let mut meter = role.meter();
    let mut buf = vec![0; role.cell.size + 1];
    loop {
        let n = socket.recv(&mut buf).map_err(at("recv"))?;
        meter.syscalls += 1;
        checker.check(&buf[..n])?;
        meter.add(1);
    }
}

pub(super) fn udp_tx(mut role: Role) -> Result<(), String> {
    let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).map_err(at("bind"))?;
    sys::set_buffers(&socket, UDP_BUFFER).map_err(at("SO_SNDBUF"))?;
    role.ready("")?;
    socket.connect(role.peer_addr()?).map_err(at("connect"))?;
    let mut maker = Maker::new(0, role.cell.size);
    let mut sent = 0;
    while !stopping() {
        match socket.send(maker.next()) {
            Ok(_) => sent += 1,
            Err(e) if is_gone(&e) => return Ok(()),
            Err(e) => return Err(at("send")(e)),
        }
    }
    done(sent, sent);
    Ok(())
}

/// Buffers of the unix socket anchor, in bytes; the kernel caps them at its limit.
pub(super) const SEQP_BUFFER: usize = 4 << 20;

pub(super) fn seqp_rx(mut role: Role) -> Result<(), String> {
    let name = format!("bowline-bench-{}", std::process::id());
    let listener = sys::SeqPacket::listen(&name).map_err(at("listen"))?;
    role.ready(&format!("name={name}"))?;
    let socket = listener.accept(SEQP_BUFFER).map_err(at("accept"))?;
    let mut checker = Checker::new(1, role.cell.size, Loss::Forbidden);
    let mut meter = role.meter();
    let mut buf = vec![0; role.cell.size + 1];
    loop {
        let n = match socket.recv(&mut buf) {
            Ok(0) => return Ok(()),
            Ok(n) => n,
            Err(e) if is_gone(&e) => return Ok(()),
            Err(e) => return Err(at("recv")(e)),
        };
        meter.syscalls += 1;
        checker.check(&buf[..n])?;
        meter.add(1);
    }
}

pub(super) fn seqp_tx(mut role: Role) -> Result<(), String> {
    role.ready("")?;
    let socket = sys::SeqPacket::connect(role.peer("name"), SEQP_BUFFER).map_err(at("connect"))?;
    let mut maker = Maker::new(0, role.cell.size);
    let mut sent = 0;
    while !stopping() {
        match socket.send(maker.next()) {
            Ok(_) => sent += 1,
            Err(e) if is_gone(&e) => return Ok(()),
            Err(e) => return Err(at("send")(e)),
        }
    }
    done(sent, sent);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frames(size: usize, count: usize) -> Vec<u8> {
        let mut maker = Maker::new(0, size);
        let mut bytes = Vec::new();
        for _ in 0..count {
            bytes.extend_from_slice(&(size as u32).to_le_bytes());
            bytes.extend_from_slice(maker.next());
        }
        bytes
    }

    #[test]
    fn frames_are_found_however_the_stream_is_cut() {
        for cut in 1..200 {
            let mut deframer = Deframer::new(64);
            let mut checker = Checker::new(1, 64, Loss::Forbidden);
            let mut complete = 0;
            for piece in frames(64, 20).chunks(cut) {
                complete += deframer.feed(piece, &mut checker).unwrap();
            }
            assert_eq!(complete, 20, "cut every {cut} bytes");
        }
    }

    #[test]
    fn a_frame_larger_than_agreed_is_refused() {
        let mut deframer = Deframer::new(64);
        let mut checker = Checker::new(1, 64, Loss::Forbidden);
        assert!(deframer.feed(&65u32.to_le_bytes(), &mut checker).is_err());
        assert!(Deframer::new(64).feed(&[0; 4], &mut checker).is_err());
    }
}
