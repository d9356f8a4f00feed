//! Whose memory this is. A process that was made without `fork`, by `_Fork`, `clone` or the system
//! call, has a copy of the tables of its parent, whose channels are not its own; the child of a
//! `vfork`, a *visitor*, has the tables themselves, but descriptors of its own.

use core::ffi::{c_int, c_void};
use core::ptr;
use core::sync::atomic::{AtomicI32, AtomicPtr, AtomicU32, Ordering};

use bowline_host_client::system;

use crate::nodes;
use crate::real::{fail, hidden};

/// The process that the tables describe; 0 before their first use. Relaxed: threads that use them
/// first all store the same, and later it changes in a process that has one thread.
static PROCESS: AtomicI32 = AtomicI32::new(0);
/// A word that is 1, and 0 in each process that has a copy of the memory. It is stored Release when
/// it is 1, and loaded Acquire.
static MARK: AtomicPtr<AtomicU32> = AtomicPtr::new(ptr::null_mut());
/// Children that have the memory of this process while their parent waits for them.
static VISITORS: AtomicU32 = AtomicU32::new(0);

/// Makes the tables those of the calling process, which is not the child of a `vfork`. Threads may
/// do so at once.
pub(crate) fn adopt() {
    let own = system::getpid();
    let before = PROCESS.swap(own, Ordering::Relaxed);
    if before != 0 && before != own {
        // Those of the parent.
        VISITORS.store(0, Ordering::Relaxed);
    }
    match mark() {
        Some(mark) => mark.store(1, Ordering::Relaxed),
        None => map_mark(),
    }
}

fn mark() -> Option<&'static AtomicU32> {
    // SAFETY: mapped for as long as the process lives.
    unsafe { MARK.load(Ordering::Acquire).as_ref() }
}

fn map_mark() {
    let Some(page) = system::map_wiped_on_fork() else { return };
    let mark = page.cast::<AtomicU32>().as_ptr();
    // SAFETY: it was just mapped, and is longer.
    unsafe { &*mark }.store(1, Ordering::Relaxed);
    // One that another thread has mapped as well stays unused.
    let _ = MARK.compare_exchange(ptr::null_mut(), mark, Ordering::Release, Ordering::Relaxed);
}

/// Adopts the tables, if this is a process that has a copy of them and has not yet.
#[inline]
pub(crate) fn notice() {
    if mark().is_some_and(|mark| mark.load(Ordering::Relaxed) == 0) {
        nodes::after_fork();
    }
}

/// Tells whether the tables are those of the calling process, which may be the child of a `vfork`.
pub(crate) fn is_owner() -> bool {
    notice();
    let process = PROCESS.load(Ordering::Relaxed);
    process == 0 || process == system::getpid()
}

/// Tells whether the calling process is the child of a `vfork`, whose parent waits for it. Other
/// threads of the parent do not wait: they use the tables, and open and close descriptors that it
/// does not have. It writes nothing there, and finds everything out for each call.
#[inline]
pub(crate) fn is_visitor() -> bool {
    VISITORS.load(Ordering::Relaxed) != 0 && !is_owner()
}

/// A child comes. If it is the first to use the tables, also since its parent was made, they are
/// its parent's all the same.
fn comes() {
    if PROCESS.load(Ordering::Relaxed) == 0 {
        adopt();
    } else {
        notice();
    }
    VISITORS.fetch_add(1, Ordering::Relaxed);
}

extern "C" fn goes() {
    // A process that was made since then has begun at 0.
    let _ = VISITORS.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| n.checked_sub(1));
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn clone(
    run: *const c_void,
    stack: *mut c_void,
    flags: c_int,
    arg: *mut c_void,
    parent: *mut c_int,
    tls: *mut c_void,
    child: *mut c_int,
) -> c_int {
    const SHARED: c_int = libc::CLONE_FILES | libc::CLONE_VFORK | libc::CLONE_VM;
    let visits = flags & SHARED == libc::CLONE_VFORK | libc::CLONE_VM;
    if visits {
        comes();
    }
    let made = hidden!(
        clone(
            run: *const c_void,
            stack: *mut c_void,
            flags: c_int,
            arg: *mut c_void,
            parent: *mut c_int,
            tls: *mut c_void,
            child: *mut c_int,
        ) -> c_int
    );
    if visits {
        goes();
    }
    made
}

extern "C" fn vfork_begins() {
    comes();
}

extern "C" fn vfork_fails(errno: c_int) {
    fail(errno);
}

/// The child has the stack as well: the return address is in a register until then.
#[cfg(target_arch = "x86_64")]
#[unsafe(naked)]
#[unsafe(no_mangle)]
unsafe extern "C" fn vfork() -> c_int {
    core::arch::naked_asm!(
        "sub rsp, 8",
        "call {begins}",
        "add rsp, 8",
        "pop rdi",
        "mov eax, 58",
        "syscall",
        "push rdi",
        "test eax, eax",
        "jz 2f",
        "push rax",
        "call {goes}",
        "pop rax",
        "test eax, eax",
        "js 3f",
        "2: ret",
        "3: neg eax",
        "mov edi, eax",
        "sub rsp, 8",
        "call {fails}",
        "add rsp, 8",
        "mov eax, -1",
        "ret",
        begins = sym vfork_begins,
        goes = sym goes,
        fails = sym vfork_fails,
    )
}

/// As for x86-64.
#[cfg(target_arch = "aarch64")]
#[unsafe(naked)]
#[unsafe(no_mangle)]
unsafe extern "C" fn vfork() -> c_int {
    core::arch::naked_asm!(
        "stp x29, x30, [sp, #-16]!",
        "bl {begins}",
        "ldp x29, x30, [sp], #16",
        // CLONE_VM | CLONE_VFORK | SIGCHLD
        "mov x0, #0x4111",
        "mov x1, #0",
        "mov x8, #220",
        "svc 0",
        "cbz x0, 2f",
        "stp x29, x30, [sp, #-32]!",
        "str x0, [sp, #16]",
        "bl {goes}",
        "ldr x0, [sp, #16]",
        "ldp x29, x30, [sp], #32",
        "tbnz w0, #31, 3f",
        "2: ret",
        "3: neg w0, w0",
        "stp x29, x30, [sp, #-16]!",
        "bl {fails}",
        "ldp x29, x30, [sp], #16",
        "mov w0, #-1",
        "ret",
        begins = sym vfork_begins,
        goes = sym goes,
        fails = sym vfork_fails,
    )
}
