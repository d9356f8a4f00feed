//! The check that all paths are connected in the end.

use bowline_rtrs::client::PathState;

use super::{Client, go};
use crate::engine::queue::SEC;
use crate::rtrs::context::Base;

/// Nanoseconds within which every path must be connected when there are no more faults. Covers a
/// server that has not noticed the end of the last connection, and the longest pause between two
/// attempts.
const RECONNECT_MAX: u64 = 180 * SEC;

impl Client {
    /// Returns whether every path is connected; if not, schedules the program's next check. Paths
    /// that have used up their attempts are reconnected by [`repair`](Self::repair).
    pub(super) fn all_paths_connected(&mut self, base: &mut Base) -> bool {
        let Some(active) = &mut self.active else { return false };
        let lost = active.session.paths().find(|path| path.state != PathState::Connected);
        let Some((id, state)) = lost.map(|path| (path.id, path.state)) else { return true };
        let since = *active.lost_since.get_or_insert(base.now);
        base.stats.waits_for_paths += 1;
        if base.now - since > RECONNECT_MAX {
            base.fail(|| format!("client {}: {id:?} is not back: {state:?}", self.number));
        }
        base.schedule(SEC, go(&self.process, self.number));
        false
    }
}
