//! Ends connections by this node's decision without losing bytes that TCP has acknowledged on them
//!
//!
//! A peer that goes by TCP's acknowledgements, as a kernel does, forgets acknowledged messages;
//! those that a reset discards are lost. So the socket first gets a filter that keeps all further
//! segments from TCP. A segment may have passed the filter already and be on its way to the receive
//! queue on another processor. Only after that is excluded is the queue read to its end and the
//! connection reset. Links end in the order of the core's requests: bytes that a peer sent on an
//! older connection come before those on a newer one.

use core::sync::atomic::{AtomicBool, Ordering};
use std::collections::VecDeque;
use std::sync::{Arc, PoisonError};

use bowline_base::clock;
use bowline_rds::{CloseHow, CloseReason, LinkId};
use rustix::buffer::spare_capacity;
use rustix::io::Errno;
use rustix::net::{RecvFlags, recv};

use crate::link::{Link, reason};
use crate::shared::Shared;
use crate::sys;
use crate::todo::Scratch;

/// Interval in nanoseconds of checking whether a grace period is over. It takes some 10 ms.
const CHECK_NS: u64 = 1_000_000;
/// Longest grace period in nanoseconds. A system that cannot report its end does not block a cut.
const GRACE_PERIOD_MAX_NS: u64 = 100_000_000;
/// Number of reads that exhaust any receive queue. A peer may go on sending where the system
/// refuses the filter.
const REST_MAX: usize = 64 << 20;

/// A wait until all processors have finished handling segments, for all links that were blocked
/// before it.
#[derive(Debug)]
struct GracePeriod {
    over: Arc<AtomicBool>,
    check_at: u64,
    give_up_at: u64,
}

impl GracePeriod {
    fn begin(now_ns: u64) -> Self {
        let over = Arc::new(AtomicBool::new(false));
        let told = Arc::clone(&over);
        let wait = move || {
            if sys::wait_for_all_cpus() {
                told.store(true, Ordering::Release);
            }
        };
        // The call blocks for longer than a thread that polls the network may. If no thread can be
        // started, `GRACE_PERIOD_MAX_NS` ends the wait.
        let _ = std::thread::Builder::new().name("bowline-cut".into()).spawn(wait);
        Self { over, check_at: now_ns + CHECK_NS, give_up_at: now_ns + GRACE_PERIOD_MAX_NS }
    }
}

/// A link that is being cut.
#[derive(Debug)]
struct Cut {
    id: LinkId,
    /// Number of the grace period after which its receive queue is complete; `None` before its
    /// input is blocked.
    grace_period: Option<u64>,
}

/// The links that are being cut, in the order in which they end.
#[derive(Debug, Default)]
pub(crate) struct Cuts {
    queue: VecDeque<Cut>,
    running: Option<GracePeriod>,
    grace_periods_begun: u64,
    grace_periods_over: u64,
    /// A thread ends the first link of the queue; a second thread would mix up the order.
    ending: bool,
}

impl Cuts {
    /// Adds a link to the queue; tells whether it is new there.
    pub(crate) fn push(&mut self, id: LinkId) -> bool {
        let new = !self.queue.iter().any(|cut| cut.id == id);
        if new {
            self.queue.push_back(Cut { id, grace_period: None });
        }
        new
    }

    pub(crate) fn remove(&mut self, id: LinkId) {
        self.queue.retain(|cut| cut.id != id);
    }

    /// Notes that a link's input is blocked, except for segments on their way.
    fn note_blocked(&mut self, id: LinkId) {
        // The running grace period may have begun before.
        let next = self.grace_periods_begun + 1;
        if let Some(cut) = self.queue.iter_mut().find(|cut| cut.id == id) {
            cut.grace_period = Some(next);
        }
    }

