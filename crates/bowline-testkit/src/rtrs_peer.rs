//! RTRS by hand, on bare verbs: a peer that can send anything.

use std::collections::VecDeque;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering::Relaxed};
use std::time::{Duration, Instant};

use bowline_verbs::{
    Access, Buffer, CmEvent, CmId, Completion, ConnParam, ConnRequest, CqId, Device, Error, MrKeys,
    PdId, QpAttr, QpCap, QpInit, QpState, QpType, Qpn, RecvWr, RejectReason, Remote, SendFlags,
    SendOp, SendWr, Sge, Status,
};
use bowline_wire::rtrs::{
    ConAnswer, ConReq, ConRsp, Geometry, Imm, PORT, SessionName, Uuid, emit_info_req,
    parse_info_rsp,
};

/// Longest wait for what is to come, on the slowest machine.
const PATIENCE: Duration = Duration::from_secs(20);
/// Bytes of the buffer; messages that are sent lie at its beginning.
const BUFFER: usize = 1 << 20;
/// Offsets of receives: the first 64 KiB for INFO_RSP, then 8 bytes each.
const RECEIVES: usize = 512 << 10;
/// Local ports, one for each path.
static LOCAL: AtomicU16 = AtomicU16::new(20_000);

/// A device of one address, with the objects needed to use it.
#[derive(Debug)]
pub struct Raw<D: ?Sized> {
    /// The device.
    pub dev: Arc<D>,
    /// Its address.
    pub ip: IpAddr,
    pd: PdId,
    cq: CqId,
    /// Memory, from offset 0 of the device's.
    pub buffer: Arc<Buffer>,
    /// Keys of the memory.
    pub keys: MrKeys,
    done: VecDeque<Completion>,
    /// Events that were not waited for yet.
    pub events: VecDeque<CmEvent>,
}

/// Outcome of a connection request.
#[derive(Debug)]
pub enum Outcome {
    /// Accepted by the program.
    Accepted(Conn, ConRsp),
    /// Refused by the program, with this errno.
    Refused(u16),
}

/// A connection.
#[derive(Clone, Copy, Debug)]
pub struct Conn {
    /// Its queue pair.
    pub qp: Qpn,
    /// Its name at the device.
    pub id: CmId,
}

/// A path that is connected.
#[derive(Debug)]
pub struct Path {
    /// Its connections.
    pub conns: Vec<Conn>,
    /// What the server said of its chunks.
    pub geometry: Geometry,
    /// Address and key of each chunk.
    pub chunks: Vec<(u64, u32)>,
}

/// Ids of a path.
#[derive(Clone, Copy, Debug)]
pub struct Ids {
    /// The session.
    pub session: Uuid,
    /// The path.
    pub path: Uuid,
    /// The local port.
    pub port: u16,
    /// The path may make the session.
    pub first: bool,
    /// The client offers to give notice of paths that it has given up.
    pub gives_notice: bool,
}

impl Ids {
    /// A session that does not exist.
    #[expect(clippy::new_without_default, reason = "each is another one")]
    pub fn new() -> Self {
        let port = LOCAL.fetch_add(1, Relaxed);
        let mut bytes = [0x5a; 16];
        bytes[..2].copy_from_slice(&port.to_le_bytes());
        Self {
            session: Uuid::from_random(bytes),
            path: Uuid::from_random(bytes),
            port,
            first: true,
            gives_notice: false,
        }
    }

    /// A path into somebody else's session.
    pub fn into(session: Uuid) -> Self {
        Self { session, first: false, ..Self::new() }
    }

    /// Returns the request for connection `cid` of `cid_num`.
    pub fn request(&self, cid: u16, cid_num: u16) -> ConReq {
        let Self { session, path, first, gives_notice, .. } = *self;
        ConReq {
            cid,
            cid_num,
            recon_cnt: 1,
            path,
            session,
            first: first || cid > 0,
            counts_keys: false,
            gives_notice,
        }
    }
}

