//! Runs the program itself, over loopback, in its shortest form.

use std::process::{Command, Output};

fn bench(words: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_bowline-bench"))
        .args(words)
        .output()
        .expect("the program was built for this test")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// The lines of a result file that hold the measurements of one label.
fn measurements(json: &str, label: &str) -> Vec<String> {
    let key = format!("\"label\": \"{label}\", \"size\"");
    json.lines().filter(|line| line.contains(&key)).map(str::to_owned).collect()
}

#[test]
fn a_short_run_measures_anchor_and_library_without_an_error() {
    let words = "rds --peers none --rounds 1 --secs 0.05 --only stream/64,rtt-sleep/64 --json -";
    let out = bench(&words.split(' ').collect::<Vec<_>>());
    let said = text(&out.stdout);
    assert!(matches!(out.status.code(), Some(0 | 1 | 3)), "{said}{}", text(&out.stderr));
    assert!(!said.contains("\"error\""), "{said}");
    assert_eq!(measurements(&said, "tcpb").len(), 2, "an anchor is measured twice a round");
    assert_eq!(measurements(&said, "bowline").len(), 2, "one way and round trip");
    assert!(said.contains("R1 ") && said.contains("undecided"), "{said}");
}

#[test]
fn cells_can_be_listed_and_chosen() {
    let out = bench(&["rds", "--list", "--only", "rtt-spin"]);
    let said = text(&out.stdout);
    assert_eq!(out.status.code(), Some(0));
    let names: Vec<&str> = said.lines().filter_map(|l| l.split_whitespace().next()).collect();
    assert_eq!(names, ["rtt-spin/64", "rtt-spin/4096"]);
}

#[test]
fn a_wrong_command_line_is_told_apart_from_a_missed_target() {
    for words in [&["rds", "--rounds", "none"][..], &["rds", "--only", "nothing"], &["roce"]] {
        let out = bench(words);
        assert_eq!(out.status.code(), Some(2), "{words:?}");
        assert!(text(&out.stderr).starts_with("bowline bench: "), "{words:?}");
    }
}
