//! The handle on a running node.

use core::fmt;
use std::io::{self, Read, Write};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::OwnedFd;
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::task::{Context, Poll};
use std::thread::JoinHandle;
use std::time::Duration;

use bowline_base::clock;
use bowline_rds::{
    Error as CoreError, Event, Instant, Interest, Node, Readiness, Received, RecvOpts, SendMsg,
    SocketId,
};
use bowline_wait::Leader;
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};

use crate::config::DriverConfig;
use crate::error::Error;
use crate::helper::Background;
use crate::listen::Listener;
use crate::poller::{TOKEN_KICK, TOKEN_LISTENER};
use crate::rdma::{Job, Port};
use crate::shared::Shared;
use crate::stats::DriverStats;
use crate::{helper, sys};

/// Longest time in which a node that ends tells its peers so, and connections end in good order.
/// Peers that answer need far less.
const LINGER: Duration = Duration::from_millis(500);
/// Time that peers have to close their side when a node hands over, which is to be short;
/// connections are cut after it.
const LINGER_HAND_OVER: Duration = Duration::from_millis(100);
/// Longest wait for acknowledgements over RDMA to get through before connections are ended.
const LINGER_POSTED: Duration = Duration::from_millis(100);
/// Longest wait for cuts, which end by themselves: after some 10 ms, or 100 ms on a system that
/// does not tell when a processor has handled its segments.
const CUTS_MAX: Duration = Duration::from_secs(2);
/// Interval of checking whether the node or its connections have ended.
const PACE: Duration = Duration::from_millis(1);

/// How long a call may block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Blocking {
    /// The call does not wait.
    Never,
    /// The call waits without a limit.
    Forever,
    /// The call waits up to this time.
    For(Duration),
}

/// Who lends messages of a node's sockets to readers in other processes.
pub trait Lender: Send + Sync {
    /// Gives back what readers have taken up to this call. May wait for a moment.
    fn give_back(&self);
}

/// A running node. Cloning gives another handle on the same node; the node ends with the last one.
#[derive(Clone)]
pub struct Driver {
    inner: Arc<Inner>,
}

/// Nothing of what is sent, nor of what is chosen at random.
impl fmt::Debug for Driver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Driver").finish_non_exhaustive()
    }
}

struct Inner {
    shared: Arc<Shared>,
    helper: Mutex<Option<JoinHandle<()>>>,
    /// Threads of the RDMA devices.
    rdma: Mutex<Vec<JoinHandle<()>>>,
    lender: Mutex<Option<Weak<dyn Lender>>>,
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.end();
        self.stop();
    }
}

impl Inner {
    fn start_helper(&self) -> io::Result<()> {
        let shared = Arc::clone(&self.shared);
        let thread = std::thread::Builder::new()
            .name("bowline-helper".into())
            .spawn(move || helper::run(&shared))?;
        *self.helper.lock().unwrap_or_else(PoisonError::into_inner) = Some(thread);
        Ok(())
    }

    fn join_helper(&self) {
        let helper = self.helper.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(helper) = helper
            && helper.thread().id() != std::thread::current().id()
        {
            // The thread does not panic; if it did, the application should not suffer for it.
            let _ = helper.join();
        }
    }

    /// Starts the threads of the RDMA devices.
    fn start_rdma(&self, jobs: Vec<Receiver<Job>>) -> io::Result<()> {
        let mut threads = self.rdma.lock().unwrap_or_else(PoisonError::into_inner);
        for (index, jobs) in jobs.into_iter().enumerate() {
            let sh = [(); 3].map(|()| Arc::clone(&self.shared));
            let [of_completions, of_events, of_setup] = sh;
            let named = |name: &str| std::thread::Builder::new().name(name.into());
            threads
                .push(named("bowline-rdma").spawn(move || of_completions.run_completions(index))?);
            threads.push(named("bowline-rdma-cm").spawn(move || of_events.run_events(index))?);
            threads
                .push(named("bowline-rdma-setup").spawn(move || of_setup.run_setup(index, &jobs))?);
        }
        Ok(())
    }

