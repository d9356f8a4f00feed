//! Paths that bursts do not survive: the IPv4 identifications of their packets do not count up as
//! they should, so that of each burst only the first packet arrives [ICRC-23].

use std::net::IpAddr;

use bowline_wire::roce::Psn;

/// Losses in a row, each one packet further on, after which bursts are believed to be what is lost.
const CREEPING_MAX: u32 = 8;
/// The same for answers: the peer may need half a second for each.
const CREEPING_ANSWERS_MAX: u32 = 3;
/// Addresses remembered; beyond that the oldest is forgotten, and has to be found again.
const ADDRS_MAX: usize = 64;

/// Peers that are sent packets one by one.
#[derive(Debug, Default)]
pub(crate) struct Paths {
    addrs: Vec<IpAddr>,
}

impl Paths {
    pub(crate) fn breaks_bursts(&self, to: IpAddr) -> bool {
        self.addrs.contains(&to)
    }

    /// Remembers a peer; tells whether it is a new one.
    pub(crate) fn add(&mut self, to: IpAddr) -> bool {
        if self.breaks_bursts(to) {
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
pub(crate) struct Creeping {
    last: Psn,
    count: u32,
    most: u32,
    /// Packets further on that one step is at most.
    stride: u32,
}

impl Creeping {
    /// For requests that are sent again.
    pub(crate) const fn of_requests() -> Self {
        Self { last: Psn::ZERO, count: 0, most: CREEPING_MAX, stride: 1 }
    }

    /// For answers that are asked for again. What is missing is asked for by itself, so up to three
    /// packets, each the first of a burst, come between.
    pub(crate) const fn of_answers() -> Self {
        Self { last: Psn::ZERO, count: 0, most: CREEPING_ANSWERS_MAX, stride: 3 }
    }

    /// Beginning again with `psn`.
    pub(crate) fn begin_again(&mut self, psn: Psn) {
        match psn.since(self.last) {
            0 => {}
            steps if steps <= self.stride => self.count = self.count.saturating_add(1),
            _ => self.count = 0,
        }
        self.last = psn;
    }

    /// Tells whether it is time to do without bursts.
    pub(crate) const fn is_certain(&self) -> bool {
        self.count >= self.most
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_packet_at_a_time_is_noticed() {
        let mut creeping = Creeping::of_answers();
        for psn in [0xff_fffd, 0xff_fffe, 0xff_fffe, 0xff_ffff, 5, 6, 7] {
            creeping.begin_again(Psn::new(psn));
            assert!(!creeping.is_certain());
        }
        creeping.begin_again(Psn::new(8));
        assert!(creeping.is_certain());
    }

    #[test]
    fn few_addresses_are_remembered() {
        let mut paths = Paths::default();
        for last in 0..=ADDRS_MAX as u8 {
            assert!(paths.add(IpAddr::from([10, 0, 0, last])));
        }
        assert!(!paths.breaks_bursts(IpAddr::from([10, 0, 0, 0])));
        assert!(!paths.add(IpAddr::from([10, 0, 0, 1])));
    }
}
