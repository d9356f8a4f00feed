//! Actions decided under the lock and carried out after it is released.

use std::cell::Cell;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::OwnedFd;
use std::sync::{Arc, MutexGuard, PoisonError};
use std::task::Waker;

use bowline_rds::{CloseHow, LinkId, RdmaLinkId, RxBufMut, SocketId, TxBatch};
use bowline_wait::Waiter;
use rustix::event::epoll;

use crate::link::Link;
use crate::listen::Listener;
use crate::rdma::Posts;
use crate::shared::{LinkTimer, Shared, State};
use crate::sys;

/// Pending system calls and wake-ups. The vectors keep their memory, so that nothing is allocated
/// per message.
#[derive(Debug, Default)]
pub(crate) struct Todo {
    pub(crate) kick: bool,
    pub(crate) wake_helper: bool,
    pub(crate) unpark: Vec<Arc<Waiter>>,
    pub(crate) wakers: Vec<Waker>,
    pub(crate) signal: Vec<Arc<OwnedFd>>,
    pub(crate) flush: Vec<LinkId>,
    pub(crate) read: Vec<Arc<Link>>,
    pub(crate) accept: Vec<Arc<Listener>>,
    pub(crate) connected: Vec<Arc<Link>>,
    pub(crate) connect: Vec<(LinkId, IpAddr, SocketAddr, u8)>,
    pub(crate) close: Vec<(Arc<Link>, CloseHow)>,
    pub(crate) drain: Vec<LinkId>,
    pub(crate) cut: Vec<LinkId>,
    pub(crate) end_cuts: bool,
    pub(crate) due: Vec<(LinkId, LinkTimer)>,
    pub(crate) forget: Vec<OwnedFd>,
    pub(crate) probe: Vec<Arc<Link>>,
    pub(crate) post: Vec<RdmaLinkId>,
    pub(crate) resume: Vec<RdmaLinkId>,
    pub(crate) used: Vec<u64>,
    pub(crate) release: Vec<u64>,
    /// Events for the log, each with the number of those that were left out before it.
    #[cfg(feature = "tracing")]
    pub(crate) log: Vec<(bowline_rds::Event, u64)>,
}

/// Memory that a thread reuses.
pub(crate) struct Scratch {
    pub(crate) me: Arc<Waiter>,
    pub(crate) todo: Todo,
    pub(crate) batch: TxBatch,
    pub(crate) posts: Posts,
    pub(crate) events: Vec<epoll::Event>,
    pub(crate) ids: Vec<LinkId>,
    pub(crate) rx: Option<RxBufMut>,
    /// Parsing stops once this socket has a message.
    pub(crate) until: Option<SocketId>,
    /// This thread sleeps on the network.
    pub(crate) sleeps: bool,
    /// This thread does the work of the background thread between its calls, so that it need not be
    /// woken.
    pub(crate) is_background: bool,
    /// There is something for another turn of the background thread's work.
    pub(crate) wants_turn: bool,
    /// This thread came to send, and reads acknowledgements in passing, once per call.
    pub(crate) reads_acks: bool,
}

impl Scratch {
    fn new() -> Self {
        Self {
            me: Arc::new(Waiter::current()),
            todo: Todo::default(),
            batch: TxBatch::default(),
            posts: Posts::default(),
            events: Vec::with_capacity(64),
            ids: Vec::new(),
            rx: None,
            until: None,
            sleeps: false,
            is_background: false,
            wants_turn: false,
            reads_acks: false,
        }
    }
}

thread_local! {
    static SCRATCH: Cell<Option<Box<Scratch>>> = const { Cell::new(None) };
}

impl Shared {
    /// Runs `f` with this thread's reusable memory. If a waker called from `f` calls this again, it
    /// gets fresh memory.
    pub(crate) fn with_scratch<R>(&self, f: impl FnOnce(&mut Scratch) -> R) -> R {
        let kept = SCRATCH.try_with(Cell::take).ok().flatten();
        let mut sc = kept.unwrap_or_else(|| Box::new(Scratch::new()));
        let result = f(&mut sc);
        sc.until = None;
        sc.reads_acks = false;
        self.put_back(&mut sc);
        // If the thread is ending and its storage is gone, the memory is freed.
        let _ = SCRATCH.try_with(|cell| cell.set(Some(sc)));
        result
    }

