//! Timers of a node.

use bowline_base::Instant;
use serde::{Deserialize, Serialize};

use super::Node;
use crate::ids::{ConnId, LinkId, RdmaLinkId};

/// A timer. A timer that is no longer needed finds its object changed and does nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(super) enum Timer {
    /// A path's next connect attempt.
    Reconnect(ConnId, u8),
    /// A connect attempt has taken too long.
    Connect(LinkId),
    /// A connection has stayed open long enough to count as served.
    Confirm(LinkId),
    /// The time is over in which the peer may show what kind of node it is; messages go on without.
    AwaitPeerKind(LinkId),
    /// An owed acknowledgement has waited as long as it may.
    Ack(LinkId),
    /// An accepted connection has not got a path in time.
    Extra(LinkId),
    /// A bowline peer has not greeted in time.
    Greeting(LinkId),
    /// A peer that sends only maps is taken for a kernel with pings off.
    PeerKind(ConnId),
    /// A bowline process that something else seemed to replace has not greeted in time.
    Missed(ConnId),
    /// A kernel has had time to say how many paths it has.
    Npaths(ConnId),
    /// A peer may have been quiet for so long that none of its messages can come again.
    ForgetAfterQuiet(ConnId),
    /// This node's map may have been overtaken by an older one on another connection.
    ResendMap(ConnId),
    /// No map has come for a while after several maps that may have overtaken one another.
    RefreshMap(ConnId),
    /// A connection over RDMA has not been established in time.
    RdmaConnect(RdmaLinkId),
    /// The peer of a connection over RDMA may have been silent for long.
    RdmaProbe(RdmaLinkId),
    /// A peer has not shown that it still has a connection over RDMA [IB-113].
    RdmaCheck(RdmaLinkId),
    /// Messages over RDMA may wait for an acknowledgement that nobody has asked for.
    RdmaAsk(RdmaLinkId),
    /// No read of memory that was used can be under way any more.
    RdmaUsed,
    /// A node that ends waits no longer for connections that have broken.
    Farewell,
}

impl Node {
    pub(super) fn arm(&mut self, at: Instant, timer: Timer) {
        self.timers.insert((at, timer));
    }

    /// Fires all timers that are due at `now`.
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
                Timer::Confirm(link) => self.reset_backoff(link),
                Timer::AwaitPeerKind(link) => {
                    if let Some(l) = self.link_mut(link) {
                        l.awaits_peer_kind = false;
                        self.signal_transmit(link);
                    }
                }
                Timer::Ack(link) => self.ack_due(link),
                Timer::Extra(link) => self.extra_overdue(link),
                Timer::Greeting(link) => self.greeting_overdue(link),
                Timer::PeerKind(conn) => self.kind_overdue(conn),
                Timer::Missed(conn) => self.missed_overdue(conn),
                Timer::Npaths(conn) => self.npaths_overdue(conn),
                Timer::ForgetAfterQuiet(conn) => self.forget_after_quiet(conn),
                Timer::ResendMap(conn) => self.resend_map(conn),
                Timer::RefreshMap(conn) => self.refresh_map(conn),
                Timer::RdmaConnect(link) => self.rdma_connect_overdue(link),
                Timer::RdmaProbe(link) => self.rdma_probe(link),
                Timer::RdmaCheck(link) => self.rdma_check_overdue(link),
                Timer::RdmaAsk(link) => self.rdma_ask_due(link),
                Timer::RdmaUsed => self.used_regions_due(),
                Timer::Farewell if self.ending.is_some() => self.finish_links(),
                Timer::Farewell => {}
            }
        }
    }

    fn ack_due(&mut self, id: LinkId) {
        let Some(link) = self.link_mut(id) else { return };
        link.rx.ack.timer_armed = false;
        if link.rx.ack.bytes > 0 {
            link.rx.ack.due = true;
            self.signal_transmit(id);
        }
    }
}
