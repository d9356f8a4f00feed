//! Words for numbers, and the numbers of rates.

use core::ffi::{CStr, c_char, c_int, c_uint};

fn word(words: &[&'static CStr], at: usize, unknown: &'static CStr) -> *const c_char {
    words.get(at).copied().unwrap_or(unknown).as_ptr()
}

#[unsafe(no_mangle)]
extern "C" fn ibv_node_type_str(node_type: c_int) -> *const c_char {
    const WORDS: [&CStr; 8] = [
        c"unknown",
        c"InfiniBand channel adapter",
        c"InfiniBand switch",
        c"InfiniBand router",
        c"iWARP NIC",
        c"usNIC",
        c"usNIC UDP",
        c"unspecified",
    ];
    word(&WORDS, usize::try_from(node_type).unwrap_or(0), c"unknown")
}

#[unsafe(no_mangle)]
extern "C" fn ibv_port_state_str(state: c_uint) -> *const c_char {
    const WORDS: [&CStr; 6] =
        [c"no state change", c"down", c"init", c"armed", c"active", c"active defer"];
    word(&WORDS, state as usize, c"invalid state")
}

#[unsafe(no_mangle)]
extern "C" fn ibv_event_type_str(event: c_uint) -> *const c_char {
    const WORDS: [&CStr; 20] = [
        c"CQ error",
        c"QP fatal",
        c"QP request error",
        c"QP access error",
        c"communication established",
        c"send queue drained",
        c"path migrated",
        c"path migration error",
        c"device fatal",
        c"port active",
        c"port error",
        c"LID changed",
        c"P_Key changed",
        c"SM changed",
        c"SRQ error",
        c"SRQ limit reached",
        c"last WQE reached",
        c"client reregistration",
        c"GID table changed",
        c"WQ fatal",
    ];
    word(&WORDS, event as usize, c"unknown")
}

#[unsafe(no_mangle)]
extern "C" fn ibv_wc_status_str(status: c_uint) -> *const c_char {
    const WORDS: [&CStr; 24] = [
        c"success",
        c"local length error",
        c"local QP operation error",
        c"local EE context operation error",
        c"local protection error",
        c"work request flushed",
        c"memory window bind error",
        c"bad response",
        c"local access error",
        c"remote invalid request",
        c"remote access error",
        c"remote operation error",
        c"transport retries exceeded",
        c"receiver-not-ready retries exceeded",
        c"local RDD violation",
        c"remote invalid RD request",
        c"operation aborted by the remote side",
        c"invalid EE context number",
        c"invalid EE context state",
        c"fatal error",
        c"response timeout",
        c"general error",
        c"tag matching error",
        c"tag matching rendezvous incomplete",
    ];
    word(&WORDS, status as usize, c"unknown")
}

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
