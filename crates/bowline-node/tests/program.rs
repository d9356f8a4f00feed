//! The program `bowline-node`, as a service manager starts it.

use std::{
    io::{BufRead, BufReader},
    path::PathBuf,
    process::{Child, Command, Output, Stdio},
};

use bowline_node::config::EXAMPLE;
use rustix::process::{Pid, Signal, kill_process};

/// A folder for sockets, which is removed at the end.
struct Folder(PathBuf);

impl Folder {
    fn new(test: &str) -> Self {
        let path = std::env::temp_dir().join(format!("bowline-node-{test}-{}", std::process::id()));
        std::fs::create_dir(&path).expect("a new folder");
        Self(path)
    }

    fn program(&self, words: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_bowline-node"));
        command.args(words).env("XDG_RUNTIME_DIR", &self.0);
        command
    }

    fn run(&self, words: &[&str]) -> Output {
        self.program(words).output().expect("the program runs")
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A process that does not outlive its test.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn it_serves_until_a_signal() {
    let folder = Folder::new("serves");
    let mut command = folder.program(&["--address", "127.61.1.1", "--echo", "4000"]);
    let mut node = Running(command.stdout(Stdio::piped()).spawn().expect("the program starts"));
    let out = node.0.stdout.take().expect("its output");
    let mut lines = BufReader::new(out).lines().map(|line| line.expect("a line"));
    assert!(lines.any(|line| line == "echo on 127.61.1.1:4000"), "no service");
    assert!(lines.any(|line| line.starts_with("ready; ")), "it is not ready");
    kill_process(Pid::from_child(&node.0), Signal::TERM).expect("a signal");
    assert!(lines.any(|line| line == "stopped; peers have acknowledged everything"), "no end");
    assert!(node.0.wait().expect("its end").success());
}

#[test]
fn it_has_the_example_and_says_what_is_wrong_in_one_line() {
    let folder = Folder::new("says");
    let example = folder.run(&["--example-config"]);
    assert!(example.status.success());
    assert_eq!(text(&example.stdout), EXAMPLE);
    for (words, wanted) in [
        (["--adress", "127.61.2.1"], "unexpected argument '--adress' found"),
        (["--paths", "3"], "paths must be 8 or 1"),
    ] {
        let done = folder.run(&words);
        let err = text(&done.stderr);
        assert_eq!(done.status.code(), Some(2), "{err}");
        assert!(err.starts_with("bowline-node: ") && err.lines().count() == 1, "{err}");
        assert!(err.contains(wanted), "{err}");
    }
    let help = text(&folder.run(&["--help"]).stdout);
    assert!(help.contains("Usage: bowline-node [OPTIONS]"), "{help}");
    assert!(text(&folder.run(&["--version"]).stdout).starts_with("bowline-node 0."));
}
