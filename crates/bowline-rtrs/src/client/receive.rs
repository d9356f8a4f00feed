//! Completions: answers, heartbeats, room in the send queue [RT-54] to [RT-58], [RT-62], [RT-69].

use bowline_verbs::{Remote, Status, WcOpcode, next_key};
use bowline_wire::rtrs::{Imm, RKEY_RSP_LEN, RkeyRsp};

use super::Session;
use super::link::{Link, Phase, RECV_SLOT};
use crate::{ConnId, Done, Errno, Instant, PathId, Tag, WrKind};

/// The server broke a rule: the path ends [RT-56], [RT-69].
struct Violation;

impl Session {
    /// Takes a completed receive.
    pub(super) fn on_recv(&mut self, now: Instant, done: &Done) {
        let Some(link) = self.link_of(done.conn) else { return };
        let live = matches!(link.phase, Phase::Info | Phase::Up | Phase::Quiet);
        // What came before the queue pair failed came, and counts: less is to be done again.
        if !live && (link.phase != Phase::Draining || link.distrusted) {
            return;
        }
        if done.status != Status::Success {
            if live {
                self.fail(now, done.conn.path, Errno::ECONNRESET);
            }
            return;
        }
        // The keys of a link that ends are dropped already.
        if !live && done.imm.is_none() && done.invalidated.is_some() {
            return;
        }
        if let Some(heartbeat) = &mut link.heartbeat {
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
            // A request, or a message without an immediate: no server sends these.
            Some(Imm::Request(_)) | None => Err(Violation),
        };
        match verdict {
            Ok(()) if live => self.repost(done.conn, done.tag.index()),
            Ok(()) => {}
            Err(Violation) => {
                if let Some(link) = self.link_of(done.conn) {
                    link.distrusted = true;
                }
                self.fail(now, done.conn.path, Errno::ECONNRESET);
            }
        }
    }

    /// Posts a receive that was taken once more [RT-55].
    fn repost(&mut self, conn: ConnId, index: u32) {
        let slot = self.links.get(conn.path).and_then(|link| link.recv_slot(conn, index));
        self.batch.recvs.extend(slot);
    }

    /// An answer to a request: the new key of its chunk, then its end.
    fn on_reply(
        &mut self,
        now: Instant,
        done: &Done,
        id: u32,
        errno: u16,
    ) -> Result<(), Violation> {
        let conn = done.conn;
        let link = self.links.get_mut(conn.path).ok_or(Violation)?;
        let index = u16::try_from(id).map_err(|_| Violation)?;
        let request = self.requests.get(usize::from(index)).ok_or(Violation)?;
        let of = link.conns.get(usize::from(conn.cid)).ok_or(Violation)?;
        if !request.running
            || (request.link, request.cid) != (conn.path, conn.cid)
            || request.answered.is_some()
            || of.waiting.contains(&index)
        {
            return Err(Violation);
        }
        if link.new_rkey {
            let rsp = read_rkey_rsp(link, done)?;
            let chunk = link.chunks.get_mut(usize::from(index)).ok_or(Violation)?;
            if rsp.id != index {
                return Err(Violation);
            }
            chunk.1 = rsp.key;
        } else if done.opcode != WcOpcode::RecvRdmaWithImm {
            return Err(Violation);
        } else if link.counted_keys {
            let chunk = link.chunks.get_mut(usize::from(index)).ok_or(Violation)?;
            chunk.1 = next_key(chunk.1);
        }
        let errno = -i32::from(errno);
        if !self.revoke(conn, index, errno) {
            self.leave_link(index);
            self.end_request(now, index, errno);
        }
        self.post_waiting(conn);
        Ok(())
    }

    /// A send has completed: its place in the queue and those before it are free.
    pub(super) fn on_sent(&mut self, now: Instant, done: &Done) {
        let Some(link) = self.link_of(done.conn) else { return };
        if !matches!(link.phase, Phase::Info | Phase::Up | Phase::Quiet) {
            return;
        }
        if done.status != Status::Success {
            return self.fail(now, done.conn.path, Errno::ECONNRESET);
        }
        link.conns[usize::from(done.conn.cid)].sent();
        if done.tag.kind() == Tag::KEY {
            self.on_revoked(now, done);
        }
        if !self.lingering.is_empty() {
            self.look_at_lingering();
        }
        self.post_waiting(done.conn);
    }

    /// Asks the server whether it is alive. Signalled: if nobody acknowledges it, the queue pair
    /// says so [RT-89].
    pub(super) fn send_heartbeat(&mut self, id: PathId) {
        self.post_beat(id, Imm::HbMsg, true, 0);
    }

    /// Answers the server's question at once. A server that asks faster than it takes the answers
    /// gets fewer of them.
    fn answer_heartbeat(&mut self, conn: ConnId) {
        self.post_beat(conn.path, Imm::HbAck, false, 1);
    }

    fn post_beat(&mut self, id: PathId, imm: Imm, signal: bool, reserve: u32) {
        let conn = ConnId { path: id, cid: 0 };
        let Some(link) = self.links.get_mut(id) else { return };
        let Some(of) = link.conns.first_mut().filter(|of| of.has_room(reserve)) else { return };
        let kind = WrKind::WriteImm(Remote::default(), imm.to_u32());
        let tag = Tag::new(Tag::HEARTBEAT, u32::from(!signal));
        let start = self.batch.mems.len();
        of.post_signalled(&mut self.batch, conn, tag, kind, start, signal);
    }

    fn on_heartbeat_answer(&mut self, now: Instant, id: PathId) {
        let Some(link) = self.links.get_mut(id) else { return };
        let took = link.heartbeat.as_mut().and_then(|heartbeat| heartbeat.acked(now));
        let path = link.path.and_then(|path| self.paths.get_mut(path));
        if let (Some(path), Some(took)) = (path, took) {
            path.latency = took;
        }
    }
}

/// Reads the message that came with an answer [RT-13], [RT-56].
fn read_rkey_rsp(link: &Link, done: &Done) -> Result<RkeyRsp, Violation> {
    if done.opcode != WcOpcode::Recv || done.len < RECV_SLOT {
        return Err(Violation);
    }
    let slot = link.recv_slot(done.conn, done.tag.index()).and_then(|slot| slot.mem);
    let (Some(mem), Some((_, buffer))) = (slot, &link.memory) else { return Err(Violation) };
    let mut bytes = [0; RKEY_RSP_LEN];
    buffer.read(mem.offset as usize, &mut bytes);
    RkeyRsp::parse(&bytes).map_err(|_| Violation)
}
