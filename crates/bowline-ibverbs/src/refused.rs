//! Calls for what this device does not have, and those that have nothing to do.

use core::ffi::{c_int, c_void};

use crate::abi::Context;
use crate::none;

/// `IBV_FORK_UNNEEDED`: memory is not the device's, so that a child may have its own copy.
const FORK_UNNEEDED: c_int = 2;

#[unsafe(no_mangle)]
extern "C" fn ibv_fork_init() -> c_int {
    0
}

#[unsafe(no_mangle)]
extern "C" fn ibv_is_fork_initialized() -> c_int {
    FORK_UNNEEDED
}

#[unsafe(no_mangle)]
extern "C" fn ibv_dontfork_range(_base: *mut c_void, _size: usize) -> c_int {
    0
}

#[unsafe(no_mangle)]
extern "C" fn ibv_dofork_range(_base: *mut c_void, _size: usize) -> c_int {
    0
}

#[unsafe(no_mangle)]
extern "C" fn ibv_import_device(_fd: c_int) -> *mut Context {
    none(libc::EOPNOTSUPP)
}
