//! Unproven connections: requested from an address at which there may be nobody [CM-57].
//!
//! Anybody can forge REQs from any number of addresses. A connection is proven when a message
//! contains this side's random communication ID, or a packet arrives on its queue pair: only then
//! is it known that this side's messages reach that address. Unproven connections have a limit of
//! their own, and the newest has the best claim to a place, since a real peer answers within a
//! round trip. So forged requests evict one another, and no established connection.

use bowline_verbs::{CmEvent, CmId};

use super::Manager;
use super::conn::State;
use crate::counters::Counters;

impl Manager {
    /// Makes room for a request; tells whether there is room.
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

    /// Marks a connection as proven.
    pub(super) fn mark_proven(&mut self, id: CmId) {
        if let Some(conn) = self.conns.get_mut(&id) {
            conn.proven = true;
            self.unproven.remove(&(conn.since, id));
        }
    }

    /// Forgets an unproven connection. An unanswered request is dropped silently: a real peer
    /// resends it [CM-40]. An answered one is refused, for a peer whose RTU was lost.
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
