//! The userspace node under test.

use super::{Backend, Failure, Info, Mode, Outcome, Socket, Wish};
use ::bowline::rds::{Error, Interest, Node, Socket as RdsSocket};
use std::io::IoSlice;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

/// A node of this process.
#[derive(Debug)]
pub(crate) struct Bowline(Node);

#[derive(Debug)]
struct BowlineSocket(RdsSocket);

impl From<Error> for Failure {
    fn from(e: Error) -> Self {
        Self { errno: e.errno(), text: e.to_string() }
    }
}

impl Bowline {
    /// Starts a node at these addresses.
    pub(crate) fn start(addresses: &[IpAddr], paths: u8) -> Outcome<Self> {
        let mut builder = Node::builder().paths(paths);
        for a in addresses {
            builder = builder.address(*a);
        }
        Ok(Self(builder.build()?))
    }
}

impl Socket for BowlineSocket {
    fn local(&self) -> Outcome<SocketAddr> {
        self.0.local_addr().ok_or(Failure { errno: libc::ENOTCONN, text: "not bound".into() })
    }

    fn set_mode(&self, mode: Mode) -> Outcome<()> {
        let timeout = match mode {
            Mode::Timeout(t) => Some(t),
            _ => None,
        };
        self.0.set_nonblocking(mode == Mode::Nonblock);
        self.0.set_send_timeout(timeout);
        self.0.set_recv_timeout(timeout);
        Ok(())
    }

    fn send(&self, pieces: &[IoSlice<'_>], to: SocketAddr) -> Outcome<usize> {
        Ok(self.0.send_vectored_to(pieces, to)?)
    }

    fn send_many(&self, message: &[u8], count: usize, to: SocketAddr) -> Outcome<usize> {
        Ok(self.0.send_batch(&vec![(to, message); count])?)
    }

    fn recv(&self, buf: &mut [u8]) -> Outcome<(usize, SocketAddr)> {
        Ok(self.0.recv_from(buf)?)
    }

    fn recv_many(&self, _: &mut [u8]) -> Outcome<(u64, u64)> {
        let mut messages = Vec::new();
        self.0.recv_batch(&mut messages, 64)?;
        let bytes = messages.iter().map(|m| m.len() as u64).sum();
        Ok((messages.len() as u64, bytes))
    }

    fn wait(&self, write: bool, timeout: Duration) -> Outcome<()> {
        let interest = if write { Interest::WRITABLE } else { Interest::READABLE };
        self.0.wait(interest, Some(timeout))?;
        Ok(())
    }

    fn cancel(&self, to: SocketAddr) -> Outcome<()> {
        Ok(self.0.cancel_sent_to(to)?)
    }

    fn unsent(&self, wait: Duration) -> Outcome<usize> {
        let flushed = self.0.flush(wait)?;
        Ok(usize::from(!flushed))
    }
}

impl Backend for Bowline {
    fn name(&self) -> String {
        concat!("bowline ", env!("CARGO_PKG_VERSION")).into()
    }

    fn bind(&self, wish: Wish) -> Outcome<Box<dyn Socket>> {
        let socket = self.0.socket()?;
        if wish.sndbuf != 0 {
            socket.set_send_buffer(wish.sndbuf)?;
        }
        if wish.rcvbuf != 0 {
            socket.set_recv_buffer(wish.rcvbuf)?;
        }
        socket.bind(wish.bind)?;
        Ok(Box::new(BowlineSocket(socket)))
    }

    fn info(&self) -> Outcome<Info> {
        let counters =
            self.0.counters().into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
        Ok(Info { counters, ..Info::default() })
    }

    fn sysctl(&self, name: &str, value: Option<i64>) -> Outcome<i64> {
        if let Some(value) = value {
            self.0.set_sysctl(name, value)?;
        }
        Ok(self.0.sysctl(name)?)
    }

    fn cut(&self, peer: Option<IpAddr>) -> Outcome<usize> {
        Ok(self.0.drop_connections(peer))
    }

    fn shutdown(&self) {
        self.0.shutdown(Duration::from_secs(1));
    }
}
