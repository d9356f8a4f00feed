//! Bare sockets, driven as well as they can be: what every ratio is formed against.

mod futex;
mod gso;
mod rtt;
mod stream;

use std::io;
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsRawFd;

use crate::cell::{Cell, Kind, Subject};
use crate::role::{Role, Sides};
use crate::sys;

pub(crate) use gso::{RING, abilities as gso_abilities, window as gso_window};

/// The sides of an anchor.
pub(crate) fn sides(cell: &Cell) -> Option<Sides> {
    Some(match (cell.kind, cell.subject) {
        (Kind::Stream, Subject::Udp) => Sides(stream::udp_rx, stream::udp_tx),
        (Kind::Stream, Subject::UdpGso) => Sides(gso::rx, gso::tx),
        (Kind::Stream, Subject::Seqp) => Sides(stream::seqp_rx, stream::seqp_tx),
        (Kind::Stream, Subject::Tcpz) => Sides(stream::tcp_rx, stream::tcpz_tx),
        (Kind::Stream, Subject::Tcp1) => Sides(stream::tcp_rx, stream::tcp1_tx),
        (Kind::Stream, Subject::Tcpk) => Sides(stream::tcp_rx, stream::tcpk_tx),
        (Kind::Stream, _) => Sides(stream::tcp_rx, stream::tcpb_tx),
        (Kind::Rtt, Subject::Udp) => Sides(rtt::udp_rx, rtt::udp_tx),
        (Kind::Rtt, Subject::Futex) => Sides(futex::answer, futex::ask),
        (Kind::Rtt, Subject::Seqp) => Sides(rtt::seqp_rx, rtt::seqp_tx),
        (Kind::Rtt, _) => Sides(rtt::tcp_rx, rtt::tcp_tx),
        _ => return None,
    })
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
