//! The names of an engine's sessions, each of which one session has at a time [RS-24].

use std::collections::BTreeSet;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// All names in use.
#[derive(Debug, Default)]
pub(crate) struct Names {
    taken: Mutex<BTreeSet<String>>,
    /// Signalled when a name becomes free.
    freed: Condvar,
}

/// A session's reservation of its name, until this is dropped.
#[derive(Debug)]
pub(super) struct Claim {
    names: Arc<Names>,
    name: String,
}

impl Names {
    fn lock(&self) -> MutexGuard<'_, BTreeSet<String>> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reserves a name; `None` if another session has it for the whole `timeout`.
    pub(super) fn claim(self: &Arc<Self>, name: &str, timeout: Duration) -> Option<Claim> {
        let in_use = |taken: &mut BTreeSet<String>| taken.contains(name);
        let waited = self.freed.wait_timeout_while(self.lock(), timeout, in_use);
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
