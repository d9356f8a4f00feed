//! Responses and heartbeats.

use bowline_verbs::{Remote, next_key};
use bowline_wire::rtrs::{Desc, ERRNO_MAX, Imm, RkeyRsp};

use super::chunks::OpState;
use super::path::{ConnState, PathState};
use super::sendq::{DeferredReply, Signal};
use super::{CloseReason, OpId, Server};
use crate::{ConnId, Errno, HeartbeatAction, Instant, MemRef, PathId, Tag, WrKind};

/// The target of an RDMA write of no bytes [RT-49].
const NOWHERE: Remote = Remote { addr: 0, rkey: 0 };

impl Server {
    /// Answers an operation, once; `errno` is 0 or negative. A successful read is answered with the
    /// first [`Request::room`](super::Request::room) bytes of `from`, memory of
    /// [`add_region`](Self::add_region), or by default of its chunk; if `from` has fewer bytes, the
    /// result is `-EIO`. An operation whose path is gone ends without a response [RS-19].
    pub fn respond(&mut self, now: Instant, op: OpId, errno: i32, from: Option<MemRef>) {
        let Some(running) = self.ops.find(op, OpState::Running) else { return };
        let conn = ConnId { path: running.path, cid: running.cid };
        let (session, epoch) = (running.session, running.epoch);
        let short = match (from, running.desc) {
            (Some(from), Some(desc)) => from.len < desc.len,
            _ => false,
        };
        let errno = if short && errno == 0 { Errno::EIO.neg() } else { errno };
        // The immediate has 9 bits for it [RT-17].
        let errno = u16::try_from(errno.unsigned_abs()).ok().filter(|errno| *errno <= ERRNO_MAX);
        let errno = errno.unwrap_or(Errno::EIO.0 as u16);
        let late = DeferredReply { op, errno, from };
        match self.paths.get_mut(conn.path) {
            Some(path) if path.state == PathState::Connected => {
                let Some(queue) = path.conns.get_mut(conn.cid).map(|conn| &mut conn.queue) else {
                    return;
                };
                if queue.deferred.is_empty() && self.answer(conn, late) {
                    self.release(op.slot);
                } else if let Some(late_op) = self.ops.find(op, OpState::Running) {
                    late_op.state = OpState::Queued;
                    self.counters.answers_waited += 1;
                    if let Some(conn) = self.conn_mut(conn) {
                        conn.queue.deferred.push_back(late);
                    }
                }
            }
            // The chunk is given on when the queue pairs are dead.
            Some(path) if path.state != PathState::Closed => {
                running.state = OpState::Answered;
                self.counters.answers_dropped += 1;
            }
            _ => {
                self.counters.answers_dropped += 1;
                self.release(op.slot);
            }
        }
        // From here on the upper layer must not touch the chunk.
        if let Some(session) = self.sessions.get_mut(session) {
            session.end(epoch);
        }
        self.connect_joined(now, session);
        self.end_slot_if_over(session);
    }

    /// Sends deferred responses, as far as there is room [RT-53].
    pub(super) fn send_deferred(&mut self, conn: ConnId) {
        while let Some(waiting) = self.conn_mut(conn) {
            let Some(late) = waiting.queue.deferred.front().copied() else { return };
            if self.ops.find(late.op, OpState::Queued).is_some() {
                if !self.answer(conn, late) {
                    return;
                }
                self.release(late.op.slot);
            }
            if let Some(waiting) = self.conn_mut(conn) {
                waiting.queue.deferred.pop_front();
            }
        }
    }

