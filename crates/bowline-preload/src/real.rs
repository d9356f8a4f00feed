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

    /// The same, of a name that ends with a zero byte.
    pub(crate) const fn named(name: &'static str) -> Self {
        match core::ffi::CStr::from_bytes_with_nul(name.as_bytes()) {
            Ok(name) => Self::new(name),
            Err(_) => panic!("the name ends with a zero byte, and has no other"),
        }
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

/// Calls the replaced function, in which a thread may be cancelled: `hidden!(close(fd: c_int) ->
/// c_int)`. It fails with ENOSYS where the C library has no such function.
macro_rules! hidden {
    ($name:ident($($arg:ident: $type:ty),* $(,)?) -> $ret:ty) => {{
        static HIDDEN: $crate::real::Hidden =
            $crate::real::Hidden::named(concat!(stringify!($name), "\0"));
        let address = HIDDEN.address();
        if address.is_null() {
            $crate::real::fail(libc::ENOSYS) as $ret
        } else {
            let function: unsafe extern "C-unwind" fn($($type),*) -> $ret =
                // SAFETY: the C library's function of this name has this signature.
                unsafe { core::mem::transmute(address) };
            // SAFETY: the arguments are the caller's, who called the function of this name.
            unsafe { function($($arg),*) }
        }
    }};
}
pub(crate) use hidden;

/// Functions whose first argument is a descriptor, and what they do when it is an RDS socket.
macro_rules! functions {
    ($(
        fn $name:ident($fd:ident $(, $arg:ident: $type:ty)* $(,)?) -> $ret:ty = |$rds:pat_param| $body:expr;
    )*) => {$(
        #[unsafe(no_mangle)]
        pub unsafe extern "C-unwind" fn $name($fd: c_int $(, $arg: $type)*) -> $ret {
            match $crate::table::find($fd) {
                None => $crate::real::hidden!($name($fd: c_int $(, $arg: $type)*) -> $ret),
                Some(Err(errno)) => $crate::real::fail(errno) as $ret,
                Some(Ok($rds)) => {
                    let result = $body;
                    if result < 0 && $crate::table::is_something_else($fd) {
                        return $crate::real::hidden!(
                            $name($fd: c_int $(, $arg: $type)*) -> $ret
                        );
                    }
                    result
                }
            }
        }
    )*};
}
pub(crate) use functions;

/// The body of a function that continues in another one with all arguments, whatever they are, and
/// at the place that it was called from. `$target` gets the first of them and returns the address
/// of that function, or null: then this one returns -1.
#[cfg(target_arch = "x86_64")]
macro_rules! jump_or_fail {
    ($target:path) => {
        core::arch::naked_asm!(
            "push rbp",
            "mov rbp, rsp",
            "sub rsp, 192",
            "mov [rsp], rdi",
            "mov [rsp + 8], rsi",
            "mov [rsp + 16], rdx",
            "mov [rsp + 24], rcx",
            "mov [rsp + 32], r8",
            "mov [rsp + 40], r9",
            "mov [rsp + 48], rax",
            "movaps [rsp + 64], xmm0",
            "movaps [rsp + 80], xmm1",
            "movaps [rsp + 96], xmm2",
            "movaps [rsp + 112], xmm3",
            "movaps [rsp + 128], xmm4",
            "movaps [rsp + 144], xmm5",
            "movaps [rsp + 160], xmm6",
            "movaps [rsp + 176], xmm7",
            "call {target}",
            "mov r11, rax",
            "mov rdi, [rsp]",
            "mov rsi, [rsp + 8]",
            "mov rdx, [rsp + 16]",
            "mov rcx, [rsp + 24]",
            "mov r8, [rsp + 32]",
            "mov r9, [rsp + 40]",
            "mov rax, [rsp + 48]",
            "movaps xmm0, [rsp + 64]",
            "movaps xmm1, [rsp + 80]",
            "movaps xmm2, [rsp + 96]",
            "movaps xmm3, [rsp + 112]",
            "movaps xmm4, [rsp + 128]",
            "movaps xmm5, [rsp + 144]",
            "movaps xmm6, [rsp + 160]",
            "movaps xmm7, [rsp + 176]",
            "leave",
            "test r11, r11",
            "jz 2f",
            "jmp r11",
            "2: mov rax, -1",
            "ret",
            target = sym $target,
        )
    };
}

/// As for x86-64.
#[cfg(target_arch = "aarch64")]
macro_rules! jump_or_fail {
    ($target:path) => {
        core::arch::naked_asm!(
            "stp x29, x30, [sp, #-208]!",
            "mov x29, sp",
            "stp x0, x1, [sp, #16]",
            "stp x2, x3, [sp, #32]",
            "stp x4, x5, [sp, #48]",
            "stp x6, x7, [sp, #64]",
            "stp q0, q1, [sp, #80]",
            "stp q2, q3, [sp, #112]",
            "stp q4, q5, [sp, #144]",
            "stp q6, q7, [sp, #176]",
            "bl {target}",
            "mov x16, x0",
            "ldp x0, x1, [sp, #16]",
            "ldp x2, x3, [sp, #32]",
            "ldp x4, x5, [sp, #48]",
            "ldp x6, x7, [sp, #64]",
            "ldp q0, q1, [sp, #80]",
            "ldp q2, q3, [sp, #112]",
            "ldp q4, q5, [sp, #144]",
            "ldp q6, q7, [sp, #176]",
            "ldp x29, x30, [sp], #208",
            "cbz x16, 2f",
            "br x16",
            "2: mov x0, #-1",
            "ret",
            target = sym $target,
        )
    };
}
pub(crate) use jump_or_fail;

/// Sets `errno` and returns -1, as C's functions do.
pub(crate) fn fail(errno: c_int) -> c_int {
    // SAFETY: the C library returns the place of this thread's errno.
    let place = unsafe { libc::__errno_location() };
    // SAFETY: the place is valid for as long as the thread is.
    unsafe { *place = errno };
    -1
}

/// This thread's `errno`.
pub(crate) fn errno() -> c_int {
    // SAFETY: the C library returns the place of this thread's errno.
    let place = unsafe { libc::__errno_location() };
    // SAFETY: the place is valid for as long as the thread is.
    unsafe { *place }
}

/// Restores `errno` after system calls of this library: programs read it after other calls that
/// succeed, such as a `close` on the way out of an error.
pub(crate) struct KeptErrno(c_int);

impl KeptErrno {
    pub(crate) fn new() -> Self {
        Self(errno())
    }

    pub(crate) const fn value(&self) -> c_int {
        self.0
    }
}

impl Drop for KeptErrno {
    fn drop(&mut self) {
        fail(self.0);
    }
}
