//! A device and a client, both as simple as can be: orders are carried out at once, messages are
//! written straight into the server's memory, and what the server sends is kept to be looked at.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use bowline_rtrs::server::{CloseReason, OpId, Request, Server, ServerConfig, ServerEvent, SessId};
use bowline_rtrs::{
    Batch, ConnId, Done, Errno, Input, Instant, MemRef, Order, PathId, PortAttr, PortId, RecvSlot,
    RegionId, RegionKeys, RegionPorts, RequestId, Tag, Wr, WrKind,
};
use bowline_verbs::{Buffer, Status, WcOpcode};
use bowline_wire::rtrs::{
    ConAnswer, ConReq, ConRsp, Desc, Geometry, Imm, RkeyRsp, SessionName, Uuid, emit_info_req,
    parse_info_rsp, read_hdr, write_hdr,
};

pub(crate) const PORT: PortAttr = PortAttr {
    max_qp_wr: 1 << 14,
    max_sge: 8,
    fast_registration: true,
    key_refresh: true,
    burst: 0,
    mtu: 4096,
};

/// 8 chunks of 8 KiB.
pub(crate) fn config() -> ServerConfig {
    let geometry = Geometry::of_chunk(8, 8192, 4096).unwrap();
    ServerConfig { geometry, ..ServerConfig::default() }
}

pub(crate) fn uuid(n: u8) -> Uuid {
    Uuid([n; 16])
}

/// A message the server sent.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Sent {
    pub(crate) conn: ConnId,
    pub(crate) kind: WrKind,
    pub(crate) bytes: Vec<u8>,
    pub(crate) signal: bool,
    pub(crate) tag: Tag,
}

/// Client's state of a path.
#[derive(Debug, Clone)]
pub(crate) struct Path {
    pub(crate) id: PathId,
    /// Address and key of each chunk.
    pub(crate) chunks: Vec<(u64, u32)>,
    /// Keys that the client was sent, by chunk.
    pub(crate) new_rkey: bool,
    pub(crate) counted_keys: bool,
    /// Whether the server accepts its notices.
    pub(crate) accepts_notice: bool,
}

impl Path {
    /// Makes a path from the answer to a connection request.
    pub(crate) fn new(id: PathId, rsp: &ConRsp) -> Self {
        let &ConRsp { new_rkey, counted_keys, accepts_notice, .. } = rsp;
        Self { id, chunks: Vec::new(), new_rkey, counted_keys, accepts_notice }
    }

    pub(crate) fn conn(&self, cid: u16) -> ConnId {
        ConnId { path: self.id, cid }
    }

    /// A request in a chunk.
    pub(crate) fn io(&self, chunk: u16) -> Io<'_> {
        Io { path: self, cid: 1, chunk, usr: b"u", data: b"", read: None }
    }
}

/// A request of a client [RT-39]: a write without data, whose user message is "u", on connection 1,
/// but for what a test says otherwise.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Io<'a> {
    path: &'a Path,
    cid: u16,
    chunk: u16,
    usr: &'a [u8],
    data: &'a [u8],
    read: Option<Read>,
}

#[derive(Debug, Clone, Copy)]
struct Read {
    len: u32,
    to: Option<u32>,
    invalidate: bool,
}

impl<'a> Io<'a> {
    pub(crate) fn cid(self, cid: u16) -> Self {
        Self { cid, ..self }
    }

    pub(crate) fn usr(self, usr: &'a [u8]) -> Self {
        Self { usr, ..self }
    }

    pub(crate) fn data(self, data: &'a [u8]) -> Self {
        Self { data, ..self }
    }

    /// A read of `len` bytes, into no memory of the client.
    pub(crate) fn reads(self, len: u32) -> Self {
        Self { read: Some(Read { len, to: None, invalidate: false }), ..self }
    }

    /// What is read goes to `len` bytes of memory of the client.
    pub(crate) fn to(mut self, len: u32) -> Self {
        self.read.as_mut().expect("a read").to = Some(len);
        self
    }