    /// Posts the response of an operation [RT-47], [RT-48]; `false` when there is no room.
    fn answer(&mut self, id: ConnId, late: DeferredReply) -> bool {
        let Some(path) = self.paths.get_mut(id.path) else { return false };
        let Some(conn) = path.conns.get_mut(id.cid) else { return false };
        let op = self.ops.peek(late.op.slot);
        let chunk = op.chunk;
        let (queue, batch) = (&mut conn.queue, &mut self.batch);
        let data = op.desc.filter(|_| late.errno == 0).map(|desc| {
            let remote = Remote { addr: desc.addr, rkey: desc.key };
            let own = || {
                let offset = u64::from(chunk) * u64::from(self.config.geometry.chunk());
                path.region.map(|region| MemRef { region, offset, len: desc.len })
            };
            let from = late.from.map(|from| MemRef { len: desc.len, ..from }).or_else(own);
            (remote, from)
        });
        let inval = op.desc.filter(|_| op.inval).map(|desc| desc.key);
        let imm = Imm::Done { id: chunk.into(), errno: late.errno, invalidated: inval.is_some() };
        let imm = imm.to_u32();
        // A single write with data and immediate can complete the request, unless the device
        // prefers two.
        let told = path.refresh && !path.counted;
        let device = self.ports.get(usize::from(path.port.0));
        let in_two = |desc: Desc| device.is_some_and(|device| device.takes_two(desc.len));
        let joined = !told && inval.is_none() && !op.desc.is_some_and(in_two);
        let count = 1 + u32::from(inval.is_some()) + u32::from(data.is_some() && !joined);
        if !queue.has_room(count) {
            return false;
        }
        self.counters.answers += 1;
        if let Some(key) = path.keys.get_mut(usize::from(chunk)) {
            key.taken = false;
            if path.refresh {
                let old = key.rkey;
                key.rkey = next_key(old);
                batch.renew.push((path.port, old, key.rkey));
            }
            if told {
                let msg = RkeyRsp { id: chunk, key: key.rkey }.emit();
                path.internal.buffer.write(path.internal.key_msg(chunk).offset as usize, &msg);
            }
        }
        let mut send = |kind, mem: Option<MemRef>, signal| {
            queue.send(batch, id, Tag::REPLY, kind, mem.as_slice(), signal);
        };
        let mut end = NOWHERE;
        if let Some((remote, from)) = data {
            if joined {
                send(WrKind::WriteImm(remote, imm), from, Signal::InTurn);
                return true;
            }
            send(WrKind::Write(remote), from, Signal::No);
            // Right behind the data: the message that announces it can take its last bytes along.
            if inval.is_none() {
                let len = from.map_or(0, |from| from.len);
                end = Remote { addr: remote.addr.wrapping_add(len.into()), ..remote };
            }
        }
        if let Some(key) = inval {
            send(WrKind::SendInv(key), None, Signal::No);
        }
        if told {
            let mem = path.internal.key_msg(chunk);
            send(WrKind::SendImm(imm), Some(mem), Signal::InTurn);
        } else {
            send(WrKind::WriteImm(end, imm), None, Signal::InTurn);
        }
        true
    }

    /// Answers HB_MSG [RT-62]. A client that sends them faster than it takes the answers gets none.
    pub(super) fn answer_heartbeat(&mut self, id: ConnId) {
        if self.send_heartbeat(id, Imm::HbAck, Signal::InTurn) {
            self.counters.heartbeats_answered += 1;
        } else {
            self.counters.heartbeats_dropped += 1;
        }
    }

    /// Runs the heartbeat of a path [RT-60], [RT-88].
    pub(super) fn beat(&mut self, now: Instant, id: PathId) {
        let Some(heartbeat) = self.paths.get_mut(id).and_then(|path| path.heartbeat.as_mut())
        else {
            return;
        };
        match heartbeat.tick(now) {
            HeartbeatAction::Nothing => {}
            // A full queue means that the heartbeat is not answered either.
            HeartbeatAction::SendMsg => {
                if self.send_heartbeat(ConnId { path: id, cid: 0 }, Imm::HbMsg, Signal::Yes) {
                    self.counters.heartbeats_sent += 1;
                }
            }
            HeartbeatAction::Silent if self.has_another(now, id) => {
                self.close_path(now, id, CloseReason::Silent);
            }
            HeartbeatAction::Silent => {}
            HeartbeatAction::Dead => self.close_path(now, id, CloseReason::Heartbeat),
        }
    }

    /// Whether the client has another path, and that one has worked while this one was silent.
    fn has_another(&self, now: Instant, id: PathId) -> bool {
        let session = self.paths.get(id).and_then(|path| self.sessions.get(path.session));
        let slots = session.map_or(&[][..], |session| &session.paths);
        (slots.iter().filter_map(|&slot| self.paths.at(slot)))
            .filter(|path| path.id != id && path.state == PathState::Connected)
            .any(|path| path.heartbeat.as_ref().is_some_and(|heartbeat| heartbeat.has_worked(now)))
    }

    fn send_heartbeat(&mut self, id: ConnId, imm: Imm, signal: Signal) -> bool {
        let Some(conn) = self.paths.get_mut(id.path).and_then(|path| path.conns.get_mut(0)) else {
            return false;
        };
        if conn.state != ConnState::Live || !conn.queue.has_reserve() {
            return false;
        }
        let kind = WrKind::WriteImm(NOWHERE, imm.to_u32());
        conn.queue.send(&mut self.batch, id, Tag::HEARTBEAT, kind, &[], signal);
        true
    }
}
