//! A client session on a simulated device with a simulated server, in one thread and virtual time.

use std::collections::{BTreeMap, VecDeque};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bowline_rtrs::client::{
    ClientConfig, Completed, Event, PathAddr, PathState, Permit, PermitKind, Session,
};
use bowline_rtrs::{
    Batch, ConnId, Done, Errno, Input, Instant, MemRef, Order, PathId, PortAttr, PortId, RecvSlot,
    RegionId, RegionKeys, Tag, Wr, WrKind,
};
use bowline_verbs::{Access, Buffer, Status, WcOpcode, next_key};
use bowline_wire::rtrs::{
    ConAnswer, ConReq, ConRsp, Desc, Dir, Geometry, Imm, IoHdr, IoReq, PathLife, RkeyRsp,
    SessionName, Uuid, emit_info_rsp, parse_info_req, parse_io,
};

/// What the server does with a connect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Connects {
    Accept,
    Refuse(u16),
    Fail(Errno),
    /// No answer.
    Ignore,
    /// Accepts the first connections of a path, up to this one, then answers nothing.
    Until(u16),
}

#[derive(Debug)]
pub(crate) struct Conn {
    pub(crate) req: ConReq,
    pub(crate) local: SocketAddr,
    pub(crate) remote: SocketAddr,
    pub(crate) retry_count: u8,
    pub(crate) recvs: VecDeque<RecvSlot>,
    pub(crate) established: bool,
    pub(crate) closed: bool,
    /// Its queues are drained.
    pub(crate) drained: bool,
}

/// An IO message that the server has received.
#[derive(Clone, Debug)]
pub(crate) struct Io {
    pub(crate) conn: ConnId,
    pub(crate) id: u16,
    pub(crate) addr: u64,
    pub(crate) key: u32,
    pub(crate) bytes: Vec<u8>,
    pub(crate) req: IoReq,
}

impl Io {
    /// The user message.
    pub(crate) fn usr(&self) -> &[u8] {
        let at = match self.req.hdr {
            IoHdr::Write { .. } => self.req.usr_at as usize,
            IoHdr::Read { .. } => 0,
        };
        &self.bytes[at..at + usize::from(self.req.usr_len)]
    }
}

/// What a request was submitted with.
#[derive(Debug)]
pub(crate) struct Written {
    pub(crate) permit: Permit,
    pub(crate) memory: RegionId,
}

pub(crate) struct Rig {
    pub(crate) session: Session,
    pub(crate) now: Instant,
    pub(crate) connects: Connects,
    /// The server answers INFO_REQ.
    pub(crate) answers_info: bool,
    /// The server answers disconnects.
    pub(crate) parts: bool,
    /// Queues are drained at once.
    pub(crate) drains: bool,
    pub(crate) refresh: bool,
    /// The server does not send keys to clients that count them.
    pub(crate) counted: bool,
    /// The server accepts notices.
    pub(crate) accepts_notice: bool,
    pub(crate) geometry: Geometry,
    pub(crate) buffers: BTreeMap<RegionId, Arc<Buffer>>,
    pub(crate) conns: BTreeMap<ConnId, Conn>,
    /// Connections that were forgotten.
    pub(crate) forgotten: Vec<ConnId>,
    /// Where the request in each chunk was sent last, until its end.
    sent_on: BTreeMap<u16, ConnId>,
    /// Current key of each chunk of each link.
    pub(crate) keys: BTreeMap<(PathId, u16), u32>,
    pub(crate) ios: Vec<Io>,
    /// Data that was written ahead of its header: address in the memory of all chunks, and bytes.
    pub(crate) early: Vec<(u64, Vec<u8>)>,
    /// Keys made for single requests, of each link.
    pub(crate) made: BTreeMap<PathId, Vec<u32>>,
    /// Memory that the server may access by such a key, and the permit the key was made for.
    pub(crate) granted: BTreeMap<(PathId, u32), (u16, Vec<MemRef>)>,
    /// Keys cannot be made.
    pub(crate) no_keys: bool,
    /// Keys that are made when the test says so.
    pub(crate) keys_wait: Vec<(PathId, u16)>,
    pub(crate) keys_late: bool,
    /// The server invalidates keys as requested.
    pub(crate) invalidates: bool,
    /// Heartbeats and their answers that the server received.
    pub(crate) beats: Vec<(ConnId, Imm)>,
    /// Notices that the server received, and the number of IO messages before each.
    pub(crate) notices: Vec<(ConnId, PathLife, usize)>,
    /// INFO_REQs that the server received.
    pub(crate) info_reqs: Vec<(ConnId, Vec<u8>)>,
    pub(crate) events: Vec<Event>,
    pub(crate) completed: Vec<Completed>,
    pub(crate) signalled: usize,
    /// Number of empty writes, whose completion shows that earlier sends have completed.
    pub(crate) fences: usize,
    /// Signalled sends complete at once.
    pub(crate) sends_complete: bool,
    /// Signalled sends that have not completed.
    pub(crate) unsent: Vec<Done>,
}

