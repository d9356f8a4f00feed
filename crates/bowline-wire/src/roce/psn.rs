//! Packet sequence numbers (PSNs): 24 bits, compared modulo 2^24 within half the number space.

use core::fmt;
use core::ops::{Add, AddAssign, Sub};

/// Size of the number space: 2^24.
const TURN: u32 = 1 << 24;
const MASK: u32 = TURN - 1;

/// A packet sequence number, modulo 2^24.
///
/// There is no `Ord`: "later" is defined within half the number space and is not transitive. The
/// comparisons here are those of `docs/spec/roce.md`, section 5: the sign of `(a - b) << 8` as 32
/// bits.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct Psn(u32);

impl Psn {
    /// PSN 0.
    pub const ZERO: Self = Self(0);
    /// The last PSN before 0.
    pub const MAX: Self = Self(MASK);

    /// Makes a PSN of the low 24 bits of `value`.
    pub const fn new(value: u32) -> Self {
        Self(value & MASK)
    }

    /// Returns the PSN as a number below 2^24.
    pub const fn get(self) -> u32 {
        self.0
    }

    /// Returns the next PSN.
    #[must_use]
    pub const fn next(self) -> Self {
        Self::new(self.0.wrapping_add(1))
    }

    /// Returns the previous PSN.
    #[must_use]
    pub const fn previous(self) -> Self {
        Self::new(self.0.wrapping_sub(1))
    }

    /// Returns the distance from `earlier` to `self`, 0 to 2^24 - 1.
    pub const fn since(self, earlier: Self) -> u32 {
        self.0.wrapping_sub(earlier.0) & MASK
    }

    /// Returns the signed distance from `other` to `self`, -2^23 to 2^23 - 1; negative if `self` is
    /// earlier.
    pub const fn diff(self, other: Self) -> i32 {
        (self.0.wrapping_sub(other.0) << 8) as i32 >> 8
    }

    /// Tells whether `self` is later than `other`.
    pub const fn is_after(self, other: Self) -> bool {
        self.diff(other) > 0
    }

    /// Tells whether `self` is earlier than `other`.
    pub const fn is_before(self, other: Self) -> bool {
        self.diff(other) < 0
    }

    /// Tells whether `self` is one of the `count` PSNs from `first` on.
    pub const fn is_within(self, first: Self, count: u32) -> bool {
        self.since(first) < count
    }
}

/// Steps forward, modulo 2^24.
impl Add<u32> for Psn {
    type Output = Self;

    fn add(self, steps: u32) -> Self {
        Self::new(self.0.wrapping_add(steps))
    }
}

impl AddAssign<u32> for Psn {
    fn add_assign(&mut self, steps: u32) {
        *self = *self + steps;
    }
}

/// Steps back, modulo 2^24.
impl Sub<u32> for Psn {
    type Output = Self;

    fn sub(self, steps: u32) -> Self {
        Self::new(self.0.wrapping_sub(steps))
    }
}

impl fmt::Debug for Psn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Psn({self})")
    }
}

impl fmt::Display for Psn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#08x}", self.0)
    }
}
