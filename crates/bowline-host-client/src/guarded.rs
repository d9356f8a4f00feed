//! Copies between memory of the program and this library's that fail where the program has none. A
//! kernel says EFAULT there, and looks at nothing before; so does this, and costs no more than the
//! copy: who handles the signal of a fault ([`escape`]) ends the copy, which has no other place for
//! one than its one function.
//!
//! Without such a handler a fault is a signal to the program, as of any copy.

#![allow(clippy::multiple_unsafe_ops_per_block, reason = "a copy is one instruction or a few")]

use core::ffi::c_void;

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
compile_error!("machines of x86-64 and aarch64 only");

/// Bytes of the code of [`bytes`].
const CODE: usize = if cfg!(target_arch = "x86_64") { 8 } else { 56 };

/// Copies bytes; returns 0, or 1 where [`escape`] has ended it. It uses no stack.
#[cfg(all(target_arch = "x86_64", not(miri)))]
#[unsafe(naked)]
unsafe extern "C" fn bytes(to: *mut u8, from: *const u8, len: usize) -> usize {
    core::arch::naked_asm!("mov rcx, rdx", "rep movsb", "xor eax, eax", "ret")
}

/// As for x86-64.
#[cfg(all(target_arch = "aarch64", not(miri)))]
#[unsafe(naked)]
unsafe extern "C" fn bytes(to: *mut u8, from: *const u8, len: usize) -> usize {
    core::arch::naked_asm!(
        "b 2f",
        "1: ldp q0, q1, [x1], #32",
        "stp q0, q1, [x0], #32",
        "sub x2, x2, #32",
        "2: cmp x2, #32",
        "b.hs 1b",
        "cbz x2, 4f",
        "3: ldrb w3, [x1], #1",
        "strb w3, [x0], #1",
        "sub x2, x2, #1",
        "cbnz x2, 3b",
        "4: mov x0, #0",
        "ret",
        "nop",
    )
}

#[cfg(miri)]
unsafe extern "C" fn bytes(to: *mut u8, from: *const u8, len: usize) -> usize {
    // SAFETY: as the caller promises.
    unsafe { core::ptr::copy_nonoverlapping(from, to, len) };
    0
}

/// Copies bytes; tells whether all of both sides was there. If not, some may have been copied.
///
/// # Safety
/// They do not overlap. One side is memory of the program, which promises that it is there; the
/// other is there in any case.
#[inline]
#[must_use]
pub unsafe fn copy(to: *mut u8, from: *const u8, len: usize) -> bool {
    // SAFETY: as the caller promises.
    unsafe { bytes(to, from, len) == 0 }
}

/// Ends a copy in which a signal has come, if it came in one; called in a handler of SIGSEGV and
/// SIGBUS with its third argument.
///
/// # Safety
/// The system has made the context, and the handler returns to it.
pub unsafe fn escape(context: *mut c_void) -> bool {
    /// Words of the kernel's `struct ucontext` before the registers of the machine.
    const FRONT: usize = if cfg!(target_arch = "x86_64") { 5 } else { 22 };
    let words = context.cast::<u64>().wrapping_add(FRONT);
    // The instruction, where the result goes, and on x86-64 the stack.
    let (next, result, stack) =
        if cfg!(target_arch = "x86_64") { (16, 13, 15) } else { (33, 1, 32) };
    let start = bytes as *const () as u64;
    // SAFETY: the context has all registers.
    unsafe {
        if !(start..start + CODE as u64).contains(&*words.add(next)) {
            return false;
        }
        *words.add(result) = 1;
        // As `ret`: the code has no frame.
        if cfg!(target_arch = "x86_64") {
            let top = *words.add(stack);
            *words.add(next) = *core::ptr::with_exposed_provenance::<u64>(top as usize);
            *words.add(stack) = top + 8;
        } else {
            *words.add(next) = *words.add(31);
        }
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_bytes_are_copied_and_no_other() {
        for len in (0..200).chain([4096, 10_001]) {
            let from: Vec<u8> = (0..len + 3).map(|n| n as u8 ^ 0x5a).collect();
            let mut to = vec![0xff; len + 9];
            // SAFETY: both are there.
            assert!(unsafe { copy(to[4..].as_mut_ptr(), from[1..].as_ptr(), len) });
            assert_eq!(to[4..4 + len], from[1..=len]);
            assert!(to[..4].iter().chain(&to[4 + len..]).all(|byte| *byte == 0xff));
        }
    }
}
