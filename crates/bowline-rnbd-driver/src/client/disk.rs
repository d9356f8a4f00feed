//! A mapped disk.

use std::sync::{Arc, Mutex, PoisonError, RwLock};

use bowline_block::{BlockDevice, DeviceMem, DiskEvent, DiskIo};
use bowline_rnbd::client::{DevId, DevInfo, DiskRequest};
use bowline_rnbd::{Errno, Limits};
use bowline_verbs::{Mem, contain};
use bowline_wire::rnbd::Access;

use super::aside::Aside;
use super::link::{Link, Told};

type Listener = Box<dyn Fn(DiskEvent) + Send + Sync>;

/// What happens to a disk, for those who asked to be told.
pub(super) struct Shared {
    limits: RwLock<Limits>,
    listeners: Mutex<Vec<Arc<Listener>>>,
}

impl Shared {
    pub(super) fn tell(&self, event: DiskEvent, limits: Option<Limits>) {
        if let Some(limits) = limits {
            *self.limits.write().unwrap_or_else(PoisonError::into_inner) = limits;
        }
        let listeners = self.listeners.lock().unwrap_or_else(PoisonError::into_inner).clone();
        for listener in listeners {
            contain(|| listener(event));
        }
    }
}

/// A disk of a server, mapped: a [`BlockDevice`]. It stays mapped until
/// [`Client::unmap`](super::Client::unmap), whoever holds it.
pub struct Disk {
    link: Arc<Link>,
    dev: DevId,
    number: u32,
    local_name: String,
    device: String,
    shared: Arc<Shared>,
    /// Where the data of requests goes, if their time may run out.
    aside: Option<Arc<Aside>>,
}

impl std::fmt::Debug for Disk {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Disk")
            .field("name", &self.local_name)
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
        let shared = Arc::new(Shared { limits, listeners });
        link.attach(dev, &shared);
        Ok(Arc::new(Self {
            link: Arc::clone(link),
            dev,
            number,
            local_name: format!("rnbd{number}"),
            device: device.to_owned(),
            shared,
            aside: link.has_timeout().then(|| Aside::new(link.session())),
        }))
    }

    /// Returns its name here, `rnbd0` [NB-33].
    pub fn local_name(&self) -> &str {
        &self.local_name
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

    /// Returns where it stands and what was done with it; `None` once it is unmapped.
    pub fn info(&self) -> Option<DevInfo> {
        self.link.info(self.dev)
    }

    /// Opens a closed disk again and waits for the answer [NB-37].
    ///
    /// # Errors
    /// `EALREADY` when it is open, `EBUSY` while that is under way or requests of other disks of
    /// the session do not end in time [NB-16], `ENODEV` when it is unmapped or meanwhile is,
    /// `ECONNABORTED` while the session is away, and what the server answers.
    pub fn remap(&self) -> Result<(), Errno> {
        self.link.remap(self.dev)
    }

    /// Changes the size this side believes in; nothing is sent [NB-37].
    ///
    /// # Errors
    /// `ENOENT` unless it is open, `EOVERFLOW` for more than a disk can have, `EINVAL` for a part
    /// of one of its logical blocks.
    pub fn resize(&self, bytes: u64) -> Result<(), Errno> {
        self.link.resize(self.dev, bytes)
    }

    /// From now on requests do not wait for a lost session, whatever the disk was mapped with:
    /// while it is away they fail with `EIO`, and those that wait for it already fail now. While it
    /// is there nothing changes. For those who are about to give the disk up and have first to
    /// close what stands in front of it, which waits for its requests.
    pub fn fail_fast(&self) {
        self.link.fail_fast(self.dev);
    }

    /// Takes completions that are there, and runs what they lead to, in this thread; returns how
    /// many. For programs that do not want to wait for another thread.
    pub fn poll(&self) -> usize {
        self.link.session().poll()
    }

    /// How many requests of its session have ended so far. For [`Disk::wait`].
    pub fn ended(&self) -> u64 {
        self.link.session().ended()
    }

    /// As [`Disk::poll`], but waits until more than `seen` requests have ended, no longer than
    /// `limit`; tells whether they have. `seen` is what [`Disk::ended`] said before the program
    /// looked whether it has to wait.
    pub fn wait(&self, seen: u64, limit: Option<std::time::Duration>) -> bool {
        self.link.session().wait(seen, limit)
    }

    pub(super) fn unmap(&self) -> Result<(), Errno> {
        self.link.unmap(self.dev)
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
        let region = self.link.session().region(len).map_err(|error| error.errno())?;
        let mem = Mem { buffer: Arc::clone(region.buffer()), offset: 0, len };
        let id = region.id().0;
        if let Some(aside) = &self.aside {
            aside.name(id, region.buffer());
        }
        Ok(DeviceMem::new(mem, id, region))
    }

    fn submit(&self, reqs: &mut Vec<DiskIo>) {
        if let Some(aside) = &self.aside {
            *reqs = reqs.drain(..).filter_map(|io| aside.lead(io)).collect();
        }
        let requests = reqs.drain(..).map(|io| DiskRequest {
            op: io.op,
            offset: io.offset,
            len: io.len,
            fua: io.fua,
            nounmap: io.nounmap,
            mem: io.mem.map(|(region, at)| (region, at as u64)),
            done: Told { to: io.done, tag: io.tag },
        });
        self.link.submit(self.dev, requests);
    }

    fn forget(&self) {
        self.link.forget();
    }

    fn on_change(&self, f: Box<dyn Fn(DiskEvent) + Send + Sync>) {
        self.shared.listeners.lock().unwrap_or_else(PoisonError::into_inner).push(Arc::new(f));
    }
}