    /// Ends the running grace period, if it is over, and begins another one if it is needed.
    fn advance(&mut self, now_ns: u64) {
        if let Some(grace_period) = &mut self.running {
            if !grace_period.over.load(Ordering::Acquire) && now_ns < grace_period.give_up_at {
                grace_period.check_at = now_ns + CHECK_NS;
                return;
            }
            self.grace_periods_over = self.grace_periods_begun;
            self.running = None;
        }
        if self.queue.iter().any(|cut| {
            cut.grace_period.is_some_and(|grace_period| grace_period > self.grace_periods_begun)
        }) {
            self.grace_periods_begun += 1;
            self.running = Some(GracePeriod::begin(now_ns));
        }
    }

    /// Tells whether the caller is to end links with [`Shared::end_cuts`].
    pub(crate) fn run_timer(&mut self, now_ns: u64) -> bool {
        if self.next_check().is_none_or(|at| at > now_ns) {
            return false;
        }
        self.advance(now_ns);
        let end = !self.ending && self.first_is_due();
        self.ending |= end;
        end
    }

    fn first_is_due(&self) -> bool {
        let first = self.queue.front().and_then(|cut| cut.grace_period);
        first.is_some_and(|grace_period| grace_period <= self.grace_periods_over)
    }

    /// Takes the link that is to end now. With `None` the caller may not ask again.
    fn pop_due(&mut self) -> Option<LinkId> {
        self.ending = self.first_is_due();
        if self.ending { self.queue.pop_front().map(|cut| cut.id) } else { None }
    }

    pub(crate) fn next_check(&self) -> Option<u64> {
        if self.first_is_due() && !self.ending {
            return Some(0); // an earlier link, not blocked yet, is gone
        }
        self.running.as_ref().map(|grace_period| grace_period.check_at)
    }
}

impl Shared {
    /// Blocks the input of links in the queue.
    pub(crate) fn begin_cuts(&self, sc: &mut Scratch) {
        while let Some(id) = sc.todo.cut.pop() {
            let mut st = self.lock();
            let Some(slot) = st.slot(id) else {
                st.cuts.remove(id); // it would delay the links behind it
                continue;
            };
            let Some(link) = slot.link.clone() else {
                slot.close_pending = Some(CloseHow::Cut); // the thread that adopts the link does it
                continue;
            };
            let drained = slot.drained;
            drop(st);
            self.stats.setups.inc();
            if sys::drop_all_input(&link.fd).is_ok() {
                self.lock().cuts.note_blocked(id);
            } else if drained {
                self.end_cut(sc, &link); // the link has had its time to end in the ordinary way
            } else {
                self.lock().cuts.remove(id);
                self.drain(sc, id);
            }
        }
        let mut st = self.lock();
        let now = st.at(clock::now());
        st.cuts.advance(now.as_nanos());
        // The sleeping thread learns of the new timer.
        self.collect(&mut st, sc, None);
    }

    /// Cuts a link by the driver's decision.
    pub(crate) fn cut(&self, sc: &mut Scratch, id: LinkId) {
        let mut st = self.lock();
        if st.slot(id).is_some() && st.cuts.push(id) {
            sc.todo.cut.push(id);
        }
    }

    /// Ends links whose turn has come. [`Cuts::run_timer`] told the caller to do so.
    pub(crate) fn end_cuts(&self, sc: &mut Scratch) {
        loop {
            let mut st = self.lock();
            let Some(id) = st.cuts.pop_due() else { return };
            let Some(link) = st.slot(id).and_then(|slot| slot.link.clone()) else { continue };
            drop(st);
            self.end_cut(sc, &link);
        }
    }

    /// Reads the rest of a link's input and resets it.
    fn end_cut(&self, sc: &mut Scratch, link: &Arc<Link>) {
        // Another thread may be between its last read and the core. The right to read is kept,
        // since no thread may read after this.
        while !link.try_begin_read() {
            std::thread::yield_now();
        }
        let why = self.read_rest(sc, link);
        // Bytes whose acknowledgement TCP delays, by up to 40 ms, need not come again. Otherwise a
        // peer whose connections never last that long would make no progress.
        link.acknowledge();
        let mut st = self.lock();
        let now = st.at(clock::now());
        self.check_tcp_ack(&mut st, link.id, now);
        drop(st);
        link.close(&self.epoll, CloseHow::Reset);
        self.closed(sc, link.id, why);
    }

