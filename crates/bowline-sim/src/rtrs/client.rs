//! A client: one session with one disk, and the program that uses it.

use std::collections::{BTreeMap, VecDeque};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use bowline_rnbd::client::{
    Config, Core, DevId, DiskRequest, Event as DiskEvent, Order as Message, Outage, SendIo, State,
    Token,
};
use bowline_rnbd::{IoOp, SessionLimits};
use bowline_rtrs::bind::Binding;
use bowline_rtrs::client::{
    ClientConfig, Completed, Event as SessionEvent, PathAddr, PathState, Permit, PermitKind,
    ReadKeys, Session,
};
use bowline_rtrs::{
    Batch, HbConfig, Input, MemRef, Order, PathId, PortId, RegionId, Tag, Wr, WrKind,
};
use bowline_verbs::{Access, Buffer, Remote};
use bowline_wire::rnbd::Access as DiskAccess;
use bowline_wire::rtrs::{Dir, PORT, SessionName, Uuid};

use super::base::{Base, Event};
use super::fabric::{Own, Watch, bench, drain};
use super::oracle::{Oracle, SECTOR, What, fill};
use super::plan::ClientPlan;
use super::process::{Heard, Process, hear};
use super::sabotage::Sabotage;
use crate::queue::SEC;
use crate::roce::host::Host;

/// Bytes for the answer to a service message, and how many there are at a time.
const SERVICE_BYTES: usize = 64;
const SERVICE_SLOTS: usize = 8;
/// Longest time requests wait for a session that is away: longer than any run.
const WAIT_MAX: Duration = Duration::from_secs(100_000);
/// Time until a session that could not be opened is tried again.
const AGAIN: u64 = SEC;

/// How far the program is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Stage {
    /// The session is being opened.
    Opening,
    /// The disk is being mapped.
    Mapping,
    /// Requests are made.
    Running,
    /// All of the disk is read, in the end.
    Verifying,
    /// The disk is being given up.
    Unmapping,
    /// The session is being closed.
    Closing,
    /// Nothing is left of it.
    Closed,
}

/// What a request of the session is for.
#[derive(Debug)]
enum Purpose {
    Io(u16, Option<Landing>),
    /// A message, and where its answer goes.
    Service(Token, Option<usize>, u32),
}

/// Where the data of a READ goes that has keys of its own.
#[derive(Debug)]
struct Landing {
    /// Where the program wants it.
    to: usize,
    len: usize,
    /// Places of its parts in other memory, if it goes there first.
    pieces: Vec<MemRef>,
}

/// Memory that nobody may change any more.
#[derive(Debug)]
struct Settled {
    at: usize,
    /// In the memory for scattered READs.
    scattered: bool,
    bytes: Vec<u8>,
}

/// A request of the program.
#[derive(Debug)]
struct Request {
    op: IoOp,
    place: usize,
    len: u32,
}

/// A session while it lives.
#[derive(Debug)]
pub(crate) struct Life {
    pub(crate) session: Session,
    binding: Binding,
    own: Vec<Own>,
    core: Option<Core<u64>>,
    dev: Option<DevId>,
    pub(crate) stage: Stage,
    region: RegionId,
    buffer: Arc<Buffer>,
    /// Memory where scattered READs put their parts in disorder.
    scatter: (RegionId, Arc<Buffer>),
    settled: Vec<Settled>,
    /// Permits of the slots, kept as drivers do; none where there is only one.
    permits: Vec<Permit>,
    /// By tag: permit and purpose.
    asked: BTreeMap<u64, (Option<Permit>, Purpose)>,
    tags: u64,
    messages: VecDeque<Message>,
    sends: VecDeque<SendIo>,
    service_slots: Vec<usize>,
    requests: BTreeMap<u64, Request>,
    places: Vec<usize>,
    /// Verification: the next sector, and whether something could not be read.
    verified: u64,
    unread: bool,
}

/// A client.
#[derive(Debug)]
pub(crate) struct Client {
    pub(crate) number: usize,
    pub(crate) plan: ClientPlan,
    pub(crate) process: Process,
    pub(crate) life: Option<Life>,
    pub(crate) oracle: Oracle,
    /// Requests still to be made.
    left: u32,
    requests: u64,
    ports: u16,
    /// Nothing goes wrong any more.
    calm: bool,
    /// Everything is done and nothing is left.
    pub(crate) done: bool,
    /// Inputs of its core, ever.
    pub(crate) inputs: u64,
    going: bool,
    attacks: Vec<Wr>,
}

/// What a run has in common for all clients.
pub(crate) struct Common<'a> {
    pub(crate) servers: &'a [IpAddr],
    pub(crate) heartbeat: HbConfig,
    pub(crate) faulty: bool,
}

