//! Files of RDMA devices in /sys and /dev, for programs that read them: `bowline run` has put those
//! of the device that verbs programs get into a folder, where the machine has none itself.
//!
//! ```text
//!   open("/sys/class/infiniband/bowline0/node_guid") -> the system: ENOENT
//!     -> open("FOLDER/sys/class/infiniband/bowline0/node_guid")
//! ```
//!
//! Each call is the system's first. Only where that finds nothing is the path looked at, so other
//! calls cost what they did, and what the system has is never hidden. Paths are redirected as they
//! are written: absolute, and below one of [`ROOTS`]. Where `..` leads out of it, the path is the
//! system's. There are no symbolic links in the folder. Nothing can be written there, and the
//! device's own file cannot be opened: the calls of libibverbs do not need it.
//!
//! SAFETY of every block here: as in [`calls`](crate::calls). A path of which the system has said
//! that it is not there is text with a zero byte at its end.
#![allow(
    clippy::missing_safety_doc,
    clippy::multiple_unsafe_ops_per_block,
    clippy::undocumented_unsafe_blocks,
    missing_docs,
    unreachable_pub,
    reason = "the C library documents them, with their conditions"
)]

use core::ffi::{CStr, c_char, c_int, c_uint, c_void};
use core::ptr;

use libc::ssize_t;

use crate::real::{errno, fail, hidden};

/// Variable with the folder.
const FOLDER: &CStr = c"BOWLINE_VERBS_FILES";
/// What is redirected, with everything below.
const ROOTS: [&[u8]; 3] = [b"/sys/class/infiniband", b"/sys/class/infiniband_verbs", DEVICES];
const DEVICES: &[u8] = b"/dev/infiniband";
/// Longest path in the folder, with the zero byte.
const LEN: usize = 512;

/// What a call does with a file.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Use {
    /// It asks about it.
    Look,
    /// It asks whether it may be written.
    Write,
    Open,
    OpenToWrite,
}

/// A path that begins with one of [`ROOTS`].
struct Found {
    /// Of the folder, and behind it the path that the program means, without `.`, `..` and doubled
    /// slashes. It ends with a zero byte.
    path: [u8; LEN],
    /// Where the latter begins.
    meant: usize,
    /// That is in the folder, and not out of it by `..`.
    is_ours: bool,
}

fn root_of(path: &[u8]) -> Option<&'static [u8]> {
    let is_below = |root: &&[u8]| {
        path.strip_prefix(*root).is_some_and(|rest| rest.is_empty() || rest[0] == b'/')
    };
    ROOTS.into_iter().find(is_below)
}

impl Found {
    /// `None`: it leads elsewhere, or there is no folder.
    #[cold]
    #[inline(never)]
    unsafe fn of(path: *const c_char) -> Option<Self> {
        let path = unsafe { CStr::from_ptr(path) }.to_bytes();
        root_of(path)?;
        let folder = unsafe { libc::getenv(FOLDER.as_ptr()) };
        if folder.is_null() {
            return None;
        }
        let folder = unsafe { CStr::from_ptr(folder) }.to_bytes();
        let mut found = Self { path: [0; LEN], meant: folder.len(), is_ours: false };
        let mut len = 0;
        found.push(&mut len, folder)?;
        for part in path.split(|byte| *byte == b'/') {
            match part {
                b"" | b"." => {}
                b".." => {
                    let meant = &found.path[found.meant..len];
                    let parent = meant.iter().rposition(|byte| *byte == b'/').unwrap_or(0);
                    found.path[found.meant + parent..len].fill(0);
                    len = found.meant + parent;
                }
                part => {
                    found.push(&mut len, b"/")?;
                    found.push(&mut len, part)?;
                }
            }
        }
        found.is_ours = root_of(found.meant().to_bytes()).is_some();
        if len == found.meant {
            found.push(&mut len, b"/")?;
        }
        Some(found)
    }

    fn push(&mut self, len: &mut usize, bytes: &[u8]) -> Option<()> {
        let end = len.checked_add(bytes.len()).filter(|end| *end < LEN)?;
        self.path[*len..end].copy_from_slice(bytes);
        *len = end;
        Some(())
    }

    /// Where the system finds it.
    fn path(&self) -> *const c_char {
        let begin = if self.is_ours { 0 } else { self.meant };
        self.path[begin..].as_ptr().cast()
    }

    /// What the program means.
    fn meant(&self) -> &CStr {
        CStr::from_bytes_until_nul(&self.path[self.meant..]).unwrap_or(c"")
    }

    fn is_there(&self) -> bool {
        hidden_access(self.path())
    }

