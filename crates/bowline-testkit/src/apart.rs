//! Tests on a machine that has a node of its own.
//!
//! Commands and programs look for nodes in `/run/bowline`, whatever `XDG_RUNTIME_DIR` says, and a
//! node at all addresses has the port of all others. So a test leaves both behind: its thread, and
//! all that it starts, gets an empty `/run` and a network with nothing but loopback.

#![allow(unsafe_code, reason = "libc has the calls that change the namespaces of one thread")]

use std::{cell::Cell, io, path::Path, process::Command, ptr};

/// Folder of the nodes of a machine.
const NODES: &str = "/run/bowline";

/// Moves the calling thread, and what it starts from now on, to where no node of this machine is.
/// Without such a node it stays where it is, and where the system refuses (only root may do this),
/// it says so and stays, too.
pub fn from_nodes() {
    thread_local! {
        /// A thread leaves once: later nodes there are those of its test.
        static HAS_LEFT: Cell<bool> = const { Cell::new(false) };
    }
    if !HAS_LEFT.replace(true)
        && Path::new(NODES).exists()
        && let Err(error) = leave()
    {
        eprintln!("this test runs beside what is in {NODES}: {error}");
    }
}

fn leave() -> io::Result<()> {
    let succeeded = |result| if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) };
    // SAFETY: the call takes no pointer. Other threads keep their namespaces and their view of the
    // file system, and no descriptor changes hands.
    succeeded(unsafe { libc::unshare(libc::CLONE_NEWNS | libc::CLONE_NEWNET) })?;
    let (root, none) = (c"/".as_ptr(), ptr::null::<libc::c_void>());
    // What is mounted here is not mounted elsewhere, but what others mount is seen here.
    let flags = libc::MS_REC | libc::MS_SLAVE;
    // SAFETY: the paths end with a zero byte, and the call takes no others.
    succeeded(unsafe { libc::mount(ptr::null(), root, ptr::null(), flags, none) })?;
    let (tmpfs, run) = (c"tmpfs".as_ptr(), c"/run".as_ptr());
    // SAFETY: as before.
    succeeded(unsafe { libc::mount(tmpfs, run, tmpfs, 0, none) })?;
    let up = Command::new("ip").args(["link", "set", "lo", "up"]).status()?;
    if up.success() { Ok(()) } else { Err(io::Error::other("loopback stays down")) }
}
