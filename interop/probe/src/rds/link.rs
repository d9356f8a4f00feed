//! Connections of RDS over TCP by hand: a peer that can send anything.

use std::cell::RefCell;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::rc::Rc;
use std::time::{Duration, Instant, SystemTime};

use bowline_wire::rds::{HEADER_LEN, Handshake, Header, MapView, PROBE_PORT, TCP_PORT};
use rustix::net::{AddressFamily, SocketType};

use crate::capture::{Event, What};

/// Longest payload that is believed; a kernel's messages have 1 MiB at most.
const LONGEST: u32 = 1 << 24;

/// A time-out of a socket is not zero.
const SHORTEST: Duration = Duration::from_millis(1);

/// What happens on connections, for a capture.
pub(super) type Events = Rc<RefCell<Vec<Event>>>;

/// One message of the peer.
#[derive(Clone, Debug)]
pub(super) struct Message {
    pub(super) raw: [u8; HEADER_LEN],
    pub(super) header: Header,
    pub(super) payload: Vec<u8>,
}

impl Message {
    /// One line about it, as logs have it.
    pub(super) fn line(&self) -> String {
        match MapView::new(&self.payload).filter(|_| self.header.is_map()) {
            Some(map) => format!("{} ({map})", self.header),
            None => self.header.to_string(),
        }
    }

    /// Tells whether it answers a ping from `port`.
    pub(super) fn is_pong(&self, port: u16) -> bool {
        self.header.sport == 0 && self.header.dport == port
    }

    /// A probe that has a number; a bowline node greets besides with one that has none [R-2010].
    pub(super) fn is_numbered_probe(&self) -> bool {
        self.header.is_probe_ping() && self.header.sequence != 0
    }
}

/// Why there is no message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Silence {
    /// Nothing came in time.
    Nothing,
    /// The peer has ended the connection.
    Ended,
}

impl Silence {
    pub(super) const fn text(self) -> &'static str {
        match self {
            Self::Nothing => "nothing in time",
            Self::Ended => "the end of the connection",
        }
    }
}

/// A connection.
pub(super) struct Link {
    stream: TcpStream,
    local: SocketAddr,
    remote: SocketAddr,
    unread: Vec<u8>,
    ended: bool,
    /// Number of the next message that this side sends.
    next: Rc<RefCell<u64>>,
    events: Events,
}

impl Link {
    /// Makes a TCP connection from a local address.
    pub(super) fn dial(
        from: SocketAddr,
        to: SocketAddr,
        patience: Duration,
    ) -> io::Result<TcpStream> {
        let family = if to.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
        let socket = rustix::net::socket(family, SocketType::STREAM, None)?;
        rustix::net::sockopt::set_socket_timeout(
            &socket,
            rustix::net::sockopt::Timeout::Send,
            Some(patience),
        )?;
        rustix::net::bind(&socket, &from)?;
        rustix::net::connect(&socket, &to)?;
        Ok(TcpStream::from(socket))
    }

    /// Takes a connection that was made; `by_us` says by whom.
    pub(super) fn new(
        stream: TcpStream,
        by_us: bool,
        patience: Duration,
        next: Rc<RefCell<u64>>,
        events: Events,
    ) -> io::Result<Self> {
        stream.set_nodelay(true)?;
        stream.set_write_timeout(Some(patience))?;
        let (local, remote) = (stream.local_addr()?, stream.peer_addr()?);
        let unread = Vec::new();
        let link = Self { stream, local, remote, unread, ended: false, next, events };
        link.note(by_us, What::Opened);
        Ok(link)
    }

    fn note(&self, by_us: bool, what: What) {
        let (from, to) = if by_us { (self.local, self.remote) } else { (self.remote, self.local) };
        self.events.borrow_mut().push(Event { at: SystemTime::now(), from, to, what });
    }

    /// TCP port at the peer's end.
    pub(super) fn peer_port(&self) -> u16 {
        self.remote.port()
    }

    pub(super) fn has_ended(&self) -> bool {
        self.ended
    }

    /// The number of the next message of this side, which is then used.
    pub(super) fn number(&self) -> u64 {
        let mut next = self.next.borrow_mut();
        *next += 1;
        *next - 1
    }

    /// Sends bytes. That the connection has ended is seen by whoever reads then.
    pub(super) fn send(&mut self, bytes: &[u8]) {
        self.note(true, What::Bytes(bytes.to_vec()));
        // What cannot be written was refused by the peer: it has ended the connection, or reads
        // nothing any more. The next read shows which.
        let _ = self.stream.write_all(bytes);
    }

    /// Sends no more.
    pub(super) fn finish(&mut self) {
        self.note(true, What::Ended);
        // The peer may have ended the connection before.
        let _ = self.stream.shutdown(std::net::Shutdown::Write);
    }

    /// Waits for the first bytes of a connection; returns whether it is in service, not ended.
    pub(super) fn begins(&mut self, until: Instant) -> bool {
        while self.unread.is_empty() && !self.ended && Instant::now() < until {
            self.read_some(until);
        }
        !(self.ended && self.unread.is_empty())
    }

    /// The next message; a probe of the peer is answered, which gives this side one path.
    pub(super) fn next(&mut self, until: Instant) -> Result<Message, Silence> {
        let message = self.read(until)?;
        if message.is_numbered_probe() {
            let answer = Header {
                sequence: self.number(),
                dport: PROBE_PORT,
                ext: Handshake { npaths: Some(1), ..Handshake::default() }.emit(),
                ..Header::default()
            };
            self.send(&answer.to_bytes());
        }
        Ok(message)
    }

    fn read(&mut self, until: Instant) -> Result<Message, Silence> {
        loop {
            if let Some(message) = self.cut() {
                return Ok(message);
            }
            if self.ended {
                return Err(Silence::Ended);
            }
            if Instant::now() >= until {
                return Err(Silence::Nothing);
            }
            self.read_some(until);
        }
    }

    /// Reads what there is, or waits for it.
    fn read_some(&mut self, until: Instant) {
        let left = until.saturating_duration_since(Instant::now()).max(SHORTEST);
        let mut buf = [0; 16 << 10];
        let got =
            self.stream.set_read_timeout(Some(left)).and_then(|()| self.stream.read(&mut buf));
        match got {
            Ok(0) => self.end(),
            Ok(got) => {
                let bytes = buf.get(..got).unwrap_or_default();
                self.unread.extend(bytes);
                self.note(false, What::Bytes(bytes.to_vec()));
            }
            Err(error) => match error.kind() {
                ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted => {}
                _ => self.end(),
            },
        }
    }

    fn end(&mut self) {
        self.ended = true;
        self.note(false, What::Ended);
    }

    /// Takes a whole message off what was read.
    fn cut(&mut self) -> Option<Message> {
        let raw: [u8; HEADER_LEN] = *self.unread.first_chunk()?;
        let header = Header::from_bytes(&raw);
        if header.len > LONGEST {
            // No message: what follows cannot be read either.
            self.unread.clear();
            self.end();
            return None;
        }
        let len = HEADER_LEN + header.len as usize;
        let payload = self.unread.get(HEADER_LEN..len)?.to_vec();
        self.unread.drain(..len);
        Some(Message { raw, header, payload })
    }
}

/// Where a node listens.
pub(super) fn listener_at(ip: IpAddr) -> SocketAddr {
    SocketAddr::new(ip, TCP_PORT)
}
