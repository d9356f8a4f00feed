//! The server: sessions, exports, storage.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use bowline_rnbd::server::{Act, CheckedIo, Core, CoreLimits, ExportId, Reply, SessKey, Ticket};
use bowline_rnbd::{Errno, IoOp};
use bowline_rtrs::bind::{Binding, Ports, withdraw};
use bowline_rtrs::server::{OpId, Request, Server as Sessions, ServerConfig, ServerEvent, SessId};
use bowline_rtrs::{Batch, ConnId, Input, MemRef, Order, PortId, RegionId, Tag, Wr, WrKind};
use bowline_verbs::{Access, Buffer, next_key};
use bowline_wire::rnbd::{Access as DiskAccess, status_of_errno};
use bowline_wire::rtrs::Imm;

use super::context::{Base, Event};
use super::disk::Disk;
use super::fabric::{Intercept, Own, bench, drain};
use super::process::{Process, Translated, translate};
use super::reach::{self, Misdeed};
use super::sabotage::{Sabotage, SmallIds};
use crate::engine::queue::MS;
use crate::roce::host::Host;

/// Longest time in nanoseconds that opening an export takes.
const OPEN_MAX: u64 = 5 * MS;

/// An operation of storage.
#[derive(Debug)]
struct Operation {
    op: OpId,
    session: SessId,
    export: ExportId,
    io: CheckedIo,
    data: MemRef,
    room: u32,
    chunks: Arc<Buffer>,
    /// The contents of the chunk when the request came.
    before: Vec<u8>,
    /// The request was answered before the operation was carried out.
    answered: bool,
}

/// A message to be answered later.
#[derive(Debug)]
struct Waiting {
    op: OpId,
    session: SessId,
    data: MemRef,
    room: u32,
    chunks: Arc<Buffer>,
}

/// State that is lost when the machine dies.
#[derive(Debug)]
pub(crate) struct Running {
    pub(crate) sessions: Sessions,
    binding: Binding,
    own: Vec<Own>,
    core: Core,
    operations: BTreeMap<u64, Operation>,
    numbers: u64,
    waiting: BTreeMap<Ticket, Waiting>,
    opening: BTreeMap<u32, (Vec<u8>, DiskAccess)>,
    /// Memory of the disks whose READs are answered from it directly.
    regions: BTreeMap<ExportId, RegionId>,
    /// Device ids by session; empty unless [`Sabotage::SmallIds`] is on.
    small_ids: BTreeMap<SessId, SmallIds>,
    pub(crate) closed: bool,
}

/// The server.
#[derive(Debug)]
pub(crate) struct Server {
    pub(crate) process: Process,
    config: ServerConfig,
    pub(crate) disks: Vec<Disk>,
    /// By disk: whether chunks of its client must not change while the server has them.
    must_not_change: Vec<bool>,
    /// The server misbehaves: it uses keys of clients after its response, and does not always
    /// invalidate them.
    misbehaving: bool,
    /// Writes that a misbehaving server will repeat.
    later: VecDeque<(Wr, Vec<MemRef>)>,
    /// No operation takes longer than usual any more.
    pub(crate) calm: bool,
    pub(crate) running: Option<Running>,
}

impl Server {
    pub(crate) fn new(
        config: ServerConfig,
        disks: Vec<Disk>,
        must_not_change: Vec<bool>,
        misbehaving: bool,
        look: u64,
    ) -> Self {
        let process = Process::new(0, look);
        let (later, calm, running) = (VecDeque::new(), false, None);
        Self { process, config, disks, must_not_change, misbehaving, later, calm, running }
    }

