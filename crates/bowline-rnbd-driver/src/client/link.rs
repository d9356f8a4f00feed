//! One session and its devices: the core under a lock, and the code that carries out its actions.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::thread;
use std::time::Duration;

use bowline_base::Instant;
use bowline_base::clock;
use bowline_block::{DiskDone, DiskEvent};
use bowline_rnbd::client::{
    Config, Core, DevId, DevInfo, DiskRequest, DoneIo, Event, SendIo, ServiceMessage, Token,
};
use bowline_rnbd::{Errno, Failures, Limits, SessionLimits};
use bowline_rtrs::{MemRef, RegionId};
use bowline_rtrs_driver::client::{
    Completed, Completer, Done, LinkEv, Permit, PermitKind, Region, Req, Session, SessionBuilder,
    Wait,
};
use bowline_rtrs_driver::{Dir, Engine};
use bowline_verbs::catch_callback_panic;
use bowline_wire::rnbd::{Access, OPEN_RSP_LEN};

use super::disk::DiskShared;
use crate::error::Error;

/// Tag of service messages; the tag of an IO message is its slot.
const SERVICE: u64 = u64::MAX;
/// Length in bytes of the memory that stays zero.
const ZEROES_LEN: u32 = 256 << 10;
/// Longest sleep of the timer thread when no timer is set.
const IDLE: Duration = Duration::from_secs(3600);

/// The completion of a request: callback and tag.
pub(super) struct Completion {
    pub(super) to: Arc<dyn DiskDone>,
    pub(super) tag: u64,
}

/// The permits of a session: one for each slot of the core, and one for service messages. The link
/// takes them once and keeps them while it sends, since nothing else sends requests on the session.
/// A server with a single chunk grants only the service permit, which IO then shares [NB-60].
struct Permits {
    io: Vec<Permit>,
    service: Option<Permit>,
}

impl Permits {
    /// Takes all permits of the session.
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

    /// Returns how many IO messages may be in flight.
    fn slots(&self) -> u16 {
        u16::try_from(self.io.len().max(1)).unwrap_or(u16::MAX)
    }

    /// Returns the permit for the IO in a slot.
    fn for_slot(&self, slot: u16) -> Option<&Permit> {
        self.io.get(usize::from(slot)).or(self.service.as_ref())
    }
}

/// A call that a thread waits for.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum PendingCall {
    Map,
    Remap,
    Unmap,
}

/// An event to report to a disk's listeners, with the new limits.
type DiskNotice = (Arc<DiskShared>, DiskEvent, Option<Limits>);

struct State {
    core: Core<Completion>,
    permits: Option<Arc<Permits>>,
    outcomes: BTreeMap<(DevId, PendingCall), Result<(), Errno>>,
    disks: BTreeMap<DevId, Weak<DiskShared>>,
    /// Service messages that wait for the service permit.
    service_queue: VecDeque<ServiceMessage>,
    /// The service message in flight, and the length of its answer in bytes.
    service_in_flight: Option<(Token, usize)>,
    /// IO and service messages share one permit: only one of them is in flight.
    shared_permit: bool,
    /// Number of IO messages that were not answered yet.
    ios_in_flight: usize,
    notices: VecDeque<DiskNotice>,
    /// A thread is delivering notices.
    delivering: bool,
    /// Completions of requests whose time was up, by request. They own the memory of the request
    /// and are kept until the server no longer uses it.
    late_requests: BTreeMap<u32, Arc<dyn DiskDone>>,
    scratch: Vec<Scratch>,
    /// When the timer thread wakes.
    timer_armed_for: Option<Instant>,
    /// From this time on, unmaps no longer wait for the server.
    unmap_deadline: Option<Instant>,
    closed: bool,
}

impl State {
    fn cancel_unwanted(&mut self) {
        self.core.cancel_unwanted(|completion, op| completion.to.is_wanted(op));
    }
}

