//! What the server's logic needs from outside: the system's descriptors and memory, the RDS node.

use std::net::{IpAddr, SocketAddr};
use std::ops::Range;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::SystemTime;

use bowline_base::{Errno, Instant};
use bowline_host_wire::{Area, ChannelId, SocketHandle};
use bowline_rds::{Interest, Node, Readiness, Received, RecvOpts, SendMsg, SocketId};
use bowline_rds_driver::{Error, RdmaMemory};

use super::{Caller, Credentials, Owner};
use crate::rdma::{ProcessMemory, Shown};
use crate::ready::Bell;

/// What the server's logic needs from outside.
pub trait Outside: Sized {
    /// The RDS node.
    type Rds: Rds;
    /// A descriptor that programs have a hand in: the node's end of a channel or socket, or what
    /// came with a request.
    type Descriptor: Descriptor<Given = Self::Given>;
    /// A descriptor that is given to a program.
    type Given;
    /// Memory that a socket shares with programs.
    type Memory: SharedMemory<Given = Self::Given>;
    /// What wakes the server.
    type Bell: Bell;

    /// The time.
    fn now(&self) -> Instant;

    /// A number that nobody guesses.
    fn random(&self) -> u64;

    /// Largest send and receive buffer that a program may ask for, bytes.
    fn largest_buffers(&self) -> (usize, usize);

    /// Tells whether nothing is to be taken of a user.
    fn is_behind(&self, owner: Owner) -> bool;

    /// Makes the descriptors of a new socket, and its memory.
    ///
    /// # Errors
    /// Errors of the system: no descriptors or memory left.
    fn open(&self) -> Result<Opened<Self>, Errno>;

    /// Has `Core::channel_event` called when something happens on a channel.
    ///
    /// # Errors
    /// No memory left.
    fn watch_channel(&self, number: ChannelId, stream: &Self::Descriptor) -> Result<(), Errno>;

    /// Has `Core::socket_event` called when something happens on a socket.
    ///
    /// # Errors
    /// No memory left.
    fn watch_socket(&self, handle: SocketHandle, end: &Self::Descriptor) -> Result<(), Errno>;

    /// Ends that.
    fn unwatch(&self, descriptor: &Self::Descriptor);

    /// The memory that a process shows by a descriptor.
    ///
    /// # Errors
    /// EBADF for another descriptor.
    fn process_memory(
        &self,
        descriptor: Self::Descriptor,
        shown: &Shown<'_>,
    ) -> Result<ProcessMemory, Errno>;

    /// A process has given what watches memory that it has shown.
    ///
    /// # Errors
    /// EBADF for a descriptor that does not watch.
    fn watch_memory(
        &self,
        memory: &mut ProcessMemory,
        descriptor: Self::Descriptor,
        process: i32,
    ) -> Result<(), Errno>;

    /// Another node asks on this channel, over what becomes the connection to it, that everything
    /// be handed over. The numbers are the versions that it speaks.
    ///
    /// # Errors
    /// The error to answer.
    fn name_successor(
        &self,
        stream: &Self::Descriptor,
        asked: (i32, i32, i64),
    ) -> Result<(), Errno>;

    /// Between two steps that a program may see apart; for the simulator.
    #[inline]
    fn pause(&self) {}
}

/// A new socket.
pub struct Opened<O: Outside> {
    /// The node's end.
    pub end: O::Descriptor,
    /// The system's number of the program's end.
    pub cookie: u64,
    /// Inode of the program's end.
    pub inode: u64,
    /// What both share.
    pub memory: O::Memory,
    /// The program's end, and the memory for it.
    pub given: Vec<O::Given>,
}

/// The RDS node, as the server uses it. Calls never wait: those that a task waits for wake it when
/// another attempt may succeed.
pub trait Rds {
    /// Calls a function with the node and the time.
    fn with_core<R>(&self, f: impl FnOnce(&mut Node, Instant) -> R) -> R;

