//! A virtual machine as its disk sees it: memory, rings, and the vhost-user front end of rust-vmm.
#![allow(dead_code, reason = "not every test uses all of it")]

use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use std::time::{Duration, Instant};

use bowline_verbs::Buffer;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use vhost::vhost_user::message::{
    VhostUserConfigFlags, VhostUserInflight, VhostUserProtocolFeatures as Protocol,
    VhostUserVringAddrFlags,
};
use vhost::vhost_user::{Frontend, VhostUserFrontend};
use vhost::{VhostBackend, VhostUserDirtyLogRegion, VhostUserMemoryRegionInfo, VringConfigData};
use vmm_sys_util::eventfd::EventFd;

/// Bytes of memory for each bit of a dirty log.
const PAGE: u64 = 4096;

/// Where memory begins, in the guest and in the machine's process.
pub(crate) const GUEST: u64 = 0x4000_0000;
const USER: u64 = 0x7f12_0000_0000;
/// Bytes of memory: rings in the first half, data in the second.
pub(crate) const BYTES: usize = 64 << 20;
pub(crate) const DATA: u64 = GUEST + BYTES as u64 / 2;
/// Bytes of memory for each ring and the headers of its requests.
const RING: u64 = 256 << 10;

pub(crate) const IN: u32 = 0;
pub(crate) const OUT: u32 = 1;
pub(crate) const FLUSH: u32 = 4;
pub(crate) const GET_ID: u32 = 8;
pub(crate) const DISCARD: u32 = 11;
pub(crate) const WRITE_ZEROES: u32 = 13;

pub(crate) const NEXT: u16 = 1;
pub(crate) const WRITE: u16 = 2;
pub(crate) const INDIRECT: u16 = 4;

pub(crate) const F_RO: u64 = 1 << 5;
pub(crate) const F_FLUSH: u64 = 1 << 9;
pub(crate) const F_LOG_ALL: u64 = 1 << 26;
pub(crate) const F_INDIRECT: u64 = 1 << 28;
pub(crate) const F_EVENT_IDX: u64 = 1 << 29;
pub(crate) const F_PROTOCOL: u64 = 1 << 30;

/// Longest wait in a test.
const PATIENCE: Duration = Duration::from_secs(30);

/// A descriptor.
#[derive(Clone, Copy)]
pub(crate) struct Desc {
    pub(crate) guest: u64,
    pub(crate) len: u32,
    pub(crate) flags: u16,
    pub(crate) next: u16,
}