    /// Starts the server.
    pub(crate) fn start(
        &mut self,
        base: &mut Base,
        hosts: &mut [Host],
        burst: Option<usize>,
    ) -> Result<(), String> {
        let wrong = |e: bowline_verbs::Error| format!("server: {e}");
        let mut binding = Binding::of_server(hosts.len());
        let mut own = Vec::new();
        for (port, host) in hosts.iter_mut().enumerate() {
            let device = host.device.as_mut().ok_or("a device is missing")?;
            own.push(Own::new(device, burst).map_err(wrong)?);
            device.arm_cq(own[port].cq, false).map_err(wrong)?;
            binding.listen(PortId(port as u8), host.listener.ok_or("nobody listens")?);
        }
        let now = base.instant();
        let attrs = bench(hosts, &own, now).ok_or("a device is missing")?.attrs();
        let mut sessions =
            Sessions::new(self.config.clone(), &attrs).map_err(|e| format!("server: {e:?}"))?;
        let direct = self.disks.iter().enumerate().filter(|(_, disk)| disk.plan.direct);
        let regions = direct.map(|(at, disk)| {
            let contents = Arc::clone(&disk.contents);
            (ExportId(at as u32), sessions.add_region(contents, Access::LOCAL_WRITE))
        });
        let regions = regions.collect();
        let first_id = base.rng.below(1 << 32) as u32;
        self.running = Some(Running {
            sessions,
            binding,
            own,
            core: Core::new(CoreLimits::default(), first_id),
            operations: BTreeMap::new(),
            numbers: 0,
            waiting: BTreeMap::new(),
            opening: BTreeMap::new(),
            regions,
            small_ids: BTreeMap::new(),
            closed: false,
        });
        self.pump(base, hosts);
        Ok(())
    }

    /// Handles the death of the server's machine.
    pub(crate) fn died(&mut self, base: &mut Base) {
        self.count(base);
        self.process.stop();
        self.later.clear();
        self.running = None;
        self.disks.iter_mut().for_each(|disk| disk.crash(&mut base.rng));
    }

    /// Adds the counters since the last start to the run's statistics.
    pub(crate) fn count(&self, base: &mut Base) {
        let Some(running) = &self.running else { return };
        let counters = running.sessions.counters();
        reach::counted(&mut base.coverage, counters);
        base.stats.waits += counters.requests_waited;
        base.stats.late_answers += counters.answers_dropped;
        base.stats.violations += counters.paths_violated;
    }

    /// Handles events of the devices.
    pub(crate) fn poll(&mut self, base: &mut Base, hosts: &mut [Host]) {
        let now = base.instant();
        while let Some((port, notice)) = self.process.inbox.pop_front() {
            let Some(running) = &mut self.running else { return };
            let Some(mut bench) = bench(hosts, &running.own, now) else { return };
            match translate(base, &mut running.binding, &mut bench, &running.own, port, notice) {
                Translated::Nothing => {}
                Translated::Input(input) => {
                    note_input(base, &input);
                    running.sessions.handle(now, input);
                }
                Translated::Dones(dones) => {
                    base.note([32, dones.len() as u64, 0], || format!("server: {dones:?}"));
                    running.sessions.handle_done(now, &dones);
                    let (mut batch, mut failed) = (Batch::default(), Vec::new());
                    running.sessions.take_withdraws(&mut batch);
                    if base.sabotages(Sabotage::NoWithdraw, 1000) {
                        batch.withdraw.clear();
                    }
                    let early = base.sabotages(Sabotage::EarlyRenew, 1000);
                    let early = if early { batch.withdraw.clone() } else { Vec::new() };
                    withdraw(&mut bench, &mut batch, &mut failed);
                    for (port, key) in early {
                        let _ = bench.port(port).renew_keys(&[(key, next_key(key))]);
                    }
                    running.sessions.process(now, &failed);
                }
            }
            self.pump(base, hosts);
        }
        self.pump(base, hosts);
    }

    /// Runs timers that are due.
    pub(crate) fn wake(&mut self, base: &mut Base, hosts: &mut [Host]) {
        let now = base.instant();
        if let Some(running) = &mut self.running {
            running.sessions.handle_timeout(now);
        }
        self.pump(base, hosts);
    }

