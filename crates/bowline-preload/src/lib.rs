//! Runs unmodified AF_RDS programs on the RDS node of their host. A program that is started with
//! this library in `LD_PRELOAD`, as `bowline run` does, gets the sockets that it asks for from
//! `bowline node`; other descriptors go to the system as before.
//!
//! ```text
//!   calls      the C library's functions, by kind of descriptor: ours, or the real one
//!   files      the same: what reads and writes as a file
//!   streams    the same: streams of the C library
//!   raw        the same: the function `syscall`
//!   lookup     the same: `dlsym`
//!   filters    the same: filters of system calls
//!   cancel     threads that are cancelled where a call waits for a node
//!   closing    what becomes of memory that was given for sockets, when descriptors are closed
//!   mapping    what becomes of memory that was given to nodes, when it is unmapped
//!   table      which descriptors are RDS sockets
//!   areas      the memory of each
//!   pointers   what a program points at
//!   faults     copies where it points at nothing
//!   paths      the C library's functions on paths: files of the RDMA device of verbs programs
//!   process    whose memory the tables are, after calls that make processes
//!   sparse     a table of which little is mapped
//!   nodes      nodes that this process has sockets of
//!   sanitizer  what AddressSanitizer asks for
//!   real       the functions that ours hide
//! ```
//!
//! What a call on an RDS socket does is in [`bowline_host_client`], which the library `bowline` has
//! too.
//!
//! It has no locks, since calls may come from the child of a `fork` of a program with threads.
//!
//! It cannot reach programs that are linked statically, make system calls themselves, or use
//! io_uring: a node closes a socket that is written to so.

#![allow(unsafe_code, reason = "the C library's functions, with the pointers that they take")]

mod areas;
mod calls;
mod cancel;
mod closing;
mod faults;
mod files;
mod filters;
#[cfg(target_env = "gnu")]
mod lookup;
mod mapping;
mod nodes;
#[cfg(target_env = "gnu")]
mod paths;
mod pointers;
mod process;
mod raw;
mod real;
mod sanitizer;
mod slot;
mod sparse;
#[cfg(target_env = "gnu")]
mod streams;
mod sync;
mod table;
