//! The C library's functions that this library replaces.

use core::ffi::{c_char, c_int, c_void};
use core::ptr;
use core::sync::atomic::{AtomicPtr, Ordering};

/// A replaced function of the C library, looked up at its first use.
pub(crate) struct Hidden {
    name: &'static core::ffi::CStr,
    found: AtomicPtr<c_void>,
}

impl Hidden {
    pub(crate) const fn new(name: &'static core::ffi::CStr) -> Self {
        Self { name, found: AtomicPtr::new(ptr::null_mut()) }
    }

    /// Address of the function; null if the C library does not have it.
    #[inline]
    pub(crate) fn address(&self) -> *mut c_void {
        // Relaxed: the linker has the function ready, and each thread that looks finds the same.
        let found = self.found.load(Ordering::Relaxed);
        if found.is_null() { self.find() } else { found }
    }

    #[cold]
    fn find(&self) -> *mut c_void {
        let name: *const c_char = self.name.as_ptr();
        // SAFETY: the name ends with a zero byte; RTLD_NEXT needs no handle.
        let found = unsafe { libc::dlsym(libc::RTLD_NEXT, name) };
        self.found.store(found, Ordering::Relaxed);
        found
    }
}

/// Calls the replaced function: `hidden!(close(fd: c_int) -> c_int)`. It fails with ENOSYS where
/// the C library has no such function.
macro_rules! hidden {
    ($name:ident($($arg:ident: $type:ty),* $(,)?) -> $ret:ty) => {{
        static HIDDEN: $crate::real::Hidden = $crate::real::Hidden::new(
            match core::ffi::CStr::from_bytes_with_nul(
                concat!(stringify!($name), "\0").as_bytes(),
            ) {
                Ok(name) => name,
                Err(_) => unreachable!(),
            },
        );
        let address = HIDDEN.address();
        if address.is_null() {
            $crate::real::fail(libc::ENOSYS) as $ret
        } else {
            let function: unsafe extern "C" fn($($type),*) -> $ret =
                // SAFETY: the C library's function of this name has this signature.
                unsafe { core::mem::transmute(address) };
            // SAFETY: the arguments are the caller's, who called the function of this name.
            unsafe { function($($arg),*) }
        }
    }};
}
pub(crate) use hidden;

/// Sets `errno` and returns -1, as C's functions do.
pub(crate) fn fail(errno: c_int) -> c_int {
    // SAFETY: the C library returns the place of this thread's errno.
    let place = unsafe { libc::__errno_location() };
    // SAFETY: the place is valid for as long as the thread is.
    unsafe { *place = errno };
    -1
}

/// Restores `errno` after system calls of this library: programs read it after other calls that
/// succeed, such as a `close` on the way out of an error.
pub(crate) struct KeptErrno(c_int);

impl KeptErrno {
    pub(crate) fn new() -> Self {
        // SAFETY: the C library returns the place of this thread's errno.
        let place = unsafe { libc::__errno_location() };
        // SAFETY: the place is valid for as long as the thread is.
        Self(unsafe { *place })
    }
}

impl Drop for KeptErrno {
    fn drop(&mut self) {
        fail(self.0);
    }
}
