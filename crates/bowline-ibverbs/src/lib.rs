//! `libibverbs.so.1` over bowline's RoCEv2 in user space: programs that speak verbs run, as they
//! are, on machines without an RDMA device, without root and without a module of the kernel.
//!
//! ```text
//!   program --- inline functions of verbs.h --> abi::Context.ops, abi::VerbsContext
//!          \--- calls by name (symbols.map) --> functions here --> bowline_roce_driver::SoftDevice
//!   program <-- descriptors that can be read <-- events <-- Watch, in the thread of a packet
//! ```
//!
//! Objects are structures of C with what this library keeps for them behind what programs know
//! (`abi.rs`). Where a manual page says that a call fails, `errno` is set and is returned where the
//! call returns a number.
//!
//! What a program gives is believed as far as C has it: pointers that are not null point to what
//! their type says.

mod abi;
mod address;
mod cm;
mod completion;
mod device;
mod events;
mod memory;
mod names;
mod post;
mod query;
mod queue_pair;
mod rates;
mod refused;
mod requests;
mod rsocket;
mod shared_receives;
mod vendors;

use core::ffi::c_int;

use bowline_verbs::Error;

/// Sets `errno`, and returns it.
fn fails(errno: c_int) -> c_int {
    // SAFETY: it has no preconditions.
    let own = unsafe { libc::__errno_location() };
    // SAFETY: the thread's own number, which lives as long as the thread.
    unsafe { own.write(errno) };
    errno
}

/// Sets `errno` to that of an error, and returns it.
fn failed(error: &Error) -> c_int {
    fails(error.errno().0)
}

/// Returns 0, or sets and returns the errno.
fn outcome(result: Result<(), Error>) -> c_int {
    result.map_or_else(|error| failed(&error), |()| 0)
}

/// The outcome of an end: what belonged to a device that is gone has ended with it.
fn ended(result: Result<(), Error>) -> Result<(), Error> {
    result.or_else(|error| if error == Error::Closed { Ok(()) } else { Err(error) })
}

/// Returns null and sets `errno`.
fn none<T>(errno: c_int) -> *mut T {
    fails(errno);
    core::ptr::null_mut()
}

/// Returns the object to the program, which gives it back to be freed.
fn made<T>(object: T) -> *mut T {
    Box::into_raw(Box::new(object))
}
