//! Memory of a program that is watched: an access fails where something else is now at the address.
//! How, [`bowline_host_wire::watch`] says.
//!
//! What was read is looked at afterwards, so that nothing else ever goes to a peer. What is written
//! goes where a look just before has found the memory: if the program puts something else there
//! between the two, in which it takes part itself by a call of its own, that is changed.

#![allow(unsafe_code, reason = "rustix has other requests of this kind, but not these")]

use std::collections::BTreeMap;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use bowline_base::Errno;
use bowline_host_wire::watch::{
    self as wire, FILE_SYSTEM, LOOK, NAME, REGISTER, Room, insist, look, look_at_each,
};
use bowline_rds_driver::ForeignMemory;
use rustix::fs::fstatfs;

use crate::closer::Passed;

/// What stands for every process that this one cannot see: two programs may have it.
const UNSEEN: i32 = 0;

/// What watches, of all processes, by the number of the process.
static KNOWN: Mutex<Vec<(i32, Weak<Watch>)>> = Mutex::new(Vec::new());

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What watches the memory of a process.
#[derive(Debug)]
pub(crate) struct Watch {
    descriptor: OwnedFd,
    process: i32,
    regions: Mutex<Regions>,
}

/// Memory that is for peers.
#[derive(Debug, Default)]
struct Regions {
    /// By address, and a number of each.
    all: BTreeMap<(u64, u64), Region>,
    /// Bytes of the longest that there has been.
    longest: u64,
    numbers: u64,
}

#[derive(Debug)]
struct Region {
    len: u64,
    /// Something else has been seen there, which may be watched itself by now.
    is_gone: Arc<AtomicBool>,
}

/// Tells whether a descriptor may be one that watches.
pub(crate) fn may_be_one(descriptor: &Passed) -> bool {
    fstatfs(descriptor).is_ok_and(|found| found.f_type as u32 == FILE_SYSTEM)
}

impl Watch {
    /// Takes the descriptor that a process has sent. One that came before stays, for what it
    /// watches, where it is known to be of the same process.
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
        if let Some(at) = found.filter(|_| process != UNSEEN) {
            if let Some(watch) = known[at].1.upgrade().filter(|watch| watch.has_process()) {
                return Ok(watch);
            }
            known.swap_remove(at);
        }
        let watch = Arc::new(Self { descriptor, process, regions: Mutex::default() });
        known.push((process, Arc::downgrade(&watch)));
        Ok(watch)
    }

    fn request(&self, request: u32, range: &mut [u64]) -> Result<(), i32> {
        // SAFETY: the descriptor is a userfaultfd, and the range as long as the request wants.
        let done =
            unsafe { libc::ioctl(self.descriptor.as_raw_fd(), request as _, range.as_mut_ptr()) };
        if done == 0 {
            return Ok(());
        }
        Err(std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO))
    }

    fn look(&self, range: &mut [u64; 3]) -> Result<(), i32> {
        insist(|| self.request(LOOK, range))
    }

    /// Tells whether its process has its memory still.
    fn has_process(&self) -> bool {
        look(0, 1).is_some_and(|mut page| self.look(&mut page) != Err(libc::ESRCH))
    }

    /// Tells whether a range is what it was when it was first watched.
    fn is_there(&self, at: u64, len: u64) -> bool {
        look(at, len).is_some_and(|mut range| self.look(&mut range).is_ok())
    }

    /// Watches a range from now on; `false` where the system refuses.
    ///
    /// # Errors
    /// EBUSY where the program changes mappings and does not read the events about it that it has
    /// asked for.
    pub(crate) fn begin(&self, at: u64, len: u64) -> Result<bool, Errno> {
        let Some(mut room) = Room::of(at, len) else { return Ok(false) };
        self.find_gone(&mut room);
        if self.process == UNSEEN {
            // Each channel of such a process has one, for the same memory.
            let all: Vec<Arc<Self>> =
                locked(&KNOWN).iter().filter_map(|(_, watch)| watch.upgrade()).collect();
            let is_other = |one: &&Arc<Self>| one.process == UNSEEN && !std::ptr::eq(&***one, self);
            all.iter().filter(is_other).for_each(|other| other.find_gone(&mut room));
        }
        let begun = wire::begin(&room, |range| self.request(REGISTER, range));
        begun.map_err(|_| Errno::EBUSY)
    }

    /// Looks at the regions that share pages with what is to be watched: those whose memory is gone
    /// are gone for good. It would not show any more.
    fn find_gone(&self, room: &mut Room) {
        let regions = locked(&self.regions);
        let [from, to] = room.bounds();
        // Many may be in the same pages.
        let mut last = (None, false);
        let first = from.saturating_sub(regions.longest);
        for (&(at, _), region) in regions.all.range((first, 0)..(to, 0)) {
            if region.is_gone.load(Ordering::Relaxed) {
                continue;
            }
            let Some(mut pages) = room.shared_pages(at, region.len) else { continue };
            if last.0 != Some(pages) {
                last = (Some(pages), self.look(&mut pages).is_ok());
            }
            if !last.1 {
                // Pairs with the load in `Watched::is_there`.
                region.is_gone.store(true, Ordering::Release);
            }
        }
    }

    /// Watches memory that is for peers; returns its place among the regions, and what tells that
    /// it is gone.
    fn region(&self, at: u64, len: u64) -> Result<Option<Peers>, Errno> {
        if !self.begin(at, len)? {
            return Ok(None);
        }
        let is_gone = Arc::new(AtomicBool::new(false));
        let mut regions = locked(&self.regions);
        regions.numbers += 1;
        regions.longest = regions.longest.max(len);
        let key = (at, regions.numbers);
        regions.all.insert(key, Region { len, is_gone: Arc::clone(&is_gone) });
        Ok(Some(Peers { key, is_gone }))
    }
}

