//! Rates of ports: the numbers of the interface, and what they stand for.

use core::ffi::{c_int, c_uint};

/// `enum ibv_rate`, its multiple of 2.5 Gb/s, and Mb/s.
const RATES: [(c_uint, c_int, c_int); 23] = [
    (2, 1, 2_500),
    (5, 2, 5_000),
    (3, 4, 10_000),
    (6, 8, 20_000),
    (4, 12, 30_000),
    (7, 16, 40_000),
    (8, 24, 60_000),
    (9, 32, 80_000),
    (10, 48, 120_000),
    (11, 6, 14_062),
    (12, 22, 56_250),
    (13, 45, 112_500),
    (14, 67, 168_750),
    (15, 10, 25_781),
    (16, 40, 103_125),
    (17, 80, 206_250),
    (18, 120, 309_375),
    (19, 11, 28_125),
    (20, 20, 53_125),
    (21, 160, 425_000),
    (22, 240, 637_500),
    (23, 320, 850_000),
    (24, 480, 1_275_000),
];

#[unsafe(no_mangle)]
extern "C" fn ibv_rate_to_mult(rate: c_uint) -> c_int {
    RATES.iter().find(|(of, ..)| *of == rate).map_or(-1, |(_, multiple, _)| *multiple)
}

#[unsafe(no_mangle)]
extern "C" fn mult_to_ibv_rate(multiple: c_int) -> c_uint {
    RATES.iter().find(|(_, of, _)| *of == multiple).map_or(0, |(rate, ..)| *rate)
}

#[unsafe(no_mangle)]
extern "C" fn ibv_rate_to_mbps(rate: c_uint) -> c_int {
    RATES.iter().find(|(of, ..)| *of == rate).map_or(-1, |(.., mbps)| *mbps)
}

#[unsafe(no_mangle)]
extern "C" fn mbps_to_ibv_rate(mbps: c_int) -> c_uint {
    RATES.iter().find(|(.., of)| *of == mbps).map_or(0, |(rate, ..)| *rate)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_go_both_ways() {
        for (rate, multiple, mbps) in RATES {
            assert_eq!(ibv_rate_to_mult(rate), multiple);
            assert_eq!(mult_to_ibv_rate(multiple), rate);
            assert_eq!(mbps_to_ibv_rate(ibv_rate_to_mbps(rate)), rate);
            assert_eq!(ibv_rate_to_mbps(rate), mbps);
        }
        assert_eq!((ibv_rate_to_mult(0), mult_to_ibv_rate(7)), (-1, 0));
    }
}
