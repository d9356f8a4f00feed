//! The client's side: mapped devices of one session, their IO, and what happens to both when the
//! session is lost.
//!
//! ```text
//!  map --> init --OPEN answered--> open --link lost--> closed --OPEN answered--> open
//!                                   |                    |
//!                                   '------- unmap ------'--> unmapped --CLOSE answered--> gone
//! ```
//!
//! A request of any length is cut into pieces of what the session allows; each piece takes a slot,
//! of which there are as many as the session lets be under way. While the session is away, requests
//! fail at once or wait for it, as configured [NB-54].
//!
//! After every call drain [`Core::poll_order`], [`Core::take_sends`], [`Core::take_done`] and
//! [`Core::poll_event`], and arm one timer from [`Core::poll_timeout`]. Spec: `docs/spec/rnbd.md`,
//! rules `[NB-n]`.

mod careful;
mod device;
mod queue;
mod split;
mod words;

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use bowline_base::Instant;
use bowline_wire::rnbd::{
    self as wire, Access, NAME_MAX, OPEN_RSP_LEN, OpenRsp, SESS_INFO_LEN, VERSION_MAJOR,
};

use crate::limits::of_open_rsp;
use crate::{Errno, IoOp, Limits, SessionLimits};
use careful::Stop;
use device::Device;
use queue::Queue;
pub use words::{
    Config, DevId, DevInfo, DiskRequest, DiskStats, DoneIo, Event, Order, Outage, Piece, SendIo,
    State, Token,
};

/// Time until what could not go out, though the session looked up, is tried again.
const HOLD_LINK: Duration = Duration::from_millis(100);
/// Time until what found no memory is tried again [NB-27].
const HOLD_BUSY: Duration = Duration::from_millis(10);
/// The largest number of an error in Linux.
const ERRNO_MAX: i32 = 4095;

#[derive(Clone, Copy, Debug)]
enum Ask {
    SessInfo,
    Open(DevId),
    /// The device, unless it is gone already.
    Close(Option<DevId>),
}

/// The errno of an answer that is not 0, whatever its sign. What is none is an IO error.
fn said(errno: i32) -> Errno {
    let magnitude = i32::try_from(errno.unsigned_abs()).ok();
    magnitude.filter(|errno| *errno <= ERRNO_MAX).map_or(Errno::EIO, Errno)
}

/// The devices of one session and their IO. `D` says who asked for a request.
#[derive(Debug)]
pub struct Core<D> {
    config: Config,
    session: SessionLimits,
    up: bool,
    devices: Vec<Option<Device>>,
    lives: u32,
    tokens: u32,
    asked: BTreeMap<Token, Ask>,
    queue: Queue<D>,
    /// Devices to open again while nothing is under way: the server may have lost its table of ids,
    /// and an id of before must not reach another device after.
    careful: VecDeque<DevId>,
    stop: Stop,
    /// Slots that were under way when the last stop ended, and are still: that one was in vain.
    blockers: Vec<u16>,
    hold_until: Option<Instant>,
    /// Since when requests come back for want of a path while the session has not said so.
    trouble_since: Option<Instant>,
    orders: VecDeque<Order>,
    events: VecDeque<Event>,
}

fn at(devices: &mut [Option<Device>], dev: DevId) -> Option<&mut Device> {
    let slot = devices.get_mut(usize::try_from(dev.index).ok()?)?;
    slot.as_mut().filter(|device| device.life == dev.life)
}

impl<D> Core<D> {
    /// Makes a client without devices that may have `slots` IO messages under way.
    pub fn new(config: Config, slots: u16) -> Self {
        Self {
            config,
            session: SessionLimits { max_io: 0, max_segments: 0 },
            up: false,
            devices: Vec::new(),
            lives: 0,
            tokens: 0,
            asked: BTreeMap::new(),
            queue: Queue::new(slots),
            careful: VecDeque::new(),
            stop: Stop::No,
            blockers: Vec::new(),
            hold_until: None,
            trouble_since: None,
            orders: VecDeque::new(),
            events: VecDeque::new(),
        }
    }

