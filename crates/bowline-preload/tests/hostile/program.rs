//! Programs that run with the library, as one user or another.

use std::fs::{self, Permissions};
use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use bowline_testkit::skipped;
use rustix::process::{Gid, Uid, geteuid};
use rustix::thread::{set_thread_groups, set_thread_res_gid, set_thread_res_uid};

use crate::scene::{LIMIT, library, script};

/// Users who are nobody's friends.
pub(crate) const STRANGER: u32 = 77_003;
pub(crate) const ANNA: u32 = 77_001;

/// Does something as another user, as whom the kernel knows the makers of sockets.
pub(crate) fn as_user<T: Send + 'static>(
    user: u32,
    what: impl FnOnce() -> T + Send + 'static,
) -> T {
    let become_and_do = move || {
        let (uid, gid) = (Uid::from_raw(user), Gid::from_raw(user));
        set_thread_groups(&[]).unwrap();
        set_thread_res_gid(gid, gid, gid).unwrap();
        set_thread_res_uid(uid, uid, uid).unwrap();
        what()
    };
    thread::spawn(become_and_do).join().unwrap()
}

pub(crate) fn is_root() -> bool {
    if !geteuid().is_root() {
        skipped::because("only root can take on other users");
    }
    geteuid().is_root()
}

pub(crate) struct Folder(pub(crate) PathBuf);

impl Folder {
    pub(crate) fn new(name: &str) -> Self {
        bowline_testkit::apart::from_nodes();
        let path =
            std::env::temp_dir().join(format!("bowline-false-{}-{name}", std::process::id()));
        fs::create_dir(&path).unwrap();
        fs::set_permissions(&path, Permissions::from_mode(0o777)).unwrap();
        Self(path)
    }

    pub(crate) fn join(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// A program that is run with the library.
pub(crate) struct Program(pub(crate) Child);

impl Program {
    pub(crate) fn start(
        user: u32,
        args: &[&str],
        stdin: Stdio,
        set: impl FnOnce(&mut Command),
    ) -> Self {
        let mut command = Command::new("python3");
        command.arg(script("trusting.py")).args(args).env("LD_PRELOAD", library());
        command.env_remove("BOWLINE_RDS_SOCKET").env_remove("XDG_RUNTIME_DIR");
        command.stdin(stdin).stdout(Stdio::piped());
        if user != 0 {
            command.uid(user).gid(user);
        }
        set(&mut command);
        Self(command.spawn().expect("python3 starts"))
    }

    /// One of root's that makes a socket of the node at a place.
    pub(crate) fn makes(place: &Path) -> Self {
        Self::at(place, &["make"], Stdio::null())
    }

    /// One of root's with the node at a place.
    pub(crate) fn at(place: &Path, args: &[&str], stdin: Stdio) -> Self {
        Self::start(0, args, stdin, |command| {
            command.env("BOWLINE_RDS_SOCKET", place);
        })
    }

    pub(crate) fn line(&mut self) -> String {
        self.line_within(LIMIT)
    }

    /// The next line; empty if it ends before, or does not come in time.
    pub(crate) fn line_within(&mut self, limit: Duration) -> String {
        let out = self.0.stdout.as_mut().expect("its output");
        let until = Instant::now() + limit;
        let mut line = Vec::new();
        let mut byte = [0];
        loop {
            let left = until.saturating_duration_since(Instant::now());
            let left = rustix::event::Timespec::try_from(left).unwrap();
            let mut ready = [rustix::event::PollFd::new(&*out, rustix::event::PollFlags::IN)];
            let is_there = rustix::event::poll(&mut ready, Some(&left)) == Ok(1);
            if !is_there || out.read(&mut byte).unwrap() == 0 || byte == *b"\n" {
                return String::from_utf8(line).unwrap().trim().to_owned();
            }
            line.push(byte[0]);
        }
    }

    /// Waits for its end, which must not be by a signal.
    pub(crate) fn ends(mut self) -> Option<i32> {
        let begun = Instant::now();
        loop {
            if let Some(status) = self.0.try_wait().unwrap() {
                return status.code();
            }
            assert!(begun.elapsed() < LIMIT, "the program does not end");
            thread::sleep(Duration::from_millis(2));
        }
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
