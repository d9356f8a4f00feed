//! Memory of a program that is watched: an access fails where something else is now at the address.
//! How, [`bowline_host_wire::watch`] says.
//!
//! What was read is looked at afterwards, so that nothing else ever goes to a peer. What is written
//! goes where a look just before has found the memory: if the program puts something else there
//! between the two, in which it takes part itself by a call of its own, that is changed.

#![allow(unsafe_code, reason = "rustix has other requests of this kind, but not these")]

use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use bowline_base::Errno;
use bowline_host_wire::watch::{FILE_SYSTEM, LOOK, NAME, REGISTER, look, register};
use bowline_rds_driver::ForeignMemory;
use rustix::fs::fstatfs;

use crate::closer::Passed;

/// What watches, of all processes, by the number of the process.
static KNOWN: Mutex<Vec<(i32, Weak<Watch>)>> = Mutex::new(Vec::new());

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What watches the memory of a process.
#[derive(Debug)]
pub(crate) struct Watch {
    descriptor: OwnedFd,
    regions: Mutex<Vec<Weak<Region>>>,
}

/// Memory of a program that is for peers.
#[derive(Debug)]
struct Region {
    at: u64,
    len: u64,
    /// Something else has been seen there, which may be watched itself by now.
    is_gone: AtomicBool,
}

/// Tells whether a descriptor may be one that watches.
pub(crate) fn may_be_one(descriptor: &Passed) -> bool {
    fstatfs(descriptor).is_ok_and(|found| found.f_type as u32 == FILE_SYSTEM)
}

impl Watch {
    /// Takes the descriptor that a process has sent. One that came before stays, for what it
    /// watches.
    ///
    /// # Errors
    /// EBADF for another descriptor.
    pub(crate) fn of(descriptor: Passed, process: i32) -> Result<Arc<Self>, Errno> {
        let number = rustix::fd::AsFd::as_fd(&descriptor).as_raw_fd();
        let link = std::fs::read_link(format!("/proc/self/fd/{number}"));
        if !link.is_ok_and(|link| link.to_str() == Some(NAME)) {
            return Err(Errno::EBADF);
        }
        // Closing one keeps nobody waiting.
        let descriptor = descriptor.into_inner();
        let mut known = locked(&KNOWN);
        known.retain(|(_, watch)| watch.strong_count() > 0);
        // The process of before may have had the same number.
        let found = known.iter().position(|(number, _)| *number == process);
        if let Some(at) = found {
            if let Some(watch) = known[at].1.upgrade().filter(|watch| watch.has_process()) {
                return Ok(watch);
            }
            known.swap_remove(at);
        }
        let watch = Arc::new(Self { descriptor, regions: Mutex::default() });
        known.push((process, Arc::downgrade(&watch)));
        Ok(watch)
    }

    fn request(&self, request: u32, range: &mut [u64]) -> Result<(), i32> {
        loop {
            // SAFETY: the descriptor is a userfaultfd, and the range as long as the request wants.
            let done = unsafe {
                libc::ioctl(self.descriptor.as_raw_fd(), request as _, range.as_mut_ptr())
            };
            if done == 0 {
                return Ok(());
            }
            let errno = std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO);
            if ![libc::EINTR, libc::EAGAIN].contains(&errno) {
                return Err(errno);
            }
        }
    }

    /// Tells whether its process has its memory still.
    fn has_process(&self) -> bool {
        look(0, 1).is_some_and(|mut page| self.request(LOOK, &mut page) != Err(libc::ESRCH))
    }

    /// Watches a range from now on; `false` where the system refuses.
    pub(crate) fn begin(&self, at: u64, len: u64) -> bool {
        register(at, len).any(|mut range| self.request(REGISTER, &mut range).is_ok())
    }

    /// Tells whether a range is what it was when it was first watched.
    fn is_there(&self, at: u64, len: u64) -> bool {
        look(at, len).is_some_and(|mut range| self.request(LOOK, &mut range).is_ok())
    }

    /// Watches memory that is for peers. Regions of before whose memory is gone are gone for good:
    /// what is there now is watched as well from here on.
    fn region(&self, at: u64, len: u64) -> Option<Arc<Region>> {
        let mut regions = locked(&self.regions);
        regions.retain(|region| region.strong_count() > 0);
        let end = at.saturating_add(len);
        for other in regions.iter().filter_map(Weak::upgrade) {
            let overlaps = other.at < end && at < other.at.saturating_add(other.len);
            if overlaps && !self.is_there(other.at, other.len) {
                // Pairs with the load in `has`.
                other.is_gone.store(true, Ordering::Release);
            }
        }
        if !self.begin(at, len) {
            return None;
        }
        let region = Arc::new(Region { at, len, is_gone: AtomicBool::new(false) });
        regions.push(Arc::downgrade(&region));
        Some(region)
    }
}

/// Memory of a process, all of which that is used is watched.
#[derive(Debug)]
pub(crate) struct Watched {
    memory: Arc<dyn ForeignMemory>,
    watch: Arc<Watch>,
    /// For peers; `None` for operations of the program.
    region: Option<Arc<Region>>,
}

impl Watched {
    /// For operations of the program, whose pieces are [watched](Watch::begin).
    pub(crate) fn for_operations(memory: &Arc<dyn ForeignMemory>, watch: &Arc<Watch>) -> Self {
        Self { memory: Arc::clone(memory), watch: Arc::clone(watch), region: None }
    }

