//! Connections that were asked for from an address at which there may be nobody [CM-57].
//!
//! Anybody can send a REQ in another's name, from addresses without end. Until a message names this
//! side's random name of the connection, or a packet comes on its queue pair, nothing says that
//! what was sent to the address has arrived there. Such connections have places of their own, of
//! which the newest has the best claim: a peer that is there answers within a round trip. So those
//! who forge requests push out one another, and none of those that stand.

use bowline_verbs::{CmEvent, CmId};

use super::Manager;
use super::conn::State;
use crate::counters::Counters;

impl Manager {
    /// Makes room for a request; tells whether there is any.
    pub(super) fn make_room(&mut self, listener: CmId, counters: &mut Counters) -> bool {
        if self.listeners.pending(listener) >= self.config.max_pending {
            let at = |id: &CmId| self.conns.get(id).and_then(|conn| conn.pending_at);
            let mut all = self.unproven.iter().map(|(_, id)| *id);
            if let Some(oldest) = all.find(|id| at(id) == Some(listener)) {
                self.evict(oldest, counters);
            }
        }
        let unproven = self.config.max_unproven;
        let all = self.config.max_connections;
        if (self.unproven.len() >= unproven || self.conns.len() >= all)
            && let Some(&(_, oldest)) = self.unproven.first()
        {
            self.evict(oldest, counters);
        }
        self.listeners.pending(listener) < self.config.max_pending
            && self.unproven.len() < unproven
            && self.conns.len() < all
    }

    /// The peer of a connection is there.
    pub(super) fn mark_proven(&mut self, id: CmId) {
        if let Some(conn) = self.conns.get_mut(&id) {
            conn.proven = true;
            self.unproven.remove(&(conn.since, id));
        }
    }

    /// Forgets a connection that is not proven. A request that was not answered yet is dropped
    /// without a word: a peer that is there sends it again [CM-40]. One that was is refused, for a
    /// peer whose RTU was lost.
    fn evict(&mut self, id: CmId, counters: &mut Counters) {
        let Some(conn) = self.conns.get(&id) else { return };
        counters.cm_pushed_out += 1;
        let last = match conn.state {
            State::RepSent(_) => {
                self.refuse_by_timeout(id);
                &[CmEvent::Unreachable { id }, CmEvent::TimewaitExit { id }][..]
            }
            State::DreqSent(_) => &[CmEvent::Disconnected { id }, CmEvent::TimewaitExit { id }],
            State::Timewait => &[CmEvent::TimewaitExit { id }],
            _ => &[CmEvent::Unreachable { id }],
        };
        self.order_error(id);
        last.iter().for_each(|event| self.event_on(id, event.clone()));
        self.remove(id);
    }
}
