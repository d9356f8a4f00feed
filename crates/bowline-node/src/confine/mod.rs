//! What a process gives up before it serves anybody, so that a peer or a program that takes it over
//! gains little.
//!
//! ```text
//! Needs -> no new privileges -> Landlock (files.rs) -> capabilities.rs -> seccomp (calls.rs)
//!                               paths, TCP ports       rights of root     system calls
//! ```
//!
//! All four hold for the calling thread and for those that it starts, so a process confines itself
//! while it has one thread. None is an error where the kernel lacks it. The reasons are in
//! docs/decisions/0011.

mod calls;
mod capabilities;
mod files;

use std::{fmt, os::fd::OwnedFd, path::PathBuf};

use rustix::thread::CapabilitySet;

/// What a process still does after it was confined.
#[derive(Debug, Default)]
pub struct Needs {
    /// Files and folders that it reads, with all below them.
    pub read: Vec<PathBuf>,
    /// Folders in which it makes, writes and removes files.
    pub files: Vec<PathBuf>,
    /// TCP ports of others that it connects to.
    pub connect: Vec<u16>,
    /// Whether it mounts and unmounts.
    pub mounts: bool,
    /// Capabilities that it needs if it has them, and for what.
    pub capabilities: Vec<(CapabilitySet, String)>,
}

/// What a process has given up, and what it could not.
#[derive(Debug, Default)]
pub struct Confinement {
    on: Vec<String>,
    off: Vec<String>,
    /// What is read later of /proc, where a file that nobody has open may become another one, which
    /// no rule is for.
    held: Vec<OwnedFd>,
}

impl Confinement {
    /// Of a process that has given up nothing, and why.
    pub fn none(why: &str) -> Self {
        Self { off: vec![why.to_owned()], ..Self::default() }
    }

    /// Returns what is in force, as a list of words.
    pub fn on(&self) -> Option<String> {
        (!self.on.is_empty()).then(|| self.on.join(", "))
    }

    /// Returns what is not in force, with the reasons.
    pub fn off(&self) -> Option<String> {
        (!self.off.is_empty()).then(|| self.off.join("; "))
    }

    fn note(&mut self, what: &str, done: Result<(), impl fmt::Display>) {
        match done {
            Ok(()) => self.on.push(what.to_owned()),
            Err(error) => self.off.push(format!("{what} ({error})")),
        }
    }
}

/// Confines the calling thread and those that it starts to what the process needs.
pub fn confine(needs: &Needs) -> Confinement {
    if needs.mounts && !rustix::process::geteuid().is_root() {
        return Confinement::none(
            "fusermount3, which unmounts for other users than root, is setuid",
        );
    }
    let mut confinement = Confinement::default();
    confinement.note("no new privileges", rustix::thread::set_no_new_privs(true));
    files::restrict(needs, &mut confinement);
    capabilities::give_up(needs, &mut confinement);
    confinement.note("system calls", calls::filter(needs.mounts));
    confinement
}

#[cfg(test)]
mod tests {
    use std::{
        fs,
        io::ErrorKind,
        net::{TcpListener, TcpStream},
        os::unix::net::UnixListener,
        thread,
    };

    use bowline_testkit::processes;
    use rustix::io::Errno;

    use super::*;

    fn apart(test: &str, body: impl FnOnce(PathBuf)) {
        processes::apart(module_path!(), test, body);
    }

    fn missing(confinement: &Confinement) -> bool {
        let off = confinement.off();
        if let Some(off) = &off {
            bowline_testkit::skipped::because(off);
        }
        off.is_some()
    }

    #[test]
    fn paths_and_ports_that_are_not_needed_are_denied() {
        apart("paths_and_ports_that_are_not_needed_are_denied", |folder| {
            let (seen, served) = (folder.join("seen"), folder.join("served"));
            let kept = folder.join("kept");
            fs::create_dir(&kept).expect("a folder");
            fs::create_dir(&seen).expect("a folder");
            fs::create_dir(&served).expect("a folder");
            fs::write(seen.join("file"), "text").expect("a file");
            fs::write(folder.join("secret"), "text").expect("a file");
            let _own = UnixListener::bind(served.join("own.sock")).expect("a socket");
            let listener = TcpListener::bind("127.0.0.1:0").expect("a listener");
            let place = listener.local_addr().expect("an address");
            let needs = Needs {
                read: vec![seen.clone()],
                files: vec![kept.clone()],
                connect: vec![place.port()],
                ..Needs::default()
            };
            let mut confinement = Confinement::default();
            rustix::thread::set_no_new_privs(true).expect("no new privileges");
            files::restrict(&needs, &mut confinement);
            if missing(&confinement) {
                return;
            }
            fs::read(seen.join("file")).expect("it is needed");
            fs::write(kept.join("new"), "text").expect("it is needed");
            fs::rename(kept.join("new"), kept.join("file")).expect("it is needed");
            fs::read(kept.join("file")).expect("it is needed");
            fs::remove_file(kept.join("file")).expect("it is needed");
            TcpStream::connect(place).expect("it is needed");
            TcpListener::bind("127.0.0.1:0").expect("a process may listen");
            let denied = |done: std::io::Result<()>, what: &str| {
                let error = done.expect_err(what);
                assert_eq!(error.kind(), ErrorKind::PermissionDenied, "{what}");
            };
            denied(fs::read(folder.join("secret")).map(drop), "reading elsewhere");
            denied(fs::write(seen.join("file"), "other"), "writing what may be read");
            denied(fs::write(served.join("file"), "other"), "making a file");
            for of in [&served, &seen, &kept] {
                let what = format!("a socket in {}", of.display());
                denied(UnixListener::bind(of.join("socket")).map(drop), &what);
            }
            denied(fs::remove_file(served.join("own.sock")), "removing a socket of its own");
            denied(fs::rename(served.join("own.sock"), served.join("other")), "renaming it");
            denied(fs::remove_file(folder.join("secret")), "removing elsewhere");
            let other = (place.ip(), place.port() ^ 1);
            denied(TcpStream::connect(other).map(drop), "another port");
            let parent = rustix::process::getppid().expect("a parent");
            let signal = rustix::process::test_kill_process(parent);
            assert_eq!(signal, Err(Errno::PERM), "a signal for another process");
            // Threads of later are as confined.
            let secret = folder.join("secret");
            let later = thread::spawn(|| fs::read(secret).map(drop));
            denied(later.join().expect("a thread"), "reading elsewhere, later");
        });
    }

    #[test]
    fn who_mounts_may_unmount() {
        apart("who_mounts_may_unmount", |folder| {
            if !rustix::process::geteuid().is_root() {
                bowline_testkit::skipped::because("only root mounts without fusermount3");
                return;
            }
            let capabilities = vec![(CapabilitySet::SYS_ADMIN, "to mount".to_owned())];
            let needs = Needs { mounts: true, capabilities, ..Needs::default() };
            let confinement = confine(&needs);
            assert!(confinement.on().is_some_and(|on| on.contains("system calls")));
            let unmounted = rustix::mount::unmount(&folder, rustix::mount::UnmountFlags::DETACH);
            assert_eq!(unmounted, Err(Errno::INVAL), "nothing is mounted there");
        });
    }
}
