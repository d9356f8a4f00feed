//! Sockets.

use core::fmt;
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::io::IoSlice;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use bowline_rds::{
    Interest, OutstandingMessages, Readiness, RecvOpts, SendControl, SendMsg, SocketId, Transport,
};
use bowline_rds_driver::{Blocking, Driver};

use super::error::HostError;
use super::host::{HostSocket, Waits};
use super::{Error, Message, ToAddr};

/// Value of a timeout in nanoseconds that stands for no limit.
const FOREVER: u64 = u64::MAX;

/// An RDS socket. Dropping it closes it. That cancels unacknowledged messages, as with the kernel:
/// call [`flush`](Self::flush) before, if that matters.
pub struct Socket {
    of: Of,
    nonblocking: AtomicBool,
    /// Timeout in nanoseconds, or [`FOREVER`].
    pub(super) send_timeout: AtomicU64,
    pub(super) recv_timeout: AtomicU64,
}

/// Whose socket it is.
enum Of {
    /// A node's of this process.
    Process(Driver, SocketId),
    /// The host's.
    Host(HostSocket),
}

impl Of {
    const fn kind(&self) -> &'static str {
        match self {
            Self::Process(..) => "process",
            Self::Host(_) => "host",
        }
    }
}

/// The addresses, and nothing of what is sent.
impl fmt::Debug for Socket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Socket")
            .field("local", &self.local_addr())
            .field("peer", &self.peer_addr())
            .field("node", &format_args!("{}", self.of.kind()))
            .finish()
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        self.close();
    }
}

fn to_nanos(limit: Option<Duration>) -> u64 {
    limit.map_or(FOREVER, |limit| u64::try_from(limit.as_nanos()).unwrap_or(FOREVER))
}

pub(super) fn from_nanos(nanos: u64) -> Option<Duration> {
    (nanos != FOREVER).then(|| Duration::from_nanos(nanos))
}

impl Socket {
    pub(super) fn new(driver: Driver, id: SocketId) -> Self {
        Self::with(Of::Process(driver, id))
    }

    pub(super) fn from_host(socket: HostSocket) -> Self {
        Self::with(Of::Host(socket))
    }

    const fn with(of: Of) -> Self {
        Self {
            of,
            nonblocking: AtomicBool::new(false),
            send_timeout: AtomicU64::new(FOREVER),
            recv_timeout: AtomicU64::new(FOREVER),
        }
    }

    fn blocking(&self, limit: &AtomicU64) -> Blocking {
        if self.nonblocking.load(Relaxed) {
            return Blocking::Never;
        }
        from_nanos(limit.load(Relaxed)).map_or(Blocking::Forever, Blocking::For)
    }

    fn waits(&self) -> Waits {
        if self.nonblocking.load(Relaxed) { Waits::No } else { Waits::Yes }
    }

    /// Binds the socket to one of the node's addresses; port 0 chooses a port.
    ///
    /// # Errors
    /// `EINVAL` when it is bound already, the address is not a unicast address, or the port is 1;
    /// `EADDRNOTAVAIL` when the address is not the node's; `EADDRINUSE` when the port is taken.
    pub fn bind(&self, addr: impl ToAddr) -> Result<(), Error> {
        let addr = addr.to_addr()?;
        match &self.of {
            Of::Process(driver, id) => Ok(driver.bind(*id, addr)?),
            Of::Host(socket) => socket.bind(addr),
        }
    }

    /// Chooses the transport, before [`bind`](Self::bind) and once. Without it, an address of one
    /// of the node's RDMA devices (`Builder::rdma`) is on RDMA, and every other one on TCP. What
    /// the socket sends goes that way; messages come to it over both.
    ///
    /// # Errors
    /// `EOPNOTSUPP` (95) when the socket has a transport; `ENOPROTOOPT` (92) for RDMA when the node
    /// has none; `EINVAL` for [`Transport::Loopback`], which is not chosen. A bind fails later with
    /// `ENOPROTOOPT` when the address is not on the transport.
    #[doc(alias = "SO_RDS_TRANSPORT")]
    pub fn set_transport(&self, transport: Transport) -> Result<(), Error> {
        let number = transport as i32;
        match &self.of {
            Of::Process(driver, id) => {
                Ok(driver.with_core(|core, _| core.set_transport(*id, number))?)
            }
            Of::Host(socket) => socket.set_transport(number),
        }
    }

