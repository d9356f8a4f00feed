//! Heartbeats: the same on both sides, on the service connection of each connected path.
//!
//! Two questions are asked [RT-87]. *Is the peer alive?* Every `interval` it is looked whether
//! anything came, and a message is sent if so; after `missed_max` looks without a sign of life the
//! path ends [RT-60]. *Is the path alive?* When nothing came for `probe_interval` a message is sent
//! at once [RT-88], and the queue pair itself fails if nobody acknowledges it. No second message is
//! sent while one waits for its answer. Nothing of this is negotiated: each side asks at its own
//! pace [RT-94].
//!
//! A [`patient`](Heartbeat::patient) heartbeat is that of a path whose queue pair bears silence
//! longer, since its end may be worse than the wait [RT-93]. It tells when the path is silent;
//! whether it ends is for others to say.

use core::time::Duration;

use crate::{HbConfig, Instant};

/// What to do now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HbDo {
    /// Nothing; ask again at [`Heartbeat::next`].
    Nothing,
    /// Send an HB_MSG.
    SendMsg,
    /// Nothing is acknowledged for [`HbConfig::path_dead`]; told again while that is so. Only of a
    /// patient one.
    Silent,
    /// The peer is dead: the path ends.
    Dead,
}

/// The heartbeat of a path.
#[derive(Clone, Debug)]
pub struct Heartbeat {
    config: HbConfig,
    /// Looks since something came.
    missed: u32,
    /// When something came last.
    heard: Instant,
    /// The next look.
    look: Instant,
    /// When the message was sent whose answer is awaited.
    sent: Option<Instant>,
    patient: bool,
    /// When something came, or something sent was acknowledged, last.
    alive: Instant,
    /// When the path is silent, if it does not show before that it is alive.
    silent_at: Option<Instant>,
}

impl Heartbeat {
    /// Starts the heartbeat of a path that has just been connected.
    pub fn new(config: HbConfig, now: Instant) -> Self {
        Self {
            config,
            missed: 0,
            heard: now,
            look: now + config.interval,
            sent: None,
            patient: false,
            alive: now,
            silent_at: None,
        }
    }

    /// One that tells of silence, if the settings are to find dead paths sooner than dead peers.
    #[must_use]
    pub fn patient(self) -> Self {
        Self { patient: self.config.fast_path_detection, ..self }
    }

    /// The peer's device has acknowledged something.
    pub fn acknowledged(&mut self, now: Instant) {
        self.alive = now;
        self.silent_at = None;
    }

    /// Tells whether the path has shown of late that it is alive: one that works, and has nothing
    /// to carry, is asked every `probe_interval`.
    pub fn is_alive(&self, now: Instant) -> bool {
        let HbConfig { path_dead, probe_interval, .. } = self.config;
        now.saturating_since(self.alive) < (path_dead / 2).max(probe_interval * 3 / 2)
    }

    /// Something came from the peer [RT-57].
    pub fn received(&mut self, now: Instant) {
        self.missed = 0;
        self.heard = now;
        self.acknowledged(now);
    }

    /// An HB_ACK came: returns the time the answer took, `None` if nothing was asked [RT-62].
    pub fn acked(&mut self, now: Instant) -> Option<Duration> {
        self.received(now);
        self.sent.take().map(|sent| now.saturating_since(sent))
    }

    /// Looks at the clock. Time may have passed [`next`](Self::next) by any amount; one look is
    /// made.
    pub fn tick(&mut self, now: Instant) -> HbDo {
        if now >= self.look {
            self.look = now + self.config.interval;
            if self.missed > self.config.missed_max {
                return HbDo::Dead;
            }
            self.missed += 1;
            if self.missed > 1 || self.sent.is_some() {
                return HbDo::Nothing;
            }
        } else if self.silent_at.is_some_and(|at| now >= at) {
            self.silent_at = Some(now + self.config.probe_interval);
            return HbDo::Silent;
        } else if self.probe_at().is_none_or(|at| now < at) {
            return HbDo::Nothing;
        }
        // A message sent early is no look: the next one may follow at once, and would end the path
        // an interval too soon.
        self.sent = Some(now);
        if self.patient {
            self.silent_at = Some(now + self.config.path_dead);
        }
        HbDo::SendMsg
    }