    /// For peers; `None` where the range cannot be watched.
    pub(crate) fn for_peers(
        memory: &Arc<dyn ForeignMemory>,
        watch: &Arc<Watch>,
        (at, len): (u64, u64),
    ) -> Option<Self> {
        let region = Some(watch.region(at, len)?);
        Some(Self { memory: Arc::clone(memory), watch: Arc::clone(watch), region })
    }

    fn is_there(&self, at: u64, len: usize) -> bool {
        // Pairs with the store in `region`.
        let is_gone = |region: &Arc<Region>| region.is_gone.load(Ordering::Acquire);
        !self.region.as_ref().is_some_and(is_gone) && self.watch.is_there(at, len as u64)
    }
}

impl ForeignMemory for Watched {
    fn read(&self, at: u64, out: &mut [u8]) -> usize {
        let done = self.memory.read(at, out);
        if done == 0 || self.is_there(at, done) { done } else { 0 }
    }

    fn write(&self, at: u64, bytes: &[u8]) -> usize {
        if self.is_there(at, bytes.len()) { self.memory.write(at, bytes) } else { 0 }
    }

    fn update(&self, at: u64, change: &mut dyn FnMut(u64) -> u64) -> Option<u64> {
        let old = self.is_there(at, 8).then(|| self.memory.update(at, change))?;
        old.filter(|_| self.is_there(at, 8))
    }

    fn has(&self, ranges: &[(u64, u64)]) -> bool {
        self.memory.has(ranges)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use std::ffi::c_void;
    use std::fs::File;
    use std::os::fd::FromRawFd;

    use bowline_host_wire::watch::{API, FLAGS, api};
    use bowline_rds_driver::ProcessFile;
    use bowline_testkit::skipped;
    use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};

    const LEN: usize = 16384;

    /// What watches this process; `None` where the system has no such thing.
    fn watch() -> Option<Arc<Watch>> {
        // SAFETY: it takes flags only.
        let fd = unsafe { libc::syscall(libc::SYS_userfaultfd, FLAGS) };
        if fd < 0 {
            return None;
        }
        // SAFETY: it was just made.
        let descriptor = unsafe { OwnedFd::from_raw_fd(fd as i32) };
        let watch = Watch { descriptor, regions: Mutex::default() };
        watch.request(API, &mut api()).ok().map(|()| Arc::new(watch))
    }

    fn map(at: u64, flags: MapFlags) -> u64 {
        let at = std::ptr::with_exposed_provenance_mut::<c_void>(at as usize);
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: at a place of the system's choosing, or where this test had mapped something.
        unsafe { mmap_anonymous(at, LEN, access, flags) }.unwrap().expose_provenance() as u64
    }

    fn unmap(at: u64, len: usize) {
        // SAFETY: the test has mapped it, and nothing else uses it.
        unsafe { munmap(std::ptr::with_exposed_provenance_mut(at as usize), len) }.unwrap();
    }

    fn own_memory() -> Arc<dyn ForeignMemory> {
        let file = File::options().read(true).write(true).open("/proc/self/mem").unwrap();
        Arc::new(ProcessFile::new(file))
    }

    // tests [RMR-13]
    #[test]
    fn what_is_in_the_place_of_memory_is_neither_read_nor_written() {
        let Some(watch) = watch() else { return skipped::because("there is no userfaultfd") };
        let memory = own_memory();
        let at = map(0, MapFlags::PRIVATE);
        let peers = Watched::for_peers(&memory, &watch, (at + 10, 5000)).expect("it is watched");
        let own = Watched::for_operations(&memory, &watch);
        let works = |memory: &Watched| {
            let (read, written) =
                (memory.read(at + 10, &mut [0; 9]), memory.write(at + 10, &[7; 9]));
            let updated = memory.update(at + 16, &mut |old| old + 1).is_some();
            assert_eq!((read == 9, written == 9), (updated, updated));
            updated
        };
        assert!(works(&peers) && works(&own));
        // Where there is nothing, the access itself fails.
        assert!(watch.begin(at, LEN as u64));
        unmap(at + 8192, 4096);
        assert_eq!(own.write(at + 8000, &[7; 500]), 192);
        unmap(at, 8192);
        assert!(!works(&peers) && !works(&own));
        assert_eq!(map(at, MapFlags::PRIVATE | MapFlags::FIXED), at);
        assert!(!works(&peers) && !works(&own));
        let mut found = [1; LEN];
        assert_eq!(memory.read(at, &mut found), LEN);
        assert_eq!(found, [0; LEN]);
        // What is there now may be for peers as well, and is not that of before.
        let second = Watched::for_peers(&memory, &watch, (at, 100)).expect("it is watched");
        assert!(works(&second) && works(&own) && !works(&peers));
        drop(peers);
        assert!(works(&second));
        unmap(at, LEN);
    }

    #[test]
    fn only_a_userfaultfd_watches() {
        let other = |descriptor| Watch::of(Passed::new(None, descriptor), 1).map(drop);
        assert_eq!(other(OwnedFd::from(File::open("/dev/null").unwrap())), Err(Errno::EBADF));
        let eventfd = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap();
        assert_eq!(other(eventfd), Err(Errno::EBADF));
        let Some(watch) = watch() else { return skipped::because("there is no userfaultfd") };
        let copy = || Passed::new(None, watch.descriptor.try_clone().unwrap());
        assert!(may_be_one(&copy()) && watch.has_process());
        let known = Watch::of(copy(), -5).expect("one that watches");
        let again = Watch::of(copy(), -5).expect("one that watches");
        assert!(Arc::ptr_eq(&known, &again));
    }
}
