//! The client's side of RNBD: the mapped devices of one session, their IO, and what a lost session
//! does to both.
//!
//! ```text
//!  map --> init --OPEN answered--> open --link lost--> closed --OPEN answered--> open
//!                                   |                    |
//!                                   '------- unmap ------'--> unmapped --CLOSE answered--> removed
//! ```
//!
//! A request of any length is cut into pieces no longer than the session allows. Each piece takes a
//! slot; the session's queue depth is the number of slots. While the session is lost, requests fail
//! at once or wait for it, as configured [NB-54].
//!
//! After every call drain [`Core::poll_service_message`], [`Core::take_sends`], [`Core::take_done`]
//! and [`Core::poll_event`], and arm one timer from [`Core::poll_timeout`]. Spec:
//! `docs/spec/rnbd.md`, rules `[NB-n]`.

mod device;
mod open;
mod queue;
mod quiesce;
mod split;
mod types;

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use bowline_base::Instant;
use bowline_wire::rnbd::{self as wire, Access, NAME_MAX, OpenRsp, SESS_INFO_LEN, VERSION_MAJOR};

use crate::{Errno, Failures, IoOp, Limits, SessionLimits};
use device::{Closed, Device, Open, OpenInFlight, OpenKind, Phase, Reopen, ReopenFor, Unmapping};
use queue::Queue;
use quiesce::Quiesce;
pub use types::{
    Config, DevId, DevInfo, DiskRequest, DiskStats, DoneIo, Event, Outage, Piece, SendIo,
    ServiceMessage, State, Token,
};

/// Delay before an IO message is sent again that found no path although the session is up.
const RETRY_UNREACHABLE: Duration = Duration::from_millis(100);
/// Delay before an IO message is sent again for which there was no memory [NB-27].
const RETRY_NO_MEMORY: Duration = Duration::from_millis(10);
/// The largest errno of Linux.
const ERRNO_MAX: i32 = 4095;

/// What a service message asks for.
#[derive(Clone, Copy, Debug)]
enum Service {
    SessInfo,
    Open(DevId),
    /// Closes a device. `None`: no mapped device waits for the answer.
    Close(Option<DevId>),
}

/// Converts the errno of a failed answer, whose sign the server may choose. A number that is no
/// errno becomes `EIO`.
fn errno_from_wire(errno: i32) -> Errno {
    let magnitude = i32::try_from(errno.unsigned_abs()).ok();
    magnitude.filter(|errno| *errno <= ERRNO_MAX).map_or(Errno::EIO, Errno)
}

/// The devices of one session and their IO. `D` is the caller's completion of a request.
#[derive(Debug)]
pub struct Core<D> {
    config: Config,
    session: SessionLimits,
    /// The session has a connected path.
    up: bool,
    devices: Vec<Option<Device>>,
    /// The generation of the device mapped last.
    generations: u32,
    /// The token of the next service message.
    tokens: u32,
    /// Service messages that the server has not answered yet.
    pending_services: BTreeMap<Token, Service>,
    queue: Queue<D>,
    /// Devices that are opened again once no IO is in flight. The server may have lost its table of
    /// ids: IO with an old id must not arrive after the id belongs to another device.
    quiesced_opens: VecDeque<DevId>,
    quiesce: Quiesce,
    /// Slots that were in flight when the last quiesce ran out of time, and still are.
    stragglers: Vec<u16>,
    /// Until then no IO message is sent, since the last one could not go out.
    sends_held_until: Option<Instant>,
    /// When the first of the requests failed for want of a path while the session counts as up.
    unreachable_since: Option<Instant>,
    service_messages: VecDeque<ServiceMessage>,
    events: VecDeque<Event>,
}

/// Returns the device of that id, unless its place in the table has been reused.
fn device_in(devices: &mut [Option<Device>], dev: DevId) -> Option<&mut Device> {
    let slot = devices.get_mut(usize::try_from(dev.index).ok()?)?;
    slot.as_mut().filter(|device| device.generation == dev.generation)
}

