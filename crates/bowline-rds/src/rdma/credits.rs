//! Flow control by credits, which is off unless a setting turns it on [IB-72], [IB-73].

/// Number of posted and unannounced receives at which an acknowledgement announces them; half of
/// the receives if these are fewer, or the peer would wait for ever.
const ANNOUNCE: u32 = 16;
/// Most credits that one frame can carry.
const FRAME_MAX: u32 = u8::MAX as u32;
/// More credits than this are a fault of the peer [IB-79].
const MAX: u32 = u16::MAX as u32;

/// Credits of one connection. A credit stands for a receive that the other side has posted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Credits {
    /// Frames that this side may still send; `None`: there is no limit.
    send: Option<u32>,
    /// Credits that came before it was known whether there is a limit.
    early: u32,
    /// Receives that this side has posted since it last announced them; `None`: it announces none.
    posted: Option<u32>,
    /// Number of posted receives to announce at once.
    announce: u32,
}

impl Credits {
    /// Makes the credits of a side that announces `receives` when it connects. It has to go on
    /// announcing whatever the answer is, since the peer may rely on it [IB-80].
    pub(crate) fn announcing(receives: u32) -> Self {
        let announce = ANNOUNCE.min(receives / 2).max(1);
        Self { posted: Some(receives), announce, ..Self::default() }
    }

    /// Takes what is announced in the private data.
    pub(crate) fn take_initial(&mut self) -> u32 {
        self.posted.as_mut().map_or(0, std::mem::take)
    }

    /// Limits this side to what the peer announced when it connected; 0: there is no limit. Returns
    /// `false` when there are too many.
    pub(crate) fn limit(&mut self, initial: u32) -> bool {
        let send = (initial > 0).then_some(initial.saturating_add(self.early));
        self.send = send.filter(|send| *send <= MAX);
        self.send == send
    }

    /// Takes the credits of a received frame. Returns `false` when there are too many.
    pub(crate) fn granted(&mut self, count: u8) -> bool {
        let Some(send) = &mut self.send else {
            self.early = self.early.saturating_add(u32::from(count));
            return true;
        };
        *send += u32::from(count);
        *send <= MAX
    }

    /// Notes that receives were posted. Returns whether they are to be announced.
    pub(crate) fn posted(&mut self, count: u32) -> bool {
        let Some(posted) = &mut self.posted else { return false };
        *posted = posted.saturating_add(count).min(MAX);
        *posted >= self.announce
    }

    /// Tells how many frames may be sent now. The last credit is kept for a frame that announces
    /// some, or both sides could wait for each other [IB-75].
    pub(crate) fn available(&self) -> usize {
        let Some(send) = self.send else { return usize::MAX };
        let kept = u32::from(self.posted == Some(0));
        send.saturating_sub(kept) as usize
    }

    /// Notes that a frame is sent, and takes the credits that it announces.
    pub(crate) fn sent(&mut self) -> u8 {
        if let Some(send) = &mut self.send {
            *send = send.saturating_sub(1);
        }
        let Some(posted) = &mut self.posted else { return 0 };
        let announced = (*posted).min(FRAME_MAX);
        *posted -= announced;
        announced as u8
    }
}

#[cfg(test)]
mod tests {
    use super::Credits;

    // tests [IB-73]
    #[test]
    fn without_flow_control_there_is_no_limit_and_nothing_is_announced() {
        let mut credits = Credits::default();
        assert!(credits.granted(255) && !credits.posted(1000));
        assert_eq!((credits.take_initial(), credits.available()), (0, usize::MAX));
        assert_eq!(credits.sent(), 0);
    }

    // tests [IB-74], [IB-76], [IB-78]
    #[test]
    fn posted_receives_are_announced_once_at_most_255_a_frame() {
        let mut credits = Credits::announcing(100);
        assert_eq!((credits.take_initial(), credits.take_initial()), (100, 0));
        assert!(!credits.posted(15) && credits.posted(1));
        assert!(credits.posted(300));
        assert_eq!([credits.sent(), credits.sent(), credits.sent()], [255, 61, 0]);
    }

    // tests [IB-78]
    #[test]
    fn few_receives_are_announced_before_the_peer_has_used_them_all() {
        let mut credits = Credits::announcing(8);
        credits.take_initial();
        assert!(!credits.posted(3) && credits.posted(1));
    }

    // tests [IB-39], [IB-74]
    #[test]
    fn credits_that_come_before_the_answer_count() {
        let mut credits = Credits::announcing(8);
        assert!(credits.granted(255) && credits.granted(1) && credits.limit(4));
        credits.posted(1);
        assert_eq!(credits.available(), 260);
        let mut credits = Credits::default();
        assert!(credits.granted(255) && credits.limit(0));
        assert_eq!(credits.available(), usize::MAX);
    }

    // tests [IB-75]
    #[test]
    fn the_last_credit_is_kept_for_a_frame_that_announces() {
        let mut credits = Credits::announcing(8);
        assert!(credits.limit(2));
        credits.take_initial();
        assert_eq!(credits.available(), 1);
        credits.sent();
        assert_eq!(credits.available(), 0);
        credits.posted(1);
        assert_eq!((credits.available(), credits.sent(), credits.available()), (1, 1, 0));
        assert!(credits.granted(3));
        assert_eq!(credits.available(), 2);
    }

    // tests [IB-79]
    #[test]
    fn too_many_credits_are_a_fault() {
        let mut credits = Credits::announcing(8);
        assert!(credits.limit(65_500) && credits.granted(35) && !credits.granted(1));
        assert!(credits.limit(65_535) && !credits.limit(65_536) && !credits.limit(u32::MAX));
    }
}
