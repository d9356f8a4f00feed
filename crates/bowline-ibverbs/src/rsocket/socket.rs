//! Sockets: what state they are in, and waiting for another one.

use core::ffi::c_int;
use core::mem;
use std::collections::{BTreeMap, VecDeque};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::process;
use std::sync::{Arc, Mutex, MutexGuard, RwLock};
use std::time::{Duration, Instant};

use bowline_roce_driver::PortSpace;
use bowline_verbs::{CmEvent, CmId as Number, ConnRequest, CqId, Device as _, PdId, RejectReason};
use rustix::event::{EventfdFlags, eventfd};

use super::connection::Connection;
use super::datagrams::Datagrams;
use super::maps::Maps;
use super::options::Options;
use super::wait::{Signal, Waiting, Waker};
use crate::cm::{Port, is_own, opened, pd, source};
use crate::device::Opened;
use crate::events::lock;

/// Requests that wait to be accepted where a program says nothing else, and at most.
const BACKLOG: usize = 128;
/// Ports that are tried where any is good.
const PORT_TRIES: usize = 16;
/// How long a socket that is closed waits for its peer to acknowledge what was sent.
const CLOSE_LIMIT: Duration = Duration::from_secs(10);
/// Longest wait in one go; then the wait is begun again.
const SLICE: Duration = Duration::from_secs(60);

/// The sockets of the process, by descriptor.
static SOCKETS: RwLock<BTreeMap<c_int, Arc<Socket>>> = RwLock::new(BTreeMap::new());

/// Returns the socket of a descriptor, if it is one of this process.
pub(super) fn find(fd: c_int) -> Option<Arc<Socket>> {
    let sockets = SOCKETS.read().unwrap_or_else(std::sync::PoisonError::into_inner);
    sockets.get(&fd).filter(|socket| socket.is_own()).map(Arc::clone)
}

/// Adds a socket; returns its descriptor.
pub(super) fn add(socket: Socket) -> c_int {
    let fd = socket.fd.as_raw_fd();
    let mut sockets = SOCKETS.write().unwrap_or_else(std::sync::PoisonError::into_inner);
    // A child of `fork` may have closed its parent's descriptor by another call.
    if let Some(former) = sockets.insert(fd, Arc::new(socket)).filter(|former| !former.is_own()) {
        mem::forget(former);
    }
    fd
}

/// Takes a socket out.
pub(super) fn remove(fd: c_int) -> Option<Arc<Socket>> {
    let mut sockets = SOCKETS.write().unwrap_or_else(std::sync::PoisonError::into_inner);
    sockets.remove(&fd)
}

/// Closes the descriptor that this process has of its parent's socket; `false`: it has none.
pub(super) fn leave(fd: c_int) -> bool {
    let mut sockets = SOCKETS.write().unwrap_or_else(std::sync::PoisonError::into_inner);
    if sockets.get(&fd).is_none_or(|socket| socket.is_own()) {
        return false;
    }
    let Some(socket) = sockets.remove(&fd) else { return false };
    // It is a copy of what the parent uses, whose end would end the parent's connection, and a lock
    // in it may be held by a thread that is not here.
    mem::forget(socket);
    // SAFETY: the descriptor of the socket, which nobody closes any more.
    drop(unsafe { OwnedFd::from_raw_fd(fd) });
    true
}

/// What a socket is.
#[derive(Debug)]
pub(super) enum State {
    /// Of a stream: perhaps bound.
    New,
    Listening(Listener),
    /// The peer has not answered, or has not been heard of since it was answered.
    Connecting(Box<Connection>),
    Connected(Box<Connection>),
    /// Not connected any more, or connecting has failed.
    Ended,
    Datagrams(Box<Datagrams>),
}

/// A listener, and the requests that nobody has accepted.
#[derive(Debug)]
pub(super) struct Listener {
    number: Number,
    at: SocketAddr,
    most: usize,
    requests: VecDeque<(Number, ConnRequest)>,
}