    /// Whether the server is to invalidate the key of that memory.
    pub(crate) fn invalidate(mut self, invalidate: bool) -> Self {
        self.read.as_mut().expect("a read").invalidate = invalidate;
        self
    }
}

#[derive(Debug)]
struct Region {
    buffer: Arc<Buffer>,
    keys: Vec<u32>,
    granule: u64,
}

/// The answer to a request to connect.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Answer {
    Accepted(ConnId, ConRsp),
    Refused(u16),
}

pub(crate) struct Rig {
    pub(crate) server: Server,
    pub(crate) now: Instant,
    regions: BTreeMap<RegionId, Region>,
    /// Valid keys of the client, and invalidated ones.
    open: BTreeSet<(u8, u32)>,
    shut: BTreeSet<(u8, u32)>,
    next_index: u32,
    next_request: u32,
    /// What clients offer when they connect.
    pub(crate) counts_keys: bool,
    pub(crate) gives_notice: bool,
    pub(crate) answers: BTreeMap<RequestId, Answer>,
    /// Receives posted and not used.
    pub(crate) recvs: BTreeMap<ConnId, Vec<RecvSlot>>,
    pub(crate) sent: Vec<Sent>,
    pub(crate) events: Vec<ServerEvent>,
    pub(crate) requests: Vec<Request>,
    pub(crate) closed: Vec<ConnId>,
    pub(crate) forgotten: Vec<ConnId>,
    /// Registrations fail from now on.
    pub(crate) no_memory: bool,
    /// Queues are not drained, and disconnects not reported, until the test asks for it.
    pub(crate) hold_drain: bool,
    pub(crate) silent: bool,
    /// Requests are forged: no client answers when they are accepted.
    pub(crate) forged: bool,
    /// Signalled sends complete at once, except on cut paths.
    pub(crate) complete: bool,
    pub(crate) cut: BTreeSet<PathId>,
    /// Timeouts of the queue pairs for unacknowledged sends.
    pub(crate) give_up: BTreeMap<ConnId, Option<Duration>>,
    /// The upper layer answers at once whether it takes a session.
    pub(crate) link: Option<bool>,
    pub(crate) withdrawn: Vec<(PortId, u32)>,
    /// Keys whose invalidation fails.
    pub(crate) stuck: Vec<u32>,
}

impl Rig {
    pub(crate) fn new() -> Self {
        Self::with(config())
    }

    pub(crate) fn with(config: ServerConfig) -> Self {
        Self::on(config, &[PORT])
    }

    pub(crate) fn on(config: ServerConfig, ports: &[PortAttr]) -> Self {
        Self {
            server: Server::new(config, ports).unwrap(),
            now: Instant::from_nanos(1_000_000_000),
            regions: BTreeMap::new(),
            open: BTreeSet::new(),
            shut: BTreeSet::new(),
            next_index: 1,
            next_request: 0,
            counts_keys: false,
            gives_notice: false,
            answers: BTreeMap::new(),
            recvs: BTreeMap::new(),
            sent: Vec::new(),
            events: Vec::new(),
            requests: Vec::new(),
            closed: Vec::new(),
            forgotten: Vec::new(),
            no_memory: false,
            hold_drain: false,
            silent: false,
            forged: false,
            complete: true,
            cut: BTreeSet::new(),
            give_up: BTreeMap::new(),
            link: Some(true),
            withdrawn: Vec::new(),
            stuck: Vec::new(),
        }
    }

    pub(crate) fn geometry(&self) -> Geometry {
        self.server.config().geometry
    }

    /// Carries out the orders of the server.
    pub(crate) fn settle(&mut self) {
        loop {
            let mut busy = false;
            while let Some(order) = self.server.poll_order() {
                self.order(order);
                busy = true;
            }
            let mut batch = Batch::default();
            self.server.take_batch(&mut batch);
            if !batch.is_empty() {
                self.carry_out(&batch);
                busy = true;
            }
            while let Some(event) = self.server.poll_event() {
                if let (ServerEvent::Up { session, first: true, .. }, Some(ok)) =
                    (&event, self.link)
                {
                    self.server.answer_link(self.now, *session, ok);
                }
                self.events.push(event);
                busy = true;
            }
            self.server.check_invariants();
            if !busy {
                break;
            }
        }
        self.server.take_requests(&mut self.requests);
    }

