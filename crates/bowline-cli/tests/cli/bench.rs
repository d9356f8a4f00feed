//! Benches that start this command again: of programs on the nodes of this host, and of fio on the
//! doors of a disk.

use bowline_testkit::skipped;

use crate::nodes::build_library;
use crate::support::{Folder, run};

#[test]
fn programs_of_a_host_are_measured_beside_what_they_are_compared_with() {
    build_library();
    let folder = Folder::new();
    let words = "bench rds --host --peers none --rounds 1 --secs 0.05 --only host --json -";
    let done = run(&folder, &words.split(' ').collect::<Vec<_>>()).exits(0);
    assert!(!done.out.contains("\"error\""), "{}", done.out);
    let times =
        |label: &str| done.out.matches(&format!("\"label\": \"{label}\", \"size\"")).count();
    for (label, wanted) in [
        ("bowline", 2),
        ("host", 2),
        ("seqp", 3),
        ("futex", 2),
        ("host-one", 4),
        ("host-one-8M", 2),
        ("tcp-python", 1),
        ("host-python", 1),
        ("pipe", 1),
        ("pipe-preloaded", 1),
    ] {
        assert_eq!(times(label), wanted, "{label}: {}", done.out);
    }
}

#[test]
fn fio_is_measured_on_the_doors_of_a_disk_and_beside_nbdkit() {
    let folder = Folder::new();
    let words = "bench rnbd --doors --peers nbdkit --rounds 1 --secs 0.2 --size 64m --clients 2 \
                 --busy 1 --only doors/write/4096x32 --json -";
    let done = run(&folder, &words.split_whitespace().collect::<Vec<_>>());
    // What cannot be measured here says why.
    let why = |peer: &str| {
        let said = format!("peer {peer}: skipped, ");
        done.out.lines().find_map(|line| line.strip_prefix(&said).map(str::to_owned))
    };
    for (peer, program) in [("nbdkit", "nbdkit"), ("door-nbd", "fio")] {
        if let Some(why) = why(peer) {
            assert!(why.contains("; apt-get install "), "{why}");
            return skipped::without(program);
        }
    }
    let cell = "doors/write/4096x32-2-clients+1-busy";
    let of = |label: &str| {
        let begin = format!("{{\"cell\": \"{cell}\", \"label\": \"{label}\", ");
        done.out.lines().find(|line| line.contains(&begin)).unwrap_or_default().to_owned()
    };
    let nbdkit = of("nbdkit");
    assert!(nbdkit.contains("cpu_nbdkit=") && nbdkit.contains("cpu_fio="), "{done:?}");
    let mut doors = vec!["door-nbd"];
    match why("door-fuse") {
        Some(why) => skipped::without_fuse(&why),
        None => doors.push("door-fuse"),
    }
    for door in doors {
        let line = of(door);
        assert!(line.contains("\"flows\": 2, ") && line.contains("\"lat_ns\": ["), "{done:?}");
        for process in ["cpu_export=", "cpu_map=", "cpu_fio="] {
            assert!(line.contains(process), "no {process} in {line}");
        }
    }
    // Targets are about one client without loops beside it.
    let done = done.exits(0);
    assert!(
        done.out.contains("\n  NBD socket ") && done.out.contains("of nbdkit: rate"),
        "{done:?}"
    );
}
