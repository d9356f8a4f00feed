//! One session and its devices: the core under a lock, and what carries out what it wants.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::thread;
use std::time::Duration;

use bowline_base::Instant;
use bowline_base::clock;
use bowline_block::{DiskDone, DiskEvent};
use bowline_rnbd::client::{
    Config, Core, DevId, DevInfo, DiskRequest, DoneIo, Event, ServiceMessage, SendIo, Token,
};
use bowline_rnbd::{Errno, Limits, SessionLimits};
use bowline_rtrs::{MemRef, RegionId};
use bowline_rtrs_driver::client::{
    Completed, Completer, Done, LinkEv, Permit, PermitKind, Region, Req, Session, SessionBuilder,
    Wait,
};
use bowline_rtrs_driver::{Dir, Engine};
use bowline_verbs::contain;
use bowline_wire::rnbd::{Access, OPEN_RSP_LEN};

use super::disk::Shared;
use crate::error::Error;

/// The tag of service messages; those of IO are slots.
const SERVICE: u64 = u64::MAX;
/// Bytes of memory that stay zero.
const ZEROES_LEN: u32 = 256 << 10;
/// The longest the timer sleeps without a timer.
const IDLE: Duration = Duration::from_secs(3600);

/// Who asked for a request.
pub(super) struct Told {
    pub(super) to: Arc<dyn DiskDone>,
    pub(super) tag: u64,
}

/// The permits of a session: one for each slot of the core, and one for service messages. They are
/// kept as long as anybody sends. Nobody else uses the session for requests, so none is asked for
/// again and again. A server with a single chunk has one for service messages, and IO has to use it
/// too [NB-60].
struct Permits {
    io: Vec<Permit>,
    service: Option<Permit>,
}

impl Permits {
    /// Takes all there are.
    fn take(session: &Session) -> Result<Self, Errno> {
        let mut all = Self { io: Vec::new(), service: None };
        let service = || session.get_permit(PermitKind::Service, Wait::No);
        all.io.extend(std::iter::from_fn(|| session.get_permit(PermitKind::Io, Wait::No)));
        all.service = service();
        if all.service.is_none() && all.io.len() == 1 {
            all.io.clear();
            all.service = service();
        }
        if all.service.is_none() { Err(Errno::ENOMEM) } else { Ok(all) }
    }

    /// How many IO messages may be under way.
    fn slots(&self) -> u16 {
        u16::try_from(self.io.len().max(1)).unwrap_or(u16::MAX)
    }

    /// The permit of the IO in a slot.
    fn of(&self, slot: u16) -> Option<&Permit> {
        self.io.get(usize::from(slot)).or(self.service.as_ref())
    }
}

/// What somebody waits for.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Wanted {
    Map,
    Remap,
    Unmap,
}

/// What a disk is to be told.
type News = (Arc<Shared>, DiskEvent, Option<Limits>);

struct State {
    core: Core<Told>,
    permits: Option<Arc<Permits>>,
    outcomes: BTreeMap<(DevId, Wanted), Result<(), Errno>>,
    disks: BTreeMap<DevId, Weak<Shared>>,
    /// Service messages that wait for the permit.
    orders: VecDeque<ServiceMessage>,
    /// The one that has it, and the bytes of its answer.
    asking: Option<(Token, usize)>,
    /// IO and service messages have the same permit: only one of them is under way.
    single: bool,
    /// IO messages that were not answered yet.
    sent: usize,
    news: VecDeque<News>,
    /// A thread tells the news.
    telling: bool,
    /// Who was told that time is up, until the request is over: they hold its memory.
    late: BTreeMap<u32, Arc<dyn DiskDone>>,
    scratch: Vec<Scratch>,
    /// When the timer wakes.
    armed: Option<Instant>,
    /// From then on nobody waits for devices to be given up: the server does not answer, or it is
    /// wanted so.
    hurry: Option<Instant>,
    closed: bool,
}

impl State {
    fn forget(&mut self) {
        self.core.cancel_unwanted(|told, op| told.to.is_wanted(op));
    }
}

/// Lists that are used again.
#[derive(Default)]
struct Scratch {
    sends: Vec<SendIo>,
    mems: Vec<MemRef>,
    failed: Vec<(u16, Errno)>,
    done: Vec<DoneIo<Told>>,
    ended: Vec<u32>,
    /// Let go of with no locks held, since that gives memory back.
    over: Vec<Arc<dyn DiskDone>>,
    results: Vec<(u64, i32)>,
}