pub(crate) const ATTR: PortAttr = PortAttr {
    max_qp_wr: 16_384,
    max_sge: 8,
    fast_registration: true,
    key_refresh: true,
    burst: 0,
    mtu: 4096,
};
pub(crate) const CHUNK: u32 = 131_072;

pub(crate) fn addr(n: u8) -> (PathAddr, Uuid) {
    let src = SocketAddr::from(([10, 0, n, 1], 40_000 + u16::from(n)));
    let dst = SocketAddr::from(([10, 0, n, 2], 0));
    (PathAddr { port: PortId(0), src, dst }, Uuid([n; 16]))
}

pub(crate) fn config() -> ClientConfig {
    ClientConfig::new(SessionName::new("s1").unwrap(), 7)
}

impl Rig {
    pub(crate) fn new(config: ClientConfig, refresh: bool) -> Self {
        Self::of_device(config, refresh, ATTR, 0x77)
    }

    pub(crate) fn of_device(config: ClientConfig, refresh: bool, attr: PortAttr, uuid: u8) -> Self {
        Self {
            session: Session::new(config, &[attr], Uuid([uuid; 16])),
            now: Instant::from_nanos(1),
            connects: Connects::Accept,
            answers_info: true,
            parts: true,
            drains: true,
            refresh,
            counted: false,
            accepts_notice: false,
            geometry: Geometry::of_chunk(64, CHUNK, 4096).unwrap(),
            buffers: BTreeMap::new(),
            conns: BTreeMap::new(),
            forgotten: Vec::new(),
            sent_on: BTreeMap::new(),
            keys: BTreeMap::new(),
            ios: Vec::new(),
            early: Vec::new(),
            made: BTreeMap::new(),
            granted: BTreeMap::new(),
            no_keys: false,
            keys_wait: Vec::new(),
            keys_late: false,
            invalidates: true,
            beats: Vec::new(),
            notices: Vec::new(),
            info_reqs: Vec::new(),
            events: Vec::new(),
            completed: Vec::new(),
            signalled: 0,
            fences: 0,
            sends_complete: true,
            unsent: Vec::new(),
        }
    }

    /// Makes an open session of `paths` paths.
    pub(crate) fn opened(refresh: bool, paths: u8) -> Self {
        Self::opened_with(config(), refresh, paths)
    }

    pub(crate) fn opened_with(config: ClientConfig, refresh: bool, paths: u8) -> Self {
        let mut rig = Self::new(config, refresh);
        assert_eq!(rig.open(paths), Ok(()));
        rig
    }

    /// Opens the session with so many paths.
    pub(crate) fn open(&mut self, paths: u8) -> Result<(), Errno> {
        let paths: Vec<_> = (1..=paths).map(addr).collect();
        self.session.open(self.now, &paths);
        self.pump();
        let opened = self.take_events().into_iter().find_map(|event| match event {
            Event::Opened(result) => Some(result),
            _ => None,
        });
        opened.expect("it was opened or not")
    }

    /// Carries out all orders.
    pub(crate) fn pump(&mut self) {
        let mut batch = Batch::default();
        loop {
            let mut busy = false;
            while let Some(order) = self.session.poll_order() {
                busy = true;
                self.carry_out(order);
            }
            self.session.take_batch(&mut batch);
            busy |= !batch.is_empty();
            self.carry_out_batch(&mut batch);
            self.session.check_invariants();
            self.session.take_completed(&mut self.completed);
            while let Some(event) = self.session.poll_event() {
                self.events.push(event);
            }
            if !busy {
                return;
            }
        }
    }

