//! The calls of a socket and a node for tasks of a tokio runtime.
//!
//! A future does nothing before it is polled. A socket that is used by a task need not be
//! non-blocking, and its time limits hold for tasks as well.
//!
//! Tasks wait for a socket of the host's node at its descriptor, so their runtime has its IO driver
//! enabled (`enable_io` or `enable_all`).

use core::future::{Future, poll_fn};
use std::io::{self, IoSlice};
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use bowline_rds::{Interest, RecvOpts, SendControl, SendMsg};
use bowline_rds_driver::{Blocking, Error as DriverError};
use tokio::io::Interest as Ready;
use tokio::io::unix::AsyncFd;

use super::error::HostError;
use super::host::{HostSocket, Waits};
use super::socket::from_nanos;
use super::{Error, Message, Node, Socket, ToAddr};

/// How often a task looks whether everything is acknowledged.
const PACE: Duration = Duration::from_millis(1);

impl Socket {
    /// Sends a message to the destination set by [`connect`](Self::connect), from a task; returns
    /// its length.
    ///
    /// Cancel safe, as [`send_to_async`](Self::send_to_async).
    ///
    /// # Errors
    /// As [`send_to_async`](Self::send_to_async).
    pub async fn send_async(&self, payload: &[u8]) -> Result<usize, Error> {
        self.send_message_async(None, &[IoSlice::new(payload)], &[]).await
    }

    /// Sends a message from a task, which waits while the send buffer is full or the destination
    /// congested; returns its length.
    ///
    /// Cancel safe: the message is sent whole when this future is ready, and not at all when it is
    /// dropped before.
    ///
    /// # Errors
    /// As [`send_to`](Self::send_to); `ETIMEDOUT` after the send timeout; `EMFILE` (24) when the
    /// process has no descriptors left, for a socket of the host's node.
    pub async fn send_to_async(&self, payload: &[u8], to: impl ToAddr) -> Result<usize, Error> {
        self.send_message_async(Some(to.to_addr()?), &[IoSlice::new(payload)], &[]).await
    }