    fn stop_rdma(&self) {
        self.shared.rdma.iter().for_each(|port| port.send_job(Job::Stop));
        let threads =
            std::mem::take(&mut *self.rdma.lock().unwrap_or_else(PoisonError::into_inner));
        if threads.is_empty() {
            return;
        }
        let me = std::thread::current().id();
        for thread in threads.into_iter().filter(|thread| thread.thread().id() != me) {
            let _ = thread.join();
        }
        self.shared.close_rdma();
    }

    /// Ends all connections in good order: writes what was sent and gathered, acknowledges what was
    /// taken, and says farewell. Takes up to [`LINGER`].
    fn end(&self) {
        let sh = &*self.shared;
        if sh.lock().stop {
            return;
        }
        let limit = std::time::Instant::now() + LINGER;
        sh.with_scratch(|sc| {
            let mut st = sh.lock();
            sh.collect_dirty(&mut st, sc, 0);
            sh.release_and_run(st, sc);
        });
        sh.with_core(Node::end);
        self.wait(limit, || sh.lock().core.is_told());
        drop(self.stop_accepting());
        self.close_links();
        self.wait(limit, || !sh.is_any_busy());
    }

    fn stop_accepting(&self) -> Vec<Arc<Listener>> {
        let sh = &*self.shared;
        let mut st = sh.lock();
        let listeners: Vec<_> = st.listeners.drain(..).collect();
        st.resting.clear();
        drop(st);
        listeners.iter().for_each(|listener| listener.close(&sh.epoll));
        listeners
    }

    fn close_links(&self) {
        let sh = &*self.shared;
        sh.with_scratch(|sc| {
            let mut st = sh.lock();
            let now = st.at(clock::now());
            st.closing = true;
            st.core.close_links(now);
            sh.release_and_run(st, sc);
        });
    }

    /// Waits for something that the background thread brings about.
    fn wait(&self, limit: std::time::Instant, mut done: impl FnMut() -> bool) {
        let is_me = |helper: &JoinHandle<()>| helper.thread().id() == std::thread::current().id();
        let helper = self.helper.lock().unwrap_or_else(PoisonError::into_inner);
        let by_helper = helper.as_ref().is_some_and(is_me);
        drop(helper);
        while !done() && std::time::Instant::now() < limit {
            if by_helper {
                self.shared.read_network();
            }
            std::thread::sleep(PACE);
        }
    }

    /// Ends the background thread and makes all waiting callers return.
    fn stop(&self) {
        let sh = &*self.shared;
        sh.with_scratch(|sc| {
            let mut st = sh.lock();
            st.closing = true;
            st.stop = true;
            sc.todo.kick = true;
            sc.todo.wake_helper = true;
            for slot in &mut st.sockets {
                for entry in &slot.entries {
                    if entry.waiter.mark() {
                        sc.todo.unpark.push(Arc::clone(&entry.waiter));
                    }
                }
                sc.todo.wakers.extend(slot.wakers.drain(..).map(|(_, waker)| waker));
            }
            st.resting.clear();
            for listener in st.listeners.drain(..) {
                listener.close(&sh.epoll);
            }
            drop(st);
            sh.run(sc);
        });
        self.join_helper();
        self.stop_rdma();
        let mut st = sh.lock();
        st.links.clear();
        st.hot = [None, None];
        st.unread.clear();
    }
}

impl Driver {
    /// Opens the listeners and starts the background thread.
    ///
    /// # Errors
    /// [`Error::PortTaken`] when another process has the RDS port on one of the addresses;
    /// [`Error::Core`] with `AddrNotAvailable` when the machine does not have the address;
    /// [`Error::Os`] when the system refuses descriptors or a thread.
    pub fn start(config: DriverConfig) -> Result<Self, Error> {
        let core = Node::new(config.core.clone());
        Self::run(&config, core, Vec::new(), || Ok(()))
    }

