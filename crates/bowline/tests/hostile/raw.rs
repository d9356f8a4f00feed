//! A hand-made peer: connections and frames, valid and invalid ones.

use std::io::{ErrorKind, Read};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketType, sockopt};

use crate::common::LIMIT;
use crate::scene::SINK;

/// Opens a TCP connection to a node from an address that is not a node's; `receive` bytes of
/// receive buffer, if given.
pub(crate) fn dial(from: IpAddr, to: IpAddr, receive: Option<usize>) -> TcpStream {
    try_dial(from, to, receive).unwrap()
}

/// The same where the node may end the connection before this side knows of it.
pub(crate) fn try_dial(
    from: IpAddr,
    to: IpAddr,
    receive: Option<usize>,
) -> Result<TcpStream, Errno> {
    let socket = rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
    if let Some(bytes) = receive {
        sockopt::set_socket_recv_buffer_size(&socket, bytes).unwrap();
    }
    rustix::net::bind(&socket, &SocketAddr::new(from, 0)).unwrap();
    rustix::net::connect(&socket, &SocketAddr::new(to, 16385))?;
    let stream = TcpStream::from(socket);
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    stream.set_write_timeout(Some(LIMIT)).unwrap();
    Ok(stream)
}

/// A listener at a peer's address, above the node's: the node opens the connections.
pub(crate) fn listen(at: IpAddr) -> TcpListener {
    let listener = TcpListener::bind(SocketAddr::new(at, 16385)).unwrap();
    listener.set_nonblocking(true).unwrap();
    listener
}

/// The fields of a header that the tests set.
#[derive(Clone, Copy, Default)]
pub(crate) struct Frame {
    pub(crate) sequence: u64,
    pub(crate) ack: u64,
    pub(crate) len: u32,
    pub(crate) ports: (u16, u16),
    pub(crate) flags: u8,
    pub(crate) ext: [u8; 16],
}

impl Frame {
    pub(crate) fn bytes(&self, payload: &[u8]) -> Vec<u8> {
        let mut out = Vec::with_capacity(48 + payload.len());
        out.extend(self.sequence.to_be_bytes());
        out.extend(self.ack.to_be_bytes());
        out.extend(self.len.to_be_bytes());
        out.extend(self.ports.0.to_be_bytes());
        out.extend(self.ports.1.to_be_bytes());
        out.extend([self.flags, 0, 0, 0, 0, 0, 0, 0]);
        out.extend(self.ext);
        out.extend(payload);
        out
    }
}

pub(crate) const MAP: u8 = 1;

/// A whole message to the sink.
pub(crate) fn message(sequence: u64, payload: &[u8]) -> Vec<u8> {
    let len = payload.len() as u32;
    Frame { sequence, len, ports: (9, SINK), ..Frame::default() }.bytes(payload)
}

/// The frame a bowline node begins a connection with [R-2002]: one path, and its generation.
pub(crate) fn greeting(generation: u8, ack: u64) -> Vec<u8> {
    let ext = [5, 0, 1, 6, 0, 0, 0, generation, 8, 0, 0x42, 0x10, 0, 0x10, 0, 0];
    Frame { ack, ports: (1, 0), ext, ..Frame::default() }.bytes(&[])
}

/// Reads up to the end of the connection.
pub(crate) fn ends(mut stream: &TcpStream) {
    let mut buf = [0; 4096];
    loop {
        match stream.read(&mut buf) {
            Ok(0) => return,
            Ok(_) => {}
            Err(error) if error.kind() == ErrorKind::ConnectionReset => return,
            Err(error) => panic!("the connection should end: {error}"),
        }
    }
}

/// Tells whether a connection has ended, without waiting.
pub(crate) fn has_ended(mut stream: &TcpStream) -> bool {
    stream.set_nonblocking(true).unwrap();
    let mut buf = [0; 4096];
    loop {
        match stream.read(&mut buf) {
            Ok(0) => return true,
            Ok(_) => {}
            Err(error) => return error.kind() != ErrorKind::WouldBlock,
        }
    }
}

/// Reads frames until one is for `port`; returns its number and payload.
pub(crate) fn frame_for(mut stream: &TcpStream, port: u16) -> (u64, Vec<u8>) {
    loop {
        let mut head = [0; 48];
        stream.read_exact(&mut head).unwrap();
        let len = u32::from_be_bytes(head[16..20].try_into().unwrap());
        let mut payload = vec![0; len as usize];
        stream.read_exact(&mut payload).unwrap();
        if head[22..24] == port.to_be_bytes() {
            return (u64::from_be_bytes(head[..8].try_into().unwrap()), payload);
        }
    }
}

/// Pseudorandom bytes, the same in every run.
pub(crate) fn garbage(len: usize) -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 32) as u8 | 1
    };
    (0..len).map(|_| next()).collect()
}
