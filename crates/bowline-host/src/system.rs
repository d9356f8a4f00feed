//! The outside of the server's [`Core`](crate::core::Core), as the system has it.

use std::net::{IpAddr, SocketAddr};
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::SystemTime;

use bowline_base::{Errno, Instant, clock, entropy};
use bowline_host_wire::{Area, ChannelId, NAME_PREFIX, SocketHandle};
use bowline_rds::{Interest, Node, Readiness, Received, RecvOpts, SendMsg, SocketId};
use bowline_rds_driver::{Blocking, Driver, Error, RdmaMemory};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, epoll, eventfd, poll};
use rustix::io::Errno as SystemErrno;
use rustix::net::sockopt::{set_socket_passcred, set_socket_send_buffer_size, socket_cookie};
use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix,
    SocketFlags, SocketType, send, sendmsg,
};

use crate::arrivals;
use crate::caller::{Caller, Credentials, take_descriptors};
use crate::closer::{self, Owner, Passed};
use crate::core::{Arrival, Descriptor, Opened, Outside, Rds, SharedMemory};
use crate::hand_over::{self, Successor};
use crate::memory::{Memory, bytes_unread};
use crate::rdma::{ProcessMemory, Shown};
use crate::ready::Bell;
use crate::service::{CHANNEL, SOCKET};

/// Files with the largest send and receive buffer that a socket of this machine may ask for.
pub const BUFFERS_MAX: [&str; 2] = ["/proc/sys/net/core/wmem_max", "/proc/sys/net/core/rmem_max"];
/// What the kernel has there unless it is set, bytes.
const BUFFER_MAX_DEFAULT: usize = 212_992;

/// How the node writes to programs. A channel that a program has offered shares its flags with the
/// program, which may let writes wait.
const AT_ONCE: SendFlags = SendFlags::NOSIGNAL.union(SendFlags::DONTWAIT);

fn errno(error: SystemErrno) -> Errno {
    Errno(error.raw_os_error())
}

/// Wakes a thread that sleeps in epoll.
#[derive(Debug)]
pub(crate) struct Eventfd(OwnedFd);

impl Eventfd {
    pub(crate) fn new() -> Result<Self, SystemErrno> {
        eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map(Self)
    }
}

impl AsFd for Eventfd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Bell for Eventfd {
    fn ring(&self) {
        // It cannot be full: it is emptied at each awakening.
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }

    fn silence(&self) {
        let _ = rustix::io::read(&self.0, &mut [0; 8]);
    }
}

/// This system.
#[derive(Debug)]
pub(crate) struct System {
    pub(crate) epoll: OwnedFd,
    /// Who is to resume in this node's place.
    pub(crate) successor: Arc<Successor>,
}

impl System {
    fn watch(
        &self,
        descriptor: &Passed,
        token: u64,
        flags: epoll::EventFlags,
    ) -> Result<(), Errno> {
        let flags = flags | epoll::EventFlags::IN | epoll::EventFlags::ET;
        epoll::add(&self.epoll, descriptor, epoll::EventData::new_u64(token), flags).map_err(errno)
    }
}

impl Outside for System {
    type Rds = Driver;
    type Descriptor = Passed;
    type Given = OwnedFd;
    type Memory = Memory;
    type Bell = Eventfd;

    fn now(&self) -> Instant {
        clock::now()
    }

    fn random(&self) -> u64 {
        entropy::random_u64()
    }

    fn largest_buffers(&self) -> (usize, usize) {
        let [send, receive] = BUFFERS_MAX.map(|file| {
            let text = std::fs::read_to_string(file).ok();
            text.and_then(|text| text.trim().parse().ok()).unwrap_or(BUFFER_MAX_DEFAULT)
        });
        (send, receive)
    }

    fn is_behind(&self, owner: Owner) -> bool {
        closer::is_behind(owner)
    }

    fn open(&self) -> Result<Opened<Self>, Errno> {
        let (end, theirs) = rustix::net::socketpair(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        )
        .map_err(errno)?;
        // As little room as can be: a few tokens fill it.
        set_socket_send_buffer_size(&theirs, 1).map_err(errno)?;
        set_socket_send_buffer_size(&end, 1).map_err(errno)?;
        let unique = entropy::random_u64();
        let name = [NAME_PREFIX, format!("{unique:016x}").as_bytes()].concat();
        let name = SocketAddrUnix::new_abstract_name(&name[1..]).map_err(errno)?;
        rustix::net::bind(&end, &name).map_err(errno)?;
        // Who offers a channel on it, the system is to say.
        set_socket_passcred(&end, true).map_err(errno)?;
        let cookie = socket_cookie(&theirs).map_err(errno)?;
        let inode = rustix::fs::fstat(&theirs).map_err(errno)?.st_ino;
        let memory = Memory::new().map_err(errno)?;
        let given = vec![theirs, memory.share()?];
        Ok(Opened { end: Passed::new(None, end), cookie, inode, memory, given })
    }

    fn watch_channel(&self, number: ChannelId, stream: &Passed) -> Result<(), Errno> {
        self.watch(stream, CHANNEL | number.0, epoll::EventFlags::OUT)
    }

    fn watch_socket(&self, handle: SocketHandle, end: &Passed) -> Result<(), Errno> {
        self.watch(end, SOCKET | handle.0, epoll::EventFlags::RDHUP)
    }

