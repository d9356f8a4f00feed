//! How long a thread polls before it sleeps.

use core::sync::atomic::Ordering::Relaxed;
use core::time::Duration;
use std::thread::yield_now;
use std::time::Instant;

use crate::has_one_processor;
use crate::sync::{AtomicI32, AtomicU32};

/// What polls may cost in nanoseconds for each time that something comes, beside one in vain:
/// sleeping and being woken takes as long on a virtual machine, of both sides' processors together.
const WORTH_NS: u64 = 100_000;
/// Bound of [`PollBudget::balance_ns`].
const BALANCE_MAX_NS: i32 = 800_000;
/// While polls do not pay, one in so many is made all the same. If it pays, all are made again: who
/// sleeps too often is slower by more than polls in vain cost.
const RETRY_EVERY: u32 = 16;
/// Who has the processor for longer than this when it is lent computes: the scheduler gives such a
/// thread whole slices of milliseconds before it comes back to one that yields.
const LENT_MAX: Duration = Duration::from_millis(1);
/// Looks until it is lent again then: about 0.1 s of polling, some 30 slices.
const KEPT_FOR: u32 = 1 << 17;

/// The budget of polls of the threads that wait for one network.
///
/// A poll saves the wake-up of a thread, if what it waits for comes meanwhile. Otherwise it takes
/// a processor from others, perhaps from the very thread that is to send what is waited for. So a
/// poll lasts about as long as sleeping and waking up takes both sides, counted from the last thing
/// that came; and while polls cost more than that for each time that something comes, threads
/// sleep at once.
#[derive(Debug)]
pub struct PollBudget {
    /// In nanoseconds; 0: never, `u64::MAX`: without end.
    longest_ns: u64,
    /// What polls have saved lately beyond their cost, in nanoseconds; not negative if they have
    /// paid. Relaxed, as `left_out`: it guards no other memory, and a change that is lost does no
    /// harm.
    balance_ns: AtomicI32,
    /// Polls that were left out because polls do not pay.
    left_out: AtomicU32,
    /// Looks for which the processor is kept, since somebody has kept it for long. Relaxed, too.
    kept: AtomicU32,
}

impl PollBudget {
    /// Threads sleep at once.
    pub const fn never() -> Self {
        Self::lasting(0)
    }

    /// Threads never sleep.
    pub const fn without_end() -> Self {
        Self::lasting(u64::MAX)
    }

    /// Threads poll for up to this long while that pays, if the machine has several processors.
    pub fn while_they_pay(longest: Duration) -> Self {
        let longest_ns = u64::try_from(longest.as_nanos()).unwrap_or(u64::MAX - 1);
        Self::lasting(if has_one_processor() { 0 } else { longest_ns.min(u64::MAX - 1) })
    }

    const fn lasting(longest_ns: u64) -> Self {
        Self {
            longest_ns,
            balance_ns: AtomicI32::new(0),
            left_out: AtomicU32::new(0),
            kept: AtomicU32::new(0),
        }
    }

    /// Tells whether threads never poll before they sleep.
    pub const fn is_none(&self) -> bool {
        self.longest_ns == 0
    }

    /// Returns when a poll that begins at `now_ns` is to end; 0 if the thread is to sleep at once.
    /// A poll during which something came is [noted](Self::note) and begun again.
    pub fn begin(&self, now_ns: u64) -> u64 {
        match self.longest_ns {
            0 => 0,
            u64::MAX => u64::MAX,
            _ if self.balance_ns.load(Relaxed) < 0 && !self.is_retry() => 0,
            longest_ns => now_ns.saturating_add(longest_ns),
        }
    }

    fn is_retry(&self) -> bool {
        self.left_out.fetch_add(1, Relaxed).wrapping_add(1).is_multiple_of(RETRY_EVERY)
    }

    /// Lets others have this processor for a moment, between two looks of a poll: who is waited for
    /// may be among them. Not where threads never sleep, nor for a while after somebody kept it.
    pub fn give_way(&self) {
        if self.longest_ns == u64::MAX {
            return core::hint::spin_loop();
        }
        let kept = self.kept.load(Relaxed);
        if kept > 0 {
            self.kept.store(kept - 1, Relaxed);
            return core::hint::spin_loop();
        }
        let begun = Instant::now();
        yield_now();
        self.was_lent_for(begun.elapsed());
    }

    fn was_lent_for(&self, time: Duration) {
        if time > LENT_MAX {
            self.kept.store(KEPT_FOR, Relaxed);
        }
    }

