//! A client, a server, and a disk behind it.

use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::net::IpAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use bowline_rtrs::bind::{Binding, done_of, withdraw};
use bowline_rtrs::client::{ClientConfig, Event, PathAddr, Permit, PermitKind, Session};
use bowline_rtrs::server::{Request, Server, ServerConfig, ServerEvent};
use bowline_rtrs::{Batch, Done, Errno, Instant, MemRef, PortId, RegionId, Tag, WrKind};
use bowline_verbs::{Access, Buffer, Status};
use bowline_wire::rtrs::{Dir, Geometry, INFO_REQ_LEN, Imm, SessionName, Uuid};

use super::net::{ATTR, Dev, Net, Side};

const DEPTH: u16 = 16;
const SECTORS: u32 = 12;
const SECTOR: usize = 64;

/// Parameters of a run.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    pub(crate) seed: u64,
    pub(crate) refresh: bool,
    /// The client counts keys instead of being sent them.
    pub(crate) counts_keys: bool,
    pub(crate) io_connections: u16,
    pub(crate) paths: u8,
    pub(crate) steps: u32,
    /// Faults in a thousand steps.
    pub(crate) trouble: u32,
    /// The disk carries out a request again after it was answered, as happens at a server that lets
    /// copies of one request overlap.
    pub(crate) answer_twice: bool,
    /// Messages on paths that were cut and given up arrive late instead of never.
    pub(crate) holds: bool,
    /// The client's notices of paths it has given up are lost.
    pub(crate) mute: bool,
}

impl Plan {
    pub(crate) fn calm(seed: u64) -> Self {
        let (refresh, counts_keys) = (true, seed & 2 != 0);
        let (io_connections, paths, steps) = (1, 2, 20_000);
        Self {
            seed,
            refresh,
            counts_keys,
            io_connections,
            paths,
            steps,
            trouble: 0,
            answer_twice: false,
            holds: false,
            mute: false,
        }
    }

    pub(crate) fn rough(seed: u64) -> Self {
        let refresh = !seed.is_multiple_of(3);
        let io_connections = (seed % 3) as u16;
        let paths = 2 + (seed % 2) as u8;
        let (steps, trouble) = (8000, 4);
        Self { refresh, io_connections, paths, steps, trouble, ..Self::calm(seed) }
    }
}

/// Possible contents of a sector.
#[derive(Clone, Debug, Default)]
struct Sector {
    value: u8,
    /// An IO of the sector is in flight.
    busy: bool,
    /// A write failed, and may still be carried out.
    unknown: bool,
}

struct Io {
    permit: Permit,
    dir: Dir,
    sector: u32,
    /// Place in memory.
    slot: u64,
    value: u8,
}

pub(crate) struct World {
    plan: Plan,
    rng: u64,
    now: Instant,
    net: Rc<RefCell<Net>>,
    client: Session,
    client_bind: Binding,
    pub(crate) server: Server,
    server_bind: Binding,
    region: RegionId,
    memory: Arc<Buffer>,
    /// Requests the disk has not carried out.
    running: Vec<Request>,
    disk: Vec<[u8; SECTOR]>,
    sectors: Vec<Sector>,
    ios: BTreeMap<u64, Io>,
    next_tag: u64,
    pub(crate) done: u64,
    pub(crate) failed: u64,
    /// Requests the client has repeated.
    pub(crate) failovers: u64,
    events: Vec<Event>,
    downs: usize,
    ups: usize,
}

/// Makes notices meaningless, and leaves the paths out of INFO_REQ.
fn mute(batch: &mut Batch) {
    let Batch { wrs, mems, .. } = batch;
    for wr in wrs {
        match &mut wr.kind {
            WrKind::WriteImm(_, imm) if matches!(Imm::from_u32(*imm), Imm::GivenUp(_)) => {
                *imm |= 4 << 28;
            }
            WrKind::Send if wr.tag.kind() == Tag::INFO => {
                mems[wr.mem.0 as usize].len = INFO_REQ_LEN as u32;
            }
            _ => {}
        }
    }
}

fn addr(path: u8) -> IpAddr {
    IpAddr::from([10, 0, path, 1])
}