    fn unwatch(&self, descriptor: &Passed) {
        let _ = epoll::delete(&self.epoll, descriptor);
    }

    fn process_memory(
        &self,
        descriptor: Passed,
        shown: &Shown<'_>,
    ) -> Result<ProcessMemory, Errno> {
        ProcessMemory::new(descriptor, shown)
    }

    fn watch_memory(
        &self,
        memory: &mut ProcessMemory,
        descriptor: Passed,
        process: i32,
    ) -> Result<(), Errno> {
        memory.watch_by(descriptor, process)
    }

    fn name_successor(&self, stream: &Passed, asked: (i32, i32, i64)) -> Result<(), Errno> {
        hand_over::name_successor(&self.successor, stream, asked)
    }
}

impl Rds for Driver {
    fn with_core<R>(&self, f: impl FnOnce(&mut Node, Instant) -> R) -> R {
        Self::with_core(self, f)
    }

    fn send(&self, id: SocketId, msg: &SendMsg<'_>) -> Result<usize, Error> {
        Self::send(self, id, msg, Blocking::Never)
    }

    fn poll_send(
        &self,
        id: SocketId,
        msg: &SendMsg<'_>,
        cx: &Context<'_>,
    ) -> Poll<Result<usize, Error>> {
        Self::poll_send(self, id, msg, cx)
    }

    fn poll_recv(
        &self,
        id: SocketId,
        opts: RecvOpts,
        cx: &Context<'_>,
    ) -> Poll<Result<Received, Error>> {
        Self::poll_recv(self, id, opts, cx)
    }

    fn poll_lend(
        &self,
        id: SocketId,
        cx: &Context<'_>,
        put: impl FnMut(SocketAddr, usize, &mut dyn Iterator<Item = &[u8]>) -> bool,
    ) -> Poll<Result<usize, Error>> {
        Self::poll_lend(self, id, cx, put)
    }

    fn poll_ready(
        &self,
        id: SocketId,
        interest: Interest,
        cx: &Context<'_>,
    ) -> Poll<Result<Readiness, Error>> {
        Self::poll_ready(self, id, interest, cx)
    }

    fn poll_flush(&self, id: SocketId, cx: &Context<'_>) -> Poll<Result<(), Error>> {
        Self::poll_flush(self, id, cx)
    }

    fn bind(&self, id: SocketId, name: SocketAddr) -> Result<(), Error> {
        Self::bind(self, id, name)
    }

    fn close(&self, id: SocketId) {
        Self::close(self, id);
    }

    fn rdma_register(
        &self,
        id: SocketId,
        memory: &Arc<RdmaMemory>,
        part: Range<usize>,
        peer: Option<IpAddr>,
        use_once: bool,
    ) -> Result<u64, Error> {
        Self::rdma_register(self, id, memory, part, peer, use_once)
    }

    fn rdma_free(&self, id: SocketId, cookie: u64) -> Result<(), Error> {
        Self::rdma_free(self, id, cookie)
    }

    fn wall_clock(&self, at: Instant) -> SystemTime {
        Self::wall_clock(self, at)
    }
}

impl Descriptor for Passed {
    type Given = OwnedFd;

    fn send(&self, bytes: &[u8], given: &[OwnedFd]) -> Result<usize, Errno> {
        if given.is_empty() {
            return send(self, bytes, AT_ONCE).map_err(errno);
        }
        let given: Vec<_> = given.iter().map(AsFd::as_fd).collect();
        let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        control.push(SendAncillaryMessage::ScmRights(&given));
        sendmsg(self, &[std::io::IoSlice::new(bytes)], &mut control, AT_ONCE).map_err(errno)
    }

    fn receive(&self, to: &mut [u8], otherwise: Owner) -> Result<Arrival<Self>, Errno> {
        arrivals::receive(self, to, otherwise).map_err(errno)
    }

    fn is_all_read(&self) -> bool {
        bytes_unread(self) == Some(0)
    }

    fn unread(&self) -> u64 {
        rustix::io::ioctl_fionread(self).unwrap_or(0)
    }

    fn has_ended(&self) -> bool {
        let mut end = [PollFd::new(self, PollFlags::empty())];
        let ready = poll(&mut end, Some(&Timespec::default()));
        ready.is_ok() && end[0].revents().contains(PollFlags::HUP)
    }

    fn prepare(&self) -> Result<(), Errno> {
        take_descriptors(self, true);
        rustix::io::ioctl_fionbio(self, true).map_err(errno)?;
        // Who sends on it, the system is to say: it may not be who has opened it.
        set_socket_passcred(self, true).map_err(errno)
    }

    fn cookie(&self) -> Result<u64, Errno> {
        socket_cookie(self).map_err(errno)
    }

    fn may_be_wanted(&self) -> bool {
        arrivals::may_be_wanted(self)
    }

    fn offered_by(&self, sender: Credentials) -> Option<Caller> {
        Caller::of_offer(self, sender)
    }

    fn owned_by(self, owner: Owner) -> Self {
        Self::owned_by(self, owner)
    }

    fn end(self) {
        Self::end(self);
    }
}

impl SharedMemory for Memory {
    type Given = OwnedFd;

    fn area(&self) -> Area {
        Self::area(self)
    }

    fn share(&self) -> Result<OwnedFd, Errno> {
        self.descriptor().try_clone_to_owned().map_err(|_| Errno::ENFILE)
    }
}
