//! A mapped disk.

use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex, PoisonError, RwLock, mpsc};

use bowline_block::{BlockDevice, DeviceMem, DiskDone, DiskEvent, DiskIo};
use bowline_rnbd::client::{DevId, DevInfo, DiskRequest, State};
use bowline_rnbd::{Errno, Failures, IoOp, Limits};
use bowline_verbs::{Buffer, Mem, catch_callback_panic};
use bowline_wire::rnbd::Access;

use super::bounce::BouncePool;
use super::link::{Completion, Link};

type Listener = Box<dyn Fn(DiskEvent) + Send + Sync>;

/// State of a disk that the link updates: limits and event listeners.
pub(super) struct DiskShared {
    /// Its local name, `rnbd0`.
    name: String,
    limits: RwLock<Limits>,
    listeners: Mutex<Vec<Arc<Listener>>>,
}

impl DiskShared {
    pub(super) fn notify(&self, event: DiskEvent, limits: Option<Limits>) {
        if let Some(limits) = limits {
            *self.limits.write().unwrap_or_else(PoisonError::into_inner) = limits;
        }
        #[cfg(feature = "tracing")]
        crate::log::disk(&self.name, event);
        let listeners = self.listeners.lock().unwrap_or_else(PoisonError::into_inner).clone();
        for listener in listeners {
            catch_callback_panic(|| listener(event));
        }
    }
}

/// A disk of a server, mapped: a [`BlockDevice`]. It stays mapped until
/// [`Client::unmap`](super::Client::unmap), even if all references to it are dropped.
pub struct Disk {
    link: Arc<Link>,
    dev: DevId,
    number: u32,
    device: String,
    shared: Arc<DiskShared>,
    /// Bounce buffers of requests, if there is an IO timeout.
    bounce_pool: Option<Arc<BouncePool>>,
}

impl std::fmt::Debug for Disk {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Disk")
            .field("name", &self.shared.name)
            .field("device", &self.device)
            .field("session", &self.session_name())
            .finish_non_exhaustive()
    }
}

impl Disk {
    pub(super) fn map(
        link: &Arc<Link>,
        device: &str,
        access: Access,
        number: u32,
    ) -> Result<Arc<Self>, Errno> {
        let (dev, limits) = link.map(device, access)?;
        let (limits, listeners) = (RwLock::new(limits), Mutex::default());
        let name = format!("rnbd{number}");
        let shared = Arc::new(DiskShared { name, limits, listeners });
        link.attach(dev, &shared);
        Ok(Arc::new(Self {
            link: Arc::clone(link),
            dev,
            number,
            device: device.to_owned(),
            shared,
            bounce_pool: link.has_timeout().then(|| BouncePool::new(link.session())),
        }))
    }

    /// Returns its local name, `rnbd0` [NB-33].
    pub fn local_name(&self) -> &str {
        &self.shared.name
    }

    /// Returns the name of its session.
    pub fn session_name(&self) -> &str {
        self.link.session().name()
    }

    /// Returns how many connections for polled IO each path of its session was opened with.
    pub fn poll_queues(&self) -> u16 {
        self.link.poll_queues()
    }

    pub(super) const fn number(&self) -> u32 {
        self.number
    }

    /// Returns its state and counters; `None` once it is unmapped.
    pub fn info(&self) -> Option<DevInfo> {
        self.link.info(self.dev)
    }

    /// Returns the requests that the server's storage has failed; `None` once it is unmapped.
    pub fn failures(&self) -> Option<Failures> {
        self.link.failures(self.dev)
    }

    /// Opens a closed disk again and waits for the answer [NB-37].
    ///
    /// # Errors
    /// `EALREADY` when it is open, `EBUSY` during another remap or when requests of other disks of
    /// the session do not end in time [NB-16], `ENODEV` when it is or becomes unmapped,
    /// `ECONNABORTED` while the session is lost, and the errors of the server.
    pub fn remap(&self) -> Result<(), Errno> {
        self.link.remap(self.dev)
    }

    /// Changes the size of the disk on this side only; nothing is sent [NB-37].
    ///
    /// # Errors
    /// `ENOENT` unless it is open, `EOVERFLOW` for a size above [`Limits::BYTES_MAX`], `EINVAL` for
    /// a size that is no multiple of its logical block.
    pub fn resize(&self, bytes: u64) -> Result<(), Errno> {
        self.link.resize(self.dev, bytes)
    }