impl<D> Core<D> {
    /// Makes a client without devices that may have `slots` IO messages under way.
    pub fn new(config: Config, slots: u16) -> Self {
        Self {
            config,
            session: SessionLimits { max_io: 0, max_segments: 0 },
            up: false,
            devices: Vec::new(),
            generations: 0,
            tokens: 0,
            pending_services: BTreeMap::new(),
            queue: Queue::new(slots),
            quiesced_opens: VecDeque::new(),
            quiesce: Quiesce::Idle,
            stragglers: Vec::new(),
            sends_held_until: None,
            unreachable_since: None,
            service_messages: VecDeque::new(),
            events: VecDeque::new(),
        }
    }

    /// Sets the memory that zeroes are written from: a region, and its length in bytes. The memory
    /// must stay zero; the length is a multiple of every block size.
    pub const fn set_zeroes(&mut self, region: u32, len: u32) {
        self.queue.zeroes = Some((region, len));
    }

    fn send_service(&mut self, kind: Service, usr: Vec<u8>, room: u32) -> Token {
        let token = Token(self.tokens);
        self.tokens = self.tokens.wrapping_add(1);
        self.pending_services.insert(token, kind);
        self.service_messages.push_back(ServiceMessage { token, usr, room });
        token
    }

    fn device(&self, dev: DevId) -> Option<&Device> {
        let slot = self.devices.get(usize::try_from(dev.index).ok()?)?;
        slot.as_ref().filter(|device| device.generation == dev.generation)
    }

    fn device_mut(&mut self, dev: DevId) -> Option<&mut Device> {
        device_in(&mut self.devices, dev)
    }

    fn closed_mut(&mut self, dev: DevId) -> Option<&mut Closed> {
        self.device_mut(dev)?.as_closed_mut()
    }

    fn device_ids(&self) -> Vec<DevId> {
        let all = (0..).zip(&self.devices);
        all.filter_map(|(index, d)| Some(DevId { index, generation: d.as_ref()?.generation }))
            .collect()
    }

    /// Tells that the session is up, for the first time or again. Sends SESS_INFO, and opens all
    /// mapped devices again [NB-14] [NB-16].
    pub fn link_up(&mut self, now: Instant, session: SessionLimits) {
        self.up = true;
        self.session = session;
        self.sends_held_until = None;
        self.unreachable_since = None;
        self.reset_quiesce();
        let hello = wire::emit_sess_info(VERSION_MAJOR).to_vec();
        self.send_service(Service::SessInfo, hello, SESS_INFO_LEN as u32);
        for dev in self.device_ids() {
            self.mark_closed(now, dev);
            self.send_reopen(dev, OpenKind::Plain);
        }
    }

    /// Tells that the session is lost: no path is connected, and all IO in flight was answered.
    pub fn link_down(&mut self, now: Instant) {
        self.up = false;
        for dev in self.quiesced_opens.clone() {
            self.cancel_reopen(dev, Errno::ECONNABORTED);
        }
        self.reset_quiesce();
        for dev in self.device_ids() {
            if let Some(closed) = self.closed_mut(dev)
                && matches!(closed.reopen, Reopen::At(_))
            {
                closed.reopen = Reopen::Idle;
            }
            self.mark_closed(now, dev);
        }
    }

    /// Marks an open device closed.
    fn mark_closed(&mut self, now: Instant, dev: DevId) {
        let Some(device) = device_in(&mut self.devices, dev) else { return };
        let fail_fast = device.outage == Outage::FailFast;
        let Phase::Open(Open { limits, .. }) = device.phase else { return };
        device.phase =
            Phase::Closed(Closed { since: now, limits, replaced: false, reopen: Reopen::Idle });
        if limits.write_cache {
            self.queue.replay_unflushed(dev.index, &device.waiting, None);
        }
        self.events.push_back(Event::Offline { dev });
        if fail_fast {
            self.fail_waiting(dev, Errno::EIO);
        }
    }

