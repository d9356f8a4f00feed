//! The outgoing data path.

use core::sync::atomic::Ordering;
use std::net::{IpAddr, SocketAddr};
use std::sync::{MutexGuard, PoisonError, TryLockError};
use std::time::Duration;

use bowline_base::clock;
use bowline_roce::{Burst, Device as Core, Instant};
use bowline_verbs::{Error, Qpn};
use bowline_wire::roce::UDP_PORT;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::time::Timespec;

use crate::capture::{Capture, Datagram, Direction};
use crate::impair::Way;
use crate::line::{Line, Packet, Passage};
use crate::shared::{Shared, State, Tx};
use crate::sys;

/// How long a send waits for room in the socket's buffer before its packets count as lost.
const SEND_PATIENCE: Timespec = Timespec { tv_sec: 0, tv_nsec: 20_000_000 };

/// Most received packets whose acknowledgement may be deferred until the program's next send: an
/// acknowledgement sent alone costs each side a system call. rxe sends 128 packets without one.
const UNANSWERED_MAX: u64 = 96;

/// Bursts of up to this many bytes are sent so fast that the clock need not be read again.
const CLOCK_BYTES_MIN: usize = 4 << 10;

/// Bursts are gathered for one call up to this many bytes.
const GATHER_BYTES: usize = 32 << 10;

/// Acknowledgement delay while threads poll: longer than a few of their round trips, on a slow
/// machine.
const ACK_DELAY: Duration = Duration::from_micros(100);
/// Acknowledgement delay while threads sleep: longer than one of their round trips, and long enough
/// for the background thread.
const ACK_DELAY_ASLEEP: Duration = Duration::from_millis(5);

impl Shared {
    /// Runs timers that are due; tells whether there were any.
    pub(crate) fn run_timers(&self) -> bool {
        let now = clock::now();
        let mut st = self.lock();
        let due = st.core.poll_timeout().is_some_and(|at| at <= now);
        if due {
            st.core.handle_timeout(now);
            self.settle(&mut st);
        }
        drop(st);
        if due {
            self.flush(now);
        }
        due
    }

    /// Tells whether acknowledgements can wait for the program's reaction to the received packets:
    /// no peer runs out of window, and the background thread sends them if the program does not
    /// react.
    pub(crate) fn may_defer_acks(&self, st: &State, now: Instant) -> bool {
        self.unanswered.load(Ordering::Relaxed) <= UNANSWERED_MAX && st.helper_polls_soon(now)
    }

    /// Posts send requests; `closed` is the error of a device that is gone.
    pub(crate) fn post<E>(
        &self,
        qp: Qpn,
        closed: E,
        post: impl FnOnce(&mut Core, Instant) -> Result<(), E>,
    ) -> Result<(), E> {
        let now = clock::now();
        let mut st = self.lock();
        if st.stop {
            return Err(closed);
        }
        let done = post(&mut st.core, now);
        self.settle(&mut st);
        // The program may post to other queue pairs next.
        let acks_deferred = self.may_defer_acks(&st, now) && st.core.defer_acks(now, qp);
        drop(st);
        if acks_deferred {
            self.flush_except_deferred_acks(now);
        } else {
            self.flush(now);
        }
        done
    }

    /// Sends all deferred and delayed acknowledgements, including those that another thread is
    /// about to send: they have been sent when this returns.
    pub(crate) fn release_acks(&self, now: Instant) {
        self.lock().core.release_acks(now);
        self.mark_unsent();
        let mut tx = self.tx.lock().unwrap_or_else(PoisonError::into_inner);
        self.send_marked(now, &mut tx.bursts);
        drop(tx);
        self.flush_unsent();
    }

    /// Sends everything that is marked as unsent.
    pub(crate) fn flush_unsent(&self) {
        if self.unsent.load(Ordering::SeqCst) {
            self.flush(clock::now());
        }
    }

    /// Sends everything the core has to send. If another thread is sending, that thread does it.
    pub(crate) fn flush(&self, now: Instant) {
        self.mark_unsent();
        while self.unsent.load(Ordering::SeqCst) {
            let Some(mut tx) = self.try_tx() else { return };
            self.send_marked(now, &mut tx.bursts);
        }
    }

    /// Like `flush`, except for the acknowledgements that the core has deferred: these are kept,
    /// unless another thread also has something to send.
    fn flush_except_deferred_acks(&self, now: Instant) {
        if let Some(mut tx) = self.try_tx() {
            self.unsent.store(false, Ordering::SeqCst);
            let acks_deferred = self.send_all(now, true, &mut tx.bursts);
            drop(tx);
            if !self.unsent.load(Ordering::SeqCst) {
                if acks_deferred {
                    self.mark_unsent();
                }
                return;
            }
        }
        self.flush(now);
    }

