//! Words in memory that two processes share, to sleep on and to wake by.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::ptr;
use std::sync::atomic::AtomicU32;

use super::memory_file;

/// Two words on cache lines of their own. They stay mapped until the process ends.
#[derive(Debug)]
pub(crate) struct SharedWords {
    file: File,
    words: &'static [AtomicU32; LEN],
}

/// Words that are mapped, of which the first and the last are used.
const LEN: usize = 64;
const BYTES: usize = LEN * size_of::<u32>();

impl SharedWords {
    /// Makes words, which are 0.
    pub(crate) fn new() -> io::Result<Self> {
        Self::map(memory_file(BYTES as u64)?)
    }

    /// Maps those of another process, by the name that [`Self::name`] gave there.
    pub(crate) fn open(name: &str) -> io::Result<Self> {
        Self::map(OpenOptions::new().read(true).write(true).open(name)?)
    }

    /// A name for other processes, as long as this one lives.
    pub(crate) fn name(&self) -> String {
        format!("/proc/{}/fd/{}", std::process::id(), self.file.as_raw_fd())
    }

    /// The two words.
    pub(crate) fn both(&self) -> [&'static AtomicU32; 2] {
        [&self.words[0], &self.words[LEN - 1]]
    }

    fn map(file: File) -> io::Result<Self> {
        let rights = libc::PROT_READ | libc::PROT_WRITE;
        let fd = file.as_raw_fd();
        // SAFETY: a new mapping of an open file at a place that the kernel chooses.
        let at = unsafe { libc::mmap(ptr::null_mut(), BYTES, rights, libc::MAP_SHARED, fd, 0) };
        if at == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the mapping has this many bytes, is aligned to pages, is never unmapped, and its
        // file is never made shorter; other processes reach it by atomics, too.
        let words = unsafe { &*at.cast::<[AtomicU32; LEN]>() };
        Ok(Self { file, words })
    }
}

/// Sleeps while `word`, which another process may change, holds `value`.
pub(crate) fn shared_wait(word: &AtomicU32, value: u32) {
    let none = ptr::null::<libc::timespec>();
    // SAFETY: `word` lives through the call; a null timeout means none.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAIT, value, none) };
}

/// Wakes one thread of any process that sleeps on `word`.
pub(crate) fn shared_wake(word: &AtomicU32) {
    // SAFETY: `word` lives through the call.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAKE, 1) };
}