    /// Sends one message gathered from several slices, from a task; returns its length.
    ///
    /// Cancel safe, as [`send_to_async`](Self::send_to_async).
    ///
    /// # Errors
    /// As [`send_to_async`](Self::send_to_async).
    pub async fn send_vectored_to_async(
        &self,
        payload: &[IoSlice<'_>],
        to: impl ToAddr,
    ) -> Result<usize, Error> {
        self.send_message_async(Some(to.to_addr()?), payload, &[]).await
    }

    /// Sends a message with control messages from a task; `None` for `to` stands for the connected
    /// destination.
    ///
    /// Cancel safe, as [`send_to_async`](Self::send_to_async).
    ///
    /// # Errors
    /// As [`send_message`](Self::send_message) and [`send_to_async`](Self::send_to_async).
    pub async fn send_message_async(
        &self,
        to: Option<SocketAddr>,
        payload: &[IoSlice<'_>],
        control: &[SendControl],
    ) -> Result<usize, Error> {
        let zerocopy = control.iter().any(|c| matches!(c, SendControl::ZcopyCookie(_)));
        self.send_waiting(&SendMsg { name: to, payload, control, zerocopy, ..SendMsg::default() })
            .await
    }

    /// Sends a message that is not copied, from a task: see [`send_shared`](Self::send_shared).
    ///
    /// Cancel safe, as [`send_to_async`](Self::send_to_async).
    ///
    /// # Errors
    /// As [`send_shared`](Self::send_shared) and [`send_to_async`](Self::send_to_async).
    pub async fn send_shared_async(
        &self,
        payload: &Arc<Vec<u8>>,
        to: Option<SocketAddr>,
        cookie: Option<u32>,
    ) -> Result<usize, Error> {
        let cookie = cookie.map(SendControl::ZcopyCookie);
        let control = cookie.as_slice();
        self.send_waiting(&SendMsg {
            name: to,
            lent: Some(payload),
            control,
            zerocopy: !control.is_empty(),
            ..SendMsg::default()
        })
        .await
    }

    async fn send_waiting(&self, msg: &SendMsg<'_>) -> Result<usize, Error> {
        let limit = from_nanos(self.send_timeout.load(Relaxed));
        if let Some(socket) = self.host_socket() {
            let lent = msg.lent.map(|lent| IoSlice::new(lent));
            let payload = lent.as_ref().map_or(msg.payload, std::slice::from_ref);
            let send = || socket.send(msg.name, payload, msg.control, Waits::No);
            return limited(limit, when_ready(socket, Interest::WRITE, send)).await;
        }
        let (driver, id) = self.in_process()?;
        let msg = SendMsg { blocking: true, ..*msg };
        let sent = poll_fn(|cx| driver.poll_send(id, &msg, cx));
        limited(limit, sent).await
    }

    /// Sends messages from a task, which waits for the first only; returns how many were accepted.
    ///
    /// Cancel safe: dropped before it is ready, it has sent none of them. When it is ready, the
    /// messages that it counts are sent, and the others are not.
    ///
    /// # Errors
    /// As [`send_to_async`](Self::send_to_async), for the first message. An error of a later
    /// message ends the batch; the program gets it when it sends that message again.
    pub async fn send_batch_async(&self, messages: &[(SocketAddr, &[u8])]) -> Result<usize, Error> {
        let Some(((to, payload), rest)) = messages.split_first() else { return Ok(0) };
        self.send_to_async(payload, *to).await?;
        // No await from here on: the first message is sent, so this must become ready.
        if let Some(socket) = self.host_socket() {
            return Ok(1 + socket.send_batch(rest, Waits::No).unwrap_or(0));
        }
        let (driver, id) = self.in_process()?;
        let rest = rest.iter().map(|(to, payload)| (Some(*to), *payload));
        Ok(1 + driver.send_batch(id, rest, Blocking::Never).unwrap_or(0))
    }

    /// Receives a message, or a notification, in a task, without copying it.
    ///
    /// Cancel safe: when this is dropped before it is ready, no message is lost.
    ///
    /// # Errors
    /// `ETIMEDOUT` after the receive timeout; `EMFILE` (24) when the process has no descriptors
    /// left, for a socket of the host's node.
    pub async fn recv_async(&self) -> Result<Message, Error> {
        let limit = from_nanos(self.recv_timeout.load(Relaxed));
        if let Some(socket) = self.host_socket() {
            let receive = || socket.recv_message(Waits::No);
            return limited(limit, when_ready(socket, Interest::READ, receive)).await;
        }
        let (driver, id) = self.in_process()?;
        let opts = RecvOpts { want_control: true, ..RecvOpts::default() };
        let received = poll_fn(|cx| driver.poll_recv(id, opts, cx));
        let received = limited(limit, received).await?;
        Ok(Message::new(received, driver))
    }

    /// Receives a message into `buf` in a task; returns the number of bytes copied and the sender.
    /// The rest of a message longer than `buf` is lost; [`recv_async`](Self::recv_async) loses
    /// nothing.
    ///
    /// Cancel safe, as [`recv_async`](Self::recv_async).
    ///
    /// # Errors
    /// As [`recv_async`](Self::recv_async).
    pub async fn recv_from_async(&self, buf: &mut [u8]) -> Result<(usize, SocketAddr), Error> {
        let limit = from_nanos(self.recv_timeout.load(Relaxed));
        if let Some(socket) = self.host_socket() {
            let receive = || socket.recv_from(buf, Waits::No);
            return limited(limit, when_ready(socket, Interest::READ, receive)).await;
        }
        let (driver, id) = self.in_process()?;
        let received = poll_fn(|cx| driver.poll_recv_into(id, buf, cx));
        limited(limit, received).await
    }

    /// Appends up to `max` messages to `messages` in a task, which waits for the first only;
    /// returns how many.
    ///
    /// Cancel safe: dropped before it is ready, it has appended none, and none is lost.
    ///
    /// # Errors
    /// As [`recv_async`](Self::recv_async), for the first message.
    pub async fn recv_batch_async(
        &self,
        messages: &mut Vec<Message>,
        max: usize,
    ) -> Result<usize, Error> {
        if max == 0 {
            return Ok(0);
        }
        messages.push(self.recv_async().await?);
        // No await from here on: the first message is taken, so this must become ready.
        if let Some(socket) = self.host_socket() {
            return Ok(1 + socket.recv_batch(messages, max - 1, Waits::No).unwrap_or(0));
        }
        let (driver, id) = self.in_process()?;
        let opts = RecvOpts { want_control: true, ..RecvOpts::default() };
        let push = |received| messages.push(Message::new(received, driver));
        Ok(1 + driver.recv_batch(id, opts, max - 1, Blocking::Never, push).unwrap_or(0))
    }

    /// Waits in a task until the socket is ready for one of `interest`.
    ///
    /// Cancel safe: it changes nothing.
    ///
    /// # Errors
    /// `EBADF` after [`close`](Self::close).
    pub async fn wait_async(&self, interest: Interest) -> Result<(), Error> {
        if let Some(socket) = self.host_socket() {
            let wait = || match socket.wait(interest, Some(Duration::ZERO)) {
                Err(error) if error.is_timed_out() => Err(bowline_rds::Error::Empty.into()),
                ready => ready,
            };
            return when_ready(socket, interest, wait).await;
        }
        let (driver, id) = self.in_process()?;
        poll_fn(|cx| driver.poll_ready(id, interest, cx)).await?;
        Ok(())
    }

    /// Waits in a task until all messages of this socket are acknowledged, without a limit: see
    /// [`flush`](Self::flush) for what that means.
    ///
    /// Cancel safe: messages are sent whether anybody waits for it or not.
    ///
    /// # Errors
    /// `EBADF` after [`close`](Self::close); `ESHUTDOWN` when the node was shut down;
    /// `ECONNREFUSED` (111) as [`flush`](Self::flush).
    pub async fn flush_async(&self) -> Result<(), Error> {
        if let Some(socket) = self.host_socket() {
            loop {
                match socket.flush(Some(Duration::ZERO)) {
                    Err(error) if error.is_timed_out() => tokio::time::sleep(PACE).await,
                    flushed => return flushed,
                }
            }
        }
        let (driver, id) = self.in_process()?;
        Ok(poll_fn(|cx| driver.poll_flush(id, cx)).await?)
    }
}

impl Node {
    /// Shuts the node down as [`shutdown`](Self::shutdown) does, without blocking the task.
    ///
    /// Cancel safe: dropped while messages are not acknowledged, it has changed nothing, and the
    /// node runs on. Once it has begun to end connections, the node ends whether this is dropped or
    /// not.
    pub async fn shutdown_async(&self, limit: Duration) -> bool {
        let Some(driver) = self.owned() else { return false };
        let end = tokio::time::Instant::now() + limit;
        while !driver.drain(Duration::ZERO) && tokio::time::Instant::now() < end {
            tokio::time::sleep(PACE).await;
        }
        // Ending the connections waits for peers and threads, so it has a thread of its own.
        let driver = driver.clone();
        let (send, done) = tokio::sync::oneshot::channel();
        let end = move || {
            // The caller may have gone.
            let _ = send.send(driver.shutdown(Duration::ZERO));
        };
        let thread = std::thread::Builder::new().name("bowline-shutdown".into());
        match thread.spawn(end) {
            Ok(_) => done.await.unwrap_or(false),
            // The system has no thread left: better late than not at all.
            Err(_) => self.shutdown(Duration::ZERO),
        }
    }
}

/// Repeats a call that does not wait, on a socket of the host's node, whenever it may succeed.
async fn when_ready<T>(
    socket: &HostSocket,
    interest: Interest,
    mut call: impl FnMut() -> Result<T, Error>,
) -> Result<T, Error> {
    let (read, write) = (interest.contains(Interest::READ), interest.contains(Interest::WRITE));
    let wanted = match (read, write) {
        (true, true) => Ready::READABLE | Ready::WRITABLE,
        (false, true) => Ready::WRITABLE,
        _ => Ready::READABLE,
    };
    let mut was_ready = false;
    loop {
        match call() {
            Err(error) if error.is_would_block() => {}
            done => return done,
        }
        if was_ready {
            // What it waits for is not seen at the descriptor, as with a congested destination, or
            // another task was faster.
            tokio::time::sleep(PACE).await;
        }
        // A copy, since several tasks may wait for one socket. What it is ready for already is seen
        // when it is registered.
        let copy = socket.descriptor()?.try_clone().map_err(no_descriptor)?;
        let registered = registered(copy, wanted).map_err(no_descriptor)?;
        drop(registered.ready(wanted).await.map_err(no_descriptor)?);
        was_ready = true;
    }
}

#[allow(deprecated, reason = "its successor is unsafe, for descriptors that are not owned")]
fn registered(fd: OwnedFd, wanted: Ready) -> io::Result<AsyncFd<OwnedFd>> {
    AsyncFd::with_interest(fd, wanted)
}

/// The process, or the runtime, has no place for a descriptor.
fn no_descriptor(error: io::Error) -> Error {
    HostError::from_call(bowline_base::Errno::of(&error)).into()
}

/// Ends a call after a time. The call is dropped then, and so must be cancel safe.
async fn limited<T, E: Into<Error>>(
    limit: Option<Duration>,
    call: impl Future<Output = Result<T, E>>,
) -> Result<T, Error> {
    match limit {
        None => call.await.map_err(Into::into),
        Some(limit) => match tokio::time::timeout(limit, call).await {
            Ok(result) => result.map_err(Into::into),
            Err(_) => Err(DriverError::TimedOut.into()),
        },
    }
}
