//! Processes that cannot outlive their test, and folders that disappear with it.

use std::{
    ffi::OsStr,
    io::{BufRead, BufReader, Read, Write},
    path::{Path, PathBuf},
    process::{Child, ChildStdout, Command, ExitStatus, Stdio},
    sync::{
        Arc, Mutex,
        atomic::{AtomicU32, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

/// Longest run of any command in a test.
const DEADLINE: Duration = Duration::from_secs(60);

/// A folder that is removed at the end; control sockets lie in it, too. With it a test leaves the
/// nodes of this machine.
pub(crate) struct Folder(PathBuf);

impl Folder {
    pub(crate) fn new() -> Self {
        bowline_testkit::apart::from_nodes();
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("bowline-cli-{}-{number}", std::process::id());
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir(&path).expect("a new folder");
        Self(path)
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }

    pub(crate) fn write(&self, name: &str, text: &str) -> PathBuf {
        let path = self.0.join(name);
        std::fs::write(&path, text).expect("a file");
        path
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A finished command.
#[derive(Debug)]
pub(crate) struct Done {
    pub(crate) code: Option<i32>,
    pub(crate) out: String,
    pub(crate) err: String,
}

impl Done {
    /// Asserts the exit status, with everything printed in the message.
    #[track_caller]
    pub(crate) fn exits(self, code: i32) -> Self {
        assert_eq!(self.code, Some(code), "{self:?}");
        self
    }

    /// Asserts that standard error is one line that contains all of this.
    #[track_caller]
    pub(crate) fn complains(&self, parts: &[&str]) {
        assert_eq!(self.err.lines().count(), 1, "{self:?}");
        for part in parts {
            assert!(self.err.contains(part), "no {part:?} in {self:?}");
        }
    }
}

/// A running command; it is killed when it is dropped.
pub(crate) struct Running {
    child: Child,
    out: Option<BufReader<ChildStdout>>,
    seen: String,
    /// What came on standard error so far, and the thread that reads it.
    heard: Arc<Mutex<String>>,
    errors: Option<thread::JoinHandle<()>>,
}

/// Starts `bowline` with these arguments; control sockets and temporary files go to `folder`.
pub(crate) fn start(folder: &Folder, words: &[&str]) -> Running {
    start_as(env!("CARGO_BIN_EXE_bowline").as_ref(), folder, words)
}

/// Starts another name of the program.
pub(crate) fn start_as(program: &OsStr, folder: &Folder, words: &[&str]) -> Running {
    spawn(program, folder, words, Stdio::null(), Stdio::piped())
}

/// Starts another program with a standard input.
pub(crate) fn start_from(
    input: impl Into<Stdio>,
    program: &str,
    folder: &Folder,
    words: &[&str],
) -> Running {
    spawn(program.as_ref(), folder, words, input.into(), Stdio::piped())
}

/// Starts `bowline` with another standard output, of which the test sees nothing.
pub(crate) fn start_into(out: impl Into<Stdio>, folder: &Folder, words: &[&str]) -> Running {
    let program = env!("CARGO_BIN_EXE_bowline").as_ref();
    spawn(program, folder, words, Stdio::null(), out.into())
}

fn spawn(program: &OsStr, folder: &Folder, words: &[&str], input: Stdio, out: Stdio) -> Running {
    let mut child = Command::new(program)
        .args(words)
        .env("XDG_RUNTIME_DIR", folder.path())
        .env("TMPDIR", folder.path())
        .env_remove("NOTIFY_SOCKET")
        .stdin(input)
        .stdout(out)
        .stderr(Stdio::piped())
        .spawn()
        .expect("bowline starts");
    let out = child.stdout.take().map(BufReader::new);
    let heard = Arc::<Mutex<String>>::default();
    let errors = child.stderr.take().map(|stream| {
        let heard = Arc::clone(&heard);
        thread::spawn(move || {
            let mut stream = BufReader::new(stream);
            let mut line = String::new();
            while stream.read_line(&mut line).expect("text on standard error") > 0 {
                heard.lock().expect("whole").push_str(&line);
                line.clear();
            }
        })
    });
    Running { child, out, seen: String::new(), heard, errors }
}

/// Runs `bowline` to its end.
pub(crate) fn run(folder: &Folder, words: &[&str]) -> Done {
    start(folder, words).finish()
}

impl Running {
    /// Reads lines until one contains `part`; the end of the output before it fails the test.
    #[track_caller]
    pub(crate) fn expect(&mut self, part: &str) -> &mut Self {
        if !self.hears(part) {
            let errors = self.all_told();
            panic!("no {part:?} in {:?}, errors {errors:?}", self.seen);
        }
        self
    }

    /// Reads lines until one contains `part`; returns whether one did before the output ended.
    pub(crate) fn hears(&mut self, part: &str) -> bool {
        let Some(out) = &mut self.out else { panic!("nothing to read") };
        loop {
            let mut line = String::new();
            if out.read_line(&mut line).expect("text") == 0 {
                return false;
            }
            self.seen.push_str(&line);
            if line.contains(part) {
                return true;
            }
        }
    }

    /// Returns what was read so far.
    pub(crate) fn said(&self) -> &str {
        &self.seen
    }

    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    /// Waits until a line on standard error contains `part`.
    #[track_caller]
    pub(crate) fn until_told(&self, part: &str) {
        let start = Instant::now();
        while !self.heard.lock().expect("whole").contains(part) {
            assert!(start.elapsed() < DEADLINE, "no {part:?} in {:?}", self.heard);
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// The same, for lines of a log.
    #[track_caller]
    pub(crate) fn until_logged(&self, part: &str) {
        self.until_told(part);
    }

    /// Returns what came on standard error so far.
    pub(crate) fn log(&self) -> String {
        self.heard.lock().expect("whole").clone()
    }

    /// Returns all of standard error, up to its end.
    fn all_told(&mut self) -> String {
        if let Some(errors) = self.errors.take() {
            errors.join().expect("errors were read");
        }
        self.heard.lock().expect("whole").clone()
    }

    /// Waits until the program handles signals itself: an earlier signal would just kill it.
    pub(crate) fn until_it_heeds(&self, signal: u32) {
        let start = Instant::now();
        let heeds = || {
            let status = std::fs::read_to_string(format!("/proc/{}/status", self.id()));
            let status = status.expect("it runs");
            let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:"));
            let caught = caught.map(|mask| u64::from_str_radix(mask.trim(), 16));
            caught.expect("a line").expect("a number") >> (signal - 1) & 1 == 1
        };
        while !heeds() {
            assert!(start.elapsed() < DEADLINE, "it never heeds signal {signal}");
            thread::sleep(Duration::from_millis(5));
        }
    }

    pub(crate) fn signal(&self, name: &str) {
        let status = Command::new("kill").args([name, &self.id().to_string()]).status();
        assert!(status.expect("kill runs").success());
    }

    /// Waits for the end of the command; the test fails if it does not end.
    #[track_caller]
    pub(crate) fn finish(mut self) -> Done {
        let reader = self.out.take().map(|mut out| {
            thread::spawn(move || {
                let mut text = String::new();
                out.read_to_string(&mut text).expect("text on standard output");
                text
            })
        });
        let status = self.wait();
        let rest = reader.map(|reader| reader.join().expect("output was read"));
        let err = self.all_told();
        let out = std::mem::take(&mut self.seen) + &rest.unwrap_or_default();
        Done { code: status.code(), out, err }
    }

    #[track_caller]
    fn wait(&mut self) -> ExitStatus {
        let start = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().expect("a status") {
                return status;
            }
            assert!(start.elapsed() < DEADLINE, "bowline did not end, said {:?}", self.seen);
            thread::sleep(Duration::from_millis(10));
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Sends one line to a control socket and returns the answer.
pub(crate) fn control(path: &Path, line: &str) -> serde_json::Value {
    let mut stream = std::os::unix::net::UnixStream::connect(path).expect("a control socket");
    stream.set_read_timeout(Some(DEADLINE)).expect("a timeout");
    writeln!(stream, "{line}").expect("a request");
    let mut answer = String::new();
    BufReader::new(stream).read_line(&mut answer).expect("an answer");
    serde_json::from_str(&answer).expect("JSON")
}
