//! Links that are cut, for measurements and tests.

use core::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::net::IpAddr;
use std::sync::{Mutex, PoisonError};

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
}
