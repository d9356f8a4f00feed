//! An RTRS client by hand, on bare verbs: it can send anything.

use std::collections::VecDeque;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bowline_verbs::{
    Access, Buffer, CmEvent, CmId, Completion, ConnParam, CqId, Device, Error, MrKeys, PdId,
    QpAttr, QpCap, QpInit, QpState, QpType, Qpn, RecvWr, RejectReason, Remote, SendFlags, SendOp,
    SendWr, Sge, Status,
};
use bowline_wire::rtrs::{
    ConAnswer, ConReq, ConRsp, Desc, Geometry, Imm, PORT, READ_HDR_MAX, RkeyRsp, SessionName, Uuid,
    emit_info_req, parse_info_rsp, read_hdr, write_hdr,
};

use crate::rule::{Other, deviates};

/// Bytes of registered memory: what is sent from its beginning, then what the server writes, then
/// receives.
const MEMORY: usize = 4 << 20;
const ANSWERS: usize = 1 << 20;
const RECEIVES: usize = 2 << 20;
/// Bytes of a receive while a path is connected.
const RECEIVE: usize = 64;
/// Receives that are posted on each connection.
const POSTED: usize = 64;
/// Connections of a path.
pub(super) const CONNECTIONS: u16 = 2;
/// How long a look at the connection manager may wait for a completion.
const SLICE: Duration = Duration::from_millis(2);
/// Local ports of the connection manager.
const FIRST_PORT: u16 = 21_000;

/// A connection.
#[derive(Clone, Copy, Debug)]
pub(super) struct Conn {
    qp: Qpn,
    id: CmId,
}

/// How a request to connect ended.
#[derive(Debug)]
pub(super) enum Outcome {
    Accepted(Conn, ConRsp),
    /// With the errno of the program's refusal.
    Refused(u16),
    /// Otherwise; what came.
    Otherwise(String),
}

/// A path that is connected.
#[derive(Debug)]
pub(super) struct Path {
    pub(super) conns: Vec<Conn>,
    pub(super) geometry: Geometry,
    pub(super) new_rkey: bool,
    /// Address and key of each chunk.
    pub(super) chunks: Vec<(u64, u32)>,
}

/// What ends a request.
#[derive(Debug)]
pub(super) struct Reply {
    pub(super) errno: u16,
    /// What the server wrote into this side's memory.
    pub(super) data: Vec<u8>,
}

/// A client.
pub(super) struct Client {
    dev: Arc<dyn Device>,
    local: IpAddr,
    peer: IpAddr,
    pub(super) patience: Duration,
    pd: PdId,
    cq: CqId,
    memory: Arc<Buffer>,
    keys: MrKeys,
    done: VecDeque<Completion>,
    events: VecDeque<CmEvent>,
    serial: u16,
    /// Tells the sessions of one run from those of others.
    run: [u8; 4],
}

fn failed(what: &str, error: impl std::fmt::Debug) -> Other {
    Other::Skipped(format!("{what}: {error:?}"))
}

impl Client {
    pub(super) fn new(
        dev: Arc<dyn Device>,
        local: IpAddr,
        peer: IpAddr,
        patience: Duration,
    ) -> Result<Self, String> {
        let failure = |error: io::Error| error.to_string();
        let failed = |error: Error| error.to_string();
        let pd = dev.alloc_pd().map_err(failed)?;
        let cq = dev.create_cq(4096).map_err(failed)?;
        let memory = Arc::new(Buffer::new(MEMORY).map_err(failure)?);
        let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
        let keys = dev.reg_mr(pd, &memory, 0, MEMORY, Some(0), access).map_err(failed)?;
        let since = std::time::SystemTime::now().duration_since(std::time::SystemTime::UNIX_EPOCH);
        let run = since.map_or(0, |since| since.subsec_nanos() ^ std::process::id());
        Ok(Self {
            dev,
            local,
            peer,
            patience,
            pd,
            cq,
            memory,
            keys,
            done: VecDeque::new(),
            events: VecDeque::new(),
            serial: 0,
            run: run.to_le_bytes(),
        })
    }

    /// The request of a new path in a new session.
    pub(super) fn new_path(&mut self) -> ConReq {
        self.serial += 1;
        let mut bytes = [0x6b; 16];
        bytes[..4].copy_from_slice(&self.run);
        bytes[4..6].copy_from_slice(&self.serial.to_le_bytes());
        let session = Uuid::from_random(bytes);
        bytes[15] = 0x6c;
        ConReq {
            cid: 0,
            cid_num: CONNECTIONS,
            recon_cnt: 1,
            path: Uuid::from_random(bytes),
            session,
            first: true,
            counts_keys: false,
            gives_notice: false,
        }
    }

