//! The end of connections: closed in order, reset or broken; and the remains of an end.
//!
//! ```text
//!   SynSent --established--> Open --close----------> Orphan --all acknowledged, reset--> Gone
//!      |                      |  |                                                       ^
//!      |                      |  +--reset, timeout--> Dead --close-----------------------+
//!      |                      +-----close with bytes unread, linger 0: sends a reset-----+
//!      +--refused, closed----------------------------------------------------------------+
//! ```

use super::keepalive::KEEP_IDLE;
use super::{EndId, EndState, NetEvent, Notice, Reach, Reason, Stream, TcpClose};
use crate::rds::ctx::Ctx;

impl Ctx {
    /// Closes the socket; its process may not use the id afterwards.
    pub(crate) fn tcp_close(&mut self, id: EndId, how: TcpClose) {
        let (c, side) = id.index();
        let conn = &mut self.net.conns[c];
        let state = conn.ends[side].state;
        let unread = conn.streams[1 - side].unread();
        self.note([2, u64::from(id.conn), how as u64], || {
            format!("{id} closed {how:?} in {state:?}, {} bytes unread", unread.1 - unread.0)
        });
        if state == EndState::Open && unread.1 > unread.0 {
            self.coverage.hit("tcp", "closed with bytes unread");
        }
        match state {
            EndState::Gone | EndState::Orphan => {}
            EndState::SynSent | EndState::Dead(_) => {
                self.discard(id.other(), unread);
                self.remove_end(id);
            }
            EndState::Open if how == TcpClose::Reset || unread.1 > unread.0 => {
                self.discard(id.other(), unread);
                self.remove_end(id);
                self.send_rst(id.other());
            }
            EndState::Open => {
                let conn = self.conn(id.conn);
                conn.ends[side].state = EndState::Orphan;
                conn.ends[side].died = 0;
                conn.streams[side].fin = true;
                self.pump(id);
                self.finish_orphan(id);
            }
        }
    }

    /// Ends this end's stream and continues to read.
    pub(crate) fn tcp_shutdown(&mut self, id: EndId) {
        let (c, side) = id.index();
        let conn = &mut self.net.conns[c];
        if conn.ends[side].state == EndState::Open {
            conn.streams[side].fin = true;
            self.note([3, u64::from(id.conn), 0], || format!("{id} shut down for writing"));
            self.pump(id);
        }
    }

    /// Handles a reset that the other end has sent.
    pub(super) fn on_rst(&mut self, target: EndId) {
        match self.net.reach(target.other()) {
            Reach::Peer => self.break_end(target, Reason::Reset),
            Reach::UnknownHost => self.coverage.hit("tcp", "reset comes to another host"),
            Reach::Lost => {
                self.coverage.hit("tcp", "reset lost");
                self.arm_keep(target.conn, target.side, KEEP_IDLE);
            }
        }
    }

    /// Handles a reset from a third party, which may be nearer than the other end.
    pub(super) fn on_relayed_rst(&mut self, target: EndId) {
        self.break_end(target, Reason::Reset);
        self.arm_keep(target.conn, target.other().side, KEEP_IDLE);
    }

    /// Breaks an end; bytes that have arrived can still be read.
    pub(super) fn break_end(&mut self, id: EndId, reason: Reason) {
        if reason == Reason::TimedOut {
            // The other end learns nothing of it; an idle one finds out by keepalive.
            self.arm_keep(id.conn, id.other().side, KEEP_IDLE);
        }
        let now = self.now;
        let (c, side) = id.index();
        let end = &mut self.net.conns[c].ends[side];
        match end.state {
            EndState::SynSent => {
                self.coverage.hit("tcp", "connect refused by a reset");
                let why = if reason == Reason::Reset { Reason::Refused } else { reason };
                self.remove_end(id);
                self.tell(id, Notice::ConnectFailed(why));
            }
            EndState::Open => {
                end.state = EndState::Dead(reason);
                end.died = now;
                if reason == Reason::Reset {
                    self.coverage.hit("tcp", "reset received");
                }
                self.note([5, u64::from(id.conn), u64::from(id.side)], || {
                    format!("{id} broken: {reason:?}")
                });
                self.excuse_losses(id);
                self.finish_orphan(id.other());
                self.tell(id, Notice::Readable);
            }
            EndState::Orphan => {
                self.coverage.hit("tcp", "reset of an end that is closed");
                self.remove_end(id);
            }
            EndState::Dead(_) | EndState::Gone => {}
        }
    }

    /// Removes an end; no process is told.
    pub(super) fn remove_end(&mut self, id: EndId) {
        let now = self.now;
        let (c, side) = id.index();
        let end = &mut self.net.conns[c].ends[side];
        if !matches!(end.state, EndState::Dead(_)) {
            end.died = now;
        }
        end.state = EndState::Gone;
        self.excuse_losses(id);
        let conn = &mut self.net.conns[c];
        if conn.ends.iter().all(|e| e.state == EndState::Gone) {
            conn.streams.iter_mut().for_each(Stream::clear);
        }
    }

    pub(super) fn finish_orphan(&mut self, id: EndId) {
        let (c, side) = id.index();
        let conn = &self.net.conns[c];
        let done = conn.streams[side].fin_acked
            || matches!(conn.ends[1 - side].state, EndState::Gone | EndState::Dead(_));
        if conn.ends[side].state == EndState::Orphan && done {
            self.remove_end(id);
        }
    }

    /// Sends a reset towards `target`.
    pub(super) fn send_rst(&mut self, target: EndId) {
        let ordered = !(self.net.plan.rst_overtakes && self.rng.chance(500));
        self.packet(target.other(), NetEvent::Rst { conn: target.conn, to: target.side }, ordered);
    }

    /// Handles a packet of `sender` that reached a host which does not know the connection.
    pub(super) fn refuse_stray(&mut self, sender: EndId) {
        let rst = NetEvent::RelayedRst { conn: sender.conn, to: sender.side };
        self.packet(sender.other(), rst, true);
    }
}
