//! Losses that the rules allow: bytes that a TCP acknowledged and no process will ever read.
//!
//! A kernel frees its messages when TCP reports that all bytes have arrived. If the other
//! end then discards them, the loss is allowed. Between two nodes that acknowledge end to end no
//! loss is allowed.

use super::{EndId, EndState};
use crate::engine::queue::MS;
use crate::rds::ctx::Ctx;

/// How long a connector distrusts a connection to a kernel that never brought a byte, in
/// nanoseconds.
const GRACE: u64 = 200 * MS;

impl Ctx {
    /// Notes bytes that TCP refused: the process may count their messages as started.
    pub(crate) fn tcp_offered(&mut self, id: EndId, bytes: &[u8]) {
        let (c, side) = id.index();
        let conn = &mut self.net.conns[c];
        let ends = (conn.ends[side].addr.ip(), conn.ends[1 - side].addr.ip());
        conn.streams[side].tap.attempt(bytes, ends, &mut self.oracle);
        self.excuse_losses(id);
    }

    /// Notes that the bytes `range` that `sender` wrote were acknowledged and never read. Only a
    /// kernel does that.
    pub(super) fn discard(&mut self, sender: EndId, range: (u64, u64)) {
        let (c, side) = sender.index();
        let receiver = self.net.host(sender.other());
        let may = self.net.hosts[receiver].kernel;
        let conn = &mut self.net.conns[c];
        if conn.end_to_end || range.0 == range.1 || !may {
            return;
        }
        let stream = &mut conn.streams[side];
        let old = stream.discarded.unwrap_or(range);
        stream.discarded = Some((old.0.min(range.0), old.1.max(range.1)));
        self.excuse_losses(sender);
    }

    /// Decides, once the sender's end is over, which losses the rules allow: messages whose bytes a
    /// TCP acknowledged and no process read, unless the sender had to distrust the
    /// connection.
    pub(super) fn excuse_losses(&mut self, sender: EndId) {
        let (c, side) = sender.index();
        let kernel_sender = {
            let host = self.net.conns[c].ends[side].host;
            self.net.hosts[host].kernel
        };
        let conn = &mut self.net.conns[c];
        let end = &conn.ends[side];
        let over = matches!(end.state, EndState::Dead(_) | EndState::Gone);
        let heard = conn.streams[1 - side].delivered > 0;
        let old = end.died.saturating_sub(end.established) + 5 * MS >= GRACE;
        let trusted = heard || old || sender.side == 1 || kernel_sender;
        let ends = (end.addr.ip(), conn.ends[1 - side].addr.ip());
        let stream = &mut conn.streams[side];
        if over && let Some(stub) = stream.tap.take_stub() {
            self.base.coverage.hit("excused", "begun there by less than its name");
            self.oracle.excuse_started(ends, stub.ports, sender.conn);
        }
        let Some((from, to)) = stream.discarded else { return };
        if !over || !trusted {
            return;
        }
        let to = to.min(stream.acked);
        for message in stream.tap.messages_ending_in(from, to) {
            self.coverage.hit("excused", "acknowledged and not read by a kernel");
            self.oracle.excuse(message);
        }
    }

    /// Notes that the bytes which the peer wrote or will write to this end cannot be recovered.
    pub(super) fn receiver_died(&mut self, id: EndId) {
        let (c, side) = id.index();
        let tap = &mut self.net.conns[c].streams[1 - side].tap;
        for message in tap.receiver_died() {
            self.coverage.hit("excused", "begun on a dead machine's connection");
            self.oracle.excuse(message);
        }
    }
}