    /// A name for the session of the last path: one that a server has not let go of yet is taken
    /// [RT-20].
    pub(super) fn session_name(&self) -> String {
        let [a, b, c, d] = self.run;
        format!("bowline-probe-{a:02x}{b:02x}{c:02x}{d:02x}-{}", self.serial)
    }

    fn queue_pair(&self) -> Result<Qpn, Other> {
        let cap = QpCap {
            max_send_wr: 256,
            max_recv_wr: 256,
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
        let qp = self.dev.create_qp(&init).map_err(|error| failed("no queue pair", error))?;
        let access = Some(Access::LOCAL_WRITE | Access::REMOTE_WRITE);
        let attr = QpAttr { state: Some(QpState::Init), access, ..QpAttr::default() };
        self.dev.modify_qp(qp, &attr).map_err(|error| failed("no queue pair", error))?;
        Ok(qp)
    }

    /// Asks for a connection with any private data, at a port.
    pub(super) fn connect(&mut self, port: u16, private: &[u8]) -> Result<Outcome, Other> {
        let qp = self.queue_pair()?;
        let param = ConnParam {
            qpn: qp,
            private_data: private.to_vec(),
            responder_resources: 0,
            initiator_depth: 0,
            ..ConnParam::default()
        };
        let from = SocketAddr::new(self.local, FIRST_PORT + self.serial);
        let id = self
            .dev
            .connect(Some(from), SocketAddr::new(self.peer, port), &param)
            .map_err(|error| failed("no request to connect", error))?;
        let conn = Conn { qp, id };
        let event = self.wait(|client| {
            let at = client.events.iter().position(|event| event.id() == id)?;
            client.events.remove(at)
        });
        let outcome = match event {
            Some(CmEvent::Established { private_data, .. }) => {
                match ConAnswer::parse(&private_data) {
                    Ok(ConAnswer::Accepted(rsp)) => return Ok(Outcome::Accepted(conn, rsp)),
                    other => Outcome::Otherwise(format!("accepted with {other:?}")),
                }
            }
            Some(CmEvent::Rejected { reason: RejectReason::CONSUMER, private_data, .. }) => {
                match ConAnswer::parse(&private_data) {
                    Ok(ConAnswer::Refused(errno)) => Outcome::Refused(errno),
                    other => Outcome::Otherwise(format!("refused with {other:?}")),
                }
            }
            Some(CmEvent::Rejected { reason, .. }) => {
                Outcome::Otherwise(format!("refused: {reason}"))
            }
            Some(other) => Outcome::Otherwise(format!("{other:?}")),
            None => Outcome::Otherwise("nothing in time".to_owned()),
        };
        self.leave(&[conn]);
        Ok(outcome)
    }

    /// Makes the connection of a request that must be accepted.
    pub(super) fn accepted(&mut self, req: &ConReq) -> Result<(Conn, ConRsp), Other> {
        match self.connect(PORT, &req.emit())? {
            Outcome::Accepted(conn, rsp) => Ok((conn, rsp)),
            Outcome::Refused(errno) => deviates(format!("refused with errno {errno}")),
            Outcome::Otherwise(came) => deviates(came),
        }
    }

    /// Makes all connections of a path, without INFO_REQ.
    pub(super) fn connections(&mut self, req: &ConReq) -> Result<(Vec<Conn>, ConRsp), Other> {
        let (first, rsp) = self.accepted(req)?;
        let mut conns = vec![first];
        for cid in 1..req.cid_num {
            conns.push(self.accepted(&ConReq { cid, first: true, ..*req })?.0);
        }
        Ok((conns, rsp))
    }

    /// Sends an INFO_REQ of these bytes, and waits for the answer; `None`: the path ends.
    pub(super) fn info(
        &mut self,
        conns: &[Conn],
        rsp: &ConRsp,
        req: &[u8],
    ) -> Result<Option<Vec<u8>>, Other> {
        let Some(first) = conns.first() else { return Ok(None) };
        let room = 8 + 16 * usize::from(rsp.geometry.queue_depth());
        self.post_recv(*first, RECEIVES, room)?;
        self.send(*first, SendOp::Send, req)?;
        match self.received(*first) {
            Some(done) if done.status == Status::Success => {
                let mut bytes = vec![0; done.byte_len as usize];
                self.memory.read(RECEIVES, &mut bytes);
                Ok(Some(bytes))
            }
            Some(_) => Ok(None),
            None if self.is_ended(*first) => Ok(None),
            None => deviates("no answer to INFO_REQ, and the path stays"),
        }
    }

    /// Connects a path as an honest client does.
    pub(super) fn path(&mut self, req: &ConReq, name: &str) -> Result<Path, Other> {
        let (conns, rsp) = self.connections(req)?;
        let name = SessionName::new(name).map_err(|error| failed("session name", error))?;
        let Some(bytes) = self.info(&conns, &rsp, &emit_info_req(&name))? else {
            return deviates("the path ended instead of INFO_RSP");
        };
        let mut chunks = Vec::new();
        if let Err(error) = parse_info_rsp(&bytes, &rsp.geometry, &mut chunks) {
            return deviates(error.to_string());
        }
        for conn in &conns {
            for slot in 0..POSTED {
                self.post_recv(*conn, RECEIVES + slot * RECEIVE, RECEIVE)?;
            }
        }
        Ok(Path { conns, geometry: rsp.geometry, new_rkey: rsp.new_rkey, chunks })
    }

    fn post_recv(&self, conn: Conn, at: usize, len: usize) -> Result<(), Other> {
        let sge = Sge { addr: at as u64, len: len as u32, lkey: self.keys.lkey };
        let wr = RecvWr { id: at as u64, sges: &[sge] };
        self.dev.post_recv(conn.qp, &[wr]).map_err(|error| failed("no receive", error))
    }

    /// Sends bytes from the beginning of the memory.
    pub(super) fn send(&self, conn: Conn, op: SendOp, bytes: &[u8]) -> Result<(), Other> {
        self.memory.write(0, bytes);
        let sges = [Sge { addr: 0, len: bytes.len() as u32, lkey: self.keys.lkey }];
        let sges = if bytes.is_empty() { &sges[..0] } else { &sges[..] };
        let wr = SendWr { id: 1, op, sges, inline: &[], flags: SendFlags::SIGNALED };
        self.dev.post_send(conn.qp, &[wr]).map_err(|error| failed("no send", error))
    }

    /// Sends an immediate without data.
    pub(super) fn imm(&self, conn: Conn, imm: u32) -> Result<(), Other> {
        self.send(conn, SendOp::WriteImm(Remote::default(), imm), &[])
    }

    fn take(&mut self) {
        let mut out = Vec::new();
        // A queue that is broken brings nothing: whoever waits gives up in time.
        let _ = self.dev.poll_cq(self.cq, &mut out, 256);
        self.done.extend(out.iter().filter(|done| done.is_recv()));
        while let Ok(event) = self.dev.cm_event(Duration::ZERO) {
            self.events.push_back(event);
        }
    }

    fn wait<T>(&mut self, mut look: impl FnMut(&mut Self) -> Option<T>) -> Option<T> {
        let until = Instant::now() + self.patience;
        loop {
            self.take();
            let found = look(self);
            if found.is_some() || Instant::now() > until {
                return found;
            }
            let _ = self.dev.wait_cq(self.cq, false, Some(SLICE));
        }
    }

    /// The next receive of a connection, or `None` if nothing comes or the connection ends.
    fn received(&mut self, conn: Conn) -> Option<Completion> {
        let ended = CmEvent::Disconnected { id: conn.id };
        self.wait(|client| {
            let at = client.done.iter().position(|done| done.qpn == conn.qp);
            match at {
                Some(at) => Some(client.done.remove(at)),
                None => client.events.contains(&ended).then_some(None),
            }
        })
        .flatten()
    }

    /// Tells whether the server has ended a connection, without waiting.
    fn is_ended(&mut self, conn: Conn) -> bool {
        self.take();
        self.events.contains(&CmEvent::Disconnected { id: conn.id })
    }

    /// Waits until the server ends a connection; returns whether it does.
    pub(super) fn ends(&mut self, conn: Conn) -> bool {
        let ended = CmEvent::Disconnected { id: conn.id };
        self.wait(|client| client.events.contains(&ended).then_some(())).is_some()
    }

    /// The next immediate of the server that `wanted` takes; heartbeats are answered.
    pub(super) fn immediate(
        &mut self,
        conn: Conn,
        wanted: impl Fn(Imm) -> bool,
    ) -> Result<(Imm, Vec<u8>), Other> {
        loop {
            let Some(done) = self.received(conn) else {
                return deviates(if self.is_ended(conn) {
                    "the end of the path"
                } else {
                    "nothing in time"
                });
            };
            if done.status != Status::Success {
                return deviates("the end of the path");
            }
            let at = done.wr_id as usize;
            let mut bytes =
                vec![0; if done.byte_len <= RECEIVE as u32 { done.byte_len as usize } else { 0 }];
            self.memory.read(at, &mut bytes);
            self.post_recv(conn, at, RECEIVE)?;
            let Some(imm) = done.imm.map(Imm::from_u32) else { continue };
            if imm == Imm::HbMsg && !wanted(imm) {
                self.imm(conn, Imm::HbAck.to_u32())?;
            } else if wanted(imm) {
                return Ok((imm, bytes));
            }
        }
    }

    /// Writes any bytes to the beginning of chunk `id`, with the immediate for a header at `off`.
    pub(super) fn write_request(
        &mut self,
        path: &Path,
        id: u16,
        off: u32,
        bytes: &[u8],
    ) -> Result<(), Other> {
        let Some((addr, rkey)) = path.chunks.get(usize::from(id)).copied() else {
            return Err(Other::Skipped(format!("no chunk {id}")));
        };
        let imm = Imm::Request(path.geometry.request_payload(id, off)).to_u32();
        let Some(conn) = path.conns.last() else { return Ok(()) };
        self.send(*conn, SendOp::WriteImm(Remote { addr, rkey }, imm), bytes)
    }

    /// Waits for the answer to the request in chunk `id`, and takes its new key.
    pub(super) fn reply(&mut self, path: &mut Path, id: u16, read: usize) -> Result<Reply, Other> {
        let Some(conn) = path.conns.last().copied() else { return deviates("no connection") };
        let (imm, bytes) = self.immediate(
            conn,
            |imm| matches!(imm, Imm::Done { id: done, .. } if done == u32::from(id)),
        )?;
        let Imm::Done { errno, .. } = imm else { return deviates(imm.to_string()) };
        if path.new_rkey {
            match RkeyRsp::parse(&bytes) {
                Ok(new) if new.id == id => {
                    if let Some(chunk) = path.chunks.get_mut(usize::from(id)) {
                        chunk.1 = new.key;
                    }
                }
                other => return deviates(format!("an answer without its new key: {other:?}")),
            }
        } else if !bytes.is_empty() {
            return deviates("a new key that was not announced");
        }
        let mut data = vec![0; read];
        self.memory.read(ANSWERS, &mut data);
        Ok(Reply { errno, data })
    }

    /// Executes a request whose data, if any, goes to this side.
    pub(super) fn read(
        &mut self,
        path: &mut Path,
        id: u16,
        usr: &[u8],
        len: u32,
    ) -> Result<Reply, Other> {
        self.memory.write(ANSWERS, &vec![0xee; len as usize]);
        let desc = Desc { addr: ANSWERS as u64, key: self.keys.rkey, len };
        let mut header = [0; READ_HDR_MAX];
        let header_len = read_hdr(usr.len() as u16, false, (len > 0).then_some(desc), &mut header);
        let Some((addr, rkey)) = path.chunks.get(usize::from(id)).copied() else {
            return Err(Other::Skipped(format!("no chunk {id}")));
        };
        let off = len + usr.len() as u32;
        let imm = Imm::Request(path.geometry.request_payload(id, off)).to_u32();
        let bytes = [usr, header.get(..header_len).unwrap_or_default()].concat();
        if let Some(conn) = path.conns.last() {
            // The server's data lies before the message.
            let remote = Remote { addr: addr + u64::from(len), rkey };
            self.send(*conn, SendOp::WriteImm(remote, imm), &bytes)?;
        }
        self.reply(path, id, len as usize)
    }

    /// Executes a request without data towards the server.
    pub(super) fn write(&mut self, path: &mut Path, id: u16, usr: &[u8]) -> Result<Reply, Other> {
        let bytes = [usr, &write_hdr(usr.len() as u16)].concat();
        self.write_request(path, id, usr.len() as u32, &bytes)?;
        self.reply(path, id, 0)
    }

    /// Ends connections.
    pub(super) fn leave(&mut self, conns: &[Conn]) {
        for conn in conns {
            // Ended already, perhaps.
            let _ = self.dev.disconnect(conn.id);
            let _ = self.dev.destroy_id(conn.id);
            let _ = self.dev.destroy_qp(conn.qp);
        }
        self.take();
        self.done.retain(|done| conns.iter().all(|conn| conn.qp != done.qpn));
        self.events.retain(|event| conns.iter().all(|conn| conn.id != event.id()));
    }
}
