//! Filters of system calls, as a program gives them to the system with `prctl` or `seccomp`. A
//! program that needs only `sendto` and `recvfrom` with a kernel's sockets allows only those; this
//! library needs some more for them. What the library asks for at its one instruction goes past the
//! program's filter, if it is one of a few calls on descriptors, time and memory; all else, and all
//! calls of the program, which are made at other instructions, are for the filter.
//!
//! SAFETY of every block here: as in [`calls`](crate::calls).
#![allow(
    clippy::missing_safety_doc,
    clippy::multiple_unsafe_ops_per_block,
    clippy::undocumented_unsafe_blocks,
    missing_docs,
    unreachable_pub,
    reason = "the C library documents them, with their conditions"
)]

use core::ffi::{c_int, c_long, c_uint, c_ulong, c_void};
use core::sync::atomic::{AtomicBool, Ordering};

use bowline_host_client::system;
use libc::{sock_filter, sock_fprog};

use crate::real::{fail, hidden};
use crate::{pointers, process};

/// What the library asks for on behalf of a call on a socket that there is.
const CALLS: [c_long; 21] = [
    libc::SYS_close,
    libc::SYS_fcntl,
    libc::SYS_getegid,
    libc::SYS_geteuid,
    libc::SYS_getpeername,
    libc::SYS_getpid,
    libc::SYS_getsockopt,
    libc::SYS_gettid,
    libc::SYS_madvise,
    libc::SYS_munmap,
    libc::SYS_nanosleep,
    libc::SYS_newfstatat,
    libc::SYS_ppoll,
    libc::SYS_recvfrom,
    libc::SYS_recvmsg,
    libc::SYS_sendmsg,
    libc::SYS_sendto,
    libc::SYS_setsockopt,
    libc::SYS_shutdown,
    libc::SYS_socketpair,
    libc::SYS_write,
];
/// Calls on a process, allowed for the own one: copies of memory, and signals.
const OWN: [c_long; 3] =
    [libc::SYS_process_vm_readv, libc::SYS_process_vm_writev, libc::SYS_rt_tgsigqueueinfo];

#[cfg(target_arch = "x86_64")]
const ARCHITECTURE: u32 = 0xc000_003e;
#[cfg(not(target_arch = "x86_64"))]
const ARCHITECTURE: u32 = 0xc000_00b7;

// Where a filter finds these words of a call: `struct seccomp_data`.
const NUMBER: u32 = 0;
const ARCH: u32 = 4;
const FROM: u32 = 8;
const ARGS: u32 = 16;

// Instructions of filters: load a word, load a number, jump if equal, jump if bits are set, allow.
const LOAD: u16 = 0x20;
const LOAD_NUMBER: u16 = 0x00;
const EQUAL: u16 = 0x15;
const ANY_BITS: u16 = 0x45;
const RETURN: u16 = 0x06;
const ALLOW: u32 = 0x7fff_0000;

const SECCOMP_MODE_FILTER: c_ulong = 2;
const SECCOMP_SET_MODE_FILTER: c_uint = 1;
/// Most instructions that a filter may have.
const INSTRUCTIONS_MAX: usize = 4096;
/// What the C library's heap is made to have before a filter may forbid it to grow, bytes.
const HEAP: usize = 100 << 10;

/// This process has given the system a filter. Relaxed: who asks while another thread gives one
/// finds either.
static IS_FILTERED: AtomicBool = AtomicBool::new(false);

/// Tells whether system calls of the C library may be forbidden that a program does not make.
pub(crate) fn is_filtered() -> bool {
    IS_FILTERED.load(Ordering::Relaxed)
}

/// The instructions that come before a program's filter: they allow what is asked for right before
/// `site`, by the process `pid`.
fn front(site: usize, pid: u32) -> Vec<sock_filter> {
    /// Where the tests of calls begin, where two continue that look at an argument, and both ends.
    const TESTS: usize = 7;
    const MAPPING: usize = TESTS + CALLS.len() + 1 + OWN.len();
    const PROCESS: usize = MAPPING + 2;
    const ALLOWED: usize = PROCESS + 2;
    const REST: usize = ALLOWED + 1;
    let mut all = Vec::with_capacity(REST + 1);
    let load = |at: u32| sock_filter { code: LOAD, jt: 0, jf: 0, k: at };
    // Jumps are over what comes next.
    let test = |all: &mut Vec<sock_filter>, code: u16, k: u32, yes: usize, no: usize| {
        let next = all.len() + 1;
        all.push(sock_filter { code, jt: (yes - next) as u8, jf: (no - next) as u8, k });
    };
    let origin = [(ARCH, ARCHITECTURE), (FROM, site as u32), (FROM + 4, (site >> 32) as u32)];
    for (at, word) in origin {
        all.push(load(at));
        let next = all.len() + 1;
        test(&mut all, EQUAL, word, next, REST);
    }
    all.push(load(NUMBER));
    let calls = CALLS.map(|call| (call, ALLOWED));
    let [last, others @ ..] = OWN;
    let others = others.map(|call| (call, PROCESS));
    for (call, to) in calls.into_iter().chain([(libc::SYS_mmap, MAPPING)]).chain(others) {
        let next = all.len() + 1;
        test(&mut all, EQUAL, call as u32, to, next);
    }
    test(&mut all, EQUAL, last as u32, PROCESS, REST);
    all.push(load(ARGS + 2 * 8));
    test(&mut all, ANY_BITS, libc::PROT_EXEC as u32, REST, ALLOWED);
    all.push(load(ARGS));
    test(&mut all, EQUAL, pid, ALLOWED, REST);
    all.push(sock_filter { code: RETURN, jt: 0, jf: 0, k: ALLOW });
    // The program's filter finds what it would without these.
    all.push(sock_filter { code: LOAD_NUMBER, jt: 0, jf: 0, k: 0 });
    all
}

