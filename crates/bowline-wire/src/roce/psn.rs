//! Packet sequence numbers: 24 bits, compared within half a turn.

use core::fmt;
use core::ops::{Add, AddAssign, Sub};

/// Numbers there are: 2^24.
const TURN: u32 = 1 << 24;
const MASK: u32 = TURN - 1;

/// A packet sequence number, modulo 2^24.
///
/// There is no `Ord`: which of two is later is a question of the half turn between them, and not
/// transitive. The comparisons here are those of `docs/spec/roce.md`, section 5: the sign of
/// `(a - b) << 8` as 32 bits.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct Psn(u32);

impl Psn {
    /// The number 0.
    pub const ZERO: Self = Self(0);
    /// The last number before 0.
    pub const MAX: Self = Self(MASK);

    /// Takes the low 24 bits of `value`.
    pub const fn new(value: u32) -> Self {
        Self(value & MASK)
    }

    /// Returns the number, below 2^24.
    pub const fn get(self) -> u32 {
        self.0
    }

    /// Returns the number that follows.
    #[must_use]
    pub const fn next(self) -> Self {
        Self::new(self.0.wrapping_add(1))
    }

    /// Returns the number before.
    #[must_use]
    pub const fn previous(self) -> Self {
        Self::new(self.0.wrapping_sub(1))
    }

    /// Counts the steps from `earlier` to `self`, 0 to 2^24 - 1.
    pub const fn since(self, earlier: Self) -> u32 {
        self.0.wrapping_sub(earlier.0) & MASK
    }

    /// Returns how much later than `other` this is, -2^23 to 2^23 - 1; negative: it is earlier.
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

    /// Tells whether `self` is one of the `count` numbers from `first` on.
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