    /// When to call [`tick`](Self::tick).
    pub fn next(&self) -> Instant {
        [self.probe_at(), self.silent_at].into_iter().flatten().fold(self.look, Instant::min)
    }

    fn probe_at(&self) -> Option<Instant> {
        let asks = self.config.fast_path_detection && self.sent.is_none();
        asks.then(|| self.heard + self.config.probe_interval)
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
        assert_eq!(hb.tick(at(4_999)), HbDo::Nothing);
        assert_eq!(hb.tick(at(5_000)), HbDo::SendMsg);
        for look in 2..=6 {
            assert_eq!(hb.tick(at(look * 5_000)), HbDo::Nothing);
        }
        assert_eq!(hb.next(), at(35_000));
        assert_eq!(hb.tick(at(35_000)), HbDo::Dead);
    }

    // tests [RT-57], [RT-61], [RT-62]
    #[test]
    fn one_message_for_each_look_while_the_peer_answers() {
        let mut hb = Heartbeat::new(slow(), at(0));
        for look in 1..100 {
            assert_eq!(hb.tick(at(look * 5_000)), HbDo::SendMsg);
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
        assert_eq!(hb.tick(at(1_000)), HbDo::Nothing);
        assert_eq!(hb.next(), at(1_900));
        assert_eq!(hb.tick(at(1_900)), HbDo::SendMsg);
        assert_eq!(hb.tick(at(2_900)), HbDo::Nothing);
        assert_eq!(hb.next(), at(5_000));
        // The answer does not come but other things do: not dead, and not asked twice.
        for second in 3..60 {
            hb.received(at(second * 1_000));
            assert_eq!(hb.tick(at(second * 1_000 + 500)), HbDo::Nothing);
        }
        assert!(hb.acked(at(60_000)).is_some());
        assert_eq!(hb.tick(at(61_000)), HbDo::SendMsg);
    }

    // tests [RT-88], [RT-93]
    #[test]
    fn a_patient_one_tells_of_silence_until_the_path_is_alive() {
        let mut hb = Heartbeat::new(HbConfig::default(), at(0)).patient();
        assert_eq!(hb.tick(at(1_000)), HbDo::SendMsg);
        assert!(hb.is_alive(at(1_499)) && !hb.is_alive(at(1_500)));
        assert_eq!(hb.next(), at(4_000));
        assert_eq!(hb.tick(at(4_000)), HbDo::Silent);
        assert_eq!(hb.next(), at(5_000));
        assert_eq!(hb.tick(at(5_000)), HbDo::Nothing, "a look");
        assert_eq!(hb.tick(at(5_000)), HbDo::Silent);
        // The message is acknowledged, and not answered: the path is alive, of the peer nobody
        // knows.
        hb.acknowledged(at(5_500));
        assert!(hb.is_alive(at(6_000)));
        for look in 2..=6 {
            assert_eq!((hb.next(), hb.tick(at(look * 5_000))), (at(look * 5_000), HbDo::Nothing));
        }
        assert_eq!(hb.tick(at(35_000)), HbDo::Dead);
        // Where dead paths are not looked for there is no such thing.
        let mut hb = Heartbeat::new(slow(), at(0)).patient();
        assert_eq!(hb.tick(at(5_000)), HbDo::SendMsg);
        assert_eq!(hb.next(), at(10_000));
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
                    if hb.tick(at(now)) == HbDo::SendMsg {
                        assert!(hb.acked(at(now)).is_some());
                    }
                }
                hb.received(at(silent));
                let dead = loop {
                    let now = hb.next().as_nanos() / 1_000_000;
                    match hb.tick(at(now)) {
                        HbDo::Dead => break now,
                        HbDo::SendMsg => beats += 1,
                        HbDo::Nothing | HbDo::Silent => {}
                    }
                };
                let silence = dead - silent;
                assert!((30_000..=35_000).contains(&silence), "{silence} ms from {silent} ms on");
                assert_eq!(beats, 1, "asked once, from {silent} ms on");
            }
        }
    }
}
