//! Runs unmodified AF_RDS programs on the RDS node of their host. A program that is started with
//! this library in `LD_PRELOAD`, as `bowline run` does, gets the sockets that it asks for from
//! `bowline node`; other descriptors go to the system as before.
//!
//! ```text
//!   calls      the C library's functions, by kind of descriptor: ours, or the real one
//!   closing    what becomes of memory that was given for sockets, when descriptors are closed
//!   table      which descriptors are RDS sockets
//!   areas      the memory of each
//!   nodes      nodes that this process has sockets of
//!   real       the functions that ours hide
//! ```
//!
//! What a call on an RDS socket does is in [`bowline_host_client`], which the library `bowline` has
//! too.
//!
//! It has no locks, since calls may come from the child of a `fork` of a program with threads.
//!
//! It cannot reach programs that are linked statically, make system calls themselves, or use
//! io_uring.

#![allow(unsafe_code, reason = "the C library's functions, with the pointers that they take")]

mod areas;
mod calls;
mod closing;
mod nodes;
mod real;
mod slot;
mod sync;
mod table;