    fn fail_waiting(&mut self, dev: DevId, errno: Errno) {
        let fragments = self.device_mut(dev).map(|device| std::mem::take(&mut device.waiting));
        for fragment in fragments.into_iter().flatten() {
            self.queue.waiting -= 1;
            self.queue.unreserve_slot(&fragment);
            let seen = self.devices[dev.index as usize].as_mut().map(|device| &mut device.seen);
            self.queue.finish(fragment.parent, errno.neg(), seen);
        }
    }

    /// Begins to map a device; [`Event::Mapped`] follows.
    ///
    /// # Errors
    /// `EEXIST` when it is mapped already [NB-35], `EINVAL` for an empty name or one that is too
    /// long or has a NUL in it.
    pub fn map(&mut self, name: &str, access: Access) -> Result<DevId, Errno> {
        if name.is_empty() || name.len() > NAME_MAX || name.contains('\0') {
            return Err(Errno::EINVAL);
        }
        if self.devices.iter().flatten().any(|device| device.name == name) {
            return Err(Errno::EEXIST);
        }
        let at = self.devices.iter().position(Option::is_none).unwrap_or(self.devices.len());
        let index = u32::try_from(at).map_err(|_| Errno::ENOMEM)?;
        self.generations = self.generations.wrapping_add(1);
        let dev = DevId { index, generation: self.generations };
        let token = self.send_open(dev, name, access).ok_or(Errno::EINVAL)?;
        if at == self.devices.len() {
            self.devices.push(None);
        }
        let device = Device::new(name, access, self.generations, self.config.outage, token);
        self.devices[at] = Some(device);
        Ok(dev)
    }

    /// Begins to unmap a device. [`Event::Unmapped`] follows once none of its IO is in flight. Its
    /// waiting requests fail.
    ///
    /// # Errors
    /// `ENODEV` when there is no such device, `EALREADY` when it is being unmapped [NB-37].
    pub fn unmap(&mut self, dev: DevId) -> Result<(), Errno> {
        let device = self.device_mut(dev).ok_or(Errno::ENODEV)?;
        let step = match device.phase {
            Phase::Unmapping { .. } => return Err(Errno::EALREADY),
            Phase::Open(Open { wire_id, .. }) => Unmapping::Draining { wire_id },
            Phase::Opening(token) => {
                Unmapping::AwaitsOpen(OpenInFlight { token, kind: OpenKind::Plain })
            }
            Phase::Closed(Closed { reopen: Reopen::Sent(open, _), .. }) => {
                Unmapping::AwaitsOpen(open)
            }
            Phase::Closed(_) => Unmapping::Ending,
        };
        let remap = device.as_closed().is_some_and(|closed| closed.reopen.is_remap());
        device.phase = Phase::Unmapping { step, limits: device.limits() };
        self.cancel_quiesced_open(dev);
        if remap {
            self.events.push_back(Event::Remapped { dev, result: Err(Errno::ENODEV) });
        }
        self.fail_waiting(dev, Errno::EIO);
        self.advance_unmap(dev);
        Ok(())
    }

    /// Makes the requests of a device fail while the session is lost, whatever [`Config::outage`]
    /// says. Requests that wait for the session already fail now. While the session is up nothing
    /// changes.
    pub fn fail_fast(&mut self, dev: DevId) {
        let Some(device) = self.device_mut(dev) else { return };
        device.outage = Outage::FailFast;
        if device.as_closed().is_some() {
            self.fail_waiting(dev, Errno::EIO);
        }
    }

    /// Ends waiting requests whose requester no longer wants them (`wanted` is false) with `EIO`.
    /// IO in flight ends by itself. A change that the server may still be carrying out is sent
    /// again all the same, so that later changes wait for its end [NB-54].
    pub fn cancel_unwanted(&mut self, wanted: impl Fn(&D, IoOp) -> bool) {
        for device in self.devices.iter_mut().flatten() {
            let fragments = std::mem::take(&mut device.waiting);
            for fragment in fragments {
                if self.queue.must_stay(&fragment, &wanted) {
                    device.waiting.push_back(fragment);
                    continue;
                }
                self.queue.waiting -= 1;
                self.queue.unreserve_slot(&fragment);
                self.queue.finish(fragment.parent, Errno::EIO.neg(), None);
            }
        }
    }