impl<D: Device + ?Sized> Raw<D> {
    /// A peer at an address of a device.
    pub fn on(dev: Arc<D>, ip: IpAddr) -> Self {
        let pd = dev.alloc_pd().unwrap();
        let cq = dev.create_cq(1 << 16).unwrap();
        let buffer = Arc::new(Buffer::new(BUFFER).unwrap());
        let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
        let keys = dev.reg_mr(pd, &buffer, 0, BUFFER, Some(0), access).unwrap();
        let (done, events) = (VecDeque::new(), VecDeque::new());
        Self { dev, ip, pd, cq, buffer, keys, done, events }
    }

    /// Makes a queue pair that can be connected.
    pub fn queue_pair(&self) -> Qpn {
        let cap = QpCap {
            max_send_wr: 4096,
            max_recv_wr: 4096,
            max_send_sge: 1,
            max_recv_sge: 1,
            max_inline: 0,
        };
        let (pd, cq) = (self.pd, self.cq);
        let init = QpInit {
            pd,
            send_cq: cq,
            recv_cq: cq,
            srq: None,
            qp_type: QpType::Rc,
            cap,
            sq_sig_all: false,
        };
        let qp = self.dev.create_qp(&init).unwrap();
        let access = Some(Access::LOCAL_WRITE | Access::REMOTE_WRITE);
        let state = Some(QpState::Init);
        self.dev.modify_qp(qp, &QpAttr { state, access, ..QpAttr::default() }).unwrap();
        qp
    }

    /// Returns what a connection of that queue pair is asked for or accepted with.
    pub fn param(&self, qpn: Qpn, private: &[u8]) -> ConnParam {
        ConnParam {
            qpn,
            private_data: private.to_vec(),
            responder_resources: 0,
            initiator_depth: 0,
            ..ConnParam::default()
        }
    }

    /// Sends a connection request, and does not wait for an answer.
    pub fn ask(&self, to: IpAddr, port: u16, private: &[u8]) -> Conn {
        let qp = self.queue_pair();
        let from = Some(SocketAddr::new(self.ip, port));
        let id = self.dev.connect(from, (to, PORT).into(), &self.param(qp, private)).unwrap();
        Conn { qp, id }
    }

    /// Sends a connection request with any 56 bytes.
    pub fn connect(&mut self, to: IpAddr, port: u16, private: &[u8]) -> Outcome {
        let conn = self.ask(to, port, private);
        self.outcome(conn)
    }

    /// Waits for the answer to a request.
    pub fn outcome(&mut self, conn: Conn) -> Outcome {
        match self.event_of(conn.id).expect("an answer to a connection request") {
            CmEvent::Established { private_data, .. } => match ConAnswer::parse(&private_data) {
                Ok(ConAnswer::Accepted(rsp)) => Outcome::Accepted(conn, rsp),
                other => panic!("accepted with {other:?}"),
            },
            CmEvent::Rejected { reason, private_data, .. } => {
                assert_eq!(reason, RejectReason::CONSUMER);
                self.dev.destroy_id(conn.id).unwrap();
                self.dev.destroy_qp(conn.qp).unwrap();
                match ConAnswer::parse(&private_data) {
                    Ok(ConAnswer::Refused(errno)) => Outcome::Refused(errno),
                    other => panic!("refused with {other:?}"),
                }
            }
            other => panic!("{other:?}"),
        }
    }

    /// Connects what must be connected.
    pub fn conn(&mut self, to: IpAddr, ids: &Ids, cid: u16, cid_num: u16) -> (Conn, ConRsp) {
        match self.connect(to, ids.port, &ids.request(cid, cid_num).emit()) {
            Outcome::Accepted(conn, rsp) => (conn, rsp),
            other @ Outcome::Refused(_) => panic!("{other:?}"),
        }
    }

