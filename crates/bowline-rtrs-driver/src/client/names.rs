//! The names of sessions: one has each at a time [RS-24].

use std::collections::BTreeSet;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// All names in use.
#[derive(Debug, Default)]
pub(crate) struct Names {
    taken: Mutex<BTreeSet<String>>,
    /// A name is free again.
    freed: Condvar,
}

/// A session's right to its name, which ends when this is dropped.
#[derive(Debug)]
pub(super) struct Claim {
    names: Arc<Names>,
    name: String,
}

impl Names {
    fn lock(&self) -> MutexGuard<'_, BTreeSet<String>> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a name; `None` when another session has it all the while.
    pub(super) fn claim(self: &Arc<Self>, name: &str, patience: Duration) -> Option<Claim> {
        let in_use = |taken: &mut BTreeSet<String>| taken.contains(name);
        let waited = self.freed.wait_timeout_while(self.lock(), patience, in_use);
        let (mut taken, _) = waited.unwrap_or_else(PoisonError::into_inner);
        let free = taken.insert(name.to_owned());
        free.then(|| Claim { names: Arc::clone(self), name: name.to_owned() })
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        self.names.lock().remove(&self.name);
        self.names.freed.notify_all();
    }
}
