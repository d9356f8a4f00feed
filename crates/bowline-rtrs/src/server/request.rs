//! Completions; requests, from their arrival to the upper layer.
//!
//! A request consists of data, user message and header in its chunk [RT-38]. The client may be able
//! to change them at any time. So first its key of the chunk is withdrawn [RT-44]; then header and
//! user message are copied, each byte once. The copy is validated and used, and the chunk is not
//! read again for them [RT-65].

use core::ops::Deref;

use bowline_verbs::{Status, WcOpcode};
use bowline_wire::rtrs::{Dir, Imm, IoHdr, IoReq, parse_io};

use super::chunks::{NONE, Op, OpState};
use super::path::{ConnState, PathState};
use super::{CloseReason, Server, SessId};
use crate::{ConnId, Done, Instant, MemRef, PortId, RecvSlot, Tag};

/// Bytes of a user message stored without allocation.
const USR_INLINE: usize = 48;
/// Most bytes of a header [RT-12].
const HEADER_MAX: usize = 24;

/// An operation, from request to response.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct OpId {
    /// Index in the server's table.
    pub slot: u32,
    /// How often the slot was used before, wrapping.
    pub generation: u32,
}

/// A validated request: everything in it is within the limits.
#[derive(Debug)]
pub struct Request {
    /// The operation to answer with [`Server::respond`], exactly once.
    pub op: OpId,
    /// The session.
    pub session: SessId,
    /// Read or write, from the transport's view: the direction of the data.
    pub dir: Dir,
    /// The data of a write, or the place for the data of a read. Lies in [`Server::memory`], at the
    /// beginning of a chunk. Before a read it holds data of earlier requests of the session.
    pub data: MemRef,
    /// Bytes of the response to a successful read, at most those of `data`; 0: none. All of them
    /// must be written before the response. 0 for a write.
    pub room: u32,
    /// The user message.
    pub usr: Usr,
}

/// A user message, copied out of its chunk.
pub struct Usr(Bytes);

enum Bytes {
    Inline(u8, [u8; USR_INLINE]),
    Boxed(Box<[u8]>),
}

impl Usr {
    /// Makes a user message of `len` bytes that `fill` writes.
    fn new(len: usize, fill: impl FnOnce(&mut [u8])) -> Self {
        let mut inline = [0; USR_INLINE];
        if let Some(bytes) = inline.get_mut(..len) {
            fill(bytes);
            return Self(Bytes::Inline(len as u8, inline));
        }
        let mut bytes = vec![0; len].into_boxed_slice();
        fill(&mut bytes);
        Self(Bytes::Boxed(bytes))
    }
}

impl Deref for Usr {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match &self.0 {
            Bytes::Inline(len, bytes) => bytes.get(..usize::from(*len)).unwrap_or(bytes),
            Bytes::Boxed(bytes) => bytes,
        }
    }
}

impl core::fmt::Debug for Usr {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "{} bytes", self.len())
    }
}

/// A request that has arrived, but was not read yet.
#[derive(Clone, Copy, Debug)]
pub(super) struct Arrived {
    conn: ConnId,
    chunk: u16,
    /// Offset of the header in the chunk.
    off: u32,
    /// Bytes the client wrote.
    len: u32,
    /// The key withdrawn for it.
    rkey: Option<u32>,
}

impl Server {
    pub(super) fn completion(&mut self, now: Instant, done: &Done) {
        let turn = self.turn;
        let Some(path) = self.paths.get_mut(done.conn.path) else { return };
        if done.tag.kind() == Tag::DRAIN {
            return self.on_drain_marker(now, done.conn);
        }
        path.count_completion(turn);
        let Some(conn) = path.conns.get_mut(done.conn.cid) else { return };
        if conn.state != ConnState::Live {
            return;
        }
        match done.tag.kind() {
            Tag::INFO if is_recv(done) => self.info_request(now, done),
            _ if done.status != Status::Success => {
                self.close_path(now, done.conn.path, CloseReason::Completion(done.status));
            }
            Tag::RECV => self.received(now, done),
            _ => {
                conn.queue.completed(done.tag.index());
                if let Some(heartbeat) = &mut path.heartbeat {
                    heartbeat.acknowledged(now);
                }
                if !conn.queue.deferred.is_empty() {
                    self.send_deferred(done.conn);
                }
            }
        }
    }