    /// Closes all sessions.
    pub(crate) fn close(&mut self, base: &mut Base, hosts: &mut [Host]) {
        let now = base.instant();
        if let Some(running) = &mut self.running
            && !base.sabotages(Sabotage::StayOpen, 1000)
        {
            running.sessions.close(now);
        }
        self.pump(base, hosts);
    }

    /// Closes a random path.
    pub(crate) fn kick(&mut self, base: &mut Base, hosts: &mut [Host]) {
        let now = base.instant();
        let Some(running) = &mut self.running else { return };
        let infos: Vec<_> = running.sessions.sessions().collect();
        let paths: Vec<_> = infos.iter().flat_map(|s| &s.paths).map(|p| p.path).collect();
        if !paths.is_empty() {
            let path = base.rng.pick(&paths);
            base.note([33, path.slot.into(), 0], || format!("server: closes {path:?}"));
            running.sessions.disconnect_path(now, path);
        }
        self.pump(base, hosts);
    }

    /// Runs the cores until nothing moves any more.
    fn pump(&mut self, base: &mut Base, hosts: &mut [Host]) {
        if self.process.is_silent(base) {
            return;
        }
        let now = base.instant();
        while base.failure.is_none() {
            let Some(running) = &mut self.running else { return };
            let Some(mut bench) = bench(hosts, &running.own, now) else { return };
            let misbehaving = (self.misbehaving && !self.calm).then_some(&mut self.later);
            let invalidate = self.config.always_invalidate;
            let mut intercept = Interceptor { base: &mut *base, invalidate, misbehaving };
            let Running { sessions, binding, .. } = running;
            drain(sessions, binding, &mut bench, now, &mut intercept);
            running.sessions.check_invariants();
            let mut requests = Vec::new();
            running.sessions.take_requests(&mut requests);
            let mut moved = !requests.is_empty();
            for request in requests {
                self.request(base, request);
            }
            moved |= self.events(base) | self.answers(base);
            if !moved {
                break;
            }
        }
        if let Some(running) = &self.running {
            self.process.wake(base, running.sessions.poll_timeout());
        }
    }

    fn events(&mut self, base: &mut Base) -> bool {
        let now = base.instant();
        let Some(running) = &mut self.running else { return false };
        let mut moved = false;
        while let Some(event) = running.sessions.poll_event() {
            moved = true;
            base.note([34, 0, 0], || format!("server: {event:?}"));
            match event {
                ServerEvent::Up { session, name, first: true, .. } => {
                    running.core.link_up(SessKey(session.pack()), name.as_str());
                    running.sessions.answer_link(now, session, true);
                }
                ServerEvent::Down { session } => running.core.link_down(SessKey(session.pack())),
                ServerEvent::Closed => {
                    running.closed = !base.sabotages(Sabotage::LoseClosed, 1000);
                }
                _ => {}
            }
        }
        moved
    }