impl Client {
    pub(crate) fn new(number: usize, plan: ClientPlan, look: u64) -> Self {
        Self {
            number,
            process: Process::new(number + 1, look),
            life: None,
            oracle: Oracle::new(plan.disk.sectors),
            left: plan.requests,
            requests: 0,
            ports: 0,
            calm: false,
            done: false,
            inputs: 0,
            going: false,
            attacks: Vec::new(),
            plan,
        }
    }

    fn request_bytes(&self) -> usize {
        self.plan.request_max as usize
    }

    /// Longest pause of the program; in the end it makes none.
    fn gap(&self) -> u64 {
        if self.calm { 0 } else { self.plan.gap }
    }

    /// The machine dies.
    pub(crate) fn died(&mut self, base: &mut Base) {
        self.count(base);
        self.process.stop();
        self.life = None;
        self.oracle.program_died();
        self.going = false;
        self.attacks.clear();
    }

    /// Begins a session.
    pub(crate) fn begin(&mut self, base: &mut Base, hosts: &mut [Host], common: &Common<'_>) {
        if self.life.is_some() || self.done {
            return;
        }
        let made = self.make(base, hosts, common);
        let Some(life) = base.judge(made) else { return };
        base.stats.sessions += 1;
        base.note([10, self.number as u64, 0], || format!("client {}: opens", self.number));
        self.life = Some(life);
        self.pump(base, hosts, common);
    }

    fn make(
        &mut self,
        base: &mut Base,
        hosts: &mut [Host],
        common: &Common<'_>,
    ) -> Result<Life, String> {
        let wrong = |e: bowline_verbs::Error| format!("client {}: {e}", self.number);
        let own = hosts.iter_mut().map(|host| {
            let device = host.device.as_mut().ok_or("a device is missing")?;
            let own = Own::new(device).map_err(wrong)?;
            device.arm_cq(own.cq, false).map_err(wrong)?;
            Ok(own)
        });
        let own = own.collect::<Result<Vec<Own>, String>>()?;
        let now = base.instant();
        let attrs = bench(hosts, &own, now).ok_or("a device is missing")?.attrs();
        let name = SessionName::new(&format!("client-{}", self.number))
            .map_err(|e| format!("a session's name: {e}"))?;
        let config = ClientConfig {
            io_connections: self.plan.io_connections,
            poll_connections: self.plan.poll_connections,
            policy: self.plan.policy,
            read_keys: self.plan.read_keys,
            reconnect_delay: self.plan.kernel_delay.map(Duration::from_nanos),
            max_reconnects: self.plan.max_reconnects,
            heartbeat: common.heartbeat,
            bridges_outages: self.plan.queues,
            ..ClientConfig::new(name, base.rng.next())
        };
        let mut session = Session::new(config, &attrs, uuid(base));
        let bytes = self.request_bytes();
        let count = self.plan.depth;
        let len = count * bytes + SERVICE_SLOTS * SERVICE_BYTES;
        let buffer = Arc::new(Buffer::new(len).map_err(|e| format!("memory: {e}"))?);
        let access = match self.plan.read_keys {
            ReadKeys::LongLived => Access::LOCAL_WRITE | Access::REMOTE_WRITE,
            ReadKeys::PerRequest => Access::LOCAL_WRITE,
        };
        let region = session.add_region(Arc::clone(&buffer), access);
        let scatter = Arc::new(Buffer::new(len).map_err(|e| format!("memory: {e}"))?);
        let scatter = (session.add_region(Arc::clone(&scatter), Access::LOCAL_WRITE), scatter);
        let addrs: Vec<IpAddr> = hosts.iter().map(Host::addr).collect();
        let paths: Vec<_> = (self.plan.paths.clone().into_iter())
            .map(|(from, to)| (self.addr(&addrs, common, from, to), uuid(base)))
            .collect();
        session.open(now, &paths);
        Ok(Life {
            session,
            binding: Binding::new(own.len()),
            own,
            core: None,
            dev: None,
            stage: Stage::Opening,
            region,
            buffer,
            scatter,
            settled: Vec::new(),
            permits: Vec::new(),
            asked: BTreeMap::new(),
            tags: 0,
            messages: VecDeque::new(),
            sends: VecDeque::new(),
            service_slots: (0..SERVICE_SLOTS).map(|n| count * bytes + n * SERVICE_BYTES).collect(),
            requests: BTreeMap::new(),
            places: (0..count).map(|n| n * bytes).collect(),
            verified: 0,
            unread: false,
        })
    }

    fn addr(&mut self, own: &[IpAddr], common: &Common<'_>, from: u8, to: u8) -> PathAddr {
        self.ports = (self.ports + 1) % 20_000;
        PathAddr {
            port: PortId(from),
            src: SocketAddr::new(own[usize::from(from)], 32_768 + self.ports),
            dst: SocketAddr::new(common.servers[usize::from(to)], PORT),
        }
    }