    /// Tells whether the export has this many bytes: asks the server to read the last block of them
    /// [NB-74]. Waits for the answer.
    ///
    /// # Errors
    /// As [`resize`](Self::resize); `ENOMEM`; `ETIMEDOUT`.
    pub fn holds(&self, bytes: u64) -> Result<bool, Errno> {
        let is_open = || self.info().is_some_and(|info| info.state == State::Open);
        let logical = self.limits().logical;
        if !is_open() {
            return Err(Errno::ENOENT);
        }
        if bytes > Limits::BYTES_MAX {
            return Err(Errno::EOVERFLOW);
        }
        if !bytes.is_multiple_of(logical.into()) {
            return Err(Errno::EINVAL);
        }
        let Some(last) = bytes.checked_sub(logical.into()) else { return Ok(true) };
        let memory = self.memory(logical as usize)?;
        let (answered, answer) = mpsc::channel();
        let mut io = DiskIo::new(IoOp::Read, last, logical, Arc::new(Answered(answered)));
        io.mem = Some((memory.region, 0));
        let io = match &self.bounce_pool {
            Some(bounce_pool) => bounce_pool.bounce(io),
            None => Some(io),
        };
        if let Some(io) = io {
            self.link.probe(self.dev, request(io));
        }
        match answer.recv() {
            Ok(0) => Ok(true),
            Ok(errno) if errno == Errno::ETIMEDOUT.neg() => Err(Errno::ETIMEDOUT),
            // What has failed is the session.
            _ if !is_open() => Err(Errno::ENOENT),
            _ => Ok(false),
        }
    }

    /// Makes requests fail with `EIO` while the session is lost, whatever the disk was mapped with.
    /// Requests that wait for the session already fail now. While the session is up nothing
    /// changes. Call it before closing a front end in order to unmap the disk: a front end waits
    /// for its requests when it closes.
    pub fn fail_fast(&self) {
        self.link.fail_fast(self.dev);
    }

    /// Handles the completions that have arrived, callbacks included, in this thread; returns their
    /// number. For programs that poll instead of waiting for another thread.
    pub fn poll(&self) -> usize {
        self.link.session().poll()
    }

    /// Returns how many requests of its session have ended so far, for [`Disk::wait`].
    pub fn ended(&self) -> u64 {
        self.link.session().ended()
    }

    /// As [`Disk::poll`], but waits until more than `seen` requests have ended, or until `limit`
    /// has passed; returns true if they have ended. Take `seen` from [`Disk::ended`] before
    /// checking whether there is anything to wait for.
    pub fn wait(&self, seen: u64, limit: Option<std::time::Duration>) -> bool {
        self.link.session().wait(seen, limit)
    }

    pub(super) fn unmap(&self) -> Result<(), Errno> {
        self.link.unmap(self.dev)
    }
}

/// Sends on the result of one request.
struct Answered(mpsc::Sender<i32>);

impl DiskDone for Answered {
    fn done(&self, results: &[(u64, i32)]) {
        for (_, errno) in results {
            // Who asked waits for it.
            let _ = self.0.send(*errno);
        }
    }
}

fn request(io: DiskIo) -> DiskRequest<Completion> {
    DiskRequest {
        op: io.op,
        offset: io.offset,
        len: io.len,
        fua: io.fua,
        nounmap: io.nounmap,
        mem: io.mem.map(|(region, at)| (region, at as u64)),
        done: Completion { to: io.done, tag: io.tag },
    }
}

impl BlockDevice for Disk {
    fn limits(&self) -> Limits {
        *self.shared.limits.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn name(&self) -> &str {
        &self.device
    }

    fn memory(&self, len: usize) -> Result<DeviceMem, Errno> {
        self.register(Arc::new(Buffer::new(len).map_err(|_| Errno::ENOMEM)?))
    }

    fn register(&self, buffer: Arc<Buffer>) -> Result<DeviceMem, Errno> {
        let len = buffer.len();
        let region = self.link.session().register(buffer).map_err(|error| error.errno())?;
        let mem = Mem { buffer: Arc::clone(region.buffer()), offset: 0, len };
        let id = region.id().0;
        if let Some(bounce_pool) = &self.bounce_pool {
            bounce_pool.register(id, region.buffer());
        }
        Ok(DeviceMem::new(mem, id, region))
    }

    fn submit(&self, reqs: &mut Vec<DiskIo>) {
        if let Some(bounce_pool) = &self.bounce_pool {
            *reqs = reqs.drain(..).filter_map(|io| bounce_pool.bounce(io)).collect();
        }
        self.link.submit(self.dev, reqs.drain(..).map(request));
    }

    fn take_turn(&self, other: BorrowedFd<'_>, is_waiting: &dyn Fn() -> bool) -> Option<usize> {
        self.link.session().take_turn(other, is_waiting)
    }

    fn leave(&self) {
        self.link.session().leave();
    }

    fn cancel_unwanted(&self) {
        self.link.cancel_unwanted();
    }

    fn on_change(&self, f: Box<dyn Fn(DiskEvent) + Send + Sync>) {
        self.shared.listeners.lock().unwrap_or_else(PoisonError::into_inner).push(Arc::new(f));
    }
}
