//! The socket calls: one attempt under the lock, and waiting if it fails.

use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::{Arc, MutexGuard};
use std::task::{Context, Poll};

use bowline_base::clock;
use bowline_rds::{
    Error as CoreError, Instant, Interest, LinkId, Node, Readiness, Received, ReceivedInto,
    RecvOpts, Rope, SendMsg, Sent, SocketId,
};
use bowline_wait::Leader;

use crate::driver::Blocking;
use crate::error::Error;
use crate::poller::{Attempt, WaitRequest};
use crate::read::PARSE_BUDGET;
use crate::shared::{Shared, State};
use crate::sys;

/// Tells whether a call that failed with `error` may succeed later.
fn is_transient(error: CoreError) -> bool {
    matches!(
        error,
        CoreError::QueueFull
            | CoreError::Congested
            | CoreError::HandshakePending
            | CoreError::Empty
    )
}

fn attempt<T>(result: Result<T, CoreError>) -> Attempt<Result<T, CoreError>> {
    match result {
        Err(error) if is_transient(error) => Attempt::Again,
        done => Attempt::Done(done),
    }
}

impl Shared {
    fn deadline(&self, blocking: Blocking) -> Option<u64> {
        match blocking {
            Blocking::For(limit) => {
                let limit = u64::try_from(limit.as_nanos()).unwrap_or(u64::MAX);
                Some(clock::now().as_nanos().saturating_add(limit))
            }
            Blocking::Never | Blocking::Forever => None,
        }
    }

    /// Does the work left after a call; usually none.
    #[inline]
    fn finish(&self, mut st: MutexGuard<'_, State>, flush: Option<LinkId>, own: Option<LinkId>) {
        let arm = own.is_some() && Self::arm_flush(&mut st);
        if let Some(output) = st.core.poll_output() {
            self.with_scratch(|sc| {
                self.collect_one(&mut st, sc, own, output);
                self.collect(&mut st, sc, own);
                drop(st);
                sc.todo.flush.extend(flush);
                sc.todo.wake_helper |= arm;
                self.run(sc);
            });
        } else if arm || flush.is_some() {
            drop(st);
            self.with_scratch(|sc| {
                sc.todo.flush.extend(flush);
                sc.todo.wake_helper |= arm;
                self.run(sc);
            });
        }
    }

    fn finish_send(&self, mut st: MutexGuard<'_, State>, sent: Sent) -> usize {
        st.bytes_copied.0 += sent.len as u64;
        st.calls += 1;
        let flush = self.gather(&mut st, &sent);
        self.finish(st, flush, sent.link);
        sent.len
    }

    pub(crate) fn send(
        &self,
        id: SocketId,
        msg: &SendMsg<'_>,
        blocking: Blocking,
    ) -> Result<usize, Error> {
        let mut st = self.lock();
        if st.stop {
            return Err(Error::ShutDown);
        }
        let now = st.at(clock::now_coarse());
        let error = match st.core.send(now, id, msg) {
            Ok(sent) => return Ok(self.finish_send(st, sent)),
            Err(error) => error,
        };
        let may_poll = blocking != Blocking::Never || self.may_poll_once(&mut st);
        self.finish(st, None, None);
        if !is_transient(error) {
            return Err(error.into());
        }
        let request =
            WaitRequest { id, interest: Interest::WRITE, deadline: self.deadline(blocking) };
        let mut again = |st: &mut State, now: Instant| attempt(st.core.send(now, id, msg));
        let sent = if blocking == Blocking::Never {
            let polled =
                if may_poll { self.poll_once(request, &mut again) } else { Attempt::Again };
            match self.or_rearm(polled, request, again) {
                Attempt::Done(done) => done?,
                Attempt::Again => return Err(error.into()),
            }
        } else {
            self.wait(request, again)??
        };
        Ok(self.finish_send(self.lock(), sent))
    }

    /// Sends messages until one would have to wait; only the first one waits.
    pub(crate) fn send_batch<'a>(
        &self,
        id: SocketId,
        msgs: impl Iterator<Item = (Option<SocketAddr>, &'a [u8])>,
        blocking: Blocking,
    ) -> Result<usize, Error> {
        let mut count = 0;
        let may_wait = blocking != Blocking::Never;
        for (name, payload) in msgs {
            let payload = [std::io::IoSlice::new(payload)];
            let msg = SendMsg { name, payload: &payload, blocking: may_wait, ..SendMsg::default() };
            let blocking = if count == 0 { blocking } else { Blocking::Never };
            match self.send(id, &msg, blocking) {
                Ok(_) => count += 1,
                Err(error) if count == 0 => return Err(error),
                Err(_) => break,
            }
        }
        Ok(count)
    }

