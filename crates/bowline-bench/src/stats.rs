//! Medians and quartiles.

/// The middle and the quarters of several values.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Spread {
    /// Value below which a quarter lies.
    pub(crate) low: f64,
    /// Median.
    pub(crate) mid: f64,
    /// Value above which a quarter lies.
    pub(crate) high: f64,
    /// How many values there were.
    pub(crate) count: usize,
}

/// Computes median and quartiles, interpolating between neighbours; nothing for no values.
pub(crate) fn spread(values: impl IntoIterator<Item = f64>) -> Option<Spread> {
    let mut values: Vec<f64> = values.into_iter().filter(|v| v.is_finite()).collect();
    values.sort_by(f64::total_cmp);
    let last = values.len().checked_sub(1)?;
    let at = |p: f64| {
        let x = p * last as f64;
        let (below, above) = (values[x.floor() as usize], values[x.ceil() as usize]);
        below + (above - below) * x.fract()
    };
    Some(Spread { low: at(0.25), mid: at(0.5), high: at(0.75), count: values.len() })
}

/// The median alone.
pub(crate) fn median(values: impl IntoIterator<Item = f64>) -> Option<f64> {
    spread(values).map(|s| s.mid)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quartiles_of_five_values_are_their_neighbours() {
        let s = spread([5.0, 1.0, 3.0, 2.0, 4.0]).unwrap();
        assert_eq!((s.low, s.mid, s.high, s.count), (2.0, 3.0, 4.0, 5));
        assert_eq!(median([1.0, 2.0]), Some(1.5));
        assert_eq!(spread([]), None);
        assert_eq!(median([f64::NAN, 7.0]), Some(7.0));
    }
}