impl World {
    pub(crate) fn new(plan: Plan) -> Self {
        let net = Rc::new(RefCell::new(Net::default()));
        net.borrow_mut().holds = plan.holds;
        let name = SessionName::new("pair").unwrap();
        let Plan { counts_keys, io_connections, seed, .. } = plan;
        let config = ClientConfig { counts_keys, io_connections, ..ClientConfig::new(name, seed) };
        let mut client = Session::new(config, &[ATTR], Uuid([1; 16]));
        let geometry = Geometry::of_chunk(DEPTH, 8192, 4096).unwrap();
        let always_invalidate = plan.refresh;
        let config = ServerConfig { geometry, always_invalidate, ..ServerConfig::default() };
        let server = Server::new(config, &[ATTR]).unwrap();
        let mut server_bind = Binding::of_server(1);
        let listener = net.borrow_mut().listen();
        server_bind.listen(PortId(0), listener);
        let memory = Arc::new(Buffer::new(usize::from(DEPTH) * SECTOR).unwrap());
        let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
        let region = client.add_region(Arc::clone(&memory), access);
        let rng = plan.seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        Self {
            plan,
            rng,
            now: Instant::from_nanos(1),
            net,
            client,
            client_bind: Binding::new(1),
            server,
            server_bind,
            region,
            memory,
            running: Vec::new(),
            disk: vec![[0; SECTOR]; SECTORS as usize],
            sectors: vec![Sector::default(); SECTORS as usize],
            ios: BTreeMap::new(),
            next_tag: 0,
            done: 0,
            failed: 0,
            failovers: 0,
            events: Vec::new(),
            downs: 0,
            ups: 0,
        }
    }

    fn random(&mut self, below: u32) -> u32 {
        self.rng ^= self.rng << 13;
        self.rng ^= self.rng >> 7;
        self.rng ^= self.rng << 17;
        ((self.rng >> 32) as u32) % below
    }

    /// Runs with a server that can make no queue pair; returns the client's error.
    pub(crate) fn open_in_vain(&mut self) -> Option<Errno> {
        self.net.borrow_mut().no_qp = true;
        self.begin();
        for _ in 0..10_000 {
            self.turn();
        }
        self.events.iter().find_map(|event| match event {
            Event::Opened(result) => result.err(),
            _ => None,
        })
    }

    pub(crate) fn open(&mut self) {
        self.begin();
        for _ in 0..10_000 {
            if self.events.contains(&Event::Opened(Ok(()))) {
                return;
            }
            self.turn();
        }
        panic!("does not open: {:?}", self.events);
    }

    fn begin(&mut self) {
        let paths: Vec<_> = (0..self.plan.paths)
            .map(|path| {
                let src = (addr(path), 40_000 + u16::from(path)).into();
                let dst = (IpAddr::from([10, 0, path, 2]), 1234).into();
                (PathAddr { port: PortId(0), src, dst }, Uuid([10 + path; 16]))
            })
            .collect();
        self.client.open(self.now, &paths);
    }

    /// Runs one step of either side.
    fn turn(&mut self) {
        self.now = self.now + Duration::from_millis(10);
        match self.random(6) {
            0 => self.client_cm(),
            1 => self.server_cm(),
            2 => self.client_done(),
            3 => self.server_done(),
            4 => self.answer(),
            _ => {
                self.client.handle_timeout(self.now);
                self.server.handle_timeout(self.now);
            }
        }
        self.settle();
    }

    fn client_cm(&mut self) {
        let event = self.net.borrow_mut().cm[Side::Client as usize].pop_front();
        if let Some(input) = event.and_then(|event| self.client_bind.cm(PortId(0), event)) {
            self.client.handle(self.now, input);
        }
    }

    fn server_cm(&mut self) {
        let event = self.net.borrow_mut().cm[Side::Server as usize].pop_front();
        if let Some(input) = event.and_then(|event| self.server_bind.cm(PortId(0), event)) {
            self.server.handle(self.now, input);
        }
    }

    fn some_done(&mut self, side: Side) -> Vec<Done> {
        // A queue pair that fails leaves hundreds.
        let most = if self.random(2) == 0 { 8 } else { 600 };
        let most = 1 + self.random(most) as usize;
        let mut net = self.net.borrow_mut();
        let queue = &mut net.done[side as usize];
        let count = most.min(queue.len());
        queue.drain(..count).map(|completion| done_of(&completion)).collect()
    }