    /// Takes the next step of an unmap, if it can be taken: sends CLOSE after the last IO, and
    /// removes the device after the last answer.
    fn advance_unmap(&mut self, dev: DevId) {
        let Some(device) = self.device(dev).filter(|device| device.in_flight == 0) else { return };
        match device.phase {
            Phase::Unmapping { step: Unmapping::Draining { wire_id }, .. } => {
                self.set_unmapping(dev, Unmapping::Closing);
                let usr = wire::emit_close(wire_id).to_vec();
                self.send_service(Service::Close(Some(dev)), usr, 0);
            }
            Phase::Unmapping { step: Unmapping::Ending, .. } => {
                self.devices[dev.index as usize] = None;
                self.events.push_back(Event::Unmapped { dev });
            }
            _ => {}
        }
    }

    fn set_unmapping(&mut self, dev: DevId, next: Unmapping) {
        if let Some(Phase::Unmapping { step, .. }) = self.device_mut(dev).map(|d| &mut d.phase) {
            *step = next;
        }
    }

    /// Changes the size of a device on this side only; nothing is sent [NB-37].
    ///
    /// # Errors
    /// `ENOENT` unless it is open, `EOVERFLOW` for more than a disk can have, `EINVAL` for a part
    /// of one of its logical blocks.
    pub fn resize(&mut self, dev: DevId, bytes: u64) -> Result<(), Errno> {
        let Some(Phase::Open(Open { limits, .. })) = self.device_mut(dev).map(|d| &mut d.phase)
        else {
            return Err(Errno::ENOENT);
        };
        if bytes > Limits::BYTES_MAX {
            return Err(Errno::EOVERFLOW);
        }
        if !bytes.is_multiple_of(limits.logical.into()) {
            return Err(Errno::EINVAL);
        }
        limits.bytes = bytes;
        self.events.push_back(Event::Resized { dev, bytes });
        Ok(())
    }

    /// Handles the answer to a service message: `errno` is 0 or negative, `data` holds the bytes
    /// that the server wrote.
    pub fn service_answer(&mut self, now: Instant, token: Token, errno: i32, data: &[u8]) {
        match self.pending_services.remove(&token) {
            // The server's protocol version changes nothing that is sent [NB-57].
            None | Some(Service::SessInfo | Service::Close(None)) => {}
            Some(Service::Close(Some(dev))) => {
                self.set_unmapping(dev, Unmapping::Ending);
                self.advance_unmap(dev);
            }
            Some(Service::Open(dev)) => {
                let rsp = match errno {
                    0 => OpenRsp::parse(data).ok_or(Errno::EINVAL),
                    errno => Err(errno_from_wire(errno)),
                };
                self.open_answer(now, token, dev, rsp);
            }
        }
    }

    /// Submits a request of the application. One result follows by [`Core::take_done`].
    ///
    /// Zeroes that must stay allocated are written as data unless [`Config::nounmap`] is set: a
    /// server that does not know the flag silently deallocates them [NB-57]. Without
    /// [`Core::set_zeroes`] such requests fail with `EOPNOTSUPP`.
    pub fn submit(&mut self, now: Instant, dev: DevId, mut request: DiskRequest<D>) {
        self.queue.now = now;
        let Some(device) = device_in(&mut self.devices, dev) else {
            self.queue.refuse(request.done, Errno::EIO.neg(), None);
            return;
        };
        let mut validated = device.validate(now, &request);
        if request.op == IoOp::WriteZeroes && request.nounmap && !self.config.nounmap {
            request.op = IoOp::Write;
            request.mem = self.queue.zeroes.map(|(region, _)| (region, 0));
            validated = validated.and_then(|carry_out| {
                if carry_out && request.mem.is_none() {
                    Err(Errno::EOPNOTSUPP)
                } else {
                    Ok(carry_out)
                }
            });
        }
        match validated {
            Ok(true) => {
                let timeout = self.config.io_timeout.map(|after| now + after);
                device.waiting.push_back(self.queue.admit(request, timeout, &device.seen));
                self.queue.waiting += 1;
            }
            Ok(false) => self.queue.refuse(request.done, 0, Some(&mut device.seen)),
            Err(errno) => self.queue.refuse(request.done, errno.neg(), Some(&mut device.seen)),
        }
    }

