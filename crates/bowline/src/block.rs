//! What blocks are stored in behind exports, and how programs and other software reach a disk.

pub use bowline_block::*;
