//! Memory that a program points at and does not have: the signal that a copy gets there ends the
//! copy, and the call fails with EFAULT.
//!
//! The signals are handled where the program does not: one that has a handler of its own keeps it,
//! and gets those of copies as well. The program never sees that there is one. A signal that comes
//! anywhere else does what it does without a handler.

#![allow(
    clippy::missing_safety_doc,
    missing_docs,
    unreachable_pub,
    reason = "the C library documents them, with their conditions"
)]

use core::ffi::{c_int, c_void};
use core::ptr;
use core::sync::atomic::{AtomicBool, Ordering};

use bowline_host_client::{guarded, system};
use libc::{sighandler_t, siginfo_t};

use crate::process;
use crate::real::{KeptErrno, hidden};

const SIGNALS: [c_int; 2] = [libc::SIGSEGV, libc::SIGBUS];

/// The signals are to be handled.
static HANDLES: AtomicBool = AtomicBool::new(false);

fn address() -> sighandler_t {
    let handler: extern "C" fn(c_int, *mut siginfo_t, *mut c_void) = on_fault;
    handler as *const () as sighandler_t
}

fn real_sigaction(
    signal: c_int,
    action: *const libc::sigaction,
    old: *mut libc::sigaction,
) -> c_int {
    hidden!(
        sigaction(
            signal: c_int,
            action: *const libc::sigaction,
            old: *mut libc::sigaction,
        ) -> c_int
    )
}

/// What a signal does that nobody handles.
fn default() -> libc::sigaction {
    // SAFETY: a structure of integers, for which all zeroes are a value: SIG_DFL.
    unsafe { core::mem::zeroed() }
}

/// Handles the signals, if the program does not.
pub(crate) fn handle() {
    let _kept = KeptErrno::new();
    // Relaxed: another thread that sets an action during this call has it either way. The child of
    // a `vfork` has actions of its own.
    if !process::is_visitor() {
        HANDLES.store(true, Ordering::Relaxed);
    }
    SIGNALS.into_iter().for_each(handle_one);
}

fn handle_one(signal: c_int) {
    let mut now = default();
    let is_default =
        real_sigaction(signal, ptr::null(), &raw mut now) == 0 && now.sa_sigaction == libc::SIG_DFL;
    if is_default {
        let mut own = default();
        own.sa_sigaction = address();
        own.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
        real_sigaction(signal, &raw const own, ptr::null_mut());
    }
}

extern "C" fn on_fault(signal: c_int, info: *mut siginfo_t, context: *mut c_void) {
    // SAFETY: the system has made the context for this handler.
    if unsafe { guarded::escape(context) } {
        return;
    }
    // It comes again, and does what it does by default.
    let action = default();
    real_sigaction(signal, &raw const action, ptr::null_mut());
    // SAFETY: the system has made it.
    let is_sent = unsafe { (*info).si_code } <= 0;
    if is_sent {
        let thread = system::getpid() as usize;
        // SAFETY: they take numbers only.
        let own = unsafe { system::call(libc::SYS_gettid, &[]) }.unwrap_or(thread);
        // SAFETY: as above.
        let _ = unsafe { system::call(libc::SYS_tgkill, &[thread, own, signal as usize]) };
    }
}

/// Called after the program has set what a signal does: that is done here where it is the default.
fn has_set(signal: c_int, action: sighandler_t) {
    let is_default = action == libc::SIG_DFL && SIGNALS.contains(&signal);
    if is_default && HANDLES.load(Ordering::Relaxed) {
        let _kept = KeptErrno::new();
        handle_one(signal);
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn sigaction(
    signal: c_int,
    action: *const libc::sigaction,
    old: *mut libc::sigaction,
) -> c_int {
    // SAFETY: the caller's, readable if it is not null.
    let set = unsafe { action.as_ref() }.map(|action| action.sa_sigaction);
    let done = real_sigaction(signal, action, old);
    if done == 0 {
        // SAFETY: the caller's, which the system has filled if it is not null.
        if let Some(old) = unsafe { old.as_mut() }
            && old.sa_sigaction == address()
        {
            *old = default();
        }
        set.into_iter().for_each(|set| has_set(signal, set));
    }
    done
}

/// Functions that set what a signal does, and return what it did.
macro_rules! setting {
    ($($name:ident)*) => {$(
        #[unsafe(no_mangle)]
        pub unsafe extern "C-unwind" fn $name(signal: c_int, action: sighandler_t) -> sighandler_t {
            let old = hidden!(
                $name(signal: c_int, action: sighandler_t) -> sighandler_t
            );
            if old == libc::SIG_ERR {
                return old;
            }
            has_set(signal, action);
            if old == address() { libc::SIG_DFL } else { old }
        }
    )*};
}

setting! { signal bsd_signal ssignal sysv_signal __sysv_signal sigset }