    /// Passes all bytes of a link's receive queue to the core, even if the core refuses input:
    /// later they are gone.
    fn read_rest(&self, sc: &mut Scratch, link: &Arc<Link>) -> CloseReason {
        let mut rest = 0;
        while rest < REST_MAX {
            let mut rx = match sc.rx.take() {
                Some(rx) => rx,
                None => self.rx.lock().unwrap_or_else(PoisonError::into_inner).get(),
            };
            self.stats.reads.inc();
            match recv(&link.fd, spare_capacity(rx.vec()), RecvFlags::DONTWAIT) {
                Ok((0, _)) => {
                    sc.rx = Some(rx);
                    return CloseReason::Eof;
                }
                Ok((n, _)) => {
                    self.stats.bytes_read.add(n as u64);
                    rest += n;
                    let buf = self.rx.lock().unwrap_or_else(PoisonError::into_inner).freeze(rx);
                    let mut st = self.lock();
                    let now = st.at(clock::now());
                    st.core.handle_data(now, link.id, buf);
                }
                Err(Errno::INTR) => sc.rx = Some(rx),
                Err(Errno::AGAIN) => {
                    sc.rx = Some(rx);
                    return CloseReason::Reset;
                }
                Err(errno) => {
                    sc.rx = Some(rx);
                    return reason(errno);
                }
            }
        }
        CloseReason::Reset
    }
}

#[cfg(test)]
mod tests {
    use std::io::IoSlice;
    use std::net::{IpAddr, SocketAddr};
    use std::time::{Duration, Instant};

    use bowline_rds::{Config, RecvOpts, SendMsg, SocketId};

    use super::*;
    use crate::{Blocking, Driver, DriverConfig};

    const LIMIT: Blocking = Blocking::For(Duration::from_secs(20));

    /// Makes a node that acknowledges by TCP alone, on one path, with a bound socket.
    fn node(ip: [u8; 4]) -> (Driver, SocketId, SocketAddr) {
        let addr = SocketAddr::from((ip, 4000));
        let mut core = Config { addrs: vec![addr.ip()], paths: 1, ..Config::default() };
        core.end_to_end = false;
        core.sysctl.reconnect_max_delay_ms = 5;
        let driver = Driver::start(DriverConfig { core, ..DriverConfig::default() }).unwrap();
        let socket = driver.with_core(|core, _| core.socket()).unwrap();
        driver.bind(socket, addr).unwrap();
        (driver, socket, addr)
    }

    fn send_numbered(driver: &Driver, socket: SocketId, to: SocketAddr, count: u32) {
        for i in 0..count {
            let mut bytes = vec![0; 4 + i as usize % 9000];
            bytes[..4].copy_from_slice(&i.to_be_bytes());
            let pieces = [IoSlice::new(&bytes)];
            let message = SendMsg {
                name: Some(to),
                payload: &pieces,
                control: &[],
                zerocopy: false,
                blocking: true,
                promised: false,
                rdma: &[],
                lent: None,
            };
            driver.send(socket, &message, LIMIT).unwrap();
        }
        driver.flush(socket, LIMIT).unwrap();
    }

    /// Makes the system refuse filters on all connections of a node.
    fn lock_filters(driver: &Driver) {
        for slot in driver.shared().lock().links.iter().flatten() {
            if let Some(link) = &slot.link {
                sys::lock_filter(&link.fd).unwrap();
            }
        }
    }

    #[test]
    fn a_connection_that_takes_no_filter_is_drained_and_loses_nothing() {
        const COUNT: u32 = 3000;
        let (left, from, _) = node([127, 99, 1, 1]);
        let (right, to, at) = node([127, 99, 1, 2]);
        let mut drains = 0;
        let mut bytes = [0; 10_000];
        std::thread::scope(|s| {
            s.spawn(|| send_numbered(&left, from, at, COUNT));
            for i in 0..COUNT {
                let (len, _) = right.recv_into(to, &mut bytes, LIMIT).unwrap();
                assert_eq!(bytes[..4], i.to_be_bytes(), "message {i}");
                assert_eq!(len, 4 + i as usize % 9000, "message {i}");
                if i % 500 == 250 {
                    lock_filters(&right);
                    right.drop_connections(None);
                    let st = right.shared().lock();
                    drains += st.links.iter().flatten().filter(|slot| slot.drained).count();
                }
            }
        });
        assert!(
            right.recv(to, RecvOpts::default(), Blocking::Never).is_err(),
            "nothing comes twice"
        );
        assert!(drains > 0, "no connection was drained");
    }

