//! Heartbeats: the same on both sides, on the service connection of each connected path.
//!
//! A heartbeat answers two questions [RT-87]. *Is the peer alive?* Every `interval` it checks
//! whether anything came, and sends a message if so; after `missed_max` checks without a message
//! from the peer the path ends [RT-60]. *Is the path alive?* When nothing came for
//! `probe_interval`, it sends a message at once [RT-88], and the queue pair itself fails if that is
//! not acknowledged. It sends no second message while one waits for its answer. None of this is
//! negotiated: each side sends at its own pace [RT-94].
//!
//! A [`patient`](Heartbeat::patient) heartbeat belongs to a path whose queue pair tolerates silence
//! longer, since ending the path may be worse than waiting [RT-93]. It reports when the path is
//! silent; the caller decides whether the path ends.

use core::time::Duration;

use crate::{HbConfig, Instant};

/// The action to take now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeartbeatAction {
    /// Nothing; ask again at [`Heartbeat::next`].
    Nothing,
    /// Send an HB_MSG.
    SendMsg,
    /// Nothing was acknowledged for [`HbConfig::path_dead`]; reported again while that is so. Only
    /// from a patient heartbeat.
    Silent,
    /// The peer is dead: the path ends.
    Dead,
}

/// The heartbeat of a path.
#[derive(Clone, Debug)]
pub struct Heartbeat {
    config: HbConfig,
    /// Checks since anything came.
    missed: u32,
    /// When the last message came.
    last_received: Instant,
    /// When the next check is due.
    check_at: Instant,
    /// When the message that awaits an answer was sent.
    sent: Option<Instant>,
    patient: bool,
    /// When the last message came, or the last acknowledgement of a message.
    last_alive: Instant,
    /// Since when such signs of life have come without a long pause.
    alive_since: Instant,
    /// When the path counts as silent, unless it shows before that it is alive.
    silent_at: Option<Instant>,
}

impl Heartbeat {
    /// Starts the heartbeat of a path that has just been connected.
    pub fn new(config: HbConfig, now: Instant) -> Self {
        Self {
            config,
            missed: 0,
            last_received: now,
            check_at: now + config.interval,
            sent: None,
            patient: false,
            last_alive: now,
            alive_since: now,
            silent_at: None,
        }
    }

    /// Makes the heartbeat report silence, if the settings say to detect dead paths sooner than
    /// dead peers.
    #[must_use]
    pub fn patient(self) -> Self {
        Self { patient: self.config.fast_path_detection, ..self }
    }

    /// The peer's device has acknowledged a message.
    pub fn acknowledged(&mut self, now: Instant) {
        if !self.is_alive(now) {
            self.alive_since = now;
        }
        self.last_alive = now;
        self.silent_at = None;
    }

    /// Whether the path has worked for all the time after which another one counts as silent. A
    /// path that has only just come back says nothing of the others: what cut them all may have
    /// cut this one for a moment less.
    pub fn has_worked(&self, now: Instant) -> bool {
        self.is_alive(now) && now.saturating_since(self.alive_since) >= self.config.path_dead
    }

    /// Whether the path has shown recently that it is alive. A working idle path is probed every
    /// `probe_interval`.
    fn is_alive(&self, now: Instant) -> bool {
        let HbConfig { path_dead, probe_interval, .. } = self.config;
        now.saturating_since(self.last_alive) < (path_dead / 2).max(probe_interval * 3 / 2)
    }

    /// A message came from the peer [RT-57].
    pub fn received(&mut self, now: Instant) {
        self.missed = 0;
        self.last_received = now;
        self.acknowledged(now);
    }

    /// An HB_ACK came: returns the round-trip time, `None` if no message awaited an answer [RT-62].
    pub fn acked(&mut self, now: Instant) -> Option<Duration> {
        self.received(now);
        self.sent.take().map(|sent| now.saturating_since(sent))
    }

