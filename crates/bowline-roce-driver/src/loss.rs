//! Artificial loss, for measurements and tests.

use core::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::net::IpAddr;
use std::sync::{Mutex, PoisonError};

/// Odd, and with well spread bits: its multiples visit every number.
const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

/// Drops one in `one_in` packets at random; the same ones in each run.
#[derive(Debug)]
pub(crate) struct Loss {
    one_in: u64,
    state: AtomicU64,
}

impl Loss {
    pub(crate) fn new(one_in: u32) -> Self {
        Self { one_in: u64::from(one_in.max(1)), state: AtomicU64::new(0) }
    }

    /// Tells whether to drop the next packet.
    pub(crate) fn strikes(&self) -> bool {
        let x = self.state.fetch_add(STEP, Relaxed).wrapping_add(STEP);
        bowline_base::mix(x).is_multiple_of(self.one_in)
    }
}

/// Links that are cut: an address of the device, and one of a peer or all.
#[derive(Debug, Default)]
pub(crate) struct Cuts {
    /// Whether the list has an entry: read without the lock.
    any: AtomicBool,
    list: Mutex<Vec<(IpAddr, Option<IpAddr>)>>,
}

impl Cuts {
    /// Cuts a link, or restores it.
    pub(crate) fn set(&self, local: IpAddr, remote: Option<IpAddr>, on: bool) {
        let link = (local.to_canonical(), remote.map(|ip| ip.to_canonical()));
        let mut list = self.list.lock().unwrap_or_else(PoisonError::into_inner);
        list.retain(|known| *known != link);
        if on {
            list.push(link);
        }
        self.any.store(!list.is_empty(), Relaxed);
    }

    /// Tells whether any link is cut.
    pub(crate) fn any(&self) -> bool {
        self.any.load(Relaxed)
    }

    /// Tells whether the link between these addresses is cut.
    pub(crate) fn between(&self, local: IpAddr, remote: IpAddr) -> bool {
        self.any() && self.lists(local.to_canonical(), remote.to_canonical())
    }

    #[cold]
    fn lists(&self, local: IpAddr, remote: IpAddr) -> bool {
        let list = self.list.lock().unwrap_or_else(PoisonError::into_inner);
        list.iter().any(|(own, peer)| *own == local && peer.is_none_or(|peer| peer == remote))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_is_cut_until_it_is_mended() {
        let cuts = Cuts::default();
        let [a, b, c] = [1, 2, 3].map(|n| IpAddr::from([10, 0, 0, n]));
        cuts.set(a, Some(b), true);
        assert!(cuts.between(a, b));
        assert!(!cuts.between(a, c) && !cuts.between(b, a));
        cuts.set(a, None, true);
        assert!(cuts.between(a, c));
        cuts.set(a, Some(b), false);
        assert!(cuts.between(a, b), "all are");
        cuts.set(a, None, false);
        assert!(!cuts.between(a, b));
    }

    #[test]
    fn as_many_are_lost_as_asked_for() {
        let count = |one_in| {
            let loss = Loss::new(one_in);
            (0..100_000).filter(|_| loss.strikes()).count()
        };
        assert_eq!(count(1), 100_000);
        assert!((900..1100).contains(&count(100)), "{}", count(100));
        assert!((70..130).contains(&count(1000)), "{}", count(1000));
    }
}