    /// Sends a message, if there is room.
    ///
    /// # Errors
    /// Those of the node.
    fn send(&self, id: SocketId, msg: &SendMsg<'_>) -> Result<usize, Error>;

    /// Sends a message when there is room.
    fn poll_send(
        &self,
        id: SocketId,
        msg: &SendMsg<'_>,
        cx: &Context<'_>,
    ) -> Poll<Result<usize, Error>>;

    /// Takes a message or a notification.
    fn poll_recv(
        &self,
        id: SocketId,
        opts: RecvOpts,
        cx: &Context<'_>,
    ) -> Poll<Result<Received, Error>>;

    /// Lends messages to `put`, which takes or leaves them.
    fn poll_lend(
        &self,
        id: SocketId,
        cx: &Context<'_>,
        put: impl FnMut(SocketAddr, usize, &mut dyn Iterator<Item = &[u8]>) -> bool,
    ) -> Poll<Result<usize, Error>>;

    /// Waits until a socket is ready for something.
    fn poll_ready(
        &self,
        id: SocketId,
        interest: Interest,
        cx: &Context<'_>,
    ) -> Poll<Result<Readiness, Error>>;

    /// Waits until everything is acknowledged.
    fn poll_flush(&self, id: SocketId, cx: &Context<'_>) -> Poll<Result<(), Error>>;

    /// Binds a socket.
    ///
    /// # Errors
    /// Those of the node.
    fn bind(&self, id: SocketId, name: SocketAddr) -> Result<(), Error>;

    /// Closes a socket.
    fn close(&self, id: SocketId);

    /// Lets peers use memory.
    ///
    /// # Errors
    /// Those of the node and of the device.
    fn rdma_register(
        &self,
        id: SocketId,
        memory: &Arc<RdmaMemory>,
        part: Range<usize>,
        peer: Option<IpAddr>,
        use_once: bool,
    ) -> Result<u64, Error>;

    /// Takes memory back.
    ///
    /// # Errors
    /// Those of the node.
    fn rdma_free(&self, id: SocketId, cookie: u64) -> Result<(), Error>;

    /// The calendar's time of a moment.
    fn wall_clock(&self, at: Instant) -> SystemTime;
}

/// A descriptor that programs have a hand in. Nothing here waits.
pub trait Descriptor: Sized {
    /// What is sent along.
    type Given;

    /// Sends bytes, and descriptors with the first of them.
    ///
    /// # Errors
    /// EAGAIN when there is no room; those of the system.
    fn send(&self, bytes: &[u8], given: &[Self::Given]) -> Result<usize, Errno>;

    /// Receives what is there. Where the system does not say who has sent it, that was `otherwise`.
    ///
    /// # Errors
    /// EAGAIN when there is nothing; EDQUOT for what somebody sends of whom nothing is taken now;
    /// those of the system.
    fn receive(&self, to: &mut [u8], otherwise: Owner) -> Result<Arrival<Self>, Errno>;

    /// Tells whether the other end has read everything.
    fn is_all_read(&self) -> bool;

    /// Bytes of the next messages that came.
    fn unread(&self) -> u64;

    /// Tells whether the last descriptor of the other end was closed.
    fn has_ended(&self) -> bool;

    /// Prepares the end of a channel.
    ///
    /// # Errors
    /// Those of the system.
    fn prepare(&self) -> Result<(), Errno>;

    /// The system's number of a socket.
    ///
    /// # Errors
    /// It is none.
    fn cookie(&self) -> Result<u64, Errno>;

    /// Tells whether there is a request that takes such a descriptor.
    fn may_be_wanted(&self) -> bool;

    /// Who offers it as a channel, if that is who has made it.
    fn offered_by(&self, sender: Credentials) -> Option<Caller>;

    /// The same, as another's.
    #[must_use]
    fn owned_by(self, owner: Owner) -> Self;

    /// Ends a connection, which its other end learns of at once.
    fn end(self);
}

/// What came.
#[derive(Debug)]
pub struct Arrival<D> {
    /// Bytes of it.
    pub len: usize,
    /// As those of whoever has sent them.
    pub descriptors: Vec<D>,
    /// Who has sent it, if the socket asks for that.
    pub sender: Option<Credentials>,
}

/// Memory of a socket, as long as this is there.
pub trait SharedMemory {
    /// What programs get of it.
    type Given;

    /// Where it is.
    fn area(&self) -> Area;

    /// A descriptor for a program.
    ///
    /// # Errors
    /// No descriptors left.
    fn share(&self) -> Result<Self::Given, Errno>;
}