    /// Submits a read that is sent even if it is beyond the end of the device: its result tells
    /// whether the server has these bytes. It is counted nowhere, and waits for no session: `EIO`
    /// unless the device is open.
    pub fn probe(&mut self, now: Instant, dev: DevId, request: DiskRequest<D>) {
        self.queue.now = now;
        match device_in(&mut self.devices, dev).filter(|device| device.is_open()) {
            Some(device) if request.op == IoOp::Read && request.mem.is_some() => {
                let timeout = self.config.io_timeout.map(|after| now + after);
                device.waiting.push_back(self.queue.admit_probe(request, timeout, &device.seen));
                self.queue.waiting += 1;
            }
            _ => self.queue.refuse(request.done, Errno::EIO.neg(), None),
        }
    }

    /// Appends the IO messages that can go out now.
    pub fn take_sends(&mut self, into: &mut Vec<SendIo>) {
        let draining = matches!(self.quiesce, Quiesce::Draining(_));
        if self.queue.waiting == 0 || !self.up || self.sends_held_until.is_some() || draining {
            return;
        }
        self.queue.pump(&mut self.devices, into);
    }

    /// Frees a slot; returns its device and fragment.
    fn free_slot(&mut self, slot: u16) -> Option<(u32, queue::Fragment)> {
        self.stragglers.retain(|straggler| *straggler != slot);
        self.queue.free_slot(slot)
    }

    /// Handles the answer to an IO message: `errno` is 0 or negative.
    pub fn io_answer(&mut self, now: Instant, slot: u16, errno: i32) {
        self.io_ended(now, slot, errno, true);
    }

    /// Handles the end of an IO message: by the server's answer, or unsent.
    fn io_ended(&mut self, now: Instant, slot: u16, errno: i32, is_answer: bool) {
        self.queue.now = now;
        let Some((index, fragment)) = self.free_slot(slot) else { return };
        let Some(device) = self.devices.get_mut(index as usize).and_then(Option::as_mut) else {
            return;
        };
        device.in_flight -= 1;
        let dev = DevId { index, generation: device.generation };
        if errno == 0 {
            self.unreachable_since = None;
            device.seen.failures.succeeded(fragment.op);
            let mut next = self.queue.finish(fragment.parent, 0, Some(&mut device.seen));
            let fails = match &device.phase {
                Phase::Unmapping { .. } => true,
                Phase::Closed(closed) => closed.replaced || device.outage == Outage::FailFast,
                Phase::Open(_) | Phase::Opening(_) => false,
            };
            if fails && let Some(fragment) = next.take() {
                self.queue.finish(fragment.parent, Errno::EIO.neg(), Some(&mut device.seen));
            }
            if let Some(fragment) = next {
                device.waiting.push_back(fragment);
                self.queue.waiting += 1;
            }
        } else {
            self.io_failed(now, dev, (slot, fragment), errno, is_answer);
        }
        if !self.quiesced_opens.is_empty() {
            self.advance_quiesced_opens(now);
        }
        self.advance_unmap(dev);
    }