    fn carry_out(&mut self, order: Order) {
        match order {
            Order::AddRegion { region, buffer, granule, .. } => {
                assert_eq!(granule, None);
                assert!(self.buffers.insert(region, buffer).is_none(), "{region:?} twice");
                let keys = RegionKeys { addr: 0, lkey: region.0 + 1, rkey: (region.0 + 1) << 8 };
                let input = Input::Region { region, port: PortId(0), keys: Ok(vec![keys]) };
                self.session.handle(self.now, input);
            }
            Order::DropRegion { region } => {
                assert!(self.buffers.remove(&region).is_some(), "{region:?} is not there");
            }
            Order::Connect { conn, local, remote, private, retry_count, .. } => {
                self.connect(conn, local, remote, &private, retry_count);
            }
            Order::Close { conn } => self.close(conn),
            Order::Forget { conn } => {
                assert!(self.conns.remove(&conn).is_some(), "{conn:?} is not there");
                self.forgotten.push(conn);
                self.session.handle(self.now, Input::Drained { conn });
            }
            Order::AddKeys { path, count, .. } if self.keys_late => {
                self.keys_wait.push((path, count));
            }
            Order::AddKeys { path, count, .. } => self.make_keys(path, count),
            Order::DropKeys { path } => {
                self.keys_wait.retain(|(waiting, _)| *waiting != path);
                self.made.remove(&path);
                self.granted.retain(|(of, _), _| *of != path);
            }
            Order::Accept { .. } | Order::Reject { .. } => panic!("{order:?} of a client"),
        }
    }

    /// Makes keys for single requests, or not.
    pub(crate) fn make_keys(&mut self, path: PathId, count: u16) {
        let mut keys = Err(Errno::ENOMEM);
        if !self.no_keys {
            // Just before the low byte wraps, so that tests pass the wrap.
            let all: Vec<u32> = (1..=u32::from(count)).map(|n| n << 16 | 0xfe).collect();
            assert!(self.made.insert(path, all.clone()).is_none(), "keys of {path:?} twice");
            keys = Ok(all);
        }
        self.session.handle(self.now, Input::Keys { path, keys });
    }

    fn connect(
        &mut self,
        conn: ConnId,
        local: SocketAddr,
        remote: SocketAddr,
        private: &[u8],
        retry_count: u8,
    ) {
        let req = ConReq::parse(private).unwrap();
        let new = Conn {
            req,
            local,
            remote,
            retry_count,
            recvs: VecDeque::new(),
            established: false,
            closed: false,
            drained: false,
        };
        assert!(self.conns.insert(conn, new).is_none(), "{conn:?} twice");
        let input = match self.connects {
            Connects::Until(cid) if conn.cid > cid => return,
            Connects::Accept | Connects::Until(_) => {
                self.conns.get_mut(&conn).unwrap().established = true;
                let (geometry, counted_keys) = (self.geometry, self.counted);
                let new_rkey = self.refresh && !counted_keys;
                let accepts_notice = self.accepts_notice;
                let rsp = ConRsp { geometry, new_rkey, counted_keys, accepts_notice };
                let private = ConAnswer::Accepted(rsp).emit().to_vec();
                Input::Established { conn, private }
            }
            Connects::Refuse(errno) => {
                let private = ConAnswer::Refused(errno).emit().to_vec();
                Input::Refused { conn, reason: bowline_verbs::RejectReason::CONSUMER, private }
            }
            Connects::Fail(errno) => Input::Failed { conn, errno },
            Connects::Ignore => return,
        };
        self.session.handle(self.now, input);
    }

    fn close(&mut self, conn: ConnId) {
        let of = self.conns.get_mut(&conn).unwrap();
        assert!(!of.closed, "{conn:?} closed twice");
        of.closed = true;
        if self.drains {
            self.drain(conn);
        }
        if self.parts && self.conns[&conn].established {
            self.session.handle(self.now, Input::Disconnected { conn });
        }
    }

    /// Drains the queues of a closed connection. A forgotten connection may report that late.
    pub(crate) fn drain(&mut self, conn: ConnId) {
        if let Some(of) = self.conns.get_mut(&conn) {
            of.drained = true;
        }
        for index in 0..2 {
            let done = done(conn, Tag::new(Tag::DRAIN, index), WcOpcode::Send);
            let done = Done { status: Status::WrFlushErr, ..done };
            self.session.handle_done(self.now, &[done]);
        }
    }