impl Listener {
    pub(super) fn has_request(&self) -> bool {
        !self.requests.is_empty()
    }
}

/// What changes of a socket.
#[derive(Debug)]
pub(super) struct Inner {
    pub(super) options: Options,
    pub(super) non_blocking: bool,
    pub(super) local: Option<SocketAddr>,
    pub(super) remote: Option<SocketAddr>,
    port: Option<Port>,
    pub(super) state: State,
    /// `SO_ERROR`.
    pub(super) error: c_int,
    pub(super) maps: Maps,
    pub(super) is_read_shut: bool,
}

/// A socket.
#[derive(Debug)]
pub(super) struct Socket {
    /// Nothing is ever read there: it is the socket's number in the table of descriptors.
    fd: OwnedFd,
    pub(super) is_v4: bool,
    pub(super) is_datagram: bool,
    pub(super) signal: Arc<Signal>,
    /// The process that has made it.
    process: u32,
    inner: Mutex<Inner>,
}

/// Returns the device, or `ENODEV`.
pub(super) fn device() -> Result<(&'static Opened, PdId), c_int> {
    opened().zip(pd()).ok_or(libc::ENODEV)
}

/// The errno of a failed verb.
pub(super) fn errno(error: &bowline_verbs::Error) -> c_int {
    error.errno().0
}

impl Inner {
    fn new(options: Options) -> Self {
        Self {
            options,
            non_blocking: false,
            local: None,
            remote: None,
            port: None,
            state: State::New,
            error: 0,
            maps: Maps::default(),
            is_read_shut: false,
        }
    }

    /// The completion queue, if there is one.
    pub(super) fn cq(&self) -> Option<CqId> {
        match &self.state {
            State::Connecting(connection) | State::Connected(connection) => Some(connection.cq),
            State::Datagrams(datagrams) => datagrams.cq(),
            _ => None,
        }
    }

    fn fail(&mut self, errno: c_int) {
        self.error = errno;
        release(mem::replace(&mut self.state, State::Ended));
    }

    /// Takes a port and an address.
    pub(super) fn bind(&mut self, mut local: SocketAddr) -> Result<(), c_int> {
        let port = Port::take(local.port()).ok_or(libc::EADDRINUSE)?;
        local.set_port(port.number());
        (self.local, self.port) = (Some(local), Some(port));
        Ok(())
    }
}

impl Socket {
    /// # Errors
    /// `EMFILE` and the like.
    pub(super) fn new(is_v4: bool, is_datagram: bool) -> Result<Self, c_int> {
        let fd = eventfd(0, EventfdFlags::CLOEXEC).map_err(|errno| errno.raw_os_error())?;
        let mut inner = Inner::new(Options::new(is_datagram));
        if is_datagram {
            inner.state = State::Datagrams(Box::default());
        }
        let signal = Arc::default();
        let (process, inner) = (process::id(), Mutex::new(inner));
        Ok(Self { fd, is_v4, is_datagram, signal, process, inner })
    }