    /// Returns the transport that was chosen, or that the socket has since it is bound.
    ///
    /// # Errors
    /// `EBADF` after [`close`](Self::close).
    pub fn transport(&self) -> Result<Option<Transport>, Error> {
        match &self.of {
            Of::Process(driver, id) => Ok(driver.with_core(|core, _| core.transport(*id))?),
            Of::Host(socket) => socket.transport(),
        }
    }

    /// Sets the destination of [`send`](Self::send). Nothing is sent, and messages of others are
    /// still received.
    ///
    /// # Errors
    /// `EDESTADDRREQ` (89), `EINVAL` or `EPROTOTYPE` (91) when the address is not a unicast
    /// address.
    pub fn connect(&self, addr: impl ToAddr) -> Result<(), Error> {
        let addr = addr.to_addr()?;
        match &self.of {
            Of::Process(driver, id) => Ok(driver.with_core(|core, _| core.connect(*id, addr))?),
            Of::Host(socket) => socket.connect(addr),
        }
    }

    /// Returns the address the socket is bound to; `None` when it is not.
    pub fn local_addr(&self) -> Option<SocketAddr> {
        match &self.of {
            Of::Process(driver, id) => {
                driver.with_core(|core, _| core.local_addr(*id)).ok().flatten()
            }
            Of::Host(socket) => socket.local_addr(),
        }
    }

    /// Returns the destination set by [`connect`](Self::connect).
    pub fn peer_addr(&self) -> Option<SocketAddr> {
        match &self.of {
            Of::Process(driver, id) => driver.with_core(|core, _| core.peer_addr(*id)).ok(),
            Of::Host(socket) => socket.peer_addr(),
        }
    }

    /// Sends a message to the destination set by [`connect`](Self::connect); returns its length.
    ///
    /// # Errors
    /// As [`send_to`](Self::send_to).
    pub fn send(&self, payload: &[u8]) -> Result<usize, Error> {
        self.send_message(None, &[IoSlice::new(payload)], &[])
    }

    /// Sends a message; returns its length. When this returns, the message is copied. It reaches
    /// the destination's *node*, whatever happens to connections, unless one of the nodes ends or
    /// this socket is closed before. That node gives it to the socket that is bound to the port. If
    /// no socket is, **the message is dropped and the sender does not learn of it**, as the
    /// protocol demands: see [what a sender does not
    /// learn](crate::rds#what-a-sender-does-not-learn).
    ///
    /// # Errors
    /// `EINVAL` for an address that cannot be a destination; `ENOTCONN` when the socket is not
    /// bound; `EMSGSIZE` when the message is longer than the send buffer or the longest message;
    /// `EHOSTUNREACH` (113) when the node's [list of peers](crate::rds::Builder::peers) does not
    /// have the destination; `ENOMEM` (12) when the node has as many peers as its limits allow.
    /// A socket that does not wait: `EAGAIN` when the send buffer is full, or the message is longer
    /// than 1 MiB and the peer is not known yet; `ENOBUFS` when the destination is congested. With
    /// a time limit: `ETIMEDOUT`.
    pub fn send_to(&self, payload: &[u8], to: impl ToAddr) -> Result<usize, Error> {
        self.send_message(Some(to.to_addr()?), &[IoSlice::new(payload)], &[])
    }

    /// Sends a message whose payload is not copied: it stays in this buffer, which the socket
    /// shares until the message is released. With a cookie, this is reported by
    /// [`Control::ZcopyCompletion`](super::Control::ZcopyCompletion), if
    /// [`set_zerocopy`](Self::set_zerocopy) is on; `Arc::try_unwrap` gives the buffer back then.
    /// After that nothing is sent from it, not even after a connection was lost. Pays for messages
    /// of some hundred KiB.
    ///
    /// # Errors
    /// As [`send_to`](Self::send_to); `EINVAL` for a cookie with an empty payload, or while
    /// zero copy is off.
    #[doc(alias = "MSG_ZEROCOPY")]
    pub fn send_shared(
        &self,
        payload: &Arc<Vec<u8>>,
        to: Option<SocketAddr>,
        cookie: Option<u32>,
    ) -> Result<usize, Error> {
        let cookie = cookie.map(SendControl::ZcopyCookie);
        let control = cookie.as_slice();
        if let Of::Host(socket) = &self.of {
            return socket.send(to, &[IoSlice::new(payload)], control, self.waits());
        }
        self.send_own(SendMsg {
            name: to,
            lent: Some(payload),
            control,
            zerocopy: !control.is_empty(),
            ..SendMsg::default()
        })
    }