/// Lists that are reused to save allocations.
#[derive(Default)]
struct Scratch {
    sends: Vec<SendIo>,
    mems: Vec<MemRef>,
    failed: Vec<(u16, Errno)>,
    done: Vec<DoneIo<Completion>>,
    ended: Vec<u32>,
    /// Completions to drop with no locks held, since dropping them frees memory.
    released: Vec<Arc<dyn DiskDone>>,
    results: Vec<(u64, i32)>,
}

/// Events of a session: buffered until its link exists, then delivered to it.
enum EarlyEvents {
    Buffered(Vec<LinkEv>),
    Delivered(Weak<Link>),
}

/// One session and its devices.
pub(super) struct Link {
    session: Arc<Session>,
    /// Longest time of a request.
    timeout: Option<Duration>,
    /// Connections of each path for polled IO.
    poll_queues: u16,
    /// Memory that receives the answer to the service message in flight.
    answer: Region,
    /// Memory that zeroes are sent from; nothing writes to it.
    _zeroes: Region,
    state: Mutex<State>,
    /// Wakes threads that wait for outcomes.
    changed: Condvar,
    /// Wakes the timer.
    timer_wake: Condvar,
    weak_self: Weak<Link>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Link {
    /// Opens a session and sends SESS_INFO.
    pub(super) fn open(
        engine: &Engine,
        builder: SessionBuilder,
        config: Config,
        poll_queues: u16,
    ) -> Result<Arc<Self>, Error> {
        let early_events = Arc::new(Mutex::new(EarlyEvents::Buffered(Vec::new())));
        let callback_events = Arc::clone(&early_events);
        let builder = builder.on_link(move |event| {
            let link = match &mut *lock(&callback_events) {
                EarlyEvents::Buffered(events) => {
                    events.push(event);
                    return;
                }
                EarlyEvents::Delivered(link) => link.upgrade(),
            };
            if let Some(link) = link {
                link.handle_link_event(event);
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
            shared_permit: permits.io.is_empty(),
            ios_in_flight: 0,
            permits: Some(Arc::new(permits)),
            outcomes: BTreeMap::new(),
            disks: BTreeMap::new(),
            service_queue: VecDeque::new(),
            service_in_flight: None,
            notices: VecDeque::new(),
            delivering: false,
            late_requests: BTreeMap::new(),
            scratch: Vec::new(),
            timer_armed_for: None,
            unmap_deadline: None,
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
            timer_wake: Condvar::new(),
            weak_self: Weak::clone(me),
        });
        let timer = Arc::clone(&link);
        let thread = thread::Builder::new().name("bowline-rnbd".to_owned());
        thread.spawn(move || timer.run_timer()).map_err(|error| Error::io(what(), &error))?;
        link.handle_link_event(LinkEv::Reconnected);
        loop {
            let event = match &mut *lock(&early_events) {
                EarlyEvents::Buffered(events) if !events.is_empty() => events.remove(0),
                early_events => {
                    *early_events = EarlyEvents::Delivered(Arc::downgrade(&link));
                    break;
                }
            };
            link.handle_link_event(event);
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

    /// Handles the loss or the return of the session [NB-16].
    fn handle_link_event(&self, event: LinkEv) {
        let attrs = self.session.attrs();
        let mut state = self.lock();
        match (event, attrs) {
            (LinkEv::Reconnected, Ok(attrs)) => {
                let max_segments = u16::try_from(attrs.max_segments).unwrap_or(u16::MAX);
                let limits = SessionLimits { max_io: attrs.max_io, max_segments };
                state.core.link_up(clock::now(), limits);
            }
            // Lost again already: that event follows.
            (LinkEv::Reconnected, Err(_)) => {}
            (LinkEv::Disconnected, _) => {
                state.core.link_down(clock::now());
                // Requests that were in flight wait now.
                state.cancel_unwanted();
            }
        }
        self.advance(state);
    }

    /// Maps a device and waits for the outcome.
    pub(super) fn map(&self, name: &str, access: Access) -> Result<(DevId, Limits), Errno> {
        let mut state = self.lock();
        let dev = state.core.map(name, access)?;
        self.advance(state);
        self.wait_outcome(dev, PendingCall::Map)?;
        let limits = self.lock().core.limits(dev);
        Ok((dev, limits.ok_or(Errno::ENODEV)?))
    }

    /// Reports events of the device to the disk from now on.
    pub(super) fn attach(&self, dev: DevId, disk: &Arc<DiskShared>) {
        self.lock().disks.insert(dev, Arc::downgrade(disk));
    }

    /// Unmaps a device and waits until that is done. Waits at most twice the IO timeout, for
    /// requests in flight and then for CLOSE, and at most as long as
    /// [`limit_unmap_wait`](Self::limit_unmap_wait) allows. Messages that the server does not
    /// answer end with the session.
    pub(super) fn unmap(&self, dev: DevId) -> Result<(), Errno> {
        let mut state = self.lock();
        state.core.unmap(dev)?;
        self.advance(state);
        let end = self.timeout.map(|timeout| clock::now() + timeout.saturating_mul(2));
        let outcome = self.wait_outcome_until(dev, PendingCall::Unmap, end);
        let mut state = self.lock();
        state.disks.remove(&dev);
        outcome.unwrap_or_else(|| {
            // The server will not answer the CLOSE of other devices either.
            state.unmap_deadline = Some(clock::now());
            self.changed.notify_all();
            Ok(())
        })
    }

    /// Limits how long unmaps wait from now on.
    pub(super) fn limit_unmap_wait(&self, patience: Duration) {
        let end = clock::now() + patience;
        let mut state = self.lock();
        state.unmap_deadline = Some(state.unmap_deadline.map_or(end, |at| at.min(end)));
        self.changed.notify_all();
    }

    /// Makes requests of a device fail while the session is lost.
    pub(super) fn fail_fast(&self, dev: DevId) {
        let mut state = self.lock();
        state.core.fail_fast(dev);
        self.advance(state);
    }

    /// Ends waiting requests whose requester no longer wants them.
    pub(super) fn cancel_unwanted(&self) {
        let mut state = self.lock();
        state.cancel_unwanted();
        self.advance(state);
    }

    /// Opens a closed device again and waits for the outcome.
    pub(super) fn remap(&self, dev: DevId) -> Result<(), Errno> {
        let mut state = self.lock();
        state.core.remap(clock::now(), dev)?;
        self.advance(state);
        self.wait_outcome(dev, PendingCall::Remap)
    }

    pub(super) fn resize(&self, dev: DevId, bytes: u64) -> Result<(), Errno> {
        let mut state = self.lock();
        let resized = state.core.resize(dev, bytes);
        self.advance(state);
        resized
    }

    pub(super) fn info(&self, dev: DevId) -> Option<DevInfo> {
        self.lock().core.info(dev)
    }

    pub(super) fn failures(&self, dev: DevId) -> Option<Failures> {
        self.lock().core.failures(dev)
    }

    /// Submits requests to a device.
    pub(super) fn submit(
        &self,
        dev: DevId,
        requests: impl Iterator<Item = DiskRequest<Completion>>,
    ) {
        let now = clock::now();
        let mut state = self.lock();
        for request in requests {
            state.core.submit(now, dev, request);
        }
        self.advance(state);
    }

    /// Submits a read that may be beyond the end of a device.
    pub(super) fn probe(&self, dev: DevId, request: DiskRequest<Completion>) {
        let mut state = self.lock();
        state.core.probe(clock::now(), dev, request);
        self.advance(state);
    }

    fn wait_outcome(&self, dev: DevId, call: PendingCall) -> Result<(), Errno> {
        self.wait_outcome_until(dev, call, None).unwrap_or(Err(Errno::ETIMEDOUT))
    }

    /// Waits for the outcome of a call until `end`, or, for an unmap, until the unmap deadline.
    /// `None`: there was none in time.
    fn wait_outcome_until(
        &self,
        dev: DevId,
        call: PendingCall,
        end: Option<Instant>,
    ) -> Option<Result<(), Errno>> {
        let mut state = self.lock();
        loop {
            if let Some(outcome) = state.outcomes.remove(&(dev, call)) {
                return Some(outcome);
            }
            if state.closed {
                return Some(Err(Errno::ENODEV));
            }
            let unmap_deadline = state.unmap_deadline.filter(|_| call == PendingCall::Unmap);
            let end = [end, unmap_deadline].into_iter().flatten().min();
            let left = end.map_or(IDLE, |end| end.saturating_since(clock::now()));
            if left.is_zero() {
                return None;
            }
            let waited = self.changed.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Carries out the actions of the core until there are none left.
    fn advance<'a>(&'a self, mut state: MutexGuard<'a, State>) {
        let mut scratch = state.scratch.pop().unwrap_or_default();
        loop {
            while let Some(message) = state.core.poll_service_message() {
                state.service_queue.push_back(message);
            }
            let service_active =
                state.service_in_flight.is_some() || !state.service_queue.is_empty();
            if !(state.shared_permit && service_active) {
                state.core.take_sends(&mut scratch.sends);
                state.ios_in_flight += scratch.sends.len();
            }
            state.core.take_done(&mut scratch.done);
            for io in &scratch.done {
                state.late_requests.extend(io.late.map(|number| (number, Arc::clone(&io.done.to))));
            }
            state.core.take_ended(&mut scratch.ended);
            for number in scratch.ended.drain(..) {
                scratch.released.extend(state.late_requests.remove(&number));
            }
            self.handle_core_events(&mut state);
            let may_send = state.service_in_flight.is_none()
                && !(state.shared_permit && state.ios_in_flight > 0);
            let message = if may_send { state.service_queue.pop_front() } else { None };
            if let Some(message) = &message {
                state.service_in_flight = Some((message.token, message.room as usize));
            }
            let deliver = !state.notices.is_empty() && !state.delivering;
            let idle =
                scratch.sends.is_empty() && scratch.done.is_empty() && scratch.released.is_empty();
            if idle && message.is_none() && !deliver {
                break;
            }
            let permits = state.permits.clone();
            drop(state);
            self.send(permits.as_deref(), &mut scratch);
            let refused = message.and_then(|message| {
                let sent = self.send_service(permits.as_deref(), &message);
                sent.err().map(|errno| (message.token, errno))
            });
            drop(permits);
            complete_requests(&mut scratch);
            scratch.released.clear();
            if deliver {
                self.deliver_notices();
            }
            state = self.lock();
            if !scratch.failed.is_empty() || refused.is_some() {
                let now = clock::now();
                state.ios_in_flight -= scratch.failed.len();
                for (slot, errno) in scratch.failed.drain(..) {
                    state.core.send_failed(now, slot, errno);
                }
                if let Some((token, errno)) = refused {
                    state.service_in_flight = None;
                    state.core.service_answer(now, token, errno.neg(), &[]);
                }
            }
        }
        state.scratch.push(scratch);
        let next = state.core.poll_timeout();
        if next.is_some_and(|next| state.timer_armed_for.is_none_or(|armed_for| next < armed_for)) {
            self.timer_wake.notify_one();
        }
    }

    fn handle_core_events(&self, state: &mut State) {
        while let Some(event) = state.core.poll_event() {
            let (dev, event) = match event {
                Event::Mapped { dev, result } => {
                    state.outcomes.insert((dev, PendingCall::Map), result);
                    self.changed.notify_all();
                    continue;
                }
                Event::Remapped { dev, result } => {
                    state.outcomes.insert((dev, PendingCall::Remap), result);
                    self.changed.notify_all();
                    continue;
                }
                Event::Unmapped { dev } => {
                    state.outcomes.insert((dev, PendingCall::Unmap), Ok(()));
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
                state.notices.push_back((disk, event, limits));
            }
        }
    }

    /// Delivers notices to disks, in order: by one thread at a time.
    fn deliver_notices(&self) {
        let mut state = self.lock();
        if state.delivering {
            return;
        }
        state.delivering = true;
        while let Some((disk, event, limits)) = state.notices.pop_front() {
            drop(state);
            disk.notify(event, limits);
            // Dropped without the lock of the link: this may be the last reference to the disk, and
            // to the program's listeners.
            drop(disk);
            state = self.lock();
        }
        state.delivering = false;
    }

    /// Sends IO messages: with a single call if none is refused.
    fn send(&self, permits: Option<&Permits>, scratch: &mut Scratch) {
        let Scratch { sends, mems, failed, .. } = scratch;
        if sends.is_empty() {
            return;
        }
        let (Some(permits), Some(this)) = (permits, self.weak_self.upgrade()) else {
            failed.extend(sends.drain(..).map(|io| (io.slot, Errno::ECONNABORTED)));
            return;
        };
        let to: Arc<dyn Completer> = this;
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
                    // Every slot has a permit.
                    permit: permits.for_slot(io.slot)?,
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
    fn send_service(
        &self,
        permits: Option<&Permits>,
        message: &ServiceMessage,
    ) -> Result<(), Errno> {
        let permit = permits.and_then(|permits| permits.service.as_ref());
        let (Some(permit), Some(this)) = (permit, self.weak_self.upgrade()) else {
            return Err(Errno::ECONNABORTED);
        };
        let done = Done { to: this, tag: SERVICE };
        // Clears the last answer: bytes that the server leaves out must not be taken from it.
        self.answer.buffer().write(0, &[0; OPEN_RSP_LEN]);
        let piece = [self.answer.piece(0, message.room)];
        let (dir, data) =
            if message.room > 0 { (Dir::Read, &piece[..]) } else { (Dir::Write, &[][..]) };
        let sent = self.session.request(dir, permit, &message.usr, data, done);
        sent.map_err(|error| error.errno())
    }

    /// Body of the timer thread.
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
            state.timer_armed_for = next;
            let wait = next.map_or(IDLE, |at| at.saturating_since(now));
            state =
                self.timer_wake.wait_timeout(state, wait).unwrap_or_else(PoisonError::into_inner).0;
            state.timer_armed_for = None;
        }
    }

    /// Ends the session and waits until it is closed. No device is mapped any more.
    pub(super) fn close(&self) {
        self.abandon();
        let permits = self.lock().permits.take();
        drop(permits);
        Arc::clone(&self.session).close();
    }

    /// Ends the session once nothing uses it any more.
    pub(super) fn abandon(&self) {
        let mut state = self.lock();
        state.closed = true;
        // Listeners of remaining disks learn that these are gone.
        for info in state.core.infos() {
            // Devices that are being unmapped already continue.
            let _ = state.core.unmap(info.id);
        }
        self.changed.notify_all();
        self.timer_wake.notify_all();
        self.advance(state);
    }
}

/// Calls the completions of finished requests, in batches of one callback each.
fn complete_requests(scratch: &mut Scratch) {
    let Scratch { done, results, .. } = scratch;
    let mut from = 0;
    while let Some(first) = done.get(from) {
        let to = &first.done.to;
        let same = done[from..].iter().take_while(|io| Arc::ptr_eq(&io.done.to, to));
        results.clear();
        results.extend(same.map(|io| (io.done.tag, io.errno)));
        catch_callback_panic(|| to.done(results));
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
                    state.ios_in_flight -= 1;
                    state.core.io_answer(now, slot, *errno);
                }
                Err(_) => {
                    let Some((token, room)) = state.service_in_flight.take() else { continue };
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