    /// Tells whether it is not a copy, in a child of `fork`, of its parent's.
    fn is_own(&self) -> bool {
        self.process == process::id()
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Inner> {
        lock(&self.inner)
    }

    /// Has the device's events come here.
    pub(super) fn learn(&self, opened: &Opened, number: Number) {
        let mut objects = lock(&opened.live.0);
        let early = objects.early.remove(&number.0);
        objects.sockets.add_number(number, &self.signal, early);
    }

    pub(super) fn learn_queue(&self, opened: &Opened, cq: CqId) {
        lock(&opened.live.0).sockets.add_queue(cq, &self.signal);
    }

    pub(super) fn forget(opened: &Opened, number: Option<Number>, cq: Option<CqId>) {
        let mut objects = lock(&opened.live.0);
        if let Some(number) = number {
            objects.sockets.remove_number(number);
            objects.early.remove(&number.0);
        }
        if let Some(cq) = cq {
            objects.sockets.remove_queue(cq);
        }
    }

    /// Has no more events of a listener come here, nor of its requests that were not accepted.
    pub(super) fn forget_listener(opened: &Opened, number: Number) {
        let mut objects = lock(&opened.live.0);
        objects.sockets.remove_listener(number);
        objects.early.remove(&number.0);
    }

    /// Takes in events of the connection manager; returns whether there were any.
    fn take_in_events(&self, inner: &mut Inner) -> bool {
        let mut were_any = false;
        while let Some(event) = self.signal.next_event() {
            self.happens(inner, event);
            were_any = true;
        }
        were_any
    }

    /// Takes in what has happened. Others that wait for the socket are woken if something has.
    pub(super) fn progress(&self, inner: &mut Inner, own: Option<&Arc<Waker>>) {
        let mut has_changed = self.take_in_events(inner);
        if self.signal.is_removed() && !matches!(inner.state, State::Ended) {
            inner.fail(libc::ENODEV);
            has_changed = true;
        }
        match &mut inner.state {
            State::Connected(connection) => {
                has_changed |= connection.progress();
                // The end of the connection may be among what was just read, and then it is why
                // requests have come back.
                has_changed |= self.take_in_events(inner);
                if let State::Connected(connection) = &mut inner.state {
                    connection.judge();
                }
            }
            State::Datagrams(datagrams) => {
                has_changed |= datagrams.progress();
                self.learn_lookups(datagrams);
            }
            _ => {}
        }
        if has_changed {
            self.signal.wake_others(own);
        }
    }

    /// Has events of lookups that have begun come here, and of those that are over no more.
    pub(super) fn learn_lookups(&self, datagrams: &mut Datagrams) {
        let Some(opened) = opened() else { return };
        datagrams.over.drain(..).for_each(|number| Self::forget(opened, Some(number), None));
        datagrams.begun.drain(..).for_each(|number| self.learn(opened, number));
    }

    /// Binds a socket of datagrams that is not bound yet, to any port.
    pub(super) fn bind_datagrams(&self) -> Result<(), c_int> {
        let is_bound = matches!(&self.lock().state, State::Datagrams(at) if at.is_bound());
        if is_bound { Ok(()) } else { self.bind(SocketAddr::new(self.unspecified(), 0)) }
    }

    /// Binds to an address; port 0 stands for any.
    ///
    /// # Errors
    /// `EINVAL`: it is bound; `EADDRNOTAVAIL`, `EADDRINUSE`.
    pub(super) fn bind(&self, at: SocketAddr) -> Result<(), c_int> {
        let (opened, pd) = device()?;
        if !at.ip().is_unspecified() && !is_own(at.ip()) {
            return Err(libc::EADDRNOTAVAIL);
        }
        let mut inner = self.lock();
        if inner.local.is_some() || !matches!(inner.state, State::New | State::Datagrams(_)) {
            return Err(libc::EINVAL);
        }
        // Another process may have the port that is free here.
        let tries = if at.port() == 0 { PORT_TRIES } else { 1 };
        let mut outcome = Err(libc::EADDRINUSE);
        for _ in 0..tries {
            inner.bind(at)?;
            let Inner { state, local, options, .. } = &mut *inner;
            let State::Datagrams(datagrams) = state else { return Ok(()) };
            outcome = datagrams.bind(opened, pd, local.unwrap_or(at), options);
            if outcome != Err(libc::EADDRINUSE) {
                break;
            }
        }
        match outcome {
            Ok((cq, number)) => {
                drop(inner);
                self.learn_queue(opened, cq);
                self.learn(opened, number);
                Ok(())
            }
            Err(errno) => {
                (inner.local, inner.port) = (None, None);
                Err(errno)
            }
        }
    }

    fn happens(&self, inner: &mut Inner, event: CmEvent) {
        match &mut inner.state {
            State::Listening(listener) => match event {
                CmEvent::ConnectRequest { id, request } => {
                    if listener.requests.len() < listener.most {
                        listener.requests.push_back((id, request));
                    } else {
                        refuse(id);
                    }
                }
                // A request that nobody has accepted has ended.
                event => {
                    let number = event.id();
                    listener.requests.retain(|(id, _)| *id != number);
                    if let Some(opened) = opened() {
                        Self::forget(opened, Some(number), None);
                    }
                }
            },
            State::Connecting(connection) => match event {
                CmEvent::Established { private_data, .. } => {
                    let is_known = connection.stream.is_some() || connection.greet(&private_data);
                    let is_there = is_known && !connection.is_broken;
                    if !is_there {
                        return inner.fail(libc::ECONNREFUSED);
                    }
                    if let State::Connecting(connection) =
                        mem::replace(&mut inner.state, State::Ended)
                    {
                        inner.state = State::Connected(connection);
                    }
                }
                CmEvent::Rejected { .. } => inner.fail(libc::ECONNREFUSED),
                CmEvent::Unreachable { .. } => inner.fail(libc::ETIMEDOUT),
                CmEvent::Disconnected { .. } => inner.fail(libc::ECONNRESET),
                _ => {}
            },
            State::Connected(connection) => {
                if let CmEvent::Disconnected { .. } = event {
                    connection.peer_has_gone();
                }
            }
            State::Datagrams(datagrams) => datagrams.happens(event),
            State::New | State::Ended => {}
        }
    }

    /// Tries until it is done; waits between, unless the socket or the call is not to.
    ///
    /// # Errors
    /// `EAGAIN`; `EMFILE` without a descriptor to wait with.
    pub(super) fn until<T>(
        &self,
        may_wait: bool,
        attempt: impl FnMut(&mut Inner) -> Option<T>,
    ) -> Result<T, c_int> {
        self.until_within(None, may_wait, attempt)
    }

    /// The same, with `ETIMEDOUT` after some time.
    fn until_within<T>(
        &self,
        limit: Option<Duration>,
        may_wait: bool,
        mut attempt: impl FnMut(&mut Inner) -> Option<T>,
    ) -> Result<T, c_int> {
        let end = limit.map(|limit| Instant::now() + limit);
        let mut inner = self.lock();
        self.progress(&mut inner, None);
        if let Some(done) = attempt(&mut inner) {
            return Ok(done);
        }
        if !may_wait || inner.non_blocking {
            return Err(libc::EAGAIN);
        }
        let waker = Waker::own().ok_or(libc::EMFILE)?;
        let _waiting = Waiting::new(&self.signal, &waker);
        let mut is_armed = false;
        loop {
            waker.clear();
            if is_armed {
                arm(&inner);
            }
            self.progress(&mut inner, Some(&waker));
            if let Some(done) = attempt(&mut inner) {
                return Ok(done);
            }
            let left = end.map_or(SLICE, |end| end.saturating_duration_since(Instant::now()));
            if left.is_zero() {
                return Err(libc::ETIMEDOUT);
            }
            let cq = inner.cq();
            drop(inner);
            is_armed = !wait_once(cq, &waker, is_armed, left.min(SLICE));
            inner = self.lock();
        }
    }

    /// Waits for what a connecting socket becomes.
    fn settle(&self) -> Result<(), c_int> {
        self.until(true, |inner| match inner.state {
            State::Connecting(_) => None,
            State::Connected(_) => Some(Ok(())),
            _ => Some(Err(take_error(&mut inner.error))),
        })?
    }

    pub(super) fn listen(&self, backlog: c_int) -> Result<(), c_int> {
        let (opened, _) = device()?;
        let mut inner = self.lock();
        let most = usize::try_from(backlog).unwrap_or(BACKLOG).clamp(1, BACKLOG);
        if let State::Listening(listener) = &mut inner.state {
            listener.most = most;
            return Ok(());
        }
        if !matches!(inner.state, State::New) {
            return Err(libc::EINVAL);
        }
        if inner.local.is_none() {
            inner.bind(SocketAddr::new(self.unspecified(), 0))?;
        }
        let at = inner.local.ok_or(libc::EINVAL)?;
        let number = listen(opened, PortSpace::Tcp, at)?;
        inner.state = State::Listening(Listener { number, at, most, requests: VecDeque::new() });
        drop(inner);
        self.learn(opened, number);
        Ok(())
    }

    pub(super) fn unspecified(&self) -> IpAddr {
        if self.is_v4 {
            std::net::Ipv4Addr::UNSPECIFIED.into()
        } else {
            std::net::Ipv6Addr::UNSPECIFIED.into()
        }
    }

    /// Accepts the next request of a socket's peer. The new socket is connected when the peer has
    /// heard of it, which calls on it wait for: here a peer that says nothing would keep others
    /// from being accepted.
    pub(super) fn accept(&self) -> Result<Self, c_int> {
        let (opened, pd) = device()?;
        loop {
            let (number, request) = self.until(true, |inner| match &mut inner.state {
                State::Listening(listener) => listener.requests.pop_front().map(Ok),
                _ => Some(Err(libc::EINVAL)),
            })??;
            let options = self.lock().options;
            let made = Self::new(self.is_v4, false).and_then(|new| {
                let made = Connection::new(opened, pd, &options);
                Ok((new, made.map_err(|error| errno(&error))?))
            });
            let (new, mut connection) = made.inspect_err(|_| refuse(number))?;
            if !connection.greet(&request.private_data) {
                refuse(number);
                continue;
            }
            new.learn_queue(opened, connection.cq);
            new.learn(opened, number);
            if opened.soft.accept(number, &connection.param()).is_err() {
                // The peer has given up.
                Self::forget(opened, Some(number), Some(connection.cq));
                continue;
            }
            connection.number = Some(number);
            let mut inner = new.lock();
            inner.options = options;
            (inner.local, inner.remote) = (Some(request.local), Some(request.remote));
            inner.state = State::Connecting(Box::new(connection));
            drop(inner);
            return Ok(new);
        }
    }

    pub(super) fn connect(&self, remote: SocketAddr) -> Result<(), c_int> {
        let (opened, pd) = device()?;
        let mut inner = self.lock();
        self.progress(&mut inner, None);
        match &inner.state {
            State::New => {}
            State::Connecting(_) => return Err(libc::EALREADY),
            State::Connected(_) => return Err(libc::EISCONN),
            _ => return Err(libc::EINVAL),
        }
        let ip = source(inner.local.map(|at| at.ip()), remote).ok_or(libc::ENETUNREACH)?;
        if inner.local.is_none() {
            inner.bind(SocketAddr::new(ip, 0))?;
        }
        let local = SocketAddr::new(ip, inner.local.map_or(0, |at| at.port()));
        let made = Connection::new(opened, pd, &inner.options);
        let mut connection = made.map_err(|error| errno(&error))?;
        self.learn_queue(opened, connection.cq);
        let asked = opened.soft.connect(Some(local), remote, &connection.param());
        let number = asked.map_err(|error| {
            Self::forget(opened, None, Some(connection.cq));
            errno(&error)
        })?;
        connection.number = Some(number);
        (inner.local, inner.remote) = (Some(local), Some(remote));
        inner.state = State::Connecting(Box::new(connection));
        let non_blocking = inner.non_blocking;
        drop(inner);
        self.learn(opened, number);
        if non_blocking { Err(libc::EINPROGRESS) } else { self.settle() }
    }

    pub(super) fn shutdown(&self, how: c_int) -> Result<(), c_int> {
        if ![libc::SHUT_RD, libc::SHUT_WR, libc::SHUT_RDWR].contains(&how) {
            return Err(libc::EINVAL);
        }
        // An accepted socket, which has a stream, is connected a moment later. The error of one
        // whose calls do not wait is that it is not connected.
        let _ = self.until(true, |inner| match &inner.state {
            State::Connecting(connection) if connection.stream.is_some() => None,
            _ => Some(()),
        });
        self.shut(how)
    }

    fn shut(&self, how: c_int) -> Result<(), c_int> {
        let mut inner = self.lock();
        self.progress(&mut inner, None);
        let State::Connected(connection) = &mut inner.state else { return Err(libc::ENOTCONN) };
        if how != libc::SHUT_RD {
            connection.shut(how == libc::SHUT_RDWR);
        }
        if how != libc::SHUT_WR {
            inner.is_read_shut = true;
        }
        self.signal.wake_others(None);
        Ok(())
    }

    /// Ends a socket that the program gives back. What was sent arrives first, if the peer is there
    /// [RSK-8].
    pub(super) fn close(&self) {
        if self.shut(libc::SHUT_RDWR).is_ok() {
            let sent = |inner: &mut Inner| match &inner.state {
                State::Connected(connection) => connection.is_all_sent().then_some(()),
                _ => Some(()),
            };
            self.lock().non_blocking = false;
            // What is not sent by then is lost.
            let _ = self.until_within(Some(CLOSE_LIMIT), true, sent);
        }
        self.end();
    }

    /// Ends what the socket has of the device.
    fn end(&self) {
        let mut inner = self.lock();
        let state = mem::replace(&mut inner.state, State::Ended);
        inner.maps = Maps::default();
        inner.port = None;
        drop(inner);
        release(state);
        self.signal.wake_others(None);
    }
}

/// Takes the error of a socket that has ended.
pub(super) fn take_error(error: &mut c_int) -> c_int {
    match mem::take(error) {
        0 => libc::ENOTCONN,
        errno => errno,
    }
}

/// Gives back what a socket has of the device.
fn release(state: State) {
    let Some(opened) = opened() else { return };
    match state {
        State::Listening(listener) => {
            if let Some(guest) = &opened.guest {
                guest.unlisten(PortSpace::Tcp, listener.at);
            }
            // Its requests end with it.
            let _ = opened.soft.destroy_id(listener.number);
            Socket::forget_listener(opened, listener.number);
        }
        State::Connecting(connection) | State::Connected(connection) => {
            let (number, cq) = (connection.number, connection.cq);
            drop(connection);
            Socket::forget(opened, number, Some(cq));
        }
        State::Datagrams(datagrams) => datagrams.end(opened),
        State::New | State::Ended => {}
    }
}

/// Listens at an address, among all processes that share it.
pub(super) fn listen(opened: &Opened, space: PortSpace, at: SocketAddr) -> Result<Number, c_int> {
    let listen = || match space {
        PortSpace::Tcp => opened.soft.listen(at),
        PortSpace::Udp => opened.soft.listen_datagrams(at),
    };
    let number = match &opened.guest {
        // Requests come to the host first, which has to know whose they are.
        Some(guest) => guest
            .listen(space, at)
            .and_then(|()| listen().inspect_err(|_| guest.unlisten(space, at))),
        None => listen(),
    };
    number.map_err(|error| errno(&error))
}

fn refuse(number: Number) {
    if let Some(opened) = opened() {
        // One that has ended needs no answer.
        let _ = opened.soft.reject_for(number, RejectReason::CONSUMER, &[]);
        Socket::forget(opened, Some(number), None);
    }
}

/// Has the next completion wake those that wait.
pub(super) fn arm(inner: &Inner) {
    if let (Some(opened), Some(cq)) = (opened(), inner.cq()) {
        // Of a device that is gone there is another notice.
        let _ = opened.soft.notify_cq(cq, false);
    }
}

/// Waits until something has happened: in the device's own way, or for a socket that is armed by
/// the descriptor alone. `false`: the socket has to be armed, since another thread reads for it.
pub(super) fn wait_once(cq: Option<CqId>, waker: &Waker, is_armed: bool, limit: Duration) -> bool {
    if !is_armed && let (Some(opened), Some(cq)) = (opened(), cq) {
        return matches!(opened.soft.wait_cq_or(cq, waker.fd(), limit), Ok(Some(_)));
    }
    if !is_armed && cq.is_some() {
        return false;
    }
    // A signal is no reason to return: it is as if nothing had happened.
    let _ = waker.wait(Some(limit));
    true
}