    /// Looks at what the devices have told.
    pub(crate) fn look(&mut self, base: &mut Base, hosts: &mut [Host], common: &Common<'_>) {
        let now = base.instant();
        while let Some((port, notice)) = self.process.inbox.pop_front() {
            let Some(life) = &mut self.life else { continue };
            let Some(mut bench) = bench(hosts, &life.own, now) else { return };
            match hear(base, &mut life.binding, &mut bench, &life.own, port, notice) {
                Heard::Nothing => {}
                Heard::Input(input) => {
                    self.inputs += 1;
                    note_input(base, self.number, &input);
                    life.session.handle(now, input);
                }
                Heard::Dones(dones) => {
                    self.inputs += dones.len() as u64;
                    base.note([12, self.number as u64, dones.len() as u64], || {
                        format!("client {}: {dones:?}", self.number)
                    });
                    life.session.handle_done(now, &dones);
                }
            }
        }
        self.pump(base, hosts, common);
    }

    /// Looks at the clock.
    pub(crate) fn wake(&mut self, base: &mut Base, hosts: &mut [Host], common: &Common<'_>) {
        let now = base.instant();
        if let Some(life) = &mut self.life {
            life.session.handle_timeout(now);
            if let Some(core) = &mut life.core {
                core.handle_timeout(now);
            }
        }
        self.pump(base, hosts, common);
    }

    /// Moves everything that can move.
    pub(crate) fn pump(&mut self, base: &mut Base, hosts: &mut [Host], common: &Common<'_>) {
        let now = base.instant();
        while base.failure.is_none() {
            let Some(life) = &mut self.life else { return };
            let Some(mut bench) = bench(hosts, &life.own, now) else { return };
            let mut watch = Eyes {
                base: &mut *base,
                number: self.number,
                inputs: &mut self.inputs,
                attack: (self.plan.hostile && !self.calm)
                    .then_some((life.region, &mut self.attacks)),
                later: Vec::new(),
            };
            drain(&mut life.session, &mut life.binding, &mut bench, now, &mut watch);
            let early = watch.later;
            for input in early {
                life.session.handle(now, input);
            }
            life.session.check_invariants();
            if self.plan.read_keys == ReadKeys::PerRequest || self.plan.scattered > 0 {
                let devices = hosts.iter().filter_map(|host| host.device.as_ref());
                let good: usize = devices.map(|device| device.in_use().bound).sum();
                let given = life.session.keys_given();
                if good > given {
                    let number = self.number;
                    base.fail(|| {
                        format!("client {number}: {good} keys, {given} given: good after the end")
                    });
                }
            }
            let moved = self.completions(base)
                | self.events(base, common)
                | self.messages(base)
                | self.sends(base)
                | self.disk_events(base)
                | self.results(base, common);
            if !moved {
                break;
            }
        }
        self.settle(base, hosts);
    }

    /// Requests of the session that have ended.
    fn completions(&mut self, base: &mut Base) -> bool {
        let now = base.instant();
        let Some(life) = &mut self.life else { return false };
        let mut ended: Vec<Completed> = Vec::new();
        life.session.take_completed(&mut ended);
        let moved = !ended.is_empty();
        if moved && base.wrongs(Sabotage::CompleteTwice, 50) {
            ended.extend_from_within(..1);
        }
        for one in ended {
            base.note([13, self.number as u64, one.tag], || format!("client: {one:?}"));
            let Some((permit, purpose)) = life.asked.remove(&one.tag) else {
                base.fail(|| format!("client {}: {one:?} was never asked", self.number));
                return false;
            };
            if let Some(permit) = permit
                && !base.wrongs(Sabotage::ForgetPermit, 20)
            {
                life.session.put_permit(permit);
            }
            let Some(core) = &mut life.core else { continue };
            match purpose {
                Purpose::Io(slot, landing) => {
                    if let Some(landing) = landing.filter(|_| one.errno == 0) {
                        land(&life.buffer, &life.scatter.1, &mut life.settled, landing);
                    }
                    core.io_answer(now, slot, one.errno);
                }
                Purpose::Service(token, place, room) => {
                    let mut data = Vec::new();
                    if let Some(place) = place {
                        life.buffer.append_to(place, room as usize, &mut data);
                        life.service_slots.push(place);
                    }
                    let data = if one.errno == 0 { &data[..] } else { &[] };
                    core.answered(now, token, one.errno, data);
                }
            }
        }
        moved
    }