    /// Handles a request of a client.
    fn request(&mut self, base: &mut Base, request: Request) {
        let now = base.instant();
        let Some(running) = &mut self.running else { return };
        let key = SessKey(request.session.pack());
        let Some(chunks) = running.sessions.memory(request.session).map(Arc::clone) else {
            return base.fail(|| format!("server: {request:?} without memory"));
        };
        let Request { op, dir, data, room, ref usr, session } = request;
        base.note([35, op.slot.into(), data.offset], || {
            format!("server: {op:?} of {session:?}: {dir:?} {data:?} room {room} {:02x?}", &usr[..])
        });
        if base.sabotages(Sabotage::DropRequest, 20)
            || base.final_io && base.sabotages(Sabotage::DeafToFinalIo, 1000)
        {
            return;
        }
        if base.sabotage == Some(Sabotage::SmallIds) {
            running.small_ids.entry(session).or_default();
        }
        let mut small_ids = running.small_ids.get_mut(&session);
        let translated = small_ids.as_mut().map(|ids| ids.message(usr));
        let usr = translated.as_deref().unwrap_or(usr);
        let act = running.core.message(key, dir, room, data.len, usr);
        match act {
            Act::Reply { errno, data: reply } => {
                let reply = small_ids.map_or(reply, |ids| ids.reply(reply));
                let errno = written(&chunks, data, room, &reply, errno);
                running.sessions.respond(now, op, errno, None);
            }
            Act::Open { ticket, name, access } => {
                running.waiting.insert(ticket, Waiting { op, session, data, room, chunks });
                running.opening.insert(ticket.0, (name, access));
                let boot = self.process.boot;
                base.schedule_within(OPEN_MAX, Event::Opened { boot, ticket: ticket.0 });
            }
            Act::Later { ticket } => {
                running.waiting.insert(ticket, Waiting { op, session, data, room, chunks });
            }
            Act::Io { export, io } => {
                base.stats.operations += 1;
                let mut before = Vec::new();
                if io.op == IoOp::Write {
                    chunks.append_to(data.offset as usize, data.len as usize, &mut before);
                }
                running.numbers += 1;
                let number = running.numbers;
                let plan = &self.disks[export.0 as usize].plan;
                let slow = !self.calm && base.rng.chance(plan.slow);
                let takes = if slow { plan.takes.1 } else { plan.takes.0 };
                let boot = self.process.boot;
                base.schedule_within(takes, Event::Stored { boot, number });
                let answered = io.op == IoOp::Write && base.sabotages(Sabotage::EarlyAnswer, 300);
                if answered {
                    running.core.io_done(io.open);
                    running.sessions.respond(now, op, 0, None);
                }
                let operation =
                    Operation { op, session, export, io, data, room, chunks, before, answered };
                running.operations.insert(number, operation);
            }
            other => base.fail(|| format!("server: {other:?}, of which nothing is known")),
        }
    }

    /// Sends responses that were delayed, and releases exports no longer in use.
    fn answers(&mut self, base: &mut Base) -> bool {
        let now = base.instant();
        let Some(running) = &mut self.running else { return false };
        let mut moved = false;
        while let Some(answer) = running.core.poll_answer() {
            moved = true;
            let Some(waiting) = running.waiting.remove(&answer.ticket) else {
                base.fail(|| format!("server: {answer:?} for nobody"));
                break;
            };
            let Waiting { op, session, data, room, chunks } = waiting;
            let small_ids = running.small_ids.get_mut(&session);
            let reply = small_ids.map_or(answer.data, |ids| ids.reply(answer.data));
            let errno = written(&chunks, data, room, &reply, answer.errno);
            running.sessions.respond(now, op, errno, None);
        }
        while running.core.poll_release().is_some() {
            moved = true;
        }
        running.core.check_invariants();
        moved
    }

    /// Completes the opening of an export.
    pub(crate) fn opened(&mut self, base: &mut Base, hosts: &mut [Host], ticket: u32) {
        let Some(running) = &mut self.running else { return };
        let Some((name, _)) = running.opening.remove(&ticket) else { return };
        let number = std::str::from_utf8(&name).ok().and_then(|name| name.strip_prefix("disk"));
        let number = number.and_then(|number| number.parse::<usize>().ok());
        let disk = number.and_then(|number| Some((number, self.disks.get(number)?)));
        let result = disk.ok_or(Errno::ENOENT);
        let result = result.map(|(number, disk)| (ExportId(number as u32), disk.limits()));
        running.core.opened(Ticket(ticket), result);
        self.pump(base, hosts);
    }

