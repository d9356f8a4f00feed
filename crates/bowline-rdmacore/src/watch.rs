//! Whether a descriptor that the background thread sleeps on is still worth it.

use rustix::event::PollFlags;

/// Times in a row that a descriptor may be ready for nothing.
const VAIN: u32 = 16;

/// A descriptor that events come from. When its device has been removed it may be ready for ever
/// without giving any: then it is not looked at again, or the thread would never sleep.
#[derive(Debug, Default)]
pub(crate) struct Watch {
    vain: u32,
    over: bool,
}

impl Watch {
    /// Tells whether events are to be taken.
    pub(crate) fn is_ready(&self, revents: PollFlags) -> bool {
        !self.over && !revents.is_empty()
    }

    /// Records that `count` events were taken after the descriptor was reported so. Returns true
    /// once, when the descriptor has failed for good.
    pub(crate) fn took(&mut self, revents: PollFlags, count: usize) -> bool {
        self.vain = if count > 0 { 0 } else { self.vain + 1 };
        let broken = revents.intersects(PollFlags::ERR | PollFlags::HUP | PollFlags::NVAL);
        let over = broken && count == 0 || self.vain >= VAIN;
        over && !std::mem::replace(&mut self.over, true)
    }

    pub(crate) const fn is_over(&self) -> bool {
        self.over
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_has_an_error_and_gives_nothing_is_over() {
        let mut watch = Watch::default();
        let broken = PollFlags::IN | PollFlags::ERR;
        assert!(watch.is_ready(broken));
        // The last events come first.
        assert!(!watch.took(broken, 2));
        assert!(watch.took(broken, 0));
        assert!(!watch.took(broken, 0), "told once");
        assert!(watch.is_over() && !watch.is_ready(broken));
    }

    #[test]
    fn what_is_ready_in_vain_again_and_again_is_over() {
        let mut watch = Watch::default();
        for _ in 1..VAIN {
            assert!(!watch.took(PollFlags::IN, 0));
        }
        assert!(!watch.took(PollFlags::IN, 1));
        for _ in 1..VAIN {
            assert!(!watch.took(PollFlags::IN, 0));
        }
        assert!(watch.took(PollFlags::IN, 0));
    }
}
