//! Keepalive: how an end learns that the other one is silent for good.

use super::{EndId, EndState, NetEvent, Reach, Reason};
use crate::engine::queue::SEC;
use crate::rds::ctx::{Ctx, Event};

/// Keepalive idle time and interval.
pub(super) const KEEP_IDLE: u64 = 5 * SEC;
const KEEP_COUNT: u8 = 5;

impl Ctx {
    /// Makes TCP find out soon whether the other end is alive.
    pub(crate) fn tcp_probe(&mut self, id: EndId) {
        self.arm_keep(id.conn, id.side, SEC);
    }

    pub(super) fn arm_keep(&mut self, conn: u32, side: u8, delay: u64) {
        let end = &mut self.conn(conn).ends[usize::from(side)];
        if !end.keep_pending && end.state == EndState::Open {
            end.keep_pending = true;
            self.schedule(delay, Event::Net(NetEvent::KeepCheck { conn, side }));
        }
    }

    pub(super) fn on_keep_check(&mut self, id: EndId) {
        let (c, side) = id.index();
        let end = &mut self.net.conns[c].ends[side];
        end.keep_pending = false;
        if end.state != EndState::Open {
            return;
        }
        let missed = end.keep_missed + 1;
        let answer = match self.net.reach(id) {
            Reach::Peer => match self.net.reach(id.other()) {
                Reach::Peer => {
                    let peer = self.net.conns[c].ends[1 - side].state;
                    if matches!(peer, EndState::Dead(_)) { Reach::UnknownHost } else { Reach::Peer }
                }
                _ => Reach::Lost,
            },
            other => other,
        };
        let end = &mut self.net.conns[c].ends[side];
        match answer {
            Reach::Peer => end.keep_missed = 0,
            Reach::UnknownHost => {
                self.coverage.hit("tcp", "keepalive answered by a reset");
                self.break_end(id, Reason::Reset);
            }
            Reach::Lost if missed > KEEP_COUNT => {
                self.coverage.hit("tcp", "keepalive timeout");
                self.break_end(id, Reason::TimedOut);
            }
            Reach::Lost => {
                end.keep_missed = missed;
                self.arm_keep(id.conn, id.side, KEEP_IDLE);
            }
        }
    }
}
