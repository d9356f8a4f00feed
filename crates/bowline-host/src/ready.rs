//! Sockets on which the node's threads have seen something happen, for the host's thread, and who
//! waits until it has released what programs have taken.

use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Wake;

use bowline_host_wire::SocketHandle;
use bowline_rds_driver::Lender;

use crate::core::LOOK;

/// What wakes the host's thread.
pub trait Bell: Send + Sync + 'static {
    /// Wakes it, now or when it is about to sleep.
    fn ring(&self);
    /// It has been woken.
    fn silence(&self);
}

/// The list, and what wakes the host's thread when something comes on it.
#[derive(Debug)]
pub(crate) struct Ready<B> {
    list: Mutex<List>,
    bell: B,
}

#[derive(Debug, Default)]
struct List {
    handles: Vec<SocketHandle>,
    inspectors: Vec<Inspector>,
    /// The host's thread has ended.
    has_ended: bool,
    /// The host's thread sleeps, and has not been woken.
    asleep: bool,
}

/// A thread that waits until this is dropped: it wants to see receive queues as they are.
pub(crate) type Inspector = Sender<()>;

impl<B: Bell> Ready<B> {
    pub(crate) fn new(bell: B) -> Self {
        Self { list: Mutex::new(List::default()), bell }
    }

    pub(crate) const fn bell(&self) -> &B {
        &self.bell
    }

    fn list(&self) -> MutexGuard<'_, List> {
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn push(&self, handle: SocketHandle) {
        let mut list = self.list();
        list.handles.push(handle);
        self.wake(&mut list);
    }

    fn wake(&self, list: &mut List) {
        if std::mem::take(&mut list.asleep) {
            self.bell.ring();
        }
    }

    /// Wakes the host's thread, or keeps it from falling asleep.
    pub(crate) fn ring(&self) {
        // No socket has this handle.
        self.push(SocketHandle(0));
    }

    pub(crate) fn take(&self) -> (Vec<SocketHandle>, Vec<Inspector>) {
        let mut list = self.list();
        (std::mem::take(&mut list.handles), std::mem::take(&mut list.inspectors))
    }

    /// Nobody waits for the host's thread from now on: it has ended.
    pub(crate) fn end(&self) {
        let mut list = self.list();
        list.has_ended = true;
        list.inspectors.clear();
    }

    /// The host's thread is about to sleep. Returns `false` when there is something on the list.
    pub(crate) fn sleep(&self) -> bool {
        let mut list = self.list();
        list.asleep = list.handles.is_empty() && list.inspectors.is_empty();
        list.asleep
    }

    /// The host's thread is awake.
    pub(crate) fn wake_up(&self) {
        if !std::mem::take(&mut self.list().asleep) {
            self.bell.silence();
        }
    }
}

impl<B: Bell> Lender for Ready<B> {
    /// Waits no longer than the host's thread takes to look by itself.
    fn give_back(&self) {
        let (inspector, given_back) = channel();
        {
            let mut list = self.list();
            if list.has_ended {
                return;
            }
            list.inspectors.push(inspector);
            self.wake(&mut list);
        }
        // Nothing is sent: the wait ends when the other end is dropped.
        let _ = given_back.recv_timeout(LOOK);
    }
}

/// What wakes the host's thread for one socket.
#[derive(Debug)]
pub(crate) struct SocketWaker<B> {
    pub(crate) handle: SocketHandle,
    pub(crate) ready: Arc<Ready<B>>,
}

impl<B: Bell> Wake for SocketWaker<B> {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.ready.push(self.handle);
    }
}
