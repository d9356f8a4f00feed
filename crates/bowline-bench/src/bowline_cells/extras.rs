//! A receiver that does not read, many sockets, many nodes, and memory of what is idle.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::Duration;

use bowline::rds::{Interest, Node, Socket};

use super::{RX_PORT, TX_PORT, add_port, failed, probe};
use crate::cell::Kind;
use crate::payload::{Checker, Loss, Maker};
use crate::role::{Role, done, say, stopping};
use crate::sys;

/// How long a side waits at once for something to become possible.
const NAP: Duration = Duration::from_millis(1);

fn bind_many(node: &Node, ip: IpAddr, port: u16, count: usize) -> Result<Vec<Socket>, String> {
    (0..count).map(|i| node.bind((ip, add_port(port, i)?)).map_err(failed("bind"))).collect()
}

/// Waits a little until the socket can be used; the loops around it look at all sockets again
/// anyway.
fn nap(socket: &Socket, interest: Interest) {
    let _ = socket.wait(interest, Some(NAP));
}

/// The receivers of a set of pairs. The first one is read only when all are to be awake, and what
/// it gets is not counted in either case: the figure is that of the others.
pub(super) fn pairs_rx(mut role: Role) -> Result<(), String> {
    let ip = role.cell.nodes.0.into();
    let node = super::node(&role.cell, &[ip])?;
    let sockets = bind_many(&node, ip, RX_PORT, role.cell.flows)?;
    for socket in &sockets {
        socket.set_nonblocking(true);
    }
    role.ready("")?;
    let skip = usize::from(role.cell.kind == Kind::OneAsleep);
    let mut checker = Checker::new(role.cell.flows, role.cell.size, Loss::Forbidden);
    let mut meter = role.meter();
    meter.set_probe(probe(&node));
    let mut buf = vec![0; role.cell.size + 1];
    loop {
        let mut idle = true;
        for (i, socket) in sockets.iter().enumerate().skip(skip) {
            // Bounded, so that one busy socket does not keep the others from being read.
            for _ in 0..64 {
                match socket.recv_from(&mut buf) {
                    Ok((n, _)) => {
                        checker.check(&buf[..n.min(buf.len())])?;
                        meter.add(u64::from(i != 0));
                        idle = false;
                    }
                    Err(e) if e.is_would_block() => break,
                    Err(e) => return Err(failed("recv_from")(e)),
                }
            }
        }
        if idle && let Some(socket) = sockets.last() {
            nap(socket, Interest::READ);
            meter.look_if_started();
        }
    }
}

pub(super) fn pairs_tx(mut role: Role) -> Result<(), String> {
    let ip = role.cell.nodes.1.into();
    let node = super::node(&role.cell, &[ip])?;
    let sockets = bind_many(&node, ip, TX_PORT, role.cell.flows)?;
    let mut lanes = Vec::new();
    for (i, socket) in sockets.iter().enumerate() {
        socket.set_nonblocking(true);
        let to: SocketAddr = (role.cell.nodes.0, add_port(RX_PORT, i)?).into();
        lanes.push((socket, to, Maker::new(i, role.cell.size)));
    }
    role.ready("")?;
    let mut sent = 0;
    while !stopping() {
        let mut idle = true;
        for (socket, to, maker) in &mut lanes {
            match socket.send_to(maker.next(), *to) {
                Ok(_) => {
                    sent += 1;
                    idle = false;
                }
                Err(e) if e.is_would_block() => maker.undo(),
                Err(e) => return Err(failed("send_to")(e)),
            }
        }
        if idle && let Some(socket) = sockets.last() {
            nap(socket, Interest::WRITE);
        }
    }
    done(sent, node.driver_stats().busy_syscalls());
    std::process::exit(0);
}

/// Address of the `i`-th of many nodes that live in one process.
fn many_address(base: Ipv4Addr, i: usize) -> Ipv4Addr {
    let [a, b, _, _] = base.octets();
    let i = i as u16; // at most 10,000 nodes are asked for
    Ipv4Addr::new(a, b.wrapping_add(1), (i / 250) as u8, (i % 250) as u8 + 2)
}

fn fan_addresses(role: &Role) -> Result<Vec<SocketAddr>, String> {
    let (rx, many) = (role.cell.nodes.0, role.cell.kind == Kind::Sockets);
    (0..role.cell.flows)
        .map(|i| match many {
            true => Ok((rx, add_port(RX_PORT, i)?).into()),
            false => Ok((many_address(rx, i), RX_PORT).into()),
        })
        .collect()
}

fn distinct_ips(addresses: &[SocketAddr]) -> Vec<IpAddr> {
    let mut ips: Vec<IpAddr> = addresses.iter().map(SocketAddr::ip).collect();
    ips.dedup();
    ips
}