    /// Runs the timers. The time may have passed [`next`](Self::next) by any amount; only one check
    /// is made.
    pub fn tick(&mut self, now: Instant) -> HeartbeatAction {
        if now >= self.check_at {
            self.check_at = now + self.config.interval;
            if self.missed > self.config.missed_max {
                return HeartbeatAction::Dead;
            }
            self.missed += 1;
            if self.missed > 1 || self.sent.is_some() {
                return HeartbeatAction::Nothing;
            }
        } else if self.silent_at.is_some_and(|at| now >= at) {
            self.silent_at = Some(now + self.config.probe_interval);
            return HeartbeatAction::Silent;
        } else if self.probe_at().is_none_or(|at| now < at) {
            return HeartbeatAction::Nothing;
        }
        // An early probe is not a check: the next check may follow at once, and would end the path
        // an interval too soon.
        self.sent = Some(now);
        if self.patient {
            self.silent_at = Some(now + self.config.path_dead);
        }
        HeartbeatAction::SendMsg
    }

    /// When to call [`tick`](Self::tick).
    pub fn next(&self) -> Instant {
        [self.probe_at(), self.silent_at].into_iter().flatten().fold(self.check_at, Instant::min)
    }

    fn probe_at(&self) -> Option<Instant> {
        let asks = self.config.fast_path_detection && self.sent.is_none();
        asks.then(|| self.last_received + self.config.probe_interval)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(ms: u64) -> Instant {
        Instant::from_nanos(ms * 1_000_000)
    }

    fn slow() -> HbConfig {
        HbConfig { fast_path_detection: false, ..HbConfig::default() }
    }

    // tests [RT-60], [RT-61]
    #[test]
    fn a_silent_peer_is_dead_30_seconds_after_the_message() {
        let mut hb = Heartbeat::new(slow(), at(0));
        assert_eq!(hb.tick(at(4_999)), HeartbeatAction::Nothing);
        assert_eq!(hb.tick(at(5_000)), HeartbeatAction::SendMsg);
        for look in 2..=6 {
            assert_eq!(hb.tick(at(look * 5_000)), HeartbeatAction::Nothing);
        }
        assert_eq!(hb.next(), at(35_000));
        assert_eq!(hb.tick(at(35_000)), HeartbeatAction::Dead);
    }

    // tests [RT-57], [RT-61], [RT-62]
    #[test]
    fn one_message_for_each_look_while_the_peer_answers() {
        let mut hb = Heartbeat::new(slow(), at(0));
        for look in 1..100 {
            assert_eq!(hb.tick(at(look * 5_000)), HeartbeatAction::SendMsg);
            assert_eq!(hb.acked(at(look * 5_000 + 3)), Some(Duration::from_millis(3)));
            assert_eq!(hb.acked(at(look * 5_000 + 4)), None);
        }
    }

    // tests [RT-88]
    #[test]
    fn silence_is_asked_about_once_at_a_time() {
        let mut hb = Heartbeat::new(HbConfig::default(), at(0));
        assert_eq!(hb.next(), at(1_000));
        hb.received(at(900));
        assert_eq!(hb.tick(at(1_000)), HeartbeatAction::Nothing);
        assert_eq!(hb.next(), at(1_900));
        assert_eq!(hb.tick(at(1_900)), HeartbeatAction::SendMsg);
        assert_eq!(hb.tick(at(2_900)), HeartbeatAction::Nothing);
        assert_eq!(hb.next(), at(5_000));
        // The answer does not come, but other messages do: the peer is not dead, and is not probed
        // again.
        for second in 3..60 {
            hb.received(at(second * 1_000));
            assert_eq!(hb.tick(at(second * 1_000 + 500)), HeartbeatAction::Nothing);
        }
        assert!(hb.acked(at(60_000)).is_some());
        assert_eq!(hb.tick(at(61_000)), HeartbeatAction::SendMsg);
    }

    // tests [RT-88]
    #[test]
    fn timers_may_run_a_tenth_of_the_shortest_time_late() {
        let slack = |config: HbConfig| config.slack().as_millis();
        assert_eq!((slack(HbConfig::default()), slack(slow())), (100, 500));
        let interval = Duration::from_millis(200);
        assert_eq!(slack(HbConfig { interval, ..slow() }), 20);
    }

    // tests [RT-88], [RT-93]
    #[test]
    fn a_patient_one_tells_of_silence_until_the_path_is_alive() {
        let mut hb = Heartbeat::new(HbConfig::default(), at(0)).patient();
        assert_eq!(hb.tick(at(1_000)), HeartbeatAction::SendMsg);
        assert!(hb.is_alive(at(1_499)) && !hb.is_alive(at(1_500)));
        assert_eq!(hb.next(), at(4_000));
        assert_eq!(hb.tick(at(4_000)), HeartbeatAction::Silent);
        assert_eq!(hb.next(), at(5_000));
        assert_eq!(hb.tick(at(5_000)), HeartbeatAction::Nothing, "a look");
        assert_eq!(hb.tick(at(5_000)), HeartbeatAction::Silent);
        // The message is acknowledged, but not answered: the path is alive, the peer may not be.
        hb.acknowledged(at(5_500));
        assert!(hb.is_alive(at(6_000)) && !hb.has_worked(at(6_000)), "it has just come back");
        for look in 2..=6 {
            assert_eq!(
                (hb.next(), hb.tick(at(look * 5_000))),
                (at(look * 5_000), HeartbeatAction::Nothing)
            );
        }
        assert_eq!(hb.tick(at(35_000)), HeartbeatAction::Dead);
        // Without fast detection of dead paths silence is not reported.
        let mut hb = Heartbeat::new(slow(), at(0)).patient();
        assert_eq!(hb.tick(at(5_000)), HeartbeatAction::SendMsg);
        assert_eq!(hb.next(), at(10_000));
    }

    // tests [RT-93]
    #[test]
    fn a_path_works_once_it_has_done_so_for_a_while() {
        let mut hb = Heartbeat::new(HbConfig::default(), at(0)).patient();
        let mut lives = |from: u64, to: u64| {
            for ms in (from..to).step_by(1_000) {
                hb.received(at(ms));
            }
            hb.has_worked(at(to))
        };
        assert!(!lives(1_000, 2_999));
        assert!(lives(2_999, 3_000));
        assert!(lives(3_999, 9_000));
        assert!(!lives(12_000, 14_999), "nothing was heard for 3 s");
        assert!(lives(14_999, 15_000));
    }

    // tests [RT-60], [RT-61], [RT-88]
    #[test]
    fn a_peer_is_dead_after_30_to_35_seconds_whenever_it_fell_silent() {
        let impatient = [HbConfig::default(), slow()].map(|config| Heartbeat::new(config, at(0)));
        let patient = Heartbeat::new(HbConfig::default(), at(0)).patient();
        for start in [&impatient[0], &impatient[1], &patient] {
            for silent in (0..10_000).step_by(50) {
                let mut hb = start.clone();
                let mut beats = 0;
                loop {
                    let now = hb.next().as_nanos() / 1_000_000;
                    if now > silent {
                        break;
                    }
                    if hb.tick(at(now)) == HeartbeatAction::SendMsg {
                        assert!(hb.acked(at(now)).is_some());
                    }
                }
                hb.received(at(silent));
                let dead = loop {
                    let now = hb.next().as_nanos() / 1_000_000;
                    match hb.tick(at(now)) {
                        HeartbeatAction::Dead => break now,
                        HeartbeatAction::SendMsg => beats += 1,
                        HeartbeatAction::Nothing | HeartbeatAction::Silent => {}
                    }
                };
                let silence = dead - silent;
                assert!((30_000..=35_000).contains(&silence), "{silence} ms from {silent} ms on");
                assert_eq!(beats, 1, "asked once, from {silent} ms on");
            }
        }
    }
}
