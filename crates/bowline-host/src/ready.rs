//! Sockets on which the node's threads have seen something happen, for the host's thread.

use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Wake;

use bowline_host_wire::SocketHandle;
use rustix::event::{EventfdFlags, eventfd};

/// The list, and a descriptor that wakes the host's thread when something comes on it.
#[derive(Debug)]
pub(crate) struct Ready {
    list: Mutex<List>,
    bell: OwnedFd,
}

#[derive(Debug, Default)]
struct List {
    handles: Vec<SocketHandle>,
    /// The host's thread sleeps, and has not been woken.
    asleep: bool,
}

impl Ready {
    pub(crate) fn new() -> std::io::Result<Self> {
        let bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self { list: Mutex::new(List::default()), bell })
    }

    pub(crate) fn bell(&self) -> &OwnedFd {
        &self.bell
    }

    fn list(&self) -> MutexGuard<'_, List> {
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn push(&self, handle: SocketHandle) {
        let mut list = self.list();
        list.handles.push(handle);
        if std::mem::take(&mut list.asleep) {
            // It cannot be full: it is emptied at each awakening.
            let _ = rustix::io::write(&self.bell, &1u64.to_ne_bytes());
        }
    }

    /// Wakes the host's thread, or keeps it from falling asleep.
    pub(crate) fn ring(&self) {
        // No socket has this handle.
        self.push(SocketHandle(0));
    }

    pub(crate) fn take(&self) -> Vec<SocketHandle> {
        std::mem::take(&mut self.list().handles)
    }

    /// The host's thread is about to sleep. Returns `false` when there is something on the list.
    pub(crate) fn sleep(&self) -> bool {
        let mut list = self.list();
        list.asleep = list.handles.is_empty();
        list.asleep
    }

    /// The host's thread is awake.
    pub(crate) fn wake_up(&self) {
        if !std::mem::take(&mut self.list().asleep) {
            let _ = rustix::io::read(&self.bell, &mut [0; 8]);
        }
    }
}

/// What wakes the host's thread for one socket.
#[derive(Debug)]
pub(crate) struct SocketWaker {
    pub(crate) handle: SocketHandle,
    pub(crate) ready: Arc<Ready>,
}

impl Wake for SocketWaker {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.ready.push(self.handle);
    }
}
