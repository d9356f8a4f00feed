//! `dlsym`. A program that looks for a function in the C library itself, by a handle of it, finds
//! the one that ours hides, as those that were made to call C functions do. It gets ours.
//!
//! SAFETY of every block here: as in [`calls`](crate::calls).
#![allow(
    clippy::multiple_unsafe_ops_per_block,
    clippy::undocumented_unsafe_blocks,
    reason = "the C library documents it, with its conditions"
)]

use core::ffi::{CStr, c_char, c_int, c_void};
use core::ptr;
use core::sync::atomic::{AtomicPtr, Ordering};

#[cfg(target_arch = "x86_64")]
const VERSIONS: [&CStr; 2] = [c"GLIBC_2.34", c"GLIBC_2.2.5"];
#[cfg(not(target_arch = "x86_64"))]
const VERSIONS: [&CStr; 2] = [c"GLIBC_2.34", c"GLIBC_2.17"];

type Lookup = unsafe extern "C" fn(*mut c_void, *const c_char) -> *mut c_void;

unsafe extern "C" {
    fn dlvsym(handle: *mut c_void, name: *const c_char, version: *const c_char) -> *mut c_void;
}

#[unsafe(naked)]
#[unsafe(no_mangle)]
unsafe extern "C" fn dlsym() -> *mut c_void {
    // What the caller is, the C library sees by where the call returns to.
    crate::real::jump_or_fail!(target)
}

extern "C" fn target(handle: *mut c_void) -> *const c_void {
    let is_of_caller = [libc::RTLD_NEXT, libc::RTLD_DEFAULT].contains(&handle);
    if is_of_caller { real().cast_const() } else { by_handle as *const c_void }
}

fn real() -> *mut c_void {
    static REAL: AtomicPtr<c_void> = AtomicPtr::new(ptr::null_mut());
    let known = REAL.load(Ordering::Relaxed);
    if !known.is_null() {
        return known;
    }
    let find =
        |version: &CStr| unsafe { dlvsym(libc::RTLD_NEXT, c"dlsym".as_ptr(), version.as_ptr()) };
    let found = VERSIONS.into_iter().map(find).find(|found| !found.is_null());
    let found = found.unwrap_or(ptr::null_mut());
    REAL.store(found, Ordering::Relaxed);
    found
}

/// The object that has an address: where it begins, and its path.
fn object(at: *const c_void) -> Option<libc::Dl_info> {
    let mut found: libc::Dl_info = unsafe { core::mem::zeroed() };
    let is_found: c_int = unsafe { libc::dladdr(at, &raw mut found) };
    (is_found != 0).then_some(found)
}

unsafe extern "C" fn by_handle(handle: *mut c_void, name: *const c_char) -> *mut c_void {
    let real: Lookup = unsafe { core::mem::transmute(real()) };
    let found = unsafe { real(handle, name) };
    if found.is_null() {
        return found;
    }
    let (Some(own), Some(place)) = (object(target as *const c_void), object(found)) else {
        return found;
    };
    // Other objects have functions of these names as well, and mean them.
    let libc = object(libc::strlen as *const c_void).or_else(|| object(real as *const c_void));
    if libc.is_none_or(|libc| libc.dli_fbase != place.dli_fbase) {
        return found;
    }
    let ours = unsafe { libc::dlopen(own.dli_fname, libc::RTLD_LAZY | libc::RTLD_NOLOAD) };
    if ours.is_null() {
        return found;
    }
    let hides = unsafe { real(ours, name) };
    unsafe { libc::dlclose(ours) };
    let is_ours = object(hides).is_some_and(|one| one.dli_fbase == own.dli_fbase);
    if is_ours { hides } else { found }
}
