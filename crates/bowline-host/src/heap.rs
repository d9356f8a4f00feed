//! Memory of a socket that nobody else has: for the simulator, whose programs are no processes.

#![allow(unsafe_code, reason = "an `Area` of memory of this process")]

use std::ptr::NonNull;

use bowline_host_wire::{AREA_LEN, Area, LockOwner, Piece, Pushed};

const PAGE: usize = 4096;
const WORD: usize = size_of::<u64>();
const WORDS: usize = (AREA_LEN + PAGE) / WORD;

/// Zeroed memory of the length of an [`Area`].
#[derive(Debug)]
pub struct HeapMemory {
    all: *mut [u64],
    area: Area,
}

impl HeapMemory {
    /// New memory.
    ///
    /// # Panics
    /// Never: nothing is at the address 0.
    pub fn new() -> Self {
        // What is not touched is not there: the system gives zeroes at the first access.
        let all = Box::into_raw(vec![0_u64; WORDS].into_boxed_slice());
        let start = all.cast::<u8>();
        let base = start.wrapping_byte_add(start.align_offset(PAGE));
        let base = NonNull::new(base).expect("memory");
        // SAFETY: from a page's beginning on there is so much memory, until this is dropped.
        let area = unsafe { Area::new(base) };
        Self { all, area }
    }

    /// The memory as both sides see it, for as long as this is there.
    pub const fn area(&self) -> Area {
        self.area
    }

    /// Pushes a message as a program does: [`Area::push`].
    pub fn push(&self, owner: LockOwner, name: &[u8], payload: &[u8]) -> Pushed {
        let pieces = [Piece { base: payload.as_ptr(), len: payload.len() }];
        // SAFETY: the piece is a slice.
        unsafe { self.area.push(owner, name, &pieces) }
    }

    /// The word at an offset of bytes, which is rounded down to that of a word in the memory.
    fn word(&self, at: usize) -> *mut u64 {
        let at = at.min(AREA_LEN - WORD) / WORD * WORD;
        self.area.base().as_ptr().wrapping_add(at).cast()
    }

    /// Reads a word.
    pub fn load(&self, at: usize) -> u64 {
        // SAFETY: it lies in the memory, which only this thread has.
        unsafe { self.word(at).read() }
    }

    /// Writes a word.
    pub fn store(&self, at: usize, value: u64) {
        // SAFETY: as in `load`.
        unsafe { self.word(at).write(value) }
    }
}

impl Default for HeapMemory {
    fn default() -> Self {
        Self::new()
    }
}

impl Drop for HeapMemory {
    fn drop(&mut self) {
        // SAFETY: it came from a box, and nothing uses it any more.
        drop(unsafe { Box::from_raw(self.all) });
    }
}