/// The instructions of a filter behind those of the library; `None` where the program has none
/// there, none at all, or too many.
///
/// # Safety
/// As for [`pointers::load`].
unsafe fn amend(filter: *const sock_fprog) -> Option<Vec<sock_filter>> {
    const NOTHING: sock_filter = sock_filter { code: 0, jt: 0, jf: 0, k: 0 };
    // The system copies: a program without sockets has no handler of this library.
    let mut own = [0_u8; size_of::<sock_fprog>()];
    unsafe { pointers::load(filter.cast(), &mut own) }.ok()?;
    let own = unsafe { own.as_ptr().cast::<sock_fprog>().read_unaligned() };
    let mut whole = front(system::call_site()?, system::getpid().cast_unsigned());
    let (front, len) = (whole.len(), usize::from(own.len));
    if len == 0 || front + len > INSTRUCTIONS_MAX {
        return None;
    }
    whole.resize(front + len, NOTHING);
    let to = &mut whole[front..];
    let room = size_of_val(to);
    // An instruction has no padding, and any bytes are one.
    let to = unsafe { core::slice::from_raw_parts_mut(to.as_mut_ptr().cast(), room) };
    unsafe { pointers::load(own.filter.cast_const().cast(), to) }.ok()?;
    Some(whole)
}

/// Calls `give` with a filter that is the program's for all but the library's calls.
///
/// # Safety
/// `filter` is the caller's, as for `seccomp`.
unsafe fn give_amended(
    filter: *const sock_fprog,
    give: impl FnOnce(*const sock_fprog) -> c_int,
) -> c_int {
    let mut whole = unsafe { amend(filter) };
    let amended = whole
        .as_mut()
        .map(|whole| sock_fprog { len: whole.len() as u16, filter: whole.as_mut_ptr() });
    // What cannot be amended the system judges as it is.
    let given = amended.as_ref().map_or(filter, core::ptr::from_ref);
    // Without the hint there would be no allocation.
    drop(core::hint::black_box(vec![0_u8; HEAP]));
    // Asked before the filter judges who asks. That of a `vfork`'s child is not its parent's, whose
    // memory this is.
    let own = (!process::is_visitor()).then(system::getpid);
    let result = give(given);
    if let Some(own) = own.filter(|_| result >= 0) {
        IS_FILTERED.store(true, Ordering::Relaxed);
        system::copy_for_alone(own);
    }
    drop(whole);
    result
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn prctl(
    option: c_int,
    a: c_ulong,
    b: c_ulong,
    c: c_ulong,
    d: c_ulong,
) -> c_int {
    let call = |b: c_ulong| -> c_int {
        hidden!(prctl(option: c_int, a: c_ulong, b: c_ulong, c: c_ulong, d: c_ulong) -> c_int)
    };
    if option == libc::PR_SET_SECCOMP && a == SECCOMP_MODE_FILTER {
        let filter = core::ptr::with_exposed_provenance(b as usize);
        return unsafe {
            give_amended(filter, |filter| call(filter.expose_provenance() as c_ulong))
        };
    }
    call(b)
}

/// `seccomp`, for which there is no function but `syscall`.
///
/// # Safety
/// As the system call wants.
pub(crate) unsafe fn seccomp(operation: c_uint, flags: c_uint, args: *const c_void) -> c_int {
    let call = |args: usize| {
        let all = [operation as usize, flags as usize, args];
        unsafe { system::call_for_program(libc::SYS_seccomp, &all) }
            .map_or_else(fail, |value| value as c_int)
    };
    if operation == SECCOMP_SET_MODE_FILTER {
        return unsafe { give_amended(args.cast(), |filter| call(filter.expose_provenance())) };
    }
    call(args.expose_provenance())
}
