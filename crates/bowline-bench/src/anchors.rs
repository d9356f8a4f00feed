//! Bare sockets, driven as well as they can be: what every ratio is formed against.

mod futex;
mod gso;
mod rtt;
mod stream;

use std::io;
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsRawFd;

use crate::cell::{Kind, Subject};
use crate::role::{Role, Side};
use crate::sys;

pub(crate) use gso::{RING, abilities as gso_abilities, window as gso_window};

/// Runs one side of an anchor.
pub(crate) fn run(role: Role) -> Result<(), String> {
    match (role.cell.kind, role.side, role.cell.subject) {
        (Kind::Stream, Side::Rx, Subject::Udp) => stream::udp_rx(role),
        (Kind::Stream, Side::Tx, Subject::Udp) => stream::udp_tx(role),
        (Kind::Stream, Side::Rx, Subject::UdpGso) => gso::rx(role),
        (Kind::Stream, Side::Tx, Subject::UdpGso) => gso::tx(role),
        (Kind::Stream, Side::Rx, Subject::Seqp) => stream::seqp_rx(role),
        (Kind::Stream, Side::Tx, Subject::Seqp) => stream::seqp_tx(role),
        (Kind::Stream, Side::Rx, _) => stream::tcp_rx(role),
        (Kind::Stream, Side::Tx, Subject::Tcpz) => stream::tcpz_tx(role),
        (Kind::Stream, Side::Tx, Subject::Tcp1) => stream::tcp1_tx(role),
        (Kind::Stream, Side::Tx, Subject::Tcpk) => stream::tcpk_tx(role),
        (Kind::Stream, Side::Tx, _) => stream::tcpb_tx(role),
        (Kind::Rtt, Side::Rx, Subject::Udp) => rtt::udp_rx(role),
        (Kind::Rtt, Side::Tx, Subject::Udp) => rtt::udp_tx(role),
        (Kind::Rtt, Side::Rx, Subject::Futex) => futex::answer(role),
        (Kind::Rtt, Side::Tx, Subject::Futex) => futex::ask(role),
        (Kind::Rtt, Side::Rx, Subject::Seqp) => rtt::seqp_rx(role),
        (Kind::Rtt, Side::Tx, Subject::Seqp) => rtt::seqp_tx(role),
        (Kind::Rtt, Side::Rx, _) => rtt::tcp_rx(role),
        (Kind::Rtt, Side::Tx, _) => rtt::tcp_tx(role),
        (kind, _, subject) => Err(format!("{} has no cell {}", subject.name(), kind.name())),
    }
}

/// Names the call that failed.
fn at(call: &'static str) -> impl FnOnce(io::Error) -> String {
    move |e| format!("{call}: {e}")
}

fn listen(role: &mut Role) -> Result<TcpListener, String> {
    let listener = TcpListener::bind((role.plain_ip(), 0)).map_err(at("bind"))?;
    if !role.cell.cc.is_empty() {
        sys::set_all_congestion_control(&role.cell.cc); // accepted sockets take it over
    }
    let port = listener.local_addr().map_err(at("getsockname"))?.port();
    role.ready(&format!("port={port}"))?;
    Ok(listener)
}

fn accept(listener: &TcpListener) -> Result<TcpStream, String> {
    let (stream, _) = listener.accept().map_err(at("accept"))?;
    stream.set_nodelay(true).map_err(at("TCP_NODELAY"))?;
    Ok(stream)
}

fn connect(role: &Role) -> Result<TcpStream, String> {
    let stream = TcpStream::connect(role.peer_addr()?).map_err(at("connect"))?;
    stream.set_nodelay(true).map_err(at("TCP_NODELAY"))?;
    if !role.cell.cc.is_empty() {
        sys::set_all_congestion_control(&role.cell.cc);
    }
    Ok(stream)
}

/// The end of a stream that the other side closed while this one was stopped is no error.
fn is_gone(e: &io::Error) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionRefused, ConnectionReset};
    matches!(e.kind(), BrokenPipe | ConnectionReset | ConnectionRefused)
}

fn raw_fds(streams: &[TcpStream]) -> Vec<i32> {
    streams.iter().map(AsRawFd::as_raw_fd).collect()
}
