//! A TCP flow with CUBIC (RFC 9438), as far as its neighbours on a link notice it: a window that
//! grows with time, falls at a loss, and is filled in bursts by acknowledgements. A loss is noticed
//! when three later packets have arrived, or by a timer.

use std::collections::VecDeque;

use super::link::OUTER_BYTES;

/// Bytes of a packet on the link besides its payload: those around UDP's, with TCP's header.
const HEADERS: u64 = OUTER_BYTES - 8 + 20;
/// Later arrivals that prove a loss.
const LATER: u64 = 3;
/// Constant of the cubic function, in packets per cubed second.
const C: f64 = 0.4;
/// What a loss leaves of the window.
const BETA: f64 = 0.7;
/// Shortest retransmission timer in nanoseconds.
const TIMER_MIN: u64 = 200_000_000;

/// A packet in flight.
#[derive(Clone, Copy, Debug)]
struct Flying {
    number: u64,
    at: u64,
}

/// The sender of a flow that always has something to send. Numbers are those of transmissions: what
/// is sent again gets a new one, so that nothing is ambiguous.
#[derive(Debug)]
pub(super) struct Cubic {
    /// Payload bytes of a packet.
    payload: u64,
    window: f64,
    threshold: f64,
    /// Window before the last loss, and when that was.
    max: f64,
    since: Option<u64>,
    /// The window that a Reno flow would have.
    reno: f64,
    flying: VecDeque<Flying>,
    next: u64,
    /// Losses of packets before this one belong to the last reduction.
    reduced_at: u64,
    round_trip: f64,
    pub(super) delivered: u64,
}

impl Cubic {
    /// A flow whose packets have so many bytes of payload.
    pub(super) fn new(payload: u64) -> Self {
        Self {
            payload,
            window: 10.0,
            threshold: f64::INFINITY,
            max: 0.0,
            since: None,
            reno: 10.0,
            flying: VecDeque::new(),
            next: 0,
            reduced_at: 0,
            round_trip: 1e6,
            delivered: 0,
        }
    }

    /// Bytes of a packet on the link.
    pub(super) const fn packet(&self) -> u64 {
        self.payload + HEADERS
    }

    /// Share of a link's bytes that can be payload.
    pub(super) fn payload_share(&self) -> f64 {
        self.payload as f64 / self.packet() as f64
    }

    /// Returns the number of the next packet, if one may be sent now.
    pub(super) fn send(&mut self, now: u64) -> Option<u64> {
        if self.flying.len() as f64 >= self.window {
            return None;
        }
        let number = self.next;
        self.next += 1;
        self.flying.push_back(Flying { number, at: now });
        Some(number)
    }

    /// Takes the acknowledgement of one packet.
    pub(super) fn acknowledged(&mut self, now: u64, number: u64) {
        let Some(at) = self.flying.iter().position(|packet| packet.number == number) else {
            return;
        };
        let Some(packet) = self.flying.remove(at) else { return };
        self.delivered += self.payload;
        self.round_trip += ((now - packet.at) as f64 - self.round_trip) / 8.0;
        while let Some(oldest) = self.flying.front().copied()
            && oldest.number + LATER <= number
        {
            self.flying.pop_front();
            self.lost(now, oldest.number);
        }
        self.grow(now);
    }

    /// Returns when [`expired`](Self::expired) is due.
    pub(super) fn deadline(&self) -> Option<u64> {
        self.flying.front().map(|oldest| oldest.at + TIMER_MIN.max(2 * self.round_trip as u64))
    }

    /// Takes everything in flight as lost.
    pub(super) fn expired(&mut self, now: u64) {
        let Some(oldest) = self.flying.front().copied() else { return };
        self.lost(now, oldest.number);
        self.flying.clear();
        self.window = 1.0;
    }

    fn lost(&mut self, now: u64, number: u64) {
        if number < self.reduced_at {
            return;
        }
        self.reduced_at = self.next;
        // Fast convergence: a flow that loses before it was back leaves room for others.
        let back = self.window >= self.max;
        self.max = if back { self.window } else { self.window * (1.0 + BETA) / 2.0 };
        self.window = (self.window * BETA).max(2.0);
        self.threshold = self.window;
        self.reno = self.window;
        self.since = Some(now);
    }

    fn grow(&mut self, now: u64) {
        if self.window < self.threshold {
            self.window += 1.0;
            return;
        }
        let since = *self.since.get_or_insert(now);
        let t = (now - since) as f64 / 1e9 + self.round_trip / 1e9;
        let k = (self.max * (1.0 - BETA) / C).cbrt();
        let target = C * (t - k).powi(3) + self.max;
        let alpha = if self.reno < self.max { 3.0 * (1.0 - BETA) / (1.0 + BETA) } else { 1.0 };
        self.reno += alpha / self.window;
        let step = ((target - self.window) / self.window).clamp(0.0, 0.5);
        self.window = (self.window + step).max(self.reno);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn three_later_arrivals_prove_a_loss_and_reduce_the_window_once() {
        let mut flow = Cubic::new(1460);
        let sent: Vec<u64> = std::iter::from_fn(|| flow.send(0)).collect();
        assert_eq!(sent.len(), 10);
        for number in 2..6 {
            flow.acknowledged(1_000, number);
        }
        let window = flow.window;
        assert!((7.0..10.0).contains(&window), "{window}");
        flow.acknowledged(1_000, 6);
        assert!(flow.window >= window, "packets 0 and 1 are one loss");
    }

    #[test]
    fn after_a_loss_the_window_comes_back_in_the_time_of_the_cubic_function() {
        let mut flow = Cubic::new(1460);
        (flow.window, flow.next) = (100.0, 1);
        flow.lost(0, 0);
        assert!((flow.window - 70.0).abs() < 1e-9);
        // The cube root of 100 * 0.3 / 0.4 seconds, with a round trip of 100 ms.
        flow.round_trip = 1e8;
        for at in 0..420 {
            (0..10).for_each(|_| flow.grow(at * 10_000_000));
        }
        assert!((95.0..110.0).contains(&flow.window), "{}", flow.window);
    }
}