    fn io_failed(
        &mut self,
        now: Instant,
        dev: DevId,
        (slot, fragment): (u16, queue::Fragment),
        errno: i32,
        is_answer: bool,
    ) {
        let positive = errno_from_wire(errno);
        let not_connected = positive == Errno::ENOTCONN;
        let unreachable = matches!(
            positive,
            Errno::ECONNABORTED | Errno::ECONNRESET | Errno::ESHUTDOWN | Errno::ECOMM
        );
        if not_connected {
            if let Some(device) = device_in(&mut self.devices, dev)
                && device.limits().is_some_and(|limits| limits.write_cache)
            {
                self.queue.replay_unflushed(dev.index, &device.waiting, Some(fragment.parent));
            }
            self.mark_closed(now, dev);
            self.schedule_reopen(now, dev);
        }
        let is_probe = self.queue.is_probe(&fragment);
        let Some(device) = self.device_mut(dev) else { return };
        if is_answer && !is_probe && !(not_connected || unreachable) {
            device.seen.failures.failed(now, fragment.op, positive);
        }
        let Outage::Queue(limit) = device.outage else {
            self.fail_piece(dev, fragment, errno);
            return;
        };
        let (open, waits) = (device.is_open(), device.resends());
        let since = if open { *self.unreachable_since.get_or_insert(now) } else { now };
        let late = now.saturating_since(since) >= limit;
        if !(not_connected || unreachable) || late || !waits {
            self.fail_piece(dev, fragment, errno);
            return;
        }
        if open {
            self.sends_held_until.get_or_insert(now + RETRY_UNREACHABLE);
        }
        // The server may still be carrying it out.
        let fragment = self.queue.reserve_slot(fragment, slot);
        self.requeue(dev, fragment);
    }

    fn fail_piece(&mut self, dev: DevId, fragment: queue::Fragment, errno: i32) {
        let magnitude = u16::try_from(errno.unsigned_abs()).unwrap_or(u16::MAX);
        let errno = -i32::from(wire::status_of_errno(magnitude));
        let seen = self.devices[dev.index as usize].as_mut().map(|device| &mut device.seen);
        self.queue.finish(fragment.parent, errno, seen);
    }

    fn requeue(&mut self, dev: DevId, fragment: queue::Fragment) {
        if let Some(device) = self.device_mut(dev) {
            device.seen.stats.resent += 1;
            device.waiting.push_front(fragment);
            self.queue.waiting += 1;
        }
    }

    /// Tells that an IO message could not be sent at all. After `EAGAIN` and `ENOMEM` it is sent
    /// again a little later; any other error counts as the server's answer.
    pub fn send_failed(&mut self, now: Instant, slot: u16, errno: Errno) {
        if !matches!(errno, Errno::EAGAIN | Errno::ENOMEM) {
            self.io_ended(now, slot, errno.neg(), false);
            return;
        }
        let Some((index, fragment)) = self.free_slot(slot) else { return };
        let Some(device) = self.devices.get_mut(index as usize).and_then(Option::as_mut) else {
            return;
        };
        device.in_flight -= 1;
        let dev = DevId { index, generation: device.generation };
        self.sends_held_until.get_or_insert(now + RETRY_NO_MEMORY);
        if device.state() == State::Unmapped {
            self.fail_piece(dev, fragment, Errno::EIO.neg());
            self.advance_unmap(dev);
        } else {
            let fragment = self.queue.reserve_slot(fragment, slot);
            self.requeue(dev, fragment);
        }
        if !self.quiesced_opens.is_empty() {
            self.advance_quiesced_opens(now);
        }
    }

    /// Handles all timers that have expired.
    pub fn handle_timeout(&mut self, now: Instant) {
        if self.sends_held_until.is_some_and(|at| at <= now) {
            self.sends_held_until = None;
        }
        self.queue.time_out(now);
        for dev in self.device_ids() {
            let Some(device) = self.device(dev) else { continue };
            let Some(closed) = device.as_closed() else { continue };
            if matches!(closed.reopen, Reopen::At(at) if at <= now) {
                self.open_quiesced(now, dev, ReopenFor::Requests);
                continue;
            }
            let Outage::Queue(limit) = device.outage else { continue };
            if !device.waiting.is_empty() && closed.since + limit <= now {
                self.fail_waiting(dev, Errno::EIO);
            }
        }
        self.advance_quiesced_opens(now);
    }

