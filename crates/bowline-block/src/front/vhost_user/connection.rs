//! The connection of one machine: its thread handles messages, and takes requests off all rings.

use std::io::{self, IoSlice, IoSliceMut, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FileType, OFlags};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};

use super::inflight::{self, InflightRegion};
use super::log::DirtyLog;
use super::memory::{GuestMemory, Part};
use super::ring::{Agreed, SIZE_MAX, SplitRing, UsedLog, used_len};
use super::rings::{Logs, Rings, Running, Taken, signal};
use super::wire::{self, HEADER_LEN, HasFd, Header, Message, REGIONS_MAX, RingAddresses};
use super::{RINGS_MAX, Shared};
use crate::device::DiskIo;

/// How long the rest of a message may take, and the machine's process to take a reply.
const PATIENCE: Duration = Duration::from_secs(10);
/// How often requests of a former connection are looked for, that keep rings from being started.
const LINGER_POLL: Timespec = Timespec { tv_sec: 0, tv_nsec: 10_000_000 };
const AT_ONCE: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };
/// Most times in a row that an event descriptor is ready and has no event.
const FALSE_EVENTS_MAX: u8 = 16;

/// How a connection ended.
pub(super) enum Ended {
    /// The machine's process has ended it, or the server in good order.
    HungUp,
    /// It broke the protocol, or asked for what there is not.
    Broken(String),
}

impl From<io::Error> for Ended {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::WouldBlock => Self::Broken("half a message came".to_owned()),
            _ => Self::HungUp,
        }
    }
}

fn broken<T>(why: &str) -> Result<T, Ended> {
    Err(Ended::Broken(why.to_owned()))
}

/// What the machine has said of a ring.
#[derive(Default)]
struct Setup {
    /// Number of descriptors; 0 as long as it is not known.
    size: u16,
    next: u16,
    addresses: Option<RingAddresses>,
    kick: Option<OwnedFd>,
    call: Option<Arc<OwnedFd>>,
    error: Option<Arc<OwnedFd>>,
    enabled: bool,
    /// It has run, and waits until the machine adds its memory again.
    waits_for_memory: bool,
    /// The guest may have put requests there without a kick that was seen.
    is_due: bool,
    false_events: u8,
}

/// A connection, as its thread sees it.
pub(super) struct Connection {
    rings: Arc<Rings>,
    server: Arc<Shared>,
    features: u64,
    protocol: u64,
    memory: Arc<GuestMemory>,
    inflight: Option<InflightRegion>,
    /// Where writes to memory are logged, as long as that is agreed on.
    log: Option<Arc<DirtyLog>>,
    log_call: Option<Arc<OwnedFd>>,
    /// To tell the machine of another size of the disk.
    channel: Option<UnixStream>,
    setups: Vec<Setup>,
    batch: Vec<DiskIo>,
}

impl Connection {
    pub(super) fn new(rings: Arc<Rings>, server: Arc<Shared>) -> Self {
        Self {
            rings,
            server,
            features: 0,
            protocol: 0,
            memory: Arc::default(),
            inflight: None,
            log: None,
            log_call: None,
            channel: None,
            setups: std::iter::repeat_with(Setup::default).take(RINGS_MAX).collect(),
            batch: Vec::new(),
        }
    }

    /// Serves until one side ends it; returns how.
    pub(super) fn run(mut self) -> Ended {
        let socket = self.rings.client.socket();
        let patient = socket
            .set_read_timeout(Some(PATIENCE))
            .and_then(|()| socket.set_write_timeout(Some(PATIENCE)));
        let ended = match patient {
            Ok(()) => loop {
                if let Err(ended) = self.turn() {
                    break ended;
                }
            },
            Err(error) => error.into(),
        };
        self.rings.end();
        ended
    }

