//! Sockets on which the node's threads have seen something happen, for the host's thread.

use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::Wake;

use rustix::event::{EventfdFlags, eventfd};

/// The list, and a descriptor that is readable while it is not empty.
#[derive(Debug)]
pub(crate) struct Ready {
    list: Mutex<Vec<u64>>,
    bell: OwnedFd,
}

impl Ready {
    pub(crate) fn new() -> std::io::Result<Self> {
        let bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self { list: Mutex::new(Vec::new()), bell })
    }

    pub(crate) fn bell(&self) -> &OwnedFd {
        &self.bell
    }

    pub(crate) fn push(&self, handle: u64) {
        let mut list = self.list.lock().unwrap_or_else(PoisonError::into_inner);
        list.push(handle);
        if list.len() == 1 {
            // It cannot be full: it is emptied with the list.
            let _ = rustix::io::write(&self.bell, &1u64.to_ne_bytes());
        }
    }

    pub(crate) fn take(&self) -> Vec<u64> {
        let mut list = self.list.lock().unwrap_or_else(PoisonError::into_inner);
        let _ = rustix::io::read(&self.bell, &mut [0; 8]);
        std::mem::take(&mut *list)
    }
}

/// What wakes the host's thread for one socket.
#[derive(Debug)]
pub(crate) struct SocketWaker {
    pub(crate) handle: u64,
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