    /// Starts with what another driver of this machine [handed over](Self::hand_over), which must
    /// have happened since the machine was started. Peers take it for the process that it was.
    /// `listeners` are those that were handed over. `commit` is called when everything is ready and
    /// before anything happens; its error ends the attempt.
    ///
    /// # Errors
    /// Those of [`start`](Self::start); [`Error::HandOver`] for what cannot be read or is of
    /// another version.
    pub fn resume(
        config: DriverConfig,
        from: impl Read,
        listeners: Vec<OwnedFd>,
        commit: impl FnOnce() -> io::Result<()>,
    ) -> Result<Self, Error> {
        let core = Node::resume(config.core.clone(), clock::now(), from);
        let core = core.map_err(|error| Error::HandOver { why: error.to_string() })?;
        Self::run(&config, core, listeners, commit)
    }

    fn run(
        config: &DriverConfig,
        core: Node,
        former: Vec<OwnedFd>,
        commit: impl FnOnce() -> io::Result<()>,
    ) -> Result<Self, Error> {
        let mut listeners = Listener::open(&config.core, former)?;
        let make_fd = || sys::event_fd().map_err(Error::os("making an event descriptor"));
        let fds = [
            epoll::create(CreateFlags::CLOEXEC).map_err(Error::os("making an epoll descriptor"))?,
            make_fd()?,
            make_fd()?,
        ];
        let watching = Error::os("watching a descriptor");
        epoll::add(&fds[0], &fds[1], EventData::new_u64(TOKEN_KICK), EventFlags::IN)
            .map_err(&watching)?;
        for (i, listener) in listeners.iter_mut().enumerate() {
            listener.watch(&fds[0], TOKEN_LISTENER + i as u64).map_err(&watching)?;
        }
        let (mut ports, mut jobs) = (Vec::new(), Vec::new());
        for device in &config.rdma.0 {
            let (send, receive) = channel();
            ports.push(Port::new(device, send)?);
            jobs.push(receive);
        }
        let mut core = core;
        core.set_rdma_addrs(ports.iter().flat_map(Port::addrs));
        core.set_rdma_frame(ports.iter().map(Port::frame).min().unwrap_or(0));
        let shared = Arc::new(Shared::new(config, core, fds, ports));
        shared.lock().listeners = listeners.into_iter().map(Arc::new).collect();
        commit().map_err(|error| Error::HandOver { why: error.to_string() })?;
        let inner = Inner {
            shared,
            helper: Mutex::new(None),
            rdma: Mutex::default(),
            lender: Mutex::default(),
        };
        let starting = |error: io::Error| Error::Os {
            what: "starting a background thread",
            errno: bowline_base::Errno::of(&error),
        };
        inner.start_rdma(jobs).map_err(starting)?;
        inner.shared.listen_rdma()?;
        inner.start_helper().map_err(starting)?;
        Ok(Self { inner: Arc::new(inner) })
    }

    /// Ends the background thread, whose work the caller does from now on: see [`Background`]. For
    /// one caller at a time.
    pub fn take_background(&self) -> Background {
        let sh = self.shared();
        sh.lock().helper_leaves = true;
        sys::signal(&sh.helper_kick);
        self.inner.join_helper();
        sh.lock().helper_leaves = false;
        Background::new(self.clone())
    }

    pub(crate) fn resume_helper(&self) {
        let mut st = self.shared().lock();
        if st.lead.leader() == Leader::Helper {
            st.lead.leave();
        }
        if !st.stop {
            drop(st);
            // Without a thread, calls still read the network while they wait.
            let _ = self.inner.start_helper();
        }
    }

    pub(crate) fn shared(&self) -> &Shared {
        &self.inner.shared
    }

    /// Calls `f` with the core and the time, then carries out the core's requests. It serves
    /// operations without a method of their own; `f` runs under the node's lock and must not wait.
    pub fn with_core<R>(&self, f: impl FnOnce(&mut Node, Instant) -> R) -> R {
        self.shared().with_core(f)
    }

    /// Sets who lends messages of this node from now on.
    pub fn set_lender(&self, lender: Weak<dyn Lender>) {
        *self.inner.lender.lock().unwrap_or_else(PoisonError::into_inner) = Some(lender);
    }