/// A region of a [`Watch`].
#[derive(Debug)]
struct Peers {
    key: (u64, u64),
    is_gone: Arc<AtomicBool>,
}

/// Memory of a process, all of which that is used is watched.
#[derive(Debug)]
pub(crate) struct Watched {
    memory: Arc<dyn ForeignMemory>,
    watch: Arc<Watch>,
    /// For peers; `None` for operations of the program.
    peers: Option<Peers>,
}

impl Watched {
    /// For operations of the program, whose pieces are [watched](Watch::begin).
    pub(crate) fn for_operations(memory: &Arc<dyn ForeignMemory>, watch: &Arc<Watch>) -> Self {
        Self { memory: Arc::clone(memory), watch: Arc::clone(watch), peers: None }
    }

    /// For peers; `None` where the range cannot be watched.
    ///
    /// # Errors
    /// Those of [`Watch::begin`].
    pub(crate) fn for_peers(
        memory: &Arc<dyn ForeignMemory>,
        watch: &Arc<Watch>,
        (at, len): (u64, u64),
    ) -> Result<Option<Self>, Errno> {
        let peers = watch.region(at, len)?;
        let own = |peers| Self {
            memory: Arc::clone(memory),
            watch: Arc::clone(watch),
            peers: Some(peers),
        };
        Ok(peers.map(own))
    }

    fn is_there(&self, at: u64, len: usize) -> bool {
        // Pairs with the store in `find_gone`.
        let is_gone = |peers: &Peers| peers.is_gone.load(Ordering::Acquire);
        !self.peers.as_ref().is_some_and(is_gone) && self.watch.is_there(at, len as u64)
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        if let Some(peers) = &self.peers {
            locked(&self.watch.regions).all.remove(&peers.key);
        }
    }
}

impl ForeignMemory for Watched {
    fn read(&self, at: u64, out: &mut [u8]) -> usize {
        let done = self.memory.read(at, out);
        // Something else may have been at a page for a moment, which is not mapped any more.
        let mut pages = look_at_each(at, done as u64);
        if pages.all(|[page, len, _]| self.is_there(page, len as usize)) { done } else { 0 }
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
    use std::sync::MutexGuard;

    use bowline_host_wire::watch::{API, FLAGS, api};
    use bowline_rds_driver::ProcessFile;
    use bowline_testkit::skipped;
    use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};

    const PAGE: usize = 4096;
    const LEN: usize = 4 * PAGE;