    /// Why a call fails that finds the file; 0: it does not.
    fn refusal(&self, by: Use) -> c_int {
        if !self.is_ours {
            return 0;
        }
        let meant = self.meant().to_bytes();
        let is_device = meant.starts_with(DEVICES) && meant.len() > DEVICES.len();
        match by {
            Use::Open | Use::OpenToWrite if is_device && self.is_there() => libc::ENODEV,
            Use::Write | Use::OpenToWrite if !is_device && self.is_there() => libc::EACCES,
            _ => 0,
        }
    }
}

fn hidden_access(path: *const c_char) -> bool {
    let mode = libc::F_OK;
    hidden!(access(path: *const c_char, mode: c_int) -> c_int) == 0
}

/// The result of a C function.
trait Outcome: Copy {
    const FAILURE: Self;
    fn has_failed(self) -> bool;
}

macro_rules! numbers {
    ($($number:ty)*) => {$(
        impl Outcome for $number {
            const FAILURE: Self = -1;
            fn has_failed(self) -> bool {
                self < 0
            }
        }
    )*};
}

numbers! { c_int ssize_t }

impl<T> Outcome for *mut T {
    const FAILURE: Self = ptr::null_mut();
    fn has_failed(self) -> bool {
        self.is_null()
    }
}

/// Calls the system with a path, and again with that in the folder if it finds nothing.
#[inline]
unsafe fn call<R: Outcome>(path: *const c_char, by: Use, call: impl Fn(*const c_char) -> R) -> R {
    let former = errno();
    let result = call(path);
    if !result.has_failed() || errno() != libc::ENOENT {
        return result;
    }
    let Some(found) = (unsafe { Found::of(path) }) else {
        fail(libc::ENOENT);
        return R::FAILURE;
    };
    let refusal = found.refusal(by);
    if refusal != 0 {
        fail(refusal);
        return R::FAILURE;
    }
    let result = call(found.path());
    if !result.has_failed() {
        fail(former);
    }
    result
}

/// Functions that take a path.
macro_rules! paths {
    ($(
        fn $name:ident($($before:ident: $kind:ty,)* / path $(, $arg:ident: $type:ty)*) -> $ret:ty
            = $use:expr;
    )*) => {$(
        #[unsafe(no_mangle)]
        pub unsafe extern "C-unwind" fn $name(
            $($before: $kind,)*
            path: *const c_char
            $(, $arg: $type)*
        ) -> $ret {
            let system = |path: *const c_char| {
                hidden!(
                    $name($($before: $kind,)* path: *const c_char $(, $arg: $type)*) -> $ret
                )
            };
            let by = $use;
            unsafe { call(path, by, system) }
        }
    )*};
}

paths! {
    // The mode is there or not, as the flags have it.
    fn open(/ path, flags: c_int, mode: c_uint) -> c_int = by_flags(flags);
    fn open64(/ path, flags: c_int, mode: c_uint) -> c_int = by_flags(flags);
    fn openat(at: c_int, / path, flags: c_int, mode: c_uint) -> c_int = by_flags(flags);
    fn openat64(at: c_int, / path, flags: c_int, mode: c_uint) -> c_int = by_flags(flags);
    fn __open_2(/ path, flags: c_int) -> c_int = by_flags(flags);
    fn __open64_2(/ path, flags: c_int) -> c_int = by_flags(flags);
    fn __openat_2(at: c_int, / path, flags: c_int) -> c_int = by_flags(flags);
    fn __openat64_2(at: c_int, / path, flags: c_int) -> c_int = by_flags(flags);
    fn fopen(/ path, mode: *const c_char) -> *mut libc::FILE = unsafe { by_mode(mode) };
    fn fopen64(/ path, mode: *const c_char) -> *mut libc::FILE = unsafe { by_mode(mode) };
    fn opendir(/ path) -> *mut c_void = Use::Look;
    fn scandir(
        / path,
        list: *mut c_void,
        filter: *const c_void,
        compare: *const c_void
    ) -> c_int = Use::Look;
    fn scandir64(
        / path,
        list: *mut c_void,
        filter: *const c_void,
        compare: *const c_void
    ) -> c_int = Use::Look;

    fn stat(/ path, to: *mut c_void) -> c_int = Use::Look;
    fn stat64(/ path, to: *mut c_void) -> c_int = Use::Look;
    fn lstat(/ path, to: *mut c_void) -> c_int = Use::Look;
    fn lstat64(/ path, to: *mut c_void) -> c_int = Use::Look;
    fn fstatat(at: c_int, / path, to: *mut c_void, flags: c_int) -> c_int = Use::Look;
    fn fstatat64(at: c_int, / path, to: *mut c_void, flags: c_int) -> c_int = Use::Look;
    fn statx(at: c_int, / path, flags: c_int, mask: c_uint, to: *mut c_void) -> c_int = Use::Look;
    // What programs call that were linked with glibc before 2.33.
    fn __xstat(version: c_int, / path, to: *mut c_void) -> c_int = Use::Look;
    fn __xstat64(version: c_int, / path, to: *mut c_void) -> c_int = Use::Look;
    fn __lxstat(version: c_int, / path, to: *mut c_void) -> c_int = Use::Look;
    fn __lxstat64(version: c_int, / path, to: *mut c_void) -> c_int = Use::Look;
    fn __fxstatat(
        version: c_int,
        at: c_int,
        / path,
        to: *mut c_void,
        flags: c_int
    ) -> c_int = Use::Look;
    fn __fxstatat64(
        version: c_int,
        at: c_int,
        / path,
        to: *mut c_void,
        flags: c_int
    ) -> c_int = Use::Look;

    fn statfs(/ path, to: *mut c_void) -> c_int = Use::Look;
    fn statfs64(/ path, to: *mut c_void) -> c_int = Use::Look;
    // `ls -l` asks for them.
    fn getxattr(/ path, name: *const c_char, to: *mut c_void, len: usize) -> ssize_t = Use::Look;
    fn lgetxattr(/ path, name: *const c_char, to: *mut c_void, len: usize) -> ssize_t = Use::Look;
    fn listxattr(/ path, to: *mut c_char, len: usize) -> ssize_t = Use::Look;
    fn llistxattr(/ path, to: *mut c_char, len: usize) -> ssize_t = Use::Look;

    fn access(/ path, mode: c_int) -> c_int = by_access(mode);
    fn eaccess(/ path, mode: c_int) -> c_int = by_access(mode);
    fn euidaccess(/ path, mode: c_int) -> c_int = by_access(mode);
    fn faccessat(at: c_int, / path, mode: c_int, flags: c_int) -> c_int = by_access(mode);
    fn readlink(/ path, to: *mut c_char, len: usize) -> ssize_t = Use::Look;
    fn readlinkat(at: c_int, / path, to: *mut c_char, len: usize) -> ssize_t = Use::Look;
}

