//! Detection of paths on which bursts (UDP GSO) lose all packets but the first: the IPv4
//! identifications of their packets do not count up as the ICRC expects [ICRC-23].

use std::net::IpAddr;

use bowline_wire::roce::Psn;

/// Consecutive restarts of requests, each one packet after the previous, that count as proof.
const REQUEST_RESTARTS_MAX: u32 = 8;
/// Consecutive restarts of READ answers that count as proof; a peer may need half a second for
/// each.
const ANSWER_RESTARTS_MAX: u32 = 3;
/// Most addresses kept. Beyond that the oldest is dropped, and has to be detected again.
const ADDRS_MAX: usize = 64;

/// Peers to which packets are sent one by one.
#[derive(Debug, Default)]
pub(crate) struct GsoBlocklist {
    addrs: Vec<IpAddr>,
}

impl GsoBlocklist {
    pub(crate) fn contains(&self, to: IpAddr) -> bool {
        self.addrs.contains(&to)
    }

    /// Adds a peer; tells whether it is new.
    pub(crate) fn insert(&mut self, to: IpAddr) -> bool {
        if self.contains(to) {
            return false;
        }
        if self.addrs.len() == ADDRS_MAX {
            self.addrs.remove(0);
        }
        self.addrs.push(to);
        true
    }
}

/// Detects that one direction of a connection restarts again and again, each time a little further
/// on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GsoLossDetector {
    last: Psn,
    count: u32,
    threshold: u32,
    /// Most packets between two restarts for the second to count.
    stride: u32,
}

impl GsoLossDetector {
    /// Detector for retransmitted requests.
    pub(crate) const fn for_requests() -> Self {
        Self { last: Psn::ZERO, count: 0, threshold: REQUEST_RESTARTS_MAX, stride: 1 }
    }

    /// Detector for READ answers that are requested again. A missing packet is requested by itself,
    /// so up to three packets, each the first of its burst, lie between two restarts.
    pub(crate) const fn for_answers() -> Self {
        Self { last: Psn::ZERO, count: 0, threshold: ANSWER_RESTARTS_MAX, stride: 3 }
    }

    /// Records a restart at `psn`.
    pub(crate) fn note_restart(&mut self, psn: Psn) {
        match psn.since(self.last) {
            0 => {}
            steps if steps <= self.stride => self.count = self.count.saturating_add(1),
            _ => self.count = 0,
        }
        self.last = psn;
    }

    /// Tells whether bursts are to be given up.
    pub(crate) const fn is_detected(&self) -> bool {
        self.count >= self.threshold
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn progress_by_one_packet_at_a_time_is_detected() {
        let mut detector = GsoLossDetector::for_answers();
        for psn in [0xff_fffd, 0xff_fffe, 0xff_fffe, 0xff_ffff, 5, 6, 7] {
            detector.note_restart(Psn::new(psn));
            assert!(!detector.is_detected());
        }
        detector.note_restart(Psn::new(8));
        assert!(detector.is_detected());
    }

    #[test]
    fn few_addresses_are_remembered() {
        let mut blocklist = GsoBlocklist::default();
        for last in 0..=ADDRS_MAX as u8 {
            assert!(blocklist.insert(IpAddr::from([10, 0, 0, last])));
        }
        assert!(!blocklist.contains(IpAddr::from([10, 0, 0, 0])));
        assert!(!blocklist.insert(IpAddr::from([10, 0, 0, 1])));
    }
}