    /// Says where there is memory that is zero and stays so: a region, and its bytes, which are
    /// whole blocks of any disk.
    pub const fn set_zeroes(&mut self, region: u32, len: u32) {
        self.queue.zeroes = Some((region, len));
    }

    fn ask(&mut self, ask: Ask, usr: Vec<u8>, room: u32) -> Token {
        let token = Token(self.tokens);
        self.tokens = self.tokens.wrapping_add(1);
        self.asked.insert(token, ask);
        self.orders.push_back(Order { token, usr, room });
        token
    }

    fn ask_open(&mut self, dev: DevId) {
        let Some(device) = self.device(dev) else { return };
        // A name that does not fit was refused by `map`.
        let Some(usr) = wire::emit_open(device.access, device.name.as_bytes()) else { return };
        let token = self.ask(Ask::Open(dev), usr.to_vec(), OPEN_RSP_LEN as u32);
        if let Some(device) = self.device_mut(dev) {
            device.opening = Some(token);
            device.reopen_at = None;
        }
    }

    fn device(&self, dev: DevId) -> Option<&Device> {
        let slot = self.devices.get(usize::try_from(dev.index).ok()?)?;
        slot.as_ref().filter(|device| device.life == dev.life)
    }

    fn device_mut(&mut self, dev: DevId) -> Option<&mut Device> {
        at(&mut self.devices, dev)
    }

    fn ids(&self) -> Vec<DevId> {
        let all = (0..).zip(&self.devices);
        all.filter_map(|(index, d)| Some(DevId { index, life: d.as_ref()?.life })).collect()
    }

    /// The session is up, for the first time or again: says hello, and opens again what was open
    /// [NB-14] [NB-16].
    pub fn link_up(&mut self, now: Instant, session: SessionLimits) {
        self.up = true;
        self.session = session;
        self.hold_until = None;
        self.trouble_since = None;
        self.forget_careful();
        let hello = wire::emit_sess_info(VERSION_MAJOR).to_vec();
        self.ask(Ask::SessInfo, hello, SESS_INFO_LEN as u32);
        for dev in self.ids() {
            let state = self.device(dev).map(|device| device.state);
            if state == Some(State::Open) {
                self.offline(now, dev);
            }
            if matches!(state, Some(State::Open | State::Closed)) {
                self.ask_open(dev);
            }
        }
    }

    /// The session is away: no path is connected, and all that was under way was answered.
    pub fn link_down(&mut self, now: Instant) {
        self.up = false;
        for dev in self.careful.clone() {
            self.remapped(dev, Err(Errno::ECONNABORTED));
        }
        self.forget_careful();
        for dev in self.ids() {
            if let Some(device) = self.device_mut(dev) {
                device.reopen_at = None;
            }
            self.offline(now, dev);
        }
    }

    /// Marks an open device closed.
    fn offline(&mut self, now: Instant, dev: DevId) {
        let Some(device) = at(&mut self.devices, dev) else { return };
        let fail_fast = device.outage == Outage::FailFast;
        if device.state != State::Open {
            return;
        }
        device.state = State::Closed;
        device.offline_since = Some(now);
        if device.limits.is_some_and(|limits| limits.write_cache) {
            self.queue.shake(dev.index, &device.waiting, None);
        }
        self.events.push_back(Event::Offline { dev });
        if fail_fast {
            self.fail_waiting(dev, Errno::EIO);
        }
    }