    /// Calls `f` with the core, in which receive queues and counters are up to date: the
    /// [`Lender`] has given back first what readers have taken. Not for a thread on which the
    /// lender may wait.
    pub fn inspect<R>(&self, f: impl FnOnce(&Node) -> R) -> R {
        let lender = self.inner.lender.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if let Some(lender) = lender.and_then(|lender| lender.upgrade()) {
            lender.give_back();
        }
        self.with_core(|core, _| f(core))
    }

    /// Binds a socket. A node without configured addresses accepts every address of the machine.
    ///
    /// # Errors
    /// Those of [`Node::bind`].
    pub fn bind(&self, id: SocketId, addr: SocketAddr) -> Result<(), Error> {
        let ip = addr.ip().to_canonical();
        let at = if ip.is_ipv4() { SocketAddr::new(ip, 0) } else { addr };
        let vouch = self.shared().any_address && !ip.is_unspecified() && sys::is_local(at);
        self.with_core(|core, _| {
            if vouch {
                core.add_local(ip);
            }
            core.bind(id, addr)
        })?;
        Ok(())
    }

    /// Closes a socket; a thread that waits for it gets `BadSocket`.
    pub fn close(&self, id: SocketId) {
        self.shared().close(id);
    }

    /// Sends a message. When this returns, the message is copied, and is sent now or soon.
    ///
    /// # Errors
    /// Those of [`Node::send`]; [`Error::TimedOut`] after `blocking`; [`Error::ShutDown`].
    #[inline]
    pub fn send(
        &self,
        id: SocketId,
        msg: &SendMsg<'_>,
        blocking: Blocking,
    ) -> Result<usize, Error> {
        if !msg.rdma.is_empty() {
            let rdma = &self.shared().register_local(id, msg)?;
            return self.shared().send(id, &SendMsg { rdma, ..*msg }, blocking);
        }
        self.shared().send(id, msg, blocking)
    }

    /// Sends messages, waiting for the first only; returns how many were accepted.
    ///
    /// # Errors
    /// As [`send`](Self::send), for the first message.
    pub fn send_batch<'a>(
        &self,
        id: SocketId,
        msgs: impl Iterator<Item = (Option<SocketAddr>, &'a [u8])>,
        blocking: Blocking,
    ) -> Result<usize, Error> {
        self.shared().send_batch(id, msgs, blocking)
    }

    /// Receives a message or notification.
    ///
    /// # Errors
    /// Those of [`Node::recv`]; [`Error::TimedOut`] after `blocking`; [`Error::ShutDown`].
    #[inline]
    pub fn recv(
        &self,
        id: SocketId,
        opts: RecvOpts,
        blocking: Blocking,
    ) -> Result<Received, Error> {
        self.shared().recv(id, opts, blocking)
    }

    /// Receives a message into `buf`; returns the number of bytes copied and the sender. The part
    /// of a message that does not fit is lost.
    ///
    /// # Errors
    /// As [`recv`](Self::recv).
    #[inline]
    pub fn recv_into(
        &self,
        id: SocketId,
        buf: &mut [u8],
        blocking: Blocking,
    ) -> Result<(usize, SocketAddr), Error> {
        self.shared().recv_into(id, buf, blocking)
    }

    /// Receives up to `max` messages and passes each to `each`; waits for the first only. `each`
    /// runs under the node's lock, except for the first message.
    ///
    /// # Errors
    /// As [`recv`](Self::recv), for the first message.
    pub fn recv_batch(
        &self,
        id: SocketId,
        opts: RecvOpts,
        max: usize,
        blocking: Blocking,
        each: impl FnMut(Received),
    ) -> Result<usize, Error> {
        self.shared().recv_batch(id, opts, max, blocking, each)
    }

    /// Sends for a task. The task is woken when a refused message may be accepted.
    pub fn poll_send(
        &self,
        id: SocketId,
        msg: &SendMsg<'_>,
        cx: &Context<'_>,
    ) -> Poll<Result<usize, Error>> {
        if !msg.rdma.is_empty() {
            let rdma = &self.shared().register_local(id, msg)?;
            return self.shared().poll_send(id, &SendMsg { rdma, ..*msg }, cx);
        }
        self.shared().poll_send(id, msg, cx)
    }

