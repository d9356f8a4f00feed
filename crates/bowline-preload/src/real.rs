//! The functions that this library hides, and system calls as they are.

use core::ffi::{c_char, c_int, c_long, c_void};
use core::ptr::{self, NonNull};
use core::sync::atomic::{AtomicPtr, Ordering};

/// A function of the C library behind ours, found at its first use.
pub(crate) struct Hidden {
    name: &'static core::ffi::CStr,
    found: AtomicPtr<c_void>,
}

impl Hidden {
    pub(crate) const fn new(name: &'static core::ffi::CStr) -> Self {
        Self { name, found: AtomicPtr::new(ptr::null_mut()) }
    }

    /// Its address; null if the C library does not have it.
    #[inline]
    pub(crate) fn address(&self) -> *mut c_void {
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

/// Calls the function behind ours: `hidden!(close(fd: c_int) -> c_int)`. It fails with ENOSYS where
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

fn errno() -> c_int {
    // SAFETY: as in `fail`.
    let place = unsafe { libc::__errno_location() };
    // SAFETY: as in `fail`.
    unsafe { *place }
}

/// The result of a system call: its value, or the error number.
fn result(value: c_long) -> Result<usize, c_int> {
    usize::try_from(value).map_err(|_| errno())
}

/// Makes a system call past our own functions of the same name.
macro_rules! system {
    ($number:ident $(, $arg:expr)*) => {
        // SAFETY: the caller's pointers are valid for the lengths given, or the system says EFAULT.
        result(unsafe { libc::syscall(libc::$number $(, $arg)*) })
    };
}

pub(crate) fn close(fd: c_int) {
    let _ = system!(SYS_close, fd);
}

pub(crate) fn getpid() -> c_int {
    system!(SYS_getpid).map_or(0, |pid| pid as c_int)
}

pub(crate) fn flags(fd: c_int) -> Result<c_int, c_int> {
    system!(SYS_fcntl, fd, libc::F_GETFL, 0).map(|flags| flags as c_int)
}

pub(crate) fn set_flags(fd: c_int, flags: c_int) {
    let _ = system!(SYS_fcntl, fd, libc::F_SETFL, flags);
}

pub(crate) fn clear_cloexec(fd: c_int) {
    let _ = system!(SYS_fcntl, fd, libc::F_SETFD, 0);
}

/// Moves a descriptor of ours out of the way of the program's, if there are so many.
pub(crate) fn move_up(fd: c_int) -> c_int {
    const ABOVE: c_int = 900;
    match system!(SYS_fcntl, fd, libc::F_DUPFD_CLOEXEC, ABOVE) {
        Ok(moved) => {
            close(fd);
            moved as c_int
        }
        Err(_) => fd,
    }
}

/// Tells whether a memory file can never become shorter.
pub(crate) fn cannot_shrink(fd: c_int) -> bool {
    let wanted = libc::F_SEAL_SHRINK as usize;
    system!(SYS_fcntl, fd, libc::F_GET_SEALS, 0).is_ok_and(|seals| seals & wanted != 0)
}

/// Maps the beginning of a memory file, readable and writable.
pub(crate) fn map_shared(fd: c_int, len: usize) -> Result<NonNull<u8>, c_int> {
    let access = libc::PROT_READ | libc::PROT_WRITE;
    let none = ptr::null::<c_void>();
    let address = system!(SYS_mmap, none, len, access, libc::MAP_SHARED, fd, 0 as c_long)?;
    NonNull::new(ptr::with_exposed_provenance_mut(address)).ok_or(libc::ENOMEM)
}

pub(crate) fn unmap(base: NonNull<u8>, len: usize) {
    let _ = system!(SYS_munmap, base.as_ptr(), len);
}

/// Lets receives on the descriptor itself end after a time, as on a socket of the system.
pub(crate) fn set_receive_timeout(fd: c_int, name: c_int, value: &[u8]) {
    let len = value.len() as libc::socklen_t;
    let _ = system!(SYS_setsockopt, fd, libc::SOL_SOCKET, name, value.as_ptr(), len);
}

pub(crate) fn unix_stream() -> Result<c_int, c_int> {
    let kind = libc::SOCK_STREAM | libc::SOCK_CLOEXEC;
    system!(SYS_socket, libc::AF_UNIX, kind, 0).map(|fd| fd as c_int)
}

pub(crate) fn connect(fd: c_int, name: &libc::sockaddr_un, len: usize) -> Result<(), c_int> {
    system!(SYS_connect, fd, ptr::from_ref(name), len).map(drop)
}

/// The name of what a socket is connected to; returns its length.
pub(crate) fn peer_name(fd: c_int, name: &mut libc::sockaddr_un) -> Result<usize, c_int> {
    let mut len = size_of::<libc::sockaddr_un>() as libc::socklen_t;
    system!(SYS_getpeername, fd, ptr::from_mut(name), ptr::from_mut(&mut len))?;
    Ok(len as usize)
}

pub(crate) fn sendmsg(fd: c_int, msg: &libc::msghdr, flags: c_int) -> Result<usize, c_int> {
    system!(SYS_sendmsg, fd, ptr::from_ref(msg), flags)
}

pub(crate) fn recvmsg(fd: c_int, msg: &mut libc::msghdr, flags: c_int) -> Result<usize, c_int> {
    system!(SYS_recvmsg, fd, ptr::from_mut(msg), flags)
}

pub(crate) fn send(fd: c_int, bytes: &[u8], flags: c_int) -> Result<usize, c_int> {
    let none = ptr::null::<c_void>();
    system!(SYS_sendto, fd, bytes.as_ptr(), bytes.len(), flags, none, 0)
}

pub(crate) fn recv(fd: c_int, bytes: &mut [u8], flags: c_int) -> Result<usize, c_int> {
    let none = ptr::null::<c_void>();
    system!(SYS_recvfrom, fd, bytes.as_mut_ptr(), bytes.len(), flags, none, none)
}

/// Waits a millisecond.
pub(crate) fn pause() {
    let time = libc::timespec { tv_sec: 0, tv_nsec: 1_000_000 };
    let _ = system!(SYS_nanosleep, ptr::from_ref(&time), ptr::null::<c_void>());
}

/// Tells whether a descriptor takes something to write.
pub(crate) fn is_writable(fd: c_int) -> bool {
    let mut one = libc::pollfd { fd, events: libc::POLLOUT, revents: 0 };
    let now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    let none = ptr::null::<c_void>();
    let ready = system!(SYS_ppoll, ptr::from_mut(&mut one), 1, ptr::from_ref(&now), none, 0);
    ready == Ok(1) && one.revents & libc::POLLOUT != 0
}