    fn order(&mut self, order: Order) {
        match order {
            Order::AddRegion { region, buffer, granule, ports, .. } => {
                let ports = match ports {
                    RegionPorts::One(port) => port.0..port.0 + 1,
                    RegionPorts::All => 0..1,
                };
                for port in ports {
                    let granule = granule.map_or(buffer.len() as u64, u64::from);
                    let count = buffer.len() as u64 / granule;
                    let mut all = Vec::new();
                    for at in 0..count {
                        // The last byte before it wraps, to see that it does.
                        let rkey = self.next_index << 8 | 0xfe;
                        self.next_index += 1;
                        all.push(RegionKeys { addr: at * granule, lkey: 0, rkey });
                    }
                    let keys = if self.no_memory { Err(Errno::ENOMEM) } else { Ok(all) };
                    let usable: Vec<u32> = keys.iter().flatten().map(|key| key.rkey).collect();
                    self.open.extend(usable.iter().map(|key| (port, *key)));
                    let buffer = Arc::clone(&buffer);
                    self.regions.insert(region, Region { buffer, keys: usable, granule });
                    let port = PortId(port);
                    self.server.handle(self.now, Input::Region { region, port, keys });
                }
            }
            Order::DropRegion { region } => {
                self.regions.remove(&region).expect("a region that is there");
            }
            Order::Connect { .. } => panic!("a server connects to nobody"),
            Order::Accept { conn, request, private, first, shape } => {
                assert!(shape.send_wr <= PORT.max_qp_wr && shape.recv_wr > 2);
                let ConAnswer::Accepted(rsp) = ConAnswer::parse(&private).unwrap() else {
                    panic!("accepted with a refusal")
                };
                assert_eq!(rsp.geometry, self.geometry());
                self.answers.insert(request, Answer::Accepted(conn, rsp));
                self.recvs.insert(conn, first.into_iter().collect());
                self.give_up.insert(conn, shape.give_up);
                if !self.forged {
                    let input = Input::Established { conn, private: Vec::new() };
                    self.server.handle(self.now, input);
                }
            }
            Order::Reject { request, private } => {
                let ConAnswer::Refused(errno) = ConAnswer::parse(&private).unwrap() else {
                    panic!("refused with an acceptance")
                };
                assert!(self.answers.insert(request, Answer::Refused(errno)).is_none());
            }
            Order::Close { conn } => {
                self.closed.push(conn);
                if !self.hold_drain {
                    self.drain(conn);
                }
            }
            Order::Forget { conn } => {
                assert!(self.closed.contains(&conn), "forgotten without being closed");
                assert!(!self.forgotten.contains(&conn), "forgotten twice");
                self.forgotten.push(conn);
                self.server.handle(self.now, Input::Drained { conn });
            }
            Order::AddKeys { .. } | Order::DropKeys { .. } => panic!("{order:?} of a server"),
        }
    }

    /// The queues of a closed connection become empty, and the client answers.
    pub(crate) fn drain(&mut self, conn: ConnId) {
        self.recvs.remove(&conn);
        for index in 0..2 {
            let done =
                Done { tag: Tag::new(Tag::DRAIN, index), status: Status::WrFlushErr, ..done(conn) };
            self.server.handle_done(self.now, &[done]);
        }
        if !self.silent {
            self.server.handle(self.now, Input::Disconnected { conn });
        }
    }

    /// Drains all closed connections.
    pub(crate) fn drain_all(&mut self) {
        self.hold_drain = false;
        let pending: Vec<ConnId> =
            self.closed.iter().filter(|conn| self.recvs.contains_key(conn)).copied().collect();
        pending.into_iter().for_each(|conn| self.drain(conn));
        self.settle();
    }