    /// Handles a received immediate [RT-44], [RT-57], [RT-67].
    fn received(&mut self, now: Instant, done: &Done) {
        // Posted again at once, so that the client never finds the queue empty.
        let (conn, tag) = (done.conn, done.tag);
        self.batch.recvs.push(RecvSlot { conn, tag, mem: None });
        let Some(path) = self.paths.get_mut(conn.path) else { return };
        let Some(imm) = done.imm else {
            return self.close_path(now, conn.path, CloseReason::Message);
        };
        if let Some(heartbeat) = &mut path.heartbeat {
            heartbeat.received(now);
        }
        let connected = path.state == PathState::Connected;
        match Imm::from_u32(imm) {
            Imm::Request(payload) if connected && done.opcode == WcOpcode::RecvRdmaWithImm => {
                self.arrive(now, done, payload);
            }
            Imm::HbMsg if connected && conn.cid == 0 => self.answer_heartbeat(conn),
            Imm::HbAck if conn.cid == 0 => {
                if let Some(heartbeat) = &mut path.heartbeat {
                    heartbeat.acked(now);
                    let next = heartbeat.next();
                    self.wake_at(next);
                }
            }
            Imm::GivenUp(generation) if connected && path.accepts_notice => {
                self.notice(now, conn.path, generation);
            }
            Imm::HbMsg | Imm::HbAck | Imm::GivenUp(_) | Imm::Done { .. } | Imm::Unknown(_) => {
                self.counters.immediates_ignored += 1;
            }
            Imm::Request(_) => {
                self.close_path(now, conn.path, CloseReason::Message);
            }
        }
    }

    /// Handles the arrival of a request: the client must not reach the chunk any more.
    fn arrive(&mut self, now: Instant, done: &Done, payload: u32) {
        let Some(path) = self.paths.get_mut(done.conn.path) else { return };
        let Some((chunk, off)) = self.config.geometry.split(payload) else {
            return self.close_path(now, done.conn.path, CloseReason::Chunk);
        };
        let key = path.keys.get_mut(usize::from(chunk)).filter(|key| !key.taken);
        let Some(key) = key else {
            return self.close_path(now, done.conn.path, CloseReason::ChunkBusy);
        };
        key.taken = true;
        let rkey = path.refresh.then_some(key.rkey);
        if let Some(rkey) = rkey {
            self.batch.withdraw.push((path.port, rkey));
        }
        self.arrived.push(Arrived { conn: done.conn, chunk, off, len: done.len, rkey });
    }

    /// Reads and validates the requests whose keys have been withdrawn. `failed` are the keys for
    /// which that did not work: their paths are closed, and the requests not carried out [RT-67].
    pub fn process(&mut self, now: Instant, failed: &[(PortId, u32)]) {
        let spare = std::mem::take(&mut self.arrived_spare);
        let mut arrived = std::mem::replace(&mut self.arrived, spare);
        for request in arrived.drain(..) {
            self.read_request(now, &request, failed);
        }
        self.arrived_spare = arrived;
    }

    fn read_request(&mut self, now: Instant, arrived: &Arrived, failed: &[(PortId, u32)]) {
        let id = arrived.conn.path;
        let geometry = &self.config.geometry;
        let Some(path) = self.paths.get_mut(id) else { return };
        if path.state != PathState::Connected {
            return;
        }
        if let Some(rkey) = arrived.rkey
            && !failed.is_empty()
            && failed.contains(&(path.port, rkey))
        {
            return self.close_path(now, id, CloseReason::Withdraw);
        }
        let (Some(session), Some(region)) = (self.sessions.get_mut(path.session), path.region)
        else {
            return;
        };
        let start = u64::from(arrived.chunk) * u64::from(geometry.chunk());
        let at = |offset: u32| start as usize + offset as usize;
        let mut tail = [0; HEADER_MAX];
        let room = HEADER_MAX.min((geometry.chunk() - arrived.off) as usize);
        session.buffer.read(at(arrived.off), &mut tail[..room]);
        // Used by reference: moving a value that was just written would wait for the stores to
        // finish.
        let parsed = parse_io(geometry, arrived.off, &tail[..room]);
        let Ok(io) = &parsed else {
            return self.close_path(now, id, CloseReason::Header);
        };
        if io.usr_len < self.config.usr_min || !is_length(io, arrived) {
            return self.close_path(now, id, CloseReason::Header);
        }
        let usr = Usr::new(io.usr_len.into(), |out| session.buffer.read(at(io.usr_at), out));
        let bytes = u64::from(arrived.off);
        let (dir, desc, inval) = match io.hdr {
            IoHdr::Write { .. } => {
                path.stats.writes += 1;
                path.stats.write_bytes += bytes;
                (Dir::Write, None, false)
            }
            IoHdr::Read { desc, need_inval, .. } => {
                path.stats.reads += 1;
                path.stats.read_bytes += bytes;
                (Dir::Read, desc, need_inval)
            }
        };
        path.stats.inflight += 1;
        let session_id = session.id;
        let op = self.ops.take(Op {
            generation: 0,
            epoch: session.begin(),
            state: OpState::Running,
            session: path.session,
            path: id,
            cid: arrived.conn.cid,
            chunk: arrived.chunk,
            next: NONE,
            desc,
            inval,
            held: None,
        });
        let data = MemRef { region, offset: start, len: io.data_len };
        let (session, room) = (session_id, desc.map_or(0, |desc| desc.len));
        self.start(now, Request { op, session, dir, data, room, usr });
    }

