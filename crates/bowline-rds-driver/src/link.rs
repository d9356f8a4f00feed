//! A TCP connection.

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

use crate::sys;

/// Maximum number of pieces of one write.
const PIECES_MAX: usize = 64;
/// Maximum number of pieces of a small write.
const PIECES_FEW: usize = 4;
/// Time of silence after which a peer that may be gone is probed.
const PROBE_IDLE: Duration = Duration::from_secs(1);

/// The descriptor of a connection, and state that threads share without the lock. A thread that
/// reads or writes holds a reference, so the descriptor's number is not reused meanwhile.
#[derive(Debug)]
pub(crate) struct Link {
    pub(crate) id: LinkId,
    pub(crate) fd: OwnedFd,
    pub(crate) peer: SocketAddr,
    /// A thread reads. Only one may, because bytes must reach the core in their order.
    reading: AtomicBool,
    /// Another thread wanted to read meanwhile.
    again: AtomicBool,
    /// The core takes no more input for now.
    paused: AtomicBool,
    /// The stream has ended or failed, so a short read does not mean that all is read.
    ending: AtomicBool,
    /// The peer waits for TCP's acknowledgements, not for those of the core.
    owes_acks: AtomicBool,
}

/// State of a link under the node's lock.
#[derive(Debug)]
pub(crate) struct LinkSlot {
    pub(crate) id: LinkId,
    /// Distinguishes the link, in events of the system, from an earlier link of the same index.
    pub(crate) token: u32,
    /// The connection; `None` until it is begun.
    pub(crate) link: Option<Arc<Link>>,
    pub(crate) connecting: bool,
    /// The core had something to send before the connection was adopted.
    pub(crate) transmit_pending: bool,
    /// The core closed the link in this way before the connection was adopted.
    pub(crate) close_pending: Option<CloseHow>,
    /// The time in which the link is to end in the ordinary way has begun.
    pub(crate) drained: bool,
    pub(crate) writing: bool,
    pub(crate) blocked: bool,
    /// Number of events by which the system said that the link can be written.
    pub(crate) writable_events: u32,
    pub(crate) last_write_ns: u64,
    /// Messages came since the last write, so the next message is probably an answer [R-2040].
    pub(crate) received_since_write: bool,
    /// When the oldest unflushed message was sent, in nanoseconds; 0 if there is none.
    pub(crate) dirty_since_ns: u64,
    pub(crate) dirty_messages: u32,
    /// The link stands in the list of links with unflushed data.
    pub(crate) listed: bool,
}

impl LinkSlot {
    pub(crate) fn new(id: LinkId, token: u32) -> Self {
        Self {
            id,
            token,
            link: None,
            connecting: false,
            transmit_pending: false,
            close_pending: None,
            drained: false,
            writing: false,
            blocked: false,
            writable_events: 0,
            last_write_ns: 0,
            received_since_write: false,
            dirty_since_ns: 0,
            dirty_messages: 0,
            listed: false,
        }
    }
}