    fn carry_out(&mut self, batch: &Batch) {
        assert!(batch.withdraw.is_empty(), "withdrawn too late");
        for (port, old, new) in &batch.renew {
            assert!(self.shut.remove(&(port.0, *old)), "{old:#x} was not withdrawn");
            assert_eq!(old >> 8, new >> 8);
            assert_ne!(old, new);
            self.open.insert((port.0, *new));
            for region in self.regions.values_mut() {
                region.keys.iter_mut().filter(|key| *key == old).for_each(|key| *key = *new);
            }
        }
        for slot in &batch.recvs {
            if let Some(posted) = self.recvs.get_mut(&slot.conn) {
                posted.push(*slot);
            }
        }
        let mut signalled = Vec::new();
        for wr in &batch.wrs {
            if self.closed.contains(&wr.conn) {
                continue;
            }
            self.keep(batch, wr);
            if wr.signal && self.complete && !self.cut.contains(&wr.conn.path) {
                signalled.push(Done { tag: wr.tag, opcode: WcOpcode::Send, ..done(wr.conn) });
            }
        }
        self.server.handle_done(self.now, &signalled);
    }

    fn keep(&mut self, batch: &Batch, wr: &Wr) {
        let mut bytes = Vec::new();
        for mem in batch.mems_of(wr) {
            let region = &self.regions[&mem.region];
            region.buffer.append_to(mem.offset as usize, mem.len as usize, &mut bytes);
        }
        let (conn, kind, signal, tag) = (wr.conn, wr.kind, wr.signal, wr.tag);
        self.sent.push(Sent { conn, kind, bytes, signal, tag });
    }

    /// Delivers completions, invalidates keys as ordered, and has the requests read.
    pub(crate) fn deliver(&mut self, dones: &[Done]) {
        self.server.handle_done(self.now, dones);
        let mut batch = Batch::default();
        self.server.take_withdraws(&mut batch);
        let mut failed = Vec::new();
        for &(port, key) in &batch.withdraw {
            self.withdrawn.push((port, key));
            if self.stuck.contains(&key) || !self.open.remove(&(port.0, key)) {
                failed.push((port, key));
            } else {
                self.shut.insert((port.0, key));
            }
        }
        self.server.process(self.now, &failed);
        self.settle();
    }

    /// A client asks for a connection; answers at once.
    pub(crate) fn ask(&mut self, from: &str, to: &str, private: &[u8]) -> Answer {
        let request = self.ask_at(PortId(0), from, to, private);
        self.settle();
        self.answers[&request]
    }

    pub(crate) fn ask_at(
        &mut self,
        port: PortId,
        from: &str,
        to: &str,
        private: &[u8],
    ) -> RequestId {
        self.next_request += 1;
        let request = RequestId(self.next_request);
        let addr = |addr: &str, port| SocketAddr::new(addr.parse::<IpAddr>().unwrap(), port);
        let (local, remote) = (addr(to, 1234), addr(from, 40_000));
        let private = private.to_vec();
        self.server
            .handle(self.now, Input::ConnectRequest { request, port, local, remote, private });
        request
    }

    /// All connections of a path, without INFO_REQ.
    pub(crate) fn connect(&mut self, session: u8, path: u8, from: &str, conns: u16) -> Path {
        let mut made = None;
        for cid in 0..conns {
            let (counts_keys, gives_notice) = (self.counts_keys, self.gives_notice);
            let req = ConReq { counts_keys, gives_notice, ..con_req(session, path, cid, conns) };
            match self.ask(from, "10.0.0.1", &req.emit()) {
                Answer::Accepted(conn, rsp) => {
                    assert_eq!(conn.cid, cid);
                    made = Some(Path::new(conn.path, &rsp));
                }
                Answer::Refused(errno) => panic!("cid {cid} refused with {errno}"),
            }
        }
        made.unwrap()
    }

    /// INFO_REQ; `None` if the path was closed instead of answered.
    pub(crate) fn info(&mut self, path: &mut Path, name: &str) -> Option<()> {
        let bytes = emit_info_req(&SessionName::new(name).unwrap());
        let done = self.message(path.conn(0), &bytes);
        self.deliver(&[done]);
        self.learn(path)
    }

