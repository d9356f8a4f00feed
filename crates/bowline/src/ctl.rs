//! Trees of named attributes, as under /sys: what `tree` in `rtrs` and `rnbd` makes of sessions and
//! disks, served as files, over a socket and as JSON.

pub use bowline_ctl::*;