    /// Receives for a task. The task is woken when a message or notification may be received.
    pub fn poll_recv(
        &self,
        id: SocketId,
        opts: RecvOpts,
        cx: &Context<'_>,
    ) -> Poll<Result<Received, Error>> {
        self.shared().poll_recv(id, opts, cx)
    }

    /// Receives a message into `buf` for a task, as [`recv_into`](Self::recv_into). The task is
    /// woken when a message may be received.
    pub fn poll_recv_into(
        &self,
        id: SocketId,
        buf: &mut [u8],
        cx: &Context<'_>,
    ) -> Poll<Result<(usize, SocketAddr), Error>> {
        self.shared().poll_recv_into(id, buf, cx)
    }

    /// Lends messages to a reader, under the node's lock; see [`Node::lend`]. The task is woken
    /// when there may be another message or notification.
    pub fn poll_lend(
        &self,
        id: SocketId,
        cx: &Context<'_>,
        put: impl FnMut(SocketAddr, usize, &mut dyn Iterator<Item = &[u8]>) -> bool,
    ) -> Poll<Result<usize, Error>> {
        self.shared().poll_lend(id, cx, put)
    }

    /// Tells for a task whether the socket is ready for one of `interest`; the task is woken when
    /// it may have become so.
    pub fn poll_ready(
        &self,
        id: SocketId,
        interest: Interest,
        cx: &Context<'_>,
    ) -> Poll<Result<Readiness, Error>> {
        self.shared().poll_ready(id, interest, cx)
    }

    /// Waits until the socket is ready for one of `interest`.
    ///
    /// # Errors
    /// [`Error::TimedOut`]; [`Error::ShutDown`]; [`Error::Core`] when the socket is closed.
    pub fn wait(&self, id: SocketId, interest: Interest, blocking: Blocking) -> Result<(), Error> {
        let (read, write) = (interest.contains(Interest::READ), interest.contains(Interest::WRITE));
        self.shared().wait_until(id, interest, blocking, |st| {
            let ready = st.core.readiness(id)?;
            Ok(read && ready.readable || write && ready.writable)
        })
    }

    /// Waits until all messages that the socket has sent are acknowledged.
    ///
    /// # Errors
    /// [`Error::TimedOut`]; [`Error::ShutDown`]; [`Error::Core`] when the socket is closed, or when
    /// all that is not acknowledged waits for peers that have ended and have not come back.
    pub fn flush(&self, id: SocketId, blocking: Blocking) -> Result<(), Error> {
        self.shared().wait_until(id, Interest::WRITE, blocking, |st| st.core.is_flushed(id))
    }

    /// Tells for a task whether all messages that the socket has sent are acknowledged; the task is
    /// woken when they may have become so.
    pub fn poll_flush(&self, id: SocketId, cx: &Context<'_>) -> Poll<Result<(), Error>> {
        self.shared().poll_flush(id, cx)
    }

    /// Returns a descriptor that is readable while the socket may have something to receive, and
    /// after a refused send when it may succeed now. A call that finds nothing resets the
    /// descriptor. It may only be polled.
    ///
    /// # Errors
    /// [`Error::Os`] when there is no descriptor left; [`Error::Core`] when the socket is closed.
    pub fn event_fd(&self, id: SocketId) -> Result<Arc<OwnedFd>, Error> {
        self.shared().event_fd(id)
    }

    /// Resets the TCP connections to `peer`, or all; returns their number. Unacknowledged messages
    /// are sent again.
    pub fn drop_connections(&self, peer: Option<IpAddr>) -> usize {
        self.with_core(|core, now| core.drop_links(now, peer))
    }

    /// Waits until all messages of all sockets are acknowledged, at most `limit`; then ends all
    /// connections in good order, for which peers that do not answer get half a second at most.
    /// Tells whether everything was acknowledged.
    pub fn shutdown(&self, limit: Duration) -> bool {
        let drained = self.drain(limit);
        self.inner.end();
        self.inner.stop();
        drained
    }