    /// Reads INFO_RSP.
    pub(crate) fn learn(&mut self, path: &mut Path) -> Option<()> {
        let at = self.sent.iter().position(|sent| sent.tag.kind() == Tag::INFO)?;
        let sent = self.sent.remove(at);
        assert_eq!((sent.conn, sent.kind, sent.signal), (path.conn(0), WrKind::Send, true));
        parse_info_rsp(&sent.bytes, &self.geometry(), &mut path.chunks).unwrap();
        Some(())
    }

    /// A whole path.
    pub(crate) fn path(&mut self, session: u8, path: u8, from: &str, conns: u16) -> Path {
        let mut made = self.connect(session, path, from, conns);
        self.info(&mut made, &format!("s{session}")).expect("connected");
        made
    }

    /// A message in the first receive that was posted.
    pub(crate) fn message(&mut self, conn: ConnId, bytes: &[u8]) -> Done {
        let slot = self.recvs.get_mut(&conn).unwrap().remove(0);
        if let Some(mem) = slot.mem {
            let len = bytes.len().min(mem.len as usize);
            self.regions[&mem.region].buffer.write(mem.offset as usize, &bytes[..len]);
        }
        let len = bytes.len() as u32;
        Done { tag: slot.tag, opcode: WcOpcode::Recv, len, ..done(conn) }
    }

    /// An immediate takes a receive.
    pub(crate) fn imm(&mut self, conn: ConnId, imm: u32, len: u32) -> Done {
        let posted = self.recvs.get_mut(&conn).expect("a connection");
        assert!(!posted.is_empty(), "the client finds no receive");
        let slot = posted.remove(0);
        let opcode = WcOpcode::RecvRdmaWithImm;
        Done { tag: slot.tag, opcode, len, imm: Some(imm), ..done(conn) }
    }

    /// Writes into a chunk, as far as the client's key allows it.
    pub(crate) fn put(&mut self, path: &Path, chunk: u16, offset: u64, bytes: &[u8]) -> bool {
        let (addr, key) = path.chunks[usize::from(chunk)];
        let Some(region) = self.regions.values().find(|region| region.keys.contains(&key)) else {
            return false;
        };
        let place = region.keys.iter().position(|at| *at == key).unwrap() as u64;
        let range = place * region.granule..(place + 1) * region.granule;
        let at = addr + offset;
        let inside = range.contains(&at) && at + bytes.len() as u64 <= range.end;
        if !inside || !self.open.contains(&(0, key)) {
            return false;
        }
        region.buffer.write(at as usize, bytes);
        true
    }

    /// Writes a request into its chunk; its completion is to be delivered.
    pub(crate) fn send(&mut self, io: Io<'_>) -> Done {
        let (mut header, usr_len) = ([0; 24], io.usr.len() as u16);
        let (start, data_len, bytes) = match io.read {
            None => (0, io.data.len() as u32, [io.data, io.usr, &write_hdr(usr_len)].concat()),
            Some(Read { len, to, invalidate }) => {
                let header_len = read_hdr(usr_len, invalidate, to.map(desc), &mut header);
                (len, len, [io.usr, &header[..header_len]].concat())
            }
        };
        assert!(self.put(io.path, io.chunk, start.into(), &bytes), "the key does not allow it");
        let off = data_len + u32::from(usr_len);
        self.request(io.path, io.cid, io.chunk, off, bytes.len() as u32)
    }

    /// A request arrives.
    pub(crate) fn receive(&mut self, io: Io<'_>) {
        let done = self.send(io);
        self.deliver(&[done]);
    }

    /// A request arrives and begins, as the only one.
    pub(crate) fn begin(&mut self, io: Io<'_>) -> Request {
        self.receive(io);
        self.one()
    }

    /// A request arrives, begins and is answered.
    pub(crate) fn serve(&mut self, io: Io<'_>, errno: i32) {
        let request = self.begin(io);
        self.respond(request.op, errno, None);
    }

