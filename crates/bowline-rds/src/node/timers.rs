//! Everything that happens because time passes.

use bowline_base::Instant;

use super::Node;
use crate::ids::{ConnId, LinkId};

/// What is due. A timer that is no longer wanted finds its object changed and does nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Timer {
    /// A path's next connect attempt.
    Reconnect(ConnId, u8),
    /// A connect attempt has taken too long.
    Connect(LinkId),
    /// A connection has stayed open long enough to count as served.
    Confirm(LinkId),
    /// The peer may say now who it is; go on without that.
    Shy(LinkId),
    /// An acknowledgement has been owed for as long as it may be.
    Ack(LinkId),
    /// A connection that never got a path.
    Extra(LinkId),
    /// A bowline peer has not greeted.
    Hello(LinkId),
    /// A peer that sends maps alone is taken for a kernel with pings off.
    Unknown(ConnId),
    /// A kernel has had time to say how many paths it has.
    Count(ConnId),
    /// A peer may have been quiet for so long that none of its messages can come again.
    Quiet(ConnId),
    /// Our map may have been overtaken by an older one on another connection.
    MapAgain(ConnId),
    /// No map has come for a while after several that may have overtaken one another.
    MapDoubt(ConnId),
}

impl Node {
    pub(super) fn arm(&mut self, at: Instant, timer: Timer) {
        self.timers.insert((at, timer));
    }

    /// Does what is due at `now`.
    pub fn handle_timeout(&mut self, now: Instant) {
        self.now = now;
        while let Some(&(at, timer)) = self.timers.first() {
            if at > now {
                return;
            }
            self.timers.pop_first();
            match timer {
                Timer::Reconnect(conn, path) => self.reconnect_due(conn, path),
                Timer::Connect(link) => self.connect_overdue(link),
                Timer::Confirm(link) => self.settled(link),
                Timer::Shy(link) => {
                    if let Some(l) = self.link_mut(link) {
                        l.shy = false;
                        self.signal_transmit(link);
                    }
                }
                Timer::Ack(link) => self.ack_due(link),
                Timer::Extra(link) => self.extra_overdue(link),
                Timer::Hello(link) => self.hello_overdue(link),
                Timer::Unknown(conn) => self.unknown_overdue(conn),
                Timer::Count(conn) => self.count_overdue(conn),
                Timer::Quiet(conn) => self.quiet(conn),
                Timer::MapAgain(conn) => self.map_again(conn),
                Timer::MapDoubt(conn) => self.map_doubtful(conn),
            }
        }
    }

    fn ack_due(&mut self, id: LinkId) {
        let Some(link) = self.link_mut(id) else { return };
        link.rx.ack_timer = false;
        if link.rx.ack_owed > 0 {
            link.rx.ack_now = true;
            self.signal_transmit(id);
        }
    }
}
