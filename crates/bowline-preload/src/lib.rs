//! Runs unmodified AF_RDS programs on the RDS node of their host. A program that is started with
//! this library in `LD_PRELOAD`, as `bowline run` does, gets the sockets that it asks for from
//! `bowline node`; descriptors that are no RDS sockets go to the system as ever.
//!
//! ```text
//!   calls      the C library's functions, by kind of descriptor: ours, or the real one
//!   table      which descriptors are RDS sockets
//!   channel    requests to the node and their answers
//!   rds        what each call asks the node, and what it makes of the answer
//!   real       the functions that ours hide, and system calls
//! ```
//!
//! It has no locks: calls may come from the child of a `fork` of a program with threads.
//!
//! It cannot reach programs that are linked statically, make system calls themselves, or use
//! io_uring.

#![allow(unsafe_code, reason = "the C library's functions, with the pointers that they take")]

mod areas;
mod calls;
mod channel;
mod rds;
mod real;
mod table;
