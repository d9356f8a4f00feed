//! Ends connections by this node's own decision without losing what TCP has acknowledged on them
//!
//!
//! A peer that goes by TCP's acknowledgements, as a kernel does, forgets what TCP has acknowledged:
//! whatever a reset throws away of that is lost. So the socket is made deaf first, by a filter that
//! keeps all further segments from TCP. A segment may have passed the filter's place already and
//! still be on its way to the queue on another processor; only when that is out of the question is
//! the queue read to its end and the connection reset. Links end in the order in which the core
//! asked: what a peer sent on an older connection comes before what it sent on a newer one.

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

/// Interval of looks whether all processors are past what they did. That takes some 10 ms.
const LOOK_NS: u64 = 1_000_000;
/// After this time they are taken to be. A system that cannot tell does not hinder a cut.
const ROUND_MAX_NS: u64 = 100_000_000;
/// No receive queue holds more. Where the system refuses the filter, a peer may go on sending.
const REST_MAX: usize = 64 << 20;

/// A wait for all processors that serves every link made deaf before it.
#[derive(Debug)]
struct Round {
    over: Arc<AtomicBool>,
    look_at: u64,
    give_up_at: u64,
}

impl Round {
    fn begin(now_ns: u64) -> Self {
        let over = Arc::new(AtomicBool::new(false));
        let told = Arc::clone(&over);
        let wait = move || {
            if sys::pass_all_processors() {
                told.store(true, Ordering::Release);
            }
        };
        // The call blocks for longer than a thread that polls the network may. Without a thread,
        // time decides.
        let _ = std::thread::Builder::new().name("bowline-cut".into()).spawn(wait);
        Self { over, look_at: now_ns + LOOK_NS, give_up_at: now_ns + ROUND_MAX_NS }
    }
}

/// A link on its way to a reset.
#[derive(Debug)]
struct Cut {
    id: LinkId,
    /// The round after which its queue is complete; `None` before the link is deaf.
    round: Option<u64>,
}

/// The links that are being cut, in the order in which they end.
#[derive(Debug, Default)]
pub(crate) struct Cuts {
    queue: VecDeque<Cut>,
    running: Option<Round>,
    rounds_begun: u64,
    rounds_over: u64,
    /// A thread ends the first of the queue; a second one would mix up the order.
    ending: bool,
}

impl Cuts {
    /// Puts a link in the queue; tells whether it is new there.
    pub(crate) fn push(&mut self, id: LinkId) -> bool {
        let new = !self.queue.iter().any(|cut| cut.id == id);
        if new {
            self.queue.push_back(Cut { id, round: None });
        }
        new
    }

    pub(crate) fn remove(&mut self, id: LinkId) {
        self.queue.retain(|cut| cut.id != id);
    }

    /// Notes that nothing more reaches a link's TCP, but for what was on its way.
    fn note_deaf(&mut self, id: LinkId) {
        // The round that is running may have begun before.
        let next = self.rounds_begun + 1;
        if let Some(cut) = self.queue.iter_mut().find(|cut| cut.id == id) {
            cut.round = Some(next);
        }
    }

    /// Ends the round that is running, if it is over, and begins one that is needed.
    fn turn(&mut self, now_ns: u64) {
        if let Some(round) = &mut self.running {
            if !round.over.load(Ordering::Acquire) && now_ns < round.give_up_at {
                round.look_at = now_ns + LOOK_NS;
                return;
            }
            self.rounds_over = self.rounds_begun;
            self.running = None;
        }
        if self.queue.iter().any(|cut| cut.round.is_some_and(|round| round > self.rounds_begun)) {
            self.rounds_begun += 1;
            self.running = Some(Round::begin(now_ns));
        }
    }

    /// Tells whether the caller is to end links with [`Shared::end_cuts`].
    pub(crate) fn run_timer(&mut self, now_ns: u64) -> bool {
        if self.next_look().is_none_or(|at| at > now_ns) {
            return false;
        }
        self.turn(now_ns);
        let end = !self.ending && self.first_is_due();
        self.ending |= end;
        end
    }

    fn first_is_due(&self) -> bool {
        let first = self.queue.front().and_then(|cut| cut.round);
        first.is_some_and(|round| round <= self.rounds_over)
    }

    /// Takes the link that is to end now. `None` ends the caller's right to ask.
    fn pop_due(&mut self) -> Option<LinkId> {
        self.ending = self.first_is_due();
        if self.ending { self.queue.pop_front().map(|cut| cut.id) } else { None }
    }

    pub(crate) fn next_look(&self) -> Option<u64> {
        if self.first_is_due() && !self.ending {
            return Some(0); // one before it, not deaf yet, is gone
        }
        self.running.as_ref().map(|round| round.look_at)
    }
}

