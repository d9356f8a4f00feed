//! Settings of the connection manager. Times that both sides must agree on are codes: code t means
//! 2^(t-8) milliseconds [CM-34].

use std::time::Duration;

use bowline_verbs::Mtu;

/// Settings of the connection manager. The defaults are the kernel's times and numbers.
#[derive(Clone, Debug)]
pub struct CmConfig {
    /// Code of the packet lifetime, 5 bits; part of the acknowledgement timeout [CM-33].
    pub packet_life: u8,
    /// Code of this side's acknowledgement delay, 5 bits [CM-55].
    pub ack_delay: u8,
    /// Code of the response time of either side, 5 bits [CMA-8].
    pub response_timeout: u8,
    /// Most times a message is resent at the full period, at most 15 [CM-40].
    pub max_retries: u8,
    /// Delays after which a message is resent before the full period applies. A kernel ignores
    /// messages it has already, or answers them again [CM-44]; so a lost message costs less time.
    pub first_resends: Vec<Duration>,
    /// How long after its begin a request is repeated that the peer refuses since nobody listens at
    /// its port. Zero, as a kernel's: not at all. For programs whose sides start at once [CM-58].
    pub listener_patience: Duration,
    /// Code of the time a program may take to answer a request, told to a peer that repeats its
    /// request [CM-43].
    pub service_timeout: u8,
    /// Most requests of one listener that the program has not answered. A new request evicts the
    /// oldest one [CM-57].
    pub max_pending: usize,
    /// Most unproven connections: requested by others, without proof that there is anybody at the
    /// address of the peer. These are unanswered requests, and answered ones that wait for a
    /// message of the peer. A new request evicts the oldest one [CM-57].
    pub max_unproven: usize,
    /// Most connections, in any state.
    pub max_connections: usize,
}

impl Default for CmConfig {
    fn default() -> Self {
        Self {
            packet_life: 16,
            ack_delay: 15,
            response_timeout: 20,
            max_retries: 15,
            first_resends: [50, 200, 1000].map(Duration::from_millis).to_vec(),
            listener_patience: Duration::ZERO,
            service_timeout: 24,
            max_pending: 128,
            max_unproven: 1024,
            max_connections: 16_384,
        }
    }
}

impl CmConfig {
    /// Returns the code of the acknowledgement timeout that this side requests [CM-33].
    pub(super) fn ack_timeout(&self) -> u8 {
        ack_timeout(self.ack_delay, self.packet_life)
    }

    /// Returns the period in which a REQ is resent [CM-40].
    pub(super) fn req_period(&self) -> Duration {
        2 * time_of(self.packet_life) + time_of(self.response_timeout)
    }
}

/// Attributes of the device that the manager needs.
#[derive(Clone, Debug)]
pub(crate) struct Port {
    /// Node GUID, unique and not 0 [CM-37].
    pub(crate) guid: u64,
    /// Largest path MTU.
    pub(crate) mtu: Mtu,
    /// Most reads and atomics of a queue pair, either way.
    pub(crate) max_rd_atomic: u8,
    /// Highest byte of communication ids.
    pub(crate) part: Option<u8>,
}

/// Largest code of a peer that is used as it is, about 65 seconds.
const LONGEST: u8 = 24;

/// Returns the time a code stands for, as the kernel rounds it [CM-34].
pub(super) fn time_of(code: u8) -> Duration {
    Duration::from_millis(1 << code.min(LONGEST).saturating_sub(8))
}

/// Limits the code of an acknowledgement timeout that the peer chose to 67 ms .. 4.3 s: neither
/// "none", with which nothing would ever be retransmitted, nor hours.
pub(super) fn bounded_timeout(code: u8) -> u8 {
    code.clamp(14, 20)
}

/// Returns the code of a queue pair's acknowledgement timeout, computed from the peer's delay and
/// the packet lifetime [CM-33].
pub(super) fn ack_timeout(delay: u8, packet_life: u8) -> u8 {
    let (flight, delay) = (packet_life.min(31) + 1, delay.min(31));
    let code = if flight >= delay {
        flight + u8::from(delay >= flight - 1)
    } else {
        delay + u8::from(flight >= delay - 1)
    };
    code.min(31)
}

#[cfg(test)]
mod tests {
    use super::*;

    // tests [CM-33] [CM-55]
    #[test]
    fn acknowledgement_timeouts() {
        assert_eq!(ack_timeout(15, 16), 17, "rxe and RoCE");
        assert_eq!(ack_timeout(0, 16), 17, "never below 17 [CM-55]");
        assert_eq!(ack_timeout(16, 16), 18);
        assert_eq!(ack_timeout(17, 16), 18);
        assert_eq!(ack_timeout(18, 16), 19);
        assert_eq!(ack_timeout(25, 16), 25);
        assert_eq!(ack_timeout(31, 31), 31);
        assert_eq!(ack_timeout(255, 255), 31);
        assert_eq!(ack_timeout(0, 0), 2);
    }

    // tests [CM-34] [CM-40] [CM-43] [CM-45]
    /// The figures of SECURITY.md.
    #[test]
    fn what_a_peer_chooses_and_takes_is_bounded() {
        // 4.096 us times two to the code's power: 67 ms and 4.3 s.
        for (chosen, counts) in [(0, 14), (1, 14), (14, 14), (17, 17), (20, 20), (21, 20), (31, 20)]
        {
            assert_eq!(bounded_timeout(chosen), counts);
        }
        let config = CmConfig::default();
        assert_eq!((config.max_connections, config.max_unproven), (16_384, 1024));
        assert_eq!(config.max_pending, 128);
    }

    #[test]
    fn times() {
        let config = CmConfig::default();
        assert_eq!(config.req_period(), Duration::from_millis(4608));
        assert_eq!(time_of(20), Duration::from_millis(4096));
        assert_eq!(time_of(24), Duration::from_millis(65536));
        assert_eq!(time_of(config.ack_timeout()), Duration::from_millis(512));
        assert_eq!(time_of(3), Duration::from_millis(1));
        assert_eq!(time_of(31), time_of(24));
    }
}