/// What happens to a session before its link is there.
enum Gate {
    Early(Vec<LinkEv>),
    Open(Weak<Link>),
}

/// One session and its devices.
pub(super) struct Link {
    session: Arc<Session>,
    /// Longest time of a request.
    timeout: Option<Duration>,
    /// Connections of each path for polled IO.
    poll_queues: u16,
    /// Where the answers to service messages go, one at a time.
    answer: Region,
    /// What is written where zeroes have to be data; nothing else names it.
    _zeroes: Region,
    state: Mutex<State>,
    /// Wakes those who wait for outcomes.
    changed: Condvar,
    /// Wakes the timer.
    rearm: Condvar,
    me: Weak<Link>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Link {
    /// Opens a session and says hello.
    pub(super) fn open(
        engine: &Engine,
        builder: SessionBuilder,
        config: Config,
        poll_queues: u16,
    ) -> Result<Arc<Self>, Error> {
        let gate = Arc::new(Mutex::new(Gate::Early(Vec::new())));
        let at_gate = Arc::clone(&gate);
        let builder = builder.on_link(move |event| {
            let link = match &mut *lock(&at_gate) {
                Gate::Early(events) => {
                    events.push(event);
                    return;
                }
                Gate::Open(link) => link.upgrade(),
            };
            if let Some(link) = link {
                link.linked(event);
            }
        });
        let session = Session::open(engine, builder).map_err(|error| Error::rtrs(&error))?;
        let what = || format!("preparing session {}", session.name());
        let answer = session.region(OPEN_RSP_LEN).map_err(|error| Error::rtrs(&error))?;
        let permits = Permits::take(&session).map_err(|errno| Error::new(what(), errno))?;
        let zeroes = session.region(ZEROES_LEN as usize).map_err(|error| Error::rtrs(&error))?;
        let mut core = Core::new(config, permits.slots());
        core.set_zeroes(zeroes.id().0, ZEROES_LEN);
        let state = State {
            core,
            single: permits.io.is_empty(),
            sent: 0,
            permits: Some(Arc::new(permits)),
            outcomes: BTreeMap::new(),
            disks: BTreeMap::new(),
            orders: VecDeque::new(),
            asking: None,
            news: VecDeque::new(),
            telling: false,
            late: BTreeMap::new(),
            scratch: Vec::new(),
            armed: None,
            hurry: None,
            closed: false,
        };
        let link = Arc::new_cyclic(|me| Self {
            session: Arc::clone(&session),
            timeout: config.io_timeout,
            poll_queues,
            answer,
            _zeroes: zeroes,
            state: Mutex::new(state),
            changed: Condvar::new(),
            rearm: Condvar::new(),
            me: Weak::clone(me),
        });
        let timer = Arc::clone(&link);
        let thread = thread::Builder::new().name("bowline-rnbd".to_owned());
        thread.spawn(move || timer.run_timer()).map_err(|error| Error::io(what(), &error))?;
        link.linked(LinkEv::Reconnected);
        loop {
            let event = match &mut *lock(&gate) {
                Gate::Early(events) if !events.is_empty() => events.remove(0),
                gate => {
                    *gate = Gate::Open(Arc::downgrade(&link));
                    break;
                }
            };
            link.linked(event);
        }
        Ok(link)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    pub(super) const fn session(&self) -> &Arc<Session> {
        &self.session
    }

    pub(super) const fn has_timeout(&self) -> bool {
        self.timeout.is_some()
    }

    pub(super) const fn poll_queues(&self) -> u16 {
        self.poll_queues
    }

    /// The session was lost or is back [NB-16].
    fn linked(&self, event: LinkEv) {
        let attrs = self.session.attrs();
        let mut state = self.lock();
        match (event, attrs) {
            (LinkEv::Reconnected, Ok(attrs)) => {
                let max_segments = u16::try_from(attrs.max_segments).unwrap_or(u16::MAX);
                let limits = SessionLimits { max_io: attrs.max_io, max_segments };
                state.core.link_up(clock::now(), limits);
            }
            // Lost again already: that will be told too.
            (LinkEv::Reconnected, Err(_)) => {}
            (LinkEv::Disconnected, _) => {
                state.core.link_down(clock::now());
                // What was under way waits now.
                state.forget();
            }
        }
        self.advance(state);
    }

    /// Maps a device and waits for the outcome.
    pub(super) fn map(&self, name: &str, access: Access) -> Result<(DevId, Limits), Errno> {
        let mut state = self.lock();
        let dev = state.core.map(name, access)?;
        self.advance(state);
        self.outcome(dev, Wanted::Map)?;
        let limits = self.lock().core.limits(dev);
        Ok((dev, limits.ok_or(Errno::ENODEV)?))
    }

    /// From now on the disk is told what happens to its device.
    pub(super) fn attach(&self, dev: DevId, disk: &Arc<Shared>) {
        self.lock().disks.insert(dev, Arc::downgrade(disk));
    }

    /// Gives a device up and waits until it is gone: no longer than requests under way may take and
    /// then the word that says so, and than [`hurry`](Self::hurry) has it. What the server does not
    /// answer ends with the session.
    pub(super) fn unmap(&self, dev: DevId) -> Result<(), Errno> {
        let mut state = self.lock();
        state.core.unmap(dev)?;
        self.advance(state);
        let end = self.timeout.map(|timeout| clock::now() + timeout.saturating_mul(2));
        let outcome = self.outcome_by(dev, Wanted::Unmap, end);
        let mut state = self.lock();
        state.disks.remove(&dev);
        outcome.unwrap_or_else(|| {
            // Nor will it answer for others, of which it has not even heard yet.
            state.hurry = Some(clock::now());
            self.changed.notify_all();
            Ok(())
        })
    }

    /// Nobody waits longer than that for devices to be given up.
    pub(super) fn hurry(&self, patience: Duration) {
        let end = clock::now() + patience;
        let mut state = self.lock();
        state.hurry = Some(state.hurry.map_or(end, |at| at.min(end)));
        self.changed.notify_all();
    }

    /// From now on requests of a device do not wait for the session.
    pub(super) fn fail_fast(&self, dev: DevId) {
        let mut state = self.lock();
        state.core.fail_fast(dev);
        self.advance(state);
    }

    /// Ends requests that nobody wants any more.
    pub(super) fn forget(&self) {
        let mut state = self.lock();
        state.forget();
        self.advance(state);
    }

    /// Opens a closed device again and waits for the outcome.
    pub(super) fn remap(&self, dev: DevId) -> Result<(), Errno> {
        let mut state = self.lock();
        state.core.remap(clock::now(), dev)?;
        self.advance(state);
        self.outcome(dev, Wanted::Remap)
    }

    pub(super) fn resize(&self, dev: DevId, bytes: u64) -> Result<(), Errno> {
        let mut state = self.lock();
        let resized = state.core.resize(dev, bytes);
        self.advance(state);
        resized
    }

    pub(super) fn info(&self, dev: DevId) -> Option<DevInfo> {
        self.lock().core.infos().into_iter().find(|info| info.id == dev)
    }

    /// Takes requests of a device.
    pub(super) fn submit(&self, dev: DevId, requests: impl Iterator<Item = DiskRequest<Told>>) {
        let now = clock::now();
        let mut state = self.lock();
        for request in requests {
            state.core.submit(now, dev, request);
        }
        self.advance(state);
    }

    fn outcome(&self, dev: DevId, wanted: Wanted) -> Result<(), Errno> {
        self.outcome_by(dev, wanted, None).unwrap_or(Err(Errno::ETIMEDOUT))
    }

    /// Waits for an outcome; `None`: there was none in time, or, of an unmap, it is not to be
    /// waited for.
    fn outcome_by(
        &self,
        dev: DevId,
        wanted: Wanted,
        end: Option<Instant>,
    ) -> Option<Result<(), Errno>> {
        let mut state = self.lock();
        loop {
            if let Some(outcome) = state.outcomes.remove(&(dev, wanted)) {
                return Some(outcome);
            }
            if state.closed {
                return Some(Err(Errno::ENODEV));
            }
            let hurry = state.hurry.filter(|_| wanted == Wanted::Unmap);
            let end = [end, hurry].into_iter().flatten().min();
            let left = end.map_or(IDLE, |end| end.saturating_since(clock::now()));
            if left.is_zero() {
                return None;
            }
            let waited = self.changed.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Carries out what the core wants, until it wants nothing more.
    fn advance<'a>(&'a self, mut state: MutexGuard<'a, State>) {
        let mut scratch = state.scratch.pop().unwrap_or_default();
        loop {
            while let Some(order) = state.core.poll_service_message() {
                state.orders.push_back(order);
            }
            let asks = state.asking.is_some() || !state.orders.is_empty();
            if !(state.single && asks) {
                state.core.take_sends(&mut scratch.sends);
                state.sent += scratch.sends.len();
            }
            state.core.take_done(&mut scratch.done);
            for io in &scratch.done {
                state.late.extend(io.late.map(|number| (number, Arc::clone(&io.done.to))));
            }
            state.core.take_ended(&mut scratch.ended);
            for number in scratch.ended.drain(..) {
                scratch.over.extend(state.late.remove(&number));
            }
            self.take_events(&mut state);
            let free = state.asking.is_none() && !(state.single && state.sent > 0);
            let order = if free { state.orders.pop_front() } else { None };
            if let Some(order) = &order {
                state.asking = Some((order.token, order.room as usize));
            }
            let telling = !state.news.is_empty() && !state.telling;
            let idle =
                scratch.sends.is_empty() && scratch.done.is_empty() && scratch.over.is_empty();
            if idle && order.is_none() && !telling {
                break;
            }
            let permits = state.permits.clone();
            drop(state);
            self.send(permits.as_deref(), &mut scratch);
            let refused = order.and_then(|order| {
                let sent = self.ask(permits.as_deref(), &order);
                sent.err().map(|errno| (order.token, errno))
            });
            drop(permits);
            tell(&mut scratch);
            scratch.over.clear();
            if telling {
                self.tell_news();
            }
            state = self.lock();
            if !scratch.failed.is_empty() || refused.is_some() {
                let now = clock::now();
                state.sent -= scratch.failed.len();
                for (slot, errno) in scratch.failed.drain(..) {
                    state.core.send_failed(now, slot, errno);
                }
                if let Some((token, errno)) = refused {
                    state.asking = None;
                    state.core.service_answer(now, token, errno.neg(), &[]);
                }
            }
        }
        state.scratch.push(scratch);
        let next = state.core.poll_timeout();
        if next.is_some_and(|next| state.armed.is_none_or(|armed| next < armed)) {
            self.rearm.notify_one();
        }
    }

    fn take_events(&self, state: &mut State) {
        while let Some(event) = state.core.poll_event() {
            let (dev, news) = match event {
                Event::Mapped { dev, result } => {
                    state.outcomes.insert((dev, Wanted::Map), result);
                    self.changed.notify_all();
                    continue;
                }
                Event::Remapped { dev, result } => {
                    state.outcomes.insert((dev, Wanted::Remap), result);
                    self.changed.notify_all();
                    continue;
                }
                Event::Unmapped { dev } => {
                    state.outcomes.insert((dev, Wanted::Unmap), Ok(()));
                    self.changed.notify_all();
                    continue;
                }
                Event::Online { dev } => (dev, DiskEvent::Online),
                Event::Offline { dev } => (dev, DiskEvent::Offline),
                Event::Resized { dev, bytes } => (dev, DiskEvent::Resized(bytes)),
                Event::Gone { dev } => (dev, DiskEvent::Gone),
                _ => continue,
            };
            if let Some(disk) = state.disks.get(&dev).and_then(Weak::upgrade) {
                let limits = state.core.limits(dev);
                state.news.push_back((disk, news, limits));
            }
        }
    }

    /// Tells disks what happened, in order, by one thread at a time.
    fn tell_news(&self) {
        let mut state = self.lock();
        if state.telling {
            return;
        }
        state.telling = true;
        while let Some((disk, event, limits)) = state.news.pop_front() {
            drop(state);
            disk.tell(event, limits);
            // Not while the link is locked: this may be the last of it, and of the program's
            // listeners.
            drop(disk);
            state = self.lock();
        }
        state.telling = false;
    }

    /// Sends IO messages, all with one call if none is refused.
    fn send(&self, permits: Option<&Permits>, scratch: &mut Scratch) {
        let Scratch { sends, mems, failed, .. } = scratch;
        if sends.is_empty() {
            return;
        }
        let (Some(permits), Some(me)) = (permits, self.me.upgrade()) else {
            failed.extend(sends.drain(..).map(|io| (io.slot, Errno::ECONNABORTED)));
            return;
        };
        let to: Arc<dyn Completer> = me;
        mems.clear();
        mems.extend(sends.iter().map(|io| {
            io.data.map_or_else(MemRef::default, |data| MemRef {
                region: RegionId(data.region),
                offset: data.offset,
                len: data.len,
            })
        }));
        let mut from = 0;
        while let Some(rest) = sends.get(from..).filter(|rest| !rest.is_empty()) {
            let mut requests = rest.iter().zip(&mems[from..]).map_while(|(io, mem)| {
                Some(Req {
                    dir: io.dir,
                    // Every slot has one.
                    permit: permits.of(io.slot)?,
                    usr: &io.usr,
                    data: if io.data.is_some() { std::slice::from_ref(mem) } else { &[] },
                    done: Done { to: Arc::clone(&to), tag: u64::from(io.slot) },
                })
            });
            match self.session.request_batch_here(&mut requests) {
                Ok(0) => break,
                Ok(count) => from += count,
                Err(error) => {
                    failed.push((rest[0].slot, error.errno()));
                    from += 1;
                }
            }
        }
        sends.clear();
    }

    /// Sends a service message.
    fn ask(&self, permits: Option<&Permits>, order: &ServiceMessage) -> Result<(), Errno> {
        let permit = permits.and_then(|permits| permits.service.as_ref());
        let (Some(permit), Some(me)) = (permit, self.me.upgrade()) else {
            return Err(Errno::ECONNABORTED);
        };
        let done = Done { to: me, tag: SERVICE };
        // What a server leaves out of its answer must not be taken from the one before.
        self.answer.buffer().write(0, &[0; OPEN_RSP_LEN]);
        let piece = [self.answer.piece(0, order.room)];
        let (dir, data) =
            if order.room > 0 { (Dir::Read, &piece[..]) } else { (Dir::Write, &[][..]) };
        let sent = self.session.request(dir, permit, &order.usr, data, done);
        sent.map_err(|error| error.errno())
    }

    /// The thread that does what is due.
    fn run_timer(&self) {
        let mut state = self.lock();
        while !state.closed {
            let now = clock::now();
            let next = state.core.poll_timeout();
            if next.is_some_and(|at| at <= now) {
                state.core.handle_timeout(now);
                self.advance(state);
                state = self.lock();
                continue;
            }
            state.armed = next;
            let wait = next.map_or(IDLE, |at| at.saturating_since(now));
            state = self.rearm.wait_timeout(state, wait).unwrap_or_else(PoisonError::into_inner).0;
            state.armed = None;
        }
    }

    /// Ends the session and waits until it is closed. Nothing is mapped any more.
    pub(super) fn close(&self) {
        self.abandon();
        let permits = self.lock().permits.take();
        drop(permits);
        Arc::clone(&self.session).close();
    }

    /// Ends the session when nobody uses it any more.
    pub(super) fn abandon(&self) {
        let mut state = self.lock();
        state.closed = true;
        // Whoever holds a disk still is told that it is gone.
        for info in state.core.infos() {
            // Those on their way out go on.
            let _ = state.core.unmap(info.id);
        }
        self.changed.notify_all();
        self.rearm.notify_all();
        self.advance(state);
    }
}

/// Tells who asked what requests came to.
fn tell(scratch: &mut Scratch) {
    let Scratch { done, results, .. } = scratch;
    let mut from = 0;
    while let Some(first) = done.get(from) {
        let to = &first.done.to;
        let same = done[from..].iter().take_while(|io| Arc::ptr_eq(&io.done.to, to));
        results.clear();
        results.extend(same.map(|io| (io.done.tag, io.errno)));
        contain(|| to.done(results));
        from += results.len();
    }
    done.clear();
}

impl Completer for Link {
    fn completed(&self, done: &[Completed]) {
        let now = clock::now();
        let mut state = self.lock();
        for Completed { tag, errno } in done {
            match u16::try_from(*tag) {
                Ok(slot) => {
                    state.sent -= 1;
                    state.core.io_answer(now, slot, *errno);
                }
                Err(_) => {
                    let Some((token, room)) = state.asking.take() else { continue };
                    let mut data = [0; OPEN_RSP_LEN];
                    let data = &mut data[..room.min(OPEN_RSP_LEN)];
                    self.answer.buffer().read(0, data);
                    state.core.service_answer(now, token, *errno, data);
                }
            }
        }
        self.advance(state);
    }
}