    /// Returns an unused read buffer to this node.
    fn put_back(&self, sc: &mut Scratch) {
        if let Some(rx) = sc.rx.take() {
            self.rx.lock().unwrap_or_else(PoisonError::into_inner).put_back(rx);
        }
    }

    /// Releases the lock and carries out the core's requests, until it has no more.
    pub(crate) fn release_and_run(&self, mut st: MutexGuard<'_, State>, sc: &mut Scratch) {
        self.collect(&mut st, sc, None);
        drop(st);
        self.run(sc);
    }

    /// Carries out the to-do list, and the requests that result.
    pub(crate) fn run(&self, sc: &mut Scratch) {
        loop {
            self.run_wakes(sc);
            // First send answers, then read questions, then do the slow actions.
            if let Some(id) = sc.todo.flush.pop() {
                self.flush(sc, id);
            } else if let Some(id) = sc.todo.post.pop() {
                self.post_sends(sc, id);
            } else if let Some(tag) = sc.todo.used.pop() {
                self.withdraw_region(tag);
            } else if let Some(tag) = sc.todo.release.pop() {
                self.release_region(tag);
            } else if let Some(id) = sc.todo.resume.pop() {
                self.resume_receives(sc, id);
            } else if let Some(link) = sc.todo.read.pop() {
                self.read(sc, &link);
            } else if let Some(link) = sc.todo.connected.pop() {
                self.connected(sc, &link);
            } else if let Some((link, how)) = sc.todo.close.pop() {
                self.stats.setups.inc();
                link.close(&self.epoll, how);
            } else if let Some((id, local, remote, port_mod8)) = sc.todo.connect.pop() {
                self.dial(sc, id, local, remote, port_mod8);
            } else if let Some(listener) = sc.todo.accept.pop() {
                self.accept(sc, &listener);
            } else if let Some(id) = sc.todo.drain.pop() {
                self.drain(sc, id);
            } else if !sc.todo.cut.is_empty() {
                self.begin_cuts(sc);
            } else if core::mem::take(&mut sc.todo.end_cuts) {
                self.end_cuts(sc);
            } else if let Some(fd) = sc.todo.forget.pop() {
                drop(fd);
            } else if let Some((id, what)) = sc.todo.due.pop() {
                match what {
                    LinkTimer::GiveUp => self.cut(sc, id),
                    LinkTimer::CheckAgain => self.check_again(sc, id),
                }
            } else if let Some(link) = sc.todo.probe.pop() {
                self.check_alive(sc, &link);
            } else {
                return;
            }
        }
    }

    fn run_wakes(&self, sc: &mut Scratch) {
        let todo = &mut sc.todo;
        if core::mem::take(&mut todo.kick) {
            self.stats.eventfds.inc();
            self.stats.hand_overs.inc();
            sys::signal(&self.kick);
        }
        let wake_helper = core::mem::take(&mut todo.wake_helper);
        sc.wants_turn |= wake_helper;
        if wake_helper && !sc.is_background {
            self.stats.eventfds.inc();
            self.stats.hand_overs.inc();
            sys::signal(&self.helper_kick);
        }
        while let Some(waiter) = todo.unpark.pop() {
            self.stats.hand_overs.inc();
            waiter.unpark();
        }
        while let Some(fd) = todo.signal.pop() {
            self.stats.eventfds.inc();
            sys::signal(&fd);
        }
        #[cfg(feature = "tracing")]
        for (event, left_out) in core::mem::take(&mut todo.log) {
            crate::log::tell(&event, left_out);
        }
        while let Some(waker) = todo.wakers.pop() {
            self.stats.hand_overs.inc();
            waker.wake();
        }
    }
}
