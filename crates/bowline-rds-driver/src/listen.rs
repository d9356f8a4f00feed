//! Accepts connections.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bowline_base::clock;
use bowline_rds::AcceptError;
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::io::Errno;
use rustix::net::{SocketFlags, acceptfrom_with, bind, getsockname, listen, sockopt};

use crate::RDS_TCP_PORT;
use crate::dial::tcp_buffers;
use crate::error::Error;
use crate::link::Link;
use crate::shared::Shared;
use crate::sys;
use crate::todo::Scratch;

/// Connections the system keeps until they are accepted.
const BACKLOG: i32 = 128;
/// Connections accepted in one turn.
const ACCEPTS_MAX: usize = 64;

/// A listening socket.
#[derive(Debug)]
pub(crate) struct Listener {
    fd: OwnedFd,
    /// Given up and taken back when the process has no descriptors left, to be able to turn
    /// connections away instead of leaving them to hang.
    reserve: Mutex<Option<OwnedFd>>,
}

impl Listener {
    fn new(addr: SocketAddr) -> Result<Self, Error> {
        let fd = sys::tcp_socket(addr.ip()).map_err(Error::os("making a socket"))?;
        let _ = sockopt::set_socket_reuseaddr(&fd, true);
        if addr.is_ipv6() {
            let any = addr.ip().is_unspecified();
            sockopt::set_ipv6_v6only(&fd, !any).map_err(Error::os("setting IPV6_V6ONLY"))?;
        }
        let taken = |errno| match errno {
            Errno::ADDRINUSE => Error::PortTaken { addr },
            Errno::ADDRNOTAVAIL => Error::Core(bowline_rds::Error::AddrNotAvailable),
            errno => Error::os("binding the RDS port")(errno),
        };
        bind(&fd, &addr).map_err(taken)?;
        listen(&fd, BACKLOG).map_err(taken)?;
        let reserve = Mutex::new(sys::event_fd().ok());
        Ok(Self { fd, reserve })
    }

    /// Opens the listeners of a node: one for each address, or one for all. That of a link-local
    /// address with an interface hears this interface only.
    pub(crate) fn open(config: &bowline_rds::Config) -> Result<Vec<Self>, Error> {
        if !config.addrs.is_empty() {
            let place = |ip: &IpAddr| {
                let mut place = SocketAddr::new(*ip, RDS_TCP_PORT);
                let link = config.links.iter().find(|(of, _)| of == ip);
                if let (SocketAddr::V6(place), Some((_, link))) = (&mut place, link) {
                    place.set_scope_id(*link);
                }
                place
            };
            return config.addrs.iter().map(|ip| Self::new(place(ip))).collect();
        }
        let any = SocketAddr::new(Ipv6Addr::UNSPECIFIED.into(), RDS_TCP_PORT);
        Self::new(any)
            .or_else(|error| match error {
                Error::PortTaken { .. } => Err(error),
                _ => Self::new(SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), RDS_TCP_PORT)),
            })
            .map(|listener| vec![listener])
    }

    /// Asks for events, as long as connections wait.
    pub(crate) fn watch(&self, epoll: &OwnedFd, token: u64) -> Result<(), Errno> {
        epoll::add(epoll, &self.fd, EventData::new_u64(token), EventFlags::IN)
    }

    /// Accepts nothing any more.
    pub(crate) fn close(&self, epoll: &OwnedFd) {
        let _ = epoll::delete(epoll, &self.fd);
    }

    /// Turns one connection away although the process has no descriptors left.
    fn turn_away(&self) {
        let mut reserve = self.reserve.lock().unwrap_or_else(PoisonError::into_inner);
        drop(reserve.take());
        if let Ok(fd) = rustix::net::accept_with(&self.fd, SocketFlags::CLOEXEC) {
            refuse(&fd);
        }
        *reserve = sys::event_fd().ok();
    }
}

/// Makes the coming close a reset.
fn refuse(fd: impl AsFd) {
    let _ = sockopt::set_socket_linger(fd, Some(Duration::ZERO));
}

/// How long a refused connection is kept, ns, and how many are.
const HOLD_NS: u64 = 1_000_000_000;
const HELD_MAX: usize = 256;

impl Shared {
    /// Accepts what waits; one that fails does not keep the others waiting, [B-15].
    pub(crate) fn accept(&self, sc: &mut Scratch, listener: &Listener) {
        for _ in 0..ACCEPTS_MAX {
            self.stats.setups.inc();
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            match acceptfrom_with(&listener.fd, flags) {
                Ok((fd, from)) => {
                    let from = from.and_then(|addr| SocketAddr::try_from(addr).ok());
                    self.accepted(sc, fd, from);
                }
                Err(Errno::AGAIN) => return,
                Err(Errno::MFILE | Errno::NFILE) => {
                    listener.turn_away();
                    return;
                }
                // The connection is gone already, or a signal came: the next one.
                Err(_) => {}
            }
        }
    }

    fn accepted(&self, sc: &mut Scratch, fd: OwnedFd, from: Option<SocketAddr>) {
        let local = getsockname(&fd).ok().and_then(|addr| SocketAddr::try_from(addr).ok());
        let (Some(local), Some(remote)) = (local.map(canonical), from.map(canonical)) else {
            return refuse(&fd);
        };
        let mut st = self.lock();
        let now = st.at(clock::now());
        if st.closing {
            return refuse(&fd);
        }
        if self.any_address {
            // The system has this address, or it would not have taken the connection.
            st.core.add_local(local.ip());
        }
        let buffers = tcp_buffers(&st);
        let id = match st.core.handle_accepted(now, local, remote) {
            Ok(id) => id,
            Err(why) => {
                refuse(&fd);
                // A connector that is reset at once comes back at once.
                if why == AcceptError::Refused && st.held.len() < HELD_MAX {
                    st.held.push_back((now.as_nanos() + HOLD_NS, fd));
                }
                return self.collect(&mut st, sc, None);
            }
        };
        st.put_slot(id);
        drop(st);
        sys::tune(&fd, remote, self.congestion_control.as_deref(), buffers);
        self.adopt(sc, Arc::new(Link::new(id, fd, remote)));
        self.collect(&mut self.lock(), sc, None);
    }
}

/// An IPv4 address in IPv6 clothing becomes one.
fn canonical(addr: SocketAddr) -> SocketAddr {
    match addr {
        SocketAddr::V6(v6) if v6.scope_id() != 0 => addr,
        _ => SocketAddr::new(addr.ip().to_canonical(), addr.port()),
    }
}