    fn events(&mut self, base: &mut Base, common: &Common<'_>) -> bool {
        let now = base.instant();
        let Some(life) = &mut self.life else { return false };
        let mut moved = false;
        while let Some(event) = life.session.poll_event() {
            moved = true;
            base.note([14, self.number as u64, 0], || format!("client {}: {event:?}", self.number));
            let limits = life.session.geometry().map(|attrs| {
                let max_segments = attrs.max_segments.min(128) as u16;
                (SessionLimits { max_io: attrs.max_io, max_segments }, attrs.queue_depth)
            });
            match event {
                SessionEvent::Opened(Ok(())) => {
                    let outage =
                        if self.plan.queues { Outage::Queue(WAIT_MAX) } else { Outage::FailFast };
                    let depth = limits.map_or(1, |(_, depth)| depth);
                    let mut core = Core::new(Config { outage, ..Config::default() }, depth);
                    if let Some((limits, _)) = limits {
                        core.link_up(now, limits);
                    }
                    let mapped = core.map(&format!("disk{}", self.number), DiskAccess::Rw);
                    let mapped = mapped.map_err(|e| format!("client {}: map: {e}", self.number));
                    // As drivers do: a slot is a permit.
                    if depth > 1 {
                        let poll = self.plan.poll_connections > 0;
                        let mut take = || {
                            let some = poll && base.extra.chance(500);
                            let kind = if some { PermitKind::Polled } else { PermitKind::Io };
                            life.session.get_permit(kind, 0)
                        };
                        life.permits.extend(std::iter::from_fn(&mut take));
                    }
                    life.dev = base.judge(mapped);
                    life.core = Some(core);
                    life.stage = Stage::Mapping;
                }
                SessionEvent::Opened(Err(errno)) => {
                    base.stats.unopened += 1;
                    if !common.faulty {
                        base.fail(|| format!("client {}: not opened: {errno:?}", self.number));
                    }
                    life.stage = Stage::Closed;
                }
                SessionEvent::Closed => life.stage = Stage::Closed,
                SessionEvent::Disconnected => {
                    base.stats.outages += u64::from(life.stage < Stage::Closing);
                    if let Some(core) = &mut life.core {
                        core.link_down(now);
                    }
                }
                SessionEvent::Reconnected => {
                    self.oracle.resumed();
                    if let (Some(core), Some((limits, _))) = (&mut life.core, limits) {
                        core.link_up(now, limits);
                    }
                }
                SessionEvent::PathState { state: PathState::Connected, .. } => {
                    base.stats.paths_up += 1;
                }
                SessionEvent::PathState { path, state } => {
                    let lost = matches!(
                        state,
                        PathState::Reconnecting | PathState::ConnectingErr | PathState::Dead
                    );
                    base.stats.paths_lost += u64::from(state == PathState::Reconnecting);
                    if lost && !common.faulty && life.stage < Stage::Closing {
                        base.fail(|| format!("client {}: {path:?} became {state:?}", self.number));
                    }
                }
                _ => {}
            }
        }
        moved
    }

    /// Sends service messages.
    fn messages(&mut self, base: &mut Base) -> bool {
        let now = base.instant();
        let Some(life) = &mut self.life else { return false };
        let Some(core) = &mut life.core else { return false };
        life.messages.extend(std::iter::from_fn(|| core.poll_order()));
        let mut moved = false;
        while let Some(message) = life.messages.front() {
            let wanted = message.room > 0;
            if wanted && life.service_slots.is_empty() {
                break;
            }
            let Some(permit) = life.session.get_permit(PermitKind::Service, 0) else {
                if life.stage >= Stage::Closing {
                    life.messages.clear();
                }
                break;
            };
            moved = true;
            let Some(message) = life.messages.pop_front() else { break };
            let place = if wanted { life.service_slots.pop() } else { None };
            let data = place.map(|place| MemRef {
                region: life.region,
                offset: place as u64,
                len: message.room,
            });
            life.tags += 1;
            let tag = life.tags;
            let dir = if wanted { Dir::Read } else { Dir::Write };
            let asked = life.session.request(now, dir, &permit, &message.usr, data.as_slice(), tag);
            match asked {
                Ok(()) => {
                    let purpose = Purpose::Service(message.token, place, message.room);
                    life.asked.insert(tag, (Some(permit), purpose));
                }
                Err(errno) => {
                    life.session.put_permit(permit);
                    life.service_slots.extend(place);
                    core.answered(now, message.token, -errno.0, &[]);
                }
            }
        }
        moved
    }