    fn client_done(&mut self) {
        let done = self.some_done(Side::Client);
        self.client.handle_done(self.now, &done);
    }

    fn server_done(&mut self) {
        let done = self.some_done(Side::Server);
        self.server.handle_done(self.now, &done);
        let mut batch = Batch::default();
        self.server.take_withdraws(&mut batch);
        let mut failed = Vec::new();
        let mut dev = Dev(Rc::clone(&self.net), Side::Server);
        withdraw(&mut dev, &mut batch, &mut failed);
        self.server.process(self.now, &failed);
    }

    /// The disk carries out one of its requests.
    fn answer(&mut self) {
        self.server.take_requests(&mut self.running);
        if self.running.is_empty() {
            return;
        }
        let at = self.random(self.running.len() as u32) as usize;
        let request = self.running.swap_remove(at);
        let sector = u32::from_le_bytes(request.usr[..4].try_into().unwrap()) as usize;
        let Some(memory) = self.server.memory(request.session).cloned() else {
            assert!(self.plan.answer_twice, "a session ends before its operations");
            return;
        };
        let at = request.data.offset as usize;
        match request.dir {
            Dir::Write => memory.read(at, &mut self.disk[sector]),
            Dir::Read => {
                assert_eq!(request.room as usize, SECTOR);
                memory.write(at, &self.disk[sector]);
            }
        }
        self.server.respond(self.now, request.op, 0, None);
        if self.plan.answer_twice && self.random(4) == 0 {
            self.running.push(request);
        }
    }

    /// Carries out the orders of the cores.
    fn settle(&mut self) {
        for _ in 0..1000 {
            let mut inputs = Vec::new();
            let mut dev = Dev(Rc::clone(&self.net), Side::Client);
            let mut busy = false;
            while let Some(order) = self.client.poll_order() {
                self.client_bind.run_order(&mut dev, order, &mut inputs);
                busy = true;
            }
            let mut batch = Batch::default();
            self.client.take_batch(&mut batch);
            busy |= !batch.is_empty();
            if self.plan.mute {
                mute(&mut batch);
            }
            self.client_bind.run_batch(&mut dev, &mut batch, &mut inputs);
            inputs.drain(..).for_each(|input| self.client.handle(self.now, input));
            let mut dev = Dev(Rc::clone(&self.net), Side::Server);
            while let Some(order) = self.server.poll_order() {
                self.server_bind.run_order(&mut dev, order, &mut inputs);
                busy = true;
            }
            self.server.take_batch(&mut batch);
            busy |= !batch.is_empty();
            self.server_bind.run_batch(&mut dev, &mut batch, &mut inputs);
            inputs.drain(..).for_each(|input| self.server.handle(self.now, input));
            while let Some(event) = self.server.poll_event() {
                match event {
                    ServerEvent::Up { session, first: true, .. } => {
                        self.ups += 1;
                        self.server.answer_link(self.now, session, true);
                    }
                    ServerEvent::Down { .. } => self.downs += 1,
                    _ => {}
                }
            }
            while let Some(event) = self.client.poll_event() {
                self.events.push(event);
            }
            self.completed();
            if !busy {
                self.client.check_invariants();
                self.server.check_invariants();
                return;
            }
        }
        panic!("no end of orders");
    }

    fn completed(&mut self) {
        let mut done = Vec::new();
        self.client.take_completed(&mut done);
        for done in done {
            let io = self.ios.remove(&done.tag).expect("completed once");
            let at = io.slot as usize * SECTOR;
            let sector = &mut self.sectors[io.sector as usize];
            sector.busy = false;
            match (io.dir, done.errno) {
                (Dir::Write, 0) => sector.value = io.value,
                (Dir::Write, _) => sector.unknown = true,
                (Dir::Read, 0) if !sector.unknown => {
                    let mut bytes = [0; SECTOR];
                    self.memory.read(at, &mut bytes);
                    assert_eq!(bytes, [sector.value; SECTOR], "sector {}", io.sector);
                }
                (Dir::Read, _) => {}
            }
            if done.errno == 0 {
                self.done += 1;
            } else {
                self.failed += 1;
            }
            self.client.put_permit(io.permit);
        }
    }

