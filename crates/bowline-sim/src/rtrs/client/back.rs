//! In the end every path is back.

use bowline_rtrs::client::PathState;

use super::{Client, go};
use crate::engine::queue::SEC;
use crate::rtrs::base::Base;

/// Within which every path must be back when nothing goes wrong any more: a server that has not
/// noticed the end of the last connection, and the longest pause between two attempts.
const BACK_MAX: u64 = 180 * SEC;

impl Client {
    /// Tells whether every path is connected; if not, the program goes on when it looks again.
    /// Those whose attempts are used up are connected anew by [`repair`](Self::repair).
    pub(super) fn is_all_back(&mut self, base: &mut Base) -> bool {
        let Some(life) = &mut self.life else { return false };
        let lost = life.session.paths().find(|path| path.state != PathState::Connected);
        let Some((id, state)) = lost.map(|path| (path.id, path.state)) else { return true };
        let since = *life.lost_since.get_or_insert(base.now);
        base.stats.waits_for_paths += 1;
        if base.now - since > BACK_MAX {
            base.fail(|| format!("client {}: {id:?} is not back: {state:?}", self.number));
        }
        base.schedule(SEC, go(&self.process, self.number));
        false
    }
}
