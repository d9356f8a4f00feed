//! What a server sends to the NBD client behind an export: the handshake and replies.
#![no_main]
#![allow(dead_code, reason = "the store is included without its connections")]

use libfuzzer_sys::fuzz_target;

#[path = "../../crates/bowline-block/src/backend/nbd/handshake.rs"]
mod handshake;
#[path = "../../crates/bowline-block/src/backend/nbd/replies.rs"]
mod replies;
#[path = "../../crates/bowline-block/src/backend/nbd/reply_checks.rs"]
mod reply_checks;
#[path = "../../crates/bowline-block/src/front/nbd/script.rs"]
mod script;
#[path = "../../crates/bowline-block/src/front/nbd/wire.rs"]
mod wire;

fuzz_target!(|bytes: &[u8]| reply_checks::check_stream(bytes));