/// Reads one message from each socket in turn, in the order in which they are sent.
pub(super) fn fan_rx(mut role: Role) -> Result<(), String> {
    sys::raise_open_files();
    let addresses = fan_addresses(&role)?;
    let node = super::node(&role.cell, &distinct_ips(&addresses))?;
    let sockets = addresses
        .iter()
        .map(|a| node.bind(*a).map_err(failed("bind")))
        .collect::<Result<Vec<_>, String>>()?;
    role.ready("")?;
    let mut checker = Checker::new(role.cell.flows, role.cell.size, Loss::Forbidden);
    let mut meter = role.meter();
    meter.set_probe(probe(&node));
    let mut buf = vec![0; role.cell.size + 1];
    let mut first = true;
    loop {
        for socket in &sockets {
            let (n, _) = socket.recv_from(&mut buf).map_err(failed("recv_from"))?;
            checker.check(&buf[..n.min(buf.len())])?;
            if !first {
                meter.add(1); // the first turn sets connections up
            }
        }
        first = false;
    }
}

pub(super) fn fan_tx(mut role: Role) -> Result<(), String> {
    sys::raise_open_files();
    let ip = role.cell.nodes.1.into();
    let node = super::node(&role.cell, &[ip])?;
    let socket = node.bind((ip, TX_PORT)).map_err(failed("bind"))?;
    let mut lanes: Vec<(SocketAddr, Maker)> = fan_addresses(&role)?
        .into_iter()
        .enumerate()
        .map(|(i, to)| (to, Maker::new(i, role.cell.size)))
        .collect();
    role.ready("")?;
    let mut sent = 0;
    while !stopping() {
        for (to, maker) in &mut lanes {
            socket.send_to(maker.next(), *to).map_err(failed("send_to"))?;
            sent += 1;
        }
    }
    done(sent, node.driver_stats().busy_syscalls());
    std::process::exit(0);
}

/// Resident memory of this process, in bytes.
fn resident() -> Result<u64, String> {
    let text = std::fs::read_to_string("/proc/self/smaps_rollup")
        .map_err(|e| format!("/proc/self/smaps_rollup: {e}"))?;
    let line = text.lines().find(|l| l.starts_with("Rss:"));
    let kib = line.and_then(|l| l.split_whitespace().nth(1)?.parse::<u64>().ok());
    kib.map(|kib| kib * 1024).ok_or_else(|| "/proc/self/smaps_rollup lacks Rss".into())
}

pub(super) fn idle_sockets(mut role: Role) -> Result<(), String> {
    sys::raise_open_files();
    let ip = role.cell.nodes.0.into();
    let node = super::node(&role.cell, &[ip])?;
    role.ready("")?;
    let warm = node.bind((ip, 2)).map_err(failed("bind"))?; // what the first socket brings with it is not counted
    let before = resident()?;
    let sockets = bind_many(&node, ip, RX_PORT, role.cell.flows)?;
    let bytes = resident()?.saturating_sub(before);
    say(&format!(
        "result n={} ns=1 own_cpu=0 peer_cpu=0 syscalls=0 cc= bytes={bytes}",
        sockets.len()
    ));
    drop(warm);
    Ok(())
}

/// The side of a cell that has only one.
pub(super) fn nothing(mut role: Role) -> Result<(), String> {
    role.ready("")?;
    while !stopping() {
        std::thread::sleep(NAP);
    }
    done(0, 0);
    Ok(())
}

/// Takes one message from each of many connections, and then leaves them alone.
pub(super) fn idle_rx(mut role: Role) -> Result<(), String> {
    sys::raise_open_files();
    let addresses = fan_addresses(&role)?;
    let node = super::node(&role.cell, &distinct_ips(&addresses))?;
    let bind = |a: &SocketAddr| node.bind(*a).map_err(failed("bind"));
    let sockets = addresses.iter().map(bind).collect::<Result<Vec<_>, String>>()?;
    role.ready("")?;
    let mut buf = vec![0; role.cell.size + 1];
    for socket in &sockets {
        socket.recv_from(&mut buf).map_err(failed("recv_from"))?;
    }
    while !stopping() {
        std::thread::sleep(NAP);
    }
    Ok(())
}

/// Opens many connections with one message each and looks at memory before and after. This side
/// holds as many connections as the other.
pub(super) fn idle_tx(mut role: Role) -> Result<(), String> {
    sys::raise_open_files();
    let ip = role.cell.nodes.1.into();
    let node = super::node(&role.cell, &[ip])?;
    let socket = node.bind((ip, TX_PORT)).map_err(failed("bind"))?;
    role.ready("")?;
    let mut maker = Maker::new(0, role.cell.size);
    let addresses = fan_addresses(&role)?;
    let before = resident()?;
    for to in &addresses {
        socket.send_to(maker.next(), *to).map_err(failed("send_to"))?;
    }
    socket.flush(Some(Duration::from_secs(10))).map_err(failed("flush"))?;
    let bytes = resident()?.saturating_sub(before);
    let n = addresses.len();
    say(&format!("result n={n} ns=1 own_cpu=0 peer_cpu=0 syscalls=0 cc= bytes={bytes}"));
    while !stopping() {
        std::thread::sleep(NAP);
    }
    done(n as u64, 0);
    std::process::exit(0);
}
