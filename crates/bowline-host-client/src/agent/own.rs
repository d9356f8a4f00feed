//! Access to memory of this process at any address: if nothing is mapped there, the result is an
//! error, not a signal.

use core::ffi::{c_int, c_long, c_void};
use core::ptr;
use core::sync::atomic::{AtomicU64, Ordering};

use crate::system::{self, system};

/// Bytes of stack that [`swap`] needs.
pub(super) const SWAP_STACK: usize = 16 << 10;

const READ: c_long = libc::SYS_process_vm_readv;
const WRITE: c_long = libc::SYS_process_vm_writev;

fn transfer(call: c_long, pid: c_int, at: u64, own: *mut u8, len: usize) -> Result<(), c_int> {
    let own = libc::iovec { iov_base: own.cast(), iov_len: len };
    let base = ptr::without_provenance_mut(at as usize);
    let there = libc::iovec { iov_base: base, iov_len: len };
    let (own, there) = (&raw const own, &raw const there);
    let (own, there) = (own.expose_provenance(), there.expose_provenance());
    let args = [pid as usize, own, 1, there, 1, 0];
    // SAFETY: `own` is memory of the caller of this length; the kernel checks the other address and
    // fails if it is not mapped. The caller of a write knows that the program has given the memory
    // for that: no object of this library lies there.
    let done = unsafe { system::call(call, &args) };
    if done? == len { Ok(()) } else { Err(libc::EFAULT) }
}

/// Copies bytes out of this process, which has the number `pid`.
pub(crate) fn read(pid: c_int, at: u64, to: &mut [u8]) -> Result<(), c_int> {
    transfer(READ, pid, at, to.as_mut_ptr(), to.len())
}

/// Copies bytes into this process. On an error, bytes before the faulty address may have been
/// written.
pub(crate) fn write(pid: c_int, at: u64, from: &[u8]) -> Result<(), c_int> {
    transfer(WRITE, pid, at, from.as_ptr().cast_mut(), from.len())
}

/// Tells whether this process can be read at all in this way: a seccomp filter may forbid it.
pub(super) fn probe(pid: c_int) -> Result<(), c_int> {
    let word = 0x626f_776c_696e_6500_u64;
    let mut found = [0; 8];
    read(pid, (&raw const word) as u64, &mut found)?;
    if found == word.to_ne_bytes() { Ok(()) } else { Err(libc::EFAULT) }
}

/// Operands, address and previous value of a swap.
struct Swap {
    at: u64,
    expected: u64,
    new: u64,
    found: AtomicU64,
}

/// Compares 8 aligned bytes and replaces them if they are as expected, atomically also for the
/// threads of the program; returns the previous bytes.
///
/// Only a processor instruction is atomic, and an instruction raises a signal if the memory is not
/// mapped. So a child process that shares this memory, with its own signal handlers, executes it;
/// the calling thread waits until that process has ended. If the system does not allow a child
/// process, the bytes are read and written in two steps.
pub(super) fn swap(
    pid: c_int,
    at: u64,
    [expected, new]: [u64; 2],
    stack: &mut [u8; SWAP_STACK],
) -> Result<u64, c_int> {
    let swap = Swap { at, expected, new, found: AtomicU64::new(0) };
    // Checked first, so that an address without memory needs no child process.
    if !at.is_multiple_of(8) || !system::populate(at, 8, true) {
        return Err(libc::EFAULT);
    }
    let flags = libc::CLONE_VM | libc::CLONE_VFORK | libc::CLONE_FILES | libc::CLONE_FS;
    let top = stack.as_mut_ptr_range().end;
    let top = top.wrapping_sub(top.addr() % 16).cast::<c_void>();
    let job = ptr::from_ref(&swap).cast_mut().cast::<c_void>();
    // SAFETY: the stack is the new process's alone, and both it and `swap` outlive it: with
    // CLONE_VFORK this thread continues when it has ended.
    let child = unsafe { libc::clone(swap_in_child, top, flags, job) };
    if child < 0 {
        return swap_in_two_steps(pid, &swap);
    }
    let mut status: c_int = 0;
    let none = ptr::null::<c_void>();
    let waited = loop {
        match system!(SYS_wait4, child, ptr::from_mut(&mut status), libc::__WALL, none) {
            Err(libc::EINTR) => {}
            waited => break waited,
        }
    };
    match waited {
        // Pairs with the store in `swap_in_child`; the end of that process orders them as well.
        Ok(_) if status == 0 => Ok(swap.found.load(Ordering::Acquire)),
        // The child failed; or the program waits for any child and has reaped this one, so its
        // status is lost.
        _ => Err(libc::EFAULT),
    }
}

fn swap_in_two_steps(pid: c_int, swap: &Swap) -> Result<u64, c_int> {
    let mut found = [0; 8];
    read(pid, swap.at, &mut found)?;
    let found = u64::from_ne_bytes(found);
    if found == swap.expected {
        write(pid, swap.at, &swap.new.to_ne_bytes())?;
    }
    Ok(found)
}

/// What the system takes as the handling of a signal.
#[repr(C)]
struct Handling {
    handler: extern "C" fn(c_int),
    flags: u64,
    restorer: extern "C" fn(c_int),
    mask: u64,
}