    /// Waits for something, and handles it.
    fn turn(&mut self) -> Result<(), Ended> {
        if self.rings.is_detached() {
            self.rings.wait_for_all();
            return Err(Ended::HungUp);
        }
        let waits = !self.start_rings()?;
        self.take_requests()?;
        let is_due = self.setups.iter().any(|setup| setup.is_due && setup.kick.is_some());
        let timeout = match (waits, is_due) {
            (true, _) => Some(&LINGER_POLL),
            (false, true) => Some(&AT_ONCE),
            (false, false) => None,
        };
        let rings = Arc::clone(&self.rings);
        let mut fds = vec![
            PollFd::new(rings.client.socket(), PollFlags::IN),
            PollFd::new(&rings.wake, PollFlags::IN),
        ];
        let kicks = self.setups.iter().enumerate();
        let kicks = kicks.filter_map(|(index, setup)| Some((index, setup.kick.as_ref()?)));
        let mut polled = Vec::new();
        for (index, kick) in kicks {
            polled.push(index);
            fds.push(PollFd::new(kick, PollFlags::IN));
        }
        // Fails only when a signal interrupts it.
        if poll(&mut fds, timeout).is_err() {
            return Ok(());
        }
        let events: Vec<PollFlags> = fds.iter().map(PollFd::revents).collect();
        drop(fds);
        for (index, events) in polled.into_iter().zip(&events[2..]) {
            if !events.is_empty() {
                self.kicked(index)?;
            }
        }
        if !events[1].is_empty() {
            // An error means that there is nothing to read.
            let _ = rustix::io::read(&self.rings.wake, &mut [0_u8; 8]);
            self.setups.iter_mut().for_each(|setup| setup.is_due = true);
            self.announce_size();
        }
        if events[0].is_empty() { Ok(()) } else { self.receive() }
    }

    fn kicked(&mut self, index: usize) -> Result<(), Ended> {
        let setup = &mut self.setups[index];
        let Some(kick) = &setup.kick else { return Ok(()) };
        match rustix::io::read(kick, &mut [0_u8; 8]) {
            Ok(8) => setup.false_events = 0,
            // Another reader of the descriptor was faster.
            Err(rustix::io::Errno::AGAIN) if setup.false_events < FALSE_EVENTS_MAX => {
                setup.false_events += 1;
            }
            _ => return broken("the event descriptor of a ring has no events"),
        }
        setup.is_due = true;
        Ok(())
    }

    /// Tells the machine that the disk has another size, if it has.
    fn announce_size(&mut self) {
        if self.rings.resized.swap(false, Ordering::AcqRel)
            && let Some(channel) = &mut self.channel
            && channel.write_all(&wire::config_changed()).is_err()
        {
            // It does not listen, and learns the size when it asks.
            self.channel = None;
        }
    }

    /// Takes requests off rings that may have some.
    fn take_requests(&mut self) -> Result<(), Ended> {
        for index in 0..self.setups.len() {
            if !std::mem::take(&mut self.setups[index].is_due) {
                continue;
            }
            let taken = self.rings.take(index, &mut self.batch);
            self.setups[index].is_due = taken == Taken::Some;
            if let Taken::Broken(why) = taken {
                self.server.report(&format!("queue {index} is stopped: its guest put {}", why.0));
            }
        }
        if !self.batch.is_empty() {
            self.rings.disk.submit(&mut self.batch);
            // This thread takes no turns.
            self.rings.disk.leave();
        }
        Ok(())
    }

    /// Starts rings that have all they need; returns false if they have to wait until requests of
    /// former connections have ended, which would overtake their repetitions.
    fn start_rings(&mut self) -> Result<bool, Ended> {
        for index in 0..self.setups.len() {
            let setup = &self.setups[index];
            let is_ready = setup.kick.is_some() && setup.size > 0 && setup.addresses.is_some();
            if !is_ready || self.rings.is_running(index) {
                continue;
            }
            if setup.waits_for_memory && self.parts(index).is_err() {
                continue;
            }
            if self.server.lingers() {
                return Ok(false);
            }
            self.start_ring(index)?;
        }
        Ok(true)
    }