    /// Completes an operation of storage.
    pub(crate) fn stored(&mut self, base: &mut Base, hosts: &mut [Host], number: u64) {
        let now = base.instant();
        let Some(running) = &mut self.running else { return };
        let Some(operation) = running.operations.remove(&number) else { return };
        let Operation { op, export, io, data, room, chunks, before, answered, session } = operation;
        let disk = &mut self.disks[export.0 as usize];
        let must_not_change = self.must_not_change[export.0 as usize];
        base.note([36, op.slot.into(), number], || {
            format!("server: {op:?} of {session:?} is done: {io:?}")
        });
        let mut from = None;
        match io.op {
            IoOp::Write => {
                let mut bytes = Vec::new();
                chunks.append_to(data.offset as usize, io.len as usize, &mut bytes);
                if must_not_change && !answered && bytes != before[..bytes.len()] {
                    base.fail(|| {
                        format!("{op:?}: its chunk has changed while the server had it: {io:?}")
                    });
                }
                let bytes = if answered { &before[..io.len as usize] } else { &bytes[..] };
                disk.write(io.offset, bytes, io.fua);
            }
            IoOp::Read => match running.regions.get(&export) {
                Some(&region) => {
                    from = Some(MemRef { region, offset: io.offset, len: io.len });
                }
                None => {
                    let (at, to) = (io.offset as usize, data.offset as usize);
                    disk.contents.copy_to(at, &chunks, to, io.len.min(room) as usize);
                }
            },
            op => disk.carry_out(op, io.offset, io.len, &mut base.rng),
        }
        if !answered {
            running.core.io_done(io.open);
            running.sessions.respond(now, op, -i32::from(status_of_errno(0)), from);
        }
        if base.sabotages(Sabotage::DoubleWrite, 200) && io.op == IoOp::Write {
            // A repeated write: what a request that was overtaken by its repetition would do, if
            // the server did not make it wait.
            running.numbers += 1;
            let number = running.numbers;
            let operation =
                Operation { op, session, export, io, data, room, chunks, before, answered: true };
            running.operations.insert(number, operation);
            let boot = self.process.boot;
            base.schedule_within(200 * MS, Event::Stored { boot, number });
        }
        self.pump(base, hosts);
    }

    /// Ends the server and checks that nothing of it is left.
    pub(crate) fn end(&mut self, base: &mut Base, hosts: &mut [Host]) {
        self.count(base);
        let Some(mut running) = self.running.take() else { return };
        self.later.clear();
        let regions: Vec<RegionId> = running.regions.values().copied().collect();
        regions.into_iter().for_each(|region| running.sessions.drop_region(region));
        let now = base.instant();
        if let Some(mut bench) = bench(hosts, &running.own, now) {
            let invalidate = self.config.always_invalidate;
            let mut intercept = Interceptor { base: &mut *base, invalidate, misbehaving: None };
            let Running { sessions, binding, .. } = &mut running;
            drain(sessions, binding, &mut bench, now, &mut intercept);
        }
        let left = running.waiting.len() + running.opening.len();
        let opens = running.core.opens();
        if left > 0 || !opens.is_empty() {
            base.fail(|| format!("server: {left} messages and {opens:?} are left"));
        }
        if !running.binding.is_empty() {
            base.fail(|| "server: its binding is not empty".into());
        }
        for (host, own) in hosts.iter_mut().zip(&running.own) {
            let Some(device) = &mut host.device else { continue };
            let ended = device.destroy_cq(own.cq).and_then(|()| device.dealloc_pd(own.pd));
            base.judge(ended.map_err(|e| format!("server: at its end: {e}")));
            if let Some(listener) = host.listener.take() {
                let ended = device.destroy_id(now, listener);
                base.judge(ended.map_err(|e| format!("server: at its end: {e}")));
            }
        }
    }
}

/// Writes the response data where the client's READ expects it; returns the errno of the response.
fn written(chunks: &Buffer, data: MemRef, room: u32, reply: &Reply, errno: i32) -> i32 {
    let bytes = reply.bytes();
    if bytes.is_empty() {
        return errno;
    }
    let room = room.min(data.len) as usize;
    if bytes.len() > room {
        return Errno::EINVAL.neg();
    }
    let mut all = vec![0; room];
    all[..bytes.len()].copy_from_slice(bytes);
    chunks.write(data.offset as usize, &all);
    errno
}

fn note_input(base: &mut Base, input: &Input) {
    base.note([31, 0, 0], || format!("server: {input:?}"));
}

/// Records, and in sabotaged runs modifies, everything that the server's core gives to its devices.
struct Interceptor<'a> {
    base: &'a mut Base,
    invalidate: bool,
    /// Writes that a misbehaving server will repeat.
    misbehaving: Option<&'a mut VecDeque<(Wr, Vec<MemRef>)>>,
}

