//! The userspace node under test.

use super::{Backend, Failure, Info, Mode, Outcome, Socket, Wish};
use ::bowline::rds::{Error, Interest, Node, Paths, Socket as RdsSocket};
use ::bowline::verbs::{RdmaCoreDevice, SoftConfig, SoftDevice};
use std::io::IoSlice;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

/// A node of this process.
#[derive(Debug)]
pub(crate) struct Bowline(Node);

/// A device over which the node speaks RDS.
#[derive(Debug)]
pub(crate) enum Rdma {
    /// RoCE of this process, at the addresses of the node.
    Soft,
    /// A device of rdma-core, at the addresses it has.
    Core(String),
}

#[derive(Debug)]
struct BowlineSocket {
    node: Node,
    socket: RdsSocket,
}

impl From<Error> for Failure {
    fn from(e: Error) -> Self {
        Self { errno: e.errno().0, text: e.to_string() }
    }
}

impl Bowline {
    /// Starts a node at these addresses.
    pub(crate) fn start(addresses: &[IpAddr], paths: u8, rdma: Option<&Rdma>) -> Outcome<Self> {
        let mut builder = Node::builder().paths(Paths::try_from(paths)?);
        match rdma {
            None => {}
            Some(Rdma::Soft) => {
                let config = SoftConfig { addrs: addresses.to_vec(), ..SoftConfig::default() };
                let failed = |e: ::bowline::verbs::Error| Failure {
                    errno: e.errno().0,
                    text: e.to_string(),
                };
                builder = builder.rdma(Arc::new(SoftDevice::open(config).map_err(failed)?));
            }
            Some(Rdma::Core(name)) => {
                let device = RdmaCoreDevice::open(name)
                    .map_err(|e| Failure { errno: libc::ENODEV, text: e.to_string() })?;
                builder = builder.rdma(Arc::new(device));
            }
        }
        for a in addresses {
            builder = builder.address(*a);
        }
        Ok(Self(builder.build()?))
    }
}

impl Socket for BowlineSocket {
    fn local(&self) -> Outcome<SocketAddr> {
        self.socket.local_addr().ok_or(Failure { errno: libc::ENOTCONN, text: "not bound".into() })
    }

    fn set_mode(&self, mode: Mode) -> Outcome<()> {
        let timeout = match mode {
            Mode::Timeout(t) => Some(t),
            _ => None,
        };
        self.socket.set_nonblocking(mode == Mode::Nonblock);
        self.socket.set_send_timeout(timeout);
        self.socket.set_recv_timeout(timeout);
        Ok(())
    }

    fn send(&self, pieces: &[IoSlice<'_>], to: SocketAddr) -> Outcome<usize> {
        Ok(self.socket.send_vectored_to(pieces, to)?)
    }

    fn send_many(&self, message: &[u8], count: usize, to: SocketAddr) -> Outcome<usize> {
        Ok(self.socket.send_batch(&vec![(to, message); count])?)
    }

    fn recv(&self, buf: &mut [u8]) -> Outcome<(usize, SocketAddr)> {
        Ok(self.socket.recv_from(buf)?)
    }

    fn recv_many(&self, _: &mut [u8]) -> Outcome<(u64, u64)> {
        let mut messages = Vec::new();
        self.socket.recv_batch(&mut messages, 64)?;
        let bytes = messages.iter().map(|m| m.len() as u64).sum();
        Ok((messages.len() as u64, bytes))
    }

    fn wait(&self, write: bool, timeout: Duration) -> Outcome<()> {
        let interest = if write { Interest::WRITE } else { Interest::READ };
        match self.socket.wait(interest, Some(timeout)).map_err(Failure::from) {
            Err(e) if !e.passing() => Err(e),
            _ => Ok(()),
        }
    }

    fn cancel(&self, to: SocketAddr) -> Outcome<()> {
        Ok(self.socket.cancel_sent_to(to)?)
    }

    fn unsent(&self, wait: Duration) -> Outcome<usize> {
        match self.socket.flush(Some(wait)).map_err(Failure::from) {
            Ok(()) => Ok(0),
            Err(e) if e.passing() => {
                let local = self.local()?;
                let info = self.node.info();
                let ours = info.send.iter().chain(&info.retrans).filter(|m| m.local == local);
                Ok(ours.count())
            }
            Err(e) => Err(e),
        }
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
        Ok(Box::new(BowlineSocket { node: self.0.clone(), socket }))
    }

    fn info(&self) -> Outcome<Info> {
        let info = self.0.info();
        let stats = self.0.driver_stats();
        let driver = [
            ("syscalls", stats.syscalls()),
            ("reads", stats.reads),
            ("writes", stats.writes),
            ("hand_overs", stats.hand_overs),
            ("bytes_read", stats.bytes_read),
            ("bytes_written", stats.bytes_written),
            ("bytes_copied_in", stats.bytes_copied_in),
            ("bytes_copied_out", stats.bytes_copied_out),
        ];
        let mut detail: Vec<String> = info.connections.iter().map(|c| format!("{c:?}")).collect();
        detail.extend(info.paths.iter().map(|p| format!("{p:?}")));
        detail.extend(info.links.iter().map(|l| format!("{l:?}")));
        detail.extend(self.0.events().iter().map(|e| format!("{e:?}")));
        let named = |(name, value): (&str, u64)| (name.to_owned(), value);
        Ok(Info {
            counters: self.0.counters().into_iter().map(named).collect(),
            tcp: info.links.iter().map(|l| (l.local, l.remote)).collect(),
            links: info
                .links
                .iter()
                .filter_map(|l| Some((l.path?, l.received_messages, l.received_bytes)))
                .collect(),
            detail,
            queued: info.send.len() + info.retrans.len(),
            driver: driver.map(named).into(),
        })
    }

    fn sysctl(&self, name: &str, value: Option<i64>) -> Outcome<i64> {
        let name = format!("net.rds.{name}");
        if let Some(value) = value {
            self.0.set_sysctl(&name, value)?;
        }
        Ok(self.0.sysctl(&name)?)
    }

    fn cut(&self, peer: Option<IpAddr>) -> Outcome<usize> {
        Ok(self.0.drop_connections(peer))
    }

    fn shutdown(&self) {
        self.0.shutdown(Duration::from_secs(1));
    }
}