    /// Sends IO messages.
    fn sends(&mut self, base: &mut Base) -> bool {
        let now = base.instant();
        let Some(life) = &mut self.life else { return false };
        let Some(core) = &mut life.core else { return false };
        let mut sends = Vec::new();
        core.take_sends(&mut sends);
        life.sends.extend(sends);
        let mut moved = false;
        while let Some(send) = life.sends.pop_front() {
            let cpu = base.rng.below(4) as u16;
            let mut taken = None;
            if life.permits.is_empty() {
                taken = life.session.get_permit(PermitKind::Io, cpu);
            }
            let kept = life.permits.get(usize::from(send.slot));
            let Some(permit) = taken.as_ref().or(kept) else {
                life.sends.push_front(send);
                break;
            };
            life.session.set_cpu_of(permit, cpu);
            moved = true;
            let data = send.data.map(|piece| MemRef {
                region: RegionId(piece.region),
                offset: piece.offset,
                len: piece.len,
            });
            let landing = data.filter(|_| send.dir == Dir::Read).and_then(|data| {
                let pieces = scatter(base, self.plan.scattered, life.scatter.0, &data);
                let own_key = !pieces.is_empty() || self.plan.read_keys == ReadKeys::PerRequest;
                let (to, len) = (data.offset as usize, data.len as usize);
                own_key.then_some(Landing { to, len, pieces })
            });
            let pieces = landing.as_ref().map(|landing| &landing.pieces[..]);
            let pieces = pieces.filter(|pieces| !pieces.is_empty()).unwrap_or(data.as_slice());
            life.tags += 1;
            let tag = life.tags;
            let asked = life.session.request(now, send.dir, permit, &send.usr, pieces, tag);
            match asked {
                Ok(()) => _ = life.asked.insert(tag, (taken, Purpose::Io(send.slot, landing))),
                Err(errno) => {
                    taken.into_iter().for_each(|permit| life.session.put_permit(permit));
                    core.send_failed(now, send.slot, bowline_rnbd::Errno(errno.0));
                }
            }
        }
        moved
    }

    fn disk_events(&mut self, base: &mut Base) -> bool {
        let Some(life) = &mut self.life else { return false };
        let Some(core) = &mut life.core else { return false };
        core.check_invariants();
        let (mut moved, mut over) = (false, false);
        while let Some(event) = core.poll_event() {
            moved = true;
            base.note([15, self.number as u64, 0], || format!("client {}: {event:?}", self.number));
            match event {
                DiskEvent::Mapped { result: Ok(()), .. } if life.stage == Stage::Mapping => {
                    base.stats.mapped += 1;
                    life.stage = Stage::Running;
                    base.schedule(0, go(&self.process, self.number));
                }
                // Somebody else has it still, perhaps a former life of this program.
                DiskEvent::Mapped { result: Err(_), .. } | DiskEvent::Unmapped { .. } => {
                    over = true;
                }
                _ => {}
            }
        }
        if over {
            self.count(base);
            if let Some(life) = &mut self.life {
                life.stage = Stage::Closing;
                for permit in life.permits.drain(..) {
                    life.session.put_permit(permit);
                }
                life.session.close(base.instant());
            }
        }
        moved
    }

    /// Requests of the program that have ended.
    fn results(&mut self, base: &mut Base, common: &Common<'_>) -> bool {
        let Some(life) = &mut self.life else { return false };
        let Some(core) = &mut life.core else { return false };
        let mut results = Vec::new();
        core.take_done(&mut results);
        let moved = !results.is_empty();
        for result in results {
            let (id, errno) = (result.done, result.errno);
            base.note([16, id, errno as u64], || {
                format!("client {}: request {id} ends with {errno}", self.number)
            });
            let Some(request) = life.requests.remove(&id) else {
                base.fail(|| format!("client {}: request {id} ends twice", self.number));
                return false;
            };
            let mut data = Vec::new();
            if request.op == IoOp::Read && errno == 0 {
                life.buffer.append_to(request.place, request.len as usize, &mut data);
            }
            life.places.push(request.place);
            base.stats.failed += u64::from(errno != 0);
            if errno == 0 {
                base.stats.bytes += u64::from(request.len);
            }
            if errno != 0 && !self.plan.hostile {
                let (number, op) = (self.number, request.op);
                if self.plan.queues && life.stage < Stage::Unmapping {
                    base.fail(|| format!("client {number}: {op:?} {id} fails with {errno}"));
                } else if !common.faulty || errno != -5 {
                    base.fail(|| format!("client {number}: {op:?} {id} failed with {errno}"));
                }
            }
            if life.stage == Stage::Verifying {
                life.unread |= errno != 0;
            }
            let judged = self.oracle.end(id, errno == 0, &data);
            if !self.plan.hostile {
                let number = self.number;
                let op = request.op;
                let judged = judged.map_err(|e| format!("client {number}: {op:?} {id}: {e}"));
                base.judge(judged);
            }
        }
        if moved && !std::mem::replace(&mut self.going, true) {
            let event = go(&self.process, self.number);
            base.schedule_within(self.gap(), event);
        }
        moved
    }

    /// The program goes on.
    pub(crate) fn go(&mut self, base: &mut Base, hosts: &mut [Host], common: &Common<'_>) {
        self.going = false;
        let stage = self.life.as_ref().map(|life| life.stage);
        match stage {
            Some(Stage::Running) => self.work(base),
            Some(Stage::Verifying) => self.verify(base),
            _ => return,
        }
        self.pump(base, hosts, common);
    }

