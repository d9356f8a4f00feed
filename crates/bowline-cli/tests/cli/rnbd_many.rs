//! A hundred disks in one process.

use crate::support::{Folder, run, start};

const DISKS: usize = 100;

#[test]
fn a_hundred_disks_with_two_paths_each_work_in_one_process() {
    let folder = Folder::new();
    let exports: Vec<String> = (0..DISKS).map(|n| format!("d{n}=64KiB")).collect();
    let exports = exports.iter().flat_map(|export| ["--memory", export]);
    let mut words = vec!["rnbd", "export", "-I", "127.60.5.1", "-I", "127.60.5.2"];
    words.extend(exports);
    let mut server = start(&folder, &words);
    server.expect("listening on 127.60.5.1:1234");
    let map = |n| {
        format!(
            "[[map]]\ndevice = \"d{n}\"\nfrom = \"s\"\npath = [\"127.60.5.11@127.60.5.1\", \
             \"127.60.5.12@127.60.5.2\"]\n"
        )
    };
    let maps: String = (0..DISKS).map(map).collect();
    let config = format!("[disks]\naddress = [\"127.60.5.11\", \"127.60.5.12\"]\n{maps}");
    let config = folder.write("node.toml", &config);
    let config = config.to_str().expect("a plain path");
    let words = ["node", "--address", "127.60.5.11", "--no-programs", "--config", config];
    let mut node = start(&folder, &words);
    node.expect("ready");
    // The last of them may come after the node is ready.
    while node.said().matches("mapped d").count() < DISKS {
        node.expect("mapped d");
    }
    let listed = run(&folder, &["rnbd", "client", "list", "csv", "noheaders"]).exits(0);
    let open = listed.out.lines().filter(|line| line.contains("\"open\"")).count();
    assert_eq!((open, listed.err.as_str()), (DISKS, ""), "{listed:?}");
    let paths = run(&folder, &["rnbd", "client", "path", "list", "csv", "noheaders"]).exits(0).out;
    assert_eq!(paths.matches("\"connected\"").count(), 2, "one session for all: {paths}");
    for part in [node, server] {
        part.signal("-TERM");
        part.finish().exits(0);
    }
}
