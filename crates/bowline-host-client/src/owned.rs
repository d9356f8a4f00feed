//! A socket of the host's node with a single owner.

use core::ffi::c_int;
use core::sync::atomic::{AtomicBool, Ordering};
use core::time::Duration;
use std::io::IoSlice;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::Arc;
use std::time::Instant;

use bowline_host_wire::{Area, SocketHandle};

use crate::agent;
use crate::channel::{Channel, Descriptors, is_refusal};
use crate::memory;
use crate::node::Node;
use crate::socket::{Message, Pieces, Socket};

/// Channels whose descriptors only their owner closes.
#[derive(Clone, Copy, Debug)]
struct Own;

impl Descriptors for Own {
    fn opened(fd: c_int) -> c_int {
        fd
    }

    fn closes(_fd: c_int) {}
}

/// The node of a host. Clones share it.
#[derive(Clone, Debug)]
pub struct Host {
    node: Arc<Node<Own>>,
    /// Path of the node, if given.
    place: Option<Arc<[u8]>>,
}

/// An RDS socket, until it is dropped or [closed](Self::close).
#[derive(Debug)]
pub struct OwnedSocket {
    host: Host,
    handle: SocketHandle,
    fd: Arc<OwnedFd>,
    memory: Memory,
    closed: AtomicBool,
}

/// Memory of one socket, used by that socket only.
#[derive(Debug)]
struct Memory(Area);

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: it came from `memory::map`, and calls that use it borrow the socket.
        unsafe { memory::unmap(self.0) };
    }
}

impl Host {
    /// The node that serves programs of this host: at `place`, else where the environment says,
    /// else where it listens by default.
    ///
    /// # Errors
    /// Those of [`Channel::open`].
    pub fn find(place: Option<&[u8]>) -> Result<Self, c_int> {
        let (channel, welcome) = place.map_or_else(Channel::open_to_host, Channel::open)?;
        let node = Node::vacant();
        node.claim(&welcome);
        node.keep(channel);
        Ok(Self { node: Arc::new(node), place: place.map(Arc::from) })
    }

    /// A channel for a new socket. A restarted node is a different node.
    fn channel(&self) -> Result<Channel<Own>, c_int> {
        if let Some(channel) = self.node.idle_channel() {
            return Ok(channel);
        }
        let opened = self.place.as_deref().map_or_else(Channel::open_to_host, Channel::open);
        match opened {
            Ok((channel, welcome)) if self.node.resumes_as(&welcome) => Ok(channel),
            Err(errno) if is_refusal(errno) => Err(errno),
            _ => Err(libc::ENETDOWN),
        }
    }

    /// A new socket.
    ///
    /// # Errors
    /// Those of [`Node::open`] and [`Channel::open`].
    pub fn open(&self) -> Result<OwnedSocket, c_int> {
        let opened = self.node.open(self.channel()?)?;
        // SAFETY: the descriptor has come from the node, and nobody else has it.
        let fd = unsafe { OwnedFd::from_raw_fd(opened.fd) };
        let memory = Memory(memory::map(opened.memory)?);
        let (host, handle) = (self.clone(), opened.handle);
        Ok(OwnedSocket { host, handle, fd: Arc::new(fd), memory, closed: AtomicBool::new(false) })
    }
}