    fn work(&mut self, base: &mut Base) {
        let mut burst = 1 + base.rng.below(8);
        while burst > 0 && self.left > 0 {
            let places = self.life.as_ref().map_or(0, |life| life.places.len());
            if places == 0 {
                return;
            }
            burst -= 1;
            self.left -= 1;
            self.submit_something(base);
        }
        let Some(life) = &mut self.life else { return };
        if self.left == 0 && self.calm && life.requests.is_empty() {
            life.stage = Stage::Verifying;
            (life.verified, life.unread) = (0, false);
            self.verify(base);
        } else if self.left > 0 && !life.places.is_empty() && !self.going {
            self.going = true;
            let event = go(&self.process, self.number);
            base.schedule_within(self.gap(), event);
        }
    }

    fn submit_something(&mut self, base: &mut Base) {
        let unit = u64::from(self.plan.disk.logical);
        let blocks = self.plan.disk.sectors * SECTOR as u64 / unit;
        let most = (u64::from(self.plan.request_max) / unit).clamp(1, blocks);
        let count = if base.rng.chance(500) { 1 } else { base.rng.magnitude(1, most) };
        let first = base.rng.below(blocks - count + 1);
        let op = match base.rng.below(20) {
            0 => IoOp::Flush,
            1 => IoOp::WriteZeroes,
            2 => IoOp::Discard,
            n if n % 2 == 0 => IoOp::Read,
            _ => IoOp::Write,
        };
        let fua = op == IoOp::Write && base.rng.chance(150);
        self.submit(base, op, first * unit, (count * unit) as u32, fua);
    }

    fn submit(&mut self, base: &mut Base, op: IoOp, offset: u64, len: u32, fua: bool) {
        let now = base.instant();
        let Some(life) = &mut self.life else { return };
        let (Some(core), Some(dev)) = (&mut life.core, life.dev) else { return };
        let Some(place) = life.places.pop() else { return };
        // What was read there before is the program's to the end.
        let bytes = self.plan.request_max as usize;
        let (mine, others): (Vec<_>, Vec<_>) = (life.settled.drain(..))
            .partition(|settled| (place..place + bytes).contains(&settled.at));
        life.settled = others;
        for Settled { at, scattered, bytes } in mine {
            let mut now = vec![0; bytes.len()];
            let buffer = if scattered { &life.scatter.1 } else { &life.buffer };
            buffer.read(at, &mut now);
            if now != bytes {
                let number = self.number;
                base.fail(|| format!("client {number}: memory at {at} has changed after the READ"));
            }
        }
        self.requests += 1;
        let id = self.requests;
        let (offset, len) = if op == IoOp::Flush { (0, 0) } else { (offset, len) };
        let first = offset / SECTOR as u64;
        let count = u64::from(len) / SECTOR as u64;
        let durable = fua || !self.plan.disk.cache;
        let what = match op {
            IoOp::Read => What::Read,
            IoOp::Write => What::Write(self.oracle.next_stamp(), durable),
            IoOp::WriteZeroes => What::Write(0, durable),
            IoOp::Flush => What::Flush,
            IoOp::Discard | IoOp::SecureErase => What::Discard,
        };
        if let What::Write(stamp, _) = what
            && op == IoOp::Write
        {
            let mut bytes = vec![0; len as usize];
            for (at, sector) in (first..).zip(bytes.chunks_mut(SECTOR)) {
                fill(stamp, at, sector);
            }
            life.buffer.write(place, &bytes);
        }
        base.stats.requests += 1;
        base.note([17, id, offset << 24 | u64::from(len)], || {
            let number = self.number;
            format!("client {number}: request {id}: {op:?} sector {first}, {count} {what:?}")
        });
        self.oracle.begin(id, what, first, count);
        life.requests.insert(id, Request { op, place, len });
        let mem = op.has_data().then_some((life.region.0, place as u64));
        let request = DiskRequest { op, offset, len, fua, nounmap: false, mem, done: id };
        core.submit(now, dev, request);
    }

    /// Reads the whole disk; goes on when all of it could be read.
    fn verify(&mut self, base: &mut Base) {
        let bytes = self.plan.disk.sectors * SECTOR as u64;
        let unit = u64::from(self.plan.disk.logical);
        loop {
            let Some(life) = &mut self.life else { return };
            if life.unread && life.requests.is_empty() {
                (life.verified, life.unread) = (0, false);
                return base.schedule(SEC, go(&self.process, self.number));
            }
            if life.verified >= bytes || self.plan.hostile {
                if life.requests.is_empty() {
                    life.stage = Stage::Unmapping;
                    if let (Some(core), Some(dev)) = (&mut life.core, life.dev) {
                        base.stats.resent +=
                            core.infos().iter().map(|disk| disk.stats.resent).sum::<u64>();
                        let unmapped = core.unmap(dev).map_err(|e| format!("unmap: {e}"));
                        base.judge(unmapped);
                    }
                }
                return;
            }
            if life.places.is_empty() || life.unread {
                return;
            }
            let most = u64::from(self.plan.request_max) / unit * unit;
            let (at, len) = (life.verified, most.min(bytes - life.verified));
            life.verified += len;
            self.submit(base, IoOp::Read, at, len as u32, false);
        }
    }

