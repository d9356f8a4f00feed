//! Words for the numbers of the interface.

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
