//! What a service manager has passed, as sd_listen_fds(3) tells: a unix socket to listen at, and
//! what an earlier process has left in its store.

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

/// What a manager has passed.
#[derive(Debug, Default)]
pub struct Passed {
    /// A socket to listen at.
    pub listener: Option<UnixListener>,
    /// Descriptors that an earlier process of this service has left in the manager's store, under
    /// the names that it gave them.
    pub stored: Vec<(String, OwnedFd)>,
}

/// Returns what a manager has passed; the second call returns nothing. Descriptors of these
/// names are those of the store. To be called before this process opens anything that it keeps.
///
/// # Errors
///
/// `InvalidInput` when there are several others, or when another is no listening unix socket;
/// errors of the system.
pub fn passed(stored: &[&str]) -> io::Result<Passed> {
    static TAKEN: AtomicBool = AtomicBool::new(false);
    let number = |name| env::var(name).ok()?.parse::<i32>().ok();
    let count = number("LISTEN_FDS").unwrap_or(0);
    if number("LISTEN_PID").and_then(|id| u32::try_from(id).ok()) != Some(process::id())
        || TAKEN.swap(true, Ordering::Relaxed)
    {
        return Ok(Passed::default());
    }
    let names = env::var("LISTEN_FDNAMES").unwrap_or_default();
    let mut names = names.split(':');
    let mut passed = Passed::default();
    for at in (0..count).map(|n| FIRST + n) {
        // Fails where nothing has the number.
        fs::metadata(format!("/proc/self/fd/{at}"))?;
        // SAFETY: it is open, as was just seen. It belongs to this process, since the manager has
        // named it in LISTEN_PID, and to nobody else here, since it is taken once only.
        let descriptor = unsafe { OwnedFd::from_raw_fd(at) };
        fcntl_setfd(&descriptor, FdFlags::CLOEXEC)?;
        let name = names.next().unwrap_or_default();
        if stored.contains(&name) {
            passed.stored.push((name.to_owned(), descriptor));
        } else if passed.listener.replace(listener(descriptor)?).is_some() {
            return Err(unusable("more than one socket was passed"));
        }
    }
    Ok(passed)
}

fn listener(socket: OwnedFd) -> io::Result<UnixListener> {
    let is_unix = sockopt::socket_domain(&socket)? == AddressFamily::UNIX;
    if !is_unix || !sockopt::socket_acceptconn(&socket)? {
        return Err(unusable("it is not a listening unix socket"));
    }
    Ok(socket.into())
}

fn unusable(text: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, text)
}