    /// Hands a request to the upper layer, or lets it wait for its chunk [RS-9].
    ///
    /// If another path still has an operation in the chunk, the client has given up one of the two
    /// paths, since it uses a chunk for one request at a time. The older path is assumed to be the
    /// one and is closed. It can be the newer one after all: packets of a given-up path may be late
    /// instead of lost. A bowline client gives notice of the path first, so that it is closed
    /// already [RT-101]. A kernel does not: if it has used the chunk for another request since, the
    /// late request overwrites that one's data, and is carried out again [RT-96].
    fn start(&mut self, now: Instant, request: Request) {
        let op = request.op;
        let Some(session) = self.sessions.get_mut(request.session.slot) else { return };
        let index = usize::from(self.ops.peek(op.slot).chunk);
        self.filled |= session.note_use(index);
        let Some(chunk) = session.chunks.get_mut(index) else { return };
        if chunk.holder == NONE {
            chunk.holder = op.slot;
            session.running += 1;
            self.counters.requests += 1;
            self.requests.push(request);
            return;
        }
        let holder = self.ops.peek(chunk.holder).path;
        let waiting = self.ops.at(op.slot);
        let path = waiting.path;
        waiting.state = OpState::Waiting;
        waiting.held = Some(Box::new(request));
        chunk.wait(&mut self.ops, op.slot);
        session.waiting += 1;
        self.waiting += 1;
        self.counters.requests_waited += 1;
        let many = session.waiting > self.config.limits.waiting;
        if let Some(path) = self.paths.get_mut(path) {
            path.waiting += 1;
        }
        if many {
            return self.close_path(now, path, CloseReason::TooMany);
        }
        self.close_path(now, holder, CloseReason::Overtaken);
    }

    /// Ends an operation and gives its chunk to the next waiting request.
    pub(super) fn release(&mut self, slot: u32) {
        let op = self.ops.peek(slot);
        let (session, index, path) = (op.session, usize::from(op.chunk), op.path);
        self.ops.free(slot);
        if let Some(path) = self.paths.get_mut(path) {
            path.stats.inflight = path.stats.inflight.saturating_sub(1);
        }
        let Some(session) = self.sessions.get_mut(session) else { return };
        session.running -= 1;
        let Some(chunk) = session.chunks.get_mut(index) else { return };
        chunk.holder = NONE;
        let Some(next) = chunk.next(&self.ops) else { return };
        session.waiting -= 1;
        self.waiting -= 1;
        let op = self.ops.at(next);
        op.next = NONE;
        op.state = OpState::Running;
        if let Some(path) = self.paths.get_mut(op.path) {
            path.waiting -= 1;
        }
        if let Some(request) = op.held.take() {
            chunk.holder = next;
            session.running += 1;
            self.counters.requests += 1;
            self.requests.push(*request);
        }
    }

    /// Whether requests are ready for the upper layer.
    pub fn has_requests(&self) -> bool {
        !self.requests.is_empty()
    }

    /// Whether requests wait for chunks of others: when those end, no completion announces the
    /// requests for the upper layer [RS-9].
    pub const fn has_waiting(&self) -> bool {
        self.waiting > 0
    }

    /// Takes the requests that are ready for the upper layer. Call it again after
    /// [`respond`](Self::respond): a freed chunk may let another request begin.
    pub fn take_requests(&mut self, into: &mut Vec<Request>) {
        into.append(&mut self.requests);
    }
}

/// Whether a completion of an INFO work request is that of its receive. After a failure only the
/// tag tells: the only send of that kind is signalled, and has a number.
fn is_recv(done: &Done) -> bool {
    done.tag.index() == 0
}

/// Whether the client wrote as many bytes as the header says, if the device reports the number
/// [RT-39]. The data of a WRITE, or a part of it, may have come before as a separate message
/// [RT-97]. If it has not come, the chunk holds older data of the same client.
fn is_length(io: &IoReq, arrived: &Arrived) -> bool {
    let rest = arrived.off - io.data_len;
    let lens = match io.hdr {
        IoHdr::Write { .. } => rest + 4..=arrived.off + 4,
        IoHdr::Read { desc: None, .. } => rest + 8..=rest + 8,
        IoHdr::Read { desc: Some(_), .. } => rest + 24..=rest + 24,
    };
    arrived.len == 0 || lens.contains(&arrived.len)
}
