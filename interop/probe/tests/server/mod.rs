//! An RTRS and RNBD server by hand, as simple as can be, that can make mistakes.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use bowline::verbs::SoftDevice;
use bowline_probe::Part;
use bowline_verbs::{
    Access, Buffer, CmEvent, CmId, Completion, ConnParam, CqId, Device, MrKeys, PdId, QpAttr,
    QpCap, QpInit, QpState, QpType, Qpn, RecvWr, Remote, SendFlags, SendOp, SendWr, Sge, Status,
};
use bowline_wire::rnbd::{self, Io, OpenRsp, Request};
use bowline_wire::rtrs::{
    ConAnswer, ConReq, ConReqError, ConRsp, Desc, Geometry, INFO_REQ_LEN, Imm, IoError, IoHdr,
    PORT, Uuid, emit_info_rsp, parse_io,
};

const ENOENT: u16 = 2;
const EIO: u16 = 5;
const ENXIO: u16 = 6;
const EINVAL: u16 = 22;
const ECONNRESET: u16 = 104;
const ENOTCONN: u16 = 107;

const DEPTH: u16 = 8;
const CHUNK: u32 = 16_384;
const DEVICE: u32 = 7;
const SECTORS: u64 = 2048;
/// Offsets of the chunks, of INFO_REQs and of what is sent.
const CHUNKS: usize = 0;
const INFOS: usize = 256 << 10;
const SENT: usize = 512 << 10;
const MEMORY: usize = 1 << 20;

/// A mistake that the server makes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mistake {
    None,
    AnyMagic,
    AnyMajor,
    OneMinor,
    OneReserved,
    AnyCount,
    AnyCid,
    AnySession,
    Twice,
    FewChunks,
    AnyName,
    EarlyInfo,
    ShortInfo,
    NoHeartbeat,
    EndsAtUnassigned,
    AnyMessage,
    AnyHeader,
    EndsAtLongMessage,
    AnyVersion,
    OneVersion,
    AnyType,
    AnyDisk,
    Dots,
    NoClose,
    AnyDevice,
    NoSectors,
    NewDevice,
    NoData,
    NoEnd,
    AnyMode,
}

/// Every mistake, and the rule that it breaks.
pub(crate) const MISTAKES: [(Mistake, Part, &str); 29] = [
    (Mistake::AnyMagic, Part::Connections, "RT-28-magic"),
    (Mistake::AnyMajor, Part::Connections, "RT-28-major"),
    (Mistake::OneMinor, Part::Connections, "RT-28-minor"),
    (Mistake::OneReserved, Part::Connections, "RT-28-reserved"),
    (Mistake::AnyCount, Part::Connections, "RT-28-count"),
    (Mistake::AnyCid, Part::Connections, "RT-28-cid"),
    (Mistake::AnySession, Part::Connections, "RT-28-first"),
    (Mistake::Twice, Part::Connections, "RT-28-twice"),
    (Mistake::FewChunks, Part::Paths, "RT-9"),
    (Mistake::AnyName, Part::Paths, "RT-20-name"),
    (Mistake::EarlyInfo, Part::Paths, "RT-20-early"),
    (Mistake::ShortInfo, Part::Paths, "RT-6"),
    (Mistake::NoHeartbeat, Part::Paths, "RT-62"),
    (Mistake::EndsAtUnassigned, Part::Paths, "RT-14"),
    (Mistake::AnyMessage, Part::Paths, "RT-46"),
    (Mistake::AnyHeader, Part::Paths, "RT-44-type"),
    (Mistake::EndsAtLongMessage, Part::Paths, "RT-45"),
    (Mistake::AnyVersion, Part::Disks, "NB-14-9"),
    (Mistake::OneVersion, Part::Disks, "NB-14-1"),
    (Mistake::AnyType, Part::Disks, "NB-22"),
    (Mistake::AnyDisk, Part::Disks, "NB-17-missing"),
    (Mistake::Dots, Part::Disks, "NB-17-dots"),
    (Mistake::NoClose, Part::Disks, "NB-20"),
    (Mistake::AnyDevice, Part::Disks, "NB-23-device"),
    (Mistake::NoSectors, Part::Disks, "NB-9"),
    (Mistake::NewDevice, Part::Disks, "NB-17-again"),
    (Mistake::NoData, Part::Disks, "NB-23-read"),
    (Mistake::NoEnd, Part::Disks, "NB-24"),
    (Mistake::AnyMode, Part::Disks, "NB-19"),
];