    fn carry_out_batch(&mut self, batch: &mut Batch) {
        assert!(batch.withdraw.is_empty() && batch.renew.is_empty());
        for recv in &batch.recvs {
            let conn = self.conns.get_mut(&recv.conn).expect("a receive on nothing");
            assert!(conn.established && !conn.closed);
            conn.recvs.push_back(*recv);
        }
        let mut sent = Vec::new();
        for wr in &batch.wrs {
            let mut bytes = Vec::new();
            if let WrKind::Register(key) = wr.kind {
                let names = self.made[&wr.conn.path].iter().map(|key| key >> 8);
                assert!(names.into_iter().any(|name| name == key >> 8), "{key:#x} is no key");
                let what = (wr.tag.index() as u16, batch.mems_of(wr).to_vec());
                let old = self.granted.insert((wr.conn.path, key), what);
                assert_eq!(old, None, "{key:#x} twice");
                continue;
            }
            for mem in batch.mems_of(wr) {
                let buffer = &self.buffers[&mem.region];
                buffer.append_to(mem.offset as usize, mem.len as usize, &mut bytes);
            }
            sent.push((*wr, bytes));
        }
        batch.clear();
        for (wr, bytes) in sent {
            self.take_sent(&wr, bytes);
        }
    }

    fn take_sent(&mut self, wr: &Wr, bytes: Vec<u8>) {
        let conn = &self.conns[&wr.conn];
        assert!(conn.established && !conn.closed, "{wr:?} on a connection that is closed");
        if let WrKind::Invalidate(key) = wr.kind {
            assert!(wr.signal, "who would wait for its end");
            assert!(self.granted.remove(&(wr.conn.path, key)).is_some(), "{key:#x} is not valid");
        }
        if wr.signal {
            self.signalled += 1;
            let one = done(wr.conn, wr.tag, WcOpcode::RdmaWrite);
            if self.sends_complete {
                self.session.handle_done(self.now, &[one]);
            } else {
                self.unsent.push(one);
            }
        }
        match wr.kind {
            WrKind::Send => {
                assert_eq!(parse_info_req(&bytes).unwrap().as_str(), "s1");
                self.info_reqs.push((wr.conn, bytes));
                if self.answers_info {
                    let rsp = self.info_rsp(wr.conn.path);
                    self.give_message(wr.conn, &rsp, None);
                }
            }
            WrKind::Write(_) if wr.tag.kind() == Tag::FENCE => {
                assert!(wr.signal && bytes.is_empty(), "{wr:?}");
                self.fences += 1;
            }
            WrKind::Write(remote) => {
                assert!(!wr.signal, "a completion for half a request");
                let id = ((remote.addr - 0x10_0000) / u64::from(CHUNK)) as u16;
                assert_eq!(remote.rkey, self.keys[&(wr.conn.path, id)], "key of chunk {id}");
                self.early.push((remote.addr - 0x10_0000, bytes));
            }
            WrKind::WriteImm(remote, imm) => match Imm::from_u32(imm) {
                Imm::Request(payload) => {
                    let (id, off) = self.geometry.split(payload).unwrap();
                    assert_eq!(remote.rkey, self.keys[&(wr.conn.path, id)], "key of chunk {id}");
                    // [RS-9], [RT-100]: earlier copies of the request can have no effect any more.
                    let former = self.sent_on.insert(id, wr.conn);
                    let former = former.and_then(|conn| self.conns.get(&conn));
                    assert!(former.is_none_or(|conn| conn.drained), "chunk {id} is sent twice");
                    // Offset of the bytes in the chunk [RT-38], [RT-39].
                    let base = 0x10_0000 + u64::from(id) * u64::from(CHUNK);
                    let mut chunk = vec![0; (remote.addr - base) as usize];
                    chunk.extend_from_slice(&bytes);
                    let req = parse_io(&self.geometry, off, &chunk[off as usize..]).unwrap();
                    self.ios.push(Io {
                        conn: wr.conn,
                        id,
                        addr: remote.addr - base,
                        key: remote.rkey,
                        bytes,
                        req,
                    });
                }
                Imm::GivenUp(generation) => {
                    self.notices.push((wr.conn, generation, self.ios.len()));
                }
                beat => self.beats.push((wr.conn, beat)),
            },
            WrKind::Invalidate(_) => {}
            other => panic!("{other:?} of a client"),
        }
    }

