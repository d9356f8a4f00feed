//! Runs the program itself, over loopback, in its shortest form.

use std::process::{Command, Output};
use std::sync::{Mutex, PoisonError};

/// Held by tests that measure: both would bind to the same CPUs.
static MEASURING: Mutex<()> = Mutex::new(());

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

/// Returns the duration of a measurement.
fn seconds(line: &str) -> f64 {
    let text = line.split("\"seconds\": ").nth(1).and_then(|rest| rest.split(',').next());
    text.and_then(|text| text.parse().ok()).unwrap_or(0.0)
}

#[test]
fn a_short_run_measures_anchor_and_library_without_an_error() {
    let _alone = MEASURING.lock().unwrap_or_else(PoisonError::into_inner);
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
fn without_the_library_the_command_that_builds_it_is_named() {
    let folder = std::env::temp_dir().join(format!("bowline-bench-alone-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a folder");
    let alone = folder.join("bowline-bench");
    std::fs::copy(env!("CARGO_BIN_EXE_bowline-bench"), &alone).expect("a copy");
    let out = Command::new(&alone).args(["rds", "--host"]).output().expect("it starts");
    std::fs::remove_dir_all(&folder).expect("the folder");
    assert_eq!(out.status.code(), Some(2));
    let said = text(&out.stderr);
    assert!(said.contains("`cargo build --release --package bowline-preload`"), "{said}");
}

#[test]
fn without_fio_no_door_is_measured_and_its_package_is_named() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_bowline-bench"));
    let out =
        command.args(["rnbd", "--doors"]).env("PATH", "/nowhere").output().expect("it starts");
    let said = text(&out.stdout);
    assert_eq!(out.status.code(), Some(0), "{said}{}", text(&out.stderr));
    for peer in ["door-nbd", "door-fuse", "door-fuse-ring", "nbdkit", "nbdfuse", "qemu-nbd"] {
        let line = format!("peer {peer}: skipped, fio is not installed; apt-get install fio");
        assert!(said.lines().any(|other| other == line), "no {line:?} in {said}");
    }
}

#[test]
fn verbs_and_their_anchors_are_measured_without_an_error() {
    let _alone = MEASURING.lock().unwrap_or_else(PoisonError::into_inner);
    let words = "roce --quick --secs 0.05 --json -";
    let out = bench(&words.split(' ').collect::<Vec<_>>());
    let said = text(&out.stdout);
    assert!(matches!(out.status.code(), Some(0 | 1 | 3)), "{said}{}", text(&out.stderr));
    assert!(!said.contains("\"error\""), "{said}");
    assert_eq!(measurements(&said, "udp-gso").len(), 6, "twice in three cells");
    for (label, times) in [("write", 2), ("read", 2), ("send", 2), ("write-imm", 1)] {
        assert_eq!(measurements(&said, label).len(), times, "{label}");
    }
    let lossy = &measurements(&said, "loss-1%")[0];
    let dropped = |key: &str| {
        let from = lossy.split(&format!("{key}\": \"")).nth(1).unwrap_or_default();
        let word = from.split(['"', ' ']).find_map(|word| word.strip_prefix("dropped="));
        word.and_then(|n| n.parse::<u64>().ok()).unwrap_or(0)
    };
    assert!(dropped("other_said") + dropped("\"said") > 0, "{lossy}");
    for target in ["V1 ", "V4 ", "V7 ", "C7 ", "C8 "] {
        assert!(said.contains(target), "{target}: {said}");
    }
}

#[test]
fn atomics_immediates_and_several_queue_pairs_are_measured_with_loss_at_any_mtu() {
    let _alone = MEASURING.lock().unwrap_or_else(PoisonError::into_inner);
    let words = "roce --rounds 1 --secs 0.05 --only bulk,send,atomic --mtu 512 --loss 0.1 --json -";
    let out = bench(&words.split(' ').collect::<Vec<_>>());
    let said = text(&out.stdout);
    // This cell belongs to no target.
    assert_eq!(out.status.code(), Some(0), "{said}{}", text(&out.stderr));
    assert!(!said.contains("\"error\"") && !said.contains("V1 "), "{said}");
    assert!(said.contains("all cells at path MTU 512") && said.contains("bulk/512"), "{said}");
    for (label, times) in [("write-4qp", 1), ("send-4qp", 1), ("send-imm", 1), ("fetch-add", 2)] {
        assert_eq!(measurements(&said, label).len(), times, "{label}");
    }
}

#[test]
fn requests_of_rtrs_are_counted_on_both_sides_and_survive_the_loss_of_a_path() {
    let _alone = MEASURING.lock().unwrap_or_else(PoisonError::into_inner);
    let cells = "read/4096x32,write/131072x16,write/2048,ping,failover";
    let words = ["rtrs", "--quick", "--peers", "none", "--secs", "0.05", "--json", "-", "--only"];
    let out = bench(&[&words[..], &[cells]].concat());
    let said = text(&out.stdout);
    assert!(matches!(out.status.code(), Some(0 | 1 | 3)), "{said}{}", text(&out.stderr));
    assert!(!said.contains("\"error\""), "{said}");
    assert_eq!(measurements(&said, "rr-udp").len(), 6, "twice where nobody takes turns");
    for (label, times) in [("rr-tcp", 3), ("rtrs", 5), ("rtrs-kept-keys-adaptive", 1)] {
        assert_eq!(measurements(&said, label).len(), times, "{label}");
    }
    let turns = measurements(&said, "rtrs-kept-keys");
    assert!(turns.iter().all(|line| seconds(line) >= 0.08), "two turns of 40 ms each: {turns:?}");
    for rtrs in measurements(&said, "rtrs").iter().take(3) {
        assert!(!rtrs.contains("syscalls\": null"), "both sides count: {rtrs}");
    }
    let reset = &measurements(&said, "reset")[0];
    assert!(reset.contains("failed=0") && reset.contains("pause_ns="), "{reset}");
    for target in ["T1 ", "T4 ", "T5 ", "T7 ", "T9 ", "N3 ", "C9 ", "C10 "] {
        assert!(said.contains(&format!("\n  {target}")), "{target}: {said}");
    }
}

#[test]
fn a_mapped_disk_is_measured_beside_its_transport() {
    let _alone = MEASURING.lock().unwrap_or_else(PoisonError::into_inner);
    let words = "rnbd --quick --peers none --secs 0.05 --json -";
    let out = bench(&words.split(' ').collect::<Vec<_>>());
    let said = text(&out.stdout);
    assert!(matches!(out.status.code(), Some(0 | 1 | 3)), "{said}{}", text(&out.stderr));
    assert!(!said.contains("\"error\""), "{said}");
    for (label, times) in [("rtrs", 2), ("rnbd", 4), ("rnbd-adaptive", 2)] {
        assert_eq!(measurements(&said, label).len(), times, "{label}");
    }
    assert!(said.contains("\n  N1 ") && said.contains("N2 "), "{said}");
}

#[test]
fn the_cells_of_roce_can_be_listed() {
    let out = bench(&["roce", "--list", "--only", "bulk,ping"]);
    let said = text(&out.stdout);
    let names: Vec<&str> = said.lines().filter_map(|l| l.split_whitespace().next()).collect();
    assert_eq!(names, ["bulk/4096", "bulk/1024", "ping/64"]);
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
    for (words, why) in [
        (&["rds", "--rounds", "none"][..], "--rounds"),
        (&["rds", "--only", "nothing"], "bowline bench: no cell has this name"),
        (&["roce", "--paths", "8"], "--paths"),
        (&["nothing"], "nothing"),
    ] {
        let out = bench(words);
        assert_eq!(out.status.code(), Some(2), "{words:?}");
        assert!(text(&out.stderr).contains(why), "{words:?}");
    }
}

#[test]
fn a_network_is_measured_where_one_can_be_made_and_skipped_elsewhere() {
    let _alone = MEASURING.lock().unwrap_or_else(PoisonError::into_inner);
    let words =
        "net --only rnbd-write/4096x32 --beside tcp --clients 2 --rounds 1 --secs 0.2 --json -";
    let out = bench(&words.split(' ').collect::<Vec<_>>());
    let said = text(&out.stdout);
    let cell = "1g-256k/1500/2/rnbd-write/4096x32+tcp";
    if let Some(skipped) = said.lines().find(|line| line.contains(" skipped: ")) {
        println!("nothing was measured: {skipped}");
        assert!(skipped.starts_with(cell), "{skipped}");
        assert_eq!(out.status.code(), Some(0));
        return;
    }
    assert!(matches!(out.status.code(), Some(0 | 1 | 3)), "{said}{}", text(&out.stderr));
    let own = format!("{{\"cell\": \"{cell}\", \"label\": \"rnbd\", \"round\": 0");
    let own = said.lines().find(|line| line.contains(&own)).expect("a measurement");
    assert!(!own.contains("\"error\"") && !own.contains("\"router_sent\": 0,"), "{own}");
    assert!(!own.contains("\"flow_bytes_per_second\": null"), "{own}");
    assert!(!own.contains("\"p99_ns\": null"), "each request is timed: {own}");
    assert_eq!(own.matches("lat=").count(), 2, "both clients count: {own}");
    assert!(said.contains("  W5 "), "{said}");
}
