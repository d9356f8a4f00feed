//! Opens connections.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use bowline_base::clock;
use bowline_rds::{CloseHow, CloseReason, LinkId};
use rustix::io::Errno;
use rustix::net::{bind, connect, getsockname, sockopt};

use crate::link::{Link, reason};
use crate::shared::{Shared, State};
use crate::sys;
use crate::todo::Scratch;

/// Range of source ports to try: Linux's default range of ephemeral ports.
const PORT_FIRST: u16 = 32_768;
const PORT_LAST: u16 = 60_999;
/// Number of ports tried before the system chooses one.
const PORT_TRIES: u16 = 32;

impl Shared {
    /// Begins the connection that the core requested.
    pub(crate) fn dial(
        &self,
        sc: &mut Scratch,
        id: LinkId,
        local: IpAddr,
        remote: SocketAddr,
        port_mod8: u8,
    ) {
        self.stats.setups.inc();
        let (buffers, seed) = {
            let st = self.lock();
            (tcp_buffers(&st), clock::now().as_nanos())
        };
        let begun = (|| {
            let fd = sys::tcp_socket(local)?;
            sys::tune(&fd, remote, self.congestion_control.as_deref(), buffers);
            bind_near(&fd, local, remote, port_mod8, seed)?;
            match connect(&fd, &remote) {
                Ok(()) | Err(Errno::INPROGRESS) => Ok(fd),
                Err(errno) => Err(errno),
            }
        })();
        match begun {
            Ok(fd) => {
                let link = Arc::new(Link::new(id, fd, remote));
                self.adopt(sc, link);
            }
            Err(errno) => self.closed(sc, id, reason(errno)),
        }
    }

    /// Registers a new connection for events, unless the core has given it up meanwhile.
    pub(crate) fn adopt(&self, sc: &mut Scratch, link: Arc<Link>) {
        let mut st = self.lock();
        // The core may refuse to read an accepted connection from the start.
        let refused = !st.core.wants_read(link.id);
        let Some(slot) = st.slot(link.id) else {
            drop(st);
            return link.close(&self.epoll, CloseHow::Reset);
        };
        link.set_paused(refused && !slot.connecting);
        slot.link = Some(Arc::clone(&link));
        let token = token(link.id, slot.token);
        if core::mem::take(&mut slot.transmit_pending) {
            sc.todo.flush.push(link.id);
        }
        match slot.close_pending.take() {
            Some(CloseHow::Drain) => sc.todo.drain.push(link.id),
            Some(CloseHow::Cut) => sc.todo.cut.push(link.id),
            _ => {}
        }
        drop(st);
        // A condition that holds already is reported as an event as well.
        if let Err(errno) = link.watch(&self.epoll, token) {
            self.closed(sc, link.id, reason(errno));
        }
    }

    /// Handles the result of an attempt to connect.
    pub(crate) fn connected(&self, sc: &mut Scratch, link: &Arc<Link>) {
        let error = match sockopt::socket_error(&link.fd) {
            Ok(Ok(())) => None,
            Ok(Err(errno)) | Err(errno) => Some(errno),
        };
        if let Some(errno) = error {
            self.closed(sc, link.id, reason(errno));
            return;
        }
        let local = getsockname(&link.fd).ok().and_then(|addr| SocketAddr::try_from(addr).ok());
        let Some(local) = local else {
            self.closed(sc, link.id, CloseReason::Reset);
            return;
        };
        let mut st = self.lock();
        let now = st.at(clock::now());
        let Some(slot) = st.slot(link.id) else { return };
        if !core::mem::take(&mut slot.connecting) {
            return;
        }
        st.core.handle_connected(now, link.id, local);
        self.collect(&mut st, sc, None);
        drop(st);
        // The event that reported the connection also reported the bytes that came with it.
        self.read(sc, link);
    }
}

/// Returns the token of a link in events: the index in the table, and a number that distinguishes
/// successive links of one index.
pub(crate) fn token(id: LinkId, token: u32) -> u64 {
    (id.index() as u64) << 32 | u64::from(token)
}

/// Returns the sizes of TCP buffers in bytes that the sysctls request, 0 for the system's default.
pub(crate) fn tcp_buffers(st: &State) -> (u32, u32) {
    let get = |name| st.core.sysctl(name).and_then(|v| u32::try_from(v).ok()).unwrap_or(0);
    (get("net.rds.tcp.rds_tcp_sndbuf"), get("net.rds.tcp.rds_tcp_rcvbuf"))
}

/// Binds to `local` and, if possible, to a port whose remainder modulo 8 tells the path.
fn bind_near(
    fd: &std::os::fd::OwnedFd,
    local: IpAddr,
    remote: SocketAddr,
    port_mod8: u8,
    seed: u64,
) -> Result<(), Errno> {
    let at = |port| {
        let mut addr = SocketAddr::new(local, port);
        if let (SocketAddr::V6(addr), SocketAddr::V6(remote)) = (&mut addr, remote)
            && addr.ip().is_unicast_link_local()
        {
            addr.set_scope_id(remote.scope_id());
        }
        addr
    };
    let groups = (PORT_LAST - PORT_FIRST + 1) / 8;
    let start = (seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) % u64::from(groups);
    for i in 0..PORT_TRIES {
        let group = (start as u16 + i) % groups;
        let port = PORT_FIRST + group * 8 + u16::from(port_mod8 % 8);
        match bind(fd, &at(port)) {
            Err(Errno::ADDRINUSE) => {}
            done => return done,
        }
    }
    bind(fd, &at(0))
}
