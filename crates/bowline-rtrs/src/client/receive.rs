//! Completions: responses, heartbeats, room in the send queue [RT-54] to [RT-58], [RT-62], [RT-69].

use bowline_verbs::{Remote, Status, WcOpcode, next_key};
use bowline_wire::rtrs::{Imm, RKEY_RSP_LEN, RkeyRsp};

use super::incarnation::{Incarnation, Phase, RECV_SLOT};
use super::{PermitKind, Session};
use crate::{ConnId, Done, Errno, Instant, PathId, Tag, WrKind};

/// The server broke a rule, which ends the path [RT-56], [RT-69].
struct Violation;

impl Session {
    /// Handles a completed receive.
    pub(super) fn on_recv(&mut self, now: Instant, done: &Done) {
        let Some(incarnation) = self.incarnation_of(done.conn) else { return };
        let live = matches!(incarnation.phase, Phase::Info | Phase::Up | Phase::Quiescing);
        // Messages received before the queue pair failed still count: fewer requests have to be
        // repeated.
        if !live && (incarnation.phase != Phase::Draining || incarnation.distrusted) {
            return;
        }
        if done.status != Status::Success {
            if live {
                self.fail(now, done.conn.path, Errno::ECONNRESET);
            }
            return;
        }
        // Keys of an incarnation that is ending are dropped already.
        if !live && done.imm.is_none() && done.invalidated.is_some() {
            return;
        }
        if let Some(heartbeat) = &mut incarnation.heartbeat {
            heartbeat.received(now);
        }
        let service = done.conn.cid == 0;
        let verdict = match done.imm.map(Imm::from_u32) {
            Some(Imm::Done { id, errno, .. }) => self.on_reply(now, done, id, errno),
            Some(Imm::HbMsg) if service && live => {
                self.answer_heartbeat(done.conn);
                Ok(())
            }
            Some(Imm::HbAck) if service => {
                self.on_heartbeat_answer(now, done.conn.path);
                Ok(())
            }
            Some(Imm::HbMsg | Imm::HbAck | Imm::GivenUp(_) | Imm::Unknown(_)) => Ok(()),
            None if done.invalidated.is_some_and(|key| self.on_invalidated(done.conn, key)) => {
                Ok(())
            }
            // No server sends a request, or a message without an immediate.
            Some(Imm::Request(_)) | None => Err(Violation),
        };
        match verdict {
            Ok(()) if live => self.repost(done.conn, done.tag.index()),
            Ok(()) => {}
            Err(Violation) => {
                if let Some(incarnation) = self.incarnation_of(done.conn) {
                    incarnation.distrusted = true;
                }
                self.fail(now, done.conn.path, Errno::ECONNRESET);
            }
        }
    }

    /// Posts a consumed receive again [RT-55].
    fn repost(&mut self, conn: ConnId, index: u32) {
        let slot = self
            .incarnations
            .get(conn.path)
            .and_then(|incarnation| incarnation.recv_slot(conn, index));
        self.batch.recvs.extend(slot);
    }

    /// Handles the response to a request: takes the new key of its chunk, then completes it.
    fn on_reply(
        &mut self,
        now: Instant,
        done: &Done,
        id: u32,
        errno: u16,
    ) -> Result<(), Violation> {
        let conn = done.conn;
        let incarnation = self.incarnations.get_mut(conn.path).ok_or(Violation)?;
        let index = u16::try_from(id).map_err(|_| Violation)?;
        let request = self.requests.get(usize::from(index)).ok_or(Violation)?;
        let of = incarnation.conns.get(usize::from(conn.cid)).ok_or(Violation)?;
        if !request.running
            || (request.incarnation, request.cid) != (conn.path, conn.cid)
            || request.answered.is_some()
            || of.waiting.contains(&index)
        {
            return Err(Violation);
        }
        if incarnation.new_rkey {
            let rsp = read_rkey_rsp(incarnation, done)?;
            let chunk = incarnation.chunks.get_mut(usize::from(index)).ok_or(Violation)?;
            if rsp.id != index {
                return Err(Violation);
            }
            chunk.1 = rsp.key;
        } else if done.opcode != WcOpcode::RecvRdmaWithImm {
            return Err(Violation);
        } else if incarnation.counted_keys {
            let chunk = incarnation.chunks.get_mut(usize::from(index)).ok_or(Violation)?;
            chunk.1 = next_key(chunk.1);
        }
        incarnation.served |= request.kind != PermitKind::Service;
        let errno = -i32::from(errno);
        if !self.invalidate_first(conn, index, errno) {
            self.leave_incarnation(index);
            self.end_request(now, index, errno);
        }
        self.post_waiting(conn);
        Ok(())
    }