    fn fail_waiting(&mut self, dev: DevId, errno: Errno) {
        let works = self.device_mut(dev).map(|device| std::mem::take(&mut device.waiting));
        for work in works.into_iter().flatten() {
            self.queue.waiting -= 1;
            self.queue.unkeep(&work);
            let stats = self.devices[dev.index as usize].as_mut().map(|device| &mut device.stats);
            self.queue.finish(work.parent, errno.neg(), stats);
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
        self.lives = self.lives.wrapping_add(1);
        let device = Device::new(name, access, self.lives, self.config.outage);
        let at = self.devices.iter().position(Option::is_none).unwrap_or(self.devices.len());
        if at == self.devices.len() {
            self.devices.push(None);
        }
        self.devices[at] = Some(device);
        let index = u32::try_from(at).map_err(|_| Errno::ENOMEM)?;
        let dev = DevId { index, life: self.lives };
        self.ask_open(dev);
        Ok(dev)
    }

    /// Begins to give a device up; [`Event::Unmapped`] follows once nothing of it is under way.
    /// Requests that wait fail.
    ///
    /// # Errors
    /// `ENODEV` when there is no such device, `EALREADY` when this is under way [NB-37].
    pub fn unmap(&mut self, dev: DevId) -> Result<(), Errno> {
        let device = self.device_mut(dev).ok_or(Errno::ENODEV)?;
        if device.state == State::Unmapped {
            return Err(Errno::EALREADY);
        }
        device.close_sent = device.state != State::Open;
        device.state = State::Unmapped;
        device.reopen_at = None;
        self.leave_careful(dev);
        self.remapped(dev, Err(Errno::ENODEV));
        self.fail_waiting(dev, Errno::EIO);
        self.go_on_unmapping(dev);
        Ok(())
    }

    /// From now on requests of a device do not wait for the session, whatever [`Config::outage`]
    /// says: while it is away they fail, and those that wait for it already fail now. While it is
    /// there nothing changes.
    pub fn fail_fast(&mut self, dev: DevId) {
        let Some(device) = self.device_mut(dev) else { return };
        device.outage = Outage::FailFast;
        if device.state == State::Closed {
            self.fail_waiting(dev, Errno::EIO);
        }
    }

    /// Ends requests that are not `wanted` any more by who asked for them, with `EIO`, as far as
    /// they wait. What is under way ends by itself. A change that the server may be at still goes
    /// out again, so that later ones wait for its end [NB-54].
    pub fn forget(&mut self, wanted: impl Fn(&D, IoOp) -> bool) {
        for device in self.devices.iter_mut().flatten() {
            let works = std::mem::take(&mut device.waiting);
            for work in works {
                if self.queue.stays(&work, &wanted) {
                    device.waiting.push_back(work);
                    continue;
                }
                self.queue.waiting -= 1;
                self.queue.unkeep(&work);
                self.queue.finish(work.parent, Errno::EIO.neg(), None);
            }
        }
    }

    /// Takes the next step of an unmap, if it can be taken: CLOSE after the last IO, and the end
    /// after the last answer.
    fn go_on_unmapping(&mut self, dev: DevId) {
        let Some(device) = self.device_mut(dev) else { return };
        if device.state != State::Unmapped || device.in_flight > 0 {
            return;
        }
        if !device.close_sent {
            device.close_sent = true;
            let usr = wire::emit_close(device.wire_id).to_vec();
            device.closing = true;
            self.ask(Ask::Close(Some(dev)), usr, 0);
        } else if !device.closing && device.opening.is_none() {
            self.devices[dev.index as usize] = None;
            self.events.push_back(Event::Unmapped { dev });
        }
    }

    /// Begins to open a closed device again; [`Event::Remapped`] follows, with `EBUSY` when
    /// requests under way did not end in time.
    ///
    /// # Errors
    /// `EALREADY` when it is open, `ENODEV` when it is being given up or does not exist, `EBUSY`
    /// while this or an OPEN is under way [NB-37] and while requests that did not end in time are
    /// still under way, `ECONNABORTED` while the session is away.
    pub fn remap(&mut self, now: Instant, dev: DevId) -> Result<(), Errno> {
        let (up, blocked) = (self.up, self.blocked());
        let device = self.device_mut(dev).ok_or(Errno::ENODEV)?;
        match device.state {
            State::Open => return Err(Errno::EALREADY),
            State::Unmapped => return Err(Errno::ENODEV),
            State::Init => return Err(Errno::EBUSY),
            State::Closed if device.opening.is_some() || device.remapping => {
                return Err(Errno::EBUSY);
            }
            State::Closed if !up => return Err(Errno::ECONNABORTED),
            State::Closed if blocked => return Err(Errno::EBUSY),
            State::Closed => {}
        }
        device.remapping = true;
        self.open_carefully(now, dev);
        Ok(())
    }

    /// Tells how a remap ended, if one is under way.
    fn remapped(&mut self, dev: DevId, result: Result<(), Errno>) {
        let waits = self.device_mut(dev).map(|device| std::mem::take(&mut device.remapping));
        if waits == Some(true) {
            self.events.push_back(Event::Remapped { dev, result });
        }
    }

    /// Says that the device has another size, here only: nothing is sent [NB-37].
    ///
    /// # Errors
    /// `ENOENT` unless it is open, `EOVERFLOW` for more than a disk can have, `EINVAL` for a part
    /// of one of its logical blocks.
    pub fn resize(&mut self, dev: DevId, bytes: u64) -> Result<(), Errno> {
        let device = self.device_mut(dev).filter(|device| device.state == State::Open);
        let limits = device.and_then(|d| d.limits.as_mut()).ok_or(Errno::ENOENT)?;
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

    /// Takes the answer to a service message: `errno` 0 or negative, `data` what the server wrote.
    pub fn answered(&mut self, now: Instant, token: Token, errno: i32, data: &[u8]) {
        match self.asked.remove(&token) {
            // Which version the server speaks changes nothing that is sent [NB-57].
            None | Some(Ask::SessInfo | Ask::Close(None)) => {}
            Some(Ask::Close(Some(dev))) => {
                if let Some(device) = self.device_mut(dev) {
                    device.closing = false;
                }
                self.go_on_unmapping(dev);
            }
            Some(Ask::Open(dev)) => {
                let rsp = match errno {
                    0 => OpenRsp::parse(data).ok_or(Errno::EINVAL),
                    errno => Err(said(errno)),
                };
                self.open_answered(now, token, dev, rsp);
            }
        }
    }

    fn open_answered(
        &mut self,
        now: Instant,
        token: Token,
        dev: DevId,
        rsp: Result<OpenRsp, Errno>,
    ) {
        let session = self.session;
        let zeroes = self.config.write_zeroes;
        let Some(device) = self.device_mut(dev).filter(|d| d.opening == Some(token)) else {
            // Of a session before this one; that server session is gone.
            return;
        };
        device.opening = None;
        let (was, remapping) = (device.state, std::mem::take(&mut device.remapping));
        device.careful = false;
        let read_only = device.access == Access::Ro;
        let opened = rsp.and_then(|rsp| {
            let limits = of_open_rsp(&rsp, session, read_only);
            limits.map_err(|errno| (errno, rsp.device_id)).map_or_else(
                |(errno, id)| Ok((Err(errno), id)),
                |mut limits| {
                    if !zeroes {
                        limits.max_write_zeroes = 0;
                    }
                    Ok((Ok(limits), rsp.device_id))
                },
            )
        });
        let result = match opened {
            Err(errno) => Err(errno),
            // Given up meanwhile [NB-32], or nothing a disk can be made of [NB-30].
            Ok((_, id)) if was == State::Unmapped => {
                device.close_sent = true;
                device.closing = true;
                self.ask(Ask::Close(Some(dev)), wire::emit_close(id).to_vec(), 0);
                Ok(())
            }
            Ok((Err(errno), id)) => {
                self.ask(Ask::Close(None), wire::emit_close(id).to_vec(), 0);
                Err(errno)
            }
            Ok((Ok(limits), id)) => {
                let before = device.limits;
                if before.is_some_and(|before| before.logical != limits.logical) {
                    self.ask(Ask::Close(None), wire::emit_close(id).to_vec(), 0);
                    self.give_up(dev);
                    Err(Errno::EINVAL)
                } else {
                    device.write_through |= !limits.write_cache;
                    device.limits = Some(limits);
                    device.wire_id = id;
                    device.state = State::Open;
                    device.offline_since = None;
                    device.gone = false;
                    if before.is_some_and(|before| before.bytes != limits.bytes) {
                        self.events.push_back(Event::Resized { dev, bytes: limits.bytes });
                    }
                    if was == State::Closed {
                        self.events.push_back(Event::Online { dev });
                    }
                    self.close_others_of(now, dev, id);
                    Ok(())
                }
            }
        };
        match was {
            State::Init => {
                if result.is_err() {
                    self.devices[dev.index as usize] = None;
                }
                self.events.push_back(Event::Mapped { dev, result });
            }
            State::Unmapped => self.go_on_unmapping(dev),
            State::Closed | State::Open => {
                if remapping {
                    self.events.push_back(Event::Remapped { dev, result });
                }
                self.reopen_later(now, dev);
            }
        }
        self.go_on_opening(now);
    }

    /// The server gave `dev` an id that another device has: it has lost its table, so that one is
    /// not open any more.
    fn close_others_of(&mut self, now: Instant, dev: DevId, id: u32) {
        for other in self.ids() {
            let same = |d: &Device| d.state == State::Open && d.wire_id == id;
            if other != dev && self.device(other).is_some_and(same) {
                self.offline(now, other);
                self.reopen_later(now, other);
            }
        }
    }

    /// Tries a closed device again later, if requests may wait for it.
    fn reopen_later(&mut self, now: Instant, dev: DevId) {
        let (up, delay) = (self.up, self.config.reopen_delay);
        let Some(device) = self.device_mut(dev).filter(|_| up) else { return };
        let waits = device.outage != Outage::FailFast;
        if waits && device.state == State::Closed && !device.gone && device.opening.is_none() {
            device.reopen_at = Some(now + delay);
        }
    }

    fn give_up(&mut self, dev: DevId) {
        let Some(device) = self.device_mut(dev) else { return };
        device.gone = true;
        device.reopen_at = None;
        self.events.push_back(Event::Gone { dev });
        self.fail_waiting(dev, Errno::EIO);
    }

    /// Takes a request of the application. One result follows by [`Core::take_done`].
    ///
    /// Zeroes that must stay allocated are written as data unless the server is told by
    /// [`Config::nounmap`]: one that does not know the flag gives them up and says nothing [NB-57].
    /// Without [`Core::set_zeroes`] they are refused with `EOPNOTSUPP`.
    pub fn submit(&mut self, now: Instant, dev: DevId, mut request: DiskRequest<D>) {
        let Some(device) = at(&mut self.devices, dev) else {
            self.queue.refuse(request.done, Errno::EIO.neg(), None);
            return;
        };
        let mut judged = device.judge(now, &request);
        if request.op == IoOp::WriteZeroes && request.nounmap && !self.config.nounmap {
            request.op = IoOp::Write;
            request.mem = self.queue.zeroes.map(|(region, _)| (region, 0));
            judged = judged.and_then(|goes| {
                if goes && request.mem.is_none() { Err(Errno::EOPNOTSUPP) } else { Ok(goes) }
            });
        }
        match judged {
            Ok(true) => {
                let timeout = self.config.io_timeout.map(|after| now + after);
                device.waiting.push_back(self.queue.admit(request, timeout));
                self.queue.waiting += 1;
            }
            Ok(false) => self.queue.refuse(request.done, 0, Some(&mut device.stats)),
            Err(errno) => self.queue.refuse(request.done, errno.neg(), Some(&mut device.stats)),
        }
    }

    /// Appends the IO messages that can go out now.
    pub fn take_sends(&mut self, into: &mut Vec<SendIo>) {
        let stopped = matches!(self.stop, Stop::Until(_));
        if self.queue.waiting == 0 || !self.up || self.hold_until.is_some() || stopped {
            return;
        }
        self.queue.pump(&mut self.devices, into);
    }

    /// Frees a slot; returns its device and work.
    fn free(&mut self, slot: u16) -> Option<(u32, queue::Work)> {
        self.blockers.retain(|blocker| *blocker != slot);
        self.queue.free(slot)
    }

    /// Takes the answer to an IO message: `errno` 0 or negative.
    pub fn io_answer(&mut self, now: Instant, slot: u16, errno: i32) {
        let Some((index, work)) = self.free(slot) else { return };
        let Some(device) = self.devices.get_mut(index as usize).and_then(Option::as_mut) else {
            return;
        };
        device.in_flight -= 1;
        let dev = DevId { index, life: device.life };
        if errno == 0 {
            self.trouble_since = None;
            let mut next = self.queue.finish(work.parent, 0, Some(&mut device.stats));
            let fails = device.outage == Outage::FailFast || device.gone;
            if (device.state == State::Unmapped || device.state == State::Closed && fails)
                && let Some(work) = next.take()
            {
                self.queue.finish(work.parent, Errno::EIO.neg(), Some(&mut device.stats));
            }
            if let Some(work) = next {
                device.waiting.push_back(work);
                self.queue.waiting += 1;
            }
        } else {
            self.io_failed(now, dev, (slot, work), errno);
        }
        if !self.careful.is_empty() {
            self.go_on_opening(now);
        }
        self.go_on_unmapping(dev);
    }

    fn io_failed(
        &mut self,
        now: Instant,
        dev: DevId,
        (slot, work): (u16, queue::Work),
        errno: i32,
    ) {
        let positive = said(errno);
        let forgotten = positive == Errno::ENOTCONN;
        let unreachable = matches!(
            positive,
            Errno::ECONNABORTED | Errno::ECONNRESET | Errno::ESHUTDOWN | Errno::ECOMM
        );
        if forgotten {
            if let Some(device) = at(&mut self.devices, dev)
                && device.limits.is_some_and(|limits| limits.write_cache)
            {
                self.queue.shake(dev.index, &device.waiting, Some(work.parent));
            }
            self.offline(now, dev);
            self.reopen_later(now, dev);
        }
        let Some(device) = self.device_mut(dev) else { return };
        let Outage::Queue(limit) = device.outage else {
            self.fail_piece(dev, work, errno);
            return;
        };
        let open = device.state == State::Open;
        let since = if open { *self.trouble_since.get_or_insert(now) } else { now };
        let late = now.saturating_since(since) >= limit;
        let waits = self.device(dev).is_some_and(|device| {
            matches!(device.state, State::Open | State::Closed) && !device.gone
        });
        if !(forgotten || unreachable) || late || !waits {
            self.fail_piece(dev, work, errno);
            return;
        }
        if open {
            self.hold_until.get_or_insert(now + HOLD_LINK);
        }
        // The server may be at it still.
        let work = self.queue.keep(work, slot);
        self.requeue(dev, work);
    }

    fn fail_piece(&mut self, dev: DevId, work: queue::Work, errno: i32) {
        let magnitude = u16::try_from(errno.unsigned_abs()).unwrap_or(u16::MAX);
        let seen = -i32::from(wire::status_of_errno(magnitude));
        let stats = self.devices[dev.index as usize].as_mut().map(|device| &mut device.stats);
        self.queue.finish(work.parent, seen, stats);
    }

    fn requeue(&mut self, dev: DevId, work: queue::Work) {
        if let Some(device) = self.device_mut(dev) {
            device.stats.resent += 1;
            device.waiting.push_front(work);
            self.queue.waiting += 1;
        }
    }

    /// Tells that an IO message could not be sent at all: `errno` positive. Want of memory is tried
    /// again a little later, everything else is as an answer with that error.
    pub fn send_failed(&mut self, now: Instant, slot: u16, errno: Errno) {
        if !matches!(errno, Errno::EAGAIN | Errno::ENOMEM) {
            self.io_answer(now, slot, errno.neg());
            return;
        }
        let Some((index, work)) = self.free(slot) else { return };
        let Some(device) = self.devices.get_mut(index as usize).and_then(Option::as_mut) else {
            return;
        };
        device.in_flight -= 1;
        let dev = DevId { index, life: device.life };
        self.hold_until.get_or_insert(now + HOLD_BUSY);
        if device.state == State::Unmapped {
            self.fail_piece(dev, work, Errno::EIO.neg());
            self.go_on_unmapping(dev);
        } else {
            let work = self.queue.keep(work, slot);
            self.requeue(dev, work);
        }
        if !self.careful.is_empty() {
            self.go_on_opening(now);
        }
    }

    /// Does what is due.
    pub fn handle_timeout(&mut self, now: Instant) {
        if self.hold_until.is_some_and(|at| at <= now) {
            self.hold_until = None;
        }
        self.queue.time_out(now);
        for dev in self.ids() {
            let Some(device) = self.device(dev) else { continue };
            if device.reopen_at.is_some_and(|at| at <= now) {
                self.open_carefully(now, dev);
                continue;
            }
            let Outage::Queue(limit) = device.outage else { continue };
            let since = device.offline_since;
            if !device.waiting.is_empty() && since.is_some_and(|at| at + limit <= now) {
                self.fail_waiting(dev, Errno::EIO);
            }
        }
        self.go_on_opening(now);
    }

    /// Returns when [`Core::handle_timeout`] is to be called next.
    pub fn poll_timeout(&self) -> Option<Instant> {
        let devices = self.devices.iter().flatten();
        let of_devices = devices.flat_map(|device| {
            let Outage::Queue(limit) = device.outage else { return [None, None] };
            let fails =
                device.offline_since.filter(|_| !device.waiting.is_empty()).map(|at| at + limit);
            [device.reopen_at, fails]
        });
        let stop = match self.stop {
            Stop::Until(at) => Some(at),
            Stop::Rest(at) => Some(at).filter(|_| !self.careful.is_empty() && !self.blocked()),
            Stop::No => None,
        };
        of_devices.chain([self.hold_until, self.queue.next_timeout(), stop]).flatten().min()
    }

    /// Returns the next service message to send.
    pub fn poll_order(&mut self) -> Option<Order> {
        self.orders.pop_front()
    }

    /// Returns what happened next.
    pub fn poll_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    /// Appends the results of requests.
    pub fn take_done(&mut self, into: &mut Vec<DoneIo<D>>) {
        into.append(&mut self.queue.done);
    }

    /// Appends the numbers of requests that were answered late ([`DoneIo::late`]) and are over now.
    pub fn take_ended(&mut self, into: &mut Vec<u32>) {
        into.append(&mut self.queue.ended);
    }

    /// Returns what a device can do, or could when it was open last.
    pub fn limits(&self, dev: DevId) -> Option<Limits> {
        self.device(dev)?.limits
    }

    /// Returns where a device stands.
    pub fn state(&self, dev: DevId) -> Option<State> {
        Some(self.device(dev)?.state)
    }

    /// Returns all devices.
    pub fn infos(&self) -> Vec<DevInfo> {
        let all = (0..).zip(&self.devices);
        all.filter_map(|(index, device)| Some(device.as_ref()?.info(index))).collect()
    }

    /// Asserts what must hold between calls; for tests and the simulator.
    ///
    /// # Panics
    /// When it does not.
    pub fn check_invariants(&self) {
        let waiting: usize = self.devices.iter().flatten().map(|d| d.waiting.len()).sum();
        assert_eq!(waiting, self.queue.waiting, "count of what waits");
        let flying: u32 = self.devices.iter().flatten().map(|d| d.in_flight).sum();
        assert_eq!(flying, self.queue.in_flight(), "count of what is under way");
        let opens = !self.careful.is_empty() || self.opens_carefully();
        match self.stop {
            Stop::No => assert!(!opens, "nobody keeps still for careful opens"),
            Stop::Until(_) => assert!(opens, "all keep still for nothing"),
            Stop::Rest(_) => {}
        }
        for blocker in &self.blockers {
            assert!(self.queue.flying().any(|slot| slot == *blocker), "{blocker} was answered");
        }
        self.queue.check_invariants(&self.devices);
        for (index, device) in self.devices.iter().enumerate() {
            let Some(device) = device else { continue };
            let known = device.limits.is_some();
            assert!(known || !matches!(device.state, State::Open | State::Closed), "{index}");
            let counts = device.offline_since.is_some();
            assert!(counts || device.state != State::Closed, "{index}: requests wait for ever");
        }
    }
}

#[cfg(test)]
mod tests;