    /// Takes a message from the core, after parsing received bytes if needed. `len` returns the
    /// payload bytes of the message.
    #[inline]
    fn take_with<T>(
        st: &mut State,
        id: SocketId,
        mut once: impl FnMut(&mut Node) -> Result<T, CoreError>,
        len: impl Fn(&T) -> usize,
    ) -> Result<T, CoreError> {
        let result = match once(&mut st.core) {
            Err(CoreError::Empty) if st.core.has_backlog() => {
                let now = st.now;
                let until = st.parked.is_empty().then_some(id);
                st.core.process(now, until, PARSE_BUDGET);
                once(&mut st.core)
            }
            done => done,
        };
        if let Ok(taken) = &result {
            st.calls += 1;
            st.bytes_copied.1 += len(taken) as u64;
        }
        result
    }

    #[inline]
    fn take(
        st: &mut State,
        now: Instant,
        id: SocketId,
        opts: RecvOpts,
    ) -> Result<Received, CoreError> {
        let len = |received: &Received| received.data.as_ref().map_or(0, Rope::len);
        Self::take_with(st, id, |core| core.recv(now, id, opts), len)
    }

    pub(crate) fn recv(
        &self,
        id: SocketId,
        opts: RecvOpts,
        blocking: Blocking,
    ) -> Result<Received, Error> {
        self.receive(id, blocking, |st, now| Self::take(st, now, id, opts))
    }

    /// Receives a message into `buf`; returns the number of bytes copied and the sender.
    pub(crate) fn recv_into(
        &self,
        id: SocketId,
        buf: &mut [u8],
        blocking: Blocking,
    ) -> Result<(usize, SocketAddr), Error> {
        let taken = self.receive(id, blocking, |st, now| {
            Self::take_with(st, id, |core| core.recv_into(now, id, buf), |taken| taken.len)
        })?;
        Ok(Self::copied(taken, buf))
    }

    /// Takes a message with `take`, or waits for one.
    #[inline]
    fn receive<T>(
        &self,
        id: SocketId,
        blocking: Blocking,
        mut take: impl FnMut(&mut State, Instant) -> Result<T, CoreError>,
    ) -> Result<T, Error> {
        let mut st = self.lock();
        if st.stop {
            return Err(Error::ShutDown);
        }
        let now = st.now;
        match take(&mut st, now) {
            Err(CoreError::Empty) => {}
            done => {
                self.finish(st, None, None);
                return Ok(done?);
            }
        }
        drop(st);
        let request =
            WaitRequest { id, interest: Interest::READ, deadline: self.deadline(blocking) };
        let mut again = |st: &mut State, now: Instant| attempt(take(st, now));
        if blocking == Blocking::Never {
            let polled = self.poll_once(request, &mut again);
            match self.or_rearm(polled, request, again) {
                Attempt::Done(done) => Ok(done?),
                Attempt::Again => Err(CoreError::Empty.into()),
            }
        } else {
            Ok(self.wait(request, again)??)
        }
    }

    /// Receives up to `max` messages, waiting for the first only.
    pub(crate) fn recv_batch(
        &self,
        id: SocketId,
        opts: RecvOpts,
        max: usize,
        blocking: Blocking,
        mut each: impl FnMut(Received),
    ) -> Result<usize, Error> {
        if max == 0 {
            return Ok(0);
        }
        each(self.recv(id, opts, blocking)?);
        let mut st = self.lock();
        let now = st.now;
        let mut count = 1;
        while count < max {
            let Ok(received) = Self::take(&mut st, now, id, opts) else { break };
            each(received);
            count += 1;
        }
        self.finish(st, None, None);
        Ok(count)
    }