#[derive(Clone, Copy)]
struct Conn {
    qp: Qpn,
    id: CmId,
    path: Uuid,
    session: Uuid,
    cid: u16,
    cid_num: u16,
    is_up: bool,
}

pub(crate) struct Server {
    dev: Arc<SoftDevice>,
    mistake: Mistake,
    pd: PdId,
    cq: CqId,
    memory: Arc<Buffer>,
    keys: MrKeys,
    conns: Vec<Conn>,
    /// Receives that are not processed yet.
    done: VecDeque<Completion>,
    next_device: u32,
}

impl Server {
    pub(crate) fn new(dev: Arc<SoftDevice>, mistake: Mistake) -> Self {
        let at = dev.attr().addrs[0];
        dev.listen((at, PORT).into()).expect("its port");
        let pd = dev.alloc_pd().expect("a domain");
        let cq = dev.create_cq(4096).expect("a queue");
        let memory = Arc::new(Buffer::new(MEMORY).expect("memory"));
        let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
        let keys = dev.reg_mr(pd, &memory, 0, MEMORY, Some(0), access).expect("keys");
        Self {
            dev,
            mistake,
            pd,
            cq,
            memory,
            keys,
            conns: Vec::new(),
            done: VecDeque::new(),
            next_device: DEVICE,
        }
    }

    fn is(&self, mistake: Mistake) -> bool {
        self.mistake == mistake
    }

    pub(crate) fn serve(&mut self, stop: &AtomicBool) {
        while !stop.load(Relaxed) {
            while let Ok(event) = self.dev.cm_event(Duration::ZERO) {
                match event {
                    CmEvent::ConnectRequest { id, request } => {
                        self.asked(id, &request.private_data);
                    }
                    CmEvent::Disconnected { id } => self.conns.retain(|conn| conn.id != id),
                    _ => {}
                }
            }
            self.poll();
            while let Some(done) = self.done.pop_front() {
                if done.status == Status::Success {
                    self.received(&done);
                }
            }
            // Nobody comes, or somebody does.
            let _ = self.dev.wait_cq(self.cq, false, Some(Duration::from_millis(1)));
        }
    }

    fn asked(&mut self, id: CmId, private: &[u8]) {
        match self.judge(private) {
            Err(errno) => {
                self.dev.reject(id, &ConAnswer::Refused(errno).emit()).expect("it asked");
            }
            Ok(req) => {
                let qp = self.queue_pair();
                let geometry = Geometry::new(DEPTH, CHUNK - 4096, 4096).expect("it fits");
                let rsp = ConRsp {
                    geometry,
                    new_rkey: false,
                    counted_keys: false,
                    accepts_notice: false,
                };
                let ConReq { cid, cid_num, path, session, .. } = req;
                let conn = Conn { qp, id, path, session, cid, cid_num, is_up: false };
                if cid == 0 {
                    let slot = INFOS + self.conns.len() % 64 * 512;
                    self.post_recv(conn, slot, INFO_REQ_LEN);
                }
                let param = ConnParam {
                    qpn: qp,
                    private_data: ConAnswer::Accepted(rsp).emit().to_vec(),
                    responder_resources: 0,
                    initiator_depth: 0,
                    ..ConnParam::default()
                };
                self.dev.accept(id, &param).expect("it asked");
                self.conns.push(conn);
            }
        }
    }

    /// Reads a request to connect, or finds the errno with which it is refused.
    fn judge(&self, private: &[u8]) -> Result<ConReq, u16> {
        let mut bytes = private[..56].to_vec();
        if self.is(Mistake::OneMinor) && bytes[4] != 0
            || self.is(Mistake::OneReserved) && (bytes[44] > 1 || bytes[46] != 0)
        {
            return Err(ECONNRESET);
        }
        if self.is(Mistake::AnyMagic) {
            bytes[2..4].copy_from_slice(&[0xbd, 0x1b]);
        }
        if self.is(Mistake::AnyMajor) {
            bytes[5] = 2;
        }
        let req = match ConReq::parse(&bytes) {
            Ok(req) => req,
            Err(ConReqError::Connections(_)) if self.is(Mistake::AnyCount) => {
                bytes[8..10].copy_from_slice(&[2, 0]);
                ConReq::parse(&bytes).map_err(|_| ECONNRESET)?
            }
            Err(ConReqError::Cid { .. }) if self.is(Mistake::AnyCid) => {
                bytes[6] = 1;
                ConReq::parse(&bytes).map_err(|_| ECONNRESET)?
            }
            Err(_) => return Err(ECONNRESET),
        };
        let is_known = self.conns.iter().any(|conn| conn.session == req.session);
        if !is_known && !req.first && !self.is(Mistake::AnySession) {
            return Err(ENXIO);
        }
        let is_there = |conn: &Conn| conn.path == req.path && conn.cid == req.cid;
        if self.conns.iter().any(is_there) && !self.is(Mistake::Twice) {
            return Err(ECONNRESET);
        }
        Ok(req)
    }

