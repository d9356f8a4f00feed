//! A unix socket that a service manager has passed to listen at, as sd_listen_fds(3) tells.

#![allow(
    unsafe_code,
    reason = "a descriptor that another program has opened is known by its number"
)]

use std::{
    env, fs, io,
    os::{
        fd::{FromRawFd, OwnedFd},
        unix::net::UnixListener,
    },
    process,
    sync::atomic::{AtomicBool, Ordering},
};

use rustix::{
    io::{FdFlags, fcntl_setfd},
    net::{AddressFamily, sockopt},
};

/// Number of the first descriptor that a manager passes.
const FIRST: i32 = 3;

/// Returns the unix socket that a manager has passed to listen at, if there is one; the second call
/// returns nothing. To be called before this process opens anything that it keeps.
///
/// # Errors
///
/// `InvalidInput` when there are several, or when it is no such socket; errors of the system.
pub fn passed_listener() -> io::Result<Option<UnixListener>> {
    static TAKEN: AtomicBool = AtomicBool::new(false);
    let number = |name| env::var(name).ok()?.parse::<u32>().ok();
    if number("LISTEN_PID") != Some(process::id()) {
        return Ok(None);
    }
    match number("LISTEN_FDS") {
        None | Some(0) => return Ok(None),
        Some(1) => {}
        Some(count) => return Err(unusable(&format!("{count} were passed, and one is served"))),
    }
    if TAKEN.swap(true, Ordering::Relaxed) {
        return Ok(None);
    }
    // Fails where nothing has the number.
    fs::metadata(format!("/proc/self/fd/{FIRST}"))?;
    // SAFETY: it is open, as was just seen. It belongs to this process, since the manager has named
    // it in LISTEN_PID, and to nobody else here, since it is taken once only.
    let socket = unsafe { OwnedFd::from_raw_fd(FIRST) };
    fcntl_setfd(&socket, FdFlags::CLOEXEC)?;
    let is_unix = sockopt::socket_domain(&socket)? == AddressFamily::UNIX;
    if !is_unix || !sockopt::socket_acceptconn(&socket)? {
        return Err(unusable("it is no listening unix socket"));
    }
    Ok(Some(socket.into()))
}

fn unusable(text: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, text)
}
