//! Reads connections and passes the bytes to the core.

use std::sync::{Arc, PoisonError};

use bowline_base::clock;
use bowline_rds::{CloseHow, CloseReason, LinkId, RX_BUF_LEN};
use rustix::buffer::spare_capacity;
use rustix::io::Errno;
use rustix::net::{RecvFlags, Shutdown, recv, shutdown};

use crate::link::{Link, PeerHealth, reason};
use crate::shared::{LinkTimer, Shared, State};
use crate::todo::Scratch;

/// Number of messages parsed under the lock without a break.
pub(crate) const PARSE_BUDGET: usize = 256;
/// Number of reads of one connection before it is the turn of others.
const READS_MAX: usize = 4;
/// From this number of bytes on, a sender may be waiting for TCP's acknowledgement, which TCP
/// delays by up to 40 ms when less than a segment came. On loopback a segment is 64 KiB.
const ACK_BYTES: usize = 2048;
/// Number of rounds of reads that exhaust the largest receive buffer, even if the peer goes on
/// sending.
const READ_OUT_MAX: usize = 64;
/// Times that the thread which reads a link is waited for; one that ends it reads for ever.
const TRIES_MAX: usize = 1_000;
/// Longest time in nanoseconds that a connection may take to end after this node has closed its
/// direction.
const DRAIN_NS: u64 = 2_000_000_000;

/// Result of a series of reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ReadEnd {
    /// Nothing is left; the system reports new input.
    Empty,
    /// More input may be left, which the system does not report again.
    More,
    /// The core takes no more for now, and requests reading later.
    Refused,
    /// The connection has ended.
    Gone,
}

impl Shared {
    /// Reads a link until it is empty or its turn is over; tells whether data came.
    pub(crate) fn read(&self, sc: &mut Scratch, link: &Arc<Link>) -> bool {
        if !link.begin_read() {
            return false;
        }
        self.read_begun(sc, link)
    }

    /// Reads a link unless another thread does.
    pub(crate) fn try_read(&self, sc: &mut Scratch, link: &Arc<Link>) -> bool {
        link.try_begin_read() && self.read_begun(sc, link)
    }

    fn read_begun(&self, sc: &mut Scratch, link: &Arc<Link>) -> bool {
        let mut any = false;
        loop {
            let (got, end) = self.read_turn(sc, link);
            any |= got;
            if !link.end_read() || end == ReadEnd::Gone {
                return any;
            }
            if !link.begin_read() {
                return any;
            }
        }
    }

    fn read_turn(&self, sc: &mut Scratch, link: &Arc<Link>) -> (bool, ReadEnd) {
        let mut got = false;
        for _ in 0..READS_MAX {
            if link.is_paused() {
                return (got, ReadEnd::Refused);
            }
            let mut rx = match sc.rx.take() {
                Some(rx) => rx,
                None => self.rx.lock().unwrap_or_else(PoisonError::into_inner).get(),
            };
            self.stats.reads.inc();
            let result = recv(&link.fd, spare_capacity(rx.vec()), RecvFlags::DONTWAIT);
            match result.map(|(n, _)| n) {
                Ok(0) => {
                    sc.rx = Some(rx);
                    self.closed(sc, link.id, CloseReason::Eof);
                    return (got, ReadEnd::Gone);
                }
                Ok(n) => {
                    got = true;
                    self.stats.bytes_read.add(n as u64);
                    let buf = self.rx.lock().unwrap_or_else(PoisonError::into_inner).freeze(rx);
                    let full = n >= RX_BUF_LEN || link.is_ending();
                    match self.deliver(sc, link, buf, full) {
                        None if full => {}
                        None => {
                            if n >= ACK_BYTES && link.owes_acks() {
                                self.stats.ioctls.inc();
                                link.acknowledge();
                            }
                            return (got, ReadEnd::Empty);
                        }
                        Some(end) => return (got, end),
                    }
                }
                Err(Errno::AGAIN) => {
                    self.stats.empty_looks.inc();
                    sc.rx = Some(rx);
                    return (got, ReadEnd::Empty);
                }
                Err(Errno::INTR) => sc.rx = Some(rx),
                Err(errno) => {
                    sc.rx = Some(rx);
                    self.closed(sc, link.id, reason(errno));
                    return (got, ReadEnd::Gone);
                }
            }
        }
        let mut st = self.lock();
        note_unread(&mut st, link);
        self.hand_over(&mut st, sc);
        (got, ReadEnd::More)
    }

