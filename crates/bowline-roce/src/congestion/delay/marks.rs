//! Notifications of congestion: the window shrinks by half of the share of marked rounds [CC-7], as
//! the rate does in DCQCN.

/// Weight of a new round in the share: DCTCP's g (RFC 8257, section 3.3). DCQCN's is a 256th, of
/// shorter times.
const WEIGHT: f64 = 1.0 / 16.0;

/// Share of marked rounds: DCQCN's alpha, which begins with 1 there too.
#[derive(Clone, Copy, Debug)]
pub(super) struct MarkShare(f64);

impl MarkShare {
    pub(super) const fn new() -> Self {
        Self(1.0)
    }

    /// A round has ended, with a notification or without.
    pub(super) fn end_round(&mut self, marked: bool) {
        self.0 += ((if marked { 1.0 } else { 0.0 }) - self.0) * WEIGHT;
    }

    /// What a notification leaves of the window.
    pub(super) fn left(&self) -> f64 {
        1.0 - self.0 / 2.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // tests [CC-7]
    #[test]
    fn the_first_notification_halves_the_window_and_a_seldom_one_hardly_counts() {
        let mut marks = MarkShare::new();
        assert_eq!(marks.left(), 0.5);
        marks.end_round(false);
        assert_eq!(marks.left(), 1.0 - 15.0 / 32.0);
        for _ in 0..200 {
            marks.end_round(false);
        }
        assert!(marks.left() > 0.99);
        marks.end_round(true);
        assert!((0.96..0.97).contains(&marks.left()));
    }
}