impl Interceptor<'_> {
    /// Leaves keys for the client to invalidate, and writes with keys that were invalidated by a
    /// response.
    fn misbehave(&mut self, batch: &mut Batch) {
        let Some(later) = &mut self.misbehaving else { return };
        let extra = &mut self.base.extra;
        let mut left = 0;
        batch.wrs.retain(|wr| {
            let leaves = matches!(wr.kind, WrKind::SendInv(_)) && extra.chance(200);
            left += u64::from(leaves);
            !leaves
        });
        self.base.base.stats.keys_left += left;
        if left > 0 {
            reach::misdeed(&mut self.base.base.coverage, Misdeed::KeyLeft);
        }
        if extra.chance(100)
            && let Some((write, mems)) = later.pop_front()
        {
            batch.send(write.conn, Tag::new(Tag::HEARTBEAT, 1), write.kind, &mems, false);
            self.base.base.stats.late_writes += 1;
            reach::misdeed(&mut self.base.base.coverage, Misdeed::LateWrite);
        }
        let gone: Vec<(ConnId, u32)> = (batch.wrs.iter())
            .filter_map(|wr| match wr.kind {
                WrKind::SendInv(key) => Some((wr.conn, key)),
                _ => None,
            })
            .collect();
        for wr in &batch.wrs {
            if let (WrKind::Write(remote), Tag::REPLY) = (wr.kind, wr.tag.kind())
                && gone.contains(&(wr.conn, remote.rkey))
                && extra.chance(100)
            {
                later.push_back((*wr, batch.mems_of(wr).to_vec()));
            }
        }
        // A write that waits too long might find its key in use again [RT-42].
        later.truncate(4);
    }
}

impl Intercept for Interceptor<'_> {
    fn order(&mut self, order: Order) -> Option<Order> {
        self.base.note([37, 0, 0], || match &order {
            Order::AddRegion { region, buffer, granule, ports, path, .. } => {
                let len = buffer.len();
                format!("server: AddRegion {region:?} {len} {granule:?} {ports:?} {path:?}")
            }
            order => format!("server: {order:?}"),
        });
        let leak = matches!(order, Order::DropRegion { .. });
        if leak && self.base.sabotages(Sabotage::LeakRegion, 300) {
            return None;
        }
        Some(order)
    }

    fn batch(&mut self, batch: &mut Batch) {
        let sends = batch.wrs.len() as u64;
        self.base.note([38, sends, 0], || {
            let (renew, receives) = (&batch.renew, batch.recvs.len());
            format!("server: {:?}, {renew:?}, {receives} receives", batch.wrs)
        });
        if !batch.withdraw.is_empty() {
            self.base.fail(|| "server: keys are to be withdrawn after the requests".into());
        }
        if self.base.sabotages(Sabotage::NoWithdraw, 1000) {
            // Too late, but a key can be renewed only after it was withdrawn.
            batch.withdraw.extend(batch.renew.iter().map(|(port, old, _)| (*port, *old)));
        }
        self.misbehave(batch);
        if self.invalidate && self.base.sabotages(Sabotage::StaleKey, 50) {
            for (_, _, new) in &mut batch.renew {
                *new ^= 1;
            }
        }
        if self.invalidate && self.base.sabotages(Sabotage::NoRenew, 50) {
            batch.renew.clear();
        }
        if self.base.sabotages(Sabotage::WrongId, 50) {
            for wr in &mut batch.wrs {
                let (WrKind::SendImm(imm) | WrKind::WriteImm(_, imm)) = &mut wr.kind else {
                    continue;
                };
                if let Imm::Done { id, errno, invalidated } = Imm::from_u32(*imm) {
                    *imm = Imm::Done { id: id ^ 1, errno, invalidated }.to_u32();
                }
            }
        }
    }

    fn input(&mut self, input: &Input) {
        note_input(self.base, input);
    }
}
