//! A node that has given up what it does not need, and does all it did.

use std::{fs, path::Path, process::Command};

use bowline_testkit::skipped;

use crate::{
    links::{apart, succeeded},
    nodes::build_library,
    support::{Folder, Running, run, start},
};

fn node(folder: &Folder, address: &str, more: &[&str]) -> Running {
    let mut node = start(folder, &[&["node", "--address", address], more].concat());
    node.expect("ready");
    node
}

/// Returns the values of a line of /proc/PID/status, of all threads.
fn of_threads(id: u32, line: &str) -> Vec<String> {
    let tasks = fs::read_dir(format!("/proc/{id}/task")).expect("it runs");
    // A thread may end meanwhile.
    let texts = tasks.filter_map(|task| fs::read_to_string(task.ok()?.path().join("status")).ok());
    let value = |text: String| {
        let found = text.lines().find_map(|l| l.strip_prefix(line)?.strip_prefix(":"));
        found.map(|value| value.trim().to_owned())
    };
    texts.filter_map(value).collect()
}

fn is_confined(id: u32) -> bool {
    let all = |line, wanted: &str| {
        let values = of_threads(id, line);
        values.len() > 1 && values.iter().all(|value| value == wanted)
    };
    all("NoNewPrivs", "1") && all("Seccomp", "2")
}

/// Reports whether the kernel lacks something that a confined node asks for.
fn lacks(node: &Running) -> bool {
    let off = node.said().lines().find(|line| line.starts_with("not confined: "));
    if let Some(line) = off {
        skipped::because(line);
    }
    off.is_some()
}

#[test]
fn a_confined_node_does_all_it_does() {
    build_library();
    let folder = Folder::new();
    let more = ["--echo", "5", "--metrics", "127.151.1.1:9465"];
    let mut first = node(&folder, "127.151.1.1", &more);
    if lacks(&first) {
        return;
    }
    assert!(
        first.said().contains("confined: no new privileges, Landlock ABI "),
        "{}",
        first.said()
    );
    assert!(first.said().contains(", no capabilities, system calls\n"), "{}", first.said());
    let program = "from socket import *\n\
                   s = socket(AF_RDS, SOCK_SEQPACKET)\n\
                   s.bind(('127.151.1.1', 4000))\n\
                   s.sendto(b'hello' * 20000, ('127.151.1.1', 5))\n\
                   print(len(s.recv(100000)), flush=True)\n\
                   s.recv(100)\n";
    let mut program = start(&folder, &["run", "--", "python3", "-c", program]);
    program.expect("100000");
    run(&folder, &["ping", "-c", "1", "-I", "127.151.1.2", "127.151.1.1"]).exits(0);
    first.expect("127.151.1.2: paths up");
    let shown = run(&folder, &["info"]).exits(0);
    assert!(shown.out.contains("127.151.1.2"), "{shown:?}");
    let setting = "net.rds.max_unacked_packets=9";
    assert!(run(&folder, &["sysctl", setting]).exits(0).out.contains("= 9"));
    run(&folder, &["drop"]).exits(0);
    let words = ["--max-time", "30", "--silent", "--fail", "http://127.151.1.1:9465/metrics"];
    match Command::new("curl").args(words).output() {
        Ok(done) => {
            let text = String::from_utf8_lossy(&done.stdout);
            for family in ["process_resident_memory_bytes", "process_open_fds"] {
                assert!(text.contains(family), "{text}");
            }
        }
        Err(_) => skipped::without("curl"),
    }
    assert!(is_confined(first.id()), "{:?}", of_threads(first.id(), "Seccomp"));
    let is_none = |set: &String| set == "0000000000000000";
    let sets: &[_] = &["CapInh", "CapPrm", "CapEff", "CapAmb"];
    // Without a privilege the bounding set stays, and is of no use.
    let bounding = rustix::process::geteuid().is_root().then_some("CapBnd");
    for set in sets.iter().copied().chain(bounding) {
        assert!(of_threads(first.id(), set).iter().all(is_none), "{set}");
    }
    program.signal("-KILL");
    program.finish();
    let sockets = ["bowline/127.151.1.1.sock", "bowline/rds/host.sock"];
    let there = |place: &&str| folder.path().join(place).exists();
    assert!(sockets.iter().all(there));
    first.signal("-TERM");
    first.finish().exits(0);
    // It may remove none, since it could remove those of others; they mislead nobody.
    assert!(sockets.iter().all(there), "it has removed one");
    for words in [&["info"][..], &["drop"], &["sysctl", "net.rds.max_unacked_packets"]] {
        run(&folder, words).exits(1).complains(&["no node runs here"]);
    }
    let control = folder.path().join(sockets[0]);
    let words = ["info", "--control", &control.to_string_lossy()];
    run(&folder, &words).exits(1).complains(&["no node answers", "is `bowline node` running?"]);
    let words = ["run", "--node=require", "--", "python3", "-c", "print(1)"];
    run(&folder, &words).exits(1).complains(&["start one with `bowline node`"]);
    run(&folder, &["ping", "-c", "1", "-I", "127.151.1.1", "127.151.1.1"]).exits(0);
    // Those of other names, which are nobody's usual ones, go when the next node comes.
    let left = ["bowline/127.151.9.9-17.sock", "bowline/rds/host-17.sock"];
    for name in left {
        drop(std::os::unix::net::UnixListener::bind(folder.path().join(name)).expect("a socket"));
    }
    let next = node(&folder, "127.151.1.1", &["--no-sandbox"]);
    assert!(!left.iter().any(there), "sockets of nobody");
    run(&folder, &["info"]).exits(0);
    run(&folder, &["run", "--", "python3", "-c", "print(1)"]).exits(0);
    next.signal("-TERM");
    next.finish().exits(0);
    assert!(!sockets.iter().any(there), "one that may remove them does");
}

