//! A negative control: with a library that makes UDP sockets of RDS sockets, the tests of the
//! interface pass, and those of what RDS promises fail. Tests that pass with it prove little.

use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use bowline_testkit::skipped;

/// Time after which a program that waits for what was lost has failed; with a node it needs a
/// tenth.
const LIMIT: Duration = Duration::from_secs(10);

/// The library, in a folder that goes with it.
struct Stub {
    folder: PathBuf,
}

impl Stub {
    /// Compiled, or the reason why not.
    fn new(name: &str) -> Result<Self, String> {
        let folder = std::env::temp_dir().join(format!("bowline-{name}-{}", std::process::id()));
        std::fs::create_dir(&folder).unwrap();
        let stub = Self { folder };
        let mut gcc = Command::new("gcc");
        gcc.args(["-shared", "-fPIC", "-O1", "-o"]).arg(stub.library()).arg(program("stub.c"));
        match gcc.output() {
            Ok(output) if output.status.success() => Ok(stub),
            Ok(output) => panic!("{}", String::from_utf8_lossy(&output.stderr)),
            Err(error) => Err(format!("there is no gcc: {error}")),
        }
    }

    fn library(&self) -> PathBuf {
        self.folder.join("stub.so")
    }

    /// Runs Python with the library; tells whether it ended well in time.
    fn passes(&self, arguments: &[&str]) -> bool {
        let mut command = Command::new("python3");
        command.args(arguments).env("LD_PRELOAD", self.library()).process_group(0);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let mut child = command.spawn().expect("python3 starts");
        let begun = Instant::now();
        let status = loop {
            let status = child.try_wait().unwrap();
            if status.is_some() || begun.elapsed() > LIMIT {
                break status;
            }
            std::thread::sleep(Duration::from_millis(5));
        };
        // With its children, which may wait as well.
        let group = format!("-{}", child.id());
        let _ = Command::new("kill").args(["-KILL", "--", &group]).stderr(Stdio::null()).status();
        if status.is_none() {
            child.wait().unwrap();
        }
        status.is_some_and(|status| status.success())
    }

    fn script_passes(&self, script: &str, net: u8) -> bool {
        let addresses = [1, 2].map(|host| format!("127.80.{net}.{host}"));
        self.passes(&[program(script).to_str().unwrap(), &addresses[0], &addresses[1]])
    }
}

impl Drop for Stub {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

fn program(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/programs").join(name)
}

#[test]
fn the_tests_of_cpython_are_content_with_udp() {
    let stub = match Stub::new("content") {
        Ok(stub) => stub,
        Err(reason) => return skipped::because(&reason),
    };
    if !stub.passes(&["-c", "import test.test_socket"]) {
        return skipped::because("python3 has no module test.test_socket");
    }
    let tests = ["test.test_socket.BasicRDSTest", "test.test_socket.RDSTest"];
    assert!(stub.passes(&["-m", "unittest", tests[0], tests[1]]));
}

#[test]
fn our_tests_are_not_content_with_udp() {
    let stub = match Stub::new("not-content") {
        Ok(stub) => stub,
        Err(reason) => return skipped::because(&reason),
    };
    let scripts = ["shared.py", "descriptors.py", "congestion.py", "errors.py"];
    std::thread::scope(|scope| {
        for (script, net) in scripts.into_iter().zip(1..) {
            let stub = &stub;
            scope.spawn(move || assert!(!stub.script_passes(script, net), "{script} passes"));
        }
    });
}