    /// Without a filter, a peer that keeps its end open is given up in the end.
    #[test]
    fn a_link_that_was_drained_in_vain_is_read_and_reset() {
        let (right, _, at) = node([127, 99, 2, 2]);
        let from = SocketAddr::from(([127, 99, 2, 1], 0));
        let fd = sys::tcp_socket(from.ip()).unwrap();
        rustix::net::bind(&fd, &from).unwrap();
        let there = SocketAddr::new(at.ip(), crate::RDS_TCP_PORT);
        let _ = rustix::net::connect(&fd, &there);
        let links = || right.shared().lock().links.iter().flatten().count();
        wait_until("the connection", || links() == 1);
        lock_filters(&right);
        let peer: IpAddr = from.ip();
        assert_eq!(right.drop_connections(Some(peer)), 1);
        wait_until("its end", || links() == 0);
    }

    fn wait_until(what: &str, mut done: impl FnMut() -> bool) {
        let end = Instant::now() + Duration::from_secs(20);
        while !done() {
            assert!(Instant::now() < end, "no {what}");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn some_ids() -> [LinkId; 3] {
        let here = SocketAddr::from(([127, 0, 0, 2], 16_385));
        let there = |port| SocketAddr::from(([127, 0, 0, 1], port));
        let mut core =
            bowline_rds::Node::new(Config { addrs: vec![here.ip()], ..Config::default() });
        [40_000, 40_001, 40_002].map(|port| {
            core.handle_accepted(bowline_rds::Instant::from_nanos(1), here, there(port)).unwrap()
        })
    }

    #[test]
    fn cuts_end_in_the_order_in_which_they_were_asked_for() {
        let [first, second, third] = some_ids();
        let mut cuts = Cuts::default();
        assert!(cuts.push(first) && cuts.push(second) && cuts.push(third));
        assert!(!cuts.push(second), "once is enough");
        cuts.note_blocked(second);
        cuts.advance(0);
        cuts.note_blocked(first); // the running grace period began before
        assert!(
            !cuts.run_timer(GRACE_PERIOD_MAX_NS),
            "the first of them has to wait for a second grace period"
        );
        assert!(cuts.run_timer(2 * GRACE_PERIOD_MAX_NS));
        assert!(!cuts.run_timer(3 * GRACE_PERIOD_MAX_NS), "one thread does it");
        assert_eq!(
            [cuts.pop_due(), cuts.pop_due(), cuts.pop_due()],
            [Some(first), Some(second), None]
        );
        cuts.note_blocked(third);
        cuts.advance(4 * GRACE_PERIOD_MAX_NS);
        assert!(cuts.next_check().is_some());
        cuts.remove(third);
        assert!(!cuts.run_timer(5 * GRACE_PERIOD_MAX_NS) && cuts.next_check().is_none());
    }

    /// The first of two links was lost before it was made deaf.
    #[test]
    fn a_link_that_is_gone_holds_up_no_cut() {
        let [gone, next, _] = some_ids();
        let (driver, ..) = node([127, 99, 3, 1]);
        let shared = driver.shared();
        let mut st = shared.lock();
        assert!(st.cuts.push(gone) && st.cuts.push(next));
        st.cuts.note_blocked(next);
        drop(st);
        shared.with_scratch(|sc| {
            sc.todo.cut.push(gone);
            shared.run(sc);
        });
        // The background thread ends the cut; no such link exists, so nothing follows.
        wait_until("the second cut's end", || shared.lock().cuts.queue.is_empty());
    }
}
