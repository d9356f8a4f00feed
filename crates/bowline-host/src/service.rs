//! The thread that executes what programs ask for: [`Core`] with the system's descriptors.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bowline_host_wire::{ChannelId, NodeId, SocketHandle};
use bowline_rds_driver::Driver;
use rustix::event::{EventfdFlags, Timespec, epoll, eventfd};
use rustix::net::sockopt::set_socket_passcred;

use crate::accounts::Accounts;
use crate::agent;
use crate::caller::{Caller, take_descriptors};
use crate::closer::{self, Passed};
use crate::core::Core;
use crate::hand_over::Successor;
use crate::namespace::network_namespace;
use crate::network::Network;
use crate::ready::Ready;
use crate::system::{Eventfd, System};

/// What an epoll event is about: the kind in the upper 8 bits, a number below.
const WAKES: u64 = 0;
/// The first wakes this thread for sockets on which something has happened.
const BELL: u64 = WAKES;
pub(crate) const KICK: u64 = WAKES | 1;
pub(crate) const NETWORK: u64 = WAKES | 2;
const LISTENER: u64 = 1 << 56;
pub(crate) const CHANNEL: u64 = 2 << 56;
pub(crate) const SOCKET: u64 = 3 << 56;
const KIND: u64 = 0xff << 56;

const EMFILE: i32 = 24;
/// Events that are taken at once.
const EVENTS: usize = 256;

pub(crate) struct Service {
    pub(crate) core: Core<System>,
    stop: Arc<AtomicBool>,
    network: Network,
    pub(crate) listener: UnixListener,
    /// A descriptor that is given up to refuse a connection when there is no other.
    spare: Option<OwnedFd>,
}

impl Service {
    /// Watches the listener.
    pub(crate) fn new(
        driver: Driver,
        accounts: Accounts,
        listener: UnixListener,
        number: NodeId,
        stop: Arc<AtomicBool>,
        successor: Arc<Successor>,
    ) -> std::io::Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let bell = Eventfd::new()?;
        let network = Network::new(&driver, &epoll)?;
        let system = System { epoll, successor };
        let core = Core::new(system, driver, accounts, bell, (number, network_namespace()));
        let spare = Some(eventfd(0, EventfdFlags::CLOEXEC)?);
        let service = Self { core, stop, network, listener, spare };
        service.watch(service.core.ready.bell().as_fd(), BELL)?;
        // Before it is known who connects, nobody sends anything but bytes.
        take_descriptors(&service.listener, false);
        // Connections take that over.
        set_socket_passcred(&service.listener, true)?;
        service.listener.set_nonblocking(true)?;
        service.watch(service.listener.as_fd(), LISTENER)?;
        Ok(service)
    }

    /// What wakes the thread.
    pub(crate) fn ready(&self) -> Arc<Ready<Eventfd>> {
        Arc::clone(&self.core.ready)
    }

    fn epoll(&self) -> &OwnedFd {
        &self.core.outside.epoll
    }

    fn watch(&self, fd: BorrowedFd<'_>, token: u64) -> Result<(), rustix::io::Errno> {
        epoll::add(self.epoll(), fd, epoll::EventData::new_u64(token), epoll::EventFlags::IN)
    }

    /// Serves until the host ends or hands over. This thread reads the network as well, so that
    /// what comes for a program needs no other.
    pub(crate) fn run(mut self) -> Self {
        let mut events = Vec::with_capacity(EVENTS);
        let mut was_busy = false;
        while !self.stop.load(Ordering::Relaxed) {
            let is_busy = self.core.serve_again() | self.core.round();
            let next = self.network.turn(&self.core.outside.epoll);
            let rests = self.core.may_rest(is_busy);
            was_busy = !rests && !was_busy;
            if was_busy {
                // Mostly nothing is left after one more, and the loop can sleep without a look.
                continue;
            }
            let may_sleep = rests && self.core.fall_asleep();
            let sleep =
                if may_sleep { self.core.time_to_sleep().min(next) } else { Duration::ZERO };
            let sleep = Timespec { tv_sec: 0, tv_nsec: sleep.subsec_nanos().into() };
            let space = rustix::buffer::spare_capacity(&mut events);
            let waited = epoll::wait(self.epoll(), space, Some(&sleep));
            if rests {
                self.core.wake_up();
            }
            if waited.is_err() {
                continue; // a signal
            }
            for event in events.drain(..) {
                let (token, flags) = (event.data.u64(), event.flags);
                match token & KIND {
                    WAKES => self.network.wake_up(token),
                    LISTENER => self.accept(),
                    CHANNEL => {
                        let has_ended = flags.contains(epoll::EventFlags::HUP);
                        self.core.channel_event(ChannelId(token & !KIND), has_ended);
                    }
                    _ => {
                        let ends = epoll::EventFlags::HUP | epoll::EventFlags::RDHUP;
                        let has_ended = flags.intersects(ends);
                        self.core.socket_event(SocketHandle(token & !KIND), has_ended);
                    }
                }
            }
            self.core.end_waits();
            self.core.count_refusals();
            if self.core.look_if_due() {
                agent::look_at_all();
                closer::tidy();
            }
        }
        self
    }

    fn accept(&mut self) {
        let stream = match self.listener.accept() {
            Ok((stream, _)) => Passed::new(None, stream),
            Err(error) if error.raw_os_error() == Some(EMFILE) => {
                // Accepted and dropped: the program gets an error now instead of waiting.
                self.spare = None;
                if let Ok((stream, _)) = self.listener.accept() {
                    Passed::new(None, stream).end();
                }
                self.spare = eventfd(0, EventfdFlags::CLOEXEC).ok();
                return;
            }
            _ => return,
        };
        let Ok(caller) = Caller::of(&stream) else { return stream.end() };
        if let Err((errno, stream)) = self.core.accept(stream, caller) {
            self.core.turn_away(stream, errno);
        }
    }
}

impl Service {
    /// Closes all sockets. What programs send from now on has to be asked for, which fails. Another
    /// node may have them as well, and take everything back.
    pub(crate) fn end(mut self) {
        for (socket, _) in self.core.sockets.values_mut() {
            socket.rings.allow_nothing();
            self.core.rds.close(socket.id);
        }
        // Who has not been accepted may have sent descriptors, before Linux 6.16.
        drop(Passed::new(None, self.listener));
    }
}

impl std::fmt::Debug for Service {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let fd = self.epoll().as_raw_fd();
        f.debug_struct("Service").field("epoll", &fd).finish_non_exhaustive()
    }
}
