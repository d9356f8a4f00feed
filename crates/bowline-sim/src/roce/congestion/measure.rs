//! Figures of merit: fairness and percentiles.

/// Jain's index of fairness: 1 if all shares are equal, 1/n if one has everything.
pub(super) fn jain(shares: &[f64]) -> f64 {
    let sum: f64 = shares.iter().sum();
    let squares: f64 = shares.iter().map(|share| share * share).sum();
    if squares == 0.0 { 1.0 } else { sum * sum / (shares.len() as f64 * squares) }
}

/// Returns the value that `per_mille` in a thousand do not exceed; 0 for no values.
pub(super) fn percentile(values: &mut [u64], per_mille: usize) -> u64 {
    values.sort_unstable();
    let at = (values.len() * per_mille).div_ceil(1000).saturating_sub(1);
    values.get(at).copied().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fairness_is_1_for_equal_shares_and_one_nth_for_one_who_has_all() {
        assert!((jain(&[3.0, 3.0, 3.0]) - 1.0).abs() < 1e-9);
        assert!((jain(&[0.0, 5.0, 0.0, 0.0]) - 0.25).abs() < 1e-9);
    }

    #[test]
    fn percentiles_are_values() {
        let mut values: Vec<u64> = (1..=100).rev().collect();
        assert_eq!([500, 990, 1000].map(|p| percentile(&mut values, p)), [50, 99, 100]);
        assert_eq!(percentile(&mut [], 990), 0);
    }
}