/// Calls are repeated when a signal interrupts them, and report a socket that was closed during the
/// call.
impl OwnedSocket {
    fn call<T>(
        &self,
        mut once: impl FnMut(&Socket<'_, Own>, &Area) -> Result<T, c_int>,
    ) -> Result<T, c_int> {
        let fd = self.fd.as_raw_fd();
        let socket = Socket { fd, node: &self.host.node, handle: self.handle };
        loop {
            if self.closed.load(Ordering::Acquire) {
                return Err(libc::EBADF);
            }
            match once(&socket, &self.memory.0) {
                Err(libc::EINTR) => {}
                // Pairs with `close`: either that has it taken back, or it is seen here.
                done if self.closed.load(Ordering::Acquire) => {
                    // This call may have given memory after [`close`](Self::close) took it back.
                    self.take_memory_back();
                    return done.map_err(|_| libc::EBADF);
                }
                done => return done,
            }
        }
    }

    /// `bind(2)`.
    ///
    /// # Errors
    /// EBADF after [`close`](Self::close), here and below; those of the call in [`Socket`].
    pub fn bind(&self, name: &[u8]) -> Result<(), c_int> {
        self.call(|socket, _| socket.bind(name)).map(drop)
    }

    /// `connect(2)`.
    ///
    /// # Errors
    /// As [`bind`](Self::bind).
    pub fn connect(&self, name: &[u8]) -> Result<(), c_int> {
        self.call(|socket, _| socket.connect(name)).map(drop)
    }

    /// `getsockname(2)`.
    ///
    /// # Errors
    /// As [`bind`](Self::bind).
    pub fn local_name(&self) -> Result<Vec<u8>, c_int> {
        self.call(|socket, _| socket.name(false))
    }

    /// `getpeername(2)`.
    ///
    /// # Errors
    /// As [`bind`](Self::bind).
    pub fn peer_name(&self) -> Result<Vec<u8>, c_int> {
        self.call(|socket, _| socket.name(true))
    }

    /// `setsockopt(2)`.
    ///
    /// # Errors
    /// As [`bind`](Self::bind).
    pub fn set_option(&self, level: c_int, name: c_int, value: &[u8]) -> Result<(), c_int> {
        self.call(|socket, _| socket.set_option(level, name, value)).map(drop)
    }

    /// `getsockopt(2)`; see [`Socket::get_option`].
    ///
    /// # Errors
    /// As [`bind`](Self::bind).
    pub fn get_option(
        &self,
        level: c_int,
        name: c_int,
        room: usize,
    ) -> Result<(Vec<u8>, c_int, c_int), c_int> {
        self.call(|socket, _| socket.get_option(level, name, room))
    }

    /// `sendmsg(2)`.
    ///
    /// # Errors
    /// As [`bind`](Self::bind).
    pub fn send(
        &self,
        flags: c_int,
        name: &[u8],
        control: &[u8],
        payload: &[IoSlice<'_>],
    ) -> Result<usize, c_int> {
        // SAFETY: a slice of the library has the layout of the system's on Unix, as it promises.
        let payload =
            unsafe { core::slice::from_raw_parts(payload.as_ptr().cast(), payload.len()) };
        self.call(|socket, area| {
            // SAFETY: slices are readable.
            unsafe { socket.send(area, flags, name, control, payload) }
        })
    }

    /// `recvmsg(2)` into `to`.
    ///
    /// # Errors
    /// As [`bind`](Self::bind).
    pub fn receive(
        &self,
        flags: c_int,
        control_room: usize,
        to: &mut [u8],
    ) -> Result<Message, c_int> {
        let pieces = [libc::iovec { iov_base: to.as_mut_ptr().cast(), iov_len: to.len() }];
        // SAFETY: a slice is writable, and both are there until the call is over.
        let mut to = unsafe { Pieces::new(&pieces) };
        self.call(|socket, area| socket.receive(area, flags, control_room, &mut to, None))
    }

    /// `recvmsg(2)` of a whole message, however long it is.
    ///
    /// # Errors
    /// As [`bind`](Self::bind).
    pub fn receive_whole(
        &self,
        flags: c_int,
        control_room: usize,
    ) -> Result<(Message, Vec<u8>), c_int> {
        let mut to = Vec::new();
        let message =
            self.call(|socket, area| socket.receive(area, flags, control_room, &mut to, None))?;
        Ok((message, to))
    }

    /// See [`Socket::wait`].
    ///
    /// # Errors
    /// As [`bind`](Self::bind).
    pub fn wait(&self, events: i16, limit: Option<Duration>) -> Result<i16, c_int> {
        let left = left_of(limit);
        self.call(|socket, area| socket.wait(area, events, left()))
    }

    /// See [`Socket::flush`].
    ///
    /// # Errors
    /// As [`bind`](Self::bind).
    pub fn flush(&self, limit: Option<Duration>) -> Result<(), c_int> {
        let left = left_of(limit);
        self.call(|socket, _| socket.flush(left()))
    }

    /// See [`Socket::cancel_all`].
    ///
    /// # Errors
    /// As [`bind`](Self::bind).
    pub fn cancel_all(&self) -> Result<(), c_int> {
        self.call(|socket, _| socket.cancel_all())
    }

    /// Withdraws the memory that this process has given for the socket.
    fn take_memory_back(&self) {
        if let Some(socket) = agent::socket_of(self.fd.as_raw_fd()) {
            agent::take_back(socket, None);
        }
    }

    /// The descriptor, for `poll`.
    ///
    /// # Errors
    /// EBADF after [`close`](Self::close).
    pub fn descriptor(&self) -> Result<Arc<OwnedFd>, c_int> {
        self.call(|_, _| Ok(Arc::clone(&self.fd)))
    }

    /// Closes the socket now: waits of other threads end.
    pub fn close(&self) {
        // Pairs with the looks in `call`.
        if !self.closed.swap(true, Ordering::AcqRel) {
            self.take_memory_back();
            // For the node this is the close of the last descriptor.
            crate::system::shutdown(self.fd.as_raw_fd());
        }
    }
}

/// Returns the remaining time of a limit that begins now.
fn left_of(limit: Option<Duration>) -> impl Fn() -> Option<Duration> {
    let begun = Instant::now();
    move || limit.map(|limit| limit.saturating_sub(begun.elapsed()))
}

impl Drop for OwnedSocket {
    fn drop(&mut self) {
        self.close();
    }
}