    /// Waits until `done` is true of the core.
    pub(crate) fn wait_until(
        &self,
        id: SocketId,
        interest: Interest,
        blocking: Blocking,
        mut done: impl FnMut(&mut State) -> Result<bool, CoreError>,
    ) -> Result<(), Error> {
        let request = WaitRequest { id, interest, deadline: self.deadline(blocking) };
        let mut attempt = |st: &mut State, _: Instant| match done(st) {
            Ok(false) => Attempt::Again,
            Ok(true) => Attempt::Done(Ok(())),
            Err(error) => Attempt::Done(Err(error)),
        };
        if blocking == Blocking::Never {
            let polled = self.poll_once(request, &mut attempt);
            return match self.or_rearm(polled, request, attempt) {
                Attempt::Done(done) => Ok(done?),
                Attempt::Again => Err(Error::TimedOut),
            };
        }
        Ok(self.wait(request, &mut attempt)??)
    }

    /// Makes one attempt for a task. If it fails, the task is woken when another may succeed.
    pub(crate) fn poll<T>(
        &self,
        id: SocketId,
        interest: Interest,
        cx: &Context<'_>,
        mut once: impl FnMut(&mut State, Instant) -> Result<T, CoreError>,
    ) -> Poll<Result<T, Error>> {
        self.with_scratch(|sc| {
            let mut st = self.lock();
            if st.stop {
                return Poll::Ready(Err(Error::ShutDown));
            }
            let now = st.at(clock::now());
            match once(&mut st, now) {
                Err(error) if is_transient(error) => {}
                done => {
                    self.release_and_run(st, sc);
                    return Poll::Ready(done.map_err(Error::from));
                }
            }
            if let Err(error) = st.core.register(id, interest) {
                self.release_and_run(st, sc);
                return Poll::Ready(Err(error.into()));
            }
            let slot = st.socket_slot(id);
            match slot.wakers.iter_mut().find(|(_, waker)| waker.will_wake(cx.waker())) {
                Some((known, _)) => *known = *known | interest,
                None => slot.wakers.push((interest, cx.waker().clone())),
            }
            let newly = !core::mem::replace(&mut slot.watched, true);
            if newly {
                st.watched += 1;
            }
            if newly || st.lead.leader() == Leader::Nobody {
                sc.todo.wake_helper = true;
            }
            self.collect_dirty(&mut st, sc, 0);
            if interest.contains(Interest::WRITE) {
                st.check_tcp_acks_soon();
            }
            self.release_and_run(st, sc);
            Poll::Pending
        })
    }

    pub(crate) fn poll_send(
        &self,
        id: SocketId,
        msg: &SendMsg<'_>,
        cx: &Context<'_>,
    ) -> Poll<Result<usize, Error>> {
        let sent = self.poll(id, Interest::WRITE, cx, |st, now| st.core.send(now, id, msg));
        sent.map(|sent| sent.map(|sent| self.finish_send(self.lock(), sent)))
    }

    pub(crate) fn poll_recv(
        &self,
        id: SocketId,
        opts: RecvOpts,
        cx: &Context<'_>,
    ) -> Poll<Result<Received, Error>> {
        self.poll(id, Interest::READ, cx, |st, now| Self::take(st, now, id, opts))
    }

    pub(crate) fn poll_recv_into(
        &self,
        id: SocketId,
        buf: &mut [u8],
        cx: &Context<'_>,
    ) -> Poll<Result<(usize, SocketAddr), Error>> {
        let taken = self.poll(id, Interest::READ, cx, |st, now| {
            Self::take_with(st, id, |core| core.recv_into(now, id, buf), |taken| taken.len)
        });
        taken.map_ok(|taken| Self::copied(taken, buf))
    }

    /// Copies what is not in the buffer yet; returns the number of bytes there and the sender.
    #[inline]
    fn copied(taken: ReceivedInto, buf: &mut [u8]) -> (usize, SocketAddr) {
        let len = match taken.data {
            Some(data) => data.copy_to(buf),
            None => taken.len.min(buf.len()),
        };
        (len, taken.source)
    }

    /// Lends messages to a reader; see [`Node::lend`].
    pub(crate) fn poll_lend(
        &self,
        id: SocketId,
        cx: &Context<'_>,
        mut put: impl FnMut(SocketAddr, usize, &mut dyn Iterator<Item = &[u8]>) -> bool,
    ) -> Poll<Result<usize, Error>> {
        self.poll(id, Interest::READ, cx, |st, now| {
            Self::take_with(st, id, |core| core.lend(now, id, &mut put), |_| 0)
        })
    }

