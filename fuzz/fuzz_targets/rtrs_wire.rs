//! Messages of RTRS and headers of requests from any bytes: the checks of the tests.
#![no_main]

use bowline_wire::rtrs::Geometry;
use libfuzzer_sys::fuzz_target;

#[path = "../../crates/bowline-wire/tests/checks/rtrs.rs"]
mod checks;

/// Number of chunks, logarithm of their size, room for messages; an immediate; an offset.
type Numbers = ((u16, u8, u32), u32, u32);

fuzz_target!(|input: (Numbers, &[u8])| {
    let (((depth, log, hdr), imm, off), bytes) = input;
    let chunk = 1u32.checked_shl(log.into()).unwrap_or_default();
    let geometry = Geometry::of_chunk(depth, chunk, hdr % (2 << 20))
        .or(Geometry::of_chunk(depth % 64 + 1, 8192, 4096))
        .expect("the second fits");
    checks::messages(bytes, &geometry);
    checks::imm(imm, &geometry);
    checks::request(off, bytes, &geometry);
    checks::request(off % geometry.chunk(), bytes, &geometry);
    checks::request(off % 300, bytes, &geometry);
});
