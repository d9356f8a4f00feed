//! The bench of programs on the nodes of this host, which starts this command again.

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
