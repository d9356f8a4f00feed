//! A connection to an NBD server.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream, ToSocketAddrs};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, sockopt};

use super::handshake::{self, Export};
use super::uri::{NbdUri, Server};

/// How long a read waits before it is checked whether anything is to come.
pub(super) const TICK: Duration = Duration::from_millis(500);

/// How long a machine may acknowledge nothing that it was sent.
const UNACKNOWLEDGED: Duration = Duration::from_secs(30);

/// The connection.
#[derive(Debug)]
pub(super) enum Stream {
    Tcp(TcpStream),
    Unix(UnixStream),
}

impl Stream {
    /// Connects, and negotiates the use of the export, all within `limit`.
    ///
    /// # Errors
    /// Nobody listens there or answers in time, and errors of the handshake.
    pub(super) fn open(uri: &NbdUri, limit: Duration) -> io::Result<(Self, Export)> {
        let end = Instant::now() + limit;
        let stream = match &uri.server {
            Server::Unix(path) => Self::Unix(unix(path, limit)?),
            Server::Tcp { host, port } => Self::Tcp(tcp(host, *port, end)?),
        };
        let export = handshake::run(&mut Timed { stream: &stream, end }, uri.export())?;
        stream.set_patience(TICK, None)?;
        Ok((stream, export))
    }

    /// Limits how long reads and writes wait.
    pub(super) fn set_patience(&self, read: Duration, write: Option<Duration>) -> io::Result<()> {
        match self {
            Self::Tcp(tcp) => {
                tcp.set_read_timeout(Some(read))?;
                tcp.set_write_timeout(write)
            }
            Self::Unix(unix) => {
                unix.set_read_timeout(Some(read))?;
                unix.set_write_timeout(write)
            }
        }
    }

    /// Ends the connection, and every wait on it.
    pub(super) fn close(&self) {
        // An error means that it has ended.
        let _ = match self {
            Self::Tcp(tcp) => tcp.shutdown(Shutdown::Both),
            Self::Unix(unix) => unix.shutdown(Shutdown::Both),
        };
    }
}

impl Read for &Stream {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        match self {
            Stream::Tcp(tcp) => (&*tcp).read(out),
            Stream::Unix(unix) => (&*unix).read(out),
        }
    }
}

impl Write for &Stream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Stream::Tcp(tcp) => (&*tcp).write(bytes),
            Stream::Unix(unix) => (&*unix).write(bytes),
        }
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn tcp(host: &str, port: u16, end: Instant) -> io::Result<TcpStream> {
    let mut failed = io::Error::new(ErrorKind::NotFound, format!("{host} has no address"));
    for place in (host, port).to_socket_addrs()? {
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(ErrorKind::TimedOut.into());
        }
        match TcpStream::connect_timeout(&place, left) {
            Ok(tcp) => {
                tcp.set_nodelay(true)?;
                let most = u32::try_from(UNACKNOWLEDGED.as_millis()).unwrap_or(u32::MAX);
                sockopt::set_tcp_user_timeout(&tcp, most)?;
                return Ok(tcp);
            }
            Err(error) => failed = error,
        }
    }
    Err(failed)
}

/// Connects to a unix socket. One whose server accepts nobody makes this wait, too.
fn unix(path: &Path, limit: Duration) -> io::Result<UnixStream> {
    let (family, flags) = (AddressFamily::UNIX, SocketFlags::CLOEXEC);
    let socket = rustix::net::socket_with(family, SocketType::STREAM, flags, None)?;
    sockopt::set_socket_timeout(&socket, sockopt::Timeout::Send, Some(limit))?;
    match rustix::net::connect(&socket, &SocketAddrUnix::new(path)?) {
        Ok(()) => Ok(socket.into()),
        Err(rustix::io::Errno::AGAIN) => Err(ErrorKind::TimedOut.into()),
        Err(error) => Err(error.into()),
    }
}

/// A connection of which all is over at some time.
struct Timed<'a> {
    stream: &'a Stream,
    end: Instant,
}

impl Timed<'_> {
    fn limit(&self) -> io::Result<()> {
        let left = self.end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(ErrorKind::TimedOut.into());
        }
        self.stream.set_patience(left, Some(left))
    }
}

/// A wait that was too long, in the same words for all systems.
fn timed_out(error: io::Error) -> io::Error {
    if error.kind() == ErrorKind::WouldBlock { ErrorKind::TimedOut.into() } else { error }
}

impl Read for Timed<'_> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        self.limit()?;
        self.stream.read(out).map_err(timed_out)
    }
}

impl Write for Timed<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.limit()?;
        self.stream.write(bytes).map_err(timed_out)
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
