//! The C library's functions that map memory: what was given to a node is withdrawn before
//! something else is in its place [RMR-13].
//!
//! They make the system call themselves: allocators map memory before the linker is done. It is the
//! program's, at the instruction for those: a filter of system calls has to allow it.

#![allow(
    clippy::missing_safety_doc,
    missing_docs,
    unreachable_pub,
    reason = "the C library documents them, with their conditions"
)]

use core::ffi::{c_int, c_long, c_void};

use bowline_host_client::{agent, system};

use crate::filters;
use crate::real::{KeptErrno, fail};

/// Advice after which memory has other contents: MADV_DONTNEED, MADV_FREE, MADV_REMOVE,
/// MADV_DONTNEED_LOCKED, MADV_GUARD_INSTALL.
const DISCARDING: [c_int; 5] = [4, 8, 9, 24, 102];
const SHM_REMAP: c_int = 0o40_000;

fn result(done: Result<usize, c_int>) -> usize {
    done.unwrap_or_else(|errno| fail(errno) as usize)
}

fn pointer(done: Result<usize, c_int>) -> *mut c_void {
    core::ptr::with_exposed_provenance_mut(result(done))
}

/// Makes a system call of the program's.
///
/// # Safety
/// The arguments are those of the caller of a C function, who promises its conditions.
unsafe fn call<const N: usize>(number: c_long, args: [usize; N]) -> Result<usize, c_int> {
    // SAFETY: as the caller promises.
    unsafe { system::call_for_program(number, &args) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn munmap(at: *mut c_void, len: usize) -> c_int {
    agent::goes_away(at.addr(), len);
    // SAFETY: the caller's arguments.
    result(unsafe { call(libc::SYS_munmap, [at.expose_provenance(), len]) }) as c_int
}

/// `mmap` and `mmap64`, which are the same where this library runs.
macro_rules! mapping {
    ($($name:ident)*) => {$(
        #[unsafe(no_mangle)]
        pub unsafe extern "C-unwind" fn $name(
            at: *mut c_void,
            len: usize,
            access: c_int,
            flags: c_int,
            fd: c_int,
            offset: i64,
        ) -> *mut c_void {
            if flags & libc::MAP_FIXED != 0 {
                agent::goes_away(at.addr(), len);
            }
            let at = at.expose_provenance();
            let args = [at, len, access as usize, flags as usize, fd as usize, offset as usize];
            // SAFETY: the caller's arguments.
            pointer(unsafe { call(libc::SYS_mmap, args) })
        }
    )*};
}

mapping! { mmap mmap64 }

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn mremap(
    at: *mut c_void,
    len: usize,
    new_len: usize,
    flags: c_int,
    to: *mut c_void,
) -> *mut c_void {
    agent::goes_away(at.addr(), len);
    if flags & libc::MREMAP_FIXED != 0 {
        agent::goes_away(to.addr(), new_len);
    }
    let (at, to) = (at.expose_provenance(), to.expose_provenance());
    // SAFETY: the caller's arguments; the last is looked at with the flags that say so.
    pointer(unsafe { call(libc::SYS_mremap, [at, len, new_len, flags as usize, to]) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn madvise(at: *mut c_void, len: usize, advice: c_int) -> c_int {
    if DISCARDING.contains(&advice) {
        agent::goes_away(at.addr(), len);
    }
    // SAFETY: the caller's arguments.
    let done = unsafe { call(libc::SYS_madvise, [at.expose_provenance(), len, advice as usize]) };
    result(done) as c_int
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn shmat(id: c_int, at: *const c_void, flags: c_int) -> *mut c_void {
    if flags & SHM_REMAP != 0 {
        // The system knows how long it is; what lies behind it is withdrawn as well.
        agent::goes_away(at.addr(), usize::MAX - at.addr());
    }
    let args = [id as usize, at.expose_provenance(), flags as usize];
    // SAFETY: the caller's arguments.
    pointer(unsafe { call(libc::SYS_shmat, args) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn shmdt(at: *const c_void) -> c_int {
    if agent::may_give() {
        agent::goes_away(at.addr(), segment(at.addr()));
    }
    // SAFETY: the caller's argument.
    result(unsafe { call(libc::SYS_shmdt, [at.expose_provenance()]) }) as c_int
}

/// Bytes from an address to the end of the segment of shared memory that was attached there; to the
/// end of all memory where the system does not tell.
fn segment(at: usize) -> usize {
    let _kept = KeptErrno::new();
    let maps = if filters::is_filtered() {
        Err(libc::EPERM)
    } else {
        system::read_file(c"/proc/self/maps")
    };
    let Ok(maps) = maps else { return usize::MAX - at };
    let mut file = None;
    let mut end = at;
    for line in maps.split(|byte| *byte == b'\n') {
        // Those of the same file that are where they were attached.
        let part = part_of_segment(line).filter(|part| part.begin.checked_sub(at) == Some(part.at));
        if let Some(part) = part.filter(|part| *file.get_or_insert(part.file) == part.file) {
            end = part.end;
        }
    }
    end - at
}

/// A line of `/proc/self/maps` about a segment of shared memory.
struct Part<'a> {
    begin: usize,
    end: usize,
    /// Place in the segment.
    at: usize,
    /// Device and number of its file.
    file: (&'a str, &'a str),
}

fn part_of_segment(line: &[u8]) -> Option<Part<'_>> {
    let mut words = core::str::from_utf8(line).ok()?.split_ascii_whitespace();
    let (begin, end) = words.next()?.split_once('-')?;
    let (_access, at, device, inode) = (words.next()?, words.next()?, words.next()?, words.next()?);
    let number = |text| usize::from_str_radix(text, 16).ok();
    let (begin, end, at) = (number(begin)?, number(end)?, number(at)?);
    let is_segment = words.next()?.starts_with("/SYSV");
    is_segment.then_some(Part { begin, end, at, file: (device, inode) })
}