    /// Connects all connections of a path; INFO_REQ is not sent.
    pub fn conns(&mut self, to: IpAddr, ids: &Ids, count: u16) -> (Vec<Conn>, Geometry) {
        let made: Vec<_> = (0..count).map(|cid| self.conn(to, ids, cid, count)).collect();
        let geometry = made[0].1.geometry;
        (made.into_iter().map(|(conn, _)| conn).collect(), geometry)
    }

    /// Connects a path as an honest client does; `None` when the server closes it instead of
    /// answering INFO_REQ.
    pub fn try_path(&mut self, to: IpAddr, ids: &Ids, count: u16, name: &str) -> Option<Path> {
        let (conns, geometry) = self.conns(to, ids, count);
        let room = 8 + 16 * usize::from(geometry.queue_depth());
        self.post_recv(conns[0], 1, RECEIVES, room);
        self.send(conns[0], 2, &emit_info_req(&SessionName::new(name).unwrap()));
        let done = self.recv(1)?;
        if done.status != Status::Success {
            return None;
        }
        let mut bytes = vec![0; done.byte_len as usize];
        self.buffer.read(RECEIVES, &mut bytes);
        let mut chunks = Vec::new();
        parse_info_rsp(&bytes, &geometry, &mut chunks).unwrap();
        Some(Path { conns, geometry, chunks })
    }

    /// Connects a path as an honest client does.
    pub fn path(&mut self, to: IpAddr, ids: &Ids, count: u16, name: &str) -> Path {
        self.try_path(to, ids, count, name).expect("chunks")
    }

    /// Posts receives of 8 bytes, as they are needed for answers.
    pub fn post_recvs(&self, conn: Conn, count: usize) {
        (0..count).for_each(|at| self.post_recv(conn, 1, RECEIVES + (64 << 10) + at * 8, 8));
    }

    /// Posts a receive into the memory, from `at` on.
    pub fn post_recv(&self, conn: Conn, id: u64, at: usize, len: usize) {
        let sge = Sge { addr: at as u64, len: len as u32, lkey: self.keys.lkey };
        self.dev.post_recv(conn.qp, &[RecvWr { id, sges: &[sge] }]).unwrap();
    }

    /// Posts a send of some bytes, signalled.
    pub fn post(&self, conn: Conn, id: u64, op: SendOp, bytes: &[u8]) {
        self.buffer.write(0, bytes);
        self.post_prepared(conn, id, op, bytes.len());
    }

    /// The same for the bytes at the beginning of the buffer.
    pub fn post_prepared(&self, conn: Conn, id: u64, op: SendOp, len: usize) {
        let sges = [Sge { addr: 0, len: len as u32, lkey: self.keys.lkey }];
        let sges = if len == 0 { &sges[..0] } else { &sges[..] };
        let wr = SendWr { id, op, sges, inline: &[], flags: SendFlags::SIGNALED };
        // A failed queue pair accepts the request, too, and flushes it.
        self.dev.post_send(conn.qp, &[wr]).unwrap();
    }

    /// Posts a send of a message, signalled.
    pub fn send(&self, conn: Conn, id: u64, bytes: &[u8]) {
        self.post(conn, id, SendOp::Send, bytes);
    }

    /// Writes to a chunk, from `at` on.
    pub fn put(&mut self, conn: Conn, chunk: (u64, u32), at: u32, bytes: &[u8]) -> Status {
        let remote = Remote { addr: chunk.0 + u64::from(at), rkey: chunk.1 };
        self.post(conn, 3, SendOp::Write(remote), bytes);
        self.sent(3)
    }

    /// Writes to a chunk with an immediate.
    pub fn put_imm(&mut self, conn: Conn, chunk: (u64, u32), at: u32, bytes: &[u8], imm: u32) {
        let remote = Remote { addr: chunk.0 + u64::from(at), rkey: chunk.1 };
        self.post(conn, 4, SendOp::WriteImm(remote, imm), bytes);
    }

    /// Sends an immediate without data, by a write.
    pub fn imm(&self, conn: Conn, imm: u32) {
        self.post(conn, 4, SendOp::WriteImm(Remote::default(), imm), &[]);
    }