    /// Gets the right to send, unless another thread has it.
    fn try_tx(&self) -> Option<MutexGuard<'_, Tx>> {
        match self.tx.try_lock() {
            Ok(tx) => Some(tx),
            Err(TryLockError::Poisoned(tx)) => Some(tx.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Sends until nothing is marked as unsent.
    fn send_marked(&self, now: Instant, bursts: &mut Vec<Burst>) {
        while self.unsent.swap(false, Ordering::SeqCst) {
            self.unanswered.store(0, Ordering::Relaxed);
            self.send_all(now, false, bursts);
        }
    }

    /// Returns how long acknowledgements may be delayed. A sleeping thread must not be woken for
    /// one; where threads sleep at once, the background thread has to send them.
    fn ack_delay(&self, st: &State) -> Duration {
        if st.lead.is_asleep() {
            Duration::ZERO
        } else if self.poll_budget.is_none() {
            ACK_DELAY_ASLEEP
        } else {
            ACK_DELAY
        }
    }

    /// Sends everything. With `defer_acks`, deferred acknowledgements are kept as long as no other
    /// thread marks something as unsent; tells whether any were kept to the end.
    fn send_all(&self, mut now: Instant, defer_acks: bool, bursts: &mut Vec<Burst>) -> bool {
        loop {
            let mut st = self.lock();
            if !defer_acks || self.unsent.load(Ordering::SeqCst) {
                st.core.resume_acks();
            }
            let delay = self.ack_delay(&st);
            st.core.set_ack_delay(delay);
            let (mut count, mut bytes) = (0, 0);
            // Small bursts are gathered: packets of unequal sizes make many of them.
            while count < sys::SENDS_MAX && bytes < GATHER_BYTES {
                if count == bursts.len() {
                    bursts.push(Burst::new());
                }
                if !st.core.poll_transmit(now, &mut bursts[count]) {
                    break;
                }
                bytes += bursts[count].bytes.len();
                count += 1;
            }
            if count == 0 {
                self.settle(&mut st);
                return st.core.resume_acks();
            }
            drop(st);
            self.send_gathered(&bursts[..count]);
            // Short bursts take a negligible time.
            if bytes > CLOCK_BYTES_MIN {
                now = clock::now();
            }
        }
    }

    /// Sends bursts in order, with few calls.
    fn send_gathered(&self, mut bursts: &[Burst]) {
        while let [first, others @ ..] = bursts {
            let by_ring = |burst: &Burst| {
                let rings = self.among.rings.as_ref().filter(|_| self.endpoint(burst.to).is_some());
                rings.is_some_and(|rings| rings.is_way(burst))
            };
            let together = |burst: &&Burst| burst.from == first.from && !by_ring(burst);
            let same = 1 + others.iter().take_while(together).count();
            let is_changed = self.line.as_ref().is_some_and(Line::changes_sent);
            let plain = same > 1
                && !by_ring(first)
                && self.capture.is_none()
                && !self.cuts.any()
                && !is_changed;
            let endpoint = self.endpoint(first.from).filter(|_| plain);
            let sent = endpoint.map_or(0, |endpoint| endpoint.send_many(&bursts[..same]));
            if sent == 0 {
                // A single burst, or one with an error.
                self.send(first);
                bursts = others;
                continue;
            }
            self.stats.sends.inc();
            bursts[..sent].iter().for_each(|burst| self.count_sent(burst));
            bursts = &bursts[sent..];
        }
    }

    fn send(&self, burst: &Burst) {
        let Some(endpoint) = self.endpoint(burst.from) else {
            self.stats.packets_refused.add(burst.count as u64);
            return;
        };
        if self.cuts.between(burst.from, burst.to) {
            self.stats.packets_dropped.add(burst.count as u64);
            return;
        }
        if let Some(line) = self.line.as_ref().filter(|line| line.changes_sent()) {
            // Without bursts of several packets: see where the device is opened.
            let (mut lost, peer) = (0, SocketAddr::new(burst.to, UDP_PORT));
            let passage = line.pass(Way::Out, burst.from, peer, burst.tos, &burst.bytes, &mut lost);
            self.stats.packets_dropped.add(lost);
            if passage == Passage::Kept {
                return;
            }
        }
        if let Some(capture) = &self.capture {
            let mut capture = capture.lock().unwrap_or_else(PoisonError::into_inner);
            self.record_burst(&mut capture, endpoint.at(), burst);
        }
        if self.send_by_ring(burst) {
            return;
        }
        let mut result = endpoint.send(burst.to, burst.tos, burst.segment, &burst.bytes);
        self.stats.sends.inc();
        if result == Err(Errno::AGAIN) {
            self.stats.send_waits.inc();
            let mut fds = [PollFd::new(endpoint, PollFlags::OUT)];
            let _ = poll(&mut fds, Some(&SEND_PATIENCE));
            result = endpoint.send(burst.to, burst.tos, burst.segment, &burst.bytes);
            self.stats.sends.inc();
        }
        match result {
            Ok(()) => self.count_sent(burst),
            Err(errno) => self.refused(burst, errno),
        }
    }

    /// Sends a packet that was late, or that a bad network has changed.
    pub(crate) fn send_alone(&self, packet: &Packet) {
        let Packet { own, peer, tos, bytes, .. } = packet;
        let Some(endpoint) = self.endpoint(*own) else { return };
        if let Some(capture) = &self.capture {
            let mut capture = capture.lock().unwrap_or_else(PoisonError::into_inner);
            let (from, to) = (endpoint.at(), *peer);
            let datagram = Datagram { from, to, tos: *tos, ident: 0, payload: bytes };
            self.record(&mut capture, Direction::Out, &datagram);
        }
        self.stats.sends.inc();
        match endpoint.send(peer.ip(), *tos, bytes.len(), bytes) {
            Ok(()) => {
                self.stats.packets_sent.inc();
                self.stats.bytes_sent.add(bytes.len() as u64);
            }
            // It counts as lost, and is sent again.
            Err(_) => self.stats.packets_refused.inc(),
        }
    }

    pub(crate) fn count_sent(&self, burst: &Burst) {
        self.stats.packets_sent.add(burst.count as u64);
        self.stats.bytes_sent.add(burst.bytes.len() as u64);
        if burst.count > 1 {
            self.stats.gso_sends.inc();
        }
    }

    /// Handles a failed send. Its packets count as lost and are retransmitted.
    #[cold]
    fn refused(&self, burst: &Burst, errno: Errno) {
        self.stats.packets_refused.add(burst.count as u64);
        match errno {
            Errno::INVAL | Errno::IO | Errno::NOPROTOOPT | Errno::OPNOTSUPP if burst.count > 1 => {
                self.stats.gso_refused.inc();
                self.lock().core.set_gso(false);
            }
            Errno::MSGSIZE => {
                self.stats.packets_too_long.add(burst.count as u64);
                let what = format!(
                    "sending {} bytes to {}: the path carries less than the MTU of this device's \
                     setting, which must be lowered",
                    burst.segment, burst.to
                );
                self.fault(
                    Some(burst.to),
                    Error::System { what, errno: bowline_base::Errno(errno.raw_os_error()) },
                );
            }
            errno => {
                let what = format!("sending to {}", burst.to);
                self.fault(
                    Some(burst.to),
                    Error::System { what, errno: bowline_base::Errno(errno.raw_os_error()) },
                );
            }
        }
    }

    /// Records a fault, of one peer or in general.
    pub(crate) fn fault(&self, to: Option<IpAddr>, error: Error) {
        self.lock().faults.note(clock::now(), to, error);
    }

    fn record_burst(&self, capture: &mut Capture, from: SocketAddr, burst: &Burst) {
        let to = SocketAddr::new(burst.to, UDP_PORT);
        for (ident, payload) in (0..).zip(burst.bytes.chunks(burst.segment.max(1))) {
            self.record(
                capture,
                Direction::Out,
                &Datagram { from, to, tos: burst.tos, ident, payload },
            );
        }
    }

    pub(crate) fn record(
        &self,
        capture: &mut Capture,
        direction: Direction,
        datagram: &Datagram<'_>,
    ) {
        if capture.write(direction, datagram).is_err() {
            self.stats.capture_errors.inc();
        }
    }

    /// Flushes the capture file.
    pub(crate) fn flush_capture(&self) {
        if let Some(capture) = &self.capture {
            let mut capture = capture.lock().unwrap_or_else(PoisonError::into_inner);
            if capture.flush().is_err() {
                self.stats.capture_errors.inc();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use super::*;

    #[test]
    fn acknowledgements_are_out_when_somebody_has_waited_for_that() {
        let shared = Shared::unshared(&[IpAddr::from([127, 77, 1, 4])]);
        let sending = shared.tx.lock().unwrap();
        std::thread::scope(|scope| {
            let released = scope.spawn(|| shared.release_acks(clock::now()));
            std::thread::sleep(Duration::from_millis(50));
            assert!(!released.is_finished(), "another thread is sending still");
            drop(sending);
            released.join().unwrap();
        });
        assert!(!shared.unsent.load(Ordering::SeqCst));
    }
}
