//! SIGPIPE for a program that takes the place of a command.

#![allow(unsafe_code, reason = "what the system has of a signal before Rust changes it")]

use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};

/// Whoever started this process has it ignore SIGPIPE.
static IS_IGNORED: AtomicBool = AtomicBool::new(false);

/// Runs before Rust's own start, which has every process ignore SIGPIPE.
#[used]
#[unsafe(link_section = ".init_array")]
static NOTE: extern "C" fn() = note;

extern "C" fn note() {
    // SAFETY: all zeros are a `sigaction`.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    // SAFETY: no action is set, and there is room for the one that is.
    let result = unsafe { libc::sigaction(libc::SIGPIPE, std::ptr::null(), &raw mut action) };
    let is_ignored = result == 0 && action.sa_sigaction == libc::SIG_IGN;
    IS_IGNORED.store(is_ignored, Ordering::Relaxed);
}

/// Has a command leave SIGPIPE as this process was started with it. Without it, a program that is
/// started has the default, which ends it: systemd has services ignore it.
pub fn keep_pipe_signal(command: &mut Command) {
    if !IS_IGNORED.load(Ordering::Relaxed) {
        return;
    }
    let ignore = || {
        // SAFETY: the call installs no handler.
        unsafe { libc::signal(libc::SIGPIPE, libc::SIG_IGN) };
        Ok(())
    };
    // SAFETY: it makes one system call, which is allowed between fork and exec.
    unsafe { command.pre_exec(ignore) };
}