    fn queue_pair(&self) -> Qpn {
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
        let qp = self.dev.create_qp(&init).expect("a queue pair");
        let access = Some(Access::LOCAL_WRITE | Access::REMOTE_WRITE);
        let attr = QpAttr { state: Some(QpState::Init), access, ..QpAttr::default() };
        self.dev.modify_qp(qp, &attr).expect("a queue pair");
        qp
    }

    fn post_recv(&self, conn: Conn, at: usize, len: usize) {
        let sges = [Sge { addr: at as u64, len: len as u32, lkey: self.keys.lkey }];
        let sges = if len == 0 { &sges[..0] } else { &sges[..] };
        self.dev.post_recv(conn.qp, &[RecvWr { id: at as u64, sges }]).expect("a receive");
    }

    /// Takes completions; returns whether one of them is of a send.
    fn poll(&mut self) -> bool {
        let mut out = Vec::new();
        self.dev.poll_cq(self.cq, &mut out, 64).expect("completions");
        let count = out.len();
        out.retain(Completion::is_recv);
        let is_sent = out.len() < count;
        self.done.extend(out);
        is_sent
    }

    fn send(&mut self, conn: Conn, op: SendOp, bytes: &[u8]) {
        self.memory.write(SENT, bytes);
        let sges = [Sge { addr: SENT as u64, len: bytes.len() as u32, lkey: self.keys.lkey }];
        let sges = if bytes.is_empty() { &sges[..0] } else { &sges[..] };
        let wr = SendWr { id: 0, op, sges, inline: &[], flags: SendFlags::SIGNALED };
        // What is sent stays where it is until it has gone, or the queue pair is flushed.
        if self.dev.post_send(conn.qp, &[wr]).is_ok() {
            while !self.poll() {
                let _ = self.dev.wait_cq(self.cq, false, Some(Duration::from_millis(1)));
            }
        }
    }

    /// Ends the path of a connection.
    fn end(&mut self, conn: Conn) {
        for other in self.conns.iter().filter(|other| other.path == conn.path) {
            // Ended already, perhaps.
            let _ = self.dev.disconnect(other.id);
        }
        self.conns.retain(|other| other.path != conn.path);
    }

    fn received(&mut self, done: &Completion) {
        let Some(conn) = self.conns.iter().find(|conn| conn.qp == done.qpn).copied() else {
            return;
        };
        if !conn.is_up {
            return self.info(conn, done);
        }
        self.post_recv(conn, 0, 0);
        match done.imm.map(Imm::from_u32) {
            Some(Imm::HbMsg) if !self.is(Mistake::NoHeartbeat) => {
                self.send(conn, SendOp::WriteImm(Remote::default(), Imm::HbAck.to_u32()), &[]);
            }
            Some(Imm::Unknown(_)) if self.is(Mistake::EndsAtUnassigned) => self.end(conn),
            Some(Imm::Request(payload)) => self.request(conn, payload),
            _ => {}
        }
    }

