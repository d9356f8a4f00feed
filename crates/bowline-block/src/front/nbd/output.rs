//! Replies on their way to a client.

use std::collections::VecDeque;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::SendFlags;

use super::reply::Head;
use super::requests::{Place, Requests};
use crate::front::sys;

/// How often the writing thread checks whether it is wanted still, while a client does not read.
const FULL_POLL: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };
/// Most replies of one system call; each has a head, and perhaps data or a tail.
const BATCH: usize = 32;

/// A reply with the memory of its data, which is given back once it was sent.
#[derive(Debug)]
pub(super) struct Reply {
    pub(super) head: Head,
    /// What follows the head of a reply without data.
    pub(super) tail: Box<[u8]>,
    pub(super) place: Place,
    /// Length of the data in bytes.
    pub(super) len: u32,
    /// The data is sent with the reply.
    pub(super) has_data: bool,
}

/// Replies of one connection, in the order in which they were answered.
#[derive(Debug, Default)]
pub(super) struct Output {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// Bytes that an earlier process has left to send.
    before: Vec<u8>,
    queue: VecDeque<Reply>,
    /// Number of bytes of the first reply that were sent.
    sent: usize,
    /// The socket's buffer is full: the writing thread waits for it.
    full: bool,
    closed: bool,
}

impl Output {
    fn lock(&self) -> MutexGuard<'_, State> {
        // Only a bug in this module panics with the lock held; the panic was printed.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends as much of the replies as the socket accepts; the writing thread sends the rest.
    pub(super) fn send(
        &self,
        socket: &UnixStream,
        requests: &Requests,
        replies: impl Iterator<Item = Reply>,
    ) {
        let mut state = self.lock();
        state.queue.extend(replies);
        if !state.full {
            state.push_out(socket, requests);
            if state.full {
                self.changed.notify_all();
            }
        }
    }

    /// Replies that begin with bytes which an earlier process has not sent.
    pub(super) fn beginning(before: Vec<u8>) -> Self {
        Self { state: Mutex::new(State { before, ..State::default() }), ..Self::default() }
    }

    /// Tells whether the disk has answered every request, and all replies not yet sent are here.
    pub(super) fn has_all(&self, requests: &Requests) -> bool {
        let state = self.lock();
        requests.answered() == Some(state.queue.len() + usize::from(!state.before.is_empty()))
    }

    /// Returns the bytes that were not sent; nothing is sent from now on.
    pub(super) fn take(&self, requests: &Requests) -> Vec<u8> {
        let mut state = self.lock();
        state.closed = true;
        let mut unsent = state.before.clone();
        let (start, mut queued) = (state.sent, Vec::new());
        for reply in &state.queue {
            queued.extend(reply.head.bytes());
            if !reply.has_data {
                queued.extend(&reply.tail);
            } else if let Some((mem, _)) = requests.memory(&reply.place, reply.len) {
                mem.buffer.append_to(mem.offset, mem.len, &mut queued);
            }
        }
        unsent.extend(&queued[start..]);
        state.forget(requests);
        drop(state);
        self.changed.notify_all();
        unsent
    }

    /// Body of the writing thread, until the connection is closed.
    pub(super) fn write(&self, socket: &UnixStream, requests: &Requests) {
        let mut state = self.lock();
        while !state.closed {
            if !state.full {
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            drop(state);
            // A signal interrupts; a socket that was shut down is ready. The connection may be left
            // to another process.
            let _ = poll(&mut [PollFd::new(socket, PollFlags::OUT)], Some(&FULL_POLL));
            state = self.lock();
            state.push_out(socket, requests);
        }
    }

    /// Drops all replies that were not sent, and all later ones.
    pub(super) fn close(&self, requests: &Requests) {
        let mut state = self.lock();
        state.closed = true;
        state.forget(requests);
        drop(state);
        self.changed.notify_all();
    }
}

impl State {
    fn forget(&mut self, requests: &Requests) {
        self.sent = 0;
        if !std::mem::take(&mut self.before).is_empty() {
            requests.release(&Place::None, 0);
        }
        for reply in self.queue.drain(..) {
            requests.release(&reply.place, reply.len);
        }
    }

    fn push_out(&mut self, socket: &UnixStream, requests: &Requests) {
        self.full = false;
        while !self.queue.is_empty() || !self.before.is_empty() {
            if self.closed {
                return self.forget(requests);
            }
            let is_before = !self.before.is_empty();
            match self.send_some(socket, requests) {
                Ok(n) if is_before => {
                    self.before.drain(..n);
                    if self.before.is_empty() {
                        requests.release(&Place::None, 0);
                    }
                }
                Ok(n) => self.advance(n, requests),
                Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => {
                    self.full = true;
                    return;
                }
                Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
                Err(_) => {
                    self.closed = true;
                    // Ends the reading thread. An error means that the socket is shut down already.
                    let _ = socket.shutdown(std::net::Shutdown::Both);
                }
            }
        }
    }

    #[allow(unsafe_code)]
    fn send_some(&self, socket: &UnixStream, requests: &Requests) -> std::io::Result<usize> {
        if !self.before.is_empty() {
            let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
            return Ok(rustix::net::send(socket, &self.before, flags)?);
        }
        let mut pieces = [sys::NOTHING; 2 * BATCH];
        let mut skip = self.sent;
        for (reply, pair) in self.queue.iter().zip(pieces.chunks_exact_mut(2)) {
            let head = reply.head.bytes();
            pair[0] = sys::piece_of_bytes(&head[skip.min(head.len())..]);
            skip = skip.saturating_sub(head.len());
            if reply.has_data
                && let Some((mut mem, _)) = requests.memory(&reply.place, reply.len)
            {
                (mem.offset, mem.len) = (mem.offset + skip, mem.len - skip);
                pair[1] = sys::piece_of_mem(&mem);
            } else {
                pair[1] = sys::piece_of_bytes(&reply.tail[skip..]);
            }
            skip = 0;
        }
        // SAFETY: heads and tails are in the queue, which `self` holds unchanged; the data is in
        // memory that `requests` or the reply's place holds until the reply is given back.
        unsafe { sys::send(socket.as_fd(), &pieces) }
    }

    fn advance(&mut self, n: usize, requests: &Requests) {
        self.sent += n;
        while let Some(reply) = self.queue.front() {
            let data = if reply.has_data { reply.len as usize } else { reply.tail.len() };
            let len = reply.head.bytes().len() + data;
            if self.sent < len {
                return;
            }
            self.sent -= len;
            if let Some(reply) = self.queue.pop_front() {
                requests.release(&reply.place, reply.len);
            }
        }
    }
}