    /// The client begins an IO, if it may.
    fn submit(&mut self) {
        let sector = self.random(SECTORS);
        let tag = self.next_tag;
        let free = |slot: &u64| self.ios.values().all(|io| io.slot != *slot);
        let Some(slot) = (0..u64::from(DEPTH)).find(free) else { return };
        if self.sectors[sector as usize].busy {
            return;
        }
        let Some(permit) = self.client.get_permit(PermitKind::Io, tag as u16) else { return };
        let dir = if self.random(2) == 0 { Dir::Read } else { Dir::Write };
        let value = self.random(255) as u8;
        let (offset, len) = (slot * SECTOR as u64, SECTOR as u32);
        self.memory.write(offset as usize, &[value; SECTOR]);
        let data = [MemRef { region: self.region, offset, len }];
        let usr = [sector.to_le_bytes(), (tag as u32).to_le_bytes()].concat();
        match self.client.request(self.now, dir, &permit, &usr, &data, tag) {
            Ok(()) => {
                self.next_tag += 1;
                self.sectors[sector as usize].busy = true;
                self.ios.insert(tag, Io { permit, dir, sector, slot, value });
            }
            Err(_) => self.client.put_permit(permit),
        }
    }

    /// Injects a fault.
    fn trouble(&mut self) {
        let path = addr(self.random(self.plan.paths.into()) as u8);
        let what = self.random(5);
        let mut net = self.net.borrow_mut();
        match what {
            0 | 1 => {
                let side = if what == 0 { Side::Client } else { Side::Server };
                let qps = net.qps_of(side, path);
                qps.last().into_iter().for_each(|qpn| net.fail(*qpn, Status::FatalErr));
            }
            2 | 3 => drop(net.cut.insert(path)),
            _ => {
                drop(net);
                let mut sessions = self.server.sessions();
                let known = sessions.next().and_then(|session| session.paths.first().copied());
                drop(sessions);
                if let Some(path) = known {
                    self.server.disconnect_path(self.now, path.path);
                }
            }
        }
    }

    /// The cut of a path is noticed, or mended.
    fn repair(&mut self) {
        let path = addr(self.random(self.plan.paths.into()) as u8);
        if self.random(2) == 0 {
            self.net.borrow_mut().heal(path);
        } else {
            self.give_up();
        }
    }

    /// The retransmission timeout of a queue pair expires.
    fn give_up(&mut self) {
        self.net.borrow_mut().give_up();
    }

    pub(crate) fn run(&mut self) {
        for _ in 0..self.plan.steps {
            if self.random(1000) < self.plan.trouble {
                self.trouble();
            }
            if self.random(20) == 0 {
                self.repair();
            }
            if self.random(3) == 0 {
                self.submit();
            }
            self.turn();
        }
        self.failovers = self.client.paths().map(|path| path.stats.failovers).sum();
    }

    /// Mends all faults, completes all requests, closes everything, and asserts that nothing is
    /// left.
    pub(crate) fn finish(&mut self) {
        for path in (0..self.plan.paths).chain(0..self.plan.paths) {
            self.net.borrow_mut().heal(addr(path));
        }
        self.until("completions", |world| world.ios.is_empty());
        self.client.drop_region(self.region);
        self.client.close(self.now);
        self.until("the client", |world| world.events.contains(&Event::Closed));
        self.until("the sessions", |world| world.server.sessions().count() == 0);
        assert_eq!(self.ups, self.downs);
        self.server.close(self.now);
        self.until("the server", |world| {
            world.server_bind.is_empty() && world.net.borrow().cm.iter().all(VecDeque::is_empty)
        });
        assert!(self.client_bind.is_empty(), "the client's binding");
        assert!(self.net.borrow().is_empty(), "{:?}", self.net.borrow());
    }

    fn until(&mut self, what: &str, is: impl Fn(&Self) -> bool) {
        for step in 0..200_000 {
            if is(self) {
                return;
            }
            self.turn();
            if step % 1000 == 999 {
                self.now = self.now + Duration::from_secs(1);
            }
        }
        panic!("no end: {what}; seed {}; {} running", self.plan.seed, self.running.len());
    }
}
