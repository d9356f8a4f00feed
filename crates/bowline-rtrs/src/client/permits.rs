//! Permits: the right to use one chunk of the server [RT-37].

/// The kind of connection a request takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PermitKind {
    /// The service connection.
    Service,
    /// An IO connection, chosen by the processor.
    Io,
    /// A poll connection, chosen by the processor: its completions come when the program polls. If
    /// the session has none, an IO connection.
    Polled,
}

/// The right to have one request in flight, in the chunk of this index. Give it back with
/// [`Session::put_permit`](super::Session::put_permit).
#[derive(Debug, PartialEq, Eq)]
#[must_use = "a permit that is not given back is lost to the session"]
pub struct Permit {
    pub(super) owner: u64,
    pub(super) index: u16,
    pub(super) kind: PermitKind,
}

impl Permit {
    /// Index of the chunk.
    pub const fn index(&self) -> u16 {
        self.index
    }

    /// The kind of connection its requests take.
    pub const fn kind(&self) -> PermitKind {
        self.kind
    }

    /// Moves the permit out of `self`; what stays there is useless.
    pub const fn take(&mut self) -> Self {
        let Self { owner, index, kind } = *self;
        // An index that no session has.
        self.index = u16::MAX;
        Self { owner, index, kind }
    }
}

/// The permits in use. A set bit is a free permit.
#[derive(Debug, Default)]
pub(super) struct Permits {
    free: Vec<u64>,
    left: u32,
    total: u32,
    /// A caller was refused since [`take_refused`](Self::take_refused). Holds the number of permits
    /// that had to stay free, the smallest if several callers were refused.
    refused_keep: Option<u32>,
}

impl Permits {
    pub(super) fn new(total: u16) -> Self {
        let total = u32::from(total);
        let words = total.div_ceil(64);
        let word = |i: u32| u64::MAX >> (64 - (total - 64 * i).min(64));
        Self { free: (0..words).map(word).collect(), left: total, total, refused_keep: None }
    }

    /// Takes the lowest free index, unless no more than `keep` are left.
    pub(super) fn take(&mut self, keep: u32) -> Option<u16> {
        let found = (self.left > keep).then(|| self.free.iter().position(|&w| w != 0)).flatten();
        let Some(at) = found else {
            self.refused_keep = Some(self.refused_keep.map_or(keep, |least| least.min(keep)));
            return None;
        };
        let bit = self.free[at].trailing_zeros();
        self.free[at] &= !(1 << bit);
        self.left -= 1;
        Some((at as u32 * 64 + bit) as u16)
    }

    pub(super) fn put(&mut self, index: u16) {
        let (at, bit) = (usize::from(index / 64), index % 64);
        assert!(self.is_out(index), "permit {index} is not out");
        self.free[at] |= 1 << bit;
        self.left += 1;
    }

    pub(super) fn is_out(&self, index: u16) -> bool {
        u32::from(index) < self.total && self.free[usize::from(index / 64)] >> (index % 64) & 1 == 0
    }

    /// Returns whether a caller was refused since the last call and could have a permit now.
    pub(super) fn take_refused(&mut self) -> bool {
        let left = self.left;
        self.refused_keep.take_if(|keep| left > *keep).is_some()
    }

    pub(super) fn all_back(&self) -> bool {
        self.left == self.total
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // tests [RT-37]
    #[test]
    fn the_lowest_free_index_is_taken() {
        let mut permits = Permits::new(130);
        assert_eq!((0..130).map_while(|_| permits.take(0)).last(), Some(129));
        assert_eq!(permits.take(0), None);
        assert!(!permits.take_refused(), "none can be had yet");
        permits.put(70);
        permits.put(5);
        assert!(permits.take_refused());
        assert!(!permits.take_refused(), "told once");
        assert_eq!((permits.take(0), permits.take(0), permits.take(0)), (Some(5), Some(70), None));
        assert!(!permits.all_back());
        (0..130).for_each(|i| permits.put(i));
        assert!(permits.all_back());
    }

    #[test]
    fn kept_permits_are_not_given() {
        for total in [1, 63, 64, 65] {
            let mut permits = Permits::new(total);
            let given = (0..total).map_while(|_| permits.take(1)).count();
            assert_eq!(given, usize::from(total) - 1);
            assert_eq!(permits.take(0), Some(total - 1));
        }
    }

    #[test]
    fn who_is_refused_a_kept_permit_is_told_of_it() {
        let mut permits = Permits::new(3);
        let io = [permits.take(1), permits.take(1)].map(Option::unwrap);
        let kept = permits.take(0).unwrap();
        assert_eq!((permits.take(1), permits.take(0), permits.take(1)), (None, None, None));
        assert!(!permits.take_refused());
        permits.put(kept);
        assert!(permits.take_refused(), "for whoever may have the last one");
        assert_eq!(permits.take(1), None);
        assert!(!permits.take_refused(), "not for others");
        permits.put(io[0]);
        assert!(permits.take_refused());
    }
}
