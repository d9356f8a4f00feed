//! Stub for architectures other than x86-64: no wide registers; emulators of them are not known to
//! be slow.

/// Wide registers, of which there are none.
#[derive(Clone, Copy)]
pub(crate) enum Wide {}

impl Wide {
    pub(crate) const fn get() -> Option<Self> {
        None
    }

    pub(crate) const fn for_sums() -> Option<Self> {
        None
    }

    pub(crate) const fn takes(self, _: usize) -> usize {
        match self {}
    }

    pub(crate) fn update(self, _: u32, _: &[u8]) -> u32 {
        match self {}
    }

    pub(crate) unsafe fn sum(self, _: u32, _: *const u8, _: usize) -> u32 {
        match self {}
    }

    pub(crate) unsafe fn copy(self, _: u32, _: *const u8, _: *mut u8, _: usize) -> u32 {
        match self {}
    }
}

pub(crate) const fn is_emulated() -> bool {
    false
}