    /// INFO_RSP with one descriptor for each chunk, or one for all.
    pub(crate) fn info_rsp(&mut self, link: PathId) -> Vec<u8> {
        let depth = self.geometry.queue_depth();
        let mut out = Vec::new();
        for id in 0..depth {
            let key = if self.refresh { 0x300 + (u32::from(id) << 8) } else { 0x300 };
            self.keys.insert((link, id), key);
        }
        let one = |id: u16, count: u32| Desc {
            addr: 0x10_0000 + u64::from(id) * u64::from(CHUNK),
            key: if self.refresh { 0x300 + (u32::from(id) << 8) } else { 0x300 },
            len: CHUNK * count,
        };
        if self.refresh {
            emit_info_rsp((0..depth).map(|id| one(id, 1)), &mut out);
        } else {
            emit_info_rsp(std::iter::once(one(0, u32::from(depth))), &mut out);
        }
        out
    }

    /// Delivers a message of the server.
    pub(crate) fn give_message(&mut self, conn: ConnId, bytes: &[u8], imm: Option<u32>) {
        let of = self.conns.get_mut(&conn).unwrap();
        let slot = of.recvs.pop_front().expect("no receive is posted");
        if let Some(Imm::Done { id, .. }) = imm.map(Imm::from_u32) {
            self.sent_on.remove(&(id as u16));
        }
        let mem = slot.mem.expect("a receive without memory");
        assert!(bytes.len() <= mem.len as usize);
        self.buffers[&mem.region].write(mem.offset as usize, bytes);
        let one = Done { len: bytes.len() as u32, imm, ..done(conn, slot.tag, WcOpcode::Recv) };
        self.session.handle_done(self.now, &[one]);
    }

    /// Delivers an immediate of the server, by a write of zero bytes.
    pub(crate) fn give_imm(&mut self, conn: ConnId, imm: Imm) {
        // A false answer counts too: the client takes it for one, or the path ends.
        if let Imm::Done { id, .. } = imm {
            self.sent_on.remove(&(id as u16));
        }
        if let (true, Imm::Done { id, .. }) = (self.counted, imm)
            && let Some(key) = self.keys.get_mut(&(conn.path, id as u16))
        {
            *key = next_key(*key);
        }
        let of = self.conns.get_mut(&conn).unwrap();
        let slot = of.recvs.pop_front().expect("no receive is posted");
        let one =
            Done { imm: Some(imm.to_u32()), ..done(conn, slot.tag, WcOpcode::RecvRdmaWithImm) };
        self.session.handle_done(self.now, &[one]);
    }

    /// The same for a connection where the order of receives does not matter.
    pub(crate) fn give_imm_anyhow(&mut self, conn: ConnId, imm: Imm) {
        let info = |slot: &RecvSlot| slot.mem.is_some_and(|mem| mem.len > 8);
        if !self.conns[&conn].recvs.front().is_none_or(info) {
            self.give_imm(conn, imm);
        }
    }

    /// The server invalidates a key of the client.
    pub(crate) fn give_inval(&mut self, conn: ConnId, key: u32) {
        self.granted.remove(&(conn.path, key));
        let of = self.conns.get_mut(&conn).unwrap();
        let slot = of.recvs.pop_front().expect("no receive is posted");
        let one = Done { invalidated: Some(key), ..done(conn, slot.tag, WcOpcode::Recv) };
        self.session.handle_done(self.now, &[one]);
    }

    /// The server answers an IO.
    pub(crate) fn reply(&mut self, io: &Io, errno: u16) {
        let key = match io.req.hdr {
            IoHdr::Read { need_inval: true, desc: Some(desc), .. } => Some(desc.key),
            _ => None,
        };
        let key = key.filter(|_| self.invalidates);
        if let Some(key) = key {
            self.give_inval(io.conn, key);
        }
        let imm = Imm::Done { id: u32::from(io.id), errno, invalidated: key.is_some() };
        if self.refresh && !self.counted {
            let key = self.keys.get_mut(&(io.conn.path, io.id)).unwrap();
            *key = next_key(*key);
            let rsp = RkeyRsp { id: io.id, key: *key }.emit();
            self.give_message(io.conn, &rsp, Some(imm.to_u32()));
        } else {
            self.give_imm(io.conn, imm);
        }
    }