#[test]
fn a_confined_node_of_root_mounts_and_unmounts_its_tree() {
    if !rustix::process::geteuid().is_root() {
        return skipped::because("another user than root needs fusermount3");
    }
    let folder = Folder::new();
    let dir = folder.path().join("tree");
    let words = ["node", "--address", "127.151.2.1", "--tree", &dir.to_string_lossy()];
    let mut node = start(&folder, &words);
    if !node.hears("ready") {
        let error = node.finish().err;
        assert!(!error.contains("Function not implemented"), "a call is missing: {error}");
        return skipped::without_fuse(error);
    }
    assert!(node.said().contains("no capabilities except SYS_ADMIN to mount"), "{}", node.said());
    let info = dir.join("class/rds/node/info");
    assert!(fs::read_to_string(info).expect("a file").contains("127.151.2.1"));
    assert!(node.said().contains("not confined: paths"), "{}", node.said());
    assert!(is_confined(node.id()), "{}", node.said());
    node.signal("-TERM");
    node.finish().exits(0);
    let left = fs::read_dir(&dir).expect("the folder itself stays");
    assert_eq!(left.count(), 0, "the tree is gone");
}

/// Another user's tree is unmounted by fusermount3, which no new privileges would make useless.
#[test]
fn a_node_of_another_user_with_a_tree_is_not_confined() {
    let folder = Folder::new();
    let dir = folder.path().join("tree");
    let user: &[&str] = if rustix::process::geteuid().is_root() {
        let nobody = Some(rustix::fs::Uid::from_raw(65_534));
        rustix::fs::chown(folder.path(), nobody, None).expect("chown");
        &["--reuid", "nobody", "--clear-groups"]
    } else {
        &[]
    };
    let bowline = env!("CARGO_BIN_EXE_bowline");
    let tree = dir.to_string_lossy();
    let words = [user, &[bowline, "node", "--address", "127.151.3.1", "--tree", &*tree]].concat();
    let mut node = crate::support::start_as("setpriv".as_ref(), &folder, &words);
    if !node.hears("ready") {
        return skipped::without_fuse(node.finish().err);
    }
    assert!(node.said().contains("not confined: fusermount3"), "{}", node.said());
    node.signal("-TERM");
    node.finish().exits(0);
    assert_eq!(fs::read_dir(&dir).expect("the folder itself stays").count(), 0);
}

/// A node that serves every address of the machine hears of new ones, and binds them.
#[test]
fn a_confined_node_follows_addresses_that_come_and_go() {
    let folder = Folder::new();
    let script = r#"
        begin node "$BOWLINE" node
        heard node ready
        for round in 1 2; do
            ip address add 10.77.9.1/32 dev lo
            "$BOWLINE" ping -c 1 -I 127.0.0.2 10.77.9.1 > "$AT/ping.out" 2>&1 || fail "come $round"
            "$BOWLINE" info -c > "$AT/info.out" || fail info
            ip address del 10.77.9.1/32 dev lo
        done
        cat "$AT/node.out"
        kill $(cat "$AT/node.pid")
        wait $(cat "$AT/node.pid") || fail "the end"
    "#;
    let Some(done) = apart(&folder, script) else { return };
    assert!(succeeded(&done).contains("confined: "));
}

#[test]
fn who_asks_for_it_has_a_node_that_is_not_confined() {
    let folder = Folder::new();
    let config = folder.write("node.toml", "sandbox = false\n");
    let config = config.to_string_lossy();
    let mine = |line| of_threads(std::process::id(), line)[0].clone();
    for more in [&["--no-sandbox"][..], &["--config", &*config]] {
        let node = node(&folder, "127.151.4.1", more);
        assert!(node.said().contains("not confined: disabled by --no-sandbox"), "{}", node.said());
        for line in ["NoNewPrivs", "Seccomp"] {
            assert!(of_threads(node.id(), line).iter().all(|value| *value == mine(line)));
        }
        node.signal("-TERM");
        node.finish().exits(0);
    }
    assert!(!Path::new(&folder.path().join("bowline/127.151.4.1.sock")).exists());
}
