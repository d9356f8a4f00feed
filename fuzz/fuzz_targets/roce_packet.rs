//! One RoCE packet from any bytes, the same bytes with an ICRC that is right, and a management
//! datagram of them: the checks of the tests.
#![no_main]

use std::net::{Ipv4Addr, Ipv6Addr};

use libfuzzer_sys::fuzz_target;

#[path = "../../crates/bowline-wire/tests/checks/roce.rs"]
mod checks;

/// Addresses of both families, source port, IPv4 identification.
type Outer = ([u8; 16], [u8; 16], u16, u16);

fuzz_target!(|input: (Outer, &[u8])| {
    let ((from, to, source_port, ident), bytes) = input;
    checks::packet(bytes);
    checks::mad(bytes);
    let v4 = |[.., a, b, c, d]: [u8; 16]| Ipv4Addr::from([a, b, c, d]).into();
    checks::icrc(v4(from), v4(to), source_port, ident, bytes);
    let v6 = |address| Ipv6Addr::from(address).into();
    checks::icrc(v6(from), v6(to), source_port, ident, bytes);
});
