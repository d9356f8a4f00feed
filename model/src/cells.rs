//! The memory of a socket in a checker's atomics, in place of memory that is shared.
//!
//! The numbers in front are one atomic each. A ring is made of pieces of 4 bytes: what the code
//! reads or writes of 8 bytes is two steps here, and a byte is a load and a store of its piece.
//! So memory is weaker here than it is, for payloads.

use std::ptr::NonNull;
use std::sync::atomic::Ordering;

use crate::area::{AREA_LEN, at};
use crate::hook;
use crate::sync::{AtomicU32, AtomicU64, DESTINATIONS, RING_LEN};

const FRONT: usize = AREA_LEN - 2 * RING_LEN;

/// Numbers of 4 bytes in front.
fn is_half(at: usize) -> bool {
    matches!(at, at::MORE | at::ASLEEP | at::LOCK | at::WAKE_TOKEN | at::WAKE_TOKEN_TAKEN)
        || (0..DESTINATIONS).any(|n| at == at::destination(n) + 16)
}

enum Number {
    Half(AtomicU32),
    Whole(AtomicU64),
}

pub(crate) struct Cells {
    /// In front, at multiples of 8 bytes.
    front: Vec<Number>,
    rings: Vec<AtomicU32>,
}

impl Cells {
    pub(crate) fn new() -> Box<Self> {
        let number = |at| {
            if is_half(at) {
                Number::Half(AtomicU32::new(0))
            } else {
                Number::Whole(AtomicU64::new(0))
            }
        };
        let front = (0..at::destination(DESTINATIONS)).step_by(8).map(number).collect();
        let rings = (0..2 * RING_LEN / 4).map(|_| AtomicU32::new(0)).collect();
        Box::new(Self { front, rings })
    }

    /// What an area takes for the start of its memory.
    pub(crate) fn base(&self) -> NonNull<u8> {
        NonNull::from(self).cast()
    }

    /// # Safety
    /// `base` is that of cells which outlive `'a`.
    unsafe fn of<'a>(base: NonNull<u8>) -> &'a Self {
        // SAFETY: as the caller promises.
        unsafe { base.cast().as_ref() }
    }

    fn piece(&self, at: usize) -> &AtomicU32 {
        &self.rings[(at - FRONT) / 4]
    }
}

/// # Safety
/// As for [`Cells::of`], here and below.
pub(crate) unsafe fn u64<'a>(base: NonNull<u8>, at: usize) -> U64<'a> {
    // SAFETY: as the caller promises.
    let cells = unsafe { Cells::of(base) };
    if at >= FRONT {
        return U64::Pieces(cells.piece(at), cells.piece(at + 4));
    }
    match &cells.front[at / 8] {
        Number::Whole(number) => U64::Number(at, number),
        Number::Half(_) => unreachable!("a number of 4 bytes at {at}"),
    }
}

pub(crate) unsafe fn u32<'a>(base: NonNull<u8>, at: usize) -> U32<'a> {
    // SAFETY: as the caller promises.
    let cells = unsafe { Cells::of(base) };
    if at >= FRONT {
        return U32(at, cells.piece(at));
    }
    match &cells.front[at / 8] {
        Number::Half(number) => U32(at, number),
        Number::Whole(_) => unreachable!("a number of 8 bytes at {at}"),
    }
}

pub(crate) unsafe fn u8<'a>(base: NonNull<u8>, at: usize) -> U8<'a> {
    // SAFETY: as the caller promises.
    U8(unsafe { Cells::of(base) }.piece(at), at % 4 * 8)
}

pub(crate) enum U64<'a> {
    Number(usize, &'a AtomicU64),
    Pieces(&'a AtomicU32, &'a AtomicU32),
}

impl U64<'_> {
    #[track_caller]
    pub(crate) fn load(&self, order: Ordering) -> u64 {
        if !hook::acts() {
            return 0;
        }
        match self {
            Self::Number(_, number) => hook::ordered(order, |order| number.load(order)),
            Self::Pieces(low, high) => {
                u64::from(low.load(order)) | u64::from(high.load(order)) << 32
            }
        }
    }

    #[track_caller]
    pub(crate) fn store(&self, value: u64, order: Ordering) {
        if !hook::acts() {
            return;
        }
        match self {
            Self::Number(at, _) if hook::forgets(*at) => {}
            Self::Number(_, number) => hook::ordered(order, |order| number.store(value, order)),
            Self::Pieces(low, high) => {
                low.store(value as u32, order);
                high.store((value >> 32) as u32, order);
            }
        }
    }

    #[track_caller]
    pub(crate) fn compare_exchange(
        &self,
        from: u64,
        to: u64,
        done: Ordering,
        failed: Ordering,
    ) -> Result<u64, u64> {
        let Self::Number(_, number) = self else { unreachable!("a position") };
        if !hook::acts() {
            return Err(0);
        }
        hook::ordered(done, |done| number.compare_exchange(from, to, done, failed))
    }
}

pub(crate) struct U32<'a>(usize, &'a AtomicU32);

impl U32<'_> {
    #[track_caller]
    pub(crate) fn load(&self, order: Ordering) -> u32 {
        if hook::acts() { hook::ordered(order, |order| self.1.load(order)) } else { 0 }
    }

    #[track_caller]
    pub(crate) fn store(&self, value: u32, order: Ordering) {
        if hook::acts() && !hook::forgets(self.0) {
            hook::ordered(order, |order| self.1.store(value, order));
        }
    }

    #[track_caller]
    pub(crate) fn swap(&self, value: u32, order: Ordering) -> u32 {
        if hook::acts() { hook::ordered(order, |order| self.1.swap(value, order)) } else { 0 }
    }

    #[track_caller]
    pub(crate) fn compare_exchange(
        &self,
        from: u32,
        to: u32,
        done: Ordering,
        failed: Ordering,
    ) -> Result<u32, u32> {
        if !hook::acts() {
            return Err(0);
        }
        hook::ordered(done, |done| self.1.compare_exchange(from, to, done, failed))
    }

    #[track_caller]
    pub(crate) fn compare_exchange_weak(
        &self,
        from: u32,
        to: u32,
        done: Ordering,
        failed: Ordering,
    ) -> Result<u32, u32> {
        self.compare_exchange(from, to, done, failed)
    }

    #[track_caller]
    pub(crate) fn fetch_update(
        &self,
        done: Ordering,
        failed: Ordering,
        update: impl FnMut(u32) -> Option<u32>,
    ) -> Result<u32, u32> {
        if !hook::acts() || hook::forgets(self.0) {
            return Err(0);
        }
        hook::ordered(done, |done| {
            let failed = if done == Ordering::Relaxed { done } else { failed };
            self.1.fetch_update(done, failed, update)
        })
    }
}

pub(crate) struct U8<'a>(&'a AtomicU32, usize);

impl U8<'_> {
    pub(crate) fn load(&self, order: Ordering) -> u8 {
        if hook::acts() { (self.0.load(order) >> self.1) as u8 } else { 0 }
    }

    pub(crate) fn store(&self, value: u8, order: Ordering) {
        if hook::acts() {
            let others = self.0.load(order) & !(0xff << self.1);
            self.0.store(others | u32::from(value) << self.1, order);
        }
    }
}

#[track_caller]
pub(crate) fn fence(order: Ordering) {
    if hook::acts() {
        hook::fence(order);
    }
}
