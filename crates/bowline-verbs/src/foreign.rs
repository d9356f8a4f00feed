//! Memory of another process, reached through a descriptor of its `/proc/self/mem`.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// Bytes that are summed or copied at once.
const CHUNK: usize = 4096;

/// The memory of another process. Its addresses are the offsets.
#[derive(Debug)]
pub(crate) struct ForeignMemory {
    file: Arc<File>,
    /// Number of accesses to what the process does not have.
    faults: AtomicU64,
    /// Held by [`update`](Self::update), since the system has no atomic change of such memory.
    updates: Mutex<()>,
}

impl ForeignMemory {
    pub(crate) fn new(file: Arc<File>) -> Self {
        Self { file, faults: AtomicU64::new(0), updates: Mutex::new(()) }
    }

    pub(crate) fn faults(&self) -> u64 {
        self.faults.load(Ordering::Relaxed)
    }

    fn count_fault(&self) {
        self.faults.fetch_add(1, Ordering::Relaxed);
    }

    /// Copies bytes out; those that the process does not have are zero.
    pub(crate) fn read(&self, offset: usize, out: &mut [u8]) {
        let mut done = 0;
        while done < out.len() {
            match self.file.read_at(&mut out[done..], (offset + done) as u64) {
                Ok(n @ 1..) => done += n,
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Ok(0) | Err(_) => {
                    self.count_fault();
                    return out[done..].fill(0);
                }
            }
        }
    }

    /// Copies bytes in; those that the process has no place for are lost.
    pub(crate) fn write(&self, offset: usize, bytes: &[u8]) {
        let mut done = 0;
        while done < bytes.len() {
            match self.file.write_at(&bytes[done..], (offset + done) as u64) {
                Ok(n @ 1..) => done += n,
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Ok(0) | Err(_) => return self.count_fault(),
            }
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

    /// Changes 8 bytes. Other updates come before or after it, as with a device whose atomics are
    /// atomic among themselves; a store of the process in between is lost.
    pub(crate) fn update(&self, offset: usize, mut change: impl FnMut(u64) -> u64) -> u64 {
        let _only = self.updates.lock().unwrap_or_else(PoisonError::into_inner);
        let mut word = [0; 8];
        self.read(offset, &mut word);
        let old = u64::from_ne_bytes(word);
        self.write(offset, &change(old).to_ne_bytes());
        old
    }
}