    /// Returns when [`Core::handle_timeout`] is to be called next.
    pub fn poll_timeout(&self) -> Option<Instant> {
        let devices = self.devices.iter().flatten();
        let of_devices = devices.flat_map(|device| {
            let (Some(closed), Outage::Queue(limit)) = (device.as_closed(), device.outage) else {
                return [None, None];
            };
            let reopens = match closed.reopen {
                Reopen::At(at) => Some(at),
                _ => None,
            };
            [reopens, (!device.waiting.is_empty()).then(|| closed.since + limit)]
        });
        let quiesce = match self.quiesce {
            Quiesce::Draining(at) => Some(at),
            Quiesce::Resting(at) => {
                Some(at).filter(|_| !self.quiesced_opens.is_empty() && !self.blocked())
            }
            Quiesce::Idle => None,
        };
        of_devices
            .chain([self.sends_held_until, self.queue.next_timeout(), quiesce])
            .flatten()
            .min()
    }

    /// Returns the next service message to send.
    pub fn poll_service_message(&mut self) -> Option<ServiceMessage> {
        self.service_messages.pop_front()
    }

    /// Returns the next event.
    pub fn poll_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    /// Appends the results of requests.
    pub fn take_done(&mut self, into: &mut Vec<DoneIo<D>>) {
        into.append(&mut self.queue.done);
    }

    /// Appends the numbers of requests that were answered when their time was up ([`DoneIo::late`])
    /// and whose memory the server no longer uses.
    pub fn take_ended(&mut self, into: &mut Vec<u32>) {
        into.append(&mut self.queue.ended);
    }

    /// Returns the limits of a device; while it is closed, the last known.
    pub fn limits(&self, dev: DevId) -> Option<Limits> {
        self.device(dev)?.limits()
    }

    /// Returns the state of a device.
    pub fn state(&self, dev: DevId) -> Option<State> {
        Some(self.device(dev)?.state())
    }

    /// Returns a device.
    pub fn info(&self, dev: DevId) -> Option<DevInfo> {
        Some(self.device(dev)?.info(dev.index))
    }

    /// Returns the requests of a device that the server's storage has failed.
    pub fn failures(&self, dev: DevId) -> Option<Failures> {
        Some(self.device(dev)?.seen.failures)
    }

    /// Returns all devices.
    pub fn infos(&self) -> Vec<DevInfo> {
        let all = (0..).zip(&self.devices);
        all.filter_map(|(index, device)| Some(device.as_ref()?.info(index))).collect()
    }

    /// Asserts the invariants that hold between calls; for tests and the simulator.
    ///
    /// # Panics
    /// When an invariant is broken.
    pub fn check_invariants(&self) {
        let waiting: usize = self.devices.iter().flatten().map(|d| d.waiting.len()).sum();
        assert_eq!(waiting, self.queue.waiting, "count of waiting fragments");
        let in_flight: u32 = self.devices.iter().flatten().map(|d| d.in_flight).sum();
        assert_eq!(in_flight, self.queue.in_flight(), "count of pieces in flight");
        let opens = !self.quiesced_opens.is_empty() || self.quiesced_open_in_flight();
        match self.quiesce {
            Quiesce::Idle => assert!(!opens, "quiesced opens wait for no quiesce"),
            Quiesce::Draining(_) => assert!(opens, "devices are quiesced for no open"),
            Quiesce::Resting(_) => {}
        }
        for straggler in &self.stragglers {
            assert!(
                self.queue.slots_in_flight().any(|slot| slot == *straggler),
                "straggler {straggler} was answered"
            );
        }
        self.queue.check_invariants(&self.devices);
        for dev in self.device_ids() {
            let closed = self.device(dev).and_then(Device::as_closed);
            let queued = closed.is_some_and(|c| matches!(c.reopen, Reopen::Queued(_)));
            assert_eq!(queued, self.quiesced_opens.contains(&dev), "{dev:?} waits for a quiesce");
        }
    }
}

#[cfg(test)]
mod tests;
