//! What a client of the NBD front end sends: the handshake and requests.
#![no_main]
#![allow(dead_code, reason = "the front end is included without its sockets")]

use libfuzzer_sys::fuzz_target;

#[path = "../../crates/bowline-block/src/front/nbd/check.rs"]
mod check;
#[path = "../../crates/bowline-block/src/front/nbd/contexts.rs"]
mod contexts;
#[path = "../../crates/bowline-block/src/front/nbd/handshake.rs"]
mod handshake;
#[path = "../../crates/bowline-block/src/front/nbd/reply.rs"]
mod reply;
#[path = "../../crates/bowline-block/src/front/nbd/script.rs"]
mod script;
#[path = "../../crates/bowline-block/src/front/nbd/stream_checks.rs"]
mod stream_checks;
#[path = "../../crates/bowline-block/src/front/nbd/wire.rs"]
mod wire;

fuzz_target!(|bytes: &[u8]| stream_checks::check_stream(bytes));