    /// Answers every IO the server has received.
    pub(crate) fn reply_all(&mut self) {
        for io in std::mem::take(&mut self.ios) {
            self.reply(&io, 0);
        }
        self.pump();
    }

    /// The queue pair of a connection fails.
    pub(crate) fn break_conn(&mut self, conn: ConnId) {
        let one = done(conn, Tag::new(Tag::IO, 0), WcOpcode::RdmaWrite);
        let one = Done { status: Status::RetryExcErr, ..one };
        self.session.handle_done(self.now, &[one]);
    }

    /// The queue pair of a connection fails, and the client deals with it.
    pub(crate) fn lose(&mut self, conn: ConnId) {
        self.break_conn(conn);
        self.pump();
    }

    /// Lets time pass, and runs the timers that are due.
    pub(crate) fn pass(&mut self, time: Duration) {
        let end = self.now + time;
        while let Some(at) = self.session.poll_timeout().filter(|at| *at <= end) {
            self.now = self.now.max(at);
            self.session.handle_timeout(self.now);
            self.pump();
        }
        self.now = end;
    }

    pub(crate) fn region(&mut self, len: usize, access: Access) -> RegionId {
        let region = self.session.add_region(Arc::new(Buffer::new(len).unwrap()), access);
        self.pump();
        assert_eq!(self.session.region_outcome(region), Some(Ok(())));
        region
    }

    /// Memory for both directions.
    pub(crate) fn memory(&mut self) -> RegionId {
        self.region(1 << 20, Access::LOCAL_WRITE | Access::REMOTE_WRITE)
    }

    pub(crate) fn permit(&mut self) -> Permit {
        self.session.get_permit(PermitKind::Io, 0).expect("a permit")
    }

    /// Submits a write of some bytes.
    pub(crate) fn write(
        &mut self,
        permit: &Permit,
        region: RegionId,
        tag: u64,
    ) -> Result<(), Errno> {
        let data = [MemRef { region, offset: 0, len: 4096 }];
        let result = self.session.request(self.now, Dir::Write, permit, b"message", &data, tag);
        self.pump();
        result
    }

    /// Submits a write with a permit and memory of its own.
    pub(crate) fn write_one(&mut self, tag: u64) -> Written {
        let (memory, permit) = (self.memory(), self.permit());
        self.write(&permit, memory, tag).unwrap();
        Written { permit, memory }
    }

    /// Submits `count` writes, tagged from 0, with a permit each; returns the permits.
    pub(crate) fn write_many(&mut self, count: u64) -> Vec<Permit> {
        let memory = self.memory();
        let permits: Vec<_> = (0..count).map(|_| self.permit()).collect();
        for (tag, permit) in (0..).zip(&permits) {
            self.write(permit, memory, tag).unwrap();
        }
        permits
    }

    pub(crate) fn state(&self, path: usize) -> PathState {
        self.session.paths().nth(path).unwrap().state
    }

    pub(crate) fn path(&self, path: usize) -> PathId {
        self.session.paths().nth(path).unwrap().id
    }

    pub(crate) fn take_events(&mut self) -> Vec<Event> {
        std::mem::take(&mut self.events)
    }

    pub(crate) fn take_completed(&mut self) -> Vec<(u64, i32)> {
        self.completed.drain(..).map(|one| (one.tag, one.errno)).collect()
    }

    /// Returns the open connections of the last link to this address.
    pub(crate) fn live(&self, n: u8) -> Vec<ConnId> {
        let of = |conn: &&ConnId| {
            let conn = &self.conns[*conn];
            conn.local == addr(n).0.src && !conn.closed
        };
        self.conns.keys().filter(of).copied().collect()
    }

    /// Asserts that nothing is left.
    pub(crate) fn assert_empty(&self) {
        assert!(self.conns.is_empty(), "{:?}", self.conns);
        assert!(self.buffers.is_empty(), "{:?}", self.buffers.keys());
        assert!(self.made.is_empty() && self.granted.is_empty(), "keys are left");
        assert_eq!(self.session.poll_timeout(), None);
    }
}

pub(crate) fn done(conn: ConnId, tag: Tag, opcode: WcOpcode) -> Done {
    let status = Status::Success;
    Done { conn, tag, status, opcode, len: 0, imm: None, invalidated: None }
}