    /// Handles a completed send: it and all sends before it free their entries.
    pub(super) fn on_sent(&mut self, now: Instant, done: &Done) {
        let Some(incarnation) = self.incarnation_of(done.conn) else { return };
        if !matches!(incarnation.phase, Phase::Info | Phase::Up | Phase::Quiescing) {
            return;
        }
        if done.status != Status::Success {
            return self.fail(now, done.conn.path, Errno::ECONNRESET);
        }
        incarnation.conns[usize::from(done.conn.cid)].sent();
        if done.tag.kind() == Tag::KEY {
            self.on_invalidate_done(now, done);
        }
        if !self.lingering.is_empty() {
            self.drop_unfenced();
        }
        self.post_waiting(done.conn);
    }

    /// Sends a heartbeat. Signalled: if it is not acknowledged, the queue pair fails [RT-89].
    pub(super) fn send_heartbeat(&mut self, id: PathId) {
        self.post_beat(id, Imm::HbMsg, true, 0);
    }

    /// Answers the server's heartbeat at once. A server that sends them faster than it takes the
    /// answers gets fewer answers.
    fn answer_heartbeat(&mut self, conn: ConnId) {
        self.post_beat(conn.path, Imm::HbAck, false, 1);
    }

    fn post_beat(&mut self, id: PathId, imm: Imm, signal: bool, reserve: u32) {
        let conn = ConnId { path: id, cid: 0 };
        let Some(incarnation) = self.incarnations.get_mut(id) else { return };
        let Some(of) = incarnation.conns.first_mut().filter(|of| of.has_room(reserve)) else {
            return;
        };
        let kind = WrKind::WriteImm(Remote::default(), imm.to_u32());
        let tag = Tag::new(Tag::HEARTBEAT, u32::from(!signal));
        let start = self.batch.mems.len();
        of.post_signalled(&mut self.batch, conn, tag, kind, start, signal);
    }

    fn on_heartbeat_answer(&mut self, now: Instant, id: PathId) {
        let Some(incarnation) = self.incarnations.get_mut(id) else { return };
        let took = incarnation.heartbeat.as_mut().and_then(|heartbeat| heartbeat.acked(now));
        let path = incarnation.path.and_then(|path| self.paths.get_mut(path));
        if let (Some(path), Some(took)) = (path, took) {
            path.latency = took;
        }
    }
}

/// Reads the message that came with a response [RT-13], [RT-56].
fn read_rkey_rsp(incarnation: &Incarnation, done: &Done) -> Result<RkeyRsp, Violation> {
    if done.opcode != WcOpcode::Recv || done.len < RECV_SLOT {
        return Err(Violation);
    }
    let slot = incarnation.recv_slot(done.conn, done.tag.index()).and_then(|slot| slot.mem);
    let (Some(mem), Some((_, buffer))) = (slot, &incarnation.memory) else { return Err(Violation) };
    let mut bytes = [0; RKEY_RSP_LEN];
    buffer.read(mem.offset as usize, &mut bytes);
    RkeyRsp::parse(&bytes).map_err(|_| Violation)
}
