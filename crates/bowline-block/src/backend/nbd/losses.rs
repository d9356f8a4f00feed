//! Which changes are durable, and who has to learn that some may be lost.
//!
//! A flush covers the changes of all users, as the writers of a disk may be several paths of one
//! program. So after a loss the next flush fails, whoever asks for it; and then the next one of
//! each further user that had changes among the lost ones, once each, as Linux reports an error of
//! writing back to each opener of a file.

use std::collections::{BTreeMap, BTreeSet};

/// Most users with changes that are distinguished. The changes of further ones are covered only by
/// the failure of the first flush.
const USERS_MAX: usize = 4096;

/// Changes that were answered.
#[derive(Default)]
pub(super) struct Losses {
    /// Number of changes that were answered, and how many of them are durable.
    changes: u64,
    durable: u64,
    /// Users with changes that are not durable, and the number of the last one of each.
    unflushed: BTreeMap<u64, u64>,
    /// Changes may be lost, and no flush has failed since.
    is_unreported: bool,
    /// Users with changes among the lost ones, of which no flush has failed since.
    unaware: BTreeSet<u64>,
}

impl Losses {
    /// Counts a change that was answered, and is not durable yet.
    pub(super) fn changed(&mut self, user: u64) {
        self.changes += 1;
        if self.unflushed.len() < USERS_MAX || self.unflushed.contains_key(&user) {
            self.unflushed.insert(user, self.changes);
        }
    }

    /// Returns how many changes a flush covers that is asked for now.
    pub(super) const fn changes(&self) -> u64 {
        self.changes
    }

    /// Tells whether there are changes that are not durable.
    pub(super) const fn is_unflushed(&self) -> bool {
        self.changes > self.durable
    }

    /// A flush that covers this many changes has succeeded.
    pub(super) fn flushed(&mut self, covers: u64) {
        self.durable = self.durable.max(covers);
        let durable = self.durable;
        self.unflushed.retain(|_, last| *last > durable);
    }

    /// Changes that are not durable may be lost. Returns whether there are any.
    pub(super) fn lose(&mut self) -> bool {
        let is_loss = self.is_unflushed();
        self.is_unreported |= is_loss;
        self.durable = self.changes;
        for user in std::mem::take(&mut self.unflushed).into_keys() {
            if self.unaware.len() < USERS_MAX {
                self.unaware.insert(user);
            }
        }
        is_loss
    }

    /// Tells whether a flush of this user has to fail, which reports the loss to the user.
    pub(super) fn report(&mut self, user: u64) -> bool {
        let is_unaware = self.unaware.remove(&user);
        std::mem::take(&mut self.is_unreported) || is_unaware
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_user_with_lost_changes_learns_of_them_once() {
        // tests [NB-77]
        let mut losses = Losses::default();
        losses.changed(1);
        losses.changed(2);
        losses.flushed(losses.changes());
        assert!(!losses.lose() && !losses.report(1));
        losses.changed(1);
        losses.changed(2);
        losses.changed(2);
        // A flush that was asked for before the last change covers those before it.
        losses.flushed(losses.changes() - 1);
        losses.changed(3);
        assert!(losses.lose() && !losses.lose());
        // The first one to flush has lost nothing itself.
        assert!(losses.report(9) && !losses.report(9));
        assert!(!losses.report(1), "its change was durable");
        assert!(losses.report(2) && !losses.report(2));
        losses.changed(2);
        assert!(losses.lose());
        assert!(losses.report(3), "for both losses");
        assert!(losses.report(2) && !losses.report(2) && !losses.report(3));
    }

    #[test]
    fn users_without_end_take_no_memory_without_end() {
        let mut losses = Losses::default();
        for user in 0..3 * USERS_MAX as u64 {
            losses.changed(user);
            if user % 7 == 0 {
                losses.lose();
            }
        }
        assert!(losses.unflushed.len() + losses.unaware.len() <= 2 * USERS_MAX);
        assert!(losses.report(u64::MAX));
    }
}