    /// Notes that something came `spent_ns` after the beginning of a poll, or that nothing did
    /// until its end.
    pub fn note(&self, paid: bool, spent_ns: u64) {
        // Longer ones are judged no more.
        let worth_ns = self.longest_ns.min(BALANCE_MAX_NS as u64) + WORTH_NS;
        let saved = if paid { worth_ns } else { 0 };
        let (saved, spent) = (saved.cast_signed(), spent_ns.min(worth_ns).cast_signed());
        let balance = i64::from(self.balance_ns.load(Relaxed).max(0)) + saved - spent;
        let most = i64::from(BALANCE_MAX_NS);
        self.balance_ns.store(balance.clamp(-most, most) as i32, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONGEST: u64 = 25_000;
    /// Polls in vain after which a budget that had paid for long is used up.
    const VAIN_MAX: u32 = BALANCE_MAX_NS as u32 / LONGEST as u32 + 1;

    fn polls_in(waits: u32, budget: &PollBudget, mut pays: impl FnMut(u32) -> bool) -> u32 {
        polls_for(waits, budget, |wait| if pays(wait) { (true, 0) } else { (false, LONGEST) })
    }

    /// `what` tells whether something comes, and after which time.
    fn polls_for(waits: u32, budget: &PollBudget, mut what: impl FnMut(u32) -> (bool, u64)) -> u32 {
        let mut made = 0;
        for wait in 0..waits {
            if budget.begin(0) > 0 {
                made += 1;
                let (paid, spent_ns) = what(wait);
                budget.note(paid, spent_ns);
            }
        }
        made
    }

    #[test]
    fn a_poll_ends_in_time_whatever_came_before() {
        let budget = PollBudget::lasting(LONGEST);
        for now in (0..100).map(|n| n * LONGEST / 2) {
            assert_eq!(budget.begin(now), now + LONGEST);
            budget.note(true, 0);
        }
    }

    #[test]
    fn polls_that_do_not_pay_are_left_out() {
        let budget = PollBudget::lasting(LONGEST);
        polls_in(1000, &budget, |_| true);
        // However well they paid before.
        let made = polls_in(1600 + VAIN_MAX, &budget, |_| false);
        assert!((100..=100 + VAIN_MAX).contains(&made), "{made}");
    }

    #[test]
    fn polls_that_pay_again_are_made_again() {
        let budget = PollBudget::lasting(LONGEST);
        polls_in(1000, &budget, |_| false);
        // One that is made to see that is enough.
        polls_in(RETRY_EVERY, &budget, |_| true);
        assert_eq!(polls_in(100, &budget, |_| true), 100);
    }

    #[test]
    fn one_in_five_that_pays_is_enough() {
        let budget = PollBudget::lasting(LONGEST);
        let made = polls_in(300, &budget, |wait| wait % 5 == 0);
        assert_eq!(made, 300);
    }

    #[test]
    fn polls_that_take_long_must_pay_more_often() {
        let polls = |what: &dyn Fn(u32) -> (bool, u64)| {
            polls_for(1600, &PollBudget::lasting(4 * LONGEST), what)
        };
        let third = |wait: u32, spent| match wait.is_multiple_of(3) {
            true => (true, spent),
            false => (false, 4 * LONGEST),
        };
        assert!(polls(&|wait| third(wait, 80_000)) < 400);
        assert_eq!(polls(&|wait| third(wait, 0)), 1600);
        assert_eq!(polls(&|_| (true, 80_000)), 1600);
    }

    #[test]
    fn a_processor_that_is_kept_for_long_is_not_lent_for_a_while() {
        let budget = PollBudget::lasting(LONGEST);
        budget.was_lent_for(LENT_MAX);
        assert_eq!(budget.kept.load(Relaxed), 0);
        budget.was_lent_for(LENT_MAX * 2);
        (0..KEPT_FOR).for_each(|_| budget.give_way());
        assert_eq!(budget.kept.load(Relaxed), 0, "it is lent again");
    }

    #[test]
    fn some_never_poll_and_some_never_sleep() {
        let (never, spinning) = (PollBudget::never(), PollBudget::without_end());
        for paid in [true, false] {
            (0..100).for_each(|_| [&never, &spinning].iter().for_each(|b| b.note(paid, 100_000)));
            assert_eq!((never.begin(7), never.is_none()), (0, true));
            assert_eq!((spinning.begin(7), spinning.is_none()), (u64::MAX, false));
        }
        assert!(PollBudget::while_they_pay(Duration::MAX).longest_ns < u64::MAX);
    }
}