    /// Passes the bytes of one read to the core. Returns `None` to go on reading.
    fn deliver(
        &self,
        sc: &mut Scratch,
        link: &Arc<Link>,
        buf: bowline_rds::RxBuf,
        more: bool,
    ) -> Option<ReadEnd> {
        let mut st = self.lock();
        let now = st.at(clock::now());
        if st.slot(link.id).is_none() {
            return Some(ReadEnd::Gone);
        }
        link.set_owes_acks(st.core.owes_tcp_ack(link.id));
        st.note_hot(link);
        st.last_read = buf.bytes().len();
        st.deliveries += 1;
        st.core.handle_data(now, link.id, buf);
        if st.tcp_acks && st.core.wants_tcp_ack(link.id) {
            self.check_tcp_ack(&mut st, link.id, now);
        }
        // Parked threads need their messages. A lone reader needs only its own message, and parses
        // the rest when it comes back, while the bytes are still in the cache.
        let until = sc.until.filter(|_| st.parked.is_empty());
        let before = st.core.counters().recv_queued;
        st.core.process(now, until, PARSE_BUDGET);
        // If only acknowledgements came, the next message sent is not an answer.
        if st.core.counters().recv_queued != before
            && let Some(slot) = st.slot(link.id)
        {
            slot.received_since_write = true;
        }
        let refused = !st.core.wants_read(link.id);
        if refused {
            link.set_paused(true);
        }
        let rest = st.core.has_backlog();
        if rest {
            self.hand_over(&mut st, sc);
        } else if sc.reads_acks {
            // A sender reads in passing, and no thread reads after it: peers that asked get their
            // acknowledgements.
            st.core.idle(now);
        }
        self.collect(&mut st, sc, None);
        if refused && link.is_paused() {
            return Some(ReadEnd::Refused);
        }
        if rest && more {
            note_unread(&mut st, link);
            return Some(ReadEnd::More);
        }
        None
    }

    /// Tells the core that a connection has ended, after all its bytes are processed.
    pub(crate) fn closed(&self, sc: &mut Scratch, id: LinkId, why: CloseReason) {
        let mut st = self.lock();
        let now = st.at(clock::now());
        if st.core.wants_tcp_ack(id) {
            // Messages that the peer's TCP acknowledged before the end are not sent again.
            self.check_tcp_ack(&mut st, id, now);
        }
        let Some(slot) = st.take_slot(id) else { return };
        st.core.handle_closed(now, id, why);
        self.collect(&mut st, sc, None);
        drop(st);
        if let Some(link) = slot.link {
            self.stats.setups.inc();
            link.close(&self.epoll, CloseHow::Fin);
        }
    }

    /// Reads the bytes that have come, then makes TCP probe the peer.
    pub(crate) fn check_alive(&self, sc: &mut Scratch, link: &Arc<Link>) {
        let all = self.read_out(sc, link);
        self.stats.setups.inc();
        link.probe();
        let mut st = self.lock();
        let now = st.at(clock::now());
        if all {
            st.core.handle_checked(now, link.id);
        }
        if st.slot(link.id).is_some() {
            st.schedule_check(link.id, now);
        }
        self.collect(&mut st, sc, None);
    }

    /// Reads all bytes that had arrived; tells whether that was possible. Bytes of a newer
    /// connection of the peer are processed only after them.
    fn read_out(&self, sc: &mut Scratch, link: &Arc<Link>) -> bool {
        let mut tries = 0;
        for _ in 0..READ_OUT_MAX {
            // What another thread has read may not be in the core yet.
            while !link.try_begin_read() {
                tries += 1;
                if tries == TRIES_MAX {
                    return false;
                }
                std::thread::yield_now();
            }
            if !self.read_begun(sc, link) {
                break;
            }
        }
        !link.is_paused()
    }

    /// Checks the result of a probe. A peer that is gone while it owes acknowledgements is given up
    /// here: the next retransmission, which a restarted machine would answer with a reset, may be
    /// many seconds away.
    pub(crate) fn check_again(&self, sc: &mut Scratch, id: LinkId) {
        let link = self.lock().slot(id).and_then(|slot| slot.link.clone());
        let Some(link) = link else { return };
        if self.read_out(sc, &link) {
            let mut st = self.lock();
            let now = st.at(clock::now());
            st.core.handle_checked(now, id);
            self.collect(&mut st, sc, None);
        }
        self.stats.setups.inc();
        match link.peer_health() {
            PeerHealth::Alive => link.end_probe(),
            PeerHealth::Unsure => {
                let mut st = self.lock();
                let now = st.at(clock::now());
                if st.slot(id).is_some() {
                    st.schedule_check(id, now);
                }
            }
            PeerHealth::Lost => self.cut(sc, id),
        }
    }

    /// Sends FIN and reads on until the peer has sent its own.
    pub(crate) fn drain(&self, sc: &mut Scratch, id: LinkId) {
        let mut st = self.lock();
        let now = st.at(clock::now());
        let Some(slot) = st.slot(id) else { return };
        let Some(link) = slot.link.clone() else {
            slot.close_pending = Some(CloseHow::Drain); // the thread that adopts the link does it
            return;
        };
        slot.drained = true;
        st.link_timers.push((now.as_nanos() + DRAIN_NS, id, LinkTimer::GiveUp));
        drop(st);
        self.stats.setups.inc();
        let _ = shutdown(&link.fd, Shutdown::Write);
        self.read(sc, &link);
    }
}

fn note_unread(st: &mut State, link: &Arc<Link>) {
    if !st.unread.iter().any(|known| known.id == link.id) {
        st.unread.push(Arc::clone(link));
    }
}
