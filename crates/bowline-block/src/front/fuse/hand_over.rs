//! A mount that continues in another process: the kernel's end stays, with the requests that nobody
//! has read, and programs keep the file open.
//!
//! fuser begins every session with the kernel's first request, which came long ago, and it ends
//! one only with the mount. So it gets another descriptor for the beginning and for the end; in
//! between, the kernel's is put in its place, under the same number.

#![allow(unsafe_code, reason = "fuser's descriptor is known by its number")]

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use fuser::{Config, Filesystem, Session};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

/// A mount without its disk, for another process that takes it over.
#[derive(Debug)]
pub struct Handed {
    /// Where the kernel's requests come from.
    pub kernel: OwnedFd,
    /// How often the file is open.
    pub opens: usize,
}

/// Number of FUSE_INIT, by which a session begins.
const INIT: u32 = 26;
/// The version of the protocol; what it brings was negotiated with the kernel before.
const VERSION: [u32; 2] = [7, 31];
/// By this message the kernel is asked to send again what was read and not answered (Linux 6.9).
const RESEND: u32 = 7;

/// Begins a session with a mount whose kernel has had its answer to FUSE_INIT.
pub(super) fn session<F: Filesystem>(
    file_system: F,
    kernel: BorrowedFd<'_>,
    config: Config,
) -> io::Result<Session<F>> {
    let flags = SocketFlags::CLOEXEC;
    let (asks, answers) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    // The length, the operation, its number, no node, no user, group or process; then the version,
    // no read-ahead, and no flags.
    let mut ask = Vec::new();
    for word in [40 + 64, INIT, 1, 0, 0, 0, 0, 0, 0, 0, VERSION[0], VERSION[1]] {
        ask.extend(word.to_ne_bytes());
    }
    ask.resize(40 + 64, 0);
    let mut asks = File::from(asks);
    asks.write_all(&ask)?;
    let session = Session::from_fd(file_system, answers, config.acl, config)?;
    let _ = asks.read(&mut [0; 256])?;
    put(kernel, session.as_fd().as_raw_fd())?;
    Ok(session)
}

/// Has the kernel send again all requests that a process had read and has not answered: that
/// process has ended.
pub(super) fn ask_again(kernel: BorrowedFd<'_>) -> io::Result<()> {
    let mut message = Vec::new();
    for word in [16, RESEND, 0, 0] {
        message.extend(word.to_ne_bytes());
    }
    rustix::io::write(kernel, &message)?;
    Ok(())
}

/// Ends the session that has this descriptor, whose thread is not reading from it.
pub(super) fn end(number: RawFd) -> io::Result<()> {
    put(File::open("/dev/null")?.as_fd(), number)
}

/// Puts a descriptor in the place of one that fuser has.
fn put(descriptor: BorrowedFd<'_>, number: RawFd) -> io::Result<()> {
    // SAFETY: the number is that of a session's descriptor, which lives as long as the session: so
    // no other descriptor is closed, and all that own the number expect requests there.
    let put = unsafe { libc::dup3(descriptor.as_raw_fd(), number, libc::O_CLOEXEC) };
    if put < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

#[derive(Debug, Default)]
struct State {
    /// The thread of the session waits here.
    is_parked: bool,
}

/// Pauses the thread of a session.
#[derive(Debug, Default)]
pub(super) struct Gate {
    state: Mutex<State>,
    changed: Condvar,
    /// Relaxed: the thread that sees it takes the lock.
    is_closed: AtomicBool,
}

impl Gate {
    fn lock(&self) -> MutexGuard<'_, State> {
        // Only a bug in this module panics with the lock held; the panic was printed.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn is_closed(&self) -> bool {
        self.is_closed.load(Relaxed)
    }

    /// Waits until a pause ends, if there is one.
    pub(super) fn park(&self) {
        let mut state = self.lock();
        while self.is_closed() {
            state.is_parked = true;
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.is_parked = false;
    }

    pub(super) fn is_parked(&self) -> bool {
        self.lock().is_parked
    }

    /// Begins a pause.
    pub(super) fn close(&self) {
        let _state = self.lock();
        self.is_closed.store(true, Relaxed);
    }

    /// Ends a pause.
    pub(super) fn open(&self) {
        let _state = self.lock();
        self.is_closed.store(false, Relaxed);
        self.changed.notify_all();
    }
}
