//! The client side of the protocol in [`bowline_host_wire`]: channels to the node of the host, and
//! calls on its sockets. Used by the preload library, for unmodified programs, and by the library
//! `bowline`.
//!
//! ```text
//!   owned      a socket that belongs to its owner alone, safe to use    (bowline)
//!   socket     what each call asks the node, and what it makes of the answer
//!   node       a node, and channels to it that are not in use
//!   channel    requests to the node and their answers
//!   memory     the memory of a socket
//!   trust      whose node is believed, and where it is looked for
//!   agent      what of this process's memory a node of another user may use
//!   system     system calls as they are
//! ```
//!
//! System calls do not go through the C library's functions, because the preload library replaces
//! those, and a program that uses `bowline` may run with that library. Nothing here takes a lock.

#![allow(unsafe_code, reason = "system calls, and memory of programs that they point at")]

pub mod agent;
mod channel;
pub mod guarded;
pub mod memory;
mod node;
mod owned;
mod reach;
mod socket;
pub mod system;
mod trust;
mod watch;

pub use channel::{Channel, Descriptors, Welcome, is_refusal};
pub use node::{Node, Opened};
pub use owned::{Host, OwnedSocket};
pub use socket::{Message, Pieces, Socket, To};
pub use trust::{is_like_those_of_nodes, is_socket_of_node, wanted_namespace};