    fn info(&mut self, conn: Conn, done: &Completion) {
        let mut bytes = vec![0; INFO_REQ_LEN];
        self.memory.read(done.wr_id as usize, &mut bytes);
        let is_short = (done.byte_len as usize) < INFO_REQ_LEN && !self.is(Mistake::ShortInfo);
        let name = bytes[2..].split(|byte| *byte == 0).next().unwrap_or_default();
        let is_bad = name.contains(&b'/') && !self.is(Mistake::AnyName);
        let made = self.conns.iter().filter(|other| other.path == conn.path).count();
        let is_early = made < usize::from(conn.cid_num) && !self.is(Mistake::EarlyInfo);
        if is_short || is_bad || is_early {
            return self.end(conn);
        }
        let conns: Vec<Conn> =
            self.conns.iter().filter(|other| other.path == conn.path).copied().collect();
        for other in &conns {
            (0..64).for_each(|_| self.post_recv(*other, 0, 0));
        }
        for other in &mut self.conns {
            other.is_up |= other.path == conn.path;
        }
        let count = if self.is(Mistake::FewChunks) { DEPTH / 2 } else { DEPTH };
        let chunk = |n: u16| Desc {
            addr: CHUNKS as u64 + u64::from(n) * u64::from(CHUNK),
            key: self.keys.rkey,
            len: CHUNK,
        };
        let mut bytes = Vec::new();
        emit_info_rsp((0..count).map(chunk), &mut bytes);
        self.send(conn, SendOp::Send, &bytes);
    }

    fn request(&mut self, conn: Conn, payload: u32) {
        let geometry = Geometry::new(DEPTH, CHUNK - 4096, 4096).expect("it fits");
        let Some((id, off)) = geometry.split(payload) else { return self.end(conn) };
        let start = CHUNKS + usize::from(id) * CHUNK as usize;
        let mut tail = [0; 24];
        self.memory.read(start + off as usize, &mut tail);
        let io = match parse_io(&geometry, off, &tail) {
            Ok(io) => io,
            Err(IoError::UsrLen(_)) if !self.is(Mistake::EndsAtLongMessage) => return,
            Err(_) if self.is(Mistake::AnyHeader) => return,
            Err(_) => return self.end(conn),
        };
        let mut usr = vec![0; io.usr_len.into()];
        self.memory.read(start + io.usr_at as usize, &mut usr);
        let (errno, data) = self.answer(&usr);
        if let IoHdr::Read { desc: Some(desc), .. } = io.hdr
            && errno == 0
            && !data.is_empty()
        {
            let remote = Remote { addr: desc.addr, rkey: desc.key };
            self.send(conn, SendOp::Write(remote), &data);
        }
        let done = Imm::Done { id: id.into(), errno, invalidated: false };
        self.send(conn, SendOp::WriteImm(Remote::default(), done.to_u32()), &[]);
    }

    /// The errno and the data of an answer.
    fn answer(&mut self, usr: &[u8]) -> (u16, Vec<u8>) {
        let nothing = Vec::new();
        match rnbd::parse(usr) {
            Ok(Request::SessInfo { ver }) => {
                let version = match self.mistake {
                    Mistake::AnyVersion => ver,
                    Mistake::OneVersion => 2,
                    _ => ver.min(2),
                };
                (0, rnbd::emit_sess_info_rsp(version).to_vec())
            }
            Ok(Request::Open { access, name }) => {
                if name.windows(2).any(|pair| pair == b"..") && !self.is(Mistake::Dots) {
                    return (EINVAL, nothing);
                }
                if name != b"disk0" && !self.is(Mistake::AnyDisk) && !self.is(Mistake::Dots) {
                    return (ENOENT, nothing);
                }
                if access > 2 && !self.is(Mistake::AnyMode) {
                    return (EINVAL, nothing);
                }
                self.next_device += u32::from(self.is(Mistake::NewDevice));
                let rsp = OpenRsp {
                    device_id: self.next_device,
                    nsectors: if self.is(Mistake::NoSectors) { 0 } else { SECTORS },
                    logical_block_size: 512,
                    ..OpenRsp::default()
                };
                (0, rsp.emit().to_vec())
            }
            Ok(Request::Close { .. }) => {
                (if self.is(Mistake::NoClose) { ENOENT } else { 0 }, nothing)
            }
            Ok(Request::Io(Io { device, sector, len, .. })) => {
                if device != DEVICE && !self.is(Mistake::AnyDevice) {
                    return (ENOTCONN, nothing);
                }
                let end = sector + u64::from(len / 512);
                if end > SECTORS && !self.is(Mistake::NoEnd) {
                    return (EIO, nothing);
                }
                (0, if self.is(Mistake::NoData) { nothing } else { vec![0x33; len as usize] })
            }
            Err(_) if self.is(Mistake::AnyMessage) || self.is(Mistake::AnyType) => (0, nothing),
            Err(_) => (EINVAL, nothing),
        }
    }
}