    /// Waits until all messages of all sockets are acknowledged, at most `limit`. Tells whether all
    /// are.
    pub fn drain(&self, limit: Duration) -> bool {
        let sh = self.shared();
        let end = std::time::Instant::now() + limit;
        loop {
            let empty = sh.with_scratch(|sc| {
                let mut st = sh.lock();
                sh.collect_dirty(&mut st, sc, 0);
                let empty = st.core.unsent_total() == 0;
                sh.release_and_run(st, sc);
                empty
            });
            if empty || std::time::Instant::now() >= end {
                return empty;
            }
            std::thread::sleep(PACE);
        }
    }

    /// Ends all connections, and writes everything else down for a node that goes on in another
    /// process: [`resume`](Self::resume). Its sockets stay, messages wait, and peers see a short
    /// cut. Returns the listeners, at which connections wait meanwhile. Later calls fail with
    /// [`Error::ShutDown`].
    ///
    /// # Errors
    /// Those of `out`, and of the system without descriptors; the node is shut down all the same.
    pub fn hand_over(&self, out: impl Write) -> io::Result<Vec<OwnedFd>> {
        let listeners = self.inner.stop_accepting();
        // A connection that a thread has just accepted finds the node still open.
        std::thread::sleep(2 * PACE);
        self.close_connections(LINGER_HAND_OVER);
        self.with_core(|core, now| core.cut_links(now));
        self.wait_for_ends(CUTS_MAX);
        let saved = {
            let mut st = self.shared().lock();
            let now = st.at(clock::now());
            st.core.save(now, out)
        };
        self.inner.stop();
        saved?;
        listeners.iter().map(|listener| listener.descriptor()).collect()
    }

    fn close_connections(&self, linger: Duration) {
        self.with_core(|core, now| core.acknowledge_all(now));
        // What was posted over RDMA and has not left yet would be lost with its queue pair.
        let end = std::time::Instant::now() + LINGER_POSTED;
        while std::time::Instant::now() < end && self.with_core(|core, _| core.has_rdma_requests())
        {
            std::thread::sleep(PACE);
        }
        self.inner.close_links();
        self.wait_for_ends(linger);
    }

    fn wait_for_ends(&self, limit: Duration) {
        let end = std::time::Instant::now() + limit;
        self.inner.wait(end, || !self.shared().lock().has_links());
    }

    /// Returns what the driver did since it was started.
    pub fn stats(&self) -> DriverStats {
        let sh = self.shared();
        let (bytes_in, bytes_out) = sh.lock().bytes_copied;
        DriverStats {
            bytes_copied_in: bytes_in,
            bytes_copied_out: bytes_out,
            ..sh.stats.snapshot()
        }
    }

    /// Takes the events kept for the operator, oldest first; only the latest 256 are kept.
    pub fn events(&self) -> Vec<Event> {
        self.shared().lock().events.drain(..).collect()
    }

    /// Returns the TCP congestion control of each connection, with the peer's address.
    pub fn congestion_controls(&self) -> Vec<(SocketAddr, String)> {
        let sh = self.shared();
        let links: Vec<_> = {
            let st = sh.lock();
            st.links.iter().flatten().filter_map(|slot| slot.link.clone()).collect()
        };
        links
            .iter()
            .filter_map(|link| {
                let name = rustix::net::sockopt::tcp_congestion(&link.fd).ok()?;
                Some((link.peer, name))
            })
            .collect()
    }

    /// Converts a time of the core to calendar time, by the system's clock as it is set now.
    pub fn wall_clock(&self, at: Instant) -> std::time::SystemTime {
        let age = clock::now().saturating_since(at);
        let now = std::time::SystemTime::now();
        now.checked_sub(age).unwrap_or(now)
    }

    /// Tells whether a call that failed with `error` may succeed later.
    pub fn would_block(error: &Error) -> bool {
        matches!(
            error,
            Error::Core(
                CoreError::Empty
                    | CoreError::QueueFull
                    | CoreError::HandshakePending
                    | CoreError::Congested
            )
        )
    }
}
