//! Memory of another process.

use std::fmt;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// Bytes that are summed or copied at once.
const CHUNK: usize = 4096;
/// Size of a small page in bytes, on the supported machines.
const PAGE: u64 = 4096;

/// The memory of another process, by its addresses, however it is reached. What the process does
/// not have, or does not give, cannot be reached.
pub trait ForeignMemory: fmt::Debug + Send + Sync {
    /// Copies bytes out; returns how many could be, from the first on.
    fn read(&self, at: u64, out: &mut [u8]) -> usize;

    /// Copies bytes in; returns how many could be, from the first on.
    fn write(&self, at: u64, bytes: &[u8]) -> usize;

    /// Changes 8 aligned bytes, a number in host byte order; returns the old value, or `None` if it
    /// cannot be. It is one step at least as seen by others who call this.
    fn update(&self, at: u64, change: &mut dyn FnMut(u64) -> u64) -> Option<u64>;

    /// Tells whether ranges, of an address and a length each, are there.
    fn has(&self, ranges: &[(u64, u64)]) -> bool;
}

/// All the memory of a process, by a descriptor of its `/proc/self/mem`. It has no change of memory
/// in one step: a store of the process during an update is lost.
#[derive(Debug)]
pub struct ProcessFile {
    file: File,
    /// Held by [`update`](ForeignMemory::update).
    updates: Mutex<()>,
}

impl ProcessFile {
    /// The memory behind a file.
    pub const fn new(file: File) -> Self {
        Self { file, updates: Mutex::new(()) }
    }
}

/// Calls for the rest until all is done or it fails; returns how much is done.
fn all(len: usize, mut some: impl FnMut(usize) -> io::Result<usize>) -> usize {
    let mut done = 0;
    while done < len {
        match some(done) {
            Ok(n @ 1..) => done += n,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Ok(0) | Err(_) => break,
        }
    }
    done
}

impl ForeignMemory for ProcessFile {
    fn read(&self, at: u64, out: &mut [u8]) -> usize {
        let next = |done: usize| at.saturating_add(done as u64);
        all(out.len(), |done| self.file.read_at(&mut out[done..], next(done)))
    }

    fn write(&self, at: u64, bytes: &[u8]) -> usize {
        let next = |done: usize| at.saturating_add(done as u64);
        all(bytes.len(), |done| self.file.write_at(&bytes[done..], next(done)))
    }

    fn update(&self, at: u64, change: &mut dyn FnMut(u64) -> u64) -> Option<u64> {
        let _only = self.updates.lock().unwrap_or_else(PoisonError::into_inner);
        let mut word = [0; 8];
        if self.read(at, &mut word) < word.len() {
            return None;
        }
        let old = u64::from_ne_bytes(word);
        (self.write(at, &change(old).to_ne_bytes()) == word.len()).then_some(old)
    }

    /// Page by page. Whether they may be written, it cannot tell.
    fn has(&self, ranges: &[(u64, u64)]) -> bool {
        ranges.iter().all(|&(at, len)| {
            let Some(end) = at.checked_add(len) else { return false };
            let mut page = at;
            while page < end {
                if self.read(page, &mut [0]) == 0 {
                    return false;
                }
                match (page | (PAGE - 1)).checked_add(1) {
                    Some(next) => page = next,
                    None => return page == end,
                }
            }
            true
        })
    }
}

/// The memory of another process as that of a buffer. Its addresses are the offsets.
#[derive(Debug)]
pub(crate) struct Foreign {
    memory: Arc<dyn ForeignMemory>,
    /// Number of accesses to what the process does not have.
    faults: AtomicU64,
}

impl Foreign {
    pub(crate) fn new(memory: Arc<dyn ForeignMemory>) -> Self {
        Self { memory, faults: AtomicU64::new(0) }
    }

    pub(crate) fn faults(&self) -> u64 {
        self.faults.load(Ordering::Relaxed)
    }

    fn count_fault(&self) {
        self.faults.fetch_add(1, Ordering::Relaxed);
    }

    /// Copies bytes out; those that the process does not have are zero.
    pub(crate) fn read(&self, offset: usize, out: &mut [u8]) {
        let done = self.memory.read(offset as u64, out);
        if done < out.len() {
            self.count_fault();
            out[done..].fill(0);
        }
    }

    /// Copies bytes in; those that the process has no place for are lost.
    pub(crate) fn write(&self, offset: usize, bytes: &[u8]) {
        if self.memory.write(offset as u64, bytes) < bytes.len() {
            self.count_fault();
        }
    }

    /// Calls `each` with all bytes of a range, in order and piece by piece.
    pub(crate) fn for_each(&self, offset: usize, len: usize, mut each: impl FnMut(usize, &[u8])) {
        let mut chunk = [0; CHUNK];
        let mut done = 0;
        while done < len {
            let piece = &mut chunk[..CHUNK.min(len - done)];
            self.read(offset + done, piece);
            each(done, piece);
            done += piece.len();
        }
    }

    /// Changes 8 bytes; returns the old value, 0 if there is none.
    pub(crate) fn update(&self, offset: usize, mut change: impl FnMut(u64) -> u64) -> u64 {
        self.memory.update(offset as u64, &mut change).unwrap_or_else(|| {
            self.count_fault();
            0
        })
    }
}
