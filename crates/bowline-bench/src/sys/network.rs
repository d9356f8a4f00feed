//! Networks of their own, as the kernel has them: network namespaces without a name.
//!
//! Nothing has to be cleaned up: a namespace goes, with everything in it, when the last descriptor
//! of it is closed and the last process in it has ended, however they end.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::process::CommandExt;
use std::process::Command;

use super::check;

/// One network, in which is nothing but a loopback device that is down.
#[derive(Debug)]
pub(crate) struct Network(File);

impl Network {
    /// Makes one.
    pub(crate) fn new() -> io::Result<Self> {
        // A thread of its own, since a thread stays in the network that it makes.
        in_thread(|| {
            // SAFETY: unshare takes a plain integer, and concerns this thread alone.
            check(unsafe { libc::unshare(libc::CLONE_NEWNET) })?;
            File::open("/proc/thread-self/ns/net").map(Self)
        })
    }

    /// A name for other programs, as long as this process lives.
    pub(crate) fn path(&self) -> String {
        format!("/proc/{}/fd/{}", std::process::id(), self.0.as_raw_fd())
    }

    /// Has a program that will be started live in this network.
    pub(crate) fn house(&self, command: &mut Command) {
        let fd = self.0.as_raw_fd();
        let enter = move || {
            // SAFETY: plain integers; the parent has the descriptor open while it starts programs.
            check(unsafe { libc::setns(fd, libc::CLONE_NEWNET) }).map(drop)
        };
        // SAFETY: between fork and exec `enter` makes one system call and neither allocates nor
        // locks.
        unsafe { command.pre_exec(enter) };
    }

    /// Does something in this network.
    pub(crate) fn inside<T: Send>(
        &self,
        act: impl FnOnce() -> io::Result<T> + Send,
    ) -> io::Result<T> {
        let fd = self.0.as_raw_fd();
        in_thread(move || {
            // SAFETY: plain integers; `self` keeps the descriptor open.
            check(unsafe { libc::setns(fd, libc::CLONE_NEWNET) })?;
            act()
        })
    }
}

fn in_thread<T: Send>(act: impl FnOnce() -> io::Result<T> + Send) -> io::Result<T> {
    std::thread::scope(|scope| scope.spawn(act).join())
        .unwrap_or_else(|_| Err(io::Error::other("a thread ended early")))
}