    /// An immediate of the protocol arrives.
    pub(crate) fn hear(&mut self, conn: ConnId, imm: Imm) {
        let done = self.imm(conn, imm.to_u32(), 0);
        self.deliver(&[done]);
    }

    /// The client ends a connection.
    pub(crate) fn disconnect(&mut self, conn: ConnId) {
        self.server.handle(self.now, Input::Disconnected { conn });
        self.settle();
    }

    /// The immediate of a request, whatever is in the chunk.
    pub(crate) fn request(
        &mut self,
        path: &Path,
        cid: u16,
        chunk: u16,
        off: u32,
        len: u32,
    ) -> Done {
        let payload = self.geometry().request_payload(chunk, off);
        self.imm(path.conn(cid), Imm::Request(payload).to_u32(), len)
    }

    pub(crate) fn respond(&mut self, op: OpId, errno: i32, from: Option<MemRef>) {
        self.server.respond(self.now, op, errno, from);
        self.settle();
    }

    /// Takes the one request there is.
    pub(crate) fn one(&mut self) -> Request {
        assert_eq!(self.requests.len(), 1, "{:?}", self.requests);
        self.requests.pop().unwrap()
    }

    /// Returns what was sent since the last call, and stores the keys in it.
    pub(crate) fn take_sent(&mut self, path: &mut Path) -> Vec<Sent> {
        let sent = std::mem::take(&mut self.sent);
        for sent in &sent {
            if let (WrKind::SendImm(_), Ok(rsp)) = (sent.kind, RkeyRsp::parse(&sent.bytes))
                && sent.conn.path == path.id
            {
                path.chunks[usize::from(rsp.id)].1 = rsp.key;
            }
        }
        sent
    }

    /// Lets time pass, in small steps.
    pub(crate) fn pass(&mut self, time: Duration) {
        let end = self.now + time;
        while let Some(next) = self.server.poll_timeout().filter(|next| *next <= end) {
            self.now = self.now.max(next);
            self.server.handle_timeout(self.now);
            self.settle();
        }
        self.now = end;
        self.server.handle_timeout(self.now);
        self.settle();
    }

    /// Returns which paths were closed since the last call, and why.
    pub(crate) fn take_closed(&mut self) -> Vec<(PathId, CloseReason)> {
        let events = std::mem::take(&mut self.events);
        let closed = events.iter().filter_map(|event| match event {
            ServerEvent::PathClosed { path, reason, .. } => Some((path.path, *reason)),
            _ => None,
        });
        let closed = closed.collect();
        self.events = events;
        self.events.retain(|event| !matches!(event, ServerEvent::PathClosed { .. }));
        closed
    }

    pub(crate) fn downs(&self) -> Vec<SessId> {
        let down = self.events.iter().filter_map(|event| match event {
            ServerEvent::Down { session } => Some(*session),
            _ => None,
        });
        down.collect()
    }

    /// Asserts that nothing is left.
    pub(crate) fn assert_empty(&self) {
        assert_eq!(self.server.sessions().count(), 0, "sessions");
        assert!(self.regions.is_empty(), "regions");
        let closed: BTreeSet<_> = self.closed.iter().collect();
        assert_eq!(closed, self.forgotten.iter().collect(), "connections");
    }
}

pub(crate) fn con_req(session: u8, path: u8, cid: u16, cid_num: u16) -> ConReq {
    let (path, session) = (uuid(path), uuid(session));
    let (counts_keys, gives_notice) = (false, false);
    ConReq { cid, cid_num, recon_cnt: 1, path, session, first: true, counts_keys, gives_notice }
}

pub(crate) fn done(conn: ConnId) -> Done {
    Done {
        conn,
        tag: Tag::default(),
        status: Status::Success,
        opcode: WcOpcode::Send,
        len: 0,
        imm: None,
        invalidated: None,
    }
}

pub(crate) fn desc(len: u32) -> Desc {
    Desc { addr: 0x7000, key: 0x1234, len }
}
