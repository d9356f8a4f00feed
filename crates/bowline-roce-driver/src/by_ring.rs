//! Bursts to and from other processes of this host, by memory.

use core::sync::atomic::Ordering;
use std::net::SocketAddr;
use std::sync::PoisonError;
use std::time::Duration;

use bowline_base::clock;
use bowline_roce::Burst;

use crate::receive::{PumpResult, Rx, split};
use crate::share::{Came, Rings, Sent};
use crate::shared::Shared;
use crate::sys::Arrival;
use crate::udp::ROCE_PORT;

/// How long a send waits for room in another process's memory.
const RING_PATIENCE: Duration = Duration::from_millis(20);

/// Bursts read from one ring before others have their turn.
const RING_BURSTS: usize = 16;

impl Shared {
    /// Sends a burst to another process of this host by memory; returns whether it is for one.
    pub(crate) fn send_by_ring(&self, burst: &Burst) -> bool {
        let rings = self.among.rings.as_ref().filter(|_| self.endpoint(burst.to).is_some());
        let Some(rings) = rings else { return false };
        let mut waits_until = None;
        loop {
            match rings.put(burst) {
                Sent::Elsewhere => return false,
                Sent::Done => {
                    self.stats.ring_sends.inc();
                    self.count_sent(burst);
                    return true;
                }
                Sent::Stuck => break,
                Sent::Full => {}
            }
            let now = clock::now();
            if waits_until.is_none() {
                self.stats.send_waits.inc();
            }
            if *waits_until.get_or_insert(now + RING_PATIENCE) <= now {
                rings.note_stuck(burst);
                break;
            }
            // The other process may wait for room on its way here. A thread that has the right to
            // send may read, if nobody else does.
            if self.pump() != PumpResult::Received {
                std::thread::yield_now();
            }
        }
        // They count as lost, and are sent again.
        self.stats.packets_refused.add(burst.count as u64);
        true
    }

    /// Handles what has come by rings; returns how many bytes.
    pub(crate) fn read_rings(&self, rings: &Rings, rx: &mut Rx) -> usize {
        let mut bytes = 0;
        for at in 0..rings.len() {
            for _ in 0..RING_BURSTS {
                let Some(came) = rings.take(at, &mut rx.burst) else { break };
                bytes += came.len;
                self.take_in_burst(&came, &rx.burst[..came.len]);
            }
        }
        bytes
    }

    /// Passes the packets of a burst that came by a ring to the core.
    fn take_in_burst(&self, came: &Came, bytes: &[u8]) {
        let (from, to) = (SocketAddr::new(came.from, ROCE_PORT), came.to);
        if self.endpoint(came.from).is_none() || self.endpoint(to).is_none() {
            self.stats.unusable.inc();
            return;
        }
        let arrival = Arrival {
            from,
            len: bytes.len(),
            segment: Some(came.segment),
            tos: came.tos,
            overflows: 0,
        };
        if let Some(capture) = &self.capture {
            let mut capture = capture.lock().unwrap_or_else(PoisonError::into_inner);
            for (hint, payload) in split(&arrival, bytes) {
                self.record_arrival(
                    &mut capture,
                    from,
                    SocketAddr::new(to, ROCE_PORT),
                    hint,
                    payload,
                );
            }
        }
        let now = clock::now();
        let mut st = self.lock();
        if st.stop {
            return;
        }
        self.stats.ring_receives.inc();
        let packets = self.take_in_run(&mut st, now, to, &arrival, came.tos, bytes);
        self.settle(&mut st);
        drop(st);
        self.unanswered.fetch_add(packets, Ordering::Relaxed);
        self.stats.packets_received.add(packets);
        self.stats.bytes_received.add(bytes.len() as u64);
    }
}