/// Makes a file of memory.
pub(crate) fn memory(len: usize, seals: SealFlags) -> File {
    let file = memfd_create("guest", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    ftruncate(&file, len as u64).unwrap();
    fcntl_add_seals(&file, seals).unwrap();
    file.into()
}

/// The memory of a machine, which outlives its connections.
pub(crate) struct Memory {
    pub(crate) file: File,
    pub(crate) buffer: Arc<Buffer>,
}

impl Memory {
    pub(crate) fn new() -> Arc<Self> {
        let file = memory(BYTES, SealFlags::SHRINK | SealFlags::GROW);
        let buffer = Arc::new(Buffer::from_memfd(&file).unwrap());
        Arc::new(Self { file, buffer })
    }

    pub(crate) fn put(&self, guest: u64, bytes: &[u8]) {
        self.buffer.write((guest - GUEST) as usize, bytes);
    }

    pub(crate) fn get(&self, guest: u64, len: usize) -> Vec<u8> {
        let mut bytes = Vec::new();
        self.buffer.append_to((guest - GUEST) as usize, len, &mut bytes);
        bytes
    }

    pub(crate) fn region(&self) -> VhostUserMemoryRegionInfo {
        VhostUserMemoryRegionInfo {
            guest_phys_addr: GUEST,
            memory_size: BYTES as u64,
            userspace_addr: USER,
            mmap_offset: 0,
            mmap_handle: self.file.as_raw_fd(),
        }
    }
}

/// A dirty log.
pub(crate) struct DirtyLog {
    file: File,
    buffer: Buffer,
}

impl DirtyLog {
    /// Makes a log for all memory, and some bits that are not its own before it.
    pub(crate) fn new() -> Self {
        let file = memory(Self::BEFORE + Self::LEN, SealFlags::SHRINK | SealFlags::GROW);
        let buffer = Buffer::from_memfd(&file).unwrap();
        Self { file, buffer }
    }

    const BEFORE: usize = 64;
    pub(crate) const LEN: usize = ((GUEST + BYTES as u64) / PAGE / 8) as usize;

    pub(crate) fn region(&self) -> VhostUserDirtyLogRegion {
        VhostUserDirtyLogRegion {
            mmap_size: Self::LEN as u64,
            mmap_offset: Self::BEFORE as u64,
            mmap_handle: self.file.as_raw_fd(),
        }
    }

    /// Clears the log; returns the numbers of the pages that were marked.
    pub(crate) fn take(&self) -> Vec<u64> {
        let mut pages = Vec::new();
        for at in (0..Self::LEN).step_by(8) {
            let word = u64::from_le(self.buffer.update(Self::BEFORE + at, |_| 0));
            let bits = (0..64).filter(|bit| word & 1 << bit != 0);
            pages.extend(bits.map(|bit| at as u64 * 8 + bit));
        }
        let mut before = [0; Self::BEFORE];
        self.buffer.read(0, &mut before);
        assert_eq!(before, [0; Self::BEFORE], "written outside of the log");
        pages
    }
}

/// Returns the numbers of the pages of some bytes.
pub(crate) fn pages(guest: u64, len: u64) -> Vec<u64> {
    (guest / PAGE..=(guest + len - 1) / PAGE).collect()
}

/// One ring of a guest.
pub(crate) struct Queue {
    memory: Arc<Memory>,
    at: u64,
    pub(crate) size: u16,
    pub(crate) next: u16,
    pub(crate) seen: u16,
    pub(crate) kick: EventFd,
    pub(crate) call: EventFd,
    event_index: bool,
}

/// A machine that is connected to its disk.
pub(crate) struct Guest {
    pub(crate) front: Frontend,
    pub(crate) memory: Arc<Memory>,
    pub(crate) features: u64,
    pub(crate) protocol: Protocol,
    pub(crate) queues: Vec<Queue>,
}

/// The region of requests in flight that a machine keeps.
pub(crate) struct Kept(pub(crate) VhostUserInflight, pub(crate) File);

impl Guest {
    /// Connects, and agrees on all features but these.
    pub(crate) fn connect(at: &Path, memory: &Arc<Memory>, without: u64) -> Self {
        Self::try_connect(at, memory, without).expect("connected")
    }

    /// As [`connect`](Self::connect); `None` if nobody serves machines there, such as a process
    /// that is about to end and listens still.
    pub(crate) fn try_connect(at: &Path, memory: &Arc<Memory>, without: u64) -> Option<Self> {
        let mut front = Frontend::connect(at, 64).ok()?;
        front.set_owner().ok()?;
        // Writes are logged only while a machine moves to another process.
        let features = front.get_features().ok()? & !without & !F_LOG_ALL;
        let protocol = front.get_protocol_features().unwrap();
        front.set_protocol_features(protocol).unwrap();
        front.set_features(features).unwrap();
        Some(Self { front, memory: Arc::clone(memory), features, protocol, queues: Vec::new() })
    }

    /// Connects with one ring of 128 descriptors.
    pub(crate) fn start(at: &Path, memory: &Arc<Memory>, without: u64) -> Self {
        let mut guest = Self::connect(at, memory, without);
        guest.share();
        guest.add_queue(128);
        guest
    }

    pub(crate) fn share(&self) {
        self.front.set_mem_table(&[self.memory.region()]).unwrap();
    }

    /// Sets up the next ring, which is new.
    pub(crate) fn add_queue(&mut self, size: u16) {
        self.add_queue_at(size, 0);
    }

    /// Sets up the next ring, on which this number of requests was done.
    pub(crate) fn add_queue_at(&mut self, size: u16, next: u16) {
        let kick = EventFd::new(0).unwrap();
        let call = EventFd::new(rustix_nonblock()).unwrap();
        let memory = Arc::clone(&self.memory);
        let event_index = self.features & F_EVENT_IDX != 0;
        let at = self.queues.len() as u64 * RING + GUEST;
        let queue = Queue { memory, at, size, next, seen: next, kick, call, event_index };
        queue.set_number(queue.available() + 2, next);
        queue.set_number(queue.used() + 2, next);
        self.resume(queue);
    }

    /// Sets up the next ring, of a machine that was connected before.
    pub(crate) fn resume(&mut self, queue: Queue) {
        let index = self.queues.len();
        let (addresses, size, next) = (queue.addresses(), queue.size, queue.used_index());
        self.front.set_vring_num(index, size).unwrap();
        self.front.set_vring_base(index, next).unwrap();
        self.front.set_vring_addr(index, &addresses).unwrap();
        self.front.set_vring_call(index, &queue.call).unwrap();
        self.front.set_vring_kick(index, &queue.kick).unwrap();
        self.front.set_vring_enable(index, true).unwrap();
        self.queues.push(queue);
    }

    /// Has the region of requests in flight made, for one ring of `size`, and uses it.
    pub(crate) fn keep(&mut self, size: u16) -> Kept {
        let asked = VhostUserInflight { num_queues: 1, queue_size: size, ..Default::default() };
        let (spec, file) = self.front.get_inflight_fd(&asked).unwrap();
        let kept = Kept(spec, file);
        self.continue_with(&kept);
        kept
    }

    pub(crate) fn continue_with(&mut self, kept: &Kept) {
        self.front.set_inflight_fd(&kept.0, kept.1.as_raw_fd()).unwrap();
    }

    /// Names a dirty log.
    pub(crate) fn set_log(&self, log: &DirtyLog) {
        self.front.set_log_base(0, Some(log.region())).unwrap();
    }

    /// Has writes logged or no longer, those to used rings as if the first ring was at `used`, and
    /// others behind it.
    pub(crate) fn log_writes(&mut self, used: Option<u64>) {
        let log = if used.is_some() { F_LOG_ALL } else { 0 };
        self.front.set_features(self.features | log).unwrap();
        for (index, queue) in self.queues.iter().enumerate() {
            let mut addresses = queue.addresses();
            if let Some(used) = used {
                addresses.flags = VhostUserVringAddrFlags::VHOST_VRING_F_LOG.bits();
                addresses.log_addr = Some(used + index as u64 * RING);
            }
            self.front.set_vring_addr(index, &addresses).unwrap();
        }
        // An answer shows that all messages were handled.
        self.config();
    }

    pub(crate) fn config(&mut self) -> Vec<u8> {
        let flags = VhostUserConfigFlags::empty();
        self.front.get_config(0, 60, flags, &[0; 60]).unwrap().1
    }

    /// Runs one request on the first ring; returns its status.
    pub(crate) fn run(&mut self, kind: u32, sector: u64, data: &[(u64, u32)]) -> u8 {
        self.queues[0].run(kind, sector, data)
    }
}

fn rustix_nonblock() -> i32 {
    rustix::fs::OFlags::NONBLOCK.bits() as i32
}

impl Queue {
    fn available(&self) -> u64 {
        self.at + 16 * u64::from(self.size)
    }

    pub(crate) fn used(&self) -> u64 {
        (self.available() + 6 + 2 * u64::from(self.size)).next_multiple_of(4)
    }

    /// Returns the place of a request's header, with its status behind.
    pub(crate) fn header(&self, head: u16) -> u64 {
        self.at + RING / 2 + 64 * u64::from(head)
    }

    pub(crate) fn addresses(&self) -> VringConfigData {
        let user = |guest: u64| guest - GUEST + USER;
        VringConfigData {
            queue_max_size: self.size,
            queue_size: self.size,
            flags: 0,
            desc_table_addr: user(self.at),
            used_ring_addr: user(self.used()),
            avail_ring_addr: user(self.available()),
            log_addr: None,
        }
    }

    fn number(&self, guest: u64) -> u16 {
        u16::from_le(self.memory.buffer.load_u16((guest - GUEST) as usize))
    }

    fn set_number(&self, guest: u64, number: u16) {
        self.memory.buffer.store_u16((guest - GUEST) as usize, number.to_le());
    }

    pub(crate) fn put_desc(&self, table: u64, index: u16, desc: Desc) {
        let mut bytes = desc.guest.to_le_bytes().to_vec();
        bytes.extend(desc.len.to_le_bytes());
        bytes.extend(desc.flags.to_le_bytes());
        bytes.extend(desc.next.to_le_bytes());
        self.memory.put(table + 16 * u64::from(index), &bytes);
    }

    pub(crate) fn table(&self) -> u64 {
        self.at
    }

    pub(crate) fn put_header(&self, head: u16, kind: u32, sector: u64) {
        let mut bytes = [0xff; 17];
        bytes[..4].copy_from_slice(&kind.to_le_bytes());
        bytes[4..8].fill(0);
        bytes[8..16].copy_from_slice(&sector.to_le_bytes());
        self.memory.put(self.header(head), &bytes);
    }

    /// Returns the descriptors of a request.
    pub(crate) fn descs(&self, head: u16, kind: u32, data: &[(u64, u32)]) -> Vec<Desc> {
        let is_written = if matches!(kind, IN | GET_ID) { WRITE } else { 0 };
        let mut descs = vec![Desc { guest: self.header(head), len: 16, flags: NEXT, next: 0 }];
        descs.extend(data.iter().map(|(guest, len)| Desc {
            guest: *guest,
            len: *len,
            flags: NEXT | is_written,
            next: 0,
        }));
        descs.push(Desc { guest: self.header(head) + 16, len: 1, flags: WRITE, next: 0 });
        descs
    }

    /// Writes a request whose descriptors begin at `head` and follow each other.
    pub(crate) fn prepare(&self, head: u16, kind: u32, sector: u64, data: &[(u64, u32)]) {
        self.put_header(head, kind, sector);
        for (index, desc) in (head..).zip(self.descs(head, kind, data)) {
            let next = (index + 1) % self.size;
            self.put_desc(self.table(), index % self.size, Desc { next, ..desc });
        }
    }

    /// Writes a request with a table of its descriptors at `table`.
    pub(crate) fn prepare_indirect(
        &self,
        head: u16,
        kind: u32,
        sector: u64,
        data: &[(u64, u32)],
        table: u64,
    ) {
        self.put_header(head, kind, sector);
        let descs = self.descs(head, kind, data);
        for (index, desc) in (0..).zip(&descs) {
            self.put_desc(table, index, Desc { next: index + 1, ..*desc });
        }
        let len = 16 * descs.len() as u32;
        self.put_desc(self.table(), head, Desc { guest: table, len, flags: INDIRECT, next: 0 });
    }

    /// Gives requests to the disk, and kicks it if it wants that; returns whether it did.
    pub(crate) fn give(&mut self, heads: &[u16]) -> bool {
        let before = self.next;
        for head in heads {
            let at = self.available() + 4 + 2 * u64::from(self.next % self.size);
            self.set_number(at, *head);
            self.next = self.next.wrapping_add(1);
        }
        self.set_number(self.available() + 2, self.next);
        fence(Ordering::SeqCst);
        let event = self.number(self.used() + 4 + 8 * u64::from(self.size));
        let (new, old) = (self.next, before);
        let wants = new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old);
        if wants || !self.event_index {
            self.kick.write(1).unwrap();
        }
        wants
    }

    /// Says that more requests are there than were given.
    pub(crate) fn give_index(&self, index: u16) {
        self.set_number(self.available() + 2, index);
        self.kick.write(1).unwrap();
    }

    pub(crate) fn used_index(&self) -> u16 {
        self.number(self.used() + 2)
    }

    /// Returns a used request and the bytes written to its memory, once there is one.
    pub(crate) fn wait(&mut self) -> (u16, u32) {
        let end = Instant::now() + PATIENCE;
        loop {
            if let Some(used) = self.take_used() {
                return used;
            }
            assert!(Instant::now() < end, "no request is used");
            // The event index asks for a call at the next one.
            self.set_number(self.available() + 4 + 2 * u64::from(self.size), self.seen);
            fence(Ordering::SeqCst);
            while self.used_index() == self.seen && self.call.read().is_err() {
                assert!(Instant::now() < end, "the guest is not called");
                std::thread::yield_now();
            }
        }
    }

    pub(crate) fn take_used(&mut self) -> Option<(u16, u32)> {
        if self.used_index() == self.seen {
            return None;
        }
        let at = self.used() + 4 + 8 * u64::from(self.seen % self.size);
        let bytes = self.memory.get(at, 8);
        self.seen = self.seen.wrapping_add(1);
        let number = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
        Some((number(0) as u16, number(4)))
    }

    pub(crate) fn status(&self, head: u16) -> u8 {
        self.memory.get(self.header(head) + 16, 1)[0]
    }

    /// Runs one request; returns its status.
    pub(crate) fn run(&mut self, kind: u32, sector: u64, data: &[(u64, u32)]) -> u8 {
        self.prepare(0, kind, sector, data);
        self.give(&[0]);
        assert_eq!(self.wait().0, 0);
        self.status(0)
    }
}