    fn start_ring(&mut self, index: usize) -> Result<(), Ended> {
        let parts = self.parts(index)?;
        let logs = self.logs(index)?;
        let setup = &mut self.setups[index];
        let agreed = Agreed {
            event_index: self.features & wire::F_EVENT_IDX != 0,
            indirect: self.features & wire::F_INDIRECT != 0,
        };
        let mut ring = SplitRing::new(parts, setup.size, agreed, setup.next);
        let mut inflight =
            self.inflight.as_ref().and_then(|region| region.queue(index, setup.size));
        let again = inflight.as_mut().map(|queue| queue.recover(ring.next_used()));
        if let Some(again) = &again {
            // All that were taken are used, or in flight.
            ring.set_next(ring.next_used().wrapping_add(again.len() as u16));
        }
        (setup.is_due, setup.waits_for_memory) = (true, false);
        let paused = !setup.enabled && self.features & wire::F_PROTOCOL != 0;
        let mut running = Running {
            ring,
            memory: Arc::clone(&self.memory),
            call: setup.call.clone(),
            error: setup.error.clone(),
            inflight,
            again: again.unwrap_or_default().into(),
            knows_cache: self.features & wire::F_FLUSH != 0,
            log: None,
            log_call: None,
        };
        running.set_logs(logs);
        self.rings.start(index, running);
        self.rings.pause(index, paused);
        Ok(())
    }

    fn parts(&self, index: usize) -> Result<[Part; 3], Ended> {
        let parts = self.parts_in(&self.memory, index);
        parts.ok_or_else(|| Ended::Broken("a ring lies outside of memory".to_owned()))
    }

    fn parts_in(&self, memory: &GuestMemory, index: usize) -> Option<[Part; 3]> {
        let setup = &self.setups[index];
        setup.addresses.and_then(|addresses| memory.ring(&addresses, setup.size))
    }

    /// Returns where writes of a ring are logged.
    fn logs(&self, index: usize) -> Result<Logs, Ended> {
        let Some(log) = &self.log else { return Ok(Logs::default()) };
        let setup = &self.setups[index];
        let used = setup.addresses.and_then(|addresses| addresses.log);
        let is_held = |guest: &u64| log.holds(*guest, used_len(setup.size));
        if used.is_some_and(|guest| !is_held(&guest)) {
            return broken("a used ring lies outside of the dirty log");
        }
        let is_on = self.features & wire::F_LOG_ALL != 0;
        if is_on && !self.memory.fits(log) {
            return broken("the dirty log is shorter than memory");
        }
        Ok(Logs {
            memory: is_on.then(|| Arc::clone(log)),
            used: used.map(|guest| UsedLog { log: Arc::clone(log), guest }),
            call: self.log_call.clone(),
        })
    }

    /// Moves a running ring to where it is now, and its log.
    fn relocate(&mut self, index: usize) -> Result<(), Ended> {
        if self.rings.is_running(index) {
            let (parts, memory) = (self.parts(index)?, Arc::clone(&self.memory));
            let logs = self.logs(index)?;
            self.rings.change(index, |running| {
                running.ring.relocate(parts);
                running.memory = memory;
                running.set_logs(logs);
            });
        }
        Ok(())
    }

    fn relocate_all(&mut self) -> Result<(), Ended> {
        (0..self.setups.len()).try_for_each(|index| self.relocate(index))
    }

    /// Receives and handles a message.
    fn receive(&mut self) -> Result<(), Ended> {
        let (header, body, fds) = receive(self.rings.client.socket())?;
        let Some(message) = Message::parse(header.request, &body) else {
            return broken(&format!("message {} is unknown or invalid", header.request));
        };
        let acknowledge = header.needs_reply && self.protocol & wire::REPLY_ACK != 0;
        match self.handle(&header, message, &body, fds) {
            Ok(Some(reply)) => Ok(self.send(&header, &reply, &[])?),
            Ok(None) if acknowledge => Ok(self.send(&header, &0_u64.to_ne_bytes(), &[])?),
            Ok(None) => Ok(()),
            Err(ended) => {
                if acknowledge {
                    // The connection ends anyhow.
                    let _ = self.send(&header, &1_u64.to_ne_bytes(), &[]);
                }
                Err(ended)
            }
        }
    }

