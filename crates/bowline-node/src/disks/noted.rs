//! A disk with a note, in a file, whether changes of it were answered that no flush has made
//! durable: should this process be killed, the next one knows.

use std::{
    os::fd::{BorrowedFd, OwnedFd},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, RwLock,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
};

use bowline_block::{BlockDevice, DeviceMem, DiskEvent, DiskIo, Errno, Extent, Limits};
use bowline_rnbd_driver::client::Disk;
use bowline_verbs::Buffer;

use super::kept;

/// A disk whose changes are noted.
pub(super) struct NotedDisk {
    disk: Arc<Disk>,
    /// The file that a service manager keeps, once there is one.
    note: Mutex<Option<Arc<OwnedFd>>>,
    /// The note says that there may be such changes. Changed with the note locked.
    may_be: AtomicBool,
    /// Whoever submits requests reads it, so that nobody does while the note is withdrawn.
    submitting: RwLock<()>,
}

impl NotedDisk {
    /// Notes changes of a disk in `note`, which may say of former ones that they are not durable.
    pub(super) fn new(disk: &Arc<Disk>, note: Option<&Arc<OwnedFd>>) -> Arc<Self> {
        let may_be = note.is_none_or(|note| kept::may_be_unflushed(note));
        let (note, may_be) = (Mutex::new(note.cloned()), AtomicBool::new(may_be));
        Arc::new(Self { disk: Arc::clone(disk), note, may_be, submitting: RwLock::default() })
    }

    /// Begins another note, which says that there may be such changes.
    pub(super) fn note_in(&self, file: &Arc<OwnedFd>) {
        let mut note = self.note();
        *note = Some(Arc::clone(file));
        self.may_be.store(true, SeqCst);
    }

    /// Withdraws the note if there are no such changes any more. `are_durable` is asked while no
    /// request is submitted.
    pub(super) fn withdraw_if(&self, are_durable: impl FnOnce() -> bool) {
        if !self.may_be.load(SeqCst) {
            return;
        }
        // Who submits may do so again when it is answered, and must not wait for this.
        let Ok(_nobody) = self.submitting.try_write() else { return };
        let note = self.note();
        if let Some(file) = note.as_ref().filter(|_| are_durable()) {
            kept::note_unflushed(file, false);
            self.may_be.store(false, SeqCst);
        }
    }

    fn note(&self) -> MutexGuard<'_, Option<Arc<OwnedFd>>> {
        self.note.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl BlockDevice for NotedDisk {
    fn limits(&self) -> Limits {
        self.disk.limits()
    }

    fn name(&self) -> &str {
        self.disk.name()
    }

    fn memory(&self, len: usize) -> Result<DeviceMem, Errno> {
        self.disk.memory(len)
    }

    fn register(&self, buffer: Arc<Buffer>) -> Result<DeviceMem, Errno> {
        self.disk.register(buffer)
    }

    fn submit(&self, reqs: &mut Vec<DiskIo>) {
        let _submitting = self.submitting.read().unwrap_or_else(PoisonError::into_inner);
        // Before it can be answered.
        if !self.may_be.load(SeqCst) && reqs.iter().any(|io| io.op.changes()) {
            let note = self.note();
            note.iter().for_each(|file| kept::note_unflushed(file, true));
            self.may_be.store(true, SeqCst);
        }
        self.disk.submit(reqs);
    }

    fn take_turn(&self, other: BorrowedFd<'_>, is_waiting: &dyn Fn() -> bool) -> Option<usize> {
        self.disk.take_turn(other, is_waiting)
    }

    fn leave(&self) {
        self.disk.leave();
    }

    fn cancel_unwanted(&self) {
        self.disk.cancel_unwanted();
    }

    fn extent(&self, offset: u64, len: u64) -> Extent {
        self.disk.extent(offset, len)
    }

    fn on_change(&self, f: Box<dyn Fn(DiskEvent) + Send + Sync>) {
        self.disk.on_change(f);
    }
}
