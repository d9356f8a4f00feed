//! Runs `bowline-bench report` on recorded runs.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// The root of the repository.
fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn report(words: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_bowline-bench"))
        .arg("report")
        .args(words)
        .current_dir(root())
        .output()
        .expect("the program was built for this test")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// A folder of this process, removed with the value.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("bowline-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).expect("a folder");
        Self(path)
    }

    fn path(&self) -> &str {
        self.0.to_str().expect("a plain path")
    }

    fn file(&self, name: &str) -> String {
        self.0.join(name).to_str().expect("a plain path").to_owned()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0); // nobody is left to tell
    }
}

fn recorded() -> Vec<PathBuf> {
    let dir = std::fs::read_dir(root().join("bench/results")).expect("the recorded runs");
    let mut files: Vec<PathBuf> = dir.map(|entry| entry.expect("a file").path()).collect();
    files.sort();
    files
}

#[test]
fn the_pages_say_what_the_recorded_runs_say() {
    let out = report(&["--check"]);
    assert_eq!(out.status.code(), Some(0), "{}{}", text(&out.stdout), text(&out.stderr));
}

#[test]
fn a_page_that_disagrees_is_told_and_written_anew() {
    let folder = Folder::new("pages");
    let stale = "# By hand\n\n<!-- report:begin -->\nold\n<!-- report:end -->\nby hand\n";
    for name in ["README.md", "TARGETS.md"] {
        std::fs::write(folder.file(name), stale).expect("a page");
    }
    std::os::unix::fs::symlink(root().join("bench/results"), folder.file("results"))
        .expect("a link");
    let read = |name: &str| std::fs::read_to_string(folder.file(name)).expect("a page");
    let dir = folder.path();

    let out = report(&["--check", "--dir", dir]);
    assert_eq!(out.status.code(), Some(1), "{}", text(&out.stderr));
    assert_eq!(text(&out.stdout).matches("from line 4 on").count(), 2, "{}", text(&out.stdout));
    assert_eq!(read("README.md"), stale, "a check writes nothing");

    assert_eq!(report(&["--dir", dir]).status.code(), Some(0));
    for (name, row) in [("README.md", "\n| RDS, messages of 64 B | "), ("TARGETS.md", "\n| R2 | ")]
    {
        let new = read(name);
        assert!(new.starts_with("# By hand\n") && new.ends_with("\nby hand\n"), "{new}");
        assert!(new.contains(row) && !new.contains("old"), "{new}");
    }
    assert_eq!(report(&["--check", "--dir", dir]).status.code(), Some(0));
}

#[test]
fn two_runs_of_one_suite_and_machine_are_refused() {
    let folder = Folder::new("twice");
    std::fs::create_dir(folder.file("results")).expect("a folder");
    let one = recorded().into_iter().next().expect("a recorded run");
    let name = one.file_name().expect("a name").to_str().expect("plain").to_owned();
    for copy in [name.clone(), format!("x-{name}")] {
        std::fs::copy(&one, folder.file(&format!("results/{copy}"))).expect("a copy");
    }
    let out = report(&["--check", "--dir", folder.path()]);
    assert_eq!(out.status.code(), Some(2));
    let said = text(&out.stderr);
    assert!(said.contains(&format!("{name} and x-{name}")), "{said}");
}

#[test]
fn every_recorded_run_can_be_drawn() {
    for file in recorded() {
        let out = report(&["--svg", "-", file.to_str().expect("a plain path")]);
        let said = text(&out.stdout);
        assert_eq!(out.status.code(), Some(0), "{}", text(&out.stderr));
        assert!(said.starts_with("<svg ") && said.ends_with("</svg>\n"), "{}", file.display());
        assert!(said.contains(">Targets<"), "{}", file.display());
    }
}

#[test]
fn a_wrong_command_line_is_told() {
    for (words, why) in [
        (&["--svg", "x"][..], "RUN"),
        (&["--loud"], "--loud"),
        (&["--dir", "/nonexistent"], "bowline bench: /nonexistent"),
    ] {
        let out = report(words);
        assert_eq!(out.status.code(), Some(2), "{words:?}");
        assert!(text(&out.stderr).contains(why), "{words:?}");
    }
}
