//! Processes that show a disk, and the folder of their sockets and mounts.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::sys;

/// Longest time until a process serves.
const START_LIMIT: Duration = Duration::from_secs(20);
/// Longest time until it has ended after it was asked to.
const END_LIMIT: Duration = Duration::from_secs(15);
const NAP: Duration = Duration::from_millis(10);

/// A folder for a door's socket, mount and logs. It goes with the door.
#[derive(Debug)]
pub(super) struct Folder(PathBuf);

impl Folder {
    /// Makes one.
    pub(super) fn new() -> Result<Self, String> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("bowline-bench-{}-{number}", std::process::id());
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir(&path).map_err(|e| format!("{}: {e}", path.display()))?;
        Ok(Self(path))
    }

    pub(super) fn path(&self) -> &Path {
        &self.0
    }

    /// Makes a folder in it.
    pub(super) fn make(&self, name: &str) -> Result<PathBuf, String> {
        let path = self.0.join(name);
        std::fs::create_dir(&path).map_err(|e| format!("{}: {e}", path.display()))?;
        Ok(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        // What is left behind does no harm.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A process that serves. It is asked to end when this is dropped.
#[derive(Debug)]
pub(super) struct Server {
    name: &'static str,
    child: Child,
    /// What it says goes here; none: nobody reads it.
    log: Option<PathBuf>,
}

impl Server {
    /// Starts one, whose words go into a file of the folder.
    pub(super) fn start(
        name: &'static str,
        command: &mut Command,
        folder: &Folder,
    ) -> Result<Self, String> {
        let log = folder.path().join(format!("{name}.log"));
        let failed = |e: std::io::Error| format!("starting {name}: {e}");
        let out = std::fs::File::create(&log).map_err(failed)?;
        let err = out.try_clone().map_err(failed)?;
        sys::end_with_this_thread(command);
        command.stdin(Stdio::null()).stdout(out).stderr(err);
        Ok(Self { name, child: command.spawn().map_err(failed)?, log: Some(log) })
    }

    /// Takes a process that serves already.
    pub(super) fn of(name: &'static str, child: Child) -> Self {
        Self { name, child, log: None }
    }

    /// Waits until it has said a line that begins so.
    pub(super) fn says(&mut self, words: &str) -> Result<(), String> {
        let log = self.log.clone();
        self.until(|| {
            let said = std::fs::read_to_string(log.as_ref()?).ok()?;
            said.lines().any(|line| line.starts_with(words)).then_some(())
        })
    }

    /// Waits until something is there.
    pub(super) fn until<T>(&mut self, mut there: impl FnMut() -> Option<T>) -> Result<T, String> {
        let end = Instant::now() + START_LIMIT;
        loop {
            if let Some(found) = there() {
                return Ok(found);
            }
            let ended = self.child.try_wait().map_err(|e| e.to_string())?;
            if let (Some(_), Some(found)) = (ended, there()) {
                return Ok(found); // its last words
            }
            if ended.is_some() || Instant::now() > end {
                let log = self.log.as_ref().and_then(|log| std::fs::read_to_string(log).ok());
                let said = log.as_deref().and_then(|log| log.lines().last()).unwrap_or("no word");
                let how = ended.map_or("is not ready".to_owned(), |status| status.to_string());
                return Err(format!("{} {how}: {said}", self.name));
            }
            sleep(NAP);
        }
    }

    pub(super) const fn name(&self) -> &'static str {
        self.name
    }

    pub(super) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Processors' time so far.
    pub(super) fn cpu_ns(&self) -> u64 {
        sys::cpu_ns(self.pid()).unwrap_or(0)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        sys::ask_to_end(&mut self.child);
        let end = Instant::now() + END_LIMIT;
        while Instant::now() < end {
            match self.child.try_wait() {
                Ok(None) => sleep(NAP),
                Ok(Some(_)) | Err(_) => return,
            }
        }
        // Nothing more can be done about it.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_that_does_not_come_up_is_reported_with_its_last_words() {
        let folder = Folder::new().unwrap();
        let mut command = Command::new("sh");
        command.args(["-c", "echo first; echo no room >&2; exit 3"]);
        let mut server = Server::start("export", &mut command, &folder).unwrap();
        assert_eq!(server.says("first"), Ok(()));
        let why = server.says("export disk").unwrap_err();
        assert_eq!(why, "export exit status: 3: no room");
    }

    #[test]
    fn a_server_and_its_folder_go_together() {
        let folder = Folder::new().unwrap();
        let mut command = Command::new("sleep");
        let server = Server::start("sleep", command.arg("60"), &folder).unwrap();
        let (path, pid) = (folder.path().to_owned(), server.pid());
        assert!(path.exists() && sys::cpu_ns(pid).is_some());
        drop((server, folder));
        assert!(!path.exists() && sys::cpu_ns(pid).is_none());
    }
}