    fn send(&self, header: &Header, body: &[u8], fds: &[&OwnedFd]) -> io::Result<()> {
        let bytes = wire::reply(header.request, body);
        let fds: Vec<_> = fds.iter().map(|fd| fd.as_fd()).collect();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            ancillary.push(SendAncillaryMessage::ScmRights(&fds));
        }
        let socket = self.rings.client.socket();
        let piece = [IoSlice::new(&bytes)];
        let n = rustix::net::sendmsg(socket, &piece, &mut ancillary, SendFlags::NOSIGNAL)?;
        // A reply is short, and the machine's process takes it before it sends the next message.
        if n == bytes.len() { Ok(()) } else { Err(io::ErrorKind::WriteZero.into()) }
    }

    /// Handles a message; returns the body of its reply, if it has one.
    fn handle(
        &mut self,
        header: &Header,
        message: Message,
        body: &[u8],
        mut fds: Vec<OwnedFd>,
    ) -> Result<Option<Vec<u8>>, Ended> {
        let number = |number: u64| Ok(Some(number.to_ne_bytes().to_vec()));
        match message {
            Message::GetFeatures => return number(wire::features(&self.rings.limits())),
            Message::SetFeatures(features) => {
                self.features = features;
                self.relocate_all()?;
            }
            Message::SetOwner | Message::SetConfig => {}
            Message::GetProtocolFeatures => return number(wire::PROTOCOL_FEATURES),
            Message::SetProtocolFeatures(features) => self.protocol = features,
            Message::GetQueueNum => return number(RINGS_MAX as u64),
            Message::SetMemory(regions) => self.set_memory(&regions, fds)?,
            Message::SetLog(range) => {
                let file = fds.pop().ok_or_else(no_descriptor)?;
                let log = DirtyLog::open(&range, &file);
                let log = log.map_err(|error| Ended::Broken(format!("no dirty log: {error}")))?;
                self.log = Some(Arc::new(log));
                self.relocate_all()?;
                // From now on nothing is written to the former log.
                return Ok(Some(body.to_vec()));
            }
            Message::SetLogCall => {
                self.log_call = event(HasFd::Yes, &mut fds)?.map(Arc::new);
                self.relocate_all()?;
            }
            Message::SetRingSize(ring, size) => {
                let valid = size.is_power_of_two() && size <= SIZE_MAX.into();
                let setup = self.stopped(ring)?;
                if !valid {
                    return broken("a queue has an invalid size, which has to be 1, 2, 4 .. 1024");
                }
                setup.size = size as u16;
            }
            Message::SetRingAddresses(ring, addresses) => {
                self.setup(ring)?.addresses = Some(addresses);
                self.relocate(ring as usize)?;
            }
            // Of a split ring, the upper half means nothing.
            Message::SetRingBase(ring, next) => self.stopped(ring)?.next = next as u16,
            Message::GetRingBase(ring) => return self.stop_ring(ring).map(Some),
            Message::SetRingKick(ring, fd) => {
                let Some(kick) = event(fd, &mut fds)? else {
                    return broken("a queue has to be polled, which is not supported");
                };
                let setup = self.setup(ring)?;
                (setup.kick, setup.is_due) = (Some(kick), true);
            }
            Message::SetRingCall(ring, fd) => {
                let call = event(fd, &mut fds)?.map(Arc::new);
                // What was used until now may have had nobody to call.
                call.iter().for_each(|call| signal(call));
                self.setup(ring)?.call.clone_from(&call);
                self.rings.change(ring as usize, |running| running.call = call);
            }
            Message::SetRingError(ring, fd) => {
                let error = event(fd, &mut fds)?.map(Arc::new);
                self.setup(ring)?.error.clone_from(&error);
                self.rings.set_error(ring as usize, error);
            }
            Message::SetRingEnabled(ring, enabled) => {
                let setup = self.setup(ring)?;
                (setup.enabled, setup.is_due) = (enabled, true);
                self.rings.pause(ring as usize, !enabled);
            }
            Message::SetBackendChannel => {
                let channel = fds.pop().ok_or_else(no_descriptor)?;
                if file_type(&channel)? != FileType::Socket {
                    return broken("the channel to the machine is no socket");
                }
                let channel = UnixStream::from(channel);
                channel.set_nonblocking(true)?;
                self.channel = Some(channel);
            }
            Message::GetConfig(offset, len, flags) => {
                // Their sum is within the space, as was checked.
                let config = wire::config(&self.rings.limits(), RINGS_MAX as u16);
                let config = &config[offset as usize..][..len as usize];
                let numbers = [offset, len, flags].into_iter().flat_map(u32::to_ne_bytes);
                return Ok(Some(numbers.chain(config.iter().copied()).collect()));
            }
            Message::GetInflight(asked) => {
                let created = inflight::create(asked.queues, asked.queue_size);
                let (file, spec) = created.map_err(|error| no_region(&error))?;
                let body = wire::inflight_body(&spec, body.len());
                self.send(header, &body, &[&file])?;
            }
            Message::SetInflight(spec) => {
                let file = fds.pop().ok_or_else(no_descriptor)?;
                let region = InflightRegion::open(&spec, file);
                self.inflight = Some(region.map_err(|error| no_region(&error))?);
            }
            Message::GetMemorySlots => return number(wire::SLOTS_MAX as u64),
            Message::AddMemory(region) => self.add_memory(&region, fds)?,
            Message::RemoveMemory(region) => self.remove_memory(&region)?,
        }
        Ok(None)
    }

    fn setup(&mut self, ring: u32) -> Result<&mut Setup, Ended> {
        let setup = self.setups.get_mut(ring as usize);
        setup.ok_or_else(|| Ended::Broken(format!("there is no queue {ring}")))
    }

    /// Returns a ring that must not run.
    fn stopped(&mut self, ring: u32) -> Result<&mut Setup, Ended> {
        self.setup(ring)?;
        if self.rings.is_running(ring as usize) {
            return broken("a queue that runs is set up");
        }
        self.setup(ring)
    }

    fn set_memory(&mut self, regions: &[wire::RegionSpec], fds: Vec<OwnedFd>) -> Result<(), Ended> {
        let memory = GuestMemory::new(&*self.rings.disk, &self.memory, regions, fds);
        self.change_memory(memory.map_err(Ended::Broken)?)
    }

    fn add_memory(&mut self, region: &wire::RegionSpec, fds: Vec<OwnedFd>) -> Result<(), Ended> {
        let [file] = &fds[..] else { return Err(no_descriptor()) };
        let memory = self.memory.with(&*self.rings.disk, region, file);
        self.change_memory(memory.map_err(Ended::Broken)?)
    }

    fn remove_memory(&mut self, region: &wire::RegionSpec) -> Result<(), Ended> {
        let memory = self.memory.without(region);
        let memory = memory.ok_or_else(|| Ended::Broken("memory that is not there".to_owned()))?;
        for index in 0..self.setups.len() {
            if self.rings.is_running(index) && self.parts_in(&memory, index).is_none() {
                self.suspend(index)?;
            }
        }
        self.change_memory(memory)
    }

    /// Stops a ring whose memory is removed, once its requests have ended. It starts again with its
    /// memory: machines change a region by removing it and adding another one.
    fn suspend(&mut self, index: usize) -> Result<(), Ended> {
        let next = self.rings.stop(index).ok_or(Ended::HungUp)?;
        let is_broken = self.rings.is_broken(index);
        let setup = &mut self.setups[index];
        (setup.next, setup.waits_for_memory) = (next, true);
        if is_broken {
            // It is not served until the machine sets it up again.
            setup.kick = None;
        }
        Ok(())
    }

    /// Has rings use memory as it is now. The machine may do anything with what it removes when it
    /// has its answer, so requests that use it end before.
    fn change_memory(&mut self, memory: GuestMemory) -> Result<(), Ended> {
        let before = std::mem::replace(&mut self.memory, Arc::new(memory));
        self.relocate_all()?;
        let removed = before.removed(&self.memory);
        if self.rings.wait_for_users(&removed) { Ok(()) } else { Err(Ended::HungUp) }
    }

    /// Stops a ring, as the machine asks when it stops itself; returns the body of the reply.
    fn stop_ring(&mut self, ring: u32) -> Result<Vec<u8>, Ended> {
        let next = self.setup(ring)?.next;
        let runs = self.rings.is_running(ring as usize);
        let next = match self.rings.stop(ring as usize) {
            Some(next) => next,
            None if runs => return Err(Ended::HungUp),
            None => next,
        };
        let setup = self.setup(ring)?;
        *setup = Setup { size: setup.size, next, addresses: setup.addresses, ..Setup::default() };
        Ok([ring, next.into()].into_iter().flat_map(u32::to_ne_bytes).collect())
    }
}

