//! Trees of named attributes, as under /sys: what `tree` in `rtrs` and `rnbd` makes of sessions and
//! disks, served as files, over a socket and as JSON.

pub use bowline_ctl::{
    Answer, AttrDef, Caller, Client, ConnectionLimits, Dir, Entry, Found, Json, JsonError, Kind,
    Node, Op, OwnedFile, PathSpec, Refused, Server, Successor, Sys, Tree, Value, folder,
};

/// A tree as files, under FUSE.
#[cfg(feature = "fuse")]
pub mod fusefs {
    pub use bowline_ctl::fusefs::{Mount, folder, mount};
}
