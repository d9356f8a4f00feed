//! One TCP connection.

use core::sync::atomic::{AtomicBool, Ordering};
use std::io::IoSlice;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use bowline_rds::{CloseHow, CloseReason, LinkId, TxBatch};
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendFlags, sendmsg, sockopt};

/// Pieces of one write.
const PIECES_MAX: usize = 64;

/// A connection's descriptor and what threads agree on without the lock. Whoever reads or writes
/// holds a reference, so a descriptor number is never used again under them.
#[derive(Debug)]
pub(crate) struct Link {
    pub(crate) id: LinkId,
    pub(crate) fd: OwnedFd,
    pub(crate) peer: SocketAddr,
    /// One thread reads at a time: bytes must reach the core in their order.
    reading: AtomicBool,
    /// Somebody wanted to read meanwhile.
    again: AtomicBool,
    /// The core takes no more for now.
    paused: AtomicBool,
    /// The stream has ended or failed: a short read is not the end of what can be read.
    ending: AtomicBool,
}

/// What the lock protects of a link.
#[derive(Debug)]
pub(crate) struct LinkSlot {
    pub(crate) id: LinkId,
    /// Told apart from an earlier link of the same index in events of the system.
    pub(crate) token: u32,
    /// `None` until the connection is begun.
    pub(crate) link: Option<Arc<Link>>,
    pub(crate) connecting: bool,
    /// The core had something to send before the connection was in place here.
    pub(crate) wanted: bool,
    pub(crate) writing: bool,
    pub(crate) blocked: bool,
    /// Times the system said the link can be written.
    pub(crate) writable_events: u32,
    pub(crate) last_write_ns: u64,
    /// Something came since the last write: what is sent now is likely an answer.
    pub(crate) answered: bool,
    /// When the oldest unflushed message was sent; 0: none.
    pub(crate) dirty_since_ns: u64,
    pub(crate) dirty_messages: u32,
    /// In the list of links with unflushed data.
    pub(crate) listed: bool,
}

impl LinkSlot {
    pub(crate) fn new(id: LinkId, token: u32) -> Self {
        Self {
            id,
            token,
            link: None,
            connecting: false,
            wanted: false,
            writing: false,
            blocked: false,
            writable_events: 0,
            last_write_ns: 0,
            answered: false,
            dirty_since_ns: 0,
            dirty_messages: 0,
            listed: false,
        }
    }
}

/// Result of one write.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Written {
    pub(crate) bytes: usize,
    pub(crate) calls: u64,
    pub(crate) end: WriteEnd,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WriteEnd {
    All,
    Blocked,
    Failed,
}

impl Link {
    pub(crate) fn new(id: LinkId, fd: OwnedFd, peer: SocketAddr) -> Self {
        Self {
            id,
            fd,
            peer,
            reading: AtomicBool::new(false),
            again: AtomicBool::new(false),
            paused: AtomicBool::new(false),
            ending: AtomicBool::new(false),
        }
    }

    /// Takes the right to read. When another thread has it, that thread is told to read again.
    pub(crate) fn begin_read(&self) -> bool {
        self.again.store(true, Ordering::SeqCst);
        if self.reading.swap(true, Ordering::SeqCst) {
            return false;
        }
        self.again.store(false, Ordering::SeqCst);
        true
    }

    /// Takes the right to read if nobody has it.
    pub(crate) fn try_begin_read(&self) -> bool {
        !self.reading.swap(true, Ordering::SeqCst)
    }

    /// Gives the right to read back; tells whether somebody asked for another read meanwhile.
    pub(crate) fn end_read(&self) -> bool {
        self.reading.store(false, Ordering::SeqCst);
        self.again.load(Ordering::SeqCst)
    }

    pub(crate) fn is_paused(&self) -> bool {
        self.paused.load(Ordering::Acquire)
    }

    pub(crate) fn set_paused(&self, paused: bool) {
        self.paused.store(paused, Ordering::Release);
    }

    pub(crate) fn is_ending(&self) -> bool {
        self.ending.load(Ordering::Acquire)
    }

    pub(crate) fn set_ending(&self) {
        self.ending.store(true, Ordering::Release);
    }

    /// Asks for events, edge-triggered.
    pub(crate) fn watch(&self, epoll: &OwnedFd, token: u64) -> Result<(), Errno> {
        let flags = EventFlags::IN | EventFlags::OUT | EventFlags::RDHUP | EventFlags::ET;
        epoll::add(epoll, &self.fd, EventData::new_u64(token), flags)
    }

    /// Closes the connection as soon as no other thread is in a call on it.
    pub(crate) fn close(&self, epoll: &OwnedFd, how: CloseHow) {
        // The descriptor may live on in another thread's hands for some microseconds.
        let _ = epoll::delete(epoll, &self.fd);
        if how == CloseHow::Reset {
            let _ = sockopt::set_socket_linger(&self.fd, Some(Duration::ZERO));
        }
    }

    /// Makes TCP ask a silent peer now: keepalive that begins after a time already passed probes
    /// at once.
    pub(crate) fn probe(&self) {
        let _ = sockopt::set_tcp_keepidle(&self.fd, Duration::from_secs(1));
        let _ = sockopt::set_tcp_keepidle(&self.fd, Duration::from_secs(5));
    }

    /// Writes a batch without blocking.
    pub(crate) fn write(&self, batch: &TxBatch) -> Written {
        let mut done = Written { bytes: 0, calls: 0, end: WriteEnd::All };
        while done.bytes < batch.len() {
            let mut pieces = [IoSlice::new(&[]); PIECES_MAX];
            let mut used = 0;
            let mut wanted = 0;
            let mut skip = done.bytes;
            for slice in batch.slices() {
                if skip >= slice.len() {
                    skip -= slice.len();
                    continue;
                }
                if used == PIECES_MAX {
                    break;
                }
                let rest = &slice[skip..];
                skip = 0;
                wanted += rest.len();
                pieces[used] = IoSlice::new(rest);
                used += 1;
            }
            done.calls += 1;
            let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
            let mut none = SendAncillaryBuffer::default();
            match sendmsg(&self.fd, &pieces[..used], &mut none, flags) {
                Ok(n) => {
                    done.bytes += n;
                    if n < wanted {
                        done.end = WriteEnd::Blocked;
                        return done;
                    }
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => {
                    done.end = WriteEnd::Blocked;
                    return done;
                }
                Err(Errno::NOBUFS | Errno::NOMEM) => {
                    done.end = WriteEnd::Blocked;
                    return done;
                }
                Err(_) => {
                    done.end = WriteEnd::Failed;
                    return done;
                }
            }
        }
        done
    }
}

/// Translates the system's reason for a lost connection.
pub(crate) fn reason(errno: Errno) -> CloseReason {
    match errno {
        Errno::CONNREFUSED => CloseReason::Refused,
        Errno::NETUNREACH | Errno::HOSTUNREACH | Errno::NETDOWN | Errno::HOSTDOWN => {
            CloseReason::Unreachable
        }
        Errno::TIMEDOUT => CloseReason::TimedOut,
        Errno::CONNRESET | Errno::PIPE => CloseReason::Reset,
        Errno::ADDRNOTAVAIL => CloseReason::AddrNotAvailable,
        other => CloseReason::Other(other.raw_os_error()),
    }
}