    /// Sends one message gathered from several slices; returns its length.
    ///
    /// # Errors
    /// As [`send_to`](Self::send_to).
    pub fn send_vectored_to(
        &self,
        payload: &[IoSlice<'_>],
        to: impl ToAddr,
    ) -> Result<usize, Error> {
        self.send_message(Some(to.to_addr()?), payload, &[])
    }

    /// Sends a message with control messages; `None` for `to` stands for the connected destination.
    ///
    /// # Errors
    /// As [`send_to`](Self::send_to); `EINVAL` or `EOPNOTSUPP` for control messages that cannot be
    /// used over TCP.
    pub fn send_message(
        &self,
        to: Option<SocketAddr>,
        payload: &[IoSlice<'_>],
        control: &[SendControl],
    ) -> Result<usize, Error> {
        if let Of::Host(socket) = &self.of {
            return socket.send(to, payload, control, self.waits());
        }
        let zerocopy = control.iter().any(|c| matches!(c, SendControl::ZcopyCookie(_)));
        self.send_own(SendMsg { name: to, payload, control, zerocopy, ..SendMsg::default() })
    }

    #[cfg(feature = "rdma")]
    pub(super) fn send_ops(
        &self,
        to: Option<SocketAddr>,
        payload: &[IoSlice<'_>],
        rdma: &[bowline_rds::RdmaOp],
    ) -> Result<usize, Error> {
        self.send_own(SendMsg { name: to, payload, rdma, ..SendMsg::default() })
    }

    /// Sends a message of a socket of this process.
    fn send_own(&self, msg: SendMsg<'_>) -> Result<usize, Error> {
        let (driver, id) = self.in_process()?;
        let blocking = self.blocking(&self.send_timeout);
        let msg = SendMsg { blocking: blocking != Blocking::Never, ..msg };
        Ok(driver.send(id, &msg, blocking)?)
    }

    #[cfg(feature = "tokio")]
    pub(super) const fn host_socket(&self) -> Option<&HostSocket> {
        match &self.of {
            Of::Process(..) => None,
            Of::Host(socket) => Some(socket),
        }
    }

    /// Returns what a socket of this process has; the host's node has none of it.
    pub(super) fn in_process(&self) -> Result<(&Driver, SocketId), Error> {
        match &self.of {
            Of::Process(driver, id) => Ok((driver, *id)),
            Of::Host(_) => Err(HostError::NotForIts.into()),
        }
    }

    /// Sends messages, waiting for the first only; returns how many were accepted.
    ///
    /// # Errors
    /// As [`send_to`](Self::send_to), for the first message. An error of a later message ends the
    /// batch; the program gets it when it sends that message again.
    pub fn send_batch(&self, messages: &[(SocketAddr, &[u8])]) -> Result<usize, Error> {
        match &self.of {
            Of::Process(driver, id) => {
                let messages = messages.iter().map(|(to, payload)| (Some(*to), *payload));
                Ok(driver.send_batch(*id, messages, self.blocking(&self.send_timeout))?)
            }
            Of::Host(socket) => socket.send_batch(messages, self.waits()),
        }
    }

    /// Receives a message into `buf`; returns the number of bytes copied and the sender. The rest
    /// of a message longer than `buf` is lost; [`recv_message`](Self::recv_message) loses nothing.
    ///
    /// # Errors
    /// A socket that does not wait: `EAGAIN`. With a time limit: `ETIMEDOUT`.
    pub fn recv_from(&self, buf: &mut [u8]) -> Result<(usize, SocketAddr), Error> {
        match &self.of {
            Of::Process(driver, id) => {
                Ok(driver.recv_into(*id, buf, self.blocking(&self.recv_timeout))?)
            }
            Of::Host(socket) => socket.recv_from(buf, self.waits()),
        }
    }

    /// Receives a message into `buf` like [`recv_from`](Self::recv_from), without its sender.
    ///
    /// # Errors
    /// As [`recv_from`](Self::recv_from).
    pub fn recv(&self, buf: &mut [u8]) -> Result<usize, Error> {
        Ok(self.recv_from(buf)?.0)
    }

    /// Receives a message, or a notification, without copying it.
    ///
    /// # Errors
    /// As [`recv_from`](Self::recv_from).
    pub fn recv_message(&self) -> Result<Message, Error> {
        match &self.of {
            Of::Process(driver, id) => {
                self.receive(driver, *id, RecvOpts { want_control: true, ..RecvOpts::default() })
            }
            Of::Host(socket) => socket.recv_message(self.waits()),
        }
    }

    /// Returns the next message and leaves it in the queue.
    ///
    /// # Errors
    /// As [`recv_from`](Self::recv_from).
    pub fn peek_message(&self) -> Result<Message, Error> {
        match &self.of {
            Of::Process(driver, id) => {
                self.receive(driver, *id, RecvOpts { peek: true, ..RecvOpts::default() })
            }
            Of::Host(socket) => socket.peek_message(self.waits()),
        }
    }

    fn receive(&self, driver: &Driver, id: SocketId, opts: RecvOpts) -> Result<Message, Error> {
        let received = driver.recv(id, opts, self.blocking(&self.recv_timeout))?;
        Ok(Message::new(received, driver))
    }

    /// Appends up to `max` messages to `messages`, waiting for the first only; returns how many.
    /// Cheaper per message than receiving one by one.
    ///
    /// # Errors
    /// As [`recv_from`](Self::recv_from), for the first message.
    pub fn recv_batch(&self, messages: &mut Vec<Message>, max: usize) -> Result<usize, Error> {
        let (driver, id) = match &self.of {
            Of::Process(driver, id) => (driver, *id),
            Of::Host(socket) => return socket.recv_batch(messages, max, self.waits()),
        };
        messages.reserve(max);
        let opts = RecvOpts { want_control: true, ..RecvOpts::default() };
        let blocking = self.blocking(&self.recv_timeout);
        let push = |received| messages.push(Message::new(received, driver));
        Ok(driver.recv_batch(id, opts, max, blocking, push)?)
    }

    /// Chooses whether calls wait, or fail with `EAGAIN` (`ENOBUFS` for congestion) instead.
    pub fn set_nonblocking(&self, on: bool) {
        self.nonblocking.store(on, Relaxed);
    }

    /// Limits how long sends wait, whatever the reason; `None`, the default, stands for no limit.
    pub fn set_send_timeout(&self, limit: Option<Duration>) {
        self.send_timeout.store(to_nanos(limit), Relaxed);
        if let Of::Host(socket) = &self.of {
            socket.set_send_timeout(limit);
        }
    }

    /// Limits how long receives wait; `None`, the default, stands for no limit.
    pub fn set_recv_timeout(&self, limit: Option<Duration>) {
        self.recv_timeout.store(to_nanos(limit), Relaxed);
        if let Of::Host(socket) = &self.of {
            socket.set_recv_timeout(limit);
        }
    }

    /// Sets the effective send buffer in bytes (not doubled as by the kernel), at least 2304. A
    /// message is accepted if it is no longer than that, and while less payload than that is
    /// unacknowledged; at most [`Limits::send_messages_per_socket`] messages may be.
    ///
    /// [`Limits::send_messages_per_socket`]: crate::rds::Limits::send_messages_per_socket
    ///
    /// # Errors
    /// `EBADF` after [`close`](Self::close). `ENOBUFS` of a socket of the host's node when the
    /// quota of its user is less; the buffer stays as it is then. The system's `net.core.wmem_max`
    /// limits unmodified programs only.
    pub fn set_send_buffer(&self, bytes: usize) -> Result<(), Error> {
        match &self.of {
            Of::Process(driver, id) => {
                Ok(driver.with_core(|core, _| core.set_send_buffer(*id, bytes))?)
            }
            Of::Host(socket) => socket.set_send_buffer(bytes),
        }
    }

    /// Sets the effective receive buffer in bytes, at least 1152. When more payload than that
    /// waits, or more messages than [`Limits::recv_messages_per_socket`] says, the port is
    /// congested and its senders wait, until less than half of it waits.
    ///
    /// [`Limits::recv_messages_per_socket`]: crate::rds::Limits::recv_messages_per_socket
    ///
    /// # Errors
    /// As for [sending](Self::set_send_buffer).
    pub fn set_recv_buffer(&self, bytes: usize) -> Result<(), Error> {
        match &self.of {
            Of::Process(driver, id) => {
                Ok(driver.with_core(|core, _| core.set_recv_buffer(*id, bytes))?)
            }
            Of::Host(socket) => socket.set_recv_buffer(bytes),
        }
    }

    /// Returns the effective send buffer in bytes.
    ///
    /// # Errors
    /// `EBADF` after [`close`](Self::close).
    pub fn send_buffer(&self) -> Result<usize, Error> {
        match &self.of {
            Of::Process(driver, id) => Ok(driver.with_core(|core, _| core.send_buffer(*id))?),
            Of::Host(socket) => socket.send_buffer(),
        }
    }

    /// Returns the effective receive buffer in bytes.
    ///
    /// # Errors
    /// `EBADF` after [`close`](Self::close).
    pub fn recv_buffer(&self) -> Result<usize, Error> {
        match &self.of {
            Of::Process(driver, id) => Ok(driver.with_core(|core, _| core.recv_buffer(*id))?),
            Of::Host(socket) => socket.recv_buffer(),
        }
    }

    /// Cancels all unacknowledged messages of this socket to `to`. Cancelled messages may arrive or
    /// not.
    ///
    /// # Errors
    /// `ENOTCONN` when the socket is not bound.
    #[doc(alias = "RDS_CANCEL_SENT_TO")]
    pub fn cancel_sent_to(&self, to: impl ToAddr) -> Result<(), Error> {
        let to = to.to_addr()?;
        match &self.of {
            Of::Process(driver, id) => {
                Ok(driver.with_core(|core, now| core.cancel_sent_to(now, *id, to))?)
            }
            Of::Host(socket) => socket.cancel_sent_to(to),
        }
    }

    /// Cancels all unacknowledged messages of this socket, to all destinations.
    ///
    /// # Errors
    /// `ENOTCONN` when the socket is not bound.
    pub fn cancel_all(&self) -> Result<(), Error> {
        match &self.of {
            Of::Process(driver, id) => Ok(driver.with_core(|core, now| core.cancel_all(now, *id))?),
            Of::Host(socket) => socket.cancel_all(),
        }
    }

    /// Returns the number of messages of this socket that the node keeps, one entry for each
    /// destination: queued and unacknowledged messages, and cancelled ones that are being written.
    /// All destinations share the send buffer; a program that serves many can see here which of
    /// them use it. Searches all messages that are queued from the socket's address; of the host's
    /// node, which keeps no cancelled ones here, those of this user.
    ///
    /// # Errors
    /// `ENOTCONN` when the socket is not bound.
    pub fn outstanding(&self) -> Result<Vec<OutstandingMessages>, Error> {
        match &self.of {
            Of::Process(driver, id) => Ok(driver.with_core(|core, _| core.outstanding(*id))?),
            Of::Host(socket) => socket.outstanding(),
        }
    }

    /// Asks for notifications, among the received messages, of destinations that are no longer
    /// congested.
    ///
    /// # Errors
    /// `EBADF` after [`close`](Self::close).
    #[doc(alias = "RDS_CONG_MONITOR")]
    pub fn set_cong_monitor(&self, on: bool) -> Result<(), Error> {
        match &self.of {
            Of::Process(driver, id) => {
                Ok(driver.with_core(|core, _| core.set_cong_monitor(*id, on))?)
            }
            Of::Host(socket) => socket.set_cong_monitor(on),
        }
    }

    /// Allows messages with a cookie that tells when they are released: see
    /// [`send_shared`](Self::send_shared).
    ///
    /// # Errors
    /// `EBADF` after [`close`](Self::close).
    #[doc(alias = "SO_ZEROCOPY")]
    pub fn set_zerocopy(&self, on: bool) -> Result<(), Error> {
        match &self.of {
            Of::Process(driver, id) => Ok(driver.with_core(|core, _| core.set_zerocopy(*id, on))?),
            Of::Host(socket) => socket.set_zerocopy(on),
        }
    }

    /// Asks for the time of arrival with every message.
    ///
    /// # Errors
    /// `EBADF` after [`close`](Self::close).
    #[doc(alias = "SO_TIMESTAMP")]
    pub fn set_timestamp(&self, on: bool) -> Result<(), Error> {
        match &self.of {
            Of::Process(driver, id) => Ok(driver.with_core(|core, _| core.set_timestamp(*id, on))?),
            Of::Host(socket) => socket.set_timestamp(on),
        }
    }

    /// Returns which operations on the socket can succeed now.
    ///
    /// # Errors
    /// `EBADF` after [`close`](Self::close).
    pub fn poll(&self) -> Result<Readiness, Error> {
        match &self.of {
            Of::Process(driver, id) => Ok(driver.with_core(|core, _| core.readiness(*id))?),
            Of::Host(socket) => socket.poll(),
        }
    }

    /// Waits until the socket is ready for one of `interest`, at most `limit`.
    ///
    /// # Errors
    /// `ETIMEDOUT` after `limit`.
    pub fn wait(&self, interest: Interest, limit: Option<Duration>) -> Result<(), Error> {
        match &self.of {
            Of::Process(driver, id) => {
                let blocking = limit.map_or(Blocking::Forever, Blocking::For);
                Ok(driver.wait(*id, interest, blocking)?)
            }
            Of::Host(socket) => socket.wait(interest, limit),
        }
    }

    /// Waits until all messages of this socket are acknowledged, at most `limit`. An acknowledged
    /// message has reached the other node, which may have had no socket at that port: see [what a
    /// sender does not learn](crate::rds#what-a-sender-does-not-learn).
    ///
    /// # Errors
    /// `ETIMEDOUT` after `limit`; `ECONNREFUSED` (111, [`ErrorKind::PeerEnded`]) when all that is
    /// left waits for peers whose nodes have ended in good order, and nobody has taken their place
    /// for a second. The messages stay, and go to the node that does.
    ///
    /// [`ErrorKind::PeerEnded`]: crate::rds::ErrorKind::PeerEnded
    pub fn flush(&self, limit: Option<Duration>) -> Result<(), Error> {
        match &self.of {
            Of::Process(driver, id) => {
                let blocking = limit.map_or(Blocking::Forever, Blocking::For);
                Ok(driver.flush(*id, blocking)?)
            }
            Of::Host(socket) => socket.flush(limit),
        }
    }

    /// Returns a descriptor for `poll` or `epoll`: readable while there may be something to
    /// receive, and after a refused send when it may succeed now. Before waiting for it again, try
    /// sends that were refused, and receive until `EAGAIN`. Use it only for waiting.
    ///
    /// That of a socket of the host's node shows what a kernel's shows: it is readable while there
    /// is something to receive, and *writable* while the send buffer has room.
    ///
    /// # Errors
    /// `EMFILE` (24) when the process has no descriptors left; `EBADF` after
    /// [`close`](Self::close).
    #[doc(alias = "as_fd")]
    pub fn event_fd(&self) -> Result<Arc<OwnedFd>, Error> {
        match &self.of {
            Of::Process(driver, id) => Ok(driver.event_fd(*id)?),
            Of::Host(socket) => socket.descriptor(),
        }
    }

    /// Closes the socket now. Other threads' calls on it end with `EBADF`.
    pub fn close(&self) {
        match &self.of {
            Of::Process(driver, id) => driver.close(*id),
            Of::Host(socket) => socket.close(),
        }
    }

    /// Returns the core's id of this socket, for the command `bowline`.
    ///
    /// # Panics
    /// On a socket of the host's node, whose core is in another process.
    #[doc(hidden)]
    pub fn id(&self) -> SocketId {
        match &self.of {
            Of::Process(_, id) => *id,
            Of::Host(_) => panic!("a socket of the host's node has no id in this process"),
        }
    }
}
