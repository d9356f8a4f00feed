//! Peers that break the rules, over real sockets: hand-made clients against a [`Server`] that
//! serves an honest client meanwhile, and hand-made servers against a [`Session`].
//!
//! [`Server`]: bowline_rtrs_driver::server::Server
//! [`Session`]: bowline_rtrs_driver::client::Session

#[path = "../common/mod.rs"]
mod common;

mod clients;
mod floods;
mod notices;
mod raw;
mod scene;
mod servers;
