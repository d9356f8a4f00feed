//! Paths that bursts do not survive: the IPv4 identifications of their packets do not count up as
//! they should, so that of each burst only the first packet arrives [ICRC-23].

use std::net::IpAddr;

use bowline_wire::roce::Psn;

/// Losses in a row, each one packet further on, after which bursts are believed to be what is lost.
const REQUEST_RESTARTS_MAX: u32 = 8;
/// The same for answers: the peer may need half a second for each.
const ANSWER_RESTARTS_MAX: u32 = 3;
/// Addresses remembered; beyond that the oldest is forgotten, and has to be found again.
const ADDRS_MAX: usize = 64;

/// Peers that are sent packets one by one.
#[derive(Debug, Default)]
pub(crate) struct GsoBlocklist {
    addrs: Vec<IpAddr>,
}

impl GsoBlocklist {
    pub(crate) fn contains(&self, to: IpAddr) -> bool {
        self.addrs.contains(&to)
    }

    /// Remembers a peer; tells whether it is a new one.
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

/// Watches where one side of a connection has to begin again, and again.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GsoLossDetector {
    last: Psn,
    count: u32,
    threshold: u32,
    /// Packets further on that one step is at most.
    stride: u32,
}

impl GsoLossDetector {
    /// For requests that are sent again.
    pub(crate) const fn for_requests() -> Self {
        Self { last: Psn::ZERO, count: 0, threshold: REQUEST_RESTARTS_MAX, stride: 1 }
    }

    /// For answers that are asked for again. What is missing is asked for by itself, so up to three
    /// packets, each the first of a burst, come between.
    pub(crate) const fn for_answers() -> Self {
        Self { last: Psn::ZERO, count: 0, threshold: ANSWER_RESTARTS_MAX, stride: 3 }
    }

    /// Beginning again with `psn`.
    pub(crate) fn note_restart(&mut self, psn: Psn) {
        match psn.since(self.last) {
            0 => {}
            steps if steps <= self.stride => self.count = self.count.saturating_add(1),
            _ => self.count = 0,
        }
        self.last = psn;
    }

    /// Tells whether it is time to do without bursts.
    pub(crate) const fn is_detected(&self) -> bool {
        self.count >= self.threshold
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_packet_at_a_time_is_noticed() {
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