/// What TCP knows about a peer that may be gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PeerHealth {
    /// The peer answers; if it stops, keepalive finds out.
    Alive,
    /// The peer has let one retransmission timeout pass.
    Unsure,
    /// The peer has let several timeouts pass, each about twice as long as the one before.
    Lost,
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
            owes_acks: AtomicBool::new(false),
        }
    }

    /// Takes the right to read. If another thread has it, that thread is asked to read again.
    pub(crate) fn begin_read(&self) -> bool {
        self.again.store(true, Ordering::SeqCst);
        if self.reading.swap(true, Ordering::SeqCst) {
            return false;
        }
        self.again.store(false, Ordering::SeqCst);
        true
    }

    /// Takes the right to read if no thread has it.
    pub(crate) fn try_begin_read(&self) -> bool {
        !self.reading.swap(true, Ordering::SeqCst)
    }

    /// Gives the right to read back; tells whether another thread wanted to read meanwhile.
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

    pub(crate) fn owes_acks(&self) -> bool {
        self.owes_acks.load(Ordering::Relaxed)
    }

    pub(crate) fn set_owes_acks(&self, owes: bool) {
        self.owes_acks.store(owes, Ordering::Relaxed);
    }

    /// Makes TCP acknowledge now the bytes that were read.
    pub(crate) fn acknowledge(&self) {
        let _ = sockopt::set_tcp_quickack(&self.fd, true);
    }

    /// Registers for events, edge-triggered.
    pub(crate) fn watch(&self, epoll: &OwnedFd, token: u64) -> Result<(), Errno> {
        let flags = EventFlags::IN | EventFlags::OUT | EventFlags::RDHUP | EventFlags::ET;
        epoll::add(epoll, &self.fd, EventData::new_u64(token), flags)
    }

    /// Closes the connection as soon as no other thread is in a call on it.
    pub(crate) fn close(&self, epoll: &OwnedFd, how: CloseHow) {
        // Another thread may keep the descriptor open for some microseconds.
        let _ = epoll::delete(epoll, &self.fd);
        if how == CloseHow::Reset {
            let _ = sockopt::set_socket_linger(&self.fd, Some(Duration::ZERO));
        }
    }

    /// Makes TCP probe a silent peer: at once if nothing has come for a second, else when a second
    /// has passed. Keepalive has to stay that short until then, because a longer time would
    /// cancel the probe.
    pub(crate) fn probe(&self) {
        let _ = sockopt::set_tcp_keepidle(&self.fd, PROBE_IDLE);
    }

    /// Returns the result so far of a check that [`probe`](Self::probe) began.
    pub(crate) fn peer_health(&self) -> PeerHealth {
        // A connection without state has failed; reading it reports that.
        let Ok(tcp) = sys::tcp_state(&self.fd) else { return PeerHealth::Alive };
        match tcp.timeouts {
            // Keepalive sends no probe while data wait for acknowledgement; their timeouts count
            // instead.
            2.. if tcp.unacked > 0 => PeerHealth::Lost,
            1.. if tcp.unacked > 0 => PeerHealth::Unsure,
            _ => PeerHealth::Alive,
        }
    }

    /// Ends a check that [`probe`](Self::probe) began.
    pub(crate) fn end_probe(&self) {
        let _ = sockopt::set_tcp_keepidle(&self.fd, sys::KEEPALIVE_IDLE);
    }

    /// Writes a batch without blocking.
    pub(crate) fn write(&self, batch: &TxBatch) -> Written {
        // A question or an answer has one or two pieces: do not initialise room for hundreds.
        if batch.slices().nth(PIECES_FEW).is_none() {
            self.write_pieces::<PIECES_FEW>(batch)
        } else {
            self.write_pieces::<PIECES_MAX>(batch)
        }
    }

    fn write_pieces<const MAX: usize>(&self, batch: &TxBatch) -> Written {
        let mut done = Written { bytes: 0, calls: 0, end: WriteEnd::All };
        while done.bytes < batch.len() {
            let mut pieces = [IoSlice::new(&[]); MAX];
            let mut used = 0;
            let mut wanted = 0;
            let mut skip = done.bytes;
            for slice in batch.slices() {
                if skip >= slice.len() {
                    skip -= slice.len();
                    continue;
                }
                if used == MAX {
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

/// Converts the system's error number of a lost connection.
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

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};
    use std::time::Instant;

    use bowline_rds::{Config, Node};

    use super::*;

    /// Returns a link id; the core plays no other part in these tests.
    fn some_id() -> LinkId {
        let here = SocketAddr::from(([127, 0, 0, 2], 16_385));
        let there = SocketAddr::from(([127, 0, 0, 1], 40_000));
        let mut node = Node::new(Config { addrs: vec![here.ip()], ..Config::default() });
        node.handle_accepted(bowline_rds::Instant::from_nanos(1), here, there).unwrap()
    }

    #[test]
    fn a_probe_of_a_silent_peer_is_answered_at_once() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let at = listener.local_addr().unwrap();
        let link = Link::new(some_id(), TcpStream::connect(at).unwrap().into(), at);
        let _peer = listener.accept().unwrap();
        sys::tune(&link.fd, at, None, (0, 0));
        std::thread::sleep(Duration::from_millis(1500));
        let silence = || sys::tcp_state(&link.fd).unwrap().silence;
        assert!(silence() >= Duration::from_millis(1400));
        let asked = Instant::now();
        link.probe();
        // Without the probe, the system would ask after five seconds. An answer to the probe is
        // younger than the probe.
        while silence() > asked.elapsed() + Duration::from_millis(500) {
            assert!(asked.elapsed() < Duration::from_secs(3), "no answer for {:?}", silence());
            std::thread::sleep(Duration::from_millis(5));
        }
        assert_eq!(link.peer_health(), PeerHealth::Alive);
        link.end_probe();
        assert_eq!(sockopt::tcp_keepidle(&link.fd).unwrap(), Duration::from_secs(5));
    }
}
