//! Accepts connections.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bowline_base::clock;
use bowline_rds::AcceptError;
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::io::Errno;
use rustix::net::{SocketFlags, SocketType, acceptfrom_with, bind, getsockname, listen, sockopt};

use crate::RDS_TCP_PORT;
use crate::dial::tcp_buffers;
use crate::error::Error;
use crate::link::Link;
use crate::shared::{Shared, State};
use crate::sys;
use crate::todo::Scratch;

/// Number of connections that the system keeps until they are accepted.
const BACKLOG: i32 = 128;
/// Number of connections accepted in one turn.
const ACCEPTS_MAX: usize = 64;

/// A listening socket.
#[derive(Debug)]
pub(crate) struct Listener {
    fd: OwnedFd,
    /// A descriptor that is closed and reopened when the process has no descriptors left, so that
    /// connections can be refused instead of being left to hang.
    reserve: Mutex<Option<OwnedFd>>,
    /// Names it in events.
    token: u64,
}

impl Listener {
    /// Listens on an address, with the socket that another process has handed over for it if there
    /// is one: connections that wait there are not lost.
    fn new(addr: SocketAddr, former: &mut Vec<OwnedFd>) -> Result<Self, Error> {
        let is_here = |fd: &OwnedFd| {
            let at = getsockname(fd).ok().and_then(|at| SocketAddr::try_from(at).ok());
            // A socket of another type may have the same name.
            let listens = sockopt::socket_type(fd) == Ok(SocketType::STREAM)
                && sockopt::socket_acceptconn(fd) == Ok(true);
            listens && at.is_some_and(|at| (at.ip(), at.port()) == (addr.ip(), addr.port()))
        };
        if let Some(at) = former.iter().position(is_here) {
            let reserve = Mutex::new(sys::event_fd().ok());
            return Ok(Self { fd: former.swap_remove(at), reserve, token: 0 });
        }
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
        Ok(Self { fd, reserve, token: 0 })
    }

    /// Opens the listeners of a node: one for each address, or one for all. The listener of a
    /// link-local address with an interface accepts connections of this interface only. Those of
    /// `former` that are for other addresses are closed.
    pub(crate) fn open(
        config: &bowline_rds::Config,
        mut former: Vec<OwnedFd>,
    ) -> Result<Vec<Self>, Error> {
        if !config.addrs.is_empty() {
            let place = |ip: &IpAddr| {
                let mut place = SocketAddr::new(*ip, RDS_TCP_PORT);
                let link = config.links.iter().find(|(of, _)| of == ip);
                if let (SocketAddr::V6(place), Some((_, link))) = (&mut place, link) {
                    place.set_scope_id(*link);
                }
                place
            };
            return config.addrs.iter().map(|ip| Self::new(place(ip), &mut former)).collect();
        }
        let any = SocketAddr::new(Ipv6Addr::UNSPECIFIED.into(), RDS_TCP_PORT);
        let any_v4 = SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), RDS_TCP_PORT);
        Self::new(any, &mut former)
            .or_else(|error| match error {
                Error::PortTaken { .. } => Err(error),
                _ => Self::new(any_v4, &mut former),
            })
            .map(|listener| vec![listener])
    }

    /// Registers for events, which come as long as connections wait.
    pub(crate) fn watch(&mut self, epoll: &OwnedFd, token: u64) -> Result<(), Errno> {
        self.token = token;
        epoll::add(epoll, &self.fd, EventData::new_u64(token), EventFlags::IN)
    }

    /// Has events come no more, or again. One that is closed has none.
    fn set_watched(&self, epoll: &OwnedFd, is_watched: bool) {
        let flags = if is_watched { EventFlags::IN } else { EventFlags::empty() };
        let _ = epoll::modify(epoll, &self.fd, EventData::new_u64(self.token), flags);
    }

    /// Returns another descriptor of the socket.
    pub(crate) fn descriptor(&self) -> std::io::Result<OwnedFd> {
        self.fd.try_clone()
    }

    /// Stops listening, once the socket is closed.
    pub(crate) fn close(&self, epoll: &OwnedFd) {
        let _ = epoll::delete(epoll, &self.fd);
    }

    /// Refuses one connection although the process has no descriptors left; `false`: another thread
    /// has taken the descriptor in reserve, and the connection waits.
    fn turn_away(&self) -> bool {
        let mut reserve = self.reserve.lock().unwrap_or_else(PoisonError::into_inner);
        drop(reserve.take());
        let accepted = rustix::net::accept_with(&self.fd, SocketFlags::CLOEXEC);
        let is_out = matches!(accepted, Err(Errno::MFILE | Errno::NFILE));
        if let Ok(fd) = accepted {
            refuse(&fd);
        }
        *reserve = sys::event_fd().ok();
        !is_out
    }
}

/// Makes the coming close of a connection a reset.
fn refuse(fd: impl AsFd) {
    let _ = sockopt::set_socket_linger(fd, Some(Duration::ZERO));
}

/// How long a refused connection is kept, in nanoseconds, and how many are kept.
const REFUSED_KEEP_NS: u64 = 1_000_000_000;
const REFUSED_MAX: usize = 256;

/// How long a listener rests, in nanoseconds, at which connections wait that can be neither
/// accepted nor refused: their events would come all the time.
const REST_NS: u64 = 20_000_000;

impl Shared {
    /// Has listeners that have rested for long enough watched again.
    pub(crate) fn wake_listeners(&self, st: &mut State, ns: u64) {
        for (_, listener) in st.resting.extract_if(.., |(until, _)| *until <= ns) {
            listener.set_watched(&self.epoll, true);
        }
    }

    /// Accepts waiting connections; one that fails does not stop the others, [B-15].
    pub(crate) fn accept(&self, sc: &mut Scratch, listener: &Arc<Listener>) {
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
                    if !listener.turn_away() {
                        let mut st = self.lock();
                        listener.set_watched(&self.epoll, false);
                        let until = st.at(clock::now()).as_nanos() + REST_NS;
                        st.resting.push((until, Arc::clone(listener)));
                        self.collect(&mut st, sc, None);
                    }
                    return;
                }
                // The connection is gone already, or a signal came: accept the next one.
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
            // The machine has this address, since it accepted the connection.
            st.core.add_local(local.ip());
        }
        let buffers = tcp_buffers(&st);
        let id = match st.core.handle_accepted(now, local, remote) {
            Ok(id) => id,
            Err(why) => {
                refuse(&fd);
                // A peer that is reset at once would come back at once.
                if why == AcceptError::Refused && st.refused.len() < REFUSED_MAX {
                    st.refused.push_back((now.as_nanos() + REFUSED_KEEP_NS, fd));
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

/// Converts an IPv4-mapped IPv6 address to IPv4.
fn canonical(addr: SocketAddr) -> SocketAddr {
    match addr {
        SocketAddr::V6(v6) if v6.scope_id() != 0 => addr,
        _ => SocketAddr::new(addr.ip().to_canonical(), addr.port()),
    }
}
