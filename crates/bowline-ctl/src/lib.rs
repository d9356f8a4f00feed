//! A tree of named attributes, as under /sys: read, written, listed; served as files, commands
//! and JSON.
//!
//! ```text
//! objects of a driver -> dyn Node -> Tree -> socket (JSON lines; used by the command line)
//!                                        -> fusefs (the same names as files; echo and cat)
//!                                        -> dump (everything as one JSON object)
//! ```
//!
//! The kernel's RTRS and RNBD are operated through files of sysfs, one value per file. A program
//! without a kernel offers the same names, the same texts and the same error numbers [RS-32..44]
//! [NB-34..40] here; an RDS node has a tree of the same manner. This crate knows nothing of these
//! protocols: it has the tree, its front ends, and the address strings that name paths.
//!
//! # Example
//!
//! ```
//! use std::sync::Arc;
//! use bowline_ctl::{AttrDef, Dir, Errno, Node, Tree, Value};
//!
//! #[derive(Debug)]
//! struct Lamp;
//!
//! impl Node for Lamp {
//!     fn attrs(&self) -> &'static [AttrDef] {
//!         &[AttrDef { name: "colour", mode: 0o444 }]
//!     }
//!     fn read(&self, name: &str) -> Result<Value, Errno> {
//!         match name {
//!             "colour" => Ok(Value::Text("red".to_owned())),
//!             _ => Err(Errno::ENOENT),
//!         }
//!     }
//! }
//!
//! let tree = Tree::new(Arc::new(Dir::new().with("lamp0", Arc::new(Lamp))));
//! assert_eq!(tree.read("/lamp0/colour").unwrap().to_string(), "red\n");
//! assert_eq!(tree.read("/lamp1/colour").unwrap_err(), Errno::ENOENT);
//! ```

#![deny(unsafe_code)]

mod acceptor;
#[cfg(feature = "fuse")]
pub mod fusefs;
mod json;
mod listen;
mod owned_file;
mod passed;
mod path;
mod peer;
mod place;
mod socket;
mod sys;
mod tree;
mod value;

pub use acceptor::{Acceptor, ClientConnection, ClientHandler, ConnectionLimits};
pub use bowline_base::Errno;
pub use json::{Json, JsonError};
pub use listen::{folder_of, is_socket, listen, refuse_unsafe_folder, run_folder, sweep};
pub use owned_file::OwnedFile;
pub use passed::{Passed, passed};
pub use path::{PathSpec, address_text};
pub use peer::Peer;
pub use place::Place;
pub use socket::{
    Answer, Client, Op, Server, Successor, ask_to_replace, create_folder_of, folder, folders,
};
pub use sys::Sys;
pub use tree::{AttrDef, Caller, Dir, Entry, Found, Kind, Node, Refused, Tree};
pub use value::Value;

/// Compiles the example of the README.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
pub mod readme {}