    /// Faults are over.
    pub(crate) fn calm(&mut self, base: &mut Base) {
        self.calm = true;
        self.left = self.left.min(20);
        self.attacks.clear();
        base.schedule(0, go(&self.process, self.number));
    }

    /// Sets right what faults have left: closed paths, a closed disk.
    pub(crate) fn repair(&mut self, base: &mut Base, hosts: &mut [Host], common: &Common<'_>) {
        let now = base.instant();
        let Some(life) = &mut self.life else { return };
        let closed: Vec<PathId> = (life.session.paths())
            .filter(|path| path.state == PathState::Closed)
            .map(|path| path.id)
            .collect();
        if life.stage < Stage::Closing {
            let none = life.session.paths().next().is_none();
            for path in closed {
                // One that is busy will be tried again.
                let _ = life.session.reconnect_path(now, path);
            }
            if none {
                self.add_path(base, hosts, common, self.plan.paths[0]);
            }
        }
        let Some(life) = &mut self.life else { return };
        if let (Some(core), Some(dev)) = (&mut life.core, life.dev)
            && core.state(dev) == Some(State::Closed)
        {
            let _ = core.remap(dev);
        }
        self.pump(base, hosts, common);
    }

    /// Somebody orders something about a path.
    pub(crate) fn order_path(&mut self, base: &mut Base, hosts: &mut [Host], common: &Common<'_>) {
        let now = base.instant();
        let Some(life) = &mut self.life else { return };
        if life.stage >= Stage::Closing {
            return;
        }
        let paths: Vec<PathId> = life.session.paths().map(|path| path.id).collect();
        let what = base.rng.below(5);
        let path = if paths.is_empty() { None } else { Some(base.rng.pick(&paths)) };
        base.note([18, self.number as u64, what], || {
            format!("client {}: order {what} about {path:?}", self.number)
        });
        // Nobody removes the last path: there would be nothing to come back. One that is being added
        // may not become one.
        let stays = |state| {
            matches!(state, PathState::Connected | PathState::Reconnecting | PathState::Closed)
        };
        let staying = life.session.paths().filter(|path| stays(path.state)).count();
        let result = match (what, path) {
            (0, Some(path)) if staying > 1 => life.session.remove_path(now, path),
            (1, Some(path)) => life.session.disconnect_path(now, path),
            (2, Some(path)) => life.session.reconnect_path(now, path),
            _ => {
                let from = base.rng.index(hosts.len()) as u8;
                let to = base.rng.index(common.servers.len()) as u8;
                self.add_path(base, hosts, common, (from, to));
                Ok(())
            }
        };
        base.note([19, self.number as u64, u64::from(result.is_ok())], || format!("{result:?}"));
        self.pump(base, hosts, common);
    }

    fn add_path(
        &mut self,
        base: &mut Base,
        hosts: &[Host],
        common: &Common<'_>,
        (from, to): (u8, u8),
    ) {
        let own: Vec<IpAddr> = hosts.iter().map(Host::addr).collect();
        let addr = self.addr(&own, common, from, to);
        let uuid = uuid(base);
        let now = base.instant();
        if let Some(life) = &mut self.life {
            let added = life.session.add_path(now, addr, uuid);
            base.note([22, self.number as u64, 0], || format!("{addr:?}: {added:?}"));
        }
    }

    /// Adds up what this session has counted.
    fn count(&self, base: &mut Base) {
        let Some(life) = &self.life else { return };
        base.stats.failovers += life.session.paths().map(|path| path.stats.failovers).sum::<u64>();
    }

    /// Ends what is to end, and sees to it that timers are heard.
    fn settle(&mut self, base: &mut Base, hosts: &mut [Host]) {
        let Some(life) = &mut self.life else { return };
        let timers = [life.session.poll_timeout(), life.core.as_ref().and_then(Core::poll_timeout)];
        self.process.wake(base, timers.into_iter().flatten().min());
        if life.stage != Stage::Closed {
            return;
        }
        for path in life.session.paths() {
            let number = self.number;
            base.fail(|| format!("client {number}: {:?} is left of a closed session", path.id));
        }
        if !life.binding.is_empty() {
            base.fail(|| format!("client {}: its binding is not empty", self.number));
        }
        for (host, own) in hosts.iter_mut().zip(&life.own) {
            let Some(device) = &mut host.device else { continue };
            let ended = device.destroy_cq(own.cq).and_then(|()| device.dealloc_pd(own.pd));
            base.judge(ended.map_err(|e| format!("client {}: at its end: {e}", self.number)));
        }
        let finished = life.verified > 0 || self.plan.hostile;
        self.life = None;
        if self.calm && self.left == 0 && finished {
            self.done = true;
        } else {
            let event = Event::Begin { client: self.number, boot: self.process.boot };
            base.schedule(AGAIN, event);
        }
    }
}

