//! From connections into the core.

use std::sync::{Arc, PoisonError};

use bowline_base::clock;
use bowline_rds::{CloseHow, CloseReason, LinkId, RX_BUF_LEN};
use rustix::buffer::spare_capacity;
use rustix::io::Errno;
use rustix::net::{RecvFlags, Shutdown, recv, shutdown};

use crate::link::{Link, Pulse, reason};
use crate::shared::{Later, Shared, State};
use crate::todo::Scratch;

/// Messages parsed in one go under the lock.
pub(crate) const PARSE_BUDGET: usize = 256;
/// Reads of one connection before others have their turn.
const READS_MAX: usize = 4;
/// From so many bytes on, a sender may be waiting for TCP's acknowledgement, which TCP by itself
/// delays by up to 40 ms when less than a segment came. On loopback a segment is 64 KiB.
const ACK_BYTES: usize = 2048;
/// Rounds of reads that exhaust the largest receive buffer, even if the peer goes on sending.
const READ_OUT_MAX: usize = 64;
/// Most time a connection may take to end after this node has closed its direction.
const DRAIN_NS: u64 = 2_000_000_000;

/// How a series of reads ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ReadEnd {
    /// Nothing more now; the system will tell when there is.
    Empty,
    /// There may be more, and nobody will tell.
    More,
    /// The core wants no more for now, and will tell when it does.
    Refused,
    /// The connection is gone.
    Gone,
}

impl Shared {
    /// Reads a link until it is empty, or its turn is over; tells whether anything came.
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

    /// Hands what one read brought to the core. `None`: go on reading if there is more.
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
        // Threads that are parked need their messages; a lone reader wants just its own, and the
        // rest when it comes back, while the bytes are still in the cache.
        let until = sc.until.filter(|_| st.parked.is_empty());
        let before = st.core.counters().recv_queued;
        st.core.process(now, until, PARSE_BUDGET);
        // Acknowledgements alone are no reason to hurry with what is sent next.
        if st.core.counters().recv_queued != before
            && let Some(slot) = st.slot(link.id)
        {
            slot.answered = true;
        }
        let refused = !st.core.wants_read(link.id);
        if refused {
            link.set_paused(true);
        }
        let rest = st.core.has_backlog();
        if rest {
            self.hand_over(&mut st, sc);
        } else if sc.reads_acks {
            // A sender reads by the way, and nobody after it: peers that asked get their
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

    /// Tells the core that a connection is gone, after everything it brought is processed.
    pub(crate) fn closed(&self, sc: &mut Scratch, id: LinkId, why: CloseReason) {
        let mut st = self.lock();
        let now = st.at(clock::now());
        if st.core.wants_tcp_ack(id) {
            // What the peer has acknowledged before the end is not sent again.
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

    /// Reads what has come, then makes TCP find out whether the peer is there.
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
            st.check_later(link.id, now);
        }
        self.collect(&mut st, sc, None);
    }

    /// Reads all that had arrived; tells whether that was possible. What came on a newer connection
    /// of the peer is processed only after it.
    fn read_out(&self, sc: &mut Scratch, link: &Arc<Link>) -> bool {
        for _ in 0..READ_OUT_MAX {
            if !self.read(sc, link) {
                break;
            }
        }
        !link.is_paused()
    }

    /// Looks what came of a probe. A peer that is gone while it owes acknowledgements is given up
    /// here: the next retransmission, which a machine that was restarted would answer with a
    /// reset, can be many seconds away.
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
        match link.pulse() {
            Pulse::Fine => link.relax(),
            Pulse::Unsure => {
                let mut st = self.lock();
                let now = st.at(clock::now());
                if st.slot(id).is_some() {
                    st.check_later(id, now);
                }
            }
            Pulse::Lost => self.cut(sc, id),
        }
    }

    /// Ends this node's direction and reads on until the peer has ended its own.
    pub(crate) fn drain(&self, sc: &mut Scratch, id: LinkId) {
        let mut st = self.lock();
        let now = st.at(clock::now());
        let Some(slot) = st.slot(id) else { return };
        let Some(link) = slot.link.clone() else {
            slot.end = Some(CloseHow::Drain); // the thread that accepts it sees to it
            return;
        };
        slot.drained = true;
        st.later.push((now.as_nanos() + DRAIN_NS, id, Later::GiveUp));
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