    /// Writes a whole request to chunk `id`: the bytes before the header, and the header at `off`.
    pub fn request(&mut self, path: &Path, conn: Conn, id: u16, off: u32, bytes: &[u8]) {
        let imm = Imm::Request(path.geometry.request_payload(id, off)).to_u32();
        self.put_imm(conn, path.chunks[usize::from(id)], 0, bytes, imm);
    }

    fn take(&mut self) -> usize {
        let mut out = Vec::new();
        let count = self.dev.poll_cq(self.cq, &mut out, 256).unwrap();
        self.done.extend(out);
        while let Ok(event) = self.dev.cm_event(Duration::ZERO) {
            self.events.push_back(event);
        }
        count
    }

    /// Waits for a completion or event; `None` when it does not come.
    fn wait<T>(&mut self, mut look: impl FnMut(&mut Self) -> Option<T>) -> Option<T> {
        let start = Instant::now();
        loop {
            self.take();
            if let Some(found) = look(self) {
                return Some(found);
            }
            if start.elapsed() > PATIENCE {
                return None;
            }
            match self.dev.wait_cq(self.cq, false, Some(Duration::from_millis(2))) {
                Ok(_) | Err(Error::TimedOut) => {}
                Err(error) => panic!("{error}"),
            }
        }
    }

    fn completion(&mut self, recv: bool, id: u64) -> Option<Completion> {
        self.wait(|raw| {
            let is = |done: &Completion| done.is_recv() == recv && done.wr_id == id;
            let at = raw.done.iter().position(is)?;
            raw.done.remove(at)
        })
    }

    /// Waits for the end of a receive.
    pub fn recv(&mut self, id: u64) -> Option<Completion> {
        self.completion(true, id)
    }

    /// Waits for the completion of a send, and returns its status.
    pub fn sent(&mut self, id: u64) -> Status {
        self.completion(false, id).expect("the end of a send").status
    }

    fn event_of(&mut self, id: CmId) -> Option<CmEvent> {
        self.wait(|raw| {
            let at = raw.events.iter().position(|event| event.id() == id)?;
            raw.events.remove(at)
        })
    }

    /// Waits until the peer has ended a connection.
    pub fn is_dropped(&mut self, conn: Conn) -> bool {
        let is = |event: &CmEvent| *event == CmEvent::Disconnected { id: conn.id };
        self.wait(|raw| raw.events.iter().any(is).then_some(())).is_some()
    }

    /// Waits a moment; returns whether a connection request arrived.
    pub fn is_asked(&mut self) -> bool {
        std::thread::sleep(Duration::from_millis(2));
        self.take();
        self.events.iter().any(|event| matches!(event, CmEvent::ConnectRequest { .. }))
    }

    /// Waits for a connection request.
    pub fn asked(&mut self) -> (CmId, ConnRequest) {
        self.wait(|raw| {
            let is = |event: &CmEvent| matches!(event, CmEvent::ConnectRequest { .. });
            let at = raw.events.iter().position(is)?;
            match raw.events.remove(at)? {
                CmEvent::ConnectRequest { id, request } => Some((id, request)),
                other => panic!("{other:?}"),
            }
        })
        .expect("somebody who wants to connect")
    }

    /// Waits until an accepted connection is established.
    pub fn established(&mut self, conn: Conn) -> bool {
        matches!(self.event_of(conn.id), Some(CmEvent::Established { .. }))
    }

    /// Disconnects, and waits until the peer has confirmed.
    pub fn leave(&mut self, conns: &[Conn]) {
        for conn in conns {
            // Ended already, perhaps.
            let _ = self.dev.disconnect(conn.id);
            let _ = self.dev.destroy_id(conn.id);
            let _ = self.dev.destroy_qp(conn.qp);
        }
        while self.take() > 0 {}
        self.done.clear();
        self.events.retain(|event| conns.iter().all(|conn| conn.id != event.id()));
    }
}