const fn by_flags(flags: c_int) -> Use {
    let writes =
        flags & libc::O_ACCMODE != libc::O_RDONLY || flags & (libc::O_CREAT | libc::O_TRUNC) != 0;
    if writes {
        Use::OpenToWrite
    } else if flags & libc::O_PATH != 0 {
        Use::Look
    } else {
        Use::Open
    }
}

unsafe fn by_mode(mode: *const c_char) -> Use {
    let mode = if mode.is_null() { c"" } else { unsafe { CStr::from_ptr(mode) } };
    let writes = mode.to_bytes().iter().any(|byte| b"wa+".contains(byte));
    if writes { Use::OpenToWrite } else { Use::Open }
}

const fn by_access(mode: c_int) -> Use {
    if mode & libc::W_OK != 0 { Use::Write } else { Use::Look }
}

/// The path itself, if there is such a file: it has no links.
unsafe fn real_path(path: *const c_char, to: *mut c_char, room: usize) -> *mut c_char {
    let found = if errno() == libc::ENOENT { unsafe { Found::of(path) } } else { None };
    let Some(found) = found.filter(Found::is_there) else { return ptr::null_mut() };
    let meant = found.meant();
    if !found.is_ours {
        return unsafe { realpath(meant.as_ptr(), to) };
    }
    if to.is_null() {
        return unsafe { libc::strdup(meant.as_ptr()) };
    }
    let bytes = meant.to_bytes_with_nul();
    if bytes.len() > room {
        fail(libc::ENAMETOOLONG);
        return ptr::null_mut();
    }
    unsafe { ptr::copy_nonoverlapping(bytes.as_ptr().cast(), to, bytes.len()) };
    to
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn realpath(path: *const c_char, to: *mut c_char) -> *mut c_char {
    let result = hidden!(realpath(path: *const c_char, to: *mut c_char) -> *mut c_char);
    let room = libc::PATH_MAX as usize;
    if result.is_null() { unsafe { real_path(path, to, room) } } else { result }
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn __realpath_chk(
    path: *const c_char,
    to: *mut c_char,
    room: usize,
) -> *mut c_char {
    let result =
        hidden!(__realpath_chk(path: *const c_char, to: *mut c_char, room: usize) -> *mut c_char);
    if result.is_null() { unsafe { real_path(path, to, room) } } else { result }
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn canonicalize_file_name(path: *const c_char) -> *mut c_char {
    let result = hidden!(canonicalize_file_name(path: *const c_char) -> *mut c_char);
    if result.is_null() { unsafe { real_path(path, ptr::null_mut(), 0) } } else { result }
}