impl Shared {
    /// Begins to cut links that are in the queue.
    pub(crate) fn begin_cuts(&self, sc: &mut Scratch) {
        while let Some(id) = sc.todo.cut.pop() {
            let mut st = self.lock();
            let Some(slot) = st.slot(id) else {
                st.cuts.remove(id); // it would hold up those behind it
                continue;
            };
            let Some(link) = slot.link.clone() else {
                slot.end = Some(CloseHow::Cut); // the thread that accepts it sees to it
                continue;
            };
            let drained = slot.drained;
            drop(st);
            self.stats.setups.inc();
            if sys::drop_all_input(&link.fd).is_ok() {
                self.lock().cuts.note_deaf(id);
            } else if drained {
                self.end_cut(sc, &link); // it has had its time, and more cannot be done
            } else {
                self.lock().cuts.remove(id);
                self.drain(sc, id);
            }
        }
        let mut st = self.lock();
        let now = st.at(clock::now());
        st.cuts.turn(now.as_nanos());
        // Whoever sleeps learns that there is something to look at.
        self.collect(&mut st, sc, None);
    }

    /// Cuts a link by the driver's own decision.
    pub(crate) fn cut(&self, sc: &mut Scratch, id: LinkId) {
        let mut st = self.lock();
        if st.slot(id).is_some() && st.cuts.push(id) {
            sc.todo.cut.push(id);
        }
    }

    /// Ends links whose turn has come. The caller was told to by [`Cuts::run_timer`].
    pub(crate) fn end_cuts(&self, sc: &mut Scratch) {
        loop {
            let mut st = self.lock();
            let Some(id) = st.cuts.pop_due() else { return };
            let Some(link) = st.slot(id).and_then(|slot| slot.link.clone()) else { continue };
            drop(st);
            self.end_cut(sc, &link);
        }
    }

    /// Reads the rest of a link and resets it.
    fn end_cut(&self, sc: &mut Scratch, link: &Arc<Link>) {
        // Another thread may be between its last read and the core. The right to read is kept:
        // nobody is to read after this.
        while !link.try_begin_read() {
            std::thread::yield_now();
        }
        let why = self.read_rest(sc, link);
        // What TCP has not acknowledged yet, which it puts off by up to 40 ms, need not come again.
        // A peer whose connections never last that long would get no further.
        link.acknowledge();
        let mut st = self.lock();
        let now = st.at(clock::now());
        self.check_tcp_ack(&mut st, link.id, now);
        drop(st);
        link.close(&self.epoll, CloseHow::Reset);
        self.closed(sc, link.id, why);
    }

    /// Hands everything that is in a link's queue to the core, whether that wants it now or not: it
    /// is not there later.
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
    use crate::{Driver, DriverConfig, Patience};

    const LIMIT: Patience = Patience::For(Duration::from_secs(20));

    /// A node that goes by TCP's acknowledgements, on one path, with a bound socket.
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
            };
            driver.send(socket, &message, LIMIT).unwrap();
        }
        driver.flush(socket, LIMIT).unwrap();
    }

    /// Has the system refuse filters on all connections of a node.
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
            right.recv(to, RecvOpts::default(), Patience::Never).is_err(),
            "nothing comes twice"
        );
        assert!(drains > 0, "no connection was drained");
    }

    /// Without a filter, a peer that keeps its end open is given up in the end, all the same.
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
        cuts.note_deaf(second);
        cuts.turn(0);
        cuts.note_deaf(first); // too late for the round that runs
        assert!(!cuts.run_timer(ROUND_MAX_NS), "the first of them has to wait for a second round");
        assert!(cuts.run_timer(2 * ROUND_MAX_NS));
        assert!(!cuts.run_timer(3 * ROUND_MAX_NS), "one thread does it");
        assert_eq!(
            [cuts.pop_due(), cuts.pop_due(), cuts.pop_due()],
            [Some(first), Some(second), None]
        );
        cuts.note_deaf(third);
        cuts.turn(4 * ROUND_MAX_NS);
        assert!(cuts.next_look().is_some());
        cuts.remove(third);
        assert!(!cuts.run_timer(5 * ROUND_MAX_NS) && cuts.next_look().is_none());
    }

    /// The first of two links was lost before it was made deaf.
    #[test]
    fn a_link_that_is_gone_holds_up_no_cut() {
        let [gone, next, _] = some_ids();
        let (driver, ..) = node([127, 99, 3, 1]);
        let shared = driver.shared();
        let mut st = shared.lock();
        assert!(st.cuts.push(gone) && st.cuts.push(next));
        st.cuts.note_deaf(next);
        drop(st);
        shared.with_scratch(|sc| {
            sc.todo.cut.push(gone);
            shared.begin_cuts(sc);
        });
        // The background thread ends it; there is no such link, so nothing more comes of that.
        wait_until("the second cut's end", || shared.lock().cuts.queue.is_empty());
    }
}