    /// A new userfaultfd of this process; `None` where the system has no such thing.
    fn descriptor(features: u64) -> Option<OwnedFd> {
        // SAFETY: it takes flags only.
        let fd = unsafe { libc::syscall(libc::SYS_userfaultfd, FLAGS) };
        if fd < 0 {
            return None;
        }
        // SAFETY: it was just made.
        let descriptor = unsafe { OwnedFd::from_raw_fd(fd as i32) };
        let mut version = api();
        version[1] = features;
        // SAFETY: the request takes and fills these numbers.
        let done = unsafe { libc::ioctl(descriptor.as_raw_fd(), API as _, version.as_mut_ptr()) };
        (done == 0).then_some(descriptor)
    }

    fn of(descriptor: OwnedFd) -> Arc<Watch> {
        Arc::new(Watch { descriptor, process: 1, regions: Mutex::default() })
    }

    /// One test at a time registers: what is around its memory may be another's.
    fn alone() -> MutexGuard<'static, ()> {
        static ALONE: Mutex<()> = Mutex::new(());
        locked(&ALONE)
    }

    /// What watches this process.
    fn watch() -> Option<Arc<Watch>> {
        descriptor(0).map(of)
    }

    fn for_peers(watch: &Arc<Watch>, at: u64, len: usize) -> Watched {
        let peers = Watched::for_peers(&own_memory(), watch, (at, len as u64));
        peers.expect("it is registered").expect("it is watched")
    }

    fn map(at: u64, len: usize, flags: MapFlags) -> u64 {
        let at = std::ptr::with_exposed_provenance_mut::<c_void>(at as usize);
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: at a place of the system's choosing, or where this test had mapped something.
        unsafe { mmap_anonymous(at, len, access, flags) }.unwrap().expose_provenance() as u64
    }

    /// Something else is mapped at an address.
    fn replace(at: u64, len: usize) {
        assert_eq!(map(at, len, MapFlags::PRIVATE | MapFlags::FIXED), at);
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
        let _alone = alone();
        let Some(watch) = watch() else { return skipped::because("there is no userfaultfd") };
        let memory = own_memory();
        let at = map(0, LEN, MapFlags::PRIVATE);
        let peers = for_peers(&watch, at + 10, 5000);
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
        assert_eq!(watch.begin(at, LEN as u64), Ok(true));
        unmap(at + 8192, 4096);
        assert_eq!(own.write(at + 8000, &[7; 500]), 192);
        unmap(at, 8192);
        assert!(!works(&peers) && !works(&own));
        replace(at, LEN);
        assert!(!works(&peers) && !works(&own));
        let mut found = [1; LEN];
        assert_eq!(memory.read(at, &mut found), LEN);
        assert_eq!(found, [0; LEN]);
        // What is there now may be for peers as well, and is not that of before.
        let second = for_peers(&watch, at, 100);
        assert!(works(&second) && works(&own) && !works(&peers));
        drop(peers);
        assert!(works(&second));
        unmap(at, LEN);
    }

    /// Memory of this process, in whose place something else is mapped while it is read.
    #[derive(Debug)]
    struct Fleeting(Arc<dyn ForeignMemory>, u64);

    impl ForeignMemory for Fleeting {
        fn read(&self, at: u64, out: &mut [u8]) -> usize {
            map(self.1, PAGE, MapFlags::PRIVATE | MapFlags::FIXED);
            self.0.write(self.1, b"secret");
            let done = self.0.read(at, out);
            unmap(self.1, PAGE);
            done
        }

        fn write(&self, at: u64, bytes: &[u8]) -> usize {
            self.0.write(at, bytes)
        }

        fn update(&self, at: u64, change: &mut dyn FnMut(u64) -> u64) -> Option<u64> {
            self.0.update(at, change)
        }

        fn has(&self, ranges: &[(u64, u64)]) -> bool {
            self.0.has(ranges)
        }
    }

    // tests [RMR-13]
    #[test]
    fn what_was_in_the_place_of_memory_for_a_moment_is_not_read() {
        let _alone = alone();
        let Some(watch) = watch() else { return skipped::because("there is no userfaultfd") };
        let at = map(0, 3 * PAGE, MapFlags::PRIVATE);
        let second = at + PAGE as u64;
        let memory: Arc<dyn ForeignMemory> = Arc::new(Fleeting(own_memory(), second));
        let peers = Watched::for_peers(&memory, &watch, (at, 3 * PAGE as u64));
        let peers = peers.expect("it is registered").expect("it is watched");
        unmap(second, PAGE);
        assert_eq!(peers.read(at, &mut [0; 3 * PAGE]), 0);
        unmap(at, PAGE);
        unmap(second + PAGE as u64, PAGE);
    }

    // tests [RMR-13]
    #[test]
    fn what_was_replaced_stays_gone_whatever_is_registered_afterwards() {
        let _alone = alone();
        let Some(watch) = watch() else { return skipped::because("there is no userfaultfd") };
        let page = PAGE as u64;
        type Registers = fn(&Arc<Watch>, u64, usize) -> Option<Watched>;
        let peers: Registers = |watch, at, len| Some(for_peers(watch, at, len));
        let operation: Registers = |watch, at, len| {
            assert_eq!(watch.begin(at, len as u64), Ok(true));
            None
        };
        for registers in [peers, operation] {
            for (name, offset, len) in [
                ("the same", page + 10, 100),
                ("of the same page", page + 2000, 100),
                ("the next page", 2 * page, 100),
                ("the page before", 0, PAGE),
                ("all of it", 0, LEN),
                ("a part", page + 50, 3),
            ] {
                let at = map(0, LEN, MapFlags::PRIVATE);
                let first = for_peers(&watch, at + page + 10, 100);
                let beside = for_peers(&watch, at + 3 * page, 100);
                assert_eq!(first.write(at + page + 10, b"w"), 1, "{name}");
                replace(at + page, PAGE);
                let second = registers(&watch, at + offset, len);
                assert_eq!(first.write(at + page + 60, b"w"), 0, "{name}");
                assert_eq!(first.read(at + page + 60, &mut [0]), 0, "{name}");
                assert_eq!(first.update(at + page + 16, &mut |old| old + 1), None, "{name}");
                if let Some(second) = second {
                    assert_eq!(second.write(at + offset + 1, b"w"), 1, "{name}");
                }
                assert_eq!(beside.write(at + 3 * page, b"w"), 1, "{name}");
                unmap(at, LEN);
            }
        }
    }

    /// Regions come and go, and memory is replaced: a region of which all is what it was can be
    /// used, and no byte that is another's.
    // tests [RMR-13]
    #[test]
    fn a_region_is_what_it_was_or_gone_in_any_order_of_events() {
        let _alone = alone();
        const PAGES: usize = 40;
        let Some(watch) = watch() else { return skipped::because("there is no userfaultfd") };
        for seed in 1..=20 {
            let mut random = numbers(seed);
            let at = map(0, PAGES * PAGE, MapFlags::PRIVATE);
            // How often each page was replaced, now and when a region was registered.
            let mut times = [0_u32; PAGES];
            let mut regions: Vec<(Watched, usize, usize, [u32; PAGES])> = Vec::new();
            for step in 0..200 {
                match random(4) {
                    0 | 1 => {
                        let start = random(PAGES * PAGE - 1);
                        let len = 1 + random((PAGES * PAGE - start).min(5 * PAGE));
                        let region = for_peers(&watch, at + start as u64, len);
                        regions.push((region, start, len, times));
                    }
                    2 => {
                        let page = random(PAGES);
                        replace(at + (page * PAGE) as u64, PAGE);
                        times[page] += 1;
                    }
                    _ if regions.is_empty() => {}
                    _ => drop(regions.swap_remove(random(regions.len()))),
                }
                for (region, start, len, then) in &regions {
                    let (first, last) = (start / PAGE, (start + len - 1) / PAGE);
                    let is_same = |pages: std::ops::RangeInclusive<usize>| {
                        times[pages.clone()] == then[pages]
                    };
                    let byte = start + random(*len);
                    let works = region.write(at + byte as u64, b"w") == 1;
                    let page = byte / PAGE;
                    let name = || format!("seed {seed} step {step} {start}+{len} at {byte}");
                    assert!(!works || is_same(page..=page), "{}: another's", name());
                    assert!(works || !is_same(first..=last), "{}: it is there", name());
                }
            }
            unmap(at, PAGES * PAGE);
        }
    }

    /// Numbers below a limit.
    fn numbers(seed: u64) -> impl FnMut(usize) -> usize {
        let mut state = seed;
        move |below| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 33) as usize % below
        }
    }

    /// A program may ask for an event and leave the mapping in the midst of a change until it has
    /// read it, which it never does.
    // tests [RMR-13]
    #[test]
    fn a_program_that_does_not_read_its_events_keeps_the_node_for_a_moment_only() {
        let _alone = alone();
        /// UFFD_FEATURE_EVENT_REMOVE.
        const REMOVE: u64 = 1 << 3;
        const CHUNK: usize = 2 << 20;
        let Some(descriptor) = descriptor(REMOVE) else {
            return skipped::because("there is no userfaultfd with events");
        };
        let events = descriptor.try_clone().unwrap();
        let watch = of(descriptor);
        // What is registered around it is the test's: no other thread may have to wait for it.
        let all = map(0, 3 * CHUNK, MapFlags::PRIVATE);
        let at = all.next_multiple_of(CHUNK as u64);
        let peers = for_peers(&watch, at, 100);
        assert_eq!(peers.write(at, b"w"), 1);
        let program = std::thread::spawn(move || {
            let at = std::ptr::with_exposed_provenance_mut(at as usize + LEN - PAGE);
            // SAFETY: a page of this test's, which nothing refers to.
            unsafe { rustix::mm::madvise(at, PAGE, rustix::mm::Advice::LinuxDontNeed) }.unwrap();
        });
        let waits = |watch: &Watch| {
            let mut page = look(at, 1).unwrap();
            watch.request(LOOK, &mut page) == Err(libc::EAGAIN)
        };
        let begun = std::time::Instant::now();
        while !waits(&watch) {
            assert!(begun.elapsed() < std::time::Duration::from_secs(20));
            std::thread::yield_now();
        }
        let (says, said) = std::sync::mpsc::channel();
        let node = std::thread::spawn(move || {
            let done = (peers.read(at, &mut [0]), peers.write(at, b"w"), watch.has_process());
            let begun = watch.begin(at, 100);
            says.send((done, begun)).unwrap();
            (peers, watch)
        });
        let found =
            said.recv_timeout(std::time::Duration::from_secs(20)).expect("it does not wait");
        assert_eq!(found.0, (0, 0, true));
        assert!(matches!(found.1, Ok(true) | Err(Errno::EBUSY)));
        assert!(rustix::io::read(&events, &mut [0; 32]).is_ok(), "the event");
        program.join().unwrap();
        let (peers, watch) = node.join().unwrap();
        // Who registered in between could not tell whether it was the same.
        assert_eq!((peers.write(at, b"w"), waits(&watch)), (0, false));
        assert_eq!(for_peers(&watch, at, 100).write(at, b"w"), 1);
        unmap(all, 3 * CHUNK);
    }

    /// Two programs in other PID namespaces have the same number, 0.
    // tests [RMR-13]
    #[test]
    fn programs_that_the_node_cannot_see_do_not_share_what_watches() {
        let _alone = alone();
        let (Some(first), Some(second)) = (descriptor(0), descriptor(0)) else {
            return skipped::because("there is no userfaultfd");
        };
        let passed = |descriptor: &OwnedFd| Passed::new(None, descriptor.try_clone().unwrap());
        let of = |descriptor| Watch::of(passed(descriptor), UNSEEN).expect("one that watches");
        let (a, b) = (of(&first), of(&second));
        assert!(!Arc::ptr_eq(&a, &b));
        // Nor do channels of one, whose memory stays gone nevertheless.
        let again = of(&first);
        let at = map(0, LEN, MapFlags::PRIVATE);
        let peers = for_peers(&a, at, 100);
        assert_eq!(peers.write(at, b"w"), 1);
        replace(at, LEN);
        let later = for_peers(&again, at, LEN);
        assert_eq!((peers.write(at, b"w"), later.write(at, b"w")), (0, 1));
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