/// Cuts a stretch into parts that lie in disorder at the same place of other memory; none: it is left
/// whole.
fn scatter(base: &mut Base, often: u64, region: RegionId, data: &MemRef) -> Vec<MemRef> {
    if often == 0 || !base.extra.chance(often) || data.len < 2 {
        return Vec::new();
    }
    base.stats.scattered += 1;
    let mut pieces = Vec::new();
    let mut left = data.len;
    while left > 0 && pieces.len() < 100 {
        // Two at least.
        let most = u64::from(left) - u64::from(pieces.is_empty());
        let len = 1 + base.extra.below(most) as u32;
        left -= len;
        pieces.push(MemRef { region, offset: data.offset + u64::from(left), len });
    }
    if left > 0 {
        pieces.push(MemRef { region, offset: data.offset, len: left });
    }
    pieces
}

/// Takes what a READ with keys of its own has brought.
fn land(buffer: &Buffer, scatter: &Buffer, settled: &mut Vec<Settled>, landing: Landing) {
    let Landing { to, len, pieces } = landing;
    let mut at = to;
    for piece in &pieces {
        scatter.copy_to(piece.offset as usize, buffer, at, piece.len as usize);
        at += piece.len as usize;
    }
    let scattered = !pieces.is_empty();
    let mut bytes = Vec::new();
    if scattered { scatter } else { buffer }.append_to(to, len, &mut bytes);
    settled.push(Settled { at: to, scattered, bytes });
}

fn go(process: &Process, client: usize) -> Event {
    Event::Go { client, boot: process.boot }
}

fn uuid(base: &mut Base) -> Uuid {
    let mut bytes = [0; 16];
    for half in bytes.chunks_exact_mut(8) {
        half.copy_from_slice(&base.rng.next().to_le_bytes());
    }
    Uuid::from_random(bytes)
}

fn note_input(base: &mut Base, number: usize, input: &Input) {
    base.note([11, number as u64, 0], || format!("client {number}: {input:?}"));
}

/// Sees what goes from a client's core to its devices.
struct Eyes<'a> {
    base: &'a mut Base,
    number: usize,
    inputs: &'a mut u64,
    /// A hostile client: memory with garbage, and writes it will make later.
    attack: Option<(RegionId, &'a mut Vec<Wr>)>,
    later: Vec<Input>,
}

impl Watch for Eyes<'_> {
    fn order(&mut self, order: Order) -> Option<Order> {
        let number = self.number;
        self.base.note([20, number as u64, 0], || format!("client {number}: {order:?}"));
        match order {
            // The queue pair lives on.
            Order::Close { conn } if self.base.wrongs(Sabotage::EarlyDrain, 1000) => {
                self.later.push(Input::Drained { conn });
                self.later.push(Input::Disconnected { conn });
                None
            }
            Order::Forget { .. } if self.base.wrongs(Sabotage::EarlyDrain, 1000) => None,
            Order::DropKeys { .. } if self.base.wrongs(Sabotage::LeakKeys, 1000) => None,
            order => Some(order),
        }
    }

    fn batch(&mut self, batch: &mut Batch) {
        let (number, sends) = (self.number as u64, batch.wrs.len() as u64);
        self.base.note([21, number, sends], || {
            format!("client {number}: {:?}, {} receives", batch.wrs, batch.recvs.len())
        });
        if self.base.sabotage == Some(Sabotage::KeepKey) {
            // Completes as well, and changes nothing.
            for wr in &mut batch.wrs {
                if let WrKind::Invalidate(_) = wr.kind {
                    wr.kind = WrKind::Write(Remote::default());
                }
            }
        }
        let Some((region, later)) = &mut self.attack else { return };
        if self.base.rng.chance(200)
            && let Some(write) = later.pop()
        {
            let offset = self.base.rng.below(16) * 8;
            let mem = MemRef { region: *region, offset, len: 1 + self.base.rng.below(300) as u32 };
            batch.send(write.conn, Tag::new(Tag::HEARTBEAT, 1), write.kind, &[mem], false);
            self.base.stats.attacks += 1;
        }
        for wr in &batch.wrs {
            if let (WrKind::WriteImm(remote, _), Tag::IO) = (wr.kind, wr.tag.kind())
                && self.base.rng.chance(200)
            {
                later.push(Wr { kind: WrKind::Write(remote), ..*wr });
            }
        }
    }

    fn input(&mut self, input: &Input) {
        *self.inputs += 1;
        note_input(self.base, self.number, input);
    }
}