extern "C" fn fail(_signal: c_int) {
    let _ = system!(SYS_exit, 1);
}

extern "C" fn swap_in_child(job: *mut c_void) -> c_int {
    const SA_RESTORER: u64 = 0x0400_0000;
    let handling = Handling { handler: fail, flags: SA_RESTORER, restorer: fail, mask: 0 };
    let none = ptr::null::<c_void>();
    let size = size_of::<u64>();
    for signal in [libc::SIGSEGV, libc::SIGBUS] {
        // This process's alone: it was made without CLONE_SIGHAND.
        let _ = system!(SYS_rt_sigaction, signal, ptr::from_ref(&handling), none, size);
    }
    let unblocked = 1_u64 << (libc::SIGSEGV - 1) | 1 << (libc::SIGBUS - 1);
    let how = libc::SIG_UNBLOCK;
    let _ = system!(SYS_rt_sigprocmask, how, ptr::from_ref(&unblocked), none, size);
    // SAFETY: the caller's, who stands still for as long as this process is.
    let swap = unsafe { &*job.cast::<Swap>() };
    let at = ptr::with_exposed_provenance_mut::<u64>(swap.at as usize);
    // SAFETY: aligned, and memory that the program lets others change at any time, only ever looked
    // at by atomic or by the program's own accesses; if it is gone this process ends by `fail`.
    let word = unsafe { AtomicU64::from_ptr(at) };
    // Pairs with whatever the program does with this word: it is as an atomic of the card.
    let order = (Ordering::AcqRel, Ordering::Acquire);
    let found = word.compare_exchange(swap.expected, swap.new, order.0, order.1);
    swap.found.store(found.unwrap_or_else(|found| found), Ordering::Release);
    let _ = system!(SYS_exit, 0);
    0
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    fn mapping(protection: c_int) -> *mut u8 {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: a mapping at an address of the system's choosing touches no memory that exists.
        let at = unsafe { libc::mmap(ptr::null_mut(), 4096, protection, flags, -1, 0) };
        assert_ne!(at, libc::MAP_FAILED);
        at.cast()
    }

    #[test]
    fn where_there_is_nothing_is_no_signal() {
        let pid = system::getpid();
        let constant = mapping(libc::PROT_READ).expose_provenance() as u64;
        let nothing = mapping(libc::PROT_NONE).expose_provenance() as u64;
        let mut stack = Box::new([0; SWAP_STACK]);
        let mut byte = [1; 1];
        assert_eq!(read(pid, constant + 4095, &mut byte), Ok(()));
        assert_eq!(byte, [0]);
        for at in [0, 8, nothing, u64::MAX - 7, 1 << 63] {
            assert_eq!(read(pid, at, &mut byte), Err(libc::EFAULT));
            assert_eq!(write(pid, at, &byte), Err(libc::EFAULT));
            assert_eq!(swap(pid, at, [0, 1], &mut stack), Err(libc::EFAULT));
        }
        assert_eq!(write(pid, constant, &byte), Err(libc::EFAULT));
        assert_eq!(swap(pid, constant, [0, 1], &mut stack), Err(libc::EFAULT));
    }

    /// Past the first look, as when the program unmaps the memory at that moment.
    #[test]
    fn memory_that_goes_away_before_a_swap_ends_only_the_process_that_swaps() {
        let nothing = mapping(libc::PROT_NONE).expose_provenance() as u64;
        let swap = Swap { at: nothing, expected: 0, new: 1, found: AtomicU64::new(0) };
        let mut stack = Box::new([0_u64; SWAP_STACK / 8]);
        let top = stack.as_mut_ptr_range().end.cast();
        let flags = libc::CLONE_VM | libc::CLONE_VFORK;
        let job = ptr::from_ref(&swap).cast_mut().cast();
        // SAFETY: as in `swap`.
        let child = unsafe { libc::clone(swap_in_child, top, flags, job) };
        let mut status = 0;
        let none = ptr::null::<c_void>();
        let waited = system!(SYS_wait4, child, ptr::from_mut(&mut status), libc::__WALL, none);
        assert_eq!((waited, status), (Ok(child as usize), 1 << 8), "it has exited with 1");
    }

    #[test]
    fn swaps_are_one_step_for_all_threads() {
        const EACH: u64 = 2000;
        let word = Arc::new(AtomicU64::new(0));
        let at = word.as_ptr().expose_provenance() as u64;
        let theirs = Arc::clone(&word);
        let other = std::thread::spawn(move || {
            for _ in 0..200_000 {
                theirs.fetch_add(1, Ordering::AcqRel);
            }
        });
        let pid = system::getpid();
        let mut stack = Box::new([0; SWAP_STACK]);
        let mut done = 0;
        while done < EACH {
            let old = word.load(Ordering::Acquire);
            let found = swap(pid, at, [old, old + (1 << 32)], &mut stack).unwrap();
            done += u64::from(found == old);
        }
        other.join().unwrap();
        assert_eq!(word.load(Ordering::Acquire), EACH << 32 | 200_000);
    }
}