fn no_region(error: &io::Error) -> Ended {
    Ended::Broken(format!("no region for requests in flight: {error}"))
}

fn no_descriptor() -> Ended {
    Ended::Broken("a message without its descriptor".to_owned())
}

/// Returns the event descriptor that came with a message. From now on no call on it waits.
fn event(expected: HasFd, fds: &mut Vec<OwnedFd>) -> Result<Option<OwnedFd>, Ended> {
    if expected == HasFd::No {
        return Ok(None);
    }
    let event = fds.pop().ok_or_else(no_descriptor)?;
    // An event descriptor is of no type that files have.
    if file_type(&event)? != FileType::Unknown {
        return broken("what should be an event descriptor is a file or a socket");
    }
    let flags = rustix::fs::fcntl_getfl(&event).map_err(io::Error::from)?;
    rustix::fs::fcntl_setfl(&event, flags | OFlags::NONBLOCK).map_err(io::Error::from)?;
    Ok(Some(event))
}

fn file_type(fd: &OwnedFd) -> io::Result<FileType> {
    Ok(FileType::from_raw_mode(rustix::fs::fstat(fd)?.st_mode))
}

/// Receives a message with its descriptors.
fn receive(socket: &UnixStream) -> Result<(Header, Vec<u8>, Vec<OwnedFd>), Ended> {
    let (mut bytes, mut fds) = ([0; HEADER_LEN], Vec::new());
    receive_all(socket, &mut bytes, &mut fds)?;
    let Some(header) = Header::parse(&bytes) else {
        return broken("what came is no message of vhost-user");
    };
    let mut body = vec![0; header.len];
    receive_all(socket, &mut body, &mut fds)?;
    if fds.len() > REGIONS_MAX {
        return broken("more descriptors than a message has");
    }
    Ok((header, body, fds))
}

fn receive_all(
    socket: &UnixStream,
    mut bytes: &mut [u8],
    fds: &mut Vec<OwnedFd>,
) -> Result<(), Ended> {
    while !bytes.is_empty() {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(REGIONS_MAX))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let piece = &mut [IoSliceMut::new(bytes)];
        let flags = RecvFlags::CMSG_CLOEXEC;
        let received = match rustix::net::recvmsg(socket, piece, &mut ancillary, flags) {
            Ok(received) => received,
            Err(rustix::io::Errno::INTR) => continue,
            Err(error) => return Err(io::Error::from(error).into()),
        };
        for message in ancillary.drain() {
            if let RecvAncillaryMessage::ScmRights(rights) = message {
                fds.extend(rights);
            }
        }
        if received.bytes == 0 {
            return Err(Ended::HungUp);
        }
        if received.flags.contains(ReturnFlags::CTRUNC) || fds.len() > REGIONS_MAX {
            return broken("more descriptors than a message has");
        }
        bytes = &mut bytes[received.bytes..];
    }
    Ok(())
}