    pub(crate) fn poll_ready(
        &self,
        id: SocketId,
        interest: Interest,
        cx: &Context<'_>,
    ) -> Poll<Result<Readiness, Error>> {
        let read = interest.contains(Interest::READ);
        let write = interest.contains(Interest::WRITE);
        self.poll(id, interest, cx, |st, _| {
            let ready = st.core.readiness(id)?;
            let is_ready = read && ready.readable || write && ready.writable;
            if is_ready { Ok(ready) } else { Err(CoreError::Empty) }
        })
    }

    pub(crate) fn poll_flush(&self, id: SocketId, cx: &Context<'_>) -> Poll<Result<(), Error>> {
        self.poll(id, Interest::WRITE, cx, |st, _| {
            if st.core.is_flushed(id)? { Ok(()) } else { Err(CoreError::QueueFull) }
        })
    }

    /// Has the event descriptor of a socket, if there is one, show the next change after a call
    /// that would have to wait, and tries that call once more. All of it happens under one lock, or
    /// a change that comes meanwhile would not be shown.
    fn or_rearm<T>(
        &self,
        polled: Attempt<T>,
        request: WaitRequest,
        mut again: impl FnMut(&mut State, Instant) -> Attempt<T>,
    ) -> Attempt<T> {
        let WaitRequest { id, interest, .. } = request;
        if matches!(polled, Attempt::Done(_)) {
            return polled;
        }
        let mut st = self.lock();
        let Some(fd) = st.find_socket(id).and_then(|slot| slot.event_fd.clone()) else {
            return polled;
        };
        let _ = st.core.register(id, interest | Interest::READ);
        let now = st.now;
        let result = again(&mut st, now);
        let readable = st.core.readiness(id).is_ok_and(|ready| ready.readable);
        if let Some(slot) = st.find_socket(id) {
            // A receive that finds nothing leaves the news for a refused send once: the program may
            // not have tried that send since, and is about to wait. The next such receive takes it
            // away, or a program that no longer wants to send would never wait again.
            let keeps = core::mem::take(&mut slot.may_send) && !interest.contains(Interest::WRITE);
            if slot.signalled && !readable && !keeps {
                slot.signalled = false;
                self.stats.eventfds.inc();
                sys::unsignal(&fd);
            }
        }
        self.with_scratch(|sc| self.release_and_run(st, sc));
        result
    }

    /// Returns the event descriptor of a socket, and makes it at the first request.
    pub(crate) fn event_fd(&self, id: SocketId) -> Result<Arc<OwnedFd>, Error> {
        let new = Arc::new(sys::event_fd().map_err(Error::os("making an event descriptor"))?);
        let mut st = self.lock();
        st.core.register(id, Interest::READ)?;
        let readable = st.core.readiness(id)?.readable;
        let slot = st.socket_slot(id);
        if let Some(fd) = &slot.event_fd {
            return Ok(Arc::clone(fd));
        }
        slot.event_fd = Some(Arc::clone(&new));
        slot.signalled = readable;
        if !core::mem::replace(&mut slot.watched, true) {
            st.watched += 1;
        }
        if readable {
            sys::signal(&new);
        }
        self.with_scratch(|sc| {
            sc.todo.wake_helper = true;
            self.release_and_run(st, sc);
        });
        Ok(new)
    }

    /// Closes a socket; its waiting callers get an error. What it sent and was only gathered is
    /// written before, as far as TCP takes it: a kernel's socket would have written it.
    pub(crate) fn close(&self, id: SocketId) {
        self.with_scratch(|sc| {
            let mut st = self.lock();
            if !st.dirty.is_empty() {
                self.collect_dirty(&mut st, sc, 0);
                self.release_and_run(st, sc);
                st = self.lock();
            }
            let now = st.at(clock::now());
            st.core.close(now, id);
            let slot = st.find_socket(id).map(core::mem::take).unwrap_or_default();
            if slot.watched {
                st.watched -= 1;
            }
            for entry in slot.entries {
                if entry.waiter.mark() {
                    sc.todo.unpark.push(entry.waiter);
                    sc.todo.kick |= st.lead.is_asleep() && st.lead.leader() == Leader::Application;
                }
            }
            sc.todo.wakers.extend(slot.wakers.into_iter().map(|(_, waker)| waker));
            self.release_and_run(st, sc);
        });
    }
}
